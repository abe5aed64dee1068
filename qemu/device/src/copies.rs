// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long copies between memories.
//!
//! A processor that stores to a line that is in no cache reads it from memory before, and throws out
//! another. Who copies whole lines can have them go past the caches instead, which takes half of the time where
//! what is written would not have stayed there anyway, and a little longer where it would have. So what is
//! written again soon goes into the caches, and the rest past them.

use std::cell::Cell;

/// Bytes of one message after which its copies may go past the caches. Who gets less is about to read it.
pub const LONG: usize = 64 << 10;
/// What was written with no more of long copies between is likely to be in a cache still. The source
/// takes as much room there, and the caches are everybody's.
const KEPT: u64 = 4 << 20;
/// What was written is remembered by blocks of so many bytes, as a power of two.
const BLOCK_SHIFT: u32 = 16;
/// So many of them, at a place by their number: those of two buffers seldom have the same.
const BLOCKS: usize = 256;

/// What was written to a block last.
#[derive(Clone, Copy)]
struct Written {
    block: u64,
    /// How much had been written of all when it began.
    when: u64,
    /// Where it ends.
    end: u64,
    /// It went past the caches.
    past: bool,
}

/// What long copies have written to a memory not long ago.
pub struct Recent {
    blocks: Box<[Cell<Option<Written>>; BLOCKS]>,
    written: Cell<u64>,
}

impl Default for Recent {
    fn default() -> Self {
        Self {
            blocks: Box::new([const { Cell::new(None) }; BLOCKS]),
            written: Cell::new(0),
        }
    }
}

impl Recent {
    /// How many of `length` bytes from `address` on are to be written in the same way, and whether
    /// that is past the caches. They are taken for written.
    pub fn next(&self, address: u64, length: usize) -> (usize, bool) {
        const BLOCK: u64 = 1 << BLOCK_SHIFT;
        let block = address >> BLOCK_SHIFT;
        let length = length.min((BLOCK - address % BLOCK) as usize);
        let now = self.written.get();
        self.written.set(now.wrapping_add(length as u64));
        let place = &self.blocks[block as usize % BLOCKS];
        let last = place.get().filter(|last| last.block == block);
        let (when, past) = match last {
            // The rest of what was begun, not the same once more.
            Some(last) if last.end == address || now.wrapping_sub(last.when) < BLOCK => {
                (last.when, last.past)
            }
            Some(last) => (now, now.wrapping_sub(last.when) > KEPT),
            None => (now, true),
        };
        let end = address.wrapping_add(length as u64);
        place.set(Some(Written {
            block,
            when,
            end,
            past,
        }));
        (length, past)
    }
}

/// Copies past the caches where the processor can; like `std::ptr::copy`, also where both are the same memory.
/// Stores after it, as of who tells that it is done, are seen after it.
///
/// # Safety
///
/// There are `length` bytes to be read at `from` and to be written at `to`.
pub unsafe fn copy_past_caches(from: *const u8, to: *mut u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    if (from as usize).abs_diff(to as usize) >= length {
        // SAFETY: the caller vouches for both, and they do not overlap.
        unsafe { stream(from, to, length) };
        return;
    }
    // SAFETY: the caller vouches for both.
    unsafe { std::ptr::copy(from, to, length) };
}

/// Bytes of a line of the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies whole lines by stores that leave the caches alone, and what is in front of the first and behind the
/// last as ever.
///
/// # Safety
///
/// As for [`copy_past_caches`], and what is read and written do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, length: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const PART: usize = size_of::<__m128i>();
    let front = (to as usize).wrapping_neg() % LINE;
    let front = front.min(length);
    let end = front + (length - front) / LINE * LINE;
    // SAFETY: `front <= end <= length`, so all is inside of what the caller vouches for; from `front`
    // on `to` is aligned to lines, of which there are whole ones before `end`.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, front);
        let mut at = front;
        while at < end {
            let line: [__m128i; LINE / PART] =
                std::array::from_fn(|part| _mm_loadu_si128(from.add(at + part * PART).cast()));
            for (part, &bytes) in line.iter().enumerate() {
                _mm_stream_si128(to.add(at + part * PART).cast(), bytes);
            }
            at += LINE;
        }
        // Such stores are ordered with no others otherwise, not even with those that release.
        _mm_sfence();
        std::ptr::copy_nonoverlapping(from.add(end), to.add(end), length - end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_no_other() {
        const ROOM: usize = 1024;
        let source: Vec<u8> = (0..ROOM).map(|at| at as u8 | 1).collect();
        for from in [0, 1, 15, 16, 33] {
            for to in (0..80).chain([127, 128]) {
                for length in (0..200).chain([255, 256, 640, 700]) {
                    let mut target = vec![0; ROOM];
                    // SAFETY: both are inside, as 128 + 700 is.
                    unsafe {
                        let (from, to) = (source.as_ptr().add(from), target.as_mut_ptr().add(to));
                        copy_past_caches(from, to, length);
                    }
                    assert_eq!(target[to..to + length], source[from..from + length]);
                    let around = target[..to].iter().chain(&target[to + length..]);
                    assert!(around.into_iter().all(|&byte| byte == 0), "{to} {length}");
                }
            }
        }
    }

    #[test]
    fn memory_is_copied_within_itself() {
        for (from, to) in [(0, 100), (100, 0), (7, 7), (0, 500)] {
            let mut bytes: Vec<u8> = (0..1000).map(|at| (at % 251) as u8).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + 500, to);
            let start = bytes.as_mut_ptr();
            // SAFETY: both are inside.
            unsafe { copy_past_caches(start.add(from), start.add(to), 500) };
            assert_eq!(bytes, expected);
        }
    }

    /// What goes past the caches of so many bytes from an address on.
    fn past(recent: &Recent, mut address: u64, length: usize) -> usize {
        let (mut left, mut past) = (length, 0);
        while left > 0 {
            let (count, goes_past) = recent.next(address, left);
            assert!(count > 0 && count <= left);
            past += if goes_past { count } else { 0 };
            (address, left) = (address.wrapping_add(count as u64), left - count);
        }
        past
    }

    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_written_again_soon_stays_in_the_caches() {
        let recent = Recent::default();
        // Wherever it begins, and in whatever pieces it comes.
        for start in [0x1234_5678, 0x2000_f000, u64::from(u32::MAX) << 20] {
            for (round, piece) in [4096, 64 << 10, 100_000, MIB].into_iter().enumerate() {
                let mut passed = 0;
                for at in (0..MIB).step_by(piece) {
                    passed += past(&recent, start + at as u64, piece.min(MIB - at));
                }
                assert_eq!(
                    passed,
                    if round == 0 { MIB } else { 0 },
                    "{start:#x} {piece}"
                );
            }
        }
    }

    #[test]
    fn what_is_written_once_goes_past_the_caches() {
        let recent = Recent::default();
        for round in 0..3 {
            for start in [0, 0x1_0000_1000, 0x2_0000_fff0] {
                for piece in [4096, 64 << 10, 100_000, MIB] {
                    for at in (0..32 * MIB).step_by(piece) {
                        let passed = past(&recent, start + at as u64, piece);
                        assert_eq!(passed, piece, "{round} {start:#x} {piece} {at:#x}");
                    }
                }
            }
        }
        // Also from the end to the beginning, as some allocate.
        for page in (0..32 * MIB / 4096).rev() {
            assert_eq!(past(&recent, page as u64 * 4096, 4096), 4096);
        }
        // And by turns, where both have the same places.
        for at in (0..32 * MIB).step_by(64 << 10) {
            for start in [0x4_0000_1000, 0x8_0000_1000] {
                assert_eq!(past(&recent, start + at as u64, 64 << 10), 64 << 10);
            }
        }
        // The end of all addresses is nothing special.
        past(&recent, u64::MAX - 4095, 4096);
    }
}
