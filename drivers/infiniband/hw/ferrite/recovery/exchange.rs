// SPDX-License-Identifier: GPL-2.0

//! What devlink is told of failures and attempts, and what it asks for.

use super::{
    plan::Verdict,
    LET_GO, //
};
use crate::kernel_ext::devlink::{
    Refusal,
    Standing, //
};
use kernel::prelude::*;

/// What passes between the work item, who talks to devlink, and who asks for an attempt.
///
/// None of them waits for the others but who asks, with the devlink instance locked. Who talks to devlink
/// waits for that lock, and so has work of his own.
pub(super) struct Exchange {
    /// Nobody listens any more.
    pub(super) closed: bool,
    /// How often was asked for an attempt.
    asked: u64,
    /// How many of these were answered.
    answered: u64,
    /// The last answer: the life that is there.
    answer: Result<u32, Refusal>,
    pub(super) verdict: Option<Verdict>,
    /// The last life that began.
    life: u32,
    /// The last life that devlink knows of.
    pub(super) counted: u32,
    /// Whether it has failed.
    failed: bool,
    /// Whether that was reported.
    reported: bool,
}

impl Exchange {
    pub(super) const fn new() -> Self {
        Self {
            closed: false,
            asked: 0,
            answered: 0,
            answer: Ok(0),
            verdict: None,
            life: 0,
            counted: 0,
            failed: false,
            reported: false,
        }
    }

    /// A life has begun. One whose failure was not reported is [replaced](Self::renews) silently: devlink counts
    /// no recovery without an error.
    pub(super) fn begins(&mut self, life: u32) {
        if self.failed && !self.reported {
            self.renews(life);
        } else {
            self.starts(life);
        }
    }

    /// A life has begun in place of one that devlink takes for working: there is nothing to count but what it has
    /// not counted before.
    pub(super) fn renews(&mut self, life: u32) {
        let due = self.life.saturating_sub(self.counted);
        self.starts(life);
        self.counts(life.saturating_sub(due));
    }

    fn starts(&mut self, life: u32) {
        self.life = life;
        self.failed = false;
        self.reported = false;
        self.verdict = None;
    }

    /// devlink has counted the lives up to this one, or is not to.
    pub(super) fn counts(&mut self, life: u32) {
        self.counted = self.counted.max(life);
    }

    /// It has failed.
    pub(super) fn fails(&mut self) {
        self.failed = true;
    }

    /// What devlink is to say and to count, and the life whose failure is to be reported after that, if there is one.
    /// To be called with its instance locked: whoever asked has taken his answer by then, and devlink acted on it,
    /// or he never does.
    ///
    /// Both at once, as a life may begin and fail between: devlink has to take the one for healthy whose failure it is
    /// told, and would not want the device recovered.
    pub(super) fn news(&mut self) -> (Standing, Option<u32>) {
        let standing = self.standing();
        (standing, self.take_report())
    }

    /// What devlink is to say and to count.
    pub(super) fn standing(&mut self) -> Standing {
        let recovered = self.life.saturating_sub(self.counted);
        self.counts(self.life);
        Standing {
            // What is about to be reported is news, so that devlink has to take the device for healthy
            // before.
            healthy: !(self.failed && self.reported),
            recovered,
        }
    }

    /// The life whose failure is to be reported, if there is one: once.
    pub(super) fn take_report(&mut self) -> Option<u32> {
        if !self.failed || self.reported {
            return None;
        }
        self.reported = true;
        Some(self.life)
    }

    /// Somebody asks for an attempt. Gives the number of the question.
    pub(super) fn ask(&mut self) -> Result<u64, Refusal> {
        if self.closed {
            return Err(LET_GO);
        }
        self.asked += 1;
        Ok(self.asked)
    }

    /// The question that is not answered, if there is one.
    pub(super) fn question(&self) -> Option<u64> {
        (self.asked > self.answered).then_some(self.asked)
    }

    /// What is to be considered now: a question, else what devlink said. That is kept while there is a
    /// question, as it may not come to an attempt.
    pub(super) fn take(&mut self) -> (Option<u64>, Option<Verdict>) {
        let question = self.question();
        let verdict = match question {
            Some(_) => None,
            None => self.verdict.take(),
        };
        (question, verdict)
    }

    /// Answers all questions up to this one.
    pub(super) fn answer(&mut self, question: u64, answer: Result<u32, Refusal>) {
        self.answered = question;
        self.answer = answer;
    }

    /// The answer to a question, if there is one.
    pub(super) fn take_answer(&self, question: u64) -> Option<Result<u32, Refusal>> {
        if self.closed {
            return Some(Err(LET_GO));
        }
        (self.answered >= question).then_some(self.answer)
    }
}
