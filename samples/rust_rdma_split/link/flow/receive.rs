// SPDX-License-Identifier: GPL-2.0

//! What arrives: control messages, notifications and frames.

use super::send::{own, Standing};
use super::{Channel, Fault, Live, OwnPool, Question, Reply, State, Tag};
use crate::link::{Frame, Owner, Place};
use crate::protocol::{Event, Handle, Variant};
use crate::rdma::consumer::{Chunk, RequestMemory};
use crate::rdma::ulp::Outcome;
use crate::rdma::WcOpcode;

impl<O: Owner> Channel<O> {
    pub(super) fn control_in(&self, memory: RequestMemory, outcome: &Outcome) {
        let shared = &self.shared;
        let Some(chunk) = memory.into_chunk() else {
            return;
        };
        let (mut wakes, mut ends_batch, mut has_frames) = (false, false, false);
        let mut guard = shared.state.lock();
        let state = &mut *guard;
        if state.epoch != self.epoch {
            drop(guard);
            return;
        }
        shared.traffic.control_received.add();
        let bytes = chunk.get(..outcome.byte_len as usize).unwrap_or(&[]);
        match state.endpoint.receive_control(bytes) {
            Ok(Event::Nothing) => {}
            Ok(Event::Wanted { element_size, .. }) => {
                let standing = Standing {
                    is_up: state.is_up,
                    is_ending: state.is_ending,
                    added: state.live.as_ref().map(|live| live.added),
                };
                if standing.allows_more() && shared.options.more(element_size).is_some() {
                    state.wanted = Some(element_size);
                    wakes = true;
                }
            }
            Ok(Event::Elements) => ends_batch = state.may_write(),
            Ok(Event::Frames) => has_frames = true,
            // Somebody may wait for the end of all pools.
            Ok(Event::Flush) => wakes = true,
            Ok(Event::Request(operation, data)) => {
                let (data, length) = own(data);
                state.question = Some(Question {
                    operation,
                    data,
                    length,
                });
                wakes = true;
            }
            Ok(Event::Reply(_, status, data)) => {
                let (data, length) = own(data);
                state.reply = Some(Reply {
                    status,
                    data,
                    length,
                });
                shared.answered.complete();
            }
            Err(_) => state.fail(Fault::Peer),
        }
        let posted = match &state.live {
            Some(live) => live.control.recv(chunk, Tag::ControlIn),
            None => Ok(()),
        };
        if posted.is_err() {
            state.fail(Fault::Lost);
        }
        state.pump(&shared.traffic);
        wakes |= state.fault.is_some();
        drop(guard);
        drop(posted);
        if has_frames {
            self.arrivals();
        }
        if ends_batch {
            self.end_batch();
        }
        if wakes {
            shared.wake();
        }
    }

    /// Posts a receive of the data channel again.
    fn receive_again(state: &mut State<O>, chunk: Chunk) {
        let posted = match &state.live {
            Some(Live {
                data: Some(data), ..
            }) => data.recv(chunk, Tag::DataIn).is_ok(),
            _ => true,
        };
        if !posted {
            state.fail(Fault::Lost);
        }
    }

    pub(super) fn data_in(&self, memory: RequestMemory, outcome: &Outcome) {
        let shared = &self.shared;
        let Some(chunk) = memory.into_chunk() else {
            return;
        };
        let mut guard = shared.state.lock();
        let state = &mut *guard;
        if state.epoch != self.epoch {
            drop(guard);
            return;
        }
        shared.traffic.data_received.add();
        if let Some(bits) = outcome.imm_data {
            // Those of a message tell of no write: what is in the element is old.
            let result = match outcome.opcode {
                Some(WcOpcode::RecvRdmaWithImm) => state
                    .endpoint
                    .receive_immediate(bits, outcome.byte_len)
                    .map_err(drop),
                _ => Err(()),
            };
            // Before its element is given back, so that the peer never has more of these than there are receives.
            Self::receive_again(state, chunk);
            if result.is_err() {
                state.fail(Fault::Peer);
            }
            let wakes = state.fault.is_some();
            drop(guard);
            if result.is_ok() {
                self.arrivals();
            }
            if wakes {
                shared.wake();
            }
            return;
        }
        let bytes = chunk.get(..outcome.byte_len as usize).unwrap_or(&[]);
        let handle = match state.endpoint.receive_data(bytes) {
            Ok(Some(delivery)) => {
                let owner = state.owner.clone();
                drop(guard);
                if let Some(owner) = owner {
                    owner.frame(Frame {
                        place: Place::Own(delivery.frame),
                        length: delivery.frame.len(),
                    });
                }
                guard = shared.state.lock();
                guard.has_frames = true;
                Some(delivery.handle)
            }
            Ok(None) => None,
            Err(_) => {
                state.fail(Fault::Peer);
                None
            }
        };
        let state = &mut *guard;
        if state.epoch == self.epoch {
            Self::receive_again(state, chunk);
        }
        if let Some(handle) = handle {
            // Also where the connection has ended since: the pool is this side's.
            let _ = state.endpoint.release(handle);
        }
        let wakes = state.fault.is_some();
        drop(guard);
        self.end_batch();
        if wakes {
            shared.wake();
        }
    }

    /// Frames have arrived in elements.
    fn arrivals(&self) {
        let shared = &self.shared;
        let mut used = None;
        loop {
            let mut guard = shared.state.lock();
            let state = &mut *guard;
            if let Some(handle) = used.take() {
                let _ = state.endpoint.release(handle);
                state.has_frames = true;
            }
            // Where the connection has ended, what is left is taken by who ends it.
            if state.epoch != self.epoch {
                break;
            }
            if shared.options.variant == Variant::Pull {
                state.read(&shared.traffic);
                break;
            }
            let Some(live) = &state.live else {
                break;
            };
            let Some(arrival) = state.endpoint.next_arrival() else {
                break;
            };
            let is_it = |pool: &&OwnPool| pool.offer.index == arrival.pool.index;
            let region = live.pools.iter().find(is_it);
            let region = region.and_then(|pool| pool.region.clone());
            let owner = state.owner.clone();
            drop(guard);
            if let (Some(region), Some(owner)) = (region, owner) {
                owner.frame(Frame {
                    place: Place::Shared(&region, arrival.offset() as usize),
                    length: arrival.length as usize,
                });
            }
            used = Some(arrival.handle);
        }
        self.end_batch();
    }

    /// Pull: a frame was read.
    pub(super) fn was_read(&self, memory: RequestMemory, handle: Handle, length: usize) {
        let shared = &self.shared;
        let owner = shared.state.lock().owner.clone();
        if let (RequestMemory::Chunk(chunk), Some(owner)) = (&memory, owner) {
            if let Some(frame) = chunk.get(..length) {
                owner.frame(Frame {
                    place: Place::Own(frame),
                    length,
                });
            }
        }
        let mut guard = shared.state.lock();
        let state = &mut *guard;
        state.has_frames = true;
        if state.epoch != self.epoch {
            drop(guard);
            return;
        }
        let _ = state.endpoint.release(handle);
        if let Some(live) = &mut state.live {
            live.put_read(memory);
        }
        state.read(&shared.traffic);
        let wakes = state.fault.is_some();
        drop(guard);
        self.end_batch();
        if wakes {
            shared.wake();
        }
    }
}
