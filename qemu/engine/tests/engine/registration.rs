// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Registrations through the send queue that fail, on queue pairs where that only stops the queue.

use crate::wire::*;
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::testing::{QpOptions, Region, SendWork};
use ferrite_engine::HostMemory;
use CompletionStatus::{Flushed, LocalProtection, Success};

const INDEX: u32 = 0x30;

fn setup(flags: u16) -> Setup {
    Setup {
        flags: QP_FLAG_FAST_REGISTER | flags,
        ..Setup::default()
    }
}

struct Bench {
    pair: Pair,
    page: u64,
    /// Memory of `b`, and of `a` for work that needs no registration.
    to: Region,
    from: Region,
}

fn bench(flags: u16) -> Bench {
    let mut pair = Pair::new(setup(flags));
    let from = pair.a.register(0x101, PD, ALL, 8192);
    let to = pair.b.register(0x201, PD, ALL, 8192);
    let page = pair.a.allocate(8192);
    pair.a.execute(&AllocateTag {
        tag: Tag::new(INDEX, 0).0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    Bench {
        pair,
        page,
        to,
        from,
    }
}

impl Bench {
    /// A registration of so many bytes; only a page is allowed.
    fn register(&self, length: u64) -> SendWork {
        SendWork::new(SendOpcode::FastRegister, &[]).part(&FastRegisterPart {
            tag: Tag::new(INDEX, 1).0,
            access: ALL,
            address: 0x5000,
            buffer: Buffer::contiguous(self.page, length),
            reserved: 0,
        })
    }

    /// A write from what is registered so.
    fn write(&self) -> SendWork {
        let sge = Sge {
            address: 0x5000,
            length: 100,
            lkey: Tag::new(INDEX, 1).0,
        };
        SendWork::new(SendOpcode::Write, &[sge]).remote(self.to.address, self.to.tag)
    }

    fn plain_write(&self) -> SendWork {
        SendWork::new(SendOpcode::Write, &[self.from.sge(0, 5000)])
            .remote(self.to.address, self.to.tag)
    }

    /// Posts all at once, and returns what became of it.
    fn run(&mut self, work: &[SendWork]) -> Vec<CompletionStatus> {
        for work in work {
            self.pair.a.write_blocks(QPN_A, &work.encode());
        }
        self.pair.a.publish_send(QPN_A);
        self.pair.exchange();
        statuses(&self.pair.completions_a())
    }
}

#[test]
fn a_failed_registration_stops_the_queue_and_can_be_tried_again() {
    let mut bench = bench(QP_FLAG_FAST_REGISTER_DRAINS);
    let unsignaled = bench.write().flags(0);
    let work = [
        bench.plain_write(),
        bench.register(8192),
        bench.write(),
        unsignaled,
        bench.plain_write(),
    ];
    for work in &work {
        bench.pair.a.write_blocks(QPN_A, &work.encode());
    }
    bench.pair.a.publish_send(QPN_A);
    bench.pair.exchange();
    let done = bench.pair.completions_a();
    assert_eq!(
        statuses(&done),
        [Success, LocalProtection, Flushed, Flushed, Flushed]
    );
    assert_eq!(done[1].opcode, CompletionOpcode::FastRegister.number());
    assert_eq!(done[1].vendor_syndrome, 9);
    assert_eq!(bench.pair.a.qp_state(QPN_A), State::Sqd);
    assert_eq!(
        bench.pair.a.event_codes(EQ_ASYNC),
        [(EventCode::SendQueueDrained, QPN_A)]
    );

    // What comes late is flushed too; and the peer notices nothing.
    let late = bench.write();
    assert_eq!(bench.run(&[late]), [Flushed]);
    let back = SendWork::new(SendOpcode::Write, &[bench.to.sge(0, 3000)])
        .remote(bench.from.address, bench.from.tag);
    bench.pair.b.post_send(QPN_B, &back);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);

    // Posted and not yet seen by the device when it is told to go on: flushed.
    let record = bench.pair.a.qp_record(QPN_A);
    bench.pair.a.write_blocks(QPN_A, &bench.write().encode());
    let producer = bench.pair.a.record(QPN_A).send_producer;
    bench
        .pair
        .a
        .host
        .memory
        .put(record, &producer.wrapping_add(1));
    assert_eq!(bench.pair.a.set_state(QPN_A, State::Rts), CommandStatus::Ok);
    assert_eq!(statuses(&bench.pair.completions_a()), [Flushed]);

    let again = [bench.register(4096), bench.write(), bench.plain_write()];
    let data = pattern(8, 100);
    bench.pair.a.host.memory.write(bench.page, &data).unwrap();
    assert_eq!(bench.run(&again[..2]), [Success; 2]);
    assert_eq!(bench.pair.b.contents(&bench.to, 0, 100), data);
    assert_eq!(bench.run(&again[2..]), [Success]);
    assert!(bench.pair.a.event_codes(EQ_ASYNC).is_empty());
    assert_eq!(bench.pair.a.qp_state(QPN_A), State::Rts);
}

#[test]
fn it_stops_again_and_again_over_a_bad_wire() {
    let mut bench = bench(QP_FLAG_FAST_REGISTER_DRAINS);
    for round in 0..20 {
        let work = [
            bench.plain_write(),
            bench.plain_write(),
            bench.register(8192),
            bench.write(),
        ];
        for work in &work {
            bench.pair.a.write_blocks(QPN_A, &work.encode());
        }
        bench.pair.a.publish_send(QPN_A);
        let mut n = round;
        bench.pair.run_with(|_, frame| {
            n += 1;
            if n % 5 == 0 {
                vec![]
            } else {
                vec![frame]
            }
        });
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [Success, Success, LocalProtection, Flushed]
        );
        assert_eq!(
            bench.pair.a.event_codes(EQ_ASYNC),
            [(EventCode::SendQueueDrained, QPN_A)]
        );
        assert_eq!(bench.pair.a.set_state(QPN_A, State::Rts), CommandStatus::Ok);
    }
}

#[test]
fn an_unreliable_connection_stops_likewise() {
    let mut bench = bench(QP_FLAG_FAST_REGISTER_DRAINS);
    let qpn = 0x31;
    bench.pair.a.create_qp(QpOptions {
        qpn,
        pd: PD,
        service: Service::Uc,
        flags: QP_FLAG_FAST_REGISTER | QP_FLAG_FAST_REGISTER_DRAINS,
        ..QpOptions::default()
    });
    let peer = bench.pair.b.as_peer(0x32);
    bench.pair.a.connect_unreliable(qpn, &peer);
    for work in [bench.register(8192), bench.write()] {
        bench.pair.a.write_blocks(qpn, &work.encode());
    }
    bench.pair.a.publish_send(qpn);
    bench.pair.exchange();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [LocalProtection, Flushed]
    );
    assert_eq!(bench.pair.a.qp_state(qpn), State::Sqd);
    let told = bench.pair.a.set_state(qpn, State::Rts);
    assert_eq!(told, CommandStatus::Ok);
    let again = bench.register(4096);
    bench.pair.a.post_send(qpn, &again);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
}

#[test]
fn what_is_under_way_when_a_region_is_replaced_is_refused() {
    // Of eight packets three have come; the rest must reach neither the old nor the new memory.
    let mut bench = bench(0);
    bench.pair.a.fill(&bench.from, 0, &pattern(2, 8192));
    let write = SendWork::new(SendOpcode::Write, &[bench.from.sge(0, 8192)])
        .remote(bench.to.address, bench.to.tag);
    bench.pair.a.post_send(QPN_A, &write);
    bench.pair.a.settle();
    let frames: Vec<_> = std::mem::take(&mut bench.pair.a.host.sent).into();
    assert_eq!(frames.len(), 8);
    for frame in &frames[..3] {
        bench.pair.b.receive(frame);
    }
    let fresh = bench.pair.b.allocate(8192);
    bench.pair.b.execute(&RegisterRegion {
        tag: bench.to.tag,
        pd: PD,
        access: ALL,
        flags: REGION_REPLACE,
        address: bench.to.address,
        buffer: Buffer::contiguous(fresh, 8192),
    });
    for frame in &frames[3..] {
        bench.pair.b.receive(frame);
    }
    bench.pair.exchange();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [CompletionStatus::RemoteAccess]
    );
    let old = bench.pair.b.contents(&bench.to, 0, 8192);
    assert_eq!(old[..3072], pattern(2, 3072));
    assert_eq!(old[3072..], [0; 5120]);
    let mut new = [0xff; 8192];
    bench.pair.b.host.memory.read(fresh, &mut new).unwrap();
    assert_eq!(new, [0; 8192]);
}

#[test]
fn without_the_flag_it_fails_the_queue_pair() {
    let mut bench = bench(0);
    let work = [bench.register(8192), bench.write()];
    assert_eq!(bench.run(&work), [LocalProtection, Flushed]);
    assert_eq!(bench.pair.a.qp_state(QPN_A), State::Error);
}

#[test]
fn other_failures_fail_the_queue_pair_all_the_same() {
    let mut bench = bench(QP_FLAG_FAST_REGISTER_DRAINS);
    let work = [bench.write(), bench.plain_write()];
    assert_eq!(bench.run(&work), [LocalProtection, Flushed]);
    assert_eq!(bench.pair.a.qp_state(QPN_A), State::Error);
}

#[test]
fn a_stopped_queue_pair_can_be_failed_or_reset() {
    for state in [State::Error, State::Reset] {
        let mut bench = bench(QP_FLAG_FAST_REGISTER_DRAINS);
        let work = [bench.register(8192)];
        assert_eq!(bench.run(&work), [LocalProtection]);
        assert_eq!(bench.pair.a.set_state(QPN_A, state), CommandStatus::Ok);
        assert_eq!(bench.pair.a.qp_state(QPN_A), state);
        if state == State::Reset {
            let peer = bench.pair.peer_of_a(setup(0));
            bench.pair.a.connect(QPN_A, &peer);
            let work = [bench.register(4096)];
            assert_eq!(bench.run(&work), [Success]);
        }
    }
}
