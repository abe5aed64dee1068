// SPDX-License-Identifier: GPL-2.0

//! Other interfaces of this machine: taking frames that they receive, and sending frames through them.
//!
//! Frames are taken by a handler of received frames, of which an interface has one. It sees what comes from the
//! wire, before the machine's protocols do, and nothing of what is sent: neither by the machine, nor through the
//! [`Attachment`]. So nothing that is sent comes back by itself.
//!
//! The interface is held while it is there: where it is unregistered all that was asked of it is taken back, and
//! the attachment stays, without an interface.

use super::{
    DropReason, EthernetHeader, Frames, InterfaceName, LinkSettings, MacAddress, Rtnl, Skb,
    Statistics, VlanTag, PROTOCOL_VLAN,
};
use crate::bindings;
use crate::kernel_ext::errno::enobufs;
use core::ptr;
use kernel::container_of;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Full};
use kernel::sync::{new_mutex, rcu, Arc, Mutex};
use kernel::types::Opaque;

/// Who takes frames of an interface.
pub trait Upper: Send + Sync + 'static {
    /// The interface has received a frame. In softirqs.
    fn received(&self, frame: Received) -> Verdict;

    /// Something happened to the interface, which is like `state` now; that is `None` where it is gone. May sleep.
    fn event(&self, rtnl: &Rtnl, event: InterfaceEvent, state: Option<InterfaceState>);
}

/// What becomes of a frame that was received.
pub enum Verdict {
    /// The protocols of this machine get it.
    Pass(Received),
    /// It was taken.
    Taken,
}

/// What happened to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterfaceEvent {
    /// It was brought up.
    Up,
    /// It was brought down.
    Down,
    /// Its state, such as the carrier, changed.
    Change,
    /// Its MTU changed.
    ChangeMtu,
    /// Its address changed.
    ChangeMac,
    /// It is gone; it will not come back.
    Gone,
}

impl InterfaceEvent {
    fn from_raw(event: c_ulong) -> Option<Self> {
        Some(match u32::try_from(event).ok()? {
            bindings::netdev_cmd_NETDEV_UP => Self::Up,
            bindings::netdev_cmd_NETDEV_DOWN => Self::Down,
            bindings::netdev_cmd_NETDEV_CHANGE => Self::Change,
            bindings::netdev_cmd_NETDEV_CHANGEMTU => Self::ChangeMtu,
            bindings::netdev_cmd_NETDEV_CHANGEADDR => Self::ChangeMac,
            bindings::netdev_cmd_NETDEV_UNREGISTER => Self::Gone,
            _ => return None,
        })
    }
}

/// A frame that an interface has received.
///
/// # Invariants
///
/// Before the first byte of the buffer is the Ethernet header, all of it in one piece.
pub struct Received(Skb);

impl Received {
    /// Its Ethernet header.
    pub fn header(&self) -> EthernetHeader {
        // SAFETY: By the type invariant the header is there, before `data`.
        let bytes = unsafe {
            bindings::skb_data(self.0.as_raw())
                .sub(EthernetHeader::SIZE)
                .cast::<[u8; EthernetHeader::SIZE]>()
                .read()
        };
        EthernetHeader::from_bytes(&bytes)
    }

    /// Its tag, if it has one.
    pub fn vlan(&self) -> Option<VlanTag> {
        let raw = self.0.as_raw();
        // SAFETY: The buffer is valid. A tag is beside it by now, as the core takes it out of the frame before
        // handlers see that.
        unsafe {
            bindings::skb_vlan_tag_present(raw).then(|| {
                let protocol = u16::from_be(bindings::skb_vlan_proto(raw));
                VlanTag::new(protocol, bindings::skb_vlan_tag_get_id(raw))
            })
        }
    }

    /// Another owner of the same bytes.
    pub fn try_clone(&mut self) -> Result<Self> {
        // INVARIANT: A clone is the same in this.
        self.0.try_clone().map(Self)
    }

    /// The frames as they were on the wire; what the machine has merged (GRO) is cut again.
    pub fn into_frames(self) -> Result<Frames> {
        let Self(skb) = self;
        // SAFETY: By the type invariant there are so many bytes before the first one.
        unsafe { bindings::skb_push(skb.as_raw(), EthernetHeader::SIZE as c_uint) };
        skb.into_frames()
    }
}

/// Frames that an interface is to receive besides those that it receives anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// To another address, which is neither the interface's own nor wanted by anybody else (`EEXIST`).
    Unicast(MacAddress),
    /// To a group.
    Multicast(MacAddress),
    /// Of a VLAN, of which the machine has no interface of its own (`EBUSY`): that would get all frames of it.
    Vlan(u16),
    /// To all groups.
    AllMulticast,
    /// All.
    Promiscuous,
}

impl Want {
    /// # Safety
    ///
    /// `dev` must be a valid interface.
    unsafe fn add(&self, _rtnl: &Rtnl, dev: *mut bindings::net_device) -> Result {
        if let Self::Unicast(mac) = self {
            // SAFETY: The caller vouches for the interface, whose address does not change while RTNL is held; it has six
            // bytes, as the interface is Ethernet.
            let own = unsafe { bindings::netdev_dev_addr(dev).cast::<[u8; 6]>().read() };
            if mac.0 == own {
                return Err(EEXIST);
            }
        }
        if let Self::Vlan(vlan) = self {
            let _rcu = rcu::read_lock();
            // SAFETY: The caller vouches for the interface, and the RCU read lock is held. What is found is not used.
            let own =
                unsafe { bindings::__vlan_find_dev_deep_rcu(dev, PROTOCOL_VLAN.to_be(), *vlan) };
            if !own.is_null() {
                return Err(EBUSY);
            }
        }
        // SAFETY: The caller vouches for the interface, and RTNL is held.
        to_result(unsafe {
            match self {
                Self::Unicast(mac) => bindings::dev_uc_add_excl(dev, mac.0.as_ptr()),
                Self::Multicast(mac) => bindings::dev_mc_add(dev, mac.0.as_ptr()),
                Self::Vlan(vlan) => bindings::vlan_vid_add(dev, PROTOCOL_VLAN.to_be(), *vlan),
                Self::AllMulticast => bindings::dev_set_allmulti(dev, 1),
                Self::Promiscuous => bindings::dev_set_promiscuity(dev, 1),
            }
        })
    }

    /// # Safety
    ///
    /// As for [`Self::add`], which has succeeded once more than this was called.
    unsafe fn remove(&self, _rtnl: &Rtnl, dev: *mut bindings::net_device) {
        // SAFETY: The caller vouches for the interface, and RTNL is held.
        unsafe {
            match self {
                Self::Unicast(mac) => {
                    bindings::dev_uc_del(dev, mac.0.as_ptr());
                }
                Self::Multicast(mac) => {
                    bindings::dev_mc_del(dev, mac.0.as_ptr());
                }
                Self::Vlan(vlan) => bindings::vlan_vid_del(dev, PROTOCOL_VLAN.to_be(), *vlan),
                Self::AllMulticast => {
                    bindings::dev_set_allmulti(dev, -1);
                }
                Self::Promiscuous => {
                    bindings::dev_set_promiscuity(dev, -1);
                }
            }
        }
    }
}

/// # Invariants
///
/// - `dev` is null or an interface of which this owns a count, and whose handler of received frames is ours. It is
///   written with RTNL held. It becomes null a grace period of RCU before the count is given back.
/// - `wants` are those that were added to `dev`, and not removed. It is locked with RTNL held only.
#[pin_data]
struct Inner<U: Upper> {
    dev: Atomic<*mut bindings::net_device>,
    #[pin]
    wants: Mutex<KVec<Want>>,
    /// What its link was like when that was asked last.
    #[pin]
    link: Mutex<LinkSettings>,
    #[pin]
    notifier: Opaque<bindings::notifier_block>,
    #[pin]
    upper: U,
}

// SAFETY: An interface belongs to no task; `U` is `Send` and `Sync`.
unsafe impl<U: Upper> Send for Inner<U> {}
// SAFETY: `dev` is atomic, `wants` and `link` have locks; the notifier is the core's, which has locks of its own.
unsafe impl<U: Upper> Sync for Inner<U> {}

impl<U: Upper> Inner<U> {
    /// Runs `f` with the interface, if it is there.
    fn with<R>(&self, _rtnl: &Rtnl, f: impl FnOnce(*mut bindings::net_device) -> R) -> Option<R> {
        let dev = self.dev.load(Acquire);
        // By the type invariant it stays while RTNL is held.
        (!dev.is_null()).then(|| f(dev))
    }

    /// What it is like; `None` if it is gone. Takes the lock of the interface: not to be called by its notifiers, some
    /// of which have that.
    fn state(&self, rtnl: &Rtnl) -> Option<InterfaceState> {
        self.with(rtnl, |dev| {
            let mut link: bindings::ethtool_link_ksettings = pin_init::zeroed();
            // SAFETY: The interface stays while RTNL is held.
            let known = unsafe { bindings::__ethtool_get_link_ksettings(dev, &mut link) } == 0;
            self.note_link(known.then_some(&link));
        })?;
        self.state_but_link(rtnl)
    }

    /// The same, in a notifier of `event`.
    fn state_at(&self, rtnl: &Rtnl, event: InterfaceEvent) -> Option<InterfaceState> {
        // With other events it is not said who has the lock, so that the link is what it was.
        if matches!(event, InterfaceEvent::Up | InterfaceEvent::Change) {
            self.with(rtnl, |dev| {
                let mut link: bindings::ethtool_link_ksettings = pin_init::zeroed();
                // SAFETY: The interface stays while RTNL is held. Notifiers of these events are called with the lock of
                // the interface held, if it has one that operations need (Documentation/networking/netdevices.rst).
                let known = unsafe { bindings::netif_get_link_ksettings(dev, &mut link) } == 0;
                self.note_link(known.then_some(&link));
            });
        }
        self.state_but_link(rtnl)
    }

    fn note_link(&self, link: Option<&bindings::ethtool_link_ksettings>) {
        *self.link.lock() = link.map(LinkSettings::from_raw).unwrap_or_default();
    }

    /// What it is like, with the link that was noted last.
    fn state_but_link(&self, rtnl: &Rtnl) -> Option<InterfaceState> {
        self.with(rtnl, |dev| {
            let link = *self.link.lock();
            // SAFETY: The interface stays while RTNL is held; it has an address of six bytes, as it is Ethernet.
            unsafe {
                InterfaceState {
                    mac: MacAddress(bindings::netdev_dev_addr(dev).cast::<[u8; 6]>().read()),
                    mtu: bindings::netdev_mtu(dev),
                    is_up: bindings::netif_running(dev) && bindings::netif_carrier_ok(dev),
                    link,
                }
            }
        })
    }

    /// Lets go of the interface, if it is there.
    fn detach(&self, rtnl: &Rtnl) {
        let dev = self.dev.xchg(ptr::null_mut(), Full);
        if dev.is_null() {
            return;
        }
        let mut wants = self.wants.lock();
        for want in wants.iter() {
            // SAFETY: By the type invariant it is an interface that we have a count of, and this was added to it.
            unsafe { want.remove(rtnl, dev) };
        }
        wants.clear();
        drop(wants);
        // SAFETY: By the type invariant the handler is ours, and the count, too. Unregistering the handler waits for
        // a grace period: nobody uses either afterwards.
        unsafe {
            bindings::netdev_rx_handler_unregister(dev);
            bindings::dev_put(dev);
        }
    }

    /// # Safety
    ///
    /// To be called by the core as the notifier of an `Inner<U>`, with RTNL held.
    unsafe extern "C" fn notify(
        notifier: *mut bindings::notifier_block,
        event: c_ulong,
        info: *mut c_void,
    ) -> c_int {
        let notifier = notifier.cast::<Opaque<bindings::notifier_block>>();
        // SAFETY: The caller vouches for the notifier, which is unregistered before what it is part of goes.
        let this = unsafe { &*container_of!(notifier, Self, notifier) };
        // SAFETY: The information of a notifier of interfaces begins so for all events.
        let dev = unsafe { (*info.cast::<bindings::netdev_notifier_info>()).dev };
        if dev != this.dev.load(Acquire) {
            return bindings::NOTIFY_DONE as c_int;
        }
        // SAFETY: The caller vouches that RTNL is held.
        let rtnl = unsafe { Rtnl::assume_held() };
        if let Some(event) = InterfaceEvent::from_raw(event) {
            if event == InterfaceEvent::Gone {
                this.detach(&rtnl);
            }
            this.upper.event(&rtnl, event, this.state_at(&rtnl, event));
        }
        bindings::NOTIFY_DONE as c_int
    }

    /// # Safety
    ///
    /// To be called by the core as the handler of received frames of an interface that an `Inner<U>` is the data of.
    unsafe extern "C" fn received(
        slot: *mut *mut bindings::sk_buff,
    ) -> bindings::rx_handler_result_t {
        // SAFETY: The caller vouches for the buffer, whose count passes to this. It may have others.
        let shared = unsafe { *slot };
        // SAFETY: The buffer is valid, and its count ours. It passes to the function, and that of its result to us.
        let skb = unsafe { Skb::from_raw(bindings::skb_share_check(shared, bindings::GFP_ATOMIC)) };
        let Some(skb) = skb else {
            return bindings::rx_handler_result_RX_HANDLER_CONSUMED;
        };
        // SAFETY: The buffer is valid, and of an interface, whose handler's data are an `Inner<U>`: that waits for a
        // grace period before it goes, and handlers are called under the RCU read lock.
        let this =
            unsafe { &*bindings::rx_handler_data(bindings::skb_dev(skb.as_raw())).cast::<Self>() };
        // SAFETY: The buffer is valid.
        let behind_header = unsafe {
            bindings::skb_mac_header_was_set(skb.as_raw()) != 0
                && bindings::skb_mac_offset(skb.as_raw()) == -(EthernetHeader::SIZE as c_int)
        };
        let verdict = if behind_header {
            // INVARIANT: The header of the frame is right before its first byte, where the interface's driver had
            // it in one piece for `eth_type_trans`.
            this.upper.received(Received(skb))
        } else {
            Verdict::Pass(Received(skb))
        };
        match verdict {
            Verdict::Pass(Received(skb)) => {
                // SAFETY: The caller takes what is here; the count passes back to it.
                unsafe { *slot = skb.into_raw() };
                bindings::rx_handler_result_RX_HANDLER_PASS
            }
            Verdict::Taken => bindings::rx_handler_result_RX_HANDLER_CONSUMED,
        }
    }
}

/// The smallest protocol; what is below is the length of a frame.
const ETH_P_802_3_MIN: u16 = bindings::ETH_P_802_3_MIN as u16;
/// What the protocol of such frames is for those who sort them.
const ETH_P_802_2: u16 = bindings::ETH_P_802_2 as u16;

/// An interface of which frames are taken, until this is dropped.
///
/// # Invariants
///
/// The notifier of `inner` is registered.
pub struct Attachment<U: Upper> {
    inner: Arc<Inner<U>>,
}

impl<U: Upper> Attachment<U> {
    /// Attaches to the Ethernet interface of that name, of the initial network namespace. `ENODEV` where there is none,
    /// `EBUSY` if it has another handler of received frames (it is part of a bridge, say). Takes RTNL.
    pub fn new<E>(name: &CStr, upper: impl PinInit<U, E>) -> Result<Self>
    where
        Error: From<E>,
    {
        let inner = Arc::<Inner<U>>::pin_init::<Error>(
            // INVARIANT: There is no interface yet.
            try_pin_init!(Inner {
                dev: Atomic::new(ptr::null_mut()),
                wants <- new_mutex!(KVec::new()),
                link <- new_mutex!(LinkSettings::default()),
                notifier: Opaque::new(bindings::notifier_block {
                    notifier_call: Some(Inner::<U>::notify),
                    ..pin_init::zeroed()
                }),
                upper <- upper,
            }? Error),
            GFP_KERNEL,
        )?;
        // First, so that nothing is missed. Until there is an interface it does nothing.
        // SAFETY: The notifier is part of what does not move, and is unregistered before that goes.
        to_result(unsafe { bindings::register_netdevice_notifier(inner.notifier.get()) })?;
        // INVARIANT: Registered just now.
        let this = Self { inner };
        Rtnl::with(|rtnl| this.attach(rtnl, name))?;
        Ok(this)
    }

    /// To be called once.
    fn attach(&self, _rtnl: &Rtnl, name: &CStr) -> Result {
        // SAFETY: The initial namespace is static, and the name a C string. The count of what is found is ours.
        let dev = unsafe {
            bindings::dev_get_by_name(ptr::addr_of_mut!(bindings::init_net), name.as_char_ptr())
        };
        if dev.is_null() {
            return Err(ENODEV);
        }
        // SAFETY: The interface is counted.
        let registered = if unsafe { bindings::netdev_type(dev) } == bindings::ARPHRD_ETHER as u16 {
            let data = Arc::as_ptr(&self.inner).cast_mut().cast();
            // SAFETY: The interface is counted, and RTNL is held. The data stay until the handler was unregistered, by
            // `detach`, which dropping `self` calls.
            to_result(unsafe {
                bindings::netdev_rx_handler_register(dev, Some(Inner::<U>::received), data)
            })
        } else {
            Err(EINVAL)
        };
        match registered {
            Ok(()) => {
                // Frames that the adapter has joined could not be cut again; a bridge does the same.
                // SAFETY: The interface is counted, and RTNL is held.
                unsafe { bindings::dev_disable_lro(dev) };
                // INVARIANT: Count and handler are ours, and RTNL is held.
                self.inner.dev.store(dev, kernel::sync::atomic::Release)
            }
            // SAFETY: Counted above, and not used afterwards.
            Err(_) => unsafe { bindings::dev_put(dev) },
        }
        registered
    }

    /// Who takes the frames.
    pub fn upper(&self) -> &U {
        &self.inner.upper
    }

    /// Something that does all that an attachment does but end it.
    pub fn handle(&self) -> Handle<U> {
        Handle {
            inner: self.inner.clone(),
        }
    }
}

impl<U: Upper> Drop for Attachment<U> {
    fn drop(&mut self) {
        Rtnl::with(|rtnl| self.inner.detach(rtnl));
        // SAFETY: By the type invariant the notifier is registered. It is not called any more when this returns.
        unsafe { bindings::unregister_netdevice_notifier(self.inner.notifier.get()) };
    }
}

/// Who uses an interface that somebody is attached to, as long as that is so.
pub struct Handle<U: Upper> {
    inner: Arc<Inner<U>>,
}

impl<U: Upper> Clone for Handle<U> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

/// What an interface is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceState {
    /// Its address.
    pub mac: MacAddress,
    /// Its MTU.
    pub mtu: u32,
    /// Whether it is up and has a carrier.
    pub is_up: bool,
    /// What its link is like.
    pub link: LinkSettings,
}

impl<U: Upper> Handle<U> {
    /// Who takes the frames.
    pub fn upper(&self) -> &U {
        &self.inner.upper
    }

    /// A socket buffer for a frame that is to be sent through it, with room for `len` bytes.
    pub fn allocate(&self, len: usize) -> Result<Skb> {
        let _rcu = rcu::read_lock();
        // SAFETY: By the type invariant of `Inner` it stays until the RCU read lock is given up, and the socket buffer
        // is given another before it is used.
        unsafe { Skb::for_raw_device(self.inner.dev.load(Acquire), len) }
    }

    /// Sends a frame, which begins with its Ethernet header. `ENODEV` if the interface is gone, `EINVAL` where the
    /// frame is too short, `ENOBUFS` where the interface is down or the frame was dropped on the way. From any context
    /// but interrupts.
    pub fn send(&self, skb: Skb) -> Result {
        let header = match skb.ethernet_header() {
            Some(header) if skb.linear().len() >= EthernetHeader::SIZE => header,
            _ => {
                skb.discard(DropReason::BadHeader);
                return Err(EINVAL);
            }
        };
        // What is smaller is a length (IEEE 802.3), as `eth_type_trans` has it.
        let protocol = match header.protocol {
            ..ETH_P_802_3_MIN => ETH_P_802_2,
            protocol => protocol,
        };
        let _rcu = rcu::read_lock();
        let dev = self.inner.dev.load(Acquire);
        if dev.is_null() {
            skb.discard(DropReason::NotReady);
            return Err(ENODEV);
        }
        // SAFETY: By the type invariant of `Inner` the interface stays until the RCU read lock is given up.
        if !unsafe { bindings::netif_running(dev) && bindings::netif_carrier_ok(dev) } {
            skb.discard(DropReason::NotReady);
            return Err(enobufs());
        }
        // SAFETY: The buffer is ours. By the type invariant of `Inner` the interface stays until the RCU read lock is
        // given up; what it queues then is its own matter. The count passes to the last function.
        let sent = unsafe {
            bindings::skb_set_dev(skb.as_raw(), dev);
            bindings::skb_set_protocol(skb.as_raw(), protocol.to_be());
            bindings::skb_reset_mac_header(skb.as_raw());
            bindings::skb_set_network_header(skb.as_raw(), EthernetHeader::SIZE as c_int);
            bindings::dev_queue_xmit(skb.into_raw())
        };
        // Congestion is not an error (`net_xmit_errno`).
        match sent as u32 {
            bindings::NET_XMIT_SUCCESS | bindings::NET_XMIT_CN => Ok(()),
            _ => Err(enobufs()),
        }
    }

    /// What it is like; `None` if it is gone. Not for [`Upper::event`], which is told.
    pub fn state(&self, rtnl: &Rtnl) -> Option<InterfaceState> {
        self.inner.state(rtnl)
    }

    /// What it has counted; `None` if it is gone.
    pub fn statistics(&self) -> Option<Statistics> {
        let _rcu = rcu::read_lock();
        let dev = self.inner.dev.load(Acquire);
        if dev.is_null() {
            return None;
        }
        let mut raw = pin_init::zeroed();
        // SAFETY: By the type invariant of `Inner` the interface stays until the RCU read lock is given up, which is
        // enough for this function, as `/proc/net/dev` has no more; it fills in what it is given.
        unsafe { bindings::dev_get_stats(dev, &mut raw) };
        Some(Statistics::from_raw(&raw))
    }

    /// Its name; `None` if it is gone.
    pub fn name(&self, rtnl: &Rtnl) -> Option<InterfaceName> {
        self.inner.with(rtnl, |dev| {
            // SAFETY: The interface stays while RTNL is held.
            unsafe { InterfaceName::of(dev) }
        })
    }

    /// Has it receive more frames, until the result is dropped. `ENODEV` if it is gone. Takes RTNL.
    pub fn want(&self, want: Want) -> Result<Wanted<U>> {
        Rtnl::with(|rtnl| {
            self.inner
                .with(rtnl, |dev| {
                    let mut wants = self.inner.wants.lock();
                    wants.reserve(1, GFP_KERNEL)?;
                    // SAFETY: The interface stays while RTNL is held.
                    unsafe { want.add(rtnl, dev) }?;
                    // INVARIANT: Added just now. There is room.
                    let _ = wants.push(want, GFP_KERNEL);
                    Ok(())
                })
                .unwrap_or(Err(ENODEV))
        })?;
        Ok(Wanted {
            inner: self.inner.clone(),
            want,
            is_over: false,
        })
    }
}

/// Frames that an interface receives for somebody, until this is dropped, which takes RTNL.
pub struct Wanted<U: Upper> {
    inner: Arc<Inner<U>>,
    want: Want,
    /// Whether it was given up.
    is_over: bool,
}

impl<U: Upper> Wanted<U> {
    /// Which they are.
    pub fn want(&self) -> Want {
        self.want
    }

    /// Gives up all of these, as dropping them does, but takes RTNL once.
    pub fn give_up(mut all: KVec<Self>) {
        Rtnl::with(|rtnl| all.iter_mut().for_each(|wanted| wanted.end(rtnl)));
        // Only now: the end of the attachment's user, where these are the last to know him, may take RTNL itself.
        drop(all);
    }

    fn end(&mut self, rtnl: &Rtnl) {
        self.is_over = true;
        self.inner.with(rtnl, |dev| {
            let mut wants = self.inner.wants.lock();
            if let Some(index) = wants.iter().position(|want| *want == self.want) {
                // SAFETY: The interface stays while RTNL is held; by the type invariant it was added.
                unsafe { self.want.remove(rtnl, dev) };
                // INVARIANT: Removed just now.
                let _ = wants.remove(index);
            }
        });
    }
}

impl<U: Upper> Drop for Wanted<U> {
    fn drop(&mut self) {
        if !self.is_over {
            Rtnl::with(|rtnl| self.end(rtnl));
        }
    }
}
