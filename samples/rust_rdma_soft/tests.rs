// SPDX-License-Identifier: GPL-2.0

//! Tests of the device by a kernel user: what consumers may do to it that `rdma::ulp` does not let them.
//! What every device does is tested by the other sample (`rust_rdma_loop`).

use crate::bindings;
use crate::kernel_ext::completion::Completion;
use crate::kernel_ext::workqueue::OwnedQueue;
use crate::rdma::ulp::{
    Buffer, Client, Cq, Lease, LocalMemory, Mr, Op, Outcome, Pd, Peer, PollContext, Qp, QpLimits,
    Registration, Remote, Ticket,
};
use crate::rdma::{Access, QpState, WcStatus};
use core::ptr;
use kernel::error::{from_err_ptr, to_result};
use kernel::page::PAGE_SIZE;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::Arc;
use kernel::time::delay::fsleep;
use kernel::time::{msecs_to_jiffies, Delta, Jiffies};
use kernel::types::Opaque;
use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

const PORT: u32 = 1;
const BUFFER: usize = 2 * PAGE_SIZE;
const SENDS: u32 = 4;
/// Completions of a queue pair, with those that drain it: a completion queue has room for no more.
const ENTRIES: u32 = 2 * SENDS + 2;

/// Long enough for a machine that emulates everything.
fn patience() -> Jiffies {
    msecs_to_jiffies(10_000)
}

/// Looks again and again whether something is so.
fn until(mut is_so: impl FnMut() -> Result<bool>) -> Result {
    for _ in 0..1000 {
        if is_so()? {
            return Ok(());
        }
        fsleep(Delta::from_millis(10));
    }
    Err(ETIMEDOUT)
}

/// Fails a test, and says by what.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            pr_err!("not so: {}\n", stringify!($condition));
            return Err(EIO);
        }
    };
}

/// A test with the device.
trait Test: 'static {
    fn run(lease: &Lease) -> Result;
}

/// How the last one ended: 0, or an error.
static ENDED: Atomic<i32> = Atomic::new(0);

/// A test as a client of the core.
struct User<T>(core::marker::PhantomData<T>);

impl<T: Test> Client for User<T> {
    const NAME: &'static CStr = c"rust_rdma_soft_tests";

    fn add(lease: &Lease) -> Result {
        let name = lease.device().name();
        let name: &CStr = &name;
        if !name.to_bytes().starts_with(b"rust_soft") {
            return Err(ENODEV);
        }
        let ended = T::run(lease).map_or_else(|err| err.to_errno(), |()| 0);
        ENDED.store(ended, Relaxed);
        Ok(())
    }
}

/// Runs a test with the device, which is registered before the module's tests run.
fn with_device<T: Test>() -> Result {
    ENDED.store(ENODEV.to_errno(), Relaxed);
    // All of the test is in here.
    drop(KBox::pin_init(Registration::<User<T>>::new(), GFP_KERNEL)?);
    to_result(ENDED.load(Relaxed))
}

/// Two queue pairs that are connected, with completion queues of their own, and memory.
struct Pair {
    near: Qp,
    far: Qp,
    buffer: Arc<Buffer>,
    lease: Lease,
    pd: Arc<Pd>,
}

impl Pair {
    fn new(lease: &Lease, pd: &Arc<Pd>, cqs: &[Arc<Cq>; 2]) -> Result<Self> {
        let limits = QpLimits {
            sends: SENDS,
            recvs: SENDS,
        };
        let pair = Self {
            near: Qp::new(pd, &cqs[0], limits)?,
            far: Qp::new(pd, &cqs[1], limits)?,
            buffer: Buffer::new(lease, BUFFER)?,
            lease: lease.clone(),
            pd: pd.clone(),
        };
        let device = lease.device();
        // The interface has its addresses only a moment after it is there.
        until(|| Ok(device.roce_v2_gid(PORT).is_ok()))?;
        let (sgid_index, gid, mac) = device.roce_v2_gid(PORT)?;
        let mtu = device.port(PORT)?.active_mtu;
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        for (qp, peer) in [(&pair.near, &pair.far), (&pair.far, &pair.near)] {
            let peer = Peer {
                qp_num: peer.number(),
                gid,
                mac,
                port: PORT,
                sgid_index,
                mtu,
            };
            qp.connect(&peer, all)?;
        }
        Ok(pair)
    }

    /// Memory of the one side and of the other.
    fn memory(&self, far: bool) -> LocalMemory<'_> {
        let at = usize::from(far) * PAGE_SIZE;
        LocalMemory::Buffer(&self.buffer, at..at + 64)
    }

    fn recv<'q>(&'q self, qp: &'q Qp) -> Result<Ticket<'q>> {
        qp.recv(&self.buffer, PAGE_SIZE + 64..PAGE_SIZE + 128)
    }

    /// A region that `qp` has registered, and whose pages are gone since.
    fn hollow(&self, qp: &Qp) -> Result<Arc<Mr>> {
        let mr = Mr::new(&self.pd, Buffer::new(&self.lease, BUFFER)?)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let registered = qp.send(Op::reg_mr(&mr, access), LocalMemory::None)?;
        ended(registered, WcStatus::Success)?;
        let mut list: bindings::scatterlist = pin_init::zeroed();
        // SAFETY: `mr` is a region that is not freed, and mapped by nobody else. The list is a local, of which
        // no entry is looked at, as there are none; the offset is none.
        let mapped = unsafe {
            let size = PAGE_SIZE as u32;
            bindings::ib_map_mr_sg(mr.as_raw(), &mut list, 0, ptr::null_mut(), size)
        };
        check!(mapped <= 0);
        Ok(mr)
    }
}

/// Waits for a request, which has to end so.
fn ended(ticket: Ticket<'_>, status: WcStatus) -> Result<Outcome> {
    let outcome = ticket.wait(patience())?;
    if outcome.status != status {
        pr_err!("{outcome:?} instead of {status:?}\n");
        return Err(EIO);
    }
    Ok(outcome)
}

fn with_pair(lease: &Lease, test: impl FnOnce(&Pair) -> Result) -> Result {
    let pd = Pd::new(lease)?;
    let cqs = [
        Cq::new(lease, ENTRIES, PollContext::WorkQueue)?,
        Cq::new(lease, ENTRIES, PollContext::WorkQueue)?,
    ];
    let pair = Pair::new(lease, &pd, &cqs)?;
    test(&pair)
}

/// Who is told of requests that were posted past `rdma::ulp`. It has to stay until they are complete.
#[repr(C)]
#[pin_data]
struct Watch {
    // First, because the core hands this part back.
    cqe: Opaque<bindings::ib_cqe>,
    /// How the last one ended.
    status: Atomic<u32>,
    /// Signalled for each.
    #[pin]
    ended: Completion,
    /// Waited for by whoever tells of one.
    #[pin]
    go_on: Completion,
}

// SAFETY: Nobody writes `cqe` after it was made; all else may be used by any task.
unsafe impl Send for Watch {}
// SAFETY: Nobody writes `cqe` after it was made; all else may be used by many at once.
unsafe impl Sync for Watch {}

impl Watch {
    fn new() -> Result<Pin<KBox<Self>>> {
        let mut cqe: bindings::ib_cqe = pin_init::zeroed();
        cqe.done = Some(Self::done);
        let init = pin_init!(Self {
            cqe: Opaque::new(cqe),
            status: Atomic::new(0),
            ended <- Completion::new(),
            go_on <- Completion::new(),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// # Safety
    ///
    /// To be called by the core with a completion of a request that was posted with a `Watch`.
    unsafe extern "C" fn done(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: The caller vouches for the completion, which is its own until this returns.
        let wc = unsafe { &*wc };
        // SAFETY: Both views of the union are eight bytes of plain data, and this one was posted.
        let cqe = unsafe { *wc.__bindgen_anon_1.wr_cqe.as_ref() };
        // SAFETY: The caller vouches for what was posted: a watch, which begins with what the core hands back,
        // and which stays until the request is complete, of which this is told.
        let this = unsafe { &*cqe.cast::<Self>() };
        this.status.store(wc.status, Release);
        this.ended.complete();
        this.go_on.wait();
    }

    /// Posts a request, of which only the kind and what it needs are to be set.
    fn post(&self, qp: &Qp, wr: &mut bindings::ib_send_wr) -> Result {
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wr.__bindgen_anon_1.wr_cqe.as_mut() = self.cqe.get() };
        // SAFETY: The queue pair is borrowed. The request is one, a local of the caller as its entries are, of
        // the form that its kind has; the driver copies it. The tests drop the queue pair, which drains it, and
        // then the watch.
        to_result(unsafe { bindings::ib_post_send(qp.as_raw(), wr, ptr::null_mut()) })
    }

    /// Waits for one to be complete, and tells how it ended.
    fn wait(&self) -> Result<WcStatus> {
        if !self.ended.wait_timeout(patience()) {
            return Err(ETIMEDOUT);
        }
        WcStatus::from_raw(self.status.load(Acquire)).ok_or(EIO)
    }
}

/// A queue pair whose sends are drained (SQD) receives, and takes what it is to send later.
struct Suspended;

impl Test for Suspended {
    fn run(lease: &Lease) -> Result {
        with_pair(lease, |pair| {
            let (near, far) = (&pair.near, &pair.far);
            near.suspend()?;
            check!(near.state()? == QpState::Sqd);
            let received = pair.recv(near)?;
            ended(far.send(Op::Send, pair.memory(true))?, WcStatus::Success)?;
            ended(received, WcStatus::Success)?;
            let late = pair.recv(far)?;
            let sent = near.send(Op::Send, pair.memory(false))?;
            // The engine has long looked at it when another one has gone all the way.
            let other = pair.recv(near)?;
            ended(far.send(Op::Send, pair.memory(true))?, WcStatus::Success)?;
            ended(other, WcStatus::Success)?;
            check!(!late.is_complete());
            near.resume()?;
            ended(sent, WcStatus::Success)?;
            ended(late, WcStatus::Success)?;
            Ok(())
        })
    }
}

/// Ends a region.
#[pin_data]
struct Dereg {
    mr: ptr::NonNull<bindings::ib_mr>,
    #[pin]
    done: Completion,
    #[pin]
    work: Work<Self>,
}

// SAFETY: A region may be ended by any task.
unsafe impl Send for Dereg {}
// SAFETY: Only the work item uses the region, which runs once.
unsafe impl Sync for Dereg {}

impl_has_work! {
    impl HasWork<Self> for Dereg { self.work }
}

impl WorkItem for Dereg {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: The test made the region and leaves it to this, which is queued once.
        unsafe { bindings::ib_dereg_mr_user(this.mr.as_ptr(), ptr::null_mut()) };
        this.done.complete();
    }
}

/// A region may end before its registration, which waits behind a message, is done; as regions of the core do
/// (`rdma_rw_cleanup_mrs`). The registration is not that of another one, either.
struct Ended;

impl Test for Ended {
    fn run(lease: &Lease) -> Result {
        let watch = Watch::new()?;
        watch.go_on.complete_all();
        with_pair(lease, |pair| {
            let (near, far) = (&pair.near, &pair.far);
            // SAFETY: The domain is borrowed.
            let mr = from_err_ptr(unsafe {
                let kind = bindings::ib_mr_type_IB_MR_TYPE_MEM_REG;
                bindings::ib_alloc_mr(pair.pd.as_raw(), kind, 1)
            })?;
            let dereg = pin_init!(Dereg {
                mr: ptr::NonNull::new(mr).ok_or(ENOMEM)?,
                done <- Completion::new(),
                work <- new_work!("rust_rdma_soft::Dereg"),
            }? Error);
            let dereg = Arc::pin_init(dereg, GFP_KERNEL)?;
            // SAFETY: The region was made just now; its key does not change.
            let key = unsafe { (*mr).rkey };
            let sent = near.send(Op::Send, pair.memory(false))?;
            let mut wr: bindings::ib_reg_wr = pin_init::zeroed();
            wr.wr.opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
            (wr.mr, wr.key) = (mr, key);
            wr.access = Access::LOCAL_WRITE.as_raw() as c_int;
            let posted = watch.post(near, &mut wr.wr);
            let queue = OwnedQueue::unbound(c"rust_rdma_soft_tests")?;
            check!(queue.enqueue(dereg.clone()).is_ok());
            let in_time = dereg.done.wait_timeout(patience());
            // It has the same place now.
            let other = Mr::new(&pair.pd, pair.buffer.clone())?;
            let same = other.rkey() >> 8 == key >> 8;
            // Now it can be done, also if it was waited for.
            let received = pair.recv(far)?;
            ended(sent, WcStatus::Success)?;
            ended(received, WcStatus::Success)?;
            posted?;
            let status = watch.wait()?;
            drop(queue);
            check!(in_time && same);
            check!(status == WcStatus::LocalProtection);
            check!(near.state()? == QpState::Err);
            Ok(())
        })
    }
}

/// More bytes than a message may have.
struct TooLong;

impl Test for TooLong {
    fn run(lease: &Lease) -> Result {
        let watch = Watch::new()?;
        watch.go_on.complete_all();
        with_pair(lease, |pair| {
            let mut sges: [bindings::ib_sge; 2] = pin_init::zeroed();
            for sge in &mut sges {
                // Nobody looks there: it does not come that far.
                (sge.addr, sge.length) = (PAGE_SIZE as u64, (1 << 30) + 1);
                sge.lkey = pair.pd.local_dma_lkey();
            }
            let mut wr: bindings::ib_send_wr = pin_init::zeroed();
            wr.opcode = bindings::ib_wr_opcode_IB_WR_SEND;
            (wr.sg_list, wr.num_sge) = (sges.as_mut_ptr(), 2);
            watch.post(&pair.near, &mut wr)?;
            check!(watch.wait()? == WcStatus::LocalLength);
            check!(pair.near.state()? == QpState::Err);
            Ok(())
        })
    }
}

/// A consumer that takes fewer completions than it posts requests hears of its queue pair's error, and one that
/// takes them later gets those that there was room for.
struct Overrun;

impl Test for Overrun {
    fn run(lease: &Lease) -> Result {
        let watch = Watch::new()?;
        with_pair(lease, |pair| {
            let near = &pair.near;
            let write = || {
                let mut wr: bindings::ib_rdma_wr = pin_init::zeroed();
                wr.wr.opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
                watch.post(near, &mut wr.wr)
            };
            write()?;
            // From now on nobody takes completions.
            let taken = watch.wait();
            let failed = until(|| {
                // There may be no room in the send queue for the moment.
                let _ = write();
                Ok(near.state()? == QpState::Err)
            });
            watch.go_on.complete_all();
            check!(taken? == WcStatus::Success);
            failed?;
            for _ in 0..ENTRIES {
                watch.wait()?;
            }
            Ok(())
        })
    }
}

/// A region of the peer's whose pages are gone fails the peer, too; one of the sender's does not.
struct Hollow;

impl Test for Hollow {
    fn run(lease: &Lease) -> Result {
        with_pair(lease, |pair| {
            let (near, far) = (&pair.near, &pair.far);
            let mr = pair.hollow(far)?;
            let there = Remote {
                addr: mr.iova(),
                rkey: mr.rkey(),
            };
            let wrote = near.send(Op::RdmaWrite(there), pair.memory(false))?;
            ended(wrote, WcStatus::RemoteOperation)?;
            check!(near.state()? == QpState::Err && far.state()? == QpState::Err);
            Ok(())
        })?;
        with_pair(lease, |pair| {
            let (near, far) = (&pair.near, &pair.far);
            let mr = pair.hollow(near)?;
            let received = pair.recv(far)?;
            let sent = near.send(Op::Send, LocalMemory::Region(&mr, 0..64))?;
            ended(sent, WcStatus::LocalProtection)?;
            check!(near.state()? == QpState::Err && far.state()? == QpState::Rts);
            check!(!received.is_complete());
            Ok(())
        })
    }
}

/// The number of a queue pair that is gone is the next one's, which is connected with nobody for that.
struct Abandoned;

impl Test for Abandoned {
    fn run(lease: &Lease) -> Result {
        let pd = Pd::new(lease)?;
        let cqs = [
            Cq::new(lease, ENTRIES, PollContext::WorkQueue)?,
            Cq::new(lease, ENTRIES, PollContext::WorkQueue)?,
        ];
        let Pair {
            near, far, buffer, ..
        } = Pair::new(lease, &pd, &cqs)?;
        let received = near.recv(&buffer, 0..64)?;
        let number = far.number();
        drop(far);
        // As over a wire nobody tells it.
        check!(near.state()? == QpState::Rts);
        let limits = QpLimits {
            sends: SENDS,
            recvs: SENDS,
        };
        let other = Qp::new(&pd, &cqs[1], limits)?;
        check!(other.number() == number);
        let sent = near.send(Op::Send, LocalMemory::Buffer(&buffer, 0..64))?;
        ended(sent, WcStatus::RetryExceeded)?;
        ended(received, WcStatus::WorkRequestFlushed)?;
        check!(near.state()? == QpState::Err);
        Ok(())
    }
}

#[kunit_tests(rust_rdma_soft_device)]
mod device {
    use super::*;

    #[test]
    fn who_is_left_alone_is_not_found_by_another_of_that_number() -> Result {
        with_device::<Abandoned>()
    }

    #[test]
    fn a_queue_pair_whose_sends_are_drained_receives() -> Result {
        with_device::<Suspended>()
    }

    #[test]
    fn a_region_may_end_before_its_registration_is_done() -> Result {
        with_device::<Ended>()
    }

    #[test]
    fn a_message_that_is_too_long_is_refused() -> Result {
        with_device::<TooLong>()
    }

    #[test]
    fn who_posts_more_than_there_is_room_for_completions_hears_of_it() -> Result {
        with_device::<Overrun>()
    }

    #[test]
    fn memory_that_is_gone_fails_whose_it_was() -> Result {
        with_device::<Hollow>()
    }
}
