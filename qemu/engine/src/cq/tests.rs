// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of completion queues.

use super::*;
use crate::testing::{Node, QpOptions, SharedMemory, EQ_LOG_ENTRIES};
use ferrite_abi::{
    ClockReading, CommandOpcode, CompletionStatus, DeviceCaps, EventEntry, QueuePairStateCode,
    DOORBELL_COMPLETION, EQ_ASYNC, EQ_CONTROL, EQ_FIRST_HANDLER,
};
use std::time::{Duration, Instant};

const EQ: u16 = EQ_FIRST_HANDLER;

fn complete(node: &mut Node, index: u32, solicited: bool) -> Result<(), CompletionQueueDead> {
    let entry = CompletionEntry {
        index,
        ..CompletionEntry::zeroed()
    };
    node.engine.core.now = node.now;
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.write_completion(1, entry, solicited, host)
}

/// Sequences of the completion events.
fn sequences(node: &mut Node) -> Vec<u64> {
    node.events(EQ)
        .iter()
        .inspect(|event| assert_eq!(event.code, EventCode::Completion.number()))
        .map(|event| event.param0)
        .collect()
}

#[test]
fn a_valid_entry_is_whole_for_another_processor() {
    const LOG_ENTRIES: u8 = 2;
    const COUNT: u32 = 200_000;
    let ring_size = ENTRY_SIZE << LOG_ENTRIES;
    let memory = SharedMemory::new(ring_size as usize + 64);
    let buffer = Buffer::contiguous(0, ring_size + 64);
    let ring = CompletionRing::new(&memory, &buffer, LOG_ENTRIES, ring_size as u32).unwrap();
    // On a busy machine the two hardly ever run at the same time: fewer will do.
    let deadline = Instant::now() + Duration::from_secs(3);
    let memory = &memory;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for index in 0..COUNT {
                // As a device does: not before the host has said that there is room.
                let has_room = || index - memory.load_u32(ring_size).unwrap() < 1 << LOG_ENTRIES;
                if !SharedMemory::spin(deadline, has_room) {
                    return;
                }
                let mut entry = CompletionEntry {
                    qpn: index,
                    index,
                    byte_count: index,
                    immediate: index.into(),
                    vendor_syndrome: index,
                    ..CompletionEntry::zeroed()
                };
                ring.write(memory, index, &mut entry).unwrap();
            }
        });
        for index in 0..COUNT {
            let at = u64::from(index) % (1 << LOG_ENTRIES) * ENTRY_SIZE;
            let valid = at + COMPLETION_VALID_OFFSET as u64;
            let phase = phase_of(index, LOG_ENTRIES);
            let is_valid = || (memory.load_u64(valid).unwrap() >> 56) as u8 == phase;
            if !SharedMemory::spin(deadline, is_valid) {
                assert!(index > 0, "nothing came");
                return;
            }
            let mut entry = CompletionEntry::zeroed();
            memory.read(at, entry.as_bytes_mut()).unwrap();
            // Released before it is judged, or a failure would leave the other waiting.
            memory.store_u32(ring_size, index + 1).unwrap();
            let seen = [
                entry.qpn,
                entry.index,
                entry.byte_count,
                entry.vendor_syndrome,
            ];
            assert_eq!(seen, [index; 4]);
            assert_eq!(entry.immediate, u64::from(index));
        }
    });
}

#[test]
fn completions_come_in_order_with_the_right_phase_around_the_ring() {
    let mut node = Node::new(1);
    for index in 0..1000 {
        complete(&mut node, index, false).unwrap();
        assert_eq!(node.poll_cq(1).unwrap().index, index);
        assert!(node.poll_cq(1).is_none());
    }
    assert!(sequences(&mut node).is_empty());
}

fn modify(node: &mut Node, eqn: u16, count: u16, microseconds: u16) {
    node.execute(&ModifyCompletionQueue {
        cqn: 1,
        eqn,
        moderation_count: count,
        moderation_microseconds: microseconds,
        ..ModifyCompletionQueue::zeroed()
    });
}

/// Arms, completes, and counts the unread events of both handlers.
fn fire(node: &mut Node, index: u32, other: u16) -> [usize; 2] {
    node.arm_cq(1, index as u8, false);
    complete(node, index, false).unwrap();
    [EQ, other].map(|eqn| {
        let ring = node.event_ring(eqn);
        (ring.start..ring.end)
            .step_by(size_of::<EventEntry>())
            .filter(|&at| node.host.memory.get::<EventEntry>(at).code != 0)
            .count()
    })
}

#[test]
fn another_moderation_does_not_make_room_for_a_second_unread_event() {
    let mut node = Node::new(1);
    for index in 0..4 {
        assert_eq!(fire(&mut node, index, EQ_ASYNC), [1, 0]);
        modify(&mut node, EQ, 0, index as u16);
    }
    // The second arming is told of when the first event was read.
    assert_eq!(sequences(&mut node), [0]);
    node.ring_eq(EQ, false);
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn a_queue_that_goes_away_and_comes_back_has_one_unread_event_in_each_place() {
    let mut node = Node::new(1);
    let other = EQ + 1;
    node.create_eq(other, 3);
    assert_eq!(fire(&mut node, 0, other), [1, 0]);
    modify(&mut node, other, 0, 0);
    assert_eq!(fire(&mut node, 1, other), [1, 1]);
    modify(&mut node, EQ, 0, 0);
    assert_eq!(fire(&mut node, 2, other), [1, 1]);
    modify(&mut node, other, 0, 0);
    assert_eq!(fire(&mut node, 3, other), [1, 1]);
    for eqn in [EQ, other] {
        assert_eq!(node.events(eqn).len(), 1);
        node.ring_eq(eqn, false);
    }
    // What waited is for where the queue is now.
    assert_eq!(node.events(EQ).len(), 0);
    assert_eq!(node.events(other).len(), 1);
}

#[test]
fn what_old_moderation_holds_back_comes_in_its_time_or_with_the_next_entry() {
    let mut node = Node::new(1);
    modify(&mut node, EQ, 8, 100);
    assert_eq!(fire(&mut node, 0, EQ_ASYNC), [0, 0]);
    modify(&mut node, EQ, 0, 0);
    assert!(sequences(&mut node).is_empty());
    node.now += 100_000;
    node.settle();
    assert_eq!(sequences(&mut node), [0]);

    node.ring_eq(EQ, false);
    modify(&mut node, EQ, 8, 100);
    assert_eq!(fire(&mut node, 1, EQ_ASYNC), [0, 0]);
    modify(&mut node, EQ, 0, 0);
    complete(&mut node, 2, false).unwrap();
    assert_eq!(sequences(&mut node), [1]);
}

#[test]
fn a_queue_may_have_its_events_in_event_queue_0() {
    let mut node = Node::new(1);
    modify(&mut node, EQ_CONTROL, 0, 0);
    node.arm_cq(1, 2, false);
    complete(&mut node, 0, false).unwrap();
    assert_eq!(node.event_codes(EQ_CONTROL), [(EventCode::Completion, 1)]);
}

/// Everything in all event queues but the answers to commands.
fn all_events(node: &mut Node) -> Vec<(EventCode, u32)> {
    let queues = [EQ_CONTROL, EQ_ASYNC, EQ];
    let events = queues.map(|eqn| node.event_codes(eqn));
    let mut events = events.concat();
    events.retain(|(code, _)| *code != EventCode::CommandDone);
    events
}

#[test]
fn without_a_handler_an_arming_is_kept_whatever_is_completed() {
    let mut node = Node::new(1);
    // Armed before it loses its handler, while it has none, or both.
    for (round, (before, meanwhile)) in (0u32..).zip([(true, false), (false, true), (true, true)]) {
        if before {
            node.arm_cq(1, 1, false);
        }
        modify(&mut node, EQ_NONE, 0, 0);
        if meanwhile {
            node.arm_cq(1, 2, false);
        }
        for index in 0..1000 {
            complete(&mut node, index, index % 7 == 0).unwrap();
            assert_eq!(node.poll_cq(1).unwrap().index, index);
        }
        node.now += 1_000_000_000;
        node.settle();
        assert_eq!(all_events(&mut node), [], "round {round}");
        assert!(node.host.raised.is_empty());
        modify(&mut node, EQ, 0, 0);
        let sequence = if meanwhile { 2 } else { 1 };
        assert_eq!(sequences(&mut node), [sequence], "round {round}");
        node.ring_eq(EQ, false);
        // That was it.
        complete(&mut node, 0, true).unwrap();
        node.poll_cq(1).unwrap();
        modify(&mut node, EQ_NONE, 0, 0);
        modify(&mut node, EQ, 0, 0);
        assert_eq!(all_events(&mut node), []);
    }
}

#[test]
fn an_arming_that_is_not_fulfilled_waits_on_with_a_handler() {
    let mut node = Node::new(1);
    let command = node.cq_template(2, EQ_NONE, 4);
    node.execute(&command);
    modify(&mut node, EQ_NONE, 0, 0);
    node.arm_cq(1, 1, true);
    complete(&mut node, 0, false).unwrap();
    modify(&mut node, EQ, 0, 0);
    assert_eq!(all_events(&mut node), []);
    complete(&mut node, 1, true).unwrap();
    assert_eq!(sequences(&mut node), [1]);
    // The other was made so and is like it.
    let arm = CompletionDoorbell {
        cqn: 2,
        seen: 0,
        sequence: 3,
        solicited: false,
    };
    node.doorbell(1, DOORBELL_COMPLETION, arm.encode());
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.write_completion(2, CompletionEntry::zeroed(), false, host)
        .unwrap();
    assert_eq!(all_events(&mut node), []);
    node.execute(&ModifyCompletionQueue {
        cqn: 2,
        eqn: EQ,
        ..ModifyCompletionQueue::zeroed()
    });
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn what_moderation_or_an_unread_event_holds_back_is_kept_without_a_handler() {
    let mut node = Node::new(1);
    // Held back by moderation.
    modify(&mut node, EQ, 100, 50);
    node.arm_cq(1, 1, false);
    complete(&mut node, 0, false).unwrap();
    modify(&mut node, EQ_NONE, 100, 50);
    node.now += 1_000_000_000;
    node.settle();
    assert_eq!(all_events(&mut node), []);
    modify(&mut node, EQ, 100, 50);
    assert_eq!(all_events(&mut node), []);
    node.now += 50_000;
    node.settle();
    assert_eq!(sequences(&mut node), [1]);
    node.ring_eq(EQ, false);
    // Held back since its last event was not read.
    modify(&mut node, EQ, 0, 0);
    for sequence in [2, 3] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, sequence.into(), false).unwrap();
    }
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
    modify(&mut node, EQ_NONE, 0, 0);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    assert_eq!(sequences(&mut node), [2]);
    node.ring_eq(EQ, false);
    assert_eq!(all_events(&mut node), []);
    modify(&mut node, EQ, 0, 0);
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn the_failure_of_a_queue_without_a_handler_is_told_of() {
    let mut node = Node::new(1);
    modify(&mut node, EQ_NONE, 0, 0);
    for index in 0..256 {
        complete(&mut node, index, false).unwrap();
    }
    assert_eq!(complete(&mut node, 256, false), Err(CompletionQueueDead));
    assert_eq!(
        all_events(&mut node),
        [(EventCode::CompletionQueueError, 1)]
    );
    assert_eq!(
        node.object_command(CommandOpcode::DestroyCompletionQueue, 1),
        CommandStatus::Ok
    );
}

/// Overflows the queue; afterwards there is one event for that.
fn overflow(node: &mut Node) {
    while complete(node, 0, true).is_ok() {}
    assert_eq!(
        node.event_codes(EQ_ASYNC),
        [(EventCode::CompletionQueueError, 1)]
    );
}

#[test]
fn a_queue_that_failed_raises_nothing_when_it_is_armed() {
    let mut node = Node::new(1);
    overflow(&mut node);
    let bad = node.engine.counters().bad_doorbells;
    for solicited in [false, true] {
        node.arm_cq_from(1, 0, 1, solicited);
    }
    assert_eq!(all_events(&mut node), []);
    assert_eq!(node.engine.counters().bad_doorbells, bad + 2);
}

#[test]
fn a_queue_that_failed_without_a_handler_raises_nothing_when_it_gets_one() {
    let mut node = Node::new(1);
    modify(&mut node, EQ_NONE, 0, 0);
    node.arm_cq(1, 1, false);
    overflow(&mut node);
    modify(&mut node, EQ, 0, 0);
    assert_eq!(all_events(&mut node), []);
}

#[test]
fn a_queue_that_failed_raises_nothing_that_was_held_back() {
    // By moderation.
    let mut node = Node::new(1);
    modify(&mut node, EQ, 1000, 50);
    node.arm_cq(1, 1, false);
    overflow(&mut node);
    node.now += 1_000_000_000;
    node.settle();
    assert_eq!(all_events(&mut node), []);
    // By an event that was not read.
    let mut node = Node::new(1);
    for sequence in [1, 2] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 0, false).unwrap();
    }
    overflow(&mut node);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    assert_eq!(sequences(&mut node), [1]);
    node.ring_eq(EQ, false);
    assert_eq!(all_events(&mut node), []);
    // And without a handler.
    let mut node = Node::new(1);
    for sequence in [1, 2] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 0, false).unwrap();
    }
    modify(&mut node, EQ_NONE, 0, 0);
    overflow(&mut node);
    assert_eq!(sequences(&mut node), [1]);
    node.ring_eq(EQ, false);
    modify(&mut node, EQ, 0, 0);
    assert_eq!(all_events(&mut node), []);
}

#[test]
fn an_event_for_no_handler_is_kept_and_stops_nothing() {
    let mut node = Node::new(1);
    modify(&mut node, EQ_NONE, 0, 0);
    node.arm_cq(1, 3, false);
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.cq_event(1, host);
    assert_eq!(all_events(&mut node), []);
    assert!(node.engine.is_running());
    modify(&mut node, EQ, 0, 0);
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn an_event_that_waited_is_owed_beside_a_later_arming_without_a_handler() {
    let mut node = Node::new(1);
    for sequence in [1, 2] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 0, false).unwrap();
    }
    // The second waits for the first to be read. The third waits for what is solicited.
    node.arm_cq(1, 3, true);
    modify(&mut node, EQ_NONE, 0, 0);
    complete(&mut node, 0, false).unwrap();
    assert_eq!(sequences(&mut node), [1]);
    node.ring_eq(EQ, false);
    modify(&mut node, EQ, 0, 0);
    assert_eq!(sequences(&mut node).len(), 1);
    node.ring_eq(EQ, false);
    complete(&mut node, 0, false).unwrap();
    assert_eq!(all_events(&mut node), []);
    complete(&mut node, 0, true).unwrap();
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn what_moderation_holds_back_comes_in_its_time_in_another_event_queue_too() {
    let mut node = Node::new(1);
    let other = EQ + 1;
    node.create_eq(other, 3);
    modify(&mut node, EQ, 8, 100);
    assert_eq!(fire(&mut node, 0, other), [0, 0]);
    modify(&mut node, other, 0, 0);
    assert!(node.events(other).is_empty());
    node.now += 99_999;
    node.settle();
    assert!(node.events(other).is_empty());
    node.now += 1;
    node.settle();
    assert_eq!(node.event_codes(other), [(EventCode::Completion, 1)]);
    assert_eq!(all_events(&mut node), []);
}

#[test]
fn one_arming_gives_one_event_for_the_next_completion() {
    let mut node = Node::new(1);
    node.arm_cq(1, 2, false);
    assert!(sequences(&mut node).is_empty());
    complete(&mut node, 0, false).unwrap();
    complete(&mut node, 1, false).unwrap();
    assert_eq!(sequences(&mut node), [2]);
}

#[test]
fn an_arming_is_for_what_comes_after_it_not_for_what_lies_in_the_ring() {
    let mut node = Node::new(1);
    for solicited in [false, true] {
        complete(&mut node, 0, true).unwrap();
        complete(&mut node, 1, true).unwrap();
        node.arm_cq(1, 3, solicited);
        node.poll_cq(1).unwrap();
        assert!(sequences(&mut node).is_empty());
        complete(&mut node, 2, true).unwrap();
        assert_eq!(sequences(&mut node), [3]);
        while node.poll_cq(1).is_some() {}
        node.ring_eq(EQ, true);
    }
}

#[test]
fn what_came_between_looking_and_arming_gives_the_event_at_once() {
    let mut node = Node::new(1);
    for round in 0..600 {
        let seen = node.seen(1);
        complete(&mut node, round, false).unwrap();
        node.arm_cq_from(1, seen, 1, true);
        assert!(sequences(&mut node).is_empty());
        node.arm_cq_from(1, seen, 2, false);
        assert_eq!(sequences(&mut node), [2]);
        node.ring_eq(EQ, true);
        node.poll_cq(1).unwrap();
    }
}

#[test]
fn an_arming_that_comes_when_the_ring_has_gone_round_is_not_lost() {
    let mut node = Node::new(1);
    let seen = node.seen(1);
    for index in 0..1000 {
        complete(&mut node, index, false).unwrap();
        node.poll_cq(1).unwrap();
    }
    node.arm_cq_from(1, seen, 1, false);
    assert_eq!(sequences(&mut node), [1]);
}

#[test]
fn an_arming_says_nothing_of_what_was_consumed() {
    let mut node = Node::new(1);
    for index in 0..256 {
        complete(&mut node, index, false).unwrap();
    }
    node.arm_cq(1, 0, false);
    assert_eq!(complete(&mut node, 256, false), Err(CompletionQueueDead));
    for index in 0..256 {
        assert_eq!(node.poll_cq(1).unwrap().index, index);
    }
}

#[test]
fn a_solicited_arming_does_not_narrow_one_that_waits_for_anything() {
    let mut node = Node::new(1);
    node.arm_cq(1, 1, false);
    node.arm_cq(1, 2, true);
    complete(&mut node, 0, false).unwrap();
    assert_eq!(sequences(&mut node), [2]);
    node.ring_eq(EQ, true);
    // That was both of them.
    complete(&mut node, 1, true).unwrap();
    assert!(sequences(&mut node).is_empty());
}

#[test]
fn a_solicited_arming_waits_for_a_solicited_completion() {
    let mut node = Node::new(1);
    complete(&mut node, 0, false).unwrap();
    node.arm_cq(1, 1, true);
    complete(&mut node, 1, false).unwrap();
    assert!(sequences(&mut node).is_empty());
    complete(&mut node, 2, true).unwrap();
    assert_eq!(sequences(&mut node), [1]);
}

#[test]
fn a_solicited_arming_sees_a_solicited_completion_that_its_host_did_not() {
    let mut node = Node::new(1);
    complete(&mut node, 0, true).unwrap();
    complete(&mut node, 1, false).unwrap();
    node.arm_cq_from(1, 0, 1, true);
    assert_eq!(sequences(&mut node), [1]);
    node.ring_eq(EQ, true);
    node.arm_cq_from(1, 1, 2, true);
    assert!(sequences(&mut node).is_empty());
    node.arm_cq_from(1, 1, 3, false);
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn a_flood_of_armings_leaves_one_unread_event() {
    let mut node = Node::new(1);
    complete(&mut node, 0, false).unwrap();
    for _ in 0..100_000 {
        node.arm_cq_from(1, 0, 1, false);
    }
    node.arm_cq_from(1, 0, 2, false);
    assert_eq!(sequences(&mut node), [1]);
    // The last arming is not forgotten.
    node.ring_eq(EQ, true);
    assert_eq!(sequences(&mut node), [2]);
    node.ring_eq(EQ, true);
    assert!(sequences(&mut node).is_empty());
    assert!(node.event_codes(ferrite_abi::EQ_CONTROL).is_empty());
    assert_eq!(node.host.raised, [2]);
}

#[test]
fn an_event_that_waited_does_not_use_up_a_later_arming() {
    let mut node = Node::new(1);
    node.arm_cq(1, 0, false);
    complete(&mut node, 0, false).unwrap();
    node.poll_cq(1).unwrap();
    node.arm_cq(1, 1, false);
    complete(&mut node, 1, false).unwrap();
    node.poll_cq(1).unwrap();
    node.arm_cq(1, 2, false);
    assert_eq!(sequences(&mut node), [0]);
    node.ring_eq(EQ, true);
    assert_eq!(sequences(&mut node).len(), 1);
    complete(&mut node, 2, false).unwrap();
    assert_eq!(sequences(&mut node), [2]);
}

#[test]
fn events_of_many_queues_survive_a_full_event_queue() {
    let mut node = Node::new(1);
    let cqns = 2..102;
    for cqn in cqns.clone() {
        node.create_cq(cqn, EQ, 4);
        node.arm_cq(cqn, 0, false);
    }
    for cqn in cqns.clone() {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(cqn, CompletionEntry::zeroed(), false, host)
            .unwrap();
    }
    assert_eq!(
        node.event_codes(ferrite_abi::EQ_CONTROL),
        [(EventCode::EventQueueOverflow, u32::from(EQ))]
    );
    let mut seen = Vec::new();
    for _ in 0..2 {
        seen.extend(node.event_codes(EQ).iter().map(|(_, id)| *id));
        node.ring_eq(EQ, true);
    }
    assert_eq!(seen, cqns.collect::<Vec<_>>());
}

#[test]
fn one_user_takes_no_room_for_events_from_the_queues_of_another() {
    const ROOM: u32 = 1 << EQ_LOG_ENTRIES;
    let mut node = Node::new(1);
    // The greedy one has more queues than there is room.
    let (victim, greedy) = (2, 3..ROOM + 43);
    for cqn in [victim].into_iter().chain(greedy.clone()) {
        node.create_cq(cqn, EQ, 4);
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(cqn, CompletionEntry::zeroed(), false, host)
            .unwrap();
    }
    // However often he asks for events of one: nobody reads, and they take one entry.
    for sequence in 0..=u8::MAX {
        node.arm_cq_from(greedy.start, 0, sequence, false);
    }
    node.arm_cq_from(victim, 0, 1, false);
    let ids = |node: &mut Node| -> Vec<u32> {
        let events = node.event_codes(EQ);
        events.iter().map(|(_, id)| *id).collect()
    };
    assert_eq!(ids(&mut node), [greedy.start, victim]);
    node.ring_eq(EQ, true);
    assert_eq!(ids(&mut node), [greedy.start]);
    node.ring_eq(EQ, true);
    // All of them have all of the room, and more wait.
    for cqn in greedy.clone() {
        node.arm_cq_from(cqn, 0, 1, false);
    }
    let waited = node.engine.core.eqs.waiting(EQ);
    assert_eq!(waited as u32, greedy.len() as u32 - ROOM);
    // Who comes then waits for those that were there before, and for none that comes later.
    node.arm_cq_from(victim, 0, 2, false);
    for sequence in 2..100 {
        for cqn in greedy.clone() {
            node.arm_cq_from(cqn, 0, sequence, false);
        }
    }
    assert_eq!(ids(&mut node).len() as u32, ROOM);
    node.ring_eq(EQ, true);
    let next = ids(&mut node);
    assert_eq!(next.len() as u32, ROOM);
    assert_eq!(next.iter().position(|id| *id == victim), Some(waited));
}

#[test]
fn a_queue_that_waits_is_in_one_list_once_however_often_it_is_changed_or_made() {
    let mut node = Node::new(1);
    let other = EQ + 1;
    node.create_eq(other, 3);
    // Nobody reads either.
    for eqn in [EQ, other] {
        for _ in 0..1 << EQ_LOG_ENTRIES {
            let entry = event(EventCode::Completion, 100, 0, 0);
            let (core, host) = (&mut node.engine.core, &mut node.host);
            core.post_completion_event(Route::to(eqn), None, None, entry, host);
        }
    }
    complete(&mut node, 0, false).unwrap();
    node.arm_cq_from(1, 0, 1, false);
    for round in 0..1000 {
        for eqn in [other, EQ, EQ, EQ] {
            node.execute(&ModifyCompletionQueue {
                cqn: 1,
                eqn,
                moderation_microseconds: 0,
                moderation_count: round,
                processor: 0,
                reserved: [0; 2],
            });
            node.arm_cq_from(1, 0, 1, false);
        }
        let waiting = [EQ, other].map(|eqn| node.engine.core.eqs.waiting(eqn));
        assert_eq!(waiting, [1, 0]);
    }
    // One that is destroyed while it waits leaves nothing behind.
    let template = node.cq_template(2, EQ, 4);
    for _ in 0..1000 {
        node.execute(&template);
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(2, CompletionEntry::zeroed(), false, host)
            .unwrap();
        let word = CompletionDoorbell {
            cqn: 2,
            seen: 0,
            sequence: 0,
            solicited: false,
        };
        node.doorbell(1, DOORBELL_COMPLETION, word.encode());
        assert_eq!(node.engine.core.eqs.waiting(EQ), 2);
        let opcode = CommandOpcode::DestroyCompletionQueue;
        assert_eq!(node.object_command(opcode, 2), CommandStatus::Ok);
    }
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
    // It is not forgotten either.
    node.events(EQ);
    node.ring_eq(EQ, true);
    assert_eq!(node.event_codes(EQ), [(EventCode::Completion, 1)]);
}

#[test]
fn an_impossible_index_or_a_foreign_page_is_ignored() {
    let mut node = Node::new(1);
    complete(&mut node, 0, false).unwrap();
    let word = |seen| {
        CompletionDoorbell {
            cqn: 1,
            seen,
            sequence: 0,
            solicited: false,
        }
        .encode()
    };
    node.doorbell(1, DOORBELL_COMPLETION, word(2));
    node.doorbell(1, DOORBELL_COMPLETION, word(1000));
    node.doorbell(2, DOORBELL_COMPLETION, word(0));
    node.doorbell(0, DOORBELL_COMPLETION, word(0));
    assert!(sequences(&mut node).is_empty());
    assert_eq!(node.engine.counters().bad_doorbells, 4);
    node.doorbell(1, DOORBELL_COMPLETION, word(0));
    assert_eq!(sequences(&mut node), [0]);
}

#[test]
fn overflow_kills_the_queue_and_fails_its_queue_pairs_when_they_complete() {
    let mut node = Node::new(1);
    node.create_qp(QpOptions::default());
    node.to_init(2);
    node.post_recv(2, &[]);
    for index in 0..256 {
        complete(&mut node, index, false).unwrap();
    }
    assert!(node.event_codes(EQ_ASYNC).is_empty());
    assert_eq!(complete(&mut node, 256, false), Err(CompletionQueueDead));
    assert_eq!(
        node.event_codes(EQ_ASYNC),
        [(EventCode::CompletionQueueError, 1)]
    );
    // Nothing was overwritten, and nothing is written later although there is room.
    assert_eq!(node.poll_cq(1).unwrap().index, 0);
    assert_eq!(complete(&mut node, 257, false), Err(CompletionQueueDead));
    assert!(node.event_codes(EQ_ASYNC).is_empty());
    // Another queue pair does not hang on its way to ERROR.
    assert_eq!(
        node.set_state(2, QueuePairStateCode::Error),
        CommandStatus::Ok
    );
}

#[test]
fn the_consumer_index_in_the_record_makes_room() {
    let mut node = Node::new(1);
    for index in 0..256 {
        complete(&mut node, index, false).unwrap();
    }
    node.poll_cq(1).unwrap();
    complete(&mut node, 256, false).unwrap();
    assert!(complete(&mut node, 257, false).is_err());
}

#[test]
fn moving_a_live_queue_takes_its_arming_along() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    node.ring_eq(3, true);
    node.arm_cq(1, 1, false);
    node.execute(&ModifyCompletionQueue {
        cqn: 1,
        eqn: 3,
        moderation_count: 0,
        moderation_microseconds: 0,
        processor: 0,
        reserved: [0; 2],
    });
    complete(&mut node, 0, false).unwrap();
    assert!(node.events(EQ).is_empty());
    assert_eq!(node.event_codes(3), [(EventCode::Completion, 1)]);
    assert_eq!(node.host.raised, [3]);
}

#[test]
fn moderation_holds_the_event_back_by_count_or_time() {
    let mut node = Node::new(1);
    node.execute(&ModifyCompletionQueue {
        cqn: 1,
        eqn: EQ,
        moderation_count: 3,
        moderation_microseconds: 10,
        processor: 0,
        reserved: [0; 2],
    });
    node.arm_cq(1, 1, false);
    complete(&mut node, 0, false).unwrap();
    complete(&mut node, 1, false).unwrap();
    assert!(sequences(&mut node).is_empty());
    complete(&mut node, 2, false).unwrap();
    assert_eq!(sequences(&mut node), [1]);
    while node.poll_cq(1).is_some() {}
    node.arm_cq(1, 2, false);
    complete(&mut node, 3, false).unwrap();
    // The one held back comes, although the host has seen the entry when it arms again.
    node.arm_cq(1, 3, false);
    node.now += 10_000;
    node.settle();
    assert_eq!(sequences(&mut node), [3]);
}

#[test]
fn resizing_moves_what_was_not_consumed() {
    let mut node = Node::new(1);
    for index in 0..300 {
        complete(&mut node, index, false).unwrap();
        if index < 200 {
            node.poll_cq(1).unwrap();
        }
    }
    assert_eq!(node.resize_cq(1, 6), CommandStatus::BadParameter);
    for log_entries in [10, 7] {
        assert_eq!(node.resize_cq(1, log_entries), CommandStatus::Ok);
    }
    for index in 200..300 {
        assert_eq!(node.poll_cq(1).unwrap().index, index);
    }
    assert!(node.poll_cq(1).is_none());
    for index in 300..600 {
        complete(&mut node, index, false).unwrap();
        assert_eq!(node.poll_cq(1).unwrap().index, index);
    }
}

#[test]
fn impossible_queues_are_refused() {
    let mut node = Node::new(1);
    let buffer = node.allocate(64 * 17);
    let good = CreateCompletionQueue {
        cqn: 2,
        eqn: EQ,
        log_entries: 4,
        reserved0: 0,
        doorbell_page: 1,
        record_offset: 64 * 16,
        buffer: Buffer::contiguous(buffer, 64 * 17),
        processor: 0,
        reserved1: [0; 3],
    };
    type C = CreateCompletionQueue;
    let cases = [
        (
            CommandStatus::BadNumber,
            C {
                cqn: MAX_CQ,
                ..good
            },
        ),
        (
            CommandStatus::BadNumber,
            C {
                cqn: u32::MAX,
                ..good
            },
        ),
        (CommandStatus::Exists, C { cqn: 1, ..good }),
        (CommandStatus::NotFound, C { eqn: 77, ..good }),
        (
            CommandStatus::BadParameter,
            C {
                log_entries: 5,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            C {
                log_entries: 255,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            C {
                record_offset: 64 * 15,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            C {
                record_offset: 64 * 17,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            C {
                record_offset: u32::MAX,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            C {
                doorbell_page: 1024,
                ..good
            },
        ),
        (CommandStatus::Ok, good),
    ];
    for (status, command) in cases {
        assert_eq!(
            node.command(CommandOpcode::CreateCompletionQueue, &command),
            status
        );
    }
}

#[test]
fn a_queue_in_use_cannot_be_destroyed() {
    let mut node = Node::new(1);
    node.create_qp(QpOptions::default());
    let destroy = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(destroy, 1), CommandStatus::Busy);
    node.object_command(CommandOpcode::DestroyQueuePair, 2);
    assert_eq!(node.object_command(destroy, 1), CommandStatus::Ok);
    assert_eq!(node.object_command(destroy, 1), CommandStatus::NotFound);
}

#[test]
fn completions_are_stamped_by_the_clock_that_can_be_asked_for() {
    let mut node = Node::new(1);
    let clock = |node: &mut Node| {
        let reading = node.query::<ClockReading>(CommandOpcode::QueryClock, 0);
        reading.unwrap().ticks
    };
    let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    assert_eq!(caps.clock_khz, 1_000_000);
    node.now = (7 << 32) + 5;
    assert_eq!(clock(&mut node), (7 << 32) + 5);
    node.now += 10;
    complete(&mut node, 0, false).unwrap();
    let entry = node.poll_cq(1).unwrap();
    assert_eq!(entry.timestamp, (7 << 32) + 15);
    node.now += 10;
    assert_eq!(clock(&mut node), (7 << 32) + 25);
}

#[test]
fn flushed_entries_wake_a_solicited_arming() {
    let mut node = Node::new(1);
    node.create_qp(QpOptions::default());
    node.to_init(2);
    node.post_recv(2, &[]);
    node.arm_cq(1, 1, true);
    node.set_state(2, QueuePairStateCode::Error);
    assert_eq!(sequences(&mut node), [1]);
    let entry = node.poll_cq(1).unwrap();
    assert_eq!(entry.status, CompletionStatus::Flushed.number());
}
