// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Turns: the device shows the driver when it uses tags, and looks for commands before it does.

use crate::loans::{inside, lent, run};
use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Access, Node, Region, SendWork, CQP_LOG_ENTRIES};
use ferrite_engine::FEATURES;
use std::mem::offset_of;
use CompletionStatus::{LocalProtection, RemoteAccess, Success};

const RIGHTS: u32 = ALL;
const TAG: u32 = 0x301;

struct Bench {
    pair: Pair,
    near: Region,
    far: Region,
}

fn bench(features: u64) -> Bench {
    let node = |number| Node::with_features(number, features);
    let mut pair = Pair::of(Setup::default(), node(1), node(2));
    pair.connect(Setup::default());
    let near = pair.a.register(0x101, PD, RIGHTS, 8192);
    let far = pair.b.register(0x201, PD, RIGHTS, 8192);
    Bench { pair, near, far }
}

fn turn_word(node: &Node) -> u64 {
    node.control_record() + offset_of!(ControlRecord, turn) as u64
}

fn turn(node: &Node) -> u32 {
    node.host.memory.get(turn_word(node))
}

/// Gives a command that the device is told of by the record alone.
fn give<P: Plain>(node: &mut Node, opcode: CommandOpcode, payload: &P) {
    node.put_command(&CommandEntry::new(opcode, 0, (0, 0), payload));
    node.tell_of_commands();
}

fn release(node: &mut Node, tag: u32) {
    let number = ObjectNumber {
        number: tag,
        reserved: 0,
    };
    give(node, CommandOpcode::ReleaseTag, &number);
}

impl Bench {
    fn write(&self, lkey: u32, rkey: u32) -> SendWork {
        let sge = Sge {
            lkey,
            ..self.near.sge(0, 3000)
        };
        SendWork::new(SendOpcode::Write, &[sge])
            .remote(self.far.address, rkey)
            .flags(SEND_SIGNALED)
    }

    fn run(&mut self, work: &SendWork) -> Vec<CompletionStatus> {
        self.pair.a.post_send(QPN_A, work);
        self.pair.run();
        statuses(&self.pair.completions_a())
    }
}

/// Checks that memory of a region is touched within turns only, and that each turn begins as it is to;
/// returns how many there were, and how many of those accesses.
fn check(node: &Node, region: &Region) -> (usize, usize) {
    let accesses = node.host.accesses.borrow_mut().take().unwrap();
    let is_data = |address: u64| {
        let within = |page: &u64| (*page..*page + 4096).contains(&address);
        region.pages.iter().any(within)
    };
    let (mut in_turn, mut turns, mut touched) = (false, 0, 0);
    for (at, access) in accesses.iter().enumerate() {
        match *access {
            Access::Store(address, value) if address == turn_word(node) => {
                assert_eq!(value % 2 == 1, !in_turn, "turns are told apart");
                in_turn = !in_turn;
                if in_turn {
                    turns += 1;
                    assert_eq!(accesses[at + 1], Access::Fence);
                    assert_eq!(accesses[at + 2], Access::Load(node.control_record()));
                }
            }
            Access::Read(address, _) | Access::Write(address, _) if is_data(address) => {
                assert!(in_turn, "a tag was used between turns");
                touched += 1;
            }
            _ => {}
        }
    }
    assert!(!in_turn, "the last turn has ended");
    (turns, touched)
}

#[test]
fn tags_are_used_within_turns() {
    let mut bench = bench(FEATURES);
    for node in [&bench.pair.a, &bench.pair.b] {
        *node.host.accesses.borrow_mut() = Some(Vec::new());
    }
    let write = bench.write(bench.near.tag, bench.far.tag);
    let read = SendWork::new(SendOpcode::Read, &[bench.near.sge(0, 3000)])
        .remote(bench.far.address, bench.far.tag)
        .flags(SEND_SIGNALED);
    bench.pair.b.post_recv(QPN_B, &[bench.far.sge(0, 3000)]);
    let send = SendWork::new(SendOpcode::Send, &[bench.near.sge(0, 3000)]).flags(SEND_SIGNALED);
    for work in [write, read, send] {
        assert_eq!(bench.run(&work), [Success]);
    }
    for (node, region) in [(&bench.pair.a, &bench.near), (&bench.pair.b, &bench.far)] {
        let (turns, touched) = check(node, region);
        assert!(turns > 0 && touched >= 3, "{turns} {touched}");
        assert_eq!(turn(node) % 2, 0);
    }
}

#[test]
fn frames_of_one_turn_are_one_turn() {
    let mut bench = bench(FEATURES);
    let work = bench.write(bench.near.tag, bench.far.tag);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.a.settle();
    let frames: Vec<_> = bench.pair.a.host.sent.drain(..).collect();
    assert!(frames.len() > 1);
    let node = &mut bench.pair.b;
    *node.host.accesses.borrow_mut() = Some(Vec::new());
    let before = turn(node);
    node.engine.begin_turn(&mut node.host);
    for frame in &frames {
        node.receive(frame);
        assert_eq!(turn(node), before + 1);
    }
    node.engine.end_turn(&mut node.host);
    assert_eq!(turn(node), before + 2);
    let (turns, touched) = check(node, &bench.far);
    assert_eq!((turns, touched > 0), (1, true));
}

#[test]
fn what_the_record_tells_of_is_done_before_a_tag_is_used() {
    let mut bench = bench(FEATURES);
    // One that is registered can be used, here and by the peer, and waits for nothing.
    let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 8192);
    give(&mut bench.pair.a, CommandOpcode::RegisterRegion, &command);
    let data = pattern(3, 3000);
    bench.pair.a.fill(&region, 0, &data);
    let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 3000)])
        .remote(bench.far.address, bench.far.tag)
        .flags(SEND_SIGNALED);
    assert_eq!(bench.run(&work), [Success]);
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 3000), data);
    let (command, region) = bench.pair.b.region(TAG, PD, RIGHTS, 8192);
    give(&mut bench.pair.b, CommandOpcode::RegisterRegion, &command);
    let work = SendWork::new(SendOpcode::Write, &[bench.near.sge(0, 3000)])
        .remote(region.address, region.tag)
        .flags(SEND_SIGNALED);
    assert_eq!(bench.run(&work), [Success]);
    assert_eq!(bench.pair.b.engine.counters().rnr_naks_sent, 0);
    // One that is released is used by nobody again.
    bench.pair.b.fill(&bench.far, 0, &[9; 8192]);
    let (near, far) = (bench.near.tag, bench.far.tag);
    release(&mut bench.pair.b, far);
    let work = bench.write(near, far);
    assert_eq!(bench.run(&work), [RemoteAccess]);
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 8192), [9; 8192]);
}

#[test]
fn what_is_released_by_the_record_is_not_sent() {
    let mut bench = bench(FEATURES);
    bench.pair.b.fill(&bench.far, 0, &[9; 8192]);
    let (near, far) = (bench.near.tag, bench.far.tag);
    release(&mut bench.pair.a, near);
    let work = bench.write(near, far);
    assert_eq!(bench.run(&work), [LocalProtection]);
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 8192), [9; 8192]);
}

#[test]
fn a_release_that_takes_long_is_not_overtaken_either() {
    let mut bench = bench(FEATURES);
    bench.pair.b.fill(&bench.far, 0, &[9; 8192]);
    let (near, far) = (bench.near.tag, bench.far.tag);
    bench.pair.b.hold_tags(10_000.0);
    release(&mut bench.pair.b, far);
    let work = bench.write(near, far);
    bench.pair.a.post_send(QPN_A, &work);
    bench.pair.exchange();
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 8192), [9; 8192]);
}

#[test]
fn without_the_feature_no_turn_is_shown() {
    let mut bench = bench(FEATURES & !FEATURE_TURNS);
    let work = bench.write(bench.near.tag, bench.far.tag);
    assert_eq!(bench.run(&work), [Success]);
    let shown = (turn(&bench.pair.a), turn(&bench.pair.b));
    assert_eq!(shown, (bench.pair.a.first_turn, bench.pair.b.first_turn));
}

#[test]
fn a_record_that_cannot_be_stops_the_device_when_its_turn_begins() {
    let mut bench = bench(FEATURES);
    let node = &mut bench.pair.a;
    let record = node.control_record();
    let producer: u32 = node.host.memory.get(record);
    let beyond = producer + (1 << CQP_LOG_ENTRIES) + 1;
    node.host.memory.put(record, &beyond);
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(node.status().fatal(), Some(FatalCode::BadCommandIndex));
    // It shows nothing more.
    let last = turn(node);
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(turn(node), last);
}

#[test]
fn a_device_that_is_started_shows_that_there_is_no_turn() {
    let mut node = Node::power_on(1);
    node.boot();
    assert_eq!(turn(&node), 0);
    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
    node.boot_with(FEATURES & !FEATURE_TURNS);
    assert_eq!(turn(&node), node.first_turn);
}

#[test]
fn what_is_no_packet_is_no_turn() {
    let mut bench = bench(FEATURES);
    let before = turn(&bench.pair.b);
    bench.pair.b.receive(&[0xff; 64]);
    assert_eq!(turn(&bench.pair.b), before);
}

#[test]
fn a_turn_goes_on_as_long_as_something_is_lent() {
    let (mut pair, a, b) = inside(Setup::default());
    assert_eq!(turn(&pair.a) % 2, 0);
    let loan = lent(&mut pair, &a, &b);
    let shown = turn(&pair.a);
    assert_eq!(shown % 2, 1, "it may be read");
    // Nor is it shown to be over while the driver cannot rely on it.
    release(&mut pair.a, a.tag);
    assert!(loan.hold().is_some());
    pair.a.engine.begin_turn(&mut pair.a.host);
    assert!(loan.hold().is_none(), "what the record tells of is done");
    pair.a.engine.end_turn(&mut pair.a.host);
    assert_eq!(turn(&pair.a), shown, "others may be read");
    drop(loan);
    pair.a.host.inside.clear();
    run(&mut pair, |_, _| 1);
    assert_eq!(turn(&pair.a) % 2, 0);
    assert_ne!(turn(&pair.a), shown);
}

#[test]
fn a_release_that_was_taken_up_ends_what_was_lent() {
    let (mut pair, a, b) = inside(Setup::default());
    pair.a.hold_tags(10_000.0);
    let loan = lent(&mut pair, &a, &b);
    release(&mut pair.a, a.tag);
    pair.a.ring_control();
    assert!(loan.hold().is_none());
}

#[test]
fn what_was_lent_and_taken_leaves_no_turn_behind() {
    let (mut pair, a, b) = inside(Setup::default());
    drop(lent(&mut pair, &a, &b));
    run(&mut pair, |_, _| 1);
    assert_eq!(turn(&pair.a) % 2, 0);
    assert_eq!(statuses(&pair.completions_a()), [Success]);
}

#[test]
fn a_turn_ends_where_nothing_but_the_loan_was_waited_for() {
    let (mut pair, a, b) = inside(Setup::default());
    // Of a read its answers are the last that the peer has to say.
    let read = SendWork::new(SendOpcode::Read, &[b.sge(0, 20_000)])
        .remote(a.address, a.tag)
        .flags(SEND_SIGNALED);
    pair.b.post_send(QPN_B, &read);
    run(&mut pair, |_, _| 1);
    pair.b.post_send(QPN_B, &read);
    pair.b.settle();
    for inside in std::mem::take(&mut pair.b.host.inside) {
        pair.a.receive_inside(&inside);
    }
    pair.a.settle();
    assert!(!pair.a.host.inside.is_empty(), "the answer is lent");
    let node = &mut pair.a;
    let mut look = || {
        let due = node.engine.next_timeout().expect("something is lent");
        let waited = due.saturating_sub(node.now);
        node.now = node.now.max(due);
        node.engine.poll(node.now, &mut node.host);
        (waited, turn(node) % 2)
    };
    let waits: Vec<_> = (0..10).map(|_| look()).collect();
    assert!(waits.iter().all(|(_, odd)| *odd == 1), "it is lent");
    assert!(waits.is_sorted() && waits[1].0 < 200_000, "{waits:?}");
    assert!((1_000_000..10_000_000).contains(&waits[9].0), "{waits:?}");
    pair.a.host.inside.clear();
    let node = &mut pair.a;
    node.now = node.engine.next_timeout().expect("a look");
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(turn(node) % 2, 0);
    assert_eq!(node.engine.next_timeout(), None);
}

#[test]
fn a_turn_ends_where_a_message_that_is_not_answered_is_under_way() {
    // What is not answered is not sent again.
    let setup = Setup {
        timeout: 0,
        ..Setup::default()
    };
    let (mut pair, a, b) = inside(setup);
    let read = SendWork::new(SendOpcode::Read, &[b.sge(0, 20_000)])
        .remote(a.address, a.tag)
        .flags(SEND_SIGNALED);
    pair.b.post_send(QPN_B, &read);
    run(&mut pair, |_, _| 1);
    let lost = SendWork::new(SendOpcode::Write, &[a.sge(0, 8)]).remote(b.address, b.tag);
    pair.a.post_send(QPN_A, &lost);
    pair.a.settle();
    pair.a.host.inside.clear();
    pair.b.post_send(QPN_B, &read);
    pair.b.settle();
    for inside in std::mem::take(&mut pair.b.host.inside) {
        pair.a.receive_inside(&inside);
    }
    pair.a.settle();
    let node = &mut pair.a;
    assert_eq!(turn(node) % 2, 1, "the answer is lent");
    node.host.inside.clear();
    let due = node.engine.next_timeout().expect("a look");
    let waited = due.saturating_sub(node.now);
    assert!((1_000_000..10_000_000).contains(&waited), "{waited}");
    node.now = due;
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(turn(node) % 2, 0);
}

#[test]
fn a_reset_within_a_turn_ends_it() {
    let mut bench = bench(FEATURES);
    let node = &mut bench.pair.a;
    node.engine.begin_turn(&mut node.host);
    node.engine.reset();
    let last = turn(node);
    node.engine.end_turn(&mut node.host);
    assert_eq!(turn(node), last);
    // A turn that never ends is forgotten, too.
    node.engine.begin_turn(&mut node.host);
    node.engine.reset();
    node.boot();
    assert_eq!(turn(node), 0);
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(turn(node), 2);
}
