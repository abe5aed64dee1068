// SPDX-License-Identifier: GPL-2.0

//! Reading a ring of completions.

use super::NO_QUEUE_PAIR;
use crate::{
    abi,
    abi::{
        CompletionEntry,
        Plain, //
    },
    kernel_ext::barrier::dma_rmb,
    ring::KernelBlocks, //
};
use kernel::prelude::*;

/// Memory of completion queue entries.
pub(crate) trait Entries {
    /// The word with status, opcode, port and phase of the entry at `slot`.
    fn valid_word(&self, slot: usize) -> Result<u32>;
    /// The entry at `slot`.
    fn entry(&self, slot: usize) -> Result<CompletionEntry>;
    /// Makes the entry at `slot` one of no queue pair.
    fn disown(&self, slot: usize) -> Result;
}

/// The word of an entry that the device writes last.
pub(super) const VALID_WORD: usize = 15;

impl Entries for KernelBlocks {
    #[inline]
    fn valid_word(&self, slot: usize) -> Result<u32> {
        self.word(slot, VALID_WORD)
    }

    #[inline]
    fn entry(&self, slot: usize) -> Result<CompletionEntry> {
        let block = self.get(slot)?;
        let mut entry = CompletionEntry::zeroed();
        for (bytes, word) in entry.as_bytes_mut().chunks_exact_mut(4).zip(block.words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Ok(entry)
    }

    fn disown(&self, slot: usize) -> Result {
        self.set_word(slot, 0, NO_QUEUE_PAIR)
    }
}

/// Where the driver is in a ring of `1 << log_entries`.
pub(crate) struct Reader {
    /// Entries consumed, free-running.
    pub(super) consumer: u32,
    pub(super) log_entries: u8,
}

impl Reader {
    /// At the start of a ring.
    pub(crate) const fn new(log_entries: u8) -> Self {
        Self {
            consumer: 0,
            log_entries,
        }
    }

    pub(super) fn slot(&self) -> usize {
        self.slot_of(self.consumer)
    }

    fn slot_of(&self, index: u32) -> usize {
        (index & ((1 << self.log_entries) - 1)) as usize
    }

    /// Whether the entry with free-running index `index` is there: its phase is that of its round.
    #[inline]
    fn is_written(&self, index: u32, entries: &impl Entries) -> bool {
        let phase = abi::phase_of(index, self.log_entries);
        entries
            .valid_word(self.slot_of(index))
            .is_ok_and(|word| (word >> 24) as u8 & abi::COMPLETION_PHASE == phase)
    }

    /// Whether there is an entry to take.
    #[inline]
    pub(crate) fn ready(&self, entries: &impl Entries) -> bool {
        self.is_written(self.consumer, entries)
    }

    /// The index of the first entry that is not there yet.
    pub(crate) fn end(&self, entries: &impl Entries) -> u32 {
        abi::first_unwritten(self.consumer, self.log_entries, |index| {
            self.is_written(index, entries)
        })
    }

    /// Takes the next entry.
    #[inline]
    pub(crate) fn next(&mut self, entries: &impl Entries) -> Option<CompletionEntry> {
        if !self.ready(entries) {
            return None;
        }
        // The rest of an entry is read after its phase.
        dma_rmb();
        let entry = entries.entry(self.slot()).ok()?;
        self.consumer = self.consumer.wrapping_add(1);
        Some(entry)
    }
}
