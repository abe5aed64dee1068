// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Payload that one engine lends another of the same process: who may read it and for how long, and that
//! the protocol is the same.

use crate::paging::{run_by, Paged};
use crate::pending::{post, FLAGS, HOLD};
use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Access, Inside, Node, Region, SendWork};
use ferrite_engine::{Lending, Loan, FEATURES};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;

const LENGTH: u64 = 300_000;

fn exchange(pair: &mut Pair, mut fate: impl FnMut(Way, &Inside) -> usize) {
    loop {
        pair.poll();
        let mut moved = false;
        for way in [Way::AToB, Way::BToA] {
            let (from, to) = match way {
                Way::AToB => (&mut pair.a, &mut pair.b),
                Way::BToA => (&mut pair.b, &mut pair.a),
            };
            for inside in std::mem::take(&mut from.host.inside) {
                moved = true;
                for _ in 0..fate(way, &inside) {
                    to.receive_inside(&inside);
                }
            }
        }
        if !moved {
            return;
        }
    }
}

pub(crate) fn run(pair: &mut Pair, mut fate: impl FnMut(Way, &Inside) -> usize) {
    for _ in 0..10_000 {
        exchange(pair, &mut fate);
        if !pair.pass_time() {
            return;
        }
    }
    panic!("no end in sight");
}

/// A connected pair in one process, whose ends have heard of each other, and a region each.
pub(crate) fn inside(setup: Setup) -> (Pair, Region, Region) {
    inside_of(Pair::new(setup))
}

/// The same of this pair.
fn inside_of(mut pair: Pair) -> (Pair, Region, Region) {
    let a = pair.a.register(0x101, PD, ALL, LENGTH);
    let b = pair.b.register(0x201, PD, ALL, LENGTH);
    pair.a.host.lends = Some(Lending::INSIDE);
    pair.b.host.lends = Some(Lending::INSIDE);
    pair.a.post_send(QPN_A, &write(&a, &b, 8));
    pair.b.post_send(QPN_B, &write(&b, &a, 8));
    run(&mut pair, |_, inside| {
        assert!(inside.loan.is_none(), "the peer was not heard of");
        1
    });
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    (pair, a, b)
}

/// Has what is lent copied at once, as between two processes.
fn pass(pair: &mut Pair) {
    for node in [&mut pair.a, &mut pair.b] {
        node.host.lends = Some(Lending {
            at_once: 64 << 10,
            under_way: 512 << 10,
        });
        node.host.passing = true;
    }
}

fn write(from: &Region, to: &Region, length: u32) -> SendWork {
    SendWork::new(SendOpcode::Write, &[from.sge(0, length)])
        .remote(to.address, to.tag)
        .flags(SEND_SIGNALED)
}

fn read(into: &Region, from: &Region, length: u32) -> SendWork {
    SendWork::new(SendOpcode::Read, &[into.sge(0, length)])
        .remote(from.address, from.tag)
        .flags(SEND_SIGNALED)
}

/// Posts what lends, and takes what was lent first.
pub(crate) fn lent(pair: &mut Pair, a: &Region, b: &Region) -> Arc<Loan> {
    pair.a.post_send(QPN_A, &write(a, b, 20_000));
    pair.poll();
    let loan = pair.a.host.inside[0].loan.clone().expect("a loan");
    assert!(loan.hold().is_some());
    loan
}

#[test]
fn packets_go_together_and_are_counted_each() {
    for log_mtu in [8, 10, 12] {
        let setup = Setup {
            log_mtu,
            ..Setup::default()
        };
        let (mut pair, a, b) = inside(setup);
        let data = pattern(log_mtu.into(), 250_000);
        pair.a.fill(&a, 0, &data);
        let before = [
            pair.a.engine.counters().clone(),
            pair.b.engine.counters().clone(),
        ];
        pair.a.post_send(QPN_A, &write(&a, &b, 250_000));
        let (mut parcels, mut most) = (0, 0);
        run(&mut pair, |_, inside| {
            parcels += usize::from(inside.loan.is_some());
            most = most.max(inside.loan.as_ref().map_or(0, |loan| loan.len()));
            1
        });
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        assert_eq!(pair.b.contents(&b, 0, 250_000), data);
        // As far as so many packets may leave at once.
        assert_eq!(most, (64 << log_mtu).min(256 << 10).min(250_000));
        assert_eq!(parcels, 250_000usize.div_ceil(most));
        let packets = 250_000u64.div_ceil(1 << log_mtu);
        let after = [pair.a.engine.counters(), pair.b.engine.counters()];
        assert_eq!(after[0].tx_packets - before[0].tx_packets, packets);
        assert_eq!(after[1].rx_packets - before[1].rx_packets, packets);
        assert_eq!(after[0].retransmissions, 0);
    }
}

#[test]
fn what_is_sent_again_and_comes_twice_or_too_early_is_counted_by_packets() {
    // More than is under way by itself: the rest is lent again.
    const LONG: u32 = 256 << 10;
    let setup = Setup {
        log_mtu: 8,
        ..Setup::default()
    };
    let (mut pair, a, b) = inside(setup);
    let before = pair.a.engine.counters().tx_packets;
    pair.a.post_send(QPN_A, &write(&a, &b, LONG));
    let mut number = 0;
    let mut early = 0;
    run(&mut pair, |way, inside| {
        let Some(loan) = inside.loan.as_ref().filter(|_| way == Way::AToB) else {
            return 1;
        };
        number += 1;
        match number {
            1 => 0,
            // Until it is known that one is missing.
            2..=16 => {
                early += loan.len() as u64 / 256;
                1
            }
            _ => 1,
        }
    });
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    let (a_counts, b_counts) = (pair.a.engine.counters(), pair.b.engine.counters());
    let sent = a_counts.tx_packets - before;
    assert!(number > 16, "some were lent again");
    assert_eq!(a_counts.retransmissions, sent - u64::from(LONG) / 256);
    assert_eq!(b_counts.out_of_sequence, early);
    assert_eq!(b_counts.duplicate_requests, 0);
    lent(&mut pair, &a, &b);
    run(&mut pair, |way, _| 1 + usize::from(way == Way::AToB));
    assert_eq!(pair.b.engine.counters().duplicate_requests, 79);
    // Nor does anything go uncounted.
    lent(&mut pair, &a, &b);
    let mut inside = pair.a.host.inside.pop_front().expect("packets");
    let dropped = pair.b.engine.counters().rx_dropped;
    let whole = std::mem::replace(&mut inside.frame, vec![0; 20]);
    pair.b.receive_inside(&inside);
    assert_eq!(pair.b.engine.counters().rx_dropped, dropped + 1);
    inside.frame = whole;
    pair.b.engine.inject_fatal(&mut pair.b.host);
    pair.b.receive_inside(&inside);
    assert_eq!(pair.b.engine.counters().rx_dropped, dropped + 2);
}

#[test]
fn what_is_lost_or_comes_twice_is_made_good() {
    for seed in 1..60 {
        let mut random = Random(seed);
        let setup = Setup {
            log_mtu: 8 + (seed % 5) as u8,
            ..Setup::default()
        };
        let (mut pair, a, b) = inside(setup);
        if seed % 2 == 0 {
            pass(&mut pair);
        }
        let length = 1 + (random.next() % (LENGTH - 1)) as u32;
        let data = pattern(seed, length as usize);
        let mut kept_back = 0;
        for kind in 0..3 {
            let (work, from_a) = match kind {
                0 => (write(&a, &b, length), true),
                1 => {
                    pair.b.post_recv(QPN_B, &[b.sge(0, length)]);
                    (send(&a, length).flags(SEND_SIGNALED), true)
                }
                _ => (read(&a, &b, length), false),
            };
            let zeroes = vec![0; length as usize];
            let (of_a, of_b) = if from_a {
                (&data, &zeroes)
            } else {
                (&zeroes, &data)
            };
            pair.a.fill(&a, 0, of_a);
            pair.b.fill(&b, 0, of_b);
            pair.a.post_send(QPN_A, &work);
            // Nothing is lost for ever: there are so many tries.
            let mut losses = 5;
            run(&mut pair, |_, _| match random.next() % 10 {
                0 if losses > 0 => {
                    losses -= 1;
                    kept_back += 1;
                    0
                }
                1 => 2,
                _ => 1,
            });
            let ended = statuses(&pair.completions_a());
            assert_eq!(ended, [CompletionStatus::Success], "{seed}, {kind}");
            assert_eq!(
                pair.a.contents(&a, 0, length as usize),
                data,
                "{seed}, {kind}"
            );
            assert_eq!(
                pair.b.contents(&b, 0, length as usize),
                data,
                "{seed}, {kind}"
            );
            pair.completions_b();
        }
    }
}

#[test]
fn a_loan_of_many_pieces_has_no_room_for_more() {
    let (mut pair, a, b) = inside(Setup::default());
    let costs: Vec<_> = (5..8)
        .map(|pieces| {
            let sges = vec![a.sge(0, 1000); pieces];
            let work = SendWork::new(SendOpcode::Write, &sges).remote(b.address, b.tag);
            pair.a.post_send(QPN_A, &work);
            pair.poll();
            let inside = pair.a.host.inside.pop_front().expect("packets");
            inside.loan.expect("a loan").cost()
        })
        .collect();
    assert!(costs.is_sorted_by(|less, more| less < more), "{costs:?}");
}

#[test]
fn a_loan_is_over_when_its_work_request_is_complete() {
    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    run(&mut pair, |_, _| 1);
    assert!(loan.hold().is_none());
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    // It is the memory of somebody else by now, whatever comes late or twice.
    let dropped = pair.b.engine.counters().rx_dropped;
    let late = Inside {
        frame: {
            lent(&mut pair, &a, &b);
            pair.a.host.inside[0].frame.clone()
        },
        loan: Some(loan),
    };
    pair.a.host.inside.clear();
    // Each time what was expected has come, and is lost.
    for times in 1..=2 {
        pair.b.receive_inside(&late);
        pair.poll();
        let counters = pair.b.engine.counters();
        assert_eq!(counters.rx_dropped, dropped + times);
        assert_eq!(counters.naks_sent, times);
    }
    // The peer asks for it again, and gets it.
    run(&mut pair, |_, _| 1);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
}

#[test]
fn a_loan_is_over_with_the_queue_pair_the_tag_and_the_engine() {
    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    pair.a.set_state(QPN_A, QueuePairStateCode::Error);
    assert!(loan.hold().is_none());

    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    let status = pair.a.object_command(CommandOpcode::ReleaseTag, a.tag);
    assert_eq!(status, CommandStatus::Ok);
    assert!(loan.hold().is_none());

    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    pair.a.host.over_by_interrupt = Some(Arc::clone(&loan));
    pair.a.host.raised.clear();
    pair.a.engine.inject_fatal(&mut pair.a.host);
    assert!(loan.hold().is_none());
    assert!(!pair.a.host.raised.is_empty());

    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    pair.a.engine.reset();
    assert!(loan.hold().is_none());
}

#[test]
fn whatever_ends_a_loan_waits_for_who_copies_from_it() {
    type End = fn(&mut Pair, &Region);
    let ends: [End; 5] = [
        |pair, _| {
            pair.a.set_state(QPN_A, QueuePairStateCode::Error);
        },
        |pair, a| {
            pair.a.object_command(CommandOpcode::ReleaseTag, a.tag);
        },
        |pair, _| pair.a.engine.inject_fatal(&mut pair.a.host),
        |pair, _| pair.a.engine.reset(),
        |pair, _| run(pair, |_, _| 1),
    ];
    for end in ends {
        let (mut pair, a, b) = inside(Setup::default());
        let loan = lent(&mut pair, &a, &b);
        let (holds, copied) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let held = loan.hold().expect("a loan");
                holds.store(true, Ordering::SeqCst);
                // Until somebody waits for its end.
                while loan.hold().is_some() {
                    thread::yield_now();
                }
                let bytes = held.data().bytes().expect("what is lent");
                assert_eq!(bytes.len(), 20_000);
                copied.store(true, Ordering::SeqCst);
            });
            while !holds.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            end(&mut pair, &a);
            assert!(copied.load(Ordering::SeqCst));
        });
    }
}

#[test]
fn a_loan_is_over_with_the_first_message_to_memory_that_is_for_one() {
    let (mut pair, _, b) = inside(Setup::default());
    let once = pair.a.register(0x301, PD, ALL | ACCESS_ONE_TOUCH, LENGTH);
    let loan = lent(&mut pair, &once, &b);
    pair.b.post_send(QPN_B, &write(&b, &once, 8));
    pair.poll();
    let touches = pair.b.host.inside.pop_back().expect("a write");
    pair.a.receive_inside(&touches);
    assert!(loan.hold().is_none());
}

#[test]
fn a_loan_is_over_when_the_peer_invalidates_the_tag() {
    let (mut pair, _, b) = inside(Setup::default());
    let allocate = AllocateTag {
        tag: Tag::new(0x30, 0).0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    };
    pair.a.execute(&allocate);
    let part = FastRegisterPart {
        tag: Tag::new(0x30, 1).0,
        access: ALL,
        address: 0,
        buffer: Buffer::contiguous(pair.a.allocate(4096), 4096),
        reserved: 0,
    };
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    pair.a.post_send(QPN_A, &register);
    let sge = Sge {
        address: 0,
        length: 3000,
        lkey: part.tag,
    };
    let work = SendWork::new(SendOpcode::Write, &[sge]).remote(b.address, b.tag);
    pair.a.post_send(QPN_A, &work);
    pair.poll();
    let loan = pair.a.host.inside[0].loan.clone().expect("a loan");
    assert!(loan.hold().is_some());
    pair.a.post_recv(QPN_A, &[]);
    let send = SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(part.tag);
    pair.b.post_send(QPN_B, &send);
    pair.poll();
    let invalidates = pair.b.host.inside.pop_back().expect("a send");
    pair.a.receive_inside(&invalidates);
    assert!(loan.hold().is_none());
}

#[test]
fn the_answer_to_a_read_is_lent_as_long_as_the_connection_and_the_tag() {
    for end in 0..2 {
        let (mut pair, a, b) = inside(Setup::default());
        pair.a.post_send(QPN_A, &read(&a, &b, 20_000));
        pair.poll();
        let request = pair.a.host.inside.pop_front().expect("a request");
        pair.b.receive_inside(&request);
        pair.poll();
        let loan = pair.b.host.inside[0].loan.clone().expect("a loan");
        assert!(loan.hold().is_some());
        if end == 0 {
            pair.b.set_state(QPN_B, QueuePairStateCode::Reset);
        } else {
            pair.b.object_command(CommandOpcode::ReleaseTag, b.tag);
        }
        assert!(loan.hold().is_none());
        // That is a lost answer, which is asked for again in vain.
        run(&mut pair, |_, _| 1);
        let ended = statuses(&pair.completions_a());
        assert_eq!(ended, [CompletionStatus::RetryExceeded]);
        assert_eq!(pair.a.contents(&a, 0, 20_000), vec![0; 20_000]);
    }
}

/// Hands what `a` asks for to `b`.
fn ask(pair: &mut Pair) {
    pair.poll();
    for request in std::mem::take(&mut pair.a.host.inside) {
        pair.b.receive_inside(&request);
    }
    pair.poll();
}

/// Whether each packet that `b` has sent and `a` has not taken lends its payload.
fn lends_each(pair: &Pair) -> Vec<bool> {
    let inside = pair.b.host.inside.iter();
    inside.map(|inside| inside.loan.is_some()).collect()
}

#[test]
fn a_short_answer_behind_one_that_is_lent_is_lent_and_so_read_later() {
    let (mut pair, a, b) = inside(Setup::default());
    pair.a.post_send(QPN_A, &read(&a, &b, 20_000));
    pair.a.post_send(QPN_A, &read(&a, &b, 8));
    pair.a.post_send(QPN_A, &read(&a, &b, 0));
    ask(&mut pair);
    // Of nothing there is nothing to be read, early or late.
    assert_eq!(lends_each(&pair), [true, true, false]);
    run(&mut pair, |_, _| 1);
    let ended = statuses(&pair.completions_a());
    assert_eq!(ended, [CompletionStatus::Success; 3]);
    // By itself a copy takes less.
    pair.a.post_send(QPN_A, &read(&a, &b, 8));
    ask(&mut pair);
    assert_eq!(lends_each(&pair), [false]);
}

/// A window to all of a region, bound by `b`.
fn window(pair: &mut Pair, region: &Region) -> u32 {
    let tag = |instance| Tag::new(0x50, instance).0;
    pair.b.execute(&AllocateTag {
        tag: tag(1),
        pd: PD,
        kind: TagKind::Window1.number(),
        reserved: [0; 3],
        max_pages: 0,
    });
    let part = BindPart {
        window: tag(1),
        new_window: tag(2),
        region: region.tag,
        access: ACCESS_REMOTE_READ,
        address: region.address,
        length: 4096,
        reserved: [0; 2],
    };
    let bind = SendWork::new(SendOpcode::Bind, &[]).part(&part);
    pair.b.post_send(QPN_B, &bind);
    pair.b.settle();
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    tag(2)
}

#[test]
fn an_answer_that_cannot_be_lent_waits_until_what_is_lent_before_it_was_read() {
    for kind in 0..2 {
        let mut pair = Pair::new(Setup::default());
        let bindable = pair.b.register(0x401, PD, ALL | ACCESS_WINDOW_BIND, 4096);
        let (mut pair, a, b) = inside_of(pair);
        let (address, tag) = if kind == 0 {
            let paged = Paged::new(&mut pair.b, 0x301, 4096);
            paged.bring_in(&pair.b, 0, false);
            (paged.address, paged.tag)
        } else {
            (bindable.address, window(&mut pair, &bindable))
        };
        let version = SendWork::new(SendOpcode::Read, &[a.sge(0, 8)])
            .remote(address, tag)
            .flags(SEND_SIGNALED);
        pair.a.post_send(QPN_A, &read(&a, &b, 20_000));
        pair.a.post_send(QPN_A, &version);
        pair.a.post_send(QPN_A, &read(&a, &b, 8));
        ask(&mut pair);
        assert_eq!(lends_each(&pair), [true], "{kind}");
        // It looks again, and ever later.
        let mut looks = Vec::new();
        while looks.len() < 5 {
            let at = pair.b.engine.next_timeout_but_looks().expect("a look");
            looks.push(at - pair.b.now);
            pair.b.now = at;
            pair.b.settle();
            assert_eq!(lends_each(&pair), [true], "{kind}");
        }
        assert_eq!(looks, [50, 100, 200, 400, 800].map(|us| us * 1000));
        // The peer reads it, and says nothing.
        let lent = pair.b.host.inside.pop_front().expect("a loan");
        pair.a.receive_inside(&lent);
        drop(lent);
        pair.b.settle();
        assert_eq!(lends_each(&pair), [false; 0], "nobody has looked");
        pair.b.now += 1_600_000;
        pair.b.settle();
        assert_eq!(lends_each(&pair), [false, false], "{kind}");
        assert_eq!(pair.b.engine.next_timeout_but_looks(), None);
        pair.a.now = pair.b.now;
        run(&mut pair, |_, _| 1);
        let ended = statuses(&pair.completions_a());
        assert_eq!(ended, [CompletionStatus::Success; 3], "{kind}");
        assert_eq!(pair.a.engine.counters().retransmissions, 0);
    }
}

#[test]
fn what_is_asked_for_again_waits_until_what_was_lent_for_it_was_read() {
    let (mut pair, a, b) = inside(Setup::default());
    pair.a.post_send(QPN_A, &read(&a, &b, 20_000));
    ask(&mut pair);
    let late = std::mem::take(&mut pair.b.host.inside);
    while pair.a.host.inside.is_empty() {
        assert!(pair.pass_time());
        pair.a.settle();
    }
    ask(&mut pair);
    assert_eq!(lends_each(&pair), [false; 0]);
    drop(late);
    run(&mut pair, |_, _| 1);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
}

#[test]
fn a_queue_pair_that_goes_waits_for_nothing_it_has_lent() {
    let (mut pair, a, b) = inside(Setup::default());
    let paged = Paged::new(&mut pair.b, 0x301, 4096);
    paged.bring_in(&pair.b, 0, false);
    pair.a.post_send(QPN_A, &read(&a, &b, 20_000));
    let work = SendWork::new(SendOpcode::Read, &[a.sge(0, 8)]).remote(paged.address, paged.tag);
    pair.a.post_send(QPN_A, &work);
    ask(&mut pair);
    assert!(pair.b.engine.next_timeout_but_looks().is_some());
    pair.b.set_state(QPN_B, QueuePairStateCode::Reset);
    pair.b.settle();
    assert_eq!(pair.b.engine.next_timeout_but_looks(), None);
    assert_eq!(lends_each(&pair), [true]);
}

#[test]
fn ends_that_do_not_agree_on_the_mtu_are_told_so() {
    for (of_a, of_b) in [(10, 12), (12, 10)] {
        let setup = |log_mtu| Setup {
            log_mtu,
            ..Setup::default()
        };
        for reads in [false, true] {
            let mut pair = Pair::unconnected(setup(of_a));
            let (to_b, to_a) = (pair.peer_of_a(setup(of_a)), pair.peer_of_b(setup(of_b)));
            pair.a.connect(QPN_A, &to_b);
            pair.b.connect(QPN_B, &to_a);
            let (mut pair, a, b) = inside_of(pair);
            // As many bytes as are packets of either.
            let (work, status) = if reads {
                (read(&a, &b, 16 << 10), CompletionStatus::BadResponse)
            } else {
                let status = CompletionStatus::RemoteInvalidRequest;
                (write(&a, &b, 16 << 10), status)
            };
            pair.a.post_send(QPN_A, &work);
            let mut parcels = 0;
            run(&mut pair, |_, inside| {
                parcels += usize::from(inside.loan.is_some());
                1
            });
            assert_eq!(parcels, 1);
            assert_eq!(statuses(&pair.completions_a()), [status], "{of_a} {reads}");
        }
    }
}

#[test]
fn pages_that_come_one_by_one_are_found_by_packets_that_go_one_by_one() {
    // Two pages may be missing for a packet, and one for those that go together.
    let setup = Setup {
        rnr_retry: 3,
        retry_count: 2,
        ..Setup::default()
    };
    let (mut pair, a, _) = inside(setup);
    const LONG: usize = 200_000;
    let paged = [Paged::new(&mut pair.b, 0x301, LONG as u64)];
    let data = pattern(3, LONG);
    pair.a.fill(&a, 0, &data);
    let work = SendWork::new(SendOpcode::Write, &[a.sge(0, LONG as u32)])
        .remote(paged[0].address, paged[0].tag)
        .flags(SEND_SIGNALED);
    pair.a.post_send(QPN_A, &work);
    let mut loans = 0;
    let (_, faults) = run_by(&mut pair, &[], &paged, |pair| {
        exchange(pair, |_, inside| {
            loans += usize::from(inside.loan.is_some());
            1
        });
    });
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(paged[0].contents(&pair.b, 0, LONG), data);
    assert!(faults >= LONG / 4096 && loans > 1, "{faults} {loans}");
}

#[test]
fn no_more_is_under_way_of_what_is_not_lent_than_to_anybody() {
    const LONG: u32 = 200_000;
    let setup = Setup {
        log_mtu: 8,
        ..Setup::default()
    };
    let (mut pair, a, b) = inside(setup);
    let paged = Paged::new(&mut pair.a, 0x301, LONG.into());
    for page in 0..=u64::from(LONG) / 4096 {
        paged.bring_in(&pair.a, page, false);
    }
    for (sge, most) in [(paged.sge(0, LONG), 512), (a.sge(0, LONG), 782)] {
        let work = SendWork::new(SendOpcode::Write, &[sge])
            .remote(b.address, b.tag)
            .flags(SEND_SIGNALED);
        let before = pair.a.engine.counters().tx_packets;
        pair.a.post_send(QPN_A, &work);
        pair.a.settle();
        assert_eq!(pair.a.engine.counters().tx_packets - before, most);
        run(&mut pair, |_, _| 1);
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    }
}

#[test]
fn what_waited_is_copied_in_turns() {
    const MESSAGES: usize = 14;
    let setup = Setup {
        log_mtu: 12,
        flags: FLAGS,
        // Nothing is sent again meanwhile.
        timeout: 20,
        ..Setup::default()
    };
    // Those that look for commands at every turn have nothing to wait for here.
    let node = |number| Node::with_features(number, FEATURES & !FEATURE_TURNS);
    let mut pair = Pair::of(setup, node(1), node(2));
    pair.connect(setup);
    let (mut pair, a, _) = inside_of(pair);
    pair.b.hold_tags(HOLD);
    let (command, region) = pair.b.region(0x901, PD, ALL, LENGTH);
    post(&mut pair.b, &command);
    for _ in 0..MESSAGES {
        pair.a.post_send(QPN_A, &write(&a, &region, 250_000));
    }
    let (mut most, mut all) = (0, 0);
    for _ in 0..10_000 {
        pair.a.settle();
        for inside in std::mem::take(&mut pair.a.host.inside) {
            pair.b.receive_inside(&inside);
        }
        *pair.b.host.accesses.borrow_mut() = Some(Vec::new());
        let now = pair.b.now;
        pair.b.engine.poll(now, &mut pair.b.host);
        let accesses = pair.b.host.accesses.take().expect("what was written");
        let written = accesses.iter().map(|access| match access {
            Access::Write(_, length) => *length,
            _ => 0,
        });
        let written: usize = written.sum();
        most = most.max(written);
        all += written;
        for inside in std::mem::take(&mut pair.b.host.inside) {
            pair.a.receive_inside(&inside);
        }
        let idle = pair.b.engine.next_timeout().is_none_or(|at| at > now);
        if idle && !pair.pass_time() {
            break;
        }
    }
    let ended = statuses(&pair.completions_a());
    assert_eq!(ended, [CompletionStatus::Success; MESSAGES]);
    assert!(pair.b.engine.counters().pending_waits > 0);
    assert!(all >= MESSAGES * 250_000, "{all}");
    assert!((250_000..3 << 19).contains(&most), "{most} at once");
}

#[test]
fn so_much_is_lent_as_the_host_says() {
    let (mut pair, a, b) = inside(Setup::default());
    pass(&mut pair);
    let data = pattern(5, 250_000);
    pair.a.fill(&a, 0, &data);
    pair.a.post_send(QPN_A, &write(&a, &b, 250_000));
    pair.a.post_send(QPN_A, &write(&a, &b, 250_000));
    pair.a.post_send(QPN_A, &write(&a, &b, 250_000));
    pair.a.settle();
    let lengths = pair.a.host.inside.iter().map(|inside| {
        let loan = inside.loan.as_ref().expect("a loan");
        assert!(loan.is_passing());
        loan.len()
    });
    let under_way = lengths.clone().sum::<usize>();
    assert!(lengths.clone().all(|length| length <= 64 << 10));
    assert!((448 << 10..=512 << 10).contains(&under_way), "{under_way}");
    run(&mut pair, |_, _| 1);
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 3]
    );
    assert_eq!(pair.b.contents(&b, 0, 250_000), data);
}

#[test]
fn what_passes_does_not_wait_for_a_tag_and_is_sent_again() {
    let setup = Setup {
        flags: FLAGS,
        ..Setup::default()
    };
    let node = |number| Node::with_features(number, FEATURES & !FEATURE_TURNS);
    let mut pair = Pair::of(setup, node(1), node(2));
    pair.connect(setup);
    let (mut pair, a, _) = inside_of(pair);
    pass(&mut pair);
    let data = pattern(6, 250_000);
    pair.a.fill(&a, 0, &data);
    pair.b.hold_tags(HOLD);
    let (command, region) = pair.b.region(0x901, PD, ALL, LENGTH);
    post(&mut pair.b, &command);
    pair.a.post_send(QPN_A, &write(&a, &region, 250_000));
    run(&mut pair, |_, _| 1);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(pair.b.contents(&region, 0, 250_000), data);
    let counters = pair.b.engine.counters();
    assert!(counters.pending_waits > 0 && counters.rx_dropped > 0);
}

#[test]
fn what_was_taken_in_part_is_asked_for_from_there_at_once() {
    let (mut pair, a, b) = inside(Setup::default());
    let data = pattern(8, 20_000);
    pair.a.fill(&a, 0, &data);
    lent(&mut pair, &a, &b);
    let together = pair.a.host.inside.pop_front().expect("packets");
    assert!(pair.a.host.inside.is_empty() && pair.pass_time());
    pair.poll();
    // Of what is sent again one by one some come, and then the others as they were sent first.
    let mut one_by_one = std::mem::take(&mut pair.a.host.inside);
    one_by_one.truncate(3);
    for inside in one_by_one.iter().chain([&together]) {
        pair.b.receive_inside(inside);
    }
    assert!(together.loan.expect("a loan").hold().is_some());
    pair.poll();
    assert_eq!(pair.b.engine.counters().naks_sent, 1);
    let now = pair.a.now;
    exchange(&mut pair, |_, _| 1);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(pair.a.now, now, "at once");
    assert_eq!(pair.b.contents(&b, 0, 20_000), data);
}

#[test]
fn nothing_is_lent_to_a_peer_that_was_not_heard_in_turn() {
    let mut pair = Pair::new(Setup::default());
    let a = pair.a.register(0x101, PD, ALL, LENGTH);
    let b = pair.b.register(0x201, PD, ALL, LENGTH);
    pair.a.host.lends = Some(Lending::INSIDE);
    pair.b.host.lends = Some(Lending::INSIDE);
    // As from the peer, but for the number.
    pair.b.post_send(QPN_B, &write(&b, &a, 8));
    pair.poll();
    let mut made_up = pair.b.host.inside.pop_front().expect("a packet");
    let psn = made_up.frame.len() - 4 - 8 - 16 - 1;
    made_up.frame[psn] ^= 0x40;
    let received = pair.a.engine.counters().out_of_sequence;
    pair.a.receive_inside(&made_up);
    assert_eq!(pair.a.engine.counters().out_of_sequence, received + 1);
    pair.a.post_send(QPN_A, &write(&a, &b, 20_000));
    pair.poll();
    assert!(pair
        .a
        .host
        .inside
        .iter()
        .all(|inside| inside.loan.is_none()));
}

#[test]
fn a_peer_that_was_not_heard_in_time_is_lent_nothing_until_it_is() {
    let (mut pair, a, b) = inside(Setup::default());
    lent(&mut pair, &a, &b);
    pair.a.host.inside.clear();
    assert!(pair.pass_time());
    // Its answers come by the wire from now on.
    pair.b.host.lends = None;
    for _ in 0..2 {
        for _ in 0..100 {
            pair.poll();
            for inside in std::mem::take(&mut pair.a.host.inside) {
                assert!(inside.loan.is_none(), "lent");
                pair.b.receive_inside(&inside);
            }
            pair.poll();
            for frame in std::mem::take(&mut pair.b.host.sent) {
                pair.a.receive(&frame);
            }
        }
        let ended = statuses(&pair.completions_a());
        assert_eq!(ended, [CompletionStatus::Success]);
        pair.a.post_send(QPN_A, &write(&a, &b, 20_000));
    }
}

#[test]
fn what_is_in_the_work_request_or_short_is_not_lent() {
    let (mut pair, a, b) = inside(Setup::default());
    let inline = SendWork::new(SendOpcode::Write, &[])
        .remote(b.address, b.tag)
        .inline(&[7; 200])
        .flags(SEND_SIGNALED);
    pair.a.post_send(QPN_A, &inline);
    run(&mut pair, |_, inside| {
        assert!(inside.loan.is_none());
        1
    });
    pair.a.post_send(QPN_A, &write(&a, &b, 2047));
    run(&mut pair, |_, inside| {
        assert!(inside.loan.is_none(), "a copy takes less");
        1
    });
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 2]
    );
}

#[test]
fn headers_that_carry_nothing_lend_nothing() {
    let (mut pair, a, b) = inside(Setup::default());
    let loan = lent(&mut pair, &a, &b);
    let mut answers = Vec::new();
    exchange(&mut pair, |way, inside| {
        if way == Way::BToA {
            answers.push(inside.frame.clone());
        }
        1
    });
    pair.completions_a();
    pair.a.post_send(QPN_A, &write(&a, &b, 8));
    pair.poll();
    // A whole packet, and an acknowledgement.
    let whole = pair.a.host.inside.pop_front().expect("a packet").frame;
    for (node, frame) in [(&mut pair.b, whole), (&mut pair.a, answers.remove(0))] {
        let dropped = node.engine.counters().rx_dropped;
        let loan = Some(Arc::clone(&loan));
        node.receive_inside(&Inside { frame, loan });
        assert_eq!(node.engine.counters().rx_dropped, dropped + 1);
    }
    run(&mut pair, |_, _| 1);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
}
