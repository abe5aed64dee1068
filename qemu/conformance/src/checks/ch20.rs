// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chapter 20: channels, the interface, redirection.

use super::checks;
use crate::host::{Host, PEER_MAC, USER_PAGE};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{not_here, wait_for, watch, Outcome};
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{
    BadNumber, BadParameter, Busy, Exists, HostMemory, NotFound, Ok as Done, Unsupported,
};
use ferrite_abi::*;
use std::mem::offset_of;

checks! {
    "DEV-20-1" => the_function_says_so,
    "DEV-20-2" => a_function_without_rdma,
    "DEV-20-3" => caps,
    "DEV-20-4" => ordinary_frames_are_the_interfaces,
    "DEV-20-5" => not_agreed_on,
    "DEV-20-6" => a_reset_ends_it,
    "DEV-20-8" => |h| refused(h, BadNumber, |c, caps| c.channel = caps.max_channels),
    "DEV-20-9" => there_is_one,
    "DEV-20-10" => handlers_are_checked,
    "DEV-20-11" => sizes_are_checked,
    "DEV-20-12" => offsets_are_checked,
    "DEV-20-13" => |h| refused(h, HostMemory, |c, _| c.buffer = Buffer::contiguous(NOWHERE, LENGTH)),
    "DEV-20-14" => a_new_channel,
    "DEV-20-15" => modify,
    "DEV-20-16" => destroy,
    "DEV-20-17" => channels_that_are_not_there,
    "DEV-20-18" => event_queues_in_use,
    "DEV-20-19" => the_interface_is_checked,
    "DEV-20-20" => the_default_channel_is_checked,
    "DEV-20-21" => another_address,
    "DEV-20-22" => the_filter_is_checked,
    "DEV-20-23" => frames_go_out_in_order,
    "DEV-20-24" => blocks_are_done,
    "DEV-20-25" => descriptors_are_told_of,
    "DEV-20-26" => wake_and_doorbell,
    "DEV-20-27" => checksum,
    "DEV-20-28" => segments,
    "DEV-20-29" => tag_is_inserted,
    "DEV-20-30" => bad_requests,
    "DEV-20-31" => transmit_stops,
    "DEV-20-32" => filter,
    "DEV-20-33" => lengths,
    "DEV-20-34" => several_buffers,
    "DEV-20-35" => entries,
    "DEV-20-36" => checksums_are_looked_at,
    "DEV-20-37" => tag_is_taken_out,
    "DEV-20-38" => packets_are_told_of,
    "DEV-20-39" => no_buffer,
    "DEV-20-40" => low_pool,
    "DEV-20-41" => bad_buffers,
    "DEV-20-42" => receive_stops,
    "DEV-20-43" => hash_types,
    "DEV-20-44" => the_entry_of_the_hash,
    "DEV-20-45" => the_event_queue_of_the_entry,
    "DEV-20-46" => redirection_is_checked,
    "DEV-20-47" => the_table_is_checked,
    "DEV-20-48" => changes_under_traffic,
    "DEV-20-49" => counters,
}

const LOG: u8 = 4;
const BUFFER: u32 = 2048;
const LENGTH: u64 = 4 * PAGE;
const MTU: u16 = 1500;
const EQ: u16 = EQ_FIRST_HANDLER;
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 9];

/// A channel of the device.
struct Channel {
    base: u64,
    number: u16,
    producer: u32,
    posted: u32,
    consumed: u32,
    buffers: Vec<u64>,
}

fn command(host: &mut Host, channel: u16) -> CreateChannel {
    CreateChannel {
        channel,
        eqn: EQ,
        transmit_log_blocks: LOG,
        receive_log_entries: LOG,
        doorbell_page: USER_PAGE,
        buffer: Buffer::contiguous(host.memory.allocate(LENGTH), LENGTH),
        receive_offset: PAGE as u32,
        received_offset: 2 * PAGE as u32,
        record_offset: 3 * PAGE as u32,
        ..CreateChannel::zeroed()
    }
}

fn interface(host: &Host, flags: u16) -> SetInterface {
    SetInterface {
        flags: INTERFACE_UP | flags,
        mtu: MTU,
        mac: host.mac,
        ..SetInterface::zeroed()
    }
}

/// Starts the device with its interface and two event queues.
fn start(host: &mut Host, feature: u64) -> Outcome {
    host.needs(feature)?;
    host.ethernet = true;
    host.start_bare(u64::MAX)?;
    for eqn in [EQ_ASYNC, EQ] {
        host.create_eq(eqn, eqn)?;
    }
    Ok(())
}

/// The same with channel 0, which has buffers and gets all frames.
fn up(host: &mut Host) -> Outcome<Channel> {
    start(host, FEATURE_ETHERNET)?;
    let channel = Channel::new(host, 0, 1 << LOG)?;
    let command = interface(host, INTERFACE_BROADCAST);
    host.execute(&command)?;
    Ok(channel)
}

fn word(host: &Host, channel: &Channel, at: usize) -> u32 {
    host.memory.load32(channel.record() + at as u64)
}

fn set_word(host: &Host, channel: &Channel, at: usize, value: u32) {
    host.memory.store32(channel.record() + at as u64, value);
    host.memory.barrier();
}

const PRODUCER: usize = offset_of!(ChannelRecord, transmit_producer);
const POSTED: usize = offset_of!(ChannelRecord, receive_producer);
const TRANSMIT_ARM: usize = offset_of!(ChannelRecord, transmit_arm);
const RECEIVE_ARM: usize = offset_of!(ChannelRecord, receive_arm);
const WAKE: usize = offset_of!(ChannelRecord, transmit_wake);
const CONSUMER: usize = offset_of!(ChannelRecord, transmit_consumer);

impl Channel {
    fn of(command: &CreateChannel) -> Self {
        Self {
            base: command.buffer.root,
            number: command.channel,
            producer: 0,
            posted: 0,
            consumed: 0,
            buffers: vec![0; 1 << LOG],
        }
    }

    fn new(host: &mut Host, number: u16, buffers: u32) -> Outcome<Self> {
        let command = command(host, number);
        host.execute(&command)?;
        let mut channel = Self::of(&command);
        for _ in 0..buffers {
            let address = host.memory.allocate(BUFFER.into());
            channel.post(host, address, BUFFER);
        }
        Ok(channel)
    }

    fn record(&self) -> u64 {
        self.base + 3 * PAGE
    }

    fn post(&mut self, host: &Host, address: u64, length: u32) {
        let slot = self.posted as usize % (1 << LOG);
        let descriptor = ReceiveDescriptor {
            address,
            length,
            reserved: 0,
        };
        let at = self.base + PAGE + slot as u64 * 16;
        host.memory.put(at, &descriptor);
        self.buffers[slot] = address;
        self.posted += 1;
        host.memory
            .store32(self.record() + POSTED as u64, self.posted);
    }

    /// Writes a request of whole frames, one piece each.
    fn write(&mut self, host: &mut Host, mut header: TransmitHeader, pieces: &[TransmitPiece]) {
        if header.pieces == 0 {
            header.pieces = pieces.len() as u8;
        }
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(pieces.iter().flat_map(Plain::as_bytes));
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        for block in bytes.chunks(64) {
            let slot = self.producer % (1 << LOG);
            host.memory.write(self.base + u64::from(slot) * 64, block);
            self.producer += 1;
        }
    }

    fn ring(&self, host: &mut Host) -> Outcome {
        set_word(host, self, PRODUCER, self.producer);
        let word = channel_doorbell(self.number);
        host.device.doorbell(USER_PAGE, DOORBELL_CHANNEL, word)
    }

    fn send(&mut self, host: &mut Host, header: TransmitHeader, frame: &[u8]) -> Outcome {
        let middle = frame.len() / 2;
        let parts = [&frame[..middle], &frame[middle..]];
        let pieces = parts.map(|part| piece(host, part));
        self.write(host, header, &pieces);
        self.ring(host)
    }

    /// The device has done all that was posted.
    fn is_done(&self, host: &Host) -> Outcome {
        wait_for("the end of all blocks", || {
            Ok((word(host, self, CONSUMER) == self.producer).then_some(()))
        })
    }

    fn look(&mut self, host: &Host) -> Option<(ReceivedEntry, Vec<u8>)> {
        let slot = self.consumed % (1 << LOG);
        let at = self.base + 2 * PAGE + u64::from(slot) * 32;
        let last = host.memory.load64(at + RECEIVED_VALID_OFFSET as u64);
        if (last >> 56) as u8 != phase_of(self.consumed, LOG) {
            return None;
        }
        let entry: ReceivedEntry = host.memory.get(at);
        self.consumed += 1;
        let mut bytes = Vec::new();
        for number in 0..u32::from(entry.buffers) {
            let address = self.buffers[(entry.index + number) as usize % (1 << LOG)];
            let length = (entry.length - bytes.len() as u32).min(BUFFER);
            if length > 0 {
                bytes.extend(host.memory.bytes(address, length.into()));
            }
        }
        for number in 0..u32::from(entry.buffers) {
            let address = self.buffers[(entry.index + number) as usize % (1 << LOG)];
            self.post(host, address, BUFFER);
        }
        Some((entry, bytes))
    }

    fn receive(&mut self, host: &Host) -> Outcome<(ReceivedEntry, Vec<u8>)> {
        wait_for("a received entry", || Ok(self.look(host)))
    }

    /// The frame comes in, and is what is placed.
    fn takes(&mut self, host: &mut Host, frame: &[u8]) -> Outcome<ReceivedEntry> {
        host.wire()?.send(frame)?;
        let (entry, bytes) = self.receive(host)?;
        ensure!(bytes == frame, "another frame: {bytes:02x?}");
        Ok(entry)
    }

    fn nothing(&mut self, host: &Host) -> Outcome {
        watch("a received entry", || Ok(self.look(host)))
    }

    /// The frame is not received.
    fn leaves(&mut self, host: &mut Host, frame: &[u8]) -> Outcome {
        host.wire()?.send(frame)?;
        self.nothing(host)
    }
}

fn piece(host: &mut Host, bytes: &[u8]) -> TransmitPiece {
    let address = host.memory.allocate(bytes.len() as u64);
    host.memory.write(address, bytes);
    TransmitPiece {
        address,
        length: bytes.len() as u32,
        reserved: 0,
    }
}

fn frame(to: [u8; 6], from: [u8; 6], length: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb6]].concat();
    frame.extend((frame.len()..length).map(|n| n as u8));
    frame
}

/// A frame to the device.
fn incoming(host: &Host, length: usize) -> Vec<u8> {
    frame(host.mac, PEER_MAC, length)
}

fn outgoing(host: &Host, length: usize) -> Vec<u8> {
    frame(PEER_MAC, host.mac, length)
}

fn sent(host: &mut Host) -> Outcome<Vec<u8>> {
    host.wire()?.link()?.receive("a frame")
}

fn nothing_sent(host: &mut Host) -> Outcome {
    let link = host.wire()?.link()?;
    watch("a frame that should not have been sent", || link.look())
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

/// Addresses of the published vectors.
const ADDRESSES: [u8; 8] = [66, 9, 149, 187, 161, 142, 100, 80];
/// Hash of the addresses, and with ports 2794 and 1766.
const HASHES: (u32, u32) = (0x323e_8fc2, 0x51cc_c178);
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

fn pseudo(length: usize) -> Vec<u8> {
    [&ADDRESSES[..], &[0, 6], &(length as u16).to_be_bytes()].concat()
}

/// TCP of the published vectors; its checksum is of the pseudo header alone unless `whole`.
fn tcp(to: [u8; 6], from: [u8; 6], data: &[u8], whole: bool) -> Vec<u8> {
    let mut segment = [2794u16.to_be_bytes(), 1766u16.to_be_bytes()].concat();
    segment.extend([0, 0, 1, 0, 0, 0, 0, 2, 0x50, 0x99, 1, 0, 0, 0, 0, 0]);
    segment.extend(data);
    let pseudo = pseudo(segment.len());
    let stored = if whole {
        !sum(&[&pseudo, &segment])
    } else {
        sum(&[&pseudo])
    };
    segment[16..18].copy_from_slice(&stored.to_be_bytes());
    let mut header = vec![0x45, 0];
    header.extend((20 + segment.len() as u16).to_be_bytes());
    header.extend([0, 7, 0x40, 0, 64, 6, 0, 0]);
    header.extend(ADDRESSES);
    let check = !sum(&[&header]);
    header[10..12].copy_from_slice(&check.to_be_bytes());
    [&to[..], &from, &[8, 0], &header, &segment].concat()
}

const CHECKSUM: TransmitHeader = TransmitHeader {
    pieces: 0,
    reserved0: 0,
    flags: TRANSMIT_CHECKSUM,
    vlan: 0,
    segment_size: 0,
    checksum_start: 34,
    checksum_offset: 16,
    reserved1: 0,
};

fn none() -> TransmitHeader {
    TransmitHeader::zeroed()
}

// What a function is.

fn the_function_says_so(host: &mut Host) -> Outcome {
    let function = Function(host.device.register32(REG_FUNCTION)?);
    let offered = host.device.register64(REG_FEATURES)? & FEATURE_ETHERNET != 0;
    let said = function.models() & FUNCTION_ETHERNET != 0;
    ensure_eq!(said, offered, "Ethernet in REG_FUNCTION");
    Ok(())
}

fn a_function_without_rdma(host: &mut Host) -> Outcome {
    let function = Function(host.device.register32(REG_FUNCTION)?);
    if function.models() & FUNCTION_RDMA != 0 {
        return not_here("the function has RDMA");
    }
    start(host, FEATURE_ETHERNET)?;
    let caps = host.caps;
    let numbers = [caps.qp_count, caps.cq_count, caps.srq_count, caps.tag_count];
    ensure_eq!(numbers, [0; 4], "numbers of objects");
    ensure_eq!(caps.max_gid, 0, "GIDs");
    let cq = host.cq_command(4);
    host.refuse(&cq, Unsupported)?;
    let region = host.region_command(ACCESS_LOCAL_WRITE, PAGE);
    host.refuse(&region, Unsupported)?;
    let srq = host.srq_command();
    host.refuse(&srq, Unsupported)?;
    host.refuse(&SetGid::zeroed(), Unsupported)?;
    host.refuse(&CreateQueuePair::zeroed(), Unsupported)?;
    host.refuse(&SetPort::zeroed(), Unsupported)
}

fn caps(host: &mut Host) -> Outcome {
    host.start_bare(u64::MAX)?;
    let offered = host.device.register64(REG_FEATURES)? & FEATURE_ETHERNET != 0;
    let caps = host.caps;
    if !offered {
        let range = offset_of!(DeviceCaps, max_channels)..offset_of!(DeviceCaps, max_flows);
        let rest = &caps.as_bytes()[range];
        ensure!(rest.iter().all(|byte| *byte == 0), "{rest:02x?}");
        return Ok(());
    }
    ensure!((1..=MAX_CHANNELS).contains(&caps.max_channels), "{caps:?}");
    ensure!(caps.max_mtu >= 1500, "{caps:?}");
    let blocks = 4..=TRANSMIT_MAX_LOG_BLOCKS;
    ensure!(blocks.contains(&caps.transmit_max_log_blocks), "{caps:?}");
    let entries = 4..=RECEIVE_MAX_LOG_ENTRIES;
    ensure!(entries.contains(&caps.receive_max_log_entries), "{caps:?}");
    let pieces = 1..=TRANSMIT_MAX_PIECES as u8;
    ensure!(pieces.contains(&caps.max_transmit_pieces), "{caps:?}");
    let longest = u32::from(caps.max_mtu) + 14;
    ensure!(caps.max_transmit_bytes >= longest, "{caps:?}");
    Ok(())
}

fn ordinary_frames_are_the_interfaces(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = incoming(host, 100);
    channel.takes(host, &frame)?;
    if let Ok(interface) = host.interface() {
        watch("a frame that went elsewhere", || interface.look())?;
    }
    let frame = outgoing(host, 100);
    channel.send(host, none(), &frame)?;
    ensure_eq!(sent(host)?, frame, "the frame");
    Ok(())
}

fn not_agreed_on(host: &mut Host) -> Outcome {
    host.start_bare(u64::MAX)?;
    host.create_eq(EQ_ASYNC, 1)?;
    host.create_eq(EQ, 2)?;
    let channel = command(host, 0);
    host.refuse(&channel, Unsupported)?;
    host.refuse(&SetInterface::zeroed(), Unsupported)?;
    host.refuse(&SetMulticastFilter::zeroed(), Unsupported)?;
    host.refuse(&SetRedirection::zeroed(), Unsupported)?;
    host.refuse(&SetRedirectionTable::zeroed(), Unsupported)?;
    host.object(Op::DestroyChannel, 0, Unsupported)?;
    let frame = incoming(host, 100);
    host.wire()?.send(&frame)?;
    let passed = host.interface()?.receive("the frame")?;
    ensure_eq!(passed, frame, "the frame");
    Ok(())
}

fn a_reset_ends_it(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = incoming(host, 100);
    channel.takes(host, &frame)?;
    let before = count(host, CHANNEL_NONE)?;
    host.device.control_reset()?;
    start(host, FEATURE_ETHERNET)?;
    host.object(Op::DestroyChannel, 0, NotFound)?;
    channel.leaves(host, &frame)?;
    let after = count(host, CHANNEL_NONE)?;
    ensure_eq!(after("rx_frames"), before("rx_frames"), "rx_frames");
    ensure_eq!(
        after("rx_filtered"),
        before("rx_filtered") + 1,
        "rx_filtered"
    );
    Ok(())
}

// Commands.

/// A command that is refused, and is not when it is left as it is.
fn refused(
    host: &mut Host,
    status: CommandStatus,
    change: fn(&mut CreateChannel, &DeviceCaps),
) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    refuse(host, status, change)?;
    let good = command(host, 1);
    host.execute(&good)
}

fn refuse(
    host: &mut Host,
    status: CommandStatus,
    change: fn(&mut CreateChannel, &DeviceCaps),
) -> Outcome {
    let mut bad = command(host, 1);
    change(&mut bad, &host.caps);
    host.refuse(&bad, status)
}

fn there_is_one(host: &mut Host) -> Outcome {
    up(host)?;
    let again = command(host, 0);
    host.refuse(&again, Exists)
}

fn handlers_are_checked(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    refuse(host, NotFound, |c, _| c.eqn = 9)?;
    refuse(host, BadNumber, |c, caps| c.eqn = caps.max_eq)?;
    refuse(host, BadParameter, |c, _| c.processor = 1)?;
    let mut none = command(host, 1);
    none.eqn = EQ_NONE;
    host.execute(&none)
}

fn sizes_are_checked(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    refuse(host, BadParameter, |c, caps| {
        c.transmit_log_blocks = caps.transmit_max_log_blocks + 1
    })?;
    refuse(host, BadParameter, |c, caps| {
        c.receive_log_entries = caps.receive_max_log_entries + 1
    })?;
    refuse(host, BadParameter, |c, _| c.doorbell_page = u32::MAX)
}

fn offsets_are_checked(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    refuse(host, BadParameter, |c, _| c.transmit_offset = 32)?;
    refuse(host, BadParameter, |c, _| c.receive_offset = LENGTH as u32)?;
    refuse(host, BadParameter, |c, _| {
        c.received_offset = LENGTH as u32 - 64
    })?;
    refuse(host, BadParameter, |c, _| {
        c.record_offset = LENGTH as u32 - 64
    })?;
    refuse(host, BadParameter, |c, _| c.buffer.fbo = 8)
}

fn a_new_channel(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    ensure_eq!(word(host, &channel, WAKE), 1, "the wake word");
    ensure_eq!(word(host, &channel, CONSUMER), 0, "blocks done");
    let frame = incoming(host, 60);
    let entry = channel.takes(host, &frame)?;
    ensure_eq!(entry.index, 0, "the first descriptor");
    let frame = outgoing(host, 60);
    channel.send(host, none(), &frame)?;
    channel.is_done(host)
}

fn modify(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    host.create_eq(3, 3)?;
    let other = ModifyChannel {
        eqn: 3,
        pool_threshold: 1 << LOG,
        ..ModifyChannel::zeroed()
    };
    host.execute(&other)?;
    let frame = incoming(host, 60);
    channel.takes(host, &frame)?;
    host.event(3, EventCode::ChannelPackets, 0)?;
    host.event(3, EventCode::ChannelPoolLow, 0)?;
    host.refuse(&ModifyChannel { eqn: 9, ..other }, NotFound)
}

fn destroy(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    host.destroy(Op::DestroyChannel, 0)?;
    let counters = count(host, CHANNEL_NONE)?;
    let before = host.memory.bytes(channel.base, LENGTH);
    let frame = incoming(host, 60);
    channel.leaves(host, &frame)?;
    ensure!(
        host.memory.bytes(channel.base, LENGTH) == before,
        "it was touched"
    );
    let counted = count(host, CHANNEL_NONE)?("rx_no_channel") - counters("rx_no_channel");
    ensure_eq!(counted, 1, "rx_no_channel");
    let mut again = Channel::new(host, 0, 4)?;
    again.takes(host, &frame)?;
    Ok(())
}

fn channels_that_are_not_there(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    for (channel, status) in [(1, NotFound), (host.caps.max_channels, BadNumber)] {
        let modify = ModifyChannel {
            channel,
            eqn: EQ_NONE,
            ..ModifyChannel::zeroed()
        };
        host.refuse(&modify, status)?;
        host.object(Op::DestroyChannel, channel.into(), status)?;
        let query = QueryChannelCounters {
            channel,
            ..QueryChannelCounters::zeroed()
        };
        let mut entry = host.entry(Op::QueryChannelCounters, &query);
        (entry.reply, entry.reply_length) = (host.reply(), 64);
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn event_queues_in_use(host: &mut Host) -> Outcome {
    up(host)?;
    host.object(Op::DestroyEventQueue, EQ.into(), Busy)?;
    let none = ModifyChannel {
        eqn: EQ_NONE,
        ..ModifyChannel::zeroed()
    };
    host.execute(&none)?;
    if host.features & FEATURE_REDIRECTION != 0 {
        set_entry(host, 0, entry(0, EQ))?;
        host.object(Op::DestroyEventQueue, EQ.into(), Busy)?;
        set_entry(host, 0, entry(CHANNEL_NONE, EQ_NONE))?;
    }
    host.object(Op::DestroyEventQueue, EQ.into(), Done)
}

fn the_interface_is_checked(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let good = interface(host, 0);
    for bad in [
        SetInterface {
            flags: 1 << 15,
            ..good
        },
        SetInterface {
            mtu: INTERFACE_MIN_MTU - 1,
            ..good
        },
        SetInterface {
            mtu: host.caps.max_mtu + 1,
            ..good
        },
        SetInterface {
            mac: [0; 6],
            ..good
        },
        SetInterface { mac: GROUP, ..good },
    ] {
        host.refuse(&bad, BadParameter)?;
    }
    host.execute(&SetInterface {
        mtu: host.caps.max_mtu,
        ..good
    })?;
    let frame = incoming(host, 60);
    channel.takes(host, &frame)?;
    Ok(())
}

fn the_default_channel_is_checked(host: &mut Host) -> Outcome {
    up(host)?;
    let good = interface(host, 0);
    host.refuse(
        &SetInterface {
            default_channel: 1,
            ..good
        },
        NotFound,
    )?;
    let default_channel = host.caps.max_channels;
    host.refuse(
        &SetInterface {
            default_channel,
            ..good
        },
        BadNumber,
    )?;
    host.execute(&SetInterface {
        default_channel: CHANNEL_NONE,
        ..good
    })
}

fn another_address(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let mac = [0x02, 7, 7, 7, 7, 7];
    let other = SetInterface {
        mac,
        ..interface(host, 0)
    };
    let entry = host.entry(Op::SetInterface, &other);
    let (status, _) = host.submit(&entry)?;
    let taken = match status {
        Done => mac,
        Unsupported => host.mac,
        _ => return host.refuse(&other, Unsupported),
    };
    channel.takes(host, &frame(taken, PEER_MAC, 60))?;
    Ok(())
}

fn the_filter_is_checked(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    let mut filter = SetMulticastFilter::zeroed();
    filter.addresses[0] = GROUP;
    host.refuse(&filter, BadParameter)?;
    host.refuse(&SetMulticastFilter { count: 2, ..filter }, BadParameter)?;
    host.refuse(
        &SetMulticastFilter {
            count: 0xffff,
            ..filter
        },
        BadParameter,
    )?;
    host.execute(&SetMulticastFilter { count: 1, ..filter })
}

// Transmit.

fn frames_go_out_in_order(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frames: Vec<Vec<u8>> = (0..40).map(|n| outgoing(host, 14 + 30 * n)).collect();
    for some in frames.chunks(4) {
        for frame in some {
            let pieces: Vec<TransmitPiece> =
                frame.chunks(300).map(|part| piece(host, part)).collect();
            channel.write(host, none(), &pieces);
        }
        channel.ring(host)?;
        channel.is_done(host)?;
        for frame in some {
            ensure_eq!(sent(host)?, *frame, "the frame");
        }
    }
    nothing_sent(host)
}

fn blocks_are_done(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = outgoing(host, 100);
    let pieces: Vec<TransmitPiece> = frame.chunks(10).map(|part| piece(host, part)).collect();
    channel.write(host, none(), &pieces);
    channel.ring(host)?;
    channel.is_done(host)?;
    // What was posted may be written over.
    for piece in &pieces {
        host.memory.fill(piece.address, piece.length.into(), 0);
    }
    host.memory.fill(channel.base, 1024, 0);
    ensure_eq!(sent(host)?, frame, "the frame");
    Ok(())
}

fn descriptors_are_told_of(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = outgoing(host, 100);
    for (arm, told) in [(0, true), (0, false), (3, false), (3, true), (3, false)] {
        set_word(host, &channel, TRANSMIT_ARM, arm);
        channel.send(host, none(), &frame)?;
        channel.is_done(host)?;
        if told {
            let event = host.event(EQ, EventCode::ChannelDescriptors, 0)?;
            ensure_eq!((event.param0, event.param1), (0, 0), "its parameters");
        }
        host.no_event(EQ)?;
    }
    Ok(())
}

fn wake_and_doorbell(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = outgoing(host, 100);
    for _ in 0..20 {
        channel.send(host, none(), &frame)?;
        channel.is_done(host)?;
        wait_for("the wake word", || {
            Ok((word(host, &channel, WAKE) == 1).then_some(()))
        })?;
        ensure_eq!(sent(host)?, frame, "the frame");
    }
    // Not through another page, nor for another channel.
    let pieces = [piece(host, &frame)];
    channel.write(host, none(), &pieces);
    set_word(host, &channel, PRODUCER, channel.producer);
    for (page, number) in [(0, 0), (USER_PAGE, 1), (USER_PAGE, 0xffff)] {
        let word = channel_doorbell(number);
        host.device.doorbell(page, DOORBELL_CHANNEL, word)?;
    }
    nothing_sent(host)?;
    host.device
        .doorbell(USER_PAGE, DOORBELL_CHANNEL, 0xffff_ffff_ffff_0000)?;
    ensure_eq!(sent(host)?, frame, "the frame");
    Ok(())
}

fn checksum(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    for length in [0, 1, 100, 1001] {
        let data = vec![0xa7; length];
        let half = tcp(PEER_MAC, host.mac, &data, false);
        channel.send(host, CHECKSUM, &half)?;
        let whole = tcp(PEER_MAC, host.mac, &data, true);
        ensure_eq!(sent(host)?, whole, "the frame");
    }
    // Of anything, and not zero.
    let mut frame = outgoing(host, 18);
    frame[14..].copy_from_slice(&[0xff, 0xff, 0, 0]);
    let header = TransmitHeader {
        checksum_start: 14,
        checksum_offset: 2,
        ..CHECKSUM
    };
    channel.send(host, header, &frame)?;
    ensure_eq!(sent(host)?[16..], [0xff, 0xff], "a sum of zero");
    Ok(())
}

fn segments(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let data: Vec<u8> = (0..5000u32).map(|n| (n * 3) as u8).collect();
    let header = TransmitHeader {
        flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT,
        segment_size: 1200,
        ..CHECKSUM
    };
    let whole = tcp(PEER_MAC, host.mac, &data, false);
    channel.send(host, header, &whole)?;
    let mut found: Vec<u8> = Vec::new();
    for number in 0..5u16 {
        let frame = sent(host)?;
        let (ip, segment) = (&frame[14..34], &frame[34..]);
        ensure_eq!(sum(&[ip]), 0xffff, "the IP checksum of {number}");
        let pseudo = pseudo(segment.len());
        ensure_eq!(
            sum(&[&pseudo, segment]),
            0xffff,
            "the TCP checksum of {number}"
        );
        let length = (20 + segment.len() as u16).to_be_bytes();
        ensure_eq!(ip[2..4], length, "the length of {number}");
        ensure_eq!(ip[4..6], (7 + number).to_be_bytes(), "the identification");
        let sequence = (0x100 + found.len() as u32).to_be_bytes();
        ensure_eq!(segment[4..8], sequence, "the sequence number of {number}");
        let flags = match number {
            0 => 0x90,
            4 => 0x19,
            _ => 0x10,
        };
        ensure_eq!(segment[13], flags, "the flags of {number}");
        found.extend(&segment[20..]);
    }
    ensure!(found == data, "other data");
    nothing_sent(host)
}

fn tag_is_inserted(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let header = TransmitHeader {
        flags: TRANSMIT_CHECKSUM | TRANSMIT_VLAN,
        vlan: 0x2345,
        ..CHECKSUM
    };
    let half = tcp(PEER_MAC, host.mac, b"hello", false);
    channel.send(host, header, &half)?;
    let mut whole = tcp(PEER_MAC, host.mac, b"hello", true);
    whole.splice(12..12, [0x81, 0, 0x23, 0x45]);
    ensure_eq!(sent(host)?, whole, "the frame");
    Ok(())
}

fn bad_requests(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    set_word(host, &channel, TRANSMIT_ARM, u32::MAX);
    let good = tcp(PEER_MAC, host.mac, &[1; 300], true);
    let segment = TransmitHeader {
        flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT,
        segment_size: 100,
        ..CHECKSUM
    };
    let long = outgoing(host, 14 + usize::from(MTU) + 1);
    for (header, frame) in [
        (
            TransmitHeader {
                flags: 1 << 15,
                ..none()
            },
            &good[..],
        ),
        (
            TransmitHeader {
                reserved1: 1,
                ..none()
            },
            &good,
        ),
        (TransmitHeader { vlan: 1, ..none() }, &good),
        (
            TransmitHeader {
                checksum_start: 400,
                ..CHECKSUM
            },
            &good,
        ),
        (
            TransmitHeader {
                checksum_offset: 0xffff,
                ..CHECKSUM
            },
            &good,
        ),
        (
            TransmitHeader {
                segment_size: TRANSMIT_MIN_SEGMENT - 1,
                ..segment
            },
            &good,
        ),
        (
            TransmitHeader {
                checksum_start: 14,
                ..segment
            },
            &good,
        ),
        (segment, &long),
        (none(), &long),
        (none(), &good[..13]),
    ] {
        let block = channel.producer;
        channel.send(host, header, frame)?;
        let event = host.event(EQ, EventCode::ChannelBadBuffers, 0)?;
        let found = (event.param0, event.param1);
        ensure_eq!(
            found,
            (block.into(), BAD_BUFFERS_TRANSMIT),
            "its parameters"
        );
        channel.send(host, none(), &good)?;
        ensure_eq!(sent(host)?, good, "the next frame");
    }
    for bad in [
        (NOWHERE, 64),
        (u64::MAX - 5, 64),
        (NOWHERE, 0),
        (NOWHERE, u32::MAX),
    ] {
        let piece = TransmitPiece {
            address: bad.0,
            length: bad.1,
            reserved: 0,
        };
        channel.write(host, none(), &[piece]);
        channel.ring(host)?;
        host.event(EQ, EventCode::ChannelBadBuffers, 0)?;
    }
    channel.send(host, none(), &good)?;
    ensure_eq!(sent(host)?, good, "the next frame");
    ensure_eq!(count(host, 0)?("tx_errors"), 14, "tx_errors");
    Ok(())
}

fn transmit_stops(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let breaks: [(u8, u32); 5] = [(0, 1), (19, 16), (4, 1), (1, 17), (1, u32::MAX)];
    for (number, (pieces, producer)) in breaks.into_iter().enumerate() {
        let mut other = Channel::new(host, 1 + number as u16, 0)?;
        let header = TransmitHeader { pieces, ..none() };
        host.memory.put(other.base, &header);
        other.producer = producer;
        other.ring(host)?;
        let event = host.event(EQ, EventCode::ChannelBadBuffers, other.number.into())?;
        let what = BAD_BUFFERS_TRANSMIT | BAD_BUFFERS_STOPPED;
        ensure_eq!(event.param1, what, "what happened");
        other.ring(host)?;
        host.no_event(EQ)?;
    }
    let frame = incoming(host, 60);
    channel.takes(host, &frame)?;
    let frame = outgoing(host, 60);
    channel.send(host, none(), &frame)?;
    ensure_eq!(sent(host)?, frame, "the frame of another channel");
    Ok(())
}

// Receive.

fn filter(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let before = count(host, CHANNEL_NONE)?;
    let stranger = [0x02, 9, 9, 9, 9, 9];
    let all = [host.mac, stranger, [0xff; 6], GROUP];
    let mut lost = 0;
    for (flags, groups, expected) in [
        (0, 0, [true, false, false, false]),
        (INTERFACE_BROADCAST, 0, [true, false, true, false]),
        (0, 1, [true, false, false, true]),
        (INTERFACE_ALL_MULTICAST, 0, [true, false, false, true]),
        (INTERFACE_PROMISCUOUS, 0, [true; 4]),
    ] {
        let command = interface(host, flags);
        host.execute(&command)?;
        let mut filter = SetMulticastFilter::zeroed();
        if groups == 1 {
            (filter.count, filter.addresses[0]) = (1, GROUP);
        }
        host.execute(&filter)?;
        for (to, taken) in all.into_iter().zip(expected) {
            let frame = frame(to, PEER_MAC, 60);
            if taken {
                channel.takes(host, &frame)?;
            } else {
                channel.leaves(host, &frame)?;
                lost += 1;
            }
        }
    }
    let down = SetInterface {
        flags: INTERFACE_PROMISCUOUS,
        ..interface(host, 0)
    };
    host.execute(&down)?;
    let frame = incoming(host, 60);
    channel.leaves(host, &frame)?;
    let counted = count(host, CHANNEL_NONE)?("rx_filtered") - before("rx_filtered");
    ensure_eq!(counted, lost + 1, "rx_filtered");
    Ok(())
}

fn lengths(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let before = count(host, CHANNEL_NONE)?;
    let longest = 14 + usize::from(MTU);
    let frame = incoming(host, longest);
    channel.takes(host, &frame)?;
    let mut tagged = frame.clone();
    tagged.splice(12..12, [0x81, 0, 0, 1]);
    channel.takes(host, &tagged)?;
    let frame = incoming(host, longest + 1);
    channel.leaves(host, &frame)?;
    // No link brings one that is too short.
    let name = "rx_length_errors";
    let counted = count(host, CHANNEL_NONE)?(name) - before(name);
    ensure_eq!(counted, 1, "{name}");
    Ok(())
}

fn several_buffers(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    let mut channel = Channel::new(host, 0, 0)?;
    let command = interface(host, 0);
    host.execute(&command)?;
    let buffers: Vec<u64> = (0..6).map(|_| host.memory.allocate(512)).collect();
    for buffer in &buffers {
        channel.post(host, *buffer, 512);
    }
    let frame = incoming(host, 1300);
    host.wire()?.send(&frame)?;
    let entry = channel.receive(host)?.0;
    ensure_eq!(
        (entry.index, entry.buffers, entry.length),
        (0, 3, 1300),
        "the entry"
    );
    for (buffer, part) in buffers.iter().zip(frame.chunks(512)) {
        let found = host.memory.bytes(*buffer, part.len() as u64);
        ensure!(found == part, "another part: {found:02x?}");
    }
    Ok(())
}

fn entries(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let mut last = 0;
    for number in 0..40u32 {
        let frame = incoming(host, 60 + number as usize);
        let entry = channel.takes(host, &frame)?;
        ensure_eq!((entry.index, entry.buffers), (number, 1), "descriptors");
        let rest = (
            entry.hash,
            entry.hash_type,
            entry.vlan,
            entry.flags,
            entry.status,
        );
        ensure_eq!(
            rest,
            (0, 0, 0, 0, ReceivedStatus::Good.number()),
            "the rest"
        );
        ensure!(entry.reserved_is_zero(), "{entry:?}");
        ensure!(
            host.caps.clock_khz == 0 || entry.timestamp >= last,
            "the time went back"
        );
        last = entry.timestamp;
    }
    Ok(())
}

fn checksums_are_looked_at(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let good = tcp(host.mac, PEER_MAC, b"some data", true);
    let mut bad = good.clone();
    bad[60] ^= 1;
    let mut header = good.clone();
    header[22] ^= 1;
    let other = incoming(host, 60);
    for (frame, right) in [(good, true), (bad, false), (header, false), (other, false)] {
        let entry = channel.takes(host, &frame)?;
        ensure_eq!(entry.flags & RECEIVED_CHECKSUM != 0, right, "the flag");
    }
    Ok(())
}

fn tag_is_taken_out(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let bare = incoming(host, 80);
    let mut tagged = bare.clone();
    tagged.splice(12..12, [0x81, 0, 0x45, 0x67]);
    let entry = channel.takes(host, &tagged)?;
    ensure_eq!(entry.flags & RECEIVED_VLAN, 0, "the flag");
    let command = interface(host, INTERFACE_STRIP_VLAN);
    host.execute(&command)?;
    host.wire()?.send(&tagged)?;
    let (entry, bytes) = channel.receive(host)?;
    ensure_eq!(bytes, bare, "the frame");
    ensure_eq!(
        (entry.flags, entry.vlan),
        (RECEIVED_VLAN, 0x4567),
        "the tag"
    );
    let entry = channel.takes(host, &bare)?;
    ensure_eq!((entry.flags, entry.vlan), (0, 0), "of a frame without tag");
    Ok(())
}

fn packets_are_told_of(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let frame = incoming(host, 60);
    for (arm, told) in [(0, true), (0, false), (3, false), (3, true), (3, false)] {
        set_word(host, &channel, RECEIVE_ARM, arm);
        channel.takes(host, &frame)?;
        if told {
            let event = host.event(EQ, EventCode::ChannelPackets, 0)?;
            ensure_eq!((event.param0, event.param1), (0, 0), "its parameters");
        }
        host.no_event(EQ)?;
    }
    Ok(())
}

fn no_buffer(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    let mut channel = Channel::new(host, 0, 0)?;
    let command = interface(host, 0);
    host.execute(&command)?;
    let frame = incoming(host, 1000);
    channel.leaves(host, &frame)?;
    for _ in 0..2 {
        let buffer = host.memory.allocate(256);
        channel.post(host, buffer, 256);
    }
    channel.leaves(host, &frame)?;
    let short = incoming(host, 100);
    let entry = channel.takes(host, &short)?;
    ensure_eq!(entry.index, 0, "the descriptor");
    ensure_eq!(count(host, 0)?("rx_no_buffer"), 2, "rx_no_buffer");
    Ok(())
}

fn low_pool(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    let mut create = command(host, 0);
    (create.pool_threshold, create.receive_log_entries) = (2, LOG);
    host.execute(&create)?;
    let mut channel = Channel::of(&create);
    let command = interface(host, 0);
    host.execute(&command)?;
    set_word(host, &channel, RECEIVE_ARM, u32::MAX);
    let frame = incoming(host, 60);
    let low = |host: &mut Host, channel: &mut Channel, placed: bool, told: bool| -> Outcome {
        host.wire()?.send(&frame)?;
        if placed {
            channel.receive(host)?;
        }
        if told {
            host.event(EQ, EventCode::ChannelPoolLow, 0)?;
        }
        host.no_event(EQ)
    };
    low(host, &mut channel, false, true)?;
    low(host, &mut channel, false, false)?;
    for _ in 0..8 {
        let buffer = host.memory.allocate(BUFFER.into());
        channel.post(host, buffer, BUFFER);
    }
    low(host, &mut channel, true, false)?;
    let threshold = ModifyChannel {
        eqn: EQ,
        pool_threshold: 9,
        ..ModifyChannel::zeroed()
    };
    host.execute(&threshold)?;
    low(host, &mut channel, true, true)?;
    low(host, &mut channel, true, false)
}

fn bad_buffers(host: &mut Host) -> Outcome {
    start(host, FEATURE_ETHERNET)?;
    let command = SetInterface {
        default_channel: CHANNEL_NONE,
        ..interface(host, 0)
    };
    host.execute(&command)?;
    let good = host.memory.allocate(BUFFER.into());
    for (number, (address, length)) in [
        (NOWHERE, BUFFER),
        (u64::MAX - 5, BUFFER),
        (good, RECEIVE_MIN_BUFFER - 1),
        (good, RECEIVE_MAX_BUFFER + 1),
    ]
    .into_iter()
    .enumerate()
    {
        let mut channel = Channel::new(host, number as u16, 0)?;
        let default_channel = channel.number;
        host.execute(&SetInterface {
            default_channel,
            ..command
        })?;
        channel.post(host, good, 512);
        channel.post(host, address, length);
        let frame = incoming(host, 600);
        host.wire()?.send(&frame)?;
        let entry = channel.receive(host)?.0;
        let found = (entry.status, entry.index, entry.buffers, entry.length);
        let bad = ReceivedStatus::BadBuffer.number();
        ensure_eq!(found, (bad, 0, 2, 0), "the entry");
        let event = host.event(EQ, EventCode::ChannelBadBuffers, number as u32)?;
        ensure_eq!((event.param0, event.param1), (0, 0), "its parameters");
        host.event(EQ, EventCode::ChannelPackets, number as u32)?;
        ensure_eq!(
            count(host, number as u16)?("rx_bad_buffers"),
            1,
            "rx_bad_buffers"
        );
    }
    Ok(())
}

fn receive_stops(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    set_word(host, &channel, POSTED, channel.posted + 1);
    // The buffers that it knows of are used up first.
    let frame = incoming(host, 60);
    for _ in 0..(1 << LOG) + 2 {
        host.wire()?.send(&frame)?;
    }
    let event = wait_for("the event", || {
        let event = host.look_for_event(EQ)?;
        Ok(event.filter(|event| event.code == EventCode::ChannelBadBuffers.number()))
    })?;
    ensure_eq!(event.param1, BAD_BUFFERS_STOPPED, "what happened");
    host.no_event(EQ)?;
    ensure!(count(host, 0)?("rx_no_channel") > 0, "nothing was counted");
    let frame = outgoing(host, 60);
    channel.send(host, none(), &frame)?;
    ensure_eq!(sent(host)?, frame, "the frame");
    Ok(())
}

// Redirection.

fn entry(channel: u16, eqn: u16) -> RedirectionEntry {
    RedirectionEntry {
        channel,
        eqn,
        ..RedirectionEntry::zeroed()
    }
}

fn table(first: u16, to: RedirectionEntry) -> SetRedirectionTable {
    let mut command = SetRedirectionTable::zeroed();
    (command.first, command.count) = (first, 1);
    command.entries[0] = to;
    command
}

fn set_entry(host: &mut Host, first: u16, to: RedirectionEntry) -> Outcome {
    host.execute(&table(first, to))
}

fn redirection(types: u16, mask: u16) -> SetRedirection {
    SetRedirection {
        types,
        mask,
        key: KEY,
        ..SetRedirection::zeroed()
    }
}

/// Channels 0 to 2.
fn redirecting(host: &mut Host) -> Outcome<[Channel; 3]> {
    host.needs(FEATURE_REDIRECTION)?;
    let first = up(host)?;
    let second = Channel::new(host, 1, 1 << LOG)?;
    let third = Channel::new(host, 2, 1 << LOG)?;
    Ok([first, second, third])
}

fn published(host: &Host) -> Vec<u8> {
    tcp(host.mac, PEER_MAC, b"flow", true)
}

fn hash_types(host: &mut Host) -> Outcome {
    let [mut channel, ..] = redirecting(host)?;
    let whole = published(host);
    let mut fragment = whole.clone();
    fragment[20] |= 0x20;
    let other = incoming(host, 60);
    for (frame, types, hash, kind) in [
        (&whole, HASH_TCP_IPV4 | HASH_IPV4, HASHES.1, HASH_TCP_IPV4),
        (&whole, HASH_TCP_IPV4, HASHES.1, HASH_TCP_IPV4),
        (&whole, HASH_IPV4 | HASH_UDP_IPV4, HASHES.0, HASH_IPV4),
        (&whole, HASH_IPV6 | HASH_TCP_IPV6 | HASH_UDP_IPV4, 0, 0),
        (&whole, 0, 0, 0),
        (&fragment, HASH_TCP_IPV4 | HASH_IPV4, HASHES.0, HASH_IPV4),
        (&fragment, HASH_TCP_IPV4, 0, 0),
        (&other, HASH_TCP_IPV4 | HASH_IPV4, 0, 0),
    ] {
        host.execute(&redirection(types, 0))?;
        let entry = channel.takes(host, frame)?;
        let found = (entry.hash, u16::from(entry.hash_type));
        ensure_eq!(found, (hash, kind), "hash and type by {types:#x}");
    }
    Ok(())
}

fn the_entry_of_the_hash(host: &mut Host) -> Outcome {
    let [mut first, mut second, mut third] = redirecting(host)?;
    let frame = published(host);
    let mask = (1u16 << host.caps.redirection_log_entries) - 1;
    set_entry(host, HASHES.1 as u16 & mask, entry(1, EQ_NONE))?;
    set_entry(host, HASHES.1 as u16 & 1, entry(2, EQ_NONE))?;
    host.execute(&redirection(HASH_TCP_IPV4, mask))?;
    second.takes(host, &frame)?;
    host.execute(&redirection(HASH_TCP_IPV4, 1))?;
    third.takes(host, &frame)?;
    set_entry(host, HASHES.1 as u16 & 1, entry(CHANNEL_NONE, EQ_NONE))?;
    let entry = first.takes(host, &frame)?;
    ensure_eq!(entry.hash, HASHES.1, "the hash");
    let other = incoming(host, 60);
    first.takes(host, &other)?;
    Ok(())
}

fn the_event_queue_of_the_entry(host: &mut Host) -> Outcome {
    let [mut channel, ..] = redirecting(host)?;
    let frame = published(host);
    host.execute(&redirection(HASH_TCP_IPV4, 0))?;
    let mut queues = vec![(entry(0, EQ_NONE), EQ), (entry(0, EQ_ASYNC), EQ_ASYNC)];
    if host.features & FEATURE_VECTOR_MAP != 0 {
        let mut map = SetVectorMap::zeroed();
        (map.sub_function, map.first, map.count) = (SubFunction::Receive.number(), 7, 1);
        map.entries[0] = VectorMapEntry {
            eqn: EQ_ASYNC,
            message: MESSAGE_OF_QUEUE,
        };
        host.execute(&map)?;
        let mapped = |processor| RedirectionEntry {
            processor,
            ..entry(0, EQ_MAPPED)
        };
        queues.extend([(mapped(7), EQ_ASYNC), (mapped(8), EQ_CONTROL)]);
    }
    for (number, (entry, eqn)) in queues.into_iter().enumerate() {
        set_entry(host, 0, entry)?;
        set_word(host, &channel, RECEIVE_ARM, number as u32);
        channel.takes(host, &frame)?;
        host.event(eqn, EventCode::ChannelPackets, 0)?;
    }
    // Without one nobody is told.
    set_entry(host, 0, entry(0, EQ_NONE))?;
    let none = ModifyChannel {
        eqn: EQ_NONE,
        ..ModifyChannel::zeroed()
    };
    host.execute(&none)?;
    set_word(host, &channel, RECEIVE_ARM, channel.consumed);
    channel.takes(host, &frame)?;
    host.no_event(EQ)?;
    host.no_event(EQ_ASYNC)
}

fn redirection_is_checked(host: &mut Host) -> Outcome {
    start(host, FEATURE_REDIRECTION)?;
    let beyond = (1u32 << host.caps.redirection_log_entries) * 2 - 1;
    for (types, mask) in [(1 << 15, 0), (HASH_IPV4, 2), (HASH_IPV4, beyond as u16)] {
        host.refuse(&redirection(types, mask), BadParameter)?;
    }
    host.execute(&redirection(HASH_IPV4, (beyond / 2) as u16))
}

fn the_table_is_checked(host: &mut Host) -> Outcome {
    redirecting(host)?;
    let good = entry(0, EQ_NONE);
    let entries = 1u16 << host.caps.redirection_log_entries;
    let mut none = table(0, good);
    none.count = 0;
    let mut many = table(0, good);
    many.count = REDIRECTION_ENTRIES as u16 + 1;
    let mut behind = table(0, good);
    behind.entries[1] = good;
    let processor = RedirectionEntry {
        processor: 1,
        ..good
    };
    let channels = host.caps.max_channels;
    for (command, status) in [
        (none, BadParameter),
        (many, BadParameter),
        (behind, BadParameter),
        (table(entries, good), BadParameter),
        (table(0, entry(CHANNEL_NONE, 0)), BadParameter),
        (table(0, processor), BadParameter),
        (table(0, entry(9, EQ_NONE)), NotFound),
        (table(0, entry(channels, EQ_NONE)), BadNumber),
        (table(0, entry(0, 9)), NotFound),
    ] {
        host.refuse(&command, status)?;
    }
    host.execute(&table(entries - 1, good))
}

fn changes_under_traffic(host: &mut Host) -> Outcome {
    let [_, mut second, mut third] = redirecting(host)?;
    let frame = published(host);
    host.execute(&redirection(HASH_TCP_IPV4, 0))?;
    let mut found = 0;
    for round in 0..40 {
        set_entry(host, 0, entry(1 + round % 2, EQ_NONE))?;
        for _ in 0..3 {
            host.wire()?.send(&frame)?;
        }
        let channel = if round % 2 == 0 {
            &mut second
        } else {
            &mut third
        };
        for _ in 0..3 {
            channel.receive(host)?;
            found += 1;
        }
    }
    second.nothing(host)?;
    third.nothing(host)?;
    ensure_eq!(found, 120, "frames");
    Ok(())
}

// Counters.

/// The counters of a channel or of the interface, by name.
fn count(host: &mut Host, channel: u16) -> Outcome<impl Fn(&str) -> u64> {
    let command = QueryChannelCounters {
        channel,
        ..QueryChannelCounters::zeroed()
    };
    let length = 8 * host.caps.channel_counters;
    let mut entry = host.entry(Op::QueryChannelCounters, &command);
    (entry.reply, entry.reply_length) = (host.reply(), length);
    host.submit_for(&entry, Done)?;
    let counters: Vec<u64> = (0..u64::from(host.caps.channel_counters))
        .map(|number| host.memory.load64(host.reply() + 8 * number))
        .collect();
    Ok(move |name: &str| {
        let at = CHANNEL_COUNTER_NAMES
            .iter()
            .position(|other| *other == name);
        at.and_then(|at| counters.get(at))
            .copied()
            .unwrap_or(u64::MAX)
    })
}

fn counters(host: &mut Host) -> Outcome {
    let mut channel = up(host)?;
    let before = count(host, CHANNEL_NONE)?;
    let own = incoming(host, 100);
    channel.takes(host, &own)?;
    channel.takes(host, &frame([0xff; 6], PEER_MAC, 60))?;
    let header = TransmitHeader {
        flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT,
        segment_size: 100,
        ..CHECKSUM
    };
    let stream = tcp(PEER_MAC, host.mac, &[5; 250], false);
    channel.send(host, header, &stream)?;
    channel.is_done(host)?;
    let expected = [
        ("rx_frames", 2),
        ("rx_bytes", 160),
        ("rx_multicast", 1),
        ("tx_requests", 1),
        ("tx_frames", 3),
        ("tx_bytes", 3 * 54 + 250),
        ("tx_errors", 0),
    ];
    let of_channel = count(host, 0)?;
    let of_interface = count(host, CHANNEL_NONE)?;
    for (name, value) in expected {
        ensure_eq!(of_channel(name), value, "{name} of the channel");
        let more = of_interface(name) - before(name);
        ensure_eq!(more, value, "{name} of the interface");
    }
    // They go on without the channel.
    host.destroy(Op::DestroyChannel, 0)?;
    let after = count(host, CHANNEL_NONE)?;
    ensure_eq!(after("rx_frames"), of_interface("rx_frames"), "rx_frames");
    Ok(())
}
