// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Requests that come again: answered once more and, but for reads, not carried out once more.

use super::answers::Answer;
use super::remote_holder;
use crate::core::Core;
use crate::qp::QueuePair;
use crate::roce::{psn_add, psn_diff, Operation, Packet};
use crate::tpt::{Holder, RemoteAccess};
use crate::transport::requester::packets;
use ferrite_abi::{ACCESS_REMOTE_READ, MAX_MESSAGE};

/// A request that was carried out before: its answer was lost or is late, or the network made a
/// copy of it.
pub(super) fn duplicate(core: &mut Core, qp: &mut QueuePair, packet: &Packet<'_>) -> Option<()> {
    let psn = packet.bth.psn;
    let holder = remote_holder(core, qp, packet).ok()?;
    let responder = &mut qp.transport.responder;
    match packet.info.operation {
        Operation::ReadRequest => return read_again(core, qp, packet, holder),
        Operation::AtomicWrite | Operation::Flush => {
            // Doing it again would undo what was written since; and all that a flush is for has
            // been in memory from the first time on.
            let waiting = responder
                .answers
                .iter()
                .any(|answer| matches!(*answer, Answer::Placed { psn: at } if at == psn));
            if waiting {
                return None;
            }
            responder.answer_again(Answer::Placed { psn });
        }
        Operation::CompareSwap | Operation::FetchAdd => {
            let original = responder.saved(psn)?;
            let waiting = responder
                .answers
                .iter()
                .any(|answer| matches!(*answer, Answer::Atomic { psn: at, .. } if at == psn));
            if waiting {
                return None;
            }
            responder.answer_again(Answer::Atomic {
                psn,
                original,
                fresh: false,
            });
        }
        _ => responder.acknowledge(),
    }
    core.schedule(qp);
    Some(())
}

/// A read, or the rest of one, that is asked for again. Reading does no harm twice; but only where
/// it was allowed once.
fn read_again(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    holder: Holder,
) -> Option<()> {
    let reth = packet.reth?;
    let psn = packet.bth.psn;
    let log_mtu = qp.attributes.log_mtu;
    let responder = &mut qp.transport.responder;
    if reth.length > MAX_MESSAGE || qp.attributes.access & ACCESS_REMOTE_READ == 0 {
        return None;
    }
    let end = psn_add(psn, packets(reth.length, log_mtu));
    if psn_diff(end, responder.expected) > 0 {
        return None;
    }
    // A read is known by its end, however much of it is asked for.
    let under_way = responder.answers.iter_mut().find(|answer| {
        matches!(**answer, Answer::Read { psn: at, offset, length, .. }
            if psn_add(at, packets(length - offset, log_mtu)) == end)
    });
    if let Some(&mut Answer::Read {
        psn: at, starts, ..
    }) = under_way
    {
        // All that is asked for will be sent anyway.
        let ahead = psn_diff(at, psn);
        if ahead < 0 || ahead == 0 && starts {
            return None;
        }
    }
    let span = core
        .tpt
        .check_remote(
            reth.rkey,
            reth.address,
            reth.length.into(),
            holder,
            RemoteAccess::Read,
        )
        .ok()?;
    let again = |fresh| Answer::Read {
        psn,
        span,
        offset: 0,
        length: reth.length,
        starts: true,
        fresh,
    };
    match under_way {
        Some(answer) => *answer = again(answer.is_owed()),
        None => responder.answer_again(again(false)),
    }
    core.schedule(qp);
    Some(())
}
