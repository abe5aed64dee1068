// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of what is counted and believed.

use super::*;
use crate::testing::Node;
use ferrite_abi::*;

/// A device with one completion queue, whose answers and events are looked at by hand.
fn node(rules: Misbehaviour) -> Node {
    rules.check().unwrap();
    let mut node = Node::new(1);
    node.engine.misbehave(rules, node.now, &mut node.host);
    node
}

/// Rings for `count` commands that do nothing, with cookies from 100 on.
fn give(node: &mut Node, count: u32) {
    for cookie in 0..count {
        let nop = CommandEntry::new(CommandOpcode::Nop, 100 + cookie, (0, 0), &0u64);
        node.put_command(&nop);
    }
    node.ring_control();
}

/// The cookies of the answers that came.
fn answers(node: &mut Node) -> Vec<u32> {
    node.events(EQ_CONTROL)
        .iter()
        .filter(|event| event.code == EventCode::CommandDone.number())
        .map(|event| event.id)
        .collect()
}

fn wait(node: &mut Node, milliseconds: u64) {
    node.now += milliseconds * 1_000_000;
    node.engine.poll(node.now, &mut node.host);
}

#[test]
fn good_behaviour_costs_no_state() {
    let mut node = node(Misbehaviour {
        seed: 3,
        ..Misbehaviour::default()
    });
    assert!(node.engine.core().misdeeds().is_none());
    give(&mut node, 4);
    assert_eq!(answers(&mut node), [100, 101, 102, 103]);
}

#[test]
fn late_answers_come_within_the_time() {
    let mut node = node(Misbehaviour {
        answers: Disorder {
            delay: 1.0,
            ..Disorder::default()
        },
        ..Misbehaviour::default()
    });
    give(&mut node, 8);
    assert!(answers(&mut node).is_empty());
    assert!(node.engine.next_timeout().is_some());
    wait(&mut node, 100);
    let mut came = answers(&mut node);
    came.sort_unstable();
    assert_eq!(came, (100..108).collect::<Vec<_>>());
    assert_eq!(node.engine.next_timeout(), None);
}

#[test]
fn answers_are_lost_or_doubled_as_often_as_was_asked() {
    let mut node = node(Misbehaviour {
        seed: 1,
        answers: Disorder {
            drop: 0.25,
            double: 0.25,
            ..Disorder::default()
        },
        ..Misbehaviour::default()
    });
    let mut count = std::collections::BTreeMap::new();
    for _ in 0..40 {
        give(&mut node, 10);
        wait(&mut node, 100);
        for cookie in answers(&mut node) {
            *count.entry(cookie).or_insert(0) += 1;
        }
    }
    let (_, misdeeds) = node.engine.core().misdeeds().unwrap();
    let (dropped, doubled) = (misdeeds.dropped, misdeeds.doubled);
    assert!((60..140).contains(&dropped), "{dropped}");
    assert!((60..140).contains(&doubled), "{doubled}");
    assert_eq!(count.values().sum::<u64>(), 400 - dropped + doubled);
}

#[test]
fn answers_overtake_each_other_and_none_is_lost() {
    let mut node = node(Misbehaviour {
        seed: 5,
        answers: Disorder {
            reorder: 0.5,
            ..Disorder::default()
        },
        ..Misbehaviour::default()
    });
    give(&mut node, 12);
    wait(&mut node, 100);
    let came = answers(&mut node);
    assert_ne!(came, (100..112).collect::<Vec<_>>());
    let mut sorted = came;
    sorted.sort_unstable();
    assert_eq!(sorted, (100..112).collect::<Vec<_>>());
}

#[test]
fn the_same_seed_does_the_same_and_another_something_else() {
    let run = |seed| {
        let mut node = node(Misbehaviour {
            seed,
            answers: Disorder {
                drop: 0.2,
                double: 0.2,
                reorder: 0.2,
                delay: 0.2,
            },
            nonsense: Nonsense {
                answers: 0.5,
                registers: 0.5,
                ..Nonsense::default()
            },
            ..Misbehaviour::default()
        });
        give(&mut node, 12);
        wait(&mut node, 50);
        let registers: Vec<u64> = (0..8).map(|_| node.read_register(REG_STATUS, 4)).collect();
        (node.events(EQ_CONTROL), registers)
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_late_event_of_a_queue_that_is_gone_is_forgotten() {
    let mut node = node(Misbehaviour {
        events: Disorder {
            delay: 1.0,
            ..Disorder::default()
        },
        ..Misbehaviour::default()
    });
    node.ring_eq(EQ_ASYNC, true);
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.async_event(EventCode::QueuePairFatal, 2, host);
    assert_eq!(
        node.object_command(CommandOpcode::DestroyEventQueue, EQ_ASYNC.into()),
        CommandStatus::Ok
    );
    wait(&mut node, 100);
    assert_eq!(node.status().state(), Some(DeviceState::Running));
}

#[test]
fn a_completion_event_comes_late_and_the_next_arming_has_its_own() {
    let mut node = node(Misbehaviour {
        events: Disorder {
            delay: 1.0,
            ..Disorder::default()
        },
        ..Misbehaviour::default()
    });
    for round in 0..3 {
        node.arm_cq(1, round, false);
        let entry = CompletionEntry::zeroed();
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(1, entry, false, host).unwrap();
        assert!(node.events(EQ_FIRST_HANDLER).is_empty());
        wait(&mut node, 100);
        assert_eq!(
            node.event_codes(EQ_FIRST_HANDLER),
            [(EventCode::Completion, 1)]
        );
        node.poll_cq(1).unwrap();
    }
}

#[test]
fn a_reset_is_slow_or_never_ends() {
    let mut slow = node(Misbehaviour {
        reset: Reset::Slow,
        ..Misbehaviour::default()
    });
    slow.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    wait(&mut slow, 99);
    let resetting = Status::new(DeviceState::Resetting, None, true);
    assert_eq!(slow.status(), resetting);
    // Asking again does not make it later, and a start is not for now.
    slow.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    slow.write_register(REG_CONTROL, 4, CONTROL_ENABLE.into());
    assert_eq!(slow.status(), resetting);
    // All goes on meanwhile, so that it shows who does not wait.
    give(&mut slow, 1);
    assert_eq!(answers(&mut slow), [100]);
    wait(&mut slow, 1);
    assert_eq!(slow.status().state(), Some(DeviceState::Ready));
    let mut never = node(Misbehaviour {
        reset: Reset::Never,
        ignore_function_reset: true,
        ..Misbehaviour::default()
    });
    never.engine.inject_fatal(&mut never.host);
    never.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    wait(&mut never, 1_000_000);
    assert_eq!(never.status().state(), Some(DeviceState::Fatal));
    assert!(!never.engine.function_reset());
    assert_eq!(never.status().state(), Some(DeviceState::Fatal));
    let rules = Misbehaviour::default();
    never.engine.misbehave(rules, never.now, &mut never.host);
    assert!(never.engine.function_reset());
    assert_eq!(never.status().state(), Some(DeviceState::Ready));
}

#[test]
fn a_slow_reset_ends_also_when_the_device_has_failed_meanwhile() {
    let mut node = node(Misbehaviour {
        reset: Reset::Slow,
        ..Misbehaviour::default()
    });
    node.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    node.engine.inject_fatal(&mut node.host);
    assert_eq!(node.status().state(), Some(DeviceState::Resetting));
    assert!(node.engine.next_timeout().is_some());
    wait(&mut node, 100);
    assert_eq!(node.status().state(), Some(DeviceState::Ready));
    assert_eq!(node.engine.next_timeout(), None);
    // Or when the device is told to behave.
    node.boot();
    node.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    let rules = Misbehaviour {
        reset: Reset::Slow,
        seed: 1,
        ..Misbehaviour::default()
    };
    node.engine.misbehave(rules, node.now, &mut node.host);
    assert_eq!(node.status().state(), Some(DeviceState::Ready));
    // Nor is it started before its end when it was not running.
    node.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    node.write_register(REG_CONTROL, 4, CONTROL_ENABLE.into());
    assert_eq!(node.status().state(), Some(DeviceState::Resetting));
    wait(&mut node, 100);
    assert_eq!(node.status().state(), Some(DeviceState::Ready));
}

#[test]
fn every_field_of_the_capabilities_is_nonsense_some_time() {
    let mut node = Node::new(1);
    let good: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    let rules = Misbehaviour {
        seed: 11,
        nonsense: Nonsense {
            replies: 1.0,
            ..Nonsense::default()
        },
        ..Misbehaviour::default()
    };
    node.engine.misbehave(rules, node.now, &mut node.host);
    let mut changed = [false; size_of::<DeviceCaps>()];
    for _ in 0..3000 {
        let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
        for (at, (old, new)) in good.as_bytes().iter().zip(caps.as_bytes()).enumerate() {
            changed[at] |= old != new;
        }
    }
    assert!(changed.iter().all(|&changed| changed));
}

#[test]
fn flushed_work_requests_are_forgotten_and_others_are_not() {
    let mut node = node(Misbehaviour {
        lose_flushes: true,
        ..Misbehaviour::default()
    });
    for status in [
        CompletionStatus::Flushed,
        CompletionStatus::Success,
        CompletionStatus::Flushed,
    ] {
        let entry = CompletionEntry {
            status: status.number(),
            ..CompletionEntry::zeroed()
        };
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(1, entry, false, host).unwrap();
    }
    let status = node.poll_cq(1).unwrap().status;
    assert_eq!(status, CompletionStatus::Success.number());
    assert!(node.poll_cq(1).is_none());
    let (_, misdeeds) = node.engine.core().misdeeds().unwrap();
    assert_eq!(misdeeds.flushes, 2);
}

#[test]
fn completions_are_nonsense_with_the_right_phase() {
    let mut node = node(Misbehaviour {
        seed: 2,
        nonsense: Nonsense {
            completions: 0.9,
            ..Nonsense::default()
        },
        ..Misbehaviour::default()
    });
    let mut statuses = std::collections::BTreeSet::new();
    for index in 0..200 {
        let entry = CompletionEntry {
            index,
            ..CompletionEntry::zeroed()
        };
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(1, entry, false, host).unwrap();
        // It is there, whatever it says.
        statuses.insert(node.poll_cq(1).unwrap().status);
    }
    assert!(statuses.len() > 10);
}

#[test]
fn rules_that_mean_nothing_are_refused() {
    let mut rules = Misbehaviour::default();
    rules.answers.drop = 1.5;
    assert!(rules.check().unwrap_err().contains("answers.drop"));
    let mut rules = Misbehaviour::default();
    rules.nonsense.records = f64::NAN;
    assert!(rules.check().unwrap_err().contains("nonsense.records"));
    let rules = Misbehaviour {
        hold: -1.0,
        ..Misbehaviour::default()
    };
    assert!(rules.check().unwrap_err().contains("hold"));
}
