// SPDX-License-Identifier: GPL-2.0

//! Waiting for readers (for `rust/kernel/sync/rcu.rs`).

use crate::bindings;

/// Waits until all who are in a section that RCU knows have left it: under its read lock, with bottom halves or
/// preemption off, or in an interrupt. Those who begin one meanwhile are not waited for. Sleeps.
///
/// What nobody finds any more before this is called, such readers have let go of when it returns.
pub fn synchronize() {
    // SAFETY: It may be called wherever one may sleep, and asks for nothing else.
    unsafe { bindings::synchronize_rcu() };
}
