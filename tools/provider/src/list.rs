// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Lists: keys that stand for pieces of regions, registered through a send queue
//! (`include/infiniband/ferritedv.h`, chapter 4 of the specification). What a list may be made of is
//! for the device to check, which has the regions; here only what a work request cannot say is
//! refused.

use core::ffi::{c_int, c_uint};
use core::mem::offset_of;
use core::ptr;

use ferrite_abi::{
    ListPart, Plain, SendOpcode, SendPart, Tag, UverbsMrRequest, ACCESS_FLUSH_GLOBAL,
    FEATURE_ATOMICS, FEATURE_FLUSH, FEATURE_LISTS, MAX_PIECES, UVERBS_MR_LIST,
};

use crate::context::Context;
use crate::direct::{is_ours, QpInitAttr, FERRITEDV_ACCESS_ONE_TOUCH};
use crate::fail;
use crate::post_ex::{begin, finish, held, refuse};
use crate::protection::register;
use crate::qp::Qp;
use crate::send_queue::SendQueue;
use crate::sys::*;
use crate::window::one_touch;
use crate::wqe::{sge_list, Data, Part, Work};

/// What a list is to be: `struct ferritedv_list`.
#[repr(C)]
pub struct List {
    /// From [`ferritedv_alloc_list`].
    pub mr: *mut ibv_mr,
    /// The key that it has afterwards: same index.
    pub key: u32,
    /// `IBV_ACCESS_*` and [`FERRITEDV_ACCESS_ONE_TOUCH`].
    pub access: u32,
    /// Address of the first byte; does not count with `IBV_ACCESS_ZERO_BASED`.
    pub address: u64,
    /// Its pieces, one after another.
    pub pieces: *const ibv_sge,
    /// How many there are.
    pub num_pieces: c_int,
    /// Zero.
    pub comp_mask: u32,
}

/// The message that goes with a registration: `struct ferritedv_message`.
#[repr(C)]
pub struct Message {
    /// What is sent.
    pub sg_list: *const ibv_sge,
    /// Entries of it.
    pub num_sge: c_int,
    /// A key of the peer's that the message invalidates, or zero.
    pub invalidate_rkey: u32,
    /// XRC: the SRQ at the peer.
    pub remote_srqn: u32,
    /// Zero.
    pub comp_mask: u32,
}

// As a C compiler has them: the lab has one say so of the header.
const _: () = {
    assert!(size_of::<List>() == 40 && offset_of!(List, address) == 16);
    assert!(offset_of!(List, pieces) == 24 && offset_of!(List, comp_mask) == 36);
    assert!(size_of::<Message>() == 24 && offset_of!(Message, remote_srqn) == 16);
    assert!(size_of::<QpInitAttr>() == 16 && offset_of!(QpInitAttr, flags) == 8);
};

/// Makes a key for lists of up to `max_pieces` pieces. It stands for nothing until one is registered.
///
/// # Safety
///
/// `pd` is a live domain of any provider.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_alloc_list(pd: *mut ibv_pd, max_pieces: u32) -> *mut ibv_mr {
    // SAFETY: by the caller; a live domain has an open context.
    unsafe {
        let context = (*pd).context;
        if !is_ours(context) || Context::of(context).limits.features & FEATURE_LISTS == 0 {
            return fail(libc::EOPNOTSUPP);
        }
    }
    if max_pieces == 0 || max_pieces as usize > MAX_PIECES {
        return fail(libc::EINVAL);
    }
    let request = UverbsMrRequest {
        kind: UVERBS_MR_LIST,
        max_pieces,
        ..UverbsMrRequest::zeroed()
    };
    // SAFETY: the domain is of this provider; no memory is named.
    let mr = unsafe { register(pd, ptr::null_mut(), 0, 0, 0, request) };
    // What `ibv_reg_mr` fills in for its callers.
    // SAFETY: nobody else has `mr` yet; the domain lives.
    unsafe {
        if let Some(mr) = mr.as_mut() {
            (mr.context, mr.pd) = ((*pd).context, pd);
        }
    }
    mr
}

/// What the device calls the rights of a list.
fn device_access(access: u32, features: u64) -> Result<u32, c_int> {
    // The numbers of these are those of the verbs.
    let mut same = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED;
    // The optional ones say nothing that the device would have to know.
    let known = same
        | IBV_ACCESS_FLUSH_GLOBAL
        | IB_UVERBS_ACCESS_OPTIONAL_RANGE
        | FERRITEDV_ACCESS_ONE_TOUCH;
    if access & !known != 0 {
        return Err(libc::EINVAL);
    }
    // As the driver does for regions, whose right to atomics is not there either.
    if features & FEATURE_ATOMICS == 0 {
        same &= !IBV_ACCESS_REMOTE_ATOMIC;
    }
    let flush = match access & IBV_ACCESS_FLUSH_GLOBAL {
        0 => 0,
        _ if features & FEATURE_FLUSH == 0 => return Err(libc::EOPNOTSUPP),
        _ => ACCESS_FLUSH_GLOBAL,
    };
    Ok(access & same | flush | one_touch(access, features)?)
}

/// The part of a registration, and the pieces.
///
/// # Safety
///
/// `list` is as the header demands: a live key, and as many pieces as it says.
unsafe fn list_part<'a>(qp: &Qp, list: &List) -> Result<(ListPart, &'a [ibv_sge]), c_int> {
    if !qp.has(FEATURE_LISTS) {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the key lives, and there are as many pieces as the list says, by the caller.
    let (present, pieces) = unsafe { ((*list.mr).lkey, sge_list(list.pieces, list.num_pieces)?) };
    if !qp.registers_lists()
        || list.comp_mask != 0
        || pieces.is_empty()
        || pieces.len() > MAX_PIECES
        || Tag(list.key).index() != Tag(present).index()
    {
        return Err(libc::EINVAL);
    }
    let part = ListPart {
        tag: list.key,
        access: device_access(list.access, qp.features)?,
        address: if list.access & IBV_ACCESS_ZERO_BASED != 0 {
            0
        } else {
            list.address
        },
        pieces: pieces.len() as u8,
        ..ListPart::zeroed()
    };
    Ok((part, pieces))
}

/// The part of the message behind a registration.
fn send_part(qp: &Qp, invalidate_rkey: u32) -> Result<SendPart, c_int> {
    // An unreliable connection has no message that the registration could go with.
    if !matches!(qp.service(), IBV_QPT_RC | IBV_QPT_XRC_SEND) {
        return Err(libc::EINVAL);
    }
    Ok(SendPart {
        tag: invalidate_rkey,
        ..SendPart::zeroed()
    })
}

/// Posts what `write` writes, on a queue pair of any provider.
///
/// # Safety
///
/// `qp` is a live queue pair.
unsafe fn post(
    qp: *mut ibv_qp,
    flags: c_uint,
    write: impl FnOnce(&Qp, &mut SendQueue) -> Result<(), c_int>,
) -> c_int {
    // SAFETY: by the caller; a live queue pair has an open context.
    if !unsafe { is_ours((*qp).context) } {
        return libc::EOPNOTSUPP;
    }
    // The data of such a work request are entries.
    if flags & IBV_SEND_INLINE != 0 {
        return libc::EINVAL;
    }
    // SAFETY: it is a queue pair of this provider.
    let qp = unsafe { Qp::of(qp) };
    let mut queue = qp.send.lock();
    if !qp.may_send() {
        return libc::EINVAL;
    }
    match write(qp, &mut queue) {
        Ok(()) => {
            qp.publish_send(&queue);
            0
        }
        Err(errno) => errno,
    }
}

/// Posts the registration of a list.
///
/// # Safety
///
/// `qp` is a live queue pair of any provider, and `list` a `struct ferritedv_list` whose key lives and
/// which has as many pieces as it says.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_post_register_list(
    qp: *mut ibv_qp,
    wr_id: u64,
    flags: c_uint,
    list: *const List,
) -> c_int {
    let write = |qp: &Qp, queue: &mut SendQueue| {
        // SAFETY: the list is as the header demands, by the caller of the whole function.
        let (part, pieces) = unsafe { list_part(qp, &*list) }?;
        let work = Work {
            wr_id,
            opcode: SendOpcode::RegisterList,
            flags,
            srqn: 0,
            part: Part::List(part),
        };
        qp.write_send(queue, &work, &Data::Pieces(pieces, &[]))
    };
    // SAFETY: the queue pair is live, by the caller.
    unsafe { post(qp, flags, write) }
}

/// Posts the registration of a list and a message, as one work request.
///
/// # Safety
///
/// As for [`ferritedv_post_register_list`]; `message` is a `struct ferritedv_message` with as many
/// entries as it says.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_post_register_list_and_send(
    qp: *mut ibv_qp,
    wr_id: u64,
    flags: c_uint,
    list: *const List,
    message: *const Message,
) -> c_int {
    let write = |qp: &Qp, queue: &mut SendQueue| {
        // SAFETY: list and message are as the header demands, by the caller of the whole function.
        let ((part, pieces), message, sent) = unsafe {
            let sent = sge_list((*message).sg_list, (*message).num_sge)?;
            (list_part(qp, &*list)?, &*message, sent)
        };
        if message.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        let work = Work {
            wr_id,
            opcode: SendOpcode::RegisterListSend,
            flags,
            srqn: if qp.xrc { message.remote_srqn } else { 0 },
            part: Part::ListSend(part, send_part(qp, message.invalidate_rkey)?),
        };
        qp.write_send(queue, &work, &Data::Pieces(pieces, sent))
    };
    // SAFETY: the queue pair is live, by the caller.
    unsafe { post(qp, flags, write) }
}

/// The registration of a list, between `ibv_wr_start` and `ibv_wr_complete`.
///
/// # Safety
///
/// `qp` is a queue pair between the two, and `list` as for [`ferritedv_post_register_list`].
#[no_mangle]
pub unsafe extern "C" fn ferritedv_wr_register_list(qp: *mut ibv_qp_ex, list: *const List) {
    // SAFETY: by the caller this thread holds the lock since `ibv_wr_start`, and the list is as the header
    // demands; its pieces are written before this returns.
    unsafe {
        match list_part(held(qp).0, &*list) {
            Ok((part, pieces)) => {
                begin(qp, SendOpcode::RegisterList, Part::List(part));
                finish(qp, &Data::Pieces(pieces, &[]));
            }
            Err(errno) => refuse(qp, errno),
        }
    }
}

/// The registration of a list and a message as one work request, between `ibv_wr_start` and
/// `ibv_wr_complete`; what is sent is told by `ibv_wr_set_sge` or `ibv_wr_set_sge_list`.
///
/// # Safety
///
/// As for [`ferritedv_wr_register_list`].
#[no_mangle]
pub unsafe extern "C" fn ferritedv_wr_register_list_and_send(
    qp: *mut ibv_qp_ex,
    list: *const List,
    invalidate_rkey: u32,
) {
    // SAFETY: by the caller this thread holds the lock since `ibv_wr_start`, and the list is as the header
    // demands. `begin` and `refuse` borrow the queue anew, when `queue` is not used any more.
    unsafe {
        let (this, queue) = held(qp);
        let parts = list_part(this, &*list)
            .and_then(|(part, pieces)| Ok((part, pieces, send_part(this, invalidate_rkey)?)));
        match parts {
            Ok((part, pieces, send)) => {
                // The program may change its own before the message is told.
                queue.pieces[..pieces.len()].copy_from_slice(pieces);
                begin(qp, SendOpcode::RegisterListSend, Part::ListSend(part, send));
            }
            Err(errno) => refuse(qp, errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::post::post_send;
    use crate::private::verbs_device;
    use crate::testing::draws;
    use crate::testing::{
        self, cap, fetch, fill, finish_all, payload, rc, registering, send, sge, spoil, taken, wr,
        Page,
    };
    use core::sync::atomic::Ordering;
    use ferrite_abi::{
        send_doorbell, QueuePairRecord, SendHeader, Sge, ACCESS_LOCAL_WRITE, ACCESS_ONE_TOUCH,
        ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED,
        BLOCK_SIZE, DOORBELL_SEND, FEATURE_ONE_TOUCH, MAX_BLOCKS, SEND_FENCE, SEND_SIGNALED,
        SEND_SOLICITED,
    };

    const KEY: u32 = 0x0042_0007;

    /// A key, and a list to register under its next.
    struct Described {
        mr: Box<ibv_mr>,
        pieces: Vec<ibv_sge>,
        list: List,
    }

    impl Described {
        fn new(pieces: usize) -> Self {
            let mut mr = Box::new(ibv_mr {
                lkey: KEY - 1,
                rkey: KEY - 1,
                ..Default::default()
            });
            let pieces: Vec<ibv_sge> = (0..pieces).map(|n| sge(1000 + n as u32)).collect();
            let list = List {
                mr: &raw mut *mr,
                key: KEY,
                access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
                address: 0x1234_5678_9abc,
                pieces: pieces.as_ptr(),
                num_pieces: pieces.len() as c_int,
                comp_mask: 0,
            };
            Self { mr, pieces, list }
        }

        fn part(&self) -> ListPart {
            ListPart {
                tag: KEY,
                access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
                address: 0x1234_5678_9abc,
                pieces: self.pieces.len() as u8,
                ..ListPart::zeroed()
            }
        }
    }

    fn message(entries: &[ibv_sge]) -> Message {
        Message {
            sg_list: entries.as_ptr(),
            num_sge: entries.len() as c_int,
            invalidate_rkey: 0x77_00,
            remote_srqn: 0x55,
            comp_mask: 0,
        }
    }

    /// What the functions for any provider do once they know that it is this one.
    fn post_list(qp: &Qp, wr_id: u64, flags: u32, list: &List, message: Option<&Message>) -> c_int {
        with_context(qp, |qp| {
            // SAFETY: the queue pair and its context live, and what is posted is complete.
            unsafe {
                match message {
                    None => ferritedv_post_register_list(qp, wr_id, flags, list),
                    Some(message) => {
                        ferritedv_post_register_list_and_send(qp, wr_id, flags, list, message)
                    }
                }
            }
        })
    }

    /// Has a queue pair be of a context of this provider.
    fn with_context<R>(qp: &Qp, then: impl FnOnce(*mut ibv_qp) -> R) -> R {
        let raw: *mut ibv_qp = ptr::from_ref(qp).cast_mut().cast();
        // SAFETY: the structures are plain numbers and pointers, for which zero is valid; the tests
        // have the queue pair for themselves.
        unsafe {
            let mut device: verbs_device = core::mem::zeroed();
            let mut context: ibv_context = core::mem::zeroed();
            device.ops = crate::device::ops();
            context.device = ptr::from_mut(&mut device).cast();
            (*raw).context = &mut context;
            let result = then(raw);
            (*raw).context = ptr::null_mut();
            result
        }
    }

    fn entries_of(qp: &Qp, index: u32, count: usize) -> Vec<(u64, u32, u32)> {
        let bytes = payload(qp, index);
        (0..count)
            .map(|n| {
                let entry = Sge::from_prefix(&bytes[16 * n..]).unwrap();
                (entry.address, entry.length, entry.lkey)
            })
            .collect()
    }

    fn told(entries: &[ibv_sge]) -> Vec<(u64, u32, u32)> {
        let told = |entry: &ibv_sge| (entry.addr, entry.length, entry.lkey);
        entries.iter().map(told).collect()
    }

    #[test]
    fn a_registration_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let qp = registering(&cap(4, 1, 5, 1, 0), page.doorbells());
        spoil(&qp);
        let three = Described::new(3);
        let flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
        assert_eq!(post_list(&qp, 42, flags, &three.list, None), 0);
        assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 2));
        let header = SendHeader {
            opcode: SendOpcode::RegisterList.number(),
            blocks: 2,
            sge_count: 3,
            flags: SEND_SIGNALED | SEND_FENCE,
            ..SendHeader::zeroed()
        };
        let bytes = fetch(&qp, 0);
        assert_eq!(bytes[..16], *header.as_bytes());
        assert_eq!(bytes[16..48], *three.part().as_bytes());
        assert_eq!(entries_of(&qp, 0, 3), told(&three.pieces));
        assert_eq!(qp.send_done(0), (42, IBV_WC_DRIVER1));
        // The program keeps account of the key.
        assert_eq!(three.mr.lkey, KEY - 1);
    }

    #[test]
    fn a_registration_with_a_message_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let mut qp = registering(&cap(4, 1, 5, 1, 0), page.doorbells());
        spoil(&qp);
        let three = Described::new(3);
        let sent = [sge(7), sge(8)];
        for (xrc, srqn) in [(false, 0), (true, 0x55)] {
            qp.xrc = xrc;
            let start = qp.send.lock().posted.blocks;
            let flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
            let message = message(&sent);
            assert_eq!(post_list(&qp, 43, flags, &three.list, Some(&message)), 0);
            let header = SendHeader {
                opcode: SendOpcode::RegisterListSend.number(),
                blocks: 3,
                sge_count: 5,
                flags: SEND_SIGNALED | SEND_SOLICITED,
                srqn,
                ..SendHeader::zeroed()
            };
            let bytes = fetch(&qp, start);
            assert_eq!(bytes[..16], *header.as_bytes());
            assert_eq!(bytes[16..48], *three.part().as_bytes());
            let send = SendPart {
                tag: 0x77_00,
                ..SendPart::zeroed()
            };
            assert_eq!(bytes[48..64], *send.as_bytes());
            let mut all = told(&three.pieces);
            all.extend(told(&sent));
            assert_eq!(entries_of(&qp, start, 5), all);
            assert_eq!(qp.send_done(start), (43, IBV_WC_SEND));
        }
    }

    #[test]
    fn the_extended_interface_registers_lists() {
        let mut page = Page::new();
        let mut qp = registering(&cap(8, 1, 5, 1, 16), page.doorbells());
        spoil(&qp);
        let two = Described::new(2);
        let ex = testing::ex(&mut qp);
        // SAFETY: the operations were filled in by `ex` and are called in their order; what is
        // registered is complete.
        unsafe {
            let operations = ptr::read(ex);
            let (start, complete) = (
                operations.wr_start.unwrap(),
                operations.wr_complete.unwrap(),
            );
            start(ex);
            (*ex).wr_id = 1;
            (*ex).wr_flags = IBV_SEND_SIGNALED;
            ferritedv_wr_register_list(ex, &two.list);
            (*ex).wr_id = 2;
            // What is told when it begins counts, not what became of it.
            let mut pieces = two.pieces.clone();
            let list = List {
                pieces: pieces.as_ptr(),
                ..Described::new(2).list
            };
            let list = List {
                mr: two.list.mr,
                ..list
            };
            ferritedv_wr_register_list_and_send(ex, &list, 0x99_00);
            pieces.fill(sge(1));
            operations.wr_set_sge.unwrap()(ex, 3, 4, 5);
            operations.wr_send.unwrap()(ex);
            operations.wr_set_sge.unwrap()(ex, 6, 7, 8);
            assert_eq!(page.take(DOORBELL_SEND), 0);
            assert_eq!(complete(ex), 0);
            assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 2 + 2 + 1));
        }
        let (_, Part::List(part)) = taken(&qp, 0) else {
            panic!("no list");
        };
        assert_eq!(part, two.part());
        assert_eq!(entries_of(&qp, 0, 2), told(&two.pieces));
        let (header, Part::ListSend(part, send)) = taken(&qp, 2) else {
            panic!("no list with a message");
        };
        assert_eq!((part, send.tag), (two.part(), 0x99_00));
        assert_eq!(header.sge_count, 3);
        let mut all = told(&two.pieces);
        all.push((4, 5, 3));
        assert_eq!(entries_of(&qp, 2, 3), all);
        assert!(matches!(taken(&qp, 4).1, Part::Send(_)));
        assert_eq!(qp.send_done(0), (1, IBV_WC_DRIVER1));
        assert_eq!(qp.send_done(2), (2, IBV_WC_SEND));
        let before = qp.send.lock().posted;

        // All or nothing: no message, a message that is copied, one of an impossible list.
        let end = |body: &dyn Fn()| -> c_int {
            // SAFETY: as above.
            unsafe {
                let operations = ptr::read(ex);
                operations.wr_start.unwrap()(ex);
                ferritedv_wr_register_list(ex, &two.list);
                body();
                operations.wr_complete.unwrap()(ex)
            }
        };
        // SAFETY: as above.
        let begin = || unsafe { ferritedv_wr_register_list_and_send(ex, &two.list, 0) };
        assert_eq!(end(&begin), libc::EINVAL);
        let inline = || {
            begin();
            // SAFETY: as above.
            unsafe {
                let data = ptr::from_ref(&before).cast_mut().cast();
                ptr::read(ex).wr_set_inline_data.unwrap()(ex, data, 8);
            }
        };
        assert_eq!(end(&inline), libc::EINVAL);
        let mut bad = Described::new(2);
        bad.list.key ^= 0x100;
        // SAFETY: as above.
        let refused = || unsafe { ferritedv_wr_register_list(ex, &bad.list) };
        assert_eq!(end(&refused), libc::EINVAL);
        assert_eq!(qp.send.lock().posted, before);
        assert_eq!(page.take(DOORBELL_SEND), 0);
        assert_eq!(end(&|| ()), 0);
    }

    #[test]
    fn what_a_work_request_cannot_say_is_refused_and_leaves_no_trace() {
        let mut page = Page::new();
        let mut qp = registering(&cap(4, 1, 4, 1, 0), page.doorbells());
        let most = qp.layout.capacity.max_send_sge as usize;
        assert!(most < MAX_PIECES);
        let change = |change: &dyn Fn(&mut List)| {
            let mut described = Described::new(2);
            change(&mut described.list);
            described
        };
        let sent = [sge(1)];
        for (what, list) in [
            ("another index", change(&|list| list.key += 0x100)),
            ("no pieces", change(&|list| list.num_pieces = 0)),
            ("fewer than none", change(&|list| list.num_pieces = -1)),
            ("more than a list has", Described::new(MAX_PIECES + 1)),
            ("more than there is room for", Described::new(most + 1)),
            ("windows", change(&|list| list.access |= IBV_ACCESS_MW_BIND)),
            (
                "paging",
                change(&|list| list.access |= IBV_ACCESS_ON_DEMAND),
            ),
            (
                "persistence",
                change(&|list| list.access |= IBV_ACCESS_FLUSH_PERSISTENT),
            ),
            ("no such right", change(&|list| list.access |= 1 << 31)),
            ("a later field", change(&|list| list.comp_mask = 1)),
        ] {
            assert_eq!(
                post_list(&qp, 1, 0, &list.list, None),
                libc::EINVAL,
                "{what}"
            );
            let with_message = post_list(&qp, 1, 0, &list.list, Some(&message(&sent)));
            assert_eq!(with_message, libc::EINVAL, "{what}");
        }
        let full = Described::new(most);
        let refused = |qp: &Qp, flags, message: Option<&Message>| {
            post_list(qp, 1, flags, &full.list, message)
        };
        assert_eq!(refused(&qp, IBV_SEND_INLINE, None), libc::EINVAL);
        // Its pieces and the message's entries are too many together.
        assert_eq!(refused(&qp, 0, Some(&message(&sent))), libc::EINVAL);
        let later = Message {
            comp_mask: 1,
            ..message(&[])
        };
        assert_eq!(refused(&qp, 0, Some(&later)), libc::EINVAL);
        qp.max_message = 100;
        let two = Described::new(2);
        let long = [sge(100), sge(1)];
        let sends = |qp: &Qp, entries| post_list(qp, 1, 0, &two.list, Some(&message(entries)));
        assert_eq!(sends(&qp, &long), libc::EINVAL);
        assert_eq!(qp.send.lock().posted, Default::default());
        assert_eq!(page.take(DOORBELL_SEND), 0);
        // That a list is longer than a message is nothing to anybody.
        assert_eq!(sends(&qp, &long[..1]), 0);
        assert_eq!(refused(&qp, 0, None), 0);

        // Of a queue pair that was not made for it, of a device that cannot, of another provider.
        let mut plain = rc(&cap(4, 1, 4, 1, 0), page.doorbells());
        assert_eq!(post_list(&plain, 1, 0, &two.list, None), libc::EINVAL);
        plain.features = !FEATURE_LISTS;
        assert_eq!(post_list(&plain, 1, 0, &two.list, None), libc::EOPNOTSUPP);
        // SAFETY: the structures are plain numbers and pointers, for which zero is valid.
        let (mut device, mut context): (verbs_device, ibv_context) =
            unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
        context.device = ptr::from_mut(&mut device).cast();
        let mut foreign = ibv_qp {
            context: &mut context,
            ..Default::default()
        };
        let mut pd = ibv_pd {
            context: &mut context,
            ..Default::default()
        };
        // SAFETY: queue pair, domain, context and device live.
        unsafe {
            let posted = ferritedv_post_register_list(&mut foreign, 1, 0, &two.list);
            assert_eq!(posted, libc::EOPNOTSUPP);
            let message = message(&sent);
            let posted =
                ferritedv_post_register_list_and_send(&mut foreign, 1, 0, &two.list, &message);
            assert_eq!(posted, libc::EOPNOTSUPP);
            assert!(ferritedv_alloc_list(&mut pd, 4).is_null());
            assert_eq!(*libc::__errno_location(), libc::EOPNOTSUPP);
        }
    }

    #[test]
    fn a_message_goes_with_a_registration_where_it_is_reliable() {
        let mut page = Page::new();
        let qp = registering(&cap(4, 1, 4, 1, 0), page.doorbells());
        let raw: *mut ibv_qp = ptr::from_ref(&*qp).cast_mut().cast();
        let two = Described::new(2);
        for (service, result) in [
            (IBV_QPT_RC, 0),
            (IBV_QPT_XRC_SEND, 0),
            (IBV_QPT_UC, libc::EINVAL),
        ] {
            // SAFETY: the test has the queue pair for itself.
            unsafe { (*raw).qp_type = service };
            let sent = post_list(&qp, 1, 0, &two.list, Some(&message(&[sge(1)])));
            assert_eq!(sent, result, "{service}");
            assert_eq!(post_list(&qp, 1, 0, &two.list, None), 0, "{service}");
            finish_all(&qp);
        }
        // SAFETY: as above.
        unsafe { (*raw).state = IBV_QPS_RTR };
        assert_eq!(post_list(&qp, 1, 0, &two.list, None), libc::EINVAL);
    }

    #[test]
    fn rights_are_told_in_the_devices_words() {
        let all = u64::MAX;
        for (asked, features, told) in [
            (0, all, Ok(0)),
            (IBV_ACCESS_LOCAL_WRITE, all, Ok(ACCESS_LOCAL_WRITE)),
            (
                IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED,
                all,
                Ok(ACCESS_REMOTE_READ | ACCESS_ZERO_BASED),
            ),
            (IBV_ACCESS_REMOTE_ATOMIC, all, Ok(ACCESS_REMOTE_ATOMIC)),
            (IBV_ACCESS_REMOTE_ATOMIC, !FEATURE_ATOMICS, Ok(0)),
            (IBV_ACCESS_FLUSH_GLOBAL, all, Ok(ACCESS_FLUSH_GLOBAL)),
            (
                IBV_ACCESS_FLUSH_GLOBAL,
                !FEATURE_FLUSH,
                Err(libc::EOPNOTSUPP),
            ),
            (FERRITEDV_ACCESS_ONE_TOUCH, all, Ok(ACCESS_ONE_TOUCH)),
            (
                FERRITEDV_ACCESS_ONE_TOUCH,
                !FEATURE_ONE_TOUCH,
                Err(libc::EOPNOTSUPP),
            ),
            (IBV_ACCESS_RELAXED_ORDERING, all, Ok(0)),
            (IBV_ACCESS_HUGETLB, all, Err(libc::EINVAL)),
        ] {
            assert_eq!(device_access(asked, features), told, "{asked:#x}");
        }
        let mut page = Page::new();
        let qp = registering(&cap(4, 1, 4, 1, 0), page.doorbells());
        let mut zero = Described::new(1);
        zero.list.access |= IBV_ACCESS_ZERO_BASED;
        assert_eq!(post_list(&qp, 1, 0, &zero.list, None), 0);
        let Part::List(part) = taken(&qp, 0).1 else {
            panic!("no list");
        };
        assert_eq!(part.address, 0, "addresses count from zero");
    }

    /// A queue that was promised to take so many work requests takes as many registrations, of any
    /// number of pieces, and not one more.
    #[test]
    fn the_ring_is_never_overrun_by_registrations() {
        let mut page = Page::new();
        for wr_count in [1, 2, 3, 8, 37] {
            for sge_count in [1, 2, 3, 6, 7, 16] {
                let qp = registering(&cap(wr_count, 1, sge_count, 1, 0), page.doorbells());
                let given = qp.layout.capacity;
                let most = given.max_send_sge as usize;
                for pieces in [1, most.div_ceil(2), most] {
                    let described = Described::new(pieces);
                    let data = vec![sge(1); most - pieces];
                    for message in [None, Some(message(&data))] {
                        let posted = fill(&qp, || {
                            let result = post_list(&qp, 1, 0, &described.list, message.as_ref());
                            if result != 0 {
                                assert_eq!(result, libc::ENOMEM);
                                return None;
                            }
                            Some(0)
                        });
                        assert_eq!(posted, given.max_send_wr, "{pieces} pieces");
                        finish_all(&qp);
                    }
                }
            }
        }
    }

    /// Registrations, messages and writes by chance, completed by chance, over the ends of the ring
    /// and of the indices: what lies in the ring is what was posted, and a refusal for want of room is
    /// for want of room.
    #[test]
    fn registrations_wrap_with_the_ring_and_its_indices() {
        let mut page = Page::new();
        let qp = registering(&cap(7, 1, 16, 1, 0), page.doorbells());
        qp.begin_at(u32::MAX - 100);
        let mut draw = draws(0x9e37_79b9_7f4a_7c15);
        let mut outstanding = std::collections::VecDeque::new();
        let mut wrapped = 0;
        for wr_id in 0..3000u64 {
            let kind = draw(3);
            let pieces = 1 + draw(MAX_PIECES as u64) as usize;
            let described = Described::new(pieces);
            let data = vec![sge(wr_id as u32 + 1); draw((MAX_PIECES - pieces) as u64 + 1) as usize];
            let start = qp.send.lock().posted.blocks;
            let (result, expected) = match kind {
                0 => (
                    post_list(&qp, wr_id, 0, &described.list, None),
                    told(&described.pieces),
                ),
                1 => {
                    let mut expected = told(&described.pieces);
                    expected.extend(told(&data));
                    let message = message(&data);
                    (
                        post_list(&qp, wr_id, 0, &described.list, Some(&message)),
                        expected,
                    )
                }
                _ => {
                    let mut entries = described.pieces.clone();
                    let mut write = wr(IBV_WR_RDMA_WRITE, &mut entries, 0);
                    write.wr_id = wr_id;
                    (send(&qp, &mut write), told(&entries))
                }
            };
            if result == 0 {
                let blocks = fetch(&qp, start).len() / BLOCK_SIZE;
                assert!(blocks <= MAX_BLOCKS);
                let first = start & (qp.layout.send.entries - 1);
                wrapped += u32::from(first + blocks as u32 > qp.layout.send.entries);
                outstanding.push_back((start, wr_id, expected));
            } else {
                assert_eq!(result, libc::ENOMEM);
                assert_eq!(outstanding.len(), qp.layout.capacity.max_send_wr as usize);
                let done = 1 + draw(outstanding.len() as u64) as usize;
                let mut last = None;
                for (start, wr_id, expected) in outstanding.drain(..done) {
                    taken(&qp, start);
                    assert_eq!(entries_of(&qp, start, expected.len()), expected);
                    last = Some((start, wr_id));
                }
                let (start, wr_id) = last.unwrap();
                assert_eq!(qp.send_done(start).0, wr_id);
            }
            let shown = qp.memory.record(offset_of!(QueuePairRecord, send_producer));
            assert_eq!(shown.load(Ordering::Relaxed), qp.send.lock().posted.blocks);
        }
        assert!(
            wrapped > 100,
            "{wrapped} wrapped around the end of the ring"
        );
        assert!(
            qp.send.lock().posted.blocks < 1 << 16,
            "the indices went round"
        );
    }

    #[test]
    fn lists_are_invalidated_like_windows() {
        let mut page = Page::new();
        let qp = registering(&cap(4, 1, 1, 1, 0), page.doorbells());
        let mut request = wr(IBV_WR_LOCAL_INV, &mut [], 0);
        request.__bindgen_anon_1.invalidate_rkey = KEY;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the work request is complete.
        let result = unsafe {
            post_send(
                ptr::from_ref(&*qp).cast_mut().cast(),
                &mut request,
                &mut bad,
            )
        };
        assert_eq!(result, 0);
        let Part::Send(part) = taken(&qp, 0).1 else {
            panic!("no invalidation");
        };
        assert_eq!(part.tag, KEY);
    }
}
