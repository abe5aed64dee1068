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

use crate::{
    abi::{
        CommandEntry,
        CommandStatus,
        Plain, //
    },
    dma_types::Reply,
    kernel_ext::{
        completion::Completion,
        scoped::{
            Scoped,
            ScopedRef, //
        },
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
    },
};
use kernel::{
    alloc::Flags,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::{
        Arc,
        LockedBy, //
    },
};

/// Base-2 logarithm of the entries of the control ring.
pub(crate) const LOG_ENTRIES: u8 = 6;
/// Entries of the control ring.
pub(crate) const ENTRIES: usize = 1 << LOG_ENTRIES;
/// Commands in flight: fewer than the ring has entries.
pub(crate) const SLOTS: usize = ENTRIES - 1;
const SLOT_BITS: u32 = 8;
const _: () = assert!(SLOTS <= 1 << SLOT_BITS && SLOTS <= u64::BITS as usize);
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

/// Users who wait at once and have a turn each, of every class; what is beyond shares.
const QUEUES: usize = u64::BITS as usize;

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

/// Where a request is.
enum Stage {
    /// With nobody but its owner.
    Apart,
    Queued {
        queue: usize,
    },
    InRing {
        slot: usize,
    },
    Done(Outcome),
}

/// How far a request is, as its owner sees it. What does not change means that nothing is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Position {
    /// It waits for a slot; so many commands were answered until now, free-running, and this one is
    /// the oldest of those that are in its way (its place in the ring).
    Queued {
        answers: u32,
        oldest: u32,
    },
    /// The device has it, and so many that were put in the ring before.
    InRing {
        ahead: u32,
    },
    Done,
}

/// How far a command is and how it ended, for who asked for it.
#[pin_data]
pub(crate) struct Ticket {
    class: Class,
    user: u64,
    stage: LockedBy<Stage, State>,
    /// Signalled when it is done, for all who wait for that, now or later.
    #[pin]
    pub(crate) done: Completion,
}

impl Ticket {
    /// Of a command that `user` answers for.
    pub(crate) fn new(requests: &Requests, user: u64, class: Class) -> impl PinInit<Self> + '_ {
        pin_init!(Self {
            class,
            user,
            stage: LockedBy::new(&requests.state, Stage::Apart),
            done <- Completion::new(),
        })
    }

    /// Makes one of which nobody else knows that of another command.
    fn renew(this: Pin<&mut Self>, requests: &Requests, of_user: u64, of_class: Class) {
        let this = this.project();
        *this.class = of_class;
        *this.user = of_user;
        *this.stage = LockedBy::new(&requests.state, Stage::Apart);
        this.done.reinit();
    }
}

/// What posting a command takes. It is made before: nothing can be allocated where an answer is taken.
pub(crate) struct Post {
    ticket: Arc<Ticket>,
    failure: RBTreeNodeReservation<u64, Outcome>,
}

impl Post {
    /// For a command that `user` answers for. Where one that was posted is done, it is what that took.
    pub(crate) fn new(requests: &Requests, user: u64, class: Class, flags: Flags) -> Result<Self> {
        let Some(Self { ticket, failure }) = requests.take_spare() else {
            return Ok(Self {
                ticket: Arc::pin_init(Ticket::new(requests, user, class), flags)?,
                failure: RBTreeNodeReservation::new(flags)?,
            });
        };
        // Somebody may yet have to see that the last one is done.
        let ticket = match Arc::into_unique_or_drop(ticket) {
            Some(mut ticket) => {
                Ticket::renew(ticket.as_mut(), requests, user, class);
                ticket.into()
            }
            None => Arc::pin_init(Ticket::new(requests, user, class), flags)?,
        };
        Ok(Self { ticket, failure })
    }
}

/// The name of a command that was posted, by which it is asked what became of it until that is forgotten
/// ([`Requests::forget`]).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Posted(u64);

impl Posted {
    /// The slot that it was put in.
    fn slot(&self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }
}

/// What changes of a request, but for how far it is.
struct Progress {
    /// Its neighbours in the queue.
    previous: Option<ScopedRef<Request>>,
    next: Option<ScopedRef<Request>>,
    /// But for the cookie and the place of the reply, which are those of a slot. When it is done, the
    /// reply stands here: stacks are short where memory is taken back.
    entry: CommandEntry,
}

/// A command that somebody asks for, and waits for.
#[pin_data]
pub(crate) struct Request {
    #[pin]
    pub(crate) ticket: Ticket,
    /// Whether it is answered by a reply.
    has_reply: bool,
    progress: LockedBy<Progress, State>,
}

impl Request {
    /// A request that `user` answers for.
    pub(crate) fn new<'a>(
        requests: &'a Requests,
        user: u64,
        class: Class,
        entry: CommandEntry,
    ) -> impl PinInit<Scoped<Self>> + 'a {
        let progress = Progress {
            previous: None,
            next: None,
            entry,
        };
        Scoped::new(pin_init!(Self {
            ticket <- Ticket::new(requests, user, class),
            has_reply: progress.entry.reply_length != 0,
            progress: LockedBy::new(&requests.state, progress),
        }))
    }
}

/// What is waited for.
#[derive(Clone, Copy)]
pub(crate) enum Asked<'a> {
    /// A command from when it was asked for.
    Request(&'a Request),
    /// One that was posted.
    Posted(&'a Ticket),
}

impl<'a> Asked<'a> {
    /// What tells how far it is.
    pub(crate) fn ticket(self) -> &'a Ticket {
        match self {
            Self::Request(request) => &request.ticket,
            Self::Posted(ticket) => ticket,
        }
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

/// Requests of a user that wait, in the order they came.
struct Waiting {
    user: u64,
    first: Option<ScopedRef<Request>>,
    last: Option<ScopedRef<Request>>,
    length: u32,
}

/// Requests of one class that wait: users in turn.
struct Turns {
    queues: KVec<Waiting>,
    /// Which queues are not empty.
    used: u64,
    /// The queue whose turn it is.
    next: usize,
}

impl Turns {
    fn new() -> Result<Self> {
        let mut queues = KVec::with_capacity(QUEUES, GFP_KERNEL)?;
        for _ in 0..QUEUES {
            let queue = Waiting {
                user: 0,
                first: None,
                last: None,
                length: 0,
            };
            queues.push(queue, GFP_KERNEL)?;
        }
        Ok(Self {
            queues,
            used: 0,
            next: 0,
        })
    }

    /// The queue of a user: the one that is, else a new one, else the shortest, which is shared.
    fn queue_of(&mut self, user: u64) -> usize {
        let used = |queue: usize| self.used & 1 << queue != 0;
        let own = (0..QUEUES).find(|queue| used(*queue) && self.queues[*queue].user == user);
        if let Some(own) = own {
            return own;
        }
        match (0..QUEUES).find(|queue| !used(*queue)) {
            Some(new) => {
                self.queues[new].user = user;
                new
            }
            None => (0..QUEUES)
                .min_by_key(|queue| self.queues[*queue].length)
                .unwrap_or(0),
        }
    }

    /// The queue whose turn it is, which then is the next one's.
    fn take_turn(&mut self) -> Option<usize> {
        if self.used == 0 {
            return None;
        }
        let ahead = self.used.rotate_right(self.next as u32).trailing_zeros();
        let queue = (self.next + ahead as usize) % QUEUES;
        self.next = (queue + 1) % QUEUES;
        Some(queue)
    }
}

/// Whom the answer to a command is for.
enum Owner {
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
    fn ticket(&self) -> &Ticket {
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
struct Slot {
    /// Of its present use, or the last one.
    cookie: u32,
    /// When it was put in the ring: the producer index.
    place: u32,
    /// Whom its answer is for. Nobody, if the slot is free, and if it was given up.
    owner: Option<Owner>,
}

/// The slot that a cookie names.
fn slot_of(cookie: u32) -> usize {
    (cookie & ((1 << SLOT_BITS) - 1)) as usize
}

/// All requests.
///
/// Nothing waits that could be put in the ring, but while answers are being taken
/// ([`Requests::put_waiting`] ends that).
struct State {
    /// Commands put in the ring, free-running.
    producer: u32,
    /// Commands answered, free-running.
    answers: u32,
    /// Nothing is put in the ring any more.
    closed: bool,
    /// Slots that are free.
    free: u64,
    /// Slots of commands that were posted.
    posted: u64,
    /// How many were: with its slot, the name of the next one.
    posts: u64,
    /// What posting takes, of commands that are done, for the next ones.
    spare: KVec<Post>,
    /// What the last doorbell said.
    told: u32,
    /// What became of those that failed or were lost, by name, until whoever posted them forgets them.
    failures: RBTree<u64, Outcome>,
    slots: KVec<Slot>,
    /// Slots in use, by class.
    in_ring: [u32; Class::ORDER.len()],
    /// Those who wait, by class.
    turns: [Turns; Class::ORDER.len()],
}

impl State {
    fn new() -> Result<Self> {
        let mut slots = KVec::with_capacity(SLOTS, GFP_KERNEL)?;
        for index in 0..SLOTS {
            let slot = Slot {
                cookie: index as u32,
                place: 0,
                owner: None,
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        Ok(Self {
            producer: 0,
            answers: 0,
            closed: false,
            free: u64::MAX >> (u64::BITS as usize - SLOTS),
            posted: 0,
            posts: 0,
            spare: KVec::with_capacity(MOST_POSTED as usize, GFP_KERNEL)?,
            told: 0,
            failures: RBTree::new(),
            slots,
            in_ring: [0; Class::ORDER.len()],
            turns: [Turns::new()?, Turns::new()?, Turns::new()?],
        })
    }

    fn turns(&mut self, class: Class) -> &mut Turns {
        &mut self.turns[class as usize]
    }

    /// Whether there is a slot for another command of a class.
    fn fits(&self, class: Class) -> bool {
        let free = self.free.count_ones();
        match class {
            Class::Reclaim => free > 0 && self.in_ring[class as usize] < MOST_RECLAIM,
            Class::Short => free > KEPT,
            Class::Long => free > KEPT && self.in_ring[class as usize] < MOST_LONG,
        }
    }

    /// Those whose commands were posted and are in flight.
    fn posters(&self) -> impl Iterator<Item = &Owner> {
        let mut left = self.posted;
        core::iter::from_fn(move || {
            let next = (left != 0).then_some(left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(next)
        })
        .filter_map(|slot| self.slots[slot].owner.as_ref())
    }

    /// Whether a user may post another command.
    fn may_post(&self, user: u64) -> bool {
        let all = self.posted.count_ones();
        let is_own = |owner: &&Owner| owner.ticket().user == user;
        let own = || self.posters().filter(is_own).count() as u32;
        // Of fewer than one may have none needs to be looked at.
        all < MOST_POSTED && (all < MOST_POSTED_BY_ONE || own() < MOST_POSTED_BY_ONE)
    }

    /// The ticket of a command that was posted, if it is in flight.
    fn in_flight(&self, posted: &Posted) -> Option<&Arc<Ticket>> {
        match &self.slots.get(posted.slot())?.owner {
            Some(Owner::Posted { post, name, .. }) if *name == posted.0 => Some(&post.ticket),
            _ => None,
        }
    }

    /// Puts a request at the end of its queue.
    fn enqueue(&mut self, request: ScopedRef<Request>) {
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
    fn dequeue(&mut self, request: &Request) -> bool {
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
    fn next(&mut self, class: Class) -> Option<ScopedRef<Request>> {
        let turns = self.turns(class);
        let queue = turns.take_turn()?;
        let request = turns.queues[queue].first.clone()?;
        self.dequeue(&request);
        Some(request)
    }

    /// Tells how a command ended. Who asked for it may be gone when `owner` is dropped.
    fn complete(&mut self, owner: Owner, outcome: Outcome) {
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

    /// The slot that is used next, of which there has to be one, and the name of its use.
    fn next_slot(&self) -> (usize, u32) {
        let index = self.free.trailing_zeros() as usize;
        let cookie = self.slots[index].cookie.wrapping_add(1 << SLOT_BITS);
        (index, cookie)
    }

    /// Notes that the next slot is used by what was written to the ring.
    fn occupy(&mut self, index: usize, cookie: u32, owner: Owner) {
        let ticket = owner.ticket();
        *ticket.stage.access_mut(self) = Stage::InRing { slot: index };
        self.in_ring[ticket.class as usize] += 1;
        if owner.name().is_some() {
            self.posted |= 1 << index;
        }
        self.slots[index] = Slot {
            cookie,
            place: self.producer,
            owner: Some(owner),
        };
        self.free &= !(1 << index);
        self.producer = self.producer.wrapping_add(1);
    }

    /// Where in the ring the next entry is.
    fn place(&self) -> usize {
        self.producer as usize & (ENTRIES - 1)
    }

    /// Writes a request to the ring, for which there is a slot. The device is not told yet.
    fn put(&mut self, request: ScopedRef<Request>, ring: &impl CommandRing) {
        let (index, cookie) = self.next_slot();
        let place = self.place();
        let entry = &mut request.progress.access_mut(self).entry;
        entry.cookie = cookie;
        if request.has_reply {
            entry.reply = ring.reply_address(index);
        }
        if ring.write(place, entry).is_err() {
            self.complete(Owner::Request(request), Outcome::Lost);
            return;
        }
        self.occupy(index, cookie, Owner::Request(request));
    }

    /// Whether somebody waits for a slot.
    fn somebody_waits(&self) -> bool {
        self.turns.iter().any(|turns| turns.used != 0)
    }

    /// The place of the oldest command that a waiting one of a class cannot do without an answer to;
    /// that of the next one where there is none.
    fn oldest_in_the_way(&self, class: Class) -> u32 {
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
    fn tell(&mut self, ring: &impl CommandRing) {
        ring.store_producer(self.producer);
        self.ring(ring);
    }

    /// Rings the doorbell for all that stands in the ring.
    fn ring(&mut self, ring: &impl CommandRing) {
        ring.ring_doorbell(self.producer);
        self.told = self.producer;
    }

    /// Puts those who wait in the ring, as far as there are slots.
    fn put_waiting(&mut self, ring: &impl CommandRing) {
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

/// All requests, for those who ask and for who takes the answers.
#[pin_data]
pub(crate) struct Requests {
    /// Taken in interrupts, with the lock of an event queue held.
    #[pin]
    state: IrqSpinLock<State>,
}

impl Requests {
    /// How many are completed with the lock held.
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
        let (index, cookie) = state.next_slot();
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
        state.occupy(index, cookie, owner);
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
        state.free |= 1 << index;
        state.posted &= !(1 << index);
        state.in_ring[owner.ticket().class as usize] -= 1;
        state.answers = state.answers.wrapping_add(1);
        state.complete(owner, outcome);
        Some(answered)
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

/// A device that answers what it is told to, and users none of whose threads ever runs.
#[cfg(CONFIG_KUNIT = "y")]
pub(crate) mod stage {
    use super::*;
    use crate::{
        abi::CommandOpcode,
        cqp::object, //
    };
    use core::{
        cell::{
            Cell,
            RefCell, //
        },
        ops::Range, //
    };

    /// What was put in the ring: who asked, and how the answer is called.
    pub(crate) struct Memory {
        pub(crate) given: RefCell<KVec<(usize, u32)>>,
        answered: Cell<usize>,
        /// What the record says.
        pub(crate) stored: Cell<u32>,
        pub(crate) told: Cell<u32>,
        pub(crate) doorbells: Cell<u32>,
        pub(crate) reply: Cell<u8>,
    }

    impl CommandRing for Memory {
        fn write(&self, at: usize, entry: &CommandEntry) -> Result {
            let mut given = self.given.borrow_mut();
            assert_eq!(at, given.len() % ENTRIES);
            let [a, b, c, d, ..] = entry.payload;
            let who = u32::from_le_bytes([a, b, c, d]) as usize;
            given.push((who, entry.cookie), GFP_ATOMIC)?;
            Ok(())
        }

        fn reply_address(&self, slot: usize) -> u64 {
            64 + slot as u64
        }

        fn reply(&self, _: usize, reply: &mut [u8]) -> Result {
            reply.fill(self.reply.get());
            Ok(())
        }

        fn store_producer(&self, producer: u32) {
            // The entries are there, and the device was told of none of those that are new.
            assert_eq!(self.given.borrow().len() as u32, producer);
            assert!(self.told.get() < producer);
            self.stored.set(producer);
        }

        fn ring_doorbell(&self, producer: u32) {
            assert_eq!(self.stored.get(), producer);
            self.told.set(producer);
            self.doorbells.set(self.doorbells.get() + 1);
        }
    }

    pub(crate) struct Stage {
        pub(crate) requests: Pin<KBox<Requests>>,
        pub(crate) memory: Memory,
        asked: KVec<Pin<KBox<Scoped<Request>>>>,
    }

    impl Stage {
        pub(crate) fn new() -> Result<Self> {
            Ok(Self {
                requests: KBox::pin_init(Requests::new(), GFP_KERNEL)?,
                memory: Memory {
                    given: RefCell::new(KVec::new()),
                    answered: Cell::new(0),
                    stored: Cell::new(0),
                    told: Cell::new(0),
                    doorbells: Cell::new(0),
                    reply: Cell::new(0),
                },
                asked: KVec::new(),
            })
        }

        /// One with so many short commands of `user`, of which as many are in the ring as there can be.
        pub(crate) fn full_of(user: u64, count: usize) -> Result<Self> {
            let mut stage = Self::new()?;
            for _ in 0..count {
                stage.ask(user, Class::Short)?;
            }
            Ok(stage)
        }

        fn make(&mut self, user: u64, class: Class) -> Result<usize> {
            let who = self.asked.len();
            let (opcode, payload) = (CommandOpcode::QueryQueuePair, object(who as u32));
            let entry = CommandEntry::new(opcode, 0, (0, 8), &payload);
            let request = Request::new(&self.requests, user, class, entry);
            let request = KBox::pin_init(request, GFP_KERNEL)?;
            self.asked.push(request, GFP_KERNEL)?;
            Ok(who)
        }

        /// Asks for a command; returns its number.
        pub(crate) fn ask(&mut self, user: u64, class: Class) -> Result<usize> {
            let who = self.make(user, class)?;
            let in_ring = self
                .requests
                .submit(self.asked[who].as_ref(), &self.memory)?;
            assert_eq!(in_ring, self.is_in_ring(who));
            Ok(who)
        }

        /// Asks for one if it can be given at once.
        pub(crate) fn ask_now(&mut self, user: u64, class: Class) -> Result<usize> {
            let who = self.make(user, class)?;
            let request = self.asked[who].as_ref();
            self.requests.submit_now(request, &self.memory)?;
            Ok(who)
        }

        pub(crate) fn request(&self, who: usize) -> &Request {
            &self.asked[who]
        }

        /// Posts a command; its number is `who` to the ring.
        pub(crate) fn post(&self, user: u64, who: u32) -> Result<Posted> {
            self.post_for(user, (PostedFor::Making, who), Telling::Doorbell)
        }

        /// Posts a command for something; the number is that of who asks.
        pub(crate) fn post_for(
            &self,
            user: u64,
            about: (PostedFor, u32),
            telling: Telling,
        ) -> Result<Posted> {
            let post = Post::new(&self.requests, user, Class::Short, GFP_KERNEL)?;
            let (opcode, payload) = (CommandOpcode::RegisterRegion, object(about.1));
            let mut entry = CommandEntry::new(opcode, 0, (0, 0), &payload);
            self.requests
                .post(post, about, &mut entry, telling, &self.memory)
        }

        /// What to wait for a posted command by that is in flight.
        pub(crate) fn ticket(&self, posted: &Posted) -> Result<Arc<Ticket>> {
            self.requests.ticket(posted).ok_or(ENOENT)
        }

        pub(crate) fn position(&self, who: usize) -> Position {
            self.requests.position(&self.request(who).ticket)
        }

        pub(crate) fn is_in_ring(&self, who: usize) -> bool {
            matches!(self.position(who), Position::InRing { .. })
        }

        pub(crate) fn is_queued(&self, who: usize) -> bool {
            matches!(self.position(who), Position::Queued { .. })
        }

        /// Answers what was put in the ring as number `at`; returns whether that was waited for.
        pub(crate) fn answer(&self, at: usize) -> bool {
            self.answer_some(at..at + 1, 8)
        }

        /// Answers several at once, each with so many bytes; returns whether all were waited for.
        pub(crate) fn answer_some(&self, mut which: Range<usize>, bytes: u64) -> bool {
            let all = which.all(|at| {
                let (_, cookie) = self.memory.given.borrow()[at];
                let answered = self.requests.finish(cookie, 0, bytes, &self.memory);
                answered.is_some()
            });
            self.requests.put_waiting(&self.memory);
            all
        }

        /// Takes an answer; nobody who waits is given its slot yet. Returns whether it was to a command.
        pub(crate) fn finish(&self, cookie: u32) -> bool {
            let answered = self.requests.finish(cookie, 0, 8, &self.memory);
            answered.is_some()
        }

        /// Answers the oldest command.
        pub(crate) fn answer_next(&self) {
            let at = self.memory.answered.get();
            self.memory.answered.set(at + 1);
            assert!(self.answer(at));
        }

        /// Who asked for what is put in the ring by the next `count` answers.
        pub(crate) fn next(&self, count: usize) -> Result<KVec<usize>> {
            let mut next = KVec::new();
            for _ in 0..count {
                let before = self.memory.given.borrow().len();
                self.answer_next();
                for (who, _) in &self.memory.given.borrow()[before..] {
                    next.push(*who, GFP_KERNEL)?;
                }
            }
            Ok(next)
        }
    }

    impl Drop for Stage {
        fn drop(&mut self) {
            // Those who ask go next.
            self.requests.close();
        }
    }
}

#[kunit_tests(ferrite_requests)]
mod tests {
    use super::*;
    use crate::kernel_ext::user;
    use stage::Stage;

    /// How a command ended that did what it was to do, as it is remembered.
    const DONE: Outcome = Outcome::Answered {
        status: 0,
        result: 0,
    };

    /// Slots for others than memory management.
    const OTHERS: usize = SLOTS - KEPT as usize;

    #[test]
    fn a_command_passes_those_whose_callers_do_not_run() -> Result {
        // None of them ever looks at its answer.
        let mut stage = Stage::full_of(1, OTHERS + 70)?;
        let victim = stage.ask(2, Class::Short)?;
        assert!(stage.is_queued(victim));
        stage.answer_next();
        stage.answer_next();
        assert!(stage.is_in_ring(victim));
        for _ in 0..OTHERS {
            stage.answer_next();
        }
        assert_eq!(stage.position(victim), Position::Done);
        assert!(stage.request(victim).ticket.done.try_wait());
        // The same again and again.
        for _ in 0..3 {
            let victim = stage.ask(2, Class::Short)?;
            while stage.position(victim) != Position::Done {
                stage.answer_next();
            }
        }
        Ok(())
    }

    #[test]
    fn what_has_room_is_given_at_once_and_one_doorbell_is_rung_for_each() -> Result {
        let mut stage = Stage::new()?;
        for count in 1..=OTHERS as u32 {
            let who = stage.ask(1, Class::Short)?;
            assert!(stage.is_in_ring(who));
            assert_eq!(stage.memory.told.get(), count);
            assert_eq!(stage.memory.doorbells.get(), count);
        }
        let waits = stage.ask(1, Class::Short)?;
        assert!(stage.is_queued(waits));
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        // Nobody waits: nothing to tell.
        stage.requests.withdraw(stage.request(waits));
        stage.answer_next();
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        Ok(())
    }

    #[test]
    fn one_doorbell_is_rung_for_all_that_answers_make_room_for() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 100)?;
        let doorbells = stage.memory.doorbells.get();
        // None is given while they are taken: a quick device does not keep up who takes them.
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(stage.finish(cookie));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS);
        // Who comes then is not ahead of those who wait.
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + 1);
        let (_, cookie) = stage.memory.given.borrow()[1];
        assert!(stage.finish(cookie));
        let late = stage.ask(1, Class::Short)?;
        assert!(stage.is_queued(late));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + 2);
        assert_eq!(stage.memory.doorbells.get(), doorbells + 2);
        assert!(stage.answer_some(2..OTHERS, 8));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + OTHERS);
        assert_eq!(stage.memory.told.get(), (OTHERS + OTHERS) as u32);
        assert_eq!(stage.memory.doorbells.get(), doorbells + 3);
        // Nor is anything given to a device that died while they were taken.
        let (_, cookie) = stage.memory.given.borrow()[OTHERS];
        assert!(stage.finish(cookie));
        stage.requests.state.lock().closed = true;
        stage.requests.put_waiting(&stage.memory);
        assert_eq!(stage.memory.given.borrow().len(), OTHERS + OTHERS);
        Ok(())
    }

    #[test]
    fn there_are_fewer_slots_than_ring_entries() -> Result {
        let mut stage = Stage::full_of(1, 2 * ENTRIES)?;
        for _ in 0..ENTRIES {
            stage.ask(1, Class::Reclaim)?;
            stage.ask(1, Class::Long)?;
        }
        assert_eq!(stage.memory.given.borrow().len(), ENTRIES - 1);
        Ok(())
    }

    #[test]
    fn a_slot_in_flight_is_not_given_out() -> Result {
        let stage = Stage::full_of(1, 5 * SLOTS)?;
        let mut answered = 0;
        // The first one is never answered.
        for at in 1..3 * SLOTS {
            assert!(stage.answer(at));
            answered += 1;
            let given = stage.memory.given.borrow();
            assert_eq!(given.len(), OTHERS + answered);
            let (_, new) = given[given.len() - 1];
            let in_flight = given[..given.len() - 1].iter().enumerate();
            for (_, (_, cookie)) in in_flight.filter(|(other, _)| *other == 0 || *other > at) {
                assert!(slot_of(*cookie) != slot_of(new));
            }
        }
        Ok(())
    }

    #[test]
    fn memory_is_taken_back_ahead_of_all_who_wait() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 200)?;
        // Who asks for the same on behalf of others waits.
        let other = stage.ask(2, Class::Short)?;
        let first = stage.ask(3, Class::Reclaim)?;
        assert!(stage.is_in_ring(first));
        assert!(stage.is_queued(other));
        let (second, third) = (stage.ask(3, Class::Reclaim)?, stage.ask(4, Class::Reclaim)?);
        assert!(stage.is_queued(second) && stage.is_queued(third));
        // Any slot that gets free; who has had one comes after who has not.
        assert_eq!(stage.next(2)?.as_slice(), [third, second].as_slice());
        // Its own is not given to others.
        let at = stage.memory.given.borrow().len() - 1;
        let before = stage.memory.given.borrow().len();
        assert!(stage.answer(at));
        assert!(stage.answer(at - 1));
        assert!(stage.answer(OTHERS));
        let after = stage.memory.given.borrow().len();
        // Three were given back, and one is kept.
        assert_eq!(after - before, 2);
        assert!(stage.ask_now(1, Class::Short).is_err());
        assert!(stage.ask_now(3, Class::Reclaim).is_ok());
        Ok(())
    }

    #[test]
    fn others_go_on_while_a_user_has_memory_taken_back_all_the_time() -> Result {
        let mut stage = Stage::new()?;
        for _ in 0..3 * SLOTS {
            stage.ask(1, Class::Reclaim)?;
        }
        let other = stage.ask(2, Class::Short)?;
        assert!(stage.is_in_ring(other));
        for _ in 0..OTHERS {
            stage.ask(2, Class::Short)?;
        }
        let last = stage.ask(2, Class::Short)?;
        let mut answers = 0;
        while !stage.is_in_ring(last) {
            stage.answer_next();
            stage.ask(1, Class::Reclaim)?;
            answers += 1;
            assert!(answers < 4 * SLOTS);
        }
        Ok(())
    }

    #[test]
    fn users_have_their_turns_however_many_threads_each_has() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 100)?;
        let (a, b) = (stage.ask(2, Class::Short)?, stage.ask(2, Class::Short)?);
        let c = stage.ask(user::KERNEL, Class::Short)?;
        let first = OTHERS;
        let expected = [first, a, c, first + 1, b, first + 2, first + 3];
        assert_eq!(stage.next(7)?.as_slice(), expected.as_slice());
        // Memory management too: it does not wait for all that one user has taken back.
        let mut stage = Stage::full_of(1, OTHERS)?;
        for _ in 0..100 {
            stage.ask(1, Class::Reclaim)?;
        }
        let kernel = stage.ask(user::KERNEL, Class::Reclaim)?;
        assert!(stage.next(2)?.contains(&kernel));
        Ok(())
    }

    #[test]
    fn more_users_than_queues_share_them() -> Result {
        let mut stage = Stage::full_of(0, OTHERS)?;
        for user in 0..3 * QUEUES as u64 {
            stage.ask(user, Class::Short)?;
            stage.ask(user, Class::Short)?;
        }
        let given = stage.next(6 * QUEUES)?;
        assert_eq!(given.len(), 6 * QUEUES);
        // Each of them once.
        for who in OTHERS..OTHERS + 6 * QUEUES {
            assert!(given.contains(&who));
        }
        // Those who share do so with as few others as can be: each has the second turn of a queue.
        let mut stage = Stage::full_of(0, OTHERS)?;
        for users in [0..2 * QUEUES, 0..QUEUES] {
            for user in users {
                stage.ask(user as u64, Class::Short)?;
            }
        }
        for round in 0..3 {
            let given = stage.next(QUEUES)?;
            let first = OTHERS + round * QUEUES;
            assert!((first..first + QUEUES).all(|who| given.contains(&who)));
        }
        Ok(())
    }

    #[test]
    fn few_long_commands_are_ahead_of_anybody() -> Result {
        let mut stage = Stage::new()?;
        for _ in 0..MOST_LONG + 80 {
            stage.ask(1, Class::Long)?;
        }
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize);
        let other = stage.ask(2, Class::Long)?;
        let short = stage.ask(1, Class::Short)?;
        assert_eq!(stage.position(short), Position::InRing { ahead: MOST_LONG });
        // One for one; what is short makes no room for them.
        assert!(stage.answer(MOST_LONG as usize));
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize + 1);
        assert!(stage.next(2)?.contains(&other));
        assert_eq!(stage.memory.given.borrow().len(), MOST_LONG as usize + 3);
        // Who cannot wait does not: there are slots, but it would be behind them.
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        let mut stage = Stage::new()?;
        stage.ask(1, Class::Long)?;
        assert_eq!(stage.ask_now(2, Class::Short).map(|_| ()), Err(EAGAIN));
        stage.answer_next();
        assert!(stage.ask_now(2, Class::Short).is_ok());
        Ok(())
    }

    #[test]
    fn a_long_command_is_not_behind_all_short_ones_that_wait() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 100)?;
        let long = stage.ask(2, Class::Long)?;
        let reclaim = stage.ask(3, Class::Reclaim)?;
        assert!(stage.is_in_ring(reclaim) && stage.is_queued(long));
        let reclaim = stage.ask(3, Class::Reclaim)?;
        // One answer makes room for none of them: the slot is kept.
        assert_eq!(
            stage.next(4)?.as_slice(),
            [reclaim, long, OTHERS].as_slice()
        );
        Ok(())
    }

    #[test]
    fn all_learn_at_once_that_the_device_died() -> Result {
        let mut stage = Stage::full_of(1, SLOTS + 300)?;
        stage.ask(2, Class::Long)?;
        stage.ask(2, Class::Reclaim)?;
        let count = stage.ask(2, Class::Reclaim)? + 1;
        // Nobody but who says so runs.
        stage.requests.close();
        for who in 0..count {
            assert!(stage.request(who).ticket.done.try_wait());
            let outcome = stage.requests.outcome(&stage.request(who).ticket);
            assert_eq!(outcome, Outcome::Lost);
        }
        assert_eq!(stage.ask(1, Class::Reclaim).map(|_| ()), Err(EIO));
        assert_eq!(stage.ask_now(1, Class::Short).map(|_| ()), Err(EIO));
        // What the device says later is nobody's.
        let given = stage.memory.given.borrow().len();
        assert!((0..given).all(|at| !stage.answer(at)));
        assert_eq!(stage.memory.given.borrow().len(), given);
        Ok(())
    }

    #[test]
    fn what_is_taken_back_leaves_the_others_in_order() -> Result {
        let stage = Stage::full_of(1, OTHERS + 6)?;
        let first = OTHERS;
        for who in [first, first + 2, first + 5] {
            assert!(stage.requests.withdraw(stage.request(who)));
            assert!(!stage.requests.withdraw(stage.request(who)));
        }
        assert!(!stage.requests.withdraw(stage.request(0)));
        let next = stage.next(4)?;
        assert_eq!(
            next.as_slice(),
            [first + 1, first + 3, first + 4].as_slice()
        );
        Ok(())
    }

    #[test]
    fn an_answer_is_for_one_use_of_a_slot() -> Result {
        let mut stage = Stage::new()?;
        for use_of_it in 0..200 {
            stage.ask(1, Class::Short)?;
            // Of before, or of none at all.
            assert!((0..use_of_it).rev().take(5).all(|at| !stage.answer(at)));
            for cookie in [SLOTS as u32, u32::MAX, 1, use_of_it as u32] {
                assert!(!stage.finish(cookie));
            }
            assert!(stage.answer(use_of_it));
            assert!(!stage.answer(use_of_it));
        }
        Ok(())
    }

    #[test]
    fn a_late_answer_touches_nothing() -> Result {
        let mut stage = Stage::full_of(1, OTHERS + 2)?;
        assert!(stage.requests.give_up(Asked::Request(stage.request(0))));
        // Nor does one that waits.
        assert!(stage
            .requests
            .give_up(Asked::Request(stage.request(OTHERS + 1))));
        let before = stage.memory.given.borrow().len();
        assert!(!stage.answer(0));
        assert_eq!(stage.memory.given.borrow().len(), before);
        assert!(!stage.request(0).ticket.done.try_wait());
        assert!(stage.answer(1));
        assert_eq!(stage.memory.given.borrow().len(), before + 1);
        // What is done was not given up.
        assert!(!stage.requests.give_up(Asked::Request(stage.request(1))));
        let who = stage.ask(1, Class::Short)?;
        for at in 2..OTHERS {
            assert!(stage.answer(at));
        }
        assert!(stage.is_in_ring(who));
        let cookie = stage.memory.given.borrow()[0].1;
        let given = stage.memory.given.borrow();
        assert!(given[1..]
            .iter()
            .all(|(_, c)| slot_of(*c) != slot_of(cookie)));
        Ok(())
    }

    #[test]
    fn a_reply_is_its_requests_own() -> Result {
        let mut stage = Stage::new()?;
        for at in 0..20u8 {
            let who = stage.ask(1, Class::Short)?;
            stage.memory.reply.set(at + 1);
            assert!(stage.answer(who));
            stage.memory.reply.set(0xff);
        }
        for at in 0..20u8 {
            let outcome = stage.requests.outcome(&stage.request(at.into()).ticket);
            assert!(
                outcome
                    == Outcome::Answered {
                        status: 0,
                        result: 8
                    }
            );
            let mut reply = [0; Reply::SIZE];
            stage.requests.reply(stage.request(at.into()), &mut reply);
            assert!(reply.iter().all(|byte| *byte == at + 1));
        }
        Ok(())
    }

    /// Posts commands of a user's until one would have to wait; returns how many it were.
    fn post_all(stage: &Stage, user: u64) -> Result<u32> {
        let mut count = 0;
        loop {
            match stage.post(user, count) {
                Ok(_) => count += 1,
                Err(error) if error == EAGAIN => return Ok(count),
                Err(error) => return Err(error),
            }
            assert!(count <= SLOTS as u32);
        }
    }

    #[test]
    fn what_is_posted_is_given_at_once_and_its_answer_kept() -> Result {
        let stage = Stage::new()?;
        let (one, other) = (stage.post(1, 11)?, stage.post(1, 12)?);
        let (first, second) = (stage.ticket(&one)?, stage.ticket(&other)?);
        assert_eq!(
            (stage.memory.told.get(), stage.memory.doorbells.get()),
            (2, 2)
        );
        assert_eq!(
            stage.requests.position(&second),
            Position::InRing { ahead: 1 }
        );
        assert_eq!(stage.requests.outcome_yet(&one), None);
        // In any order, and each is told apart.
        let (_, cookie) = stage.memory.given.borrow()[1];
        let answered = stage.requests.finish(cookie, 7, 0, &stage.memory);
        assert_eq!(
            answered,
            Some(Answered::Posted {
                what: PostedFor::Making,
                number: 12
            })
        );
        let outcome = Outcome::Answered {
            status: 7,
            result: 0,
        };
        assert_eq!(stage.requests.outcome_yet(&other), Some(outcome));
        assert!(second.done.try_wait() && !first.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&one), None);
        assert!(stage.answer(0) && !stage.answer(1));
        assert!(first.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&one), Some(DONE));
        assert_eq!(stage.requests.outcome_yet(&other), Some(outcome));
        let state = stage.requests.state.lock();
        assert_eq!(state.posted, 0);
        assert_eq!(state.free.count_ones() as usize, SLOTS);
        assert!(state.in_ring == [0; 3]);
        Ok(())
    }

    #[test]
    fn who_posts_all_the_time_takes_nobodys_place() -> Result {
        let mut stage = Stage::new()?;
        assert_eq!(post_all(&stage, 1)?, MOST_POSTED_BY_ONE);
        // Nobody takes the answers, and others post too.
        assert_eq!(post_all(&stage, 2)?, MOST_POSTED_BY_ONE);
        let rest = MOST_POSTED - 2 * MOST_POSTED_BY_ONE;
        assert_eq!(post_all(&stage, 3)?, rest);
        assert_eq!(post_all(&stage, user::KERNEL)?, 0);
        // Then they wait as ever, in places that are left.
        for _ in 0..OTHERS as u32 - MOST_POSTED {
            let who = stage.ask(4, Class::Short)?;
            assert!(stage.is_in_ring(who));
        }
        let reclaim = stage.ask(5, Class::Reclaim)?;
        assert!(stage.is_in_ring(reclaim));
        // Nor do they and memory management together.
        let mut stage = Stage::new()?;
        for who in 1..4 {
            post_all(&stage, who)?;
        }
        for _ in 0..MOST_RECLAIM {
            let reclaim = stage.ask(5, Class::Reclaim)?;
            assert!(stage.is_in_ring(reclaim));
        }
        let who = stage.ask(4, Class::Short)?;
        assert!(stage.is_in_ring(who));
        // An answer makes room for another of the same.
        let mut stage = Stage::new()?;
        assert_eq!(post_all(&stage, 1)?, MOST_POSTED_BY_ONE);
        stage.answer_next();
        assert_eq!(post_all(&stage, 1)?, 1);
        // What is waited for does not count.
        let who = stage.ask(1, Class::Short)?;
        assert!(stage.is_in_ring(who));
        assert_eq!(post_all(&stage, 2)?, MOST_POSTED_BY_ONE);
        Ok(())
    }

    #[test]
    fn what_is_posted_overtakes_nobody_and_waits_for_no_place() -> Result {
        let stage = Stage::full_of(1, OTHERS)?;
        assert_eq!(stage.post(2, 9).map(|_| ()), Err(EAGAIN));
        assert_eq!(stage.memory.given.borrow().len(), OTHERS);
        assert_eq!(stage.memory.doorbells.get(), OTHERS as u32);
        let mut stage = Stage::full_of(1, OTHERS + 1)?;
        // A place is free, but is another's.
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(stage.finish(cookie));
        assert_eq!(stage.post(2, 9).map(|_| ()), Err(EAGAIN));
        stage.requests.put_waiting(&stage.memory);
        assert!(stage.is_in_ring(OTHERS));
        // Nor one that comes later.
        let late = stage.ask(3, Class::Short)?;
        assert!(stage.is_queued(late));
        assert!(stage.answer(1));
        assert!(stage.is_in_ring(late));
        assert!(stage.answer(2));
        assert!(stage.post(2, 9).is_ok());
        Ok(())
    }

    #[test]
    fn who_posted_may_be_gone_when_the_answer_comes() -> Result {
        let stage = Stage::new()?;
        for round in 0..3 * ENTRIES {
            drop(stage.post(1, round as u32)?);
            assert!(stage.answer(round));
            assert!(!stage.answer(round));
        }
        // Or when there will be none.
        drop(stage.post(1, 5)?);
        stage.requests.close();
        assert!(!stage.answer(3 * ENTRIES));
        Ok(())
    }

    #[test]
    fn what_was_posted_is_lost_with_the_device() -> Result {
        let mut stage = Stage::new()?;
        let (answered, lost) = (stage.post(1, 1)?, stage.post(1, 2)?);
        let waiting = stage.ticket(&lost)?;
        stage.answer_next();
        stage.ask(1, Class::Short)?;
        stage.requests.close();
        assert_eq!(stage.requests.outcome_yet(&lost), Some(Outcome::Lost));
        assert!(waiting.done.try_wait());
        assert_eq!(stage.requests.outcome_yet(&answered), Some(DONE));
        assert!(!stage.answer(1));
        assert_eq!(stage.post(1, 3).map(|_| ()), Err(EIO));
        // It is known from then on, and not given up.
        assert!(!stage.requests.give_up(Asked::Posted(&waiting)));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_done_leaves_no_more_behind_than_can_be_in_flight() -> Result {
        let stage = Stage::new()?;
        let spare = || stage.requests.state.lock().spare.len() as u32;
        let mut posted = KVec::new();
        for at in 0..4 * ENTRIES {
            posted.push(stage.post(1, at as u32)?, GFP_KERNEL)?;
            assert_eq!(spare(), 0);
            assert!(stage.answer(at));
            assert_eq!(spare(), 1);
        }
        for one in &posted {
            assert_eq!(stage.requests.outcome_yet(one), Some(DONE));
        }
        assert!(stage.requests.state.lock().failures.is_empty());
        for _ in 0..3 {
            let first = stage.memory.given.borrow().len();
            for user in 1..4 {
                post_all(&stage, user)?;
            }
            let last = stage.memory.given.borrow().len();
            assert_eq!(last - first, MOST_POSTED as usize);
            assert!(stage.answer_some(first..last, 8));
            assert_eq!(spare(), MOST_POSTED);
        }
        Ok(())
    }

    #[test]
    fn what_posting_took_is_that_of_the_next_as_soon_as_nobody_looks_at_it() -> Result {
        let stage = Stage::new()?;
        let address = |ticket: &Arc<Ticket>| -> *const Ticket { &**ticket };
        // Nobody does: of another user, in flight, and not done.
        let one = stage.post(1, 1)?;
        let first = address(&stage.ticket(&one)?);
        assert!(stage.answer(0));
        let other = stage.post(2, 2)?;
        let ticket = stage.ticket(&other)?;
        assert_eq!((address(&ticket), ticket.user), (first, 2));
        assert!(!ticket.done.try_wait());
        let position = |ticket| stage.requests.position(ticket);
        assert_eq!(position(&ticket), Position::InRing { ahead: 0 });
        // Somebody waits: what he looks at stays as it is.
        assert!(stage.answer(1));
        let next = stage.ticket(&stage.post(1, 3)?)?;
        assert!(address(&next) != first);
        assert!(ticket.done.try_wait() && !next.done.try_wait());
        assert_eq!(
            (position(&ticket), stage.requests.outcome(&ticket)),
            (
                Position::Done,
                Outcome::Answered {
                    status: 0,
                    result: 8
                }
            )
        );
        // A name is that of one command, whatever has its slot.
        assert_eq!(stage.requests.outcome_yet(&one), Some(DONE));
        stage.requests.forget(&one);
        assert!(!next.done.try_wait());
        assert!(stage.answer(2));
        assert!(next.done.try_wait());
        Ok(())
    }

    #[test]
    fn what_was_posted_and_failed_is_known_until_it_is_forgotten() -> Result {
        let stage = Stage::new()?;
        let outcome = |status| Outcome::Answered { status, result: 0 };
        let mut posted = KVec::new();
        for at in 0..2 * ENTRIES {
            posted.push(stage.post(1, at as u32)?, GFP_KERNEL)?;
            let (_, cookie) = stage.memory.given.borrow()[at];
            // Every third of them is done.
            let finished = stage
                .requests
                .finish(cookie, at as u32 % 3, 0, &stage.memory);
            assert!(finished.is_some());
        }
        for (at, one) in posted.iter().enumerate() {
            let expected = outcome(at as u32 % 3);
            assert_eq!(stage.requests.outcome_yet(one), Some(expected));
            stage.requests.forget(one);
            assert_eq!(stage.requests.outcome_yet(one), Some(DONE));
        }
        assert!(stage.requests.state.lock().failures.is_empty());
        Ok(())
    }

    #[test]
    fn what_is_posted_by_the_record_is_told_with_the_next_doorbell() -> Result {
        let mut stage = Stage::new()?;
        let seen = |stage: &Stage| {
            (
                stage.memory.stored.get(),
                stage.memory.told.get(),
                stage.memory.doorbells.get(),
            )
        };
        let about = |number| (PostedFor::Release, number);
        stage.post_for(1, about(1), Telling::Record)?;
        stage.post_for(1, about(2), Telling::Record)?;
        assert_eq!(seen(&stage), (2, 0, 0));
        // One doorbell, with which all is told, by who waits for another command.
        stage.ask(2, Class::Short)?;
        assert_eq!(seen(&stage), (3, 3, 1));
        // And by who waits for what was posted; no second one for the same.
        stage.post_for(1, about(4), Telling::Record)?;
        for _ in 0..2 {
            stage.requests.ring_for_posted(&stage.memory);
            assert_eq!(seen(&stage), (4, 4, 2));
        }
        // When there are some, without anybody who waits.
        for at in 1..MOST_UNTOLD {
            stage.post_for(1, about(at), Telling::Record)?;
            assert_eq!(seen(&stage), (4 + at, 4, 2));
        }
        stage.post_for(2, about(0), Telling::Record)?;
        let all = 4 + MOST_UNTOLD;
        assert_eq!(seen(&stage), (all, all, 3));
        // A device that is dead is told nothing.
        stage.post_for(2, about(5), Telling::Record)?;
        stage.requests.close();
        stage.requests.ring_for_posted(&stage.memory);
        assert_eq!(seen(&stage), (all + 1, all, 3));
        Ok(())
    }

    #[test]
    fn what_is_forgotten_in_flight_leaves_nothing_behind() -> Result {
        let stage = Stage::new()?;
        for (at, fails) in [false, true].into_iter().enumerate() {
            let posted = stage.post_for(1, (PostedFor::Release, 7), Telling::Record)?;
            stage.requests.forget(&posted);
            // It still has its place.
            assert!(stage.requests.ticket(&posted).is_some());
            let (_, cookie) = stage.memory.given.borrow()[at];
            let answered = stage
                .requests
                .finish(cookie, u32::from(fails), 0, &stage.memory);
            let what = PostedFor::Release;
            assert_eq!(answered, Some(Answered::Posted { what, number: 7 }));
            assert!(stage.requests.state.lock().failures.is_empty());
        }
        Ok(())
    }

    #[test]
    fn what_was_posted_and_given_up_keeps_its_place() -> Result {
        let stage = Stage::new()?;
        let posted = stage.post(1, 1)?;
        let ticket = stage.ticket(&posted)?;
        assert!(stage.requests.give_up(Asked::Posted(&ticket)));
        assert_eq!(stage.requests.outcome_yet(&posted), Some(Outcome::Lost));
        // Whoever else waits for it is told.
        assert!(ticket.done.try_wait());
        let (_, cookie) = stage.memory.given.borrow()[0];
        assert!(!stage.answer(0));
        for round in 1..2 * SLOTS {
            stage.post(1, round as u32)?;
            let (_, next) = stage.memory.given.borrow()[round];
            assert!(slot_of(next) != slot_of(cookie));
            assert!(stage.answer(round));
        }
        Ok(())
    }

    #[test]
    fn who_waits_sees_the_oldest_command_in_his_way() -> Result {
        let oldest = |stage: &Stage, who| match stage.position(who) {
            Position::Queued { oldest, .. } => Some(oldest),
            _ => None,
        };
        let mut stage = Stage::new()?;
        stage.ask(1, Class::Short)?;
        for _ in 0..MOST_LONG {
            stage.ask(1, Class::Long)?;
        }
        // The short one is not in the way of a long one.
        let long = stage.ask(1, Class::Long)?;
        assert_eq!(oldest(&stage, long), Some(1));
        for _ in 0..OTHERS {
            stage.ask(1, Class::Short)?;
        }
        let short = stage.ask(1, Class::Short)?;
        assert_eq!(oldest(&stage, short), Some(0));
        assert!(stage.answer(20));
        assert_eq!(oldest(&stage, short), Some(0));
        assert!(stage.answer(0));
        assert_eq!(oldest(&stage, short), Some(1));
        assert_eq!(oldest(&stage, long), Some(1));
        Ok(())
    }

    #[test]
    fn only_what_was_given_before_is_ahead() -> Result {
        let mut stage = Stage::full_of(1, 10)?;
        assert_eq!(stage.position(5), Position::InRing { ahead: 5 });
        assert!(stage.answer(7));
        assert_eq!(stage.position(5), Position::InRing { ahead: 5 });
        assert!(stage.answer(2));
        stage.ask(1, Class::Short)?;
        assert_eq!(stage.position(5), Position::InRing { ahead: 4 });
        assert!(stage.answer(5));
        assert_eq!(stage.position(5), Position::Done);
        Ok(())
    }
}
