// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! From the number in a completion to its queue, without a lock.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const HALF_BITS: u32 = 12;
const HALF: usize = 1 << HALF_BITS;

type Chunk<T> = [AtomicPtr<T>; HALF];

/// The queues of one kind of a context: 24-bit numbers in two halves. Chunks are made when first needed
/// and stay until the context goes.
pub struct Table<T> {
    chunks: Box<[AtomicPtr<Chunk<T>>]>,
    changing: Mutex<()>,
}

impl<T> Table<T> {
    /// An empty table.
    pub fn new() -> Self {
        Self {
            chunks: (0..HALF).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            changing: Mutex::new(()),
        }
    }

    /// Held around the kernel's making or destroying of a queue together with the table's
    /// change: the kernel may give a number away again as soon as it is free.
    pub fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, qpn: u32) -> Option<&AtomicPtr<T>> {
        let chunk = self
            .chunks
            .get((qpn >> HALF_BITS) as usize)?
            .load(Ordering::Acquire);
        // SAFETY: a chunk that is in the table stays allocated as long as the table.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[qpn as usize % HALF])
    }

    /// The queue with this number, or null.
    ///
    /// It stays allocated while the caller holds the lock of one of its completion queues:
    /// destruction takes it out of the table under both.
    #[inline]
    pub fn get(&self, qpn: u32) -> *const T {
        match self.slot(qpn) {
            Some(slot) => slot.load(Ordering::Acquire),
            None => ptr::null(),
        }
    }

    /// Enters a queue; false if its number has more than 24 bits.
    pub fn insert(&self, qpn: u32, queue: *mut T, _changing: &MutexGuard<'_, ()>) -> bool {
        let Some(top) = self.chunks.get((qpn >> HALF_BITS) as usize) else {
            return false;
        };
        if top.load(Ordering::Relaxed).is_null() {
            let chunk: Box<[AtomicPtr<T>]> =
                (0..HALF).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
            let Ok(chunk) = <Box<Chunk<T>>>::try_from(chunk) else {
                return false;
            };
            top.store(Box::into_raw(chunk), Ordering::Release);
        }
        if let Some(slot) = self.slot(qpn) {
            slot.store(queue, Ordering::Release);
        }
        true
    }

    /// Takes a queue out.
    pub fn remove(&self, qpn: u32, _changing: &MutexGuard<'_, ()>) {
        if let Some(slot) = self.slot(qpn) {
            slot.store(ptr::null_mut(), Ordering::Release);
        }
    }
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        for chunk in &mut self.chunks {
            let chunk = *chunk.get_mut();
            if !chunk.is_null() {
                // SAFETY: it came from `Box::into_raw` in `insert` and is freed only here.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_entered_and_nothing_else() {
        let table = Table::<u64>::new();
        let changing = table.changing();
        let marker = |n: usize| ptr::without_provenance_mut::<u64>(n);
        assert!(table.get(5).is_null());
        for qpn in [1u32, 4095, 4096, 0xff_ffff] {
            assert!(table.insert(qpn, marker(qpn as usize + 16), &changing));
        }
        for qpn in [1u32, 4095, 4096, 0xff_ffff] {
            assert_eq!(table.get(qpn), marker(qpn as usize + 16).cast_const());
        }
        assert!(table.get(2).is_null());
        assert!(table.get(4097).is_null());
        assert!(table.get(0x100_0001).is_null(), "numbers have 24 bits");
        assert!(!table.insert(0x100_0000, marker(16), &changing));
        table.remove(4096, &changing);
        assert!(table.get(4096).is_null());
        assert!(!table.get(4095).is_null());
    }
}
