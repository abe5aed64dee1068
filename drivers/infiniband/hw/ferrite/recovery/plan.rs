// SPDX-License-Identifier: GPL-2.0

//! When a device that does not work is tried again, and when it is left alone.

use super::{
    LET_GO,
    SHUT_DOWN, //
};
use crate::{
    hardware::Cause,
    kernel_ext::devlink::Refusal, //
};
use kernel::prelude::*;

/// Milliseconds from a failure to each attempt to come back, one after the other. The first lets consumers
/// notice, and let go of what they have: those whose device is taken from them instead may not come back to
/// it.
pub(super) const WAITS: [u32; 5] = [1_000, 2_000, 4_000, 8_000, 16_000];

/// For so many milliseconds of life one attempt is forgiven: a device that keeps failing in less is left
/// alone in the end.
pub(super) const FORGIVEN_AFTER: u64 = 60_000;

/// What is to be done about a device that does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// To wait, for so many milliseconds: an attempt was planned just now.
    Planned(u32),
    /// To wait for the rest of it.
    Wait(u32),
    /// To try.
    Attempt,
    /// To leave it as it is, from now on, and to say why.
    GiveUp(&'static str),
    /// Nothing.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The device works, as far as is known.
    Working,
    /// It failed, and it is not known yet whether it is to be recovered.
    Reported,
    /// It failed, and is tried again at that time.
    Waiting { due: u64 },
    /// It failed, and is left alone.
    Stays,
}

/// Why no life begins any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The driver lets go of the function.
    LetGo,
    /// The machine shuts down.
    Shutdown,
}

impl End {
    /// What is said of it.
    pub(super) const fn refusal(self) -> Refusal {
        match self {
            Self::LetGo => LET_GO,
            Self::Shutdown => SHUT_DOWN,
        }
    }
}

/// How an attempt to begin a life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A life has begun.
    Began,
    /// None has.
    Failed,
    /// None has, as others reset the function, or the machine sleeps: it goes on after that.
    Interrupted,
    /// None has, nor does one any more.
    Over(End),
    /// None has, and none is to before the device has stopped: it may touch what it was told of.
    Unstoppable,
}

/// What devlink says about the failure of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) life: u32,
    /// Whether the device is to be recovered.
    pub(super) wanted: bool,
}

/// When a device that failed is tried again. Times are in milliseconds since some moment.
///
/// One task changes it, that of the work item: what others want they leave in [`Exchange`](super::exchange::Exchange).
pub(super) struct Plan {
    pub(super) phase: Phase,
    /// Attempts that are not forgiven, since somebody asked for one.
    pub(super) attempts: usize,
    /// The number of the last life that began.
    pub(super) life: u32,
    /// When that was.
    began: u64,
}

impl Plan {
    pub(super) const fn new() -> Self {
        Self {
            phase: Phase::Working,
            attempts: 0,
            life: 0,
            began: 0,
        }
    }

    /// A life begins.
    pub(super) fn begins(&mut self, now: u64) {
        self.phase = Phase::Working;
        self.life = self.life.saturating_add(1);
        self.began = now;
    }

    /// The device is seen not to work at `now`, and why. Gives whether that is news, which is to be reported.
    pub(super) fn notice(&mut self, now: u64, cause: Option<Cause>) -> bool {
        if self.phase != Phase::Working {
            return false;
        }
        let forgiven = now.saturating_sub(self.began) / FORGIVEN_AFTER;
        self.attempts = match cause {
            // Its own failures have nothing to do with that, however often the machine sleeps.
            Some(Cause::Sleep) => 0,
            _ => self.attempts.saturating_sub(forgiven as usize),
        };
        self.phase = Phase::Reported;
        true
    }

    /// What is to be done at `now` about a device that does not work, with what others have to say.
    pub(super) fn step(&mut self, asked: bool, verdict: Option<Verdict>, now: u64) -> Step {
        if asked {
            // Whatever was before is forgotten.
            self.attempts = 0;
            return Step::Attempt;
        }
        match self.phase {
            Phase::Reported => match verdict.filter(|verdict| verdict.life == self.life) {
                Some(verdict) if verdict.wanted => self.again(now, "it does not work for long"),
                Some(_) => self.give_up("devlink does not want it recovered"),
                None => Step::Nothing,
            },
            Phase::Waiting { due } if now < due => Step::Wait((due - now) as u32),
            Phase::Waiting { .. } => Step::Attempt,
            Phase::Working | Phase::Stays => Step::Nothing,
        }
    }

    /// An attempt has ended, which somebody `asked` for or not. Gives what is to be done then.
    pub(super) fn ended(&mut self, outcome: Outcome, asked: bool, now: u64) -> Step {
        match outcome {
            Outcome::Began => {
                self.begins(now);
                Step::Nothing
            }
            Outcome::Interrupted => {
                // It is not the device's fault, nor that of who asked: what he wants is done when that is over, by
                // itself, and he is told so.
                self.attempts = self.attempts.saturating_sub(1);
                self.phase = Phase::Waiting { due: now };
                Step::Wait(0)
            }
            Outcome::Over(_) => {
                self.rest();
                Step::Nothing
            }
            // Who asked is told, and may ask again.
            _ if asked => self.give_up("an attempt that was asked for failed"),
            Outcome::Failed => self.again(now, "it was tried often enough"),
            // It is to be stopped, and no life begins before: all memory that such a device knows is lost with each.
            Outcome::Unstoppable => self.again(now, "it cannot be stopped"),
        }
    }

    /// Plans the next attempt, if there is one; else this is `why`.
    fn again(&mut self, now: u64, why: &'static str) -> Step {
        let Some(wait) = WAITS.get(self.attempts).copied() else {
            return self.give_up(why);
        };
        self.attempts += 1;
        self.phase = Phase::Waiting {
            due: now + u64::from(wait),
        };
        Step::Planned(wait)
    }

    fn give_up(&mut self, why: &'static str) -> Step {
        self.rest();
        Step::GiveUp(why)
    }

    /// The device is left alone, which goes without saying.
    pub(super) fn rest(&mut self) {
        self.phase = Phase::Stays;
    }
}

#[kunit_tests(ferrite_recovery_plan)]
mod tests {
    use super::*;

    #[test]
    fn however_often_the_machine_sleeps_the_device_is_tried_again() {
        let mut plan = Plan::new();
        let wanted = |life| Some(Verdict { life, wanted: true });
        for round in 0..2 * WAITS.len() as u32 {
            assert!(plan.notice(0, Some(Cause::Sleep)));
            assert_eq!(plan.step(false, wanted(round), 0), Step::Planned(WAITS[0]));
            plan.begins(0);
        }
        // Other causes count.
        for round in 0.. {
            assert!(plan.notice(0, Some(Cause::Silent)));
            let step = plan.step(false, wanted(2 * WAITS.len() as u32 + round), 0);
            if matches!(step, Step::GiveUp(_)) {
                assert!((1..=WAITS.len() as u32).contains(&round));
                break;
            }
            plan.begins(0);
        }
    }
}
