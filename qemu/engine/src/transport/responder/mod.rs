// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The responder: takes requests in the order of their sequence numbers, carries them out and
//! answers.
//!
//! Sends, writes, atomics and flushes are carried out as they come. A read is carried out when its
//! answer is sent, so that it may see what came behind it, as long as the requester did not ask for
//! a fence (IBTA volume 1, 9.5 and table 79).
//!
//! Answers wait in a queue, since they go out in the order of the requests and the data of a read
//! take more than one burst. An acknowledgement at the end of the queue is overwritten by the
//! next, which says more. A request that comes again is answered at its place in that order, and
//! takes nothing from what others are to be answered: it may be a copy that the network made, and
//! its requester content long ago.
//!
//! Here is what each request meets first: its turn. What is done then is in [`messages`] and
//! [`reads`], what comes again in [`duplicates`], what cannot be done in [`refusals`], and what is
//! sent in [`answers`].

mod answers;
mod duplicates;
mod messages;
mod reads;
mod refusals;

pub(super) use answers::run;

use crate::core::{Core, ReceiveCompletion, Waited};
use crate::counters::count;
use crate::loan::Payload;
use crate::memory::Host;
use crate::paging::{Place, Side};
use crate::qp::{self, OwedEvent, QueuePair};
use crate::queue::ReceiveRequest;
use crate::roce::{psn_add, psn_diff, Bth, NakCode, Operation, Packet, Syndrome};
use crate::tpt::{Holder, Span};
use crate::transport::requester::packets;
use crate::transport::Left;
use answers::Answer;
use duplicates::duplicate;
use ferrite_abi::{CompletionStatus, EventCode, QueuePairStateCode as State, Service};
use messages::execute;
use refusals::{close, fail_receive, refuse, settle, Refusal};
use std::collections::VecDeque;

/// Answers in the queue beyond which requests are dropped, to be sent again. A peer that keeps to
/// the limit on reads never comes near.
const MAX_ANSWERS: usize = 64;

/// Results of atomics kept for requests that come again.
const SAVED_ATOMICS: usize = 32;

/// A message of which some packets have come.
#[derive(Debug, Default)]
enum Incoming {
    #[default]
    None,
    /// A send: bytes so far, into the receive taken; and whether that was counted as an early use.
    Send { received: u32, early: bool },
    /// A write: bytes so far of those announced.
    Write {
        span: Span,
        received: u32,
        length: u32,
    },
}

/// The state of a queue pair as responder.
#[derive(Debug, Default)]
pub(super) struct Responder {
    /// The next sequence number to take.
    expected: u32,
    /// Messages completed.
    msn: u32,
    incoming: Incoming,
    /// The receive of the send that is coming in.
    receive: ReceiveRequest,
    /// That receive was taken and is not complete.
    taken: bool,
    /// The requester was told to send again from `expected`.
    told: bool,
    /// The connection failed; the queue pair is in error when the queue of answers is empty.
    closing: bool,
    /// The event that tells of it then, where no completion does.
    event: Option<OwedEvent>,
    /// The consumer was told of the first packet.
    established: bool,
    answers: VecDeque<Answer>,
    atomics: VecDeque<(u32, u64)>,
    /// How the request with this sequence number has waited for tags.
    request_waited: Option<(u32, Waited)>,
    /// How the read whose last packet has this sequence number has.
    read_waited: Option<(u32, Waited)>,
}

impl Responder {
    /// Starts to expect `psn`.
    pub(super) fn start(&mut self, psn: u32) {
        *self = Self {
            expected: psn,
            ..Self::default()
        };
    }

    /// The next sequence number to take, for queries.
    pub(super) fn psn(&self) -> u32 {
        self.expected
    }

    /// The event that a refused request is to be told by.
    pub(super) fn refused(&self) -> Option<OwedEvent> {
        self.event
    }

    /// The completion, as flushed, of a receive taken from a shared receive queue.
    pub(super) fn taken_receive(&self) -> Option<ReceiveCompletion> {
        (self.taken && self.receive.shared.is_some())
            .then(|| ReceiveCompletion::failed(&self.receive, CompletionStatus::Flushed, 0))
    }

    /// Keeps a receive that was taken for a datagram until its page or tag is there.
    pub(super) fn keep(&mut self, receive: &ReceiveRequest, waited: Waited) {
        self.receive = receive.clone();
        self.taken = true;
        // Datagrams are kept in the order of arrival, whatever their numbers.
        self.request_waited = Some((0, waited));
    }

    /// The receive that was kept, and how it has waited.
    pub(super) fn take_kept(&mut self) -> Option<(ReceiveRequest, Waited)> {
        let (_, waited) = self.request_waited.take().unwrap_or_default();
        std::mem::take(&mut self.taken).then(|| (std::mem::take(&mut self.receive), waited))
    }

    /// How the request with this sequence number has waited.
    fn waited(&self, psn: u32) -> Waited {
        let waited = self.request_waited.filter(|(other, _)| *other == psn);
        waited.unwrap_or_default().1
    }

    /// What the request has waited for says nothing of a receive that is posted from now on: its tags may
    /// be of later commands.
    fn waits_anew(&mut self) {
        if let Some((_, waited)) = &mut self.request_waited {
            *waited = Waited::ForTag;
        }
    }

    fn acknowledge(&mut self) {
        let psn = psn_add(self.expected, 0xff_ffff);
        if let Some(Answer::Acknowledge { psn: last }) = self.answers.back_mut() {
            *last = psn;
        } else {
            self.answers.push_back(Answer::Acknowledge { psn });
        }
    }

    /// Answers a request that comes again, in the order of sequence numbers.
    fn answer_again(&mut self, answer: Answer) {
        let at = self
            .answers
            .iter()
            .position(|later| psn_diff(later.psn(), answer.psn()) >= 0)
            .unwrap_or(self.answers.len());
        self.answers.insert(at, answer);
    }

    /// The result of the atomic at `psn`, if it is remembered.
    fn saved(&self, psn: u32) -> Option<u64> {
        // The latest, as sequence numbers come round again.
        self.atomics
            .iter()
            .rev()
            .find_map(|&(saved, original)| (saved == psn).then_some(original))
    }

    /// Keeps the result of an atomic for a request that comes again.
    fn save(&mut self, psn: u32, original: u64) {
        if self.atomics.len() >= SAVED_ATOMICS {
            self.atomics.pop_front();
        }
        self.atomics.push_back((psn, original));
    }

    /// Notes that a message is complete and `packets` sequence numbers are used up by it.
    fn advance(&mut self, count: u32) {
        self.expected = psn_add(self.expected, count);
        self.told = false;
        self.request_waited = None;
    }
}

/// A request.
pub(super) fn request(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    if qp.transport.responder.closing {
        return Err(Left::Dropped);
    }
    let outcome = take_request(core, qp, packet, host);
    tell_of_first(core, qp, host);
    outcome
}

/// Tells the consumer, once, that a packet came in state RTR, after what that packet did.
fn tell_of_first(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    let responder = &mut qp.transport.responder;
    if qp.state == State::Rtr && !responder.established {
        responder.established = true;
        core.async_event(EventCode::CommunicationEstablished, qp.number, host);
    }
}

fn take_request(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    let psn = packet.bth.psn;
    let responder = &mut qp.transport.responder;
    if responder.answers.len() >= MAX_ANSWERS {
        return Err(Left::Dropped);
    }
    let expected = responder.expected;
    let ahead = psn_diff(psn, expected);
    let times = u64::from(packet.payload.packets());
    if ahead < 0 {
        let times = times.min(u64::from(ahead.unsigned_abs()));
        count!(core, qp, duplicate_requests, times);
        if reaches_beyond(packet, expected, qp.attributes.log_mtu) {
            // Some of what goes as one was taken by itself. The rest comes by itself, too.
            qp.transport.responder.told = false;
            ask_again(core, qp);
            return Err(Left::Dropped);
        }
        return duplicate(core, qp, packet).ok_or(Left::Dropped);
    }
    if core.paging.stands_behind(qp.number, psn) {
        // It has not been missed: all before it may have come.
        return Err(Left::Waits(Place::Psn(psn)));
    }
    if ahead > 0 {
        count!(core, qp, out_of_sequence, times);
        ask_again(core, qp);
        return Err(Left::Dropped);
    }
    match execute(core, qp, packet, host) {
        Ok(()) => {
            core.paging.went_on(qp.number, Side::Responder);
            if packet.bth.ack_request && !has_answer(packet) {
                qp.transport.responder.acknowledge();
                core.schedule(qp);
            }
        }
        Err(refusal) => match settle(core, qp, psn, refusal, host) {
            // The peer is told nothing, so that it loses nothing: no retry, and no time.
            Refusal::Pending(_) => return Err(Left::Waits(Place::Psn(psn))),
            refusal => {
                let dropped = matches!(refusal, Refusal::Lost);
                refuse(core, qp, packet, refusal, host);
                if dropped {
                    return Err(Left::Dropped);
                }
            }
        },
    }
    Ok(())
}

/// Whether packets that go as one begin before the one that is expected and do not end there.
fn reaches_beyond(packet: &Packet<'_>, expected: u32, log_mtu: u8) -> bool {
    let Payload::Lent(loan) = packet.payload else {
        return false;
    };
    let end = psn_add(packet.bth.psn, packets(loan.len() as u32, log_mtu));
    psn_diff(end, expected) > 0
}

/// Has the requester send again from the sequence number that is expected, which it is told once.
fn ask_again(core: &mut Core, qp: &mut QueuePair) {
    let responder = &mut qp.transport.responder;
    if !responder.told {
        responder.told = true;
        let psn = responder.expected;
        responder.answers.push_back(Answer::NotNow {
            psn,
            syndrome: Syndrome::Nak(NakCode::Sequence),
        });
        core.schedule(qp);
    }
}

/// There was no room for requests up to this sequence number behind those that waited, and these are
/// done. The requester may have nothing more to send that would show that some are missing.
pub(super) fn lost(core: &mut Core, qp: &mut QueuePair, psn: u32) {
    let responder = &qp.transport.responder;
    if !responder.closing && psn_diff(psn, responder.expected) >= 0 {
        ask_again(core, qp);
    }
}

/// A packet of an unreliable connection. When it is dropped its message is, too.
pub(super) fn unreliable_request(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    let outcome = take_unreliable(core, qp, packet, host);
    tell_of_first(core, qp, host);
    outcome
}

fn take_unreliable(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    let responder = &mut qp.transport.responder;
    if packet.info.position.starts() {
        // Whatever was coming in lost its end.
        responder.incoming = Incoming::None;
        responder.expected = packet.bth.psn;
    } else if packet.bth.psn != responder.expected {
        if !matches!(responder.incoming, Incoming::None) {
            count!(core, qp, out_of_sequence);
        }
        responder.incoming = Incoming::None;
        return Err(Left::Dropped);
    }
    match execute(core, qp, packet, host) {
        Ok(()) => {
            core.paging.went_on(qp.number, Side::Responder);
            Ok(())
        }
        Err(refusal) => {
            let refusal = settle(core, qp, packet.bth.psn, refusal, host);
            if matches!(refusal, Refusal::PageAbsent | Refusal::Pending(_)) {
                // It is looked at again as it is.
                return Err(Left::Waits(Place::Last(None)));
            }
            qp.transport.responder.incoming = Incoming::None;
            qp.transport.responder.request_waited = None;
            match refusal {
                // The receive is there for the next message.
                Refusal::Receive {
                    status: CompletionStatus::LocalLength,
                    ..
                }
                | Refusal::NotReady
                | Refusal::PageAbsent
                // Nothing is lent there.
                | Refusal::Lost
                | Refusal::Invalid => {}
                Refusal::Access(_)
                | Refusal::Absent(_)
                | Refusal::AbsentReceive(_)
                | Refusal::Pending(_)
                | Refusal::Table(_)
                | Refusal::TableReceive(_) => {
                    count!(core, qp, access_errors);
                }
                Refusal::Receive {
                    status,
                    vendor_syndrome,
                    ..
                } => match fail_receive(core, qp, status, vendor_syndrome, host) {
                    Ok(()) => qp::enter_error(core, qp, host),
                    Err(_) => qp::fail(core, qp, host),
                },
                Refusal::Failed | Refusal::QueueDead => qp::fail(core, qp, host),
            }
            Err(Left::Dropped)
        }
    }
}

/// What a peer's accesses are checked against: the domain of an extended connection is that of the
/// shared receive queue it names.
fn remote_holder(core: &Core, qp: &QueuePair, packet: &Packet<'_>) -> Result<Holder, Refusal> {
    let pd = match packet.srqn {
        Some(srqn) => core.srqs.domain(srqn, qp.xrcd).ok_or(Refusal::Invalid)?,
        None => qp.pd,
    };
    Ok(Holder { pd, ..qp.holder() })
}

/// A request with an opcode that is not known here.
pub(super) fn unknown(core: &mut Core, qp: &mut QueuePair, bth: &Bth) -> Option<()> {
    let responder = &qp.transport.responder;
    // Only those of this service, and only in their turn.
    let service = match qp.service {
        Service::Rc => 0,
        Service::XrcTgt => 5,
        _ => return None,
    };
    if bth.opcode >> 5 != service || responder.closing || bth.psn != responder.expected {
        return None;
    }
    let event = (EventCode::QueuePairRequestError, 0);
    close(core, qp, bth.psn, NakCode::InvalidRequest, Some(event));
    Some(())
}

/// Whether the request has an answer of its own.
fn has_answer(packet: &Packet<'_>) -> bool {
    matches!(
        packet.info.operation,
        Operation::ReadRequest
            | Operation::CompareSwap
            | Operation::FetchAdd
            | Operation::AtomicWrite
            | Operation::Flush
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_result_is_found_though_sequence_numbers_come_round() {
        let mut responder = Responder::default();
        responder.save(7, 1);
        responder.save(8, 2);
        responder.save(7, 3);
        assert_eq!(responder.saved(7), Some(3));
        assert_eq!(responder.saved(8), Some(2));
        assert_eq!(responder.saved(9), None);
    }

    #[test]
    fn results_of_atomics_are_bounded() {
        let mut responder = Responder::default();
        for n in 0..1000 {
            responder.save(n, u64::from(n));
        }
        assert_eq!(responder.atomics.len(), SAVED_ATOMICS);
        assert_eq!(responder.saved(999), Some(999));
        assert_eq!(responder.saved(0), None);
    }
}
