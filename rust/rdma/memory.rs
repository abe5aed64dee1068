// SPDX-License-Identifier: GPL-2.0

//! Memory regions and windows.

use super::{kind, Driver, New, Object, ObjectRef, Pd};
use core::ptr;

/// A memory region.
pub type Mr<D> = Object<kind::Mr, D>;
/// A counted reference to a memory region.
pub type MrRef<D> = ObjectRef<kind::Mr, D>;
/// A memory window.
pub type Mw<D> = Object<kind::Mw, D>;
/// A counted reference to a memory window.
pub type MwRef<D> = ObjectRef<kind::Mw, D>;

c_flags! {
    /// What may be done to memory.
    pub struct Access(u32) {
        /// Local writes.
        LOCAL_WRITE = ib_access_flags_IB_ACCESS_LOCAL_WRITE,
        /// Remote writes.
        REMOTE_WRITE = ib_access_flags_IB_ACCESS_REMOTE_WRITE,
        /// Remote reads.
        REMOTE_READ = ib_access_flags_IB_ACCESS_REMOTE_READ,
        /// Remote atomics.
        REMOTE_ATOMIC = ib_access_flags_IB_ACCESS_REMOTE_ATOMIC,
        /// Binding of memory windows.
        MW_BIND = ib_access_flags_IB_ACCESS_MW_BIND,
        /// Addresses count from zero.
        ZERO_BASED = ib_access_flags_IB_ZERO_BASED,
        /// Making remote writes visible to all.
        FLUSH_GLOBAL = ib_access_flags_IB_ACCESS_FLUSH_GLOBAL,
        /// Making remote writes outlive the machine's power.
        FLUSH_PERSISTENT = ib_access_flags_IB_ACCESS_FLUSH_PERSISTENT,
        /// Pages need not be there.
        ON_DEMAND = ib_access_flags_IB_ACCESS_ON_DEMAND,
        /// Pages are huge.
        HUGETLB = ib_access_flags_IB_ACCESS_HUGETLB,
        /// Writes need not be in order.
        RELAXED_ORDERING = ib_access_flags_IB_ACCESS_RELAXED_ORDERING,
    }
}

/// Memory of a process to be registered.
#[derive(Clone, Copy, Debug)]
pub struct UserRegion {
    /// Where it starts in the process.
    pub start: u64,
    /// How many bytes it is.
    pub length: u64,
    /// The address its first byte is to have in work requests.
    pub iova: u64,
    /// What may be done to it.
    pub access: Access,
}

/// Part of a DMA buffer to be registered.
#[derive(Clone, Copy, Debug)]
pub struct DmabufRegion {
    /// The buffer's file descriptor in the process.
    pub fd: i32,
    /// Where it starts in the buffer.
    pub offset: u64,
    /// How many bytes it is.
    pub length: u64,
    /// The address its first byte is to have in work requests.
    pub iova: u64,
    /// What may be done to it.
    pub access: Access,
}

/// What is to be changed of a region.
pub struct RegionChange<'a, D: Driver> {
    /// Other memory: start, length and address, as in [`UserRegion`]. Its rights are those below,
    /// or what they were.
    pub memory: Option<UserRegion>,
    /// Another protection domain.
    pub pd: Option<&'a Pd<D>>,
    /// Other rights.
    pub access: Option<Access>,
}

impl<D: Driver> New<'_, kind::Mr, D> {
    /// Tells the core the region's keys.
    pub fn set_keys(&mut self, lkey: u32, rkey: u32) {
        // SAFETY: The core is creating the region and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe {
            (*self.as_raw()).lkey = lkey;
            (*self.as_raw()).rkey = rkey;
        }
    }

    /// Tells the core which addresses the region has. It knows those of a process's memory without being
    /// told, but not those of a DMA buffer.
    pub(crate) fn set_range(&mut self, iova: u64, length: u64) {
        // SAFETY: As in `set_keys`.
        unsafe {
            (*self.as_raw()).iova = iova;
            (*self.as_raw()).length = length;
        }
    }
}

impl<D: Driver> Object<kind::Mr, D> {
    // Which domain it is in is not to be asked: a process moves it to another one at any time, and
    // may end the one before.

    /// Its local key now. Kernel users of fast registration change the last byte.
    pub fn lkey(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).lkey).read_volatile() }
    }

    /// Its remote key now.
    pub fn rkey(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).rkey).read_volatile() }
    }

    /// The address of its first byte, as the kernel mapped it last.
    pub fn iova(&self) -> u64 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).iova).read_volatile() }
    }

    /// Its bytes, as the kernel mapped it last.
    pub fn length(&self) -> u64 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).length).read_volatile() }
    }

    /// Its page size, as the kernel mapped it last.
    pub fn page_size(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).page_size).read_volatile() }
    }
}

impl<D: Driver> New<'_, kind::Mw, D> {
    /// Tells the core the window's key.
    pub fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: The core is creating the window and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).rkey = rkey }
    }
}

impl<D: Driver> Object<kind::Mw, D> {
    /// Its protection domain.
    pub fn pd(&self) -> &Pd<D> {
        // SAFETY: The domain was set before the driver made the window; the core counts the window
        // as a user of it until the window is gone.
        unsafe { Object::from_raw((*self.as_raw()).pd) }
    }

    /// Its key.
    pub fn rkey(&self) -> u32 {
        // SAFETY: `&self` is a window that is not freed; a bind may change the key meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).rkey).read_volatile() }
    }
}
