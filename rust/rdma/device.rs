// SPDX-License-Identifier: GPL-2.0

//! RDMA devices: what they are, making them known to the core, their ports.

pub(super) mod attributes;
pub(super) mod registration;

pub use self::attributes::{DeviceAttr, DeviceCaps};
pub use self::registration::{DeviceInfo, NodeType, Registration, Unregistered};
use super::counters::Descriptions;
use super::hold::{Hold, Holds};
use super::method::Definitions;
use super::netdev::Enabling;
use super::ops::op_if;
use super::udata::expect_none;
use super::{Driver, EthernetPort, Netdev, Ops, Rtnl};
use crate::bindings;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ops::{Deref, RangeInclusive};
use core::ptr;
use kernel::device;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::types::Opaque;

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
