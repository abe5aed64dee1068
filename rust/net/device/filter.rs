// SPDX-License-Identifier: GPL-2.0

//! Which frames a device is to receive.

use super::{Device, Driver};
use crate::bindings;
use crate::net::{MacAddress, Ops, Rtnl};
use core::marker::PhantomData;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// A device that knows which frames are wanted.
pub trait RxModeOps: Driver {
    /// Other frames are wanted. May sleep. Where it fails it is called again after a while.
    fn set_rx_mode(dev: &Device<Self>, rtnl: &Rtnl, mode: &RxMode<'_>) -> Result;
}

/// A device that knows which VLANs are wanted.
pub trait VlanOps: Driver {
    /// Frames of a VLAN are wanted. May sleep.
    fn add_vlan(dev: &Device<Self>, rtnl: &Rtnl, vlan: u16) -> Result;

    /// They are not any more. May sleep.
    fn remove_vlan(dev: &Device<Self>, rtnl: &Rtnl, vlan: u16);
}

/// Which frames are wanted.
pub struct RxMode<'a> {
    /// All.
    pub promiscuous: bool,
    /// All multicast frames.
    pub all_multicast: bool,
    unicast: Addresses<'a>,
    multicast: Addresses<'a>,
}

impl<'a> RxMode<'a> {
    /// Those to these addresses, besides the device's own.
    pub fn unicast(&self) -> Addresses<'a> {
        self.unicast
    }

    /// Those to these addresses.
    pub fn multicast(&self) -> Addresses<'a> {
        self.multicast
    }
}

/// Addresses in a list of the core.
///
/// # Invariants
///
/// `next` is in the list that begins at `head`, which for `'a` is valid and does not change.
#[derive(Clone, Copy)]
pub struct Addresses<'a> {
    head: *const bindings::list_head,
    next: *const bindings::list_head,
    _list: PhantomData<&'a ()>,
}

impl Addresses<'_> {
    /// # Safety
    ///
    /// `list` must be valid and not change for as long as the result exists.
    unsafe fn new(list: *const bindings::netdev_hw_addr_list) -> Self {
        // SAFETY: The caller vouches for the list.
        let head = unsafe { ptr::addr_of!((*list).list) };
        Self {
            head,
            // SAFETY: The caller vouches for the list.
            next: unsafe { (*head).next },
            _list: PhantomData,
        }
    }
}

impl Iterator for Addresses<'_> {
    type Item = MacAddress;

    fn next(&mut self) -> Option<MacAddress> {
        if self.next == self.head {
            return None;
        }
        let entry = self.next.cast::<bindings::netdev_hw_addr>();
        const { assert!(core::mem::offset_of!(bindings::netdev_hw_addr, list) == 0) };
        // SAFETY: By the type invariant it is in the list, of which each entry is the start of an address with room
        // for more than six bytes.
        unsafe {
            self.next = (*self.next).next;
            Some(MacAddress((*entry).addr.as_ptr().cast::<[u8; 6]>().read()))
        }
    }
}

impl<D: RxModeOps> Ops<D> {
    /// Has the driver told which frames are wanted.
    pub const fn with_rx_mode(mut self) -> Self {
        self.netdev.ndo_set_rx_mode_async = Some(set_rx_mode::<D>);
        self
    }
}

impl<D: VlanOps> Ops<D> {
    /// Has the driver told which VLANs are wanted.
    pub const fn with_vlans(mut self) -> Self {
        self.netdev.ndo_vlan_rx_add_vid = Some(add_vid::<D>);
        self.netdev.ndo_vlan_rx_kill_vid = Some(kill_vid::<D>);
        self.filters_vlans = true;
        self
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held and copies of its lists.
unsafe extern "C" fn set_rx_mode<D: RxModeOps>(
    dev: *mut bindings::net_device,
    unicast: *mut bindings::netdev_hw_addr_list,
    multicast: *mut bindings::netdev_hw_addr_list,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the device.
    let flags = unsafe { bindings::netdev_flags(dev) };
    // SAFETY: The caller vouches for the lists, which are copies that nobody else has.
    let (unicast, multicast) = unsafe { (Addresses::new(unicast), Addresses::new(multicast)) };
    let mode = RxMode {
        promiscuous: flags & bindings::net_device_flags_IFF_PROMISC != 0,
        all_multicast: flags & bindings::net_device_flags_IFF_ALLMULTI != 0,
        unicast,
        multicast,
    };
    from_result(|| D::set_rx_mode(device, &rtnl, &mode).map(|()| 0))
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held.
unsafe extern "C" fn add_vid<D: VlanOps>(
    dev: *mut bindings::net_device,
    _protocol: bindings::__be16,
    vlan: u16,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| D::add_vlan(device, &rtnl, vlan).map(|()| 0))
}

/// # Safety
///
/// As for [`add_vid`].
unsafe extern "C" fn kill_vid<D: VlanOps>(
    dev: *mut bindings::net_device,
    _protocol: bindings::__be16,
    vlan: u16,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    D::remove_vlan(device, &rtnl, vlan);
    0
}
