// SPDX-License-Identifier: GPL-2.0

//! How long a device is waited for.

use crate::requests::{
    Asked,
    Position,
    Requests,
    MOST_LONG, //
};
use kernel::{
    prelude::*,
    time::Msecs, //
};

/// How long the answer to the first command is waited for, in which the device says how long others
/// take.
pub(super) const FIRST_TIMEOUT: Msecs = 30_000;

/// How often to look whether a device is alive that does not answer. One that seems to be is taken
/// for dead after the time that it said itself ([`Cqp::set_timeout`](super::Cqp::set_timeout)), or the module's
/// `command_timeout_ms`.
const LOOK: Msecs = 1_000;

/// How long each look at a device takes that does not answer for `timeout`, and how many there are.
pub(super) fn looks(timeout: Msecs) -> (Msecs, u32) {
    let look = timeout.clamp(1, LOOK);
    (look, timeout.div_ceil(look).max(1))
}

/// How many looks of so many there may be in all at a command that the device has: each of the long
/// ones ahead of it may take its time, and then itself.
pub(super) fn all_looks(looks: u32) -> u32 {
    looks.saturating_mul(MOST_LONG + 1)
}

/// When a command was waited for long enough.
pub(super) struct Watch {
    looks: u32,
    left: u32,
    /// For one command that the device has: this one, or that which is in its way.
    left_for_one: u32,
    seen: Position,
}

/// Whether it is the same command that is waited for.
fn is_same(one: Position, other: Position) -> bool {
    match (one, other) {
        (Position::Queued { oldest: one, .. }, Position::Queued { oldest: other, .. }) => {
            one == other
        }
        (Position::Queued { .. }, _) | (_, Position::Queued { .. }) => false,
        _ => true,
    }
}

impl Watch {
    /// Over a command at `position`, for so many looks without anything done that it waits for.
    pub(super) fn new(looks: u32, position: Position) -> Self {
        Self {
            looks,
            left: looks,
            left_for_one: all_looks(looks),
            seen: position,
        }
    }

    /// Notes a look at a command that is at `position` now; returns whether it was the last one.
    pub(super) fn look(&mut self, position: Position) -> bool {
        // Others may be answered all the time: what is lost is found out by whoever waits for it.
        self.left_for_one = if is_same(position, self.seen) {
            self.left_for_one.saturating_sub(1)
        } else {
            all_looks(self.looks)
        };
        self.left = if position == self.seen {
            self.left.saturating_sub(1)
        } else {
            self.looks
        };
        self.seen = position;
        self.left == 0 || self.left_for_one == 0
    }
}

/// Waits until a command is done: `EINTR` where it was `killable` and is taken back, `ETIMEDOUT` where it
/// is given up, as the device is not `alive` or did nothing for so many `looks`. `sleep` waits for a look,
/// with `EINTR` if it is to end when the task is killed; it returns whether the command is done.
///
/// Who waits for his turn looks at the device as well: those whose commands it has may not be running.
pub(super) fn wait_for(
    requests: &Requests,
    asked: Asked<'_>,
    mut killable: bool,
    looks: u32,
    sleep: impl Fn(bool) -> Result<bool>,
    alive: impl Fn() -> bool,
) -> Result {
    let position = || requests.position(asked.ticket());
    let mut watch = Watch::new(looks, position());
    loop {
        match sleep(killable) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => {
                killable = false;
                match asked {
                    Asked::Request(request) if requests.withdraw(request) => return Err(EINTR),
                    _ => continue,
                }
            }
        }
        let last = watch.look(position());
        if (last || !alive()) && requests.give_up(asked) {
            return Err(ETIMEDOUT);
        }
    }
}

#[kunit_tests(ferrite_cqp_wait)]
mod tests {
    use super::*;
    use crate::requests::{
        stage::Stage,
        Outcome,
        Posted,
        SLOTS, //
    };
    use kernel::sync::atomic::{
        Atomic,
        Relaxed, //
    };

    #[test]
    fn a_time_out_is_divided_into_looks() {
        assert_eq!(looks(30_000), (1_000, 30));
        assert_eq!(looks(2_500), (1_000, 3));
        assert_eq!(looks(10), (10, 1));
        assert_eq!(looks(0), (1, 1));
        assert_eq!(all_looks(30), 150);
        assert_eq!(all_looks(u32::MAX), u32::MAX);
    }

    #[test]
    fn a_device_is_not_waited_for_without_end() {
        let mut watch = Watch::new(5, Position::InRing { ahead: 50 });
        let mut looks = 0;
        for ahead in (0..50).rev() {
            looks += 1;
            if watch.look(Position::InRing { ahead }) {
                break;
            }
        }
        assert_eq!(looks, all_looks(5));
        // In a queue, as long as there are answers to what is in the way; and then from the start.
        let queued = |answers, oldest| Position::Queued { answers, oldest };
        let mut watch = Watch::new(5, queued(0, 0));
        for answers in 1..1000 {
            assert!(!watch.look(queued(answers, answers / 20)));
        }
        for ahead in [3, 3, 3, 3, 3, 2, 2, 2, 2, 2] {
            assert!(!watch.look(Position::InRing { ahead }));
        }
        assert!(watch.look(Position::InRing { ahead: 2 }));
    }

    /// Waits for a command that was posted, with so many looks, at each of which `at_look` is called; returns the
    /// result, and the looks that took.
    fn wait_posted(
        stage: &Stage,
        posted: &Posted,
        looks: u32,
        at_look: impl Fn(u32),
        alive: bool,
    ) -> Result<(Result, u32)> {
        let ticket = stage.ticket(posted)?;
        let count = Atomic::new(0u32);
        let sleep = |killable: bool| {
            assert!(!killable);
            at_look(count.fetch_add(1, Relaxed) + 1);
            Ok(ticket.done.try_wait())
        };
        let asked = Asked::Posted(&ticket);
        let result = wait_for(&stage.requests, asked, false, looks, sleep, || alive);
        let looks = count.load(Relaxed);
        // From then on there is nothing to wait for.
        let again = wait_for(&stage.requests, asked, false, 5, sleep, || alive);
        assert_eq!((again, count.load(Relaxed)), (Ok(()), looks + 1));
        assert!(stage.ticket(posted).is_err());
        Ok((result, looks))
    }

    #[test]
    fn what_was_posted_is_waited_for_as_often_as_one_likes() -> Result {
        let stage = Stage::new()?;
        let posted = stage.post(1, 7)?;
        let answer = |at| {
            if at == 3 {
                stage.answer_next();
            }
        };
        let result = wait_posted(&stage, &posted, 5, answer, true)?;
        assert_eq!(result, (Ok(()), 3));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_lost_is_found_out_by_who_waits_for_it() -> Result {
        // Others are answered all the time.
        let stage = Stage::new()?;
        let lost = stage.post(1, 7)?;
        let others = |at: u32| {
            assert!(stage.post(2, at).is_ok());
            stage.answer(at as usize);
        };
        let result = wait_posted(&stage, &lost, 5, others, true)?;
        assert_eq!(result, (Err(ETIMEDOUT), 5));
        // Its place is not used again, and what the device says later is nobody's.
        assert_eq!(stage.requests.outcome_yet(&lost), Some(Outcome::Lost));
        assert!(!stage.answer(0));
        // A device that is gone is not waited for.
        let stage = Stage::new()?;
        let posted = stage.post(1, 7)?;
        let result = wait_posted(&stage, &posted, 30, |_| (), false)?;
        assert_eq!(result, (Err(ETIMEDOUT), 1));
        Ok(())
    }

    #[test]
    fn who_is_killed_takes_back_what_waits_but_waits_for_what_the_device_has() -> Result {
        let stage = Stage::full_of(1, SLOTS + 1)?;
        let wait_killed = |who: usize, move_on: bool| {
            let request = stage.request(who);
            let looks = Atomic::new(0u32);
            let sleep = |killable: bool| {
                if move_on && !stage.is_in_ring(who) && looks.load(Relaxed) == 0 {
                    stage.answer_next();
                    stage.answer_next();
                }
                looks.fetch_add(1, Relaxed);
                if killable {
                    return Err(EINTR);
                }
                if looks.load(Relaxed) > 3 {
                    while stage.position(who) != Position::Done {
                        stage.answer_next();
                    }
                }
                Ok(request.ticket.done.try_wait())
            };
            let asked = Asked::Request(request);
            wait_for(&stage.requests, asked, true, 30, sleep, || true)
        };
        // It is gone; the one before it is given to the device while it is being killed.
        assert_eq!(wait_killed(SLOTS, false), Err(EINTR));
        assert_eq!(stage.position(SLOTS), Position::Done);
        assert!(stage.is_queued(SLOTS - 1));
        assert_eq!(wait_killed(SLOTS - 1, true), Ok(()));
        Ok(())
    }
}
