// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tags that are used before the device has seen the doorbell of the command that makes them: it
//! learns of the command by the control record, and refuses nothing before it has looked there.

use crate::attack::Random;
use crate::pending::{
    allocation, local_uses, post, post_all, spoiled, Bench, FLAGS, HOLD, LOCAL, RIGHTS, TAG,
};
use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork, CQP_LOG_ENTRIES};
use ferrite_engine::{Misbehaviour, FEATURES};
use CompletionStatus::{
    Flushed, LocalProtection, RemoteAccess, RemoteOperation, Success, WindowBind,
};

const RING: u32 = 1 << CQP_LOG_ENTRIES;
/// What a tag that is not there is refused with, and one whose registration failed.
const NO_ENTRY: u32 = 1;
const FAILED: u32 = 19;

/// Machines whose control doorbells come late.
fn bench() -> Bench {
    let mut bench = Bench::new();
    bench.pair.a.hold_control(HOLD);
    bench.pair.b.hold_control(HOLD);
    bench
}

fn nop(node: &mut Node) {
    node.put_command(&CommandEntry::new(CommandOpcode::Nop, 0, (0, 0), &0u64));
}

/// Tells of the commands in the ring by the record alone.
fn tell_by_record(node: &mut Node, commands: u32) -> u32 {
    let at = node.control_record();
    let producer = node.host.memory.get::<u32>(at).wrapping_add(commands);
    node.host.memory.put(at, &producer);
    producer
}

fn is_running(node: &Node) -> bool {
    node.engine.is_running()
}

/// The doorbells that were held back come, and have nothing more to say.
fn doorbells_come(bench: &mut Bench) {
    bench.pair.run();
    for node in [&mut bench.pair.a, &mut bench.pair.b] {
        assert!(is_running(node));
        assert_eq!(node.engine.next_timeout(), None);
        node.hold_control(0.0);
        let command = CommandEntry::new(CommandOpcode::Nop, 0, (0, 0), &0u64);
        assert_eq!(node.commands(&[command]), [CommandStatus::Ok]);
    }
}

/// A write from memory under this tag.
fn write_from(bench: &Bench, tag: u32) -> SendWork {
    let sge = Sge {
        lkey: tag,
        ..bench.near.sge(0, 8)
    };
    SendWork::new(SendOpcode::Write, &[sge]).remote(bench.far.address, bench.far.tag)
}

#[test]
fn every_local_use_overtakes_the_doorbell() {
    for what in LOCAL {
        for fails in [false, true] {
            let mut bench = bench();
            let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 8192);
            let mut work = local_uses(&mut bench, what, &region);
            bench.pair.a.hold_control(HOLD);
            bench.pair.a.answers();
            let count = work.len();
            let data = pattern(1, 64);
            bench.pair.a.fill(&region, 8, &data);
            let before = SendWork::new(SendOpcode::Write, &[bench.near.sge(0, 1)])
                .remote(bench.far.address, bench.far.tag);
            work.insert(0, before);
            let max_pages = if fails { 0 } else { 4 };
            let cookie = match what {
                "fast registration" => {
                    let allocation = AllocateTag {
                        max_pages,
                        ..allocation(0x52, TagKind::Region)
                    };
                    post(&mut bench.pair.a, &allocation)
                }
                _ if fails => post(&mut bench.pair.a, &spoiled(command)),
                _ => post(&mut bench.pair.a, &command),
            };
            bench.pair.a.settle();
            assert!(bench.pair.a.answers().is_empty(), "it was held up");
            post_all(&mut bench.pair.a, work);
            // Without time passing: the doorbell has not come when this is done.
            bench.pair.exchange();
            let status = if fails {
                CommandStatus::BadParameter
            } else {
                CommandStatus::Ok
            };
            assert_eq!(bench.pair.a.answers(), [(cookie, status)], "{what}");
            assert!(bench.pair.a.engine.next_timeout().is_some(), "{what}");
            let completions = bench.pair.completions_a();
            let done = statuses(&completions);
            assert_eq!(done[0], Success, "{what}: what stands before it");
            if fails {
                let expected = if what == "bind" {
                    WindowBind
                } else {
                    LocalProtection
                };
                assert_eq!(done[1], expected, "{what}");
                assert_eq!(completions[1].vendor_syndrome, FAILED, "{what}");
                assert!(done[2..].iter().all(|status| *status == Flushed));
            } else {
                assert_eq!(done, vec![Success; count + 1], "{what}");
            }
            assert_eq!(bench.waits(), (1, 0), "{what}: counted once");
            if what == "write" && !fails {
                assert_eq!(bench.pair.b.contents(&bench.far, 0, 64), data);
            }
            bench.others_go_on();
            doorbells_come(&mut bench);
        }
    }
}

#[test]
fn every_request_of_a_peer_overtakes_the_doorbell() {
    for what in ["write", "read", "atomic", "receive"] {
        for fails in [false, true] {
            let mut bench = bench();
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
            // Without time passing: the doorbell has not come when this is done.
            bench.pair.exchange();
            assert!(bench.pair.b.engine.next_timeout().is_some(), "{what}");
            assert_eq!(bench.pair.b.engine.counters().rnr_naks_sent, 0);
            bench.others_go_on();
            assert_eq!(bench.waits(), (0, 1), "{what}: counted once");
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
            doorbells_come(&mut bench);
        }
    }
}

#[test]
fn a_read_whose_tag_goes_is_refused_when_the_commands_are_taken_up() {
    for told in [false, true] {
        let mut bench = Bench::new();
        bench.pair.b.hold_tags(0.0);
        let work = SendWork::new(SendOpcode::Read, &[bench.near.sge(0, 3000)])
            .remote(bench.far.address, bench.far.tag);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.a.settle();
        let request = bench.pair.a.host.sent.pop_front().unwrap();
        bench.pair.b.receive(&request);
        // It was taken, and nothing of the answer was sent.
        let number = bench.far.tag;
        let status = bench
            .pair
            .b
            .object_command(CommandOpcode::ReleaseTag, number);
        assert_eq!(status, CommandStatus::Ok);
        bench.pair.b.answers();
        if told {
            nop(&mut bench.pair.b);
            bench.pair.b.tell_of_commands();
        }
        bench.pair.exchange();
        assert_eq!(bench.pair.b.answers().len(), usize::from(told));
        assert_eq!(bench.waits(), (0, u64::from(told)));
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_a()), [RemoteAccess]);
    }
}

#[test]
fn a_peer_invalidates_nothing_before_the_record_was_looked_at() {
    let mut bench = bench();
    post(&mut bench.pair.b, &allocation(0x52, TagKind::Region));
    let part = FastRegisterPart {
        tag: Tag::new(0x52, 3).0,
        access: ALL,
        address: 0x9000,
        buffer: Buffer::contiguous(bench.far.pages[0], 4096),
        reserved: 0,
    };
    bench.pair.b.post_recv(QPN_B, &[bench.far.sge(0, 8)]);
    bench.pair.b.fill(&bench.far, 0, &[0; 8]);
    bench.pair.a.fill(&bench.near, 0, &[7; 8]);
    let send = SendWork::new(SendOpcode::SendInvalidate, &[bench.near.sge(0, 8)]);
    post_all(&mut bench.pair.a, vec![send.invalidate(part.tag)]);
    bench.pair.a.settle();
    let request = bench.pair.a.host.sent.pop_front().unwrap();
    // What makes the tag valid waits as well; both have not heard of it when the message comes.
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    let register = register.flags(SEND_SIGNALED);
    bench.pair.b.post_send(QPN_B, &register);
    let node = &mut bench.pair.b;
    node.engine.poll(node.now, &mut node.host);
    assert_eq!(node.engine.counters().pending_waits, 1);
    node.receive(&request);
    assert_eq!(node.engine.counters().pending_waits, 2);
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 8), [0; 8]);
    bench.pair.exchange();
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(statuses(&bench.pair.completions_b()), [Success, Success]);
    assert_eq!(bench.pair.b.contents(&bench.far, 0, 8), [7; 8]);
}

#[test]
fn a_receive_posted_after_the_request_has_waited_is_refused_by_none_but_the_record() {
    let mut bench = bench();
    post(&mut bench.pair.b, &allocation(0x52, TagKind::Region));
    let part = FastRegisterPart {
        tag: Tag::new(0x52, 3).0,
        access: ALL,
        address: 0x9000,
        buffer: Buffer::contiguous(bench.far.pages[0], 4096),
        reserved: 0,
    };
    bench.pair.a.fill(&bench.near, 0, &[7; 8]);
    let send = SendWork::new(SendOpcode::SendInvalidate, &[bench.near.sge(0, 8)]);
    post_all(&mut bench.pair.a, vec![send.invalidate(part.tag)]);
    bench.pair.a.settle();
    let request = bench.pair.a.host.sent.pop_front().unwrap();
    let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
    let register = register.flags(SEND_SIGNALED);
    let node = &mut bench.pair.b;
    node.post_send(QPN_B, &register);
    node.engine.poll(node.now, &mut node.host);
    // The request waits for the commands that may make its tag, and then finds no receive.
    node.receive(&request);
    assert_eq!(node.engine.counters().pending_waits, 2);
    node.settle();
    assert_eq!(node.engine.counters().rnr_naks_sent, 1);
    // The receive that is posted for it is of a later command, which nobody has rung for either.
    let (command, region) = node.region(TAG, PD, RIGHTS, 4096);
    post(node, &command);
    node.post_recv(QPN_B, &[region.sge(0, 8)]);
    node.receive(&request);
    bench.pair.b.settle();
    assert_eq!(statuses(&bench.pair.completions_b()), [Success, Success]);
    assert_eq!(bench.pair.b.contents(&region, 0, 8), [7; 8]);
    assert_eq!(bench.waits(), (0, 2), "a request is counted once");
}

#[test]
fn each_repetition_of_a_read_waits_for_the_record_anew() {
    let mut bench = Bench::new();
    bench.pair.b.hold_tags(0.0);
    let region = bench.pair.b.register(TAG, PD, RIGHTS, 4096);
    let work = SendWork::new(SendOpcode::Read, &[bench.near.sge(0, 3000)]);
    post_all(
        &mut bench.pair.a,
        vec![work.remote(region.address, region.tag)],
    );
    bench.pair.a.settle();
    let request = bench.pair.a.host.sent.pop_front().unwrap();
    let node = &mut bench.pair.b;
    node.receive(&request);
    node.settle();
    assert_eq!(node.host.sent.len(), 3);
    node.host.sent.clear();
    for again in 1..=2 {
        node.receive(&request);
        let status = node.object_command(CommandOpcode::ReleaseTag, TAG);
        assert_eq!(status, CommandStatus::Ok);
        nop(node);
        node.tell_of_commands();
        node.settle();
        assert!(node.host.sent.is_empty(), "{again}");
        assert_eq!(node.engine.counters().pending_waits, again);
        node.register(TAG, PD, RIGHTS, 4096);
    }
}

#[test]
fn services_without_acknowledgement_overtake_the_doorbell() {
    for service in [Service::Uc, Service::Ud] {
        for near in [true, false] {
            let mut pair = Pair::unacknowledged(service, FLAGS);
            let (from, from_region) = pair.a.region(0x101, PD, RIGHTS, 4096);
            let (into, into_region) = pair.b.region(0x201, PD, RIGHTS, 8192);
            let node = if near { &mut pair.a } else { &mut pair.b };
            node.hold_control(HOLD);
            post(&mut pair.a, &from);
            post(&mut pair.b, &into);
            pair.send_three(service, &from_region, &into_region);
            // Without time passing.
            pair.exchange();
            assert_eq!(statuses(&pair.completions_a()), [Success; 3]);
            assert_eq!(statuses(&pair.completions_b()), [Success; 3]);
            let header = if service == Service::Ud { 40 } else { 0 };
            for n in 0..3u64 {
                let got = pair.b.contents(&into_region, n * 200 + header, 100);
                assert_eq!(got, pattern(n, 100), "{service:?} {near} {n}");
            }
            let node = if near { &pair.a } else { &pair.b };
            assert_eq!(node.engine.counters().pending_waits, 1);
            pair.run();
            assert!(is_running(&pair.a) && is_running(&pair.b));
        }
    }
}

#[test]
fn a_tag_that_no_command_makes_is_refused_when_they_are_taken_up() {
    for told in [false, true] {
        let mut bench = bench();
        if told {
            nop(&mut bench.pair.a);
            bench.pair.a.ring_control();
        }
        let work = write_from(&bench, TAG);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        let done = bench.pair.completions_a();
        assert_eq!(statuses(&done), [LocalProtection]);
        assert_eq!(done[0].vendor_syndrome, NO_ENTRY);
        // It waits only where there is something to wait for.
        assert_eq!(bench.waits(), (u64::from(told), 0));
        bench.others_go_on();
        // A peer's, too.
        let mut bench = self::bench();
        if told {
            nop(&mut bench.pair.b);
            bench.pair.b.ring_control();
        }
        let work = SendWork::new(SendOpcode::Write, &[bench.near.sge(0, 8)])
            .remote(bench.far.address, TAG);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.run();
        assert_eq!(statuses(&bench.pair.completions_a()), [RemoteAccess]);
        assert_eq!(bench.waits(), (0, u64::from(told)));
    }
}

#[test]
fn a_record_that_cannot_be_stops_the_device() {
    for by in [RING + 1, u32::MAX, 1 << 31] {
        let mut bench = bench();
        tell_by_record(&mut bench.pair.a, by);
        // Nobody looks there for a tag that is good.
        bench.others_go_on();
        assert!(is_running(&bench.pair.a));
        let work = write_from(&bench, TAG);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        let fatal = bench.pair.a.status().fatal();
        assert_eq!(fatal, Some(FatalCode::BadCommandIndex), "{by}");
        assert!(bench.pair.completions_a().is_empty());
    }
    let mut bench = bench();
    let record = bench.pair.a.control_record();
    bench.pair.a.host.memory.take_away(record..record + 4);
    let work = write_from(&bench, TAG);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.exchange();
    let fatal = bench.pair.a.status().fatal();
    assert_eq!(fatal, Some(FatalCode::HostMemory));
}

#[test]
fn there_is_no_record_without_the_feature() {
    for features in [
        FEATURES & !FEATURE_TURNS,
        FEATURES & !(FEATURE_PENDING_TAGS | FEATURE_TURNS),
    ] {
        let agreed = features & FEATURE_PENDING_TAGS != 0;
        let mut node = Node::with_features(1, features);
        node.create_qp(QpOptions::default());
        let peer = node.as_peer(77);
        node.connect(2, &peer);
        let producer = tell_by_record(&mut node, RING + 1);
        assert_ne!(producer, 0);
        let sge = Sge {
            address: 0,
            length: 8,
            lkey: TAG,
        };
        node.post_send(2, &SendWork::new(SendOpcode::Send, &[sge]));
        node.settle();
        assert_eq!(is_running(&node), !agreed);
        // Nor has there to be memory for it.
        let mut node = Node::power_on(1);
        let ring = node.allocate(control_record_offset(4) + 4096);
        let block = BootBlock {
            cqp_ring: ring,
            eq0_ring: node.allocate(4096),
            cqp_log_entries: 4,
            eq0_log_entries: 4,
            ..BootBlock::zeroed()
        };
        let boot = node.allocate(64);
        node.host.memory.put(boot, &block);
        let record = ring + control_record_offset(4);
        node.host.memory.take_away(record + 60..record + 64);
        let version = (u64::from(ABI_MAJOR) << 16) | u64::from(ABI_MINOR);
        node.write_register(REG_DRIVER_VERSION, 4, version);
        node.write_register(REG_DRIVER_FEATURES, 8, features);
        node.write_register(REG_BOOT, 8, boot);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
        let fatal = agreed.then_some(FatalCode::BadBootBlock);
        assert_eq!(node.status().fatal(), fatal);
    }
}

#[test]
fn doorbells_that_come_behind_the_record_say_nothing_and_older_ones_are_fatal() {
    let mut bench = Bench::new();
    bench.pair.a.hold_tags(0.0);
    let record = bench.pair.a.control_record();
    let first = bench.pair.a.host.memory.get::<u32>(record);
    // More than the ring has entries, one after the other; none has a doorbell.
    for n in 0..RING + 8 {
        let (command, region) = bench.pair.a.region(TAG + (n << 8), PD, RIGHTS, 64);
        let entry = CommandEntry::new(RegisterRegion::OPCODE, n, (0, 0), &command);
        bench.pair.a.put_command(&entry);
        tell_by_record(&mut bench.pair.a, 1);
        let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)])
            .remote(bench.far.address, bench.far.tag);
        post_all(&mut bench.pair.a, vec![work]);
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
        assert_eq!(bench.pair.a.answers(), [(n, CommandStatus::Ok)]);
    }
    let last = first + RING + 8;
    for producer in [first + 1, first + 1, first + 5, last - 1] {
        let word = u64::from(producer);
        bench.pair.a.doorbell(0, DOORBELL_CONTROL, word);
        assert!(is_running(&bench.pair.a), "{producer}");
    }
    assert!(bench.pair.a.answers().is_empty());
    // One that the record did not tell of first is as good as ever.
    nop(&mut bench.pair.a);
    tell_by_record(&mut bench.pair.a, 1);
    let word = u64::from(last + 1);
    bench.pair.a.doorbell(0, DOORBELL_CONTROL, word);
    bench.pair.a.settle();
    assert_eq!(bench.pair.a.answers().len(), 1);
    // What a doorbell said is not taken back by one behind it.
    let word = u64::from(last);
    bench.pair.a.doorbell(0, DOORBELL_CONTROL, word);
    let fatal = bench.pair.a.status().fatal();
    assert_eq!(fatal, Some(FatalCode::BadCommandIndex));
}

#[test]
fn a_record_that_moves_all_the_time_holds_up_nobody() {
    for peer in [false, true] {
        let mut bench = bench();
        let work = match peer {
            false => write_from(&bench, TAG),
            true => SendWork::new(SendOpcode::Write, &[bench.near.sge(0, 8)])
                .remote(bench.far.address, TAG),
        };
        post_all(&mut bench.pair.a, vec![work]);
        if peer {
            bench.pair.a.settle();
        }
        let requests = std::mem::take(&mut bench.pair.a.host.sent);
        let node = if peer {
            &mut bench.pair.b
        } else {
            &mut bench.pair.a
        };
        nop(node);
        tell_by_record(node, 1);
        for request in requests {
            node.receive(&request);
        }
        for _ in 0..4 {
            // A turn: what was told of is taken up, and then there is more.
            node.engine.poll(node.now, &mut node.host);
            nop(node);
            tell_by_record(node, 1);
        }
        assert_eq!(node.engine.counters().pending_waits, 1);
        // Those that were given before it, and no others.
        assert_eq!(node.answers().len(), 1);
        assert_eq!(node.engine.counters().access_errors, 1);
        bench.others_go_on();
        bench.pair.run();
        let done = bench.pair.completions_a();
        if peer {
            assert_eq!(statuses(&done), [RemoteAccess]);
        } else {
            assert_eq!(statuses(&done), [LocalProtection]);
            assert_eq!(done[0].vendor_syndrome, NO_ENTRY);
        }
        assert_eq!(bench.waits(), (u64::from(!peer), u64::from(peer)));
    }
}

#[test]
fn a_use_waits_until_there_is_room_for_the_command() {
    let mut bench = Bench::new();
    bench.pair.a.answers();
    // As many as the ring has entries are taken up and not finished.
    for n in 0..RING {
        let (command, _) = bench.pair.a.region(0x2001 + (n << 8), PD, RIGHTS, 64);
        let entry = CommandEntry::new(RegisterRegion::OPCODE, n, (0, 0), &command);
        bench.pair.a.put_command(&entry);
    }
    bench.pair.a.ring_control();
    let (command, region) = bench.pair.a.region(TAG, PD, RIGHTS, 64);
    let entry = CommandEntry::new(RegisterRegion::OPCODE, RING, (0, 0), &command);
    bench.pair.a.put_command(&entry);
    tell_by_record(&mut bench.pair.a, 1);
    let work = SendWork::new(SendOpcode::Write, &[region.sge(0, 8)])
        .remote(bench.far.address, bench.far.tag);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.exchange();
    assert!(bench.pair.completions_a().is_empty());
    bench.others_go_on();
    bench.pair.run();
    assert_eq!(bench.pair.a.answers().len() as u32, RING + 1);
    assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    assert_eq!(bench.waits(), (1, 0));
}

#[test]
fn a_reset_ends_what_waits_and_what_is_on_its_way() {
    let mut bench = Bench::new();
    let rules = Misbehaviour {
        hold_tags: HOLD,
        hold_control: 2.0 * HOLD,
        ..Misbehaviour::default()
    };
    let node = &mut bench.pair.a;
    node.engine.misbehave(rules, node.now, &mut node.host);
    let (command, _) = node.region(TAG, PD, RIGHTS, 64);
    post(node, &command);
    let work = write_from(&bench, TAG);
    post_all(&mut bench.pair.a, vec![work]);
    bench.pair.exchange();
    assert_eq!(bench.waits(), (1, 0));
    let node = &mut bench.pair.a;
    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
    assert_eq!(node.engine.next_timeout(), None);
    node.now += 1_000_000_000;
    node.settle();
    assert_eq!(node.status().state(), Some(DeviceState::Ready));
    node.hold_control(0.0);
    node.boot();
    node.create_eq(EQ_ASYNC, 1);
    assert!(is_running(node));
    assert!(node.answers().is_empty());
}

#[test]
fn held_doorbells_come_in_their_order_and_at_once_when_nothing_is_held() {
    let mut node = Node::with_features(1, FEATURES & !FEATURE_TURNS);
    node.hold_control(HOLD);
    let held = node.post_command(CommandOpcode::Nop, &0u64);
    node.now += 1;
    let second = node.post_command(CommandOpcode::Nop, &0u64);
    node.settle();
    assert!(node.answers().is_empty());
    node.now += (HOLD * 1e6) as u64 - 1;
    node.settle();
    assert_eq!(node.answers(), [(held, CommandStatus::Ok)]);
    assert_eq!(node.engine.core().misdeeds().unwrap().1.held_control, 2);
    node.hold_control(0.0);
    node.settle();
    assert_eq!(node.answers(), [(second, CommandStatus::Ok)]);
    // Those of queue pairs are not held.
    node.create_qp(QpOptions::default());
    let peer = node.as_peer(77);
    node.connect(2, &peer);
    node.hold_control(HOLD);
    node.post_send(2, &SendWork::new(SendOpcode::Send, &[]));
    node.settle();
    assert_ne!(node.engine.counters().tx_packets, 0);
}

#[test]
fn no_order_of_doorbells_and_records_refuses_a_tag_that_was_told_of() {
    for seed in 0..16 {
        let mut random = Random::new(seed);
        let mut bench = bench();
        bench.pair.a.answers();
        let (mut index, mut open, mut posted) = (0x100u32, 0, 0);
        for _ in 0..400 {
            let node = &mut bench.pair.a;
            match random.below(8) {
                // Commands, with a doorbell or without, and perhaps a use of what the last one makes.
                0..5 if open + 3 < RING as usize && posted < 8 => {
                    for _ in 0..random.below(3) {
                        nop(node);
                        open += 1;
                    }
                    index += 1;
                    let command = RegisterRegion {
                        tag: Tag::new(index, 1).0,
                        pd: PD,
                        access: RIGHTS,
                        address: 0x1000,
                        buffer: Buffer::contiguous(bench.near.pages[0], 4096),
                        ..RegisterRegion::zeroed()
                    };
                    let entry = CommandEntry::new(RegisterRegion::OPCODE, index, (0, 0), &command);
                    node.put_command(&entry);
                    open += 1;
                    if random.below(3) == 0 {
                        node.tell_of_commands();
                    } else {
                        node.ring_control();
                    }
                    if random.below(4) != 0 {
                        let sge = Sge {
                            address: 0x1000,
                            length: 8,
                            lkey: command.tag,
                        };
                        let work = SendWork::new(SendOpcode::Write, &[sge])
                            .remote(bench.far.address, bench.far.tag);
                        post_all(node, vec![work]);
                        posted += 1;
                    }
                }
                5 => {
                    let late = random.below(4) as f64;
                    node.hold_control(late);
                }
                6 => {
                    let now = node.now + random.below(2_000_000);
                    bench.pair.set_now(now);
                }
                _ => bench.pair.exchange(),
            }
            open -= bench.pair.a.answers().len();
            let done = statuses(&bench.pair.completions_a());
            assert!(done.iter().all(|status| *status == Success), "{done:?}");
            posted -= done.len();
            assert!(is_running(&bench.pair.a), "{seed}");
        }
        // All that nobody rang for, too.
        bench.pair.run();
        bench.pair.a.hold_control(0.0);
        bench.pair.a.ring_control();
        bench.pair.run();
        assert_eq!(bench.pair.a.answers().len(), open, "{seed}");
        assert_eq!(statuses(&bench.pair.completions_a()), vec![Success; posted]);
        assert!(is_running(&bench.pair.a), "{seed}");
    }
}
