// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Raw packets: frames that queue pairs send, rules of flows, and tables that spread frames over work
//! queues.

use crate::attack::seal;
use crate::wire::{ALL, PD};
use ferrite_abi::*;
use ferrite_engine::core::{ANSWER_RESERVE, MAX_LOG_MTU};
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork};
use ferrite_engine::{Disposition, Personality, Room, Way};

/// Sends.
const A: u32 = 2;
/// Receives.
const B: u32 = 3;
const GROUP: [u8; 6] = [1, 0x50, 0x56, 0x19, 0x20, 0xa7];
const FROM: [u8; 6] = [0x24, 0x8a, 7, 0xa5, 0x28, 0xc8];
const ROOM: u32 = 1600;

struct Raw {
    node: Node,
    /// Frames to send, then frames that came.
    region: Region,
    posted: u32,
}

fn raw_qp(node: &mut Node, qpn: u32, flags: u16) {
    node.create_qp(QpOptions {
        qpn,
        pd: PD,
        flags,
        service: Service::Raw,
        ..QpOptions::default()
    });
}

fn start(node: &mut Node, qpn: u32, last: QueuePairStateCode) {
    use QueuePairStateCode::{Init, Rtr, Rts};
    for state in [Init, Rtr, Rts] {
        assert_eq!(node.set_state(qpn, state), CommandStatus::Ok);
        if state == last {
            break;
        }
    }
}

impl Raw {
    fn on(mut node: Node) -> Self {
        for qpn in [A, B] {
            raw_qp(&mut node, qpn, 0);
            start(&mut node, qpn, QueuePairStateCode::Rts);
        }
        let region = node.register(Tag::new(5, 1).0, PD, ALL, 1 << 17);
        Self {
            node,
            region,
            posted: 0,
        }
    }

    fn new() -> Self {
        Self::on(Node::new(1))
    }

    /// Makes a rule, of these bytes of the fields.
    fn flow(&mut self, flow: u32, target: u32, fields: FlowFields) -> CommandStatus {
        let command = rule(flow, target, fields);
        self.node.command(CommandOpcode::CreateFlow, &command)
    }

    /// Has room for a frame in a queue pair; where it will be.
    fn post(&mut self, qpn: u32) -> u64 {
        let at = u64::from(8192 + self.posted * 2048);
        self.posted = (self.posted + 1) % 50;
        self.node.post_recv(qpn, &[self.region.sge(at, ROOM)]);
        at
    }

    fn send(&mut self, frame: &[u8]) {
        self.node.fill(&self.region, 0, frame);
        let sge = self.region.sge(0, frame.len() as u32);
        self.node
            .post_send(A, &SendWork::new(SendOpcode::Send, &[sge]));
        self.node.settle();
    }

    /// All completions there are, those of sends apart.
    fn completions(&mut self) -> (Vec<CompletionEntry>, Vec<CompletionEntry>) {
        let all: Vec<_> = std::iter::from_fn(|| self.node.poll_cq(1)).collect();
        all.into_iter()
            .partition(|entry| entry.flags & COMPLETION_RECEIVE == 0)
    }

    /// What came, for whom.
    fn received(&mut self) -> Vec<u32> {
        let (_, received) = self.completions();
        received.iter().map(|entry| entry.qpn).collect()
    }
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

fn frame(destination: [u8; 6], ether_type: u16, rest: &[u8]) -> Vec<u8> {
    [&destination, &FROM, &ether_type.to_be_bytes()[..], rest].concat()
}

/// A UDP or TCP packet over IPv4 from 1.1.1.x to 2.2.2.2, with right checksums where it is UDP.
fn ipv4(last: u8, protocol: u8, ports: [u16; 2], data: &[u8]) -> Vec<u8> {
    let [source, destination] = ports.map(u16::to_be_bytes);
    let mut transport = [source, destination].concat();
    match protocol {
        17 => transport.extend((8 + data.len() as u16).to_be_bytes()),
        _ => transport.extend([0; 14]),
    }
    transport.extend([0, 0]);
    transport.extend(data);
    let length = (20 + transport.len() as u16).to_be_bytes();
    let mut header = vec![
        0x45, 7, length[0], length[1], 0, 0, 0x40, 0, 64, protocol, 0, 0,
    ];
    header.extend([1, 1, 1, last, 2, 2, 2, 2]);
    let sum = |bytes: &[u8], start: u32| {
        let words = bytes.chunks(2);
        let words =
            words.map(|word| (u32::from(word[0]) << 8) | u32::from(*word.get(1).unwrap_or(&0)));
        let sum: u32 = start + words.sum::<u32>();
        let sum = (sum & 0xffff) + (sum >> 16);
        !(((sum & 0xffff) + (sum >> 16)) as u16)
    };
    let check = sum(&header, 0).to_be_bytes();
    header[10..12].copy_from_slice(&check);
    let pseudo = sum(&header[12..], u32::from(protocol) + transport.len() as u32);
    let check = sum(&transport, u32::from(!pseudo)).to_be_bytes();
    let at = if protocol == 17 { 6 } else { 16 };
    transport[at..at + 2].copy_from_slice(&check);
    [header, transport].concat()
}

fn ipv6(next: u8, ports: [u16; 2]) -> Vec<u8> {
    let mut packet = vec![0x61, 0x23, 0x45, 0x67, 0, 20, next, 9];
    packet.extend([0xa0; 16]);
    packet.extend([0xb0; 16]);
    packet.extend(ports[0].to_be_bytes());
    packet.extend(ports[1].to_be_bytes());
    packet.extend([0; 16]);
    packet
}

#[test]
fn a_frame_comes_back_by_a_rule_as_it_was_sent() {
    let mut raw = Raw::new();
    assert_eq!(raw.flow(0, B, to(GROUP)), CommandStatus::Ok);
    let packet = ipv4(1, 17, [1234, 5678], b"hello");
    let mut spoiled = packet.clone();
    spoiled[30] ^= 1;
    for (packet, good) in [(packet, true), (spoiled, false)] {
        let at = raw.post(B);
        let sent = frame(GROUP, 0x0800, &packet);
        raw.send(&sent);
        let (sends, receives) = raw.completions();
        let ([send], [receive]) = (&sends[..], &receives[..]) else {
            panic!("{sends:?} {receives:?}");
        };
        assert_eq!((send.qpn, send.status), (A, 0));
        assert_eq!((receive.qpn, receive.status), (B, 0));
        assert_eq!(receive.byte_count as usize, sent.len());
        let checksum = if good { COMPLETION_CHECKSUM } else { 0 };
        assert_eq!(receive.flags, COMPLETION_RECEIVE | checksum);
        assert_eq!(raw.node.contents(&raw.region, at, sent.len()), sent);
        // Others may be in the group.
        assert_eq!(raw.node.host.sent.pop_front(), Some(sent));
    }
    // Nothing is posted any more.
    let dropped = raw.node.engine.counters().rx_dropped;
    raw.send(&frame(GROUP, 0x0800, &[0; 50]));
    assert_eq!(raw.received(), []);
    assert_eq!(raw.node.engine.counters().rx_dropped, dropped + 1);
}

#[test]
fn what_goes_to_the_wire_does_not_come_back_and_what_is_the_devices_own_does_not_leave() {
    let mut raw = Raw::new();
    let (own, other) = (raw.node.mac, [2, 0xfe, 0, 0, 0, 9]);
    for (flow, mac) in [(0, own), (1, other)] {
        assert_eq!(raw.flow(flow, B, to(mac)), CommandStatus::Ok);
    }
    raw.post(B);
    raw.post(B);
    raw.send(&frame(other, 0x88b5, &[1; 46]));
    assert_eq!(raw.received(), []);
    assert_eq!(raw.node.host.sent.len(), 1);
    raw.send(&frame(own, 0x88b5, &[1; 46]));
    assert_eq!(raw.received(), [B]);
    assert_eq!(raw.node.host.sent.len(), 1);
    // From the wire both come, whoever the sender is.
    let from_wire = frame(other, 0x88b5, &[1; 46]);
    assert_eq!(raw.node.receive(&from_wire), Disposition::Consumed);
    assert_eq!(raw.received(), [B]);
    let unknown = frame([2; 6], 0x88b5, &[1; 46]);
    assert_eq!(raw.node.receive(&unknown), Disposition::PassToHost);
}

#[test]
fn lengths_of_frames_are_checked() {
    let mut raw = Raw::new();
    assert_eq!(raw.flow(0, B, to(GROUP)), CommandStatus::Ok);
    let most = 14 + usize::from(RAW_MAX_MTU);
    for (length, tagged, good) in [
        (13, false, false),
        (14, false, true),
        (most, false, true),
        (most + 1, false, false),
        (most + 1, true, true),
        (most + 4, true, true),
        (most + 5, true, false),
    ] {
        raw.node.host.sent.clear();
        let kind = if tagged { 0x8100 } else { 0x88b5 };
        let mut sent = frame(GROUP, kind, &[]);
        sent.resize(length, 0);
        raw.send(&sent);
        let (sends, _) = raw.completions();
        let [send] = &sends[..] else {
            panic!("{sends:?}")
        };
        assert_eq!(send.status == 0, good, "{length} {tagged}");
        assert_eq!(raw.node.host.sent.len(), usize::from(good), "{length}");
        if !good {
            assert_eq!(send.status, CompletionStatus::LocalLength.number());
            // The receive queue goes on.
            let state = raw.node.qp_state(A);
            assert_eq!(state, QueuePairStateCode::Sqe);
            let status = raw.node.set_state(A, QueuePairStateCode::Rts);
            assert_eq!(status, CommandStatus::Ok);
        }
    }
    // A receive that is too short ends with an error; the queue pair goes on.
    raw.post(B);
    raw.post(B);
    for length in [ROOM + 1, ROOM] {
        let mut sent = frame(GROUP, 0x88b5, &[]);
        sent.resize(length as usize, 0);
        raw.send(&sent);
    }
    let (_, receives) = raw.completions();
    let statuses: Vec<_> = receives.iter().map(|entry| entry.status).collect();
    assert_eq!(statuses, [CompletionStatus::LocalLength.number(), 0]);
}

#[test]
fn a_rule_looks_at_every_field() {
    let packet = ipv4(1, 17, [1234, 5678], b"data");
    let mut tagged = vec![0xbc, 0x0c];
    tagged.extend(0x0800u16.to_be_bytes());
    tagged.extend(&packet);
    let udp = frame(GROUP, 0x0800, &packet);
    let vlan = frame(GROUP, 0x8100, &tagged);
    let tcp = frame(GROUP, 0x0800, &ipv4(1, 6, [1234, 5678], b""));
    let tcp6 = frame(GROUP, 0x86dd, &ipv6(6, [1234, 5678]));
    let frames = [udp, vlan, tcp, tcp6];
    let none = FlowFields::zeroed;
    let all = [true; 4];
    let four = [true, true, true, false];
    let six = [false, false, false, true];
    let mut v4 = [0; 16];
    v4[..4].copy_from_slice(&[1, 1, 1, 1]);
    let mut v4_to = [0; 16];
    v4_to[..4].copy_from_slice(&[2, 2, 2, 2]);
    let port = |port: u16| port.to_be_bytes();
    let fields = [
        (0, to(GROUP), all),
        (
            0,
            FlowFields {
                source_mac: FROM,
                ..none()
            },
            all,
        ),
        (
            0,
            FlowFields {
                ether_type: [8, 0],
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                ether_type: [0x86, 0xdd],
                ..none()
            },
            six,
        ),
        (
            0,
            FlowFields {
                vlan: [0xbc, 0x0c],
                ..none()
            },
            [false, true, false, false],
        ),
        (
            0,
            FlowFields {
                source: v4,
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                destination: v4_to,
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                source: [0xa0; 16],
                ..none()
            },
            six,
        ),
        (
            0,
            FlowFields {
                destination: [0xb0; 16],
                ..none()
            },
            six,
        ),
        (
            0,
            FlowFields {
                source_port: port(1234),
                ..none()
            },
            all,
        ),
        (
            0,
            FlowFields {
                destination_port: port(5678),
                ..none()
            },
            all,
        ),
        (
            0,
            FlowFields {
                protocol: 17,
                ..none()
            },
            [true, true, false, false],
        ),
        (
            0,
            FlowFields {
                traffic_class: 7,
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                traffic_class: 0x12,
                ..none()
            },
            six,
        ),
        (
            0,
            FlowFields {
                hop_limit: 64,
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                hop_limit: 9,
                ..none()
            },
            six,
        ),
        (
            0,
            FlowFields {
                fragment: FRAGMENT_NONE,
                ..none()
            },
            four,
        ),
        (
            0,
            FlowFields {
                flow_label: [0, 3, 0x45, 0x67],
                ..none()
            },
            six,
        ),
        (FLOW_LAYER_VLAN, none(), [false, true, false, false]),
        (FLOW_LAYER_IPV4, none(), four),
        (FLOW_LAYER_IPV6, none(), six),
        (FLOW_LAYER_TCP, none(), [false, false, true, true]),
        (FLOW_LAYER_UDP, none(), [true, true, false, false]),
        (
            FLOW_LAYER_TCP | FLOW_LAYER_IPV4,
            none(),
            [false, false, true, false],
        ),
    ];
    let mut raw = Raw::new();
    for (layers, value, expected) in fields {
        let command = CreateFlow {
            layers,
            ..rule(9, B, value)
        };
        let status = raw.node.command(CommandOpcode::CreateFlow, &command);
        assert_eq!(status, CommandStatus::Ok);
        for (frame, expected) in frames.iter().zip(expected) {
            raw.post(B);
            let disposition = raw.node.receive(frame);
            let consumed = disposition == Disposition::Consumed;
            assert_eq!(consumed, expected, "{layers} {value:?} {frame:?}");
        }
        raw.completions();
        let status = raw.node.object_command(CommandOpcode::DestroyFlow, 9);
        assert_eq!(status, CommandStatus::Ok);
        // What was not taken is taken by the next.
        let status = raw.node.set_state(B, QueuePairStateCode::Reset);
        assert_eq!(status, CommandStatus::Ok);
        start(&mut raw.node, B, QueuePairStateCode::Rts);
        assert_eq!(raw.node.receive(&frames[0]), Disposition::PassToHost);
    }
}

#[test]
fn priority_then_age_chooses_and_equal_rules_have_a_copy_each() {
    let mut raw = Raw::new();
    let any = FlowFields::zeroed();
    let with = |flow, target, priority, value| CreateFlow {
        priority,
        ..rule(flow, target, value)
    };
    for command in [
        with(0, A, 7, any),
        with(1, B, 3, any),
        with(2, A, 3, to(GROUP)),
    ] {
        raw.node.execute(&command);
    }
    let group = frame(GROUP, 0x88b5, &[0; 46]);
    let took = |raw: &mut Raw, frame: &[u8]| {
        raw.post(A);
        raw.post(B);
        raw.node.receive(frame);
        raw.received()
    };
    // Of the same priority the older.
    assert_eq!(took(&mut raw, &group), [B]);
    raw.node.object_command(CommandOpcode::DestroyFlow, 1);
    assert_eq!(took(&mut raw, &group), [A]);
    assert_eq!(took(&mut raw, &frame([2; 6], 1, &[])), [A]);
    raw.node.execute(&with(1, B, 3, to(GROUP)));
    assert_eq!(took(&mut raw, &group), [A, B]);
    // The same rule for the same queue pair is one.
    raw.node.execute(&with(3, B, 3, to(GROUP)));
    assert_eq!(took(&mut raw, &group), [A, B]);
    // A queue pair takes its rules with it.
    let status = raw.node.object_command(CommandOpcode::DestroyQueuePair, A);
    assert_eq!(status, CommandStatus::Ok);
    assert_eq!(
        raw.node.receive(&frame([2; 6], 1, &[])),
        Disposition::PassToHost
    );
    let status = raw.node.object_command(CommandOpcode::DestroyFlow, 0);
    assert_eq!(status, CommandStatus::NotFound);
    assert_eq!(raw.node.receive(&group), Disposition::Consumed);
    assert_eq!(raw.received(), [B]);
}

#[test]
fn rules_are_checked() {
    let mut raw = Raw::new();
    raw.node.create_qp(QpOptions {
        qpn: 9,
        ..QpOptions::default()
    });
    let caps: DeviceCaps = raw.node.query(CommandOpcode::QueryDevice, 0).unwrap();
    assert!(caps.max_flows > 0 && caps.max_receive_tables > 0);
    let good = rule(0, B, to(GROUP));
    let mut outside = good;
    outside.mask.destination_mac[5] = 0xf0;
    use CommandStatus::{BadNumber, BadParameter, Exists, NotFound, Ok};
    for (command, status) in [
        (
            CreateFlow {
                flow: caps.max_flows,
                ..good
            },
            BadNumber,
        ),
        (CreateFlow { port: 1, ..good }, BadNumber),
        (CreateFlow { flags: 2, ..good }, BadParameter),
        (
            CreateFlow {
                layers: 0x20,
                ..good
            },
            BadParameter,
        ),
        (
            CreateFlow {
                hash_types: 1,
                ..good
            },
            BadParameter,
        ),
        (
            CreateFlow {
                key: [1; 40],
                ..good
            },
            BadParameter,
        ),
        (
            CreateFlow {
                reserved: 1,
                ..good
            },
            BadParameter,
        ),
        (outside, BadParameter),
        (
            CreateFlow {
                target: 0x80_0000,
                ..good
            },
            BadNumber,
        ),
        (CreateFlow { target: 77, ..good }, NotFound),
        (CreateFlow { target: 9, ..good }, BadParameter),
        (
            CreateFlow {
                flags: FLOW_TO_TABLE,
                target: 0,
                ..good
            },
            NotFound,
        ),
        (
            CreateFlow {
                flags: FLOW_TO_TABLE,
                target: caps.max_receive_tables.into(),
                ..good
            },
            BadNumber,
        ),
        (
            CreateFlow {
                flow: caps.max_flows - 1,
                ..good
            },
            Ok,
        ),
        (
            CreateFlow {
                flow: caps.max_flows - 1,
                ..good
            },
            Exists,
        ),
    ] {
        let found = raw.node.command(CommandOpcode::CreateFlow, &command);
        assert_eq!(found, status, "{command:?}");
    }
    for (number, status) in [
        (0, NotFound),
        (caps.max_flows, BadNumber),
        (caps.max_flows - 1, Ok),
    ] {
        let found = raw.node.object_command(CommandOpcode::DestroyFlow, number);
        assert_eq!(found, status);
    }
}

/// Work queues 10 to 13 with a completion queue for all, in a table.
fn spread(raw: &mut Raw) {
    for qpn in 10..14 {
        raw_qp(&mut raw.node, qpn, QP_FLAG_RECEIVE_ONLY);
        start(&mut raw.node, qpn, QueuePairStateCode::Rtr);
        for _ in 0..8 {
            raw.post(qpn);
        }
    }
    let mut table = CreateReceiveTable {
        table: 4,
        log_entries: 3,
        ..CreateReceiveTable::zeroed()
    };
    table.qpns[..8].copy_from_slice(&[10, 11, 12, 13, 13, 12, 11, 10]);
    raw.node.execute(&table);
}

#[test]
fn a_hash_chooses_the_work_queue() {
    // The key and the first pairs of addresses that everybody verifies with.
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];
    let mut raw = Raw::new();
    spread(&mut raw);
    raw.node.execute(&CreateFlow {
        flags: FLOW_TO_TABLE,
        hash_types: HASH_IPV4 | HASH_TCP_IPV4,
        key: KEY,
        ..rule(0, 4, to(GROUP))
    });
    let between = |source: [u8; 4], destination: [u8; 4], ports, protocol| {
        let mut packet = ipv4(1, protocol, ports, b"");
        packet[12..16].copy_from_slice(&source);
        packet[16..20].copy_from_slice(&destination);
        frame(GROUP, 0x0800, &packet)
    };
    let first = ([66, 9, 149, 187], [161, 142, 100, 80], [2794, 1766]);
    let second = ([199, 92, 111, 2], [65, 69, 140, 83], [14230, 4739]);
    // 0x51ccc178, 0xc626b0ea with ports; 0x323e8fc2, 0xd718262a without.
    for ((source, destination, ports), protocol, qpn) in [
        (first, 6, 10),
        (second, 6, 12),
        (first, 17, 12),
        (second, 17, 12),
    ] {
        raw.node
            .receive(&between(source, destination, ports, protocol));
        assert_eq!(raw.received(), [qpn]);
    }
    // One that has no hash goes to the first entry.
    raw.node.receive(&frame(GROUP, 0x88b5, &[0; 46]));
    assert_eq!(raw.received(), [10]);
    // And sent by the device itself.
    raw.send(&between(second.0, second.1, second.2, 6));
    assert_eq!(raw.received(), [12]);
}

#[test]
fn what_is_in_use_is_busy_and_work_queues_send_nothing() {
    use CommandStatus::{BadNumber, BadParameter, BadState, Busy, Exists, NotFound, Ok};
    let mut raw = Raw::new();
    spread(&mut raw);
    let node = &mut raw.node;
    let command = CreateReceiveTable {
        table: 5,
        qpns: std::array::from_fn(|n| if n == 0 { 10 } else { 0 }),
        ..CreateReceiveTable::zeroed()
    };
    let with = |at: usize, qpn| {
        let mut qpns = command.qpns;
        qpns[at] = qpn;
        CreateReceiveTable { qpns, ..command }
    };
    for (command, status) in [
        (
            CreateReceiveTable {
                table: 4,
                ..command
            },
            Exists,
        ),
        (
            CreateReceiveTable {
                table: 64,
                ..command
            },
            BadNumber,
        ),
        (
            CreateReceiveTable {
                log_entries: 6,
                ..command
            },
            BadParameter,
        ),
        (with(0, 77), NotFound),
        (with(1, 10), BadParameter),
        (command, Ok),
    ] {
        let found = node.command(CommandOpcode::CreateReceiveTable, &command);
        assert_eq!(found, status, "{command:?}");
    }
    let flow = CreateFlow {
        flags: FLOW_TO_TABLE,
        ..rule(0, 4, to(GROUP))
    };
    node.execute(&flow);
    let destroy = |node: &mut Node, opcode, number| node.object_command(opcode, number);
    assert_eq!(destroy(node, CommandOpcode::DestroyQueuePair, 10), Busy);
    assert_eq!(destroy(node, CommandOpcode::DestroyReceiveTable, 4), Busy);
    assert_eq!(destroy(node, CommandOpcode::DestroyFlow, 0), Ok);
    assert_eq!(destroy(node, CommandOpcode::DestroyReceiveTable, 4), Ok);
    assert_eq!(
        destroy(node, CommandOpcode::DestroyReceiveTable, 4),
        NotFound
    );
    assert_eq!(destroy(node, CommandOpcode::DestroyQueuePair, 10), Busy);
    assert_eq!(destroy(node, CommandOpcode::DestroyReceiveTable, 5), Ok);
    assert_eq!(destroy(node, CommandOpcode::DestroyQueuePair, 10), Ok);
    // A work queue that is in error gives back what was posted, and takes nothing.
    assert_eq!(node.set_state(11, QueuePairStateCode::Error), Ok);
    node.settle();
    let flushed: Vec<_> = std::iter::from_fn(|| node.poll_cq(1)).collect();
    assert_eq!(flushed.len(), 8);
    assert!(flushed
        .iter()
        .all(|entry| entry.status == CompletionStatus::Flushed.number()));
    assert_eq!(node.set_state(11, QueuePairStateCode::Rtr), BadState);
    // Only raw packets have such.
    let template = node.qp_template(QpOptions {
        qpn: 20,
        service: Service::Ud,
        flags: QP_FLAG_RECEIVE_ONLY,
        ..QpOptions::default()
    });
    let status = node.command(CommandOpcode::CreateQueuePair, &template);
    assert_eq!(status, BadParameter);
}

#[test]
fn packets_of_queue_pairs_come_before_rules_and_frames_of_the_interface_after() {
    let mut node = Node::power_on_with(1, |config| config.personality = Personality::Combined);
    node.boot();
    node.create_eq(EQ_ASYNC, 1);
    node.create_eq(EQ_FIRST_HANDLER, 2);
    node.create_cq(1, EQ_FIRST_HANDLER, 6);
    node.set_address();
    let mut raw = Raw::on(node);
    let any = FlowFields::zeroed();
    assert_eq!(raw.flow(0, B, any), CommandStatus::Ok);
    // Nothing of the transport is for a queue pair of raw packets.
    raw.node.create_qp(QpOptions {
        qpn: 20,
        pd: PD,
        service: Service::Ud,
        ..QpOptions::default()
    });
    raw.node.start_datagrams(20, 1);
    let into = raw.node.register(Tag::new(6, 1).0, PD, ALL, 8192);
    raw.node.post_recv(20, &[into.sge(0, 4096)]);
    raw.post(B);
    let peer = raw.node.as_peer(20);
    let hello = SendWork::new(SendOpcode::Send, &[]).inline(b"hello");
    raw.node.post_send(20, &hello.datagram(&peer.datagram(1)));
    raw.node.settle();
    assert_eq!(raw.received(), [20]);
    // One that is for no queue pair is for the rule, whole.
    let mut stranger = peer;
    stranger.qpn = 77;
    let hello = SendWork::new(SendOpcode::Send, &[]).inline(b"hello");
    raw.node
        .post_send(20, &hello.datagram(&stranger.datagram(1)));
    raw.node.settle();
    assert_eq!(raw.received(), [B]);
    let filtered = raw.node.engine.interface_counters().rx_filtered;
    let ordinary = frame([2; 6], 0x88b5, &[0; 46]);
    raw.post(B);
    raw.node.receive(&ordinary);
    assert_eq!(raw.received(), [B]);
    let status = raw.node.object_command(CommandOpcode::DestroyFlow, 0);
    assert_eq!(status, CommandStatus::Ok);
    raw.node.receive(&ordinary);
    assert_eq!(raw.received(), []);
    let counters = raw.node.engine.interface_counters();
    assert_eq!(counters.rx_filtered, filtered + 1);
    // What nobody takes of the device's own is for its interface.
    let own = raw.node.mac;
    raw.send(&frame(own, 0x88b5, &[0; 46]));
    let counters = raw.node.engine.interface_counters();
    assert_eq!(counters.rx_filtered, filtered + 2);
    assert!(raw.node.host.sent.is_empty());
}

#[test]
fn the_longest_frame_leaves_where_there_is_room_for_a_packet_of_any_length() {
    let mut raw = Raw::new();
    let to = [2, 0xfe, 0, 0, 0, 9];
    let room = Room::Bytes(ANSWER_RESERVE + (1 << MAX_LOG_MTU) + 1024);
    raw.node.host.ways.insert(to, (Way::Wire, room));
    let mut longest = frame(to, 0x88b5, &[]);
    longest.resize(14 + usize::from(RAW_MAX_MTU), 1);
    raw.send(&longest);
    assert_eq!(raw.node.host.sent.pop_front(), Some(longest));
    let (sends, _) = raw.completions();
    assert_eq!(sends.len(), 1);
}

#[test]
fn queue_pairs_take_no_raw_packet_that_is_written_as_somebody_elses() {
    const QPN: u32 = 20;
    let mut raw = Raw::new();
    raw.node.create_qp(QpOptions {
        qpn: QPN,
        pd: PD,
        service: Service::Ud,
        ..QpOptions::default()
    });
    raw.node.start_datagrams(QPN, 1);
    let into = raw.node.register(Tag::new(6, 1).0, PD, ALL, 8192);
    for _ in 0..2 {
        raw.node.post_recv(QPN, &[into.sge(0, 4096)]);
    }
    let mut peer = Node::new(2);
    peer.create_qp(QpOptions {
        qpn: QPN,
        service: Service::Ud,
        ..QpOptions::default()
    });
    peer.start_datagrams(QPN, 1);
    let hello = SendWork::new(SendOpcode::Send, &[]).inline(b"hello");
    peer.post_send(QPN, &hello.datagram(&raw.node.as_peer(QPN).datagram(1)));
    peer.settle();
    let of_peer = peer.host.sent.pop_front().expect("a datagram");
    raw.node.receive(&of_peer);
    assert_eq!(raw.received(), [QPN]);
    // Its address alone makes nobody its neighbour.
    let mut of_neighbour = of_peer.clone();
    of_neighbour[6..12].copy_from_slice(&raw.node.mac);
    for forged in [&of_peer, &of_neighbour] {
        raw.send(forged);
        assert_eq!(raw.received(), []);
    }
    assert_eq!(raw.flow(0, B, FlowFields::zeroed()), CommandStatus::Ok);
    for forged in [&of_peer, &of_neighbour] {
        raw.post(B);
        raw.send(forged);
        assert_eq!(raw.received(), [B]);
    }
    assert!(raw.node.host.sent.is_empty());
    // As itself a program may write what it likes.
    let mut own = of_neighbour;
    own[26..30].copy_from_slice(&of_peer[30..34]);
    seal(&mut own);
    raw.send(&own);
    assert_eq!(raw.received(), [QPN]);
}

#[test]
fn without_the_features_there_are_none() {
    for (features, tables) in [
        (!(FEATURE_RAW_PACKETS | FEATURE_RECEIVE_TABLES), false),
        (!FEATURE_RECEIVE_TABLES, true),
    ] {
        let mut node = Node::with_features(1, ferrite_engine::FEATURES & features);
        let template = |node: &mut Node, flags| {
            node.qp_template(QpOptions {
                qpn: 2,
                service: Service::Raw,
                flags,
                ..QpOptions::default()
            })
        };
        let unsupported = CommandStatus::Unsupported;
        let queue = template(&mut node, QP_FLAG_RECEIVE_ONLY);
        let status = node.command(CommandOpcode::CreateQueuePair, &queue);
        assert_eq!(status, unsupported);
        let table = CreateReceiveTable::zeroed();
        let status = node.command(CommandOpcode::CreateReceiveTable, &table);
        assert_eq!(status, unsupported);
        let status = node.object_command(CommandOpcode::DestroyReceiveTable, 0);
        assert_eq!(status, unsupported);
        let queue = template(&mut node, 0);
        let status = node.command(CommandOpcode::CreateQueuePair, &queue);
        assert_eq!(status == unsupported, !tables);
        let flow = CreateFlow {
            flags: FLOW_TO_TABLE,
            ..rule(0, 0, FlowFields::zeroed())
        };
        let status = node.command(CommandOpcode::CreateFlow, &flow);
        assert_eq!(status, unsupported);
        let status = node.object_command(CommandOpcode::DestroyFlow, 0);
        assert_eq!(status == unsupported, !tables);
    }
}
