// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ethernet frames on a stream socket, as QEMU's `-netdev stream` carries
//! them: each frame behind its length, four bytes, big-endian.
//!
//! A device begins its stream with [`MARK`] where the first length would be. No
//! guest behind a plain port can: the lengths there are written by QEMU, and are
//! those of frames.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::time::Duration;

/// The longest frame that a link carries, without its length prefix.
pub const MAX_FRAME: usize = 16 * 1024;
/// The shortest frame: two addresses and a type.
pub const MIN_FRAME: usize = 14;
/// The length prefix.
const PREFIX: usize = 4;
/// What a device begins its stream with: longer than any frame of a guest can be.
pub const MARK: u32 = 0xfe5c_0004;
/// The least that a queue grows by.
const GROWTH: usize = 64 * 1024;
/// How much a reader asks the socket for at once.
const READ_CHUNK: usize = 256 * 1024;

/// A length prefix that no frame can have. The stream cannot be followed any
/// further after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadLength(pub u32);

impl fmt::Display for BadLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a frame length of {} is not between {MIN_FRAME} and {MAX_FRAME}",
            self.0
        )
    }
}

impl std::error::Error for BadLength {}

/// Cuts a byte stream into frames.
///
/// Bytes between `start` and `end` of the buffer are received and not yet
/// handed out.
pub struct Reader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Default for Reader {
    fn default() -> Self {
        Self::new()
    }
}

impl Reader {
    /// A reader at the beginning of a stream.
    pub fn new() -> Self {
        Self {
            buffer: vec![0; READ_CHUNK + PREFIX + MAX_FRAME],
            start: 0,
            end: 0,
        }
    }

    /// Reads once from `source`. Returns the number of bytes, zero at the end
    /// of the stream.
    ///
    /// All whole frames must have been taken with [`Reader::next_frame`] first.
    pub fn fill(&mut self, source: &mut impl Read) -> io::Result<usize> {
        if self.start > 0 {
            // At most one incomplete frame is left over: cheap to move.
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let count = source.read(&mut self.buffer[self.end..])?;
        self.end += count;
        Ok(count)
    }

    /// Whether the stream begins with [`MARK`], which is then taken; `None` if
    /// more bytes are needed to tell. To be asked before the first frame is taken.
    pub fn take_mark(&mut self) -> Option<bool> {
        let prefix = self.buffer[self.start..self.end].first_chunk::<PREFIX>()?;
        let marked = u32::from_be_bytes(*prefix) == MARK;
        if marked {
            self.start += PREFIX;
        }
        Some(marked)
    }

    /// The next whole frame, or `None` if more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, BadLength> {
        let have = &self.buffer[self.start..self.end];
        let Some(prefix) = have.first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*prefix);
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        if !(MIN_FRAME..=MAX_FRAME).contains(&size) {
            return Err(BadLength(length));
        }
        if have.len() < PREFIX + size {
            return Ok(None);
        }
        let from = self.start + PREFIX;
        self.start = from + size;
        Ok(Some(&self.buffer[from..from + size]))
    }

    /// Forgets everything received, for a new stream.
    pub fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
    }
}

/// How long to wait with a [starved](Writer::is_starved) queue.
pub const STARVED: Duration = Duration::from_millis(10);

/// Whether the kernel has no memory, which is not the reader's fault.
fn is_starved(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::NOBUFS, Errno::NOMEM]
        .iter()
        .any(|none| error.raw_os_error() == Some(none.raw_os_error()))
}

/// Frames on their way into a stream socket that may not take them all now.
///
/// The queue is bounded: a reader that is too slow loses frames, as it would
/// on a wire, and costs its peers nothing.
pub struct Writer {
    /// Frames behind their lengths. The first may be written in part.
    buffer: VecDeque<u8>,
    /// Bytes at the front of the buffer that are the rest of a frame.
    partial: usize,
    /// Bytes written so far.
    position: u64,
    /// The last write found no memory in the kernel.
    starved: bool,
    limit: usize,
}

impl Writer {
    /// A queue that holds at most `limit` bytes, prefixes included.
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: VecDeque::new(),
            partial: 0,
            position: 0,
            starved: false,
            limit,
        }
    }

    /// Appends a frame; `false` if the queue is full or the frame is of no
    /// valid size, in which case the frame is gone.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        self.push_within(frame, self.limit)
    }

    /// Appends a frame if the queue then holds no more than `limit` bytes.
    pub fn push_within(&mut self, frame: &[u8], limit: usize) -> bool {
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len())
            || self.len() + PREFIX + frame.len() > limit.min(self.limit)
        {
            return false;
        }
        self.append(frame);
        true
    }

    /// Appends a frame of a valid size although the queue may be full: one that
    /// must not get lost, and of which there are few.
    pub fn push_always(&mut self, frame: &[u8]) {
        debug_assert!((MIN_FRAME..=MAX_FRAME).contains(&frame.len()));
        self.append(frame);
    }

    /// Begins the stream as a device's.
    pub fn push_mark(&mut self) {
        self.buffer.extend(MARK.to_be_bytes());
    }

    fn append(&mut self, frame: &[u8]) {
        let needed = PREFIX + frame.len();
        if self.buffer.capacity() - self.buffer.len() < needed {
            // By a quarter and not to the double: a long queue is what memory is short for.
            let more = needed.max(self.buffer.len() / 4).max(GROWTH);
            self.buffer.reserve_exact(more);
        }
        // The callers' range check makes the length fit.
        self.buffer.extend((frame.len() as u32).to_be_bytes());
        self.buffer.extend(frame);
    }

    /// Writes as much as `sink` takes. `Ok(true)` when nothing is left.
    pub fn flush(&mut self, sink: &mut impl Write) -> io::Result<bool> {
        self.flush_up_to(u64::MAX, sink)
    }

    /// Writes the rest of a frame that is written in part; `Ok(true)` when
    /// nothing of that is left.
    pub fn flush_begun(&mut self, sink: &mut impl Write) -> io::Result<bool> {
        self.flush_up_to(self.position + self.partial as u64, sink)
    }

    /// Writes as much as `sink` takes of what lies before `end`, a
    /// [position](Writer::position). `Ok(true)` when nothing of that is left.
    pub fn flush_up_to(&mut self, end: u64, sink: &mut impl Write) -> io::Result<bool> {
        loop {
            let (front, _) = self.buffer.as_slices();
            let most = end.saturating_sub(self.position);
            let most = front.len().min(usize::try_from(most).unwrap_or(usize::MAX));
            if most == 0 {
                break;
            }
            match sink.write(&front[..most]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.starved = false;
                    self.consume(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.starved = false;
                    return Ok(false);
                }
                Err(error) if is_starved(&error) => {
                    self.starved = true;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        // What a burst took is given back, up to what the next one likely needs.
        let keep = self.spare();
        if self.buffer.is_empty() && self.buffer.capacity() > keep {
            self.buffer.shrink_to(keep);
        }
        Ok(true)
    }

    /// Whether something waits because the kernel had no memory for it: the
    /// socket may well say that it has room, and is to be tried later.
    pub fn is_starved(&self) -> bool {
        self.starved && !self.is_empty()
    }

    /// Bytes that the record at `offset` of the buffer takes, prefix included.
    fn record(&self, offset: usize) -> usize {
        let mut prefix = [0; PREFIX];
        for (byte, from) in prefix.iter_mut().zip(self.buffer.range(offset..)) {
            *byte = *from;
        }
        match u32::from_be_bytes(prefix) {
            MARK => PREFIX,
            length => PREFIX + length as usize,
        }
    }

    /// These bytes are written.
    fn consume(&mut self, count: usize) {
        let mut at = 0;
        while at < count {
            if self.partial == 0 {
                self.partial = self.record(at);
            }
            let step = self.partial.min(count - at);
            self.partial -= step;
            at += step;
        }
        self.buffer.drain(..count);
        self.position += count as u64;
        // Given back as it goes: a reader that leaves a little would keep it all.
        // Each time more bytes went than are moved.
        let (length, capacity) = (self.buffer.len(), self.buffer.capacity());
        if capacity > 2 * length + self.spare().max(2 * GROWTH) {
            self.buffer.shrink_to(length + length / 4 + GROWTH);
        }
    }

    /// What an empty queue keeps for the next burst.
    fn spare(&self) -> usize {
        self.limit / 64
    }

    /// Bytes written since the stream began: where in it the queue begins.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Leaves out the next frame, of which nothing is written yet.
    pub fn skip_frame(&mut self) {
        if self.partial == 0 && !self.buffer.is_empty() {
            let count = self.record(0).min(self.buffer.len());
            self.buffer.drain(..count);
            self.position += count as u64;
        }
    }

    /// Drops the frames that wait, but those that `keep` wants and the rest of
    /// one that is written in part: behind it the stream goes on.
    pub fn retain(&mut self, mut keep: impl FnMut(&[u8]) -> bool) {
        let mut at = self.partial;
        let mut kept: VecDeque<u8> = self.buffer.range(..at).copied().collect();
        while at < self.buffer.len() {
            let end = (at + self.record(at)).min(self.buffer.len());
            let bytes: Vec<u8> = self.buffer.range(at..end).copied().collect();
            // A mark has no frame behind it, and is not to be lost.
            if bytes.len() == PREFIX || keep(&bytes[PREFIX..]) {
                kept.extend(bytes);
            }
            at = end;
        }
        self.buffer = kept;
    }

    /// Bytes waiting.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Forgets everything that waits, for a new stream.
    pub fn clear(&mut self) {
        self.buffer.clear();
        self.partial = 0;
        self.position = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that hands out `step` bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn frames_survive_any_cut_of_the_stream() {
        let frames: Vec<Vec<u8>> = [14usize, 15, 60, 1514, MAX_FRAME]
            .iter()
            .map(|&size| (0..size).map(|i| (i * 7 + size) as u8).collect())
            .collect();
        let mut writer = Writer::new(1 << 20);
        for frame in &frames {
            assert!(writer.push(frame));
        }
        let mut bytes = Vec::new();
        assert!(writer.flush(&mut bytes).unwrap());
        assert!(writer.is_empty());
        for step in [1, 3, 17, 1000, 1 << 20] {
            let mut source = Slow(&bytes, step);
            let mut reader = Reader::new();
            let mut got = Vec::new();
            while reader.fill(&mut source).unwrap() > 0 {
                while let Some(frame) = reader.next_frame().unwrap() {
                    got.push(frame.to_vec());
                }
            }
            assert_eq!(got, frames, "step {step}");
        }
    }

    #[test]
    fn a_bad_length_is_refused() {
        for bad in [0u32, 13, MAX_FRAME as u32 + 1, u32::MAX] {
            let mut bytes = bad.to_be_bytes().to_vec();
            bytes.extend_from_slice(&[0; 64]);
            let mut reader = Reader::new();
            reader.fill(&mut bytes.as_slice()).unwrap();
            assert_eq!(reader.next_frame(), Err(BadLength(bad)));
        }
    }

    #[test]
    fn a_full_queue_drops_and_recovers() {
        let mut writer = Writer::new(3 * 64);
        assert!(writer.push(&[1; 60]));
        assert!(writer.push(&[2; 60]));
        assert!(writer.push(&[3; 60]));
        assert!(!writer.push(&[4; 14]));
        let mut sink = Vec::new();
        assert!(writer.flush(&mut sink).unwrap());
        assert_eq!(sink.len(), 3 * 64);
        assert!(writer.push(&[5; 60]));
        assert!(!writer.push(&[0; 13]));
        assert!(!writer.push(&[0; MAX_FRAME + 1]));
    }

    /// Takes so many bytes and no more.
    struct Choke(Vec<u8>, usize);

    impl Write for Choke {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.1 == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = self.1.min(bytes.len());
            self.1 -= count;
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn frames(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut reader = Reader::new();
        reader.fill(&mut &bytes[..]).unwrap();
        let mut frames = Vec::new();
        while let Some(frame) = reader.next_frame().unwrap() {
            frames.push(frame.to_vec());
        }
        assert_eq!(reader.start, reader.end, "half a frame at the end");
        frames
    }

    #[test]
    fn frames_that_are_dropped_leave_the_stream_in_step() {
        // However much of it is written, at and inside of prefixes and frames.
        for written in 0..=3 * 64 {
            let mut writer = Writer::new(1 << 16);
            for value in 1..=3 {
                assert!(writer.push(&[value; 60]));
            }
            let mut choke = Choke(Vec::new(), written);
            writer.flush(&mut choke).unwrap();
            writer.retain(|frame| frame[0] == 3);
            assert!(writer.push(&[9; 20]));
            choke.1 = usize::MAX;
            assert!(writer.flush(&mut choke).unwrap());
            let begun = written.div_ceil(64) as u8;
            let mut expected: Vec<Vec<u8>> = (1..=begun).map(|value| vec![value; 60]).collect();
            if begun < 3 {
                expected.push(vec![3; 60]);
            }
            expected.push(vec![9; 20]);
            assert_eq!(frames(&choke.0), expected, "{written}");
        }
    }

    #[test]
    fn a_device_is_known_by_how_its_stream_begins() {
        let mut writer = Writer::new(1 << 16);
        writer.push_mark();
        assert!(writer.push(&[1; 60]));
        let mut choke = Choke(Vec::new(), 2);
        assert!(!writer.flush(&mut choke).unwrap());
        writer.retain(|_| false);
        assert!(writer.push(&[2; 60]));
        choke.1 = usize::MAX;
        assert!(writer.flush(&mut choke).unwrap());
        let mut reader = Reader::new();
        reader.fill(&mut &choke.0[..3]).unwrap();
        assert_eq!(reader.take_mark(), None);
        reader.fill(&mut &choke.0[3..]).unwrap();
        assert_eq!(reader.take_mark(), Some(true));
        assert_eq!(reader.next_frame().unwrap(), Some(&[2; 60][..]));
        let mut reader = Reader::new();
        reader.fill(&mut &choke.0[4..]).unwrap();
        assert_eq!(reader.take_mark(), Some(false));
        assert_eq!(reader.next_frame().unwrap(), Some(&[2; 60][..]));
    }

    #[test]
    fn a_queue_takes_little_more_memory_than_it_holds() {
        let limit = 16 << 20;
        let mut writer = Writer::new(limit);
        let mut choke = Choke(Vec::new(), 0);
        let mut most = 0;
        // A reader that takes a little all the time.
        for _ in 0..200_000 {
            writer.push(&[1; 1500]);
            choke.0.clear();
            choke.1 = 700;
            writer.flush(&mut choke).unwrap();
            most = most.max(writer.buffer.capacity());
        }
        assert!(writer.len() > limit - 3000);
        assert!(most <= limit + limit / 4 + GROWTH, "{most}");
        choke.1 = usize::MAX;
        assert!(writer.flush(&mut choke).unwrap());
        assert!(writer.buffer.capacity() <= limit / 64);
    }

    #[test]
    fn a_reader_that_leaves_a_little_keeps_no_memory() {
        let limit = 16 << 20;
        let mut writer = Writer::new(limit);
        while writer.push(&[1; 1500]) {}
        let mut choke = Choke(Vec::new(), writer.len() - (64 << 10));
        assert!(!writer.flush(&mut choke).unwrap());
        assert_eq!(writer.len(), 64 << 10);
        let most = 2 * writer.len() + limit / 64;
        assert!(writer.buffer.capacity() <= most);
    }

    #[test]
    fn no_memory_in_the_kernel_is_no_error_of_the_reader() {
        struct Short;
        impl Write for Short {
            fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
                Err(rustix::io::Errno::NOBUFS.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut writer = Writer::new(1 << 16);
        assert!(writer.push(&[1; 60]));
        assert!(!writer.is_starved());
        assert!(!writer.flush(&mut Short).unwrap());
        assert_eq!(writer.len(), 64);
        // No event tells when there is some, as one does of room in the socket.
        assert!(writer.is_starved());
        let mut choke = Choke(Vec::new(), 3);
        assert!(!writer.flush(&mut choke).unwrap());
        assert!(!writer.is_starved());
    }

    #[test]
    fn a_partial_write_goes_on_where_it_stopped() {
        let mut writer = Writer::new(1 << 16);
        let mut choke = Choke(Vec::new(), 0);
        for value in 0..50u8 {
            assert!(writer.push(&[value; 20]));
            choke.1 = 17;
            assert!(!writer.flush(&mut choke).unwrap());
        }
        choke.1 = usize::MAX;
        assert!(writer.flush(&mut choke).unwrap());
        let mut reader = Reader::new();
        reader.fill(&mut choke.0.as_slice()).unwrap();
        for value in 0..50u8 {
            assert_eq!(reader.next_frame().unwrap(), Some(&[value; 20][..]));
        }
        assert_eq!(reader.next_frame(), Ok(None));
    }
}
