// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Life of a queue pair: making, changing, destroying.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferrite_abi::{
    blocks_per_registering_request, blocks_per_request, longest_before_entries, opcode_part, Plain,
    QueuePairRecord, ReceiveHeader, SendHeader, SendOpcode, Sge, UverbsContextResponse,
    UverbsQpRequest, UverbsQpResponse, BLOCK_SIZE, RQ_MIN_LOG_STRIDE, UVERBS_QP_LISTS,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::fail;
use crate::heap;
use crate::memory::{Buffer, Doorbells, SpinLock};
use crate::post::{ReceiveQueue, SendQueue};
use crate::post_ex;
use crate::private::*;
use crate::protection::Pd;
use crate::srq::Srq;
use crate::sys::*;
use crate::table::{Inserted, Table};

/// A queue pair.
#[repr(C)]
pub struct Qp {
    verbs: UnsafeCell<verbs_qp>,
    pub(crate) qpn: u32,
    pub(crate) features: u64,
    /// The longest message, in bytes.
    pub(crate) max_message: u32,
    pub(crate) signal_all: bool,
    /// Sends name their peer.
    pub(crate) datagram: bool,
    /// Sends name a shared receive queue at the peer.
    pub(crate) extended: bool,
    /// It has a receive queue of its own.
    pub(crate) receives: bool,
    /// What it can do beyond the verbs, `UVERBS_QP_*`.
    flags: u8,
    pub(crate) doorbells: Doorbells,
    pub(crate) geometry: Geometry,
    pub(crate) buffer: Buffer,
    pub(crate) send: SpinLock<SendQueue>,
    /// What a completion of the work request that starts at a block is told as.
    send_slots: Box<[SendSlot]>,
    /// What of the send queue is known to be done, as a [`SendCount`].
    send_finished: AtomicU64,
    pub(crate) receive: SpinLock<ReceiveQueue>,
    receive_slots: Box<[AtomicU64]>,
    /// Receive entries known to be done, free-running.
    receive_finished: AtomicU32,
}

/// Written when a work request is posted, read when its completion is polled.
///
/// The two are ordered by the device, which completes nothing that was not published to it, so
/// relaxed accesses do.
#[derive(Default)]
struct SendSlot {
    wr_id: AtomicU64,
    /// What of the queue was posted up to and with this one, as a [`SendCount`].
    posted: AtomicU64,
    opcode: AtomicU32,
}

/// How far a send queue is. A queue is full when it has as many work requests as were promised, or
/// when the next one does not fit in the blocks that are left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendCount {
    /// Work requests, free-running.
    pub(crate) requests: u32,
    /// Their blocks, free-running.
    pub(crate) blocks: u32,
}

impl SendCount {
    /// The count after a work request of that many blocks.
    pub(crate) fn after(self, blocks: u32) -> Self {
        Self {
            requests: self.requests.wrapping_add(1),
            blocks: self.blocks.wrapping_add(blocks),
        }
    }

    fn to_word(self) -> u64 {
        (u64::from(self.requests) << 32) | u64::from(self.blocks)
    }

    fn from_word(word: u64) -> Self {
        Self {
            requests: (word >> 32) as u32,
            blocks: word as u32,
        }
    }
}

/// Sizes and places in a queue pair's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) capacity: ibv_qp_cap,
    pub(crate) sq_blocks: u32,
    pub(crate) rq_entries: u32,
    pub(crate) rq_stride: u32,
    pub(crate) rq_offset: usize,
    pub(crate) record_offset: usize,
    length: usize,
}

/// What its work requests can be, which makes some longer than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requests {
    /// Sends that name their peer.
    Datagrams,
    /// All that the verbs have for a connection.
    Connected,
    /// The same, and registrations of lists.
    Registering,
}

impl Requests {
    fn of(qp_type: ibv_qp_type, flags: u8) -> Self {
        if qp_type == IBV_QPT_UD {
            Self::Datagrams
        } else if flags & UVERBS_QP_LISTS != 0 {
            Self::Registering
        } else {
            Self::Connected
        }
    }

    fn are_datagrams(self) -> bool {
        self == Self::Datagrams
    }

    /// Blocks that are enough for each of them.
    fn blocks(self, sges: usize, inline: usize) -> usize {
        match self {
            Self::Registering => blocks_per_registering_request(sges, inline),
            _ => blocks_per_request(self.are_datagrams(), sges, inline),
        }
    }

    /// The most bytes that any of them has before its entries.
    fn before_entries(self) -> usize {
        match self {
            Self::Registering => {
                size_of::<SendHeader>() + opcode_part(SendOpcode::RegisterListSend, false)
            }
            _ => longest_before_entries(self.are_datagrams()),
        }
    }
}

impl Geometry {
    fn new(
        wanted: &ibv_qp_cap,
        limits: &UverbsContextResponse,
        requests: Requests,
    ) -> Result<Self, c_int> {
        if wanted.max_send_sge > limits.max_sge
            || wanted.max_recv_sge > limits.max_sge
            || wanted.max_inline_data > limits.max_inline
        {
            return Err(libc::EINVAL);
        }
        // Every work request may be of any kind: what is promised holds for all of them.
        let request_blocks = requests.blocks(
            wanted.max_send_sge.max(1) as usize,
            wanted.max_inline_data as usize,
        );
        let sq_blocks = (wanted.max_send_wr.max(1) as usize)
            .checked_mul(request_blocks)
            .and_then(usize::checked_next_power_of_two)
            .filter(|&blocks| blocks <= 1 << limits.sq_max_log_blocks.min(24))
            .ok_or(libc::EINVAL)?;
        let rq_entries = (wanted.max_recv_wr.max(1) as usize)
            .checked_next_power_of_two()
            .filter(|&entries| entries <= 1 << limits.rq_max_log_entries.min(24))
            .ok_or(libc::EINVAL)?;
        let rq_stride = (size_of::<ReceiveHeader>()
            + wanted.max_recv_sge as usize * size_of::<Sge>())
        .next_power_of_two()
        .max(1 << RQ_MIN_LOG_STRIDE);

        let bytes = request_blocks * BLOCK_SIZE;
        let room = bytes - requests.before_entries();
        // Of what takes inline data a write has most before them; datagrams are sends only.
        let datagram = requests.are_datagrams();
        let with_data = if datagram {
            SendOpcode::Send
        } else {
            SendOpcode::Write
        };
        let inline_room = bytes - size_of::<SendHeader>() - opcode_part(with_data, datagram);
        let rq_offset = sq_blocks * BLOCK_SIZE;
        let record_offset = (rq_offset + rq_entries * rq_stride).next_multiple_of(BLOCK_SIZE);
        Ok(Self {
            capacity: ibv_qp_cap {
                max_send_wr: (sq_blocks / request_blocks) as u32,
                max_recv_wr: rq_entries as u32,
                max_send_sge: ((room / size_of::<Sge>()) as u32).min(limits.max_sge),
                max_recv_sge: (((rq_stride - size_of::<ReceiveHeader>()) / size_of::<Sge>())
                    as u32)
                    .min(limits.max_sge),
                max_inline_data: (inline_room as u32).min(limits.max_inline),
            },
            sq_blocks: sq_blocks as u32,
            rq_entries: rq_entries as u32,
            rq_stride: rq_stride as u32,
            rq_offset,
            record_offset,
            length: record_offset + size_of::<QueuePairRecord>(),
        })
    }
}

impl Qp {
    /// # Safety
    ///
    /// `qp` is a live queue pair of this provider.
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: the `ibv_qp` is at the start of a `Qp`.
        unsafe { &*qp.cast::<Qp>() }
    }

    /// A queue pair that the kernel does not know of yet.
    fn boxed(geometry: Geometry, doorbells: Doorbells, buffer: Buffer) -> Result<Box<Self>, c_int> {
        let qp = heap::boxed(Self {
            verbs: UnsafeCell::new(verbs_qp {
                qp_ex: ibv_qp_ex::default(),
                comp_mask: 0,
                xrcd: ptr::null_mut(),
            }),
            qpn: 0,
            features: 0,
            max_message: 0,
            signal_all: false,
            datagram: false,
            extended: false,
            receives: true,
            flags: 0,
            doorbells,
            buffer,
            send: SpinLock::new(SendQueue::new()),
            send_slots: heap::slice(geometry.sq_blocks as usize, |_| SendSlot::default())?,
            send_finished: AtomicU64::new(0),
            receive: SpinLock::new(ReceiveQueue::new()),
            receive_slots: heap::slice(geometry.rq_entries as usize, |_| AtomicU64::new(0))?,
            receive_finished: AtomicU32::new(0),
            geometry,
        })?;
        // The record is the host's until the device has it, and the rest of it is zero: the device
        // will sleep until it is rung.
        qp.record(offset_of!(QueuePairRecord, send_wake))
            .store(1, Ordering::Relaxed);
        Ok(qp)
    }

    /// The state, as far as this process knows.
    pub(crate) fn state(&self) -> ibv_qp_state {
        // SAFETY: the field is initialised; libibverbs changes it only in a modify, which a
        // consumer does not run against its own posting.
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

    /// The shared receive queue, if it uses one.
    #[inline]
    pub(crate) fn srq(&self) -> Option<&Srq> {
        // SAFETY: libibverbs writes the field once, when the queue pair is made; a shared receive
        // queue cannot be destroyed while a queue pair uses it.
        unsafe {
            let srq = ptr::read(&raw const (*self.verbs.get()).qp_ex.qp_base.srq);
            if srq.is_null() {
                None
            } else {
                Some(Srq::of(srq))
            }
        }
    }

    /// A word of the doorbell record.
    #[inline]
    pub(crate) fn record(&self, field: usize) -> &AtomicU32 {
        self.buffer.word(self.geometry.record_offset + field)
    }

    /// Whether a work request of that many blocks may be posted after those `posted` until now.
    #[inline]
    pub(crate) fn has_send_room(&self, posted: SendCount, blocks: u32) -> bool {
        let finished = SendCount::from_word(self.send_finished.load(Ordering::Acquire));
        let requests = posted.requests.wrapping_sub(finished.requests);
        let used = posted.blocks.wrapping_sub(finished.blocks);
        requests < self.geometry.capacity.max_send_wr
            && u64::from(used) + u64::from(blocks) <= u64::from(self.geometry.sq_blocks)
    }

    /// Receives that may still be posted, when `posted` were until now.
    #[inline]
    pub(crate) fn receive_room(&self, posted: u32) -> u32 {
        let finished = self.receive_finished.load(Ordering::Acquire);
        self.geometry
            .rq_entries
            .saturating_sub(posted.wrapping_sub(finished))
    }

    /// Remembers the work request that starts at block `index`; `posted` counts it.
    #[inline]
    pub(crate) fn send_posted(
        &self,
        index: u32,
        posted: SendCount,
        wr_id: u64,
        opcode: ibv_wc_opcode,
    ) {
        let slot = &self.send_slots[(index & (self.geometry.sq_blocks - 1)) as usize];
        slot.wr_id.store(wr_id, Ordering::Relaxed);
        slot.posted.store(posted.to_word(), Ordering::Relaxed);
        slot.opcode.store(opcode, Ordering::Relaxed);
    }

    /// Remembers the receive at `index`.
    #[inline]
    pub(crate) fn receive_posted(&self, index: u32, wr_id: u64) {
        self.receive_slots[(index & (self.geometry.rq_entries - 1)) as usize]
            .store(wr_id, Ordering::Relaxed);
    }

    /// The work request that started at block `index` is done, and with it all before it.
    #[inline]
    pub(crate) fn send_done(&self, index: u32) -> (u64, ibv_wc_opcode) {
        let slot = &self.send_slots[(index & (self.geometry.sq_blocks - 1)) as usize];
        let result = (
            slot.wr_id.load(Ordering::Relaxed),
            slot.opcode.load(Ordering::Relaxed),
        );
        // Release: the slot is read before a post may use it again.
        self.send_finished
            .store(slot.posted.load(Ordering::Relaxed), Ordering::Release);
        result
    }

    /// The receive at `index` is done, and with it all before it.
    #[inline]
    pub(crate) fn receive_done(&self, index: u32) -> u64 {
        let slot = (index & (self.geometry.rq_entries - 1)) as usize;
        let wr_id = self.receive_slots[slot].load(Ordering::Relaxed);
        self.receive_finished
            .store(index.wrapping_add(1), Ordering::Release);
        wr_id
    }

    /// Empties both queues, as the device has done with its side, and with its half of the record,
    /// in state RESET.
    fn reset_queues(&self) {
        let mut send = self.send.lock();
        let mut receive = self.receive.lock();
        *send = SendQueue::new();
        *receive = ReceiveQueue::new();
        self.send_finished.store(0, Ordering::Release);
        self.receive_finished.store(0, Ordering::Release);
        self.record(offset_of!(QueuePairRecord, receive_producer))
            .store(0, Ordering::Release);
        self.record(offset_of!(QueuePairRecord, send_producer))
            .store(0, Ordering::Release);
    }

    /// Drops its entries from its completion queues. The device writes no more of them: the queue
    /// pair is destroyed, or in state RESET.
    ///
    /// # Safety
    ///
    /// As for [`Qp::completion_queues`].
    unsafe fn forget_completions(&self) {
        // SAFETY: by the caller.
        for cq in unsafe { self.completion_queues() }.into_iter().flatten() {
            cq.forget(self);
        }
    }

    fn request(&self) -> UverbsQpRequest {
        UverbsQpRequest {
            buffer: self.buffer.address(),
            length: self.buffer.length() as u64,
            sq_offset: 0,
            rq_offset: self.geometry.rq_offset as u32,
            record_offset: self.geometry.record_offset as u32,
            sq_log_blocks: self.geometry.sq_blocks.trailing_zeros() as u8,
            rq_log_entries: self.geometry.rq_entries.trailing_zeros() as u8,
            rq_log_stride: self.geometry.rq_stride.trailing_zeros() as u8,
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
        // SAFETY: a completion queue cannot be destroyed while a queue pair uses it.
        unsafe {
            let qp = &raw const (*self.verbs.get()).qp_ex.qp_base;
            [(*qp).send_cq, (*qp).recv_cq].map(|cq| (!cq.is_null()).then(|| Cq::of(cq)))
        }
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
    let target = attr.qp_type == IBV_QPT_XRC_RECV;
    let initiator = attr.qp_type == IBV_QPT_XRC_SEND;
    if !matches!(attr.qp_type, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD) && !target && !initiator {
        return Err(libc::EOPNOTSUPP);
    }
    if (attr.send_cq.is_null() && !target) || (attr.recv_cq.is_null() && !target && !initiator) {
        return Err(libc::EINVAL);
    }
    // SAFETY: by the caller.
    let provider = unsafe { Context::of(context) };
    let receives = attr.srq.is_null() && !target && !initiator;
    if !receives {
        // The receive queue of its own is never used.
        attr.cap.max_recv_wr = 0;
        attr.cap.max_recv_sge = 0;
    }
    if target {
        // Nothing is sent either: the queues are the kernel's matter.
        attr.cap = ibv_qp_cap::default();
        attr.send_cq = ptr::null_mut();
    }
    if target || initiator {
        attr.recv_cq = ptr::null_mut();
        attr.srq = ptr::null_mut();
    }
    let requests = Requests::of(attr.qp_type, flags);
    let mut geometry = Geometry::new(&attr.cap, &provider.limits, requests)?;
    if !receives {
        geometry.capacity.max_recv_wr = 0;
        geometry.capacity.max_recv_sge = 0;
    }
    if target {
        geometry.capacity = ibv_qp_cap::default();
    }
    let asked = *attr;
    let pd = if target || attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
        ptr::null_mut()
    } else {
        attr.pd
    };
    if pd.is_null() && !target {
        return Err(libc::EINVAL);
    }
    // SAFETY: the consumer passes a live domain or none.
    let buffer = unsafe { Pd::buffer(pd, geometry.length) }?;
    let mut qp = Qp::boxed(geometry, provider.doorbells, buffer)?;
    qp.features = provider.limits.features;
    qp.max_message = provider.limits.max_message;
    qp.signal_all = attr.sq_sig_all != 0;
    qp.datagram = requests.are_datagrams();
    qp.extended = initiator;
    qp.receives = receives;
    qp.flags = flags;
    let mut request = Request {
        header: ib_uverbs_cmd_hdr::default(),
        core: ib_uverbs_create_qp::default(),
        private: qp.request(),
    };
    let mut response = Response {
        core: ib_uverbs_create_qp_resp::default(),
        private: UverbsQpResponse::zeroed(),
    };
    let qp = Box::into_raw(qp);
    let table: &Table<Qp> = &provider.queue_pairs;
    // SAFETY: request and response are laid out as libibverbs expects, the sizes are theirs, and
    // `qp` is not shared yet.
    let result = unsafe {
        ibv_cmd_create_qp_ex(
            context,
            (*qp).verbs.get(),
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        // SAFETY: `qp` is the box from above; the kernel did not take it.
        drop(unsafe { Box::from_raw(qp) });
        return Err(result);
    }
    // SAFETY: nobody else has `qp` yet.
    let qpn = unsafe {
        (*qp).qpn = (*(*qp).verbs.get()).qp_ex.qp_base.qp_num;
        (*qp).qpn
    };
    // Completions never name a target's own entries.
    let inserted = if target {
        Ok(Inserted::Yes)
    } else {
        table.insert(qpn, qp)
    };
    let instead = match inserted {
        Ok(Inserted::Yes) => {
            attr.cap = geometry.capacity;
            return Ok(qp);
        }
        // Another thread has just destroyed the queue pair of this number and still looks for
        // completions of it. It may wait long for a completion queue, for this very thread even; so
        // another number is taken, which is not this one as long as this queue pair is there.
        Ok(Inserted::Taken) => {
            *attr = asked;
            // SAFETY: by the caller.
            unsafe { create(context, attr, flags) }
        }
        Err(errno) => Err(errno),
    };
    // SAFETY: the queue pair was made a moment ago and nobody has it.
    unsafe {
        ibv_cmd_destroy_qp((*qp).verbs.get().cast());
        drop(Box::from_raw(qp));
    }
    instead
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
    match unsafe { create(context, &mut extended, 0) } {
        Ok(qp) => {
            attr.cap = extended.cap;
            qp.cast()
        }
        Err(errno) => fail(errno),
    }
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
    // SAFETY: by the caller.
    let given = unsafe { &mut *attr };
    let mut attr = *given;
    // No flag is offered, but to ask for none is fine.
    if attr.create_flags == 0 {
        attr.comp_mask &= !IBV_QP_INIT_ATTR_CREATE_FLAGS;
    }
    let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_XRCD;
    if attr.comp_mask & !known != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let extended = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    // SAFETY: `context` is open.
    let features = unsafe { Context::of(context) }.limits.features;
    if extended && attr.send_ops_flags & !post_ex::supported(attr.qp_type, features) != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    // SAFETY: as above.
    let qp = match unsafe { create(context, &mut attr, flags) } {
        Ok(qp) => qp,
        Err(errno) => return fail(errno),
    };
    if extended {
        // SAFETY: the queue pair was made a moment ago and nobody else has it.
        unsafe { post_ex::enable((*qp).verbs.get(), attr.send_ops_flags) };
    }
    given.cap = attr.cap;
    qp.cast()
}

/// Another process's target of extended connections, to change or destroy.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    // SAFETY: the consumer passes an open context.
    let provider = unsafe { Context::of(context) };
    let made = Geometry::new(
        &ibv_qp_cap::default(),
        &provider.limits,
        Requests::Connected,
    )
    .and_then(|mut geometry| {
        geometry.capacity = ibv_qp_cap::default();
        Qp::boxed(geometry, provider.doorbells, Buffer::new(geometry.length)?)
    });
    let mut qp = match made {
        Ok(qp) => qp,
        Err(errno) => return fail(errno),
    };
    qp.receives = false;
    let mut request = Request::<ib_uverbs_open_qp, Nothing>::default();
    let mut response = Response::<ib_uverbs_create_qp_resp, Nothing>::default();
    // SAFETY: request and response are laid out as libibverbs expects, the sizes are theirs, and
    // `qp` is not shared yet.
    let result = unsafe {
        ibv_cmd_open_qp(
            context,
            qp.verbs.get(),
            size_of::<verbs_qp>() as c_int,
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        return fail(result);
    }
    // SAFETY: libibverbs has filled the number in.
    qp.qpn = unsafe { (*qp.verbs.get()).qp_ex.qp_base.qp_num };
    Box::into_raw(qp).cast()
}

pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let mut request = Request::<ib_uverbs_modify_qp, Nothing>::default();
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    let result = unsafe {
        ibv_cmd_modify_qp(
            qp,
            attr,
            mask,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    };
    if result != 0 {
        return result;
    }
    // SAFETY: the consumer passes a live queue pair and its attributes.
    let (this, state) = unsafe { (Qp::of(qp), (*attr).qp_state) };
    if mask as u32 & IBV_QP_STATE != 0 && state == IBV_QPS_RESET {
        // SAFETY: the queue pair is made.
        unsafe { this.forget_completions() };
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
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    let result = unsafe {
        ibv_cmd_query_qp(
            qp,
            attr,
            mask,
            init_attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    };
    if result == 0 {
        // SAFETY: the consumer passes a live queue pair and room for both answers.
        unsafe {
            let capacity = Qp::of(qp).geometry.capacity;
            (*init_attr).cap = capacity;
            (*attr).cap = capacity;
        }
    }
    result
}

pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: libibverbs passes a live queue pair, whose context is open.
    let (this, table) = unsafe { (Qp::of(qp), &*Context::of((*qp).context).queue_pairs) };
    // No lock is held: this waits until all events of the queue pair are acknowledged, and whoever
    // is to do that may make and destroy others before.
    // SAFETY: as above.
    let result = unsafe { ibv_cmd_destroy_qp(qp) };
    if result != 0 {
        return result;
    }
    // The table has it as long as there is an entry to find it for.
    // SAFETY: the queue pair was made.
    unsafe { this.forget_completions() };
    table.remove(this.qpn, this);
    // SAFETY: it came from `create`; kernel, device and table have let go of it.
    drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
    0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ferrite_abi::{
        blocks_for, has_entries, is_long_registration, MAX_BLOCKS, UVERBS_QP_REGISTER_DRAINS,
    };

    /// A queue pair in state RTS with a page of ordinary memory for doorbells, for tests of
    /// posting.
    pub(crate) fn alone(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Connected, wanted, doorbells)
    }

    /// As [`alone`], for datagrams.
    pub(crate) fn datagrams_alone(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Datagrams, wanted, doorbells)
    }

    /// As [`alone`], with lists.
    pub(crate) fn registering(wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        of_kind(Requests::Registering, wanted, doorbells)
    }

    fn of_kind(requests: Requests, wanted: &ibv_qp_cap, doorbells: Doorbells) -> Box<Qp> {
        let geometry = Geometry::new(wanted, &limits(), requests).unwrap();
        let mut qp = Qp::boxed(geometry, doorbells, Buffer::new(geometry.length).unwrap()).unwrap();
        qp.features = u64::MAX;
        qp.max_message = limits().max_message;
        qp.qpn = 0x123;
        qp.datagram = requests.are_datagrams();
        if requests == Requests::Registering {
            qp.flags = UVERBS_QP_LISTS;
        }
        let verbs = &mut qp.verbs.get_mut().qp_ex.qp_base;
        verbs.state = IBV_QPS_RTS;
        verbs.qp_type = if qp.datagram { IBV_QPT_UD } else { IBV_QPT_RC };
        qp
    }

    /// As [`alone`], for the extended interface.
    pub(crate) fn extended(qp: &mut Qp) -> *mut ibv_qp_ex {
        let verbs = qp.verbs.get();
        // SAFETY: the caller has the only reference.
        unsafe { post_ex::enable(verbs, u64::MAX) };
        verbs.cast()
    }

    #[test]
    fn only_connections_that_asked_have_room_for_lists() {
        for (qp_type, flags, requests) in [
            (IBV_QPT_UD, 0, Requests::Datagrams),
            (IBV_QPT_RC, 0, Requests::Connected),
            (IBV_QPT_UC, UVERBS_QP_REGISTER_DRAINS, Requests::Connected),
            (IBV_QPT_RC, UVERBS_QP_LISTS, Requests::Registering),
            (IBV_QPT_XRC_SEND, u8::MAX, Requests::Registering),
        ] {
            assert_eq!(Requests::of(qp_type, flags), requests);
        }
        let mut page = [0u64; ferrite_abi::DOORBELL_PAGE_SIZE / 8];
        // SAFETY: the page lives longer than the queue pairs.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let wanted = cap(4, 4, 1, 1, 0);
        assert_eq!(alone(&wanted, doorbells).request().flags, 0);
        let flags = registering(&wanted, doorbells).request().flags;
        assert_eq!(flags, UVERBS_QP_LISTS);
    }

    #[test]
    fn a_reset_leaves_the_half_of_the_record_that_is_the_devices_alone() {
        let mut page = [0u64; ferrite_abi::DOORBELL_PAGE_SIZE / 8];
        // SAFETY: the page lives longer than the queue pair.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let qp = alone(
            &ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            doorbells,
        );
        let words = [
            offset_of!(QueuePairRecord, send_producer),
            offset_of!(QueuePairRecord, receive_producer),
            offset_of!(QueuePairRecord, send_wake),
            offset_of!(QueuePairRecord, receive_wake),
        ];
        let read = || words.map(|word| qp.record(word).load(Ordering::Relaxed));
        assert_eq!(read(), [0, 0, 1, 0]);
        for (value, word) in (10..).zip(words) {
            qp.record(word).store(value, Ordering::Relaxed);
        }
        qp.reset_queues();
        assert_eq!(read(), [0, 0, 12, 13]);
    }

    fn limits() -> UverbsContextResponse {
        UverbsContextResponse {
            max_sge: ferrite_abi::MAX_SGE as u32,
            max_inline: ferrite_abi::MAX_INLINE as u32,
            sq_max_log_blocks: ferrite_abi::SQ_MAX_LOG_BLOCKS,
            rq_max_log_entries: ferrite_abi::RQ_MAX_LOG_ENTRIES,
            max_message: ferrite_abi::MAX_MESSAGE,
            ..UverbsContextResponse::zeroed()
        }
    }

    pub(crate) fn cap(
        send_wr: u32,
        recv_wr: u32,
        send_sge: u32,
        recv_sge: u32,
        inline: u32,
    ) -> ibv_qp_cap {
        ibv_qp_cap {
            max_send_wr: send_wr,
            max_recv_wr: recv_wr,
            max_send_sge: send_sge,
            max_recv_sge: recv_sge,
            max_inline_data: inline,
        }
    }

    #[test]
    fn every_capacity_asked_for_is_met() {
        for wr in [1, 2, 3, 100, 128, 4096] {
            for sge in [0, 1, 2, 3, 7, 16] {
                for inline in [0, 1, 32, 33, 96, 97, 256] {
                    for requests in [
                        Requests::Connected,
                        Requests::Datagrams,
                        Requests::Registering,
                    ] {
                        is_met(&cap(wr, wr, sge, sge, inline), requests);
                    }
                }
            }
        }
    }

    fn is_met(wanted: &ibv_qp_cap, requests: Requests) {
        let geometry = Geometry::new(wanted, &limits(), requests).unwrap();
        let datagram = requests.are_datagrams();
        let given = geometry.capacity;
        assert!(given.max_send_wr >= wanted.max_send_wr);
        assert!(given.max_recv_wr >= wanted.max_recv_wr);
        assert!(given.max_send_sge >= wanted.max_send_sge);
        assert!(given.max_recv_sge >= wanted.max_recv_sge);
        assert!(given.max_inline_data >= wanted.max_inline_data);
        // The largest work request of every kind, as often as promised, fits in the ring.
        let sends = [SendOpcode::Send, SendOpcode::SendImmediate];
        for opcode in (0..u8::MAX).filter_map(SendOpcode::from_number) {
            // Programs register lists alone, and only where they have asked for it.
            let registers = requests == Requests::Registering && opcode != SendOpcode::RegisterSend;
            if datagram && !sends.contains(&opcode) || is_long_registration(opcode) && !registers {
                continue;
            }
            let entries = given.max_send_sge as usize * size_of::<Sge>();
            let inline = given.max_inline_data as usize;
            let payload = match opcode {
                SendOpcode::AtomicWrite => 8,
                SendOpcode::Read | SendOpcode::CompareSwap | SendOpcode::FetchAdd => entries,
                SendOpcode::RegisterList | SendOpcode::RegisterListSend => entries,
                _ if has_entries(opcode) => entries.max(inline),
                _ => 0,
            };
            let blocks = blocks_for(opcode, datagram, payload);
            assert!(blocks <= MAX_BLOCKS, "{opcode:?}, {given:?}");
            assert!(
                blocks * given.max_send_wr as usize <= geometry.sq_blocks as usize,
                "{opcode:?}, {given:?}"
            );
        }
        assert!(16 + 16 * given.max_recv_sge <= geometry.rq_stride);
        assert_eq!(geometry.rq_offset % 64, 0);
        assert_eq!(geometry.record_offset % 64, 0);
        assert!(
            geometry.rq_offset + (geometry.rq_entries * geometry.rq_stride) as usize
                <= geometry.record_offset
        );
    }

    /// What fits without taking more blocks is promised, and no more than that.
    #[test]
    fn capacities_are_those_of_the_blocks() {
        let given = |sge, inline, requests| {
            let geometry = Geometry::new(&cap(64, 1, sge, 1, inline), &limits(), requests);
            let geometry = geometry.unwrap();
            let capacity = geometry.capacity;
            (
                geometry.sq_blocks,
                capacity.max_send_wr,
                capacity.max_send_sge,
                capacity.max_inline_data,
            )
        };
        // A block has 16 bytes after the parts of a write and of an atomic.
        assert_eq!(given(1, 0, Requests::Connected), (64, 64, 1, 16));
        assert_eq!(given(1, 17, Requests::Connected), (128, 64, 5, 80));
        assert_eq!(given(16, 256, Requests::Connected), (512, 102, 16, 256));
        // The part of a datagram begins in one block and ends in the next.
        assert_eq!(given(1, 0, Requests::Datagrams), (128, 64, 3, 48));
        assert_eq!(given(3, 48, Requests::Datagrams), (128, 64, 3, 48));
        assert_eq!(given(16, 256, Requests::Datagrams), (512, 85, 16, 256));
        // The parts of a list and of its message fill a block.
        assert_eq!(given(1, 0, Requests::Registering), (128, 64, 4, 80));
        assert_eq!(given(3, 80, Requests::Registering), (256, 85, 8, 144));
        assert_eq!(given(16, 256, Requests::Registering), (512, 85, 16, 256));
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
            self.receive.lock().producer = index;
            for (offset, value) in [
                (offset_of!(QueuePairRecord, send_producer), index),
                (offset_of!(QueuePairRecord, receive_producer), index),
            ] {
                self.record(offset).store(value, Ordering::Release);
            }
            self.receive_finished.store(index, Ordering::Release);
        }
    }

    impl Qp {
        /// Whether a work request that starts at block `index` was the last of those `posted`.
        pub(crate) fn was_posted(&self, index: u32, posted: SendCount) -> bool {
            let slot = &self.send_slots[(index & (self.geometry.sq_blocks - 1)) as usize];
            slot.posted.load(Ordering::Relaxed) == posted.to_word()
        }
    }

    #[test]
    fn without_memory_no_queue_pair_is_made() {
        let geometry = Geometry::new(&cap(4, 4, 1, 1, 0), &limits(), Requests::Connected).unwrap();
        let mut page = vec![0u64; 512];
        // SAFETY: the page outlives the queue pairs.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let failures = heap::tests::with_little_memory(|| {
            Qp::boxed(geometry, doorbells, Buffer::new(geometry.length)?)
        });
        assert_eq!(failures, 3);
    }

    #[test]
    fn capacities_beyond_the_limits_are_refused() {
        for wanted in [
            cap(1, 1, 17, 1, 0),
            cap(1, 1, 1, 17, 0),
            cap(1, 1, 1, 1, 257),
            cap((1 << 17) + 1, 1, 1, 1, 0),
            cap(u32::MAX, 1, 16, 1, 0),
            cap(1, (1 << 15) + 1, 1, 1, 0),
            cap(1, u32::MAX, 1, 1, 0),
        ] {
            assert_eq!(
                Geometry::new(&wanted, &limits(), Requests::Connected).err(),
                Some(libc::EINVAL),
                "{wanted:?}"
            );
        }
        let most = cap(1 << 17, 1 << 15, 1, 1, 0);
        assert!(Geometry::new(&most, &limits(), Requests::Connected).is_ok());
        // With lists each takes two blocks.
        assert!(Geometry::new(&most, &limits(), Requests::Registering).is_err());
    }
}
