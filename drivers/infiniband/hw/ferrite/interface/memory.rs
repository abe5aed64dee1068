// SPDX-License-Identifier: GPL-2.0

//! The memory that a channel shares with the device: where its rings and its record are, and the words of each.

use crate::{
    abi,
    abi::{
        ChannelRecord,
        CreateChannel,
        Plain,
        ReceiveDescriptor,
        ReceivedEntry,
        BLOCK_SIZE, //
    },
    bars::Doorbells,
    dma_types::Block,
    hardware::Hardware,
    kernel_ext::barrier::dma_rmb,
    lent::Lent,
    port,
    ring::KernelBlocks,
};
use core::mem::offset_of;
use kernel::{
    device::{
        Bound,
        Device, //
    },
    prelude::*,
    sync::Arc, //
};

/// Words of a block.
const BLOCK_WORDS: usize = BLOCK_SIZE / size_of::<u32>();
/// Words of a receive descriptor, and of a received entry: whole ones make a block.
const DESCRIPTOR_WORDS: usize = size_of::<ReceiveDescriptor>() / size_of::<u32>();
const ENTRY_WORDS: usize = size_of::<ReceivedEntry>() / size_of::<u32>();
const _: () = assert!(BLOCK_WORDS % DESCRIPTOR_WORDS == 0 && BLOCK_WORDS % ENTRY_WORDS == 0);
const _: () = assert!(abi::TRANSMIT_BLOCK_SIZE == BLOCK_SIZE);

/// A word of the record.
#[derive(Clone, Copy)]
pub(super) struct RecordWord(usize);

impl RecordWord {
    pub(super) const TRANSMIT_PRODUCER: Self = Self(offset_of!(ChannelRecord, transmit_producer));
    pub(super) const RECEIVE_PRODUCER: Self = Self(offset_of!(ChannelRecord, receive_producer));
    pub(super) const TRANSMIT_ARM: Self = Self(offset_of!(ChannelRecord, transmit_arm));
    pub(super) const RECEIVE_ARM: Self = Self(offset_of!(ChannelRecord, receive_arm));
    pub(super) const TRANSMIT_WAKE: Self = Self(offset_of!(ChannelRecord, transmit_wake));
    pub(super) const TRANSMIT_CONSUMER: Self = Self(offset_of!(ChannelRecord, transmit_consumer));
}

/// Where the parts of a channel are, in blocks from the start of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) transmit_log_blocks: u8,
    pub(super) receive_log_entries: u8,
}

impl Layout {
    const fn transmit_blocks(&self) -> usize {
        1 << self.transmit_log_blocks
    }

    const fn entries(&self) -> usize {
        1 << self.receive_log_entries
    }

    const fn descriptors(&self) -> usize {
        self.transmit_blocks()
    }

    const fn received(&self) -> usize {
        self.descriptors() + (self.entries() * DESCRIPTOR_WORDS).div_ceil(BLOCK_WORDS)
    }

    const fn record(&self) -> usize {
        self.received() + (self.entries() * ENTRY_WORDS).div_ceil(BLOCK_WORDS)
    }

    const fn blocks(&self) -> usize {
        self.record() + size_of::<ChannelRecord>() / BLOCK_SIZE
    }

    /// The block and the word in it where what begins at block `first` has its entry `slot`, of so many words.
    const fn place(first: usize, slot: usize, words: usize) -> (usize, usize) {
        let word = slot * words;
        (first + word / BLOCK_WORDS, word % BLOCK_WORDS)
    }
}

/// The memory of a channel.
pub(super) struct ChannelMemory {
    blocks: Lent<KernelBlocks>,
    layout: Layout,
}

impl ChannelMemory {
    /// Memory of zeroes. Sleeps.
    pub(super) fn new(
        dev: &Device<Bound>,
        hw: &Arc<Hardware>,
        layout: Layout,
    ) -> Result<Arc<Self>> {
        let blocks = KernelBlocks::new(dev, layout.blocks())?;
        let this = Self {
            blocks: Lent::new(&hw.reach, blocks),
            layout,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// The command that makes the channel of this number, whose events go to event queue `eqn`.
    pub(super) fn create_command(&self, channel: u16, eqn: u16) -> CreateChannel {
        let offset = |block: usize| (block * BLOCK_SIZE) as u32;
        CreateChannel {
            channel,
            eqn,
            transmit_log_blocks: self.layout.transmit_log_blocks,
            receive_log_entries: self.layout.receive_log_entries,
            port: port::DEVICE_PORT,
            doorbell_page: Doorbells::KERNEL_PAGE,
            buffer: self.blocks.buffer(),
            transmit_offset: 0,
            receive_offset: offset(self.layout.descriptors()),
            received_offset: offset(self.layout.received()),
            record_offset: offset(self.layout.record()),
            ..CreateChannel::zeroed()
        }
    }

    /// Reads a word of the record.
    #[inline]
    pub(super) fn load(&self, word: RecordWord) -> u32 {
        let (block, at) = Layout::place(self.layout.record(), word.0 / size_of::<u32>(), 1);
        // It is in the memory, by the layout.
        self.blocks.word(block, at).unwrap_or(0)
    }

    /// Writes a word of the record.
    #[inline]
    pub(super) fn store(&self, word: RecordWord, value: u32) {
        let (block, at) = Layout::place(self.layout.record(), word.0 / size_of::<u32>(), 1);
        // As above.
        let _ = self.blocks.set_word(block, at, value);
    }

    /// Writes the block of the transmit ring with free-running index `index`.
    #[inline]
    pub(super) fn put_block(&self, index: u32, block: Block) {
        let at = index as usize & (self.layout.transmit_blocks() - 1);
        let _ = self.blocks.put(at, block);
    }

    /// Writes the receive descriptor with free-running index `index`.
    #[inline]
    pub(super) fn put_descriptor(&self, index: u32, address: u64, length: u32) {
        let slot = index as usize & (self.layout.entries() - 1);
        let (block, at) = Layout::place(self.layout.descriptors(), slot, DESCRIPTOR_WORDS);
        let words = [address as u32, (address >> 32) as u32, length, 0];
        for (number, word) in words.into_iter().enumerate() {
            let _ = self.blocks.set_word(block, at + number, word);
        }
    }

    /// Whether the received entry with free-running index `index` is there.
    #[inline]
    pub(super) fn is_received(&self, index: u32) -> bool {
        let slot = index as usize & (self.layout.entries() - 1);
        let (block, at) = Layout::place(self.layout.received(), slot, ENTRY_WORDS);
        let last = self.blocks.word(block, at + ENTRY_WORDS - 1).unwrap_or(0);
        let phase = (last >> 24) as u8 & 1;
        phase == abi::phase_of(index, self.layout.receive_log_entries)
    }

    /// The received entry with free-running index `index`, if it is there.
    #[inline]
    pub(super) fn received(&self, index: u32) -> Option<ReceivedEntry> {
        if !self.is_received(index) {
            return None;
        }
        // The device writes the phase last: what stands before it is read after it.
        dma_rmb();
        let slot = index as usize & (self.layout.entries() - 1);
        let (block, at) = Layout::place(self.layout.received(), slot, ENTRY_WORDS);
        let mut entry = ReceivedEntry::zeroed();
        let words = entry.as_bytes_mut().chunks_exact_mut(size_of::<u32>());
        for (number, bytes) in words.enumerate() {
            let word = self.blocks.word(block, at + number).ok()?;
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Some(entry)
    }
}

#[kunit_tests(ferrite_channel_memory)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_channel_follow_one_another() {
        for (transmit_log_blocks, receive_log_entries) in [(4, 4), (9, 8), (15, 15), (5, 12)] {
            let layout = Layout {
                transmit_log_blocks,
                receive_log_entries,
            };
            let (blocks, entries) = (1usize << transmit_log_blocks, 1usize << receive_log_entries);
            assert_eq!(layout.descriptors(), blocks);
            assert_eq!(layout.received(), blocks + entries * 16 / 64);
            assert_eq!(layout.record(), layout.received() + entries * 32 / 64);
            assert_eq!(layout.blocks(), layout.record() + 2);
        }
    }

    #[test]
    fn entries_lie_in_blocks_one_after_the_other() {
        // Four descriptors of a block, two entries.
        assert_eq!(Layout::place(10, 0, DESCRIPTOR_WORDS), (10, 0));
        assert_eq!(Layout::place(10, 3, DESCRIPTOR_WORDS), (10, 12));
        assert_eq!(Layout::place(10, 4, DESCRIPTOR_WORDS), (11, 0));
        assert_eq!(Layout::place(10, 1, ENTRY_WORDS), (10, 8));
        assert_eq!(Layout::place(10, 7, ENTRY_WORDS), (13, 8));
        // Both halves of the record.
        let word = |word: RecordWord| Layout::place(0, word.0 / 4, 1);
        assert_eq!(word(RecordWord::RECEIVE_ARM), (0, 3));
        assert_eq!(word(RecordWord::TRANSMIT_WAKE), (1, 0));
        assert_eq!(word(RecordWord::TRANSMIT_CONSUMER), (1, 1));
    }
}
