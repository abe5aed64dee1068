// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors and the fatal state.

use super::checks;
use super::fixture::*;
use crate::host::{Host, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE, SIZE};
use crate::outcome::{wait_for, Outcome};
use crate::packet::{rc, syndrome};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CompletionStatus::{
    Flushed, LocalProtection, LocalQueuePairOperation, RemoteAccess, Success,
};
use ferrite_abi::QueuePairStateCode::Error;
use ferrite_abi::*;

checks! {
    "DEV-11-1" => bad_doorbells,
    "DEV-11-2" => bad_packets,
    "DEV-11-3" => bad_commands,
    "DEV-11-4" => bad_work,
    "DEV-11-5" => bad_queue_pair,
    "DEV-11-6" => bad_completion_queue,
    "DEV-11-7" => bad_shared_receive_queue,
    "DEV-11-8" => full_event_queue,
    "DEV-11-9" => fatal_device,
    "DEV-11-10" => hostile_guest,
    "DEV-11-11" => others_are_not_affected,
    "DEV-11-12" => rings_gone,
    "DEV-11-13" => rings_of_a_queue_pair_gone,
    "DEV-11-14" => record_gone,
    "DEV-11-15" => memory_behind_a_tag_gone,
    "DEV-11-16" => last_entry,
    "DEV-11-17" => status_before_interrupt,
    "DEV-11-18" => interrupt_without_arming,
    "DEV-11-19" => nothing_in_fatal,
    "DEV-11-20" => frames_pass_in_fatal,
    "DEV-11-21" => out_of_fatal,
}

/// A send that fails its local checks.
fn nonsense() -> Work {
    Work::send(&[Sge {
        address: 0,
        length: 8,
        lkey: 0xdead_be00,
    }])
}

fn bad_doorbells(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for offset in (0..DOORBELL_PAGE_SIZE).step_by(8) {
        // Not those that mean something in page 1 for this word.
        host.device.doorbell(2, offset, u64::MAX)?;
    }
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.no_event(eqn)?;
    }
    pair.ends(host, &empty_write(), Success)
}

fn bad_packets(host: &mut Host) -> Outcome {
    host.start()?;
    let wired = Wired::new(host)?;
    let before = host.counter("rx_dropped")?;
    let mut packet = wired.neighbour.packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    packet.from = crate::host::OWN_GID;
    host.wire()?.send(&packet.encode())?;
    wait_for("the packet to be counted", || {
        Ok((host.counter("rx_dropped")? > before).then_some(()))
    })?;
    ensure_eq!(
        host.state(wired.qp.qpn)?,
        QueuePairStateCode::Rts,
        "the state"
    );
    host.no_event(EQ_ASYNC)
}

fn bad_commands(host: &mut Host) -> Outcome {
    host.start()?;
    for opcode in [0, 30, 39, 44, 127, 130, u16::MAX] {
        let mut entry = host.bare_entry(CommandOpcode::Nop);
        entry.opcode = opcode;
        host.submit_for(&entry, CommandStatus::BadOpcode)?;
    }
    host.is_alive()
}

fn bad_work(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    pair.ends(host, &nonsense(), LocalProtection)?;
    host.comes_to(pair.a.qpn, Error)?;
    host.no_event(EQ_ASYNC)
}

fn bad_queue_pair(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    host.post_receive(&mut pair.a, &[])?;
    pair.a.send_producer = 1000;
    host.tell_send(&pair.a)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), Flushed)?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, pair.a.qpn)?;
    host.comes_to(pair.a.qpn, Error)
}

fn bad_completion_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::with_entries(host, 0)?;
    for _ in 0..2 {
        host.post(&mut pair.a, &empty_write())?;
    }
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, pair.cq.cqn)?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, pair.a.qpn)?;
    host.comes_to(pair.a.qpn, Error)?;
    ensure!(
        pair.cq.take(&host.memory).is_some(),
        "the entry that was there"
    );
    host.no_completion(&mut pair.cq)
}

fn bad_shared_receive_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let mut cq = host.create_cq()?;
    let (qp, srq) = shared(host, &cq)?;
    host.memory.store32(srq.record, 1000);
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    host.event(EQ_ASYNC, EventCode::SrqError, srq.srqn)?;
    host.comes_to(qp.qpn, Error)?;
    host.no_completion(&mut cq)
}

fn full_event_queue(host: &mut Host) -> Outcome {
    host.start_bare(u64::MAX)?;
    host.create_eq(EQ_FIRST_HANDLER, 2)?;
    let mut command = host.eq_command(EQ_ASYNC, 1 % host.device.own_messages());
    command.log_entries = EQ_MIN_LOG_ENTRIES;
    host.execute(&command)?;
    host.add_eq(&command);
    host.set_gid(0, crate::host::OWN_GID, VLAN_NONE)?;
    for _ in 0..17 {
        let pair = Pair::new(host)?;
        host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    }
    host.event(EQ_CONTROL, EventCode::EventQueueOverflow, EQ_ASYNC.into())?;
    host.is_alive()
}

/// A device that was brought to the fatal state.
fn fatal(host: &mut Host) -> Outcome {
    host.start()?;
    host.interrupts(EQ_CONTROL);
    host.device.doorbell(0, DOORBELL_CONTROL, 5000)?;
    host.is_fatal(FatalCode::BadCommandIndex)
}

/// Its code in `DeviceFatal`.
fn fatal_event(host: &mut Host) -> Outcome {
    let ring = host.queues[&EQ_CONTROL].clone();
    let event = wait_for("DeviceFatal", || Ok(ring.peek(&host.memory)))?;
    let found = (EventCode::from_number(event.code), event.id, event.param0);
    let code = u64::from(FatalCode::BadCommandIndex.number());
    ensure_eq!(found, (Some(EventCode::DeviceFatal), 0, code), "the event");
    Ok(())
}

fn fatal_device(host: &mut Host) -> Outcome {
    fatal(host)?;
    fatal_event(host)
}

fn hostile_guest(host: &mut Host) -> Outcome {
    host.start()?;
    // Commands, work requests, doorbells and packets of arbitrary bytes; the same every time.
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..300 {
        let mut entry = host.bare_entry(CommandOpcode::Nop);
        let cookie = entry.cookie;
        for word in entry.as_bytes_mut().chunks_mut(8) {
            if next() % 3 != 0 {
                let value = next() >> (next() % 64);
                word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
            }
        }
        (entry.opcode, entry.cookie) = ((next() % 44) as u16, cookie);
        let answer = host.submit(&entry)?.0;
        ensure!(
            answer != CommandStatus::Ok || entry.opcode != 0,
            "an opcode that is none"
        );
    }
    for _ in 0..300 {
        let offset = (next() % 512) as usize * 8;
        if offset != DOORBELL_CONTROL {
            host.device
                .doorbell((next() % 4) as u32, offset, next() >> (next() % 64))?;
        }
    }
    for _ in 0..20 {
        let mut pair = Pair::new(host)?;
        let mut work = empty_write();
        for byte in &mut work.part {
            *byte = next() as u8;
        }
        work.header.opcode = (next() % 15) as u8;
        work.header.flags = (next() % 16) as u16;
        pair.post(host, &work.flags(SEND_SIGNALED))?;
    }
    let wired = Wired::new(host)?;
    for _ in 0..100 {
        let body = (0..next() % 200).map(|_| next() as u8).collect();
        let opcode = next() as u8;
        wired.send(host, opcode, RECEIVE_PSN, body)?;
    }
    host.nop()?;
    let state = host.device.status()?.state();
    ensure_eq!(state, Some(DeviceState::Running), "the state");
    Ok(())
}

fn others_are_not_affected(host: &mut Host) -> Outcome {
    host.start()?;
    let mut good = Pair::new(host)?;
    for round in 0..3 {
        let mut bad = Pair::new(host)?;
        match round {
            0 => bad.ends(host, &nonsense(), LocalProtection)?,
            1 => bad.ends(host, &write8(NOWHERE, 0xdead_be00), RemoteAccess)?,
            _ => {
                bad.a.send_producer = 1000;
                host.tell_send(&bad.a)?;
                host.comes_to(bad.a.qpn, Error)?;
            }
        }
        good.ends(host, &empty_write(), Success)?;
        ensure_eq!(
            host.state(good.b.qpn)?,
            QueuePairStateCode::Rts,
            "another's state"
        );
    }
    Ok(())
}

fn rings_gone(host: &mut Host) -> Outcome {
    let base = 0x1000_0000;
    for of_events in [false, true] {
        host.device.control_reset()?;
        let map = host.map(base, 16 * PAGE)?;
        let mut boot = host.boot()?;
        let ring = if of_events {
            &mut boot.block.eq0_ring
        } else {
            &mut boot.block.cqp_ring
        };
        *ring = base;
        let status = host.enable(&boot)?;
        ensure_eq!(status.state(), Some(DeviceState::Running), "the state");
        host.unmap(map)?;
        if of_events {
            let entry = host.bare_entry(CommandOpcode::Nop);
            host.write_command(&entry);
        }
        host.device.doorbell(0, DOORBELL_CONTROL, 1)?;
        host.is_fatal(FatalCode::HostMemory)?;
    }
    Ok(())
}

/// A queue pair of which one page, with `offset` in its buffer, is not there.
fn without_page(host: &mut Host, gone: u64) -> Outcome<Wired> {
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    let table = host.memory.allocate(PAGE);
    let pages = host.memory.allocate(3 * PAGE);
    for page in 0..3 {
        let address = if page == gone {
            NOWHERE
        } else {
            pages + page * PAGE
        };
        host.memory.store64(table + 8 * page, address);
    }
    (command.buffer.root, command.buffer.order) = (table, 1);
    command.buffer.length = 3 * PAGE;
    (command.sq_offset, command.rq_offset) = (0, PAGE as u32);
    command.record_offset = 2 * PAGE as u32;
    let mut qp = host.make_qp(&command)?;
    (qp.send_ring, qp.receive_ring, qp.record) = (pages, pages + PAGE, pages + 2 * PAGE);
    let connection = host.to_neighbour();
    host.wire()?;
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let neighbour = host.neighbour(&qp);
    Ok(Wired { cq, qp, neighbour })
}

fn rings_of_a_queue_pair_gone(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = without_page(host, 0)?;
    host.post(&mut wired.qp, &empty_write())?;
    wired.completes(host, 0, LocalQueuePairOperation)?;
    let mut wired = without_page(host, 1)?;
    host.post_receive(&mut wired.qp, &[])?;
    let answer = wired.ask(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?;
    is_answer(&answer, syndrome::NAK_REMOTE_OPERATION)?;
    wired.completes(host, 0, LocalQueuePairOperation)?;
    Ok(())
}

fn record_gone(host: &mut Host) -> Outcome {
    host.start()?;
    let base = 0x1000_0000;
    let map = host.map(base, PAGE)?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    let table = host.memory.allocate(PAGE);
    let rings = host.memory.allocate(2 * PAGE);
    for (page, address) in [(0, rings), (1, rings + PAGE), (2, base)] {
        host.memory.store64(table + 8 * page, address);
    }
    (command.buffer.root, command.buffer.order) = (table, 1);
    command.buffer.length = 3 * PAGE;
    (command.rq_offset, command.record_offset) = (PAGE as u32, 2 * PAGE as u32);
    host.execute(&command)?;
    let qp = crate::rings::Qp::new(&command);
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    host.unmap(map)?;
    host.device
        .doorbell(qp.page, DOORBELL_SEND, send_doorbell(qp.qpn, 1))?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, qp.qpn)?;
    host.comes_to(qp.qpn, Error)
}

fn memory_behind_a_tag_gone(host: &mut Host) -> Outcome {
    host.start()?;
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    let mut command = host.region_command(access, PAGE);
    let table = host.memory.allocate(PAGE);
    host.memory.store64(table, NOWHERE);
    (command.buffer.root, command.buffer.order) = (table, 1);
    host.execute(&command)?;
    let region = crate::host::region_of(&command);
    send_ends(host, region.sge(0, 8), LocalProtection)?;
    let mut pair = Pair::new(host)?;
    pair.ends(host, &write8(region.address, region.tag), RemoteAccess)?;
    host.event(EQ_ASYNC, EventCode::QueuePairAccessError, pair.b.qpn)?;
    Ok(())
}

fn last_entry(host: &mut Host) -> Outcome {
    fatal(host)?;
    fatal_event(host)?;
    let ring = host.queues[&EQ_CONTROL].clone();
    let next = ring.slot(ring.read + 1);
    ensure_eq!(host.memory.load32(next), 0, "the entry behind it");
    Ok(())
}

fn status_before_interrupt(host: &mut Host) -> Outcome {
    for _ in 0..20 {
        host.device.control_reset()?;
        host.start()?;
        host.interrupts(EQ_CONTROL);
        host.device.doorbell(0, DOORBELL_CONTROL, 5000)?;
        host.interrupt(EQ_CONTROL)?;
        let status = host.device.status()?;
        let found = (status.state(), status.fatal());
        let right = (Some(DeviceState::Fatal), Some(FatalCode::BadCommandIndex));
        ensure_eq!(found, right, "the status when the interrupt came");
    }
    Ok(())
}

fn interrupt_without_arming(host: &mut Host) -> Outcome {
    fatal(host)?;
    host.interrupt(EQ_CONTROL)
}

fn nothing_in_fatal(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    host.post_receive(&mut wired.qp, &[])?;
    host.device.doorbell(0, DOORBELL_CONTROL, 5000)?;
    host.is_fatal(FatalCode::BadCommandIndex)?;
    host.interrupt(EQ_CONTROL)?;
    host.wire()?.drain()?;
    let base = host.memory.base();
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    host.arm_eq(EQ_CONTROL)?;
    host.post(&mut wired.qp, &empty_write())?;
    wired.send(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?;
    host.untouched(base, SIZE)?;
    host.wire()?.silence()?;
    host.no_interrupt(EQ_CONTROL)
}

/// A frame that is nothing to the device.
fn ordinary(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    let mut frame = [to.as_slice(), &from, &[0x08, 0x06]].concat();
    frame.resize(80, 0x42);
    frame
}

fn frames_pass_in_fatal(host: &mut Host) -> Outcome {
    fatal(host)?;
    let mac = host.mac;
    let frame = ordinary(mac, crate::host::PEER_MAC);
    host.wire()?.send(&frame)?;
    let found = host.interface()?.receive("the frame at the interface")?;
    ensure!(found == frame, "the frame was changed");
    let frame = ordinary(crate::host::PEER_MAC, mac);
    host.interface()?.send(&frame)?;
    let found = host.wire()?.link()?.receive("the frame on the wire")?;
    ensure!(found == frame, "the frame was changed");
    Ok(())
}

fn out_of_fatal(host: &mut Host) -> Outcome {
    fatal(host)?;
    // What would be another reason does not replace the first.
    host.device.set_register64(REG_BOOT, NOWHERE)?;
    host.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
    host.device.doorbell(0, DOORBELL_CONTROL, 0)?;
    host.is_fatal(FatalCode::BadCommandIndex)?;
    host.device.control_reset()?;
    host.start()?;
    host.is_alive()
}
