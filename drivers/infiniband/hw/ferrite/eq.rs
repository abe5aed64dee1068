// SPDX-License-Identifier: GPL-2.0

//! Event queues.
//!
//! The ring is host memory that the device writes: an entry is the device's until its code is not
//! zero, then the driver's until the driver has zeroed the code and said so with its doorbell. An
//! interrupt comes once per arming; arming with the read index makes the device look for entries
//! that came meanwhile, so that none is missed.
//!
//! A queue that is out of room is given a larger ring while events come (`growth.rs`). Each entry is
//! in the slot of its index in one of the two rings: up to some index in the old one, and from there
//! on in the new one. The device says with the answer to the command that it has left the old one.

mod ring;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;

use self::ring::{
    Consumer,
    EventRingMemory,
    Settled, //
};
pub(crate) use self::ring::{
    QueueView,
    Ring, //
};
use crate::{
    abi::{
        CreateEventQueue,
        EventEntry,
        EventPriority,
        ModifyEventQueue,
        Plain,
        SwitchEventQueue, //
    },
    bars::Doorbells,
    kernel_ext::spinlock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    lent::DeviceReach, //
};
use kernel::{
    alloc::Flags,
    device::{
        Bound,
        Device, //
    },
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed,
            Release, //
        },
        Arc,
        Mutex, //
    }, //
};

/// Events that are handled before the queue is armed again. What is left raises the next interrupt
/// at once, so that others get the processor in between.
pub(crate) const BUDGET: u32 = 128;

/// What can be changed about a queue that is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// An interrupt is put off for so many microseconds.
    pub(crate) moderation_microseconds: u16,
    /// But not where there are so many events.
    pub(crate) moderation_count: u16,
    /// Whether it is served before others.
    pub(crate) priority: EventPriority,
}

/// Stands for the processor of a queue that had no interrupt.
const NO_PROCESSOR: u32 = u32::MAX;

/// An event queue.
#[pin_data]
pub(crate) struct EventQueue {
    number: u16,
    message: u16,
    /// As the device knows them. Held while it is told of others.
    #[pin]
    settings: Mutex<Settings>,
    /// The priority of those, for interrupts.
    low_latency: Atomic<u32>,
    /// The processor of its last interrupt since some queue of the device is of low latency.
    processor: Atomic<u32>,
    #[pin]
    consumer: IrqSpinLock<Consumer<EventRingMemory>>,
    /// The queue may be armed without regard to answers to commands.
    may_be_quiet: Atomic<u32>,
    /// Those who sleep until an answer to a command raises the interrupt.
    sleepers: Atomic<u32>,
    events: Atomic<u64>,
    interrupts: Atomic<u64>,
    /// Base-2 logarithm of the most entries it may be given, zero where it may not be given more.
    most_log_entries: Atomic<u32>,
    /// The device said that the queue is out of room, and nobody has seen to that yet.
    out_of_room: Atomic<u32>,
    overflows: Atomic<u64>,
}

impl EventQueue {
    /// Makes the ring of queue `number`, which interrupts by `message`, in one piece of memory had
    /// with `flags`. The device learns of it by [`EventQueue::create_command`], or of queue 0 by the
    /// boot block.
    pub(crate) fn new<'a>(
        dev: &'a Device<Bound>,
        reach: &'a Arc<DeviceReach>,
        number: u16,
        message: u16,
        log_entries: u8,
        flags: Flags,
    ) -> impl PinInit<Self, Error> + 'a {
        try_pin_init!(Self {
            consumer <- {
                let ring = Ring::new(dev, reach, log_entries, flags)?;
                new_irq_spinlock!(Consumer::new(ring), "ferrite_eq")
            },
            number,
            message,
            settings <- new_mutex!(
                Settings {
                    moderation_microseconds: 0,
                    moderation_count: 0,
                    priority: EventPriority::Bulk,
                },
                "ferrite_eq_settings"
            ),
            low_latency: Atomic::new(0),
            processor: Atomic::new(NO_PROCESSOR),
            may_be_quiet: Atomic::new(0),
            sleepers: Atomic::new(0),
            events: Atomic::new(0),
            interrupts: Atomic::new(0),
            most_log_entries: Atomic::new(0),
            out_of_room: Atomic::new(0),
            overflows: Atomic::new(0),
        })
    }

    /// Its number.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// The message it interrupts by: the host's vector of that number.
    pub(crate) fn message(&self) -> u16 {
        self.message
    }

    /// Base-2 logarithm of its entries: those of the ring that is read.
    pub(crate) fn log_entries(&self) -> u8 {
        self.consumer.lock().ring.log_entries
    }

    /// DMA address of its ring.
    pub(crate) fn dma_address(&self) -> u64 {
        self.consumer.lock().ring.slots.dma_handle()
    }

    /// Events consumed so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// Interrupts in which there were events.
    pub(crate) fn interrupts(&self) -> u64 {
        self.interrupts.load(Relaxed)
    }

    /// How often the device said that it is out of room.
    pub(crate) fn overflows(&self) -> u64 {
        self.overflows.load(Relaxed)
    }

    /// Entries consumed, free-running.
    pub(crate) fn read_index(&self) -> u32 {
        self.consumer.lock().index
    }

    /// What there is to say of its ring.
    pub(crate) fn look(&self) -> QueueView {
        self.consumer.lock().look()
    }

    /// The command that makes the queue known to the device.
    pub(crate) fn create_command(&self) -> CreateEventQueue {
        let consumer = self.consumer.lock();
        CreateEventQueue {
            eqn: self.number,
            message: self.message,
            log_entries: consumer.ring.log_entries,
            ring: consumer.ring.buffer(),
            // What there is no room for is kept back in the device.
            ..CreateEventQueue::zeroed()
        }
    }

    /// From now on answers to commands raise interrupts only while somebody sleeps until one
    /// comes ([`EventQueue::sleep`]).
    pub(crate) fn keep_quiet(&self) {
        self.may_be_quiet.store(1, Relaxed);
    }

    /// From now on the queue may be given rings of up to `1 << log_entries`.
    pub(crate) fn may_grow(&self, log_entries: u8) {
        self.most_log_entries.store(log_entries.into(), Relaxed);
    }

    /// Base-2 logarithm of the most entries it may be given.
    pub(crate) fn most_log_entries(&self) -> u8 {
        self.most_log_entries.load(Relaxed) as u8
    }

    /// Notes that the device has no room for an event. May be called in interrupt context.
    pub(crate) fn note_overflow(&self) {
        self.overflows.fetch_add(1, Relaxed);
        self.want_room();
    }

    /// Notes that the queue should have a larger ring.
    pub(crate) fn want_room(&self) {
        self.out_of_room.store(1, Release);
    }

    /// Whether it should.
    pub(crate) fn wants_room(&self) -> bool {
        self.out_of_room.load(Relaxed) != 0
    }

    /// Whether it should, which is then forgotten.
    pub(crate) fn was_out_of_room(&self) -> bool {
        self.out_of_room.xchg(0, Full) != 0
    }

    /// Prepares a switch to `ring`: from now on entries are looked for there as well. Returns the
    /// command that tells the device to go on there; [`EventQueue::settle`] is to be called when that
    /// was answered. `EBUSY` where such a command is under way. Sleeps.
    pub(crate) fn offer(&self, ring: Ring<EventRingMemory>) -> Result<SwitchEventQueue> {
        let command = SwitchEventQueue {
            eqn: self.number,
            log_entries: ring.log_entries,
            ring: ring.buffer(),
            ..SwitchEventQueue::zeroed()
        };
        let refused = self.consumer.lock().offer(ring);
        // Freed without the lock, as it may sleep.
        refused.map(|()| command).map_err(|_ring| EBUSY)
    }

    /// Ends a switch: the device has answered to the command, and `switched` or not, or it touches no
    /// memory any more. Frees the ring that it is not in. `EIO` where it contradicts itself. Sleeps.
    pub(crate) fn settle(
        &self,
        switched: bool,
        doorbells: &Doorbells,
        each: impl Fn(&EventEntry),
    ) -> Result {
        // As many looks as it takes to read all that the old ring has room for, and the last one.
        let looks = (1u32 << self.log_entries()).div_ceil(BUDGET) + 1;
        for _ in 0..looks {
            let mut consumer = self.consumer.lock();
            let settled = consumer.settle(switched);
            if let Settled::Over(_) = settled {
                // What was not read is in two rings at the most, also after the next switch.
                doorbells.event_queue(consumer.tell(self.number));
            }
            drop(consumer);
            // Rings are freed without the lock, as that may sleep.
            match settled {
                Settled::Nothing | Settled::Over(_) => return Ok(()),
                Settled::Contradicted => return Err(EIO),
                Settled::Unread => self.poll(doorbells, &each),
            }
        }
        // It writes to a ring that it has left.
        Err(EIO)
    }

    /// What the device knows of it.
    pub(crate) fn settings(&self) -> Settings {
        *self.settings.lock()
    }

    /// Whether it is served before others.
    #[inline]
    pub(crate) fn is_low_latency(&self) -> bool {
        self.low_latency.load(Relaxed) != 0
    }

    /// Notes the processor that its interrupt arrives at.
    pub(crate) fn note_processor(&self, processor: u32) {
        self.processor.store(processor, Relaxed);
    }

    /// Whether its last interrupt arrived at a processor.
    pub(crate) fn is_served_at(&self, processor: u32) -> bool {
        self.processor.load(Relaxed) == processor
    }

    /// Sets the priority, by a command that `execute` gives; counts it in `marked` where it is of low
    /// latency. Sleeps.
    pub(crate) fn set_priority(
        &self,
        priority: EventPriority,
        marked: &Atomic<u32>,
        execute: impl FnOnce(&ModifyEventQueue) -> Result,
    ) -> Result {
        let low_latency = priority == EventPriority::LowLatency;
        self.modify(
            |settings| {
                settings.priority = priority;
                if low_latency {
                    // It puts nothing off; see `moderation.rs`.
                    settings.moderation_microseconds = 0;
                    settings.moderation_count = 0;
                }
            },
            |command| {
                execute(command)?;
                // One at a time, as the settings are locked.
                match (self.is_low_latency(), low_latency) {
                    (false, true) => {
                        marked.fetch_add(1, Relaxed);
                    }
                    (true, false) => {
                        marked.fetch_sub(1, Relaxed);
                    }
                    _ => {}
                }
                Ok(())
            },
        )
    }

    /// Changes what the device knows of it, by a command that `execute` gives. Sleeps.
    pub(crate) fn modify(
        &self,
        change: impl FnOnce(&mut Settings),
        execute: impl FnOnce(&ModifyEventQueue) -> Result,
    ) -> Result {
        let mut settings = self.settings.lock();
        let mut wanted = *settings;
        change(&mut wanted);
        if wanted == *settings {
            return Ok(());
        }
        execute(&ModifyEventQueue {
            eqn: self.number,
            message: self.message,
            moderation_microseconds: wanted.moderation_microseconds,
            moderation_count: wanted.moderation_count,
            priority: wanted.priority.number(),
            ..ModifyEventQueue::zeroed()
        })?;
        *settings = wanted;
        let low_latency = wanted.priority == EventPriority::LowLatency;
        self.low_latency.store(low_latency.into(), Relaxed);
        Ok(())
    }

    /// Whether the queue is to be armed quietly: to be asked with the lock held, as a sleeper is
    /// counted before it takes the lock to arm.
    fn quiet(&self) -> bool {
        self.may_be_quiet.load(Relaxed) != 0 && self.sleepers.load(Relaxed) == 0
    }

    /// Arms the queue.
    pub(crate) fn arm(&self, doorbells: &Doorbells) {
        let mut consumer = self.consumer.lock();
        doorbells.event_queue(consumer.rearm(self.number, self.quiet()));
    }

    /// Runs `wait` while every event raises the interrupt, those included that are there already.
    pub(crate) fn sleep<T>(&self, doorbells: &Doorbells, wait: impl FnOnce() -> T) -> T {
        // Before the lock is taken: whoever arms later sees it.
        self.sleepers.fetch_add(1, Full);
        self.arm(doorbells);
        let result = wait();
        self.sleepers.fetch_sub(1, Full);
        result
    }

    /// Consumes what is there without waiting for the interrupt. May be called from any context.
    #[inline]
    pub(crate) fn poll(&self, doorbells: &Doorbells, each: impl FnMut(&EventEntry)) {
        let mut consumer = self.consumer.lock();
        let consumed = consumer.drain(each);
        if consumed == 0 {
            return;
        }
        if let Some(doorbell) = consumer.note_polled(self.number) {
            doorbells.event_queue(doorbell);
        }
        self.count(consumed, 0);
    }

    /// Serves the queue in its interrupt: consumes what is there, then arms with one write.
    ///
    /// A queue with nothing in it, out of which nothing was taken since it was armed, is still
    /// armed, and is left alone: it shares its vector with the one that interrupted.
    #[inline]
    pub(crate) fn service(
        &self,
        doorbells: &Doorbells,
        budget: u32,
        each: impl FnMut(&EventEntry),
    ) -> bool {
        let mut consumer = self.consumer.lock();
        let consumed = consumer.drain_some(budget, each);
        if consumed == 0 && !consumer.polled {
            return false;
        }
        doorbells.event_queue(consumer.rearm(self.number, self.quiet()));
        self.count(consumed, 1);
        true
    }

    /// Serves the queue in its interrupt for as long as `budget` lasts; returns how many events were
    /// consumed. [`EventQueue::end_turns`] is to be called afterwards.
    #[inline]
    pub(crate) fn turn(&self, budget: u32, each: impl FnMut(&EventEntry)) -> u32 {
        self.consumer.lock().drain_some(budget, each)
    }

    /// Ends the service in an interrupt, in which so many events were `consumed`: arms with one write.
    /// As [`EventQueue::service`].
    #[inline]
    pub(crate) fn end_turns(&self, doorbells: &Doorbells, consumed: u32) -> bool {
        let mut consumer = self.consumer.lock();
        if consumed == 0 && !consumer.polled {
            return false;
        }
        doorbells.event_queue(consumer.rearm(self.number, self.quiet()));
        self.count(consumed, 1);
        true
    }

    /// Counts; only the holder of the lock does.
    #[inline]
    fn count(&self, events: u32, interrupts: u64) {
        let sum = self.events.load(Relaxed) + u64::from(events);
        self.events.store(sum, Relaxed);
        let sum = self.interrupts.load(Relaxed) + interrupts;
        self.interrupts.store(sum, Relaxed);
    }
}
