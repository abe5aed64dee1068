// SPDX-License-Identifier: GPL-2.0

//! Messages and frames: what is posted, and what comes of it.

mod receive;
mod send;

use super::statistics::Traffic;
use super::steps::{Events, News};
use super::stock::Stock;
use super::{Owner, Shared, CONFIG_MAX, MORE_POOLS, POOLS};
use crate::protocol::{
    Element, Endpoint, Handle, Operation, PoolOffer, Status, Token, Transfer, Unsent, CONTROL_MAX,
    DATA_HEADER,
};
use crate::rdma::consumer::{self, Chunk, Done, Keep, Region, RequestMemory, Unposted, User};
use crate::rdma::Remote;
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
    use crate::link::Frame;
    use crate::protocol::Variant;

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
