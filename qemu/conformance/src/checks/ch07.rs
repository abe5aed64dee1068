// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queue pairs.

use super::checks;
use super::fixture::*;
use crate::host::{Host, PEER_GID6, RECEIVE_PSN, SEND_PSN};
use crate::memory::PAGE;
use crate::outcome::{wait_for, Outcome};
use crate::packet::{aeth, rc, reth, syndrome, EXTENDED};
use crate::rings::{Cq, Qp, Srq};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{BadNumber, BadParameter, BadState, NotFound, Ok as Done};
use ferrite_abi::CompletionStatus::{Flushed, LocalProtection, Success};
use ferrite_abi::QueuePairStateCode::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use ferrite_abi::*;
use std::mem::offset_of;

checks! {
    "DEV-7-1" => impossible_producers,
    "DEV-7-2" => |h| quiet_state(h, Reset),
    "DEV-7-3" => |h| quiet_state(h, Init),
    "DEV-7-4" => receives_in_rtr,
    "DEV-7-5" => both_ways_in_rts,
    "DEV-7-6" => drained_state,
    "DEV-7-7" => send_queue_error_state,
    "DEV-7-8" => error_state,
    "DEV-7-9" => found_at_rts,
    "DEV-7-10" => |h| modifies(h, Init, BadParameter, |c| c.mask |= 1 << 31),
    "DEV-7-11" => |h| modifies(h, Init, BadState, |c| {
        c.mask |= MODIFY_CURRENT_STATE;
        c.current_state = Rts.number();
    }),
    "DEV-7-12" => |h| {
        for state in [7, 8, 255] {
            modifies(h, Init, BadParameter, |c| c.state = state)?;
        }
        modifies(h, Init, BadParameter, |c| {
            c.mask |= MODIFY_CURRENT_STATE;
            c.current_state = 7;
        })
    },
    "DEV-7-13" => to_reset,
    "DEV-7-14" => to_error,
    "DEV-7-15" => no_such_transition,
    "DEV-7-16" => missing_attributes,
    "DEV-7-17" => forbidden_attributes,
    "DEV-7-18" => without_a_state,
    "DEV-7-19" => refused_and_unchanged,
    "DEV-7-20" => bare_transitions,
    "DEV-7-21" => |h| table(h, Service::Rc),
    "DEV-7-22" => |h| table(h, Service::Uc),
    "DEV-7-23" => |h| table(h, Service::Ud),
    "DEV-7-24" => |h| {
        let most = { h.start()?; h.caps.max_log_mtu };
        for log_mtu in [7, most + 1, 255] {
            modifies(h, Rtr, BadParameter, |c| c.log_mtu = log_mtu)?;
        }
        Ok(())
    },
    "DEV-7-25" => |h| {
        modifies(h, Rtr, BadParameter, |c| c.min_rnr_timer = 32)?;
        modifies(h, Rts, BadParameter, |c| c.timeout = 32)
    },
    "DEV-7-26" => |h| {
        modifies(h, Rts, BadParameter, |c| c.retry_count = 8)?;
        modifies(h, Rts, BadParameter, |c| c.rnr_retry = 8)
    },
    "DEV-7-27" => |h| {
        let most = { h.start()?; h.caps.max_ord };
        modifies(h, Rts, BadParameter, |c| c.ord = most + 1)
    },
    "DEV-7-28" => |h| {
        let most = { h.start()?; h.caps.max_ird };
        modifies(h, Rtr, BadParameter, |c| c.ird = most + 1)
    },
    "DEV-7-29" => |h| modifies(h, Init, BadParameter, |c| c.pkey_index = 1),
    "DEV-7-30" => |h| {
        modifies(h, Rts, BadParameter, |c| c.send_psn = 1 << 24)?;
        modifies(h, Rtr, BadParameter, |c| c.receive_psn = 1 << 24)?;
        modifies(h, Rtr, BadParameter, |c| c.destination_qpn = 1 << 24)
    },
    "DEV-7-31" => |h| modifies(h, Init, BadParameter, |c| c.access = 1 << 8),
    "DEV-7-32" => |h| {
        let end = { h.start()?; h.caps.max_gid };
        modifies(h, Rtr, BadNumber, |c| c.address_vector.source_gid_index = end)
    },
    "DEV-7-33" => |h| modifies(h, Rtr, NotFound, |c| c.address_vector.source_gid_index = 9),
    "DEV-7-34" => |h| {
        modifies(h, Rtr, BadParameter, |c| c.address_vector.gid = PEER_GID6)?;
        modifies(h, Rtr, BadParameter, |c| c.address_vector.source_gid_index = 1)
    },
    "DEV-7-35" => |h| modifies(h, Rtr, BadNumber, |c| c.address_vector.port = 200),
    "DEV-7-36" => |h| modifies(h, Rtr, BadParameter, |c| {
        (c.address_vector.gid, c.address_vector.source_gid_index) = (PEER_GID6, 1);
        c.address_vector.flow_label = 1 << 20;
    }),
    "DEV-7-37" => forgotten,
    "DEV-7-38" => message_forgotten,
    "DEV-7-39" => |h| taken_entry(h, Reset),
    "DEV-7-40" => record_after_reset,
    "DEV-7-41" => to_rts,
    "DEV-7-42" => begun_work_is_finished,
    "DEV-7-43" => drained_once,
    "DEV-7-44" => while_draining,
    "DEV-7-45" => failed_registration_drains,
    "DEV-7-46" => after_a_failed_registration,
    "DEV-7-47" => served_all_along,
    "DEV-7-48" => failed_first,
    "DEV-7-49" => sends_are_flushed,
    "DEV-7-50" => receives_are_flushed,
    "DEV-7-51" => wake_words_in_error,
    "DEV-7-52" => posted_in_error,
    "DEV-7-53" => |h| taken_entry(h, Error),
    "DEV-7-54" => last_wqe_reached,
    "DEV-7-55" => no_event_by_command,
    "DEV-7-56" => owed_drain,
    "DEV-7-57" => sends_are_flushed,
    "DEV-7-58" => no_packets_in_error,
    "DEV-7-59" => send_queue_error_and_back,
    "DEV-7-60" => order_of_completions,
    "DEV-7-61" => fence,
    "DEV-7-62" => reads_in_flight,
    "DEV-7-63" => executed_in_order,
    "DEV-7-64" => named_shared_receive_queue,
    "DEV-7-65" => extended_receive,
    "DEV-7-66" => wrong_shared_receive_queue,
    "DEV-7-67" => |h| extended_without(h, Service::XrcIni),
    "DEV-7-68" => |h| extended_without(h, Service::XrcTgt),
    "DEV-7-69" => registers_and_sends_and_fails,
}

/// Offset of `send_producer`.
const SEND_PRODUCER: u64 = offset_of!(QueuePairRecord, send_producer) as u64;

fn impossible_producers(host: &mut Host) -> Outcome {
    host.start()?;
    for back in [false, true] {
        let mut pair = Pair::new(host)?;
        for _ in 0..2 {
            pair.ends(host, &empty_write(), Success)?;
        }
        pair.a.send_producer = if back { 1 } else { 2 + 65 };
        host.tell_send(&pair.a)?;
        host.event(EQ_ASYNC, EventCode::QueuePairFatal, pair.a.qpn)?;
        host.comes_to(pair.a.qpn, Error)?;
    }
    Ok(())
}

/// A queue pair in a state up to `Rts`, connected to the neighbour.
fn in_state(host: &mut Host, service: Service, state: QueuePairStateCode) -> Outcome<(Cq, Qp)> {
    let cq = host.create_cq()?;
    let qp = host.create_qp(service, &cq)?;
    let connection = host.to_neighbour();
    if state != Reset {
        host.bring(service, &qp, state, &connection)?;
    }
    Ok((cq, qp))
}

fn quiet_state(host: &mut Host, state: QueuePairStateCode) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = in_state(host, Service::Rc, state)?;
    host.post_receive(&mut qp, &[])?;
    host.post(&mut qp, &empty_write())?;
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    host.wire()?.silence()?;
    host.no_completion(&mut cq)
}

fn receives_in_rtr(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = in_state(host, Service::Rc, Rtr)?;
    host.post_receive(&mut qp, &[])?;
    host.post(&mut qp, &empty_write())?;
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    is_answer(&host.wire()?.packet()?, syndrome::ACK)?;
    host.completes(&mut cq, (qp.qpn, 0), Success)?;
    host.event(EQ_ASYNC, EventCode::CommunicationEstablished, qp.qpn)?;
    // The send queue is not looked at.
    host.wire()?.silence()
}

fn both_ways_in_rts(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &empty_write())?;
    ensure_eq!(request.opcode, rc::WRITE_ONLY, "the request");
    host.post_receive(&mut wired.qp, &[])?;
    is_answer(
        &wired.ask(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?,
        syndrome::ACK,
    )
}

fn drained_state(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    host.move_qp(wired.qp.qpn, Sqd)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, wired.qp.qpn)?;
    host.post(&mut wired.qp, &empty_write())?;
    host.wire()?.silence()?;
    host.post_receive(&mut wired.qp, &[])?;
    is_answer(
        &wired.ask(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?,
        syndrome::ACK,
    )
}

/// A work request that fails at once.
fn bad_work() -> Work {
    Work::send(&[Sge {
        address: 0,
        length: 8,
        lkey: 0xdead_be00,
    }])
}

/// An unreliable connection in `Sqe`.
fn in_sqe(host: &mut Host) -> Outcome<Pair> {
    host.start_needing(FEATURE_UC)?;
    let mut pair = Pair::by(host, Service::Uc, |_, _| (), |_| ())?;
    pair.ends(host, &bad_work(), LocalProtection)?;
    host.comes_to(pair.a.qpn, Sqe)?;
    Ok(pair)
}

fn send_queue_error_state(host: &mut Host) -> Outcome {
    let mut pair = in_sqe(host)?;
    pair.ends(host, &Work::send(&[]), Flushed)?;
    // Receives go on.
    host.post_receive(&mut pair.a, &[])?;
    host.post(&mut pair.b, &Work::send(&[]).flags(0))?;
    let entry = host.completion(&mut pair.cq)?;
    ensure_eq!((entry.qpn, entry.status), (pair.a.qpn, 0), "the receive");
    Ok(())
}

fn error_state(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    host.move_qp(wired.qp.qpn, Error)?;
    host.post(&mut wired.qp, &empty_write())?;
    wired.completes(host, 0, Flushed)?;
    host.post_receive(&mut wired.qp, &[])?;
    wired.completes(host, 0, Flushed)?;
    wired.send(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?;
    host.wire()?.silence()
}

fn found_at_rts(host: &mut Host) -> Outcome {
    host.start()?;
    let (_, mut qp) = in_state(host, Service::Rc, Init)?;
    qp.write_send(&host.memory, &empty_write().encode());
    host.memory
        .store32(qp.record + SEND_PRODUCER, qp.send_producer);
    let connection = host.to_neighbour();
    for state in [Rtr, Rts] {
        host.execute(&Host::modify(Service::Rc, qp.qpn, state, &connection))?;
    }
    host.wire()?.packet()?;
    Ok(())
}

/// A right command to a state from the one before, that was spoiled; the right one is taken.
fn modifies(
    host: &mut Host,
    to: QueuePairStateCode,
    status: CommandStatus,
    spoil: impl FnOnce(&mut ModifyQueuePair),
) -> Outcome {
    if host.device.status()?.state() != Some(DeviceState::Running) || host.queues.len() < 3 {
        host.start()?;
    }
    let from = match to {
        Init => Reset,
        Rtr => Init,
        _ => Rtr,
    };
    let (_, qp) = in_state(host, Service::Rc, from)?;
    let connection = host.to_neighbour();
    let right = Host::modify(Service::Rc, qp.qpn, to, &connection);
    let mut bad = right;
    spoil(&mut bad);
    host.refuse(&bad, status)?;
    host.execute(&right)
}

fn to_reset(host: &mut Host) -> Outcome {
    host.start()?;
    for state in [Reset, Init, Rtr, Rts, Sqd, Error] {
        let (_, qp) = in_state(host, Service::Rc, state.min(Rts))?;
        if state > Rts {
            host.move_qp(qp.qpn, state)?;
        }
        host.move_qp(qp.qpn, Reset)?;
        ensure_eq!(host.state(qp.qpn)?, Reset, "the state");
    }
    Ok(())
}

fn to_error(host: &mut Host) -> Outcome {
    host.start()?;
    for state in [Init, Rtr, Rts, Sqd, Error] {
        let (_, qp) = in_state(host, Service::Rc, state.min(Rts))?;
        if state > Rts {
            host.move_qp(qp.qpn, state)?;
        }
        host.move_qp(qp.qpn, Error)?;
        ensure_eq!(host.state(qp.qpn)?, Error, "the state");
    }
    let (_, qp) = in_state(host, Service::Rc, Reset)?;
    refuse_move(host, qp.qpn, Error, BadState)
}

fn refuse_move(
    host: &mut Host,
    qpn: u32,
    to: QueuePairStateCode,
    status: CommandStatus,
) -> Outcome {
    let command = ModifyQueuePair {
        qpn,
        mask: MODIFY_STATE,
        state: to.number(),
        ..ModifyQueuePair::zeroed()
    };
    host.refuse(&command, status)
}

fn no_such_transition(host: &mut Host) -> Outcome {
    host.start()?;
    let transitions = [
        (Reset, Rtr),
        (Reset, Rts),
        (Init, Rts),
        (Init, Sqd),
        (Rtr, Init),
        (Rtr, Sqd),
        (Rts, Rtr),
        (Rts, Sqe),
    ];
    for (from, to) in transitions {
        let (_, qp) = in_state(host, Service::Rc, from)?;
        let connection = host.to_neighbour();
        let command = Host::modify(Service::Rc, qp.qpn, to, &connection);
        host.refuse(&command, BadState)?;
    }
    let (_, qp) = in_state(host, Service::Rc, Rts)?;
    host.move_qp(qp.qpn, Error)?;
    let connection = host.to_neighbour();
    host.refuse(
        &Host::modify(Service::Rc, qp.qpn, Rts, &connection),
        BadState,
    )
}

/// The bits of a mask.
fn bits(mask: u32) -> impl Iterator<Item = u32> {
    (0..32)
        .map(|bit| 1 << bit)
        .filter(move |bit| mask & bit != 0)
}

fn missing_attributes(host: &mut Host) -> Outcome {
    host.start()?;
    let connection = host.to_neighbour();
    for (from, to) in [(Reset, Init), (Init, Rtr), (Rtr, Rts)] {
        let (_, qp) = in_state(host, Service::Rc, from)?;
        let right = Host::modify(Service::Rc, qp.qpn, to, &connection);
        for bit in bits(right.mask & !MODIFY_STATE) {
            let command = ModifyQueuePair {
                mask: right.mask & !bit,
                ..right
            };
            host.refuse(&command, BadParameter)?;
        }
        host.execute(&right)?;
    }
    Ok(())
}

fn forbidden_attributes(host: &mut Host) -> Outcome {
    host.start()?;
    let connection = host.to_neighbour();
    let all = (1 << 16) - 1;
    let allowed = [
        (Reset, Init, MODIFY_PKEY | MODIFY_ACCESS),
        (Init, Rtr, MODIFY_PKEY | MODIFY_ACCESS),
        (Rtr, Rts, MODIFY_ACCESS | MODIFY_MIN_RNR_TIMER),
    ];
    for (from, to, optional) in allowed {
        let (_, qp) = in_state(host, Service::Rc, from)?;
        let right = Host::modify(Service::Rc, qp.qpn, to, &connection);
        let free = right.mask | optional | MODIFY_STATE | MODIFY_CURRENT_STATE;
        for bit in bits(all & !free) {
            let command = ModifyQueuePair {
                mask: right.mask | bit,
                ..complete_attributes(&right, &connection)
            };
            host.refuse(&command, BadParameter)?;
        }
    }
    Ok(())
}

/// A command with right values in every field, whether they count or not.
fn complete_attributes(
    command: &ModifyQueuePair,
    connection: &crate::host::Connection,
) -> ModifyQueuePair {
    ModifyQueuePair {
        address_vector: connection.address_vector,
        log_mtu: connection.log_mtu,
        destination_qpn: connection.qpn,
        ..*command
    }
}

fn without_a_state(host: &mut Host) -> Outcome {
    host.start()?;
    let (_, qp) = in_state(host, Service::Rc, Rts)?;
    let mut command = ModifyQueuePair {
        qpn: qp.qpn,
        mask: MODIFY_MIN_RNR_TIMER,
        min_rnr_timer: 9,
        ..ModifyQueuePair::zeroed()
    };
    host.execute(&command)?;
    let state: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    let found = (state.attributes.state, state.attributes.min_rnr_timer);
    ensure_eq!(found, (Rts.number(), 9), "state and attribute");
    // What RTS->RTS does not allow is not allowed so either.
    (command.mask, command.log_mtu) = (MODIFY_MTU, 10);
    host.refuse(&command, BadParameter)
}

fn refused_and_unchanged(host: &mut Host) -> Outcome {
    host.start()?;
    let (_, qp) = in_state(host, Service::Rc, Rtr)?;
    let before: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    let connection = host.to_neighbour();
    let mut bad = Host::modify(Service::Rc, qp.qpn, Rts, &connection);
    (bad.mask, bad.access, bad.ord) = (bad.mask | MODIFY_ACCESS, 0, 255);
    host.refuse(&bad, BadParameter)?;
    let after: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    ensure!(
        before == after,
        "a refused command changed {before:x?} to {after:x?}"
    );
    Ok(())
}

fn bare_transitions(host: &mut Host) -> Outcome {
    host.start()?;
    for to in [Reset, Error, Sqd] {
        let (_, qp) = in_state(host, Service::Rc, Rts)?;
        let mut command = ModifyQueuePair {
            qpn: qp.qpn,
            mask: MODIFY_STATE | MODIFY_MIN_RNR_TIMER,
            state: to.number(),
            min_rnr_timer: 3,
            ..ModifyQueuePair::zeroed()
        };
        host.refuse(&command, BadParameter)?;
        command.mask = MODIFY_STATE | MODIFY_CURRENT_STATE;
        command.current_state = Rts.number();
        host.execute(&command)?;
    }
    Ok(())
}

/// The rows of the tables: attributes, and for each transition whether they are required or allowed.
fn rows(service: Service) -> Vec<(u32, &'static str)> {
    // RESET->INIT, INIT->INIT, INIT->RTR, RTR->RTS, RTS->RTS, SQD->SQD, SQD->RTS.
    let connected = [
        (MODIFY_PKEY, "Roo  o "),
        (MODIFY_ACCESS, "Roooooo"),
        (MODIFY_ADDRESS_VECTOR, "  R  o "),
        (MODIFY_MTU, "  R    "),
        (MODIFY_DESTINATION, "  R    "),
        (MODIFY_RECEIVE_PSN, "  R    "),
        (MODIFY_SEND_PSN, "   R   "),
        (MODIFY_QKEY, "       "),
    ];
    let reliable = [
        (MODIFY_IRD, "  R  o "),
        (MODIFY_MIN_RNR_TIMER, "  Roooo"),
        (MODIFY_TIMEOUT, "   R o "),
        (MODIFY_RETRY, "   R o "),
        (MODIFY_RNR_RETRY, "   R o "),
        (MODIFY_ORD, "   R o "),
    ];
    let datagrams = [
        (MODIFY_PKEY, "Roo  o "),
        (MODIFY_QKEY, "Roooooo"),
        (MODIFY_SEND_PSN, "   R   "),
    ];
    let none = |mask: u32| (mask, "       ");
    match service {
        Service::Rc => [connected.as_slice(), &reliable].concat(),
        Service::Uc => {
            let without = reliable.map(|(mask, _)| none(mask));
            [connected.as_slice(), &without].concat()
        }
        _ => {
            let without = [MODIFY_ACCESS, MODIFY_ADDRESS_VECTOR, MODIFY_MTU, MODIFY_ORD].map(none);
            [datagrams.as_slice(), &without].concat()
        }
    }
}

fn table(host: &mut Host, service: Service) -> Outcome {
    host.start_needing(match service {
        Service::Uc => FEATURE_UC,
        Service::Ud => FEATURE_UD,
        _ => 0,
    })?;
    let connection = host.to_neighbour();
    let transitions = [
        (Reset, Init),
        (Init, Init),
        (Init, Rtr),
        (Rtr, Rts),
        (Rts, Rts),
        (Sqd, Sqd),
        (Sqd, Rts),
    ];
    let rows = rows(service);
    for (column, (from, to)) in transitions.into_iter().enumerate() {
        let is = |row: &str, what: u8| row.as_bytes()[column] == what;
        let required = rows.iter().filter(|(_, row)| is(row, b'R'));
        let required = required.fold(MODIFY_STATE, |mask, (bit, _)| mask | bit);
        let fill = |qpn, mask| ModifyQueuePair {
            qpn,
            mask,
            state: to.number(),
            log_mtu: 10,
            timeout: 14,
            retry_count: 3,
            rnr_retry: 3,
            min_rnr_timer: 3,
            ord: 1,
            ird: 1,
            access: ACCESS_REMOTE_WRITE,
            destination_qpn: 5,
            send_psn: 6,
            receive_psn: 7,
            qkey: 8,
            address_vector: connection.address_vector,
            ..ModifyQueuePair::zeroed()
        };
        for (bit, row) in &rows {
            let (_, qp) = in_state(host, service, from.min(Rts))?;
            if from == Sqd {
                host.move_qp(qp.qpn, Sqd)?;
                host.event(EQ_ASYNC, EventCode::SendQueueDrained, qp.qpn)?;
            }
            if is(row, b'R') {
                let without = fill(qp.qpn, required & !bit);
                host.refuse(&without, BadParameter)?;
            }
            let status = if is(row, b' ') { BadParameter } else { Done };
            let entry = host.entry(Op::ModifyQueuePair, &fill(qp.qpn, required | bit));
            let found = host.submit(&entry)?.0;
            ensure_eq!(found, status, "{from:?}->{to:?} with attribute {bit:#x}");
            host.destroy(Op::DestroyQueuePair, qp.qpn)?;
        }
    }
    Ok(())
}

fn forgotten(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    host.post_receive(&mut wired.qp, &[])?;
    wired.request(host, &empty_write())?;
    host.move_qp(wired.qp.qpn, Reset)?;
    host.no_completion(&mut wired.cq)?;
    // Both queues are empty, index 0 next.
    (wired.qp.send_producer, wired.qp.receive_producer) = (0, 0);
    host.memory.store64(wired.qp.record, 0);
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &wired.qp, Rts, &connection)?;
    host.wire()?.drain()?;
    let request = wired.request(host, &empty_write())?;
    ensure_eq!(request.psn, SEND_PSN, "the first PSN");
    wired.acknowledge(host, request.psn, syndrome::ACK)?;
    wired.completes(host, 0, Success)?;
    host.post_receive(&mut wired.qp, &[])?;
    wired.send(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?;
    wired.completes(host, 0, Success)?;
    Ok(())
}

fn message_forgotten(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut wired.qp, &[region.sge(0, PAGE as u32)])?;
    wired.ask(host, rc::SEND_FIRST, RECEIVE_PSN, vec![1; 1024])?;
    host.move_qp(wired.qp.qpn, Reset)?;
    wired.send(host, rc::SEND_LAST, RECEIVE_PSN + 1, vec![1; 8])?;
    host.no_completion(&mut wired.cq)
}

fn taken_entry(host: &mut Host, to: QueuePairStateCode) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let mut cq = host.create_cq()?;
    let (qp, mut srq) = shared(host, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    srq.post(&host.memory, 5, &[region.sge(0, PAGE as u32)]);
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_FIRST, RECEIVE_PSN, vec![1; 1024]);
    host.wire()?.send(&packet.encode())?;
    host.wire()?.packet()?;
    host.move_qp(qp.qpn, to)?;
    host.completes(&mut cq, (qp.qpn, 5), Flushed)?;
    Ok(())
}

fn wake_words(host: &Host, qp: &Qp) -> (u32, u32) {
    let record: QueuePairRecord = host.memory.get(qp.record);
    (record.send_wake, record.receive_wake)
}

fn record_after_reset(host: &mut Host) -> Outcome {
    host.start()?;
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, Error)?;
    host.move_qp(pair.a.qpn, Reset)?;
    ensure_eq!(wake_words(host, &pair.a), (1, 0), "the wake words");
    Ok(())
}

fn to_rts(host: &mut Host) -> Outcome {
    found_at_rts(host)?;
    let pair = Pair::new(host)?;
    ensure_eq!(
        wake_words(host, &pair.a),
        (1, 0),
        "the wake words with nothing posted"
    );
    Ok(())
}

fn begun_work_is_finished(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &empty_write())?;
    host.move_qp(wired.qp.qpn, Sqd)?;
    host.post(&mut wired.qp, &empty_write())?;
    host.no_event(EQ_ASYNC)?;
    wired.acknowledge(host, request.psn, syndrome::ACK)?;
    wired.completes(host, 0, Success)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, wired.qp.qpn)?;
    // The other waits for SQD->RTS.
    host.wire()?.silence()?;
    host.move_qp(wired.qp.qpn, Rts)?;
    host.wire()?.packet()?;
    Ok(())
}

fn drained_once(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &empty_write())?;
    host.move_qp(wired.qp.qpn, Sqd)?;
    let state: QueuePairState = host.query(Op::QueryQueuePair, Some(wired.qp.qpn))?;
    ensure_eq!(state.draining, 1, "draining");
    wired.acknowledge(host, request.psn, syndrome::ACK)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, wired.qp.qpn)?;
    let state: QueuePairState = host.query(Op::QueryQueuePair, Some(wired.qp.qpn))?;
    ensure_eq!(state.draining, 0, "draining");
    host.no_event(EQ_ASYNC)
}

fn while_draining(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    wired.request(host, &empty_write())?;
    host.move_qp(wired.qp.qpn, Sqd)?;
    refuse_move(host, wired.qp.qpn, Sqd, BadState)?;
    refuse_move(host, wired.qp.qpn, Rts, BadState)
}

/// A pair that drains, after a registration of it failed with one work request behind.
fn registration_failed(host: &mut Host) -> Outcome<Pair> {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let flags = QP_FLAG_FAST_REGISTER | QP_FLAG_FAST_REGISTER_DRAINS;
    let mut pair = Pair::flagged(host, flags)?;
    let tag = allocate(host, TagKind::Region)?;
    let (mut bad, _) = fast_register(host, tag, 0);
    bad.part[0..4].copy_from_slice(&(tag + 0x1000).to_le_bytes());
    pair.a.write_send(&host.memory, &bad.encode());
    pair.a.write_send(&host.memory, &empty_write().encode());
    host.tell_send(&pair.a)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), LocalProtection)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 1), Flushed)?;
    host.event(EQ_ASYNC, EventCode::SendQueueDrained, pair.a.qpn)?;
    ensure_eq!(host.state(pair.a.qpn)?, Sqd, "the state");
    Ok(pair)
}

fn failed_registration_drains(host: &mut Host) -> Outcome {
    registration_failed(host)?;
    Ok(())
}

fn after_a_failed_registration(host: &mut Host) -> Outcome {
    let mut pair = registration_failed(host)?;
    pair.ends(host, &empty_write(), Flushed)?;
    host.move_qp(pair.a.qpn, Rts)?;
    let tag = allocate(host, TagKind::Region)?;
    let (good, _) = fast_register(host, tag, 0);
    pair.ends(host, &good, Success)?;
    pair.ends(host, &empty_write(), Success)
}

fn registers_and_sends_and_fails(host: &mut Host) -> Outcome {
    for made in [false, true] {
        host.start_needing(FEATURE_LISTS)?;
        let flags = QP_FLAG_LISTS | QP_FLAG_FAST_REGISTER_DRAINS;
        let mut pair = Pair::flagged(host, flags)?;
        let region = host.region(0, PAGE)?;
        let (good, mut bad) = (region.sge(0, 8), region.sge(0, 8));
        bad.lkey ^= 1;
        let (piece, data) = if made { (good, bad) } else { (bad, good) };
        let list = List {
            part: ListPart {
                tag: allocate(host, TagKind::List)?,
                address: LIST_ADDRESS,
                ..ListPart::zeroed()
            },
            pieces: vec![piece],
        };
        let work = and_send(list.work(SendOpcode::RegisterList), &[data]);
        pair.ends(host, &work, LocalProtection)?;
        let state = if made { Error } else { Sqd };
        ensure_eq!(host.state(pair.a.qpn)?, state, "the state");
        host.device.control_reset()?;
    }
    Ok(())
}

fn served_all_along(host: &mut Host) -> Outcome {
    let mut pair = registration_failed(host)?;
    let index = host.post(&mut pair.b, &empty_write())?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    Ok(())
}

fn failed_first(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for work in [empty_write(), bad_work(), empty_write()] {
        pair.a.write_send(&host.memory, &work.encode());
    }
    host.tell_send(&pair.a)?;
    for (index, status) in [(0, Success), (1, LocalProtection), (2, Flushed)] {
        host.completes(&mut pair.cq, (pair.a.qpn, index), status)?;
    }
    Ok(())
}

fn sends_are_flushed(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    for round in 0..10 {
        // Signaled or not.
        let flags = if round % 2 == 0 { SEND_SIGNALED } else { 0 };
        host.post(&mut wired.qp, &empty_write().flags(flags))?;
    }
    host.wire()?.packet()?;
    host.move_qp(wired.qp.qpn, Error)?;
    for index in 0..10 {
        let entry = wired.completes(host, index, Flushed)?;
        ensure_eq!(entry.opcode, CompletionOpcode::Write.number(), "the opcode");
    }
    Ok(())
}

fn receives_are_flushed(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    for _ in 0..10 {
        host.post_receive(&mut pair.a, &[])?;
    }
    host.move_qp(pair.a.qpn, Error)?;
    for index in 0..10 {
        host.completes(&mut pair.cq, (pair.a.qpn, index), Flushed)?;
    }
    Ok(())
}

fn wake_words_in_error(host: &mut Host) -> Outcome {
    host.start()?;
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, Error)?;
    wait_for("both wake words", || {
        Ok((wake_words(host, &pair.a) == (1, 1)).then_some(()))
    })
}

fn posted_in_error(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, Error)?;
    for _ in 0..5 {
        pair.ends(host, &empty_write(), Flushed)?;
        let index = host.post_receive(&mut pair.a, &[])?;
        host.completes(&mut pair.cq, (pair.a.qpn, index), Flushed)?;
    }
    Ok(())
}

fn last_wqe_reached(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let (mut qp, _srq) = shared(host, &cq)?;
    host.post(&mut qp, &empty_write())?;
    host.move_qp(qp.qpn, Error)?;
    host.event(EQ_ASYNC, EventCode::LastWqeReached, qp.qpn)?;
    ensure!(
        cq.at(&host.memory, 0).is_some(),
        "a completion that should come before"
    );
    Ok(())
}

fn no_event_by_command(host: &mut Host) -> Outcome {
    host.start()?;
    let pair = Pair::new(host)?;
    host.move_qp(pair.a.qpn, Error)?;
    host.no_event(EQ_ASYNC)
}

fn owed_drain(host: &mut Host) -> Outcome {
    host.start()?;
    for to in [Error, Reset] {
        let mut wired = Wired::new(host)?;
        wired.request(host, &empty_write())?;
        host.move_qp(wired.qp.qpn, Sqd)?;
        host.move_qp(wired.qp.qpn, to)?;
        host.no_event(EQ_ASYNC)?;
    }
    Ok(())
}

fn no_packets_in_error(host: &mut Host) -> Outcome {
    host.start()?;
    // One that would be sent again soon.
    let mut wired = Wired::by(host, Service::Rc, |c| c.timeout = 8)?;
    wired.request(host, &empty_write())?;
    host.move_qp(wired.qp.qpn, Error)?;
    host.wire()?.drain()?;
    wired.send(host, rc::WRITE_ONLY, RECEIVE_PSN, reth(0, 0, 0))?;
    host.wire()?.silence()
}

fn send_queue_error_and_back(host: &mut Host) -> Outcome {
    let mut pair = in_sqe(host)?;
    host.move_qp(pair.a.qpn, Rts)?;
    host.post_receive(&mut pair.b, &[])?;
    pair.ends(host, &Work::send(&[]), Success)?;
    ensure_eq!(pair.received(host)?.status, 0, "the receive");
    Ok(())
}

fn order_of_completions(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let read = wired.request(host, &read8(&region, 0, 0x77))?;
    let write = wired.request(host, &empty_write().flags(0))?;
    let last = wired.request(host, &empty_write())?;
    ensure!(
        read.psn < write.psn && write.psn < last.psn,
        "the order of the requests"
    );
    // The last is acknowledged first: nothing is complete before the read.
    let body = [aeth(syndrome::ACK, 1), vec![0; 8]].concat();
    wired.send(host, rc::READ_RESPONSE_ONLY, read.psn, body)?;
    wired.acknowledge(host, last.psn, syndrome::ACK)?;
    wired.completes(host, 0, Success)?;
    wired.completes(host, 2, Success)?;
    host.no_completion(&mut wired.cq)
}

fn fence(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let read = wired.request(host, &read8(&region, 0, 0x77))?;
    host.post(
        &mut wired.qp,
        &empty_write().flags(SEND_SIGNALED | SEND_FENCE),
    )?;
    host.wire()?.silence()?;
    let body = [aeth(syndrome::ACK, 1), vec![0; 8]].concat();
    wired.send(host, rc::READ_RESPONSE_ONLY, read.psn, body)?;
    let fenced = host.wire()?.packet()?;
    ensure_eq!(fenced.opcode, rc::WRITE_ONLY, "what comes after the read");
    Ok(())
}

fn reads_in_flight(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::by(host, Service::Rc, |c| c.depth = 1)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let read = wired.request(host, &read8(&region, 0, 0x77))?;
    host.post(&mut wired.qp, &read8(&region, 0, 0x77))?;
    host.post(&mut wired.qp, &empty_write())?;
    host.wire()?.silence()?;
    let body = [aeth(syndrome::ACK, 1), vec![0; 8]].concat();
    wired.send(host, rc::READ_RESPONSE_ONLY, read.psn, body)?;
    let next = host.wire()?.packet()?;
    ensure_eq!(next.opcode, rc::READ_REQUEST, "what comes after the read");
    Ok(())
}

fn executed_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    let source = host.region(0, PAGE)?;
    for round in 1..50u8 {
        host.memory.fill(source.dma, PAGE, round);
        host.post_receive(&mut pair.b, &[])?;
        let sges = [source.sge(0, PAGE as u32)];
        let write = Work::remote(SendOpcode::Write, &sges, sink.address, sink.tag);
        host.post(&mut pair.a, &write.flags(0))?;
        host.post(&mut pair.a, &Work::send(&[]).flags(0))?;
        pair.received(host)?;
        let found = host.memory.bytes(sink.dma, PAGE);
        ensure!(
            found.iter().all(|b| *b == round),
            "bytes that came after the completion"
        );
    }
    Ok(())
}

/// An extended connection between two queue pairs of the device, and its shared receive queue.
fn extended(host: &mut Host) -> Outcome<(Pair, Cq, Srq)> {
    host.start_needing(FEATURE_XRC)?;
    let of_receives = host.create_cq()?;
    let mut command = host.srq_command();
    (command.flags, command.xrcd, command.cqn) = (SRQ_FLAG_XRC, 3, of_receives.cqn);
    host.execute(&command)?;
    let cq = host.create_cq()?;
    let a = host.create_qp(Service::XrcIni, &cq)?;
    let mut target = host.qp_command(Service::XrcTgt, &cq);
    target.xrcd = 3;
    let b = host.make_qp(&target)?;
    let (to_a, to_b) = (host.to_self(a.qpn), host.to_self(b.qpn));
    host.bring(Service::XrcIni, &a, Rts, &to_b)?;
    host.bring(Service::XrcTgt, &b, Rts, &to_a)?;
    let pair = Pair {
        cq,
        a,
        b,
        of_b: Vec::new(),
    };
    Ok((pair, of_receives, Srq::new(&command)))
}

fn named_shared_receive_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_XRC)?;
    let mut wired = Wired::by(host, Service::XrcIni, |_| ())?;
    let mut work = Work::send(&[]);
    work.header.srqn = 0x12_3456;
    let request = wired.request(host, &work)?;
    ensure_eq!(request.opcode, rc::SEND_ONLY + EXTENDED, "the opcode");
    ensure_eq!(request.word(0), 0x12_3456, "the extended header");
    Ok(())
}

fn extended_receive(host: &mut Host) -> Outcome {
    let (mut pair, mut of_receives, mut srq) = extended(host)?;
    srq.post(&host.memory, 17, &[]);
    let mut work = Work::send(&[]);
    work.header.srqn = srq.srqn;
    pair.ends(host, &work, Success)?;
    let entry = host.completes(&mut of_receives, (pair.b.qpn, 17), Success)?;
    ensure_eq!(entry.srqn, srq.srqn, "the shared receive queue");
    Ok(())
}

fn wrong_shared_receive_queue(host: &mut Host) -> Outcome {
    let (mut pair, _, _) = extended(host)?;
    let plain = host.create_srq()?;
    let mut work = Work::send(&[]);
    work.header.srqn = plain.srqn;
    pair.ends(host, &work, CompletionStatus::RemoteInvalidRequest)
}

fn extended_without(host: &mut Host, service: Service) -> Outcome {
    host.start_needing(FEATURE_XRC)?;
    let cq = host.create_cq()?;
    let none = host.caps.cq_first + host.caps.cq_count - 1;
    let mut command = host.qp_command(service, &cq);
    (
        command.rq_log_entries,
        command.rq_log_stride,
        command.rq_offset,
    ) = (255, 255, 7);
    command.receive_cqn = none;
    if service == Service::XrcTgt {
        command.xrcd = 1;
        (command.send_cqn, command.sq_log_blocks, command.sq_offset) = (none, 255, 7);
        command.record_offset = 0;
        let length = size_of::<QueuePairRecord>() as u64;
        command.buffer = Buffer::contiguous(host.memory.allocate(length), length);
    }
    host.execute(&command)?;
    Ok(())
}
