// SPDX-License-Identifier: GPL-2.0

//! The tables of operations that the core calls.
//!
//! What is between an operation of the core and the driver stands in the file of what it is about, and so does the
//! function that puts it into its table. The core calls them with a device of the table's driver, which is registered, or
//! being registered or unregistered, so that it stays until they return.

use super::Driver;
use crate::bindings;

/// The operations that a driver offers: those of [`Driver`] ([`Ops::new`]), and with each `with_...` those of one of
/// the optional traits.
///
/// ```ignore
/// const OPS: Ops<Self> = Ops::new().with_napi().with_statistics();
/// ```
///
/// What is not offered is absent from the core's tables, as it would be from those of a driver in C.
pub struct Ops<D: Driver> {
    pub(super) netdev: bindings::net_device_ops,
    pub(super) ethtool: bindings::ethtool_ops,
    /// Set where the driver has queues that are polled.
    pub(super) poll: Option<super::napi::PollFunction>,
    /// Whether the device knows which VLANs are wanted.
    pub(super) filters_vlans: bool,
    pub(super) _driver: core::marker::PhantomData<D>,
}

impl<D: Driver> Ops<D> {
    /// Those that every driver has.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self {
            netdev: pin_init::zeroed(),
            ethtool: pin_init::zeroed(),
            poll: None,
            filters_vlans: false,
            _driver: core::marker::PhantomData,
        }
        .with_driver()
    }

    /// Those of `D`.
    pub(super) const fn of() -> &'static Self {
        const { &D::OPS }
    }
}
