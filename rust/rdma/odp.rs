// SPDX-License-Identifier: GPL-2.0

//! On-demand memory: memory of a process that is not pinned. Its pages are mapped for a device
//! when the device needs them, and taken back when the process or the kernel wants them.
//!
//! C header: [`include/rdma/ib_umem_odp.h`](srctree/include/rdma/ib_umem_odp.h).

use super::{Access, Device, Driver};
use crate::bindings;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::NonNull;
use kernel::error::{from_err_ptr, to_result};
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};
use kernel::prelude::*;
use kernel::sync::Arc;

/// Whether the kernel has on-demand memory.
pub const ON_DEMAND_AVAILABLE: bool = cfg!(CONFIG_INFINIBAND_ON_DEMAND_PAGING);

/// Who uses the pages of on-demand memory: the part of a driver that tells its device of them.
pub trait PageUser: Send + Sync {
    /// The pages of these addresses of the process are taken back. When this returns, the device
    /// must not use them any more; the memory is locked against new mappings meanwhile.
    ///
    /// This is called when the kernel reclaims memory: it may sleep, but neither allocate memory
    /// that has to be reclaimed nor wait for somebody who does.
    fn invalidate(&self, addresses: Range<u64>);

    /// Whether the device may go on using pages although it was told not to: it does not answer and
    /// cannot be stopped. Pages that it was told of are never freed then.
    fn may_still_use(&self) -> bool {
        false
    }
}

/// How pages are brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringIn {
    /// To be read; they are made present.
    Read,
    /// To be written; they are made present and writable.
    Write,
    /// Only those that are present.
    Present,
}

/// A page that is mapped for the device.
#[derive(Clone, Copy, Debug)]
pub struct MappedPage {
    /// Its address in the process.
    pub address: u64,
    /// Its address for the device.
    pub dma: u64,
    /// The device may write it.
    pub writable: bool,
}

/// The table of what the kernel calls, for one kind of user.
struct Notify<T>(PhantomData<T>);

impl<T: PageUser> Notify<T> {
    const OPS: bindings::mmu_interval_notifier_ops = bindings::mmu_interval_notifier_ops {
        invalidate: Some(Self::invalidate),
        invalidate_start: None,
        invalidate_finish: None,
    };

    /// # Safety
    ///
    /// To be called by the kernel only, for a notifier of an [`OdpUmem`] of `T`.
    unsafe extern "C" fn invalidate(
        notifier: *mut bindings::mmu_interval_notifier,
        range: *const bindings::mmu_notifier_range,
        seq: c_ulong,
    ) -> bool {
        let (mut start, mut end) = (0, 0);
        // SAFETY: The kernel calls notifiers with what was registered: one that is part of an
        // `ib_umem_odp`, which is not freed before the notifier is removed. `start` and `end` are
        // locals.
        let odp = unsafe { bindings::rdma_odp_begin(notifier, range, seq, &mut start, &mut end) };
        if odp.is_null() {
            return false;
        }
        if start < end {
            // SAFETY: The range is not empty, so that the private pointer was set before: to a `T`
            // that lives until after the notifier is removed.
            let user = unsafe { &*bindings::rdma_odp_private(odp).cast::<T>() };
            user.invalidate(start..end);
            // SAFETY: `rdma_odp_begin` has taken `umem_mutex`, and what it returned lies in the
            // memory.
            unsafe { give_back(odp, user, start..end) };
        }
        // SAFETY: `rdma_odp_begin` has taken `umem_mutex`.
        unsafe { bindings::rdma_odp_unlock(odp) };
        true
    }
}

/// Gives mapped pages back to the kernel, or keeps them for ever where the device may still use them.
///
/// # Safety
///
/// `odp` must be valid and locked, and `range` lie in it.
unsafe fn give_back<T: PageUser>(odp: *mut bindings::ib_umem_odp, user: &T, range: Range<u64>) {
    if user.may_still_use() {
        // SAFETY: The caller vouches for on-demand memory that stays.
        let start = unsafe { bindings::rdma_odp_start(odp) } as u64;
        let first = (range.start.max(start) - start) >> PAGE_SHIFT;
        let end = (range.end.max(start) - start).div_ceil(PAGE_SIZE as u64);
        for index in first..end {
            // SAFETY: The caller vouches that `umem_mutex` is held and that the range lies in the
            // memory.
            unsafe { bindings::rdma_odp_keep_page(odp, index as usize) };
        }
    }
    // SAFETY: The caller vouches that `umem_mutex` is held and that the range lies in the memory.
    unsafe { bindings::rdma_odp_unmap(odp, range.start, range.end) };
}

/// On-demand memory of a process. Dropping it takes its pages back, which sleeps: the device must
/// not use them any more by then.
///
/// # Invariants
///
/// `raw` is on-demand memory that this value owns, whose private pointer is that of `user`.
pub struct OdpUmem<T: PageUser> {
    raw: NonNull<bindings::ib_umem_odp>,
    user: Arc<T>,
}

// SAFETY: On-demand memory belongs to no task: it holds the process's memory map itself. `T` is
// `Send` and `Sync`, as `PageUser` demands.
unsafe impl<T: PageUser> Send for OdpUmem<T> {}
// SAFETY: `map` may be called at once. All that changes does so with `umem_mutex` held, but for the
// words of `pfn_list`: bringing pages in reads and writes those without it, as it does for every user
// of `ib_umem_odp`. They are words of the C side, so that who writes one last decides what is in it.
// Which page it is is the same for all, or the sequence of the notifier says that something was
// invalidated, and it is brought in again. The flag that says that it is mapped may be lost or come
// back: then the page is mapped once more, or the count of mapped pages is off, which nothing here
// relies on.
unsafe impl<T: PageUser> Sync for OdpUmem<T> {}

impl<T: PageUser> OdpUmem<T> {
    /// Makes on-demand memory of `length` bytes of the current process from `address` on.
    pub fn get<D: Driver>(
        dev: &Device<D>,
        address: u64,
        length: u64,
        access: Access,
        user: Arc<T>,
    ) -> Result<Self> {
        // Pages of the system's size, whatever the process uses: huge ones are mapped in parts.
        let access = access.as_raw() & !Access::HUGETLB.as_raw();
        // SAFETY: `dev` is a reference to a device, which the memory does not outlive.
        let raw = from_err_ptr(unsafe {
            bindings::rdma_odp_get(
                dev.as_raw(),
                usize::try_from(address)?,
                usize::try_from(length)?,
                access as c_int,
                &Notify::<T>::OPS,
            )
        })?;
        Self::adopt(raw, user)
    }

    /// Takes over what was made just now.
    fn adopt(raw: *mut bindings::ib_umem_odp, user: Arc<T>) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // SAFETY: The memory was made just now; who is told of invalidations reads the pointer with
        // the mutex held, as it is written.
        unsafe {
            bindings::rdma_odp_set_private(raw.as_ptr(), Arc::as_ptr(&user).cast_mut().cast());
        }
        // INVARIANT: Made just now, and the pointer was set.
        Ok(Self { raw, user })
    }

    /// Who uses the pages.
    pub fn user(&self) -> &Arc<T> {
        &self.user
    }

    /// The addresses of the process that it covers, in whole pages.
    pub fn addresses(&self) -> Range<u64> {
        // SAFETY: By the type invariant the memory is ours; its addresses do not change.
        let (start, end) = unsafe {
            (
                bindings::rdma_odp_start(self.raw.as_ptr()),
                bindings::rdma_odp_end(self.raw.as_ptr()),
            )
        };
        start as u64..end as u64
    }

    /// Maps the pages of `length` bytes from `address` on, and calls `each` for every one that is
    /// present, with the memory locked: what `each` tells the device holds until
    /// [`PageUser::invalidate`] is called. `each` must not allocate. Sleeps.
    pub fn map(
        &self,
        address: u64,
        length: u64,
        how: BringIn,
        mut each: impl FnMut(MappedPage),
    ) -> Result {
        let raw = self.raw.as_ptr();
        let end = address.checked_add(length).ok_or(EFAULT)?;
        let write = how == BringIn::Write;
        let fault = how != BringIn::Present;
        // SAFETY: Valid by the type invariant; the range is checked by the callee.
        let pages = unsafe { bindings::rdma_odp_map_and_lock(raw, address, length, write, fault) };
        to_result(pages.min(0))?;
        let start = self.addresses().start;
        let mut result = Ok(());
        let mut page = address & !(PAGE_SIZE as u64 - 1);
        while page < end {
            let index = ((page - start) >> PAGE_SHIFT) as usize;
            let (mut dma, mut writable) = (0, false);
            // SAFETY: `rdma_odp_map_and_lock` has taken `umem_mutex`, and `index` lies in the range
            // that it mapped; the others are locals.
            match unsafe { bindings::rdma_odp_map_page(raw, index, &mut dma, &mut writable) } {
                0 => {}
                1 => each(MappedPage {
                    address: page,
                    dma,
                    writable,
                }),
                error => {
                    result = to_result(error);
                    break;
                }
            }
            page += PAGE_SIZE as u64;
        }
        // SAFETY: `rdma_odp_map_and_lock` has taken `umem_mutex`.
        unsafe { bindings::rdma_odp_unlock(raw) };
        result
    }
}

impl<T: PageUser> Drop for OdpUmem<T> {
    fn drop(&mut self) {
        let raw = self.raw.as_ptr();
        if self.user.may_still_use() {
            // SAFETY: By the type invariant the memory is ours; `umem_mutex` is taken before and
            // given back after.
            unsafe {
                bindings::rdma_odp_lock(raw);
                give_back(raw, &*self.user, self.addresses());
                bindings::rdma_odp_unlock(raw);
            }
        }
        // SAFETY: Ours by the type invariant. The user lives until the notifier is removed.
        unsafe { bindings::rdma_odp_release(raw) }
    }
}

/// All memory of a process, to make on-demand memory of parts of it later, from any task.
///
/// # Invariants
///
/// The pointer is a root that this value owns.
pub struct OdpRoot(NonNull<bindings::ib_umem_odp>);

// SAFETY: A root belongs to no task: it holds the process's memory map itself.
unsafe impl Send for OdpRoot {}
// SAFETY: A root is only read after it was made.
unsafe impl Sync for OdpRoot {}

impl OdpRoot {
    /// All memory of the current process.
    pub fn new<D: Driver>(dev: &Device<D>, access: Access) -> Result<Self> {
        let access = access.as_raw() & !Access::HUGETLB.as_raw();
        let dev = dev.as_raw();
        // SAFETY: `dev` comes from a reference to a device, which the root does not outlive.
        let root = unsafe { bindings::rdma_odp_alloc_root(dev, access as c_int) };
        let root = from_err_ptr(root)?;
        // INVARIANT: Made just now.
        NonNull::new(root).map(Self).ok_or(ENOMEM)
    }

    /// On-demand memory of `length` bytes from `address` on. Fails when the process is gone.
    pub fn part<T: PageUser>(&self, address: u64, length: u64, user: Arc<T>) -> Result<OdpUmem<T>> {
        // SAFETY: The root is valid by the type invariant, and keeps the process's memory map.
        let raw = from_err_ptr(unsafe {
            bindings::rdma_odp_alloc_child(
                self.0.as_ptr(),
                usize::try_from(address)?,
                usize::try_from(length)?,
                &Notify::<T>::OPS,
            )
        })?;
        OdpUmem::adopt(raw, user)
    }
}

impl Drop for OdpRoot {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the root is ours, and its children hold the memory map
        // themselves.
        unsafe { bindings::rdma_odp_release_root(self.0.as_ptr()) }
    }
}

c_enum! {
    /// What a process says about memory that it is going to use.
    pub enum Advice {
        /// It will be read.
        Prefetch = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        /// It will be written.
        PrefetchWrite = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        /// It will be used; only pages that are present count.
        PrefetchNoFault = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    }
}

/// A part of a region that an advice is about.
#[derive(Clone, Copy, Debug)]
pub struct AdvisedRange {
    /// Address, as work requests say it.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: u32,
}

c_flags! {
    /// What a service can do with on-demand memory.
    pub struct OdpCaps(u32) {
        /// Send from it.
        SEND = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SEND,
        /// Receive to it.
        RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_RECV,
        /// Write, from it and to it.
        WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_WRITE,
        /// Read, from it and to it.
        READ = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_READ,
        /// Atomics.
        ATOMIC = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC,
        /// Receive to it through a shared receive queue.
        SRQ_RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SRQ_RECV,
        /// Flushes.
        FLUSH = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_FLUSH,
        /// Atomic writes.
        ATOMIC_WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC_WRITE,
    }
}

/// What a device can do with on-demand memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnDemandAttr {
    /// Regions of all of a process's memory.
    pub implicit: bool,
    /// Reliable connections.
    pub rc: OdpCaps,
    /// Unreliable connections.
    pub uc: OdpCaps,
    /// Datagrams.
    pub ud: OdpCaps,
    /// Extended reliable connections.
    pub xrc: OdpCaps,
}

impl OnDemandAttr {
    pub(super) fn fill(&self, raw: &mut bindings::ib_device_attr) {
        let mut general = bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT;
        if self.implicit {
            general |= bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT_IMPLICIT;
        }
        raw.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_ON_DEMAND_PAGING);
        raw.odp_caps.general_caps = general.into();
        let services = &mut raw.odp_caps.per_transport_caps;
        services.rc_odp_caps = self.rc.as_raw();
        services.uc_odp_caps = self.uc.as_raw();
        services.ud_odp_caps = self.ud.as_raw();
        services.xrc_odp_caps = self.xrc.as_raw();
    }
}
