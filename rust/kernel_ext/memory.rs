// SPDX-License-Identifier: GPL-2.0

//! The memory of the machine (for `rust/kernel/mm.rs`).

use crate::bindings;

/// How many bytes the kernel has in all.
pub fn total() -> u64 {
    // SAFETY: The function only reads a counter.
    unsafe { (bindings::totalram_pages() as u64) << kernel::page::PAGE_SHIFT }
}

/// Calls `f`, in which allocations of the current task start no reclaim, and may use reserves instead.
///
/// For the few that are made by what reclaim itself may wait for.
pub fn without_reclaim<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: The function changes a flag of the current task, which is always there.
    let flags = unsafe { bindings::memalloc_noreclaim_save() };
    let result = f();
    // SAFETY: The flags are those that were saved above, by the same task. It nests: what is called in
    // between has ended its own.
    unsafe { bindings::memalloc_noreclaim_restore(flags) };
    result
}
