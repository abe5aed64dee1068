// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The work queues of a queue pair: rings of work requests in host memory, their doorbell record,
//! and the parsing of what stands in them, with every check.
//!
//! Indices are free-running. `retired <= next <= producer` always holds, and `producer` is at most
//! one ring ahead of `retired`: a producer index that breaks that is refused.

use crate::att::{Att, AttError};
use crate::memory::HostMemory;
use crate::tpt::Domain;
use ferrite_abi::{
    opcode_part, AtomicPart, BindPart, CompletionOpcode, DatagramPart, FastRegisterPart, FlushPart,
    ListPart, Plain, ReceiveHeader, RemotePart, Reserved, SendHeader, SendOpcode, SendPart,
    Service, Sge, SrqRecord, BLOCK_SIZE, MAX_BLOCKS, MAX_INLINE, MAX_MESSAGE, MAX_SGE, SEND_FENCE,
    SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
};
use std::mem::{offset_of, size_of};
use std::ops::Range;

use ferrite_abi::QueuePairRecord;

/// What is wrong with a work request, or with the queue it should have come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueError {
    /// The producer index is more than a ring ahead, or cannot be read.
    Producer,
    /// The opcode is not known, or not allowed on this kind of queue pair.
    Opcode,
    /// Flags that are not known, or do not go with the opcode.
    Flags,
    /// Zero blocks, too many, or more than were posted: where the next one starts is not known.
    Blocks,
    /// More than its blocks hold.
    Overrun,
    /// More scatter/gather entries than the entry holds or the device allows.
    SgeCount,
    /// More inline data than allowed, or where there can be none.
    Inline,
    /// A message longer than the longest allowed, or a frame that is shorter than its header.
    TooLong,
    /// A field that has no meaning, or none for this opcode or queue pair, is not zero.
    Reserved,
    /// The ring could not be read.
    Memory(AttError),
}

impl From<AttError> for QueueError {
    fn from(error: AttError) -> Self {
        Self::Memory(error)
    }
}

impl QueueError {
    /// A number for `CompletionEntry::vendor_syndrome`.
    pub fn vendor_syndrome(self) -> u32 {
        match self {
            Self::Producer => 0x101,
            Self::Opcode => 0x102,
            Self::Flags => 0x103,
            Self::Blocks | Self::Overrun => 0x104,
            Self::SgeCount => 0x105,
            Self::Inline => 0x106,
            Self::TooLong => 0x107,
            Self::Memory(_) => 0x108,
            Self::Reserved => 0x109,
        }
    }
}

/// The opcode-dependent part of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendBody {
    /// A send on a connected queue pair, or a local invalidation.
    Plain(SendPart),
    /// A read or write.
    Remote(RemotePart),
    /// An atomic operation.
    Atomic(AtomicPart),
    /// A datagram.
    Datagram(DatagramPart),
    /// A window bind.
    Bind(BindPart),
    /// A flush.
    Flush(FlushPart),
    /// Nothing: it registers, and that is all.
    None,
}

/// A registration: all that a work request does, or what it does before it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// Of pages.
    Region(FastRegisterPart),
    /// Of [pieces](SendRequest::pieces) of regions.
    List(ListPart),
}

impl Registration {
    /// The tag that it makes valid.
    pub fn tag(&self) -> u32 {
        match self {
            Self::Region(part) => part.tag,
            Self::List(part) => part.tag,
        }
    }
}

/// A work request from a send queue, parsed and checked. Made once and filled again and again.
///
/// The host may change a work request while it is executed; whoever fetches one a second time has
/// to cope with another length or opcode.
#[derive(Clone, Debug)]
pub struct SendRequest {
    /// Free-running index of its first block.
    pub index: u32,
    /// Its blocks, 1 to [`MAX_BLOCKS`].
    pub blocks: u32,
    /// The opcode that it was posted with.
    pub posted: SendOpcode,
    /// What it does; of a registration and a send in one, what it does after the registration.
    pub opcode: SendOpcode,
    /// What it registers.
    pub registration: Option<Registration>,
    /// `SEND_*`.
    pub flags: u16,
    /// Immediate data in wire order.
    pub immediate: u32,
    /// The tag to invalidate, here or at the peer.
    pub tag: u32,
    /// XRC: the SRQ at the peer.
    pub srqn: u32,
    /// The opcode's own part.
    pub body: SendBody,
    /// Bytes of the message: of its scatter/gather entries, or of the inline data.
    pub length: u32,
    /// How many of the entries are pieces of a list.
    pieces: usize,
    sge_count: usize,
    sges: [Sge; MAX_SGE],
    raw: [u8; MAX_BLOCKS * BLOCK_SIZE],
    inline_at: usize,
}

impl Default for SendRequest {
    fn default() -> Self {
        Self {
            index: 0,
            blocks: 1,
            posted: SendOpcode::Send,
            opcode: SendOpcode::Send,
            registration: None,
            flags: 0,
            immediate: 0,
            tag: 0,
            srqn: 0,
            body: SendBody::Plain(SendPart::zeroed()),
            length: 0,
            pieces: 0,
            sge_count: 0,
            sges: [Sge::zeroed(); MAX_SGE],
            raw: [0; MAX_BLOCKS * BLOCK_SIZE],
            inline_at: 0,
        }
    }
}

impl SendRequest {
    /// The scatter/gather entries of the message; none with inline data.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[self.pieces..self.sge_count]
    }

    /// The pieces of the list that it registers.
    pub fn pieces(&self) -> &[Sge] {
        &self.sges[..self.pieces]
    }

    /// The inline data, if the work request has its data so.
    pub fn inline(&self) -> Option<&[u8]> {
        if self.flags & SEND_INLINE == 0 {
            return None;
        }
        self.raw
            .get(self.inline_at..)
            .and_then(|bytes| bytes.get(..self.length as usize))
    }

    /// Writes a completion on success too.
    pub fn signaled(&self) -> bool {
        self.flags & SEND_SIGNALED != 0
    }

    /// The index after its last block.
    pub fn end(&self) -> u32 {
        self.index.wrapping_add(self.blocks)
    }

    fn parse(&mut self, header: &SendHeader, service: Service) -> Result<(), QueueError> {
        let opcode = SendOpcode::from_number(header.opcode).ok_or(QueueError::Opcode)?;
        // What it is called in its completion, whatever else is wrong with it.
        self.posted = opcode;
        self.opcode = opcode;
        self.parse_as(opcode, header, service)?;
        let allowed_on_datagrams = matches!(opcode, SendOpcode::Send | SendOpcode::SendImmediate);
        let registers_and_sends = registers(opcode) && !is_local(opcode);
        if is_datagram(service) && !allowed_on_datagrams
            || service == Service::Uc && registers_and_sends
            || service == Service::Raw && opcode != SendOpcode::Send
        {
            return Err(QueueError::Opcode);
        }
        if registers_and_sends {
            self.opcode = match self.tag {
                0 => SendOpcode::Send,
                _ => SendOpcode::SendInvalidate,
            };
        }
        Ok(())
    }

    /// Checks all but whether the service has the opcode.
    fn parse_as(
        &mut self,
        opcode: SendOpcode,
        header: &SendHeader,
        service: Service,
    ) -> Result<(), QueueError> {
        let datagram = is_datagram(service);
        let known = SEND_SIGNALED | SEND_SOLICITED | SEND_FENCE | SEND_INLINE;
        if header.flags & !known != 0 {
            return Err(QueueError::Flags);
        }
        let named = service == Service::XrcIni && !is_local(opcode);
        if !header.reserved_is_zero() || (header.srqn != 0 && !named) {
            return Err(QueueError::Reserved);
        }
        self.flags = header.flags;
        self.srqn = header.srqn;
        let bytes = &self.raw[..self.blocks as usize * BLOCK_SIZE];
        let part_at = size_of::<SendHeader>();
        let data_at = part_at + opcode_part(opcode, datagram);
        let part = bytes.get(part_at..data_at).ok_or(QueueError::Overrun)?;
        let data = bytes.get(data_at..).ok_or(QueueError::Overrun)?;
        fn read<P: Plain + Reserved>(part: &[u8]) -> Result<P, QueueError> {
            let part = P::from_prefix(part).ok_or(QueueError::Overrun)?;
            if !part.reserved_is_zero() {
                return Err(QueueError::Reserved);
            }
            Ok(part)
        }
        self.registration = None;
        (self.pieces, self.sge_count) = (0, 0);
        // Whether entries follow, and whether data may stand inline in their place.
        let (has_data, may_inline);
        (self.body, has_data, may_inline) = match opcode {
            SendOpcode::Send | SendOpcode::SendImmediate | SendOpcode::SendInvalidate => {
                let body = if datagram {
                    SendBody::Datagram(read(part)?)
                } else {
                    SendBody::Plain(read(part)?)
                };
                (body, true, true)
            }
            SendOpcode::Write | SendOpcode::WriteImmediate | SendOpcode::AtomicWrite => {
                (SendBody::Remote(read(part)?), true, true)
            }
            SendOpcode::Read => (SendBody::Remote(read(part)?), true, false),
            SendOpcode::CompareSwap | SendOpcode::FetchAdd => {
                (SendBody::Atomic(read(part)?), true, false)
            }
            SendOpcode::LocalInvalidate => (SendBody::Plain(read(part)?), false, false),
            SendOpcode::FastRegister => {
                self.registration = Some(Registration::Region(read(part)?));
                (SendBody::None, false, false)
            }
            SendOpcode::RegisterSend => {
                self.registration = Some(Registration::Region(read(part)?));
                let send = &part[size_of::<FastRegisterPart>()..];
                (SendBody::Plain(read(send)?), true, true)
            }
            SendOpcode::RegisterList => {
                self.registration = Some(Registration::List(read(part)?));
                (SendBody::None, true, false)
            }
            SendOpcode::RegisterListSend => {
                self.registration = Some(Registration::List(read(part)?));
                let send = &part[size_of::<ListPart>()..];
                (SendBody::Plain(read(send)?), true, false)
            }
            SendOpcode::Bind => (SendBody::Bind(read(part)?), false, false),
            SendOpcode::Flush => (SendBody::Flush(read(part)?), false, false),
        };
        (self.immediate, self.tag) = immediate_and_tag(opcode, &self.body)?;
        let sge_count = usize::from(header.sge_count);
        if sge_count > MAX_SGE || (sge_count > 0 && !has_data) {
            return Err(QueueError::SgeCount);
        }
        let mut pieces = 0;
        if let Some(Registration::List(part)) = &self.registration {
            pieces = usize::from(part.pieces);
            let all = opcode == SendOpcode::RegisterList;
            if pieces == 0 || pieces > sge_count || all && pieces != sge_count {
                return Err(QueueError::SgeCount);
            }
        }
        if header.flags & SEND_INLINE != 0 {
            let length = usize::from(header.inline_length);
            if !may_inline || sge_count != 0 || length > MAX_INLINE {
                return Err(QueueError::Inline);
            }
            if data.len() < length {
                return Err(QueueError::Overrun);
            }
            if opcode == SendOpcode::AtomicWrite && length != 8 {
                return Err(QueueError::Inline);
            }
            self.inline_at = data_at;
            self.length = header.inline_length.into();
            return Ok(());
        }
        if header.inline_length != 0 {
            return Err(QueueError::Reserved);
        }
        let sges = data
            .get(..sge_count * size_of::<Sge>())
            .ok_or(QueueError::Overrun)?;
        let mut length = 0u64;
        for (n, (slot, bytes)) in self
            .sges
            .iter_mut()
            .zip(sges.chunks_exact(size_of::<Sge>()))
            .enumerate()
        {
            *slot = read(bytes)?;
            if n >= pieces {
                length += u64::from(slot.length);
            }
        }
        (self.pieces, self.sge_count) = (pieces, sge_count);
        let eight_bytes = matches!(
            opcode,
            SendOpcode::CompareSwap | SendOpcode::FetchAdd | SendOpcode::AtomicWrite
        );
        if eight_bytes && length != 8 {
            return Err(QueueError::SgeCount);
        }
        self.length = u32::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_MESSAGE)
            .ok_or(QueueError::TooLong)?;
        Ok(())
    }
}

/// Immediate data and tag of a work request, zero where the opcode has none; what it does not use
/// has to be zero in the work request too.
fn immediate_and_tag(opcode: SendOpcode, body: &SendBody) -> Result<(u32, u32), QueueError> {
    let (immediate, tag, compare) = match body {
        SendBody::Plain(part) => (part.immediate, part.tag, 0),
        SendBody::Remote(part) => (part.immediate, 0, 0),
        SendBody::Datagram(part) => (part.immediate, 0, 0),
        SendBody::Atomic(part) => (0, 0, part.compare),
        SendBody::Bind(_) | SendBody::Flush(_) | SendBody::None => (0, 0, 0),
    };
    let used = match opcode {
        SendOpcode::SendImmediate | SendOpcode::WriteImmediate => tag == 0,
        SendOpcode::SendInvalidate
        | SendOpcode::LocalInvalidate
        | SendOpcode::RegisterSend
        | SendOpcode::RegisterListSend => immediate == 0,
        SendOpcode::CompareSwap => true,
        _ => immediate == 0 && tag == 0 && compare == 0,
    };
    // More than four bytes of immediate data are for later.
    match u32::try_from(immediate) {
        Ok(immediate) if used => Ok((immediate, tag)),
        _ => Err(QueueError::Reserved),
    }
}

/// Whether the work requests of a service say themselves where they go.
fn is_datagram(service: Service) -> bool {
    matches!(service, Service::Ud | Service::Gsi)
}

/// Whether a work request stays in the device: nothing of it goes to the peer.
pub fn is_local(opcode: SendOpcode) -> bool {
    matches!(
        opcode,
        SendOpcode::LocalInvalidate
            | SendOpcode::FastRegister
            | SendOpcode::RegisterList
            | SendOpcode::Bind
    )
}

/// Whether a work request posted with this opcode registers memory.
pub fn registers(opcode: SendOpcode) -> bool {
    matches!(
        opcode,
        SendOpcode::FastRegister
            | SendOpcode::RegisterSend
            | SendOpcode::RegisterList
            | SendOpcode::RegisterListSend
    )
}

/// What a work request is called in its completion.
pub fn completion_opcode(opcode: SendOpcode) -> CompletionOpcode {
    match opcode {
        SendOpcode::Send
        | SendOpcode::SendImmediate
        | SendOpcode::SendInvalidate
        | SendOpcode::RegisterSend
        | SendOpcode::RegisterListSend => CompletionOpcode::Send,
        SendOpcode::Write | SendOpcode::WriteImmediate => CompletionOpcode::Write,
        SendOpcode::Read => CompletionOpcode::Read,
        SendOpcode::CompareSwap => CompletionOpcode::CompareSwap,
        SendOpcode::FetchAdd => CompletionOpcode::FetchAdd,
        SendOpcode::LocalInvalidate => CompletionOpcode::LocalInvalidate,
        SendOpcode::FastRegister | SendOpcode::RegisterList => CompletionOpcode::FastRegister,
        SendOpcode::Bind => CompletionOpcode::Bind,
        SendOpcode::AtomicWrite => CompletionOpcode::AtomicWrite,
        SendOpcode::Flush => CompletionOpcode::Flush,
    }
}

/// One ring with its words in the doorbell record: what send and receive queues share.
#[derive(Clone, Debug)]
struct Ring {
    att: Att,
    /// Offset of the ring in the buffer.
    offset: u64,
    log_entries: u8,
    log_stride: u8,
    /// DMA addresses of the words of the record.
    producer_address: u64,
    wake_address: u64,
    producer: u32,
    next: u32,
    retired: u32,
    /// The wake word is set: the host rings the doorbell.
    asleep: bool,
}

impl Ring {
    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn refresh<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        let producer = memory
            .load_u32(self.producer_address)
            .map_err(AttError::from)?;
        let ahead = producer.wrapping_sub(self.retired);
        // It neither overtakes the consumer by more than the ring nor goes back.
        if ahead > self.entries() || ahead < self.producer.wrapping_sub(self.retired) {
            return Err(QueueError::Producer);
        }
        self.producer = producer;
        Ok(())
    }

    fn set_wake<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        wake: bool,
    ) -> Result<(), QueueError> {
        memory
            .store_u32(self.wake_address, u32::from(wake))
            .map_err(AttError::from)?;
        self.asleep = wake;
        Ok(())
    }

    /// Asks to be woken by a doorbell; true when something was posted meanwhile after all.
    fn sleep<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<bool, QueueError> {
        if !self.asleep {
            self.set_wake(memory, true)?;
            memory.fence();
        }
        self.refresh(memory)?;
        Ok(self.producer != self.next)
    }

    /// Reads `count` entries from `index` on, wrapping around the end of the ring.
    fn read<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        index: u32,
        bytes: &mut [u8],
    ) -> Result<(), QueueError> {
        let size = u64::from(self.entries()) << self.log_stride;
        let at = u64::from(index & (self.entries() - 1)) << self.log_stride;
        let first = usize::try_from(size - at)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        let (head, tail) = bytes.split_at_mut(first);
        self.att.read(memory, self.offset + at, head)?;
        if !tail.is_empty() {
            self.att.read(memory, self.offset, tail)?;
        }
        Ok(())
    }

    /// Writes the entry at `index`.
    fn write<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        index: u32,
        bytes: &[u8],
    ) -> Result<(), QueueError> {
        let at = u64::from(index & (self.entries() - 1)) << self.log_stride;
        self.att.write(memory, self.offset + at, bytes)?;
        Ok(())
    }

    fn reset(&mut self) {
        self.producer = 0;
        self.next = 0;
        self.retired = 0;
    }
}

/// Where a queue lies in its queue pair's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    /// Offset of the ring.
    pub ring_offset: u32,
    /// Base-2 logarithm of its entries (or blocks).
    pub log_entries: u8,
    /// Base-2 logarithm of their bytes.
    pub log_stride: u8,
    /// Offset of the [`QueuePairRecord`].
    pub record_offset: u32,
}

/// Whether no two of these ranges have a byte in common.
pub(crate) fn are_apart(ranges: &[Range<u64>]) -> bool {
    let apart = |a: &Range<u64>, b: &Range<u64>| a.end <= b.start || b.end <= a.start;
    ranges
        .iter()
        .enumerate()
        .all(|(n, a)| ranges[n + 1..].iter().all(|b| apart(a, b)))
}

impl Placement {
    /// Where the ring lies in the buffer.
    pub(crate) fn ring_range(&self) -> Range<u64> {
        let start = u64::from(self.ring_offset);
        start..start + (1u64 << self.log_entries << self.log_stride)
    }

    /// Where the record lies in the buffer.
    pub(crate) fn record_range(&self) -> Range<u64> {
        const { assert!(size_of::<SrqRecord>() == size_of::<QueuePairRecord>()) };
        let start = u64::from(self.record_offset);
        start..start + size_of::<QueuePairRecord>() as u64
    }

    /// Checks that ring and record are inside the buffer and aligned, and finds the record.
    fn ring<M: HostMemory + ?Sized>(
        self,
        memory: &M,
        att: &Att,
        producer_at: usize,
        wake_at: usize,
    ) -> Result<Ring, AttError> {
        let (ring, record) = (self.ring_range(), self.record_range());
        if ring.end > att.length() || record.end > att.length() {
            return Err(AttError::OutOfRange);
        }
        let (offset, record) = (ring.start, record.start);
        // The offsets themselves, and what they come to in the pages.
        let aligned = |offset| offset % 64 == 0 && att.offset_in_page(offset) % 64 == 0;
        if !aligned(offset) || !aligned(record) {
            return Err(AttError::Fbo);
        }
        Ok(Ring {
            att: att.clone(),
            offset,
            log_entries: self.log_entries,
            log_stride: self.log_stride,
            producer_address: att.address_of(memory, record + producer_at as u64, 4)?,
            wake_address: att.address_of(memory, record + wake_at as u64, 4)?,
            producer: 0,
            next: 0,
            retired: 0,
            asleep: false,
        })
    }
}

/// A send queue.
#[derive(Clone, Debug)]
pub struct SendQueue {
    ring: Ring,
    service: Service,
}

impl SendQueue {
    pub(crate) fn new<M: HostMemory + ?Sized>(
        memory: &M,
        att: &Att,
        placement: Placement,
        service: Service,
    ) -> Result<Self, AttError> {
        Ok(Self {
            ring: placement.ring(
                memory,
                att,
                offset_of!(QueuePairRecord, send_producer),
                offset_of!(QueuePairRecord, send_wake),
            )?,
            service,
        })
    }

    /// Base-2 logarithm of its blocks.
    pub(crate) fn log_blocks(&self) -> u8 {
        self.ring.log_entries
    }

    /// The index after the last block known to be posted; see [`SendQueue::refresh`].
    pub fn producer(&self) -> u32 {
        self.ring.producer
    }

    /// The first block that the transport has not taken up.
    pub fn next(&self) -> u32 {
        self.ring.next
    }

    /// The first block of the oldest work request without completion.
    pub fn retired(&self) -> u32 {
        self.ring.retired
    }

    /// Whether anything before `end`, where the producer index is or was, is without completion.
    pub(crate) fn is_open_before(&self, end: u32) -> bool {
        // Beyond the size of the ring it has been passed.
        (1..=self.ring.entries()).contains(&end.wrapping_sub(self.ring.retired))
    }

    /// True when there is a posted work request that was not taken up, as far as is known.
    pub fn has_next(&self) -> bool {
        self.ring.next != self.ring.producer
    }

    /// Looks at the producer index in the record.
    pub fn refresh<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        self.ring.refresh(memory)
    }

    /// Reads and checks the work request at `index`, which is before the producer index.
    /// On an error `request.index` is set, and `request.blocks` is 1 where it makes no sense.
    pub fn fetch<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        index: u32,
        request: &mut SendRequest,
    ) -> Result<(), QueueError> {
        request.index = index;
        request.blocks = 1;
        request.posted = SendOpcode::Send;
        request.opcode = SendOpcode::Send;
        request.flags = SEND_SIGNALED;
        let (first, rest) = request.raw.split_at_mut(BLOCK_SIZE);
        self.ring.read(memory, index, first)?;
        let header = SendHeader::from_prefix(first).ok_or(QueueError::Blocks)?;
        let blocks = usize::from(header.blocks);
        let posted = self.ring.producer.wrapping_sub(index);
        if blocks == 0 || blocks > MAX_BLOCKS || blocks as u32 > posted {
            return Err(QueueError::Blocks);
        }
        if blocks > 1 {
            let rest = &mut rest[..(blocks - 1) * BLOCK_SIZE];
            self.ring.read(memory, index.wrapping_add(1), rest)?;
        }
        request.blocks = blocks as u32;
        request.parse(&header, self.service)
    }

    /// Notes that the transport has taken up the work request `next..end`.
    pub fn advance(&mut self, end: u32) {
        self.ring.next = end;
    }

    /// Notes that everything before `end` has its completion, or needs none.
    pub(crate) fn retire(&mut self, end: u32) {
        self.ring.retired = end;
        // Flushing retires what was never taken up.
        if self.ring.next.wrapping_sub(end) > self.ring.entries() {
            self.ring.next = end;
        }
    }

    /// Gives up on everything posted, for a ring that makes no sense.
    pub(crate) fn retire_all(&mut self) {
        self.ring.retired = self.ring.producer;
        self.ring.next = self.ring.producer;
    }

    /// Asks to be woken by a doorbell; true when something was posted meanwhile after all.
    pub(crate) fn sleep<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<bool, QueueError> {
        self.ring.sleep(memory)
    }

    /// Looks at the producer index and, where there is work to take up, tells the host that
    /// doorbells are not needed.
    pub(crate) fn wake<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        self.ring.refresh(memory)?;
        if self.has_next() && self.ring.asleep {
            self.ring.set_wake(memory, false)?;
        }
        Ok(())
    }

    /// Writes anything into the wake word, as a device does that misbehaves.
    pub(crate) fn scribble_wake<M: HostMemory + ?Sized>(&self, memory: &M, word: u32) {
        // Memory that is gone is found by whoever needs it.
        let _ = memory.store_u32(self.ring.wake_address, word);
    }

    /// Back to index 0, with the wake word as a new queue pair has it.
    pub(crate) fn reset<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        self.ring.reset();
        self.ring.set_wake(memory, true)
    }
}

/// A shared receive queue: its number, and which of all that ever had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedId {
    /// Its number.
    pub srqn: u32,
    /// Different from that of any other there ever was.
    pub serial: u64,
}

/// An entry of a receive queue, parsed and checked. Made once and filled again and again.
#[derive(Clone, Debug)]
pub struct ReceiveRequest {
    /// Free-running index of the entry.
    pub index: u32,
    /// Bytes it has room for.
    pub capacity: u64,
    /// What the host calls it; counts for shared receive queues alone.
    pub id: u32,
    /// The shared receive queue it comes from.
    pub shared: Option<SharedId>,
    /// What its scatter/gather entries are checked against.
    pub domain: Domain,
    sge_count: usize,
    sges: [Sge; MAX_SGE],
}

impl Default for ReceiveRequest {
    fn default() -> Self {
        Self {
            index: 0,
            capacity: 0,
            id: 0,
            shared: None,
            domain: Domain {
                pd: 0,
                privileged: false,
            },
            sge_count: 0,
            sges: [Sge::zeroed(); MAX_SGE],
        }
    }
}

impl ReceiveRequest {
    /// The scatter/gather entries.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..self.sge_count]
    }

    /// What its completion calls it.
    pub fn name(&self) -> u32 {
        match self.shared {
            Some(_) => self.id,
            None => self.index,
        }
    }
}

/// A receive queue.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    ring: Ring,
    /// Its entries have names of their own.
    shared: bool,
}

impl ReceiveQueue {
    pub(crate) fn new<M: HostMemory + ?Sized>(
        memory: &M,
        att: &Att,
        placement: Placement,
    ) -> Result<Self, AttError> {
        Ok(Self {
            ring: placement.ring(
                memory,
                att,
                offset_of!(QueuePairRecord, receive_producer),
                offset_of!(QueuePairRecord, receive_wake),
            )?,
            shared: false,
        })
    }

    /// A shared receive queue's ring.
    pub(crate) fn shared<M: HostMemory + ?Sized>(
        memory: &M,
        att: &Att,
        placement: Placement,
    ) -> Result<Self, AttError> {
        Ok(Self {
            ring: placement.ring(
                memory,
                att,
                offset_of!(SrqRecord, producer),
                offset_of!(SrqRecord, wake),
            )?,
            shared: true,
        })
    }

    /// Entries it holds.
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Base-2 logarithm of its entries.
    pub(crate) fn log_entries(&self) -> u8 {
        self.ring.log_entries
    }

    /// Base-2 logarithm of the bytes of an entry.
    pub(crate) fn log_stride(&self) -> u8 {
        self.ring.log_stride
    }

    /// Takes the next entry: false when none is posted (the receiver is not ready). After an
    /// error the entry counts as taken, and `request.index` says which, but for
    /// [`QueueError::Producer`]: whether there is one is not known.
    pub fn take<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        request: &mut ReceiveRequest,
    ) -> Result<bool, QueueError> {
        request.index = self.ring.next;
        request.id = 0;
        request.capacity = 0;
        request.sge_count = 0;
        if self.ring.next == self.ring.producer {
            self.ring
                .refresh(memory)
                .map_err(|_| QueueError::Producer)?;
            if self.ring.next == self.ring.producer {
                return Ok(false);
            }
        }
        self.ring.next = self.ring.next.wrapping_add(1);
        let mut raw = [0; 1 << ferrite_abi::RQ_MAX_LOG_STRIDE];
        let raw = &mut raw[..1 << self.ring.log_stride];
        self.ring.read(memory, request.index, raw)?;
        let header = ReceiveHeader::from_prefix(raw).ok_or(QueueError::SgeCount)?;
        request.id = header.id;
        if !header.reserved_is_zero() || (header.id != 0 && !self.shared) {
            return Err(QueueError::Reserved);
        }
        let count = header.sge_count as usize;
        let room = (raw.len() - size_of::<ReceiveHeader>()) / size_of::<Sge>();
        if count > room || count > MAX_SGE {
            return Err(QueueError::SgeCount);
        }
        let bytes = raw[size_of::<ReceiveHeader>()..].chunks_exact(size_of::<Sge>());
        for (slot, bytes) in request.sges[..count].iter_mut().zip(bytes) {
            *slot = Sge::from_prefix(bytes).ok_or(QueueError::SgeCount)?;
            request.capacity += u64::from(slot.length);
        }
        request.sge_count = count;
        Ok(true)
    }

    /// Looks at the producer index before the entries that were not taken are moved to another ring
    /// of a shared receive queue, with entries of the same size and this producer index too.
    pub(crate) fn begin_move<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        other: &Self,
    ) -> Result<(), QueueError> {
        self.ring.refresh(memory)?;
        let published = memory
            .load_u32(other.ring.producer_address)
            .map_err(AttError::from)?;
        let waiting = self.ring.producer.wrapping_sub(self.ring.next);
        if waiting > other.entries()
            || published != self.ring.producer
            || other.ring.log_stride != self.ring.log_stride
        {
            return Err(QueueError::Producer);
        }
        Ok(())
    }

    /// Copies the entry at `index` to the same index of the other ring.
    pub(crate) fn copy_entry<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        other: &Self,
        index: u32,
    ) -> Result<(), QueueError> {
        let mut raw = [0; 1 << ferrite_abi::RQ_MAX_LOG_STRIDE];
        let raw = &mut raw[..1 << self.ring.log_stride];
        self.ring.read(memory, index, raw)?;
        other.ring.write(memory, index, raw)
    }

    /// Leaves the old ring for the other, to which everything before `producer` was copied. On an
    /// error, as when there is more, nothing has changed.
    pub(crate) fn end_move<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        other: &Self,
        producer: u32,
    ) -> Result<(), QueueError> {
        self.ring.refresh(memory)?;
        if self.ring.producer != producer {
            return Err(QueueError::Producer);
        }
        let mut other = other.clone();
        other.ring.set_wake(memory, false)?;
        other.ring.producer = producer;
        other.ring.next = self.ring.next;
        other.ring.retired = self.ring.next;
        *self = other;
        Ok(())
    }

    /// The first entry that was not taken.
    pub fn next(&self) -> u32 {
        self.ring.next
    }

    /// The oldest entry without completion.
    pub fn retired(&self) -> u32 {
        self.ring.retired
    }

    /// The index after the last entry known to be posted.
    pub fn producer(&self) -> u32 {
        self.ring.producer
    }

    /// Looks at the producer index in the record.
    pub fn refresh<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        self.ring.refresh(memory)
    }

    /// Notes that everything before `end` has its completion.
    pub(crate) fn retire(&mut self, end: u32) {
        self.ring.retired = end;
        if self.ring.next.wrapping_sub(end) > self.ring.entries() {
            self.ring.next = end;
        }
    }

    /// Asks to be told of posts by doorbell; true when something was posted meanwhile after all.
    pub(crate) fn sleep<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<bool, QueueError> {
        self.ring.sleep(memory)
    }

    /// Back to index 0, not asking for doorbells.
    pub(crate) fn reset<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), QueueError> {
        self.ring.reset();
        self.ring.set_wake(memory, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::DmaError;
    use crate::testing::{SendWork, SharedMemory, TestMemory};
    use ferrite_abi::{AddressVector, Buffer, Field, Layout, ListPart, MAX_PIECES};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    const LOG_BLOCKS: u8 = 3;
    const RECORD: u64 = 64 << LOG_BLOCKS;

    /// A send queue of eight blocks at address 0, with its record behind it.
    fn queue<M: HostMemory>(memory: &M) -> SendQueue {
        queue_of(memory, Service::Rc)
    }

    /// The same of another service.
    fn queue_of<M: HostMemory>(memory: &M, service: Service) -> SendQueue {
        let att = Att::new(&Buffer::contiguous(0, RECORD + 128)).unwrap();
        let placement = Placement {
            ring_offset: 0,
            log_entries: LOG_BLOCKS,
            log_stride: 6,
            record_offset: RECORD as u32,
        };
        SendQueue::new(memory, &att, placement, service).unwrap()
    }

    fn memory() -> TestMemory {
        TestMemory::new(0, 4096)
    }

    fn put(memory: &TestMemory, index: u32, bytes: &[u8]) {
        for (block, bytes) in (index..).zip(bytes.chunks(BLOCK_SIZE)) {
            let slot = u64::from(block % 8);
            memory.write(slot * 64, bytes).unwrap();
        }
    }

    fn sge(length: u32) -> Sge {
        Sge {
            address: 0x1234,
            length,
            lkey: 0x100,
        }
    }

    /// What becomes of a work request posted alone.
    fn fetch(bytes: &[u8]) -> Result<SendRequest, QueueError> {
        fetch_by(bytes, Service::Rc)
    }

    /// The same where the queue pair gives another service.
    fn fetch_by(bytes: &[u8], service: Service) -> Result<SendRequest, QueueError> {
        let memory = memory();
        let mut queue = queue_of(&memory, service);
        put(&memory, 0, bytes);
        memory.put(RECORD, &((bytes.len() / BLOCK_SIZE) as u32));
        queue.refresh(&memory).unwrap();
        let mut request = SendRequest::default();
        queue.fetch(&memory, 0, &mut request)?;
        Ok(request)
    }

    /// The same with one byte of the header changed.
    fn fetch_changed(work: &SendWork, at: usize, value: u8) -> QueueError {
        let mut bytes = work.encode();
        bytes[at] = value;
        fetch(&bytes).unwrap_err()
    }

    #[test]
    fn a_work_request_refused_for_its_header_is_called_what_it_is() {
        let work = SendWork::new(SendOpcode::Write, &[sge(8)]).remote(0, 1);
        for (field, value) in [("flags", 0x80), ("reserved", 1), ("srqn", 1)] {
            let at = SendHeader::FIELDS.iter().find(|at| at.name == field);
            let mut bytes = work.encode();
            bytes[at.unwrap().offset] = value;
            let memory = memory();
            let mut queue = queue(&memory);
            put(&memory, 0, &bytes);
            memory.put(RECORD, &((bytes.len() / BLOCK_SIZE) as u32));
            queue.refresh(&memory).unwrap();
            let mut request = SendRequest::default();
            queue.fetch(&memory, 0, &mut request).unwrap_err();
            assert_eq!(request.opcode, SendOpcode::Write, "{field}");
        }
    }

    #[test]
    fn the_length_is_judged_before_the_service_on_every_queue() {
        let too_long = [sge(1 << 31), sge(1 << 31)];
        for opcode in [SendOpcode::Write, SendOpcode::Read] {
            let long = SendWork::new(opcode, &too_long).remote(0, 1).encode();
            let short = SendWork::new(opcode, &[sge(8)]).remote(0, 1).encode();
            let inline = SendWork::new(opcode, &[]).remote(0, 1).inline(&[1]);
            let datagram = |bytes: &[u8]| fetch_by(bytes, Service::Ud).unwrap_err();
            assert_eq!(fetch(&long).unwrap_err(), QueueError::TooLong);
            assert_eq!(datagram(&long), QueueError::TooLong);
            assert_eq!(datagram(&short), QueueError::Opcode);
            if opcode == SendOpcode::Write {
                assert_eq!(datagram(&inline.encode()), QueueError::Opcode);
            }
        }
    }

    #[test]
    fn work_requests_wrap_around_the_end_of_the_ring() {
        let memory = memory();
        let mut queue = queue(&memory);
        let data: Vec<u8> = (0..200).collect();
        let bytes = SendWork::new(SendOpcode::Send, &[]).inline(&data).encode();
        let blocks = (bytes.len() / BLOCK_SIZE) as u32;
        assert_eq!(blocks, 4);
        let mut request = SendRequest::default();
        let mut index = 0u32;
        for _ in 0..20 {
            put(&memory, index, &bytes);
            memory.put(RECORD, &(index + blocks));
            queue.refresh(&memory).unwrap();
            queue.fetch(&memory, index, &mut request).unwrap();
            assert_eq!(request.inline(), Some(&data[..]));
            assert_eq!(request.length, 200);
            index = request.end();
            queue.advance(index);
            queue.retire(index);
            // An odd one, so that every start is met.
            put(
                &memory,
                index,
                &SendWork::new(SendOpcode::Send, &[]).encode(),
            );
            index += 1;
            memory.put(RECORD, &index);
            queue.refresh(&memory).unwrap();
            queue.advance(index);
            queue.retire(index);
        }
    }

    #[test]
    fn a_work_request_may_cross_pages_that_do_not_follow_each_other() {
        const PAGES: [u64; 3] = [0x2000, 0, 0x1000];
        const TABLE: u64 = 0x3000;
        let memory = TestMemory::new(0, 0x4000);
        for (at, page) in (TABLE..).step_by(8).zip(PAGES) {
            memory.put(at, &page);
        }
        // A ring of two pages, and the record in the third.
        let att = Att::new(&Buffer {
            root: TABLE,
            length: 2 * 4096 + 128,
            fbo: 0,
            page_shift: 12,
            order: ferrite_abi::AttOrder::First.number(),
            reserved: 0,
        });
        let placement = Placement {
            ring_offset: 0,
            log_entries: 7,
            log_stride: 6,
            record_offset: 2 * 4096,
        };
        let mut queue = SendQueue::new(&memory, &att.unwrap(), placement, Service::Rc).unwrap();
        let data: Vec<u8> = (0..200).collect();
        let bytes = SendWork::new(SendOpcode::Send, &[]).inline(&data).encode();
        // Two blocks at the end of the first page, the others in the second; and the same where
        // the ring begins again.
        for start in [62u32, 126] {
            for (index, block) in (start..).zip(bytes.chunks(BLOCK_SIZE)) {
                let slot = index % 128;
                let page = PAGES[slot as usize / 64];
                memory
                    .write(page + u64::from(slot % 64) * 64, block)
                    .unwrap();
            }
            memory.put(PAGES[2], &(start + 4));
            queue.refresh(&memory).unwrap();
            let mut request = SendRequest::default();
            queue.fetch(&memory, start, &mut request).unwrap();
            assert_eq!(request.inline(), Some(&data[..]));
            queue.advance(start + 4);
            queue.retire(start + 4);
        }
    }

    #[test]
    fn the_parts_of_a_work_request_are_found() {
        let request = fetch(
            &SendWork::new(SendOpcode::WriteImmediate, &[sge(10), sge(20)])
                .remote(0xabcd, 0x77)
                .immediate(5)
                .flags(SEND_SOLICITED)
                .encode(),
        )
        .unwrap();
        assert_eq!(request.length, 30);
        assert_eq!(request.sges(), [sge(10), sge(20)]);
        assert_eq!(request.immediate, 5);
        assert!(!request.signaled());
        assert_eq!(request.inline(), None);
        assert!(
            matches!(request.body, SendBody::Remote(part) if part.address == 0xabcd && part.rkey == 0x77)
        );
    }

    #[test]
    fn malformed_work_requests_are_refused_each_with_its_own_error() {
        let send = SendWork::new(SendOpcode::Send, &[sge(1)]);
        let read = SendWork::new(SendOpcode::Read, &[]).remote(0, 0);
        let [opcode, flags, blocks, sges, length] = [
            offset_of!(SendHeader, opcode),
            offset_of!(SendHeader, flags),
            offset_of!(SendHeader, blocks),
            offset_of!(SendHeader, sge_count),
            offset_of!(SendHeader, inline_length),
        ];
        let inlined = SEND_INLINE as u8;
        assert_eq!(fetch_changed(&send, opcode, 0), QueueError::Opcode);
        assert_eq!(fetch_changed(&send, opcode, 200), QueueError::Opcode);
        assert_eq!(fetch_changed(&send, flags, 0x10), QueueError::Flags);
        assert_eq!(fetch_changed(&send, blocks, 0), QueueError::Blocks);
        assert_eq!(fetch_changed(&send, blocks, 2), QueueError::Blocks);
        assert_eq!(fetch_changed(&send, blocks, 255), QueueError::Blocks);
        // Entries beyond the blocks, and beyond any limit.
        assert_eq!(fetch_changed(&send, sges, 3), QueueError::Overrun);
        assert_eq!(fetch_changed(&send, sges, 17), QueueError::SgeCount);
        assert_eq!(fetch_changed(&send, flags, inlined), QueueError::Inline);
        let inline = SendWork::new(SendOpcode::Send, &[]).inline(&[1; 10]);
        assert_eq!(fetch_changed(&inline, length, 33), QueueError::Overrun);
        assert_eq!(fetch_changed(&inline, length + 1, 2), QueueError::Inline);
        assert_eq!(fetch_changed(&read, flags, inlined), QueueError::Inline);
        let local = SendWork::new(SendOpcode::LocalInvalidate, &[sge(1)]);
        assert_eq!(fetch(&local.encode()).unwrap_err(), QueueError::SgeCount);
        let atomic = SendWork::new(SendOpcode::FetchAdd, &[sge(4)]);
        assert_eq!(fetch(&atomic.encode()).unwrap_err(), QueueError::SgeCount);
    }

    /// Offsets of the bytes of reserved fields in a structure, those of structures in it included.
    fn reserved_bytes(fields: &[Field], size: usize) -> Vec<usize> {
        let ends = fields.iter().skip(1).map(|field| field.offset);
        let mut found = Vec::new();
        for (field, end) in fields.iter().zip(ends.chain([size])) {
            let inner = match field.ty {
                _ if field.name.starts_with("reserved") => {
                    found.extend(field.offset..end);
                    continue;
                }
                "AddressVector" => AddressVector::FIELDS,
                "super::Buffer" => Buffer::FIELDS,
                _ => continue,
            };
            let inner = reserved_bytes(inner, end - field.offset);
            found.extend(inner.into_iter().map(|at| field.offset + at));
        }
        found
    }

    const SERVICES: [Service; 5] = [
        Service::Rc,
        Service::Uc,
        Service::Ud,
        Service::Gsi,
        Service::XrcIni,
    ];

    /// A good work request of each opcode that a service has, with the fields of its part.
    fn good_work(service: Service) -> Vec<(SendWork, &'static [Field])> {
        let datagram = is_datagram(service);
        let opcodes = (0..=u8::MAX).filter_map(SendOpcode::from_number);
        let sent = |opcode| matches!(opcode, SendOpcode::Send | SendOpcode::SendImmediate);
        opcodes
            .filter(|&opcode| !datagram || sent(opcode))
            .filter(|&opcode| service != Service::Uc || !registers(opcode) || is_local(opcode))
            .map(|opcode| {
                let fields = match opcode {
                    SendOpcode::Send | SendOpcode::SendImmediate if datagram => {
                        DatagramPart::FIELDS
                    }
                    SendOpcode::Send
                    | SendOpcode::SendImmediate
                    | SendOpcode::SendInvalidate
                    | SendOpcode::LocalInvalidate => SendPart::FIELDS,
                    SendOpcode::Write
                    | SendOpcode::WriteImmediate
                    | SendOpcode::Read
                    | SendOpcode::AtomicWrite => RemotePart::FIELDS,
                    SendOpcode::CompareSwap | SendOpcode::FetchAdd => AtomicPart::FIELDS,
                    SendOpcode::FastRegister | SendOpcode::RegisterSend => FastRegisterPart::FIELDS,
                    SendOpcode::RegisterList | SendOpcode::RegisterListSend => ListPart::FIELDS,
                    SendOpcode::Bind => BindPart::FIELDS,
                    SendOpcode::Flush => FlushPart::FIELDS,
                };
                let sges = match opcode {
                    SendOpcode::AtomicWrite => &[sge(8)][..],
                    opcode if ferrite_abi::has_entries(opcode) => &[sge(8)],
                    _ => &[],
                };
                let mut work = SendWork::new(opcode, sges);
                if matches!(
                    opcode,
                    SendOpcode::RegisterList | SendOpcode::RegisterListSend
                ) {
                    work = work.part(&ListPart {
                        pieces: 1,
                        ..ListPart::zeroed()
                    });
                }
                if datagram {
                    work = work.datagram(&DatagramPart::zeroed());
                }
                (work, fields)
            })
            .collect()
    }

    #[test]
    fn reserved_fields_that_are_not_zero_are_refused_in_every_work_request() {
        for service in SERVICES {
            for (work, fields) in good_work(service) {
                let good = work.encode();
                assert!(fetch_by(&good, service).is_ok(), "{service:?} {work:?}");
                let mut part = opcode_part(work.opcode, is_datagram(service));
                if registers(work.opcode) && !is_local(work.opcode) {
                    // The second part is looked at below.
                    part -= size_of::<SendPart>();
                }
                let header = size_of::<SendHeader>();
                let in_part = reserved_bytes(fields, part);
                let reserved = reserved_bytes(SendHeader::FIELDS, header)
                    .into_iter()
                    .chain(in_part.into_iter().map(|at| header + at));
                let mut count = 0;
                for at in reserved {
                    let mut bytes = good.clone();
                    bytes[at] = 0x40;
                    let refused = fetch_by(&bytes, service).unwrap_err();
                    assert_eq!(refused, QueueError::Reserved, "byte {at} of {work:?}");
                    count += 1;
                }
                // Of the header alone there are five.
                assert!(count > 5, "{work:?}");
            }
        }
    }

    #[test]
    fn fields_that_an_opcode_does_not_use_are_zero() {
        const HEADER: usize = size_of::<SendHeader>();
        for service in SERVICES {
            for (work, fields) in good_work(service) {
                let opcode = work.opcode;
                let with_immediate = matches!(
                    opcode,
                    SendOpcode::SendImmediate | SendOpcode::WriteImmediate
                );
                let with_tag = matches!(
                    opcode,
                    SendOpcode::SendInvalidate | SendOpcode::LocalInvalidate
                );
                let changed = |at: usize| {
                    let mut bytes = work.encode();
                    bytes[at] = 1;
                    fetch_by(&bytes, service)
                        .map(|request| (request.immediate, request.tag, request.srqn))
                };
                for field in fields {
                    let at = HEADER + field.offset;
                    let (expected, beyond) = match field.name {
                        "immediate" => (with_immediate.then_some((1, 0, 0)), Some(at + 4)),
                        "tag" if fields.len() == SendPart::FIELDS.len() => {
                            (with_tag.then_some((0, 1, 0)), None)
                        }
                        "compare" => {
                            let compares = opcode == SendOpcode::CompareSwap;
                            (compares.then_some((0, 0, 0)), None)
                        }
                        _ => continue,
                    };
                    let expected = expected.ok_or(QueueError::Reserved);
                    assert_eq!(changed(at), expected, "{} of {opcode:?}", field.name);
                    // Eight bytes of immediate data are for later.
                    if let Some(at) = beyond {
                        assert_eq!(changed(at), Err(QueueError::Reserved), "{opcode:?}");
                    }
                }
                let named = service == Service::XrcIni && !is_local(opcode);
                assert_eq!(
                    changed(offset_of!(SendHeader, srqn)),
                    named.then_some((0, 0, 1)).ok_or(QueueError::Reserved),
                    "{service:?} {opcode:?}"
                );
                assert_eq!(
                    changed(offset_of!(SendHeader, inline_length)),
                    Err(QueueError::Reserved),
                    "{opcode:?}"
                );
            }
        }
    }

    fn list_part(pieces: u8) -> ListPart {
        ListPart {
            tag: 0x301,
            pieces,
            ..ListPart::zeroed()
        }
    }

    #[test]
    fn pieces_are_counted_among_the_entries_and_not_among_the_data() {
        let sges: Vec<_> = (1..=MAX_SGE as u32).map(sge).collect();
        let both = SendWork::new(SendOpcode::RegisterListSend, &sges).part(&list_part(5));
        let request = fetch(&both.encode()).unwrap();
        assert_eq!(request.pieces(), &sges[..5]);
        assert_eq!(request.sges(), &sges[5..]);
        assert_eq!(request.length, (6..=16).sum::<u32>());
        assert_eq!(request.opcode, SendOpcode::Send);
        assert_eq!(request.posted, SendOpcode::RegisterListSend);
        let all = SendWork::new(SendOpcode::RegisterList, &sges).part(&list_part(16));
        let request = fetch(&all.encode()).unwrap();
        assert_eq!((request.pieces(), request.sges()), (&sges[..], &[][..]));
        assert_eq!(request.length, 0);
        // However long the pieces are, the message is not.
        let long = SendWork::new(SendOpcode::RegisterListSend, &[sge(u32::MAX); MAX_PIECES]);
        let request = fetch(&long.part(&list_part(16)).encode()).unwrap();
        assert_eq!(request.length, 0);
        // A request that has none leaves none behind.
        let mut used = request;
        let memory = memory();
        let mut queue = queue(&memory);
        memory
            .write(0, &SendWork::new(SendOpcode::Send, &[sge(3)]).encode())
            .unwrap();
        memory.put(RECORD, &1u32);
        queue.refresh(&memory).unwrap();
        queue.fetch(&memory, 0, &mut used).unwrap();
        assert_eq!(used.sges().len(), 1);
        assert!(used.pieces().is_empty() && used.registration.is_none());
    }

    #[test]
    fn a_list_has_as_many_pieces_as_it_says_among_its_entries() {
        use SendOpcode::{RegisterList, RegisterListSend};
        for (opcode, entries, pieces, good) in [
            (RegisterList, 1, 1, true),
            (RegisterList, 2, 1, false),
            (RegisterList, 1, 2, false),
            (RegisterList, 0, 0, false),
            (RegisterListSend, 2, 1, true),
            (RegisterListSend, 2, 2, true),
            (RegisterListSend, 2, 3, false),
            (RegisterListSend, 2, 0, false),
            (RegisterListSend, 16, 255, false),
            (RegisterListSend, 17, 16, false),
        ] {
            let work = SendWork::new(opcode, &vec![sge(8); entries]).part(&list_part(pieces));
            let fetched = fetch(&work.encode());
            let expected = good.then_some(()).ok_or(QueueError::SgeCount);
            assert_eq!(
                fetched.map(|_| ()),
                expected,
                "{opcode:?} {entries} {pieces}"
            );
        }
    }

    #[test]
    fn a_registration_that_sends_has_its_data_as_a_send_has_them() {
        let register = SendWork::new(SendOpcode::RegisterSend, &[sge(5), sge(6)]);
        let request = fetch(&register.encode()).unwrap();
        assert_eq!((request.length, request.sges().len()), (11, 2));
        assert_eq!(request.opcode, SendOpcode::Send);
        assert!(matches!(
            request.registration,
            Some(Registration::Region(_))
        ));
        let request = fetch(&register.clone().invalidate(0x907).encode()).unwrap();
        assert_eq!(
            (request.opcode, request.tag),
            (SendOpcode::SendInvalidate, 0x907)
        );
        let inline = SendWork::new(SendOpcode::RegisterSend, &[]).inline(&[7; MAX_INLINE]);
        let request = fetch(&inline.encode()).unwrap();
        assert_eq!(request.inline(), Some(&[7; MAX_INLINE][..]));
        // Nothing else has data in place of entries that are pieces.
        for opcode in [SendOpcode::RegisterList, SendOpcode::RegisterListSend] {
            let inline = SendWork::new(opcode, &[])
                .part(&list_part(1))
                .inline(&[7; 8]);
            let refused = fetch(&inline.encode()).unwrap_err();
            assert!(matches!(refused, QueueError::SgeCount | QueueError::Inline));
        }
        // The part of the send is looked at too.
        let at = size_of::<SendHeader>() + size_of::<FastRegisterPart>();
        for offset in [
            offset_of!(SendPart, immediate),
            offset_of!(SendPart, reserved),
        ] {
            let mut bytes = register.encode();
            bytes[at + offset] = 1;
            assert_eq!(fetch(&bytes).unwrap_err(), QueueError::Reserved);
        }
        // Without blocks enough for it there is none.
        let mut short = SendWork::new(SendOpcode::RegisterSend, &[]).encode();
        short.truncate(BLOCK_SIZE);
        short[offset_of!(SendHeader, blocks)] = 1;
        assert_eq!(fetch(&short).unwrap_err(), QueueError::Overrun);
    }

    #[test]
    fn only_reliable_connections_register_and_send() {
        for (service, good) in [
            (Service::Rc, true),
            (Service::XrcIni, true),
            (Service::Uc, false),
        ] {
            let list = SendWork::new(SendOpcode::RegisterListSend, &[sge(1)]).part(&list_part(1));
            for work in [SendWork::new(SendOpcode::RegisterSend, &[]), list] {
                let fetched = fetch_by(&work.encode(), service).map(|_| ());
                assert_eq!(fetched, good.then_some(()).ok_or(QueueError::Opcode));
            }
            let list = SendWork::new(SendOpcode::RegisterList, &[sge(1)]).part(&list_part(1));
            assert!(fetch_by(&list.encode(), service).is_ok());
        }
    }

    #[test]
    fn the_longest_message_is_2_gib() {
        let send = |sges: &[Sge]| fetch(&SendWork::new(SendOpcode::Send, sges).encode());
        assert_eq!(send(&[sge(MAX_MESSAGE)]).unwrap().length, MAX_MESSAGE);
        for sges in [
            &[sge(MAX_MESSAGE), sge(1)][..],
            &[sge(u32::MAX)],
            &[sge(u32::MAX), sge(2)],
        ] {
            assert_eq!(send(sges).unwrap_err(), QueueError::TooLong);
        }
    }

    #[test]
    fn a_producer_index_neither_overtakes_nor_goes_back() {
        let memory = memory();
        let mut queue = queue(&memory);
        memory.put(RECORD, &8u32);
        assert_eq!(queue.refresh(&memory), Ok(()));
        for producer in [9, 7, u32::MAX] {
            memory.put(RECORD, &producer);
            assert_eq!(queue.refresh(&memory), Err(QueueError::Producer));
        }
        queue.retire(8);
        memory.put(RECORD, &16u32);
        assert_eq!(queue.refresh(&memory), Ok(()));
    }

    #[test]
    fn sleeping_sees_a_post_that_came_just_before() {
        let memory = memory();
        let mut queue = queue(&memory);
        assert_eq!(queue.sleep(&memory), Ok(false));
        assert_eq!(memory.load_u32(RECORD + 64), Ok(1));
        memory.put(RECORD, &1u32);
        queue.wake(&memory).unwrap();
        assert_eq!(memory.load_u32(RECORD + 64), Ok(0));
        queue.advance(1);
        memory.put(RECORD, &2u32);
        assert_eq!(queue.sleep(&memory), Ok(true));
    }

    #[test]
    fn a_post_while_the_device_falls_asleep_is_seen_or_rings() {
        const POSTS: u32 = 100_000;
        let memory = SharedMemory::new(2048);
        let mut queue = queue(&memory);
        // The last post that was rung for, and the last that was taken up.
        let (rung, taken) = (AtomicU32::new(0), AtomicU32::new(0));
        // On a busy machine the two hardly ever run at the same time: fewer will do.
        let end = Instant::now() + Duration::from_secs(3);
        let deadline = end + Duration::from_secs(120);
        std::thread::scope(|scope| {
            let host = scope.spawn(|| {
                let mut posted = 0;
                while posted < POSTS && Instant::now() < end {
                    posted += 1;
                    memory.store_u32(RECORD, posted).unwrap();
                    memory.fence();
                    if memory.load_u32(RECORD + 64).unwrap() != 0 {
                        rung.store(posted, Ordering::Release);
                    }
                    let is_taken = || taken.load(Ordering::Acquire) >= posted;
                    if !SharedMemory::spin(deadline, is_taken) {
                        return Err(posted);
                    }
                }
                Ok(posted)
            });
            let mut done = 0;
            while !host.is_finished() {
                queue.wake(&memory).unwrap();
                while queue.has_next() {
                    done += 1;
                    queue.advance(done);
                    queue.retire(done);
                }
                taken.store(done, Ordering::Release);
                if !queue.sleep(&memory).unwrap() {
                    // Nobody looks any more: the host has to ring.
                    let rang = || rung.load(Ordering::Acquire) > done || host.is_finished();
                    SharedMemory::spin(deadline, rang);
                }
            }
            let posted = host.join().unwrap();
            assert!(
                posted.is_ok(),
                "post {posted:?} was neither seen nor rung for"
            );
        });
    }

    #[test]
    fn receive_entries_are_checked() {
        let memory = memory();
        let att = Att::new(&Buffer::contiguous(0, 1024)).unwrap();
        let placement = Placement {
            ring_offset: 0,
            log_entries: 2,
            log_stride: 6,
            record_offset: 512,
        };
        let mut queue = ReceiveQueue::new(&memory, &att, placement).unwrap();
        let mut request = ReceiveRequest::default();
        assert_eq!(queue.take(&memory, &mut request), Ok(false));
        let put = |slot: u64, count: u32| {
            memory.put(slot * 64, &count);
            for n in 0..3 {
                memory.put(slot * 64 + 16 + n * 16, &sge(u32::MAX));
            }
        };
        put(0, 3);
        put(1, 4);
        put(2, u32::MAX);
        put(3, 0);
        memory.put(516, &4u32);
        assert_eq!(queue.take(&memory, &mut request), Ok(true));
        assert_eq!(request.sges().len(), 3);
        assert_eq!(request.capacity, 3 * u64::from(u32::MAX));
        for index in 1..3 {
            assert_eq!(queue.take(&memory, &mut request), Err(QueueError::SgeCount));
            assert_eq!(request.index, index);
        }
        assert_eq!(queue.take(&memory, &mut request), Ok(true));
        assert_eq!(request.capacity, 0);
        assert_eq!(queue.take(&memory, &mut request), Ok(false));
        memory.put(516, &5u32);
        assert_eq!(queue.take(&memory, &mut request), Err(QueueError::Producer));
    }

    #[test]
    fn reserved_fields_that_are_not_zero_are_refused_in_every_receive() {
        let att = Att::new(&Buffer::contiguous(0, 1024)).unwrap();
        let placement = Placement {
            ring_offset: 0,
            log_entries: 2,
            log_stride: 6,
            record_offset: 512,
        };
        let id = offset_of!(ReceiveHeader, id);
        for shared in [false, true] {
            for at in 0..size_of::<ReceiveHeader>() {
                let memory = memory();
                let (mut queue, producer) = if shared {
                    let queue = ReceiveQueue::shared(&memory, &att, placement);
                    (queue.unwrap(), offset_of!(SrqRecord, producer))
                } else {
                    let queue = ReceiveQueue::new(&memory, &att, placement);
                    (
                        queue.unwrap(),
                        offset_of!(QueuePairRecord, receive_producer),
                    )
                };
                memory.write(at as u64, &[1]).unwrap();
                memory.put(512 + producer as u64, &1u32);
                let mut request = ReceiveRequest::default();
                let taken = queue.take(&memory, &mut request);
                let expected = match at {
                    // An entry, or very many of them.
                    0 => Ok(true),
                    _ if at < id => Err(QueueError::SgeCount),
                    // A name is what entries of shared queues alone have.
                    _ if at < id + 4 && shared => Ok(true),
                    _ => Err(QueueError::Reserved),
                };
                assert_eq!(taken, expected, "byte {at}, shared: {shared}");
            }
        }
    }

    #[test]
    fn a_ring_without_memory_is_an_error() {
        let short = TestMemory::new(512, 4096);
        let queue = queue(&short);
        let mut request = SendRequest::default();
        assert_eq!(
            queue.fetch(&short, 0, &mut request),
            Err(QueueError::Memory(AttError::Memory(DmaError {
                address: 0
            })))
        );
    }
}
