// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event queues.

use super::checks;
use super::fixture::*;
use crate::host::Host;
use crate::outcome::{wait_for, watch, Outcome};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::*;
use std::time::{Duration, Instant};

checks! {
    "DEV-5-1" => each_to_its_queue,
    "DEV-5-2" => rest_before_code,
    "DEV-5-3" => no_empty_codes,
    "DEV-5-4" => in_ring_order,
    "DEV-5-5" => nothing_is_overwritten,
    "DEV-5-6" => |h| unarmed(h, false),
    "DEV-5-7" => |h| unarmed(h, true),
    "DEV-5-8" => armed,
    "DEV-5-9" => one_interrupt_for_an_arming,
    "DEV-5-10" => undefined_queue,
    "DEV-5-11" => read_index_is_taken,
    "DEV-5-12" => relative_read_index,
    "DEV-5-13" => read_index_is_left,
    "DEV-5-14" => arm_or_leave,
    "DEV-5-15" => what_is_there_raises,
    "DEV-5-16" => impossible_read_indices,
    "DEV-5-17" => doorbells_for_nobody,
    "DEV-5-18" => quiet,
    "DEV-5-19" => quiet_takes_nothing_back,
    "DEV-5-20" => quiet_without_the_feature,
    "DEV-5-21" => no_room_for_an_answer,
    "DEV-5-22" => kept_back,
    "DEV-5-23" => overflow_is_told,
    "DEV-5-24" => one_of_each_is_kept_back,
    "DEV-5-25" => kept_back_and_destroyed,
    "DEV-5-26" => |h| moderation(h, 0, 100, 1, true),
    "DEV-5-27" => moderation_by_time,
    "DEV-5-28" => |h| moderation(h, u16::MAX, 2, 2, true),
    "DEV-5-29" => |h| moderation(h, u16::MAX, 3, 2, false),
    "DEV-5-30" => what_events_say,
    "DEV-5-31" => link_changes,
    "DEV-5-32" => completion_before_event,
    "DEV-5-33" => event_after_flushes,
    "DEV-5-34" => error_of_the_queue_first,
}

fn each_to_its_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, pair.a.qpn)?;
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.no_event(eqn)?;
    }
    Ok(())
}

fn no_empty_codes(host: &mut Host) -> Outcome {
    host.start()?;
    // More than a round of the ring: one with a zero code would end the waiting for the next.
    for _ in 0..200 {
        host.nop()?;
    }
    Ok(())
}

fn in_ring_order(host: &mut Host) -> Outcome {
    host.start()?;
    let read = host.queues[&EQ_CONTROL].read;
    let mut cookies = Vec::new();
    for _ in 0..20 {
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
        cookies.push(entry.cookie);
    }
    host.ring_control()?;
    for (at, cookie) in cookies.into_iter().enumerate() {
        let slot = host.queues[&EQ_CONTROL].slot(read + at as u32);
        wait_for("an entry at the next index", || {
            Ok((host.memory.load32(slot) != 0).then_some(()))
        })?;
        let entry: EventEntry = host.memory.get(slot);
        ensure_eq!(entry.id, cookie, "the cookie at index {at}");
    }
    Ok(())
}

/// An event queue 1 of 16 entries, and as many queue pairs as are asked for, each of which can
/// raise `SendQueueDrained` there.
fn small_queue(host: &mut Host, count: u32) -> Outcome<Vec<u32>> {
    host.start_bare(u64::MAX)?;
    host.create_eq(EQ_FIRST_HANDLER, EQ_FIRST_HANDLER)?;
    let mut command = host.eq_command(EQ_ASYNC, 1 % host.device.own_messages());
    command.log_entries = EQ_MIN_LOG_ENTRIES;
    host.execute(&command)?;
    host.add_eq(&command);
    host.set_gid(0, crate::host::OWN_GID, VLAN_NONE)?;
    let cq = host.create_cq()?;
    let connection = host.to_neighbour();
    let mut queue_pairs = Vec::new();
    for _ in 0..count {
        let qp = host.create_qp(Service::Rc, &cq)?;
        host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
        queue_pairs.push(qp.qpn);
    }
    Ok(queue_pairs)
}

fn drain(host: &mut Host, queue_pairs: &[u32]) -> Outcome {
    for qpn in queue_pairs {
        host.move_qp(*qpn, QueuePairStateCode::Sqd)?;
    }
    Ok(())
}

/// The entries of a full event queue of 16.
const FULL: u32 = 1 << EQ_MIN_LOG_ENTRIES;

/// Waits until the ring of event queue 1 is full.
fn full(host: &mut Host) -> Outcome {
    let ring = host.queues[&EQ_ASYNC].clone();
    wait_for("a full ring", || {
        let all = (0..FULL).all(|index| host.memory.load32(ring.slot(index)) != 0);
        Ok(all.then_some(()))
    })
}

fn nothing_is_overwritten(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue(host, FULL + 2)?;
    drain(host, &queue_pairs)?;
    full(host)?;
    let ring = host.queues[&EQ_ASYNC].clone();
    for (index, qpn) in (0..FULL).zip(&queue_pairs) {
        let entry: EventEntry = host.memory.get(ring.slot(index));
        ensure_eq!(entry.id, *qpn, "the entry at index {index}");
    }
    // A slot that was consumed without a word is used.
    let mut ring = ring;
    ring.take(&host.memory);
    let zeroed = ring.slot(0);
    let other = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &other)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    host.move_qp(qp.qpn, QueuePairStateCode::Sqd)?;
    wait_for("an entry where there is room", || {
        Ok((host.memory.load32(zeroed) != 0).then_some(()))
    })
}

fn unarmed(host: &mut Host, once_armed: bool) -> Outcome {
    host.start()?;
    if once_armed {
        host.arm_eq(EQ_CONTROL)?;
        host.nop()?;
        host.interrupt(EQ_CONTROL)?;
    }
    host.interrupts(EQ_CONTROL);
    host.nop()?;
    host.no_interrupt(EQ_CONTROL)?;
    host.interrupts(EQ_ASYNC);
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, pair.a.qpn)?;
    host.no_interrupt(EQ_ASYNC)
}

fn armed(host: &mut Host) -> Outcome {
    host.start()?;
    for _ in 0..10 {
        host.arm_eq(EQ_CONTROL)?;
        host.nop()?;
        host.interrupt(EQ_CONTROL)?;
    }
    Ok(())
}

fn one_interrupt_for_an_arming(host: &mut Host) -> Outcome {
    host.start()?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    for _ in 0..5 {
        host.nop()?;
    }
    let mut count = 0;
    watch("a second interrupt", || {
        count += host.interrupts(EQ_CONTROL);
        Ok((count > 1).then_some(count))
    })?;
    ensure_eq!(count, 1, "interrupts");
    Ok(())
}

fn undefined_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let pair = Pair::new(host)?;
    host.destroy(CommandOpcode::DestroyEventQueue, EQ_ASYNC.into())?;
    let command = ModifyQueuePair {
        qpn: pair.a.qpn,
        mask: MODIFY_STATE,
        state: QueuePairStateCode::Sqd.number(),
        ..ModifyQueuePair::zeroed()
    };
    let entry = host.entry(CommandOpcode::ModifyQueuePair, &command);
    host.write_command(&entry);
    host.ring_control()?;
    host.is_fatal(FatalCode::UndefinedEventQueue)
}

/// Gives a `Nop` whose answer is not consumed.
fn unread_answer(host: &mut Host) -> Outcome {
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    let ring = host.queues[&EQ_CONTROL].clone();
    wait_for("an answer", || {
        // The last of those that are there.
        let mut last = None;
        let mut look = ring.clone();
        while let Some(event) = look.peek(&host.memory) {
            last = Some(event.id);
            look.read += 1;
        }
        Ok((last == Some(entry.cookie)).then_some(()))
    })
}

/// The doorbell of event queue 0.
fn bell(host: &mut Host, read_index: u32, valid: bool, relative: bool, arm: bool) -> Outcome {
    host.event_doorbell(EventDoorbell {
        eqn: EQ_CONTROL,
        read_index,
        relative,
        valid,
        arm,
        quiet: false,
    })
}

fn read_index_is_taken(host: &mut Host) -> Outcome {
    host.start()?;
    let read = host.queues[&EQ_CONTROL].read;
    unread_answer(host)?;
    unread_answer(host)?;
    host.interrupts(EQ_CONTROL);
    // All read: armed, and nothing is raised.
    bell(host, read + 2, true, false, true)?;
    host.no_interrupt(EQ_CONTROL)?;
    unread_answer(host)?;
    host.interrupt(EQ_CONTROL)
}

fn relative_read_index(host: &mut Host) -> Outcome {
    host.start()?;
    unread_answer(host)?;
    unread_answer(host)?;
    host.interrupts(EQ_CONTROL);
    bell(host, 1, true, true, true)?;
    host.interrupt(EQ_CONTROL)?;
    bell(host, 1, true, true, true)?;
    host.no_interrupt(EQ_CONTROL)
}

fn read_index_is_left(host: &mut Host) -> Outcome {
    host.start()?;
    let read = host.queues[&EQ_CONTROL].read;
    unread_answer(host)?;
    host.interrupts(EQ_CONTROL);
    bell(host, read + 1, false, false, false)?;
    // It was not taken: what is there raises.
    bell(host, 0, false, false, true)?;
    host.interrupt(EQ_CONTROL)
}

fn arm_or_leave(host: &mut Host) -> Outcome {
    host.start()?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    // Without `arm` it stays armed.
    let read = host.queues[&EQ_CONTROL].read;
    bell(host, read, true, false, false)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

fn what_is_there_raises(host: &mut Host) -> Outcome {
    host.start()?;
    unread_answer(host)?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    host.interrupt(EQ_CONTROL)
}

fn impossible_read_indices(host: &mut Host) -> Outcome {
    host.start()?;
    let read = host.queues[&EQ_CONTROL].read;
    unread_answer(host)?;
    for index in [read + 2, read.wrapping_sub(1), read + (1 << 31)] {
        host.interrupts(EQ_CONTROL);
        bell(host, index, true, false, true)?;
        // Not taken, so that what is there raises.
        host.interrupt(EQ_CONTROL)?;
    }
    Ok(())
}

fn doorbells_for_nobody(host: &mut Host) -> Outcome {
    host.start()?;
    for eqn in [9, host.caps.max_eq, u16::MAX] {
        host.event_doorbell(EventDoorbell {
            eqn,
            read_index: 0,
            relative: false,
            valid: true,
            arm: true,
            quiet: false,
        })?;
    }
    host.is_alive()
}

fn quiet_bell(host: &mut Host) -> Outcome {
    let read_index = host.queues[&EQ_CONTROL].read;
    host.event_doorbell(EventDoorbell {
        eqn: EQ_CONTROL,
        read_index,
        relative: false,
        valid: true,
        arm: true,
        quiet: true,
    })
}

fn quiet(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_QUIET_COMMANDS)?;
    // A completion queue of event queue 0 raises something else there.
    let mut command = host.cq_command(6);
    command.eqn = EQ_CONTROL;
    let (cq, mut qp) = with_queue_of(host, &command)?;
    host.interrupts(EQ_CONTROL);
    quiet_bell(host)?;
    host.nop()?;
    host.no_interrupt(EQ_CONTROL)?;
    host.arm_cq(&cq, 0, false)?;
    host.post(&mut qp, &Work::send(&[]))?;
    host.interrupt(EQ_CONTROL)
}

fn quiet_takes_nothing_back(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_QUIET_COMMANDS)?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    quiet_bell(host)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)?;
    quiet_bell(host)?;
    host.arm_eq(EQ_CONTROL)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

fn quiet_without_the_feature(host: &mut Host) -> Outcome {
    host.start_with(!FEATURE_QUIET_COMMANDS)?;
    host.interrupts(EQ_CONTROL);
    quiet_bell(host)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

fn no_room_for_an_answer(host: &mut Host) -> Outcome {
    let mut boot = host.boot()?;
    boot.block.eq0_log_entries = EQ_MIN_LOG_ENTRIES;
    host.enable(&boot)?;
    for _ in 0..=FULL {
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
    }
    host.ring_control()?;
    host.is_fatal(FatalCode::EventQueueOverflow)
}

fn kept_back(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue(host, FULL + 4)?;
    drain(host, &queue_pairs)?;
    full(host)?;
    for qpn in &queue_pairs {
        host.event(EQ_ASYNC, EventCode::SendQueueDrained, *qpn)?;
    }
    host.no_event(EQ_ASYNC)
}

fn overflow_is_told(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue(host, FULL + 4)?;
    drain(host, &queue_pairs)?;
    full(host)?;
    host.event(EQ_CONTROL, EventCode::EventQueueOverflow, EQ_ASYNC.into())?;
    host.no_event(EQ_CONTROL)
}

fn one_of_each_is_kept_back(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue(host, FULL + 1)?;
    drain(host, &queue_pairs)?;
    full(host)?;
    // The last one's event is kept back; it is raised once more.
    let last = queue_pairs[FULL as usize];
    let back = ModifyQueuePair {
        qpn: last,
        mask: MODIFY_STATE,
        state: QueuePairStateCode::Rts.number(),
        ..ModifyQueuePair::zeroed()
    };
    host.execute(&back)?;
    drain(host, &[last])?;
    for qpn in &queue_pairs {
        host.event(EQ_ASYNC, EventCode::SendQueueDrained, *qpn)?;
    }
    host.no_event(EQ_ASYNC)
}

fn kept_back_and_destroyed(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue(host, FULL + 2)?;
    drain(host, &queue_pairs)?;
    full(host)?;
    let (gone, stays) = (queue_pairs[FULL as usize], queue_pairs[FULL as usize + 1]);
    host.destroy(CommandOpcode::DestroyQueuePair, gone)?;
    for qpn in queue_pairs.iter().take(FULL as usize) {
        host.event(EQ_ASYNC, EventCode::SendQueueDrained, *qpn)?;
    }
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, stays)?;
    host.no_event(EQ_ASYNC)
}

fn moderate(host: &mut Host, microseconds: u16, count: u16) -> Outcome {
    let message = host.queues[&EQ_CONTROL].message;
    host.execute(&ModifyEventQueue {
        eqn: EQ_CONTROL,
        message,
        moderation_microseconds: microseconds,
        moderation_count: count,
        reserved: 0,
    })
}

/// With this moderation, so many entries raise the interrupt within far less than the time, or do
/// not.
fn moderation(
    host: &mut Host,
    microseconds: u16,
    count: u16,
    entries: u32,
    raised: bool,
) -> Outcome {
    host.start()?;
    moderate(host, microseconds, count)?;
    if !raised {
        moderated(host, entries)?;
        return host.no_interrupt(EQ_CONTROL);
    }
    at_once(|| {
        moderated(host, entries)?;
        host.interrupt(EQ_CONTROL)
    })
}

/// Arms event queue 0 and has so many entries written to it, which are not read.
fn moderated(host: &mut Host, entries: u32) -> Outcome {
    while host.take_event(EQ_CONTROL)?.is_some() {}
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    for _ in 0..entries {
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
    }
    host.ring_control()
}

fn moderation_by_time(host: &mut Host) -> Outcome {
    const MICROSECONDS: u16 = 40_000;
    host.start()?;
    moderate(host, MICROSECONDS, 100)?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    let start = Instant::now();
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    host.interrupt(EQ_CONTROL)?;
    let early = start.elapsed() < Duration::from_micros(u64::from(MICROSECONDS) / 2);
    ensure!(!early, "it was raised after {:?}", start.elapsed());
    Ok(())
}

fn what_events_say(host: &mut Host) -> Outcome {
    host.start()?;
    let entry = host.query_entry(CommandOpcode::QueryDevice, None, 256);
    host.write_command(&entry);
    host.ring_control()?;
    let answer = host.answer(entry.cookie)?;
    let found = (answer.param0, answer.param1, answer.reserved);
    ensure_eq!(found, (0, 256, 0), "CommandDone");
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 3, false)?;
    complete(host, &mut cq, &mut qp)?;
    let event = host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    let found = (event.param0, event.param1, event.reserved);
    ensure_eq!(found, (3, 0, 0), "Completion");
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    let event = host.event(EQ_ASYNC, EventCode::SendQueueDrained, pair.a.qpn)?;
    let found = (event.param0, event.param1, event.reserved);
    ensure_eq!(found, (0, 0, 0), "SendQueueDrained");
    Ok(())
}

fn link_changes(host: &mut Host) -> Outcome {
    host.start()?;
    host.wire()?.pull();
    let event = host.event(EQ_CONTROL, EventCode::LinkChange, 0)?;
    ensure_eq!(event.param0, 0, "the link");
    ensure!(
        !host.device.status()?.link_up(),
        "REG_STATUS says that the link is up"
    );
    host.wire()?.link()?;
    let event = host.event(EQ_CONTROL, EventCode::LinkChange, 0)?;
    ensure_eq!(event.param0, 1, "the link");
    ensure!(
        host.device.status()?.link_up(),
        "REG_STATUS says that the link is down"
    );
    host.no_event(EQ_CONTROL)
}

fn completion_before_event(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    for _ in 0..100 {
        host.arm_cq(&cq, 0, false)?;
        host.post(&mut qp, &Work::send(&[]))?;
        host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
        ensure!(
            cq.take(&host.memory).is_some(),
            "an event without its completion"
        );
    }
    Ok(())
}

fn event_after_flushes(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for _ in 0..10 {
        host.post_receive(&mut pair.b, &[])?;
    }
    host.post(&mut pair.a, &write8(0, 0xdead_be00))?;
    host.event(EQ_ASYNC, EventCode::QueuePairAccessError, pair.b.qpn)?;
    // All are there by now.
    let mut flushed = 0;
    while let Some(entry) = pair.cq.take(&host.memory) {
        flushed += u32::from(entry.qpn == pair.b.qpn);
    }
    ensure_eq!(
        flushed,
        10,
        "receives that were flushed when the event came"
    );
    ensure_eq!(
        host.state(pair.b.qpn)?,
        QueuePairStateCode::Error,
        "the state"
    );
    Ok(())
}

fn error_of_the_queue_first(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::with_entries(host, 1)?;
    for _ in 0..3 {
        host.post(&mut pair.a, &empty_write())?;
    }
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, pair.cq.cqn)?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, pair.a.qpn)?;
    Ok(())
}

fn rest_before_code(host: &mut Host) -> Outcome {
    host.start()?;
    // Looked at as fast as can be, from the moment on that there is a code.
    for round in 0..500 {
        let entry = host.query_entry(CommandOpcode::QueryDevice, None, 8);
        host.write_command(&entry);
        let ring = host.queues[&EQ_CONTROL].clone();
        let slot = ring.slot(ring.read);
        host.ring_control()?;
        let end = Instant::now() + Duration::from_secs(5);
        while host.memory.load64(slot) == 0 {
            ensure!(Instant::now() < end, "no answer");
            std::hint::spin_loop();
        }
        let first = host.memory.load64(slot);
        let found = (
            first as u32,
            (first >> 32) as u32,
            host.memory.load64(slot + 16),
        );
        let right = (EventCode::CommandDone.number(), entry.cookie, 256);
        ensure_eq!(found, right, "code, id and param1 of answer {round}");
        host.answer(entry.cookie)?;
    }
    Ok(())
}
