// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tags that are used as soon as the command that makes them is posted: what uses one waits until the
//! command is finished, alone, and nothing gets at memory whose release was posted.

use crate::attack::{all_seeds, seeds};
use crate::wire::*;
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use ferrite_engine::FEATURES;
use std::collections::BTreeMap;
use CompletionStatus::{
    Flushed, LocalProtection, RemoteAccess, RemoteOperation, Success, WindowBind,
};

/// Milliseconds that commands on tags take here.
pub(crate) const HOLD: f64 = 20.0;
const MILLISECOND: u64 = 1_000_000;
/// Another connection of the same machines.
pub(crate) const OTHER: u32 = 0x77;
pub(crate) const TAG: u32 = 0x901;
pub(crate) const FLAGS: u16 = QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS;
/// What a tag whose registration failed is refused with.
const FAILED: u32 = 19;
pub(crate) const RIGHTS: u32 = ALL | ACCESS_WINDOW_BIND;

pub(crate) struct Bench {
    pub(crate) pair: Pair,
    /// Of the machine that posts.
    pub(crate) near: Region,
    /// Of the other.
    pub(crate) far: Region,
}

impl Bench {
    pub(crate) fn new() -> Self {
        // Nobody is told that a receiver is not ready because a tag is pending; who is, has lost.
        let setup = Setup {
            flags: FLAGS,
            rnr_retry: 0,
            min_rnr_timer: 0,
            ..Setup::default()
        };
        // Those that look for commands at every turn have nothing to wait for here.
        let node = |number| Node::with_features(number, FEATURES & !FEATURE_TURNS);
        let mut pair = Pair::of(setup, node(1), node(2));
        pair.connect(setup);
        for node in [&mut pair.a, &mut pair.b] {
            node.create_cq(2, EQ_FIRST_HANDLER, 6);
            node.create_qp(QpOptions {
                qpn: OTHER,
                pd: PD,
                cqn: 2,
                ..QpOptions::default()
            });
        }
        let (a, b) = (pair.a.as_peer(OTHER), pair.b.as_peer(OTHER));
        pair.a.connect(OTHER, &b);
        pair.b.connect(OTHER, &a);
        let near = pair.a.register(0x101, PD, RIGHTS, 8192);
        let far = pair.b.register(0x201, PD, RIGHTS, 8192);
        pair.a.hold_tags(HOLD);
        pair.b.hold_tags(HOLD);
        Self { pair, near, far }
    }

    /// Others are served as ever.
    pub(crate) fn others_go_on(&mut self) {
        // Where nobody else writes.
        const AT: u64 = 8000;
        let write = SendWork::new(SendOpcode::Write, &[self.near.sge(AT, 64)])
            .remote(self.far.address + AT, self.far.tag);
        for node in [true, false] {
            let (node, work) = if node {
                (&mut self.pair.a, write.clone())
            } else {
                let back = SendWork::new(SendOpcode::Write, &[self.far.sge(AT, 64)])
                    .remote(self.near.address + AT, self.near.tag);
                (&mut self.pair.b, back)
            };
            node.post_send(OTHER, &work.flags(SEND_SIGNALED));
        }
        self.pair.exchange();
        for node in [&mut self.pair.a, &mut self.pair.b] {
            let done = node.poll_cq(2).expect("others go on");
            assert_eq!(done.status, Success.number());
        }
    }

    pub(crate) fn waits(&self) -> (u64, u64) {
        let waits = |node: &Node| node.engine.counters().pending_waits;
        (waits(&self.pair.a), waits(&self.pair.b))
    }
}

/// The same with a value that no registration takes.
pub(crate) fn spoiled(command: RegisterRegion) -> RegisterRegion {
    RegisterRegion {
        access: u32::MAX,
        ..command
    }
}

pub(crate) fn allocation(index: u32, kind: TagKind) -> AllocateTag {
    AllocateTag {
        tag: Tag::new(index, 0).0,
        pd: PD,
        kind: kind.number(),
        reserved: [0; 3],
        max_pages: match kind {
            TagKind::Region | TagKind::List => 4,
            _ => 0,
        },
    }
}

pub(crate) fn post<P: Command>(node: &mut Node, command: &P) -> u32 {
    node.post_command(P::OPCODE, command)
}

fn release(node: &mut Node, tag: u32) -> u32 {
    let object = ObjectNumber {
        number: tag,
        reserved: 0,
    };
    node.post_command(CommandOpcode::ReleaseTag, &object)
}

/// Uses of a region of the machine that posts. A tag of each kind is reserved by commands that are
/// held up like all others.
pub(crate) const LOCAL: [&str; 8] = [
    "send",
    "write",
    "read",
    "atomic",
    "list",
    "register list and send",
    "bind",
    "fast registration",
];

/// Work requests that use `region` so.
pub(crate) fn local_uses(bench: &mut Bench, what: &str, region: &Region) -> Vec<SendWork> {
    let far = (bench.far.address, bench.far.tag);
    let sge = region.sge(8, 64);
    let (near, node) = (bench.near.sge(0, 64), &mut bench.pair.a);
    let list = ListPart {
        tag: Tag::new(0x50, 1).0,
        access: ALL,
        address: 0x5000,
        pieces: 2,
        ..ListPart::zeroed()
    };
    match what {
        "send" => {
            let into = bench.far.sge(0, 64);
            bench.pair.b.post_recv(QPN_B, &[into]);
            vec![SendWork::new(SendOpcode::Send, &[sge])]
        }
        "write" => vec![SendWork::new(SendOpcode::Write, &[sge]).remote(far.0, far.1)],
        "read" => vec![SendWork::new(SendOpcode::Read, &[sge]).remote(far.0, far.1)],
        "atomic" => vec![
            SendWork::new(SendOpcode::FetchAdd, &[region.sge(8, 8)]).part(&AtomicPart {
                address: far.0,
                rkey: far.1,
                reserved: 0,
                operand: 3,
                compare: 0,
            }),
        ],
        "list" => {
            node.execute_now(&allocation(0x50, TagKind::List));
            vec![SendWork::new(SendOpcode::RegisterList, &[near, sge]).part(&list)]
        }
        "register list and send" => {
            node.execute_now(&allocation(0x50, TagKind::List));
            bench.pair.b.post_recv(QPN_B, &[bench.far.sge(0, 128)]);
            let sges = [near, sge, near];
            vec![SendWork::new(SendOpcode::RegisterListSend, &sges).part(&list)]
        }
        "bind" => {
            node.execute_now(&allocation(0x51, TagKind::Window2B));
            vec![SendWork::new(SendOpcode::Bind, &[]).part(&BindPart {
                window: Tag::new(0x51, 0).0,
                new_window: Tag::new(0x51, 1).0,
                region: region.tag,
                access: ACCESS_REMOTE_READ,
                address: region.address,
                length: 64,
                ..BindPart::zeroed()
            })]
        }
        _ => {
            // The tag to register is the pending one, and so is what uses it next.
            let part = FastRegisterPart {
                tag: Tag::new(0x52, 3).0,
                access: ALL,
                address: 0x9000,
                buffer: Buffer::contiguous(region.pages[0], 4096),
                reserved: 0,
            };
            let sge = Sge {
                address: 0x9000,
                length: 16,
                lkey: part.tag,
            };
            vec![
                SendWork::new(SendOpcode::FastRegister, &[]).part(&part),
                SendWork::new(SendOpcode::Write, &[sge]).remote(far.0, far.1),
                SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(part.tag),
            ]
        }
    }
}

fn is_sending(node: &Node, qpn: u32) -> bool {
    let qp = node.engine.queue_pairs().get(qpn);
    qp.is_some_and(|qp| qp.state == State::Rts)
}

trait ExecuteNow {
    /// Carries a command out before anything is held up.
    fn execute_now<P: Command>(&mut self, command: &P);
}

impl ExecuteNow for Node {
    fn execute_now<P: Command>(&mut self, command: &P) {
        self.hold_tags(0.0);
        self.execute(command);
        self.hold_tags(HOLD);
    }
}

pub(crate) fn post_all(node: &mut Node, work: Vec<SendWork>) {
    for work in work {
        node.write_blocks(QPN_A, &work.flags(SEND_SIGNALED).encode());
    }
    node.publish_send(QPN_A);
}

#[test]
fn every_local_use_of_a_pending_tag_waits_alone_and_goes_on() {
    for what in LOCAL {
        for fails in [false, true] {
            let mut bench = Bench::new();
            let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 8192);
            let mut work = local_uses(&mut bench, what, &region);
            let count = work.len();
            let data = pattern(1, 64);
            bench.pair.a.fill(&region, 8, &data);
            // Something before it, which does not wait.
            let before = SendWork::new(SendOpcode::Write, &[bench.near.sge(0, 1)])
                .remote(bench.far.address, bench.far.tag);
            work.insert(0, before);
            let cookie = match (what, fails) {
                ("fast registration", false) => {
                    post(&mut bench.pair.a, &allocation(0x52, TagKind::Region))
                }
                ("fast registration", true) => {
                    let allocation = AllocateTag {
                        max_pages: 0,
                        ..allocation(0x52, TagKind::Region)
                    };
                    post(&mut bench.pair.a, &allocation)
                }
                (_, false) => post(&mut bench.pair.a, &command),
                (_, true) => post(&mut bench.pair.a, &spoiled(command)),
            };
            post_all(&mut bench.pair.a, work);
            bench.pair.exchange();
            let done = statuses(&bench.pair.completions_a());
            assert_eq!(done, [Success], "{what}: what stands before it");
            bench.others_go_on();
            assert!(bench.pair.a.answers().is_empty(), "{what}");
            assert_eq!(bench.waits(), (1, 0), "{what}");
            bench.pair.run();
            let status = if fails {
                CommandStatus::BadParameter
            } else {
                CommandStatus::Ok
            };
            assert_eq!(bench.pair.a.answers(), [(cookie, status)]);
            let completions = bench.pair.completions_a();
            let done = statuses(&completions);
            if fails {
                let expected = if what == "bind" {
                    WindowBind
                } else {
                    LocalProtection
                };
                assert_eq!(done[0], expected, "{what}");
                assert_eq!(completions[0].vendor_syndrome, FAILED, "{what}");
                assert!(done[1..].iter().all(|status| *status == Flushed));
            } else {
                assert_eq!(done, vec![Success; count], "{what}");
            }
            assert_eq!(bench.waits(), (1, 0), "{what}: counted once");
            if what == "write" && !fails {
                assert_eq!(bench.pair.b.contents(&bench.far, 0, 64), data);
            }
        }
    }
}

#[test]
fn every_request_of_a_peer_for_a_pending_tag_is_answered_later() {
    for what in ["write", "read", "atomic", "receive"] {
        for fails in [false, true] {
            let mut bench = Bench::new();
            let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 8192);
            let data = pattern(2, 3000);
            bench.pair.a.fill(&bench.near, 0, &data);
            bench.pair.b.fill(&region, 0, &data);
            let command = if fails { spoiled(command) } else { command };
            post(&mut bench.pair.b, &command);
            let sge = bench.near.sge(0, 3000);
            let work = match what {
                "write" => SendWork::new(SendOpcode::Write, &[sge]),
                "read" => SendWork::new(SendOpcode::Read, &[bench.near.sge(4096, 3000)]),
                "atomic" => SendWork::new(SendOpcode::FetchAdd, &[bench.near.sge(4096, 8)]).part(
                    &AtomicPart {
                        address: region.address,
                        rkey: region.tag,
                        reserved: 0,
                        operand: 3,
                        compare: 0,
                    },
                ),
                _ => {
                    bench.pair.b.post_recv(QPN_B, &[region.sge(0, 3000)]);
                    SendWork::new(SendOpcode::Send, &[sge])
                }
            };
            let work = match what {
                "write" | "read" => work.remote(region.address, region.tag),
                _ => work,
            };
            post_all(&mut bench.pair.a, vec![work]);
            bench.pair.exchange();
            assert!(bench.pair.completions_a().is_empty(), "{what}");
            bench.others_go_on();
            bench.pair.run();
            assert_eq!(bench.waits(), (0, 1), "{what}: counted once");
            let counters = bench.pair.b.engine.counters();
            assert_eq!(counters.rnr_naks_sent, 0, "{what}");
            let done = statuses(&bench.pair.completions_a());
            let received = bench.pair.completions_b();
            if fails {
                let receive = what == "receive";
                let expected = if receive {
                    RemoteOperation
                } else {
                    RemoteAccess
                };
                assert_eq!(done, [expected], "{what}");
                if receive {
                    assert_eq!(statuses(&received), [LocalProtection]);
                    assert_eq!(received[0].vendor_syndrome, FAILED);
                }
                continue;
            }
            assert_eq!(done, [Success], "{what}");
            match what {
                "write" => assert_eq!(bench.pair.b.contents(&region, 0, 3000), data),
                "read" => assert_eq!(bench.pair.a.contents(&bench.near, 4096, 3000), data),
                "atomic" => assert_eq!(bench.pair.a.contents(&bench.near, 4096, 8), data[..8]),
                _ => {
                    assert_eq!(statuses(&received), [Success]);
                    assert_eq!(bench.pair.b.contents(&region, 0, 3000), data);
                }
            }
        }
    }
}

#[test]
fn a_peer_invalidates_a_pending_tag_when_it_is_there() {
    let mut bench = Bench::new();
    // Allocated, and made valid by work requests that wait for that.
    let allocation = allocation(0x52, TagKind::Region);
    post(&mut bench.pair.b, &allocation);
    let part = FastRegisterPart {
        tag: Tag::new(0x52, 3).0,
        access: ALL,
        address: 0x9000,
        buffer: Buffer::contiguous(bench.far.pages[0], 4096),
        reserved: 0,
    };
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    bench
        .pair
        .b
        .post_send(QPN_B, &register.flags(SEND_SIGNALED));
    bench.pair.b.post_recv(QPN_B, &[bench.far.sge(0, 8)]);
    let send = SendWork::new(SendOpcode::SendInvalidate, &[bench.near.sge(0, 8)]);
    post_all(&mut bench.pair.a, vec![send.invalidate(part.tag)]);
    bench.pair.exchange();
    assert!(bench.pair.completions_a().is_empty() && bench.pair.completions_b().is_empty());
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(statuses(&bench.pair.completions_b()), [Success, Success]);
    // One of each side of the queue pair.
    assert_eq!(bench.waits(), (0, 2));
}

#[test]
fn a_leaving_tag_is_refused_at_once() {
    for remote in [false, true] {
        let mut bench = Bench::new();
        let (near, far) = (bench.near.clone(), bench.far.clone());
        let (node, tag) = match remote {
            false => (&mut bench.pair.a, near.tag),
            true => (&mut bench.pair.b, far.tag),
        };
        let before = bench.far.sge(0, 64);
        let cookie = release(node, tag);
        let old = bench.pair.b.contents(&far, 0, 64);
        bench.pair.a.fill(&near, 0, &pattern(5, 64));
        let work =
            SendWork::new(SendOpcode::Write, &[near.sge(0, 64)]).remote(before.address, far.tag);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        let done = statuses(&bench.pair.completions_a());
        assert_eq!(
            done,
            [if remote {
                RemoteAccess
            } else {
                LocalProtection
            }]
        );
        assert_eq!(bench.pair.b.contents(&far, 0, 64), old);
        assert_eq!(bench.waits(), (0, 0));
        // The command is finished later.
        for node in [&mut bench.pair.a, &mut bench.pair.b] {
            assert!(node.answers().is_empty());
        }
        bench.pair.run();
        let node = if remote {
            &mut bench.pair.b
        } else {
            &mut bench.pair.a
        };
        assert_eq!(node.answers(), [(cookie, CommandStatus::Ok)]);
    }
}

#[test]
fn a_release_that_is_refused_because_of_a_window_harms_nobody() {
    for window_first in [false, true] {
        let mut bench = Bench::new();
        let node = &mut bench.pair.b;
        node.execute_now(&allocation(0x51, TagKind::Window2B));
        let part = BindPart {
            window: Tag::new(0x51, 0).0,
            new_window: Tag::new(0x51, 1).0,
            region: bench.far.tag,
            access: ACCESS_REMOTE_WRITE,
            address: bench.far.address,
            length: 64,
            ..BindPart::zeroed()
        };
        let bind = SendWork::new(SendOpcode::Bind, &[]).part(&part);
        node.post_send(QPN_B, &bind.flags(SEND_SIGNALED));
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        bench.pair.b.answers();
        let mut released = Vec::new();
        if window_first {
            released.push(release(&mut bench.pair.b, part.new_window));
        }
        released.push(release(&mut bench.pair.b, bench.far.tag));
        let near = bench.near.sge(0, 8);
        let write = SendWork::new(SendOpcode::Write, &[near]);
        let work = [part.new_window, bench.far.tag]
            .map(|tag| write.clone().remote(bench.far.address, tag));
        post_all(&mut bench.pair.a, work.to_vec());
        bench.pair.exchange();
        assert!(bench.pair.b.answers().is_empty(), "it is held up");
        let done = statuses(&bench.pair.completions_a());
        let expected = if window_first {
            [RemoteAccess, Flushed]
        } else {
            [Success, Success]
        };
        assert_eq!(done, expected);
        bench.pair.run();
        let status = if window_first {
            CommandStatus::Ok
        } else {
            CommandStatus::Busy
        };
        let answers = released.into_iter().map(|cookie| (cookie, status));
        assert!(bench.pair.b.answers().into_iter().eq(answers));
    }
}

#[test]
fn a_release_behind_a_pending_registration_ends_the_wait_for_it() {
    let mut bench = Bench::new();
    let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 4096);
    let registered = post(&mut bench.pair.a, &command);
    let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)])
        .remote(bench.far.address, bench.far.tag);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.exchange();
    assert!(bench.pair.completions_a().is_empty());
    let released = release(&mut bench.pair.a, TAG);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [LocalProtection]);
    assert!(bench.pair.a.answers().is_empty());
    bench.pair.run();
    let done = [registered, released].map(|cookie| (cookie, CommandStatus::Ok));
    assert_eq!(bench.pair.a.answers(), done);
}

#[test]
fn queue_pairs_that_wait_can_be_stopped_reset_and_destroyed() {
    for end in ["error", "reset", "destroy", "device", "fatal"] {
        let mut bench = Bench::new();
        let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 4096);
        post(&mut bench.pair.a, &command);
        bench.pair.a.answers();
        let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)])
            .remote(bench.far.address, bench.far.tag);
        post_all(&mut bench.pair.a, vec![work.clone(), work]);
        bench.pair.exchange();
        assert!(bench.pair.completions_a().is_empty());
        let node = &mut bench.pair.a;
        match end {
            "error" => {
                assert_eq!(node.set_state(QPN_A, State::Error), CommandStatus::Ok);
                assert_eq!(statuses(&drain(node)), [Flushed, Flushed]);
            }
            "reset" => assert_eq!(node.set_state(QPN_A, State::Reset), CommandStatus::Ok),
            "destroy" => {
                let status = node.object_command(CommandOpcode::DestroyQueuePair, QPN_A);
                assert_eq!(status, CommandStatus::Ok);
            }
            "device" => {
                node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
                assert_eq!(node.engine.next_timeout(), None);
                node.boot();
                assert_eq!(
                    node.object_command(CommandOpcode::DestroyQueuePair, QPN_A),
                    CommandStatus::NotFound
                );
                continue;
            }
            _ => {
                node.engine.inject_fatal(&mut node.host);
                node.now += 100 * MILLISECOND;
                node.settle();
                continue;
            }
        }
        bench.pair.run();
        assert!(bench.pair.completions_a().is_empty(), "{end}");
        let frames = bench.pair.b.engine.counters().rx_packets;
        bench.others_go_on();
        assert!(bench.pair.b.engine.counters().rx_packets > frames);
        assert_eq!(bench.pair.a.answers().len(), 1, "{end}");
    }
}

#[test]
fn a_region_that_is_about_to_be_replaced_is_waited_for_and_stays_when_that_fails() {
    for fails in [false, true] {
        let mut bench = Bench::new();
        let (command, other) = bench.pair.a.region(bench.near.tag, PD, RIGHTS, 8192);
        let (old, new) = (pattern(1, 32), pattern(2, 32));
        let near = bench.near.clone();
        bench.pair.a.fill(&near, 0, &old);
        bench.pair.a.fill(&other, 0, &new);
        let command = RegisterRegion {
            flags: REGION_REPLACE,
            ..command
        };
        let command = if fails { spoiled(command) } else { command };
        post(&mut bench.pair.a, &command);
        let work = SendWork::new(SendOpcode::Write, &[near.sge(0, 32)])
            .remote(bench.far.address, bench.far.tag);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        assert!(bench.pair.completions_a().is_empty());
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        let expected = if fails { old } else { new };
        assert_eq!(bench.pair.b.contents(&bench.far, 0, 32), expected);
        assert_eq!(bench.waits(), (1, 0));
    }
}

#[test]
fn the_answer_to_a_read_waits_for_its_place() {
    let mut bench = Bench::new();
    let (near, far) = (bench.near.clone(), bench.far.clone());
    let data = pattern(7, 5000);
    bench.pair.b.fill(&far, 0, &data);
    let work = SendWork::new(SendOpcode::Read, &[near.sge(0, 5000)]).remote(far.address, far.tag);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.a.settle();
    // The request is on its way when the place of its answer is about to be replaced; in vain.
    let (command, _) = bench.pair.a.region(near.tag, PD, RIGHTS, 8192);
    post(
        &mut bench.pair.a,
        &spoiled(RegisterRegion {
            flags: REGION_REPLACE,
            ..command
        }),
    );
    bench.pair.exchange();
    assert!(bench.pair.completions_a().is_empty());
    assert_eq!(bench.waits(), (1, 0));
    bench.pair.run();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(bench.pair.a.contents(&near, 0, 5000), data);
    assert_eq!(bench.waits(), (1, 0));
}

#[test]
fn a_failed_tag_can_be_released_or_registered_again() {
    let mut node = Node::new(1);
    let (command, _) = node.region(TAG, PD, RIGHTS, 4096);
    let register = |node: &mut Node, command: &RegisterRegion| {
        node.command(CommandOpcode::RegisterRegion, command)
    };
    let other = Tag::new(Tag(TAG).index(), 0x77).0;
    for _ in 0..3 {
        assert_eq!(
            register(&mut node, &spoiled(command)),
            CommandStatus::BadParameter
        );
        let released = |node: &mut Node, tag| node.object_command(CommandOpcode::ReleaseTag, tag);
        assert_eq!(released(&mut node, other), CommandStatus::NotFound);
        assert_eq!(released(&mut node, TAG), CommandStatus::Ok);
        assert_eq!(released(&mut node, TAG), CommandStatus::NotFound);
    }
    assert_ne!(register(&mut node, &spoiled(command)), CommandStatus::Ok);
    let replace = RegisterRegion {
        flags: REGION_REPLACE,
        ..command
    };
    assert_eq!(register(&mut node, &replace), CommandStatus::NotFound);
    assert_eq!(register(&mut node, &command), CommandStatus::Ok);
    // What is there stays what it is.
    assert_eq!(register(&mut node, &command), CommandStatus::Exists);
    assert_eq!(register(&mut node, &replace), CommandStatus::Ok);
    // Without the feature a registration that failed leaves nothing.
    let mut node = Node::with_features(1, FEATURES & !(FEATURE_PENDING_TAGS | FEATURE_TURNS));
    let (command, _) = node.region(TAG, PD, RIGHTS, 4096);
    assert_ne!(register(&mut node, &spoiled(command)), CommandStatus::Ok);
    assert_eq!(
        node.object_command(CommandOpcode::ReleaseTag, TAG),
        CommandStatus::NotFound
    );
}

#[test]
fn a_command_before_a_release_finds_what_is_leaving() {
    let mut node = Node::new(1);
    let table = node.allocate_pages(1)[0];
    node.execute(&RegisterRegion {
        tag: TAG,
        pd: PD,
        access: ALL,
        flags: REGION_ON_DEMAND,
        address: 0x7000_0000,
        buffer: Buffer {
            root: table,
            length: 8192,
            fbo: 0,
            page_shift: 12,
            order: 1,
            reserved: 0,
        },
    });
    let invalidate = InvalidatePages {
        tag: TAG,
        reserved: 0,
        first: 0,
        count: 1,
    };
    let object = ObjectNumber {
        number: TAG,
        reserved: 0,
    };
    let commands = [
        CommandEntry::new(InvalidatePages::OPCODE, 0, (0, 0), &invalidate),
        CommandEntry::new(CommandOpcode::ReleaseTag, 0, (0, 0), &object),
        CommandEntry::new(InvalidatePages::OPCODE, 0, (0, 0), &invalidate),
    ];
    let (ok, gone) = (CommandStatus::Ok, CommandStatus::NotFound);
    assert_eq!(node.commands(&commands), [ok, ok, gone]);
}

#[test]
fn without_the_feature_nothing_waits() {
    let mut pair = Pair::of(
        Setup::default(),
        Node::with_features(1, FEATURES & !(FEATURE_PENDING_TAGS | FEATURE_TURNS)),
        Node::new(2),
    );
    pair.connect(Setup::default());
    let far = pair.b.register(0x201, PD, ALL, 4096);
    pair.a.hold_tags(HOLD);
    let (command, region) = pair.a.region(TAG, PD, RIGHTS, 4096);
    post(&mut pair.a, &command);
    let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)]).remote(far.address, far.tag);
    post_all(&mut pair.a, vec![work]);
    pair.exchange();
    let done = pair.completions_a();
    assert_eq!(statuses(&done), [LocalProtection]);
    assert_eq!(done[0].vendor_syndrome, 1);
    assert_eq!(pair.a.engine.counters().pending_waits, 0);
}

#[test]
fn services_that_do_not_send_again_wait_in_line() {
    for service in [Service::Uc, Service::Ud] {
        for near in [true, false] {
            let mut pair = Pair::unacknowledged(service, FLAGS);
            let (from, from_region) = pair.a.region(0x101, PD, RIGHTS, 4096);
            let (into, into_region) = pair.b.region(0x201, PD, RIGHTS, 8192);
            let node = if near { &mut pair.a } else { &mut pair.b };
            node.hold_tags(HOLD);
            post(&mut pair.a, &from);
            post(&mut pair.b, &into);
            pair.send_three(service, &from_region, &into_region);
            pair.exchange();
            assert_eq!(pair.completions_a().len(), if near { 0 } else { 3 });
            assert!(pair.completions_b().is_empty(), "{service:?} {near}");
            pair.run();
            assert_eq!(pair.completions_a().len(), if near { 3 } else { 0 });
            assert_eq!(statuses(&pair.completions_b()), [Success; 3]);
            let header = if service == Service::Ud { 40 } else { 0 };
            for n in 0..3u64 {
                let got = pair.b.contents(&into_region, n * 200 + header, 100);
                assert_eq!(got, pattern(n, 100), "{service:?} {near} {n}");
            }
            let node = if near { &pair.a } else { &pair.b };
            assert_eq!(node.engine.counters().pending_waits, 1);
        }
    }
}

#[test]
fn what_was_sent_before_is_sent_again_while_something_waits() {
    let mut bench = Bench::new();
    let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 4096);
    bench.pair.a.hold_tags(60_000.0);
    post(&mut bench.pair.a, &command);
    let remote = |work: SendWork, bench: &Bench| work.remote(bench.far.address, bench.far.tag);
    let near = bench.near.clone();
    let first = remote(SendWork::new(SendOpcode::Write, &[near.sge(0, 8)]), &bench);
    let second = remote(
        SendWork::new(SendOpcode::Write, &[region.sge(0, 8)]),
        &bench,
    );
    post_all(&mut bench.pair.a, vec![first, second]);
    // The first packet is lost.
    let mut lost = false;
    bench.pair.exchange_with(|_, frame| {
        let keep = lost;
        lost = true;
        if keep {
            vec![frame]
        } else {
            Vec::new()
        }
    });
    assert!(bench.pair.completions_a().is_empty());
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(bench.pair.pass_time());
        bench.pair.exchange();
        done = statuses(&bench.pair.completions_a());
    }
    assert_eq!(done, [Success]);
    assert!(bench.pair.a.now < 10_000 * MILLISECOND);
}

/// What the model knows of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Carried out at this time, well or not.
    Pending {
        due: u64,
        good: bool,
    },
    Valid,
    Failed,
}

#[test]
fn no_order_of_registrations_uses_and_releases_gets_at_what_is_not_there() {
    const QPS: u32 = 6;
    let mut seen = BTreeMap::<&str, u32>::new();
    let known: Vec<u64> = (1..=12).collect();
    for seed in seeds(&known, 0) {
        let mut random = Random(seed);
        let mut bench = Bench::new();
        let peers: Vec<u32> = (0..QPS).map(|n| 0x400 + n).collect();
        for &qpn in &peers {
            for node in [&mut bench.pair.a, &mut bench.pair.b] {
                node.create_qp(QpOptions {
                    qpn,
                    pd: PD,
                    cqn: 1,
                    log_blocks: 4,
                    log_entries: 2,
                    ..QpOptions::default()
                });
            }
        }
        let connect = |bench: &mut Bench, qpn: u32| {
            let (mut a, mut b) = (bench.pair.a.as_peer(qpn), bench.pair.b.as_peer(qpn));
            (a.rnr_retry, b.rnr_retry) = (7, 7);
            bench.pair.a.connect(qpn, &b);
            bench.pair.b.connect(qpn, &a);
        };
        for &qpn in &peers {
            connect(&mut bench, qpn);
        }
        // Tags by index, each with the instance it has now.
        let mut tags: BTreeMap<u32, (u8, Option<Fate>, Region)> = BTreeMap::new();
        for index in 0x800..0x804 {
            let (_, region) = bench.pair.a.region(Tag::new(index, 0).0, PD, RIGHTS, 4096);
            tags.insert(index, (0, None, region));
        }
        let mut waiting: BTreeMap<u32, u32> = BTreeMap::new();
        let mut unfinished = 0;
        bench.pair.a.answers();
        for _ in 0..150 {
            let index = 0x800 + (random.next() % 4) as u32;
            let (instance, fate, region) = tags.get_mut(&index).unwrap();
            let now = bench.pair.a.now;
            // No more than the control ring may have.
            unfinished -= bench.pair.a.answers().len();
            match random.next() % 8 {
                0..=2 if unfinished >= 30 => {}
                0 | 1 if fate.is_none() => {
                    unfinished += 1;
                    *instance = instance.wrapping_add(1);
                    let tag = Tag::new(index, *instance).0;
                    let good = random.chance(75);
                    region.tag = tag;
                    let command = RegisterRegion {
                        tag,
                        pd: PD,
                        access: if good { RIGHTS } else { u32::MAX },
                        flags: 0,
                        address: region.address,
                        buffer: Buffer::contiguous(region.pages[0], 4096),
                    };
                    *fate = Some(Fate::Pending {
                        due: now + (HOLD as u64) * MILLISECOND,
                        good,
                    });
                    println!("{now}: registers {tag:x}, {good}");
                    post(&mut bench.pair.a, &command);
                    *seen.entry("registered").or_default() += 1;
                }
                2 if fate.is_some() => {
                    unfinished += 1;
                    *fate = None;
                    let tag = region.tag;
                    println!("{now}: releases {tag:x}");
                    release(&mut bench.pair.a, tag);
                    *seen.entry("released").or_default() += 1;
                }
                3 | 4 => {
                    // Time passes, and registrations are made.
                    bench.pair.set_now(now + (random.next() % 15) * MILLISECOND);
                }
                _ => {
                    let free: Vec<u32> = peers
                        .iter()
                        .copied()
                        .filter(|qpn| !waiting.contains_key(qpn))
                        .collect();
                    if let Some(&qpn) = free.get(random.next() as usize % free.len().max(1)) {
                        let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)])
                            .remote(bench.far.address, bench.far.tag)
                            .flags(SEND_SIGNALED);
                        println!("{now}: {qpn:x} uses {:x}, {fate:?}", region.tag);
                        bench.pair.a.post_send(qpn, &work);
                        waiting.insert(qpn, index);
                    }
                }
            }
            bench.pair.exchange();
            let now = bench.pair.a.now;
            for (_, fate, _) in tags.values_mut() {
                if let Some(Fate::Pending { due, good }) = *fate {
                    if due <= now {
                        *fate = Some(if good { Fate::Valid } else { Fate::Failed });
                    }
                }
            }
            let mut done: BTreeMap<u32, CompletionEntry> = BTreeMap::new();
            for completion in bench.pair.completions_a() {
                done.insert(completion.qpn, completion);
            }
            bench.pair.completions_b();
            let expected: Vec<_> = waiting
                .iter()
                .map(|(&qpn, index)| (qpn, tags[index].1))
                .collect();
            for (qpn, fate) in expected {
                let completion = done.remove(&qpn);
                let status = completion.map(|completion| completion.status);
                if status.is_some() {
                    println!("{qpn:x} is done: {status:?}");
                }
                let (status_expected, what) = match fate {
                    Some(Fate::Pending { .. }) => (None, "waits"),
                    Some(Fate::Valid) => (Some(Success), "used"),
                    Some(Fate::Failed) => (Some(LocalProtection), "failed"),
                    None => (Some(LocalProtection), "refused"),
                };
                *seen.entry(what).or_default() += 1;
                assert_eq!(
                    status,
                    status_expected.map(|status| status.number()),
                    "seed {seed}: {fate:?}"
                );
                if fate == Some(Fate::Failed) {
                    assert_eq!(completion.map(|done| done.vendor_syndrome), Some(FAILED));
                }
                if status.is_some() {
                    waiting.remove(&qpn);
                }
                if status == Some(LocalProtection.number()) {
                    for node in [&mut bench.pair.a, &mut bench.pair.b] {
                        assert_eq!(node.set_state(qpn, State::Reset), CommandStatus::Ok);
                    }
                    connect(&mut bench, qpn);
                    bench.pair.completions_a();
                }
            }
            assert!(done.is_empty(), "{done:?}");
        }
    }
    if !all_seeds() {
        return;
    }
    for what in [
        "registered",
        "released",
        "waits",
        "used",
        "failed",
        "refused",
    ] {
        assert!(seen.get(what).is_some_and(|&count| count > 20), "{seen:?}");
    }
}

#[test]
fn whatever_is_posted_on_few_tags_is_answered_once_and_leaves_nothing_behind() {
    let known: Vec<u64> = (1..=20).collect();
    for seed in seeds(&known, 0) {
        let mut random = Random(seed);
        let mut bench = Bench::new();
        let near = bench.near.clone();
        let window = allocation(0x851, TagKind::Window1);
        bench.pair.a.execute_now(&window);
        bench.pair.a.hold_tags((random.next() % 3) as f64 * 4.0);
        bench.pair.a.answers();
        let mut open = BTreeMap::new();
        let mut posted = 0u32;
        for _ in 0..60 {
            // A ring full of commands at once, tags named more than once, and nonsense.
            let room = 31 - open.len() as u64;
            for _ in 0..random.next() % (room + 1) {
                let tag = Tag::new(
                    0x850 + (random.next() % 3) as u32,
                    (random.next() % 2) as u8,
                )
                .0;
                let cookie = 0x1000_0000 + posted;
                posted += 1;
                let mut entry = match random.next() % 6 {
                    0 | 1 => {
                        let command = RegisterRegion {
                            tag,
                            pd: PD,
                            access: if random.chance(70) { RIGHTS } else { u32::MAX },
                            flags: if random.chance(30) { REGION_REPLACE } else { 0 },
                            address: near.address,
                            buffer: Buffer::contiguous(near.pages[0], 4096),
                        };
                        CommandEntry::new(RegisterRegion::OPCODE, cookie, (0, 0), &command)
                    }
                    2 => {
                        let kinds = [TagKind::Region, TagKind::Window2B, TagKind::List];
                        let kind = kinds[random.next() as usize % 3];
                        let command = AllocateTag {
                            tag,
                            ..allocation(1, kind)
                        };
                        CommandEntry::new(AllocateTag::OPCODE, cookie, (0, 0), &command)
                    }
                    3 => CommandEntry::new(CommandOpcode::Nop, cookie, (0, 0), &0u64),
                    _ => {
                        let object = ObjectNumber {
                            number: tag,
                            reserved: 0,
                        };
                        CommandEntry::new(CommandOpcode::ReleaseTag, cookie, (0, 0), &object)
                    }
                };
                if random.chance(10) {
                    let at = random.next() as usize % 48;
                    entry.payload[at] ^= random.next() as u8;
                }
                if random.chance(3) {
                    entry.request_length = random.next() as u32 % 64;
                }
                open.insert(cookie, ());
                bench.pair.a.put_command(&entry);
            }
            bench.pair.a.ring_control();
            for _ in 0..random.next() % 3 {
                let tag = Tag::new(
                    0x850 + (random.next() % 3) as u32,
                    (random.next() % 2) as u8,
                )
                .0;
                let sge = Sge {
                    address: near.address,
                    length: 8,
                    lkey: tag,
                };
                let bind = BindPart {
                    window: window.tag,
                    new_window: window.tag + 1,
                    region: tag,
                    access: ACCESS_REMOTE_READ,
                    address: near.address,
                    length: 8,
                    ..BindPart::zeroed()
                };
                let work = match random.next() % 4 {
                    0 => SendWork::new(SendOpcode::LocalInvalidate, &[]).invalidate(tag),
                    1 => SendWork::new(SendOpcode::Bind, &[]).part(&bind),
                    _ => SendWork::new(SendOpcode::Write, &[sge])
                        .remote(bench.far.address, bench.far.tag),
                };
                if is_sending(&bench.pair.a, QPN_A) {
                    bench.pair.a.post_send(QPN_A, &work);
                }
                // And from the other side.
                let back = SendWork::new(SendOpcode::Write, &[bench.far.sge(0, 8)])
                    .remote(near.address, tag);
                if is_sending(&bench.pair.b, QPN_B) {
                    bench.pair.b.post_send(QPN_B, &back);
                }
            }
            bench.pair.exchange();
            bench
                .pair
                .set_now(bench.pair.a.now + (random.next() % 6) * MILLISECOND);
            bench.pair.exchange();
            for (cookie, _) in bench.pair.a.answers() {
                assert!(open.remove(&cookie).is_some(), "answered twice: {cookie:x}");
            }
            bench.pair.completions_a();
            bench.pair.completions_b();
        }
        bench.pair.run();
        for (cookie, _) in bench.pair.a.answers() {
            assert!(open.remove(&cookie).is_some(), "answered twice: {cookie:x}");
        }
        assert!(open.is_empty(), "not answered: {open:?}");
        assert!(bench.pair.a.engine.is_running());
        // Everything can be taken away, and made anew.
        let node = &mut bench.pair.a;
        node.hold_tags(0.0);
        let mut released = |tag: u32| node.object_command(CommandOpcode::ReleaseTag, tag);
        released(window.tag);
        for index in 0x850..0x853u32 {
            let any = (0..2).map(|instance| released(Tag::new(index, instance).0));
            let any: Vec<_> = any.collect();
            assert!(!any.contains(&CommandStatus::Busy), "{any:?}");
        }
        for index in 0x850..0x853u32 {
            bench.pair.a.register(Tag::new(index, 7).0, PD, ALL, 4096);
        }
        bench.others_go_on();
    }
}
