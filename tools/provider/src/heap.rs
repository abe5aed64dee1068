// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Memory of the process: a verb that gets none fails, and its program goes on.

use core::ffi::c_int;
use std::alloc::{alloc, Layout};

/// Puts a value on the heap.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, c_int> {
    const { assert!(size_of::<T>() != 0) };
    // SAFETY: the layout's size is not zero, as the assertion says.
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: the memory was allocated just now for a `T`, by the allocator that a box gives it
    // back to.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// A slice of `length` elements, each made of its index.
pub(crate) fn slice<T>(length: usize, element: impl FnMut(usize) -> T) -> Result<Box<[T]>, c_int> {
    Ok(vector(length, element)?.into_boxed_slice())
}

/// As [`slice`], to be changed in length.
pub(crate) fn vector<T>(length: usize, element: impl FnMut(usize) -> T) -> Result<Vec<T>, c_int> {
    let mut vector = Vec::new();
    reserve(&mut vector, length)?;
    vector.extend((0..length).map(element));
    Ok(vector)
}

/// Makes room for so many more elements.
pub(crate) fn reserve<T>(vector: &mut Vec<T>, more: usize) -> Result<(), c_int> {
    vector.try_reserve_exact(more).map_err(|_| libc::ENOMEM)
}

#[cfg(test)]
pub(crate) mod tests {
    use core::cell::Cell;
    use std::alloc::{GlobalAlloc, Layout, System};

    /// The system's allocator, which fails when a test wants it to.
    struct Meagre;

    thread_local! {
        /// Allocations of this thread that succeed before they fail.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    #[global_allocator]
    static ALLOCATOR: Meagre = Meagre;

    impl Meagre {
        fn refuses() -> bool {
            LEFT.with(|left| match left.get() {
                None => false,
                Some(0) => true,
                Some(more) => {
                    left.set(Some(more - 1));
                    false
                }
            })
        }
    }

    // SAFETY: everything is left to the system's allocator; a null pointer says that there is no
    // memory.
    unsafe impl GlobalAlloc for Meagre {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            if Self::refuses() {
                return core::ptr::null_mut();
            }
            // SAFETY: the layout is as `GlobalAlloc::alloc` demands, by the caller.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
            // SAFETY: by the caller it came from `alloc` with this layout, and so from the system.
            unsafe { System.dealloc(memory, layout) };
        }
    }

    /// Runs `make` with memory for no allocation, for one, for two, until it succeeds; counts the
    /// failures. Each failure must be `ENOMEM`.
    pub(crate) fn with_little_memory<T>(mut make: impl FnMut() -> Result<T, i32>) -> u32 {
        for allocations in 0.. {
            LEFT.set(Some(allocations));
            let made = make();
            LEFT.set(None);
            match made {
                Ok(_) => return allocations,
                Err(errno) => assert_eq!(errno, libc::ENOMEM),
            }
        }
        unreachable!()
    }
}
