// SPDX-License-Identifier: GPL-2.0

//! What devices can do for kernel users beyond what the core has names for.
//!
//! The core leaves some numbers to drivers: flags of queue pairs, opcodes. What one of them means by such
//! a number need not be what another means, and none of the numbers is here. A driver that has something
//! of the kind describes it as an [`Extension`], in a file that its users have, too. A device says in bits
//! of `kernel_cap_flags` which of its driver's extensions it has ([`DeviceAttr::driver_caps`]), and
//! [`super::ulp`] uses none of the numbers on a device that has not said so. All of them are for kernel
//! users alone: the core takes none from processes.
//!
//! [`DeviceAttr::driver_caps`]: super::DeviceAttr::driver_caps

use super::{device::attributes::CAPS_OF_CORE, Access, QpCreateFlags};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use kernel::prelude::*;

/// The numbers that something of a driver's is asked for by; none of the core's.
///
/// Made in a constant: a number that is the core's does not compile there. Elsewhere it would be a panic of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverNumbers {
    create_flags: QpCreateFlags,
    access: Access,
    opcode: Option<u32>,
}

impl DriverNumbers {
    /// None of them.
    pub const NONE: Self = Self {
        create_flags: QpCreateFlags::from_raw(0),
        access: Access::from_raw(0),
        opcode: None,
    };

    /// Queue pairs are made for it by these flags.
    pub const fn with_create_flags(mut self, flags: QpCreateFlags) -> Self {
        assert!(QpCreateFlags::OF_DRIVERS.contains(flags));
        self.create_flags = flags;
        self
    }

    /// Regions are registered for it, by work request, with these rights beside others.
    pub const fn with_access(mut self, access: Access) -> Self {
        assert!(!Access::OF_CORE.intersects(access));
        self.access = access;
        self
    }

    /// Requests of that opcode are an `ib_reg_wr`: they register a region, and do something besides.
    pub const fn with_opcode(mut self, opcode: u32) -> Self {
        assert!(opcode >= bindings::ib_wr_opcode_IB_WR_RESERVED1);
        assert!(opcode <= bindings::ib_wr_opcode_IB_WR_RESERVED10);
        self.opcode = Some(opcode);
        self
    }
}

/// Something that a driver can do for kernel users: how its devices say that they have it, and in what
/// numbers it is asked for.
///
/// # Invariants
///
/// Devices of which the core knows all of `capability` are of a driver that means by `numbers` what who made
/// this does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    capability: u64,
    numbers: DriverNumbers,
}

impl Extension {
    /// What devices have whose [`DeviceAttr::driver_caps`](super::DeviceAttr::driver_caps) have
    /// `capability`. As [`DriverNumbers`], for a constant: it panics where that is the core's, or nothing.
    ///
    /// # Safety
    ///
    /// No device but of the driver that the extension is of may say that it has `capability`. That
    /// driver must know the `numbers`, and demand no more of memory for them than of other requests: that what
    /// a request names stays until it is complete.
    pub const unsafe fn new(capability: u64, numbers: DriverNumbers) -> Self {
        assert!(
            capability != 0 && capability & CAPS_OF_CORE == 0,
            "the core's, or none"
        );
        // INVARIANT: The caller vouches for the driver.
        Self {
            capability,
            numbers,
        }
    }

    /// How a device says that it has it.
    pub const fn capability(&self) -> u64 {
        self.capability
    }

    /// The flags of queue pairs that are made for it.
    pub const fn create_flags(&self) -> QpCreateFlags {
        self.numbers.create_flags
    }

    /// The rights of regions that are registered for it.
    pub const fn access(&self) -> Access {
        self.numbers.access
    }

    /// The opcode of its requests, if there are such.
    pub const fn opcode(&self) -> Option<u32> {
        self.numbers.opcode
    }

    /// Whether a device has it that says so much of itself.
    pub(super) fn is_among(&self, kernel_cap_flags: u64) -> bool {
        kernel_cap_flags & self.capability == self.capability
    }

    /// The flags of a queue pair that is to have all of them; `EOPNOTSUPP` where the device has not.
    pub(super) fn flags_for(extensions: &[Self], kernel_cap_flags: u64) -> Result<QpCreateFlags> {
        let none = QpCreateFlags::default();
        extensions.iter().try_fold(none, |flags, extension| {
            if extension.is_among(kernel_cap_flags) {
                Ok(flags | extension.create_flags())
            } else {
                Err(eopnotsupp())
            }
        })
    }

    /// Checks rights for what a queue pair with these extensions registers: the core's, and of others only
    /// theirs; else `EOPNOTSUPP`.
    pub(super) fn check_access(extensions: &[Self], access: Access) -> Result {
        let known = extensions.iter().fold(Access::OF_CORE, |known, extension| {
            known | extension.access()
        });
        if known.contains(access) {
            Ok(())
        } else {
            Err(eopnotsupp())
        }
    }
}
