// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! From the number in a completion to its queue, without a lock.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::alloc::{alloc_zeroed, Layout};

use crate::heap;

const HALF_BITS: u32 = 12;
const HALF: usize = 1 << HALF_BITS;

type Chunk<T> = [AtomicPtr<T>; HALF];

/// The queues of one kind of a context: 24-bit numbers in two halves. Chunks are made when first
/// needed and stay until the context goes.
///
/// The kernel may give a number to a new queue as soon as it has destroyed the old one, when that
/// is still in the table because completions of it are not all gone. So a place is taken only when
/// it is free ([`NumberTable::insert`]), and given up only by the queue that has it.
pub struct NumberTable<T> {
    chunks: Box<[AtomicPtr<Chunk<T>>]>,
}

/// What [`NumberTable::insert`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The queue is in the table.
    Yes,
    /// Its number is still that of one that is being destroyed.
    Taken,
}

impl<T> NumberTable<T> {
    /// An empty table.
    pub fn new() -> Result<Box<Self>, c_int> {
        heap::boxed(Self {
            chunks: heap::slice(HALF, |_| AtomicPtr::new(ptr::null_mut()))?,
        })
    }

    fn slot(&self, number: u32) -> Option<&AtomicPtr<T>> {
        let chunk = self
            .chunks
            .get((number >> HALF_BITS) as usize)?
            .load(Ordering::Acquire);
        // SAFETY: a chunk that is in the table stays allocated as long as the table.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[number as usize % HALF])
    }

    /// The queue with this number, or null.
    ///
    /// It stays allocated while the caller holds the lock of a completion queue with an entry of
    /// it: whoever destroys it drops those under that lock before.
    #[inline]
    pub fn get(&self, number: u32) -> *const T {
        match self.slot(number) {
            Some(slot) => slot.load(Ordering::Acquire),
            None => ptr::null(),
        }
    }

    /// Enters a queue: `EPROTO` if its number has more than 24 bits.
    pub fn insert(&self, number: u32, queue: *mut T) -> Result<Inserted, c_int> {
        let top = self
            .chunks
            .get((number >> HALF_BITS) as usize)
            .ok_or(libc::EPROTO)?;
        if top.load(Ordering::Acquire).is_null() {
            // SAFETY: the size of a chunk is not zero.
            let chunk = unsafe { alloc_zeroed(Layout::new::<Chunk<T>>()) }.cast::<Chunk<T>>();
            if chunk.is_null() {
                return Err(libc::ENOMEM);
            }
            let entered =
                top.compare_exchange(ptr::null_mut(), chunk, Ordering::AcqRel, Ordering::Acquire);
            if entered.is_err() {
                // SAFETY: another thread was quicker; this chunk was allocated above and nobody
                // else has it. Zeroed memory is an array of null pointers.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
        let slot = self.slot(number).ok_or(libc::EPROTO)?;
        match slot.compare_exchange(ptr::null_mut(), queue, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(Inserted::Yes),
            Err(_) => Ok(Inserted::Taken),
        }
    }

    /// Takes a queue out, if it is in.
    pub fn remove(&self, number: u32, queue: *const T) {
        if let Some(slot) = self.slot(number) {
            // Failure: the place is another's, or was never this one's.
            let _ = slot.compare_exchange(
                queue.cast_mut(),
                ptr::null_mut(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }
}

impl<T> Drop for NumberTable<T> {
    fn drop(&mut self) {
        for chunk in &mut self.chunks {
            let chunk = *chunk.get_mut();
            if !chunk.is_null() {
                // SAFETY: `insert` allocated it with the layout of a chunk, and it is freed only
                // here.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;

    fn marker(n: u32) -> *mut u64 {
        ptr::without_provenance_mut(n as usize * 8 + 16)
    }

    #[test]
    fn finds_what_was_entered_and_nothing_else() {
        let table = NumberTable::<u64>::new().unwrap();
        assert!(table.get(5).is_null());
        for number in [1u32, 4095, 4096, 0xff_ffff] {
            assert_eq!(table.insert(number, marker(number)), Ok(Inserted::Yes));
        }
        for number in [1u32, 4095, 4096, 0xff_ffff] {
            assert_eq!(table.get(number), marker(number).cast_const());
        }
        assert!(table.get(2).is_null());
        assert!(table.get(4097).is_null());
        assert!(table.get(0x100_0001).is_null(), "numbers have 24 bits");
        assert_eq!(table.insert(0x100_0000, marker(1)), Err(libc::EPROTO));
        table.remove(4096, marker(4096));
        assert!(table.get(4096).is_null());
        assert!(!table.get(4095).is_null());
    }

    #[test]
    fn a_number_is_free_only_when_its_last_queue_has_gone() {
        let table = NumberTable::<u64>::new().unwrap();
        let (old, new) = (marker(1), marker(2));
        assert_eq!(table.insert(7, old), Ok(Inserted::Yes));
        assert_eq!(table.insert(7, new), Ok(Inserted::Taken));
        assert_eq!(table.get(7), old.cast_const());
        table.remove(7, new);
        assert_eq!(table.get(7), old.cast_const());
        table.remove(7, old);
        assert_eq!(table.insert(7, new), Ok(Inserted::Yes));
        table.remove(7, old);
        assert_eq!(table.get(7), new.cast_const());
    }

    /// Many threads take the same few numbers in chunks that nobody has made yet: each number has
    /// one queue at a time, and no thread waits for another.
    #[test]
    fn threads_share_numbers_and_chunks() {
        const ROUNDS: u32 = 2000;
        let table = NumberTable::<u64>::new().unwrap();
        let holders: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(0)).collect();
        let entered = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                let (table, holders, entered) = (&table, &holders, &entered);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let which = (round * 7 + thread) % 64;
                        let number = (which << HALF_BITS) | 3;
                        let mine = marker(thread + 1);
                        match table.insert(number, mine).unwrap() {
                            Inserted::Taken => continue,
                            Inserted::Yes => {}
                        }
                        entered.fetch_add(1, Ordering::Relaxed);
                        let holder = &holders[which as usize];
                        assert_eq!(holder.swap(thread + 1, Ordering::AcqRel), 0);
                        assert_eq!(table.get(number), mine.cast_const());
                        assert_eq!(holder.swap(0, Ordering::AcqRel), thread + 1);
                        table.remove(number, mine);
                    }
                });
            }
        });
        assert!(entered.into_inner() >= ROUNDS);
        assert!((0..64).all(|which| table.get((which << HALF_BITS) | 3).is_null()));
    }

    #[test]
    fn without_memory_nothing_is_entered() {
        let table = NumberTable::<u64>::new().unwrap();
        let failures = heap::tests::with_little_memory(|| table.insert(9, marker(9)));
        assert_eq!(failures, 1);
        assert_eq!(table.get(9), marker(9).cast_const());
        assert_eq!(heap::tests::with_little_memory(NumberTable::<u64>::new), 2);
    }
}
