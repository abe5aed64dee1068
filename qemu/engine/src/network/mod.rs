// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The Ethernet part of a function (chapter 20): channels, the interface, redirection.
//!
//! Nothing here knows queue pairs or tags, nor event queues: what is to be told is left in a list
//! ([`Network::next_signal`]) for whoever has those. What it shares with them is host memory and
//! the room on the wire.

mod channel;
mod counters;
pub(crate) mod headers;
mod segment;
mod toeplitz;

pub use counters::ChannelCounters;

use crate::att::AttError;
use crate::core::{Core, ANSWER_RESERVE, PORTS};
use crate::eq::event;
use crate::memory::{Host, HostMemory, Room, Way, ENOUGH_ROOM, FRAME_OVERHEAD};
use crate::vectors::Route;
use channel::{Channel, Handler, Request, Stopped};
use ferrite_abi::{
    CommandStatus, CreateChannel, EventCode, ModifyChannel, Plain, QueryChannelCounters,
    ReceivedEntry, ReceivedStatus, RedirectionEntry, SetInterface, SetMulticastFilter,
    SetRedirection, SetRedirectionTable, SubFunction, TransmitHeader, ALL_HASHES,
    BAD_BUFFERS_STOPPED, BAD_BUFFERS_TRANSMIT, CHANNEL_COUNTER_NAMES, CHANNEL_NONE, EQ_CONTROL,
    EQ_MAPPED, EQ_NONE, INTERFACE_ALL_MULTICAST, INTERFACE_BROADCAST, INTERFACE_MIN_MTU,
    INTERFACE_PROMISCUOUS, INTERFACE_STRIP_VLAN, INTERFACE_UP, MULTICAST_ADDRESSES,
    RECEIVED_CHECKSUM, RECEIVED_VLAN, REDIRECTION_ENTRIES, REDIRECTION_KEY_SIZE,
};
use headers::{Headers, ADDRESSES, ETHERNET, TAG};
use std::collections::VecDeque;

/// Channels of a function.
pub const CHANNELS: u16 = 64;
/// Largest MTU.
pub const MAX_MTU: u16 = 9000;
/// Base-2 logarithm of the most blocks of a transmit ring.
pub const MAX_LOG_BLOCKS: u8 = 12;
/// Base-2 logarithm of the most entries of a receive ring.
pub const MAX_LOG_ENTRIES: u8 = 12;
/// Most bytes of a transmit request: a TCP stream's 64 KiB and its headers.
pub const MAX_TRANSMIT_BYTES: usize = (64 << 10) + 256;
/// Base-2 logarithm of the entries of the redirection table.
pub const TABLE_LOG_ENTRIES: u8 = 8;
const TABLE: usize = 1 << TABLE_LOG_ENTRIES;

/// Frames and bytes that all channels send in a turn, before it is the queue pairs'; a request is divided
/// only where there is no room for all of it.
const TURN_FRAMES: u64 = 64;
const TURN_BYTES: u64 = 64 << 10;
/// Requests and bytes of a channel before it is another's turn.
const BURST: usize = 16;
const BURST_BYTES: u64 = 32 << 10;

const ALL_FLAGS: u16 = INTERFACE_UP
    | INTERFACE_PROMISCUOUS
    | INTERFACE_ALL_MULTICAST
    | INTERFACE_BROADCAST
    | INTERFACE_STRIP_VLAN;

/// An entry of the table that is not there.
const ABSENT: RedirectionEntry = RedirectionEntry {
    channel: CHANNEL_NONE,
    eqn: EQ_NONE,
    processor: 0,
    reserved: 0,
};

/// What is to be told by an event.
#[derive(Clone, Copy, Debug)]
struct Signal {
    code: EventCode,
    channel: u16,
    handler: Handler,
    param0: u64,
    param1: u64,
}

/// What the interface receives.
#[derive(Clone, Debug)]
struct Interface {
    flags: u16,
    mtu: usize,
    mac: [u8; 6],
    default_channel: u16,
    groups: Vec<[u8; 6]>,
}

impl Interface {
    fn takes(&self, destination: [u8; 6]) -> bool {
        let has = |flag| self.flags & flag != 0;
        if has(INTERFACE_PROMISCUOUS) || destination == self.mac {
            return true;
        }
        if destination == [0xff; 6] {
            return has(INTERFACE_BROADCAST);
        }
        destination[0] & 1 == 1
            && (has(INTERFACE_ALL_MULTICAST) || self.groups.contains(&destination))
    }
}

/// How received frames are spread.
#[derive(Clone, Debug)]
struct Redirection {
    types: u16,
    mask: u16,
    key: toeplitz::Key,
    table: [RedirectionEntry; TABLE],
}

/// The Ethernet part of a function.
#[derive(Debug)]
pub(crate) struct Network {
    interface: Interface,
    redirection: Redirection,
    channels: Vec<Option<Box<Channel>>>,
    /// Of all channels there ever were, and of what no channel got.
    counters: ChannelCounters,
    /// Channels that may have something to send, each once.
    ready: VecDeque<u16>,
    /// Those that wait for room on the wire.
    waiting: Vec<u16>,
    signals: VecDeque<Signal>,
    went_first: bool,
    /// The request and the frame under work; kept for their memory.
    request: Request,
    frame: Vec<u8>,
    segment: Vec<u8>,
}

impl Network {
    pub(crate) fn new(mac: [u8; 6]) -> Self {
        Self {
            interface: Interface {
                flags: 0,
                mtu: INTERFACE_MIN_MTU.into(),
                mac,
                default_channel: CHANNEL_NONE,
                groups: Vec::new(),
            },
            redirection: Redirection {
                types: 0,
                mask: 0,
                key: [0; REDIRECTION_KEY_SIZE],
                table: [ABSENT; TABLE],
            },
            channels: Vec::new(),
            counters: ChannelCounters::default(),
            ready: VecDeque::new(),
            waiting: Vec::new(),
            signals: VecDeque::new(),
            went_first: false,
            request: Request {
                header: TransmitHeader::zeroed(),
                pieces: Vec::new(),
                blocks: 0,
            },
            frame: Vec::new(),
            segment: Vec::new(),
        }
    }

    /// Back to the state after power-on, but for what was counted.
    pub(crate) fn reset(&mut self, mac: [u8; 6]) {
        let counters = self.counters;
        *self = Self::new(mac);
        self.counters = counters;
    }

    /// Counts from zero.
    pub(crate) fn forget_counters(&mut self) {
        self.counters = ChannelCounters::default();
    }

    /// Bytes that frames of the interface may have behind their headers.
    pub(crate) fn mtu(&self) -> usize {
        self.interface.mtu
    }

    /// What the interface has counted.
    pub(crate) fn counters(&self) -> &ChannelCounters {
        &self.counters
    }

    fn get(&mut self, channel: u16) -> Option<&mut Channel> {
        self.channels.get_mut(usize::from(channel))?.as_deref_mut()
    }

    fn find(&mut self, channel: u16) -> Result<&mut Channel, CommandStatus> {
        if channel >= CHANNELS {
            return Err(CommandStatus::BadNumber);
        }
        self.get(channel).ok_or(CommandStatus::NotFound)
    }

    /// Whether a channel or an entry of the table names an event queue.
    pub(crate) fn names(&self, eqn: u16) -> bool {
        let mut channels = self.channels.iter().flatten();
        channels.any(|channel| channel.handler.eqn == eqn)
            || self.redirection.table.iter().any(|entry| entry.eqn == eqn)
    }

    fn signal(&mut self, code: EventCode, channel: u16, handler: Handler, params: (u64, u64)) {
        self.signals.push_back(Signal {
            code,
            channel,
            handler,
            param0: params.0,
            param1: params.1,
        });
    }

    // Transmit.

    /// A doorbell of a channel; false when it is not one's to ring.
    pub(crate) fn ring(&mut self, channel: u16, page: u32) -> bool {
        match self.get(channel) {
            Some(found) if found.doorbell_page == page => {
                self.schedule(channel);
                true
            }
            _ => false,
        }
    }

    fn schedule(&mut self, number: u16) {
        let Some(channel) = self.get(number) else {
            return;
        };
        // Who waits for room is looked at when there is some.
        if !channel.scheduled && !channel.waits_for_room && !channel.transmit_stopped {
            channel.scheduled = true;
            self.ready.push_back(number);
        }
    }

    /// There may be room on the wire.
    pub(crate) fn room_again(&mut self) {
        for number in std::mem::take(&mut self.waiting) {
            if let Some(channel) = self.get(number) {
                channel.waits_for_room = false;
                self.schedule(number);
            }
        }
    }

    /// Whether a channel may have something to send.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Whether the turn of channels comes before that of queue pairs, which is so every other time that
    /// they have something to send.
    pub(crate) fn goes_first(&mut self) -> bool {
        self.went_first ^= self.is_ready();
        self.went_first
    }

    /// One turn of all channels.
    pub(crate) fn transmit(
        &mut self,
        link_up: bool,
        host: &mut dyn Host,
        say: &mut dyn FnMut(u32) -> u32,
    ) {
        let start = self.counters;
        for _ in 0..self.ready.len() {
            let work = |counters: &ChannelCounters| counters.tx_frames + counters.tx_errors;
            if work(&self.counters) - work(&start) >= TURN_FRAMES
                || self.counters.tx_bytes - start.tx_bytes >= TURN_BYTES
            {
                break;
            }
            let Some(number) = self.ready.pop_front() else {
                break;
            };
            // It may be gone, or be another by now, which was not rung for.
            let slot = self.channels.get_mut(usize::from(number));
            let Some(mut channel) = slot.and_then(Option::take) else {
                continue;
            };
            channel.scheduled = false;
            let result = self.serve(number, &mut channel, link_up, host);
            let told = channel.tell(host, say);
            let (block, handler) = (channel.next_block(), channel.handler);
            let more = matches!(result, Ok(Served::More));
            if let Ok(Served::Full) = result {
                channel.waits_for_room = true;
                self.waiting.push(number);
            }
            if told == Ok(true) {
                self.signal(EventCode::ChannelDescriptors, number, handler, (0, 0));
            }
            if result.is_err() || told.is_err() {
                channel.transmit_stopped = true;
                let what = BAD_BUFFERS_TRANSMIT | BAD_BUFFERS_STOPPED;
                let params = (block.into(), what);
                self.signal(EventCode::ChannelBadBuffers, number, handler, params);
            }
            if let Some(slot) = self.channels.get_mut(usize::from(number)) {
                *slot = Some(channel);
            }
            if more {
                self.schedule(number);
            }
        }
    }

    fn serve(
        &mut self,
        number: u16,
        channel: &mut Channel,
        link_up: bool,
        host: &mut dyn Host,
    ) -> Result<Served, Stopped> {
        let start = channel.counters.tx_bytes;
        for _ in 0..BURST {
            if channel.counters.tx_bytes - start >= BURST_BYTES {
                break;
            }
            if !channel.has_request(host)? && !channel.sleep(host)? {
                return Ok(Served::All);
            }
            channel.read_request(host, &mut self.request)?;
            let request = &self.request;
            let needed = segment::room(&request.header, request.length() as usize, channel.sent);
            let room = if link_up {
                room_for(needed, host)
            } else {
                Some(usize::MAX)
            };
            let Some(room) = room else {
                return Ok(Served::Full);
            };
            let sent = self.send(channel, room, host);
            if let Ok(Some(next)) = sent {
                // The host has to be asked again, or would not tell of more.
                channel.sent = next;
                continue;
            }
            let block = channel.next_block();
            channel.took(self.request.blocks);
            channel.counters.tx_requests += 1;
            self.counters.tx_requests += 1;
            if sent.is_err() {
                channel.counters.tx_errors += 1;
                self.counters.tx_errors += 1;
                let params = (block.into(), BAD_BUFFERS_TRANSMIT);
                self.signal(
                    EventCode::ChannelBadBuffers,
                    number,
                    channel.handler,
                    params,
                );
            }
        }
        Ok(Served::More)
    }

    /// Sends the frames of the request that was read which are left, as many as there is room for; with
    /// `Some` it is to be gone on with at this one.
    fn send(
        &mut self,
        channel: &mut Channel,
        mut room: usize,
        host: &mut dyn Host,
    ) -> Result<Option<usize>, segment::BadRequest> {
        let request = &self.request;
        if !request.is_well_made() || request.length() > MAX_TRANSMIT_BYTES as u64 {
            return Err(segment::BadRequest);
        }
        self.frame.clear();
        for piece in &request.pieces {
            let start = self.frame.len();
            self.frame.resize(start + piece.length as usize, 0);
            host.read(piece.address, &mut self.frame[start..])
                .map_err(|_| segment::BadRequest)?;
        }
        let (mut frames, mut bytes) = (0, 0);
        let made = segment::make(
            &request.header,
            &mut self.frame,
            self.interface.mtu,
            channel.sent,
            &mut self.segment,
            &mut |frame| {
                let Some(left) = room.checked_sub(frame.len() + FRAME_OVERHEAD) else {
                    return false;
                };
                room = left;
                frames += 1;
                bytes += frame.len() as u64;
                host.transmit_ordinary(frame);
                true
            },
        );
        for counters in [&mut channel.counters, &mut self.counters] {
            counters.tx_frames += frames;
            counters.tx_bytes += bytes;
        }
        made
    }

    // Receive.

    /// Where a frame goes: the channel, who is told, hash and its type.
    fn choose(&self, headers: &Headers, frame: &[u8]) -> (u16, Option<Handler>, u32, u16) {
        let Redirection {
            types,
            mask,
            key,
            table,
        } = &self.redirection;
        let default = self.interface.default_channel;
        let Some((hash, kind)) = headers.hash(frame, key, *types) else {
            return (default, None, 0, 0);
        };
        let index = hash as usize & usize::from(*mask);
        match table.get(index) {
            Some(entry) if entry.channel != CHANNEL_NONE => {
                let handler = Handler {
                    eqn: entry.eqn,
                    processor: entry.processor,
                };
                let handler = Some(handler).filter(|handler| handler.eqn != EQ_NONE);
                (entry.channel, handler, hash, kind)
            }
            _ => (default, None, hash, kind),
        }
    }

    /// A frame for the interface came.
    pub(crate) fn receive<M: HostMemory + ?Sized>(
        &mut self,
        frame: &[u8],
        now: u64,
        memory: &M,
        spoil: &mut dyn FnMut(&mut ReceivedEntry),
    ) {
        let Some(&destination) = frame.first_chunk::<6>() else {
            self.counters.rx_length_errors += 1;
            return;
        };
        if self.interface.flags & INTERFACE_UP == 0 || !self.interface.takes(destination) {
            self.counters.rx_filtered += 1;
            return;
        }
        let headers = Headers::parse(frame);
        let tag = if headers.vlan.is_some() { TAG } else { 0 };
        let least = ETHERNET + tag;
        if !(least..=least + self.interface.mtu).contains(&frame.len()) {
            self.counters.rx_length_errors += 1;
            return;
        }
        let (number, handler, hash, hash_type) = self.choose(&headers, frame);
        let slot = self.channels.get_mut(usize::from(number));
        let Some(channel) = slot.and_then(Option::as_deref_mut) else {
            self.counters.rx_no_channel += 1;
            return;
        };
        if channel.receive_stopped {
            channel.counters.rx_no_channel += 1;
            self.counters.rx_no_channel += 1;
            return;
        }
        let mut entry = ReceivedEntry {
            hash,
            // There are six types.
            hash_type: hash_type as u8,
            timestamp: now,
            ..ReceivedEntry::zeroed()
        };
        if headers.checksums_good(frame) {
            entry.flags |= RECEIVED_CHECKSUM;
        }
        let strip = self.interface.flags & INTERFACE_STRIP_VLAN != 0;
        // What is left of the frame is in front of this and behind it.
        let mut gap = ADDRESSES..ADDRESSES;
        if let Some(vlan) = headers.vlan.filter(|_| strip) {
            entry.flags |= RECEIVED_VLAN;
            entry.vlan = vlan;
            gap.end += TAG;
        }
        let (first, rest) = (&frame[..gap.start], &frame[gap.end..]);
        let is_group = destination[0] & 1 == 1;
        let placed = place(channel, [first, rest], entry, memory, spoil);
        let handler = handler.unwrap_or(channel.handler);
        let own = channel.handler;
        let index = channel.next_descriptor();
        for counters in [&mut channel.counters, &mut self.counters] {
            match placed {
                Ok(Placed::Good { .. }) => {
                    counters.rx_frames += 1;
                    counters.rx_bytes += (first.len() + rest.len()) as u64;
                    counters.rx_multicast += u64::from(is_group);
                }
                Ok(Placed::NoBuffer) => counters.rx_no_buffer += 1,
                Ok(Placed::Bad { .. }) => counters.rx_bad_buffers += 1,
                Err(Stopped) => counters.rx_no_channel += 1,
            }
        }
        let low = placed.and_then(|_| channel.is_low(memory));
        channel.receive_stopped = low.is_err();
        if let Ok(Placed::Bad { first, .. }) = placed {
            let params = (first.into(), 0);
            self.signal(EventCode::ChannelBadBuffers, number, own, params);
        }
        if let Ok(Placed::Good { due: true } | Placed::Bad { due: true, .. }) = placed {
            self.signal(EventCode::ChannelPackets, number, handler, (0, 0));
        }
        match low {
            Ok(true) => self.signal(EventCode::ChannelPoolLow, number, own, (0, 0)),
            Ok(false) => {}
            Err(Stopped) => {
                let params = (index.into(), BAD_BUFFERS_STOPPED);
                self.signal(EventCode::ChannelBadBuffers, number, own, params);
            }
        }
    }

    // Commands.

    fn set_multicast_filter(&mut self, command: &SetMulticastFilter) -> Result<(), CommandStatus> {
        let count = usize::from(command.count);
        let (groups, rest) = command
            .addresses
            .split_at_checked(count)
            .ok_or(CommandStatus::BadParameter)?;
        if groups.iter().any(|group| group[0] & 1 == 0) || rest.iter().any(|rest| *rest != [0; 6]) {
            return Err(CommandStatus::BadParameter);
        }
        self.interface.groups = groups.to_vec();
        Ok(())
    }

    fn set_redirection(&mut self, command: &SetRedirection) -> Result<(), CommandStatus> {
        let entries = usize::from(command.mask) + 1;
        if command.types & !ALL_HASHES != 0 || !entries.is_power_of_two() || entries > TABLE {
            return Err(CommandStatus::BadParameter);
        }
        self.redirection.types = command.types;
        self.redirection.mask = command.mask;
        self.redirection.key = command.key;
        Ok(())
    }

    fn query_counters(
        &mut self,
        channel: u16,
    ) -> Result<[u64; CHANNEL_COUNTER_NAMES.len()], CommandStatus> {
        Ok(match channel {
            CHANNEL_NONE => self.counters.named(),
            channel => self.find(channel)?.counters.named(),
        })
    }
}

/// Where the turn of a channel has left off.
enum Served {
    /// Everything was sent.
    All,
    /// Its burst is used up.
    More,
    /// There is no room on the wire.
    Full,
}

/// What became of a frame in a channel.
#[derive(Clone, Copy, Debug)]
enum Placed {
    /// It is there; whether that is to be told.
    Good { due: bool },
    /// There are too few buffers for it.
    NoBuffer,
    /// Buffers could not be used, from this descriptor on.
    Bad { first: u32, due: bool },
}

/// What the wire takes of a request that needs so much, if that is all of it, or as much as is ever waited
/// for: the host tells of room only where there was less than enough. As queue pairs do it leaves room for
/// answers, or those would never have any for data. A wire that is stuck takes and loses everything.
fn room_for(needed: usize, host: &mut dyn Host) -> Option<usize> {
    const MOST: usize = ENOUGH_ROOM - ANSWER_RESERVE;
    match host.room(Way::Wire) {
        Room::Bytes(room) => {
            let room = room.saturating_sub(ANSWER_RESERVE);
            (room >= needed.min(MOST)).then_some(room)
        }
        Room::Stuck => Some(usize::MAX),
    }
}

/// Puts a frame, in two parts, into the buffers of a channel.
fn place<M: HostMemory + ?Sized>(
    channel: &mut Channel,
    parts: [&[u8]; 2],
    mut entry: ReceivedEntry,
    memory: &M,
    spoil: &mut dyn FnMut(&mut ReceivedEntry),
) -> Result<Placed, Stopped> {
    let length = parts[0].len() + parts[1].len();
    let first = channel.next_descriptor();
    let Some(place) = channel.find_place(memory, length)? else {
        return Ok(Placed::NoBuffer);
    };
    // No frame is longer than the largest MTU, and no buffer shorter than the least length.
    entry.buffers = place.buffers.len() as u8;
    let filled = !place.bad && fill(&place.buffers, parts, memory).is_ok();
    if filled {
        entry.length = length as u32;
        let due = channel.deliver(memory, entry, spoil)?;
        return Ok(Placed::Good { due });
    }
    let failed = ReceivedEntry {
        buffers: entry.buffers,
        timestamp: entry.timestamp,
        status: ReceivedStatus::BadBuffer.number(),
        ..ReceivedEntry::zeroed()
    };
    let due = channel.deliver(memory, failed, spoil)?;
    Ok(Placed::Bad { first, due })
}

fn fill<M: HostMemory + ?Sized>(
    buffers: &[ferrite_abi::ReceiveDescriptor],
    parts: [&[u8]; 2],
    memory: &M,
) -> Result<(), AttError> {
    let mut buffers = buffers.iter();
    let (mut address, mut room) = (0u64, 0usize);
    for mut part in parts {
        while !part.is_empty() {
            if room == 0 {
                let buffer = buffers.next().ok_or(AttError::OutOfRange)?;
                (address, room) = (buffer.address, buffer.length as usize);
            }
            let (now, later) = part.split_at(part.len().min(room));
            memory.write(address, now)?;
            address = address
                .checked_add(now.len() as u64)
                .ok_or(AttError::OutOfRange)?;
            room -= now.len();
            part = later;
        }
    }
    Ok(())
}

fn check_port(port: u8) -> Result<(), CommandStatus> {
    if port >= PORTS {
        return Err(CommandStatus::BadNumber);
    }
    Ok(())
}

impl Core {
    /// Carries out `CreateChannel`.
    pub(crate) fn create_channel(
        &mut self,
        command: &CreateChannel,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        check_port(command.port)?;
        if command.channel >= CHANNELS {
            return Err(CommandStatus::BadNumber);
        }
        if command.doorbell_page >= self.config.doorbell_pages
            || command.transmit_log_blocks > MAX_LOG_BLOCKS
            || command.receive_log_entries > MAX_LOG_ENTRIES
        {
            return Err(CommandStatus::BadParameter);
        }
        self.check_handler(command.eqn, command.processor)?;
        if self.network.get(command.channel).is_some() {
            return Err(CommandStatus::Exists);
        }
        let channel = Channel::new(host, command).map_err(|error| match error {
            AttError::Memory(_) => CommandStatus::HostMemory,
            _ => CommandStatus::BadParameter,
        })?;
        let index = usize::from(command.channel);
        let channels = &mut self.network.channels;
        if channels.len() <= index {
            channels.resize_with(index + 1, || None);
        }
        channels[index] = Some(Box::new(channel));
        Ok(())
    }

    /// Carries out `ModifyChannel`.
    pub(crate) fn modify_channel(&mut self, command: &ModifyChannel) -> Result<(), CommandStatus> {
        self.network.find(command.channel)?;
        self.check_handler(command.eqn, command.processor)?;
        let channel = self.network.find(command.channel)?;
        channel.handler = Handler {
            eqn: command.eqn,
            processor: command.processor,
        };
        channel.pool_threshold = command.pool_threshold;
        channel.low_told = false;
        Ok(())
    }

    /// Carries out `DestroyChannel`.
    pub(crate) fn destroy_channel(&mut self, number: u32) -> Result<(), CommandStatus> {
        let channel = u16::try_from(number).map_err(|_| CommandStatus::BadNumber)?;
        self.network.find(channel)?;
        let network = &mut self.network;
        if let Some(slot) = network.channels.get_mut(usize::from(channel)) {
            *slot = None;
        }
        network.ready.retain(|other| *other != channel);
        network.waiting.retain(|other| *other != channel);
        self.forget_channel_events(number);
        Ok(())
    }

    /// Carries out `SetInterface`.
    pub(crate) fn set_interface(&mut self, command: &SetInterface) -> Result<(), CommandStatus> {
        check_port(command.port)?;
        let is_unicast = command.mac[0] & 1 == 0 && command.mac != [0; 6];
        if command.flags & !ALL_FLAGS != 0
            || !(INTERFACE_MIN_MTU..=MAX_MTU).contains(&command.mtu)
            || !is_unicast
        {
            return Err(CommandStatus::BadParameter);
        }
        if command.default_channel != CHANNEL_NONE {
            self.network.find(command.default_channel)?;
        }
        if command.mac != self.config.mac && !self.config.any_source {
            return Err(CommandStatus::Unsupported);
        }
        let interface = &mut self.network.interface;
        interface.flags = command.flags;
        interface.mtu = command.mtu.into();
        interface.mac = command.mac;
        interface.default_channel = command.default_channel;
        Ok(())
    }

    /// Carries out `SetMulticastFilter`.
    pub(crate) fn set_multicast_filter(
        &mut self,
        command: &SetMulticastFilter,
    ) -> Result<(), CommandStatus> {
        const _: () = assert!(MULTICAST_ADDRESSES * 6 == 192);
        check_port(command.port)?;
        self.network.set_multicast_filter(command)
    }

    /// Carries out `QueryChannelCounters`.
    pub(crate) fn query_channel_counters(
        &mut self,
        command: &QueryChannelCounters,
    ) -> Result<[u64; CHANNEL_COUNTER_NAMES.len()], CommandStatus> {
        check_port(command.port)?;
        self.network.query_counters(command.channel)
    }

    /// Carries out `SetRedirection`.
    pub(crate) fn set_redirection(
        &mut self,
        command: &SetRedirection,
    ) -> Result<(), CommandStatus> {
        check_port(command.port)?;
        self.network.set_redirection(command)
    }

    /// Carries out `SetRedirectionTable`.
    pub(crate) fn set_redirection_table(
        &mut self,
        command: &SetRedirectionTable,
    ) -> Result<(), CommandStatus> {
        check_port(command.port)?;
        let (first, count) = (usize::from(command.first), usize::from(command.count));
        if !(1..=REDIRECTION_ENTRIES).contains(&count) || first + count > TABLE {
            return Err(CommandStatus::BadParameter);
        }
        let (entries, rest) = command.entries.split_at(count);
        if rest
            .iter()
            .any(|entry| *entry != RedirectionEntry::zeroed())
        {
            return Err(CommandStatus::BadParameter);
        }
        for entry in entries {
            if entry.channel == CHANNEL_NONE {
                if *entry != ABSENT {
                    return Err(CommandStatus::BadParameter);
                }
                continue;
            }
            self.network.find(entry.channel)?;
            self.check_handler(entry.eqn, entry.processor)?;
        }
        self.network.redirection.table[first..first + count].copy_from_slice(entries);
        Ok(())
    }

    /// Whether frames that are not for queue pairs are for channels.
    pub(crate) fn has_interface(&self) -> bool {
        self.is_running() && self.features & ferrite_abi::FEATURE_ETHERNET != 0
    }

    /// A frame came that is not for queue pairs.
    pub(crate) fn receive_ordinary(&mut self, frame: &[u8], host: &mut dyn Host) {
        let misbehaviour = &mut self.misbehaviour;
        self.network.receive(frame, self.now, host, &mut |entry| {
            if let Some(misbehaving) = misbehaviour {
                misbehaving.spoil_received(entry);
            }
        });
        self.tell_of_channels(host);
    }

    /// Gives channels their turn to send.
    pub(crate) fn transmit_ordinary(&mut self, host: &mut dyn Host) {
        if self.network.is_ready() {
            let misbehaviour = &mut self.misbehaviour;
            self.network
                .transmit(self.link_up, host, &mut |word| match misbehaviour {
                    Some(misbehaving) => misbehaving.record_word(word),
                    None => word,
                });
            self.tell_of_channels(host);
        }
    }

    /// Writes the events that channels have asked for.
    fn tell_of_channels(&mut self, host: &mut dyn Host) {
        while let Some(signal) = self.network.signals.pop_front() {
            let Handler { eqn, processor } = signal.handler;
            let route = match eqn {
                EQ_NONE => continue,
                EQ_MAPPED => {
                    let row = match signal.code {
                        EventCode::ChannelDescriptors => SubFunction::Transmit,
                        _ => SubFunction::Receive,
                    };
                    self.route_channel(row, processor)
                        .unwrap_or(Route::to(EQ_CONTROL))
                }
                eqn => Route::to(eqn),
            };
            let entry = event(
                signal.code,
                signal.channel.into(),
                signal.param0,
                signal.param1,
            );
            self.post_event(route, entry, host);
        }
    }
}
