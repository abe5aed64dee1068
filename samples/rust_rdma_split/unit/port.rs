// SPDX-License-Identifier: GPL-2.0

//! One host of an I/O unit.

use super::filter::{tag_of, Filter};
use super::Lan;
use crate::frames::{copy_frame, MAX_MTU, MIN_MTU, OVERHEAD};
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::link::{Frame, Link, Owner, CONFIG_MAX};
use crate::net::{DropReason, EthernetHeader, Handle, MacAddress, Skb, VlanTag, Want, Wanted};
use crate::protocol::{
    FilterFlags, Layout, MacAddress as MacData, Mtu, Operation, Statistics, Status, Vlan,
    FILTER_ALL_MULTICAST, FILTER_PROMISCUOUS,
};
use kernel::fmt;
use kernel::impl_has_work;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::{new_mutex, Arc, Mutex};
use kernel::workqueue::{new_work, Work, WorkItem};

/// A host, with its part of the interface.
#[pin_data]
pub struct Port {
    link: Link<Port>,
    lan: Handle<Lan>,
    is_up: Atomic<bool>,
    mtu: Atomic<u32>,
    #[pin]
    filter: IrqSpinLock<Filter>,
    /// What the interface receives for it. Before RTNL.
    #[pin]
    wanted: Mutex<KVec<Wanted<Lan>>>,
    /// Frames for the host.
    delivered: Atomic<u64>,
    /// Frames of the host to the LAN.
    forwarded: Atomic<u64>,
    /// Frames of the host that went nowhere, those among them that it may not send.
    dropped: Atomic<u64>,
    #[pin]
    telling: Work<Port>,
}

impl_has_work! {
    impl HasWork<Self> for Port { self.telling }
}

impl Port {
    /// A host has come; it gets an address that nobody has.
    pub(super) fn new(link: Link<Self>, lan: &Handle<Lan>) -> Result<Arc<Self>> {
        let mac = MacAddress::random();
        let filter = Filter::new(mac)?;
        let mut wanted = KVec::new();
        wanted.push(lan.want(Want::Unicast(mac))?, GFP_KERNEL)?;
        let lan = lan.clone();
        Arc::pin_init(
            try_pin_init!(Self {
                link,
                lan,
                is_up: Atomic::new(false),
                mtu: Atomic::new(MAX_MTU),
                filter <- new_irq_spinlock!(filter),
                wanted <- new_mutex!(wanted),
                delivered: Atomic::new(0),
                forwarded: Atomic::new(0),
                dropped: Atomic::new(0),
                telling <- new_work!("rust_rdma_split_unit_telling"),
            }),
            GFP_KERNEL,
        )
    }

    /// The host is gone: nothing is received for it any more. Takes RTNL.
    pub(super) fn forget(&self) {
        self.is_up.store(false, Release);
        let wanted = core::mem::take(&mut *self.wanted.lock());
        Wanted::give_up(wanted);
    }

    pub(super) fn has_mac(&self, mac: MacAddress) -> bool {
        self.is_up.load(Acquire) && self.filter.lock().mac == mac
    }

    pub(super) fn wants(
        &self,
        header: &EthernetHeader,
        tag: Option<VlanTag>,
        is_somebodys: bool,
    ) -> bool {
        self.is_up.load(Acquire) && self.filter.lock().wants(header, tag, is_somebodys)
    }

    /// Gives the host a frame. What it has no room for the link counts.
    pub(super) fn deliver(&self, skb: &Skb) {
        let most = self.mtu.load(Relaxed) + OVERHEAD;
        if skb.len() > most as usize {
            self.dropped.fetch_add(1, Relaxed);
        } else if self.link.send(skb).is_ok() {
            self.delivered.fetch_add(1, Relaxed);
        }
    }

    /// A frame of the host, which nobody changes any more.
    fn forward(&self, skb: Skb) -> Result {
        let header = skb.ethernet_header().ok_or(EINVAL)?;
        let read = |to: &mut [u8]| skb.copy_to(EthernetHeader::SIZE, to);
        let Ok((tag, protocol)) = tag_of(&header, read) else {
            skb.discard(DropReason::BadHeader);
            return Err(EINVAL);
        };
        let lan = self.lan.upper();
        // Before anybody has it: with the address of another a host would get what is for that one, as switches learn who is
        // where.
        if !lan.trust && !self.filter.lock().may_send(&header, tag, protocol) {
            skb.discard(DropReason::BadHeader);
            return Err(EPERM);
        }
        let is_somebodys =
            lan.is_own(header.destination) || lan.ports.has_mac(header.destination, None);
        let is_wanted = lan
            .ports
            .deliver(&skb, &header, tag, is_somebodys, Some(self));
        if lan.ports.has_mac(header.destination, Some(self)) {
            // One that does not want it (of another VLAN) has it not, and nobody else either.
            if !is_wanted {
                skb.discard(DropReason::NotSpecified);
                return Err(ENOENT);
            }
            skb.consume();
            return Ok(());
        }
        if skb.len() > lan.largest() {
            skb.discard(DropReason::TooLarge);
            return Err(EINVAL);
        }
        self.lan.send(skb)?;
        self.forwarded.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Has the interface receive more for this host; what it has is enough.
    fn want(&self, want: Want) -> Result<(), Status> {
        let mut wanted = self.wanted.lock();
        if wanted.iter().any(|other| other.want() == want) {
            return Ok(());
        }
        wanted.reserve(1, GFP_KERNEL).map_err(|_| Status::Failed)?;
        let new = self.lan.want(want).map_err(refusal)?;
        wanted.push(new, GFP_KERNEL).map_err(|_| Status::Failed)
    }

    /// Takes that back.
    fn want_not(&self, want: Want) {
        self.wanted.lock().retain(|other| other.want() != want);
    }

    /// Whether something may be said that a host can make happen as often as it likes.
    fn may_say(&self) -> bool {
        let said = &self.lan.upper().said;
        said.allows(c"rust_rdma_split_unit: what hosts do")
    }

    fn set_mac(&self, data: &[u8]) -> Result<(), Status> {
        let mac = decode_mac(data)?;
        if !mac.is_valid() {
            return Err(Status::BadValue);
        }
        let old = self.filter.lock().mac;
        if old == mac {
            return Ok(());
        }
        if !self.lan.upper().trust && !mac.is_locally_administered() {
            return Err(Status::NotPermitted);
        }
        // An address is wanted by one only: that of another host or of this machine is refused here, also where two
        // ask at once.
        self.want(Want::Unicast(mac))?;
        self.filter.lock().mac = mac;
        self.want_not(Want::Unicast(old));
        if self.may_say() {
            pr_info!("host {} is {} now\n", old, mac);
        }
        Ok(())
    }

    fn set_mtu(&self, data: &[u8]) -> Result<(), Status> {
        let Mtu { mtu } = Mtu::decode(data).ok_or(Status::BadValue)?;
        let most = self.lan.upper().like.lock().link.mtu;
        if !(MIN_MTU..=most).contains(&mtu) {
            return Err(Status::BadValue);
        }
        self.mtu.store(mtu, Relaxed);
        Ok(())
    }

    fn set_vlan(&self, data: &[u8], is_wanted: bool) -> Result<(), Status> {
        let Vlan { vlan, .. } = Vlan::decode(data).ok_or(Status::BadValue)?;
        if !(1..=4094).contains(&vlan) {
            return Err(Status::BadValue);
        }
        if is_wanted {
            // Requests of a host come one after the other.
            if !self.filter.lock().has_room_for_vlan(vlan) {
                return Err(Status::NoRoom);
            }
            self.want(Want::Vlan(vlan))?;
        } else {
            self.want_not(Want::Vlan(vlan));
        }
        self.filter.lock().set_vlan(vlan, is_wanted);
        Ok(())
    }

    fn set_group(&self, data: &[u8], is_wanted: bool) -> Result<(), Status> {
        let group = decode_mac(data)?;
        if !group.is_group() {
            return Err(Status::BadValue);
        }
        if is_wanted {
            let added = self.filter.lock().add_group(group);
            added.map_err(refusal)?;
            if let Err(status) = self.want(Want::Multicast(group)) {
                self.filter.lock().remove_group(group);
                return Err(status);
            }
        } else {
            self.filter.lock().remove_group(group);
            self.want_not(Want::Multicast(group));
        }
        Ok(())
    }

    fn set_filter(&self, data: &[u8]) -> Result<(), Status> {
        let FilterFlags { flags } = FilterFlags::decode(data).ok_or(Status::BadValue)?;
        let known = [
            (FILTER_PROMISCUOUS, Want::Promiscuous),
            (FILTER_ALL_MULTICAST, Want::AllMulticast),
        ];
        if flags & !(FILTER_PROMISCUOUS | FILTER_ALL_MULTICAST) != 0 {
            return Err(Status::BadValue);
        }
        if flags & FILTER_PROMISCUOUS != 0 && !self.lan.upper().trust {
            return Err(Status::NotPermitted);
        }
        for (flag, want) in known {
            if flags & flag != 0 {
                self.want(want)?;
            } else {
                self.want_not(want);
            }
        }
        self.filter.lock().flags = flags;
        Ok(())
    }

    fn statistics(&self) -> Result<Statistics, Status> {
        let counted = self.lan.statistics().ok_or(Status::Failed)?;
        Ok(Statistics {
            rx_packets: counted.rx_packets,
            tx_packets: counted.tx_packets,
            rx_bytes: counted.rx_bytes,
            tx_bytes: counted.tx_bytes,
            rx_errors: counted.rx_errors,
            tx_errors: counted.tx_errors,
            rx_dropped: counted.rx_dropped,
            tx_dropped: counted.tx_dropped,
            multicast: counted.multicast,
        })
    }

    /// The host, as a text.
    pub(super) fn shown(&self) -> Shown<'_> {
        Shown(self)
    }
}

/// A host, as a text.
pub(super) struct Shown<'a>(&'a Port);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(port) = self;
        let (mac, (groups, vlans)) = {
            let filter = port.filter.lock();
            (filter.mac, filter.sizes())
        };
        let state = if port.is_up.load(Acquire) {
            "up"
        } else {
            "down"
        };
        let counters = [
            ("delivered", &port.delivered),
            ("forwarded", &port.forwarded),
            ("dropped", &port.dropped),
        ];
        let mtu = port.mtu.load(Relaxed);
        f.write_fmt(fmt!("host {} {} mtu {}", mac, state, mtu))?;
        f.write_fmt(fmt!(" groups {} vlans {}", groups, vlans))?;
        for (name, counter) in counters {
            f.write_fmt(fmt!(" {} {}", name, counter.load(Relaxed)))?;
        }
        let counted = port.link.statistics();
        let names = crate::link::Statistics::names();
        for ((prefix, name), value) in names.zip(counted.values()) {
            if *value != 0 {
                f.write_fmt(fmt!(" {}{} {}", prefix, name, value))?;
            }
        }
        Ok(())
    }
}

impl Owner for Port {
    fn frame(&self, frame: Frame<'_>) {
        let room = self.lan.allocate(frame.len());
        let copied = room.and_then(|skb| copy_frame(&frame, skb));
        if copied.and_then(|skb| self.forward(skb)).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    fn frames_end(&self) {}

    fn writable(&self) {
        // Frames of a LAN do not wait.
    }

    fn changed(&self, is_up: bool) {
        self.is_up.store(is_up, Release);
        if self.may_say() {
            let mac = self.filter.lock().mac;
            let state = if is_up { "connected" } else { "gone" };
            pr_info!("host {}: {}\n", mac, state);
        }
    }

    fn request(
        &self,
        operation: Operation,
        data: &[u8],
        answer: &mut [u8; CONFIG_MAX],
    ) -> Result<usize, Status> {
        match operation {
            Operation::GetMac => {
                let MacAddress(mac) = self.filter.lock().mac;
                reply(&MacData { mac, reserved: 0 }, answer)
            }
            Operation::GetStatistics => reply(&self.statistics()?, answer),
            Operation::GetLink => reply(&self.lan.upper().like.lock().link, answer),
            Operation::GetMtu => {
                let mtu = self.lan.upper().like.lock().link.mtu;
                reply(&Mtu { mtu }, answer)
            }
            Operation::SetMac => self.set_mac(data).map(|()| 0),
            Operation::SetMtu => self.set_mtu(data).map(|()| 0),
            Operation::AddVlan => self.set_vlan(data, true).map(|()| 0),
            Operation::RemoveVlan => self.set_vlan(data, false).map(|()| 0),
            Operation::AddMulticast => self.set_group(data, true).map(|()| 0),
            Operation::RemoveMulticast => self.set_group(data, false).map(|()| 0),
            Operation::SetFilter => self.set_filter(data).map(|()| 0),
            Operation::LinkChanged | Operation::Received => Err(Status::NotSupported),
        }
    }
}

impl WorkItem for Port {
    type Pointer = Arc<Self>;

    /// Tells the host what the LAN is like.
    fn run(this: Arc<Self>) {
        let link = this.lan.upper().like.lock().link;
        let mut bytes = [0; crate::protocol::Link::SIZE];
        if link.encode(&mut bytes).is_some() {
            // Where it is gone it need not know; where it comes again it asks.
            let _ = this.link.ask(Operation::LinkChanged, &bytes, &mut []);
        }
    }
}

fn decode_mac(data: &[u8]) -> Result<MacAddress, Status> {
    let MacData { mac, .. } = MacData::decode(data).ok_or(Status::BadValue)?;
    Ok(MacAddress(mac))
}

fn reply<A: Layout>(data: &A, answer: &mut [u8; CONFIG_MAX]) -> Result<usize, Status> {
    data.encode(answer).ok_or(Status::Failed)?;
    Ok(A::SIZE)
}

/// What a host is told whose wish came to that.
fn refusal(err: Error) -> Status {
    match err {
        // What another has: an address of somebody's, a VLAN of the machine's own.
        err if [EEXIST, EBUSY].contains(&err) => Status::NotPermitted,
        err if err == ENOSPC => Status::NoRoom,
        _ => Status::Failed,
    }
}

#[kunit_tests(rust_rdma_split_port)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_is_told_apart_from_what_failed_and_what_is_full() {
        assert_eq!(refusal(EEXIST), Status::NotPermitted);
        assert_eq!(refusal(EBUSY), Status::NotPermitted);
        assert_eq!(refusal(ENOSPC), Status::NoRoom);
        assert_eq!(refusal(ENOMEM), Status::Failed);
        assert_eq!(refusal(ENODEV), Status::Failed);
    }
}
