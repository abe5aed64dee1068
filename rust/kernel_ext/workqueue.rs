// SPDX-License-Identifier: GPL-2.0

//! A workqueue of one's own (for `rust/kernel/workqueue.rs`).

use crate::bindings;
use core::ops::Deref;
use core::ptr::NonNull;
use kernel::container_of;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::workqueue::{HasDelayedWork, Queue, Work};

/// Waits until a delayed work item has run that is queued, at once if its time has not come. Sleeps.
///
/// What it queues itself is not waited for.
pub fn flush_delayed<T: HasDelayedWork<T>>(item: &Arc<T>) {
    // SAFETY: The reference keeps the item, of which `HasDelayedWork` says that its work is part of a
    // `struct delayed_work`.
    unsafe {
        let work = Work::raw_get(T::raw_get_work(Arc::as_ptr(item).cast_mut()));
        bindings::flush_delayed_work(container_of!(work, bindings::delayed_work, work));
    }
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
    /// Makes an ordered queue: its work items run one after the other, never at once.
    pub fn ordered(name: &CStr) -> Result<Self> {
        // SAFETY: `name` is a C string; the format of the helper takes one.
        let queue = unsafe { bindings::rdma_alloc_ordered_workqueue(name.as_char_ptr()) };
        // INVARIANT: The queue was made just now.
        NonNull::new(queue).map(Self).ok_or(ENOMEM)
    }

    /// Makes an unbound queue.
    pub fn unbound(name: &CStr) -> Result<Self> {
        // SAFETY: `name` is a C string; the format of the helper takes one.
        let queue = unsafe { bindings::rdma_alloc_unbound_workqueue(name.as_char_ptr()) };
        // INVARIANT: The queue was made just now.
        NonNull::new(queue).map(Self).ok_or(ENOMEM)
    }

    /// As many work items as an unbound queue runs at once, at the most. Each NUMA node has a part
    /// of them, by its share of the processors.
    pub const MOST_ACTIVE: u32 = bindings::wq_consts_WQ_MAX_ACTIVE;

    /// Makes an unbound queue for work that brings pages in, `most_active` at once. It has no worker
    /// of its own for when memory is short.
    pub fn for_faults(name: &CStr, most_active: u32) -> Result<Self> {
        let most_active = most_active.clamp(1, Self::MOST_ACTIVE) as c_int;
        // SAFETY: `name` is a C string; the format of the helper takes one.
        let queue =
            unsafe { bindings::rdma_alloc_fault_workqueue(name.as_char_ptr(), most_active) };
        // INVARIANT: The queue was made just now.
        NonNull::new(queue).map(Self).ok_or(ENOMEM)
    }

    /// Makes an unbound queue for work that allocates memory and waits for others, one item at a time. It
    /// has no worker of its own for when memory is short: it may flush queues that have none either.
    pub fn for_long_work(name: &CStr) -> Result<Self> {
        Self::for_faults(name, 1)
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
