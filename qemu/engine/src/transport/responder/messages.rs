// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A request whose turn it is, and those that bring data: sends and writes.

use super::reads::{atomic, atomic_write, flush, read};
use super::refusals::{Refusal, QUEUE_PAIR_RIGHT};
use super::{remote_holder, Incoming};
use crate::core::{Core, ReceiveCompletion};
use crate::loan::Payload;
use crate::memory::{Host, MAX_LENT};
use crate::qp::QueuePair;
use crate::roce::{psn_add, NakCode, Operation, Packet, Position};
use crate::tpt::{Arrival, RemoteAccess, TptError};
use crate::transport::requester::packets;
use crate::transport::{count_copy, invalidates};
use ferrite_abi::{
    CompletionOpcode, CompletionStatus, ACCESS_REMOTE_WRITE, COMPLETION_IMMEDIATE,
    COMPLETION_INVALIDATED, COMPLETION_SOLICITED, MAX_MESSAGE,
};

/// Carries out a request whose turn it is.
pub(super) fn execute(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let responder = &qp.transport.responder;
    let position = packet.info.position;
    let operation = packet.info.operation;
    // Messages are not interleaved.
    let fits = match (&responder.incoming, operation) {
        (Incoming::None, _) => position.starts(),
        (Incoming::Send { .. }, Operation::Send) | (Incoming::Write { .. }, Operation::Write) => {
            !position.starts()
        }
        _ => false,
    };
    let (mtu, length) = (qp.mtu(), packet.payload.len());
    // Packets whose payload is lent come several at a time.
    let most = match packet.payload {
        Payload::Bytes(_) => mtu,
        Payload::Lent(_) => MAX_LENT as usize,
    };
    let length_fits = match position {
        Position::First | Position::Middle => length % mtu == 0 && (mtu..=most).contains(&length),
        Position::Last => (1..=most).contains(&length),
        Position::Only if packet.info.payload => length <= most,
        Position::Only => length == 0,
    };
    // As if each had come by itself, and were of another length than this side's.
    let same_mtu = packet.payload.is_in_packets(qp.attributes.log_mtu);
    if !fits || !length_fits || !same_mtu {
        return Err(Refusal::Invalid);
    }
    match operation {
        Operation::Send => send(core, qp, packet, host),
        Operation::Write => write(core, qp, packet, host),
        Operation::ReadRequest => read(core, qp, packet, host),
        Operation::AtomicWrite => atomic_write(core, qp, packet, host),
        Operation::Flush => flush(core, qp, packet, host),
        _ => atomic(core, qp, packet, host),
    }
}

/// Takes a receive for a message that begins (or, for a write, ends) with this packet.
fn take_receive(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    if packet.srqn.is_some() {
        remote_holder(core, qp, packet)?;
    }
    let mut receive = std::mem::take(&mut qp.transport.responder.receive);
    let taken = if qp.transport.responder.taken {
        // Left over from a message that lost its end.
        Ok(true)
    } else {
        qp.transport.responder.waits_anew();
        core.take_receive(host, qp, packet.srqn, &mut receive)
    };
    qp.transport.responder.taken =
        !matches!(taken, Ok(false) | Err(crate::queue::QueueError::Producer));
    let checked = match taken {
        // Its memory is checked as far as the message goes, when it goes there.
        Ok(true) => Ok(()),
        Ok(false) => Err(Refusal::NotReady),
        Err(crate::queue::QueueError::Producer) => Err(Refusal::Failed),
        Err(error) => Err(Refusal::Receive {
            status: CompletionStatus::LocalQueuePairOperation,
            vendor_syndrome: error.vendor_syndrome(),
            code: NakCode::RemoteOperation,
        }),
    };
    qp.transport.responder.receive = receive;
    checked
}

/// Completes the receive in use.
pub(super) fn complete_receive(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    opcode: CompletionOpcode,
    byte_count: u32,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let mut flags = 0;
    let (mut immediate, mut invalidated) = (0, 0);
    if let Some(bytes) = packet.immediate {
        flags |= COMPLETION_IMMEDIATE;
        immediate = u32::from_le_bytes(bytes);
    }
    if let Some(tag) = packet.invalidate {
        flags |= COMPLETION_INVALIDATED;
        invalidated = tag;
    }
    if packet.bth.solicited {
        flags |= COMPLETION_SOLICITED;
    }
    let completion = ReceiveCompletion {
        index: qp.transport.responder.receive.name(),
        shared: qp.transport.responder.receive.shared,
        origin: None,
        status: CompletionStatus::Success,
        opcode,
        byte_count,
        immediate,
        tag: invalidated,
        flags,
        vendor_syndrome: 0,
    };
    qp.transport.responder.taken = false;
    core.complete_receive(qp, &completion, host)
        .map_err(|_| Refusal::QueueDead)
}

fn send(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let position = packet.info.position;
    if packet.invalidate.is_some() && !invalidates(core) {
        return Err(Refusal::Invalid);
    }
    if let Some(tag) = packet.invalidate {
        // Before anything is placed, which is done once.
        core.tpt.ready(tag)?;
        if let Err(error) = core.tpt.stands(tag) {
            let waited = qp.transport.responder.waited(packet.bth.psn);
            if let TptError::Pending(index) = core.confirm(error, waited, host) {
                return Err(Refusal::Pending(index));
            }
        }
    }
    if position.starts() {
        take_receive(core, qp, packet, host)?;
    }
    let (received, counted) = match qp.transport.responder.incoming {
        Incoming::Send { received, early } => (received, early),
        _ => (0, false),
    };
    let receive = &qp.transport.responder.receive;
    if receive
        .shared
        .is_some_and(|shared| core.srqs.current(shared).is_none())
    {
        // Destroyed while the message was coming in.
        return Err(Refusal::Failed);
    }
    let failed = |status, vendor_syndrome, code| Refusal::Receive {
        status,
        vendor_syndrome,
        code,
    };
    // At most `MAX_MESSAGE` and a packet.
    let total = received + packet.payload.len() as u32;
    if u64::from(total) > receive.capacity || total > MAX_MESSAGE {
        return Err(failed(
            CompletionStatus::LocalLength,
            0,
            NakCode::InvalidRequest,
        ));
    }
    let held = packet.payload.hold().ok_or(Refusal::Lost)?;
    count_copy(core, packet.payload);
    core.scatter(
        host,
        receive.domain,
        receive.sges(),
        received.into(),
        held.data(),
    )
    .map_err(|error| match error {
        TptError::Absent(fault) => Refusal::AbsentReceive(fault),
        TptError::Pending(index) => Refusal::Pending(index),
        error => Refusal::TableReceive(error),
    })?;
    // The sender may go on before anything is ended here.
    drop(held);
    let packets = packets(total - received, qp.attributes.log_mtu);
    let length = packet.payload.len();
    let early = counted || core.uses_early(receive.sges(), received.into(), length);
    core.counters.early_uses += u64::from(early && !counted);
    if !position.ends() {
        let received = total;
        qp.transport.responder.incoming = Incoming::Send { received, early };
        qp.transport.responder.advance(packets);
        return Ok(());
    }
    if let Some(tag) = packet.invalidate {
        let holder = remote_holder(core, qp, packet)?;
        // Once for a message, which may have gone to memory that is early too.
        let another = !early && core.tpt.is_early(tag);
        // What could be waited for was looked for before anything was placed.
        let invalidated = core.tpt.invalidate(tag, holder);
        invalidated.map_err(|error| Refusal::Access(error.vendor_syndrome()))?;
        core.counters.peer_invalidations += 1;
        core.counters.early_uses += u64::from(another);
    }
    qp.transport.responder.incoming = Incoming::None;
    complete_receive(core, qp, packet, CompletionOpcode::Receive, total, host)?;
    qp.transport.responder.msn = psn_add(qp.transport.responder.msn, 1);
    qp.transport.responder.advance(packets);
    Ok(())
}

fn write(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let position = packet.info.position;
    let (span, received, length) = match (packet.reth, &qp.transport.responder.incoming) {
        (Some(reth), _) => {
            if qp.attributes.access & ACCESS_REMOTE_WRITE == 0 {
                return Err(Refusal::Access(QUEUE_PAIR_RIGHT));
            }
            if reth.length > MAX_MESSAGE {
                return Err(Refusal::Invalid);
            }
            let span = core.tpt.check_remote(
                reth.rkey,
                reth.address,
                reth.length.into(),
                remote_holder(core, qp, packet)?,
                RemoteAccess::Write,
            )?;
            (span, 0, reth.length)
        }
        (
            None,
            &Incoming::Write {
                span,
                received,
                length,
            },
        ) => (span, received, length),
        (None, _) => return Err(Refusal::Invalid),
    };
    let total = u64::from(received) + packet.payload.len() as u64;
    // All that was announced, no more, and no less once it ends.
    if total > length.into() || position.ends() != (total == length.into()) {
        return Err(Refusal::Invalid);
    }
    // Before anything is written, so that nothing is if there is no receive.
    if packet.immediate.is_some() {
        take_receive(core, qp, packet, host)?;
    }
    let held = packet.payload.hold().ok_or(Refusal::Lost)?;
    count_copy(core, packet.payload);
    core.tpt.write(host, &span, received.into(), held.data())?;
    // The sender may go on before anything is ended here.
    drop(held);
    let packets = packets(packet.payload.len() as u32, qp.attributes.log_mtu);
    if position.starts() {
        core.counters.early_uses += u64::from(core.tpt.is_early_span(&span));
    }
    // A packet out of order is not executed, so that one that is, is always in order.
    core.tpt.touch(&span, position.ends(), Arrival::InOrder)?;
    let responder = &mut qp.transport.responder;
    if !position.ends() {
        responder.incoming = Incoming::Write {
            span,
            received: total as u32,
            length,
        };
        responder.advance(packets);
        return Ok(());
    }
    responder.incoming = Incoming::None;
    if packet.immediate.is_some() {
        let opcode = CompletionOpcode::ReceiveWrite;
        complete_receive(core, qp, packet, opcode, length, host)?;
    }
    let responder = &mut qp.transport.responder;
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(packets);
    Ok(())
}
