// SPDX-License-Identifier: GPL-2.0

//! The receive ring of a channel, and the frames that come by it.
//!
//! Each descriptor is a page. A frame is in one, or in several where it is longer; a short one is copied and its page
//! used again, and of another the pages become part.

use super::memory::{
    ChannelMemory,
    RecordWord, //
};
use crate::{
    abi,
    abi::{
        ReceivedEntry,
        ReceivedStatus, //
    },
    hardware::Hardware,
    kernel_ext::barrier::dma_wmb,
    lent::Lent,
    net::{
        EthernetHeader,
        ReceivePages,
        Skb, //
    },
};
use kernel::{
    device::{
        Bound,
        Device, //
    },
    prelude::*,
    sync::Arc, //
};

/// Bytes of a buffer.
const BUFFER: usize = ReceivePages::LENGTH;
const _: () = assert!(
    BUFFER >= abi::RECEIVE_MIN_BUFFER as usize && BUFFER <= abi::RECEIVE_MAX_BUFFER as usize
);

/// Frames of up to so many bytes are copied.
const COPIED: usize = 256;
/// Room in the buffer of a frame that is not: what protocols look at is pulled there.
const HEADERS: usize = 128;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// A frame of so many bytes.
    Frame(usize),
    /// The buffers could not be used.
    BadBuffers,
}

/// What an entry says of buffers from descriptor `next` on, of which `posted` are the device's; nothing where that cannot
/// be.
pub(super) fn said(entry: &ReceivedEntry, next: u32, posted: u32) -> Option<Said> {
    let buffers = usize::from(entry.buffers);
    if entry.index != next || buffers == 0 || buffers as u64 > u64::from(posted) {
        return None;
    }
    let length = entry.length as usize;
    match ReceivedStatus::from_number(entry.status)? {
        ReceivedStatus::Good => {
            // Each but the last is filled.
            let fits = length.div_ceil(BUFFER) == buffers && length >= EthernetHeader::SIZE;
            fits.then_some(Said::Frame(length))
        }
        ReceivedStatus::BadBuffer => (length == 0).then_some(Said::BadBuffers),
    }
}

/// A frame that has come.
pub(super) struct Arrived {
    pub(super) entry: ReceivedEntry,
    /// Nothing where it is lost: the buffers could not be used, or there is no memory.
    pub(super) skb: Result<Skb>,
}

/// The receive ring of a channel that is open.
pub(super) struct Receiver {
    hw: Arc<Hardware>,
    memory: Arc<ChannelMemory>,
    /// By their descriptor.
    pages: Lent<ReceivePages>,
    channel: u16,
    /// Descriptors posted, and those of them that came back.
    producer: u32,
    next: u32,
    /// Entries taken.
    entry: u32,
    /// The device has said what cannot be: nothing is received any more.
    broken: bool,
}

impl Receiver {
    pub(super) fn new(
        dev: &Device<Bound>,
        hw: &Arc<Hardware>,
        memory: &Arc<ChannelMemory>,
        channel: u16,
    ) -> Result<Self> {
        let entries = 1usize << memory.layout().receive_log_entries;
        Ok(Self {
            hw: hw.clone(),
            memory: memory.clone(),
            pages: Lent::new(&hw.reach, ReceivePages::new(dev, entries)?),
            channel,
            producer: 0,
            next: 0,
            entry: 0,
            broken: false,
        })
    }

    fn size(&self) -> u32 {
        1 << self.memory.layout().receive_log_entries
    }

    fn slot(&self, index: u32) -> usize {
        (index & (self.size() - 1)) as usize
    }

    /// Descriptors that the device has.
    pub(super) fn posted(&self) -> u32 {
        self.producer.wrapping_sub(self.next)
    }

    /// Posts as many buffers as there is room and memory for; whether that is all.
    pub(super) fn refill(&mut self) -> bool {
        self.refill_by(ReceivePages::fill)
    }

    /// The same, waiting for memory: by who has it alone. Sleeps.
    pub(super) fn fill(&mut self) {
        self.refill_by(ReceivePages::fill_patiently);
    }

    fn refill_by(&mut self, fill: fn(&mut ReceivePages, usize) -> Result<u64>) -> bool {
        let start = self.producer;
        while self.posted() < self.size() {
            let slot = self.slot(self.producer);
            let Ok(address) = fill(&mut self.pages, slot) else {
                break;
            };
            self.memory
                .put_descriptor(self.producer, address, BUFFER as u32);
            self.producer = self.producer.wrapping_add(1);
        }
        if self.producer != start {
            // Descriptors before the index that says that they are there.
            dma_wmb();
            self.memory
                .store(RecordWord::RECEIVE_PRODUCER, self.producer);
        }
        self.posted() == self.size()
    }

    /// Whether the device has fewer buffers than it should.
    pub(super) fn is_low(&self) -> bool {
        self.posted() < self.size() / 4
    }

    /// Whether something has come.
    pub(super) fn has_arrived(&self) -> bool {
        !self.broken && self.memory.is_received(self.entry)
    }

    /// Has the device tell of the next frame.
    pub(super) fn arm(&self) {
        self.memory.store(RecordWord::RECEIVE_ARM, self.entry);
    }

    /// Takes the next frame, if one has come; `buffer` makes one for so many bytes.
    pub(super) fn take(&mut self, buffer: impl FnOnce(usize) -> Result<Skb>) -> Option<Arrived> {
        if self.broken {
            return None;
        }
        let entry = self.memory.received(self.entry)?;
        let Some(said) = said(&entry, self.next, self.posted()) else {
            self.broken = true;
            dev_err!(
                self.hw.pdev,
                "channel {}: received {} bytes in {} buffers from {}, where {} of {} are\n",
                self.channel,
                entry.length,
                entry.buffers,
                entry.index,
                self.posted(),
                self.next
            );
            self.hw.fail();
            return None;
        };
        let first = self.next;
        self.entry = self.entry.wrapping_add(1);
        self.next = self.next.wrapping_add(entry.buffers.into());
        let skb = match said {
            Said::Frame(length) => self.frame(first, length, buffer),
            Said::BadBuffers => Err(EFAULT),
        };
        Some(Arrived { entry, skb })
    }

    /// Makes a frame of the buffers from descriptor `first` on.
    fn frame(
        &mut self,
        first: u32,
        length: usize,
        buffer: impl FnOnce(usize) -> Result<Skb>,
    ) -> Result<Skb> {
        if length <= COPIED {
            let mut skb = buffer(length)?;
            let slot = self.slot(first);
            self.pages.copy(slot, length, &mut skb)?;
            return Ok(skb);
        }
        let mut skb = buffer(HEADERS)?;
        let mut header = [0; EthernetHeader::SIZE];
        self.pages.peek(self.slot(first), &mut header)?;
        skb.append_slice(&header)?;
        let mut from = header.len();
        let mut left = length;
        let mut index = first;
        while left > 0 {
            let slot = self.slot(index);
            let bytes = left.min(BUFFER);
            self.pages.attach(slot, from, bytes, &mut skb)?;
            from = 0;
            left -= bytes;
            index = index.wrapping_add(1);
        }
        Ok(skb)
    }
}

#[kunit_tests(ferrite_receive)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    fn entry(index: u32, length: usize, buffers: u8, status: u8) -> ReceivedEntry {
        ReceivedEntry {
            index,
            length: length as u32,
            buffers,
            status,
            ..ReceivedEntry::zeroed()
        }
    }

    #[test]
    fn a_frame_is_in_as_many_buffers_as_it_fills() {
        for (length, buffers) in [(14, 1), (1514, 1), (BUFFER, 1), (BUFFER + 1, 2), (9018, 3)] {
            let good = entry(7, length, buffers, 0);
            assert_eq!(said(&good, 7, 100), Some(Said::Frame(length)));
            // Not in more, nor in fewer.
            for other in [0, buffers - 1, buffers + 1, 255] {
                assert_eq!(said(&entry(7, length, other, 0), 7, 300), None);
            }
        }
        assert_eq!(said(&entry(7, 0, 2, 1), 7, 100), Some(Said::BadBuffers));
    }

    #[test]
    fn what_a_device_says_of_buffers_that_it_does_not_have_is_not_believed() {
        // Others than the next, more than there are, and none.
        for (entry, posted) in [
            (entry(8, 100, 1, 0), 100),
            (entry(6, 100, 1, 0), 100),
            (entry(7, 100, 1, 0), 0),
            (entry(7, 9018, 3, 0), 2),
            (entry(7, 0, 0, 1), 100),
            (entry(7, 0, 3, 1), 2),
        ] {
            assert_eq!(said(&entry, 7, posted), None);
        }
        // Frames without a header or a length that is in the buffers, and what is not known.
        for entry in [
            entry(7, 13, 1, 0),
            entry(7, 0, 1, 0),
            entry(7, usize::MAX, 1, 0),
            entry(7, 100, 1, 1),
            entry(7, 100, 1, 2),
            entry(7, 100, 1, 255),
        ] {
            assert_eq!(said(&entry, 7, 100), None);
        }
        // Indices never stop counting.
        let last = entry(u32::MAX, 9018, 3, 0);
        assert_eq!(said(&last, u32::MAX, 3), Some(Said::Frame(9018)));
    }
}
