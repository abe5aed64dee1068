// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work requests that no provider would write. The ring of a send queue is memory of the process, which
//! may write to it whatever it likes: here it stands in memory that the program brings (an allocator of
//! a parent domain), and a request of the provider's is replaced by another before the device is shown
//! it. Registrations of pages, which name memory by DMA address, registrations of lists on queue pairs
//! that were not made for them, ends of what others have: refused, each with its status and number,
//! no byte is moved, no key opened, nobody else disturbed.

use std::cell::Cell;
use std::ptr;

use ferrite_abi::{
    AttOrder, FastRegisterPart, ListPart, Plain, SendHeader, SendOpcode, SendPart, Sge,
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_WINDOW_BIND, BLOCK_SIZE,
    SEND_SIGNALED,
};

use super::objects::{
    bind2, in_state, made, to_init, to_rtr, to_rts, to_state, well, window, Pair, Rig, LENGTH,
    RIGHTS,
};
use super::refusal::{next_key, vendor};
use crate::bench::status_name;
use crate::direct::{self, ListWork, DRAINS, LISTS};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::Options;

/// What the device says of malformed work requests, and of those that a queue pair may not do (chapter 8
/// of its specification), in `vendor_err`.
const BAD_ENTRIES: u32 = 0x105;
const NOT_ZERO: u32 = 0x109;
const NOT_ALLOWED: u32 = 0x200;

/// Every byte of the buffers before a request that must do nothing.
const MARK: u8 = 0x5a;

/// Where the memory is that a registration of pages names: any that a machine has.
const PHYSICAL: u64 = 0x10_0000;

const ACCESS: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;

/// The memory that a queue pair was made in.
type Ring = Cell<(*mut u8, usize)>;

unsafe extern "C" fn allocate(
    _pd: *mut ibv_pd,
    context: *mut core::ffi::c_void,
    size: usize,
    alignment: usize,
    _kind: u64,
) -> *mut core::ffi::c_void {
    let mut memory = ptr::null_mut();
    // SAFETY: `memory` is a live local.
    if unsafe { libc::posix_memalign(&mut memory, alignment.max(4096), size) } != 0 {
        return ptr::null_mut();
    }
    // SAFETY: the provider passes on what the domain was made with, and the memory is of that size.
    unsafe {
        ptr::write_bytes(memory.cast::<u8>(), 0, size);
        (*context.cast::<Ring>()).set((memory.cast(), size));
    }
    memory
}

unsafe extern "C" fn give_back(
    _pd: *mut ibv_pd,
    _context: *mut core::ffi::c_void,
    memory: *mut core::ffi::c_void,
    _kind: u64,
) {
    // SAFETY: it comes from `allocate`, and nobody uses it any more.
    unsafe { libc::free(memory) };
}

/// A queue pair whose ring is written by hand, connected to another of the same process.
struct Hand<'r> {
    rig: &'r Rig,
    domain: *mut ibv_pd,
    qp: *mut ibv_qp,
    peer: *mut ibv_qp,
    cq: *mut ibv_cq,
    ring: Box<Ring>,
    posted: Cell<u64>,
}

impl<'r> Hand<'r> {
    /// With `FERRITEDV_QP_*` flags.
    fn new(rig: &'r Rig, flags: u32) -> Check<Self> {
        let make = rig
            .extended()
            .alloc_parent_domain
            .ok_or(Outcome::Skipped("there are no parent domains".into()))?;
        let ring = Box::new(Cell::new((ptr::null_mut(), 0)));
        let mut attr = ibv_parent_domain_init_attr {
            pd: rig.pd,
            comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
                | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
            alloc: Some(allocate),
            free: Some(give_back),
            pd_context: ptr::from_ref(&*ring).cast_mut().cast(),
            ..Default::default()
        };
        // SAFETY: the context is open, the domain lives, and the cell lives as long as what is made of it.
        let domain = unsafe { make(rig.raw(), &mut attr) };
        let domain = made(domain, "ibv_alloc_parent_domain")?;
        let cq = rig.cq(64)?;
        let peer = create(rig, rig.pd, cq, 0)?;
        let qp = create(rig, domain, cq, flags)?;
        for (qp, peer) in [(qp, peer), (peer, qp)] {
            to_init(rig, qp)?;
            to_rtr(rig, qp, peer)?;
        }
        for qp in [qp, peer] {
            to_rts(qp)?;
        }
        Ok(Self {
            rig,
            domain,
            qp,
            peer,
            cq,
            ring,
            posted: Cell::new(0),
        })
    }

    /// Posts a work request that is these bytes.
    fn post(&self, wr_id: u64, request: &[u8]) -> Check {
        let blocks = request.len().div_ceil(BLOCK_SIZE);
        let entry = ibv_sge {
            addr: self.rig.buffer.address(),
            length: 1,
            lkey: self.rig.lkey(),
        };
        // A write with a list of so many entries takes as many blocks: one in the first, four in each more.
        let entries = vec![entry; 1 + 4 * (blocks - 1)];
        // No address of anything, and never twice.
        self.posted.set(self.posted.get() + 1);
        let marker = 0x7777_0000_0000_0000 + self.posted.get();
        let qp: *mut ibv_qp_ex = self.qp.cast();
        let missing = "no extended interface";
        // SAFETY: the queue pair lives and has the extended interface, whose functions are called in
        // their order. The provider shows the device nothing before the last: till then the ring, which
        // is memory of `allocate`, is the program's.
        let result = unsafe {
            let operations = ptr::read(qp);
            operations.wr_start.ok_or(missing)?(qp);
            (*qp).wr_id = wr_id;
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            operations.wr_rdma_write.ok_or(missing)?(qp, self.rig.rkey(), marker);
            operations.wr_set_sge_list.ok_or(missing)?(qp, entries.len(), entries.as_ptr());
            let place = self.find(marker, blocks);
            if let Some(place) = place {
                ptr::copy_nonoverlapping(request.as_ptr(), place, request.len());
                operations.wr_complete.ok_or(missing)?(qp)
            } else {
                operations.wr_abort.ok_or(missing)?(qp);
                return Err("the request of the provider is not in the ring".into());
            }
        };
        well(result, "ibv_wr_complete")
    }

    /// Where a write to that address stands in the ring, with all its blocks behind each other.
    fn find(&self, address: u64, blocks: usize) -> Option<*mut u8> {
        let (base, length) = self.ring.get();
        let at = size_of::<SendHeader>();
        let places = (0..=length.checked_sub(blocks * BLOCK_SIZE)?).step_by(BLOCK_SIZE);
        // SAFETY: the memory is of that length, by `allocate`, and lives as long as the queue pair.
        let place = |offset: usize| unsafe { base.add(offset) };
        places.map(place).find(|place| {
            // SAFETY: a block is there, which is longer than this, and aligned.
            let found = unsafe {
                (
                    place.read(),
                    place.add(1).read(),
                    place.add(at).cast::<u64>().read(),
                )
            };
            found == (SendOpcode::Write.number(), blocks as u8, address)
        })
    }

    /// Ends what was made.
    fn end(self) -> Check {
        // SAFETY: all objects live, and are not used afterwards.
        unsafe {
            well(ibv_destroy_qp(self.qp), "ibv_destroy_qp")?;
            well(ibv_destroy_qp(self.peer), "ibv_destroy_qp")?;
            well(ibv_destroy_cq(self.cq), "ibv_destroy_cq")?;
            well(ibv_dealloc_pd(self.domain), "ibv_dealloc_pd")
        }
    }
}

/// A queue pair of a domain, of the extended interface.
fn create(rig: &Rig, pd: *mut ibv_pd, cq: *mut ibv_cq, flags: u32) -> Check<*mut ibv_qp> {
    let mut attr = ibv_qp_init_attr_ex {
        send_cq: cq,
        recv_cq: cq,
        cap: ibv_qp_cap {
            max_send_wr: 32,
            max_recv_wr: 4,
            max_send_sge: 16,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        qp_type: IBV_QPT_RC,
        comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        send_ops_flags: (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND).into(),
        pd,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and all objects live.
    unsafe { direct::create_qp(rig.raw(), &mut attr, flags) }.map_err(|errno| match errno.0 {
        libc::EOPNOTSUPP => Outcome::Skipped("there are no lists".into()),
        _ => Outcome::Failed(format!("ferritedv_create_qp: {errno}")),
    })
}

/// A work request: a header for what follows it, parts, entries.
fn request(opcode: SendOpcode, parts: &[&[u8]], entries: &[Sge]) -> Vec<u8> {
    let bytes = size_of::<SendHeader>()
        + parts.iter().map(|part| part.len()).sum::<usize>()
        + size_of_val(entries);
    let header = SendHeader {
        opcode: opcode.number(),
        blocks: bytes.div_ceil(BLOCK_SIZE) as u8,
        sge_count: entries.len() as u8,
        reserved: 0,
        flags: SEND_SIGNALED,
        inline_length: 0,
        reserved_channel: 0,
        srqn: 0,
    };
    let mut request = header.as_bytes().to_vec();
    for part in parts {
        request.extend_from_slice(part);
    }
    for entry in entries {
        request.extend_from_slice(entry.as_bytes());
    }
    request.resize(bytes.next_multiple_of(BLOCK_SIZE), 0);
    request
}

fn send_part(tag: u32) -> SendPart {
    SendPart {
        tag,
        ..SendPart::zeroed()
    }
}

/// A page of the machine's memory, under a tag.
fn pages(tag: u32) -> FastRegisterPart {
    FastRegisterPart {
        tag,
        access: ACCESS,
        address: PHYSICAL,
        buffer: ferrite_abi::Buffer {
            root: PHYSICAL,
            length: 4096,
            fbo: 0,
            page_shift: 12,
            order: AttOrder::Direct.number(),
            reserved: 0,
        },
        reserved: 0,
    }
}

/// The keys that requests are tried with.
struct Keys {
    /// A list of the queue pair's own domain that is not registered.
    list: *mut ibv_mr,
    /// Its next key.
    list_key: u32,
    /// A list of another context that is registered, and the address under which it is.
    others_list: (u32, u64),
    /// A region of another context.
    others_region: u32,
    /// A window that is bound to a queue pair of the own domain.
    window: u32,
}

/// A request, the key under which it would open something and where, how it ends.
struct Bad {
    what: String,
    request: Vec<u8>,
    opens: Option<(u32, u64)>,
    /// Whether it is a registration: only these drain a queue.
    registers: bool,
    status: u32,
    vendor_err: u32,
}

/// Requests that a queue pair of a process has to refuse, whatever it was made for.
fn never(rig: &Rig, keys: &Keys) -> Vec<Bad> {
    let entry = Sge {
        address: rig.buffer.address(),
        length: 64,
        lkey: rig.lkey(),
    };
    let bad = |what: String, opens, request: Vec<u8>| Bad {
        what,
        registers: request[0] != SendOpcode::LocalInvalidate.number(),
        request,
        opens,
        status: IBV_WC_LOC_QP_OP_ERR,
        vendor_err: NOT_ALLOWED,
    };
    let mut all = Vec::new();
    for (whose, tag) in [
        ("a list of its own", keys.list_key),
        ("a region of its own", rig.rkey()),
        ("a list of another's", next_key(keys.others_list.0)),
        ("a region of another's", keys.others_region),
        ("a window", keys.window),
        ("all memory", 0),
        ("nothing", 0x7f_ff01),
    ] {
        let part = pages(tag);
        // What is valid under that key already stays so, elsewhere.
        let opens = (tag != 0).then_some((tag, PHYSICAL));
        all.push(bad(
            format!("pages under the key of {whose}"),
            opens,
            request(SendOpcode::FastRegister, &[part.as_bytes()], &[]),
        ));
        for invalidate in [0, keys.others_region] {
            let message = send_part(invalidate);
            let parts = [part.as_bytes(), message.as_bytes()];
            all.push(bad(
                format!("pages and a message under the key of {whose}, ending {invalidate:#x}"),
                opens,
                request(SendOpcode::RegisterSend, &parts, &[entry]),
            ));
        }
    }
    for (whose, tag) in [
        ("a region of its own", rig.rkey()),
        ("a region of another's", keys.others_region),
    ] {
        let part = send_part(tag);
        all.push(bad(
            format!("the end of {whose}"),
            None,
            request(SendOpcode::LocalInvalidate, &[part.as_bytes()], &[]),
        ));
    }
    all
}

/// A list of so many pieces of a region, under a tag.
fn list(tag: u32, pieces: u8) -> ListPart {
    ListPart {
        tag,
        access: ACCESS,
        address: PHYSICAL,
        pieces,
        reserved0: [0; 7],
        reserved1: 0,
    }
}

/// Requests that a queue pair without lists has to refuse as well.
fn without_lists(rig: &Rig, keys: &Keys) -> Vec<Bad> {
    let entry = Sge {
        address: rig.buffer.address(),
        length: 64,
        lkey: rig.lkey(),
    };
    let bad = |what: &str, opens, request: Vec<u8>| Bad {
        what: what.into(),
        registers: request[0] != SendOpcode::LocalInvalidate.number(),
        request,
        opens,
        status: IBV_WC_LOC_QP_OP_ERR,
        vendor_err: NOT_ALLOWED,
    };
    let good = list(keys.list_key, 3);
    let parts = [good.as_bytes(), SendPart::zeroed().as_bytes()].map(<[u8]>::to_vec);
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let opens = Some((good.tag, good.address));
    let mut all = vec![
        bad(
            "a list",
            opens,
            request(SendOpcode::RegisterList, &parts[..1], &[entry; 3]),
        ),
        bad(
            "a list and a message",
            opens,
            request(SendOpcode::RegisterListSend, &parts, &[entry; 5]),
        ),
    ];
    for (what, tag) in [
        ("the end of a list", keys.list_key),
        ("the end of a list of another's", keys.others_list.0),
        ("the end of all memory", 0),
        ("the end of nothing", 0x7f_ff01),
    ] {
        let part = send_part(tag);
        let request = request(SendOpcode::LocalInvalidate, &[part.as_bytes()], &[]);
        all.push(bad(what, None, request));
    }
    all
}

/// Requests about lists that no provider writes, on a queue pair that may register them.
fn with_lists(rig: &Rig, keys: &Keys) -> Vec<Bad> {
    let entry = Sge {
        address: rig.buffer.address(),
        length: 64,
        lkey: rig.lkey(),
    };
    let good = list(keys.list_key, 3);
    let bad = |what: &str, part: ListPart, entries: usize, status, vendor_err| Bad {
        what: what.into(),
        request: request(
            SendOpcode::RegisterList,
            &[part.as_bytes()],
            &vec![entry; entries],
        ),
        opens: Some((part.tag, part.address)),
        registers: true,
        status,
        vendor_err,
    };
    let malformed = |what: &str, part, entries, vendor_err| {
        bad(what, part, entries, IBV_WC_LOC_QP_OP_ERR, vendor_err)
    };
    let refused =
        |what: &str, part, vendor_err| bad(what, part, 3, IBV_WC_LOC_PROT_ERR, vendor_err);
    let mut all = vec![
        malformed("no pieces", ListPart { pieces: 0, ..good }, 3, BAD_ENTRIES),
        malformed(
            "fewer pieces",
            ListPart { pieces: 2, ..good },
            3,
            BAD_ENTRIES,
        ),
        malformed(
            "more pieces",
            ListPart { pieces: 4, ..good },
            3,
            BAD_ENTRIES,
        ),
        malformed(
            "255 pieces",
            ListPart {
                pieces: 255,
                ..good
            },
            3,
            BAD_ENTRIES,
        ),
        malformed(
            "a reserved byte",
            ListPart {
                reserved0: [0, 0, 0, 0, 0, 0, 1],
                ..good
            },
            3,
            NOT_ZERO,
        ),
        malformed(
            "a reserved word",
            ListPart {
                reserved1: 1 << 63,
                ..good
            },
            3,
            NOT_ZERO,
        ),
        refused(
            "windows over it",
            ListPart {
                access: ACCESS | ACCESS_WINDOW_BIND,
                ..good
            },
            vendor::NO_RIGHT,
        ),
        refused(
            "a right that is none",
            ListPart {
                access: ACCESS | (1 << 31),
                ..good
            },
            vendor::NO_RIGHT,
        ),
        refused(
            "under the key of a list of another's",
            list(next_key(keys.others_list.0), 3),
            vendor::WRONG_DOMAIN,
        ),
        refused(
            "under the key of a region of another's",
            list(keys.others_region, 3),
            vendor::NOT_REGISTRABLE,
        ),
        refused(
            "under the key of a window",
            list(keys.window, 3),
            vendor::NOT_REGISTRABLE,
        ),
        refused("under no key", list(0x7f_ff01, 3), vendor::NO_ENTRY),
    ];
    for (what, tag, vendor_err) in [
        (
            "the end of a list of another's",
            keys.others_list.0,
            vendor::WRONG_DOMAIN,
        ),
        (
            "the end of a list that is none yet",
            keys.list_key,
            vendor::NOT_VALID,
        ),
        ("the end of all memory", 0, vendor::NO_ENTRY),
        ("the end of nothing", 0x7f_ff01, vendor::NO_ENTRY),
    ] {
        let part = send_part(tag);
        all.push(Bad {
            what: what.into(),
            request: request(SendOpcode::LocalInvalidate, &[part.as_bytes()], &[]),
            opens: None,
            registers: false,
            status: IBV_WC_LOC_PROT_ERR,
            vendor_err,
        });
    }
    all
}

/// What else is there, and has to be after each of them what it was before.
struct Beside<'r> {
    rig: &'r Rig,
    /// A connection of the same domain.
    pair: Pair,
    other: &'r Rig,
    /// One of the other context.
    other_pair: Pair,
    keys: Keys,
}

/// Makes a key for lists.
fn alloc_list(rig: &Rig) -> Check<*mut ibv_mr> {
    // SAFETY: the domain lives.
    unsafe { direct::alloc_list(rig.pd, 4) }.map_err(|errno| match errno.0 {
        libc::EOPNOTSUPP => Outcome::Skipped("there are no lists".into()),
        _ => Outcome::Failed(format!("ferritedv_alloc_list: {errno}")),
    })
}

/// Registers a list over a part of a rig's buffer, on a queue pair of its own that goes again.
fn register(rig: &Rig, mr: *mut ibv_mr, key: u32, address: u64) -> Check {
    let hand = Hand::new(rig, LISTS)?;
    let work = ListWork {
        wr_id: 9,
        flags: IBV_SEND_SIGNALED,
        key,
        access: RIGHTS & !IBV_ACCESS_MW_BIND,
        address,
        pieces: vec![
            (rig.buffer.address() + 32768, 64, rig.lkey()),
            (rig.buffer.address() + 36864, 64, rig.lkey()),
        ],
        ..ListWork::default()
    };
    // SAFETY: queue pair and key live, and it has the extended interface.
    let posted = unsafe { direct::post_list(hand.qp, true, mr, &work) };
    posted.map_err(|errno| format!("ferritedv_wr_register_list: {errno}"))?;
    rig.ends(hand.cq, IBV_WC_SUCCESS, "a good registration")?;
    hand.end()
}

/// The address under which the other context has its list.
const OTHERS: u64 = 0x5000_0000;

impl<'r> Beside<'r> {
    fn new(rig: &'r Rig, other: &'r Rig) -> Check<Self> {
        let list = alloc_list(rig)?;
        let others = alloc_list(other)?;
        let pair = rig.pair()?;
        let other_pair = other.pair()?;
        let mw = window(rig, IBV_MW_TYPE_2)?;
        // SAFETY: the objects live.
        let (window, list_key, others_key, others_region) = unsafe {
            (
                next_key((*mw).rkey),
                next_key((*list).rkey),
                next_key((*others).rkey),
                (*other.mr).rkey,
            )
        };
        bind2(rig, &pair, mw, window)?;
        register(other, others, others_key, OTHERS)?;
        Ok(Self {
            rig,
            pair,
            other,
            other_pair,
            keys: Keys {
                list,
                list_key,
                others_list: (others_key, OTHERS),
                others_region,
                window,
            },
        })
    }

    /// Everything that is there works, and goes where it should.
    fn works(&self) -> Check {
        let (rig, other) = (self.rig, self.other);
        let arrives = |rig: &Rig, pair: &Pair, address, rkey, at, what: &str| -> Check {
            rig.set(0, &[7; 64])?;
            rig.set(at, &[0; 64])?;
            rig.write_to(pair.a, 64, address, rkey)?;
            rig.ends(pair.cq, IBV_WC_SUCCESS, what)?;
            expect!(rig.get(at, 64)?, vec![7; 64], "{what}");
            Ok(())
        };
        let there = rig.buffer.address() + 40000;
        arrives(rig, &self.pair, there, rig.rkey(), 40000, "a write beside")?;
        let (address, key) = (rig.buffer.address() + 32768, self.keys.window);
        arrives(rig, &self.pair, address, key, 32768, "the window")?;
        let pair = &self.other_pair;
        let there = other.buffer.address() + 40000;
        let key = self.keys.others_region;
        arrives(other, pair, there, key, 40000, "the region of another")?;
        let (key, address) = self.keys.others_list;
        arrives(other, pair, address, key, 32768, "the list of another")?;
        arrives(other, pair, address + 64, key, 36864, "its second piece")
    }
}

pub fn run(options: &Options, report: &mut Report) {
    type Cases = fn(&Rig, &Keys) -> Vec<Bad>;
    let groups: [(&str, u32, &[Cases]); 3] = [
        ("a queue pair without lists", 0, &[never, without_lists]),
        ("a queue pair with lists", LISTS, &[never, with_lists]),
        ("a queue pair that drains", LISTS | DRAINS, &[never]),
    ];
    for (name, flags, cases) in groups {
        let result = (|| {
            let (rig, other) = (Rig::new(options)?, Rig::new(options)?);
            let beside = Beside::new(&rig, &other)?;
            beside.works()?;
            for bad in cases.iter().flat_map(|cases| cases(&rig, &beside.keys)) {
                refuses(&beside, flags, &bad)
                    .map_err(|outcome| Outcome::Failed(format!("{}: {outcome:?}", bad.what)))?;
            }
            // The key for which so much was tried is good for a list.
            let Keys { list, list_key, .. } = beside.keys;
            register(&rig, list, list_key, OTHERS)?;
            rig.write_to(beside.pair.a, 64, OTHERS + 64, list_key)?;
            rig.ends(beside.pair.cq, IBV_WC_SUCCESS, "its own list")?;
            Ok(())
        })();
        report.enter(&format!("by hand: {name}"), result);
    }
}

/// A request that must be refused, and nothing else have come of it.
fn refuses(beside: &Beside<'_>, flags: u32, bad: &Bad) -> Check {
    let rig = beside.rig;
    let hand = Hand::new(rig, flags)?;
    for rig in [rig, beside.other] {
        rig.set(0, &[MARK; LENGTH])?;
    }
    // For a message that would come with it.
    rig.recv(hand.peer, 50)?;
    hand.post(51, &bad.request)?;
    let wc = rig.wait(hand.cq)?;
    expect!(
        (wc.wr_id, status_name(wc.status), wc.vendor_err),
        (51, status_name(bad.status), bad.vendor_err),
        "its completion"
    );
    let state = if flags & DRAINS != 0 && bad.registers {
        IBV_QPS_SQD
    } else {
        IBV_QPS_ERR
    };
    in_state(hand.qp, state)?;
    // What comes after it is flushed.
    rig.write(hand.qp, 64)?;
    let wc = rig.ends(hand.cq, IBV_WC_WR_FLUSH_ERR, "what is posted later")?;
    expect!(wc.qp_num, number(hand.qp), "whose it is");
    expect!(rig.poll(hand.cq)?.is_none(), true, "nothing was received");
    for rig in [rig, beside.other] {
        expect!(rig.get(0, LENGTH)?, vec![MARK; LENGTH], "memory");
    }
    if let Some((key, address)) = bad.opens {
        let pair = rig.pair()?;
        rig.write_to(pair.a, 16, address, key)?;
        rig.ends(pair.cq, IBV_WC_REM_ACCESS_ERR, "a peer's use of the key")?;
        expect!(rig.get(0, LENGTH)?, vec![MARK; LENGTH], "memory");
        // SAFETY: all objects live, and are not used afterwards.
        unsafe {
            well(ibv_destroy_qp(pair.a), "ibv_destroy_qp")?;
            well(ibv_destroy_qp(pair.b), "ibv_destroy_qp")?;
            well(ibv_destroy_cq(pair.cq), "ibv_destroy_cq")?;
        }
    }
    if state == IBV_QPS_SQD {
        // The program goes on as if nothing had been.
        to_state(hand.qp, IBV_QPS_RTS)?;
        rig.write(hand.qp, 64)?;
        rig.ends(hand.cq, IBV_WC_SUCCESS, "a write after it went on")?;
    }
    beside.works()?;
    hand.end()
}

fn number(qp: *mut ibv_qp) -> u32 {
    // SAFETY: the queue pair lives.
    unsafe { (*qp).qp_num }
}
