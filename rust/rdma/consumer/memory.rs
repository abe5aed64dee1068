// SPDX-License-Identifier: GPL-2.0

//! Memory of consumers that a device reads and writes, and regions of it that a peer may use.
//!
//! A [`Buffer`] is cut into [`Chunk`]s: each is somebody's, who reads and writes it as any other memory, until it is
//! posted; then it is the request's, which gives it back when it is complete. Or it is made into a [`Region`], which
//! the peer writes whenever it likes: there is no slice of that, only copies.

use super::{Lease, Pd};
use crate::bindings;
use crate::rdma::Access;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, to_result};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::Arc;

/// Memory that is mapped for a device, in one piece.
///
/// # Invariants
///
/// `cpu` is `length` bytes of initialised memory at `dma` for the device of `lease`, owned by this value: `virt`, or
/// else coherent memory of the device that does the DMA.
pub struct Buffer {
    cpu: NonNull<u8>,
    dma: u64,
    length: usize,
    /// Of a software device, which takes kernel addresses for DMA addresses.
    virt: Option<KVec<u8>>,
    // After the memory, which is freed by `drop`, before the fields are.
    lease: Lease,
}

// SAFETY: The memory belongs to no task, and is freed by any.
unsafe impl Send for Buffer {}
// SAFETY: A reference to a buffer leads to no byte of it but by the pointer of `as_ptr`, whose users read and write as the
// device does, single bytes that are volatile; chunks and regions have rules of their own.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates zeroed memory. May sleep, as does its end.
    pub fn new(lease: &Lease, length: usize) -> Result<Self> {
        let device = lease.raw_device();
        // SAFETY: The device is registered for as long as there is a lease.
        let is_virt = unsafe { bindings::ib_uses_virt_dma(device) };
        let (cpu, dma, virt) = if is_virt {
            let mut memory = KVec::from_elem(0, length, GFP_KERNEL)?;
            let cpu: *mut u8 = memory.as_mut_ptr();
            (cpu, cpu as u64, Some(memory))
        } else {
            let mut dma = 0;
            // SAFETY: The device is registered for as long as there is a lease, so that the one that does its DMA
            // is bound; `dma` is a local. What is allocated is zeroed.
            let cpu = unsafe {
                let dev = (*device).dma_device;
                bindings::dma_alloc_attrs(dev, length, &mut dma, bindings::GFP_KERNEL, 0)
            };
            (cpu.cast(), dma, None)
        };
        // INVARIANT: Allocated just now.
        Ok(Self {
            cpu: NonNull::new(cpu).ok_or(ENOMEM)?,
            dma,
            length,
            virt,
            lease: lease.clone(),
        })
    }

    /// A buffer of no device, whose memory is ordinary.
    #[cfg(all(CONFIG_KUNIT, not(rdma_no_tests)))]
    pub(super) fn for_tests(landlord: &super::Landlord, length: usize) -> Result<Self> {
        let mut memory = KVec::from_elem(0, length, GFP_KERNEL)?;
        let cpu: *mut u8 = memory.as_mut_ptr();
        // INVARIANT: Allocated just now.
        Ok(Self {
            cpu: NonNull::new(cpu).ok_or(ENOMEM)?,
            dma: cpu as u64,
            length,
            virt: Some(memory),
            lease: landlord.lease(),
        })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Its first byte, which is there for as long as this is.
    pub(in crate::rdma) fn as_ptr(&self) -> *mut u8 {
        self.cpu.as_ptr()
    }

    /// Where it is for the device.
    pub(in crate::rdma) fn dma(&self) -> u64 {
        self.dma
    }

    /// The core's device that it is mapped for.
    pub(in crate::rdma) fn device(&self) -> *mut bindings::ib_device {
        self.lease.raw_device()
    }

    /// In how many pages of a size it lies, which is a power of two.
    pub(in crate::rdma) fn pages(&self, page_size: u32) -> Result<u32> {
        let length = u32::try_from(self.length).map_err(|_| EINVAL)?;
        let offset = self.dma & u64::from(page_size - 1);
        let pages = (offset + u64::from(length)).div_ceil(page_size.into());
        u32::try_from(pages).map_err(|_| EINVAL)
    }

    /// Maps a region to it, in pages of a size.
    ///
    /// # Safety
    ///
    /// `mr` must be a region of the device of this, made by `ib_alloc_mr`, that nobody else has; and go before this.
    pub(in crate::rdma) unsafe fn map_to(
        &self,
        mr: *mut bindings::ib_mr,
        page_size: u32,
    ) -> Result {
        let length = u32::try_from(self.length).map_err(|_| EINVAL)?;
        let mut entry: bindings::scatterlist = pin_init::zeroed();
        // SAFETY: `entry` is a list of one.
        unsafe { bindings::sg_init_table(&mut entry, 1) };
        entry.dma_address = self.dma;
        #[cfg(CONFIG_NEED_SG_DMA_LENGTH)]
        {
            entry.dma_length = length;
        }
        #[cfg(not(CONFIG_NEED_SG_DMA_LENGTH))]
        {
            entry.length = length;
        }
        // SAFETY: The caller vouches for the region. The list has one entry, of memory that is mapped for the region's
        // device already, which the caller vouches for, too; the offset is none.
        let mapped =
            unsafe { bindings::ib_map_mr_sg(mr, &mut entry, 1, ptr::null_mut(), page_size) };
        to_result(mapped.min(0))?;
        if mapped == 1 {
            Ok(())
        } else {
            Err(EINVAL)
        }
    }

    /// Cuts it into chunks of `size` bytes; what is left over stays unused.
    pub fn cut(self, size: usize) -> Result<KVec<Chunk>> {
        Self::cut_shared(&Arc::new(self, GFP_KERNEL)?, size)
    }

    /// The same; to be called once for a buffer, so that no two chunks overlap.
    fn cut_shared(buffer: &Arc<Self>, size: usize) -> Result<KVec<Chunk>> {
        let count = buffer.length.checked_div(size).ok_or(EINVAL)?;
        let mut chunks = KVec::with_capacity(count, GFP_KERNEL)?;
        for index in 0..count {
            // INVARIANT: The ranges do not overlap, and end before the buffer does.
            let chunk = Chunk {
                buffer: buffer.clone(),
                offset: index * size,
                length: size,
            };
            chunks.push(chunk, GFP_KERNEL)?;
        }
        Ok(chunks)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.virt.is_some() {
            return;
        }
        // SAFETY: By the type invariant the memory came from `dma_alloc_attrs` for the device that does the DMA of
        // this one, which is registered since `lease` is dropped only after this, with this length and no attributes.
        // Chunks, regions and requests that use it have a reference to it, and are gone.
        unsafe {
            bindings::dma_free_attrs(
                (*self.lease.raw_device()).dma_device,
                self.length,
                self.cpu.as_ptr().cast(),
                self.dma,
                0,
            );
        }
    }
}

/// A part of a [`Buffer`] that is somebody's alone: its owner's, or while it is posted the request's.
///
/// The last chunk of a buffer that is dropped frees it, which may sleep.
///
/// # Invariants
///
/// `offset` and `length` are within the buffer, and no other chunk has any byte of it. No device writes it unless it
/// is posted; the buffer may be part of a region that a peer reads.
pub struct Chunk {
    buffer: Arc<Buffer>,
    offset: usize,
    length: usize,
}

impl Chunk {
    /// Where it is for the device.
    pub(super) fn dma(&self) -> u64 {
        self.buffer.dma + self.offset as u64
    }

    /// The core's device that it is mapped for.
    pub(super) fn device(&self) -> *mut bindings::ib_device {
        self.buffer.lease.raw_device()
    }

    /// Where it begins in its buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Keeps the buffer, whoever drops the last chunk of it.
    pub fn keep(&self) -> Keep {
        Keep {
            _buffer: self.buffer.clone(),
        }
    }

    fn cpu(&self) -> *mut u8 {
        // SAFETY: By the type invariant the offset is within the buffer.
        unsafe { self.buffer.cpu.as_ptr().add(self.offset) }
    }
}

impl Deref for Chunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: By the type invariants these are initialised bytes of the buffer that nobody else has, and that no
        // device writes: a chunk that is posted is not here.
        unsafe { core::slice::from_raw_parts(self.cpu(), self.length) }
    }
}

impl DerefMut for Chunk {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: By the type invariants these are initialised bytes of the buffer that nobody else has, and that no
        // device writes: a chunk that is posted is not here. A device that reads them for a peer finds what was there
        // before or after; nothing here comes of it.
        unsafe { core::slice::from_raw_parts_mut(self.cpu(), self.length) }
    }
}

/// A reference to a buffer, for those who want its chunks to be dropped where nobody may sleep. It leads to no byte of it.
pub struct Keep {
    _buffer: Arc<Buffer>,
}

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Copies memory that somebody else may write at any time: each byte is read once.
///
/// # Safety
///
/// `to.len()` bytes at `from` must be valid for volatile reads.
unsafe fn copy_shared(from: *const u8, to: &mut [u8]) {
    let mut at = 0;
    while at < to.len() {
        // SAFETY: `at` is less than the length.
        let here = unsafe { from.add(at) };
        if here.cast::<u64>().is_aligned() && to.len() - at >= WORD {
            // SAFETY: The caller vouches for the memory, of which a word is left here; it is aligned.
            let word = unsafe { here.cast::<u64>().read_volatile() };
            to[at..at + WORD].copy_from_slice(&word.to_ne_bytes());
            at += WORD;
        } else {
            // SAFETY: The caller vouches for the memory, of which a byte is left here.
            to[at] = unsafe { here.read_volatile() };
            at += 1;
        }
    }
}

/// Nobody has registered it, or it is invalidated.
const IDLE: u32 = 0;
/// A request is under way that registers or invalidates it.
const BUSY: u32 = 1;
/// The peer may use it.
const REGISTERED: u32 = 2;
/// A request that was to register or invalidate it has failed, or was flushed, which says nothing of how far it had come:
/// the peer may use it or not. It can be ended, and nothing else.
const UNKNOWN: u32 = 3;

/// How far the registration of a region is.
struct Progress(Atomic<u32>);

impl Progress {
    const fn new() -> Self {
        Self(Atomic::new(IDLE))
    }

    /// A request is posted that `registers`, or invalidates: `EBUSY` where that cannot be now.
    fn begin(&self, registers: bool) -> Result {
        let from = if registers { IDLE } else { REGISTERED };
        self.0.cmpxchg(from, BUSY, Acquire).map_err(|_| EBUSY)?;
        Ok(())
    }

    /// It was not posted after all.
    fn take_back(&self, registers: bool) {
        self.0
            .store(if registers { IDLE } else { REGISTERED }, Release);
    }

    /// It is complete. A device may have carried out what it then flushes.
    fn end(&self, registers: bool, is_success: bool) {
        let state = match (is_success, registers) {
            (true, true) => REGISTERED,
            (true, false) => IDLE,
            (false, _) => UNKNOWN,
        };
        self.0.store(state, Release);
    }

    fn is_registered(&self) -> bool {
        self.0.load(Relaxed) == REGISTERED
    }
}

/// Memory that peers of one protection domain may use while it is registered (FRWR), by an address and a key.
///
/// It is registered and invalidated by work requests ([`Qp::register`](super::Qp::register),
/// [`Qp::invalidate`](super::Qp::invalidate)). Its end, which may sleep, takes it from the peer whatever it is.
///
/// # Invariants
///
/// `raw` is owned by this value, mapped to `buffer`, and of `pd`. If `access` has anything that writes, there are no
/// chunks of the buffer.
pub struct Region {
    raw: NonNull<bindings::ib_mr>,
    access: Access,
    progress: Progress,
    buffer: Arc<Buffer>,
    pd: Arc<Pd>,
}

// SAFETY: `ib_dereg_mr_user` may be called by any task.
unsafe impl Send for Region {}
// SAFETY: What changes of a region are its keys, by who has begun a registration; they are whole words that are read and
// written as such.
unsafe impl Sync for Region {}

impl Region {
    /// A region that the peer may write, once it is registered. May sleep.
    pub fn writable(pd: &Arc<Pd>, buffer: Buffer) -> Result<Arc<Self>> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Self::new(pd, Arc::new(buffer, GFP_KERNEL)?, access)
    }

    /// A region that the peer may only read, once it is registered, with all of it in chunks of `size` bytes: what is
    /// written there the peer finds. May sleep.
    pub fn readable(pd: &Arc<Pd>, buffer: Buffer, size: usize) -> Result<(Arc<Self>, KVec<Chunk>)> {
        let buffer = Arc::new(buffer, GFP_KERNEL)?;
        let chunks = Buffer::cut_shared(&buffer, size)?;
        Ok((Self::new(pd, buffer, Access::REMOTE_READ)?, chunks))
    }

    fn new(pd: &Arc<Pd>, buffer: Arc<Buffer>, access: Access) -> Result<Arc<Self>> {
        if !ptr::eq(buffer.lease.raw_device(), pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        let page_size = kernel::page::PAGE_SIZE as u32;
        let pages = buffer.pages(page_size)?;
        // SAFETY: `pd` is there for as long as the region, which has a reference to it.
        let raw = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(pd.as_raw(), bindings::ib_mr_type_IB_MR_TYPE_MEM_REG, pages)
        })?;
        // INVARIANT: Made just now, and mapped below; who calls this has made no chunks, or of what is only read.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            access,
            progress: Progress::new(),
            buffer,
            pd: pd.clone(),
        };
        // SAFETY: The region was made just now, for the device of the buffer, as was compared above; nobody else has it
        // yet, and it goes before its buffer.
        unsafe { this.buffer.map_to(raw, page_size)? };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.buffer.length
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.buffer.length == 0
    }

    /// The key for peers, as of the last registration.
    pub fn rkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; the key may be renewed meanwhile, hence the volatile
        // read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).rkey).read_volatile() }
    }

    /// The address of the first byte for peers.
    pub fn iova(&self) -> u64 {
        // SAFETY: By the type invariant the region is ours; the driver may look at it meanwhile, and nobody writes
        // it after it was mapped.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).iova).read_volatile() }
    }

    /// Copies what is there from `offset` on. The peer may write it meanwhile: each byte is one that was there. `EINVAL` for
    /// a region that peers only read: its memory belongs to those who have its chunks.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result {
        let end = offset.checked_add(to.len()).ok_or(EINVAL)?;
        if end > self.buffer.length || !self.access.contains(Access::REMOTE_WRITE) {
            return Err(EINVAL);
        }
        // SAFETY: The range is within the buffer, which is there for as long as the region. Nobody but the peer writes it,
        // since there are no chunks of it: the reads are volatile.
        unsafe { copy_shared(self.buffer.cpu.as_ptr().add(offset), to) };
        Ok(())
    }

    /// What peers may do.
    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Its domain.
    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_mr {
        self.raw.as_ptr()
    }

    /// Begins a registration, with another key than the last: the next of 256.
    pub(super) fn begin_registering(&self) -> Result {
        self.progress.begin(true)?;
        let next = |key: u32| (key & !0xff) | u32::from((key as u8).wrapping_add(1));
        // SAFETY: By the type invariant the region is ours, and whoever has begun does so alone, so that nobody else
        // writes the keys. Others read them meanwhile, hence the volatile accesses.
        unsafe {
            let (lkey, rkey) = (
                ptr::addr_of_mut!((*self.raw.as_ptr()).lkey),
                ptr::addr_of_mut!((*self.raw.as_ptr()).rkey),
            );
            lkey.write_volatile(next(lkey.read_volatile()));
            rkey.write_volatile(next(rkey.read_volatile()));
        }
        Ok(())
    }

    /// Begins an invalidation.
    pub(super) fn begin_invalidating(&self) -> Result {
        self.progress.begin(false)
    }

    /// What was begun, which `registers`, or invalidates, was not posted.
    pub(super) fn take_back(&self, registers: bool) {
        self.progress.take_back(registers);
    }

    /// It is complete.
    pub(super) fn end(&self, registers: bool, is_success: bool) {
        self.progress.end(registers, is_success);
    }

    /// Whether the peer may use it, and it can be invalidated. After a request that was to change this and did not
    /// succeed nobody knows, and it stays so.
    pub fn is_registered(&self) -> bool {
        self.progress.is_registered()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the region is ours, and ended here and nowhere else: no work request has it,
        // as the last reference goes. Memory and domain go after it.
        let ended = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        if ended != 0 {
            // A device that did not let go may still use the memory: it is lost, and so is the domain.
            core::mem::forget(self.buffer.clone());
            core::mem::forget(self.pd.clone());
        }
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_consumer_memory)]
mod tests {
    use super::*;
    use crate::rdma::consumer::Landlord;

    fn buffer(length: usize) -> Result<(Landlord, Buffer)> {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(ptr::null_mut(), c"kunit_memory")? };
        let buffer = Buffer::for_tests(&landlord, length)?;
        Ok((landlord, buffer))
    }

    #[test]
    fn chunks_do_not_overlap() -> Result {
        let (landlord, buffer) = buffer(100)?;
        let start = buffer.dma;
        let mut chunks = buffer.cut(30)?;
        assert_eq!(chunks.len(), 3);
        for (index, chunk) in chunks.iter_mut().enumerate() {
            assert_eq!(chunk.dma(), start + 30 * index as u64);
            chunk.fill(index as u8 + 1);
        }
        for (index, chunk) in chunks.iter().enumerate() {
            assert_eq!(chunk.len(), 30);
            assert!(chunk.iter().all(|&byte| byte == index as u8 + 1));
        }
        // The memory stays for the last of them, and the device with it.
        let last = chunks.pop();
        drop(chunks);
        assert!(last.is_some_and(|chunk| chunk.iter().all(|&byte| byte == 3)));
        drop(landlord);
        Ok(())
    }

    #[test]
    fn a_registration_that_did_not_succeed_is_not_taken_for_none() -> Result {
        for registers in [true, false] {
            let progress = Progress::new();
            assert_eq!(progress.begin(false), Err(EBUSY));
            progress.begin(true)?;
            assert_eq!(progress.begin(true), Err(EBUSY));
            assert!(!progress.is_registered());
            progress.take_back(true);
            progress.begin(true)?;
            if !registers {
                progress.end(true, true);
                assert!(progress.is_registered());
                assert_eq!(progress.begin(true), Err(EBUSY));
                progress.begin(false)?;
                assert!(!progress.is_registered());
                progress.take_back(false);
                assert!(progress.is_registered());
                progress.begin(false)?;
                progress.end(false, true);
                assert!(!progress.is_registered());
                progress.begin(true)?;
                progress.end(true, true);
                progress.begin(false)?;
            }
            progress.end(registers, false);
            assert!(!progress.is_registered());
            assert_eq!(progress.begin(true), Err(EBUSY));
            assert_eq!(progress.begin(false), Err(EBUSY));
        }
        Ok(())
    }

    #[test]
    fn a_buffer_is_not_cut_into_nothing() -> Result {
        let (_landlord, whole) = buffer(16)?;
        assert_eq!(whole.cut(0).err(), Some(EINVAL));
        let (_landlord, small) = buffer(16)?;
        assert_eq!(small.cut(17)?.len(), 0);
        Ok(())
    }

    #[test]
    fn shared_memory_is_copied_whole_from_any_place() {
        let from: [u8; 40] = core::array::from_fn(|index| index as u8);
        for start in 0..16 {
            for length in 0..=from.len() - start {
                let mut to = [0xff; 40];
                // SAFETY: The range is within the array.
                unsafe { copy_shared(from.as_ptr().add(start), &mut to[..length]) };
                assert_eq!(to[..length], from[start..start + length]);
                assert!(to[length..].iter().all(|&byte| byte == 0xff));
            }
        }
    }
}
