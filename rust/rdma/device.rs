// SPDX-License-Identifier: GPL-2.0

//! RDMA devices: what they are, making them known to the core, their ports.

use super::counters::Descriptions;
use super::event::Attached;
use super::hold::{Hold, Holds};
use super::method::Definitions;
use super::netdev::{Enabling, GidScan, GidTable, Pairing};
use super::ops::op_if;
use super::udata::expect_none;
use super::{Driver, EthernetPort, Netdev, NetdevEvent, OnDemandAttr, Ops, Rtnl};
use crate::bindings;
use crate::kernel_ext::workqueue::OwnedQueue;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ops::{Deref, RangeInclusive};
use core::ptr::{self, NonNull};
use kernel::devres::Devres;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::types::Opaque;
use kernel::{device, ThisModule};

/// An RDMA device with the driver's data of it, to which it dereferences.
///
/// # Invariants
///
/// - `definitions`, `data`, `counters` and `holds` are initialised wherever a reference exists, except inside
///   [`Unregistered::new`].
/// - The parent is bound wherever a reference exists: those to an [`Unregistered`] device borrow the parent
///   as bound, and a [`Registration`], which exists in a [`Devres`] of the parent only, is dropped before the
///   parent is unbound, at the latest.
#[repr(C)]
pub struct Device<D: Driver> {
    raw: Opaque<bindings::ib_device>,
    initialised: UnsafeCell<bool>,
    virtual_dma: UnsafeCell<bool>,
    counters: UnsafeCell<MaybeUninit<Descriptions>>,
    /// What the core reads of the driver's methods while the device is registered.
    definitions: UnsafeCell<MaybeUninit<Definitions>>,
    data: UnsafeCell<MaybeUninit<D>>,
    /// What is waited for before the device is freed.
    holds: UnsafeCell<MaybeUninit<Arc<Holds>>>,
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

    /// Keeps the device from being freed: who unregisters it waits.
    pub(super) fn hold(&self) -> Hold {
        // SAFETY: By the type invariant they are initialised; `dealloc_driver` takes them, when there is no reference.
        unsafe { (*self.holds.get()).assume_init_ref() }.hold()
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
    pub fn parent(&self) -> &device::Device<device::Bound> {
        // SAFETY: The parent was set by `Unregistered::new`. By the type invariant it is bound for as long as
        // `self` is borrowed.
        unsafe { device::Device::from_raw(bindings::rdma_device_parent(self.as_raw())) }
    }

    /// Whether moderation is to adapt to the traffic (`rdma dev set DEV adaptive-moderation`). The core
    /// sees to that for each completion queue that it polls, by [`super::CqOps::modify_cq`].
    pub fn adaptive_moderation(&self) -> bool {
        // SAFETY: `&self` keeps the device; the bit may be changed meanwhile, and is read as it was or
        // as it is.
        unsafe { bindings::ib_device::use_cq_dim_raw(self.as_raw()) != 0 }
    }

    /// Whether the current process may have raw packets of the device: `CAP_NET_RAW` in the user namespace that the device's
    /// network namespace belongs to, or, where all share the device, in the initial one.
    pub fn has_raw_cap(&self) -> bool {
        // SAFETY: `&self` keeps the device. The function looks at that, and at the credentials of the current task.
        unsafe { bindings::rdma_dev_has_raw_cap(self.as_raw()) }
    }

    /// The numbers of its ports.
    pub fn ports(&self) -> RangeInclusive<u32> {
        // SAFETY: `&self` keeps the device; `Unregistered::new` has set the count, which does not change.
        1..=unsafe { (*self.as_raw()).phys_port_cnt }
    }

    /// The network interface that a port is paired with.
    pub fn netdev(&self, port: u32) -> Option<Netdev> {
        // SAFETY: The device is valid; the result is null or a reference for us.
        unsafe { Netdev::from_raw(bindings::ib_device_get_netdev(self.as_raw(), port)) }
    }

    /// Pairs a port with a network interface, or with none.
    ///
    /// One at a time, hence RTNL: the first call for a device that is not registered makes the core's data of its
    /// ports.
    pub(super) fn set_netdev(&self, _rtnl: &Rtnl, port: u32, netdev: Option<&Netdev>) -> Result {
        let netdev = netdev.map_or(ptr::null_mut(), Netdev::as_raw);
        // SAFETY: `&self` keeps the device, and `netdev` the interface; the core takes its own reference. With RTNL
        // held nobody else makes the data of the ports.
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

    /// Tells all consumers that a port changed state. There are none before the device is registered, nor
    /// afterwards. May be called in interrupt context.
    pub fn report_port(&self, port: u32, active: bool) {
        let event = if active {
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE
        } else {
            bindings::ib_event_type_IB_EVENT_PORT_ERR
        };
        self.report(event, port);
    }

    /// Tells all consumers that the device failed, as [`Self::report_port`].
    pub fn report_fatal(&self) {
        self.report(bindings::ib_event_type_IB_EVENT_DEVICE_FATAL, 1);
    }

    fn report(&self, kind: bindings::ib_event_type, port: u32) {
        // The core works on an event later, and waits for that when it unregisters a device: one that was
        // never registered could be freed before.
        // SAFETY: `self` is a device that `_ib_alloc_device` made.
        if !unsafe { bindings::ib_device_try_get(self.as_raw()) } {
            return;
        }
        let mut event: bindings::ib_event = pin_init::zeroed();
        event.device = self.as_raw();
        event.event = kind;
        // SAFETY: The event is a local and all views of its union are plain data; the core copies
        // it.
        unsafe {
            *event.element.port_num.as_mut() = port;
            bindings::ib_dispatch_event(&event);
        }
        // SAFETY: The count was taken above.
        unsafe { bindings::ib_device_put(self.as_raw()) };
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

impl<D: Driver> Ops<D> {
    pub(super) const fn with_device(mut self) -> Self {
        self.raw.driver_id = D::DRIVER_ID;
        self.raw.uverbs_abi_ver = D::ABI_VERSION;
        self.raw.query_device = Some(query_device::<D>);
        self.raw.get_dev_fw_str = op_if!(D::HAS_FIRMWARE_VERSION, get_dev_fw_str::<D>);
        self.raw.enable_driver = Some(enable_driver::<D>);
        self.raw.dealloc_driver = Some(dealloc_driver::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
/// writes.
unsafe extern "C" fn query_device<D: Driver>(
    dev: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of `ib_uverbs_ex_query_device`, which waits.
        unsafe { expect_none::<D>(udata)? };
        // SAFETY: The device is a `Device<D>`, as it has this table. `ib_register_device` calls this (in
        // `setup_device`), or a uverbs command, which keeps the device from being unregistered.
        let dev = unsafe { Device::from_raw(dev) };
        // SAFETY: `attr` is of `setup_device`, in the device before anybody reads it, or a local of the
        // command.
        D::query_device(dev)?.fill(unsafe { &mut *attr })?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `text` must have room for
/// `IB_FW_VERSION_NAME_MAX` bytes.
unsafe extern "C" fn get_dev_fw_str<D: Driver>(dev: *mut bindings::ib_device, text: *mut c_char) {
    // SAFETY: The device is a `Device<D>`, as it has this table. Who calls `ib_get_device_fw_str` holds the
    // device, or reads a file of it in sysfs, which `ib_unregister_device` removes first.
    let (major, minor, patch) = D::firmware_version(unsafe { Device::from_raw(dev) });
    // SAFETY: The helper writes `IB_FW_VERSION_NAME_MAX` bytes at the most, which is what callers of
    // `ib_get_device_fw_str` give.
    unsafe { bindings::rdma_format_version(text, major, minor, patch) };
}

/// Called when the device is registered, and each time it has come to another network
/// namespace.
///
/// # Safety
///
/// `dev` must be a `Device<D>` that is being enabled.
unsafe extern "C" fn enable_driver<D: Driver>(dev: *mut bindings::ib_device) -> c_int {
    if Ops::<D>::of().pairing.is_some() {
        // SAFETY: The device is a `Device<D>`, as it has this table; `enable_device_and_get`, which calls
        // this, has a count of it.
        let dev = unsafe { Device::<D>::from_raw(dev) };
        // SAFETY: The device is being enabled until this returns.
        unsafe { Enabling::assume(dev) }.follow_namespace();
    }
    0
}

/// Drops the driver's data, as the last thing before the core frees the device, and waits for what refers to it.
///
/// # Safety
///
/// To be called by the core as `dealloc_driver`, for a `Device<D>`.
unsafe extern "C" fn dealloc_driver<D: Driver>(raw: *mut bindings::ib_device) {
    let dev = raw.cast::<Device<D>>();
    // SAFETY: The memory of the device was zeroed, and is freed after this: the flag can be read.
    if !unsafe { *(*dev).initialised.get() } {
        return;
    }
    // SAFETY: The flag says that the data is initialised. `ib_dealloc_device` calls this once, when the
    // device was never registered, or when `__ib_unregister_device` has waited for the last user.
    unsafe { ptr::drop_in_place((*dev).data.get().cast::<D>()) };
    // SAFETY: The flag says that the counters are initialised. They are dropped once, by this call, when
    // `__ib_unregister_device` has removed the files that showed them.
    unsafe { (*(*dev).counters.get()).assume_init_drop() };
    // SAFETY: The flag says that the definitions are initialised. They are dropped once, by this call, when
    // `ib_uverbs_remove_one`, whose API they are part of, has returned.
    unsafe { (*(*dev).definitions.get()).assume_init_drop() };
    // SAFETY: The flag says that they are initialised. They are taken once, by this call.
    let holds = unsafe { (*(*dev).holds.get()).assume_init_read() };
    // What the data had is given back by now, and objects are gone: this is for what others keep.
    holds.end();
}

c_enum! {
    /// What a device is among those of a fabric, by which the core knows its transport.
    pub enum NodeType {
        /// A channel adapter: InfiniBand, RoCE.
        IbCa = RDMA_NODE_IB_CA,
        /// An adapter of iWARP.
        Rnic = RDMA_NODE_RNIC,
        /// None of those that the core knows.
        Unspecified = RDMA_NODE_UNSPECIFIED,
    }
}

impl Default for NodeType {
    fn default() -> Self {
        Self::IbCa
    }
}

/// What the core has to know about a device before it is registered.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceInfo {
    /// What it is.
    pub node_type: NodeType,
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
    /// Whether the device is made of software, for which addresses of the kernel are DMA addresses.
    pub virtual_dma: bool,
    /// Names of the counters that each port has ([`super::CounterOps`]).
    pub counter_names: &'static [&'static str],
    /// Whether moderation adapts to the traffic, until an administrator says otherwise
    /// ([`Device::adaptive_moderation`]).
    pub adaptive_moderation: bool,
}

impl DeviceInfo {
    fn fill(&self, raw: &mut bindings::ib_device) {
        raw.node_guid = self.node_guid.to_be();
        raw.node_type = self.node_type.as_raw() as u8;
        raw.phys_port_cnt = self.ports;
        raw.num_comp_vectors = self.comp_vectors as c_int;
        raw.local_dma_lkey = self.local_dma_lkey;
        raw.set_use_cq_dim(self.adaptive_moderation.into());
        // The last byte stays zero.
        let node_desc = &mut raw.node_desc[..63];
        for (to, from) in node_desc.iter_mut().zip(self.description.to_bytes()) {
            *to = *from;
        }
    }
}

/// A device that the core has allocated but does not know yet.
///
/// # Invariants
///
/// The device `dev` is initialised, not registered, and owned by this value; `parent` is its parent.
pub struct Unregistered<'a, D: Driver> {
    dev: NonNull<Device<D>>,
    parent: &'a device::Device<device::Bound>,
}

// SAFETY: Nobody else has a device that is not registered, and `D` is `Send`; a device on a bus may be used by any
// task.
unsafe impl<D: Driver> Send for Unregistered<'_, D> {}

impl<'a, D: Driver> Unregistered<'a, D> {
    /// Allocates a device and initialises the driver's data of it.
    ///
    /// `parent` is the device on the bus, which does the DMA.
    pub fn new<E>(
        parent: &'a device::Device<device::Bound>,
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
        let this = Self { dev, parent };
        let definitions = Definitions::new(Ops::<D>::of())?;
        let counters = Descriptions::new(info.counter_names)?;
        let holds = Holds::new()?;
        // SAFETY: The device was allocated just now, so that nobody else has it; the table is static.
        unsafe { bindings::ib_set_device_ops(raw, &Ops::<D>::of().raw) };
        // SAFETY: Nobody else has the device yet.
        let core = unsafe { &mut *raw };
        core.ops.set_uverbs_robust_udata(1);
        if info.counter_names.is_empty() {
            // The core does not register a port with no counters in its list of them.
            core.ops.alloc_hw_port_stats = None;
        }
        if Ops::<D>::of().raw.alloc_ucontext.is_some() {
            core.driver_def = definitions.as_ptr();
        }
        core.uverbs_cmd_mask |= Ops::<D>::of().commands;
        info.fill(core);
        // SAFETY: The device was allocated just now, so that nobody else has it. `device::Device` is a
        // transparent wrapper, and the core counts a parent when it adds the device.
        unsafe { bindings::rdma_device_set_parent(raw, ptr::from_ref(parent).cast_mut().cast()) };
        // SAFETY: The memory is that of a `Device<D>`, all zeroes, of which the core's part is a value, as are
        // the flags, and the other fields need no value: `UnsafeCell<MaybeUninit<_>>`.
        let device = unsafe { dev.as_ref() };
        // SAFETY: Nobody else has the device yet, which stays where it is: the slot is pinned, and not
        // initialised before. Where this fails the flag below is not set, and nobody drops what is there.
        unsafe { data.__pinned_init(device.data.get().cast::<D>()) }?;
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.counters.get()).write(counters) };
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.definitions.get()).write(definitions) };
        // SAFETY: Nobody else has the device yet.
        unsafe { *device.virtual_dma.get() = info.virtual_dma };
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.holds.get()).write(holds) };
        // SAFETY: Nobody else has the device yet. All four are initialised.
        unsafe { *device.initialised.get() = true };
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: By the type invariant the device is initialised, and freed only when `self` is
        // dropped.
        unsafe { self.dev.as_ref() }
    }

    /// Makes the device known. From now on the core calls the driver's operations.
    ///
    /// It is called `name`, if that is given and no other device is called so; else by the driver's
    /// pattern.
    ///
    /// It is known until what this returns is dropped, and at the latest until its parent is unbound, whatever became
    /// of that: what the parent was given to manage before goes after it.
    pub fn register(
        self,
        module: &'static ThisModule,
        name: Option<&CStr>,
    ) -> Result<Devres<Registration<D>>> {
        // SAFETY: The device is not registered, so that nobody else reads its operations.
        unsafe { (*self.device().as_raw()).ops.owner = module.as_ptr() };
        Devres::new(self.parent, Registration::new(self, name))
    }
}

impl<D: Driver> Drop for Unregistered<'_, D> {
    fn drop(&mut self) {
        // SAFETY: The device is ours and not registered; this ends in `dealloc_driver`.
        unsafe { bindings::ib_dealloc_device(self.dev.as_ptr().cast()) }
    }
}

/// A device that the core knows, until this is dropped. Only in a [`Devres`] of its parent, so that it is dropped at the
/// latest when that is unbound.
///
/// Dropping it takes every object from consumers and processes, drops the driver's data and frees
/// the device. It sleeps, for as long as consumers take.
///
/// # Invariants
///
/// - `dev` is registered, and its parent bound.
/// - If `D` has [`super::NetdevOps`], `notifier` is registered.
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
    /// Where events of the device come from, if the driver has [`super::EventOps`].
    sink: Option<Attached>,
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
    /// To be put in a [`Devres`] of the parent, and nowhere else.
    fn new<'a>(
        unregistered: Unregistered<'a, D>,
        name: Option<&'a CStr>,
    ) -> impl PinInit<Self, Error> + use<'a, D> {
        let dev = unregistered.dev;
        let paired = Ops::<D>::of().pairing.is_some();
        // INVARIANT: Device and notifier are registered by the last initialiser.
        let registered = try_pin_init!(&this in Self {
            dev: unregistered.dev,
            gids: Atomic::new(gids::NONE),
            // SAFETY: `update_gids` queues it, with RTNL held where the device has a GID table.
            // After the notifier is gone nobody does, and dropping the registration flushes the
            // queue then, before it unregisters the device.
            gid_scan: unsafe { GidScan::new(unregistered.dev)? },
            gid_scans: OwnedQueue::ordered(c"rdma_gids")?,
            sink: None,
            // The last, as its callback uses the others.
            notifier <- Opaque::try_ffi_init(move |notifier: *mut bindings::notifier_block| {
                if paired {
                    // SAFETY: `this` is where the registration will stay, and `gids` was initialised before
                    // this initialiser runs.
                    let gids = unsafe { &(*this.as_ptr()).gids };
                    // SAFETY: `notifier` is that of a registration of which all other fields are initialised.
                    // Where the device is not registered it is unregistered below, and else by `drop`.
                    unsafe { Self::follow_netdevs(notifier, unregistered.device(), gids)? };
                }
                // SAFETY: Where this succeeds the registration is the only one that frees the device.
                let registered = unsafe { Self::add_device(&unregistered, name) };
                match registered {
                    Ok(()) => core::mem::forget(unregistered),
                    Err(_) if paired => {
                        // SAFETY: It was registered above. No call of it runs when this returns.
                        unsafe { bindings::unregister_netdevice_notifier(notifier) };
                    }
                    Err(_) => {}
                }
                registered
            }),
        }? Error);
        registered.pin_chain(move |mut this: Pin<&mut Self>| {
            // SAFETY: `Unregistered::new` has initialised the device, and it is registered until
            // the registration is dropped.
            let dev = unsafe { dev.as_ref() };
            if let Some(attach) = Ops::<D>::of().events {
                // SAFETY: The device is registered; dropping the registration drops what this returns before it
                // unregisters the device.
                *this.as_mut().project().sink = Some(unsafe { attach(dev)? });
            }
            if paired {
                Rtnl::with(|rtnl| {
                    let known = this.gids.xchg(gids::THERE, Relaxed);
                    for port in dev.ports() {
                        if known == gids::MISSED_PART {
                            // SAFETY: The device is registered, and the port one of its ports.
                            unsafe { GidTable::assume_there(dev, port) }.clear();
                        }
                        if known != gids::NONE {
                            this.update_gids(rtnl, port);
                        }
                    }
                });
            }
            Ok(())
        })
    }

    /// Registers the notifier that pairs the ports of `dev` with interfaces.
    ///
    /// # Safety
    ///
    /// `notifier` must be memory in a `Registration<D>` of `dev`, of which the other fields are initialised and stay
    /// where they are until it is unregistered; `gids` is one of them.
    unsafe fn follow_netdevs(
        notifier: *mut bindings::notifier_block,
        dev: &Device<D>,
        gids: &Atomic<u32>,
    ) -> Result {
        let described = bindings::notifier_block {
            notifier_call: Some(Self::netdev_event),
            // Before the core, which then asks which interface the port is paired with.
            priority: 1,
            ..pin_init::zeroed()
        };
        // SAFETY: The caller vouches for the memory, which nobody else has yet.
        unsafe { notifier.write(described) };
        // Makes the core's data of the ports: notifier calls, which may come while the device is being
        // registered, must not make it a second time.
        Rtnl::with(|rtnl| {
            dev.ports()
                .try_for_each(|port| dev.set_netdev(rtnl, port, None))
        })?;
        // Reports all interfaces that there are, so that the ports are paired now.
        // SAFETY: It was described just now. The caller vouches for what its callback uses.
        to_result(unsafe { bindings::register_netdevice_notifier(notifier) })?;
        // The core looks for the GIDs of what is paired by now.
        Rtnl::with(|_| gids.store(gids::NONE, Relaxed));
        Ok(())
    }

    /// Registers the device.
    ///
    /// # Safety
    ///
    /// Where this succeeds the device has to be unregistered, which frees it, and `unregistered` not to be dropped.
    unsafe fn add_device(unregistered: &Unregistered<'_, D>, name: Option<&CStr>) -> Result {
        let dev = unregistered.device();
        let name = name.filter(|name| is_plain(name)).unwrap_or(D::NAME);
        // SAFETY: The flag was set when the device was made, and does not change.
        let dma = if unsafe { *dev.virtual_dma.get() } {
            ptr::null_mut()
        } else {
            ptr::from_ref(unregistered.parent).cast_mut().cast()
        };
        let register = |name: &CStr| {
            // SAFETY: By the type invariant of `Unregistered` the device is initialised and not registered, and its
            // parent is bound; the core copies the name.
            unsafe { bindings::ib_register_device(dev.as_raw(), name.as_char_ptr(), dma) }
        };
        let mut ret = register(name);
        // A name that is taken is refused before anything else is done, and before it is noted.
        if ret == ENFILE.to_errno() && dev.name().is_empty() {
            ret = register(D::NAME);
        }
        to_result(ret)
    }

    /// Brings the GIDs of a port in line with a pairing that has changed.
    fn update_gids(&self, _rtnl: &Rtnl, port: u32) {
        let dev = self.device();
        let paired = dev.netdev(port).is_some();
        let known = self.gids.load(Relaxed);
        if known != gids::THERE {
            self.gids.store(gids::missed(known, !paired), Relaxed);
        } else if paired {
            // By a worker, as it takes RTNL. Where it is queued already, it has yet to look.
            drop(self.gid_scans.enqueue(self.gid_scan.clone()));
        } else {
            // The core removes those of an interface that goes, and hears nothing any more of what
            // is stacked on it.
            // SAFETY: The state says that there is one, which is so from when the device was registered; the port
            // is one of its ports.
            unsafe { GidTable::assume_there(dev, port) }.clear();
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
            let dev = this.device();
            if this.gids.load(Relaxed) == gids::GOING {
                // Pairing stays, but one that leaves for another namespace does not wait for that. A notifier that is
                // removed is told that all interfaces go, too: so they do for the device.
                if event == NetdevEvent::Unregister {
                    for port in dev.ports() {
                        if dev.netdev(port).is_some_and(|own| own == netdev) {
                            dev.tell_netdev_event(port, &netdev, event);
                        }
                    }
                }
                return 0;
            }
            for port in dev.ports() {
                if dev.follow_netdev(&rtnl, port, &netdev, event) != Pairing::Keep {
                    this.update_gids(&rtnl, port);
                }
            }
        }
        0
    }
}

#[pinned_drop]
impl<D: Driver> PinnedDrop for Registration<D> {
    fn drop(mut self: Pin<&mut Self>) {
        // Before the device goes, to which it leads.
        drop(self.as_mut().project().sink.take());
        if Ops::<D>::of().pairing.is_some() {
            // From now on pairing and GIDs stay as they are: what consumers still send and receive needs
            // them. The core takes both back after its clients are gone. Until then nobody gives up the
            // port's reference to its interface: who removes that waits for the slowest of them.
            Rtnl::with(|_| self.gids.store(gids::GOING, Relaxed));
            // SAFETY: By the type invariant the notifier of a paired port is registered. No call of it runs
            // when this returns.
            unsafe { bindings::unregister_netdevice_notifier(self.notifier.get()) };
        }
        // Nothing is queued any more.
        self.gid_scans.flush();
        // SAFETY: By the type invariant the device is registered. This ends in `dealloc_driver`, and the
        // device is not used afterwards.
        unsafe { bindings::ib_unregister_device(self.dev.as_ptr().cast()) };
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
        /// XRC.
        XRC = ib_device_cap_flags_IB_DEVICE_XRC,
        /// A shared receive queue may be resized.
        SRQ_RESIZE = ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE,
        /// Peers may make what they wrote visible to all.
        FLUSH_GLOBAL = ib_device_cap_flags_IB_DEVICE_FLUSH_GLOBAL,
        /// Atomic writes.
        ATOMIC_WRITE = ib_device_cap_flags_IB_DEVICE_ATOMIC_WRITE,
        /// Rules of flows.
        MANAGED_FLOW_STEERING = ib_device_cap_flags_IB_DEVICE_MANAGED_FLOW_STEERING,
        /// Memory windows of type 2B.
        MEM_WINDOW_TYPE_2B = ib_device_cap_flags_IB_DEVICE_MEM_WINDOW_TYPE_2B,
    }
}

/// The bits of `kernel_cap_flags` that are the core's: it assigns them from the lowest up.
pub(super) const CAPS_OF_CORE: u64 = u32::MAX as u64;

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
    /// Work queues, and tables of them with so many entries at most, where it has those.
    pub max_wq: u32,
    pub max_rwq_tables: u32,
    pub max_rwq_table_entries: u32,
    /// On-demand memory, where it has that.
    pub on_demand: Option<OnDemandAttr>,
    /// What it has of its driver's own for kernel users: bits of `kernel_cap_flags`
    /// ([`Extension`](super::Extension)). A device that says something of the core's by them is not registered.
    pub driver_caps: u64,
}

impl DeviceAttr {
    /// `EINVAL` where it says what it cannot.
    pub(super) fn fill(&self, raw: &mut bindings::ib_device_attr) -> Result {
        if self.driver_caps & CAPS_OF_CORE != 0 {
            return Err(EINVAL);
        }
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
        raw.kernel_cap_flags = self.driver_caps;
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
        raw.max_wq_type_rq = self.max_wq;
        raw.rss_caps.max_rwq_indirection_tables = self.max_rwq_tables;
        raw.rss_caps.max_rwq_indirection_table_size = self.max_rwq_table_entries;
        if self.max_rwq_tables != 0 {
            raw.rss_caps.supported_qpts = 1 << bindings::ib_qp_type_IB_QPT_RAW_PACKET;
        }
        if let Some(on_demand) = &self.on_demand {
            on_demand.fill(raw);
        }
        Ok(())
    }
}
