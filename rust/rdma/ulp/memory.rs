// SPDX-License-Identifier: GPL-2.0

//! Memory for the device, and regions of it (FRWR).

use crate::bindings;
use crate::rdma::consumer::{self, Lease, Pd};
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::error::from_err_ptr;
use kernel::prelude::*;
use kernel::sync::Arc;

/// Memory that a device reads and writes, and who has a reference as well, at any time: in single bytes.
pub struct Buffer {
    /// Nobody makes chunks or regions of it, which would be somebody's alone.
    pub(super) memory: consumer::Buffer,
}

impl Buffer {
    /// Allocates zeroed memory.
    pub fn new(lease: &Lease, length: usize) -> Result<Arc<Self>> {
        let memory = consumer::Buffer::new(lease, length)?;
        Ok(Arc::new(Self { memory }, GFP_KERNEL)?)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    fn cpu(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Sets each byte to `f` of its index.
    pub fn fill(&self, f: impl Fn(usize) -> u8) {
        for index in 0..self.len() {
            // SAFETY: `index` is less than the length, by the loop. The device and others may look at the
            // memory at any time, hence the volatile write.
            unsafe { self.cpu().add(index).write_volatile(f(index)) };
        }
    }

    /// A byte, `None` beyond the end.
    pub fn byte(&self, index: usize) -> Option<u8> {
        // SAFETY: `index` was compared with the length. The device and others may write the memory at any
        // time, hence the volatile read.
        (index < self.len()).then(|| unsafe { self.cpu().add(index).read_volatile() })
    }

    /// The first index in `range` whose byte is not `f` of its index.
    pub fn first_difference(&self, range: Range<usize>, f: impl Fn(usize) -> u8) -> Option<usize> {
        range
            .into_iter()
            .find(|&index| self.byte(index) != Some(f(index)))
    }
}

/// A region for fast registration, mapped to a buffer.
///
/// What is mapped does not change: it may be registered, invalidated and registered again, and be in
/// use meanwhile. It ends with the last reference; who posts it has one until the request is complete.
///
/// # Invariants
///
/// `raw` is owned by this value, and in the domain `pd`.
pub struct Mr {
    pub(super) raw: NonNull<bindings::ib_mr>,
    pub(super) buffer: Arc<Buffer>,
    pd: Arc<Pd>,
}

// SAFETY: `ib_dereg_mr_user` may be called by any task.
unsafe impl Send for Mr {}

// SAFETY: What changes of a region are its keys, whole words that are read and written as such.
unsafe impl Sync for Mr {}

impl Mr {
    /// Makes a region and maps it to `buffer`. It has to be registered by work request
    /// ([`Op::reg_mr`](super::Op::reg_mr)) before it can be used.
    pub fn new(pd: &Arc<Pd>, buffer: Arc<Buffer>) -> Result<Arc<Self>> {
        Self::with_page_size(pd, buffer, kernel::page::PAGE_SIZE as u32)
    }

    /// The same in pages of another size ([`Device::page_sizes`](super::Device::page_sizes)).
    pub fn with_page_size(pd: &Arc<Pd>, buffer: Arc<Buffer>, page_size: u32) -> Result<Arc<Self>> {
        Self::make(pd, buffer, page_size, 0)
    }

    /// The same in pages of the usual size, with room for `pages` of them if the buffer has fewer.
    pub fn with_room(pd: &Arc<Pd>, buffer: Arc<Buffer>, pages: u32) -> Result<Arc<Self>> {
        Self::make(pd, buffer, kernel::page::PAGE_SIZE as u32, pages)
    }

    fn make(pd: &Arc<Pd>, buffer: Arc<Buffer>, page_size: u32, room: u32) -> Result<Arc<Self>> {
        let sizes = pd.lease().device().page_sizes();
        let known = page_size.is_power_of_two() && sizes & u64::from(page_size) != 0;
        if !known || !ptr::eq(buffer.memory.device(), pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        let pages = buffer.memory.pages(page_size)?;
        // SAFETY: `pd` is borrowed, so that the domain is not freed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(
                pd.as_raw(),
                bindings::ib_mr_type_IB_MR_TYPE_MEM_REG,
                pages.max(room),
            )
        })?;
        // INVARIANT: Made just now.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            buffer,
            pd: pd.clone(),
        };
        // SAFETY: The region was made just now, for so many pages and for the device of the buffer, as was compared above;
        // nobody else has it yet. It goes before its buffer: `drop` comes before the fields, and leaks the buffer where the
        // region stays.
        unsafe { this.buffer.memory.map_to(raw, page_size)? };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// The core's region, which is there for as long as this is.
    pub fn as_raw(&self) -> *mut bindings::ib_mr {
        self.raw.as_ptr()
    }

    /// The memory that it is mapped to.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Its device and domain.
    pub(super) fn home(&self) -> Home {
        Home::of(&self.pd)
    }

    /// The key for peers, as of the last registration or [`Mr::renew_key`].
    pub fn rkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; the key may be renewed meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).rkey).read_volatile() }
    }

    /// The key for local work requests, likewise.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; the key may be renewed meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).lkey).read_volatile() }
    }

    /// The address of the first byte for peers.
    pub fn iova(&self) -> u64 {
        // SAFETY: By the type invariant the region is ours; the driver may look at it meanwhile, and
        // nobody writes it after it was mapped.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).iova).read_volatile() }
    }

    /// Gives the region another key for its next registration: the next of 256.
    pub fn renew_key(&self) {
        let next = |key: u32| (key & !0xff) | u32::from((key as u8).wrapping_add(1));
        let (lkey, rkey) = (next(self.lkey()), next(self.rkey()));
        // SAFETY: By the type invariant the region is ours. Others read the keys meanwhile, or renew
        // them too, hence the volatile writes: each finds a key of the region.
        unsafe {
            ptr::addr_of_mut!((*self.raw.as_ptr()).lkey).write_volatile(lkey);
            ptr::addr_of_mut!((*self.raw.as_ptr()).rkey).write_volatile(rkey);
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the region is ours, and ended here and nowhere else: no work
        // request has it, as the last reference goes. The memory goes after it.
        let ended = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        if ended != 0 {
            // A device that did not let go may still use the memory, and the core lists the region with its domain:
            // both are lost.
            core::mem::forget(self.buffer.clone());
            core::mem::forget(self.pd.clone());
        }
    }
}

/// Where something belongs. What is used together belongs to the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Home {
    device: *mut bindings::ib_device,
    pd: *mut bindings::ib_pd,
}

impl Home {
    pub(super) fn of(pd: &Pd) -> Self {
        Self {
            device: pd.lease().raw_device(),
            pd: pd.as_raw(),
        }
    }
}
