// SPDX-License-Identifier: GPL-2.0

//! How a device is made, made known to the core, and taken back.

use super::{Device, Driver, FirstSaid, Offloads, Private, STOPPED};
use crate::bindings;
use crate::net::{MacAddress, Napi, Ops};
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use kernel::device;
use kernel::devres::Devres;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};

/// What a device is like.
pub struct Config<'a> {
    /// Its name; `%d` stands for the first number that is free.
    pub name: &'a CStr,
    /// Its address; `None`: one is made up.
    pub mac: Option<MacAddress>,
    /// The MTU it begins with.
    pub mtu: u32,
    /// The largest that it may be given.
    pub max_mtu: u32,
    /// By how many queues it sends; at least one.
    pub tx_queues: u16,
    /// By how many it receives; at least one.
    pub rx_queues: u16,
    /// What it does for who sends and receives. All can be turned off, and are on.
    pub offloads: Offloads,
    /// Most bytes of a frame that is to be cut into segments; zero: as many as there may be.
    pub most_to_segment: u32,
    /// The device on the bus that it is the interface of.
    pub parent: Option<&'a device::Device<device::Bound>>,
}

/// A device that the core does not know yet.
pub struct Unregistered<D: Driver>(Allocated<D>);

/// # Invariants
///
/// The device is ours, not registered, and its private part is initialised.
struct Allocated<D: Driver>(NonNull<bindings::net_device>, PhantomData<D>);

// SAFETY: A device belongs to no task, and what is in it is `Send` and `Sync`.
unsafe impl<D: Driver> Send for Allocated<D> {}
// SAFETY: Nothing is done with a shared one.
unsafe impl<D: Driver> Sync for Allocated<D> {}

impl<D: Driver> Drop for Allocated<D> {
    fn drop(&mut self) {
        let raw = self.0.as_ptr();
        // SAFETY: By the type invariant the device is initialised.
        for napi in unsafe { Device::<D>::from_raw(raw) }.napis() {
            // SAFETY: It was added by `new`, and is disabled, as the device is not up. It stays for a grace period, below.
            unsafe { bindings::__netif_napi_del(napi.as_raw()) };
        }
        // One for all of them.
        // SAFETY: May be called by any task that may sleep, as unregistering a device does.
        unsafe { bindings::synchronize_net() };
        // SAFETY: By the type invariant the private part is initialised and the device ours: nobody uses it, as it
        // is not registered. Neither is used afterwards.
        unsafe {
            ptr::drop_in_place(bindings::netdev_priv(raw).cast::<Private<D>>());
            bindings::free_netdev(raw);
        }
    }
}

impl<D: Driver> Unregistered<D> {
    /// Makes a device, with a [`Napi`] for each of `queues`. Sleeps.
    pub fn new<E>(
        config: &Config<'_>,
        queues: KVec<D::Queue>,
        data: impl PinInit<D, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let ops = Ops::<D>::of();
        if ops.poll.is_none() && !queues.is_empty()
            || config.tx_queues == 0
            || config.rx_queues == 0
            || config.name.to_bytes().len() >= bindings::IFNAMSIZ as usize
        {
            return Err(EINVAL);
        }
        let mut napis = KVec::with_capacity(queues.len(), GFP_KERNEL)?;
        for queue in queues {
            napis.push(Napi::new(queue), GFP_KERNEL)?;
        }
        const { assert!(align_of::<Private<D>>() <= bindings::NETDEV_ALIGN as usize) };
        // SAFETY: The name is a C string, which is copied; `ether_setup` is meant for this.
        let raw = unsafe {
            bindings::alloc_netdev_mqs(
                size_of::<Private<D>>() as c_int,
                config.name.as_char_ptr(),
                bindings::NET_NAME_ENUM as u8,
                Some(bindings::ether_setup),
                config.tx_queues.into(),
                config.rx_queues.into(),
            )
        };
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        let private = pin_init!(Private {
            napis,
            started: Atomic::new(STOPPED),
            ethtool_count: FirstSaid::new(),
            rss_entries: FirstSaid::new(),
            managed: Atomic::new(0),
            data <- data,
        }? E);
        // SAFETY: The private part was allocated for this type and is not initialised; it does not move, as nothing
        // moves a device.
        let initialised = unsafe {
            private.__pinned_init(bindings::netdev_priv(raw.as_ptr()).cast::<Private<D>>())
        };
        if let Err(err) = initialised {
            // SAFETY: Made above, and known to nobody.
            unsafe { bindings::free_netdev(raw.as_ptr()) };
            return Err(err.into());
        }
        // SAFETY: The device is ours. The tables are static.
        unsafe { bindings::netdev_set_ops(raw.as_ptr(), &ops.netdev, &ops.ethtool) };
        let (mtu, max_mtu) = (config.mtu, config.max_mtu);
        // SAFETY: The device is ours, and nobody else knows it yet.
        unsafe {
            bindings::netdev_set_priv_flags(raw.as_ptr());
            bindings::netdev_set_mtu_range(raw.as_ptr(), mtu, bindings::ETH_MIN_MTU, max_mtu);
        }
        let of_vlans = config.offloads.0 & Offloads::OF_VLANS.0;
        // SAFETY: The device is ours, and nobody else knows it yet.
        unsafe {
            bindings::netdev_set_offloads(raw.as_ptr(), config.offloads.0, of_vlans);
            if config.most_to_segment != 0 {
                bindings::netif_set_tso_max_size(raw.as_ptr(), config.most_to_segment);
            }
        }
        if ops.filters_vlans {
            // SAFETY: The device is ours, and nobody else knows it yet.
            unsafe { bindings::netdev_set_filters_vlans(raw.as_ptr()) };
        }
        match &config.mac {
            // SAFETY: The device is ours, and was allocated with room for the six bytes of an address.
            Some(mac) => unsafe { bindings::eth_hw_addr_set(raw.as_ptr(), mac.0.as_ptr()) },
            // SAFETY: The device is ours, and was allocated with room for an address.
            None => unsafe { bindings::eth_hw_addr_random(raw.as_ptr()) },
        }
        if let Some(parent) = config.parent {
            let parent = ptr::from_ref(parent).cast_mut().cast::<bindings::device>();
            // SAFETY: The device is ours. `device::Device` is a transparent wrapper of `struct device`, of which the
            // core takes a count.
            unsafe { bindings::netdev_set_parent(raw.as_ptr(), parent) };
        }
        // INVARIANT: Initialised above.
        let device = Allocated(raw, PhantomData);
        // SAFETY: Its private part was initialised above.
        for napi in unsafe { Device::<D>::from_raw(raw.as_ptr()) }.napis() {
            // SAFETY: Where it is does not change, and it is deleted before the device is freed. Not null, as was
            // checked above, where there are any.
            unsafe { bindings::netif_napi_add(raw.as_ptr(), napi.as_raw(), ops.poll) };
        }
        Ok(Self(device))
    }

    /// Makes the device known, without a carrier. Sleeps, and takes RTNL.
    pub fn register(self) -> Result<Registration<D>> {
        let raw = self.0 .0.as_ptr();
        // SAFETY: By the type invariant the device is ours and initialised. Where it fails nobody knows it when the
        // function returns, as it waits for that.
        unsafe {
            bindings::netif_carrier_off(raw);
            to_result(bindings::register_netdev(raw))?;
        }
        // INVARIANT: Registered just now.
        Ok(Registration(self.0))
    }
}

impl<D: Driver> Unregistered<D> {
    /// Makes the device known as [`Self::register`] does, for no longer than `parent` is bound, which it was made for:
    /// `EINVAL` where that is another one.
    pub fn register_managed(
        self,
        parent: &device::Device<device::Bound>,
    ) -> Result<Devres<Registration<D>>> {
        let raw = self.0 .0.as_ptr();
        // SAFETY: By the type invariant the device is ours.
        let own = unsafe { bindings::netdev_parent(raw) };
        if !ptr::eq(own, ptr::from_ref(parent).cast::<bindings::device>()) {
            return Err(EINVAL);
        }
        // SAFETY: By the type invariant the device is initialised; nobody has a reference to it.
        let device = unsafe { Device::<D>::from_raw(raw) };
        device.private().managed.store(1, Relaxed);
        // Where this fails it is not registered any more, while the parent is bound.
        Devres::new(parent, self.register()?)
    }
}

/// A device that the core knows, until this is dropped: that waits for all that is under way.
///
/// As with every registration of the kernel that is a value, a module that forgets this must not be unloaded. One that is
/// [managed](Unregistered::register_managed) is not the driver's to forget.
///
/// # Invariants
///
/// The device is registered.
pub struct Registration<D: Driver>(Allocated<D>);

impl<D: Driver> Deref for Registration<D> {
    type Target = Device<D>;

    fn deref(&self) -> &Device<D> {
        // SAFETY: The device is freed when `self` is dropped.
        unsafe { Device::from_raw(self.0 .0.as_ptr()) }
    }
}

impl<D: Driver> Drop for Registration<D> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the device is registered. It is brought down if it is up; when this returns
        // nobody has a count of it, and no callback runs. Then it is as `Allocated` says.
        unsafe { bindings::unregister_netdev(self.0 .0.as_ptr()) };
    }
}
