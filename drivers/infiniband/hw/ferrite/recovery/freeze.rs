// SPDX-License-Identifier: GPL-2.0

//! A bus that is frozen by an error, of which the PCI core recovers by a reset.

use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

/// For how many milliseconds a bus may be frozen: longer than the PCI core waits for a function after a reset of the
/// bus. It says when it gives up, but not all kernels do.
pub(super) const FROZEN: u64 = 75_000;

/// Whether a bus is frozen.
pub(super) struct Freeze {
    /// Until when, in milliseconds; zero where it is not.
    until: Atomic<u64>,
}

impl Freeze {
    /// Of a bus that is not.
    pub(super) fn new() -> Self {
        Self {
            until: Atomic::new(0),
        }
    }

    /// It is from `now` on.
    pub(super) fn begins(&self, now: u64) {
        self.until.store(now + FROZEN, Relaxed);
    }

    /// It is not, or not any more.
    pub(super) fn ends(&self) {
        self.until.store(0, Relaxed);
    }

    /// Does something to a function on it, unless it is frozen. What time it is it asks only where that matters.
    pub(super) fn reach<T>(
        &self,
        now: impl FnOnce() -> u64,
        what: impl FnOnce() -> T,
    ) -> Option<T> {
        let until = self.until.load(Relaxed);
        let frozen = until != 0 && now() < until;
        (!frozen).then(what)
    }
}
