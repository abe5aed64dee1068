// SPDX-License-Identifier: GPL-2.0

//! User contexts and what they map.

use super::{kind, Driver, Object, ObjectRef};
use crate::bindings;
use core::mem::MaybeUninit;
use core::ptr;
use kernel::error::to_result;
use kernel::prelude::*;

/// A process's open handle of a device.
pub type Ucontext<D> = Object<kind::Ucontext, D>;
/// A counted reference to a user context.
pub type UcontextRef<D> = ObjectRef<kind::Ucontext, D>;

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
}

impl<D: Driver> Object<kind::Ucontext, D> {
    /// Lets the process map `length` bytes of the device at bus address `address`; both have to be
    /// multiples of a page. Returns the offset to map them by.
    ///
    /// The driver has to own the range, and hand the same page to two processes only if they may
    /// see each other's accesses. Mappings are revoked when the context goes.
    pub fn map_bar(&self, address: u64, length: usize, caching: Caching) -> Result<u64> {
        let page_mask = kernel::page::PAGE_SIZE - 1;
        if length == 0 || (length | address as usize) & page_mask != 0 {
            return Err(EINVAL);
        }
        let range = KBox::<BarRange>::new_uninit(GFP_KERNEL)?;
        let range = KBox::into_raw(range).cast::<BarRange>();
        // SAFETY: The memory is ours; a zeroed entry is what the core expects.
        unsafe {
            ptr::write_bytes(range, 0, 1);
            (*range).address = address;
            (*range).write_combine = caching == Caching::WriteCombining;
        }
        // SAFETY: The context is valid; the entry lives until `free_range`.
        let ret = unsafe {
            bindings::rdma_user_mmap_entry_insert(
                self.as_raw(),
                ptr::addr_of_mut!((*range).entry),
                length,
            )
        };
        if ret != 0 {
            // SAFETY: The entry was not taken, so that the memory is still ours.
            drop(unsafe { KBox::from_raw(range.cast::<MaybeUninit<BarRange>>()) });
            to_result(ret)?;
        }
        // SAFETY: The entry stays until the context goes.
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
    // SAFETY: The core passes a valid context and VMA.
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
    drop(unsafe { KBox::from_raw(entry.cast::<MaybeUninit<BarRange>>()) });
}

/// Removes all entries of a context.
///
/// # Safety
///
/// The context must be about to go.
pub(super) unsafe fn remove_ranges(ctx: *mut bindings::ib_ucontext) {
    let mut index = 0;
    loop {
        // SAFETY: The context is valid.
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
