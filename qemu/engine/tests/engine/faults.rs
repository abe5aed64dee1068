// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Reliable connections over a wire that drops, reorders, duplicates and damages: every byte
//! arrives once and in order, completions come in order, and nothing is done twice.

use crate::config;
use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, Region, SendWork};
use proptest::prelude::*;

/// One work request of a random program.
#[derive(Clone, Debug)]
enum Step {
    Send { length: u32, immediate: bool },
    Write { length: u32, immediate: bool },
    Read { length: u32 },
    FetchAdd { operand: u64 },
    CompareSwap { operand: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![
        Just(0u32),
        Just(1),
        255u32..260,
        1020u32..1030,
        4090u32..4100,
        0u32..20_000,
    ];
    prop_oneof![
        3 => (length.clone(), any::<bool>())
            .prop_map(|(length, immediate)| Step::Send { length, immediate }),
        3 => (length.clone(), any::<bool>())
            .prop_map(|(length, immediate)| Step::Write { length, immediate }),
        3 => length.prop_map(|length| Step::Read { length }),
        1 => (1u64..1000).prop_map(|operand| Step::FetchAdd { operand }),
        1 => (1u64..1000).prop_map(|operand| Step::CompareSwap { operand }),
    ]
}

const SLOT: u64 = 20_480;
const STEPS: usize = 12;

/// Everything a program needs at one end.
struct End {
    qpn: u32,
    /// Sources of sends and writes; sinks of reads and atomics.
    local: Region,
    /// Where the peer's sends arrive.
    inbox: Region,
    /// What the peer writes, reads and counts in.
    exposed: Region,
}

/// What is to be seen at the end.
#[derive(Default)]
struct Expected {
    sent: Vec<u32>,
    received: Vec<(u8, u32, Option<u32>)>,
    counter: u64,
    results: Vec<(u64, u64)>,
    data: Vec<(bool, bool, u64, Vec<u8>)>,
}

/// Posts a program from one end to the other and says what is to become of it.
fn post(
    from: &mut Node,
    from_end: &End,
    to: &mut Node,
    to_end: &End,
    steps: &[Step],
    seed: u64,
) -> Expected {
    let mut expected = Expected::default();
    let mut counter = 0u64;
    let counter_at = STEPS as u64 * SLOT;
    for (n, step) in steps.iter().enumerate() {
        let at = n as u64 * SLOT;
        let immediate_data = 0x1000_0000 + n as u32;
        let data = |length: u32| pattern(seed ^ ((n as u64) << 20), length as usize);
        let remote = to_end.exposed.address;
        let index = match *step {
            Step::Send { length, immediate } => {
                let data = data(length);
                from.fill(&from_end.local, at, &data);
                to.post_recv(to_end.qpn, &[to_end.inbox.sge(at, length + 5)]);
                let opcode = if immediate {
                    SendOpcode::SendImmediate
                } else {
                    SendOpcode::Send
                };
                expected.received.push((
                    CompletionOpcode::Receive.number(),
                    length,
                    immediate.then_some(immediate_data),
                ));
                expected.data.push((false, false, at, data));
                from.post_send(
                    from_end.qpn,
                    &SendWork::new(opcode, &[from_end.local.sge(at, length)])
                        .immediate(immediate_data),
                )
            }
            Step::Write { length, immediate } => {
                let data = data(length);
                from.fill(&from_end.local, at, &data);
                let opcode = if immediate {
                    to.post_recv(to_end.qpn, &[]);
                    expected.received.push((
                        CompletionOpcode::ReceiveWrite.number(),
                        length,
                        Some(immediate_data),
                    ));
                    SendOpcode::WriteImmediate
                } else {
                    SendOpcode::Write
                };
                expected.data.push((false, true, at, data));
                from.post_send(
                    from_end.qpn,
                    &SendWork::new(opcode, &[from_end.local.sge(at, length)])
                        .remote(remote + at, to_end.exposed.tag)
                        .immediate(immediate_data),
                )
            }
            Step::Read { length } => {
                let data = data(length);
                to.fill(&to_end.exposed, at, &data);
                expected.data.push((true, false, at, data));
                from.post_send(
                    from_end.qpn,
                    &SendWork::new(SendOpcode::Read, &[from_end.local.sge(at, length)])
                        .remote(remote + at, to_end.exposed.tag),
                )
            }
            Step::FetchAdd { operand } | Step::CompareSwap { operand } => {
                expected.results.push((at, counter));
                let (opcode, compare) = match step {
                    Step::FetchAdd { .. } => {
                        counter += operand;
                        (SendOpcode::FetchAdd, 0)
                    }
                    _ => {
                        // Holds only if everything before was done exactly once.
                        let compare = counter;
                        counter = operand;
                        (SendOpcode::CompareSwap, compare)
                    }
                };
                let part = AtomicPart {
                    address: remote + counter_at,
                    rkey: to_end.exposed.tag,
                    operand,
                    compare,
                    ..AtomicPart::zeroed()
                };
                from.post_send(
                    from_end.qpn,
                    &SendWork::new(opcode, &[from_end.local.sge(at, 8)]).part(&part),
                )
            }
        };
        expected.sent.push(index);
    }
    expected.counter = counter;
    expected
}

/// Looks whether it has.
fn verify(
    from: &Node,
    from_end: &End,
    to: &Node,
    to_end: &End,
    expected: &Expected,
    sent: &[CompletionEntry],
    received: &[CompletionEntry],
) {
    for entry in sent.iter().chain(received) {
        assert_eq!(entry.status, 0, "{entry:?}");
    }
    let indices: Vec<u32> = sent.iter().map(|entry| entry.index).collect();
    assert_eq!(indices, expected.sent);
    let got: Vec<_> = received
        .iter()
        .map(|entry| {
            let immediate = entry.flags & COMPLETION_IMMEDIATE != 0;
            (
                entry.opcode,
                entry.byte_count,
                immediate.then_some(entry.immediate as u32),
            )
        })
        .collect();
    assert_eq!(got, expected.received);
    for (at_requester, exposed, at, data) in &expected.data {
        let got = if *at_requester {
            from.contents(&from_end.local, *at, data.len())
        } else if *exposed {
            to.contents(&to_end.exposed, *at, data.len())
        } else {
            to.contents(&to_end.inbox, *at, data.len())
        };
        assert!(got == *data, "data at {at}");
    }
    for (at, result) in &expected.results {
        let got = from.contents(&from_end.local, *at, 8);
        assert_eq!(got, result.to_le_bytes());
    }
    let counter = to.contents(&to_end.exposed, STEPS as u64 * SLOT, 8);
    assert_eq!(counter, expected.counter.to_le_bytes());
}

fn end(node: &mut Node, qpn: u32) -> End {
    let size = STEPS as u64 * SLOT + 64;
    End {
        qpn,
        local: node.register(0x1001, PD, ALL, size),
        inbox: node.register(0x2001, PD, ALL, size),
        exposed: node.register(0x3001, PD, ALL, size),
    }
}

/// Runs programs both ways over a bad wire and looks at everything.
fn run_programs(a_steps: &[Step], b_steps: &[Step], setup: Setup, faults: Faults, seed: u64) {
    let mut pair = Pair::new(setup);
    let a_end = end(&mut pair.a, QPN_A);
    let b_end = end(&mut pair.b, QPN_B);
    let a_expected = post(&mut pair.a, &a_end, &mut pair.b, &b_end, a_steps, seed);
    let b_expected = post(&mut pair.b, &b_end, &mut pair.a, &a_end, b_steps, !seed);
    let mut wire = BadWire::new(seed, faults);
    pair.run_with(|way, frame| wire.fate(way, frame));
    let split = |entries: Vec<CompletionEntry>| -> (Vec<_>, Vec<_>) {
        entries
            .into_iter()
            .partition(|entry| entry.flags & COMPLETION_RECEIVE == 0)
    };
    let (a_sent, a_received) = split(pair.completions_a());
    let (b_sent, b_received) = split(pair.completions_b());
    verify(
        &pair.a,
        &a_end,
        &pair.b,
        &b_end,
        &a_expected,
        &a_sent,
        &b_received,
    );
    verify(
        &pair.b,
        &b_end,
        &pair.a,
        &a_end,
        &b_expected,
        &b_sent,
        &a_received,
    );
}

/// How many reads and atomics are in flight: one, where every repetition matters, to all.
fn depth() -> impl Strategy<Value = u8> {
    prop_oneof![Just(1u8), Just(2), Just(16)]
}

fn setup() -> impl Strategy<Value = Setup> {
    (8u8..=12, 0u32..0x100_0000, 0u32..0x100_0000, depth()).prop_map(
        |(log_mtu, psn_a, psn_b, depth)| Setup {
            log_mtu,
            psn_a,
            psn_b,
            depth,
            ..Setup::default()
        },
    )
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn everything_arrives_once_over_a_good_wire(
        a in prop::collection::vec(step(), 0..STEPS),
        b in prop::collection::vec(step(), 0..STEPS),
        setup in setup(),
        seed: u64,
    ) {
        let faults = Faults { drop: 0, duplicate: 0, corrupt: 0, delay: 0 };
        run_programs(&a, &b, setup, faults, seed);
    }

    #[test]
    fn everything_arrives_once_though_frames_are_lost(
        a in prop::collection::vec(step(), 0..STEPS),
        b in prop::collection::vec(step(), 0..STEPS),
        setup in setup(),
        drop in 1u64..12,
        seed: u64,
    ) {
        let faults = Faults { drop, duplicate: 0, corrupt: 0, delay: 0 };
        run_programs(&a, &b, setup, faults, seed);
    }

    #[test]
    fn everything_arrives_once_though_frames_come_twice_and_late(
        a in prop::collection::vec(step(), 0..STEPS),
        b in prop::collection::vec(step(), 0..STEPS),
        setup in setup(),
        duplicate in 0u64..20,
        delay in 0u64..20,
        seed: u64,
    ) {
        let faults = Faults { drop: 0, duplicate, corrupt: 0, delay };
        run_programs(&a, &b, setup, faults, seed);
    }

    #[test]
    fn everything_arrives_once_over_a_wire_with_every_fault(
        a in prop::collection::vec(step(), 0..STEPS),
        b in prop::collection::vec(step(), 0..STEPS),
        setup in setup(),
        drop in 0u64..6,
        duplicate in 0u64..10,
        corrupt in 0u64..6,
        delay in 0u64..10,
        seed: u64,
    ) {
        run_programs(&a, &b, setup, Faults { drop, duplicate, corrupt, delay }, seed);
    }

    #[test]
    fn any_frame_whatever_leaves_the_engine_standing(
        setup in setup(),
        frames in prop::collection::vec(
            (any::<u8>(), any::<bool>(), 0u32..64, prop::collection::vec(any::<u8>(), 0..300)),
            1..40,
        ),
    ) {
        hostile(setup, &frames);
    }
}

/// Throws well-formed frames with arbitrary transport packets at a connected queue pair.
fn hostile(setup: Setup, frames: &[(u8, bool, u32, Vec<u8>)]) {
    use ferrite_engine::roce::psn_add;
    let mut pair = Pair::new(setup);
    let local = pair.b.register(0x1001, PD, ALL, 1 << 16);
    for _ in 0..8 {
        pair.b.post_recv(QPN_B, &[local.sge(0, 4096)]);
    }
    let work = SendWork::new(SendOpcode::Read, &[local.sge(0, 4096)]).remote(0, 0x1001);
    pair.b.post_send(QPN_B, &work);
    pair.b.settle();
    let impostor = Impostor::new(&pair.a, &pair.b, QPN_B);
    for (opcode, as_response, ahead, payload) in frames {
        let psn = if *as_response {
            setup.psn_b
        } else {
            setup.psn_a
        };
        let frame = impostor.packet(opcode % 0x18, psn_add(psn, *ahead), payload);
        pair.b.receive(&frame);
        pair.b.settle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: config().cases / 4, ..config() })]

    #[test]
    fn a_long_read_and_a_long_write_are_whole_though_frames_are_lost(
        log_mtu in 8u8..=10,
        depth in depth(),
        length in 150_000u32..400_000,
        drop in 0u64..3,
        delay in 0u64..3,
        seed: u64,
    ) {
        let mut pair = Pair::new(Setup { log_mtu, depth, psn_a: seed as u32 & 0xff_ffff, ..Setup::default() });
        let a = pair.a.register(0x101, PD, ALL, 400_000);
        let b = pair.b.register(0x201, PD, ALL, 400_000);
        let c = pair.b.register(0x301, PD, ALL, 400_000);
        let data = pattern(seed, length as usize);
        pair.b.fill(&b, 0, &data);
        let read = SendWork::new(SendOpcode::Read, &[a.sge(0, length)]).remote(b.address, b.tag);
        pair.a.post_send(QPN_A, &read);
        let write = SendWork::new(SendOpcode::Write, &[a.sge(0, length)])
            .remote(c.address, c.tag)
            .flags(SEND_SIGNALED | SEND_FENCE);
        pair.a.post_send(QPN_A, &write);
        let mut wire = BadWire::new(seed, Faults { drop, duplicate: 1, corrupt: 0, delay });
        pair.run_with(|way, frame| wire.fate(way, frame));
        prop_assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success; 2]);
        prop_assert!(pair.a.contents(&a, 0, length as usize) == data);
        prop_assert!(pair.b.contents(&c, 0, length as usize) == data);
    }

    #[test]
    fn local_operations_keep_their_place_though_frames_are_lost(
        depth in depth(),
        drop in 0u64..10,
        seed: u64,
    ) {
        let mut pair = Pair::new(Setup { depth, ..Setup::default() });
        let data = pair.a.register(0x101, PD, ALL, 4096);
        let to = pair.b.register(0x201, PD, ALL, 4096);
        let page = pair.a.allocate(4096);
        pair.a.execute(&AllocateTag {
            tag: Tag::new(0x30, 0).0,
            pd: PD,
            kind: TagKind::Region.number(),
            reserved: [0; 3],
            max_pages: 1,
        });
        // Each round needs what the one before it left: the tag must be invalid before it can be
        // registered again, and valid for as long as the write may have to be repeated.
        let mut posted = Vec::new();
        for round in 0..8u8 {
            let tag = Tag::new(0x30, round).0;
            let part = FastRegisterPart {
                tag,
                access: ALL,
                address: 0,
                buffer: Buffer::contiguous(page, 4096),
                reserved: 0,
            };
            let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
            let sge = Sge { address: 0, length: 3000, lkey: tag };
            let write = SendWork::new(SendOpcode::Write, &[sge]).remote(to.address, to.tag);
            let other =
                SendWork::new(SendOpcode::Read, &[data.sge(0, 2000)]).remote(to.address, to.tag);
            let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
            for work in [register, write, other, invalidate] {
                posted.push(pair.a.post_send(QPN_A, &work));
            }
        }
        let mut wire = BadWire::new(seed, Faults { drop, duplicate: 5, corrupt: 0, delay: 5 });
        pair.run_with(|way, frame| wire.fate(way, frame));
        let completions = pair.completions_a();
        prop_assert!(completions.iter().all(|entry| entry.status == 0), "{completions:?}");
        let indices: Vec<u32> = completions.iter().map(|entry| entry.index).collect();
        prop_assert_eq!(indices, posted);
    }

    #[test]
    fn a_receiver_that_is_often_not_ready_loses_nothing(
        lengths in prop::collection::vec(0u32..5000, 1..20),
        drop in 0u64..10,
        duplicate in 0u64..10,
        seed: u64,
    ) {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 8192);
        let to = pair.b.register(0x201, PD, ALL, 20 * 5000);
        let data = pattern(seed, 8192);
        pair.a.fill(&from, 0, &data);
        for (n, &length) in lengths.iter().enumerate() {
            pair.a.post_send(
                QPN_A,
                &SendWork::new(SendOpcode::Send, &[from.sge(n as u64, length)]),
            );
        }
        let mut wire = BadWire::new(seed, Faults { drop, duplicate, corrupt: 0, delay: 3 });
        let mut received = 0u64;
        for round in 0..100_000 {
            pair.exchange_with(|way, frame| wire.fate(way, frame));
            if !pair.pass_time() {
                break;
            }
            if round % 3 == 0 && received < lengths.len() as u64 {
                pair.b.post_recv(QPN_B, &[to.sge(received * 5000, 5000)]);
                received += 1;
            }
        }
        let sent = statuses(&pair.completions_a());
        prop_assert_eq!(sent, vec![CompletionStatus::Success; lengths.len()]);
        let got: Vec<u32> = pair.completions_b().iter().map(|entry| entry.byte_count).collect();
        prop_assert_eq!(&got, &lengths);
        for (n, &length) in lengths.iter().enumerate() {
            let bytes = pair.b.contents(&to, n as u64 * 5000, length as usize);
            prop_assert!(bytes == data[n..n + length as usize]);
        }
    }
}
