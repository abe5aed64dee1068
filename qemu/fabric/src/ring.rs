// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ring of frames in memory that two processes share: one writes, the other
//! reads.
//!
//! Neither side trusts the other. What a side has written itself it remembers
//! in its own memory and never reads back; what it reads from the other it
//! checks against that, and a frame is copied out before anybody looks at it.
//!
//! Frames lie in the ring one behind the other, each behind its length (four
//! bytes, of the host's order) and padded to [`ALIGN`]. A frame never wraps: a
//! length of zero says that the next one is at the start of the ring.
//!
//! Packets in a row may go as one ([`Producer::push_train`]): headers, which
//! are copied out like a frame, and behind them, at a multiple of [`ALIGN`],
//! their payload, which the writer puts there from where it has it and the
//! reader takes from there to where it is to be ([`Span`]). The reader places
//! it without ever looking at it: that the writer may change it meanwhile is
//! nothing that it could not have written before.
//!
//! The reader says when it sleeps ([`Consumer::sleep`]), and the writer when it
//! waits for room ([`Producer::wait_for_room`]); both look at the other's index
//! once more after that, and the other looks at the flag after it has moved its
//! index, with a full fence between, so that one of them sees the other.

use crate::framing::{MAX_FRAME, MIN_FRAME};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Bytes for frames in one ring, a power of two.
pub const DATA: usize = 1 << 20;
/// What frames are padded to.
pub const ALIGN: usize = 64;
/// Bytes of a ring in front of the frames.
const CONTROL: usize = 4096;
/// Bytes of a ring.
const RING: usize = CONTROL + DATA;
/// Bytes that two processes share: a ring for each direction.
const SHARED: usize = 2 * RING;
/// The length in front of a frame.
const PREFIX: usize = 4;
/// Set in front of packets that go as one, beside [what](TrainLength) there is of them.
const TRAIN: u32 = 1 << 31;
/// Bytes of payload at most of packets that go as one.
pub const MAX_TRAIN: usize = 64 << 10;
/// Bytes in front of that payload, with the prefix: there is room for all headers of a packet.
const TRAIN_HEAD: usize = 128;
/// The longest headers of packets that go as one.
pub const MAX_HEAD: usize = TRAIN_HEAD - PREFIX;
const MASK: u32 = DATA as u32 - 1;

// Where the words are, in cache lines of their own by who writes them.
/// Index behind the last frame; the writer's.
const TAIL: usize = 0;
/// Frames written so far, for statistics; the writer's.
const FRAMES: usize = 8;
/// Bytes of them; the writer's.
const BYTES: usize = 16;
/// Index of the first frame not read; the reader's.
const HEAD: usize = 64;
/// The reader sleeps; set by the reader, cleared by the writer.
const ASLEEP: usize = 128;
/// The writer waits for room; set by the writer, cleared by the reader.
const WAITING: usize = 192;

/// The other side does not keep to the rules. The ring is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// Makes the memory for two rings, of a size that cannot be changed.
pub fn create() -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        "ferrite-rings",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    rustix::fs::ftruncate(&fd, SHARED as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Frames and bytes that were written into each of the two rings, as the
/// writers say.
pub fn traffic(fd: impl AsFd) -> io::Result<[(u64, u64); 2]> {
    let mut result = [(0, 0); 2];
    for (ring, pair) in result.iter_mut().enumerate() {
        let mut bytes = [0; 16];
        let at = ring * RING + FRAMES;
        let count = rustix::io::pread(fd.as_fd(), &mut bytes, at as u64)?;
        if let (16, [a, b, c, d, e, f, g, h, rest @ ..]) = (count, bytes) {
            *pair = (
                u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                u64::from_ne_bytes(rest),
            );
        }
    }
    Ok(result)
}

/// Memory of two rings in this process.
///
/// # Invariants
///
/// `base` is the start of a shared, readable and writable mapping of
/// [`SHARED`] bytes that this value owns, of a file that cannot shrink.
struct Mapping {
    base: *mut u8,
}

// SAFETY: the mapping belongs to the process, not to a thread; all accesses
// tolerate concurrent ones.
unsafe impl Send for Mapping {}
// SAFETY: threads of this process are no worse than the other process, which
// accesses the same memory at any time.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: by the invariant these are the bounds of a mapping that is
        // owned here, and no reference into it outlives this value.
        // A failure leaves address space behind, nothing else.
        let _ = unsafe { rustix::mm::munmap(self.base.cast::<c_void>(), SHARED) };
    }
}

/// One of the two rings.
#[derive(Clone)]
struct Ring {
    mapping: Arc<Mapping>,
    /// Where it begins in the mapping: 0 or [`RING`].
    start: usize,
}

impl Ring {
    /// A word of the control part.
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= CONTROL && offset % 4 == 0);
        // SAFETY: inside the mapping by the invariant, aligned since mapping,
        // ring and offset are, and only ever accessed atomically.
        unsafe { AtomicU32::from_ptr(self.mapping.base.add(self.start + offset).cast()) }
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= CONTROL && offset % 8 == 0);
        // SAFETY: as for `word`.
        unsafe { AtomicU64::from_ptr(self.mapping.base.add(self.start + offset).cast()) }
    }

    /// The length in front of the frame at `offset` of the data.
    fn prefix(&self, offset: usize) -> &AtomicU32 {
        let offset = offset & (MASK as usize & !(ALIGN - 1));
        // SAFETY: as for `word`; the offset was just made one in the data.
        unsafe { AtomicU32::from_ptr(self.mapping.base.add(self.start + CONTROL + offset).cast()) }
    }

    fn store(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= DATA && bytes.len() <= DATA - offset);
        // SAFETY: in the mapping by the check; a slice never lies in shared
        // memory. The other side may access the bytes at the same time, and
        // can only harm its own frames by that.
        unsafe {
            let to = self.mapping.base.add(self.start + CONTROL + offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    fn load(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset <= DATA && bytes.len() <= DATA - offset);
        // SAFETY: as for `store`, with the roles exchanged; any bytes are valid.
        unsafe {
            let from = self.mapping.base.add(self.start + CONTROL + offset);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }
}

/// The ends of a connection for side 0 or 1: what it writes to and reads from.
///
/// Fails if the memory is not as [`create`] makes it.
pub fn attach(fd: &OwnedFd, side: usize) -> io::Result<(Producer, Consumer)> {
    let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    if side > 1 {
        return invalid("a connection has two sides");
    }
    // Access behind the end of a file would be a fatal signal.
    if rustix::fs::fstat(fd)?.st_size != SHARED as i64
        || !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK)
    {
        return invalid("the rings are not of the right size for ever");
    }
    // SAFETY: a new mapping at an address of the kernel's choice touches no
    // memory that exists already.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            SHARED,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    }?;
    // INVARIANT: just mapped so, of a file that is sealed.
    let mapping = Arc::new(Mapping { base: base.cast() });
    let ring = |number| Ring {
        mapping: Arc::clone(&mapping),
        start: number * RING,
    };
    Ok((
        Producer {
            ring: ring(side),
            tail: 0,
            head: 0,
            announced: 0,
            frames: 0,
            bytes: 0,
        },
        Consumer {
            ring: ring(1 - side),
            head: 0,
            tail: 0,
        },
    ))
}

/// Bytes that a frame takes in the ring.
fn record(length: usize) -> usize {
    (PREFIX + length).next_multiple_of(ALIGN)
}

/// What packets that go as one take in the ring.
fn train(payload: usize) -> usize {
    TRAIN_HEAD + payload.next_multiple_of(ALIGN)
}

/// The most that is written at once, and that is left unused in front of the end for it.
const MAX_RECORD: usize = TRAIN_HEAD + MAX_TRAIN;
const _: () = assert!((PREFIX + MAX_FRAME).next_multiple_of(ALIGN) <= MAX_RECORD);

/// What is told in front of packets that go as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TrainLength {
    head: usize,
    payload: usize,
    log_mtu: u8,
}

impl TrainLength {
    /// Lengths and packets that make sense.
    fn is_valid(self) -> bool {
        (MIN_FRAME..=MAX_HEAD).contains(&self.head)
            && (1..=MAX_TRAIN).contains(&self.payload)
            && (8..=12).contains(&self.log_mtu)
    }

    fn to_prefix(self) -> u32 {
        TRAIN | (u32::from(self.log_mtu) << 27) | ((self.head as u32) << 20) | self.payload as u32
    }

    fn from_prefix(prefix: u32) -> Option<Self> {
        let length = Self {
            head: ((prefix >> 20) & 0x7f) as usize,
            payload: (prefix & 0xf_ffff) as usize,
            log_mtu: ((prefix >> 27) & 0xf) as u8,
        };
        (prefix & TRAIN != 0 && length.is_valid()).then_some(length)
    }
}

/// Payload in the ring. It stays mapped as long as this lives, but is the writer's
/// again when the reader has [released](Consumer::release) it.
pub struct Span {
    ring: Ring,
    offset: usize,
    length: usize,
}

impl Span {
    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it is of nothing.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where so many bytes from `offset` on are, as long as the span lives; `None` if they are not
    /// all inside. The other process accesses them at the same time.
    pub fn at(&self, offset: usize, length: usize) -> Option<*mut u8> {
        if offset.checked_add(length)? > self.length {
            return None;
        }
        debug_assert!(self.offset + self.length <= DATA);
        // SAFETY: spans are made of ranges of the data (`Producer::push_train`, `Consumer::next`), which
        // are in the mapping, and this is inside of one.
        let at = unsafe { (self.ring.mapping.base).add(self.ring.start + CONTROL + self.offset) };
        // SAFETY: likewise.
        Some(unsafe { at.add(offset) })
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Span({} + {})", self.offset, self.length)
    }
}

/// What was next in a ring.
#[derive(Debug)]
pub enum Record {
    /// A frame of so many bytes.
    Frame(usize),
    /// Packets that go as one: so many bytes of headers, how much of the payload a packet has
    /// (as a power of two), and the payload.
    Train(usize, u8, Span),
}

impl Record {
    /// Bytes that were copied out.
    pub fn copied(&self) -> usize {
        let (Self::Frame(length) | Self::Train(length, ..)) = self;
        *length
    }
}

/// With so much room a writer that waits is woken.
pub const WAKE_ROOM: usize = DATA / 2;

/// The writing end of a ring.
pub struct Producer {
    ring: Ring,
    tail: u32,
    /// The reader's index as last seen; never ahead of `tail`.
    head: u32,
    /// What `tail` was when the reader was last found awake, or woken.
    announced: u32,
    frames: u64,
    bytes: u64,
}

impl Producer {
    /// Writes a frame; `Ok(false)` if there is no room or the frame is of no
    /// valid size.
    pub fn push(&mut self, frame: &[u8]) -> Result<bool, Broken> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
            return Ok(false);
        }
        let size = record(frame.len());
        let Some(skip) = self.make_room(size)? else {
            return Ok(false);
        };
        let at = self.begin(skip, frame.len() as u32);
        self.ring.store(at + PREFIX, frame);
        self.end(skip + size, frame.len());
        Ok(true)
    }

    /// Writes packets that go as one: their headers, and so much payload, of which a packet has
    /// `1 << log_mtu` bytes. `fill` puts it where it is told, and says whether it could; `Ok(false)` if it
    /// could not, if there is no room or something of no valid size.
    pub fn push_train(
        &mut self,
        head: &[u8],
        log_mtu: u8,
        payload: usize,
        fill: impl FnOnce(&Span) -> bool,
    ) -> Result<bool, Broken> {
        let length = TrainLength {
            head: head.len(),
            payload,
            log_mtu,
        };
        if !length.is_valid() {
            return Ok(false);
        }
        let size = train(payload);
        let Some(skip) = self.make_room(size)? else {
            return Ok(false);
        };
        // Nothing of it is there for the reader before the end.
        let at = self.begin(skip, length.to_prefix());
        self.ring.store(at + PREFIX, head);
        let span = Span {
            ring: self.ring.clone(),
            offset: at + TRAIN_HEAD,
            length: payload,
        };
        if !fill(&span) {
            return Ok(false);
        }
        self.end(skip + size, head.len() + payload);
        Ok(true)
    }

    /// How much is left unused in front of the end for something of this size, if there is room for it.
    fn make_room(&mut self, size: usize) -> Result<Option<usize>, Broken> {
        let to_end = DATA - (self.tail & MASK) as usize;
        // What does not fit in front of the end goes to the start.
        let skip = if size > to_end { to_end } else { 0 };
        if self.free() < skip + size {
            self.look()?;
        }
        Ok((self.free() >= skip + size).then_some(skip))
    }

    /// Writes a prefix behind what is left unused; returns where.
    fn begin(&mut self, skip: usize, prefix: u32) -> usize {
        let at = (self.tail & MASK) as usize;
        if skip > 0 {
            self.ring.prefix(at).store(0, Ordering::Relaxed);
        }
        let at = (at + skip) % DATA;
        self.ring.prefix(at).store(prefix, Ordering::Relaxed);
        at
    }

    /// Shows the reader what was written.
    fn end(&mut self, size: usize, bytes: usize) {
        self.tail = self.tail.wrapping_add(size as u32);
        self.frames += 1;
        self.bytes += bytes as u64;
        self.ring.word(TAIL).store(self.tail, Ordering::Release);
    }

    /// Whether the reader sleeps and has to be woken for what was written since
    /// the last call; to wake it is then up to the caller. Call it after the
    /// last frame of a batch.
    pub fn must_wake(&mut self) -> bool {
        // A reader that sleeps with nothing new to read is left alone: it would
        // wake this side in turn, and so on.
        if self.announced == self.tail {
            return false;
        }
        self.announced = self.tail;
        let (frames, bytes) = (self.ring.counter(FRAMES), self.ring.counter(BYTES));
        frames.store(self.frames, Ordering::Relaxed);
        bytes.store(self.bytes, Ordering::Relaxed);
        taken(self.ring.word(ASLEEP))
    }

    /// Has the reader wake this side when there is room again; `Ok(false)` if
    /// there is some already.
    pub fn wait_for_room(&mut self) -> Result<bool, Broken> {
        let flag = self.ring.word(WAITING);
        flag.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.look()?;
        if self.free() > WAKE_ROOM {
            self.ring.word(WAITING).store(0, Ordering::Relaxed);
            return Ok(false);
        }
        Ok(true)
    }

    /// Bytes that frames of any length, and packets that go as one, may take now, each with its prefix and
    /// padding. Looks at
    /// the reader's index only if it would be less than `enough`.
    pub fn room(&mut self, enough: usize) -> Result<usize, Broken> {
        if self.free() < enough + MAX_RECORD {
            self.look()?;
        }
        Ok(self.free().saturating_sub(MAX_RECORD))
    }

    fn free(&self) -> usize {
        DATA - self.tail.wrapping_sub(self.head) as usize
    }

    /// Looks at how far the reader is.
    fn look(&mut self) -> Result<(), Broken> {
        let head = self.ring.word(HEAD).load(Ordering::Acquire);
        // It may not be ahead of what was written, nor go back; and frames begin at multiples.
        if self.tail.wrapping_sub(head) > self.tail.wrapping_sub(self.head)
            || head % ALIGN as u32 != 0
        {
            return Err(Broken);
        }
        self.head = head;
        Ok(())
    }
}

/// The reading end of a ring.
pub struct Consumer {
    ring: Ring,
    head: u32,
    /// The writer's index as last seen.
    tail: u32,
}

impl Consumer {
    /// Looks at how much there is now. [`Consumer::next`] goes up to there.
    pub fn look(&mut self) -> Result<(), Broken> {
        let tail = self.ring.word(TAIL).load(Ordering::Acquire);
        let used = tail.wrapping_sub(self.head) as usize;
        let known = self.tail.wrapping_sub(self.head) as usize;
        if used > DATA || used < known || used % ALIGN != 0 {
            return Err(Broken);
        }
        self.tail = tail;
        Ok(())
    }

    /// Whether all is read that was there at the last [look](Consumer::look).
    pub fn is_drained(&self) -> bool {
        self.tail == self.head
    }

    /// Copies the next frame, or the headers of packets that go as one, to the start of `buffer`,
    /// which has room for the longest, and returns what it is; `None` if all of what
    /// [`Consumer::look`] saw is read.
    pub fn next(&mut self, buffer: &mut [u8]) -> Result<Option<Record>, Broken> {
        let mut used = self.tail.wrapping_sub(self.head) as usize;
        if used == 0 {
            return Ok(None);
        }
        let mut at = (self.head & MASK) as usize;
        let mut prefix = self.ring.prefix(at).load(Ordering::Relaxed);
        if prefix == 0 {
            let skip = DATA - at;
            // The frame for which this was skipped comes with it.
            used = used.checked_sub(skip).ok_or(Broken)?;
            if used == 0 {
                return Err(Broken);
            }
            self.head = self.head.wrapping_add(skip as u32);
            at = 0;
            prefix = self.ring.prefix(0).load(Ordering::Relaxed);
        }
        let of_train = TrainLength::from_prefix(prefix);
        let length = of_train.map_or(prefix as usize, |train| train.head);
        let size = match of_train {
            Some(length) => train(length.payload),
            None => record(length.min(MAX_FRAME)),
        };
        if !(MIN_FRAME..=MAX_FRAME).contains(&length) || size > used || size > DATA - at {
            return Err(Broken);
        }
        self.ring.load(at + PREFIX, &mut buffer[..length]);
        self.head = self.head.wrapping_add(size as u32);
        Ok(Some(match of_train {
            Some(TrainLength {
                head,
                payload,
                log_mtu,
            }) => {
                let span = Span {
                    ring: self.ring.clone(),
                    offset: at + TRAIN_HEAD,
                    length: payload,
                };
                Record::Train(head, log_mtu, span)
            }
            None => Record::Frame(length),
        }))
    }

    /// Gives back the room of what was read; `true` if the writer waits for it
    /// and has to be woken, which is then up to the caller.
    pub fn release(&self) -> bool {
        let head = self.ring.word(HEAD);
        if head.load(Ordering::Relaxed) != self.head {
            head.store(self.head, Ordering::Release);
        }
        // Not for each frame: with much left to read it is woken later.
        let left = self.tail.wrapping_sub(self.head) as usize;
        left < DATA / 4 && taken(self.ring.word(WAITING))
    }

    /// Has the writer wake this side with the next frame; `false` if there is
    /// one already.
    pub fn sleep(&self) -> bool {
        self.ring.word(ASLEEP).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let tail = self.ring.word(TAIL).load(Ordering::Relaxed);
        if tail != self.head {
            self.wake();
            return false;
        }
        true
    }

    /// This side is awake and need not be woken.
    pub fn wake(&self) {
        self.ring.word(ASLEEP).store(0, Ordering::Relaxed);
    }
}

/// Takes a flag that the other side may have set.
fn taken(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn pair() -> (Producer, Consumer, OwnedFd) {
        let fd = create().unwrap();
        let (producer, _) = attach(&fd, 0).unwrap();
        let (_, consumer) = attach(&fd, 1).unwrap();
        (producer, consumer, fd)
    }

    fn frame(number: u32, length: usize) -> Vec<u8> {
        let mut frame = vec![number as u8; length];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        frame
    }

    fn take(consumer: &mut Consumer) -> Result<Option<Vec<u8>>, Broken> {
        let mut buffer = [0; MAX_FRAME];
        consumer.look()?;
        let record = consumer.next(&mut buffer)?;
        Ok(record.map(|record| match record {
            Record::Frame(length) => buffer[..length].to_vec(),
            Record::Train(head, log_mtu, span) => {
                let mut bytes = buffer[..head].to_vec();
                bytes.push(log_mtu);
                bytes.extend(contents(&span));
                bytes
            }
        }))
    }

    fn contents(span: &Span) -> Vec<u8> {
        let mut bytes = vec![0; span.len()];
        span.ring.load(span.offset, &mut bytes);
        bytes
    }

    /// Packets that go as one, and what [`take`] makes of them.
    fn push_train(
        producer: &mut Producer,
        number: u32,
        head: usize,
        payload: usize,
    ) -> Option<Vec<u8>> {
        let head = frame(number, head);
        let mut bytes = frame(number, payload.max(MIN_FRAME));
        bytes.truncate(payload);
        let log_mtu = 8 + number as u8 % 5;
        let fill = |span: &Span| {
            assert_eq!(span.len(), payload);
            span.ring.store(span.offset, &bytes);
            true
        };
        let pushed = producer.push_train(&head, log_mtu, payload, fill);
        pushed
            .unwrap()
            .then(|| [&head[..], &[log_mtu], &bytes].concat())
    }

    #[test]
    fn packets_that_go_as_one_are_of_valid_sizes() {
        let (mut producer, mut consumer, _) = pair();
        let mut push = |head, log_mtu, payload, filled| {
            producer
                .push_train(&vec![0; head], log_mtu, payload, |_| filled)
                .unwrap()
        };
        for (head, log_mtu, payload) in [
            (MIN_FRAME - 1, 12, 1),
            (MAX_HEAD + 1, 12, 1),
            (60, 7, 1),
            (60, 13, 1),
            (60, 12, 0),
            (60, 12, MAX_TRAIN + 1),
        ] {
            assert!(
                !push(head, log_mtu, payload, true),
                "{head} {log_mtu} {payload}"
            );
        }
        assert!(
            !push(60, 12, MAX_TRAIN, false),
            "there was nothing to fill it with"
        );
        assert_eq!(take(&mut consumer), Ok(None));
        for (head, payload) in [(MIN_FRAME, 1), (MAX_HEAD, MAX_TRAIN)] {
            let pushed = push_train(&mut producer, 9, head, payload).unwrap();
            assert_eq!(take(&mut consumer), Ok(Some(pushed)));
        }
    }

    #[test]
    fn nothing_is_outside_of_a_span() {
        let (mut producer, _, _) = pair();
        let fill = |span: &Span| {
            assert!(span.at(0, 100).is_some() && span.at(100, 0).is_some());
            for (offset, length) in [
                (0, 101),
                (1, 100),
                (101, 0),
                (usize::MAX, 1),
                (1, usize::MAX),
            ] {
                assert!(span.at(offset, length).is_none(), "{offset} {length}");
            }
            let between = span.at(99, 1).unwrap() as usize - span.at(0, 1).unwrap() as usize;
            assert_eq!(between, 99);
            true
        };
        assert_eq!(producer.push_train(&[0; 60], 12, 100, fill), Ok(true));
    }

    #[test]
    fn memory_of_another_kind_is_refused() {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(attach(&fd, 0).is_err());
        rustix::fs::ftruncate(&fd, SHARED as u64).unwrap();
        assert!(attach(&fd, 0).is_err(), "it could shrink");
        assert!(attach(&create().unwrap(), 2).is_err());
        let fd = create().unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    }

    #[test]
    fn frames_of_no_valid_size_are_not_taken() {
        let (mut producer, mut consumer, _) = pair();
        assert_eq!(producer.push(&[0; MIN_FRAME - 1]), Ok(false));
        assert_eq!(producer.push(&vec![0; MAX_FRAME + 1]), Ok(false));
        assert_eq!(take(&mut consumer), Ok(None));
    }

    #[test]
    fn a_full_ring_takes_no_more_until_there_is_room() {
        let (mut producer, mut consumer, fd) = pair();
        let mut pushed = 0u32;
        while producer.push(&frame(pushed, 4000)).unwrap() {
            pushed += 1;
        }
        assert_eq!(pushed as usize, DATA / record(4000));
        assert_eq!(producer.wait_for_room(), Ok(true));
        let mut buffer = [0; MAX_FRAME];
        consumer.look().unwrap();
        let mut woken = false;
        for number in 0..pushed {
            let record = consumer.next(&mut buffer).unwrap();
            assert!(matches!(record, Some(Record::Frame(4000))), "{record:?}");
            assert_eq!(buffer[..4], number.to_le_bytes());
            let must = consumer.release();
            assert!(!(must && woken), "woken twice");
            woken |= must;
        }
        assert!(woken, "the writer would wait for ever");
        assert_eq!(producer.wait_for_room(), Ok(false));
        assert!(producer.push(&frame(0, 4000)).unwrap());
        producer.must_wake();
        let expected = (u64::from(pushed) + 1, (u64::from(pushed) + 1) * 4000);
        assert_eq!(traffic(&fd).unwrap(), [expected, (0, 0)]);
    }

    #[test]
    fn there_is_room_for_what_is_said_to_have_room_wherever_the_ring_wraps() {
        for length in [60, 1000, 4190, 9000, MAX_FRAME] {
            let (mut producer, mut consumer, _) = pair();
            for step in 0..200 {
                let mut room = producer.room(DATA).unwrap();
                if step % 3 == 0 {
                    // As it costs that which sends packets: each with its headers.
                    if let Some(left) = room.checked_sub(length.div_ceil(256) * (256 + 128)) {
                        room = left;
                        assert!(push_train(&mut producer, step, 60, length).is_some());
                    }
                }
                while let Some(left) = room.checked_sub(length + ALIGN + PREFIX) {
                    room = left;
                    assert_eq!(producer.push(&frame(step, length)), Ok(true));
                }
                // Some of it is read, so that every place of the end is met.
                for _ in 0..1 + step % 7 {
                    take(&mut consumer).unwrap();
                }
                consumer.release();
            }
        }
    }

    #[test]
    fn only_a_sleeping_reader_is_woken_and_once() {
        let (mut producer, mut consumer, _) = pair();
        producer.push(&frame(1, 60)).unwrap();
        assert!(!producer.must_wake());
        // It looks before it sleeps.
        assert!(!consumer.sleep());
        take(&mut consumer).unwrap();
        assert!(consumer.sleep());
        producer.push(&frame(2, 60)).unwrap();
        assert!(producer.must_wake());
        assert!(!producer.must_wake());
        take(&mut consumer).unwrap();
        assert!(consumer.sleep());
        consumer.wake();
        producer.push(&frame(3, 60)).unwrap();
        assert!(!producer.must_wake());
        // Nor one that sleeps and has nothing new to read.
        take(&mut consumer).unwrap();
        assert!(consumer.sleep());
        assert!(!producer.must_wake());
    }

    #[test]
    fn a_writer_that_lies_is_found_out() {
        // Indices that make no sense.
        for tail in [1, 63, DATA as u32 + 64, u32::MAX, 0u32.wrapping_sub(64)] {
            let (producer, mut consumer, _) = pair();
            producer.ring.word(TAIL).store(tail, Ordering::Relaxed);
            assert_eq!(take(&mut consumer), Err(Broken), "{tail:#x}");
        }
        let told = |log_mtu, head, payload| {
            TrainLength {
                head,
                payload,
                log_mtu,
            }
            .to_prefix()
        };
        // Lengths that make no sense, or reach beyond what was written.
        for length in [
            1,
            13,
            61,
            64,
            MAX_FRAME as u32,
            MAX_FRAME as u32 + 1,
            u32::MAX,
            // Packets that go as one: too short or too long headers, packets that nobody makes, no
            // payload, too much of it, and more than was written.
            told(12, 13, 1),
            told(12, 125, 1),
            told(7, 60, 1),
            told(13, 60, 1),
            told(12, 60, 0),
            told(12, 60, MAX_TRAIN + 1),
            told(12, 60, 1),
        ] {
            let (producer, mut consumer, _) = pair();
            producer.ring.prefix(0).store(length, Ordering::Relaxed);
            producer.ring.word(TAIL).store(64, Ordering::Relaxed);
            assert_eq!(take(&mut consumer), Err(Broken), "{length}");
        }
        // A skip with nothing behind it, and one behind a skip.
        let (producer, mut consumer, _) = pair();
        producer
            .ring
            .word(TAIL)
            .store(DATA as u32, Ordering::Relaxed);
        assert_eq!(take(&mut consumer), Err(Broken));
        // An index that goes back.
        let (mut producer, mut consumer, _) = pair();
        producer.push(&frame(1, 100)).unwrap();
        producer.push(&frame(2, 100)).unwrap();
        consumer.look().unwrap();
        producer.ring.word(TAIL).store(128, Ordering::Relaxed);
        assert_eq!(consumer.look(), Err(Broken));
    }

    #[test]
    fn a_reader_that_lies_is_found_out() {
        for head in [64, 1 << 31, u32::MAX] {
            let (mut producer, consumer, _) = pair();
            consumer.ring.word(HEAD).store(head, Ordering::Relaxed);
            assert_eq!(producer.wait_for_room(), Err(Broken), "{head:#x}");
        }
        // It creeps along, to look alive and make no room: no frame begins there.
        for head in [1, 63, 65, 4096 + 32] {
            let (mut producer, consumer, _) = pair();
            while producer.push(&frame(1, 4000)).unwrap() {}
            consumer.ring.word(HEAD).store(head, Ordering::Relaxed);
            assert_eq!(producer.room(DATA), Err(Broken), "{head}");
            assert_eq!(producer.wait_for_room(), Err(Broken), "{head}");
            assert_eq!(producer.push(&frame(2, 4000)), Err(Broken), "{head}");
        }
        // It goes back to make room where frames are not read.
        let (mut producer, mut consumer, _) = pair();
        while producer.push(&frame(1, 9000)).unwrap() {}
        take(&mut consumer).unwrap();
        consumer.release();
        producer.wait_for_room().unwrap();
        consumer.ring.word(HEAD).store(0, Ordering::Relaxed);
        assert_eq!(producer.wait_for_room(), Err(Broken));
    }

    #[test]
    fn two_threads_that_sleep_lose_no_wake_up() {
        let (mut producer, mut consumer, _) = pair();
        let (wake_reader, reader) = std::sync::mpsc::channel::<()>();
        let (wake_writer, writer) = std::sync::mpsc::channel::<()>();
        const COUNT: u32 = 200_000;
        let patience = std::time::Duration::from_secs(120);
        let thread = std::thread::spawn(move || {
            for number in 0..COUNT {
                while !producer
                    .push(&frame(number, 14 + number as usize % 1500))
                    .unwrap()
                {
                    if producer.must_wake() {
                        wake_reader.send(()).unwrap();
                    }
                    if producer.wait_for_room().unwrap() {
                        writer.recv_timeout(patience).expect("nobody made room");
                    }
                }
                if producer.must_wake() {
                    wake_reader.send(()).unwrap();
                }
            }
        });
        let mut buffer = [0; MAX_FRAME];
        let mut expected = 0;
        while expected < COUNT {
            consumer.look().unwrap();
            while let Some(record) = consumer.next(&mut buffer).unwrap() {
                assert_eq!(record.copied(), 14 + expected as usize % 1500);
                assert_eq!(buffer[..4], expected.to_le_bytes());
                expected += 1;
            }
            if consumer.release() {
                wake_writer.send(()).unwrap();
            }
            if expected < COUNT && consumer.sleep() {
                reader
                    .recv_timeout(patience)
                    .expect("nobody woke the reader");
            }
        }
        thread.join().unwrap();
    }

    proptest! {
        #[test]
        fn every_frame_arrives_once_and_in_order(
            steps in proptest::collection::vec(
                (any::<bool>(), MIN_FRAME..=MAX_FRAME, proptest::option::of(1..=MAX_TRAIN)),
                1..400,
            ),
        ) {
            let (mut producer, mut consumer, _) = pair();
            let mut waiting = VecDeque::new();
            for (number, (write, length, payload)) in steps.into_iter().enumerate() {
                if write {
                    // Several at a time, so that the ring fills and wraps.
                    for _ in 0..8 {
                        if let Some(payload) = payload {
                            let head = MIN_FRAME + length % (MAX_HEAD - MIN_FRAME);
                            waiting.extend(push_train(&mut producer, number as u32, head, payload));
                            continue;
                        }
                        let frame = frame(number as u32, length);
                        if producer.push(&frame).unwrap() {
                            waiting.push_back(frame);
                        }
                    }
                } else {
                    for _ in 0..length % 16 {
                        let got = take(&mut consumer).unwrap();
                        prop_assert_eq!(&got, &waiting.pop_front());
                        consumer.release();
                    }
                }
            }
            while let Some(frame) = waiting.pop_front() {
                prop_assert_eq!(take(&mut consumer).unwrap(), Some(frame));
            }
            prop_assert_eq!(take(&mut consumer).unwrap(), None);
        }

        #[test]
        fn whatever_is_in_the_ring_does_no_harm(
            words in proptest::collection::vec((0usize..DATA / 4, any::<u32>()), 0..64),
            lengths in proptest::collection::vec(
                prop_oneof![any::<u16>().prop_map(u32::from), any::<u32>()],
                0..64,
            ),
            tail in any::<u32>(),
        ) {
            let (producer, mut consumer, _) = pair();
            for (at, value) in words {
                producer.ring.store(at * 4, &value.to_ne_bytes());
            }
            for (at, length) in lengths.into_iter().enumerate() {
                producer.ring.prefix(at * ALIGN).store(length, Ordering::Relaxed);
            }
            producer.ring.word(TAIL).store(tail & !(ALIGN as u32 - 1) & (2 * MASK + 1), Ordering::Relaxed);
            let mut buffer = [0; MAX_FRAME];
            if consumer.look().is_ok() {
                for _ in 0..DATA / ALIGN + 1 {
                    match consumer.next(&mut buffer) {
                        Ok(Some(Record::Train(head, log_mtu, span))) => {
                            prop_assert!(head <= MAX_HEAD && (8..=12).contains(&log_mtu));
                            prop_assert!(span.offset + span.len() <= DATA);
                            contents(&span);
                        }
                        Ok(Some(Record::Frame(length))) => prop_assert!(length <= MAX_FRAME),
                        _ => break,
                    }
                }
                let next = consumer.next(&mut buffer).ok().flatten();
                prop_assert!(next.is_none_or(|record| record.copied() != 0));
            }
        }
    }
}
