// SPDX-License-Identifier: GPL-2.0

//! A completion that can be waited for with a timeout (for `rust/kernel/sync/completion.rs`).

use crate::bindings;
use kernel::prelude::*;
use kernel::time::Jiffies;
use kernel::types::Opaque;

/// A [`struct completion`]: for one waiter and one signal at a time, reusable; or for all who wait, with
/// one signal for good ([`Completion::complete_all`]).
///
/// # Invariants
///
/// `inner` is an initialised `struct completion`.
///
/// [`struct completion`]: srctree/include/linux/completion.h
#[pin_data]
pub struct Completion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: A `struct completion` is not bound to the task that made it.
unsafe impl Send for Completion {}

// SAFETY: Completing and waiting take `wait.lock`. `reinit_completion` and the first look of
// `try_wait_for_completion` do not: they store and read one word, of which an old or a new value is
// found. A signal that is lost or found late by that is what the doc of `reinit` is about.
unsafe impl Sync for Completion {}

impl Completion {
    /// Returns an initialiser for a completion that is not done.
    pub fn new() -> impl PinInit<Self> {
        // INVARIANT: The completion is initialised here.
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` points to memory for a `struct completion`.
                unsafe { bindings::init_completion(slot) };
            }),
        })
    }

    /// Wakes one waiter, or lets the next one pass. May be called from any context.
    #[inline]
    pub fn complete(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::complete(self.inner.get()) }
    }

    /// Wakes all waiters, now and until [`Completion::reinit`]. May be called from any context.
    #[inline]
    pub fn complete_all(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::complete_all(self.inner.get()) }
    }

    /// Waits, for as long as it takes. Sleeps.
    #[inline]
    pub fn wait(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::wait_for_completion(self.inner.get()) }
    }

    /// Waits for at most `timeout`; returns whether the completion was signalled. Sleeps.
    #[inline]
    pub fn wait_timeout(&self, timeout: Jiffies) -> bool {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), timeout) != 0 }
    }

    /// The same, but `EINTR` as soon as the task is killed. Sleeps.
    #[inline]
    pub fn wait_killable_timeout(&self, timeout: Jiffies) -> Result<bool> {
        // SAFETY: By the type invariant the completion is initialised.
        match unsafe { bindings::wait_for_completion_killable_timeout(self.inner.get(), timeout) } {
            ..0 => Err(EINTR),
            left => Ok(left != 0),
        }
    }

    /// Whether there is a signal, which stays.
    #[inline]
    pub fn is_done(&self) -> bool {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::completion_done(self.inner.get()) }
    }

    /// Takes a signal if there is one, without waiting.
    #[inline]
    pub fn try_wait(&self) -> bool {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::try_wait_for_completion(self.inner.get()) }
    }

    /// Makes the completion not done again. There must be no waiter.
    ///
    /// A signal at the same time may be lost, or one of before be found afterwards. So whoever
    /// signals notes before what has happened, where the next waiter looks after this and before it
    /// waits, and again when it is woken.
    #[inline]
    pub fn reinit(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::reinit_completion(self.inner.get()) }
    }
}
