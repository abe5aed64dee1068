// SPDX-License-Identifier: GPL-2.0

//! RDMA devices: what they are, making them known to the core, their ports.

use super::counters::Descriptions;
use super::method::Definitions;
use super::netdev::{GidScan, Pairing};
use super::{netdev, ops, Driver, Extensions, Netdev, NetdevEvent, OnDemandAttr, Rtnl};
use crate::bindings;
use crate::kernel_ext::workqueue::OwnedQueue;
use core::cell::UnsafeCell;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::Deref;
use core::ptr::{self, NonNull};
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::types::Opaque;
use kernel::{device, ThisModule};

/// An RDMA device with the driver's data of it, to which it dereferences.
///
/// # Invariants
///
/// `beside`, `definitions`, `data` and `counters` are initialised wherever a reference exists, except inside
/// [`Unregistered::new`].
#[repr(C)]
pub struct Device<D: Driver> {
    raw: Opaque<bindings::ib_device>,
    initialised: UnsafeCell<bool>,
    /// [`DeviceInfo::beside`].
    beside: UnsafeCell<Option<Beside>>,
    counters: UnsafeCell<MaybeUninit<Descriptions>>,
    /// What the core reads of the driver's methods while the device is registered.
    definitions: UnsafeCell<MaybeUninit<Definitions>>,
    data: UnsafeCell<MaybeUninit<D>>,
}

// SAFETY: The core's part is used from any task, under locks of its own; `D` is `Send` and `Sync`.
unsafe impl<D: Driver> Send for Device<D> {}
// SAFETY: The core's part is used from any task, under locks of its own; `D` is `Send` and `Sync`.
unsafe impl<D: Driver> Sync for Device<D> {}

impl<D: Driver> Device<D> {
    const SIZE: usize = {
        // The core casts its structure to ours.
        assert!(core::mem::offset_of!(Self, raw) == 0);
        assert!(align_of::<Self>() <= align_of::<u64>());
        size_of::<Self>()
    };

    /// # Safety
    ///
    /// `raw` must be the first member of a `Device<D>` that is initialised and stays so for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: The caller vouches for a `Device<D>` that is initialised for `'a`; the core's
        // part is first in it.
        unsafe { &*raw.cast() }
    }

    /// The core's structure.
    pub(super) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.get()
    }

    /// What the port's counters are.
    pub(super) fn counters(&self) -> &Descriptions {
        // SAFETY: By the type invariant the counters are initialised; they are dropped with the
        // data, in `dealloc_driver`.
        unsafe { (*self.counters.get()).assume_init_ref() }
    }

    /// The name, empty before the device is registered.
    pub fn name(&self) -> DeviceName {
        // SAFETY: `&self` keeps the device.
        unsafe { DeviceName::read(self.as_raw()) }
    }

    /// The device on the bus, which does the DMA.
    ///
    /// Operations run while the device is registered, which is within the time that its parent is
    /// bound.
    pub fn parent(&self) -> &device::Device<device::Bound> {
        // SAFETY: The parent was set by `Unregistered::new`, whose caller keeps it bound for as long
        // as there is a device to get a reference of.
        unsafe { device::Device::from_raw(bindings::rdma_device_parent(self.as_raw())) }
    }

    /// Whether moderation is to adapt to the traffic (`rdma dev set DEV adaptive-moderation`). The core
    /// sees to that for each completion queue that it polls, by [`Driver::modify_cq`].
    pub fn adaptive_moderation(&self) -> bool {
        // SAFETY: `&self` keeps the device; the bit may be changed meanwhile, and is read as it was or
        // as it is.
        unsafe { bindings::ib_device::use_cq_dim_raw(self.as_raw()) != 0 }
    }

    /// Which network interface shares the link of port 1, if one does.
    pub(super) fn beside(&self) -> Option<Beside> {
        // SAFETY: Written by `Unregistered::new` before there was a reference, and never since.
        unsafe { *self.beside.get() }
    }

    /// The network interface that a port is paired with.
    pub fn netdev(&self, port: u32) -> Option<Netdev> {
        // SAFETY: The device is valid; the result is null or a reference for us.
        unsafe { Netdev::from_raw(bindings::ib_device_get_netdev(self.as_raw(), port)) }
    }

    /// Pairs a port with a network interface, or with none.
    pub fn set_netdev(&self, port: u32, netdev: Option<&Netdev>) -> Result {
        let netdev = netdev.map_or(ptr::null_mut(), Netdev::as_raw);
        // SAFETY: The device is valid, and the interface too; the core takes its own reference.
        to_result(unsafe { bindings::ib_device_set_netdev(self.as_raw(), netdev, port) })
    }

    /// What the paired network interface says about a port.
    ///
    /// Takes RTNL, so it sleeps.
    pub fn ethernet_port(&self, port: u32) -> EthernetPort {
        let mut speed = 0;
        let mut width = 0;
        let Some(netdev) = self.netdev(port) else {
            return EthernetPort::default();
        };
        // SAFETY: `&self` keeps the device, and port data stays until it is freed; the others are
        // locals.
        let known =
            unsafe { bindings::ib_get_eth_speed(self.as_raw(), port, &mut speed, &mut width) == 0 };
        EthernetPort {
            up: netdev.is_up(),
            mtu: netdev.mtu(),
            speed: if known {
                speed
            } else {
                bindings::ib_port_speed_IB_SPEED_SDR as u16
            },
            width: if known {
                width
            } else {
                bindings::ib_port_width_IB_WIDTH_1X as u8
            },
        }
    }

    /// Tells all consumers that a port changed state. May be called in interrupt context.
    pub fn report_port(&self, port: u32, active: bool) {
        let event = if active {
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE
        } else {
            bindings::ib_event_type_IB_EVENT_PORT_ERR
        };
        self.report(event, port);
    }

    /// Tells all consumers that the device failed. May be called in interrupt context.
    pub fn report_fatal(&self) {
        self.report(bindings::ib_event_type_IB_EVENT_DEVICE_FATAL, 1);
    }

    fn report(&self, kind: bindings::ib_event_type, port: u32) {
        let mut event: bindings::ib_event = pin_init::zeroed();
        event.device = self.as_raw();
        event.event = kind;
        // SAFETY: The event is a local and all views of its union are plain data; the core copies
        // it.
        unsafe {
            *event.element.port_num.as_mut() = port;
            bindings::ib_dispatch_event(&event);
        }
    }
}

/// Whether a name is one: whoever may rename a device chose it, and the core takes some for a pattern.
pub(super) fn is_plain(name: &CStr) -> bool {
    !name.is_empty() && !name.to_bytes().contains(&b'%')
}

/// The name of a device, as it was when it was asked for: it can be renamed.
#[derive(Clone, Copy)]
pub struct DeviceName([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl DeviceName {
    /// # Safety
    ///
    /// `dev` must be a valid device.
    pub(super) unsafe fn read(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        let last = name.len() - 1;
        for (at, byte) in name[..last].iter_mut().enumerate() {
            // SAFETY: The caller vouches for the device, in which the name is; renaming may change
            // it meanwhile, hence the volatile read.
            *byte = unsafe { ptr::addr_of!((*dev).name[at]).read_volatile() };
        }
        // The last byte stays zero, whatever was seen of a new name.
        Self(name)
    }
}

impl Deref for DeviceName {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

impl<D: Driver> Deref for Device<D> {
    type Target = D;

    fn deref(&self) -> &D {
        // SAFETY: By the type invariant the data is initialised; it is never borrowed mutably.
        unsafe { &*self.data.get().cast::<D>() }
    }
}

/// Drops the driver's data, as the last thing before the core frees the device.
///
/// # Safety
///
/// To be called by the core as `dealloc_driver`, for a `Device<D>`.
pub(super) unsafe extern "C" fn dealloc_driver<D: Driver>(raw: *mut bindings::ib_device) {
    let dev = raw.cast::<Device<D>>();
    // SAFETY: The core has no more use for the data. It is initialised where the flag says so.
    unsafe {
        if *(*dev).initialised.get() {
            ptr::drop_in_place((*dev).data.get().cast::<D>());
            (*(*dev).counters.get()).assume_init_drop();
            (*(*dev).definitions.get()).assume_init_drop();
        }
    }
}

/// How the network interface is found that a port shares its link with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// By its permanent address.
    Mac([u8; 6]),
    /// It is that of another PCI function of the same slot, or of any of the bus where functions have
    /// numbers of eight bits (ARI).
    Function(u8),
}

/// What the core has to know about a device before it is registered.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInfo {
    /// The node's GUID.
    pub node_guid: u64,
    /// How many ports it has.
    pub ports: u32,
    /// How many completion vectors it has.
    pub comp_vectors: u32,
    /// A name for people, of up to 63 bytes.
    pub description: &'static CStr,
    /// The key for all local memory, if the device has one
    /// ([`DeviceAttr::local_dma_lkey`] says so).
    pub local_dma_lkey: u32,
    /// The network interface that port 1 shares its link with. The port is paired with that
    /// interface whenever it is there, in the namespace of the device.
    pub beside: Option<Beside>,
    /// Names of the counters that each port has ([`Driver::read_counters`]).
    pub counter_names: &'static [&'static str],
    /// Whether moderation adapts to the traffic, until an administrator says otherwise
    /// ([`Device::adaptive_moderation`]).
    pub adaptive_moderation: bool,
}

/// A device that the core has allocated but does not know yet.
///
/// # Invariants
///
/// The device is initialised, not registered, and owned by this value.
pub struct Unregistered<D: Driver>(NonNull<Device<D>>);

// SAFETY: Nobody else has a device that is not registered, and `D` is `Send`.
unsafe impl<D: Driver> Send for Unregistered<D> {}

impl<D: Driver> Unregistered<D> {
    /// Allocates a device and initialises the driver's data of it.
    ///
    /// `parent` is the device on the bus, which does the DMA. What this returns, and the
    /// [`Registration`] it becomes, have to be dropped before it is unbound: keep them in the bus
    /// driver's bound data.
    pub fn new<E>(
        parent: &device::Device<device::Bound>,
        info: &DeviceInfo,
        data: impl PinInit<D, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        // SAFETY: The size is that of a `Device<D>`, which begins with a `struct ib_device`, as the
        // function wants.
        let raw = unsafe { bindings::rdma_alloc_device(Device::<D>::SIZE) };
        let dev = NonNull::new(raw.cast::<Device<D>>()).ok_or(ENOMEM)?;
        // INVARIANT: Allocated just now; initialised below, or dropped before anybody sees it.
        let this = Self(dev);
        // SAFETY: The device is not shared yet. Its memory is zeroed and stays where it is.
        unsafe {
            bindings::ib_set_device_ops(raw, &ops::Table::<D>::OPS);
            (*raw).ops.set_uverbs_robust_udata(1);
            if info.counter_names.is_empty() {
                // The core does not register a port with no counters in its list of them.
                (*raw).ops.alloc_hw_port_stats = None;
            }
            let definitions = Definitions::new::<D>()?;
            if D::HAS_ALLOC_UCONTEXT {
                (*raw).driver_def = definitions.as_ptr();
            }
            let counters = Descriptions::new(info.counter_names)?;
            data.__pinned_init((*dev.as_ptr()).data.get().cast::<D>())?;
            (*(*dev.as_ptr()).counters.get()).write(counters);
            (*(*dev.as_ptr()).definitions.get()).write(definitions);
            *(*dev.as_ptr()).beside.get() = info.beside;
            *(*dev.as_ptr()).initialised.get() = true;
            // `device::Device` is a transparent wrapper.
            bindings::rdma_device_set_parent(raw, ptr::from_ref(parent).cast_mut().cast());
            (*raw).node_guid = info.node_guid.to_be();
            (*raw).node_type = bindings::RDMA_NODE_IB_CA as u8;
            (*raw).phys_port_cnt = info.ports;
            (*raw).num_comp_vectors = info.comp_vectors as c_int;
            (*raw).local_dma_lkey = info.local_dma_lkey;
            bindings::ib_device::set_use_cq_dim_raw(raw, info.adaptive_moderation.into());
            let node_desc = &mut (*raw).node_desc;
            let description = info.description.to_bytes();
            // The last byte stays zero.
            for (to, from) in node_desc[..63].iter_mut().zip(description) {
                *to = *from;
            }
        }
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: By the type invariant the device is initialised, and freed only when `self` is
        // dropped.
        unsafe { self.0.as_ref() }
    }

    /// Makes the device known. From now on the core calls the driver's operations.
    ///
    /// It is called `name`, if that is given and no other device is called so; else by the driver's
    /// pattern.
    pub fn register(
        self,
        module: &'static ThisModule,
        name: Option<&CStr>,
    ) -> Result<Pin<KBox<Registration<D>>>> {
        // SAFETY: The device is not registered, so that nobody else reads its operations.
        unsafe { (*self.device().as_raw()).ops.owner = module.as_ptr() };
        KBox::pin_init(Registration::new(self, name), GFP_KERNEL)
    }
}

impl<D: Driver> Drop for Unregistered<D> {
    fn drop(&mut self) {
        // SAFETY: The device is ours and not registered; this ends in `dealloc_driver`.
        unsafe { bindings::ib_dealloc_device(self.0.as_ptr().cast()) }
    }
}

/// A device that the core knows, until this is dropped.
///
/// Dropping it takes every object from consumers and processes, drops the driver's data and frees
/// the device. It sleeps, for as long as consumers take.
///
/// # Invariants
///
/// - `dev` is registered.
/// - If `dev` has an interface `beside` it, `notifier` is registered, with a pointer to this value behind it.
#[pin_data(PinnedDrop)]
pub struct Registration<D: Driver> {
    dev: NonNull<Device<D>>,
    #[pin]
    notifier: Opaque<bindings::notifier_block>,
    /// One of [`gids`]; read and written with RTNL held.
    gids: Atomic<u32>,
    gid_scan: Arc<GidScan<D>>,
    /// Where `gid_scan` runs; flushed while `dev` is registered.
    gid_scans: OwnedQueue,
}

/// What is known of the GID table of a device.
pub(super) mod gids {
    /// There may be none yet: the core makes it while the device is being registered.
    pub(crate) const NONE: u32 = 0;
    /// As `NONE`, and the port was paired since the device began to be registered.
    pub(crate) const MISSED: u32 = 1;
    /// As `MISSED`, and before that it was unpaired: there may be GIDs of that time.
    pub(crate) const MISSED_PART: u32 = 2;
    /// There is one.
    pub(crate) const THERE: u32 = 3;
    /// The device is about to be unregistered: consumers need the GIDs until they have let go.
    pub(crate) const GOING: u32 = 4;

    /// What is known after a pairing that changed before there was a table.
    pub(crate) const fn missed(known: u32, unpaired: bool) -> u32 {
        if unpaired || known == MISSED_PART {
            MISSED_PART
        } else {
            MISSED
        }
    }
}

// SAFETY: The core's functions that drop calls may be called by any task, and `D` is `Send`.
unsafe impl<D: Driver> Send for Registration<D> {}
// SAFETY: A reference only leads to a `&Device<D>`, which is `Sync`.
unsafe impl<D: Driver> Sync for Registration<D> {}

impl<D: Driver> Registration<D> {
    fn new(
        unregistered: Unregistered<D>,
        name: Option<&CStr>,
    ) -> impl PinInit<Self, Error> + use<'_, D> {
        let init = move |slot: *mut Self| {
            let dev = unregistered.0;
            let paired = unregistered.device().beside().is_some();
            let gid_scans = OwnedQueue::ordered(c"rdma_gids")?;
            // SAFETY: `update_gids` queues it, with RTNL held where the device has a GID table.
            // After the notifier is gone nobody does, and dropping the registration flushes the
            // queue then, before it unregisters the device.
            let gid_scan = unsafe { GidScan::new(dev)? };
            // SAFETY: `slot` is valid for writes and pinned, and all its fields are written before
            // the notifier, which uses them, is registered. Where that fails those that need it are
            // dropped, and not used afterwards. The parent is bound for as long as the registration,
            // which the caller drops when it is unbound.
            unsafe {
                ptr::addr_of_mut!((*slot).dev).write(dev);
                ptr::addr_of_mut!((*slot).gids).write(Atomic::new(gids::NONE));
                // Dropped below where this fails.
                ptr::addr_of_mut!((*slot).gid_scan).write(gid_scan);
                ptr::addr_of_mut!((*slot).gid_scans).write(gid_scans);
                let notifier = Opaque::cast_into(ptr::addr_of!((*slot).notifier));
                ptr::write_bytes(notifier, 0, 1);
                (*notifier).notifier_call = Some(Self::netdev_event);
                // Before the core, which then asks which interface the port is paired with.
                (*notifier).priority = 1;
                let registered = Self::register_both(slot, &unregistered, paired, name);
                if registered.is_err() {
                    ptr::drop_in_place(ptr::addr_of_mut!((*slot).gid_scan));
                    ptr::drop_in_place(ptr::addr_of_mut!((*slot).gid_scans));
                    return registered;
                }
            }
            // INVARIANT: Device and notifier were registered just now.
            let _ = ManuallyDrop::new(unregistered);
            // SAFETY: `Unregistered::new` has initialised the device, and it is registered until
            // the registration is dropped.
            let dev = unsafe { dev.as_ref() };
            if let Some(sink) = D::event_sink(dev) {
                // SAFETY: Detached by dropping the registration, before the device goes.
                unsafe { sink.attach(dev) };
            }
            if paired {
                // SAFETY: All fields are initialised.
                let this = unsafe { &*slot };
                Rtnl::with(|rtnl| {
                    let known = this.gids.xchg(gids::THERE, Relaxed);
                    if known == gids::MISSED_PART {
                        dev.remove_gids();
                    }
                    if known != gids::NONE {
                        this.update_gids(rtnl);
                    }
                });
            }
            Ok(())
        };
        // SAFETY: All fields are initialised where `Ok` is returned. On error neither device nor
        // notifier is registered, and nothing needs to be dropped.
        unsafe { pin_init::pin_init_from_closure(init) }
    }

    /// Registers the notifier, if the port is paired with an interface, and the device.
    ///
    /// # Safety
    ///
    /// All fields of `slot` must be initialised and stay where they are, `unregistered` be its
    /// device, and the device's parent be bound.
    unsafe fn register_both(
        slot: *mut Self,
        unregistered: &Unregistered<D>,
        paired: bool,
        name: Option<&CStr>,
    ) -> Result {
        let raw = unregistered.device().as_raw();
        let name = name.filter(|name| is_plain(name)).unwrap_or(D::NAME);
        // SAFETY: The caller vouches for `slot`, of which the notifier is a part. It is registered
        // while the device, which its callback uses, is valid: it is removed again on error.
        unsafe {
            let notifier = Opaque::cast_into(ptr::addr_of!((*slot).notifier));
            if paired {
                // Makes the core's data of the port: notifier calls, which may come while the
                // device is being registered, must not make it a second time.
                unregistered.device().set_netdev(netdev::PORT, None)?;
                // Reports all interfaces that there are, so that the port is paired now.
                to_result(bindings::register_netdevice_notifier(notifier))?;
                // The core looks for the GIDs of what is paired by now.
                Rtnl::with(|_| (*slot).gids.store(gids::NONE, Relaxed));
            }
            let parent = bindings::rdma_device_parent(raw);
            let mut ret = bindings::ib_register_device(raw, name.as_char_ptr(), parent);
            // A name that is taken is refused before anything else is done, and before it is noted.
            if ret == ENFILE.to_errno() && unregistered.device().name().is_empty() {
                ret = bindings::ib_register_device(raw, D::NAME.as_char_ptr(), parent);
            }
            if ret != 0 && paired {
                bindings::unregister_netdevice_notifier(notifier);
            }
            to_result(ret)
        }
    }

    /// Brings the GIDs in line with a pairing that has changed.
    fn update_gids(&self, _rtnl: &Rtnl) {
        let dev = self.device();
        let paired = dev.netdev(netdev::PORT).is_some();
        let known = self.gids.load(Relaxed);
        if known != gids::THERE {
            self.gids.store(gids::missed(known, !paired), Relaxed);
        } else if paired {
            // By a worker, as it takes RTNL. Where it is queued already, it has yet to look.
            drop(self.gid_scans.enqueue(self.gid_scan.clone()));
        } else {
            // The core removes those of an interface that goes, and hears nothing any more of what
            // is stacked on it.
            dev.remove_gids();
        }
    }

    /// The device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: The device is initialised and lives for as long as its registration.
        unsafe { self.dev.as_ref() }
    }

    /// # Safety
    ///
    /// `nb` must be the notifier of a registered `Registration<D>`.
    unsafe extern "C" fn netdev_event(
        nb: *mut bindings::notifier_block,
        event: c_ulong,
        info: *mut c_void,
    ) -> c_int {
        // SAFETY: The caller vouches that the notifier is in a `Registration<D>`, which unregisters
        // it before it goes; `Opaque` is a transparent wrapper.
        let this = unsafe {
            &*nb.byte_sub(core::mem::offset_of!(Self, notifier))
                .cast::<Self>()
        };
        // SAFETY: The networking core passes valid information about an interface.
        let netdev = unsafe { Netdev::from_notifier(info) };
        let event = NetdevEvent::from_raw(event as u32);
        if let (Some(netdev), Some(event)) = (netdev, event) {
            // SAFETY: The networking core holds RTNL while it calls notifiers of interfaces, until
            // this returns.
            let rtnl = unsafe { Rtnl::assume_held() };
            // A notifier that is removed is told that all interfaces go.
            if this.gids.load(Relaxed) != gids::GOING
                && this.device().follow_netdev(&rtnl, &netdev, event) != Pairing::Keep
            {
                this.update_gids(&rtnl);
            }
        }
        0
    }
}

#[pinned_drop]
impl<D: Driver> PinnedDrop for Registration<D> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariants; the device is not used afterwards. Unregistering it ends
        // in `dealloc_driver`.
        unsafe {
            if let Some(sink) = D::event_sink(self.device()) {
                sink.detach();
            }
            if self.device().beside().is_some() {
                // From now on pairing and GIDs stay as they are: what consumers still send and
                // receive needs them. The core takes both back after its clients are gone. Until
                // then nobody gives up the port's reference to its interface: who removes that waits
                // for the slowest of them.
                Rtnl::with(|_| self.gids.store(gids::GOING, Relaxed));
                bindings::unregister_netdevice_notifier(self.notifier.get());
            }
            // Nothing is queued any more.
            self.gid_scans.flush();
            bindings::ib_unregister_device(self.dev.as_ptr().cast());
        }
    }
}

c_enum! {
    /// The largest payload of a packet.
    pub enum Mtu {
        /// 256 bytes.
        Bytes256 = ib_mtu_IB_MTU_256,
        /// 512 bytes.
        Bytes512 = ib_mtu_IB_MTU_512,
        /// 1024 bytes.
        Bytes1024 = ib_mtu_IB_MTU_1024,
        /// 2048 bytes.
        Bytes2048 = ib_mtu_IB_MTU_2048,
        /// 4096 bytes.
        Bytes4096 = ib_mtu_IB_MTU_4096,
    }
}

impl Mtu {
    /// The largest one whose packets fit an interface of that MTU, if any does.
    pub fn from_netdev(mtu: u32) -> Option<Self> {
        // SAFETY: The function only computes with its argument.
        Self::from_raw(unsafe { bindings::iboe_get_mtu(mtu as c_int) } as u32)
    }

    /// The bytes.
    pub const fn bytes(self) -> u32 {
        128 << self.as_raw()
    }
}

c_enum! {
    /// What kind of link a port has.
    pub enum LinkLayer {
        /// InfiniBand.
        Infiniband = rdma_link_layer_IB_LINK_LAYER_INFINIBAND,
        /// Ethernet.
        Ethernet = rdma_link_layer_IB_LINK_LAYER_ETHERNET,
    }
}

/// What a network interface says about an RDMA port.
#[derive(Clone, Copy, Debug, Default)]
pub struct EthernetPort {
    /// Whether frames can be sent.
    pub up: bool,
    /// The interface's MTU.
    pub mtu: u32,
    /// `IB_SPEED_*` that comes nearest.
    pub speed: u16,
    /// `IB_WIDTH_*` that comes nearest.
    pub width: u8,
}

/// The state of a port.
#[derive(Clone, Copy, Debug)]
pub struct PortAttr {
    /// Whether the port can send and receive.
    pub active: bool,
    /// The largest payload the device can do.
    pub max_mtu: Mtu,
    /// The largest payload that fits the link.
    pub active_mtu: Mtu,
    /// The link's MTU.
    pub phys_mtu: u32,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// Entries of the partition key table.
    pub pkey_tbl_len: u16,
    /// The largest message.
    pub max_msg_size: u32,
    /// `IB_SPEED_*`.
    pub speed: u16,
    /// `IB_WIDTH_*`.
    pub width: u8,
    /// `IB_PORT_*` capabilities beyond [`PortAttr::CM_SUP`].
    pub cap_flags: u32,
}

impl PortAttr {
    /// The port has a communication manager.
    pub const CM_SUP: u32 = bindings::ib_port_capability_mask_bits_IB_PORT_CM_SUP;

    /// The attributes of a RoCE port behind a network interface.
    pub fn ethernet(port: &EthernetPort, max_mtu: Mtu, gid_tbl_len: u32) -> Self {
        let fits = Mtu::from_netdev(port.mtu).unwrap_or(Mtu::Bytes256);
        Self {
            active: port.up,
            max_mtu,
            active_mtu: if fits.as_raw() < max_mtu.as_raw() {
                fits
            } else {
                max_mtu
            },
            phys_mtu: port.mtu,
            gid_tbl_len,
            pkey_tbl_len: 1,
            max_msg_size: 1 << 31,
            speed: port.speed,
            width: port.width,
            cap_flags: Self::CM_SUP,
        }
    }

    pub(super) fn fill(&self, raw: &mut bindings::ib_port_attr) {
        let (state, phys) = if self.active {
            (
                bindings::ib_port_state_IB_PORT_ACTIVE,
                bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_LINK_UP,
            )
        } else {
            (
                bindings::ib_port_state_IB_PORT_DOWN,
                bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_DISABLED,
            )
        };
        raw.state = state;
        raw.phys_state = phys as u8;
        raw.max_mtu = self.max_mtu.as_raw();
        raw.active_mtu = self.active_mtu.as_raw();
        raw.phys_mtu = self.phys_mtu;
        raw.gid_tbl_len = self.gid_tbl_len as c_int;
        raw.pkey_tbl_len = self.pkey_tbl_len;
        raw.max_msg_sz = self.max_msg_size;
        raw.active_speed = self.speed;
        raw.active_width = self.width;
        raw.port_cap_flags = self.cap_flags;
        raw.max_vl_num = 1;
        raw.set_ip_gids(1);
    }
}

/// What never changes about a port.
#[derive(Clone, Copy, Debug)]
pub struct PortImmutable {
    /// Entries of the partition key table.
    pub pkey_tbl_len: u32,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// The protocol, `RDMA_CORE_PORT_*`.
    pub core_cap_flags: u32,
    /// The largest management datagram.
    pub max_mad_size: u32,
}

impl PortImmutable {
    /// A RoCEv2 port.
    pub fn roce_v2(gid_tbl_len: u32) -> Self {
        Self {
            pkey_tbl_len: 1,
            gid_tbl_len,
            core_cap_flags: bindings::RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP
                | bindings::RDMA_CORE_CAP_IB_MAD
                | bindings::RDMA_CORE_CAP_IB_CM
                | bindings::RDMA_CORE_CAP_AF_IB
                | bindings::RDMA_CORE_CAP_ETH_AH,
            max_mad_size: bindings::IB_MGMT_MAD_SIZE,
        }
    }
}

c_flags! {
    /// What a device can do.
    pub struct DeviceCaps(u64) {
        /// It changes a port's state by itself.
        PORT_ACTIVE_EVENT = ib_device_cap_flags_IB_DEVICE_PORT_ACTIVE_EVENT,
        /// It has a system image GUID.
        SYS_IMAGE_GUID = ib_device_cap_flags_IB_DEVICE_SYS_IMAGE_GUID,
        /// It sends a receiver-not-ready reply.
        RC_RNR_NAK_GEN = ib_device_cap_flags_IB_DEVICE_RC_RNR_NAK_GEN,
        /// A completion queue may be resized.
        RESIZE_MAX_WR = ib_device_cap_flags_IB_DEVICE_RESIZE_MAX_WR,
        /// It has memory windows.
        MEM_WINDOW = ib_device_cap_flags_IB_DEVICE_MEM_WINDOW,
        /// Fast registration, local and remote invalidation.
        MEM_MGT_EXTENSIONS = ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS,
        /// Extended reliable connections.
        XRC = ib_device_cap_flags_IB_DEVICE_XRC,
        /// A shared receive queue may be resized.
        SRQ_RESIZE = ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE,
        /// Peers may make what they wrote visible to all.
        FLUSH_GLOBAL = ib_device_cap_flags_IB_DEVICE_FLUSH_GLOBAL,
        /// Atomic writes.
        ATOMIC_WRITE = ib_device_cap_flags_IB_DEVICE_ATOMIC_WRITE,
        /// Memory windows of type 2B.
        MEM_WINDOW_TYPE_2B = ib_device_cap_flags_IB_DEVICE_MEM_WINDOW_TYPE_2B,
    }
}

/// What a device is and can do.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub fw_ver: u64,
    /// In host byte order.
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    /// The page sizes a region may have, a bit each.
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub caps: DeviceCaps,
    /// The device has a key for all local memory ([`DeviceInfo::local_dma_lkey`]).
    pub local_dma_lkey: bool,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_sge_rd: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u32,
    pub max_qp_init_rd_atom: u32,
    pub max_res_rd_atom: u32,
    /// Atomics are atomic among all queue pairs of the device.
    pub atomic_hca: bool,
    pub max_mw: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_total_mcast_qp_attach: u32,
    pub max_ah: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_fast_reg_page_list_len: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub timestamp_mask: u64,
    /// In kilohertz.
    pub core_clock: u64,
    pub max_cq_moderation_count: u16,
    pub max_cq_moderation_period: u16,
    pub max_sgl_rd: u32,
    /// Bytes of device memory for processes.
    pub max_dm_size: u64,
    /// On-demand memory, where it has that.
    pub on_demand: Option<OnDemandAttr>,
    /// What it has for kernel users that the core does not know of.
    pub extensions: Extensions,
}

impl DeviceAttr {
    pub(super) fn fill(&self, raw: &mut bindings::ib_device_attr) {
        raw.fw_ver = self.fw_ver;
        raw.sys_image_guid = self.sys_image_guid.to_be();
        raw.max_mr_size = self.max_mr_size;
        raw.page_size_cap = self.page_size_cap;
        raw.vendor_id = self.vendor_id;
        raw.vendor_part_id = self.vendor_part_id;
        raw.hw_ver = self.hw_ver;
        raw.max_qp = self.max_qp as c_int;
        raw.max_qp_wr = self.max_qp_wr as c_int;
        raw.device_cap_flags = self.caps.as_raw();
        raw.kernel_cap_flags = self.extensions.as_raw();
        if self.local_dma_lkey {
            raw.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY);
        }
        raw.max_send_sge = self.max_send_sge as c_int;
        raw.max_recv_sge = self.max_recv_sge as c_int;
        raw.max_sge_rd = self.max_sge_rd as c_int;
        raw.max_cq = self.max_cq as c_int;
        raw.max_cqe = self.max_cqe as c_int;
        raw.max_mr = self.max_mr as c_int;
        raw.max_pd = self.max_pd as c_int;
        raw.max_qp_rd_atom = self.max_qp_rd_atom as c_int;
        raw.max_qp_init_rd_atom = self.max_qp_init_rd_atom as c_int;
        raw.max_res_rd_atom = self.max_res_rd_atom as c_int;
        raw.atomic_cap = if self.atomic_hca {
            bindings::ib_atomic_cap_IB_ATOMIC_HCA
        } else {
            bindings::ib_atomic_cap_IB_ATOMIC_NONE
        };
        raw.max_mw = self.max_mw as c_int;
        raw.max_mcast_grp = self.max_mcast_grp as c_int;
        raw.max_mcast_qp_attach = self.max_mcast_qp_attach as c_int;
        raw.max_total_mcast_qp_attach = self.max_total_mcast_qp_attach as c_int;
        raw.max_ah = self.max_ah as c_int;
        raw.max_srq = self.max_srq as c_int;
        raw.max_srq_wr = self.max_srq_wr as c_int;
        raw.max_srq_sge = self.max_srq_sge as c_int;
        raw.max_fast_reg_page_list_len = self.max_fast_reg_page_list_len;
        raw.max_pkeys = self.max_pkeys;
        raw.local_ca_ack_delay = self.local_ca_ack_delay;
        raw.timestamp_mask = self.timestamp_mask;
        raw.hca_core_clock = self.core_clock;
        raw.cq_caps.max_cq_moderation_count = self.max_cq_moderation_count;
        raw.cq_caps.max_cq_moderation_period = self.max_cq_moderation_period;
        raw.max_sgl_rd = self.max_sgl_rd;
        raw.max_dm_size = self.max_dm_size;
        if let Some(on_demand) = &self.on_demand {
            on_demand.fill(raw);
        }
    }
}
