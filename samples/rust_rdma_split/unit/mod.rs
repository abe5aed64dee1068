// SPDX-License-Identifier: GPL-2.0

//! The interface that is lent, and the hosts that it is lent to.
//!
//! - `port.rs`: one host: what it is given, and what it asks.
//! - `filter.rs`: which frames it wants.
//! - here: frames between the LAN and all hosts, and what happens to the LAN.

mod filter;
mod port;

use crate::frames::OVERHEAD;
use crate::kernel_ext::ratelimit::RateLimit;
use crate::kernel_ext::rcu;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::kernel_ext::workqueue::OwnedQueue;
use crate::link::{Factory, Link};
use crate::net::{
    Attachment, EthernetHeader, Handle, InterfaceEvent, InterfaceState, MacAddress, Received, Rtnl,
    Skb, Upper, Verdict, VlanTag,
};
use crate::protocol::{Link as LanLink, LINK_FULL_DUPLEX, LINK_UP, MTU_MAX};
use kernel::fmt;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use port::Port;

/// The interface that is lent, until this is dropped. There is no host any more then.
pub struct Lent {
    attachment: Attachment<Lan>,
    queue: Arc<OwnedQueue>,
}

impl Lent {
    /// Lends the interface of that name to at most `hosts` at a time. Where they are trusted they may have any address
    /// that nobody has here, send with others, and have all frames; else those addresses only that no maker has given to
    /// anybody, of which each sends with its own.
    pub fn new(name: &CStr, hosts: usize, trust: bool) -> Result<Self> {
        let queue = Arc::new(OwnedQueue::unbound(c"rust_rdma_split_unit")?, GFP_KERNEL)?;
        let attachment = Attachment::new(name, Lan::new(hosts, trust, queue.clone()))?;
        let lan = attachment.handle();
        Rtnl::with(|rtnl| lan.upper().is_like(lan.state(rtnl).as_ref()));
        let like = *lan.upper().like.lock();
        let name = name.to_str().unwrap_or("?");
        pr_info!(
            "{}: lent to hosts, {}, MTU {}\n",
            name,
            state_of(&like.link),
            like.link.mtu
        );
        Ok(Self { attachment, queue })
    }

    /// For the listener.
    pub fn unit(&self) -> Result<Arc<Unit>> {
        let unit = Unit {
            lan: self.attachment.handle(),
        };
        Ok(Arc::new(unit, GFP_KERNEL)?)
    }

    /// For those who want to see.
    pub fn hosts(&self) -> Hosts {
        Hosts(self.attachment.handle())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // What is told to hosts has them, and they have the interface.
        self.queue.flush();
    }
}

fn state_of(link: &LanLink) -> &'static str {
    if link.flags & LINK_UP != 0 {
        "up"
    } else {
        "down"
    }
}

/// Who makes a [`Port`] for each host.
pub struct Unit {
    lan: Handle<Lan>,
}

impl Factory for Unit {
    type Owner = Port;

    fn joined(&self, link: Link<Port>) -> Result<Arc<Port>> {
        let port = Port::new(link, &self.lan)?;
        if let Err(err) = self.lan.upper().ports.add(&port) {
            port.forget();
            return Err(err);
        }
        Ok(port)
    }

    fn parted(&self, port: Arc<Port>) {
        self.lan.upper().ports.remove(&port);
        // At once: the host may be here again, and wants its address.
        port.forget();
        // Soft interrupts that go through all hosts may have found it before. The last reference is not theirs: with
        // it goes the link, and with the last of all links their work queues.
        rcu::synchronize();
    }
}

/// The hosts there are, each in a place that it keeps.
#[pin_data]
struct Ports {
    #[pin]
    places: IrqSpinLock<KVec<Option<Arc<Port>>>>,
}

impl Ports {
    fn new(most: usize) -> impl PinInit<Self, Error> {
        let mut places = KVec::new();
        let filled = (0..most).try_for_each(|_| places.push(None, GFP_KERNEL));
        try_pin_init!(Self {
            places <- new_irq_spinlock!({
                filled?;
                places
            }),
        })
    }

    /// All there are. No lock is held for longer than it takes to find the next one.
    fn all(&self) -> impl Iterator<Item = Arc<Port>> + '_ {
        let mut place = 0;
        core::iter::from_fn(move || {
            let places = self.places.lock();
            let rest = places.get(place..)?;
            let next = rest.iter().position(Option::is_some)?;
            place += next + 1;
            rest.get(next)?.clone()
        })
    }

    fn add(&self, port: &Arc<Port>) -> Result {
        let mut places = self.places.lock();
        let free = places.iter_mut().find(|place| place.is_none());
        *free.ok_or(ENOSPC)? = Some(port.clone());
        Ok(())
    }

    fn remove(&self, port: &Arc<Port>) {
        let mut places = self.places.lock();
        let own = places
            .iter_mut()
            .find(|place| place.as_ref().is_some_and(|other| Arc::ptr_eq(other, port)));
        let gone = own.and_then(Option::take);
        // Not with the lock held.
        drop(places);
        drop(gone);
    }

    /// Whether a host has that address, other than `but`.
    fn has_mac(&self, mac: MacAddress, but: Option<&Port>) -> bool {
        self.others(but).any(|port| port.has_mac(mac))
    }

    fn others<'a>(&'a self, but: Option<&'a Port>) -> impl Iterator<Item = Arc<Port>> + 'a {
        self.all()
            .filter(move |port| !but.is_some_and(|but| core::ptr::eq(&**port, but)))
    }

    /// Gives a frame to all who want it, but the one it is from; whether there is any.
    fn deliver(
        &self,
        skb: &Skb,
        header: &EthernetHeader,
        tag: Option<VlanTag>,
        is_somebodys: bool,
        from: Option<&Port>,
    ) -> bool {
        let mut is_wanted = false;
        for port in self.others(from) {
            if port.wants(header, tag, is_somebodys) {
                port.deliver(skb);
                is_wanted = true;
            }
        }
        is_wanted
    }
}

/// What the interface is like.
#[derive(Clone, Copy)]
struct Like {
    mac: MacAddress,
    link: LanLink,
}

/// Who is attached to the interface.
#[pin_data]
pub struct Lan {
    #[pin]
    ports: Ports,
    #[pin]
    like: IrqSpinLock<Like>,
    /// Frames of the LAN that no host got, for want of memory here.
    dropped: Atomic<u64>,
    /// Whether hosts may have any address, and any frames.
    trust: bool,
    /// What hosts make this machine say. Of all of them, as one may come and go.
    #[pin]
    said: RateLimit,
    /// Where hosts are told of what happens to it.
    queue: Arc<OwnedQueue>,
}

impl Lan {
    fn new(hosts: usize, trust: bool, queue: Arc<OwnedQueue>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            ports <- Ports::new(hosts),
            like <- new_irq_spinlock!(Like {
                mac: MacAddress([0; 6]),
                link: LanLink { flags: 0, speed: 0, mtu: 0 },
            }),
            dropped: Atomic::new(0),
            trust,
            said <- RateLimit::new(),
            queue,
        })
    }

    /// Notes what the interface is like now; returns whether its link is another.
    fn is_like(&self, state: Option<&InterfaceState>) -> bool {
        let mut like = self.like.lock();
        let before = like.link;
        match state {
            Some(state) => {
                let up = if state.is_up { LINK_UP } else { 0 };
                let duplex = if state.link.full_duplex {
                    LINK_FULL_DUPLEX
                } else {
                    0
                };
                like.mac = state.mac;
                like.link = LanLink {
                    flags: up | duplex,
                    speed: state.link.speed.unwrap_or(0),
                    // Hosts are told of no larger one.
                    mtu: state.mtu.min(MTU_MAX),
                };
            }
            None => like.link.flags = 0,
        }
        like.link != before
    }

    /// Whether that is the address of the interface itself.
    fn is_own(&self, mac: MacAddress) -> bool {
        self.like.lock().mac == mac
    }

    /// Bytes of the largest frame that it takes.
    fn largest(&self) -> usize {
        (self.like.lock().link.mtu + OVERHEAD) as usize
    }
}

impl Upper for Lan {
    fn received(&self, mut frame: Received) -> Verdict {
        let (header, tag) = (frame.header(), frame.vlan());
        // What is for this machine is for no host. Where the connections to hosts use the interface, too, each frame that
        // one gets would beget others, without end.
        if self.is_own(header.destination) {
            return Verdict::Pass(frame);
        }
        let is_a_hosts = self.ports.has_mac(header.destination, None);
        let is_wanted = |port: Arc<Port>| port.wants(&header, tag, is_a_hosts);
        if !self.ports.all().any(is_wanted) {
            return Verdict::Pass(frame);
        }
        // What is for a host is not for this machine; what is for many may be.
        let (whole, verdict) = if is_a_hosts {
            (Ok(frame), Verdict::Taken)
        } else {
            (frame.try_clone(), Verdict::Pass(frame))
        };
        match whole.and_then(Received::into_frames) {
            Ok(frames) => {
                for skb in frames {
                    self.ports.deliver(&skb, &header, tag, is_a_hosts, None);
                    skb.consume();
                }
            }
            Err(_) => {
                self.dropped.fetch_add(1, Relaxed);
            }
        }
        verdict
    }

    fn event(&self, _rtnl: &Rtnl, event: InterfaceEvent, state: Option<InterfaceState>) {
        if event == InterfaceEvent::Gone {
            pr_info!("the interface that was lent is gone\n");
        }
        let is_other = self.is_like(state.as_ref());
        if let (InterfaceEvent::ChangeMac, Some(state)) = (event, state) {
            if self.ports.has_mac(state.mac, None) {
                pr_warn!(
                    "the interface is {} now, as a host is, which gets nothing\n",
                    state.mac
                );
            }
        }
        if !is_other {
            return;
        }
        let link = self.like.lock().link;
        pr_info!("the LAN is {}, MTU {}\n", state_of(&link), link.mtu);
        for port in self.ports.all() {
            // Where that is queued it looks once more.
            let _ = self.queue.enqueue(port);
        }
    }
}

/// All hosts, as a text.
pub struct Hosts(Handle<Lan>);

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lan = self.0.upper();
        let link = lan.like.lock().link;
        let dropped = lan.dropped.load(Relaxed);
        let state = state_of(&link);
        f.write_fmt(fmt!("lan {} mtu {} dropped {}", state, link.mtu, dropped))?;
        for port in lan.ports.all() {
            f.write_fmt(fmt!("\n{}", port.shown()))?;
        }
        Ok(())
    }
}
