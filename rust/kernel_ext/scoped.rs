// SPDX-License-Identifier: GPL-2.0

//! Values on a stack that others refer to for a while (for `rust/kernel/sync/scoped.rs`).

use core::marker::PhantomPinned;
use core::ops::Deref;
use core::ptr::NonNull;
use kernel::prelude::*;
use kernel::processor::cpu_relax;
use kernel::sync::atomic::Acquire;
use kernel::sync::Refcount;

/// A value that stays where it is until the last [`ScopedRef`] to it is gone.
///
/// What [`Arc`] is to memory of the heap, this is to that of a stack: whoever may not allocate can have
/// a value of his own that others find. Dropping it waits for the references, without sleeping: they
/// are to be given up before that, or by somebody who is about to. Where tasks of any priority may hold
/// them, the owner takes a lock before it drops this that they hold until they have given them up: a
/// task that spins here keeps one of lower priority from the processor, a lock lends it its own.
///
/// # Invariants
///
/// `references` is one more than the number of [`ScopedRef`] to this, or saturated: then it is never
/// dropped to the end.
///
/// [`Arc`]: kernel::sync::Arc
#[pin_data(PinnedDrop)]
pub struct Scoped<T> {
    #[pin]
    value: T,
    references: Refcount,
    /// Others look at it while its owner drops it.
    #[pin]
    _pin: PhantomPinned,
}

impl<T> Scoped<T> {
    /// Returns an initialiser for a value without references.
    pub fn new<E>(value: impl PinInit<T, E>) -> impl PinInit<Self, E>
    where
        E: From<core::convert::Infallible>,
    {
        // INVARIANT: Nobody knows of it yet.
        try_pin_init!(Self {
            value <- value,
            references: Refcount::new(1),
            _pin: PhantomPinned,
        }? E)
    }

    /// A reference that may be given to others.
    pub fn reference(self: Pin<&Self>) -> ScopedRef<T> {
        // INVARIANT: It is counted here.
        self.references.inc();
        // INVARIANT: It is pinned, and dropping it waits for this.
        ScopedRef {
            scoped: NonNull::from(self.get_ref()),
        }
    }
}

impl<T> Deref for Scoped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

#[pinned_drop]
impl<T> PinnedDrop for Scoped<T> {
    fn drop(self: Pin<&mut Self>) {
        // Pairs with the release in `ScopedRef::drop`: what was done with a reference is done.
        while self.references.as_atomic().load(Acquire) != 1 {
            cpu_relax();
        }
    }
}

/// A reference to a [`Scoped`], which does not go before it.
///
/// # Invariants
///
/// `scoped` points to a pinned [`Scoped`] that counts this, and so is not dropped.
pub struct ScopedRef<T> {
    scoped: NonNull<Scoped<T>>,
}

// SAFETY: All that it gives is `&T`, which other threads may have, as `T` is `Sync`; what it points to is
// dropped by its owner.
unsafe impl<T: Sync> Send for ScopedRef<T> {}

// SAFETY: All that a shared one gives is `&T`, which other threads may have, as `T` is `Sync`.
unsafe impl<T: Sync> Sync for ScopedRef<T> {}

impl<T> ScopedRef<T> {
    fn scoped(&self) -> Pin<&Scoped<T>> {
        // SAFETY: By the type invariant it is there, as memory that is pinned is not used for anything
        // else before it was dropped. Its owner may have a `&mut` to it, in `drop`, that waits: as it is
        // not `Unpin`, that does not say that there is no other reference.
        let scoped = unsafe { self.scoped.as_ref() };
        // SAFETY: By the type invariant it is pinned.
        unsafe { Pin::new_unchecked(scoped) }
    }
}

impl<T> Clone for ScopedRef<T> {
    fn clone(&self) -> Self {
        self.scoped().reference()
    }
}

impl<T> Deref for ScopedRef<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.scoped().get_ref().value
    }
}

impl<T> Drop for ScopedRef<T> {
    fn drop(&mut self) {
        // INVARIANT: It is counted no more. This releases, and nothing is touched after it, as the owner
        // may go on.
        self.scoped().references.dec();
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_scoped)]
mod tests {
    use super::*;
    use kernel::impl_has_work;
    use kernel::sync::atomic::{Atomic, Relaxed};
    use kernel::sync::Arc;
    use kernel::time::delay::fsleep;
    use kernel::time::Delta;
    use kernel::workqueue::{new_work, system_unbound, Work, WorkItem};
    use pin_init::stack_pin_init;

    /// Somebody who has a reference for a while.
    #[pin_data]
    struct Holder {
        #[pin]
        reference: kernel::sync::Mutex<Option<ScopedRef<Atomic<u32>>>>,
        given_up: Atomic<u32>,
        #[pin]
        work: Work<Holder>,
    }

    impl_has_work! {
        impl HasWork<Self> for Holder { self.work }
    }

    impl WorkItem for Holder {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            fsleep(Delta::from_millis(10));
            let reference = this.reference.lock().take();
            this.given_up.store(1, Relaxed);
            drop(reference);
        }
    }

    #[test]
    fn a_value_waits_for_the_last_reference_when_it_is_dropped() -> Result {
        let holder = Arc::pin_init(
            pin_init!(Holder {
                reference <- kernel::new_mutex!(None),
                given_up: Atomic::new(0),
                work <- new_work!("rust_scoped_test"),
            }),
            GFP_KERNEL,
        )?;
        {
            stack_pin_init!(let value = Scoped::new::<core::convert::Infallible>(Atomic::new(5u32)));
            *holder.reference.lock() = Some(value.as_ref().reference());
            assert!(system_unbound().enqueue(holder.clone()).is_ok());
        }
        assert_eq!(holder.given_up.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn a_value_is_found_by_its_references() {
        stack_pin_init!(let value = Scoped::new::<core::convert::Infallible>(Atomic::new(5u32)));
        let first = value.as_ref().reference();
        let second = first.clone();
        drop(first);
        second.store(6, Relaxed);
        assert_eq!(value.load(Relaxed), 6);
        assert_eq!(value.references.as_atomic().load(Relaxed), 2);
        drop(second);
        assert_eq!(value.references.as_atomic().load(Relaxed), 1);
    }
}
