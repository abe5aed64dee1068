// SPDX-License-Identifier: GPL-2.0

//! How long consumers are waited for that let go of their queue pairs, before a life ends.

use crate::rdma::QpState;
use kernel::prelude::*;

/// For how many milliseconds at most those are waited for who are letting go of their queue pairs when a life is to
/// end, and how often it is looked whether they have.
const LETTING_GO: u64 = 10_000;

/// Who disconnects has said so to the peer so many milliseconds later. With what passes before it is looked for the
/// first time ([`WAITS`](super::plan::WAITS)) it is less than the core waits for the answer before it tries again (4.6 s).
const DISCONNECTED: u64 = 3_000;

/// What consumers in the kernel do with the queue pairs of a device that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Consumers {
    /// Somebody has brought one to its end, and not destroyed it yet.
    leaving: bool,
    /// Somebody has one that he uses, as far as he knows.
    using: bool,
}

impl Consumers {
    /// Counts one queue pair in.
    pub(crate) fn add(&mut self, state: QpState) {
        match state {
            QpState::Err => self.leaving = true,
            QpState::Reset => {}
            _ => self.using = true,
        }
    }
}

/// Whether to wait for those who let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// No longer.
    Over,
    Longer,
    /// And nobody has to say anything to peers any more ([`Hardware::refuse_management`](crate::hardware::Hardware::refuse_management)).
    WithoutManagement,
}

/// The time that those who let go of a device are given.
pub(super) struct Farewell {
    began: u64,
    /// Since when nobody uses a queue pair.
    unused: Option<u64>,
}

impl Farewell {
    pub(super) const fn new(now: u64) -> Self {
        Self {
            began: now,
            unused: None,
        }
    }

    /// What to do at a time at which consumers do that.
    pub(super) fn look(&mut self, now: u64, consumers: Consumers) -> Wait {
        // Those that use what they have wait for being told, which happens when the device is taken from them.
        if !consumers.leaving || now - self.began >= LETTING_GO {
            return Wait::Over;
        }
        if consumers.using {
            self.unused = None;
            return Wait::Longer;
        }
        match now - *self.unused.get_or_insert(now) {
            DISCONNECTED.. => Wait::WithoutManagement,
            _ => Wait::Longer,
        }
    }
}

#[kunit_tests(ferrite_recovery_farewell)]
mod tests {
    use super::*;

    fn consumers(states: &[QpState]) -> Consumers {
        let mut consumers = Consumers::default();
        for state in states {
            consumers.add(*state);
        }
        consumers
    }

    #[test]
    fn who_lets_go_is_waited_for_and_nobody_else() {
        let nobody = consumers(&[]);
        let idle = consumers(&[QpState::Rts, QpState::Reset]);
        let leaving = consumers(&[QpState::Reset, QpState::Err]);
        let mut farewell = Farewell::new(500);
        assert_eq!(farewell.look(500, nobody), Wait::Over);
        assert_eq!(farewell.look(500, idle), Wait::Over);
        assert_eq!(farewell.look(500, leaving), Wait::Longer);
        assert_eq!(farewell.look(600, nobody), Wait::Over);
        // Not for ever.
        assert_ne!(farewell.look(500 + LETTING_GO - 1, leaving), Wait::Over);
        assert_eq!(farewell.look(500 + LETTING_GO, leaving), Wait::Over);
    }

    #[test]
    fn peers_are_told_nothing_more_when_all_who_disconnect_have_said_so() {
        let leaving = consumers(&[QpState::Err]);
        let some = consumers(&[QpState::Err, QpState::Rts]);
        let mut farewell = Farewell::new(0);
        assert_eq!(farewell.look(0, some), Wait::Longer);
        // The last one has only now begun.
        assert_eq!(farewell.look(1000, leaving), Wait::Longer);
        assert_eq!(
            farewell.look(1000 + DISCONNECTED - 1, leaving),
            Wait::Longer
        );
        assert_eq!(
            farewell.look(1000 + DISCONNECTED, leaving),
            Wait::WithoutManagement
        );
        // Another one comes by.
        assert_eq!(farewell.look(1001 + DISCONNECTED, some), Wait::Longer);
        assert_eq!(farewell.look(1002 + DISCONNECTED, leaving), Wait::Longer);
    }
}
