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

/// Calls `f`, in which allocations of the current task start no input or output: they wait for no disk.
///
/// For those whom somebody waits for who makes a disk work again.
pub fn without_io<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: The function changes a flag of the current task, which is always there.
    let flags = unsafe { bindings::memalloc_noio_save() };
    let result = f();
    // SAFETY: The flags are those that were saved above, by the same task. It nests: what is called in
    // between has ended its own.
    unsafe { bindings::memalloc_noio_restore(flags) };
    result
}

/// Tells lockdep that reclaim may wait for what `f` takes, before it happens: from then on it complains of whoever
/// allocates memory, by which reclaim begins, while he has the same.
pub fn taken_in_reclaim(f: impl FnOnce()) {
    // SAFETY: The function notes for the current task that it is in reclaim, until the call below.
    unsafe { bindings::fs_reclaim_acquire(bindings::GFP_KERNEL) };
    f();
    // SAFETY: The note is that of above, by the same task.
    unsafe { bindings::fs_reclaim_release(bindings::GFP_KERNEL) };
}
