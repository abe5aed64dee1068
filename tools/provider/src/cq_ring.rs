// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The ring of a completion queue, and what is under the queue's lock.

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use ferrite_abi::{
    first_unwritten, phase_of, CompletionEntry, CompletionRecord, Plain, UverbsCqRequest,
    COMPLETION_PHASE, COMPLETION_VALID_OFFSET,
};

use crate::completion::{Completion, Finished, Last, QueuesByNumber};
use crate::ring::{QueueBuffer, Ring};
use crate::sys::*;

/// What is changed under the queue's lock.
pub(crate) struct CqState {
    pub(crate) ring: CqRing,
    /// Entries taken, free-running.
    pub(crate) consumer: u32,
    /// The entry that the extended interface looks at.
    pub(crate) current: Completion,
    /// The queue pair that the last entry was of: the next is often of the same.
    last: Last,
}

/// A ring of completions.
pub(crate) struct CqRing {
    memory: QueueBuffer,
    ring: Ring,
    log_entries: u8,
}

const ENTRY_WORDS: usize = size_of::<CompletionEntry>() / 8;

/// An entry that the device has written: it does not write it again before the published consumer index
/// has passed it. Each word is read when it is asked for, so that who asks for few pays for few; a
/// device that breaks its word gives wrong values, and no more.
#[derive(Clone, Copy)]
pub(crate) struct Written<'a> {
    words: &'a [AtomicU64; ENTRY_WORDS],
    /// The last word, as it was when its phase was looked at.
    valid: u64,
}

/// A field of [`CompletionEntry`], which stands in one word of [`Written`].
macro_rules! fields {
    ($( $(#[$meta:meta])* $field:ident: $ty:ty, )*) => {$(
        $(#[$meta])*
        #[inline]
        pub(crate) fn $field(&self) -> $ty {
            const OFFSET: usize = offset_of!(CompletionEntry, $field);
            const { assert!(OFFSET % size_of::<$ty>() == 0) };
            let word = if OFFSET >= COMPLETION_VALID_OFFSET {
                self.valid
            } else {
                self.words[OFFSET / 8].load(Ordering::Relaxed)
            };
            (word >> (OFFSET % 8 * 8)) as $ty
        }
    )*};
}

// Words are taken apart as a little-endian machine has them.
const _: () = assert!(cfg!(target_endian = "little"));

impl Written<'_> {
    fields! {
        qpn: u32,
        index: u32,
        byte_count: u32,
        tag: u32,
        immediate: u64,
        source_qpn: u32,
        srqn: u32,
        pkey_index: u16,
        flags: u16,
        vendor_syndrome: u32,
        status: u8,
        opcode: u8,
    }

    /// All of it.
    #[inline]
    pub(crate) fn copy(&self) -> CompletionEntry {
        let mut words = [0_u64; ENTRY_WORDS];
        for (copy, word) in words.iter_mut().zip(self.words) {
            *copy = word.load(Ordering::Relaxed);
        }
        words[COMPLETION_VALID_OFFSET / 8] = self.valid;
        // SAFETY: both are 64 bytes, and any bytes make a valid `CompletionEntry` (it is `Plain`).
        unsafe { core::mem::transmute(words) }
    }
}

/// What a page has room for beside the record. A shorter ring would take the page as well, and a program
/// that shortens its queue while work is under way gets the completions of that, too.
const SHORTEST_LOG_ENTRIES: u8 = 5;

impl CqRing {
    /// A ring for at least `entries` entries.
    ///
    /// # Safety
    ///
    /// As for [`crate::protection::Pd::buffer`].
    pub(crate) unsafe fn new(
        entries: u32,
        max_log_entries: u8,
        pd: *mut ibv_pd,
    ) -> Result<Self, c_int> {
        if entries == 0 || entries > 1 << max_log_entries.min(30) {
            return Err(libc::EINVAL);
        }
        let shortest = 1 << SHORTEST_LOG_ENTRIES.min(max_log_entries);
        let stride = size_of::<CompletionEntry>();
        let ring = Ring::new(
            0,
            entries.max(shortest) as usize,
            stride,
            max_log_entries.min(30),
        )?;
        Ok(Self {
            // SAFETY: the domain is as `Pd::buffer` wants it, by the caller.
            memory: unsafe { QueueBuffer::new::<CompletionRecord>(pd, ring.end()) }?,
            log_entries: ring.log_entries(),
            ring,
        })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.ring.entries
    }

    pub(crate) fn publish_consumer(&self, consumer: u32) {
        // Release: the device may overwrite an entry once it sees that it was consumed.
        self.memory
            .record(offset_of!(CompletionRecord, consumer))
            .store(consumer, Ordering::Release);
    }

    pub(crate) fn request(&self) -> UverbsCqRequest {
        UverbsCqRequest {
            buffer: self.memory.address(),
            length: self.memory.length(),
            record_offset: self.memory.record_offset(),
            log_entries: u32::from(self.log_entries),
        }
    }

    #[inline]
    fn slot(&self, index: u32) -> *mut u8 {
        self.memory
            .at(self.ring.slot(index) * size_of::<CompletionEntry>())
    }

    /// The eight words of an entry.
    #[inline]
    fn words(&self, index: u32) -> &[AtomicU64; ENTRY_WORDS] {
        // SAFETY: a slot is 64 bytes of the ring, which starts on a page: the words are in it and
        // aligned, and mapped as long as `self`. While the device may write them this process reads
        // them only as atomics.
        unsafe { &*self.slot(index).cast() }
    }

    /// The entry with free-running index `index`, if the device has written it.
    #[inline]
    pub(crate) fn written(&self, index: u32) -> Option<Written<'_>> {
        let words = self.words(index);
        // Acquire: the device writes these eight bytes after all the others.
        let valid = words[COMPLETION_VALID_OFFSET / 8].load(Ordering::Acquire);
        let written = (valid >> 56) as u8 & COMPLETION_PHASE == phase_of(index, self.log_entries);
        written.then_some(Written { words, valid })
    }

    /// Whether the device has written the entry with free-running index `index`.
    #[inline]
    fn is_written(&self, index: u32) -> bool {
        self.written(index).is_some()
    }

    /// A copy of the entry with free-running index `index`, if the device has written it.
    fn entry(&self, index: u32) -> Option<CompletionEntry> {
        Some(self.written(index)?.copy())
    }

    /// Makes every entry of a new ring one that the device has yet to write, when the first to come
    /// has index `consumer`: which phase that is depends on the round that the index is in.
    pub(crate) fn begin_at(&self, consumer: u32) {
        for n in 0..self.entries() {
            let index = consumer.wrapping_add(n);
            let entry = CompletionEntry {
                phase: phase_of(index, self.log_entries) ^ COMPLETION_PHASE,
                ..CompletionEntry::zeroed()
            };
            // SAFETY: the slot is in the mapping and aligned, as in `words`; the device is told
            // of a new ring only afterwards.
            unsafe { ptr::write_volatile(self.slot(index).cast::<CompletionEntry>(), entry) };
        }
    }

    /// Writes an entry where the device has already written one.
    pub(crate) fn rewrite(&self, index: u32, mut entry: CompletionEntry) {
        entry.phase = entry.phase & !COMPLETION_PHASE | phase_of(index, self.log_entries);
        // SAFETY: the slot is in the mapping and aligned, as in `words`; until the consumer
        // index has passed an entry that was written, it is this side's.
        unsafe { ptr::write_volatile(self.slot(index).cast::<CompletionEntry>(), entry) };
    }
}

impl CqState {
    pub(crate) fn new(ring: CqRing) -> Self {
        Self {
            ring,
            consumer: 0,
            current: Completion::none(),
            last: Last::none(),
        }
    }

    /// Takes the next completion of the queue, which is `home`: its entry, which stays as it is until
    /// [`CqState::publish`], and what its work request was.
    #[inline(always)]
    pub(crate) fn next(
        &mut self,
        tables: &QueuesByNumber,
        home: *const ibv_cq,
    ) -> Option<(Written<'_>, Finished)> {
        let ring = &self.ring;
        // A device that writes faster than this reads ends it, too: the queue's lock is held.
        for _ in 0..1u32 << ring.log_entries {
            let entry = ring.written(self.consumer)?;
            self.consumer = self.consumer.wrapping_add(1);
            // SAFETY: what is `CqState` is behind the queue's lock, which `&mut self` shows to be held,
            // and `clean`, which comes with each leaving (`Cq::leave`), has what was found last forgotten.
            if let Some(finished) = unsafe { tables.resolve(&entry, &mut self.last, home) } {
                return Some((entry, finished));
            }
            // Of a queue pair that is not known here: nobody could use it.
        }
        None
    }

    /// Tells the device what was taken.
    #[inline]
    pub(crate) fn publish(&self) {
        self.ring.publish_consumer(self.consumer);
    }

    /// The index of the first entry that is not there yet.
    pub(crate) fn end(&self) -> u32 {
        first_unwritten(self.consumer, self.ring.log_entries, |index| {
            self.ring.is_written(index)
        })
    }

    /// Entries written and not taken.
    pub(crate) fn waiting(&self) -> u32 {
        self.end().wrapping_sub(self.consumer)
    }

    /// Drops all entries that `unwanted` picks, keeping the others in order.
    ///
    /// No queue pair is remembered after it: whoever frees one does so before (`Cq::leave`).
    pub(crate) fn clean(&mut self, mut unwanted: impl FnMut(&CompletionEntry) -> bool) {
        self.last = Last::none();
        let end = self.end();
        // Entries that stay move up to close the gaps; the device writes only from `end` on.
        let mut dropped = 0u32;
        let mut index = end;
        while index != self.consumer {
            index = index.wrapping_sub(1);
            let Some(entry) = self.ring.entry(index) else {
                break;
            };
            if unwanted(&entry) {
                dropped += 1;
            } else if dropped != 0 {
                self.ring.rewrite(index.wrapping_add(dropped), entry);
            }
        }
        if dropped != 0 {
            self.consumer = self.consumer.wrapping_add(dropped);
            self.publish();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn ring(entries: u32, max_log_entries: u8) -> Result<CqRing, c_int> {
        // SAFETY: no domain is one of the two things that it takes.
        unsafe { CqRing::new(entries, max_log_entries, ptr::null_mut()) }
    }

    /// On a device that has no longer ones.
    pub(crate) fn state(entries: u32) -> CqState {
        CqState::new(ring(entries, entries.ilog2() as u8).unwrap())
    }

    impl CqState {
        /// The consumer index that the device sees.
        pub(crate) fn shown(&self) -> u32 {
            let shown = offset_of!(CompletionRecord, consumer);
            self.ring.memory.record(shown).load(Ordering::Acquire)
        }
    }

    pub(crate) fn write(state: &CqState, index: u32, qpn: u32) {
        let entry = CompletionEntry {
            qpn,
            index,
            ..CompletionEntry::zeroed()
        };
        state.ring.rewrite(index, entry);
    }

    fn left(state: &CqState) -> Vec<(u32, u32)> {
        (state.consumer..)
            .map_while(|index| state.ring.entry(index))
            .map(|entry| (entry.qpn, entry.index))
            .collect()
    }

    #[test]
    fn entries_become_visible_by_phase_round_after_round() {
        let mut state = state(4);
        for index in 0..11 {
            assert!(state.ring.entry(index).is_none());
            write(&state, index, 7);
            assert_eq!(state.ring.entry(index).unwrap().index, index);
            state.consumer = index + 1;
        }
    }

    #[test]
    fn the_end_is_after_all_that_is_there() {
        let mut state = state(4);
        for index in 0..11 {
            assert_eq!(state.end(), index);
            write(&state, index, 7);
            if index >= 3 {
                assert_eq!(state.waiting(), 4);
                state.consumer += 1;
            }
        }
    }

    #[test]
    fn cleaning_drops_one_queue_pair_and_keeps_the_order_of_the_rest() {
        let mut state = state(8);
        // Past the end of the ring, so that the phase changes among the entries.
        for index in 0..5 {
            write(&state, index, 1);
        }
        state.consumer = 5;
        for (index, qpn) in (5..).zip([1, 2, 1, 2, 2, 1]) {
            write(&state, index, qpn);
        }
        state.clean(|entry| entry.qpn == 1);
        assert_eq!(state.consumer, 8);
        assert_eq!(left(&state), [(2, 6), (2, 8), (2, 9)]);
        assert_eq!(state.shown(), 8);
        state.clean(|entry| entry.qpn == 2);
        assert_eq!(left(&state), []);
        assert_eq!(state.consumer, 11);
    }

    #[test]
    fn a_full_ring_is_cleaned_too() {
        let mut state = state(4);
        for index in 0..4 {
            write(&state, index, 3);
        }
        state.clean(|entry| entry.qpn == 3);
        assert_eq!(state.consumer, 4);
        assert_eq!(left(&state), []);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(ring(0, 20).err(), Some(libc::EINVAL));
        assert_eq!(ring(17, 4).err(), Some(libc::EINVAL));
        assert_eq!(ring(9, 4).unwrap().entries(), 16);
        assert_eq!(ring(1, 4).unwrap().entries(), 16);
        assert_eq!(ring(1, 20).unwrap().entries(), 32);
        assert_eq!(ring(33, 20).unwrap().entries(), 64);
    }

    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut state = state(8);
        state.consumer = u32::MAX - 20;
        state.ring.begin_at(state.consumer);
        for round in 0..12u32 {
            let first = state.consumer;
            assert_eq!(state.waiting(), 0);
            for n in 0..8 {
                write(&state, first.wrapping_add(n), 1 + n % 2);
                assert_eq!(state.waiting(), n + 1);
            }
            state.clean(|entry| entry.qpn == 1);
            assert_eq!(state.waiting(), 4, "round {round}");
            let left: Vec<u32> = (0..4)
                .map(|n| {
                    state
                        .ring
                        .entry(state.consumer.wrapping_add(n))
                        .unwrap()
                        .qpn
                })
                .collect();
            assert_eq!(left, [2; 4]);
            state.consumer = state.consumer.wrapping_add(4);
            // Another ring, shorter and longer, from the middle of the numbers.
            let other = ring(8, 20).unwrap();
            other.begin_at(state.consumer);
            state.ring = other;
        }
        assert!(state.consumer < 200);
    }
}
