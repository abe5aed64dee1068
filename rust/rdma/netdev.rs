// SPDX-License-Identifier: GPL-2.0

//! The network interface beside a RoCE port.

use super::{Device, Driver, GidOps, Ops};
use crate::bindings;
pub use crate::kernel_ext::rtnl::Rtnl;
use core::ptr::{self, NonNull};
use kernel::device;
use kernel::error::from_err_ptr;
use kernel::prelude::*;
use kernel::sync::{rcu, Arc};
use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

/// A counted reference to a network interface.
///
/// Not to be kept: an interface is not freed while there is a reference to it, and who removes it waits for that.
///
/// # Invariants
///
/// The pointer is a network interface, of which this value owns one count.
pub struct Netdev(NonNull<bindings::net_device>);

// SAFETY: A count of an interface may be given back by any task.
unsafe impl Send for Netdev {}
// SAFETY: What is offered here only reads, under a count: fields that are single words or do not
// change, and `dev_addr`, whose bytes change one by one, so that an address may be found half changed.
unsafe impl Sync for Netdev {}

impl Netdev {
    /// Takes a count over.
    ///
    /// # Safety
    ///
    /// `raw` must be null or an interface with a count that passes to the result.
    pub(super) unsafe fn from_raw(raw: *mut bindings::net_device) -> Option<Self> {
        // INVARIANT: The caller passes its count on.
        NonNull::new(raw).map(Self)
    }

    /// The interface that a notifier call is about.
    ///
    /// # Safety
    ///
    /// `info` must be what a network device notifier was called with, during the call.
    pub(super) unsafe fn from_notifier(info: *mut c_void) -> Option<Self> {
        // SAFETY: The caller vouches for the information of a notifier call, which begins so for all
        // events, and during which the interface stays.
        unsafe { Self::get((*info.cast::<bindings::netdev_notifier_info>()).dev) }
    }

    pub(super) fn as_raw(&self) -> *mut bindings::net_device {
        self.0.as_ptr()
    }

    /// Takes a count of an interface that is valid, if it is one.
    ///
    /// # Safety
    ///
    /// `raw` must be null or a valid interface.
    unsafe fn get(raw: *mut bindings::net_device) -> Option<Self> {
        let netdev = NonNull::new(raw)?;
        // SAFETY: The caller vouches that the interface stays until this returns.
        unsafe { bindings::dev_hold(netdev.as_ptr()) };
        // INVARIANT: The count was taken just now.
        Some(Self(netdev))
    }

    /// The device on the bus that it is the interface of; null where there is none.
    fn parent(&self) -> *mut bindings::device {
        // SAFETY: By the type invariant we own a count, which keeps the interface; its parent is set before
        // it is registered, by `SET_NETDEV_DEV`.
        unsafe { bindings::netdev_parent(self.as_raw()) }
    }

    /// Whether it is registered, which it is until RTNL is given back then: it may be kept by a count for long after
    /// that.
    fn is_registered(&self, _rtnl: &Rtnl) -> bool {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        unsafe { bindings::netdev_is_registered(self.as_raw()) }
    }

    /// Whether it is the interface of a device on some bus, and none that was stacked on one or made up.
    /// Anybody may make those, of any address: ipvlan, macvlan and MACsec take even the permanent one of
    /// what they are stacked on. A failover interface has the parent of the interface it hides, and is made
    /// before it.
    pub fn is_hardware(&self) -> bool {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        let failover = unsafe { bindings::netif_is_failover(self.as_raw()) };
        !self.parent().is_null() && !failover
    }

    /// Whether it is registered, and the interface of `dev`: a device on the bus, or one on a bus that such a device has
    /// of its own, as virtio's.
    pub fn is_of(&self, rtnl: &Rtnl, dev: &device::Device) -> bool {
        if !self.is_registered(rtnl) {
            // It may have let go of its parent, of which a count of the interface is none.
            return false;
        }
        let parent = self.parent();
        if parent.is_null() {
            return false;
        }
        // The interface keeps its parent, and nothing above that: pointers are compared, not followed.
        // SAFETY: The interface was found registered, and stays so with RTNL held: what is registered keeps its parent,
        // which `netdev_unregister_kobject` lets go of after it is not registered any more.
        let above = unsafe { (*parent).parent };
        // `device::Device` is a transparent wrapper of `struct device`.
        [parent, above].contains(&ptr::from_ref(dev).cast_mut().cast())
    }

    /// Whether this is an Ethernet interface.
    pub fn is_ethernet(&self) -> bool {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        unsafe { bindings::netdev_type(self.as_raw()) == bindings::ARPHRD_ETHER as u16 }
    }

    /// Whether this is an Ethernet interface with that permanent address.
    pub fn has_permanent_mac(&self, mac: &[u8; 6]) -> bool {
        let raw = self.as_raw();
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        let length = unsafe { bindings::netdev_addr_len(raw) };
        if !self.is_ethernet() || usize::from(length) != mac.len() {
            return false;
        }
        // SAFETY: The count keeps the interface. It has room for `MAX_ADDR_LEN` bytes of permanent address, which is
        // more than six, and keeps it from before it is registered.
        let permanent = unsafe { bindings::netdev_perm_addr(raw).cast::<[u8; 6]>().read() };
        permanent == *mac
    }

    /// The largest packet.
    pub fn mtu(&self) -> u32 {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        unsafe { bindings::netdev_mtu(self.as_raw()) }
    }

    /// Whether it is up and has a carrier.
    pub fn is_up(&self) -> bool {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        let running = unsafe { bindings::netif_running(self.as_raw()) };
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        running && unsafe { bindings::netif_carrier_ok(self.as_raw()) }
    }

    /// Its address now. Where RTNL is not held it may be part old and part new; `ChangeAddr` tells
    /// when it is new.
    pub fn mac(&self) -> [u8; 6] {
        // SAFETY: By the type invariant we own a count, which keeps the interface and its address, for
        // which it has room for `MAX_ADDR_LEN` bytes, more than six. They may be written meanwhile, hence
        // the volatile read.
        unsafe {
            let address = bindings::netdev_dev_addr(self.as_raw());
            address.cast::<[u8; 6]>().read_volatile()
        }
    }

    /// Its network namespace, to compare it with others.
    fn namespace(&self) -> *mut bindings::net {
        // SAFETY: By the type invariant we own a count, which keeps the interface.
        unsafe { bindings::dev_net(self.as_raw()) }
    }
}

impl PartialEq for Netdev {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Drop for Netdev {
    fn drop(&mut self) {
        // SAFETY: By the type invariant we own a count, which is given back here and nowhere else.
        unsafe { bindings::dev_put(self.as_raw()) }
    }
}

/// Ports that share their links with network interfaces: each is paired with its interface whenever that
/// is there, in the namespace of the device.
pub trait NetdevOps: GidOps {
    /// Whether an interface that is registered is the one that a port shares its link with.
    ///
    /// Anybody's interfaces are asked about, also those that somebody made up or stacked on another
    /// ([`Netdev::is_hardware`]).
    fn shares_link(dev: &Device<Self>, rtnl: &Rtnl, port: u32, netdev: &Netdev) -> bool;

    /// Something happened to the interface that a port is paired with, or was until now ([`NetdevEvent::Unregister`]). Under
    /// RTNL.
    fn netdev_event(_dev: &Device<Self>, _port: u32, _netdev: &Netdev, _event: NetdevEvent) {}
}

impl<D: NetdevOps> Ops<D> {
    /// Has each port paired with the network interface that it shares its link with.
    pub const fn with_netdev(mut self) -> Self {
        self.pairing = Some(PortPairing {
            shares_link: D::shares_link,
            event: D::netdev_event,
        });
        self
    }
}

/// What a driver says of the interfaces of its ports.
pub(super) struct PortPairing<D: Driver> {
    shares_link: fn(&Device<D>, &Rtnl, u32, &Netdev) -> bool,
    event: fn(&Device<D>, u32, &Netdev, NetdevEvent),
}

c_enum! {
    /// What happened to a network interface.
    pub enum NetdevEvent {
        /// It came into being.
        Register = netdev_cmd_NETDEV_REGISTER,
        /// It is about to go.
        Unregister = netdev_cmd_NETDEV_UNREGISTER,
        /// It was brought up.
        Up = netdev_cmd_NETDEV_UP,
        /// It was brought down.
        Down = netdev_cmd_NETDEV_DOWN,
        /// Its state, such as the carrier, changed.
        Change = netdev_cmd_NETDEV_CHANGE,
        /// Its MTU changed.
        ChangeMtu = netdev_cmd_NETDEV_CHANGEMTU,
        /// Its MAC address changed.
        ChangeAddr = netdev_cmd_NETDEV_CHANGEADDR,
    }
}

/// What is to be done about the pairing of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairing {
    /// Nothing.
    Keep,
    /// The interface becomes the port's.
    Pair,
    /// The port has no interface any more.
    Part,
}

impl Pairing {
    /// What `event` of an interface means for a port. `own` says whether it is the interface that
    /// the port shares its link with; `paired`, what the port is paired with: this interface
    /// (`Some(true)`), another one or none.
    ///
    /// A pairing ends when its own interface goes, and by nothing else.
    pub(super) fn after(event: NetdevEvent, own: bool, paired: Option<bool>) -> Self {
        match (event, paired) {
            (NetdevEvent::Register | NetdevEvent::Up, None) if own => Self::Pair,
            (NetdevEvent::Unregister, Some(true)) => Self::Part,
            _ => Self::Keep,
        }
    }
}

impl<D: NetdevOps> Device<D> {
    /// Whether the current process may have raw packets of a port, beyond the capability that it needs
    /// ([`Self::has_raw_cap`]): they are those of the interface that the port is paired with. `ENODEV` where there is none, `EPERM`
    /// where it is not in the network namespace of the process.
    pub fn check_raw_port(&self, port: u32) -> Result {
        let netdev = self.netdev(port).ok_or(ENODEV)?;
        // SAFETY: What is given is that of the current task, or null once that ends, and is compared, not followed.
        let current = unsafe { bindings::current_net() };
        match netdev.namespace() == current {
            true => Ok(()),
            false => Err(EPERM),
        }
    }
}

impl<D: Driver> Device<D> {
    /// Whether an interface is in the network namespace of the device.
    fn shares_namespace(&self, netdev: &Netdev) -> bool {
        netdev.namespace() == self.namespace()
    }

    /// The network namespace of the device, to compare it with others.
    fn namespace(&self) -> *mut bindings::net {
        // SAFETY: `&self` keeps the device.
        unsafe { bindings::rdma_dev_net(self.as_raw()) }
    }

    /// Whether an interface that is registered is the one that a port shares its link with.
    fn is_own(&self, rtnl: &Rtnl, port: u32, netdev: &Netdev) -> bool {
        let Some(pairing) = &Ops::<D>::of().pairing else {
            return false;
        };
        self.shares_namespace(netdev) && (pairing.shares_link)(self, rtnl, port, netdev)
    }

    /// Tells the driver what happened to the interface that a port is paired with.
    pub(super) fn tell_netdev_event(&self, port: u32, netdev: &Netdev, event: NetdevEvent) {
        if let Some(pairing) = &Ops::<D>::of().pairing {
            (pairing.event)(self, port, netdev, event);
        }
    }

    /// Acts for a port on what happened to an interface; returns what became of the pairing.
    ///
    /// Nobody is told anew of the addresses of what is stacked on an interface that is paired: the
    /// caller has them looked for, with [`GidScan`].
    pub(super) fn follow_netdev(
        &self,
        rtnl: &Rtnl,
        port: u32,
        netdev: &Netdev,
        event: NetdevEvent,
    ) -> Pairing {
        let paired = self.netdev(port).map(|paired| paired == *netdev);
        // Not of one that goes: that is told again after its parent has gone.
        let comes = matches!(event, NetdevEvent::Register | NetdevEvent::Up);
        let own = comes && self.is_own(rtnl, port, netdev);
        let pairing = Pairing::after(event, own, paired);
        // Only running out of memory makes pairing fail; the next event tries again.
        let followed = match pairing {
            Pairing::Keep => paired == Some(true),
            Pairing::Pair => self.set_netdev(rtnl, port, Some(netdev)).is_ok(),
            Pairing::Part => self.set_netdev(rtnl, port, None).is_ok(),
        };
        if followed {
            self.tell_netdev_event(port, netdev, event);
        }
        pairing
    }

    /// Whether GIDs of an interface belong to a port: it is the one that the port is paired with,
    /// or above that.
    ///
    /// # Safety
    ///
    /// `netdev` must be null or a valid interface.
    pub(super) unsafe fn takes_gids_of(
        &self,
        port: u32,
        netdev: *mut bindings::net_device,
    ) -> bool {
        // Ports that are not paired by this module are the driver's matter.
        if Ops::<D>::of().pairing.is_none() {
            return true;
        }
        let Some(paired) = self.netdev(port) else {
            return false;
        };
        if paired.as_raw() == netdev {
            return true;
        }
        let _rcu = rcu::read_lock();
        // SAFETY: The count of `paired` keeps it, the RCU read lock the list of what is above it; `netdev`
        // is compared, not followed.
        unsafe { bindings::netdev_has_upper_dev_all_rcu(paired.as_raw(), netdev) }
    }
}

/// A port of a device that has a GID table.
///
/// The core makes it before it enables the device, and keeps it until the device is freed.
///
/// # Invariants
///
/// `port` is one of the device's, and the core has made its GID table.
pub(super) struct PortGids<'a, D: Driver> {
    dev: &'a Device<D>,
    port: u32,
}

impl<'a, D: Driver> PortGids<'a, D> {
    /// # Safety
    ///
    /// The device must be registered, or being enabled, and `port` one of its ports.
    pub(super) unsafe fn assume_there(dev: &'a Device<D>, port: u32) -> Self {
        // INVARIANT: `setup_device` has made it before, and the caller vouches for that.
        Self { dev, port }
    }

    /// The interface that entry `index` belongs to, if it is set. `EINVAL` beyond the end of the table.
    fn netdev_of(&self, index: c_int) -> Result<Option<Netdev>> {
        // SAFETY: By the type invariant the port has a table, which stays until the device is freed. The entry
        // is counted until it is put below.
        let attr = unsafe { bindings::rdma_get_gid_attr(self.dev.as_raw(), self.port, index) };
        let attr = match from_err_ptr(attr.cast_mut()) {
            Ok(attr) => attr,
            Err(error) if error == EINVAL => return Err(EINVAL),
            Err(_) => return Ok(None),
        };
        let rcu = rcu::read_lock();
        // SAFETY: The entry is counted, and the RCU read lock is held.
        let netdev = from_err_ptr(unsafe { bindings::rdma_read_gid_attr_ndev_rcu(attr) });
        // SAFETY: An interface that an entry names is not freed before all who hold the RCU read
        // lock have given it up.
        let netdev = netdev.map_or(None, |netdev| unsafe { Netdev::get(netdev) });
        drop(rcu);
        // SAFETY: The count was taken above, and the entry is not used afterwards.
        unsafe { bindings::rdma_put_gid_attr(attr) };
        Ok(netdev)
    }

    /// Removes all GIDs of the port, which is not paired any more: those of the interface that it
    /// was paired with, and of what is stacked on that.
    pub(super) fn clear(&self) {
        // Takes the lock of the table, and removes nothing, as every GID of this kind of port is
        // that of an interface: who adds one now was asked whether it is the port's before that was
        // unpaired, and is seen below, or is refused.
        // SAFETY: By the type invariant the port has a table; no interface is looked at.
        unsafe {
            bindings::roce_del_all_netdev_gids(self.dev.as_raw(), self.port, ptr::null_mut())
        };
        for index in 0.. {
            match self.netdev_of(index) {
                // SAFETY: By the type invariant the port has a table. The interface is kept by its count.
                Ok(Some(netdev)) => unsafe {
                    bindings::roce_del_all_netdev_gids(
                        self.dev.as_raw(),
                        self.port,
                        netdev.as_raw(),
                    );
                },
                Ok(None) => {}
                Err(_) => return,
            }
        }
    }

    /// Looks for the GIDs of the interface that the port is paired with, and of what is stacked on that. Takes RTNL.
    fn rescan(&self) {
        // SAFETY: By the type invariant the port has a table.
        unsafe { bindings::rdma_roce_rescan_port(self.dev.as_raw(), self.port) };
    }
}

/// A device that is being enabled in its network namespace.
///
/// # Invariants
///
/// The namespace stays: it is the initial one, or who moves the device has a count of it, and `rdma_dev_exit_net`
/// moves devices out of one that goes. The ports have GID tables.
pub(super) struct Enabling<'a, D: Driver>(&'a Device<D>);

impl<'a, D: Driver> Enabling<'a, D> {
    /// # Safety
    ///
    /// To be called in the device's `enable_driver`, and used before that returns.
    pub(super) unsafe fn assume(dev: &'a Device<D>) -> Self {
        // INVARIANT: `enable_device_and_get` is called with a namespace that stays, by those who have set the device up.
        Self(dev)
    }

    /// The interface that a port shares its link with, if there is one.
    fn find_own(&self, rtnl: &Rtnl, port: u32) -> Option<Netdev> {
        // SAFETY: By the type invariant the namespace stays. With RTNL held an interface in its list stays there.
        let mut next = unsafe { Netdev::get(bindings::first_net_device(self.0.namespace())) };
        while let Some(netdev) = next {
            if self.0.is_own(rtnl, port, &netdev) {
                return Some(netdev);
            }
            // SAFETY: With RTNL held both this interface and the next one stay in the list.
            next = unsafe { Netdev::get(bindings::next_net_device(netdev.as_raw())) };
        }
        None
    }

    /// Pairs the ports anew where the device has come to another network namespace. Takes RTNL.
    pub(super) fn follow_namespace(&self) {
        self.0.ports().for_each(|port| self.follow_by(port));
    }

    fn follow_by(&self, port: u32) {
        let dev = self.0;
        // SAFETY: By the type invariant the device is being enabled; the port is one of its ports.
        let gids = unsafe { PortGids::assume_there(dev, port) };
        let moved = Rtnl::with(|rtnl| {
            let paired = dev.netdev(port);
            if paired
                .as_ref()
                .is_some_and(|paired| dev.shares_namespace(paired))
            {
                return false;
            }
            // The core removes GIDs when interfaces go, and none went. Unpaired first: from then on
            // none is taken.
            let _ = dev.set_netdev(rtnl, port, None);
            drop(paired);
            gids.clear();
            let own = self.find_own(rtnl, port);
            let set = dev.set_netdev(rtnl, port, own.as_ref());
            match own {
                Some(own) if set.is_ok() => {
                    dev.tell_netdev_event(port, &own, NetdevEvent::Register);
                    true
                }
                _ => false,
            }
        });
        if moved {
            // No event told the core of the addresses of an interface that was there before.
            gids.rescan();
        }
    }
}

/// Looks for the GIDs of ports that were paired: the core adds those of an interface that comes, not
/// those of what was stacked on it before.
///
/// # Invariants
///
/// The device is registered whenever the work item runs.
#[pin_data]
pub(super) struct GidScan<D: Driver> {
    dev: NonNull<Device<D>>,
    #[pin]
    work: Work<GidScan<D>>,
}

// SAFETY: The pointer is used as a `&Device<D>` only, which is `Sync`.
unsafe impl<D: Driver> Send for GidScan<D> {}
// SAFETY: The pointer is used as a `&Device<D>` only, which is `Sync`.
unsafe impl<D: Driver> Sync for GidScan<D> {}

impl_has_work! {
    impl{D: Driver} HasWork<Self> for GidScan<D> { self.work }
}

impl<D: Driver> GidScan<D> {
    /// # Safety
    ///
    /// The result must be queued only while `dev` is registered, on a queue that is flushed before
    /// it is not.
    pub(super) unsafe fn new(dev: NonNull<Device<D>>) -> Result<Arc<Self>> {
        // INVARIANT: The caller vouches for the device.
        let scan = pin_init!(Self {
            dev,
            work <- new_work!("rdma::GidScan"),
        });
        Arc::pin_init(scan, GFP_KERNEL)
    }
}

impl<D: Driver> WorkItem for GidScan<D> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: By the type invariant the device is registered, so that it is valid.
        let dev = unsafe { this.dev.as_ref() };
        for port in dev.ports() {
            // A worker does not hold RTNL, which this takes.
            // SAFETY: By the type invariant the device is registered; the port is one of its ports.
            unsafe { PortGids::assume_there(dev, port) }.rescan();
        }
    }
}
