// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A machine and a small driver for tests: boots an engine through its registers, makes objects
//! with real commands, posts and polls through real rings and doorbells.

use crate::loan::{Held, Lent, Loan};
use crate::memory::{DmaError, Host, HostMemory, Lending, Room, Way, ENOUGH_ROOM, FRAME_OVERHEAD};
use crate::misbehaviour::Misbehaviour;
use crate::{Config, Disposition, Engine, Medium};
use ferrite_abi::*;
use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of memory of a [`Node`].
pub const MEMORY_SIZE: usize = 8 << 20;
/// The first address of it; below there is nothing.
pub const MEMORY_BASE: u64 = 0x10_0000;
/// Message numbers of a [`Node`].
pub const MESSAGES: u16 = 8;
/// The group of [`Node::crowd`].
pub const CROWD: [u8; 4] = [239, 1, 2, 3];
/// Base-2 logarithm of the entries of each event queue of a [`Node`].
pub const EQ_LOG_ENTRIES: u8 = 6;

/// And of its control ring.
pub const CQP_LOG_ENTRIES: u8 = 5;

const PAGE: u64 = 4096;

/// Of all engines of this process that are gone.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// The steps of all engines of this process that are gone, for what wants to say how much it tried.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

impl Drop for Engine {
    fn drop(&mut self) {
        STEPS.fetch_add(Engine::steps(self), Ordering::Relaxed);
    }
}

/// Bounds-checked memory.
#[derive(Debug)]
pub struct TestMemory {
    base: u64,
    bytes: RefCell<Vec<u8>>,
    holes: RefCell<Vec<Range<u64>>>,
}

impl TestMemory {
    /// Zeroed memory of `size` bytes at `base`.
    pub fn new(base: u64, size: usize) -> Self {
        Self {
            base,
            bytes: RefCell::new(vec![0; size]),
            holes: RefCell::new(Vec::new()),
        }
    }

    /// There is no memory in this range any more.
    pub fn take_away(&self, range: Range<u64>) {
        self.holes.borrow_mut().push(range);
    }

    /// There is memory everywhere again.
    pub fn give_back(&self) {
        self.holes.borrow_mut().clear();
    }

    fn with<R>(
        &self,
        address: u64,
        length: usize,
        access: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, DmaError> {
        let error = DmaError { address };
        let start = address.checked_sub(self.base).ok_or(error)?;
        let start = usize::try_from(start).map_err(|_| error)?;
        let end = start.checked_add(length).ok_or(error)?;
        let touches = |hole: &Range<u64>| {
            hole.start < address.saturating_add(length as u64) && address < hole.end
        };
        if self.holes.borrow().iter().any(touches) {
            return Err(error);
        }
        let mut bytes = self.bytes.borrow_mut();
        Ok(access(bytes.get_mut(start..end).ok_or(error)?))
    }

    fn word<const N: usize>(
        &self,
        address: u64,
        change: impl FnOnce([u8; N]) -> [u8; N],
    ) -> Result<[u8; N], DmaError> {
        if address % N as u64 != 0 {
            return Err(DmaError { address });
        }
        self.with(address, N, |bytes| {
            let mut old = [0; N];
            old.copy_from_slice(bytes);
            bytes.copy_from_slice(&change(old));
            old
        })
    }

    /// Reads a layout.
    pub fn get<P: Plain>(&self, address: u64) -> P {
        let mut value = P::zeroed();
        self.read(address, value.as_bytes_mut())
            .expect("test memory");
        value
    }

    /// Writes a layout.
    pub fn put<P: Plain>(&self, address: u64, value: &P) {
        self.write(address, value.as_bytes()).expect("test memory");
    }
}

impl HostMemory for TestMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        self.with(address, bytes.len(), |from| bytes.copy_from_slice(from))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError> {
        self.with(address, bytes.len(), |to| to.copy_from_slice(bytes))
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaError> {
        self.word(address, |old| old).map(u32::from_le_bytes)
    }

    fn load_u64(&self, address: u64) -> Result<u64, DmaError> {
        self.word(address, |old| old).map(u64::from_le_bytes)
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError> {
        self.word(address, |_| value.to_le_bytes()).map(|_| ())
    }

    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError> {
        self.word(address, |_| value.to_le_bytes()).map(|_| ())
    }

    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError> {
        let change = |old: [u8; 8]| {
            if u64::from_le_bytes(old) == compare {
                new.to_le_bytes()
            } else {
                old
            }
        };
        self.word(address, change).map(u64::from_le_bytes)
    }

    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError> {
        let change = |old| u64::from_le_bytes(old).wrapping_add(addend).to_le_bytes();
        self.word(address, change).map(u64::from_le_bytes)
    }

    fn fence(&self) {}
}

/// Memory that another processor changes while the device reads it.
#[derive(Debug)]
pub struct Unsteady {
    ranges: Vec<Range<u64>>,
    one_in: u64,
    random: u64,
    /// What a word of eight bytes is changed to, if not to anything.
    values: Vec<u64>,
}

impl Unsteady {
    /// One in `one_in` reads of these ranges finds a word changed, by `seed`.
    pub fn new(ranges: Vec<Range<u64>>, one_in: u64, seed: u64) -> Self {
        Self {
            ranges,
            one_in,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            values: Vec::new(),
        }
    }

    /// The same, but words of eight bytes are changed to one of these, and nothing else.
    pub fn choosing(mut self, values: Vec<u64>) -> Self {
        self.values = values;
        self
    }

    fn next(&mut self) -> u64 {
        // Xorshift; never zero.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Changes a word of what is about to be read, perhaps.
    fn disturb(&mut self, memory: &TestMemory, address: u64, length: usize) {
        let concerned = self.ranges.iter().any(|range| range.contains(&address));
        if !concerned || self.next() % self.one_in != 0 {
            return;
        }
        if !self.values.is_empty() {
            let words = (length as u64).div_ceil(8).max(1);
            let at = (address & !7) + self.next() % words * 8;
            let choice = self.next() % self.values.len() as u64;
            let value = self.values[choice as usize];
            let _ = memory.store_u64(at, value);
            return;
        }
        let words = (length as u64).div_ceil(4).max(1);
        let at = (address & !3) + self.next() % words * 4;
        let choice = self.next();
        // Whoever reads next finds what was there before moved, flipped, or gone.
        let _ = memory.word(at, |old: [u8; 4]| {
            let old = u32::from_le_bytes(old);
            let new = match choice % 5 {
                0 => old.wrapping_add(1),
                1 => old ^ (1 << ((choice >> 32) & 31)),
                2 => 0,
                3 => u32::MAX,
                _ => (choice >> 32) as u32,
            };
            new.to_le_bytes()
        });
    }
}

/// What the device did to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Plain read of some bytes.
    Read(u64, usize),
    /// Plain write of some bytes.
    Write(u64, usize),
    /// Load of a word.
    Load(u64),
    /// Store of a word, and its value.
    Store(u64, u64),
    /// An atomic on a word of eight bytes.
    Exchange(u64),
    /// Full barrier.
    Fence,
}

/// Memory that several threads share.
#[derive(Debug)]
pub struct SharedMemory {
    words: Vec<AtomicU64>,
}

impl SharedMemory {
    /// Zeroed memory of `size` bytes, from address 0 on.
    pub fn new(size: usize) -> Self {
        Self {
            words: (0..size.div_ceil(8)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn at(&self, address: u64) -> Result<&AtomicU64, DmaError> {
        let index = usize::try_from(address / 8).map_err(|_| DmaError { address })?;
        self.words.get(index).ok_or(DmaError { address })
    }

    /// Both halves of a word belong to the same writer. No exchange: that would be a barrier, which
    /// the tests are to miss where the engine has none.
    fn store_half(&self, address: u64, value: u32) -> Result<(), DmaError> {
        if address % 4 != 0 {
            return Err(DmaError { address });
        }
        let word = self.at(address)?;
        let shift = address % 8 * 8;
        let other = word.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
        word.store(other | (u64::from(value) << shift), Ordering::Release);
        Ok(())
    }

    /// Waits for `condition` and looks at it often; gives up at `deadline`.
    pub fn spin(deadline: Instant, mut condition: impl FnMut() -> bool) -> bool {
        loop {
            for _ in 0..200 {
                if condition() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() > deadline {
                return condition();
            }
            // The other side may want this processor.
            std::thread::yield_now();
        }
    }
}

impl HostMemory for SharedMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        for (at, byte) in (address..).zip(bytes) {
            *byte = self.at(at)?.load(Ordering::Relaxed).to_le_bytes()[at as usize % 8];
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError> {
        if address % 8 != 0 || bytes.len() % 8 != 0 {
            return Err(DmaError { address });
        }
        for (at, word) in (address..).step_by(8).zip(bytes.chunks_exact(8)) {
            let mut value = [0; 8];
            value.copy_from_slice(word);
            self.at(at)?
                .store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        Ok(())
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaError> {
        let word = self.at(address)?.load(Ordering::Acquire);
        Ok((word >> (address % 8 * 8)) as u32)
    }

    fn load_u64(&self, address: u64) -> Result<u64, DmaError> {
        Ok(self.at(address)?.load(Ordering::Acquire))
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError> {
        self.store_half(address, value)
    }

    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError> {
        self.at(address)?.store(value, Ordering::Release);
        Ok(())
    }

    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError> {
        let (word, order) = (self.at(address)?, Ordering::AcqRel);
        let old = word.compare_exchange(compare, new, order, Ordering::Acquire);
        Ok(old.unwrap_or_else(|old| old))
    }

    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError> {
        Ok(self.at(address)?.fetch_add(addend, Ordering::AcqRel))
    }

    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// The machine around the engine of a test.
#[derive(Debug)]
pub struct TestHost {
    /// Its memory, as its processors see it.
    pub memory: TestMemory,
    /// What another processor does to it while the device reads.
    pub unsteady: RefCell<Option<Unsteady>>,
    /// What the device does to it, where a test wants to know.
    pub accesses: RefCell<Option<Vec<Access>>>,
    /// Frames the engine has put on the wire, oldest first.
    pub sent: VecDeque<Vec<u8>>,
    /// Messages raised, oldest first.
    pub raised: Vec<u16>,
    /// Ways to some addresses, and what they take; all others are by wire and take everything.
    pub ways: HashMap<[u8; 6], (Way, Room)>,
    /// The engine was told of less than enough room, and is to be told of more.
    pub wants_room: bool,
    /// Its peers are engines of the same process, or behind memory that is shared with it: payload is lent,
    /// and frames are in `inside`.
    pub lends: Option<Lending>,
    /// What is lent is copied at once, and is not there for longer than it is looked at.
    pub passing: bool,
    /// What has to be over when the next message is raised.
    pub over_by_interrupt: Option<Arc<Loan>>,
    /// What was sent then, oldest first.
    pub inside: VecDeque<Inside>,
}

/// A frame to another engine of the same process, with its payload if that is lent.
#[derive(Clone, Debug)]
pub struct Inside {
    /// The frame, or what of it is in front of the payload.
    pub frame: Vec<u8>,
    /// The payload.
    pub loan: Option<Arc<Loan>>,
}

/// What was in a memory when it was lent.
#[derive(Debug)]
struct Snapshot(Vec<u8>);

/// Packets that go as one and have these bytes, which are there while they are looked at.
pub fn passing(log_mtu: u8, bytes: Vec<u8>) -> Arc<Loan> {
    let length = bytes.len();
    let memory = Arc::new(Snapshot(bytes));
    Arc::new(Loan::passing(log_mtu, &memory, length))
}

impl Lent for Snapshot {
    fn read(&self, _: &Held<'_>, offset: usize, bytes: &mut [u8]) -> bool {
        let from = self.0.get(offset..offset + bytes.len());
        from.map(|from| bytes.copy_from_slice(from)).is_some()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl TestHost {
    /// The room to an address is what a test sets it to, less what was sent there since.
    fn take_room(&mut self, frame: &[u8]) {
        let destination = frame.first_chunk::<6>().expect("a frame has an address");
        if let Some((_, Room::Bytes(room))) = self.ways.get_mut(destination) {
            *room = room
                .checked_sub(frame.len() + FRAME_OVERHEAD)
                .expect("a frame that nobody had room for");
        }
    }
}

impl TestHost {
    fn note(&self, access: Access) {
        if let Some(accesses) = &mut *self.accesses.borrow_mut() {
            accesses.push(access);
        }
    }

    fn disturb(&self, address: u64, length: usize) {
        if let Some(unsteady) = &mut *self.unsteady.borrow_mut() {
            unsteady.disturb(&self.memory, address, length);
        }
    }
}

impl HostMemory for TestHost {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        self.note(Access::Read(address, bytes.len()));
        self.disturb(address, bytes.len());
        self.memory.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError> {
        self.note(Access::Write(address, bytes.len()));
        self.memory.write(address, bytes)
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaError> {
        self.note(Access::Load(address));
        self.disturb(address, 4);
        self.memory.load_u32(address)
    }

    fn load_u64(&self, address: u64) -> Result<u64, DmaError> {
        self.note(Access::Load(address));
        self.disturb(address, 8);
        self.memory.load_u64(address)
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError> {
        self.note(Access::Store(address, value.into()));
        self.memory.store_u32(address, value)
    }

    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError> {
        self.note(Access::Store(address, value));
        self.memory.store_u64(address, value)
    }

    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError> {
        self.note(Access::Exchange(address));
        self.memory.compare_exchange_u64(address, compare, new)
    }

    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError> {
        self.note(Access::Exchange(address));
        self.memory.fetch_add_u64(address, addend)
    }

    fn fence(&self) {
        self.note(Access::Fence);
        self.memory.fence();
    }

    fn lend(&self, address: u64, length: usize, loan: &mut Loan) -> Result<bool, DmaError> {
        let mut bytes = vec![0; length];
        self.memory.read(address, &mut bytes)?;
        loan.add(&Arc::new(Snapshot(bytes)), 0, length);
        Ok(true)
    }
}

impl Host for TestHost {
    fn transmit(&mut self, frame: &[u8]) {
        self.take_room(frame);
        let frame = frame.to_vec();
        if self.lends.is_some() {
            self.inside.push_back(Inside { frame, loan: None });
        } else {
            self.sent.push_back(frame);
        }
    }

    fn lends(&self, _: &[u8; 6]) -> Option<Lending> {
        self.lends
    }

    fn transmit_lent(&mut self, head: &[u8], loan: Arc<Loan>) {
        let loan = if self.passing {
            let held = loan.hold().expect("what was lent just now");
            let bytes = held.data().bytes().expect("its memory").into_owned();
            passing(loan.log_mtu(), bytes)
        } else {
            loan
        };
        self.inside.push_back(Inside {
            frame: head.to_vec(),
            loan: Some(loan),
        });
    }

    fn way(&self, destination: &[u8; 6]) -> Way {
        self.ways
            .get(destination)
            .map_or(Way::Wire, |(way, _)| *way)
    }

    fn room(&mut self, way: Way) -> Room {
        let mut rooms = self.ways.values().filter(|(other, _)| *other == way);
        let room = rooms
            .next()
            .map_or(Room::Bytes(usize::MAX), |(_, room)| *room);
        self.wants_room |= !matches!(room, Room::Bytes(bytes) if bytes >= ENOUGH_ROOM);
        room
    }

    fn raise(&mut self, message: u16) {
        assert!(message < MESSAGES, "message {message} does not exist");
        if let Some(loan) = self.over_by_interrupt.take() {
            assert!(loan.hold().is_none(), "told of before it is over");
        }
        self.raised.push(message);
    }
}

/// The driver's view of an event queue.
#[derive(Clone, Debug)]
struct DriverEq {
    ring: u64,
    log_entries: u8,
    /// The ring that was given to it since, as long as nothing was found there.
    next: Option<(u64, u8)>,
    consumer: u32,
}

impl DriverEq {
    fn new(ring: u64) -> Self {
        Self {
            ring,
            log_entries: EQ_LOG_ENTRIES,
            next: None,
            consumer: 0,
        }
    }
}

/// Where the entry of an index is in a ring.
fn event_slot(ring: u64, log_entries: u8, index: u32) -> u64 {
    ring + u64::from(index & ((1 << log_entries) - 1)) * size_of::<EventEntry>() as u64
}

/// The driver's view of a completion queue.
#[derive(Clone, Debug)]
struct DriverCq {
    ring: u64,
    record: u64,
    log_entries: u8,
    page: u32,
    consumer: u32,
}

/// The driver's view of a queue pair.
#[derive(Clone, Debug)]
struct DriverQp {
    send_ring: u64,
    receive_ring: u64,
    record: u64,
    log_blocks: u8,
    log_entries: u8,
    log_stride: u8,
    page: u32,
    send_producer: u32,
    receive_producer: u32,
}

/// The driver's view of a shared receive queue.
#[derive(Clone, Debug)]
struct DriverSrq {
    ring: u64,
    record: u64,
    log_entries: u8,
    log_stride: u8,
    producer: u32,
}

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions {
    /// Its number.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of both queues.
    pub cqn: u32,
    /// `QP_FLAG_*`.
    pub flags: u16,
    /// Base-2 logarithm of the send queue's blocks.
    pub log_blocks: u8,
    /// Base-2 logarithm of the receive queue's entries.
    pub log_entries: u8,
    /// Doorbell page.
    pub page: u32,
    /// The service it gives.
    pub service: Service,
    /// Shared receive queue, with `QP_FLAG_SRQ`.
    pub srqn: u32,
    /// XRC domain.
    pub xrcd: u32,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            qpn: 2,
            pd: 1,
            cqn: 1,
            flags: 0,
            log_blocks: 6,
            log_entries: 6,
            page: 1,
            service: Service::Rc,
            srqn: 0,
            xrcd: 0,
        }
    }
}

/// How two queue pairs are connected.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Queue pair number of the peer.
    pub qpn: u32,
    /// MAC address of the peer.
    pub mac: [u8; 6],
    /// GID of the peer.
    pub gid: [u8; 16],
    /// First sequence number to send.
    pub send_psn: u32,
    /// First sequence number to expect.
    pub receive_psn: u32,
    /// Base-2 logarithm of the path MTU.
    pub log_mtu: u8,
    /// Local ACK timeout.
    pub timeout: u8,
    /// Retries.
    pub retry_count: u8,
    /// Retries while the receiver is not ready.
    pub rnr_retry: u8,
    /// What it is told to wait at least, where a receive is not there: a code of the wire.
    pub min_rnr_timer: u8,
    /// Reads and atomics in flight, each way.
    pub depth: u8,
}

impl Peer {
    /// The path to it.
    pub fn address_vector(&self) -> AddressVector {
        AddressVector {
            mac: self.mac,
            vlan: VLAN_NONE,
            gid: self.gid,
            source_gid_index: 0,
            hop_limit: 64,
            ..AddressVector::zeroed()
        }
    }

    /// The part of a datagram to it.
    pub fn datagram(&self, qkey: u32) -> DatagramPart {
        DatagramPart {
            address_vector: self.address_vector(),
            qpn: self.qpn,
            qkey,
            ..DatagramPart::zeroed()
        }
    }
}

/// A work request to post.
#[derive(Clone, Debug)]
pub struct SendWork {
    /// What it does.
    pub opcode: SendOpcode,
    /// `SEND_*`; `SEND_INLINE` is set by [`SendWork::inline`].
    pub flags: u16,
    /// Immediate data.
    pub immediate: u32,
    /// The tag to invalidate.
    pub tag: u32,
    /// Extended connections: shared receive queue at the peer.
    pub srqn: u32,
    /// The opcode's own part, if it has one.
    pub part: Vec<u8>,
    /// Scatter/gather entries.
    pub sges: Vec<Sge>,
    /// Inline data instead.
    pub inline: Option<Vec<u8>>,
}

impl SendWork {
    /// A signaled work request.
    pub fn new(opcode: SendOpcode, sges: &[Sge]) -> Self {
        Self {
            opcode,
            flags: SEND_SIGNALED,
            immediate: 0,
            tag: 0,
            srqn: 0,
            part: Vec::new(),
            sges: sges.to_vec(),
            inline: None,
        }
    }

    /// The same, to or from the peer's memory.
    pub fn remote(mut self, address: u64, rkey: u32) -> Self {
        let part = RemotePart {
            address,
            rkey,
            ..RemotePart::zeroed()
        };
        self.part = part.as_bytes().to_vec();
        self
    }

    /// The same, as a datagram.
    pub fn datagram(self, part: &DatagramPart) -> Self {
        self.part(part)
    }

    /// The same, with the opcode's own part.
    pub fn part<P: Plain>(mut self, part: &P) -> Self {
        self.part = part.as_bytes().to_vec();
        self
    }

    /// The same, with these flags.
    pub fn flags(mut self, flags: u16) -> Self {
        self.flags = flags;
        self
    }

    /// The same, with immediate data; of no effect where the opcode has none.
    pub fn immediate(mut self, immediate: u32) -> Self {
        self.immediate = immediate;
        self
    }

    /// The same, with a tag to invalidate; of no effect where the opcode has none.
    pub fn invalidate(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// The same, to a shared receive queue of the peer.
    pub fn srqn(mut self, srqn: u32) -> Self {
        self.srqn = srqn;
        self
    }

    /// The same, with inline data.
    pub fn inline(mut self, data: &[u8]) -> Self {
        self.inline = Some(data.to_vec());
        self
    }

    /// The blocks to post.
    pub fn encode(&self) -> Vec<u8> {
        let (count, length, mut flags) = match &self.inline {
            Some(data) => (0, data.len(), self.flags | SEND_INLINE),
            None => (self.sges.len(), 0, self.flags),
        };
        let mut part = self.part.clone();
        let datagram = part.len() == size_of::<DatagramPart>();
        part.resize(opcode_part(self.opcode, datagram), 0);
        let immediate_at = match self.opcode {
            SendOpcode::SendImmediate if datagram => Some(offset_of!(DatagramPart, immediate)),
            SendOpcode::SendImmediate => Some(offset_of!(SendPart, immediate)),
            SendOpcode::WriteImmediate => Some(offset_of!(RemotePart, immediate)),
            _ => None,
        };
        let tag_at = match self.opcode {
            SendOpcode::SendInvalidate | SendOpcode::LocalInvalidate => {
                Some(offset_of!(SendPart, tag))
            }
            SendOpcode::RegisterSend => {
                Some(size_of::<FastRegisterPart>() + offset_of!(SendPart, tag))
            }
            SendOpcode::RegisterListSend => Some(size_of::<ListPart>() + offset_of!(SendPart, tag)),
            _ => None,
        };
        for (at, word) in [(immediate_at, self.immediate), (tag_at, self.tag)] {
            if let Some(place) = at
                .and_then(|at| part.get_mut(at..at + 4))
                .filter(|_| word != 0)
            {
                place.copy_from_slice(&word.to_le_bytes());
            }
        }
        let mut bytes = vec![0; size_of::<SendHeader>()];
        bytes.extend(part);
        match &self.inline {
            Some(data) => bytes.extend(data),
            None => {
                flags &= !SEND_INLINE;
                for sge in &self.sges {
                    bytes.extend(sge.as_bytes());
                }
            }
        }
        bytes.resize(bytes.len().next_multiple_of(BLOCK_SIZE), 0);
        let header = SendHeader {
            opcode: self.opcode.number(),
            blocks: (bytes.len() / BLOCK_SIZE) as u8,
            sge_count: count as u8,
            flags,
            inline_length: length as u16,
            srqn: self.srqn,
            ..SendHeader::zeroed()
        };
        bytes[..size_of::<SendHeader>()].copy_from_slice(header.as_bytes());
        bytes
    }
}

/// A memory region of a [`Node`].
#[derive(Clone, Debug)]
pub struct Region {
    /// Its tag.
    pub tag: u32,
    /// Address of the first byte, as work requests say it.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// DMA addresses of its pages.
    pub pages: Vec<u64>,
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

/// A machine with one device and its driver.
#[derive(Debug)]
pub struct Node {
    /// The device.
    pub engine: Engine,
    /// The machine.
    pub host: TestHost,
    /// The time, in nanoseconds.
    pub now: u64,
    /// MAC address.
    pub mac: [u8; 6],
    /// GID at index 0 once [`Node::set_address`] was called.
    pub gid: [u8; 16],
    /// Doorbells rung by [`Node::post_send`].
    pub send_doorbells: u64,
    next_page: u64,
    control_ring: u64,
    control_producer: u32,
    /// What the driver stores in `turn` of the control record before it starts the device.
    pub first_turn: u32,
    reply: u64,
    eqs: HashMap<u16, DriverEq>,
    cqs: HashMap<u32, DriverCq>,
    qps: HashMap<u32, DriverQp>,
    srqs: HashMap<u32, DriverSrq>,
    next_cookie: u32,
}

impl Node {
    /// What its device is told: everything as usual, but numbers of queue pairs and of shared
    /// receive queues begin as early as can be.
    pub fn config(mac: [u8; 6]) -> Config {
        let mut config = Config::new(mac, MESSAGES);
        config.qps.first = crate::qp::GSI_QPN + 1;
        config.srqs.first = 0;
        config
    }

    /// A machine whose device was powered on, and nothing else.
    pub fn power_on(number: u8) -> Self {
        Self::power_on_with(number, |_| {})
    }

    /// The same, where the device is told something else than usual.
    pub fn power_on_with(number: u8, change: impl FnOnce(&mut Config)) -> Self {
        let mac = [0x02, 0xfe, 0, 0, 0, number];
        let mut config = Self::config(mac);
        change(&mut config);
        let mut node = Self {
            engine: Engine::new(config),
            host: TestHost {
                memory: TestMemory::new(MEMORY_BASE, MEMORY_SIZE),
                unsteady: RefCell::new(None),
                accesses: RefCell::new(None),
                sent: VecDeque::new(),
                raised: Vec::new(),
                ways: HashMap::new(),
                wants_room: false,
                lends: None,
                passing: false,
                over_by_interrupt: None,
                inside: VecDeque::new(),
            },
            now: 1_000_000,
            mac,
            gid: crate::gid::gid_of_ipv4([10, 0, 0, number]),
            send_doorbells: 0,
            next_page: MEMORY_BASE,
            control_ring: 0,
            control_producer: 0,
            first_turn: u32::MAX,
            reply: 0,
            eqs: HashMap::new(),
            cqs: HashMap::new(),
            qps: HashMap::new(),
            srqs: HashMap::new(),
            next_cookie: 1,
        };
        node.reply = node.allocate(PAGE);
        node
    }

    /// A machine with a running device: address set, event queues 0 to 2, completion queue 1.
    pub fn new(number: u8) -> Self {
        Self::with_features(number, crate::FEATURES)
    }

    /// The same, where driver and device have agreed on these features.
    pub fn with_features(number: u8, features: u64) -> Self {
        let mut node = Self::power_on(number);
        node.boot_with(features);
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        node.set_address();
        node.create_cq(1, EQ_FIRST_HANDLER, 8);
        node
    }

    /// Zeroed, page-aligned, contiguous memory.
    pub fn allocate(&mut self, length: u64) -> u64 {
        let address = self.next_page;
        self.next_page += length.next_multiple_of(PAGE);
        assert!(self.next_page <= MEMORY_BASE + MEMORY_SIZE as u64);
        address
    }

    /// Pages that do not follow each other.
    pub fn allocate_pages(&mut self, count: usize) -> Vec<u64> {
        let start = self.allocate(count as u64 * PAGE);
        (0..count as u64).rev().map(|n| start + n * PAGE).collect()
    }

    /// A register write.
    pub fn write_register(&mut self, offset: usize, size: usize, value: u64) {
        self.engine.mmio_write(
            BAR_REGISTERS,
            offset as u64,
            size,
            value,
            self.now,
            &mut self.host,
        );
    }

    /// A register read.
    pub fn read_register(&mut self, offset: usize, size: usize) -> u64 {
        self.engine.mmio_read(BAR_REGISTERS, offset as u64, size)
    }

    /// The status register.
    pub fn status(&mut self) -> Status {
        Status(self.read_register(REG_STATUS, 4) as u32)
    }

    /// A doorbell.
    pub fn doorbell(&mut self, page: u32, offset: usize, word: u64) {
        let stride = self.engine.config().doorbell_log_stride;
        let at = (u64::from(page) << stride) + offset as u64;
        self.engine
            .mmio_write(BAR_DOORBELLS, at, 8, word, self.now, &mut self.host);
    }

    /// Handshake for all that is offered, boot block, start.
    pub fn boot(&mut self) {
        let features = self.read_register(REG_FEATURES, 8);
        self.boot_with(features);
    }

    /// The same for these features.
    pub fn boot_with(&mut self, features: u64) {
        self.boot_as(ABI_MINOR, features);
    }

    /// The same by a driver of this minor version.
    pub fn boot_as(&mut self, minor: u16, features: u64) {
        let record = control_record_offset(CQP_LOG_ENTRIES);
        self.control_ring = self.allocate(record + size_of::<ControlRecord>() as u64);
        self.control_producer = 0;
        let record = ControlRecord {
            turn: self.first_turn,
            ..ControlRecord::zeroed()
        };
        self.host.memory.put(self.control_record(), &record);
        self.eqs.clear();
        self.cqs.clear();
        self.qps.clear();
        self.srqs.clear();
        let ring = self.allocate((size_of::<EventEntry>() as u64) << EQ_LOG_ENTRIES);
        self.eqs.insert(EQ_CONTROL, DriverEq::new(ring));
        let boot = self.allocate(64);
        let block = BootBlock {
            cqp_ring: self.control_ring,
            eq0_ring: ring,
            cqp_log_entries: CQP_LOG_ENTRIES,
            eq0_log_entries: EQ_LOG_ENTRIES,
            eq0_message: 0,
            reserved0: 0,
            reserved1: [0; 5],
        };
        self.host.memory.put(boot, &block);
        let version = (u64::from(ABI_MAJOR) << 16) | u64::from(minor);
        self.write_register(REG_DRIVER_VERSION, 4, version);
        self.write_register(REG_DRIVER_FEATURES, 8, features);
        self.write_register(REG_BOOT, 8, boot);
        self.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
        assert_eq!(self.status().state(), Some(DeviceState::Running));
    }

    /// Puts a command into the ring as it is.
    pub fn put_command(&mut self, entry: &CommandEntry) {
        let slot = self.control_producer & ((1u32 << CQP_LOG_ENTRIES) - 1);
        let address = self.control_ring + u64::from(slot) * size_of::<CommandEntry>() as u64;
        self.host.memory.put(address, entry);
        self.control_producer = self.control_producer.wrapping_add(1);
    }

    /// The address of the word of the control record.
    pub fn control_record(&self) -> u64 {
        self.control_ring + control_record_offset(CQP_LOG_ENTRIES)
    }

    /// Has the record tell of the commands in the ring.
    pub fn tell_of_commands(&mut self) {
        let record = self.control_record();
        self.host.memory.put(record, &self.control_producer);
    }

    /// Rings for the commands in the ring, which the record tells of first.
    pub fn ring_control(&mut self) {
        self.tell_of_commands();
        self.doorbell(0, DOORBELL_CONTROL, u64::from(self.control_producer));
    }

    /// Posts a command and rings for it; nobody waits for its end. Returns its cookie.
    pub fn post_command<P: Plain>(&mut self, opcode: CommandOpcode, payload: &P) -> u32 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.put_command(&CommandEntry::new(opcode, cookie, (0, 0), payload));
        self.ring_control();
        cookie
    }

    /// The commands that were answered since the last call: cookies and statuses.
    pub fn answers(&mut self) -> Vec<(u32, CommandStatus)> {
        let answered = |event: &EventEntry| event.code == EventCode::CommandDone.number();
        let events = self.events(EQ_CONTROL).into_iter().filter(answered);
        let status = |event: EventEntry| {
            let status = CommandStatus::from_number(event.param0 as u8);
            (event.id, status.expect("unknown status"))
        };
        events.map(status).collect()
    }

    /// Has commands on tags carried out so many milliseconds after they were taken up.
    pub fn hold_tags(&mut self, milliseconds: f64) {
        let rules = Misbehaviour {
            hold_tags: milliseconds,
            ..Misbehaviour::default()
        };
        self.engine.misbehave(rules, self.now, &mut self.host);
    }

    /// Has the doorbells of the control queue come so many milliseconds late.
    pub fn hold_control(&mut self, milliseconds: f64) {
        let rules = Misbehaviour {
            hold_control: milliseconds,
            ..Misbehaviour::default()
        };
        self.engine.misbehave(rules, self.now, &mut self.host);
    }

    /// Posts commands, rings once, and returns their statuses in order.
    pub fn commands(&mut self, entries: &[CommandEntry]) -> Vec<CommandStatus> {
        let mut cookies = Vec::new();
        for entry in entries {
            let mut entry = *entry;
            entry.cookie = self.next_cookie;
            self.next_cookie += 1;
            cookies.push(entry.cookie);
            self.put_command(&entry);
        }
        self.ring_control();
        // Most are done by the doorbell, long ones in the turns that follow.
        while self.engine.has_commands() && self.engine.is_running() {
            self.engine.poll(self.now, &mut self.host);
        }
        let done: HashMap<u32, u64> = self
            .events(EQ_CONTROL)
            .into_iter()
            .filter(|event| event.code == EventCode::CommandDone.number())
            .map(|event| (event.id, event.param0))
            .collect();
        cookies
            .iter()
            .map(|cookie| {
                let status = done.get(cookie).expect("the command is not done");
                CommandStatus::from_number(*status as u8).expect("unknown status")
            })
            .collect()
    }

    /// Executes one command as it stands; returns the event that it is done.
    pub fn command_done(&mut self, entry: &CommandEntry) -> EventEntry {
        let entry = CommandEntry {
            cookie: self.next_cookie,
            ..*entry
        };
        self.next_cookie += 1;
        self.put_command(&entry);
        self.ring_control();
        while self.engine.has_commands() && self.engine.is_running() {
            self.engine.poll(self.now, &mut self.host);
        }
        let events = self.events(EQ_CONTROL);
        let done = events.iter().find(|event| {
            event.code == EventCode::CommandDone.number() && event.id == entry.cookie
        });
        *done.expect("the command is not done")
    }

    /// Executes one command.
    pub fn command<P: Plain>(&mut self, opcode: CommandOpcode, payload: &P) -> CommandStatus {
        let reply = match opcode {
            CommandOpcode::QueryDevice
            | CommandOpcode::QueryClock
            | CommandOpcode::QueryQueuePair
            | CommandOpcode::QuerySrq
            | CommandOpcode::QueryCounters
            | CommandOpcode::TakeFaults
            | CommandOpcode::QueryVectorMap
            | CommandOpcode::QueryCompletionQueue
            | CommandOpcode::QueryTag
            | CommandOpcode::QueryQueuePairCounters => (self.reply, PAGE as u32),
            _ => (0, 0),
        };
        let entry = CommandEntry::new(opcode, 0, reply, payload);
        self.commands(&[entry])[0]
    }

    /// Executes a command whose payload knows its opcode; it must succeed.
    pub fn execute<P: Command>(&mut self, payload: &P) {
        assert_eq!(self.command(P::OPCODE, payload), CommandStatus::Ok);
    }

    /// Executes a command on an object by number.
    pub fn object_command(&mut self, opcode: CommandOpcode, number: u32) -> CommandStatus {
        self.command(
            opcode,
            &ObjectNumber {
                number,
                reserved: 0,
            },
        )
    }

    /// Executes a query.
    pub fn query<R: Plain>(
        &mut self,
        opcode: CommandOpcode,
        number: u32,
    ) -> Result<R, CommandStatus> {
        match self.object_command(opcode, number) {
            CommandStatus::Ok => Ok(self.host.memory.get(self.reply)),
            status => Err(status),
        }
    }

    /// Makes an event queue.
    pub fn create_eq(&mut self, eqn: u16, message: u16) {
        let size = (size_of::<EventEntry>() as u64) << EQ_LOG_ENTRIES;
        let ring = self.allocate(size);
        self.execute(&CreateEventQueue {
            eqn,
            message,
            log_entries: EQ_LOG_ENTRIES,
            overflow: 0,
            priority: 0,
            reserved: 0,
            ring: Buffer::contiguous(ring, size),
        });
        self.eqs.insert(eqn, DriverEq::new(ring));
    }

    /// Takes what is in an event queue; does not ring its doorbell.
    pub fn events(&mut self, eqn: u16) -> Vec<EventEntry> {
        let eq = self.eqs.get_mut(&eqn).expect("no such event queue");
        let mut events = Vec::new();
        loop {
            let mut address = event_slot(eq.ring, eq.log_entries, eq.consumer);
            let mut entry: EventEntry = self.host.memory.get(address);
            if let Some((ring, log_entries)) = eq.next.filter(|_| entry.code == 0) {
                // The same index in the new ring; once there is one, the old one is forgotten.
                address = event_slot(ring, log_entries, eq.consumer);
                entry = self.host.memory.get(address);
                if entry.code != 0 {
                    (eq.ring, eq.log_entries, eq.next) = (ring, log_entries, None);
                }
            }
            if entry.code == 0 {
                return events;
            }
            self.host.memory.put(address, &0u32);
            eq.consumer = eq.consumer.wrapping_add(1);
            events.push(entry);
        }
    }

    /// Gives an event queue another ring of `1 << log_entries` entries.
    pub fn switch_eq(&mut self, eqn: u16, log_entries: u8) -> CommandStatus {
        let size = (size_of::<EventEntry>() as u64) << log_entries;
        let ring = self.allocate(size);
        let eq = self.eqs.get_mut(&eqn).expect("no such event queue");
        assert!(eq.next.is_none(), "two rings are enough");
        eq.next = Some((ring, log_entries));
        let status = self.command(
            CommandOpcode::SwitchEventQueue,
            &SwitchEventQueue {
                eqn,
                log_entries,
                ring: Buffer::contiguous(ring, size),
                ..SwitchEventQueue::zeroed()
            },
        );
        if status != CommandStatus::Ok {
            let eq = self.eqs.get_mut(&eqn).expect("no such event queue");
            eq.next = None;
        }
        status
    }

    /// Whether the driver still consumes from the ring before a switch.
    pub fn is_switching(&self, eqn: u16) -> bool {
        self.eqs[&eqn].next.is_some()
    }

    /// Base-2 logarithm of the entries of the ring that an event queue has.
    pub fn eq_log_entries(&self, eqn: u16) -> u8 {
        let eq = &self.eqs[&eqn];
        eq.next
            .map_or(eq.log_entries, |(_, log_entries)| log_entries)
    }

    /// What is in an event queue and was not consumed, from entry `from` on; all of it stays.
    pub fn unread_events(&self, eqn: u16, from: u32) -> Vec<EventEntry> {
        let eq = &self.eqs[&eqn];
        let end = self.engine.core().eqs.written(eqn);
        let mut events = Vec::new();
        for ahead in 0..end.wrapping_sub(eq.consumer) {
            let index = eq.consumer.wrapping_add(ahead);
            let at = |ring, log_entries| -> EventEntry {
                self.host.memory.get(event_slot(ring, log_entries, index))
            };
            // In the old ring no further than a round from what was consumed.
            let mut entry = at(eq.ring, eq.log_entries);
            if let Some((ring, log_entries)) = eq.next {
                if entry.code == 0 || ahead >> eq.log_entries != 0 {
                    entry = at(ring, log_entries);
                }
            }
            assert_ne!(entry.code, 0, "an entry that was written is not there");
            if index.wrapping_sub(from) <= u32::MAX / 2 {
                events.push(entry);
            }
        }
        events
    }

    /// Where the next event of an event queue is, which is there.
    pub fn next_event_slot(&mut self, eqn: u16) -> u64 {
        let eq = self.eqs.get_mut(&eqn).expect("no such event queue");
        let at = event_slot(eq.ring, eq.log_entries, eq.consumer);
        if self.host.memory.get::<EventEntry>(at).code != 0 {
            return at;
        }
        let (ring, log_entries) = eq.next.expect("there is no event");
        (eq.ring, eq.log_entries, eq.next) = (ring, log_entries, None);
        event_slot(ring, log_entries, eq.consumer)
    }

    /// The next event was consumed.
    pub fn skip_event(&mut self, eqn: u16) {
        let eq = self.eqs.get_mut(&eqn).expect("no such event queue");
        eq.consumer = eq.consumer.wrapping_add(1);
    }

    /// Where replies to queries are.
    pub fn reply(&self) -> u64 {
        self.reply
    }

    /// How many events of an event queue were consumed.
    pub fn consumed_events(&self, eqn: u16) -> u32 {
        self.eqs[&eqn].consumer
    }

    /// Sets entries of the vector map from processor `first` on: event queue and message.
    pub fn map_vectors(
        &mut self,
        row: SubFunction,
        first: u16,
        entries: &[(u16, u16)],
    ) -> CommandStatus {
        let mut command = SetVectorMap {
            sub_function: row.number(),
            first,
            count: entries.len() as u16,
            ..SetVectorMap::zeroed()
        };
        for (entry, &(eqn, message)) in command.entries.iter_mut().zip(entries) {
            *entry = VectorMapEntry { eqn, message };
        }
        self.command(CommandOpcode::SetVectorMap, &command)
    }

    /// Takes what is in an event queue: codes and numbers.
    pub fn event_codes(&mut self, eqn: u16) -> Vec<(EventCode, u32)> {
        self.events(eqn)
            .iter()
            .map(|event| (EventCode::from_number(event.code).expect("code"), event.id))
            .collect()
    }

    /// Where the ring of an event queue is.
    pub fn event_ring(&self, eqn: u16) -> Range<u64> {
        let eq = &self.eqs[&eqn];
        eq.ring..eq.ring + ((size_of::<EventEntry>() as u64) << eq.log_entries)
    }

    /// Where the ring of a completion queue is.
    pub fn completion_ring(&self, cqn: u32) -> Range<u64> {
        let cq = &self.cqs[&cqn];
        cq.ring..cq.ring + ((size_of::<CompletionEntry>() as u64) << cq.log_entries)
    }

    /// Where the rings and the record of a queue pair are.
    pub fn qp_buffer(&self, qpn: u32) -> Range<u64> {
        let qp = &self.qps[&qpn];
        qp.send_ring..qp.record + size_of::<QueuePairRecord>() as u64
    }

    /// Where the receive queue of a queue pair begins.
    pub fn receive_ring(&self, qpn: u32) -> u64 {
        self.qps[&qpn].receive_ring
    }

    /// Where the ring and the record of a shared receive queue are.
    pub fn srq_buffer(&self, srqn: u32) -> Range<u64> {
        let srq = &self.srqs[&srqn];
        srq.ring..srq.record + size_of::<SrqRecord>() as u64
    }

    /// Tells how much was taken from an event queue, and arms it or not.
    pub fn ring_eq(&mut self, eqn: u16, arm: bool) {
        let read_index = self.eqs[&eqn].consumer;
        let doorbell = EventDoorbell {
            eqn,
            read_index,
            relative: false,
            valid: true,
            arm,
            quiet: false,
            disarm: false,
        };
        self.doorbell(0, DOORBELL_EVENT_QUEUE, doorbell.encode());
    }

    /// The command that makes a completion queue, armed from doorbell page 1.
    pub fn cq_template(&mut self, cqn: u32, eqn: u16, log_entries: u8) -> CreateCompletionQueue {
        let ring_size = (size_of::<CompletionEntry>() as u64) << log_entries;
        let length = ring_size + size_of::<CompletionRecord>() as u64;
        let ring = self.allocate(length);
        CreateCompletionQueue {
            cqn,
            eqn,
            log_entries,
            reserved0: 0,
            doorbell_page: 1,
            record_offset: ring_size as u32,
            buffer: Buffer::contiguous(ring, length),
            processor: 0,
            reserved1: [0; 3],
        }
    }

    /// Makes a completion queue, armed from doorbell page 1.
    pub fn create_cq(&mut self, cqn: u32, eqn: u16, log_entries: u8) {
        let command = self.cq_template(cqn, eqn, log_entries);
        self.execute(&command);
        let ring = command.buffer.root;
        self.cqs.insert(
            cqn,
            DriverCq {
                ring,
                record: ring + u64::from(command.record_offset),
                log_entries,
                page: 1,
                consumer: 0,
            },
        );
    }

    /// Gives a completion queue a ring of another size.
    pub fn resize_cq(&mut self, cqn: u32, log_entries: u8) -> CommandStatus {
        let ring_size = (size_of::<CompletionEntry>() as u64) << log_entries;
        let length = ring_size + size_of::<CompletionRecord>() as u64;
        let ring = self.allocate(length);
        let record = ring + ring_size;
        let consumer = self.cqs[&cqn].consumer;
        self.host.memory.put(record, &consumer);
        for index in (0..1 << log_entries).map(|n| consumer.wrapping_add(n)) {
            let slot = u64::from(index & ((1 << log_entries) - 1));
            let entry = CompletionEntry {
                phase: phase_of(index, log_entries) ^ COMPLETION_PHASE,
                ..CompletionEntry::zeroed()
            };
            let at = ring + slot * size_of::<CompletionEntry>() as u64;
            self.host.memory.put(at, &entry);
        }
        let status = self.command(
            CommandOpcode::ResizeCompletionQueue,
            &ResizeCompletionQueue {
                cqn,
                log_entries,
                reserved: [0; 3],
                record_offset: ring_size as u32,
                reserved1: 0,
                buffer: Buffer::contiguous(ring, length),
            },
        );
        if status == CommandStatus::Ok {
            let cq = self.cqs.get_mut(&cqn).expect("no such completion queue");
            cq.ring = ring;
            cq.record = record;
            cq.log_entries = log_entries;
        }
        status
    }

    /// The completion with free-running index `index`, if it is there.
    fn completion(&self, cqn: u32, index: u32) -> Option<CompletionEntry> {
        let cq = &self.cqs[&cqn];
        let slot = u64::from(index & ((1 << cq.log_entries) - 1));
        let entry: CompletionEntry = self
            .host
            .memory
            .get(cq.ring + slot * size_of::<CompletionEntry>() as u64);
        (entry.phase & COMPLETION_PHASE == phase_of(index, cq.log_entries)).then_some(entry)
    }

    /// Takes a completion.
    pub fn poll_cq(&mut self, cqn: u32) -> Option<CompletionEntry> {
        let entry = self.completion(cqn, self.cqs[&cqn].consumer)?;
        let cq = self.cqs.get_mut(&cqn).expect("no such completion queue");
        cq.consumer = cq.consumer.wrapping_add(1);
        self.host.memory.put(cq.record, &cq.consumer);
        Some(entry)
    }

    /// The index of the first completion that is not there, as a host finds it out.
    pub fn seen(&self, cqn: u32) -> u32 {
        let cq = &self.cqs[&cqn];
        first_unwritten(cq.consumer, cq.log_entries, |index| {
            self.completion(cqn, index).is_some()
        })
    }

    /// Arms a completion queue.
    pub fn arm_cq(&mut self, cqn: u32, sequence: u8, solicited: bool) {
        self.arm_cq_from(cqn, self.seen(cqn), sequence, solicited);
    }

    /// Arms a completion queue as one who looked at it before.
    pub fn arm_cq_from(&mut self, cqn: u32, seen: u32, sequence: u8, solicited: bool) {
        let doorbell = CompletionDoorbell {
            cqn,
            seen,
            sequence,
            solicited,
        };
        self.doorbell(self.cqs[&cqn].page, DOORBELL_COMPLETION, doorbell.encode());
    }

    /// Sets GID 0 to [`Node::gid`].
    pub fn set_address(&mut self) {
        let command = SetGid {
            gid: self.gid,
            index: 0,
            vlan: VLAN_NONE,
            mac: self.mac,
            port: 0,
            reserved: [0; 5],
        };
        self.execute(&command);
    }

    /// Registers fresh memory of `length` bytes: scattered 4 KiB pages with a table, from an
    /// address and a first byte that are not multiples of the page.
    pub fn register(&mut self, tag: u32, pd: u32, access: u32, length: u64) -> Region {
        let (command, region) = self.region(tag, pd, access, length);
        self.execute(&command);
        region
    }

    /// Such memory, and the command that registers it.
    pub fn region(
        &mut self,
        tag: u32,
        pd: u32,
        access: u32,
        length: u64,
    ) -> (RegisterRegion, Region) {
        let fbo = 64u64;
        let pages = self.allocate_pages((fbo + length).div_ceil(PAGE) as usize);
        let tables: Vec<u64> = pages
            .chunks(ATT_TABLE_ENTRIES)
            .map(|chunk| self.table(chunk))
            .collect();
        let (order, root) = match tables[..] {
            [table] => (AttOrder::First, table),
            _ => (AttOrder::Second, self.table(&tables)),
        };
        let address = 0x7f00_0000_0000 + u64::from(tag) * 0x1000_0000 + fbo;
        let command = RegisterRegion {
            tag,
            pd,
            access,
            flags: 0,
            address,
            buffer: Buffer {
                root,
                length,
                fbo: fbo as u32,
                page_shift: PAGE_SHIFT_MIN,
                order: order.number(),
                reserved: 0,
            },
        };
        let region = Region {
            tag,
            address,
            length,
            pages,
        };
        (command, region)
    }

    /// A table of addresses.
    pub fn table(&mut self, entries: &[u64]) -> u64 {
        let table = self.allocate((entries.len() * 8) as u64);
        for (index, entry) in entries.iter().enumerate() {
            self.host.memory.put(table + index as u64 * 8, entry);
        }
        table
    }

    fn region_address(region: &Region, offset: u64) -> (u64, usize) {
        let position = 64 + offset;
        let page = region.pages[(position / PAGE) as usize];
        (page + position % PAGE, (PAGE - position % PAGE) as usize)
    }

    /// Writes to a region, as the processor would.
    pub fn fill(&mut self, region: &Region, offset: u64, mut bytes: &[u8]) {
        let mut offset = offset;
        while !bytes.is_empty() {
            let (address, contiguous) = Self::region_address(region, offset);
            let (piece, rest) = bytes.split_at(contiguous.min(bytes.len()));
            self.host.memory.write(address, piece).expect("test memory");
            offset += piece.len() as u64;
            bytes = rest;
        }
    }

    /// Reads from a region, as the processor would.
    pub fn contents(&self, region: &Region, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut done = 0;
        while done < length {
            let (address, contiguous) = Self::region_address(region, offset + done as u64);
            let piece = contiguous.min(length - done);
            self.host
                .memory
                .read(address, &mut bytes[done..done + piece])
                .expect("test memory");
            done += piece;
        }
        bytes
    }

    /// The command that makes a queue pair, and the driver's view of it.
    fn qp_command(&mut self, options: QpOptions) -> (CreateQueuePair, DriverQp) {
        let log_stride = RQ_MAX_LOG_STRIDE;
        let send_size = (BLOCK_SIZE as u64) << options.log_blocks;
        let receive_size = 1u64 << options.log_entries << log_stride;
        let length = send_size + receive_size + size_of::<QueuePairRecord>() as u64;
        let buffer = self.allocate(length);
        let command = CreateQueuePair {
            qpn: options.qpn,
            pd: options.pd,
            send_cqn: options.cqn,
            receive_cqn: options.cqn,
            service: options.service.number(),
            transport: Transport::RoceV2.number(),
            flags: options.flags,
            sq_log_blocks: options.log_blocks,
            rq_log_entries: options.log_entries,
            rq_log_stride: log_stride,
            port: 0,
            srqn: options.srqn,
            doorbell_page: options.page,
            buffer: Buffer::contiguous(buffer, length),
            sq_offset: 0,
            rq_offset: send_size as u32,
            record_offset: (send_size + receive_size) as u32,
            xrcd: options.xrcd,
            reserved: [0; 3],
        };
        let qp = DriverQp {
            send_ring: buffer,
            receive_ring: buffer + send_size,
            record: buffer + send_size + receive_size,
            log_blocks: options.log_blocks,
            log_entries: options.log_entries,
            log_stride,
            page: options.page,
            send_producer: 0,
            receive_producer: 0,
        };
        (command, qp)
    }

    /// A command that would make a queue pair, to be changed before it is executed.
    pub fn qp_template(&mut self, options: QpOptions) -> CreateQueuePair {
        self.qp_command(options).0
    }

    /// Makes a queue pair.
    pub fn create_qp(&mut self, options: QpOptions) {
        let (command, qp) = self.qp_command(options);
        self.execute(&command);
        self.qps.insert(options.qpn, qp);
    }

    /// The command that makes a shared receive queue of protection domain 1.
    fn srq_command(&mut self, srqn: u32, log_entries: u8) -> (CreateSrq, DriverSrq) {
        let log_stride = RQ_MAX_LOG_STRIDE;
        let size = 1u64 << log_entries << log_stride;
        let length = size + size_of::<SrqRecord>() as u64;
        let ring = self.allocate(length);
        let command = CreateSrq {
            srqn,
            pd: 1,
            log_entries,
            log_stride,
            flags: 0,
            doorbell_page: 1,
            buffer: Buffer::contiguous(ring, length),
            ring_offset: 0,
            record_offset: size as u32,
            xrcd: 0,
            cqn: 0,
        };
        let srq = DriverSrq {
            ring,
            record: ring + size,
            log_entries,
            log_stride,
            producer: 0,
        };
        (command, srq)
    }

    /// A command that would make a shared receive queue, to be changed before it is executed.
    pub fn srq_template(&mut self, srqn: u32, log_entries: u8) -> CreateSrq {
        self.srq_command(srqn, log_entries).0
    }

    /// Makes a shared receive queue; `extended` are XRC domain and completion queue.
    pub fn create_srq(&mut self, srqn: u32, log_entries: u8, extended: Option<(u32, u32)>) {
        let (mut command, srq) = self.srq_command(srqn, log_entries);
        if let Some((xrcd, cqn)) = extended {
            command.flags = SRQ_FLAG_XRC;
            command.xrcd = xrcd;
            command.cqn = cqn;
        }
        self.execute(&command);
        self.srqs.insert(srqn, srq);
    }

    /// Entries of a shared receive queue.
    pub fn srq_entries(&self, srqn: u32) -> u32 {
        1 << self.srqs[&srqn].log_entries
    }

    /// Gives a shared receive queue another ring. `change` may spoil the command.
    pub fn resize_srq(
        &mut self,
        srqn: u32,
        log_entries: u8,
        change: impl FnOnce(&mut ResizeSrq),
    ) -> CommandStatus {
        let (create, mut srq) = self.srq_command(srqn, log_entries);
        srq.producer = self.srqs[&srqn].producer;
        self.host.memory.put(srq.record, &srq.producer);
        let mut command = ResizeSrq {
            srqn,
            log_entries,
            reserved: [0; 3],
            ring_offset: create.ring_offset,
            record_offset: create.record_offset,
            buffer: create.buffer,
        };
        change(&mut command);
        let status = self.command(CommandOpcode::ResizeSrq, &command);
        if status == CommandStatus::Ok {
            self.srqs.insert(srqn, srq);
        }
        status
    }

    /// Posts a receive to a shared receive queue under a name; returns that.
    pub fn post_srq(&mut self, srqn: u32, sges: &[Sge]) -> u32 {
        let srq = self.srqs.get_mut(&srqn).expect("no such queue");
        let slot = srq.producer & ((1 << srq.log_entries) - 1);
        let mut bytes = ReceiveHeader {
            sge_count: sges.len() as u32,
            id: srq.producer ^ 0x5a00,
            reserved: [0; 2],
        }
        .as_bytes()
        .to_vec();
        for sge in sges {
            bytes.extend(sge.as_bytes());
        }
        self.host
            .memory
            .write(srq.ring + (u64::from(slot) << srq.log_stride), &bytes)
            .expect("test memory");
        let id = srq.producer ^ 0x5a00;
        srq.producer = srq.producer.wrapping_add(1);
        self.host.memory.put(srq.record, &srq.producer);
        id
    }

    /// Makes queue pair 2, which sends datagrams, and so many members of a group, none of whom receives. Returns a frame
    /// to them; they have had a first one.
    pub fn crowd(&mut self, members: usize) -> Vec<u8> {
        const QKEY: u32 = 7;
        let gid = crate::gid::gid_of_ipv4(CROWD);
        let options = QpOptions {
            service: Service::Ud,
            ..QpOptions::default()
        };
        self.create_qp(options);
        self.start_datagrams(2, QKEY);
        let template = self.qp_template(options);
        for qpn in (3..).take(members) {
            self.execute(&CreateQueuePair { qpn, ..template });
            self.start_datagrams(qpn, QKEY);
            let member = MulticastMember {
                gid,
                qpn,
                reserved: 0,
            };
            let attach = CommandOpcode::AttachMulticast;
            assert_eq!(self.command(attach, &member), CommandStatus::Ok);
        }
        let group = Peer {
            gid,
            mac: [1, 0, 0x5e, CROWD[1], CROWD[2], CROWD[3]],
            ..self.as_peer(crate::multicast::MULTICAST_QPN)
        };
        let send = SendWork::new(SendOpcode::Send, &[]).datagram(&group.datagram(QKEY));
        self.post_send(2, &send);
        self.settle();
        self.host.sent.pop_front().unwrap()
    }

    /// From RESET to RTS, for datagrams.
    pub fn start_datagrams(&mut self, qpn: u32, qkey: u32) {
        let steps = [
            (QueuePairStateCode::Init, MODIFY_PKEY | MODIFY_QKEY),
            (QueuePairStateCode::Rtr, 0),
            (QueuePairStateCode::Rts, MODIFY_SEND_PSN),
        ];
        for (state, mask) in steps {
            self.execute(&ModifyQueuePair {
                qpn,
                mask: MODIFY_STATE | mask,
                state: state.number(),
                qkey,
                send_psn: 7,
                ..ModifyQueuePair::zeroed()
            });
        }
    }

    /// From RESET to RTS, for an unreliable connection.
    pub fn connect_unreliable(&mut self, qpn: u32, peer: &Peer) {
        self.to_init(qpn);
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE
                | MODIFY_ADDRESS_VECTOR
                | MODIFY_MTU
                | MODIFY_DESTINATION
                | MODIFY_RECEIVE_PSN,
            state: QueuePairStateCode::Rtr.number(),
            log_mtu: peer.log_mtu,
            destination_qpn: peer.qpn,
            receive_psn: peer.receive_psn,
            address_vector: peer.address_vector(),
            ..ModifyQueuePair::zeroed()
        });
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE | MODIFY_SEND_PSN,
            state: QueuePairStateCode::Rts.number(),
            send_psn: peer.send_psn,
            ..ModifyQueuePair::zeroed()
        });
    }

    /// The address of a queue pair's doorbell record.
    pub fn qp_record(&self, qpn: u32) -> u64 {
        self.qps[&qpn].record
    }

    /// The doorbell record of a queue pair.
    pub fn record(&self, qpn: u32) -> QueuePairRecord {
        self.host.memory.get(self.qp_record(qpn))
    }

    /// Changes the state of a queue pair, nothing else.
    pub fn set_state(&mut self, qpn: u32, state: QueuePairStateCode) -> CommandStatus {
        if state == QueuePairStateCode::Reset {
            let qp = self.qps.get_mut(&qpn).expect("no such queue pair");
            qp.send_producer = 0;
            qp.receive_producer = 0;
            self.host.memory.put(qp.record, &0u64);
        }
        self.command(
            CommandOpcode::ModifyQueuePair,
            &ModifyQueuePair {
                qpn,
                mask: MODIFY_STATE,
                state: state.number(),
                ..ModifyQueuePair::zeroed()
            },
        )
    }

    /// The state of a queue pair.
    pub fn qp_state(&mut self, qpn: u32) -> QueuePairStateCode {
        let state: QueuePairState = self
            .query(CommandOpcode::QueryQueuePair, qpn)
            .expect("no such queue pair");
        QueuePairStateCode::from_number(state.attributes.state).expect("state")
    }

    /// To state INIT, with every right for the peer.
    pub fn to_init(&mut self, qpn: u32) {
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE | MODIFY_PKEY | MODIFY_ACCESS,
            state: QueuePairStateCode::Init.number(),
            access: ACCESS_REMOTE,
            ..ModifyQueuePair::zeroed()
        });
    }

    /// From INIT to RTR.
    pub fn to_rtr(&mut self, qpn: u32, peer: &Peer) {
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE
                | MODIFY_ADDRESS_VECTOR
                | MODIFY_MTU
                | MODIFY_DESTINATION
                | MODIFY_RECEIVE_PSN
                | MODIFY_IRD
                | MODIFY_MIN_RNR_TIMER,
            state: QueuePairStateCode::Rtr.number(),
            log_mtu: peer.log_mtu,
            destination_qpn: peer.qpn,
            receive_psn: peer.receive_psn,
            ird: peer.depth,
            min_rnr_timer: peer.min_rnr_timer,
            address_vector: AddressVector {
                mac: peer.mac,
                vlan: VLAN_NONE,
                gid: peer.gid,
                source_gid_index: 0,
                hop_limit: 64,
                ..AddressVector::zeroed()
            },
            ..ModifyQueuePair::zeroed()
        });
    }

    /// From RTR to RTS.
    pub fn to_rts(&mut self, qpn: u32, peer: &Peer) {
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE
                | MODIFY_SEND_PSN
                | MODIFY_TIMEOUT
                | MODIFY_RETRY
                | MODIFY_RNR_RETRY
                | MODIFY_ORD,
            state: QueuePairStateCode::Rts.number(),
            send_psn: peer.send_psn,
            timeout: peer.timeout,
            retry_count: peer.retry_count,
            rnr_retry: peer.rnr_retry,
            ord: peer.depth,
            ..ModifyQueuePair::zeroed()
        });
    }

    /// From RESET to RTS.
    pub fn connect(&mut self, qpn: u32, peer: &Peer) {
        self.to_init(qpn);
        self.to_rtr(qpn, peer);
        self.to_rts(qpn, peer);
    }

    /// How another node would be connected to queue pair `qpn` of this one.
    pub fn as_peer(&self, qpn: u32) -> Peer {
        Peer {
            qpn,
            mac: self.mac,
            gid: self.gid,
            send_psn: 0xff_fff0,
            receive_psn: 0xff_fff0,
            log_mtu: 10,
            timeout: 10,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            depth: crate::qp::MAX_READ,
        }
    }

    /// Writes blocks to a send queue without telling anyone.
    pub fn write_blocks(&mut self, qpn: u32, blocks: &[u8]) {
        let qp = self.qps.get_mut(&qpn).expect("no such queue pair");
        for block in blocks.chunks(BLOCK_SIZE) {
            let slot = u64::from(qp.send_producer & ((1 << qp.log_blocks) - 1));
            self.host
                .memory
                .write(qp.send_ring + slot * BLOCK_SIZE as u64, block)
                .expect("test memory");
            qp.send_producer = qp.send_producer.wrapping_add(1);
        }
    }

    /// Updates the record and rings if the device asks for it. Returns the producer index.
    pub fn publish_send(&mut self, qpn: u32) -> u32 {
        let qp = &self.qps[&qpn];
        let (producer, page, record) = (qp.send_producer, qp.page, qp.record);
        self.host.memory.put(record, &producer);
        if self.record(qpn).send_wake != 0 {
            self.send_doorbells += 1;
            self.doorbell(page, DOORBELL_SEND, send_doorbell(qpn, producer));
        }
        producer
    }

    /// Posts a work request; returns the index of its first block.
    pub fn post_send(&mut self, qpn: u32, work: &SendWork) -> u32 {
        let index = self.qps[&qpn].send_producer;
        self.write_blocks(qpn, &work.encode());
        self.publish_send(qpn);
        index
    }

    /// Posts a receive; returns its index.
    pub fn post_recv(&mut self, qpn: u32, sges: &[Sge]) -> u32 {
        let qp = self.qps.get_mut(&qpn).expect("no such queue pair");
        let index = qp.receive_producer;
        let mut bytes = ReceiveHeader {
            sge_count: sges.len() as u32,
            id: 0,
            reserved: [0; 2],
        }
        .as_bytes()
        .to_vec();
        for sge in sges {
            bytes.extend(sge.as_bytes());
        }
        let slot = u64::from(index & ((1 << qp.log_entries) - 1));
        self.host
            .memory
            .write(qp.receive_ring + (slot << qp.log_stride), &bytes)
            .expect("test memory");
        qp.receive_producer = index.wrapping_add(1);
        let (record, page) = (qp.record, qp.page);
        self.host.memory.put(record + 4, &qp.receive_producer);
        if self.record(qpn).receive_wake != 0 {
            self.doorbell(page, DOORBELL_RECEIVE, queue_doorbell(qpn));
        }
        index
    }

    /// Polls the engine until it has nothing to do before some later time.
    pub fn settle(&mut self) {
        self.engine.look_around(self.now, &mut self.host);
        for _ in 0..10_000 {
            self.engine.poll(self.now, &mut self.host);
            match self.engine.next_timeout() {
                Some(at) if at <= self.now => {}
                _ => return,
            }
        }
        panic!("the engine does not come to rest");
    }

    /// A frame from another engine of the same process.
    pub fn receive_inside(&mut self, inside: &Inside) {
        let Inside { frame, loan } = inside;
        match loan {
            Some(loan) => (self.engine).receive_lent(frame, loan, self.now, &mut self.host),
            None => {
                let medium = Medium::Memory;
                (self.engine).receive_frame(frame, medium, self.now, &mut self.host);
            }
        }
    }

    /// A frame from the wire.
    pub fn receive(&mut self, frame: &[u8]) -> Disposition {
        self.engine
            .receive_frame(frame, Medium::Wire, self.now, &mut self.host)
    }
}
