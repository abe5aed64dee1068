// SPDX-License-Identifier: GPL-2.0

//! The lock of all that concerns interfaces as such.
//!
//! C header: [`include/linux/rtnetlink.h`](srctree/include/linux/rtnetlink.h)

use crate::bindings;
use core::marker::PhantomData;

/// RTNL is held by this task, for as long as there is a reference to this.
pub struct Rtnl(PhantomData<*mut ()>);

impl Rtnl {
    /// Runs `f` with RTNL held. Sleeps. To be called by tasks that do not hold it: no callback of a driver in which
    /// it is held does.
    pub fn with<R>(f: impl FnOnce(&Self) -> R) -> R {
        // SAFETY: May be called by any task; one that holds it would wait for itself, which is safe.
        unsafe { bindings::rtnl_lock() };
        let result = f(&Self(PhantomData));
        // SAFETY: This task took the lock above. `f` could not give it back.
        unsafe { bindings::rtnl_unlock() };
        result
    }

    /// # Safety
    ///
    /// The current task must hold RTNL for as long as the result exists.
    pub(super) unsafe fn assume_held() -> Self {
        Self(PhantomData)
    }
}
