// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What driver and device have not agreed on is not there (chapter 2).

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use ferrite_engine::FEATURES;
use CompletionStatus::{LocalQueuePairOperation, RemoteInvalidRequest, Success};

/// A pair of which A and B have agreed on all but some features.
fn pair_without(missing_a: u64, missing_b: u64) -> Pair {
    let setup = Setup {
        flags: 0,
        ..Setup::default()
    };
    let a = Node::with_features(1, complete_features(FEATURES & !missing_a));
    let b = Node::with_features(2, complete_features(FEATURES & !missing_b));
    let mut pair = Pair::of(setup, a, b);
    pair.connect(setup);
    pair
}

fn region_command(node: &mut Node, access: u32) -> RegisterRegion {
    RegisterRegion {
        tag: Tag::new(77, 1).0,
        pd: PD,
        access,
        flags: 0,
        address: 0,
        buffer: Buffer::contiguous(node.allocate(4096), 4096),
    }
}

/// How a work request of A to memory of B ends.
fn status_of(pair: &mut Pair, work: &SendWork) -> CompletionStatus {
    pair.a.post_send(QPN_A, work);
    pair.run();
    statuses(&pair.completions_a())[0]
}

fn atomic(pair: &mut Pair, opcode: SendOpcode, rights: u32) -> SendWork {
    let a = pair.a.register(0x101, PD, ACCESS_LOCAL_WRITE, 4096);
    let b = pair
        .b
        .register(0x201, PD, ACCESS_LOCAL_WRITE | rights, 4096);
    SendWork::new(opcode, &[a.sge(0, 8)]).part(&AtomicPart {
        address: b.address,
        rkey: b.tag,
        reserved: 0,
        operand: 1,
        compare: 0,
    })
}

#[test]
fn atomics_that_were_not_agreed_on_are_no_opcodes() {
    for opcode in [SendOpcode::CompareSwap, SendOpcode::FetchAdd] {
        let mut pair = pair_without(0, 0);
        let work = atomic(&mut pair, opcode, ACCESS_REMOTE_ATOMIC);
        assert_eq!(status_of(&mut pair, &work), Success);

        let mut pair = pair_without(FEATURE_ATOMICS, 0);
        let work = atomic(&mut pair, opcode, ACCESS_REMOTE_ATOMIC);
        assert_eq!(status_of(&mut pair, &work), LocalQueuePairOperation);
        assert_eq!(pair.a.engine.counters().tx_packets, 0);

        // A peer that asks all the same asks for something unknown.
        let mut pair = pair_without(0, FEATURE_ATOMICS);
        let work = atomic(&mut pair, opcode, 0);
        assert_eq!(status_of(&mut pair, &work), RemoteInvalidRequest);
        let events = pair.b.event_codes(EQ_ASYNC);
        assert_eq!(events, [(EventCode::QueuePairRequestError, QPN_B)]);
    }
}

#[test]
fn no_region_gives_a_right_that_was_not_agreed_on() {
    let rights = [
        (ACCESS_REMOTE_ATOMIC, FEATURE_ATOMICS),
        (ACCESS_FLUSH_GLOBAL, FEATURE_FLUSH),
        (ACCESS_ONE_TOUCH, FEATURE_ONE_TOUCH),
    ];
    for (right, feature) in rights {
        let mut node = Node::with_features(1, FEATURES & !feature);
        let command = region_command(&mut node, ACCESS_LOCAL_WRITE | right);
        let status = node.command(CommandOpcode::RegisterRegion, &command);
        assert_eq!(status, CommandStatus::Unsupported);
        let mut node = Node::new(1);
        let command = region_command(&mut node, ACCESS_LOCAL_WRITE | right);
        node.execute(&command);
    }
}

#[test]
fn without_registration_through_send_queues_no_queue_pair_may_register() {
    let registering = FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND | FEATURE_LISTS;
    let mut node = Node::with_features(1, FEATURES & !registering);
    for flags in [
        QP_FLAG_FAST_REGISTER,
        QP_FLAG_FAST_REGISTER_DRAINS,
        QP_FLAG_LISTS,
    ] {
        let command = node.qp_template(QpOptions {
            flags,
            ..QpOptions::default()
        });
        let status = node.command(CommandOpcode::CreateQueuePair, &command);
        assert_eq!(status, CommandStatus::Unsupported);
    }
    let status = node.command(
        CommandOpcode::AllocateTag,
        &AllocateTag {
            tag: Tag::new(5, 1).0,
            pd: PD,
            kind: TagKind::Region.number(),
            reserved: [0; 3],
            max_pages: 1,
        },
    );
    assert_eq!(status, CommandStatus::Unsupported);
    let mut pair = pair_without(registering, 0);
    let register = SendWork::new(SendOpcode::FastRegister, &[]);
    assert_eq!(status_of(&mut pair, &register), LocalQueuePairOperation);
}

#[test]
fn nothing_is_invalidated_where_nothing_can_be() {
    let pages = FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND;
    let all = pages | FEATURE_WINDOWS | FEATURE_LISTS;
    let invalidate = SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(0x301);
    let mut pair = pair_without(all, 0);
    assert_eq!(status_of(&mut pair, &invalidate), LocalQueuePairOperation);
    let mut pair = pair_without(all, 0);
    let local = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(0x301);
    assert_eq!(status_of(&mut pair, &local), LocalQueuePairOperation);
    let mut pair = pair_without(0, all);
    pair.b.post_recv(QPN_B, &[]);
    assert_eq!(status_of(&mut pair, &invalidate), RemoteInvalidRequest);
    // One of the three is enough; but there is no such tag.
    for there in [pages, FEATURE_WINDOWS, FEATURE_LISTS] {
        let missing = all & !there;
        let mut pair = pair_without(missing, missing);
        pair.b.post_recv(QPN_B, &[]);
        let status = status_of(&mut pair, &invalidate);
        assert_eq!(status, CompletionStatus::RemoteAccess);
    }
}
