// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to `/dev/infiniband/uverbs` as no provider makes them, by seed: right ones, almost right ones and any,
//! by `write` and by `ioctl`, while the memory that they name comes and goes. Nothing is to be seen of them
//! afterwards: the kernel's log is clean, what was made goes with the file or with the process, and others are served.
//!
//! Handles are those that the kernel gave out, most of the time, so that requests reach the driver; each file ends
//! after some hundred of them, in order, with its process, or while a second thread still uses it.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::time::Instant;

use ferrite_abi::{
    Plain, UverbsContextRequest, UverbsCqRequest, UverbsHashRequest, UverbsMrRequest,
    UverbsQpRequest, UverbsSrqRequest, UverbsWqRequest, ALL_HASHES, UVERBS_ABI_VERSION,
};

use super::objects::{each_on_its_own, Rig};
use crate::report::{Check, Report};
use crate::verbs::Options;

/// What there is a handle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pd,
    Cq,
    Qp,
    Srq,
    Ah,
    Mr,
    Mw,
    Xrcd,
    Dm,
    Counters,
    Wq,
    Table,
    Flow,
    Channel,
}
const KINDS: usize = Kind::Channel as usize + 1;

/// Numbers by seed, some of them nasty.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// A number that one forgets to check.
    fn nasty(&mut self) -> u32 {
        match self.below(6) {
            0 => self.pick(&[0, 1, 2, 3, 4, 7, 8, 16, 255, 256, 4095, 4096]),
            1 => 1 << self.below(32),
            2 => (1u32 << self.below(32)).wrapping_sub(1),
            3 => u32::MAX - self.below(4) as u32,
            4 => i32::MAX as u32 + self.below(3) as u32,
            _ => self.next() as u32,
        }
    }
}

/// Where the memory is that requests name: nothing else of the process is near it.
const ARENA: u64 = 0x2000_0000_0000;
const PAGE: u64 = 4096;
const PAGES: u64 = 64;
/// The last page is for answers, and stays.
const ANSWERS: u64 = ARENA + (PAGES - 1) * PAGE;

/// Of `enum ib_uverbs_write_cmds`; the rest by number.
const GET_CONTEXT: u32 = 0;
const EXTENDED: u32 = 0x8000_0000;
const REQUESTS: u32 = 62;
const MODIFY_WQ: u32 = 53 | EXTENDED;
const OBJECTS: u64 = 19;
/// First number of what drivers add.
const OF_DRIVER: u16 = 1 << 12;
const MANDATORY: u16 = 1;
const RDMA_VERBS_IOCTL: libc::c_ulong = (3 << 30) | (24 << 16) | (0x1b << 8) | 1;

/// A request by `write`.
#[derive(Debug, Default, Clone)]
struct Request {
    number: u32,
    /// The kernel's part without the place of the answer.
    body: Vec<u8>,
    /// The driver's.
    private: Vec<u8>,
    /// Whether there is an answer, and what it begins with.
    answers: bool,
    makes: Option<Kind>,
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn long(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

impl Request {
    fn new(number: u32, words: &[u32]) -> Self {
        Self {
            number,
            body: bytes(words),
            answers: true,
            ..Self::default()
        }
    }

    fn silent(number: u32, words: &[u32]) -> Self {
        Self {
            answers: false,
            ..Self::new(number, words)
        }
    }

    fn makes(mut self, kind: Kind) -> Self {
        self.makes = Some(kind);
        self
    }

    fn private(mut self, part: &[u8]) -> Self {
        self.private = part.to_vec();
        self
    }
}

/// An attribute of a request by `ioctl`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Attribute {
    id: u16,
    length: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// A file and what was made with it.
#[derive(Clone)]
struct Session {
    fd: RawFd,
    random: Random,
    handles: [Vec<u32>; KINDS],
    keys: Vec<u32>,
    numbers: Vec<u32>,
    /// Where the driver says that there is something to map.
    offsets: Vec<u64>,
    mapped: Vec<(u64, usize)>,
    /// How many of a kind of request were carried out.
    done: BTreeMap<String, u64>,
    calls: u64,
}

impl Session {
    fn new(fd: RawFd, random: Random) -> Self {
        Self {
            fd,
            random,
            handles: Default::default(),
            keys: Vec::new(),
            numbers: Vec::new(),
            offsets: Vec::new(),
            mapped: Vec::new(),
            done: BTreeMap::new(),
            calls: 0,
        }
    }

    /// A handle of this kind, nearly always.
    fn handle(&mut self, kind: Kind) -> u32 {
        let kind = match self.random.one_in(24) {
            true => self.random.below(KINDS as u64) as usize,
            false => kind as usize,
        };
        match self.handles[kind].len() as u64 {
            0 => self.random.below(8) as u32,
            _ if self.random.one_in(40) => self.random.nasty(),
            // The latest ones more often: they fit each other.
            count if self.random.one_in(2) => {
                let back = 1 + self.random.below(count.min(3));
                self.handles[kind][(count - back) as usize]
            }
            count => self.handles[kind][self.random.below(count) as usize],
        }
    }

    /// An address in the arena, nearly always at the beginning of a page.
    fn address(&mut self) -> u64 {
        match self.random.below(24) {
            0 => 0,
            1 => u64::MAX - self.random.below(2 * PAGE),
            2 => ARENA + PAGES * PAGE + self.random.below(4 * PAGE),
            3 => (1 << 47) - self.random.below(2) * PAGE,
            4..8 => ARENA + self.random.below(PAGES * PAGE),
            _ => ARENA + self.random.below(PAGES) * PAGE,
        }
    }

    fn length(&mut self) -> u64 {
        match self.random.below(12) {
            0 => self.random.next() >> self.random.below(64),
            1 => 0,
            2 => 1 << self.random.below(50),
            3..6 => self.random.below(8 * PAGE),
            _ => PAGE << self.random.below(4),
        }
    }

    fn small(&mut self, usual: u32) -> u32 {
        match self.random.one_in(16) {
            true => self.random.nasty(),
            false => self.random.below(u64::from(usual) + 1) as u32,
        }
    }

    fn cq_part(&mut self, entries_log: u32) -> UverbsCqRequest {
        UverbsCqRequest {
            buffer: self.address() & !(PAGE - 1),
            length: (64 << entries_log) + PAGE,
            record_offset: 64 << entries_log,
            log_entries: entries_log,
        }
    }

    fn qp_part(&mut self) -> UverbsQpRequest {
        UverbsQpRequest {
            buffer: self.address() & !(PAGE - 1),
            length: 16384,
            sq_offset: 0,
            rq_offset: 4096,
            record_offset: 8192,
            sq_log_blocks: 5,
            rq_log_entries: 3,
            rq_log_stride: 6,
            flags: self.random.pick(&[0, 0, 0, 1, 2, 4, 7, 8, 255]),
            reserved: 0,
        }
    }

    fn srq_part(&mut self) -> UverbsSrqRequest {
        UverbsSrqRequest {
            buffer: self.address() & !(PAGE - 1),
            length: 16384,
            ring_offset: 0,
            record_offset: 8192,
            log_entries: 3,
            log_stride: 6,
            reserved: [0; 3],
        }
    }

    fn wq_part(&mut self) -> UverbsWqRequest {
        UverbsWqRequest {
            buffer: self.address() & !(PAGE - 1),
            length: 16384,
            rq_offset: 0,
            record_offset: 8192,
            rq_log_entries: 3,
            rq_log_stride: 6,
            reserved: [0; 3],
        }
    }

    /// A request about work queues, tables of them, or rules.
    fn raw(&mut self, pd: u32, cq: u32) -> Request {
        let wq = self.handle(Kind::Wq);
        match self.random.below(16) {
            0..4 => {
                let part = self.wq_part();
                let flags = self.small(1) * self.small(8);
                Request::new(52 | EXTENDED, &[0, 0, 0, 0, pd, cq, 8, 1, flags, 0])
                    .private(part.as_bytes())
                    .makes(Kind::Wq)
            }
            4..7 => {
                let mask = self.random.pick(&[1, 1, 1, 3, 2, 4, 7]);
                let (state, current) = (self.small(2), self.small(2));
                Request::silent(MODIFY_WQ, &[mask, wq, state, current, 0, 0])
            }
            7 => Request::new(54 | EXTENDED, &[0, wq]),
            8 | 9 => {
                let log = self.small(3);
                let mut words = vec![0, log];
                words.extend((0..1 << log.min(5)).map(|_| self.handle(Kind::Wq)));
                Request::new(55 | EXTENDED, &words).makes(Kind::Table)
            }
            10 => Request::silent(56 | EXTENDED, &[0, self.handle(Kind::Table)]),
            // A queue pair that receives by a table.
            11 => {
                let part = UverbsHashRequest {
                    types: u32::from(ALL_HASHES) & self.random.pick(&[1, 3, 0x3f, 0x7f]),
                    reserved: 0,
                    key: [0x5a; 40],
                };
                let mut words = vec![0, 0, pd, 0, 0, 0, 0, 0, 0, 0, 0];
                words.push(u32::from_ne_bytes([0, 8, 0, 0]));
                words.extend([1, 0, self.handle(Kind::Table), 0]);
                Request::new(24 | EXTENDED, &words)
                    .private(part.as_bytes())
                    .makes(Kind::Qp)
            }
            12..15 => self.rule(),
            _ => Request::silent(51 | EXTENDED, &[0, self.handle(Kind::Flow)]),
        }
    }

    /// A rule of flows for a queue pair: the default ones, and specifications of which each says its size.
    fn rule(&mut self) -> Request {
        let mut specs = Vec::new();
        let mut count = 0;
        for (kind, filter) in [(0x20, 16), (0x30, 12), (0x31, 40), (0x40, 4), (0x41, 4)] {
            if !self.random.one_in(3) {
                continue;
            }
            count += 1;
            let size = 8 + 2 * filter as u16;
            let size = match self.random.one_in(12) {
                true => self.random.nasty() as u16,
                false => size,
            };
            let kind = match self.random.one_in(24) {
                true => self.random.nasty(),
                false => kind,
            };
            specs.extend([kind, size.into()]);
            // What it is to be, and what of that counts.
            for _ in 0..filter / 2 {
                specs.push(match self.random.one_in(3) {
                    true => self.random.nasty(),
                    false => 0,
                });
            }
        }
        let bytes = match self.random.one_in(24) {
            true => self.random.nasty(),
            false => specs.len() as u32 * 4,
        };
        // Mostly normal ones, with what is to make a difference, and at times the default ones.
        let kind = match count {
            0 => self.random.pick(&[0, 1, 2, 3]),
            _ => self.random.pick(&[0, 0, 0, 0, 0, 1]),
        };
        let priority = self.small(16) << 16;
        let last = u32::from_ne_bytes([count, 0, 0, 1]);
        let flags = self.small(1) * self.small(4);
        let qp = self.handle(Kind::Qp);
        let mut words = vec![0, qp, kind, (bytes & 0xffff) | priority, last, flags];
        words.extend(specs);
        Request::new(50 | EXTENDED, &words).makes(Kind::Flow)
    }

    fn mr_part(&mut self) -> Vec<u8> {
        let kind = match self.random.below(6) {
            0 => 1,
            1 => 2,
            2 => self.random.nasty(),
            _ => return Vec::new(),
        };
        let key = match self.keys.len() as u64 {
            0 => self.random.nasty(),
            count => self.keys[self.random.below(count) as usize],
        };
        let part = UverbsMrRequest {
            kind,
            max_pieces: if kind == 1 { self.small(16) } else { 0 },
            key: if kind == 2 { key } else { 0 },
            reserved: 0,
        };
        part.as_bytes().to_vec()
    }

    /// Where a peer is: a GID of this machine's own, or none.
    fn gid(&mut self) -> [u32; 4] {
        match self.random.below(3) {
            0 => [0, 0, 0xffff_0000, u32::from_be(0x0a4d_0001)],
            1 => [0, 0, 0xffff_0000, u32::from_be(0x0a4d_0002)],
            _ => [self.random.nasty(), 0, 0, self.random.nasty()],
        }
    }

    /// A change of a queue pair's state: the next one in order, or any.
    fn modify(&mut self) -> Request {
        let [a, b, c, d] = self.gid();
        // Up the ladder, for each what has to come with it on a reliable connection.
        let (state, mask) = self.random.pick(&[
            (1u8, 0x0001 | 0x0008 | 0x0010 | 0x0020),
            (1, 0x0001 | 0x0040 | 0x0010 | 0x0020),
            // Of raw packets.
            (1, 0x0001 | 0x0020),
            (2, 0x0001),
            (3, 0x0001),
            (
                2,
                0x0001 | 0x0080 | 0x0100 | 0x1000 | 0x8000 | 0x2_0000 | 0x10_0000,
            ),
            (3, 0x0001 | 0x0200 | 0x0400 | 0x0800 | 0x2000 | 0x1_0000),
            (3, 0x0001 | 0x1_0000),
            (4, 0x0001),
            (6, 0x0001),
            (0, 0x0001),
        ]);
        let mask = match self.random.one_in(12) {
            true => self.random.next() as u32,
            false => mask,
        };
        let mut words = vec![a, b, c, d, 0, 0];
        // sgid_index, hop_limit, traffic_class, sl; src_path_bits, static_rate, is_global, port_num
        words.push(u32::from_ne_bytes([self.small(4) as u8, 64, 0, 0]));
        words.push(u32::from_ne_bytes([0, 0, 1, 1]));
        words.extend([0; 8]);
        let number = match self.numbers.len() as u64 {
            0 => self.random.below(64) as u32,
            count => self.numbers[self.random.below(count) as usize],
        };
        let qp = self.handle(Kind::Qp);
        let access = self.small(15);
        words.extend([qp, mask, 0x1111, 7, 7, number, access, 0]);
        // qp_state, cur_qp_state, path_mtu, path_mig_state, en_sqd_async_notify, max_rd_atomic,
        // max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alternate port and timeout
        words.extend([
            u32::from_ne_bytes([state, 0, self.small(5) as u8, 0]),
            u32::from_ne_bytes([0, self.small(16) as u8, self.small(16) as u8, 1]),
            u32::from_ne_bytes([1, 10, 1, 1]),
            0,
        ]);
        if self.random.one_in(4) {
            words.extend([0, 0]);
            return Request::new(26 | EXTENDED, &words);
        }
        Request::silent(26, &words)
    }

    /// A request as a provider might make it.
    fn request(&mut self) -> Request {
        let pd = self.handle(Kind::Pd);
        let cq = self.handle(Kind::Cq);
        match self.random.below(46) {
            40.. => self.raw(pd, cq),
            0 => Request::new(1, &[]),
            1 => Request::new(2, &[self.small(2), 0]),
            2 | 3 => Request::new(3, &[]).makes(Kind::Pd),
            4 => Request::silent(4, &[pd]),
            5 | 6 => {
                let [a, b, c, d] = self.gid();
                let index = u32::from_ne_bytes([self.small(4) as u8, 64, 0, 0]);
                let last = u32::from_ne_bytes([0, 1, 1, 0]);
                Request::new(5, &[0, 0, pd, 0, a, b, c, d, 0, index, 0, last]).makes(Kind::Ah)
            }
            7 => Request::silent(8, &[self.handle(Kind::Ah)]),
            8..11 => {
                let (start, length) = (self.address(), self.length());
                let access = match self.random.one_in(3) {
                    true => self.random.nasty(),
                    false => self
                        .random
                        .pick(&[0, 1, 3, 5, 7, 0xf, 0x10, 0x1f, 0x27, 0x47]),
                };
                let [s, t] = long(start);
                let [l, m] = long(length);
                let part = self.mr_part();
                Request::new(9, &[s, t, l, m, s, t, pd, access])
                    .private(&part)
                    .makes(Kind::Mr)
            }
            11 => {
                let mr = self.handle(Kind::Mr);
                let flags = self.small(7);
                let [s, t] = long(self.address());
                let [l, m] = long(self.length());
                let access = self.small(31);
                Request::new(11, &[mr, flags, s, t, l, m, s, t, pd, access]).makes(Kind::Mr)
            }
            12 => Request::silent(13, &[self.handle(Kind::Mr)]),
            13 => Request::new(14, &[pd, self.small(3)]).makes(Kind::Mw),
            14 => Request::silent(16, &[self.handle(Kind::Mw)]),
            15 => Request::new(17, &[]).makes(Kind::Channel),
            16..19 => {
                let log = self.random.below(7) as u32;
                let channel = match self.random.one_in(3) {
                    true => self.handle(Kind::Channel),
                    false => u32::MAX,
                };
                let part = self.cq_part(log);
                let vector = self.small(2);
                let words = [0, 0, 1 << log, vector, channel, 0];
                if self.random.one_in(2) {
                    let flags = self.small(3);
                    let words = [&words[..], &[flags, 0]].concat();
                    return Request::new(18 | EXTENDED, &words)
                        .private(part.as_bytes())
                        .makes(Kind::Cq);
                }
                Request::new(18, &words)
                    .private(part.as_bytes())
                    .makes(Kind::Cq)
            }
            19 => {
                let log = self.random.below(8) as u32;
                let part = self.cq_part(log);
                Request::new(19, &[cq, 1 << log]).private(part.as_bytes())
            }
            20 => Request::new(20, &[cq, 0]),
            21 => Request::new(21, &[cq, self.small(8)]),
            22 => Request::silent(23, &[cq, self.small(1)]),
            23..27 => {
                let srq = self.handle(Kind::Srq);
                let is_srq = u8::from(self.random.one_in(4));
                let kind = self.random.pick(&[2u8, 2, 2, 3, 4, 4, 8, 9, 10]);
                let other = self.handle(Kind::Cq);
                let mut words = vec![0, 0, pd, cq, other, srq, 4, 4, 1, 1, 0];
                words.push(u32::from_ne_bytes([0, kind, is_srq, 0]));
                let part = self.qp_part();
                let number = match self.random.one_in(3) {
                    true => {
                        words.extend([0, self.small(1) * self.random.nasty(), 0, 0]);
                        24 | EXTENDED
                    }
                    false => 24,
                };
                Request::new(number, &words)
                    .private(part.as_bytes())
                    .makes(Kind::Qp)
            }
            27 => Request::new(25, &[self.handle(Kind::Qp), self.random.next() as u32]),
            28..31 => self.modify(),
            31 => Request::new(27, &[self.handle(Kind::Qp), 0]),
            32 => {
                let qp = self.handle(Kind::Qp);
                let number = self.random.pick(&[28, 29, 36]);
                let (requests, entries) = (self.small(3), self.small(3));
                let mut words = vec![qp, requests, entries, self.random.pick(&[72, 16, 80])];
                words.extend((0..self.random.below(64)).map(|_| self.random.nasty()));
                Request::new(number, &words)
            }
            33 => {
                let [_, _, _, low] = self.gid();
                let group = u32::from_ne_bytes([0xff, 0x0e, 0, 0]);
                let qp = self.handle(Kind::Qp);
                Request::silent(self.random.pick(&[30, 31]), &[group, 0, 0, low, qp, 0])
            }
            34 => {
                let part = self.srq_part();
                Request::new(32, &[0, 0, pd, 4, 1, 0])
                    .private(part.as_bytes())
                    .makes(Kind::Srq)
            }
            35 => {
                let srq = self.handle(Kind::Srq);
                match self.random.below(3) {
                    0 => Request::silent(33, &[srq, self.small(3), self.small(8), self.small(4)]),
                    1 => Request::new(34, &[srq, 0]),
                    _ => Request::new(35, &[srq, 0]),
                }
            }
            36 => match self.random.below(3) {
                0 => Request::silent(38, &[self.handle(Kind::Xrcd)]),
                _ => {
                    let flags = self.random.pick(&[libc::O_CREAT as u32, 0, u32::MAX]);
                    Request::new(37, &[u32::MAX, flags]).makes(Kind::Xrcd)
                }
            },
            37 => {
                let (kind, xrcd) = (self.small(2), self.handle(Kind::Xrcd));
                let part = self.srq_part();
                Request::new(39, &[0, 0, kind, pd, 4, 1, 0, 0, xrcd, cq])
                    .private(part.as_bytes())
                    .makes(Kind::Srq)
            }
            38 => {
                let number = match self.numbers.len() as u64 {
                    0 => self.random.nasty(),
                    count => self.numbers[self.random.below(count) as usize],
                };
                Request::new(40, &[0, 0, pd, number, 10, 0]).makes(Kind::Qp)
            }
            _ => {
                let number = self.random.below(u64::from(REQUESTS)) as u32
                    | (self.random.below(2) as u32 * EXTENDED);
                let words: Vec<u32> = (0..self.random.below(40))
                    .map(|_| self.random.nasty())
                    .collect();
                Request::new(number, &words)
            }
        }
    }

    /// Makes a request almost right.
    fn spoil(&mut self, request: &mut Request) {
        for _ in 0..=self.random.below(2) {
            let part = match self.random.one_in(2) && !request.private.is_empty() {
                true => &mut request.private,
                false => &mut request.body,
            };
            match self.random.below(8) {
                // Shorter or longer than it is to be.
                0 => part.truncate(self.random.below(part.len() as u64 / 4 + 1) as usize * 4),
                1 => {
                    let fill = self.random.pick(&[0, 0, 1, 0xff]);
                    let more = 4 << self.random.below(11);
                    part.resize(part.len() + more, fill);
                }
                2 => request.number ^= self.random.pick(&[1, 2, 64, EXTENDED]),
                _ if part.len() >= 4 => {
                    let at = self.random.below(part.len() as u64 / 4) as usize * 4;
                    let value = match self.random.one_in(3) {
                        true => {
                            let old = u32::from_ne_bytes([
                                part[at],
                                part[at + 1],
                                part[at + 2],
                                part[at + 3],
                            ]);
                            old ^ (1 << self.random.below(32))
                        }
                        false => self.random.nasty(),
                    };
                    part[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                }
                _ => {}
            }
        }
    }

    /// Where the kernel is to write an answer, and how much of it.
    fn place(&mut self, answers: bool) -> (u64, usize) {
        let length = match (answers, self.random.one_in(24)) {
            (_, true) => self.random.below(64) as usize * 8,
            (true, _) => 512,
            (false, _) => 0,
        };
        match self.random.below(32) {
            0 => (0, length),
            1 => (u64::MAX - 7, length),
            2 => (ARENA + self.random.below((PAGES - 4) * PAGE), length),
            3 => (ARENA + PAGES * PAGE - 8, length),
            _ => (ANSWERS, length),
        }
    }

    /// Says a request to the kernel: 0, or an errno value.
    fn say(&mut self, request: &Request) -> i32 {
        let (place, room) = self.place(request.answers);
        let request = &possible(request);
        let extended = request.number & EXTENDED != 0;
        let mut body = Vec::new();
        if request.answers && !extended {
            body.extend(place.to_ne_bytes());
        }
        body.extend(&request.body);
        if self.random.one_in(3) {
            return self.invoke(request, &body, (place, room));
        }
        let (unit, private) = if extended {
            body.resize(body.len().next_multiple_of(8), 0);
            let mut private = request.private.clone();
            private.resize(private.len().next_multiple_of(8), 0);
            (8, private)
        } else {
            (4, request.private.clone())
        };
        let mut message = Vec::new();
        let words = |length: usize| (length / unit).min(0xffff) as u32;
        message.extend(request.number.to_ne_bytes());
        if extended {
            // Half of the room is the driver's.
            let half = words(room / 2);
            message.extend((words(body.len()) | (half << 16)).to_ne_bytes());
            message.extend(place.to_ne_bytes());
            message.extend((words(private.len()) | (half << 16)).to_ne_bytes());
            message.extend(0u32.to_ne_bytes());
        } else {
            let length = 8 + body.len() + private.len();
            message.extend((words(length) | (words(room) << 16)).to_ne_bytes());
        }
        message.extend(&body);
        message.extend(&private);
        if self.random.one_in(64) {
            let length = message.len() as u64;
            message.truncate(self.random.below(length) as usize);
        }
        // SAFETY: the message may be read for its length; where the kernel writes an answer is a place of the arena,
        // which nothing of this program is in, or none.
        let said = unsafe { libc::write(self.fd, message.as_ptr().cast(), message.len()) };
        result(said < 0)
    }

    /// The same by `ioctl`.
    fn invoke(&mut self, request: &Request, body: &[u8], (place, room): (u64, usize)) -> i32 {
        let attribute = |id: u16, length: usize, data: u64| Attribute {
            id,
            length: length as u16,
            flags: MANDATORY,
            reserved: 0,
            data,
        };
        let mut attributes = vec![
            attribute(0, body.len(), inline(body)),
            attribute(2, 8, request.number.into()),
        ];
        if room > 0 {
            attributes.push(attribute(1, room / 2, place));
            attributes.push(attribute(OF_DRIVER + 1, room / 2, place + room as u64 / 2));
        }
        if !request.private.is_empty() {
            let data = inline(&request.private);
            attributes.push(attribute(OF_DRIVER, request.private.len(), data));
        }
        self.ioctl(0, 0, &mut attributes)
    }

    /// A request by `ioctl`: 0, or an errno value. What the kernel leaves in the attributes can be read there.
    fn ioctl(&mut self, object: u16, method: u16, attributes: &mut [Attribute]) -> i32 {
        let length = 24 + 16 * attributes.len();
        let mut header = [
            length as u16,
            object,
            method,
            attributes.len() as u16,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ];
        if self.random.one_in(64) {
            let at = self.random.below(12) as usize;
            header[at] = self.random.nasty() as u16;
        }
        // The kernel reads no more than the first field says: there is room for that.
        let mut message = vec![0u8; 1 << 16];
        for (at, half) in header.iter().enumerate() {
            message[2 * at..2 * at + 2].copy_from_slice(&half.to_ne_bytes());
        }
        let at = message.as_mut_ptr().wrapping_add(24).cast::<Attribute>();
        for (index, attribute) in attributes.iter().enumerate() {
            // SAFETY: there is room for more of them than can be; written without regard to alignment.
            unsafe { at.add(index).write_unaligned(*attribute) };
        }
        // SAFETY: as long as its first field can say; where answers go is a place of the arena, or none.
        let said = unsafe { libc::ioctl(self.fd, RDMA_VERBS_IOCTL, message.as_mut_ptr()) };
        for (index, attribute) in attributes.iter_mut().enumerate() {
            // SAFETY: as above.
            *attribute = unsafe { at.add(index).read_unaligned() };
        }
        result(said != 0)
    }

    /// A method as a provider might call it, or any: its name if it was carried out.
    fn method(&mut self) -> Option<String> {
        let handle = |id: u16, handle: u32| Attribute {
            id,
            length: 0,
            flags: MANDATORY,
            reserved: 0,
            data: handle.into(),
        };
        let number = |id: u16, length: u16, data: u64| Attribute {
            length,
            data,
            ..handle(id, 0)
        };
        let answer = |id: u16, length: u16| number(id, length, ANSWERS + 8 * u64::from(id & 31));
        let (dm, mr) = (self.handle(Kind::Dm), self.handle(Kind::Mr));
        let (pd, cq) = (self.handle(Kind::Pd), self.handle(Kind::Cq));
        let queue = self.wq_part();
        let own = OF_DRIVER;
        let (object, method, mut attributes) = match self.random.below(23) {
            20 | 21 => {
                let mut parts = vec![
                    handle(0, 0),
                    handle(1, pd),
                    number(3, 8, 0),
                    number(4, 8, 0),
                    number(6, 4, 8),
                    number(7, 4, 1),
                    number(8, 4, 0),
                    answer(9, 4),
                    answer(10, 4),
                    // Optional, but without it the kernel takes back what it made.
                    answer(11, 4),
                    number(own, 32, inline(queue.as_bytes())),
                ];
                if !self.random.one_in(4) {
                    parts.push(handle(2, cq));
                }
                (12, 0, parts)
            }
            22 => match self.random.below(3) {
                0 => {
                    let wq = self.handle(Kind::Wq);
                    (12, 1, vec![handle(0, wq), answer(1, 4)])
                }
                1 => (9, 0, vec![handle(0, self.handle(Kind::Flow))]),
                _ => (11, 0, vec![handle(0, self.handle(Kind::Table))]),
            },
            0 | 1 => {
                let length = self.length() % (1 << 17);
                let align = u64::from(self.small(14));
                let parts = vec![
                    handle(0, 0),
                    number(1, 8, length),
                    number(2, 4, align),
                    answer(own, 8),
                ];
                (14, 0, parts)
            }
            2 => (14, 1, vec![handle(0, dm)]),
            3 => (
                14,
                own,
                vec![handle(own, dm), answer(own + 1, 8), answer(own + 2, 8)],
            ),
            4 => {
                let (offset, length) = (self.length() % PAGE, self.length());
                let access = u64::from(self.small(31)) | (1 << 5);
                let parts = vec![
                    handle(0, 0),
                    number(1, 8, offset),
                    number(2, 8, length),
                    handle(3, pd),
                    number(4, 4, access),
                    handle(5, dm),
                    answer(6, 4),
                    answer(7, 4),
                ];
                (7, 0, parts)
            }
            5 => (7, 1, vec![handle(0, mr)]),
            6 => {
                let advice = u64::from(self.small(2));
                let flags = u64::from(self.small(1));
                let entries = 16 * (1 + self.random.below(4) as u16);
                let list = number(3, entries, ARENA + self.random.below(PAGES) * PAGE);
                (
                    7,
                    2,
                    vec![
                        handle(0, pd),
                        number(1, 4, advice),
                        number(2, 4, flags),
                        list,
                    ],
                )
            }
            7 => {
                let parts = vec![
                    handle(0, mr),
                    answer(1, 4),
                    answer(2, 4),
                    answer(3, 8),
                    answer(4, 8),
                ];
                (7, 3, parts)
            }
            8 => {
                let (address, length) = (self.address(), self.length());
                let parts = vec![
                    handle(0, 0),
                    handle(1, pd),
                    number(3, 8, address),
                    number(4, 8, address),
                    number(5, 8, length),
                    number(6, 4, self.small(15).into()),
                    answer(9, 4),
                    answer(10, 4),
                ];
                (7, 5, parts)
            }
            9 => (1, own, vec![handle(own, pd)]),
            10 => {
                let vector = self.random.pick(&[0, 1, 2, u32::MAX, u32::MAX - 1, 77]);
                (
                    3,
                    own,
                    vec![handle(own, cq), number(own + 1, 4, vector.into())],
                )
            }
            11 => (3, own + 1, vec![handle(own, cq), answer(own + 1, 4)]),
            12 => {
                let parts = vec![
                    number(own, 4, self.small(2).into()),
                    number(own + 1, 4, self.small(3).into()),
                ];
                (0, own, parts)
            }
            13 => {
                let vector = number(own, 4, self.small(2).into());
                (0, own + 1, vec![vector, answer(own + 1, 4)])
            }
            14 => {
                let parts = vec![
                    answer(0, 4),
                    answer(1, 8),
                    answer(own, 64),
                    number(own + 1, 8, ANSWERS + 128),
                    number(own + 2, 8, ANSWERS + 136),
                ];
                (0, 4, parts)
            }
            15 => {
                let object = u64::from(self.small(18));
                (
                    0,
                    1,
                    vec![
                        number(0, 8, object),
                        answer(1, 4),
                        number(2, 256, ANSWERS + 256),
                    ],
                )
            }
            16 => (
                0,
                2,
                vec![number(0, 1, self.small(2).into()), number(1, 64, ANSWERS)],
            ),
            17 => match self.random.one_in(2) {
                true => (15, 0, vec![handle(0, 0)]),
                false => (15, 1, vec![handle(0, self.handle(Kind::Counters))]),
            },
            18 => (16, 0, vec![handle(0, 0)]),
            _ => {
                let object = self.random.below(OBJECTS) as u16;
                let of_driver = own * u16::from(self.random.one_in(3));
                let method = self.random.below(6) as u16 + of_driver;
                let parts = (0..self.random.below(9) as u16)
                    .map(|id| {
                        let of_driver = own * u16::from(self.random.one_in(3));
                        let data = match self.random.below(3) {
                            0 => ANSWERS + 8 * self.random.below(64),
                            1 => self.random.below(8),
                            _ => self.random.nasty().into(),
                        };
                        number(
                            id + of_driver,
                            self.random.pick(&[0, 0, 4, 8, 16, 64]),
                            data,
                        )
                    })
                    .collect();
                (object, method, parts)
            }
        };
        if self.random.one_in(3) && !attributes.is_empty() {
            let at = self.random.below(attributes.len() as u64) as usize;
            match self.random.below(7) {
                0 => attributes[at].id ^= 1 << self.random.below(14),
                1 => attributes[at].length = self.random.nasty() as u16,
                2 => attributes[at].flags = self.random.nasty() as u16,
                3 => attributes[at].reserved = self.random.nasty() as u16,
                4 => drop(attributes.remove(at)),
                5 => attributes.push(attributes[at]),
                // Never of an answer: what is there may be of this program.
                _ if attributes[at].data < ARENA => {
                    attributes[at].data = self.random.nasty().into()
                }
                _ => {}
            }
        }
        if self.ioctl(object, method, &mut attributes) != 0 {
            return None;
        }
        let made = attributes.first().map_or(0, |first| first.data as u32);
        match (object, method) {
            (14, 0) => {
                self.handles[Kind::Dm as usize].push(made);
                self.offsets.push(answered(8 * u64::from(own & 31)));
            }
            (7, 0 | 5) => self.handles[Kind::Mr as usize].push(made),
            (12, 0) => self.handles[Kind::Wq as usize].push(made),
            (15, 0) => self.handles[Kind::Counters as usize].push(made),
            (16, 0) => not_waiting(made as RawFd),
            _ => {}
        }
        Some(format!("method {method:#x} of object {object}"))
    }

    /// Something happens to the memory, to what is mapped or to a file.
    fn around(&mut self) {
        let at = ARENA + self.random.below(PAGES - 1) * PAGE;
        let length = (PAGE << self.random.below(3)).min(ANSWERS - at) as usize;
        let place = at as *mut libc::c_void;
        // SAFETY: all of it is in the arena or of the device, where nothing of this program is, and of files that
        // nobody else uses; what fails is none of its business.
        unsafe {
            match self.random.below(9) {
                0 => drop(libc::munmap(place, length)),
                1 => drop(libc::mprotect(
                    place,
                    length,
                    self.random.pick(&[0, libc::PROT_READ, READ_WRITE]),
                )),
                2 => drop(libc::madvise(place, length, libc::MADV_DONTNEED)),
                3..6 => drop(map_arena(at, length)),
                6 => {
                    let offset = match self.offsets.len() as u64 {
                        0 => self.random.nasty().into(),
                        _ if self.random.one_in(6) => self.random.next() >> self.random.below(60),
                        count => self.offsets[self.random.below(count) as usize],
                    };
                    let length = (PAGE << self.random.pick(&[0, 0, 0, 1, 6])) as usize;
                    let protection = self.random.pick(&[READ_WRITE, libc::PROT_WRITE, 1, 7]);
                    let shared = self.random.pick(&[libc::MAP_SHARED, libc::MAP_SHARED, 2]);
                    let offset = (offset & !(PAGE - 1)) as i64;
                    let nowhere = std::ptr::null_mut();
                    let mapped = libc::mmap(nowhere, length, protection, shared, self.fd, offset);
                    if mapped != libc::MAP_FAILED {
                        *self.done.entry("mmap".into()).or_default() += 1;
                        // A doorbell, if it is one: of what this process made, or of nothing.
                        if protection == READ_WRITE && self.random.one_in(2) {
                            let word = self.random.below(PAGE / 8) as usize;
                            mapped
                                .cast::<u64>()
                                .add(word)
                                .write_volatile(self.random.next());
                        }
                        self.mapped.push((mapped as u64, length));
                    }
                }
                7 => {
                    if let Some((at, length)) = self.mapped.pop() {
                        libc::munmap(at as *mut libc::c_void, length);
                    }
                }
                _ => {
                    let channel = self.handle(Kind::Channel) as RawFd;
                    let mut event = [0u64; 8];
                    if channel > self.fd && channel < 1024 {
                        libc::read(channel, event.as_mut_ptr().cast(), 64);
                        if self.random.one_in(4) {
                            libc::close(channel);
                        }
                    }
                }
            }
        }
    }

    /// The next call.
    fn step(&mut self) {
        self.calls += 1;
        match self.random.below(16) {
            0 | 1 => self.around(),
            2..6 => {
                if let Some(name) = self.method() {
                    *self.done.entry(name).or_default() += 1;
                }
            }
            _ => {
                let mut request = self.request();
                if self.random.one_in(3) {
                    self.spoil(&mut request);
                }
                if self.say(&request) == 0 {
                    self.carried_out(&request);
                }
            }
        }
    }

    fn carried_out(&mut self, request: &Request) {
        let extended = if request.number & EXTENDED != 0 {
            "extended "
        } else {
            ""
        };
        let name = format!("{extended}request {}", request.number & !EXTENDED);
        *self.done.entry(name).or_default() += 1;
        let Some(kind) = request.makes else { return };
        // Some answers begin with what they are, and how long.
        let first = match kind {
            Kind::Wq | Kind::Table => answered(8),
            Kind::Flow => answered(0) >> 32,
            _ => answered(0),
        };
        let (made, second) = (first as u32, (first >> 32) as u32);
        let handles = &mut self.handles[kind as usize];
        handles.push(made);
        if handles.len() > 200 {
            handles.remove(0);
        }
        match kind {
            Kind::Mr => self.keys.push(second),
            Kind::Qp => self.numbers.push(second),
            Kind::Channel => not_waiting(made as RawFd),
            _ => {}
        }
    }

    /// Begins: a context, most of the time.
    fn begin(&mut self) {
        let part = UverbsContextRequest {
            abi_version: UVERBS_ABI_VERSION,
            reserved: 0,
        };
        let mut request = Request::new(GET_CONTEXT, &[]).private(part.as_bytes());
        if self.random.one_in(10) {
            self.spoil(&mut request);
        }
        if self.say(&request) == 0 {
            *self.done.entry("request 0".into()).or_default() += 1;
            not_waiting(answered(0) as u32 as RawFd);
            self.offsets.push(answered(8));
        }
        self.calls += 1;
    }
}

/// A request that the kernel itself is up to: one that brings a work queue to a state which there is not leaves it locked for
/// good, and the kernel warns of that when the file is closed (Documentation/upstream.md). No driver sees it.
fn possible(request: &Request) -> Request {
    const STATES: std::ops::Range<usize> = 8..16;
    let mut request = request.clone();
    if request.number == MODIFY_WQ {
        for (at, byte) in request.body.iter_mut().enumerate() {
            if STATES.contains(&at) {
                *byte = match at % 4 {
                    0 => *byte % 3,
                    _ => 0,
                };
            }
        }
    }
    request
}

/// Up to eight bytes are in the attribute itself.
fn inline(part: &[u8]) -> u64 {
    if part.len() > 8 {
        return part.as_ptr() as u64;
    }
    let mut data = [0; 8];
    data[..part.len()].copy_from_slice(part);
    u64::from_ne_bytes(data)
}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

fn result(failed: bool) -> i32 {
    match failed {
        true => std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
        false => 0,
    }
}

/// What the kernel has written so far behind the beginning of the answers.
fn answered(offset: u64) -> u64 {
    // SAFETY: the page is mapped as long as this program runs, and what is in it is bytes.
    unsafe { ((ANSWERS + offset) as *const u64).read_volatile() }
}

/// A file that was made: a read of it does not wait.
fn not_waiting(fd: RawFd) {
    // SAFETY: a number; of a file that is not there the kernel says so.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
}

/// Maps a part of the arena anew.
fn map_arena(at: u64, length: usize) -> Check {
    // SAFETY: nothing but the arena is there.
    let mapped = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            length,
            READ_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    match mapped == libc::MAP_FAILED {
        true => Err("the arena cannot be mapped".into()),
        false => Ok(()),
    }
}

/// The file of a device.
fn path_of(name: &str) -> Check<String> {
    let all = std::fs::read_dir("/sys/class/infiniband_verbs").map_err(|e| e.to_string())?;
    for entry in all.flatten() {
        let device = std::fs::read_to_string(entry.path().join("ibdev")).unwrap_or_default();
        if device.trim() == name {
            let file = entry.file_name();
            return Ok(format!("/dev/infiniband/{}", file.to_string_lossy()));
        }
    }
    Err(format!("{name} has no file").into())
}

fn open(path: &str) -> Check<RawFd> {
    let path = std::ffi::CString::new(path).map_err(|error| error.to_string())?;
    // SAFETY: a path that ends with zero.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    match fd {
        -1 => Err(format!("{path:?}: {}", std::io::Error::last_os_error()).into()),
        fd => Ok(fd),
    }
}

/// What one file sees from its opening to its end.
fn episode(path: &str, random: &mut Random, most: u64) -> Check<Session> {
    let calls = 1 + (50 + random.below(750)).min(most);
    map_arena(ARENA, (PAGES * PAGE) as usize)?;
    let fd = open(path)?;
    let mut session = Session::new(fd, Random::new(random.next()));
    session.begin();
    let threads = random.one_in(4);
    let mut other = None;
    for call in 1..calls {
        if threads && call == calls / 3 {
            // A second one does what it likes with the same file and the same objects.
            let mut second = session.clone();
            (second.calls, second.done) = (0, BTreeMap::new());
            second.mapped.clear();
            second.random = Random::new(random.next());
            other = Some(std::thread::spawn(move || {
                (0..calls / 3).for_each(|_| second.step());
                second
            }));
        }
        session.step();
    }
    let early = random.one_in(2);
    let close = || {
        // SAFETY: nobody uses what was opened since, but threads that are to see it go.
        unsafe { libc::close(fd) };
    };
    if early {
        close();
    }
    if let Some(Ok(second)) = other.map(std::thread::JoinHandle::join) {
        session.calls += second.calls;
        for (name, count) in second.done {
            *session.done.entry(name).or_default() += count;
        }
        session.mapped.extend(second.mapped);
    }
    if !early {
        close();
    }
    // Channels, files of events, and what else there is.
    // SAFETY: files of this program from this one on are all of this episode.
    unsafe { libc::syscall(libc::SYS_close_range, fd, u32::MAX, 0) };
    for (at, length) in session.mapped.drain(..) {
        // SAFETY: mapped by the session, which is over.
        unsafe { libc::munmap(at as *mut libc::c_void, length) };
    }
    Ok(session)
}

/// An episode in a process of its own, which ends without a word: how many calls it made.
fn episode_of_a_process(path: &str, random: &mut Random, most: u64) -> Check<u64> {
    let calls = 1 + (50 + random.below(350)).min(most);
    map_arena(ARENA, (PAGES * PAGE) as usize)?;
    let seed = random.next();
    // SAFETY: there is one thread now; the child only makes system calls and allocates, and ends by `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err("no process".into()),
        0 => {
            let code = match open(path) {
                Ok(fd) => {
                    let mut session = Session::new(fd, Random::new(seed));
                    session.begin();
                    (1..calls).for_each(|_| session.step());
                    0
                }
                Err(_) => 1,
            };
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of this process; the status is a number here.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) };
            match waited == child && status == 0 {
                true => Ok(calls),
                false => Err(format!("the process of seed {seed} ended with {status:#x}").into()),
            }
        }
    }
}

/// What must have been carried out by the end of a run that is long enough.
const EXPECTED: &[&str] = &[
    "request 0",
    "request 1",
    "request 2",
    "request 3",
    "request 4",
    "request 5",
    "request 8",
    "request 9",
    "request 13",
    "request 14",
    "request 16",
    "request 17",
    "request 18",
    "extended request 18",
    "request 20",
    "request 24",
    "extended request 24",
    "request 25",
    "request 26",
    "request 27",
    "request 32",
    "request 35",
    "request 37",
    "method 0x0 of object 14",
    "method 0x1 of object 14",
    "mmap",
];
/// The same of a process that may have raw packets.
const EXPECTED_RAW: &[&str] = &[
    "extended request 50",
    "extended request 51",
    "extended request 52",
    "extended request 53",
    "extended request 54",
    "extended request 55",
    "extended request 56",
    "method 0x0 of object 12",
];
/// Whether this is one.
fn may_have_raw_packets() -> bool {
    const CAP_NET_RAW: u64 = 1 << 13;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.unwrap_or(0) & CAP_NET_RAW != 0
}
/// So many calls are enough for that.
const ENOUGH: u64 = 20_000;

fn calls(options: &Options, seed: u64, count: u64) -> Check {
    let name = Rig::new(options)?.context.name().to_owned();
    let path = path_of(&name)?;
    println!("seed {seed}, {count} calls to {path}");
    let start = Instant::now();
    let mut random = Random::new(seed);
    let mut done: BTreeMap<String, u64> = BTreeMap::new();
    let (mut made, mut files, mut said) = (0, 0, 0);
    while made < count {
        files += 1;
        if random.one_in(8) {
            made += episode_of_a_process(&path, &mut random, count - made)?;
        } else {
            let session = episode(&path, &mut random, count - made)?;
            made += session.calls;
            for (name, count) in session.done {
                *done.entry(name).or_default() += count;
            }
        }
        if made >= said + 50_000 {
            said = made;
            println!("{made} calls in {} s", start.elapsed().as_secs());
        }
    }
    let carried_out: u64 = done.values().sum();
    println!(
        "{made} calls on {files} files in {} s, {carried_out} of them seen to be carried out, of {} kinds",
        start.elapsed().as_secs(),
        done.len()
    );
    let raw = match may_have_raw_packets() {
        true => EXPECTED_RAW,
        false => &[],
    };
    let missing: Vec<&str> = EXPECTED
        .iter()
        .chain(raw)
        .copied()
        .filter(|name| !done.contains_key(*name))
        .collect();
    if made >= ENOUGH && !missing.is_empty() {
        return Err(format!("never carried out: {missing:?}; carried out: {done:?}").into());
    }
    Ok(())
}

/// Makes so many calls, and looks whether the device serves as before.
pub fn run(options: &Options, report: &mut Report, seed: u64, count: u64) {
    let result = calls(options, seed, count);
    report.enter(&format!("uverbs: {count} calls by seed {seed}"), result);
    each_on_its_own(
        options,
        report,
        "uverbs: ",
        &[("the device serves as before", super::private::still_good)],
    );
}
