// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Completion queues: making, polling, arming, resizing.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ops::{Deref, DerefMut};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use ferrite_abi::{
    CompletionDoorbell, Plain, UverbsCqResponse, COMPLETION_SRQ, DOORBELL_COMPLETION,
};

use crate::completion::{immediate_and_flags, is_shared_receive, service_level, QueuesByNumber};
use crate::context::Context;
use crate::cq_ring::{CqRing, CqState};
use crate::fail;
use crate::heap;
use crate::memory::{Doorbells, SpinGuard, SpinLock};
use crate::object::{self, or_null};
use crate::private::*;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::sys::*;

/// A completion queue.
#[repr(C)]
pub struct Cq {
    verbs: UnsafeCell<verbs_cq>,
    cqn: u32,
    /// The parent domain that its memory comes from, or null.
    pd: *mut ibv_pd,
    doorbells: Doorbells,
    /// Where its completions find what they are about.
    tables: QueuesByNumber,
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

impl Cq {
    /// # Safety
    ///
    /// `cq` is a live completion queue of this provider.
    pub(crate) unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Cq {
        // SAFETY: by the caller it came from `create`, where the `ibv_cq` is at the start of a `Cq`;
        // after that it is shared only.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// Where its completions find what they are about.
    pub(crate) fn tables(&self) -> &QueuesByNumber {
        &self.tables
    }

    /// As the table of queues knows it.
    pub(crate) fn home(&self) -> *const ibv_cq {
        ptr::from_ref(self).cast()
    }

    /// Drops the completions of an XRC SRQ that goes. What the device writes of it from here on finds
    /// nothing: no entry may come between the two, or the SRQ would be found when it is freed.
    pub(crate) fn leave_xrc_srq(&self, srq: &Srq) {
        let mut state = self.lock();
        state.clean(|entry| is_shared_receive(entry) && entry.srqn == srq.srqn);
        self.tables.leave_xrc_srq(srq, self.home());
    }

    /// Drops the completions of a queue pair that goes. What the device writes of it from here on finds
    /// nothing: no entry may come between the two, or the queue pair would be remembered when it is freed.
    pub(crate) fn leave(&self, qp: &Qp) {
        let mut state = self.lock();
        Self::clean(&mut state, qp);
        self.tables.leave(qp, self.home());
    }

    /// Drops the completions of a queue pair, which stays.
    pub(crate) fn forget(&self, qp: &Qp) {
        Self::clean(&mut self.lock(), qp);
    }

    fn clean(state: &mut CqState, qp: &Qp) {
        state.clean(|entry| {
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
            // SAFETY: `begin_session` stored this thread's number when it forgot the guard, so that
            // the lock is held by this thread. What the functions of `cq_ex` borrow, they borrow for
            // the time of a call, which this is not inside of.
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
        // SAFETY: `begin_session` left the lock held for this thread, which by the caller uses nothing
        // of it any more.
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
    /// As for [`crate::protection::Pd::buffer`].
    unsafe fn boxed(context: &Context, entries: u32, pd: *mut ibv_pd) -> Result<Box<Self>, c_int> {
        heap::boxed(Self {
            verbs: UnsafeCell::new(verbs_cq {
                cq_ex: ibv_cq_ex::default(),
            }),
            cqn: 0,
            pd,
            doorbells: context.doorbells,
            // SAFETY: the tables go with the context (`free_context`), after all its queues.
            tables: unsafe { QueuesByNumber::new(&context.queue_pairs, &context.xrc_srqs) },
            clock_mask: context.clock.mask(),
            arm_sequence: AtomicU32::new(0),
            session: AtomicUsize::new(0),
            session_consumer: AtomicU32::new(0),
            // SAFETY: the domain is as `CqRing::new` wants it, by the caller.
            state: SpinLock::new(CqState::new(unsafe {
                CqRing::new(entries, context.limits.cq_max_log_entries, pd)
            }?)),
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
    // SAFETY: the context is open, by the caller; the consumer keeps the domain as long as what is made
    // with it.
    let cq = unsafe { Cq::boxed(Context::of(context), attr.cqe, pd) }?;
    let mut request =
        ExtendedRequest::<ib_uverbs_ex_create_cq, _>::with(cq.state.lock().ring.request());
    let mut response = Response::<ib_uverbs_ex_create_cq_resp, _>::with(UverbsCqResponse::zeroed());
    let cq = object::make(cq, |cq| {
        // SAFETY: `make` passes the box from above, which nobody else has; the context is open, by the
        // caller; request and response have the layout that the command has in libibverbs (`private`).
        unsafe {
            let verbs = (*cq).verbs.get();
            command!(ibv_cmd_create_cq_ex(context, &attr, verbs), request, response; 0)
        }
    })?;
    // SAFETY: `make` gave it, and nobody else has it yet.
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
    or_null(unsafe { create(context, &attr) })
}

pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: libibverbs passes a queue from `create`, whose `ibv_cq` comes first. Queue pairs and
    // shared receive queues that complete to it are gone: the kernel refuses before.
    unsafe { object::destroy(cq.cast::<Cq>(), || ibv_cmd_destroy_cq(cq), |_| {}) }
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let cq = unsafe { Cq::of(cq) };
    let (tables, home) = (cq.tables(), cq.home());
    let mut state = cq.state.lock();
    let before = state.consumer;
    let mut polled = 0;
    while polled < count {
        let Some((entry, finished)) = state.next(tables, home) else {
            break;
        };
        let flags = entry.flags();
        let (imm_data, wc_flags) = immediate_and_flags(flags, || entry.immediate(), || entry.tag());
        // SAFETY: the consumer's array has `count` elements, of which this is one.
        let wc = unsafe { &mut *wc.add(polled as usize) };
        wc.wr_id = finished.wr_id;
        wc.status = u32::from(entry.status());
        wc.opcode = finished.opcode;
        wc.vendor_err = entry.vendor_syndrome();
        wc.byte_len = entry.byte_count();
        wc.__bindgen_anon_1.imm_data = imm_data;
        wc.qp_num = entry.qpn();
        wc.src_qp = entry.source_qpn();
        wc.wc_flags = wc_flags;
        wc.pkey_index = entry.pkey_index();
        wc.slid = 0;
        wc.sl = service_level(flags);
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
    // SAFETY: the consumer passes a live queue and its attributes; the request has the layout that the
    // command has in libibverbs (`private`).
    unsafe { command!(ibv_cmd_modify_cq(cq, attr), request) }
}

pub(crate) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the consumer passes a live queue, whose context is open.
    let (cq, context) = unsafe { (Cq::of(cq), Context::of((*cq).context)) };
    let Ok(entries) = u32::try_from(cqe) else {
        return libc::EINVAL;
    };
    // Before the lock is taken, and after it is given up, when the old ring goes: memory may be the
    // program's own matter.
    // SAFETY: the consumer keeps the domain that it made the queue with as long as the queue.
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
    let mut request = Request::<ib_uverbs_resize_cq, _>::with(ring.request());
    let mut response = Response::<ib_uverbs_resize_cq_resp, Nothing>::default();
    // The lock is held meanwhile: nobody may poll one ring while the device moves to the other.
    // SAFETY: the queue is live, as above; request and response have the layout that the command has in
    // libibverbs (`private`).
    let result = unsafe {
        command!(
            ibv_cmd_resize_cq(cq.verbs.get().cast(), cqe),
            request,
            response
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
    use crate::cq_ring::tests::{state, write};
    use crate::table::{Homes, Inserted, NumberTable};
    use crate::testing::{self, Page, Shared};
    use ferrite_abi::CompletionEntry;

    impl Cq {
        /// Of a queue whose completions all come to this.
        pub(crate) fn homes(&self) -> Homes {
            [self.home().cast_mut(), ptr::null_mut()]
        }

        /// Writes an entry as the device does.
        pub(crate) fn complete(&self, index: u32, entry: CompletionEntry) {
            self.state.lock().ring.rewrite(index, entry);
        }
    }

    /// A queue that no kernel knows of, whose completions are of the queue pairs in `table`.
    pub(crate) fn alone(
        entries: u32,
        doorbells: Doorbells,
        table: &NumberTable<Qp>,
        srqs: &NumberTable<Srq>,
    ) -> Box<Cq> {
        Box::new(Cq {
            verbs: UnsafeCell::new(verbs_cq {
                cq_ex: ibv_cq_ex::default(),
            }),
            cqn: 5,
            pd: ptr::null_mut(),
            doorbells,
            // SAFETY: the tests keep the tables longer than the queue.
            tables: unsafe { QueuesByNumber::new(table, srqs) },
            clock_mask: 0xffff_ffff_ffff,
            arm_sequence: AtomicU32::new(0),
            session: AtomicUsize::new(0),
            session_consumer: AtomicU32::new(0),
            state: SpinLock::new(state(entries)),
        })
    }

    /// What the doorbell for completion queues was last rung with.
    fn armed(page: &Page) -> CompletionDoorbell {
        CompletionDoorbell::decode(page.read(DOORBELL_COMPLETION))
    }

    /// A thread in `ibv_start_poll` arms, resizes its view and drops entries without waiting for
    /// itself; another thread arms without waiting for it.
    #[test]
    fn a_queue_is_armed_and_cleaned_between_start_and_end_of_polling() {
        let mut page = Page::new();
        let (table, srqs) = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let cq = alone(8, page.doorbells(), &table, &srqs);
        let mut qp = testing::rc(&testing::cap(8, 8, 1, 1, 0), page.doorbells());
        let qpn = qp.qpn;
        assert_eq!(
            table.insert(qpn, &raw mut *qp, cq.homes()),
            Ok(Inserted::Yes)
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
            assert_eq!(armed(&page).seen, 3);
            assert_eq!(crate::cq_ex::next_poll(raw.cast()), 0);
            // What the polling thread has not taken may be new to another.
            let raw = raw as usize;
            std::thread::spawn(move || req_notify_cq(raw as *mut ibv_cq, 1))
                .join()
                .unwrap();
            assert_eq!((armed(&page).seen, armed(&page).solicited), (2, true));
            cq.forget(&qp);
            assert_eq!(crate::cq_ex::next_poll(raw as *mut _), libc::ENOENT);
            crate::cq_ex::end_poll(raw as *mut _);
        }
        assert_eq!(cq.state.lock().consumer, 3);
        // SAFETY: the queue lives.
        assert_eq!(unsafe { req_notify_cq(raw, 0) }, 0);
        assert_eq!(armed(&page).seen, 3);
    }

    /// A device that names a queue pair or an XRC SRQ in a completion queue that is not its own, or
    /// after it has gone from there, has nothing found: who destroys it knows of its own alone.
    #[test]
    fn a_queue_is_found_by_its_own_completion_queues_as_long_as_it_is_theirs() {
        let mut page = Page::new();
        let (table, srqs) = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let [own, foreign] = [(); 2].map(|()| alone(8, page.doorbells(), &table, &srqs));
        let poll = |cq: &Cq, entry: CompletionEntry| {
            let consumer = cq.state.lock().consumer;
            cq.complete(consumer, entry);
            let raw = ptr::from_ref(cq).cast_mut().cast();
            // SAFETY: the queue lives, and there is room for one.
            let found = unsafe { poll_cq(raw, 1, &mut ibv_wc::default()) };
            assert_eq!(cq.state.lock().shown(), consumer + 1);
            found
        };
        let mut qp = testing::rc(&testing::cap(8, 8, 1, 1, 0), page.doorbells());
        assert_eq!(
            table.insert(qp.qpn, &raw mut *qp, own.homes()),
            Ok(Inserted::Yes)
        );
        let mut srq = crate::srq::tests::srq(8, &mut page).unwrap();
        assert_eq!(
            srqs.insert(srq.srqn, &raw mut *srq, own.homes()),
            Ok(Inserted::Yes)
        );
        let of_qp = CompletionEntry {
            qpn: qp.qpn,
            ..CompletionEntry::zeroed()
        };
        // Its queue pair is another process's.
        let of_srq = CompletionEntry {
            qpn: 0x99,
            srqn: srq.srqn,
            flags: ferrite_abi::COMPLETION_RECEIVE | COMPLETION_SRQ,
            ..CompletionEntry::zeroed()
        };
        for entry in [of_qp, of_srq] {
            assert_eq!((poll(&foreign, entry), poll(&own, entry)), (0, 1));
        }
        own.leave(&qp);
        own.leave_xrc_srq(&srq);
        // They are in the tables still, where another thread may be just now.
        for entry in [of_qp, of_srq] {
            assert_eq!((poll(&foreign, entry), poll(&own, entry)), (0, 0));
        }
        table.remove(qp.qpn, &*qp);
        srqs.remove(srq.srqn, &*srq);
        // It would be remembered, and its memory written to.
        drop((qp, srq));
        for entry in [of_qp, of_srq] {
            assert_eq!((poll(&foreign, entry), poll(&own, entry)), (0, 0));
        }
    }

    /// The queue pair that is remembered from the completion before is not found after it has gone, when
    /// its number is another's.
    #[test]
    fn a_number_that_was_given_anew_is_the_new_queue_pairs() {
        let mut page = Page::new();
        let (table, srqs) = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let cq = alone(8, page.doorbells(), &table, &srqs);
        let raw: *mut ibv_cq = ptr::from_ref(&*cq).cast_mut().cast();
        // They stay where they are, so that none has the place of another.
        let mut gone = Vec::new();
        for wr_id in 0..3 {
            let mut qp = testing::rc(&testing::cap(8, 8, 1, 1, 0), page.doorbells());
            assert_eq!(
                table.insert(qp.qpn, &raw mut *qp, cq.homes()),
                Ok(Inserted::Yes)
            );
            let mut entries = [testing::sge(1)];
            let mut wr = testing::wr(IBV_WR_SEND, &mut entries, 0);
            wr.wr_id = wr_id;
            for round in 0..2 {
                assert_eq!(testing::send(&qp, &mut wr), 0);
                let entry = CompletionEntry {
                    qpn: qp.qpn,
                    index: round,
                    ..CompletionEntry::zeroed()
                };
                let consumer = cq.state.lock().consumer;
                cq.complete(consumer, entry);
                let mut wc = ibv_wc::default();
                // SAFETY: the queue lives, and there is room for one.
                assert_eq!(unsafe { poll_cq(raw, 1, &mut wc) }, 1);
                assert_eq!(wc.wr_id, wr_id);
            }
            cq.leave(&qp);
            table.remove(qp.qpn, &*qp);
            gone.push(qp);
        }
    }

    /// Threads poll one queue, plainly and in sessions, arm it, and make and destroy queue pairs of
    /// it, while a device writes: each completion is seen once, by one of them, and nothing waits
    /// for ever.
    #[test]
    fn threads_poll_arm_and_destroy_on_one_queue() {
        const COMPLETIONS: u32 = 20_000;
        let mut page = Page::new();
        let (table, srqs) = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let cq = alone(64, page.doorbells(), &table, &srqs);
        {
            let mut state = cq.state.lock();
            state.consumer = u32::MAX - 5000;
            state.ring.begin_at(state.consumer);
            state.publish();
        }
        let doorbells = page.doorbells();
        let capacity = testing::cap(8, 64, 1, 1, 0);
        let mut lasting = testing::rc(&capacity, doorbells);
        let lasting_qpn = lasting.qpn;
        assert_eq!(
            table.insert(lasting_qpn, &raw mut *lasting, cq.homes()),
            Ok(Inserted::Yes)
        );
        let seen = AtomicU32::new(0);
        let done = || seen.load(Ordering::Acquire) >= COMPLETIONS;
        std::thread::scope(|scope| {
            let (cq, table) = (Shared(&*cq), &table);
            let (seen, done) = (&seen, &done);
            for ex in [false, true, true] {
                scope.spawn(move || {
                    let cq = cq;
                    let raw: *mut ibv_cq = ptr::from_ref(cq.0).cast_mut().cast();
                    while !done() {
                        let mut taken = 0;
                        // SAFETY: the queue lives; the calls are in their order.
                        unsafe {
                            if ex {
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
            let consumer = || cq.state.lock().shown();
            while written < COMPLETIONS {
                while producer.wrapping_sub(consumer()) >= 60 {
                    std::thread::yield_now();
                }
                let qp = passing.get_or_insert_with(|| {
                    let mut qp = testing::rc(&capacity, doorbells);
                    qp.qpn = 0x77;
                    assert_eq!(
                        table.insert(qp.qpn, &raw mut *qp, cq.homes()),
                        Ok(Inserted::Yes)
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
                        cq.leave(&qp);
                        table.remove(qp.qpn, &*qp);
                    }
                }
            }
            if let Some(qp) = passing.take() {
                while !done() {
                    std::thread::yield_now();
                }
                cq.leave(&qp);
                table.remove(qp.qpn, &*qp);
            }
        });
        assert_eq!(seen.into_inner(), COMPLETIONS);
        assert_eq!(cq.session.load(Ordering::Relaxed), 0);
    }
}
