// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Lists of pieces of regions, registered through the send queue, and registrations that send: as
//! two machines see them.

use crate::wire::*;
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use ferrite_engine::{memory, HostMemory, FEATURES};
use CompletionStatus::{
    Flushed, LocalProtection, LocalQueuePairOperation, RemoteAccess, RemoteOperation, Success,
    WindowBind,
};

const LIST: u32 = 0x40;
const FAST: u32 = 0x41;
const ADDRESS: u64 = 0x7_0000;
const BOTH: u16 = QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS;
const DRAINS: u16 = QP_FLAG_FAST_REGISTER_DRAINS;

fn setup(flags: u16) -> Setup {
    Setup {
        flags,
        ..Setup::default()
    }
}

/// Machine `a` has two regions and a list tag, `b` one region.
struct Bench {
    pair: Pair,
    first: Region,
    second: Region,
    far: Region,
    page: u64,
}

fn bench(flags: u16) -> Bench {
    let mut pair = Pair::new(setup(flags));
    let first = pair.a.register(0x101, PD, ALL, 8192);
    let second = pair.a.register(0x201, PD, ALL, 8192);
    let far = pair.b.register(0x301, PD, ALL, 1 << 16);
    let page = pair.a.allocate(8192);
    for (index, kind, max_pages) in [(LIST, TagKind::List, 4), (FAST, TagKind::Region, 1)] {
        pair.a.execute(&AllocateTag {
            tag: Tag::new(index, 0).0,
            pd: PD,
            kind: kind.number(),
            reserved: [0; 3],
            max_pages,
        });
    }
    Bench {
        pair,
        first,
        second,
        far,
        page,
    }
}

fn list_tag(instance: u8) -> u32 {
    Tag::new(LIST, instance).0
}

fn fast_tag(instance: u8) -> u32 {
    Tag::new(FAST, instance).0
}

fn list_part(instance: u8, pieces: usize) -> ListPart {
    ListPart {
        tag: list_tag(instance),
        access: ALL,
        address: ADDRESS,
        pieces: pieces as u8,
        ..ListPart::zeroed()
    }
}

fn list_sge(instance: u8, offset: u64, length: u32) -> Sge {
    Sge {
        address: ADDRESS + offset,
        length,
        lkey: list_tag(instance),
    }
}

fn register(instance: u8, pieces: &[Sge]) -> SendWork {
    SendWork::new(SendOpcode::RegisterList, pieces).part(&list_part(instance, pieces.len()))
}

/// A registration of pieces, and a send of these entries.
fn register_and_send(instance: u8, pieces: &[Sge], data: &[Sge]) -> SendWork {
    let sges = [pieces, data].concat();
    SendWork::new(SendOpcode::RegisterListSend, &sges).part(&list_part(instance, pieces.len()))
}

impl Bench {
    /// 3000 bytes of the second region, then 2000 of the first.
    fn pieces(&self) -> [Sge; 2] {
        [self.second.sge(100, 3000), self.first.sge(4000, 2000)]
    }

    fn fast_part(&self, instance: u8, length: u64) -> FastRegisterPart {
        FastRegisterPart {
            tag: fast_tag(instance),
            access: ALL,
            address: 0x5000,
            buffer: Buffer::contiguous(self.page, length),
            reserved: 0,
        }
    }

    fn post(&mut self, work: &[SendWork]) {
        for work in work {
            self.pair.a.write_blocks(QPN_A, &work.encode());
        }
        self.pair.a.publish_send(QPN_A);
    }

    /// Posts all at once, and returns what became of it.
    fn run(&mut self, work: &[SendWork]) -> Vec<CompletionStatus> {
        self.post(work);
        self.pair.exchange();
        statuses(&self.pair.completions_a())
    }

    /// What becomes of work of the other machine.
    fn far_run(&mut self, work: &SendWork) -> Vec<CompletionStatus> {
        self.pair.b.post_send(QPN_B, work);
        self.pair.exchange();
        statuses(&self.pair.completions_b())
    }

    fn far_write(&self, instance: u8, offset: u64, length: u32) -> SendWork {
        SendWork::new(SendOpcode::Write, &[self.far.sge(0, length)])
            .remote(ADDRESS + offset, list_tag(instance))
    }

    /// What a read of machine `a` into these entries becomes.
    fn read_into(&mut self, sges: &[Sge]) -> Vec<CompletionStatus> {
        let read = SendWork::new(SendOpcode::Read, sges).remote(self.far.address, self.far.tag);
        self.run(&[read])
    }

    /// Whether the peer may write to a region, with a connection that is as before.
    fn far_may_write(&mut self, region: &Region) -> bool {
        let write = SendWork::new(SendOpcode::Write, &[self.far.sge(0, 8)])
            .remote(region.address, region.tag);
        let done = self.far_run(&write);
        if done == [Success] {
            return true;
        }
        assert_eq!(done, [RemoteAccess]);
        self.pair.completions_a();
        for (node, qpn) in [(&mut self.pair.a, QPN_A), (&mut self.pair.b, QPN_B)] {
            assert_eq!(node.set_state(qpn, State::Reset), CommandStatus::Ok);
        }
        self.pair.connect(setup(QP_FLAG_LISTS));
        false
    }

    fn release(&mut self, region: &Region) {
        let released = self
            .pair
            .a
            .object_command(CommandOpcode::ReleaseTag, region.tag);
        assert_eq!(released, CommandStatus::Ok);
    }

    /// The frames that machine `b` has to send now.
    fn far_frames(&mut self) -> Vec<Vec<u8>> {
        self.pair.b.settle();
        std::mem::take(&mut self.pair.b.host.sent).into()
    }

    fn count(&self, name: &str) -> u64 {
        let at = COUNTER_NAMES.iter().position(|other| *other == name);
        self.pair.a.engine.counters().named()[at.expect("a counter")]
    }
}

#[test]
fn a_peer_writes_and_reads_a_list_over_the_borders_of_its_pieces_and_packets() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    let data = pattern(3, 5000);
    let far = bench.far.clone();
    bench.pair.b.fill(&far, 0, &data);
    let write = bench.far_write(1, 0, 5000);
    assert_eq!(bench.far_run(&write), [Success]);
    let a = &bench.pair.a;
    assert_eq!(a.contents(&bench.second, 100, 3000), data[..3000]);
    assert_eq!(a.contents(&bench.first, 4000, 2000), data[3000..]);
    assert_eq!(a.contents(&bench.second, 0, 100), [0; 100]);
    assert_eq!(a.contents(&bench.second, 3100, 5092), [0; 5092]);
    assert_eq!(a.contents(&bench.first, 6000, 2192), [0; 2192]);
    let read = SendWork::new(SendOpcode::Read, &[far.sge(10_000, 4001)])
        .remote(ADDRESS + 999, list_tag(1));
    assert_eq!(bench.far_run(&read), [Success]);
    assert_eq!(bench.pair.b.contents(&far, 10_000, 4001), data[999..]);
    assert_eq!(bench.count("sq_registrations"), 1);
    assert_eq!(bench.count("early_uses"), 0);
}

#[test]
fn a_list_sends_and_receives_like_a_region() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    let data = pattern(5, 5000);
    let (first, second, far) = (bench.first.clone(), bench.second.clone(), bench.far.clone());
    bench.pair.a.fill(&second, 100, &data[..3000]);
    bench.pair.a.fill(&first, 4000, &data[3000..]);
    bench.pair.b.post_recv(QPN_B, &[far.sge(0, 5000)]);
    let send = SendWork::new(SendOpcode::Send, &[list_sge(1, 0, 5000)]);
    assert_eq!(bench.run(&[register(1, &pieces), send]), [Success; 2]);
    bench.pair.completions_b();
    assert_eq!(bench.pair.b.contents(&far, 0, 5000), data);
    // And what is read lands there, as does what is received.
    let fresh = pattern(6, 5000);
    bench.pair.b.fill(&far, 0, &fresh);
    let read =
        SendWork::new(SendOpcode::Read, &[list_sge(1, 2990, 20)]).remote(far.address, far.tag);
    assert_eq!(bench.run(&[read]), [Success]);
    assert_eq!(bench.pair.a.contents(&second, 3090, 10), fresh[..10]);
    assert_eq!(bench.pair.a.contents(&first, 4000, 10), fresh[10..20]);
    bench.pair.a.post_recv(QPN_A, &[list_sge(1, 0, 5000)]);
    assert_eq!(bench.far_run(&send_of(&far, 5000)), [Success]);
    assert_eq!(bench.pair.a.contents(&second, 100, 3000), fresh[..3000]);
    assert_eq!(bench.pair.a.contents(&first, 4000, 2000), fresh[3000..]);
}

fn send_of(region: &Region, length: u32) -> SendWork {
    SendWork::new(SendOpcode::Send, &[region.sge(0, length)])
}

#[test]
fn the_tag_is_used_before_the_registration_is_complete_and_that_is_counted() {
    let mut bench = bench(BOTH);
    let pieces = bench.pieces();
    let far = bench.far.clone();
    let write = |sge| SendWork::new(SendOpcode::Write, &[sge]).remote(far.address, far.tag);
    let fast = SendWork::new(SendOpcode::FastRegister, &[]).part(&bench.fast_part(1, 4096));
    let fast_sge = Sge {
        address: 0x5000,
        length: 64,
        lkey: fast_tag(1),
    };
    let data = pattern(8, 64);
    bench.pair.a.host.memory.write(bench.page, &data).unwrap();
    // What stands before them is on its way: its answer has not come.
    bench.post(&[
        write(bench.first.sge(0, 100)),
        register(1, &pieces),
        fast,
        write(list_sge(1, 0, 100)),
        write(fast_sge),
        write(bench.first.sge(0, 100)),
    ]);
    bench.pair.a.settle();
    assert_eq!(bench.count("sq_registrations"), 2);
    assert_eq!(bench.count("early_uses"), 2);
    assert!(bench.pair.completions_a().is_empty(), "nothing is complete");
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 6]);
    // Now everything is complete, and a use is like any other.
    assert_eq!(
        bench.run(&[write(list_sge(1, 0, 100)), write(fast_sge)]),
        [Success; 2]
    );
    assert_eq!(bench.pair.b.contents(&far, 0, 64), data);
    assert_eq!(bench.count("early_uses"), 2);
    // A registration that nothing stands before is complete at once.
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(list_tag(1));
    let again = [invalidate, register(2, &pieces), write(list_sge(2, 0, 9))];
    assert_eq!(bench.run(&again), [Success; 3]);
    assert_eq!(bench.count("early_uses"), 2);
    assert_eq!(bench.count("sq_registrations"), 3);
}

#[test]
fn a_peers_use_is_early_too_and_none_is_after_a_failure() {
    let mut bench = bench(BOTH);
    let pieces = bench.pieces();
    let far = bench.far.clone();
    let write =
        SendWork::new(SendOpcode::Write, &[bench.first.sge(0, 8)]).remote(far.address, far.tag);
    // What it sends is lost, so that it stays open; what the peer does arrives.
    bench.post(&[write, register(1, &pieces)]);
    bench.pair.a.settle();
    let lost = std::mem::take(&mut bench.pair.a.host.sent);
    assert_eq!(lost.len(), 1);
    let far_write = bench.far_write(1, 0, 3000);
    bench.pair.b.post_send(QPN_B, &far_write);
    bench.pair.b.settle();
    let frames = std::mem::take(&mut bench.pair.b.host.sent);
    assert_eq!(frames.len(), 3);
    for frame in frames {
        bench.pair.a.receive(&frame);
    }
    assert_eq!(
        bench.count("early_uses"),
        1,
        "once for a message of three packets"
    );
    // A read of the peer, an atomic: each is a use.
    let read = SendWork::new(SendOpcode::Read, &[far.sge(0, 8)]).remote(ADDRESS, list_tag(1));
    bench.pair.b.post_send(QPN_B, &read);
    bench.pair.b.settle();
    for frame in std::mem::take(&mut bench.pair.b.host.sent) {
        bench.pair.a.receive(&frame);
    }
    assert_eq!(bench.count("early_uses"), 2);
    // The queue pair fails with it open: from then on the registration waits for nothing.
    assert_eq!(
        bench.pair.a.set_state(QPN_A, State::Error),
        CommandStatus::Ok
    );
    assert_eq!(statuses(&bench.pair.completions_a()), [Flushed; 2]);
    let qpn = 0x55;
    bench.pair.a.create_qp(QpOptions {
        qpn,
        pd: PD,
        ..QpOptions::default()
    });
    let peer = bench.pair.a.as_peer(qpn);
    bench.pair.a.connect(qpn, &peer);
    bench.pair.a.post_recv(qpn, &[]);
    let own = SendWork::new(SendOpcode::Write, &[list_sge(1, 0, 8)])
        .remote(bench.first.address, bench.first.tag);
    bench.pair.a.post_send(qpn, &own);
    bench.pair.a.settle();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(bench.count("early_uses"), 2);
}

#[test]
fn a_request_that_uses_early_tags_in_more_than_one_way_counts_once() {
    let mut bench = bench(BOTH);
    let far = bench.far.clone();
    let open =
        SendWork::new(SendOpcode::Write, &[bench.first.sge(0, 8)]).remote(far.address, far.tag);
    let fast = SendWork::new(SendOpcode::FastRegister, &[]).part(&bench.fast_part(1, 4096));
    let fast_sge = Sge {
        address: 0x5000,
        length: 64,
        lkey: fast_tag(1),
    };
    // A piece and the data, the data under the piece itself or under the list.
    let plain = bench.first.sge(0, 64);
    let mut counted = 0;
    bench.post(&[open, fast]);
    for (instance, data) in [(1, fast_sge), (2, list_sge(2, 0, 64)), (3, plain)] {
        if instance > 1 {
            // From another queue pair, which need not wait for what is open here.
            let work =
                SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(list_tag(instance - 1));
            if instance == 2 {
                let qpn = 0x55;
                bench.pair.a.create_qp(QpOptions {
                    qpn,
                    pd: PD,
                    flags: QP_FLAG_LISTS,
                    ..QpOptions::default()
                });
                let peer = bench.pair.a.as_peer(qpn);
                bench.pair.a.connect(qpn, &peer);
            }
            bench.pair.a.post_send(0x55, &work);
            bench.pair.a.settle();
            assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
            counted += 1;
            assert_eq!(bench.count("early_uses"), counted, "an invalidation");
        }
        bench.post(&[register_and_send(instance, &[fast_sge], &[data])]);
        // The device looks for more by itself while something is open, though not at once.
        bench.pair.a.now += 100_000;
        bench.pair.a.settle();
        counted += 1;
        assert_eq!(bench.count("early_uses"), counted, "{data:?}");
    }
    assert_eq!(bench.count("sq_registrations"), 4);
}

#[test]
fn a_peers_message_into_early_memory_that_invalidates_early_memory_counts_once() {
    for length in [0, 8, 3000] {
        let mut bench = bench(BOTH);
        let pieces = bench.pieces();
        let far = bench.far.clone();
        let open =
            SendWork::new(SendOpcode::Write, &[bench.first.sge(0, 8)]).remote(far.address, far.tag);
        bench.post(&[open, register(1, &pieces)]);
        bench.pair.a.settle();
        bench.pair.a.host.sent.clear();
        bench.pair.a.post_recv(QPN_A, &[list_sge(1, 0, 5000)]);
        let sges = [far.sge(0, length)];
        let answer = SendWork::new(SendOpcode::SendInvalidate, &sges).invalidate(list_tag(1));
        bench.pair.b.post_send(QPN_B, &answer);
        for frame in bench.far_frames() {
            bench.pair.a.receive(&frame);
        }
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        assert_eq!(bench.count("early_uses"), 1, "{length} bytes");
    }
}

#[test]
fn a_registration_and_a_send_are_one_and_the_answer_invalidates() {
    for list in [false, true] {
        let mut bench = bench(BOTH | DRAINS);
        let pieces = bench.pieces();
        let far = bench.far.clone();
        for instance in 1..=5 {
            let data = [bench.first.sge(0, 40), bench.second.sge(0, 24)];
            let work = if list {
                register_and_send(instance, &pieces, &data)
            } else {
                SendWork::new(SendOpcode::RegisterSend, &data)
                    .part(&bench.fast_part(instance, 4096))
            };
            let (tag, address) = if list {
                (list_tag(instance), ADDRESS)
            } else {
                (fast_tag(instance), 0x5000)
            };
            bench.pair.b.post_recv(QPN_B, &[far.sge(0, 64)]);
            bench.pair.a.post_recv(QPN_A, &[bench.second.sge(8000, 8)]);
            bench.post(&[work.flags(SEND_SIGNALED | SEND_SOLICITED)]);
            bench.pair.exchange();
            let done = bench.pair.completions_a();
            assert_eq!(statuses(&done), [Success], "one completion");
            assert_eq!(done[0].opcode, CompletionOpcode::Send.number());
            let received = bench.pair.completions_b();
            assert_eq!(statuses(&received), [Success]);
            assert_eq!(received[0].byte_count, 64);
            assert_ne!(received[0].flags & COMPLETION_SOLICITED, 0);
            // The peer puts its data where it was told to, and ends the tag with its answer.
            let contents = pattern(instance.into(), 500);
            bench.pair.b.fill(&far, 1000, &contents);
            let write =
                SendWork::new(SendOpcode::Write, &[far.sge(1000, 500)]).remote(address, tag);
            let answer =
                SendWork::new(SendOpcode::SendInvalidate, &[far.sge(0, 8)]).invalidate(tag);
            bench.pair.b.write_blocks(QPN_B, &write.encode());
            bench.pair.b.write_blocks(QPN_B, &answer.encode());
            bench.pair.b.publish_send(QPN_B);
            bench.pair.exchange();
            assert_eq!(statuses(&bench.pair.completions_b()), [Success; 2]);
            let told = bench.pair.completions_a();
            assert_eq!(statuses(&told), [Success]);
            assert_ne!(told[0].flags & COMPLETION_INVALIDATED, 0);
            assert_eq!(told[0].tag, tag);
            if list {
                let there = bench.pair.a.contents(&bench.second, 100, 500);
                assert_eq!(there, contents);
            } else {
                let mut there = [0; 500];
                bench
                    .pair
                    .a
                    .host
                    .memory
                    .read(bench.page, &mut there)
                    .unwrap();
                assert_eq!(there[..], contents);
            }
        }
        assert_eq!(bench.count("sq_registrations"), 5);
        // It is not valid any more.
        let stale = bench.far_write(5, 0, 1);
        assert_eq!(bench.far_run(&stale), [RemoteAccess]);
    }
}

#[test]
fn what_is_sent_may_be_under_the_tag_that_is_registered_and_invalidate_at_the_peer() {
    let mut bench = bench(BOTH);
    let pieces = bench.pieces();
    let far = bench.far.clone();
    let data = pattern(4, 5000);
    let second = bench.second.clone();
    bench.pair.a.fill(&second, 100, &data[..3000]);
    // The peer has a tag to be invalidated.
    bench.pair.b.execute(&AllocateTag {
        tag: Tag::new(0x50, 0).0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    let page = bench.pair.b.allocate(4096);
    let there = SendWork::new(SendOpcode::FastRegister, &[]).part(&FastRegisterPart {
        tag: Tag::new(0x50, 1).0,
        access: ALL,
        address: 0,
        buffer: Buffer::contiguous(page, 4096),
        reserved: 0,
    });
    assert_eq!(bench.far_run(&there), [Success]);
    bench.pair.b.post_recv(QPN_B, &[far.sge(0, 3000)]);
    let work =
        register_and_send(1, &pieces, &[list_sge(1, 0, 3000)]).invalidate(Tag::new(0x50, 1).0);
    assert_eq!(bench.run(&[work]), [Success]);
    let received = bench.pair.completions_b();
    assert_ne!(received[0].flags & COMPLETION_INVALIDATED, 0);
    assert_eq!(bench.pair.b.contents(&far, 0, 3000), data[..3000]);
    // So with inline data, of a registration of pages.
    bench.pair.b.post_recv(QPN_B, &[far.sge(0, 300)]);
    let work = SendWork::new(SendOpcode::RegisterSend, &[])
        .part(&bench.fast_part(1, 4096))
        .inline(&data[..256]);
    assert_eq!(bench.run(&[work]), [Success]);
    assert_eq!(bench.pair.b.contents(&far, 0, 256), data[..256]);
}

/// Each way of registering, good and spoiled in each way that can be.
fn failures(bench: &Bench) -> Vec<(SendWork, CompletionStatus, u32)> {
    let good = bench.pieces();
    let data = [bench.first.sge(0, 16)];
    let mut all = Vec::new();
    let mut bad_pieces = |part: ListPart, pieces: &[Sge], syndrome| {
        let part = ListPart {
            pieces: pieces.len() as u8,
            ..part
        };
        for opcode in [SendOpcode::RegisterList, SendOpcode::RegisterListSend] {
            let sges = match opcode {
                SendOpcode::RegisterList => pieces.to_vec(),
                _ => [pieces, &data].concat(),
            };
            let work = SendWork::new(opcode, &sges).part(&part);
            all.push((work, LocalProtection, syndrome));
        }
    };
    let part = list_part(1, 0);
    let with_tag = |tag| ListPart { tag, ..part };
    let with_access = |access| ListPart { access, ..part };
    bad_pieces(with_tag(Tag::new(0x77, 1).0), &good, 1);
    bad_pieces(with_tag(fast_tag(1)), &good, 9);
    bad_pieces(part, &[good[0]; 5], 9);
    bad_pieces(with_access(ALL | ACCESS_WINDOW_BIND), &good, 7);
    bad_pieces(with_access(ALL | (1 << 20)), &good, 7);
    let address = u64::MAX - 100;
    bad_pieces(ListPart { address, ..part }, &good, 6);
    let piece = |change: &dyn Fn(&mut Sge)| {
        let mut pieces = good;
        change(&mut pieces[1]);
        pieces
    };
    bad_pieces(part, &piece(&|sge| sge.length = 0), 18);
    bad_pieces(part, &piece(&|sge| sge.lkey = 0), 17);
    bad_pieces(part, &piece(&|sge| sge.lkey ^= 1), 15);
    bad_pieces(part, &piece(&|sge| sge.lkey += 0x7700), 15);
    bad_pieces(part, &piece(&|sge| sge.length = 8192), 15);
    bad_pieces(part, &piece(&|sge| sge.address = u64::MAX), 15);
    bad_pieces(with_access(ALL | ACCESS_FLUSH_GLOBAL), &good, 16);
    let mut bad_pages = |part: FastRegisterPart, syndrome| {
        for opcode in [SendOpcode::FastRegister, SendOpcode::RegisterSend] {
            let sges = match opcode {
                SendOpcode::FastRegister => &[][..],
                _ => &data,
            };
            let work = SendWork::new(opcode, sges).part(&part);
            all.push((work, LocalProtection, syndrome));
        }
    };
    let fast = bench.fast_part(1, 4096);
    let tag = Tag::new(0x77, 1).0;
    bad_pages(FastRegisterPart { tag, ..fast }, 1);
    let tag = list_tag(1);
    bad_pages(FastRegisterPart { tag, ..fast }, 9);
    bad_pages(bench.fast_part(1, 8192), 9);
    let access = 1 << 20;
    bad_pages(FastRegisterPart { access, ..fast }, 7);
    let address = u64::MAX;
    bad_pages(FastRegisterPart { address, ..fast }, 6);
    let buffer = Buffer {
        page_shift: 3,
        ..fast.buffer
    };
    bad_pages(FastRegisterPart { buffer, ..fast }, 11);
    // Malformed ones.
    let list = SendWork::new(SendOpcode::RegisterList, &good).part(&list_part(1, 1));
    all.push((list, LocalQueuePairOperation, 0x105));
    let mut reserved = part;
    reserved.reserved1 = 1;
    reserved.pieces = 1;
    let list = SendWork::new(SendOpcode::RegisterListSend, &good).part(&reserved);
    all.push((list, LocalQueuePairOperation, 0x109));
    all
}

#[test]
fn each_cause_drains_each_way_of_registering_and_the_queue_goes_on() {
    let mut bench = bench(BOTH | DRAINS);
    let pieces = bench.pieces();
    let causes = failures(&bench);
    assert_eq!(causes.len(), 2 * (13 + 6) + 2);
    let far = bench.far.clone();
    let plain =
        SendWork::new(SendOpcode::Write, &[bench.first.sge(0, 3000)]).remote(far.address, far.tag);
    for (n, (work, status, syndrome)) in causes.into_iter().enumerate() {
        let what = format!("{n}: {work:?}");
        // With something open before it, or not.
        let mut posted = vec![work, plain.clone(), plain.clone().flags(0)];
        if n % 3 != 0 {
            posted.insert(0, plain.clone());
        }
        bench.post(&posted);
        bench.pair.exchange();
        let done = bench.pair.completions_a();
        let (before, failed) = done.split_at(posted.len() - 3);
        assert!(statuses(before).iter().all(|status| *status == Success));
        assert_eq!(statuses(failed), [status, Flushed, Flushed], "{what}");
        assert_eq!(failed[0].vendor_syndrome, syndrome, "{what}");
        assert_eq!(bench.pair.a.qp_state(QPN_A), State::Sqd, "{what}");
        assert_eq!(
            bench.pair.a.event_codes(EQ_ASYNC),
            [(EventCode::SendQueueDrained, QPN_A)]
        );
        assert!(bench.pair.completions_b().is_empty(), "something was sent");
        // The peer's requests are served, and nothing was registered.
        let refused = bench.count("access_errors");
        let back = SendWork::new(SendOpcode::Write, &[far.sge(0, 300)])
            .remote(bench.first.address, bench.first.tag);
        assert_eq!(bench.far_run(&back), [Success]);
        assert_eq!(bench.count("sq_registrations"), 2 * n as u64);
        assert_eq!(bench.count("access_errors"), refused);
        // The consumer mends it and goes on: with the same connection, in sequence.
        assert_eq!(bench.pair.a.set_state(QPN_A, State::Rts), CommandStatus::Ok);
        bench.pair.b.post_recv(QPN_B, &[far.sge(0, 100)]);
        let instance = n as u8;
        let fast =
            SendWork::new(SendOpcode::FastRegister, &[]).part(&bench.fast_part(instance, 4096));
        let invalidate = |tag| SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
        let good = [
            register_and_send(instance, &pieces, &[list_sge(instance, 0, 100)]),
            fast,
            plain.clone(),
            invalidate(list_tag(instance)),
            invalidate(fast_tag(instance)),
        ];
        assert_eq!(bench.run(&good), [Success; 5], "{what}");
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    }
}

#[test]
fn each_cause_fails_a_queue_pair_that_does_not_drain() {
    for n in 0..failures(&bench(BOTH)).len() {
        let mut bench = bench(BOTH);
        let (work, status, _) = failures(&bench).swap_remove(n);
        bench.pair.b.post_recv(QPN_B, &[]);
        assert_eq!(
            bench.run(&[work, SendWork::new(SendOpcode::Send, &[])]),
            [status, Flushed]
        );
        assert_eq!(bench.pair.a.qp_state(QPN_A), State::Error);
        assert!(bench.pair.completions_b().is_empty(), "something was sent");
        assert_eq!(bench.count("sq_registrations"), 0);
    }
}

#[test]
fn a_valid_tag_is_not_registered_over() {
    let mut bench = bench(BOTH | DRAINS);
    let pieces = bench.pieces();
    let other = [bench.first.sge(0, 10)];
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    bench.post(&[register(2, &other)]);
    bench.pair.exchange();
    let done = bench.pair.completions_a();
    assert_eq!(
        (statuses(&done)[0], done[0].vendor_syndrome),
        (LocalProtection, 10)
    );
    // What was there is there.
    let write = bench.far_write(1, 4999, 1);
    assert_eq!(bench.far_run(&write), [Success]);
    // Without the right domain either.
    bench.pair.a.set_state(QPN_A, State::Rts);
    bench.pair.a.execute(&AllocateTag {
        tag: Tag::new(0x60, 0).0,
        pd: PD + 1,
        kind: TagKind::List.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    let part = ListPart {
        tag: Tag::new(0x60, 0).0,
        ..list_part(0, 1)
    };
    bench.post(&[SendWork::new(SendOpcode::RegisterList, &other).part(&part)]);
    bench.pair.exchange();
    let done = bench.pair.completions_a();
    assert_eq!(
        (statuses(&done)[0], done[0].vendor_syndrome),
        (LocalProtection, 4)
    );
}

#[test]
fn a_send_that_fails_after_its_registration_fails_as_a_send() {
    for list in [false, true] {
        let mut bench = bench(BOTH | DRAINS);
        let pieces = bench.pieces();
        let bad = [Sge {
            lkey: 0x7701,
            ..bench.first.sge(0, 8)
        }];
        let work = if list {
            register_and_send(1, &pieces, &bad)
        } else {
            SendWork::new(SendOpcode::RegisterSend, &bad).part(&bench.fast_part(1, 4096))
        };
        bench.post(&[work, SendWork::new(SendOpcode::Send, &[])]);
        bench.pair.exchange();
        let done = bench.pair.completions_a();
        assert_eq!(statuses(&done), [LocalProtection, Flushed]);
        assert_eq!(done[0].vendor_syndrome, 1);
        assert_eq!(bench.pair.a.qp_state(QPN_A), State::Error);
        // The registration stays made.
        assert_eq!(bench.count("sq_registrations"), 1);
        let qpn = 0x55;
        bench.pair.a.create_qp(QpOptions {
            qpn,
            pd: PD,
            ..QpOptions::default()
        });
        let peer = bench.pair.a.as_peer(qpn);
        bench.pair.a.connect(qpn, &peer);
        let sge = if list {
            list_sge(1, 0, 8)
        } else {
            Sge {
                address: 0x5000,
                length: 8,
                lkey: fast_tag(1),
            }
        };
        let own =
            SendWork::new(SendOpcode::Write, &[sge]).remote(bench.first.address, bench.first.tag);
        bench.pair.a.post_send(qpn, &own);
        bench.pair.a.settle();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    }
    // So does one that the peer does not take, or never answers.
    let mut bench = bench(BOTH | DRAINS);
    let work = register_and_send(1, &bench.pieces(), &[bench.first.sge(0, 8)]);
    bench.post(&[work]);
    bench.pair.run_with(|way, frame| match way {
        Way::AToB => vec![],
        Way::BToA => vec![frame],
    });
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [CompletionStatus::RetryExceeded]
    );
    assert_eq!(bench.pair.a.qp_state(QPN_A), State::Error);
}

#[test]
fn registrations_that_send_survive_a_bad_wire_and_are_made_once() {
    for seed in 1..8 {
        let mut bench = bench(BOTH | DRAINS);
        let pieces = bench.pieces();
        let far = bench.far.clone();
        let faults = Faults {
            drop: 10,
            duplicate: 10,
            corrupt: 5,
            delay: 10,
        };
        let mut wire = BadWire::new(seed, faults);
        for instance in 0..20 {
            bench.pair.b.post_recv(QPN_B, &[far.sge(0, 4000)]);
            let work = [
                register_and_send(instance, &pieces, &[list_sge(instance, 0, 4000)]),
                SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(list_tag(instance)),
                register(instance.wrapping_add(100), &[Sge::zeroed()]),
                SendWork::new(SendOpcode::Send, &[]),
            ];
            let data = pattern(seed + u64::from(instance), 3000);
            let second = bench.second.clone();
            bench.pair.a.fill(&second, 100, &data);
            bench.post(&work);
            bench.pair.run_with(|way, frame| wire.fate(way, frame));
            assert_eq!(
                statuses(&bench.pair.completions_a()),
                [Success, Success, LocalProtection, Flushed]
            );
            assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
            assert_eq!(bench.pair.b.contents(&far, 0, 3000), data);
            assert_eq!(bench.count("sq_registrations"), u64::from(instance) + 1);
            assert_eq!(bench.pair.a.set_state(QPN_A, State::Rts), CommandStatus::Ok);
        }
    }
}

#[test]
fn a_registration_that_is_fenced_waits_for_reads() {
    let mut bench = bench(BOTH);
    let pieces = bench.pieces();
    let far = bench.far.clone();
    let read =
        SendWork::new(SendOpcode::Read, &[bench.first.sge(0, 8)]).remote(far.address, far.tag);
    bench.pair.b.post_recv(QPN_B, &[]);
    let work = register_and_send(1, &pieces, &[]).flags(SEND_SIGNALED | SEND_FENCE);
    bench.post(&[read, work]);
    bench.pair.a.settle();
    assert_eq!(bench.count("sq_registrations"), 0);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 2]);
    assert_eq!(bench.count("sq_registrations"), 1);
}

#[test]
fn a_piece_that_is_released_between_packets_ends_the_message_there() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    let far = bench.far.clone();
    bench.pair.b.fill(&far, 0, &pattern(2, 5000));
    let write = bench.far_write(1, 0, 5000);
    bench.pair.b.post_send(QPN_B, &write);
    bench.pair.b.settle();
    let frames: Vec<_> = std::mem::take(&mut bench.pair.b.host.sent).into();
    assert_eq!(frames.len(), 5);
    for frame in &frames[..1] {
        bench.pair.a.receive(frame);
    }
    // It is no use of the region that would keep it: the list goes with it, though the next packet is
    // for the other piece alone.
    let first = bench.first.clone();
    assert_eq!(
        bench
            .pair
            .a
            .object_command(CommandOpcode::ReleaseTag, first.tag),
        CommandStatus::Ok
    );
    for frame in &frames[1..] {
        bench.pair.a.receive(frame);
    }
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_b()), [RemoteAccess]);
    let there = bench.pair.a.contents(&bench.second, 100, 3000);
    assert_eq!(there[..1024], pattern(2, 1024));
    assert_eq!(there[1024..], [0; 1976]);
    assert_eq!(bench.pair.a.contents(&first, 4000, 2000), [0; 2000]);
}

#[test]
fn a_piece_that_is_released_under_a_read_is_not_written() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    let far = bench.far.clone();
    let read =
        SendWork::new(SendOpcode::Read, &[list_sge(1, 0, 5000)]).remote(far.address, far.tag);
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    bench.pair.b.fill(&far, 0, &pattern(9, 5000));
    bench.post(&[read]);
    bench.pair.poll();
    for frame in std::mem::take(&mut bench.pair.a.host.sent) {
        bench.pair.b.receive(&frame);
    }
    bench.pair.b.settle();
    let (first, second) = (bench.first.clone(), bench.second.clone());
    bench
        .pair
        .a
        .object_command(CommandOpcode::ReleaseTag, second.tag);
    bench.pair.exchange();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [CompletionStatus::LocalAccess]
    );
    assert_eq!(bench.pair.a.contents(&second, 0, 8192), [0; 8192]);
    assert_eq!(bench.pair.a.contents(&first, 0, 8192), [0; 8192]);
}

#[test]
fn a_piece_that_is_released_between_packets_of_a_receive_is_not_written() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    let (first, second, far) = (bench.first.clone(), bench.second.clone(), bench.far.clone());
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    bench.pair.b.fill(&far, 0, &pattern(4, 5000));
    bench.pair.a.post_recv(QPN_A, &[list_sge(1, 0, 5000)]);
    bench.pair.b.post_send(QPN_B, &send_of(&far, 5000));
    let frames = bench.far_frames();
    assert_eq!(frames.len(), 5);
    for frame in &frames[..1] {
        bench.pair.a.receive(frame);
    }
    bench.release(&first);
    for frame in &frames[1..] {
        bench.pair.a.receive(frame);
    }
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_b()), [RemoteOperation]);
    assert_eq!(statuses(&bench.pair.completions_a()), [LocalProtection]);
    let there = bench.pair.a.contents(&second, 100, 3000);
    assert_eq!(there[..1024], pattern(4, 1024));
    assert_eq!(there[1024..], [0; 1976]);
    assert_eq!(bench.pair.a.contents(&first, 0, 8192), [0; 8192]);
}

#[test]
fn a_piece_that_is_released_between_packets_of_an_answer_or_a_send_is_not_sent() {
    for answers in [true, false] {
        let mut bench = bench(QP_FLAG_LISTS);
        let (first, second, far) = (bench.first.clone(), bench.second.clone(), bench.far.clone());
        let data = pattern(11, 8000);
        bench.pair.a.fill(&second, 0, &data[..7000]);
        bench.pair.a.fill(&first, 0, &data[7000..]);
        let pieces = [second.sge(0, 7000), first.sge(0, 1000)];
        assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
        // There is room for nothing, and then for some of the packets.
        let neighbour = bench.pair.b.mac;
        let room = |bytes| (memory::Way::Wire, memory::Room::Bytes(bytes));
        bench.pair.a.host.ways.insert(neighbour, room(0));
        if answers {
            let read =
                SendWork::new(SendOpcode::Read, &[far.sge(0, 8000)]).remote(ADDRESS, list_tag(1));
            bench.pair.b.post_send(QPN_B, &read);
            for frame in bench.far_frames() {
                bench.pair.a.receive(&frame);
            }
        } else {
            bench.pair.b.post_recv(QPN_B, &[far.sge(0, 8000)]);
            bench.post(&[SendWork::new(SendOpcode::Send, &[list_sge(1, 0, 8000)])]);
        }
        bench.pair.a.settle();
        for bytes in (0..).step_by(1000) {
            bench.pair.a.host.ways.insert(neighbour, room(bytes));
            bench.pair.a.engine.room_again();
            bench.pair.a.settle();
            if !bench.pair.a.host.sent.is_empty() {
                break;
            }
        }
        // All of them are of the first piece.
        let sent = bench.pair.a.host.sent.len() * 1024;
        assert!(sent < 6000, "answers: {answers}, {sent} bytes");
        bench.release(&first);
        bench.pair.a.host.ways.clear();
        bench.pair.a.engine.room_again();
        bench.pair.exchange();
        if answers {
            assert_eq!(statuses(&bench.pair.completions_b()), [RemoteAccess]);
        } else {
            assert_eq!(statuses(&bench.pair.completions_a()), [LocalProtection]);
        }
        let there = bench.pair.b.contents(&far, 0, 8000);
        assert_eq!(there[..sent], data[..sent]);
        assert!(there[sent..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_list_is_received_into_through_a_shared_queue_of_its_domain() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    let (first, second, far) = (bench.first.clone(), bench.second.clone(), bench.far.clone());
    let data = pattern(12, 5000);
    bench.pair.b.fill(&far, 0, &data);
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    bench.pair.a.create_srq(3, 4, None);
    // Two queue pairs of another domain than that of the queue and the list.
    let (near, there) = ([0x51, 0x52], [0x61, 0x62]);
    for (a, b) in near.into_iter().zip(there) {
        bench.pair.a.create_qp(QpOptions {
            qpn: a,
            pd: 9,
            flags: QP_FLAG_SRQ,
            srqn: 3,
            ..QpOptions::default()
        });
        bench.pair.b.create_qp(QpOptions {
            qpn: b,
            pd: PD,
            ..QpOptions::default()
        });
        let (to_b, to_a) = (bench.pair.b.as_peer(b), bench.pair.a.as_peer(a));
        bench.pair.a.connect(a, &to_b);
        bench.pair.b.connect(b, &to_a);
    }
    for _ in 0..4 {
        bench.pair.a.post_srq(3, &[list_sge(1, 0, 5000)]);
    }
    for qpn in there {
        bench.pair.b.post_send(qpn, &send_of(&far, 5000));
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        assert_eq!(bench.pair.a.contents(&second, 100, 3000), data[..3000]);
        assert_eq!(bench.pair.a.contents(&first, 4000, 2000), data[3000..]);
        bench.pair.a.fill(&second, 0, &[0; 8192]);
        bench.pair.a.fill(&first, 0, &[0; 8192]);
    }
    // A piece goes: the one who is receiving fails, and with the next receive the other.
    bench.pair.b.post_send(there[0], &send_of(&far, 5000));
    let frames = bench.far_frames();
    assert_eq!(frames.len(), 5);
    for frame in &frames[..1] {
        bench.pair.a.receive(frame);
    }
    bench.release(&first);
    for frame in &frames[1..] {
        bench.pair.a.receive(frame);
    }
    bench.pair.b.post_send(there[1], &send_of(&far, 5000));
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_b()), [RemoteOperation; 2]);
    assert_eq!(statuses(&bench.pair.completions_a()), [LocalProtection; 2]);
    let there = bench.pair.a.contents(&second, 100, 3000);
    assert_eq!(there[..1024], data[..1024]);
    assert_eq!(there[1024..], [0; 1976]);
    assert_eq!(bench.pair.a.contents(&first, 0, 8192), [0; 8192]);
}

#[test]
fn a_read_into_several_entries_touches_all_that_it_fills() {
    for access in [ALL, ALL | ACCESS_ONE_TOUCH] {
        for by_region in [false, true] {
            let mut bench = bench(QP_FLAG_LISTS);
            let [one, two] = [0x501, 0x601]
                .map(|tag| bench.pair.a.register(tag, PD, ALL | ACCESS_ONE_TOUCH, 4096));
            let pieces = [one.sge(0, 100), two.sge(0, 100)];
            let list = register(1, &pieces).part(&ListPart {
                access,
                ..list_part(1, 2)
            });
            assert_eq!(bench.run(&[list]), [Success]);
            // The first of them ends the list, or a piece of it.
            let begin = if by_region {
                one.sge(0, 100)
            } else {
                list_sge(1, 0, 100)
            };
            assert_eq!(
                bench.read_into(&[begin, list_sge(1, 100, 100)]),
                [Success],
                "{access:#x} {by_region}"
            );
            for region in [one, two] {
                assert!(!bench.far_may_write(&region), "{access:#x} {by_region}");
            }
        }
    }
}

#[test]
fn a_read_touches_what_it_filled_of_a_list_that_lost_a_piece_since() {
    let mut bench = bench(QP_FLAG_LISTS);
    let [one, two, three] = [0x501, 0x601, 0x701]
        .map(|tag| bench.pair.a.register(tag, PD, ALL | ACCESS_ONE_TOUCH, 4096));
    let pieces = [one.sge(0, 100), two.sge(0, 100), three.sge(0, 100)];
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    let far = bench.far.clone();
    let entries = [list_sge(1, 0, 200), bench.second.sge(0, 3000)];
    let read = SendWork::new(SendOpcode::Read, &entries).remote(far.address, far.tag);
    bench.post(&[read]);
    bench.pair.a.settle();
    for frame in std::mem::take(&mut bench.pair.a.host.sent) {
        bench.pair.b.receive(&frame);
    }
    let frames = bench.far_frames();
    assert_eq!(frames.len(), 4);
    // What goes to the list is all in the first packet; what comes afterwards does not need it.
    bench.pair.a.receive(&frames[0]);
    bench.release(&one);
    for frame in &frames[1..] {
        bench.pair.a.receive(frame);
    }
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert!(!bench.far_may_write(&two));
    assert!(bench.far_may_write(&three), "nothing was written there");
}

#[test]
fn what_a_peer_ends_with_its_answer_cannot_be_sent_again() {
    for under_the_list in [true, false] {
        let mut bench = bench(QP_FLAG_LISTS);
        let pieces = bench.pieces();
        let (first, far) = (bench.first.clone(), bench.far.clone());
        let data = pattern(13, 64);
        bench.pair.a.fill(&first, 0, &data);
        let list = [first.sge(0, 64), pieces[0]];
        let from = if under_the_list {
            list_sge(1, 0, 64)
        } else {
            first.sge(0, 64)
        };
        bench.pair.b.post_recv(QPN_B, &[far.sge(0, 64)]);
        bench.pair.a.post_recv(QPN_A, &[]);
        bench.post(&[register_and_send(1, &list, &[from])]);
        bench.pair.a.settle();
        for frame in std::mem::take(&mut bench.pair.a.host.sent) {
            bench.pair.b.receive(&frame);
        }
        // The peer has it all; that it has is lost on the way, and its answer is not.
        assert_eq!(bench.far_frames().len(), 1);
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        assert_eq!(bench.pair.b.contents(&far, 0, 64), data);
        let answer = SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(list_tag(1));
        bench.pair.b.post_send(QPN_B, &answer);
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        let (done, state) = if under_the_list {
            (LocalProtection, State::Error)
        } else {
            (Success, State::Rts)
        };
        assert_eq!(statuses(&bench.pair.completions_a()), [Success, done]);
        assert_eq!(bench.pair.a.qp_state(QPN_A), state);
    }
}

#[test]
fn who_may_register_and_invalidate_what() {
    let invalidate = |tag| SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
    let not_allowed = [LocalQueuePairOperation];
    let with = |flags: u16, work: &dyn Fn(&Bench) -> SendWork| {
        let mut bench = bench(BOTH);
        let pieces = bench.pieces();
        let fast = SendWork::new(SendOpcode::FastRegister, &[]).part(&bench.fast_part(1, 4096));
        assert_eq!(bench.run(&[register(1, &pieces), fast]), [Success; 2]);
        bench.pair.a.execute(&AllocateTag {
            tag: Tag::new(0x60, 0).0,
            pd: PD,
            kind: TagKind::List.number(),
            reserved: [0; 3],
            max_pages: 1,
        });
        let qpn = 0x55;
        bench.pair.a.create_qp(QpOptions {
            qpn,
            pd: PD,
            flags,
            ..QpOptions::default()
        });
        let peer = bench.pair.a.as_peer(qpn);
        bench.pair.a.connect(qpn, &peer);
        let work = work(&bench);
        bench.pair.a.post_send(qpn, &work);
        bench.pair.a.settle();
        statuses(&bench.pair.completions_a())
    };
    let list = |bench: &Bench| {
        let part = ListPart {
            tag: Tag::new(0x60, 3).0,
            ..list_part(0, 1)
        };
        SendWork::new(SendOpcode::RegisterList, &[bench.first.sge(0, 8)]).part(&part)
    };
    let both = |bench: &Bench| SendWork {
        opcode: SendOpcode::RegisterListSend,
        ..list(bench)
    };
    assert_eq!(with(QP_FLAG_FAST_REGISTER, &list), not_allowed);
    assert_eq!(with(0, &both), not_allowed);
    assert_eq!(with(QP_FLAG_LISTS, &list), [Success]);
    let pages = |bench: &Bench| {
        SendWork::new(SendOpcode::RegisterSend, &[]).part(&bench.fast_part(2, 4096))
    };
    assert_eq!(with(QP_FLAG_LISTS, &pages), not_allowed);
    assert_eq!(with(QP_FLAG_LISTS, &|_| invalidate(list_tag(1))), [Success]);
    assert_eq!(
        with(QP_FLAG_LISTS, &|_| invalidate(fast_tag(1))),
        not_allowed
    );
    assert_eq!(
        with(QP_FLAG_LISTS, &|b| invalidate(b.first.tag)),
        not_allowed
    );
    assert_eq!(
        with(QP_FLAG_LISTS, &|_| invalidate(0x7701)),
        [LocalProtection]
    );
    assert_eq!(
        with(QP_FLAG_FAST_REGISTER, &|_| invalidate(list_tag(1))),
        not_allowed
    );
    assert_eq!(
        with(QP_FLAG_FAST_REGISTER, &|_| invalidate(fast_tag(1))),
        [Success]
    );
    assert_eq!(with(0, &|_| invalidate(0x7701)), not_allowed);
}

#[test]
fn an_unreliable_connection_registers_lists_and_drains() {
    let mut bench = bench(BOTH);
    let qpn = 0x31;
    bench.pair.a.create_qp(QpOptions {
        qpn,
        pd: PD,
        service: Service::Uc,
        flags: BOTH | DRAINS,
        ..QpOptions::default()
    });
    let peer = bench.pair.b.as_peer(0x32);
    bench.pair.a.connect_unreliable(qpn, &peer);
    let pieces = bench.pieces();
    let empty = [Sge {
        length: 0,
        ..pieces[0]
    }];
    // What is allowed there, what is not, and what fails.
    for (work, status) in [
        (register(1, &pieces), Success),
        (
            SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(list_tag(1)),
            Success,
        ),
        (register(2, &empty), LocalProtection),
        (register_and_send(2, &pieces, &[]), LocalQueuePairOperation),
        (
            SendWork::new(SendOpcode::RegisterSend, &[]).part(&bench.fast_part(1, 4096)),
            LocalQueuePairOperation,
        ),
        (register(2, &pieces), Success),
    ] {
        bench.pair.a.post_send(qpn, &work);
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_a()), [status], "{work:?}");
        let expected = if status == Success {
            State::Rts
        } else {
            State::Sqd
        };
        assert_eq!(bench.pair.a.qp_state(qpn), expected);
        bench.pair.a.set_state(qpn, State::Rts);
    }
    assert_eq!(bench.count("sq_registrations"), 2);
}

#[test]
fn windows_are_not_bound_to_lists() {
    let mut bench = bench(QP_FLAG_LISTS);
    let pieces = bench.pieces();
    bench.pair.a.execute(&AllocateTag {
        tag: Tag::new(0x60, 0).0,
        pd: PD,
        kind: TagKind::Window1.number(),
        reserved: [0; 3],
        max_pages: 0,
    });
    let bind = SendWork::new(SendOpcode::Bind, &[]).part(&BindPart {
        window: Tag::new(0x60, 0).0,
        new_window: Tag::new(0x60, 1).0,
        region: list_tag(1),
        access: ACCESS_REMOTE_READ,
        address: ADDRESS,
        length: 1,
        reserved: [0; 2],
    });
    assert_eq!(
        bench.run(&[register(1, &pieces), bind]),
        [Success, WindowBind]
    );
}

/// An on-demand region of whole pages, of which nothing is present.
struct OnDemand {
    tag: u32,
    table: u64,
    pages: Vec<u64>,
}

impl OnDemand {
    const ADDRESS: u64 = 0x10_0000;

    fn new(node: &mut Node, pages: usize) -> Self {
        let region = Self {
            tag: 0x7301,
            table: node.allocate(4096),
            pages: node.allocate_pages(pages),
        };
        node.execute(&RegisterRegion {
            tag: region.tag,
            pd: PD,
            access: ALL,
            flags: REGION_ON_DEMAND,
            address: Self::ADDRESS,
            buffer: Buffer {
                root: region.table,
                length: pages as u64 * 4096,
                fbo: 0,
                page_shift: ON_DEMAND_PAGE_SHIFT,
                order: 1,
                reserved: 0,
            },
        });
        region
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: Self::ADDRESS + offset,
            length,
            lkey: self.tag,
        }
    }

    fn bring_in(&self, node: &Node, page: usize) {
        let entry = self.pages[page] | ON_DEMAND_PRESENT | ON_DEMAND_WRITE;
        node.host.memory.put(self.table + page as u64 * 8, &entry);
    }
}

#[test]
fn a_fault_through_a_list_names_the_region_and_nothing_is_written_before_all_is_there() {
    let mut bench = bench(QP_FLAG_LISTS);
    let paged = OnDemand::new(&mut bench.pair.a, 2);
    paged.bring_in(&bench.pair.a, 0);
    let piece = paged.sge(4090, 100);
    let pieces = [bench.first.sge(0, 50), piece];
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    let far = bench.far.clone();
    bench.pair.b.fill(&far, 0, &pattern(7, 120));
    let write = bench.far_write(1, 0, 120);
    bench.pair.b.post_send(QPN_B, &write);
    bench.pair.exchange();
    let faults: PageFaults = bench.pair.a.query(CommandOpcode::TakeFaults, 0).unwrap();
    assert_eq!(faults.count, 1);
    let fault = faults.faults[0];
    assert_eq!((fault.tag, fault.offset), (paged.tag, 4096));
    // 6 bytes are in the first page, 64 of the message in the second.
    assert_eq!((fault.length, fault.flags), (64, FAULT_WRITE));
    let first = bench.first.clone();
    assert_eq!(bench.pair.a.contents(&first, 0, 50), [0; 50]);
    paged.bring_in(&bench.pair.a, 1);
    bench.pair.a.execute(&ResolveFault {
        token: fault.token,
        failed: 0,
        reserved: 0,
    });
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    assert_eq!(bench.pair.a.contents(&first, 0, 50), pattern(7, 50));
    let mut there = [0; 64];
    bench
        .pair
        .a
        .host
        .memory
        .read(paged.pages[1], &mut there)
        .unwrap();
    assert_eq!(there, pattern(7, 120)[56..]);
    // A page that is not to be had fails what wants it, as it does without a list.
    bench.pair.a.host.memory.put(paged.table + 8, &0u64);
    let read =
        SendWork::new(SendOpcode::Write, &[list_sge(1, 0, 120)]).remote(far.address, far.tag);
    bench.post(&[read]);
    bench.pair.exchange();
    let faults: PageFaults = bench.pair.a.query(CommandOpcode::TakeFaults, 0).unwrap();
    bench.pair.a.execute(&ResolveFault {
        token: faults.faults[0].token,
        failed: 1,
        reserved: 0,
    });
    bench.pair.run();
    let done = bench.pair.completions_a();
    assert_eq!(
        (statuses(&done)[0], done[0].vendor_syndrome),
        (LocalProtection, 20)
    );
}

#[test]
fn a_receive_of_several_entries_takes_nothing_of_a_packet_before_all_is_there() {
    let mut bench = bench(QP_FLAG_LISTS);
    let paged = OnDemand::new(&mut bench.pair.a, 1);
    let piece = paged.sge(0, 100);
    assert_eq!(bench.run(&[register(1, &[piece])]), [Success]);
    let (first, far) = (bench.first.clone(), bench.far.clone());
    let data = pattern(14, 20);
    bench.pair.b.fill(&far, 0, &data);
    let entries = [first.sge(0, 10), list_sge(1, 0, 100)];
    bench.pair.a.post_recv(QPN_A, &entries);
    bench.pair.b.post_send(QPN_B, &send_of(&far, 20));
    bench.pair.exchange();
    let faults: PageFaults = bench.pair.a.query(CommandOpcode::TakeFaults, 0).unwrap();
    assert_eq!((faults.count, faults.faults[0].tag), (1, paged.tag));
    assert_eq!(bench.pair.a.contents(&first, 0, 10), [0; 10]);
    paged.bring_in(&bench.pair.a, 0);
    bench.pair.a.execute(&ResolveFault {
        token: faults.faults[0].token,
        failed: 0,
        reserved: 0,
    });
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    assert_eq!(bench.pair.a.contents(&first, 0, 10), data[..10]);
    let mut there = [0; 10];
    let memory = &bench.pair.a.host.memory;
    memory.read(paged.pages[0], &mut there).unwrap();
    assert_eq!(there, data[10..]);
}

#[test]
fn pieces_may_be_device_memory() {
    let mut bench = bench(QP_FLAG_LISTS);
    let tag = 0x7301;
    bench.pair.a.execute(&RegisterRegion {
        tag,
        pd: PD,
        access: ALL,
        flags: REGION_DEVICE_MEMORY,
        address: 0,
        buffer: Buffer::contiguous(64, 64),
    });
    let piece = Sge {
        address: 8,
        length: 16,
        lkey: tag,
    };
    let pieces = [piece, bench.first.sge(0, 16)];
    assert_eq!(bench.run(&[register(1, &pieces)]), [Success]);
    let far = bench.far.clone();
    let data = pattern(1, 32);
    bench.pair.b.fill(&far, 0, &data);
    let write = bench.far_write(1, 0, 32);
    assert_eq!(bench.far_run(&write), [Success]);
    let read = SendWork::new(SendOpcode::Read, &[far.sge(100, 32)]).remote(ADDRESS, list_tag(1));
    assert_eq!(bench.far_run(&read), [Success]);
    assert_eq!(bench.pair.b.contents(&far, 100, 32), data);
    assert_eq!(bench.pair.a.contents(&bench.first, 0, 16), data[16..]);
}

#[test]
fn what_is_not_agreed_on_ends_like_what_is_unknown() {
    for (minor, features) in [
        (1, FEATURES),
        (2, FEATURES & !(FEATURE_LISTS | FEATURE_REGISTER_SEND)),
    ] {
        let mut node = Node::power_on(1);
        node.boot_as(minor, features);
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        node.create_cq(1, EQ_FIRST_HANDLER, 6);
        node.set_address();
        let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
        assert_eq!(caps.features, FEATURES);
        let allocate = AllocateTag {
            tag: Tag::new(9, 0).0,
            pd: PD,
            kind: TagKind::List.number(),
            reserved: [0; 3],
            max_pages: 1,
        };
        assert_eq!(
            node.command(CommandOpcode::AllocateTag, &allocate),
            CommandStatus::Unsupported
        );
        let flags = QP_FLAG_FAST_REGISTER | DRAINS;
        let mut command = node.qp_template(QpOptions {
            qpn: 0x20,
            pd: PD,
            flags: flags | QP_FLAG_LISTS,
            ..QpOptions::default()
        });
        assert_eq!(
            node.command(CommandOpcode::CreateQueuePair, &command),
            CommandStatus::Unsupported
        );
        command.flags = flags;
        let region = node.register(0x101, PD, ALL, 4096);
        let works = [
            SendWork::new(SendOpcode::RegisterSend, &[]),
            register(1, &[region.sge(0, 8)]),
            register_and_send(1, &[region.sge(0, 8)], &[]),
            // Even one that would be malformed if it were known.
            SendWork::new(SendOpcode::RegisterList, &[]),
        ];
        for (n, work) in works.iter().enumerate() {
            let qpn = 0x20 + n as u32;
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                flags,
                ..QpOptions::default()
            });
            let peer = node.as_peer(0x77);
            node.connect(qpn, &peer);
            node.post_send(qpn, work);
            node.settle();
            let entry = node.poll_cq(1).unwrap();
            assert_eq!(entry.status, LocalQueuePairOperation.number());
            // A registration that is unknown is none, and drains nothing.
            assert_eq!(node.qp_state(qpn), State::Error, "{work:?}");
        }
    }
}

#[test]
fn what_is_not_agreed_on_does_not_drain_where_other_registrations_do() {
    use SendOpcode::{FastRegister, RegisterList, RegisterListSend, RegisterSend};
    for (features, flags, opcodes) in [
        (
            FEATURES & !(FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND),
            QP_FLAG_LISTS,
            [FastRegister, RegisterSend],
        ),
        (
            FEATURES & !FEATURE_LISTS,
            QP_FLAG_FAST_REGISTER,
            [RegisterList, RegisterListSend],
        ),
    ] {
        for (service, state) in [(Service::Rc, State::Error), (Service::Uc, State::Sqe)] {
            for opcode in opcodes {
                let mut node = Node::with_features(1, features);
                let region = node.register(0x101, PD, ALL, 4096);
                let qpn = 0x20;
                node.create_qp(QpOptions {
                    qpn,
                    pd: PD,
                    service,
                    flags: flags | DRAINS,
                    ..QpOptions::default()
                });
                let peer = node.as_peer(0x77);
                match service {
                    Service::Rc => node.connect(qpn, &peer),
                    _ => node.connect_unreliable(qpn, &peer),
                }
                let work = match opcode {
                    RegisterList => register(1, &[region.sge(0, 8)]),
                    RegisterListSend => register_and_send(1, &[region.sge(0, 8)], &[]),
                    _ => SendWork::new(opcode, &[]).part(&FastRegisterPart {
                        tag: fast_tag(1),
                        access: ALL,
                        address: 0,
                        buffer: Buffer::contiguous(region.pages[0], 4096),
                        reserved: 0,
                    }),
                };
                node.post_send(qpn, &work);
                node.settle();
                let entry = node.poll_cq(1).unwrap();
                let failure = (entry.status, entry.vendor_syndrome);
                let expected = (LocalQueuePairOperation.number(), 0x102);
                assert_eq!(failure, expected, "{service:?} {opcode:?}");
                assert_eq!(node.qp_state(qpn), state, "{service:?} {opcode:?}");
            }
        }
    }
}

#[test]
fn a_flag_that_is_alone_is_taken_and_needs_a_feature_of_its_own() {
    for (features, expected) in [
        (FEATURES & !FEATURE_LISTS, CommandStatus::Ok),
        (
            FEATURES & !(FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND),
            CommandStatus::Ok,
        ),
        (
            FEATURES & !(FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND | FEATURE_LISTS),
            CommandStatus::Unsupported,
        ),
    ] {
        let mut node = Node::with_features(1, features);
        let command = node.qp_template(QpOptions {
            qpn: 0x20,
            pd: PD,
            flags: DRAINS,
            ..QpOptions::default()
        });
        let status = node.command(CommandOpcode::CreateQueuePair, &command);
        assert_eq!(status, expected, "{features:#x}");
    }
    // Lists do not need registrations of pages.
    let features = FEATURES & !(FEATURE_FAST_REGISTER | FEATURE_REGISTER_SEND | FEATURE_WINDOWS);
    let mut pair = Pair::of(
        setup(QP_FLAG_LISTS),
        Node::with_features(1, complete_features(features)),
        Node::new(2),
    );
    pair.connect(setup(QP_FLAG_LISTS));
    let region = pair.a.register(0x101, PD, ALL, 4096);
    pair.a.execute(&AllocateTag {
        tag: list_tag(0),
        pd: PD,
        kind: TagKind::List.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(list_tag(1));
    for work in [
        register(1, &[region.sge(0, 8)]),
        invalidate,
        register(1, &[region.sge(0, 8)]),
    ] {
        pair.a.post_send(QPN_A, &work);
        pair.exchange();
        assert_eq!(statuses(&pair.completions_a()), [Success]);
    }
    pair.a.post_recv(QPN_A, &[]);
    let answer = SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(list_tag(1));
    pair.b.post_send(QPN_B, &answer);
    pair.exchange();
    assert_eq!(statuses(&pair.completions_b()), [Success]);
}
