// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Services without acknowledgement: datagrams, and the sending side of unreliable connections.
//!
//! A message is complete for its sender when its last packet has left. A work request that cannot
//! be sent stops the send queue (state SQE) and nothing else.

use super::requester::{extend_headers, is_agreed_on, wire_opcode, Failure};
use super::{base_header, raw, send_payload, template_of, Left, Source};
use crate::core::{Core, Origin, ReceiveCompletion, SendCompletion, Waited, MAX_LOG_MTU};
use crate::counters::count;
use crate::memory::{Host, Way};
use crate::paging::{Outcome, Place, Side};
use crate::qp::{self, LocalError, QueuePair};
use crate::queue::{registers, QueueError, ReceiveRequest, SendBody, SendRequest};
use crate::roce::{self, psn_add, Bth, Deth, Frame, Packet, Position, Template, PKEY_DEFAULT};
use crate::tpt::{LocalAccess, TptError};
use crate::Progress;
use ferrite_abi::{
    CompletionStatus, QueuePairStateCode as State, SendOpcode, Service, COMPLETION_GRH,
    COMPLETION_IMMEDIATE, COMPLETION_IPV6, COMPLETION_SOLICITED, QUEUE_NUMBER_MASK, SEND_SOLICITED,
    VLAN_NONE,
};

/// The queue key of management datagrams.
const GSI_QKEY: u32 = 0x8001_0000;
/// A queue key with this bit stands for the queue pair's own.
const QKEY_PRIVILEGED: u32 = 1 << 31;
/// Bytes in front of the data of a received datagram.
const HEADER_AREA: usize = 40;
/// Unused work requests kept for the next.
const MAX_SPARE: usize = 16;
/// The longest datagram that is received: the largest MTU there is.
const MAX_DATAGRAM: usize = 1 << MAX_LOG_MTU;

/// The state of a queue pair that sends without being acknowledged.
#[derive(Debug, Default)]
pub(super) struct Sender {
    /// The work request being sent, if it takes more than one packet.
    request: Option<Box<SendRequest>>,
    /// It was not begun, because it waits for a pending tag.
    unbegun: bool,
    /// How it has waited for tags.
    waited: Waited,
    /// Bytes of it that have left.
    offset: u32,
    psn: u32,
}

impl Sender {
    /// Starts with this sequence number.
    pub(super) fn start(&mut self, psn: u32) {
        *self = Self {
            psn,
            ..Self::default()
        };
    }

    /// The next sequence number, for queries.
    pub(super) fn psn(&self) -> u32 {
        self.psn
    }
}

/// Sends what is posted, at most `budget` packets.
pub(super) fn run(
    core: &mut Core,
    qp: &mut QueuePair,
    budget: u32,
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Progress {
    for _ in 0..budget {
        if !matches!(qp.state, State::Rts | State::Sqd) {
            return Progress::Blocked;
        }
        if core.paging.is_waiting(qp.number, Side::Requester) {
            return Progress::Blocked;
        }
        let (request, result) = match qp.transport.sender.request.take() {
            Some(request) => {
                let unbegun = std::mem::take(&mut qp.transport.sender.unbegun);
                let result = if unbegun {
                    begin(core, qp, &request, turn, host)
                } else {
                    packet(core, qp, &request, turn, host)
                };
                (request, result)
            }
            None => {
                if !has_next(core, qp, host) {
                    return Progress::Drained;
                }
                let mut request = core.transport.requests.pop().unwrap_or_default();
                let fetched = qp.send.fetch(host, qp.send.next(), &mut request);
                qp.send.advance(request.end());
                qp.transport.sender.offset = 0;
                qp.transport.sender.waited = Waited::default();
                let result = match fetched {
                    Ok(()) => begin(core, qp, &request, turn, host),
                    Err(error) => Err(error.into()),
                };
                (request, result)
            }
        };
        // One that succeeds never stops the queue, so that it need not be told apart.
        let stops = registers(request.posted) && is_agreed_on(core, request.posted) && qp.drains();
        let completion = match result {
            Ok(Sent::Part) => {
                qp.transport.sender.request = Some(request);
                continue;
            }
            Ok(Sent::Nothing) => {
                qp.transport.sender.request = Some(request);
                return Progress::Blocked;
            }
            Ok(Sent::Later(way)) => {
                qp.transport.sender.request = Some(request);
                return Progress::Full(way);
            }
            Ok(Sent::Pending(index)) => {
                let sender = &mut qp.transport.sender;
                sender.request = Some(request);
                core.wait_for_tag(qp.number, Side::Requester, index, &mut sender.waited);
                return Progress::Blocked;
            }
            Ok(Sent::All) => SendCompletion::of(&request, CompletionStatus::Success),
            Err(failure) => SendCompletion {
                byte_count: 0,
                vendor_syndrome: failure.vendor_syndrome,
                ..SendCompletion::of(&request, failure.status)
            },
        };
        if core.transport.requests.len() < MAX_SPARE {
            core.transport.requests.push(request);
        }
        if core.complete_send(qp, &completion, host).is_err() {
            qp::fail(core, qp, host);
            return Progress::Blocked;
        }
        if completion.status != CompletionStatus::Success {
            if stops {
                qp::stop_sending(core, qp, host);
            } else {
                qp::enter_send_error(core, qp, host);
            }
            return Progress::Blocked;
        }
    }
    Progress::More
}

/// Whether there is a work request that may be taken up.
fn has_next(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> bool {
    if qp.state != State::Rts {
        return false;
    }
    if !qp.send.has_next() && qp.send.refresh(host).is_err() {
        qp::fail(core, qp, host);
        return false;
    }
    qp.send.has_next()
}

/// How much of a work request has left.
pub(super) enum Sent {
    /// All of it.
    All,
    /// Another packet.
    Part,
    /// Nothing more: a page is not there.
    Nothing,
    /// Nothing more: there is no room on this way.
    Later(Way),
    /// Nothing more: what becomes of the tag with this index has to be seen.
    Pending(u32),
}

/// Checks a work request, and carries it out or sends its first packet.
fn begin(
    core: &mut Core,
    qp: &mut QueuePair,
    request: &SendRequest,
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Result<Sent, Failure> {
    let connected = qp.service == Service::Uc;
    if !is_agreed_on(core, request.posted) {
        return Err(QueueError::Opcode.into());
    }
    match request.opcode {
        SendOpcode::Send | SendOpcode::SendImmediate => {}
        SendOpcode::Write | SendOpcode::WriteImmediate if connected => {}
        SendOpcode::LocalInvalidate
        | SendOpcode::FastRegister
        | SendOpcode::RegisterList
        | SendOpcode::Bind
            if connected =>
        {
            let waited = qp.transport.sender.waited;
            return match qp::execute_local(core, qp, request, waited, host) {
                Ok(()) => Ok(Sent::All),
                Err(
                    LocalError::Table(TptError::Pending(index))
                    | LocalError::Bind(TptError::Pending(index)),
                ) => {
                    qp.transport.sender.unbegun = true;
                    Ok(Sent::Pending(index))
                }
                Err(error) => Err(error.into()),
            };
        }
        _ => return Err(QueueError::Opcode.into()),
    }
    let fits = match qp.service {
        Service::Uc => true,
        Service::Raw => raw::lengths(core).contains(&(request.length as usize)),
        _ => request.length <= 1 << core.log_mtu,
    };
    if !fits {
        return Err(QueueError::TooLong.into());
    }
    if let Err(error) = core.check_sges(qp.domain(), request.sges(), LocalAccess::Read) {
        let error = core.confirm(error, qp.transport.sender.waited, host);
        if let TptError::Pending(index) = error {
            qp.transport.sender.unbegun = true;
            return Ok(Sent::Pending(index));
        }
        count!(core, qp, access_errors);
        return Err(Failure {
            status: CompletionStatus::LocalProtection,
            vendor_syndrome: error.vendor_syndrome(),
        });
    }
    let early = core.uses_early(request.sges(), 0, request.length as usize);
    core.counters.early_uses += u64::from(early);
    packet(core, qp, request, turn, host)
}

/// Where a packet of a work request goes: the headers of the path and the datagram header.
fn destination(
    core: &Core,
    qp: &QueuePair,
    request: &SendRequest,
) -> Option<(Template, u32, Option<Deth>)> {
    let SendBody::Datagram(part) = &request.body else {
        return Some((qp.transport.template?, qp.attributes.destination_qpn, None));
    };
    let qpn = part.qpn & QUEUE_NUMBER_MASK;
    let template = template_of(core, &part.address_vector, qp.number, qpn, true)?;
    let qkey = match qp.service {
        Service::Gsi => GSI_QKEY,
        _ if part.qkey & QKEY_PRIVILEGED != 0 => qp.attributes.qkey,
        _ => part.qkey,
    };
    let deth = Deth {
        qkey,
        source_qpn: qp.number,
    };
    Some((template, qpn, Some(deth)))
}

/// Sends the next packet of a work request.
fn packet(
    core: &mut Core,
    qp: &mut QueuePair,
    request: &SendRequest,
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Result<Sent, Failure> {
    if qp.service == Service::Raw {
        return raw::send(core, qp, request, turn, host);
    }
    let (template, qpn, deth) = destination(core, qp, request)
        .ok_or(Failure::from(CompletionStatus::LocalQueuePairOperation))?;
    let offset = qp.transport.sender.offset;
    let left = request.length - offset;
    let payload = match deth {
        Some(_) => left,
        None => left.min(1 << qp.attributes.log_mtu),
    };
    let mac = template.destination_mac();
    if let Err(way) = core.room_for_datagram(&mac, payload as usize, turn, host) {
        return Ok(Sent::Later(way));
    }
    let ends = payload == left;
    let position = Position::of(offset == 0, ends);
    let bth = Bth {
        qpn,
        solicited: ends && request.flags & SEND_SOLICITED != 0,
        ..base_header(
            qp,
            wire_opcode(request.opcode, position),
            qp.transport.sender.psn,
        )
    };
    let domain = qp.domain();
    let copy = |to: &mut [u8], core: &Core, host: &mut dyn Host| {
        core.gather(host, domain, request, offset.into(), to)
    };
    let headers = |frame: &mut Vec<u8>| {
        if let Some(deth) = deth {
            frame.extend_from_slice(&deth.to_bytes());
        }
        extend_headers(frame, request, position, offset, payload);
    };
    let (counters, source) = (&mut qp.counters, Source::Copied(payload, copy));
    let sent = send_payload(core, counters, &template, bth, source, host, headers);
    if let Some(left) = gathered(core, qp, sent, host)? {
        return Ok(left);
    }
    let sender = &mut qp.transport.sender;
    sender.psn = psn_add(sender.psn, 1);
    sender.offset = offset + payload;
    Ok(if ends { Sent::All } else { Sent::Part })
}

/// What becomes of a work request whose data was gathered, or could not be: it is left where it is, is
/// sent (`None`), or fails.
pub(super) fn gathered(
    core: &mut Core,
    qp: &mut QueuePair,
    gathered: Result<(), TptError>,
    host: &mut dyn Host,
) -> Result<Option<Sent>, Failure> {
    let waited = qp.transport.sender.waited;
    let gathered = gathered.map_err(|error| core.confirm(error, waited, host));
    match gathered {
        Err(TptError::Absent(fault)) => {
            if core.page_fault(qp.number, Side::Requester, fault, host) == Outcome::Wait {
                return Ok(Some(Sent::Nothing));
            }
        }
        Err(TptError::Pending(index)) => return Ok(Some(Sent::Pending(index))),
        _ => core.paging.went_on(qp.number, Side::Requester),
    }
    gathered.map(|()| None).map_err(|error| {
        count!(core, qp, access_errors);
        Failure {
            status: CompletionStatus::LocalProtection,
            vendor_syndrome: error.vendor_syndrome(),
        }
    })
}

/// A datagram for `qp`, addressed to it or, with `group`, to a group it is in: that says whether it
/// comes from this device. It is not given to its very sender then.
pub(super) fn datagram(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &Frame<'_>,
    group: Option<bool>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    if !qp.may_receive() {
        return Err(Left::Dropped);
    }
    let packet = Packet::parse(frame.transport).map_err(|_| Left::Dropped)?;
    if packet.info.service != roce::Service::Ud || packet.bth.pkey & 0x7fff != PKEY_DEFAULT & 0x7fff
    {
        return Err(Left::Dropped);
    }
    let deth = packet.deth.ok_or(Left::Dropped)?;
    let qkey = match qp.service {
        Service::Gsi => GSI_QKEY,
        _ => qp.attributes.qkey,
    };
    let payload = packet.payload.bytes().ok_or(Left::Dropped)?;
    if deth.qkey != qkey || payload.len() > MAX_DATAGRAM {
        return Err(Left::Dropped);
    }
    if group == Some(true) && deth.source_qpn == qp.number {
        return Err(Left::Dropped);
    }
    receive_into(core, qp, host, |core, qp, receive, host| {
        let message = (&packet, payload, deth);
        place(core, qp, (frame, group), message, receive, host)
    })
}

/// Takes a receive for a message that came, and has it placed there.
pub(super) fn receive_into(
    core: &mut Core,
    qp: &mut QueuePair,
    host: &mut dyn Host,
    place: impl FnOnce(
        &mut Core,
        &mut QueuePair,
        (&ReceiveRequest, Waited),
        &mut dyn Host,
    ) -> Result<(), Left>,
) -> Result<(), Left> {
    // One may be left that was taken for a message whose page was not there.
    let kept = qp.transport.responder.take_kept();
    let mut receive = std::mem::take(&mut core.transport.receive);
    let mut waited = Waited::default();
    let taken = match kept {
        Some(kept) => {
            (receive, waited) = kept;
            Ok(true)
        }
        None => core.take_receive(host, qp, None, &mut receive),
    };
    let result = match taken {
        Ok(true) => place(core, qp, (&receive, waited), host),
        // Datagrams nobody waits for are lost.
        Ok(false) => Err(Left::Dropped),
        Err(QueueError::Producer) => {
            qp::fail(core, qp, host);
            Err(Left::Dropped)
        }
        Err(error) => {
            let status = CompletionStatus::LocalQueuePairOperation;
            fail_receive(core, qp, &receive, status, error.vendor_syndrome(), host);
            Err(Left::Dropped)
        }
    };
    core.transport.receive = receive;
    result
}

/// Places a datagram in a receive that was taken for it, and that may have `waited` for its memory, and
/// completes that.
fn place(
    core: &mut Core,
    qp: &mut QueuePair,
    (frame, group): (&Frame<'_>, Option<bool>),
    (packet, payload, deth): (&Packet<'_>, &[u8], Deth),
    (receive, waited): (&ReceiveRequest, Waited),
    host: &mut dyn Host,
) -> Result<(), Left> {
    let mut header = [0; HEADER_AREA];
    // An IPv6 header fills it; an IPv4 header stands at its end.
    let at = HEADER_AREA.checked_sub(frame.network_header.len());
    let at = at.ok_or(Left::Dropped)?;
    header[at..].copy_from_slice(frame.network_header);
    let length = HEADER_AREA + payload.len();
    let mut completion = ReceiveCompletion {
        origin: Some(Origin {
            qpn: deth.source_qpn,
            mac: frame.source_mac,
            vlan: frame.vlan.unwrap_or(VLAN_NONE),
        }),
        ..ReceiveCompletion::failed(receive, CompletionStatus::LocalLength, 0)
    };
    if length as u64 <= receive.capacity {
        let parts = [&header[..], payload];
        let place = Place::Last(group);
        scatter(core, qp, &parts, (receive, waited), place, host)?;
        completion.status = CompletionStatus::Success;
        completion.byte_count = length as u32;
        completion.flags = COMPLETION_GRH;
        if frame.ipv6 {
            completion.flags |= COMPLETION_IPV6;
        }
        if packet.bth.solicited {
            completion.flags |= COMPLETION_SOLICITED;
        }
        if let Some(bytes) = packet.immediate {
            completion.flags |= COMPLETION_IMMEDIATE;
            completion.immediate = u32::from_le_bytes(bytes);
        }
    }
    if core.complete_receive(qp, &completion, host).is_err() {
        qp::fail(core, qp, host);
        return Err(Left::Dropped);
    }
    Ok(())
}

/// Puts the parts of a message, one after the other, into a receive that has room for them. Where it
/// cannot yet, the message is to wait at `place`; where it never can, the receive has ended.
pub(super) fn scatter(
    core: &mut Core,
    qp: &mut QueuePair,
    parts: &[&[u8]],
    (receive, mut waited): (&ReceiveRequest, Waited),
    place: Place,
    host: &mut dyn Host,
) -> Result<(), Left> {
    let sges = receive.sges();
    let mut length = 0;
    let mut placed = Ok(());
    for part in parts {
        let at = length as u64;
        placed = placed.and_then(|()| core.scatter(&*host, receive.domain, sges, at, *part));
        length += part.len();
    }
    let placed = placed.map_err(|error| core.confirm(error, waited, host));
    let waits = match placed {
        Err(TptError::Absent(fault)) => {
            core.page_fault(qp.number, Side::Responder, fault, host) == Outcome::Wait
        }
        Err(TptError::Pending(index)) => {
            core.wait_for_tag(qp.number, Side::Responder, index, &mut waited);
            true
        }
        _ => {
            core.paging.went_on(qp.number, Side::Responder);
            false
        }
    };
    if waits {
        qp.transport.responder.keep(receive, waited);
        return Err(Left::Waits(place));
    }
    if let Err(error) = placed {
        count!(core, qp, access_errors);
        let status = CompletionStatus::LocalProtection;
        fail_receive(core, qp, receive, status, error.vendor_syndrome(), host);
        return Err(Left::Dropped);
    }
    let early = core.uses_early(sges, 0, length);
    core.counters.early_uses += u64::from(early);
    Ok(())
}

/// Ends a receive with an error that is the fault of this side, and with it the queue pair.
fn fail_receive(
    core: &mut Core,
    qp: &mut QueuePair,
    receive: &ReceiveRequest,
    status: CompletionStatus,
    vendor_syndrome: u32,
    host: &mut dyn Host,
) {
    let completion = ReceiveCompletion::failed(receive, status, vendor_syndrome);
    match core.complete_receive(qp, &completion, host) {
        Ok(()) => qp::enter_error(core, qp, host),
        Err(_) => qp::fail(core, qp, host),
    }
}
