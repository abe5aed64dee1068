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

use super::requester::packets;
use super::{base_header, invalidates, send_packet, Left};
use crate::core::{Allowance, Core, ReceiveCompletion, Waited};
use crate::cq::CompletionQueueDead;
use crate::memory::Host;
use crate::paging::{Fault, Outcome, Place, Side};
use crate::qp::{self, QueuePair};
use crate::queue::ReceiveRequest;
use crate::roce::{
    psn_add, psn_diff, Aeth, AtomicAckEth, Bth, NakCode, Opcode, Operation, Packet, Position,
    Syndrome, CREDIT_UNLIMITED,
};
use crate::tpt::{Arrival, AtomicOperation, Holder, RemoteAccess, Span, TptError};
use ferrite_abi::{
    CompletionOpcode, CompletionStatus, EventCode, QueuePairStateCode as State, Service,
    ACCESS_FLUSH_GLOBAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    COMPLETION_IMMEDIATE, COMPLETION_INVALIDATED, COMPLETION_SOLICITED, FEATURE_ATOMICS,
    FEATURE_ATOMIC_WRITE, FEATURE_FLUSH, FLUSH_GLOBAL, FLUSH_PERSISTENT, FLUSH_RANGE, FLUSH_REGION,
    MAX_MESSAGE,
};
use std::collections::VecDeque;

/// Answers in the queue beyond which requests are dropped, to be sent again. A peer that keeps to
/// the limit on reads never comes near.
const MAX_ANSWERS: usize = 64;
/// Results of atomics kept for requests that come again.
const SAVED_ATOMICS: usize = 32;
/// What a peer is told to wait at least for a page: code of 2.56 ms.
const PAGE_RNR_TIMER: u8 = 16;
/// Bytes of a read whose pages are looked for before it is begun.
const PROBE: u32 = 1 << 20;

/// An answer not sent yet.
#[derive(Clone, Copy, Debug)]
enum Answer {
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
    fn psn(&self) -> u32 {
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
    fn is_owed(&self) -> bool {
        matches!(
            self,
            Self::Read { fresh: true, .. } | Self::Atomic { fresh: true, .. }
        )
    }
}

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

/// Why a request is refused, and what the consumer of this queue pair is told.
enum Refusal {
    /// The requester is at fault in form.
    Invalid,
    /// The requester may not do this.
    Access,
    /// A receive ends with this status; the code goes to the requester.
    Receive {
        status: CompletionStatus,
        vendor_syndrome: u32,
        code: NakCode,
    },
    /// No receive is at fault, yet the request cannot be carried out.
    Failed,
    /// The completion queue does not take the completion.
    QueueDead,
    /// There is no receive: try later.
    NotReady,
    /// A page is not there: try later.
    PageAbsent,
    /// A page that the peer names is not there, and nobody was asked for it yet.
    Absent(Fault),
    /// A page of a receive is not there, likewise.
    AbsentReceive(Fault),
    /// The tag with this index is pending: the request waits.
    Pending(u32),
    /// The table refuses what the peer names, as far as it knows.
    Table(TptError),
    /// The table refuses a receive, likewise.
    TableReceive(TptError),
}

impl From<TptError> for Refusal {
    fn from(error: TptError) -> Self {
        match error {
            TptError::Absent(fault) => Self::Absent(fault),
            TptError::Pending(index) => Self::Pending(index),
            error => Self::Table(error),
        }
    }
}

/// That a receive cannot be placed.
fn receive_refused(error: TptError) -> Refusal {
    Refusal::Receive {
        status: CompletionStatus::LocalProtection,
        vendor_syndrome: error.vendor_syndrome(),
        code: NakCode::RemoteOperation,
    }
}

/// Has the host see to a page that is not there, and waits for a pending tag, and for commands that
/// may make one; what is refused otherwise stays refused.
fn settle(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    refusal: Refusal,
    host: &mut dyn Host,
) -> Refusal {
    let mut waited = qp.transport.responder.waited(psn);
    let refusal = match refusal {
        Refusal::Table(error) => match core.confirm(error, waited, host) {
            TptError::Pending(index) => Refusal::Pending(index),
            _ => Refusal::Access,
        },
        Refusal::TableReceive(error) => match core.confirm(error, waited, host) {
            TptError::Pending(index) => Refusal::Pending(index),
            error => receive_refused(error),
        },
        refusal => refusal,
    };
    let (fault, otherwise) = match refusal {
        Refusal::Pending(index) => {
            core.wait_for_tag(qp.number, Side::Responder, index, &mut waited);
            qp.transport.responder.request_waited = Some((psn, waited));
            return Refusal::Pending(index);
        }
        Refusal::Absent(fault) => (fault, Refusal::Access),
        Refusal::AbsentReceive(fault) => (fault, receive_refused(TptError::Absent(fault))),
        refusal => return refusal,
    };
    match core.page_fault(qp.number, Side::Responder, fault, host) {
        Outcome::Wait => Refusal::PageAbsent,
        Outcome::Fail => otherwise,
    }
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
    event: Option<EventCode>,
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
    pub(super) fn refused(&self) -> Option<EventCode> {
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
    let ahead = psn_diff(psn, responder.expected);
    if ahead < 0 {
        core.counters.duplicate_requests += 1;
        return duplicate(core, qp, packet).ok_or(Left::Dropped);
    }
    if core.paging.stands_behind(qp.number, psn) {
        // It has not been missed: all before it may have come.
        return Err(Left::Waits(Place::Psn(psn)));
    }
    if ahead > 0 {
        core.counters.out_of_sequence += 1;
        if !responder.told {
            responder.told = true;
            let psn = responder.expected;
            responder.answers.push_back(Answer::NotNow {
                psn,
                syndrome: Syndrome::Nak(NakCode::Sequence),
            });
            core.schedule(qp);
        }
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
            refusal => refuse(core, qp, packet, refusal, host),
        },
    }
    Ok(())
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
            core.counters.out_of_sequence += 1;
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
                | Refusal::Invalid => {}
                Refusal::Access
                | Refusal::Absent(_)
                | Refusal::AbsentReceive(_)
                | Refusal::Pending(_)
                | Refusal::Table(_)
                | Refusal::TableReceive(_) => {
                    core.counters.access_errors += 1;
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

/// Completes the receive in use with an error.
fn fail_receive(
    core: &mut Core,
    qp: &mut QueuePair,
    status: CompletionStatus,
    vendor_syndrome: u32,
    host: &mut dyn Host,
) -> Result<(), CompletionQueueDead> {
    qp.transport.responder.taken = false;
    let completion =
        ReceiveCompletion::failed(&qp.transport.responder.receive, status, vendor_syndrome);
    core.complete_receive(qp, &completion, host)
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
    let event = EventCode::QueuePairRequestError;
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

/// A request that was carried out before: its answer was lost or is late, or the network made a
/// copy of it.
fn duplicate(core: &mut Core, qp: &mut QueuePair, packet: &Packet<'_>) -> Option<()> {
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

/// Carries out a request whose turn it is.
fn execute(
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
    let mtu = qp.mtu();
    let length_fits = match position {
        Position::First | Position::Middle => packet.payload.len() == mtu,
        Position::Last => (1..=mtu).contains(&packet.payload.len()),
        Position::Only if packet.info.payload => packet.payload.len() <= mtu,
        Position::Only => packet.payload.is_empty(),
    };
    if !fits || !length_fits {
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
fn complete_receive(
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
    core.scatter(
        host,
        receive.domain,
        receive.sges(),
        received.into(),
        packet.payload,
    )
    .map_err(|error| match error {
        TptError::Absent(fault) => Refusal::AbsentReceive(fault),
        TptError::Pending(index) => Refusal::Pending(index),
        error => Refusal::TableReceive(error),
    })?;
    let length = packet.payload.len();
    let early = counted || core.uses_early(receive.sges(), received.into(), length);
    core.counters.early_uses += u64::from(early && !counted);
    if !position.ends() {
        let received = total;
        qp.transport.responder.incoming = Incoming::Send { received, early };
        qp.transport.responder.advance(1);
        return Ok(());
    }
    if let Some(tag) = packet.invalidate {
        let holder = remote_holder(core, qp, packet)?;
        // Once for a message, which may have gone to memory that is early too.
        let another = !early && core.tpt.is_early(tag);
        // What could be waited for was looked for before anything was placed.
        let invalidated = core.tpt.invalidate(tag, holder);
        invalidated.map_err(|_| Refusal::Access)?;
        core.counters.early_uses += u64::from(another);
    }
    qp.transport.responder.incoming = Incoming::None;
    complete_receive(core, qp, packet, CompletionOpcode::Receive, total, host)?;
    qp.transport.responder.msn = psn_add(qp.transport.responder.msn, 1);
    qp.transport.responder.advance(1);
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
                return Err(Refusal::Access);
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
    core.tpt
        .write(host, &span, received.into(), packet.payload)?;
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
        responder.advance(1);
        return Ok(());
    }
    responder.incoming = Incoming::None;
    if packet.immediate.is_some() {
        let opcode = CompletionOpcode::ReceiveWrite;
        complete_receive(core, qp, packet, opcode, length, host)?;
    }
    let responder = &mut qp.transport.responder;
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(1);
    Ok(())
}

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

fn read(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let reth = packet.reth.ok_or(Refusal::Invalid)?;
    if qp.attributes.access & ACCESS_REMOTE_READ == 0 {
        return Err(Refusal::Access);
    }
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
    let responder = &mut qp.transport.responder;
    responder.answers.push_back(Answer::Read {
        psn: packet.bth.psn,
        span,
        offset: 0,
        length: reth.length,
        starts: true,
        fresh: true,
    });
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(count);
    core.schedule(qp);
    Ok(())
}

fn atomic(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let atomic = packet.atomic.ok_or(Refusal::Invalid)?;
    if core.features & FEATURE_ATOMICS == 0 {
        return Err(Refusal::Invalid);
    }
    if qp.attributes.access & ACCESS_REMOTE_ATOMIC == 0 {
        return Err(Refusal::Access);
    }
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
    let responder = &mut qp.transport.responder;
    let answer = match operation {
        AtomicOperation::Store(_) => Answer::Placed { psn },
        _ => {
            responder.save(psn, original);
            Answer::Atomic {
                psn,
                original,
                fresh: true,
            }
        }
    };
    responder.answers.push_back(answer);
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(1);
    core.schedule(qp);
    Ok(())
}

fn atomic_write(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Result<(), Refusal> {
    let reth = packet.reth.ok_or(Refusal::Invalid)?;
    if core.features & FEATURE_ATOMIC_WRITE == 0 {
        return Err(Refusal::Invalid);
    }
    if qp.attributes.access & ACCESS_REMOTE_WRITE == 0 {
        return Err(Refusal::Access);
    }
    // Not all requesters take atomic writes for reads in flight; but where there are to be none,
    // there are to be none of these.
    if qp.attributes.ird == 0 {
        return Err(Refusal::Invalid);
    }
    let Ok(bytes) = <[u8; 8]>::try_from(packet.payload) else {
        return Err(Refusal::Invalid);
    };
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

fn flush(
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
    if core.features & FEATURE_FLUSH == 0 || !known {
        return Err(Refusal::Invalid);
    }
    // Nobody can be given the right to ask for persistence.
    if placement & FLUSH_PERSISTENT != 0 || qp.attributes.access & ACCESS_FLUSH_GLOBAL == 0 {
        return Err(Refusal::Access);
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
    let responder = &mut qp.transport.responder;
    let psn = packet.bth.psn;
    responder.answers.push_back(Answer::Placed { psn });
    responder.msn = psn_add(responder.msn, 1);
    responder.advance(1);
    core.schedule(qp);
    Ok(())
}

/// Refuses the request at `packet`, and tells the consumer of this queue pair.
fn refuse(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    refusal: Refusal,
    host: &mut dyn Host,
) {
    let psn = packet.bth.psn;
    let (code, event) = match refusal {
        Refusal::NotReady => {
            let responder = &mut qp.transport.responder;
            responder.told = true;
            responder.answers.push_back(Answer::NotNow {
                psn,
                syndrome: Syndrome::ReceiverNotReady(qp.attributes.min_rnr_timer),
            });
            core.schedule(qp);
            return;
        }
        Refusal::PageAbsent => {
            let least = qp.attributes.min_rnr_timer;
            // Code 0 is the longest.
            let code = if least == 0 {
                0
            } else {
                least.max(PAGE_RNR_TIMER)
            };
            let responder = &mut qp.transport.responder;
            responder.told = true;
            responder.answers.push_back(Answer::NotNow {
                psn,
                syndrome: Syndrome::ReceiverNotReady(code),
            });
            core.schedule(qp);
            return;
        }
        Refusal::Invalid => (
            NakCode::InvalidRequest,
            Some(EventCode::QueuePairRequestError),
        ),
        Refusal::Access
        | Refusal::Absent(_)
        | Refusal::AbsentReceive(_)
        | Refusal::Pending(_)
        | Refusal::Table(_)
        | Refusal::TableReceive(_) => {
            core.counters.access_errors += 1;
            (NakCode::RemoteAccess, Some(EventCode::QueuePairAccessError))
        }
        Refusal::Receive {
            status,
            vendor_syndrome,
            code,
        } => {
            let told = fail_receive(core, qp, status, vendor_syndrome, host);
            (code, told.is_err().then_some(EventCode::QueuePairFatal))
        }
        Refusal::Failed | Refusal::QueueDead => {
            (NakCode::RemoteOperation, Some(EventCode::QueuePairFatal))
        }
    };
    close(core, qp, psn, code, event);
}

/// Has the request at `psn` refused after all that is still to be answered. The consumer of this
/// queue pair is told by `event` when it is in error.
fn close(core: &mut Core, qp: &mut QueuePair, psn: u32, code: NakCode, event: Option<EventCode>) {
    let responder = &mut qp.transport.responder;
    responder.closing = true;
    responder.event = event;
    responder.answers.push_back(Answer::Refuse { psn, code });
    core.schedule(qp);
}

/// The tag of the request at `psn` was revoked before all of it was carried out.
fn revoked(core: &mut Core, qp: &mut QueuePair, psn: u32) {
    core.counters.access_errors += 1;
    qp.transport.responder.answers.clear();
    let event = EventCode::QueuePairAccessError;
    close(core, qp, psn, NakCode::RemoteAccess, Some(event));
}

/// Sends answers and takes them from what is `allowed`; true when more could be sent with more.
pub(super) fn run(
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
        *left -= 1;
        if let Answer::Read { .. } = answer {
            match send_data(core, qp, host) {
                Data::More => {}
                Data::Last => {
                    qp.transport.responder.answers.pop_front();
                }
                Data::Absent => break,
            }
            continue;
        }
        qp.transport.responder.answers.pop_front();
        match answer {
            Answer::Acknowledge { psn } => {
                let syndrome = Syndrome::Ack(CREDIT_UNLIMITED);
                say(core, qp, psn, Opcode::RC_ACKNOWLEDGE, syndrome, None, host);
            }
            Answer::NotNow { psn, syndrome } => {
                match syndrome {
                    Syndrome::ReceiverNotReady(_) => core.counters.rnr_naks_sent += 1,
                    _ => core.counters.naks_sent += 1,
                }
                say(core, qp, psn, Opcode::RC_ACKNOWLEDGE, syndrome, None, host);
            }
            Answer::Atomic { .. } | Answer::Placed { .. } => say_result(core, qp, answer, host),
            Answer::Refuse { psn, code } => {
                core.counters.naks_sent += 1;
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
    let sent = send_packet(core, &template, &bth, host, |frame, _, _| {
        frame.extend_from_slice(&Aeth { syndrome, msn }.to_bytes());
        if let Some(original) = original {
            frame.extend_from_slice(&AtomicAckEth { original }.to_bytes());
        }
        Ok::<(), std::convert::Infallible>(())
    });
    let Ok(()) = sent;
}

/// What became of the next packet of a read.
enum Data {
    /// It was sent, and there are more.
    More,
    /// It was the last.
    Last,
    /// Its page is not there.
    Absent,
}

/// Sends the next packet of the read at the front of the queue.
fn send_data(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> Data {
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
    let payload = left.min(1 << log_mtu);
    let ends = payload == left;
    let opcode = match Position::of(starts, ends) {
        Position::First => Opcode::RC_READ_RESPONSE_FIRST,
        Position::Middle => Opcode::RC_READ_RESPONSE_MIDDLE,
        Position::Last => Opcode::RC_READ_RESPONSE_LAST,
        Position::Only => Opcode::RC_READ_RESPONSE_ONLY,
    };
    let bth = Bth {
        pad: (payload.wrapping_neg() & 3) as u8,
        ..base_header(qp, opcode, psn)
    };
    let aeth = Aeth {
        syndrome: Syndrome::Ack(CREDIT_UNLIMITED),
        msn: qp.transport.responder.msn,
    };
    let sent = send_packet(core, &template, &bth, host, |frame, core, host| {
        if starts || ends {
            frame.extend_from_slice(&aeth.to_bytes());
        }
        let start = frame.len();
        frame.resize(start + payload as usize, 0);
        core.tpt
            .read(host, &span, offset.into(), &mut frame[start..])
    });
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
        return Data::Last;
    }
    if sent.is_err() {
        revoked(core, qp, psn);
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
        *at = psn_add(psn, 1);
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
