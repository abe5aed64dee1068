// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The extended way of posting (`ibv_wr_*`): work requests are built call by call between a start
//! and a completion, which shows all of them to the device or none.
//!
//! From `wr_start` to `wr_complete` or `wr_abort` the send queue's lock is held by the posting
//! thread.

use core::ffi::{c_int, c_void};
use core::mem::forget;

use ferrite_abi::{
    FlushPart, SendOpcode, FEATURE_ATOMICS, FEATURE_ATOMIC_WRITE, FEATURE_FLUSH, FEATURE_WINDOWS,
    FLUSH_REGION,
};

use crate::post::INVALIDATING;
use crate::private::{verbs_qp, VERBS_QP_EX};
use crate::qp::Qp;
use crate::send_queue::{SendCount, SendQueue};
use crate::sys::*;
use crate::window::bind_part;
use crate::wqe::{Data, Part, Work};

/// What is under way between start and completion.
pub(crate) struct Session {
    /// Where to go back to.
    posted: SendCount,
    /// The first error; nothing is written after it.
    error: c_int,
    /// A work request that waits for its data.
    work: Option<Work>,
}

impl Session {
    pub(crate) fn new() -> Self {
        Self {
            posted: SendCount::default(),
            error: 0,
            work: None,
        }
    }
}

const EVERYWHERE: u64 = (IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;
const UD: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;
const RELIABLE: u64 = IBV_QP_EX_WITH_RDMA_READ as u64;
const ATOMICS: u64 =
    (IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) as u64;
const INVALIDATION: u64 = (IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;

/// The operations that a queue pair of this type may be made with.
pub(crate) fn supported(qp_type: ibv_qp_type, features: u64) -> u64 {
    match qp_type {
        IBV_QPT_UD => return UD,
        IBV_QPT_RAW_PACKET => return u64::from(IBV_QP_EX_WITH_SEND),
        IBV_QPT_XRC_RECV => return 0,
        _ => {}
    }
    let mut operations = EVERYWHERE;
    if features & FEATURE_WINDOWS != 0 {
        operations |= u64::from(IBV_QP_EX_WITH_BIND_MW);
    }
    if matches!(qp_type, IBV_QPT_RC | IBV_QPT_XRC_SEND) {
        operations |= RELIABLE;
        if features & FEATURE_ATOMICS != 0 {
            operations |= ATOMICS;
        }
    }
    if qp_type == IBV_QPT_RC {
        if features & FEATURE_ATOMIC_WRITE != 0 {
            operations |= u64::from(IBV_QP_EX_WITH_ATOMIC_WRITE);
        }
        if features & FEATURE_FLUSH != 0 {
            operations |= u64::from(IBV_QP_EX_WITH_FLUSH);
        }
    }
    if features & INVALIDATING != 0 {
        operations |= INVALIDATION;
    }
    operations
}

/// Fills in the operations of a queue pair.
///
/// # Safety
///
/// `verbs` is a queue pair of this provider that nobody else uses yet.
pub(crate) unsafe fn enable(verbs: *mut verbs_qp, operations: u64) {
    // SAFETY: the queue pair is of this provider and nobody else uses it, by the caller.
    let verbs = unsafe { &mut *verbs };
    verbs.comp_mask |= VERBS_QP_EX;
    let qp = &mut verbs.qp_ex;
    let with = |flag: ibv_qp_create_send_ops_flags| operations & u64::from(flag) != 0;
    if with(IBV_QP_EX_WITH_SEND) {
        qp.wr_send = Some(wr_send);
    }
    if with(IBV_QP_EX_WITH_SEND_WITH_IMM) {
        qp.wr_send_imm = Some(wr_send_imm);
    }
    if with(IBV_QP_EX_WITH_SEND_WITH_INV) {
        qp.wr_send_inv = Some(wr_send_inv);
    }
    if with(IBV_QP_EX_WITH_RDMA_WRITE) {
        qp.wr_rdma_write = Some(wr_rdma_write);
    }
    if with(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) {
        qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    }
    if with(IBV_QP_EX_WITH_RDMA_READ) {
        qp.wr_rdma_read = Some(wr_rdma_read);
    }
    if with(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) {
        qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    }
    if with(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) {
        qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    }
    if with(IBV_QP_EX_WITH_ATOMIC_WRITE) {
        qp.wr_atomic_write = Some(wr_atomic_write);
    }
    if with(IBV_QP_EX_WITH_FLUSH) {
        qp.wr_flush = Some(wr_flush);
    }
    if with(IBV_QP_EX_WITH_LOCAL_INV) {
        qp.wr_local_inv = Some(wr_local_inv);
    }
    if with(IBV_QP_EX_WITH_BIND_MW) {
        qp.wr_bind_mw = Some(wr_bind_mw);
    }
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
}

/// The queue pair and its send queue.
///
/// # Safety
///
/// `qp` is live, the calling thread is between `wr_start` and the end, and uses no other result
/// of this function.
pub(crate) unsafe fn held<'a>(qp: *mut ibv_qp_ex) -> (&'a Qp, &'a mut SendQueue) {
    // SAFETY: the `ibv_qp` is at the start of the `ibv_qp_ex`; the lock is held, by the caller.
    unsafe {
        let qp = Qp::of(qp.cast());
        (qp, qp.send.held_mut())
    }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the consumer passes a live queue pair.
    let qp = unsafe { Qp::of(qp.cast()) };
    let mut queue = qp.send.lock();
    queue.session = Session {
        posted: queue.posted,
        error: if qp.may_send() { 0 } else { libc::EINVAL },
        work: None,
    };
    forget(queue);
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the consumer ends what it started.
    let (qp, queue) = unsafe { held(qp) };
    // A work request whose data were never given is as wrong as one that was refused.
    let error = match queue.session.error {
        0 if queue.session.work.is_some() => libc::EINVAL,
        error => error,
    };
    if error != 0 {
        queue.posted = queue.session.posted;
    } else if queue.posted != queue.session.posted {
        qp.publish_send(queue);
    }
    // SAFETY: `wr_start` locked and forgot; `queue` is not used any more.
    unsafe { qp.send.unlock() };
    error
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the consumer ends what it started.
    let (qp, queue) = unsafe { held(qp) };
    queue.posted = queue.session.posted;
    // SAFETY: `wr_start` locked and forgot; `queue` is not used any more.
    unsafe { qp.send.unlock() };
}

/// Begins a work request, which gets its data next.
///
/// # Safety
///
/// As for [`held`].
pub(crate) unsafe fn begin(qp: *mut ibv_qp_ex, opcode: SendOpcode, part: Part) {
    // SAFETY: this thread holds the lock since `wr_start`, by the caller.
    let (wr_id, flags, (_, queue)) = unsafe { ((*qp).wr_id, (*qp).wr_flags, held(qp)) };
    if queue.session.work.is_some() && queue.session.error == 0 {
        queue.session.error = libc::EINVAL;
    }
    queue.session.work = Some(Work {
        wr_id,
        opcode,
        flags,
        srqn: 0,
        part,
    });
}

/// Gives the begun work request its data.
///
/// # Safety
///
/// As for [`held`].
pub(crate) unsafe fn finish(qp: *mut ibv_qp_ex, data: &Data<'_>) {
    // SAFETY: this thread holds the lock since `wr_start`, by the caller.
    let (qp, queue) = unsafe { held(qp) };
    let result = match queue.session.work.take() {
        _ if queue.session.error != 0 => return,
        // A datagram whose peer was not named.
        Some(work) if qp.ud && !matches!(work.part, Part::Datagram(_)) => Err(libc::EINVAL),
        // Its pieces are known already: what is given now is the message.
        Some(
            work @ Work {
                part: Part::ListSend(list, _),
                ..
            },
        ) => match data {
            Data::Sges(message) => {
                let pieces = queue.pieces;
                let data = Data::Pieces(&pieces[..list.pieces.into()], message);
                qp.write_send(queue, &work, &data)
            }
            _ => Err(libc::EINVAL),
        },
        Some(work) => qp.write_send(queue, &work, data),
        None => Err(libc::EINVAL),
    };
    if let Err(errno) = result {
        queue.session.error = errno;
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::Send, Part::send(0)) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, immediate: __be32) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::SendImmediate, Part::send(immediate)) };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::SendInvalidate, Part::invalidate(rkey)) };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::Write, Part::remote(address, rkey, 0)) };
}

unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    immediate: __be32,
) {
    let part = Part::remote(address, rkey, immediate);
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::WriteImmediate, part) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::Read, Part::remote(address, rkey, 0)) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    compare: u64,
    swap: u64,
) {
    let part = Part::compare_swap(address, rkey, compare, swap);
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::CompareSwap, part) };
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, address: u64, add: u64) {
    let part = Part::fetch_add(address, rkey, add);
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { begin(qp, SendOpcode::FetchAdd, part) };
}

/// The eight bytes are copied now, whatever the queue's inline capacity: complete at once.
unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    value: *const c_void,
) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`;
    // the consumer passes eight bytes.
    unsafe {
        let value = value.cast::<[u8; 8]>().read_unaligned();
        begin(qp, SendOpcode::AtomicWrite, Part::remote(address, rkey, 0));
        finish(qp, &Data::Eight(value));
    }
}

/// Has no data: complete at once.
unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    length: usize,
    placement: u8,
    selectivity: u8,
) {
    // Of a whole region neither address nor length mean anything.
    let (address, length) = if u32::from(selectivity) == FLUSH_REGION {
        (0, 0)
    } else {
        (address, length)
    };
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    let most = unsafe { held(qp) }.0.max_message;
    let Some(length) = u32::try_from(length).ok().filter(|&n| n <= most) else {
        // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
        unsafe { refuse(qp, libc::EINVAL) };
        return;
    };
    let part = Part::Flush(FlushPart {
        address,
        rkey,
        length,
        placement: placement.into(),
        selectivity: selectivity.into(),
        reserved: 0,
    });
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe {
        begin(qp, SendOpcode::Flush, part);
        finish(qp, &Data::Sges(&[]));
    }
}

/// Has no data: complete at once.
unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe {
        begin(qp, SendOpcode::LocalInvalidate, Part::invalidate(rkey));
        finish(qp, &Data::Sges(&[]));
    }
}

/// Has no data either.
unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`;
    // the consumer passes a live window and what to bind it to.
    unsafe {
        match bind_part(mw, rkey, &*info, held(qp).0.features) {
            Ok(part) => {
                begin(qp, SendOpcode::Bind, part);
                finish(qp, &Data::Sges(&[]));
            }
            Err(errno) => refuse(qp, errno),
        }
    }
}

/// Names the peer of a datagram that was begun.
unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`;
    // the consumer passes a live address handle.
    unsafe {
        let (this, queue) = held(qp);
        match &mut queue.session.work {
            Some(work) if this.ud && !ah.is_null() => {
                let immediate = match work.part {
                    Part::Send(part) => part.immediate,
                    // The peer is named once more.
                    Part::Datagram(part) => part.immediate,
                    _ => return refuse(qp, libc::EINVAL),
                };
                work.part = Part::datagram(ah, remote_qpn, remote_qkey, immediate);
            }
            _ => refuse(qp, libc::EINVAL),
        }
    }
}

/// XRC: names the SRQ at the peer.
unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe {
        let (this, queue) = held(qp);
        match &mut queue.session.work {
            Some(work) if this.xrc => work.srqn = srqn,
            _ => refuse(qp, libc::EINVAL),
        }
    }
}

/// Makes the completion fail.
///
/// # Safety
///
/// As for [`held`].
pub(crate) unsafe fn refuse(qp: *mut ibv_qp_ex, errno: c_int) {
    // SAFETY: this thread holds the lock since `wr_start`, by the caller.
    let (_, queue) = unsafe { held(qp) };
    if queue.session.error == 0 {
        queue.session.error = errno;
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let entries = [ibv_sge { addr, length, lkey }];
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { finish(qp, &Data::Sges(&entries)) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, entries: *const ibv_sge) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`;
    // the list has `count` entries.
    unsafe { finish(qp, &Data::Sges(slice(entries, count))) };
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buffers = [ibv_data_buf { addr, length }];
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`.
    unsafe { finish(qp, &Data::CopyBuffers(&buffers)) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    buffers: *const ibv_data_buf,
) {
    // SAFETY: `ibv_wr_*` is for the thread that holds the lock since `wr_start`;
    // the list has `count` buffers.
    unsafe { finish(qp, &Data::CopyBuffers(slice(buffers, count))) };
}

/// # Safety
///
/// `list` points to `count` elements, unless `count` is zero.
unsafe fn slice<'a, T>(list: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        &[]
    } else {
        // SAFETY: that so many are there is the caller's promise.
        unsafe { core::slice::from_raw_parts(list, count) }
    }
}
