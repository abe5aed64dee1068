// SPDX-License-Identifier: GPL-2.0

//! What messages about a device have in common, of whatever kind it is (for `rust/kernel/print.rs`).
//!
//! C header: [`include/linux/kern_levels.h`](srctree/include/linux/kern_levels.h)

/// How much something matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Something failed.
    Error,
    /// Something is not as it should be.
    Warning,
    /// Nothing is wrong.
    Info,
}
