// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host's memory, shared with the device.

use crate::outcome::Outcome;
use ferrite_abi::Plain;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Where the memory of a host begins for its device; there is nothing in front of it.
pub const BASE: u64 = 0x4000_0000;
/// Bytes of it; there is nothing behind it.
pub const SIZE: u64 = 16 << 20;
/// An address at which there never is memory.
pub const NOWHERE: u64 = 0x2000_0000;
/// A page of a buffer.
pub const PAGE: u64 = 4096;

/// A stretch of memory that the device can be given.
///
/// # Invariants
///
/// `start` is the first of `size` bytes that are mapped for reading and writing as long as this
/// exists, and to which no Rust reference is made but to atomics.
pub struct Memory {
    file: OwnedFd,
    start: NonNull<u8>,
    base: u64,
    size: u64,
    used: u64,
}

impl Memory {
    /// Zeroed memory of `size` bytes, at address `base` for the device.
    pub fn new(base: u64, size: u64) -> Outcome<Self> {
        let memory = Self::that_may_shrink(base, size)?;
        // As a monitor's is, of whose memory the device process is to be sure.
        rustix::fs::fcntl_add_seals(&memory.file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(memory)
    }

    /// The same, but its file may become shorter.
    pub fn that_may_shrink(base: u64, size: u64) -> Outcome<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("host", flags)?;
        rustix::fs::ftruncate(&file, size)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists
        // already.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        // INVARIANT: just mapped with this size and these rights.
        Ok(Self {
            file,
            start,
            base,
            size,
            used: 0,
        })
    }

    /// What the device maps.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// The first address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A part of `size` bytes that was not used yet, zeroed and aligned to a page.
    ///
    /// # Panics
    ///
    /// When there is no more: checks are short and use little.
    pub fn allocate(&mut self, size: u64) -> u64 {
        let address = self.base + self.used;
        self.used += size.next_multiple_of(PAGE);
        assert!(self.used <= self.size, "a check wants too much memory");
        address
    }

    /// Where `length` bytes at `address` are in this process.
    ///
    /// # Panics
    ///
    /// When they are not all inside: a check went wrong, not the device.
    fn at(&self, address: u64, length: usize) -> NonNull<u8> {
        let offset = address.wrapping_sub(self.base);
        let fits = offset <= self.size && length as u64 <= self.size - offset;
        assert!(fits, "{address:#x} is not memory of the host");
        // SAFETY: `offset` is within the mapping, by the check above.
        unsafe { self.start.add(offset as usize) }
    }

    /// Copies bytes out.
    pub fn read(&self, address: u64, bytes: &mut [u8]) {
        let from = self.at(address, bytes.len());
        // SAFETY: `at` vouches for that many bytes at `from`, and `bytes`, a slice of Rust's, is not
        // in the mapping. The device may write meanwhile; any bytes are a valid result.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies bytes in.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let to = self.at(address, bytes.len());
        // SAFETY: `at` vouches for that many bytes at `to`, and `bytes`, a slice of Rust's, is not in
        // the mapping. The device may read meanwhile; it takes what it gets.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
    }

    /// The bytes of a part.
    pub fn bytes(&self, address: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.read(address, &mut bytes);
        bytes
    }

    /// Fills a part with one byte.
    pub fn fill(&self, address: u64, length: u64, byte: u8) {
        self.write(address, &vec![byte; length as usize]);
    }

    /// Reads a layout.
    pub fn get<P: Plain>(&self, address: u64) -> P {
        let mut value = P::zeroed();
        self.read(address, value.as_bytes_mut());
        value
    }

    /// Writes a layout.
    pub fn put<P: Plain>(&self, address: u64, value: &P) {
        self.write(address, value.as_bytes());
    }

    fn word32(&self, address: u64) -> &AtomicU32 {
        assert!(address % 4 == 0);
        let pointer = self.at(address, 4).as_ptr();
        // SAFETY: four bytes of the mapping, which lives as long as `self`, aligned by the check
        // above since the mapping and `base` are by pages. The device accesses such words whole.
        unsafe { AtomicU32::from_ptr(pointer.cast()) }
    }

    fn word64(&self, address: u64) -> &AtomicU64 {
        assert!(address % 8 == 0);
        let pointer = self.at(address, 8).as_ptr();
        // SAFETY: eight bytes of the mapping, which lives as long as `self`, aligned by the check
        // above since the mapping and `base` are by pages. The device accesses such words whole.
        unsafe { AtomicU64::from_ptr(pointer.cast()) }
    }

    /// Loads a word; nothing after it is done before it.
    pub fn load32(&self, address: u64) -> u32 {
        self.word32(address).load(Ordering::Acquire)
    }

    /// Stores a word; everything before it is visible before it.
    pub fn store32(&self, address: u64, value: u32) {
        self.word32(address).store(value, Ordering::Release);
    }

    /// Loads a word; nothing after it is done before it.
    pub fn load64(&self, address: u64) -> u64 {
        self.word64(address).load(Ordering::Acquire)
    }

    /// Stores a word; everything before it is visible before it.
    pub fn store64(&self, address: u64, value: u64) {
        self.word64(address).store(value, Ordering::Release);
    }

    /// A full barrier.
    pub fn barrier(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: by the invariant these are the bounds of a mapping that is owned here, and
        // references into it do not outlive `self`.
        // A failure leaves address space behind, nothing else.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size as usize) };
    }
}
