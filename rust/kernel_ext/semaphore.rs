// SPDX-License-Identifier: GPL-2.0

//! Counting semaphores (for `rust/kernel/sync/semaphore.rs`).

use crate::bindings;
use kernel::prelude::*;
use kernel::types::Opaque;

/// A [`struct semaphore`]: so many may pass, and who waits passes in turn.
///
/// Unlike with a condition variable, what is given back while somebody waits is handed to the one who
/// has waited longest: nobody comes in between.
///
/// # Invariants
///
/// `inner` is an initialised `struct semaphore`.
///
/// [`struct semaphore`]: srctree/include/linux/semaphore.h
#[pin_data]
pub struct Semaphore {
    #[pin]
    inner: Opaque<bindings::semaphore>,
}

// SAFETY: A `struct semaphore` is not bound to the task that made it.
unsafe impl Send for Semaphore {}

// SAFETY: All that is done to a `struct semaphore` here takes its own lock.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    /// Returns an initialiser for a semaphore that `count` may pass.
    pub fn new(count: u32) -> impl PinInit<Self> {
        // INVARIANT: The semaphore is initialised here.
        pin_init!(Self {
            inner <- Opaque::ffi_init(move |slot: *mut bindings::semaphore| {
                // SAFETY: `slot` points to memory for a `struct semaphore`.
                unsafe { bindings::sema_init(slot, count) };
            }),
        })
    }

    /// Passes, as soon as it is the caller's turn. Sleeps, and no signal ends that.
    #[inline]
    pub fn down(&self) {
        // SAFETY: By the type invariant the semaphore is initialised.
        unsafe { bindings::down(self.inner.get()) }
    }

    /// Passes, if that can be at once; returns whether it did. May be called from any context.
    #[inline]
    pub fn try_down(&self) -> bool {
        // SAFETY: By the type invariant the semaphore is initialised.
        unsafe { bindings::down_trylock(self.inner.get()) == 0 }
    }

    /// Lets one more pass: who has waited longest, or else who comes next. May be called from any
    /// context, and by others than who passed.
    #[inline]
    pub fn up(&self) {
        // SAFETY: By the type invariant the semaphore is initialised.
        unsafe { bindings::up(self.inner.get()) }
    }

    /// Whether somebody waits just now.
    #[cfg(CONFIG_KUNIT)]
    pub fn is_waited_for(&self) -> bool {
        // SAFETY: By the type invariant the semaphore is initialised.
        unsafe { bindings::sema_is_waited_for(self.inner.get()) }
    }
}
