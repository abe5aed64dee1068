// SPDX-License-Identifier: GPL-2.0

//! The end of a connection, after which nothing is left of it.

use super::Steps;
use crate::kernel_ext::rcu;
use crate::link::flow::{Fault, Live, OwnPool};
use crate::link::{Frame, Owner, Place, Shared};
use crate::rdma::consumer::Keep;
use kernel::prelude::*;
use kernel::sync::Arc;

/// Milliseconds for all pools to be given up at the end of an orderly connection.
const CLOSE: u64 = 2_000;

impl<O: Owner> Shared<O> {
    /// Ends the connection, whatever it was: when this returns nothing of it is left.
    pub(super) fn end_connection(self: &Arc<Self>, steps: &mut Steps<O>, fault: Option<Fault>) {
        let (live, was_up, owner, incoming) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            state.epoch = state.epoch.wrapping_add(1);
            state.endpoint.stop();
            state.news.clear();
            state.fault = None;
            state.question = None;
            state.reply = None;
            state.wanted = None;
            state.has_data = false;
            (
                state.live.take(),
                core::mem::take(&mut state.is_up),
                state.owner.clone(),
                (state.incoming_control.take(), state.incoming_data.take()),
            )
        };
        // Who waits for an answer gets none.
        self.answered.complete();
        let counter = match fault {
            Some(Fault::Removed) => Some(&self.traffic.device_removed),
            Some(Fault::Peer) => Some(&self.traffic.reset),
            Some(_) if was_up => Some(&self.traffic.disconnected),
            Some(_) => Some(&self.traffic.connect_failed),
            None => None,
        };
        if let Some(counter) = counter {
            counter.add();
        }
        for id in [&steps.data, &steps.control].into_iter().flatten() {
            // The peer is told, if there is one.
            let _ = id.disconnect();
        }
        if let Some(live) = live {
            let Live {
                data,
                control,
                pools,
                rooms,
                reads,
                control_rooms,
                retired,
                added: _,
                keeps,
            } = live;
            // Drained: no handler of this connection runs when they are gone.
            drop(data);
            drop(control);
            // Of one that could not be drained what is not complete goes with its completion queue: here, while the
            // memory has others who keep it, and not with a late completion in a soft interrupt.
            steps.gear = None;
            // Who sends copies a frame to a chunk that he has taken, without the lock. He gives it up once he finds that
            // the connection is over: in a soft interrupt, where no memory of a device can be freed. So all others
            // stay until then.
            rcu::synchronize();
            self.take_leftovers(&pools, owner.as_deref());
            drop((pools, rooms, reads, control_rooms, retired));
            drop::<KVec<Keep>>(keeps);
        }
        steps.gear = None;
        steps.data = None;
        steps.control = None;
        steps.deadline = None;
        drop(incoming);
        if let (true, Some(owner)) = (was_up, owner) {
            owner.changed(false);
        }
    }

    /// What has arrived and nobody has taken is delivered; then the pools are gone.
    fn take_leftovers(&self, pools: &[OwnPool], owner: Option<&O>) {
        loop {
            let arrival = self.state.lock().endpoint.next_arrival();
            let Some(arrival) = arrival else {
                break;
            };
            let is_it = |pool: &&OwnPool| pool.offer.index == arrival.pool.index;
            let region = pools
                .iter()
                .find(is_it)
                .and_then(|pool| pool.region.as_ref());
            if let (Some(region), Some(owner)) = (region, owner) {
                owner.frame(Frame {
                    place: Place::Shared(region, arrival.offset() as usize),
                    length: arrival.length as usize,
                });
            }
            let _ = self.state.lock().endpoint.release(arrival.handle);
        }
        let mut state = self.state.lock();
        for pool in pools {
            let _ = state.endpoint.withdraw(pool.offer.index);
        }
        while state.endpoint.next_freed().is_some() {}
    }

    /// Goes on with the end of an orderly connection; whether that is done.
    pub(super) fn close(&self, steps: &mut Steps<O>, now: u64) -> bool {
        let mut state = self.state.lock();
        if !state.is_up {
            return true;
        }
        let began = match steps.closing {
            Some(began) => began,
            None => {
                state.endpoint.close();
                *steps.closing.insert(now)
            }
        };
        state.pump(&self.traffic);
        state.endpoint.is_closed() || now.saturating_sub(began) >= CLOSE
    }

    /// The link is over, for good.
    pub(super) fn end(self: &Arc<Self>) {
        // No work of it is queued from now on.
        self.state.lock().is_over = true;
        // What is queued already still has the owner.
        self.queues.bottom.flush();
        let owner = self.state.lock().owner.take();
        if let Some(parent) = &self.parent {
            parent.parted(self, owner);
        } else {
            drop(owner);
        }
        self.over.complete_all();
    }
}
