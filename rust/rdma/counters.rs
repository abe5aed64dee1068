// SPDX-License-Identifier: GPL-2.0

//! Counters that a device keeps per port.

use crate::bindings;
use core::ptr;
use kernel::prelude::*;
use kernel::str::CString;

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

/// The values to be filled in.
///
/// # Safety
///
/// `stats` must be valid and not in use elsewhere for `'a`.
pub(super) unsafe fn values<'a>(stats: *mut bindings::rdma_hw_stats) -> &'a mut [u64] {
    // SAFETY: The caller vouches that the structure is ours for `'a`; `rdma_alloc_hw_stats_struct`
    // has made room for `num_counters` values behind it.
    unsafe {
        let count = (*stats).num_counters.max(0) as usize;
        let first = ptr::addr_of_mut!((*stats).value).cast::<u64>();
        core::slice::from_raw_parts_mut(first, count)
    }
}
