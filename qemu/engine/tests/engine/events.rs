// SPDX-License-Identifier: Apache-2.0 OR MIT

//! When an event is there, so is what it is about (chapter 5).

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::roce::Opcode;
use ferrite_engine::testing::{Access, Node, QpOptions, SendWork};
use QueuePairStateCode::{Error, Rts};

const CQN: u32 = 7;
/// More work requests than are flushed in one turn.
const MANY: u32 = 3000;

/// Begins to note what the device writes.
fn watch(node: &Node) {
    *node.host.accesses.borrow_mut() = Some(Vec::new());
}

/// How many completions in `cqn` and asynchronous events were written since, and whether the
/// completions came first.
fn written(node: &Node, cqn: u32) -> (usize, usize, bool) {
    let (ring, events) = (node.completion_ring(cqn), node.event_ring(EQ_ASYNC));
    let (mut completed, mut raised, mut in_order) = (0, 0, true);
    for access in node.host.accesses.borrow_mut().take().unwrap() {
        match access {
            Access::Store(at, _) if ring.contains(&at) => {
                completed += 1;
                in_order &= raised == 0;
            }
            Access::Store(at, _) if events.contains(&at) => raised += 1,
            _ => {}
        }
    }
    (completed, raised, in_order)
}

#[test]
fn a_refused_access_is_told_of_after_the_receives_it_flushes() {
    let mut pair = Pair::new(Setup::default());
    let a = pair.a.register(0x101, PD, ALL, 4096);
    for _ in 0..3 {
        pair.b.post_recv(QPN_B, &[]);
    }
    watch(&pair.b);
    let work = SendWork::new(SendOpcode::Write, &[a.sge(0, 8)]).remote(0, 0x9901);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    assert_eq!(written(&pair.b, 1), (3, 1, true));
    let events = pair.b.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::QueuePairAccessError, QPN_B)]);
}

#[test]
fn a_request_of_no_kind_is_told_of_after_the_receives_it_flushes() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    let impostor = Impostor::new(&pair.a, &pair.b, QPN_B);
    pair.b.post_recv(QPN_B, &[]);
    watch(&pair.b);
    // One that this service does not have, and one out of sequence in its message.
    for opcode in [0x1f, Opcode::RC_SEND_LAST] {
        pair.b.receive(&impostor.packet(opcode, setup.psn_a, &[]));
    }
    pair.b.settle();
    assert_eq!(written(&pair.b, 1), (1, 1, true));
    let events = pair.b.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::QueuePairRequestError, QPN_B)]);
}

/// A connected queue pair with `MANY` sends posted and not told of.
fn crowded(flags: u16) -> (Node, u32) {
    let mut node = Node::new(1);
    node.create_cq(CQN, EQ_FIRST_HANDLER, 13);
    node.create_qp(QpOptions {
        qpn: QPN_A,
        cqn: CQN,
        log_blocks: 13,
        log_entries: 1,
        flags,
        ..QpOptions::default()
    });
    let peer = node.as_peer(77);
    node.connect(QPN_A, &peer);
    if flags & QP_FLAG_FAST_REGISTER != 0 {
        // No such tag.
        node.write_blocks(
            QPN_A,
            &SendWork::new(SendOpcode::FastRegister, &[]).encode(),
        );
    }
    let send = SendWork::new(SendOpcode::Send, &[]).encode();
    for _ in 0..MANY {
        node.write_blocks(QPN_A, &send);
    }
    (node, MANY)
}

#[test]
fn a_failure_is_told_of_after_all_of_a_long_queue_is_flushed() {
    let (mut node, posted) = crowded(0);
    node.publish_send(QPN_A);
    watch(&node);
    // The record says what cannot be, when all that it said before was taken note of.
    node.engine.poll(node.now, &mut node.host);
    let record = node.qp_record(QPN_A);
    node.host.memory.put(record, &0x1234_5678_u32);
    node.doorbell(1, DOORBELL_SEND, send_doorbell(QPN_A, 0));
    node.settle();
    assert_eq!(written(&node, CQN), (posted as usize, 1, true));
    let events = node.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::QueuePairFatal, QPN_A)]);
    assert_eq!(node.qp_state(QPN_A), Error);
}

#[test]
fn a_send_queue_that_stopped_is_drained_when_all_of_it_is_flushed() {
    let (mut node, posted) = crowded(QP_FLAG_FAST_REGISTER | QP_FLAG_FAST_REGISTER_DRAINS);
    watch(&node);
    node.publish_send(QPN_A);
    node.settle();
    assert_eq!(written(&node, CQN), (posted as usize + 1, 1, true));
    let events = node.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::SendQueueDrained, QPN_A)]);
}

#[test]
fn a_send_queue_that_goes_on_was_drained_before() {
    let (mut node, posted) = crowded(QP_FLAG_FAST_REGISTER | QP_FLAG_FAST_REGISTER_DRAINS);
    watch(&node);
    node.publish_send(QPN_A);
    node.engine.poll(node.now, &mut node.host);
    // Part of it is flushed; the command does the rest.
    assert_eq!(node.set_state(QPN_A, Rts), CommandStatus::Ok);
    assert_eq!(written(&node, CQN), (posted as usize + 1, 1, true));
}

#[test]
fn the_last_entry_of_a_shared_queue_is_told_of_after_all_that_is_flushed() {
    let mut node = Node::new(1);
    node.create_cq(CQN, EQ_FIRST_HANDLER, 13);
    node.create_srq(3, 4, None);
    node.create_qp(QpOptions {
        qpn: QPN_A,
        cqn: CQN,
        log_blocks: 13,
        flags: QP_FLAG_SRQ,
        srqn: 3,
        ..QpOptions::default()
    });
    let peer = node.as_peer(77);
    node.connect(QPN_A, &peer);
    let send = SendWork::new(SendOpcode::Send, &[]).encode();
    for _ in 0..MANY {
        node.write_blocks(QPN_A, &send);
    }
    let record = node.qp_record(QPN_A);
    node.host.memory.put(record, &MANY);
    watch(&node);
    assert_eq!(node.set_state(QPN_A, Error), CommandStatus::Ok);
    node.settle();
    assert_eq!(written(&node, CQN), (MANY as usize, 1, true));
    let events = node.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::LastWqeReached, QPN_A)]);
}

#[test]
fn a_first_message_is_there_when_its_arrival_is_told_of() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    let (to_b, to_a) = (pair.peer_of_a(setup), pair.peer_of_b(setup));
    pair.a.connect(QPN_A, &to_b);
    pair.b.to_init(QPN_B);
    pair.b.to_rtr(QPN_B, &to_a);
    pair.b.post_recv(QPN_B, &[]);
    watch(&pair.b);
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]));
    pair.run();
    assert_eq!(written(&pair.b, 1), (1, 1, true));
    let events = pair.b.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::CommunicationEstablished, QPN_B)]);
}
