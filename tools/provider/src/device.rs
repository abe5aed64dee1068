// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Which devices this provider answers for.

use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;

use ferrite_abi::{PCI_DEVICE_ID, PCI_VENDOR_ID, UVERBS_ABI_VERSION};

use crate::private::*;
use crate::sys::ibv_device;

static MATCH_TABLE: [verbs_match_ent; 2] = [
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        key: verbs_match_key { driver_id: 0 },
        vendor: PCI_VENDOR_ID,
        device: PCI_DEVICE_ID,
        kind: VERBS_MATCH_PCI,
    },
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        key: verbs_match_key { driver_id: 0 },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_SENTINEL,
    },
];

static DEVICE_OPS: verbs_device_ops = verbs_device_ops {
    name: c"ferrite".as_ptr(),
    match_min_abi_version: UVERBS_ABI_VERSION,
    match_max_abi_version: UVERBS_ABI_VERSION,
    match_table: MATCH_TABLE.as_ptr(),
    static_providers: ptr::null(),
    match_device: None,
    alloc_context: Some(crate::context::alloc_context),
    import_context: Some(crate::context::import_context),
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
};

/// Whether a device is one that this provider answers for.
///
/// # Safety
///
/// `device` is a device of libibverbs, of any provider.
pub(crate) unsafe fn is_ours(device: *mut ibv_device) -> bool {
    // SAFETY: libibverbs makes each `ibv_device` the first field of a `verbs_device`.
    unsafe { ptr::eq((*device.cast::<verbs_device>()).ops, &DEVICE_OPS) }
}

/// What libibverbs knows this provider by.
#[cfg(test)]
pub(crate) fn ops() -> *const verbs_device_ops {
    &DEVICE_OPS
}

unsafe extern "C" fn alloc_device(_sysfs: *mut verbs_sysfs_dev) -> *mut verbs_device {
    // SAFETY: `calloc` has no preconditions. libibverbs fills the structure in, and checks for
    // null.
    unsafe { libc::calloc(1, size_of::<verbs_device>()).cast() }
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: libibverbs gives back what `alloc_device` allocated, once.
    unsafe { libc::free(device.cast::<c_void>()) };
}

extern "C" fn register() {
    // SAFETY: `DEVICE_OPS` is complete and lives as long as the library, which libibverbs never
    // unloads.
    unsafe { verbs_register_driver_34(&DEVICE_OPS) };
}

/// Runs [`register`] when the library is loaded.
#[used]
#[link_section = ".init_array"]
static REGISTER: extern "C" fn() = register;
