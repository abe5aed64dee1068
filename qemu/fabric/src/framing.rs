// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ethernet frames on a stream socket, as QEMU's `-netdev stream` carries
//! them: each frame behind its length, four bytes, big-endian.

use std::fmt;
use std::io::{self, Read, Write};

/// The longest frame that a link carries, without its length prefix.
pub const MAX_FRAME: usize = 16 * 1024;
/// The shortest frame: two addresses and a type.
pub const MIN_FRAME: usize = 14;
/// The length prefix.
const PREFIX: usize = 4;
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

/// Frames on their way into a stream socket that may not take them all now.
///
/// The queue is bounded: a reader that is too slow loses frames, as it would
/// on a wire, and costs its peers nothing.
pub struct Writer {
    buffer: Vec<u8>,
    start: usize,
    limit: usize,
}

impl Writer {
    /// A queue that holds at most `limit` bytes, prefixes included.
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            limit,
        }
    }

    /// Appends a frame; `false` if the queue is full or the frame is of no
    /// valid size, in which case the frame is gone.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len())
            || self.len() + PREFIX + frame.len() > self.limit
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

    fn append(&mut self, frame: &[u8]) {
        if self.start > self.buffer.len() / 2 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        // The callers' range check makes the length fit.
        self.buffer
            .extend_from_slice(&(frame.len() as u32).to_be_bytes());
        self.buffer.extend_from_slice(frame);
    }

    /// Writes as much as `sink` takes. `Ok(true)` when nothing is left.
    pub fn flush(&mut self, sink: &mut impl Write) -> io::Result<bool> {
        while self.start < self.buffer.len() {
            match sink.write(&self.buffer[self.start..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.start += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.clear();
        Ok(true)
    }

    /// Bytes waiting.
    pub fn len(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets everything that waits, for a new stream.
    pub fn clear(&mut self) {
        self.buffer.clear();
        self.start = 0;
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

    #[test]
    fn a_partial_write_goes_on_where_it_stopped() {
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
