// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Registrations by command and by work request, lists, accesses from both sides, invalidations,
//! releases and failures in random order, against a model that knows which byte each tag reaches.

use crate::attack::{all_seeds, seeds};
use crate::wire::*;
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::testing::{Region, SendWork};
use ferrite_engine::HostMemory;
use std::collections::BTreeMap;
use CompletionStatus::{Flushed, Success};

/// Bytes of memory that regions are made of.
const BYTES: usize = 8192;
/// Most pieces of a list.
const PIECES: usize = 4;
/// The first of the indices that are used.
const FIRST: u32 = 0x80;
const INDICES: u64 = 10;
const RIGHTS: [u32; 5] = [
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_WRITE,
    ACCESS_REMOTE_READ,
    ACCESS_ZERO_BASED,
    ACCESS_ONE_TOUCH,
];

/// Some bytes of memory, and which registration of which region they were got from, if from one.
#[derive(Clone, Copy, Debug)]
struct Bytes {
    from: usize,
    length: usize,
    of: Option<(Tag, u64)>,
}

#[derive(Clone, Debug)]
struct Valid {
    serial: u64,
    access: u32,
    address: u64,
    bytes: Vec<Bytes>,
}

#[derive(Clone, Debug)]
struct Entry {
    list: bool,
    allocated: bool,
    instance: u8,
    valid: Option<Valid>,
}

/// What the table should be like, and memory.
struct Model {
    entries: BTreeMap<u32, Entry>,
    /// Tags whose registration by command failed where nothing else was.
    failed: BTreeMap<u32, Tag>,
    serial: u64,
    memory: Vec<u8>,
}

impl Model {
    /// What a tag stands for, if it does.
    fn valid(&self, tag: Tag) -> Option<&Valid> {
        let entry = self.entries.get(&tag.index())?;
        let valid = entry.valid.as_ref()?;
        let whole = valid.bytes.iter().all(|bytes| match bytes.of {
            Some((region, serial)) => {
                let valid = self.valid(region);
                valid.is_some_and(|valid| valid.serial == serial)
            }
            None => true,
        });
        (entry.instance == tag.instance() && whole).then_some(valid)
    }

    /// The offset of a range in what a tag stands for, if it is allowed.
    fn offset(&self, tag: Tag, address: u64, length: usize, needed: u32) -> Option<usize> {
        let valid = self.valid(tag)?;
        let base = match valid.access & ACCESS_ZERO_BASED {
            0 => valid.address,
            _ => 0,
        };
        let offset = usize::try_from(address.checked_sub(base)?).ok()?;
        let total: usize = valid.bytes.iter().map(|bytes| bytes.length).sum();
        let inside = offset.checked_add(length)? <= total;
        (inside && valid.access & needed == needed).then_some(offset)
    }

    /// Where the bytes of a range are, if it is allowed.
    fn find(&self, sge: &Sge, needed: u32) -> Option<Vec<usize>> {
        let length = sge.length as usize;
        if length == 0 {
            return Some(Vec::new());
        }
        let tag = Tag(sge.lkey);
        let offset = self.offset(tag, sge.address, length, needed)?;
        let all = self.valid(tag)?.bytes.iter();
        let all = all.flat_map(|bytes| bytes.from..bytes.from + bytes.length);
        Some(all.skip(offset).take(length).collect())
    }

    /// A message that wrote these ranges is complete. Returns what it has used up.
    fn touch(&mut self, sges: &[Sge], needed: u32) -> Vec<Tag> {
        let used_up: Vec<_> = sges
            .iter()
            .flat_map(|sge| self.touched(sge, needed))
            .collect();
        for tag in &used_up {
            if let Some(entry) = self.entries.get_mut(&tag.index()) {
                entry.valid = None;
            }
        }
        used_up
    }

    /// What takes one message of that which a range is of.
    fn touched(&self, sge: &Sge, needed: u32) -> Vec<Tag> {
        let (tag, length) = (Tag(sge.lkey), sge.length as usize);
        let mut used_up = Vec::new();
        if length == 0 {
            return used_up;
        }
        let Some(offset) = self.offset(tag, sge.address, length, needed) else {
            return used_up;
        };
        let valid = self.valid(tag).expect("just found");
        if valid.access & ACCESS_ONE_TOUCH != 0 {
            used_up.push(tag);
        }
        let mut first = 0;
        for bytes in &valid.bytes {
            let reached = first < offset + length && offset < first + bytes.length;
            if let (true, Some((region, _))) = (reached, bytes.of) {
                let region_access = self.valid(region).map_or(0, |valid| valid.access);
                if region_access & ACCESS_ONE_TOUCH != 0 {
                    used_up.push(region);
                }
            }
            first += bytes.length;
        }
        used_up
    }

    fn make_valid(&mut self, tag: Tag, access: u32, address: u64, bytes: Vec<Bytes>) {
        self.serial += 1;
        let serial = self.serial;
        let entry = self.entries.get_mut(&tag.index()).expect("an entry");
        entry.instance = tag.instance();
        entry.valid = Some(Valid {
            serial,
            access,
            address,
            bytes,
        });
    }

    /// Carries out a registration of pages by work request, if it is allowed.
    fn fast_register(&mut self, part: &FastRegisterPart, from: usize) -> bool {
        let tag = Tag(part.tag);
        let entry = self.entries.get(&tag.index());
        let allowed =
            entry.is_some_and(|entry| !entry.list && entry.allocated && entry.valid.is_none());
        if allowed {
            let bytes = Bytes {
                from,
                length: part.buffer.length as usize,
                of: None,
            };
            self.make_valid(tag, part.access, part.address, vec![bytes]);
        }
        allowed
    }

    /// Carries out a registration of pieces, if it is allowed.
    fn register_list(&mut self, part: &ListPart, pieces: &[Sge]) -> bool {
        let tag = Tag(part.tag);
        let Some(entry) = self.entries.get(&tag.index()) else {
            return false;
        };
        let present = Tag::new(tag.index(), entry.instance);
        if !entry.list || self.valid(present).is_some() || pieces.len() > PIECES {
            return false;
        }
        let mut needed = part.access & (ACCESS_REMOTE | ACCESS_LOCAL_WRITE);
        if needed & ACCESS_REMOTE_WRITE != 0 {
            needed |= ACCESS_LOCAL_WRITE;
        }
        let mut all = Vec::new();
        for piece in pieces {
            let region = Tag(piece.lkey);
            let is_region = self.entries.get(&region.index()).is_some_and(|e| !e.list);
            let places = self.find(piece, needed).filter(|_| is_region);
            let Some(places) = places.filter(|places| !places.is_empty()) else {
                return false;
            };
            all.push(Bytes {
                from: places[0],
                length: places.len(),
                of: Some((region, self.valid(region).expect("just found").serial)),
            });
        }
        self.make_valid(tag, part.access, part.address, all);
        true
    }

    /// Carries out an invalidation, if it is allowed.
    fn invalidate(&mut self, tag: Tag) -> bool {
        match self.entries.get_mut(&tag.index()) {
            Some(entry) if entry.allocated && entry.instance == tag.instance() => {
                entry.valid.take().is_some()
            }
            _ => false,
        }
    }

    fn gather(&self, places: &[usize]) -> Vec<u8> {
        places.iter().map(|&at| self.memory[at]).collect()
    }

    fn scatter(&mut self, places: &[usize], bytes: &[u8]) {
        for (&at, &byte) in places.iter().zip(bytes) {
            self.memory[at] = byte;
        }
    }
}

struct Run {
    pair: Pair,
    setup: Setup,
    model: Model,
    random: Random,
    base: u64,
    far: Region,
    registrations: u64,
    /// What happened: successes and refusals of each kind.
    seen: BTreeMap<(&'static str, bool), u32>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let setup = Setup {
            flags: QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS | QP_FLAG_FAST_REGISTER_DRAINS,
            ..Setup::default()
        };
        let mut pair = Pair::new(setup);
        let base = pair.a.allocate(BYTES as u64);
        let memory = pattern(seed, BYTES);
        pair.a.host.memory.write(base, &memory).unwrap();
        let far = pair.b.register(0x201, PD, ALL, 32 << 10);
        Self {
            pair,
            setup,
            model: Model {
                entries: BTreeMap::new(),
                failed: BTreeMap::new(),
                serial: 0,
                memory,
            },
            random: Random(seed),
            base,
            far,
            registrations: 0,
            seen: BTreeMap::new(),
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next() % limit
    }

    fn tag(&mut self) -> Tag {
        // An instance that comes again soon.
        Tag::new(FIRST + self.below(INDICES) as u32, self.below(2) as u8)
    }

    /// The present tag of one that is like this, mostly; else any.
    fn tag_like(&mut self, like: impl Fn(&Entry) -> bool) -> Tag {
        let all: Vec<_> = self
            .model
            .entries
            .iter()
            .filter(|(_, entry)| like(entry))
            .map(|(&index, entry)| Tag::new(index, entry.instance))
            .collect();
        match all.len() as u64 {
            count if count > 0 && self.random.chance(80) => all[self.below(count) as usize],
            _ => self.tag(),
        }
    }

    fn access(&mut self) -> u32 {
        let mut access = 0;
        for (n, right) in RIGHTS.into_iter().enumerate() {
            // Most rights mostly; the last two now and then.
            if self.random.chance([85, 85, 85, 15, 30][n]) {
                access |= right;
            }
        }
        access
    }

    /// A range of memory: where, and how long.
    fn range(&mut self) -> (usize, usize) {
        let length = 1 + self.below(3000) as usize;
        (self.below((BYTES - length) as u64) as usize, length)
    }

    /// A part of what a tag stands for, mostly; else anything.
    fn sge(&mut self) -> Sge {
        let tag = self.tag_like(|entry| entry.valid.is_some());
        self.sge_of(tag)
    }

    fn sge_of(&mut self, tag: Tag) -> Sge {
        let (base, total) = match self.model.valid(tag) {
            Some(valid) => {
                let zero_based = valid.access & ACCESS_ZERO_BASED != 0;
                let total: usize = valid.bytes.iter().map(|bytes| bytes.length).sum();
                (if zero_based { 0 } else { valid.address }, total as u64)
            }
            None => (0x10_0000, 100),
        };
        let offset = self.below(total);
        let length = match self.below(12) {
            0 => 0,
            1 => total - offset + 1,
            2 => total - offset,
            _ => 1 + self.below(total - offset),
        };
        Sge {
            address: base + offset,
            length: length.min(5000) as u32,
            lkey: tag.0,
        }
    }

    /// What lies in each piece of a list, as users of the list say it.
    fn pieces_of(&self, list: Tag) -> Option<Vec<Sge>> {
        let valid = self.model.valid(list)?;
        let mut address = match valid.access & ACCESS_ZERO_BASED {
            0 => valid.address,
            _ => 0,
        };
        let pieces = valid.bytes.iter().map(|bytes| {
            let length = bytes.length as u32;
            let piece = Sge {
                address,
                length,
                lkey: list.0,
            };
            address += u64::from(length);
            piece
        });
        Some(pieces.collect())
    }

    fn note(&mut self, what: &'static str, success: bool) {
        *self.seen.entry((what, success)).or_default() += 1;
    }

    /// The command must end with `Ok` if and only if it is `expected` to.
    fn command<C: Command>(&mut self, what: &'static str, command: &C, expected: bool) {
        let status = self.pair.a.command(C::OPCODE, command);
        assert_eq!(status == CommandStatus::Ok, expected, "{what}: {status:?}");
        self.note(what, expected);
    }

    /// Posts work to the near side, which must end as `expected`; mends what fails.
    fn near(&mut self, what: &'static str, work: &[SendWork], expected: &[bool]) {
        for work in work {
            self.pair.a.write_blocks(QPN_A, &work.encode());
        }
        self.pair.a.publish_send(QPN_A);
        self.pair.exchange();
        let entries = self.pair.completions_a();
        let syndromes: Vec<_> = entries.iter().map(|entry| entry.vendor_syndrome).collect();
        let done = statuses(&entries);
        let found: Vec<_> = done.iter().map(|status| *status == Success).collect();
        let mut failed = false;
        let expected: Vec<_> = expected
            .iter()
            .map(|good| {
                let good = *good && !failed;
                failed |= !good;
                good
            })
            .collect();
        assert_eq!(found, expected, "{what}: {done:?} {syndromes:?} {work:?}");
        self.note(what, !failed);
        if failed {
            let first = expected.iter().position(|good| !good).expect("a failure");
            assert!(done[first + 1..].iter().all(|status| *status == Flushed));
            self.mend();
        }
        self.pair.completions_b();
    }

    /// The same for the far side.
    fn far(&mut self, what: &'static str, work: &SendWork, expected: bool) {
        self.pair.b.post_send(QPN_B, work);
        self.pair.exchange();
        let done = statuses(&self.pair.completions_b());
        assert_eq!(done == [Success], expected, "{what}: {work:?} {done:?}");
        self.note(what, expected);
        if !expected {
            self.mend();
        }
        self.pair.completions_a();
    }

    /// Has both send again: after a failed registration at once, else with a new connection.
    fn mend(&mut self) {
        if self.pair.a.qp_state(QPN_A) == State::Sqd {
            assert_eq!(self.pair.a.set_state(QPN_A, State::Rts), CommandStatus::Ok);
            self.note("drained", true);
            return;
        }
        self.pair.completions_a();
        self.pair.completions_b();
        for (node, qpn) in [(&mut self.pair.a, QPN_A), (&mut self.pair.b, QPN_B)] {
            assert_eq!(node.set_state(qpn, State::Reset), CommandStatus::Ok);
        }
        self.pair.connect(self.setup);
    }

    fn fast_part(&mut self, tag: Tag) -> (FastRegisterPart, usize) {
        let (from, length) = self.range();
        let part = FastRegisterPart {
            tag: tag.0,
            access: self.access(),
            address: 0x10_0000 + self.below(1 << 20),
            buffer: Buffer::contiguous(self.base + from as u64, length as u64),
            reserved: 0,
        };
        (part, from)
    }

    /// A registration of pages: the work, and whether it is made.
    fn pages(&mut self) -> (SendWork, Tag, bool) {
        let old = self.tag_like(|entry| entry.allocated && !entry.list && entry.valid.is_none());
        let tag = Tag::new(old.index(), self.below(2) as u8);
        let (part, from) = self.fast_part(tag);
        let made = self.model.fast_register(&part, from);
        (
            SendWork::new(SendOpcode::FastRegister, &[]).part(&part),
            tag,
            made,
        )
    }

    /// A registration of a list.
    fn list(&mut self) -> (SendWork, Tag, bool) {
        let old = self.tag_like(|entry| entry.list && entry.valid.is_none());
        let tag = Tag::new(old.index(), self.below(2) as u8);
        let count = 1 + self.below(PIECES as u64) as usize + usize::from(self.random.chance(5));
        let (mut pieces, mut had) = (Vec::new(), u32::MAX);
        for _ in 0..count {
            let region = self.tag_like(|entry| !entry.list && entry.valid.is_some());
            had &= self
                .model
                .valid(region)
                .map_or(u32::MAX, |valid| valid.access);
            pieces.push(self.sge_of(region));
        }
        // Mostly no more than the pieces have.
        if had & ACCESS_LOCAL_WRITE == 0 {
            had &= !ACCESS_REMOTE_WRITE;
        }
        had |= ACCESS_ZERO_BASED | ACCESS_ONE_TOUCH;
        let part = ListPart {
            tag: tag.0,
            access: self.access() & if self.random.chance(80) { had } else { !0 },
            address: 0x10_0000 + self.below(1 << 20),
            pieces: count as u8,
            ..ListPart::zeroed()
        };
        let made = self.model.register_list(&part, &pieces);
        (
            SendWork::new(SendOpcode::RegisterList, &pieces).part(&part),
            tag,
            made,
        )
    }

    /// A write of an entry to the far side: the work, and what it should bring there.
    fn use_of(&mut self, sge: Sge) -> (SendWork, Option<Vec<u8>>) {
        let places = self.model.find(&sge, 0);
        let work = SendWork::new(SendOpcode::Write, &[sge]).remote(self.far.address, self.far.tag);
        (work, places.map(|places| self.model.gather(&places)))
    }

    fn arrived(&self, expected: Option<Vec<u8>>) {
        if let Some(bytes) = expected {
            assert_eq!(self.pair.b.contents(&self.far, 0, bytes.len()), bytes);
        }
    }

    fn step(&mut self) {
        match self.below(15) {
            0 => {
                let tag = self.tag();
                let (part, from) = self.fast_part(tag);
                let replace = self.random.chance(20);
                let entry = self.model.entries.get(&tag.index());
                let expected = match entry {
                    Some(entry) => replace && !entry.list,
                    None => !replace,
                };
                let command = RegisterRegion {
                    tag: tag.0,
                    pd: PD,
                    access: part.access,
                    flags: if replace { REGION_REPLACE } else { 0 },
                    address: part.address,
                    buffer: part.buffer,
                };
                let there = entry.is_some();
                self.command("region", &command, expected);
                if expected {
                    self.model.failed.remove(&tag.index());
                } else if !there {
                    self.model.failed.insert(tag.index(), tag);
                }
                if expected {
                    let entry = Entry {
                        list: false,
                        allocated: false,
                        instance: 0,
                        valid: None,
                    };
                    self.model.entries.insert(tag.index(), entry);
                    let bytes = Bytes {
                        from,
                        length: part.buffer.length as usize,
                        of: None,
                    };
                    self.model
                        .make_valid(tag, part.access, part.address, vec![bytes]);
                }
            }
            2 => {
                let tag = self.tag();
                let entry = self.model.entries.get(&tag.index());
                let failed = self.model.failed.get(&tag.index()) == Some(&tag);
                let expected = failed
                    || entry
                        .is_some_and(|entry| entry.allocated || entry.instance == tag.instance());
                let status = self.pair.a.object_command(CommandOpcode::ReleaseTag, tag.0);
                assert_eq!(status == CommandStatus::Ok, expected, "release: {status:?}");
                self.note("release", expected);
                if expected {
                    self.model.failed.remove(&tag.index());
                    self.model.entries.remove(&tag.index());
                }
            }
            1 | 3 | 4 => {
                let tag = self.tag();
                let list = self.random.chance(50);
                let kind = if list { TagKind::List } else { TagKind::Region };
                let expected = !self.model.entries.contains_key(&tag.index());
                let command = AllocateTag {
                    tag: tag.0,
                    pd: PD,
                    kind: kind.number(),
                    reserved: [0; 3],
                    max_pages: if list { PIECES as u32 } else { 3 },
                };
                self.command("allocate", &command, expected);
                if expected {
                    self.model.failed.remove(&tag.index());
                    let entry = Entry {
                        list,
                        allocated: true,
                        instance: tag.instance(),
                        valid: None,
                    };
                    self.model.entries.insert(tag.index(), entry);
                }
            }
            5 => {
                let (work, _, made) = self.pages();
                self.near("pages", &[work], &[made]);
                self.registrations += u64::from(made);
            }
            6 => {
                let (work, _, made) = self.list();
                self.near("list", &[work], &[made]);
                self.registrations += u64::from(made);
            }
            7 => {
                // A registration and a use of it, and something else, without waiting.
                let list = self.random.chance(60);
                let (work, tag, made) = if list { self.list() } else { self.pages() };
                let valid = self.model.valid(tag).cloned();
                let sge = match valid {
                    Some(valid) if made => Sge {
                        address: match valid.access & ACCESS_ZERO_BASED {
                            0 => valid.address,
                            _ => 0,
                        },
                        length: 1,
                        lkey: tag.0,
                    },
                    _ => self.sge(),
                };
                let (usage, bytes) = self.use_of(sge);
                let before = SendWork::new(SendOpcode::Write, &[]).remote(0, 0);
                let expected = [true, made, bytes.is_some()];
                self.near("use", &[before, work, usage], &expected);
                if made {
                    self.arrived(bytes);
                    self.registrations += 1;
                }
            }
            8 => {
                // A registration that sends, perhaps from under its own tag.
                let list = self.random.chance(50);
                let (register, tag, made) = if list { self.list() } else { self.pages() };
                let mut sge = self.sge();
                if self.random.chance(30) {
                    sge.lkey = tag.0;
                }
                let places = self.model.find(&sge, 0);
                let work = SendWork {
                    opcode: match register.opcode {
                        SendOpcode::FastRegister => SendOpcode::RegisterSend,
                        _ => SendOpcode::RegisterListSend,
                    },
                    sges: [register.sges, vec![sge]].concat(),
                    ..register
                };
                let far = self.far.sge(0, 8192);
                self.pair.b.post_recv(QPN_B, &[far]);
                let good = made && places.is_some();
                self.registrations += u64::from(made);
                self.near("register and send", &[work], &[good]);
                if good {
                    let bytes = places.map(|places| self.model.gather(&places));
                    self.arrived(bytes);
                } else {
                    // The receive is there still, unless the connection is another.
                    let send = SendWork::new(SendOpcode::Send, &[]);
                    if made {
                        self.pair.b.post_recv(QPN_B, &[far]);
                    }
                    self.near("send", &[send], &[true]);
                }
            }
            9 => {
                let tag = self.tag_like(|entry| entry.allocated && entry.valid.is_some());
                let expected = self.model.invalidate(tag);
                let work = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag.0);
                self.near("invalidate", &[work], &[expected]);
            }
            10 => {
                let tag = self.tag_like(|entry| entry.allocated && entry.valid.is_some());
                let expected = self.model.invalidate(tag);
                self.pair.a.post_recv(QPN_A, &[]);
                let work = SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(tag.0);
                self.far("peer's invalidate", &work, expected);
            }
            11 => {
                let sge = self.sge();
                let (work, bytes) = self.use_of(sge);
                self.near("local read", &[work], &[bytes.is_some()]);
                self.arrived(bytes);
            }
            12 => {
                // Several parts of one, mostly; often all of a list.
                let tag = self.tag_like(|entry| entry.valid.is_some());
                let mut sges = vec![self.sge_of(tag)];
                for _ in 0..self.below(3) {
                    let another = self.random.chance(30);
                    sges.push(if another {
                        self.sge()
                    } else {
                        self.sge_of(tag)
                    });
                }
                if self.random.chance(50) {
                    let list = self.tag_like(|entry| entry.list && entry.valid.is_some());
                    sges = self.pieces_of(list).unwrap_or(sges);
                }
                let seed = self.random.next();
                let total = sges.iter().map(|sge| sge.length as usize).sum();
                let data = pattern(seed, total);
                let far = self.far.clone();
                self.pair.b.fill(&far, 0, &data);
                let places: Option<Vec<_>> = sges
                    .iter()
                    .map(|sge| self.model.find(sge, ACCESS_LOCAL_WRITE))
                    .collect();
                let work = SendWork::new(SendOpcode::Read, &sges).remote(far.address, far.tag);
                self.near("local write", &[work], &[places.is_some()]);
                if let Some(places) = places {
                    let before = self.model.entries.clone();
                    self.model.scatter(&places.concat(), &data);
                    for tag in self.model.touch(&sges, ACCESS_LOCAL_WRITE) {
                        // It takes no other message.
                        let valid = before[&tag.index()].valid.as_ref().expect("it was used");
                        let address = match valid.access & ACCESS_ZERO_BASED {
                            0 => valid.address,
                            _ => 0,
                        };
                        let write = SendWork::new(SendOpcode::Write, &[far.sge(0, 1)])
                            .remote(address, tag.0);
                        self.far("used up", &write, false);
                    }
                }
            }
            13 => {
                let sge = self.sge();
                let seed = self.random.next();
                let data = pattern(seed, sge.length as usize);
                let far = self.far.clone();
                self.pair.b.fill(&far, 0, &data);
                let places = self.model.find(&sge, ACCESS_REMOTE_WRITE);
                let work = SendWork::new(SendOpcode::Write, &[far.sge(0, sge.length)])
                    .remote(sge.address, sge.lkey);
                self.far("remote write", &work, places.is_some());
                if let Some(places) = places {
                    self.model.scatter(&places, &data);
                    self.model.touch(&[sge], ACCESS_REMOTE_WRITE);
                }
            }
            _ => {
                let sge = self.sge();
                let places = self.model.find(&sge, ACCESS_REMOTE_READ);
                let work = SendWork::new(SendOpcode::Read, &[self.far.sge(0, sge.length)])
                    .remote(sge.address, sge.lkey);
                self.far("remote read", &work, places.is_some());
                self.arrived(places.map(|places| self.model.gather(&places)));
            }
        }
        let mut memory = vec![0; BYTES];
        self.pair
            .a
            .host
            .memory
            .read(self.base, &mut memory)
            .unwrap();
        assert!(memory == self.model.memory, "memory is not as it should be");
        let counters = self.pair.a.engine.counters();
        assert_eq!(counters.sq_registrations, self.registrations);
    }
}

#[test]
fn no_order_of_registrations_and_accesses_reaches_a_byte_that_it_should_not() {
    let mut seen: BTreeMap<(&'static str, bool), u32> = BTreeMap::new();
    let known: Vec<u64> = (1..=10).collect();
    for seed in seeds(&known, 0) {
        let mut run = Run::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for step in 0..5000 {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.step()));
            if let Err(cause) = result {
                eprintln!("seed {seed}, step {step}");
                std::panic::resume_unwind(cause);
            }
        }
        for (what, count) in run.seen {
            *seen.entry(what).or_default() += count;
        }
    }
    if !all_seeds() {
        return;
    }
    // Each of them did happen, and was refused.
    for what in [
        "region",
        "release",
        "allocate",
        "pages",
        "list",
        "use",
        "register and send",
        "invalidate",
        "peer's invalidate",
        "local read",
        "local write",
        "remote write",
        "remote read",
    ] {
        for success in [true, false] {
            let count = seen.get(&(what, success)).copied().unwrap_or(0);
            assert!(count >= 10, "{what}, {success}: {count} times; {seen:?}");
        }
    }
    assert!(seen[&("drained", true)] > 50);
    assert!(seen[&("used up", false)] > 50);
}
