// SPDX-License-Identifier: GPL-2.0

//! The control queue pair: commands to the device, many at once.
//!
//! Which command is put in the ring when, and whom an answer is for, is in [`requests`]: here are the
//! memory, what the device is given and gives, and how long that is waited for.
//!
//! A caller looks for its event itself for a while, as most commands are done sooner than an
//! interrupt could say so and a sleeper could wake. Only then it sleeps, and has interrupts raised.
//!
//! Who posts a command ([`Cqp::post`]) looks for no answer, nor is there an interrupt for it: it is taken by
//! whoever looks for another, at the latest when the device is asked whether it works.
//!
//! [`requests`]: crate::requests

use crate::{
    abi,
    abi::{
        CommandEntry,
        CommandOpcode,
        CommandStatus,
        EventEntry,
        ObjectNumber,
        Plain, //
    },
    bars::{
        Doorbells,
        Registers, //
    },
    dma_types::{
        ControlRing,
        Counters,
        DeviceChannelCounters,
        Nothing,
        QpCounters,
        Reply, //
    },
    eq::EventQueue,
    growth,
    kernel_ext::{
        barrier::{
            dma_rmb,
            dma_wmb,
            mb, //
        },
        cpu,
        errno,
        user, //
    },
    lent::{
        DeviceReach,
        Lent, //
    },
    requests::{
        Answered,
        Asked,
        Class,
        CommandRing,
        Outcome,
        Position,
        Post,
        Posted,
        PostedFor,
        Request,
        Requests,
        Telling,
        Ticket,
        LOG_ENTRIES,
        MOST_LONG,
        SLOTS, //
    },
};
use core::cell::Cell;
use kernel::{
    alloc::flags::__GFP_NOWARN,
    device::{
        Bound,
        Device, //
    },
    dma::Coherent,
    prelude::*,
    processor::cpu_relax,
    sync::{
        aref::ARef,
        atomic::{
            Acquire,
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
    time::{
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic,
        Msecs, //
    },
};
use pin_init::stack_pin_init;

const _: () = assert!(LOG_ENTRIES <= abi::CQP_MAX_LOG_ENTRIES);

/// Base-2 logarithm of the entries of the control event queue: room for an answer to each command
/// in flight, and for the few other events of that queue.
const EVENTS_LOG_ENTRIES: u8 = 8;
/// And of the fewest that it may have: a device stops that finds no room for an answer, and does not say
/// of this queue that it is out of room for others.
const LEAST_EVENTS_LOG_ENTRIES: u8 = LOG_ENTRIES + 1;
const _: () = assert!(LEAST_EVENTS_LOG_ENTRIES <= EVENTS_LOG_ENTRIES);
/// There is always a first message; nothing else is sure.
const EVENTS_MESSAGE: u16 = 0;

/// How long to look for an answer before sleeping, as long as nobody else wants the processor.
const POLLING: Delta = Delta::from_micros(200);

/// How long the answer to the first command is waited for, in which the device says how long others
/// take.
const FIRST_TIMEOUT: Msecs = 30_000;

/// How often to look whether a device is alive that does not answer. One that seems to be is taken
/// for dead after the time that it said itself ([`Cqp::set_timeout`]), or the module's
/// `command_timeout_ms`.
const LOOK: Msecs = 1_000;

/// How long each look at a device takes that does not answer for `timeout`, and how many there are.
fn looks(timeout: Msecs) -> (Msecs, u32) {
    let look = timeout.clamp(1, LOOK);
    (look, timeout.div_ceil(look).max(1))
}

/// How long a turn of the device is waited for; most take some microseconds. A longer one takes as long as the
/// answer to a command.
const TURN: Delta = Delta::from_micros(50);

/// Whether the turn that the device shows first is over, or is none; looks for that until `give_up` says so.
fn is_over(first: u32, turn: impl Fn() -> u32, give_up: impl Fn() -> bool) -> bool {
    // Any later one has begun after the record was stored, and so with a look at it.
    let is_over = || first % 2 == 0 || turn() != first;
    loop {
        if is_over() {
            return true;
        }
        if give_up() {
            return false;
        }
    }
}

/// Ends a release that the device has by its record: before the answer, where the device shows its turns, was seen
/// to use no tag since, and is not dead; else with the answer.
fn end_release(
    shows_turns: bool,
    uses_no_tag: impl FnOnce() -> bool,
    is_dead: impl FnOnce() -> bool,
    settle: impl FnOnce() -> Result<Outcome>,
) -> Result<Released> {
    // Of a device that was given up meanwhile it is not known what it does.
    if shows_turns && uses_no_tag() && !is_dead() {
        return Ok(Released::Unanswered);
    }
    settle().and_then(outcome_to_result)?;
    Ok(Released::Answered)
}

/// How a release ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// With the answer.
    Answered,
    /// Before it, but the device uses the tag no more.
    Unanswered,
}

/// What stands for all that is no [`CommandStatus`].
const NO_STATUS: u32 = 1 << u8::BITS;

/// The status in the event of a finished command.
fn status_of(param: u64) -> u32 {
    u8::try_from(param).map_or(NO_STATUS, u32::from)
}

/// Who takes the events of the control event queue, also where a caller looks for them himself.
pub(crate) trait TakesEvents {
    /// Takes one; `answers` is what it may be among.
    fn take(&self, event: &EventEntry, answers: &Answers<'_>);
}

/// How a command is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) class: Class,
    pub(crate) patience: Patience,
    /// Who answers for it.
    pub(crate) user: u64,
}

impl Manner {
    /// For the current task.
    pub(crate) fn of_current(class: Class, patience: Patience) -> Self {
        Self {
            class,
            patience,
            user: user::accountable_or_kernel(),
        }
    }
}

/// Answers that are being taken out of the control event queue. When this is dropped, the slots that they
/// made free are given to those who wait: all at once, as each write to the device takes its time. It
/// belongs to what is called for each event, so that it is dropped while the queue is locked: whoever
/// takes others' answers may not be running for a while afterwards.
pub(crate) struct Answers<'a> {
    cqp: &'a Cqp,
    any: Cell<bool>,
}

impl Drop for Answers<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.any.get() {
            let cqp = self.cqp;
            cqp.requests.put_waiting(&cqp.queue());
        }
    }
}

/// How a command is to be dealt with where it cannot be given to the device at once.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Patience {
    /// It has to be done, and waits for its turn however long that takes.
    Endless,
    /// It waits for its turn, but who is killed does not need it any more (`EINTR`). What the device has
    /// is waited for all the same, as that may touch memory.
    UntilKilled,
    /// It is not worth waiting for a slot, nor for what takes the device its time (`EAGAIN`). What the
    /// device has is waited for, behind other short commands.
    None,
}

/// The control queue pair.
#[pin_data]
pub(crate) struct Cqp {
    dev: ARef<Device>,
    doorbells: Arc<Doorbells>,
    /// Read only when the device does not answer.
    registers: Arc<Registers>,
    /// Written by the driver at `producer`, copied by the device up to the doorbell, or to what the
    /// record says.
    ring: Lent<Coherent<ControlRing>>,
    /// One per slot; the device's while the slot's command is in flight.
    replies: Lent<Coherent<[Reply]>>,
    /// Where the device tells that commands are done.
    events: Arc<EventQueue>,
    /// How long an answer is waited for, in milliseconds.
    timeout: Atomic<u32>,
    /// Not zero if the device shows its turns.
    turns: Atomic<u32>,
    dead: Atomic<u32>,
    #[pin]
    requests: Requests,
}

/// The memory of the control queue, and its doorbell.
struct RingOfCqp<'a> {
    cqp: &'a Cqp,
}

impl CommandRing for RingOfCqp<'_> {
    fn write(&self, at: usize, entry: &CommandEntry) -> Result {
        kernel::dma_write!(self.cqp.ring, .entries[try: at], *entry);
        Ok(())
    }

    fn reply_address(&self, slot: usize) -> u64 {
        self.cqp.replies.dma_handle() + (slot * core::mem::size_of::<Reply>()) as u64
    }

    fn reply(&self, slot: usize, reply: &mut [u8]) -> Result {
        // Word by word: who takes memory back may get here, on a stack that has little left.
        for (at, to) in reply.chunks_mut(size_of::<u64>()).enumerate() {
            let word = kernel::dma_read!(self.cqp.replies, [try: slot].words[try: at]);
            let from = word.to_ne_bytes();
            to.copy_from_slice(&from[..to.len()]);
        }
        Ok(())
    }

    fn store_producer(&self, producer: u32) {
        // A release: who sees it sees the entries.
        dma_wmb();
        kernel::dma_write!(self.cqp.ring, .record.producer, producer);
    }

    fn ring_doorbell(&self, producer: u32) {
        // And who has the doorbell sees the record.
        dma_wmb();
        self.cqp.doorbells.control(producer);
    }
}

/// What a device answers to a query; each query has an answer of its own.
pub(crate) trait Answer: Plain {
    /// What asks for it.
    const QUERY: CommandOpcode;
    /// Bytes of it in the first version of the interface, which every device writes. What a later
    /// one added is zero from those that do not know of it.
    const LEAST: usize;
    /// What that needs to know.
    type Request: Plain;
}

macro_rules! answers {
    ($($query:ident($request:ty) -> $answer:ty: $least:literal,)*) => {$(
        impl Answer for $answer {
            const QUERY: CommandOpcode = CommandOpcode::$query;
            const LEAST: usize = {
                assert!($least <= core::mem::size_of::<Self>());
                $least
            };
            type Request = $request;
        }
    )*};
}

answers! {
    QueryDevice(Nothing) -> abi::DeviceCaps: 256,
    QueryQueuePair(ObjectNumber) -> abi::QueuePairState: 192,
    QuerySrq(ObjectNumber) -> abi::SrqState: 64,
    QueryCompletionQueue(ObjectNumber) -> abi::CompletionQueueState: 64,
    QueryTag(ObjectNumber) -> abi::TagState: 64,
    QueryQueuePairCounters(abi::QueryQueuePairCounters) -> QpCounters: 152,
    // As many as the device said that it has, all of which are asked for.
    QueryCounters(abi::QueryCounters) -> Counters: 128,
    QueryChannelCounters(abi::QueryChannelCounters) -> DeviceChannelCounters: 96,
    QueryClock(Nothing) -> abi::ClockReading: 64,
    TakeFaults(Nothing) -> abi::PageFaults: 256,
}

/// Names an object to a command.
pub(crate) fn object(number: u32) -> ObjectNumber {
    ObjectNumber {
        number,
        reserved: 0,
    }
}

impl Cqp {
    /// Makes the ring and event queue 0; the device learns of them by the boot block.
    pub(crate) fn new<'a>(
        dev: &'a Device<Bound>,
        reach: &'a Arc<DeviceReach>,
        registers: Arc<Registers>,
        doorbells: Arc<Doorbells>,
    ) -> impl PinInit<Self, Error> + 'a {
        try_pin_init!(Self {
            doorbells,
            registers,
            ring: Lent::new(reach, {
                let ring: Coherent<ControlRing> = Coherent::zeroed(dev, GFP_KERNEL)?;
                // In a turn that does not end, until the device shows others.
                kernel::dma_write!(ring, .record.turn, u32::MAX);
                ring
            }),
            replies: Lent::new(reach, Coherent::zeroed_slice(dev, SLOTS, GFP_KERNEL)?),
            events: Arc::pin_init(
                EventQueue::new(
                    dev,
                    reach,
                    abi::EQ_CONTROL,
                    EVENTS_MESSAGE,
                    growth::first_log_entries(EVENTS_LOG_ENTRIES).max(LEAST_EVENTS_LOG_ENTRIES),
                    GFP_KERNEL
                ),
                GFP_KERNEL
            )?,
            timeout: Atomic::new(FIRST_TIMEOUT),
            turns: Atomic::new(0),
            dead: Atomic::new(0),
            requests <- Requests::new(),
            dev: dev.into(),
        })
    }

    /// From now on an answer is waited for so many milliseconds.
    pub(crate) fn set_timeout(&self, timeout: Msecs) {
        self.timeout.store(timeout, Relaxed);
    }

    /// Notes that driver and device agreed on [`FEATURE_TURNS`](abi::FEATURE_TURNS).
    pub(crate) fn use_turns(&self) {
        self.turns.store(1, Relaxed);
    }

    /// Whether the device shows in the record when it uses tags.
    pub(crate) fn has_turns(&self) -> bool {
        self.turns.load(Relaxed) != 0
    }

    /// How long an answer is waited for.
    fn timeout(&self) -> Msecs {
        match *crate::module_parameters::command_timeout_ms.value() {
            0 => self.timeout.load(Relaxed),
            timeout => timeout,
        }
    }

    /// DMA address of the ring.
    pub(crate) fn dma_address(&self) -> u64 {
        self.ring.dma_handle()
    }

    /// The control event queue.
    pub(crate) fn events(&self) -> &Arc<EventQueue> {
        &self.events
    }

    /// Whether commands are refused.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Acquire) != 0
    }

    /// Refuses all further commands, and fails those in flight and those that wait. Returns whether this
    /// was the first call. May be called from any context.
    pub(crate) fn kill(&self) -> bool {
        let first = self.dead.xchg(1, kernel::sync::atomic::Full) == 0;
        self.requests.close();
        first
    }

    fn queue(&self) -> RingOfCqp<'_> {
        RingOfCqp { cqp: self }
    }

    /// Begins to take answers.
    #[inline]
    pub(crate) fn answers(&self) -> Answers<'_> {
        Answers {
            cqp: self,
            any: Cell::new(false),
        }
    }

    /// Takes the event of a finished command. Returns what one was for which was posted and failed, the number
    /// of the object that it was about, and why. May be called from any context.
    pub(crate) fn finished(
        &self,
        event: &EventEntry,
        answers: &Answers<'_>,
    ) -> Option<(PostedFor, u32, Error)> {
        let status = status_of(event.param0);
        let ring = self.queue();
        let answered = self.requests.finish(event.id, status, event.param1, &ring);
        if answered.is_some() {
            answers.any.set(true);
        } else if !self.is_dead() {
            // Those of a dead device are waited for no more.
            kernel::do_once_lite! {
                dev_warn!(self.dev, "event of a command that is not in flight\n")
            }
        }
        answered.and_then(|answered| failed_post(answered, status))
    }

    /// Takes the answers that are there.
    fn poll(&self, taker: &dyn TakesEvents) {
        let answers = self.answers();
        self.events
            .poll(&self.doorbells, move |event| taker.take(event, &answers));
    }

    /// Looks for answers for a while, if the device has the command already; returns whether its own
    /// came.
    fn look_for_answer(&self, ticket: &Ticket, in_ring: bool, taker: &dyn TakesEvents) -> bool {
        let start = Instant::<Monotonic>::now();
        loop {
            // Others may not have seen theirs yet, and wait for the processor: so slots get free.
            self.poll(taker);
            if ticket.done.try_wait() {
                return true;
            }
            if !in_ring || cpu::need_resched() || start.elapsed() > POLLING {
                return false;
            }
            cpu_relax();
        }
    }

    /// Gives the device a command, as soon as it is its turn, and waits for the answer: `ETIMEDOUT`
    /// where none came (the caller then declares the device dead). Of a reply, `answer` is the start; a
    /// device may write no more of it than `least`, and the rest is left as it is. Sleeps.
    pub(crate) fn run(
        &self,
        taker: &dyn TakesEvents,
        manner: Manner,
        entry: CommandEntry,
        least: usize,
        answer: &mut [u8],
    ) -> Result {
        let opcode = entry.opcode;
        let Manner {
            class,
            patience,
            user,
        } = manner;
        let ring = self.queue();
        stack_pin_init!(let request = Request::new(&self.requests, user, class, entry));
        let request = request.as_ref();
        let in_ring = if patience == Patience::None {
            self.requests.submit_now(request, &ring).or_else(|_| {
                // What was answered is in the way no more.
                self.poll(taker);
                self.requests.submit_now(request, &ring)
            })?;
            true
        } else {
            self.requests.submit(request, &ring)?
        };
        let killable = patience == Patience::UntilKilled;
        self.wait(taker, Asked::Request(&request), in_ring, killable)?;
        let least = least.min(answer.len());
        take_answer(&self.requests, &request, least, answer, |written| {
            kernel::do_once_lite! {
                dev_warn!(
                    self.dev,
                    "answer to command {} has {} bytes, not {}\n",
                    opcode,
                    written,
                    least
                )
            }
        })
    }

    /// Waits until a command is done, which the device has already if it is `in_ring`: `ETIMEDOUT` where no
    /// answer came, `EINTR` where it was `killable` and is taken back. Sleeps.
    fn wait(
        &self,
        taker: &dyn TakesEvents,
        asked: Asked<'_>,
        in_ring: bool,
        killable: bool,
    ) -> Result {
        let done = &asked.ticket().done;
        if let Asked::Posted(_) = asked {
            self.requests.ring_for_posted(&self.queue());
        }
        if self.look_for_answer(asked.ticket(), in_ring, taker) {
            return Ok(());
        }
        let (look, looks) = looks(self.timeout());
        let jiffies = msecs_to_jiffies(look);
        let sleep = |killable: bool| match killable {
            true => done.wait_killable_timeout(jiffies),
            false => Ok(done.wait_timeout(jiffies)),
        };
        self.events.sleep(&self.doorbells, || {
            wait_for(&self.requests, asked, killable, looks, sleep, || {
                self.registers.is_running()
            })
        })
    }

    /// Gives the device a command about the object of that `number`, and does not wait for the answer,
    /// unless there is no place for a command that nobody waits for: then it is done, and has no name. What it
    /// is about stays until it is known to be done. Sleeps.
    pub(crate) fn post<P: Plain>(
        &self,
        taker: &dyn TakesEvents,
        manner: Manner,
        opcode: CommandOpcode,
        payload: &P,
        about: (PostedFor, u32),
    ) -> Result<Option<Posted>> {
        // What ends objects may be what gives memory back: a kernel user that reconnects a disk ends its regions
        // first, and reclaim may wait for that disk.
        let flags = match about.0 {
            PostedFor::Release => GFP_NOWAIT | __GFP_NOWARN,
            PostedFor::Making => GFP_KERNEL_ACCOUNT,
        };
        let mut entry = CommandEntry::new(opcode, 0, (0, 0), payload);
        // Places of what was posted before get free, and who posts learns early what failed.
        self.poll(taker);
        let post = Post::new(&self.requests, manner.user, manner.class, flags);
        // Who has no memory for that waits.
        if let Ok(post) = post {
            let ring = self.queue();
            // A write to the device is an exit of a virtual machine, and wakes who may have nothing else to do.
            let telling = if self.has_turns() {
                Telling::Record
            } else {
                Telling::Doorbell
            };
            match self.requests.post(post, about, &mut entry, telling, &ring) {
                Ok(posted) => return Ok(Some(posted)),
                Err(error) if error == EAGAIN => {}
                Err(error) => return Err(error),
            }
        }
        self.run(taker, manner, entry, 0, &mut [])?;
        Ok(None)
    }

    /// How a command ended that was posted, if that is known; answers that are there are taken.
    pub(crate) fn look_at(&self, taker: &dyn TakesEvents, posted: &Posted) -> Option<Outcome> {
        let outcome = self.requests.outcome_yet(posted);
        if outcome.is_some() {
            return outcome;
        }
        self.requests.ring_for_posted(&self.queue());
        self.poll(taker);
        self.requests.outcome_yet(posted)
    }

    /// Waits until a command is done that was posted, and returns how it ended: `ETIMEDOUT` as
    /// [`Self::run`]. Sleeps.
    pub(crate) fn settle(&self, taker: &dyn TakesEvents, posted: &Posted) -> Result<Outcome> {
        if let Some(ticket) = self.requests.ticket(posted) {
            self.wait(taker, Asked::Posted(&ticket), true, false)?;
        }
        Ok(self.requests.outcome_yet(posted).unwrap_or(Outcome::Lost))
    }

    /// Has the device let go of what has a tag of that `number`, by a command that cannot but succeed, and
    /// returns when the device uses it no more: with the answer, or before where the device shows that it
    /// uses no tag just now ([`FEATURE_TURNS`]). `ETIMEDOUT` as [`Self::run`]. Sleeps.
    ///
    /// [`FEATURE_TURNS`]: abi::FEATURE_TURNS
    pub(crate) fn release(
        &self,
        taker: &dyn TakesEvents,
        manner: Manner,
        opcode: CommandOpcode,
        number: u32,
    ) -> Result<Released> {
        let about = (PostedFor::Release, number);
        let tag = object(number);
        let Some(posted) = self.post(taker, manner, opcode, &tag, about)? else {
            return Ok(Released::Answered);
        };
        let released = end_release(
            self.has_turns(),
            || self.uses_no_tag(),
            || self.is_dead(),
            || self.settle(taker, &posted),
        );
        self.forget(&posted);
        released
    }

    /// Whether the device was seen to use no tag, after what was stored in the record: when it does so again,
    /// it has seen that.
    fn uses_no_tag(&self) -> bool {
        // Against that of the device, which shows its turn and then looks at the record: one of the two sees
        // what the other stored.
        mb();
        let turn = || kernel::dma_read!(self.ring, .record.turn);
        let first = turn();
        // Mostly there is none, and nobody looks at the clock.
        let start = Cell::new(None);
        let over = is_over(first, turn, || {
            cpu_relax();
            let now = Instant::<Monotonic>::now();
            let since = start.get().unwrap_or(now);
            start.set(Some(since));
            cpu::need_resched() || now - since > TURN
        });
        // What the device wrote in that turn is seen by whoever gets the memory.
        dma_rmb();
        over
    }

    /// Forgets how a command ended that was posted: from now on it did what it was to do.
    pub(crate) fn forget(&self, posted: &Posted) {
        self.requests.forget(posted);
    }
}

/// How many of the `wanted` bytes of an answer are there, of which the device says that it has
/// `written`; none where those are missing that there are of every device, the `least`. It may have
/// more than was asked for.
fn answered(written: u64, wanted: usize, least: usize) -> Option<usize> {
    let there = usize::try_from(written).map_or(wanted, |written| written.min(wanted));
    (there >= least.min(wanted)).then_some(there)
}

/// What became of a request that is done, and its reply, as far as the device wrote it. `too_short` is told how
/// many bytes that are, where it is too little.
fn take_answer(
    requests: &Requests,
    request: &Request,
    least: usize,
    answer: &mut [u8],
    too_short: impl FnOnce(u64),
) -> Result {
    let outcome = requests.outcome(&request.ticket);
    outcome_to_result(outcome)?;
    let Outcome::Answered { result, .. } = outcome else {
        return Err(EIO);
    };
    let Some(there) = answered(result, answer.len(), least) else {
        too_short(result);
        return Err(EIO);
    };
    if there != 0 {
        requests.reply(request, &mut answer[..there]);
    }
    Ok(())
}

/// How many looks of so many there may be in all at a command that the device has: each of the long
/// ones ahead of it may take its time, and then itself.
fn all_looks(looks: u32) -> u32 {
    looks.saturating_mul(MOST_LONG + 1)
}

/// When a command was waited for long enough.
struct Watch {
    looks: u32,
    left: u32,
    /// For one command that the device has: this one, or that which is in its way.
    left_for_one: u32,
    seen: Position,
}

/// Whether it is the same command that is waited for.
fn is_same(one: Position, other: Position) -> bool {
    match (one, other) {
        (Position::Queued { oldest: one, .. }, Position::Queued { oldest: other, .. }) => {
            one == other
        }
        (Position::Queued { .. }, _) | (_, Position::Queued { .. }) => false,
        _ => true,
    }
}

impl Watch {
    /// Over a command at `position`, for so many looks without anything done that it waits for.
    fn new(looks: u32, position: Position) -> Self {
        Self {
            looks,
            left: looks,
            left_for_one: all_looks(looks),
            seen: position,
        }
    }

    /// Notes a look at a command that is at `position` now; returns whether it was the last one.
    fn look(&mut self, position: Position) -> bool {
        // Others may be answered all the time: what is lost is found out by whoever waits for it.
        self.left_for_one = if is_same(position, self.seen) {
            self.left_for_one.saturating_sub(1)
        } else {
            all_looks(self.looks)
        };
        self.left = if position == self.seen {
            self.left.saturating_sub(1)
        } else {
            self.looks
        };
        self.seen = position;
        self.left == 0 || self.left_for_one == 0
    }
}

/// Waits until a command is done: `EINTR` where it was `killable` and is taken back, `ETIMEDOUT` where it
/// is given up, as the device is not `alive` or did nothing for so many `looks`. `sleep` waits for a look,
/// with `EINTR` if it is to end when the task is killed; it returns whether the command is done.
///
/// Who waits for his turn looks at the device as well: those whose commands it has may not be running.
fn wait_for(
    requests: &Requests,
    asked: Asked<'_>,
    mut killable: bool,
    looks: u32,
    sleep: impl Fn(bool) -> Result<bool>,
    alive: impl Fn() -> bool,
) -> Result {
    let position = || requests.position(asked.ticket());
    let mut watch = Watch::new(looks, position());
    loop {
        match sleep(killable) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => {
                killable = false;
                match asked {
                    Asked::Request(request) if requests.withdraw(request) => return Err(EINTR),
                    _ => continue,
                }
            }
        }
        let last = watch.look(position());
        if (last || !alive()) && requests.give_up(asked) {
            return Err(ETIMEDOUT);
        }
    }
}

/// Which object a command was about that was posted and failed, and why, by what was answered.
fn failed_post(answered: Answered, status: u32) -> Option<(PostedFor, u32, Error)> {
    match answered {
        Answered::Request => None,
        Answered::Posted { what, number } => {
            let error = status_to_result(status).err()?;
            Some((what, number, error))
        }
    }
}

/// What a caller sees of how a command ended.
pub(crate) fn outcome_to_result(outcome: Outcome) -> Result {
    match outcome {
        Outcome::Answered { status, .. } => status_to_result(status),
        Outcome::Lost => Err(EIO),
    }
}

/// What a caller sees of a command's status.
fn status_to_result(status: u32) -> Result {
    let known = u8::try_from(status).ok();
    let Some(status) = known.and_then(CommandStatus::from_number) else {
        return Err(EIO);
    };
    Err(match status {
        CommandStatus::Ok => return Ok(()),
        CommandStatus::BadOpcode | CommandStatus::Unsupported => errno::eopnotsupp(),
        CommandStatus::BadParameter | CommandStatus::BadNumber | CommandStatus::BadState => EINVAL,
        CommandStatus::Exists => EEXIST,
        CommandStatus::NotFound => ENOENT,
        CommandStatus::Busy => EBUSY,
        CommandStatus::NoResource => ENOMEM,
        CommandStatus::HostMemory => EFAULT,
    })
}

#[kunit_tests(ferrite_cqp)]
mod tests {
    use super::*;
    use crate::requests::stage::Stage;

    #[test]
    fn a_turn_is_over_when_another_one_or_none_is_shown() {
        let looks = Atomic::new(0u32);
        let wait = |first: u32, then: &[u32]| {
            looks.store(0, Relaxed);
            let turn = || {
                let at = looks.fetch_add(1, Relaxed) as usize;
                then.get(at).copied().unwrap_or(first)
            };
            is_over(first, turn, || looks.load(Relaxed) >= 5)
        };
        // None is under way, whatever comes afterwards.
        assert!(wait(0, &[]) && wait(6, &[7, 7, 7]));
        assert_eq!(looks.load(Relaxed), 0);
        // It ends, or another one has begun since.
        assert!(wait(7, &[7, 7, 8]) && wait(7, &[9]) && wait(u32::MAX, &[u32::MAX, 0]));
        // It does not.
        assert!(!wait(7, &[]) && !wait(u32::MAX, &[]));
    }

    #[test]
    fn a_tag_is_released_before_the_answer_only_if_no_turn_is_under_way() {
        let done = Outcome::Answered {
            status: CommandStatus::Ok.number().into(),
            result: 0,
        };
        // What the record shows at each look, whether the device is dead then, and how it answers; how the release
        // ends, how often the record was looked at, and whether the answer was waited for.
        let release = |shows: bool, turns: &[u32], dead: bool, answer: Result<Outcome>| {
            let (looks, waited) = (Cell::new(0), Cell::new(false));
            let turn = || {
                let at = looks.get();
                looks.set(at + 1);
                turns[at.min(turns.len() - 1)]
            };
            let ended = end_release(
                shows,
                || is_over(turn(), turn, || looks.get() > turns.len()),
                || dead,
                || {
                    waited.set(true);
                    answer
                },
            );
            (ended, looks.get(), waited.get())
        };
        let (early, late) = (Ok(Released::Unanswered), Ok(Released::Answered));
        // No turn, one that ends, and another one since.
        assert_eq!(release(true, &[4], false, Ok(done)), (early, 1, false));
        assert_eq!(
            release(true, &[5, 5, 6], false, Ok(done)),
            (early, 3, false)
        );
        assert_eq!(release(true, &[5, 7], false, Ok(done)), (early, 2, false));
        // One that goes on: the device may be about to write where it has looked up the tag.
        assert_eq!(release(true, &[5, 5, 5], false, Ok(done)), (late, 4, true));
        // As it does of which nothing is known yet, and which shows nothing.
        let first = [u32::MAX; 2];
        assert_eq!(release(true, &first, false, Ok(done)), (late, 3, true));
        assert_eq!(release(false, &[4], false, Ok(done)), (late, 0, true));
        // A dead device is stopped by who learns that there is no answer.
        let lost = release(true, &[4], true, Ok(Outcome::Lost));
        assert_eq!(lost, (Err(EIO), 1, true));
        let silent = release(true, &[5], false, Err(ETIMEDOUT));
        assert_eq!(silent, (Err(ETIMEDOUT), 2, true));
    }

    #[test]
    fn a_time_out_is_divided_into_looks() {
        assert_eq!(looks(30_000), (1_000, 30));
        assert_eq!(looks(2_500), (1_000, 3));
        assert_eq!(looks(10), (10, 1));
        assert_eq!(looks(0), (1, 1));
        assert_eq!(all_looks(30), 150);
        assert_eq!(all_looks(u32::MAX), u32::MAX);
    }

    /// Waits for a command of a stage's, with so many looks, answering the next command at each look that
    /// `answers` says; returns the result, and the looks that took.
    fn wait(
        stage: &Stage,
        who: usize,
        looks: u32,
        answers: impl Fn(u32) -> bool,
        alive: impl Fn(u32) -> bool,
    ) -> (Result, u32) {
        let count = Atomic::new(0u32);
        let request = stage.request(who);
        let sleep = |_| {
            if answers(count.fetch_add(1, Relaxed) + 1) {
                stage.answer_next();
            }
            Ok(request.ticket.done.try_wait())
        };
        let alive = || alive(count.load(Relaxed));
        let asked = Asked::Request(request);
        let result = wait_for(&stage.requests, asked, false, looks, sleep, alive);
        (result, count.load(Relaxed))
    }

    #[test]
    fn a_dead_device_is_given_up_at_the_first_look() -> Result {
        let stage = Stage::full_of(1, SLOTS + 1)?;
        // By who has a slot as by who waits for one.
        for who in [0, SLOTS] {
            assert_eq!(
                wait(&stage, who, 30, |_| false, |_| false),
                (Err(ETIMEDOUT), 1)
            );
        }
        // One that seems alive is waited for.
        for who in [1, SLOTS - 1] {
            assert_eq!(
                wait(&stage, who, 5, |_| false, |_| true),
                (Err(ETIMEDOUT), 5)
            );
        }
        Ok(())
    }

    #[test]
    fn time_counts_from_when_what_is_ahead_was_answered() -> Result {
        // An answer at every fourth look: the last of ten is waited for as long as that takes.
        let stage = Stage::full_of(1, 10)?;
        assert_eq!(
            wait(&stage, 9, 5 * 3, |at| at % 4 == 0, |_| true),
            (Ok(()), 40)
        );
        // Who waits for a slot: however long, while there are answers.
        let stage = Stage::full_of(1, 3 * SLOTS)?;
        let last = 3 * SLOTS - 1;
        let looks = (2 * SLOTS + 1 + SLOTS) as u32;
        assert_eq!(wait(&stage, last, looks / 4, |_| true, |_| true).0, Ok(()));
        // Answers to what is behind say nothing.
        let mut stage = Stage::new()?;
        let first = stage.ask(1, Class::Short)?;
        for _ in 0..20 {
            stage.ask(1, Class::Short)?;
        }
        let answers = |at: u32| {
            stage.answer(at as usize);
            false
        };
        assert_eq!(
            wait(&stage, first, 5, answers, |_| true),
            (Err(ETIMEDOUT), 5)
        );
        Ok(())
    }

    #[test]
    fn a_device_is_not_waited_for_without_end() {
        let mut watch = Watch::new(5, Position::InRing { ahead: 50 });
        let mut looks = 0;
        for ahead in (0..50).rev() {
            looks += 1;
            if watch.look(Position::InRing { ahead }) {
                break;
            }
        }
        assert_eq!(looks, all_looks(5));
        // In a queue, as long as there are answers to what is in the way; and then from the start.
        let queued = |answers, oldest| Position::Queued { answers, oldest };
        let mut watch = Watch::new(5, queued(0, 0));
        for answers in 1..1000 {
            assert!(!watch.look(queued(answers, answers / 20)));
        }
        for ahead in [3, 3, 3, 3, 3, 2, 2, 2, 2, 2] {
            assert!(!watch.look(Position::InRing { ahead }));
        }
        assert!(watch.look(Position::InRing { ahead: 2 }));
    }

    #[test]
    fn who_waits_for_a_slot_finds_out_that_commands_were_lost() -> Result {
        // How many looks somebody takes while only commands of one class are answered.
        let looks = |stage: &mut Stage, who, answered| -> Result<u32> {
            let mut watch = Watch::new(5, stage.position(who));
            let mut count = 0;
            loop {
                count += 1;
                assert!(count < 100);
                stage.ask(3, answered)?;
                let last = stage.memory.given.borrow().len() - 1;
                assert!(stage.answer(last));
                if watch.look(stage.position(who)) {
                    return Ok(count);
                }
            }
        };
        let mut stage = Stage::full_of(1, SLOTS)?;
        let short = SLOTS - 1;
        assert!(stage.is_queued(short));
        assert_eq!(looks(&mut stage, short, Class::Reclaim)?, all_looks(5));
        let mut stage = Stage::new()?;
        for _ in 0..MOST_LONG {
            stage.ask(1, Class::Long)?;
        }
        let long = stage.ask(2, Class::Long)?;
        assert!(stage.is_queued(long));
        assert_eq!(looks(&mut stage, long, Class::Short)?, all_looks(5));
        Ok(())
    }

    #[test]
    fn what_a_device_did_not_write_of_a_reply_is_not_taken() -> Result {
        let mut stage = Stage::new()?;
        let who = stage.ask(1, Class::Short)?;
        stage.memory.reply.set(0xff);
        assert!(stage.answer_some(0..1, 16));
        let mut answer = [0; 128];
        let request = stage.request(who);
        take_answer(
            &stage.requests,
            request,
            16,
            &mut answer,
            |_| unreachable!(),
        )?;
        assert!(answer[..16].iter().all(|byte| *byte == 0xff));
        assert!(answer[16..].iter().all(|byte| *byte == 0));
        let told = Cell::new(None);
        let too_short = |written| told.set(Some(written));
        let request = stage.request(who);
        let less = take_answer(&stage.requests, request, 17, &mut answer, too_short);
        assert_eq!((less, told.get()), (Err(EIO), Some(16)));
        Ok(())
    }

    /// Waits for a command that was posted, with so many looks, at each of which `at_look` is called; returns the
    /// result, and the looks that took.
    fn wait_posted(
        stage: &Stage,
        posted: &Posted,
        looks: u32,
        at_look: impl Fn(u32),
        alive: bool,
    ) -> Result<(Result, u32)> {
        let ticket = stage.ticket(posted)?;
        let count = Atomic::new(0u32);
        let sleep = |killable: bool| {
            assert!(!killable);
            at_look(count.fetch_add(1, Relaxed) + 1);
            Ok(ticket.done.try_wait())
        };
        let asked = Asked::Posted(&ticket);
        let result = wait_for(&stage.requests, asked, false, looks, sleep, || alive);
        let looks = count.load(Relaxed);
        // From then on there is nothing to wait for.
        let again = wait_for(&stage.requests, asked, false, 5, sleep, || alive);
        assert_eq!((again, count.load(Relaxed)), (Ok(()), looks + 1));
        assert!(stage.ticket(posted).is_err());
        Ok((result, looks))
    }

    #[test]
    fn what_was_posted_is_waited_for_as_often_as_one_likes() -> Result {
        let stage = Stage::new()?;
        let posted = stage.post(1, 7)?;
        let answer = |at| {
            if at == 3 {
                stage.answer_next();
            }
        };
        let result = wait_posted(&stage, &posted, 5, answer, true)?;
        assert_eq!(result, (Ok(()), 3));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_lost_is_found_out_by_who_waits_for_it() -> Result {
        // Others are answered all the time.
        let stage = Stage::new()?;
        let lost = stage.post(1, 7)?;
        let others = |at: u32| {
            assert!(stage.post(2, at).is_ok());
            stage.answer(at as usize);
        };
        let result = wait_posted(&stage, &lost, 5, others, true)?;
        assert_eq!(result, (Err(ETIMEDOUT), 5));
        // Its place is not used again, and what the device says later is nobody's.
        assert_eq!(stage.requests.outcome_yet(&lost), Some(Outcome::Lost));
        assert!(!stage.answer(0));
        // A device that is gone is not waited for.
        let stage = Stage::new()?;
        let posted = stage.post(1, 7)?;
        let result = wait_posted(&stage, &posted, 30, |_| (), false)?;
        assert_eq!(result, (Err(ETIMEDOUT), 1));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_failed_is_told_and_nothing_else() {
        let number = 0x1234;
        let told = |answered, status: CommandStatus| failed_post(answered, status.number().into());
        for what in [PostedFor::Making, PostedFor::Release] {
            let posted = Answered::Posted { what, number };
            assert_eq!(told(posted, CommandStatus::Ok), None);
            let resource = told(posted, CommandStatus::NoResource);
            assert_eq!(resource, Some((what, number, ENOMEM)));
            assert_eq!(failed_post(posted, NO_STATUS), Some((what, number, EIO)));
        }
        // Who waits finds out himself.
        assert_eq!(told(Answered::Request, CommandStatus::NoResource), None);
        // One that the device never answered failed as well.
        assert_eq!(outcome_to_result(Outcome::Lost), Err(EIO));
    }

    #[test]
    fn who_is_killed_takes_back_what_waits_but_waits_for_what_the_device_has() -> Result {
        let stage = Stage::full_of(1, SLOTS + 1)?;
        let wait_killed = |who: usize, move_on: bool| {
            let request = stage.request(who);
            let looks = Atomic::new(0u32);
            let sleep = |killable: bool| {
                if move_on && !stage.is_in_ring(who) && looks.load(Relaxed) == 0 {
                    stage.answer_next();
                    stage.answer_next();
                }
                looks.fetch_add(1, Relaxed);
                if killable {
                    return Err(EINTR);
                }
                if looks.load(Relaxed) > 3 {
                    while stage.position(who) != Position::Done {
                        stage.answer_next();
                    }
                }
                Ok(request.ticket.done.try_wait())
            };
            let asked = Asked::Request(request);
            wait_for(&stage.requests, asked, true, 30, sleep, || true)
        };
        // It is gone; the one before it is given to the device while it is being killed.
        assert_eq!(wait_killed(SLOTS, false), Err(EINTR));
        assert_eq!(stage.position(SLOTS), Position::Done);
        assert!(stage.is_queued(SLOTS - 1));
        assert_eq!(wait_killed(SLOTS - 1, true), Ok(()));
        Ok(())
    }

    #[test]
    fn an_answer_is_taken_as_far_as_the_device_says_that_it_wrote_it() {
        assert_eq!(answered(256, 256, 256), Some(256));
        // A later device may know more.
        assert_eq!(answered(512, 256, 256), Some(256));
        assert_eq!(answered(u64::MAX, 256, 256), Some(256));
        // An earlier one less, but no less than there was at first.
        assert_eq!(answered(256, 320, 256), Some(256));
        assert_eq!(answered(300, 320, 256), Some(300));
        for (written, wanted, least) in [(255, 256, 256), (255, 320, 256), (0, 8, 8), (15, 16, 128)]
        {
            assert_eq!(answered(written, wanted, least), None);
        }
        // Only the start was asked for.
        assert_eq!(answered(128, 16, 128), Some(16));
        assert_eq!(answered(16, 16, 128), Some(16));
    }

    #[test]
    fn commands_say_how_long_their_structures_are() {
        let entry = CommandEntry::new(CommandOpcode::QueryDevice, 7, (0x1000, 256), &Nothing);
        assert_eq!((entry.request_length, entry.reply_length), (0, 256));
        assert_eq!((entry.flags, entry.request, entry.reply), (0, 0, 0x1000));
        assert!(entry.payload.iter().all(|byte| *byte == 0));
        let entry = CommandEntry::new(CommandOpcode::DestroyQueuePair, 7, (0, 0), &object(9));
        assert_eq!((entry.request_length, entry.reply_length), (8, 0));
        assert_eq!(entry.payload[..8], [9, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn only_status_ok_is_success() {
        let result = |param| status_to_result(status_of(param));
        assert_eq!(result(CommandStatus::Ok.number().into()), Ok(()));
        for status in 1..=0x3ff {
            assert!(result(status).is_err());
        }
        assert_eq!(result(CommandStatus::Busy.number().into()), Err(EBUSY));
        // What is no status at all is none that means something.
        for param in [0x100, 0x1_0000_0000, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            assert_eq!(result(param), Err(EIO));
        }
    }
}
