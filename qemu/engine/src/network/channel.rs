// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A channel: its rings and its record.
//!
//! Indices of the host are believed only within the size of their ring, and every block,
//! descriptor and word is read once.

use super::counters::ChannelCounters;
use crate::att::{Att, AttError};
use crate::memory::HostMemory;
use ferrite_abi::{
    is_due, phase_of, transmit_blocks, ChannelRecord, CreateChannel, Plain, ReceiveDescriptor,
    ReceivedEntry, Reserved, TransmitHeader, TransmitPiece, RECEIVED_VALID_OFFSET,
    RECEIVE_MAX_BUFFER, RECEIVE_MIN_BUFFER, TRANSMIT_BLOCK_SIZE, TRANSMIT_MAX_PIECES,
};
use std::mem::{offset_of, size_of};

/// Something of the host's that the device cannot go on with: nothing more is taken from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

impl From<AttError> for Stopped {
    fn from(_: AttError) -> Self {
        Self
    }
}

impl From<crate::memory::DmaError> for Stopped {
    fn from(_: crate::memory::DmaError) -> Self {
        Self
    }
}

/// Where a channel's events go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handler {
    /// A number, `EQ_NONE` or `EQ_MAPPED`.
    pub(super) eqn: u16,
    pub(super) processor: u16,
}

#[derive(Debug)]
struct Ring {
    att: Att,
    offset: u64,
    log_entries: u8,
    stride: usize,
}

impl Ring {
    fn new(att: &Att, offset: u32, log_entries: u8, stride: usize) -> Result<Self, AttError> {
        let offset = u64::from(offset);
        let end = offset + ((stride as u64) << log_entries);
        if end > att.length() {
            return Err(AttError::OutOfRange);
        }
        check_alignment(att, offset)?;
        Ok(Self {
            att: att.clone(),
            offset,
            log_entries,
            stride,
        })
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn slot(&self, index: u32) -> u64 {
        let slot = index & (self.entries() - 1);
        self.offset + u64::from(slot) * self.stride as u64
    }

    fn read<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        index: u32,
        bytes: &mut [u8],
    ) -> Result<(), AttError> {
        self.att.read(memory, self.slot(index), bytes)
    }
}

/// The offset itself, and what it comes to in the pages.
fn check_alignment(att: &Att, offset: u64) -> Result<(), AttError> {
    if offset % 64 != 0 || att.offset_in_page(offset) % 64 != 0 {
        return Err(AttError::Fbo);
    }
    Ok(())
}

/// The words of the record.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// Addresses of both halves.
    hosts: u64,
    devices: u64,
}

impl Record {
    fn new<M: HostMemory + ?Sized>(memory: &M, att: &Att, offset: u32) -> Result<Self, AttError> {
        const HALF: u64 = offset_of!(ChannelRecord, transmit_wake) as u64;
        let offset = u64::from(offset);
        if offset + size_of::<ChannelRecord>() as u64 > att.length() {
            return Err(AttError::OutOfRange);
        }
        check_alignment(att, offset)?;
        Ok(Self {
            hosts: att.address_of(memory, offset, HALF)?,
            devices: att.address_of(memory, offset + HALF, HALF)?,
        })
    }

    fn load<M: HostMemory + ?Sized>(&self, memory: &M, word: usize) -> Result<u32, Stopped> {
        Ok(memory.load_u32(self.hosts + word as u64)?)
    }

    fn store<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        word: usize,
        value: u32,
    ) -> Result<(), Stopped> {
        let word = word - offset_of!(ChannelRecord, transmit_wake);
        Ok(memory.store_u32(self.devices + word as u64, value)?)
    }
}

/// Where the host has come to with a ring of so many entries of which `next` is not taken yet.
fn posted(ring: &Ring, producer: u32, next: u32) -> Result<u32, Stopped> {
    if producer.wrapping_sub(next) > ring.entries() {
        return Err(Stopped);
    }
    Ok(producer)
}

/// A transmit request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) header: TransmitHeader,
    pub(super) pieces: Vec<TransmitPiece>,
    /// Its blocks.
    pub(super) blocks: u32,
}

impl Request {
    /// Bytes of all pieces.
    pub(super) fn length(&self) -> u64 {
        self.pieces
            .iter()
            .map(|piece| u64::from(piece.length))
            .sum()
    }

    /// Whether nothing is wrong with it as far as it goes.
    pub(super) fn is_well_made(&self) -> bool {
        self.header.reserved_is_zero()
            && self
                .pieces
                .iter()
                .all(|piece| piece.reserved_is_zero() && piece.length != 0)
    }
}

/// What a channel has for a frame.
#[derive(Debug)]
pub(super) struct Place {
    /// Buffers, in order, all of them usable unless `bad`.
    pub(super) buffers: Vec<ReceiveDescriptor>,
    pub(super) bad: bool,
}

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) handler: Handler,
    pub(super) doorbell_page: u32,
    pub(super) pool_threshold: u16,
    pub(super) counters: ChannelCounters,
    /// It is in the list of those that may have something to send.
    pub(super) scheduled: bool,
    /// It waits for room on the wire.
    pub(super) waits_for_room: bool,
    /// That the pool is low was told.
    pub(super) low_told: bool,
    pub(super) transmit_stopped: bool,
    pub(super) receive_stopped: bool,
    record: Record,
    transmit: Ring,
    transmit_producer: u32,
    /// The next block to be taken up, and what the host was told of.
    transmit_next: u32,
    transmit_told: u32,
    /// Frames of the request there that were sent already.
    pub(super) sent: usize,
    asleep: bool,
    receive: Ring,
    receive_producer: u32,
    receive_next: u32,
    received: Ring,
    /// The next entry to be written.
    written: u32,
}

impl Channel {
    pub(super) fn new<M: HostMemory + ?Sized>(
        memory: &M,
        command: &CreateChannel,
    ) -> Result<Self, AttError> {
        let att = Att::new(&command.buffer)?;
        let ring = |offset, log, stride| Ring::new(&att, offset, log, stride);
        let (transmit_log, receive_log) =
            (command.transmit_log_blocks, command.receive_log_entries);
        let descriptor = size_of::<ReceiveDescriptor>();
        let entry = size_of::<ReceivedEntry>();
        let channel = Self {
            handler: Handler {
                eqn: command.eqn,
                processor: command.processor,
            },
            doorbell_page: command.doorbell_page,
            pool_threshold: command.pool_threshold,
            counters: ChannelCounters::default(),
            scheduled: false,
            waits_for_room: false,
            low_told: false,
            transmit_stopped: false,
            receive_stopped: false,
            record: Record::new(memory, &att, command.record_offset)?,
            transmit: ring(command.transmit_offset, transmit_log, TRANSMIT_BLOCK_SIZE)?,
            transmit_producer: 0,
            transmit_next: 0,
            transmit_told: 0,
            sent: 0,
            asleep: true,
            receive: ring(command.receive_offset, receive_log, descriptor)?,
            receive_producer: 0,
            receive_next: 0,
            received: ring(command.received_offset, receive_log, entry)?,
            written: 0,
        };
        // Its first word.
        memory.store_u32(channel.record.devices, 1)?;
        Ok(channel)
    }

    // Transmit.

    /// The index of the next block.
    pub(super) fn next_block(&self) -> u32 {
        self.transmit_next
    }

    fn set_wake<M: HostMemory + ?Sized>(&mut self, memory: &M, wake: bool) -> Result<(), Stopped> {
        let word = offset_of!(ChannelRecord, transmit_wake);
        self.record.store(memory, word, u32::from(wake))?;
        self.asleep = wake;
        Ok(())
    }

    fn look_at_producer<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), Stopped> {
        let word = offset_of!(ChannelRecord, transmit_producer);
        let producer = self.record.load(memory, word)?;
        self.transmit_producer = posted(&self.transmit, producer, self.transmit_next)?;
        Ok(())
    }

    /// Whether a request is there; when it is, the host need not ring for those behind it.
    pub(super) fn has_request<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
    ) -> Result<bool, Stopped> {
        if self.transmit_producer == self.transmit_next {
            self.look_at_producer(memory)?;
        }
        let has = self.transmit_producer != self.transmit_next;
        if has && self.asleep {
            self.set_wake(memory, false)?;
        }
        Ok(has)
    }

    /// Asks to be woken by a doorbell; true when something was posted meanwhile after all.
    pub(super) fn sleep<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<bool, Stopped> {
        if !self.asleep {
            self.set_wake(memory, true)?;
            memory.fence();
        }
        self.look_at_producer(memory)?;
        Ok(self.transmit_producer != self.transmit_next)
    }

    /// Reads the request that [`Self::has_request`] has found, into `request`.
    pub(super) fn read_request<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        request: &mut Request,
    ) -> Result<(), Stopped> {
        let mut block = [0; TRANSMIT_BLOCK_SIZE];
        self.transmit.read(memory, self.transmit_next, &mut block)?;
        let header = TransmitHeader::from_prefix(&block).ok_or(Stopped)?;
        let pieces = usize::from(header.pieces);
        let blocks = transmit_blocks(header.pieces);
        let ahead = self.transmit_producer.wrapping_sub(self.transmit_next);
        if pieces == 0 || pieces > TRANSMIT_MAX_PIECES || blocks > ahead {
            return Err(Stopped);
        }
        request.header = header;
        request.blocks = blocks;
        request.pieces.clear();
        let size = size_of::<TransmitPiece>();
        let mut from = size_of::<TransmitHeader>();
        for number in 0..blocks {
            if number != 0 {
                let index = self.transmit_next.wrapping_add(number);
                self.transmit.read(memory, index, &mut block)?;
                from = 0;
            }
            let left = pieces - request.pieces.len();
            let held = block[from..].chunks_exact(size).take(left);
            request
                .pieces
                .extend(held.filter_map(TransmitPiece::from_prefix));
        }
        Ok(())
    }

    /// A request is done.
    pub(super) fn took(&mut self, blocks: u32) {
        self.transmit_next = self.transmit_next.wrapping_add(blocks);
        self.sent = 0;
    }

    /// Tells the host which blocks are done, in the word that `say` makes of that; true when it wants an event for it.
    pub(super) fn tell<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        say: &mut dyn FnMut(u32) -> u32,
    ) -> Result<bool, Stopped> {
        let (old, new) = (self.transmit_told, self.transmit_next);
        if old == new {
            return Ok(false);
        }
        let consumer = offset_of!(ChannelRecord, transmit_consumer);
        self.record.store(memory, consumer, say(new))?;
        self.transmit_told = new;
        memory.fence();
        let arm = offset_of!(ChannelRecord, transmit_arm);
        let arm = self.record.load(memory, arm)?;
        Ok(is_due(arm, old, new))
    }

    // Receive.

    /// The index of the next descriptor.
    pub(super) fn next_descriptor(&self) -> u32 {
        self.receive_next
    }

    fn pool(&self) -> u32 {
        self.receive_producer.wrapping_sub(self.receive_next)
    }

    fn look_at_pool<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), Stopped> {
        let word = offset_of!(ChannelRecord, receive_producer);
        let producer = self.record.load(memory, word)?;
        self.receive_producer = posted(&self.receive, producer, self.receive_next)?;
        Ok(())
    }

    /// Buffers for so many bytes; none when there are too few. They are not taken yet.
    pub(super) fn find_place<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        length: usize,
    ) -> Result<Option<Place>, Stopped> {
        let mut place = Place {
            buffers: Vec::new(),
            bad: false,
        };
        let mut room = 0;
        while room < length {
            let number = place.buffers.len() as u32;
            if number == self.pool() {
                self.look_at_pool(memory)?;
                if number == self.pool() {
                    return Ok(None);
                }
            }
            let mut descriptor = ReceiveDescriptor::zeroed();
            let index = self.receive_next.wrapping_add(number);
            self.receive
                .read(memory, index, descriptor.as_bytes_mut())?;
            place.buffers.push(descriptor);
            let lengths = RECEIVE_MIN_BUFFER..=RECEIVE_MAX_BUFFER;
            if !lengths.contains(&descriptor.length) || !descriptor.reserved_is_zero() {
                place.bad = true;
                return Ok(Some(place));
            }
            room += descriptor.length as usize;
        }
        Ok(Some(place))
    }

    /// Takes descriptors and tells of them by an entry, of which the index is filled in here, and which `spoil` may change;
    /// true when the host wants an event for that.
    pub(super) fn deliver<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        mut entry: ReceivedEntry,
        spoil: &mut dyn FnMut(&mut ReceivedEntry),
    ) -> Result<bool, Stopped> {
        let buffers = entry.buffers;
        entry.index = self.receive_next;
        spoil(&mut entry);
        entry.phase = phase_of(self.written, self.received.log_entries);
        let at = self.received.slot(self.written);
        let bytes = entry.as_bytes();
        let (first, last) = bytes.split_at(RECEIVED_VALID_OFFSET);
        self.received.att.write(memory, at, first)?;
        let last = u64::from_prefix(last).ok_or(Stopped)?;
        let valid = at + RECEIVED_VALID_OFFSET as u64;
        let address = self.received.att.address_of(memory, valid, 8)?;
        memory.store_u64(address, last)?;
        let old = self.written;
        self.written = old.wrapping_add(1);
        self.receive_next = self.receive_next.wrapping_add(buffers.into());
        memory.fence();
        let arm = offset_of!(ChannelRecord, receive_arm);
        let arm = self.record.load(memory, arm)?;
        Ok(is_due(arm, old, self.written))
    }

    /// Whether it is news that the pool is low.
    pub(super) fn is_low<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<bool, Stopped> {
        let threshold = u32::from(self.pool_threshold);
        if self.pool() < threshold {
            self.look_at_pool(memory)?;
        }
        let low = self.pool() < threshold;
        let news = low && !self.low_told;
        self.low_told = low;
        Ok(news)
    }
}
