// SPDX-License-Identifier: GPL-2.0

//! Tests of attempts, of what devlink is told of them, and of what they have to do with each other.

use super::plan::{
    Phase,
    FORGIVEN_AFTER, //
};
use super::*;
use crate::{
    kernel_ext::{
        devlink::Standing,
        errno, //
    },
    vector_map, //
};

#[kunit_tests(ferrite_recovery)]
mod suite {
    use super::*;

    const WANTED: bool = true;

    #[test]
    fn a_layout_is_one_that_there_is_and_that_the_device_can_have() {
        let mut spreading = Spreading::new();
        let refused = |spreading: &mut Spreading, name: &[u8], error| {
            let refusal = spreading.set(name);
            assert!(refusal.is_err_and(|refusal| refusal.error() == error));
            assert_eq!(spreading.layout, vector_map::DEFAULT);
        };
        refused(&mut spreading, b"one/two", EINVAL);
        // Without a table all is as always.
        refused(&mut spreading, b"one/cpu", errno::eopnotsupp());
        assert_eq!(spreading.set(b"cpu/cpu"), Ok(()));
        spreading.has_table = true;
        refused(&mut spreading, b"one/two", EINVAL);
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        let layout = spreading.layout;
        assert_eq!(layout.name().to_bytes(), b"one/cpu");
        assert_eq!(spreading.of_life(), layout);
        // A device that comes back without it has what it can, and that does not count as what it was before.
        spreading.has_table = false;
        assert_eq!(spreading.of_life(), vector_map::DEFAULT);
        spreading.begins(vector_map::DEFAULT);
        assert!(!spreading.take_back(layout));
        spreading.has_table = true;
        assert_eq!(spreading.of_life(), layout);
        // Nor does it where somebody sets the one that it has by now.
        spreading.has_table = false;
        assert_eq!(spreading.set(b"cpu/cpu"), Ok(()));
        assert!(!spreading.take_back(vector_map::DEFAULT));
        assert_eq!(spreading.layout, vector_map::DEFAULT);
    }

    /// A parameter with which a life has begun, and that layout.
    fn spreading(name: &[u8]) -> Result<(Spreading, Layout)> {
        let layout = Layout::parse(name).ok_or(EINVAL)?;
        let mut spreading = Spreading {
            has_table: true,
            ..Spreading::new()
        };
        assert_eq!(spreading.set(name), Ok(()));
        spreading.begins(layout);
        assert_eq!(spreading.before, None);
        Ok((spreading, layout))
    }

    #[test]
    fn a_layout_with_which_no_life_begins_is_what_the_last_one_had() -> Result {
        let (mut spreading, one) = spreading(b"one/cpu")?;
        // Nothing is new, and nothing to take back.
        assert!(!spreading.take_back(one));
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        assert!(!spreading.take_back(one));
        assert_eq!(spreading.layout, one);
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        let two = spreading.layout;
        assert!(spreading.take_back(two));
        assert_eq!(spreading.layout, one);
        // Once: the next failure is not for that.
        assert!(!spreading.take_back(one));
        // What a life has begun with stays.
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        spreading.begins(two);
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, two);
        Ok(())
    }

    #[test]
    fn who_sets_a_layout_while_another_is_tried_has_it_tried() -> Result {
        let (mut spreading, one) = spreading(b"one/cpu")?;
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        let two = spreading.layout;
        // Nobody waits for that, and another one is set before it fails.
        assert_eq!(spreading.set(b"function/cpu"), Ok(()));
        let three = spreading.layout;
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, three);
        // That fails too: neither is what it was before.
        assert!(spreading.take_back(three));
        assert_eq!(spreading.layout, one);
        // The first one succeeds, and is what it was before the second.
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        assert_eq!(spreading.set(b"function/cpu"), Ok(()));
        spreading.begins(two);
        assert_eq!(spreading.layout, three);
        assert!(spreading.take_back(three));
        assert_eq!(spreading.layout, two);
        // And who sets what it was before has nothing taken back.
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, two);
        Ok(())
    }

    #[test]
    fn a_device_whose_layout_was_taken_back_is_tried_as_one_that_failed() {
        let mut plan = begun(0);
        assert_eq!(plan.step(true, None, 7), Step::Attempt);
        // Not as an attempt that was asked for.
        assert_eq!(
            plan.ended(Outcome::Failed, false, 7),
            Step::Planned(WAITS[0])
        );
        let due = 7 + u64::from(WAITS[0]);
        // Whatever devlink says of the failure that it was told of.
        assert_eq!(
            plan.step(false, verdict(1, !WANTED), 8),
            Step::Wait(WAITS[0] - 1)
        );
        assert_eq!(plan.step(false, None, due), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Began, false, due), Step::Nothing);
    }

    fn verdict(life: u32, wanted: bool) -> Option<Verdict> {
        Some(Verdict { life, wanted })
    }

    /// A plan whose first life begins at `now`.
    fn begun(now: u64) -> Plan {
        let mut plan = Plan::new();
        plan.begins(now);
        plan
    }

    /// The device fails at `now`, and devlink wants it recovered.
    fn fails(plan: &mut Plan, now: u64) -> Step {
        assert!(plan.notice(now, None));
        assert_eq!(plan.step(false, None, now), Step::Nothing);
        let verdict = verdict(plan.life, WANTED);
        plan.step(false, verdict, now)
    }

    #[test]
    fn a_failure_is_reported_once_and_tried_again_when_its_time_has_come() {
        let mut plan = begun(5);
        assert_eq!(fails(&mut plan, 100), Step::Planned(WAITS[0]));
        assert!(!plan.notice(100, None));
        // Whoever looks sooner waits for the rest.
        assert_eq!(plan.step(false, None, 100), Step::Wait(WAITS[0]));
        let due = 100 + u64::from(WAITS[0]);
        assert_eq!(plan.step(false, None, due - 1), Step::Wait(1));
        assert_eq!(plan.step(false, None, due), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Began, false, due), Step::Nothing);
        assert_eq!(plan.life, 2);
        assert!(plan.notice(due, None));
    }

    #[test]
    fn attempts_come_to_an_end_with_growing_waits() {
        let mut plan = begun(0);
        let mut now = 0;
        let mut last = 0;
        let mut step = fails(&mut plan, now);
        let mut attempts = 0;
        while let Step::Planned(wait) = step {
            assert!(wait > last);
            last = wait;
            now += u64::from(wait);
            assert_eq!(plan.step(false, None, now), Step::Attempt);
            attempts += 1;
            step = plan.ended(Outcome::Failed, false, now);
        }
        assert_eq!(attempts, WAITS.len());
        assert!(matches!(step, Step::GiveUp(_)));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
    }

    /// How many lives of so many milliseconds there are before the device is left alone, up to 100.
    fn lives_of(length: u64) -> usize {
        let mut plan = begun(0);
        let mut now = length;
        let mut lives = 0;
        while let Step::Planned(wait) = fails(&mut plan, now) {
            now += u64::from(wait);
            assert_eq!(plan.step(false, None, now), Step::Attempt);
            plan.ended(Outcome::Began, false, now);
            now += length;
            lives += 1;
            if lives == 100 {
                break;
            }
        }
        lives
    }

    #[test]
    fn a_device_that_keeps_failing_is_left_alone_and_one_that_works_between_is_not() {
        assert_eq!(lives_of(0), WAITS.len());
        assert_eq!(lives_of(10_000), WAITS.len());
        assert_eq!(lives_of(FORGIVEN_AFTER - 1), WAITS.len());
        assert_eq!(lives_of(FORGIVEN_AFTER), 100);
    }

    #[test]
    fn attempts_are_forgiven_one_by_one() {
        let mut plan = begun(0);
        plan.attempts = 4;
        assert_eq!(
            fails(&mut plan, 2 * FORGIVEN_AFTER),
            Step::Planned(WAITS[2])
        );
        plan.begins(0);
        assert_eq!(
            fails(&mut plan, 100 * FORGIVEN_AFTER),
            Step::Planned(WAITS[0])
        );
    }

    #[test]
    fn a_failure_that_is_not_to_be_recovered_stays() {
        let mut plan = begun(0);
        assert!(plan.notice(7, None));
        let step = plan.step(false, verdict(1, !WANTED), 7);
        assert!(matches!(step, Step::GiveUp(_)));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
        // It is said once.
        assert_eq!(plan.step(false, verdict(1, WANTED), 8), Step::Nothing);
    }

    #[test]
    fn what_is_said_of_another_life_does_not_count() {
        let mut plan = begun(0);
        assert!(plan.notice(7, None));
        assert_eq!(plan.step(true, None, 7), Step::Attempt);
        plan.ended(Outcome::Began, true, 8);
        assert!(plan.notice(9, None));
        assert_eq!(plan.step(false, verdict(1, !WANTED), 9), Step::Nothing);
        let step = plan.step(false, verdict(2, WANTED), 9);
        assert_eq!(step, Step::Planned(WAITS[0]));
    }

    #[test]
    fn who_asks_begins_anew_in_each_phase() {
        let due = u64::from(WAITS[0]);
        let phases = [Phase::Reported, Phase::Waiting { due }, Phase::Stays];
        for phase in phases {
            let mut plan = begun(0);
            plan.attempts = WAITS.len();
            plan.phase = phase;
            assert_eq!(plan.step(true, None, 0), Step::Attempt);
            plan.ended(Outcome::Began, true, 1);
            assert_eq!(plan.phase, Phase::Working);
            assert_eq!(fails(&mut plan, 1), Step::Planned(WAITS[0]));

            // An attempt by hand that fails is not followed by others.
            plan.phase = phase;
            assert_eq!(plan.step(true, None, 0), Step::Attempt);
            let step = plan.ended(Outcome::Failed, true, 1);
            assert!(matches!(step, Step::GiveUp(_)));
            assert_eq!(
                plan.step(false, verdict(2, WANTED), u64::MAX),
                Step::Nothing
            );
        }
    }

    #[test]
    fn a_reset_by_others_uses_up_no_attempt() {
        let mut plan = begun(0);
        assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
        let now = u64::from(WAITS[0]);
        assert_eq!(plan.step(false, None, now), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Interrupted, true, now), Step::Wait(0));
        assert_eq!(plan.ended(Outcome::Interrupted, false, now), Step::Wait(0));
        assert_eq!(plan.attempts, 0);
        assert_eq!(plan.step(false, None, now), Step::Attempt);
    }

    #[test]
    fn a_reset_after_shutdown_lets_nothing_begin() {
        let mut current = Current::new();
        current.shut_down = true;
        for held in [true, true, false] {
            current.hold(Holder::Reset, held);
            current.attempts();
            assert_eq!(current.outcome(), Outcome::Over(End::Shutdown));
            let hindrance = current.hindrance();
            assert_eq!(hindrance, Some((current.outcome(), SHUT_DOWN)));
        }
        // Whatever else there is to say of it.
        current.unstoppable = true;
        assert_eq!(current.outcome(), Outcome::Over(End::Shutdown));
    }

    #[test]
    fn what_is_over_is_not_planned_again_and_its_reason_is_said() {
        for (end, why) in [(End::LetGo, LET_GO), (End::Shutdown, SHUT_DOWN)] {
            for asked in [false, true] {
                let mut plan = begun(0);
                assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
                assert_eq!(plan.ended(Outcome::Over(end), asked, 1), Step::Nothing);
                assert_eq!(
                    plan.step(false, verdict(1, WANTED), u64::MAX),
                    Step::Nothing
                );
            }
            for taken_back in [false, true] {
                assert_eq!(refusal(Outcome::Over(end), taken_back, EIO), why);
            }
        }
    }

    #[test]
    fn a_device_that_is_left_alone_without_a_word_is_reported_all_the_same() {
        let mut plan = begun(0);
        assert!(plan.notice(7, Some(Cause::Shutdown)));
        plan.rest();
        // What devlink says of it comes to nothing.
        assert_eq!(plan.step(false, verdict(1, WANTED), 7), Step::Nothing);
        assert!(!plan.notice(8, Some(Cause::Shutdown)));
    }

    #[test]
    fn an_attempt_that_others_reset_is_not_one_that_failed_however_short_that_was() {
        let mut current = Current::new();
        assert!(!current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Failed);
        current.hold(Holder::Reset, true);
        assert!(current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // Also where it is over before the attempt is taken down.
        current.hold(Holder::Reset, false);
        assert!(current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // And where it began before the attempt.
        current.hold(Holder::Reset, true);
        current.attempts();
        assert!(current.is_interrupted());
        current.hold(Holder::Reset, false);
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // What was over before is none of the next one's.
        current.attempts();
        assert!(!current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Failed);
        // A device that cannot be stopped uses up its attempts, whoever else resets it.
        current.unstoppable = true;
        assert_eq!(current.outcome(), Outcome::Unstoppable);
        current.hold(Holder::Reset, true);
        assert_eq!(current.outcome(), Outcome::Unstoppable);
    }

    #[test]
    fn who_holds_a_function_lets_go_of_it_for_nobody_else() {
        const HOLDERS: [Holder; 3] = [Holder::Reset, Holder::Bus, Holder::Sleep];
        for first in HOLDERS {
            for second in HOLDERS.into_iter().filter(|second| *second != first) {
                let mut current = Current::new();
                current.hold(first, true);
                current.hold(second, true);
                current.hold(second, false);
                assert!(current.is_held_for(first) && !current.is_held_for(second));
                assert_eq!(current.hindrance(), Some((Outcome::Interrupted, HELD)));
                current.hold(first, false);
                assert_eq!(current.hindrance(), None);
            }
        }
    }

    #[test]
    fn a_bus_that_was_given_up_works_again_after_a_reset_and_one_that_recovers_by_itself() {
        let mut current = Current::new();
        current.hold_for_bus(7);
        current.was_reset(7);
        assert_eq!(current.hindrance(), Some((Outcome::Interrupted, HELD)));
        current.bus_gone = true;
        assert_eq!(current.hindrance(), Some((Outcome::Interrupted, NO_BUS)));
        current.was_reset(8);
        assert_eq!(current.hindrance(), None);
    }

    #[test]
    fn a_bus_that_was_given_up_without_a_word_works_again_after_a_reset() {
        let mut current = Current::new();
        current.hold_for_bus(7);
        current.was_reset(7 + FROZEN - 1);
        assert!(current.is_held_for(Holder::Bus));
        // Another error, of which the PCI core recovers.
        current.hold_for_bus(9);
        current.was_reset(7 + FROZEN);
        assert!(current.is_held_for(Holder::Bus));
        current.was_reset(9 + FROZEN);
        assert_eq!(current.hindrance(), None);
        // Nothing that others hold it for.
        current.hold_for_bus(10);
        current.hold(Holder::Sleep, true);
        current.was_reset(10 + FROZEN);
        assert!(current.is_held_for(Holder::Sleep) && !current.is_held_for(Holder::Bus));
    }

    #[test]
    fn nothing_reaches_a_device_while_its_bus_is_frozen() {
        let freeze = Freeze::new();
        // What is done only where it may be.
        let reaches = |now| {
            let mut done = false;
            let reached = freeze.reach(
                || now,
                || {
                    done = true;
                    now
                },
            );
            assert_eq!(reached, done.then_some(now));
            done
        };
        assert!(reaches(0) && reaches(u64::MAX));
        freeze.begins(0);
        assert!(!reaches(0) && !reaches(FROZEN - 1));
        // Nobody has said that it is over.
        assert!(reaches(FROZEN));
        freeze.begins(9);
        // Another error.
        freeze.begins(10);
        assert!(!reaches(9 + FROZEN) && reaches(10 + FROZEN));
        freeze.ends();
        assert!(reaches(10));
    }

    #[test]
    fn who_asked_is_told_whether_it_goes_on_without_him() {
        let of = |outcome, taken_back| refusal(outcome, taken_back, EIO);
        let on = of(Outcome::Interrupted, false);
        assert!(on.error() == EBUSY && on != HELD);
        // The layout that was asked for is not what it goes on with.
        assert_eq!(of(Outcome::Interrupted, true), HELD);
        for outcome in [Outcome::Failed, Outcome::Unstoppable] {
            assert!([true, false].map(|back| of(outcome, back).error()) == [EIO; 2]);
        }
        assert!(of(Outcome::Failed, true) != of(Outcome::Failed, false));
    }

    #[test]
    fn a_device_that_cannot_be_stopped_is_tried_again_with_growing_waits_and_not_for_ever() {
        let mut plan = begun(0);
        let mut now = 0;
        let mut step = fails(&mut plan, now);
        for wait in WAITS {
            assert_eq!(step, Step::Planned(wait));
            now += u64::from(wait);
            assert_eq!(plan.step(false, None, now), Step::Attempt);
            step = plan.ended(Outcome::Unstoppable, false, now);
        }
        assert_eq!(step, Step::GiveUp("it cannot be stopped"));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
        // Who asks has it tried once.
        assert_eq!(plan.step(true, None, now), Step::Attempt);
        let step = plan.ended(Outcome::Unstoppable, true, now);
        assert!(matches!(step, Step::GiveUp(_)));
    }

    #[test]
    fn a_device_that_is_stopped_at_last_comes_back_as_others_do() {
        let mut plan = begun(0);
        assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
        let first = u64::from(WAITS[0]);
        assert_eq!(plan.step(false, None, first), Step::Attempt);
        let step = plan.ended(Outcome::Unstoppable, false, first);
        assert_eq!(step, Step::Planned(WAITS[1]));
        let second = first + u64::from(WAITS[1]);
        assert_eq!(plan.step(false, None, second), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Began, false, second), Step::Nothing);
        assert_eq!((plan.phase, plan.life), (Phase::Working, 2));
        // What was tried until then counts.
        assert_eq!(fails(&mut plan, second), Step::Planned(WAITS[2]));
    }

    #[test]
    fn a_question_that_comes_to_nothing_leaves_what_devlink_said() -> Result {
        let mut exchange = exchange();
        exchange.verdict = verdict(1, WANTED);
        let question = exchange.ask().map_err(|_| EINVAL)?;
        assert_eq!(exchange.take(), (Some(question), None));
        exchange.answer(question, Err(HELD));
        assert_eq!(exchange.take(), (None, verdict(1, WANTED)));
        assert_eq!(exchange.take(), (None, None));
        Ok(())
    }

    /// As [`Recovery::open`] leaves it.
    fn exchange() -> Exchange {
        let mut exchange = Exchange::new();
        exchange.begins(1);
        exchange.counted = 1;
        exchange
    }

    const HEALTHY: Standing = Standing {
        healthy: true,
        recovered: 0,
    };

    const FAILED: Standing = Standing {
        healthy: false,
        recovered: 0,
    };

    #[test]
    fn a_failure_is_reported_of_a_device_that_devlink_takes_for_healthy() {
        let mut exchange = exchange();
        assert_eq!(exchange.take_report(), None);
        exchange.fails();
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(1));
        assert_eq!(exchange.take_report(), None);
        assert_eq!(exchange.standing(), FAILED);
        exchange.begins(2);
        let recovered = Standing {
            recovered: 1,
            ..HEALTHY
        };
        assert_eq!(exchange.standing(), recovered);
        assert_eq!(exchange.standing(), HEALTHY);
        // What there was to report is of the life before.
        assert_eq!(exchange.take_report(), None);
    }

    #[test]
    fn what_fails_before_devlink_was_told_that_it_began_is_reported_of_a_healthy_device() {
        let mut exchange = exchange();
        assert_eq!(exchange.news(), (HEALTHY, None));
        exchange.fails();
        assert_eq!(exchange.news(), (HEALTHY, Some(1)));
        assert_eq!(exchange.news(), (FAILED, None));
        // Nobody has told devlink of this one when it fails as well.
        exchange.begins(2);
        exchange.fails();
        let recovered = Standing {
            recovered: 1,
            ..HEALTHY
        };
        assert_eq!(exchange.news(), (recovered, Some(2)));
        assert_eq!(exchange.news(), (FAILED, None));
    }

    #[test]
    fn who_asks_while_a_failure_is_reported_leaves_a_device_that_can_be_reported_again() {
        let mut exchange = exchange();
        exchange.fails();
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(1));
        // Before devlink has said whether it wants that, somebody asks, and has it.
        let question = exchange.ask().unwrap_or(0);
        assert_eq!(exchange.question(), Some(question));
        assert_eq!(exchange.take_answer(question), None);
        exchange.begins(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.question(), None);
        // That life fails as well, before he has his answer.
        exchange.fails();
        assert_eq!(exchange.take_answer(question), Some(Ok(2)));
        exchange.counts(2);
        // devlink counted that one by itself, and the failure is news.
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(2));
        assert_eq!(exchange.standing(), FAILED);
    }

    #[test]
    fn what_nobody_waited_for_is_counted_all_the_same() {
        let mut exchange = exchange();
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(1));
        let question = exchange.ask().unwrap_or(0);
        exchange.begins(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.standing().recovered, 1);
        // Who asks after him is not given his answer.
        let next = exchange.ask().unwrap_or(0);
        assert_eq!(exchange.take_answer(next), None);
        assert_eq!(exchange.question(), Some(next));
        exchange.answer(next, Err(HELD));
        assert_eq!(exchange.take_answer(next), Some(Err(HELD)));
    }

    #[test]
    fn a_device_that_worked_and_begins_anew_is_not_counted_whoever_waits() {
        let mut exchange = exchange();
        let question = exchange.ask().unwrap_or(0);
        exchange.renews(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.standing(), HEALTHY);
        // One that failed before is, also where somebody set a layout.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(2));
        let question = exchange.ask().unwrap_or(0);
        exchange.begins(3);
        exchange.answer(question, Ok(3));
        assert_eq!(exchange.take_answer(question), Some(Ok(3)));
        assert_eq!(exchange.standing().recovered, 1);
        // And stays so where it begins anew before devlink has counted that.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(3));
        exchange.begins(4);
        exchange.renews(5);
        assert_eq!(exchange.standing().recovered, 1);
        assert_eq!(exchange.standing(), HEALTHY);
    }

    #[test]
    fn what_devlink_was_not_told_of_is_no_recovery() {
        let mut exchange = exchange();
        exchange.fails();
        exchange.begins(2);
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), None);
        // The next failure is one, and what was to be counted before it is not lost.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(2));
        exchange.begins(3);
        exchange.fails();
        exchange.begins(4);
        assert_eq!(exchange.standing().recovered, 1);
        assert_eq!(exchange.standing(), HEALTHY);
    }

    #[test]
    fn nobody_waits_for_a_driver_that_lets_go() {
        let mut exchange = exchange();
        exchange.fails();
        let question = exchange.ask().unwrap_or(0);
        exchange.closed = true;
        assert_eq!(exchange.take_answer(question), Some(Err(LET_GO)));
        assert_eq!(exchange.ask(), Err(LET_GO));
    }
}
