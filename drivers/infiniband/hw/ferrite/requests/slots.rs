// SPDX-License-Identifier: GPL-2.0

//! Sets of slots.

use super::SLOTS;

const WORD: usize = u64::BITS as usize;

/// A set of slots: a bit of each. In words, as the kernel has no integer that is longer.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct SlotSet([u64; SLOTS.div_ceil(WORD)]);

impl SlotSet {
    /// All slots that there are.
    pub(super) fn all() -> Self {
        let mut all = Self::default();
        (0..SLOTS).for_each(|slot| all.insert(slot));
        all
    }

    pub(super) fn insert(&mut self, slot: usize) {
        if slot < SLOTS {
            self.0[slot / WORD] |= 1 << (slot % WORD);
        }
    }

    pub(super) fn remove(&mut self, slot: usize) {
        if let Some(word) = self.0.get_mut(slot / WORD) {
            *word &= !(1 << (slot % WORD));
        }
    }

    pub(super) fn contains(&self, slot: usize) -> bool {
        let word = self.0.get(slot / WORD).copied().unwrap_or(0);
        word & 1 << (slot % WORD) != 0
    }

    /// How many there are in it.
    pub(super) fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The first one in it.
    pub(super) fn first(&self) -> Option<usize> {
        let at = self.0.iter().position(|word| *word != 0)?;
        Some(at * WORD + self.0[at].trailing_zeros() as usize)
    }

    /// All that are in it, from the first on.
    pub(super) fn iter(mut self) -> impl Iterator<Item = usize> {
        core::iter::from_fn(move || {
            let slot = self.first()?;
            self.remove(slot);
            Some(slot)
        })
    }
}
