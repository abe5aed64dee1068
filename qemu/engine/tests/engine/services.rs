// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Datagrams, unreliable connections, shared receive queues, extended connections and multicast,
//! between two engines.

use crate::wire::{drain, pattern, send, statuses, Pair, Setup, Way, ALL, PD, QPN_A, QPN_B};
use ferrite_abi::*;
use ferrite_engine::gid::gid_of_ipv4;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};

const QKEY: u32 = 0x1111_2222;
/// What [`Node::post_srq`] calls the first entry; the next has the last bit changed, and so on.
const NAME: u32 = 0x5a00;

/// Two nodes with a queue pair of the service each, in state RESET, and nothing else.
fn pair(service: Service, numbers: [u32; 2]) -> Pair {
    let mut nodes = [Node::new(1), Node::new(2)];
    for (node, qpn) in nodes.iter_mut().zip(numbers) {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            service,
            flags: QP_FLAG_FAST_REGISTER,
            ..QpOptions::default()
        });
    }
    let [a, b] = nodes;
    Pair {
        a,
        b,
        passed: Vec::new(),
    }
}

fn datagrams() -> Pair {
    let mut pair = pair(Service::Ud, [QPN_A, QPN_B]);
    pair.a.start_datagrams(QPN_A, QKEY);
    pair.b.start_datagrams(QPN_B, QKEY);
    pair
}

#[test]
fn a_datagram_arrives_behind_its_network_header() {
    let mut pair = datagrams();
    let data = pattern(1, 4096);
    let from = pair.a.register(Tag::new(5, 1).0, PD, 0, 4096);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 8192);
    pair.a.fill(&from, 0, &data);
    let peer = pair.b.as_peer(QPN_B);
    for (length, immediate) in [(0u32, None), (1, None), (4096, Some(0x0102_0304))] {
        let index = pair.b.post_recv(QPN_B, &[into.sge(8, 4200)]);
        let opcode = match immediate {
            Some(_) => SendOpcode::SendImmediate,
            None => SendOpcode::Send,
        };
        let work = SendWork::new(opcode, &[from.sge(0, length)])
            .immediate(immediate.unwrap_or(0))
            .flags(SEND_SIGNALED | SEND_SOLICITED)
            .datagram(&peer.datagram(QKEY));
        pair.a.post_send(QPN_A, &work);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!(entry.status, CompletionStatus::Success.number());
        assert_eq!((entry.qpn, entry.index), (QPN_B, index));
        assert_eq!(entry.byte_count, 40 + length);
        assert_eq!(entry.source_qpn, QPN_A);
        assert_eq!(entry.source_mac, pair.a.mac);
        assert_eq!(entry.vlan, VLAN_NONE);
        let mut flags = COMPLETION_RECEIVE | COMPLETION_GRH | COMPLETION_SOLICITED;
        if let Some(immediate) = immediate {
            flags |= COMPLETION_IMMEDIATE;
            assert_eq!(entry.immediate, immediate.into());
        }
        assert_eq!(entry.flags, flags);
        let got = pair.b.contents(&into, 8, 40 + length as usize);
        // Twenty bytes of nothing, then the IPv4 header.
        assert_eq!(got[..20], [0; 20]);
        assert_eq!((got[20], got[29]), (0x45, 17));
        assert_eq!(got[32..36], [10, 0, 0, 1]);
        assert_eq!(got[36..40], [10, 0, 0, 2]);
        assert_eq!(got[40..], data[..length as usize]);
    }
}

#[test]
fn datagrams_with_another_key_or_without_a_receive_or_too_long_are_dropped() {
    let mut pair = datagrams();
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 8192);
    let peer = pair.b.as_peer(QPN_B);
    let hello = |qkey| {
        SendWork::new(SendOpcode::Send, &[])
            .inline(b"hello")
            .datagram(&peer.datagram(qkey))
    };
    // Nothing is posted.
    pair.a.post_send(QPN_A, &hello(QKEY));
    pair.run();
    pair.b.post_recv(QPN_B, &[into.sge(0, 44)]);
    pair.b.post_recv(QPN_B, &[into.sge(0, 45)]);
    pair.a.post_send(QPN_A, &hello(QKEY + 1));
    pair.run();
    assert!(pair.completions_b().is_empty());
    assert_eq!(pair.b.engine.counters().rx_dropped, 2);
    // The first receive is a byte too short; the queue pair goes on. A key with the top bit set
    // stands for the sender's own.
    pair.a.post_send(QPN_A, &hello(QKEY));
    pair.a.post_send(QPN_A, &hello(1 << 31));
    pair.run();
    assert_eq!(
        statuses(&pair.completions_b()),
        [CompletionStatus::LocalLength, CompletionStatus::Success]
    );
    assert_eq!(pair.b.contents(&into, 40, 5), b"hello");
    assert_eq!(statuses(&pair.completions_a()).len(), 4);
}

#[test]
fn a_failed_datagram_stops_the_send_queue_alone() {
    let mut pair = datagrams();
    let from = pair.a.register(Tag::new(5, 1).0, PD, 0, 8192);
    let into = pair.a.register(Tag::new(6, 1).0, PD, ALL, 8192);
    let peer = pair.b.as_peer(QPN_B);
    let good = SendWork::new(SendOpcode::Send, &[from.sge(0, 100)])
        .flags(0)
        .datagram(&peer.datagram(QKEY));
    let mut bad_path = peer.datagram(QKEY);
    bad_path.address_vector.source_gid_index = 99;
    let mut bad_port = peer.datagram(QKEY);
    bad_port.address_vector.port = 1;
    let mut bad_priority = peer.datagram(QKEY);
    bad_priority.address_vector.reserved_priority = 3;
    let sge = from.sge(0, 4097);
    let foreign = Sge { lkey: 0x900, ..sge };
    for (work, status) in [
        (
            SendWork::new(SendOpcode::Send, &[sge]).datagram(&peer.datagram(QKEY)),
            CompletionStatus::LocalLength,
        ),
        (
            SendWork::new(SendOpcode::Send, &[]).datagram(&bad_path),
            CompletionStatus::LocalQueuePairOperation,
        ),
        (
            SendWork::new(SendOpcode::Send, &[]).datagram(&bad_port),
            CompletionStatus::LocalQueuePairOperation,
        ),
        (
            SendWork::new(SendOpcode::Send, &[]).datagram(&bad_priority),
            CompletionStatus::LocalQueuePairOperation,
        ),
        (
            SendWork::new(
                SendOpcode::Send,
                &[Sge {
                    length: 8,
                    ..foreign
                }],
            )
            .datagram(&peer.datagram(QKEY)),
            CompletionStatus::LocalProtection,
        ),
    ] {
        pair.a.post_recv(QPN_A, &[into.sge(0, 200)]);
        pair.a.post_send(QPN_A, &work);
        pair.a.post_send(QPN_A, &good);
        pair.run();
        assert_eq!(
            statuses(&pair.completions_a()),
            [status, CompletionStatus::Flushed]
        );
        assert_eq!(pair.a.qp_state(QPN_A), QueuePairStateCode::Sqe);
        pair.a.post_send(QPN_A, &good);
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Flushed]);
        // Receiving goes on.
        let back = SendWork::new(SendOpcode::Send, &[])
            .inline(b"back")
            .datagram(&pair.a.as_peer(QPN_A).datagram(QKEY));
        pair.b.post_send(QPN_B, &back);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        assert_eq!(
            pair.a.set_state(QPN_A, QueuePairStateCode::Rts),
            CommandStatus::Ok
        );
        pair.completions_b();
    }
    let into = pair.b.register(Tag::new(6, 1).0, PD, ALL, 8192);
    pair.b.post_recv(QPN_B, &[into.sge(0, 200)]);
    pair.a.post_send(QPN_A, &good);
    pair.run();
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
}

#[test]
fn management_datagrams_go_to_queue_pair_one() {
    let mut pair = pair(Service::Gsi, [1, 1]);
    pair.a.start_datagrams(1, 0x8001_0000);
    pair.b.start_datagrams(1, 0x8001_0000);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let own = pair.a.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let mad = pattern(3, 256);
    let from_a = |node: &Node| {
        SendWork::new(SendOpcode::Send, &[])
            .inline(&mad)
            .datagram(&node.as_peer(1).datagram(0x8001_0000))
    };
    pair.b.post_recv(1, &[into.sge(0, 296)]);
    pair.a.post_recv(1, &[own.sge(0, 296)]);
    let (to_b, to_a) = (from_a(&pair.b), from_a(&pair.a));
    pair.a.post_send(1, &to_b);
    // To itself as well.
    pair.a.post_send(1, &to_a);
    pair.run();
    let [entry] = pair.completions_b()[..] else {
        panic!("one completion");
    };
    assert_eq!((entry.source_qpn, entry.byte_count), (1, 296));
    assert_eq!(pair.b.contents(&into, 40, 256), mad);
    assert_eq!(pair.a.contents(&own, 40, 256), mad);
    assert_eq!(pair.completions_a().len(), 3);
    // No other queue pair has the number, and this service no other number.
    for (service, qpn) in [(Service::Gsi, 2), (Service::Ud, 1)] {
        let mut node = Node::new(3);
        let command = node.qp_template(QpOptions {
            qpn,
            service,
            ..QpOptions::default()
        });
        assert_eq!(
            node.command(CommandOpcode::CreateQueuePair, &command),
            CommandStatus::BadNumber
        );
    }
}

#[test]
fn a_group_gets_one_copy_each_and_the_sender_none() {
    let mut pair = datagrams();
    let group = gid_of_ipv4([239, 1, 2, 3]);
    let member = |qpn| MulticastMember {
        gid: group,
        qpn,
        reserved: 0,
    };
    pair.b.create_qp(QpOptions {
        qpn: 0x33,
        service: Service::Ud,
        ..QpOptions::default()
    });
    pair.b.start_datagrams(0x33, QKEY);
    pair.a.create_qp(QpOptions {
        qpn: 0x44,
        service: Service::Ud,
        ..QpOptions::default()
    });
    pair.a.start_datagrams(0x44, QKEY);
    let attach = CommandOpcode::AttachMulticast;
    let detach = CommandOpcode::DetachMulticast;
    let unicast = MulticastMember {
        gid: pair.a.gid,
        ..member(QPN_B)
    };
    assert_eq!(
        pair.b.command(attach, &unicast),
        CommandStatus::BadParameter
    );
    assert_eq!(
        pair.b.command(attach, &member(0x99)),
        CommandStatus::NotFound
    );
    assert_eq!(
        pair.b.command(detach, &member(QPN_B)),
        CommandStatus::NotFound
    );
    for qpn in [QPN_B, 0x33] {
        assert_eq!(pair.b.command(attach, &member(qpn)), CommandStatus::Ok);
    }
    assert_eq!(pair.b.command(attach, &member(0x33)), CommandStatus::Exists);
    for qpn in [QPN_A, 0x44] {
        assert_eq!(pair.a.command(attach, &member(qpn)), CommandStatus::Ok);
    }
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let own = pair.a.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let mut part = pair.b.as_peer(0xff_ffff).datagram(QKEY);
    part.address_vector.gid = group;
    part.address_vector.mac = [0x01, 0x00, 0x5e, 1, 2, 3];
    let work = SendWork::new(SendOpcode::Send, &[])
        .inline(b"all of you")
        .datagram(&part);
    for round in 0..2 {
        pair.b.post_recv(QPN_B, &[into.sge(0, 100)]);
        pair.b.post_recv(0x33, &[into.sge(100, 100)]);
        pair.a.post_recv(QPN_A, &[own.sge(0, 100)]);
        pair.a.post_recv(0x44, &[own.sge(100, 100)]);
        pair.a.post_send(QPN_A, &work);
        pair.run();
        let mut at_b: Vec<u32> = pair.completions_b().iter().map(|entry| entry.qpn).collect();
        at_b.sort();
        let at_a = pair.completions_a();
        let own: Vec<u32> = at_a
            .iter()
            .filter(|entry| entry.flags & COMPLETION_RECEIVE != 0)
            .map(|entry| entry.qpn)
            .collect();
        assert_eq!(own, [0x44]);
        if round == 0 {
            assert_eq!(at_b, [QPN_B, 0x33]);
            assert_eq!(pair.b.contents(&into, 140, 10), b"all of you");
            assert_eq!(pair.b.command(detach, &member(0x33)), CommandStatus::Ok);
        } else {
            assert_eq!(at_b, [QPN_B]);
        }
    }
    // A group without members is the network interface's affair.
    pair.b
        .object_command(CommandOpcode::DestroyQueuePair, QPN_B);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    assert_eq!(pair.passed.len(), 1);
}

#[test]
fn many_queue_pairs_take_from_one_shared_queue() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    pair.b.create_srq(3, 4, None);
    let mut peers = Vec::new();
    for n in 0..3 {
        pair.a.create_qp(QpOptions {
            qpn: 0x40 + n,
            pd: PD,
            ..QpOptions::default()
        });
        pair.b.create_qp(QpOptions {
            qpn: 0x50 + n,
            // Of another domain: the receives are checked against that of the queue.
            pd: 9,
            flags: QP_FLAG_SRQ,
            srqn: 3,
            ..QpOptions::default()
        });
        let (to_b, to_a) = (pair.b.as_peer(0x50 + n), pair.a.as_peer(0x40 + n));
        pair.a.connect(0x40 + n, &to_b);
        pair.b.connect(0x50 + n, &to_a);
        peers.push(0x50 + n);
    }
    assert_eq!(
        pair.b.object_command(CommandOpcode::DestroySrq, 3),
        CommandStatus::Busy
    );
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 64 << 10);
    for n in 0..16 {
        assert_eq!(
            pair.b.post_srq(3, &[into.sge(n * 4096, 4096)]),
            NAME ^ n as u32
        );
    }
    let state: SrqState = pair.b.query(CommandOpcode::QuerySrq, 3).unwrap();
    assert_eq!((state.limit, state.available), (0, 16));
    let limit = |limit| ModifySrq { srqn: 3, limit };
    assert_eq!(
        pair.b.command(CommandOpcode::ModifySrq, &limit(17)),
        CommandStatus::BadParameter
    );
    pair.b.execute(&limit(13));
    let from = pair.a.register(Tag::new(5, 1).0, PD, 0, 4096);
    let data = pattern(5, 3000);
    pair.a.fill(&from, 0, &data);
    for n in 0..3 {
        let work = SendWork::new(SendOpcode::Send, &[from.sge(0, 3000)]);
        pair.a.post_send(0x40 + n, &work);
    }
    pair.exchange();
    assert_eq!(pair.b.event_codes(EQ_ASYNC), []);
    let completions = pair.completions_b();
    assert_eq!(statuses(&completions), [CompletionStatus::Success; 3]);
    let mut slots = Vec::new();
    for entry in completions {
        assert_eq!(entry.srqn, 3);
        assert!(entry.flags & COMPLETION_SRQ != 0 && peers.contains(&entry.qpn));
        let got = pair
            .b
            .contents(&into, u64::from(entry.index ^ NAME) * 4096, 3000);
        assert_eq!(got, data);
        slots.push(entry.index ^ NAME);
    }
    slots.sort();
    assert_eq!(slots, [0, 1, 2]);
    // The next leaves twelve, which is less than thirteen: once.
    for _ in 0..2 {
        pair.a
            .post_send(0x40, &SendWork::new(SendOpcode::Send, &[]).inline(b"x"));
        pair.exchange();
    }
    assert_eq!(pair.b.event_codes(EQ_ASYNC), [(EventCode::SrqLimit, 3)]);
    // A message in progress gives its entry back as flushed.
    let work = SendWork::new(SendOpcode::Send, &[from.sge(0, 3000)]);
    pair.a.post_send(0x41, &work);
    drain(&mut pair.b);
    let mut count = 0;
    pair.exchange_with(|way, frame| {
        count += u32::from(way == Way::AToB);
        if count > 1 {
            Vec::new()
        } else {
            vec![frame]
        }
    });
    assert_eq!(
        pair.b.set_state(0x51, QueuePairStateCode::Error),
        CommandStatus::Ok
    );
    let [entry] = pair.completions_b()[..] else {
        panic!("one completion");
    };
    assert_eq!(entry.status, CompletionStatus::Flushed.number());
    assert_eq!((entry.index ^ NAME, entry.qpn), (5, 0x51));
    assert_eq!(
        pair.b.event_codes(EQ_ASYNC),
        [(EventCode::LastWqeReached, 0x51)]
    );
    // So does one that is cut off by the end of its queue pair.
    for (n, name) in [(0, 6), (2, 7)] {
        pair.a.post_send(0x40 + n, &work);
        let mut count = 0;
        pair.exchange_with(|way, frame| {
            count += u32::from(way == Way::AToB);
            if count > 1 {
                Vec::new()
            } else {
                vec![frame]
            }
        });
        if n == 0 {
            pair.b.set_state(0x50, QueuePairStateCode::Reset);
        } else {
            pair.b.object_command(CommandOpcode::DestroyQueuePair, 0x52);
        }
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!(entry.status, CompletionStatus::Flushed.number());
        assert_eq!((entry.index ^ NAME, entry.qpn), (name, 0x50 + n));
    }
    for n in 0..2 {
        pair.b
            .object_command(CommandOpcode::DestroyQueuePair, 0x50 + n);
    }
    assert_eq!(
        pair.b.object_command(CommandOpcode::DestroySrq, 3),
        CommandStatus::Ok
    );
}

#[test]
fn an_empty_shared_queue_makes_the_sender_wait() {
    let mut pair = Pair::unconnected(Setup::default());
    pair.b.create_srq(0, 2, None);
    pair.b.create_qp(QpOptions {
        qpn: 0x50,
        pd: PD,
        flags: QP_FLAG_SRQ,
        ..QpOptions::default()
    });
    let (to_b, to_a) = (pair.b.as_peer(0x50), pair.a.as_peer(QPN_A));
    pair.a.connect(QPN_A, &to_b);
    pair.b.connect(0x50, &to_a);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    // Around the ring a few times.
    for n in 0..11u8 {
        pair.a
            .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]).inline(&[n]));
        pair.exchange();
        assert!(pair.completions_a().is_empty());
        assert_eq!(pair.b.engine.counters().rnr_naks_sent, u64::from(n) + 1);
        pair.b.post_srq(0, &[into.sge(0, 64)]);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!(entry.index, u32::from(n) ^ NAME);
        assert_eq!(pair.b.contents(&into, 0, 1), [n]);
    }
}

#[test]
fn a_datagram_is_as_long_as_the_port_takes() {
    for log_mtu in [8, 10, 12] {
        let mut pair = datagrams();
        let from = pair.a.register(Tag::new(6, 1).0, PD, ALL, 8192);
        let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 8192);
        let part = pair.b.as_peer(QPN_B).datagram(QKEY);
        pair.a.execute(&SetPort {
            log_mtu,
            port: 0,
            reserved: [0; 6],
        });
        let most = 1u32 << log_mtu;
        for (length, status) in [
            (most, CompletionStatus::Success),
            (most + 1, CompletionStatus::LocalLength),
        ] {
            pair.b.post_recv(QPN_B, &[into.sge(0, 8192)]);
            pair.a
                .post_send(QPN_A, &send(&from, length).datagram(&part));
            pair.run();
            assert_eq!(statuses(&pair.completions_a()), [status]);
            let received = usize::from(status == CompletionStatus::Success);
            assert_eq!(pair.completions_b().len(), received);
        }
    }
    let mut node = Node::new(1);
    for log_mtu in [0, 7, 13, 255] {
        let command = SetPort {
            log_mtu,
            port: 0,
            reserved: [0; 6],
        };
        assert_eq!(
            node.command(CommandOpcode::SetPort, &command),
            CommandStatus::BadParameter
        );
    }
}

/// A connection whose receiving side takes from shared queue 0, of four entries.
fn with_shared_queue() -> (Pair, Region) {
    let mut pair = Pair::unconnected(Setup::default());
    pair.b.create_srq(0, 2, None);
    pair.b.create_qp(QpOptions {
        qpn: 0x50,
        pd: PD,
        flags: QP_FLAG_SRQ,
        ..QpOptions::default()
    });
    let (to_b, to_a) = (pair.b.as_peer(0x50), pair.a.as_peer(QPN_A));
    pair.a.connect(QPN_A, &to_b);
    pair.b.connect(0x50, &to_a);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 1 << 20);
    (pair, into)
}

#[test]
fn a_shared_queue_is_resized_while_receives_wait_and_come_in() {
    let (mut pair, into) = with_shared_queue();
    let from = pair.a.register(Tag::new(6, 1).0, PD, ALL, 8192);
    let (mut posted, mut sent, mut waiting) = (0u32, 0u32, 0u32);
    for (round, log_entries) in [3, 5, 5, 2, 0, 6, 1, 4].into_iter().enumerate() {
        // Fill what there is, and take some of it; one message is under way at the resize.
        let entries = pair.b.srq_entries(0);
        while waiting < entries {
            let at = u64::from(posted % 64) * 8192;
            assert_eq!(pair.b.post_srq(0, &[into.sge(at, 8192)]), posted ^ NAME);
            posted += 1;
            waiting += 1;
        }
        let data = pattern(round as u64, 8000);
        pair.a.fill(&from, 0, &data);
        let room = 1u32 << log_entries;
        let messages = (waiting.saturating_sub(room)).max(1);
        for _ in 0..messages {
            pair.a.post_send(QPN_A, &send(&from, 8000));
        }
        // All but the last packet of the last message.
        let mut left = messages * 8 - 1;
        pair.exchange_with(|way, frame| {
            if way == Way::AToB {
                if left == 0 {
                    return Vec::new();
                }
                left -= 1;
            }
            vec![frame]
        });
        waiting -= messages;
        assert_eq!(pair.b.resize_srq(0, log_entries, |_| {}), CommandStatus::Ok);
        let state: SrqState = pair.b.query(CommandOpcode::QuerySrq, 0).unwrap();
        assert_eq!(state.available, waiting);
        pair.run();
        let completions = pair.completions_b();
        for entry in &completions {
            assert_eq!(entry.index, sent ^ NAME);
            let at = u64::from(sent % 64) * 8192;
            assert!(pair.b.contents(&into, at, 8000) == data);
            sent += 1;
        }
        assert_eq!(completions.len(), messages as usize);
        assert_eq!(pair.completions_a().len(), messages as usize);
    }
}

#[test]
fn what_a_shared_queue_does_not_use_is_zero() {
    let mut node = Node::new(1);
    let good = node.srq_template(4, 3);
    for command in [CreateSrq { xrcd: 1, ..good }, CreateSrq { cqn: 1, ..good }] {
        let status = node.command(CommandOpcode::CreateSrq, &command);
        assert_eq!(status, CommandStatus::BadParameter, "{command:?}");
    }
    node.create_srq(4, 3, None);
}

#[test]
fn a_shared_queue_and_its_record_lie_apart_and_aligned() {
    let mut node = Node::new(1);
    let good = node.srq_template(4, 3);
    type C = CreateSrq;
    let cases = [
        C {
            record_offset: good.record_offset - 64,
            ..good
        },
        C {
            ring_offset: 64,
            ..good
        },
        C {
            record_offset: 0,
            ..good
        },
        C {
            ring_offset: 32,
            record_offset: good.record_offset + 32,
            buffer: Buffer {
                fbo: 32,
                length: good.buffer.length + 32,
                ..good.buffer
            },
            ..good
        },
    ];
    for command in cases {
        let status = node.command(CommandOpcode::CreateSrq, &command);
        assert_eq!(status, CommandStatus::BadParameter, "{command:?}");
    }
    node.create_srq(4, 3, None);
    for change in [
        |command: &mut ResizeSrq| command.record_offset -= 64,
        |command: &mut ResizeSrq| command.ring_offset = command.record_offset,
    ] {
        let status = node.resize_srq(4, 3, change);
        assert_eq!(status, CommandStatus::BadParameter);
    }
    assert_eq!(node.resize_srq(4, 3, |_| {}), CommandStatus::Ok);
}

#[test]
fn a_shared_queue_is_not_resized_to_what_does_not_hold_its_entries() {
    let (mut pair, into) = with_shared_queue();
    for _ in 0..3 {
        pair.b.post_srq(0, &[into.sge(0, 64)]);
    }
    pair.b.execute(&ModifySrq { srqn: 0, limit: 3 });
    let bad = CommandStatus::BadParameter;
    for (name, log_entries, change, status) in [
        ("too small", 1, (|_| {}) as fn(&mut ResizeSrq), bad),
        ("too large", 2, |command| command.log_entries = 16, bad),
        ("ring", 2, |command| command.ring_offset = 256, bad),
        ("ring alignment", 3, |command| command.ring_offset = 32, bad),
        ("record", 2, |command| command.record_offset += 64, bad),
        (
            "record alignment",
            2,
            |command| command.record_offset -= 32,
            bad,
        ),
        ("producer", 2, |command| command.record_offset -= 64, bad),
        ("buffer", 2, |command| command.buffer.length = 0, bad),
        ("order", 2, |command| command.buffer.order = 9, bad),
        (
            "no memory",
            2,
            |command| command.buffer.root = 1 << 60,
            CommandStatus::HostMemory,
        ),
        (
            "number",
            2,
            |command| command.srqn = 9,
            CommandStatus::NotFound,
        ),
    ] {
        assert_eq!(pair.b.resize_srq(0, log_entries, change), status, "{name}");
    }
    // Nothing of all that has changed the queue.
    pair.b.post_srq(0, &[into.sge(0, 64)]);
    for n in 0..4u32 {
        pair.a
            .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]).inline(&[1]));
        pair.run();
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!(entry.index, n ^ NAME);
    }
}

fn unreliable() -> Pair {
    let mut pair = pair(Service::Uc, [QPN_A, QPN_B]);
    let (to_b, to_a) = (pair.b.as_peer(QPN_B), pair.a.as_peer(QPN_A));
    pair.a.connect_unreliable(QPN_A, &to_b);
    pair.b.connect_unreliable(QPN_B, &to_a);
    pair
}

#[test]
fn an_unreliable_connection_carries_sends_and_writes() {
    let mut pair = unreliable();
    let data = pattern(9, 300_000);
    let from = pair.a.register(Tag::new(5, 1).0, PD, 0, 300_000);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 300_000);
    pair.a.fill(&from, 0, &data);
    for length in [0u32, 1, 1024, 1025, 300_000] {
        pair.b.post_recv(QPN_B, &[into.sge(0, 300_000)]);
        let work = SendWork::new(SendOpcode::SendImmediate, &[from.sge(0, length)]).immediate(77);
        pair.a.post_send(QPN_A, &work);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!((entry.byte_count, entry.immediate), (length, 77));
        let got = pair.b.contents(&into, 0, length as usize);
        assert!(got == data[..length as usize]);
        pair.b.fill(&into, 0, &vec![0; 300_000]);
    }
    pair.b.post_recv(QPN_B, &[]);
    for opcode in [SendOpcode::Write, SendOpcode::WriteImmediate] {
        let work = SendWork::new(opcode, &[from.sge(0, 5000)])
            .remote(into.address + 100, into.tag)
            .immediate(5);
        pair.a.post_send(QPN_A, &work);
    }
    pair.run();
    assert!(pair.b.contents(&into, 100, 5000) == data[..5000]);
    let [entry] = pair.completions_b()[..] else {
        panic!("one completion");
    };
    assert_eq!(entry.opcode, CompletionOpcode::ReceiveWrite.number());
    assert_eq!(pair.completions_a().len(), 2);
    // What needs an answer is not for this service.
    let read = SendWork::new(SendOpcode::Read, &[from.sge(0, 8)]).remote(into.address, into.tag);
    pair.a.post_send(QPN_A, &read);
    pair.run();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::LocalQueuePairOperation]
    );
    assert_eq!(pair.a.qp_state(QPN_A), QueuePairStateCode::Sqe);
}

#[test]
fn a_broken_message_is_dropped_and_its_receive_used_for_the_next() {
    let mut pair = unreliable();
    let from = pair.a.register(Tag::new(5, 1).0, PD, 0, 8192);
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 8192);
    let data = pattern(2, 8192);
    pair.a.fill(&from, 0, &data);
    let index = pair.b.post_recv(QPN_B, &[into.sge(0, 4000)]);
    let send = |length| SendWork::new(SendOpcode::Send, &[from.sge(0, length)]);
    // Each packet of four is lost once; then one that is too long; then a write without a right.
    for lost in 0..4 {
        pair.a.post_send(QPN_A, &send(4000));
        let mut count = 0;
        pair.run_with(|_, frame| {
            count += 1;
            if count == lost + 1 {
                Vec::new()
            } else {
                vec![frame]
            }
        });
        assert!(pair.completions_b().is_empty(), "{lost}");
    }
    pair.a.post_send(QPN_A, &send(4001));
    let write =
        SendWork::new(SendOpcode::WriteImmediate, &[from.sge(0, 10)]).remote(into.address, 0x4400);
    pair.a.post_send(QPN_A, &write);
    pair.run();
    assert!(pair.completions_b().is_empty());
    pair.a.post_send(QPN_A, &send(4000));
    pair.run();
    let [entry] = pair.completions_b()[..] else {
        panic!("one completion");
    };
    assert_eq!((entry.status, entry.index), (0, index));
    assert!(pair.b.contents(&into, 0, 4000) == data[..4000]);
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 7]
    );
    assert_eq!(pair.b.qp_state(QPN_B), QueuePairStateCode::Rts);
}

/// An initiator at A and a target of domain 7 at B.
fn extended() -> Pair {
    let mut pair = pair(Service::XrcIni, [QPN_A, QPN_A]);
    pair.b.create_qp(QpOptions {
        qpn: QPN_B,
        pd: 0,
        // It has none.
        cqn: 0x77,
        service: Service::XrcTgt,
        xrcd: 7,
        ..QpOptions::default()
    });
    let (to_b, to_a) = (pair.b.as_peer(QPN_B), pair.a.as_peer(QPN_A));
    pair.a.connect(QPN_A, &to_b);
    pair.b.connect(QPN_B, &to_a);
    pair
}

#[test]
fn an_extended_connection_reaches_every_shared_queue_of_its_domain() {
    let mut pair = extended();
    pair.b.create_cq(2, EQ_FIRST_HANDLER, 6);
    pair.b.create_srq(4, 4, Some((7, 1)));
    pair.b.create_srq(5, 4, Some((7, 2)));
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 16384);
    let from = pair.a.register(Tag::new(5, 1).0, PD, ALL, 16384);
    let data = pattern(4, 3000);
    pair.a.fill(&from, 0, &data);
    let remote = |offset: u64| RemotePart {
        address: into.address + offset,
        rkey: into.tag,
        ..RemotePart::zeroed()
    };
    for (srqn, cqn) in [(4, 1), (5, 2)] {
        pair.b.post_srq(srqn, &[into.sge(0, 4000)]);
        pair.b.post_srq(srqn, &[]);
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::Send, &[from.sge(0, 3000)]).srqn(srqn),
        );
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::WriteImmediate, &[from.sge(0, 3000)])
                .part(&remote(8192))
                .srqn(srqn),
        );
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::Read, &[from.sge(4096, 3000)])
                .part(&remote(8192))
                .srqn(srqn),
        );
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::FetchAdd, &[from.sge(8192, 8)])
                .part(&AtomicPart {
                    address: into.address,
                    rkey: into.tag,
                    reserved: 0,
                    operand: 1,
                    compare: 0,
                })
                .srqn(srqn),
        );
        let mut opcodes = Vec::new();
        pair.run_with(|_, frame| {
            opcodes.push(frame[42]);
            vec![frame]
        });
        assert!(
            opcodes.iter().all(|opcode| opcode >> 5 == 5),
            "{opcodes:x?}"
        );
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::Success; 4]
        );
        for n in 0..2 {
            let entry = pair.b.poll_cq(cqn).expect("a completion");
            assert_eq!(
                (entry.qpn, entry.srqn, entry.index),
                (QPN_B, srqn, NAME ^ n)
            );
            assert!(entry.flags & COMPLETION_SRQ != 0);
        }
        assert!(pair.b.poll_cq(3 - cqn).is_none());
        assert!(pair.b.contents(&into, 8, 2992) == data[8..3000]);
        assert!(pair.a.contents(&from, 4096, 3000) == data);
    }
    assert_eq!(
        pair.b
            .object_command(CommandOpcode::DestroyCompletionQueue, 2),
        CommandStatus::Busy
    );
    // A queue of another domain, an ordinary one, one that is not there.
    pair.b.create_srq(6, 4, Some((8, 1)));
    pair.b.create_srq(7, 4, None);
    for srqn in [6, 7, 8] {
        let mut other = extended();
        other.b.create_srq(6, 4, Some((8, 1)));
        other.b.create_srq(7, 4, None);
        other
            .a
            .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]).srqn(srqn));
        other.run();
        assert_eq!(
            statuses(&other.completions_a()),
            [CompletionStatus::RemoteInvalidRequest]
        );
        assert_eq!(other.b.qp_state(QPN_B), QueuePairStateCode::Error);
    }
}

#[test]
fn extended_connections_survive_loss() {
    let mut pair = extended();
    pair.b.create_srq(4, 6, Some((7, 1)));
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 65536);
    let from = pair.a.register(Tag::new(5, 1).0, PD, ALL, 65536);
    let data = pattern(4, 60_000);
    pair.a.fill(&from, 0, &data);
    for _ in 0..8 {
        pair.b.post_srq(4, &[into.sge(0, 65536)]);
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::Send, &[from.sge(0, 60_000)]).srqn(4),
        );
    }
    let mut count = 0u32;
    pair.run_with(|_, frame| {
        count += 1;
        if count % 37 == 0 {
            Vec::new()
        } else {
            vec![frame]
        }
    });
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 8]
    );
    assert_eq!(pair.completions_b().len(), 8);
    assert!(pair.b.contents(&into, 0, 60_000) == data);
}

/// Puts the address of a node into a VLAN.
fn set_vlan(node: &mut Node, vlan: u16) {
    node.execute(&SetGid {
        gid: node.gid,
        index: 0,
        vlan,
        mac: node.mac,
        port: 0,
        reserved: [0; 5],
    });
}

/// The same frame with another VLAN tag or none. The tag is not covered by the checksum.
fn retag(frame: &[u8], tag: Option<u16>) -> Vec<u8> {
    let rest = match frame[12..14] {
        [0x81, 0x00] => &frame[16..],
        _ => &frame[12..],
    };
    let tag = tag.map_or(Vec::new(), |tag| [[0x81, 0x00], tag.to_be_bytes()].concat());
    [&frame[..12], &tag, rest].concat()
}

#[test]
fn frames_of_another_vlan_are_for_somebody_else() {
    // Own VLAN, tag of the frame, whether it is for this address.
    let cases = [
        (VLAN_NONE, None, true),
        (VLAN_NONE, Some(0x0000), true),
        (VLAN_NONE, Some(0xe000), true),
        (VLAN_NONE, Some(5), false),
        (5, Some(5), true),
        (5, Some(0xa005), true),
        (5, None, false),
        (5, Some(0x2000), false),
        (5, Some(6), false),
    ];
    let services = [Service::Rc, Service::Uc, Service::Ud];
    for service in services {
        for (own, tag, taken) in cases {
            let mut pair = match service {
                Service::Ud => datagrams(),
                Service::Uc => unreliable(),
                _ => Pair::new(Setup::default()),
            };
            set_vlan(&mut pair.a, own);
            set_vlan(&mut pair.b, own);
            let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
            pair.b.post_recv(QPN_B, &[into.sge(0, 100)]);
            let mut work = SendWork::new(SendOpcode::Send, &[]).inline(b"x");
            if service == Service::Ud {
                work = work.datagram(&pair.b.as_peer(QPN_B).datagram(QKEY));
            }
            pair.a.post_send(QPN_A, &work);
            pair.exchange_with(|_, frame| vec![retag(&frame, tag)]);
            let received = pair.completions_b().len();
            assert_eq!(received, usize::from(taken), "{service:?} {own:x} {tag:x?}");
            assert_eq!(pair.passed.is_empty(), taken);
        }
    }
}

#[test]
fn a_connection_is_in_one_vlan_though_its_address_is_in_several() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    for node in [&mut pair.a, &mut pair.b] {
        set_vlan(node, VLAN_NONE);
        node.execute(&SetGid {
            gid: node.gid,
            index: 1,
            vlan: 5,
            mac: node.mac,
            port: 0,
            reserved: [0; 5],
        });
    }
    let (to_b, to_a) = (pair.peer_of_a(setup), pair.peer_of_b(setup));
    pair.a.connect(QPN_A, &to_b);
    pair.b.connect(QPN_B, &to_a);
    pair.b.post_recv(QPN_B, &[]);
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[]));
    pair.exchange_with(|_, frame| vec![retag(&frame, Some(5))]);
    assert_eq!(pair.completions_b(), []);
    assert_eq!(pair.b.engine.counters().rx_dropped, 1);
    pair.run();
    assert_eq!(pair.completions_b().len(), 1);
}

#[test]
fn a_group_is_not_reached_from_a_vlan_without_an_address() {
    let mut pair = datagrams();
    let group = gid_of_ipv4([239, 1, 2, 3]);
    let member = MulticastMember {
        gid: group,
        qpn: QPN_B,
        reserved: 0,
    };
    assert_eq!(
        pair.b.command(CommandOpcode::AttachMulticast, &member),
        CommandStatus::Ok
    );
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let mut part = pair.b.as_peer(0xff_ffff).datagram(QKEY);
    part.address_vector.gid = group;
    part.address_vector.mac = [0x01, 0x00, 0x5e, 1, 2, 3];
    let work = SendWork::new(SendOpcode::Send, &[]).inline(b"x");
    for (tag, taken) in [(Some(5), 0), (None, 1), (Some(0x6000), 1)] {
        pair.b.post_recv(QPN_B, &[into.sge(0, 100)]);
        pair.a.post_send(QPN_A, &work.clone().datagram(&part));
        pair.exchange_with(|_, frame| vec![retag(&frame, tag)]);
        assert_eq!(pair.completions_b().len(), taken, "{tag:x?}");
    }
}

#[test]
fn a_process_sends_from_no_address_that_is_not_in_the_table() {
    let mut pair = datagrams();
    for index in [1, 127, 128, u16::MAX] {
        let mut part = pair.b.as_peer(QPN_B).datagram(QKEY);
        part.address_vector.source_gid_index = index;
        let work = SendWork::new(SendOpcode::Send, &[]).inline(b"x");
        pair.a.post_send(QPN_A, &work.datagram(&part));
        pair.a.settle();
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::LocalQueuePairOperation]
        );
        assert!(pair.a.host.sent.is_empty());
        let state = QueuePairStateCode::Rts;
        assert_eq!(pair.a.set_state(QPN_A, state), CommandStatus::Ok);
    }
}

#[test]
fn the_vlan_of_a_datagram_is_that_of_its_source() {
    let mut pair = datagrams();
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    let peer = pair.b.as_peer(QPN_B);
    for (own, wanted, tag) in [
        (VLAN_NONE, VLAN_NONE, VLAN_NONE),
        (VLAN_NONE, 0x2007, VLAN_NONE),
        (5, VLAN_NONE, 5),
        (5, 0x6007, 0x6005),
    ] {
        set_vlan(&mut pair.a, own);
        set_vlan(&mut pair.b, own);
        let mut part = peer.datagram(QKEY);
        part.address_vector.vlan = wanted;
        pair.b.post_recv(QPN_B, &[into.sge(0, 100)]);
        let work = SendWork::new(SendOpcode::Send, &[]).inline(b"x");
        pair.a.post_send(QPN_A, &work.datagram(&part));
        pair.run();
        let [entry] = pair.completions_b()[..] else {
            panic!("one completion");
        };
        assert_eq!(entry.vlan, tag);
        pair.completions_a();
    }
}

#[test]
fn an_ipv6_datagram_delivers_its_whole_header() {
    let mut pair = datagrams();
    let gid = |n| [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n];
    for (node, n) in [(&mut pair.a, 1), (&mut pair.b, 2)] {
        node.gid = gid(n);
        node.set_address();
    }
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 4096);
    pair.b
        .post_recv(QPN_B, &[into.sge(0, 20), into.sge(500, 100)]);
    let work = SendWork::new(SendOpcode::Send, &[]).inline(b"six");
    let part = pair.b.as_peer(QPN_B).datagram(QKEY);
    pair.a.post_send(QPN_A, &work.datagram(&part));
    pair.run();
    let [entry] = pair.completions_b()[..] else {
        panic!("one completion");
    };
    assert!(entry.flags & (COMPLETION_IPV6 | COMPLETION_GRH) == COMPLETION_IPV6 | COMPLETION_GRH);
    let head = pair.b.contents(&into, 0, 20);
    assert_eq!((head[0] >> 4, head[6]), (6, 17));
    assert_eq!(head[8..20], gid(1)[..12]);
    let rest = pair.b.contents(&into, 500, 23);
    assert_eq!(rest[..4], gid(1)[12..]);
    assert_eq!(rest[4..20], gid(2));
    assert_eq!(&rest[20..], b"six");
}

#[test]
fn an_extended_shared_queue_destroyed_in_mid_message_takes_the_connection_with_it() {
    let mut pair = extended();
    pair.b.create_srq(4, 4, Some((7, 1)));
    let into = pair.b.register(Tag::new(5, 1).0, PD, ALL, 16384);
    let from = pair.a.register(Tag::new(5, 1).0, PD, ALL, 16384);
    pair.b.post_srq(4, &[into.sge(0, 4000)]);
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Send, &[from.sge(0, 3000)]).srqn(4),
    );
    let mut held = Vec::new();
    pair.exchange_with(|way, frame| {
        held.push(frame.clone());
        if way == Way::AToB && held.len() == 1 {
            vec![frame]
        } else {
            Vec::new()
        }
    });
    // Another of the same number, of another owner.
    let destroyed = pair.b.object_command(CommandOpcode::DestroySrq, 4);
    assert_eq!(destroyed, CommandStatus::Ok);
    pair.b.create_srq(4, 4, Some((7, 1)));
    pair.run();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::RemoteOperation]
    );
    assert!(pair.completions_b().is_empty());
    assert_eq!(pair.b.qp_state(QPN_B), QueuePairStateCode::Error);
}
