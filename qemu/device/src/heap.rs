// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much memory the process has asked for: what a guest's objects take shows there, without
//! what the allocator keeps for later.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counting.
pub struct Counting;

// SAFETY: everything is done by the system's allocator with the caller's arguments; counting
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligation is the same.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligation is the same.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligation is the same.
        unsafe { System.dealloc(pointer, layout) };
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's obligation is the same.
        let new = unsafe { System.realloc(pointer, layout, new_size) };
        if !new.is_null() {
            // In this order, so that the sum never goes below zero.
            IN_USE.fetch_add(new_size, Ordering::Relaxed);
            IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        }
        new
    }
}

/// Bytes in use, where [`Counting`] is the process's allocator; else zero.
pub fn in_use() -> usize {
    IN_USE.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_counts_no_more() {
        let before = in_use();
        let layout = Layout::from_size_align(1000, 8).unwrap();
        // SAFETY: the layout has a size; each pointer is used with the layout it has.
        unsafe {
            let pointer = Counting.alloc(layout);
            assert_eq!(in_use(), before + 1000);
            let pointer = Counting.realloc(pointer, layout, 5000);
            assert_eq!(in_use(), before + 5000);
            Counting.dealloc(pointer, Layout::from_size_align(5000, 8).unwrap());
            assert_eq!(in_use(), before);
            let pointer = Counting.alloc_zeroed(layout);
            assert_eq!(in_use(), before + 1000);
            Counting.dealloc(pointer, layout);
        }
        assert_eq!(in_use(), before);
    }
}
