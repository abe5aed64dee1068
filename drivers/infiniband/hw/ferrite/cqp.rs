// SPDX-License-Identifier: GPL-2.0

//! The control queue pair: commands to the device, many at once.
//!
//! Each command has a slot from submission until its caller has seen the result. A slot has a
//! completion to sleep on and room for a reply. The event of a finished command names the slot in
//! its cookie; the rest of the cookie tells uses of the slot apart.
//!
//! A caller looks for its event itself for a while, as most commands are done sooner than an
//! interrupt could say so and a sleeper could wake. Only then it sleeps, and has interrupts raised.

use crate::{
    abi,
    abi::{
        Command,
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
    caps::MOST_COMMAND,
    dma_types::{
        Counters,
        Nothing,
        Reply, //
    },
    eq::EventQueue,
    kernel_ext::{
        barrier::dma_wmb,
        completion::Completion,
        cpu, errno,
        semaphore::Semaphore,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock,
            IrqSpinLockGuard, //
        },
    },
    lent::{
        DeviceReach,
        Lent, //
    },
};
use kernel::{
    device::{
        Bound,
        Device, //
    },
    dma::Coherent,
    prelude::*,
    processor::cpu_relax,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
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

/// Base-2 logarithm of the entries of the control ring.
pub(crate) const LOG_ENTRIES: u8 = 6;
const ENTRIES: usize = 1 << LOG_ENTRIES;
/// Commands in flight: fewer than the ring has entries.
const SLOTS: usize = ENTRIES - 1;
const SLOT_BITS: u32 = 8;
const _: () = assert!(SLOTS <= 1 << SLOT_BITS && LOG_ENTRIES <= abi::CQP_MAX_LOG_ENTRIES);

/// Base-2 logarithm of the entries of the control event queue: room for an answer to each command
/// in flight, and for the few other events of that queue.
const EVENTS_LOG_ENTRIES: u8 = 8;
const _: () = assert!(EVENTS_LOG_ENTRIES > LOG_ENTRIES);
/// There is always a first message; nothing else is sure.
const EVENTS_MESSAGE: u16 = 0;

/// How long to look for an answer before sleeping, as long as nobody else wants the processor.
const PATIENCE: Delta = Delta::from_micros(200);

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

/// A result has not come yet; no [`CommandStatus`] has this number.
const PENDING: u32 = u32::MAX;
/// What stands for all that is no [`CommandStatus`].
const NO_STATUS: u32 = 1 << u8::BITS;

/// The status in the event of a finished command.
fn status_of(param: u64) -> u32 {
    u8::try_from(param).map_or(NO_STATUS, u32::from)
}

/// What commands need of the device's BARs.
#[derive(Clone, Copy)]
pub(crate) struct Bars<'a> {
    pub(crate) doorbells: &'a Doorbells,
    /// Read only when the device does not answer.
    pub(crate) registers: &'a Registers,
    /// What is done about an event of the control event queue.
    pub(crate) dispatch: &'a dyn Fn(&EventEntry),
}

/// Which slots are free, and how the next use of each is called.
pub(crate) struct SlotPool {
    free: u64,
    uses: [u32; SLOTS],
}

impl SlotPool {
    const _FITS: () = assert!(SLOTS <= u64::BITS as usize);

    const fn new() -> Self {
        Self {
            free: u64::MAX >> (u64::BITS as usize - SLOTS),
            uses: [0; SLOTS],
        }
    }

    /// Takes a slot; returns its index and the cookie of this use.
    fn take(&mut self) -> Option<(usize, u32)> {
        if self.free == 0 {
            return None;
        }
        let index = self.free.trailing_zeros() as usize;
        self.free &= !(1 << index);
        let uses = self.uses.get_mut(index)?;
        *uses = uses.wrapping_add(1);
        Some((index, *uses << SLOT_BITS | index as u32))
    }

    fn give_back(&mut self, index: usize) {
        self.free |= 1 << index;
    }
}

/// The slot that a cookie names.
fn slot_of(cookie: u32) -> usize {
    (cookie & ((1 << SLOT_BITS) - 1)) as usize
}

/// One command in flight.
#[pin_data]
struct Slot {
    cookie: Atomic<u32>,
    status: Atomic<u32>,
    result: Atomic<u64>,
    #[pin]
    done: Completion,
}

impl Slot {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            cookie: Atomic::new(0),
            status: Atomic::new(PENDING),
            result: Atomic::new(0),
            done <- Completion::new(),
        })
    }
}

/// What submitting a command changes.
struct Submission {
    /// Commands submitted, free-running.
    producer: u32,
    slots: SlotPool,
}

/// Who asks for a slot.
#[derive(Clone, Copy, PartialEq)]
enum Asker {
    /// Somebody who may have to wait for what users do.
    Anyone,
    /// Memory management, which takes pages back, and for which all others wait.
    Reclaim,
}

impl Asker {
    fn of(opcode: CommandOpcode) -> Self {
        match opcode {
            CommandOpcode::InvalidatePages => Self::Reclaim,
            _ => Self::Anyone,
        }
    }
}

/// The slots that one may wait for.
#[derive(Clone, Copy)]
enum Share {
    All,
    Last,
}

/// A slot that was taken.
struct Taken {
    index: usize,
    /// Of this use of it.
    cookie: u32,
    share: Share,
}

/// [`Submission`] for those who submit, and for those who wait until they can.
///
/// They wait in turn: a user with many threads that ask for one slot after the other does not keep
/// anybody from getting one.
#[pin_data]
struct Submissions {
    #[pin]
    state: IrqSpinLock<Submission>,
    /// Slots that are free, but for one.
    #[pin]
    all: Semaphore,
    /// That one, for [`Asker::Reclaim`].
    #[pin]
    last: Semaphore,
}

impl Submissions {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            state <- new_irq_spinlock!(
                Submission { producer: 0, slots: SlotPool::new() },
                "ferrite_cqp"
            ),
            all <- Semaphore::new(SLOTS as u32 - 1),
            last <- Semaphore::new(1),
        })
    }

    fn semaphore(&self, share: Share) -> &Semaphore {
        match share {
            Share::All => &self.all,
            Share::Last => &self.last,
        }
    }

    /// Waits for a slot, and takes it. `EIO` as soon as the device is `dead`
    /// ([`Submissions::wake_all`] has to be called then). Sleeps.
    fn take_slot(
        &self,
        asker: Asker,
        dead: impl Fn() -> bool,
    ) -> Result<(IrqSpinLockGuard<'_, Submission>, Taken)> {
        if dead() {
            return Err(EIO);
        }
        let share = match asker {
            Asker::Anyone => {
                self.all.down();
                Share::All
            }
            Asker::Reclaim if self.all.try_down() => Share::All,
            Asker::Reclaim => {
                self.last.down();
                Share::Last
            }
        };
        let mut submission = self.state.lock();
        let taken = if dead() {
            None
        } else {
            submission.slots.take()
        };
        let Some((index, cookie)) = taken else {
            drop(submission);
            // For the next one who waits, who learns it as well.
            self.semaphore(share).up();
            return Err(EIO);
        };
        let taken = Taken {
            index,
            cookie,
            share,
        };
        Ok((submission, taken))
    }

    /// Makes all who wait look, one after the other. The device must be dead: nobody gets a slot that
    /// is not there. May be called from any context.
    fn wake_all(&self) {
        self.all.up();
        self.last.up();
    }

    /// Frees a slot whose command is done.
    fn give_back(&self, taken: Taken) {
        self.state.lock().slots.give_back(taken.index);
        self.semaphore(taken.share).up();
    }
}

/// The control queue pair.
#[pin_data]
pub(crate) struct Cqp {
    /// Written by the driver at `producer`, copied by the device up to the doorbell.
    ring: Lent<Coherent<[CommandEntry]>>,
    /// One per slot; the device's while the slot's command is in flight.
    replies: Lent<Coherent<[Reply]>>,
    /// Where the device tells that commands are done.
    events: Arc<EventQueue>,
    slots: KVec<Arc<Slot>>,
    /// How long an answer is waited for, in milliseconds.
    timeout: Atomic<u32>,
    /// Commands that were answered, free-running.
    answers: Atomic<u32>,
    dead: Atomic<u32>,
    #[pin]
    submissions: Submissions,
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
    // As many as the device said that it has, all of which are asked for.
    QueryCounters(abi::QueryCounters) -> Counters: 128,
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
    ) -> impl PinInit<Self, Error> + 'a {
        try_pin_init!(Self {
            ring: Lent::new(reach, Coherent::zeroed_slice(dev, ENTRIES, GFP_KERNEL)?),
            replies: Lent::new(reach, Coherent::zeroed_slice(dev, SLOTS, GFP_KERNEL)?),
            events: Arc::pin_init(
                EventQueue::new(
                    dev,
                    reach,
                    abi::EQ_CONTROL,
                    EVENTS_MESSAGE,
                    EVENTS_LOG_ENTRIES,
                    GFP_KERNEL
                ),
                GFP_KERNEL
            )?,
            slots: {
                let mut slots = KVec::with_capacity(SLOTS, GFP_KERNEL)?;
                for _ in 0..SLOTS {
                    slots.push(Arc::pin_init(Slot::new(), GFP_KERNEL)?, GFP_KERNEL)?;
                }
                slots
            },
            timeout: Atomic::new(FIRST_TIMEOUT),
            answers: Atomic::new(0),
            dead: Atomic::new(0),
            submissions <- Submissions::new(),
        })
    }

    /// From now on an answer is waited for so many milliseconds.
    pub(crate) fn set_timeout(&self, timeout: Msecs) {
        self.timeout.store(timeout, Relaxed);
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

    /// Refuses all further commands and fails those in flight. Returns whether this was the first
    /// call. May be called from any context.
    pub(crate) fn kill(&self) -> bool {
        let first = self.dead.xchg(1, kernel::sync::atomic::Full) == 0;
        // A caller that did not see the flag has made its completion ready before it looked, so
        // that this wakes it.
        for slot in &self.slots {
            slot.done.complete();
        }
        self.submissions.wake_all();
        first
    }

    /// Takes the event of a finished command. May be called from any context.
    pub(crate) fn finished(&self, event: &EventEntry) {
        let Some(slot) = self.slots.get(slot_of(event.id)) else {
            return;
        };
        if slot.cookie.load(Acquire) != event.id || slot.status.load(Relaxed) != PENDING {
            kernel::pr_warn_once!("ferrite: event of a command that is not in flight\n");
            return;
        }
        self.answers.fetch_add(1, Relaxed);
        slot.result.store(event.param1, Relaxed);
        // Pairs with the acquire in `wait`.
        slot.status.store(status_of(event.param0), Release);
        slot.done.complete();
    }

    /// Puts a command in the ring that is answered by `reply_length` bytes; returns its slot. Sleeps.
    fn submit<P: Plain>(
        &self,
        bars: Bars<'_>,
        opcode: CommandOpcode,
        payload: &P,
        reply_length: usize,
    ) -> Result<Taken> {
        let (mut submission, taken) = self
            .submissions
            .take_slot(Asker::of(opcode), || self.is_dead())?;
        let (index, cookie) = (taken.index, taken.cookie);
        let prepared = (|| {
            let slot = self.slots.get(index).ok_or(EINVAL)?;
            slot.done.reinit();
            slot.status.store(PENDING, Relaxed);
            slot.cookie.store(cookie, Release);
            if self.is_dead() {
                return Err(EIO);
            }
            let reply = if reply_length != 0 {
                self.replies.dma_handle() + (index * core::mem::size_of::<Reply>()) as u64
            } else {
                0
            };
            let at = submission.producer as usize & (ENTRIES - 1);
            let entry = CommandEntry::new(opcode, cookie, (reply, reply_length as u32), payload);
            kernel::dma_write!(self.ring, [try: at], entry);
            Ok(())
        })();
        if let Err(error) = prepared {
            drop(submission);
            self.submissions.give_back(taken);
            return Err(error);
        }
        submission.producer = submission.producer.wrapping_add(1);
        dma_wmb();
        bars.doorbells.control(submission.producer);
        Ok(taken)
    }

    /// Looks for the answer to the command in `slot` for a while; returns whether it came.
    fn look_for_answer(&self, slot: &Slot, bars: Bars<'_>) -> bool {
        let start = Instant::<Monotonic>::now();
        loop {
            self.events.poll(bars.doorbells, bars.dispatch);
            if slot.done.try_wait() {
                return true;
            }
            if cpu::need_resched() || start.elapsed() > PATIENCE {
                return false;
            }
            cpu_relax();
        }
    }

    /// Waits until the command in `index` is done, or the device is not alive. Sleeps.
    fn wait(&self, index: usize, bars: Bars<'_>) -> Result<u64> {
        let slot = self.slots.get(index).ok_or(EINVAL)?;
        let (look, looks) = looks(self.timeout());
        let sleep = || {
            wait_while(
                looks,
                all_looks(look, looks),
                || slot.done.wait_timeout(msecs_to_jiffies(look)),
                || bars.registers.is_running(),
                || self.answers.load(Relaxed),
            )
        };
        let in_time = self.look_for_answer(slot, bars) || self.events.sleep(bars.doorbells, sleep);
        match slot.status.load(Acquire) {
            PENDING if in_time => Err(EIO),
            PENDING => Err(ETIMEDOUT),
            status => {
                let result = slot.result.load(Relaxed);
                status_to_result(status).map(|()| result)
            }
        }
    }

    /// Runs a command that is answered by `length` bytes at the start of an `R`, of which a device may
    /// write no more than `least`; `ETIMEDOUT` where no answer came (the caller then declares the
    /// device dead). Sleeps.
    fn run<P: Plain, R: Plain>(
        &self,
        bars: Bars<'_>,
        opcode: CommandOpcode,
        payload: &P,
        length: usize,
        least: usize,
    ) -> Result<R> {
        let length = length.min(core::mem::size_of::<R>());
        let taken = self.submit(bars, opcode, payload, length)?;
        let index = taken.index;
        let result = self.wait(index, bars);
        if matches!(result, Err(error) if error == ETIMEDOUT) {
            // The device may yet write to the slot: it is not used again.
            return Err(ETIMEDOUT);
        }
        let answer = result.and_then(|written| {
            if length == 0 {
                return Ok(R::zeroed());
            }
            let Some(there) = answered(written, length, least) else {
                kernel::pr_warn_once!(
                    "ferrite: answer to {:?} has {} bytes, not {}\n",
                    opcode,
                    written,
                    least.min(length)
                );
                return Err(EIO);
            };
            Ok(kernel::dma_read!(self.replies, [try: index]).get(there))
        });
        self.submissions.give_back(taken);
        answer
    }

    /// Runs a command that has parameters and no reply. Sleeps.
    pub(crate) fn execute<C: Command>(&self, bars: Bars<'_>, command: &C) -> Result {
        self.execute_as(bars, C::OPCODE, command)
    }

    /// Runs a command whose payload more than one opcode takes. Sleeps.
    pub(crate) fn execute_as<P: Plain>(
        &self,
        bars: Bars<'_>,
        opcode: CommandOpcode,
        payload: &P,
    ) -> Result {
        self.run::<_, Nothing>(bars, opcode, payload, 0, 0)
            .map(|_| ())
    }

    /// Runs a query for the first `length` bytes of an answer, the rest of which is zero. Sleeps.
    pub(crate) fn query<R: Answer>(
        &self,
        bars: Bars<'_>,
        request: &R::Request,
        length: usize,
    ) -> Result<R> {
        self.run(bars, R::QUERY, request, length, R::LEAST)
    }
}

/// How many of the `wanted` bytes of an answer are there, of which the device says that it has
/// `written`; none where those are missing that there are of every device, the `least`. It may have
/// more than was asked for.
fn answered(written: u64, wanted: usize, least: usize) -> Option<usize> {
    let there = usize::try_from(written).map_or(wanted, |written| written.min(wanted));
    (there >= least.min(wanted)).then_some(there)
}

/// How many times as long a command is waited for, at most, while others are answered.
const ROUNDS: u32 = 4;

/// How many looks of so long there may be in all, of which `looks` fit in the time of a command: no more
/// than the longest command may take, unless its own time is longer, as memory management waits for some.
fn all_looks(look: Msecs, looks: u32) -> u32 {
    let most = MOST_COMMAND / look.max(1);
    looks.saturating_mul(ROUNDS).min(most).max(looks)
}

/// Calls `wait` until it returns true, at most `looks` times without any of the `answers` having
/// come, as what others have asked for may take its time before, and at most `all` times; in between the
/// device has to be `alive`. Returns whether `wait` did.
fn wait_while(
    looks: u32,
    all: u32,
    wait: impl Fn() -> bool,
    alive: impl Fn() -> bool,
    answers: impl Fn() -> u32,
) -> bool {
    let mut seen = answers();
    let mut left = looks;
    for _ in 0..all {
        if wait() {
            return true;
        }
        let now = answers();
        left = if now == seen { left - 1 } else { looks };
        seen = now;
        if left == 0 || !alive() {
            break;
        }
    }
    false
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

/// Somebody who waits for a slot when the device dies, at the worst of times.
#[cfg(CONFIG_KUNIT)]
mod dying {
    use super::*;
    use crate::kernel_ext::workqueue::OwnedQueue;
    use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

    #[pin_data]
    pub(super) struct Dying {
        queue: OwnedQueue,
        #[pin]
        submissions: Submissions,
        dead: Atomic<u32>,
        woken: Atomic<u32>,
        looks: Atomic<u32>,
        pub(super) refused: Atomic<u32>,
        #[pin]
        pub(super) done: Completion,
        #[pin]
        waiter: Work<Dying, 0>,
        #[pin]
        killer: Work<Dying, 1>,
    }

    impl_has_work! {
        impl HasWork<Self, 0> for Dying { self.waiter }
        impl HasWork<Self, 1> for Dying { self.killer }
    }

    impl Dying {
        /// All slots are taken, and somebody starts to wait for one of a device that dies.
        pub(super) fn start() -> Result<Arc<Self>> {
            Self::start_after(0)
        }

        /// The same, but the device stays alive.
        pub(super) fn start_alive() -> Result<Arc<Self>> {
            Self::start_after(1)
        }

        /// The same, after so many looks at the device, of which the first kills it.
        fn start_after(looks: u32) -> Result<Arc<Self>> {
            let this = Arc::pin_init(
                try_pin_init!(Self {
                    queue: OwnedQueue::unbound(c"dying")?,
                    submissions <- Submissions::new(),
                    dead: Atomic::new(0),
                    woken: Atomic::new(0),
                    looks: Atomic::new(looks),
                    refused: Atomic::new(0),
                    done <- Completion::new(),
                    waiter <- new_work!("Dying::waiter"),
                    killer <- new_work!("Dying::killer"),
                }? Error),
                GFP_KERNEL,
            )?;
            while this.submissions.all.try_down() {}
            drop(this.queue.enqueue::<_, 0>(this.clone()));
            Ok(this)
        }

        /// Says that the device is alive, while it dies.
        fn look(self: &Arc<Self>) -> bool {
            if self.looks.fetch_add(1, Relaxed) != 0 {
                return self.dead.load(Acquire) != 0;
            }
            drop(self.queue.enqueue::<_, 1>(self.clone()));
            let start = Instant::<Monotonic>::now();
            while self.woken.load(Relaxed) == 0 && start.elapsed() < Delta::from_millis(50) {
                cpu_relax();
            }
            false
        }

        /// Whether somebody waits for a slot.
        pub(super) fn is_waited_for(&self) -> bool {
            self.submissions.all.is_waited_for()
        }

        /// Ends a command of somebody else.
        pub(super) fn give_one_back(&self) {
            self.submissions.give_back(Taken {
                index: 0,
                cookie: 0,
                share: Share::All,
            });
        }

        /// Whether there is a slot without waiting for it.
        pub(super) fn can_pass(&self) -> bool {
            self.submissions.all.try_down()
        }

        /// Ends the test: nothing of it runs any more, and its queue is not dropped by itself.
        pub(super) fn finish(&self) {
            self.queue.flush();
        }
    }

    impl WorkItem<0> for Dying {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            let taken = this.submissions.take_slot(Asker::Anyone, || this.look());
            let refused = matches!(&taken, Err(error) if *error == EIO);
            drop(taken);
            this.refused.store(refused.into(), Relaxed);
            this.done.complete();
        }
    }

    impl WorkItem<1> for Dying {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            this.dead.store(1, Release);
            this.submissions.wake_all();
            this.woken.store(1, Relaxed);
        }
    }
}

#[kunit_tests(ferrite_cqp)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_slot_learns_that_the_device_died() -> Result {
        let dying = dying::Dying::start()?;
        let woken = dying.done.wait_timeout(msecs_to_jiffies(10_000));
        assert!(woken);
        if woken {
            assert_eq!(dying.refused.load(Relaxed), 1);
            dying.finish();
        } else {
            // It waits for ever: what it waits on must not go.
            core::mem::forget(dying);
        }
        Ok(())
    }

    #[test]
    fn there_are_fewer_slots_than_ring_entries() {
        let mut pool = SlotPool::new();
        let mut taken = 0;
        while pool.take().is_some() {
            taken += 1;
        }
        assert_eq!(taken, ENTRIES - 1);
    }

    #[test]
    fn a_slot_in_flight_is_not_given_out() -> Result {
        let mut pool = SlotPool::new();
        let (first, _) = pool.take().ok_or(EINVAL)?;
        let (second, _) = pool.take().ok_or(EINVAL)?;
        assert!(first != second);
        pool.give_back(first);
        let (third, _) = pool.take().ok_or(EINVAL)?;
        assert_eq!(third, first);
        Ok(())
    }

    #[test]
    fn each_use_of_a_slot_has_another_cookie() -> Result {
        let mut pool = SlotPool::new();
        let (index, cookie) = pool.take().ok_or(EINVAL)?;
        pool.give_back(index);
        let (again, other) = pool.take().ok_or(EINVAL)?;
        assert_eq!(again, index);
        assert!(cookie != other);
        assert_eq!(slot_of(cookie), index);
        assert_eq!(slot_of(other), index);
        Ok(())
    }

    #[test]
    fn a_dead_device_is_given_up_at_the_first_look() {
        let waits = Atomic::new(0u32);
        let count = || waits.fetch_add(1, Relaxed) + 1;
        let answered = wait_while(
            30,
            120,
            || {
                count();
                false
            },
            || false,
            || 0,
        );
        assert!(!answered);
        assert_eq!(waits.load(Relaxed), 1);
        // One that is alive is waited for, and its answer ends the wait.
        assert!(wait_while(30, 120, || count() == 4, || true, || 0));
        assert_eq!(waits.load(Relaxed), 4);
        assert!(!wait_while(5, 20, || count() == 0, || true, || 0));
        assert_eq!(waits.load(Relaxed), 9);
        // One that answers others is waited for longer: from its last answer on.
        let answers = || waits.load(Relaxed).min(12);
        assert!(!wait_while(5, 20, || count() == 0, || true, answers));
        assert_eq!(waits.load(Relaxed), 12 + 5);
        // But not for ever.
        assert!(!wait_while(
            5,
            20,
            || count() == 0,
            || true,
            || waits.load(Relaxed)
        ));
        assert_eq!(waits.load(Relaxed), 17 + 20);
    }

    #[test]
    fn a_time_out_is_divided_into_looks() {
        assert_eq!(looks(30_000), (1_000, 30));
        assert_eq!(looks(2_500), (1_000, 3));
        assert_eq!(looks(10), (10, 1));
        assert_eq!(looks(0), (1, 1));
        assert_eq!(all_looks(1_000, 3), 12);
        assert_eq!(all_looks(1_000, 30), 120);
        // However long a device says that it takes.
        assert_eq!(all_looks(1_000, 90), 120);
        assert_eq!(all_looks(1_000, 120), 120);
        // Unless the administrator says so.
        assert_eq!(all_looks(1_000, 300), 300);
    }

    #[test]
    fn a_slot_that_is_given_back_is_of_who_has_waited() -> Result {
        let dying = dying::Dying::start_alive()?;
        let start = Instant::<Monotonic>::now();
        while !dying.is_waited_for() && start.elapsed() < Delta::from_secs(10) {
            cpu_relax();
        }
        assert!(dying.is_waited_for());
        // Who gives it back, and asks at once, comes after that one.
        dying.give_one_back();
        assert!(!dying.can_pass());
        let woken = dying.done.wait_timeout(msecs_to_jiffies(10_000));
        assert!(woken);
        assert_eq!(dying.refused.load(Relaxed), 0);
        dying.finish();
        Ok(())
    }

    #[test]
    fn memory_is_taken_back_while_others_have_all_slots() -> Result {
        let submissions = KBox::pin_init(Submissions::new(), GFP_KERNEL)?;
        while submissions.all.try_down() {
            let _ = submissions.state.lock().slots.take();
        }
        let asker = Asker::of(CommandOpcode::InvalidatePages);
        let (guard, taken) = submissions.take_slot(asker, || false)?;
        drop(guard);
        assert!(!submissions.last.try_down());
        submissions.give_back(taken);
        assert!(submissions.last.try_down());
        // There is none but those.
        assert!(submissions.state.lock().slots.take().is_some());
        assert!(submissions.state.lock().slots.take().is_none());
        assert!(Asker::of(CommandOpcode::DestroyQueuePair) == Asker::Anyone);
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
        // What was not asked for may be what the slot was used for last.
        let reply = Reply {
            bytes: core::array::from_fn(|at| (at as u8).wrapping_add(1)),
        };
        let counters: Counters = reply.get(16);
        assert_eq!(
            counters.0[..2],
            [0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09]
        );
        assert!(counters.0[2..].iter().all(|counter| *counter == 0));
        assert_eq!(reply.get::<ObjectNumber>(usize::MAX).number, 0x0403_0201);
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
        // What is no status at all is none that means something, nor no answer yet.
        for param in [0x100, 0x1_0000_0000, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            assert_eq!(result(param), Err(EIO));
            assert!(status_of(param) != PENDING);
        }
    }
}
