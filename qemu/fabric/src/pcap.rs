// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Captures in the classic pcap format with nanosecond timestamps.

use crate::framing::MAX_FRAME;
use std::io::{self, Write};

/// Marks nanosecond timestamps in the writer's byte order.
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const VERSION_MAJOR: u16 = 2;
const VERSION_MINOR: u16 = 4;
const LINKTYPE_ETHERNET: u32 = 1;
const NANOSECONDS: u64 = 1_000_000_000;

/// Writes frames to a capture.
pub struct Pcap<W: Write> {
    sink: W,
}

impl<W: Write> Pcap<W> {
    /// Begins a capture with its file header.
    pub fn new(mut sink: W) -> io::Result<Self> {
        let mut header = Vec::with_capacity(24);
        header.extend_from_slice(&MAGIC_NANOSECONDS.to_le_bytes());
        header.extend_from_slice(&VERSION_MAJOR.to_le_bytes());
        header.extend_from_slice(&VERSION_MINOR.to_le_bytes());
        // Time zone and accuracy, zero by convention.
        header.extend_from_slice(&[0; 8]);
        header.extend_from_slice(&(MAX_FRAME as u32).to_le_bytes());
        header.extend_from_slice(&LINKTYPE_ETHERNET.to_le_bytes());
        sink.write_all(&header)?;
        Ok(Self { sink })
    }

    /// Records one frame seen `time` nanoseconds after the Unix epoch.
    pub fn record(&mut self, time: u64, frame: &[u8]) -> io::Result<()> {
        let kept = &frame[..frame.len().min(MAX_FRAME)];
        let mut header = [0u8; 16];
        header[0..4].copy_from_slice(&((time / NANOSECONDS) as u32).to_le_bytes());
        header[4..8].copy_from_slice(&((time % NANOSECONDS) as u32).to_le_bytes());
        header[8..12].copy_from_slice(&(kept.len() as u32).to_le_bytes());
        header[12..16].copy_from_slice(&(frame.len() as u32).to_le_bytes());
        self.sink.write_all(&header)?;
        self.sink.write_all(kept)
    }

    /// Puts all records where a reader of the file sees them.
    pub fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_has_the_documented_layout() {
        let mut bytes = Vec::new();
        let mut pcap = Pcap::new(&mut bytes).unwrap();
        pcap.record(3 * NANOSECONDS + 5, &[0xaa; 20]).unwrap();
        pcap.flush().unwrap();
        assert_eq!(bytes.len(), 24 + 16 + 20);
        assert_eq!(bytes[0..4], [0x4d, 0x3c, 0xb2, 0xa1]);
        assert_eq!(bytes[4..8], [2, 0, 4, 0]);
        assert_eq!(bytes[16..20], (MAX_FRAME as u32).to_le_bytes());
        assert_eq!(bytes[20..24], [1, 0, 0, 0]);
        assert_eq!(bytes[24..28], [3, 0, 0, 0]);
        assert_eq!(bytes[28..32], [5, 0, 0, 0]);
        assert_eq!(bytes[32..36], [20, 0, 0, 0]);
        assert_eq!(bytes[36..40], [20, 0, 0, 0]);
        assert_eq!(bytes[40..], [0xaa; 20]);
    }
}
