// SPDX-License-Identifier: GPL-2.0

//! How often something may be tried, and what who asks without end is made to wait.

#[cfg(not(split_no_tests))]
use kernel::prelude::*;

/// How long to wait before connecting again.
#[derive(Clone, Copy)]
pub(in crate::link) struct Backoff(u64);

impl Backoff {
    const SHORTEST: u64 = 100;
    const LONGEST: u64 = 5_000;
    /// Milliseconds of a connection that was good for something.
    const STEADY: u64 = 5_000;
    /// What a peer is waited for at most, and in the end at least, that accepts and ends it at once.
    const FLAPPING: u64 = 500;

    pub(super) const fn new() -> Self {
        Self(Self::SHORTEST)
    }

    /// Milliseconds, of which there are twice as many the next time.
    pub(super) fn next(&mut self) -> u64 {
        let now = self.0;
        self.0 = (now * 2).min(Self::LONGEST);
        now
    }

    /// A connection has ended that was up for so many milliseconds.
    pub(super) fn was_up(&mut self, time: u64) {
        if time >= Self::STEADY {
            *self = Self::new();
        } else {
            self.0 = self.0.min(Self::FLAPPING);
        }
    }
}

/// How often peers are answered: some at once, then one after the other with a pause. What they ask may take RTNL, which
/// all of the machine wants.
#[derive(Clone, Copy)]
pub(in crate::link) struct Pace {
    at_once: u64,
    /// Milliseconds for each.
    pause: u64,
    /// When all that was answered would be through if each had got its pause.
    through: u64,
}

impl Pace {
    /// For questions of a peer. At once: all that a host tells when it comes.
    pub(super) const QUESTIONS: Self = Self::new(256, 20);
    /// For hosts that come. At once: all there are, where an I/O unit has been away.
    pub(in crate::link) const HOSTS: Self = Self::new(64, 200);
    /// For those of them from one address: half of what there is at once, then less than half.
    pub(in crate::link) const HOSTS_OF_ONE: Self = Self::new(32, 500);

    pub(super) const fn new(at_once: u64, pause: u64) -> Self {
        Self {
            at_once,
            pause,
            through: 0,
        }
    }

    /// Milliseconds after which nothing is left to remember, whatever was answered before.
    pub(in crate::link) const fn memory(&self) -> u64 {
        self.at_once * self.pause
    }

    /// How many are answered within so many milliseconds, at the most.
    pub(in crate::link) const fn most_within(&self, time: u64) -> u64 {
        self.at_once + time / self.pause + 1
    }

    /// Whether it is as if nothing had been answered yet.
    pub(in crate::link) fn is_rested(&self, now: u64) -> bool {
        self.through <= now
    }

    /// Milliseconds until the next one may be answered.
    pub(in crate::link) fn wait(&self, now: u64) -> u64 {
        self.through
            .saturating_sub(now + (self.at_once - 1) * self.pause)
    }

    /// One is answered.
    pub(in crate::link) fn answered(&mut self, now: u64) {
        self.through = self.through.max(now) + self.pause;
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_steps_pace)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_to_connect_waits_longer_each_time_up_to_a_limit() {
        let mut backoff = Backoff::new();
        let mut before = 0;
        for _ in 0..20 {
            let now = backoff.next();
            assert!(now > before || now == Backoff::LONGEST);
            assert!(now <= Backoff::LONGEST);
            before = now;
        }
        assert_eq!(before, Backoff::LONGEST);
        // A peer that accepts and ends it at once is not met without end.
        for _ in 0..20 {
            backoff.was_up(Backoff::STEADY - 1);
            assert_eq!(backoff.next(), Backoff::FLAPPING);
        }
        backoff.was_up(Backoff::STEADY);
        assert_eq!(backoff.next(), Backoff::SHORTEST);
    }

    #[test]
    fn who_asks_without_end_is_answered_with_a_pause_for_each() {
        for new in [Pace::QUESTIONS, Pace::HOSTS, Pace::HOSTS_OF_ONE] {
            let mut pace = new;
            assert!(pace.is_rested(1000));
            let Pace { at_once, pause, .. } = new;
            for _ in 0..at_once {
                assert_eq!(pace.wait(1000), 0);
                pace.answered(1000);
            }
            assert_eq!(pace.wait(1000), pause);
            assert_eq!(pace.wait(1000 + pause), 0);
            pace.answered(1000 + pause);
            assert_eq!(pace.wait(1000 + pause), pause);
            // Who has been silent may ask as much as at first.
            assert!(!pace.is_rested(1000 + pause));
            assert!(pace.is_rested(1000 + pause + new.memory()));
            let later = 1000 + 10 * at_once * pause;
            for _ in 0..at_once {
                assert_eq!(pace.wait(later), 0);
                pace.answered(later);
            }
            assert!(pace.wait(later) != 0);
        }
    }
}
