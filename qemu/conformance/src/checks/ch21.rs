// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chapter 21: raw packets, rules of flows, receive tables.

use super::checks;
use crate::host::{Host, OWN_GID, PEER_GID, PEER_MAC, PEER_QPN, QKEY};
use crate::outcome::{not_here, watch, Outcome};
use crate::packet::{deth, Packet, UD_SEND};
use crate::rings::{Cq, Qp, Region};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{
    BadNumber, BadParameter, Busy, Exists, NotFound, Ok as Done, Unsupported,
};
use ferrite_abi::QueuePairStateCode::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use ferrite_abi::*;

checks! {
    "DEV-21-1" => states,
    "DEV-21-2" => work_queues,
    "DEV-21-3" => sent_as_it_is,
    "DEV-21-4" => lengths,
    "DEV-21-5" => own_address,
    "DEV-21-6" => groups,
    "DEV-21-7" => others_leave,
    "DEV-21-8" => after_packets_of_queue_pairs,
    "DEV-21-9" => placed_as_it_came,
    "DEV-21-10" => checksums,
    "DEV-21-11" => nobody_to_receive,
    "DEV-21-12" => too_short,
    "DEV-21-13" => matches,
    "DEV-21-14" => order,
    "DEV-21-15" => copies,
    "DEV-21-16" => life_of_rules,
    "DEV-21-17" => caps,
    "DEV-21-18" => |h| refused(h, BadNumber, |f, caps| f.flow = caps.max_flows),
    "DEV-21-19" => there_is_one,
    "DEV-21-20" => fields_are_checked,
    "DEV-21-21" => targets_are_checked,
    "DEV-21-22" => rules_that_are_not_there,
    "DEV-21-23" => tables_are_checked,
    "DEV-21-24" => the_entry_of_the_hash,
    "DEV-21-25" => in_use,
    "DEV-21-26" => a_reset_ends_them,
    "DEV-21-27" => nobody_elses_packet,
}

const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 9];
const ROOM: u32 = 2048;

/// Two queue pairs of raw packets, and memory for their frames.
struct Raw {
    cq: Cq,
    a: Qp,
    b: Qp,
    memory: Region,
    receives: u64,
}

fn raw_qp(host: &mut Host, cq: &Cq, state: QueuePairStateCode) -> Outcome<Qp> {
    let qp = host.create_qp(Service::Raw, cq)?;
    up_to(host, qp.qpn, state)?;
    Ok(qp)
}

fn up_to(host: &mut Host, qpn: u32, state: QueuePairStateCode) -> Outcome {
    for next in [Init, Rtr, Rts] {
        host.move_qp(qpn, next)?;
        if next == state {
            break;
        }
    }
    Ok(())
}

fn raw(host: &mut Host, feature: u64) -> Outcome<Raw> {
    host.start_needing(feature)?;
    let cq = host.create_cq()?;
    let (a, b) = (raw_qp(host, &cq, Rts)?, raw_qp(host, &cq, Rts)?);
    let memory = host.region(ACCESS_LOCAL_WRITE, 1 << 17)?;
    Ok(Raw {
        cq,
        a,
        b,
        memory,
        receives: 0,
    })
}

/// The same with a rule for B.
fn with_rule(host: &mut Host, value: FlowFields) -> Outcome<Raw> {
    let raw = raw(host, FEATURE_RAW_PACKETS)?;
    host.execute(&rule(0, raw.b.qpn, value))?;
    Ok(raw)
}

/// A rule for frames in which the fields that are not zero are so.
fn rule(flow: u32, target: u32, value: FlowFields) -> CreateFlow {
    let mut mask = FlowFields::zeroed();
    for (mask, value) in mask.as_bytes_mut().iter_mut().zip(value.as_bytes()) {
        *mask = if *value == 0 { 0 } else { 0xff };
    }
    CreateFlow {
        flow,
        target,
        value,
        mask,
        ..CreateFlow::zeroed()
    }
}

fn to(mac: [u8; 6]) -> FlowFields {
    FlowFields {
        destination_mac: mac,
        ..FlowFields::zeroed()
    }
}

fn frame(to: [u8; 6], from: [u8; 6], length: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb6]].concat();
    frame.extend((frame.len()..length).map(|n| n as u8));
    frame
}

impl Raw {
    /// Posts a receive to a queue pair; where it is.
    fn post(&mut self, host: &mut Host, b: bool, length: u32) -> Outcome<u64> {
        let at = 16384 + self.receives % 40 * u64::from(ROOM);
        self.receives += 1;
        let sges = [self.memory.sge(at, length)];
        let qp = if b { &mut self.b } else { &mut self.a };
        host.post_receive(qp, &sges)?;
        Ok(at)
    }

    /// Sends a frame from A; how that ended.
    fn send(&mut self, host: &mut Host, bytes: &[u8]) -> Outcome<u8> {
        host.memory.write(self.memory.dma, bytes);
        let work = Work::send(&[self.memory.sge(0, bytes.len() as u32)]).flags(SEND_SIGNALED);
        let index = host.post(&mut self.a, &work)?;
        let entry = host.completion(&mut self.cq)?;
        ensure_eq!((entry.qpn, entry.index), (self.a.qpn, index), "the send");
        Ok(entry.status)
    }

    /// The next completion, which is of a receive at this place.
    fn received(&mut self, host: &mut Host, at: u64) -> Outcome<(CompletionEntry, Vec<u8>)> {
        let entry = host.completion(&mut self.cq)?;
        ensure!(entry.flags & COMPLETION_RECEIVE != 0, "{entry:x?}");
        let bytes = host
            .memory
            .bytes(self.memory.dma + at, entry.byte_count.into());
        Ok((entry, bytes))
    }

    /// B gets a frame that comes from the wire, or does not.
    fn takes(&mut self, host: &mut Host, bytes: &[u8], takes: bool) -> Outcome {
        let at = self.post(host, true, ROOM)?;
        host.wire()?.send(bytes)?;
        if takes {
            let (entry, found) = self.received(host, at)?;
            ensure_eq!(entry.qpn, self.b.qpn, "who got it");
            ensure!(found == bytes, "another frame: {found:02x?}");
            return Ok(());
        }
        host.no_completion(&mut self.cq)?;
        let qpn = self.b.qpn;
        host.move_qp(qpn, Reset)?;
        (self.b.send_producer, self.b.receive_producer) = (0, 0);
        host.memory.store32(self.b.record, 0);
        host.memory.store32(self.b.record + 4, 0);
        up_to(host, qpn, Rts)
    }
}

fn sent(host: &mut Host) -> Outcome<Vec<u8>> {
    host.wire()?.link()?.receive("a frame")
}

fn nothing_sent(host: &mut Host) -> Outcome {
    let link = host.wire()?.link()?;
    watch("a frame that should not have been sent", || link.look())
}

fn states(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RAW_PACKETS)?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Raw, &cq)?;
    let command = |state: QueuePairStateCode, mask| ModifyQueuePair {
        qpn: qp.qpn,
        mask: MODIFY_STATE | mask,
        state: state.number(),
        ..ModifyQueuePair::zeroed()
    };
    host.refuse(&command(Rtr, 0), CommandStatus::BadState)?;
    for mask in [MODIFY_PKEY, MODIFY_QKEY, MODIFY_ACCESS] {
        host.refuse(&command(Init, mask), BadParameter)?;
    }
    for state in [Init, Init, Rtr, Rts, Rts, Sqd] {
        host.execute(&command(state, 0))?;
    }
    host.refuse(&command(Init, 0), CommandStatus::BadState)?;
    host.execute(&command(Error, 0))?;
    host.refuse(&command(Rtr, 0), CommandStatus::BadState)?;
    host.execute(&command(Reset, 0))
}

fn work_queue(host: &mut Host, cq: &Cq) -> Outcome<Qp> {
    let mut command = host.qp_command(Service::Raw, cq);
    command.flags = QP_FLAG_RECEIVE_ONLY;
    (command.send_cqn, command.sq_log_blocks, command.sq_offset) = (0xdead, 0xff, 0xffff_ffff);
    let qp = host.make_qp(&command)?;
    up_to(host, qp.qpn, Rtr)?;
    Ok(qp)
}

fn work_queues(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RECEIVE_TABLES)?;
    let cq = host.create_cq()?;
    for (service, flags) in [
        (Service::Ud, QP_FLAG_RECEIVE_ONLY),
        (Service::Raw, QP_FLAG_RECEIVE_ONLY | QP_FLAG_SRQ),
    ] {
        let mut command = host.qp_command(service, &cq);
        command.flags = flags;
        if flags & QP_FLAG_SRQ != 0 {
            if host.features & FEATURE_SRQ == 0 {
                continue;
            }
            command.srqn = host.create_srq()?.srqn;
        }
        host.refuse(&command, BadParameter)?;
    }
    raw.b = work_queue(host, &raw.cq)?;
    host.execute(&rule(0, raw.b.qpn, to(host.mac)))?;
    let at = raw.post(host, true, ROOM)?;
    let bytes = frame(host.mac, PEER_MAC, 100);
    host.wire()?.send(&bytes)?;
    let (entry, found) = raw.received(host, at)?;
    ensure_eq!(entry.qpn, raw.b.qpn, "who got it");
    ensure!(found == bytes, "another frame: {found:02x?}");
    Ok(())
}

fn sent_as_it_is(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RAW_PACKETS)?;
    for length in [60, 61, 1500] {
        let bytes = frame(PEER_MAC, host.mac, length);
        ensure_eq!(raw.send(host, &bytes)?, 0, "the status");
        ensure!(sent(host)? == bytes, "another frame of {length}");
    }
    let sges = [raw.memory.sge(0, 60)];
    let work = Work::send_immediate(&sges, 5);
    let index = host.post(&mut raw.a, &work)?;
    let entry = host.completion(&mut raw.cq)?;
    ensure_eq!(entry.index, index, "the work request");
    let refused = CompletionStatus::LocalQueuePairOperation.number();
    ensure_eq!(entry.status, refused, "the status");
    nothing_sent(host)
}

fn lengths(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RAW_PACKETS)?;
    let most = 14 + usize::from(RAW_MAX_MTU);
    for (length, tag, good) in [
        (13, false, false),
        (most + 1, false, false),
        (most + 5, true, false),
        (most + 4, true, true),
        (most, false, true),
    ] {
        let mut bytes = frame(PEER_MAC, host.mac, length.max(14));
        if tag {
            bytes[12..14].copy_from_slice(&[0x81, 0]);
        }
        bytes.truncate(length);
        let status = raw.send(host, &bytes)?;
        if good {
            ensure_eq!(status, 0, "the status of {length}");
            ensure_eq!(sent(host)?.len(), length, "its length");
        } else {
            let expected = CompletionStatus::LocalLength.number();
            ensure_eq!(status, expected, "the status of {length}");
            host.comes_to(raw.a.qpn, Sqe)?;
            host.move_qp(raw.a.qpn, Rts)?;
            nothing_sent(host)?;
        }
    }
    Ok(())
}

fn own_address(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, to(own))?;
    let at = raw.post(host, true, ROOM)?;
    let bytes = frame(own, [2; 6], 100);
    ensure_eq!(raw.send(host, &bytes)?, 0, "the status");
    let (entry, found) = raw.received(host, at)?;
    ensure_eq!(entry.qpn, raw.b.qpn, "who got it");
    ensure!(found == bytes, "another frame: {found:02x?}");
    nothing_sent(host)
}

fn nobody_elses_packet(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, FlowFields::zeroed())?;
    let (_, mut qp) = host.pair(Service::Ud, &raw.cq)?;
    let into = host.region(ACCESS_LOCAL_WRITE, 4096)?;
    host.post_receive(&mut qp, &[into.sge(0, 4096)])?;
    let body = [deth(QKEY, PEER_QPN), b"good day".to_vec()].concat();
    for (from_mac, from, its_own) in [
        (PEER_MAC, PEER_GID, false),
        (PEER_MAC, OWN_GID, false),
        (own, PEER_GID, false),
        (own, OWN_GID, true),
    ] {
        let bytes = Packet {
            to_mac: own,
            from_mac,
            from,
            to: OWN_GID,
            ..Packet::new(UD_SEND, qp.qpn, 0, body.clone())
        }
        .encode();
        let at = raw.post(host, true, ROOM)?;
        ensure_eq!(raw.send(host, &bytes)?, 0, "the status");
        let (entry, found) = raw.received(host, at)?;
        let taker = if its_own { qp.qpn } else { raw.b.qpn };
        ensure_eq!(entry.qpn, taker, "who got it");
        ensure!(its_own || found == bytes, "another frame: {found:02x?}");
    }
    nothing_sent(host)
}

fn groups(host: &mut Host) -> Outcome {
    let mut raw = with_rule(host, to(GROUP))?;
    let at = raw.post(host, true, ROOM)?;
    let bytes = frame(GROUP, host.mac, 100);
    ensure_eq!(raw.send(host, &bytes)?, 0, "the status");
    let (_, found) = raw.received(host, at)?;
    ensure!(found == bytes, "another frame: {found:02x?}");
    ensure!(sent(host)? == bytes, "another frame left");
    Ok(())
}

fn others_leave(host: &mut Host) -> Outcome {
    let mut raw = with_rule(host, FlowFields::zeroed())?;
    raw.post(host, true, ROOM)?;
    let bytes = frame(PEER_MAC, host.mac, 100);
    ensure_eq!(raw.send(host, &bytes)?, 0, "the status");
    ensure!(sent(host)? == bytes, "another frame left");
    host.no_completion(&mut raw.cq)?;
    let foreign = frame(PEER_MAC, [0x02, 9, 9, 9, 9, 9], 100);
    ensure_eq!(raw.send(host, &foreign)?, 0, "the status");
    nothing_sent(host)
}

fn after_packets_of_queue_pairs(host: &mut Host) -> Outcome {
    let mut raw = with_rule(host, FlowFields::zeroed())?;
    let (mut a, mut b) = host.pair(Service::Ud, &raw.cq)?;
    raw.post(host, true, ROOM)?;
    let into = host.region(ACCESS_LOCAL_WRITE, 4096)?;
    host.post_receive(&mut b, &[into.sge(0, 4096)])?;
    let connection = host.to_self(b.qpn);
    let mut part = DatagramPart {
        address_vector: connection.address_vector,
        qpn: b.qpn,
        qkey: crate::host::QKEY,
        ..DatagramPart::zeroed()
    };
    let mut send = |host: &mut Host, part: &DatagramPart| {
        let work = Work::datagram(part, &[])
            .inline(b"hello")
            .flags(SEND_INLINE);
        host.post(&mut a, &work)
    };
    send(host, &part)?;
    let entry = host.completion(&mut raw.cq)?;
    ensure_eq!(entry.qpn, b.qpn, "who got the datagram");
    // One for a queue pair of raw packets is for the rule.
    part.qpn = raw.a.qpn;
    send(host, &part)?;
    let entry = host.completion(&mut raw.cq)?;
    ensure_eq!(entry.qpn, raw.b.qpn, "who got the other");
    Ok(())
}

fn placed_as_it_came(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, to(own))?;
    for tagged in [false, true] {
        let mut bytes = frame(own, PEER_MAC, 200);
        if tagged {
            bytes[12..16].copy_from_slice(&[0x81, 0, 0x20, 5]);
        }
        let at = raw.post(host, true, ROOM)?;
        host.wire()?.send(&bytes)?;
        let (entry, found) = raw.received(host, at)?;
        ensure!(found == bytes, "another frame: {found:02x?}");
        ensure_eq!(entry.flags, COMPLETION_RECEIVE, "the flags");
        ensure_eq!(
            entry.opcode,
            CompletionOpcode::Receive.number(),
            "the opcode"
        );
    }
    if let Ok(interface) = host.interface() {
        watch("a frame that went elsewhere", || interface.look())?;
    }
    Ok(())
}

fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for word in part.chunks(2) {
            sum += (u32::from(word[0]) << 8) | u32::from(*word.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    sum as u16
}

/// Addresses of the published vectors, and ports.
const ADDRESSES: [u8; 8] = [66, 9, 149, 187, 161, 142, 100, 80];
const PORTS: [u8; 4] = [0x0a, 0xea, 0x06, 0xe6];
/// Hash of the addresses, and with ports.
const HASHES: (u32, u32) = (0x323e_8fc2, 0x51cc_c178);
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// A TCP segment between the published addresses, with right checksums.
fn tcp(host: &Host) -> Vec<u8> {
    let data = b"published";
    let mut segment = PORTS.to_vec();
    segment.extend([0; 8]);
    segment.extend([0x50, 0, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(data);
    let length = (segment.len() as u16).to_be_bytes();
    let check = !sum(&[&ADDRESSES, &[0, 6], &length, &segment]);
    segment[16..18].copy_from_slice(&check.to_be_bytes());
    let total = (20 + segment.len() as u16).to_be_bytes();
    let mut header = vec![0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, 6, 0, 0];
    header.extend(ADDRESSES);
    let check = !sum(&[&header]);
    header[10..12].copy_from_slice(&check.to_be_bytes());
    let ethernet = [&host.mac[..], &PEER_MAC, &[8, 0]].concat();
    [ethernet, header, segment].concat()
}

fn checksums(host: &mut Host) -> Outcome {
    let mut raw = with_rule(host, FlowFields::zeroed())?;
    let good = tcp(host);
    let mut bad = good.clone();
    bad[60] ^= 1;
    let other = frame(host.mac, PEER_MAC, 100);
    for (bytes, flag) in [(good, COMPLETION_CHECKSUM), (bad, 0), (other, 0)] {
        let at = raw.post(host, true, ROOM)?;
        host.wire()?.send(&bytes)?;
        let (entry, _) = raw.received(host, at)?;
        ensure_eq!(entry.flags, COMPLETION_RECEIVE | flag, "the flags");
    }
    Ok(())
}

fn nobody_to_receive(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, to(own))?;
    let bytes = frame(own, PEER_MAC, 100);
    let before = host.counter("rx_dropped")?;
    host.wire()?.send(&bytes)?;
    raw.takes(host, &bytes, true)?;
    ensure_eq!(host.counter("rx_dropped")?, before + 1, "frames lost");
    host.move_qp(raw.b.qpn, Error)?;
    host.wire()?.send(&bytes)?;
    host.no_completion(&mut raw.cq)?;
    ensure_eq!(host.counter("rx_dropped")?, before + 2, "frames lost");
    Ok(())
}

fn too_short(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, to(own))?;
    let bytes = frame(own, PEER_MAC, 100);
    let at = raw.post(host, true, 99)?;
    host.wire()?.send(&bytes)?;
    let (entry, _) = raw.received(host, at)?;
    let expected = CompletionStatus::LocalLength.number();
    ensure_eq!(entry.status, expected, "the status");
    raw.takes(host, &bytes, true)
}

fn matches(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RAW_PACKETS)?;
    let segment = tcp(host);
    let mut fragment = segment.clone();
    fragment[20] |= 0x20;
    let other = frame(host.mac, PEER_MAC, 100);
    let mut source = [0; 16];
    source[..4].copy_from_slice(&ADDRESSES[..4]);
    let mut destination = [0; 16];
    destination[..4].copy_from_slice(&ADDRESSES[4..]);
    let none = FlowFields::zeroed();
    let ports = FlowFields {
        source_port: [PORTS[0], PORTS[1]],
        destination_port: [PORTS[2], PORTS[3]],
        ..none
    };
    let addresses = FlowFields {
        ether_type: [8, 0],
        source,
        destination,
        protocol: 6,
        ..none
    };
    for (layers, value, expected) in [
        (0, none, [true, true, true]),
        (0, to(host.mac), [true, true, true]),
        (0, to(GROUP), [false, false, false]),
        (0, addresses, [true, true, false]),
        (0, ports, [true, false, false]),
        (FLOW_LAYER_IPV4, none, [true, true, false]),
        (FLOW_LAYER_IPV6, none, [false, false, false]),
        (FLOW_LAYER_TCP | FLOW_LAYER_IPV4, none, [true, false, false]),
        (FLOW_LAYER_UDP, none, [false, false, false]),
        (FLOW_LAYER_VLAN, none, [false, false, false]),
    ] {
        host.execute(&CreateFlow {
            layers,
            ..rule(0, raw.b.qpn, value)
        })?;
        for (bytes, takes) in [&segment, &fragment, &other].into_iter().zip(expected) {
            raw.takes(host, bytes, takes)?;
        }
        host.destroy(Op::DestroyFlow, 0)?;
    }
    Ok(())
}

/// A frame from the wire goes to these, in any order.
fn goes_to(host: &mut Host, raw: &mut Raw, expected: &[u32]) -> Outcome {
    raw.post(host, false, ROOM)?;
    raw.post(host, true, ROOM)?;
    let bytes = frame(host.mac, PEER_MAC, 100);
    host.wire()?.send(&bytes)?;
    let mut takers = Vec::new();
    for _ in expected {
        takers.push(host.completion(&mut raw.cq)?.qpn);
    }
    host.no_completion(&mut raw.cq)?;
    takers.sort_unstable();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    ensure_eq!(takers, expected, "who got the frame");
    Ok(())
}

fn order(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RAW_PACKETS)?;
    let (a, b, own) = (raw.a.qpn, raw.b.qpn, host.mac);
    for (flow, target, priority, value) in [
        (0, a, 9, to(own)),
        (1, b, 5, to(own)),
        (2, a, 5, FlowFields::zeroed()),
    ] {
        host.execute(&CreateFlow {
            priority,
            ..rule(flow, target, value)
        })?;
    }
    goes_to(host, &mut raw, &[b])?;
    host.destroy(Op::DestroyFlow, 1)?;
    goes_to(host, &mut raw, &[a])?;
    host.execute(&CreateFlow {
        priority: 5,
        ..rule(1, b, to(own))
    })?;
    goes_to(host, &mut raw, &[a])
}

fn copies(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RAW_PACKETS)?;
    let (a, b, own) = (raw.a.qpn, raw.b.qpn, host.mac);
    for (flow, target) in [(0, a), (1, b), (2, b)] {
        host.execute(&rule(flow, target, to(own)))?;
    }
    goes_to(host, &mut raw, &[a, b])
}

fn life_of_rules(host: &mut Host) -> Outcome {
    let own = host.mac;
    let mut raw = with_rule(host, to(own))?;
    let (a, b) = (raw.a.qpn, raw.b.qpn);
    goes_to(host, &mut raw, &[b])?;
    host.destroy(Op::DestroyFlow, 0)?;
    goes_to(host, &mut raw, &[])?;
    host.execute(&rule(0, b, to(own)))?;
    host.execute(&rule(1, a, FlowFields::zeroed()))?;
    host.destroy(Op::DestroyQueuePair, b)?;
    host.object(Op::DestroyFlow, 0, NotFound)?;
    let bytes = frame(own, PEER_MAC, 100);
    host.wire()?.send(&bytes)?;
    let entry = host.completion(&mut raw.cq)?;
    ensure_eq!(entry.qpn, a, "who got the frame");
    Ok(())
}

fn caps(host: &mut Host) -> Outcome {
    host.start_bare(u64::MAX)?;
    let offered = host.device.register64(REG_FEATURES)?;
    let caps = host.caps;
    if offered & FEATURE_RAW_PACKETS == 0 {
        ensure_eq!(caps.max_flows, 0, "max_flows");
    } else {
        ensure!(caps.max_flows >= 16, "{caps:?}");
    }
    let tables = (caps.max_receive_tables, caps.receive_table_log_entries);
    if offered & FEATURE_RECEIVE_TABLES == 0 {
        ensure_eq!(tables, (0, 0), "tables");
    } else {
        ensure!(tables.0 >= 1 && tables.1 <= 5, "{caps:?}");
    }
    Ok(())
}

fn refused(
    host: &mut Host,
    status: CommandStatus,
    change: impl Fn(&mut CreateFlow, &DeviceCaps),
) -> Outcome {
    let raw = raw(host, FEATURE_RAW_PACKETS)?;
    let mut command = rule(0, raw.b.qpn, to(host.mac));
    change(&mut command, &host.caps);
    host.refuse(&command, status)?;
    host.execute(&CreateFlow {
        flow: host.caps.max_flows - 1,
        ..rule(0, raw.b.qpn, to(host.mac))
    })?;
    let port = CreateFlow {
        port: host.caps.ports,
        ..rule(0, raw.b.qpn, to(host.mac))
    };
    host.refuse(&port, BadNumber)
}

fn there_is_one(host: &mut Host) -> Outcome {
    let own = host.mac;
    let raw = with_rule(host, to(own))?;
    host.refuse(&rule(0, raw.b.qpn, to(GROUP)), Exists)
}

fn fields_are_checked(host: &mut Host) -> Outcome {
    let raw = raw(host, FEATURE_RAW_PACKETS)?;
    let good = rule(0, raw.b.qpn, to(host.mac));
    let mut outside = good;
    outside.mask.destination_mac = [0; 6];
    for bad in [
        CreateFlow { flags: 2, ..good },
        CreateFlow {
            layers: 0x20,
            ..good
        },
        CreateFlow {
            hash_types: HASH_IPV4,
            ..good
        },
        CreateFlow { key: KEY, ..good },
        CreateFlow {
            reserved: 1,
            ..good
        },
        outside,
    ] {
        host.refuse(&bad, BadParameter)?;
    }
    host.execute(&good)
}

fn targets_are_checked(host: &mut Host) -> Outcome {
    let raw = raw(host, FEATURE_RAW_PACKETS)?;
    let other = host.create_qp(Service::Rc, &raw.cq)?;
    let own = host.mac;
    let last = host.caps.qp_first + host.caps.qp_count - 1;
    for (target, status) in [
        (QUEUE_NONE, BadNumber),
        (last, NotFound),
        (other.qpn, BadParameter),
    ] {
        host.refuse(&rule(0, target, to(own)), status)?;
    }
    let to_table = |target| CreateFlow {
        flags: FLOW_TO_TABLE,
        ..rule(0, target, to(own))
    };
    if host.features & FEATURE_RECEIVE_TABLES == 0 {
        return host.refuse(&to_table(0), Unsupported);
    }
    host.refuse(&to_table(0), NotFound)?;
    let tables = host.caps.max_receive_tables;
    host.refuse(&to_table(tables.into()), BadNumber)
}

fn rules_that_are_not_there(host: &mut Host) -> Outcome {
    raw(host, FEATURE_RAW_PACKETS)?;
    host.object(Op::DestroyFlow, 0, NotFound)?;
    let flows = host.caps.max_flows;
    host.object(Op::DestroyFlow, flows, BadNumber)
}

fn table(log_entries: u8, qpns: &[u32]) -> CreateReceiveTable {
    let mut table = CreateReceiveTable {
        log_entries,
        ..CreateReceiveTable::zeroed()
    };
    table.qpns[..qpns.len()].copy_from_slice(qpns);
    table
}

fn tables_are_checked(host: &mut Host) -> Outcome {
    let raw = raw(host, FEATURE_RECEIVE_TABLES)?;
    let other = host.create_qp(Service::Rc, &raw.cq)?;
    let qpn = raw.b.qpn;
    let last = host.caps.qp_first + host.caps.qp_count - 1;
    let beyond = host.caps.receive_table_log_entries + 1;
    for (command, status) in [
        (table(0, &[qpn, qpn]), BadParameter),
        (table(beyond, &[qpn; 32]), BadParameter),
        (table(1, &[qpn]), BadNumber),
        (table(1, &[qpn, last]), NotFound),
        (table(1, &[other.qpn, qpn]), BadParameter),
    ] {
        host.refuse(&command, status)?;
    }
    let mut command = table(1, &[qpn, qpn]);
    command.table = host.caps.max_receive_tables.into();
    host.refuse(&command, BadNumber)?;
    command.table -= 1;
    host.execute(&command)?;
    host.refuse(&command, Exists)
}

fn the_entry_of_the_hash(host: &mut Host) -> Outcome {
    let mut raw = raw(host, FEATURE_RECEIVE_TABLES)?;
    if host.caps.receive_table_log_entries == 0 {
        return not_here("tables have one entry");
    }
    let (a, b) = (raw.a.qpn, raw.b.qpn);
    let segment = tcp(host);
    let other = frame(host.mac, PEER_MAC, 100);
    // Both hashes are even; what is A's and B's is changed, so that both entries are seen.
    let bits = [HASHES.0, HASHES.1].map(|hash| hash as usize & 1);
    for (entries, types, bytes, entry) in [
        ([a, b], HASH_IPV4 | HASH_TCP_IPV4, &segment, bits[1]),
        ([b, a], HASH_IPV4 | HASH_TCP_IPV4, &segment, bits[1]),
        ([a, b], HASH_IPV4, &segment, bits[0]),
        ([a, b], HASH_IPV6, &segment, 0),
        ([b, a], HASH_IPV4, &other, 0),
    ] {
        host.execute(&table(1, &entries))?;
        host.execute(&CreateFlow {
            flags: FLOW_TO_TABLE,
            hash_types: types,
            key: KEY,
            ..rule(0, 0, to(host.mac))
        })?;
        raw.post(host, false, ROOM)?;
        raw.post(host, true, ROOM)?;
        host.wire()?.send(bytes)?;
        let found = host.completion(&mut raw.cq)?.qpn;
        ensure_eq!(found, entries[entry], "who got the frame");
        host.no_completion(&mut raw.cq)?;
        host.destroy(Op::DestroyFlow, 0)?;
        host.destroy(Op::DestroyReceiveTable, 0)?;
    }
    Ok(())
}

fn in_use(host: &mut Host) -> Outcome {
    let raw = raw(host, FEATURE_RECEIVE_TABLES)?;
    let wq = work_queue(host, &raw.cq)?;
    host.execute(&table(0, &[wq.qpn]))?;
    host.execute(&CreateFlow {
        flags: FLOW_TO_TABLE,
        ..rule(0, 0, to(host.mac))
    })?;
    host.object(Op::DestroyQueuePair, wq.qpn, Busy)?;
    host.object(Op::DestroyReceiveTable, 0, Busy)?;
    host.destroy(Op::DestroyFlow, 0)?;
    host.destroy(Op::DestroyReceiveTable, 0)?;
    host.object(Op::DestroyReceiveTable, 0, NotFound)?;
    let tables = host.caps.max_receive_tables;
    host.object(Op::DestroyReceiveTable, tables.into(), BadNumber)?;
    host.object(Op::DestroyQueuePair, wq.qpn, Done)
}

fn a_reset_ends_them(host: &mut Host) -> Outcome {
    let own = host.mac;
    with_rule(host, to(own))?;
    host.device.control_reset()?;
    host.start_needing(FEATURE_RAW_PACKETS)?;
    host.object(Op::DestroyFlow, 0, NotFound)?;
    if host.features & FEATURE_RECEIVE_TABLES != 0 {
        host.object(Op::DestroyReceiveTable, 0, NotFound)?;
    }
    Ok(())
}
