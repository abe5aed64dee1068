// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Reliable connections between two engines over a good wire: every operation, with its data.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};

const SIZES: [u32; 14] = [
    0,
    1,
    3,
    63,
    1023,
    1024,
    1025,
    4032,
    4095,
    4096,
    4097,
    8192,
    3 * 1024,
    40 * 1024 + 7,
];

#[test]
fn sends_of_every_size_arrive_with_their_data() {
    for log_mtu in [8, 10, 12] {
        let mut pair = Pair::new(Setup {
            log_mtu,
            ..Setup::default()
        });
        let from = pair.a.register(0x101, PD, ALL, 64 << 10);
        let to = pair.b.register(0x201, PD, ALL, 64 << 10);
        for (n, length) in SIZES.into_iter().enumerate() {
            let data = pattern(n as u64, length as usize);
            pair.a.fill(&from, 0, &data);
            pair.b.fill(&to, 0, &vec![0xee; length as usize + 1]);
            let receive = pair.b.post_recv(QPN_B, &[to.sge(0, length)]);
            let index = pair.a.post_send(QPN_A, &send(&from, length));
            pair.exchange();
            let sent = pair.completions_a();
            assert_eq!(statuses(&sent), [CompletionStatus::Success]);
            assert_eq!((sent[0].qpn, sent[0].index), (QPN_A, index));
            assert_eq!(sent[0].opcode, CompletionOpcode::Send.number());
            let received = pair.completions_b();
            assert_eq!(statuses(&received), [CompletionStatus::Success]);
            assert_eq!((received[0].qpn, received[0].index), (QPN_B, receive));
            assert_eq!(received[0].byte_count, length);
            assert_eq!(received[0].opcode, CompletionOpcode::Receive.number());
            assert_eq!(received[0].flags, COMPLETION_RECEIVE);
            let mut got = pair.b.contents(&to, 0, length as usize + 1);
            assert_eq!(got.pop(), Some(0xee), "a byte too many");
            assert_eq!(got, data);
        }
        assert_eq!(pair.a.engine.counters().retransmissions, 0);
    }
}

#[test]
fn writes_of_every_size_arrive_with_their_data() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 64 << 10);
    let to = pair.b.register(0x201, PD, ALL, 64 << 10);
    for (n, length) in SIZES.into_iter().enumerate() {
        let data = pattern(n as u64, length as usize);
        pair.a.fill(&from, 0, &data);
        // From the middle, so that nothing is aligned.
        let at = 4096 - 13;
        pair.b.fill(&to, at - 1, &vec![0xee; length as usize + 2]);
        let work = SendWork::new(SendOpcode::Write, &[from.sge(0, length)])
            .remote(to.address + at, to.tag);
        pair.a.post_send(QPN_A, &work);
        pair.exchange();
        let sent = pair.completions_a();
        assert_eq!(statuses(&sent), [CompletionStatus::Success]);
        assert_eq!(sent[0].opcode, CompletionOpcode::Write.number());
        assert_eq!(pair.completions_b(), []);
        let got = pair.b.contents(&to, at - 1, length as usize + 2);
        assert_eq!(got[1..=length as usize], data);
        assert_eq!((got[0], got[length as usize + 1]), (0xee, 0xee));
    }
}

#[test]
fn reads_of_every_size_bring_their_data() {
    for log_mtu in [8, 10, 12] {
        let mut pair = Pair::new(Setup {
            log_mtu,
            ..Setup::default()
        });
        let to = pair.a.register(0x101, PD, ALL, 64 << 10);
        let from = pair.b.register(0x201, PD, ALL, 64 << 10);
        for (n, length) in SIZES.into_iter().enumerate() {
            let data = pattern(n as u64, length as usize);
            pair.b.fill(&from, 77, &data);
            pair.a.fill(&to, 0, &vec![0xee; length as usize + 1]);
            let work = SendWork::new(SendOpcode::Read, &[to.sge(0, length)])
                .remote(from.address + 77, from.tag);
            pair.a.post_send(QPN_A, &work);
            pair.exchange();
            let sent = pair.completions_a();
            assert_eq!(statuses(&sent), [CompletionStatus::Success]);
            assert_eq!(sent[0].opcode, CompletionOpcode::Read.number());
            assert_eq!(sent[0].byte_count, length);
            let mut got = pair.a.contents(&to, 0, length as usize + 1);
            assert_eq!(got.pop(), Some(0xee));
            assert_eq!(got, data);
        }
    }
}

#[test]
fn a_long_read_is_asked_for_in_pieces_and_is_whole() {
    let mut pair = Pair::new(Setup::default());
    let length = 1_500_001;
    let to = pair.a.register(0x101, PD, ALL, length);
    let from = pair.b.register(0x201, PD, ALL, length);
    let data = pattern(1, length as usize);
    pair.b.fill(&from, 0, &data);
    let work =
        SendWork::new(SendOpcode::Read, &[to.sge(0, length as u32)]).remote(from.address, from.tag);
    pair.a.post_send(QPN_A, &work);
    let mut requests = 0;
    pair.exchange_with(|way, frame| {
        requests += u32::from(way == Way::AToB);
        vec![frame]
    });
    assert_eq!(requests, 6);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(pair.a.contents(&to, 0, length as usize), data);
}

#[test]
fn a_long_write_does_not_put_more_than_its_window_on_the_wire() {
    let mut pair = Pair::new(Setup::default());
    let length = 2_000_000;
    let from = pair.a.register(0x101, PD, ALL, length);
    let to = pair.b.register(0x201, PD, ALL, length);
    let data = pattern(1, length as usize);
    pair.a.fill(&from, 0, &data);
    let work =
        SendWork::new(SendOpcode::Write, &[from.sge(0, length as u32)]).remote(to.address, to.tag);
    pair.a.post_send(QPN_A, &work);
    pair.a.settle();
    assert_eq!(pair.a.host.sent.len(), 512);
    pair.exchange();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(pair.b.contents(&to, 0, length as usize), data);
    // Far fewer acknowledgements than packets.
    assert!(pair.b.engine.counters().tx_packets < 100);
}

#[test]
fn immediate_data_arrive_as_they_were_given() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 16 << 10);
    let to = pair.b.register(0x201, PD, ALL, 16 << 10);
    let data = pattern(3, 5000);
    pair.a.fill(&from, 0, &data);
    for length in [0, 100, 5000] {
        pair.b.post_recv(QPN_B, &[to.sge(0, length)]);
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::SendImmediate, &[from.sge(0, length)])
                .immediate(0x0403_0201)
                .flags(SEND_SIGNALED | SEND_SOLICITED),
        );
        pair.exchange();
        let received = pair.completions_b();
        assert_eq!(statuses(&received), [CompletionStatus::Success]);
        assert_eq!(received[0].immediate, 0x0403_0201);
        assert_eq!(
            received[0].flags,
            COMPLETION_RECEIVE | COMPLETION_IMMEDIATE | COMPLETION_SOLICITED
        );
        assert_eq!(received[0].opcode, CompletionOpcode::Receive.number());

        // A write does not touch the buffers of the receive it completes.
        let receive = pair.b.post_recv(QPN_B, &[]);
        pair.b.fill(&to, 0, &vec![0; 16 << 10]);
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::WriteImmediate, &[from.sge(0, length)])
                .remote(to.address + 9000, to.tag)
                .immediate(0xdead_beef),
        );
        pair.exchange();
        let received = pair.completions_b();
        assert_eq!(statuses(&received), [CompletionStatus::Success]);
        assert_eq!(received[0].index, receive);
        assert_eq!(received[0].immediate, 0xdead_beef);
        assert_eq!(received[0].byte_count, length);
        assert_eq!(received[0].flags, COMPLETION_RECEIVE | COMPLETION_IMMEDIATE);
        assert_eq!(received[0].opcode, CompletionOpcode::ReceiveWrite.number());
        assert_eq!(
            pair.b.contents(&to, 9000, length as usize),
            data[..length as usize]
        );
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::Success; 2]
        );
    }
}

#[test]
fn inline_data_and_scattered_pieces_arrive_whole() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 32 << 10);
    let to = pair.b.register(0x201, PD, ALL, 32 << 10);
    let data = pattern(9, MAX_INLINE);
    pair.b
        .post_recv(QPN_B, &[to.sge(0, 100), to.sge(1000, 0), to.sge(8000, 500)]);
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]).inline(&data));
    pair.exchange();
    assert_eq!(pair.completions_b()[0].byte_count, 256);
    assert_eq!(pair.b.contents(&to, 0, 100), data[..100]);
    assert_eq!(pair.b.contents(&to, 8000, 156), data[100..]);

    // Sixteen pieces to sixteen others, none of them of a packet's size.
    let data = pattern(10, 16 * 700);
    pair.a.fill(&from, 0, &data);
    let pieces: Vec<Sge> = (0..16).map(|n| from.sge(n * 700, 700)).collect();
    let places: Vec<Sge> = (0..16).map(|n| to.sge((15 - n) * 701, 701)).collect();
    pair.b.post_recv(QPN_B, &places);
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &pieces));
    pair.exchange();
    assert_eq!(pair.completions_b()[0].byte_count, 16 * 700);
    let got: Vec<u8> = (0..16)
        .flat_map(|n| pair.b.contents(&to, (15 - n) * 701, 701))
        .collect();
    assert_eq!(got[..data.len()], data);
}

#[test]
fn atomics_change_the_memory_and_return_what_it_held() {
    let mut pair = Pair::new(Setup::default());
    let to = pair.a.register(0x101, PD, ALL, 4096);
    let from = pair.b.register(0x201, PD, ALL, 4096);
    pair.b.fill(&from, 8, &1000u64.to_le_bytes());
    let mut run = |opcode, operand, compare| {
        let part = AtomicPart {
            address: from.address + 8,
            rkey: from.tag,
            operand,
            compare,
            ..AtomicPart::zeroed()
        };
        pair.a
            .post_send(QPN_A, &SendWork::new(opcode, &[to.sge(16, 8)]).part(&part));
        pair.exchange();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        let word = |bytes: Vec<u8>| u64::from_le_bytes(bytes.try_into().unwrap());
        (
            word(pair.a.contents(&to, 16, 8)),
            word(pair.b.contents(&from, 8, 8)),
        )
    };
    assert_eq!(run(SendOpcode::FetchAdd, 7, 0), (1000, 1007));
    assert_eq!(run(SendOpcode::CompareSwap, 5, 1), (1007, 1007));
    assert_eq!(run(SendOpcode::CompareSwap, 5, 1007), (1007, 5));
    assert_eq!(run(SendOpcode::FetchAdd, u64::MAX, 0), (5, 4));
}

#[test]
fn unsignaled_work_completes_without_entry_and_everything_in_order() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 8192);
    let to = pair.b.register(0x201, PD, ALL, 8192);
    let mut expected = Vec::new();
    for n in 0..40u32 {
        let signaled = n % 4 == 3;
        let flags = if signaled { SEND_SIGNALED } else { 0 };
        let work = match n % 3 {
            0 => SendWork::new(SendOpcode::Write, &[from.sge(0, n)]).remote(to.address, to.tag),
            1 => SendWork::new(SendOpcode::Read, &[from.sge(0, n * 50)]).remote(to.address, to.tag),
            _ => {
                pair.b.post_recv(QPN_B, &[to.sge(0, 4096)]);
                SendWork::new(SendOpcode::Send, &[from.sge(0, n * 100)])
            }
        };
        let index = pair.a.post_send(QPN_A, &work.flags(flags));
        if signaled {
            expected.push(index);
        }
    }
    pair.exchange();
    let completions = pair.completions_a();
    let indices: Vec<u32> = completions.iter().map(|entry| entry.index).collect();
    assert_eq!(indices, expected);
    assert!(statuses(&completions)
        .iter()
        .all(|&status| status == CompletionStatus::Success));
    assert_eq!(pair.completions_b().len(), 13);
}

#[test]
fn no_more_reads_are_in_flight_than_the_peer_serves() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    let (to_b, to_a) = (pair.peer_of_a(setup), pair.peer_of_b(setup));
    pair.a.to_init(QPN_A);
    pair.a.to_rtr(QPN_A, &to_b);
    pair.a.execute(&ModifyQueuePair {
        qpn: QPN_A,
        mask: MODIFY_STATE
            | MODIFY_SEND_PSN
            | MODIFY_TIMEOUT
            | MODIFY_RETRY
            | MODIFY_RNR_RETRY
            | MODIFY_ORD,
        state: QueuePairStateCode::Rts.number(),
        send_psn: setup.psn_a,
        timeout: 10,
        ord: 2,
        ..ModifyQueuePair::zeroed()
    });
    pair.b.connect(QPN_B, &to_a);
    let to = pair.a.register(0x101, PD, ALL, 8192);
    let from = pair.b.register(0x201, PD, ALL, 8192);
    for n in 0..5 {
        let work = SendWork::new(SendOpcode::Read, &[to.sge(n * 8, 8)])
            .remote(from.address + n * 8, from.tag);
        pair.a.post_send(QPN_A, &work);
    }
    pair.a.settle();
    assert_eq!(pair.a.host.sent.len(), 2);
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 5);
}

#[test]
fn a_fence_waits_for_the_data_of_earlier_reads() {
    let mut pair = Pair::new(Setup::default());
    let a = pair.a.register(0x101, PD, ALL, 8192);
    let b = pair.b.register(0x201, PD, ALL, 8192);
    pair.b.fill(&b, 0, &pattern(4, 3000));
    pair.b.fill(&b, 4000, &[0; 3000]);
    // Without the fence the write would send what the read has not brought yet.
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Read, &[a.sge(0, 3000)]).remote(b.address, b.tag),
    );
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Write, &[a.sge(0, 3000)])
            .remote(b.address + 4000, b.tag)
            .flags(SEND_SIGNALED | SEND_FENCE),
    );
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 2);
    assert_eq!(pair.b.contents(&b, 4000, 3000), pattern(4, 3000));
}

#[test]
fn memory_is_registered_used_and_invalidated_through_the_send_queue() {
    let mut pair = Pair::new(Setup::default());
    let source = pair.a.register(0x101, PD, ALL, 8192);
    pair.a.fill(&source, 0, &pattern(5, 4096));
    let page = pair.b.allocate(4096);
    let tag = Tag::new(0x30, 1);
    pair.b.execute(&AllocateTag {
        tag: tag.0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 4,
    });
    let register = |instance: u8| FastRegisterPart {
        tag: Tag::new(0x30, instance).0,
        access: ALL,
        address: 0x5000,
        buffer: Buffer::contiguous(page, 4096),
        reserved: 0,
    };
    pair.b.post_send(
        QPN_B,
        &SendWork::new(SendOpcode::FastRegister, &[]).part(&register(1)),
    );
    pair.exchange();
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    pair.b.post_recv(QPN_B, &[]);
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Write, &[source.sge(0, 4096)]).remote(0x5000, tag.0),
    );
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(tag.0),
    );
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 2]
    );
    let received = pair.completions_b();
    assert_eq!(
        received[0].flags,
        COMPLETION_RECEIVE | COMPLETION_INVALIDATED
    );
    assert_eq!((received[0].tag, received[0].immediate), (tag.0, 0));
    let mut bytes = vec![0; 4096];
    ferrite_engine::HostMemory::read(&pair.b.host, page, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(5, 4096));

    // Once more under another instance, this time invalidated by its owner.
    pair.b.post_send(
        QPN_B,
        &SendWork::new(SendOpcode::FastRegister, &[]).part(&register(2)),
    );
    let stale = tag.0;
    pair.b.post_send(
        QPN_B,
        &SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(Tag::new(0x30, 2).0),
    );
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_b()),
        [CompletionStatus::Success; 2]
    );
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Write, &[source.sge(0, 4096)]).remote(0x5000, stale),
    );
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::RemoteAccess]
    );
}

#[test]
fn a_queue_pair_talks_to_another_of_the_same_device() {
    let mut node = Node::new(1);
    for qpn in [QPN_A, QPN_B] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            ..QpOptions::default()
        });
    }
    let (a, b) = (node.as_peer(QPN_A), node.as_peer(QPN_B));
    node.connect(QPN_A, &b);
    node.connect(QPN_B, &a);
    let from = node.register(0x101, PD, ALL, 600 << 10);
    let to = node.register(0x201, PD, ALL, 600 << 10);
    let data = pattern(8, 600 << 10);
    node.fill(&from, 0, &data);
    node.post_recv(QPN_B, &[to.sge(0, 600 << 10)]);
    node.post_send(QPN_A, &send(&from, 600 << 10));
    node.settle();
    assert_eq!(statuses(&drain(&mut node)), [CompletionStatus::Success; 2]);
    assert_eq!(node.contents(&to, 0, 600 << 10), data);
    node.fill(&to, 0, &vec![0; 600 << 10]);
    node.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Read, &[to.sge(0, 600 << 10)]).remote(from.address, from.tag),
    );
    node.settle();
    assert_eq!(statuses(&drain(&mut node)), [CompletionStatus::Success]);
    assert_eq!(node.contents(&to, 0, 600 << 10), data);
    assert!(node.host.sent.is_empty(), "nothing goes to the wire");
}

#[test]
fn a_queue_pair_talks_to_itself() {
    let mut node = Node::new(1);
    node.create_qp(QpOptions {
        qpn: QPN_A,
        pd: PD,
        ..QpOptions::default()
    });
    let peer = node.as_peer(QPN_A);
    node.connect(QPN_A, &peer);
    let from = node.register(0x101, PD, ALL, 8192);
    let to = node.register(0x201, PD, ALL, 8192);
    node.fill(&from, 0, &pattern(1, 5000));
    node.post_recv(QPN_A, &[to.sge(0, 5000)]);
    node.post_send(QPN_A, &send(&from, 5000));
    node.settle();
    assert_eq!(statuses(&drain(&mut node)), [CompletionStatus::Success; 2]);
    assert_eq!(node.contents(&to, 0, 5000), pattern(1, 5000));
}

#[test]
fn traffic_of_others_is_passed_to_the_host() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 8192);
    pair.a.post_send(QPN_A, &send(&from, 10));
    pair.a.settle();
    let frame = pair.a.host.sent.pop_front().unwrap();
    // Another destination address (with its checksum), another queue pair, no RoCE at all.
    let mut other_address = frame.clone();
    other_address[33] += 1;
    other_address[25] -= 1;
    let mut other_pair = frame.clone();
    other_pair[49] ^= 1;
    for frame in [other_address, other_pair, vec![0xff; 64]] {
        assert_eq!(
            pair.b.receive(&frame),
            ferrite_engine::Disposition::PassToHost
        );
    }
    // Its own is not, be it damaged or not.
    let mut damaged = frame.clone();
    *damaged.last_mut().unwrap() ^= 1;
    assert_eq!(
        pair.b.receive(&damaged),
        ferrite_engine::Disposition::Consumed
    );
    assert_eq!(pair.b.engine.counters().rx_icrc_errors, 1);
    assert_eq!(
        pair.b.receive(&frame),
        ferrite_engine::Disposition::Consumed
    );
}

#[test]
fn the_first_packet_in_rtr_is_announced_once() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    let (to_b, to_a) = (pair.peer_of_a(setup), pair.peer_of_b(setup));
    pair.a.connect(QPN_A, &to_b);
    pair.b.to_init(QPN_B);
    let from = pair.a.register(0x101, PD, ALL, 8192);
    pair.b.post_recv(QPN_B, &[]);
    pair.b.post_recv(QPN_B, &[]);
    pair.b.to_rtr(QPN_B, &to_a);
    for _ in 0..2 {
        pair.a.post_send(QPN_A, &send(&from, 0));
        pair.exchange();
    }
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 2]
    );
    assert_eq!(
        pair.b.event_codes(EQ_ASYNC),
        [(EventCode::CommunicationEstablished, QPN_B)]
    );
}

#[test]
fn a_drained_send_queue_finishes_what_it_began_and_goes_on_later() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 8192);
    let to = pair.b.register(0x201, PD, ALL, 8192);
    let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 5000)]).remote(to.address, to.tag);
    pair.a.post_send(QPN_A, &work);
    pair.a.settle();
    assert_eq!(
        pair.a.set_state(QPN_A, QueuePairStateCode::Sqd),
        CommandStatus::Ok
    );
    pair.a.post_send(QPN_A, &work);
    assert_eq!(pair.a.event_codes(EQ_ASYNC), []);
    pair.exchange();
    assert_eq!(
        pair.a.event_codes(EQ_ASYNC),
        [(EventCode::SendQueueDrained, QPN_A)]
    );
    assert_eq!(pair.completions_a().len(), 1);
    assert_eq!(
        pair.a.set_state(QPN_A, QueuePairStateCode::Rts),
        CommandStatus::Ok
    );
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 1);
}

#[test]
fn posts_while_the_device_is_at_work_need_no_doorbell() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 600 << 10);
    let to = pair.b.register(0x201, PD, ALL, 600 << 10);
    let work =
        SendWork::new(SendOpcode::Write, &[from.sge(0, 600 << 10)]).remote(to.address, to.tag);
    pair.a.post_send(QPN_A, &work);
    pair.a.settle();
    assert_eq!(pair.a.send_doorbells, 1);
    pair.a.post_send(QPN_A, &work);
    assert_eq!(pair.a.send_doorbells, 1);
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 2);
    pair.a.post_send(QPN_A, &work);
    assert_eq!(pair.a.send_doorbells, 2);
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 1);
}

#[test]
fn ipv6_and_vlan_tags_are_used_where_the_address_has_them() {
    use ferrite_engine::roce::Frame;
    for (ipv6, vlan) in [(true, None), (false, Some(5)), (true, Some(4094))] {
        let setup = Setup::default();
        let mut pair = Pair::unconnected(setup);
        for (n, node) in [(1, &mut pair.a), (2, &mut pair.b)] {
            if ipv6 {
                node.gid = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, n];
            }
            node.execute(&SetGid {
                gid: node.gid,
                index: 0,
                vlan: vlan.unwrap_or(VLAN_NONE),
                mac: node.mac,
                port: 0,
                reserved: [0; 5],
            });
        }
        let (to_b, to_a) = (pair.peer_of_a(setup), pair.peer_of_b(setup));
        pair.a.connect(QPN_A, &to_b);
        pair.b.connect(QPN_B, &to_a);
        let from = pair.a.register(0x101, PD, ALL, 8192);
        let to = pair.b.register(0x201, PD, ALL, 8192);
        pair.a.fill(&from, 0, &pattern(1, 5000));
        pair.b.post_recv(QPN_B, &[to.sge(0, 5000)]);
        pair.a.post_send(QPN_A, &send(&from, 5000));
        pair.exchange_with(|_, frame| {
            let parsed = Frame::parse(&frame).unwrap();
            assert_eq!((parsed.ipv6, parsed.vlan), (ipv6, vlan));
            vec![frame]
        });
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        assert_eq!(pair.b.contents(&to, 0, 5000), pattern(1, 5000));
    }
}

#[test]
fn a_burst_of_small_messages_is_acknowledged_together() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 4096);
    let to = pair.b.register(0x201, PD, ALL, 4096);
    for _ in 0..32 {
        let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 8)]).remote(to.address, to.tag);
        pair.a.post_send(QPN_A, &work);
    }
    pair.exchange();
    assert_eq!(pair.completions_a().len(), 32);
    assert_eq!(pair.b.engine.counters().tx_packets, 1);
}

/// A message is on its way twice; the first copy finds no receive and the second does. So the
/// acknowledgement comes while the requester waits to send the message again, and what comes
/// next in its queue is the local operation behind it.
#[test]
fn an_acknowledgement_that_overtakes_a_repetition_does_not_skip_a_local_operation() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 4096);
    let to = pair.b.register(0x201, PD, ALL, 4096);
    let page = pair.a.allocate(4096);
    let tag = Tag::new(0x30, 1).0;
    pair.a.execute(&AllocateTag {
        tag,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    let register = FastRegisterPart {
        tag,
        access: ALL,
        address: 0x5000,
        buffer: Buffer::contiguous(page, 4096),
        reserved: 0,
    };
    let work = [
        SendWork::new(SendOpcode::FastRegister, &[]).part(&register),
        send(&from, 100),
        SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag),
    ];
    for work in &work {
        pair.a.post_send(QPN_A, work);
    }
    pair.a.settle();
    let frame = pair.a.host.sent.pop_front().expect("the message");
    pair.b.receive(&frame);
    pair.b.settle();
    pair.b.post_recv(QPN_B, &[to.sge(0, 100)]);
    pair.b.receive(&frame);
    pair.b.settle();
    assert_eq!(pair.b.host.sent.len(), 2, "not ready, then acknowledged");
    while let Some(answer) = pair.b.host.sent.pop_front() {
        pair.a.receive(&answer);
        pair.a.settle();
    }
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 3]
    );
    // And it was carried out: the tag means nothing any more.
    let through_tag = Sge {
        address: 0x5000,
        length: 10,
        lkey: tag,
    };
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[through_tag]));
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::LocalProtection]
    );
}

#[test]
fn a_completion_queue_is_resized_in_every_round_of_its_ring() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 4096);
    let to = pair.b.register(0x201, PD, ALL, 4096);
    let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 8)]).remote(to.address, to.tag);
    let mut expected = std::collections::VecDeque::new();
    for round in 0..200u32 {
        for _ in 0..5 + round % 3 {
            expected.push_back(pair.a.post_send(QPN_A, &work));
        }
        pair.exchange();
        // Some are taken before, the rest after.
        for _ in 0..round % 5 {
            let entry = pair.a.poll_cq(1).expect("a completion");
            assert_eq!(Some(entry.index), expected.pop_front());
        }
        let log_entries = [4, 6, 5, 7][(round % 4) as usize];
        assert_eq!(pair.a.resize_cq(1, log_entries), CommandStatus::Ok);
        while let Some(entry) = pair.a.poll_cq(1) {
            assert_eq!(Some(entry.index), expected.pop_front());
        }
        assert!(expected.is_empty());
    }
}

#[test]
fn a_peer_is_told_of_what_was_done_before_the_queue_pair_goes() {
    // The host that gets the message has what it waited for, and ends the queue pair before the device has come to
    // answer: by a command that is found when the next turn begins.
    let to_error = ModifyQueuePair {
        qpn: QPN_B,
        mask: MODIFY_STATE,
        state: QueuePairStateCode::Error.number(),
        ..ModifyQueuePair::zeroed()
    };
    let ends: [fn(&mut Node, &ModifyQueuePair) -> CommandStatus; 2] = [
        |node, _| node.object_command(CommandOpcode::DestroyQueuePair, QPN_B),
        |node, modify| node.command(CommandOpcode::ModifyQueuePair, modify),
    ];
    for end in ends {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 4096);
        let to = pair.b.register(0x201, PD, ALL, 4096);
        pair.b.post_recv(QPN_B, &[to.sge(0, 64)]);
        pair.a.post_send(QPN_A, &send(&from, 64));
        pair.a.engine.poll(pair.a.now, &mut pair.a.host);
        for frame in std::mem::take(&mut pair.a.host.sent) {
            pair.b.receive(&frame);
        }
        assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
        assert_eq!(end(&mut pair.b, &to_error), CommandStatus::Ok);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        assert_eq!(pair.a.engine.counters().retransmissions, 0);
    }
}
