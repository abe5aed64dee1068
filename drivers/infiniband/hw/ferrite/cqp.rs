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

mod answer;
mod turn;
mod wait;

use self::{
    answer::{
        failed_post,
        status_of,
        take_answer, //
    },
    turn::{
        end_release,
        is_over,
        TURN, //
    },
    wait::{
        looks,
        wait_for,
        FIRST_TIMEOUT, //
    }, //
};
pub(crate) use self::{
    answer::{
        object,
        outcome_to_result,
        Answer, //
    },
    turn::Released, //
};
use crate::{
    abi,
    abi::{
        CommandEntry,
        CommandOpcode,
        CommandStatus,
        EventEntry,
        Plain, //
    },
    bars::{
        Doorbells,
        Registers, //
    },
    dma_types::{
        ControlRing,
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
        user, //
    },
    lent::{
        DeviceReach,
        Lent, //
    },
    requests::{
        Asked,
        Class,
        CommandRing,
        Outcome,
        Post,
        Posted,
        PostedFor,
        Request,
        Requests,
        RingView,
        Telling,
        Ticket,
        LOG_ENTRIES,
        SLOTS, //
    }, //
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
    }, //
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

    /// The status in the event of a finished command.
    pub(crate) fn status(event: &EventEntry) -> u32 {
        status_of(event.param0)
    }

    /// Whether it says that the command was done.
    #[inline]
    pub(crate) fn is_success(event: &EventEntry) -> bool {
        event.param0 == u64::from(CommandStatus::Ok.number())
    }

    /// The opcode of the command that such an event is about, if there is one in flight that has not been
    /// [taken](Self::finished).
    pub(crate) fn opcode_of(&self, event: &EventEntry) -> Option<u16> {
        self.requests.opcode_of(event.id)
    }

    /// What there is to say of the commands that the device has.
    pub(crate) fn look(&self) -> Result<RingView> {
        self.requests.look()
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

#[kunit_tests(ferrite_cqp)]
mod tests {
    use super::wait::{
        all_looks,
        Watch, //
    };
    use super::*;
    use crate::{
        abi::CommandStatus,
        requests::{
            stage::Stage,
            MOST_LONG, //
        },
    };

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
}
