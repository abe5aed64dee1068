// SPDX-License-Identifier: GPL-2.0

//! The memory of the machine (for `rust/kernel/mm.rs`).

use crate::bindings;
use kernel::types::NotThreadSafe;

/// How many bytes the kernel has in all.
pub fn total() -> u64 {
    // SAFETY: The function only reads a counter.
    unsafe { bindings::total_memory() }
}

/// While it lives, allocations of the current task start no reclaim, and may use reserves instead.
///
/// For the few that are made by what reclaim itself may wait for.
#[must_use = "it ends when it is dropped"]
pub struct NoReclaim {
    flags: u32,
    /// It is the task's, which has to end it.
    _task: NotThreadSafe,
}

impl NoReclaim {
    /// Begins here.
    pub fn enter() -> Self {
        Self {
            // SAFETY: The function changes a flag of the current task, which `drop` restores.
            flags: unsafe { bindings::memalloc_noreclaim_save() },
            _task: NotThreadSafe,
        }
    }
}

impl Drop for NoReclaim {
    fn drop(&mut self) {
        // SAFETY: The flags are those of `enter`, by the same task, as `self` cannot be sent.
        unsafe { bindings::memalloc_noreclaim_restore(self.flags) }
    }
}
