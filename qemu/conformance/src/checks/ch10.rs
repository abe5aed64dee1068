// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Doorbells and doorbell records.

use super::checks;
use super::fixture::*;
use crate::host::{Host, USER_PAGE};
use crate::outcome::{wait_for, Outcome};
use crate::packet::syndrome;
use crate::rings::Qp;
use crate::{ensure, ensure_eq};
use ferrite_abi::CompletionStatus::Success;
use ferrite_abi::*;
use std::mem::offset_of;

checks! {
    "DEV-10-1" => other_sizes_and_offsets,
    "DEV-10-2" => numbers_that_do_not_exist,
    "DEV-10-3" => another_page,
    "DEV-10-4" => kernels_doorbells_elsewhere,
    "DEV-10-5" => bits_without_meaning,
    "DEV-10-6" => push,
    "DEV-10-7" => many_doorbells,
    "DEV-10-8" => doorbell_of_a_destroyed_object,
    "DEV-10-9" => hosts_half,
    "DEV-10-10" => nothing_is_left_behind,
    "DEV-10-11" => woken,
    "DEV-10-12" => hint,
    "DEV-10-13" => looks_by_itself,
    "DEV-10-14" => receive_wake,
}

/// Posts a work request of which the device is not told; returns the right doorbell.
fn untold(host: &mut Host, qp: &mut Qp) -> u64 {
    qp.write_send(&host.memory, &empty_write().encode());
    let producer = offset_of!(QueuePairRecord, send_producer) as u64;
    host.memory.store32(qp.record + producer, qp.send_producer);
    send_doorbell(qp.qpn, qp.send_producer)
}

/// Writes to BAR 2, none of which is taken for the doorbell of a work request that is posted.
fn not_taken(host: &mut Host, writes: impl Fn(&Host, u64) -> Vec<(u64, Vec<u8>)>) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let word = untold(host, &mut pair.a);
    for (offset, bytes) in writes(host, word) {
        host.device.write(BAR_DOORBELLS, offset, &bytes)?;
    }
    host.no_completion(&mut pair.cq)?;
    host.device.doorbell(pair.a.page, DOORBELL_SEND, word)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), Success)?;
    Ok(())
}

fn other_sizes_and_offsets(host: &mut Host) -> Outcome {
    not_taken(host, |host, word| {
        let at = host.device.doorbell_offset(USER_PAGE, DOORBELL_SEND);
        let bytes = word.to_le_bytes();
        vec![
            (at, bytes[..4].to_vec()),
            (at, bytes[..2].to_vec()),
            (at, bytes[..1].to_vec()),
            (at + 0x20, bytes.to_vec()),
            (at + 4, bytes.to_vec()),
        ]
    })
}

fn numbers_that_do_not_exist(host: &mut Host) -> Outcome {
    host.start()?;
    for number in [0, host.caps.qp_first + 999, 0xff_ffff] {
        for offset in [DOORBELL_SEND, DOORBELL_RECEIVE, DOORBELL_SRQ] {
            host.device
                .doorbell(USER_PAGE, offset, queue_doorbell(number))?;
        }
        let word = CompletionDoorbell {
            cqn: number,
            seen: 0,
            sequence: 0,
            solicited: false,
        };
        host.device
            .doorbell(USER_PAGE, DOORBELL_COMPLETION, word.encode())?;
    }
    host.is_alive()
}

fn another_page(host: &mut Host) -> Outcome {
    not_taken(host, |host, word| {
        [0, USER_PAGE + 1]
            .map(|page| (host.device.doorbell_offset(page, DOORBELL_SEND), word))
            .map(|(at, word)| (at, word.to_le_bytes().to_vec()))
            .to_vec()
    })?;
    // Nor is a completion queue armed from another.
    let (mut cq, mut qp) = with_queue(host)?;
    let mut elsewhere = cq.clone();
    elsewhere.page = USER_PAGE + 1;
    host.arm_cq(&elsewhere, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    host.no_event(EQ_FIRST_HANDLER)
}

fn kernels_doorbells_elsewhere(host: &mut Host) -> Outcome {
    host.start()?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    let producer = host.commands.into();
    host.device
        .doorbell(USER_PAGE, DOORBELL_CONTROL, producer)?;
    let arm = EventDoorbell {
        eqn: EQ_CONTROL,
        read_index: 0,
        relative: true,
        valid: true,
        arm: true,
        quiet: false,
        disarm: false,
    };
    host.device
        .doorbell(USER_PAGE, DOORBELL_EVENT_QUEUE, arm.encode())?;
    host.no_event(EQ_CONTROL)?;
    host.interrupts(EQ_CONTROL);
    host.ring_control()?;
    host.answer(entry.cookie)?;
    host.no_interrupt(EQ_CONTROL)
}

fn bits_without_meaning(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let word = untold(host, &mut pair.a) | (0xff << 24);
    host.device.doorbell(pair.a.page, DOORBELL_SEND, word)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), Success)?;
    // Of an arming, and of the control queue.
    let (mut cq, mut qp) = with_queue(host)?;
    let arm = CompletionDoorbell {
        cqn: cq.cqn,
        seen: 0,
        sequence: 1,
        solicited: false,
    };
    let word = arm.encode() | (0x1f << 59);
    host.device.doorbell(cq.page, DOORBELL_COMPLETION, word)?;
    complete(host, &mut cq, &mut qp)?;
    host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.store_commands();
    let word = u64::from(host.commands) | (0xabcd << 48);
    host.device.doorbell(0, DOORBELL_CONTROL, word)?;
    host.answer(entry.cookie)?;
    Ok(())
}

fn push(host: &mut Host) -> Outcome {
    not_taken(host, |host, word| {
        (DOORBELL_PUSH..DOORBELL_PUSH_END)
            .step_by(8)
            .map(|offset| host.device.doorbell_offset(USER_PAGE, offset))
            .map(|at| (at, word.to_le_bytes().to_vec()))
            .collect()
    })
}

fn many_doorbells(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for _ in 0..1000 {
        host.device
            .doorbell(pair.a.page, DOORBELL_SEND, send_doorbell(pair.a.qpn, 0))?;
    }
    pair.ends(host, &empty_write(), Success)?;
    host.is_alive()
}

fn doorbell_of_a_destroyed_object(host: &mut Host) -> Outcome {
    host.start()?;
    let pair = Pair::new(host)?;
    host.destroy(CommandOpcode::DestroyQueuePair, pair.a.qpn)?;
    let word = send_doorbell(pair.a.qpn, 1);
    host.device.doorbell(pair.a.page, DOORBELL_SEND, word)?;
    host.device.doorbell(pair.a.page, DOORBELL_RECEIVE, word)?;
    host.no_event(EQ_ASYNC)?;
    host.is_alive()
}

fn hosts_half(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for round in 0..20 {
        host.post_receive(&mut pair.b, &[])?;
        pair.ends(host, &empty_write(), Success)?;
        let record: QueuePairRecord = host.memory.get(pair.a.record);
        let found = (record.send_producer, record.receive_producer);
        ensure_eq!(found, (round + 1, 0), "the host's half");
        ensure!(
            record.reserved_is_zero(),
            "reserved fields of the record: {record:x?}"
        );
    }
    host.move_qp(pair.b.qpn, QueuePairStateCode::Error)?;
    let record: QueuePairRecord = host.memory.get(pair.b.record);
    ensure_eq!(record.receive_producer, 20, "the host's half");
    ensure!(
        record.reserved_is_zero(),
        "reserved fields of the record: {record:x?}"
    );
    Ok(())
}

fn nothing_is_left_behind(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    // Posting by the protocol alone, at every distance from the device's going to sleep.
    for round in 0..500u32 {
        let index = host.post(&mut pair.a, &empty_write())?;
        if round % 7 != 0 {
            host.completes(&mut pair.cq, (pair.a.qpn, index), Success)?;
        } else {
            let next = host.post(&mut pair.a, &empty_write())?;
            for index in [index, next] {
                host.completes(&mut pair.cq, (pair.a.qpn, index), Success)?;
            }
        }
    }
    Ok(())
}

fn woken(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for _ in 0..20 {
        let wake = pair.a.record + offset_of!(QueuePairRecord, send_wake) as u64;
        wait_for("the device to be asleep", || {
            Ok((host.memory.load32(wake) != 0).then_some(()))
        })?;
        pair.ends(host, &empty_write(), Success)?;
    }
    Ok(())
}

fn hint(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    untold(host, &mut pair.a);
    // Behind, then far ahead of the record.
    host.device
        .doorbell(pair.a.page, DOORBELL_SEND, send_doorbell(pair.a.qpn, 0))?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), Success)?;
    untold(host, &mut pair.a);
    host.device
        .doorbell(pair.a.page, DOORBELL_SEND, send_doorbell(pair.a.qpn, 500))?;
    host.completes(&mut pair.cq, (pair.a.qpn, 1), Success)?;
    host.no_event(EQ_ASYNC)
}

fn looks_by_itself(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let wake = wired.qp.record + offset_of!(QueuePairRecord, send_wake) as u64;
    for _ in 0..50 {
        let request = wired.request(host, &empty_write())?;
        let awake = host.memory.load32(wake) == 0;
        if awake {
            // No doorbell is rung for what is posted while the word is zero.
            untold(host, &mut wired.qp);
            if host.memory.load32(wake) == 0 {
                let next = host.wire()?.packet()?;
                wired.acknowledge(host, next.psn, syndrome::ACK)?;
                wired.completes(host, wired.qp.send_producer - 2, Success)?;
                wired.completes(host, wired.qp.send_producer - 1, Success)?;
                continue;
            }
            host.tell_send(&wired.qp)?;
            let next = host.wire()?.packet()?;
            wired.acknowledge(host, next.psn, syndrome::ACK)?;
            wired.completes(host, wired.qp.send_producer - 2, Success)?;
        } else {
            wired.acknowledge(host, request.psn, syndrome::ACK)?;
        }
        wired.completes(host, wired.qp.send_producer - 1, Success)?;
    }
    Ok(())
}

fn receive_wake(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let wake = pair.b.record + offset_of!(QueuePairRecord, receive_wake) as u64;
    ensure_eq!(host.memory.load32(wake), 0, "the word in Rts");
    host.move_qp(pair.b.qpn, QueuePairStateCode::Error)?;
    wait_for("the word in Error", || {
        Ok((host.memory.load32(wake) == 1).then_some(()))
    })?;
    let index = host.post_receive(&mut pair.b, &[])?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), CompletionStatus::Flushed)?;
    Ok(())
}
