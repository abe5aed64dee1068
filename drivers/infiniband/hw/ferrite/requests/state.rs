// SPDX-License-Identifier: GPL-2.0

//! The slots of the ring: what is in flight, and what may be put beside it.

use super::{
    request::{
        Post,
        Posted,
        Request,
        Stage,
        Ticket, //
    },
    slots::SlotSet,
    turns::Turns,
    Class,
    CommandRing,
    Outcome,
    PostedFor,
    ENTRIES,
    KEPT,
    MOST_LONG,
    MOST_POSTED,
    MOST_POSTED_BY_ONE,
    MOST_RECLAIM,
    SLOTS,
    SLOT_BITS, //
};
use crate::kernel_ext::scoped::ScopedRef;
use kernel::{
    prelude::*,
    rbtree::RBTree,
    sync::Arc,
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// Whom the answer to a command is for.
pub(super) enum Owner {
    Request(ScopedRef<Request>),
    /// Who asked may be gone.
    Posted {
        post: Post,
        name: u64,
        what: PostedFor,
        /// Of the object that the command is about.
        number: u32,
        /// Nobody will ask what became of it.
        forgotten: bool,
    },
}

impl Owner {
    pub(super) fn ticket(&self) -> &Ticket {
        match self {
            Self::Request(request) => &request.ticket,
            Self::Posted { post, .. } => &post.ticket,
        }
    }

    /// The name of the command, if it was posted.
    fn name(&self) -> Option<u64> {
        match self {
            Self::Request(_) => None,
            Self::Posted { name, .. } => Some(*name),
        }
    }
}

/// A place for a command in flight.
pub(super) struct Slot {
    /// Of its present use, or the last one.
    pub(super) cookie: u32,
    /// When it was put in the ring: the producer index.
    pub(super) place: u32,
    /// And by the clock.
    pub(super) since: Instant<Monotonic>,
    /// What the device is to do, by [`CommandOpcode`](crate::abi::CommandOpcode).
    pub(super) opcode: u16,
    /// What for, if it was posted.
    pub(super) posted: Option<PostedFor>,
    /// Whom its answer is for. Nobody, if the slot is free, and if it was given up.
    pub(super) owner: Option<Owner>,
}

/// The slot that a cookie names.
pub(super) fn slot_of(cookie: u32) -> usize {
    (cookie & ((1 << SLOT_BITS) - 1)) as usize
}

/// All requests.
///
/// Nothing waits that could be put in the ring, but while answers are being taken
/// ([`Requests::put_waiting`](super::Requests::put_waiting) ends that).
pub(super) struct State {
    /// Commands put in the ring, free-running.
    pub(super) producer: u32,
    /// Commands answered, free-running.
    pub(super) answers: u32,
    /// Nothing is put in the ring any more.
    pub(super) closed: bool,
    /// Slots that are free.
    pub(super) free: SlotSet,
    /// Slots of commands that were posted.
    pub(super) posted: SlotSet,
    /// How many were: with its slot, the name of the next one.
    pub(super) posts: u64,
    /// What posting takes, of commands that are done, for the next ones.
    pub(super) spare: KVec<Post>,
    /// What the last doorbell said.
    pub(super) told: u32,
    /// What became of those that failed or were lost, by name, until whoever posted them forgets them.
    pub(super) failures: RBTree<u64, Outcome>,
    pub(super) slots: KVec<Slot>,
    /// Slots in use, by class.
    pub(super) in_ring: [u32; Class::ORDER.len()],
    /// Those who wait, by class.
    pub(super) turns: [Turns; Class::ORDER.len()],
}

impl State {
    pub(super) fn new() -> Result<Self> {
        let mut slots = KVec::with_capacity(SLOTS, GFP_KERNEL)?;
        for index in 0..SLOTS {
            let slot = Slot {
                cookie: index as u32,
                place: 0,
                since: Instant::now(),
                opcode: 0,
                posted: None,
                owner: None,
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        Ok(Self {
            producer: 0,
            answers: 0,
            closed: false,
            free: SlotSet::all(),
            posted: SlotSet::default(),
            posts: 0,
            spare: KVec::with_capacity(MOST_POSTED as usize, GFP_KERNEL)?,
            told: 0,
            failures: RBTree::new(),
            slots,
            in_ring: [0; Class::ORDER.len()],
            turns: [Turns::new()?, Turns::new()?, Turns::new()?],
        })
    }

    pub(super) fn turns(&mut self, class: Class) -> &mut Turns {
        &mut self.turns[class as usize]
    }

    /// Whether there is a slot for another command of a class.
    pub(super) fn fits(&self, class: Class) -> bool {
        let free = self.free.len();
        match class {
            Class::Reclaim => free > 0 && self.in_ring[class as usize] < MOST_RECLAIM,
            Class::Short => free > KEPT,
            Class::Long => free > KEPT && self.in_ring[class as usize] < MOST_LONG,
        }
    }

    /// Those whose commands were posted and are in flight.
    fn posters(&self) -> impl Iterator<Item = &Owner> {
        let posted = self.posted.iter();
        posted.filter_map(|slot| self.slots[slot].owner.as_ref())
    }

    /// Whether a user may post another command.
    pub(super) fn may_post(&self, user: u64) -> bool {
        let all = self.posted.len();
        let is_own = |owner: &&Owner| owner.ticket().user == user;
        let own = || self.posters().filter(is_own).count() as u32;
        // Of fewer than one may have none needs to be looked at.
        all < MOST_POSTED && (all < MOST_POSTED_BY_ONE || own() < MOST_POSTED_BY_ONE)
    }

    /// The ticket of a command that was posted, if it is in flight.
    pub(super) fn in_flight(&self, posted: &Posted) -> Option<&Arc<Ticket>> {
        match &self.slots.get(posted.slot())?.owner {
            Some(Owner::Posted { post, name, .. }) if *name == posted.0 => Some(&post.ticket),
            _ => None,
        }
    }

    /// Puts a request at the end of its queue.
    pub(super) fn enqueue(&mut self, request: ScopedRef<Request>) {
        let turns = self.turns(request.ticket.class);
        let at = turns.queue_of(request.ticket.user);
        turns.used |= 1 << at;
        let queue = &mut turns.queues[at];
        queue.length += 1;
        let previous = queue.last.replace(request.clone());
        match &previous {
            Some(previous) => previous.progress.access_mut(self).next = Some(request.clone()),
            None => queue.first = Some(request.clone()),
        }
        request.progress.access_mut(self).previous = previous;
        *request.ticket.stage.access_mut(self) = Stage::Queued { queue: at };
    }

    /// Takes a request out of its queue; returns whether it was in one.
    pub(super) fn dequeue(&mut self, request: &Request) -> bool {
        let stage = request.ticket.stage.access_mut(self);
        let Stage::Queued { queue: at } = *stage else {
            return false;
        };
        *stage = Stage::Apart;
        let progress = request.progress.access_mut(self);
        let (previous, next) = (progress.previous.take(), progress.next.take());
        if let Some(previous) = &previous {
            previous.progress.access_mut(self).next = next.clone();
        }
        if let Some(next) = &next {
            next.progress.access_mut(self).previous = previous.clone();
        }
        let turns = self.turns(request.ticket.class);
        let queue = &mut turns.queues[at];
        if previous.is_none() {
            queue.first = next.clone();
        }
        if next.is_none() {
            queue.last = previous;
        }
        queue.length -= 1;
        if queue.length == 0 {
            turns.used &= !(1 << at);
        }
        true
    }

    /// Takes the next request of a class out of the queues.
    pub(super) fn next(&mut self, class: Class) -> Option<ScopedRef<Request>> {
        let turns = self.turns(class);
        let queue = turns.take_turn()?;
        let request = turns.queues[queue].first.clone()?;
        self.dequeue(&request);
        Some(request)
    }

    /// Tells how a command ended. Who asked for it may be gone when `owner` is dropped.
    pub(super) fn complete(&mut self, owner: Owner, outcome: Outcome) {
        let ticket = owner.ticket();
        *ticket.stage.access_mut(self) = Stage::Done(outcome);
        ticket.done.complete_all();
        match owner {
            Owner::Posted {
                post,
                name,
                forgotten: false,
                ..
            } if !outcome.is_success() => {
                self.failures.insert(post.failure.into_node(name, outcome));
            }
            Owner::Posted { post, .. } => {
                // There is room for those of all that can be in flight, and more are of no use.
                let _ = self.spare.push_within_capacity(post);
            }
            Owner::Request(_) => {}
        }
    }

    /// The slot that is used next, and the name of its use.
    pub(super) fn next_slot(&self) -> Option<(usize, u32)> {
        let index = self.free.first()?;
        let cookie = self.slots[index].cookie.wrapping_add(1 << SLOT_BITS);
        Some((index, cookie))
    }

    /// Notes that the next slot is used by what was written to the ring.
    pub(super) fn occupy(&mut self, index: usize, cookie: u32, opcode: u16, owner: Owner) {
        let ticket = owner.ticket();
        *ticket.stage.access_mut(self) = Stage::InRing { slot: index };
        self.in_ring[ticket.class as usize] += 1;
        if owner.name().is_some() {
            self.posted.insert(index);
        }
        let posted = match &owner {
            Owner::Request(_) => None,
            Owner::Posted { what, .. } => Some(*what),
        };
        self.slots[index] = Slot {
            cookie,
            place: self.producer,
            since: Instant::now(),
            opcode,
            posted,
            owner: Some(owner),
        };
        self.free.remove(index);
        self.producer = self.producer.wrapping_add(1);
    }

    /// Where in the ring the next entry is.
    pub(super) fn place(&self) -> usize {
        self.producer as usize & (ENTRIES - 1)
    }

    /// Writes a request to the ring, for which there is a slot. The device is not told yet.
    pub(super) fn put(&mut self, request: ScopedRef<Request>, ring: &impl CommandRing) {
        let Some((index, cookie)) = self.next_slot() else {
            return self.complete(Owner::Request(request), Outcome::Lost);
        };
        let place = self.place();
        let entry = &mut request.progress.access_mut(self).entry;
        entry.cookie = cookie;
        if request.has_reply {
            entry.reply = ring.reply_address(index);
        }
        let opcode = entry.opcode;
        if ring.write(place, entry).is_err() {
            self.complete(Owner::Request(request), Outcome::Lost);
            return;
        }
        self.occupy(index, cookie, opcode, Owner::Request(request));
    }

    /// Whether somebody waits for a slot.
    pub(super) fn somebody_waits(&self) -> bool {
        self.turns.iter().any(|turns| turns.used != 0)
    }

    /// The place of the oldest command that a waiting one of a class cannot do without an answer to;
    /// that of the next one where there is none.
    pub(super) fn oldest_in_the_way(&self, class: Class) -> u32 {
        let most = match class {
            Class::Reclaim => MOST_RECLAIM,
            Class::Long => MOST_LONG,
            Class::Short => u32::MAX,
        };
        // Others are in the way of none that waits for those of its own class.
        let own_only = self.in_ring[class as usize] >= most;
        let age = |place: u32| self.producer.wrapping_sub(place);
        self.slots
            .iter()
            .filter(|slot| match &slot.owner {
                Some(owner) => !own_only || owner.ticket().class == class,
                None => false,
            })
            .map(|slot| slot.place)
            .max_by_key(|place| age(*place))
            .unwrap_or(self.producer)
    }

    /// Tells the device of the entries in the ring. The lock is held, so that nobody has what a command
    /// makes before the device can know of it.
    pub(super) fn tell(&mut self, ring: &impl CommandRing) {
        ring.store_producer(self.producer);
        self.ring(ring);
    }

    /// Rings the doorbell for all that stands in the ring.
    pub(super) fn ring(&mut self, ring: &impl CommandRing) {
        ring.ring_doorbell(self.producer);
        self.told = self.producer;
    }

    /// Puts those who wait in the ring, as far as there are slots.
    pub(super) fn put_waiting(&mut self, ring: &impl CommandRing) {
        if self.closed {
            return;
        }
        let before = self.producer;
        while let Some(class) = Class::ORDER
            .into_iter()
            .find(|class| self.turns[*class as usize].used != 0 && self.fits(*class))
        {
            let Some(request) = self.next(class) else {
                break;
            };
            self.put(request, ring);
        }
        if self.producer != before {
            self.tell(ring);
        }
    }
}
