// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Memory windows between two engines: bound and unbound through a send queue, used by the peer.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use ferrite_engine::FEATURES;
use CompletionStatus::{Flushed, LocalProtection, RemoteAccess, Success, WindowBind};

const BINDABLE: u32 = ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND;
const WINDOW: Tag = Tag::new(0x40, 1);
const SECOND_A: u32 = 0x13;
const SECOND_B: u32 = 0x23;

/// No rights to register memory: consumers in user space use windows too.
fn user() -> Setup {
    Setup {
        flags: 0,
        ..Setup::default()
    }
}

struct Bench {
    pair: Pair,
    /// Where `a` has its data, and what `b` shares.
    from: Region,
    to: Region,
    data: Vec<u8>,
}

fn allocate(node: &mut Node, tag: Tag, kind: TagKind) -> CommandStatus {
    node.command(
        CommandOpcode::AllocateTag,
        &AllocateTag {
            tag: tag.0,
            pd: PD,
            kind: kind.number(),
            reserved: [0; 3],
            max_pages: 0,
        },
    )
}

impl Bench {
    fn new(kind: TagKind) -> Self {
        let mut pair = Pair::new(user());
        let from = pair.a.register(0x101, PD, ALL, 16 << 10);
        let to = pair.b.register(0x201, PD, BINDABLE, 16 << 10);
        assert_eq!(allocate(&mut pair.b, WINDOW, kind), CommandStatus::Ok);
        let data = pattern(1, 16 << 10);
        pair.a.fill(&from, 0, &data);
        Self {
            pair,
            from,
            to,
            data,
        }
    }

    /// A second connection between the two.
    fn connect_second(&mut self) {
        let setup = user();
        for (node, qpn) in [(&mut self.pair.a, SECOND_A), (&mut self.pair.b, SECOND_B)] {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                ..QpOptions::default()
            });
        }
        let mut to_b = self.pair.peer_of_a(setup);
        let mut to_a = self.pair.peer_of_b(setup);
        to_b.qpn = SECOND_B;
        to_a.qpn = SECOND_A;
        self.pair.a.connect(SECOND_A, &to_b);
        self.pair.b.connect(SECOND_B, &to_a);
    }

    /// A bind of `length` bytes from 1000 on, from one instance to the next.
    fn bind(&self, instance: u8, length: u64, access: u32) -> SendWork {
        SendWork::new(SendOpcode::Bind, &[]).part(&BindPart {
            window: Tag::new(WINDOW.index(), instance).0,
            new_window: Tag::new(WINDOW.index(), instance + 1).0,
            region: self.to.tag,
            access,
            address: self.to.address + 1000,
            length,
            reserved: [0; 2],
        })
    }

    fn post_b(&mut self, work: &SendWork) -> Vec<CompletionStatus> {
        self.pair.b.post_send(QPN_B, work);
        self.pair.exchange();
        statuses(&self.pair.completions_b())
    }

    /// `a` writes through an instance of the window, to an address of the region.
    fn write(&mut self, qpn: u32, instance: u8, offset: u64, length: u32) -> CompletionStatus {
        let work = SendWork::new(SendOpcode::Write, &[self.from.sge(0, length)]).remote(
            self.to.address + offset,
            Tag::new(WINDOW.index(), instance).0,
        );
        self.pair.a.post_send(qpn, &work);
        self.pair.exchange();
        statuses(&self.pair.completions_a())[0]
    }

    fn release(&mut self, tag: u32) -> CommandStatus {
        self.pair.b.object_command(CommandOpcode::ReleaseTag, tag)
    }
}

#[test]
fn a_peer_writes_reads_and_changes_memory_through_a_window() {
    for kind in [TagKind::Window1, TagKind::Window2B] {
        let mut bench = Bench::new(kind);
        let bind = bench.bind(1, 9000, ACCESS_REMOTE);
        bench.pair.b.post_send(QPN_B, &bind);
        bench.pair.exchange();
        let bound = bench.pair.completions_b();
        assert_eq!(statuses(&bound), [Success]);
        assert_eq!(bound[0].opcode, CompletionOpcode::Bind.number());
        // Several packets, over page boundaries.
        assert_eq!(bench.write(QPN_A, 2, 1000, 9000), Success);
        let got = bench.pair.b.contents(&bench.to, 1000, 9000);
        assert_eq!(got, bench.data[..9000]);
        let tag = Tag::new(WINDOW.index(), 2).0;
        bench.pair.a.fill(&bench.from, 0, &[0; 9000]);
        let read = SendWork::new(SendOpcode::Read, &[bench.from.sge(0, 9000)])
            .remote(bench.to.address + 1000, tag);
        bench.pair.a.post_send(QPN_A, &read);
        let atomic =
            SendWork::new(SendOpcode::FetchAdd, &[bench.from.sge(9000, 8)]).part(&AtomicPart {
                address: bench.to.address + 1000,
                rkey: tag,
                reserved: 0,
                operand: 1,
                compare: 0,
            });
        bench.pair.exchange();
        bench.pair.a.post_send(QPN_A, &atomic);
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success; 2]);
        let got = bench.pair.a.contents(&bench.from, 0, 9000);
        assert_eq!(got, bench.data[..9000]);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let changed = bench.pair.b.contents(&bench.to, 1000, 8);
        assert_eq!(word(&changed), word(&bench.data).wrapping_add(1));
    }
}

#[test]
fn a_window_is_bound_in_the_order_of_the_send_queue() {
    // The message that tells the peer is posted at once behind the bind.
    let mut bench = Bench::new(TagKind::Window2B);
    let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE);
    bench.pair.a.post_recv(QPN_A, &[]);
    bench.pair.b.post_send(QPN_B, &bind);
    bench
        .pair
        .b
        .post_send(QPN_B, &SendWork::new(SendOpcode::Send, &[]));
    bench.pair.exchange();
    let done = bench.pair.completions_b();
    assert_eq!(statuses(&done), [Success; 2]);
    assert_eq!(done[0].opcode, CompletionOpcode::Bind.number());
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(bench.write(QPN_A, 2, 1000, 100), Success);
}

#[test]
fn what_lies_outside_or_is_not_granted_is_refused_and_untouched() {
    for (access, instance, offset) in [
        (ACCESS_REMOTE_WRITE, 2, 999),
        (ACCESS_REMOTE_WRITE, 2, 1001),
        (ACCESS_REMOTE_WRITE, 1, 1000),
        (ACCESS_REMOTE_WRITE, 3, 1000),
        (ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC, 2, 1000),
        // Counted from zero, the region's address means nothing.
        (ACCESS_REMOTE_WRITE | ACCESS_ZERO_BASED, 2, 1000),
    ] {
        let mut bench = Bench::new(TagKind::Window1);
        let bind = bench.bind(1, 100, access);
        assert_eq!(bench.post_b(&bind), [Success]);
        assert_eq!(bench.write(QPN_A, instance, offset, 100), RemoteAccess);
        let untouched = bench.pair.b.contents(&bench.to, 0, 2000);
        assert!(untouched.iter().all(|&byte| byte == 0));
        assert_eq!(
            bench.pair.b.event_codes(EQ_ASYNC),
            [(EventCode::QueuePairAccessError, QPN_B)]
        );
    }
}

#[test]
fn a_zero_based_window_counts_from_its_start() {
    let mut bench = Bench::new(TagKind::Window2B);
    let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE | ACCESS_ZERO_BASED);
    assert_eq!(bench.post_b(&bind), [Success]);
    let work = SendWork::new(SendOpcode::Write, &[bench.from.sge(0, 60)])
        .remote(40, Tag::new(WINDOW.index(), 2).0);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    let got = bench.pair.b.contents(&bench.to, 1040, 60);
    assert_eq!(got, bench.data[..60]);
}

#[test]
fn type_1_is_bound_anew_and_unbound_at_any_time() {
    let mut bench = Bench::new(TagKind::Window1);
    bench.connect_second();
    let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE);
    assert_eq!(bench.post_b(&bind), [Success]);
    // Any queue pair of the domain may be used to reach it, and to bind it.
    assert_eq!(bench.write(SECOND_A, 2, 1000, 100), Success);
    let bind = bench.bind(2, 200, ACCESS_REMOTE_WRITE);
    bench.pair.b.post_send(SECOND_B, &bind);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
    assert_eq!(bench.write(QPN_A, 3, 1000, 200), Success);
    let region = bench.to.tag;
    assert_eq!(bench.release(region), CommandStatus::Busy);
    let unbind = bench.bind(3, 0, 0);
    assert_eq!(bench.post_b(&unbind), [Success]);
    assert_eq!(bench.write(QPN_A, 4, 1000, 1), RemoteAccess);
    assert_eq!(bench.release(region), CommandStatus::Ok);
    assert_eq!(bench.release(WINDOW.0), CommandStatus::Ok);
}

#[test]
fn type_2_belongs_to_its_queue_pair_until_it_is_invalidated() {
    let mut bench = Bench::new(TagKind::Window2B);
    bench.connect_second();
    let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE);
    assert_eq!(bench.post_b(&bind), [Success]);
    assert_eq!(bench.write(QPN_A, 2, 1000, 100), Success);
    let tag = Tag::new(WINDOW.index(), 2).0;
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
    assert_eq!(bench.post_b(&invalidate), [Success]);
    // Bound once more, the peer ends it.
    let bind = bench.bind(2, 100, ACCESS_REMOTE_WRITE);
    assert_eq!(bench.post_b(&bind), [Success]);
    assert_eq!(bench.write(QPN_A, 3, 1000, 100), Success);
    let tag = Tag::new(WINDOW.index(), 3).0;
    bench.pair.b.post_recv(QPN_B, &[]);
    bench.pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(tag),
    );
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    let received = bench.pair.completions_b();
    assert_eq!(statuses(&received), [Success]);
    assert_eq!((received[0].tag, received[0].immediate), (tag, 0));
    assert_eq!(bench.pair.b.engine.counters().peer_invalidations, 1);
    assert_eq!(
        received[0].flags,
        COMPLETION_RECEIVE | COMPLETION_INVALIDATED
    );
    // Bound a third time, it is no business of the other connection.
    let bind = bench.bind(3, 100, ACCESS_REMOTE_WRITE);
    assert_eq!(bench.post_b(&bind), [Success]);
    assert_eq!(bench.write(SECOND_A, 4, 1000, 100), RemoteAccess);
    assert_eq!(bench.write(QPN_A, 4, 1000, 100), Success);
    // It goes with its queue pair.
    let region = bench.to.tag;
    assert_eq!(bench.release(region), CommandStatus::Busy);
    bench
        .pair
        .b
        .object_command(CommandOpcode::DestroyQueuePair, QPN_B);
    assert_eq!(bench.release(region), CommandStatus::Ok);
}

#[test]
fn a_peer_may_not_invalidate_what_is_not_its_own() {
    for kind in [TagKind::Window1, TagKind::Window2B] {
        let mut bench = Bench::new(kind);
        bench.connect_second();
        let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE);
        assert_eq!(bench.post_b(&bind), [Success]);
        let tag = Tag::new(WINDOW.index(), 2).0;
        bench.pair.b.post_recv(SECOND_B, &[]);
        bench.pair.a.post_send(
            SECOND_A,
            &SendWork::new(SendOpcode::SendInvalidate, &[]).invalidate(tag),
        );
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_a()), [RemoteAccess]);
        assert_eq!(bench.write(QPN_A, 2, 1000, 100), Success);
    }
}

#[test]
fn a_bind_that_is_refused_fails_with_its_own_status() {
    let work = |bench: &Bench, change: fn(&mut BindPart)| {
        let bind = bench.bind(1, 100, ACCESS_REMOTE_WRITE);
        let mut part = BindPart::from_prefix(&bind.part).unwrap();
        change(&mut part);
        bind.part(&part)
    };
    type Change = fn(&mut BindPart);
    let cases: [(Change, u32); 5] = [
        (
            |part| part.new_window = Tag::new(WINDOW.index() + 1, 2).0,
            5,
        ),
        (|part| part.region = 0x7701, 1),
        (|part| part.length = 16 << 10, 6),
        (|part| part.access |= ACCESS_LOCAL_WRITE, 7),
        (|part| part.window = part.region, 3),
    ];
    for (change, vendor_syndrome) in cases {
        let mut bench = Bench::new(TagKind::Window1);
        let bind = work(&bench, change);
        let more = SendWork::new(SendOpcode::Send, &[]);
        bench.pair.b.post_send(QPN_B, &bind);
        bench.pair.b.post_send(QPN_B, &more);
        bench.pair.exchange();
        let done = bench.pair.completions_b();
        assert_eq!(statuses(&done), [WindowBind, Flushed]);
        assert_eq!(done[0].opcode, CompletionOpcode::Bind.number());
        assert_eq!(done[0].vendor_syndrome, vendor_syndrome);
        let region = bench.to.tag;
        assert_eq!(bench.release(region), CommandStatus::Ok);
    }
}

#[test]
fn windows_are_for_peers_and_registration_stays_privileged() {
    let mut bench = Bench::new(TagKind::Window1);
    let bind = bench.bind(1, 100, ACCESS_REMOTE);
    assert_eq!(bench.post_b(&bind), [Success]);
    let sge = Sge {
        address: bench.to.address + 1000,
        length: 1,
        lkey: Tag::new(WINDOW.index(), 2).0,
    };
    assert_eq!(
        bench.post_b(&SendWork::new(SendOpcode::Send, &[sge])),
        [LocalProtection]
    );
    // A queue pair that may not register may not invalidate regions either.
    let mut bench = Bench::new(TagKind::Window1);
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(bench.to.tag);
    assert_eq!(
        bench.post_b(&invalidate),
        [CompletionStatus::LocalQueuePairOperation]
    );
}

#[test]
fn a_write_under_way_ends_with_the_window() {
    let mut bench = Bench::new(TagKind::Window2B);
    let bind = bench.bind(1, 8192, ACCESS_REMOTE_WRITE);
    assert_eq!(bench.post_b(&bind), [Success]);
    let tag = Tag::new(WINDOW.index(), 2).0;
    let work = SendWork::new(SendOpcode::Write, &[bench.from.sge(0, 8192)])
        .remote(bench.to.address + 1000, tag);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.a.settle();
    let frames: Vec<_> = std::mem::take(&mut bench.pair.a.host.sent).into();
    assert_eq!(frames.len(), 8);
    for frame in &frames[..3] {
        bench.pair.b.receive(frame);
    }
    let invalidate = SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag);
    bench.pair.b.post_send(QPN_B, &invalidate);
    bench.pair.b.settle();
    for frame in &frames[3..] {
        bench.pair.b.receive(frame);
    }
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [RemoteAccess]);
    let got = bench.pair.b.contents(&bench.to, 1000, 8192);
    assert_eq!(got[..3072], bench.data[..3072]);
    assert!(got[3072..].iter().all(|&byte| byte == 0));
}

/// On such a queue pair a peer is let in through windows, and through nothing else, whatever it allows: not through
/// regions and lists, which others of the domain let in.
#[test]
fn a_queue_pair_may_let_in_windows_only() {
    const LIST: Tag = Tag::new(0x41, 7);
    let rights = ACCESS_LOCAL_WRITE | ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL | ACCESS_WINDOW_BIND;
    let atomic = |address, rkey| AtomicPart {
        address,
        rkey,
        operand: 1,
        ..AtomicPart::zeroed()
    };
    let flush = |address, rkey| {
        SendWork::new(SendOpcode::Flush, &[]).part(&FlushPart {
            address,
            rkey,
            length: 8,
            placement: FLUSH_GLOBAL,
            selectivity: FLUSH_RANGE,
            reserved: 0,
        })
    };
    for windows_only in [false, true] {
        for kind in [
            TagKind::Region,
            TagKind::List,
            TagKind::Window1,
            TagKind::Window2B,
        ] {
            for opcode in [
                SendOpcode::Write,
                SendOpcode::Read,
                SendOpcode::FetchAdd,
                SendOpcode::AtomicWrite,
                SendOpcode::Flush,
            ] {
                let flags = QP_FLAG_LISTS
                    | if windows_only {
                        QP_FLAG_WINDOWS_ONLY
                    } else {
                        0
                    };
                let mut pair = Pair::new(Setup {
                    flags,
                    ..Setup::default()
                });
                pair.b.execute(&ModifyQueuePair {
                    qpn: QPN_B,
                    mask: MODIFY_STATE | MODIFY_ACCESS,
                    state: QueuePairStateCode::Rts.number(),
                    access: ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL,
                    ..ModifyQueuePair::zeroed()
                });
                let from = pair.a.register(0x101, PD, ALL, 4096);
                let region = pair.b.register(0x201, PD, rights, 4096);
                let rkey = match kind {
                    TagKind::Region => region.tag,
                    TagKind::List => {
                        let allocated = AllocateTag {
                            tag: LIST.0,
                            pd: PD,
                            kind: kind.number(),
                            reserved: [0; 3],
                            max_pages: 1,
                        };
                        pair.b.execute(&allocated);
                        let part = ListPart {
                            tag: LIST.0,
                            access: rights & !ACCESS_WINDOW_BIND,
                            address: region.address,
                            pieces: 1,
                            ..ListPart::zeroed()
                        };
                        let pieces = [region.sge(0, 4096)];
                        let register = SendWork::new(SendOpcode::RegisterList, &pieces).part(&part);
                        pair.b.post_send(QPN_B, &register);
                        LIST.0
                    }
                    _ => {
                        assert_eq!(allocate(&mut pair.b, WINDOW, kind), CommandStatus::Ok);
                        let bound = Tag::new(WINDOW.index(), 2).0;
                        let part = BindPart {
                            window: WINDOW.0,
                            new_window: bound,
                            region: region.tag,
                            access: ACCESS_REMOTE,
                            address: region.address,
                            length: 4096,
                            ..BindPart::zeroed()
                        };
                        let bind = SendWork::new(SendOpcode::Bind, &[]).part(&part);
                        pair.b.post_send(QPN_B, &bind);
                        bound
                    }
                };
                pair.exchange();
                let made = statuses(&pair.completions_b());
                assert!(made.iter().all(|status| *status == Success), "{made:?}");
                let work = match opcode {
                    SendOpcode::FetchAdd => {
                        SendWork::new(opcode, &[from.sge(0, 8)]).part(&atomic(region.address, rkey))
                    }
                    SendOpcode::Flush => flush(region.address, rkey),
                    SendOpcode::AtomicWrite => SendWork::new(opcode, &[])
                        .remote(region.address, rkey)
                        .inline(&[7; 8]),
                    _ => SendWork::new(opcode, &[from.sge(0, 8)]).remote(region.address, rkey),
                };
                pair.a.post_send(QPN_A, &work);
                pair.exchange();
                let is_window = matches!(kind, TagKind::Window1 | TagKind::Window2B);
                // Windows give no right to flush.
                let is_let_in = match opcode {
                    SendOpcode::Flush => !is_window && !windows_only,
                    _ => is_window || !windows_only,
                };
                let status = if is_let_in { Success } else { RemoteAccess };
                assert_eq!(
                    statuses(&pair.completions_a()),
                    [status],
                    "{opcode:?} by {kind:?}, windows only: {windows_only}"
                );
                let told = pair.b.events(EQ_ASYNC);
                let told: Vec<_> = told.iter().map(|event| event.param0).collect();
                match (is_let_in, is_window) {
                    (true, _) => assert_eq!(told, [0; 0]),
                    (false, false) => assert_eq!(told, [3]),
                    (false, true) => assert_eq!(told, [7]),
                }
            }
        }
    }
}

#[test]
fn a_driver_that_did_not_agree_has_no_queue_pair_for_windows_only() {
    for (features, status) in [
        (FEATURES, CommandStatus::Ok),
        (FEATURES & !FEATURE_WINDOWS_ONLY, CommandStatus::Unsupported),
    ] {
        let mut node = Node::with_features(1, features);
        let command = node.qp_template(QpOptions {
            flags: QP_FLAG_WINDOWS_ONLY,
            ..QpOptions::default()
        });
        let made = node.command(CommandOpcode::CreateQueuePair, &command);
        assert_eq!(made, status);
    }
}
