// SPDX-License-Identifier: GPL-2.0

//! Counters that a device keeps per port.

use super::{Device, Driver, Ops};
use crate::bindings;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;
use kernel::str::CString;

/// Counters of ports; [`super::DeviceInfo::counter_names`] says what they are.
pub trait CounterOps: Driver {
    /// Reads the counters of a port, in the order of their names. May sleep.
    fn read_counters(dev: &Device<Self>, port: u32, values: &mut [u64]) -> Result;
}

impl<D: CounterOps> Ops<D> {
    /// Offers counters of ports.
    pub const fn with_counters(mut self) -> Self {
        self.raw.alloc_hw_port_stats = Some(alloc_hw_port_stats::<D>);
        self.raw.get_hw_stats = Some(get_hw_stats::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn alloc_hw_port_stats<D: CounterOps>(
    dev: *mut bindings::ib_device,
    _port: u32,
) -> *mut bindings::rdma_hw_stats {
    // SAFETY: The device is a `Device<D>`, as it has this table. `ib_register_device` calls this, from
    // `ib_setup_port_attrs` and `rdma_counter_init`, while the device is initialised.
    unsafe { Device::<D>::from_raw(dev) }
        .counters()
        .alloc_stats()
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with what `alloc_hw_port_stats`
/// returned.
unsafe extern "C" fn get_hw_stats<D: CounterOps>(
    dev: *mut bindings::ib_device,
    stats: *mut bindings::rdma_hw_stats,
    port: u32,
    _index: c_int,
) -> c_int {
    from_result(|| {
        // SAFETY: The device is a `Device<D>`, as it has this table. Who reads counters, in sysfs or by
        // netlink, does so before `ib_unregister_device` has taken both away, which is before it calls
        // `dealloc_driver`.
        let dev = unsafe { Device::from_raw(dev) };
        // SAFETY: Nobody else uses the values until this returns: the core holds the lock of `stats`, or
        // has just made them and shows them to nobody yet (`setup_hw_port_stats`).
        let values = unsafe { values(stats) };
        let read = D::read_counters(dev, port, values);
        // SAFETY: The core keeps `stats` until this returns, and writes the time only after
        // that, with the lock held or before anybody else has it.
        let is_first = unsafe { (*stats).timestamp } == 0;
        if read.is_err() && is_first {
            // The core reads them once while it registers the device, and leaks them if that
            // fails. They are zero until somebody asks.
            values.fill(0);
        } else {
            read?;
        }
        Ok(values.len() as c_int)
    })
}

/// Descriptions of counters in the form that the core keeps pointers to.
///
/// # Invariants
///
/// The names that `descs` point to are in `names`.
pub(super) struct Descriptions {
    descs: KVec<bindings::rdma_stat_desc>,
    _names: KVec<CString>,
}

impl Descriptions {
    pub(super) fn new(names: &[&str]) -> Result<Self> {
        let mut descs = KVec::with_capacity(names.len(), GFP_KERNEL)?;
        let mut owned = KVec::with_capacity(names.len(), GFP_KERNEL)?;
        for name in names {
            let name = CString::try_from_fmt(fmt!("{name}"))?;
            let mut desc: bindings::rdma_stat_desc = pin_init::zeroed();
            // The characters stay where they are when the owner moves.
            desc.name = name.as_char_ptr();
            descs.push(desc, GFP_KERNEL)?;
            owned.push(name, GFP_KERNEL)?;
        }
        // INVARIANT: Each name was pushed.
        Ok(Self {
            descs,
            _names: owned,
        })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.descs.len()
    }

    /// A structure for values of the counters, which the core frees.
    pub(super) fn alloc_stats(&self) -> *mut bindings::rdma_hw_stats {
        // The core reads them again at most this often.
        const LIFESPAN_MS: c_ulong = 10;
        // SAFETY: The descriptions outlive the structure: they go with the device's data, after
        // which the core only frees it.
        unsafe {
            bindings::rdma_alloc_hw_stats_struct(
                self.descs.as_ptr(),
                self.descs.len() as c_int,
                LIFESPAN_MS,
            )
        }
    }
}

/// How many values there are, and where the first is.
///
/// # Safety
///
/// `stats` must be of [`Descriptions::alloc_stats`], and not freed.
pub(super) unsafe fn value_places(stats: *mut bindings::rdma_hw_stats) -> (usize, *mut u64) {
    // SAFETY: The caller vouches for the structure; the number does not change after it was made.
    unsafe {
        (
            (*stats).num_counters.max(0) as usize,
            ptr::addr_of_mut!((*stats).value).cast::<u64>(),
        )
    }
}

/// The values to be filled in.
///
/// # Safety
///
/// `stats` must be valid and not in use elsewhere for `'a`.
pub(super) unsafe fn values<'a>(stats: *mut bindings::rdma_hw_stats) -> &'a mut [u64] {
    // SAFETY: The caller vouches that the structure is ours for `'a`.
    let (count, first) = unsafe { value_places(stats) };
    // SAFETY: `rdma_alloc_hw_stats_struct` has made room for `num_counters` values behind the structure,
    // zeroed, and the caller vouches that they are ours for `'a`.
    unsafe { core::slice::from_raw_parts_mut(first, count) }
}
