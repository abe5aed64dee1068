// SPDX-License-Identifier: GPL-2.0

//! The interface of a host.
//!
//! - `device.rs`: the network device. Frames that are sent go to the link at once; those that arrive wait for NAPI.
//! - `agent.rs`: brings the far interface in line with this one, and the carrier with the far link, in a work queue:
//!   nobody waits for the I/O unit with RTNL held.

mod agent;
mod device;

use crate::frames::{copy_frame, MAX_MTU};
use crate::link::{Frame, Host, Options, Owner, CONFIG_MAX};
use crate::net::{
    netdev_info, Config, DropReason, Hold, Offloads, Registration, Skb, Unregistered,
};
use crate::protocol::{Layout, Link as FarLink, Operation, Status};
use agent::Agent;
use core::net::SocketAddr;
use device::Split;
use kernel::prelude::*;
use kernel::sync::Arc;

/// Frames that wait for NAPI, at most. Those are of a machine that has no time for them.
const BACKLOG: usize = 4096;

/// An interface, until it is dropped.
pub struct Interface {
    // In this order: when the connection is over and the agent, nobody holds the device.
    _host: Host<Wire>,
    _agent: Employed,
    _device: Registration<Split>,
}

/// An agent that works.
struct Employed(Arc<Agent>);

impl Drop for Employed {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Interface {
    /// Makes the interface, and begins to connect to `address`, which was given as a text.
    pub fn new(given: &str, address: SocketAddr, options: Options) -> Result<Self> {
        let mut queues = KVec::new();
        queues.push((), GFP_KERNEL)?;
        let config = Config {
            name: c"split%d",
            mac: None,
            mtu: 1500,
            max_mtu: MAX_MTU,
            tx_queues: 1,
            rx_queues: 1,
            offloads: Offloads::NONE,
            most_to_segment: 0,
            parent: None,
        };
        let device =
            Unregistered::new(&config, queues, Split::new(options.threshold))?.register()?;
        let agent = Employed(Agent::new(device.hold())?);
        device.agent.populate(agent.0.clone());
        let host = Host::new(address, options, |link| {
            let wire = Wire {
                dev: device.hold(),
                agent: agent.0.clone(),
            };
            device.link.populate(link);
            Ok(Arc::new(wire, GFP_KERNEL)?)
        })?;
        netdev_info!(device, "connecting to {}\n", given);
        Ok(Self {
            _host: host,
            _agent: agent,
            _device: device,
        })
    }
}

/// What the link knows of the interface.
pub struct Wire {
    dev: Hold<Split>,
    agent: Arc<Agent>,
}

impl Owner for Wire {
    fn frame(&self, frame: Frame<'_>) {
        let dev = &self.dev;
        let skb = if !dev.is_running() || dev.arrived.len() >= BACKLOG {
            Err(ENOSPC)
        } else {
            Skb::for_device(dev, frame.len()).and_then(|skb| copy_frame(&frame, skb))
        };
        let Ok(skb) = skb else {
            dev.counters.rx_dropped.add(1);
            return;
        };
        dev.arrived.push(skb);
        // After it is there: whoever took all before does not come again for it. Also where no batch ends any more.
        if dev.arrived.len() <= 1 {
            dev.poll_soon();
        }
    }

    fn frames_end(&self) {
        if !self.dev.arrived.is_empty() {
            self.dev.poll_soon();
        }
    }

    fn writable(&self) {
        self.dev.wake_queue(0);
    }

    fn changed(&self, is_up: bool) {
        let dev = &self.dev;
        dev.connection_changed();
        // An I/O unit may come and go as often as it likes.
        let is_said = dev
            .said
            .allows(c"rust_rdma_split_host: an I/O unit that comes and goes");
        if is_said && !is_up {
            netdev_info!(dev, "the I/O unit is gone\n");
        } else if is_said {
            netdev_info!(dev, "connected to the I/O unit\n");
        }
        self.agent.kick();
        // Whoever waits for room is told that there is none, or that there is.
        dev.wake_queue(0);
    }

    fn request(
        &self,
        operation: Operation,
        data: &[u8],
        _answer: &mut [u8; CONFIG_MAX],
    ) -> Result<usize, Status> {
        match operation {
            Operation::LinkChanged => {
                let far = FarLink::decode(data).ok_or(Status::BadValue)?;
                self.dev.far_link_is(far);
                // The MTU is changed by who may wait for RTNL.
                self.agent.kick();
                Ok(0)
            }
            _ => Err(Status::NotSupported),
        }
    }
}

/// A frame that is not sent.
fn refuse(dev: &Split, skb: Skb, reason: DropReason) {
    dev.counters.tx_dropped.add(1);
    skb.discard(reason);
}
