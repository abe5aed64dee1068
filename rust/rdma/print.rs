// SPDX-License-Identifier: GPL-2.0

//! What is said of an RDMA device: the log has its driver, its parent and its name before it.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

use super::{Device, Driver};
use crate::bindings;
pub use crate::kernel_ext::print::Level;
use core::ptr;
use kernel::fmt;
use kernel::prelude::*;

/// Prints a message about a device.
///
/// # Safety
///
/// `device` must be valid.
pub(super) unsafe fn print(
    device: *const bindings::ib_device,
    level: Level,
    message: fmt::Arguments<'_>,
) {
    let print = match level {
        Level::Error => bindings::ibdev_err,
        Level::Warning => bindings::ibdev_warn,
        Level::Info => bindings::ibdev_info,
    };
    let message = ptr::from_ref(&message).cast::<c_void>();
    // SAFETY: The caller vouches for the device. `%pA` takes a pointer to `fmt::Arguments`, which the last argument is.
    unsafe { print(device, c"%pA".as_char_ptr(), message) };
}

impl<D: Driver> Device<D> {
    /// Prints a message about it, see [`ibdev_err`], [`ibdev_warn`] and [`ibdev_info`].
    #[cold]
    pub fn printk(&self, level: Level, message: fmt::Arguments<'_>) {
        // SAFETY: The reference keeps the device.
        unsafe { print(self.as_raw(), level, message) };
    }
}

/// Prints an error about a [`Device`], or about the device of a `consumer::Lease`.
#[macro_export]
macro_rules! ibdev_err {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::rdma::Level::Error, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use ibdev_err;

/// Prints a warning about a [`Device`], or about the device of a `consumer::Lease`.
#[macro_export]
macro_rules! ibdev_warn {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::rdma::Level::Warning, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use ibdev_warn;

/// Prints what is worth knowing about a [`Device`], or about the device of a `consumer::Lease`.
#[macro_export]
macro_rules! ibdev_info {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::rdma::Level::Info, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use ibdev_info;
