// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Life of a queue pair: making, changing, destroying.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferrite_abi::{
    Plain, QueuePairRecord, UverbsContextResponse, UverbsQpRequest, UverbsQpResponse,
    SEND_SIGNALED, UVERBS_QP_LISTS,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::fail;
use crate::heap;
use crate::memory::{Doorbells, OwnLine, SpinLock};
use crate::object::{self, or_null};
use crate::post_ex;
use crate::private::*;
use crate::protection::Pd;
use crate::qp_layout::{QpLayout, Requests};
use crate::raw;
use crate::receive_queue::ReceiveQueue;
use crate::ring::{QueueBuffer, RECEIVE, SEND};
use crate::send_queue::{SendQueue, SendSlot};
use crate::srq::Srq;
use crate::sys::*;

/// A queue pair.
#[repr(C)]
pub struct Qp {
    pub(crate) verbs: UnsafeCell<verbs_qp>,
    pub(crate) qpn: u32,
    pub(crate) features: u64,
    /// The longest message, in bytes.
    pub(crate) max_message: u32,
    /// `SEND_SIGNALED`, where every work request has a completion; else zero.
    pub(crate) signal_all: u16,
    /// UD: sends name their peer.
    pub(crate) ud: bool,
    /// XRC INI: sends name an SRQ at the peer.
    pub(crate) xrc: bool,
    /// It has a receive queue of its own.
    pub(crate) receives: bool,
    /// What it can do beyond the verbs, `UVERBS_QP_*`.
    flags: u8,
    pub(crate) doorbells: Doorbells,
    pub(crate) layout: QpLayout,
    pub(crate) memory: QueueBuffer,
    /// What a completion of the work request that starts at a block is told as.
    pub(crate) send_slots: Box<[SendSlot]>,
    pub(crate) receive_slots: Box<[AtomicU64]>,
    /// For who posts sends.
    pub(crate) send: OwnLine<SpinLock<SendQueue>>,
    /// For who posts receives.
    pub(crate) receive: OwnLine<SpinLock<ReceiveQueue>>,
    /// For who polls for sends: what of the send queue is known to be done, as a
    /// [`crate::send_queue::SendCount`].
    pub(crate) send_finished: OwnLine<AtomicU64>,
    /// For who polls for receives, which may be another: entries that are known to be done, free-running.
    pub(crate) receive_finished: OwnLine<AtomicU32>,
}

impl Qp {
    /// # Safety
    ///
    /// `qp` is a live queue pair of this provider.
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: by the caller it came from `create` or `xrc::open_qp`, where the `ibv_qp` is at the
        // start of a `Qp`; after that it is shared only.
        unsafe { &*qp.cast::<Qp>() }
    }

    /// A queue pair that the kernel does not know of yet; the memory is for this layout.
    pub(crate) fn boxed(
        layout: QpLayout,
        doorbells: Doorbells,
        memory: QueueBuffer,
    ) -> Result<Box<Self>, c_int> {
        let qp = heap::boxed(Self {
            verbs: UnsafeCell::new(verbs_qp {
                qp_ex: ibv_qp_ex::default(),
                comp_mask: 0,
                xrcd: ptr::null_mut(),
            }),
            qpn: 0,
            features: 0,
            max_message: 0,
            signal_all: 0,
            ud: false,
            xrc: false,
            receives: true,
            flags: 0,
            doorbells,
            memory,
            send: OwnLine(SpinLock::new(SendQueue::new())),
            send_slots: heap::slice(layout.send.entries as usize, |_| SendSlot::default())?,
            receive: OwnLine(SpinLock::new(ReceiveQueue::new())),
            receive_slots: heap::slice(layout.receive.ring.entries as usize, |_| {
                AtomicU64::new(0)
            })?,
            send_finished: OwnLine(AtomicU64::new(0)),
            receive_finished: OwnLine(AtomicU32::new(0)),
            layout,
        })?;
        // The record is the host's until the device has it, and the rest of it is zero: the device
        // will sleep until it is rung.
        qp.memory.begin_asleep(&SEND);
        Ok(qp)
    }

    /// The state, as far as this process knows.
    pub(crate) fn state(&self) -> ibv_qp_state {
        // SAFETY: the field is part of `verbs` and initialised (`boxed`). libibverbs writes it in
        // `ibv_modify_qp`, which a consumer does not run against its own posting; against others the
        // read is volatile, of an aligned word.
        unsafe { ptr::read_volatile(&raw const (*self.verbs.get()).qp_ex.qp_base.state) }
    }

    /// Which service it has.
    pub(crate) fn service(&self) -> ibv_qp_type {
        // SAFETY: libibverbs writes the field once, when the queue pair is made.
        unsafe { ptr::read(&raw const (*self.verbs.get()).qp_ex.qp_base.qp_type) }
    }

    /// Whether it was made to register lists.
    pub(crate) fn registers_lists(&self) -> bool {
        self.flags & UVERBS_QP_LISTS != 0
    }

    /// The SRQ, if it uses one.
    #[inline]
    pub(crate) fn srq(&self) -> Option<&Srq> {
        // SAFETY: libibverbs writes the field once, when the queue pair is made. It names an SRQ of this
        // provider, which the kernel does not let go while a queue pair uses it.
        unsafe {
            let srq = ptr::read(&raw const (*self.verbs.get()).qp_ex.qp_base.srq);
            if srq.is_null() {
                None
            } else {
                Some(Srq::of(srq))
            }
        }
    }

    /// Empties both queues, as the device has done with its side, and with its half of the record,
    /// in state RESET.
    pub(crate) fn reset_queues(&self) {
        let mut send = self.send.lock();
        let mut receive = self.receive.lock();
        *send = SendQueue::new();
        *receive = ReceiveQueue::new();
        self.send_finished.store(0, Ordering::Release);
        self.receive_finished.store(0, Ordering::Release);
        self.memory.begin_at(&RECEIVE, 0);
        self.memory.begin_at(&SEND, 0);
    }

    /// Has each of its completion queues drop its entries: `forget` is one of the ways that they have for
    /// it. The device writes no more of them: the queue pair is destroyed, or in state RESET.
    ///
    /// # Safety
    ///
    /// As for [`Qp::completion_queues`].
    unsafe fn drop_completions(&self, forget: fn(&Cq, &Qp)) {
        // SAFETY: that libibverbs has filled the pointers in is the caller's promise.
        for cq in unsafe { self.completion_queues() }.into_iter().flatten() {
            forget(cq, self);
        }
    }

    /// What to tell the kernel of it.
    fn request(&self) -> UverbsQpRequest {
        let (send, receive) = (&self.layout.send, &self.layout.receive.ring);
        UverbsQpRequest {
            buffer: self.memory.address(),
            length: self.memory.length(),
            sq_offset: send.offset as u32,
            rq_offset: receive.offset as u32,
            record_offset: self.memory.record_offset(),
            sq_log_blocks: send.log_entries(),
            rq_log_entries: receive.log_entries(),
            rq_log_stride: receive.log_stride(),
            flags: self.flags,
            reserved: 0,
        }
    }

    /// The completion queues for sends and receives, where it has them.
    ///
    /// # Safety
    ///
    /// The queue pair was made, so that libibverbs has filled the pointers in.
    unsafe fn completion_queues(&self) -> [Option<&Cq>; 2] {
        // SAFETY: the pointers are filled in, by the caller; they are null or name completion queues of
        // this provider, which the kernel does not let go while a queue pair uses them.
        unsafe {
            let qp = &raw const (*self.verbs.get()).qp_ex.qp_base;
            [(*qp).send_cq, (*qp).recv_cq].map(|cq| (!cq.is_null()).then(|| Cq::of(cq)))
        }
    }
}

/// What its users leave to the queue pair, by its service: which of the queues it has, and which
/// attributes count.
#[derive(Clone, Copy)]
struct Kind {
    /// XRC TGT: all its queues are the kernel's matter.
    target: bool,
    /// XRC INI: sends only.
    initiator: bool,
    /// It has a receive queue of its own.
    receives: bool,
}

impl Kind {
    /// Takes from `attr` what does not count for it.
    fn of(attr: &mut ibv_qp_init_attr_ex) -> Result<Self, c_int> {
        let target = attr.qp_type == IBV_QPT_XRC_RECV;
        let initiator = attr.qp_type == IBV_QPT_XRC_SEND;
        let usual = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RAW_PACKET];
        if !usual.contains(&attr.qp_type) && !target && !initiator {
            return Err(libc::EOPNOTSUPP);
        }
        if (attr.send_cq.is_null() && !target) || (attr.recv_cq.is_null() && !target && !initiator)
        {
            return Err(libc::EINVAL);
        }
        let receives = attr.srq.is_null() && !target && !initiator;
        if !receives {
            attr.cap.max_recv_wr = 0;
            attr.cap.max_recv_sge = 0;
        }
        if target {
            attr.cap = ibv_qp_cap::default();
            attr.send_cq = ptr::null_mut();
        }
        if target || initiator {
            attr.recv_cq = ptr::null_mut();
            attr.srq = ptr::null_mut();
        }
        Ok(Self {
            target,
            initiator,
            receives,
        })
    }

    /// The layout of its queues, of which those that it has not are never used and offer nothing.
    fn layout(
        self,
        wanted: &ibv_qp_cap,
        limits: &UverbsContextResponse,
        requests: Requests,
    ) -> Result<QpLayout, c_int> {
        let mut layout = QpLayout::new(wanted, limits, requests)?;
        if !self.receives {
            layout.capacity.max_recv_wr = 0;
            layout.capacity.max_recv_sge = 0;
        }
        if self.target {
            layout.capacity = ibv_qp_cap::default();
        }
        Ok(layout)
    }
}

/// Makes a queue pair; `attr.cap` becomes what it can do. `flags` are of `UVERBS_QP_*`.
///
/// # Safety
///
/// `context` is open, and `attr` what its user asked for.
unsafe fn create(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
    flags: u8,
) -> Result<*mut Qp, c_int> {
    let kind = Kind::of(attr)?;
    // SAFETY: the context is open, by the caller.
    let provider = unsafe { Context::of(context) };
    let requests = Requests::of(attr.qp_type, flags);
    let layout = kind.layout(&attr.cap, &provider.limits, requests)?;
    let pd = if kind.target || attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
        ptr::null_mut()
    } else {
        attr.pd
    };
    if pd.is_null() && !kind.target {
        return Err(libc::EINVAL);
    }
    let asked = *attr;
    let mut make = || {
        // SAFETY: the consumer passes a live domain or none, and keeps it as long as what is made with
        // it.
        let memory = unsafe { QueueBuffer::new::<QueuePairRecord>(pd, layout.rings()) }?;
        let mut qp = Qp::boxed(layout, provider.doorbells, memory)?;
        qp.features = provider.limits.features;
        qp.max_message = provider.limits.max_message;
        qp.signal_all = if asked.sq_sig_all != 0 {
            SEND_SIGNALED
        } else {
            0
        };
        qp.ud = requests.are_datagrams();
        qp.xrc = kind.initiator;
        qp.receives = kind.receives;
        qp.flags = flags;
        // SAFETY: as above.
        if unsafe { Pd::is_of_one_thread(pd) } {
            qp.send.promise_one_thread();
            qp.receive.promise_one_thread();
        }
        let mut request = Request::<ib_uverbs_create_qp, _>::with(qp.request());
        let mut response =
            Response::<ib_uverbs_create_qp_resp, _>::with(UverbsQpResponse::zeroed());
        *attr = asked;
        let qp = object::make(qp, |qp| {
            // SAFETY: `make` passes the box from above, which nobody else has; the context is open, by
            // the caller; request and response have the layout that the command has in libibverbs
            // (`private`).
            unsafe {
                let verbs = (*qp).verbs.get();
                command!(
                    ibv_cmd_create_qp_ex(context, verbs, ptr::from_mut(attr)),
                    request,
                    response
                )
            }
        })?;
        // SAFETY: libibverbs has filled the number in, and nobody else has `qp` yet.
        let qpn = unsafe {
            (*qp).qpn = (*(*qp).verbs.get()).qp_ex.qp_base.qp_num;
            (*qp).qpn
        };
        Ok((qp, qpn))
    };
    let qp = if kind.target {
        // Completions never name a target's own entries.
        make()?.0
    } else {
        let homes = [asked.send_cq, asked.recv_cq];
        object::make_entered(&provider.queue_pairs, homes, &mut make, &|qp| {
            // SAFETY: `make` gave it, and it is not in the table: nobody has it.
            unsafe { object::destroy(qp, || ibv_cmd_destroy_qp(qp.cast()), |_| {}) };
        })?
    };
    attr.cap = layout.capacity;
    Ok(qp)
}

pub(crate) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the consumer passes a live domain and its attributes.
    let (context, attr) = unsafe { ((*pd).context, &mut *attr) };
    let mut extended = ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        ..Default::default()
    };
    // SAFETY: the context of a live domain is open.
    let qp = unsafe { create(context, &mut extended, 0) };
    if qp.is_ok() {
        attr.cap = extended.cap;
    }
    or_null(qp)
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the consumer passes an open context and its attributes.
    unsafe { create_with(context, attr, 0) }
}

/// As `ibv_create_qp_ex`, for a queue pair that can do more: `flags` are of `UVERBS_QP_*`.
///
/// # Safety
///
/// `context` is an open context of this provider, and `attr` what its user asked for.
pub(crate) unsafe fn create_with(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    flags: u8,
) -> *mut ibv_qp {
    // SAFETY: the consumer's attributes are its own until the verb returns.
    let given = unsafe { &mut *attr };
    let mut attr = *given;
    // No flag is offered, but to ask for none is fine.
    if attr.create_flags == 0 {
        attr.comp_mask &= !IBV_QP_INIT_ATTR_CREATE_FLAGS;
    }
    if attr.comp_mask & (IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH) != 0 {
        if flags != 0 {
            return fail(libc::EOPNOTSUPP);
        }
        // SAFETY: the context is open, by the caller; the attributes are the consumer's, but for a flag.
        let qp = unsafe { raw::create_spread(context, &mut attr) };
        if qp.is_ok() {
            given.cap = attr.cap;
        }
        return or_null(qp);
    }
    let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_XRCD;
    if attr.comp_mask & !known != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let ex = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    // SAFETY: the context is open, by the caller.
    let features = unsafe { Context::of(context) }.limits.features;
    if ex && attr.send_ops_flags & !post_ex::supported(attr.qp_type, features) != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    // SAFETY: the context is open, by the caller; the attributes are the consumer's, but for a flag.
    let qp = match unsafe { create(context, &mut attr, flags) } {
        Ok(qp) => qp,
        Err(errno) => return fail(errno),
    };
    if ex {
        // SAFETY: the queue pair was made a moment ago and nobody else has it.
        unsafe { post_ex::enable((*qp).verbs.get(), attr.send_ops_flags) };
    }
    given.cap = attr.cap;
    qp.cast()
}

pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let mut request = Request::<ib_uverbs_modify_qp, Nothing>::default();
    // SAFETY: the consumer passes a live queue pair and its attributes; the request has the layout that
    // the command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_modify_qp(qp, attr, mask), request) };
    if result != 0 {
        return result;
    }
    // SAFETY: the consumer passes a live queue pair and its attributes.
    let (this, state) = unsafe { (Qp::of(qp), (*attr).qp_state) };
    if mask as u32 & IBV_QP_STATE != 0 && state == IBV_QPS_RESET {
        // SAFETY: the consumer has it from `create` or `open_qp`, when it was made.
        unsafe { this.drop_completions(Cq::forget) };
        this.reset_queues();
    }
    0
}

pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let mut request = Request::<ib_uverbs_query_qp, Nothing>::default();
    // SAFETY: the consumer passes a live queue pair and room for both answers; the request has the layout
    // that the command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_query_qp(qp, attr, mask, init_attr), request) };
    if result == 0 {
        // SAFETY: the consumer passes a live queue pair and room for both answers.
        unsafe {
            let capacity = Qp::of(qp).layout.capacity;
            (*init_attr).cap = capacity;
            (*attr).cap = capacity;
        }
    }
    result
}

pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: libibverbs passes a live queue pair, whose context is open.
    let table = unsafe { &Context::of((*qp).context).queue_pairs };
    // No lock is held: this waits until all events of the queue pair are acknowledged, and whoever
    // is to do that may make and destroy others before.
    // SAFETY: the queue pair is live, as above.
    let ask = || unsafe { ibv_cmd_destroy_qp(qp) };
    // The table has it as long as there is an entry to find it for.
    let leave = |this: &Qp| {
        // SAFETY: the queue pair was made, as the consumer has it.
        unsafe { this.drop_completions(Cq::leave) };
        table.remove(this.qpn, this);
    };
    // SAFETY: it came from `create` or `xrc::open_qp`. Completions and the table were all that led to it:
    // the consumer destroys a queue pair when nobody uses it.
    unsafe { object::destroy(qp.cast::<Qp>(), ask, leave) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::send_queue::SendCount;
    use crate::testing::{cap, limits, Page};
    use core::mem::offset_of;

    /// An RC queue pair in state RTS with a page of ordinary memory for doorbells, for tests of
    /// posting.
    pub(crate) fn rc(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Connected, wanted, doorbells)
    }

    /// As [`rc`], for datagrams.
    pub(crate) fn ud(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Ud, wanted, doorbells)
    }

    /// As [`rc`], with lists.
    pub(crate) fn registering(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Registering, wanted, doorbells)
    }

    fn boxed(layout: QpLayout, doorbells: Doorbells) -> Result<Box<Qp>, c_int> {
        let memory = QueueBuffer::of_no_domain::<QueuePairRecord>(layout.rings())?;
        Qp::boxed(layout, doorbells, memory)
    }

    fn of_kind(requests: Requests, wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        let layout = QpLayout::new(wanted, &limits(), requests).unwrap();
        let mut qp = boxed(layout, doorbells).unwrap();
        qp.features = u64::MAX;
        qp.max_message = limits().max_message;
        qp.qpn = 0x123;
        qp.ud = requests.are_datagrams();
        if requests == Requests::Registering {
            qp.flags = UVERBS_QP_LISTS;
        }
        let verbs = &mut qp.verbs.get_mut().qp_ex.qp_base;
        verbs.state = IBV_QPS_RTS;
        verbs.qp_type = if qp.ud { IBV_QPT_UD } else { IBV_QPT_RC };
        qp
    }

    /// The operations of the extended interface (`ibv_wr_*`), all of them.
    pub(crate) fn ex(qp: &mut Qp) -> *mut ibv_qp_ex {
        let verbs = qp.verbs.get();
        // SAFETY: the caller has the only reference.
        unsafe { post_ex::enable(verbs, u64::MAX) };
        verbs.cast()
    }

    #[test]
    fn a_small_queue_pair_takes_less_than_eight_kilobytes() {
        /// In the kernel and in the device, as `make bench` has measured it (`memory_qp_*`).
        const ELSEWHERE: usize = 873 + 1041;
        let mut page = Page::new();
        for inline in [0, 64] {
            let qp = rc(&cap(16, 16, 1, 1, inline), page.doorbells());
            let slots = size_of_val(&*qp.send_slots) + size_of_val(&*qp.receive_slots);
            let bytes = qp.memory.length() as usize + slots + size_of::<Qp>();
            println!("with inline data of {inline}: {bytes} bytes, and {ELSEWHERE}");
            assert!(bytes + ELSEWHERE < 8 << 10, "{bytes}");
        }
    }

    #[test]
    fn the_driver_is_told_which_have_lists() {
        let mut page = Page::new();
        let doorbells = page.doorbells();
        let wanted = cap(4, 4, 1, 1, 0);
        assert_eq!(rc(&wanted, doorbells).request().flags, 0);
        let flags = registering(&wanted, doorbells).request().flags;
        assert_eq!(flags, UVERBS_QP_LISTS);
    }

    #[test]
    fn an_xrc_queue_pair_has_the_queues_of_its_side_only() {
        let cq = ptr::without_provenance_mut(64);
        let asked = ibv_qp_init_attr_ex {
            send_cq: cq,
            recv_cq: cq,
            srq: ptr::without_provenance_mut(128),
            cap: cap(3, 3, 1, 1, 0),
            ..Default::default()
        };
        let kind = |qp_type| {
            let mut attr = ibv_qp_init_attr_ex { qp_type, ..asked };
            let kind = Kind::of(&mut attr).unwrap();
            let layout = kind.layout(&attr.cap, &limits(), Requests::Connected);
            let given = layout.unwrap().capacity;
            (attr, (given.max_send_wr, given.max_recv_wr))
        };
        let (attr, given) = kind(IBV_QPT_XRC_RECV);
        assert_eq!(given, (0, 0));
        assert!(attr.send_cq.is_null() && attr.recv_cq.is_null() && attr.srq.is_null());
        let (attr, given) = kind(IBV_QPT_XRC_SEND);
        assert_eq!(given, (4, 0));
        assert!(attr.send_cq == cq && attr.recv_cq.is_null() && attr.srq.is_null());
        // An SRQ takes the place of the receive queue.
        let (attr, given) = kind(IBV_QPT_RC);
        assert_eq!(given, (4, 0));
        assert!(attr.send_cq == cq && attr.recv_cq == cq && attr.srq == asked.srq);
        for (qp_type, cqs, errno) in [
            (IBV_QPT_DRIVER, true, libc::EOPNOTSUPP),
            (IBV_QPT_RAW_PACKET, false, libc::EINVAL),
            (IBV_QPT_UD, false, libc::EINVAL),
            (IBV_QPT_XRC_SEND, false, libc::EINVAL),
        ] {
            let mut attr = ibv_qp_init_attr_ex { qp_type, ..asked };
            if !cqs {
                attr.send_cq = ptr::null_mut();
            }
            assert_eq!(Kind::of(&mut attr).err(), Some(errno));
        }
    }

    #[test]
    fn a_reset_leaves_the_half_of_the_record_that_is_the_devices_alone() {
        let mut page = Page::new();
        let qp = rc(&cap(4, 4, 1, 1, 0), page.doorbells());
        let words = [
            offset_of!(QueuePairRecord, send_producer),
            offset_of!(QueuePairRecord, receive_producer),
            offset_of!(QueuePairRecord, send_wake),
            offset_of!(QueuePairRecord, receive_wake),
        ];
        let read = || words.map(|word| qp.memory.record(word).load(Ordering::Relaxed));
        assert_eq!(read(), [0, 0, 1, 0]);
        for (value, word) in (10..).zip(words) {
            qp.memory.record(word).store(value, Ordering::Relaxed);
        }
        qp.reset_queues();
        assert_eq!(read(), [0, 0, 12, 13]);
    }

    impl Qp {
        /// Has the indices of both queues, which are empty, begin at this number.
        pub(crate) fn begin_at(&self, index: u32) {
            let count = SendCount {
                requests: index,
                blocks: index,
            };
            self.send.lock().posted = count;
            self.send_finished.store(count.to_word(), Ordering::Release);
            *self.receive.lock() = ReceiveQueue::beginning_at(index);
            self.memory.begin_at(&SEND, index);
            self.memory.begin_at(&RECEIVE, index);
            self.receive_finished.store(index, Ordering::Release);
        }
    }

    #[test]
    fn without_memory_no_queue_pair_is_made() {
        let layout = QpLayout::new(&cap(4, 4, 1, 1, 0), &limits(), Requests::Connected).unwrap();
        let mut page = Page::new();
        let doorbells = page.doorbells();
        let failures = heap::tests::with_little_memory(|| boxed(layout, doorbells));
        assert_eq!(failures, 3);
    }
}
