// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the responder sends: acknowledgements, results, data of reads and refusals, in the order of the
//! requests.

use super::refusals::revoked;
use crate::core::{Allowance, Core};
use crate::counters::count;
use crate::memory::Host;
use crate::paging::{Outcome, Side};
use crate::qp::{self, QueuePair};
use crate::roce::{
    psn_add, Aeth, AtomicAckEth, NakCode, Opcode, Position, Syndrome, CREDIT_UNLIMITED,
};
use crate::tpt::{Span, TptError};
use crate::transport::requester::packets;
use crate::transport::{
    base_header, lends, lent_size, send_packet, send_payload, Source, MIN_LENT,
};

/// An answer not sent yet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    /// All is well up to this sequence number.
    Acknowledge { psn: u32 },
    /// The request at this sequence number is to come again.
    NotNow { psn: u32, syndrome: Syndrome },
    /// The request at this sequence number is refused; afterwards the queue pair is in error.
    Refuse { psn: u32, code: NakCode },
    /// Data of a read: what is left of it. It is `fresh` until all of it was sent once.
    Read {
        psn: u32,
        span: Span,
        offset: u32,
        length: u32,
        starts: bool,
        fresh: bool,
    },
    /// The result of an atomic, `fresh` until it was sent once.
    Atomic {
        psn: u32,
        original: u64,
        fresh: bool,
    },
    /// An atomic write or a flush is done.
    Placed { psn: u32 },
}

impl Answer {
    pub(super) fn psn(&self) -> u32 {
        match *self {
            Self::Acknowledge { psn }
            | Self::NotNow { psn, .. }
            | Self::Refuse { psn, .. }
            | Self::Read { psn, .. }
            | Self::Atomic { psn, .. }
            | Self::Placed { psn } => psn,
        }
    }

    /// Whether it is owed for one of the reads and atomics that the requester has in flight. What
    /// was sent once is not: the requester may have got it, and ask for another.
    pub(super) fn is_owed(&self) -> bool {
        matches!(
            self,
            Self::Read { fresh: true, .. } | Self::Atomic { fresh: true, .. }
        )
    }
}

/// Sends answers and takes them from what is `allowed`; true when more could be sent with more.
pub(in crate::transport) fn run(
    core: &mut Core,
    qp: &mut QueuePair,
    host: &mut dyn Host,
    allowed: &mut Allowance,
) -> bool {
    while qp.may_receive() {
        let Some(answer) = qp.transport.responder.answers.front().copied() else {
            break;
        };
        let left = match answer {
            Answer::Read { .. } => &mut allowed.data,
            _ => &mut allowed.answers,
        };
        if *left == 0 {
            return true;
        }
        if let Answer::Read { .. } = answer {
            match send_data(core, qp, host, left) {
                Data::More => {}
                Data::Last => {
                    qp.transport.responder.answers.pop_front();
                }
                Data::Absent => break,
            }
            continue;
        }
        *left -= 1;
        qp.transport.responder.answers.pop_front();
        match answer {
            Answer::Acknowledge { psn } => {
                let syndrome = Syndrome::Ack(CREDIT_UNLIMITED);
                say(core, qp, psn, Opcode::RC_ACKNOWLEDGE, syndrome, None, host);
            }
            Answer::NotNow { psn, syndrome } => {
                match syndrome {
                    Syndrome::ReceiverNotReady(_) => count!(core, qp, rnr_naks_sent),
                    _ => count!(core, qp, naks_sent),
                }
                say(core, qp, psn, Opcode::RC_ACKNOWLEDGE, syndrome, None, host);
            }
            Answer::Atomic { .. } | Answer::Placed { .. } => say_result(core, qp, answer, host),
            Answer::Refuse { psn, code } => {
                count!(core, qp, naks_sent);
                let syndrome = Syndrome::Nak(code);
                say(core, qp, psn, Opcode::RC_ACKNOWLEDGE, syndrome, None, host);
                qp::enter_error(core, qp, host);
            }
            Answer::Read { .. } => {}
        }
    }
    false
}

/// Sends the result of an atomic, or that there is something done.
fn say_result(core: &mut Core, qp: &mut QueuePair, answer: Answer, host: &mut dyn Host) {
    let (opcode, original) = match answer {
        Answer::Atomic { original, .. } => (Opcode::RC_ATOMIC_ACKNOWLEDGE, Some(original)),
        _ => (Opcode::RC_READ_RESPONSE_ONLY, None),
    };
    let syndrome = Syndrome::Ack(CREDIT_UNLIMITED);
    say(core, qp, answer.psn(), opcode, syndrome, original, host);
}

/// Sends an acknowledgement, with `original` that of an atomic.
fn say(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    opcode: u8,
    syndrome: Syndrome,
    original: Option<u64>,
    host: &mut dyn Host,
) {
    let Some(template) = qp.transport.template else {
        return;
    };
    let bth = base_header(qp, opcode, psn);
    let msn = qp.transport.responder.msn;
    let sent = send_packet(
        core,
        &mut qp.counters,
        &template,
        &bth,
        host,
        |frame, _, _| {
            frame.extend_from_slice(&Aeth { syndrome, msn }.to_bytes());
            if let Some(original) = original {
                frame.extend_from_slice(&AtomicAckEth { original }.to_bytes());
            }
            Ok::<(), std::convert::Infallible>(())
        },
    );
    let Ok(()) = sent;
}

/// What became of the next packet of a read.
enum Data {
    /// It was sent, and there are more.
    More,
    /// It was the last.
    Last,
    /// Its page is not there, or what is read before it was not read yet.
    Absent,
}

/// Sends the next packet of the read at the front of the queue, or several where the data can be lent,
/// at most `allowed`, from which they are taken.
fn send_data(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host, allowed: &mut u32) -> Data {
    let log_mtu = qp.attributes.log_mtu;
    let (
        Some(template),
        Some(&Answer::Read {
            psn,
            span,
            offset,
            length,
            starts,
            fresh,
        }),
    ) = (
        qp.transport.template,
        qp.transport.responder.answers.front(),
    )
    else {
        return Data::Last;
    };
    let left = length - offset;
    // Reads see memory in their order. What is lent is read later, and what is lent behind it later still;
    // a copy would be made before.
    let behind_lent = qp.transport.lender.is_lent();
    let least = if behind_lent { 1 } else { MIN_LENT };
    // What is asked for again may have found no place all at once, or its loan was over.
    let lending = lends(core, qp, host).filter(|_| fresh);
    let size =
        lending.and_then(|lending| lent_size(lending, offset, left, *allowed, log_mtu, least));
    let loan = match size {
        Some(size) => {
            let mut loan = core.new_loan(log_mtu);
            loan.depend_on(&qp.transport.lender);
            let lent = core
                .tpt
                .lend(&*host, &span, offset.into(), size as usize, &mut loan);
            // What is wrong is found out when it is read.
            (lent == Ok(true)).then_some(loan)
        }
        _ => None,
    };
    if behind_lent && left > 0 && loan.is_none() {
        core.wait_behind_lent(qp);
        return Data::Absent;
    }
    core.goes_past_lent(qp);
    let payload = match &loan {
        Some(loan) => loan.len() as u32,
        None => left.min(1 << log_mtu),
    };
    let sent_packets = packets(payload, log_mtu);
    *allowed -= sent_packets.min(*allowed);
    let ends = payload == left;
    let opcode = match Position::of(starts, ends) {
        Position::First => Opcode::RC_READ_RESPONSE_FIRST,
        Position::Middle => Opcode::RC_READ_RESPONSE_MIDDLE,
        Position::Last => Opcode::RC_READ_RESPONSE_LAST,
        Position::Only => Opcode::RC_READ_RESPONSE_ONLY,
    };
    let bth = base_header(qp, opcode, psn);
    let aeth = Aeth {
        syndrome: Syndrome::Ack(CREDIT_UNLIMITED),
        msn: qp.transport.responder.msn,
    };
    let headers = |frame: &mut Vec<u8>| {
        if starts || ends {
            frame.extend_from_slice(&aeth.to_bytes());
        }
    };
    let source = match loan {
        Some(loan) => Source::Lent(loan, sent_packets),
        None => Source::Copied(
            payload,
            |to: &mut [u8], core: &Core, host: &mut dyn Host| {
                core.tpt.read(host, &span, offset.into(), to)
            },
        ),
    };
    let counters = &mut qp.counters;
    let sent = send_payload(core, counters, &template, bth, source, host, headers);
    // A read has its last packet for a name here.
    let last = psn_add(psn, packets(left, log_mtu) - 1);
    let responder = &qp.transport.responder;
    let waited = responder.read_waited.filter(|(other, _)| *other == last);
    let (_, mut waited) = waited.unwrap_or_default();
    let sent = sent.map_err(|error| core.confirm(error, waited, host));
    match sent {
        Err(TptError::Absent(fault))
            if core.page_fault(qp.number, Side::Responder, fault, host) == Outcome::Wait =>
        {
            return Data::Absent;
        }
        Err(TptError::Pending(index)) => {
            core.wait_for_tag(qp.number, Side::Responder, index, &mut waited);
            qp.transport.responder.read_waited = Some((last, waited));
            return Data::Absent;
        }
        _ => {}
    }
    if sent.is_err() && !fresh {
        // It was answered while that was allowed, and whether anybody still wants it is not known.
        qp.transport.responder.read_waited = None;
        return Data::Last;
    }
    if let Err(error) = sent {
        revoked(core, qp, psn, error);
        return Data::More;
    }
    core.paging.went_on(qp.number, Side::Responder);
    if let Some(Answer::Read {
        psn: at,
        offset: done,
        starts,
        ..
    }) = qp.transport.responder.answers.front_mut()
    {
        *at = psn_add(psn, sent_packets);
        *done = offset + payload;
        *starts = false;
    }
    if ends {
        qp.transport.responder.read_waited = None;
        Data::Last
    } else {
        Data::More
    }
}
