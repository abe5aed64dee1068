// SPDX-License-Identifier: GPL-2.0

//! The lock of all that concerns interfaces as such (for `rust/kernel/net/`).
//!
//! C header: [`include/linux/rtnetlink.h`](srctree/include/linux/rtnetlink.h)

use crate::bindings;
use core::marker::PhantomData;

/// RTNL is held by this task, for as long as there is a reference to this: what needs the lock takes one, and callbacks
/// that are called with the lock held are given one.
///
/// # Invariants
///
/// The task that has the value holds RTNL; no other gets it.
pub struct Rtnl(PhantomData<*mut ()>);

impl Rtnl {
    /// Runs `f` with RTNL held. Sleeps. To be called by tasks that do not hold it: no callback of a driver in which
    /// it is held does.
    pub fn with<R>(f: impl FnOnce(&Self) -> R) -> R {
        // SAFETY: May be called by any task; one that holds it would wait for itself, which is safe.
        unsafe { bindings::rtnl_lock() };
        // INVARIANT: Taken just now, and given back after the reference is gone.
        let result = f(&Self(PhantomData));
        // SAFETY: This task took the lock above. `f` could not give it back.
        unsafe { bindings::rtnl_unlock() };
        result
    }

    /// That of a task that holds it already. The kernel warns where nobody holds it, and where lockdep knows that it is
    /// another task who does.
    ///
    /// # Safety
    ///
    /// The current task must hold RTNL for as long as the result exists.
    pub unsafe fn assume_held() -> Self {
        // SAFETY: May be called by any task: it looks.
        unsafe { bindings::assert_rtnl() };
        // INVARIANT: The caller vouches that it is held.
        Self(PhantomData)
    }
}
