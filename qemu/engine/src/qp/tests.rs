// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of queue pairs.

use super::*;
use crate::testing::{Node, QpOptions, SendWork};

const QPN: u32 = 2;
const STATES: [State; 7] = [
    State::Reset,
    State::Init,
    State::Rtr,
    State::Rts,
    State::Sqd,
    State::Sqe,
    State::Error,
];

fn node() -> Node {
    let mut node = Node::new(1);
    node.create_qp(QpOptions::default());
    node
}

/// A node whose queue pair is in `state`.
fn node_in(state: State) -> Node {
    let mut node = node();
    let peer = node.as_peer(77);
    match state {
        State::Reset => {}
        State::Init => node.to_init(QPN),
        State::Rtr => {
            node.to_init(QPN);
            node.to_rtr(QPN, &peer);
        }
        State::Sqe => panic!("not a state of connections"),
        _ => {
            node.connect(QPN, &peer);
            if state != State::Rts {
                assert_eq!(node.set_state(QPN, state), CommandStatus::Ok);
            }
        }
    }
    assert_eq!(node.qp_state(QPN), state);
    node
}

/// A command with good values for everything, and nothing chosen.
fn good(node: &Node) -> ModifyQueuePair {
    ModifyQueuePair {
        qpn: QPN,
        log_mtu: 10,
        timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
        ord: 1,
        ird: 1,
        access: ACCESS_REMOTE,
        destination_qpn: 5,
        address_vector: AddressVector {
            gid: node.gid,
            mac: node.mac,
            vlan: VLAN_NONE,
            ..AddressVector::zeroed()
        },
        ..ModifyQueuePair::zeroed()
    }
}

fn modify(node: &mut Node, command: &ModifyQueuePair) -> CommandStatus {
    node.command(CommandOpcode::ModifyQueuePair, command)
}

#[test]
fn only_the_transitions_of_the_verbs_are_allowed() {
    let from_states = STATES.iter().filter(|&&state| state != State::Sqe).copied();
    for from in from_states {
        for to in STATES {
            let mut node = node_in(from);
            let required = transition(Service::Rc, from, to).map(|transition| transition.required);
            let command = ModifyQueuePair {
                mask: MODIFY_STATE | required.unwrap_or(0),
                state: to.number(),
                ..good(&node)
            };
            let expected = matches!(
                (from, to),
                (_, State::Reset)
                    | (State::Reset | State::Init, State::Init)
                    | (State::Init, State::Rtr)
                    | (State::Rtr | State::Rts | State::Sqd, State::Rts)
                    | (State::Rts | State::Sqd, State::Sqd)
                    | (
                        State::Init | State::Rtr | State::Rts | State::Sqd | State::Error,
                        State::Error
                    )
            );
            let status = modify(&mut node, &command);
            if expected {
                assert_eq!(status, CommandStatus::Ok, "{from:?} to {to:?}");
                assert_eq!(node.qp_state(QPN), to);
            } else {
                assert_eq!(status, CommandStatus::BadState, "{from:?} to {to:?}");
                assert_eq!(node.qp_state(QPN), from);
            }
        }
    }
}

/// Has a queue pair stop with a full ring, and go on while its host posts and posts.
fn go_on(service: Service, flags: u16, bad: &SendWork) -> Node {
    const LOG_BLOCKS: u8 = 15;
    const PIECE: u32 = 2048;
    let posted = 1u32 << LOG_BLOCKS;
    let mut node = Node::new(1);
    node.create_cq(2, EQ_FIRST_HANDLER, LOG_BLOCKS + 1);
    node.create_qp(QpOptions {
        cqn: 2,
        log_blocks: LOG_BLOCKS,
        service,
        flags,
        ..QpOptions::default()
    });
    let peer = node.as_peer(77);
    match service {
        Service::Uc => node.connect_unreliable(QPN, &peer),
        _ => node.connect(QPN, &peer),
    }
    node.write_blocks(QPN, &bad.encode());
    let send = SendWork::new(SendOpcode::Send, &[]).encode();
    for _ in 1..posted {
        node.write_blocks(QPN, &send);
    }
    node.publish_send(QPN);
    node.engine.poll(node.now, &mut node.host);
    assert!(matches!(node.qp_state(QPN), State::Sqe | State::Sqd));
    // What is posted from now on is good throughout.
    node.write_blocks(QPN, &send);
    let command = ModifyQueuePair {
        qpn: QPN,
        mask: MODIFY_STATE,
        state: State::Rts.number(),
        ..ModifyQueuePair::zeroed()
    };
    let entry = CommandEntry::new(CommandOpcode::ModifyQueuePair, 0, (0, 0), &command);
    node.put_command(&entry);
    let record = node.qp_record(QPN);
    let (mut producer, mut work, mut turns) = (posted, node.engine.core.work, 0);
    node.ring_control();
    loop {
        // The command and the queue pair's own turn.
        let done = node.engine.core.work - work;
        assert!(done <= u64::from(2 * PIECE), "{done} entries in a turn");
        work = node.engine.core.work;
        turns += 1;
        if !node.engine.has_commands() {
            break;
        }
        // Whoever posts on and on does not keep the command from its end.
        let room = node.engine.qps.get(QPN).unwrap().send.retired() + posted;
        producer = room.min(producer + 2 * PIECE);
        node.host.memory.put(record, &producer);
        while node.poll_cq(2).is_some() {}
        node.engine.poll(node.now, &mut node.host);
        assert!(turns < 100, "a command without end");
    }
    assert!(turns >= posted / (2 * PIECE), "{turns} turns");
    assert_eq!(node.engine.counters().failed_commands, 0);
    let qp = node.engine.qps.get(QPN).unwrap();
    assert_eq!(qp.state, State::Rts);
    // Not all of it was flushed.
    assert!(qp.send.retired() < producer);
    node
}

#[test]
fn a_stopped_queue_is_flushed_in_pieces_before_it_goes_on() {
    let bad = SendWork::new(SendOpcode::Read, &[]);
    let mut node = go_on(Service::Uc, 0, &bad);
    // What was posted since is sent.
    node.settle();
    assert_ne!(node.engine.counters().tx_packets, 0);
    let qp = node.engine.qps.get(QPN).unwrap();
    assert_eq!(qp.send.retired(), qp.send.producer());
    assert!(node.event_codes(EQ_ASYNC).is_empty());
}

#[test]
fn a_queue_that_goes_on_was_drained_whatever_is_posted_meanwhile() {
    let flags = QP_FLAG_FAST_REGISTER | QP_FLAG_FAST_REGISTER_DRAINS;
    let bad = SendWork::new(SendOpcode::FastRegister, &[]).part(&FastRegisterPart::zeroed());
    let mut node = go_on(Service::Rc, flags, &bad);
    assert_eq!(
        node.event_codes(EQ_ASYNC),
        [(EventCode::SendQueueDrained, QPN)]
    );
}

#[test]
fn what_a_failure_left_to_be_flushed_is_not_sent_afterwards() {
    const POSTED: u32 = 6000;
    let mut node = Node::new(1);
    node.create_cq(2, EQ_FIRST_HANDLER, 13);
    node.create_qp(QpOptions {
        cqn: 2,
        log_blocks: 13,
        service: Service::Uc,
        ..QpOptions::default()
    });
    let peer = node.as_peer(77);
    node.connect_unreliable(QPN, &peer);
    // No service for this one; all others are good.
    node.write_blocks(QPN, &SendWork::new(SendOpcode::Read, &[]).encode());
    let send = SendWork::new(SendOpcode::Send, &[]).encode();
    for _ in 1..POSTED {
        node.write_blocks(QPN, &send);
    }
    node.publish_send(QPN);
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(node.qp_state(QPN), State::Sqe);
    assert_eq!(node.set_state(QPN, State::Rts), CommandStatus::Ok);
    node.settle();
    assert_eq!(node.engine.counters().tx_packets, 0);
    let mut statuses = Vec::new();
    while let Some(completion) = node.poll_cq(2) {
        statuses.push(completion.status);
    }
    assert_eq!(statuses.len(), POSTED as usize);
    assert_eq!(
        statuses[0],
        CompletionStatus::LocalQueuePairOperation.number()
    );
    let flushed = CompletionStatus::Flushed.number();
    assert!(statuses[1..].iter().all(|&status| status == flushed));
    // What is posted now is sent.
    node.post_send(QPN, &SendWork::new(SendOpcode::Send, &[]));
    node.settle();
    assert_eq!(node.engine.counters().tx_packets, 1);
}

#[test]
fn each_required_attribute_is_required_and_no_other_is_taken() {
    let steps = [
        (State::Reset, State::Init),
        (State::Init, State::Rtr),
        (State::Rtr, State::Rts),
    ];
    for (from, to) in steps {
        let allowed = transition(Service::Rc, from, to).unwrap();
        for bit in (2..16).map(|bit| 1u32 << bit) {
            let mut node = node_in(from);
            let command = ModifyQueuePair {
                mask: MODIFY_STATE | (allowed.required ^ bit),
                state: to.number(),
                ..good(&node)
            };
            let expected = if allowed.optional & bit != 0 {
                CommandStatus::Ok
            } else {
                CommandStatus::BadParameter
            };
            assert_eq!(modify(&mut node, &command), expected, "{to:?} bit {bit:#x}");
        }
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let mut node = node_in(State::Init);
    let required = transition(Service::Rc, State::Init, State::Rtr)
        .unwrap()
        .required;
    let good = ModifyQueuePair {
        mask: MODIFY_STATE | required,
        state: State::Rtr.number(),
        ..good(&node)
    };
    type M = ModifyQueuePair;
    let path = |change: fn(&mut AddressVector)| {
        let mut command = good;
        change(&mut command.address_vector);
        command
    };
    let cases = [
        (CommandStatus::BadParameter, M { log_mtu: 7, ..good }),
        (
            CommandStatus::BadParameter,
            M {
                log_mtu: 13,
                ..good
            },
        ),
        (CommandStatus::BadParameter, M { ird: 17, ..good }),
        (
            CommandStatus::BadParameter,
            M {
                min_rnr_timer: 32,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            M {
                destination_qpn: 1 << 24,
                ..good
            },
        ),
        (
            CommandStatus::BadParameter,
            M {
                receive_psn: 1 << 24,
                ..good
            },
        ),
        (CommandStatus::BadParameter, M { state: 7, ..good }),
        (
            CommandStatus::BadNumber,
            path(|path| path.source_gid_index = MAX_GIDS),
        ),
        (
            CommandStatus::NotFound,
            path(|path| path.source_gid_index = 1),
        ),
        // From an IPv4 address to an IPv6 one.
        (CommandStatus::BadParameter, path(|path| path.gid[0] = 0xfd)),
        (
            CommandStatus::BadParameter,
            path(|path| path.flow_label = 1 << 20),
        ),
        (CommandStatus::BadParameter, path(|path| path.reserved = 1)),
        (
            CommandStatus::BadState,
            M {
                mask: good.mask | MODIFY_CURRENT_STATE,
                current_state: State::Rts.number(),
                ..good
            },
        ),
        (CommandStatus::NotFound, M { qpn: 3, ..good }),
        (CommandStatus::BadNumber, M { qpn: 0, ..good }),
        (
            CommandStatus::BadNumber,
            M {
                qpn: 2 + MAX_QP,
                ..good
            },
        ),
    ];
    for (status, command) in cases {
        assert_eq!(modify(&mut node, &command), status, "{command:?}");
        assert_eq!(node.qp_state(QPN), State::Init);
    }
    assert_eq!(modify(&mut node, &good), CommandStatus::Ok);
}

#[test]
fn a_refused_command_has_set_no_attribute() {
    let mut node = Node::new(1);
    node.create_cq(2, EQ_FIRST_HANDLER, 0);
    node.create_qp(QpOptions {
        service: Service::Ud,
        cqn: 2,
        ..QpOptions::default()
    });
    node.start_datagrams(QPN, 5);
    let qkey = |node: &mut Node| {
        let state: QueuePairState = node.query(CommandOpcode::QueryQueuePair, QPN).unwrap();
        state.attributes.qkey
    };
    let other = ModifyQueuePair {
        qpn: QPN,
        mask: MODIFY_STATE | MODIFY_QKEY,
        qkey: 6,
        ..ModifyQueuePair::zeroed()
    };
    // To a state that does not follow, and with a value out of range beside it.
    let cases = [
        (State::Init, MODIFY_QKEY, 0),
        (State::Rts, MODIFY_QKEY | MODIFY_SEND_PSN, 0),
        (State::Rts, MODIFY_QKEY | MODIFY_PKEY, 1),
    ];
    for (state, mask, pkey_index) in cases {
        let command = ModifyQueuePair {
            mask: MODIFY_STATE | mask,
            state: state.number(),
            pkey_index,
            ..other
        };
        assert_ne!(modify(&mut node, &command), CommandStatus::Ok);
        assert_eq!(qkey(&mut node), 5);
    }
    // A work request that fails takes the only place in the completion queue; what is posted
    // behind it cannot be flushed on the way back.
    let read = SendWork::new(SendOpcode::Read, &[]).encode();
    node.write_blocks(QPN, &read);
    node.publish_send(QPN);
    node.settle();
    assert_eq!(node.qp_state(QPN), State::Sqe);
    node.write_blocks(QPN, &read);
    let record = node.qp_record(QPN);
    node.host.memory.put(record, &2u32);
    let command = ModifyQueuePair {
        state: State::Rts.number(),
        ..other
    };
    assert_eq!(modify(&mut node, &command), CommandStatus::BadState);
    assert_eq!(qkey(&mut node), 5);
    assert_eq!(node.qp_state(QPN), State::Error);
    assert_eq!(
        node.event_codes(EQ_ASYNC),
        [
            (EventCode::CompletionQueueError, 2),
            (EventCode::QueuePairFatal, QPN)
        ]
    );
}

#[test]
fn a_query_gives_what_was_set() {
    let mut node = node_in(State::Rts);
    let state: QueuePairState = node.query(CommandOpcode::QueryQueuePair, QPN).unwrap();
    let peer = node.as_peer(77);
    assert_eq!(state.attributes.destination_qpn, 77);
    assert_eq!(state.attributes.log_mtu, peer.log_mtu);
    assert_eq!(state.attributes.timeout, peer.timeout);
    assert_eq!(state.attributes.address_vector.gid, peer.gid);
    assert_eq!(state.attributes.access, ACCESS_REMOTE);
    assert_eq!(state.send_psn, peer.send_psn);
    assert_eq!(state.receive_psn, peer.receive_psn);
    assert_eq!(
        node.query::<QueuePairState>(CommandOpcode::QueryQueuePair, 3),
        Err(CommandStatus::NotFound)
    );
}

#[test]
fn impossible_queue_pairs_are_refused() {
    let mut node = node();
    let template = node.qp_template(QpOptions {
        qpn: 3,
        ..QpOptions::default()
    });
    type C = CreateQueuePair;
    let bad = CommandStatus::BadParameter;
    let cases = [
        (CommandStatus::BadNumber, C { qpn: 0, ..template }),
        (
            CommandStatus::BadNumber,
            C {
                qpn: 2 + MAX_QP,
                ..template
            },
        ),
        (
            CommandStatus::BadNumber,
            C {
                qpn: u32::MAX,
                ..template
            },
        ),
        (CommandStatus::Exists, C { qpn: 2, ..template }),
        // Of shared receive queues and of targets alone.
        (
            bad,
            C {
                srqn: 1,
                ..template
            },
        ),
        (
            bad,
            C {
                xrcd: 1,
                ..template
            },
        ),
        (
            bad,
            C {
                service: Service::XrcIni.number(),
                xrcd: 1,
                ..template
            },
        ),
        (
            bad,
            C {
                service: Service::XrcTgt.number(),
                srqn: 1,
                xrcd: 1,
                ..template
            },
        ),
        (
            CommandStatus::NotFound,
            C {
                send_cqn: 9,
                ..template
            },
        ),
        (
            CommandStatus::BadNumber,
            C {
                receive_cqn: u32::MAX,
                ..template
            },
        ),
        (
            CommandStatus::Unsupported,
            C {
                transport: 0,
                ..template
            },
        ),
        (
            CommandStatus::Unsupported,
            C {
                transport: Transport::RoceV2.number() + 1,
                ..template
            },
        ),
        (
            CommandStatus::BadNumber,
            C {
                port: 1,
                ..template
            },
        ),
        (
            bad,
            C {
                service: 0,
                ..template
            },
        ),
        (
            CommandStatus::NotFound,
            C {
                flags: QP_FLAG_SRQ,
                ..template
            },
        ),
        (
            bad,
            C {
                flags: 0x80,
                ..template
            },
        ),
        (
            bad,
            C {
                sq_log_blocks: 255,
                ..template
            },
        ),
        (
            bad,
            C {
                sq_log_blocks: SQ_MAX_LOG_BLOCKS,
                ..template
            },
        ),
        (
            bad,
            C {
                rq_log_entries: 7,
                ..template
            },
        ),
        (
            bad,
            C {
                rq_log_stride: RQ_MIN_LOG_STRIDE - 1,
                ..template
            },
        ),
        (
            bad,
            C {
                rq_log_stride: RQ_MAX_LOG_STRIDE + 1,
                ..template
            },
        ),
        (
            bad,
            C {
                doorbell_page: 1024,
                ..template
            },
        ),
        (
            bad,
            C {
                sq_offset: 32,
                ..template
            },
        ),
        (
            bad,
            C {
                rq_offset: u32::MAX - 63,
                ..template
            },
        ),
        // Aligned in their pages, but not in the buffer.
        (
            bad,
            C {
                sq_offset: template.sq_offset + 32,
                rq_offset: template.rq_offset + 32,
                record_offset: template.record_offset + 32,
                buffer: Buffer {
                    fbo: 32,
                    length: template.buffer.length + 32,
                    ..template.buffer
                },
                ..template
            },
        ),
        // One over the other: the rings, either ring and the record.
        (
            bad,
            C {
                rq_offset: template.rq_offset - 64,
                ..template
            },
        ),
        (
            bad,
            C {
                record_offset: template.record_offset - 64,
                ..template
            },
        ),
        (
            bad,
            C {
                record_offset: 0,
                ..template
            },
        ),
        (
            bad,
            C {
                record_offset: template.record_offset + 64,
                ..template
            },
        ),
        (
            CommandStatus::HostMemory,
            C {
                buffer: Buffer {
                    root: 0,
                    ..template.buffer
                },
                ..template
            },
        ),
        (CommandStatus::Ok, template),
    ];
    for (status, command) in cases {
        assert_eq!(
            node.command(CommandOpcode::CreateQueuePair, &command),
            status,
            "{command:?}"
        );
    }
}

#[test]
fn a_new_queue_pair_asks_for_a_doorbell() {
    let node = node();
    assert_eq!(node.record(QPN).send_wake, 1);
    assert_eq!(node.record(QPN).receive_wake, 0);
}

fn work() -> SendWork {
    SendWork::new(SendOpcode::Send, &[]).flags(0)
}

fn flushed(node: &mut Node) -> Vec<(bool, u32)> {
    let mut entries = Vec::new();
    while let Some(entry) = node.poll_cq(1) {
        assert_eq!(entry.status, CompletionStatus::Flushed.number());
        assert_eq!(entry.qpn, QPN);
        entries.push((entry.flags & COMPLETION_RECEIVE != 0, entry.index));
    }
    entries
}

#[test]
fn the_error_state_flushes_both_queues_and_everything_posted_later() {
    let mut node = node_in(State::Rtr);
    node.post_recv(QPN, &[]);
    node.post_recv(QPN, &[]);
    // Three blocks, then one.
    node.post_send(QPN, &work().inline(&[1; 120]));
    node.post_send(QPN, &work());
    assert_eq!(node.set_state(QPN, State::Error), CommandStatus::Ok);
    assert_eq!(
        flushed(&mut node),
        [(false, 0), (false, 3), (true, 0), (true, 1)]
    );
    assert_eq!(node.record(QPN).send_wake, 1);
    assert_eq!(node.record(QPN).receive_wake, 1);
    node.post_recv(QPN, &[]);
    node.post_send(QPN, &work());
    assert_eq!(flushed(&mut node), [(true, 2), (false, 4)]);
    // RESET starts from the beginning, with nothing left over.
    assert_eq!(node.set_state(QPN, State::Reset), CommandStatus::Ok);
    assert_eq!(node.record(QPN).receive_wake, 0);
    let peer = node.as_peer(77);
    node.connect(QPN, &peer);
    node.post_recv(QPN, &[]);
    node.set_state(QPN, State::Error);
    assert_eq!(flushed(&mut node), [(true, 0)]);
}

#[test]
fn work_requests_that_make_no_sense_are_flushed_once() {
    let mut node = node_in(State::Init);
    node.write_blocks(QPN, &[0; 64]);
    node.write_blocks(QPN, &[0xff; 256]);
    node.publish_send(QPN);
    node.set_state(QPN, State::Error);
    assert_eq!(flushed(&mut node), [(false, 0)]);
    node.post_send(QPN, &work());
    assert_eq!(flushed(&mut node), [(false, 5)]);
}

#[test]
fn what_stands_behind_a_work_request_that_overruns_its_blocks_is_flushed() {
    // More entries than there are blocks for, in all states that flush.
    let mut overrun = work().encode();
    overrun[std::mem::offset_of!(SendHeader, sge_count)] = 4;
    let mut node = node_in(State::Init);
    for bytes in [
        &work().encode(),
        &overrun,
        &work().encode(),
        &work().encode(),
    ] {
        node.write_blocks(QPN, bytes);
    }
    node.publish_send(QPN);
    node.set_state(QPN, State::Error);
    let all = [0, 1, 2, 3].map(|index| (false, index));
    assert_eq!(flushed(&mut node), all);
    // The same where it is the one that fails.
    let mut node = node_in(State::Rts);
    for bytes in [&overrun, &work().encode(), &overrun, &work().encode()] {
        node.write_blocks(QPN, bytes);
    }
    node.publish_send(QPN);
    node.settle();
    let failed = node.poll_cq(1).unwrap();
    let status = CompletionStatus::LocalQueuePairOperation;
    assert_eq!((failed.index, failed.status), (0, status.number()));
    assert_eq!(flushed(&mut node), all[1..]);
}

#[test]
fn a_producer_index_that_goes_back_fails_the_queue_pair() {
    let mut node = node_in(State::Rts);
    let record = node.qp_record(QPN);
    node.write_blocks(QPN, &work().encode().repeat(3));
    node.publish_send(QPN);
    node.settle();
    node.host.memory.put(record, &2u32);
    node.doorbell(1, DOORBELL_SEND, send_doorbell(QPN, 2));
    node.settle();
    assert_eq!(node.qp_state(QPN), State::Error);
    let events = node.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::QueuePairFatal, QPN)]);
    assert_eq!(flushed(&mut node).len(), 3);
}

#[test]
fn an_impossible_producer_index_fails_the_queue_pair_alone() {
    for producer in [65, u32::MAX, 1 << 31] {
        let mut node = node_in(State::Rts);
        node.host.memory.put(node.qp_record(QPN), &producer);
        node.doorbell(1, DOORBELL_SEND, send_doorbell(QPN, producer));
        node.settle();
        assert_eq!(node.qp_state(QPN), State::Error);
        assert_eq!(
            node.event_codes(EQ_ASYNC),
            [(EventCode::QueuePairFatal, QPN)]
        );
        assert!(flushed(&mut node).is_empty());
        assert_eq!(node.status().state(), Some(DeviceState::Running));
    }
}

#[test]
fn a_doorbell_from_a_foreign_page_is_ignored() {
    let mut node = node_in(State::Rts);
    node.settle();
    let word = send_doorbell(QPN, 0);
    for page in [0, 2, 1023] {
        node.doorbell(page, DOORBELL_SEND, word);
        node.doorbell(page, DOORBELL_RECEIVE, word);
    }
    assert!(node.engine.core.ready.is_empty());
    assert_eq!(node.engine.counters().bad_doorbells, 6);
    node.doorbell(1, DOORBELL_SEND, word);
    assert_eq!(node.engine.core.ready.len(), 1);
}

#[test]
fn posts_of_a_stream_do_not_ring_and_are_found() {
    const MICROSECOND: u64 = 1000;
    let mut node = node_in(State::Rts);
    node.settle();
    let look = |node: &mut Node, after: u64| {
        node.now += after * MICROSECOND;
        node.engine.poll(node.now, &mut node.host);
        node.settle();
        (node.send_doorbells, node.engine.counters().tx_packets)
    };
    // One message is no stream.
    node.post_send(QPN, &work());
    assert_eq!(look(&mut node, 0), (1, 1));
    assert_eq!(node.record(QPN).send_wake, 1);
    // Two that nobody has answered are; the next one is waited for.
    node.post_send(QPN, &work());
    assert_eq!(look(&mut node, 0), (2, 2));
    assert_eq!(node.record(QPN).send_wake, 0);
    node.post_send(QPN, &work());
    assert!(node.engine.next_timeout().unwrap() <= node.now + 50 * MICROSECOND);
    assert_eq!(look(&mut node, 50), (2, 3));
    assert_eq!(node.record(QPN).send_wake, 0);
    // Not for ever.
    assert_eq!(look(&mut node, 50), (2, 3));
    assert_eq!(node.record(QPN).send_wake, 1);
    node.post_send(QPN, &work());
    assert_eq!(look(&mut node, 0), (3, 4));
}

#[test]
fn an_idle_queue_pair_sleeps_and_posts_then_ring() {
    let mut node = node_in(State::Rts);
    node.settle();
    assert_eq!(node.record(QPN).send_wake, 1);
    node.post_send(QPN, &work());
    assert_eq!(node.send_doorbells, 1);
    node.engine.poll(node.now, &mut node.host);
    node.settle();
    assert_eq!(node.record(QPN).send_wake, 1);
    assert_eq!(node.engine.counters().tx_packets, 1);
}

#[test]
fn posts_before_rts_are_seen_on_the_way_there() {
    let mut node = node_in(State::Rtr);
    node.post_send(QPN, &work());
    node.settle();
    assert_eq!(node.engine.counters().tx_packets, 0);
    let peer = node.as_peer(77);
    node.to_rts(QPN, &peer);
    node.settle();
    assert_eq!(node.engine.counters().tx_packets, 1);
}

#[test]
fn an_idle_queue_pair_is_drained_at_once() {
    let mut node = node_in(State::Sqd);
    assert_eq!(
        node.event_codes(EQ_ASYNC),
        [(EventCode::SendQueueDrained, QPN)]
    );
}

#[test]
fn a_destroyed_queue_pair_is_not_touched_again() {
    let mut node = node_in(State::Rts);
    node.post_send(QPN, &work());
    assert_eq!(
        node.object_command(CommandOpcode::DestroyQueuePair, QPN),
        CommandStatus::Ok
    );
    node.now += 1 << 40;
    node.settle();
    assert_eq!(node.engine.counters().tx_packets, 0);
    assert!(node.poll_cq(1).is_none());
    assert_eq!(
        node.object_command(CommandOpcode::DestroyQueuePair, QPN),
        CommandStatus::NotFound
    );
}

#[test]
fn registrations_through_the_queue_need_the_flag() {
    let mut node = node();
    node.create_qp(QpOptions {
        qpn: 3,
        flags: QP_FLAG_PRIVILEGED | QP_FLAG_FAST_REGISTER,
        ..QpOptions::default()
    });
    let tag = Tag::new(4, 1);
    node.execute(&AllocateTag {
        tag: tag.0,
        pd: 1,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 4,
    });
    let peer = node.as_peer(77);
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&FastRegisterPart {
        tag: tag.0,
        access: ACCESS_LOCAL_WRITE,
        address: 0x1000,
        buffer: Buffer::contiguous(0x20_0000, 4096),
        reserved: 0,
    });
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag.0);
    for (qpn, works, status) in [
        (QPN, &register, CompletionStatus::LocalQueuePairOperation),
        (3, &register, CompletionStatus::Success),
        (3, &invalidate, CompletionStatus::Success),
        (3, &invalidate, CompletionStatus::LocalProtection),
    ] {
        if node.qp_state(qpn) == State::Reset {
            node.connect(qpn, &peer);
        }
        node.post_send(qpn, works);
        node.settle();
        assert_eq!(node.poll_cq(1).unwrap().status, status.number());
    }
    assert_eq!(node.qp_state(QPN), State::Error);
    assert_eq!(node.qp_state(3), State::Error);
}
