// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the device has of an object, as it is read by who looks for a mistake (chapter 3).

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use ferrite_engine::FEATURES;
use CommandOpcode::{QueryCompletionQueue, QueryQueuePair, QuerySrq, QueryTag};
use CommandStatus::{BadNumber, NotFound, Unsupported};

#[test]
fn a_queue_pair_tells_what_it_was_made_of_and_how_far_its_queues_are() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    let a = pair.a.register(0x101, PD, ALL, 4096);
    let b = pair.b.register(0x201, PD, ALL, 4096);
    for _ in 0..3 {
        pair.b.post_recv(QPN_B, &[b.sge(0, 4096)]);
    }
    for _ in 0..2 {
        pair.a.post_send(QPN_A, &send(&a, 100));
    }
    pair.run();
    let state: QueuePairState = pair.a.query(QueryQueuePair, QPN_A).unwrap();
    assert_eq!(state.pd, PD);
    assert_eq!((state.send_cqn, state.receive_cqn), (1, 1));
    assert_eq!((state.srqn, state.xrcd, state.doorbell_page), (0, 0, 1));
    assert_eq!(state.flags, setup.flags);
    assert_eq!(state.service, Service::Rc.number());
    assert_eq!(state.transport, Transport::RoceV2.number());
    assert_eq!(
        (state.sq_log_blocks, state.rq_log_entries),
        (setup.log_blocks, setup.log_entries)
    );
    let blocks = state.send_producer;
    assert!(blocks >= 2);
    assert_eq!((state.send_next, state.send_retired), (blocks, blocks));
    assert_eq!(state.receive_producer, 0);
    let state: QueuePairState = pair.b.query(QueryQueuePair, QPN_B).unwrap();
    assert_eq!((state.receive_next, state.receive_retired), (2, 2));
    assert_eq!(state.send_producer, 0);
    assert!(state.reserved_is_zero());
}

#[test]
fn a_queue_that_is_not_there_is_not_told_of() {
    let mut node = Node::new(1);
    node.create_srq(3, 4, None);
    node.create_qp(QpOptions {
        qpn: 5,
        flags: QP_FLAG_SRQ,
        srqn: 3,
        ..QpOptions::default()
    });
    node.create_qp(QpOptions {
        qpn: 6,
        service: Service::XrcTgt,
        xrcd: 9,
        ..QpOptions::default()
    });
    let shared: QueuePairState = node.query(QueryQueuePair, 5).unwrap();
    assert_eq!((shared.srqn, shared.receive_cqn), (3, 1));
    assert_eq!((shared.rq_log_entries, shared.rq_log_stride), (0, 0));
    let target: QueuePairState = node.query(QueryQueuePair, 6).unwrap();
    assert_eq!((target.xrcd, target.service), (9, Service::XrcTgt.number()));
    assert_eq!(
        (target.send_cqn, target.receive_cqn),
        (QUEUE_NONE, QUEUE_NONE)
    );
    assert_eq!((target.sq_log_blocks, target.rq_log_entries), (0, 0));
}

#[test]
fn a_completion_queue_tells_of_its_handler_its_arming_and_its_indices() {
    let mut pair = Pair::new(Setup::default());
    let state = |node: &mut Node| -> CompletionQueueState {
        let state: CompletionQueueState = node.query(QueryCompletionQueue, 1).unwrap();
        assert!(state.reserved_is_zero());
        state
    };
    let fresh = state(&mut pair.a);
    assert_eq!((fresh.cqn, fresh.producer, fresh.users), (1, 0, 2));
    assert_eq!((fresh.arming, fresh.failed), (0, 0));
    pair.a.execute(&ModifyCompletionQueue {
        cqn: 1,
        eqn: EQ_FIRST_HANDLER,
        moderation_count: 7,
        moderation_microseconds: 50,
        ..ModifyCompletionQueue::zeroed()
    });
    pair.a.arm_cq(1, 1, true);
    let armed = state(&mut pair.a);
    assert_eq!(armed.eqn, EQ_FIRST_HANDLER);
    assert_eq!(
        (armed.moderation_count, armed.moderation_microseconds),
        (7, 50)
    );
    assert_eq!((armed.arming, armed.sequence), (2, 1));
    let a = pair.a.register(0x101, PD, ALL, 4096);
    pair.b.post_recv(QPN_B, &[]);
    pair.a.post_send(QPN_A, &send(&a, 0));
    pair.run();
    assert_eq!(state(&mut pair.a).producer, 1);
    assert_eq!(1 << state(&mut pair.a).log_entries, {
        let ring = pair.a.completion_ring(1);
        (ring.end - ring.start) / 64
    });
}

#[test]
fn a_shared_receive_queue_tells_of_its_domain_and_its_users() {
    let mut node = Node::new(1);
    node.create_srq(3, 4, None);
    node.create_srq(4, 5, Some((8, 1)));
    for qpn in [5, 6] {
        node.create_qp(QpOptions {
            qpn,
            flags: QP_FLAG_SRQ,
            srqn: 3,
            ..QpOptions::default()
        });
    }
    node.post_srq(3, &[]);
    let state: SrqState = node.query(QuerySrq, 3).unwrap();
    assert_eq!((state.srqn, state.users, state.available), (3, 2, 1));
    assert_eq!((state.producer, state.next), (1, 0));
    assert_eq!((state.flags, state.xrcd, state.cqn), (0, 0, 0));
    assert_eq!((state.log_entries, state.failed), (4, 0));
    assert!(state.reserved_is_zero());
    let extended: SrqState = node.query(QuerySrq, 4).unwrap();
    assert_eq!(
        (extended.flags, extended.xrcd, extended.cqn),
        (SRQ_FLAG_XRC, 8, 1)
    );
}

#[test]
fn a_tag_tells_what_it_stands_for_now_whatever_instance_is_asked_for() {
    let mut pair = Pair::new(Setup::default());
    let region = pair.a.register(Tag::new(0x11, 5).0, PD, ALL, 8192);
    for instance in [5, 6] {
        let tag = Tag::new(0x11, instance).0;
        let state: TagState = pair.a.query(QueryTag, tag).unwrap();
        assert_eq!((state.tag, state.pd, state.access), (region.tag, PD, ALL));
        assert_eq!((state.address, state.length), (region.address, 8192));
        assert_eq!((state.kind, state.valid), (TagKind::Region.number(), 1));
        assert_eq!((state.flags, state.max_pages, state.windows), (0, 0, 0));
        assert!(state.reserved_is_zero());
    }
    // Reserved, and then registered under another instance by a work request.
    let tag = Tag::new(0x12, 1);
    pair.a.execute(&AllocateTag {
        tag: tag.0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 4,
    });
    let state: TagState = pair.a.query(QueryTag, tag.0).unwrap();
    assert_eq!((state.valid, state.length, state.max_pages), (0, 0, 4));
    let page = pair.a.allocate(4096);
    let part = FastRegisterPart {
        tag: Tag::new(0x12, 9).0,
        access: ACCESS_LOCAL_WRITE,
        address: 0x7000,
        buffer: Buffer::contiguous(page, 4096),
        ..FastRegisterPart::zeroed()
    };
    let work = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    let state: TagState = pair.a.query(QueryTag, tag.0).unwrap();
    assert_eq!(state.tag, part.tag);
    assert_eq!((state.valid, state.length), (1, 4096));
    assert_eq!((state.address, state.access), (0x7000, ACCESS_LOCAL_WRITE));
}

#[test]
fn a_query_of_a_tag_stands_in_the_line_of_commands_on_tags() {
    let mut node = Node::new(1);
    let region = node.register(0x1101, PD, ALL, 4096);
    let object = |opcode| {
        let reply = if opcode == QueryTag {
            (node.reply(), 64)
        } else {
            (0, 0)
        };
        let number = ObjectNumber {
            number: region.tag,
            reserved: 0,
        };
        CommandEntry::new(opcode, 0, reply, &number)
    };
    let entries = [
        object(QueryTag),
        object(CommandOpcode::ReleaseTag),
        object(QueryTag),
    ];
    let statuses = node.commands(&entries);
    assert_eq!(statuses, [CommandStatus::Ok, CommandStatus::Ok, NotFound]);
}

#[test]
fn what_is_not_there_or_was_not_agreed_on_is_not_told() {
    let mut node = Node::new(1);
    let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    let tag = |index| Tag::new(index, 1).0;
    for (opcode, number, status) in [
        (QueryCompletionQueue, 77, NotFound),
        (
            QueryCompletionQueue,
            caps.cq_first + caps.cq_count,
            BadNumber,
        ),
        (QueryTag, tag(77), NotFound),
        (QueryTag, tag(caps.tag_first + caps.tag_count), BadNumber),
    ] {
        assert_eq!(node.object_command(opcode, number), status, "{opcode:?}");
    }
    let mut node = Node::with_features(1, FEATURES & !FEATURE_CONTEXTS);
    node.create_srq(3, 4, None);
    node.create_qp(QpOptions::default());
    let region = node.register(0x101, 1, ALL, 4096);
    assert_eq!(node.object_command(QueryCompletionQueue, 1), Unsupported);
    assert_eq!(node.object_command(QueryTag, region.tag), Unsupported);
    let state: QueuePairState = node.query(QueryQueuePair, 2).unwrap();
    assert_eq!((state.pd, state.service, state.send_cqn), (0, 0, 0));
    let state: SrqState = node.query(QuerySrq, 3).unwrap();
    assert_eq!((state.srqn, state.log_entries), (0, 0));
}
