// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Channels, the interface and redirection (chapter 20), as the host and the wire see them.

use crate::wire::{drain, statuses, ALL, PD};
use ferrite_abi::*;
use ferrite_engine::core::ANSWER_RESERVE;
use ferrite_engine::memory::{Room, Way, ENOUGH_ROOM, FRAME_OVERHEAD};
use ferrite_engine::misbehaviour::Nonsense;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use ferrite_engine::{
    Disposition, Host, Misbehaviour, Personality, COMMON_FEATURES, ETHERNET_FEATURES, FEATURES,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

const LOG_BLOCKS: u8 = 4;
const LOG_ENTRIES: u8 = 4;
const PAGE: u32 = 3;
/// Receive buffers.
const BUFFER: u32 = 2048;
const MTU: u16 = 9000;
const BROADCAST: [u8; 6] = [0xff; 6];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 7];
/// Somebody on the wire.
const PEER: [u8; 6] = [0x02, 1, 2, 3, 4, 5];

/// A channel as its driver has it.
struct Channel {
    number: u16,
    transmit: u64,
    receive: u64,
    received: u64,
    record: u64,
    producer: u32,
    posted: u32,
    consumed: u32,
    /// Where the buffers are, by slot.
    buffers: Vec<u64>,
}

struct Nic {
    node: Node,
    channels: Vec<Channel>,
}

fn power_on(personality: Personality, any_source: bool) -> Node {
    Node::power_on_with(1, |config| {
        config.personality = personality;
        config.any_source = any_source;
    })
}

/// Both parts, of a driver that has agreed on everything.
pub fn combined() -> Node {
    let mut node = power_on(Personality::Combined, false);
    node.boot_with(FEATURES | ETHERNET_FEATURES);
    node.create_eq(EQ_ASYNC, 1);
    node.create_eq(EQ_FIRST_HANDLER, 2);
    node.create_eq(3, 3);
    node
}

pub fn command(node: &mut Node, number: u16, eqn: u16) -> CreateChannel {
    let base = node.allocate(0x4000);
    CreateChannel {
        channel: number,
        eqn,
        transmit_log_blocks: LOG_BLOCKS,
        receive_log_entries: LOG_ENTRIES,
        doorbell_page: PAGE,
        buffer: Buffer::contiguous(base, 0x4000),
        transmit_offset: 0,
        receive_offset: 0x1000,
        received_offset: 0x2000,
        record_offset: 0x3000,
        ..CreateChannel::zeroed()
    }
}

pub fn interface(node: &Node, flags: u16) -> SetInterface {
    SetInterface {
        flags: INTERFACE_UP | flags,
        mtu: MTU,
        mac: node.mac,
        default_channel: 0,
        ..SetInterface::zeroed()
    }
}

impl Nic {
    /// So many channels, of which each has its buffers and the first gets all frames.
    fn new(channels: u16) -> Self {
        Self::of(combined(), channels)
    }

    fn of(node: Node, channels: u16) -> Self {
        let mut nic = Self {
            node,
            channels: Vec::new(),
        };
        for number in 0..channels {
            let command = command(&mut nic.node, number, EQ_FIRST_HANDLER);
            nic.add(&command);
            nic.post_buffers(usize::from(number), 1 << LOG_ENTRIES, BUFFER);
        }
        if channels > 0 {
            let command = interface(&nic.node, INTERFACE_BROADCAST);
            nic.node.execute(&command);
        }
        nic
    }

    fn add(&mut self, command: &CreateChannel) {
        self.node.execute(command);
        let base = command.buffer.root;
        self.channels.push(Channel {
            number: command.channel,
            transmit: base + u64::from(command.transmit_offset),
            receive: base + u64::from(command.receive_offset),
            received: base + u64::from(command.received_offset),
            record: base + u64::from(command.record_offset),
            producer: 0,
            posted: 0,
            consumed: 0,
            buffers: vec![0; 1 << LOG_ENTRIES],
        });
    }

    fn word(&self, channel: usize, word: usize) -> u32 {
        self.node
            .host
            .memory
            .get(self.channels[channel].record + word as u64)
    }

    fn set_word(&self, channel: usize, word: usize, value: u32) {
        let record = self.channels[channel].record;
        self.node.host.memory.put(record + word as u64, &value);
    }

    fn post_descriptor(&mut self, channel: usize, descriptor: ReceiveDescriptor) {
        let channel = &mut self.channels[channel];
        let slot = channel.posted as usize % (1 << LOG_ENTRIES);
        let at = channel.receive + slot as u64 * 16;
        self.node.host.memory.put(at, &descriptor);
        channel.buffers[slot] = descriptor.address;
        channel.posted += 1;
        let at = channel.record + offset_of!(ChannelRecord, receive_producer) as u64;
        self.node.host.memory.put(at, &channel.posted);
    }

    fn post_buffers(&mut self, channel: usize, count: usize, length: u32) {
        for _ in 0..count {
            let address = self.node.allocate(length.into());
            let descriptor = ReceiveDescriptor {
                address,
                length,
                reserved: 0,
            };
            self.post_descriptor(channel, descriptor);
        }
    }

    /// Takes the next received entry, and posts its buffers again.
    fn take(&mut self, channel: usize) -> Option<(ReceivedEntry, Vec<u8>)> {
        let at = &self.channels[channel];
        let slot = at.consumed % (1 << LOG_ENTRIES);
        let entry: ReceivedEntry = self
            .node
            .host
            .memory
            .get(at.received + u64::from(slot) * 32);
        if entry.phase != phase_of(at.consumed, LOG_ENTRIES) {
            return None;
        }
        let mut bytes = Vec::new();
        for number in 0..u32::from(entry.buffers) {
            let slot = (entry.index + number) % (1 << LOG_ENTRIES);
            let length = (entry.length as usize - bytes.len()).min(BUFFER as usize);
            let mut piece = vec![0; length];
            let address = at.buffers[slot as usize];
            if length > 0 {
                let memory = &self.node.host.memory;
                ferrite_engine::HostMemory::read(memory, address, &mut piece).unwrap();
            }
            bytes.extend(piece);
        }
        self.channels[channel].consumed += 1;
        for number in 0..u32::from(entry.buffers) {
            let slot = (entry.index + number) % (1 << LOG_ENTRIES);
            let descriptor = ReceiveDescriptor {
                address: self.channels[channel].buffers[slot as usize],
                length: BUFFER,
                reserved: 0,
            };
            self.post_descriptor(channel, descriptor);
        }
        Some((entry, bytes))
    }

    /// Writes a request; returns the index of its first block.
    fn write_request(
        &mut self,
        channel: usize,
        header: TransmitHeader,
        pieces: &[TransmitPiece],
    ) -> u32 {
        let at = &mut self.channels[channel];
        let index = at.producer;
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(pieces.iter().flat_map(Plain::as_bytes));
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        for block in bytes.chunks(64) {
            let slot = at.producer % (1 << LOG_BLOCKS);
            let to = at.transmit + u64::from(slot) * 64;
            ferrite_engine::HostMemory::write(&self.node.host.memory, to, block).unwrap();
            at.producer += 1;
        }
        index
    }

    /// Tells of what was written; rings where that is asked for, and says so.
    fn publish(&mut self, channel: usize) -> bool {
        let producer = self.channels[channel].producer;
        let word = offset_of!(ChannelRecord, transmit_producer);
        self.set_word(channel, word, producer);
        let wake = self.word(channel, offset_of!(ChannelRecord, transmit_wake)) != 0;
        if wake {
            let number = self.channels[channel].number;
            let word = channel_doorbell(number);
            self.node.doorbell(PAGE, DOORBELL_CHANNEL, word);
        }
        wake
    }

    /// The pieces of a frame, cut where `cuts` say.
    fn pieces(&mut self, frame: &[u8], cuts: &[usize]) -> Vec<TransmitPiece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        for to in cuts.iter().copied().chain([frame.len()]) {
            let address = self.node.allocate(4096.max(to as u64 - from as u64)) + 7;
            let memory = &self.node.host.memory;
            ferrite_engine::HostMemory::write(memory, address, &frame[from..to]).unwrap();
            pieces.push(TransmitPiece {
                address,
                length: (to - from) as u32,
                reserved: 0,
            });
            from = to;
        }
        pieces
    }

    /// Sends a frame by a channel; returns what came out at the wire.
    fn send(&mut self, header: TransmitHeader, frame: &[u8]) -> Vec<Vec<u8>> {
        let cuts: Vec<usize> = [20, 30]
            .into_iter()
            .filter(|cut| *cut < frame.len())
            .collect();
        let pieces = self.pieces(frame, &cuts);
        let header = TransmitHeader {
            pieces: pieces.len() as u8,
            ..header
        };
        self.write_request(0, header, &pieces);
        self.publish(0);
        self.node.settle();
        self.sent()
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        self.node.host.sent.drain(..).collect()
    }

    fn counters(&mut self, channel: u16) -> BTreeMap<&'static str, u64> {
        let command = QueryChannelCounters {
            channel,
            ..QueryChannelCounters::zeroed()
        };
        let reply = self.node.reply();
        let length = (CHANNEL_COUNTER_NAMES.len() * 8) as u32;
        let entry = CommandEntry::new(
            CommandOpcode::QueryChannelCounters,
            0x77,
            (reply, length),
            &command,
        );
        let done = self.node.command_done(&entry);
        assert_eq!(done.param0, 0);
        assert_eq!(done.param1, u64::from(length));
        let memory = &self.node.host.memory;
        let values = (0..CHANNEL_COUNTER_NAMES.len() as u64).map(|n| memory.get(reply + n * 8));
        CHANNEL_COUNTER_NAMES.into_iter().zip(values).collect()
    }

    fn frame_events(&mut self, eqn: u16) -> Vec<(EventCode, u32, u64, u64)> {
        let events = self.node.events(eqn);
        let told = events.into_iter().map(|event| {
            let code = EventCode::from_number(event.code).unwrap();
            (code, event.id, event.param0, event.param1)
        });
        told.collect()
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], ethertype: u16, body: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ethertype.to_be_bytes(), body].concat()
}

/// The sum as RFC 1071 has it, the slow way.
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

struct Packet {
    v6: bool,
    protocol: u8,
    from: u16,
    to: u16,
    flags: u8,
    data: Vec<u8>,
}

impl Packet {
    fn tcp(from: u16, to: u16, data: &[u8]) -> Self {
        Self {
            v6: false,
            protocol: 6,
            from,
            to,
            flags: 0x10,
            data: data.to_vec(),
        }
    }

    fn pseudo(&self, length: usize) -> Vec<u8> {
        let mut pseudo = self.addresses();
        pseudo.extend((length as u32).to_be_bytes());
        pseudo.extend([0, 0, 0, self.protocol]);
        pseudo
    }

    fn addresses(&self) -> Vec<u8> {
        if self.v6 {
            (0..32).map(|n| 0x20 ^ n).collect()
        } else {
            vec![66, 9, 149, 187, 161, 142, 100, 80]
        }
    }

    /// The packet; its transport checksum is that of the pseudo header alone unless `whole`.
    fn encode(&self, whole: bool) -> Vec<u8> {
        let mut segment = [self.from.to_be_bytes(), self.to.to_be_bytes()].concat();
        let at = if self.protocol == 6 {
            segment.extend(0x0102_0304u32.to_be_bytes());
            segment.extend(9u32.to_be_bytes());
            segment.extend([0x50, self.flags, 1, 0, 0, 0, 0, 0]);
            16
        } else {
            segment.extend((8 + self.data.len() as u16).to_be_bytes());
            segment.extend([0, 0]);
            6
        };
        segment.extend(&self.data);
        let pseudo = self.pseudo(segment.len());
        let stored = if whole {
            !sum(&[&pseudo, &segment])
        } else {
            sum(&[&pseudo])
        };
        segment[at..at + 2].copy_from_slice(&stored.to_be_bytes());
        let mut packet = Vec::new();
        if self.v6 {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend((segment.len() as u16).to_be_bytes());
            packet.extend([self.protocol, 64]);
            packet.extend(self.addresses());
        } else {
            packet.extend([0x45, 0]);
            packet.extend((20 + segment.len() as u16).to_be_bytes());
            packet.extend([0x12, 0xff, 0x40, 0, 64, self.protocol, 0, 0]);
            packet.extend(self.addresses());
            let check = !sum(&[&packet]);
            packet[10..12].copy_from_slice(&check.to_be_bytes());
        }
        packet.extend(segment);
        packet
    }

    fn ethertype(&self) -> u16 {
        if self.v6 {
            0x86dd
        } else {
            0x0800
        }
    }

    fn header(&self) -> usize {
        14 + if self.v6 { 40 } else { 20 }
    }

    fn frame(&self, to: [u8; 6], from: [u8; 6], whole: bool) -> Vec<u8> {
        ethernet(to, from, self.ethertype(), &self.encode(whole))
    }

    /// Whether the transport checksum of a frame of this flow is right.
    fn is_right(&self, frame: &[u8]) -> bool {
        let segment = &frame[self.header()..];
        sum(&[&self.pseudo(segment.len()), segment]) == 0xffff
            && (self.v6 || sum(&[&frame[14..34]]) == 0xffff)
    }
}

fn plain(length: usize, to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    let body: Vec<u8> = (0..length - 14).map(|n| (n % 251) as u8).collect();
    ethernet(to, from, 0x88b6, &body)
}

#[test]
fn frames_go_out_as_they_are_and_the_host_is_told_once() {
    let mut nic = Nic::new(1);
    let wake = offset_of!(ChannelRecord, transmit_wake);
    assert_eq!(nic.word(0, wake), 1);
    let mac = nic.node.mac;
    // Rounds enough that requests of several blocks go through the end of the ring.
    let mut blocks = 0;
    for round in 0..40 {
        let frame = plain(60 + round * 7, PEER, mac);
        let cuts: Vec<usize> = (1..=round % 18).map(|n| n * 3).collect();
        let pieces = nic.pieces(&frame, &cuts);
        let header = TransmitHeader {
            pieces: pieces.len() as u8,
            ..TransmitHeader::zeroed()
        };
        nic.write_request(0, header, &pieces);
        blocks += transmit_blocks(header.pieces);
        assert!(nic.publish(0), "it sleeps between two requests");
        nic.node.settle();
        assert_eq!(nic.sent(), [frame]);
        let consumer = nic.word(0, offset_of!(ChannelRecord, transmit_consumer));
        assert_eq!(consumer, blocks);
        assert_eq!(nic.word(0, wake), 1);
        // Block 0 was what it is armed for.
        let expected: &[_] = match round {
            0 => &[(EventCode::ChannelDescriptors, 0)],
            _ => &[],
        };
        assert_eq!(nic.node.event_codes(EQ_FIRST_HANDLER), expected);
    }
    // Armed for a block in the middle of several requests.
    nic.set_word(0, offset_of!(ChannelRecord, transmit_arm), blocks + 1);
    let frame = plain(100, PEER, mac);
    let pieces = nic.pieces(&frame, &[]);
    let header = TransmitHeader {
        pieces: 1,
        ..TransmitHeader::zeroed()
    };
    for _ in 0..3 {
        nic.write_request(0, header, &pieces);
    }
    nic.publish(0);
    nic.node.settle();
    assert_eq!(nic.sent().len(), 3);
    let told = nic.node.event_codes(EQ_FIRST_HANDLER);
    assert_eq!(told, [(EventCode::ChannelDescriptors, 0)]);
    let counters = nic.counters(0);
    assert_eq!((counters["tx_requests"], counters["tx_frames"]), (43, 43));
    assert_eq!(nic.counters(CHANNEL_NONE), counters);
}

#[test]
fn checksums_are_finished() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    for (v6, protocol, length) in [
        (false, 6, 100),
        (true, 6, 101),
        (false, 17, 33),
        (true, 17, 0),
    ] {
        let packet = Packet {
            v6,
            protocol,
            ..Packet::tcp(5, 6, &vec![0xa5; length])
        };
        let header = TransmitHeader {
            flags: TRANSMIT_CHECKSUM,
            checksum_start: packet.header() as u16,
            checksum_offset: if protocol == 6 { 16 } else { 6 },
            ..TransmitHeader::zeroed()
        };
        let sent = nic.send(header, &packet.frame(PEER, mac, false));
        assert_eq!(sent, [packet.frame(PEER, mac, true)]);
        assert!(packet.is_right(&sent[0]));
    }
}

#[test]
fn a_udp_checksum_of_zero_is_sent_as_ones() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let mut packet = Packet {
        protocol: 17,
        ..Packet::tcp(5, 6, &[0, 0])
    };
    // Data that make the sum all ones.
    let missing = {
        let frame = packet.frame(PEER, mac, true);
        u16::from_be_bytes([frame[40], frame[41]])
    };
    packet.data = missing.to_be_bytes().to_vec();
    let header = TransmitHeader {
        flags: TRANSMIT_CHECKSUM,
        checksum_start: 34,
        checksum_offset: 6,
        ..TransmitHeader::zeroed()
    };
    let sent = nic.send(header, &packet.frame(PEER, mac, false));
    assert_eq!(sent[0][40..42], [0xff, 0xff]);
}

#[test]
fn a_stream_is_cut_into_segments() {
    for (v6, vlan) in [
        (false, None),
        (true, None),
        (false, Some(0x6123)),
        (true, Some(5)),
    ] {
        let mut nic = Nic::new(1);
        let mac = nic.node.mac;
        let data: Vec<u8> = (0..10_000u32).map(|n| (n * 7 % 253) as u8).collect();
        let packet = Packet {
            v6,
            flags: 0x80 | 0x10 | 0x08 | 0x01,
            ..Packet::tcp(1, 2, &data)
        };
        let size = 1448;
        let header = TransmitHeader {
            flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT | vlan.map_or(0, |_| TRANSMIT_VLAN),
            vlan: vlan.unwrap_or(0),
            segment_size: size,
            checksum_start: packet.header() as u16,
            checksum_offset: 16,
            ..TransmitHeader::zeroed()
        };
        let mut sent = nic.send(header, &packet.frame(PEER, mac, false));
        assert_eq!(sent.len(), data.len().div_ceil(size.into()));
        let mut received: Vec<u8> = Vec::new();
        let last = sent.len() - 1;
        for (number, frame) in sent.iter_mut().enumerate() {
            if let Some(vlan) = vlan {
                let tag: Vec<u8> = frame.drain(12..16).collect();
                assert_eq!(tag[..2], [0x81, 0]);
                assert_eq!(tag[2..], vlan.to_be_bytes());
            }
            assert!(packet.is_right(frame), "segment {number}");
            let tcp = &frame[packet.header()..];
            let sequence = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
            assert_eq!(sequence, 0x0102_0304 + received.len() as u32);
            let (first, end) = (number == 0, number == last);
            let flags = 0x10 | if first { 0x80 } else { 0 } | if end { 0x09 } else { 0 };
            assert_eq!(tcp[13], flags, "segment {number}");
            if v6 {
                let length = u16::from_be_bytes([frame[18], frame[19]]);
                assert_eq!(usize::from(length), tcp.len());
            } else {
                let length = u16::from_be_bytes([frame[16], frame[17]]);
                assert_eq!(usize::from(length), 20 + tcp.len());
                let id = u16::from_be_bytes([frame[18], frame[19]]);
                assert_eq!(id, 0x12ff + number as u16);
            }
            received.extend(&tcp[20..]);
        }
        assert!(received == data);
        let counters = nic.counters(0);
        assert_eq!(counters["tx_requests"], 1);
        assert_eq!(counters["tx_frames"], 7);
    }
}

#[test]
fn requests_that_make_no_sense_are_left_out_and_told_of() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let packet = Packet::tcp(1, 2, &[1; 200]);
    let tcp = packet.frame(PEER, mac, false);
    let udp = Packet {
        protocol: 17,
        ..Packet::tcp(1, 2, &[1; 200])
    };
    let udp = udp.frame(PEER, mac, false);
    let checksum = TransmitHeader {
        flags: TRANSMIT_CHECKSUM,
        checksum_start: 34,
        checksum_offset: 16,
        ..TransmitHeader::zeroed()
    };
    let segment = TransmitHeader {
        flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT,
        segment_size: 100,
        ..checksum
    };
    let none = TransmitHeader::zeroed();
    let long = plain(14 + usize::from(MTU) + 1, PEER, mac);
    let mut short_header = tcp.clone();
    short_header[46] = 0x40;
    let mut long_header = tcp[..60].to_vec();
    long_header[46] = 0xf0;
    let cases: Vec<(TransmitHeader, &[u8])> = vec![
        (
            TransmitHeader {
                flags: 1 << 3,
                ..none
            },
            &tcp,
        ),
        (
            TransmitHeader {
                reserved0: 1,
                ..none
            },
            &tcp,
        ),
        (
            TransmitHeader {
                reserved1: 1,
                ..none
            },
            &tcp,
        ),
        (TransmitHeader { vlan: 1, ..none }, &tcp),
        (
            TransmitHeader {
                segment_size: 100,
                ..none
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_start: 34,
                ..none
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_start: 0xffff,
                ..checksum
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_offset: 0xffff,
                ..checksum
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_start: tcp.len() as u16 - 1,
                checksum_offset: 0,
                ..checksum
            },
            &tcp,
        ),
        (
            TransmitHeader {
                segment_size: 0,
                ..segment
            },
            &tcp,
        ),
        (
            TransmitHeader {
                segment_size: 47,
                ..segment
            },
            &tcp,
        ),
        (
            TransmitHeader {
                flags: TRANSMIT_SEGMENT,
                checksum_start: 0,
                checksum_offset: 0,
                ..segment
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_start: 33,
                ..segment
            },
            &tcp,
        ),
        (
            TransmitHeader {
                checksum_offset: 6,
                ..segment
            },
            &tcp,
        ),
        (segment, &udp),
        (segment, &short_header),
        (segment, &long_header),
        (none, &tcp[..13]),
        (none, &long),
    ];
    nic.set_word(0, offset_of!(ChannelRecord, transmit_arm), u32::MAX);
    let total = cases.len() as u64;
    for (header, frame) in cases {
        let index = nic.channels[0].producer;
        assert_eq!(nic.send(header, frame), Vec::<Vec<u8>>::new(), "{header:?}");
        let told = nic.frame_events(EQ_FIRST_HANDLER);
        let bad = (
            EventCode::ChannelBadBuffers,
            0,
            index.into(),
            BAD_BUFFERS_TRANSMIT,
        );
        assert_eq!(told, [bad], "{header:?}");
        // The next one goes.
        assert_eq!(nic.send(none, &tcp), std::slice::from_ref(&tcp));
    }
    // Pieces that are nowhere, empty, or too long together.
    for (address, length) in [
        (0xdead_0000_0000, 64),
        (u64::MAX - 5, 64),
        (0, 0),
        (0, u32::MAX),
    ] {
        let piece = TransmitPiece {
            address,
            length,
            reserved: 0,
        };
        let header = TransmitHeader { pieces: 2, ..none };
        nic.write_request(0, header, &[piece, piece]);
        nic.publish(0);
        nic.node.settle();
        assert_eq!(nic.sent().len(), 0);
        assert_eq!(nic.frame_events(EQ_FIRST_HANDLER).len(), 1);
    }
    assert_eq!(nic.send(none, &tcp), [tcp]);
    assert_eq!(nic.counters(0)["tx_errors"], total + 4);
}

#[test]
fn a_ring_that_cannot_be_understood_is_stopped_and_nothing_else_is() {
    let produce = |nic: &mut Nic, value| {
        nic.set_word(0, offset_of!(ChannelRecord, transmit_producer), value);
        nic.node
            .doorbell(PAGE, DOORBELL_CHANNEL, channel_doorbell(0));
        nic.node.settle();
    };
    let breaks: [&dyn Fn(&mut Nic); 5] = [
        &|nic| produce(nic, 17),
        &|nic| produce(nic, u32::MAX),
        // No pieces, more than there can be, more blocks than are posted.
        &|nic| produce(nic, 1),
        &|nic| {
            let header = TransmitHeader {
                pieces: 19,
                ..TransmitHeader::zeroed()
            };
            nic.write_request(0, header, &[]);
            produce(nic, 16);
        },
        &|nic| {
            let header = TransmitHeader {
                pieces: 4,
                ..TransmitHeader::zeroed()
            };
            nic.write_request(0, header, &[]);
            produce(nic, 1);
        },
    ];
    for (number, broken) in breaks.into_iter().enumerate() {
        let mut nic = Nic::new(2);
        nic.set_word(0, offset_of!(ChannelRecord, transmit_arm), u32::MAX);
        broken(&mut nic);
        let what = BAD_BUFFERS_TRANSMIT | BAD_BUFFERS_STOPPED;
        let told = nic.frame_events(EQ_FIRST_HANDLER);
        assert_eq!(
            told,
            [(EventCode::ChannelBadBuffers, 0, 0, what)],
            "{number}"
        );
        produce(&mut nic, 1);
        assert_eq!(nic.frame_events(EQ_FIRST_HANDLER), []);
        // It still receives, and the other one sends.
        let mac = nic.node.mac;
        let frame = plain(60, mac, PEER);
        assert_eq!(nic.node.receive(&frame), Disposition::Consumed);
        assert_eq!(nic.take(0).unwrap().1, frame);
        let pieces = nic.pieces(&plain(60, PEER, mac), &[]);
        let header = TransmitHeader {
            pieces: 1,
            ..TransmitHeader::zeroed()
        };
        nic.write_request(1, header, &pieces);
        nic.publish(1);
        nic.node.settle();
        assert_eq!(nic.sent().len(), 1);
        // Made anew it is as any other.
        let status = nic.node.object_command(CommandOpcode::DestroyChannel, 0);
        assert_eq!(status, CommandStatus::Ok);
        let again = command(&mut nic.node, 0, EQ_FIRST_HANDLER);
        nic.channels.remove(0);
        nic.add(&again);
        let last = nic.channels.len() - 1;
        nic.write_request(last, header, &pieces);
        nic.publish(last);
        nic.node.settle();
        assert_eq!(nic.sent().len(), 1);
    }
}

#[test]
fn a_doorbell_of_another_page_or_channel_is_not_taken() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let pieces = nic.pieces(&plain(60, PEER, mac), &[]);
    let header = TransmitHeader {
        pieces: 1,
        ..TransmitHeader::zeroed()
    };
    nic.write_request(0, header, &pieces);
    nic.set_word(0, offset_of!(ChannelRecord, transmit_producer), 1);
    for (page, channel) in [(PAGE + 1, 0), (0, 0), (PAGE, 1), (PAGE, 0xffff)] {
        nic.node
            .doorbell(page, DOORBELL_CHANNEL, channel_doorbell(channel));
        nic.node.settle();
        assert_eq!(nic.sent().len(), 0);
    }
    assert_eq!(nic.node.engine.counters().bad_doorbells, 4);
    // Bits above the number do not count.
    nic.node
        .doorbell(PAGE, DOORBELL_CHANNEL, 0xffff_ffff_ffff_0000);
    nic.node.settle();
    assert_eq!(nic.sent().len(), 1);
}

#[test]
fn frames_come_in_with_all_that_is_known_of_them() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    // Round after round, some in several buffers.
    for round in 0..60u32 {
        let length = 14 + (round * 613 % 8000) as usize;
        let frame = plain(length, mac, PEER);
        assert_eq!(nic.node.receive(&frame), Disposition::Consumed);
        let (entry, bytes) = nic.take(0).expect("an entry");
        assert!(bytes == frame, "{round}");
        assert_eq!(entry.buffers, length.div_ceil(BUFFER as usize) as u8);
        assert_eq!(entry.timestamp, nic.node.now);
        assert_eq!((entry.flags, entry.hash, entry.hash_type), (0, 0, 0));
        assert_eq!(entry.status, ReceivedStatus::Good.number());
        assert!(nic.take(0).is_none());
        // Armed for the first entry alone.
        let told = nic.node.event_codes(EQ_FIRST_HANDLER).len();
        assert_eq!(told, usize::from(round == 0));
    }
    nic.set_word(0, offset_of!(ChannelRecord, receive_arm), 61);
    for due in [false, true, false] {
        nic.node.receive(&plain(60, mac, PEER));
        let told = nic.node.event_codes(EQ_FIRST_HANDLER);
        let expected: &[_] = if due {
            &[(EventCode::ChannelPackets, 0)]
        } else {
            &[]
        };
        assert_eq!(told, expected);
    }
    let counters = nic.counters(0);
    assert_eq!(counters["rx_frames"], 63);
}

#[test]
fn checksums_of_what_comes_in_are_looked_at() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    for (v6, protocol) in [(false, 6), (true, 6), (false, 17), (true, 17)] {
        let packet = Packet {
            v6,
            protocol,
            ..Packet::tcp(1, 2, &[3; 77])
        };
        let mut padded = packet.frame(mac, PEER, true);
        padded.extend([9; 5]);
        let good = packet.frame(mac, PEER, true);
        let mut bad_data = good.clone();
        *bad_data.last_mut().unwrap() ^= 1;
        let mut bad_header = good.clone();
        bad_header[22] ^= 1;
        let mut cases = vec![(good, true), (padded, true), (bad_data, false)];
        if !v6 {
            let mut fragment = packet.frame(mac, PEER, true);
            fragment[20] |= 0x20;
            fragment[24..26].copy_from_slice(&[0; 2]);
            let check = !sum(&[&fragment[14..34]]);
            fragment[24..26].copy_from_slice(&check.to_be_bytes());
            cases.extend([(bad_header, false), (fragment, false)]);
        }
        if protocol == 17 {
            // Of another length than IP says, with a sum that would be right for that of IP.
            let mut other_length = packet.frame(mac, PEER, true);
            let header = &mut other_length[packet.header()..];
            let word = |at: usize| (u32::from(header[at]) << 8) | u32::from(header[at + 1]);
            let (length, check) = (word(4) - 2, word(6) + 2);
            let check = (check & 0xffff) + (check >> 16);
            header[4..6].copy_from_slice(&(length as u16).to_be_bytes());
            header[6..8].copy_from_slice(&(check as u16).to_be_bytes());
            cases.push((other_length, false));
        }
        for (frame, right) in cases {
            nic.node.receive(&frame);
            let (entry, bytes) = nic.take(0).unwrap();
            assert!(bytes == frame);
            assert_eq!(entry.flags == RECEIVED_CHECKSUM, right, "{v6} {protocol}");
        }
    }
}

#[test]
fn tags_are_taken_out_where_that_is_asked_for() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let packet = Packet::tcp(1, 2, &[3; 77]);
    let bare = packet.frame(mac, PEER, true);
    let mut tagged = bare.clone();
    tagged.splice(12..12, [0x81, 0, 0xa0, 0x07]);
    nic.node.receive(&tagged);
    let (entry, bytes) = nic.take(0).unwrap();
    assert!(bytes == tagged);
    assert_eq!((entry.flags, entry.vlan), (RECEIVED_CHECKSUM, 0));
    let command = interface(&nic.node, INTERFACE_STRIP_VLAN);
    nic.node.execute(&command);
    nic.node.receive(&tagged);
    let (entry, bytes) = nic.take(0).unwrap();
    assert!(bytes == bare);
    assert_eq!(entry.flags, RECEIVED_CHECKSUM | RECEIVED_VLAN);
    assert_eq!(entry.vlan, 0xa007);
    // And put in.
    let header = TransmitHeader {
        flags: TRANSMIT_VLAN,
        vlan: 0xa007,
        ..TransmitHeader::zeroed()
    };
    assert_eq!(nic.send(header, &bare), [tagged]);
}

#[test]
fn the_filter_takes_what_it_is_told_to() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let other = [0x02, 9, 9, 9, 9, 9];
    let groups = |nic: &mut Nic, list: &[[u8; 6]]| {
        let mut command = SetMulticastFilter::zeroed();
        command.count = list.len() as u16;
        command.addresses[..list.len()].copy_from_slice(list);
        nic.node.execute(&command);
    };
    let all = [mac, other, BROADCAST, GROUP];
    for (flags, list, expected) in [
        (0, &[][..], [true, false, false, false]),
        (INTERFACE_BROADCAST, &[], [true, false, true, false]),
        (0, &[GROUP], [true, false, false, true]),
        (INTERFACE_ALL_MULTICAST, &[], [true, false, false, true]),
        (INTERFACE_PROMISCUOUS, &[], [true; 4]),
    ] {
        let command = interface(&nic.node, flags);
        nic.node.execute(&command);
        groups(&mut nic, list);
        for (to, taken) in all.into_iter().zip(expected) {
            let before = nic.counters(CHANNEL_NONE)["rx_filtered"];
            assert_eq!(
                nic.node.receive(&plain(60, to, PEER)),
                Disposition::Consumed
            );
            assert_eq!(nic.take(0).is_some(), taken, "{flags} {list:?} {to:x?}");
            let after = nic.counters(CHANNEL_NONE)["rx_filtered"];
            assert_eq!(after - before, u64::from(!taken));
        }
    }
    let down = SetInterface {
        flags: INTERFACE_PROMISCUOUS,
        ..interface(&nic.node, 0)
    };
    nic.node.execute(&down);
    nic.node.receive(&plain(60, mac, PEER));
    assert!(nic.take(0).is_none());
    assert!(nic.counters(0)["rx_multicast"] > 0);
}

#[test]
fn frames_are_as_long_as_the_mtu_allows() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    for mtu in [68, 1500, MTU] {
        let command = SetInterface {
            mtu,
            ..interface(&nic.node, 0)
        };
        nic.node.execute(&command);
        let longest = 14 + usize::from(mtu);
        for (length, fits) in [(longest, true), (longest + 1, false)] {
            nic.node.receive(&plain(length, mac, PEER));
            assert_eq!(nic.take(0).is_some(), fits);
            let sent = nic.send(TransmitHeader::zeroed(), &plain(length, PEER, mac));
            assert_eq!(!sent.is_empty(), fits);
            // A tag is not counted.
            let mut tagged = plain(length, mac, PEER);
            tagged.splice(12..12, [0x81, 0, 0, 7]);
            nic.node.receive(&tagged);
            assert_eq!(nic.take(0).is_some(), fits);
        }
    }
    for length in 0..14 {
        nic.node.receive(&plain(14, mac, PEER)[..length]);
        assert!(nic.take(0).is_none());
    }
}

#[test]
fn without_buffers_frames_are_lost_and_a_low_pool_is_told_of_once() {
    let mut nic = Nic::of(combined(), 0);
    let mut command = command(&mut nic.node, 0, EQ_FIRST_HANDLER);
    command.pool_threshold = 4;
    nic.add(&command);
    let up = interface(&nic.node, 0);
    nic.node.execute(&up);
    let mac = nic.node.mac;
    nic.set_word(0, offset_of!(ChannelRecord, receive_arm), u32::MAX);
    nic.node.receive(&plain(60, mac, PEER));
    let low = [(EventCode::ChannelPoolLow, 0)];
    assert_eq!(nic.node.event_codes(EQ_FIRST_HANDLER), low);
    nic.node.receive(&plain(60, mac, PEER));
    assert_eq!(nic.node.event_codes(EQ_FIRST_HANDLER), []);
    nic.post_buffers(0, 6, BUFFER);
    // They are used up before a frame has found enough of them: that is no news.
    let mut told = Vec::new();
    for length in [14 + 13 * 1000, 60, 60] {
        nic.node.receive(&plain(length.min(9014), mac, PEER));
        told.extend(nic.node.event_codes(EQ_FIRST_HANDLER));
    }
    assert_eq!(told, []);
    assert_eq!(nic.take(0).unwrap().0.buffers, 5);
    assert_eq!(nic.take(0).unwrap().0.index, 5);
    assert!(nic.take(0).is_none());
    let counters = nic.counters(0);
    assert_eq!((counters["rx_no_buffer"], counters["rx_frames"]), (3, 2));
}

#[test]
fn buffers_that_may_not_be_posted_come_back() {
    let mac = Node::power_on(1).mac;
    let frame = plain(3000, mac, PEER);
    for (address, length, reserved) in [
        (0xdead_0000_0000, BUFFER, 0),
        (u64::MAX - 100, BUFFER, 0),
        (0, RECEIVE_MIN_BUFFER - 1, 0),
        (0, RECEIVE_MAX_BUFFER + 1, 0),
        (0, BUFFER, 1),
    ] {
        let mut nic = Nic::of(combined(), 0);
        let create = command(&mut nic.node, 0, EQ_FIRST_HANDLER);
        nic.add(&create);
        let up = interface(&nic.node, 0);
        nic.node.execute(&up);
        // The second of two.
        nic.post_buffers(0, 1, BUFFER);
        let good = nic.channels[0].buffers[0];
        let address = if address == 0 { good } else { address };
        let bad = ReceiveDescriptor {
            address,
            length,
            reserved,
        };
        nic.post_descriptor(0, bad);
        nic.node.receive(&frame);
        let told = nic.frame_events(EQ_FIRST_HANDLER);
        let expected = [
            (EventCode::ChannelBadBuffers, 0, 0, 0),
            (EventCode::ChannelPackets, 0, 0, 0),
        ];
        assert_eq!(told, expected);
        let (entry, _) = nic.take(0).unwrap();
        assert_eq!(entry.status, ReceivedStatus::BadBuffer.number());
        assert_eq!((entry.index, entry.buffers, entry.length), (0, 2, 0));
        assert_eq!(nic.counters(0)["rx_bad_buffers"], 1);
    }
    // More than the ring has.
    for posted in [17, u32::MAX] {
        let mut nic = Nic::of(combined(), 0);
        let create = command(&mut nic.node, 0, EQ_FIRST_HANDLER);
        nic.add(&create);
        let up = interface(&nic.node, 0);
        nic.node.execute(&up);
        nic.set_word(0, offset_of!(ChannelRecord, receive_producer), posted);
        for told in [true, false] {
            nic.node.receive(&frame);
            let events = nic.frame_events(EQ_FIRST_HANDLER);
            let stopped = (EventCode::ChannelBadBuffers, 0, 0, BAD_BUFFERS_STOPPED);
            assert_eq!(events, if told { vec![stopped] } else { vec![] });
        }
        assert_eq!(nic.counters(0)["rx_no_channel"], 2);
    }
}

/// The key of the published vectors.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

fn entry(channel: u16, eqn: u16) -> RedirectionEntry {
    RedirectionEntry {
        channel,
        eqn,
        ..RedirectionEntry::zeroed()
    }
}

fn redirect(nic: &mut Nic, types: u16, mask: u16) {
    let command = SetRedirection {
        types,
        mask,
        key: KEY,
        ..SetRedirection::zeroed()
    };
    nic.node.execute(&command);
}

fn set_entry(nic: &mut Nic, first: u16, to: RedirectionEntry) {
    let mut command = SetRedirectionTable::zeroed();
    (command.first, command.count) = (first, 1);
    command.entries[0] = to;
    nic.node.execute(&command);
}

#[test]
fn a_published_flow_goes_to_the_channel_of_its_hash() {
    let mut nic = Nic::new(4);
    let mac = nic.node.mac;
    // 66.9.149.187:2794 to 161.142.100.80:1766.
    let frame = Packet::tcp(2794, 1766, &[1; 10]).frame(mac, PEER, true);
    let (addresses, ports) = (0x323e_8fc2u32, 0x51cc_c178u32);
    set_entry(&mut nic, (ports & 0xff) as u16, entry(2, EQ_NONE));
    set_entry(&mut nic, (addresses & 0xff) as u16, entry(3, EQ_NONE));
    for (types, channel, hash, kind) in [
        (0, 0, 0, 0),
        (HASH_TCP_IPV4 | HASH_IPV4, 2, ports, HASH_TCP_IPV4),
        (HASH_IPV4 | HASH_UDP_IPV4, 3, addresses, HASH_IPV4),
        (HASH_IPV6 | HASH_TCP_IPV6 | HASH_UDP_IPV4, 0, 0, 0),
    ] {
        redirect(&mut nic, types, 0xff);
        nic.node.receive(&frame);
        let (found, _) = nic.take(channel).unwrap_or_else(|| panic!("{types:#x}"));
        assert_eq!((found.hash, found.hash_type), (hash, kind as u8));
    }
    // A smaller table; an entry that is not there.
    redirect(&mut nic, HASH_TCP_IPV4, 0x7);
    nic.node.receive(&frame);
    assert_eq!(nic.take(0).unwrap().0.hash, ports);
    set_entry(&mut nic, 0, entry(1, EQ_NONE));
    nic.node.receive(&frame);
    assert!(nic.take(1).is_some());
    // A channel that is gone.
    let status = nic.node.object_command(CommandOpcode::DestroyChannel, 1);
    assert_eq!(status, CommandStatus::Ok);
    nic.node.receive(&frame);
    assert_eq!(nic.counters(CHANNEL_NONE)["rx_no_channel"], 1);
}

#[test]
fn flows_are_spread_and_each_stays_with_its_channel_while_the_table_changes() {
    let mut nic = Nic::new(4);
    let mac = nic.node.mac;
    redirect(&mut nic, HASH_TCP_IPV4, 0xff);
    for index in 0..256 {
        set_entry(&mut nic, index, entry(index % 4, EQ_NONE));
    }
    let mut used = BTreeSet::new();
    for flow in 0..64 {
        let frame = Packet::tcp(flow, 80, b"x").frame(mac, PEER, true);
        let mut channels = BTreeSet::new();
        for _ in 0..3 {
            nic.node.receive(&frame);
            let found: Vec<usize> = (0..4).filter(|n| nic.take(*n).is_some()).collect();
            assert_eq!(found.len(), 1);
            channels.extend(found);
        }
        assert_eq!(channels.len(), 1, "flow {flow}");
        used.extend(channels);
    }
    assert_eq!(used.len(), 4);
    // All to one, between two frames.
    let frame = Packet::tcp(1, 80, b"x").frame(mac, PEER, true);
    for target in 0..4 {
        for index in 0..256 {
            set_entry(&mut nic, index, entry(target, EQ_NONE));
        }
        nic.node.receive(&frame);
        assert!(nic.take(target.into()).is_some());
    }
}

#[test]
fn an_entry_names_the_event_queue_or_the_processor() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    redirect(&mut nic, HASH_TCP_IPV4, 0);
    let frame = Packet::tcp(1, 2, b"x").frame(mac, PEER, true);
    let packets = [(EventCode::ChannelPackets, 0)];
    let mut arm = 0;
    let mut expect = |nic: &mut Nic, to: u16| {
        nic.set_word(0, offset_of!(ChannelRecord, receive_arm), arm);
        arm += 1;
        nic.node.receive(&frame);
        nic.take(0).unwrap();
        for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER, 3] {
            let told = nic.node.event_codes(eqn);
            assert_eq!(told == packets, eqn == to, "{eqn}: {told:?}");
        }
    };
    set_entry(&mut nic, 0, entry(0, EQ_NONE));
    expect(&mut nic, EQ_FIRST_HANDLER);
    set_entry(&mut nic, 0, entry(0, 3));
    expect(&mut nic, 3);
    let mapped = RedirectionEntry {
        processor: 5,
        ..entry(0, EQ_MAPPED)
    };
    set_entry(&mut nic, 0, mapped);
    expect(&mut nic, EQ_CONTROL);
    nic.node
        .map_vectors(SubFunction::Receive, 5, &[(EQ_ASYNC, MESSAGE_OF_QUEUE)]);
    expect(&mut nic, EQ_ASYNC);
    // What is named so cannot be destroyed.
    set_entry(&mut nic, 0, entry(0, 3));
    let destroy = |nic: &mut Nic, eqn| {
        nic.node
            .object_command(CommandOpcode::DestroyEventQueue, eqn)
    };
    assert_eq!(destroy(&mut nic, 3), CommandStatus::Busy);
    let handler = EQ_FIRST_HANDLER.into();
    assert_eq!(destroy(&mut nic, handler), CommandStatus::Busy);
    let none = RedirectionEntry {
        channel: CHANNEL_NONE,
        eqn: EQ_NONE,
        ..RedirectionEntry::zeroed()
    };
    set_entry(&mut nic, 0, none);
    assert_eq!(destroy(&mut nic, 3), CommandStatus::Ok);
    nic.node.execute(&ModifyChannel {
        eqn: EQ_NONE,
        ..ModifyChannel::zeroed()
    });
    assert_eq!(destroy(&mut nic, handler), CommandStatus::Ok);
    // Nobody is told.
    nic.set_word(0, offset_of!(ChannelRecord, receive_arm), 4);
    nic.node.receive(&frame);
    assert_eq!(nic.node.event_codes(EQ_CONTROL), []);
    assert!(nic.node.engine.is_running());
}

#[test]
fn commands_about_channels_are_checked() {
    use CommandStatus::{BadNumber, BadParameter, Exists, HostMemory, NotFound, Unsupported};
    let mut nic = Nic::new(1);
    let good = command(&mut nic.node, 1, EQ_FIRST_HANDLER);
    let high = Buffer::contiguous(0xdead_0000_0000, 0x4000);
    for (status, bad) in [
        (
            BadNumber,
            CreateChannel {
                channel: 64,
                ..good
            },
        ),
        (Exists, CreateChannel { channel: 0, ..good }),
        (NotFound, CreateChannel { eqn: 77, ..good }),
        (
            BadNumber,
            CreateChannel {
                eqn: 0x1000,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                processor: 1,
                ..good
            },
        ),
        (BadNumber, CreateChannel { port: 1, ..good }),
        (
            BadParameter,
            CreateChannel {
                transmit_log_blocks: 13,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                receive_log_entries: 13,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                receive_log_entries: 255,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                doorbell_page: 1024,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                transmit_offset: 32,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                receive_offset: 0x4000,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                received_offset: 0x3fc0,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                record_offset: 0x3fc0,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                record_offset: !63,
                ..good
            },
        ),
        (
            BadParameter,
            CreateChannel {
                reserved1: 1,
                ..good
            },
        ),
        (
            HostMemory,
            CreateChannel {
                buffer: high,
                ..good
            },
        ),
    ] {
        let found = nic.node.command(CommandOpcode::CreateChannel, &bad);
        assert_eq!(found, status, "{bad:?}");
    }
    for (number, status) in [(1, NotFound), (64, BadNumber), (0x10000, BadNumber)] {
        let found = nic
            .node
            .object_command(CommandOpcode::DestroyChannel, number);
        assert_eq!(found, status);
    }
    let modify = ModifyChannel {
        eqn: EQ_NONE,
        ..ModifyChannel::zeroed()
    };
    for (status, bad) in [
        (
            NotFound,
            ModifyChannel {
                channel: 1,
                ..modify
            },
        ),
        (
            BadNumber,
            ModifyChannel {
                channel: 64,
                ..modify
            },
        ),
        (NotFound, ModifyChannel { eqn: 77, ..modify }),
    ] {
        let found = nic.node.command(CommandOpcode::ModifyChannel, &bad);
        assert_eq!(found, status, "{bad:?}");
    }
    let up = interface(&nic.node, 0);
    for (status, bad) in [
        (
            BadParameter,
            SetInterface {
                flags: 1 << 5,
                ..up
            },
        ),
        (BadParameter, SetInterface { mtu: 67, ..up }),
        (BadParameter, SetInterface { mtu: MTU + 1, ..up }),
        (BadParameter, SetInterface { mac: [0; 6], ..up }),
        (BadParameter, SetInterface { mac: GROUP, ..up }),
        (Unsupported, SetInterface { mac: PEER, ..up }),
        (
            NotFound,
            SetInterface {
                default_channel: 1,
                ..up
            },
        ),
        (
            BadNumber,
            SetInterface {
                default_channel: 64,
                ..up
            },
        ),
        (BadNumber, SetInterface { port: 1, ..up }),
    ] {
        let found = nic.node.command(CommandOpcode::SetInterface, &bad);
        assert_eq!(found, status, "{bad:?}");
    }
    let mut filter = SetMulticastFilter::zeroed();
    filter.addresses[0] = GROUP;
    let mut refuse = |filter: &SetMulticastFilter| {
        let found = nic.node.command(CommandOpcode::SetMulticastFilter, filter);
        assert_eq!(found, BadParameter);
    };
    refuse(&filter);
    refuse(&SetMulticastFilter {
        count: 33,
        ..filter
    });
    refuse(&SetMulticastFilter { count: 2, ..filter });
    for (types, mask) in [(1 << 6, 0), (HASH_IPV4, 2), (HASH_IPV4, 0x1ff), (0, 0xffff)] {
        let bad = SetRedirection {
            types,
            mask,
            ..SetRedirection::zeroed()
        };
        let found = nic.node.command(CommandOpcode::SetRedirection, &bad);
        assert_eq!(found, BadParameter);
    }
    let table = |first, count, entry| {
        let mut command = SetRedirectionTable::zeroed();
        (command.first, command.count) = (first, count);
        command.entries[0] = entry;
        command
    };
    let fine = entry(0, EQ_NONE);
    for (status, bad) in [
        (BadParameter, table(0, 0, fine)),
        (BadParameter, table(0, 28, fine)),
        (BadParameter, table(256, 1, fine)),
        (BadParameter, table(0xffff, 1, fine)),
        (NotFound, table(0, 1, entry(1, EQ_NONE))),
        (BadNumber, table(0, 1, entry(64, EQ_NONE))),
        (NotFound, table(0, 1, entry(0, 77))),
        (BadParameter, table(0, 1, entry(CHANNEL_NONE, 0))),
        (
            BadParameter,
            table(
                0,
                1,
                RedirectionEntry {
                    processor: 1,
                    ..fine
                },
            ),
        ),
    ] {
        let found = nic.node.command(CommandOpcode::SetRedirectionTable, &bad);
        assert_eq!(found, status, "{bad:?}");
    }
}

#[test]
fn another_address_is_taken_where_the_port_lets_it_be_sent_from() {
    let mut node = power_on(Personality::Combined, true);
    node.boot_with(FEATURES | ETHERNET_FEATURES);
    node.create_eq(EQ_ASYNC, 1);
    node.create_eq(EQ_FIRST_HANDLER, 2);
    let mut nic = Nic::of(node, 1);
    let command = SetInterface {
        mac: PEER,
        ..interface(&nic.node, 0)
    };
    nic.node.execute(&command);
    let old = nic.node.mac;
    for (to, taken) in [(PEER, true), (old, false)] {
        nic.node.receive(&plain(60, to, [2; 6]));
        assert_eq!(nic.take(0).is_some(), taken);
    }
}

#[test]
fn a_personality_has_its_parts_and_no_others() {
    for (personality, models) in [
        (Personality::Rdma, FUNCTION_RDMA),
        (Personality::Combined, FUNCTION_RDMA | FUNCTION_ETHERNET),
        (Personality::Network, FUNCTION_ETHERNET),
    ] {
        let mut node = power_on(personality, false);
        let function = Function(node.read_register(REG_FUNCTION, 4) as u32);
        assert_eq!(function.models(), models);
        let offered = node.read_register(REG_FEATURES, 8);
        let rdma = models & FUNCTION_RDMA != 0;
        let ethernet = models & FUNCTION_ETHERNET != 0;
        assert_eq!(offered & FEATURE_UD != 0, rdma);
        assert_eq!(offered & ETHERNET_FEATURES == ETHERNET_FEATURES, ethernet);
        assert_eq!(offered & COMMON_FEATURES, COMMON_FEATURES);
        node.boot_with(offered);
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
        assert_eq!(caps.qp_count != 0, rdma);
        assert_eq!(caps.max_channels != 0, ethernet);
        assert_eq!(caps.reserved, [0; 12]);
        let made = command(&mut node, 0, EQ_FIRST_HANDLER);
        let status = node.command(CommandOpcode::CreateChannel, &made);
        assert_eq!(status == CommandStatus::Ok, ethernet);
        assert_eq!(status == CommandStatus::Unsupported, !ethernet);
        let cq = node.cq_template(1, EQ_FIRST_HANDLER, 4);
        let status = node.command(CommandOpcode::CreateCompletionQueue, &cq);
        assert_eq!(status == CommandStatus::Ok, rdma);
        assert_eq!(status == CommandStatus::Unsupported, !rdma);
        let mac = node.mac;
        let disposition = node.receive(&plain(60, mac, PEER));
        assert_eq!(disposition == Disposition::Consumed, ethernet);
    }
}

#[test]
fn a_driver_that_did_not_agree_on_it_has_none_of_it() {
    for (minor, features) in [(5, FEATURES), (4, FEATURES | ETHERNET_FEATURES)] {
        let mut node = power_on(Personality::Combined, false);
        node.boot_as(minor, features);
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        let made = command(&mut node, 0, EQ_FIRST_HANDLER);
        let status = node.command(CommandOpcode::CreateChannel, &made);
        assert_eq!(status, CommandStatus::Unsupported);
        let redirection = SetRedirection::zeroed();
        let status = node.command(CommandOpcode::SetRedirection, &redirection);
        assert_eq!(status, CommandStatus::Unsupported);
        let mac = node.mac;
        let frame = plain(60, mac, PEER);
        assert_eq!(node.receive(&frame), Disposition::PassToHost);
    }
}

#[test]
fn a_reset_ends_channels_and_keeps_counters() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    nic.node.receive(&plain(60, mac, PEER));
    let before = *nic.node.engine.interface_counters();
    assert_eq!(before.rx_frames, 1);
    nic.node
        .write_register(REG_CONTROL, 4, CONTROL_RESET.into());
    let frame = plain(60, mac, PEER);
    assert_eq!(nic.node.receive(&frame), Disposition::PassToHost);
    nic.node.boot_with(FEATURES | ETHERNET_FEATURES);
    assert_eq!(nic.node.receive(&frame), Disposition::Consumed);
    let after = nic.node.engine.interface_counters();
    assert_eq!(after.rx_frames, before.rx_frames);
    assert_eq!(after.rx_filtered, before.rx_filtered + 1);
    nic.node
        .doorbell(PAGE, DOORBELL_CHANNEL, channel_doorbell(0));
    assert_eq!(nic.node.engine.counters().bad_doorbells, 1);
}

/// A queue pair of the device that writes to another device, beside a flood of frames.
#[test]
fn a_flood_of_frames_and_a_stream_of_packets_both_get_on() {
    const ROOM: usize = ANSWER_RESERVE + (64 << 10);
    let mut nic = Nic::new(1);
    nic.node.set_address();
    nic.node.create_cq(1, EQ_FIRST_HANDLER, 8);
    let mut to = Node::new(2);
    let qpn = 0x10;
    for node in [&mut nic.node, &mut to] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            ..QpOptions::default()
        });
    }
    let (forth, back) = (to.as_peer(qpn), nic.node.as_peer(qpn));
    nic.node.connect(qpn, &forth);
    to.connect(qpn, &back);
    let length = 1 << 20;
    let source = nic.node.register(0x101, PD, ALL, length);
    let target = to.register(0x201, PD, ALL, length);
    let work = SendWork::new(SendOpcode::Write, &[source.sge(0, length as u32)])
        .remote(target.address, target.tag)
        .flags(SEND_SIGNALED);
    nic.node.post_send(qpn, &work);
    // The ring is always full, and the wire takes little more at a time than is kept for answers.
    let mac = nic.node.mac;
    let pieces = nic.pieces(&plain(60, PEER, mac), &[]);
    let header = TransmitHeader {
        pieces: 1,
        ..TransmitHeader::zeroed()
    };
    nic.set_word(0, offset_of!(ChannelRecord, transmit_arm), u32::MAX);
    let (mut ordinary, mut packets, mut both, mut turns) = (0, 0, 0, 0);
    let mut done = false;
    for _ in 0..2000 {
        let room = Room::Bytes(ROOM);
        nic.node.host.ways.insert(to.mac, (Way::Wire, room));
        nic.node.engine.room_again();
        loop {
            let consumer = nic.word(0, offset_of!(ChannelRecord, transmit_consumer));
            if nic.channels[0].producer - consumer == 1 << LOG_BLOCKS {
                break;
            }
            nic.write_request(0, header, &pieces);
        }
        nic.publish(0);
        nic.node.engine.poll(nic.node.now, &mut nic.node.host);
        let sent = nic.sent();
        let (mine, theirs): (Vec<_>, Vec<_>) = sent
            .into_iter()
            .partition(|frame| frame[12..14] == [0x88, 0xb6]);
        ordinary += mine.len();
        packets += theirs.len();
        both += usize::from(!mine.is_empty() && !theirs.is_empty());
        turns += 1;
        assert!(
            theirs
                .iter()
                .map(|frame| frame.len() + FRAME_OVERHEAD)
                .sum::<usize>()
                <= ROOM
        );
        for frame in theirs {
            to.receive(&frame);
        }
        to.settle();
        for frame in std::mem::take(&mut to.host.sent) {
            nic.node.receive(&frame);
        }
        // And a flood comes in: to everybody and to this one, with a tag and without.
        for number in 0..64 {
            let to = [BROADCAST, nic.node.mac][number & 1];
            let tagged = [0, 7, 0x88, 0xb6];
            nic.node.receive(&match number & 2 {
                0 => plain(60, to, PEER),
                _ => ethernet(to, PEER, 0x8100, &[&tagged[..], &[0; 42]].concat()),
            });
        }
        while nic.take(0).is_some() {}
        nic.node.now += 10_000;
        to.now = nic.node.now;
        if !done {
            let completions = drain(&mut nic.node);
            done = !completions.is_empty();
            if done {
                assert_eq!(statuses(&completions), [CompletionStatus::Success]);
                break;
            }
        }
    }
    assert!(done, "{ordinary} frames, {packets} packets");
    assert!(
        packets >= (length >> 12) as usize && ordinary > 8 * turns && both * 2 > turns,
        "{ordinary} frames, {packets} packets, {both} of {turns} turns with both"
    );
}

#[test]
fn a_channel_that_finds_no_room_waits_and_loses_nothing() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    nic.node
        .host
        .ways
        .insert(PEER, (Way::Wire, Room::Bytes(ANSWER_RESERVE + 700)));
    let pieces = nic.pieces(&plain(200, PEER, mac), &[]);
    let header = TransmitHeader {
        pieces: 1,
        ..TransmitHeader::zeroed()
    };
    for _ in 0..5 {
        nic.write_request(0, header, &pieces);
    }
    nic.publish(0);
    nic.node.settle();
    // The host panics where it is sent more than it takes.
    let sent = nic.sent().len();
    assert!((1..3).contains(&sent), "{sent}");
    let consumer = nic.word(0, offset_of!(ChannelRecord, transmit_consumer));
    assert_eq!(consumer as usize, sent);
    assert_eq!(nic.node.engine.next_timeout(), None);
    nic.node
        .host
        .ways
        .insert(PEER, (Way::Wire, Room::Bytes(1 << 20)));
    nic.node.engine.room_again();
    nic.node.settle();
    assert_eq!(sent + nic.sent().len(), 5);
}

proptest! {
    #![proptest_config(crate::config())]

    /// Whatever a host writes to rings and record, and whatever comes by the wire.
    #[test]
    fn nothing_that_a_host_or_the_wire_says_harms_the_device(
        steps in proptest::collection::vec((0u8..8, any::<u64>(), any::<u64>()), 1..120),
    ) {
        let mut nic = Nic::new(2);
        let mac = nic.node.mac;
        nic.node.execute(&interface(&nic.node, INTERFACE_PROMISCUOUS | INTERFACE_STRIP_VLAN));
        redirect(&mut nic, 0x3f, 1);
        set_entry(&mut nic, 1, entry(1, EQ_NONE));
        for (what, place, value) in steps {
            let channel = &nic.channels[(place & 1) as usize];
            let (number, memory) = (channel.number, &nic.node.host.memory);
            match what {
                // Fields of blocks, mostly near to what makes sense.
                0 => {
                    let header = TransmitHeader {
                        pieces: (value % 20) as u8,
                        flags: (value >> 8) as u16 & 0xf,
                        segment_size: (value >> 16) as u16 % 200,
                        checksum_start: (value >> 32) as u16 % 80,
                        checksum_offset: (value >> 48) as u16 % 20,
                        ..TransmitHeader::zeroed()
                    };
                    memory.put(channel.transmit + (place >> 1) % 16 * 64, &header);
                }
                1 => {
                    let piece = TransmitPiece {
                        address: nic.channels[0].buffers[(value % 16) as usize] + value % 9,
                        length: (value >> 32) as u32 % 3000,
                        reserved: 0,
                    };
                    memory.put(channel.transmit + 16 + (place >> 1) % 63 * 16, &piece);
                }
                2 => memory.put(channel.transmit + (place >> 1) % 128 * 8, &value),
                3 => memory.put(channel.receive + (place >> 1) % 32 * 8, &value),
                4 => {
                    let word = [0, 4, 8, 12][(place >> 1) as usize % 4];
                    let old: u32 = memory.get(channel.record + word);
                    let new = if value % 8 == 0 { value as u32 } else { old.wrapping_add(value as u32 % 6) };
                    memory.put(channel.record + word, &new);
                }
                5 => {
                    nic.node.doorbell(PAGE, DOORBELL_CHANNEL, channel_doorbell(number));
                }
                6 => {
                    let mut frame = Packet { v6: value & 1 == 1, ..Packet::tcp(1, 2, &[0; 300]) }
                        .frame(mac, PEER, true);
                    let at = place as usize % frame.len();
                    frame[at] = value as u8;
                    frame.truncate((value >> 8) as usize % (frame.len() + 1));
                    nic.node.receive(&frame);
                }
                _ => nic.node.settle(),
            }
        }
        nic.node.settle();
        assert!(nic.node.engine.is_running());
        // All of it can be ended, and begun again.
        for channel in 0..2 {
            let status = nic.node.object_command(CommandOpcode::DestroyChannel, channel);
            assert_eq!(status, CommandStatus::Ok);
        }
        let made = command(&mut nic.node, 0, EQ_FIRST_HANDLER);
        nic.node.execute(&made);
    }
}

#[test]
fn memory_that_goes_away_stops_a_channel_and_not_the_device() {
    for part in 0..4 {
        let mut nic = Nic::new(2);
        let mac = nic.node.mac;
        let pieces = nic.pieces(&plain(60, PEER, mac), &[]);
        let header = TransmitHeader {
            pieces: 1,
            ..TransmitHeader::zeroed()
        };
        nic.write_request(0, header, &pieces);
        let channel = &nic.channels[0];
        nic.node.host.memory.put(channel.record, &1u32);
        let parts = [
            channel.transmit,
            channel.receive,
            channel.received,
            channel.record,
        ];
        nic.node
            .host
            .memory
            .take_away(parts[part]..parts[part] + 0x1000);
        nic.node
            .doorbell(PAGE, DOORBELL_CHANNEL, channel_doorbell(0));
        nic.node.settle();
        let frame = plain(60, mac, PEER);
        nic.node.receive(&frame);
        nic.node.receive(&frame);
        assert!(nic.node.engine.is_running());
        let told = nic.frame_events(EQ_FIRST_HANDLER);
        let stopped = told
            .iter()
            .filter(|event| event.0 == EventCode::ChannelBadBuffers)
            .inspect(|event| assert_ne!(event.3 & BAD_BUFFERS_STOPPED, 0))
            .count();
        assert_eq!(stopped, if part == 3 { 2 } else { 1 }, "{told:?}");
        nic.node.host.memory.give_back();
        let status = nic.node.object_command(CommandOpcode::DestroyChannel, 0);
        assert_eq!(status, CommandStatus::Ok);
    }
}

#[test]
fn a_device_that_misbehaves_tells_nonsense_of_frames_and_goes_on_where_it_was() {
    let mut nic = Nic::new(1);
    let mac = nic.node.mac;
    let entry = |nic: &Nic, index: u64| -> ReceivedEntry {
        nic.node
            .host
            .memory
            .get(nic.channels[0].received + index * 32)
    };
    let rules = |nonsense: f64| Misbehaviour {
        nonsense: Nonsense {
            completions: nonsense,
            records: nonsense,
            ..Nonsense::default()
        },
        ..Misbehaviour::default()
    };
    let header = TransmitHeader {
        pieces: 1,
        ..TransmitHeader::zeroed()
    };
    let pieces = nic.pieces(&plain(60, PEER, mac), &[]);
    let now = nic.node.now;
    let node = &mut nic.node;
    node.engine.misbehave(rules(1.0), now, &mut node.host);
    let mut wrong = 0;
    for index in 0..8 {
        nic.node.receive(&plain(60, mac, PEER));
        let entry = entry(&nic, index);
        assert_eq!(entry.phase, phase_of(index as u32, LOG_ENTRIES));
        wrong += u32::from((entry.index, entry.buffers, entry.length) != (index as u32, 1, 60));
    }
    assert!(wrong > 2, "{wrong} entries are wrong");
    nic.write_request(0, header, &pieces);
    nic.publish(0);
    nic.node.settle();
    assert_eq!(nic.sent().len(), 1);
    let consumer = offset_of!(ChannelRecord, transmit_consumer);
    assert_ne!(nic.word(0, consumer), 1);
    // It knows itself where it is.
    let node = &mut nic.node;
    node.engine.misbehave(rules(0.0), now, &mut node.host);
    nic.node.receive(&plain(60, mac, PEER));
    let entry = entry(&nic, 8);
    assert_eq!((entry.index, entry.buffers, entry.length), (8, 1, 60));
    nic.write_request(0, header, &pieces);
    nic.publish(0);
    nic.node.settle();
    assert_eq!(nic.word(0, consumer), 2);
}

#[test]
fn a_request_of_more_frames_than_there_is_ever_room_for_goes_on_between_them() {
    let room = |nic: &mut Nic, bytes| {
        let room = Room::Bytes(bytes);
        nic.node.host.ways.insert(PEER, (Way::Wire, room));
    };
    let mut runs = Vec::new();
    for bytes in [1 << 20, ENOUGH_ROOM, ENOUGH_ROOM + 5000] {
        let mut nic = Nic::new(1);
        let mac = nic.node.mac;
        let data: Vec<u8> = (0..65_000u32).map(|n| (n / 7) as u8).collect();
        let packet = Packet::tcp(1, 2, &data);
        let header = TransmitHeader {
            flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT,
            segment_size: TRANSMIT_MIN_SEGMENT,
            checksum_start: packet.header() as u16,
            checksum_offset: 16,
            ..TransmitHeader::zeroed()
        };
        let producer = nic.channels[0].producer;
        room(&mut nic, bytes);
        let mut sent = nic.send(header, &packet.frame(PEER, mac, false));
        let mut turns = 1;
        loop {
            // What is kept for answers is there for them.
            let Room::Bytes(left) = nic.node.host.room(Way::Wire) else {
                unreachable!()
            };
            assert!(left >= ANSWER_RESERVE, "{left}");
            let consumer = nic.word(0, offset_of!(ChannelRecord, transmit_consumer));
            if consumer != producer {
                break;
            }
            // A little is not enough.
            room(&mut nic, ANSWER_RESERVE + 5000);
            nic.node.engine.room_again();
            nic.node.settle();
            assert!(nic.sent().is_empty());
            room(&mut nic, bytes);
            nic.node.engine.room_again();
            nic.node.settle();
            sent.extend(nic.sent());
            turns += 1;
        }
        assert_eq!(turns > 1, bytes < 1 << 20);
        assert_eq!(
            sent.len(),
            65_000usize.div_ceil(TRANSMIT_MIN_SEGMENT.into())
        );
        let counters = nic.counters(0);
        assert_eq!(counters["tx_requests"], 1);
        assert_eq!(counters["tx_frames"], sent.len() as u64);
        // The next one begins at its beginning.
        room(&mut nic, 1 << 20);
        nic.node.engine.room_again();
        assert_eq!(nic.send(header, &packet.frame(PEER, mac, false)), sent);
        runs.push(sent);
    }
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
}
