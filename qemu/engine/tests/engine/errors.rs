// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Everything that goes wrong on a reliable connection: what the requester sees, what the
//! responder sees, and that others go on as if nothing had happened.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::roce::{psn_add, Aeth, Opcode, Reth, Syndrome};
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use std::mem::offset_of;
use CompletionStatus::{Flushed, Success};
use QueuePairStateCode::{Error, Rts};

/// A pair with memory at both ends.
struct Bench {
    pair: Pair,
    a: Region,
    b: Region,
}

fn bench_with(setup: Setup) -> Bench {
    let mut pair = Pair::new(setup);
    let a = pair.a.register(0x101, PD, ALL, 16 << 10);
    let b = pair.b.register(0x201, PD, ALL, 16 << 10);
    Bench { pair, a, b }
}

fn bench() -> Bench {
    bench_with(Setup::default())
}

fn write(from: Sge, address: u64, rkey: u32) -> SendWork {
    SendWork::new(SendOpcode::Write, &[from]).remote(address, rkey)
}

impl Bench {
    /// Posts `work` with one good write before it and one after it, and looks at what A gets.
    fn fails_with(&mut self, work: &SendWork, status: CompletionStatus) {
        let good = write(self.a.sge(0, 3000), self.b.address, self.b.tag);
        self.pair.a.post_send(QPN_A, &good);
        self.pair.a.post_send(QPN_A, work);
        // Not signaled: an error and a flush are reported all the same.
        self.pair.a.post_send(QPN_A, &good.clone().flags(0));
        self.pair.run();
        let got = statuses(&self.pair.completions_a());
        assert_eq!(got, [Success, status, Flushed]);
        assert_eq!(self.pair.a.qp_state(QPN_A), Error);
    }

    /// What is left of B: its state, the statuses of its completions, its events.
    fn responder(&mut self) -> (QueuePairStateCode, Vec<CompletionStatus>, Vec<EventCode>) {
        let (state, statuses, events) = self.responder_and_causes();
        (
            state,
            statuses,
            events.into_iter().map(|(code, _)| code).collect(),
        )
    }

    /// The same, with what its events say of why they were raised.
    #[allow(clippy::type_complexity)]
    fn responder_and_causes(
        &mut self,
    ) -> (
        QueuePairStateCode,
        Vec<CompletionStatus>,
        Vec<(EventCode, u64)>,
    ) {
        let completions = self.pair.completions_b();
        let events = self.pair.b.events(EQ_ASYNC);
        let told = |event: &EventEntry| (EventCode::from_number(event.code).unwrap(), event.param0);
        (
            self.pair.b.qp_state(QPN_B),
            statuses(&completions),
            events.iter().map(told).collect(),
        )
    }
}

#[test]
fn a_wrong_local_key_fails_the_work_request_and_nothing_of_it_is_sent() {
    let mut bench = bench();
    let mut sges = vec![
        Sge {
            lkey: 0x9901,
            ..bench.a.sge(0, 10)
        }, // no such tag
        Sge {
            lkey: bench.a.tag + 1,
            ..bench.a.sge(0, 10)
        }, // another instance
        bench.a.sge((16 << 10) - 5, 10), // out of bounds
        Sge {
            address: 0,
            ..bench.a.sge(0, 10)
        }, // before the start
        Sge {
            lkey: TAG_ALL_MEMORY,
            ..bench.a.sge(0, 10)
        }, // not privileged
    ];
    let foreign = bench.pair.a.register(0x301, PD + 1, ALL, 4096);
    sges.push(foreign.sge(0, 10)); // another protection domain
    for sge in sges {
        let mut bench = self::bench();
        bench.pair.a.register(0x301, PD + 1, ALL, 4096);
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 100)]);
        let work = SendWork::new(SendOpcode::Send, &[bench.a.sge(0, 5), sge]);
        bench.fails_with(&work, CompletionStatus::LocalProtection);
        // The peer has seen nothing but the good write.
        assert_eq!(bench.responder(), (Rts, vec![], vec![]));
    }
}

#[test]
fn a_read_into_memory_without_local_write_fails_locally() {
    let mut bench = bench();
    let read_only = bench.pair.a.register(0x301, PD, ACCESS_REMOTE_READ, 4096);
    let work = SendWork::new(SendOpcode::Read, &[read_only.sge(0, 10)])
        .remote(bench.b.address, bench.b.tag);
    bench.fails_with(&work, CompletionStatus::LocalProtection);
}

#[test]
fn a_wrong_remote_key_is_refused_and_both_ends_know() {
    let length = 16 << 10;
    type Case = fn(&mut Bench) -> (u64, u32);
    // Each breaks one check, or several of which the first decides; the numbers are those of chapter 4.
    let cases: [(&str, u64, Case); 8] = [
        ("no such tag", 1, |bench| (bench.b.address, 0x9901)),
        ("no remote right", 3, |bench| {
            let local = bench.pair.b.register(0x301, PD, ACCESS_LOCAL_WRITE, 4096);
            (local.address, local.tag)
        }),
        ("no remote right, nor anything else", 3, |bench| {
            let region = bench.pair.b.register(0x301, PD + 1, 0, 4096);
            (region.address + 4096, region.tag + 1)
        }),
        ("another instance", 5, |bench| {
            (bench.b.address, bench.b.tag + 1)
        }),
        ("one byte too far", 6, |bench| {
            (bench.b.address + (16 << 10) - 1999, bench.b.tag)
        }),
        ("wrapping around", 6, |bench| (u64::MAX - 5, bench.b.tag)),
        ("another protection domain", 4, |bench| {
            let region = bench.pair.b.register(0x301, PD + 1, ALL, 4096);
            (region.address, region.tag)
        }),
        ("all of memory", 8, |_| (0x10_0000, TAG_ALL_MEMORY)),
    ];
    for (name, cause, case) in cases {
        for opcode in [SendOpcode::Write, SendOpcode::Read] {
            let mut bench = bench();
            let (address, rkey) = case(&mut bench);
            bench.pair.b.fill(&bench.b.clone(), 0, &vec![0xee; length]);
            bench.pair.b.post_recv(QPN_B, &[]);
            let work = SendWork::new(opcode, &[bench.a.sge(0, 2000)]).remote(address, rkey);
            bench.fails_with(&work, CompletionStatus::RemoteAccess);
            let event = (EventCode::QueuePairAccessError, cause);
            assert_eq!(
                bench.responder_and_causes(),
                (Error, vec![Flushed], vec![event]),
                "{name}"
            );
            // Nothing but the good write before it has touched the memory.
            let contents = bench.pair.b.contents(&bench.b, 3000, length - 3000);
            assert!(contents.iter().all(|&byte| byte == 0xee), "{name}");
            assert!(bench.pair.b.engine.counters().access_errors > 0);
        }
    }
}

#[test]
fn a_missing_right_is_refused() {
    let atomic = |address, rkey| AtomicPart {
        address,
        rkey,
        operand: 1,
        compare: 0,
        ..AtomicPart::zeroed()
    };
    for (opcode, missing) in [
        (SendOpcode::Write, ACCESS_REMOTE_WRITE),
        (SendOpcode::Read, ACCESS_REMOTE_READ),
        (SendOpcode::FetchAdd, ACCESS_REMOTE_ATOMIC),
        (SendOpcode::CompareSwap, ACCESS_REMOTE_ATOMIC),
    ] {
        // Of the region; then of the queue pair.
        for of_region in [true, false] {
            let mut bench = bench();
            let access = if of_region { ALL & !missing } else { ALL };
            let region = bench.pair.b.register(0x301, PD, access, 4096);
            // A multiple of eight, for atomics.
            let address = region.address;
            let work = SendWork::new(opcode, &[bench.a.sge(0, 8)]);
            let work = match opcode {
                SendOpcode::FetchAdd | SendOpcode::CompareSwap => {
                    work.part(&atomic(address, region.tag))
                }
                _ => work.remote(address, region.tag),
            };
            if of_region {
                bench.fails_with(&work, CompletionStatus::RemoteAccess);
            } else {
                bench.pair.b.execute(&ModifyQueuePair {
                    qpn: QPN_B,
                    mask: MODIFY_STATE | MODIFY_ACCESS,
                    state: Rts.number(),
                    access: ACCESS_REMOTE & !missing,
                    ..ModifyQueuePair::zeroed()
                });
                bench.pair.a.post_send(QPN_A, &work);
                bench.pair.run();
                let got = statuses(&bench.pair.completions_a());
                assert_eq!(got, [CompletionStatus::RemoteAccess]);
            }
            let cause = if of_region { 7 } else { 21 };
            let event = (EventCode::QueuePairAccessError, cause);
            assert_eq!(bench.responder_and_causes(), (Error, vec![], vec![event]));
        }
    }
}

#[test]
fn an_atomic_on_a_misaligned_address_is_invalid() {
    let mut bench = bench();
    let part = AtomicPart {
        address: bench.b.address + 4,
        rkey: bench.b.tag,
        operand: 1,
        compare: 0,
        ..AtomicPart::zeroed()
    };
    let work = SendWork::new(SendOpcode::FetchAdd, &[bench.a.sge(0, 8)]).part(&part);
    bench.fails_with(&work, CompletionStatus::RemoteInvalidRequest);
    assert_eq!(
        bench.responder(),
        (Error, vec![], vec![EventCode::QueuePairRequestError])
    );
}

#[test]
fn a_receive_that_is_too_small_fails_at_both_ends() {
    for (room, length) in [(0, 1), (10, 11), (1024, 1025), (2000, 5000)] {
        let mut bench = bench();
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, room)]);
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 10_000)]);
        let work = send(&bench.a, length);
        bench.fails_with(&work, CompletionStatus::RemoteInvalidRequest);
        assert_eq!(
            bench.responder(),
            (Error, vec![CompletionStatus::LocalLength, Flushed], vec![])
        );
    }
}

#[test]
fn a_receive_with_a_wrong_key_fails_at_both_ends() {
    let mut bench = bench();
    bench.pair.b.post_recv(
        QPN_B,
        &[Sge {
            lkey: 0x9901,
            ..bench.b.sge(0, 100)
        }],
    );
    let work = send(&bench.a, 10);
    bench.fails_with(&work, CompletionStatus::RemoteOperation);
    assert_eq!(
        bench.responder(),
        (Error, vec![CompletionStatus::LocalProtection], vec![])
    );
}

/// Programs post receives that are longer than what they expect, past the end of their memory.
#[test]
fn a_receive_is_checked_as_far_as_its_message_goes() {
    let wrong = Sge {
        address: u64::MAX,
        length: 1000,
        lkey: 0x9901,
    };
    // Every bench has the same region.
    let region = bench().b;
    let end = region.length - 100;
    let good = [
        (vec![region.sge(end, 4096)], SendOpcode::Send, 100),
        (vec![region.sge(0, 1500), wrong], SendOpcode::Send, 1500),
        (vec![wrong], SendOpcode::Send, 0),
        (vec![wrong], SendOpcode::WriteImmediate, 100),
    ];
    for (receive, opcode, length) in good {
        let mut bench = bench();
        bench.pair.b.post_recv(QPN_B, &receive);
        let mut work = SendWork::new(opcode, &[bench.a.sge(0, length)]);
        if opcode == SendOpcode::WriteImmediate {
            work = work.remote(bench.b.address, bench.b.tag);
        }
        bench.pair.a.post_send(QPN_A, &work);
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        assert_eq!(bench.responder(), (Rts, vec![Success], vec![]));
    }
    // One byte more, in the same packet: nothing of that packet is placed.
    for receive in [
        vec![region.sge(end, 4096)],
        vec![region.sge(end, 100), wrong],
    ] {
        let mut bench = bench();
        bench.pair.b.fill(&bench.b, end, &[0x5a; 100]);
        bench.pair.a.fill(&bench.a, 0, &[0xa5; 101]);
        bench.pair.b.post_recv(QPN_B, &receive);
        let work = send(&bench.a, 101);
        bench.fails_with(&work, CompletionStatus::RemoteOperation);
        assert_eq!(
            bench.responder(),
            (Error, vec![CompletionStatus::LocalProtection], vec![])
        );
        assert_eq!(bench.pair.b.contents(&bench.b, end, 100), [0x5a; 100]);
    }
}

#[test]
fn a_message_longer_than_allowed_is_refused_before_anything_is_sent() {
    let mut bench = bench();
    let half = Sge {
        address: bench.a.address,
        length: 1 << 30,
        lkey: bench.a.tag,
    };
    let work = SendWork::new(SendOpcode::Send, &[half, half, bench.a.sge(0, 1)]);
    bench.fails_with(&work, CompletionStatus::LocalLength);
    assert_eq!(bench.responder(), (Rts, vec![], vec![]));
}

#[test]
fn a_malformed_work_request_fails_the_queue_pair() {
    let header = |opcode, flags, blocks, sge_count| SendHeader {
        opcode,
        flags,
        blocks,
        sge_count,
        ..SendHeader::zeroed()
    };
    for header in [
        header(0, SEND_SIGNALED, 1, 0),
        header(99, SEND_SIGNALED, 1, 0),
        header(1, 0x80, 1, 0),
        header(1, SEND_SIGNALED, 0, 0),
        header(1, SEND_SIGNALED, 2, 0),
        header(1, SEND_SIGNALED, 1, 3),
        header(1, SEND_SIGNALED, 1, 200),
        // Flags that there are not, fields that are reserved, or not for a reliable connection.
        header(1, SEND_SIGNALED | 0x8000, 1, 0),
        SendHeader {
            reserved: 1,
            ..header(1, SEND_SIGNALED, 1, 0)
        },
        SendHeader {
            reserved_channel: 1 << 31,
            ..header(1, SEND_SIGNALED, 1, 0)
        },
        SendHeader {
            srqn: 1,
            ..header(1, SEND_SIGNALED, 1, 0)
        },
        SendHeader {
            inline_length: 1,
            ..header(1, SEND_SIGNALED, 1, 0)
        },
    ] {
        let mut bench = bench();
        let mut block = [0; BLOCK_SIZE];
        block[..16].copy_from_slice(header.as_bytes());
        bench.pair.a.write_blocks(QPN_A, &block);
        bench.pair.a.publish_send(QPN_A);
        bench.pair.run();
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [CompletionStatus::LocalQueuePairOperation],
            "{header:?}"
        );
        assert_eq!(bench.pair.a.qp_state(QPN_A), Error);
        assert!(bench.pair.a.host.sent.is_empty());
    }
}

#[test]
fn what_a_work_request_does_not_use_is_zero_or_it_fails() {
    // The block of a send: immediate data, the upper half of them, the tag, what is reserved.
    for (opcode, at) in [
        (SendOpcode::Send, 16),
        (SendOpcode::SendImmediate, 20),
        (SendOpcode::Send, 24),
        (SendOpcode::SendImmediate, 24),
        (SendOpcode::SendInvalidate, 16),
        (SendOpcode::Send, 28),
    ] {
        let mut bench = bench();
        let mut block = SendWork::new(opcode, &[bench.a.sge(0, 8)]).encode();
        block[at] = 1;
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 8)]);
        bench.pair.a.write_blocks(QPN_A, &block);
        bench.pair.a.publish_send(QPN_A);
        bench.pair.run();
        let done = bench.pair.completions_a();
        assert_eq!(
            statuses(&done),
            [CompletionStatus::LocalQueuePairOperation],
            "{opcode:?}, byte {at}"
        );
        assert_eq!(done[0].vendor_syndrome, 0x109);
        assert_eq!(bench.responder(), (Rts, vec![], vec![]));
    }
}

#[test]
fn a_receive_with_a_reserved_field_that_is_not_zero_fails_at_both_ends() {
    for at in [4u64, 8, 15] {
        let mut bench = bench();
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 8)]);
        let ring = bench.pair.b.receive_ring(QPN_B);
        let memory = &bench.pair.b.host.memory;
        ferrite_engine::HostMemory::write(memory, ring + at, &[1]).unwrap();
        let work = SendWork::new(SendOpcode::Send, &[bench.a.sge(0, 8)]);
        bench.pair.a.post_send(QPN_A, &work);
        bench.pair.run();
        let failed = bench.pair.completions_b();
        assert_eq!(
            statuses(&failed),
            [CompletionStatus::LocalQueuePairOperation],
            "byte {at}"
        );
        assert_eq!((failed[0].index, failed[0].vendor_syndrome), (0, 0x109));
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [CompletionStatus::RemoteOperation]
        );
        assert_eq!(bench.pair.b.qp_state(QPN_B), Error);
    }
}

#[test]
fn a_receiver_that_becomes_ready_gets_the_message() {
    let mut bench = bench();
    bench.pair.a.fill(&bench.a, 0, &pattern(1, 5000));
    bench.pair.a.post_send(QPN_A, &send(&bench.a, 5000));
    let work = SendWork::new(SendOpcode::WriteImmediate, &[bench.a.sge(0, 5000)])
        .remote(bench.b.address + 6000, bench.b.tag);
    bench.pair.a.post_send(QPN_A, &work);
    for _ in 0..20 {
        bench.pair.exchange();
        bench.pair.pass_time();
    }
    assert_eq!(bench.pair.completions_a(), []);
    let before = bench.pair.b.engine.counters().rnr_naks_sent;
    assert!(before >= 10, "{before}");
    bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 5000)]);
    for _ in 0..20 {
        bench.pair.exchange();
        bench.pair.pass_time();
    }
    // The write waits for a receive with its last packet, and continues there.
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    bench.pair.b.post_recv(QPN_B, &[]);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(statuses(&bench.pair.completions_b()), [Success; 2]);
    assert_eq!(bench.pair.b.contents(&bench.b, 0, 5000), pattern(1, 5000));
    assert_eq!(
        bench.pair.b.contents(&bench.b, 6000, 5000),
        pattern(1, 5000)
    );
}

#[test]
fn a_receiver_that_never_becomes_ready_is_given_up_on() {
    for rnr_retry in [0, 1, 6] {
        let mut bench = bench_with(Setup {
            rnr_retry,
            ..Setup::default()
        });
        let work = send(&bench.a, 2000);
        bench.fails_with(&work, CompletionStatus::RnrRetryExceeded);
        assert_eq!(
            bench.pair.b.engine.counters().rnr_naks_sent,
            u64::from(rnr_retry) + 1
        );
        assert_eq!(bench.responder(), (Rts, vec![], vec![]));
    }
}

#[test]
fn receiver_not_ready_delays_are_those_asked_for() {
    let mut bench = bench();
    bench.pair.a.post_send(QPN_A, &send(&bench.a, 10));
    bench.pair.exchange();
    let next = bench.pair.a.engine.next_timeout().unwrap();
    // Code 1 is 0.01 ms.
    assert_eq!(next - bench.pair.a.now, 10_000);
}

#[test]
fn a_peer_that_is_gone_is_given_up_on() {
    // One wait, two, and then four at a time.
    for (retry_count, waits) in [(0, 1), (1, 3), (3, 11), (7, 27)] {
        let mut bench = bench_with(Setup {
            retry_count,
            ..Setup::default()
        });
        let start = bench.pair.a.now;
        bench.pair.a.post_send(
            QPN_A,
            &write(bench.a.sge(0, 10), bench.b.address, bench.b.tag),
        );
        let mut sent = 0;
        bench.pair.run_with(|_, _| {
            sent += 1;
            vec![]
        });
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [CompletionStatus::RetryExceeded]
        );
        assert_eq!(bench.pair.a.qp_state(QPN_A), Error);
        assert_eq!(sent, u32::from(retry_count) + 1);
        // 4.096 us << 10 for each.
        let waited = bench.pair.a.now - start;
        assert_eq!(waited, (4096 << 10) * waits);
        assert_eq!(
            bench.pair.a.engine.counters().ack_timeouts,
            u64::from(retry_count) + 1
        );
    }
}

#[test]
fn a_wait_is_longer_after_timeouts_and_not_after_naks() {
    let mut bench = bench();
    bench.pair.a.post_send(
        QPN_A,
        &write(bench.a.sge(0, 5000), bench.b.address, bench.b.tag),
    );
    // The first packet is lost, and the peer says so; what is sent again is lost too.
    let (mut requests, mut naks) = (0, 0);
    bench.pair.exchange_with(|way, frame| match way {
        Way::AToB => {
            requests += 1;
            let arrives = (2..=5).contains(&requests);
            arrives.then_some(frame).into_iter().collect()
        }
        Way::BToA => {
            naks += 1;
            vec![frame]
        }
    });
    assert_eq!((requests, naks), (10, 1));
    let once = 4096 << 10;
    for waits in [1, 2, 4, 4] {
        let next = bench.pair.a.engine.next_timeout().unwrap();
        assert_eq!(next - bench.pair.a.now, once * waits);
        assert!(bench.pair.pass_time());
        bench.pair.exchange_with(|_, _| vec![]);
    }
}

#[test]
fn retries_that_were_changed_while_it_was_drained_count_from_then_on() {
    for (before, after) in [(0, 3), (3, 0), (7, 1)] {
        let mut bench = bench_with(Setup {
            retry_count: before,
            ..Setup::default()
        });
        let a = &mut bench.pair.a;
        assert_eq!(
            a.set_state(QPN_A, QueuePairStateCode::Sqd),
            CommandStatus::Ok
        );
        a.execute(&ModifyQueuePair {
            qpn: QPN_A,
            mask: MODIFY_RETRY,
            retry_count: after,
            ..ModifyQueuePair::zeroed()
        });
        assert_eq!(a.set_state(QPN_A, Rts), CommandStatus::Ok);
        let start = a.now;
        a.post_send(
            QPN_A,
            &write(bench.a.sge(0, 10), bench.b.address, bench.b.tag),
        );
        let mut sent = 0;
        bench.pair.run_with(|_, _| {
            sent += 1;
            vec![]
        });
        assert_eq!(sent, after + 1);
        let waits = [1, 3, 7, 11][usize::from(after)];
        assert_eq!(bench.pair.a.now - start, (4096 << 10) * waits);
    }
}

#[test]
fn without_a_timeout_the_requester_waits_for_ever() {
    let mut bench = bench_with(Setup {
        timeout: 0,
        ..Setup::default()
    });
    bench.pair.a.post_send(
        QPN_A,
        &write(bench.a.sge(0, 10), bench.b.address, bench.b.tag),
    );
    bench.pair.run_with(|_, _| vec![]);
    assert_eq!(bench.pair.completions_a(), []);
    assert_eq!(bench.pair.a.engine.next_timeout(), None);
}

#[test]
fn other_queue_pairs_go_on_after_one_failed_and_it_can_be_used_again() {
    let setup = Setup::default();
    let mut bench = bench_with(setup);
    let (other_a, other_b) = (0x31, 0x32);
    let options = |qpn| QpOptions {
        qpn,
        pd: PD,
        ..QpOptions::default()
    };
    bench.pair.a.create_qp(options(other_a));
    bench.pair.b.create_qp(options(other_b));
    let to_b = bench.pair.b.as_peer(other_b);
    let to_a = bench.pair.a.as_peer(other_a);
    bench.pair.a.connect(other_a, &to_b);
    bench.pair.b.connect(other_b, &to_a);
    let good = write(bench.a.sge(0, 3000), bench.b.address, bench.b.tag);
    bench.fails_with(
        &write(bench.a.sge(0, 3000), bench.b.address, 0x9901),
        CompletionStatus::RemoteAccess,
    );
    bench.pair.a.post_send(other_a, &good);
    bench.pair.run();
    let done = bench.pair.completions_a();
    assert_eq!(statuses(&done), [Success]);
    assert_eq!(done[0].qpn, other_a);
    // The failed pair, from RESET, with other sequence numbers.
    bench.responder();
    for (node, qpn) in [(&mut bench.pair.a, QPN_A), (&mut bench.pair.b, QPN_B)] {
        let reset = node.set_state(qpn, QueuePairStateCode::Reset);
        assert_eq!(reset, CommandStatus::Ok);
    }
    let setup = Setup {
        psn_a: 77,
        psn_b: 99,
        ..setup
    };
    let (to_b, to_a) = (bench.pair.peer_of_a(setup), bench.pair.peer_of_b(setup));
    bench.pair.a.connect(QPN_A, &to_b);
    bench.pair.b.connect(QPN_B, &to_a);
    bench.pair.a.post_send(QPN_A, &good);
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
}

#[test]
fn posts_to_a_failed_queue_pair_are_flushed() {
    let mut bench = bench();
    assert_eq!(bench.pair.a.set_state(QPN_A, Error), CommandStatus::Ok);
    bench.pair.a.post_recv(QPN_A, &[]);
    bench.pair.a.post_send(QPN_A, &send(&bench.a, 10));
    assert_eq!(statuses(&bench.pair.completions_a()), [Flushed; 2]);
}

#[test]
fn reads_before_a_refused_request_are_answered_first() {
    let mut bench = bench();
    bench.pair.b.fill(&bench.b, 0, &pattern(2, 9000));
    let read = SendWork::new(SendOpcode::Read, &[bench.a.sge(0, 9000)])
        .remote(bench.b.address, bench.b.tag);
    bench.pair.a.post_send(QPN_A, &read);
    bench
        .pair
        .a
        .post_send(QPN_A, &write(bench.a.sge(0, 10), bench.b.address, 0x9901));
    bench.pair.run();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [Success, CompletionStatus::RemoteAccess]
    );
    assert_eq!(bench.pair.a.contents(&bench.a, 0, 9000), pattern(2, 9000));
}

#[test]
fn a_gap_is_reported_once_and_a_repeated_request_is_acknowledged_again() {
    use ferrite_engine::roce::NakCode;
    let mut bench = bench();
    let psn = Setup::default().psn_a;
    let a = Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B);
    for _ in 0..4 {
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 100)]);
    }
    let b = &mut bench.pair.b;
    let packet = |n| a.packet(Opcode::RC_SEND_ONLY, psn_add(psn, n), b"data");
    let ack = |n| (Syndrome::Ack(31), psn_add(psn, n));
    let nak = |n| (Syndrome::Nak(NakCode::Sequence), psn_add(psn, n));
    b.receive(&packet(0));
    assert_eq!(acknowledgements(b), [ack(0)]);
    b.receive(&packet(2));
    b.receive(&packet(3));
    assert_eq!(acknowledgements(b), [nak(1)]);
    b.receive(&packet(4));
    assert_eq!(acknowledgements(b), []);
    b.receive(&packet(1));
    b.receive(&packet(2));
    // Together, so one acknowledgement does.
    assert_eq!(acknowledgements(b), [ack(2)]);
    b.receive(&packet(0));
    assert_eq!(acknowledgements(b), [ack(2)]);
    b.receive(&packet(4));
    assert_eq!(acknowledgements(b), [nak(3)]);
    assert_eq!(b.engine.counters().duplicate_requests, 1);
    assert_eq!(drain(b).len(), 3);
}

#[test]
fn a_sequence_of_packets_that_makes_no_message_is_invalid() {
    use ferrite_engine::roce::NakCode;
    let full = vec![7; 1024];
    let reth = |length| {
        Reth {
            address: 0,
            rkey: 0x9901,
            length,
        }
        .to_bytes()
        .to_vec()
    };
    let cases: [&[(u8, Vec<u8>)]; 9] = [
        &[(Opcode::RC_SEND_MIDDLE, full.clone())],
        &[(Opcode::RC_SEND_LAST, full.clone())],
        &[(Opcode::RC_WRITE_LAST, full.clone())],
        &[(Opcode::RC_SEND_FIRST, full[1..].to_vec())],
        &[(Opcode::RC_SEND_ONLY, [full.clone(), vec![1]].concat())],
        &[
            (Opcode::RC_SEND_FIRST, full.clone()),
            (Opcode::RC_SEND_FIRST, full.clone()),
        ],
        &[
            (Opcode::RC_SEND_FIRST, full.clone()),
            (Opcode::RC_WRITE_MIDDLE, full.clone()),
        ],
        &[
            (Opcode::RC_SEND_FIRST, full.clone()),
            (Opcode::RC_READ_REQUEST, reth(4)),
        ],
        &[(0x15, vec![])],
    ];
    for packets in cases {
        let mut bench = bench();
        bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 8192)]);
        let a = Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B);
        let psn = Setup::default().psn_a;
        for (n, (opcode, rest)) in packets.iter().enumerate() {
            let psn = psn_add(psn, n as u32);
            bench.pair.b.receive(&a.packet(*opcode, psn, rest));
        }
        let last = acknowledgements(&mut bench.pair.b).pop().unwrap();
        assert_eq!(last.0, Syndrome::Nak(NakCode::InvalidRequest));
        assert_eq!(
            bench.responder(),
            (Error, vec![Flushed], vec![EventCode::QueuePairRequestError])
        );
    }
}

#[test]
fn a_write_that_is_longer_or_shorter_than_announced_is_invalid() {
    use ferrite_engine::roce::NakCode;
    for (announced, opcode, length) in [
        (9, Opcode::RC_WRITE_ONLY, 10),
        (11, Opcode::RC_WRITE_ONLY, 10),
        (1024, Opcode::RC_WRITE_FIRST, 1024),
    ] {
        let mut bench = bench();
        let a = Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B);
        let reth = Reth {
            address: bench.b.address,
            rkey: bench.b.tag,
            length: announced,
        };
        let mut rest = reth.to_bytes().to_vec();
        rest.resize(rest.len() + length, 9);
        let psn = Setup::default().psn_a;
        bench.pair.b.receive(&a.packet(opcode, psn, &rest));
        assert_eq!(
            acknowledgements(&mut bench.pair.b),
            [(Syndrome::Nak(NakCode::InvalidRequest), psn)]
        );
    }
}

#[test]
fn packets_that_are_not_of_the_connection_are_dropped() {
    let mut bench = bench();
    bench.pair.b.post_recv(QPN_B, &[bench.b.sge(0, 100)]);
    let psn = Setup::default().psn_a;
    let a = Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B);
    let stranger = Impostor::new(&Node::power_on(3), &bench.pair.b, QPN_B);
    let frames = [
        stranger.packet(Opcode::RC_SEND_ONLY, psn, b"data"),
        a.packet_with(b"data", |bth| {
            bth.psn = psn;
            bth.pkey = 0x1234;
        }),
        a.packet_with(b"data", |bth| {
            bth.psn = psn;
            bth.version = 1;
        }),
        a.packet(Opcode::UC_SEND_ONLY, psn, b"data"),
        // An acknowledgement of what was never sent.
        a.packet(
            Opcode::RC_ACKNOWLEDGE,
            Setup::default().psn_b,
            &Aeth {
                syndrome: Syndrome::Ack(31),
                msn: 1,
            }
            .to_bytes(),
        ),
    ];
    let count = frames.len() as u64;
    for frame in frames {
        bench.pair.b.receive(&frame);
    }
    assert_eq!(acknowledgements(&mut bench.pair.b), []);
    assert_eq!(bench.pair.b.engine.counters().rx_dropped, count);
    assert_eq!(bench.responder(), (Rts, vec![], vec![]));
    // With the right things in it, it is taken.
    bench
        .pair
        .b
        .receive(&a.packet(Opcode::RC_SEND_ONLY, psn, b"data"));
    assert_eq!(bench.responder(), (Rts, vec![Success], vec![]));
}

#[test]
fn a_queue_pair_that_is_not_ready_to_receive_drops_packets() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(setup);
    pair.b.to_init(QPN_B);
    let a = Impostor::new(&pair.a, &pair.b, QPN_B);
    pair.b
        .receive(&a.packet(Opcode::RC_SEND_ONLY, setup.psn_a, b"data"));
    assert_eq!(acknowledgements(&mut pair.b), []);
    assert_eq!(pair.b.engine.counters().rx_dropped, 1);
}

#[test]
fn an_answer_that_makes_no_sense_fails_the_request() {
    let psn = Setup::default().psn_a;
    let aeth = Aeth {
        syndrome: Syndrome::Ack(31),
        msn: 1,
    }
    .to_bytes();
    let reserved = Aeth {
        syndrome: Syndrome::Reserved(0x47),
        msn: 1,
    }
    .to_bytes();
    let with = |header: &[u8], rest: usize| [header, &vec![1; rest]].concat();
    let cases: [(bool, Vec<u8>, u8); 6] = [
        // A read of 100 bytes answered with too few, too many, an atomic's result.
        (true, with(&aeth, 99), Opcode::RC_READ_RESPONSE_ONLY),
        (true, with(&aeth, 101), Opcode::RC_READ_RESPONSE_ONLY),
        (true, with(&aeth, 8), Opcode::RC_ATOMIC_ACKNOWLEDGE),
        (true, with(&reserved, 100), Opcode::RC_READ_RESPONSE_ONLY),
        // A write answered with data, or with a syndrome that does not exist.
        (false, with(&aeth, 100), Opcode::RC_READ_RESPONSE_ONLY),
        (false, with(&reserved, 0), Opcode::RC_ACKNOWLEDGE),
    ];
    for (read, rest, opcode) in cases {
        let mut bench = bench();
        let opcode_posted = if read {
            SendOpcode::Read
        } else {
            SendOpcode::Write
        };
        let work = SendWork::new(opcode_posted, &[bench.a.sge(0, 100)])
            .remote(bench.b.address, bench.b.tag);
        bench.pair.a.post_send(QPN_A, &work);
        bench.pair.a.settle();
        let b = Impostor::new(&bench.pair.b, &bench.pair.a, QPN_A);
        bench.pair.a.receive(&b.packet(opcode, psn, &rest));
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [CompletionStatus::BadResponse]
        );
        assert_eq!(bench.pair.a.qp_state(QPN_A), Error);
    }
}

#[test]
fn more_reads_than_agreed_are_invalid() {
    use ferrite_engine::roce::NakCode;
    let mut bench = bench();
    let a = Impostor::new(&bench.pair.a, &bench.pair.b, QPN_B);
    let psn = Setup::default().psn_a;
    let reth = Reth {
        address: bench.b.address,
        rkey: bench.b.tag,
        length: 8,
    };
    for n in 0..17 {
        let frame = a.packet(Opcode::RC_READ_REQUEST, psn_add(psn, n), &reth.to_bytes());
        bench.pair.b.receive(&frame);
    }
    let answers = acknowledgements(&mut bench.pair.b);
    assert_eq!(answers.len(), 17);
    assert_eq!(
        answers[16],
        (Syndrome::Nak(NakCode::InvalidRequest), psn_add(psn, 16))
    );
}

#[test]
fn a_region_revoked_while_it_is_read_is_touched_no_more() {
    let mut bench = bench();
    let big = bench.pair.b.register(0x301, PD, ALL, 1 << 20);
    let to = bench.pair.a.register(0x401, PD, ALL, 1 << 20);
    let work = SendWork::new(SendOpcode::Read, &[to.sge(0, 1 << 20)]).remote(big.address, big.tag);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.a.settle();
    for frame in std::mem::take(&mut bench.pair.a.host.sent) {
        bench.pair.b.receive(&frame);
    }
    // One burst, then the tag is released.
    bench
        .pair
        .b
        .engine
        .poll(bench.pair.b.now, &mut bench.pair.b.host);
    let sent = bench.pair.b.host.sent.len();
    assert!(sent < 200, "{sent}");
    let released = bench
        .pair
        .b
        .object_command(CommandOpcode::ReleaseTag, big.tag);
    assert_eq!(released, CommandStatus::Ok);
    bench.pair.run();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [CompletionStatus::RemoteAccess]
    );
}

#[test]
fn a_record_that_is_gone_completes_no_receive_that_nobody_posted() {
    let mut bench = bench();
    // Not that of the send queue, which fails before anything comes.
    let producer = offset_of!(QueuePairRecord, receive_producer) as u64;
    let producer = bench.pair.b.qp_record(QPN_B) + producer;
    bench.pair.b.host.memory.take_away(producer..producer + 4);
    let work = SendWork::new(SendOpcode::Send, &[bench.a.sge(0, 10)]);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.run();
    let got = statuses(&bench.pair.completions_a());
    assert_eq!(got, [CompletionStatus::RemoteOperation]);
    let fatal = vec![EventCode::QueuePairFatal];
    assert_eq!(bench.responder(), (Error, vec![], fatal));
}
