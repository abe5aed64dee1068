// SPDX-License-Identifier: GPL-2.0

//! A workqueue of one's own (for `rust/kernel/workqueue.rs`).

use crate::bindings;
use core::ops::Deref;
use core::ptr::NonNull;
use kernel::container_of;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::workqueue::{HasDelayedWork, Queue, RawDelayedWorkItem, Work};

/// Waits until a delayed work item has run that is queued, at once if its time has not come. Sleeps.
///
/// What it queues itself is not waited for.
pub fn flush_delayed<T: HasDelayedWork<T>>(item: &Arc<T>) {
    // SAFETY: The reference keeps the item valid.
    let work = unsafe { T::raw_get_work(Arc::as_ptr(item).cast_mut()) };
    // SAFETY: It is that of a valid item; this makes no reference.
    let work = unsafe { Work::raw_get(work) };
    // SAFETY: `HasDelayedWork` says that the work is part of a `struct delayed_work`, which is valid for as long as the
    // item, and initialised with it.
    unsafe {
        bindings::flush_delayed_work(container_of!(work, bindings::delayed_work, work));
    }
}

/// Has a delayed work item run now: queues it, or brings it forward where it waits for its time. Where it runs
/// already it does so once more. May be called from any context.
pub fn hasten<W, const ID: u64>(queue: &Queue, item: W)
where
    W: RawDelayedWorkItem<ID> + Send + 'static,
{
    // `Queue` is a transparent wrapper of `struct workqueue_struct`.
    let queue = core::ptr::from_ref(queue).cast_mut().cast();
    // SAFETY: `false` is given only where the item was queued already, which then runs for the reference that
    // it was queued with; `W` is `Send` and static. `RawDelayedWorkItem` says that the work is part of a
    // `struct delayed_work`, valid for the call, and until it runs where it is queued by this.
    let _ = unsafe {
        item.__enqueue(move |work| {
            !bindings::mod_delayed_work_on(
                bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int,
                queue,
                container_of!(work, bindings::delayed_work, work),
                0,
            )
        })
    };
}

/// A workqueue that is flushed and destroyed when dropped.
///
/// # Invariants
///
/// The pointer is a workqueue that this value owns.
pub struct OwnedQueue(NonNull<bindings::workqueue_struct>);

// SAFETY: A workqueue belongs to no task, and takes its own locks.
unsafe impl Send for OwnedQueue {}
// SAFETY: A workqueue belongs to no task, and takes its own locks.
unsafe impl Sync for OwnedQueue {}

impl OwnedQueue {
    /// Makes a queue; `most_active` is 0 for the usual limit.
    fn new(name: &CStr, flags: bindings::wq_flags, most_active: c_int) -> Result<Self> {
        let format = c"%s".as_char_ptr();
        // SAFETY: The format takes one C string, which `name` is; both are copied.
        let queue = unsafe {
            bindings::alloc_workqueue_noprof(format, flags, most_active, name.as_char_ptr())
        };
        // INVARIANT: The queue was made just now.
        NonNull::new(queue).map(Self).ok_or(ENOMEM)
    }

    /// Makes an ordered queue: its work items run one after the other, never at once.
    pub fn ordered(name: &CStr) -> Result<Self> {
        let ordered = bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags___WQ_ORDERED;
        Self::new(name, ordered | bindings::wq_flags_WQ_MEM_RECLAIM, 1)
    }

    /// Makes an unbound queue.
    pub fn unbound(name: &CStr) -> Result<Self> {
        let flags = bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags_WQ_MEM_RECLAIM;
        Self::new(name, flags, 0)
    }

    /// Makes a queue whose work items run in soft interrupts, on the processor that queues them: they do not sleep.
    pub fn bottom_halves(name: &CStr) -> Result<Self> {
        Self::new(
            name,
            bindings::wq_flags_WQ_BH | bindings::wq_flags_WQ_PERCPU,
            0,
        )
    }

    /// As many work items as an unbound queue runs at once, at the most. Each NUMA node has a part
    /// of them, by its share of the processors.
    pub const MOST_ACTIVE: u32 = bindings::wq_consts_WQ_MAX_ACTIVE;

    /// Makes an unbound queue for work that brings pages in, `most_active` at once. It has no worker
    /// of its own for when memory is short: bringing pages in needs memory, and is no part of giving
    /// memory back.
    pub fn for_faults(name: &CStr, most_active: u32) -> Result<Self> {
        let most_active = most_active.clamp(1, Self::MOST_ACTIVE) as c_int;
        Self::new(name, bindings::wq_flags_WQ_UNBOUND, most_active)
    }

    /// Makes an unbound queue for work that allocates memory and waits for others, one item at a time. It
    /// has no worker of its own for when memory is short: it may flush queues that have none either.
    pub fn for_long_work(name: &CStr) -> Result<Self> {
        Self::for_long_works(name, 1)
    }

    /// The same for `most_active` items at a time.
    pub fn for_long_works(name: &CStr, most_active: u32) -> Result<Self> {
        Self::for_faults(name, most_active)
    }

    /// Waits until everything queued before this call has run. Sleeps.
    pub fn flush(&self) {
        // SAFETY: By the type invariant the queue is ours, and it is destroyed only when `self` is
        // dropped.
        unsafe { bindings::__flush_workqueue(self.0.as_ptr()) }
    }
}

impl Deref for OwnedQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: The queue is valid for as long as `self` by the type invariant.
        unsafe { Queue::from_raw(self.0.as_ptr()) }
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        // SAFETY: The queue is ours by the type invariant, and not used afterwards.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) }
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_workqueue)]
mod tests {
    use super::*;
    use kernel::{
        impl_has_delayed_work, new_delayed_work,
        sync::atomic::{
            Atomic,
            Relaxed, //
        },
        time::msecs_to_jiffies,
        workqueue::{
            DelayedWork,
            WorkItem, //
        },
    };

    #[pin_data]
    struct Item {
        runs: Atomic<u32>,
        #[pin]
        work: DelayedWork<Item>,
    }

    impl_has_delayed_work! {
        impl HasDelayedWork<Self> for Item { self.work }
    }

    impl WorkItem for Item {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            this.runs.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn what_waits_for_its_time_is_brought_forward_and_not_put_off() -> Result {
        let queue = OwnedQueue::for_long_work(c"rust_workqueue")?;
        let init = try_pin_init!(Item {
            runs: Atomic::new(0),
            work <- new_delayed_work!("rust_workqueue"),
        });
        let item = Arc::pin_init(init, GFP_KERNEL)?;
        let hour = msecs_to_jiffies(3_600_000);
        assert!(queue.enqueue_delayed(item.clone(), hour).is_ok());
        // Does not wait for timers.
        queue.flush();
        assert_eq!(item.runs.load(Relaxed), 0);
        hasten(&queue, item.clone());
        queue.flush();
        assert_eq!(item.runs.load(Relaxed), 1);
        // Also where it does not wait.
        hasten(&queue, item.clone());
        queue.flush();
        assert_eq!(item.runs.load(Relaxed), 2);
        // Each run had one reference, and gave it back.
        assert!(Arc::into_unique_or_drop(item).is_some());
        Ok(())
    }
}
