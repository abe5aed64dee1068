// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of event queues.

use super::*;
use crate::testing::{Node, QpOptions, CQP_LOG_ENTRIES, EQ_LOG_ENTRIES, MEMORY_BASE};
use ferrite_abi::{CommandOpcode, DeviceState, EQ_ASYNC, EQ_FIRST_HANDLER};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;

const EQ: u16 = EQ_FIRST_HANDLER;
const ENTRIES: u32 = 1 << EQ_LOG_ENTRIES;

fn post(node: &mut Node, id: u32) {
    let entry = event(EventCode::Completion, id, 0, 0);
    node.engine.core.now = node.now;
    node.engine
        .core
        .post_event(Route::to(EQ), entry, &mut node.host);
}

fn ids(node: &mut Node) -> Vec<u32> {
    node.events(EQ).iter().map(|event| event.id).collect()
}

#[test]
fn states_go_from_undefined_to_unarmed_to_armed_and_back() {
    let mut node = Node::new(1);
    let state = |node: &Node, eqn| node.engine.core().eqs.state(eqn);
    assert_eq!(state(&node, EQ + 1), EventQueueState::Undefined);
    assert_eq!(state(&node, EQ), EventQueueState::Unarmed);
    node.ring_eq(EQ, true);
    assert_eq!(state(&node, EQ), EventQueueState::Armed);
    post(&mut node, 7);
    assert_eq!(state(&node, EQ), EventQueueState::Unarmed);
    assert_eq!(
        node.object_command(CommandOpcode::DestroyEventQueue, u32::from(EQ)),
        CommandStatus::Ok
    );
    assert_eq!(state(&node, EQ), EventQueueState::Undefined);
}

#[test]
fn an_unarmed_queue_takes_entries_without_an_interrupt() {
    let mut node = Node::new(1);
    post(&mut node, 7);
    assert!(node.host.raised.is_empty());
    assert_eq!(ids(&mut node), [7]);
}

#[test]
fn an_armed_queue_raises_its_vector_once() {
    let mut node = Node::new(1);
    node.ring_eq(EQ, true);
    assert!(node.host.raised.is_empty());
    post(&mut node, 1);
    post(&mut node, 2);
    assert_eq!(node.host.raised, [2]);
    assert_eq!(ids(&mut node), [1, 2]);
}

#[test]
fn arming_raises_for_entries_already_written() {
    let mut node = Node::new(1);
    node.ring_eq(EQ, true);
    post(&mut node, 1);
    assert_eq!(ids(&mut node), [1]);
    // Written after the last look and before the arming.
    post(&mut node, 2);
    node.ring_eq(EQ, true);
    assert_eq!(node.host.raised, [2, 2]);
}

#[test]
fn the_read_index_may_be_absolute_or_relative_and_is_checked() {
    let mut node = Node::new(1);
    for id in 0..4 {
        post(&mut node, id);
    }
    let ring = |node: &mut Node, read_index, relative| {
        let word = EventDoorbell {
            eqn: EQ,
            read_index,
            relative,
            valid: true,
            arm: false,
            quiet: false,
            disarm: false,
        };
        node.doorbell(0, ferrite_abi::DOORBELL_EVENT_QUEUE, word.encode());
        node.engine.core.eqs.get(EQ).unwrap().unread()
    };
    assert_eq!(ring(&mut node, 1, false), 3);
    assert_eq!(ring(&mut node, 2, true), 1);
    assert_eq!(node.engine.counters().bad_doorbells, 0);
    assert_eq!(ring(&mut node, 2, true), 1);
    assert_eq!(ring(&mut node, 100, false), 1);
    assert_eq!(ring(&mut node, 1, false), 1);
    assert_eq!(node.engine.counters().bad_doorbells, 3);
}

#[test]
fn a_quiet_queue_raises_for_all_but_answers_to_commands() {
    let mut node = Node::new(1);
    let arm = |node: &mut Node, read_index, quiet| {
        let word = EventDoorbell {
            eqn: EQ_CONTROL,
            read_index,
            relative: false,
            valid: true,
            arm: true,
            quiet,
            disarm: false,
        };
        node.doorbell(0, ferrite_abi::DOORBELL_EVENT_QUEUE, word.encode());
    };
    let answer = |node: &mut Node| {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.post_event(
            Route::to(EQ_CONTROL),
            event(EventCode::CommandDone, 7, 0, 0),
            host,
        );
    };
    let link = |node: &mut Node| {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.global_event(EventCode::LinkChange, 0, 1, host);
    };
    let index = |node: &Node| node.engine.core.eqs.get(EQ_CONTROL).unwrap().write_index;
    let start = index(&node);
    arm(&mut node, start, true);
    for _ in 0..3 {
        answer(&mut node);
    }
    assert!(node.host.raised.is_empty());
    assert_eq!(
        node.engine.core.eqs.state(EQ_CONTROL),
        EventQueueState::Armed
    );
    link(&mut node);
    assert_eq!(node.host.raised, [0]);
    // Unarmed by that; and what is there already counts, whatever it is.
    link(&mut node);
    assert_eq!(node.host.raised, [0]);
    let now = index(&node);
    answer(&mut node);
    arm(&mut node, now, true);
    assert_eq!(node.host.raised, [0, 0]);
    // Who sleeps arms for everything, which a quiet arming does not take back.
    let now = index(&node);
    arm(&mut node, now, true);
    arm(&mut node, now, false);
    arm(&mut node, now, true);
    answer(&mut node);
    assert_eq!(node.host.raised, [0, 0, 0]);
    // Where it was not agreed on, an arming is an arming.
    node.engine.core.features &= !FEATURE_QUIET_COMMANDS;
    let now = index(&node);
    arm(&mut node, now, true);
    answer(&mut node);
    assert_eq!(node.host.raised, [0, 0, 0, 0]);
}

#[test]
fn entries_zeroed_by_the_driver_are_free_before_it_says_so() {
    let mut node = Node::new(1);
    for id in 0..10 * ENTRIES {
        post(&mut node, id);
        assert_eq!(ids(&mut node), [id]);
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    assert!(node.event_codes(EQ_CONTROL).is_empty());
}

#[test]
fn overflow_is_reported_once_and_nothing_is_lost() {
    let mut node = Node::new(1);
    node.ring_eq(EQ_CONTROL, true);
    for id in 0..ENTRIES + 5 {
        post(&mut node, id);
    }
    assert_eq!(
        node.event_codes(EQ_CONTROL),
        [(EventCode::EventQueueOverflow, u32::from(EQ))]
    );
    assert_eq!(ids(&mut node), (0..ENTRIES).collect::<Vec<_>>());
    node.ring_eq(EQ, false);
    post(&mut node, ENTRIES + 5);
    assert_eq!(ids(&mut node), (ENTRIES..ENTRIES + 6).collect::<Vec<_>>());
    // It is reported again the next time.
    for id in 0..=ENTRIES {
        post(&mut node, id);
    }
    assert_eq!(node.event_codes(EQ_CONTROL).len(), 1);
}

#[test]
fn more_answers_than_queue_0_has_room_for_are_fatal() {
    let mut node = Node::new(1);
    for cookie in 0..=ENTRIES {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.post_event(
            Route::to(EQ_CONTROL),
            event(EventCode::CommandDone, cookie, 0, 0),
            host,
        );
    }
    assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
    assert_eq!(node.host.raised, [0]);
}

#[test]
fn a_link_that_flaps_while_nobody_looks_is_told_as_it_is_at_last() {
    let mut node = Node::new(1);
    node.events(EQ_CONTROL);
    node.ring_eq(EQ_CONTROL, false);
    for change in 0..100_000 {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.global_event(EventCode::LinkChange, 0, change % 2, host);
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let queue = node.engine.core.eqs.get(EQ_CONTROL).unwrap();
    assert_eq!(queue.backlog.entries.len(), 1);
    // The rest is for answers to commands.
    assert_eq!(node.events(EQ_CONTROL).len(), ENTRIES as usize / 2);
    node.ring_eq(EQ_CONTROL, false);
    let last: Vec<u64> = node
        .events(EQ_CONTROL)
        .iter()
        .map(|event| event.param0)
        .collect();
    assert_eq!(last, [1]);
}

/// Whatever others do while the driver does not look: all commands that it may have given find
/// room for their answers, which come in their order, before what is kept back.
#[test]
fn nothing_takes_the_room_of_answers_in_queue_0() {
    let mut node = Node::new(1);
    node.events(EQ_CONTROL);
    node.ring_eq(EQ_CONTROL, false);
    let commands = 1 << CQP_LOG_ENTRIES;
    let answers = 0..commands - 1;
    for round in 0..100u64 {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.global_event(EventCode::LinkChange, 0, round % 2, host);
        core.management_event(Management::Cable, round % 2 == 0, host);
        core.internal_memory_error(round, true, host);
        core.external_memory_error(round, host);
        core.global_event(EventCode::LinkChange, 1 + round as u32, 0, host);
        // Another queue is out of room again and again.
        core.tell_of_overflow(EQ, host);
        core.tell_of_overflow(EQ_ASYNC, host);
    }
    for cookie in answers.clone() {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        let answer = event(EventCode::CommandDone, cookie, 0, 0);
        core.post_event(Route::to(EQ_CONTROL), answer, host);
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let found = |node: &mut Node| -> Vec<u32> {
        let events = node.events(EQ_CONTROL);
        let done = EventCode::CommandDone.number();
        let answers = events.iter().filter(|event| event.code == done);
        answers.map(|event| event.id).collect()
    };
    assert_eq!(found(&mut node), answers.collect::<Vec<_>>());
    // What was kept back comes as room is made, and only then.
    let mut rest = 0;
    loop {
        node.ring_eq(EQ_CONTROL, false);
        let events = node.events(EQ_CONTROL).len();
        if events == 0 {
            break;
        }
        rest += events;
    }
    assert!(rest > 100, "{rest}");
    // A ring of twice the size has room for more of the others, too.
    assert_eq!(
        node.switch_eq(EQ_CONTROL, EQ_LOG_ENTRIES + 1),
        CommandStatus::Ok
    );
    node.events(EQ_CONTROL);
    node.ring_eq(EQ_CONTROL, false);
    for id in 0..10 * ENTRIES {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.global_event(EventCode::LinkChange, id, 0, host);
    }
    let others = (2 * ENTRIES - commands) as usize;
    assert_eq!(node.events(EQ_CONTROL).len(), others);
}

/// Takes everything from the asynchronous queue, as a driver that has got round to it.
fn drain_async(node: &mut Node) -> Vec<(EventCode, u32)> {
    let mut all = Vec::new();
    loop {
        let some = node.event_codes(EQ_ASYNC);
        if some.is_empty() {
            return all;
        }
        all.extend(some);
        node.ring_eq(EQ_ASYNC, true);
    }
}

#[test]
fn every_queue_pair_may_fail_at_once_and_no_event_is_lost() {
    let mut node = Node::new(1);
    let kinds = [
        EventCode::CommunicationEstablished,
        EventCode::QueuePairAccessError,
        EventCode::LastWqeReached,
    ];
    let mut raised = Vec::new();
    for code in kinds {
        for qpn in 2..crate::qp::MAX_QP {
            let (core, host) = (&mut node.engine.core, &mut node.host);
            core.async_event(code, qpn, host);
            raised.push((code, qpn));
        }
    }
    // Again and again, by a peer that does not stop: it changes nothing.
    for round in 0..4 {
        for qpn in 2..crate::qp::MAX_QP {
            let (core, host) = (&mut node.engine.core, &mut node.host);
            core.async_event(kinds[(round + 1) % 3], qpn, host);
        }
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let kept = node.engine.core.eqs.get(EQ_ASYNC).unwrap();
    assert!(kept.backlog.entries.len() <= raised.len());
    assert_eq!(kept.backlog.entries.len(), kept.backlog.places.len());
    let told = drain_async(&mut node);
    // What had found room came first, and in order.
    assert_eq!(told[..ENTRIES as usize], raised[..ENTRIES as usize]);
    let mut all: Vec<_> = told.iter().map(|(code, id)| (code.number(), *id)).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), raised.len());
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    assert!(node
        .engine
        .core
        .eqs
        .get(EQ_ASYNC)
        .unwrap()
        .backlog
        .is_empty());
}

#[test]
fn what_is_gone_has_no_events_that_were_kept_back() {
    let mut node = Node::new(1);
    let (cq, qp) = (3, 5);
    node.create_cq(cq, EQ, 4);
    node.create_qp(QpOptions {
        qpn: qp,
        cqn: cq,
        ..QpOptions::default()
    });
    for id in 0..ENTRIES {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.async_event(EventCode::SrqLimit, 1000 + id, host);
    }
    let (core, host) = (&mut node.engine.core, &mut node.host);
    for code in QUEUE_PAIR_EVENTS {
        core.async_event(code, qp, host);
    }
    core.async_event(EventCode::CompletionQueueError, cq, host);
    core.async_event(EventCode::SrqError, 1, host);
    let kept = |node: &Node| {
        node.engine
            .core
            .eqs
            .get(EQ_ASYNC)
            .unwrap()
            .backlog
            .entries
            .len()
    };
    assert_eq!(kept(&node), 8);
    let destroy = CommandOpcode::DestroyQueuePair;
    assert_eq!(node.object_command(destroy, qp), CommandStatus::Ok);
    assert_eq!(kept(&node), 2);
    let destroy = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(destroy, cq), CommandStatus::Ok);
    drain_async(&mut node);
    assert_eq!(kept(&node), 0);
}

proptest! {
    /// Whatever is raised, taken and destroyed in whatever order: an event that was raised and
    /// whose object lives is told after it was raised, in the order of what waited, and what
    /// is kept is bounded by what there is.
    #[test]
    fn an_event_of_a_living_object_is_told(
        steps in vec((0u8..10, 0usize..QUEUE_PAIR_EVENTS.len(), 2u32..40), 1..400),
    ) {
        let mut node = Node::new(1);
        let mut due: BTreeSet<(u32, u32)> = BTreeSet::new();
        let tell = |node: &mut Node, due: &mut BTreeSet<(u32, u32)>| {
            for (code, id) in node.event_codes(EQ_ASYNC) {
                due.remove(&(code.number(), id));
            }
            node.ring_eq(EQ_ASYNC, true);
        };
        for (step, kind, qpn) in steps {
            let code = QUEUE_PAIR_EVENTS[kind];
            match step {
                0 => tell(&mut node, &mut due),
                1 => {
                    node.engine.core.forget_queue_pair_events(qpn);
                    due.retain(|&(_, id)| id != qpn);
                }
                _ => {
                    let (core, host) = (&mut node.engine.core, &mut node.host);
                    core.async_event(code, qpn, host);
                    due.insert((code.number(), qpn));
                }
            }
            let backlog = &node.engine.core.eqs.get(EQ_ASYNC).unwrap().backlog;
            prop_assert!(backlog.entries.len() <= 38 * QUEUE_PAIR_EVENTS.len());
            prop_assert_eq!(backlog.entries.len(), backlog.places.len());
            prop_assert_eq!(node.status().state(), Some(DeviceState::Running));
        }
        for _ in 0..8 {
            tell(&mut node, &mut due);
        }
        prop_assert!(due.is_empty(), "never told: {due:?}");
    }
}

#[test]
fn an_event_for_an_undefined_queue_is_fatal_and_the_driver_is_told() {
    let mut node = Node::power_on(1);
    node.boot();
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.async_event(EventCode::QueuePairFatal, 3, host);
    assert_eq!(node.status().state(), Some(DeviceState::Fatal));
    assert_eq!(node.status().fatal(), Some(FatalCode::UndefinedEventQueue));
    let last = node.events(EQ_CONTROL).pop().unwrap();
    assert_eq!(last.code, EventCode::DeviceFatal.number());
    assert_eq!(
        last.param0,
        u64::from(FatalCode::UndefinedEventQueue.number())
    );
    // Although the queue was not armed.
    assert_eq!(node.host.raised, [0]);
}

#[test]
fn moderation_holds_the_interrupt_back_by_count_or_time() {
    let mut node = Node::new(1);
    node.execute(&ModifyEventQueue {
        eqn: EQ,
        message: 3,
        moderation_microseconds: 10,
        moderation_count: 4,
        overflow: 0,
        priority: 0,
        reserved: [0; 6],
    });
    node.ring_eq(EQ, true);
    for id in 0..3 {
        post(&mut node, id);
    }
    assert!(node.host.raised.is_empty());
    post(&mut node, 3);
    assert_eq!(node.host.raised, [3]);

    ids(&mut node);
    node.ring_eq(EQ, true);
    post(&mut node, 4);
    assert_eq!(node.engine.next_timeout(), Some(node.now + 10_000));
    node.now += 9_999;
    node.settle();
    assert_eq!(node.host.raised, [3]);
    node.now += 1;
    node.settle();
    assert_eq!(node.host.raised, [3, 3]);
    assert_eq!(node.engine.next_timeout(), None);
}

#[test]
fn impossible_queues_are_refused() {
    let mut node = Node::new(1);
    let ring = node.allocate(32 << EQ_LOG_ENTRIES);
    let good = CreateEventQueue {
        eqn: 5,
        message: 1,
        log_entries: EQ_LOG_ENTRIES,
        overflow: 0,
        priority: 0,
        reserved: 0,
        ring: Buffer::contiguous(ring, 32 << EQ_LOG_ENTRIES),
    };
    let mut refused =
        |command: CreateEventQueue| node.command(CommandOpcode::CreateEventQueue, &command);
    let cases = [
        (
            CommandStatus::BadNumber,
            CreateEventQueue { eqn: 0, ..good },
        ),
        (
            CommandStatus::BadNumber,
            CreateEventQueue {
                eqn: MAX_EQ,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            CreateEventQueue { message: 8, ..good },
        ),
        (
            CommandStatus::BadParameter,
            CreateEventQueue {
                log_entries: EQ_LOG_ENTRIES + 1,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            CreateEventQueue {
                log_entries: 255,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            CreateEventQueue {
                ring: Buffer::contiguous(ring + 4, 32 << EQ_LOG_ENTRIES),
                ..good
            },
        ),
        (CommandStatus::Exists, CreateEventQueue { eqn: EQ, ..good }),
        (CommandStatus::Ok, good),
    ];
    for (status, command) in cases {
        assert_eq!(refused(command), status);
    }
    assert_eq!(
        node.object_command(CommandOpcode::DestroyEventQueue, 0x1_0005),
        CommandStatus::BadNumber
    );
    assert_eq!(
        node.object_command(CommandOpcode::DestroyEventQueue, 6),
        CommandStatus::NotFound
    );
}

#[test]
fn a_ring_without_memory_is_fatal_when_it_is_written() {
    let mut node = Node::new(1);
    node.execute(&CreateEventQueue {
        eqn: 5,
        message: 1,
        log_entries: EQ_LOG_ENTRIES,
        overflow: 0,
        priority: 0,
        reserved: 0,
        ring: Buffer::contiguous(MEMORY_BASE - 8192, 8192),
    });
    let entry = event(EventCode::Completion, 1, 0, 0);
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.post_event(Route::to(5), entry, host);
    assert_eq!(node.status().fatal(), Some(FatalCode::HostMemory));
}

#[test]
fn messages_of_unread_entries_are_bounded() {
    let mut messages = Messages::default();
    for index in 0..10 * MAX_RUNS as u32 {
        messages.push(index, (index % 2) as u16);
        assert!(messages.runs.len() <= MAX_RUNS);
    }
    // The first are as they were written; what came when there were too many is the queue's.
    for index in 0..MAX_RUNS as u32 - 1 {
        messages.read_to(index);
        assert_eq!(messages.of(index), (index % 2) as u16);
    }
    messages.read_to(MAX_RUNS as u32 - 1);
    assert_eq!(messages.of(MAX_RUNS as u32 - 1), MESSAGE_OF_QUEUE);
    // With room again they are told apart again.
    messages.push(10 * MAX_RUNS as u32, 7);
    messages.read_to(10 * MAX_RUNS as u32);
    assert_eq!(messages.of(10 * MAX_RUNS as u32), 7);
}

#[test]
fn a_queue_keeps_few_messages_whatever_the_host_does_not_tell() {
    let mut node = Node::new(1);
    let zero = |node: &mut Node| {
        let at = node.next_event_slot(EQ);
        node.host.memory.put(at, &0u32);
        node.skip_event(EQ);
    };
    for id in 0..4 * MAX_RUNS as u32 {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        let route = Route {
            eqn: EQ,
            message: (id % 2) as u16,
        };
        core.post_event(route, event(EventCode::SrqLimit, id, 0, 0), host);
        zero(&mut node);
    }
    let queue = node.engine.core.eqs.get(EQ).unwrap();
    assert!(queue.messages.runs.len() <= MAX_RUNS);
    // What the slots say is known: the oldest that can be unread has its own message.
    assert!(queue.unread() > queue.entries());
    let oldest = queue.oldest_unread();
    assert_eq!(oldest, queue.write_index - queue.entries());
    // Nor is that forgotten with another ring.
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    let queue = node.engine.core.eqs.get(EQ).unwrap();
    assert_eq!(queue.oldest_unread(), oldest);
    node.host.raised.clear();
    let bell = EventDoorbell {
        eqn: EQ,
        read_index: 0,
        relative: false,
        valid: false,
        arm: true,
        quiet: false,
        disarm: false,
    };
    node.doorbell(0, ferrite_abi::DOORBELL_EVENT_QUEUE, bell.encode());
    assert_eq!(node.host.raised, [(oldest % 2) as u16]);
}
