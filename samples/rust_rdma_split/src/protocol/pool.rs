// SPDX-License-Identifier: GPL-2.0

//! Pools, and the elements of them.
//!
//! Of each pool one side sends frames through it and the other receives them. The sending side fills
//! elements and tells of them, the receiving side takes the frames out and gives the elements back; an
//! element belongs to exactly one of them at any time, or is told of by a message on its way. A pool is
//! *idle* when all its elements are free, on the sending side: given back, each message that has to do
//! with it was received and dealt with.

use super::violation::Violation;
use super::wire::{PoolEntry, PoolKind, REFERENCE_YOURS};

/// No element: the end of a list.
const NONE: u32 = u32::MAX;

/// Pools that each side may have.
pub const MAX_POOLS: usize = 8;
/// Messages that a pool of kind `Send` may have room for.
pub const MAX_MESSAGES: u32 = 1 << 16;

/// Where an element is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// Free, on the sending side; lent to the peer, on the receiving one.
    #[default]
    Idle,
    /// The sending side fills it.
    Filling,
    /// It is filled, and the peer has yet to be told.
    Ready,
    /// The peer was told.
    Told,
    /// The receiving side was told of a frame that nobody has taken yet.
    Arrived,
    /// Somebody uses the frame.
    Held,
    /// The frame is used, and the peer has yet to be told.
    Owed,
}

/// An element of a pool. An endpoint is made with memory for all it may have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Element {
    /// The next one of the list it is in.
    next: u32,
    /// Bytes of the frame in it.
    pub(super) length: u32,
    pub(super) state: State,
}

/// Elements, one after the other, by their place in the endpoint's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        head: NONE,
        tail: NONE,
    };

    pub(super) fn is_empty(&self) -> bool {
        self.head == NONE
    }

    /// The first.
    pub(super) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// Adds one, which is in no other list, at the end.
    ///
    /// First in, first out: elements go round in order, so that those given back together are next to
    /// each other and need one entry of a message.
    pub(super) fn push(&mut self, elements: &mut [Element], place: u32) {
        elements[place as usize].next = NONE;
        if self.head == NONE {
            self.head = place;
        } else {
            elements[self.tail as usize].next = place;
        }
        self.tail = place;
    }

    /// Takes the first.
    pub(super) fn pop(&mut self, elements: &[Element]) -> Option<u32> {
        let place = self.first()?;
        self.head = elements[place as usize].next;
        Some(place)
    }
}

/// A pool, as its owner announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOffer {
    /// Its index, less than `REFERENCE_YOURS`; up to 255, immediate data can refer to it.
    pub index: u32,
    /// How frames get in and out.
    pub kind: PoolKind,
    /// How many elements it has; up to 256, immediate data can refer to all of them.
    pub elements: u32,
    /// Bytes of each. `Send`: bytes of a frame; the receive buffers are longer by what is before it.
    pub element_size: u32,
    /// Where the first is, for RDMA of the peer.
    pub address: u64,
    /// The remote key.
    pub key: u32,
    /// For the owner.
    pub context: u64,
}

impl PoolOffer {
    /// What an entry of a message says, if that makes sense for a peer of which `capacity` elements
    /// may be remembered for each pool.
    pub(super) fn from_entry(entry: &PoolEntry, capacity: u32) -> Result<Self, Violation> {
        let offer = Self {
            index: entry.pool,
            kind: PoolKind::from_number(entry.kind).ok_or(Violation::PoolKind)?,
            elements: entry.elements,
            element_size: entry.element_size,
            address: entry.address,
            key: entry.key,
            context: entry.context,
        };
        offer.check_shape(capacity)?;
        Ok(offer)
    }

    pub(super) fn entry(&self) -> PoolEntry {
        PoolEntry {
            pool: self.index,
            kind: self.kind.number(),
            reserved: 0,
            elements: self.elements,
            element_size: self.element_size,
            address: self.address,
            key: self.key,
            reserved2: 0,
            context: self.context,
        }
    }

    pub(super) fn check_shape(&self, capacity: u32) -> Result<(), Violation> {
        let is_send = self.kind == PoolKind::Send;
        let most = if is_send { MAX_MESSAGES } else { capacity };
        // No product of two such numbers is too large for 64 bits.
        let size = u64::from(self.elements) * u64::from(self.element_size);
        let fits = self.index < REFERENCE_YOURS
            && self.elements <= most
            && size != 0
            && self.address.checked_add(size).is_some()
            && (!is_send || (self.address == 0 && self.key == 0));
        fits.then_some(()).ok_or(Violation::PoolShape)
    }
}

/// What a pool is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolState {
    /// There is none.
    Vacant,
    /// Of this side, and to be announced.
    Offered,
    /// In use.
    Live,
    /// This side wants it gone.
    Draining,
    /// This side has asked for that.
    Asked,
    /// Of this side: gone, and its memory is its owner's again.
    Freed,
}

/// A pool of either side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    pub(super) offer: PoolOffer,
    pub(super) state: PoolState,
    /// It was announced, on this connection.
    pub(super) known: bool,
    /// The peer wants it gone.
    pub(super) peer_asked: bool,
    /// How many elements are idle.
    pub(super) idle: u32,
    /// How many have a frame that has arrived, or is used.
    pub(super) held: u32,
    /// How many are owed to the peer.
    pub(super) owed: u32,
    /// The sending side: those that are idle. The receiving side: those that are owed. Unless messages.
    pub(super) list: List,
    /// Tells what was in this place before.
    pub(super) generation: u32,
}

impl Pool {
    pub(super) const VACANT: Self = Self {
        offer: PoolOffer {
            index: 0,
            kind: PoolKind::Send,
            elements: 0,
            element_size: 0,
            address: 0,
            key: 0,
            context: 0,
        },
        state: PoolState::Vacant,
        known: false,
        peer_asked: false,
        idle: 0,
        held: 0,
        owed: 0,
        list: List::EMPTY,
        generation: 0,
    };

    /// Whether both sides are done with all that was sent through it.
    pub(super) fn is_idle(&self) -> bool {
        self.idle == self.offer.elements
    }

    /// Makes room for another.
    pub(super) fn vacate(&mut self) {
        *self = Self {
            generation: self.generation.wrapping_add(1),
            ..Self::VACANT
        };
    }
}
