// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The transport services over RoCEv2 (IBTA volume 1, chapters 9.7 and 9.8): requester and
//! responder of a reliable connection, and what unreliable services have in their place.
//!
//! Nothing waits here. [`receive`] looks at one frame; what has to be sent because of it, like
//! everything else, is sent by [`send`] when the engine is polled, a bounded burst at a time, so
//! that queue pairs take turns and acknowledgements of packets that came together are one packet.

mod delay;
mod raw;
mod requester;
mod responder;
mod unreliable;

use crate::core::{
    Allowance, Core, LentLook, ReceiveCompletion, COPIES_PER_FRAME, HEADERS, MAX_LOG_MTU, PORTS,
};
use crate::counters::QpCounters;
use crate::loan::{Lender, Loan, Payload};
use crate::memory::{Host, Lending, Way};
use crate::multicast::{is_multicast, MULTICAST_QPN};
use crate::paging::{Place, Side};
use crate::qp::{OwedEvent, QueuePair, QueuePairs};
use crate::roce::{
    self, Bth, Frame, Packet, PacketError, Path, Template, PKEY_DEFAULT, VLAN_ID_MASK,
};
use crate::{Disposition, Medium, Progress};
use ferrite_abi::{QueuePairStateCode as State, Service};
use ferrite_abi::{
    FEATURE_ATOMICS, FEATURE_ATOMIC_WRITE, FEATURE_FAST_REGISTER, FEATURE_FLUSH, FEATURE_LISTS,
    FEATURE_MULTICAST, FEATURE_UC, FEATURE_UD, FEATURE_WINDOWS, FEATURE_XRC, MODIFY_ADDRESS_VECTOR,
    MODIFY_RETRY, MODIFY_RNR_RETRY, VLAN_NONE,
};
pub(crate) use raw::receive as receive_raw;
use requester::Requester;
use responder::Responder;
use std::sync::Arc;
use unreliable::Sender;

/// Whether host and device have agreed on something that tags are invalidated for: registration
/// through send queues, windows, or lists.
fn invalidates(core: &Core) -> bool {
    core.features & (FEATURE_FAST_REGISTER | FEATURE_WINDOWS | FEATURE_LISTS) != 0
}

/// The features that are this module's doing.
pub const FEATURES: u64 = FEATURE_ATOMICS
    | FEATURE_ATOMIC_WRITE
    | FEATURE_UD
    | FEATURE_XRC
    | FEATURE_FLUSH
    | FEATURE_MULTICAST
    | FEATURE_UC;

/// Why a frame was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// It is lost.
    Dropped,
    /// It is looked at again when what it waits for is there.
    Waits(Place),
}

/// The protocol state of a queue pair.
#[derive(Debug, Default)]
pub struct Connection {
    requester: Requester,
    responder: Responder,
    /// In place of the requester, where nothing is acknowledged.
    sender: Sender,
    /// The headers of its path, from state RTR on.
    template: Option<Template>,
    /// The peer has sent a packet by memory, which was taken: it is in this engine, or behind a shortcut, or
    /// in another engine of this process. Which of them, [`Host::lends`] tells by its address.
    peer_is_inside: bool,
    /// What is lent to answer the peer is lent as long as there is this connection.
    lender: Lender,
    /// The next answer waits until what is lent was read, and when that is looked at.
    pub(crate) behind_lent: Option<LentLook>,
}

impl Connection {
    /// The next sequence number to send and the next to expect.
    pub fn sequence_numbers(&self) -> (u32, u32) {
        // One of the two that send is not in use and stays at zero.
        let sent = self.requester.psn() | self.sender.psn();
        (sent, self.responder.psn())
    }

    /// How far both directions are: the next request to take and the oldest of the own not answered.
    fn progress(&self) -> (u32, u32) {
        (self.responder.psn(), self.requester.una())
    }

    /// Messages under way that the peer has to answer.
    pub(crate) fn messages_under_way(&self) -> usize {
        self.requester.messages_under_way()
    }

    /// The sequence number of the peer's next request.
    pub(crate) fn expected_psn(&self) -> u32 {
        self.responder.psn()
    }

    /// The event that a refused request of the peer is to be told by.
    pub(crate) fn refused(&self) -> Option<OwedEvent> {
        self.responder.refused()
    }

    /// The entry of a shared receive queue that was taken and has no completion, to be flushed.
    pub(crate) fn taken_receive(&self) -> Option<ReceiveCompletion> {
        self.responder.taken_receive()
    }
}

/// What all connections share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Messages under way on all connections.
    pub(crate) under_way: usize,
    /// The frame being made.
    frame: Vec<u8>,
    identification: u16,
    /// Messages not in use. Boxed, as they are where they are in use: they are large and move.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<requester::Message>>,
    /// Work requests not in use.
    #[allow(clippy::vec_box)]
    requests: Vec<Box<crate::queue::SendRequest>>,
    /// The receive of the datagram being placed.
    receive: crate::queue::ReceiveRequest,
}

/// Writes a frame of a path and sends it, for the queue pair with these counters: `fill` appends what follows the base header and returns
/// the padding, which must be that of `bth`.
fn send_packet<E>(
    core: &mut Core,
    counters: &mut QpCounters,
    template: &Template,
    bth: &Bth,
    host: &mut dyn Host,
    fill: impl FnOnce(&mut Vec<u8>, &Core, &mut dyn Host) -> Result<(), E>,
) -> Result<(), E> {
    let mut frame = std::mem::take(&mut core.transport.frame);
    template.begin(&mut frame, bth);
    let filled = fill(&mut frame, core, host);
    if filled.is_ok() {
        core.transport.identification = core.transport.identification.wrapping_add(1);
        let medium = core.way(&template.destination_mac(), host).medium();
        template.finish(&mut frame, bth.pad, core.transport.identification, medium);
        core.transmit(&frame, counters, host);
    }
    core.transport.frame = frame;
    filled
}

/// Bytes of a loan that are as much work as a copy for a member of a group.
const LENT_PER_WORK: u64 = 1024;
/// Bytes below which a copy takes less than a loan.
pub(crate) const MIN_LENT: u32 = 2 << 10;

/// Counts as work that this payload is copied from where it lies, which may be long after it came.
fn count_copy(core: &mut Core, payload: Payload<'_>) {
    if let Payload::Lent(loan) = payload {
        core.work += loan.len() as u64 / LENT_PER_WORK;
    }
}

/// Whether payload may be lent to the peer of `qp`, and how much.
fn lends(core: &Core, qp: &QueuePair, host: &dyn Host) -> Option<Lending> {
    if !qp.transport.peer_is_inside {
        return None;
    }
    // A frame from another address is not sure to get there.
    let path = qp.transport.template.as_ref();
    let path = path.filter(|path| path.source_mac() == core.config.mac)?;
    host.lends(&path.destination_mac())
}

/// How many of the `left` bytes from `offset` on are lent at once where so many `packets` may be sent, if
/// they are `least`. They end at the same places where there is a budget for it; who has taken some of them
/// asks for the rest.
fn lent_size(
    lending: Lending,
    offset: u32,
    left: u32,
    packets: u32,
    log_mtu: u8,
    least: u32,
) -> Option<u32> {
    let at_once = lending.at_once;
    let most = packets.min(at_once >> log_mtu) << log_mtu;
    let size = left.min(at_once - offset % at_once).min(most);
    (size >= least).then_some(size)
}

/// Where the payload of what is sent comes from.
enum Source<G> {
    /// It is lent, and so many packets go as one.
    Lent(Loan, u32),
    /// So many bytes are written into the only packet by a function.
    Copied(u32, G),
}

/// Sends a packet, or several in a row as one where their payload is lent. `headers` appends what
/// follows the base header.
fn send_payload<E>(
    core: &mut Core,
    counters: &mut QpCounters,
    template: &Template,
    bth: Bth,
    source: Source<impl FnOnce(&mut [u8], &Core, &mut dyn Host) -> Result<(), E>>,
    host: &mut dyn Host,
    headers: impl FnOnce(&mut Vec<u8>),
) -> Result<(), E> {
    let (loan, packets) = match source {
        Source::Lent(loan, packets) => (loan, packets),
        Source::Copied(length, copy) => {
            let pad = (length.wrapping_neg() & 3) as u8;
            let bth = Bth { pad, ..bth };
            return send_packet(core, counters, template, &bth, host, |frame, core, host| {
                headers(frame);
                let start = frame.len();
                frame.resize(start + length as usize, 0);
                copy(&mut frame[start..], core, host)
            });
        }
    };
    let mut head = std::mem::take(&mut core.transport.frame);
    template.begin(&mut head, &bth);
    headers(&mut head);
    core.transport.identification = core.transport.identification.wrapping_add(1);
    let identification = core.transport.identification;
    template.finish(&mut head, bth.pad, identification, Medium::Memory);
    core.transmit_lent(&head, loan, packets, counters, host);
    core.transport.frame = head;
    Ok(())
}

/// The upper bits of the opcodes of a service. The lower bits are the same for all.
fn service_bits(service: Service) -> u8 {
    match service {
        Service::Rc => 0x00,
        Service::Uc => 0x20,
        Service::Ud | Service::Gsi => 0x60,
        Service::XrcIni | Service::XrcTgt => 0xa0,
        // It sends no packets of the transport.
        Service::Raw => 0xc0,
    }
}

/// A base header for a packet to the peer of `qp`; `opcode` is that of a reliable connection.
fn base_header(qp: &QueuePair, opcode: u8, psn: u32) -> Bth {
    Bth {
        opcode: opcode | service_bits(qp.service),
        migrated: true,
        pkey: PKEY_DEFAULT,
        qpn: qp.attributes.destination_qpn,
        psn,
        ..Bth::default()
    }
}

/// Forgets all that is under way on `qp`.
pub(crate) fn forget(core: &mut Core, qp: &mut QueuePair) {
    requester::settle_all(core, qp);
    core.transport.under_way -= qp.transport.messages_under_way();
    core.goes_past_lent(qp);
    qp.transport = Connection::default();
}

/// A modification of `qp` was taken over: `from` is the state it was in.
pub(crate) fn modified(
    core: &mut Core,
    qp: &mut QueuePair,
    from: State,
    mask: u32,
    _host: &mut dyn Host,
) {
    if mask & MODIFY_ADDRESS_VECTOR != 0 {
        qp.transport.template = template(core, qp);
        qp.transport.peer_is_inside = false;
    }
    if mask & (MODIFY_RETRY | MODIFY_RNR_RETRY) != 0 {
        qp.transport.requester.set_retries(&qp.attributes);
    }
    if qp.state != from {
        match (from, qp.state) {
            (State::Init, State::Rtr) => {
                qp.transport.responder.start(qp.attributes.receive_psn);
            }
            (State::Rtr, State::Rts) => match qp.service {
                Service::Rc | Service::XrcIni | Service::XrcTgt => {
                    qp.transport.requester.start(&qp.attributes);
                }
                _ => qp.transport.sender.start(qp.attributes.send_psn),
            },
            _ => {}
        }
    }
}

/// The headers of the path of `qp`; none where source and destination do not go together.
fn template(core: &Core, qp: &QueuePair) -> Option<Template> {
    let (path, peer) = (&qp.attributes.address_vector, qp.attributes.destination_qpn);
    template_of(core, path, qp.number, peer, false)
}

/// The headers of a path from queue pair `qpn` to queue pair `peer`; with `by_process` it stands
/// in a work request, not in a command of the driver.
fn template_of(
    core: &Core,
    path: &ferrite_abi::AddressVector,
    qpn: u32,
    peer: u32,
    by_process: bool,
) -> Option<Template> {
    if path.port >= PORTS {
        return None;
    }
    let source = core.gids.get(path.source_gid_index)?;
    // The priority comes from the path, the identifier from either; but a datagram's path is the
    // word of a process, which does not choose the network it sends into.
    let vlan = match (path.vlan, by_process) {
        (VLAN_NONE, _) => source.vlan,
        (tag, false) => Some(tag),
        (tag, true) => source.vlan.map(|id| (tag & !VLAN_ID_MASK) | id),
    };
    // Spread over the ephemeral ports, the same for all packets of a connection.
    let udp_source_port = match path.udp_source_port {
        0 => {
            let hash = qpn.wrapping_mul(0x9e37_79b1) ^ peer.wrapping_mul(0x85eb_ca6b);
            0xc000 | ((hash >> 16) as u16 & 0x3fff)
        }
        port => port,
    };
    Template::new(&Path {
        source_mac: source.mac,
        destination_mac: path.mac,
        vlan,
        source: source.gid,
        destination: path.gid,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        udp_source_port,
    })
    .ok()
}

/// Sends what a queue pair has to send and its way has room for, a burst at most. `turn` is the way
/// on which it is this queue pair's turn, of those that wait for room there.
pub(crate) fn send(
    core: &mut Core,
    qp: &mut QueuePair,
    burst: u32,
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Progress {
    match qp.service {
        Service::Rc | Service::XrcIni | Service::XrcTgt => {}
        _ if !qp.has_send_queue() => return Progress::Drained,
        _ => return unreliable::run(core, qp, burst, turn, host),
    }
    // Without a path there is nothing to send; the work requests fail.
    let way = match &qp.transport.template {
        Some(template) => core.way(&template.destination_mac(), host),
        None => Way::Loopback,
    };
    let room = core.allowance(way, qp.mtu(), 2 * burst, turn, host);
    // Reads of the peer and requests to it share what there is.
    let answers = Allowance {
        data: room.data.div_ceil(2).min(burst),
        answers: room.answers.min(burst),
        ..room
    };
    let mut left = answers;
    let more_answers = responder::run(core, qp, host, &mut left);
    let requests = (room.data - (answers.data - left.data)).min(burst);
    let progress = if qp.has_send_queue() {
        requester::run(core, qp, host, requests)
    } else {
        Progress::Drained
    };
    // Whoever is stopped before the end of a burst is stopped by the way.
    let stopped = more_answers && (answers.data < burst || answers.answers < burst)
        || progress == Progress::More && requests < burst;
    if stopped && room.is_little {
        requester::watch_in_line(core, qp);
        Progress::Full(way)
    } else if more_answers {
        Progress::More
    } else {
        progress
    }
}

/// Answers that a queue pair sends when it goes, at most.
const LAST_ANSWERS: u32 = 16;

/// Sends the acknowledgements that a queue pair owes which is about to go, by a command. What they are for is done, and
/// its host has been told: that may be why it goes. A peer that does not hear of it asks in vain, and takes what was
/// done for failed.
pub(crate) fn take_leave(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    if !matches!(qp.service, Service::Rc | Service::XrcTgt) {
        return;
    }
    let mut allowed = Allowance {
        data: 0,
        answers: LAST_ANSWERS,
        is_little: false,
    };
    responder::run(core, qp, host, &mut allowed);
}

/// The timer of `qp` ran out.
pub(crate) fn expired(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) {
    requester::expired(core, qp, host);
}

/// Looks at a frame from the wire. What is not for a queue pair of this device belongs to the
/// ordinary network interface.
pub(crate) fn receive_frame(
    core: &mut Core,
    qps: &mut QueuePairs,
    bytes: &[u8],
    medium: Medium,
    host: &mut dyn Host,
) -> Disposition {
    let Some(frame) = Frame::parse(bytes) else {
        return Disposition::PassToHost;
    };
    if frame.destination_qpn() == MULTICAST_QPN {
        return receive_multicast(core, qps, bytes, &frame, medium, host);
    }
    let qp = qps.get_mut(frame.destination_qpn());
    let Some(qp) = qp.filter(|qp| qp.service != Service::Raw) else {
        return Disposition::PassToHost;
    };
    if !core.gids.contains(&frame.destination, frame.vlan_id()) {
        return Disposition::PassToHost;
    }
    core.counters.rx_packets += 1;
    core.counters.rx_bytes += bytes.len() as u64;
    if medium == Medium::Wire && !frame.icrc_ok() {
        core.counters.rx_icrc_errors += 1;
        return Disposition::Consumed;
    }
    // Whose it is is known now that it is known to be whole.
    count_received(qp, bytes);
    let delivered = if waits_in_line(core, qp) {
        Err(Left::Waits(Place::Last(None)))
    } else {
        deliver(core, qp, &frame, Came::By(medium), host)
    };
    keep(core, qp, bytes, None, delivered);
    Disposition::Consumed
}

/// How a packet came.
#[derive(Clone, Copy)]
enum Came<'a> {
    /// Whole, by this.
    By(Medium),
    /// Without its payload.
    Lending(&'a Arc<Loan>),
    /// A while ago.
    Before,
}

/// Looks at the headers of packets of another engine that lends their payload. They are
/// for a queue pair, which has sent something to that engine's before, or for nobody.
pub(crate) fn receive_lent(
    core: &mut Core,
    qps: &mut QueuePairs,
    head: &[u8],
    loan: &Arc<Loan>,
    host: &mut dyn Host,
) {
    let Some(frame) = Frame::parse(head) else {
        core.counters.rx_dropped += 1;
        return;
    };
    let qp = qps.get_mut(frame.destination_qpn());
    let Some(qp) = qp.filter(|qp| {
        let is_connected = matches!(qp.service, Service::Rc | Service::XrcIni | Service::XrcTgt);
        is_connected && core.gids.contains(&frame.destination, frame.vlan_id())
    }) else {
        core.counters.rx_dropped += 1;
        return;
    };
    let packets = u64::from(Payload::Lent(loan).packets());
    let bytes = (head.len() + loan.len()) as u64;
    core.counters.rx_packets += packets;
    core.counters.rx_bytes += bytes;
    qp.counters.rx_packets += packets;
    qp.counters.rx_bytes += bytes;
    let delivered = deliver(core, qp, &frame, Came::Lending(loan), host);
    keep(core, qp, head, Some(loan), delivered);
}

fn count_received(qp: &mut QueuePair, bytes: &[u8]) {
    qp.counters.rx_packets += 1;
    qp.counters.rx_bytes += bytes.len() as u64;
}

/// Whether all frames for `qp` wait behind one that waits for a page or a tag: those of services
/// without acknowledgement. Requests of connections are told apart when they are looked at.
fn waits_in_line(core: &Core, qp: &QueuePair) -> bool {
    matches!(
        qp.service,
        Service::Uc | Service::Ud | Service::Gsi | Service::Raw
    ) && (core.paging.is_waiting(qp.number, Side::Responder) || core.paging.has_parked(qp.number))
}

/// Bytes of a frame for `qp` at most, if its peer keeps to the MTU.
fn longest_frame(qp: &QueuePair) -> usize {
    let mtu = match qp.service {
        Service::Ud | Service::Gsi => 1 << MAX_LOG_MTU,
        Service::Raw => raw::MAX_FRAME,
        _ => qp.mtu(),
    };
    mtu + HEADERS
}

/// Keeps a frame for `qp` that waits.
fn keep(
    core: &mut Core,
    qp: &QueuePair,
    bytes: &[u8],
    loan: Option<&Arc<Loan>>,
    delivered: Result<(), Left>,
) {
    let kept = match delivered {
        Ok(()) => true,
        Err(Left::Dropped) => false,
        // Not looked at yet: in its turn, when it comes again, it is refused.
        Err(Left::Waits(place)) if bytes.len() > longest_frame(qp) => {
            core.paging.lose(qp.number, place);
            false
        }
        // It is not there any more when its turn comes.
        Err(Left::Waits(place)) if loan.is_some_and(|loan| loan.is_passing()) => {
            core.paging.lose(qp.number, place);
            false
        }
        Err(Left::Waits(place)) => {
            let owner = qp.doorbell_page;
            core.paging.park(qp.number, owner, bytes, loan, place)
        }
    };
    core.counters.rx_dropped += u64::from(!kept);
}

/// The host has dealt with the page that `qp` waited for on this side, or something has become of
/// the tag.
pub(crate) fn page_resolved(core: &mut Core, qp: &mut QueuePair, side: Side) {
    if side == Side::Requester {
        requester::page_resolved(core, qp);
        core.schedule(qp);
        return;
    }
    core.schedule(qp);
    core.paging.deliver(qp.number);
}

/// Looks again at frames that waited, at so many at most, or fewer if they are as much work; returns at
/// how many.
pub(crate) fn deliver_parked(
    core: &mut Core,
    qp: &mut QueuePair,
    most: u32,
    host: &mut dyn Host,
) -> u32 {
    let end = core.work + u64::from(most) * COPIES_PER_FRAME as u64;
    for done in 0..most {
        if core.work >= end {
            core.paging.deliver(qp.number);
            return done;
        }
        let Some(parked) = core.paging.unpark(qp.number) else {
            if let Some(lost) = core.paging.take_lost(qp.number) {
                responder::lost(core, qp, lost);
            }
            return done;
        };
        if qp.service == Service::Raw {
            match raw::deliver(core, qp, &parked.frame, host) {
                Ok(()) => {}
                Err(Left::Dropped) => core.counters.rx_dropped += 1,
                Err(Left::Waits(_)) => {
                    core.counters.rx_dropped += core.paging.park_again(qp.number, parked);
                    return done + 1;
                }
            }
            continue;
        }
        let Some(frame) = Frame::parse(&parked.frame) else {
            continue;
        };
        let delivered = match parked.place {
            Place::Last(group @ Some(_)) => unreliable::datagram(core, qp, &frame, group, host),
            _ => {
                let came = parked.loan.as_ref().map_or(Came::Before, Came::Lending);
                deliver(core, qp, &frame, came, host)
            }
        };
        match delivered {
            Ok(()) => {}
            Err(Left::Dropped) => core.counters.rx_dropped += 1,
            Err(Left::Waits(_)) => {
                core.counters.rx_dropped += core.paging.park_again(qp.number, parked);
                return done + 1;
            }
        }
    }
    // The rest has another turn.
    core.paging.deliver(qp.number);
    most
}

/// Looks at a frame to all members of a group.
fn receive_multicast(
    core: &mut Core,
    qps: &mut QueuePairs,
    bytes: &[u8],
    frame: &Frame<'_>,
    medium: Medium,
    host: &mut dyn Host,
) -> Disposition {
    let members = core.groups.members(&frame.destination).to_vec();
    if members.is_empty()
        || !is_multicast(&frame.destination)
        || !core.gids.reaches(frame.vlan_id())
    {
        return Disposition::PassToHost;
    }
    core.counters.rx_packets += 1;
    core.counters.rx_bytes += bytes.len() as u64;
    if medium == Medium::Wire && !frame.icrc_ok() {
        core.counters.rx_icrc_errors += 1;
        return Disposition::Consumed;
    }
    let group = Some(core.gids.contains(&frame.source, frame.vlan_id()));
    core.work += members.len() as u64;
    for qpn in members {
        let Some(qp) = qps.get_mut(qpn) else {
            continue;
        };
        count_received(qp, bytes);
        let delivered = if waits_in_line(core, qp) {
            Err(Left::Waits(Place::Last(group)))
        } else {
            unreliable::datagram(core, qp, frame, group, host)
        };
        keep(core, qp, bytes, None, delivered);
    }
    Disposition::Consumed
}

/// Hands a packet to the requester or responder it is for.
fn deliver(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &Frame<'_>,
    came: Came<'_>,
    host: &mut dyn Host,
) -> Result<(), Left> {
    if !qp.may_receive() {
        return Err(Left::Dropped);
    }
    let service = match qp.service {
        Service::Rc => roce::Service::Rc,
        Service::Uc => roce::Service::Uc,
        Service::XrcIni | Service::XrcTgt => roce::Service::Xrc,
        Service::Ud | Service::Gsi => {
            return unreliable::datagram(core, qp, frame, None, host);
        }
        Service::Raw => return Err(Left::Dropped),
    };
    // Only the peer may speak on a connection, and only to the address it was given, in the VLAN
    // that this side sends into.
    let path = &qp.attributes.address_vector;
    let own = core.gids.get(path.source_gid_index);
    let own = own.ok_or(Left::Dropped)?;
    let vlan = match path.vlan {
        VLAN_NONE => own.vlan_id(),
        tag => tag & VLAN_ID_MASK,
    };
    if frame.source != path.gid || frame.destination != own.gid || frame.vlan_id() != vlan {
        return Err(Left::Dropped);
    }
    let packet = Packet::parse(frame.transport).and_then(|packet| match came {
        Came::Lending(loan) => packet.with_loan(loan),
        Came::By(_) | Came::Before => Ok(packet),
    });
    let packet = match packet {
        Ok(packet) => packet,
        Err(PacketError::Opcode(bth)) => {
            return responder::unknown(core, qp, &bth).ok_or(Left::Dropped);
        }
        Err(PacketError::Truncated | PacketError::Version) => return Err(Left::Dropped),
    };
    // The membership bit is no part of the key.
    if packet.bth.pkey & 0x7fff != PKEY_DEFAULT & 0x7fff {
        return Err(Left::Dropped);
    }
    if packet.info.service != service {
        return Err(Left::Dropped);
    }
    let before = qp.transport.progress();
    let taken = match (qp.service, packet.info.is_request()) {
        (Service::Uc, true) => responder::unreliable_request(core, qp, &packet, host),
        (Service::XrcIni, true) | (Service::XrcTgt, false) => Err(Left::Dropped),
        (_, true) => responder::request(core, qp, &packet, host),
        (_, false) => requester::response(core, qp, &packet, host).ok_or(Left::Dropped),
    };
    // Anybody may make headers up; what the peer alone can know is which packet is next.
    if matches!(came, Came::By(Medium::Memory)) && qp.transport.progress() != before {
        qp.transport.peer_is_inside = true;
    }
    taken
}
