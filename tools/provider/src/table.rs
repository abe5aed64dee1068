// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! From the number in a completion to its queue, without a lock.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::alloc::{alloc_zeroed, Layout};

use crate::heap;
use crate::sys::ibv_cq;

const HALF_BITS: u32 = 12;
const HALF: usize = 1 << HALF_BITS;

/// The completion queues that completions of a queue come to, or null: only compared.
pub type Homes = [*mut ibv_cq; 2];

/// What is under a number.
struct Place<T> {
    queue: AtomicPtr<T>,
    /// Beside the queue, so that who has no right to look at it need not.
    homes: [AtomicPtr<ibv_cq>; 2],
}

type Chunk<T> = [Place<T>; HALF];

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

    fn place(&self, number: u32) -> Option<&Place<T>> {
        let chunk = self
            .chunks
            .get((number >> HALF_BITS) as usize)?
            .load(Ordering::Acquire);
        // SAFETY: a chunk that is in the table stays allocated as long as the table.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[number as usize % HALF])
    }

    /// The queue with this number whose completions come to `home`, or null. What a device writes to
    /// another completion queue finds nothing.
    ///
    /// It stays allocated while the caller holds the lock of `home`: whoever destroys it has it leave
    /// under that lock before ([`NumberTable::leave`]).
    #[inline]
    pub fn get(&self, number: u32, home: *const ibv_cq) -> *const T {
        let Some(place) = self.place(number) else {
            return ptr::null();
        };
        // Acquire: the queue was entered before its homes were, and is taken out after they were.
        let is_home = |at: &AtomicPtr<ibv_cq>| ptr::eq(at.load(Ordering::Acquire), home);
        if place.homes.iter().any(is_home) {
            place.queue.load(Ordering::Relaxed)
        } else {
            ptr::null()
        }
    }

    /// Enters a queue: `EPROTO` if its number has more than 24 bits.
    pub fn insert(&self, number: u32, queue: *mut T, homes: Homes) -> Result<Inserted, c_int> {
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
        let place = self.place(number).ok_or(libc::EPROTO)?;
        let entered = place.queue.compare_exchange(
            ptr::null_mut(),
            queue,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if entered.is_err() {
            return Ok(Inserted::Taken);
        }
        for (at, home) in place.homes.iter().zip(homes) {
            at.store(home, Ordering::Release);
        }
        Ok(Inserted::Yes)
    }

    /// Where a queue is, if it is in. Whoever asks is the one that may take it out.
    fn place_of(&self, number: u32, queue: *const T) -> Option<&Place<T>> {
        // Else the place is another's, or was never this one's.
        self.place(number)
            .filter(|place| ptr::eq(place.queue.load(Ordering::Relaxed), queue))
    }

    /// A queue is found for `home` no more, whose lock the caller holds.
    pub fn leave(&self, number: u32, queue: *const T, home: *const ibv_cq) {
        let Some(place) = self.place_of(number, queue) else {
            return;
        };
        for at in &place.homes {
            if ptr::eq(at.load(Ordering::Relaxed), home) {
                at.store(ptr::null_mut(), Ordering::Release);
            }
        }
    }

    /// Takes a queue out, if it is in. It has left all its homes.
    pub fn remove(&self, number: u32, queue: *const T) {
        if let Some(place) = self.place_of(number, queue) {
            debug_assert!(place
                .homes
                .iter()
                .all(|at| at.load(Ordering::Relaxed).is_null()));
            place.queue.store(ptr::null_mut(), Ordering::Release);
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

    fn cq(n: usize) -> *mut ibv_cq {
        ptr::without_provenance_mut(n * 64 + 64)
    }

    /// The one home of most queues here.
    fn home() -> Homes {
        [cq(0), ptr::null_mut()]
    }

    impl<T> NumberTable<T> {
        /// As [`NumberTable::get`], of a queue of [`home`].
        fn found(&self, number: u32) -> *const T {
            self.get(number, cq(0))
        }

        /// Has a queue of [`home`] go.
        fn take(&self, number: u32, queue: *const T) {
            self.leave(number, queue, cq(0));
            self.remove(number, queue);
        }
    }

    #[test]
    fn a_queue_is_found_for_its_homes_as_long_as_it_has_not_left_them() {
        let table = NumberTable::<u64>::new().unwrap();
        let homes = [cq(1), cq(2)];
        assert_eq!(table.insert(5, marker(1), homes), Ok(Inserted::Yes));
        let found = || [0, 1, 2].map(|n| !table.get(5, cq(n)).is_null());
        assert_eq!(found(), [false, true, true]);
        // Another's leaving is nothing to it.
        table.leave(5, marker(2), cq(1));
        table.leave(5, marker(1), cq(0));
        assert_eq!(found(), [false, true, true]);
        table.leave(5, marker(1), cq(1));
        assert_eq!(found(), [false, false, true]);
        assert_eq!(table.insert(5, marker(2), homes), Ok(Inserted::Taken));
        table.leave(5, marker(1), cq(2));
        table.remove(5, marker(1));
        assert_eq!(table.insert(5, marker(2), [cq(0); 2]), Ok(Inserted::Yes));
        assert_eq!(found(), [true, false, false]);
        table.leave(5, marker(2), cq(0));
        assert_eq!(found(), [false; 3]);
    }

    #[test]
    fn finds_what_was_entered_and_nothing_else() {
        let table = NumberTable::<u64>::new().unwrap();
        assert!(table.found(5).is_null());
        for number in [1u32, 4095, 4096, 0xff_ffff] {
            assert_eq!(
                table.insert(number, marker(number), home()),
                Ok(Inserted::Yes)
            );
        }
        for number in [1u32, 4095, 4096, 0xff_ffff] {
            assert_eq!(table.found(number), marker(number).cast_const());
        }
        assert!(table.found(2).is_null());
        assert!(table.found(4097).is_null());
        assert!(table.found(0x100_0001).is_null(), "numbers have 24 bits");
        assert_eq!(
            table.insert(0x100_0000, marker(1), home()),
            Err(libc::EPROTO)
        );
        table.take(4096, marker(4096));
        assert!(table.found(4096).is_null());
        assert!(!table.found(4095).is_null());
    }

    #[test]
    fn a_number_is_free_only_when_its_last_queue_has_gone() {
        let table = NumberTable::<u64>::new().unwrap();
        let (old, new) = (marker(1), marker(2));
        assert_eq!(table.insert(7, old, home()), Ok(Inserted::Yes));
        assert_eq!(table.insert(7, new, home()), Ok(Inserted::Taken));
        assert_eq!(table.found(7), old.cast_const());
        table.take(7, new);
        assert_eq!(table.found(7), old.cast_const());
        table.take(7, old);
        assert_eq!(table.insert(7, new, home()), Ok(Inserted::Yes));
        table.take(7, old);
        assert_eq!(table.found(7), new.cast_const());
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
                        match table.insert(number, mine, home()).unwrap() {
                            Inserted::Taken => continue,
                            Inserted::Yes => {}
                        }
                        entered.fetch_add(1, Ordering::Relaxed);
                        let holder = &holders[which as usize];
                        assert_eq!(holder.swap(thread + 1, Ordering::AcqRel), 0);
                        assert_eq!(table.found(number), mine.cast_const());
                        assert_eq!(holder.swap(0, Ordering::AcqRel), thread + 1);
                        table.take(number, mine);
                    }
                });
            }
        });
        assert!(entered.into_inner() >= ROUNDS);
        assert!((0..64).all(|which| table.found((which << HALF_BITS) | 3).is_null()));
    }

    #[test]
    fn without_memory_nothing_is_entered() {
        let table = NumberTable::<u64>::new().unwrap();
        let failures = heap::tests::with_little_memory(|| table.insert(9, marker(9), home()));
        assert_eq!(failures, 1);
        assert_eq!(table.found(9), marker(9).cast_const());
        assert_eq!(heap::tests::with_little_memory(NumberTable::<u64>::new), 2);
    }
}
