// SPDX-License-Identifier: GPL-2.0

//! A spinlock that keeps interrupts off while held (for `rust/kernel/sync/lock/spinlock.rs`).

use crate::bindings;
use kernel::ffi;
use kernel::sync::lock::{Backend, Guard, Lock};

/// A `spinlock_t` taken with `spin_lock_irqsave`: may be shared with interrupt handlers.
pub type IrqSpinLock<T> = Lock<T, IrqSaveBackend>;

/// What locking an [`IrqSpinLock`] returns.
pub type IrqSpinLockGuard<'a, T> = Guard<'a, T, IrqSaveBackend>;

/// The backend of [`IrqSpinLock`].
pub struct IrqSaveBackend;

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
unsafe impl Backend for IrqSaveBackend {
    type State = bindings::spinlock_t;
    type GuardState = ffi::c_ulong;

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
        // SAFETY: The caller vouches that `init` was called.
        unsafe { bindings::spin_lock_irqsave(ptr) }
    }

    #[inline]
    unsafe fn unlock(ptr: *mut Self::State, guard_state: &Self::GuardState) {
        // SAFETY: The caller vouches that it holds the lock, and that `guard_state` is what taking
        // it returned.
        unsafe { bindings::spin_unlock_irqrestore(ptr, *guard_state) }
    }

    #[inline]
    unsafe fn try_lock(ptr: *mut Self::State) -> Option<Self::GuardState> {
        let mut flags = 0;
        // SAFETY: The caller vouches that `init` was called; `flags` is a local.
        unsafe { bindings::spin_trylock_irqsave(ptr, &mut flags) }.then_some(flags)
    }

    #[inline]
    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: The caller vouches that `init` was called.
        unsafe { bindings::spin_assert_is_held(ptr) }
    }
}
