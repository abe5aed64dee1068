// SPDX-License-Identifier: GPL-2.0

//! User contexts and what they map.

use super::{kind, Driver, Object, ObjectRef};
use crate::bindings;
use crate::kernel_ext::io::bar_range;
use core::marker::PhantomData;
use core::ptr;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::transmute::AsBytes;
use kernel::{device, pci};

/// A process's open handle of a device.
pub type Ucontext<D> = Object<kind::Ucontext, D>;
/// A counted reference to a user context.
pub type UcontextRef<D> = ObjectRef<kind::Ucontext, D>;

/// How a process asks for the time of the device's clock.
#[derive(Clone, Copy)]
#[repr(u16)]
pub enum ClockQuery {
    /// However long that takes.
    Patient = bindings::RDMA_CONTEXT_ATTR_CLOCK as u16,
    /// Not (`EAGAIN`) where the device cannot be asked at once.
    Now = bindings::RDMA_CONTEXT_ATTR_CLOCK_NOW as u16,
}

/// Where to answer a process that asks about its context.
pub struct ContextResponse<'a> {
    attrs: *mut bindings::uverbs_attr_bundle,
    _p: PhantomData<&'a ()>,
}

impl ContextResponse<'_> {
    /// # Safety
    ///
    /// `attrs` must be those of a query of a context that is being carried out.
    pub(super) unsafe fn new(attrs: *mut bindings::uverbs_attr_bundle) -> Self {
        Self {
            attrs,
            _p: PhantomData,
        }
    }

    /// Writes the response, cut or padded with zeroes to what the process gave room for.
    pub fn respond<T: AsBytes>(&self, response: &T) -> Result {
        // SAFETY: `new` was given the attributes of a query that outlives `self`; `response` is as
        // many bytes as announced, all initialised.
        to_result(unsafe {
            bindings::uverbs_copy_to_struct_or_zero(
                self.attrs,
                bindings::RDMA_CONTEXT_ATTR_RESPONSE as usize,
                ptr::from_ref(response).cast(),
                size_of::<T>(),
            )
        })
    }

    /// Whether the process wants to know the time of the device's clock in this way.
    pub fn wants_clock(&self, way: ClockQuery) -> bool {
        // SAFETY: `new` was given the attributes of a query that outlives `self`.
        unsafe { bindings::rdma_context_wants_clock(self.attrs, way as u16) }
    }

    /// Tells the time of the device's clock to a process that wants to know it in this way.
    pub fn respond_clock(&self, way: ClockQuery, ticks: u64) -> Result {
        // SAFETY: `new` was given the attributes of a query that outlives `self`.
        to_result(unsafe { bindings::rdma_context_respond_clock(self.attrs, way as u16, ticks) })
    }
}

/// How a processor accesses a mapped page of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Each access goes to the device as it is.
    Uncached,
    /// Writes may be joined.
    WriteCombining,
}

/// A range of a BAR that a process may map.
#[repr(C)]
struct BarRange {
    entry: bindings::rdma_user_mmap_entry,
    address: u64,
    write_combine: bool,
    /// What has to live for as long as the range can be reached.
    keep: Option<KBox<dyn Send>>,
}

impl<D: Driver> Object<kind::Ucontext, D> {
    /// Lets the process map `length` bytes of a BAR of the device's parent, which has to be a PCI
    /// device; `offset` and `length` have to be multiples of a page. Returns the offset to map them
    /// by.
    ///
    /// Two processes may see each other's accesses only if they are given the same page. Mappings
    /// are revoked when the context goes.
    pub fn map_bar(&self, bar: u32, offset: u64, length: usize, caching: Caching) -> Result<u64> {
        self.insert_range(bar, offset, length, caching, None)
    }

    /// As [`Self::map_bar`]; `keep` is dropped when the range can neither be mapped any more nor is
    /// mapped.
    pub fn map_bar_keeping<T: Send + 'static>(
        &self,
        bar: u32,
        offset: u64,
        length: usize,
        caching: Caching,
        keep: KBox<T>,
    ) -> Result<u64> {
        let keep = KBox::into_raw(keep);
        // SAFETY: The pointer came from `into_raw` just now.
        let keep: KBox<dyn Send> = unsafe { KBox::from_raw(keep as *mut dyn Send) };
        self.insert_range(bar, offset, length, caching, Some(keep))
    }

    /// Ends a range: it cannot be mapped any more. Mappings that exist stay.
    pub fn unmap_bar(&self, offset: u64) {
        let page = offset as usize / kernel::page::PAGE_SIZE;
        // SAFETY: `&self` is a context that is not freed; the function takes the lock of its
        // entries.
        let entry = unsafe { bindings::rdma_user_mmap_entry_get_pgoff(self.as_raw(), page) };
        if !entry.is_null() {
            // SAFETY: The entry is ours until it is put. It was not removed before, else it would
            // not have been found.
            unsafe {
                bindings::rdma_user_mmap_entry_remove(entry);
                bindings::rdma_user_mmap_entry_put(entry);
            }
        }
    }

    fn insert_range(
        &self,
        bar: u32,
        offset: u64,
        length: usize,
        caching: Caching,
        keep: Option<KBox<dyn Send>>,
    ) -> Result<u64> {
        let page_mask = kernel::page::PAGE_SIZE - 1;
        if length == 0 || (length | offset as usize) & page_mask != 0 {
            return Err(EINVAL);
        }
        let parent: &pci::Device<device::Bound> = self.device().parent().try_into()?;
        let address = bar_range(parent, bar, offset, length)?;
        let range = KBox::<BarRange>::new_uninit(GFP_KERNEL)?;
        let range = KBox::into_raw(range).cast::<BarRange>();
        // SAFETY: The memory is ours; a zeroed entry is what the core expects.
        unsafe {
            ptr::write_bytes(range, 0, 1);
            (*range).address = address;
            (*range).write_combine = caching == Caching::WriteCombining;
            ptr::addr_of_mut!((*range).keep).write(keep);
        }
        // SAFETY: `&self` is a context that is not freed; the entry is freed by `free_range`, when
        // the core has no more use for it.
        let ret = unsafe {
            bindings::rdma_user_mmap_entry_insert(
                self.as_raw(),
                ptr::addr_of_mut!((*range).entry),
                length,
            )
        };
        if ret != 0 {
            // SAFETY: The entry was not taken, so that the memory is still ours.
            drop(unsafe { KBox::from_raw(range) });
            to_result(ret)?;
        }
        // SAFETY: The entry was inserted above, and is not removed before the context goes: its
        // offset is not told to anybody yet.
        Ok(unsafe { bindings::rdma_user_mmap_get_offset(ptr::addr_of!((*range).entry)) })
    }
}

/// Maps what the offset of `vma` stands for.
///
/// # Safety
///
/// To be called by the core as `mmap`.
pub(super) unsafe extern "C" fn mmap(
    ctx: *mut bindings::ib_ucontext,
    vma: *mut bindings::vm_area_struct,
) -> c_int {
    // SAFETY: The core calls this with the context of the file, which it holds, and with the VMA
    // that is being mapped.
    let entry = unsafe { bindings::rdma_user_mmap_entry_get(ctx, vma) };
    if entry.is_null() {
        return EINVAL.to_errno();
    }
    let range = entry.cast::<BarRange>();
    // SAFETY: All entries are `BarRange`s; this one is held until it is put below.
    unsafe {
        let ret =
            bindings::rdma_user_mmap_bar(ctx, vma, (*range).address, (*range).write_combine, entry);
        bindings::rdma_user_mmap_entry_put(entry);
        ret
    }
}

/// Frees an entry that is neither in its context nor mapped any more.
///
/// # Safety
///
/// To be called by the core as `mmap_free`.
pub(super) unsafe extern "C" fn free_range(entry: *mut bindings::rdma_user_mmap_entry) {
    // SAFETY: All entries are `BarRange`s from `map_bar`, and the core is done with this one.
    drop(unsafe { KBox::from_raw(entry.cast::<BarRange>()) });
}

/// Removes all entries of a context.
///
/// # Safety
///
/// The context must be about to go.
pub(super) unsafe fn remove_ranges(ctx: *mut bindings::ib_ucontext) {
    let mut index = 0;
    loop {
        // SAFETY: The caller vouches that the context is not freed yet; `index` is a local.
        let entry = unsafe {
            bindings::xa_find(
                ptr::addr_of_mut!((*ctx).mmap_xa),
                &mut index,
                usize::MAX,
                bindings::XA_PRESENT,
            )
        };
        if entry.is_null() {
            break;
        }
        let entry = entry.cast::<bindings::rdma_user_mmap_entry>();
        // SAFETY: The entry is in the context, so it is valid. One that was removed before waits
        // for its mappings to go; removing it twice would drop its count twice.
        unsafe {
            index = (*entry).start_pgoff + (*entry).npages;
            if !(*entry).driver_removed {
                bindings::rdma_user_mmap_entry_remove(entry);
            }
        }
    }
}
