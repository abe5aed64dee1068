// SPDX-License-Identifier: GPL-2.0

//! Completion queues of consumers.

use super::Lease;
use crate::bindings;
use crate::ibdev_err;
use core::ptr::{self, NonNull};
use kernel::error::from_err_ptr;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::{new_mutex, Arc, Mutex};

/// Where completions are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollContext {
    /// In a soft interrupt: handlers do not sleep.
    SoftIrq,
    /// In a work queue of the core: handlers may sleep, but others wait for them.
    WorkQueue,
}

/// A completion queue, which the core polls: each request has a handler of its own, see [`Qp`](super::Qp).
///
/// # Invariants
///
/// `raw` is owned by this value, and of the device of `lease`.
pub struct Cq {
    raw: NonNull<bindings::ib_cq>,
    /// Entries that no queue pair has taken.
    left: Atomic<u32>,
    // After the queue, which is freed by `drop`, before the fields are: what is in it may still be polled.
    graveyard: Pin<KBox<Graveyard>>,
    // After the queue, which is freed by `drop`, before the fields are.
    lease: Lease,
}

// SAFETY: `ib_free_cq` may be called by any task.
unsafe impl Send for Cq {}
// SAFETY: What is read of a queue does not change; `left` and `graveyard` are made to be shared.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes a completion queue, of which each queue pair takes as many entries as it may post requests, and two. The
    /// core chooses the vector. May sleep, as does its end.
    pub fn new(lease: &Lease, entries: u32, context: PollContext) -> Result<Arc<Self>> {
        let left = Atomic::new(entries);
        let entries = c_int::try_from(entries)
            .ok()
            .filter(|&entries| entries != 0)
            .ok_or(EINVAL)?;
        let context = match context {
            PollContext::SoftIrq => bindings::ib_poll_context_IB_POLL_SOFTIRQ,
            PollContext::WorkQueue => bindings::ib_poll_context_IB_POLL_WORKQUEUE,
        };
        let graveyard = KBox::pin_init(Graveyard::new(), GFP_KERNEL)?;
        // SAFETY: The device is registered for as long as there is a lease, which this has; the name is static.
        let raw = from_err_ptr(unsafe {
            bindings::__ib_alloc_cq_any(
                lease.raw_device(),
                ptr::null_mut(),
                entries,
                context,
                lease.client().as_char_ptr(),
            )
        })?;
        // INVARIANT: Made just now.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            left,
            graveyard,
            lease: lease.clone(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// The core's queue, which is there for as long as this is.
    pub(in crate::rdma) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.raw.as_ptr()
    }

    /// The lease of its device.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }
}

/// What completions of a queue refer to whose queue pair is gone, without having been drained: a device that fails may refuse
/// even that. It stays until nobody polls the queue.
#[pin_data(PinnedDrop)]
pub(in crate::rdma) struct Graveyard {
    #[pin]
    first: Mutex<Option<KBox<Grave>>>,
}

/// A place in a [`Graveyard`], which is made long before: at the end there may be no memory for one.
pub(in crate::rdma) struct Grave {
    what: Option<Arc<dyn Send + Sync>>,
    next: Option<KBox<Grave>>,
}

impl Grave {
    pub(in crate::rdma) fn new() -> Result<KBox<Self>> {
        let (what, next) = (None, None);
        Ok(KBox::new(Self { what, next }, GFP_KERNEL)?)
    }
}

impl Graveyard {
    pub(in crate::rdma) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            first <- new_mutex!(None, "rdma_consumer_graveyard"),
        })
    }

    /// Keeps something until the end. May sleep.
    pub(in crate::rdma) fn bury(&self, what: Arc<dyn Send + Sync>, mut grave: KBox<Grave>) {
        grave.what = Some(what);
        let mut first = self.first.lock();
        grave.next = first.take();
        *first = Some(grave);
    }

    /// Leaves all of it to who may still look at it, for ever.
    fn leak(&self) {
        core::mem::forget(self.first.lock().take());
    }

    #[cfg(all(CONFIG_KUNIT, not(rdma_no_tests)))]
    pub(in crate::rdma) fn len(&self) -> usize {
        let first = self.first.lock();
        core::iter::successors(first.as_deref(), |grave| grave.next.as_deref()).count()
    }
}

#[pinned_drop]
impl PinnedDrop for Graveyard {
    fn drop(self: Pin<&mut Self>) {
        // One by one: a list that drops itself takes stack for each.
        let mut next = self.first.lock().take();
        while let Some(mut grave) = next {
            next = grave.next.take();
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the queue is ours. Its count is read by nobody but us: who changes it has a
        // reference to the queue, or is a queue pair that nobody could destroy.
        if unsafe { super::is_used(&raw mut (*self.raw.as_ptr()).usecnt) } {
            // A driver has refused to destroy a queue pair: the core polls on, and keeps the queue.
            ibdev_err!(
                self.lease,
                "a completion queue is still used, and stays with its device\n"
            );
            self.graveyard.leak();
            core::mem::forget(self.lease.clone());
            return;
        }
        // SAFETY: By the type invariant the queue is ours; queue pairs that use it have a reference to it, and are
        // gone. Its device is registered, since `lease` is dropped only after this.
        unsafe { bindings::ib_free_cq(self.raw.as_ptr()) }
    }
}

/// Takes `entries` of those that are `left`; `EBUSY` where those are fewer.
fn take(left: &Atomic<u32>, entries: u32) -> Result {
    let mut now = left.load(Relaxed);
    loop {
        let rest = now.checked_sub(entries).ok_or(EBUSY)?;
        match left.cmpxchg(now, rest, Relaxed) {
            Ok(_) => return Ok(()),
            Err(other) => now = other,
        }
    }
}

/// Entries of a completion queue that a queue pair has taken for all that it may post: it never overflows. And graves for
/// what its two queues have under way that nobody can end.
pub(in crate::rdma) struct Room {
    cq: Arc<Cq>,
    entries: u32,
    graves: [Option<KBox<Grave>>; 2],
}

impl Room {
    /// Takes `entries`; `EBUSY` where there are fewer.
    pub(in crate::rdma) fn new(cq: &Arc<Cq>, entries: u64) -> Result<Self> {
        let entries = u32::try_from(entries).map_err(|_| EINVAL)?;
        let graves = [Some(Grave::new()?), Some(Grave::new()?)];
        take(&cq.left, entries)?;
        Ok(Self {
            cq: cq.clone(),
            entries,
            graves,
        })
    }

    pub(in crate::rdma) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// Keeps what requests of a queue refer to that were not drained until nobody polls for them, and the entries that
    /// their completions may be in. May sleep.
    pub(in crate::rdma) fn bury(&mut self, what: Arc<dyn Send + Sync>) {
        self.entries = 0;
        match self.graves.iter_mut().find_map(Option::take) {
            Some(grave) => self.cq.graveyard.bury(what, grave),
            // There is one for each queue. Who buries more loses it.
            None => core::mem::forget(what),
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.cq.left.fetch_add(self.entries, Relaxed);
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_consumer_cq)]
mod tests {
    use super::*;
    use crate::rdma::consumer::Landlord;

    #[test]
    fn what_is_buried_keeps_its_entries_and_what_the_core_keeps_its_device() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(ptr::null_mut(), c"kunit_cq")? };
        let mut core = KBox::init(pin_init::init_zeroed::<bindings::ib_cq>(), GFP_KERNEL)?;
        // As a queue pair leaves it that nobody could destroy.
        core.usecnt.counter = 1;
        let cq = Cq {
            raw: NonNull::from(&mut *core),
            left: Atomic::new(20),
            graveyard: KBox::pin_init(Graveyard::new(), GFP_KERNEL)?,
            lease: landlord.lease(),
        };
        let cq = Arc::new(cq, GFP_KERNEL)?;
        let (mut room, other) = (Room::new(&cq, 6)?, Room::new(&cq, 4)?);
        assert_eq!(Room::new(&cq, 11).err(), Some(EBUSY));
        assert_eq!(Room::new(&cq, 1 << 32).err(), Some(EINVAL));
        let what = Arc::new(5, GFP_KERNEL)?;
        room.bury(what.clone());
        room.bury(what.clone());
        assert_eq!(cq.graveyard.len(), 2);
        drop(room);
        drop(other);
        // Those of what was buried are nobody else's.
        assert_eq!(cq.left.load(Relaxed), 14);
        // They would be lost.
        let graves = cq.graveyard.first.lock().take();
        let leases = landlord.leases();
        drop(cq);
        assert_eq!(landlord.leases(), leases);
        landlord.take_back();
        drop(graves);
        assert!(Arc::into_unique_or_drop(what).is_some());
        Ok(())
    }

    #[test]
    fn no_more_entries_are_taken_than_there_are() -> Result {
        let left = Atomic::new(10);
        take(&left, 6)?;
        assert_eq!(take(&left, 5).err(), Some(EBUSY));
        take(&left, 4)?;
        assert_eq!(left.load(Relaxed), 0);
        assert_eq!(take(&left, 1).err(), Some(EBUSY));
        take(&left, 0)?;
        Ok(())
    }
}
