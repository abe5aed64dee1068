// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Completion queues: making, polling, arming, resizing.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ops::{Deref, DerefMut};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use ferrite_abi::{
    first_unwritten, phase_of, CompletionDoorbell, CompletionEntry, CompletionOpcode,
    CompletionRecord, Plain, UverbsCqRequest, UverbsCqResponse, COMPLETION_GRH,
    COMPLETION_IMMEDIATE, COMPLETION_INVALIDATED, COMPLETION_IPV6, COMPLETION_PHASE,
    COMPLETION_RECEIVE, COMPLETION_SRQ, COMPLETION_VALID_OFFSET, DOORBELL_COMPLETION,
};

use crate::context::Context;
use crate::fail;
use crate::heap;
use crate::memory::{Buffer, Doorbells, SpinGuard, SpinLock};
use crate::private::*;
use crate::protection::Pd;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::sys::*;
use crate::table::Table;

/// A completion queue.
#[repr(C)]
pub struct Cq {
    verbs: UnsafeCell<verbs_cq>,
    cqn: u32,
    /// The parent domain that its memory comes from, or null.
    pd: *mut ibv_pd,
    doorbells: Doorbells,
    /// The tables of the context, which outlives its queues.
    tables: Tables,
    /// The bits that the device's clock has.
    pub(crate) clock_mask: u64,
    /// Distinguishes one arming from the next.
    arm_sequence: AtomicU32,
    /// The thread between `ibv_start_poll` and `ibv_end_poll`, which has the lock, or 0.
    session: AtomicUsize,
    /// Entries that this thread has taken.
    session_consumer: AtomicU32,
    /// The ring and what is at its head.
    pub(crate) state: SpinLock<CqState>,
}

/// What is under a queue's lock, for who holds it: just now, or since `ibv_start_poll`.
pub(crate) enum CqGuard<'a> {
    Locked(SpinGuard<'a, CqState>),
    Session(&'a mut CqState),
}

impl Deref for CqGuard<'_> {
    type Target = CqState;

    fn deref(&self) -> &CqState {
        match self {
            CqGuard::Locked(state) => state,
            CqGuard::Session(state) => state,
        }
    }
}

impl DerefMut for CqGuard<'_> {
    fn deref_mut(&mut self) -> &mut CqState {
        match self {
            CqGuard::Locked(state) => state,
            CqGuard::Session(state) => state,
        }
    }
}

/// A number that no other thread has now; not 0.
fn this_thread() -> usize {
    // SAFETY: the call has no preconditions.
    unsafe { libc::pthread_self() as usize }
}

/// Where completions find what they are about.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    queue_pairs: *const Table<Qp>,
    extended_srqs: *const Table<Srq>,
}

/// What is changed under the queue's lock.
pub(crate) struct CqState {
    ring: CqRing,
    /// Entries taken, free-running.
    pub(crate) consumer: u32,
    /// The entry that the extended interface looks at.
    pub(crate) current: Completion,
}

/// A buffer with a ring of entries and a record.
struct CqRing {
    buffer: Buffer,
    log_entries: u8,
}

/// An entry with what the work request's poster wants to know.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) entry: CompletionEntry,
    pub(crate) wr_id: u64,
    pub(crate) opcode: ibv_wc_opcode,
}

impl Completion {
    fn none() -> Self {
        Self {
            entry: CompletionEntry::zeroed(),
            wr_id: 0,
            opcode: 0,
        }
    }

    /// Immediate data in wire order, or the invalidated tag, with the flag that says which. The
    /// verbs have one place for both: of an entry with both, the tag is not told.
    fn immediate_or_tag(&self) -> (u32, u32) {
        if self.entry.flags & COMPLETION_IMMEDIATE != 0 {
            // Four bytes are all that an operation of the verbs brings along.
            (self.entry.immediate as u32, IBV_WC_WITH_IMM)
        } else if self.entry.flags & COMPLETION_INVALIDATED != 0 {
            (self.entry.tag, IBV_WC_WITH_INV)
        } else {
            (0, 0)
        }
    }

    /// What `ibv_wc` has for immediate data or the invalidated tag.
    pub(crate) fn imm_data(&self) -> __be32 {
        self.immediate_or_tag().0
    }

    /// `ibv_wc_flags` of the entry.
    pub(crate) fn wc_flags(&self) -> u32 {
        let (_, mut flags) = self.immediate_or_tag();
        if self.entry.flags & COMPLETION_GRH != 0 {
            flags |= IBV_WC_GRH;
        }
        flags
    }
}

/// The service level of a received datagram. On Ethernet there is none; devices tell in its
/// place what the routing header is (IBTA annex 17, A17.4.5.1: a flag for IPv4, IPv6 or none), and
/// programs look for it there: UCX finds a datagram's destination by it.
pub(crate) fn service_level(entry: &CompletionEntry) -> u8 {
    /// UDP is below the transport header.
    const UDP: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    if entry.flags & COMPLETION_GRH == 0 {
        0
    } else if entry.flags & COMPLETION_IPV6 != 0 {
        UDP | IPV6
    } else {
        UDP | IPV4
    }
}

/// What a page has room for beside the record. A shorter ring would take the page as well, and a program
/// that shortens its queue while work is under way gets the completions of that, too.
const SHORTEST_LOG_ENTRIES: u8 = 5;

impl CqRing {
    /// A ring for at least `entries` entries.
    ///
    /// # Safety
    ///
    /// As for [`Pd::buffer`].
    unsafe fn new(entries: u32, max_log_entries: u8, pd: *mut ibv_pd) -> Result<Self, c_int> {
        if entries == 0 || entries > 1 << max_log_entries.min(30) {
            return Err(libc::EINVAL);
        }
        let shortest = 1 << SHORTEST_LOG_ENTRIES.min(max_log_entries);
        let entries = entries.next_power_of_two().max(shortest);
        let record = entries as usize * size_of::<CompletionEntry>();
        Ok(Self {
            // SAFETY: by the caller.
            buffer: unsafe { Pd::buffer(pd, record + size_of::<CompletionRecord>()) }?,
            log_entries: entries.trailing_zeros() as u8,
        })
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn record_offset(&self) -> usize {
        self.entries() as usize * size_of::<CompletionEntry>()
    }

    fn publish_consumer(&self, consumer: u32) {
        // Release: the device may overwrite an entry once it sees that it was consumed.
        self.buffer
            .word(self.record_offset() + offset_of!(CompletionRecord, consumer))
            .store(consumer, Ordering::Release);
    }

    fn request(&self) -> UverbsCqRequest {
        UverbsCqRequest {
            buffer: self.buffer.address(),
            length: self.buffer.length() as u64,
            record_offset: self.record_offset() as u32,
            log_entries: u32::from(self.log_entries),
        }
    }

    fn slot(&self, index: u32) -> *mut u8 {
        let slot = (index & (self.entries() - 1)) as usize;
        // SAFETY: the ring of `entries()` entries is at the start of the buffer.
        unsafe { self.buffer.base().add(slot * size_of::<CompletionEntry>()) }
    }

    /// Whether the device has written the entry with free-running index `index`.
    #[inline]
    fn is_written(&self, index: u32) -> bool {
        // SAFETY: the eight bytes are inside the slot, which is 64-byte aligned; this process
        // reads them only as an atomic while the device may write them.
        let valid =
            unsafe { AtomicU64::from_ptr(self.slot(index).add(COMPLETION_VALID_OFFSET).cast()) };
        // Acquire: the device writes these eight bytes after all the others.
        let valid = valid.load(Ordering::Acquire);
        valid.to_le_bytes()[7] & COMPLETION_PHASE == phase_of(index, self.log_entries)
    }

    /// The entry with free-running index `index`, if the device has written it.
    #[inline]
    fn entry(&self, index: u32) -> Option<CompletionEntry> {
        if !self.is_written(index) {
            return None;
        }
        let slot = self.slot(index);
        // SAFETY: the slot holds an entry that the device does not write again before the
        // consumer index has passed it; any bytes make a valid `CompletionEntry`.
        Some(unsafe { ptr::read_volatile(slot.cast::<CompletionEntry>()) })
    }

    /// Makes every entry of a new ring one that the device has yet to write, when the first to come
    /// has index `consumer`: which phase that is depends on the round that the index is in.
    fn begin_at(&self, consumer: u32) {
        for n in 0..self.entries() {
            let index = consumer.wrapping_add(n);
            let entry = CompletionEntry {
                phase: phase_of(index, self.log_entries) ^ COMPLETION_PHASE,
                ..CompletionEntry::zeroed()
            };
            // SAFETY: the slot is inside the ring and aligned, and the device does not know of it.
            unsafe { ptr::write_volatile(self.slot(index).cast::<CompletionEntry>(), entry) };
        }
    }

    /// Writes an entry where the device has already written one.
    fn rewrite(&self, index: u32, mut entry: CompletionEntry) {
        entry.phase = entry.phase & !COMPLETION_PHASE | phase_of(index, self.log_entries);
        // SAFETY: the slot is inside the ring, aligned, and belongs to this side (see `entry`).
        unsafe { ptr::write_volatile(self.slot(index).cast::<CompletionEntry>(), entry) };
    }
}

impl CqState {
    /// Takes the next completion.
    #[inline]
    pub(crate) fn next(&mut self, tables: &Tables) -> Option<Completion> {
        loop {
            let entry = self.ring.entry(self.consumer)?;
            self.consumer = self.consumer.wrapping_add(1);
            if entry.flags & COMPLETION_RECEIVE != 0 && entry.flags & COMPLETION_SRQ != 0 {
                // SAFETY: the context with its tables outlives its queues. A queue in the table is
                // allocated, and stays so while this queue's lock is held: before it goes, its
                // entries are dropped under that lock.
                if let Some(srq) = unsafe { (*tables.extended_srqs).get(entry.srqn).as_ref() } {
                    // The queue pair may be another process's.
                    return Some(received(entry, srq.done(entry.index)));
                }
            }
            // SAFETY: the tables live, as above. A queue pair in the table is allocated, and stays so
            // while this queue's lock is held (which `&mut self` shows): before it goes, its entries
            // are dropped under that lock.
            let Some(qp) = (unsafe { (*tables.queue_pairs).get(entry.qpn).as_ref() }) else {
                // Of a queue pair that is not known: nobody could use it.
                continue;
            };
            return Some(resolve(qp, entry));
        }
    }

    /// Tells the device what was taken.
    #[inline]
    pub(crate) fn publish(&self) {
        self.ring.publish_consumer(self.consumer);
    }

    /// The index of the first entry that is not there yet.
    fn end(&self) -> u32 {
        first_unwritten(self.consumer, self.ring.log_entries, |index| {
            self.ring.is_written(index)
        })
    }

    /// Entries written and not taken.
    fn waiting(&self) -> u32 {
        self.end().wrapping_sub(self.consumer)
    }

    /// Drops all entries that `unwanted` picks, keeping the others in order.
    fn clean(&mut self, mut unwanted: impl FnMut(&CompletionEntry) -> bool) {
        let end = self.end();
        // Entries that stay move up to close the gaps; the device writes only from `end` on.
        let mut dropped = 0u32;
        let mut index = end;
        while index != self.consumer {
            index = index.wrapping_sub(1);
            let Some(entry) = self.ring.entry(index) else {
                break;
            };
            if unwanted(&entry) {
                dropped += 1;
            } else if dropped != 0 {
                self.ring.rewrite(index.wrapping_add(dropped), entry);
            }
        }
        if dropped != 0 {
            self.consumer = self.consumer.wrapping_add(dropped);
            self.publish();
        }
    }
}

/// A completion of a receive.
fn received(entry: CompletionEntry, wr_id: u64) -> Completion {
    Completion {
        entry,
        wr_id,
        opcode: if entry.opcode == CompletionOpcode::ReceiveWrite.number() {
            IBV_WC_RECV_RDMA_WITH_IMM
        } else {
            IBV_WC_RECV
        },
    }
}

/// Adds what the queue pair remembers of the work request, and frees its room.
#[inline]
fn resolve(qp: &Qp, entry: CompletionEntry) -> Completion {
    if entry.flags & COMPLETION_RECEIVE != 0 {
        let wr_id = match qp.srq() {
            Some(srq) => srq.done(entry.index),
            None => qp.receive_done(entry.index),
        };
        received(entry, wr_id)
    } else {
        let (wr_id, opcode) = qp.send_done(entry.index);
        Completion {
            entry,
            wr_id,
            opcode,
        }
    }
}

impl Cq {
    /// # Safety
    ///
    /// `cq` is a live completion queue of this provider.
    pub(crate) unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Cq {
        // SAFETY: the `ibv_cq` is at the start of a `Cq`.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// Where its completions find what they are about.
    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Drops the completions of a shared receive queue of extended connections.
    pub(crate) fn forget_shared(&self, srqn: u32) {
        self.lock().clean(|entry| {
            entry.flags & COMPLETION_RECEIVE != 0
                && entry.flags & COMPLETION_SRQ != 0
                && entry.srqn == srqn
        });
    }

    /// Drops the completions of a queue pair.
    pub(crate) fn forget(&self, qp: &Qp) {
        self.lock().clean(|entry| {
            let ours = entry.qpn == qp.qpn;
            if let (true, true, Some(srq)) = (ours, entry.flags & COMPLETION_SRQ != 0, qp.srq()) {
                // Nobody will know that it is done, but its number is free.
                srq.done(entry.index);
            }
            ours
        });
    }

    /// Locks the queue, unless the calling thread did so with `ibv_start_poll`.
    pub(crate) fn lock(&self) -> CqGuard<'_> {
        // Only this thread stores its own number, and takes it back.
        if self.session.load(Ordering::Relaxed) == this_thread() {
            // SAFETY: this thread locked and forgot the guard. What the functions of the extended
            // interface borrow, they borrow for the time of a call, which this is not inside of.
            CqGuard::Session(unsafe { self.state.held_mut() })
        } else {
            CqGuard::Locked(self.state.lock())
        }
    }

    /// `ibv_start_poll` has locked the queue, and leaves it so.
    pub(crate) fn begin_session(&self, state: SpinGuard<'_, CqState>) {
        self.session_consumer
            .store(state.consumer, Ordering::Relaxed);
        self.session.store(this_thread(), Ordering::Release);
        core::mem::forget(state);
    }

    /// The thread in its session has taken another entry.
    pub(crate) fn session_has_taken(&self, consumer: u32) {
        self.session_consumer.store(consumer, Ordering::Relaxed);
    }

    /// Ends the session.
    ///
    /// # Safety
    ///
    /// The calling thread has begun it, and uses nothing it got in it any more.
    pub(crate) unsafe fn end_session(&self) {
        self.session.store(0, Ordering::Relaxed);
        // SAFETY: by the caller, the lock is this thread's.
        unsafe { self.state.unlock() };
    }

    /// The index of the first entry that an arming now is for. Waits for no session: a thread in
    /// one may itself wait for the caller.
    fn armed_from(&self) -> u32 {
        loop {
            let session = self.session.load(Ordering::Acquire);
            if session == this_thread() {
                return self.lock().end();
            }
            if let Some(state) = self.state.try_lock() {
                return state.end();
            }
            if session != 0 {
                // What another thread has not taken yet may be a reason for an event that comes to
                // no purpose, but none is missed.
                return self.session_consumer.load(Ordering::Relaxed);
            }
            std::thread::yield_now();
        }
    }

    /// The part that libibverbs knows.
    pub(crate) fn verbs(&self) -> *mut verbs_cq {
        self.verbs.get()
    }

    /// # Safety
    ///
    /// As for [`Pd::buffer`].
    unsafe fn boxed(context: &Context, entries: u32, pd: *mut ibv_pd) -> Result<Box<Self>, c_int> {
        heap::boxed(Self {
            verbs: UnsafeCell::new(verbs_cq {
                cq_ex: ibv_cq_ex::default(),
            }),
            cqn: 0,
            pd,
            doorbells: context.doorbells,
            tables: Tables {
                queue_pairs: &raw const *context.queue_pairs,
                extended_srqs: &raw const *context.extended_srqs,
            },
            clock_mask: context.clock.mask(),
            arm_sequence: AtomicU32::new(0),
            session: AtomicUsize::new(0),
            session_consumer: AtomicU32::new(0),
            state: SpinLock::new(CqState {
                // SAFETY: by the caller.
                ring: unsafe { CqRing::new(entries, context.limits.cq_max_log_entries, pd) }?,
                consumer: 0,
                current: Completion::none(),
            }),
        })
    }
}

/// Makes a queue; `attr.wc_flags` must be free of what the kernel would refuse.
///
/// # Safety
///
/// `context` is an open context of this provider and `attr` what its user asked for.
pub(crate) unsafe fn create(
    context: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
) -> Result<*mut Cq, c_int> {
    let pd = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        attr.parent_domain
    } else {
        ptr::null_mut()
    };
    // What follows is for the kernel, which does not know of parent domains.
    let mut attr = *attr;
    attr.comp_mask &= !IBV_CQ_INIT_ATTR_MASK_PD;
    // SAFETY: by the caller; the consumer keeps the domain as long as what is made with it.
    let cq = unsafe { Cq::boxed(Context::of(context), attr.cqe, pd) }?;
    let private = cq.state.lock().ring.request();
    let cq = Box::into_raw(cq);
    let mut response = Response {
        core: ib_uverbs_ex_create_cq_resp::default(),
        private: UverbsCqResponse::zeroed(),
    };
    let mut request = ExtendedRequest {
        header: ib_uverbs_cmd_hdr::default(),
        extended_header: ib_uverbs_ex_cmd_hdr::default(),
        core: ib_uverbs_ex_create_cq::default(),
        private,
    };
    // SAFETY: request and response are laid out as libibverbs expects, the sizes are theirs, and
    // `cq` is not shared yet.
    let result = unsafe {
        ibv_cmd_create_cq_ex(
            context,
            &attr,
            (*cq).verbs.get(),
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
            0,
        )
    };
    if result != 0 {
        // SAFETY: `cq` is the box from above; the kernel did not take it.
        drop(unsafe { Box::from_raw(cq) });
        return Err(result);
    }
    // SAFETY: nobody else has `cq` yet.
    unsafe { (*cq).cqn = response.private.cqn };
    Ok(cq)
}

pub(crate) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let (Ok(cqe), Ok(comp_vector)) = (u32::try_from(cqe), u32::try_from(comp_vector)) else {
        return fail(libc::EINVAL);
    };
    let attr = ibv_cq_init_attr_ex {
        cqe,
        channel,
        comp_vector,
        ..Default::default()
    };
    // SAFETY: libibverbs passes an open context.
    match unsafe { create(context, &attr) } {
        Ok(cq) => cq.cast(),
        Err(errno) => fail(errno),
    }
}

pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: libibverbs passes a queue of ours.
    let result = unsafe { ibv_cmd_destroy_cq(cq) };
    if result == 0 {
        // SAFETY: it came from `create`; kernel and device do not use it any more.
        drop(unsafe { Box::from_raw(cq.cast::<Cq>()) });
    }
    result
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let cq = unsafe { Cq::of(cq) };
    let tables = cq.tables();
    let mut state = cq.state.lock();
    let before = state.consumer;
    let mut polled = 0;
    while polled < count {
        let Some(completion) = state.next(tables) else {
            break;
        };
        let entry = &completion.entry;
        // SAFETY: the consumer's array has `count` elements, of which this is one.
        let wc = unsafe { &mut *wc.add(polled as usize) };
        wc.wr_id = completion.wr_id;
        wc.status = u32::from(entry.status);
        wc.opcode = completion.opcode;
        wc.vendor_err = entry.vendor_syndrome;
        wc.byte_len = entry.byte_count;
        wc.__bindgen_anon_1.imm_data = completion.imm_data();
        wc.qp_num = entry.qpn;
        wc.src_qp = entry.source_qpn;
        wc.wc_flags = completion.wc_flags();
        wc.pkey_index = entry.pkey_index;
        wc.slid = 0;
        wc.sl = service_level(entry);
        wc.dlid_path_bits = 0;
        polled += 1;
    }
    if state.consumer != before {
        state.publish();
    }
    polled
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let cq = unsafe { Cq::of(cq) };
    // An event is for what comes after the arming: what is there already, and not yet polled, is not
    // waited for.
    let seen = cq.armed_from();
    let doorbell = CompletionDoorbell {
        cqn: cq.cqn,
        seen,
        sequence: cq.arm_sequence.load(Ordering::Relaxed) as u8 & 3,
        solicited: solicited_only != 0,
    };
    cq.doorbells.ring(DOORBELL_COMPLETION, doorbell.encode());
    0
}

pub(crate) unsafe extern "C" fn cq_event(cq: *mut ibv_cq) {
    // SAFETY: libibverbs passes the live queue that an event was reported for.
    let cq = unsafe { Cq::of(cq) };
    cq.arm_sequence.fetch_add(1, Ordering::Relaxed);
}

pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    let mut request = ExtendedRequest::<ib_uverbs_ex_modify_cq, Nothing>::default();
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    unsafe {
        ibv_cmd_modify_cq(
            cq,
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    }
}

pub(crate) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the consumer passes a live queue, whose context is open.
    let (cq, context) = unsafe { (Cq::of(cq), Context::of((*cq).context)) };
    let Ok(entries) = u32::try_from(cqe) else {
        return libc::EINVAL;
    };
    // Before the lock is taken, and after it is given up, when the old ring goes: memory may be the
    // program's own matter.
    // SAFETY: as in `create`.
    let ring = unsafe { CqRing::new(entries, context.limits.cq_max_log_entries, cq.pd) };
    let mut ring = match ring {
        Ok(ring) => ring,
        Err(errno) => return errno,
    };
    let mut state = cq.lock();
    if state.waiting() > ring.entries() {
        return libc::EINVAL;
    }
    ring.begin_at(state.consumer);
    ring.publish_consumer(state.consumer);
    let mut request = Request {
        header: ib_uverbs_cmd_hdr::default(),
        core: ib_uverbs_resize_cq::default(),
        private: ring.request(),
    };
    let mut response = Response::<ib_uverbs_resize_cq_resp, Nothing>::default();
    // The lock is held meanwhile: nobody may poll one ring while the device moves to the other.
    // SAFETY: request and response are laid out as libibverbs expects and the sizes are theirs.
    let result = unsafe {
        ibv_cmd_resize_cq(
            cq.verbs.get().cast(),
            cqe,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result == 0 {
        // The device has copied what was not consumed and left the old ring.
        core::mem::swap(&mut state.ring, &mut ring);
    }
    drop(state);
    result
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::testing::Shared;

    fn ring(entries: u32, max_log_entries: u8) -> Result<CqRing, c_int> {
        // SAFETY: there is no domain.
        unsafe { CqRing::new(entries, max_log_entries, ptr::null_mut()) }
    }

    fn state(entries: u32) -> CqState {
        CqState {
            // On a device that has no longer ones.
            ring: ring(entries, entries.ilog2() as u8).unwrap(),
            consumer: 0,
            current: Completion::none(),
        }
    }

    fn write(state: &CqState, index: u32, qpn: u32) {
        let entry = CompletionEntry {
            qpn,
            index,
            ..CompletionEntry::zeroed()
        };
        state.ring.rewrite(index, entry);
    }

    fn left(state: &CqState) -> Vec<(u32, u32)> {
        (state.consumer..)
            .map_while(|index| state.ring.entry(index))
            .map(|entry| (entry.qpn, entry.index))
            .collect()
    }

    #[test]
    fn entries_become_visible_by_phase_round_after_round() {
        let mut state = state(4);
        for index in 0..11 {
            assert!(state.ring.entry(index).is_none());
            write(&state, index, 7);
            assert_eq!(state.ring.entry(index).unwrap().index, index);
            state.consumer = index + 1;
        }
    }

    #[test]
    fn the_end_is_after_all_that_is_there() {
        let mut state = state(4);
        for index in 0..11 {
            assert_eq!(state.end(), index);
            write(&state, index, 7);
            if index >= 3 {
                assert_eq!(state.waiting(), 4);
                state.consumer += 1;
            }
        }
    }

    #[test]
    fn cleaning_drops_one_queue_pair_and_keeps_the_order_of_the_rest() {
        let mut state = state(8);
        // Past the end of the ring, so that the phase changes among the entries.
        for index in 0..5 {
            write(&state, index, 1);
        }
        state.consumer = 5;
        for (index, qpn) in (5..).zip([1, 2, 1, 2, 2, 1]) {
            write(&state, index, qpn);
        }
        state.clean(|entry| entry.qpn == 1);
        assert_eq!(state.consumer, 8);
        assert_eq!(left(&state), [(2, 6), (2, 8), (2, 9)]);
        assert_eq!(
            state
                .ring
                .buffer
                .word(state.ring.record_offset())
                .load(Ordering::Relaxed),
            8
        );
        state.clean(|entry| entry.qpn == 2);
        assert_eq!(left(&state), []);
        assert_eq!(state.consumer, 11);
    }

    #[test]
    fn a_full_ring_is_cleaned_too() {
        let mut state = state(4);
        for index in 0..4 {
            write(&state, index, 3);
        }
        state.clean(|entry| entry.qpn == 3);
        assert_eq!(state.consumer, 4);
        assert_eq!(left(&state), []);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(ring(0, 20).err(), Some(libc::EINVAL));
        assert_eq!(ring(17, 4).err(), Some(libc::EINVAL));
        assert_eq!(ring(9, 4).unwrap().entries(), 16);
        assert_eq!(ring(1, 4).unwrap().entries(), 16);
        assert_eq!(ring(1, 20).unwrap().entries(), 32);
        assert_eq!(ring(33, 20).unwrap().entries(), 64);
    }

    impl Cq {
        /// Writes an entry as the device does.
        pub(crate) fn complete(&self, index: u32, entry: CompletionEntry) {
            self.state.lock().ring.rewrite(index, entry);
        }
    }

    /// A queue that no kernel knows of, whose completions are of the queue pairs in `table`.
    pub(crate) fn alone(
        entries: u32,
        doorbells: Doorbells,
        table: &Table<Qp>,
        srqs: &Table<Srq>,
    ) -> Box<Cq> {
        Box::new(Cq {
            verbs: UnsafeCell::new(verbs_cq {
                cq_ex: ibv_cq_ex::default(),
            }),
            cqn: 5,
            pd: ptr::null_mut(),
            doorbells,
            tables: Tables {
                queue_pairs: table,
                extended_srqs: srqs,
            },
            clock_mask: 0xffff_ffff_ffff,
            arm_sequence: AtomicU32::new(0),
            session: AtomicUsize::new(0),
            session_consumer: AtomicU32::new(0),
            state: SpinLock::new(state(entries)),
        })
    }

    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut state = state(8);
        state.consumer = u32::MAX - 20;
        state.ring.begin_at(state.consumer);
        for round in 0..12u32 {
            let first = state.consumer;
            assert_eq!(state.waiting(), 0);
            for n in 0..8 {
                write(&state, first.wrapping_add(n), 1 + n % 2);
                assert_eq!(state.waiting(), n + 1);
            }
            state.clean(|entry| entry.qpn == 1);
            assert_eq!(state.waiting(), 4, "round {round}");
            let left: Vec<u32> = (0..4)
                .map(|n| {
                    state
                        .ring
                        .entry(state.consumer.wrapping_add(n))
                        .unwrap()
                        .qpn
                })
                .collect();
            assert_eq!(left, [2; 4]);
            state.consumer = state.consumer.wrapping_add(4);
            // Another ring, shorter and longer, from the middle of the numbers.
            let other = ring(8, 20).unwrap();
            other.begin_at(state.consumer);
            state.ring = other;
        }
        assert!(state.consumer < 200);
    }

    pub(crate) struct Page(Vec<u64>);

    impl Page {
        pub(crate) fn new() -> Self {
            Self(vec![0; ferrite_abi::DOORBELL_PAGE_SIZE / 8])
        }

        pub(crate) fn doorbells(&mut self) -> Doorbells {
            // SAFETY: the tests keep the page longer than the queues.
            unsafe { Doorbells::new(self.0.as_mut_ptr().cast()) }
        }

        fn armed(&self) -> CompletionDoorbell {
            let word = self.0.as_ptr().wrapping_add(DOORBELL_COMPLETION / 8);
            // SAFETY: the word is inside the page.
            CompletionDoorbell::decode(unsafe { ptr::read_volatile(word) })
        }
    }

    /// A thread in `ibv_start_poll` arms, resizes its view and drops entries without waiting for
    /// itself; another thread arms without waiting for it.
    #[test]
    fn a_queue_is_armed_and_cleaned_between_start_and_end_of_polling() {
        let mut page = Page::new();
        let (table, srqs) = (Table::new().unwrap(), Table::new().unwrap());
        let cq = alone(8, page.doorbells(), &table, &srqs);
        let mut qp =
            crate::qp::tests::alone(&crate::qp::tests::cap(8, 8, 1, 1, 0), page.doorbells());
        let qpn = qp.qpn;
        assert_eq!(
            table.insert(qpn, &raw mut *qp),
            Ok(crate::table::Inserted::Yes)
        );
        let raw: *mut ibv_cq = ptr::from_ref(&*cq).cast_mut().cast();
        for index in 0..3 {
            write(&cq.state.lock(), index, qpn);
        }
        let mut attr = ibv_poll_cq_attr::default();
        // SAFETY: the queue lives, and the calls are in their order.
        unsafe {
            assert_eq!(crate::cq_ex::start_poll(raw.cast(), &mut attr), 0);
            assert_eq!(req_notify_cq(raw, 0), 0);
            assert_eq!(page.armed().seen, 3);
            assert_eq!(crate::cq_ex::next_poll(raw.cast()), 0);
            // What the polling thread has not taken may be new to another.
            let raw = raw as usize;
            std::thread::spawn(move || req_notify_cq(raw as *mut ibv_cq, 1))
                .join()
                .unwrap();
            assert_eq!((page.armed().seen, page.armed().solicited), (2, true));
            cq.forget(&qp);
            assert_eq!(crate::cq_ex::next_poll(raw as *mut _), libc::ENOENT);
            crate::cq_ex::end_poll(raw as *mut _);
        }
        assert_eq!(cq.state.lock().consumer, 3);
        // SAFETY: the queue lives.
        assert_eq!(unsafe { req_notify_cq(raw, 0) }, 0);
        assert_eq!(page.armed().seen, 3);
    }

    /// Threads poll one queue, plainly and in sessions, arm it, and make and destroy queue pairs of
    /// it, while a device writes: each completion is seen once, by one of them, and nothing waits
    /// for ever.
    #[test]
    fn threads_poll_arm_and_destroy_on_one_queue() {
        const COMPLETIONS: u32 = 20_000;
        let mut page = Page::new();
        let (table, srqs) = (Table::new().unwrap(), Table::new().unwrap());
        let cq = alone(64, page.doorbells(), &table, &srqs);
        {
            let mut state = cq.state.lock();
            state.consumer = u32::MAX - 5000;
            state.ring.begin_at(state.consumer);
            state.publish();
        }
        let doorbells = page.doorbells();
        let capacity = crate::qp::tests::cap(8, 64, 1, 1, 0);
        let mut lasting = crate::qp::tests::alone(&capacity, doorbells);
        let lasting_qpn = lasting.qpn;
        assert_eq!(
            table.insert(lasting_qpn, &raw mut *lasting),
            Ok(crate::table::Inserted::Yes)
        );
        let seen = AtomicU32::new(0);
        let done = || seen.load(Ordering::Acquire) >= COMPLETIONS;
        std::thread::scope(|scope| {
            let (cq, table) = (Shared(&*cq), &table);
            let (seen, done) = (&seen, &done);
            for extended in [false, true, true] {
                scope.spawn(move || {
                    let cq = cq;
                    let raw: *mut ibv_cq = ptr::from_ref(cq.0).cast_mut().cast();
                    while !done() {
                        let mut taken = 0;
                        // SAFETY: the queue lives; the calls are in their order.
                        unsafe {
                            if extended {
                                let mut attr = ibv_poll_cq_attr::default();
                                if crate::cq_ex::start_poll(raw.cast(), &mut attr) == 0 {
                                    loop {
                                        let entry = cq.state.held_mut().current.entry;
                                        taken += u32::from(entry.qpn == lasting_qpn);
                                        assert_eq!(req_notify_cq(raw, 0), 0);
                                        if crate::cq_ex::next_poll(raw.cast()) != 0 {
                                            break;
                                        }
                                    }
                                    crate::cq_ex::end_poll(raw.cast());
                                }
                            } else {
                                let mut wc = [ibv_wc::default(); 4];
                                let count = poll_cq(raw, 4, wc.as_mut_ptr());
                                for wc in &wc[..count as usize] {
                                    taken += u32::from(wc.qp_num == lasting_qpn);
                                }
                                assert_eq!(req_notify_cq(raw, 1), 0);
                            }
                        }
                        seen.fetch_add(taken, Ordering::AcqRel);
                        std::thread::yield_now();
                    }
                });
            }
            // The device: every third entry is of a queue pair that comes and goes.
            let mut producer = u32::MAX - 5000;
            let mut written = 0;
            let mut passing = None;
            let consumer = || {
                let state = cq.state.lock();
                let offset = state.ring.record_offset();
                state.ring.buffer.word(offset).load(Ordering::Acquire)
            };
            while written < COMPLETIONS {
                while producer.wrapping_sub(consumer()) >= 60 {
                    std::thread::yield_now();
                }
                let qp = passing.get_or_insert_with(|| {
                    let mut qp = crate::qp::tests::alone(&capacity, doorbells);
                    qp.qpn = 0x77;
                    assert_eq!(
                        table.insert(qp.qpn, &raw mut *qp),
                        Ok(crate::table::Inserted::Yes)
                    );
                    qp
                });
                let last = qp.qpn;
                for (n, qpn) in [lasting_qpn, last, lasting_qpn].into_iter().enumerate() {
                    let index = producer.wrapping_add(n as u32);
                    write(&cq.state.lock(), index, qpn);
                }
                producer = producer.wrapping_add(3);
                written += 2;
                if written % 16 == 0 {
                    if let Some(qp) = passing.take() {
                        cq.forget(&qp);
                        table.remove(qp.qpn, &*qp);
                    }
                }
            }
            if let Some(qp) = passing.take() {
                while !done() {
                    std::thread::yield_now();
                }
                cq.forget(&qp);
                table.remove(qp.qpn, &*qp);
            }
        });
        assert_eq!(seen.into_inner(), COMPLETIONS);
        assert_eq!(cq.session.load(Ordering::Relaxed), 0);
    }
}
