// SPDX-License-Identifier: GPL-2.0

//! Which processors are online (for `rust/kernel/cpu.rs`), and whether this one is wanted.

use crate::bindings;

/// How many processors are online at the moment; at least one.
pub fn online() -> u32 {
    // SAFETY: The mask is a static of the kernel; it is only read.
    unsafe { bindings::cpumask_weight(&raw mut bindings::__cpu_online_mask) }.max(1)
}

/// The `n`-th online processor, counted around.
pub fn nth_online(n: u32) -> u32 {
    // SAFETY: The function takes any number, and counts around itself.
    unsafe { bindings::cpumask_local_spread(n, bindings::NUMA_NO_NODE) }
}

/// Whether another task wants this processor: who waits without sleeping should stop then.
#[inline]
pub fn need_resched() -> bool {
    // SAFETY: The function reads a flag of the current task, which is always there.
    unsafe { bindings::need_resched() }
}
