// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Completion queues: making, polling, arming, resizing.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferrite_abi::{
    first_unwritten, phase_of, CompletionDoorbell, CompletionEntry, CompletionOpcode,
    CompletionRecord, Plain, UverbsCqRequest, UverbsCqResponse, COMPLETION_GRH,
    COMPLETION_IMMEDIATE, COMPLETION_INVALIDATED, COMPLETION_IPV6, COMPLETION_PHASE,
    COMPLETION_RECEIVE, COMPLETION_SHARED, COMPLETION_VALID_OFFSET, DOORBELL_COMPLETION,
};

use crate::context::Context;
use crate::fail;
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
    /// Distinguishes one arming from the next.
    arm_sequence: AtomicU32,
    /// The ring and what is at its head.
    pub(crate) state: SpinLock<CqState>,
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
    consumer: u32,
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

    /// `ibv_wc_flags` of the entry.
    pub(crate) fn wc_flags(&self) -> u32 {
        let mut flags = 0;
        if self.entry.flags & COMPLETION_IMMEDIATE != 0 {
            flags |= IBV_WC_WITH_IMM;
        }
        if self.entry.flags & COMPLETION_INVALIDATED != 0 {
            flags |= IBV_WC_WITH_INV;
        }
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
        let entries = entries.next_power_of_two();
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
            if entry.flags & COMPLETION_RECEIVE != 0 && entry.flags & COMPLETION_SHARED != 0 {
                // SAFETY: the context with its tables outlives its queues. A queue in the table is
                // allocated, and stays so while this queue's lock is held, because it uses this
                // queue.
                if let Some(srq) = unsafe { (*tables.extended_srqs).get(entry.srqn).as_ref() } {
                    // The queue pair may be another process's.
                    return Some(received(entry, srq.done(entry.index)));
                }
            }
            // SAFETY: the tables live, as above. A queue pair in the table is allocated, and stays so while this queue's lock
            // is held (which `&mut self` shows), because the entry says that it uses this queue.
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

    /// Drops the completions of a shared receive queue of extended connections and runs `then`
    /// before polling goes on.
    pub(crate) fn clean_shared(&self, srqn: u32, then: impl FnOnce()) {
        let mut state = self.state.lock();
        state.clean(|entry| {
            entry.flags & COMPLETION_RECEIVE != 0
                && entry.flags & COMPLETION_SHARED != 0
                && entry.srqn == srqn
        });
        then();
    }

    /// The part that libibverbs knows.
    pub(crate) fn verbs(&self) -> *mut verbs_cq {
        self.verbs.get()
    }

    /// # Safety
    ///
    /// As for [`Pd::buffer`].
    unsafe fn boxed(context: &Context, entries: u32, pd: *mut ibv_pd) -> Result<Box<Self>, c_int> {
        Ok(Box::new(Self {
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
            arm_sequence: AtomicU32::new(0),
            state: SpinLock::new(CqState {
                // SAFETY: by the caller.
                ring: unsafe { CqRing::new(entries, context.limits.cq_max_log_entries, pd) }?,
                consumer: 0,
                current: Completion::none(),
            }),
        }))
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
        wc.vendor_err = entry.detail;
        wc.byte_len = entry.byte_count;
        wc.__bindgen_anon_1.imm_data = entry.immediate;
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
    let seen = cq.state.lock().end();
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
    let mut state = cq.state.lock();
    // SAFETY: as in `create`.
    let ring = unsafe { CqRing::new(entries, context.limits.cq_max_log_entries, cq.pd) };
    let ring = match ring {
        Ok(ring) => ring,
        Err(errno) => return errno,
    };
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
        state.ring = ring;
    }
    result
}

/// Locks the two queues of a queue pair, drops the entries of that queue pair and runs `then`
/// before it unlocks.
///
/// Some queue pairs have only one queue, or none.
pub(crate) fn clean_both(send: Option<&Cq>, receive: Option<&Cq>, qp: &Qp, then: impl FnOnce()) {
    let mut queues = [send, receive];
    // Always in the order of addresses, against deadlock.
    queues.sort_by_key(|cq| cq.map_or(ptr::null(), ptr::from_ref));
    if let [Some(one), Some(other)] = queues {
        if ptr::eq(one, other) {
            queues[1] = None;
        }
    }
    let [first, second] = queues;
    let first = first.map(|cq| cq.state.lock());
    let second = second.map(|cq| cq.state.lock());
    let mut guards: [Option<SpinGuard<'_, CqState>>; 2] = [first, second];
    for state in guards.iter_mut().flatten() {
        state.clean(|entry| {
            let ours = entry.qpn == qp.qpn;
            if let (true, true, Some(srq)) = (ours, entry.flags & COMPLETION_SHARED != 0, qp.srq())
            {
                // Nobody will know that it is done, but its number is free.
                srq.done(entry.index);
            }
            ours
        });
    }
    then();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(entries: u32, max_log_entries: u8) -> Result<CqRing, c_int> {
        // SAFETY: there is no domain.
        unsafe { CqRing::new(entries, max_log_entries, ptr::null_mut()) }
    }

    fn state(entries: u32) -> CqState {
        CqState {
            ring: ring(entries, 20).unwrap(),
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
        assert!(ring(0, 20).is_err());
        assert!(ring(17, 4).is_err());
        assert_eq!(ring(9, 4).unwrap().entries(), 16);
        assert_eq!(ring(1, 4).unwrap().entries(), 1);
    }
}
