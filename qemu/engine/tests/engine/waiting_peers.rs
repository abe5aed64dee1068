// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Requests of peers that name a tag whose command is not carried out yet. The peer is told nothing:
//! the request waits, those behind it do too, and nothing is done twice or out of order. So a peer that
//! takes no RNR NAK loses nothing.

use crate::pending::{allocation, post, post_all, spoiled, Bench, FLAGS, HOLD, OTHER, RIGHTS, TAG};
use crate::wire::*;
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::roce::Frame;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use std::collections::VecDeque;
use CompletionStatus::{RemoteAccess, RetryExceeded, Success};

const MILLISECOND: u64 = 1_000_000;
/// Frames that wait for a queue pair at most, and that are looked at again in one poll.
const MAX_PARKED: usize = 64;
const PARKED_BUDGET: usize = 256;

/// Ways of a peer to use a region.
const USES: [&str; 6] = [
    "write",
    "read",
    "fetch and add",
    "atomic write",
    "write with immediate",
    "send",
];

fn fetch_add(bench: &Bench, region: &Region) -> SendWork {
    SendWork::new(SendOpcode::FetchAdd, &[bench.near.sge(4096, 8)]).part(&AtomicPart {
        address: region.address,
        rkey: region.tag,
        reserved: 0,
        operand: 1,
        compare: 0,
    })
}

/// A work request of `a` that uses `region` of `b` so, with the receive that it needs.
fn peer_use(bench: &mut Bench, what: &str, region: &Region) -> SendWork {
    let remote = |work: SendWork| work.remote(region.address, region.tag);
    let near = bench.near.sge(0, 3000);
    match what {
        "write" => remote(SendWork::new(SendOpcode::Write, &[near])),
        "read" => remote(SendWork::new(
            SendOpcode::Read,
            &[bench.near.sge(4096, 3000)],
        )),
        "fetch and add" => fetch_add(bench, region),
        "atomic write" => remote(SendWork::new(
            SendOpcode::AtomicWrite,
            &[bench.near.sge(0, 8)],
        )),
        "write with immediate" => {
            bench.pair.b.post_recv(QPN_B, &[]);
            remote(SendWork::new(SendOpcode::WriteImmediate, &[near]))
        }
        _ => {
            bench.pair.b.post_recv(QPN_B, &[region.sge(0, 3000)]);
            SendWork::new(SendOpcode::Send, &[near])
        }
    }
}

/// A region of `b` whose registration is posted and held up.
fn pending_region(bench: &mut Bench) -> Region {
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 8192);
    post(&mut bench.pair.b, &command);
    region
}

/// Connects `a` anew, as this says.
fn peer_with(bench: &mut Bench, setup: Setup) {
    let status = bench.pair.a.set_state(QPN_A, State::Reset);
    assert_eq!(status, CommandStatus::Ok);
    let peer = bench.pair.peer_of_a(setup);
    bench.pair.a.connect(QPN_A, &peer);
}

fn rnr_naks(node: &Node) -> u64 {
    node.engine.counters().rnr_naks_sent
}

#[test]
fn a_peer_that_takes_no_rnr_loses_neither_its_connection_nor_time() {
    for what in USES {
        for hold_control in [false, true] {
            let mut bench = Bench::new();
            if hold_control {
                bench.pair.b.hold_control(HOLD);
            }
            let region = pending_region(&mut bench);
            let work = peer_use(&mut bench, what, &region);
            let start = bench.pair.a.now;
            post_all(&mut bench.pair.a, vec![work]);
            let mut done = Vec::new();
            while done.is_empty() {
                bench.pair.exchange();
                done = statuses(&bench.pair.completions_a());
                assert!(!done.is_empty() || bench.pair.pass_time(), "{what}");
            }
            assert_eq!(done, [Success], "{what} {hold_control}");
            let took = bench.pair.a.now - start;
            let expected = if hold_control { 0 } else { 20 * MILLISECOND };
            // And what is left of its own timer, had it sent again meanwhile.
            assert!((expected..30 * MILLISECOND).contains(&took), "{what}");
            assert_eq!(rnr_naks(&bench.pair.b), 0, "{what}");
            assert_eq!(bench.pair.b.engine.counters().naks_sent, 0, "{what}");
            assert_eq!(bench.waits(), (0, 1), "{what}");
        }
    }
}

#[test]
fn nothing_overtakes_a_request_that_waits_and_answers_do() {
    let mut bench = Bench::new();
    let region = pending_region(&mut bench);
    let (near, far) = (bench.near.clone(), bench.far.clone());
    bench.pair.a.fill(&near, 0, &pattern(1, 3000));
    bench.pair.b.fill(&far, 0, &[0; 64]);
    let first = peer_use(&mut bench, "write", &region);
    let to_far = |work: SendWork| work.remote(far.address, far.tag);
    let write = to_far(SendWork::new(SendOpcode::Write, &[near.sge(0, 8)]));
    // Not of what is written behind it: a read may see that.
    let read = SendWork::new(SendOpcode::Read, &[near.sge(5000, 8)]);
    let read = read.remote(region.address + 8, region.tag);
    bench.pair.b.post_recv(QPN_B, &[far.sge(16, 8)]);
    let send = SendWork::new(SendOpcode::Send, &[near.sge(8, 8)]);
    let add = fetch_add(&bench, &far);
    post_all(&mut bench.pair.a, vec![first, write, read, send, add]);
    // The other way, too: what this side asked for is answered on the same connection.
    let back = SendWork::new(SendOpcode::Read, &[far.sge(4096, 64)]).remote(near.address, near.tag);
    bench.pair.b.post_send(QPN_B, &back.flags(SEND_SIGNALED));
    bench.pair.exchange();
    assert!(bench.pair.completions_a().is_empty());
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    assert_eq!(bench.pair.b.contents(&far, 4096, 64), pattern(1, 64));
    assert_eq!(bench.pair.b.contents(&far, 0, 64), [0; 64]);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 5]);
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    assert_eq!(bench.pair.b.contents(&region, 0, 3000), pattern(1, 3000));
    assert_eq!(bench.pair.a.contents(&near, 5000, 8), pattern(1, 16)[8..]);
    assert_eq!(bench.pair.b.contents(&far, 16, 8), pattern(1, 16)[8..]);
    let eight = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let sum = eight(&bench.pair.b.contents(&far, 0, 8));
    assert_eq!(
        sum,
        eight(&pattern(1, 8)) + 1,
        "written, then added to, once"
    );
    assert_eq!(rnr_naks(&bench.pair.b), 0);
}

#[test]
fn what_is_sent_again_meanwhile_is_kept_once_and_done_once() {
    let mut bench = Bench::new();
    let region = pending_region(&mut bench);
    bench.pair.b.fill(&region, 0, &[0; 8]);
    let (first, near) = (bench.far.clone(), bench.near.clone());
    let before =
        SendWork::new(SendOpcode::Read, &[near.sge(0, 8)]).remote(first.address, first.tag);
    let adds = (0..3).map(|_| fetch_add(&bench, &region));
    let work = std::iter::once(before).chain(adds).collect();
    post_all(&mut bench.pair.a, work);
    // All is sent again and again, and copied by the network; what was answered before is answered
    // again.
    let mut frames = VecDeque::new();
    bench.pair.exchange_with(|way, frame| {
        if way == Way::AToB {
            frames.push_back(frame.clone());
        }
        vec![frame.clone(), frame]
    });
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(frames.len(), 4);
    let before = bench.pair.b.engine.counters().clone();
    for _ in 0..100 {
        for frame in frames.iter().rev().chain(&frames) {
            bench.pair.b.receive(frame);
        }
    }
    let counters = bench.pair.b.engine.counters();
    assert_eq!(counters.duplicate_requests - before.duplicate_requests, 200);
    assert_eq!(counters.out_of_sequence, 0);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 3]);
    let sum = bench.pair.b.contents(&region, 0, 8);
    assert_eq!(sum, 3u64.to_le_bytes());
    assert_eq!(bench.waits(), (0, 1));
    assert_eq!(rnr_naks(&bench.pair.b), 0);
}

#[test]
fn what_was_lost_meanwhile_is_put_in_its_place() {
    for lost in 1..4 {
        let mut bench = Bench::new();
        let region = pending_region(&mut bench);
        bench.pair.a.fill(&bench.near, 0, &pattern(7, 3000));
        let first = peer_use(&mut bench, "write", &region);
        let add = fetch_add(&bench, &bench.far);
        bench.pair.b.fill(&bench.far, 0, &[0; 8]);
        post_all(&mut bench.pair.a, vec![first, add]);
        let mut frames = 0;
        bench.pair.run_with(|way, frame| {
            frames += usize::from(way == Way::AToB);
            match (way, frames) {
                (Way::AToB, n) if n == lost + 1 => Vec::new(),
                _ => vec![frame],
            }
        });
        assert_eq!(statuses(&bench.pair.completions_a()), [Success; 2]);
        assert_eq!(bench.pair.b.contents(&region, 0, 3000), pattern(7, 3000));
        let sum = bench.pair.b.contents(&bench.far, 0, 8);
        assert_eq!(sum, 1u64.to_le_bytes());
        assert_eq!(rnr_naks(&bench.pair.b), 0);
        // The peer sent again by its timer: nobody had to tell it.
        assert_eq!(bench.pair.b.engine.counters().naks_sent, 0, "{lost}");
    }
}

#[test]
fn more_than_there_is_room_for_is_lost_and_asked_for_at_once() {
    let mut bench = Bench::new();
    // 67 ms.
    let timeout = 14;
    peer_with(
        &mut bench,
        Setup {
            timeout,
            ..Setup::default()
        },
    );
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 100 << 10);
    let from = bench.pair.a.region(0x301, PD, RIGHTS, 100 << 10);
    bench.pair.a.hold_tags(0.0);
    bench.pair.a.execute(&from.0);
    let data = pattern(3, 100 << 10);
    bench.pair.a.fill(&from.1, 0, &data);
    post(&mut bench.pair.b, &command);
    let work = SendWork::new(SendOpcode::Write, &[from.1.sge(0, 100 << 10)]);
    let start = bench.pair.a.now;
    post_all(
        &mut bench.pair.a,
        vec![work.remote(region.address, region.tag)],
    );
    bench.pair.exchange();
    let lost = bench.pair.b.engine.counters().rx_dropped;
    assert_eq!(lost as usize, 100 - MAX_PARKED);
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(bench.pair.pass_time());
        bench.pair.exchange();
        done = statuses(&bench.pair.completions_a());
    }
    assert_eq!(done, [Success]);
    assert_eq!(bench.pair.b.contents(&region, 0, 100 << 10), data);
    assert_eq!(rnr_naks(&bench.pair.b), 0);
    // Not by the peer's timer.
    let took = bench.pair.a.now - start;
    assert!(took < 30 * MILLISECOND, "{took}");
    assert_eq!(bench.pair.b.engine.counters().naks_sent, 1);
}

#[test]
fn a_request_that_finds_no_room_to_wait_is_asked_for_when_its_tag_is_there() {
    const QPS: u32 = 32;
    const BYTES: u32 = (MAX_PARKED as u32) << 10;
    let mut bench = Bench::new();
    let timeout = 14;
    peer_with(
        &mut bench,
        Setup {
            timeout,
            ..Setup::default()
        },
    );
    let peers: Vec<u32> = (0..QPS).map(|n| 0x400 + n).collect();
    for &qpn in &peers {
        for node in [&mut bench.pair.a, &mut bench.pair.b] {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                cqn: 2,
                ..QpOptions::default()
            });
        }
        let (a, b) = (bench.pair.a.as_peer(qpn), bench.pair.b.as_peer(qpn));
        bench.pair.a.connect(qpn, &b);
        bench.pair.b.connect(qpn, &a);
    }
    bench.pair.a.hold_tags(0.0);
    let from = bench.pair.a.register(0x301, PD, RIGHTS, BYTES.into());
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, BYTES.into());
    post(&mut bench.pair.b, &command);
    let write = |length| {
        let work = SendWork::new(SendOpcode::Write, &[from.sge(0, length)]);
        work.remote(region.address, region.tag)
    };
    for &qpn in &peers {
        bench.pair.a.post_send(qpn, &write(BYTES));
    }
    bench.pair.exchange();
    assert_eq!(bench.pair.b.engine.counters().rx_dropped, 0);
    let start = bench.pair.a.now;
    post_all(&mut bench.pair.a, vec![write(8), write(8), write(8)]);
    let mut done = Vec::new();
    while done.len() < 3 {
        bench.pair.exchange();
        done.extend(statuses(&bench.pair.completions_a()));
        assert!(done.len() == 3 || bench.pair.pass_time());
    }
    assert_eq!(done, [Success; 3]);
    let took = bench.pair.a.now - start;
    assert!(took < 30 * MILLISECOND, "{took}");
    let counters = bench.pair.b.engine.counters();
    assert_eq!((counters.naks_sent, counters.rnr_naks_sent), (1, 0));
}

#[test]
fn the_next_requests_find_room_whatever_came_before_them() {
    let mut bench = Bench::new();
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 100 << 10);
    bench.pair.a.hold_tags(0.0);
    let from = bench.pair.a.register(0x301, PD, RIGHTS, 100 << 10);
    let data = pattern(5, 100 << 10);
    bench.pair.a.fill(&from, 0, &data);
    post(&mut bench.pair.b, &command);
    let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 100 << 10)]);
    let work = work.remote(region.address, region.tag);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.a.settle();
    let frames = std::mem::take(&mut bench.pair.a.host.sent);
    assert_eq!(frames.len(), 100);
    let node = &mut bench.pair.b;
    node.receive(&frames[0]);
    for frame in frames.iter().skip(1).rev() {
        node.receive(frame);
    }
    assert_eq!(node.engine.counters().rx_dropped as usize, 100 - MAX_PARKED);
    node.now += 21 * MILLISECOND;
    node.settle();
    assert!(node.contents(&region, 0, 64 << 10) == data[..64 << 10]);
    let now = node.now;
    bench.pair.set_now(now);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(bench.pair.b.contents(&region, 0, 100 << 10), data);
    assert_eq!(bench.pair.b.engine.counters().naks_sent, 1);
}

#[test]
fn a_request_longer_than_the_mtu_is_not_kept_and_refused_in_its_turn() {
    let mut bench = Bench::new();
    // The peer believes in another MTU.
    let log_mtu = 12;
    peer_with(
        &mut bench,
        Setup {
            log_mtu,
            ..Setup::default()
        },
    );
    let region = pending_region(&mut bench);
    let write = |length| {
        let work = SendWork::new(SendOpcode::Write, &[bench.near.sge(0, length)]);
        work.remote(region.address, region.tag)
    };
    let work = vec![write(8), write(4096)];
    post_all(&mut bench.pair.a, work);
    bench.pair.exchange();
    assert_eq!(bench.pair.b.engine.counters().rx_dropped, 1);
    bench.pair.run();
    let expected = [Success, CompletionStatus::RemoteInvalidRequest];
    assert_eq!(statuses(&bench.pair.completions_a()), expected);
    // One that it was lost, and one that it cannot be done.
    assert_eq!(bench.pair.b.engine.counters().naks_sent, 2);
}

#[test]
fn a_queue_pair_that_ends_takes_the_requests_that_wait_with_it() {
    for end in ["error", "reset", "destroy", "device"] {
        let mut bench = Bench::new();
        let region = pending_region(&mut bench);
        bench.pair.b.fill(&region, 0, &[0; 64]);
        let work = peer_use(&mut bench, "write", &region);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        let node = &mut bench.pair.b;
        assert_eq!(node.engine.counters().pending_waits, 1);
        match end {
            "error" => assert_eq!(node.set_state(QPN_B, State::Error), CommandStatus::Ok),
            "reset" | "destroy" => {
                assert_eq!(node.set_state(QPN_B, State::Reset), CommandStatus::Ok);
                if end == "destroy" {
                    let status = node.object_command(CommandOpcode::DestroyQueuePair, QPN_B);
                    assert_eq!(status, CommandStatus::Ok);
                    node.create_qp(QpOptions {
                        qpn: QPN_B,
                        pd: PD,
                        flags: FLAGS,
                        ..QpOptions::default()
                    });
                }
                // The same numbers, the same sequence: whoever has the old request could take it.
                let peer = bench.pair.peer_of_b(Setup::default());
                bench.pair.b.connect(QPN_B, &peer);
            }
            _ => {
                node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
                assert_eq!(node.engine.next_timeout(), None);
            }
        }
        // Nothing of what the peer sends again gets through.
        bench.pair.run_with(|way, frame| match way {
            Way::AToB => Vec::new(),
            Way::BToA => vec![frame],
        });
        assert_eq!(bench.pair.b.contents(&region, 0, 64), [0; 64], "{end}");
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [RetryExceeded],
            "{end}"
        );
        assert!(bench.pair.completions_b().is_empty());
    }
}

#[test]
fn a_device_that_fails_looks_at_no_request_that_waits() {
    let mut bench = Bench::new();
    let region = pending_region(&mut bench);
    bench.pair.b.fill(&region, 0, &[0; 16]);
    bench.pair.a.fill(&bench.near, 0, &[7; 8]);
    let from = bench.near.sge(0, 8);
    let write =
        |at, tag| SendWork::new(SendOpcode::Write, &[from]).remote(region.address + at, tag);
    let no_tag = Tag::new(0x999, 1).0;
    let work = vec![write(0, region.tag), write(0, no_tag)];
    post_all(&mut bench.pair.a, work);
    bench.pair.exchange();
    bench.pair.a.post_send(OTHER, &write(8, region.tag));
    bench.pair.exchange();
    assert_eq!(bench.waits(), (0, 2));
    // That there is no such tag is not said before a look at the record, where a wrong index is.
    let node = &mut bench.pair.b;
    let record = node.control_record();
    let producer: u32 = node.host.memory.get(record);
    node.host
        .memory
        .put(record, &producer.wrapping_add(u32::MAX / 2));
    node.now += 21 * MILLISECOND;
    node.settle();
    let fatal = node.status().fatal();
    assert_eq!(fatal, Some(FatalCode::BadCommandIndex));
    assert_eq!(node.contents(&region, 0, 8), [7; 8], "before that");
    assert_eq!(node.contents(&region, 8, 8), [0; 8], "and afterwards");
}

#[test]
fn a_request_that_waits_is_looked_at_with_the_rights_that_hold_then() {
    let mut bench = Bench::new();
    let region = pending_region(&mut bench);
    let work = peer_use(&mut bench, "write", &region);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.exchange();
    bench.pair.b.execute(&ModifyQueuePair {
        qpn: QPN_B,
        mask: MODIFY_ACCESS,
        access: ACCESS_REMOTE_READ,
        ..ModifyQueuePair::zeroed()
    });
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [RemoteAccess]);
}

#[test]
fn frames_that_waited_are_looked_at_a_bounded_number_in_a_poll_and_in_order() {
    const QPS: u32 = 12;
    let mut bench = Bench::new();
    for node in [&mut bench.pair.a, &mut bench.pair.b] {
        node.create_cq(9, EQ_FIRST_HANDLER, 11);
    }
    let peers: Vec<u32> = (0..QPS).map(|n| 0x400 + n).collect();
    for &qpn in &peers {
        for node in [&mut bench.pair.a, &mut bench.pair.b] {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                cqn: 9,
                service: Service::Uc,
                log_blocks: 7,
                log_entries: 7,
                ..QpOptions::default()
            });
        }
        let (a, b) = (bench.pair.a.as_peer(qpn), bench.pair.b.as_peer(qpn));
        bench.pair.a.connect_unreliable(qpn, &b);
        bench.pair.b.connect_unreliable(qpn, &a);
    }
    let region = pending_region(&mut bench);
    for &qpn in &peers {
        for n in 0..=MAX_PARKED as u32 {
            bench.pair.b.post_recv(qpn, &[region.sge(0, 64)]);
            let work = SendWork::new(SendOpcode::SendImmediate, &[bench.near.sge(0, 8)]);
            bench.pair.a.post_send(qpn, &work.immediate(n));
        }
    }
    bench.pair.a.settle();
    let mut frames = std::mem::take(&mut bench.pair.a.host.sent);
    // One of each stays behind.
    let mut last = Vec::new();
    let mut left = vec![MAX_PARKED; QPS as usize];
    frames.retain(|frame| {
        let parsed = Frame::parse(frame).unwrap();
        let left = &mut left[(parsed.destination_qpn() - 0x400) as usize];
        if *left == 0 {
            last.push(frame.clone());
            return false;
        }
        *left -= 1;
        true
    });
    let node = &mut bench.pair.b;
    for frame in &frames {
        node.receive(frame);
    }
    assert_eq!(node.engine.counters().rx_dropped, 0);
    node.now += 21 * MILLISECOND;
    let mut received = Vec::new();
    let mut polls = 0;
    loop {
        node.engine.poll(node.now, &mut node.host);
        polls += 1;
        let before = received.len();
        while let Some(entry) = node.poll_cq(9) {
            assert_eq!(entry.status, Success.number());
            received.push((entry.qpn, entry.immediate));
        }
        let now = received.len() - before;
        assert!(now <= PARKED_BUDGET, "{now} in one poll");
        // What comes while others still wait does not overtake them.
        for frame in last.drain(..) {
            node.receive(&frame);
        }
        if node.engine.next_timeout().is_none_or(|at| at > node.now) {
            break;
        }
    }
    assert!(polls >= frames.len() / PARKED_BUDGET);
    for &qpn in &peers {
        let of_qp = received.iter().filter(|(other, _)| *other == qpn);
        let order: Vec<_> = of_qp.map(|(_, immediate)| *immediate).collect();
        assert!(order.is_sorted(), "{order:?}");
        assert!(order.len() >= MAX_PARKED, "{}", order.len());
    }
}

#[test]
fn a_request_for_a_tag_that_cannot_be_made_is_refused_behind_those_before_it() {
    let mut bench = Bench::new();
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 8192);
    post(&mut bench.pair.b, &spoiled(command));
    let near = bench.near.sge(0, 8);
    let good = SendWork::new(SendOpcode::Write, &[near]).remote(bench.far.address, bench.far.tag);
    let bad = SendWork::new(SendOpcode::Write, &[near]).remote(region.address, region.tag);
    post_all(&mut bench.pair.a, vec![good.clone(), bad, good]);
    bench.pair.run();
    let done = statuses(&bench.pair.completions_a());
    assert_eq!(done[..2], [Success, RemoteAccess]);
    assert_eq!(done[2], CompletionStatus::Flushed);
}

/// Registrations, requests that use them before they are done, and a bad wire, in any order: all is
/// done once, in order, and nobody is told that a receiver is not ready.
#[test]
fn no_order_of_commands_and_requests_on_a_bad_wire_costs_a_peer_anything() {
    let (mut waits, mut early) = (0, 0);
    for seed in 1..=24u64 {
        let mut random = Random(seed);
        let mut bench = Bench::new();
        let faults = Faults {
            drop: seed % 4 * 3,
            duplicate: seed % 5 * 5,
            corrupt: 0,
            delay: seed % 3 * 5,
        };
        let mut wire = BadWire::new(seed, faults);
        bench.pair.b.fill(&bench.far, 0, &[0; 8]);
        // Each write is a number to a place of its own, and each is followed by one that is added.
        let (mut posted, mut done, mut index) = (0u64, 0, 0x400u32);
        let mut regions: Vec<Region> = vec![bench.far.clone()];
        let mut expected: Vec<(Region, u64, u64)> = Vec::new();
        for step in 0..120u64 {
            match random.next() % 6 {
                0 | 1 => {
                    index += 1;
                    let tag = Tag::new(index, 1).0;
                    let (command, region) = bench.pair.b.region(tag, PD, RIGHTS, 4096);
                    match random.next() % 3 {
                        // The record alone tells of it, for now.
                        0 => {
                            bench.pair.b.hold_control((random.next() % 4) as f64);
                            post(&mut bench.pair.b, &command);
                        }
                        1 => {
                            bench.pair.b.hold_control(0.0);
                            bench.pair.b.hold_tags((random.next() % 3) as f64);
                            post(&mut bench.pair.b, &command);
                        }
                        _ => {
                            post(&mut bench.pair.b, &command);
                        }
                    }
                    regions.push(region);
                }
                2..5 if posted - done < 12 => {
                    let region = regions.last().unwrap().clone();
                    let at = 64 + step * 16;
                    bench.pair.a.fill(&bench.near, at, &step.to_le_bytes());
                    let write = SendWork::new(SendOpcode::Write, &[bench.near.sge(at, 8)])
                        .remote(region.address + at, region.tag);
                    let add = fetch_add(&bench, &bench.far);
                    post_all(&mut bench.pair.a, vec![write, add]);
                    expected.push((region, at, step));
                    posted += 2;
                }
                _ => {
                    if random.chance(50) {
                        let now = bench.pair.a.now + random.next() % MILLISECOND;
                        bench.pair.set_now(now);
                    }
                    bench.pair.exchange_with(|way, frame| wire.fate(way, frame));
                }
            }
            bench.pair.b.answers();
            for status in statuses(&bench.pair.completions_a()) {
                assert_eq!(status, Success, "seed {seed}");
                done += 1;
            }
        }
        bench.pair.run_with(|way, frame| wire.fate(way, frame));
        let last = statuses(&bench.pair.completions_a());
        assert_eq!(last, vec![Success; (posted - done) as usize], "seed {seed}");
        for (region, at, step) in expected {
            let found = bench.pair.b.contents(&region, at, 8);
            assert_eq!(found, step.to_le_bytes(), "seed {seed}");
        }
        let sum = bench.pair.b.contents(&bench.far, 0, 8);
        assert_eq!(sum, (posted / 2).to_le_bytes(), "seed {seed}");
        assert_eq!(rnr_naks(&bench.pair.b), 0, "seed {seed}");
        let (_, waited) = bench.waits();
        waits += waited;
        early += u64::from(waited != 0);
    }
    assert!(waits > 100 && early > 12, "{waits} {early}");
}

#[test]
fn a_receive_and_an_invalidation_of_a_pending_tag_cost_a_peer_nothing() {
    let mut bench = Bench::new();
    post(&mut bench.pair.b, &allocation(0x52, TagKind::Region));
    let part = FastRegisterPart {
        tag: Tag::new(0x52, 3).0,
        access: ALL,
        address: 0x9000,
        buffer: Buffer::contiguous(bench.far.pages[0], 4096),
        reserved: 0,
    };
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    let register = register.flags(SEND_SIGNALED);
    bench.pair.b.post_send(QPN_B, &register);
    let region = pending_region(&mut bench);
    bench.pair.b.post_recv(QPN_B, &[region.sge(0, 8)]);
    let send = SendWork::new(SendOpcode::SendInvalidate, &[bench.near.sge(0, 8)]);
    post_all(&mut bench.pair.a, vec![send.invalidate(part.tag)]);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(statuses(&bench.pair.completions_b()), [Success; 2]);
    assert_eq!(rnr_naks(&bench.pair.b), 0);
}
