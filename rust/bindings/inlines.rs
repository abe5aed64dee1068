// SPDX-License-Identifier: GPL-2.0

//! What C would have as static inlines of the RDMA headers: fields that bindgen shows as parts of
//! unions, and exported functions together with the constants that they are called with.

// What is generated beside this is allowed more.
#![warn(
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unsafe_op_in_unsafe_fn
)]

use super::*;
use core::ptr;
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};

/// Allocates a device of `size` bytes, all zeroes, in the initial network namespace; null where
/// there is no memory.
///
/// # Safety
///
/// `size` bytes must have room for an `ib_device`, which they begin with.
pub unsafe fn rdma_alloc_device(size: usize) -> *mut ib_device {
    // SAFETY: The caller vouches for the size; the initial namespace is a static of the kernel.
    unsafe { _ib_alloc_device(size, ptr::addr_of_mut!(init_net)) }
}

/// Where an RDMA device has its `dev.parent`.
///
/// # Safety
///
/// `ibdev` must be an `ib_device`.
unsafe fn parent_of(ibdev: *mut ib_device) -> *mut *mut device {
    // SAFETY: The caller vouches for the device; both views of the union begin with a `device`.
    unsafe {
        let dev = ptr::addr_of_mut!((*ibdev).__bindgen_anon_1).cast::<device>();
        ptr::addr_of_mut!((*dev).parent)
    }
}

/// The parent of an RDMA device.
///
/// # Safety
///
/// `ibdev` must be a valid device, whose parent nobody sets meanwhile.
pub unsafe fn rdma_device_parent(ibdev: *mut ib_device) -> *mut device {
    // SAFETY: The caller vouches for the device and that nobody writes the field.
    unsafe { *parent_of(ibdev) }
}

/// Sets the parent of an RDMA device.
///
/// # Safety
///
/// `ibdev` must be a device that nobody else uses yet, and `parent` outlive it.
pub unsafe fn rdma_device_set_parent(ibdev: *mut ib_device, parent: *mut device) {
    // SAFETY: The caller vouches that the device is its own.
    unsafe { *parent_of(ibdev) = parent };
}

/// What the driver is told by, of a command.
///
/// # Safety
///
/// `attrs` must be the attributes of a command.
pub unsafe fn rdma_driver_udata(attrs: *mut uverbs_attr_bundle) -> *mut ib_udata {
    // SAFETY: The caller vouches for the attributes, of which this is a part.
    unsafe { ptr::addr_of_mut!((*attrs).__bindgen_anon_1.__bindgen_anon_1.driver_udata) }
}

/// Writes a version of firmware as the core wants it.
///
/// # Safety
///
/// `text` must have room for `IB_FW_VERSION_NAME_MAX` bytes.
pub unsafe fn rdma_format_version(text: *mut ffi::c_char, major: u16, minor: u16, patch: u16) {
    let [major, minor, patch] = [major, minor, patch].map(ffi::c_uint::from);
    let format = c"%u.%u.%u".as_ptr().cast();
    // SAFETY: The caller vouches for the room; the format takes three numbers of that type.
    unsafe {
        snprintf(
            text,
            IB_FW_VERSION_NAME_MAX as usize,
            format,
            major,
            minor,
            patch,
        )
    };
}

/// For a context that is refused, which nobody sees yet. Where it was asked for by `ioctl`, the core
/// (as of 7.2) frees it without giving back its reference to the task, so that whoever is refused
/// stays in memory for good. Where it was asked for by `write`, the core gives back what is there.
///
/// # Safety
///
/// `ucontext` must be a context that `alloc_ucontext` of a driver is about to refuse.
pub unsafe fn rdma_forget_task(ucontext: *mut ib_ucontext) {
    // SAFETY: The caller vouches for the context, which is its own. The core has counted the task when
    // it set the field.
    unsafe {
        let task = (*ucontext).res.task;
        (*ucontext).res.task = ptr::null_mut();
        if !task.is_null() {
            put_task_struct(task);
        }
    }
}

/// Maps `entry`, pages of a device from `address` on, to `vma`.
///
/// # Safety
///
/// `vma` must be being mapped by the process of `ucontext`, by an offset that `entry` was found for,
/// which the caller holds; and the pages must be the device's for as long as `entry` is.
pub unsafe fn rdma_user_mmap_pages(
    ucontext: *mut ib_ucontext,
    vma: *mut vm_area_struct,
    address: u64,
    write_combine: bool,
    entry: *mut rdma_user_mmap_entry,
) -> ffi::c_int {
    // SAFETY: The caller vouches for the mapping, which is its own until it is mapped.
    let prot = unsafe { (*vma).vm_page_prot };
    // SAFETY: Both only compute with their argument.
    let prot = unsafe {
        if write_combine {
            pgprot_writecombine(prot)
        } else {
            pgprot_noncached(prot)
        }
    };
    let page = (address >> PAGE_SHIFT) as usize;
    // SAFETY: The caller vouches for context, mapping, entry and pages.
    unsafe {
        let length = (*entry).npages * PAGE_SIZE;
        rdma_user_mmap_io(ucontext, vma, page, length, prot, entry)
    }
}

/// Opens the nest for details of a driver; null where there is no room.
///
/// # Safety
///
/// `msg` must be a message that the core is writing an entry to.
pub unsafe fn rdma_nl_driver_start(msg: *mut sk_buff) -> *mut nlattr {
    let nest = rdma_nldev_attr_RDMA_NLDEV_ATTR_DRIVER as ffi::c_int;
    // SAFETY: The caller vouches for the message.
    unsafe { nla_nest_start(msg, nest) }
}

/// Opens the nest for counters; null where there is no room.
///
/// # Safety
///
/// `msg` must be a message that the core is writing an entry to.
pub unsafe fn rdma_nl_stat_start(msg: *mut sk_buff) -> *mut nlattr {
    let nest = rdma_nldev_attr_RDMA_NLDEV_ATTR_STAT_HWCOUNTERS as ffi::c_int;
    // SAFETY: The caller vouches for the message.
    unsafe { nla_nest_start(msg, nest) }
}

/// Closes the nest.
///
/// # Safety
///
/// `nest` must be the nest of `msg` that was opened last.
pub unsafe fn rdma_nl_driver_end(msg: *mut sk_buff, nest: *mut nlattr) {
    // SAFETY: The caller vouches for message and nest.
    unsafe { nla_nest_end(msg, nest) };
}

/// Takes the nest back, with all that is in it.
///
/// # Safety
///
/// `nest` must be the nest of `msg` that was opened last.
pub unsafe fn rdma_nl_driver_cancel(msg: *mut sk_buff, nest: *mut nlattr) {
    // SAFETY: The caller vouches for message and nest.
    unsafe { nla_nest_cancel(msg, nest) };
}
