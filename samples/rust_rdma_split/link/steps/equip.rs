// SPDX-License-Identifier: GPL-2.0

//! What a connection needs on its device: regions, pools of buffers and queue pairs.

use super::connect::{ACK_TIMEOUT, MIN_RNR_TIMER};
use super::{Gear, Steps};
use crate::kernel_ext::errno::eopnotsupp;
use crate::link::flow::{Channel, Fault, Live, OwnPool, State};
use crate::link::stock::{chunks, Stock};
use crate::link::{Options, Owner, Shape, Shared, MORE_POOLS};
use crate::protocol::{
    self, PoolKind, PoolOffer, Service, Variant, CONTROL_DEPTH, CONTROL_MAX, DATA_HEADER, MAX_POOLS,
};
use crate::rdma::consumer::{Buffer, Cq, Depth, Pd, PollContext, Region};
use crate::rdma::{ibdev_err, QpType};
use kernel::prelude::*;
use kernel::sync::Arc;

/// Control messages of this side that may be under way.
const CONTROL_SENDS: usize = 8;

/// The queue pairs of a service.
pub(super) fn qp_type(service: Service) -> QpType {
    match service {
        Service::Acknowledged => QpType::Rc,
        Service::Unacknowledged => QpType::Uc,
    }
}

/// What a peer is told of a pool that has no address yet.
fn offer(index: u32, kind: PoolKind, elements: u32, element_size: u32) -> PoolOffer {
    PoolOffer {
        index,
        kind,
        elements,
        element_size,
        address: 0,
        key: 0,
        context: u64::from(index),
    }
}

impl<O: Owner> Shared<O> {
    /// Makes all for a connection on the device of the control channel, with the control channel's queue pair.
    pub(super) fn equip(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let options = &self.options;
        let id = steps.id(protocol::Channel::Control)?;
        if id.is_iwarp() {
            if self
                .queues
                .said
                .allows(c"rust_rdma_split: devices that cannot be used")
            {
                let lease = id.lease();
                if let Ok(lease) = lease {
                    ibdev_err!(
                        lease,
                        "iWARP has no writes with immediate data, and there a write that is complete need not have \
                         arrived: RoCE or InfiniBand is needed\n"
                    );
                }
            }
            return Err(eopnotsupp());
        }
        if options.service == Service::Acknowledged {
            id.set_ack_timeout(ACK_TIMEOUT)?;
            id.set_min_rnr_timer(MIN_RNR_TIMER)?;
        }
        let lease = id.lease()?;
        let pd = Pd::new(&lease)?;

        // With room for those of pools that are added later.
        let mut keeps = KVec::with_capacity(64, GFP_KERNEL)?;
        let count = CONTROL_DEPTH + CONTROL_SENDS;
        let mut control_rooms = chunks(&lease, count, CONTROL_MAX, &mut keeps)?;
        let message = options.message_shape();
        // Where all frames are in messages, there is memory for as many to be sent as to be received.
        let shapes = match options.shapes() {
            [] => &[message],
            shapes => shapes,
        };
        let rooms = Stock::new(&lease, shapes, DATA_HEADER, &mut keeps)?;
        let reads = match options.variant {
            Variant::Pull if !options.shapes().is_empty() => {
                let elements = if options.largest > 4096 { 8 } else { 32 };
                let size = options.largest;
                Stock::new(&lease, &[Shape { elements, size }], 0, &mut keeps)?
            }
            _ => Stock::empty(),
        };
        let pools = Self::pools(options, &pd)?;
        let is_written = |pool: &&OwnPool| pool.offer.kind == PoolKind::Write;
        let written: u32 = pools
            .iter()
            .filter(is_written)
            .map(|pool| pool.offer.elements)
            .sum();
        // One for each message and each immediate.
        let recvs = message.elements + written;
        let size = message.size as usize + DATA_HEADER;
        let inbox = chunks(&lease, recvs as usize, size, &mut keeps)?;

        let depth = Depth {
            sends: (rooms.count() + reads.count()) as u32 + State::<O>::OTHER_REQUESTS,
            recvs: recvs + options.most_more(),
        };
        let control_depth = Depth {
            sends: CONTROL_SENDS as u32,
            recvs: CONTROL_DEPTH as u32,
        };
        let entries = depth.sends + depth.recvs + control_depth.sends + control_depth.recvs + 4;
        let cq = Cq::new(&lease, entries, PollContext::SoftIrq)?;
        let epoch = self.state.lock().epoch;
        let channel = Channel {
            shared: self.clone(),
            epoch,
        };
        let channel = Arc::new(channel, GFP_KERNEL)?;
        let control = id.create_qp(&pd, &cq, control_depth, &channel)?;
        for _ in 0..CONTROL_DEPTH {
            let chunk = control_rooms.pop().ok_or(EINVAL)?;
            let posted = control.recv(chunk, crate::link::flow::Tag::ControlIn);
            posted.map_err(|unposted| unposted.error)?;
        }
        let live = Live {
            data: None,
            control,
            control_rooms,
            rooms,
            reads,
            pools,
            retired: KVec::with_capacity(MAX_POOLS, GFP_KERNEL)?,
            added: 0,
            keeps,
        };
        steps.gear = Some(Gear {
            inbox,
            depth,
            cq,
            pd,
        });
        let before = self.state.lock().live.replace(live);
        drop(before);
        Ok(())
    }

    /// The pools of this side: of messages, and of other frames.
    fn pools(options: &Options, pd: &Arc<Pd>) -> Result<KVec<OwnPool>> {
        let mut pools = KVec::with_capacity(MAX_POOLS, GFP_KERNEL)?;
        let message = options.message_shape();
        let messages = OwnPool {
            offer: offer(0, PoolKind::Send, message.elements, message.size),
            region: None,
            fills: KVec::new(),
        };
        pools.push(messages, GFP_KERNEL)?;
        for shape in options.shapes().iter().filter(|shape| shape.elements != 0) {
            let pool = Self::pool(options.kind(), pd, shape, pools.len() as u32)?;
            pools.push(pool, GFP_KERNEL)?;
        }
        Ok(pools)
    }

    /// A pool with memory, of a kind that needs some.
    fn pool(kind: PoolKind, pd: &Arc<Pd>, shape: &Shape, index: u32) -> Result<OwnPool> {
        let size = shape.size as usize;
        let buffer = Buffer::new(pd.lease(), size * shape.elements as usize)?;
        let mut fills = KVec::new();
        let region = match kind {
            PoolKind::Read => {
                let (region, chunks) = Region::readable(pd, buffer, size)?;
                fills.reserve(chunks.len(), GFP_KERNEL)?;
                for chunk in chunks {
                    fills.push(Some(chunk), GFP_KERNEL)?;
                }
                region
            }
            _ => Region::writable(pd, buffer)?,
        };
        Ok(OwnPool {
            offer: offer(index, kind, shape.elements, shape.size),
            region: Some(region),
            fills,
        })
    }

    /// Gives the peer one more pool, since it lacks elements of `size` bytes. It is announced when it is registered.
    pub(super) fn add_pool(&self, steps: &Steps<O>, size: u32) -> Result {
        let options = &self.options;
        let gear = steps.gear.as_ref().ok_or(EINVAL)?;
        let shape = options.more(size).ok_or(EINVAL)?;
        let added = match &self.state.lock().live {
            Some(live) if live.added < MORE_POOLS => live.added,
            _ => return Ok(()),
        };
        // Behind those that were there at first, whether they are still there or not.
        let index = 1 + options.shapes().len() + added;
        let pool = Self::pool(options.kind(), &gear.pd, &shape, index as u32)?;
        let mut keeps = KVec::new();
        let room = options.message_shape().size as usize + DATA_HEADER;
        let inbox = chunks(gear.pd.lease(), shape.elements as usize, room, &mut keeps)?;
        let mut state = self.state.lock();
        if !state.is_up {
            return Ok(());
        }
        // Who ends a connection has `steps`, as this task does: it is the same one.
        let Some(live) = &mut state.live else {
            return Ok(());
        };
        let (Some(data), Some(region)) = (&live.data, &pool.region) else {
            return Err(EINVAL);
        };
        // All that may fail for want of memory is done with room that there is.
        if live.keeps.capacity() - live.keeps.len() < keeps.len() {
            return Err(ENOMEM);
        }
        for keep in keeps {
            let _ = live.keeps.push_within_capacity(keep);
        }
        let mut posted = Ok(());
        for chunk in inbox {
            posted = posted.and_then(|()| {
                let posted = data.recv(chunk, crate::link::flow::Tag::DataIn);
                posted.map_err(|unposted| unposted.error)
            });
        }
        let posted = posted.and_then(|()| {
            let registered = data.register(region, crate::link::flow::Tag::Register(index as u32));
            registered.map_err(|unposted| unposted.error)
        });
        // There is room for all of them.
        let _ = live.pools.push_within_capacity(pool);
        live.added += 1;
        if posted.is_err() {
            // A queue pair that takes nothing any more.
            state.fail(Fault::Lost);
        }
        drop(state);
        self.traffic.registrations.add();
        self.traffic.pools_added.add();
        posted
    }

    /// Makes the queue pair of the data channel, with its receives posted.
    pub(super) fn make_data_channel(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let mut gear = steps.gear.take().ok_or(EINVAL)?;
        let inbox = core::mem::take(&mut gear.inbox);
        let gear = steps.gear.insert(gear);
        let id = steps.data.as_ref().ok_or(EINVAL)?;
        if self.options.service == Service::Acknowledged {
            id.set_ack_timeout(ACK_TIMEOUT)?;
            id.set_min_rnr_timer(MIN_RNR_TIMER)?;
        }
        let channel = Channel {
            shared: self.clone(),
            epoch: self.state.lock().epoch,
        };
        let channel = Arc::new(channel, GFP_KERNEL)?;
        // Fails if it is of another device than the control channel.
        let data = id.create_qp(&gear.pd, &gear.cq, gear.depth, &channel)?;
        for chunk in inbox {
            let posted = data.recv(chunk, crate::link::flow::Tag::DataIn);
            posted.map_err(|unposted| unposted.error)?;
        }
        let mut guard = self.state.lock();
        let before = match &mut guard.live {
            Some(live) => live.data.replace(data),
            None => Some(data),
        };
        drop(guard);
        drop(before);
        Ok(())
    }
}
