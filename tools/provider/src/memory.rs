// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Memory that the device sees: queue buffers and the doorbell page; and the lock of a queue.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::private::{ibv_dofork_range, ibv_dontfork_range};
use crate::protection::PdUse;
use crate::sys::ibv_pd;

/// Rounds up to whole pages.
const PAGE: usize = 4096;

/// Zeroed, page-aligned memory that the driver pins for the device.
///
/// A child of `fork` does not get it when the program asked for `ibv_fork_init`, so that the
/// parent's writes stay in the pages the device knows.
pub struct Buffer {
    base: NonNull<u8>,
    length: usize,
    /// Where it goes back to, if it is not a mapping of ours.
    source: Option<Allocator>,
    /// The domain it was made with; dropped, and so let go of, after the memory went back.
    domain: Option<PdUse>,
}

/// A program's own way of giving memory for queues (see `ibv_alloc_parent_domain`).
#[derive(Clone, Copy)]
pub struct Allocator {
    /// The domain it came with, which lives longer than what is made with it.
    pub pd: *mut ibv_pd,
    /// The program's own.
    pub context: *mut c_void,
    /// Gives memory.
    pub alloc: AllocFn,
    /// Takes it back.
    pub free: FreeFn,
}

/// Gives memory: domain, context, bytes, alignment, what it is for.
pub type AllocFn = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void;
/// Takes memory back: domain, context, memory, what it was for.
pub type FreeFn = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64);

/// The answer of an [`AllocFn`] that leaves it to the provider.
const USE_DEFAULT: usize = usize::MAX;
/// What memory is for: queues that the device reads and writes.
const QUEUES: u64 = 1;

// SAFETY: the mapping belongs to the process, not to a thread. What is read and written in it, and
// when, is for its users to order.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives only pointers; who follows a pointer has its own reasons.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Maps at least `length` bytes; `length` is not zero.
    pub fn new(length: usize) -> Result<Self, c_int> {
        let length = length.next_multiple_of(PAGE);
        // SAFETY: a fresh anonymous mapping touches no memory in use.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(libc::ENOMEM);
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(libc::ENOMEM)?;
        let buffer = Self {
            base,
            length,
            source: None,
            domain: None,
        };
        // SAFETY: the range is the mapping just made.
        let result = unsafe { ibv_dontfork_range(base.as_ptr().cast(), length) };
        if result != 0 {
            // The range never became special, so `drop` must not undo that.
            core::mem::forget(buffer);
            // SAFETY: the mapping was made above and nothing refers to it.
            unsafe { libc::munmap(base.as_ptr().cast(), length) };
            return Err(result);
        }
        Ok(buffer)
    }

    /// As [`Buffer::new`], with memory from the program, if it wants to give it.
    pub fn from_allocator(length: usize, source: Allocator) -> Result<Self, c_int> {
        let length = length.next_multiple_of(PAGE);
        // SAFETY: the program's function is called as it was promised to it.
        let memory = unsafe { (source.alloc)(source.pd, source.context, length, PAGE, QUEUES) };
        if memory as usize == USE_DEFAULT {
            return Self::new(length);
        }
        let base = NonNull::new(memory.cast::<u8>()).ok_or(libc::ENOMEM)?;
        let result = if memory as usize % PAGE != 0 {
            // It was asked for pages: what lies in a queue is aligned as it is in pages.
            libc::EINVAL
        } else {
            // SAFETY: the program has given this many bytes, and nobody else uses them.
            unsafe {
                ptr::write_bytes(base.as_ptr(), 0, length);
                ibv_dontfork_range(base.as_ptr().cast(), length)
            }
        };
        if result != 0 {
            // SAFETY: the memory goes back to where it came from.
            unsafe { (source.free)(source.pd, source.context, memory, QUEUES) };
            return Err(result);
        }
        Ok(Self {
            base,
            length,
            source: Some(source),
            domain: None,
        })
    }

    /// Keeps a domain as long as the buffer.
    pub(crate) fn keep(&mut self, domain: PdUse) {
        self.domain = Some(domain);
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Its address as the driver is told it.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast::<c_void>();
        // SAFETY: the memory was made with this length, and its last user is gone; what came from
        // the program goes back to it.
        unsafe {
            ibv_dofork_range(base, self.length);
            match self.source {
                Some(source) => (source.free)(source.pd, source.context, base, QUEUES),
                None => {
                    libc::munmap(base, self.length);
                }
            }
        }
    }
}

/// The doorbell page of a context, for as long as the context lives.
#[derive(Clone, Copy)]
pub struct Doorbells(*mut u8);

// SAFETY: doorbells are single 64-bit stores; the device takes them from any processor in any
// order.
unsafe impl Send for Doorbells {}
// SAFETY: `&Doorbells` is as good as the copy that threads may have (`Send`).
unsafe impl Sync for Doorbells {}

impl Doorbells {
    /// # Safety
    ///
    /// `page` is a mapped doorbell page that stays mapped until every queue of the context is
    /// destroyed.
    pub unsafe fn new(page: *mut u8) -> Self {
        Self(page)
    }

    /// The mapping.
    pub fn page(self) -> *mut u8 {
        self.0
    }

    /// Rings the doorbell at `offset`.
    ///
    /// Everything written to memory before is visible to the device when it sees the doorbell: on
    /// x86 a store to uncached memory is not done before earlier stores; elsewhere the fence asks
    /// for that.
    pub fn ring(self, offset: usize, word: u64) {
        debug_assert!(offset % 8 == 0 && offset < ferrite_abi::DOORBELL_PAGE_SIZE);
        core::sync::atomic::fence(Ordering::SeqCst);
        // SAFETY: the page is mapped (see `new`), and `offset` is one of the interface's doorbell
        // offsets, all aligned and within the page.
        unsafe { ptr::write_volatile(self.0.add(offset).cast::<u64>(), word) };
    }
}

/// What is written by one processor while others write what is beside it: it has lines of the cache of
/// its own.
#[repr(align(64))]
pub struct OwnLine<T>(pub T);

impl<T> Deref for OwnLine<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for OwnLine<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// A lock held for a few dozen instructions.
pub struct SpinLock<T> {
    held: AtomicBool,
    /// See [`SpinLock::promise_one_thread`].
    one_thread: bool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives out one reference at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// An unlocked lock.
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            one_thread: false,
            value: UnsafeCell::new(value),
        }
    }

    /// The program uses what is protected from one thread at a time, as it has promised, with whatever
    /// takes the lock: of a completion queue also to arm and resize it, and to destroy or reset what completes
    /// there (the user guide says so). From here on taking the lock is two plain accesses. Where the promise is broken and another thread is seen to
    /// have it, that is waited for all the same.
    pub fn promise_one_thread(&mut self) {
        self.one_thread = true;
    }

    /// Takes the lock, if nobody has it.
    #[inline]
    fn take(&self) -> bool {
        if self.one_thread && !self.held.load(Ordering::Relaxed) {
            self.held.store(true, Ordering::Relaxed);
            return true;
        }
        !self.held.swap(true, Ordering::Acquire)
    }

    /// Takes the lock, if nobody has it.
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.take().then(|| SpinGuard { lock: self })
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        if !self.take() {
            self.wait();
        }
        SpinGuard { lock: self }
    }

    #[cold]
    fn wait(&self) {
        let mut spins = 0u32;
        while self.held.swap(true, Ordering::Acquire) {
            while self.held.load(Ordering::Relaxed) {
                spins += 1;
                if spins < 200 {
                    core::hint::spin_loop();
                } else {
                    // The holder may have lost its processor, of which there may be just one.
                    spins = 0;
                    std::thread::yield_now();
                }
            }
        }
    }

    /// What is protected, for a thread that holds the lock without a guard.
    ///
    /// # Safety
    ///
    /// The calling thread locked and forgot the guard, and no other reference from here is live.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn held_mut(&self) -> &mut T {
        // SAFETY: the caller holds the lock and has no other reference.
        unsafe { &mut *self.value.get() }
    }

    /// Unlocks after a forgotten guard.
    ///
    /// # Safety
    ///
    /// The calling thread locked, forgot the guard, and uses nothing it got from it any more.
    pub unsafe fn unlock(&self) {
        self.held.store(false, Ordering::Release);
    }
}

/// Holds a [`SpinLock`].
pub struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard holds the lock.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_of_one_thread_is_a_lock_nevertheless() {
        for promised in [false, true] {
            let mut lock = SpinLock::new(0);
            if promised {
                lock.promise_one_thread();
            }
            for round in 0..3 {
                let mut held = lock.lock();
                assert_eq!(*held, round);
                *held += 1;
                assert!(lock.try_lock().is_none());
                drop(held);
                assert!(lock.try_lock().is_some());
            }
            // Another thread that breaks the promise waits for who is seen to have it.
            let held = lock.lock();
            std::thread::scope(|scope| {
                let other = scope.spawn(|| *lock.lock());
                std::thread::yield_now();
                assert!(!other.is_finished());
                drop(held);
                assert_eq!(other.join().unwrap(), 3);
            });
        }
    }

    /// What a program gives that gives memory for queues: two pages of its own, from some byte on.
    struct Given {
        from: usize,
        memory: Box<[[u8; PAGE]; 3]>,
        back: Option<usize>,
    }

    impl Given {
        fn at(&self) -> usize {
            let base = self.memory.as_ptr() as usize;
            base.next_multiple_of(PAGE) + self.from
        }
    }

    unsafe extern "C" fn give(
        _pd: *mut ibv_pd,
        given: *mut c_void,
        length: usize,
        alignment: usize,
        _kind: u64,
    ) -> *mut c_void {
        assert_eq!((length, alignment), (PAGE, PAGE));
        // SAFETY: the test's allocator has this as its context.
        unsafe { (*given.cast::<Given>()).at() as *mut c_void }
    }

    unsafe extern "C" fn take_back(
        _pd: *mut ibv_pd,
        given: *mut c_void,
        memory: *mut c_void,
        _kind: u64,
    ) {
        // SAFETY: as in `give`.
        unsafe { (*given.cast::<Given>()).back = Some(memory as usize) };
    }

    #[test]
    fn memory_that_a_program_gives_is_of_whole_pages_or_goes_back() {
        for from in [0, 1, 8, 64, 2048, PAGE] {
            let mut given = Given {
                from,
                memory: Box::new([[0xff; PAGE]; 3]),
                back: None,
            };
            let at = given.at();
            let source = Allocator {
                pd: ptr::null_mut(),
                context: (&raw mut given).cast(),
                alloc: give,
                free: take_back,
            };
            let buffer = Buffer::from_allocator(100, source);
            // SAFETY: in the memory of the test.
            let first = || unsafe { ptr::read_volatile(at as *const u8) };
            if from % PAGE == 0 {
                assert_eq!(buffer.as_ref().unwrap().address(), at as u64);
                assert_eq!(first(), 0);
            } else {
                assert_eq!(buffer.as_ref().err(), Some(&libc::EINVAL), "{from}");
                assert_eq!(first(), 0xff);
            }
            drop(buffer);
            assert_eq!(given.back, Some(at));
        }
    }

    #[test]
    fn what_has_lines_of_its_own_shares_none() {
        assert_eq!(align_of::<OwnLine<u8>>(), 64);
        assert_eq!(size_of::<OwnLine<[u8; 65]>>(), 128);
    }
}
