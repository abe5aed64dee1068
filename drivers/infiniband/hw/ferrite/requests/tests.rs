// SPDX-License-Identifier: GPL-2.0

//! Tests of the order of commands, with a device and users that do as they are told.

use super::slots::SlotSet;
use super::turns::QUEUES;
use super::*;
use crate::{
    abi::CommandOpcode,
    kernel_ext::user, //
};
use stage::Stage;

#[kunit_tests(ferrite_requests)]
mod suite {
    use super::*;

    /// How a command ended that did what it was to do, as it is remembered.
    const DONE: Outcome = Outcome::Answered {
        status: 0,
        result: 0,
    };

    /// Slots for others than memory management.
    const OTHERS: usize = SLOTS - KEPT as usize;

    #[test]
    fn a_command_passes_those_whose_callers_do_not_run() -> Result {
        // None of them ever looks at its answer.
        let mut stage = Stage::full_of(1, OTHERS + 70)?;
        let victim = stage.ask(2, Class::Short)?;
        assert!(stage.is_queued(victim));
        stage.answer_next();
        stage.answer_next();
        assert!(stage.is_in_ring(victim));
        for _ in 0..OTHERS {
            stage.answer_next();
        }
        assert_eq!(stage.position(victim), Position::Done);
        assert!(stage.request(victim).ticket.done.try_wait());
        // The same again and again.
        for _ in 0..3 {
            let victim = stage.ask(2, Class::Short)?;
            while stage.position(victim) != Position::Done {
                stage.answer_next();
            }
        }
        Ok(())
    }

    #[test]
    fn what_has_room_is_given_at_once_and_one_doorbell_is_rung_for_each() -> Result {
        let mut stage = Stage::new()?;
        for count in 1..=OTHERS as u32 {
            let who = stage.ask(1, Class::Short)?;
            assert!(stage.is_in_ring(who));
            assert_eq!(stage.memory.told.get(), count);
            assert_eq!(stage.memory.doorbells.get(), count);
        }
        let waits = stage.ask(1, Class::Short)?;
        assert!(stage.is_queued(waits));
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        // Nobody waits: nothing to tell.
        stage.requests.withdraw(stage.request(waits));
        stage.answer_next();
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        Ok(())
    }

    #[test]
    fn one_doorbell_is_rung_for_all_that_answers_make_room_for() -> Result {
        let mut stage = Stage::full_of(1, 3 * OTHERS)?;
        let doorbells = stage.memory.doorbells.get();
        // None is given while they are taken: a quick device does not keep up who takes them.
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(stage.finish(cookie));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS);
        // Who comes then is not ahead of those who wait.
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + 1);
        let (_, cookie) = stage.memory.given.borrow()[1];
        assert!(stage.finish(cookie));
        let late = stage.ask(1, Class::Short)?;
        assert!(stage.is_queued(late));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + 2);
        assert_eq!(stage.memory.doorbells.get(), doorbells + 2);
        assert!(stage.answer_some(2..OTHERS, 8));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + OTHERS);
        assert_eq!(stage.memory.told.get(), (OTHERS + OTHERS) as u32);
        assert_eq!(stage.memory.doorbells.get(), doorbells + 3);
        // Nor is anything given to a device that died while they were taken.
        let (_, cookie) = stage.memory.given.borrow()[OTHERS];
        assert!(stage.finish(cookie));
        stage.requests.state.lock().closed = true;
        stage.requests.put_waiting(&stage.memory);
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + OTHERS);
        Ok(())
    }

    #[test]
    fn there_are_fewer_slots_than_ring_entries() -> Result {
        let mut stage = Stage::full_of(1, 2 * ENTRIES)?;
        for _ in 0..ENTRIES {
            stage.ask(1, Class::Reclaim)?;
            stage.ask(1, Class::Long)?;
        }
        assert_eq!(stage.memory.given.borrow().len(), ENTRIES - 1);
        Ok(())
    }

    #[test]
    fn a_slot_in_flight_is_not_given_out() -> Result {
        let stage = Stage::full_of(1, 5 * SLOTS)?;
        let mut answered = 0;
        // The first one is never answered.
        for at in 1..3 * SLOTS {
            assert!(stage.answer(at));
            answered += 1;
            let given = stage.memory.given.borrow();
            assert_eq!(given.len(), OTHERS + answered);
            let (_, new) = given[given.len() - 1];
            let in_flight = given[..given.len() - 1].iter().enumerate();
            for (_, (_, cookie)) in in_flight.filter(|(other, _)| *other == 0 || *other > at) {
                assert!(slot_of(*cookie) != slot_of(new));
            }
        }
        Ok(())
    }

    #[test]
    fn memory_is_taken_back_ahead_of_all_who_wait() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 200)?;
        // Who asks for the same on behalf of others waits.
        let other = stage.ask(2, Class::Short)?;
        let first = stage.ask(3, Class::Reclaim)?;
        assert!(stage.is_in_ring(first));
        assert!(stage.is_queued(other));
        let (second, third) = (stage.ask(3, Class::Reclaim)?, stage.ask(4, Class::Reclaim)?);
        assert!(stage.is_queued(second) && stage.is_queued(third));
        // Any slot that gets free; who has had one comes after who has not.
        assert_eq!(stage.next(2)?.as_slice(), [third, second].as_slice());
        // Its own is not given to others.
        let at = stage.memory.given.borrow().len() - 1;
        let before = stage.memory.given.borrow().len();
        assert!(stage.answer(at));
        assert!(stage.answer(at - 1));
        assert!(stage.answer(OTHERS));
        let after = stage.memory.given.borrow().len();
        // Three were given back, and one is kept.
        assert_eq!(after - before, 2);
        assert!(stage.ask_now(1, Class::Short).is_err());
        assert!(stage.ask_now(3, Class::Reclaim).is_ok());
        Ok(())
    }

    #[test]
    fn others_go_on_while_a_user_has_memory_taken_back_all_the_time() -> Result {
        let mut stage = Stage::new()?;
        for _ in 0..3 * SLOTS {
            stage.ask(1, Class::Reclaim)?;
        }
        let other = stage.ask(2, Class::Short)?;
        assert!(stage.is_in_ring(other));
        for _ in 0..OTHERS {
            stage.ask(2, Class::Short)?;
        }
        let last = stage.ask(2, Class::Short)?;
        let mut answers = 0;
        while !stage.is_in_ring(last) {
            stage.answer_next();
            stage.ask(1, Class::Reclaim)?;
            answers += 1;
            assert!(answers < 4 * SLOTS);
        }
        Ok(())
    }

    #[test]
    fn users_have_their_turns_however_many_threads_each_has() -> Result {
        let mut stage = Stage::full_of(1, 3 * OTHERS)?;
        let (a, b) = (stage.ask(2, Class::Short)?, stage.ask(2, Class::Short)?);
        let c = stage.ask(user::KERNEL, Class::Short)?;
        let first = OTHERS;
        let expected = [first, a, c, first + 1, b, first + 2, first + 3];
        assert_eq!(stage.next(7)?.as_slice(), expected.as_slice());
        // Memory management too: it does not wait for all that one user has taken back.
        let mut stage = Stage::full_of(1, OTHERS)?;
        for _ in 0..100 {
            stage.ask(1, Class::Reclaim)?;
        }
        let kernel = stage.ask(user::KERNEL, Class::Reclaim)?;
        assert!(stage.next(2)?.contains(&kernel));
        Ok(())
    }

    #[test]
    fn more_users_than_queues_share_them() -> Result {
        let mut stage = Stage::full_of(0, OTHERS)?;
        for user in 0..3 * QUEUES as u64 {
            stage.ask(user, Class::Short)?;
            stage.ask(user, Class::Short)?;
        }
        let given = stage.next(6 * QUEUES)?;
        assert_eq!(given.len(), 6 * QUEUES);
        // Each of them once.
        for who in OTHERS..OTHERS + 6 * QUEUES {
            assert!(given.contains(&who));
        }
        // Those who share do so with as few others as can be: each has the second turn of a queue.
        let mut stage = Stage::full_of(0, OTHERS)?;
        for users in [0..2 * QUEUES, 0..QUEUES] {
            for user in users {
                stage.ask(user as u64, Class::Short)?;
            }
        }
        for round in 0..3 {
            let given = stage.next(QUEUES)?;
            let first = OTHERS + round * QUEUES;
            assert!((first..first + QUEUES).all(|who| given.contains(&who)));
        }
        Ok(())
    }

    #[test]
    fn few_long_commands_are_ahead_of_anybody() -> Result {
        let mut stage = Stage::new()?;
        for _ in 0..MOST_LONG + 80 {
            stage.ask(1, Class::Long)?;
        }
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize);
        let other = stage.ask(2, Class::Long)?;
        let short = stage.ask(1, Class::Short)?;
        assert_eq!(stage.position(short), Position::InRing { ahead: MOST_LONG });
        // One for one; what is short makes no room for them.
        assert!(stage.answer(MOST_LONG as usize));
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize + 1);
        assert!(stage.next(2)?.contains(&other));
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize + 3);
        // Who cannot wait does not: there are slots, but it would be behind them.
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        let mut stage = Stage::new()?;
        stage.ask(1, Class::Long)?;
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        stage.answer_next();
        assert!(stage.ask_now(2, Class::Short).is_ok());
        Ok(())
    }

    #[test]
    fn a_long_command_is_not_behind_all_short_ones_that_wait() -> Result {
        let mut stage = Stage::full_of(1, 3 * OTHERS)?;
        let long = stage.ask(2, Class::Long)?;
        let reclaim = stage.ask(3, Class::Reclaim)?;
        assert!(stage.is_in_ring(reclaim) && stage.is_queued(long));
        let reclaim = stage.ask(3, Class::Reclaim)?;
        // One answer makes room for none of them: the slot is kept.
        assert_eq!(
            stage.next(4)?.as_slice(),
            [reclaim, long, OTHERS].as_slice()
        );
        Ok(())
    }

    #[test]
    fn all_learn_at_once_that_the_device_died() -> Result {
        let mut stage = Stage::full_of(1, SLOTS + 300)?;
        stage.ask(2, Class::Long)?;
        stage.ask(2, Class::Reclaim)?;
        let count = stage.ask(2, Class::Reclaim)? + 1;
        // Nobody but who says so runs.
        stage.requests.close();
        for who in 0..count {
            assert!(stage.request(who).ticket.done.try_wait());
            let outcome = stage.requests.outcome(&stage.request(who).ticket);
            assert_eq!(outcome, Outcome::Lost);
        }
        assert_eq!(stage.ask(1, Class::Reclaim).map(|_| ()), Err(EIO));
        assert_eq!(stage.ask_now(1, Class::Short).map(|_| ()), Err(EIO));
        // What the device says later is nobody's.
        let given = stage.memory.given.borrow().len();
        assert!((0..given).all(|at| !stage.answer(at)));
        assert_eq!(stage.memory.given.borrow().len(), given);
        Ok(())
    }

    #[test]
    fn what_is_taken_back_leaves_the_others_in_order() -> Result {
        let stage = Stage::full_of(1, OTHERS + 6)?;
        let first = OTHERS;
        for who in [first, first + 2, first + 5] {
            assert!(stage.requests.withdraw(stage.request(who)));
            assert!(!stage.requests.withdraw(stage.request(who)));
        }
        assert!(!stage.requests.withdraw(stage.request(0)));
        let next = stage.next(4)?;
        assert_eq!(
            next.as_slice(),
            [first + 1, first + 3, first + 4].as_slice()
        );
        Ok(())
    }

    #[test]
    fn an_answer_is_for_one_use_of_a_slot() -> Result {
        let mut stage = Stage::new()?;
        for use_of_it in 0..200 {
            stage.ask(1, Class::Short)?;
            // Of before, or of none at all.
            assert!((0..use_of_it).rev().take(5).all(|at| !stage.answer(at)));
            for cookie in [SLOTS as u32, u32::MAX, 1, use_of_it as u32] {
                assert!(!stage.finish(cookie));
            }
            assert!(stage.answer(use_of_it));
            assert!(!stage.answer(use_of_it));
        }
        Ok(())
    }

    #[test]
    fn a_late_answer_touches_nothing() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 2)?;
        assert!(stage.requests.give_up(Asked::Request(stage.request(0))));
        // Nor does one that waits.
        assert!(stage
            .requests
            .give_up(Asked::Request(stage.request(OTHERS + 1))));
        let before = stage.memory.given.borrow().len();
        assert!(!stage.answer(0));
        assert_eq!(stage.memory.given.borrow().len(), before);
        assert!(!stage.request(0).ticket.done.try_wait());
        assert!(stage.answer(1));
        assert_eq!(stage.memory.given.borrow().len(), before + 1);
        // What is done was not given up.
        assert!(!stage.requests.give_up(Asked::Request(stage.request(1))));
        let who = stage.ask(1, Class::Short)?;
        for at in 2..OTHERS {
            assert!(stage.answer(at));
        }
        assert!(stage.is_in_ring(who));
        let cookie = stage.memory.given.borrow()[0].1;
        let given = stage.memory.given.borrow();
        assert!(given[1..]
            .iter()
            .all(|(_, c)| slot_of(*c) != slot_of(cookie)));
        Ok(())
    }

    #[test]
    fn a_reply_is_its_requests_own() -> Result {
        let mut stage = Stage::new()?;
        for at in 0..20u8 {
            let who = stage.ask(1, Class::Short)?;
            stage.memory.reply.set(at + 1);
            assert!(stage.answer(who));
            stage.memory.reply.set(0xff);
        }
        for at in 0..20u8 {
            let outcome = stage.requests.outcome(&stage.request(at.into()).ticket);
            assert!(
                outcome
                    == Outcome::Answered {
                        status: 0,
                        result: 8
                    }
            );
            let mut reply = [0; Reply::SIZE];
            stage.requests.reply(stage.request(at.into()), &mut reply);
            assert!(reply.iter().all(|byte| *byte == at + 1));
        }
        Ok(())
    }

    /// Posts commands of a user's until one would have to wait; returns how many it were.
    fn post_all(stage: &Stage, user: u64) -> Result<u32> {
        let mut count = 0;
        loop {
            match stage.post(user, count) {
                Ok(_) => count += 1,
                Err(error) if error == EAGAIN => return Ok(count),
                Err(error) => return Err(error),
            }
            assert!(count <= SLOTS as u32);
        }
    }

    #[test]
    fn slots_are_found_whatever_word_they_are_in() {
        let all = SlotSet::all();
        assert_eq!((all.len() as usize, all.first()), (SLOTS, Some(0)));
        assert!(all.iter().eq(0..SLOTS));
        let mut set = SlotSet::default();
        assert_eq!((set.len(), set.first()), (0, None));
        for slot in [SLOTS - 1, 64, 63, 0] {
            set.insert(slot);
            assert_eq!(set.first(), Some(slot));
        }
        // None that there is not.
        set.insert(SLOTS);
        set.insert(2 * SLOTS + 2);
        assert!(set.iter().eq([0, 63, 64, SLOTS - 1]));
        set.remove(63);
        assert!(set.iter().eq([0, 64, SLOTS - 1]));
    }

    #[test]
    fn what_is_posted_is_given_at_once_and_its_answer_kept() -> Result {
        let stage = Stage::new()?;
        let (one, other) = (stage.post(1, 11)?, stage.post(1, 12)?);
        let (first, second) = (stage.ticket(&one)?, stage.ticket(&other)?);
        assert_eq!(
            (stage.memory.told.get(), stage.memory.doorbells.get()),
            (2, 2)
        );
        assert_eq!(
            stage.requests.position(&second),
            Position::InRing { ahead: 1 }
        );
        assert_eq!(stage.requests.outcome_yet(&one), None);
        // In any order, and each is told apart.
        let (_, cookie) = stage.memory.given.borrow()[1];
        let answered = stage.requests.finish(cookie, 7, 0, &stage.memory);
        assert_eq!(
            answered,
            Some(Answered::Posted {
                what: PostedFor::Making,
                number: 12
            })
        );
        let outcome = Outcome::Answered {
            status: 7,
            result: 0,
        };
        assert_eq!(stage.requests.outcome_yet(&other), Some(outcome));
        assert!(second.done.try_wait() && !first.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&one), None);
        assert!(stage.answer(0) && !stage.answer(1));
        assert!(first.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&one), Some(DONE));
        assert_eq!(stage.requests.outcome_yet(&other), Some(outcome));
        let state = stage.requests.state.lock();
        assert_eq!(state.posted, SlotSet::default());
        assert_eq!(state.free, SlotSet::all());
        assert!(state.in_ring == [0; 3]);
        Ok(())
    }

    #[test]
    fn what_the_device_has_is_seen_also_when_it_is_given_up() -> Result {
        let mut stage = Stage::full_of(1, 2)?;
        let posted = stage.post(1, 11)?;
        // Its place is used again, by the one that is the youngest then.
        assert!(stage.answer(0));
        stage.ask(1, Class::Long)?;
        let query = CommandOpcode::QueryQueuePair.number();
        let expected = [
            (query, None),
            (
                CommandOpcode::RegisterRegion.number(),
                Some(PostedFor::Making),
            ),
            (query, None),
        ];
        let check = |is_expected: bool| -> Result {
            let view = stage.requests.look()?;
            assert_eq!((view.producer, view.told, view.answers), (4, 4, 1));
            assert_eq!((view.free, view.waiting), (SLOTS as u32 - 3, 0));
            assert_eq!((view.closed, view.registrations()), (!is_expected, 1));
            let seen = view.commands.iter();
            assert!(seen
                .map(|command| (command.opcode, command.posted))
                .eq(expected));
            assert!(view
                .commands
                .iter()
                .all(|command| command.expected == is_expected));
            Ok(())
        };
        check(true)?;
        // By name, as long as the answer is expected.
        let (_, cookie) = stage.memory.given.borrow()[2];
        let opcode = stage.requests.opcode_of(cookie);
        assert_eq!(opcode, Some(CommandOpcode::RegisterRegion.number()));
        let (_, answered) = stage.memory.given.borrow()[0];
        assert_eq!(stage.requests.opcode_of(answered), None);
        assert_eq!(stage.requests.opcode_of(u32::MAX), None);
        stage.requests.close();
        check(false)?;
        assert_eq!(stage.requests.opcode_of(cookie), None);
        stage.requests.forget(&posted);
        // Those who wait are counted.
        let stage = Stage::full_of(1, OTHERS + 5)?;
        let view = stage.requests.look()?;
        assert_eq!((view.free, view.waiting), (KEPT, 5));
        assert_eq!(view.commands.len(), OTHERS);
        Ok(())
    }

    #[test]
    fn who_posts_all_the_time_takes_nobodys_place() -> Result {
        let mut stage = Stage::new()?;
        assert_eq!(post_all(&stage, 1)?, MOST_POSTED_BY_ONE);
        // Nobody takes the answers, and others post too.
        assert_eq!(post_all(&stage, 2)?, MOST_POSTED_BY_ONE);
        let rest = MOST_POSTED - 2 * MOST_POSTED_BY_ONE;
        assert_eq!(post_all(&stage, 3)?, rest);
        assert_eq!(post_all(&stage, user::KERNEL)?, 0);
        // Then they wait as ever, in places that are left.
        for _ in 0..OTHERS as u32 - MOST_POSTED {
            let who = stage.ask(4, Class::Short)?;
            assert!(stage.is_in_ring(who));
        }
        let reclaim = stage.ask(5, Class::Reclaim)?;
        assert!(stage.is_in_ring(reclaim));
        // Nor do they and memory management together.
        let mut stage = Stage::new()?;
        for who in 1..4 {
            post_all(&stage, who)?;
        }
        for _ in 0..MOST_RECLAIM {
            let reclaim = stage.ask(5, Class::Reclaim)?;
            assert!(stage.is_in_ring(reclaim));
        }
        let who = stage.ask(4, Class::Short)?;
        assert!(stage.is_in_ring(who));
        // An answer makes room for another of the same.
        let mut stage = Stage::new()?;
        assert_eq!(post_all(&stage, 1)?, MOST_POSTED_BY_ONE);
        stage.answer_next();
        assert_eq!(post_all(&stage, 1)?, 1);
        // What is waited for does not count.
        let who = stage.ask(1, Class::Short)?;
        assert!(stage.is_in_ring(who));
        assert_eq!(post_all(&stage, 2)?, MOST_POSTED_BY_ONE);
        Ok(())
    }

    #[test]
    fn what_is_posted_overtakes_nobody_and_waits_for_no_place() -> Result {
        let stage = Stage::full_of(1, OTHERS)?;
        assert_eq!(stage.post(2, 9).map(|_| ()), Err(EAGAIN));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS);
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        let mut stage = Stage::full_of(1, OTHERS + 1)?;
        // A place is free, but is another's.
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(stage.finish(cookie));
        assert_eq!(stage.post(2, 9).map(|_| ()), Err(EAGAIN));
        stage.requests.put_waiting(&stage.memory);
        assert!(stage.is_in_ring(OTHERS));
        // Nor one that comes later.
        let late = stage.ask(3, Class::Short)?;
        assert!(stage.is_queued(late));
        assert!(stage.answer(1));
        assert!(stage.is_in_ring(late));
        assert!(stage.answer(2));
        assert!(stage.post(2, 9).is_ok());
        Ok(())
    }

    #[test]
    fn who_posted_may_be_gone_when_the_answer_comes() -> Result {
        let stage = Stage::new()?;
        for round in 0..3 * ENTRIES {
            drop(stage.post(1, round as u32)?);
            assert!(stage.answer(round));
            assert!(!stage.answer(round));
        }
        // Or when there will be none.
        drop(stage.post(1, 5)?);
        stage.requests.close();
        assert!(!stage.answer(3 * ENTRIES));
        Ok(())
    }

    #[test]
    fn what_was_posted_is_lost_with_the_device() -> Result {
        let mut stage = Stage::new()?;
        let (answered, lost) = (stage.post(1, 1)?, stage.post(1, 2)?);
        let waiting = stage.ticket(&lost)?;
        stage.answer_next();
        stage.ask(1, Class::Short)?;
        stage.requests.close();
        assert_eq!(stage.requests.outcome_yet(&lost), Some(Outcome::Lost));
        assert!(waiting.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&answered), Some(DONE));
        assert!(!stage.answer(1));
        assert_eq!(stage.post(1, 3).map(|_| ()), Err(EIO));
        // It is known from then on, and not given up.
        assert!(!stage.requests.give_up(Asked::Posted(&waiting)));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_done_leaves_no_more_behind_than_can_be_in_flight() -> Result {
        let stage = Stage::new()?;
        let spare = || stage.requests.state.lock().spare.len() as u32;
        let mut posted = KVec::new();
        for at in 0..4 * ENTRIES {
            posted.push(stage.post(1, at as u32)?, GFP_KERNEL)?;
            assert_eq!(spare(), 0);
            assert!(stage.answer(at));
            assert_eq!(spare(), 1);
        }
        for one in &posted {
            assert_eq!(stage.requests.outcome_yet(one), Some(DONE));
        }
        assert!(stage.requests.state.lock().failures.is_empty());
        for _ in 0..3 {
            let first = stage.memory.given.borrow().len();
            for user in 1..4 {
                post_all(&stage, user)?;
            }
            let last = stage.memory.given.borrow().len();
            assert_eq!(last - first, MOST_POSTED as usize);
            assert!(stage.answer_some(first..last, 8));
            assert_eq!(spare(), MOST_POSTED);
        }
        Ok(())
    }

    #[test]
    fn what_posting_took_is_that_of_the_next_as_soon_as_nobody_looks_at_it() -> Result {
        let stage = Stage::new()?;
        let address = |ticket: &Arc<Ticket>| -> *const Ticket { &**ticket };
        // Nobody does: of another user, in flight, and not done.
        let one = stage.post(1, 1)?;
        let first = address(&stage.ticket(&one)?);
        assert!(stage.answer(0));
        let other = stage.post(2, 2)?;
        let ticket = stage.ticket(&other)?;
        assert_eq!((address(&ticket), ticket.user), (first, 2));
        assert!(!ticket.done.try_wait());
        let position = |ticket| stage.requests.position(ticket);
        assert_eq!(position(&ticket), Position::InRing { ahead: 0 });
        // Somebody waits: what he looks at stays as it is.
        assert!(stage.answer(1));
        let next = stage.ticket(&stage.post(1, 3)?)?;
        assert!(address(&next) != first);
        assert!(ticket.done.try_wait() && !next.done.try_wait());
        assert_eq!(
            (position(&ticket), stage.requests.outcome(&ticket)),
            (
                Position::Done,
                Outcome::Answered {
                    status: 0,
                    result: 8
                }
            )
        );
        // A name is that of one command, whatever has its slot.
        assert_eq!(stage.requests.outcome_yet(&one), Some(DONE));
        stage.requests.forget(&one);
        assert!(!next.done.try_wait());
        assert!(stage.answer(2));
        assert!(next.done.try_wait());
        Ok(())
    }

    #[test]
    fn what_was_posted_and_failed_is_known_until_it_is_forgotten() -> Result {
        let stage = Stage::new()?;
        let outcome = |status| Outcome::Answered { status, result: 0 };
        let mut posted = KVec::new();
        for at in 0..2 * ENTRIES {
            posted.push(stage.post(1, at as u32)?, GFP_KERNEL)?;
            let (_, cookie) = stage.memory.given.borrow()[at];
            // Every third of them is done.
            let finished = stage
                .requests
                .finish(cookie, at as u32 % 3, 0, &stage.memory);
            assert!(finished.is_some());
        }
        for (at, one) in posted.iter().enumerate() {
            let expected = outcome(at as u32 % 3);
            assert_eq!(stage.requests.outcome_yet(one), Some(expected));
            stage.requests.forget(one);
            assert_eq!(stage.requests.outcome_yet(one), Some(DONE));
        }
        assert!(stage.requests.state.lock().failures.is_empty());
        Ok(())
    }

    #[test]
    fn what_is_posted_by_the_record_is_told_with_the_next_doorbell() -> Result {
        let mut stage = Stage::new()?;
        let seen = |stage: &Stage| {
            (
                stage.memory.stored.get(),
                stage.memory.told.get(),
                stage.memory.doorbells.get(),
            )
        };
        let about = |number| (PostedFor::Release, number);
        stage.post_for(1, about(1), Telling::Record)?;
        stage.post_for(1, about(2), Telling::Record)?;
        assert_eq!(seen(&stage), (2, 0, 0));
        // One doorbell, with which all is told, by who waits for another command.
        stage.ask(2, Class::Short)?;
        assert_eq!(seen(&stage), (3, 3, 1));
        // And by who waits for what was posted; no second one for the same.
        stage.post_for(1, about(4), Telling::Record)?;
        for _ in 0..2 {
            stage.requests.ring_for_posted(&stage.memory);
            assert_eq!(seen(&stage), (4, 4, 2));
        }
        // When there are some, without anybody who waits.
        for at in 1..MOST_UNTOLD {
            stage.post_for(1, about(at), Telling::Record)?;
            assert_eq!(seen(&stage), (4 + at, 4, 2));
        }
        stage.post_for(2, about(0), Telling::Record)?;
        let all = 4 + MOST_UNTOLD;
        assert_eq!(seen(&stage), (all, all, 3));
        // A device that is dead is told nothing.
        stage.post_for(2, about(5), Telling::Record)?;
        stage.requests.close();
        stage.requests.ring_for_posted(&stage.memory);
        assert_eq!(seen(&stage), (all + 1, all, 3));
        Ok(())
    }

    #[test]
    fn what_is_forgotten_in_flight_leaves_nothing_behind() -> Result {
        let stage = Stage::new()?;
        for (at, fails) in [false, true].into_iter().enumerate() {
            let posted = stage.post_for(1, (PostedFor::Release, 7), Telling::Record)?;
            stage.requests.forget(&posted);
            // It still has its place.
            assert!(stage.requests.ticket(&posted).is_some());
            let (_, cookie) = stage.memory.given.borrow()[at];
            let answered = stage
                .requests
                .finish(cookie, u32::from(fails), 0, &stage.memory);
            let what = PostedFor::Release;
            assert_eq!(answered, Some(Answered::Posted { what, number: 7 }));
            assert!(stage.requests.state.lock().failures.is_empty());
        }
        Ok(())
    }

    #[test]
    fn what_was_posted_and_given_up_keeps_its_place() -> Result {
        let stage = Stage::new()?;
        let posted = stage.post(1, 1)?;
        let ticket = stage.ticket(&posted)?;
        assert!(stage.requests.give_up(Asked::Posted(&ticket)));
        assert_eq!(stage.requests.outcome_yet(&posted), Some(Outcome::Lost));
        // Whoever else waits for it is told.
        assert!(ticket.done.try_wait());
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(!stage.answer(0));
        for round in 1..2 * SLOTS {
            stage.post(1, round as u32)?;
            let (_, next) = stage.memory.given.borrow()[round];
            assert!(slot_of(next) != slot_of(cookie));
            assert!(stage.answer(round));
        }
        Ok(())
    }

    #[test]
    fn who_waits_sees_the_oldest_command_in_his_way() -> Result {
        let oldest = |stage: &Stage, who| match stage.position(who) {
            Position::Queued { oldest, .. } => Some(oldest),
            _ => None,
        };
        let mut stage = Stage::new()?;
        stage.ask(1, Class::Short)?;
        for _ in 0..MOST_LONG {
            stage.ask(1, Class::Long)?;
        }
        // The short one is not in the way of a long one.
        let long = stage.ask(1, Class::Long)?;
        assert_eq!(oldest(&stage, long), Some(1));
        for _ in 0..OTHERS {
            stage.ask(1, Class::Short)?;
        }
        let short = stage.ask(1, Class::Short)?;
        assert_eq!(oldest(&stage, short), Some(0));
        assert!(stage.answer(20));
        assert_eq!(oldest(&stage, short), Some(0));
        assert!(stage.answer(0));
        assert_eq!(oldest(&stage, short), Some(1));
        assert_eq!(oldest(&stage, long), Some(1));
        Ok(())
    }

    #[test]
    fn only_what_was_given_before_is_ahead() -> Result {
        let mut stage = Stage::full_of(1, 10)?;
        assert_eq!(stage.position(5), Position::InRing { ahead: 5 });
        assert!(stage.answer(7));
        assert_eq!(stage.position(5), Position::InRing { ahead: 5 });
        assert!(stage.answer(2));
        stage.ask(1, Class::Short)?;
        assert_eq!(stage.position(5), Position::InRing { ahead: 4 });
        assert!(stage.answer(5));
        assert_eq!(stage.position(5), Position::Done);
        Ok(())
    }
}
