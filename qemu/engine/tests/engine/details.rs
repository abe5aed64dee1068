// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the specification says beside the main thing, each in its place: which of two statuses,
//! what stands in fields that do not count, what becomes of what is half done.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::roce::{Frame, Packet};
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use CompletionStatus::{Flushed, LocalLength, RemoteAccess, Success};
use QueuePairStateCode::Reset;

/// Of datagram queue pairs, in A and in B.
const UD_A: u32 = 0x31;
const UD_B: u32 = 0x32;
const QKEY: u32 = 0x77;

#[test]
fn a_number_is_out_of_range_or_nobodys() {
    use CommandOpcode as Opcode;
    use CommandStatus::{BadNumber, NotFound};
    let mut node = Node::new(1);
    let caps: DeviceCaps = node.query(Opcode::QueryDevice, 0).unwrap();
    let tag = |index| Tag::new(index, 1).0;
    let cases = [
        (
            Opcode::QueryQueuePair,
            caps.qp_first + caps.qp_count,
            BadNumber,
        ),
        (Opcode::QueryQueuePair, 5, NotFound),
        (Opcode::DestroyQueuePair, 0, BadNumber),
        (Opcode::DestroyQueuePair, 5, NotFound),
        (
            Opcode::DestroyCompletionQueue,
            caps.cq_first + caps.cq_count,
            BadNumber,
        ),
        (Opcode::DestroyCompletionQueue, 5, NotFound),
        (Opcode::DestroyEventQueue, caps.max_eq.into(), BadNumber),
        (Opcode::DestroyEventQueue, 0, BadNumber),
        (Opcode::DestroyEventQueue, 5, NotFound),
        (
            Opcode::ReleaseTag,
            tag(caps.tag_first + caps.tag_count),
            BadNumber,
        ),
        (Opcode::ReleaseTag, tag(5), NotFound),
        (Opcode::QuerySrq, caps.srq_first + caps.srq_count, BadNumber),
        (
            Opcode::DestroySrq,
            caps.srq_first + caps.srq_count,
            BadNumber,
        ),
        (Opcode::DestroySrq, 5, NotFound),
    ];
    for (opcode, number, status) in cases {
        assert_eq!(node.object_command(opcode, number), status, "{opcode:?}");
    }
    // What a command names beside its own.
    for (number, refused) in [(9, NotFound), (u32::MAX - 2, BadNumber)] {
        let good = node.qp_template(QpOptions::default());
        let other_queue = CreateQueuePair {
            send_cqn: number,
            ..good
        };
        let other_receives = CreateQueuePair {
            flags: QP_FLAG_SRQ,
            srqn: number,
            ..good
        };
        for command in [other_queue, other_receives] {
            let status = node.command(Opcode::CreateQueuePair, &command);
            assert_eq!(status, refused, "{command:?}");
        }
        let other_handler = CreateCompletionQueue {
            eqn: number as u16,
            ..node.cq_template(5, 0, 4)
        };
        let status = node.command(Opcode::CreateCompletionQueue, &other_handler);
        assert_eq!(status, refused);
        let member = MulticastMember {
            gid: [0xff; 16],
            qpn: number,
            ..MulticastMember::zeroed()
        };
        assert_eq!(node.command(Opcode::AttachMulticast, &member), refused);
    }
}

#[test]
fn an_atomic_on_memory_that_is_not_there_is_a_refused_access() {
    let mut pair = Pair::new(Setup::default());
    let a = pair.a.register(0x101, PD, ALL, 4096);
    // There is no host memory so low.
    pair.b.execute(&RegisterRegion {
        tag: 0x201,
        pd: PD,
        access: ALL,
        flags: 0,
        address: 0x4000,
        buffer: Buffer::contiguous(0x4000, 4096),
    });
    let work = SendWork::new(SendOpcode::FetchAdd, &[a.sge(0, 8)]).part(&AtomicPart {
        address: 0x4000,
        rkey: 0x201,
        reserved: 0,
        operand: 1,
        compare: 0,
    });
    pair.a.post_send(QPN_A, &work);
    pair.run();
    assert_eq!(statuses(&pair.completions_a()), [RemoteAccess]);
    let events = pair.b.event_codes(EQ_ASYNC);
    assert_eq!(events, [(EventCode::QueuePairAccessError, QPN_B)]);
}

/// A pair with a datagram queue pair of this service at each end.
fn datagrams(service: Service, a: u32, b: u32) -> Pair {
    let mut pair = Pair::unconnected(Setup::default());
    for (node, qpn) in [(&mut pair.a, a), (&mut pair.b, b)] {
        node.create_qp(QpOptions {
            qpn,
            service,
            ..QpOptions::default()
        });
        node.start_datagrams(qpn, QKEY);
    }
    pair
}

/// What a completion says of where its message came from.
fn origin(entry: &CompletionEntry) -> (u32, [u8; 6], u16, u16) {
    let CompletionEntry {
        source_qpn,
        source_mac,
        vlan,
        pkey_index,
        ..
    } = *entry;
    (source_qpn, source_mac, vlan, pkey_index)
}

#[test]
fn only_a_datagram_has_an_origin_and_also_one_that_is_too_long() {
    const NONE: (u32, [u8; 6], u16, u16) = (0, [0; 6], 0xffff, 0);
    let mut pair = datagrams(Service::Ud, UD_A, UD_B);
    let from = (UD_A, pair.a.mac, 0xffff, 0);
    let (a, b) = (
        pair.a.register(0x101, PD, ALL, 4096),
        pair.b.register(0x201, PD, ALL, 4096),
    );
    let to_b = pair.b.as_peer(UD_B).datagram(QKEY);
    for length in [140, 139] {
        pair.b.post_recv(UD_B, &[b.sge(0, length)]);
        pair.a.post_send(UD_A, &send(&a, 100).datagram(&to_b));
    }
    pair.run();
    let received = pair.completions_b();
    assert_eq!(statuses(&received), [Success, LocalLength]);
    assert_eq!(received.iter().map(origin).collect::<Vec<_>>(), [from; 2]);
    assert_eq!(received[1].byte_count, 0);
    assert!(pair.completions_a().iter().all(|sent| origin(sent) == NONE));
    // Flushed ones are nobody's.
    pair.b.post_recv(UD_B, &[]);
    pair.b.set_state(UD_B, QueuePairStateCode::Error);
    let flushed = pair.completions_b();
    assert_eq!(statuses(&flushed), [Flushed]);
    assert_eq!(origin(&flushed[0]), NONE);
}

#[test]
fn queue_pair_1_sends_with_its_own_key_whatever_is_asked_for() {
    let mut pair = datagrams(Service::Gsi, 1, 1);
    let to_b = pair.b.as_peer(1).datagram(0x1234);
    let work = SendWork::new(SendOpcode::Send, &[]).datagram(&to_b);
    pair.a.post_send(1, &work);
    pair.a.settle();
    let sent = pair.a.host.sent.pop_front().unwrap();
    let frame = Frame::parse(&sent).unwrap();
    let packet = Packet::parse(frame.transport).unwrap();
    assert_eq!(packet.deth.unwrap().qkey, 0x8001_0000);
}

#[test]
fn a_reserved_tag_that_is_replaced_is_a_region_by_command() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    let (tag, other) = (Tag::new(9, 1).0, Tag::new(9, 2).0);
    pair.a.execute(&AllocateTag {
        tag,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 4,
    });
    let buffer = Buffer::contiguous(pair.a.allocate(4096), 4096);
    pair.a.execute(&RegisterRegion {
        tag,
        pd: PD,
        access: ALL,
        flags: REGION_REPLACE,
        address: 0,
        buffer,
    });
    let work = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    let refused = pair.completions_a();
    assert_eq!(statuses(&refused), [CompletionStatus::LocalProtection]);
    // Of the wrong kind.
    assert_eq!(refused[0].vendor_syndrome, 3);
    let release = CommandOpcode::ReleaseTag;
    assert_eq!(
        pair.a.object_command(release, other),
        CommandStatus::NotFound
    );
    assert_eq!(pair.a.object_command(release, tag), CommandStatus::Ok);
}

/// Sends three packets from A to B, of which the first arrives, and resets B.
fn reset_in_mid_message(pair: &mut Pair) -> Vec<CompletionEntry> {
    let a = pair.a.register(0x101, PD, ALL, 4096);
    pair.a.post_send(QPN_A, &send(&a, 3000));
    pair.a.settle();
    let first = pair.a.host.sent.pop_front().unwrap();
    pair.b.receive(&first);
    assert_eq!(pair.b.set_state(QPN_B, Reset), CommandStatus::Ok);
    pair.b.settle();
    pair.completions_b()
}

#[test]
fn a_reset_in_mid_message_reports_the_receive_of_a_shared_queue_alone() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    let b = pair.b.register(0x201, PD, ALL, 4096);
    pair.b.post_recv(QPN_B, &[b.sge(0, 4096)]);
    assert!(reset_in_mid_message(&mut pair).is_empty());

    let setup = Setup {
        flags: QP_FLAG_SRQ,
        ..setup
    };
    let [mut a, mut b] = [1, 2].map(Node::new);
    for node in [&mut a, &mut b] {
        node.create_srq(0, 4, None);
    }
    let mut pair = Pair::of(setup, a, b);
    pair.connect(setup);
    let b = pair.b.register(0x201, PD, ALL, 4096);
    let id = pair.b.post_srq(0, &[b.sge(0, 4096)]);
    let reported = reset_in_mid_message(&mut pair);
    assert_eq!(statuses(&reported), [Flushed]);
    assert_eq!(reported[0].index, id);
}

#[test]
fn without_a_link_what_leaves_is_lost_and_what_stays_is_not() {
    let mut pair = Pair::new(Setup::default());
    let node = &mut pair.a;
    for (qpn, peer) in [(0x41, 0x42), (0x42, 0x41)] {
        node.create_qp(QpOptions {
            qpn,
            ..QpOptions::default()
        });
        let peer = node.as_peer(peer);
        node.connect(qpn, &peer);
    }
    node.engine.set_link(false, node.now, &mut node.host);
    node.post_recv(0x42, &[]);
    let send = SendWork::new(SendOpcode::Send, &[]);
    node.post_send(0x41, &send);
    node.settle();
    assert_eq!(statuses(&drain(node)), [Success, Success]);
    node.post_send(QPN_A, &send);
    node.settle();
    assert!(node.host.sent.is_empty());
    assert_eq!(node.qp_state(QPN_A), QueuePairStateCode::Rts);
    // It comes again when there is a link.
    pair.b.post_recv(QPN_B, &[]);
    let node = &mut pair.a;
    node.engine.set_link(true, node.now, &mut node.host);
    pair.run();
    assert_eq!(statuses(&pair.completions_a()), [Success]);
    assert_eq!(statuses(&pair.completions_b()), [Success]);
}
