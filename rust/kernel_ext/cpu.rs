// SPDX-License-Identifier: GPL-2.0

//! Which processors there are, and are online (for `rust/kernel/cpu.rs`), and whether this one is wanted.

use crate::bindings;
use kernel::cpu::nr_cpu_ids;
use kernel::types::NotThreadSafe;

/// How many processors there are, online or not; at least one.
pub fn present() -> u32 {
    // SAFETY: The mask is a static of the kernel; it is only read.
    unsafe { bindings::cpumask_weight(&raw mut bindings::__cpu_present_mask) }.max(1)
}

/// The `n`-th processor that there is, online or not, counted around.
pub fn nth_present(n: u32) -> u32 {
    let n = (n % present()) as usize;
    let mut processors = possible().filter(|cpu| is_present(*cpu));
    // Somebody may have taken one out meanwhile.
    processors.nth(n).unwrap_or(0)
}

/// The numbers that a processor can have.
fn possible() -> core::ops::Range<u32> {
    0..nr_cpu_ids()
}

fn is_present(cpu: u32) -> bool {
    if !possible().contains(&cpu) {
        return false;
    }
    // SAFETY: The mask is a static of the kernel, of which single bits are read; there is one for each number
    // that a processor can have.
    unsafe { bindings::cpumask_test_cpu(cpu as i32, &raw mut bindings::__cpu_present_mask) }
}

/// Whether processor `cpu` is online at the moment.
pub fn is_online(cpu: u32) -> bool {
    if !possible().contains(&cpu) {
        return false;
    }
    // SAFETY: The mask is a static of the kernel, of which single bits are read; there is one for each number
    // that a processor can have.
    unsafe { bindings::cpumask_test_cpu(cpu as i32, &raw mut bindings::__cpu_online_mask) }
}

/// The processors that are online when their turn comes.
pub fn online() -> impl Iterator<Item = u32> {
    possible().filter(|cpu| is_online(*cpu))
}

/// Keeps processors from coming online and going offline until it is dropped.
///
/// # Invariants
///
/// The current task holds the lock of hotplug for reading, and it is this value's to give back.
pub struct HotplugLock(NotThreadSafe);

impl HotplugLock {
    /// Waits until none comes or goes. Sleeps. Not for who runs in the course of that.
    #[must_use = "processors come and go again as soon as it is dropped"]
    pub fn new() -> Self {
        // SAFETY: There are no preconditions but that this may sleep.
        unsafe { bindings::cpus_read_lock() };
        // INVARIANT: It was taken just now.
        Self(NotThreadSafe)
    }
}

impl Default for HotplugLock {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for HotplugLock {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this task has it; the value is not `Send`.
        unsafe { bindings::cpus_read_unlock() };
    }
}

/// Whether another task wants this processor: who waits without sleeping should stop then.
#[inline]
pub fn need_resched() -> bool {
    // SAFETY: The function reads a flag of the current task, which is always there.
    unsafe { bindings::need_resched() }
}

/// Lets another task have this processor if one wants it. May sleep.
#[inline]
pub fn cond_resched() {
    // SAFETY: The function may be called wherever sleeping is allowed, which callers see to, as for a mutex.
    unsafe { bindings::cond_resched() };
}

#[cfg(not(rdma_no_tests))]
#[kernel::prelude::kunit_tests(rust_cpu)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_around_and_some_are_online() {
        let present = present();
        for n in 0..present {
            let cpu = nth_present(n);
            assert!(is_present(cpu));
            assert_eq!(nth_present(n + present), cpu);
            assert!((0..n).all(|before| nth_present(before) != cpu));
        }
        assert!(online().count() > 0);
        assert!(online().all(is_present));
        // Whatever is asked for.
        assert!(!is_online(u32::MAX) && !is_present(u32::MAX));
    }
}
