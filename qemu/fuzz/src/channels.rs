// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Channels of the interface: a driver that writes what it likes into rings and records and gives
//! any command about them, and a wire that brings any frame. The device stands and comes to rest,
//! writes nothing that it was not given, and sends no frame that is longer than the MTU.

use crate::guard::Guards;
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, Unsteady};
use ferrite_engine::{Personality, ETHERNET_FEATURES, FEATURES};

/// Steps of one input.
const STEPS: usize = 64;
/// Frames of one poll beyond which the device works without end.
pub(crate) const MOST_FRAMES: usize = 20_000;
const CHANNELS: u16 = 2;
const LOG_BLOCKS: u8 = 5;
const LOG_ENTRIES: u8 = 4;
/// Bytes of a channel's rings and record, and where its parts are.
const BUFFER: u64 = 0x4000;
const PARTS: [u32; 4] = [0, 0x1000, 0x2000, 0x3000];
/// Bytes that are received in and sent from.
const DATA: u64 = 0x2_0000;
/// Addresses from here on are nowhere.
const NOWHERE: u64 = 1 << 60;
/// Header and two tags, the second of which is inserted.
pub(crate) const MOST_HEADER: usize = 22;
const PEER: [u8; 6] = [2, 0xfe, 0, 0, 0, 9];

/// A frame, to a device with this address or to others, that is right but for what the input makes of it.
pub(crate) fn frame(input: &mut Input<'_>, own: [u8; 6]) -> Vec<u8> {
    let kind = input.u8();
    let to = [own, [0xff; 6], [1, 0, 0x5e, 0, 0, 1], PEER][usize::from(kind & 3)];
    let mut frame = [&to[..], &PEER].concat();
    if kind & 4 != 0 {
        frame.extend([0x81, 0, 0x20, kind]);
    }
    let data = input.number() as usize % 9100;
    let protocol = [6, 17, 1, 44][usize::from(kind >> 6)];
    if kind & 8 == 0 {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((data as u16).wrapping_add(40).to_be_bytes());
        frame.extend([0, 1, kind & 0x20, 0, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 9, 10, 0, 0, 1]);
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((data as u16).wrapping_add(20).to_be_bytes());
        frame.extend([protocol, 64]);
        frame.extend([0x20; 32]);
    }
    frame.extend([
        0x27, 0x10, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 0, 64, 0, 0, 0, 0,
    ]);
    frame.resize(frame.len() + data, kind);
    for _ in 0..input.u8() % 4 {
        let at = usize::from(input.u8()) % frame.len();
        frame[at] = input.u8();
    }
    if kind & 16 != 0 {
        frame.truncate(input.u8().into());
    }
    frame
}

struct Machine {
    node: Node,
    /// Where the rings of each channel are.
    rings: Vec<u64>,
    data: u64,
    guards: Guards,
}

impl Machine {
    fn new() -> Self {
        let mut node = Node::power_on_with(1, |config| {
            config.personality = Personality::Combined;
        });
        node.boot_with(FEATURES | ETHERNET_FEATURES);
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        let mut guards = Guards::default();
        let mut rings = Vec::new();
        for _ in 0..CHANNELS {
            guards.add(&mut node);
            rings.push(node.allocate(BUFFER));
        }
        guards.add(&mut node);
        let data = node.allocate(DATA);
        guards.add(&mut node);
        let mut machine = Self {
            node,
            rings,
            data,
            guards,
        };
        for number in 0..CHANNELS {
            let command = machine.create(number);
            machine.node.execute(&command);
        }
        let command = machine.interface(INTERFACE_PROMISCUOUS);
        machine.node.execute(&command);
        machine
    }

    fn create(&self, channel: u16) -> CreateChannel {
        let [transmit_offset, receive_offset, received_offset, record_offset] = PARTS;
        CreateChannel {
            channel,
            eqn: EQ_FIRST_HANDLER,
            transmit_log_blocks: LOG_BLOCKS,
            receive_log_entries: LOG_ENTRIES,
            buffer: Buffer::contiguous(self.rings[usize::from(channel % CHANNELS)], BUFFER),
            transmit_offset,
            receive_offset,
            received_offset,
            record_offset,
            ..CreateChannel::zeroed()
        }
    }

    fn interface(&self, flags: u16) -> SetInterface {
        SetInterface {
            flags: INTERFACE_UP | flags,
            mtu: 1500,
            mac: self.node.mac,
            ..SetInterface::zeroed()
        }
    }

    /// An address in a channel's part, of entries of so many bytes.
    fn place(&self, input: &mut Input<'_>, part: usize, log_entries: u8, size: u64) -> u64 {
        let choice = u64::from(input.u8());
        let rings = self.rings[(choice & 1) as usize];
        rings + u64::from(PARTS[part]) + (choice >> 1) % (1 << log_entries) * size
    }

    /// Memory that is the channels' to receive in and to send from, so many bytes of it; at times nowhere.
    fn memory(&self, input: &mut Input<'_>, length: u64) -> u64 {
        let at = input.number() % (DATA - length.min(DATA - 1));
        match input.u8() {
            255 => NOWHERE | at,
            _ => self.data + at,
        }
    }

    fn poll(&mut self) {
        for _ in 0..8 {
            let node = &mut self.node;
            node.engine.poll(node.now, &mut node.host);
            assert!(node.host.sent.len() < MOST_FRAMES, "frames without end");
            for frame in node.host.sent.drain(..) {
                assert!(
                    (14..=MOST_HEADER + 9000).contains(&frame.len()),
                    "a frame of {} bytes",
                    frame.len()
                );
            }
            node.host.raised.clear();
            node.now += 1_000_000;
        }
    }

    fn command(&mut self, input: &mut Input<'_>) {
        let channel = u16::from(input.u8() % 4);
        let choice = input.u8();
        let any = input.number();
        let node = &mut self.node;
        match choice % 8 {
            0 => {
                node.object_command(CommandOpcode::DestroyChannel, channel.into());
            }
            1 | 2 => {
                let mut command = self.create(channel);
                match choice >> 3 {
                    0 => command.transmit_log_blocks = any as u8,
                    1 => command.receive_log_entries = any as u8,
                    // What the device writes does not become what it is told to write to.
                    2 => command.record_offset = any as u32 | PARTS[2],
                    3 => command.received_offset = any as u32 | PARTS[2],
                    4 => command.eqn = any as u16,
                    5 => command.doorbell_page = any as u32,
                    6 => command.channel = any as u16,
                    _ => {}
                }
                self.node.command(CommandOpcode::CreateChannel, &command);
            }
            3 => {
                let command = ModifyChannel {
                    channel,
                    eqn: [EQ_FIRST_HANDLER, EQ_NONE, EQ_MAPPED, any as u16]
                        [usize::from(choice >> 6)],
                    processor: input.u8().into(),
                    pool_threshold: any as u16,
                    ..ModifyChannel::zeroed()
                };
                node.command(CommandOpcode::ModifyChannel, &command);
            }
            4 => {
                let mut command = self.interface(any as u16);
                command.default_channel = channel;
                command.mtu = 68 + input.number() as u16 % 9100;
                self.node.command(CommandOpcode::SetInterface, &command);
            }
            5 => {
                let command = SetRedirection {
                    types: any as u16 & 0x7f,
                    mask: input.number() as u16,
                    key: [choice; REDIRECTION_KEY_SIZE],
                    ..SetRedirection::zeroed()
                };
                node.command(CommandOpcode::SetRedirection, &command);
            }
            6 => {
                let mut command = SetRedirectionTable {
                    first: any as u16,
                    count: u16::from(choice >> 4),
                    ..SetRedirectionTable::zeroed()
                };
                for entry in command.entries.iter_mut().take(usize::from(choice >> 4)) {
                    entry.channel = u16::from(input.u8() % 3);
                    entry.eqn = input.pick(&[EQ_NONE, EQ_MAPPED, EQ_FIRST_HANDLER]);
                }
                node.command(CommandOpcode::SetRedirectionTable, &command);
            }
            _ => {
                let command = QueryChannelCounters {
                    channel: any as u16,
                    port: 0,
                    reserved: [0; 5],
                };
                node.command(CommandOpcode::QueryChannelCounters, &command);
            }
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 12 {
            0 | 1 => {
                let header = TransmitHeader {
                    pieces: input.u8() % 20,
                    flags: u16::from(input.u8() & 0xf),
                    segment_size: input.number() as u16,
                    vlan: u16::from(input.u8()),
                    checksum_start: u16::from(input.u8() % 80),
                    checksum_offset: u16::from(input.u8() % 20),
                    ..TransmitHeader::zeroed()
                };
                let at = self.place(input, 0, LOG_BLOCKS, 64);
                self.node.host.memory.put(at, &header);
            }
            2 => {
                let length = input.number() as u32;
                let piece = TransmitPiece {
                    address: self.memory(input, length.into()),
                    length,
                    reserved: 0,
                };
                let at = self.place(input, 0, LOG_BLOCKS + 2, 16);
                self.node.host.memory.put(at, &piece);
            }
            3 => {
                let at = self.place(input, 0, LOG_BLOCKS + 3, 8);
                self.node.host.memory.put(at, &input.number());
            }
            4 | 5 => {
                let length = input.number() % DATA;
                let descriptor = ReceiveDescriptor {
                    address: self.memory(input, length),
                    length: length as u32,
                    ..ReceiveDescriptor::zeroed()
                };
                let at = self.place(input, 1, LOG_ENTRIES, 16);
                self.node.host.memory.put(at, &descriptor);
            }
            6 => {
                // Producers and armings.
                let at = self.place(input, 3, 2, 4);
                let value = match input.u8() {
                    255 => input.u32(),
                    ahead => self
                        .node
                        .host
                        .memory
                        .get::<u32>(at)
                        .wrapping_add(ahead.into()),
                };
                self.node.host.memory.put(at, &value);
            }
            7 => {
                let number = input.number();
                let page = u32::from(input.u8() == 255);
                self.node.doorbell(page, DOORBELL_CHANNEL, number);
            }
            8 | 9 => {
                let frame = frame(input, self.node.mac);
                self.node.receive(&frame);
            }
            10 => self.command(input),
            _ => self.poll(),
        }
    }
}

/// Rings, records, commands, frames.
pub fn channels(data: &[u8]) {
    let mut machine = Machine::new();
    let mut input = Input::new(data);
    let one_in = input.u8();
    if one_in != 0 {
        // What is sent changes while the device reads it.
        let ranges = machine.rings.iter().map(|&at| at..at + 0x800).collect();
        let seed = input.u8().into();
        let unsteady = Unsteady::new(ranges, u64::from(one_in).max(2), seed);
        machine.node.host.unsteady.replace(Some(unsteady));
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        machine.step(&mut input);
    }
    machine.poll();
    machine.node.host.unsteady.replace(None);
    machine.guards.check(&machine.node);
    // Whatever was said, only what it was said of has stopped.
    assert!(machine.node.engine.is_running(), "the device has stopped");
    for channel in 0..CHANNELS {
        let node = &mut machine.node;
        node.object_command(CommandOpcode::DestroyChannel, channel.into());
        let command = machine.create(channel);
        machine.node.execute(&command);
    }
}
