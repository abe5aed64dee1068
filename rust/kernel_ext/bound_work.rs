// SPDX-License-Identifier: GPL-2.0

//! Work that is done while a driver is bound to its device, and at no other time (for `rust/kernel/workqueue.rs`).
//!
//! A work item of the kernel crate is given what it was queued with, and no device that is bound. Here it is:
//! work runs between [`BoundWork::open`] and the end of what that gives, which is managed for the device.

use super::{
    spinlock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    workqueue::{
        flush_delayed,
        hasten,
        OwnedQueue, //
    },
};
use core::ptr;
use kernel::{
    device::{
        Bound,
        Device, //
    },
    devres::Devres,
    impl_has_delayed_work,
    prelude::*,
    sync::{
        aref::ARef,
        Arc, //
    },
    time::Jiffies,
    workqueue::{
        DelayedWork,
        WorkItem, //
    },
};

/// What is done by a [`BoundWork`]. `ID` tells the kinds of work of one type apart.
pub trait BoundWorkItem<const ID: u64 = 0>: Send + Sync + 'static {
    /// Does it, for the one that it was queued with. Sleeps.
    fn run(this: Arc<Self>, dev: &Device<Bound>);
}

/// What is waited for.
struct State<T> {
    /// Whether it may be queued.
    open: bool,
    /// Whom it is done for. Kept from the time that it is queued to when it begins.
    item: Option<Arc<T>>,
}

/// Work for a device that its driver is bound to, with a queue of its own, on which it is done.
///
/// It is never done twice at once: where it is queued while it runs, it is done once more.
///
/// # Invariants
///
/// While `state` is open there is an [`Opened`] of it that is managed for `dev`, whose end closes it and waits for what
/// runs.
#[pin_data]
pub struct BoundWork<T: BoundWorkItem<ID>, const ID: u64 = 0> {
    dev: ARef<Device>,
    queue: OwnedQueue,
    #[pin]
    state: IrqSpinLock<State<T>>,
    #[pin]
    work: DelayedWork<Self>,
}

impl_has_delayed_work! {
    impl{T: BoundWorkItem<ID>, const ID: u64} HasDelayedWork<Self> for BoundWork<T, ID> { self.work }
}

impl<T: BoundWorkItem<ID>, const ID: u64> BoundWork<T, ID> {
    /// Makes it, for `dev`, on `queue`, which is not [opened](Self::open) yet. `work` is by
    /// [`new_delayed_work!`](kernel::new_delayed_work), so that each kind has a lock class.
    pub fn new(
        dev: &Device<Bound>,
        queue: OwnedQueue,
        work: impl PinInit<DelayedWork<Self>>,
    ) -> Result<Arc<Self>> {
        // INVARIANT: It is not open.
        let init = pin_init!(Self {
            dev: ARef::from(&**dev),
            queue,
            state <- new_irq_spinlock!(
                State {
                    open: false,
                    item: None,
                },
                "rust_bound_work"
            ),
            work <- work,
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Has it done from now on when it is queued, until what this gives is dropped or the device is unbound:
    /// that waits for it. `EINVAL` where it is for another device.
    ///
    /// What the work uses of what is managed for the device is to be made before this: at the unbinding what was
    /// made later goes earlier.
    pub fn open(self: &Arc<Self>, dev: &Device<Bound>) -> Result<Devres<Opened<T, ID>>> {
        let normal: &Device = dev;
        if !ptr::eq(normal, &*self.dev) {
            return Err(EINVAL);
        }
        let opened = Devres::new(dev, Opened(self.clone()))?;
        // INVARIANT: That was made just now, for `dev`, which is bound until this returns at least.
        self.state.lock().open = true;
        Ok(opened)
    }

    /// Has it done now, for `item`, unless it is closed; also where it waits for its time, for whom it was queued
    /// then. May be called from any context.
    pub fn queue(self: &Arc<Self>, item: &Arc<T>) {
        self.enqueue(item, |this| hasten(&this.queue, this.clone()));
    }

    /// Has it done after `delay`, or sooner where it is queued already. May be called from any context.
    pub fn queue_after(self: &Arc<Self>, item: &Arc<T>, delay: Jiffies) {
        self.enqueue(item, |this| {
            drop(this.queue.enqueue_delayed::<_, 0>(Arc::clone(this), delay));
        });
    }

    fn enqueue(self: &Arc<Self>, item: &Arc<T>, enqueue: impl FnOnce(&Arc<Self>)) {
        // Held meanwhile, so that nothing is queued once it is closed.
        let mut state = self.state.lock();
        if state.open {
            if state.item.is_none() {
                state.item = Some(item.clone());
            }
            enqueue(self);
        }
    }

    /// Waits for what is being done, and for what is to be done now. Sleeps.
    pub fn flush(&self) {
        self.queue.flush();
    }

    /// Has it not done any more, and waits for what is being done. Sleeps.
    fn close(self: &Arc<Self>) {
        let item = {
            let mut state = self.state.lock();
            state.open = false;
            state.item.take()
        };
        drop(item);
        // Where it waits for its time it runs now, and finds nothing.
        flush_delayed(self);
    }
}

impl<T: BoundWorkItem<ID>, const ID: u64> WorkItem for BoundWork<T, ID> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let item = this.state.lock().item.take();
        if let Some(item) = item {
            // SAFETY: There was somebody to do it for, whom `close` takes out: so it was open, and by the type
            // invariants who closes it waits for this, in an end that the device is not unbound before. As with the
            // kernel's own registrations of interrupts, what was managed for the device after this was opened may be
            // gone by then: `open` tells its callers.
            let dev = unsafe { this.dev.as_bound() };
            T::run(item, dev);
        }
    }
}

/// A [`BoundWork`] that is done when it is queued. Dropping this ends that, and waits for what is being done. Sleeps.
///
/// It is to be found in a [`Devres`] only, which [`BoundWork::open`] gives.
pub struct Opened<T: BoundWorkItem<ID>, const ID: u64 = 0>(Arc<BoundWork<T, ID>>);

impl<T: BoundWorkItem<ID>, const ID: u64> Drop for Opened<T, ID> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_bound_work)]
mod tests {
    use super::*;
    use kernel::{
        faux,
        new_delayed_work,
        sync::atomic::{
            Atomic,
            Relaxed, //
        },
        time::msecs_to_jiffies, //
    };

    struct Runs(Atomic<u32>);

    impl BoundWorkItem for Runs {
        fn run(this: Arc<Self>, _dev: &Device<Bound>) {
            this.0.fetch_add(1, Relaxed);
        }
    }

    type Made = (
        Arc<Runs>,
        Arc<BoundWork<Runs>>,
        Devres<Opened<Runs>>,
        faux::Registration,
    );

    fn made() -> Result<Made> {
        let parent = faux::Registration::new(c"rust_bound_work", None)?;
        // SAFETY: `faux_device_create` has bound the device, and there are no files to unbind it by: it stays bound
        // until the registration is dropped, which is after the last use here.
        let dev = unsafe { parent.as_ref().as_bound() };
        let queue = OwnedQueue::for_long_work(c"rust_bound_work")?;
        let work = BoundWork::new(dev, queue, new_delayed_work!("rust_bound_work"))?;
        let runs = Arc::new(Runs(Atomic::new(0)), GFP_KERNEL)?;
        // Not before it is open.
        work.queue(&runs);
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 0);
        let opened = work.open(dev)?;
        Ok((runs, work, opened, parent))
    }

    #[test]
    fn work_is_done_until_it_is_closed() -> Result {
        let (runs, work, opened, _parent) = made()?;
        work.queue(&runs);
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 1);
        // What waits for its time is brought forward.
        work.queue_after(&runs, msecs_to_jiffies(3_600_000));
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 1);
        work.queue(&runs);
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 2);
        // Or never done.
        work.queue_after(&runs, msecs_to_jiffies(3_600_000));
        drop(opened);
        work.queue(&runs);
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 2);
        // Nobody is kept for it.
        assert!(Arc::into_unique_or_drop(runs).is_some());
        Ok(())
    }

    #[test]
    fn work_is_not_done_once_the_device_is_unbound() -> Result {
        let (runs, work, opened, parent) = made()?;
        work.queue_after(&runs, msecs_to_jiffies(3_600_000));
        drop(parent);
        assert!(opened.try_access_with(|_| ()).is_none());
        work.queue(&runs);
        work.flush();
        assert_eq!(runs.0.load(Relaxed), 0);
        assert!(Arc::into_unique_or_drop(runs).is_some());
        Ok(())
    }

    #[test]
    fn work_is_opened_by_its_own_device_only() -> Result {
        let (_runs, work, _opened, _parent) = made()?;
        let other = faux::Registration::new(c"rust_bound_work_other", None)?;
        // SAFETY: `faux_device_create` has bound the device, and there are no files to unbind it by: it stays bound
        // until the registration is dropped, which is after the last use here.
        let other = unsafe { other.as_ref().as_bound() };
        assert!(work.open(other).is_err_and(|error| error == EINVAL));
        Ok(())
    }
}
