// SPDX-License-Identifier: GPL-2.0

//! What is said of an interface: the log has its driver, its parent and its name before it, as they are then.
//!
//! C header: [`include/net/net_debug.h`](srctree/include/net/net_debug.h)

use super::{Device, Driver};
use crate::bindings;
pub use crate::kernel_ext::print::Level;
use core::ptr;
use kernel::fmt;
use kernel::prelude::*;

impl<D: Driver> Device<D> {
    /// Prints a message about it, see [`netdev_err`], [`netdev_warn`] and [`netdev_info`].
    #[cold]
    pub fn printk(&self, level: Level, message: fmt::Arguments<'_>) {
        let print = match level {
            Level::Error => bindings::netdev_err,
            Level::Warning => bindings::netdev_warn,
            Level::Info => bindings::netdev_info,
        };
        let message = ptr::from_ref(&message).cast::<c_void>();
        // SAFETY: The reference keeps the device. `%pA` takes a pointer to `fmt::Arguments`, which the last argument is.
        unsafe { print(self.as_raw(), c"%pA".as_char_ptr(), message) };
    }
}

/// Prints an error about a [`Device`].
#[macro_export]
macro_rules! netdev_err {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::net::Level::Error, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use netdev_err;

/// Prints a warning about a [`Device`].
#[macro_export]
macro_rules! netdev_warn {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::net::Level::Warning, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use netdev_warn;

/// Prints what is worth knowing about a [`Device`].
#[macro_export]
macro_rules! netdev_info {
    ($dev:expr, $($message:tt)*) => {
        $dev.printk($crate::net::Level::Info, ::kernel::prelude::fmt!($($message)*))
    };
}
pub use netdev_info;
