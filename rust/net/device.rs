// SPDX-License-Identifier: GPL-2.0

//! Network devices of a driver.
//!
//! What a callback sees is there: the driver's data are dropped after the device was unregistered, which waits for
//! callbacks, for NAPI and for all who [hold](Hold) it; and they are in one allocation with the core's structure.

use super::{MacAddress, Napi, Ops, Rtnl, Skb, PROTOCOL_SERVICE_VLAN};
use crate::bindings;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use kernel::device;
use kernel::devres::Devres;
use kernel::error::{from_result, to_result};
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

/// What is counted of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Frames received.
    pub rx_packets: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bad frames received.
    pub rx_errors: u64,
    /// Frames that could not be sent.
    pub tx_errors: u64,
    /// Frames received for which there was no room.
    pub rx_dropped: u64,
    /// Frames to be sent for which there was no room.
    pub tx_dropped: u64,
    /// Multicast frames received.
    pub multicast: u64,
}

impl Statistics {
    pub(super) fn from_raw(raw: &bindings::rtnl_link_stats64) -> Self {
        Self {
            rx_packets: raw.rx_packets,
            tx_packets: raw.tx_packets,
            rx_bytes: raw.rx_bytes,
            tx_bytes: raw.tx_bytes,
            rx_errors: raw.rx_errors,
            tx_errors: raw.tx_errors,
            rx_dropped: raw.rx_dropped,
            tx_dropped: raw.tx_dropped,
            multicast: raw.multicast,
        }
    }

    fn write_to(&self, raw: &mut bindings::rtnl_link_stats64) {
        raw.rx_packets = self.rx_packets;
        raw.tx_packets = self.tx_packets;
        raw.rx_bytes = self.rx_bytes;
        raw.tx_bytes = self.tx_bytes;
        raw.rx_errors = self.rx_errors;
        raw.tx_errors = self.tx_errors;
        raw.rx_dropped = self.rx_dropped;
        raw.tx_dropped = self.tx_dropped;
        raw.multicast = self.multicast;
    }
}

/// A driver that counts.
pub trait StatisticsOps: Driver {
    /// What was counted so far. Must not sleep.
    fn statistics(dev: &Device<Self>) -> Statistics;
}

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

/// A device whose [offloads](Offloads) do not only concern frames of the driver's: some are set in the device.
pub trait OffloadOps: Driver {
    /// Others are wanted, of those that it has. May sleep.
    fn set_offloads(dev: &Device<Self>, rtnl: &Rtnl, wanted: Offloads) -> Result;
}

/// A device that cuts frames into segments, but not every one.
pub trait SegmentOps: Driver {
    /// Whether it can cut this one, which is of IP, behind tags of 802.1Q at most; else that is done before. In softirqs, or
    /// with bottom halves disabled.
    fn can_segment(dev: &Device<Self>, frame: &ToSegment) -> bool;
}

/// A frame that is to be cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToSegment {
    /// Bytes of data in each.
    pub size: u16,
    /// Bytes of all of it.
    pub length: usize,
    /// Bytes of the header of IP, with options and extensions.
    pub ip_header: usize,
    /// Whether that is of version 6.
    pub is_ipv6: bool,
}

/// A driver that wants to know of queues that are stuck.
pub trait TimeoutOps: Driver {
    /// A queue was [stopped](Device::stop_queue) for seconds, while there was a carrier. In softirqs.
    fn tx_timeout(dev: &Device<Self>, queue: u16);
}

/// What a device does for who sends and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u64);

impl Offloads {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Frames that are to be sent may be in several pieces.
    pub const SCATTER_GATHER: Self = Self(1 << bindings::NETIF_F_SG_BIT);
    /// It computes a checksum, wherever that is in a frame.
    pub const CHECKSUM: Self = Self(1 << bindings::NETIF_F_HW_CSUM_BIT);
    /// It cuts streams of TCP into segments, over both versions of IP. Needs the two above.
    pub const TCP_SEGMENTATION: Self =
        Self(1 << bindings::NETIF_F_TSO_BIT | 1 << bindings::NETIF_F_TSO6_BIT);
    /// It inserts tags of VLANs.
    pub const VLAN_INSERT: Self = Self(1 << bindings::NETIF_F_HW_VLAN_CTAG_TX_BIT);
    /// It takes tags of VLANs out.
    pub const VLAN_STRIP: Self = Self(1 << bindings::NETIF_F_HW_VLAN_CTAG_RX_BIT);
    /// It checks checksums of what it receives.
    pub const RX_CHECKSUM: Self = Self(1 << bindings::NETIF_F_RXCSUM_BIT);
    /// It computes a hash over the addresses and ports of what it receives.
    pub const RX_HASH: Self = Self(1 << bindings::NETIF_F_RXHASH_BIT);

    /// Those of frames that have a tag as well.
    const OF_VLANS: Self = Self::SCATTER_GATHER
        .with(Self::CHECKSUM)
        .with(Self::TCP_SEGMENTATION);

    /// These and others.
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Whether all of those are among these.
    pub const fn has(self, those: Self) -> bool {
        self.0 & those.0 == those.0
    }
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

    /// Whether it is up.
    pub fn is_running(&self) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_running(self.as_raw()) }
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

    fn check_queue(&self, queue: u16) -> bool {
        // SAFETY: The reference keeps the device; the number does not change.
        u32::from(queue) < unsafe { bindings::netdev_num_tx_queues(self.as_raw()) }
    }

    /// No more frames are to be sent by a queue.
    ///
    /// What makes room may have happened meanwhile: who stops a queue looks once more, and
    /// [wakes](Self::wake_queue) it if there is room.
    pub fn stop_queue(&self, queue: u16) {
        if self.check_queue(queue) {
            // SAFETY: The reference keeps the device, which has that queue.
            unsafe { bindings::netif_stop_subqueue(self.as_raw(), queue) };
            // What made room looks whether the queue is stopped, after it has; this looks for room next.
            kernel::sync::barrier::smp_mb();
        }
    }

    /// Frames may be sent by a queue again, if it was stopped. May be called from any context.
    pub fn wake_queue(&self, queue: u16) {
        if !self.check_queue(queue) {
            return;
        }
        kernel::sync::barrier::smp_mb();
        // SAFETY: The reference keeps the device, which has that queue.
        unsafe {
            if bindings::netif_subqueue_stopped(self.as_raw(), queue) {
                bindings::netif_wake_subqueue(self.as_raw(), queue);
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

    /// Whether another frame is to be sent at once after the one that is being sent, so that the device need not be told
    /// of it before. To be called by `start_xmit`.
    pub fn has_more_to_send(&self) -> bool {
        // SAFETY: The function looks at a word of this processor, or of this task.
        unsafe { bindings::netdev_xmit_more() }
    }

    /// Its offloads that are on.
    #[inline]
    pub fn offloads(&self) -> Offloads {
        // SAFETY: The reference keeps the device.
        Offloads(unsafe { bindings::netdev_features(self.as_raw()) })
    }

    /// By how many of its queues it sends now.
    pub fn tx_queues(&self) -> u16 {
        // SAFETY: The reference keeps the device. The number is that of `Config` at most.
        unsafe { bindings::netdev_real_num_tx_queues(self.as_raw()) as u16 }
    }

    /// From now on it sends and receives by so many queues, of those that it was made with.
    pub fn set_queues(&self, _rtnl: &Rtnl, queues: u16) -> Result {
        let queues = queues.into();
        // SAFETY: The reference keeps the device, and RTNL is held. The function looks whether it has so many, and sets
        // both numbers or neither.
        to_result(unsafe { bindings::netif_set_real_num_queues(self.as_raw(), queues, queues) })
    }

    /// Whether the driver may be given a frame of a queue; where not the queue is stopped. The caller has the queue's lock.
    #[inline]
    fn may_send(&self, queue: u16) -> bool {
        self.private().started.load(Relaxed) == STARTED || self.stop_woken(queue)
    }

    /// A queue sends of a device that is stopped: it was woken by who could not know. Whether it was started meanwhile.
    #[cold]
    fn stop_woken(&self, queue: u16) -> bool {
        self.stop_queue(queue);
        // Who starts it says so before he wakes all queues, and this looks after it has stopped one.
        let started = self.private().started.load(Relaxed) == STARTED;
        if started {
            self.wake_queue(queue);
        }
        started
    }

    /// Has the driver open it, and queues polled and frames sent. `EBUSY` where the driver asks for that while it is told
    /// to open or to stop it.
    fn start(&self, rtnl: &Rtnl) -> Result {
        let started = &self.private().started;
        match started.load(Relaxed) {
            STARTED => return Ok(()),
            CHANGING => return Err(EBUSY),
            _ => {}
        }
        started.store(CHANGING, Relaxed);
        D::open(self, rtnl).inspect_err(|_| started.store(STOPPED, Relaxed))?;
        started.store(STARTED, Relaxed);
        for napi in self.napis() {
            // SAFETY: It was added when the device was made, and is disabled, as the device was not started.
            unsafe { bindings::napi_enable(napi.as_raw()) };
        }
        // Frames may wait that came while it was stopped: nobody else has them sent.
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_tx_wake_all_queues(self.as_raw()) };
        for napi in self.napis() {
            // What happened before it was enabled has told nobody.
            napi.schedule_from_task();
        }
        Ok(())
    }

    /// Has no frames sent and no queue polled any more, and the driver stop it, unless that is so, or about to be.
    fn halt(&self, rtnl: &Rtnl) {
        let started = &self.private().started;
        if started.load(Relaxed) != STARTED {
            return;
        }
        started.store(CHANGING, Relaxed);
        // SAFETY: The reference keeps the device. When this returns nobody is in `start_xmit`; nor will anybody be, as it
        // has had the lock of each queue since the device was said not to be started.
        unsafe { bindings::netif_tx_disable(self.as_raw()) };
        for napi in self.napis() {
            // SAFETY: It was enabled when the device was started. When this returns it is not polled, nor will be.
            unsafe { bindings::napi_disable(napi.as_raw()) };
        }
        D::stop(self, rtnl);
        started.store(STOPPED, Relaxed);
    }

    /// Whether there is hardware behind it: not where it was [detached](Self::detach) and not attached since.
    pub fn is_present(&self) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_device_present(self.as_raw()) }
    }

    /// Opens it where it is up, has [hardware](Self::detach) and could not be [restarted](Self::restart).
    pub fn reopen(&self, rtnl: &Rtnl) -> Result {
        if self.is_running() && self.is_present() {
            self.start(rtnl)?;
        }
        Ok(())
    }

    /// Makes a change that its queues must not see: where it is up it is stopped before and opened afterwards, which may
    /// fail. It has no queues that are polled then, until it is [opened again](Self::reopen), or brought down and up.
    pub fn restart<R>(&self, rtnl: &Rtnl, change: impl FnOnce() -> R) -> Result<R> {
        let started = self.private().started.load(Relaxed) == STARTED;
        self.halt(rtnl);
        let result = change();
        if started {
            self.start(rtnl)?;
        }
        Ok(result)
    }

    /// There is no hardware behind it any more: where it is up it is stopped, and users are told `ENODEV` until there is
    /// ([`Self::attach`]). What they have set of it stays. When this returns no queue is found to be
    /// [stuck](TimeoutOps::tx_timeout), nor will be.
    pub fn detach(&self, rtnl: &Rtnl) {
        // SAFETY: The reference keeps the device. The watchdog, which looks for queues that are stuck where there is
        // hardware, has the lock that the second function takes: also of a device that is up and could not be opened.
        unsafe {
            bindings::netif_device_detach(self.as_raw());
            bindings::netif_tx_disable(self.as_raw());
        }
        self.halt(rtnl);
    }

    /// There is hardware behind it, again: where it is up it is opened, and told again which frames are wanted. Where it
    /// cannot be opened it stays detached.
    pub fn attach(&self, rtnl: &Rtnl) -> Result {
        let running = self.is_running();
        if running {
            self.start(rtnl)?;
        }
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_device_attach(self.as_raw()) };
        if running {
            // What was wanted meanwhile was not told to a device that was not there, and nobody tells it later. Setting
            // the flags has that done, also where they are what they were.
            // SAFETY: The reference keeps the device, which is up, and so registered; RTNL is held.
            unsafe {
                let flags = bindings::netif_get_flags(self.as_raw());
                bindings::dev_change_flags(self.as_raw(), flags, ptr::null_mut());
            }
        }
        Ok(())
    }

    fn is_registered(&self, _rtnl: &Rtnl) -> bool {
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

    /// From now on frames that it cuts into segments have at most so many bytes.
    pub fn set_most_to_segment(&self, _rtnl: &Rtnl, bytes: u32) {
        // SAFETY: The reference keeps the device; RTNL is what changes of the field are made under.
        unsafe { bindings::netif_set_tso_max_size(self.as_raw(), bytes) }
    }

    /// From now on its MTU is at most this. What it is stays.
    pub fn set_max_mtu(&self, _rtnl: &Rtnl, mtu: u32) {
        // SAFETY: The reference keeps the device; RTNL is what changes of the field are made under.
        unsafe { bindings::netdev_set_max_mtu(self.as_raw(), mtu) }
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
            // SAFETY: It was added by `new`, and is disabled, as the device is not up.
            unsafe { bindings::netif_napi_del(napi.as_raw()) };
        }
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

impl<D: Driver> Ops<D> {
    pub(super) const fn with_driver(mut self) -> Self {
        self.netdev.ndo_open = Some(open::<D>);
        self.netdev.ndo_stop = Some(stop::<D>);
        self.netdev.ndo_start_xmit = Some(start_xmit::<D>);
        self.netdev.ndo_validate_addr = Some(bindings::eth_validate_addr);
        self
    }
}

impl<D: StatisticsOps> Ops<D> {
    /// Has the driver asked for what it has counted.
    pub const fn with_statistics(mut self) -> Self {
        self.netdev.ndo_get_stats64 = Some(get_stats64::<D>);
        self
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

impl<D: RxModeOps> Ops<D> {
    /// Has the driver told which frames are wanted.
    pub const fn with_rx_mode(mut self) -> Self {
        self.netdev.ndo_set_rx_mode_async = Some(set_rx_mode::<D>);
        self
    }
}

impl<D: OffloadOps> Ops<D> {
    /// Has the driver told of offloads that are turned on or off.
    pub const fn with_offloads(mut self) -> Self {
        self.netdev.ndo_set_features = Some(set_features::<D>);
        self
    }
}

impl<D: SegmentOps> Ops<D> {
    /// Has the driver asked which frames the device can cut; without, it is given all that are not too long.
    pub const fn with_segments(mut self) -> Self {
        self.netdev.ndo_features_check = Some(features_check::<D>);
        self
    }
}

impl<D: TimeoutOps> Ops<D> {
    /// Has the driver told of queues that are stuck.
    pub const fn with_timeout(mut self) -> Self {
        self.netdev.ndo_tx_timeout = Some(tx_timeout::<D>);
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

// All of these: the core calls them with a device of the table's driver, which is registered or being registered or
// unregistered, so that it stays until they return.

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held.
unsafe extern "C" fn open<D: Driver>(dev: *mut bindings::net_device) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| device.start(&rtnl).map(|()| 0))
}

/// # Safety
///
/// As for [`open`].
unsafe extern "C" fn stop<D: Driver>(dev: *mut bindings::net_device) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    device.halt(&rtnl);
    0
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with a buffer whose count passes to this.
unsafe extern "C" fn start_xmit<D: Driver>(
    skb: *mut bindings::sk_buff,
    dev: *mut bindings::net_device,
) -> bindings::netdev_tx_t {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    // SAFETY: The caller passes its count. It is the only one, as the device does not have `IFF_TX_SKB_SHARING`, and
    // the buffer was taken out of its list.
    let Some(owned) = (unsafe { Skb::from_raw(skb) }) else {
        return bindings::netdev_tx_NETDEV_TX_OK;
    };
    let given = if device.may_send(owned.queue()) {
        D::start_xmit(device, owned)
    } else {
        Xmit::Busy(owned)
    };
    match given {
        Xmit::Busy(back) if back.as_raw() == skb => {
            // The core has it again.
            let _ = back.into_raw();
            bindings::netdev_tx_NETDEV_TX_BUSY
        }
        // Of another one the core knows nothing; its own is gone.
        Xmit::Taken | Xmit::Busy(_) => bindings::netdev_tx_NETDEV_TX_OK,
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with statistics to be filled in.
unsafe extern "C" fn get_stats64<D: StatisticsOps>(
    dev: *mut bindings::net_device,
    storage: *mut bindings::rtnl_link_stats64,
) {
    // SAFETY: The caller vouches for both.
    let (device, storage) = unsafe { (Device::<D>::from_raw(dev), &mut *storage) };
    D::statistics(device).write_to(storage);
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

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held.
unsafe extern "C" fn set_features<D: OffloadOps>(
    dev: *mut bindings::net_device,
    features: bindings::netdev_features_t,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| D::set_offloads(device, &rtnl, Offloads(features)).map(|()| 0))
}

/// Whether a frame is of IP, behind tags of 802.1Q at most, that has a tag of protocol `beside` it, `outer` behind its
/// addresses, and `inner` behind all tags that are there.
pub(super) fn is_ip_behind_tag(beside: Option<u16>, outer: u16, inner: u16) -> bool {
    beside != Some(PROTOCOL_SERVICE_VLAN)
        && outer != PROTOCOL_SERVICE_VLAN
        && matches!(u32::from(inner), bindings::ETH_P_IP | bindings::ETH_P_IPV6)
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with a buffer that is to be sent by it.
unsafe extern "C" fn features_check<D: SegmentOps>(
    skb: *mut bindings::sk_buff,
    dev: *mut bindings::net_device,
    features: bindings::netdev_features_t,
) -> bindings::netdev_features_t {
    // SAFETY: The caller vouches for both.
    let (device, features) = unsafe {
        (
            Device::<D>::from_raw(dev),
            bindings::vlan_features_check(skb, features),
        )
    };
    // SAFETY: The caller vouches for the buffer.
    if !unsafe { bindings::skb_is_gso(skb) } {
        return features;
    }
    // SAFETY: The caller vouches for the buffer, which as one that is to be cut has headers.
    let frame = unsafe {
        let ip = bindings::skb_network_offset(skb);
        ToSegment {
            size: bindings::skb_gso_size(skb),
            length: bindings::skb_length(skb) as usize,
            ip_header: (bindings::skb_transport_offset(skb) - ip).max(0) as usize,
            is_ipv6: bindings::skb_gso_type(skb) & bindings::SKB_GSO_TCPV6 as u32 != 0,
        }
    };
    // SAFETY: The caller vouches for the buffer.
    let (beside, outer, inner) = unsafe {
        (
            bindings::skb_vlan_tag_present(skb)
                .then(|| u16::from_be(bindings::skb_vlan_proto(skb))),
            u16::from_be(bindings::skb_protocol_field(skb)),
            u16::from_be(bindings::vlan_get_protocol(skb)),
        )
    };
    if is_ip_behind_tag(beside, outer, inner) && D::can_segment(device, &frame) {
        features
    } else {
        // SAFETY: The function gives a constant.
        features & !unsafe { bindings::netif_f_gso_mask() }
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`.
unsafe extern "C" fn tx_timeout<D: TimeoutOps>(dev: *mut bindings::net_device, queue: c_uint) {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    D::tx_timeout(device, queue as u16);
}
