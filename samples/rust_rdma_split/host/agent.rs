// SPDX-License-Identifier: GPL-2.0

//! Brings the far interface in line with this one.

use super::device::Split;
use super::Wire;
use crate::frames::{MAX_MTU, MIN_MTU};
use crate::kernel_ext::errno::eopnotsupp;
use crate::kernel_ext::workqueue::{flush_delayed, hasten, OwnedQueue};
use crate::link::{Link, CONFIG_MAX};
use crate::net::{netdev_info, netdev_warn, Hold, MacAddress, Rtnl};
use crate::protocol::{
    FilterFlags, Layout, Link as FarLink, MacAddress as FarMac, Mtu, Operation,
    Statistics as FarStatistics, Vlan,
};
use kernel::prelude::*;
use kernel::sync::{new_mutex, Arc, Mutex};
use kernel::time::msecs_to_jiffies;
use kernel::workqueue::{DelayedWork, WorkItem};
use kernel::{impl_has_delayed_work, new_delayed_work};

/// Milliseconds after which statistics are asked for again, and what was refused is tried again.
const PERIOD: u32 = 2_000;

/// Who asks the I/O unit.
#[pin_data]
pub(super) struct Agent {
    /// `None` when it is over.
    #[pin]
    dev: Mutex<Option<Hold<Split>>>,
    /// Held by who asks.
    #[pin]
    applied: Mutex<Applied>,
    #[pin]
    work: DelayedWork<Agent>,
    queue: OwnedQueue,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Agent { self.work }
}

/// What the I/O unit was told on a connection.
struct Applied {
    connection: u32,
    mac: Option<MacAddress>,
    mtu: Option<u32>,
    /// The MTU of the far interface, which was made the limit here.
    limit: Option<u32>,
    flags: u32,
    groups: KVec<MacAddress>,
    vlans: KVec<u16>,
    /// The address that it does not want.
    refused: Option<MacAddress>,
}

impl Applied {
    const fn new(connection: u32) -> Self {
        Self {
            connection,
            mac: None,
            mtu: None,
            limit: None,
            flags: 0,
            groups: KVec::new(),
            vlans: KVec::new(),
            refused: None,
        }
    }
}

/// One thing that the I/O unit is to be told.
enum Change {
    Flags(u32),
    AddGroup(MacAddress),
    RemoveGroup(MacAddress),
    AddVlan(u16),
    RemoveVlan(u16),
}

impl Agent {
    pub(super) fn new(dev: Hold<Split>) -> Result<Arc<Self>> {
        let queue = OwnedQueue::for_long_work(c"rust_rdma_split_host")?;
        Arc::pin_init(
            try_pin_init!(Self {
                dev <- new_mutex!(Some(dev)),
                applied <- new_mutex!(Applied::new(0)),
                work <- new_delayed_work!("rust_rdma_split_host_agent"),
                queue,
            }),
            GFP_KERNEL,
        )
    }

    /// Has it look what is to be done, soon. May sleep.
    pub(super) fn kick(self: &Arc<Self>) {
        // With the lock held: after its end it is not queued any more.
        if self.dev.lock().is_some() {
            hasten(&self.queue, self.clone());
        }
    }

    /// Lets go of the device, and waits for what is being asked. Sleeps.
    pub(super) fn end(self: &Arc<Self>) {
        let dev = self.dev.lock().take();
        flush_delayed(self);
        drop(dev);
    }

    /// Tells the I/O unit all that it does not know, and asks how it is.
    fn bring_in_line(&self, dev: &Hold<Split>, link: &Link<Wire>) -> Result {
        let mut applied = self.applied.lock();
        let connection = dev.standing.lock().connection;
        if applied.connection != connection {
            let mut fresh = Applied::new(connection);
            let Mtu { mtu } = ask(link, Operation::GetMtu)?;
            limit_mtu(dev, &mut fresh, mtu);
            self.take_far_mac(dev, link, &mut fresh)?;
            // Not before all of that was asked.
            *applied = fresh;
        }
        // With RTNL: who changes them kicks this first.
        let (mac, mtu) = Rtnl::with(|_| (dev.mac(), dev.mtu()));
        self.tell_mac(dev, link, &mut applied, mac)?;
        if applied.mtu != Some(mtu) {
            let told = tell(link, Operation::SetMtu, &Mtu { mtu });
            accept_refusal(dev, Operation::SetMtu, told)?;
            applied.mtu = Some(mtu);
        }
        while let Some(change) = next_change(dev, &applied) {
            apply(dev, link, &mut applied, change)?;
        }
        let far: FarLink = ask(link, Operation::GetLink)?;
        dev.far_link_is(far);
        limit_mtu(dev, &mut applied, far.mtu);
        let statistics: FarStatistics = ask(link, Operation::GetStatistics)?;
        dev.far.lock().statistics = statistics;
        dev.is_in_line(connection);
        Ok(())
    }

    /// An interface whose address was made up takes the one that the I/O unit has for it.
    fn take_far_mac(&self, dev: &Hold<Split>, link: &Link<Wire>, applied: &mut Applied) -> Result {
        if !Rtnl::with(|rtnl| dev.has_random_mac(rtnl)) {
            return Ok(());
        }
        let FarMac { mac, .. } = ask(link, Operation::GetMac)?;
        applied.mac = Some(MacAddress(mac));
        Rtnl::with(|rtnl| {
            // Unless somebody was faster.
            if dev.has_random_mac(rtnl) {
                dev.change_mac(rtnl, MacAddress(mac))
            } else {
                Ok(())
            }
        })
    }

    /// Tells of an address that was changed here.
    fn tell_mac(
        &self,
        dev: &Hold<Split>,
        link: &Link<Wire>,
        applied: &mut Applied,
        mac: MacAddress,
    ) -> Result {
        if applied.mac == Some(mac) {
            return Ok(());
        }
        let told = FarMac {
            mac: mac.0,
            reserved: 0,
        };
        match tell(link, Operation::SetMac, &told) {
            Ok(()) => applied.mac = Some(mac),
            // Somebody else has it: it may be this host, on a connection that the I/O unit has not given up yet. It
            // is tried again.
            Err(err) if is_refusal(err) => {
                if applied.refused != Some(mac) {
                    netdev_warn!(dev, "the I/O unit refuses {}\n", mac);
                }
                applied.refused = Some(mac);
            }
            Err(err) => return Err(err),
        }
        Ok(())
    }
}

impl WorkItem for Agent {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let dev = this.dev.lock().clone();
        let Some(dev) = dev else {
            return;
        };
        let Some(link) = dev.link.as_ref().filter(|link| link.is_up()) else {
            return;
        };
        if let Err(err) = this.bring_in_line(&dev, link) {
            // Where it is gone, that was said.
            if link.is_up() {
                netdev_warn!(dev, "the I/O unit could not be asked: {:?}\n", err);
            }
        }
        let again = this.dev.lock();
        if again.is_some() {
            // If it is queued already, so be it.
            let _ = this
                .queue
                .enqueue_delayed(this.clone(), msecs_to_jiffies(PERIOD));
        }
    }
}

/// Whether that is an answer of the I/O unit, and not one of a link that has failed.
fn is_refusal(err: Error) -> bool {
    [EPERM, EINVAL, EIO, ENOSPC, eopnotsupp()].contains(&err)
}

/// What the I/O unit does not want it was told nevertheless, and is not told again: the interface works without. The
/// log says so.
fn accept_refusal(dev: &Hold<Split>, operation: Operation, told: Result) -> Result {
    match told {
        Err(err) if is_refusal(err) => {
            // Each user may join groups, without end.
            if dev.said.allows(c"rust_rdma_split_host: what is refused") {
                netdev_warn!(dev, "the I/O unit refuses {:?}: {:?}\n", operation, err);
            }
            Ok(())
        }
        told => told,
    }
}

/// Asks for something.
fn ask<A: Layout>(link: &Link<Wire>, operation: Operation) -> Result<A> {
    let mut answer = [0; CONFIG_MAX];
    let length = link.ask(operation, &[], &mut answer)?;
    answer.get(..length).and_then(A::decode).ok_or(EIO)
}

/// Tells something.
fn tell<Q: Layout>(link: &Link<Wire>, operation: Operation, data: &Q) -> Result {
    let mut bytes = [0; CONFIG_MAX];
    let bytes = bytes.get_mut(..Q::SIZE).ok_or(EINVAL)?;
    data.encode(bytes).ok_or(EINVAL)?;
    link.ask(operation, bytes, &mut []).map(drop)
}

/// The interface has no larger frames than the far one.
fn limit_mtu(dev: &Hold<Split>, applied: &mut Applied, mtu: u32) {
    // No interface has a smaller one.
    if mtu < MIN_MTU || (applied.limit == Some(mtu) && dev.mtu() <= mtu) {
        return;
    }
    // What was refused before may be right now.
    if applied.limit.replace(mtu) != Some(mtu) {
        applied.mtu = None;
    }
    dev.far.lock().link.mtu = mtu;
    Rtnl::with(|rtnl| {
        dev.set_max_mtu(rtnl, mtu.min(MAX_MTU));
        if dev.mtu() > mtu && dev.request_mtu(rtnl, mtu).is_ok() {
            netdev_info!(dev, "MTU {}, as the far interface has\n", mtu);
        }
    });
}

/// The next thing that the I/O unit does not know.
fn next_change(dev: &Split, applied: &Applied) -> Option<Change> {
    let wishes = dev.wishes.lock();
    if wishes.flags != applied.flags {
        return Some(Change::Flags(wishes.flags));
    }
    // Those that are not wanted first: there is room for so many.
    let not_in = |all: &[MacAddress], some: &[MacAddress]| {
        some.iter().find(|mac| !all.contains(mac)).copied()
    };
    let vlan_not_in =
        |all: &[u16], some: &[u16]| some.iter().find(|vlan| !all.contains(vlan)).copied();
    not_in(&wishes.groups, &applied.groups)
        .map(Change::RemoveGroup)
        .or_else(|| not_in(&applied.groups, &wishes.groups).map(Change::AddGroup))
        .or_else(|| vlan_not_in(&wishes.vlans, &applied.vlans).map(Change::RemoveVlan))
        .or_else(|| vlan_not_in(&applied.vlans, &wishes.vlans).map(Change::AddVlan))
}

/// Tells the I/O unit.
fn apply(dev: &Hold<Split>, link: &Link<Wire>, applied: &mut Applied, change: Change) -> Result {
    let told = |operation, told| accept_refusal(dev, operation, told);
    let group = |operation, MacAddress(mac)| {
        told(
            operation,
            tell(link, operation, &FarMac { mac, reserved: 0 }),
        )
    };
    let number = |operation, vlan| {
        told(
            operation,
            tell(link, operation, &Vlan { vlan, reserved: 0 }),
        )
    };
    match change {
        Change::Flags(flags) => {
            let operation = Operation::SetFilter;
            told(operation, tell(link, operation, &FilterFlags { flags }))?;
            applied.flags = flags;
        }
        Change::AddGroup(mac) => {
            group(Operation::AddMulticast, mac)?;
            applied.groups.push(mac, GFP_KERNEL)?;
        }
        Change::RemoveGroup(mac) => {
            group(Operation::RemoveMulticast, mac)?;
            applied.groups.retain(|other| *other != mac);
        }
        Change::AddVlan(vlan) => {
            number(Operation::AddVlan, vlan)?;
            applied.vlans.push(vlan, GFP_KERNEL)?;
        }
        Change::RemoveVlan(vlan) => {
            number(Operation::RemoveVlan, vlan)?;
            applied.vlans.retain(|other| *other != vlan);
        }
    }
    Ok(())
}
