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
mod tests;
