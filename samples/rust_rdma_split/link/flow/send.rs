// SPDX-License-Identifier: GPL-2.0

//! What is sent: frames, and questions that somebody waits for an answer to.

use super::{Live, State};
use crate::kernel_ext::errno::enotconn;
use crate::link::{Gather, Owner, Shared, CONFIG_MAX, MORE_POOLS};
use crate::protocol::{Misuse, Operation, Transfer, Unsent, Variant, DATA_HEADER};
use crate::rdma::consumer::{Chunk, RequestMemory};
use kernel::prelude::*;
use kernel::sync::Arc;

/// `data`, which are checked to be no more than there is room for.
pub(super) fn own(data: &[u8]) -> ([u8; CONFIG_MAX], usize) {
    let mut room = [0; CONFIG_MAX];
    let length = data.len().min(CONFIG_MAX);
    room[..length].copy_from_slice(&data[..length]);
    (room, length)
}

/// Where a connection is whose peer wants more pools.
#[derive(Clone, Copy)]
pub(super) struct Standing {
    pub(super) is_up: bool,
    pub(super) is_ending: bool,
    /// Pools that it has got because it asked for more.
    pub(super) added: Option<usize>,
}

impl Standing {
    /// Whether there may be one more. A pool is registered on the data channel, which takes that only when it is connected;
    /// who asks too early asks again when it is told of the first pools.
    pub(super) fn allows_more(self) -> bool {
        self.is_up && !self.is_ending && self.added.is_some_and(|added| added < MORE_POOLS)
    }
}

impl<O: Owner> Shared<O> {
    pub(in crate::link) fn can_send(
        self: &Arc<Self>,
        length: usize,
    ) -> core::result::Result<(), Unsent> {
        let size = u32::try_from(length).map_err(|_| Unsent::TooLarge)?;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let has_room = match &state.live {
            Some(live) if state.is_up => match DATA_HEADER + length {
                length if live.rooms.has(length) => Ok(()),
                length if live.rooms.fits(length) => Err(Unsent::NoElement),
                _ => Err(Unsent::TooLarge),
            },
            _ => Err(Unsent::Closed),
        };
        let can = has_room.and_then(|()| state.endpoint.can_send(size));
        state.is_starved |= can.is_err();
        if has_room.is_ok() && can == Err(Unsent::NoElement) {
            state.endpoint.want(size);
            state.pump(&self.traffic);
        }
        let wakes = state.fault.is_some();
        drop(guard);
        if wakes {
            self.wake();
        }
        can
    }

    /// A frame that cannot be sent since there is no connection, or none yet.
    fn refuse(&self, state: &mut State<O>, length: u32) -> Unsent {
        if state.endpoint.is_running() {
            self.traffic.dropped_error.add();
        } else {
            // Counts it.
            let _ = state.endpoint.send(length);
        }
        state.is_starved = true;
        Unsent::Closed
    }

    /// Memory for a frame of that size with what is before it. Who finds none is told when there is some again, if there
    /// can be.
    fn take_room(
        &self,
        live: &mut Live<O>,
        is_starved: &mut bool,
        size: usize,
    ) -> core::result::Result<Chunk, Unsent> {
        live.rooms.take(size).ok_or_else(|| {
            self.traffic.dropped_no_room.add();
            if !live.rooms.fits(size) {
                return Unsent::TooLarge;
            }
            *is_starved = true;
            Unsent::NoElement
        })
    }

    pub(in crate::link) fn send<G: Gather + ?Sized>(
        self: &Arc<Self>,
        frame: &G,
    ) -> core::result::Result<(), Unsent> {
        let length = u32::try_from(frame.len()).map_err(|_| Unsent::TooLarge)?;
        if self.options.variant == Variant::Pull {
            return self.send_pulled(frame, length);
        }
        let size = DATA_HEADER + frame.len();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let live = match &mut state.live {
            Some(live) if state.is_up => live,
            _ => return Err(self.refuse(state, length)),
        };
        let epoch = state.epoch;
        let mut chunk = self.take_room(live, &mut state.is_starved, size)?;
        // Copied without the lock.
        drop(guard);
        let copied = match chunk.get_mut(DATA_HEADER..size) {
            Some(room) => frame.copy_to(room),
            None => Err(EINVAL),
        };
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.epoch != epoch {
            let refused = self.refuse(state, length);
            drop(guard);
            return Err(refused);
        }
        let result = match copied {
            Ok(()) => state.dispatch(chunk, length, &self.traffic),
            Err(_) => {
                self.traffic.dropped_error.add();
                if let Some(live) = &mut state.live {
                    live.put_room(RequestMemory::Chunk(chunk));
                }
                Err(Unsent::Empty)
            }
        };
        let wakes = state.fault.is_some();
        drop(guard);
        if wakes {
            self.wake();
        }
        result
    }

    /// Pull: the endpoint says where the frame is copied to.
    fn send_pulled<G: Gather + ?Sized>(
        self: &Arc<Self>,
        frame: &G,
        length: u32,
    ) -> core::result::Result<(), Unsent> {
        let size = DATA_HEADER + frame.len();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let epoch = state.epoch;
        let live = match &mut state.live {
            Some(live) if state.is_up => live,
            _ => return Err(self.refuse(state, length)),
        };
        // For the case that it travels in a message.
        let mut chunk = self.take_room(live, &mut state.is_starved, size)?;
        let transfer = match state.endpoint.send(length) {
            Ok(transfer) => transfer,
            Err(unsent) => {
                live.put_room(RequestMemory::Chunk(chunk));
                state.is_starved = true;
                state.pump(&self.traffic);
                let wakes = state.fault.is_some();
                drop(guard);
                if wakes {
                    self.wake();
                }
                return Err(unsent);
            }
        };
        let Transfer::Fill {
            pool,
            element,
            handle,
        } = transfer
        else {
            // Messages are in order, so that it is copied with the lock; it is small.
            let copied = chunk
                .get_mut(DATA_HEADER..size)
                .is_some_and(|room| frame.copy_to(room).is_ok());
            if !copied {
                let _ = state.endpoint.unsend(transfer);
                live.put_room(RequestMemory::Chunk(chunk));
                self.traffic.dropped_error.add();
                return Err(Unsent::Empty);
            }
            let posted = state.post(transfer, chunk, length, &self.traffic);
            let wakes = state.fault.is_some();
            drop(guard);
            if wakes {
                self.wake();
            }
            return posted;
        };
        live.put_room(RequestMemory::Chunk(chunk));
        let fill = live
            .pools
            .iter_mut()
            .find(|own| own.offer.index == pool)
            .and_then(|own| own.fills.get_mut(element as usize)?.take());
        let Some(mut fill) = fill else {
            let _ = state.endpoint.unsend(transfer);
            self.traffic.dropped_error.add();
            return Err(Unsent::NoElement);
        };
        drop(guard);
        let copied = fill
            .get_mut(..frame.len())
            .is_some_and(|room| frame.copy_to(room).is_ok());
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.epoch != epoch {
            let refused = self.refuse(state, length);
            drop(guard);
            return Err(refused);
        }
        if let Some(live) = &mut state.live {
            let own = live.pools.iter_mut().find(|own| own.offer.index == pool);
            if let Some(place) = own.and_then(|own| own.fills.get_mut(element as usize)) {
                *place = Some(fill);
            }
        }
        if !copied {
            let _ = state.endpoint.unsend(transfer);
            self.traffic.dropped_error.add();
            return Err(Unsent::Empty);
        }
        let _ = state.endpoint.written(handle);
        state.pump(&self.traffic);
        let wakes = state.fault.is_some();
        drop(guard);
        if wakes {
            self.wake();
        }
        Ok(())
    }

    /// Puts a question to the peer.
    pub(in crate::link) fn put_question(
        self: &Arc<Self>,
        operation: Operation,
        data: &[u8],
    ) -> Result {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if !state.is_up {
            return Err(enotconn());
        }
        state.reply = None;
        state
            .endpoint
            .request(operation, data)
            .map_err(|misuse| match misuse {
                Misuse::Busy => EBUSY,
                _ => EINVAL,
            })?;
        state.pump(&self.traffic);
        let wakes = state.fault.is_some();
        drop(guard);
        if wakes {
            self.wake();
        }
        Ok(())
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_flow_send)]
mod tests {
    use super::*;

    #[test]
    fn more_pools_are_for_a_connection_that_is_up() {
        let up = Standing {
            is_up: true,
            is_ending: false,
            added: Some(0),
        };
        assert!(up.allows_more());
        assert!(!Standing { is_up: false, ..up }.allows_more());
        assert!(!Standing {
            is_ending: true,
            ..up
        }
        .allows_more());
        assert!(!Standing { added: None, ..up }.allows_more());
        for added in 0..2 * MORE_POOLS {
            let one = Standing {
                added: Some(added),
                ..up
            };
            assert_eq!(one.allows_more(), added < MORE_POOLS);
        }
    }
}
