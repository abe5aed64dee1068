// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Queue pairs: context, states, and what happens to their queues on the way to the error state.

use crate::att::{Att, AttError};
use crate::core::{Core, Nap, ReceiveCompletion, RoomKey, SendCompletion, Waited, PORTS};
use crate::counters::QpCounters;
use crate::gid::{ipv4_of, MAX_GIDS};
use crate::memory::Host;
use crate::numbers::{NumberTable, Numbers};
use crate::queue::{
    are_apart, Placement, QueueError, ReceiveQueue, Registration, SendBody, SendQueue, SendRequest,
};
use crate::srq::MAX_XRCD;
use crate::timers::Timer;
use crate::tpt::{access_features, Domain, Holder, TptError};
use crate::transport::{self, Connection};
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;

/// Queue pairs, besides that of management datagrams.
pub const MAX_QP: u32 = 1 << 14;
/// The queue pair of management datagrams.
pub const GSI_QPN: u32 = 1;
/// Entries of a queue that are flushed in one turn.
const MAX_FLUSH: u32 = 1024;
/// Members of groups that are looked at in the time that one entry of a queue takes.
const MEMBERS_PER_WORK: u64 = 64;
/// The number of no completion queue.
const NO_CQ: u32 = QUEUE_NONE;
/// Reads and atomics in flight, each way.
pub const MAX_READ: u8 = 16;

/// An asynchronous event of a queue pair, and its `param0`.
pub(crate) type OwedEvent = (EventCode, u64);

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// The service it gives.
    pub service: Service,
    /// `QP_FLAG_*`.
    pub flags: u16,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of the send queue.
    pub send_cqn: u32,
    /// Completion queue of the receive queue.
    pub receive_cqn: u32,
    /// Shared receive queue.
    pub srqn: Option<u32>,
    /// XRC domain, of an extended connection's target.
    pub xrcd: u32,
    /// Doorbell page it answers to.
    pub doorbell_page: u32,
    /// The attributes as they were set; checked when they were.
    pub attributes: ModifyQueuePair,
    /// Its state.
    pub state: State,
    /// A drain of the send queue is under way (in state `Sqd`).
    pub draining: bool,
    /// A failed registration has stopped the send queue (in state `Sqd`): what is posted is
    /// flushed until the queue pair is told to send again.
    pub(crate) stopped: bool,
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
    /// It waits for room on the way to its peer, in this place.
    pub(crate) waits_for_room: Option<RoomKey>,
    /// Its wait for more to send.
    pub(crate) nap: Nap,
    /// What it has counted.
    pub(crate) counters: QpCounters,
    /// Events to be raised when all that they are about is flushed.
    owed: Vec<OwedEvent>,
}

impl QueuePair {
    /// What the local checks of its work requests compare with.
    pub fn domain(&self) -> Domain {
        Domain {
            pd: self.pd,
            privileged: self.flags & QP_FLAG_PRIVILEGED != 0,
        }
    }

    /// What remote checks, binds and invalidations on its behalf compare with.
    pub fn holder(&self) -> Holder {
        Holder {
            pd: self.pd,
            qpn: self.number,
            windows_only: self.flags & QP_FLAG_WINDOWS_ONLY != 0,
        }
    }

    /// Bytes of the largest packet payload.
    pub fn mtu(&self) -> usize {
        1 << self.attributes.log_mtu.clamp(8, 12)
    }

    /// Does a failure of a registration stop the send queue instead of failing the queue pair?
    pub fn drains(&self) -> bool {
        self.flags & QP_FLAG_FAST_REGISTER_DRAINS != 0
    }

    /// May new work requests be taken up?
    pub fn may_send(&self) -> bool {
        self.state == State::Rts
    }

    /// Are packets of the peer accepted?
    pub fn may_receive(&self) -> bool {
        matches!(
            self.state,
            State::Rtr | State::Rts | State::Sqd | State::Sqe
        )
    }

    /// Is it of an extended reliable connection?
    pub fn is_extended(&self) -> bool {
        matches!(self.service, Service::XrcIni | Service::XrcTgt)
    }

    /// Has it a send queue? The target of an extended connection has none, nor has a work queue.
    pub fn has_send_queue(&self) -> bool {
        self.service != Service::XrcTgt && self.flags & QP_FLAG_RECEIVE_ONLY == 0
    }

    /// Has it a receive queue of its own?
    pub fn has_receive_queue(&self) -> bool {
        self.srqn.is_none() && !self.is_extended()
    }

    /// Does a failed work request leave the receive queue going?
    fn is_unreliable(&self) -> bool {
        matches!(
            self.service,
            Service::Uc | Service::Ud | Service::Gsi | Service::Raw
        )
    }
}

/// All queue pairs.
#[derive(Debug)]
pub struct QueuePairs {
    pairs: NumberTable<QueuePair>,
    /// The one of management datagrams, whose number is everybody's.
    gsi: Option<Box<QueuePair>>,
}

impl QueuePairs {
    pub(crate) fn new(numbers: Numbers) -> Self {
        Self {
            pairs: NumberTable::new(numbers),
            gsi: None,
        }
    }

    /// The queue pair with this number.
    pub fn get(&self, qpn: u32) -> Option<&QueuePair> {
        if qpn == GSI_QPN {
            return self.gsi.as_deref();
        }
        self.pairs.get(qpn)
    }

    /// The queue pair with this number.
    pub fn get_mut(&mut self, qpn: u32) -> Option<&mut QueuePair> {
        if qpn == GSI_QPN {
            return self.gsi.as_deref_mut();
        }
        self.pairs.get_mut(qpn)
    }

    /// All there are.
    pub fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        self.gsi.as_deref().into_iter().chain(self.pairs.iter())
    }

    /// Refuses a number that is not the function's.
    pub(crate) fn check(&self, qpn: u32) -> Result<(), CommandStatus> {
        if qpn == GSI_QPN {
            return Ok(());
        }
        self.pairs.check(qpn)
    }

    /// The same, and one that nothing has.
    pub(crate) fn find(&self, qpn: u32) -> Result<&QueuePair, CommandStatus> {
        self.check(qpn)?;
        self.get(qpn).ok_or(CommandStatus::NotFound)
    }

    fn slot(&mut self, qpn: u32) -> Result<&mut Option<Box<QueuePair>>, CommandStatus> {
        if qpn == GSI_QPN {
            return Ok(&mut self.gsi);
        }
        self.pairs.slot(qpn)
    }

    pub(crate) fn clear(&mut self) {
        self.pairs.clear();
        self.gsi = None;
    }
}

/// Attributes a transition of the state must and may set.
struct Transition {
    required: u32,
    optional: u32,
}

/// The verbs' table of transitions; `None` where there is none.
fn transition(service: Service, from: State, to: State) -> Option<Transition> {
    use Service::{Gsi, Raw, Rc, Uc, Ud, XrcIni, XrcTgt};
    if service == Raw {
        return raw_transition(from, to);
    }
    let datagram = matches!(service, Ud | Gsi);
    let by_service = |rc: u32, uc: u32, ud: u32| match service {
        Rc | XrcIni | XrcTgt => rc,
        Uc => uc,
        Ud | Gsi | Raw => ud,
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
        (State::Init, State::Rtr) => {
            let connected =
                MODIFY_ADDRESS_VECTOR | MODIFY_MTU | MODIFY_DESTINATION | MODIFY_RECEIVE_PSN;
            (
                by_service(connected | MODIFY_IRD | MODIFY_MIN_RNR_TIMER, connected, 0),
                if datagram {
                    MODIFY_PKEY | MODIFY_QKEY
                } else {
                    MODIFY_PKEY | MODIFY_ACCESS
                },
            )
        }
        (State::Rtr, State::Rts) => (
            by_service(
                MODIFY_SEND_PSN | MODIFY_TIMEOUT | MODIFY_RETRY | MODIFY_RNR_RETRY | MODIFY_ORD,
                MODIFY_SEND_PSN,
                MODIFY_SEND_PSN,
            ),
            by_service(
                MODIFY_CURRENT_STATE | MODIFY_ACCESS | MODIFY_MIN_RNR_TIMER,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::Rts | State::Sqd, State::Rts) => (
            0,
            by_service(
                MODIFY_CURRENT_STATE | MODIFY_ACCESS | MODIFY_MIN_RNR_TIMER,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::Sqe, State::Rts) if datagram || service == Uc => (
            0,
            by_service(
                0,
                MODIFY_CURRENT_STATE | MODIFY_ACCESS,
                MODIFY_CURRENT_STATE | MODIFY_QKEY,
            ),
        ),
        (State::Rts, State::Sqd) => (0, 0),
        (State::Sqd, State::Sqd) => (
            0,
            by_service(
                MODIFY_ADDRESS_VECTOR
                    | MODIFY_TIMEOUT
                    | MODIFY_RETRY
                    | MODIFY_RNR_RETRY
                    | MODIFY_ORD
                    | MODIFY_IRD
                    | MODIFY_PKEY
                    | MODIFY_ACCESS
                    | MODIFY_MIN_RNR_TIMER,
                MODIFY_ADDRESS_VECTOR | MODIFY_PKEY | MODIFY_ACCESS,
                MODIFY_PKEY | MODIFY_QKEY,
            ),
        ),
        _ => return None,
    };
    Some(Transition { required, optional })
}

/// The same of raw packets, which have no attributes.
fn raw_transition(from: State, to: State) -> Option<Transition> {
    let goes = match (from, to) {
        (_, State::Reset) => true,
        (State::Reset, _) => to == State::Init,
        (_, State::Error) => true,
        (State::Init, _) => matches!(to, State::Init | State::Rtr),
        (State::Rtr | State::Sqe, _) => to == State::Rts,
        (State::Rts | State::Sqd, _) => matches!(to, State::Rts | State::Sqd),
        (State::Error, _) => false,
    };
    goes.then_some(Transition {
        required: 0,
        optional: 0,
    })
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
        || (set(MODIFY_ORD) && command.ord > MAX_READ)
        || (set(MODIFY_IRD) && command.ird > MAX_READ)
        || (set(MODIFY_DESTINATION) && command.destination_qpn > QUEUE_NUMBER_MASK)
        || (set(MODIFY_SEND_PSN) && command.send_psn > 0xff_ffff)
        || (set(MODIFY_RECEIVE_PSN) && command.receive_psn > 0xff_ffff);
    if bad {
        return Err(CommandStatus::BadParameter);
    }
    if set(MODIFY_ADDRESS_VECTOR) {
        let path = &command.address_vector;
        if path.source_gid_index >= MAX_GIDS || path.port >= PORTS {
            return Err(CommandStatus::BadNumber);
        }
        let source = core.gids.get(path.source_gid_index);
        let source = source.ok_or(CommandStatus::NotFound)?;
        // Without this nothing could ever be sent, and nobody would be told why.
        let same_version = source.ipv4().is_some() == ipv4_of(&path.gid).is_some();
        if !same_version || path.flow_label > 0xf_ffff {
            return Err(CommandStatus::BadParameter);
        }
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
    qps.check(command.qpn)?;
    let service = Service::from_number(command.service).ok_or(CommandStatus::BadParameter)?;
    if Transport::from_number(command.transport).is_none() {
        return Err(CommandStatus::Unsupported);
    }
    if command.port >= PORTS {
        return Err(CommandStatus::BadNumber);
    }
    let known = QP_FLAG_PRIVILEGED
        | QP_FLAG_SRQ
        | QP_FLAG_FAST_REGISTER
        | QP_FLAG_FAST_REGISTER_DRAINS
        | QP_FLAG_WINDOWS_ONLY
        | QP_FLAG_LISTS
        | QP_FLAG_RECEIVE_ONLY;
    if command.flags & !known != 0 {
        return Err(CommandStatus::BadParameter);
    }
    let shared = command.flags & QP_FLAG_SRQ != 0;
    let extended = matches!(service, Service::XrcIni | Service::XrcTgt);
    let target = service == Service::XrcTgt;
    let receives_only = command.flags & QP_FLAG_RECEIVE_ONLY != 0;
    let sends = !target && !receives_only;
    let mut needed = match service {
        Service::Rc => 0,
        Service::Uc => FEATURE_UC,
        Service::Ud | Service::Gsi => FEATURE_UD,
        Service::XrcIni | Service::XrcTgt => FEATURE_XRC,
        Service::Raw => FEATURE_RAW_PACKETS,
    };
    if receives_only {
        needed |= FEATURE_RECEIVE_TABLES;
    }
    if shared {
        needed |= FEATURE_SRQ;
    }
    if command.flags & QP_FLAG_FAST_REGISTER != 0 {
        needed |= FEATURE_FAST_REGISTER;
    }
    if command.flags & QP_FLAG_LISTS != 0 {
        needed |= FEATURE_LISTS;
    }
    if command.flags & QP_FLAG_WINDOWS_ONLY != 0 {
        needed |= FEATURE_WINDOWS_ONLY;
    }
    let drains = command.flags & QP_FLAG_FAST_REGISTER_DRAINS != 0;
    let registers = core.features & (FEATURE_FAST_REGISTER | FEATURE_LISTS) != 0;
    if core.features & needed != needed || drains && !registers {
        return Err(CommandStatus::Unsupported);
    }
    // Number 1 is the one that peers address management datagrams to.
    if (service == Service::Gsi) != (command.qpn == GSI_QPN) {
        return Err(CommandStatus::BadNumber);
    }
    let has_receive_queue = !shared && !extended;
    if (sends && command.sq_log_blocks > SQ_MAX_LOG_BLOCKS)
        || (has_receive_queue
            && (command.rq_log_entries > RQ_MAX_LOG_ENTRIES
                || !(RQ_MIN_LOG_STRIDE..=RQ_MAX_LOG_STRIDE).contains(&command.rq_log_stride)))
        || command.doorbell_page >= core.config.doorbell_pages
        || (shared && (extended || service == Service::Uc))
        || (receives_only && (shared || service != Service::Raw))
        || (!shared && command.srqn != 0)
        || (!target && command.xrcd != 0)
    {
        return Err(CommandStatus::BadParameter);
    }
    if target && (command.xrcd == 0 || command.xrcd >= MAX_XRCD) {
        return Err(CommandStatus::BadNumber);
    }
    if qps.get(command.qpn).is_some() {
        return Err(CommandStatus::Exists);
    }
    // Queues that are not there complete nowhere.
    let send_cqn = if sends { command.send_cqn } else { NO_CQ };
    let receive_cqn = if extended { NO_CQ } else { command.receive_cqn };
    if sends {
        core.cqs.check(send_cqn)?;
    }
    if !extended {
        core.cqs.check(receive_cqn)?;
    }
    if shared {
        core.srqs.check_ordinary(command.srqn)?;
    }
    let att = Att::new(&command.buffer).map_err(placement_status)?;
    // A queue that is not there is one that is never looked at, in place of the record.
    let none = Placement {
        ring_offset: command.record_offset,
        log_entries: 0,
        log_stride: BLOCK_SIZE.ilog2() as u8,
        record_offset: command.record_offset,
    };
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
    let mut parts = vec![none.record_range()];
    if sends {
        parts.push(send.ring_range());
    }
    if has_receive_queue {
        parts.push(receive.ring_range());
    }
    if !are_apart(&parts) {
        return Err(CommandStatus::BadParameter);
    }
    let send = if sends { send } else { none };
    let receive = if has_receive_queue { receive } else { none };
    let mut send = SendQueue::new(host, &att, send, service).map_err(placement_status)?;
    let mut receive = ReceiveQueue::new(host, &att, receive).map_err(placement_status)?;
    send.reset(host).map_err(|_| CommandStatus::HostMemory)?;
    receive.reset(host).map_err(|_| CommandStatus::HostMemory)?;
    *qps.slot(command.qpn)? = Some(Box::new(QueuePair {
        number: command.qpn,
        service,
        flags: command.flags,
        pd: command.pd,
        send_cqn,
        receive_cqn,
        srqn: shared.then_some(command.srqn),
        xrcd: if target { command.xrcd } else { 0 },
        doorbell_page: command.doorbell_page,
        attributes: ModifyQueuePair {
            qpn: command.qpn,
            ..ModifyQueuePair::zeroed()
        },
        state: State::Reset,
        draining: false,
        stopped: false,
        send,
        receive,
        transport: Connection::default(),
        timer: Timer::default(),
        ready: false,
        waits_for_room: None,
        nap: Nap::default(),
        counters: QpCounters::default(),
        owed: Vec::new(),
    }));
    for cqn in [send_cqn, receive_cqn] {
        if let Some(cq) = core.cqs.get_mut(cqn) {
            cq.users = cq.users.saturating_add(1);
        }
    }
    if shared {
        if let Some(srq) = core.srqs.get_mut(command.srqn) {
            srq.users = srq.users.saturating_add(1);
        }
    }
    Ok(())
}

/// Begins `DestroyQueuePair`: the queue pair is gone, and its windows [are left](invalidate_windows).
pub(crate) fn destroy(
    core: &mut Core,
    qps: &mut QueuePairs,
    qpn: u32,
    host: &mut dyn Host,
) -> Result<(), CommandStatus> {
    if core.flows.is_in_table(qpn) {
        return Err(CommandStatus::Busy);
    }
    let mut qp = qps.slot(qpn)?.take().ok_or(CommandStatus::NotFound)?;
    if qp.service == Service::Raw {
        core.flows.forget(qpn);
    }
    transport::take_leave(core, &mut qp, host);
    core.stop_waiting(&mut qp);
    give_back(core, &mut qp, host);
    for cqn in [qp.send_cqn, qp.receive_cqn] {
        if let Some(cq) = core.cqs.get_mut(cqn) {
            cq.users = cq.users.saturating_sub(1);
        }
    }
    if let Some(srq) = qp.srqn.and_then(|srqn| core.srqs.get_mut(srqn)) {
        srq.users = srq.users.saturating_sub(1);
    }
    if qp.service == Service::Ud {
        core.work += core.groups.forget(qpn) as u64 / MEMBERS_PER_WORK;
    }
    core.forget_queue_pair_events(qpn);
    Ok(())
}

/// Goes on with `DestroyQueuePair`, or `ModifyQueuePair` to state RESET: invalidates `limit` of the type
/// 2 windows bound to the queue pair at most. `None` when there may be more.
pub(crate) fn invalidate_windows(core: &mut Core, qpn: u32, limit: u32) -> Option<()> {
    let done = core.tpt.invalidate_windows(qpn, limit);
    core.work += u64::from(done);
    (done < limit).then_some(())
}

/// Carries out `QueryQueuePair`; with `context` it tells what the queue pair is made of, too.
pub(crate) fn query(
    qps: &QueuePairs,
    qpn: u32,
    context: bool,
) -> Result<QueuePairState, CommandStatus> {
    let qp = qps.find(qpn)?;
    let (send_psn, receive_psn) = qp.transport.sequence_numbers();
    let state = QueuePairState {
        attributes: ModifyQueuePair {
            state: qp.state.number(),
            current_state: qp.state.number(),
            ..qp.attributes
        },
        send_psn,
        receive_psn,
        draining: u8::from(qp.draining),
        ..QueuePairState::zeroed()
    };
    if !context {
        return Ok(state);
    }
    // What is in place of a queue that it has not is nobody's business.
    let send = qp.has_send_queue().then_some(&qp.send);
    let receive = qp.has_receive_queue().then_some(&qp.receive);
    Ok(QueuePairState {
        pd: qp.pd,
        send_cqn: qp.send_cqn,
        receive_cqn: qp.receive_cqn,
        srqn: qp.srqn.unwrap_or(0),
        xrcd: qp.xrcd,
        doorbell_page: qp.doorbell_page,
        flags: qp.flags,
        service: qp.service.number(),
        transport: Transport::RoceV2.number(),
        sq_log_blocks: send.map_or(0, SendQueue::log_blocks),
        rq_log_entries: receive.map_or(0, ReceiveQueue::log_entries),
        rq_log_stride: receive.map_or(0, ReceiveQueue::log_stride),
        stopped: u8::from(qp.stopped),
        send_producer: send.map_or(0, SendQueue::producer),
        send_next: send.map_or(0, SendQueue::next),
        send_retired: send.map_or(0, SendQueue::retired),
        receive_producer: receive.map_or(0, ReceiveQueue::producer),
        receive_next: receive.map_or(0, ReceiveQueue::next),
        receive_retired: receive.map_or(0, ReceiveQueue::retired),
        ..state
    })
}

/// Carries out `QueryQueuePairCounters`.
pub(crate) fn query_counters(
    qps: &QueuePairs,
    command: &QueryQueuePairCounters,
) -> Result<[u64; COUNTER_NAMES.len()], CommandStatus> {
    let (named, _) = command
        .qpns
        .split_at_checked(command.count as usize)
        .filter(|(named, rest)| !named.is_empty() && rest.iter().all(|&qpn| qpn == 0))
        .ok_or(CommandStatus::BadParameter)?;
    let mut sums = [0; COUNTER_NAMES.len()];
    for &qpn in named {
        qps.find(qpn)?.counters.add_to(&mut sums);
    }
    Ok(sums)
}

/// A `ModifyQueuePair` that is under way.
#[derive(Debug)]
pub(crate) struct Modification {
    command: ModifyQueuePair,
    /// Where what was posted to a stopped send queue before it ends, once that was looked at.
    end: Option<u32>,
    /// It was reset, and its windows are left.
    is_reset: bool,
}

impl Modification {
    pub(crate) fn new(command: ModifyQueuePair) -> Self {
        Self {
            command,
            end: None,
            is_reset: false,
        }
    }
}

/// Goes on with `ModifyQueuePair`: flushes `limit` work requests, or invalidates as many windows, at
/// most. `None` when there are more.
pub(crate) fn modify_some(
    core: &mut Core,
    qps: &mut QueuePairs,
    modification: &mut Modification,
    limit: u32,
    host: &mut dyn Host,
) -> Option<Result<(), CommandStatus>> {
    modify(core, qps, modification, limit, host).transpose()
}

/// The same; `Ok(None)` when there are more.
fn modify(
    core: &mut Core,
    qps: &mut QueuePairs,
    modification: &mut Modification,
    limit: u32,
    host: &mut dyn Host,
) -> Result<Option<()>, CommandStatus> {
    let command = &modification.command;
    if modification.is_reset {
        return Ok(invalidate_windows(core, command.qpn, limit));
    }
    qps.check(command.qpn)?;
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
    let allowed = transition(qp.service, from, to).ok_or(CommandStatus::BadState)?;
    let given = command.mask & !(MODIFY_STATE | MODIFY_CURRENT_STATE);
    if given & allowed.required != allowed.required
        || given & !(allowed.required | allowed.optional) != 0
    {
        return Err(CommandStatus::BadParameter);
    }
    if qp.draining && matches!(to, State::Sqd | State::Rts) {
        return Err(CommandStatus::BadState);
    }
    check_values(core, command)?;
    if matches!(to, State::Reset | State::Error) {
        transport::take_leave(core, qp, host);
    }
    match to {
        State::Reset => {
            reset(core, qp, host);
            modification.is_reset = true;
            return Ok(invalidate_windows(core, command.qpn, limit));
        }
        State::Error => enter_error(core, qp, host),
        _ => {
            if to == State::Rts && (qp.stopped || from == State::Sqe) {
                // Whatever was posted before this command belongs to what failed, and not all of
                // it may have been flushed yet. What is posted later does not make it longer.
                let refreshed = match modification.end {
                    Some(_) => Ok(()),
                    None => qp.send.refresh(host),
                };
                let end = *modification.end.get_or_insert(qp.send.producer());
                if refreshed.is_err() || !flush_send(core, qp, end, limit, host) {
                    fail(core, qp, host);
                } else if qp.send.is_open_before(end) {
                    return Ok(None);
                } else {
                    raise_all_owed(core, qp, host);
                }
                qp.stopped = false;
            }
            if qp.state == State::Error {
                // The completion queue did not take them: it failed before the command could do
                // anything.
                return Err(CommandStatus::BadState);
            }
            take_attributes(&mut qp.attributes, command);
            qp.state = to;
            transport::modified(core, qp, from, command.mask, host);
            qp.draining = to == State::Sqd && from != to;
            if qp.draining && qp.send.retired() == qp.send.next() {
                qp.draining = false;
                core.async_event(EventCode::SendQueueDrained, qp.number, host);
            }
            if to == State::Rts {
                core.schedule(qp);
            }
        }
    }
    Ok(Some(()))
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
        MODIFY_ADDRESS_VECTOR: address_vector,
        MODIFY_MTU: log_mtu,
        MODIFY_TIMEOUT: timeout,
        MODIFY_RETRY: retry_count,
        MODIFY_RNR_RETRY: rnr_retry,
        MODIFY_RECEIVE_PSN: receive_psn,
        MODIFY_ORD: ord,
        MODIFY_MIN_RNR_TIMER: min_rnr_timer,
        MODIFY_SEND_PSN: send_psn,
        MODIFY_IRD: ird,
        MODIFY_DESTINATION: destination_qpn,
    }
    attributes.mask |= command.mask & !(MODIFY_STATE | MODIFY_CURRENT_STATE);
}

/// To state RESET: everything as it was after `CreateQueuePair`, nothing completed. Its windows [are
/// left](invalidate_windows).
fn reset(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    qp.state = State::Reset;
    qp.draining = false;
    qp.stopped = false;
    qp.owed.clear();
    core.stop_waiting(qp);
    qp.timer.stop();
    give_back(core, qp, host);
    qp.attributes = ModifyQueuePair {
        qpn: qp.number,
        ..ModifyQueuePair::zeroed()
    };
    if qp.send.reset(host).is_err() || qp.receive.reset(host).is_err() {
        core.async_event(EventCode::QueuePairFatal, qp.number, host);
    }
}

/// Forgets what is under way. An entry taken from a shared receive queue is completed as flushed:
/// nobody else would ever learn what became of it.
fn give_back(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    let taken = qp.transport.taken_receive();
    transport::forget(core, qp);
    core.paging.forget(qp.number);
    if let Some(completion) = taken {
        // Nobody is left to tell where the completion queue is dead.
        let _ = core.complete_receive(qp, &completion, host);
    }
}

/// To state ERROR: the transport forgets everything, and each work request and receive without
/// completion is completed as flushed.
pub fn enter_error(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    enter_error_with(core, qp, None, host);
}

/// The same; unless it is there already, an event says why.
fn enter_error_with(
    core: &mut Core,
    qp: &mut QueuePair,
    cause: Option<OwedEvent>,
    host: &mut dyn Host,
) {
    let entered = qp.state != State::Error;
    qp.state = State::Error;
    qp.draining = false;
    qp.stopped = false;
    qp.timer.stop();
    core.stop_waiting(qp);
    let taken = qp.transport.taken_receive();
    let refused = qp.transport.refused();
    transport::forget(core, qp);
    core.paging.forget(qp.number);
    if entered {
        // It will not come to what was to be told before.
        qp.owed.clear();
    }
    flush(core, qp, host);
    if let Some(completion) = taken {
        let _ = core.complete_receive(qp, &completion, host);
    }
    if entered {
        let last = qp.srqn.is_some().then_some((EventCode::LastWqeReached, 0));
        qp.owed.extend(last.into_iter().chain(refused).chain(cause));
        raise_owed(core, qp, host);
    }
}

/// Raises the events that wait for completions, once those are written: whoever reads of a failure
/// finds all that it did to the work requests.
fn raise_owed(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    let sends = qp.has_send_queue() && qp.send.retired() != qp.send.producer();
    let receives = qp.state == State::Error
        && qp.has_receive_queue()
        && qp.receive.retired() != qp.receive.producer();
    if !sends && !receives {
        raise_all_owed(core, qp, host);
    }
}

fn raise_all_owed(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    for (code, why) in std::mem::take(&mut qp.owed) {
        core.async_event_with(code, qp.number, why, host);
    }
}

/// What follows the error completion of a work request: everything else posted to the send queue
/// is flushed, and with a reliable service the queue pair is in error.
pub fn enter_send_error(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if !qp.is_unreliable() {
        enter_error(core, qp, host);
        return;
    }
    qp.state = State::Sqe;
    qp.draining = false;
    flush_stopped(core, qp, host);
}

/// To state ERROR where the consumer cannot learn of it from a completion: the completion queue
/// is dead, or the rings make no sense.
pub fn fail(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    enter_error_with(core, qp, Some((EventCode::QueuePairFatal, 0)), host);
}

/// Stops the send queue after the completion of a registration that failed
/// ([`QueuePair::drains`]), with all before it complete: to state SQD, with everything behind it
/// flushed. The peer's requests are served on.
pub(crate) fn stop_sending(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    qp.state = State::Sqd;
    qp.draining = false;
    qp.stopped = true;
    qp.owed.push((EventCode::SendQueueDrained, 0));
    flush_stopped(core, qp, host);
}

/// Completes what is posted to a send queue that was stopped, and asks to be told of more.
pub(crate) fn flush_stopped(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if flush_posted_sends(core, qp, host) {
        raise_owed(core, qp, host);
    } else {
        fail(core, qp, host);
    }
}

/// Completes what is posted to the send queue, [`MAX_FLUSH`] work requests at a time and the rest
/// in the turns of the queue pair; false when that cannot be done.
fn flush_posted_sends(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    // Posts that come in meanwhile are seen at the second look or ring a doorbell.
    for _ in 0..2 {
        let more = qp.send.sleep(host);
        if !flush_send(core, qp, qp.send.producer(), MAX_FLUSH, host) {
            return false;
        }
        if qp.send.retired() != qp.send.producer() {
            core.schedule(qp);
            break;
        }
        match more {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) => return false,
        }
    }
    true
}

/// Completes what is posted to a queue pair in state ERROR, and asks to be told of more.
pub(crate) fn flush(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if qp.has_send_queue() {
        flush_posted_sends(core, qp, host);
    }
    if qp.has_receive_queue() {
        flush_posted_receives(core, qp, host);
    }
    raise_owed(core, qp, host);
}

fn flush_posted_receives(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    for _ in 0..2 {
        let more = qp.receive.sleep(host);
        flush_receive(core, qp, host);
        if qp.receive.retired() != qp.receive.producer() {
            core.schedule(qp);
            break;
        }
        if !matches!(more, Ok(true)) {
            break;
        }
    }
}

/// Completes what is known to be posted before `end`, `limit` work requests at most; false when the
/// completion queue is dead.
fn flush_send(
    core: &mut Core,
    qp: &mut QueuePair,
    end: u32,
    limit: u32,
    host: &mut dyn Host,
) -> bool {
    let mut request = SendRequest::default();
    for _ in 0..limit {
        if !qp.send.is_open_before(end) {
            break;
        }
        core.work += 1;
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
            return false;
        }
    }
    true
}

fn flush_receive(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    for _ in 0..MAX_FLUSH {
        if qp.receive.retired() == qp.receive.producer() {
            break;
        }
        core.work += 1;
        let completion = ReceiveCompletion {
            index: qp.receive.retired(),
            shared: None,
            origin: None,
            status: CompletionStatus::Flushed,
            opcode: CompletionOpcode::Receive,
            byte_count: 0,
            immediate: 0,
            tag: 0,
            flags: 0,
            vendor_syndrome: 0,
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
    /// The table refused to bind a window.
    Bind(TptError),
}

impl LocalError {
    /// The completion status and its vendor syndrome.
    pub fn status(self) -> (CompletionStatus, u32) {
        match self {
            Self::NotAllowed | Self::Unsupported => {
                (CompletionStatus::LocalQueuePairOperation, 0x200)
            }
            Self::Table(error) => (CompletionStatus::LocalProtection, error.vendor_syndrome()),
            Self::Bind(error) => (CompletionStatus::WindowBind, error.vendor_syndrome()),
        }
    }
}

/// Carries out a work request that no packet is sent for: a registration, local invalidation or
/// bind.
/// The transport calls it when the request's turn comes, and completes it.
pub(crate) fn execute_local(
    core: &mut Core,
    qp: &QueuePair,
    request: &SendRequest,
    waited: Waited,
    host: &mut dyn Host,
) -> Result<(), LocalError> {
    if request.registration.is_some() {
        let early = register(core, qp, request, waited, host)?;
        core.counters.early_uses += u64::from(early);
        return Ok(());
    }
    match (&request.body, request.opcode) {
        (_, SendOpcode::LocalInvalidate) => {
            // What it is made as counts.
            core.tpt.ready(request.tag).map_err(LocalError::Table)?;
            if let Err(error) = core.tpt.stands(request.tag) {
                if let error @ TptError::Pending(_) = core.confirm(error, waited, host) {
                    return Err(LocalError::Table(error));
                }
            }
            // Without the features there are no such flags, see `create`.
            let allowed_by = match core.tpt.kind(request.tag) {
                Some(TagKind::Window1 | TagKind::Window2B) => None,
                Some(TagKind::Region) => Some(QP_FLAG_FAST_REGISTER),
                Some(TagKind::List) => Some(QP_FLAG_LISTS),
                None => Some(QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS),
            };
            if allowed_by.is_some_and(|flags| qp.flags & flags == 0) {
                return Err(LocalError::NotAllowed);
            }
            let early = core.tpt.is_early(request.tag);
            core.tpt
                .invalidate(request.tag, qp.holder())
                .map_err(LocalError::Table)?;
            core.counters.early_uses += u64::from(early);
            Ok(())
        }
        (SendBody::Bind(part), SendOpcode::Bind) => {
            check_rights(core, part.access)?;
            if core.features & FEATURE_WINDOWS == 0 {
                return Err(LocalError::Unsupported);
            }
            let early = part.length != 0 && core.tpt.is_early(part.region);
            let bound = core.tpt.bind(part, qp.holder());
            bound.map_err(|error| LocalError::Bind(core.confirm(error, waited, host)))?;
            core.counters.early_uses += u64::from(early);
            Ok(())
        }
        _ => Err(LocalError::NotAllowed),
    }
}

/// Refuses rights that host and device have not agreed on.
fn check_rights(core: &Core, access: u32) -> Result<(), LocalError> {
    let needed = access_features(access);
    if core.features & needed != needed {
        return Err(LocalError::Unsupported);
    }
    Ok(())
}

/// Carries out the registration of a work request: all that it does, or what it does before it
/// sends. Returns whether a piece was an [early use](crate::Counters::early_uses), which the caller
/// counts together with what is sent.
pub(crate) fn register(
    core: &mut Core,
    qp: &QueuePair,
    request: &SendRequest,
    waited: Waited,
    host: &mut dyn Host,
) -> Result<bool, LocalError> {
    let Some(registration) = &request.registration else {
        return Err(LocalError::NotAllowed);
    };
    let (flag, access) = match registration {
        Registration::Region(part) => (QP_FLAG_FAST_REGISTER, part.access),
        Registration::List(part) => (QP_FLAG_LISTS, part.access),
    };
    check_rights(core, access)?;
    if qp.flags & flag == 0 {
        return Err(LocalError::NotAllowed);
    }
    let pieces = request.pieces();
    let early = pieces.iter().any(|piece| core.tpt.is_early(piece.lkey));
    let registered = match registration {
        Registration::Region(part) => core.tpt.register_from_queue(part, qp.pd),
        Registration::List(part) => core.tpt.register_list(part, pieces, qp.pd),
    };
    registered.map_err(|error| LocalError::Table(core.confirm(error, waited, host)))?;
    core.counters.sq_registrations += 1;
    Ok(early)
}

#[cfg(test)]
mod tests;
