// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What each queue pair counts, and how counters of several are asked for at once (chapter 3).

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use ferrite_engine::{Engine, QpCounters, FEATURES};
use CommandStatus::{BadNumber, BadParameter, NotFound, Unsupported};

/// Of a second connection beside that of [`Pair`].
const OTHER_A: u32 = 0x13;
const OTHER_B: u32 = 0x24;

fn asked(qpns: &[u32]) -> QueryQueuePairCounters {
    let mut command = QueryQueuePairCounters {
        count: qpns.len() as u32,
        ..QueryQueuePairCounters::zeroed()
    };
    for (to, qpn) in command.qpns.iter_mut().zip(qpns) {
        *to = *qpn;
    }
    command
}

/// The counters of queue pairs, added up.
fn counters(node: &mut Node, qpns: &[u32]) -> [u64; COUNTER_NAMES.len()] {
    node.execute(&asked(qpns));
    let reply = node.reply();
    std::array::from_fn(|at| node.host.memory.get(reply + 8 * at as u64))
}

fn counter(node: &mut Node, qpn: u32, name: &str) -> u64 {
    let at = COUNTER_NAMES.iter().position(|other| *other == name);
    counters(node, &[qpn])[at.expect("such a counter")]
}

/// The device's own, as far as queue pairs have the like.
fn of_device(node: &Node) -> [u64; COUNTER_NAMES.len()] {
    let mut counters = node.engine.counters().named();
    for (at, counter) in counters.iter_mut().enumerate() {
        if QpCounters::COUNTED & (1 << at) == 0 {
            *counter = 0;
        }
    }
    counters
}

/// Sends messages of 100 bytes from A to B.
fn send_some(pair: &mut Pair, (a, b): (u32, u32), messages: u32) {
    let (from, into) = (0x101 + (a << 8), 0x201 + (b << 8));
    let from = pair.a.register(from, PD, ALL, 4096);
    let into = pair.b.register(into, PD, ALL, 4096);
    for _ in 0..messages {
        pair.b.post_recv(b, &[into.sge(0, 4096)]);
        pair.a.post_send(a, &send(&from, 100));
    }
    pair.run();
}

/// A pair with a second connection.
fn two_connections() -> Pair {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    for (node, qpn) in [(&mut pair.a, OTHER_A), (&mut pair.b, OTHER_B)] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            ..QpOptions::default()
        });
    }
    let (to_a, to_b) = (pair.a.as_peer(OTHER_A), pair.b.as_peer(OTHER_B));
    pair.a.connect(OTHER_A, &to_b);
    pair.b.connect(OTHER_B, &to_a);
    pair
}

#[test]
fn each_queue_pair_counts_its_own_and_a_query_adds_up_those_it_names() {
    let mut pair = two_connections();
    send_some(&mut pair, (QPN_A, QPN_B), 3);
    assert_eq!(counter(&mut pair.a, QPN_A, "tx_packets"), 3);
    assert_eq!(counter(&mut pair.a, QPN_A, "completions"), 3);
    assert_eq!(counter(&mut pair.b, QPN_B, "rx_packets"), 3);
    assert_eq!(counter(&mut pair.b, QPN_B, "completions"), 3);
    let bytes = counter(&mut pair.a, QPN_A, "tx_bytes");
    assert!(bytes > 300);
    assert_eq!(counter(&mut pair.b, QPN_B, "rx_bytes"), bytes);
    // Nothing of it is the other's.
    assert_eq!(counters(&mut pair.a, &[OTHER_A]), [0; COUNTER_NAMES.len()]);
    assert_eq!(counters(&mut pair.b, &[OTHER_B]), [0; COUNTER_NAMES.len()]);

    send_some(&mut pair, (OTHER_A, OTHER_B), 5);
    let (one, other) = (
        counters(&mut pair.a, &[QPN_A]),
        counters(&mut pair.a, &[OTHER_A]),
    );
    assert_eq!(counter(&mut pair.a, OTHER_A, "tx_packets"), 5);
    let sum: Vec<_> = one
        .iter()
        .zip(other)
        .map(|(one, other)| one + other)
        .collect();
    assert_eq!(counters(&mut pair.a, &[QPN_A, OTHER_A])[..], sum);
    assert_eq!(counters(&mut pair.a, &[OTHER_A, QPN_A])[..], sum);
    // All that there are come to what the device has.
    assert_eq!(of_device(&pair.a)[..], sum);
    // One that is named twice counts twice; as many as there is room for are taken.
    let full = counters(&mut pair.a, &[QPN_A; COUNTED_QUEUE_PAIRS]);
    assert_eq!(full, one.map(|one| one * COUNTED_QUEUE_PAIRS as u64));
}

#[test]
fn what_goes_wrong_is_counted_where_it_does() {
    let mut pair = two_connections();
    let a = pair.a.register(0x101, PD, ALL, 64 << 10);
    let b = pair.b.register(0x201, PD, ALL, 64 << 10);
    // Packets that are lost, come twice, and meet no receive: on one of two connections.
    let mut n = 0;
    for _ in 0..6 {
        let write = SendWork::new(SendOpcode::Write, &[a.sge(0, 8192)]).remote(b.address, b.tag);
        pair.a.post_send(QPN_A, &write);
        pair.run_with(|way, frame| {
            n += u32::from(way == Way::AToB);
            match (way, n % 5) {
                (Way::AToB, 3) => vec![],
                (Way::AToB, 4) => vec![frame.clone(), frame],
                _ => vec![frame],
            }
        });
    }
    pair.a.post_send(QPN_A, &send(&a, 100));
    pair.exchange();
    pair.b.post_recv(QPN_B, &[b.sge(0, 4096)]);
    pair.run();
    // And an access that is refused.
    let beyond = SendWork::new(SendOpcode::Write, &[a.sge(0, 64)]).remote(b.address, 0x999);
    pair.a.post_send(QPN_A, &beyond);
    pair.run();
    for (node, qpn, names) in [
        (
            &mut pair.a,
            QPN_A,
            &["retransmissions", "rnr_naks_received", "naks_received"][..],
        ),
        (
            &mut pair.b,
            QPN_B,
            &[
                "duplicate_requests",
                "out_of_sequence",
                "rnr_naks_sent",
                "naks_sent",
                "access_errors",
            ],
        ),
    ] {
        for name in names {
            assert!(counter(node, qpn, name) > 0, "{name}");
        }
        // Only this queue pair did anything.
        assert_eq!(counters(node, &[qpn]), of_device(node));
    }
    for (node, qpn) in [(&mut pair.a, OTHER_A), (&mut pair.b, OTHER_B)] {
        assert_eq!(counters(node, &[qpn]), [0; COUNTER_NAMES.len()]);
    }
}

#[test]
fn a_peer_that_says_nothing_and_memory_that_is_not_the_senders_are_counted() {
    let mut pair = two_connections();
    let a = pair.a.register(0x101, PD, ALL, 4096);
    pair.a.post_send(QPN_A, &send(&a, 100));
    pair.run_with(|_, _| vec![]);
    assert!(counter(&mut pair.a, QPN_A, "ack_timeouts") > 0);
    let foreign = pair.a.register(0x202, PD + 1, ALL, 4096);
    pair.a.post_send(OTHER_A, &send(&foreign, 100));
    pair.run();
    assert_eq!(counter(&mut pair.a, OTHER_A, "access_errors"), 1);
    assert_eq!(counter(&mut pair.a, OTHER_A, "tx_packets"), 0);
    let both = counters(&mut pair.a, &[QPN_A, OTHER_A]);
    assert_eq!(both, of_device(&pair.a));
}

#[test]
fn queue_pairs_without_acknowledgements_count_too() {
    for service in [Service::Uc, Service::Ud] {
        let mut pair = Pair::unacknowledged(service, 0);
        let from = pair.a.register(0x101, PD, ALL, 4096);
        let into = pair.b.register(0x201, PD, ALL, 4096);
        pair.send_three(service, &from, &into);
        pair.run();
        assert_eq!(counter(&mut pair.a, QPN_A, "tx_packets"), 3);
        assert_eq!(counter(&mut pair.b, QPN_B, "rx_packets"), 3);
        for (node, qpn) in [(&mut pair.a, QPN_A), (&mut pair.b, QPN_B)] {
            assert_eq!(counter(node, qpn, "completions"), 3);
            assert_eq!(counters(node, &[qpn]), of_device(node));
        }
    }
}

#[test]
fn a_frame_that_is_spoilt_is_the_devices_and_no_queue_pairs() {
    let mut pair = two_connections();
    let a = pair.a.register(0x101, PD, ALL, 4096);
    pair.b.post_recv(QPN_B, &[]);
    pair.a.post_send(QPN_A, &send(&a, 0));
    let mut spoilt = false;
    pair.run_with(|way, mut frame| {
        if way == Way::AToB && !std::mem::replace(&mut spoilt, true) {
            let last = frame.len() - 1;
            frame[last] ^= 1;
        }
        vec![frame]
    });
    let all = pair.b.engine.counters().clone();
    assert_eq!(all.rx_icrc_errors, 1);
    assert_eq!(
        counter(&mut pair.b, QPN_B, "rx_packets"),
        all.rx_packets - 1
    );
}

#[test]
fn counters_go_on_over_a_reset_of_the_queue_pair_and_begin_anew_with_another() {
    let mut pair = two_connections();
    send_some(&mut pair, (QPN_A, QPN_B), 2);
    let before = counters(&mut pair.a, &[QPN_A]);
    pair.a.set_state(QPN_A, QueuePairStateCode::Reset);
    assert_eq!(counters(&mut pair.a, &[QPN_A]), before);
    assert_eq!(
        pair.a
            .object_command(CommandOpcode::DestroyQueuePair, QPN_A),
        CommandStatus::Ok
    );
    assert_eq!(
        pair.a
            .command(CommandOpcode::QueryQueuePairCounters, &asked(&[QPN_A])),
        NotFound
    );
    pair.a.create_qp(QpOptions {
        qpn: QPN_A,
        ..QpOptions::default()
    });
    assert_eq!(counters(&mut pair.a, &[QPN_A]), [0; COUNTER_NAMES.len()]);
}

#[test]
fn a_query_names_queue_pairs_that_are_there_and_nothing_else() {
    let mut pair = two_connections();
    let opcode = CommandOpcode::QueryQueuePairCounters;
    let caps: DeviceCaps = pair.a.query(CommandOpcode::QueryDevice, 0).unwrap();
    assert_eq!(caps.qp_counters, QpCounters::COUNTED);
    let mut longer = asked(&[QPN_A]);
    longer.qpns[COUNTED_QUEUE_PAIRS - 1] = QPN_A;
    let mut reserved = asked(&[QPN_A]);
    reserved.reserved = 1;
    let mut too_many = asked(&[QPN_A; COUNTED_QUEUE_PAIRS]);
    too_many.count += 1;
    let wild = QueryQueuePairCounters {
        count: u32::MAX,
        ..asked(&[])
    };
    for (command, status) in [
        (asked(&[]), BadParameter),
        (longer, BadParameter),
        (reserved, BadParameter),
        (too_many, BadParameter),
        (wild, BadParameter),
        (asked(&[QPN_A, 0x77]), NotFound),
        (asked(&[QPN_A, 0]), BadNumber),
        (asked(&[QPN_A, caps.qp_first + caps.qp_count]), BadNumber),
    ] {
        assert_eq!(pair.a.command(opcode, &command), status, "{command:?}");
    }
    let mut node = Node::with_features(1, FEATURES & !FEATURE_QP_COUNTERS);
    node.create_qp(QpOptions::default());
    assert_eq!(node.command(opcode, &asked(&[2])), Unsupported);
}

#[test]
fn a_device_that_does_not_offer_them_tells_of_none() {
    let mut node = Node::power_on(1);
    let mut config = node.engine.config().clone();
    config.features &= !FEATURE_QP_COUNTERS;
    node.engine = Engine::new(config);
    node.boot();
    let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    // DEV-3-178.
    assert_eq!(
        (caps.features & FEATURE_QP_COUNTERS, caps.qp_counters),
        (0, 0)
    );
    assert_eq!(
        node.command(CommandOpcode::QueryQueuePairCounters, &asked(&[QPN_A])),
        Unsupported
    );
}
