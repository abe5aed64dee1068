// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Requests and answers that come again, because an answer was late or because the network copied
//! a frame: nothing is done twice, nobody else's answer is lost, the connection goes on, and what
//! is kept for it all is bounded.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::roce::{
    psn_add, Aeth, AtomicEth, Feth, Frame, NakCode, Opcode, Packet, Reth, Syndrome,
};
use ferrite_engine::testing::{Node, Region, SendWork};
use CompletionStatus::Success;

const RIGHTS: u32 = ALL | ACCESS_FLUSH_GLOBAL;

/// A pair with memory at both ends.
struct Bench {
    pair: Pair,
    a: Region,
    b: Region,
}

fn bench(setup: Setup) -> Bench {
    let mut pair = Pair::new(setup);
    pair.b.execute(&ModifyQueuePair {
        qpn: QPN_B,
        mask: MODIFY_STATE | MODIFY_ACCESS,
        state: QueuePairStateCode::Rts.number(),
        access: ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL,
        ..ModifyQueuePair::zeroed()
    });
    let a = pair.a.register(0x101, PD, RIGHTS, 64 << 10);
    let b = pair.b.register(0x201, PD, RIGHTS, 64 << 10);
    Bench { pair, a, b }
}

fn word(bytes: Vec<u8>) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// What a packet says: opcode, sequence number and, of an atomic's answer, what was there.
#[derive(Debug, PartialEq, Eq)]
struct Said(u8, u32, Option<u64>);

/// Everything a node has to say.
fn said(node: &mut Node) -> Vec<Said> {
    node.settle();
    std::mem::take(&mut node.host.sent)
        .iter()
        .map(|frame| {
            let frame = Frame::parse(frame).expect("a packet");
            let packet = Packet::parse(frame.transport).expect("a packet");
            let original = packet.atomic_ack.map(|ack| ack.original);
            Said(packet.bth.opcode, packet.bth.psn, original)
        })
        .collect()
}

/// The requests of a peer, as packets.
struct Requests {
    peer: Impostor,
    first: u32,
    address: u64,
    rkey: u32,
}

impl Requests {
    fn of(bench: &Bench) -> Self {
        Self {
            peer: Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B),
            first: Setup::default().psn_a,
            address: bench.b.address,
            rkey: bench.b.tag,
        }
    }

    fn psn(&self, n: u32) -> u32 {
        psn_add(self.first, n)
    }

    fn reth(&self, length: u32) -> [u8; 16] {
        let reth = Reth {
            address: self.address,
            rkey: self.rkey,
            length,
        };
        reth.to_bytes()
    }

    fn read(&self, n: u32, length: u32) -> Vec<u8> {
        self.peer
            .packet(Opcode::RC_READ_REQUEST, self.psn(n), &self.reth(length))
    }

    fn fetch_add(&self, n: u32, operand: u64) -> Vec<u8> {
        let atomic = AtomicEth {
            address: self.address,
            rkey: self.rkey,
            operand,
            compare: 0,
        };
        self.peer
            .packet(Opcode::RC_FETCH_ADD, self.psn(n), &atomic.to_bytes())
    }

    fn write(&self, n: u32, value: u64) -> Vec<u8> {
        let rest = [&self.reth(8)[..], &value.to_le_bytes()].concat();
        self.peer.packet(Opcode::RC_WRITE_ONLY, self.psn(n), &rest)
    }

    fn atomic_write(&self, n: u32, value: u64) -> Vec<u8> {
        let rest = [&self.reth(8)[..], &value.to_le_bytes()].concat();
        self.peer
            .packet(Opcode::RC_ATOMIC_WRITE, self.psn(n), &rest)
    }

    fn flush(&self, n: u32) -> Vec<u8> {
        let feth = Feth {
            placement: FLUSH_GLOBAL as u8,
            selectivity: FLUSH_RANGE as u8,
        };
        let rest = [&feth.to_bytes()[..], &self.reth(8)].concat();
        self.peer.packet(Opcode::RC_FLUSH, self.psn(n), &rest)
    }

    fn read_answer(&self, n: u32) -> Said {
        Said(Opcode::RC_READ_RESPONSE_ONLY, self.psn(n), None)
    }

    fn atomic_answer(&self, n: u32, original: u64) -> Said {
        Said(Opcode::RC_ATOMIC_ACKNOWLEDGE, self.psn(n), Some(original))
    }
}

#[test]
fn a_repetition_that_crosses_its_answer_does_not_exceed_the_depth() {
    for depth in [1, 2, 16] {
        let bench = bench(Setup {
            depth,
            ..Setup::default()
        });
        let requests = Requests::of(&bench);
        let mut b = bench.pair.b;
        let depth = u32::from(depth);
        // As many as may be in flight, answered; then all of them again together with the next,
        // as the requester has just got the answers.
        let mut next = 0;
        for kind in 0..2 {
            let request = |n| match kind {
                0 => requests.read(n, 8),
                _ => requests.fetch_add(n, 1),
            };
            for _ in 0..3 {
                for n in next..next + depth {
                    b.receive(&request(n));
                }
                assert_eq!(said(&mut b).len() as u32, depth);
                for n in (next..next + depth).chain(next + depth..next + 2 * depth) {
                    b.receive(&request(n));
                }
                assert_eq!(said(&mut b).len() as u32, 2 * depth);
                next += 2 * depth;
            }
        }
        assert_eq!(b.qp_state(QPN_B), QueuePairStateCode::Rts);
        assert_eq!(b.engine.counters().naks_sent, 0);
    }
}

#[test]
fn more_than_the_depth_is_refused_though_some_come_again() {
    for depth in [1u8, 2, 16] {
        let bench = bench(Setup {
            depth,
            ..Setup::default()
        });
        let requests = Requests::of(&bench);
        let mut b = bench.pair.b;
        let depth = u32::from(depth);
        for n in 0..depth {
            b.receive(&requests.read(n, 8));
            // Copies of what is not answered yet make no room.
            b.receive(&requests.read(n, 8));
        }
        b.receive(&requests.fetch_add(depth, 1));
        let answers = acknowledgements(&mut b);
        assert_eq!(answers.len() as u32, depth + 1);
        assert_eq!(
            answers[depth as usize],
            (Syndrome::Nak(NakCode::InvalidRequest), requests.psn(depth))
        );
    }
}

#[test]
fn a_connection_survives_each_frame_coming_twice_at_any_depth() {
    for depth in [1, 2, 16] {
        for late in [false, true] {
            let mut bench = bench(Setup {
                depth,
                ..Setup::default()
            });
            let read = SendWork::new(SendOpcode::Read, &[bench.a.sge(64, 5000)])
                .remote(bench.b.address, bench.b.tag);
            let add = SendWork::new(SendOpcode::FetchAdd, &[bench.a.sge(0, 8)]).part(&AtomicPart {
                address: bench.b.address,
                rkey: bench.b.tag,
                operand: 1,
                ..AtomicPart::zeroed()
            });
            for _ in 0..20 {
                bench.pair.a.post_send(QPN_A, &read);
                bench.pair.a.post_send(QPN_A, &add);
            }
            let mut held: Option<Vec<u8>> = None;
            bench.pair.run_with(|way, frame| match (way, late) {
                (Way::BToA, _) => vec![frame],
                (Way::AToB, false) => vec![frame.clone(), frame],
                // The copy comes with the next frame.
                (Way::AToB, true) => [held.replace(frame.clone()), Some(frame)]
                    .into_iter()
                    .flatten()
                    .collect(),
            });
            assert_eq!(statuses(&bench.pair.completions_a()), [Success; 40]);
            assert_eq!(word(bench.pair.b.contents(&bench.b, 0, 8)), 20);
            assert_eq!(word(bench.pair.a.contents(&bench.a, 0, 8)), 19);
        }
    }
}

#[test]
fn a_stale_copy_of_a_read_cancels_nobody_elses_answer() {
    let bench = bench(Setup::default());
    let requests = Requests::of(&bench);
    let mut b = bench.pair.b;
    b.receive(&requests.read(0, 8));
    assert_eq!(said(&mut b), [requests.read_answer(0)]);
    // The next ones are carried out and not answered yet when the copy comes.
    b.receive(&requests.fetch_add(1, 5));
    b.receive(&requests.read(2, 8));
    b.receive(&requests.atomic_write(3, 9));
    b.receive(&requests.write(4, 11));
    b.receive(&requests.read(0, 8));
    let answers = said(&mut b);
    assert_eq!(
        answers,
        [
            requests.read_answer(0),
            requests.atomic_answer(1, 0),
            requests.read_answer(2),
            requests.read_answer(3),
            Said(Opcode::RC_ACKNOWLEDGE, requests.psn(4), None),
        ]
    );
}

#[test]
fn a_read_asked_for_again_in_the_middle_of_its_answer_is_answered_from_there() {
    let bench = bench(Setup::default());
    let requests = Requests::of(&bench);
    let mut b = bench.pair.b;
    // 60 packets; none leaves before the engine is polled, and one burst holds 64.
    let length = 60 << 10;
    b.receive(&requests.read(0, 8));
    b.receive(&requests.read(1, length));
    b.receive(&requests.read(61, length - 3));
    b.engine.poll(b.now, &mut b.host);
    let first: Vec<_> = b.host.sent.drain(..).collect();
    assert_eq!(first.len(), 64);
    // Three packets of the last have left. It is asked for from the second on.
    let rest = Reth {
        address: requests.address + 1024,
        rkey: requests.rkey,
        length: length - 3 - 1024,
    };
    let again = requests
        .peer
        .packet(Opcode::RC_READ_REQUEST, requests.psn(62), &rest.to_bytes());
    b.receive(&again);
    // A copy changes nothing.
    b.receive(&again);
    let answers = said(&mut b);
    let psns: Vec<u32> = answers.iter().map(|said| said.1).collect();
    let expected: Vec<u32> = (62..121).map(|n| requests.psn(n)).collect();
    assert_eq!(psns, expected);
    assert_eq!(answers[0].0, Opcode::RC_READ_RESPONSE_FIRST);
    assert_eq!(answers[58].0, Opcode::RC_READ_RESPONSE_LAST);
}

#[test]
fn a_copy_of_a_read_from_memory_that_is_gone_does_not_end_the_connection() {
    let bench = bench(Setup::default());
    let requests = Requests::of(&bench);
    let mut b = bench.pair.b;
    b.receive(&requests.read(0, 8));
    assert_eq!(said(&mut b), [requests.read_answer(0)]);
    b.receive(&requests.read(0, 8));
    let released = b.object_command(CommandOpcode::ReleaseTag, requests.rkey);
    assert_eq!(released, CommandStatus::Ok);
    assert_eq!(said(&mut b), []);
    b.receive(&requests.read(0, 8));
    assert_eq!(said(&mut b), []);
    assert_eq!(b.qp_state(QPN_B), QueuePairStateCode::Rts);
}

#[test]
fn any_number_of_atomic_writes_and_flushes_is_answered_again() {
    let bench = bench(Setup::default());
    let requests = Requests::of(&bench);
    let mut b = bench.pair.b;
    for n in 0..50 {
        b.receive(&requests.atomic_write(2 * n, n.into()));
        b.receive(&requests.flush(2 * n + 1));
        assert_eq!(said(&mut b).len(), 2);
    }
    // Not all requesters count them among the reads in flight.
    for n in 0..50 {
        b.receive(&requests.atomic_write(2 * n, n.into()));
        b.receive(&requests.flush(2 * n + 1));
    }
    let expected: Vec<Said> = (0..64).map(|n| requests.read_answer(n)).collect();
    assert_eq!(said(&mut b), expected);
    assert_eq!(word(b.contents(&bench.b, 0, 8)), 49);
}

#[test]
fn answers_are_bounded_whatever_the_requester_sends() {
    type Request = fn(&Requests, u32) -> Vec<u8>;
    const FLOOD: u32 = 1000;
    // Answers that wait at most, and one or two that say that something is missing.
    const MOST: usize = 66;
    let new: [Request; 3] = [
        |requests, n| requests.atomic_write(n, u64::from(n) + 1),
        |requests, n| requests.flush(n),
        // An acknowledgement is not told in one word with the answer before it.
        |requests, n| match n % 2 {
            0 => requests.atomic_write(n, u64::from(n) + 1),
            _ => requests.write(n, u64::from(n) + 1),
        },
    ];
    for request in new {
        let bench = bench(Setup::default());
        let requests = Requests::of(&bench);
        let mut b = bench.pair.b;
        for n in 0..FLOOD {
            b.receive(&request(&requests, n));
        }
        let state: QueuePairState = b.query(CommandOpcode::QueryQueuePair, QPN_B).unwrap();
        let taken = (state.receive_psn.wrapping_sub(requests.first) & 0xff_ffff) as usize;
        assert!(taken <= MOST, "{taken}");
        let answers = said(&mut b).len();
        assert!((1..=MOST).contains(&answers), "{answers}");
        // What was not answered was not done, and is taken when it comes again.
        let held = word(b.contents(&bench.b, 0, 8)) as usize;
        assert!(held <= taken, "{held} of {taken}");
        b.receive(&request(&requests, taken as u32));
        assert_eq!(said(&mut b).len(), 1);
    }
    let again: [Request; 4] = [
        |requests, n| requests.read(n, 8),
        |requests, n| requests.atomic_write(n, 1),
        |requests, n| requests.flush(n),
        |requests, n| match n % 2 {
            0 => requests.read(n, 8),
            _ => requests.write(n, 1),
        },
    ];
    for request in again {
        let bench = bench(Setup::default());
        let requests = Requests::of(&bench);
        let mut b = bench.pair.b;
        for n in 0..FLOOD {
            b.receive(&request(&requests, n));
            said(&mut b);
        }
        for n in 0..FLOOD {
            b.receive(&request(&requests, n));
        }
        let answers = said(&mut b).len();
        assert!((1..=MOST).contains(&answers), "{answers}");
        assert_eq!(b.qp_state(QPN_B), QueuePairStateCode::Rts);
    }
}

#[test]
fn many_reports_of_one_gap_are_one_retry() {
    let mut bench = bench(Setup {
        retry_count: 2,
        ..Setup::default()
    });
    let requester = Setup::default().psn_a;
    for n in 0..4 {
        let work = SendWork::new(SendOpcode::Write, &[bench.a.sge(8 * n, 8)])
            .remote(bench.b.address + 8 * n, bench.b.tag);
        bench.pair.a.post_send(QPN_A, &work);
    }
    let a = &mut bench.pair.a;
    a.settle();
    a.host.sent.clear();
    let b = Impostor::new(&bench.pair.b, a, QPN_A);
    let aeth = Aeth {
        syndrome: Syndrome::Nak(NakCode::Sequence),
        msn: 0,
    };
    let nak = b.packet(Opcode::RC_ACKNOWLEDGE, requester, &aeth.to_bytes());
    for _ in 0..10 {
        a.receive(&nak);
        a.settle();
    }
    assert_eq!(a.engine.counters().retransmissions, 4);
    assert_eq!(a.qp_state(QPN_A), QueuePairStateCode::Rts);
    // A gap elsewhere is another.
    let second = b.packet(
        Opcode::RC_ACKNOWLEDGE,
        psn_add(requester, 1),
        &aeth.to_bytes(),
    );
    for _ in 0..10 {
        a.receive(&second);
        a.settle();
    }
    assert_eq!(a.engine.counters().retransmissions, 7);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 4]);
}

#[test]
fn a_lost_answer_is_asked_for_once_however_many_come_behind_it() {
    let mut bench = bench(Setup {
        retry_count: 1,
        ..Setup::default()
    });
    for n in 0..12 {
        let work = SendWork::new(SendOpcode::Read, &[bench.a.sge(8 * n, 8)])
            .remote(bench.b.address + 8 * n, bench.b.tag);
        bench.pair.a.post_send(QPN_A, &work);
    }
    let mut lost = false;
    bench.pair.exchange_with(|way, frame| {
        if way == Way::BToA && !std::mem::replace(&mut lost, true) {
            return Vec::new();
        }
        vec![frame]
    });
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 12]);
    assert_eq!(bench.pair.a.engine.counters().retransmissions, 12);
}

#[test]
fn a_write_with_immediate_writes_nothing_before_there_is_a_receive() {
    // In one packet and in three: of those, the last waits for the receive.
    for (length, early) in [(100u32, 0usize), (3000, 2048)] {
        let mut bench = bench(Setup::default());
        let data = pattern(7, length as usize);
        bench.pair.a.fill(&bench.a, 0, &data);
        bench.pair.b.fill(&bench.b, 0, &vec![0xee; length as usize]);
        let work = SendWork::new(SendOpcode::WriteImmediate, &[bench.a.sge(0, length)])
            .remote(bench.b.address, bench.b.tag)
            .immediate(1);
        bench.pair.a.post_send(QPN_A, &work);
        for _ in 0..5 {
            bench.pair.exchange();
            let held = bench.pair.b.contents(&bench.b, 0, length as usize);
            assert_eq!(held[..early], data[..early]);
            assert!(held[early..].iter().all(|&byte| byte == 0xee));
            assert!(bench.pair.pass_time());
        }
        assert!(bench.pair.b.engine.counters().rnr_naks_sent >= 4);
        bench.pair.b.post_recv(QPN_B, &[]);
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        assert_eq!(bench.pair.b.contents(&bench.b, 0, length as usize), data);
    }
}

#[test]
fn a_peer_that_is_never_ready_is_given_up_on_whatever_it_was_asked() {
    let works: [fn(&Bench) -> SendWork; 3] = [
        |bench| {
            SendWork::new(SendOpcode::Read, &[bench.a.sge(0, 8)])
                .remote(bench.b.address, bench.b.tag)
        },
        |bench| {
            SendWork::new(SendOpcode::Write, &[bench.a.sge(0, 8)])
                .remote(bench.b.address, bench.b.tag)
        },
        |bench| {
            SendWork::new(SendOpcode::FetchAdd, &[bench.a.sge(0, 8)]).part(&AtomicPart {
                address: bench.b.address,
                rkey: bench.b.tag,
                ..AtomicPart::zeroed()
            })
        },
    ];
    for work in works {
        let mut bench = bench(Setup {
            rnr_retry: 3,
            ..Setup::default()
        });
        let work = work(&bench);
        bench.pair.a.post_send(QPN_A, &work);
        let b = Impostor::new(&bench.pair.b, &bench.pair.a, QPN_A);
        let aeth = Aeth {
            syndrome: Syndrome::ReceiverNotReady(1),
            msn: 0,
        };
        let nak = b.packet(
            Opcode::RC_ACKNOWLEDGE,
            Setup::default().psn_a,
            &aeth.to_bytes(),
        );
        let a = &mut bench.pair.a;
        let mut naks = 0;
        while drain(a).is_empty() {
            a.settle();
            if !std::mem::take(&mut a.host.sent).is_empty() {
                naks += 1;
                assert!(naks <= 4, "it asks for ever");
                a.receive(&nak);
                if naks == 4 {
                    break;
                }
            }
            a.now = a.engine.next_timeout().expect("a time to ask again");
        }
        assert_eq!(naks, 4);
        assert_eq!(statuses(&drain(a)), [CompletionStatus::RnrRetryExceeded]);
        assert_eq!(a.qp_state(QPN_A), QueuePairStateCode::Error);
    }
}
