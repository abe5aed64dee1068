// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The reliable connected service over RoCEv2 (IBTA volume 1, chapter 9.7): requester and
//! responder of a queue pair.
//!
//! Nothing waits here. [`receive`] looks at one frame; what has to be sent because of it, like
//! everything else, is sent by [`send`] when the engine is polled, a bounded burst at a time, so
//! that queue pairs take turns and acknowledgements of packets that came together are one packet.

mod delay;
mod requester;
mod responder;

use crate::core::Core;
use crate::memory::Host;
use crate::qp::{QueuePair, QueuePairs};
use crate::roce::{Bth, Frame, Packet, PacketError, Path, Template, PKEY_DEFAULT};
use crate::{Disposition, Progress};
use ferrite_abi::{QueuePairKind, QueuePairStateCode as State};
use ferrite_abi::{FEATURE_ATOMICS, MODIFY_PATH, VLAN_NONE};
use requester::Requester;
use responder::Responder;

/// The features that are this module's doing.
pub const FEATURES: u64 = FEATURE_ATOMICS;

/// Packets a queue pair sends before it is another's turn.
const BURST: u32 = 64;

/// The protocol state of a connected queue pair.
#[derive(Debug, Default)]
pub struct Connection {
    requester: Requester,
    responder: Responder,
    /// The headers of its path, from state RTR on.
    template: Option<Template>,
}

impl Connection {
    /// The next sequence number to send and the next to expect.
    pub fn sequence_numbers(&self) -> (u32, u32) {
        (self.requester.psn(), self.responder.psn())
    }
}

/// What all connections share.
#[derive(Debug, Default)]
pub struct Shared {
    /// The frame being made.
    frame: Vec<u8>,
    identification: u16,
    /// Messages not in use. Boxed, as they are where they are in use: they are large and move.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<requester::Message>>,
}

/// Writes a frame of a path and sends it: `fill` appends what follows the base header and returns
/// the padding, which must be that of `bth`.
fn send_packet<E>(
    core: &mut Core,
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
        template.finish(&mut frame, bth.pad, core.transport.identification);
        core.transmit(&frame, host);
    }
    core.transport.frame = frame;
    filled
}

/// A base header for a packet to the peer of `qp`.
fn base_header(qp: &QueuePair, opcode: u8, psn: u32) -> Bth {
    Bth {
        opcode,
        migrated: true,
        pkey: PKEY_DEFAULT,
        qpn: qp.attributes.destination_qpn,
        psn,
        ..Bth::default()
    }
}

/// A modification of `qp` was taken over: `from` is the state it was in.
pub(crate) fn modified(
    core: &mut Core,
    qp: &mut QueuePair,
    from: State,
    mask: u32,
    _host: &mut dyn Host,
) {
    if mask & MODIFY_PATH != 0 {
        qp.transport.template = template(core, qp);
    }
    if qp.state != from {
        match (from, qp.state) {
            (State::Init, State::ReadyToReceive) => {
                qp.transport.responder.start(qp.attributes.receive_psn);
            }
            (State::ReadyToReceive, State::ReadyToSend) => {
                qp.transport.requester.start(&qp.attributes);
            }
            _ => {}
        }
    }
}

/// The headers of the path of `qp`; none where source and destination do not go together.
fn template(core: &Core, qp: &QueuePair) -> Option<Template> {
    let path = &qp.attributes.path;
    let source = core.gids.get(path.source_gid_index)?;
    // The priority comes from the path, the identifier from either.
    let vlan = match path.vlan {
        VLAN_NONE => source.vlan,
        tag => Some(tag),
    };
    // Spread over the ephemeral ports, the same for all packets of a connection.
    let udp_source_port = match path.udp_source_port {
        0 => {
            let hash = qp.number.wrapping_mul(0x9e37_79b1)
                ^ qp.attributes.destination_qpn.wrapping_mul(0x85eb_ca6b);
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

/// Sends what a queue pair of the ready list has to send, a burst at most.
pub(crate) fn send(core: &mut Core, qp: &mut QueuePair, host: &mut dyn Host) -> Progress {
    let answered = responder::run(core, qp, host, BURST);
    let progress = requester::run(core, qp, host, BURST);
    if answered >= BURST {
        return Progress::More;
    }
    progress
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
    host: &mut dyn Host,
) -> Disposition {
    let Some(frame) = Frame::parse(bytes) else {
        return Disposition::PassToHost;
    };
    let Some(qp) = qps.get_mut(frame.destination_qpn()) else {
        return Disposition::PassToHost;
    };
    if !core.gids.contains(&frame.destination) {
        return Disposition::PassToHost;
    }
    core.counters.rx_packets += 1;
    core.counters.rx_bytes += bytes.len() as u64;
    if !frame.icrc_ok() {
        core.counters.rx_icrc_errors += 1;
        return Disposition::Consumed;
    }
    if deliver(core, qp, &frame, host).is_none() {
        core.counters.rx_dropped += 1;
    }
    Disposition::Consumed
}

/// Hands a packet to the requester or responder it is for; `None` when it is dropped.
fn deliver(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &Frame<'_>,
    host: &mut dyn Host,
) -> Option<()> {
    if qp.kind != QueuePairKind::ReliableConnected || !qp.may_receive() {
        return None;
    }
    // Only the peer may speak on a connection, and only to the address it was given.
    let own = core.gids.get(qp.attributes.path.source_gid_index)?;
    if frame.source != qp.attributes.path.gid || frame.destination != own.gid {
        return None;
    }
    let packet = match Packet::parse(frame.transport) {
        Ok(packet) => packet,
        Err(PacketError::Opcode(bth)) => {
            return responder::unknown(core, qp, &bth, host);
        }
        Err(PacketError::Truncated | PacketError::Version) => return None,
    };
    // The membership bit is no part of the key.
    if packet.bth.pkey & 0x7fff != PKEY_DEFAULT & 0x7fff {
        return None;
    }
    if packet.info.service != crate::roce::Service::Rc {
        return None;
    }
    if packet.info.is_request() {
        responder::request(core, qp, &packet, host)
    } else {
        requester::response(core, qp, &packet, host)
    }
}
