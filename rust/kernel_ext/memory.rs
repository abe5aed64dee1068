// SPDX-License-Identifier: GPL-2.0

//! The memory of the machine (for `rust/kernel/mm.rs`).

use crate::bindings;

/// How many bytes the kernel has in all.
pub fn total() -> u64 {
    // SAFETY: The function only reads a counter.
    unsafe { bindings::total_memory() }
}
