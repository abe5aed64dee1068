// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory: tags that are used before the commands on them are finished.

use super::checks;
use super::fixture::*;
use crate::host::{region_of, Host};
use crate::memory::PAGE;
use crate::outcome::{wait_for, Outcome};
use crate::rings::Region;
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus as Status;
use ferrite_abi::CompletionStatus::{LocalProtection, RemoteAccess, Success};
use ferrite_abi::*;
use std::mem::{offset_of, replace};
use std::time::{Duration, Instant};

checks! {
    "DEV-3-163" => taken_up_with_the_doorbell,
    "DEV-3-164" => waits_are_counted,
    "DEV-3-165" => used_before_the_doorbell,
    "DEV-3-166" => doorbells_behind_the_record,
    "DEV-3-167" => bad_records,
    "DEV-3-168" => no_record,
    "DEV-3-169" => turns_end,
    "DEV-3-170" => turns_begin_with_the_record,
    "DEV-3-171" => no_turns,
    "DEV-4-112" => used_at_once,
    "DEV-4-113" => in_the_order_of_the_queue,
    "DEV-4-114" => peers_wait,
    "DEV-4-115" => others_do_not_wait,
    "DEV-4-116" => leaving,
    "DEV-4-117" => failed,
    "DEV-4-118" => after_a_failure,
    "DEV-4-119" => what_is_there_stays,
    "DEV-4-120" => tables_that_are_gone,
    "DEV-13-26" => used_before_the_doorbell,
}

const ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
/// Commands that are given at once: fewer than the ring has entries, and more than a device may
/// care to carry out while a doorbell is written.
const MANY: usize = 30;

/// Has the device register regions with one doorbell, whose answers nobody waits for; gives the last
/// region and the cookies.
fn post_regions(host: &mut Host, count: usize) -> Outcome<(Region, Vec<u32>)> {
    let mut cookies = Vec::new();
    let mut last = None;
    for _ in 0..count {
        let command = host.region_command(ALL, PAGE);
        let entry = host.entry(Op::RegisterRegion, &command);
        host.write_command(&entry);
        cookies.push(entry.cookie);
        last = Some(region_of(&command));
    }
    host.ring_control()?;
    match last {
        Some(region) => Ok((region, cookies)),
        None => crate::outcome::failed("nothing was posted"),
    }
}

/// Gives a command whose answer nobody waits for.
fn post<P: Plain>(host: &mut Host, opcode: Op, payload: &P) -> Outcome<u32> {
    let entry = host.entry(opcode, payload);
    host.write_command(&entry);
    host.ring_control()?;
    Ok(entry.cookie)
}

fn post_release(host: &mut Host, tag: u32) -> Outcome<u32> {
    let object = ObjectNumber {
        number: tag,
        reserved: 0,
    };
    post(host, Op::ReleaseTag, &object)
}

fn answered(host: &mut Host, cookie: u32, status: Status) -> Outcome {
    let answer = host.answer(cookie)?;
    let found = answer.param0;
    ensure_eq!(found, u64::from(status.number()), "the status of a command");
    Ok(())
}

fn all_done(host: &mut Host, cookies: Vec<u32>) -> Outcome {
    for cookie in cookies {
        answered(host, cookie, Status::Ok)?;
    }
    Ok(())
}

/// A write of eight bytes from a region to a place.
fn write_from(region: &Region, sink: &Region) -> Work {
    let sges = [region.sge(0, 8)];
    Work::remote(SendOpcode::Write, &sges, sink.address, sink.tag)
}

/// A pair and a place for what it sends.
fn begin(host: &mut Host) -> Outcome<(Pair, Region)> {
    // One that looks at the record in any case has nothing to wait for.
    host.start_needing_without(FEATURE_PENDING_TAGS, FEATURE_TURNS)?;
    let sink = host.region(ALL, PAGE)?;
    Ok((Pair::new(host)?, sink))
}

fn taken_up_with_the_doorbell(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    for _ in 0..4 {
        let (region, cookies) = post_regions(host, MANY)?;
        let write = write_from(&region, &sink);
        pair.ends(host, &write, Success)?;
        all_done(host, cookies)?;
    }
    Ok(())
}

/// Has the device learn by the record alone that it is to register a region.
fn untold_region(host: &mut Host) -> Outcome<(Region, u32)> {
    let command = host.region_command(ALL, PAGE);
    let entry = host.entry(Op::RegisterRegion, &command);
    host.write_command(&entry);
    host.store_commands();
    Ok((region_of(&command), entry.cookie))
}

fn used_before_the_doorbell(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let (region, cookie) = untold_region(host)?;
        let sges = [region.sge(0, 8)];
        let work = Work::remote(opcode, &sges, sink.address, sink.tag);
        pair.ends(host, &work, Success)?;
        answered(host, cookie, Status::Ok)?;
    }
    let (region, cookie) = untold_region(host)?;
    pair.ends(host, &write8(region.address, region.tag), Success)?;
    answered(host, cookie, Status::Ok)?;
    let (region, cookie) = untold_region(host)?;
    pair.ends(host, &read8(&sink, region.address, region.tag), Success)?;
    answered(host, cookie, Status::Ok)?;
    let (region, cookie) = untold_region(host)?;
    host.post_receive(&mut pair.b, &[region.sge(0, 64)])?;
    pair.ends(host, &Work::send(&[sink.sge(0, 64)]), Success)?;
    let received = pair.received(host)?;
    ensure_eq!(received.status, Success.number(), "the receive");
    answered(host, cookie, Status::Ok)?;
    // What none of the commands makes is refused when they are taken up.
    let (region, cookie) = untold_region(host)?;
    pair.ends(host, &write8(region.address, region.tag ^ 1), RemoteAccess)?;
    answered(host, cookie, Status::Ok)?;
    host.is_alive()
}

fn doorbells_behind_the_record(host: &mut Host) -> Outcome {
    let (mut pair, _) = begin(host)?;
    let first = host.commands;
    for _ in 0..4 {
        let (region, cookie) = untold_region(host)?;
        pair.ends(host, &write8(region.address, region.tag), Success)?;
        answered(host, cookie, Status::Ok)?;
    }
    for index in [first + 1, first + 1, first + 3, first + 4] {
        host.device.doorbell(0, DOORBELL_CONTROL, index.into())?;
    }
    host.no_event(EQ_CONTROL)?;
    host.is_alive()?;
    let behind = host.commands - 1;
    host.device.doorbell(0, DOORBELL_CONTROL, behind.into())?;
    host.is_fatal(FatalCode::BadCommandIndex)
}

fn bad_records(host: &mut Host) -> Outcome {
    for ahead in [33, u32::MAX] {
        let (mut pair, sink) = begin(host)?;
        let index = host.commands.wrapping_add(ahead);
        host.memory.store32(host.control_record(), index);
        // Nobody looks for what is there.
        pair.ends(host, &write8(sink.address, sink.tag), Success)?;
        host.post(&mut pair.a, &write8(sink.address, sink.tag ^ 1))?;
        host.is_fatal(FatalCode::BadCommandIndex)?;
        host.device.control_reset()?;
    }
    Ok(())
}

fn no_record(host: &mut Host) -> Outcome {
    host.start_with(!(FEATURE_PENDING_TAGS | FEATURE_TURNS))?;
    let sink = host.region(ALL, PAGE)?;
    let mut pair = Pair::new(host)?;
    for ahead in [1, 33] {
        let index = host.commands.wrapping_add(ahead);
        host.memory.store32(host.control_record(), index);
        let work = write8(sink.address, sink.tag ^ 1);
        pair.ends(host, &work, RemoteAccess)?;
        host.is_alive()?;
        pair = Pair::new(host)?;
    }
    Ok(())
}

/// Where `turn` of the control record is.
fn turn(host: &Host) -> u64 {
    let (turn, producer) = (
        offset_of!(ControlRecord, turn),
        offset_of!(ControlRecord, producer),
    );
    host.control_record() + (turn - producer) as u64
}

fn turns_end(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_TURNS)?;
    let sink = host.region(ALL, PAGE)?;
    let mut pair = Pair::new(host)?;
    let before = host.memory.load32(turn(host));
    pair.ends(host, &write8(sink.address, sink.tag), Success)?;
    let last = wait_for("the end of a turn", || {
        let turn = host.memory.load32(turn(host));
        Ok((turn % 2 == 0).then_some(turn))
    })?;
    ensure!(last.wrapping_sub(before) >= 2, "no turn was shown");
    Ok(())
}

fn turns_begin_with_the_record(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_TURNS)?;
    for _ in 0..8 {
        let (sink, source) = (host.region(ALL, PAGE)?, host.region(ALL, PAGE)?);
        let mut pair = Pair::new(host)?;
        pair.ends(host, &write_from(&source, &sink), Success)?;
        let release = ObjectNumber {
            number: sink.tag,
            reserved: 0,
        };
        let entry = host.entry(Op::ReleaseTag, &release);
        host.write_command(&entry);
        host.store_commands();
        host.memory.barrier();
        pair.ends(host, &write_from(&source, &sink), RemoteAccess)?;
        answered(host, entry.cookie, Status::Ok)?;
    }
    host.is_alive()
}

/// A region whose tables are nowhere when the device comes to make it, as it is released behind that.
fn tables_that_are_gone(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_TURNS)?;
    let mut command = host.region_command(ALL, 16 * PAGE);
    command.buffer.order = AttOrder::Second.number();
    command.buffer.root = !0 << 40;
    let register = host.entry(Op::RegisterRegion, &command);
    host.write_command(&register);
    let number = ObjectNumber {
        number: command.tag,
        reserved: 0,
    };
    let release = host.entry(Op::ReleaseTag, &number);
    host.write_command(&release);
    host.ring_control()?;
    answered(host, register.cookie, Status::Ok)?;
    answered(host, release.cookie, Status::Ok)?;
    host.is_alive()
}

fn no_turns(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    pair.ends(host, &write8(sink.address, sink.tag), Success)?;
    ensure_eq!(host.memory.load32(turn(host)), 0, "the word for turns");
    Ok(())
}

fn waits_are_counted(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let before = host.counter("pending_waits")?;
    let (region, cookies) = post_regions(host, MANY)?;
    let write = write_from(&region, &sink);
    pair.ends(host, &write, Success)?;
    all_done(host, cookies)?;
    let waited = host.counter("pending_waits")?;
    // Whether the command was finished before is not known.
    ensure!(waited - before <= 1, "one counts as {}", waited - before);
    pair.ends(host, &write, Success)?;
    let after = host.counter("pending_waits")?;
    ensure_eq!(after, waited, "what had not to wait is counted");
    Ok(())
}

fn used_at_once(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let remote =
        |opcode, region: &Region| Work::remote(opcode, &[region.sge(0, 8)], sink.address, sink.tag);
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let (region, cookies) = post_regions(host, MANY)?;
        pair.ends(host, &remote(opcode, &region), Success)?;
        all_done(host, cookies)?;
    }
    let (region, cookies) = post_regions(host, MANY)?;
    host.post_receive(&mut pair.b, &[sink.sge(0, 8)])?;
    pair.ends(host, &Work::send(&[region.sge(0, 8)]), Success)?;
    all_done(host, cookies)
}

fn in_the_order_of_the_queue(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let (region, cookies) = post_regions(host, MANY)?;
    let from = [sink.sge(16, 8), region.sge(0, 8), sink.sge(32, 8)];
    let mut posted = Vec::new();
    for sge in from {
        let write = Work::remote(SendOpcode::Write, &[sge], sink.address, sink.tag);
        posted.push(host.post(&mut pair.a, &write)?);
    }
    for index in posted {
        let entry = host.completion(&mut pair.cq)?;
        ensure_eq!(entry.index, index, "the next one");
        ensure_eq!(entry.status, Success.number(), "its status");
    }
    all_done(host, cookies)
}

/// How long a request waits before its peer may be told so.
const MAY_TELL: Duration = Duration::from_millis(100);

fn peers_wait(host: &mut Host) -> Outcome {
    let (_, sink) = begin(host)?;
    let before = host.counter("rnr_naks_sent")?;
    let (mut began, mut longest) = (Instant::now(), Duration::ZERO);
    let mut waited = || longest = longest.max(replace(&mut began, Instant::now()).elapsed());
    let mut pair = Pair::by(host, Service::Rc, |_, _| (), |c| c.rnr_retry = 7)?;
    let (region, cookies) = post_regions(host, MANY)?;
    pair.ends(host, &write8(region.address, region.tag), Success)?;
    let bytes: u64 = host.memory.get(region.dma);
    ensure_eq!(bytes, u64::from_le_bytes([0x5a; 8]), "what was written");
    all_done(host, cookies)?;
    waited();
    let (region, cookies) = post_regions(host, MANY)?;
    pair.ends(host, &read8(&sink, region.address, region.tag), Success)?;
    all_done(host, cookies)?;
    waited();
    let (region, cookies) = post_regions(host, MANY)?;
    host.post_receive(&mut pair.b, &[region.sge(0, 64)])?;
    pair.ends(host, &Work::send(&[sink.sge(0, 64)]), Success)?;
    let received = pair.received(host)?;
    ensure_eq!(received.status, Success.number(), "the receive");
    all_done(host, cookies)?;
    waited();
    let (region, cookie) = untold_region(host)?;
    pair.ends(host, &write8(region.address, region.tag), Success)?;
    answered(host, cookie, Status::Ok)?;
    waited();
    // What stands behind a request that waits does too: it reads what that has written.
    let (region, cookies) = post_regions(host, MANY)?;
    let write = host.post(&mut pair.a, &write8(region.address, region.tag))?;
    let read = host.post(&mut pair.a, &read8(&sink, region.address, region.tag))?;
    for index in [write, read] {
        let entry = pair.of_a(host, index)?;
        ensure_eq!(entry.status, Success.number(), "one of two");
    }
    let bytes: u64 = host.memory.get(sink.dma);
    ensure_eq!(bytes, u64::from_le_bytes([0x5a; 8]), "what was read");
    all_done(host, cookies)?;
    waited();
    let after = host.counter("rnr_naks_sent")?;
    // A device that takes its time may have them come back.
    if longest < MAY_TELL {
        ensure_eq!(after, before, "peers that were told to wait");
    }
    Ok(())
}

fn others_do_not_wait(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let mut other = Pair::new(host)?;
    let (region, cookies) = post_regions(host, MANY)?;
    let index = host.post(&mut pair.a, &write_from(&region, &sink))?;
    other.ends(host, &write_from(&sink, &sink), Success)?;
    let entry = pair.of_a(host, index)?;
    ensure_eq!(entry.status, Success.number(), "the one that may wait");
    all_done(host, cookies)
}

fn leaving(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let region = host.region(ALL, PAGE)?;
    let cookie = post_release(host, region.tag)?;
    let write = write_from(&region, &sink);
    pair.ends(host, &write, LocalProtection)?;
    answered(host, cookie, Status::Ok)?;
    // Behind its registration, too; and for a peer.
    let mut pair = Pair::new(host)?;
    let (region, cookies) = post_regions(host, MANY - 1)?;
    let cookie = post_release(host, region.tag)?;
    pair.ends(host, &write8(region.address, region.tag), RemoteAccess)?;
    all_done(host, cookies)?;
    answered(host, cookie, Status::Ok)?;
    host.untouched(region.dma, 8)
}

/// Posts a registration that fails; gives its tag.
fn post_bad(host: &mut Host) -> Outcome<(RegisterRegion, u32)> {
    let command = host.region_command(ALL, PAGE);
    let bad = RegisterRegion {
        access: u32::MAX,
        ..command
    };
    let cookie = post(host, Op::RegisterRegion, &bad)?;
    Ok((command, cookie))
}

fn failed(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    for finished in [false, true] {
        let (command, cookie) = post_bad(host)?;
        if finished {
            host.answer(cookie)?;
        }
        let region = region_of(&command);
        let write = write_from(&region, &sink);
        pair.ends(host, &write, LocalProtection)?;
        pair = Pair::new(host)?;
        let (command, _) = post_bad(host)?;
        pair.ends(host, &write8(command.address, command.tag), RemoteAccess)?;
        pair = Pair::new(host)?;
    }
    Ok(())
}

fn after_a_failure(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let (command, cookie) = post_bad(host)?;
    let released = post_release(host, command.tag)?;
    let answer = host.answer(cookie)?;
    ensure!(answer.param0 != 0, "what cannot be registered was");
    answered(host, released, Status::Ok)?;
    host.object(Op::ReleaseTag, command.tag, Status::NotFound)?;
    let (command, _) = post_bad(host)?;
    host.execute(&command)?;
    let region = region_of(&command);
    let write = write_from(&region, &sink);
    pair.ends(host, &write, Success)
}

fn what_is_there_stays(host: &mut Host) -> Outcome {
    let (mut pair, sink) = begin(host)?;
    let command = host.region_command(ALL, PAGE);
    host.execute(&command)?;
    let region = region_of(&command);
    let write = write_from(&region, &sink);
    let replaced = RegisterRegion {
        flags: REGION_REPLACE,
        access: u32::MAX,
        ..command
    };
    for (bad, status) in [(command, Status::Exists), (replaced, Status::BadParameter)] {
        let cookie = post(host, Op::RegisterRegion, &bad)?;
        pair.ends(host, &write, Success)?;
        answered(host, cookie, status)?;
        pair.ends(host, &write, Success)?;
    }
    Ok(())
}
