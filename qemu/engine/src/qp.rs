// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Queue pairs: context, states, and what happens to their queues on the way to the error state.

use crate::att::{Att, AttError};
use crate::core::{Core, ReceiveCompletion, SendCompletion};
use crate::gid::MAX_GIDS;
use crate::memory::Host;
use crate::queue::{Placement, QueueError, ReceiveQueue, SendBody, SendQueue, SendRequest};
use crate::timers::Timer;
use crate::tpt::{Domain, TptError};
use crate::transport::{self, Connection};
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;

/// Queue pairs: numbers from 1 to one less than this.
pub const MAX_QP: u32 = 1 << 14;
/// Reads and atomics in flight, each way.
pub const MAX_READ: u8 = 16;

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// The service it gives.
    pub kind: QueuePairKind,
    /// `QP_FLAG_*`.
    pub flags: u8,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of the send queue.
    pub send_cqn: u32,
    /// Completion queue of the receive queue.
    pub receive_cqn: u32,
    /// Doorbell page it answers to.
    pub doorbell_page: u32,
    /// The attributes as they were set; checked when they were.
    pub attributes: ModifyQueuePair,
    /// Its state.
    pub state: State,
    /// A drain of the send queue is under way (in state `SendDrain`).
    pub draining: bool,
    /// The send queue.
    pub send: SendQueue,
    /// The receive queue.
    pub receive: ReceiveQueue,
    /// The protocol's state.
    pub transport: Connection,
    /// The transport's timer; start it with [`Core::start_timer`].
    pub timer: Timer,
    /// It is in the ready list.
    pub(crate) ready: bool,
}

impl QueuePair {
    /// What the local checks of its work requests compare with.
    pub fn domain(&self) -> Domain {
        Domain {
            pd: self.pd,
            privileged: self.flags & QP_FLAG_PRIVILEGED != 0,
        }
    }

    /// Bytes of the largest packet payload.
    pub fn mtu(&self) -> usize {
        1 << self.attributes.log_mtu.clamp(8, 12)
    }

    /// May new work requests be taken up?
    pub fn may_send(&self) -> bool {
        self.state == State::ReadyToSend
    }

    /// Are packets of the peer accepted?
    pub fn may_receive(&self) -> bool {
        matches!(
            self.state,
            State::ReadyToReceive | State::ReadyToSend | State::SendDrain
        )
    }
}

/// All queue pairs.
#[derive(Debug, Default)]
pub struct QueuePairs {
    pairs: Vec<Option<Box<QueuePair>>>,
}

impl QueuePairs {
    /// The queue pair with this number.
    pub fn get(&self, qpn: u32) -> Option<&QueuePair> {
        self.pairs.get(qpn as usize)?.as_deref()
    }

    /// The queue pair with this number.
    pub fn get_mut(&mut self, qpn: u32) -> Option<&mut QueuePair> {
        self.pairs.get_mut(qpn as usize)?.as_deref_mut()
    }

    /// All there are.
    pub fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        self.pairs.iter().flatten().map(|qp| &**qp)
    }

    pub(crate) fn clear(&mut self) {
        self.pairs.clear();
    }
}

/// Attributes a transition of the state must and may set.
struct Transition {
    required: u32,
    optional: u32,
}

/// The verbs' table of transitions; `None` where there is none.
fn transition(kind: QueuePairKind, from: State, to: State) -> Option<Transition> {
    use QueuePairKind::{Datagram, Gsi, ReliableConnected, UnreliableConnected};
    let datagram = matches!(kind, Datagram | Gsi);
    let by_kind = |rc: u32, uc: u32, ud: u32| match kind {
        ReliableConnected => rc,
        UnreliableConnected => uc,
        Datagram | Gsi => ud,
    };
    let (required, optional) = match (from, to) {
        (_, State::Reset) => (0, 0),
        (State::Reset, State::Init) => (
            if datagram {
                MODIFY_PKEY | MODIFY_QKEY
            } else {
                MODIFY_PKEY | MODIFY_ACCESS
            },
            0,
        ),
        (State::Reset, _) => return None,
        (_, State::Error) => (0, 0),
        (State::Init, State::Init) => (
            0,
            if datagram {
                MODIFY_PKEY | MODIFY_QKEY
            } else {
                MODIFY_PKEY | MODIFY_ACCESS
            },
        ),
        (State::Init, State::ReadyToReceive) => {
            let connected = MODIFY_PATH | MODIFY_MTU | MODIFY_DESTINATION | MODIFY_RECEIVE_PSN;
            (
                by_kind(
                    connected | MODIFY_READ_IN | MODIFY_MIN_RNR_TIMER,
                    connected,
                    0,
                ),
                if datagram {
                    MODIFY_PKEY | MODIFY_QKEY
                } else {
                    MODIFY_PKEY | MODIFY_ACCESS
                },
            )
        }
        (State::ReadyToReceive, State::ReadyToSend) => (
            by_kind(
                MODIFY_SEND_PSN
                    | MODIFY_TIMEOUT
                    | MODIFY_RETRY
                    | MODIFY_RNR_RETRY
                    | MODIFY_READ_OUT,
                MODIFY_SEND_PSN,
                MODIFY_SEND_PSN,
            ),
            by_kind(
                MODIFY_CURRENT_STATE | MODIFY_ACCESS | MODIFY_MIN_RNR_TIMER,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::ReadyToSend | State::SendDrain, State::ReadyToSend) => (
            0,
            by_kind(
                MODIFY_CURRENT_STATE | MODIFY_ACCESS | MODIFY_MIN_RNR_TIMER,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::SendError, State::ReadyToSend) if kind != ReliableConnected => (
            0,
            by_kind(
                0,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::ReadyToSend, State::SendDrain) => (0, 0),
        (State::SendDrain, State::SendDrain) => (
            0,
            by_kind(
                MODIFY_PATH
                    | MODIFY_TIMEOUT
                    | MODIFY_RETRY
                    | MODIFY_RNR_RETRY
                    | MODIFY_READ_OUT
                    | MODIFY_READ_IN
                    | MODIFY_PKEY
                    | MODIFY_ACCESS
                    | MODIFY_MIN_RNR_TIMER,
                MODIFY_PATH | MODIFY_PKEY | MODIFY_ACCESS,
                MODIFY_PKEY | MODIFY_QKEY,
            ),
        ),
        _ => return None,
    };
    Some(Transition { required, optional })
}

/// Checks the values of the attributes that count.
fn check_values(core: &Core, command: &ModifyQueuePair) -> Result<(), CommandStatus> {
    let set = |bit: u32| command.mask & bit != 0;
    let bad = (set(MODIFY_PKEY) && command.pkey_index != 0)
        || (set(MODIFY_ACCESS) && command.access & !ACCESS_ALL != 0)
        || (set(MODIFY_MTU) && !(8..=12).contains(&command.log_mtu))
        || (set(MODIFY_TIMEOUT) && command.timeout > 31)
        || (set(MODIFY_RETRY) && command.retry_count > 7)
        || (set(MODIFY_RNR_RETRY) && command.rnr_retry > 7)
        || (set(MODIFY_MIN_RNR_TIMER) && command.min_rnr_timer > 31)
        || (set(MODIFY_READ_OUT) && command.max_read_out > MAX_READ)
        || (set(MODIFY_READ_IN) && command.max_read_in > MAX_READ)
        || (set(MODIFY_DESTINATION) && command.destination_qpn > QUEUE_NUMBER_MASK)
        || (set(MODIFY_SEND_PSN) && command.send_psn > 0xff_ffff)
        || (set(MODIFY_RECEIVE_PSN) && command.receive_psn > 0xff_ffff);
    if bad {
        return Err(CommandStatus::BadParameter);
    }
    if set(MODIFY_PATH) {
        let path = &command.path;
        if path.source_gid_index >= MAX_GIDS {
            return Err(CommandStatus::BadNumber);
        }
        if core.gids.get(path.source_gid_index).is_none() {
            return Err(CommandStatus::NotFound);
        }
        if path.flow_label > 0xf_ffff {
            return Err(CommandStatus::BadParameter);
        }
    }
    Ok(())
}

fn check_number(qpn: u32) -> Result<(), CommandStatus> {
    if qpn == 0 || qpn >= MAX_QP {
        return Err(CommandStatus::BadNumber);
    }
    Ok(())
}

fn placement_status(error: AttError) -> CommandStatus {
    match error {
        AttError::Memory(_) => CommandStatus::HostMemory,
        _ => CommandStatus::BadParameter,
    }
}

/// Carries out `CreateQueuePair`.
pub(crate) fn create(
    core: &mut Core,
    qps: &mut QueuePairs,
    command: &CreateQueuePair,
    host: &dyn Host,
) -> Result<(), CommandStatus> {
    check_number(command.qpn)?;
    let kind = QueuePairKind::from_number(command.kind).ok_or(CommandStatus::BadParameter)?;
    let known =
        QP_FLAG_PRIVILEGED | QP_FLAG_SHARED_RECEIVE | QP_FLAG_REGISTER | QP_FLAG_REGISTER_DRAINS;
    if command.flags & !known != 0 {
        return Err(CommandStatus::BadParameter);
    }
    if kind != QueuePairKind::ReliableConnected || command.flags & QP_FLAG_SHARED_RECEIVE != 0 {
        return Err(CommandStatus::Unsupported);
    }
    if command.sq_log_blocks > SQ_MAX_LOG_BLOCKS
        || command.rq_log_entries > RQ_MAX_LOG_ENTRIES
        || !(RQ_MIN_LOG_STRIDE..=RQ_MAX_LOG_STRIDE).contains(&command.rq_log_stride)
        || command.doorbell_page as usize >= DOORBELL_PAGES
    {
        return Err(CommandStatus::BadParameter);
    }
    if qps.get(command.qpn).is_some() {
        return Err(CommandStatus::Exists);
    }
    if !core.cqs.exists(command.send_cqn) || !core.cqs.exists(command.receive_cqn) {
        return Err(CommandStatus::NotFound);
    }
    let att = Att::new(&command.buffer).map_err(placement_status)?;
    let send = Placement {
        ring_offset: command.sq_offset,
        log_entries: command.sq_log_blocks,
        log_stride: BLOCK_SIZE.ilog2() as u8,
        record_offset: command.record_offset,
    };
    let receive = Placement {
        ring_offset: command.rq_offset,
        log_entries: command.rq_log_entries,
        log_stride: command.rq_log_stride,
        record_offset: command.record_offset,
    };
    let mut send = SendQueue::new(host, &att, send, false).map_err(placement_status)?;
    let mut receive = ReceiveQueue::new(host, &att, receive).map_err(placement_status)?;
    send.reset(host).map_err(|_| CommandStatus::HostMemory)?;
    receive.reset(host).map_err(|_| CommandStatus::HostMemory)?;
    let index = command.qpn as usize;
    if qps.pairs.len() <= index {
        qps.pairs.resize_with(index + 1, || None);
    }
    qps.pairs[index] = Some(Box::new(QueuePair {
        number: command.qpn,
        kind,
        flags: command.flags,
        pd: command.pd,
        send_cqn: command.send_cqn,
        receive_cqn: command.receive_cqn,
        doorbell_page: command.doorbell_page,
        attributes: ModifyQueuePair {
            qpn: command.qpn,
            ..ModifyQueuePair::zeroed()
        },
        state: State::Reset,
        draining: false,
        send,
        receive,
        transport: Connection::default(),
        timer: Timer::default(),
        ready: false,
    }));
    for cqn in [command.send_cqn, command.receive_cqn] {
        if let Some(cq) = core.cqs.get_mut(cqn) {
            cq.users = cq.users.saturating_add(1);
        }
    }
    Ok(())
}

/// Carries out `DestroyQueuePair`.
pub(crate) fn destroy(
    core: &mut Core,
    qps: &mut QueuePairs,
    qpn: u32,
) -> Result<(), CommandStatus> {
    check_number(qpn)?;
    let qp = qps
        .pairs
        .get_mut(qpn as usize)
        .and_then(Option::take)
        .ok_or(CommandStatus::NotFound)?;
    for cqn in [qp.send_cqn, qp.receive_cqn] {
        if let Some(cq) = core.cqs.get_mut(cqn) {
            cq.users = cq.users.saturating_sub(1);
        }
    }
    Ok(())
}

/// Carries out `QueryQueuePair`.
pub(crate) fn query(qps: &QueuePairs, qpn: u32) -> Result<QueuePairState, CommandStatus> {
    check_number(qpn)?;
    let qp = qps.get(qpn).ok_or(CommandStatus::NotFound)?;
    let (send_psn, receive_psn) = qp.transport.sequence_numbers();
    Ok(QueuePairState {
        attributes: ModifyQueuePair {
            state: qp.state.number(),
            current_state: qp.state.number(),
            ..qp.attributes
        },
        send_psn,
        receive_psn,
        draining: u8::from(qp.draining),
        reserved0: [0; 7],
        reserved1: 0,
    })
}

/// Carries out `ModifyQueuePair`.
pub(crate) fn modify(
    core: &mut Core,
    qps: &mut QueuePairs,
    command: &ModifyQueuePair,
    host: &mut dyn Host,
) -> Result<(), CommandStatus> {
    check_number(command.qpn)?;
    let qp = qps.get_mut(command.qpn).ok_or(CommandStatus::NotFound)?;
    let from = qp.state;
    if command.mask & MODIFY_CURRENT_STATE != 0 {
        let believed =
            State::from_number(command.current_state).ok_or(CommandStatus::BadParameter)?;
        if believed != from {
            return Err(CommandStatus::BadState);
        }
    }
    let to = if command.mask & MODIFY_STATE != 0 {
        State::from_number(command.state).ok_or(CommandStatus::BadParameter)?
    } else {
        from
    };
    let allowed = transition(qp.kind, from, to).ok_or(CommandStatus::BadState)?;
    let given = command.mask & !(MODIFY_STATE | MODIFY_CURRENT_STATE);
    if given & allowed.required != allowed.required
        || given & !(allowed.required | allowed.optional) != 0
    {
        return Err(CommandStatus::BadParameter);
    }
    check_values(core, command)?;
    take_attributes(&mut qp.attributes, command);
    match to {
        State::Reset => reset(core, qp, host),
        State::Error => enter_error(core, qp, host),
        _ => {
            qp.state = to;
            transport::modified(core, qp, from, command.mask, host);
            qp.draining = to == State::SendDrain && from != to;
            if qp.draining && qp.send.retired() == qp.send.next() {
                qp.draining = false;
                core.async_event(EventCode::SendQueueDrained, qp.number, host);
            }
            if to == State::ReadyToSend {
                core.schedule(qp);
            }
        }
    }
    Ok(())
}

fn take_attributes(attributes: &mut ModifyQueuePair, command: &ModifyQueuePair) {
    macro_rules! take {
        ($($bit:ident: $field:ident,)*) => {$(
            if command.mask & $bit != 0 {
                attributes.$field = command.$field;
            }
        )*};
    }
    take! {
        MODIFY_ACCESS: access,
        MODIFY_PKEY: pkey_index,
        MODIFY_QKEY: qkey,
        MODIFY_PATH: path,
        MODIFY_MTU: log_mtu,
        MODIFY_TIMEOUT: timeout,
        MODIFY_RETRY: retry_count,
        MODIFY_RNR_RETRY: rnr_retry,
        MODIFY_RECEIVE_PSN: receive_psn,
        MODIFY_READ_OUT: max_read_out,
        MODIFY_MIN_RNR_TIMER: min_rnr_timer,
        MODIFY_SEND_PSN: send_psn,
        MODIFY_READ_IN: max_read_in,
        MODIFY_DESTINATION: destination_qpn,
    }
    attributes.mask |= command.mask & !(MODIFY_STATE | MODIFY_CURRENT_STATE);
}

/// To state RESET: everything as it was after `CreateQueuePair`, nothing completed.
fn reset(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    qp.state = State::Reset;
    qp.draining = false;
    qp.timer.stop();
    qp.transport = Connection::default();
    qp.attributes = ModifyQueuePair {
        qpn: qp.number,
        ..ModifyQueuePair::zeroed()
    };
    if qp.send.reset(host).is_err() || qp.receive.reset(host).is_err() {
        core.async_event(EventCode::QueuePairFatal, qp.number, host);
    }
}

/// To state ERROR: the transport forgets everything, and each work request and receive without
/// completion is completed as flushed.
pub fn enter_error(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    qp.state = State::Error;
    qp.draining = false;
    qp.timer.stop();
    qp.transport = Connection::default();
    flush(core, qp, host);
}

/// To state ERROR where the consumer cannot learn of it from a completion: the completion queue
/// is dead, or the rings make no sense.
pub fn fail(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if qp.state != State::Error {
        core.async_event(EventCode::QueuePairFatal, qp.number, host);
    }
    enter_error(core, qp, host);
}

/// Completes what is posted to a queue pair in state ERROR, and asks to be told of more.
pub(crate) fn flush(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    // Posts that come in meanwhile are seen at the second look or ring a doorbell.
    for _ in 0..2 {
        let more = qp.send.sleep(host);
        flush_send(core, qp, host);
        if !matches!(more, Ok(true)) {
            break;
        }
    }
    for _ in 0..2 {
        let more = qp.receive.sleep(host);
        flush_receive(core, qp, host);
        if !matches!(more, Ok(true)) {
            break;
        }
    }
}

fn flush_send(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    let mut request = SendRequest::default();
    while qp.send.retired() != qp.send.producer() {
        let index = qp.send.retired();
        // A work request that makes no sense is flushed like any other; but where its size is
        // unknown, so is where the next one starts.
        let unreadable = matches!(
            qp.send.fetch(host, index, &mut request),
            Err(QueueError::Blocks | QueueError::Memory(_))
        );
        let mut completion = SendCompletion::of(&request, CompletionStatus::Flushed);
        completion.byte_count = 0;
        if unreadable {
            completion.blocks = qp.send.producer().wrapping_sub(index);
        }
        if core.complete_send(qp, &completion, host).is_err() {
            qp.send.retire_all();
            return;
        }
    }
}

fn flush_receive(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    while qp.receive.retired() != qp.receive.producer() {
        let completion = ReceiveCompletion {
            index: qp.receive.retired(),
            status: CompletionStatus::Flushed,
            opcode: CompletionOpcode::Receive,
            byte_count: 0,
            immediate: 0,
            flags: 0,
            detail: 0,
        };
        if core.complete_receive(qp, &completion, host).is_err() {
            qp.receive.retire(qp.receive.producer());
            return;
        }
    }
}

/// Why a work request that stays in the device failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalError {
    /// The queue pair may not do this.
    NotAllowed,
    /// The device does not offer it.
    Unsupported,
    /// The table refused.
    Table(TptError),
}

impl LocalError {
    /// The completion status and its detail.
    pub fn status(self) -> (CompletionStatus, u32) {
        match self {
            Self::NotAllowed | Self::Unsupported => {
                (CompletionStatus::LocalQueuePairOperation, 0x200)
            }
            Self::Table(error) => (CompletionStatus::LocalProtection, error.detail()),
        }
    }
}

/// Carries out a work request that no packet is sent for: a registration or local invalidation.
/// The transport calls it when the request's turn comes, and completes it.
pub fn execute_local(
    core: &mut Core,
    qp: &QueuePair,
    request: &SendRequest,
) -> Result<(), LocalError> {
    if qp.flags & QP_FLAG_REGISTER == 0 {
        return Err(LocalError::NotAllowed);
    }
    match (&request.body, request.opcode) {
        (SendBody::Register(part), SendOpcode::Register) => core
            .tpt
            .register_from_queue(part, qp.pd)
            .map_err(LocalError::Table),
        (_, SendOpcode::LocalInvalidate) => core
            .tpt
            .invalidate(request.immediate, qp.pd)
            .map_err(LocalError::Table),
        _ => Err(LocalError::Unsupported),
    }
}
