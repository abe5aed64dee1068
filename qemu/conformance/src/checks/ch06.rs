// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion queues.

use super::checks;
use super::fixture::*;
use crate::host::{Host, QKEY, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{not_here, wait_for, Outcome, PATIENCE};
use crate::packet::{deth, UD_SEND};
use crate::rings::Cq;
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CompletionStatus::{Flushed, LocalLength, LocalProtection, Success};
use ferrite_abi::*;
use std::time::{Duration, Instant};

checks! {
    "DEV-6-1" => |h| rounds(h, |_, _| Ok(())),
    "DEV-6-2" => not_overwritten,
    "DEV-6-3" => record_is_read_again,
    "DEV-6-4" => impossible_consumers,
    "DEV-6-5" => |h| rounds(h, |index, entry| {
        ensure_eq!(entry.phase, phase_of(index, 2), "the phase of entry {index}");
        Ok(())
    }),
    "DEV-6-6" => rest_before_valid,
    "DEV-6-7" => |h| entries(h, |e| {
        ensure_eq!((e.send.qpn, e.receive.qpn), (e.a, e.b), "the queue pairs");
        ensure_eq!(e.failed.qpn, e.failing, "the queue pair that failed");
        Ok(())
    }),
    "DEV-6-8" => |h| entries(h, |e| {
        let found = (e.send.index, e.receive.index, e.failed.index);
        ensure_eq!(found, (2, 0, 0), "the indices");
        Ok(())
    }),
    "DEV-6-9" => |h| entries(h, |e| {
        let found = (e.send.status, e.receive.status, e.failed.status);
        ensure_eq!(found, (0, 0, LocalProtection.number()), "the statuses");
        Ok(())
    }),
    "DEV-6-10" => |h| entries(h, |e| {
        use CompletionOpcode::{Receive, Send};
        let found = (e.send.opcode, e.receive.opcode, e.failed.opcode, e.flushed.opcode);
        let right = (Send.number(), Receive.number(), Send.number(), Receive.number());
        ensure_eq!(found, right, "the opcodes");
        Ok(())
    }),
    "DEV-6-11" => |h| entries(h, |e| {
        let found = (e.send.flags, e.receive.flags, e.failed.flags, e.flushed.flags);
        let receive = COMPLETION_RECEIVE | COMPLETION_IMMEDIATE | COMPLETION_SOLICITED;
        ensure_eq!(found, (0, receive, 0, COMPLETION_RECEIVE), "the flags");
        Ok(())
    }),
    "DEV-6-12" => |h| entries(h, |e| {
        let found = (e.send.byte_count, e.receive.byte_count, e.failed.byte_count);
        ensure_eq!(found, (64, 64, 0), "the bytes");
        Ok(())
    }),
    "DEV-6-13" => |h| entries(h, |e| {
        let found = (e.send.immediate, e.receive.immediate, e.flushed.immediate);
        ensure_eq!(found, (0, 0x4433_2211, 0), "the immediate data");
        Ok(())
    }),
    "DEV-6-14" => |h| entries(h, |e| {
        ensure_eq!((e.send.tag, e.receive.tag, e.flushed.tag), (0, 0, 0), "the tags");
        Ok(())
    }),
    "DEV-6-15" => datagram_sources,
    "DEV-6-16" => |h| entries(h, |e| {
        let found = (e.send.vlan, e.receive.vlan, e.failed.vlan, e.flushed.vlan);
        ensure_eq!(found, (VLAN_NONE, VLAN_NONE, VLAN_NONE, VLAN_NONE), "the VLANs");
        Ok(())
    }),
    "DEV-6-17" => |h| entries(h, |e| {
        for entry in [e.send, e.receive, e.failed, e.flushed] {
            ensure_eq!((entry.pkey_index, entry.reserved_channel), (0, 0), "{entry:x?}");
        }
        Ok(())
    }),
    "DEV-6-18" => shared_receive_queue_numbers,
    "DEV-6-19" => |h| entries(h, |e| {
        for entry in [e.send, e.receive, e.failed, e.flushed] {
            let right = (e.before..=e.after).contains(&entry.timestamp);
            ensure!(right, "{} is not between {} and {}", entry.timestamp, e.before, e.after);
        }
        Ok(())
    }),
    "DEV-6-20" => |h| entries(h, |e| {
        let found = (e.send.vendor_syndrome, e.receive.vendor_syndrome);
        ensure_eq!(found, (0, 0), "the vendor syndromes of successes");
        Ok(())
    }),
    "DEV-6-21" => |h| entries(h, |e| {
        for entry in [e.send, e.receive, e.failed, e.flushed] {
            ensure_eq!(entry.port, 0, "the port");
        }
        Ok(())
    }),
    "DEV-6-22" => indices,
    "DEV-6-23" => in_order_of_posting,
    "DEV-6-24" => clock_goes_on,
    "DEV-6-25" => stamps_are_not_late,
    "DEV-6-26" => stamps_in_order,
    "DEV-6-27" => without_a_clock,
    "DEV-6-28" => |h| entries(h, |e| {
        ensure!(e.after >= e.before, "{} is before {}", e.after, e.before);
        Ok(())
    }),
    "DEV-6-29" => armed_for_next,
    "DEV-6-30" => armed_for_solicited,
    "DEV-6-31" => one_event_for_an_arming,
    "DEV-6-32" => sequences,
    "DEV-6-33" => armed_again,
    "DEV-6-34" => solicited_before_the_doorbell,
    "DEV-6-35" => ring_gone_round,
    "DEV-6-36" => impossible_index,
    "DEV-6-37" => one_unread_event,
    "DEV-6-38" => without_a_handler,
    "DEV-6-39" => |h| {
        moderated(h, 0, u16::MAX, 1, true)?;
        h.device.control_reset()?;
        moderated(h, 5, 0, 1, true)
    },
    "DEV-6-40" => moderation,
    "DEV-6-41" => moderation_changed,
    "DEV-6-42" => overflow,
    "DEV-6-43" => nothing_after_overflow,
    "DEV-6-44" => queue_pairs_of_a_failed_queue,
    "DEV-6-45" => failed_queue_is_not_resized,
    "DEV-6-46" => moved,
    "DEV-6-47" => |h| resized(h, 4),
    "DEV-6-48" => |h| resized(h, 7),
    "DEV-6-49" => |h| resized(h, 3),
    "DEV-6-50" => arming_and_resize,
    "DEV-6-51" => old_buffer,
    "DEV-6-52" => by_the_map,
    "DEV-6-53" => one_unread_event_by_the_map,
    "DEV-6-54" => waiting_when_its_place_goes,
}

/// A queue of four entries that goes round several times.
fn rounds(host: &mut Host, look: fn(u32, &CompletionEntry) -> Outcome) -> Outcome {
    host.start()?;
    let command = host.cq_command(2);
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    for index in 0..20 {
        let posted = host.post(&mut qp, &Work::send(&[]))?;
        let entry = host.completes(&mut cq, (qp.qpn, posted), Flushed)?;
        look(index, &entry)?;
    }
    Ok(())
}

fn not_overwritten(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(2);
    let (cq, mut qp) = with_queue_of(host, &command)?;
    complete_unread(host, &cq, &mut qp, 4)?;
    let before = host.memory.bytes(cq.ring, 4 * 64);
    host.post(&mut qp, &Work::send(&[]))?;
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, cq.cqn)?;
    ensure!(
        host.memory.bytes(cq.ring, 4 * 64) == before,
        "an entry was overwritten"
    );
    Ok(())
}

fn record_is_read_again(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(2);
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    for _ in 0..5 {
        complete_unread(host, &cq, &mut qp, 4)?;
        // Only now is the device told, and by the record alone.
        for _ in 0..4 {
            ensure!(cq.take(&host.memory).is_some(), "there is an entry");
        }
    }
    host.no_event(EQ_ASYNC)
}

fn impossible_consumers(host: &mut Host) -> Outcome {
    host.start()?;
    for consumer in [100, 0xffff_fff0] {
        let command = host.cq_command(2);
        let (cq, mut qp) = with_queue_of(host, &command)?;
        complete_unread(host, &cq, &mut qp, 4)?;
        host.memory.store32(cq.record, consumer);
        host.post(&mut qp, &Work::send(&[]))?;
        host.event(EQ_ASYNC, EventCode::CompletionQueueError, cq.cqn)?;
    }
    Ok(())
}

/// Entries of all kinds, and what they should tell of.
struct Entries {
    a: u32,
    b: u32,
    failing: u32,
    send: CompletionEntry,
    receive: CompletionEntry,
    failed: CompletionEntry,
    flushed: CompletionEntry,
    before: u64,
    after: u64,
}

fn time(host: &mut Host) -> Outcome<u64> {
    if host.caps.clock_khz == 0 {
        return Ok(0);
    }
    Ok(host
        .query::<ClockReading>(CommandOpcode::QueryClock, None)?
        .ticks)
}

fn entries(host: &mut Host, look: fn(&Entries) -> Outcome) -> Outcome {
    host.start()?;
    let source = host.region(0, PAGE)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let before = time(host)?;
    let mut pair = Pair::new(host)?;
    host.post_receive(&mut pair.b, &[sink.sge(0, 64)])?;
    // Two blocks that are not signaled in front of it.
    let first = Work::remote(SendOpcode::Write, &[], 0, 0).flags(0);
    host.post(&mut pair.a, &first)?;
    host.post(&mut pair.a, &first)?;
    let work = Work::send_immediate(&[source.sge(0, 64)], 0x4433_2211);
    let send = pair.post(host, &work.flags(SEND_SIGNALED | SEND_SOLICITED))?;
    let receive = pair.received(host)?;
    let mut bad = Pair::new(host)?;
    host.post_receive(&mut bad.a, &[])?;
    let nonsense = Sge {
        address: 0,
        length: 8,
        lkey: 0xdead_be00,
    };
    let failed = bad.post(host, &Work::send(&[nonsense]))?;
    let flushed = host.completion(&mut bad.cq)?;
    let after = time(host)?;
    look(&Entries {
        a: pair.a.qpn,
        b: pair.b.qpn,
        failing: bad.a.qpn,
        send,
        receive,
        failed,
        flushed,
        before,
        after,
    })
}

fn datagram_sources(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let mut cq = host.create_cq()?;
    let (mut qp, _) = datagrams(host, &cq)?;
    let neighbour = host.neighbour(&qp);
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    for (room, status) in [(128, Success), (48, LocalLength)] {
        let index = host.post_receive(&mut qp, &[region.sge(0, room)])?;
        let body = [deth(QKEY, neighbour.qpn), vec![1; 64]].concat();
        let packet = neighbour.packet(UD_SEND, RECEIVE_PSN, body);
        host.wire()?.send(&packet.encode())?;
        let entry = host.completes(&mut cq, (qp.qpn, index), status)?;
        ensure_eq!(entry.source_qpn, neighbour.qpn, "the sender's queue pair");
        ensure_eq!(entry.source_mac, neighbour.mac, "the sender's MAC address");
        ensure_eq!(entry.vlan, VLAN_NONE, "the VLAN");
    }
    Ok(())
}

fn shared_receive_queue_numbers(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let mut cq = host.create_cq()?;
    let (qp, mut srq) = shared(host, &cq)?;
    srq.post(&host.memory, 99, &[]);
    let neighbour = host.neighbour(&qp);
    let packet = neighbour.packet(crate::packet::rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    let entry = host.completes(&mut cq, (qp.qpn, 99), Success)?;
    ensure_eq!(
        (entry.flags & COMPLETION_SRQ, entry.srqn),
        (COMPLETION_SRQ, srq.srqn),
        "SRQ"
    );
    Ok(())
}

fn indices(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for round in 0..40 {
        let receive = host.post_receive(&mut pair.b, &[])?;
        ensure_eq!(receive, round, "a receive counts one");
        // One block, then three.
        pair.ends(host, &Work::send(&[]), Success)?;
        let entry = pair.received(host)?;
        ensure_eq!(entry.index, receive, "the index of the receive");
        let long = Work::remote(SendOpcode::Write, &[], 0, 0).inline(&[0; 128]);
        let index = pair.a.send_producer;
        let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 128)?;
        let mut long = long;
        let part = RemotePart {
            address: region.address,
            rkey: region.tag,
            ..RemotePart::zeroed()
        };
        long.part = part.as_bytes().to_vec();
        let entry = pair.post(host, &long)?;
        ensure_eq!(entry.index, index, "the index of a long work request");
    }
    Ok(())
}

fn in_order_of_posting(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let source = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ, PAGE)?;
    let mut posted = Vec::new();
    for round in 0..12 {
        let work = if round % 3 == 0 {
            read8(&source, source.address, source.tag)
        } else {
            Work::remote(SendOpcode::Write, &[], 0, 0)
        };
        posted.push(host.post(&mut pair.a, &work)?);
    }
    for index in posted {
        host.completes(&mut pair.cq, (pair.a.qpn, index), Success)?;
    }
    Ok(())
}

fn clock_goes_on(host: &mut Host) -> Outcome {
    host.start()?;
    if host.caps.clock_khz == 0 {
        return not_here("the device has no clock");
    }
    let mut last = 0;
    for _ in 0..50 {
        let now = time(host)?;
        ensure!(now >= last, "the clock went back from {last} to {now}");
        let bits = host.caps.clock_bits;
        ensure!(bits == 64 || now >> bits == 0, "bits above {bits} are set");
        last = now;
    }
    // About as fast as it says.
    let outer = Instant::now();
    let from = time(host)?;
    let inner = Instant::now();
    wait_for("some milliseconds", || {
        Ok((inner.elapsed() > Duration::from_millis(20)).then_some(()))
    })?;
    let least = inner.elapsed().as_millis() as u64 * u64::from(host.caps.clock_khz) / 2;
    let ticks = time(host)? - from;
    let most = (outer.elapsed().as_millis() as u64 + 1) * u64::from(host.caps.clock_khz) * 2;
    ensure!(
        (least..=most).contains(&ticks),
        "{ticks} ticks, not {least} to {most}"
    );
    Ok(())
}

fn stamps_are_not_late(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    for _ in 0..50 {
        host.post(&mut qp, &Work::send(&[]))?;
        let entry = host.completion(&mut cq)?;
        let now = time(host)?;
        ensure!(
            entry.timestamp <= now,
            "a stamp of {} at {now}",
            entry.timestamp
        );
    }
    Ok(())
}

fn stamps_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let mut last = 0;
    for _ in 0..50 {
        host.post(&mut pair.a, &Work::remote(SendOpcode::Write, &[], 0, 0))?;
        let entry = host.completion(&mut pair.cq)?;
        ensure!(entry.timestamp >= last, "{} after {last}", entry.timestamp);
        last = entry.timestamp;
    }
    Ok(())
}

fn without_a_clock(host: &mut Host) -> Outcome {
    host.start()?;
    if host.caps.clock_khz != 0 {
        return not_here("the device has a clock");
    }
    let (mut cq, mut qp) = with_queue(host)?;
    host.post(&mut qp, &Work::send(&[]))?;
    let stamp = host.completion(&mut cq)?.timestamp;
    ensure_eq!(stamp, 0, "the stamp");
    let entry = host.query_entry(CommandOpcode::QueryClock, None, 64);
    host.submit_for(&entry, CommandStatus::Unsupported)
}

/// The event of a completion queue; returns the sequence.
fn event(host: &mut Host, cq: &Cq) -> Outcome<u64> {
    Ok(host
        .event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?
        .param0)
}

fn no_event(host: &mut Host) -> Outcome {
    host.no_event(EQ_FIRST_HANDLER)
}

fn armed_for_next(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    no_event(host)?;
    complete(host, &mut cq, &mut qp)?;
    event(host, &cq)?;
    // At once when it is there already.
    complete_unread(host, &cq, &mut qp, 1)?;
    host.arm_cq(&cq, 0, false)?;
    event(host, &cq)?;
    // What the host has seen does not count.
    let seen = Cq {
        consumer: cq.consumer + 1,
        ..cq.clone()
    };
    host.arm_cq(&seen, 0, false)?;
    no_event(host)?;
    host.post(&mut qp, &Work::send(&[]))?;
    event(host, &cq)?;
    Ok(())
}

/// Has a receive completed by a send, solicited or not; both queues' entries are consumed.
fn message(host: &mut Host, pair: &mut Pair, solicited: bool) -> Outcome {
    host.post_receive(&mut pair.b, &[])?;
    let flags = if solicited { SEND_SOLICITED } else { 0 };
    // Not signaled: only the receive completes.
    host.post(&mut pair.a, &Work::send(&[]).flags(flags))?;
    let entry = host.completion(&mut pair.cq)?;
    ensure_eq!(entry.qpn, pair.b.qpn, "whose completion it is");
    Ok(())
}

fn armed_for_solicited(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    host.arm_cq(&pair.cq, 0, true)?;
    message(host, &mut pair, false)?;
    no_event(host)?;
    message(host, &mut pair, true)?;
    event(host, &pair.cq)?;
    // One that failed counts as well.
    host.arm_cq(&pair.cq, 1, true)?;
    host.post_receive(&mut pair.b, &[])?;
    host.move_qp(pair.b.qpn, QueuePairStateCode::Error)?;
    event(host, &pair.cq)?;
    Ok(())
}

fn one_event_for_an_arming(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    event(host, &cq)?;
    complete(host, &mut cq, &mut qp)?;
    no_event(host)
}

fn sequences(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    for sequence in [0, 1, 2, 3, 0, 3] {
        host.arm_cq(&cq, sequence, false)?;
        complete(host, &mut cq, &mut qp)?;
        ensure_eq!(event(host, &cq)?, u64::from(sequence), "the sequence");
    }
    Ok(())
}

fn armed_again(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    host.arm_cq(&pair.cq, 1, false)?;
    host.arm_cq(&pair.cq, 2, true)?;
    // *Next* stays in force.
    message(host, &mut pair, false)?;
    ensure_eq!(event(host, &pair.cq)?, 2, "the sequence");
    message(host, &mut pair, true)?;
    no_event(host)
}

fn solicited_before_the_doorbell(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let start = pair.cq.consumer;
    message(host, &mut pair, true)?;
    message(host, &mut pair, false)?;
    let seen = |consumer| Cq {
        consumer,
        ..pair.cq.clone()
    };
    // The solicited one is before what was seen: it does not count.
    let (late, early) = (seen(start + 1), seen(start));
    host.arm_cq(&late, 0, true)?;
    no_event(host)?;
    host.arm_cq(&early, 1, true)?;
    event(host, &pair.cq)?;
    Ok(())
}

fn ring_gone_round(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(2);
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    let early = cq.clone();
    for _ in 0..10 {
        complete(host, &mut cq, &mut qp)?;
    }
    host.arm_cq(&early, 0, false)?;
    event(host, &cq)?;
    Ok(())
}

fn impossible_index(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    let ahead = Cq {
        consumer: 1 << 30,
        ..cq.clone()
    };
    host.arm_cq(&ahead, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    no_event(host)
}

fn one_unread_event(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    let mut ring = host.queues[&EQ_FIRST_HANDLER].clone();
    for sequence in 0..3 {
        host.arm_cq(&cq, sequence, false)?;
        complete(host, &mut cq, &mut qp)?;
    }
    wait_for("the first event", || Ok(ring.peek(&host.memory)))?;
    // Another moderation does not change that.
    modify(host, &cq, EQ_FIRST_HANDLER, 0, 0)?;
    let second = ring.slot(ring.read + 1);
    crate::outcome::watch("a second unread event", || {
        Ok((host.memory.load32(second) != 0).then_some(()))
    })?;
    // It comes when the host has told that it read the first.
    ring.take(&host.memory);
    host.queues.insert(EQ_FIRST_HANDLER, ring.clone());
    host.tell_read(EQ_FIRST_HANDLER, ring.read)?;
    event(host, &cq)?;
    no_event(host)
}

fn modify(host: &mut Host, cq: &Cq, eqn: u16, count: u16, microseconds: u16) -> Outcome {
    host.execute(&ModifyCompletionQueue {
        cqn: cq.cqn,
        eqn,
        moderation_count: count,
        moderation_microseconds: microseconds,
        processor: 0,
        reserved: [0; 2],
    })
}

fn without_a_handler(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.cq_command(6);
    command.eqn = EQ_NONE;
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    host.arm_cq(&cq, 3, false)?;
    complete(host, &mut cq, &mut qp)?;
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.no_event(eqn)?;
    }
    modify(host, &cq, EQ_FIRST_HANDLER, 0, 0)?;
    ensure_eq!(event(host, &cq)?, 3, "the sequence");
    // One whose entry is yet to come is kept as well.
    modify(host, &cq, EQ_NONE, 0, 0)?;
    host.arm_cq(&cq, 1, false)?;
    modify(host, &cq, EQ_FIRST_HANDLER, 0, 0)?;
    no_event(host)?;
    complete(host, &mut cq, &mut qp)?;
    ensure_eq!(event(host, &cq)?, 1, "the sequence");
    Ok(())
}

/// With this moderation, so many entries raise the event at once, or do not.
fn moderated(host: &mut Host, count: u16, time: u16, entries: u32, raised: bool) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    modify(host, &cq, EQ_FIRST_HANDLER, count, time)?;
    let mut fire = |host: &mut Host| -> Outcome<Cq> {
        host.arm_cq(&cq, 0, false)?;
        for _ in 0..entries {
            complete(host, &mut cq, &mut qp)?;
        }
        Ok(cq.clone())
    };
    if !raised {
        fire(host)?;
        return no_event(host);
    }
    at_once(|| {
        let cq = fire(host)?;
        event(host, &cq)?;
        Ok(())
    })
}

fn moderation(host: &mut Host) -> Outcome {
    moderated(host, 3, u16::MAX, 3, true)?;
    host.device.control_reset()?;
    moderated(host, 3, u16::MAX, 2, false)?;
    host.device.control_reset()?;
    // By time alone.
    const TIME: u16 = 30_000;
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    modify(host, &cq, EQ_FIRST_HANDLER, 100, TIME)?;
    host.arm_cq(&cq, 0, false)?;
    let start = Instant::now();
    complete(host, &mut cq, &mut qp)?;
    event(host, &cq)?;
    let early = start.elapsed() < Duration::from_micros(u64::from(TIME) / 2);
    ensure!(!early, "it came after {:?}", start.elapsed());
    Ok(())
}

fn moderation_changed(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    modify(host, &cq, EQ_FIRST_HANDLER, 100, 40_000)?;
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    // It still comes, at the time that was set for it.
    modify(host, &cq, EQ_FIRST_HANDLER, 100, u16::MAX)?;
    event(host, &cq)?;
    // And earlier, by an entry that is judged by the new values.
    host.arm_cq(&cq, 1, false)?;
    complete(host, &mut cq, &mut qp)?;
    modify(host, &cq, EQ_FIRST_HANDLER, 0, 0)?;
    complete(host, &mut cq, &mut qp)?;
    event(host, &cq)?;
    Ok(())
}

/// A pair whose completion queue has two entries, and has overflowed.
fn overflowed(host: &mut Host) -> Outcome<Pair> {
    host.start()?;
    let mut pair = Pair::with_entries(host, 1)?;
    for _ in 0..3 {
        host.post(&mut pair.a, &empty_write())?;
    }
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, pair.cq.cqn)?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, pair.a.qpn)?;
    Ok(pair)
}

fn overflow(host: &mut Host) -> Outcome {
    let mut pair = overflowed(host)?;
    host.post(&mut pair.a, &empty_write())?;
    host.no_event(EQ_ASYNC)?;
    // Memory that is not there is told of likewise.
    let mut command = host.cq_command(6);
    let table = host.memory.allocate(PAGE);
    host.memory.store64(table, NOWHERE);
    let record = host.memory.allocate(PAGE);
    host.memory.store64(table + 8, record);
    (command.buffer.root, command.buffer.order) = (table, 1);
    let (cq, mut qp) = match with_queue_of(host, &command) {
        Ok(made) => made,
        // The device may look when it is given the queue.
        Err(_) => return Ok(()),
    };
    host.post(&mut qp, &Work::send(&[]))?;
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, cq.cqn)?;
    Ok(())
}

fn nothing_after_overflow(host: &mut Host) -> Outcome {
    let Pair { mut cq, mut a, .. } = overflowed(host)?;
    cq.take(&host.memory);
    cq.take(&host.memory);
    host.arm_cq(&cq, 0, false)?;
    host.post(&mut a, &empty_write())?;
    host.no_completion(&mut cq)?;
    no_event(host)
}

fn queue_pairs_of_a_failed_queue(host: &mut Host) -> Outcome {
    let pair = overflowed(host)?;
    host.comes_to(pair.a.qpn, QueuePairStateCode::Error)?;
    let mut other = pair.b;
    ensure_eq!(
        host.state(other.qpn)?,
        QueuePairStateCode::Rts,
        "who has not come to it"
    );
    let bad = Sge {
        address: 0,
        length: 8,
        lkey: 0xdead_be00,
    };
    host.post(&mut other, &Work::send(&[bad]))?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, other.qpn)?;
    host.comes_to(other.qpn, QueuePairStateCode::Error)
}

/// A right command that gives a queue another ring.
fn resize(host: &mut Host, cq: &Cq, log_entries: u8) -> (ResizeCompletionQueue, Cq) {
    let ring = 64u64 << log_entries;
    let buffer = Buffer::contiguous(host.memory.allocate(ring + 64), ring + 64);
    let command = ResizeCompletionQueue {
        cqn: cq.cqn,
        log_entries,
        record_offset: ring as u32,
        buffer,
        ..ResizeCompletionQueue::zeroed()
    };
    let new = Cq {
        ring: buffer.root,
        record: buffer.root + ring,
        log_entries,
        ..cq.clone()
    };
    host.memory.store32(new.record, new.consumer);
    for index in new.consumer..new.consumer + (1 << log_entries) {
        let last = new.slot(index) + 63;
        host.memory.write(last, &[phase_of(index, log_entries) ^ 1]);
    }
    (command, new)
}

fn failed_queue_is_not_resized(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    host.device.control_reset()?;
    let Pair { cq, a, b, .. } = overflowed(host)?;
    let (command, _) = resize(host, &cq, 4);
    host.refuse(&command, CommandStatus::BadState)?;
    host.destroy(CommandOpcode::DestroyQueuePair, a.qpn)?;
    host.destroy(CommandOpcode::DestroyQueuePair, b.qpn)?;
    host.destroy(CommandOpcode::DestroyCompletionQueue, cq.cqn)
}

fn moved(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let (mut cq, mut qp) = with_queue(host)?;
    for round in 0..10 {
        host.arm_cq(&cq, 0, false)?;
        let posted = host.post(&mut qp, &Work::send(&[]))?;
        modify(
            host,
            &cq,
            if round % 2 == 0 { 3 } else { EQ_FIRST_HANDLER },
            0,
            0,
        )?;
        host.completes(&mut cq, (qp.qpn, posted), Flushed)?;
        // Exactly once, on either.
        let mut events = 0;
        wait_for("the event", || {
            for eqn in [EQ_FIRST_HANDLER, 3] {
                events += u32::from(host.look_for_event(eqn)?.is_some());
            }
            Ok((events > 0).then_some(()))
        })?;
        ensure_eq!(events, 1, "events of one arming");
        host.nop()?;
        for eqn in [EQ_FIRST_HANDLER, 3] {
            let event = host.look_for_event(eqn)?;
            ensure_eq!(event, None, "a second event on queue {eqn}");
        }
    }
    Ok(())
}

fn resized(host: &mut Host, log_entries: u8) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    let command = host.cq_command(4);
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    for _ in 0..21 {
        complete(host, &mut cq, &mut qp)?;
    }
    let first = qp.send_producer;
    complete_unread(host, &cq, &mut qp, 5)?;
    let (command, mut new) = resize(host, &cq, log_entries);
    // The old record does not count.
    host.memory.store32(cq.record, cq.consumer.wrapping_sub(3));
    host.execute(&command)?;
    for at in 0..5 {
        host.completes(&mut new, (qp.qpn, first + at), Flushed)?;
    }
    for _ in 0..20 {
        let posted = host.post(&mut qp, &Work::send(&[]))?;
        host.completes(&mut new, (qp.qpn, posted), Flushed)?;
    }
    Ok(())
}

fn arming_and_resize(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    let (cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 2, false)?;
    let (command, mut new) = resize(host, &cq, 7);
    host.execute(&command)?;
    complete(host, &mut new, &mut qp)?;
    ensure_eq!(event(host, &new)?, 2, "the sequence");
    Ok(())
}

fn old_buffer(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    let (mut cq, mut qp) = with_queue(host)?;
    // Refused: the old one goes on.
    let (mut command, _) = resize(host, &cq, 7);
    command.record_offset += 8;
    host.refuse(&command, CommandStatus::BadParameter)?;
    complete(host, &mut cq, &mut qp)?;
    let (command, mut new) = resize(host, &cq, 7);
    host.execute(&command)?;
    let before = host.memory.bytes(cq.ring, 64 * 64);
    for _ in 0..5 {
        complete(host, &mut new, &mut qp)?;
    }
    ensure!(
        host.memory.bytes(cq.ring, 64 * 64) == before,
        "the old ring was written"
    );
    Ok(())
}

fn rest_before_valid(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    // Looked at as fast as can be, from the moment on that the phase is right.
    for round in 0..500 {
        let index = host.post(&mut qp, &Work::send(&[]))?;
        let end = Instant::now() + PATIENCE;
        let entry = loop {
            if let Some(entry) = cq.take(&host.memory) {
                break entry;
            }
            ensure!(Instant::now() < end, "no completion");
            std::hint::spin_loop();
        };
        let found = (entry.qpn, entry.index, entry.status, entry.vlan);
        let right = (qp.qpn, index, Flushed.number(), VLAN_NONE);
        ensure_eq!(found, right, "completion {round}");
    }
    Ok(())
}

/// A completion queue by the vector map, for processor 5, and a queue pair that completes in it.
fn mapped(host: &mut Host) -> Outcome<(Cq, crate::rings::Qp)> {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    host.create_eq(3, 3)?;
    let mut command = host.cq_command(6);
    (command.eqn, command.processor) = (EQ_MAPPED, 5);
    with_queue_of(host, &command)
}

/// Sends completions of one kind, for processor 5, to an event queue.
fn send_to(host: &mut Host, row: SubFunction, eqn: u16) -> Outcome {
    host.execute(&map_command(row, 5, &[(eqn, MESSAGE_OF_QUEUE)]))
}

fn by_the_map(host: &mut Host) -> Outcome {
    let (mut cq, mut qp) = mapped(host)?;
    // Not by any entry yet.
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    host.event(EQ_ASYNC, EventCode::Completion, cq.cqn)?;
    send_to(host, SubFunction::SendCompletions, EQ_FIRST_HANDLER)?;
    send_to(host, SubFunction::ReceiveCompletions, 3)?;
    for sequence in [1, 2] {
        host.arm_cq(&cq, sequence, false)?;
        complete(host, &mut cq, &mut qp)?;
        host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
        host.arm_cq(&cq, sequence, false)?;
        host.post_receive(&mut qp, &[])?;
        host.completion(&mut cq)?;
        host.event(3, EventCode::Completion, cq.cqn)?;
    }
    // What is there before the arming.
    let seen = cq.clone();
    host.post_receive(&mut qp, &[])?;
    host.completion(&mut cq)?;
    host.arm_cq(&seen, 3, false)?;
    host.event(3, EventCode::Completion, cq.cqn)?;
    host.no_event(EQ_FIRST_HANDLER)
}

fn one_unread_event_by_the_map(host: &mut Host) -> Outcome {
    let (mut cq, mut qp) = mapped(host)?;
    let row = SubFunction::SendCompletions;
    let places = [EQ_FIRST_HANDLER, 3];
    for round in 0..3 {
        for eqn in places {
            send_to(host, row, eqn)?;
            host.arm_cq(&cq, round, false)?;
            complete(host, &mut cq, &mut qp)?;
        }
    }
    for eqn in places {
        let ring = host.queues[&eqn].clone();
        wait_for("the first event", || Ok(ring.peek(&host.memory)))?;
        let second = ring.slot(ring.read + 1);
        crate::outcome::watch("a second unread event", || {
            Ok((host.memory.load32(second) != 0).then_some(()))
        })?;
    }
    // The one that waits is written where the map says when it can be.
    for eqn in places {
        host.event(eqn, EventCode::Completion, cq.cqn)?;
    }
    host.event(3, EventCode::Completion, cq.cqn)?;
    host.no_event(EQ_FIRST_HANDLER)?;
    host.no_event(3)
}

fn waiting_when_its_place_goes(host: &mut Host) -> Outcome {
    let (mut cq, mut qp) = mapped(host)?;
    let row = SubFunction::SendCompletions;
    send_to(host, row, 3)?;
    for sequence in [1, 2] {
        host.arm_cq(&cq, sequence, false)?;
        complete(host, &mut cq, &mut qp)?;
    }
    send_to(host, row, EQ_FIRST_HANDLER)?;
    host.no_event(EQ_FIRST_HANDLER)?;
    host.destroy(CommandOpcode::DestroyEventQueue, 3)?;
    let event = host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    ensure_eq!(event.param0, 2, "the sequence");
    Ok(())
}
