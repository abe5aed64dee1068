// SPDX-License-Identifier: GPL-2.0

//! The release of tags, for which no turn of the device may be under way.

use super::answer::outcome_to_result;
use crate::requests::Outcome;
use kernel::{
    prelude::*,
    time::Delta, //
};

/// How long a turn of the device is waited for; most take some microseconds. A longer one takes as long as the
/// answer to a command.
pub(super) const TURN: Delta = Delta::from_micros(50);

/// Whether the turn that the device shows first is over, or is none; looks for that until `give_up` says so.
pub(super) fn is_over(first: u32, turn: impl Fn() -> u32, give_up: impl Fn() -> bool) -> bool {
    // Any later one has begun after the record was stored, and so with a look at it.
    let is_over = || first % 2 == 0 || turn() != first;
    loop {
        if is_over() {
            return true;
        }
        if give_up() {
            return false;
        }
    }
}

/// Ends a release that the device has by its record: before the answer, where the device shows its turns, was seen
/// to use no tag since, and is not dead; else with the answer.
pub(super) fn end_release(
    shows_turns: bool,
    uses_no_tag: impl FnOnce() -> bool,
    is_dead: impl FnOnce() -> bool,
    settle: impl FnOnce() -> Result<Outcome>,
) -> Result<Released> {
    // Of a device that was given up meanwhile it is not known what it does.
    if shows_turns && uses_no_tag() && !is_dead() {
        return Ok(Released::Unanswered);
    }
    settle().and_then(outcome_to_result)?;
    Ok(Released::Answered)
}

/// How a release ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// With the answer.
    Answered,
    /// Before it, but the device uses the tag no more.
    Unanswered,
}
