// SPDX-License-Identifier: GPL-2.0

//! What users set of a device that says what it is: address and MTU.

use super::{Device, Driver};
use crate::bindings;
use crate::net::{MacAddress, Ops, Rtnl};
use core::ptr;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;

/// A device whose address can be changed, also while it is up.
pub trait MacOps: Driver {
    /// It is to have another address, which is a valid one. May sleep.
    fn set_mac(dev: &Device<Self>, rtnl: &Rtnl, mac: MacAddress) -> Result;
}

/// A device whose MTU can be changed.
pub trait MtuOps: Driver {
    /// Another MTU, within the limits of the device. May sleep.
    fn change_mtu(dev: &Device<Self>, rtnl: &Rtnl, mtu: u32) -> Result;
}

impl<D: Driver> Device<D> {
    /// Its address now. Where RTNL is not held it may be part old and part new.
    pub fn mac(&self) -> MacAddress {
        // SAFETY: The reference keeps the device and its address, for which it has room for `MAX_ADDR_LEN` bytes.
        // They may be written meanwhile, hence the volatile read.
        MacAddress(unsafe {
            bindings::netdev_dev_addr(self.as_raw())
                .cast::<[u8; 6]>()
                .read_volatile()
        })
    }

    /// Its MTU now.
    pub fn mtu(&self) -> u32 {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netdev_mtu(self.as_raw()) }
    }

    pub(super) fn is_registered(&self, _rtnl: &Rtnl) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netdev_is_registered(self.as_raw()) }
    }

    /// Gives it another address, as a user would; the driver is asked first. `ENODEV` if it is about to go.
    pub fn change_mac(&self, rtnl: &Rtnl, mac: MacAddress) -> Result {
        if !self.is_registered(rtnl) {
            return Err(ENODEV);
        }
        let mut address: bindings::__kernel_sockaddr_storage = pin_init::zeroed();
        let bytes = ptr::from_mut(&mut address).cast::<u8>();
        // SAFETY: An address begins behind the two bytes of its family, with room for more than six. The device is
        // registered and RTNL is held, as the function demands.
        to_result(unsafe {
            bytes.cast::<u16>().write(bindings::ARPHRD_ETHER as u16);
            ptr::copy_nonoverlapping(mac.0.as_ptr(), bytes.add(2), mac.0.len());
            bindings::dev_set_mac_address(self.as_raw(), &mut address, ptr::null_mut())
        })
    }

    /// Gives it another MTU, as a user would; the driver is asked first. `ENODEV` if it is about to go.
    pub fn request_mtu(&self, rtnl: &Rtnl, mtu: u32) -> Result {
        if !self.is_registered(rtnl) {
            return Err(ENODEV);
        }
        let mtu = c_int::try_from(mtu).map_err(|_| EINVAL)?;
        // SAFETY: The device is registered and RTNL is held, as the function demands.
        to_result(unsafe { bindings::dev_set_mtu(self.as_raw(), mtu) })
    }

    /// Whether its address is one that was made up for it, and nobody has asked for.
    pub fn has_random_mac(&self, _rtnl: &Rtnl) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netdev_has_random_addr(self.as_raw()) }
    }

    /// From now on its MTU is at most this. What it is stays.
    pub fn set_max_mtu(&self, _rtnl: &Rtnl, mtu: u32) {
        // SAFETY: The reference keeps the device; RTNL is what changes of the field are made under.
        unsafe { bindings::netdev_set_max_mtu(self.as_raw(), mtu) }
    }
}

impl<D: MacOps> Ops<D> {
    /// Has the driver told of other addresses; without, the address does not change.
    pub const fn with_mac(mut self) -> Self {
        self.netdev.ndo_set_mac_address = Some(set_mac_address::<D>);
        self
    }
}

impl<D: MtuOps> Ops<D> {
    /// Has the driver told of other MTUs; without, any within the limits is set.
    pub const fn with_mtu(mut self) -> Self {
        self.netdev.ndo_change_mtu = Some(change_mtu::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held and an address of its length.
unsafe extern "C" fn set_mac_address<D: MacOps>(
    dev: *mut bindings::net_device,
    address: *mut c_void,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| {
        // SAFETY: The caller vouches for both; this looks whether it is valid.
        to_result(unsafe { bindings::eth_prepare_mac_addr_change(dev, address) })?;
        // SAFETY: The address is behind the two bytes of its family, and has six.
        let mac = unsafe { address.cast::<u8>().add(2).cast::<[u8; 6]>().read() };
        D::set_mac(device, &rtnl, MacAddress(mac))?;
        // SAFETY: The caller vouches for the device, which RTNL is held for, and for the address.
        unsafe { bindings::eth_commit_mac_addr_change(dev, address) };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held and an MTU within its limits.
unsafe extern "C" fn change_mtu<D: MtuOps>(dev: *mut bindings::net_device, mtu: c_int) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| {
        let mtu = u32::try_from(mtu).map_err(|_| EINVAL)?;
        D::change_mtu(device, &rtnl, mtu)?;
        // SAFETY: The caller vouches for the device, and that it may be changed.
        unsafe { bindings::netdev_commit_mtu(dev, mtu) };
        Ok(0)
    })
}
