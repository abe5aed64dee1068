// SPDX-License-Identifier: GPL-2.0

//! A spinlock that keeps interrupts off while held (for `rust/kernel/sync/lock/spinlock.rs`).
//!
//! What `spin_lock_irqsave` finds is restored by who unlocks, so that guards of two locks would have to be dropped in
//! the reverse order, which no type says. Here it is counted how many guards a processor has: the last one lets
//! interrupts in again, whichever that is, if they were on before the first one.

use crate::bindings;
use kernel::ffi;
use kernel::sync::lock::{Backend, Guard, Lock};

/// A `spinlock_t` taken with interrupts off: may be shared with interrupt handlers.
pub type IrqSpinLock<T> = Lock<T, IrqDisableBackend>;

/// What locking an [`IrqSpinLock`] returns. Interrupts stay off until the last one of a processor is dropped.
pub type IrqSpinLockGuard<'a, T> = Guard<'a, T, IrqDisableBackend>;

/// Takes a lock with interrupts off, for as long as the kernel has no `spin_lock_irq_disable`.
///
/// # Safety
///
/// `lock` must be initialised, and not held by this processor.
#[inline]
pub(super) unsafe fn spin_lock_irq_disable(lock: *mut bindings::spinlock_t) {
    // SAFETY: Counts on this processor, where the task stays until it has given the lock back: preemption is off, too.
    unsafe { bindings::rust_interrupts_disable() };
    // SAFETY: The caller vouches that the lock is initialised, and not this processor's.
    unsafe { bindings::spin_lock(lock) };
}

/// Gives it back.
///
/// # Safety
///
/// `lock` must have been taken here, by [`spin_lock_irq_disable`] or [`spin_trylock_irq_disable`].
#[inline]
pub(super) unsafe fn spin_unlock_irq_enable(lock: *mut bindings::spinlock_t) {
    // SAFETY: The caller vouches that the lock was taken.
    unsafe { bindings::spin_unlock(lock) };
    // SAFETY: The caller vouches that taking it has counted, on this processor.
    unsafe { bindings::rust_interrupts_enable() };
}

/// Takes a lock as [`spin_lock_irq_disable`] if nobody has it; else interrupts are as before.
///
/// # Safety
///
/// `lock` must be initialised.
#[inline]
unsafe fn spin_trylock_irq_disable(lock: *mut bindings::spinlock_t) -> bool {
    // SAFETY: Counts on this processor, where the task stays: preemption is off, too.
    unsafe { bindings::rust_interrupts_disable() };
    // SAFETY: The caller vouches that the lock is initialised.
    let taken = unsafe { bindings::spin_trylock(lock) } != 0;
    if !taken {
        // SAFETY: It was counted above, on this processor.
        unsafe { bindings::rust_interrupts_enable() };
    }
    taken
}

/// The backend of [`IrqSpinLock`].
pub struct IrqDisableBackend;

/// Initialiser of an [`IrqSpinLock`] with a lock class of its own.
#[macro_export]
macro_rules! new_irq_spinlock {
    ($inner:expr $(, $name:literal)? $(,)?) => {
        $crate::kernel_ext::spinlock::IrqSpinLock::new(
            $inner,
            kernel::optional_name!($($name)?),
            kernel::static_lock_class!(),
        )
    };
}
pub use new_irq_spinlock;

// SAFETY: A `spinlock_t` gives mutual exclusion. `relock` is the default one, which takes the lock
// by `lock`.
unsafe impl Backend for IrqDisableBackend {
    type State = bindings::spinlock_t;
    type GuardState = ();

    #[inline]
    unsafe fn init(
        ptr: *mut Self::State,
        name: *const ffi::c_char,
        key: *mut bindings::lock_class_key,
    ) {
        // SAFETY: The caller vouches that `ptr` is valid for writes and that `name` and `key`
        // outlive the lock.
        unsafe { bindings::__spin_lock_init(ptr, name, key) }
    }

    #[inline]
    unsafe fn lock(ptr: *mut Self::State) -> Self::GuardState {
        // SAFETY: The caller vouches that `init` was called; who has the lock and takes it again waits for ever.
        unsafe { spin_lock_irq_disable(ptr) }
    }

    #[inline]
    unsafe fn unlock(ptr: *mut Self::State, _guard_state: &Self::GuardState) {
        // SAFETY: The caller vouches that it holds the lock, which was taken by one of the functions here: with
        // interrupts off on this processor, which it so has not left since.
        unsafe { spin_unlock_irq_enable(ptr) }
    }

    #[inline]
    unsafe fn try_lock(ptr: *mut Self::State) -> Option<Self::GuardState> {
        // SAFETY: The caller vouches that `init` was called.
        unsafe { spin_trylock_irq_disable(ptr) }.then_some(())
    }

    #[inline]
    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: The caller vouches that `init` was called.
        unsafe { bindings::spin_assert_is_held(ptr) }
    }
}

#[cfg(not(rdma_no_tests))]
#[kernel::prelude::kunit_tests(rust_irq_spinlock)]
mod tests {
    use super::*;
    use crate::kernel_ext::table::{new_irq_xarray, IrqXArray};
    use kernel::prelude::*;
    use kernel::sync::Arc;

    fn lock() -> Result<Arc<IrqSpinLock<u32>>> {
        Arc::pin_init(new_irq_spinlock!(0, "rust_irq_spinlock_test"), GFP_KERNEL)
    }

    fn other_lock() -> Result<Arc<IrqSpinLock<u32>>> {
        Arc::pin_init(new_irq_spinlock!(0, "rust_irq_spinlock_other"), GFP_KERNEL)
    }

    fn interrupts_are_on() -> bool {
        // SAFETY: The function looks at a flag of this processor.
        !unsafe { bindings::irqs_disabled() }
    }

    #[test]
    fn interrupts_stay_off_until_the_last_guard_is_dropped() -> Result {
        let (first, second) = (lock()?, other_lock()?);
        assert!(interrupts_are_on());
        let outer = first.lock();
        let inner = second.lock();
        drop(outer);
        let off = !interrupts_are_on();
        drop(inner);
        assert!(off);
        assert!(interrupts_are_on());
        Ok(())
    }

    #[test]
    fn a_lock_that_is_not_had_leaves_interrupts_as_they_are() -> Result {
        let (first, second) = (lock()?, other_lock()?);
        let outer = first.lock();
        assert!(first.try_lock().is_none());
        let inner = second.try_lock();
        drop(outer);
        let off = !interrupts_are_on();
        assert!(inner.is_some());
        drop(inner);
        assert!(off);
        assert!(interrupts_are_on());
        Ok(())
    }

    #[test]
    fn a_guard_that_is_dropped_under_the_lock_of_a_table_leaves_interrupts_off() -> Result {
        let lock = lock()?;
        let table: Pin<KBox<IrqXArray<Arc<u32>>>> =
            KBox::pin_init(new_irq_xarray!("rust_irq_spinlock_table"), GFP_KERNEL)?;
        table.insert(1, Arc::new(2, GFP_KERNEL)?)?;
        let guard = lock.lock();
        let off = table.with(1, |value| {
            drop(guard);
            (*value, !interrupts_are_on())
        });
        assert_eq!(off, Some((2, true)));
        assert!(interrupts_are_on());
        Ok(())
    }
}
