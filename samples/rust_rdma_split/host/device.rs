// SPDX-License-Identifier: GPL-2.0

//! The network device of a host.

use super::agent::Agent;
use super::{refuse, Wire};
use crate::frames::{MAX_MTU, OVERHEAD};
use crate::kernel_ext::ratelimit::RateLimit;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::link::{self, Link};
use crate::net::{
    netdev_info, Device, DriverInfo, DropReason, EthtoolOps, LinkSettings, MacAddress, MacOps,
    MtuOps, NapiOps, Ops, PollContext, Rtnl, RxMode, RxModeOps, Skb, SkbQueue, Statistics,
    StatisticsNames, StatisticsOps, VlanOps, Xmit,
};
use crate::protocol::{
    Link as FarLink, Statistics as FarStatistics, Unsent, FILTER_ALL_MULTICAST, FILTER_PROMISCUOUS,
    LINK_FULL_DUPLEX, LINK_UP,
};
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::{new_mutex, Arc, Mutex, SetOnce};

/// Groups that the I/O unit is told of one by one; where there are more all groups are wanted.
pub(super) const MOST_GROUPS: usize = 64;

/// A number that grows.
pub(super) struct Counter(Atomic<u64>);

impl Counter {
    const fn new() -> Self {
        Self(Atomic::new(0))
    }

    pub(super) fn add(&self, number: usize) {
        self.0.fetch_add(number as u64, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What the device counts.
pub(super) struct Counters {
    rx_packets: Counter,
    tx_packets: Counter,
    rx_bytes: Counter,
    tx_bytes: Counter,
    pub(super) rx_dropped: Counter,
    pub(super) tx_dropped: Counter,
    multicast: Counter,
    /// How often the queue was stopped for want of room at the I/O unit.
    queue_stopped: Counter,
}

/// Which frames are wanted.
pub(super) struct Wishes {
    pub(super) groups: KVec<MacAddress>,
    pub(super) vlans: KVec<u16>,
    /// `FILTER_*`.
    pub(super) flags: u32,
}

/// What is known of the far interface.
#[derive(Clone, Copy)]
pub(super) struct Far {
    pub(super) link: FarLink,
    pub(super) statistics: FarStatistics,
}

/// What the carrier depends on, besides the far link. It is set with this held.
pub(super) struct Standing {
    /// Counts connections that came or went.
    pub(super) connection: u32,
    /// Whether the far interface was brought in line with this one since the connection came up.
    is_configured: bool,
}

/// The driver's data.
#[pin_data]
pub struct Split {
    pub(super) link: SetOnce<Link<Wire>>,
    pub(super) agent: SetOnce<Arc<Agent>>,
    /// Frames that NAPI has not seen yet.
    #[pin]
    pub(super) arrived: SkbQueue,
    pub(super) counters: Counters,
    threshold: Atomic<u32>,
    #[pin]
    pub(super) wishes: Mutex<Wishes>,
    #[pin]
    pub(super) far: IrqSpinLock<Far>,
    /// Before `far`.
    #[pin]
    pub(super) standing: Mutex<Standing>,
    /// What the I/O unit makes this machine say.
    #[pin]
    pub(super) said: RateLimit,
}

impl Split {
    pub(super) fn new(threshold: u32) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            link: SetOnce::new(),
            agent: SetOnce::new(),
            arrived <- SkbQueue::new(),
            counters: Counters {
                rx_packets: Counter::new(),
                tx_packets: Counter::new(),
                rx_bytes: Counter::new(),
                tx_bytes: Counter::new(),
                rx_dropped: Counter::new(),
                tx_dropped: Counter::new(),
                multicast: Counter::new(),
                queue_stopped: Counter::new(),
            },
            threshold: Atomic::new(threshold),
            wishes <- new_mutex!(Wishes {
                groups: KVec::new(),
                vlans: KVec::new(),
                flags: 0,
            }),
            far <- new_irq_spinlock!(Far {
                link: FarLink { flags: 0, speed: 0, mtu: 0 },
                statistics: FarStatistics {
                    rx_packets: 0,
                    tx_packets: 0,
                    rx_bytes: 0,
                    tx_bytes: 0,
                    rx_errors: 0,
                    tx_errors: 0,
                    rx_dropped: 0,
                    tx_dropped: 0,
                    multicast: 0,
                },
            }),
            standing <- new_mutex!(Standing {
                connection: 0,
                is_configured: false,
            }),
            said <- RateLimit::new(),
        })
    }

    /// Has the I/O unit told of what has changed, soon.
    fn tell(&self) {
        if let Some(agent) = self.agent.as_ref() {
            agent.kick();
        }
    }
}

impl Device<Split> {
    /// Has what arrived received.
    pub(super) fn poll_soon(&self) {
        for napi in self.napis() {
            napi.schedule_from_task();
        }
    }

    /// The I/O unit says what its link is like now.
    pub(super) fn far_link_is(&self, link: FarLink) {
        let standing = self.standing.lock();
        let mut far = self.far.lock();
        let changed = far.link != link;
        far.link = link;
        drop(far);
        let is_up = link.flags & LINK_UP != 0;
        if changed
            && self
                .said
                .allows(c"rust_rdma_split_host: changes of the far link")
        {
            let state = if is_up { "up" } else { "down" };
            netdev_info!(self, "the far link is {}, MTU {}\n", state, link.mtu);
        }
        if standing.is_configured {
            self.set_carrier(is_up);
        }
    }

    /// A connection came up, or is gone: there is no carrier until the far interface is in line again.
    pub(super) fn connection_changed(&self) {
        let mut standing = self.standing.lock();
        standing.connection = standing.connection.wrapping_add(1);
        standing.is_configured = false;
        self.set_carrier(false);
    }

    /// The far interface is in line with this one, if that is still the same connection.
    pub(super) fn is_in_line(&self, connection: u32) {
        let mut standing = self.standing.lock();
        if standing.connection == connection {
            standing.is_configured = true;
            let is_up = self.far.lock().link.flags & LINK_UP != 0;
            self.set_carrier(is_up);
        }
    }
}

impl crate::net::Driver for Split {
    const OPS: Ops<Self> = Ops::new()
        .with_napi()
        .with_statistics()
        .with_mac()
        .with_mtu()
        .with_rx_mode()
        .with_vlans()
        .with_ethtool();
    type Queue = ();

    fn open(dev: &Device<Self>, _rtnl: &Rtnl) -> Result {
        dev.tell();
        Ok(())
    }

    fn stop(dev: &Device<Self>, _rtnl: &Rtnl) {
        dev.arrived.clear(DropReason::NotReady);
    }

    fn start_xmit(dev: &Device<Self>, mut skb: Skb) -> Xmit {
        let Some(link) = dev.link.as_ref() else {
            refuse(dev, skb, DropReason::NotReady);
            return Xmit::Taken;
        };
        let length = skb.len();
        // Nothing makes room for such a frame, so that it does not wait.
        let most = dev.far.lock().link.mtu.min(MAX_MTU) + OVERHEAD;
        if length > most as usize {
            refuse(dev, skb, DropReason::TooLarge);
            return Xmit::Taken;
        }
        let mut can = link.can_send(length);
        if can == Err(Unsent::NoElement) {
            dev.stop_queue(0);
            dev.counters.queue_stopped.add(1);
            // There may be room since, and nobody tells again.
            can = link.can_send(length);
            if can == Err(Unsent::NoElement) {
                return Xmit::Busy(skb);
            }
            dev.wake_queue(0);
        }
        if can.is_ok() {
            skb.tx_timestamp();
        }
        match can.and_then(|()| link.send(&skb)) {
            Ok(()) => {
                dev.counters.tx_packets.add(1);
                dev.counters.tx_bytes.add(length);
                skb.consume();
            }
            // Nothing makes room for it, so that it does not wait.
            Err(Unsent::TooLarge | Unsent::Empty) => refuse(dev, skb, DropReason::TooLarge),
            Err(Unsent::Closed) => refuse(dev, skb, DropReason::NotReady),
            Err(Unsent::NoElement) => refuse(dev, skb, DropReason::QueueFull),
        }
        Xmit::Taken
    }
}

impl NapiOps for Split {
    fn poll(context: &PollContext<'_, Self>, budget: u32) -> u32 {
        let dev = context.device();
        let mut done = 0;
        while done < budget {
            let Some(skb) = dev.arrived.pop() else {
                break;
            };
            dev.counters.rx_packets.add(1);
            dev.counters.rx_bytes.add(skb.len());
            let header = skb.ethernet_header();
            if header.is_some_and(|header| header.destination.is_group()) {
                dev.counters.multicast.add(1);
            }
            context.receive(skb);
            done += 1;
        }
        done
    }
}

impl StatisticsOps for Split {
    fn statistics(dev: &Device<Self>) -> Statistics {
        let counters = &dev.counters;
        Statistics {
            rx_packets: counters.rx_packets.get(),
            tx_packets: counters.tx_packets.get(),
            rx_bytes: counters.rx_bytes.get(),
            tx_bytes: counters.tx_bytes.get(),
            rx_dropped: counters.rx_dropped.get(),
            tx_dropped: counters.tx_dropped.get(),
            multicast: counters.multicast.get(),
            ..Statistics::default()
        }
    }
}

impl MacOps for Split {
    fn set_mac(dev: &Device<Self>, _rtnl: &Rtnl, _mac: MacAddress) -> Result {
        // The agent finds it when RTNL was given back.
        dev.tell();
        Ok(())
    }
}

impl MtuOps for Split {
    fn change_mtu(dev: &Device<Self>, _rtnl: &Rtnl, _mtu: u32) -> Result {
        dev.tell();
        Ok(())
    }
}

impl RxModeOps for Split {
    fn set_rx_mode(dev: &Device<Self>, _rtnl: &Rtnl, mode: &RxMode<'_>) -> Result {
        let mut groups = KVec::with_capacity(MOST_GROUPS, GFP_KERNEL)?;
        let mut flags = 0;
        for group in mode.multicast() {
            if groups.len() == MOST_GROUPS {
                groups.clear();
                flags |= FILTER_ALL_MULTICAST;
                break;
            }
            groups.push(group, GFP_KERNEL)?;
        }
        if mode.all_multicast {
            flags |= FILTER_ALL_MULTICAST;
        }
        // The far interface has one address for a host.
        if mode.promiscuous || mode.unicast().next().is_some() {
            flags |= FILTER_PROMISCUOUS;
        }
        let mut wishes = dev.wishes.lock();
        wishes.groups = groups;
        wishes.flags = flags;
        drop(wishes);
        dev.tell();
        Ok(())
    }
}

impl VlanOps for Split {
    fn add_vlan(dev: &Device<Self>, _rtnl: &Rtnl, vlan: u16) -> Result {
        // Frames that have a priority and no VLAN (number 0) are always wanted.
        if vlan != 0 {
            dev.wishes.lock().vlans.push(vlan, GFP_KERNEL)?;
            dev.tell();
        }
        Ok(())
    }

    fn remove_vlan(dev: &Device<Self>, _rtnl: &Rtnl, vlan: u16) {
        dev.wishes.lock().vlans.retain(|other| *other != vlan);
        dev.tell();
    }
}

/// Those of the device, and of the far interface.
const OWN_NAMES: &[&str] = &[
    "queue_stopped",
    "far_rx_packets",
    "far_tx_packets",
    "far_rx_bytes",
    "far_tx_bytes",
    "far_rx_errors",
    "far_tx_errors",
    "far_rx_dropped",
    "far_tx_dropped",
    "far_multicast",
];

impl EthtoolOps for Split {
    const NAME: &'static str = "rust_rdma_split_host";

    fn ethtool_count(_dev: &Device<Self>, _rtnl: &Rtnl) -> usize {
        link::Statistics::COUNT + OWN_NAMES.len()
    }

    fn ethtool_names(_dev: &Device<Self>, _rtnl: &Rtnl, names: &mut StatisticsNames<'_>) {
        for (prefix, name) in link::Statistics::names() {
            names.push(&[prefix, name]);
        }
        for name in OWN_NAMES {
            names.push(&[name]);
        }
    }

    fn driver_info(_dev: &Device<Self>, _rtnl: &Rtnl) -> DriverInfo {
        DriverInfo {
            bus: "rdma",
            ..DriverInfo::default()
        }
    }

    fn ethtool_statistics(dev: &Device<Self>, _rtnl: &Rtnl, values: &mut [u64]) {
        let link = dev.link.as_ref();
        let counted = link.map_or(link::Statistics::ZERO, |link| link.statistics());
        let far = dev.far.lock().statistics;
        let own = [
            dev.counters.queue_stopped.get(),
            far.rx_packets,
            far.tx_packets,
            far.rx_bytes,
            far.tx_bytes,
            far.rx_errors,
            far.tx_errors,
            far.rx_dropped,
            far.tx_dropped,
            far.multicast,
        ];
        let (of_link, of_device) = values.split_at_mut(link::Statistics::COUNT);
        of_link.copy_from_slice(counted.values());
        of_device.copy_from_slice(&own);
    }

    fn link_settings(dev: &Device<Self>, _rtnl: &Rtnl) -> Result<LinkSettings> {
        let far = dev.far.lock().link;
        Ok(LinkSettings {
            speed: (far.speed != 0).then_some(far.speed),
            full_duplex: far.flags & LINK_FULL_DUPLEX != 0,
        })
    }

    fn tx_copybreak(dev: &Device<Self>, _rtnl: &Rtnl) -> Result<u32> {
        Ok(dev.threshold.load(Relaxed))
    }

    fn set_tx_copybreak(dev: &Device<Self>, _rtnl: &Rtnl, bytes: u32) -> Result {
        dev.threshold.store(bytes, Relaxed);
        if let Some(link) = dev.link.as_ref() {
            link.set_threshold(bytes);
        }
        Ok(())
    }
}
