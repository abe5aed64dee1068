// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event queues.

use super::checks;
use super::fixture::*;
use crate::host::{Host, CONTROL_LOG_ENTRIES, EVENT_LOG_ENTRIES};
use crate::outcome::{not_here, wait_for, watch, Outcome, PATIENCE};
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
    "DEV-5-35" => the_map_is_followed,
    "DEV-5-36" => column_of_processor_0,
    "DEV-5-37" => answers_stay,
    "DEV-5-38" => message_of_the_map,
    "DEV-5-39" => message_of_the_oldest,
    "DEV-5-40" => overflow_of_the_queue_itself,
    "DEV-5-41" => disarm,
    "DEV-5-42" => arm_and_disarm,
    "DEV-5-43" => disarm_without_the_feature,
    "DEV-5-44" => overflow_stops,
    "DEV-5-45" => overflow_undefines,
    "DEV-5-46" => after_an_overflow,
    "DEV-5-47" => switched_in_one_step,
    "DEV-5-48" => a_switch_leaves_the_state,
    "DEV-5-49" => the_old_ring_is_left,
    "DEV-5-50" => kept_back_and_switched,
    "DEV-5-51" => unread_in_the_old_ring,
    "DEV-5-52" => room_in_the_new_ring,
    "DEV-5-57" => room_for_answers,
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
    small_queue_with(host, count, 0, EventOverflow::Hold)
}

/// The same, where a feature is needed, or another choice for the overflow.
fn small_queue_with(
    host: &mut Host,
    count: u32,
    feature: u64,
    overflow: EventOverflow,
) -> Outcome<Vec<u32>> {
    if host.device.register64(REG_FEATURES)? & feature != feature {
        return not_here(format!("the device does not offer feature {feature:#x}"));
    }
    host.start_bare(u64::MAX)?;
    host.create_eq(EQ_FIRST_HANDLER, EQ_FIRST_HANDLER)?;
    let mut command = host.eq_command(EQ_ASYNC, 1 % host.device.own_messages());
    command.log_entries = EQ_MIN_LOG_ENTRIES;
    command.overflow = overflow.number();
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
        disarm: false,
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
            disarm: false,
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
        disarm: false,
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

/// More events for queue 0 than leave room for the answers to as many commands as the ring takes.
fn room_for_answers(host: &mut Host) -> Outcome {
    host.start()?;
    let mut queues = Vec::new();
    for _ in 0..(1 << CONTROL_LOG_ENTRIES) + 8 {
        let mut command = host.cq_command(6);
        command.eqn = EQ_CONTROL;
        queues.push(with_queue_of(host, &command)?);
    }
    for (cq, qp) in &mut queues {
        host.arm_cq(cq, 0, false)?;
        complete(host, cq, qp)?;
    }
    let mut cookies = Vec::new();
    for _ in 1..1 << CONTROL_LOG_ENTRIES {
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
        cookies.push(entry.cookie);
    }
    host.ring_control()?;
    // All of them, before the host reads anything.
    let ring = host.queues[&EQ_CONTROL].clone();
    let last = ring.read + (1 << EVENT_LOG_ENTRIES) - 2;
    wait_for("the answers to all commands", || {
        let code = host.memory.load32(ring.slot(last));
        Ok((code != 0).then_some(()))
    })?;
    for cookie in cookies {
        host.answer(cookie)?;
    }
    for (cq, _) in &queues {
        host.event(EQ_CONTROL, EventCode::Completion, cq.cqn)?;
    }
    host.no_event(EQ_CONTROL)
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
        overflow: 0,
        priority: 0,
        reserved: [0; 6],
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
        let end = Instant::now() + PATIENCE;
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

/// A row of the vector map with one entry, that of processor 0.
fn map(host: &mut Host, row: SubFunction, eqn: u16, message: u16) -> Outcome {
    host.execute(&map_command(row, 0, &[(eqn, message)]))
}

fn the_map_is_followed(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    host.create_eq(3, 3)?;
    let mut command = host.eq_command(4, 0);
    command.log_entries = EQ_MIN_LOG_ENTRIES;
    host.execute(&command)?;
    host.add_eq(&command);
    // Its own row, then the one of all, then neither.
    map(host, SubFunction::Any, 4, MESSAGE_OF_QUEUE)?;
    map(host, SubFunction::Async, 3, MESSAGE_OF_QUEUE)?;
    for eqn in [3, 4, EQ_ASYNC] {
        let pair = Pair::new(host)?;
        host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
        host.event(eqn, EventCode::SendQueueDrained, pair.a.qpn)?;
        let row = if eqn == 3 {
            SubFunction::Async
        } else {
            SubFunction::Any
        };
        map(host, row, EQ_NONE, MESSAGE_OF_QUEUE)?;
    }
    for eqn in [3, 4, EQ_ASYNC] {
        host.no_event(eqn)?;
    }
    Ok(())
}

fn column_of_processor_0(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    host.create_eq(3, 3)?;
    let other = (3, MESSAGE_OF_QUEUE);
    host.execute(&map_command(SubFunction::Async, 1, &[other, other]))?;
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, pair.a.qpn)?;
    host.no_event(3)
}

fn answers_stay(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    host.create_eq(3, 3)?;
    for row in [SubFunction::Any, SubFunction::Global] {
        map(host, row, 3, MESSAGE_OF_QUEUE)?;
    }
    host.nop()?;
    host.no_event(3)?;
    // Nor does the last word of the device go by it.
    while host.take_event(EQ_CONTROL)?.is_some() {}
    let ring = host.queues[&EQ_CONTROL].clone();
    host.device.doorbell(0, DOORBELL_CONTROL, 5000)?;
    host.is_fatal(FatalCode::BadCommandIndex)?;
    let event = wait_for("DeviceFatal", || Ok(ring.peek(&host.memory)))?;
    ensure_eq!(event.code, EventCode::DeviceFatal.number(), "the event");
    ensure!(
        host.queues[&3].peek(&host.memory).is_none(),
        "an event on queue 3"
    );
    Ok(())
}

/// The message of the map's entry is raised when the event is written.
fn message_of_the_map(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    if host.device.own_messages() < 5 {
        return not_here("the device has too few messages");
    }
    host.create_eq(3, 3)?;
    map(host, SubFunction::Async, 3, 4)?;
    let pair = Pair::new(host)?;
    host.arm_eq(3)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    let ring = host.queues[&3].clone();
    wait_for("the event", || Ok(ring.peek(&host.memory)))?;
    wait_for("message 4", || {
        Ok((host.device.interrupts(4) > 0).then_some(()))
    })?;
    host.no_interrupt(3)
}

/// Of two events by different messages that are there when the queue is armed, that of the first is
/// raised, and then that of the other.
fn message_of_the_oldest(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    if host.device.own_messages() < 6 {
        return not_here("the device has too few messages");
    }
    host.create_eq(3, 3)?;
    for (index, message) in [4, 5].into_iter().enumerate() {
        map(host, SubFunction::Async, 3, message)?;
        let pair = Pair::new(host)?;
        host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
        let mut ring = host.queues[&3].clone();
        ring.read += index as u32;
        wait_for("the event", || Ok(ring.peek(&host.memory)))?;
    }
    for (message, other) in [(4, 5), (5, 4)] {
        host.arm_eq(3)?;
        wait_for(&format!("message {message}"), || {
            Ok((host.device.interrupts(message) > 0).then_some(()))
        })?;
        watch(&format!("message {other}"), || {
            Ok((host.device.interrupts(other) > 0).then_some(()))
        })?;
        host.take_event(3)?;
    }
    host.no_interrupt(3)
}

fn overflow_of_the_queue_itself(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue_with(host, FULL + 1, FEATURE_VECTOR_MAP, EventOverflow::Hold)?;
    map(host, SubFunction::Global, EQ_ASYNC, MESSAGE_OF_QUEUE)?;
    drain(host, &queue_pairs)?;
    host.event(EQ_CONTROL, EventCode::EventQueueOverflow, EQ_ASYNC.into())?;
    // Where the row names another, it goes there.
    host.device.control_reset()?;
    let queue_pairs = small_queue_with(host, FULL + 1, FEATURE_VECTOR_MAP, EventOverflow::Hold)?;
    map(
        host,
        SubFunction::Global,
        EQ_FIRST_HANDLER,
        MESSAGE_OF_QUEUE,
    )?;
    drain(host, &queue_pairs)?;
    host.event(
        EQ_FIRST_HANDLER,
        EventCode::EventQueueOverflow,
        EQ_ASYNC.into(),
    )?;
    host.no_event(EQ_CONTROL)
}

/// A doorbell of event queue 0 with `disarm`.
fn disarm_bell(host: &mut Host, arm: bool) -> Outcome {
    let read_index = host.queues[&EQ_CONTROL].read;
    host.event_doorbell(EventDoorbell {
        eqn: EQ_CONTROL,
        read_index,
        relative: false,
        valid: true,
        arm,
        quiet: false,
        disarm: true,
    })
}

fn disarm(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_EQ_CONTROL)?;
    host.arm_eq(EQ_CONTROL)?;
    disarm_bell(host, false)?;
    host.interrupts(EQ_CONTROL);
    unread_answer(host)?;
    host.no_interrupt(EQ_CONTROL)?;
    // What came is there, and raises when it is armed again.
    host.arm_eq(EQ_CONTROL)?;
    host.interrupt(EQ_CONTROL)?;
    // One that is held back is not raised either.
    moderate(host, u16::MAX, 100)?;
    moderated(host, 1)?;
    let ring = host.queues[&EQ_CONTROL].clone();
    wait_for("the answer", || Ok(ring.peek(&host.memory)))?;
    disarm_bell(host, false)?;
    watch_for(host, Duration::from_micros(u16::MAX.into()))
}

/// No interrupt of event queue 0 comes for so long and longer.
fn watch_for(host: &mut Host, time: Duration) -> Outcome {
    let end = Instant::now() + time;
    while Instant::now() < end {
        host.no_interrupt(EQ_CONTROL)?;
    }
    host.no_interrupt(EQ_CONTROL)
}

fn arm_and_disarm(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_EQ_CONTROL)?;
    host.interrupts(EQ_CONTROL);
    disarm_bell(host, true)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

fn disarm_without_the_feature(host: &mut Host) -> Outcome {
    host.start_with(!FEATURE_EQ_CONTROL)?;
    host.interrupts(EQ_CONTROL);
    host.arm_eq(EQ_CONTROL)?;
    disarm_bell(host, false)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

/// Fills event queue 1, and has one more event raised there.
fn overflow(host: &mut Host, overflow: EventOverflow) -> Outcome<Vec<u32>> {
    let queue_pairs = small_queue_with(host, FULL + 2, FEATURE_EQ_CONTROL, overflow)?;
    drain(host, &queue_pairs[..FULL as usize])?;
    full(host)?;
    drain_unanswered(host, queue_pairs[FULL as usize])?;
    Ok(queue_pairs)
}

/// Has a queue pair raise an event; the command may not be answered.
fn drain_unanswered(host: &mut Host, qpn: u32) -> Outcome {
    let command = ModifyQueuePair {
        qpn,
        mask: MODIFY_STATE,
        state: QueuePairStateCode::Sqd.number(),
        ..ModifyQueuePair::zeroed()
    };
    let entry = host.entry(CommandOpcode::ModifyQueuePair, &command);
    host.write_command(&entry);
    host.ring_control()
}

fn overflow_stops(host: &mut Host) -> Outcome {
    overflow(host, EventOverflow::Stop)?;
    host.is_fatal(FatalCode::EventQueueOverflow)
}

/// Event queue 1 has become undefined.
fn undefined_by_overflow(host: &mut Host) -> Outcome<Vec<u32>> {
    let queue_pairs = overflow(host, EventOverflow::Undefine)?;
    wait_for("EventQueueOverflow", || {
        let event = host.look_for_event(EQ_CONTROL)?;
        let code = EventCode::EventQueueOverflow.number();
        Ok(event.filter(|event| event.code == code && event.id == u32::from(EQ_ASYNC)))
    })?;
    Ok(queue_pairs)
}

fn overflow_undefines(host: &mut Host) -> Outcome {
    undefined_by_overflow(host)?;
    // Neither its ring nor its interrupt is heard of any more.
    host.interrupts(EQ_ASYNC);
    let ring = host.queues[&EQ_ASYNC].clone();
    host.arm_eq(EQ_ASYNC)?;
    host.no_interrupt(EQ_ASYNC)?;
    let mut taken = ring.clone();
    while taken.take(&host.memory).is_some() {}
    ensure_eq!(taken.read, FULL, "entries");
    host.tell_read(EQ_ASYNC, FULL)?;
    watch("an event that was lost", || Ok(taken.peek(&host.memory)))?;
    // It is told once; what else there is are answers.
    watch("another report", || {
        let event = host.look_for_event(EQ_CONTROL)?;
        let code = EventCode::EventQueueOverflow.number();
        Ok(event.filter(|event| event.code == code))
    })?;
    host.is_alive()
}

fn after_an_overflow(host: &mut Host) -> Outcome {
    let queue_pairs = undefined_by_overflow(host)?;
    let create = host.eq_command(EQ_ASYNC, 0);
    host.refuse(&create, CommandStatus::Exists)?;
    let modify = ModifyEventQueue {
        eqn: EQ_ASYNC,
        ..ModifyEventQueue::zeroed()
    };
    host.refuse(&modify, CommandStatus::NotFound)?;
    host.destroy(CommandOpcode::DestroyEventQueue, EQ_ASYNC.into())?;
    host.execute(&create)?;
    host.add_eq(&create);
    let last = queue_pairs[FULL as usize + 1];
    drain(host, &[last])?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, last)?;
    // And once more, this time without a new queue.
    host.device.control_reset()?;
    let queue_pairs = undefined_by_overflow(host)?;
    drain_unanswered(host, queue_pairs[FULL as usize + 1])?;
    host.is_fatal(FatalCode::UndefinedEventQueue)
}

/// The queue pairs whose events are in a ring, from an index on.
fn found(host: &Host, ring: &crate::rings::EventRing, index: u32) -> Vec<u32> {
    let mut look = ring.clone();
    look.read = index;
    let mut found = Vec::new();
    while let Some(event) = look.peek(&host.memory) {
        found.push(event.id);
        look.read += 1;
        if found.len() == 1 << look.log_entries {
            break;
        }
    }
    found
}

fn switched_in_one_step(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue_with(host, 12, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    drain(host, &queue_pairs[..7])?;
    let old = host.queues[&EQ_ASYNC].clone();
    let new = switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES + 1)?;
    drain(host, &queue_pairs[7..])?;
    wait_for("the last entry in the new ring", || {
        Ok((host.memory.load32(new.slot(11)) != 0).then_some(()))
    })?;
    ensure_eq!(found(host, &old, 0), queue_pairs[..7], "the old ring");
    ensure_eq!(found(host, &new, 7), queue_pairs[7..], "the new ring");
    let before: Vec<u32> = (0..7).map(|i| host.memory.load32(new.slot(i))).collect();
    ensure_eq!(before, [0; 7], "the slots before");
    Ok(())
}

fn a_switch_leaves_the_state(host: &mut Host) -> Outcome {
    let queue_pairs = small_queue_with(host, 4, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    // Unarmed stays unarmed, with its read index.
    drain(host, &queue_pairs[..1])?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, queue_pairs[0])?;
    host.interrupts(EQ_ASYNC);
    let new = switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES)?;
    host.queues.insert(EQ_ASYNC, new);
    drain(host, &queue_pairs[1..2])?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, queue_pairs[1])?;
    host.no_interrupt(EQ_ASYNC)?;
    // Armed stays armed.
    host.arm_eq(EQ_ASYNC)?;
    let new = switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES)?;
    host.queues.insert(EQ_ASYNC, new);
    host.no_interrupt(EQ_ASYNC)?;
    drain(host, &queue_pairs[2..3])?;
    host.interrupt(EQ_ASYNC)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, queue_pairs[2])?;
    Ok(())
}

fn the_old_ring_is_left(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SWITCH_EQ)?;
    while host.take_event(EQ_CONTROL)?.is_some() {}
    let old = host.queues[&EQ_CONTROL].clone();
    let command = switch_command(host, EQ_CONTROL, old.log_entries + 1);
    let entry = host.entry(CommandOpcode::SwitchEventQueue, &command);
    host.write_command(&entry);
    let mut new = old.clone();
    (new.ring, new.log_entries) = (command.ring.root, command.log_entries);
    host.queues.insert(EQ_CONTROL, new);
    host.ring_control()?;
    // The answer is in the new ring, at its index.
    let answer = host.answer(entry.cookie)?;
    ensure_eq!(answer.param0, 0, "the status");
    let length = 32 << old.log_entries;
    let written = host.memory.bytes(old.ring, length);
    ensure!(old.peek(&host.memory).is_none(), "an entry in the old ring");
    for _ in 0..200 {
        host.nop()?;
    }
    ensure_eq!(host.memory.bytes(old.ring, length), written, "the old ring");
    Ok(())
}

fn kept_back_and_switched(host: &mut Host) -> Outcome {
    let count = FULL + 5;
    let queue_pairs = small_queue_with(host, count, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    let (first, last) = queue_pairs.split_at(FULL as usize + 4);
    drain(host, first)?;
    full(host)?;
    let new = switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES + 1)?;
    // They are there when the command is done.
    ensure_eq!(
        found(host, &new, FULL),
        queue_pairs[FULL as usize..FULL as usize + 4],
        "the new ring"
    );
    drain(host, last)?;
    wait_for("the event after them", || {
        Ok((host.memory.load32(new.slot(FULL + 4)) != 0).then_some(()))
    })?;
    ensure_eq!(
        found(host, &new, FULL),
        queue_pairs[FULL as usize..],
        "the new ring"
    );
    Ok(())
}

/// How long an armed queue takes to interrupt when a switch writes as many entries as its moderation
/// waits for.
fn raised_by_a_switch(host: &mut Host) -> Outcome<Duration> {
    let queue_pairs = small_queue_with(host, FULL + 2, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    let message = host.queues[&EQ_ASYNC].message;
    host.execute(&ModifyEventQueue {
        eqn: EQ_ASYNC,
        message,
        moderation_microseconds: u16::MAX,
        moderation_count: FULL as u16 + 2,
        ..ModifyEventQueue::zeroed()
    })?;
    drain(host, &queue_pairs)?;
    full(host)?;
    host.interrupts(EQ_ASYNC);
    let start = Instant::now();
    host.arm_eq(EQ_ASYNC)?;
    switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES + 1)?;
    host.interrupt(EQ_ASYNC)?;
    Ok(start.elapsed())
}

fn unread_in_the_old_ring(host: &mut Host) -> Outcome {
    // Armed, and held back until there are as many as the switch makes them.
    let most = Duration::from_micros(u16::MAX.into()) / 2;
    let mut fastest = Duration::MAX;
    for _ in 0..20 {
        fastest = fastest.min(raised_by_a_switch(host)?);
        host.device.control_reset()?;
        if fastest < most {
            break;
        }
    }
    ensure!(fastest < most, "it was held back for {fastest:?}");
    // Unarmed: not before it is armed.
    let queue_pairs = small_queue_with(host, 3, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    drain(host, &queue_pairs)?;
    let old = host.queues[&EQ_ASYNC].clone();
    wait_for("the entries", || {
        Ok((found(host, &old, 0).len() == 3).then_some(()))
    })?;
    host.interrupts(EQ_ASYNC);
    switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES)?;
    host.no_interrupt(EQ_ASYNC)?;
    host.arm_eq(EQ_ASYNC)?;
    host.interrupt(EQ_ASYNC)
}

fn room_in_the_new_ring(host: &mut Host) -> Outcome {
    let count = 2 * FULL;
    let queue_pairs = small_queue_with(host, count, FEATURE_SWITCH_EQ, EventOverflow::Hold)?;
    let (first, last) = queue_pairs.split_at(FULL as usize);
    drain(host, first)?;
    full(host)?;
    let old = host.queues[&EQ_ASYNC].clone();
    let new = switch(host, EQ_ASYNC, EQ_MIN_LOG_ENTRIES)?;
    drain(host, last)?;
    wait_for("a full new ring", || {
        Ok((found(host, &new, FULL).len() == FULL as usize).then_some(()))
    })?;
    ensure_eq!(found(host, &old, 0), first, "the old ring");
    ensure_eq!(found(host, &new, FULL), last, "the new ring");
    Ok(())
}
