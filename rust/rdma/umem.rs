// SPDX-License-Identifier: GPL-2.0

//! Memory of a process, pinned and mapped for a device.

use super::hold::Hold;
use super::{Access, Device, Driver};
use crate::bindings;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use kernel::error::{from_err_ptr, to_result};
use kernel::prelude::*;

/// Pinned user memory, mapped for DMA. Released when dropped, which may sleep: the device is not freed before.
///
/// # Invariants
///
/// `raw` is of the device of `hold`.
pub struct Umem {
    // Before the hold of the device, which is looked at when it is released.
    raw: Owned,
    hold: Hold,
}

/// # Invariants
///
/// The pointer is a umem that this value owns, of a device that is not freed before it is released.
struct Owned(NonNull<bindings::ib_umem>);

// SAFETY: A umem belongs to no task: it holds what it needs to be released by any, the memory map
// of the process or the attachment to the DMA buffer.
unsafe impl Send for Owned {}
// SAFETY: What writes to a umem takes `&mut Umem`; what takes `&Umem` only reads it.
unsafe impl Sync for Owned {}

impl Umem {
    /// Pins `length` bytes of the current process from `address` on.
    ///
    /// Memory that the device may write needs [`Access::LOCAL_WRITE`] (or a remote one).
    pub fn get<D: Driver>(
        dev: &Device<D>,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<Self> {
        let address = usize::try_from(address).map_err(|_| EINVAL)?;
        let hold = dev.hold();
        // SAFETY: `dev` is a reference to a device, which is not freed before `hold` is given back. Address and length
        // are checked by the callee.
        let umem = from_err_ptr(unsafe {
            bindings::ib_umem_get_va(dev.as_raw(), address, length, access.as_raw() as c_int)
        })?;
        Self::new(umem, hold)
    }

    /// Pins `length` bytes of the DMA buffer with file descriptor `fd`, from `offset` on, where
    /// they are: its exporter does not move them until this is dropped.
    pub fn get_dmabuf_pinned<D: Driver>(
        dev: &Device<D>,
        fd: i32,
        offset: u64,
        length: usize,
        access: Access,
    ) -> Result<Self> {
        let offset = usize::try_from(offset).map_err(|_| EINVAL)?;
        let hold = dev.hold();
        // SAFETY: `dev` is a reference to a device, which is not freed before `hold` is given back. The descriptor is
        // looked up in the current process, offset and length are checked by the callee.
        let umem = from_err_ptr(unsafe {
            bindings::ib_umem_dmabuf_get_pinned(
                dev.as_raw(),
                offset,
                length,
                fd,
                access.as_raw() as c_int,
            )
        })?;
        // SAFETY: The umem is part of what was made just now, and is released with all of it.
        let umem = unsafe { core::ptr::addr_of_mut!((*umem).umem) };
        Self::new(umem, hold)
    }

    /// `umem` is null, or was made for the caller, of the device of `hold`.
    fn new(umem: *mut bindings::ib_umem, hold: Hold) -> Result<Self> {
        let umem = NonNull::new(umem).ok_or(ENOMEM)?;
        // INVARIANT: It was made for us, and is released before the hold is given back, or never.
        Ok(Self {
            raw: Owned(umem),
            hold,
        })
    }

    /// Leaves the memory pinned for ever, for a device that may use it without end; who removes the device does not
    /// wait for it.
    pub fn leak(self) {
        let Self { raw, hold } = self;
        // Who looks at the device of a umem is who releases it, an exporter that moves a DMA buffer though it is pinned,
        // which it must not, and who lists DMA buffers (`dma_buf_debug_show`): so the driver of a device of which there is
        // something to leak keeps a reference to it, with what else the device may use.
        core::mem::forget(raw);
        drop(hold);
    }

    fn as_ptr(&self) -> *mut bindings::ib_umem {
        self.raw.0.as_ptr()
    }

    /// The largest page size out of `sizes` (a bit each) in which the memory, seen at `iova`, is
    /// contiguous for the device.
    ///
    /// The umem keeps `iova`, by which the number of its blocks is reckoned from now on.
    pub fn best_page_size(&mut self, sizes: u64, iova: u64) -> Option<usize> {
        // SAFETY: By the type invariant the umem is ours, and `&mut self` that nobody reads it while
        // the function writes its `iova`.
        let size =
            unsafe { bindings::ib_umem_find_best_pgsz(self.as_ptr(), sizes as c_ulong, iova) };
        (size != 0).then_some(size)
    }

    /// How many pages of `page_size`, a power of two, the memory touches.
    pub fn num_blocks(&self, page_size: usize) -> usize {
        if !page_size.is_power_of_two() {
            return 0;
        }
        // SAFETY: By the type invariant the umem is ours, and nobody writes to it during `&self`.
        unsafe { bindings::ib_umem_num_dma_blocks(self.as_ptr(), page_size) }
    }

    /// Bytes between the start of the first system page and the memory.
    pub fn offset(&self) -> usize {
        // SAFETY: By the type invariant the umem is ours, and nobody writes to it during `&self`.
        unsafe { bindings::ib_umem_offset(self.as_ptr()) as usize }
    }

    /// Checks that the memory may be used with other rights: what was pinned for reading only
    /// cannot be written (`EACCES`).
    pub fn check_access(&self, access: Access) -> Result {
        // SAFETY: By the type invariant the umem is ours, and nobody writes to it during `&self`.
        to_result(unsafe {
            bindings::ib_umem_check_rereg(
                self.as_ptr(),
                bindings::ib_mr_rereg_flags_IB_MR_REREG_ACCESS as c_int,
                access.as_raw() as c_int,
            )
        })
    }

    /// How many bytes are pinned.
    pub fn len(&self) -> usize {
        // SAFETY: By the type invariant the umem is ours, and nobody writes to it during `&self`.
        unsafe { (*self.as_ptr()).length }
    }

    /// Whether no byte is pinned.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The DMA addresses of the memory's pages.
    ///
    /// `page_size` has to be the system's page size, or a smaller power of two, or what
    /// [`Umem::best_page_size`] returned; there are no blocks of a size that is no power of two.
    pub fn blocks(&self, page_size: usize) -> Blocks<'_> {
        // A zeroed iterator is one that is at its end.
        let mut iter = MaybeUninit::zeroed();
        if page_size.is_power_of_two() {
            // SAFETY: By the type invariant the umem is ours, and the iterator borrows it; the
            // function initialises the iterator.
            unsafe {
                bindings::__rdma_umem_block_iter_start(iter.as_mut_ptr(), self.as_ptr(), page_size);
            }
        }
        Blocks {
            // SAFETY: Zeroed, or initialised above.
            iter: unsafe { iter.assume_init() },
            _umem: PhantomData,
        }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: By the type invariants the umem is ours, and released here and nowhere else; its device is there.
        unsafe { bindings::ib_umem_release(self.0.as_ptr()) }
    }
}

/// Iterator over the DMA addresses of a [`Umem`].
pub struct Blocks<'a> {
    iter: bindings::ib_block_iter,
    _umem: PhantomData<&'a Umem>,
}

impl Iterator for Blocks<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        // SAFETY: `blocks` has initialised the iterator, and it borrows the umem that it walks.
        let more = unsafe { bindings::__rdma_umem_block_iter_next(&mut self.iter) };
        // SAFETY: The iterator is initialised, and it was found to be at a block.
        more.then(|| unsafe { bindings::rdma_block_iter_dma_address(&mut self.iter) })
    }
}
