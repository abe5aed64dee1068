// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of how events come to the host: event queues, completion queues and the vector map
//! together, from the completion to the interrupt.

use crate::eq::{event, EventQueueState, MAX_EQ};
use crate::testing::{Node, QpOptions, EQ_LOG_ENTRIES};
use crate::vectors::Route;
use crate::{ChannelEvent, FEATURES};
use ferrite_abi::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;

const EQ: u16 = EQ_FIRST_HANDLER;
const ENTRIES: u32 = 1 << EQ_LOG_ENTRIES;

/// Writes a completion to a queue, and consumes it.
fn complete(node: &mut Node, cqn: u32, receive: bool, solicited: bool) {
    let entry = CompletionEntry {
        flags: if receive { COMPLETION_RECEIVE } else { 0 },
        ..CompletionEntry::zeroed()
    };
    node.engine.core.now = node.now;
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.write_completion(cqn, entry, solicited, host).unwrap();
    node.poll_cq(cqn).unwrap();
}

fn post(node: &mut Node, eqn: u16, id: u32) {
    node.engine.core.now = node.now;
    let entry = event(EventCode::SrqLimit, id, 0, 0);
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.post_event(Route::to(eqn), entry, host);
}

fn ids(node: &mut Node, eqn: u16) -> Vec<u32> {
    node.events(eqn).iter().map(|event| event.id).collect()
}

/// An event queue doorbell that tells of what was consumed.
#[derive(Clone, Copy, Default)]
struct Bell {
    arm: bool,
    disarm: bool,
    /// Entries that were not told of before, for a relative read index.
    relative: Option<u32>,
}

fn ring(node: &mut Node, eqn: u16, bell: Bell) {
    let word = EventDoorbell {
        eqn,
        read_index: bell.relative.unwrap_or(node.consumed_events(eqn)),
        relative: bell.relative.is_some(),
        valid: true,
        arm: bell.arm,
        quiet: false,
        disarm: bell.disarm,
    };
    node.doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
}

fn disarm(node: &mut Node, eqn: u16) {
    let bell = Bell {
        disarm: true,
        ..Bell::default()
    };
    ring(node, eqn, bell);
}

fn control(node: &mut Node, eqn: u16, overflow: EventOverflow, priority: EventPriority) {
    node.execute(&ModifyEventQueue {
        eqn,
        message: eqn,
        overflow: overflow.number(),
        priority: priority.number(),
        ..ModifyEventQueue::zeroed()
    });
}

fn moderate(node: &mut Node, eqn: u16, microseconds: u16, count: u16) {
    node.execute(&ModifyEventQueue {
        eqn,
        message: eqn,
        moderation_microseconds: microseconds,
        moderation_count: count,
        ..ModifyEventQueue::zeroed()
    });
}

fn bind(node: &mut Node, cqn: u32, eqn: u16, processor: u16) {
    node.execute(&ModifyCompletionQueue {
        cqn,
        eqn,
        processor,
        ..ModifyCompletionQueue::zeroed()
    });
}

#[test]
fn an_arming_can_be_taken_back_and_entries_stay() {
    let mut node = Node::new(1);
    node.ring_eq(EQ, true);
    disarm(&mut node, EQ);
    let state = |node: &Node| node.engine.core().eqs.state(EQ);
    assert_eq!(state(&node), EventQueueState::Unarmed);
    post(&mut node, EQ, 1);
    assert!(node.host.raised.is_empty());
    node.ring_eq(EQ, true);
    assert_eq!(node.host.raised, [2]);
    // What moderation holds back is not raised either.
    assert_eq!(ids(&mut node, EQ), [1]);
    moderate(&mut node, EQ, 10, 100);
    node.ring_eq(EQ, true);
    post(&mut node, EQ, 2);
    disarm(&mut node, EQ);
    node.now += 1_000_000;
    node.settle();
    assert_eq!(node.host.raised, [2]);
    assert_eq!(ids(&mut node, EQ), [2]);
    // With both it is armed.
    moderate(&mut node, EQ, 0, 0);
    let both = Bell {
        arm: true,
        disarm: true,
        relative: None,
    };
    ring(&mut node, EQ, both);
    post(&mut node, EQ, 3);
    assert_eq!(node.host.raised, [2, 2]);
}

#[test]
fn without_the_feature_nothing_is_taken_back_or_chosen() {
    let mut node = Node::with_features(1, FEATURES & !FEATURE_EQ_CONTROL);
    node.ring_eq(EQ, true);
    disarm(&mut node, EQ);
    post(&mut node, EQ, 1);
    assert_eq!(node.host.raised, [2]);
    for (overflow, priority) in [(1, 0), (2, 0), (0, 1), (9, 9)] {
        let modify = ModifyEventQueue {
            eqn: EQ,
            overflow,
            priority,
            ..ModifyEventQueue::zeroed()
        };
        assert_eq!(
            node.command(CommandOpcode::ModifyEventQueue, &modify),
            CommandStatus::BadParameter
        );
    }
}

#[test]
fn an_overflow_stops_the_device_where_the_driver_chose_that() {
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ] {
        let mut node = Node::new(1);
        control(&mut node, eqn, EventOverflow::Stop, EventPriority::Bulk);
        node.ring_eq(eqn, false);
        for id in 0..ENTRIES {
            post(&mut node, eqn, id);
            assert_eq!(node.status().state(), Some(DeviceState::Running));
        }
        post(&mut node, eqn, ENTRIES);
        assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
    }
}

#[test]
fn an_overflow_undefines_the_queue_where_the_driver_chose_that() {
    let mut node = Node::new(1);
    let refused = ModifyEventQueue {
        eqn: EQ_CONTROL,
        overflow: EventOverflow::Undefine.number(),
        ..ModifyEventQueue::zeroed()
    };
    let modify = CommandOpcode::ModifyEventQueue;
    assert_eq!(node.command(modify, &refused), CommandStatus::BadParameter);
    control(
        &mut node,
        EQ,
        EventOverflow::Undefine,
        EventPriority::LowLatency,
    );
    // A completion event that waits for another to be read has not found it full.
    for sequence in [1, 2] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 1, false, false);
    }
    for id in 1..ENTRIES {
        post(&mut node, EQ, id);
    }
    let state = |node: &Node| node.engine.core().eqs.state(EQ);
    assert_eq!(state(&node), EventQueueState::Unarmed);
    // Armed and held back when it goes.
    node.execute(&ModifyEventQueue {
        eqn: EQ,
        message: EQ,
        moderation_microseconds: 10,
        moderation_count: 1000,
        overflow: EventOverflow::Undefine.number(),
        priority: EventPriority::LowLatency.number(),
        ..ModifyEventQueue::zeroed()
    });
    ring(
        &mut node,
        EQ,
        Bell {
            arm: true,
            ..Bell::default()
        },
    );
    post(&mut node, EQ, ENTRIES);
    assert_eq!(state(&node), EventQueueState::Undefined);
    assert_eq!(
        node.event_codes(EQ_CONTROL),
        [(EventCode::EventQueueOverflow, u32::from(EQ))]
    );
    node.now += 1_000_000;
    node.settle();
    assert!(node.host.raised.is_empty());
    assert!(!node.engine.core().eqs.has_low_latency());
    // Its number is taken until it is destroyed.
    let create = CreateEventQueue {
        eqn: EQ,
        log_entries: EQ_LOG_ENTRIES,
        ring: Buffer::contiguous(node.allocate(4096), 4096),
        ..CreateEventQueue::zeroed()
    };
    let opcode = CommandOpcode::CreateEventQueue;
    assert_eq!(node.command(opcode, &create), CommandStatus::Exists);
    bind(&mut node, 1, EQ_NONE, 0);
    let back = ModifyCompletionQueue {
        cqn: 1,
        eqn: EQ,
        ..ModifyCompletionQueue::zeroed()
    };
    let opcode = CommandOpcode::ModifyCompletionQueue;
    assert_eq!(node.command(opcode, &back), CommandStatus::NotFound);
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
    assert_eq!(
        node.object_command(destroy, EQ.into()),
        CommandStatus::NotFound
    );
    node.create_eq(EQ, 2);
    bind(&mut node, 1, EQ, 0);
    // The event that waited is not lost with its event queue.
    assert_eq!(ids(&mut node, EQ), [1]);
    // Without a new queue the next event is fatal.
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    for id in 0..=ENTRIES {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    post(&mut node, EQ, 0);
    assert_eq!(node.status().fatal(), Some(FatalCode::UndefinedEventQueue));
}

#[test]
fn a_ring_that_is_full_is_exchanged_and_nothing_is_lost() {
    let mut node = Node::new(1);
    for id in 0..ENTRIES + 10 {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.event_codes(EQ_CONTROL).len(), 1);
    let old = node.event_ring(EQ);
    node.ring_eq(EQ, false);
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES + 1), CommandStatus::Ok);
    // What was kept back is in the new ring, at the slots of its indices.
    assert_eq!(node.unread_events(EQ, ENTRIES).len(), 10);
    // From now on the old ring is not looked at.
    *node.host.accesses.borrow_mut() = Some(Vec::new());
    for id in ENTRIES + 10..3 * ENTRIES {
        post(&mut node, EQ, id);
    }
    // The new ring is full when it has had all of its slots, and that is told again.
    for id in 3 * ENTRIES..3 * ENTRIES + 3 {
        post(&mut node, EQ, id);
    }
    assert_eq!(
        node.event_codes(EQ_CONTROL),
        [(EventCode::EventQueueOverflow, u32::from(EQ))]
    );
    let accesses = node.host.accesses.borrow_mut().take().unwrap();
    for access in accesses {
        use crate::testing::Access;
        let (Access::Read(at, _) | Access::Write(at, _) | Access::Load(at) | Access::Store(at, _)) =
            access
        else {
            continue;
        };
        assert!(!old.contains(&at), "{access:?}");
    }
    assert_eq!(ids(&mut node, EQ), (0..3 * ENTRIES).collect::<Vec<_>>());
    assert!(!node.is_switching(EQ));
    node.ring_eq(EQ, false);
    assert_eq!(
        ids(&mut node, EQ),
        (3 * ENTRIES..3 * ENTRIES + 3).collect::<Vec<_>>()
    );
}

#[test]
fn a_switch_leaves_the_state_and_raises_what_is_due() {
    let mut node = Node::new(1);
    node.ring_eq(EQ, true);
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    assert_eq!(node.engine.core().eqs.state(EQ), EventQueueState::Armed);
    assert!(node.host.raised.is_empty());
    post(&mut node, EQ, 1);
    assert_eq!(node.host.raised, [2]);
    assert_eq!(ids(&mut node, EQ), [1]);
    // Unread in the old ring: an arming raises for it.
    post(&mut node, EQ, 2);
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    assert_eq!(node.host.raised, [2]);
    node.ring_eq(EQ, true);
    assert_eq!(node.host.raised, [2, 2]);
    assert_eq!(ids(&mut node, EQ), [2]);
    // Relative read indices are the same in both rings.
    let relative = |count| Bell {
        relative: Some(count),
        ..Bell::default()
    };
    ring(&mut node, EQ, relative(1));
    assert_eq!(node.engine.counters().bad_doorbells, 0);
    ring(&mut node, EQ, relative(1));
    assert_eq!(node.engine.counters().bad_doorbells, 1);
}

#[test]
fn the_queue_of_commands_changes_its_ring_too() {
    let mut node = Node::new(1);
    for log_entries in [EQ_LOG_ENTRIES, EQ_LOG_ENTRIES + 2] {
        node.ring_eq(EQ_CONTROL, false);
        assert_eq!(node.switch_eq(EQ_CONTROL, log_entries), CommandStatus::Ok);
        assert!(
            !node.is_switching(EQ_CONTROL),
            "the answer is in the new ring"
        );
    }
    for _ in 0..1000 {
        let nop = CommandEntry::new(CommandOpcode::Nop, 0, (0, 0), &0u64);
        assert_eq!(node.commands(&[nop]), [CommandStatus::Ok]);
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
}

#[test]
fn a_completion_event_waits_for_one_in_the_old_ring() {
    let mut node = Node::new(1);
    for sequence in [1, 2] {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 1, false, false);
    }
    // The one in the old ring is unread, although its slot in the new ring is empty.
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    node.ring_eq(EQ, false);
    assert_eq!(node.unread_events(EQ, 0).len(), 1);
    assert_eq!(ids(&mut node, EQ), [1]);
    node.ring_eq(EQ, false);
    assert_eq!(ids(&mut node, EQ), [1]);
}

#[test]
fn switches_that_cannot_be_are_refused() {
    let mut node = Node::new(1);
    let size = 32 << EQ_LOG_ENTRIES;
    let good = SwitchEventQueue {
        eqn: EQ,
        log_entries: EQ_LOG_ENTRIES,
        ring: Buffer::contiguous(node.allocate(size), size),
        ..SwitchEventQueue::zeroed()
    };
    type S = SwitchEventQueue;
    let askew = Buffer {
        fbo: 16,
        ..Buffer::contiguous(good.ring.root, size)
    };
    let cases = [
        (
            CommandStatus::BadNumber,
            S {
                eqn: MAX_EQ,
                ..good
            },
        ),
        (CommandStatus::NotFound, S { eqn: 9, ..good }),
        (
            CommandStatus::BadParameter,
            S {
                log_entries: EQ_LOG_ENTRIES - 1,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            S {
                log_entries: EQ_LOG_ENTRIES + 1,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            S {
                log_entries: EQ_MAX_LOG_ENTRIES + 1,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            S {
                ring: askew,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            S {
                reserved0: 1,
                ..good
            },
        ),
        (CommandStatus::Ok, good),
    ];
    for (status, command) in cases {
        let opcode = CommandOpcode::SwitchEventQueue;
        assert_eq!(node.command(opcode, &command), status, "{command:?}");
    }
    let mut node = Node::with_features(1, FEATURES & !(FEATURE_SWITCH_EQ | FEATURE_VECTOR_MAP));
    assert_eq!(
        node.switch_eq(EQ, EQ_LOG_ENTRIES),
        CommandStatus::Unsupported
    );
    let map = node.map_vectors(SubFunction::Any, 0, &[(EQ, MESSAGE_OF_QUEUE)]);
    assert_eq!(map, CommandStatus::Unsupported);
    let command = node.cq_template(2, EQ_MAPPED, 4);
    let opcode = CommandOpcode::CreateCompletionQueue;
    assert_eq!(node.command(opcode, &command), CommandStatus::BadNumber);
}

#[test]
fn the_map_takes_what_can_be_and_says_what_it_has() {
    let mut node = Node::new(1);
    let own = MESSAGE_OF_QUEUE;
    let row = SubFunction::SendCompletions;
    let cases = [
        (CommandStatus::BadNumber, row, 0, (MAX_EQ, own)),
        (CommandStatus::BadNumber, row, 0, (EQ_MAPPED, own)),
        (CommandStatus::NotFound, row, 0, (9, own)),
        (CommandStatus::BadParameter, row, 0, (EQ, 8)),
        (CommandStatus::BadParameter, row, 512, (EQ, own)),
        (
            CommandStatus::BadParameter,
            SubFunction::Commands,
            0,
            (EQ, own),
        ),
        (CommandStatus::Ok, SubFunction::Commands, 0, (EQ_CONTROL, 7)),
        (CommandStatus::Ok, row, 511, (EQ, 7)),
        (CommandStatus::Ok, row, 0, (EQ_NONE, 0)),
    ];
    for (status, row, first, entry) in cases {
        assert_eq!(node.map_vectors(row, first, &[entry]), status, "{entry:?}");
    }
    // All or nothing.
    let half = [(EQ, own), (9, own)];
    assert_eq!(node.map_vectors(row, 3, &half), CommandStatus::NotFound);
    let read = |node: &mut Node, row: SubFunction, first| {
        let query = QueryVectorMap {
            sub_function: row.number(),
            first,
            count: 1,
            reserved0: 0,
            reserved1: 0,
        };
        let opcode = CommandOpcode::QueryVectorMap;
        assert_eq!(node.command(opcode, &query), CommandStatus::Ok);
        let entry: VectorMapEntry = node.host.memory.get(node.reply());
        (entry.eqn, entry.message)
    };
    let absent = (EQ_NONE, own);
    assert_eq!(read(&mut node, row, 511), (EQ, 7));
    for first in [0, 3, 4, 510] {
        assert_eq!(read(&mut node, row, first), absent);
    }
    assert_eq!(read(&mut node, SubFunction::Commands, 0), (EQ_CONTROL, 7));
    // Answers interrupt by the message of their row.
    node.ring_eq(EQ_CONTROL, true);
    node.execute(&ModifyEventQueue {
        eqn: EQ,
        message: 2,
        ..ModifyEventQueue::zeroed()
    });
    assert_eq!(node.host.raised, [7]);
    // A queue that the map names stays.
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Busy);
    assert_eq!(node.map_vectors(row, 511, &[absent]), CommandStatus::Ok);
    bind(&mut node, 1, EQ_NONE, 0);
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
}

#[test]
fn the_map_is_set_by_commands_that_are_whole() {
    let mut node = Node::new(1);
    let row = SubFunction::SendCompletions;
    let set = |node: &mut Node, first, count, used: usize| {
        let mut command = SetVectorMap {
            sub_function: row.number(),
            first,
            count,
            ..SetVectorMap::zeroed()
        };
        for entry in &mut command.entries[..used] {
            (entry.eqn, entry.message) = (EQ, 7);
        }
        node.command(CommandOpcode::SetVectorMap, &command)
    };
    let query = |node: &mut Node, first, count| {
        let command = QueryVectorMap {
            sub_function: row.number(),
            first,
            count,
            ..QueryVectorMap::zeroed()
        };
        node.command(CommandOpcode::QueryVectorMap, &command)
    };
    let most = VECTOR_MAP_ENTRIES as u16;
    let end = VECTOR_MAP_PROCESSORS;
    for (status, first, count) in [
        (CommandStatus::BadParameter, 0, 0),
        (CommandStatus::BadParameter, end, 0),
        (CommandStatus::BadParameter, end, 1),
        (CommandStatus::BadParameter, end - 1, 2),
        (CommandStatus::BadParameter, 0, most + 1),
        (CommandStatus::BadParameter, u16::MAX, 1),
        (CommandStatus::Ok, end - 1, 1),
        (CommandStatus::Ok, end - most, most),
    ] {
        let used = usize::from(count).min(VECTOR_MAP_ENTRIES);
        assert_eq!(
            set(&mut node, first, count, used),
            status,
            "{first} {count}"
        );
        assert_eq!(query(&mut node, first, count), status, "{first} {count}");
    }
    // What is not counted is not looked at, and so has to be nothing.
    for (count, used) in [(0, 1), (1, 2), (1, VECTOR_MAP_ENTRIES), (most - 1, 52)] {
        let status = set(&mut node, 0, count, used);
        assert_eq!(status, CommandStatus::BadParameter, "{count} of {used}");
    }
    let mut command = SetVectorMap {
        sub_function: row.number(),
        count: 1,
        ..SetVectorMap::zeroed()
    };
    (command.entries[0].eqn, command.entries[1].message) = (EQ, 1);
    let status = node.command(CommandOpcode::SetVectorMap, &command);
    assert_eq!(status, CommandStatus::BadParameter);
    command.entries[1].message = 0;
    let status = node.command(CommandOpcode::SetVectorMap, &command);
    assert_eq!(status, CommandStatus::Ok);
}

#[test]
fn a_processor_is_one_of_the_map_and_of_who_is_bound_to_it() {
    let mut node = Node::new(1);
    let last = VECTOR_MAP_PROCESSORS - 1;
    for (cqn, (status, eqn, processor)) in (10..).zip([
        (CommandStatus::Ok, EQ_MAPPED, last),
        (CommandStatus::BadParameter, EQ_MAPPED, last + 1),
        (CommandStatus::BadParameter, EQ_MAPPED, u16::MAX),
        (CommandStatus::BadParameter, EQ, 1),
        (CommandStatus::BadParameter, EQ_NONE, 1),
        (CommandStatus::Ok, EQ, 0),
        (CommandStatus::Ok, EQ_NONE, 0),
        (CommandStatus::Ok, EQ_MAPPED, 0),
    ]) {
        let create = CreateCompletionQueue {
            processor,
            ..node.cq_template(cqn, eqn, 4)
        };
        let opcode = CommandOpcode::CreateCompletionQueue;
        assert_eq!(node.command(opcode, &create), status, "{eqn} {processor}");
        let modify = ModifyCompletionQueue {
            cqn: 1,
            eqn,
            processor,
            ..ModifyCompletionQueue::zeroed()
        };
        let opcode = CommandOpcode::ModifyCompletionQueue;
        assert_eq!(node.command(opcode, &modify), status, "{eqn} {processor}");
    }
}

#[test]
fn a_driver_of_an_older_version_has_nothing_of_a_later_one_whatever_it_asks_for() {
    let of_1_2 = FEATURE_REGISTER_SEND | FEATURE_LISTS | FEATURE_PENDING_TAGS | FEATURE_TURNS;
    let of_1_3 = FEATURE_QP_COUNTERS | FEATURE_CONTEXTS;
    let of_1_6 = FEATURE_RAW_PACKETS | FEATURE_RECEIVE_TABLES;
    for minor in 0..=ABI_MINOR {
        let mut node = Node::power_on(1);
        node.boot_as(minor, FEATURES);
        let core = node.engine.core();
        let later = FEATURE_VECTOR_MAP | FEATURE_SWITCH_EQ | FEATURE_EQ_CONTROL;
        let agreed = if minor == 0 { 0 } else { later };
        assert_eq!(core.features & later, agreed);
        assert_eq!(core.features & of_1_2, if minor < 2 { 0 } else { of_1_2 });
        assert_eq!(core.features & of_1_3, if minor < 3 { 0 } else { of_1_3 });
        let of_1_4 = if minor < 4 { 0 } else { FEATURE_WINDOWS_ONLY };
        assert_eq!(core.features & FEATURE_WINDOWS_ONLY, of_1_4);
        assert_eq!(core.features & of_1_6, if minor < 6 { 0 } else { of_1_6 });
        let others = !(later | of_1_2 | of_1_3 | FEATURE_WINDOWS_ONLY | of_1_6);
        assert_eq!(core.features & others, FEATURES & others);
        let expected = if minor == 0 {
            CommandStatus::Unsupported
        } else {
            CommandStatus::Ok
        };
        let map = node.map_vectors(SubFunction::Any, 0, &[(EQ_CONTROL, MESSAGE_OF_QUEUE)]);
        assert_eq!(map, expected);
        // Bits of it are reserved for one, and of use for the other.
        let modify = ModifyEventQueue {
            eqn: EQ_CONTROL,
            priority: EventPriority::LowLatency.number(),
            ..ModifyEventQueue::zeroed()
        };
        let status = node.command(CommandOpcode::ModifyEventQueue, &modify);
        assert_eq!(status == CommandStatus::Ok, minor >= 1);
    }
}

/// The parts of the work, and processors, of the layouts.
const PARTS: [SubFunction; 2] = [
    SubFunction::SendCompletions,
    SubFunction::ReceiveCompletions,
];
const PROCESSORS: u16 = 4;
/// The message of each event queue, where the map has none.
const OWN_MESSAGE: u16 = 5;

/// What there is one of.
#[derive(Clone, Copy, Debug)]
enum Per {
    All,
    Processor,
    Part,
    Both,
}

impl Per {
    fn number(self, part: u16, processor: u16) -> u16 {
        match self {
            Self::All => 0,
            Self::Processor => processor,
            Self::Part => part,
            Self::Both => part * PROCESSORS + processor,
        }
    }
}

#[test]
fn each_layout_of_queues_and_messages_can_be_expressed() {
    use Per::{All, Both, Part, Processor};
    // Event queues; messages, where there are any.
    let layouts = [
        // Without messages: the pin.
        (All, None),
        (Processor, None),
        (Part, None),
        (Both, None),
        (All, Some(All)),
        (All, Some(Processor)),
        (Processor, Some(All)),
        (Processor, Some(Processor)),
        // One or more messages per processor; several of both; one message for several queues.
        (Processor, Some(Both)),
        (Both, Some(Both)),
        (Both, Some(All)),
        (Part, Some(All)),
        (Part, Some(Processor)),
        (Part, Some(Part)),
        (Both, Some(All)),
        (Both, Some(Processor)),
        (Both, Some(Part)),
        (All, Some(Both)),
    ];
    assert_eq!(layouts.len(), 18);
    for (queues, messages) in layouts {
        let mut node = Node::power_on(1);
        node.boot();
        node.create_eq(EQ_ASYNC, 1);
        let eqn_of = |part, processor| EQ + queues.number(part, processor);
        for eqn in EQ..EQ + 8 {
            node.create_eq(eqn, OWN_MESSAGE);
        }
        let message_of = |part, processor| match messages {
            None => MESSAGE_OF_QUEUE,
            Some(messages) => messages.number(part, processor),
        };
        for (part, row) in (0..).zip(PARTS) {
            let entries: Vec<_> = (0..PROCESSORS)
                .map(|processor| (eqn_of(part, processor), message_of(part, processor)))
                .collect();
            assert_eq!(node.map_vectors(row, 0, &entries), CommandStatus::Ok);
        }
        for processor in 0..PROCESSORS {
            let cqn = u32::from(processor);
            node.create_cq(cqn, EQ_NONE, 4);
            bind(&mut node, cqn, EQ_MAPPED, processor);
        }
        for round in 0..3 {
            for processor in 0..PROCESSORS {
                for part in 0..2 {
                    let (eqn, cqn) = (eqn_of(part, processor), u32::from(processor));
                    let what = format!("{queues:?} {messages:?} {part} {processor}");
                    let armed_before = round % 2 == 0;
                    if armed_before {
                        node.ring_eq(eqn, true);
                    }
                    node.arm_cq(cqn, round, false);
                    complete(&mut node, cqn, part == 1, false);
                    if !armed_before {
                        assert!(node.host.raised.is_empty(), "{what}");
                        node.ring_eq(eqn, true);
                    }
                    assert_eq!(
                        node.event_codes(eqn),
                        [(EventCode::Completion, cqn)],
                        "{what}"
                    );
                    let message = match message_of(part, processor) {
                        MESSAGE_OF_QUEUE => OWN_MESSAGE,
                        message => message,
                    };
                    assert_eq!(node.host.raised, [message], "{what}");
                    node.host.raised.clear();
                    node.ring_eq(eqn, false);
                }
            }
        }
        for eqn in EQ..EQ + 8 {
            assert!(node.events(eqn).is_empty());
        }
    }
}

#[test]
fn an_arming_raises_the_message_of_the_oldest_that_is_unread() {
    let mut node = Node::new(1);
    let row = |part| {
        [
            SubFunction::SendCompletions,
            SubFunction::ReceiveCompletions,
        ][part]
    };
    for part in 0..2 {
        let entry = (EQ, 4 + part as u16);
        assert_eq!(node.map_vectors(row(part), 1, &[entry]), CommandStatus::Ok);
    }
    let cqns = 2..2 + 10;
    for cqn in cqns.clone() {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
        node.arm_cq(cqn, 0, false);
    }
    // Sends and receives in turn, one of them by the queue's own message.
    for cqn in cqns.clone() {
        complete(&mut node, cqn, cqn % 2 == 1, false);
    }
    post(&mut node, EQ, 99);
    let mut expected = Vec::new();
    for cqn in cqns {
        node.ring_eq(EQ, true);
        expected.push(4 + (cqn % 2) as u16);
        assert_eq!(node.host.raised, expected);
        // One is read, and then the next is the oldest.
        take_one(&mut node, EQ);
    }
    node.ring_eq(EQ, true);
    expected.push(2);
    assert_eq!(node.host.raised, expected);
}

/// Consumes one event.
fn take_one(node: &mut Node, eqn: u16) {
    let at = node.next_event_slot(eqn);
    node.host.memory.put(at, &0u32);
    node.skip_event(eqn);
}

#[test]
fn events_of_each_class_go_by_their_row() {
    use EventCode as E;
    let raise = |node: &mut Node, code: EventCode| {
        let now = node.now;
        let (engine, host) = (&mut node.engine, &mut node.host);
        match code {
            E::MemoryErrorInternal => engine.internal_memory_error(0x77, false, now, host),
            E::MemoryErrorExternal => engine.external_memory_error(0x1000, now, host),
            E::ChannelPackets => engine.channel_event(ChannelEvent::Packets, 3, now, host),
            E::ChannelDescriptors => engine.channel_event(ChannelEvent::Descriptors, 3, now, host),
            E::ChannelPoolLow => engine.channel_event(ChannelEvent::PoolLow, 3, now, host),
            E::ChannelBadBuffers => engine.channel_event(ChannelEvent::BadBuffers, 3, now, host),
            E::ManagementAction => engine.managed(Management::Cable, true, now, host),
            E::LinkChange => engine.core.global_event(E::LinkChange, 0, 1, host),
            code => engine.core.async_event(code, 5, host),
        }
    };
    let classes = [
        (SubFunction::Global, EQ_CONTROL, E::LinkChange),
        (SubFunction::Global, EQ_CONTROL, E::MemoryErrorInternal),
        (SubFunction::Global, EQ_CONTROL, E::MemoryErrorExternal),
        (SubFunction::Management, EQ_CONTROL, E::ManagementAction),
        (SubFunction::Async, EQ_ASYNC, E::QueuePairFatal),
        (SubFunction::Async, EQ_ASYNC, E::SrqLimit),
        (SubFunction::Async, EQ_ASYNC, E::CompletionQueueError),
        (SubFunction::Transmit, EQ_CONTROL, E::ChannelDescriptors),
        (SubFunction::Receive, EQ_CONTROL, E::ChannelPackets),
        (SubFunction::Receive, EQ_CONTROL, E::ChannelPoolLow),
        (SubFunction::Receive, EQ_CONTROL, E::ChannelBadBuffers),
    ];
    for (row, default, code) in classes {
        let mut node = Node::new(1);
        for eqn in [3, 4, 5] {
            node.create_eq(eqn, eqn);
        }
        let codes = |node: &mut Node, eqn| -> Vec<EventCode> {
            node.event_codes(eqn).iter().map(|event| event.0).collect()
        };
        raise(&mut node, code);
        assert_eq!(codes(&mut node, default), [code]);
        // Another processor's entry says nothing; the row of all does, then its own.
        let own = MESSAGE_OF_QUEUE;
        assert_eq!(node.map_vectors(row, 1, &[(5, own)]), CommandStatus::Ok);
        raise(&mut node, code);
        assert_eq!(codes(&mut node, default), [code]);
        assert_eq!(
            node.map_vectors(SubFunction::Any, 0, &[(3, own)]),
            CommandStatus::Ok
        );
        raise(&mut node, code);
        assert_eq!(codes(&mut node, 3), [code]);
        assert_eq!(node.map_vectors(row, 0, &[(4, 7)]), CommandStatus::Ok);
        node.ring_eq(4, true);
        raise(&mut node, code);
        assert_eq!(codes(&mut node, 4), [code]);
        assert_eq!(node.host.raised, [7]);
        for eqn in [EQ_CONTROL, EQ_ASYNC, 3, 5] {
            assert_eq!(codes(&mut node, eqn), []);
        }
        // Not for a driver that does not know them.
        node.engine.core.driver_minor = 0;
        raise(&mut node, code);
        let later = code.number() > E::EventQueueOverflow.number();
        assert_eq!(codes(&mut node, 4).is_empty(), later);
    }
}

#[test]
fn what_events_of_version_1_1_say_and_that_they_are_bounded() {
    let mut node = Node::new(1);
    let now = node.now;
    let (engine, host) = (&mut node.engine, &mut node.host);
    engine.internal_memory_error(0x77, true, now, host);
    engine.internal_memory_error(0x78, false, now, host);
    engine.external_memory_error(0x1000, now, host);
    engine.channel_event(ChannelEvent::PoolLow, 9, now, host);
    engine.managed(Management::Faults, true, now, host);
    engine.managed(Management::Cable, false, now, host);
    let told: Vec<_> = node
        .events(EQ_CONTROL)
        .iter()
        .map(|event| (event.code, event.id, event.param0, event.param1))
        .collect();
    let expected = [
        (0x43, 0, 0x77, 0),
        (0x43, 0, 0x78, 1),
        (0x44, 0, 0x1000, 0),
        (0x52, 9, 0, 0),
        (0x70, 2, 1, 0),
        (0x70, 1, 0, 0),
    ];
    assert_eq!(told, expected);
    node.ring_eq(EQ_CONTROL, false);
    for round in 0..10_000 {
        let (engine, host) = (&mut node.engine, &mut node.host);
        engine.external_memory_error(round, now, host);
        engine.channel_event(ChannelEvent::Packets, (round % 4) as u16, now, host);
    }
    // The other half is for answers to commands.
    assert_eq!(node.events(EQ_CONTROL).len(), ENTRIES as usize / 2);
    node.ring_eq(EQ_CONTROL, false);
    assert_eq!(node.events(EQ_CONTROL).len(), 5);
    assert_eq!(node.status().state(), Some(DeviceState::Running));
}

#[test]
fn the_overflow_of_the_queue_of_global_events_is_told_on_queue_0() {
    let mut node = Node::new(1);
    let global = [(EQ, MESSAGE_OF_QUEUE)];
    assert_eq!(
        node.map_vectors(SubFunction::Global, 0, &global),
        CommandStatus::Ok
    );
    for id in 0..=ENTRIES {
        post(&mut node, EQ, id);
    }
    let overflow = (EventCode::EventQueueOverflow, u32::from(EQ));
    assert_eq!(node.event_codes(EQ_CONTROL), [overflow]);
    // That of another goes by the row.
    node.events(EQ);
    node.ring_eq(EQ, false);
    node.events(EQ);
    for id in 0..=ENTRIES {
        post(&mut node, EQ_ASYNC, id);
    }
    let overflow = (EventCode::EventQueueOverflow, u32::from(EQ_ASYNC));
    assert_eq!(node.event_codes(EQ), [overflow]);
    assert!(node.event_codes(EQ_CONTROL).is_empty());
}

#[test]
fn what_is_kept_back_about_an_object_goes_with_it_wherever_the_map_sent_it() {
    let mut node = Node::new(1);
    let row = SubFunction::Async;
    assert_eq!(
        node.map_vectors(row, 0, &[(EQ, MESSAGE_OF_QUEUE)]),
        CommandStatus::Ok
    );
    node.create_qp(QpOptions::default());
    for id in 0..ENTRIES {
        post(&mut node, EQ, 1000 + id);
    }
    let (core, host) = (&mut node.engine.core, &mut node.host);
    core.async_event(EventCode::QueuePairAccessError, 2, host);
    let destroy = CommandOpcode::DestroyQueuePair;
    assert_eq!(node.object_command(destroy, 2), CommandStatus::Ok);
    node.events(EQ);
    node.ring_eq(EQ, false);
    assert!(node.events(EQ).is_empty());
}

#[test]
fn a_mapped_queue_has_one_unread_event_in_each_place() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    let row = SubFunction::SendCompletions;
    bind(&mut node, 1, EQ_MAPPED, 9);
    for round in 0..6 {
        let eqn = [EQ, 3][round % 2];
        assert_eq!(
            node.map_vectors(row, 9, &[(eqn, MESSAGE_OF_QUEUE)]),
            CommandStatus::Ok
        );
        node.arm_cq(1, round as u8 % 4, false);
        complete(&mut node, 1, false, false);
    }
    for eqn in [EQ, 3] {
        assert_eq!(node.unread_events(eqn, 0).len(), 1);
    }
    // The map has sent what waits there elsewhere, and then its place goes.
    assert_eq!(
        node.map_vectors(row, 9, &[(EQ_ASYNC, MESSAGE_OF_QUEUE)]),
        CommandStatus::Ok
    );
    let waiting = [EQ, 3].map(|eqn| node.engine.core.eqs.waiting(eqn));
    assert_eq!(waiting.iter().sum::<usize>(), 1);
    assert!(node.events(EQ_ASYNC).is_empty());
    let destroy = CommandOpcode::DestroyEventQueue;
    for eqn in [EQ, 3] {
        assert_eq!(node.object_command(destroy, eqn.into()), CommandStatus::Ok);
    }
    assert_eq!(node.event_codes(EQ_ASYNC), [(EventCode::Completion, 1)]);
}

#[test]
fn nothing_is_raised_after_the_end_is_answered() {
    // Held back by moderation of either kind, waiting for another to be read, and armed.
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    node.create_cq(2, 3, 4);
    node.execute(&ModifyCompletionQueue {
        cqn: 2,
        eqn: 3,
        moderation_count: 100,
        moderation_microseconds: 50,
        ..ModifyCompletionQueue::zeroed()
    });
    moderate(&mut node, 3, 60, 100);
    node.ring_eq(3, true);
    node.arm_cq(2, 0, false);
    complete(&mut node, 2, false, false);
    let destroy = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(destroy, 2), CommandStatus::Ok);
    node.now += 1_000_000;
    node.settle();
    assert!(node.events(3).is_empty());
    assert!(node.host.raised.is_empty());
    post(&mut node, 3, 1);
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, 3), CommandStatus::Ok);
    node.now += 1_000_000;
    node.settle();
    node.ring_eq(3, true);
    assert!(node.host.raised.is_empty());
    assert_eq!(ids(&mut node, 3), [1]);
    // A reset ends everything at once.
    moderate(&mut node, EQ, 60, 100);
    node.ring_eq(EQ, true);
    node.arm_cq(1, 0, false);
    complete(&mut node, 1, false, false);
    *node.host.accesses.borrow_mut() = Some(Vec::new());
    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
    node.now += 1_000_000;
    node.settle();
    node.ring_eq(EQ, true);
    assert!(node.host.raised.is_empty());
    assert_eq!(node.host.accesses.borrow_mut().take().unwrap(), []);
}

/// A queue pair of one completion queue that always has something to send to itself.
fn busy_pair(node: &mut Node, qpn: u32, eqn: u16) {
    node.create_cq(qpn, eqn, 8);
    node.create_qp(QpOptions {
        qpn,
        cqn: qpn,
        ..QpOptions::default()
    });
}

#[test]
fn queue_pairs_of_low_latency_have_their_turn_first_and_others_one_in_eight() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Hold, EventPriority::LowLatency);
    let urgent = 10..13;
    let bulk = 20..40;
    for qpn in bulk.clone() {
        busy_pair(&mut node, qpn, EQ);
    }
    for qpn in urgent.clone() {
        busy_pair(&mut node, qpn, 3);
    }
    let schedule = |node: &mut Node, qpn| {
        let (core, qps) = (&mut node.engine.core, &mut node.engine.qps);
        core.schedule(qps.get_mut(qpn).unwrap());
    };
    for qpn in bulk.clone().chain(urgent.clone()) {
        schedule(&mut node, qpn);
    }
    // All want another turn after theirs.
    let mut turns = Vec::new();
    for _ in 0..160 {
        let qpn = node.engine.core.ready.pop().unwrap();
        node.engine.qps.get_mut(qpn).unwrap().ready = false;
        schedule(&mut node, qpn);
        turns.push(qpn);
    }
    assert_eq!(turns[..3], [10, 11, 12]);
    let of_bulk: Vec<usize> = (0..turns.len()).filter(|&n| turns[n] >= 20).collect();
    assert_eq!(of_bulk, (7..160).step_by(8).collect::<Vec<_>>());
    // Each of the bulk ones in its turn.
    let bulk_turns: Vec<u32> = of_bulk.iter().map(|&n| turns[n]).collect();
    assert_eq!(bulk_turns, bulk.collect::<Vec<_>>());
    // Without others those of low latency have all, and the other way round.
    control(&mut node, 3, EventOverflow::Hold, EventPriority::Bulk);
    let mut count = BTreeMap::new();
    for _ in 0..4 * 23 {
        let qpn = node.engine.core.ready.pop().unwrap();
        node.engine.qps.get_mut(qpn).unwrap().ready = false;
        schedule(&mut node, qpn);
        *count.entry(qpn).or_insert(0) += 1;
    }
    assert!(count.values().all(|&turns| turns >= 3), "{count:?}");
}

#[test]
fn interrupts_of_low_latency_come_first_of_those_that_are_due() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    for eqn in [EQ, 3] {
        moderate(&mut node, eqn, 10, 100);
    }
    node.execute(&ModifyEventQueue {
        eqn: 3,
        message: 3,
        moderation_microseconds: 20,
        moderation_count: 100,
        priority: EventPriority::LowLatency.number(),
        ..ModifyEventQueue::zeroed()
    });
    for eqn in [EQ, 3] {
        node.ring_eq(eqn, true);
        post(&mut node, eqn, 1);
    }
    node.now += 1_000_000;
    node.settle();
    assert_eq!(node.host.raised, [3, 2]);
}

#[test]
fn bulk_queue_pairs_that_wait_for_room_have_one_turn_in_eight_on_each_way() {
    use crate::memory::Way;
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Hold, EventPriority::LowLatency);
    // One way with both kinds; one with both, or with either alone.
    let (here, there) = (Way::Memory(1), Way::Memory(2));
    for others in [&[12, 22][..], &[12], &[22]] {
        let mut node = Node::new(1);
        node.create_eq(3, 3);
        control(&mut node, 3, EventOverflow::Hold, EventPriority::LowLatency);
        let way_of = |qpn| if others.contains(&qpn) { there } else { here };
        let wait = |node: &mut Node, qpn: u32| {
            let (core, qps) = (&mut node.engine.core, &mut node.engine.qps);
            let qp = qps.get_mut(qpn).unwrap();
            qp.waits_for_room = None;
            core.wait_for_room(qp, way_of(qpn));
        };
        for &qpn in [10, 11, 20].iter().chain(others) {
            busy_pair(&mut node, qpn, if qpn < 20 { 3 } else { EQ });
            wait(&mut node, qpn);
        }
        // A visit has one turn on each way, and who had it waits again.
        let mut turns = BTreeMap::new();
        for _ in 0..80 {
            for way in node.engine.core.room.ways() {
                let qpn = node.engine.core.room.pop(way).unwrap();
                *turns.entry(qpn).or_insert(0) += 1;
                wait(&mut node, qpn);
            }
        }
        assert_eq!(turns[&20], 10, "{turns:?}");
        assert_eq!(turns[&10] + turns[&11], 70, "{turns:?}");
        match others {
            [_, _] => assert_eq!(turns[&22], 10, "{turns:?}"),
            [alone] => assert_eq!(turns[alone], 80),
            _ => unreachable!(),
        }
    }
    // On a way that is stuck nobody has a second turn before all had theirs.
    for qpn in [10, 20] {
        busy_pair(&mut node, qpn, if qpn < 20 { 3 } else { EQ });
        let (core, qps) = (&mut node.engine.core, &mut node.engine.qps);
        core.wait_for_room(qps.get_mut(qpn).unwrap(), here);
    }
    node.engine.core.room.note(here, true);
    let mut turns = Vec::new();
    while node.engine.core.room.outwaited(here) {
        let qpn = node.engine.core.room.pop(here).unwrap();
        let (core, qps) = (&mut node.engine.core, &mut node.engine.qps);
        let qp = qps.get_mut(qpn).unwrap();
        qp.waits_for_room = None;
        core.wait_for_room(qp, here);
        turns.push(qpn);
    }
    assert_eq!(turns, [10, 20]);
}

#[test]
fn events_that_waited_come_when_their_queue_was_undefined() {
    for mapped in [true, false] {
        let mut node = Node::new(1);
        node.create_eq(3, 3);
        let row = SubFunction::SendCompletions;
        let map = |node: &mut Node, eqn| {
            let set = node.map_vectors(row, 1, &[(eqn, MESSAGE_OF_QUEUE)]);
            assert_eq!(set, CommandStatus::Ok);
        };
        map(&mut node, EQ);
        if mapped {
            bind(&mut node, 1, EQ_MAPPED, 1);
        }
        control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
        for sequence in [1, 2] {
            node.arm_cq(1, sequence, false);
            complete(&mut node, 1, false, false);
        }
        for id in 1..=ENTRIES {
            post(&mut node, EQ, id);
        }
        let state = node.engine.core().eqs.state(EQ);
        assert_eq!(state, EventQueueState::Undefined);
        // Nothing comes, and nothing stops, as long as it would go to a queue that is gone.
        if mapped {
            bind(&mut node, 1, EQ_MAPPED, 1);
        }
        assert_eq!(node.status().state(), Some(DeviceState::Running));
        map(&mut node, if mapped { 3 } else { EQ_NONE });
        let destroy = CommandOpcode::DestroyEventQueue;
        assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
        if mapped {
            // Where the map says by then.
            let told = node.events(3);
            assert_eq!(told.len(), 1);
            assert_eq!((told[0].id, told[0].param0), (1, 2));
        } else {
            // In the queue that has the number by then.
            node.create_eq(EQ, 2);
            assert!(node.events(EQ).is_empty());
            bind(&mut node, 1, EQ, 0);
            assert_eq!(ids(&mut node, EQ), [1]);
        }
        // Once.
        node.ring_eq(if mapped { 3 } else { EQ }, false);
        bind(
            &mut node,
            1,
            if mapped { EQ_MAPPED } else { EQ },
            mapped.into(),
        );
        assert!(node.events(if mapped { 3 } else { EQ }).is_empty());
    }
}

/// A device with interrupts and events that moderation holds back, and others that wait for room: what
/// it writes and raises from then on, after a reset or without one.
fn after_a_load(reset: bool) -> (bool, usize) {
    let mut node = Node::new(1);
    for (cqn, eqn) in [(2, 3), (5, 4)] {
        node.create_eq(eqn, eqn);
        node.create_cq(cqn, eqn, 4);
        node.execute(&ModifyCompletionQueue {
            cqn,
            eqn,
            moderation_count: 100,
            moderation_microseconds: 50,
            ..ModifyCompletionQueue::zeroed()
        });
        moderate(&mut node, eqn, 50, 1000);
        node.ring_eq(eqn, true);
        node.arm_cq(cqn, 0, false);
        complete(&mut node, cqn, false, false);
        let events = if eqn == 3 { 1 } else { ENTRIES + 5 };
        for id in 0..events {
            post(&mut node, eqn, id);
        }
    }
    node.host.raised.clear();
    if reset {
        node.write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    }
    let rings = [0, 3, 4].map(|eqn| node.event_ring(eqn));
    let rings = rings
        .into_iter()
        .chain([2, 5].map(|cqn| node.completion_ring(cqn)));
    let addresses: Vec<u64> = rings.flat_map(|ring| ring.step_by(8)).collect();
    let look = |node: &Node| -> Vec<u64> {
        let words = addresses.iter();
        words
            .map(|address| node.host.memory.get::<u64>(*address))
            .collect()
    };
    let before = look(&node);
    for _ in 0..10 {
        node.now += 1_000_000;
        node.settle();
        for eqn in [0, 3, 4] {
            node.ring_eq(eqn, true);
        }
        node.arm_cq(2, 1, false);
        node.receive(&[0; 64]);
    }
    (look(&node) != before, node.host.raised.len())
}

#[test]
fn after_a_reset_under_load_nothing_is_written_or_raised() {
    let (written, raised) = after_a_load(false);
    assert!(written && raised >= 2, "{written} {raised}");
    assert_eq!(after_a_load(true), (false, 0));
}

#[test]
fn nothing_is_raised_after_the_device_has_stopped() {
    // A bulk interrupt is put off, as there is a queue of low latency; in the same poll an event
    // finds its queue full, where that stops the device.
    let mut node = Node::new(1);
    for eqn in [3, 4] {
        node.create_eq(eqn, eqn);
    }
    control(&mut node, 4, EventOverflow::Stop, EventPriority::LowLatency);
    node.create_cq(2, 4, 4);
    node.execute(&ModifyCompletionQueue {
        cqn: 2,
        eqn: 4,
        moderation_count: 100,
        moderation_microseconds: 50,
        ..ModifyCompletionQueue::zeroed()
    });
    for id in 0..ENTRIES {
        post(&mut node, 4, id);
    }
    moderate(&mut node, 3, 50, 100);
    node.ring_eq(3, true);
    post(&mut node, 3, 1);
    node.arm_cq(2, 0, false);
    complete(&mut node, 2, false, false);
    node.now += 1_000_000;
    node.settle();
    assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
    assert_eq!(node.host.raised, [0]);
    // The report of an overflow stops it, and the queue that it is about is armed.
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Stop, EventPriority::Bulk);
    assert_eq!(
        node.map_vectors(SubFunction::Global, 0, &[(3, MESSAGE_OF_QUEUE)]),
        CommandStatus::Ok
    );
    for id in 0..ENTRIES {
        post(&mut node, 3, id);
        post(&mut node, EQ, id);
    }
    moderate(&mut node, EQ, 1000, (ENTRIES + 1) as u16);
    node.ring_eq(EQ, true);
    node.host.raised.clear();
    post(&mut node, EQ, ENTRIES);
    assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
    node.now += 10_000_000;
    node.settle();
    assert_eq!(node.host.raised, [0]);
    // Its last word goes to queue 0, whatever the map says.
    let last = node.events(EQ_CONTROL).pop().unwrap();
    assert_eq!(last.code, EventCode::DeviceFatal.number());
}

/// A device whose map has the same queue for each part, with a message of its own.
fn mapped_parts() -> Node {
    let mut node = Node::new(1);
    for (part, row) in (0..).zip(PARTS) {
        let set = node.map_vectors(row, 1, &[(EQ, 4 + part)]);
        assert_eq!(set, CommandStatus::Ok);
    }
    node
}

#[test]
fn an_arming_raises_the_message_of_the_oldest_before_one_that_waited() {
    let mut node = mapped_parts();
    for cqn in [2, 3] {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
        node.arm_cq(cqn, 0, false);
    }
    // One of each kind is there; another of the first waits for it to be read.
    complete(&mut node, 2, false, false);
    complete(&mut node, 3, true, false);
    node.arm_cq(2, 1, false);
    complete(&mut node, 2, false, false);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
    take_one(&mut node, EQ);
    node.ring_eq(EQ, true);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    assert_eq!(node.host.raised, [5]);
}

#[test]
fn another_ring_waits_for_the_first_to_be_told_as_read() {
    let mut node = Node::new(1);
    for id in 0..3 {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    post(&mut node, EQ, 3);
    let size = 32 << EQ_LOG_ENTRIES;
    let switch = SwitchEventQueue {
        eqn: EQ,
        log_entries: EQ_LOG_ENTRIES,
        ring: Buffer::contiguous(node.allocate(size), size),
        ..SwitchEventQueue::zeroed()
    };
    let opcode = CommandOpcode::SwitchEventQueue;
    // Some of it is not enough.
    let told = |node: &mut Node, read_index| {
        let word = EventDoorbell {
            eqn: EQ,
            read_index,
            relative: false,
            valid: true,
            arm: false,
            quiet: false,
            disarm: false,
        };
        node.doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
    };
    for read in 0..3 {
        told(&mut node, read);
        assert_eq!(node.command(opcode, &switch), CommandStatus::Busy, "{read}");
    }
    told(&mut node, 3);
    assert_eq!(node.command(opcode, &switch), CommandStatus::Ok);
}

#[test]
fn a_switch_raises_where_what_it_writes_reaches_the_count() {
    let mut node = Node::new(1);
    moderate(&mut node, EQ, 10_000, (ENTRIES + 2) as u16);
    node.ring_eq(EQ, true);
    for id in 0..ENTRIES + 2 {
        post(&mut node, EQ, id);
    }
    assert!(node.host.raised.is_empty());
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES + 1), CommandStatus::Ok);
    assert_eq!(node.host.raised, [2]);
}

#[test]
fn an_overflow_of_the_new_ring_is_told_at_once() {
    let mut node = Node::new(1);
    for id in 0..4 * ENTRIES {
        post(&mut node, EQ, id);
    }
    let overflow = (EventCode::EventQueueOverflow, u32::from(EQ));
    assert_eq!(node.event_codes(EQ_CONTROL), [overflow]);
    // The report, and the answer to the command.
    let written = |node: &Node| node.engine.core().eqs.written(EQ_CONTROL);
    let before = written(&node);
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES + 1), CommandStatus::Ok);
    assert_eq!(written(&node) - before, 2);
}

#[test]
fn another_moderation_does_not_begin_the_time_anew() {
    let mut node = Node::new(1);
    moderate(&mut node, EQ, 100, 50);
    node.ring_eq(EQ, true);
    post(&mut node, EQ, 1);
    for count in 51..60 {
        node.now += 11_000;
        node.settle();
        assert!(node.host.raised.is_empty());
        moderate(&mut node, EQ, 100, count);
    }
    node.now += 1_000;
    node.settle();
    assert_eq!(node.host.raised, [2]);
}

#[test]
fn errors_of_memory_that_are_not_told_are_counted() {
    let mut node = Node::new(1);
    let now = node.now;
    node.ring_eq(EQ_CONTROL, false);
    let errors = |node: &mut Node| -> Vec<EventEntry> {
        let events = node.events(EQ_CONTROL).into_iter();
        let code = EventCode::MemoryErrorInternal.number();
        events.filter(|event| event.code == code).collect()
    };
    let raised = 3 * u64::from(ENTRIES);
    for place in 0..raised {
        let (engine, host) = (&mut node.engine, &mut node.host);
        engine.internal_memory_error(place, false, now, host);
    }
    let told = errors(&mut node);
    assert!(told.iter().all(|event| event.param1 == 1));
    node.ring_eq(EQ_CONTROL, false);
    let last = errors(&mut node);
    assert_eq!(last.len(), 1);
    assert_eq!((last[0].param0, last[0].param1 as u32), (raised - 1, 1));
    let untold = last[0].param1 >> MEMORY_ERRORS_UNTOLD;
    assert_eq!(told.len() as u64 + 1 + untold, raised);
    // From one with room on nothing is left of that.
    node.ring_eq(EQ_CONTROL, false);
    let (engine, host) = (&mut node.engine, &mut node.host);
    engine.internal_memory_error(7, true, now, host);
    assert_eq!(errors(&mut node)[0].param1, 0);
}

#[test]
fn an_event_is_kept_back_once_wherever_the_map_sent_it() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    for eqn in [EQ, 3] {
        for id in 0..ENTRIES {
            post(&mut node, eqn, 1000 + id);
        }
    }
    for round in 0..7 {
        let entry = ([EQ, 3][round % 2], MESSAGE_OF_QUEUE);
        let set = node.map_vectors(SubFunction::Async, 0, &[entry]);
        assert_eq!(set, CommandStatus::Ok);
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.async_event(EventCode::QueuePairAccessError, 5, host);
    }
    for (eqn, kept) in [(EQ, 1), (3, 0)] {
        assert_eq!(node.events(eqn).len(), ENTRIES as usize);
        node.ring_eq(eqn, false);
        assert_eq!(node.events(eqn).len(), kept, "{eqn}");
    }
}

#[test]
fn an_overflow_is_told_on_queue_0_where_the_queue_of_its_row_is_gone() {
    let mut node = Node::new(1);
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    let set = node.map_vectors(SubFunction::Global, 0, &[(EQ, MESSAGE_OF_QUEUE)]);
    assert_eq!(set, CommandStatus::Ok);
    for eqn in [EQ, EQ_ASYNC] {
        for id in 0..=ENTRIES {
            post(&mut node, eqn, id);
        }
    }
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let overflow = |eqn: u16| (EventCode::EventQueueOverflow, u32::from(eqn));
    assert_eq!(
        node.event_codes(EQ_CONTROL),
        [overflow(EQ), overflow(EQ_ASYNC)]
    );
}

#[test]
fn an_overflow_is_told_on_queue_0_where_the_queue_that_was_to_tell_of_it_goes() {
    let overflow = |eqn: u16| (EventCode::EventQueueOverflow, u32::from(eqn));
    // It goes with what is kept back there, or by the overflow that it was to tell of.
    for kept_back in [true, false] {
        let mut node = Node::new(1);
        let set = node.map_vectors(SubFunction::Global, 0, &[(EQ, MESSAGE_OF_QUEUE)]);
        assert_eq!(set, CommandStatus::Ok);
        for id in 0..ENTRIES {
            post(&mut node, EQ, id);
        }
        let undefine = |node: &mut Node| {
            control(node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
        };
        if !kept_back {
            undefine(&mut node);
        }
        for id in 0..=ENTRIES {
            post(&mut node, EQ_ASYNC, id);
        }
        if kept_back {
            // It has no room for that, and says so.
            assert_eq!(node.event_codes(EQ_CONTROL), [overflow(EQ)]);
            undefine(&mut node);
            post(&mut node, EQ, ENTRIES);
        }
        assert_eq!(
            node.event_codes(EQ_CONTROL),
            [overflow(EQ), overflow(EQ_ASYNC)]
        );
        assert_eq!(node.status().state(), Some(DeviceState::Running));
        let state = node.engine.core().eqs.state(EQ);
        assert_eq!(state, EventQueueState::Undefined);
    }
}

#[test]
fn an_overflow_is_told_where_the_queue_that_was_to_tell_of_it_is_destroyed() {
    let mut node = Node::new(1);
    for eqn in [3, 4] {
        node.create_eq(eqn, eqn);
    }
    let to = |node: &mut Node, eqn| {
        let set = node.map_vectors(SubFunction::Global, 0, &[(eqn, MESSAGE_OF_QUEUE)]);
        assert_eq!(set, CommandStatus::Ok);
    };
    to(&mut node, 3);
    for eqn in [3, 4] {
        for id in 0..ENTRIES {
            post(&mut node, eqn, id);
        }
    }
    // The other one has no room to tell of it.
    post(&mut node, 4, ENTRIES);
    to(&mut node, EQ);
    assert!(node.event_codes(EQ).is_empty());
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, 3), CommandStatus::Ok);
    assert_eq!(node.event_codes(EQ), [(EventCode::EventQueueOverflow, 4)]);
}

#[test]
fn a_new_completion_queue_has_nothing_of_one_that_had_its_number() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    node.create_cq(2, EQ, 4);
    node.arm_cq(2, 0, false);
    complete(&mut node, 2, false, false);
    bind(&mut node, 2, 3, 0);
    node.arm_cq(2, 1, false);
    complete(&mut node, 2, false, false);
    let destroy = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(destroy, 2), CommandStatus::Ok);
    node.create_cq(2, EQ, 4);
    node.arm_cq(2, 2, false);
    complete(&mut node, 2, false, false);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    assert_eq!(ids(&mut node, EQ), [2, 2]);
}

#[test]
fn errors_of_memory_are_counted_wherever_the_map_sent_them() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    for eqn in [EQ, 3] {
        for id in 0..ENTRIES {
            post(&mut node, eqn, 1000 + id);
        }
    }
    let now = node.now;
    for place in 0..6 {
        let entry = ([EQ, 3][place as usize % 2], MESSAGE_OF_QUEUE);
        let set = node.map_vectors(SubFunction::Global, 0, &[entry]);
        assert_eq!(set, CommandStatus::Ok);
        let (engine, host) = (&mut node.engine, &mut node.host);
        engine.internal_memory_error(place, true, now, host);
    }
    for (eqn, kept) in [(EQ, None), (3, Some((5, 5 << MEMORY_ERRORS_UNTOLD)))] {
        node.events(eqn);
        node.ring_eq(eqn, false);
        let told = node.events(eqn);
        let told = told.iter().map(|event| (event.param0, event.param1));
        assert_eq!(told.collect::<Vec<_>>(), Vec::from_iter(kept), "{eqn}");
    }
}

#[test]
fn a_completion_event_that_waits_for_another_is_no_overflow_of_a_full_queue() {
    for overflow in [EventOverflow::Undefine, EventOverflow::Stop] {
        let mut node = Node::new(1);
        control(&mut node, EQ, overflow, EventPriority::Bulk);
        // It has gone round before: what slots held is known to be read.
        for id in 0..=ENTRIES {
            post(&mut node, EQ, id);
            node.events(EQ);
        }
        node.ring_eq(EQ, false);
        node.arm_cq(1, 1, false);
        complete(&mut node, 1, false, false);
        for id in 1..ENTRIES {
            post(&mut node, EQ, id);
        }
        node.arm_cq(1, 2, false);
        complete(&mut node, 1, false, false);
        assert_eq!(node.status().state(), Some(DeviceState::Running));
        assert_eq!(node.engine.core().eqs.state(EQ), EventQueueState::Unarmed);
        // It comes when that was read.
        assert_eq!(node.events(EQ).len(), ENTRIES as usize);
        node.ring_eq(EQ, false);
        assert_eq!(ids(&mut node, EQ), [1]);
        // One that waits for nothing but room is.
        for id in 0..ENTRIES {
            post(&mut node, EQ, id);
        }
        node.arm_cq(1, 3, false);
        complete(&mut node, 1, false, false);
        match overflow {
            EventOverflow::Stop => {
                let fatal = node.status().fatal();
                assert_eq!(fatal, Some(FatalCode::EventQueueOverflow));
            }
            _ => {
                let state = node.engine.core().eqs.state(EQ);
                assert_eq!(state, EventQueueState::Undefined);
            }
        }
    }
}

#[test]
fn who_is_undefined_holds_the_pin_no_more() {
    let mut node = Node::new(1);
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    node.ring_eq(EQ, true);
    for id in 0..ENTRIES {
        post(&mut node, EQ, id);
        assert!(node.engine.pin());
    }
    post(&mut node, EQ, ENTRIES);
    assert_eq!(node.engine.core().eqs.state(EQ), EventQueueState::Undefined);
    assert!(!node.engine.pin());
}

#[test]
fn a_mapped_queue_has_the_priority_of_where_its_row_and_processor_go() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Hold, EventPriority::LowLatency);
    let own = MESSAGE_OF_QUEUE;
    for (row, processor, eqn) in [
        (SubFunction::ReceiveCompletions, 1, 3),
        (SubFunction::SendCompletions, 1, EQ),
        (SubFunction::Any, 0, EQ),
    ] {
        let set = node.map_vectors(row, processor, &[(eqn, own)]);
        assert_eq!(set, CommandStatus::Ok);
    }
    let mapped = CreateCompletionQueue {
        processor: 1,
        ..node.cq_template(5, EQ_MAPPED, 4)
    };
    let create = CommandOpcode::CreateCompletionQueue;
    assert_eq!(node.command(create, &mapped), CommandStatus::Ok);
    // The queue pair that receives there is urgent, one that sends there is not.
    for (qpn, send_cqn, receive_cqn) in [(20, 5, 1), (10, 1, 5)] {
        node.create_qp(QpOptions {
            qpn,
            cqn: 1,
            ..QpOptions::default()
        });
        let (core, qps) = (&mut node.engine.core, &mut node.engine.qps);
        let qp = qps.get_mut(qpn).unwrap();
        (qp.send_cqn, qp.receive_cqn) = (send_cqn, receive_cqn);
        core.schedule(qp);
    }
    let ready = &mut node.engine.core.ready;
    assert_eq!([ready.pop(), ready.pop()], [Some(10), Some(20)]);
}

#[test]
fn events_held_back_for_low_latency_come_first_wherever_the_map_sends_them() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Hold, EventPriority::LowLatency);
    let entry = (3, MESSAGE_OF_QUEUE);
    let set = node.map_vectors(SubFunction::SendCompletions, 1, &[entry]);
    assert_eq!(set, CommandStatus::Ok);
    for (cqn, eqn, microseconds) in [(5, EQ, 10), (6, EQ_MAPPED, 20)] {
        node.create_cq(cqn, EQ_NONE, 4);
        node.execute(&ModifyCompletionQueue {
            cqn,
            eqn,
            processor: u16::from(eqn == EQ_MAPPED),
            moderation_count: 100,
            moderation_microseconds: microseconds,
            ..ModifyCompletionQueue::zeroed()
        });
        node.arm_cq(cqn, 0, false);
        complete(&mut node, cqn, false, false);
    }
    for eqn in [EQ, 3] {
        node.ring_eq(eqn, true);
    }
    assert!(node.host.raised.is_empty());
    node.now += 1_000_000;
    node.settle();
    assert_eq!(node.host.raised, [3, 2]);
}

#[test]
fn a_completion_event_waits_for_one_in_the_old_ring_however_far_behind() {
    let mut node = Node::new(1);
    node.arm_cq(1, 1, false);
    complete(&mut node, 1, false, false);
    for id in 1..ENTRIES {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    for id in 0..3 {
        post(&mut node, EQ, id);
    }
    node.arm_cq(1, 2, false);
    complete(&mut node, 1, false, false);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
}

#[test]
fn a_slot_that_was_zeroed_says_that_the_first_entry_of_a_ring_was_read() {
    let mut node = Node::new(1);
    for sequence in 0..2 {
        node.arm_cq(1, sequence, false);
        complete(&mut node, 1, false, false);
        assert_eq!(ids(&mut node, EQ), [1]);
        // Nobody has told that it was.
        node.arm_cq(1, sequence + 2, false);
        complete(&mut node, 1, false, false);
        assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
        assert_eq!(ids(&mut node, EQ), [1]);
        node.ring_eq(EQ, false);
        assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    }
}

#[test]
fn moderation_by_count_raises_the_message_of_the_last_and_by_time_of_the_first() {
    let mut node = mapped_parts();
    for cqn in [2, 3] {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
    }
    for (round, count, message) in [(0, 2, 5), (1, 100, 4)] {
        moderate(&mut node, EQ, 10, count);
        node.ring_eq(EQ, true);
        for (cqn, receive) in [(2, false), (3, true)] {
            node.arm_cq(cqn, round, false);
            complete(&mut node, cqn, receive, false);
        }
        node.now += 1_000_000;
        node.settle();
        assert_eq!(node.host.raised, [message]);
        node.host.raised.clear();
        assert_eq!(ids(&mut node, EQ), [2, 3]);
        node.ring_eq(EQ, false);
    }
}

#[test]
fn a_queue_is_made_with_its_choice_of_overflow_and_priority() {
    let mut node = Node::new(1);
    let size = 32 << EQ_LOG_ENTRIES;
    let create = CreateEventQueue {
        eqn: 3,
        message: 3,
        log_entries: EQ_LOG_ENTRIES,
        overflow: EventOverflow::Stop.number(),
        priority: EventPriority::LowLatency.number(),
        ring: Buffer::contiguous(node.allocate(size), size),
        ..CreateEventQueue::zeroed()
    };
    let destroy = CommandOpcode::DestroyEventQueue;
    for _ in 0..2 {
        node.execute(&create);
        assert!(node.engine.core().eqs.has_low_latency());
        assert_eq!(node.object_command(destroy, 3), CommandStatus::Ok);
        assert!(!node.engine.core().eqs.has_low_latency());
    }
    node.execute(&create);
    for id in 0..ENTRIES {
        post(&mut node, 3, id);
        assert_eq!(node.status().state(), Some(DeviceState::Running));
    }
    post(&mut node, 3, ENTRIES);
    assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
}

#[test]
fn another_moderation_holds_for_what_is_held_back() {
    let mut node = Node::new(1);
    for (microseconds, wait) in [(10, 10_000), (0, 0)] {
        moderate(&mut node, EQ, 1000, 100);
        node.ring_eq(EQ, true);
        post(&mut node, EQ, 1);
        moderate(&mut node, EQ, microseconds, 0);
        if wait > 0 {
            assert!(node.host.raised.is_empty());
            node.now += wait;
            node.settle();
        }
        assert_eq!(node.host.raised, [2], "{microseconds}");
        node.host.raised.clear();
        node.events(EQ);
        node.ring_eq(EQ, false);
    }
}

#[test]
fn a_completion_event_does_not_overtake_what_is_kept_back() {
    let mut node = Node::new(1);
    for id in 0..=ENTRIES {
        post(&mut node, EQ, 1000 + id);
    }
    // There is room, and the device was not told.
    for _ in 0..3 {
        take_one(&mut node, EQ);
    }
    node.arm_cq(1, 0, false);
    complete(&mut node, 1, false, false);
    node.ring_eq(EQ, false);
    let mut told = ids(&mut node, EQ);
    assert_eq!(told.split_off(told.len() - 2), [1000 + ENTRIES, 1]);
}

#[test]
fn a_mapped_queue_that_goes_while_it_waits_leaves_nothing_behind() {
    let mut node = Node::new(1);
    let set = node.map_vectors(SubFunction::Any, 1, &[(EQ, MESSAGE_OF_QUEUE)]);
    assert_eq!(set, CommandStatus::Ok);
    for id in 0..ENTRIES {
        post(&mut node, EQ, 1000 + id);
    }
    for round in 0..4 {
        node.create_cq(2, EQ_NONE, 4);
        bind(&mut node, 2, EQ_MAPPED, 1);
        node.arm_cq(2, 0, false);
        complete(&mut node, 2, false, false);
        assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
        if round % 2 == 1 {
            // Nor does one that is moved.
            bind(&mut node, 2, EQ_ASYNC, 0);
            assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
        }
        let destroy = CommandOpcode::DestroyCompletionQueue;
        assert_eq!(node.object_command(destroy, 2), CommandStatus::Ok);
        assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    }
}

#[test]
fn what_came_before_the_arming_goes_by_the_row_of_what_is_waited_for() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    for (row, eqn) in PARTS.into_iter().zip([EQ, 3]) {
        let set = node.map_vectors(row, 1, &[(eqn, MESSAGE_OF_QUEUE)]);
        assert_eq!(set, CommandStatus::Ok);
    }
    node.create_cq(2, EQ_NONE, 4);
    bind(&mut node, 2, EQ_MAPPED, 1);
    // A solicited receive and then a send that is not, neither of which the host has seen.
    for (round, solicited, eqn) in [(0, true, 3), (1, false, EQ)] {
        let seen = 2 * round;
        complete(&mut node, 2, true, true);
        complete(&mut node, 2, false, false);
        node.arm_cq_from(2, seen, round as u8, solicited);
        assert_eq!(ids(&mut node, eqn), [2], "{solicited}");
        for eqn in [EQ, 3] {
            node.ring_eq(eqn, false);
            assert!(node.events(eqn).is_empty());
        }
    }
}

/// Arms a completion queue and completes what it waits for.
fn fire(node: &mut Node, cqn: u32, sequence: u8) {
    node.arm_cq(cqn, sequence, false);
    complete(node, cqn, false, false);
}

/// Takes the next event of a queue; what it is about.
fn take_id(node: &mut Node, eqn: u16) -> u32 {
    let at = node.next_event_slot(eqn);
    let id = node.host.memory.get::<EventEntry>(at).id;
    take_one(node, eqn);
    id
}

/// A device with completion queues from 2 on, all for [`EQ`].
fn with_queues(count: u32) -> Node {
    let mut node = Node::new(1);
    for cqn in 2..2 + count {
        node.create_cq(cqn, EQ, 1);
        node.ring_eq(EQ_CONTROL, false);
    }
    node
}

/// Gives a command that does nothing, and reads nothing.
fn give_nop(node: &mut Node) {
    let nop = CommandEntry::new(CommandOpcode::Nop, 0, (0, 0), &0u64);
    node.put_command(&nop);
    node.ring_control();
    node.settle();
}

#[test]
fn a_queue_that_overflows_again_and_again_leaves_room_for_answers() {
    let mut node = with_queues(2 * ENTRIES);
    for cqn in 2..2 + 2 * ENTRIES {
        fire(&mut node, cqn, 0);
    }
    // The handler is served entry by entry, and queue 0 is not.
    for _ in 0..3 * ENTRIES {
        let cqn = take_id(&mut node, EQ);
        node.ring_eq(EQ, true);
        fire(&mut node, cqn, 1);
    }
    give_nop(&mut node);
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let events = node.event_codes(EQ_CONTROL);
    assert_eq!(events.last(), Some(&(EventCode::CommandDone, 0)));
}

#[test]
fn a_link_that_flaps_leaves_room_for_answers() {
    let mut node = Node::new(1);
    node.ring_eq(EQ_CONTROL, true);
    for up in 0..1000 {
        let (engine, host) = (&mut node.engine, &mut node.host);
        engine.set_link(up % 2 == 0, 0, host);
    }
    give_nop(&mut node);
    assert_eq!(node.status().state(), Some(DeviceState::Running));
    let events = node.event_codes(EQ_CONTROL);
    assert_eq!(events.last(), Some(&(EventCode::CommandDone, 0)));
    // The last state is told in the end.
    node.ring_eq(EQ_CONTROL, true);
    let last = node.events(EQ_CONTROL).pop().unwrap();
    assert_eq!(
        (last.code, last.param0),
        (EventCode::LinkChange.number(), 0)
    );
}

#[test]
fn an_overflow_is_told_of_once_until_nothing_waits_for_room() {
    let told = |node: &mut Node| node.event_codes(EQ_CONTROL).len();
    let mut node = with_queues(ENTRIES + 10);
    for cqn in 2..2 + ENTRIES {
        fire(&mut node, cqn, 0);
    }
    assert_eq!(told(&mut node), 0);
    fire(&mut node, 2 + ENTRIES, 0);
    assert_eq!(told(&mut node), 1);
    // Neither a doorbell that makes no room nor one that makes too little begins that anew.
    for more in 1..5 {
        node.ring_eq(EQ, false);
        fire(&mut node, 2 + ENTRIES + more, 0);
        take_one(&mut node, EQ);
        node.ring_eq(EQ, false);
        fire(&mut node, 6 + ENTRIES + more, 0);
        assert_eq!(told(&mut node), 0, "{more}");
    }
    for _ in 0..5 {
        take_one(&mut node, EQ);
    }
    node.ring_eq(EQ, false);
    fire(&mut node, 2, 1);
    assert_eq!(told(&mut node), 1);
}

#[test]
fn a_queue_that_is_large_enough_has_not_overflowed() {
    for overflow in [EventOverflow::Hold, EventOverflow::Undefine] {
        let mut node = with_queues(ENTRIES);
        control(&mut node, EQ, overflow, EventPriority::Bulk);
        for cqn in 2..2 + ENTRIES {
            fire(&mut node, cqn, 0);
        }
        // Full, and some wait for their own entry.
        for cqn in [2, 3, 4] {
            fire(&mut node, cqn, 1);
        }
        assert!(node.event_codes(EQ_CONTROL).is_empty(), "{overflow:?}");
        let state = node.engine.core().eqs.state(EQ);
        assert_eq!(state, EventQueueState::Unarmed);
        // As many as there is room for, when that is made.
        for cqn in [2, 3] {
            assert_eq!(take_id(&mut node, EQ), cqn);
        }
        node.ring_eq(EQ, false);
        assert!(node.event_codes(EQ_CONTROL).is_empty(), "{overflow:?}");
        let all: Vec<u32> = (4..2 + ENTRIES).chain([2, 3]).collect();
        assert_eq!(ids(&mut node, EQ), all);
        node.ring_eq(EQ, false);
        assert_eq!(ids(&mut node, EQ), [4]);
    }
}

#[test]
fn a_new_ring_that_is_large_enough_has_not_overflowed() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    let entry = (3, MESSAGE_OF_QUEUE);
    let set = node.map_vectors(SubFunction::Global, 0, &[entry]);
    assert_eq!(set, CommandStatus::Ok);
    fire(&mut node, 1, 0);
    fire(&mut node, 1, 1);
    for id in 1..2 * ENTRIES {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.event_codes(3).len(), 1);
    // What was kept back fills it, and who waits for its own entry does not ask for room.
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
    assert!(node.event_codes(3).is_empty());
    post(&mut node, EQ, 2 * ENTRIES);
    assert_eq!(node.event_codes(3).len(), 1);
}

#[test]
fn an_event_that_may_be_written_and_finds_no_room_is_an_overflow() {
    for overflow in [EventOverflow::Hold, EventOverflow::Undefine] {
        let mut node = Node::new(1);
        control(&mut node, EQ, overflow, EventPriority::Bulk);
        // Its next event waits for this one to be read.
        fire(&mut node, 1, 0);
        fire(&mut node, 1, 1);
        for id in 1..ENTRIES {
            post(&mut node, EQ, id);
        }
        // When it was, another has taken the place.
        take_one(&mut node, EQ);
        post(&mut node, EQ, ENTRIES);
        assert!(node.event_codes(EQ_CONTROL).is_empty());
        node.ring_eq(EQ, true);
        assert_eq!(
            node.event_codes(EQ_CONTROL),
            [(EventCode::EventQueueOverflow, u32::from(EQ))]
        );
        let state = node.engine.core().eqs.state(EQ);
        if overflow == EventOverflow::Hold {
            assert_eq!(state, EventQueueState::Unarmed);
            assert_eq!(ids(&mut node, EQ), (1..=ENTRIES).collect::<Vec<_>>());
            node.ring_eq(EQ, false);
        } else {
            assert_eq!(state, EventQueueState::Undefined);
            let destroy = CommandOpcode::DestroyEventQueue;
            assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
            node.create_eq(EQ, 2);
            bind(&mut node, 1, EQ, 0);
        }
        assert_eq!(ids(&mut node, EQ), [1]);
    }
}

#[test]
fn a_completion_event_that_undefines_its_queue_is_not_lost() {
    let mut node = Node::new(1);
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    for id in 0..ENTRIES {
        post(&mut node, EQ, id);
    }
    fire(&mut node, 1, 0);
    let state = node.engine.core().eqs.state(EQ);
    assert_eq!(state, EventQueueState::Undefined);
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
    node.create_eq(EQ, 2);
    assert!(ids(&mut node, EQ).is_empty());
    bind(&mut node, 1, EQ, 0);
    assert_eq!(ids(&mut node, EQ), [1]);
    // One that goes by the map comes where that says when the queue is destroyed.
    node.create_eq(3, 3);
    node.create_cq(2, EQ_NONE, 4);
    let map = |node: &mut Node, eqn| {
        let entry = (eqn, MESSAGE_OF_QUEUE);
        let set = node.map_vectors(SubFunction::SendCompletions, 1, &[entry]);
        assert_eq!(set, CommandStatus::Ok);
    };
    map(&mut node, EQ);
    bind(&mut node, 2, EQ_MAPPED, 1);
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    for id in 1..ENTRIES {
        post(&mut node, EQ, id);
    }
    node.ring_eq(EQ, false);
    post(&mut node, EQ, ENTRIES);
    fire(&mut node, 2, 0);
    let state = node.engine.core().eqs.state(EQ);
    assert_eq!(state, EventQueueState::Undefined);
    map(&mut node, 3);
    assert!(ids(&mut node, 3).is_empty());
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
    assert_eq!(ids(&mut node, 3), [2]);
}

#[test]
fn an_overflow_is_not_told_of_anew_without_room() {
    let mut node = with_queues(ENTRIES + 2);
    for cqn in 2..2 + ENTRIES + 1 {
        fire(&mut node, cqn, 0);
    }
    assert_eq!(node.event_codes(EQ_CONTROL).len(), 1);
    // Who waited is gone, and yet there is no room.
    let destroy = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(destroy, 2 + ENTRIES), CommandStatus::Ok);
    node.ring_eq(EQ, false);
    fire(&mut node, 3 + ENTRIES, 0);
    assert!(node.event_codes(EQ_CONTROL).is_empty());
}

#[test]
fn a_queue_that_is_still_there_is_not_told_to_be_undefined() {
    let mut node = Node::new(1);
    node.create_eq(3, 3);
    let entry = (3, MESSAGE_OF_QUEUE);
    let set = node.map_vectors(SubFunction::Global, 0, &[entry]);
    assert_eq!(set, CommandStatus::Ok);
    for id in 0..3 * ENTRIES {
        post(&mut node, EQ, id);
    }
    assert_eq!(node.event_codes(3).len(), 1);
    // Chosen while events are kept back already, not all of which the new ring has room for.
    control(&mut node, EQ, EventOverflow::Undefine, EventPriority::Bulk);
    assert_eq!(node.switch_eq(EQ, EQ_LOG_ENTRIES), CommandStatus::Ok);
    let state = node.engine.core().eqs.state(EQ);
    assert_eq!(state, EventQueueState::Unarmed);
    assert!(node.event_codes(3).is_empty());
    assert_eq!(ids(&mut node, EQ), (0..2 * ENTRIES).collect::<Vec<_>>());
    node.ring_eq(EQ, false);
    let rest = (2 * ENTRIES..3 * ENTRIES).collect::<Vec<_>>();
    assert_eq!(ids(&mut node, EQ), rest);
}

#[test]
fn nothing_is_written_once_an_event_that_waited_has_stopped_the_device() {
    let mut node = mapped_parts();
    node.create_eq(3, 3);
    control(&mut node, 3, EventOverflow::Stop, EventPriority::Bulk);
    node.create_cq(2, EQ_NONE, 4);
    bind(&mut node, 2, EQ_MAPPED, 1);
    for eqn in [EQ, 3] {
        for id in 0..ENTRIES {
            post(&mut node, eqn, id);
        }
    }
    fire(&mut node, 2, 0);
    post(&mut node, EQ, ENTRIES);
    // When there is room, its event goes to a queue without.
    for row in PARTS {
        let set = node.map_vectors(row, 1, &[(3, MESSAGE_OF_QUEUE)]);
        assert_eq!(set, CommandStatus::Ok);
    }
    node.events(EQ);
    node.ring_eq(EQ, false);
    assert_eq!(node.status().fatal(), Some(FatalCode::EventQueueOverflow));
    assert!(ids(&mut node, EQ).is_empty());
}

#[test]
fn nobody_overtakes_those_who_wait_for_room() {
    let mut node = with_queues(ENTRIES + 1);
    for cqn in 2..2 + ENTRIES + 1 {
        fire(&mut node, cqn, 0);
    }
    // The last one waits. The others are read and fire again before the doorbell, as do events.
    for round in 0..ENTRIES {
        let cqn = take_id(&mut node, EQ);
        assert_eq!(cqn, 2 + round);
        fire(&mut node, cqn, 1);
        post(&mut node, EQ, 1000 + round);
        node.ring_eq(EQ, true);
    }
    // In the order in which they were raised.
    let mut order = vec![2 + ENTRIES];
    order.extend((0..ENTRIES).flat_map(|round| [2 + round, 1000 + round]));
    let mut all = Vec::new();
    for _ in 0..3 {
        all.extend(ids(&mut node, EQ));
        node.ring_eq(EQ, true);
    }
    assert_eq!(all, order);
}

#[test]
fn who_waits_is_written_as_soon_as_there_is_room() {
    let mut node = with_queues(ENTRIES + 1);
    for cqn in 2..2 + ENTRIES + 1 {
        fire(&mut node, cqn, 0);
    }
    // The last one waits. The host has read two entries and told of none when the next event comes.
    assert_eq!([take_id(&mut node, EQ), take_id(&mut node, EQ)], [2, 3]);
    post(&mut node, EQ, 1000);
    let all: Vec<u32> = (4..2 + ENTRIES + 1).chain([1000]).collect();
    assert_eq!(ids(&mut node, EQ), all);
}

#[test]
fn what_waited_and_is_due_is_raised_before_a_newer_event_and_by_the_oldest() {
    let mut node = mapped_parts();
    for cqn in [2, 3] {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
        node.arm_cq(cqn, 0, false);
    }
    for id in 0..ENTRIES {
        post(&mut node, EQ, id);
    }
    moderate(&mut node, EQ, 10, ENTRIES as u16 + 1);
    node.ring_eq(EQ, true);
    // A send waits for room, and is written when a receive comes, as the host has read and not told.
    complete(&mut node, 2, false, false);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 1);
    take_one(&mut node, EQ);
    take_one(&mut node, EQ);
    assert_eq!(node.host.raised, []);
    complete(&mut node, 3, true, false);
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
    // The send was one too many; the oldest is none that went by the map.
    assert_eq!(node.host.raised, [EQ]);
}

/// A device whose queue that tells of overflows is being drained when another one overflows: it has had two
/// entries, and is of the kind that `overflow` says. Gives what was told on queue 0.
fn with_an_overflow_elsewhere(overflow: EventOverflow) -> (Node, Vec<(EventCode, u32)>) {
    const FULL: u16 = 3;
    let mut node = Node::new(1);
    node.create_eq(FULL, 3);
    let entry = (EQ, MESSAGE_OF_QUEUE);
    let mapped = node.map_vectors(SubFunction::Global, 0, &[entry]);
    assert_eq!(mapped, CommandStatus::Ok);
    for row in PARTS {
        assert_eq!(node.map_vectors(row, 1, &[entry]), CommandStatus::Ok);
    }
    for cqn in [2, 3] {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
    }
    control(&mut node, EQ, overflow, EventPriority::Bulk);
    // Each has an entry and waits for that to be read.
    for sequence in 0..2 {
        for cqn in [2, 3] {
            fire(&mut node, cqn, sequence);
        }
    }
    assert_eq!(node.engine.core.eqs.waiting(EQ), 2);
    for id in 0..ENTRIES {
        post(&mut node, FULL, id);
    }
    for row in PARTS {
        let entry = (FULL, MESSAGE_OF_QUEUE);
        assert_eq!(node.map_vectors(row, 1, &[entry]), CommandStatus::Ok);
    }
    node.event_codes(EQ_CONTROL);
    assert_eq!(ids(&mut node, EQ), [2, 3]);
    node.ring_eq(EQ, true);
    let told = node.event_codes(EQ_CONTROL);
    (node, told)
}

#[test]
fn a_queue_that_tells_of_anothers_overflow_has_none_itself() {
    let overflow = [(EventCode::EventQueueOverflow, 3)];
    for kind in [
        EventOverflow::Hold,
        EventOverflow::Stop,
        EventOverflow::Undefine,
    ] {
        let (mut node, told) = with_an_overflow_elsewhere(kind);
        assert_eq!(told, [], "{kind:?}");
        assert_eq!(node.event_codes(EQ), overflow, "{kind:?}");
        assert_eq!(node.status().state(), Some(DeviceState::Running));
    }
}

#[test]
fn what_is_raised_again_is_the_message_that_the_queue_has_now() {
    let mut node = Node::new(1);
    node.ring_eq(EQ, true);
    post(&mut node, EQ, 1);
    assert_eq!(node.host.raised, [2]);
    node.execute(&ferrite_abi::ModifyEventQueue {
        eqn: EQ,
        message: 6,
        ..ferrite_abi::ModifyEventQueue::zeroed()
    });
    node.engine.raise_again(&mut node.host);
    assert_eq!(node.host.raised, [2, 6]);
}

/// A device with so many completion queues that each have an unread event and have fired again.
fn with_unread_events(count: u32) -> Node {
    let mut node = Node::new(1);
    let buffer = node.cq_template(2, EQ, 0).buffer;
    assert_eq!(node.switch_eq(EQ, 11), CommandStatus::Ok);
    for cqn in 2..2 + count {
        node.execute(&CreateCompletionQueue {
            cqn,
            eqn: EQ,
            doorbell_page: 1,
            record_offset: 64,
            buffer,
            ..CreateCompletionQueue::zeroed()
        });
        node.ring_eq(EQ_CONTROL, false);
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.write_completion(cqn, CompletionEntry::zeroed(), false, host)
            .unwrap();
    }
    for sequence in 0..2 {
        for cqn in 2..2 + count {
            let word = CompletionDoorbell {
                cqn,
                seen: 0,
                sequence,
                solicited: false,
            };
            node.doorbell(1, DOORBELL_COMPLETION, word.encode());
        }
    }
    assert_eq!(node.engine.core.eqs.waiting(EQ), count as usize);
    node
}

#[test]
fn a_doorbell_costs_as_much_as_it_tells_of_however_many_wait() {
    const COUNT: u32 = 1000;
    let mut node = with_unread_events(COUNT);
    let accesses = |node: &mut Node, bell: &mut dyn FnMut(&mut Node)| {
        *node.host.accesses.borrow_mut() = Some(Vec::new());
        let work = node.engine.core.work;
        bell(node);
        let accesses = node.host.accesses.borrow_mut().take().unwrap();
        (accesses.len(), node.engine.core.work - work)
    };
    let nothing = accesses(&mut node, &mut |node| node.ring_eq(EQ, false));
    assert_eq!(nothing, (0, 0));
    for _ in 0..10 {
        take_one(&mut node, EQ);
    }
    let (count, work) = accesses(&mut node, &mut |node| node.ring_eq(EQ, false));
    assert_eq!(work, 10);
    assert!(count <= 40, "{count}");
    let (count, work) = accesses(&mut node, &mut |node| {
        assert_eq!(node.switch_eq(EQ, 11), CommandStatus::Ok);
    });
    assert_eq!(work, 0);
    assert!(count <= 40, "{count}");
    let first: Vec<u32> = (12..2 + COUNT).chain(2..12).collect();
    assert_eq!(ids(&mut node, EQ), first);
    node.ring_eq(EQ, false);
    assert_eq!(ids(&mut node, EQ), (12..2 + COUNT).collect::<Vec<_>>());
    assert_eq!(node.engine.core.eqs.waiting(EQ), 0);
}

#[test]
fn an_entry_of_a_queue_that_is_gone_holds_nobody_up() {
    let mut node = Node::new(1);
    for id in 0..ENTRIES {
        post(&mut node, EQ, id);
    }
    node.events(EQ);
    node.ring_eq(EQ, false);
    fire(&mut node, 1, 0);
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, EQ.into()), CommandStatus::Ok);
    node.create_eq(EQ, 2);
    // The next entry has the number that its last one had.
    for id in 0..ENTRIES {
        post(&mut node, EQ, id);
    }
    fire(&mut node, 1, 1);
    node.events(EQ);
    node.ring_eq(EQ, false);
    assert_eq!(ids(&mut node, EQ), [1]);
}

#[test]
fn a_completion_event_without_room_ends_the_quiet_of_answers() {
    let mut node = Node::new(1);
    bind(&mut node, 1, EQ_CONTROL, 0);
    let quiet = EventDoorbell {
        eqn: EQ_CONTROL,
        read_index: node.consumed_events(EQ_CONTROL),
        valid: true,
        arm: true,
        quiet: true,
        ..EventDoorbell::decode(0)
    };
    node.doorbell(0, DOORBELL_EVENT_QUEUE, quiet.encode());
    for cookie in 0..ENTRIES / 2 {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        let answer = event(EventCode::CommandDone, cookie, 0, 0);
        core.post_event(Route::to(EQ_CONTROL), answer, host);
    }
    assert!(node.host.raised.is_empty());
    fire(&mut node, 1, 0);
    assert_eq!(node.engine.core.eqs.waiting(EQ_CONTROL), 1);
    assert_eq!(node.host.raised.len(), 1);
    node.events(EQ_CONTROL);
    node.ring_eq(EQ_CONTROL, true);
    assert_eq!(node.event_codes(EQ_CONTROL), [(EventCode::Completion, 1)]);
}

#[test]
fn moderation_begins_anew_when_everything_was_read() {
    let mut node = Node::new(1);
    moderate(&mut node, EQ, 10, 100);
    node.ring_eq(EQ, true);
    post(&mut node, EQ, 1);
    node.now += 9_000;
    node.settle();
    assert_eq!(ids(&mut node, EQ), [1]);
    node.ring_eq(EQ, true);
    node.now += 500;
    post(&mut node, EQ, 2);
    node.now += 9_999;
    node.settle();
    assert!(node.host.raised.is_empty());
    // A doorbell that leaves something unread does not.
    post(&mut node, EQ, 3);
    assert_eq!(take_id(&mut node, EQ), 2);
    node.ring_eq(EQ, true);
    node.now += 1;
    node.settle();
    assert_eq!(node.host.raised, [2]);
}

#[test]
fn an_overflow_of_a_queue_that_is_gone_is_not_told_of() {
    let mut node = Node::new(1);
    for eqn in [3, 4] {
        node.create_eq(eqn, eqn);
    }
    let entry = (3, MESSAGE_OF_QUEUE);
    let set = node.map_vectors(SubFunction::Global, 0, &[entry]);
    assert_eq!(set, CommandStatus::Ok);
    for eqn in [3, 4] {
        for id in 0..ENTRIES {
            post(&mut node, eqn, id);
        }
    }
    control(&mut node, 4, EventOverflow::Undefine, EventPriority::Bulk);
    post(&mut node, 4, ENTRIES);
    let destroy = CommandOpcode::DestroyEventQueue;
    assert_eq!(node.object_command(destroy, 4), CommandStatus::Ok);
    node.create_eq(4, 4);
    assert_eq!(ids(&mut node, 3), (0..ENTRIES).collect::<Vec<_>>());
    node.ring_eq(3, false);
    assert!(node.event_codes(3).is_empty());
}

#[test]
fn what_is_raised_again_is_the_message_that_was_raised() {
    let mut node = mapped_parts();
    for cqn in [2, 3] {
        node.create_cq(cqn, EQ_NONE, 4);
        bind(&mut node, cqn, EQ_MAPPED, 1);
        node.arm_cq(cqn, 0, false);
    }
    moderate(&mut node, EQ, 10, 2);
    node.ring_eq(EQ, true);
    complete(&mut node, 2, false, false);
    complete(&mut node, 3, true, false);
    // The second made it due; the first is the oldest that is unread.
    assert_eq!(node.host.raised, [5]);
    node.engine.raise_again(&mut node.host);
    assert_eq!(node.host.raised, [5, 5]);
}

/// What was raised and not seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Event(u32),
    Completion(u32),
}

/// What a host knows of an event queue.
#[derive(Debug, Default)]
struct Place {
    /// What is to come here, by when it was raised.
    pending: BTreeMap<u64, Pending>,
    /// The device has told of an overflow since nothing waited for room.
    reported: bool,
    /// What was raised when the host looked last is before this.
    before: u64,
    /// It has ever told of one.
    overflowed: bool,
    /// Entries that the device was seen to have written.
    written: u32,
    /// Entries that it was told as read.
    told: u32,
    armed: bool,
    moderated: bool,
    /// Since then the queue has been due, where moderation holds it back.
    due_at: Option<u64>,
}

/// What a host knows of a completion queue.
#[derive(Debug, Default)]
struct Consumer {
    /// Armed for the next, or for a solicited one.
    armed: Option<bool>,
    /// What it waits for has come.
    fulfilled: bool,
    /// It has fired, and its event was not seen yet.
    queued: bool,
    bound: u16,
    sequence: u8,
    /// Its last entry in each event queue.
    last: BTreeMap<u16, u32>,
}

impl Consumer {
    /// Whether its last entry in an event queue is before `end`, or there is none.
    fn is_read(&self, eqn: u16, end: u32) -> bool {
        self.last.get(&eqn).is_none_or(|&index| index < end)
    }
}

const PLACES: [u16; 4] = [EQ_ASYNC, 2, 3, 4];
/// The event queue that tells of overflows.
const GLOBAL: u16 = 5;
const CQNS: std::ops::Range<u32> = 10..18;
const MODERATION: u64 = 30_000;

struct Model {
    node: Node,
    places: BTreeMap<u16, Place>,
    consumers: BTreeMap<u32, Consumer>,
    /// Asynchronous events raised, and seen.
    raised: u32,
    seen: u32,
    /// Orders what is raised.
    next: u64,
    interrupts: usize,
}

impl Model {
    fn new() -> Self {
        let mut node = Node::new(1);
        for eqn in [3, 4, GLOBAL] {
            node.create_eq(eqn, eqn);
        }
        let entry = (GLOBAL, MESSAGE_OF_QUEUE);
        let set = node.map_vectors(SubFunction::Global, 0, &[entry]);
        assert_eq!(set, CommandStatus::Ok);
        for cqn in CQNS {
            node.create_cq(cqn, EQ, 4);
        }
        let consumer = || Consumer {
            bound: EQ,
            ..Consumer::default()
        };
        Self {
            node,
            places: PLACES.map(|eqn| (eqn, Place::default())).into(),
            consumers: CQNS.map(|cqn| (cqn, consumer())).collect(),
            raised: 0,
            seen: 0,
            next: 0,
            interrupts: 0,
        }
    }

    /// What is to come to `eqn` from now on.
    fn raise(&mut self, eqn: u16, pending: Pending) {
        let place = self.places.get_mut(&eqn).expect("a queue of the test");
        place.pending.insert(self.next, pending);
        self.next += 1;
    }

    /// Raises events of one kind about objects of their own.
    fn post(&mut self, eqn: u16, count: u32) {
        for _ in 0..count {
            self.raise(eqn, Pending::Event(self.raised));
            post(&mut self.node, eqn, self.raised);
            self.raised += 1;
            self.look();
        }
    }

    /// Looks at what the device did.
    fn look(&mut self) {
        for (&eqn, place) in &mut self.places {
            let events = self.node.unread_events(eqn, place.written);
            for event in events {
                let index = place.written;
                place.written = place.written.wrapping_add(1);
                let what = match EventCode::from_number(event.code) {
                    Some(EventCode::SrqLimit) => Pending::Event(event.id),
                    Some(EventCode::Completion) => Pending::Completion(event.id),
                    _ => panic!("{event:?}"),
                };
                let mut pending = place.pending.iter();
                let raised = pending.find(|(_, pending)| **pending == what);
                let raised = raised.map(|(number, _)| *number);
                // What the map sends here may have waited elsewhere.
                let mut ordered = true;
                if let Pending::Completion(cqn) = what {
                    let consumer = self.consumers.get_mut(&cqn).expect("a queue of the test");
                    ordered = consumer.bound != EQ_MAPPED;
                    assert_eq!(event.param0, u64::from(consumer.sequence), "another arming");
                    if consumer.queued {
                        consumer.queued = false;
                    } else {
                        assert!(consumer.fulfilled, "an event for nothing: {event:?}");
                        (consumer.armed, consumer.fulfilled) = (None, false);
                    }
                    consumer.last.insert(eqn, index);
                } else {
                    assert!(raised.is_some(), "doubled: {event:?}");
                    self.seen += 1;
                }
                if let Some(number) = raised {
                    place.pending.remove(&number);
                }
                let before = ..raised.unwrap_or(self.next);
                for (_, earlier) in place.pending.range(before).filter(|_| ordered) {
                    let waits_for_its_own = match earlier {
                        Pending::Event(_) => false,
                        Pending::Completion(cqn) => !self.consumers[cqn].is_read(eqn, place.told),
                    };
                    assert!(waits_for_its_own, "{what:?} has overtaken {earlier:?}");
                }
            }
            let unread = self.node.unread_events(eqn, 0);
            for cqn in self.consumers.keys() {
                let of_it = unread.iter().filter(|event| {
                    event.id == *cqn && event.code == EventCode::Completion.number()
                });
                assert!(of_it.count() <= 1, "two unread events of {cqn}");
            }
        }
        let mut fired = Vec::new();
        for (&cqn, consumer) in &mut self.consumers {
            if consumer.fulfilled && consumer.bound != EQ_NONE {
                // It has fired and waits: for room, or for the host to read. One event is for both
                // where it has before.
                if !consumer.queued && consumer.bound != EQ_MAPPED {
                    fired.push((cqn, consumer.bound));
                }
                (consumer.armed, consumer.fulfilled, consumer.queued) = (None, false, true);
            }
        }
        for (cqn, bound) in fired {
            self.raise(bound, Pending::Completion(cqn));
        }
        self.look_at_overflows();
        // Each queue has its own message.
        for message in self.node.host.raised.split_off(self.interrupts) {
            let place = self.places.get_mut(&message).expect("a queue of the test");
            assert!(place.armed, "an interrupt without an arming");
            (place.armed, place.due_at) = (false, None);
        }
        self.node.host.raised.clear();
        self.interrupts = 0;
        for (eqn, place) in &mut self.places {
            let due = place.armed && place.written != place.told;
            assert!(!due || place.moderated, "a lost wake-up of {eqn}");
            if !due {
                place.due_at = None;
            }
            let since = *place.due_at.get_or_insert(self.node.now);
            if !due {
                place.due_at = None;
            } else {
                assert!(self.node.now - since <= MODERATION, "held back too long");
            }
        }
        assert_eq!(self.node.status().state(), Some(DeviceState::Running));
    }

    /// Only a queue that something waits for has overflowed, and it is told of once.
    fn look_at_overflows(&mut self) {
        let reports = ids(&mut self.node, GLOBAL);
        self.node.ring_eq(GLOBAL, false);
        let mut mapped = self.consumers.values();
        let mapped = mapped.any(|consumer| consumer.bound == EQ_MAPPED && consumer.queued);
        for (&eqn, place) in &mut self.places {
            // Whether anything waits for room, where what is before entry `end` was read.
            let waits = |end, before| {
                let mut pending = place.pending.range(..before).map(|(_, pending)| pending);
                pending.any(|pending| match pending {
                    Pending::Event(_) => true,
                    Pending::Completion(cqn) => self.consumers[cqn].is_read(eqn, end),
                })
            };
            let consumed = self.node.consumed_events(eqn);
            let (may_wait, does_wait) = (
                waits(consumed, self.next) || mapped,
                waits(place.told, self.next),
            );
            // There was room for all that waited then.
            place.reported &= waits(place.told, place.before);
            place.before = self.next;
            for _ in reports.iter().filter(|id| **id == u32::from(eqn)) {
                assert!(may_wait, "{eqn} has not overflowed");
                assert!(!place.reported, "told again of {eqn}");
                (place.reported, place.overflowed) = (true, true);
            }
            assert!(!does_wait || place.overflowed, "not told of {eqn}");
            place.reported &= does_wait;
        }
    }

    fn tell(&mut self, eqn: u16, relative: bool, arm: bool, disarm: bool) {
        let consumed = self.node.consumed_events(eqn);
        let place = self.places.get_mut(&eqn).expect("a queue of the test");
        let bell = Bell {
            arm,
            disarm,
            relative: relative.then_some(consumed.wrapping_sub(place.told)),
        };
        place.told = consumed;
        if consumed == place.written {
            // Moderation begins anew with what comes next.
            place.due_at = None;
        }
        if arm {
            place.armed = true;
        } else if disarm {
            place.armed = false;
        }
        ring(&mut self.node, eqn, bell);
    }

    fn step(&mut self, (what, a, b, c): (u8, usize, usize, bool)) {
        let eqn = PLACES[a % PLACES.len()];
        let cqn = CQNS.start + (b % CQNS.len()) as u32;
        match what {
            0..=3 => {
                let (receive, solicited) = (a % 2 == 0, c);
                let consumer = self.consumers.get_mut(&cqn).expect("a queue of the test");
                consumer.fulfilled |= consumer.armed.is_some_and(|all| all || solicited);
                complete(&mut self.node, cqn, receive, solicited);
            }
            4..=6 => {
                let consumer = self.consumers.get_mut(&cqn).expect("a queue of the test");
                consumer.sequence = (consumer.sequence + 1) % 4;
                // What an earlier arming waits for is still waited for.
                let all = !c || consumer.armed == Some(true);
                consumer.armed = Some(all);
                let sequence = consumer.sequence;
                self.node.arm_cq(cqn, sequence, c);
            }
            7 | 8 => {
                // Some of what is there.
                let unread = self.node.unread_events(eqn, 0).len();
                for _ in 0..a.min(unread) {
                    take_one(&mut self.node, eqn);
                }
            }
            9..=11 => self.tell(eqn, c, b % 3 != 0, false),
            12 => self.tell(eqn, c, b % 3 == 0, true),
            13 => {
                let bound = [2, 3, 4, EQ_NONE, EQ_MAPPED, EQ_MAPPED][a % 6];
                let processor = if bound == EQ_MAPPED { b % 2 } else { 0 };
                self.bind(cqn, bound, processor as u16);
            }
            14 => {
                let row = PARTS[b % 2];
                let to = [2, 3, 4, EQ_NONE][a % 4];
                let entry = (to, MESSAGE_OF_QUEUE);
                let set = self.node.map_vectors(row, (b / 2 % 2) as u16, &[entry]);
                assert_eq!(set, CommandStatus::Ok);
            }
            15 => {
                // The driver gives no third ring before the first is read, and says so.
                if !self.node.is_switching(eqn) {
                    self.tell(eqn, c, false, false);
                    self.look();
                    let place = self.places.get_mut(&eqn).expect("a queue of the test");
                    place.reported = false;
                    let now = self.node.eq_log_entries(eqn);
                    let log_entries = now + u8::from(c && now < EQ_LOG_ENTRIES + 2);
                    assert_eq!(self.node.switch_eq(eqn, log_entries), CommandStatus::Ok);
                }
            }
            16 => {
                let place = self.places.get_mut(&eqn).expect("a queue of the test");
                place.moderated = c;
                let microseconds = if c { MODERATION / 1000 } else { 0 };
                moderate(&mut self.node, eqn, microseconds as u16, (b % 4) as u16);
            }
            17 => {
                self.node.now += (a as u64 % 5) * MODERATION / 4;
                self.node.settle();
            }
            18 => self.post(eqn, a as u32),
            19 => {
                // Until it is exactly full, or one more. With two rings there may be more unread.
                let unread = self.node.unread_events(eqn, 0).len() as u32;
                let entries: u32 = 1 << self.node.eq_log_entries(eqn);
                let free = entries.saturating_sub(unread);
                self.post(eqn, free + u32::from(c));
            }
            _ => {
                let consumer = self.consumers.get_mut(&cqn).expect("a queue of the test");
                consumer.sequence = (consumer.sequence + 1) % 4;
                (consumer.armed, consumer.fulfilled) = (Some(true), true);
                let sequence = consumer.sequence;
                self.node.arm_cq(cqn, sequence, false);
                complete(&mut self.node, cqn, a % 2 == 0, false);
            }
        }
        self.look();
    }

    fn bind(&mut self, cqn: u32, bound: u16, processor: u16) {
        let consumer = self.consumers.get_mut(&cqn).expect("a queue of the test");
        let old = std::mem::replace(&mut consumer.bound, bound);
        let queued = consumer.queued;
        if old != bound {
            if let Some(place) = self.places.get_mut(&old) {
                let moves = Pending::Completion(cqn);
                place.pending.retain(|_, pending| *pending != moves);
            }
            if queued && self.places.contains_key(&bound) {
                self.raise(bound, Pending::Completion(cqn));
            }
        }
        bind(&mut self.node, cqn, bound, processor);
    }

    /// Everything is read in the end.
    fn finish(&mut self) {
        for cqn in CQNS {
            self.bind(cqn, EQ, 0);
            self.look();
        }
        for _ in 0..20 {
            for eqn in PLACES {
                self.node.events(eqn);
                self.tell(eqn, false, true, false);
                self.node.now += MODERATION;
                self.node.settle();
                self.look();
            }
        }
        assert_eq!(self.seen, self.raised, "an event was lost");
        for (cqn, consumer) in &self.consumers {
            assert!(
                !consumer.queued && !consumer.fulfilled,
                "{cqn}: {consumer:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever is completed, armed, disarmed, moved, mapped, read, told, switched and moderated in
    /// whatever order: nothing is lost, doubled, out of order or overtaken, there is at most one
    /// interrupt for an arming, no wake-up is lost, and overflows are told of where there are any.
    #[test]
    fn nothing_is_lost_doubled_or_late_in_any_order(
        steps in vec((0u8..23, 0usize..40, 0usize..8, any::<bool>()), 1..150),
    ) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
        }
        model.finish();
    }
}
