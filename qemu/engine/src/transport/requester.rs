// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The requester: takes work requests from the send queue, sends them as packets, sees to it that
//! they arrive, and completes them in order.
//!
//! Every message has a range of sequence numbers: one for each packet sent, or, for a read, one
//! for each packet of the answer. From `una` up to `next` they are on their way. Whatever goes
//! wrong, the way out is the same (go-back-N): continue to send from `una`, which may be in the
//! middle of a message or of the answer to a read.
//!
//! A long read is asked for in several requests, so that neither side has more than about a window
//! of packets to hold against loss, and so that sequence numbers in flight never span half their
//! circle.

use super::delay::{ack_timeout, rnr_delay};
use super::{
    base_header, count_copy, invalidates, lends, lent_size, send_payload, Source, MIN_LENT,
};
use crate::core::{Core, SendCompletion, Waited};
use crate::counters::count;
use crate::loan::{Lender, Loan, Payload};
use crate::memory::{Host, Lending, MAX_LENT};
use crate::paging::{Fault, Outcome, Side};
use crate::qp::{self, LocalError, QueuePair};
use crate::queue::{is_local, registers, QueueError, SendBody, SendRequest};
use crate::roce::{
    psn_add, psn_diff, AtomicEth, Bth, Feth, NakCode, Opcode, Operation, Packet, Position, Reth,
    Syndrome,
};
use crate::tpt::{LocalAccess, TptError};
use crate::Progress;
use ferrite_abi::{
    CompletionStatus, ModifyQueuePair, QueuePairStateCode as State, SendOpcode, FEATURE_ATOMICS,
    FEATURE_ATOMIC_WRITE, FEATURE_FAST_REGISTER, FEATURE_FLUSH, FEATURE_LISTS,
    FEATURE_REGISTER_SEND, FLUSH_GLOBAL, FLUSH_PERSISTENT, FLUSH_RANGE, FLUSH_REGION, MAX_MESSAGE,
    SEND_FENCE, SEND_SOLICITED,
};
use std::collections::VecDeque;

/// Bytes on their way before an acknowledgement is needed.
const WINDOW_BYTES: u32 = 512 << 10;
/// Packets on their way, likewise.
const WINDOW_PACKETS: u32 = 512;
/// An acknowledgement is asked for after this many packets that did not ask for one.
const ACK_REQUEST_PACKETS: u32 = 8;
/// Work requests taken up before the oldest is complete.
const MAX_MESSAGES: usize = 128;
/// Unused messages kept for the next.
const MAX_SPARE: usize = 256;
/// The `rnr_retry` that never gives up.
const RNR_FOR_EVER: u8 = 7;

/// How a work request failed: status and vendor syndrome of its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) status: CompletionStatus,
    pub(super) vendor_syndrome: u32,
}

impl From<CompletionStatus> for Failure {
    fn from(status: CompletionStatus) -> Self {
        Self {
            status,
            vendor_syndrome: 0,
        }
    }
}

impl From<LocalError> for Failure {
    fn from(error: LocalError) -> Self {
        let (status, vendor_syndrome) = error.status();
        Self {
            status,
            vendor_syndrome,
        }
    }
}

impl From<QueueError> for Failure {
    fn from(error: QueueError) -> Self {
        Self {
            status: match error {
                QueueError::TooLong => CompletionStatus::LocalLength,
                _ => CompletionStatus::LocalQueuePairOperation,
            },
            vendor_syndrome: error.vendor_syndrome(),
        }
    }
}

/// A work request taken up and not complete.
#[derive(Debug, Default)]
pub(crate) struct Message {
    request: SendRequest,
    first_psn: u32,
    /// Sequence numbers it takes; none for what is done locally.
    packets: u32,
    /// It cannot be sent (any further); it fails once all before it are complete.
    failure: Option<Failure>,
    /// It is a local operation and was carried out, or has a registration that was.
    done: bool,
    /// What it sends from, or where its answer goes, is to be checked before any of it is sent.
    unchecked: bool,
    /// Its registration was an early use of something.
    early: bool,
    /// How it has waited for tags.
    waited: Waited,
    /// Some of it was found not to be lent: so is the rest.
    unlendable: bool,
    /// What is lent of it is lent until it is complete.
    lender: Lender,
    /// It has made a registration and something before it is open: what [`crate::tpt::Tpt`] calls
    /// that.
    unsettled: Option<u64>,
}

// Documentation/device/14-limits.md says what a guest can have its device take for them.
const _: () = assert!(size_of::<Message>() <= 880);

impl Message {
    /// The sequence number after its last.
    fn end_psn(&self) -> u32 {
        psn_add(self.first_psn, self.packets)
    }

    /// Whether it ends before `psn`, which is not far from one of its own.
    ///
    /// The longest message in the smallest packets spans half the circle of sequence numbers, too
    /// much for [`psn_diff`] to tell before from after; but nothing is ever far beyond its end.
    fn is_before(&self, psn: u32) -> bool {
        psn.wrapping_sub(self.end_psn()) & 0xff_ffff < 1 << 22
    }

    fn is_read(&self) -> bool {
        self.request.opcode == SendOpcode::Read
    }

    fn is_local(&self) -> bool {
        is_local(self.request.opcode)
    }

    /// Whether it registers something and has not done so yet.
    fn is_to_register(&self) -> bool {
        self.request.registration.is_some() && !self.done
    }

    /// Whether it is complete only with an answer of its own, not with an acknowledgement.
    fn is_answered(&self) -> bool {
        self.brings_data()
            || matches!(
                self.request.opcode,
                SendOpcode::AtomicWrite | SendOpcode::Flush
            )
    }

    /// Whether its answer holds data for the scatter/gather entries.
    fn brings_data(&self) -> bool {
        matches!(
            self.request.opcode,
            SendOpcode::Read | SendOpcode::CompareSwap | SendOpcode::FetchAdd
        )
    }

    /// Whether what it sends may be lent, as far as is known.
    fn may_be_lent(&self) -> bool {
        !self.unlendable && self.request.length >= MIN_LENT && self.request.inline().is_none()
    }

    /// Bytes of the message before the packet with sequence number `psn`, which is one of its own.
    fn offset_of(&self, psn: u32, log_mtu: u8) -> u32 {
        (psn.wrapping_sub(self.first_psn) & 0xff_ffff) << log_mtu
    }
}

/// The state of a queue pair as requester.
#[derive(Debug, Default)]
pub(super) struct Requester {
    messages: VecDeque<Box<Message>>,
    /// The message the next packet belongs to; the number of messages when another is to be taken.
    cursor: usize,
    /// Oldest sequence number not acknowledged.
    una: u32,
    /// The next to send.
    next: u32,
    /// The first never sent.
    fresh: u32,
    /// The first of the next message to be taken up.
    unassigned: u32,
    /// Ends of the reads and atomics in flight, oldest first.
    reads: VecDeque<u32>,
    /// Retries left before giving up on the oldest packet.
    retries: u8,
    rnr_retries: u8,
    /// Waits in a row in which nothing was acknowledged: the next one is longer.
    timeouts: u8,
    /// Went back to this sequence number on the responder's word, and nothing came of it yet:
    /// another word to the same effect is an echo of the first.
    went_back_to: Option<u32>,
    /// The timer stands for the end of a receiver-not-ready delay, not for a lost answer.
    waiting_for_receiver: bool,
    since_ack_request: u32,
    /// A page of an on-demand region is not there, or the place of an answer is under a pending tag;
    /// nothing is sent until that is over.
    waiting_for_page: bool,
    /// Something went wrong with the oldest packet: until it is taken, nothing is lent. Of packets that go
    /// as one all are taken or none, so that a receiver could find no place for them for ever; and what
    /// became of a loan once may become of it again.
    hands_over: bool,
    /// What is waited for is the place of an answer, which was thrown away: it has to be asked for
    /// again, and what comes until then is thrown away too.
    answer_lost: bool,
}

impl Requester {
    /// Starts with the attributes of state RTS.
    pub(super) fn start(&mut self, attributes: &ModifyQueuePair) {
        *self = Self {
            una: attributes.send_psn,
            next: attributes.send_psn,
            fresh: attributes.send_psn,
            unassigned: attributes.send_psn,
            retries: attributes.retry_count,
            rnr_retries: attributes.rnr_retry,
            ..Self::default()
        };
    }

    /// The next sequence number of a message, for queries.
    pub(super) fn psn(&self) -> u32 {
        self.unassigned
    }

    /// The oldest sequence number not acknowledged.
    pub(super) fn una(&self) -> u32 {
        self.una
    }

    /// Messages that were taken up and are not complete.
    pub(super) fn messages_under_way(&self) -> usize {
        self.messages.len()
    }

    fn in_flight(&self) -> u32 {
        self.next.wrapping_sub(self.una) & 0xff_ffff
    }

    /// Takes over how often is tried again from now on.
    pub(super) fn set_retries(&mut self, attributes: &ModifyQueuePair) {
        self.retries = attributes.retry_count;
        self.rnr_retries = attributes.rnr_retry;
    }

    /// Everything up to `una` has arrived.
    fn progress(&mut self, una: u32, attributes: &ModifyQueuePair) {
        self.una = una;
        // A late acknowledgement may overtake what was being sent again.
        if psn_diff(una, self.next) > 0 {
            self.seek(una);
        }
        while self
            .reads
            .front()
            .is_some_and(|&end| psn_diff(una, end) >= 0)
        {
            self.reads.pop_front();
        }
        self.set_retries(attributes);
        self.timeouts = 0;
        self.went_back_to = None;
        self.waiting_for_receiver = false;
        self.hands_over = false;
    }

    /// Has the packet `psn` sent next.
    fn seek(&mut self, psn: u32) {
        self.next = psn;
        self.cursor = self
            .messages
            .iter()
            .position(|message| {
                if message.packets == 0 {
                    !message.done || message.failure.is_some()
                } else {
                    !message.is_before(psn)
                }
            })
            .unwrap_or(self.messages.len());
        // Everything that ends later is asked for again, from here on.
        while self.reads.back().is_some_and(|&end| psn_diff(end, psn) > 0) {
            self.reads.pop_back();
        }
        self.since_ack_request = 0;
    }
}

/// Packets in flight at most.
fn window(log_mtu: u8) -> u32 {
    (WINDOW_BYTES >> log_mtu).min(WINDOW_PACKETS)
}

/// The same before a packet of this message, of a queue pair that lends or does not. What is handed over
/// takes room on its way, whoever it goes to.
fn window_of(qp: &QueuePair, message: &Message, lends: Option<Lending>) -> u32 {
    let log_mtu = qp.attributes.log_mtu;
    match lends {
        Some(lending) if message.is_answered() || message.may_be_lent() => {
            lending.under_way >> log_mtu
        }
        _ => window(log_mtu),
    }
}

/// How many bytes of a read are asked for in one request that begins at `offset`, where `left` are to
/// come. Always up to the same places: a request that is repeated in part must not reach beyond the
/// one it repeats.
fn asked_for(offset: u32, left: u32, log_mtu: u8) -> u32 {
    let piece = (window(log_mtu) / 2) << log_mtu;
    left.min(piece - offset % piece)
}

/// Packets of a message of `length` bytes.
pub(super) fn packets(length: u32, log_mtu: u8) -> u32 {
    length.div_ceil(1 << log_mtu).max(1)
}

/// Sends what may be sent, at most `budget` packets. With no budget it says whether one is needed.
pub(super) fn run(
    core: &mut Core,
    qp: &mut QueuePair,
    host: &mut dyn Host,
    budget: u32,
) -> Progress {
    let mut left = budget;
    let lends = lends(core, qp, host).filter(|_| !qp.transport.requester.hands_over);
    while left > 0 {
        if !matches!(qp.state, State::Rts | State::Sqd)
            || qp.transport.requester.waiting_for_receiver
            || qp.transport.requester.waiting_for_page
        {
            break;
        }
        let requester = &qp.transport.requester;
        if requester.cursor == requester.messages.len() && !take_up(core, qp, host) {
            break;
        }
        if !step(core, qp, (lends, &mut left), host) {
            break;
        }
        // Local operations, and failures that nothing stands before, end at once.
        complete(core, qp, host);
    }
    complete(core, qp, host);
    watch(core, qp, false);
    let more = left == 0 && (budget > 0 || wants_to_send(qp, lends, host));
    let requester = &qp.transport.requester;
    if requester.waiting_for_page {
        Progress::Blocked
    } else if more {
        Progress::More
    } else if requester.cursor == requester.messages.len() && !qp.send.has_next() {
        Progress::Drained
    } else {
        Progress::Blocked
    }
}

/// Whether there is something to send now, as far as can be told without sending it.
fn wants_to_send(qp: &mut QueuePair, lends: Option<Lending>, host: &mut dyn Host) -> bool {
    let requester = &qp.transport.requester;
    if !matches!(qp.state, State::Rts | State::Sqd) || requester.waiting_for_receiver {
        return false;
    }
    if let Some(message) = requester.messages.get(requester.cursor) {
        return requester.in_flight() < window_of(qp, message, lends);
    }
    // A record that makes no sense is found out in the queue pair's turn.
    qp.may_send() && (qp.send.has_next() || qp.send.refresh(host).is_err() || qp.send.has_next())
}

/// Takes the next work request up; false when there is none that may be.
fn take_up(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    let requester = &mut qp.transport.requester;
    if !matches!(qp.state, State::Rts)
        || requester.messages.len() >= MAX_MESSAGES
        || requester
            .messages
            .back()
            .is_some_and(|message| message.failure.is_some())
    {
        return false;
    }
    if !qp.send.has_next() {
        if qp.send.refresh(host).is_err() {
            // The record is unreadable or makes no sense, and no work request is to blame.
            qp::fail(core, qp, host);
            return false;
        }
        if !qp.send.has_next() {
            return false;
        }
    }
    let mut message = core.transport.spare.pop().unwrap_or_default();
    let fetched = qp.send.fetch(host, qp.send.next(), &mut message.request);
    qp.send.advance(message.request.end());
    message.first_psn = requester.unassigned;
    message.done = false;
    message.unlendable = false;
    message.unchecked = false;
    message.early = false;
    message.waited = Waited::default();
    message.unsettled = None;
    message.packets = if message.is_local() {
        0
    } else {
        packets(message.request.length, qp.attributes.log_mtu)
    };
    message.failure = match fetched {
        Ok(()) => check(core, qp, &mut message, host),
        Err(error) => Some(error.into()),
    };
    if message.failure.is_some() {
        message.packets = 0;
    }
    let requester = &mut qp.transport.requester;
    requester.unassigned = message.end_psn();
    requester.messages.push_back(message);
    core.transport.under_way += 1;
    true
}

/// What is wrong with a well-formed work request, before any of it is sent.
fn check(
    core: &mut Core,
    qp: &mut QueuePair,
    message: &mut Message,
    host: &mut dyn Host,
) -> Option<Failure> {
    let request = &message.request;
    let opcode = request.opcode;
    // Extended connections have neither of these.
    let unknown_there = matches!(opcode, SendOpcode::AtomicWrite | SendOpcode::Flush);
    let agreed_on = is_agreed_on(core, request.posted) && is_agreed_on(core, opcode);
    if !agreed_on || unknown_there && qp.is_extended() {
        return Some(QueueError::Opcode.into());
    }
    if let SendBody::Flush(part) = &message.request.body {
        let known = FLUSH_GLOBAL | FLUSH_PERSISTENT;
        if part.placement == 0
            || part.placement & !known != 0
            || !matches!(part.selectivity, FLUSH_RANGE | FLUSH_REGION)
            || part.length > MAX_MESSAGE
        {
            return Some(QueueError::Flags.into());
        }
    }
    if message.is_answered() && qp.attributes.ord == 0 {
        return Some(CompletionStatus::LocalQueuePairOperation.into());
    }
    if message.is_to_register() {
        // What it sends may be under the tag that it registers.
        return None;
    }
    match check_data(core, qp, message, host) {
        Ok(()) => None,
        Err(Stop::Failed(failure)) => {
            count!(core, qp, access_errors);
            Some(failure)
        }
        Err(Stop::Pending(_)) => {
            // It is looked at again in its turn, and waits then.
            message.unchecked = true;
            None
        }
    }
}

/// Why a work request goes no further.
enum Stop {
    Failed(Failure),
    /// What becomes of the tag with this index has to be seen.
    Pending(u32),
}

/// What is wrong with the memory of a work request's data, before any of it is sent.
fn check_data(
    core: &mut Core,
    qp: &QueuePair,
    message: &Message,
    host: &mut dyn Host,
) -> Result<(), Stop> {
    let access = if message.brings_data() {
        LocalAccess::Write
    } else {
        LocalAccess::Read
    };
    let sges = message.request.sges();
    let result = core.check_sges(qp.domain(), sges, access);
    let result = result.map_err(|error| core.confirm(error, message.waited, host));
    if let Err(TptError::Pending(index)) = result {
        return Err(Stop::Pending(index));
    }
    let length = message.request.length as usize;
    let early = message.early || result.is_ok() && core.uses_early(sges, 0, length);
    core.counters.early_uses += u64::from(early);
    result.map_err(|error| {
        Stop::Failed(Failure {
            status: CompletionStatus::LocalProtection,
            vendor_syndrome: error.vendor_syndrome(),
        })
    })
}

/// The message under the cursor waits for what becomes of a tag; what was sent before it does not,
/// nor does what has to be sent again.
fn wait_for_tag(core: &mut Core, qp: &mut QueuePair, index: u32) -> bool {
    let requester = &mut qp.transport.requester;
    if let Some(message) = requester.messages.get_mut(requester.cursor) {
        core.wait_for_tag(qp.number, Side::Requester, index, &mut message.waited);
    }
    false
}

/// Checks the memory of the message under the cursor, which could not be done when it was taken up;
/// false when it waits, or something is wrong.
fn check_now(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    let cursor = qp.transport.requester.cursor;
    let checked = check_data(core, qp, &qp.transport.requester.messages[cursor], host);
    let requester = &mut qp.transport.requester;
    let message = &mut requester.messages[cursor];
    match checked {
        Ok(()) => {
            message.unchecked = false;
            true
        }
        Err(Stop::Pending(index)) => wait_for_tag(core, qp, index),
        Err(Stop::Failed(failure)) => {
            count!(core, qp, access_errors);
            message.failure = Some(failure);
            false
        }
    }
}

/// Whether host and device have agreed on what such a work request needs.
pub(super) fn is_agreed_on(core: &Core, opcode: SendOpcode) -> bool {
    let has = |feature| core.features & feature != 0;
    match opcode {
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => has(FEATURE_ATOMICS),
        SendOpcode::AtomicWrite => has(FEATURE_ATOMIC_WRITE),
        SendOpcode::Flush => has(FEATURE_FLUSH),
        SendOpcode::SendInvalidate => invalidates(core),
        SendOpcode::FastRegister => has(FEATURE_FAST_REGISTER),
        SendOpcode::RegisterSend => has(FEATURE_REGISTER_SEND),
        SendOpcode::RegisterList | SendOpcode::RegisterListSend => has(FEATURE_LISTS),
        // The others are not optional, or are judged where they are carried out.
        _ => true,
    }
}

/// Carries out a local operation or sends the next packet, or several where the data can be lent; false
/// when neither may be done now. What it takes of the `budget`, of which there is some, it takes away.
fn step(
    core: &mut Core,
    qp: &mut QueuePair,
    (lends, budget): (Option<Lending>, &mut u32),
    host: &mut dyn Host,
) -> bool {
    let requester = &qp.transport.requester;
    let cursor = requester.cursor;
    let Some(message) = requester.messages.get(cursor) else {
        return false;
    };
    if message.failure.is_some() {
        return false;
    }
    if message.request.flags & SEND_FENCE != 0
        && requester
            .messages
            .iter()
            .take(cursor)
            .any(|earlier| earlier.is_answered())
    {
        return false;
    }
    if message.is_local() {
        let done = local(core, qp, host);
        *budget -= u32::from(done);
        return done;
    }
    if message.is_to_register() && !register(core, qp, host) {
        return false;
    }
    if qp.transport.requester.messages[cursor].unchecked && !check_now(core, qp, host) {
        return false;
    }
    let requester = &qp.transport.requester;
    let message = &requester.messages[cursor];
    let Some(template) = qp.transport.template else {
        let failure = CompletionStatus::LocalQueuePairOperation.into();
        qp.transport.requester.messages[cursor].failure = Some(failure);
        return false;
    };
    let log_mtu = qp.attributes.log_mtu;
    let window = window_of(qp, message, lends);
    let answered = message.is_answered();
    if requester.in_flight() >= window
        || answered && requester.reads.len() >= usize::from(qp.attributes.ord)
    {
        return false;
    }
    let psn = requester.next;
    let offset = message.offset_of(psn, log_mtu);
    let left = message.request.length - offset;
    let most = (*budget).min(window - requester.in_flight());
    let size = lends
        .filter(|_| !answered && message.may_be_lent())
        .and_then(|lending| lent_size(lending, offset, left, most, log_mtu, MIN_LENT));
    let loan = size.and_then(|size| lend(core, qp, message, (offset, size), host));
    if size.is_some() && loan.is_none() {
        // It may go on later: less of it may be under way than was thought.
        qp.transport.requester.messages[cursor].unlendable = true;
        return true;
    }
    // How far this packet carries the message: a read request as far as what it asks for.
    let (length, advance) = if message.is_read() {
        let length = asked_for(offset, left, log_mtu);
        (length, packets(length, log_mtu))
    } else if let Some(loan) = &loan {
        let length = loan.len() as u32;
        (length, packets(length, log_mtu))
    } else {
        (left.min(1 << log_mtu), 1)
    };
    let sent_packets = if answered { 1 } else { advance };
    let after = psn_add(psn, advance);
    let ends = after == message.end_psn();
    let position = Position::of(psn == message.first_psn, ends);
    // Ask for an acknowledgement where the message ends, and often enough in between that the
    // window does not close for want of one, and that a slow peer shows progress within a timeout.
    let ack_request = ends
        || answered
        || requester.since_ack_request + sent_packets >= ACK_REQUEST_PACKETS
        || requester.in_flight() + sent_packets >= window;
    let payload = if message.brings_data() { 0 } else { length };
    if message.brings_data() {
        // Whatever comes back should find its place.
        let sges = message.request.sges();
        let probed = core.probe(&*host, qp.domain(), sges, offset.into(), length as usize);
        match probed {
            Err(TptError::Absent(fault)) => return absent(core, qp, fault, host),
            Err(TptError::Pending(index)) => return wait_for_tag(core, qp, index),
            _ => {}
        }
    }
    let requester = &qp.transport.requester;
    let message = &requester.messages[cursor];
    let bth = Bth {
        solicited: ends && message.request.flags & SEND_SOLICITED != 0,
        ack_request,
        ..base_header(qp, wire_opcode(message.request.opcode, position), psn)
    };
    let domain = qp.domain();
    let (request, waited) = (&message.request, message.waited);
    let extended = qp.is_extended();
    let headers = |frame: &mut Vec<u8>| {
        if extended {
            frame.extend_from_slice(&(request.srqn & 0xff_ffff).to_be_bytes());
        }
        extend_headers(frame, request, position, offset, length);
    };
    let source = match loan {
        Some(loan) => Source::Lent(loan, sent_packets),
        None => Source::Copied(
            payload,
            |to: &mut [u8], core: &Core, host: &mut dyn Host| {
                core.gather(host, domain, request, offset.into(), to)
            },
        ),
    };
    let counters = &mut qp.counters;
    let sent = send_payload(core, counters, &template, bth, source, host, headers);
    let sent = sent.map_err(|error| core.confirm(error, waited, host));
    match sent {
        Err(TptError::Absent(fault)) => return absent(core, qp, fault, host),
        Err(TptError::Pending(index)) => return wait_for_tag(core, qp, index),
        _ => {}
    }
    core.paging.went_on(qp.number, Side::Requester);
    let requester = &mut qp.transport.requester;
    if let Err(error) = sent {
        count!(core, qp, access_errors);
        requester.messages[cursor].failure = Some(Failure {
            status: CompletionStatus::LocalProtection,
            vendor_syndrome: error.vendor_syndrome(),
        });
        return false;
    }
    let again = psn_diff(requester.fresh, psn);
    if again > 0 {
        let times = sent_packets.min(again as u32);
        count!(core, qp, retransmissions, u64::from(times));
    }
    if answered {
        requester.reads.push_back(after);
    }
    requester.since_ack_request = if ack_request {
        0
    } else {
        requester.since_ack_request + sent_packets
    };
    *budget -= sent_packets.min(*budget);
    requester.next = after;
    if psn_diff(after, requester.fresh) > 0 {
        requester.fresh = after;
    }
    if ends {
        requester.cursor += 1;
    }
    true
}

/// Lends so many bytes of a message from `offset` on; `None` where that cannot be.
fn lend(
    core: &Core,
    qp: &QueuePair,
    message: &Message,
    (offset, size): (u32, u32),
    host: &dyn Host,
) -> Option<Loan> {
    let log_mtu = qp.attributes.log_mtu;
    let (request, size) = (&message.request, (size as usize, log_mtu));
    let mut loan = core.lend(host, qp.domain(), request, offset.into(), size)?;
    loan.depend_on(&message.lender);
    Some(loan)
}

/// A page that the message under the cursor needs is not there: waits for it, or fails the
/// message. Nothing more may be done now.
fn absent(core: &mut Core, qp: &mut QueuePair, fault: Fault, host: &mut dyn Host) -> bool {
    let outcome = core.page_fault(qp.number, Side::Requester, fault, host);
    let requester = &mut qp.transport.requester;
    match outcome {
        Outcome::Wait => requester.waiting_for_page = true,
        Outcome::Fail => {
            count!(core, qp, access_errors);
            if let Some(message) = requester.messages.get_mut(requester.cursor) {
                message.failure = Some(Failure {
                    status: CompletionStatus::LocalProtection,
                    vendor_syndrome: TptError::Absent(fault).vendor_syndrome(),
                });
            }
        }
    }
    false
}

/// The host has dealt with the page that was waited for.
pub(super) fn page_resolved(core: &mut Core, qp: &mut QueuePair) {
    let requester = &mut qp.transport.requester;
    requester.waiting_for_page = false;
    if requester.answer_lost {
        requester.answer_lost = false;
        requester.went_back_to = None;
        requester.seek(requester.una);
    }
    if matches!(qp.state, State::Rts | State::Sqd) {
        watch(core, qp, true);
    }
}

/// Carries out the local operation under the cursor, if its turn has come.
fn local(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    let cursor = qp.transport.requester.cursor;
    let message = &qp.transport.requester.messages[cursor];
    if !message.done {
        // What came before may have to be sent again, from memory under the tag to invalidate.
        if message.request.opcode == SendOpcode::LocalInvalidate && cursor > 0 {
            return false;
        }
        let result = qp::execute_local(core, qp, &message.request, message.waited, host);
        if let Err(LocalError::Table(TptError::Pending(index)))
        | Err(LocalError::Bind(TptError::Pending(index))) = result
        {
            return wait_for_tag(core, qp, index);
        }
        let message = &mut qp.transport.requester.messages[cursor];
        if let Err(error) = result {
            message.failure = Some(error.into());
            return false;
        }
        message.done = true;
        if let Some(registration) = &message.request.registration {
            if cursor > 0 {
                message.unsettled = Some(core.tpt.unsettled(registration.tag()));
            }
        }
    }
    qp.transport.requester.cursor += 1;
    true
}

/// Carries out the registration of the message under the cursor, which then sends; false when it waits,
/// or something is wrong.
fn register(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    let cursor = qp.transport.requester.cursor;
    let message = &qp.transport.requester.messages[cursor];
    let result = qp::register(core, qp, &message.request, message.waited, host);
    if let Err(LocalError::Table(TptError::Pending(index))) = result {
        return wait_for_tag(core, qp, index);
    }
    let requester = &mut qp.transport.requester;
    let message = &mut requester.messages[cursor];
    match result {
        Ok(early) => message.early = early,
        Err(error) => {
            message.failure = Some(error.into());
            // It is the last one taken up, and nothing of it was sent: where the queue goes on, the
            // next one has its sequence numbers.
            message.packets = 0;
            requester.unassigned = message.first_psn;
            return false;
        }
    }
    message.done = true;
    // What it sends may be under the tag that it has registered.
    message.unchecked = true;
    if let (Some(registration), true) = (&message.request.registration, cursor > 0) {
        message.unsettled = Some(core.tpt.unsettled(registration.tag()));
    }
    true
}

/// Forgets what registrations are waiting for, of a queue pair that forgets everything.
pub(super) fn settle_all(core: &mut Core, qp: &mut QueuePair) {
    for message in &mut qp.transport.requester.messages {
        settle(core, message);
    }
}

/// Nothing before this message is open.
fn settle(core: &mut Core, message: &mut Message) {
    if let (Some(generation), Some(registration)) =
        (message.unsettled.take(), &message.request.registration)
    {
        core.tpt.settled(registration.tag(), generation);
    }
}

/// The opcode on the wire.
pub(super) fn wire_opcode(opcode: SendOpcode, position: Position) -> u8 {
    use Position::{First, Last, Middle, Only};
    // First, middle, last, only.
    let [first, middle, last, only] = match opcode {
        SendOpcode::Send => [
            Opcode::RC_SEND_FIRST,
            Opcode::RC_SEND_MIDDLE,
            Opcode::RC_SEND_LAST,
            Opcode::RC_SEND_ONLY,
        ],
        SendOpcode::SendImmediate => [
            Opcode::RC_SEND_FIRST,
            Opcode::RC_SEND_MIDDLE,
            Opcode::RC_SEND_LAST_IMMEDIATE,
            Opcode::RC_SEND_ONLY_IMMEDIATE,
        ],
        SendOpcode::SendInvalidate => [
            Opcode::RC_SEND_FIRST,
            Opcode::RC_SEND_MIDDLE,
            Opcode::RC_SEND_LAST_INVALIDATE,
            Opcode::RC_SEND_ONLY_INVALIDATE,
        ],
        SendOpcode::Write => [
            Opcode::RC_WRITE_FIRST,
            Opcode::RC_WRITE_MIDDLE,
            Opcode::RC_WRITE_LAST,
            Opcode::RC_WRITE_ONLY,
        ],
        SendOpcode::WriteImmediate => [
            Opcode::RC_WRITE_FIRST,
            Opcode::RC_WRITE_MIDDLE,
            Opcode::RC_WRITE_LAST_IMMEDIATE,
            Opcode::RC_WRITE_ONLY_IMMEDIATE,
        ],
        SendOpcode::CompareSwap => [Opcode::RC_COMPARE_SWAP; 4],
        SendOpcode::FetchAdd => [Opcode::RC_FETCH_ADD; 4],
        SendOpcode::AtomicWrite => [Opcode::RC_ATOMIC_WRITE; 4],
        SendOpcode::Flush => [Opcode::RC_FLUSH; 4],
        // Local operations are never sent.
        SendOpcode::RegisterSend
        | SendOpcode::RegisterList
        | SendOpcode::RegisterListSend
        | SendOpcode::Read
        | SendOpcode::LocalInvalidate
        | SendOpcode::FastRegister
        | SendOpcode::Bind => [Opcode::RC_READ_REQUEST; 4],
    };
    match position {
        First => first,
        Middle => middle,
        Last => last,
        Only => only,
    }
}

/// Appends the extension headers of a packet of `request`; `length` is what a read asks for.
pub(super) fn extend_headers(
    frame: &mut Vec<u8>,
    request: &SendRequest,
    position: Position,
    offset: u32,
    length: u32,
) {
    match (&request.body, request.opcode) {
        (SendBody::Remote(part), SendOpcode::Read) => {
            let reth = Reth {
                address: part.address.wrapping_add(offset.into()),
                rkey: part.rkey,
                length,
            };
            frame.extend_from_slice(&reth.to_bytes());
        }
        (SendBody::Remote(part), _) if position.starts() => {
            let reth = Reth {
                address: part.address,
                rkey: part.rkey,
                length: request.length,
            };
            frame.extend_from_slice(&reth.to_bytes());
        }
        (SendBody::Atomic(part), _) => {
            let atomic = AtomicEth {
                address: part.address,
                rkey: part.rkey,
                operand: part.operand,
                compare: part.compare,
            };
            frame.extend_from_slice(&atomic.to_bytes());
        }
        (SendBody::Flush(part), _) => {
            let feth = Feth {
                placement: part.placement as u8,
                selectivity: part.selectivity as u8,
            };
            let reth = Reth {
                address: part.address,
                rkey: part.rkey,
                length: part.length,
            };
            frame.extend_from_slice(&feth.to_bytes());
            frame.extend_from_slice(&reth.to_bytes());
        }
        _ => {}
    }
    if position.ends() {
        match request.opcode {
            // In wire order in the work request already.
            SendOpcode::SendImmediate | SendOpcode::WriteImmediate => {
                frame.extend_from_slice(&request.immediate.to_le_bytes());
            }
            SendOpcode::SendInvalidate => {
                frame.extend_from_slice(&request.tag.to_be_bytes());
            }
            _ => {}
        }
    }
}

/// Completes the oldest messages as far as they are done, and the first that failed, after which
/// the queue pair is in the error state.
fn complete(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    loop {
        let requester = &mut qp.transport.requester;
        let Some(front) = requester.messages.front_mut() else {
            return;
        };
        settle(core, front);
        if let Some(failure) = front.failure {
            fail(core, qp, failure, host);
            return;
        }
        let finished = if front.is_local() {
            front.done
        } else {
            front.is_before(requester.una)
        };
        if !finished {
            return;
        }
        let Some(mut message) = requester.messages.pop_front() else {
            return;
        };
        message.lender.end();
        core.transport.under_way -= 1;
        requester.cursor = requester.cursor.saturating_sub(1);
        if message.brings_data() {
            core.tpt.touch_local(message.request.sges(), qp.domain());
        }
        let completion = SendCompletion::of(&message.request, CompletionStatus::Success);
        if core.transport.spare.len() < MAX_SPARE {
            core.transport.spare.push(message);
        }
        if core.complete_send(qp, &completion, host).is_err() {
            qp::fail(core, qp, host);
            return;
        }
    }
}

/// Fails the oldest message and with it the queue pair.
fn fail(core: &mut Core, qp: &mut QueuePair, failure: Failure, host: &mut dyn Host) {
    let Some(mut message) = qp.transport.requester.messages.pop_front() else {
        return;
    };
    message.lender.end();
    core.transport.under_way -= 1;
    let completion = SendCompletion {
        byte_count: 0,
        vendor_syndrome: failure.vendor_syndrome,
        ..SendCompletion::of(&message.request, failure.status)
    };
    // Only what the registration itself did not survive: not what was sent after it.
    let posted = message.request.posted;
    let unregistered = message.failure.is_some() && registers(posted) && !message.done;
    match core.complete_send(qp, &completion, host) {
        Ok(()) if unregistered && qp.drains() && is_agreed_on(core, posted) => {
            // It was the last one taken up.
            qp.transport.requester.cursor = 0;
            qp::stop_sending(core, qp, host);
        }
        Ok(()) => qp::enter_error(core, qp, host),
        Err(_) => qp::fail(core, qp, host),
    }
}

/// Starts the timer for an answer, where answers are waited for with an end.
fn start_waiting(core: &mut Core, qp: &mut QueuePair) {
    let timeouts = qp.transport.requester.timeouts;
    if let Some(timeout) = ack_timeout(qp.attributes.timeout, timeouts) {
        let deadline = core.now.saturating_add(timeout);
        core.start_timer(qp, deadline);
    }
}

/// Starts the timer where an answer is awaited and none runs (or `again`), stops it where none is.
fn watch(core: &mut Core, qp: &mut QueuePair, again: bool) {
    let requester = &qp.transport.requester;
    if requester.waiting_for_receiver {
        return;
    }
    if requester.in_flight() == 0 || requester.answer_lost {
        qp.timer.stop();
        return;
    }
    if again || !qp.timer.is_running() {
        start_waiting(core, qp);
    }
}

/// Keeps the timer of a queue pair going that went back and cannot send again for want of room.
pub(super) fn watch_in_line(core: &mut Core, qp: &mut QueuePair) {
    let requester = &qp.transport.requester;
    if requester.fresh == requester.una
        || requester.answer_lost
        || qp.timer.is_running()
        || !matches!(qp.state, State::Rts | State::Sqd)
    {
        return;
    }
    start_waiting(core, qp);
}

/// The timer ran out: an answer is missing, or the receiver was given its time.
pub(super) fn expired(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if !matches!(qp.state, State::Rts | State::Sqd) {
        return;
    }
    let requester = &mut qp.transport.requester;
    if requester.waiting_for_receiver {
        requester.waiting_for_receiver = false;
        core.schedule(qp);
        return;
    }
    let in_line = qp.waits_for_room.is_some() && requester.fresh != requester.una;
    if requester.in_flight() == 0 && !in_line {
        return;
    }
    if requester.waiting_for_page {
        // Nothing can be sent again now; the peer is not to blame.
        watch(core, qp, true);
        return;
    }
    count!(core, qp, ack_timeouts);
    // Whoever it was that was heard.
    qp.transport.peer_is_inside = false;
    let requester = &mut qp.transport.requester;
    requester.timeouts = requester.timeouts.saturating_add(1);
    if in_line {
        // Nothing could be sent again now, and what is missing may not have got further than the
        // queue that has no room: but a peer that takes nothing for ever is as good as gone.
        if spend_retry(core, qp, host) {
            watch_in_line(core, qp);
        }
        return;
    }
    retry(core, qp, host);
}

/// Counts another try; false when there are none left and the oldest message has failed.
fn spend_retry(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    let requester = &mut qp.transport.requester;
    if requester.retries == 0 {
        fail(core, qp, CompletionStatus::RetryExceeded.into(), host);
        return false;
    }
    requester.retries -= 1;
    true
}

/// Sends again from the oldest packet not acknowledged, or gives up on it.
fn retry(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if !spend_retry(core, qp, host) {
        return;
    }
    let requester = &mut qp.transport.requester;
    requester.went_back_to = None;
    requester.hands_over = true;
    requester.seek(requester.una);
    watch(core, qp, true);
    core.schedule(qp);
}

/// Goes back because the responder said or showed that it misses a packet; once for each.
fn go_back(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    let requester = &mut qp.transport.requester;
    let una = requester.una;
    if requester.went_back_to == Some(una) || requester.in_flight() == 0 {
        return;
    }
    retry(core, qp, host);
    qp.transport.requester.went_back_to = Some(una);
}

/// What an acknowledgement did.
#[derive(PartialEq, Eq)]
enum Acknowledged {
    /// Everything up to the packet it names is acknowledged.
    All,
    /// An answer to a read or atomic before that packet is missing, and is asked for again.
    AnswerMissing,
}

/// Everything before `psn` has arrived at the responder.
fn acknowledge(core: &mut Core, qp: &mut QueuePair, psn: u32, host: &mut dyn Host) -> Acknowledged {
    let requester = &mut qp.transport.requester;
    // An answer is awaited from here on; a mere acknowledgement cannot pass it.
    let una = requester.una;
    let barrier = requester
        .messages
        .iter()
        .take_while(|message| psn_diff(psn, message.first_psn) > 0)
        .find(|message| message.is_answered() && message.packets > 0 && !message.is_before(una))
        .map(|message| message.first_psn);
    let reached = match barrier {
        Some(barrier) if psn_diff(psn, barrier) > 0 => barrier,
        _ => psn,
    };
    if psn_diff(reached, una) > 0 {
        requester.progress(reached, &qp.attributes);
        complete(core, qp, host);
        watch(core, qp, true);
        core.schedule(qp);
    }
    // The acknowledged packets may include answers already received.
    if psn_diff(psn, qp.transport.requester.una) > 0 && qp.state != State::Error {
        go_back(core, qp, host);
        return Acknowledged::AnswerMissing;
    }
    Acknowledged::All
}

/// A packet from the responder; `None` when it is dropped.
pub(super) fn response(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Option<()> {
    if !matches!(qp.state, State::Rts | State::Sqd) {
        return None;
    }
    let psn = packet.bth.psn;
    let requester = &qp.transport.requester;
    if requester.answer_lost {
        return None;
    }
    // Answers to what was never asked, and to what was answered long ago.
    if psn_diff(psn, requester.fresh) >= 0 {
        return None;
    }
    let stale = psn_diff(psn, requester.una) < 0;
    match packet.info.operation {
        Operation::ReadResponse | Operation::AtomicAcknowledge => {
            if stale {
                return None;
            }
            answer(core, qp, packet, host)
        }
        _ => {
            let aeth = packet.aeth?;
            match aeth.syndrome {
                Syndrome::Ack(_) => {
                    if stale {
                        return None;
                    }
                    acknowledge(core, qp, psn_add(psn, 1), host);
                }
                Syndrome::ReceiverNotReady(code) => {
                    count!(core, qp, rnr_naks_received);
                    if stale {
                        return None;
                    }
                    receiver_not_ready(core, qp, psn, code, host);
                }
                Syndrome::Nak(code) => {
                    count!(core, qp, naks_received);
                    if stale {
                        return None;
                    }
                    refused(core, qp, psn, code, host);
                }
                Syndrome::Reserved(_) => {
                    if stale {
                        return None;
                    }
                    fail(core, qp, CompletionStatus::BadResponse.into(), host);
                }
            }
            Some(())
        }
    }
}

/// The responder has no receive buffer for the message at `psn`; or, whatever the message is, a
/// page of its memory is not there. Both count, as a peer may say so for ever.
fn receiver_not_ready(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    code: u8,
    host: &mut dyn Host,
) {
    if acknowledge(core, qp, psn, host) != Acknowledged::All || qp.state == State::Error {
        return;
    }
    let requester = &mut qp.transport.requester;
    if requester.waiting_for_receiver || requester.una != psn {
        return;
    }
    if qp.attributes.rnr_retry != RNR_FOR_EVER {
        if requester.rnr_retries == 0 {
            fail(core, qp, CompletionStatus::RnrRetryExceeded.into(), host);
            return;
        }
        requester.rnr_retries -= 1;
    }
    requester.waiting_for_receiver = true;
    requester.hands_over = true;
    requester.seek(psn);
    let deadline = core.now.saturating_add(rnr_delay(code));
    // The timer may be running for an earlier or a later time.
    qp.timer.stop();
    core.start_timer(qp, deadline);
}

/// The responder refuses the packet `psn`.
fn refused(core: &mut Core, qp: &mut QueuePair, psn: u32, code: NakCode, host: &mut dyn Host) {
    if acknowledge(core, qp, psn, host) != Acknowledged::All || qp.state == State::Error {
        return;
    }
    let status = match code {
        NakCode::Sequence => {
            go_back(core, qp, host);
            return;
        }
        NakCode::InvalidRequest => CompletionStatus::RemoteInvalidRequest,
        NakCode::RemoteAccess => CompletionStatus::RemoteAccess,
        NakCode::RemoteOperation => CompletionStatus::RemoteOperation,
    };
    fail(core, qp, status.into(), host);
}

/// Data of a read, or the result of an atomic.
fn answer(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    host: &mut dyn Host,
) -> Option<()> {
    let psn = packet.bth.psn;
    // It acknowledges all that came before the read.
    if acknowledge(core, qp, psn, host) != Acknowledged::All || qp.state == State::Error {
        return None;
    }
    let log_mtu = qp.attributes.log_mtu;
    let domain = qp.domain();
    let requester = &qp.transport.requester;
    // A local operation may stand before it, carried out and not completed: never, as `complete`
    // takes those away. So the oldest message is the one that is answered.
    let message = requester.messages.front()?;
    let (request, waited) = (&message.request, message.waited);
    let acknowledged = packet
        .aeth
        .is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
    let original;
    let mut answered = 1;
    let (fits, data) = match (packet.info.operation, request.opcode) {
        (Operation::ReadResponse, SendOpcode::Read) => {
            let offset = message.offset_of(psn, log_mtu);
            let asked = asked_for(offset, request.length - offset, log_mtu);
            let length = packet.payload.len() as u32;
            let most = match packet.payload {
                Payload::Bytes(_) => 1 << log_mtu,
                Payload::Lent(_) => MAX_LENT,
            };
            answered = packets(length, log_mtu);
            // It says itself whether another one follows, of those that were asked for together.
            let more = matches!(packet.info.position, Position::First | Position::Middle);
            let fits = if more {
                length == answered << log_mtu && length < asked
            } else {
                length == asked
            };
            let fits = fits && packet.payload.is_in_packets(log_mtu);
            (fits && length <= most, packet.payload)
        }
        (Operation::AtomicAcknowledge, SendOpcode::CompareSwap | SendOpcode::FetchAdd) => {
            original = packet.atomic_ack?.original.to_le_bytes();
            (true, Payload::Bytes(&original))
        }
        // That a flush or an atomic write is done is said by a read response without data.
        (Operation::ReadResponse, SendOpcode::AtomicWrite | SendOpcode::Flush)
            if packet.info.position == Position::Only =>
        {
            (packet.payload.is_empty(), packet.payload)
        }
        // Neither asked for nor sensible here.
        _ => (false, packet.payload),
    };
    if !fits || !acknowledged {
        fail(core, qp, CompletionStatus::BadResponse.into(), host);
        return Some(());
    }
    let offset = message.offset_of(psn, log_mtu);
    let Some(held) = data.hold() else {
        // As if it had not come.
        go_back(core, qp, host);
        return None;
    };
    count_copy(core, data);
    let placed = core.scatter(host, domain, request.sges(), offset.into(), held.data());
    drop(held);
    let placed = placed.map_err(|error| core.confirm(error, waited, host));
    let waits = match placed {
        Err(TptError::Absent(fault)) => {
            core.page_fault(qp.number, Side::Requester, fault, host) == Outcome::Wait
        }
        Err(TptError::Pending(index)) => {
            if let Some(first) = qp.transport.requester.messages.front_mut() {
                core.wait_for_tag(qp.number, Side::Requester, index, &mut first.waited);
            }
            true
        }
        _ => {
            core.paging.went_on(qp.number, Side::Requester);
            false
        }
    };
    if waits {
        let requester = &mut qp.transport.requester;
        requester.waiting_for_page = true;
        requester.answer_lost = true;
        requester.waiting_for_receiver = false;
        qp.timer.stop();
        return None;
    }
    if let Err(error) = placed {
        count!(core, qp, access_errors);
        let failure = Failure {
            status: CompletionStatus::LocalAccess,
            vendor_syndrome: error.vendor_syndrome(),
        };
        fail(core, qp, failure, host);
        return Some(());
    }
    qp.transport
        .requester
        .progress(psn_add(psn, answered), &qp.attributes);
    complete(core, qp, host);
    if qp.state != State::Error {
        watch(core, qp, true);
        core.schedule(qp);
    }
    Some(())
}
