// SPDX-License-Identifier: GPL-2.0

//! Messages and frames: what is posted, and what comes of it.

use super::statistics::Traffic;
use super::steps::{Events, News};
use super::stock::Stock;
use super::{Frame, Gather, Owner, Place, Shared, CONFIG_MAX, MORE_POOLS, POOLS};
use crate::kernel_ext::errno::enotconn;
use crate::protocol::{
    Element, Endpoint, Event, Handle, Misuse, Operation, PoolOffer, Status, Token, Transfer,
    Unsent, Variant, CONTROL_MAX, DATA_HEADER,
};
use crate::rdma::consumer::{self, Chunk, Done, Keep, Region, RequestMemory, Unposted, User};
use crate::rdma::ulp::Outcome;
use crate::rdma::{Remote, WcOpcode};
use crate::rdma_cm::{Connected, Id};
use kernel::prelude::*;
use kernel::sync::Arc;

/// Room for what the connection manager says between two steps.
const NEWS: usize = 16;

/// Why a connection is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The peer did what it should not, which its endpoint has counted.
    Peer,
    /// It was never there: at what it failed, and why.
    Failed(&'static str, Error),
    /// It is lost, or the peer has ended it.
    Lost,
    /// The device goes.
    Removed,
}

/// What a request is.
#[derive(Clone, Copy)]
pub(super) enum Tag {
    /// Receives a control message.
    ControlIn,
    /// Sends one.
    ControlOut(Token),
    /// Receives a message, or immediate data.
    DataIn,
    /// Sends a frame in a message.
    Message,
    /// Writes a frame, of which the peer is told when that is done unless immediate data do.
    Write(Option<Handle>),
    /// Reads a frame of so many bytes.
    Read(Handle, usize),
    /// Registers the pool of this index.
    Register(u32),
    /// Invalidates a region.
    Invalidate,
}

/// A pool of this side.
pub(super) struct OwnPool {
    /// What the peer is told; address and key once it is registered.
    pub(super) offer: PoolOffer,
    pub(super) region: Option<Arc<Region>>,
    /// Pull: the elements, unless somebody fills them.
    pub(super) fills: KVec<Option<Chunk>>,
}

/// What frames and messages are posted with.
pub(super) struct Live<O: Owner> {
    // First the queue pairs: they are drained before anything else goes.
    pub(super) data: Option<Connected<Channel<O>>>,
    pub(super) control: Connected<Channel<O>>,
    /// Memory for control messages that nobody uses.
    pub(super) control_rooms: KVec<Chunk>,
    /// Memory to send frames from that nobody uses.
    pub(super) rooms: Stock<Chunk>,
    /// Pull: memory to read frames to.
    pub(super) reads: Stock<Chunk>,
    pub(super) pools: KVec<OwnPool>,
    /// Regions of pools that are given up, and invalidated: the last reference to one is dropped where one may sleep.
    pub(super) retired: KVec<Arc<Region>>,
    /// Pools that the peer has got because it asked for more.
    pub(super) added: usize,
    pub(super) keeps: KVec<Keep>,
}

/// What the peer asks.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub(super) operation: Operation,
    pub(super) data: [u8; CONFIG_MAX],
    pub(super) length: usize,
}

/// What the peer has answered.
#[derive(Clone, Copy)]
pub(super) struct Reply {
    pub(super) status: Status,
    pub(super) data: [u8; CONFIG_MAX],
    pub(super) length: usize,
}

/// `data`, which are checked to be no more than there is room for.
fn own(data: &[u8]) -> ([u8; CONFIG_MAX], usize) {
    let mut room = [0; CONFIG_MAX];
    let length = data.len().min(CONFIG_MAX);
    room[..length].copy_from_slice(&data[..length]);
    (room, length)
}

/// What is behind the lock of a link.
pub(super) struct State<O: Owner> {
    pub(super) endpoint: KBox<Endpoint<KVec<Element>>>,
    pub(super) owner: Option<Arc<O>>,
    pub(super) live: Option<Live<O>>,
    /// Tells one connection from the next.
    pub(super) epoch: u32,
    /// The sessions of it, this side's and the peer's.
    pub(super) sessions: (u32, u32),
    /// Both channels are connected.
    pub(super) is_up: bool,
    /// Somebody was told that nothing can be sent.
    is_starved: bool,
    /// To be told when the batch is over.
    is_writable: bool,
    has_frames: bool,
    /// For the steps.
    pub(super) news: KVec<News>,
    pub(super) incoming_control: Option<Id<Events<O>>>,
    pub(super) incoming_data: Option<Id<Events<O>>>,
    /// The host has asked for its data channel, which it does once on a connection.
    pub(super) has_data: bool,
    pub(super) fault: Option<Fault>,
    pub(super) question: Option<Question>,
    pub(super) reply: Option<Reply>,
    /// The peer lacks elements of so many bytes.
    pub(super) wanted: Option<u32>,
    /// It is to end.
    pub(super) is_ending: bool,
    /// It has ended.
    pub(super) is_over: bool,
}

impl<O: Owner> State<O> {
    pub(super) fn new(endpoint: KBox<Endpoint<KVec<Element>>>) -> Result<Self> {
        Ok(Self {
            endpoint,
            owner: None,
            live: None,
            epoch: 0,
            sessions: (0, 0),
            is_up: false,
            is_starved: false,
            is_writable: false,
            has_frames: false,
            news: KVec::with_capacity(NEWS, GFP_KERNEL)?,
            incoming_control: None,
            incoming_data: None,
            has_data: false,
            fault: None,
            question: None,
            reply: None,
            wanted: None,
            is_ending: false,
            is_over: false,
        })
    }

    /// Notes why the connection is to end; the first reason counts.
    pub(super) fn fail(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// There is something to send with; whether somebody waits for it.
    fn may_write(&mut self) -> bool {
        let is_starved = core::mem::take(&mut self.is_starved);
        self.is_writable |= is_starved;
        is_starved
    }

    /// Posts the control messages that there are.
    pub(super) fn pump(&mut self, traffic: &Traffic) {
        let Some(live) = &mut self.live else {
            return;
        };
        let mut is_broken = false;
        while let Some(mut chunk) = live.control_rooms.pop() {
            let outgoing = <&mut [u8; CONTROL_MAX]>::try_from(&mut chunk[..])
                .ok()
                .and_then(|bytes| self.endpoint.poll_control(bytes));
            let Some(outgoing) = outgoing else {
                let _ = live.control_rooms.push_within_capacity(chunk);
                break;
            };
            let posted = live.control.transfer(
                consumer::Transfer::Send,
                chunk,
                0..outgoing.length,
                Tag::ControlOut(outgoing.token),
            );
            if let Err(Unposted { memory, .. }) = posted {
                if let Some(chunk) = memory.into_chunk() {
                    let _ = live.control_rooms.push_within_capacity(chunk);
                }
                is_broken = true;
                break;
            }
            traffic.control_sent.add();
        }
        while let Some(offer) = self.endpoint.next_freed() {
            is_broken |= !live.retire(offer.index, traffic);
        }
        if is_broken {
            self.fail(Fault::Lost);
        }
    }

    /// Pull: reads the frames that the peer has told of.
    fn read(&mut self, traffic: &Traffic) {
        let Some(live) = &mut self.live else {
            return;
        };
        let Some(data) = &live.data else {
            return;
        };
        let mut is_broken = false;
        while live.reads.has(0) {
            let Some(arrival) = self.endpoint.next_arrival() else {
                break;
            };
            let length = arrival.length as usize;
            if !live.reads.fits(length) {
                traffic.received_too_large.add();
                let _ = self.endpoint.release(arrival.handle);
                continue;
            }
            // All are of one size.
            let Some(chunk) = live.reads.take(length) else {
                break;
            };
            let remote = Remote {
                addr: arrival.pool.address + arrival.offset(),
                rkey: arrival.pool.key,
            };
            let read = consumer::Transfer::Read(remote);
            let tag = Tag::Read(arrival.handle, length);
            if let Err(Unposted { memory, .. }) = data.transfer(read, chunk, 0..length, tag) {
                live.put_read(memory);
                is_broken = true;
                break;
            }
            traffic.rdma_reads.add();
        }
        if is_broken {
            self.fail(Fault::Lost);
        }
    }
}

impl<O: Owner> Live<O> {
    fn put_room(&mut self, memory: RequestMemory) {
        // Those that belong elsewhere, of which there are none, go.
        let _ = memory.into_chunk().and_then(|chunk| self.rooms.put(chunk));
    }

    fn put_read(&mut self, memory: RequestMemory) {
        let _ = memory.into_chunk().and_then(|chunk| self.reads.put(chunk));
    }

    /// A pool is given up: nobody may use its memory from now on. Whether that is possible.
    fn retire(&mut self, index: u32, traffic: &Traffic) -> bool {
        let Some(at) = self.pools.iter().position(|pool| pool.offer.index == index) else {
            return true;
        };
        let Some(region) = self.pools.remove(at).ok().and_then(|pool| pool.region) else {
            return true;
        };
        let posted = match &self.data {
            Some(data) if region.is_registered() => data.invalidate(&region, Tag::Invalidate),
            _ => Ok(()),
        };
        traffic.registrations.add();
        // There is room for all of them.
        let _ = self.retired.push_within_capacity(region);
        posted.is_ok()
    }
}

/// Where a connection is whose peer wants more pools.
#[derive(Clone, Copy)]
struct Standing {
    is_up: bool,
    is_ending: bool,
    /// Pools that it has got because it asked for more.
    added: Option<usize>,
}

impl Standing {
    /// Whether there may be one more. A pool is registered on the data channel, which takes that only when it is connected;
    /// who asks too early asks again when it is told of the first pools.
    fn allows_more(self) -> bool {
        self.is_up && !self.is_ending && self.added.is_some_and(|added| added < MORE_POOLS)
    }
}

/// Who uses the queue pairs of one connection.
pub(super) struct Channel<O: Owner> {
    pub(super) shared: Arc<Shared<O>>,
    pub(super) epoch: u32,
}

impl<O: Owner> User for Channel<O> {
    type Tag = Tag;

    fn completed(&self, done: Done<Tag>) {
        if !done.is_success() {
            self.failed(done);
            return;
        }
        let Done {
            tag,
            memory,
            outcome,
        } = done;
        match tag {
            Tag::ControlIn => self.control_in(memory, &outcome),
            Tag::DataIn => self.data_in(memory, &outcome),
            Tag::Read(handle, length) => self.was_read(memory, handle, length),
            Tag::ControlOut(_)
            | Tag::Message
            | Tag::Write(_)
            | Tag::Register(_)
            | Tag::Invalidate => self.was_sent(tag, memory),
        }
    }
}

impl<O: Owner> Channel<O> {
    fn failed(&self, done: Done<Tag>) {
        let is_current = {
            let mut state = self.shared.state.lock();
            let is_current = state.epoch == self.epoch;
            if is_current {
                state.fail(Fault::Lost);
            }
            is_current
        };
        // Those that are flushed when a connection ends are no news.
        if is_current {
            self.shared.traffic.failed_requests.add();
            self.shared.wake();
        }
        drop(done);
    }

    /// Has the end of the batch dealt with.
    fn end_batch(&self) {
        // Where it is queued already that serves as well.
        let _ = self
            .shared
            .queues
            .bottom
            .enqueue::<_, 1>(self.shared.clone());
    }

    /// Something of the send queues is done.
    fn was_sent(&self, tag: Tag, memory: RequestMemory) {
        let shared = &self.shared;
        let (mut wakes, mut is_writable) = (false, false);
        let mut guard = shared.state.lock();
        let state = &mut *guard;
        if state.epoch != self.epoch {
            drop(guard);
            return;
        }
        if let Some(live) = &mut state.live {
            match tag {
                Tag::ControlOut(token) => {
                    if let Some(chunk) = memory.into_chunk() {
                        let _ = live.control_rooms.push_within_capacity(chunk);
                    }
                    state.endpoint.control_done(token);
                    state.pump(&shared.traffic);
                    wakes = state.fault.is_some();
                }
                Tag::Message => {
                    live.put_room(memory);
                    is_writable = state.may_write();
                }
                Tag::Write(handle) => {
                    live.put_room(memory);
                    // Where immediate data tell, the peer may have given the element back by now, and it is another
                    // frame's.
                    if let Some(handle) = handle {
                        let _ = state.endpoint.written(handle);
                        state.pump(&shared.traffic);
                    }
                    is_writable = state.may_write();
                }
                Tag::Register(index) => {
                    let pool = live.pools.iter_mut().find(|pool| pool.offer.index == index);
                    if let Some(OwnPool {
                        offer,
                        region: Some(region),
                        ..
                    }) = pool
                    {
                        offer.address = region.iova();
                        offer.key = region.rkey();
                        if state.endpoint.announce(*offer).is_err() {
                            state.fail(Fault::Failed("announcing a pool", EINVAL));
                        }
                    }
                    state.pump(&shared.traffic);
                    // Pull: it is this side that sends with it.
                    is_writable = state.may_write();
                    wakes = state.fault.is_some();
                }
                // The region goes with the connection.
                _ => {}
            }
        }
        drop(guard);
        if is_writable {
            self.end_batch();
        }
        if wakes {
            shared.wake();
        }
    }

    fn control_in(&self, memory: RequestMemory, outcome: &Outcome) {
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

    fn data_in(&self, memory: RequestMemory, outcome: &Outcome) {
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
    fn was_read(&self, memory: RequestMemory, handle: Handle, length: usize) {
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

impl<O: Owner> Shared<O> {
    /// A batch of completions is over.
    pub(super) fn batch_end(self: &Arc<Self>) {
        let (owner, has_frames) = {
            let mut state = self.state.lock();
            (state.owner.clone(), core::mem::take(&mut state.has_frames))
        };
        let Some(owner) = owner else {
            return;
        };
        if has_frames {
            self.traffic.batches.add();
            owner.frames_end();
        }
        let (is_writable, wakes) = {
            let mut state = self.state.lock();
            state.pump(&self.traffic);
            (
                core::mem::take(&mut state.is_writable),
                state.fault.is_some(),
            )
        };
        if is_writable {
            owner.writable();
        }
        if wakes {
            self.wake();
        }
    }

    pub(super) fn can_send(self: &Arc<Self>, length: usize) -> core::result::Result<(), Unsent> {
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

    pub(super) fn send<G: Gather + ?Sized>(
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
        let Some(mut chunk) = live.rooms.take(size) else {
            self.traffic.dropped_no_room.add();
            if !live.rooms.fits(size) {
                return Err(Unsent::TooLarge);
            }
            state.is_starved = true;
            return Err(Unsent::NoElement);
        };
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
        let Some(mut chunk) = live.rooms.take(size) else {
            self.traffic.dropped_no_room.add();
            if !live.rooms.fits(size) {
                return Err(Unsent::TooLarge);
            }
            state.is_starved = true;
            return Err(Unsent::NoElement);
        };
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
    pub(super) fn put_question(self: &Arc<Self>, operation: Operation, data: &[u8]) -> Result {
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

impl<O: Owner> State<O> {
    /// Has the endpoint say how a frame travels that is in `chunk`, behind room for a header, and posts it.
    fn dispatch(
        &mut self,
        chunk: Chunk,
        length: u32,
        traffic: &Traffic,
    ) -> core::result::Result<(), Unsent> {
        match self.endpoint.send(length) {
            Ok(transfer) => self.post(transfer, chunk, length, traffic),
            Err(unsent) => {
                if let Some(live) = &mut self.live {
                    live.put_room(RequestMemory::Chunk(chunk));
                }
                self.is_starved = true;
                // The peer is asked for more.
                self.pump(traffic);
                Err(unsent)
            }
        }
    }

    fn post(
        &mut self,
        transfer: Transfer,
        mut chunk: Chunk,
        length: u32,
        traffic: &Traffic,
    ) -> core::result::Result<(), Unsent> {
        let end = DATA_HEADER + length as usize;
        let (what, range, tag) = match transfer {
            Transfer::Message { header, .. } => {
                if let Some(room) = chunk.get_mut(..DATA_HEADER) {
                    room.copy_from_slice(&header);
                }
                traffic.rdma_sends.add();
                (consumer::Transfer::Send, 0..end, Tag::Message)
            }
            Transfer::Write {
                address,
                key,
                immediate,
                handle,
            } => {
                let remote = Remote {
                    addr: address,
                    rkey: key,
                };
                let write = match immediate {
                    Some(bits) => consumer::Transfer::WriteWithImm(remote, bits),
                    None => consumer::Transfer::Write(remote),
                };
                traffic.rdma_writes.add();
                let handle = immediate.is_none().then_some(handle);
                (write, DATA_HEADER..end, Tag::Write(handle))
            }
            // The other variant's.
            Transfer::Fill { .. } => {
                let _ = self.endpoint.unsend(transfer);
                return Err(Unsent::NoElement);
            }
        };
        let posted = match &self.live {
            Some(Live {
                data: Some(data), ..
            }) => data.transfer(what, chunk, range, tag),
            _ => return Err(Unsent::Closed),
        };
        let Err(Unposted { memory, .. }) = posted else {
            return Ok(());
        };
        let _ = self.endpoint.unsend(transfer);
        if let Some(live) = &mut self.live {
            live.put_room(memory);
        }
        traffic.dropped_error.add();
        self.fail(Fault::Lost);
        Err(Unsent::Closed)
    }

    /// Both channels are connected: the peer gets all pools of this side.
    pub(super) fn go_up(&mut self, traffic: &Traffic) {
        self.is_up = true;
        let Some(live) = &self.live else {
            return;
        };
        let mut is_broken = false;
        for pool in &live.pools {
            let done = match (&pool.region, &live.data) {
                (Some(region), Some(data)) => {
                    traffic.registrations.add();
                    data.register(region, Tag::Register(pool.offer.index))
                        .is_ok()
                }
                // Messages need none.
                _ => self.endpoint.announce(pool.offer).is_ok(),
            };
            is_broken |= !done;
        }
        if is_broken {
            self.fail(Fault::Lost);
        }
        self.pump(traffic);
    }

    /// Requests that are neither frames nor receives, at the most.
    pub(super) const OTHER_REQUESTS: u32 = 2 * (POOLS + MORE_POOLS) as u32;
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_flow)]
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

    #[test]
    fn the_first_reason_ends_a_connection() {
        let options =
            crate::link::Options::new(crate::protocol::Service::Acknowledged, Variant::Push, 1518);
        let endpoint = options.endpoint(crate::protocol::Role::Host).unwrap();
        let mut state = State::<Nobody>::new(endpoint).unwrap();
        state.fail(Fault::Peer);
        state.fail(Fault::Lost);
        assert_eq!(state.fault, Some(Fault::Peer));
        // Nobody was told to wait, then somebody is, once.
        assert!(!state.may_write());
        state.is_starved = true;
        assert!(state.may_write() && !state.may_write());
        assert!(state.is_writable);
    }

    /// An owner that is never called.
    struct Nobody;

    impl Owner for Nobody {
        fn frame(&self, _frame: Frame<'_>) {}
        fn frames_end(&self) {}
        fn writable(&self) {}
        fn changed(&self, _is_up: bool) {}
        fn request(
            &self,
            _operation: Operation,
            _data: &[u8],
            _answer: &mut [u8; CONFIG_MAX],
        ) -> Result<usize, Status> {
            Err(Status::NotSupported)
        }
    }
}
