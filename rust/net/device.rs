// SPDX-License-Identifier: GPL-2.0

//! Network devices of a driver.
//!
//! What a callback sees is there: the driver's data are dropped after the device was unregistered, which waits for
//! callbacks, for NAPI and for all who [hold](Hold) it; and they are in one allocation with the core's structure.

mod filter;
mod lifecycle;
mod offload;
mod queues;
mod registration;
mod settings;
mod statistics;

pub use filter::*;
pub use offload::*;
pub use queues::*;
pub use registration::*;
pub use settings::*;
pub use statistics::*;

use super::{Napi, Ops, Rtnl, Skb};
use crate::bindings;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use kernel::device;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::types::Opaque;

/// A driver of Ethernet devices; the type is that of its data of each device.
pub trait Driver: Sized + Send + Sync + 'static {
    /// What it offers.
    const OPS: Ops<Self>;

    /// What it has for each [`Napi`]. `()` where there are none.
    type Queue: Send + Sync + 'static;

    /// The device is brought up. May sleep.
    ///
    /// Queues are polled and frames are sent from when this has returned.
    fn open(dev: &Device<Self>, rtnl: &Rtnl) -> Result;

    /// The device is brought down. May sleep.
    ///
    /// No queue is polled any more, and no frame is sent, until it is opened again.
    fn stop(dev: &Device<Self>, rtnl: &Rtnl);

    /// A frame is to be sent. In softirqs, or with bottom halves disabled; frames of one queue one after the other.
    fn start_xmit(dev: &Device<Self>, skb: Skb) -> Xmit;
}

/// What came of a frame that is to be sent.
pub enum Xmit {
    /// It was sent, or dropped.
    Taken,
    /// There is no room, and its queue was [stopped](Device::stop_queue): it is to be offered again.
    Busy(Skb),
}

/// A network device with the driver's data of it, to which it dereferences.
///
/// # Invariants
///
/// Wherever a reference exists the device's private part is an initialised `Private<D>`.
#[repr(transparent)]
pub struct Device<D: Driver> {
    raw: Opaque<bindings::net_device>,
    _data: PhantomData<D>,
}

// SAFETY: The core's part is used from any task, under locks of its own; data and queues are `Send` and `Sync`.
unsafe impl<D: Driver> Send for Device<D> {}
// SAFETY: The core's part is used by any number of tasks, under locks of its own; data and queues are `Sync`.
unsafe impl<D: Driver> Sync for Device<D> {}

/// A number that the driver says, and that counts as it was said first: the core asks for it, and has room for so many
/// afterwards.
pub(super) struct FirstSaid(Atomic<u32>);

impl FirstSaid {
    /// More than the core asks for.
    const NOTHING: u32 = u32::MAX;

    const fn new() -> Self {
        Self(Atomic::new(Self::NOTHING))
    }

    /// What was said first: where nothing was, what is said now.
    pub(super) fn get(&self, say: impl FnOnce() -> usize) -> u32 {
        let said = self.0.load(Relaxed);
        if said != Self::NOTHING {
            return said;
        }
        let said = say().min(c_int::MAX as usize) as u32;
        match self.0.cmpxchg(Self::NOTHING, said, Relaxed) {
            Ok(_) => said,
            // Another was told that meanwhile.
            Err(first) => first,
        }
    }
}

/// The driver was not told to [open](Driver::open) a device, or to stop it since.
const STOPPED: u32 = 0;
/// It is being told, and may call what tells it.
const CHANGING: u32 = 1;
/// It was told to open it.
const STARTED: u32 = 2;

/// What is behind the core's structure.
#[pin_data]
pub(super) struct Private<D: Driver> {
    /// Never grows after it was made: NAPI knows where they are.
    napis: KVec<Napi<D>>,
    /// One of [`STOPPED`], [`CHANGING`] and [`STARTED`]. Changed with RTNL held.
    started: Atomic<u32>,
    /// How many numbers `ethtool` is shown.
    pub(super) ethtool_count: FirstSaid,
    /// Entries of the table by which what is received is spread.
    pub(super) rss_entries: FirstSaid,
    /// Whether it is registered for no longer than its parent is bound. Set before it is registered.
    managed: Atomic<u32>,
    #[pin]
    data: D,
}

impl<D: Driver> Device<D> {
    /// # Safety
    ///
    /// `raw` must be a device that [`Unregistered::new`] made, of this type, and that is not freed for `'a`.
    #[inline]
    pub(super) unsafe fn from_raw<'a>(raw: *mut bindings::net_device) -> &'a Self {
        // INVARIANT: `Unregistered::new` has initialised the private part.
        // SAFETY: The caller vouches for the device; the type is transparent.
        unsafe { &*raw.cast() }
    }

    /// A device, and that RTNL is held, in an operation of it. Operations that change a device, and those of `ethtool`, are
    /// called with RTNL held of a device that does not ask for a lock of its own (`netdev_need_ops_lock`), as none does here.
    ///
    /// # Safety
    ///
    /// As for [`Self::from_raw`]; and the current task must hold RTNL for as long as the result exists.
    pub(super) unsafe fn under_rtnl<'a>(raw: *mut bindings::net_device) -> (&'a Self, Rtnl) {
        // SAFETY: The caller vouches for the device, and that RTNL is held.
        unsafe { (Self::from_raw(raw), Rtnl::assume_held()) }
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut bindings::net_device {
        self.raw.get()
    }

    #[inline]
    pub(super) fn private(&self) -> &Private<D> {
        // SAFETY: By the type invariant the private part is initialised; nobody has it as `&mut`.
        unsafe { &*bindings::netdev_priv(self.as_raw()).cast() }
    }

    /// The device on the bus that it is the interface of, where it is [registered for
    /// that](Unregistered::register_managed).
    pub fn parent(&self) -> Option<&device::Device<device::Bound>> {
        if self.private().managed.load(Relaxed) == 0 {
            return None;
        }
        // SAFETY: The reference keeps the device, whose parent was set when it was made.
        let parent = unsafe { bindings::netdev_parent(self.as_raw()) };
        // SAFETY: It is registered, or about to be or not to be any more: where `register_managed` says so its end
        // comes before that of the binding, and waits for callbacks and for all who hold it.
        (!parent.is_null()).then(|| unsafe { device::Device::from_raw(parent) })
    }

    /// Its queues that are polled.
    #[inline]
    pub fn napis(&self) -> &[Napi<D>] {
        &self.private().napis
    }

    /// Its name now: it may be given another, and be found half changed then. For those who read logs.
    pub fn name(&self) -> InterfaceName {
        // SAFETY: The reference keeps the device.
        unsafe { InterfaceName::of(self.as_raw()) }
    }

    /// Whether it has a carrier.
    pub fn has_carrier(&self) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_carrier_ok(self.as_raw()) }
    }

    /// There is a carrier, or there is none any more. May be called from any context.
    pub fn set_carrier(&self, carrier: bool) {
        // SAFETY: The reference keeps the device.
        unsafe {
            if carrier {
                bindings::netif_carrier_on(self.as_raw())
            } else {
                bindings::netif_carrier_off(self.as_raw())
            }
        }
    }

    /// A frame has arrived, beside NAPI: it is queued for the protocols. May be called from any context.
    ///
    /// It begins with its Ethernet header. Returns whether it was taken.
    pub fn receive(&self, skb: Skb) -> bool {
        let Some(skb) = self.prepare_received(skb) else {
            return false;
        };
        // SAFETY: The frame is of this device, which the reference keeps, and which flushes what is queued when it
        // is unregistered; the count passes to the function.
        unsafe { bindings::netif_rx(skb.into_raw()) == bindings::NET_RX_SUCCESS as c_int }
    }

    /// Makes a frame one that this device has received.
    pub(super) fn prepare_received(&self, skb: Skb) -> Option<Skb> {
        if skb.linear().len() < super::EthernetHeader::SIZE {
            skb.discard(super::DropReason::BadHeader);
            return None;
        }
        // SAFETY: The buffer is ours, and begins with a header in one piece; the reference keeps the device.
        unsafe {
            let protocol = bindings::eth_type_trans(skb.as_raw(), self.as_raw());
            bindings::skb_set_protocol(skb.as_raw(), protocol);
        }
        Some(skb)
    }

    /// Keeps it: unregistering it waits until the result is dropped.
    pub fn hold(&self) -> Hold<D> {
        // SAFETY: The reference keeps the device until this returns.
        unsafe { bindings::dev_hold(self.as_raw()) };
        // INVARIANT: Counted just now.
        Hold(NonNull::from(self))
    }
}

impl<D: Driver> Deref for Device<D> {
    type Target = D;

    #[inline]
    fn deref(&self) -> &D {
        &self.private().data
    }
}

/// The name of an interface.
#[derive(Clone, Copy)]
pub struct InterfaceName([u8; bindings::IFNAMSIZ as usize]);

impl InterfaceName {
    /// # Safety
    ///
    /// `dev` must be a valid interface.
    pub(super) unsafe fn of(dev: *const bindings::net_device) -> Self {
        // SAFETY: The caller vouches for the interface, whose name has that many bytes; it may be written meanwhile.
        Self(unsafe {
            bindings::netdev_name_field(dev)
                .cast::<[u8; bindings::IFNAMSIZ as usize]>()
                .read_volatile()
        })
    }
}

impl kernel::fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut kernel::fmt::Formatter<'_>) -> kernel::fmt::Result {
        let end = self.0.iter().position(|byte| *byte == 0);
        let name = &self.0[..end.unwrap_or(self.0.len())];
        f.write_str(core::str::from_utf8(name).unwrap_or("?"))
    }
}

/// A count of a device that is registered: its driver's data stay, as unregistering waits.
///
/// Whoever has one gives it up before the device is unregistered, or soon after that has begun.
///
/// # Invariants
///
/// The pointer is a device that was registered, of which this value owns one count.
pub struct Hold<D: Driver>(NonNull<Device<D>>);

// SAFETY: A count may be given back by any task; `Device<D>` is `Send` and `Sync`.
unsafe impl<D: Driver> Send for Hold<D> {}
// SAFETY: It shows a `Device<D>`, which is `Sync`.
unsafe impl<D: Driver> Sync for Hold<D> {}

impl<D: Driver> Deref for Hold<D> {
    type Target = Device<D>;

    fn deref(&self) -> &Device<D> {
        // SAFETY: By the type invariant the device is counted, and freed only after it was unregistered, which
        // waits for the counts.
        unsafe { self.0.as_ref() }
    }
}

impl<D: Driver> Clone for Hold<D> {
    fn clone(&self) -> Self {
        self.hold()
    }
}

impl<D: Driver> Drop for Hold<D> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant we own a count, which is given back here and nowhere else.
        unsafe { bindings::dev_put(self.as_raw()) }
    }
}

impl<D: Driver> Ops<D> {
    pub(super) const fn with_driver(mut self) -> Self {
        self.netdev.ndo_open = Some(lifecycle::open::<D>);
        self.netdev.ndo_stop = Some(lifecycle::stop::<D>);
        self.netdev.ndo_start_xmit = Some(queues::start_xmit::<D>);
        self.netdev.ndo_validate_addr = Some(bindings::eth_validate_addr);
        self
    }
}
