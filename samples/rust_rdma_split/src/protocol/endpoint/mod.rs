// SPDX-License-Identifier: GPL-2.0

//! One end of a pair of channels: the state machine of host and I/O unit alike.
//!
//! - Frames out: [`Endpoint::send`] says how a frame travels; [`Endpoint::written`] that it did.
//! - Frames in: [`Endpoint::receive_data`], [`Endpoint::receive_immediate`] and
//!   [`Endpoint::receive_control`] take what arrived, [`Endpoint::next_arrival`] gives frames in elements,
//!   [`Endpoint::release`] gives elements back.
//! - Control messages: [`Endpoint::poll_control`] makes them, one by one; [`Endpoint::control_done`] says
//!   that one was sent.
//! - Time: [`Endpoint::tick`].

mod control_in;
mod control_out;
mod inbound;
mod outbound;

use super::layout::Layout;
use super::message::{check_data, Draft, Message};
use super::pool::{Element, List, Pool, PoolOffer, PoolState, State, MAX_POOLS};
use super::violation::{Counters, Violation};
use super::wire::*;
use core::ops::{DerefMut, Range};

/// What an endpoint is like; both ends agree on service and variant when they connect.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Who this is.
    pub role: Role,
    /// The transport.
    pub service: Service,
    /// Who moves frames that do not travel in messages.
    pub variant: Variant,
    /// Tell of each write by a message, also where immediate data suffice.
    pub separate_indication: bool,
    /// Frames of up to so many bytes rather travel in messages.
    pub threshold: u32,
    /// Unacknowledged service: after how long a message is sent again, in ticks of the caller's clock.
    pub retry: u64,
    /// After how long without an answer a peer is given up. An I/O unit, which may have nothing to ask, gives up a host
    /// that says nothing for [`SILENCE`] times as long.
    pub patience: u64,
}

/// An element that its user has to do with, or a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    slot: u8,
    generation: u32,
    /// The element; `u32::MAX` for a message.
    element: u32,
}

/// How a frame travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// In a message of the data channel, behind these bytes.
    Message {
        /// What comes before the frame.
        header: [u8; DATA_HEADER],
        /// For [`Endpoint::unsend`].
        handle: Handle,
    },
    /// By an RDMA write on the data channel.
    Write {
        /// Where to.
        address: u64,
        /// With which remote key.
        key: u32,
        /// With this immediate data; without: [`Endpoint::written`] is called once the write is complete.
        immediate: Option<u32>,
        /// For that.
        handle: Handle,
    },
    /// By an RDMA read of the peer: the frame is copied to an element of a pool of this side, then
    /// [`Endpoint::written`] is called.
    Fill {
        /// The pool's index.
        pool: u32,
        /// The element.
        element: u32,
        /// For that.
        handle: Handle,
    },
}

/// Bytes before the frame of a `SendData` message.
pub const DATA_HEADER: usize = Header::SIZE + Data::SIZE;

/// Why a frame is not sent; it was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The peer has no free element for it.
    NoElement,
    /// The peer has no element that is large enough.
    TooLarge,
    /// A frame without bytes.
    Empty,
    /// Nobody is connected.
    Closed,
}

/// A frame in an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The pool: of this side, or of the peer, from which it is to be read.
    pub pool: PoolOffer,
    /// The element.
    pub element: u32,
    /// Bytes of the frame.
    pub length: u32,
    /// For [`Endpoint::release`].
    pub handle: Handle,
}

impl Arrival {
    /// Where the frame begins, from the start of its pool.
    pub fn offset(&self) -> u64 {
        u64::from(self.element) * u64::from(self.pool.element_size)
    }
}

/// A frame in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery<'m> {
    /// The frame.
    pub frame: &'m [u8],
    /// For [`Endpoint::release`], once the receive buffer is posted again.
    pub handle: Handle,
}

/// What came of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'m> {
    /// Nothing to act upon.
    Nothing,
    /// There is more to send frames with.
    Elements,
    /// Frames have [arrived](Endpoint::next_arrival).
    Frames,
    /// The peer would like a pool of so many elements of at least that many bytes.
    Wanted {
        /// How many.
        elements: u32,
        /// Bytes of each.
        element_size: u32,
    },
    /// Pools are [given up](Endpoint::next_freed), or soon will be.
    Flush,
    /// The peer asks something; see [`Endpoint::reply`].
    Request(Operation, &'m [u8]),
    /// The answer to what was asked.
    Reply(Operation, Status, &'m [u8]),
}

/// A caller's error: nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// A pool that there is already, cannot be on such a connection, or for which there is no room.
    BadPool,
    /// No such pool.
    NoPool,
    /// An element that is not the caller's.
    NotHeld,
    /// A request is under way, or none is.
    Busy,
    /// An operation or data of it that the peer would not accept.
    BadRequest,
}

/// What a control message was, for [`Endpoint::control_done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A reply.
    Reply,
    /// A message of which at most one is under way.
    OneWay,
    /// A flush request.
    Flush,
    /// A request.
    Request,
}

/// A control message that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Bytes of it.
    pub length: usize,
    /// What it is.
    pub token: Token,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Idle,
    /// To be sent, and to get its number then.
    Queued,
    /// Sent and not answered, or not acknowledged where there is no answer.
    Sent,
    /// To be sent again.
    Resend,
}

/// A kind of control message of which at most one is under way.
#[derive(Clone, Copy, Debug)]
struct Slot {
    state: SlotState,
    sequence: u32,
    /// When it was sent first, and last.
    began: u64,
    sent: u64,
    length: usize,
    bytes: [u8; CONTROL_MAX],
}

impl Slot {
    const IDLE: Self = Self {
        state: SlotState::Idle,
        sequence: 0,
        began: 0,
        sent: 0,
        length: 0,
        bytes: [0; CONTROL_MAX],
    };

    /// Whether it is waiting for the answer to this message.
    fn awaits(&self, sequence: u32) -> bool {
        matches!(self.state, SlotState::Sent | SlotState::Resend) && self.sequence == sequence
    }
}

/// The peer's request and the answer to it.
#[derive(Clone, Copy, Debug)]
struct Asked {
    context: Context,
    operation: Operation,
    /// The answer's length, once there is one.
    length: Option<usize>,
    /// The answer is to be sent.
    pending: bool,
}

/// The first pools of the table are those of this side.
const NEAR: Range<usize> = 0..MAX_POOLS;
/// The other ones are the peer's.
const FAR: Range<usize> = MAX_POOLS..2 * MAX_POOLS;
/// How many times as long as it waits for an answer an I/O unit waits for anything at all. A host asks something every
/// few seconds, unless its machine is stuck for a while.
const SILENCE: u64 = 3;
/// How far a message's number may be from the one expected to come before it rather than after it.
const HALF: u32 = 1 << 31;

/// One end of a pair of channels. `S` is the memory for the elements of all pools: each of up to
/// [`MAX_POOLS`] pools of either side may have 1 / (2 * [`MAX_POOLS`]) of it.
pub struct Endpoint<S> {
    options: Options,
    elements: S,
    capacity: u32,
    pools: [Pool; 2 * MAX_POOLS],
    /// Elements of which the peer is to be told by a message.
    ready: List,
    /// Elements with frames that nobody has taken.
    arrived: List,
    running: bool,
    closing: bool,
    failed: Option<Violation>,
    session: u32,
    peer_session: u32,
    /// Number of the last control message sent.
    sequence: u32,
    /// Number of the last control message received.
    peer_sequence: u32,
    /// Number of the last `SendData` sent.
    data_sequence: u32,
    /// Number of the last `SendData` received, or taken for lost.
    peer_data_sequence: u32,
    one_way: Slot,
    flush: Slot,
    request: Slot,
    request_operation: Option<Operation>,
    /// The peer's flush request, while it waits.
    flush_asked: Option<Context>,
    /// The last one that was answered, and whether that is to be done again.
    flush_answered: Option<(Context, bool)>,
    asked: Option<Asked>,
    answer: [u8; CONTROL_MAX],
    /// Unacknowledged service: what is to be confirmed.
    confirm: Option<Context>,
    /// Unacknowledged service: the largest index announced on this connection, by this side and the peer.
    last_index: Option<u32>,
    peer_last_index: Option<u32>,
    /// Updates before indications, the next time.
    updates_first: bool,
    /// Size of the first frame that there was no element for.
    wanted: Option<u32>,
    /// The peer was asked for more, and has not given any.
    has_asked: bool,
    /// Unacknowledged service: the peer is to be told how many messages it should have.
    reconcile: bool,
    /// When the last `SendData` was sent, or told of.
    data_sent: u64,
    /// When the peer last said something on the control channel.
    heard: u64,
    /// When the peer last gave elements back; or when the first of those was taken that it has.
    given: u64,
    now: u64,
    counters: Counters,
}

impl<S: DerefMut<Target = [Element]>> Endpoint<S> {
    /// Makes an end that is not connected.
    pub fn new(options: Options, elements: S) -> Self {
        let capacity = u32::try_from(elements.len() / (2 * MAX_POOLS)).unwrap_or(u32::MAX >> 8);
        Self {
            options,
            elements,
            capacity,
            pools: [Pool::VACANT; 2 * MAX_POOLS],
            ready: List::EMPTY,
            arrived: List::EMPTY,
            running: false,
            closing: false,
            failed: None,
            session: 0,
            peer_session: 0,
            sequence: 0,
            peer_sequence: 0,
            data_sequence: 0,
            peer_data_sequence: 0,
            one_way: Slot::IDLE,
            flush: Slot::IDLE,
            request: Slot::IDLE,
            request_operation: None,
            flush_asked: None,
            flush_answered: None,
            asked: None,
            answer: [0; CONTROL_MAX],
            confirm: None,
            last_index: None,
            peer_last_index: None,
            updates_first: false,
            wanted: None,
            has_asked: false,
            reconcile: false,
            data_sent: 0,
            heard: 0,
            given: 0,
            now: 0,
            counters: Counters::default(),
        }
    }

    /// Both channels are connected, with the sessions that were agreed on.
    ///
    /// Pools of this side are announced (again) as soon as nobody uses a frame in them.
    pub fn start(&mut self, session: u32, peer_session: u32) {
        self.stop();
        (self.session, self.peer_session) = (session, peer_session);
        self.running = true;
        self.closing = false;
        self.failed = None;
        self.heard = self.now;
    }

    /// The channels are gone, and so is all that was on its way. What has arrived in pools of this side
    /// stays.
    pub fn stop(&mut self) {
        self.running = false;
        let known = self.pools.iter().filter(|pool| pool.known);
        let forfeited: u64 = known.map(|pool| u64::from(pool.offer.elements)).sum();
        self.counters.elements_forfeited += forfeited;
        for slot in FAR {
            self.pools[slot].vacate();
        }
        if self.options.variant == Variant::Pull {
            // They were in the peer's memory.
            self.arrived = List::EMPTY;
        }
        self.ready = List::EMPTY;
        for slot in NEAR {
            self.rewind(slot);
        }
        (self.sequence, self.peer_sequence) = (0, 0);
        (self.data_sequence, self.peer_data_sequence) = (0, 0);
        self.one_way.state = SlotState::Idle;
        self.flush.state = SlotState::Idle;
        self.request.state = SlotState::Idle;
        self.request_operation = None;
        self.flush_asked = None;
        self.flush_answered = None;
        self.asked = None;
        self.confirm = None;
        (self.last_index, self.peer_last_index) = (None, None);
        self.wanted = None;
        self.has_asked = false;
        self.reconcile = false;
    }

    /// Makes a pool of this side what it is where no peer knows it.
    fn rewind(&mut self, slot: usize) {
        let sends = self.sends(slot);
        let places = self.places(slot);
        let pool = &mut self.pools[slot];
        if matches!(pool.state, PoolState::Vacant | PoolState::Freed) {
            return;
        }
        pool.known = false;
        pool.peer_asked = false;
        pool.owed = 0;
        pool.list = List::EMPTY;
        if sends {
            pool.generation = pool.generation.wrapping_add(1);
            for place in places {
                self.elements[place as usize].state = State::Idle;
                pool.list.push(&mut self.elements, place);
            }
        } else {
            for place in places {
                let element = &mut self.elements[place as usize];
                if element.state == State::Owed {
                    element.state = State::Idle;
                }
            }
        }
        pool.idle = pool.offer.elements - pool.held;
        pool.state = match pool.state {
            PoolState::Draining | PoolState::Asked => PoolState::Draining,
            _ => PoolState::Offered,
        };
        self.settle(slot);
    }

    /// Frees a pool of this side that is to go, and that nobody knows or uses.
    fn settle(&mut self, slot: usize) {
        let pool = &mut self.pools[slot];
        if pool.state == PoolState::Draining && !pool.known && pool.held == 0 {
            pool.state = PoolState::Freed;
        }
    }

    /// Whether it is connected, and the peer has done nothing wrong.
    pub fn is_running(&self) -> bool {
        self.running && self.failed.is_none()
    }

    /// What the peer did wrong on this connection.
    pub fn failed(&self) -> Option<Violation> {
        self.failed
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Frames of up to so many bytes rather travel in messages, from now on.
    pub fn set_threshold(&mut self, threshold: u32) {
        self.options.threshold = threshold;
    }

    /// Whether this side sends frames through a pool.
    fn sends(&self, slot: usize) -> bool {
        NEAR.contains(&slot) == (self.pools[slot].offer.kind == PoolKind::Read)
    }

    /// The places of a pool's elements; messages have none.
    fn places(&self, slot: usize) -> Range<u32> {
        let base = slot as u32 * self.capacity;
        match self.pools[slot].offer.kind {
            PoolKind::Send => base..base,
            _ => base..base + self.pools[slot].offer.elements,
        }
    }

    /// The pool that an element is of, and its number in it.
    fn whose(&self, place: u32) -> (usize, u32) {
        ((place / self.capacity) as usize, place % self.capacity)
    }

    /// The pool of an index.
    fn find(&self, side: Range<usize>, index: u32) -> Option<usize> {
        side.into_iter().find(|&slot| {
            let pool = &self.pools[slot];
            pool.state != PoolState::Vacant && pool.offer.index == index
        })
    }

    /// The pool that a peer refers to.
    fn refer(&self, reference: u32) -> Result<usize, Violation> {
        let side = match reference & REFERENCE_YOURS {
            0 => FAR,
            _ => NEAR,
        };
        self.find(side, reference & !REFERENCE_YOURS)
            .filter(|&slot| self.pools[slot].known && self.pools[slot].state != PoolState::Freed)
            .ok_or(Violation::NoSuchPool)
    }

    /// How to refer to a pool.
    fn reference(&self, slot: usize) -> u32 {
        let index = self.pools[slot].offer.index;
        if NEAR.contains(&slot) {
            index
        } else {
            index | REFERENCE_YOURS
        }
    }

    /// Whether there may be such pools on this connection.
    fn allows(&self, kind: PoolKind) -> bool {
        match (kind, self.options.service, self.options.variant) {
            (PoolKind::Send, _, _) => true,
            (_, Service::Unacknowledged, _) => false,
            (PoolKind::Write, _, variant) => variant == Variant::Push,
            (PoolKind::Read, _, variant) => variant == Variant::Pull,
        }
    }

    /// Whether a pool may be added to those of a side.
    ///
    /// Messages are received in the order of their buffers, so that these are one pool.
    fn admits(&self, side: Range<usize>, offer: &PoolOffer) -> Result<usize, Violation> {
        offer.check_shape(self.capacity)?;
        if !self.allows(offer.kind) {
            return Err(Violation::PoolKind);
        }
        let mut room = None;
        for slot in side.rev() {
            let pool = &self.pools[slot];
            if pool.state == PoolState::Vacant {
                room = Some(slot);
            } else if pool.offer.index == offer.index
                || (pool.offer.kind == PoolKind::Send && offer.kind == PoolKind::Send)
            {
                return Err(Violation::PoolTwice);
            }
        }
        room.ok_or(Violation::TooManyPools)
    }

    /// Puts a pool in its place, with all elements idle.
    fn install(&mut self, slot: usize, offer: PoolOffer, state: PoolState) {
        let generation = self.pools[slot].generation;
        self.pools[slot] = Pool {
            offer,
            state,
            known: FAR.contains(&slot),
            idle: offer.elements,
            generation,
            ..Pool::VACANT
        };
        if self.pools[slot].known {
            self.counters.elements_announced += u64::from(offer.elements);
        }
        let sends = self.sends(slot);
        for place in self.places(slot) {
            self.elements[place as usize] = Element::default();
            if sends {
                self.pools[slot].list.push(&mut self.elements, place);
            }
        }
    }

    /// Unacknowledged service: whether a pool has an index that no other had on this connection. A flush
    /// request that comes late, or again, then never meets another pool than the one it was for.
    fn is_fresh(&self, offer: &PoolOffer, last: Option<u32>) -> bool {
        self.options.service == Service::Acknowledged || last.is_none_or(|last| offer.index > last)
    }

    /// Announces a pool of this side; its memory stays until [`Endpoint::next_freed`] gives it back.
    ///
    /// On the unacknowledged service each one has a larger index than all before it.
    pub fn announce(&mut self, offer: PoolOffer) -> Result<(), Misuse> {
        if !self.is_fresh(&offer, self.last_index) {
            return Err(Misuse::BadPool);
        }
        let slot = self.admits(NEAR, &offer).map_err(|_| Misuse::BadPool)?;
        self.install(slot, offer, PoolState::Offered);
        Ok(())
    }

    /// Has a pool of this side given up.
    pub fn withdraw(&mut self, index: u32) -> Result<(), Misuse> {
        let slot = self.find(NEAR, index).ok_or(Misuse::NoPool)?;
        self.give_up(slot);
        Ok(())
    }

    /// Has a pool of the peer given up.
    pub fn renounce(&mut self, index: u32) -> Result<(), Misuse> {
        let slot = self.find(FAR, index).ok_or(Misuse::NoPool)?;
        self.give_up(slot);
        Ok(())
    }

    fn give_up(&mut self, slot: usize) {
        let pool = &mut self.pools[slot];
        if matches!(pool.state, PoolState::Offered | PoolState::Live) {
            pool.state = PoolState::Draining;
        }
        self.settle(slot);
    }

    /// Has all pools of both sides given up: the end of an orderly connection. Nothing is sent any more.
    pub fn close(&mut self) {
        self.closing = true;
        for slot in NEAR.chain(FAR) {
            self.give_up(slot);
        }
    }

    /// Whether all pools are given up after [`Endpoint::close`], and those of this side collected.
    pub fn is_closed(&self) -> bool {
        self.closing
            && self
                .pools
                .iter()
                .all(|pool| pool.state == PoolState::Vacant)
    }

    /// A pool of this side that was given up: no peer has to do with it any more, and its memory may
    /// be deregistered and freed.
    pub fn next_freed(&mut self) -> Option<PoolOffer> {
        let pool = self.pools[NEAR]
            .iter_mut()
            .find(|pool| pool.state == PoolState::Freed)?;
        let offer = pool.offer;
        pool.vacate();
        Some(offer)
    }

    /// The peer did something wrong.
    fn fail(&mut self, violation: Violation) -> Violation {
        self.counters.violations[violation as usize] += 1;
        self.failed = Some(violation);
        violation
    }

    /// Counts what a peer did wrong before it was one.
    pub fn count_refused(&mut self, violation: Violation) {
        self.counters.violations[violation as usize] += 1;
    }

    /// Where the element of a handle is; `None` if its pool is gone, with the connection.
    fn place_of(&self, handle: Handle, sends: bool) -> Result<Option<u32>, Misuse> {
        let slot = usize::from(handle.slot);
        if self.pools[slot].generation != handle.generation {
            return Ok(None);
        }
        let places = self.places(slot);
        if self.sends(slot) != sends || handle.element >= places.end - places.start {
            return Err(Misuse::NotHeld);
        }
        Ok(Some(places.start + handle.element))
    }

    /// A pool is given up by both sides.
    fn end(&mut self, slot: usize) {
        let pool = &mut self.pools[slot];
        self.counters.elements_flushed += u64::from(pool.offer.elements);
        if NEAR.contains(&slot) {
            pool.state = PoolState::Freed;
            pool.known = false;
        } else {
            pool.vacate();
        }
    }

    fn slot(&mut self, token: Token) -> Option<&mut Slot> {
        match token {
            Token::OneWay => Some(&mut self.one_way),
            Token::Flush => Some(&mut self.flush),
            Token::Request => Some(&mut self.request),
            Token::Reply => None,
        }
    }

    /// Whether anything may come from the peer.
    fn check(&self) -> Result<(), Violation> {
        match self.failed {
            Some(violation) => Err(violation),
            None if !self.running => Err(Violation::OtherSession),
            None => Ok(()),
        }
    }

    /// Whether the peer has nothing of what this side sends frames with.
    fn has_all(&self) -> bool {
        let has = |slot: usize| !self.sends(slot) || self.pools[slot].is_idle();
        NEAR.chain(FAR).all(has)
    }

    /// Time passes: `now` never goes back. To be called a few times in each [`Options::retry`].
    pub fn tick(&mut self, now: u64) -> Result<(), Violation> {
        self.now = now;
        if !self.is_running() {
            return Ok(());
        }
        let is_lossy = self.options.service == Service::Unacknowledged;
        let Options {
            retry, patience, ..
        } = self.options;
        for token in [Token::OneWay, Token::Flush, Token::Request] {
            let Some(slot) = self.slot(token) else {
                continue;
            };
            if !matches!(slot.state, SlotState::Sent | SlotState::Resend) {
                continue;
            }
            if now.saturating_sub(slot.began) >= patience {
                return Err(self.fail(Violation::Silent));
            }
            if is_lossy && now.saturating_sub(slot.sent) >= retry {
                slot.state = SlotState::Resend;
            }
        }
        let is_silent = match self.options.role {
            // It asks nothing by itself, and may have nothing under way.
            Role::Unit => now.saturating_sub(self.heard) >= SILENCE * patience,
            // Frames wait for elements here. An I/O unit drops them, and it is the host that is without.
            Role::Host => now.saturating_sub(self.given) >= patience && !self.has_all(),
        };
        if is_silent {
            return Err(self.fail(Violation::Silent));
        }
        // Messages whose buffers do not come back may be lost, the last of them without another that
        // would show it.
        let is_open = |pool: &Pool| pool.offer.kind == PoolKind::Send && !pool.is_idle();
        if is_lossy
            && now.saturating_sub(self.data_sent) >= retry
            && self.pools[FAR].iter().any(is_open)
        {
            self.reconcile = true;
            self.data_sent = now;
        }
        Ok(())
    }
}
