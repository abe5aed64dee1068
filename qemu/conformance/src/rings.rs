// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a driver remembers of the queues it has made.

use crate::memory::Memory;
use ferrite_abi::{
    phase_of, Buffer, CompletionEntry, CreateCompletionQueue, CreateQueuePair, CreateSrq,
    EventEntry, Plain, ReceiveHeader, Sge, BLOCK_SIZE, COMPLETION_PHASE, COMPLETION_VALID_OFFSET,
};
use std::mem::offset_of;

/// Where a contiguous buffer begins.
fn start(buffer: &Buffer) -> u64 {
    buffer.root + u64::from(buffer.fbo)
}

/// An event queue.
#[derive(Clone, Debug)]
pub struct EventRing {
    /// Its ring.
    pub ring: u64,
    /// Base-2 logarithm of its entries.
    pub log_entries: u8,
    /// Its message number.
    pub message: u16,
    /// Entries consumed.
    pub read: u32,
}

impl EventRing {
    /// Where the entry of an index is.
    pub fn slot(&self, index: u32) -> u64 {
        let slot = index & ((1 << self.log_entries) - 1);
        self.ring + u64::from(slot) * size_of::<EventEntry>() as u64
    }

    /// The next entry, if there is one; it stays.
    pub fn peek(&self, memory: &Memory) -> Option<EventEntry> {
        let at = self.slot(self.read);
        (memory.load32(at) != 0).then(|| memory.get(at))
    }

    /// Takes the next entry; the device is not told.
    pub fn take(&mut self, memory: &Memory) -> Option<EventEntry> {
        let entry = self.peek(memory)?;
        memory.store32(self.slot(self.read), 0);
        self.read = self.read.wrapping_add(1);
        Some(entry)
    }
}

/// A completion queue.
#[derive(Clone, Debug)]
pub struct Cq {
    /// Its number.
    pub cqn: u32,
    /// Its ring.
    pub ring: u64,
    /// Its record.
    pub record: u64,
    /// Base-2 logarithm of its entries.
    pub log_entries: u8,
    /// The page it is armed from.
    pub page: u32,
    /// Entries consumed.
    pub consumer: u32,
}

impl Cq {
    /// What a command makes.
    pub fn new(command: &CreateCompletionQueue) -> Self {
        let buffer = start(&command.buffer);
        Self {
            cqn: command.cqn,
            ring: buffer,
            record: buffer + u64::from(command.record_offset),
            log_entries: command.log_entries,
            page: command.doorbell_page,
            consumer: 0,
        }
    }

    /// Where the entry of an index is.
    pub fn slot(&self, index: u32) -> u64 {
        let slot = index & ((1 << self.log_entries) - 1);
        self.ring + u64::from(slot) * size_of::<CompletionEntry>() as u64
    }

    /// The entry of an index, if it is there.
    pub fn at(&self, memory: &Memory, index: u32) -> Option<CompletionEntry> {
        let slot = self.slot(index);
        // The phase is the last of the eight bytes that make an entry valid.
        let phase = (memory.load64(slot + COMPLETION_VALID_OFFSET as u64) >> 56) as u8;
        (phase & COMPLETION_PHASE == phase_of(index, self.log_entries)).then(|| memory.get(slot))
    }

    /// Takes the next entry, if there is one, and tells of it in the record.
    pub fn take(&mut self, memory: &Memory) -> Option<CompletionEntry> {
        let entry = self.at(memory, self.consumer)?;
        self.consumer = self.consumer.wrapping_add(1);
        memory.store32(self.record, self.consumer);
        Some(entry)
    }
}

/// A queue pair.
#[derive(Clone, Debug)]
pub struct Qp {
    /// Its number.
    pub qpn: u32,
    /// Its send ring.
    pub send_ring: u64,
    /// Its receive ring.
    pub receive_ring: u64,
    /// Its record.
    pub record: u64,
    /// Base-2 logarithm of the blocks of its send queue.
    pub log_blocks: u8,
    /// Base-2 logarithm of the entries of its receive queue.
    pub log_entries: u8,
    /// Base-2 logarithm of the bytes of such an entry.
    pub log_stride: u8,
    /// The page it is posted to from.
    pub page: u32,
    /// Blocks posted.
    pub send_producer: u32,
    /// Entries posted.
    pub receive_producer: u32,
}

impl Qp {
    /// What a command makes.
    pub fn new(command: &CreateQueuePair) -> Self {
        let buffer = start(&command.buffer);
        Self {
            qpn: command.qpn,
            send_ring: buffer + u64::from(command.sq_offset),
            receive_ring: buffer + u64::from(command.rq_offset),
            record: buffer + u64::from(command.record_offset),
            log_blocks: command.sq_log_blocks,
            log_entries: command.rq_log_entries,
            log_stride: command.rq_log_stride,
            page: command.doorbell_page,
            send_producer: 0,
            receive_producer: 0,
        }
    }

    /// Writes the blocks of a work request to the ring; the device is not told. Returns the index of
    /// the first.
    pub fn write_send(&mut self, memory: &Memory, blocks: &[u8]) -> u32 {
        let first = self.send_producer;
        for block in blocks.chunks(BLOCK_SIZE) {
            let slot = self.send_producer & ((1 << self.log_blocks) - 1);
            memory.write(self.send_ring + u64::from(slot) * BLOCK_SIZE as u64, block);
            self.send_producer = self.send_producer.wrapping_add(1);
        }
        first
    }

    /// Writes an entry to the receive ring; the device is not told. Returns its index.
    pub fn write_receive(&mut self, memory: &Memory, entry: &[u8]) -> u32 {
        let first = self.receive_producer;
        let slot = first & ((1 << self.log_entries) - 1);
        memory.write(
            self.receive_ring + (u64::from(slot) << self.log_stride),
            entry,
        );
        self.receive_producer = first.wrapping_add(1);
        first
    }
}

/// A shared receive queue.
#[derive(Clone, Debug)]
pub struct Srq {
    /// Its number.
    pub srqn: u32,
    /// Its ring.
    pub ring: u64,
    /// Its record.
    pub record: u64,
    /// Base-2 logarithm of its entries.
    pub log_entries: u8,
    /// Base-2 logarithm of the bytes of an entry.
    pub log_stride: u8,
    /// Entries posted.
    pub producer: u32,
}

impl Srq {
    /// What a command makes.
    pub fn new(command: &CreateSrq) -> Self {
        let buffer = start(&command.buffer);
        Self {
            srqn: command.srqn,
            ring: buffer + u64::from(command.ring_offset),
            record: buffer + u64::from(command.record_offset),
            log_entries: command.log_entries,
            log_stride: command.log_stride,
            producer: 0,
        }
    }

    /// Posts an entry.
    pub fn post(&mut self, memory: &Memory, id: u32, sges: &[Sge]) {
        let slot = self.producer & ((1 << self.log_entries) - 1);
        let entry = receive_entry(id, sges);
        memory.write(self.ring + (u64::from(slot) << self.log_stride), &entry);
        self.producer = self.producer.wrapping_add(1);
        let producer = offset_of!(ferrite_abi::SrqRecord, producer) as u64;
        memory.store32(self.record + producer, self.producer);
    }
}

/// The bytes of an entry of a receive queue.
pub fn receive_entry(id: u32, sges: &[Sge]) -> Vec<u8> {
    let header = ReceiveHeader {
        sge_count: sges.len() as u32,
        id,
        ..ReceiveHeader::zeroed()
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(sges.iter().flat_map(|sge| sge.as_bytes().to_vec()));
    bytes
}

/// Memory that was registered.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Its tag.
    pub tag: u32,
    /// Its first byte, as work requests and peers say it.
    pub address: u64,
    /// Its first byte in the memory of the host.
    pub dma: u64,
    /// Bytes.
    pub length: u64,
}

impl Region {
    /// A scatter/gather entry for `length` bytes from byte `offset` on.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.address + offset,
            length,
            lkey: self.tag,
        }
    }
}
