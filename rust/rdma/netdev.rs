// SPDX-License-Identifier: GPL-2.0

//! The network interface beside a RoCE port.

use crate::bindings;
use core::ptr::NonNull;
use kernel::prelude::*;

/// A counted reference to a network interface.
///
/// Not to be kept: an interface does not go while there is a reference to it.
///
/// # Invariants
///
/// The pointer is a network interface, of which this value owns one count.
pub struct Netdev(NonNull<bindings::net_device>);

// SAFETY: References to an interface may be dropped by any task.
unsafe impl Send for Netdev {}
// SAFETY: What is offered here only reads.
unsafe impl Sync for Netdev {}

impl Netdev {
    /// Takes a count over.
    ///
    /// # Safety
    ///
    /// `raw` must be null or an interface with a count that passes to the result.
    pub(super) unsafe fn from_raw(raw: *mut bindings::net_device) -> Option<Self> {
        // INVARIANT: By the contract of this function.
        NonNull::new(raw).map(Self)
    }

    /// The interface that a notifier call is about.
    ///
    /// # Safety
    ///
    /// `info` must be what a network device notifier was called with, during the call.
    pub(super) unsafe fn from_notifier(info: *mut c_void) -> Option<Self> {
        // SAFETY: By the contract of this function.
        let netdev = NonNull::new(unsafe { bindings::rdma_notifier_netdev(info) })?;
        // SAFETY: The interface is valid during the call.
        unsafe { bindings::rdma_netdev_hold(netdev.as_ptr()) };
        // INVARIANT: The count was taken just now.
        Some(Self(netdev))
    }

    /// The Ethernet interface with that permanent address. Takes RTNL.
    pub fn find_by_mac(mac: &[u8; 6]) -> Option<Self> {
        // SAFETY: The function reads six bytes; the result is null or has a count for us.
        unsafe { Self::from_raw(bindings::rdma_netdev_find_by_mac(mac.as_ptr())) }
    }

    pub(super) fn as_raw(&self) -> *mut bindings::net_device {
        self.0.as_ptr()
    }

    /// Whether this is an Ethernet interface with that permanent address.
    pub fn has_permanent_mac(&self, mac: &[u8; 6]) -> bool {
        // SAFETY: The interface is valid; the function reads six bytes.
        unsafe { bindings::rdma_netdev_matches(self.as_raw(), mac.as_ptr()) }
    }

    /// The largest packet.
    pub fn mtu(&self) -> u32 {
        // SAFETY: The interface is valid.
        unsafe { bindings::rdma_netdev_mtu(self.as_raw()) }
    }

    /// Whether it is up and has a carrier.
    pub fn is_up(&self) -> bool {
        // SAFETY: The interface is valid.
        unsafe { bindings::rdma_netdev_is_up(self.as_raw()) }
    }

    /// Its address now.
    pub fn mac(&self) -> [u8; 6] {
        let mut mac = [0; 6];
        // SAFETY: The interface is valid; the function writes six bytes.
        unsafe { bindings::rdma_netdev_mac(self.as_raw(), mac.as_mut_ptr()) };
        mac
    }
}

impl Drop for Netdev {
    fn drop(&mut self) {
        // SAFETY: The count is ours by the type invariant.
        unsafe { bindings::rdma_netdev_put(self.as_raw()) }
    }
}
