// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Commands of the kernel's `ioctl` interface that libibverbs has no function for.

use core::ffi::c_int;
use core::mem::size_of;
use core::ptr;

use crate::private::RDMA_DRIVER_UNKNOWN;
use crate::sys::*;

/// The number of the kernel's ioctl: read and write, of a header.
const RDMA_VERBS_IOCTL: libc::c_ulong =
    (3 << 30) | ((size_of::<ib_uverbs_ioctl_hdr>() as libc::c_ulong) << 16) | (0x1b << 8) | 1;

/// A command with `N` attributes.
#[repr(C)]
pub(crate) struct Command<const N: usize> {
    header: ib_uverbs_ioctl_hdr,
    attrs: [ib_uverbs_attr; N],
}

/// An attribute of `length` bytes: up to eight are passed in `data`, of more it is the address.
fn attr(id: u32, length: usize, data: u64) -> ib_uverbs_attr {
    let mut attr = ib_uverbs_attr {
        attr_id: id as u16,
        len: length as u16,
        flags: UVERBS_ATTR_F_MANDATORY as u16,
        ..Default::default()
    };
    attr.__bindgen_anon_1.data = data;
    attr
}

/// The handle of an object, or room for that of a new one.
pub(crate) fn handle(id: u32, handle: u32) -> ib_uverbs_attr {
    attr(id, 0, handle.into())
}

/// A number that the kernel reads, of `length` bytes.
pub(crate) fn number(id: u32, length: usize, value: u64) -> ib_uverbs_attr {
    attr(id, length, value)
}

/// Room for an answer; `answer` has to stay where it is until the command was carried out.
pub(crate) fn answer<T>(id: u32, answer: &mut T) -> ib_uverbs_attr {
    attr(id, size_of::<T>(), ptr::from_mut(answer) as u64)
}

impl<const N: usize> Command<N> {
    /// A command: a method of an object, and its attributes.
    pub(crate) fn new(object: u32, method: u32, attrs: [ib_uverbs_attr; N]) -> Self {
        Self {
            header: ib_uverbs_ioctl_hdr {
                length: size_of::<Self>() as u16,
                object_id: object as u16,
                method_id: method as u16,
                num_attrs: N as u16,
                driver_id: RDMA_DRIVER_UNKNOWN,
                ..Default::default()
            },
            attrs,
        }
    }

    /// Has the kernel carry it out, on an open command file.
    ///
    /// # Safety
    ///
    /// What its attributes point to is valid for what the kernel does with it.
    pub(crate) unsafe fn execute(&mut self, cmd_fd: c_int) -> Result<(), c_int> {
        // SAFETY: by the caller; the command is laid out as the kernel expects.
        let result = unsafe { libc::ioctl(cmd_fd, RDMA_VERBS_IOCTL, ptr::from_mut(self)) };
        if result != 0 {
            return Err(std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO));
        }
        Ok(())
    }

    /// The number that the kernel left in an attribute.
    pub(crate) fn result(&self, index: usize) -> u64 {
        // SAFETY: all members of the union are plain numbers of up to its size, and all of it is
        // initialised.
        unsafe { self.attrs[index].__bindgen_anon_1.data }
    }
}
