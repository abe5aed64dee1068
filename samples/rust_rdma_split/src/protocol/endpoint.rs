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
    /// After how long without an answer a peer is given up.
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
    }

    /// The channels are gone, and so is all that was on its way. What has arrived in pools of this side
    /// stays.
    pub fn stop(&mut self) {
        self.running = false;
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

    // Frames out.

    /// The pool that a frame of this length is sent through.
    fn choose(&self, length: u32) -> Result<usize, Unsent> {
        if !self.is_running() || self.closing {
            return Err(Unsent::Closed);
        }
        if length == 0 {
            return Err(Unsent::Empty);
        }
        let mut best = None;
        let mut fits = false;
        for slot in NEAR.chain(FAR).filter(|&slot| self.sends(slot)) {
            let pool = &self.pools[slot];
            let is_usable = pool.state == PoolState::Live && pool.known && !pool.peer_asked;
            if !is_usable || pool.offer.element_size < length {
                continue;
            }
            fits = true;
            if pool.idle == 0 {
                continue;
            }
            // Whichever has a free element will do; rather one of the kind for such frames, and of
            // those the one that wastes least.
            let by_message = pool.offer.kind == PoolKind::Send;
            let is_other = by_message != (length <= self.options.threshold);
            let rank = (is_other, pool.offer.element_size);
            if best.is_none_or(|(before, _)| rank < before) {
                best = Some((rank, slot));
            }
        }
        match best {
            Some((_, slot)) => Ok(slot),
            None if fits => Err(Unsent::NoElement),
            None => Err(Unsent::TooLarge),
        }
    }

    /// Whether a frame of this length could be sent now.
    pub fn can_send(&self, length: u32) -> bool {
        self.choose(length).is_ok()
    }

    /// Says how a frame of `length` bytes travels; frames are handed to the data channel in the order
    /// of these calls. What is not sent is counted as dropped, and asked for: a caller that would
    /// rather wait asks [`Endpoint::can_send`] first.
    pub fn send(&mut self, length: u32) -> Result<Transfer, Unsent> {
        let slot = match self.choose(length) {
            Ok(slot) => slot,
            Err(unsent) => {
                match unsent {
                    Unsent::NoElement => {
                        self.counters.dropped_no_element += 1;
                        self.wanted.get_or_insert(length);
                    }
                    Unsent::TooLarge => {
                        self.counters.dropped_too_large += 1;
                        self.wanted.get_or_insert(length);
                    }
                    Unsent::Closed => self.counters.dropped_closed += 1,
                    Unsent::Empty => {}
                }
                return Err(unsent);
            }
        };
        let reference = self.reference(slot);
        let pool = &mut self.pools[slot];
        let generation = pool.generation;
        pool.idle -= 1;
        if pool.offer.kind == PoolKind::Send {
            self.data_sequence = self.data_sequence.wrapping_add(1);
            self.data_sent = self.now;
            let context = Context {
                session: self.session,
                sequence: self.data_sequence,
            };
            let mut header = [0; DATA_HEADER];
            let mut draft = Draft::new(&mut header, Function::SendData, context);
            draft.put(&Data {
                pool: reference,
                size: length,
            });
            self.counters.sent_by_message += 1;
            let handle = Handle {
                slot: slot as u8,
                generation,
                element: u32::MAX,
            };
            return Ok(Transfer::Message { header, handle });
        }
        // As many are idle as are in the list.
        let Some(place) = pool.list.pop(&self.elements) else {
            pool.idle += 1;
            return Err(Unsent::NoElement);
        };
        let offer = pool.offer;
        let (_, number) = self.whose(place);
        let handle = Handle {
            slot: slot as u8,
            generation,
            element: number,
        };
        let element = &mut self.elements[place as usize];
        element.length = length;
        element.state = State::Filling;
        if offer.kind == PoolKind::Read {
            self.counters.sent_by_read += 1;
            return Ok(Transfer::Fill {
                pool: offer.index,
                element: number,
                handle,
            });
        }
        let immediate = Immediate {
            pool: offer.index,
            element: number,
            size: length,
        };
        let immediate = match self.options.separate_indication {
            true => None,
            false => immediate.encode(),
        };
        if immediate.is_some() {
            element.state = State::Told;
            self.counters.told_by_immediate += 1;
        }
        self.counters.sent_by_write += 1;
        Ok(Transfer::Write {
            // The pool's end was checked when it was announced.
            address: offer.address + u64::from(number) * u64::from(offer.element_size),
            key: offer.key,
            immediate,
            handle,
        })
    }

    /// The frame of a write is in the peer's memory, or in that of this side for the peer to read: the
    /// peer is told, which it never is before.
    pub fn written(&mut self, handle: Handle) -> Result<(), Misuse> {
        let Some(place) = self.place_of(handle, true)? else {
            return Ok(());
        };
        let element = &mut self.elements[place as usize];
        match element.state {
            State::Filling => {
                element.state = State::Ready;
                self.ready.push(&mut self.elements, place);
                Ok(())
            }
            State::Told => Ok(()),
            _ => Err(Misuse::NotHeld),
        }
    }

    /// The frame could not be handed to the data channel: as if [`Endpoint::send`] had not been called.
    /// Only before the next frame is sent.
    pub fn unsend(&mut self, transfer: Transfer) -> Result<(), Misuse> {
        let (Transfer::Message { handle, .. }
        | Transfer::Write { handle, .. }
        | Transfer::Fill { handle, .. }) = transfer;
        if let Transfer::Message { header, .. } = transfer {
            let slot = usize::from(handle.slot);
            if self.pools[slot].generation != handle.generation {
                return Ok(());
            }
            let sent = Header::decode(&header).map(|header| Context::from_number(header.context));
            let last = Context {
                session: self.session,
                sequence: self.data_sequence,
            };
            if sent != Some(last) || self.pools[slot].is_quiet() {
                return Err(Misuse::NotHeld);
            }
            self.data_sequence = self.data_sequence.wrapping_sub(1);
            self.pools[slot].idle += 1;
            self.counters.sent_by_message -= 1;
            return Ok(());
        }
        let Some(place) = self.place_of(handle, true)? else {
            return Ok(());
        };
        let element = &mut self.elements[place as usize];
        if !matches!(element.state, State::Filling | State::Told) {
            return Err(Misuse::NotHeld);
        }
        match transfer {
            Transfer::Fill { .. } => self.counters.sent_by_read -= 1,
            _ => {
                self.counters.sent_by_write -= 1;
                self.counters.told_by_immediate -= u64::from(element.state == State::Told);
            }
        }
        element.state = State::Idle;
        let pool = &mut self.pools[usize::from(handle.slot)];
        pool.list.push(&mut self.elements, place);
        pool.idle += 1;
        Ok(())
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

    // Frames in.

    /// An element was filled.
    fn arrive(&mut self, slot: usize, number: u32, length: u32) -> Result<(), Violation> {
        if self.sends(slot) || self.pools[slot].offer.kind == PoolKind::Send {
            return Err(Violation::PoolMisused);
        }
        let places = self.places(slot);
        if number >= places.end - places.start {
            return Err(Violation::ElementBeyond);
        }
        let place = places.start + number;
        let element = &mut self.elements[place as usize];
        if element.state != State::Idle {
            return Err(Violation::ElementTaken);
        }
        let pool = &mut self.pools[slot];
        if length == 0 {
            return Err(Violation::FrameEmpty);
        }
        if length > pool.offer.element_size {
            return Err(Violation::FrameBeyond);
        }
        element.state = State::Arrived;
        element.length = length;
        pool.idle -= 1;
        pool.held += 1;
        self.arrived.push(&mut self.elements, place);
        self.counters.received += 1;
        Ok(())
    }

    /// Immediate data have arrived, with a write of `length` bytes.
    pub fn receive_immediate(
        &mut self,
        bits: u32,
        length: u32,
    ) -> Result<Event<'static>, Violation> {
        self.check()?;
        let immediate = Immediate::decode(bits);
        let result = self
            .refer(immediate.pool | REFERENCE_YOURS)
            .and_then(|slot| match length == immediate.size {
                true => self.arrive(slot, immediate.element, length),
                false => Err(Violation::FrameTorn),
            });
        match result {
            Ok(()) => Ok(Event::Frames),
            Err(violation) => Err(self.fail(violation)),
        }
    }

    /// A message has arrived on the data channel: a frame, unless it comes too late.
    pub fn receive_data<'m>(&mut self, bytes: &'m [u8]) -> Result<Option<Delivery<'m>>, Violation> {
        self.check()?;
        self.take_data(bytes)
            .map_err(|violation| self.fail(violation))
    }

    fn take_data<'m>(&mut self, bytes: &'m [u8]) -> Result<Option<Delivery<'m>>, Violation> {
        let (context, message) = Message::parse(bytes)?;
        let Message::SendData(reference, frame) = message else {
            return Err(Violation::WrongChannel);
        };
        if context.session != self.peer_session {
            return Err(Violation::OtherSession);
        }
        let ahead = context.sequence.wrapping_sub(self.peer_data_sequence);
        let is_lossy = self.options.service == Service::Unacknowledged;
        if ahead == 0 || ahead >= HALF {
            if is_lossy {
                self.counters.late += 1;
                return Ok(None);
            }
            return Err(Violation::Replayed);
        }
        if ahead > 1 && !is_lossy {
            return Err(Violation::Skipped);
        }
        let slot = self.refer(reference)?;
        if self.sends(slot) || self.pools[slot].offer.kind != PoolKind::Send {
            return Err(Violation::PoolMisused);
        }
        if frame.len() > self.pools[slot].offer.element_size as usize {
            return Err(Violation::FrameBeyond);
        }
        self.take_for_lost(slot, ahead - 1)?;
        let pool = &mut self.pools[slot];
        pool.idle = pool.idle.checked_sub(1).ok_or(Violation::CreditExceeded)?;
        pool.held += 1;
        self.peer_data_sequence = context.sequence;
        self.counters.received += 1;
        let handle = Handle {
            slot: slot as u8,
            generation: pool.generation,
            element: u32::MAX,
        };
        Ok(Some(Delivery { frame, handle }))
    }

    /// So many messages that the peer has sent will not come any more: their buffers are still there.
    fn take_for_lost(&mut self, slot: usize, lost: u32) -> Result<(), Violation> {
        let pool = &mut self.pools[slot];
        pool.idle = pool
            .idle
            .checked_sub(lost)
            .ok_or(Violation::CreditExceeded)?;
        pool.owed += lost;
        self.peer_data_sequence = self.peer_data_sequence.wrapping_add(lost);
        self.counters.lost += u64::from(lost);
        Ok(())
    }

    /// A frame that has arrived in an element. It is the caller's until [`Endpoint::release`].
    pub fn next_arrival(&mut self) -> Option<Arrival> {
        let place = self.arrived.pop(&self.elements)?;
        let (slot, number) = self.whose(place);
        let element = &mut self.elements[place as usize];
        element.state = State::Held;
        let pool = &self.pools[slot];
        Some(Arrival {
            pool: pool.offer,
            element: number,
            length: element.length,
            handle: Handle {
                slot: slot as u8,
                generation: pool.generation,
                element: number,
            },
        })
    }

    /// Gives an element back whose frame is not needed any more, or a message's buffer that is posted
    /// again.
    pub fn release(&mut self, handle: Handle) -> Result<(), Misuse> {
        let slot = usize::from(handle.slot);
        if handle.element == u32::MAX {
            let pool = &self.pools[slot];
            if pool.generation != handle.generation {
                return Ok(());
            }
            if self.sends(slot) || pool.offer.kind != PoolKind::Send || pool.held == 0 {
                return Err(Misuse::NotHeld);
            }
            self.let_go(slot, None);
            return Ok(());
        }
        let Some(place) = self.place_of(handle, false)? else {
            return Ok(());
        };
        if self.elements[place as usize].state != State::Held {
            return Err(Misuse::NotHeld);
        }
        self.let_go(slot, Some(place));
        Ok(())
    }

    /// A frame is not needed any more: its place is owed to the peer, if that knows it.
    fn let_go(&mut self, slot: usize, place: Option<u32>) {
        let pool = &mut self.pools[slot];
        pool.held -= 1;
        let state = match pool.known {
            true => State::Owed,
            false => State::Idle,
        };
        if pool.known {
            pool.owed += 1;
        } else {
            pool.idle += 1;
        }
        if let Some(place) = place {
            self.elements[place as usize].state = state;
            if pool.known {
                pool.list.push(&mut self.elements, place);
            }
        }
        self.settle(slot);
    }

    // Control messages in.

    /// Whether anything may come from the peer.
    fn check(&self) -> Result<(), Violation> {
        match self.failed {
            Some(violation) => Err(violation),
            None if !self.running => Err(Violation::OtherSession),
            None => Ok(()),
        }
    }

    /// A message has arrived on the control channel.
    pub fn receive_control<'m>(&mut self, bytes: &'m [u8]) -> Result<Event<'m>, Violation> {
        self.check()?;
        self.take_control(bytes)
            .map_err(|violation| self.fail(violation))
    }

    fn take_control<'m>(&mut self, bytes: &'m [u8]) -> Result<Event<'m>, Violation> {
        let (context, message) = Message::parse(bytes)?;
        match message {
            Message::SendData(..) => return Err(Violation::WrongChannel),
            Message::FlushReply | Message::Reply(..) => return self.take_reply(context, message),
            _ => {}
        }
        if context.session != self.peer_session {
            return Err(Violation::OtherSession);
        }
        let is_lossy = self.options.service == Service::Unacknowledged;
        let ahead = context.sequence.wrapping_sub(self.peer_sequence);
        if ahead == 0 || ahead >= HALF {
            if !is_lossy {
                return Err(Violation::Replayed);
            }
            self.counters.repeated += 1;
            self.repeat_answer(context, message);
            return Ok(Event::Nothing);
        }
        if ahead > 1 {
            // It comes again, after the one that is missing.
            if !is_lossy {
                return Err(Violation::Skipped);
            }
            self.counters.early += 1;
            return Ok(Event::Nothing);
        }
        if is_lossy && self.comes_too_early(&message) {
            self.counters.early += 1;
            return Ok(Event::Nothing);
        }
        self.peer_sequence = context.sequence;
        let has_reply = matches!(message, Message::FlushRequest(_) | Message::Request(..));
        if is_lossy && !has_reply {
            self.confirm = Some(context);
        }
        match message {
            Message::Pools(entries) => {
                for entry in entries.iter() {
                    let offer = PoolOffer::from_entry(&entry, self.capacity)?;
                    let slot = self.admits(FAR, &offer)?;
                    if !self.is_fresh(&offer, self.peer_last_index) {
                        return Err(Violation::PoolTwice);
                    }
                    self.peer_last_index = Some(offer.index);
                    let state = match self.closing {
                        true => PoolState::Draining,
                        false => PoolState::Live,
                    };
                    self.install(slot, offer, state);
                }
                self.has_asked = false;
                Ok(Event::Elements)
            }
            Message::Get(get) => self.take_get(get),
            Message::Update(entries) => {
                for entry in entries.iter() {
                    self.take_update(entry)?;
                }
                self.has_asked = false;
                Ok(Event::Elements)
            }
            Message::Indicate(entries) => {
                for entry in entries.iter() {
                    let slot = self.refer(entry.pool)?;
                    self.arrive(slot, entry.element, entry.size)?;
                }
                Ok(Event::Frames)
            }
            Message::FlushRequest(entries) => {
                if self.flush_asked.is_some() {
                    return Err(Violation::RequestTwice);
                }
                for entry in entries.iter() {
                    let slot = match self.refer(entry.pool) {
                        // It was given up as this side asked, before the peer's own request got through.
                        Err(_) if is_lossy => continue,
                        found => found?,
                    };
                    if self.pools[slot].peer_asked {
                        return Err(Violation::PoolMisused);
                    }
                    self.pools[slot].peer_asked = true;
                }
                self.flush_asked = Some(context);
                Ok(Event::Flush)
            }
            Message::Request(operation, data) => {
                if operation.asked_by() == Some(self.options.role) {
                    return Err(Violation::BadOperation);
                }
                // One that was answered stays, to be answered again where the answer may be lost.
                let is_open = |asked: Asked| asked.length.is_none() || (asked.pending && !is_lossy);
                if self.asked.is_some_and(is_open) {
                    return Err(Violation::RequestTwice);
                }
                self.asked = Some(Asked {
                    context,
                    operation,
                    length: None,
                    pending: false,
                });
                Ok(Event::Request(operation, data))
            }
            // Dealt with above.
            Message::SendData(..) | Message::FlushReply | Message::Reply(..) => Ok(Event::Nothing),
        }
    }

    /// Unacknowledged service: whether this announces a pool in the place of one whose end the peer has
    /// told of by a message that was lost. That is sent again, and so is this.
    fn comes_too_early(&self, message: &Message<'_>) -> bool {
        let Message::Pools(entries) = message else {
            return false;
        };
        let is_send = PoolKind::Send.number();
        entries.iter().any(|entry| {
            self.pools[FAR].iter().any(|pool| {
                let same = pool.offer.index == entry.pool
                    || (pool.offer.kind == PoolKind::Send && entry.kind == is_send);
                pool.state == PoolState::Asked && same
            })
        })
    }

    /// Unacknowledged service: answers once more, where that is done already.
    fn repeat_answer(&mut self, context: Context, message: Message<'_>) {
        match message {
            Message::FlushRequest(_) => {
                if let Some((answered, again)) = &mut self.flush_answered {
                    *again |= *answered == context;
                }
            }
            Message::Request(..) => {
                if let Some(asked) = &mut self.asked {
                    asked.pending |= asked.context == context && asked.length.is_some();
                }
            }
            _ => self.confirm = Some(context),
        }
    }

    fn take_reply<'m>(
        &mut self,
        context: Context,
        message: Message<'m>,
    ) -> Result<Event<'m>, Violation> {
        let is_lossy = self.options.service == Service::Unacknowledged;
        if context.session != self.session {
            return Err(Violation::OtherSession);
        }
        // Where requests come twice, so do replies: but only to what was sent.
        let is_sent = self.sequence.wrapping_sub(context.sequence) < HALF;
        let slot = match message {
            Message::Reply(Operation::Received, ..) if is_lossy => &mut self.one_way,
            Message::Reply(operation, ..) if self.request_operation == Some(operation) => {
                &mut self.request
            }
            Message::FlushReply => &mut self.flush,
            Message::Reply(..) if is_lossy && is_sent => {
                self.counters.repeated += 1;
                return Ok(Event::Nothing);
            }
            _ => return Err(Violation::NoSuchRequest),
        };
        if !slot.awaits(context.sequence) {
            if is_lossy && is_sent {
                self.counters.repeated += 1;
                return Ok(Event::Nothing);
            }
            return Err(Violation::NoSuchRequest);
        }
        slot.state = SlotState::Idle;
        match message {
            Message::FlushReply => {
                for slot in NEAR.chain(FAR) {
                    let pool = &mut self.pools[slot];
                    if pool.state != PoolState::Asked {
                        continue;
                    }
                    if !pool.is_quiet() {
                        return Err(Violation::FlushedEarly);
                    }
                    self.end(slot);
                }
                Ok(Event::Flush)
            }
            Message::Reply(operation, status, data) if operation != Operation::Received => {
                self.request_operation = None;
                Ok(Event::Reply(operation, status, data))
            }
            _ => Ok(Event::Nothing),
        }
    }

    /// A pool is given up by both sides.
    fn end(&mut self, slot: usize) {
        let pool = &mut self.pools[slot];
        if NEAR.contains(&slot) {
            pool.state = PoolState::Freed;
            pool.known = false;
        } else {
            pool.vacate();
        }
    }

    fn take_get(&mut self, get: Get) -> Result<Event<'static>, Violation> {
        if self.options.service == Service::Unacknowledged {
            let missing = get.sent.wrapping_sub(self.peer_data_sequence);
            let messages = NEAR.into_iter().find(|&slot| {
                let pool = &self.pools[slot];
                pool.known && pool.offer.kind == PoolKind::Send
            });
            // Those that came before what they were sent before are no fewer.
            if missing != 0 && missing < HALF {
                let slot = messages.ok_or(Violation::CreditExceeded)?;
                self.take_for_lost(slot, missing)?;
            }
        }
        if get.elements == 0 {
            return Ok(Event::Nothing);
        }
        Ok(Event::Wanted {
            elements: get.elements,
            element_size: get.element_size,
        })
    }

    fn take_update(&mut self, entry: UpdateEntry) -> Result<(), Violation> {
        let slot = self.refer(entry.pool)?;
        if !self.sends(slot) {
            return Err(Violation::PoolMisused);
        }
        let UpdateEntry { first, count, .. } = entry;
        let pool = &mut self.pools[slot];
        let end = first
            .checked_add(count)
            .filter(|&end| count != 0 && end <= pool.offer.elements)
            .ok_or(Violation::ElementBeyond)?;
        if pool.offer.kind == PoolKind::Send {
            if first != 0 || count > pool.offer.elements - pool.idle {
                return Err(Violation::ElementIdle);
            }
            pool.idle += count;
            return Ok(());
        }
        let base = slot as u32 * self.capacity;
        for place in base + first..base + end {
            let element = &mut self.elements[place as usize];
            if element.state != State::Told {
                return Err(Violation::ElementIdle);
            }
            element.state = State::Idle;
            pool.list.push(&mut self.elements, place);
            pool.idle += 1;
        }
        Ok(())
    }

    // Control messages out.

    /// Asks the peer something. One at a time; the answer is an [`Event::Reply`].
    pub fn request(&mut self, operation: Operation, data: &[u8]) -> Result<(), Misuse> {
        if operation.asked_by() != Some(self.options.role)
            || check_data(operation, data, operation.data_sizes().0).is_err()
        {
            return Err(Misuse::BadRequest);
        }
        if !self.is_running() || self.request.state != SlotState::Idle {
            return Err(Misuse::Busy);
        }
        // It gets its number when it is sent.
        let context = Context {
            session: self.session,
            sequence: 0,
        };
        let mut draft = Draft::new(&mut self.request.bytes, Function::CfgUtilRequest, context);
        draft.put(&Request {
            operation: operation.number(),
            reserved: 0,
            size: data.len() as u32,
        });
        draft.put_bytes(data);
        self.request.length = draft.finish();
        self.request.state = SlotState::Queued;
        self.request_operation = Some(operation);
        Ok(())
    }

    /// Answers what the peer asked; with data only where it is `Done`.
    pub fn reply(&mut self, status: Status, data: &[u8]) -> Result<(), Misuse> {
        let asked = self
            .asked
            .as_mut()
            .filter(|asked| asked.length.is_none())
            .ok_or(Misuse::Busy)?;
        let size = match status {
            Status::Done => asked.operation.data_sizes().1,
            _ => 0,
        };
        check_data(asked.operation, data, size).map_err(|_| Misuse::BadRequest)?;
        let mut draft = Draft::new(&mut self.answer, Function::CfgUtilReply, asked.context);
        draft.put(&Reply {
            operation: asked.operation.number(),
            status: status.number(),
            size: data.len() as u32,
        });
        draft.put_bytes(data);
        asked.length = Some(draft.finish());
        asked.pending = true;
        Ok(())
    }

    /// The next control message that is to be sent, if there is one.
    pub fn poll_control(&mut self, out: &mut [u8; CONTROL_MAX]) -> Option<Outgoing> {
        if !self.is_running() {
            return None;
        }
        if let Some(length) = self.poll_reply(out) {
            return Some(Outgoing {
                length,
                token: Token::Reply,
            });
        }
        for token in [Token::OneWay, Token::Flush, Token::Request] {
            if let Some(length) = self.poll_slot(token, out) {
                return Some(Outgoing { length, token });
            }
        }
        None
    }

    fn poll_reply(&mut self, out: &mut [u8; CONTROL_MAX]) -> Option<usize> {
        let is_done = |pool: &Pool| !pool.peer_asked || pool.is_quiet();
        if let Some(context) = self.flush_asked.filter(|_| self.pools.iter().all(is_done)) {
            for slot in NEAR.chain(FAR) {
                if self.pools[slot].peer_asked {
                    self.end(slot);
                }
            }
            self.flush_asked = None;
            self.flush_answered = Some((context, true));
        }
        if let Some((context, again @ true)) = &mut self.flush_answered {
            *again = false;
            return Some(Draft::new(out, Function::BufferPoolFlushReply, *context).finish());
        }
        if let Some(asked) = self.asked.as_mut().filter(|asked| asked.pending) {
            asked.pending = false;
            let length = asked.length?;
            out[..length].copy_from_slice(&self.answer[..length]);
            return Some(length);
        }
        let context = self.confirm.take()?;
        let mut draft = Draft::new(out, Function::CfgUtilReply, context);
        draft.put(&Reply {
            operation: Operation::Received.number(),
            status: Status::Done.number(),
            size: 0,
        });
        Some(draft.finish())
    }

    fn slot(&mut self, token: Token) -> Option<&mut Slot> {
        match token {
            Token::OneWay => Some(&mut self.one_way),
            Token::Flush => Some(&mut self.flush),
            Token::Request => Some(&mut self.request),
            Token::Reply => None,
        }
    }

    fn poll_slot(&mut self, token: Token, out: &mut [u8; CONTROL_MAX]) -> Option<usize> {
        let now = self.now;
        let state = self.slot(token)?.state;
        match state {
            SlotState::Sent => return None,
            SlotState::Resend => {
                self.counters.resent += 1;
                let slot = self.slot(token)?;
                slot.state = SlotState::Sent;
                slot.sent = now;
                out[..slot.length].copy_from_slice(&slot.bytes[..slot.length]);
                return Some(slot.length);
            }
            SlotState::Queued | SlotState::Idle => {}
        }
        let context = Context {
            session: self.session,
            sequence: self.sequence.wrapping_add(1),
        };
        let length = match token {
            Token::OneWay => self.draft_one_way(out, context)?,
            Token::Flush => self.draft_flush(out, context)?,
            Token::Request if state == SlotState::Queued => {
                // Written over the header without a number.
                let length = self.request.length;
                out[..length].copy_from_slice(&self.request.bytes[..length]);
                let _ = Draft::new(out, Function::CfgUtilRequest, context).finish();
                length
            }
            Token::Request | Token::Reply => return None,
        };
        self.sequence = context.sequence;
        let slot = self.slot(token)?;
        slot.state = SlotState::Sent;
        slot.sequence = context.sequence;
        (slot.began, slot.sent) = (now, now);
        slot.length = length;
        slot.bytes[..length].copy_from_slice(&out[..length]);
        Some(length)
    }

    fn draft_one_way(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        if let Some(length) = self.draft_pools(out, context) {
            return Some(length);
        }
        // In turn, so that neither direction waits for the other to have nothing to say.
        self.updates_first = !self.updates_first;
        let first = match self.updates_first {
            true => self.draft_updates(out, context),
            false => self.draft_indicates(out, context),
        };
        let length = first.or_else(|| match self.updates_first {
            true => self.draft_indicates(out, context),
            false => self.draft_updates(out, context),
        });
        length.or_else(|| self.draft_get(out, context))
    }

    fn draft_pools(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRecvPool, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        for pool in &mut self.pools[NEAR] {
            // What is announced is idle, all of it.
            if pool.state != PoolState::Offered || !pool.is_quiet() {
                continue;
            }
            if !draft.put(&pool.offer.entry()) {
                break;
            }
            pool.state = PoolState::Live;
            pool.known = true;
            self.last_index = self.last_index.max(Some(pool.offer.index));
            count += 1;
        }
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    fn draft_updates(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRecvPoolUpdate, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        'full: for slot in NEAR.chain(FAR) {
            let reference = self.reference(slot);
            let base = slot as u32 * self.capacity;
            let pool = &mut self.pools[slot];
            let mut run: Option<UpdateEntry> = None;
            while pool.owed != 0 {
                // Messages are all the same.
                let (first, step) = match pool.list.first() {
                    Some(place) => (place - base, 1),
                    None => (0, pool.owed),
                };
                match &mut run {
                    Some(run) if run.first + run.count == first => run.count += step,
                    _ => {
                        if let Some(run) = run.take() {
                            draft.put(&run);
                            count += 1;
                        }
                        if !draft.has_room(UpdateEntry::SIZE) {
                            break 'full;
                        }
                        run = Some(UpdateEntry {
                            pool: reference,
                            first,
                            count: step,
                        });
                    }
                }
                if let Some(place) = pool.list.pop(&self.elements) {
                    self.elements[place as usize].state = State::Idle;
                }
                pool.owed -= step;
                pool.idle += step;
            }
            if let Some(run) = run {
                draft.put(&run);
                count += 1;
            }
        }
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    fn draft_indicates(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRDMAIndicate, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        while !self.ready.is_empty() && draft.has_room(IndicateEntry::SIZE) {
            let Some(place) = self.ready.pop(&self.elements) else {
                break;
            };
            let (slot, number) = self.whose(place);
            let pool = self.reference(slot);
            let element = &mut self.elements[place as usize];
            element.state = State::Told;
            draft.put(&IndicateEntry {
                pool,
                element: number,
                size: element.length,
            });
            count += 1;
        }
        self.counters.told_by_indicate += u64::from(count);
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    fn draft_get(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        let wanted = self.wanted.filter(|_| !self.has_asked);
        if wanted.is_none() && !self.reconcile {
            return None;
        }
        let mut draft = Draft::new(out, Function::BufferRecvPoolGet, context);
        draft.put(&Get {
            elements: u32::from(wanted.is_some()),
            element_size: wanted.unwrap_or(0),
            sent: self.data_sequence,
        });
        if wanted.is_some() {
            self.wanted = None;
            self.has_asked = true;
        }
        self.reconcile = false;
        Some(draft.finish())
    }

    fn draft_flush(&mut self, out: &mut [u8; CONTROL_MAX], context: Context) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferPoolFlushRequest, context);
        let mut any = false;
        for slot in NEAR.chain(FAR) {
            let reference = PoolReference {
                pool: self.reference(slot),
            };
            let sends = self.sends(slot);
            let pool = &mut self.pools[slot];
            // The sending side asks when it is done, the receiving side for the other to be.
            if pool.state == PoolState::Draining && pool.known && (!sends || pool.is_quiet()) {
                any |= draft.put(&reference);
                pool.state = PoolState::Asked;
            }
        }
        any.then(|| draft.finish())
    }

    /// A control message was sent: acknowledged by the peer's adapter, on the acknowledged service.
    pub fn control_done(&mut self, token: Token) {
        let is_lossy = self.options.service == Service::Unacknowledged;
        if token == Token::OneWay && !is_lossy && self.one_way.state == SlotState::Sent {
            self.one_way.state = SlotState::Idle;
        }
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
        // Messages whose buffers do not come back may be lost, the last of them without another that
        // would show it.
        let is_open = |pool: &Pool| pool.offer.kind == PoolKind::Send && !pool.is_quiet();
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
