// SPDX-License-Identifier: GPL-2.0

//! Queue pairs of consumers.
//!
//! A queue pair is made with room for as many requests as it may have under way, so that nothing is allocated when one
//! is posted. What a request uses goes into that room and is nobody else's until the request is complete: then its
//! [`User`] gets it back, with how it ended. Dropping a queue pair drains it first.

use super::cq::Room;
use super::request::{rdma_wr, reg_wr, send_wr};
use super::{Chunk, Cq, Pd, Region};
use crate::bindings;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::rdma::ulp::Outcome;
use crate::rdma::{QpType, Remote, WcStatus};
use core::cell::UnsafeCell;
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::types::Opaque;

/// Who uses a queue pair.
pub trait User: Send + Sync + 'static {
    /// What a request is known by.
    type Tag: Send + 'static;

    /// A request is complete. Called where the completion queue is [polled](super::PollContext), one at a time for
    /// each completion queue; from the time that a queue pair is dropped only for what failed.
    fn completed(&self, done: Done<Self::Tag>);
}

/// A request that is complete.
pub struct Done<T> {
    /// What it was known by.
    pub tag: T,
    /// What it used.
    pub memory: RequestMemory,
    /// How it ended.
    pub outcome: Outcome,
}

impl<T> Done<T> {
    /// Whether it succeeded.
    pub fn is_success(&self) -> bool {
        self.outcome.status == WcStatus::Success
    }
}

/// What a request uses.
pub enum RequestMemory {
    /// Memory that it reads or writes.
    Chunk(Chunk),
    /// A region that it registers.
    Registering(Arc<Region>),
    /// A region that it invalidates.
    Invalidating(Arc<Region>),
}

impl RequestMemory {
    /// The chunk, if it is one.
    pub fn into_chunk(self) -> Option<Chunk> {
        match self {
            Self::Chunk(chunk) => Some(chunk),
            _ => None,
        }
    }
}

/// A request that was not posted: all of it comes back.
pub struct Unposted<T> {
    /// Why not.
    pub error: Error,
    /// What it would have been known by.
    pub tag: T,
    /// What it would have used.
    pub memory: RequestMemory,
}

/// What a request does with its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// A message.
    Send,
    /// A message with immediate data.
    SendWithImm(u32),
    /// A write to the peer's memory.
    Write(Remote),
    /// A write to the peer's memory, then immediate data.
    WriteWithImm(Remote, u32),
    /// A read of the peer's memory.
    Read(Remote),
}

/// How queue pairs come to be, and end.
///
/// # Safety
///
/// What `create` returns has to be a queue pair of the domain and the attributes that it is called with, in a state in
/// which receives may be posted and that may be followed by the error state, which nobody else posts to or destroys;
/// `destroy` has to destroy it. Both may sleep.
pub unsafe trait Maker: Send + Sync {
    /// The service of the queue pairs.
    fn qp_type(&self) -> QpType;

    /// Makes a queue pair.
    ///
    /// # Safety
    ///
    /// Domain, completion queues and attributes have to be valid, the former two until the queue pair is destroyed.
    unsafe fn create(
        &self,
        pd: *mut bindings::ib_pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>>;

    /// Destroys it.
    ///
    /// # Safety
    ///
    /// `qp` has to be what `create` has returned, and may not be used any more. What its requests use that are not complete
    /// has to stay until its completion queues are gone.
    unsafe fn destroy(&self, qp: NonNull<bindings::ib_qp>);
}

/// How many requests may be under way.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// Of the send queue.
    pub sends: u32,
    /// Of the receive queue.
    pub recvs: u32,
}

/// A queue pair.
///
/// # Invariants
///
/// `raw` was made by `maker`, and is owned by this value.
pub struct Qp<U: User, M: Maker> {
    raw: NonNull<bindings::ib_qp>,
    maker: M,
    sends: Arc<Queue<U>>,
    recvs: Arc<Queue<U>>,
    lkey: u32,
    pd: Arc<Pd>,
    room: Room,
}

// SAFETY: A queue pair belongs to no task.
unsafe impl<U: User, M: Maker> Send for Qp<U, M> {}
// SAFETY: Drivers have locks for posting; the queues are made to be shared.
unsafe impl<U: User, M: Maker> Sync for Qp<U, M> {}

impl<U: User, M: Maker> Qp<U, M> {
    /// Makes a queue pair; `EBUSY` where `cq` has no room left for its completions. May sleep, as does its end.
    pub fn new(maker: M, pd: &Arc<Pd>, cq: &Arc<Cq>, depth: Depth, user: &Arc<U>) -> Result<Self> {
        if !ptr::eq(cq.lease().raw_device(), pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        // With those that drain it.
        let requests = u64::from(depth.sends) + u64::from(depth.recvs) + 2;
        let room = Room::new(cq, requests)?;
        let sends = Arc::pin_init(Queue::new(depth.sends, user), GFP_KERNEL)?;
        let recvs = Arc::pin_init(Queue::new(depth.recvs, user), GFP_KERNEL)?;
        let mut attr: bindings::ib_qp_init_attr = pin_init::zeroed();
        attr.send_cq = room.cq().as_raw();
        attr.recv_cq = room.cq().as_raw();
        attr.qp_type = maker.qp_type().as_raw();
        attr.sq_sig_type = bindings::ib_sig_type_IB_SIGNAL_ALL_WR;
        // One more of each for draining.
        attr.cap.max_send_wr = depth.sends.saturating_add(1);
        attr.cap.max_recv_wr = depth.recvs.saturating_add(1);
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        // SAFETY: The domain and, by its room, the completion queue are there for as long as this value; the
        // attributes are a local.
        let raw = unsafe { maker.create(pd.as_raw(), &mut attr)? };
        // INVARIANT: Made just now.
        Ok(Self {
            raw,
            maker,
            sends,
            recvs,
            lkey: pd.local_dma_lkey(),
            pd: pd.clone(),
            room,
        })
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: By the type invariant the queue pair is ours; its number does not change.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// How many requests the send queue has room for now.
    pub fn room(&self) -> usize {
        self.sends.free.lock().len()
    }

    /// The entry of a part of a chunk.
    fn sge(&self, chunk: &Chunk, range: &Range<usize>) -> Result<bindings::ib_sge> {
        if !ptr::eq(chunk.device(), self.pd.lease().raw_device())
            || range.start > range.end
            || range.end > chunk.len()
        {
            return Err(EINVAL);
        }
        Ok(bindings::ib_sge {
            addr: chunk.dma() + range.start as u64,
            length: u32::try_from(range.len()).map_err(|_| EINVAL)?,
            lkey: self.lkey,
        })
    }

    /// Posts a receive into all of a chunk. Does not sleep.
    pub fn recv(&self, chunk: Chunk, tag: U::Tag) -> Result<(), Unposted<U::Tag>> {
        let sge = self.sge(&chunk, &(0..chunk.len()));
        self.recvs
            .post(tag, RequestMemory::Chunk(chunk), sge, |cqe, mut sge| {
                let mut wr: bindings::ib_recv_wr = pin_init::zeroed();
                wr.sg_list = &mut sge;
                wr.num_sge = 1;
                // SAFETY: Both views of the union are eight bytes of plain data.
                unsafe { *wr.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
                // SAFETY: By the type invariant the queue pair is ours. The request and its entry are locals, which the
                // driver copies; the slot of `cqe` and what it holds live until the request is complete.
                unsafe { bindings::ib_post_recv(self.raw.as_ptr(), &wr, ptr::null_mut()) }
            })
    }

    /// Posts a request of the send queue. Does not sleep.
    ///
    /// # Safety
    ///
    /// `wr` has to begin with an `ib_send_wr` and be what its opcode says; what it refers to besides memory of `sge`
    /// has to be part of `memory`.
    unsafe fn send<T>(
        &self,
        tag: U::Tag,
        memory: RequestMemory,
        sge: Result<Option<bindings::ib_sge>>,
        mut wr: T,
    ) -> Result<(), Unposted<U::Tag>> {
        let raw: *mut bindings::ib_send_wr = ptr::from_mut(&mut wr).cast();
        self.sends.post(tag, memory, sge, |cqe, mut sge| {
            // SAFETY: The caller vouches for the beginning of the request, which is a local; all views of the union
            // are plain data.
            unsafe {
                *(*raw).__bindgen_anon_1.wr_cqe.as_mut() = cqe;
                (*raw).num_sge = c_int::from(sge.is_some());
                (*raw).sg_list = sge.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
            }
            // SAFETY: By the type invariant the queue pair is ours. The caller vouches for the request; it and its
            // entry are locals, which the driver copies; the slot of `cqe` and what it holds, the memory of the entry
            // among it, live until the request is complete.
            unsafe { bindings::ib_post_send(self.raw.as_ptr(), raw, ptr::null_mut()) }
        })
    }

    /// Posts a transfer between `range` of a chunk and the peer. Does not sleep.
    pub fn transfer(
        &self,
        transfer: Transfer,
        chunk: Chunk,
        range: Range<usize>,
        tag: U::Tag,
    ) -> Result<(), Unposted<U::Tag>> {
        use bindings as b;

        let sge = self.sge(&chunk, &range).map(Some);
        let memory = RequestMemory::Chunk(chunk);
        let wr = match transfer {
            Transfer::Send | Transfer::SendWithImm(_) => {
                let wr = match transfer {
                    Transfer::SendWithImm(imm) => {
                        send_wr(b::ib_wr_opcode_IB_WR_SEND_WITH_IMM, imm.to_be())
                    }
                    _ => send_wr(b::ib_wr_opcode_IB_WR_SEND, 0),
                };
                // SAFETY: These opcodes are of an `ib_send_wr`, which refers to nothing else.
                return unsafe { self.send(tag, memory, sge, wr) };
            }
            Transfer::Write(remote) => rdma_wr(b::ib_wr_opcode_IB_WR_RDMA_WRITE, remote, 0),
            Transfer::WriteWithImm(remote, imm) => rdma_wr(
                b::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
                remote,
                imm.to_be(),
            ),
            Transfer::Read(remote) => rdma_wr(b::ib_wr_opcode_IB_WR_RDMA_READ, remote, 0),
        };
        // SAFETY: These opcodes are of an `ib_rdma_wr`, which begins with an `ib_send_wr` and refers to memory of the
        // peer besides.
        unsafe { self.send(tag, memory, sge, wr) }
    }

    /// Posts the registration of a region, under another key than the last one. What is posted after it may tell the
    /// peer; it is registered when it is complete. `EBUSY` where it is registered already, `EINVAL` if it is of another
    /// domain. Does not sleep.
    pub fn register(&self, region: &Arc<Region>, tag: U::Tag) -> Result<(), Unposted<U::Tag>> {
        let memory = RequestMemory::Registering(region.clone());
        let begun = match Arc::ptr_eq(region.pd(), &self.pd) {
            true => region.begin_registering(),
            false => Err(EINVAL),
        };
        if let Err(error) = begun {
            return Err(Unposted { error, tag, memory });
        }
        let opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let wr = reg_wr(opcode, 0, region.as_raw(), region.rkey(), region.access());
        // SAFETY: This opcode is of an `ib_reg_wr`, which begins with an `ib_send_wr` and refers to the region besides,
        // of which `memory` has a reference.
        let posted = unsafe { self.send(tag, memory, Ok(None), wr) };
        if posted.is_err() {
            region.take_back(true);
        }
        posted
    }

    /// Posts the invalidation of a region: when it is complete the peer cannot use it any more. `EBUSY` where it is not
    /// registered, `EINVAL` if it is of another domain. Does not sleep.
    pub fn invalidate(&self, region: &Arc<Region>, tag: U::Tag) -> Result<(), Unposted<U::Tag>> {
        let memory = RequestMemory::Invalidating(region.clone());
        let begun = match Arc::ptr_eq(region.pd(), &self.pd) {
            true => region.begin_invalidating(),
            false => Err(EINVAL),
        };
        if let Err(error) = begun {
            return Err(Unposted { error, tag, memory });
        }
        let wr = send_wr(bindings::ib_wr_opcode_IB_WR_LOCAL_INV, region.rkey());
        // SAFETY: This opcode is of an `ib_send_wr`; the key is of the region, of which `memory` has a reference.
        let posted = unsafe { self.send(tag, memory, Ok(None), wr) };
        if posted.is_err() {
            region.take_back(false);
        }
        posted
    }
}

impl<U: User, M: Maker> Drop for Qp<U, M> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the queue pair is ours, and in a state that draining starts from, as its maker
        // vouches; both queues have room for the request that drains them, and so has the completion queue. Nobody posts,
        // since nobody else has a reference to this.
        unsafe { bindings::ib_drain_qp(self.raw.as_ptr()) };
        // A device that fails may have refused to be drained, which nobody is told.
        for queue in [&self.sends, &self.recvs] {
            if queue.is_used() {
                self.room.bury(queue.clone());
            }
        }
        // SAFETY: By the type invariant the queue pair is the maker's, and destroyed here and nowhere else. All requests are
        // complete, or what they use was buried just now.
        unsafe { self.maker.destroy(self.raw) };
    }
}

/// What is in a slot while a request is under way.
struct Held<T> {
    tag: T,
    memory: RequestMemory,
}

/// Room for one request.
#[repr(C)]
struct Slot<U: User> {
    // First, because the core hands this part back.
    cqe: Opaque<bindings::ib_cqe>,
    index: u32,
    /// The queue that it is part of.
    queue: NonNull<Queue<U>>,
    held: UnsafeCell<Option<Held<U::Tag>>>,
}

/// Room for the requests of one queue of a queue pair: no more are posted to it, so that it has room for the one that
/// drains it.
///
/// # Invariants
///
/// A slot whose index is in `free` holds nothing, and no request refers to it. One whose index is not there belongs to
/// who has taken it, then to its request, then to who completes that. `slots` does not change.
#[pin_data]
struct Queue<U: User> {
    user: Arc<U>,
    slots: KVec<Slot<U>>,
    #[pin]
    free: IrqSpinLock<KVec<u32>>,
}

// SAFETY: Slots belong to no task; what they hold can be sent.
unsafe impl<U: User> Send for Queue<U> {}
// SAFETY: What a slot holds is reached only by whose turn it is, by the type invariant, which the lock of `free` and
// the device order.
unsafe impl<U: User> Sync for Queue<U> {}

impl<U: User> Queue<U> {
    fn new(count: u32, user: &Arc<U>) -> impl PinInit<Self, Error> {
        let user = user.clone();
        // INVARIANT: All slots are free.
        try_pin_init!(&this in Self {
            user,
            slots: Self::slots(count, this)?,
            free <- new_irq_spinlock!(Self::indices(count)?, "rdma_consumer_slots"),
        }? Error)
    }

    /// Whether a request is still under way, when nobody posts any more: then the queue and all that its requests use have
    /// to stay until the completion queue goes, since its completion may be polled at any time. The device does nothing any
    /// more once the queue pair is destroyed.
    fn is_used(&self) -> bool {
        // Whoever has taken a slot and not yet given it back is a poll that runs just now, or a request.
        self.free.lock().len() != self.slots.len()
    }

    fn slots(count: u32, queue: NonNull<Self>) -> Result<KVec<Slot<U>>> {
        let mut slots = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for index in 0..count {
            let mut cqe: bindings::ib_cqe = pin_init::zeroed();
            cqe.done = Some(Self::complete);
            let slot = Slot {
                cqe: Opaque::new(cqe),
                index,
                queue,
                held: UnsafeCell::new(None),
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        Ok(slots)
    }

    fn indices(count: u32) -> Result<KVec<u32>> {
        let mut indices = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for index in 0..count {
            indices.push(index, GFP_KERNEL)?;
        }
        Ok(indices)
    }

    /// Takes what a slot holds, and frees it.
    ///
    /// # Safety
    ///
    /// The slot has to be the caller's: its request is complete, or was not posted.
    unsafe fn vacate(&self, slot: &Slot<U>) -> Option<Held<U::Tag>> {
        // SAFETY: The caller vouches that the slot is its own.
        let held = unsafe { (*slot.held.get()).take() };
        // There is room for all of them.
        let _ = self.free.lock().push_within_capacity(slot.index);
        held
    }

    /// Has a request posted with a slot. `EBUSY` where there is none.
    fn post<S>(
        &self,
        tag: U::Tag,
        memory: RequestMemory,
        sge: Result<S>,
        post: impl FnOnce(*mut bindings::ib_cqe, S) -> c_int,
    ) -> Result<(), Unposted<U::Tag>> {
        let sge = match sge {
            Ok(sge) => sge,
            Err(error) => return Err(Unposted { error, tag, memory }),
        };
        let index = self.free.lock().pop();
        let Some(slot) = index.and_then(|index| self.slots.get(index as usize)) else {
            let error = EBUSY;
            return Err(Unposted { error, tag, memory });
        };
        // SAFETY: The index was taken by us, so that the slot is ours.
        unsafe { *slot.held.get() = Some(Held { tag, memory }) };
        let Err(error) = to_result(post(slot.cqe.get(), sge)) else {
            return Ok(());
        };
        // SAFETY: The request was not posted, so that the slot is still ours.
        match unsafe { self.vacate(slot) } {
            Some(Held { tag, memory }) => Err(Unposted { error, tag, memory }),
            // It was put there above.
            None => Ok(()),
        }
    }

    /// # Safety
    ///
    /// To be called by the core with a completion of a request that was posted with a slot of such a queue.
    unsafe extern "C" fn complete(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: The caller vouches for the completion, which is its own until this returns.
        let wc = unsafe { &*wc };
        // SAFETY: Both views of the union are eight bytes of plain data, and this one was posted.
        let cqe = unsafe { *wc.__bindgen_anon_1.wr_cqe.as_ref() };
        // SAFETY: The caller vouches for a request that was posted with a slot, which begins with what the core hands
        // back; while its index is not in `free` the queue is there, either since the queue pair is, or in the graveyard
        // of the completion queue, which is there for as long as that is polled.
        let slot = unsafe { &*cqe.cast::<Slot<U>>() };
        // SAFETY: The queue owns the slot, and is pinned.
        let queue = unsafe { slot.queue.as_ref() };
        let outcome = Outcome::of(wc);
        // Taken before the slot is free: from then on nobody keeps the queue for it.
        let user = queue.user.clone();
        // SAFETY: The request is complete, so that its slot is ours.
        if let Some(Held { tag, memory }) = unsafe { queue.vacate(slot) } {
            Self::finish(&user, tag, memory, outcome);
        }
    }

    /// A request is complete, and its slot is free.
    fn finish(user: &U, tag: U::Tag, memory: RequestMemory, outcome: Outcome) {
        let is_success = outcome.status == WcStatus::Success;
        match &memory {
            RequestMemory::Chunk(_) => {}
            RequestMemory::Registering(region) => region.end(true, is_success),
            RequestMemory::Invalidating(region) => region.end(false, is_success),
        }
        user.completed(Done {
            tag,
            memory,
            outcome,
        });
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_consumer_qp)]
mod tests {
    use super::*;
    use crate::rdma::consumer::cq::{Grave, Graveyard};
    use crate::rdma::consumer::{Buffer, Landlord};
    use crate::rdma::WcOpcode;
    use kernel::sync::atomic::{Atomic, Relaxed};

    struct Sum(Atomic<u32>);

    impl User for Sum {
        type Tag = u32;

        fn completed(&self, done: Done<u32>) {
            let factor = if done.is_success() { 1 } else { 1000 };
            self.0.fetch_add(done.tag * factor, Relaxed);
            assert_eq!(done.memory.into_chunk().map(|chunk| chunk.len()), Some(8));
        }
    }

    /// What the core says of a request.
    fn report(cqe: *mut bindings::ib_cqe, status: WcStatus) {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        wc.status = status.as_raw();
        wc.opcode = WcOpcode::Send.as_raw();
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wc.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
        // SAFETY: As the core does; the tests hand in what `post` was called with.
        unsafe { Queue::<Sum>::complete(ptr::null_mut(), &mut wc) };
    }

    #[test]
    fn a_request_gives_back_what_it_has_when_it_is_complete() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(ptr::null_mut(), c"kunit_qp")? };
        let mut chunks = Buffer::for_tests(&landlord, 24)?.cut(8)?;
        let user = Arc::new(Sum(Atomic::new(0)), GFP_KERNEL)?;
        let queue = Arc::pin_init(Queue::new(2, &user), GFP_KERNEL)?;
        let mut cqes = [ptr::null_mut(); 2];
        for (tag, at) in [(1, 0), (10, 1)] {
            let chunk = chunks.pop().ok_or(EINVAL)?;
            let posted = queue.post(tag, RequestMemory::Chunk(chunk), Ok(()), |cqe, ()| {
                cqes[at] = cqe;
                0
            });
            assert!(posted.is_ok());
        }
        // No more than it was made for.
        let chunk = chunks.pop().ok_or(EINVAL)?;
        let refused = queue.post(3, RequestMemory::Chunk(chunk), Ok(()), |_, ()| 0);
        let Err(Unposted { error, tag, memory }) = refused else {
            return Err(EINVAL);
        };
        assert_eq!((error, tag), (EBUSY, 3));
        report(cqes[1], WcStatus::Success);
        assert_eq!(user.0.load(Relaxed), 10);
        // What the driver refuses comes back, and its slot is free again.
        let refused = queue.post(4, memory, Ok(()), |cqe, ()| {
            assert_eq!(cqe, cqes[1]);
            ENOMEM.to_errno()
        });
        let Err(Unposted { error, tag, memory }) = refused else {
            return Err(EINVAL);
        };
        assert_eq!((error, tag), (ENOMEM, 4));
        let posted = queue.post(5, memory, Ok(()), |cqe, ()| {
            assert_eq!(cqe, cqes[1]);
            0
        });
        assert!(posted.is_ok());
        report(cqes[0], WcStatus::WorkRequestFlushed);
        report(cqes[1], WcStatus::Success);
        assert_eq!(user.0.load(Relaxed), 10 + 1000 + 5);
        drop(queue);
        drop(chunks);
        drop(landlord);
        Ok(())
    }

    #[test]
    fn what_is_under_way_when_a_queue_goes_is_dropped_with_it() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(ptr::null_mut(), c"kunit_qp")? };
        let mut chunks = Buffer::for_tests(&landlord, 8)?.cut(8)?;
        let user = Arc::new(Sum(Atomic::new(0)), GFP_KERNEL)?;
        let queue = Arc::pin_init(Queue::new(1, &user), GFP_KERNEL)?;
        let chunk = chunks.pop().ok_or(EINVAL)?;
        assert!(queue
            .post(1, RequestMemory::Chunk(chunk), Ok(()), |_, ()| 0)
            .is_ok());
        drop(queue);
        drop(chunks);
        // Waits for the memory, which would stay otherwise.
        drop(landlord);
        assert_eq!(user.0.load(Relaxed), 0);
        Ok(())
    }

    #[test]
    fn what_was_not_drained_stays_until_nobody_polls() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(ptr::null_mut(), c"kunit_qp")? };
        let mut chunks = Buffer::for_tests(&landlord, 16)?.cut(8)?;
        let user = Arc::new(Sum(Atomic::new(0)), GFP_KERNEL)?;
        let graveyard = KBox::pin_init(Graveyard::new(), GFP_KERNEL)?;
        let mut late = ptr::null_mut();
        for is_late in [false, true] {
            let queue = Arc::pin_init(Queue::new(1, &user), GFP_KERNEL)?;
            let chunk = chunks.pop().ok_or(EINVAL)?;
            let posted = queue.post(1, RequestMemory::Chunk(chunk), Ok(()), |cqe, ()| {
                late = cqe;
                0
            });
            assert!(posted.is_ok());
            if !is_late {
                report(late, WcStatus::Success);
            }
            // As the queue pair does when it goes.
            if queue.is_used() {
                graveyard.bury(queue, Grave::new()?);
            }
            assert_eq!(graveyard.len(), usize::from(is_late));
        }
        assert_eq!(user.0.load(Relaxed), 1);
        report(late, WcStatus::WorkRequestFlushed);
        assert_eq!(user.0.load(Relaxed), 1 + 1000);
        drop(graveyard);
        drop(chunks);
        // Waits for the memory, which would stay otherwise.
        drop(landlord);
        assert!(Arc::into_unique_or_drop(user).is_some());
        Ok(())
    }
}
