// SPDX-License-Identifier: GPL-2.0

//! Commands that were asked for: which is put in the control ring next, and whose answer is whose.
//!
//! What waits for room in the ring is the ready command, not the thread that asks for it, and the
//! event of an answer makes the room: how the threads of a user are scheduled delays that user's own
//! commands only. A request lies on the stack of who waits for it, as nothing can be allocated where
//! memory is taken back. An answer is copied to it, and then its slot is free.
//!
//! A command may also be posted, by who goes on without its answer. It is given to the device at once
//! or not at all, and so is never among those that wait; by its name ([`Posted`]) it is told later what
//! became of it, and its slot is free when whoever looks next takes its answer. As nobody may look for a
//! while, those that were posted have some of the slots only, and those of one user fewer. What was done is
//! not remembered: a command that is neither in flight nor known to have failed was. So what a command that
//! succeeds takes of memory is free with its answer, however long there is what it made, and the next one that is
//! posted takes it; of as many as can be in flight at once nothing is allocated.
//!
//! Answers are taken many at a time. What waits is put in the ring after all of them, with one doorbell
//! (a write to the device is an exit of a virtual machine), so that who takes them is done when there
//! were as many as were in flight.

mod request;
mod slots;
#[cfg(CONFIG_KUNIT = "y")]
pub(crate) mod stage;
mod state;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;
mod turns;
mod view;

pub(crate) use self::request::{
    Asked,
    Position,
    Post,
    Posted,
    Request,
    Ticket, //
};
pub(crate) use self::view::RingView;
use self::{
    request::Stage,
    state::{
        slot_of,
        Owner,
        Slot,
        State, //
    }, //
};
use crate::{
    abi::{
        CommandEntry,
        CommandStatus,
        Plain, //
    },
    dma_types::Reply,
    kernel_ext::{
        scoped::Scoped,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        }, //
    }, //
};
use core::cmp::Reverse;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Base-2 logarithm of the entries of the control ring.
pub(crate) const LOG_ENTRIES: u8 = 7;

/// Entries of the control ring.
pub(crate) const ENTRIES: usize = 1 << LOG_ENTRIES;

/// Commands in flight: fewer than the ring has entries.
pub(crate) const SLOTS: usize = ENTRIES - 1;

const SLOT_BITS: u32 = 8;

const _: () = assert!(SLOTS <= 1 << SLOT_BITS);

// A reply is kept where its command was.
const _: () = assert!(Reply::SIZE <= core::mem::size_of::<CommandEntry>());

/// Slots that only memory management gets.
const KEPT: u32 = 1;

/// Slots that it has at the most: others go on however much memory a user has taken back.
const MOST_RECLAIM: u32 = SLOTS as u32 / 2;

/// Long commands in flight, at the most: that many are ahead of any other.
pub(crate) const MOST_LONG: u32 = 4;

/// Slots of commands that were posted, at the most: who waits for his has the others, also where nobody
/// takes the answers to these.
const MOST_POSTED: u32 = SLOTS as u32 / 2 - KEPT;

/// And of those of one user: he alone keeps nobody else from posting.
const MOST_POSTED_BY_ONE: u32 = MOST_POSTED / 2;

/// Commands that the device was told of by the record alone, at the most: it has answered these when their user
/// has posted as many as he may have.
const MOST_UNTOLD: u32 = MOST_POSTED_BY_ONE / 2;

// One is left for the others then, which is not the kept one.
const _: () = assert!(MOST_POSTED + MOST_RECLAIM + KEPT < SLOTS as u32);

/// What kind of command it is, for the order in which they are put in the ring.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Class {
    /// Memory management waits for it, and others wait for that.
    Reclaim,
    /// Any other: the device needs no longer for it because something of a user's is large.
    Short,
    /// The device works on it for a while, as it moves or flushes a ring of any length.
    Long,
}

impl Class {
    /// Those that get a slot first.
    const ORDER: [Self; 3] = [Self::Reclaim, Self::Long, Self::Short];
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Outcome {
    /// The device answered with this status and result.
    Answered { status: u32, result: u64 },
    /// It will not answer any more.
    Lost,
}

impl Outcome {
    /// Whether what was asked for was done.
    fn is_success(self) -> bool {
        matches!(self, Self::Answered { status, .. } if status == u32::from(CommandStatus::Ok.number()))
    }
}

/// What an answer was to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Answered {
    /// A command that somebody waits for, and will find out about.
    Request,
    /// One that was posted, about the object of that number.
    Posted { what: PostedFor, number: u32 },
}

/// What a command is for that was posted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum PostedFor {
    /// It makes an object, which is there when it is done.
    Making,
    /// It takes one down, of which nothing is left here.
    Release,
}

/// Whether the device is told of a command that is posted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Telling {
    /// By the doorbell.
    Doorbell,
    /// It looks for it before it uses what the command is about. Otherwise it learns of it with the next
    /// command that somebody waits for, or when there are some.
    Record,
}

/// The control ring, the memory for replies, and the doorbell.
pub(crate) trait CommandRing {
    /// Writes an entry.
    fn write(&self, at: usize, entry: &CommandEntry) -> Result;
    /// Where the device puts the reply to the command in a slot.
    fn reply_address(&self, slot: usize) -> u64;
    /// Copies what is there to `reply`.
    fn reply(&self, slot: usize, reply: &mut [u8]) -> Result;
    /// Stores the index of the next entry, free-running, where the device finds it that has met with
    /// what was made of a command before it has seen the doorbell: after all entries before this one.
    fn store_producer(&self, producer: u32);
    /// Tells the device of all entries before this one: after that store.
    fn ring_doorbell(&self, producer: u32);
}

/// All requests, for those who ask and for who takes the answers.
#[pin_data]
pub(crate) struct Requests {
    /// Taken in interrupts, with the lock of an event queue held.
    #[pin]
    state: IrqSpinLock<State>,
}

impl Requests {
    /// How many of those who wait are completed with the lock held.
    const BATCH: usize = 64;

    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            state <- new_irq_spinlock!(State::new()?, "ferrite_cqp"),
        })
    }

    /// Puts a request in the ring, or has it wait for that. Returns whether it is in the ring; `EIO` if
    /// the requests were closed.
    pub(crate) fn submit(
        &self,
        request: Pin<&Scoped<Request>>,
        ring: &impl CommandRing,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(EIO);
        }
        if !state.somebody_waits() && state.fits(request.ticket.class) {
            state.put(request.reference(), ring);
            state.tell(ring);
            return Ok(true);
        }
        // It overtakes nobody, also where slots got free just now.
        state.enqueue(request.reference());
        state.put_waiting(ring);
        let stage = request.ticket.stage.access_mut(&mut state);
        Ok(!matches!(stage, Stage::Queued { .. }))
    }

    /// The same, but `EAGAIN` where it would have to wait: for a slot, or for the device to end a long
    /// command.
    pub(crate) fn submit_now(
        &self,
        request: Pin<&Scoped<Request>>,
        ring: &impl CommandRing,
    ) -> Result {
        let mut state = self.state.lock();
        if state.closed {
            return Err(EIO);
        }
        state.put_waiting(ring);
        let long = state.in_ring[Class::Long as usize] != 0;
        let class = request.ticket.class;
        if long || state.turns(class).used != 0 || !state.fits(class) {
            return Err(EAGAIN);
        }
        state.put(request.reference(), ring);
        state.tell(ring);
        Ok(())
    }

    /// Gives the device a command about the object of that `number`, for which nobody waits and which
    /// is answered without a reply. `EAGAIN` where it would have to wait for a slot, or its user has
    /// posted many already: it is to be asked for as others are then.
    pub(crate) fn post(
        &self,
        post: Post,
        (what, number): (PostedFor, u32),
        entry: &mut CommandEntry,
        telling: Telling,
        ring: &impl CommandRing,
    ) -> Result<Posted> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(EIO);
        }
        let (class, user) = (post.ticket.class, post.ticket.user);
        if state.somebody_waits() || !state.fits(class) || !state.may_post(user) {
            return Err(EAGAIN);
        }
        let (index, cookie) = state.next_slot().ok_or(EAGAIN)?;
        entry.cookie = cookie;
        ring.write(state.place(), entry)?;
        let name = state.posts << SLOT_BITS | index as u64;
        state.posts += 1;
        let owner = Owner::Posted {
            post,
            name,
            what,
            number,
            forgotten: false,
        };
        state.occupy(index, cookie, entry.opcode, owner);
        let untold = state.producer.wrapping_sub(state.told);
        if telling == Telling::Doorbell || untold >= MOST_UNTOLD {
            state.tell(ring);
        } else {
            ring.store_producer(state.producer);
        }
        Ok(Posted(name))
    }

    /// What posting a command takes, if one that was posted is done.
    fn take_spare(&self) -> Option<Post> {
        self.state.lock().spare.pop()
    }

    /// Rings the doorbell, if there are commands that the device was told of by the record alone.
    pub(crate) fn ring_for_posted(&self, ring: &impl CommandRing) {
        let mut state = self.state.lock();
        if !state.closed && state.told != state.producer {
            state.ring(ring);
        }
    }

    /// What to wait for the end of a command by that was posted; none if it is done.
    pub(crate) fn ticket(&self, posted: &Posted) -> Option<Arc<Ticket>> {
        self.state.lock().in_flight(posted).cloned()
    }

    /// What became of a command that was posted, if that is known.
    pub(crate) fn outcome_yet(&self, posted: &Posted) -> Option<Outcome> {
        let state = self.state.lock();
        if state.in_flight(posted).is_some() {
            return None;
        }
        let done = Outcome::Answered {
            status: CommandStatus::Ok.number().into(),
            result: 0,
        };
        Some(state.failures.get(&posted.0).copied().unwrap_or(done))
    }

    /// Forgets what became of a command that was posted, or will: that is as if it had done what was asked
    /// for.
    pub(crate) fn forget(&self, posted: &Posted) {
        let mut state = self.state.lock();
        if let Some(Owner::Posted {
            name, forgotten, ..
        }) = &mut state.slots[posted.slot()].owner
        {
            if *name == posted.0 {
                *forgotten = true;
                return;
            }
        }
        let failure = state.failures.remove_node(&posted.0);
        drop(state);
        drop(failure);
    }

    /// Takes an answer: tells who waits for it. Returns what it was to, if there was a command of that
    /// name; then [`Requests::put_waiting`] is to be called, once for all answers that there are, before
    /// anything else is run on this processor. May be called from any context.
    pub(crate) fn finish(
        &self,
        cookie: u32,
        status: u32,
        result: u64,
        ring: &impl CommandRing,
    ) -> Option<Answered> {
        let mut state = self.state.lock();
        let index = slot_of(cookie);
        let slot = state.slots.get_mut(index);
        let slot = slot.filter(|slot| slot.cookie == cookie)?;
        // Nobody, if it was answered before, or is waited for no more: the device may do anything then.
        let owner = slot.owner.take()?;
        let mut outcome = Outcome::Answered { status, result };
        let answered = match &owner {
            Owner::Request(request) => {
                if request.has_reply {
                    // The slot's next command is answered there too.
                    let entry = &mut request.progress.access_mut(&mut state).entry;
                    if ring.reply(index, entry.as_bytes_mut()).is_err() {
                        outcome = Outcome::Lost;
                    }
                }
                Answered::Request
            }
            Owner::Posted { what, number, .. } => Answered::Posted {
                what: *what,
                number: *number,
            },
        };
        state.free.insert(index);
        state.posted.remove(index);
        state.in_ring[owner.ticket().class as usize] -= 1;
        state.answers = state.answers.wrapping_add(1);
        state.complete(owner, outcome);
        Some(answered)
    }

    /// The opcode of the command of that name, if it is in flight. May be called from any context.
    pub(crate) fn opcode_of(&self, cookie: u32) -> Option<u16> {
        let state = self.state.lock();
        let slot = state.slots.get(slot_of(cookie))?;
        (slot.cookie == cookie && slot.owner.is_some()).then_some(slot.opcode)
    }

    /// What there is to say of all commands. Sleeps.
    pub(crate) fn look(&self) -> Result<RingView> {
        // Before the lock is taken.
        let commands = KVec::with_capacity(SLOTS, GFP_KERNEL)?;
        let mut view = self.state.lock().look(commands);
        view.commands
            .sort_unstable_by_key(|command| Reverse(command.behind));
        Ok(view)
    }

    /// Puts those who wait in the ring, as far as there are slots. May be called from any context.
    pub(crate) fn put_waiting(&self, ring: &impl CommandRing) {
        self.state.lock().put_waiting(ring);
    }

    /// Ends all requests, those that come later too. May be called from any context.
    pub(crate) fn close(&self) {
        loop {
            let mut state = self.state.lock();
            state.closed = true;
            for index in 0..SLOTS {
                if let Some(owner) = state.slots[index].owner.take() {
                    state.complete(owner, Outcome::Lost);
                }
            }
            for _ in 0..Self::BATCH {
                let next = Class::ORDER.into_iter().find_map(|class| state.next(class));
                match next {
                    Some(request) => state.complete(Owner::Request(request), Outcome::Lost),
                    None => return,
                }
            }
        }
    }

    /// Takes a request back that waits; returns whether it did.
    pub(crate) fn withdraw(&self, request: &Request) -> bool {
        self.state.lock().dequeue(request)
    }

    /// Makes nothing be done about a command any more. Returns false where it is done already. The
    /// slot it may have is not used again: what the device does about it is not known.
    pub(crate) fn give_up(&self, asked: Asked<'_>) -> bool {
        let mut state = self.state.lock();
        if let Asked::Request(request) = asked {
            if state.dequeue(request) {
                return true;
            }
        }
        let stage = asked.ticket().stage.access_mut(&mut state);
        let slot = match *stage {
            Stage::Done(_) => return false,
            Stage::InRing { slot } => slot,
            // What is posted waits in no queue.
            Stage::Apart | Stage::Queued { .. } => return true,
        };
        *stage = Stage::Apart;
        if let Some(owner @ Owner::Posted { .. }) = state.slots[slot].owner.take() {
            // Others may wait for it, or ask later.
            state.complete(owner, Outcome::Lost);
        }
        true
    }

    /// How far a command is.
    pub(crate) fn position(&self, ticket: &Ticket) -> Position {
        let mut state = self.state.lock();
        let slot = match *ticket.stage.access_mut(&mut state) {
            Stage::Queued { .. } => {
                return Position::Queued {
                    answers: state.answers,
                    oldest: state.oldest_in_the_way(ticket.class),
                }
            }
            Stage::InRing { slot } => slot,
            Stage::Apart | Stage::Done(_) => return Position::Done,
        };
        let place = state.slots[slot].place;
        let is_ahead =
            |slot: &&Slot| slot.owner.is_some() && place.wrapping_sub(slot.place) as i32 > 0;
        Position::InRing {
            ahead: state.slots.iter().filter(is_ahead).count() as u32,
        }
    }

    /// How a command ended that is waited for no more.
    pub(crate) fn outcome(&self, ticket: &Ticket) -> Outcome {
        match *ticket.stage.access_mut(&mut self.state.lock()) {
            Stage::Done(outcome) => outcome,
            // Nothing is done about it any more.
            Stage::Apart | Stage::Queued { .. } | Stage::InRing { .. } => Outcome::Lost,
        }
    }

    /// Copies the start of the reply to a request that was answered, as much as there is room for.
    pub(crate) fn reply(&self, request: &Request, reply: &mut [u8]) {
        let mut state = self.state.lock();
        let entry = &request.progress.access_mut(&mut state).entry;
        for (to, from) in reply.iter_mut().zip(entry.as_bytes()) {
            *to = *from;
        }
    }
}
