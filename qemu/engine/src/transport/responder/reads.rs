// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Requests that have an answer of their own: reads, atomics, atomic writes and flushes.

use super::answers::Answer;
use super::refusals::{Refusal, QUEUE_PAIR_RIGHT};
use super::remote_holder;
use crate::core::Core;
use crate::memory::Host;
use crate::qp::QueuePair;
use crate::roce::{psn_add, Operation, Packet};
use crate::tpt::{AtomicOperation, RemoteAccess, Span};
use crate::transport::requester::packets;
use ferrite_abi::{
    ACCESS_FLUSH_GLOBAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    FEATURE_ATOMICS, FEATURE_ATOMIC_WRITE, FEATURE_FLUSH, FLUSH_GLOBAL, FLUSH_PERSISTENT,
    FLUSH_RANGE, FLUSH_REGION, MAX_MESSAGE,
};

/// Bytes of a read whose pages are looked for before it is begun.
const PROBE: u32 = 1 << 20;

/// Whether one more read or atomic may be served.
fn check_depth(qp: &QueuePair) -> Result<(), Refusal> {
    let owed = qp
        .transport
        .responder
        .answers
        .iter()
        .filter(|answer| answer.is_owed())
        .count();
    if owed >= usize::from(qp.attributes.ird) {
        return Err(Refusal::Invalid);
    }
    Ok(())
}

/// Whether the device has what a request needs, and the queue pair gives its peer the right to it.
fn permit(core: &Core, qp: &QueuePair, feature: u64, access: u32) -> Result<(), Refusal> {
    if core.features & feature != feature {
        return Err(Refusal::Invalid);
    }
    if qp.attributes.access & access == 0 {
        return Err(Refusal::Access(QUEUE_PAIR_RIGHT));
    }
    Ok(())
}

/// Ends a request that was carried out, or is to be while it is answered, in that many packets.
fn owe(core: &mut Core, qp: &mut QueuePair, answer: Answer, count: u32) {
    let responder = &mut qp.transport.responder;
    responder.answers.push_back(answer);
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(count);
    core.schedule(qp);
}

pub(super) fn read(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let reth = packet.reth.ok_or(Refusal::Invalid)?;
    permit(core, qp, 0, ACCESS_REMOTE_READ)?;
    check_depth(qp)?;
    if reth.length > MAX_MESSAGE {
        return Err(Refusal::Invalid);
    }
    let span = core.tpt.check_remote(
        reth.rkey,
        reth.address,
        reth.length.into(),
        remote_holder(core, qp, packet)?,
        RemoteAccess::Read,
    )?;
    // The peer is told to wait now, rather than left to wonder where its answer is.
    let probed = reth.length.min(PROBE) as usize;
    core.tpt.probe(&*host, &span, 0, probed, false)?;
    core.counters.early_uses += u64::from(core.tpt.is_early_span(&span));
    let count = packets(reth.length, qp.attributes.log_mtu);
    let answer = Answer::Read {
        psn: packet.bth.psn,
        span,
        offset: 0,
        length: reth.length,
        starts: true,
        fresh: true,
    };
    owe(core, qp, answer, count);
    Ok(())
}

pub(super) fn atomic(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let atomic = packet.atomic.ok_or(Refusal::Invalid)?;
    permit(core, qp, FEATURE_ATOMICS, ACCESS_REMOTE_ATOMIC)?;
    check_depth(qp)?;
    if atomic.address % 8 != 0 {
        return Err(Refusal::Invalid);
    }
    let span = core.tpt.check_remote(
        atomic.rkey,
        atomic.address,
        8,
        remote_holder(core, qp, packet)?,
        RemoteAccess::Atomic,
    )?;
    let operation = match packet.info.operation {
        Operation::CompareSwap => AtomicOperation::CompareSwap {
            compare: atomic.compare,
            new: atomic.operand,
        },
        _ => AtomicOperation::FetchAdd(atomic.operand),
    };
    carry_out(core, qp, packet.bth.psn, span, operation, host)
}

/// Carries out an operation on eight bytes.
fn carry_out(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    span: Span,
    operation: AtomicOperation,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let early = core.tpt.is_early_span(&span);
    let original = core.tpt.atomic(host, &span, operation)?;
    core.counters.early_uses += u64::from(early);
    let answer = match operation {
        AtomicOperation::Store(_) => Answer::Placed { psn },
        _ => {
            qp.transport.responder.save(psn, original);
            Answer::Atomic {
                psn,
                original,
                fresh: true,
            }
        }
    };
    owe(core, qp, answer, 1);
    Ok(())
}

pub(super) fn atomic_write(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let reth = packet.reth.ok_or(Refusal::Invalid)?;
    permit(core, qp, FEATURE_ATOMIC_WRITE, ACCESS_REMOTE_WRITE)?;
    // Not all requesters take atomic writes for reads in flight; but where there are to be none,
    // there are to be none of these.
    if qp.attributes.ird == 0 {
        return Err(Refusal::Invalid);
    }
    let bytes = packet.payload.bytes().ok_or(Refusal::Invalid)?;
    let bytes = <[u8; 8]>::try_from(bytes).map_err(|_| Refusal::Invalid)?;
    if reth.length != 8 || reth.address % 8 != 0 {
        return Err(Refusal::Invalid);
    }
    let span = core.tpt.check_remote(
        reth.rkey,
        reth.address,
        8,
        remote_holder(core, qp, packet)?,
        RemoteAccess::Write,
    )?;
    // Memory gets the bytes in the order they have on the wire.
    let operation = AtomicOperation::Store(u64::from_le_bytes(bytes));
    carry_out(core, qp, packet.bth.psn, span, operation, host)
}

pub(super) fn flush(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let (Some(feth), Some(reth)) = (packet.feth, packet.reth) else {
        return Err(Refusal::Invalid);
    };
    let placement = u32::from(feth.placement);
    let known = placement != 0 && placement & !(FLUSH_GLOBAL | FLUSH_PERSISTENT) == 0;
    if !known {
        return Err(Refusal::Invalid);
    }
    permit(core, qp, FEATURE_FLUSH, ACCESS_FLUSH_GLOBAL)?;
    if placement & FLUSH_PERSISTENT != 0 {
        // Nobody can be given the right to ask for it.
        return Err(Refusal::Access(QUEUE_PAIR_RIGHT));
    }
    let range = match u32::from(feth.selectivity) {
        FLUSH_RANGE => Some((reth.address, reth.length.into())),
        FLUSH_REGION => None,
        _ => return Err(Refusal::Invalid),
    };
    let holder = remote_holder(core, qp, packet)?;
    core.tpt.check_flush(reth.rkey, range, holder)?;
    core.counters.early_uses += u64::from(core.tpt.is_early(reth.rkey));
    // Writes are in host memory when they are carried out, and those before this one have been.
    host.fence();
    let psn = packet.bth.psn;
    owe(core, qp, Answer::Placed { psn }, 1);
    Ok(())
}
