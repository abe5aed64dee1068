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

use crate::{
    abi::{
        Buffer,
        CreateEventQueue,
        EventDoorbell,
        EventEntry,
        EventPriority,
        ModifyEventQueue,
        Plain,
        SwitchEventQueue, //
    },
    bars::Doorbells,
    kernel_ext::{
        barrier::dma_rmb,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
    },
    lent::{
        DeviceReach,
        Lent, //
    },
};
use kernel::{
    alloc::Flags,
    device::{
        Bound,
        Device, //
    },
    dma::Coherent,
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
    },
};

/// Events that are handled before the queue is armed again. What is left raises the next interrupt
/// at once, so that others get the processor in between.
pub(crate) const BUDGET: u32 = 128;

/// Memory of event queue entries.
pub(crate) trait EventSlots {
    /// Takes the entry at `slot` out, if there is one.
    fn take(&self, slot: usize) -> Result<Option<EventEntry>>;
    /// Whether there is an entry at `slot`.
    fn is_written(&self, slot: usize) -> Result<bool>;
}

/// Memory of a ring that the device was told of.
pub(crate) type EventRingMemory = Lent<Coherent<[EventEntry]>>;

impl EventSlots for EventRingMemory {
    #[inline]
    fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
        if kernel::dma_read!(self, [try: slot].code) == 0 {
            return Ok(None);
        }
        // The device writes the code last: what stands before it is read after it.
        dma_rmb();
        let entry = kernel::dma_read!(self, [try: slot]);
        kernel::dma_write!(self, [try: slot].code, 0);
        Ok(Some(entry))
    }

    fn is_written(&self, slot: usize) -> Result<bool> {
        let written = kernel::dma_read!(self, [try: slot].code) != 0;
        // What the device wrote before is seen by who looks after this.
        dma_rmb();
        Ok(written)
    }
}

/// A ring of `1 << log_entries`.
pub(crate) struct Ring<S> {
    slots: S,
    log_entries: u8,
}

impl<S: EventSlots> Ring<S> {
    /// Takes the entry with free-running index `index` out, if it is there.
    #[inline]
    fn take(&self, index: u32) -> Option<EventEntry> {
        let slot = (index & ((1 << self.log_entries) - 1)) as usize;
        self.slots.take(slot).ok().flatten()
    }

    /// Whether the entry with free-running index `index` is there.
    fn is_written(&self, index: u32) -> bool {
        let slot = (index & ((1 << self.log_entries) - 1)) as usize;
        self.slots.is_written(slot).unwrap_or(false)
    }
}

impl Ring<EventRingMemory> {
    /// Makes an empty ring in one piece of memory had with `flags`.
    pub(crate) fn new(
        dev: &Device<Bound>,
        reach: &Arc<DeviceReach>,
        log_entries: u8,
        flags: Flags,
    ) -> Result<Self> {
        let memory = Coherent::zeroed_slice(dev, 1 << log_entries, flags)?;
        Ok(Self {
            slots: Lent::new(reach, memory),
            log_entries,
        })
    }

    /// Where it is, for the device.
    fn buffer(&self) -> Buffer {
        Buffer::contiguous(self.slots.dma_handle(), self.slots.size() as u64)
    }
}

/// Where the driver is in the ring, or in two of them while the device leaves one for the other.
pub(crate) struct Consumer<S> {
    /// Entries consumed, free-running.
    index: u32,
    /// What the device was told of that.
    told: u32,
    /// Entries were consumed by a look of [`EventQueue::poll`] since the queue was armed: the
    /// interrupt that they raised may find nothing.
    polled: bool,
    /// What is read.
    ring: Ring<S>,
    /// What the device was given to go on in, until an entry is found there.
    next: Option<Ring<S>>,
    /// What was read before that. The device may not have said yet that it left it.
    left: Option<Ring<S>>,
}

impl<S: EventSlots> Consumer<S> {
    /// At the start of a ring.
    pub(crate) const fn new(ring: Ring<S>) -> Self {
        Self {
            index: 0,
            told: 0,
            polled: false,
            ring,
            next: None,
            left: None,
        }
    }

    /// Takes the next entry out, if there is one.
    #[inline]
    fn next_entry(&mut self) -> Option<EventEntry> {
        let entry = match self.ring.take(self.index) {
            None if self.next.is_some() => self.move_over()?,
            None => return None,
            Some(entry) => entry,
        };
        self.index = self.index.wrapping_add(1);
        Some(entry)
    }

    /// Takes the entry that is next out of the ring that the device is to go on in, where it is there.
    ///
    /// An entry in the slot there says only that the device has left the old ring. Between the look at
    /// that and this one it may have written to both, and what is in the slot may be of a later round:
    /// so the old ring is looked at once more, and is done if it still has nothing.
    #[cold]
    fn move_over(&mut self) -> Option<EventEntry> {
        if !self.next.as_ref()?.is_written(self.index) {
            return None;
        }
        if let Some(entry) = self.ring.take(self.index) {
            return Some(entry);
        }
        let entry = self.next.as_ref()?.take(self.index)?;
        let next = self.next.take()?;
        self.left = Some(core::mem::replace(&mut self.ring, next));
        Some(entry)
    }

    /// Consumes what is there, [`BUDGET`] at the most; returns how many.
    ///
    /// The bound keeps a device that writes without end from holding the processor: arming a queue
    /// with entries that were not read raises its interrupt at once.
    pub(crate) fn drain(&mut self, each: impl FnMut(&EventEntry)) -> u32 {
        self.drain_some(BUDGET, each)
    }

    /// Consumes what is there, `budget` at the most; returns how many.
    #[inline]
    fn drain_some(&mut self, budget: u32, mut each: impl FnMut(&EventEntry)) -> u32 {
        let mut consumed = 0;
        while consumed < budget {
            let Some(entry) = self.next_entry() else {
                break;
            };
            consumed += 1;
            each(&entry);
        }
        consumed
    }

    /// The doorbell that tells how far the driver is, and arms: with `quiet`, not for answers to
    /// commands.
    pub(crate) fn rearm(&mut self, eqn: u16, quiet: bool) -> EventDoorbell {
        self.told = self.index;
        self.polled = false;
        EventDoorbell {
            eqn,
            read_index: self.index,
            relative: false,
            valid: true,
            arm: true,
            quiet,
            disarm: false,
        }
    }

    /// Notes that entries were consumed without an interrupt. Returns a doorbell where it is time
    /// to tell how far the driver is.
    fn note_polled(&mut self, eqn: u16) -> Option<EventDoorbell> {
        self.polled = true;
        if self.index.wrapping_sub(self.told) < (1 << self.ring.log_entries) / 2 {
            return None;
        }
        Some(self.tell(eqn))
    }

    /// The doorbell that tells how far the driver is, and leaves the arming as it is.
    fn tell(&mut self, eqn: u16) -> EventDoorbell {
        self.told = self.index;
        EventDoorbell {
            eqn,
            read_index: self.index,
            relative: false,
            valid: true,
            arm: false,
            quiet: false,
            disarm: false,
        }
    }

    /// From now on entries are looked for in `next` as well, which the device is about to be given;
    /// hands it back where a ring was given before and that is not over.
    fn offer(&mut self, next: Ring<S>) -> Result<(), Ring<S>> {
        if self.next.is_some() || self.left.is_some() {
            return Err(next);
        }
        self.next = Some(next);
        Ok(())
    }

    /// The device has answered to the command that gave it another ring: from the answer on it is in
    /// that one if it `switched`, else in the old one. Hands the ring back that it is not in.
    fn settle(&mut self, switched: bool) -> Settled<S> {
        if !switched && self.left.is_some() {
            // Whatever it says: it may be in either, and both are kept until it was stopped.
            return Settled::Contradicted;
        }
        match (self.left.take(), switched) {
            (Some(left), _) => Settled::Over(left),
            (None, true) if self.ring.is_written(self.index) => Settled::Unread,
            (None, true) => match self.next.take() {
                Some(next) => Settled::Over(core::mem::replace(&mut self.ring, next)),
                None => Settled::Nothing,
            },
            (None, false) => match self.next.take() {
                Some(next) => Settled::Over(next),
                None => Settled::Nothing,
            },
        }
    }
}

/// What becomes of the rings of a queue whose device has answered to the command that gives it another
/// one. What is handed back is freed without the lock.
enum Settled<S> {
    /// There was only one.
    Nothing,
    /// The device is not in this one any more, or was never, and it has no entry.
    Over(Ring<S>),
    /// There is something to read in the old one.
    Unread,
    /// The device says that it stayed in the old one, and there was an entry in the other.
    Contradicted,
}

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

#[kunit_tests(ferrite_eq)]
mod tests {
    use super::*;
    use crate::abi::EventCode;
    use core::cell::RefCell;

    struct Memory(RefCell<KVec<EventEntry>>);

    impl Ring<&Memory> {
        fn of(memory: &Memory) -> Ring<&Memory> {
            let log_entries = memory.0.borrow().len().trailing_zeros() as u8;
            Ring {
                slots: memory,
                log_entries,
            }
        }
    }

    impl Memory {
        fn new(entries: usize) -> Result<Self> {
            let mut memory = KVec::with_capacity(entries, GFP_KERNEL)?;
            for _ in 0..entries {
                memory.push(EventEntry::zeroed(), GFP_KERNEL)?;
            }
            Ok(Self(RefCell::new(memory)))
        }

        fn put(&self, slot: usize, id: u32) {
            self.0.borrow_mut()[slot] = EventEntry {
                code: EventCode::Completion.number(),
                id,
                ..EventEntry::zeroed()
            };
        }
    }

    impl EventSlots for &Memory {
        fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
            let mut memory = self.0.borrow_mut();
            let entry = memory.get_mut(slot).ok_or(EINVAL)?;
            let taken = *entry;
            entry.code = 0;
            Ok((taken.code != 0).then_some(taken))
        }

        fn is_written(&self, slot: usize) -> Result<bool> {
            Ok(self.0.borrow().get(slot).ok_or(EINVAL)?.code != 0)
        }
    }

    #[test]
    fn a_zero_code_is_an_empty_entry() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        assert_eq!(consumer.drain(|_| {}), 0);
        memory.put(1, 7);
        // Entry 0 is still empty: nothing after it counts.
        assert_eq!(consumer.drain(|_| {}), 0);
        memory.put(0, 6);
        let mut ids = KVec::new();
        assert_eq!(
            consumer.drain(|entry| {
                let _ = ids.push(entry.id, GFP_KERNEL);
            }),
            2
        );
        assert_eq!(ids.as_slice(), [6u32, 7].as_slice());
        Ok(())
    }

    #[test]
    fn consumed_entries_are_cleared_for_the_next_round() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for round in 0..5u32 {
            for slot in 0..16usize {
                memory.put(slot, round);
                assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, round)), 1);
            }
            // The ring has wrapped: old entries must not be seen again.
            assert_eq!(consumer.drain(|_| {}), 0);
        }
        assert_eq!(consumer.rearm(3, false).read_index, 80);
        Ok(())
    }

    #[test]
    fn the_ring_is_drained_before_it_is_armed() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        memory.put(0, 1);
        // Another event arrives while the first is handled; it belongs to this interrupt.
        let consumed = consumer.drain(|entry| {
            if entry.id == 1 {
                memory.put(1, 2);
            }
        });
        assert_eq!(consumed, 2);
        let doorbell = consumer.rearm(2, false);
        assert_eq!(doorbell.read_index, 2);
        assert!(doorbell.arm && doorbell.valid && !doorbell.relative && !doorbell.quiet);
        assert!(consumer.rearm(2, true).quiet);
        Ok(())
    }

    #[test]
    fn a_poller_tells_how_far_it_is_now_and_then_and_never_arms() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        let mut told = KVec::new();
        for round in 0..20u32 {
            memory.put(round as usize % 16, round);
            assert_eq!(consumer.drain(|_| {}), 1);
            if let Some(doorbell) = consumer.note_polled(0) {
                assert!(doorbell.valid && !doorbell.arm);
                told.push(doorbell.read_index, GFP_KERNEL)?;
            }
            assert!(consumer.polled);
        }
        assert_eq!(told.as_slice(), [8u32, 16].as_slice());
        // Arming tells too.
        assert_eq!(consumer.rearm(0, true).read_index, 20);
        assert!(!consumer.polled);
        for index in 20..28u32 {
            memory.put(index as usize % 16, 1);
            consumer.drain(|_| {});
            assert_eq!(consumer.note_polled(0).is_some(), index == 27);
        }
        Ok(())
    }

    #[test]
    fn a_flood_is_left_after_the_budget() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for slot in 0..16 {
            memory.put(slot, 0);
        }
        let mut slot = 0;
        let consumed = consumer.drain(|_| {
            memory.put(slot % 16, 0);
            slot += 1;
        });
        assert_eq!(consumed, BUDGET);
        Ok(())
    }

    #[test]
    fn a_full_ring_takes_an_interrupt_per_budget_and_one_doorbell_each() -> Result {
        let log_entries = 12;
        let entries = 1u32 << log_entries;
        let memory = Memory::new(entries as usize)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for slot in 0..entries {
            memory.put(slot as usize, slot);
        }
        let (mut next, mut interrupts) = (0, 0);
        // As the device does: an armed queue with unread entries interrupts at once.
        let mut told = 0;
        while told != entries {
            interrupts += 1;
            let consumed = consumer.drain(|entry| {
                assert_eq!(entry.id, next);
                next += 1;
            });
            assert!((1..=BUDGET).contains(&consumed));
            let doorbell = consumer.rearm(2, false);
            assert!(doorbell.arm && doorbell.valid);
            told = doorbell.read_index;
        }
        assert_eq!(interrupts, entries.div_ceil(BUDGET));
        Ok(())
    }

    /// A device that writes entries with their index as number, first to one ring, and from some index
    /// on to another.
    struct Writer<'a> {
        rings: [&'a Memory; 2],
        switched: Option<u32>,
        index: u32,
    }

    impl Writer<'_> {
        fn ring(&self) -> &Memory {
            self.rings[usize::from(self.switched.is_some())]
        }

        /// Writes as long as there is room, with `read` entries read.
        fn write(&mut self, count: u32, read: u32) -> u32 {
            for written in 0..count {
                let entries = self.ring().0.borrow().len();
                if self.index.wrapping_sub(read) as usize == entries {
                    return written;
                }
                let slot = self.index as usize & (entries - 1);
                assert_eq!(self.ring().0.borrow()[slot].code, 0);
                self.ring().put(slot, self.index);
                self.index = self.index.wrapping_add(1);
            }
            count
        }
    }

    #[test]
    fn a_queue_that_grows_is_read_in_order_and_to_the_end() -> Result {
        // However many entries are unread when it is offered another ring, when the device takes it
        // and when it says so; at all places of a round, and where the index wraps; whether somebody
        // reads before the answer or not.
        let counts = [
            (0, 0, 0),
            (0, 1, 0),
            (0, 0, 3),
            (16, 0, 0),
            (16, 0, 20),
            (3, 13, 30),
            (7, 2, 32),
        ];
        for start in [0u32, 5, 15, u32::MAX - 3] {
            for (before, until_taken, until_answered) in counts {
                grow(start, before, until_taken, until_answered, false)?;
                grow(start, before, until_taken, until_answered, true)?;
            }
        }
        Ok(())
    }

    fn grow(
        start: u32,
        before: u32,
        until_taken: u32,
        until_answered: u32,
        read_early: bool,
    ) -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut device = Writer {
            rings: [&old, &new],
            switched: None,
            index: start,
        };
        let mut consumer = Consumer::new(Ring::of(&old));
        consumer.index = start;
        let mut next = start;
        let mut read = |consumer: &mut Consumer<&Memory>| {
            consumer.drain(|entry| {
                assert_eq!(entry.id, next);
                next = next.wrapping_add(1);
            });
            next
        };
        device.write(before, start);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        device.write(until_taken, start);
        device.switched = Some(device.index);
        device.write(until_answered, start);
        if read_early {
            assert_eq!(read(&mut consumer), device.index);
        }
        let mut settled = consumer.settle(true);
        if matches!(settled, Settled::Unread) {
            assert!(!read_early);
            read(&mut consumer);
            settled = consumer.settle(true);
        }
        let Settled::Over(ring) = settled else {
            return Err(EINVAL);
        };
        assert_eq!((ring.log_entries, consumer.ring.log_entries), (4, 5));
        // All of the old one was read, and the device is told.
        let told = consumer.tell(7);
        assert!(told.valid && !told.arm && !told.disarm && told.eqn == 7);
        assert_eq!(told.read_index, consumer.index);
        assert!(old.0.borrow().iter().all(|entry| entry.code == 0));
        assert_eq!(read(&mut consumer), device.index);
        // It goes on in the new one only.
        let index = device.index;
        assert_eq!(device.write(100, index), 32);
        assert_eq!(read(&mut consumer), index.wrapping_add(32));
        assert!(matches!(consumer.settle(true), Settled::Nothing));
        Ok(())
    }

    /// Rings of a device that goes on between the consumer's look at the one and at the other.
    #[derive(Clone, Copy)]
    struct Racing<'a, 'b> {
        memory: &'a Memory,
        /// What the device does before it is looked whether there is something in a slot.
        meanwhile: Option<&'a RefCell<Writer<'b>>>,
    }

    impl EventSlots for Racing<'_, '_> {
        fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
            self.memory.take(slot)
        }

        fn is_written(&self, slot: usize) -> Result<bool> {
            if let Some(device) = self.meanwhile {
                let mut device = device.borrow_mut();
                if device.switched.is_none() {
                    // All that finds room in the old ring, then all that does in the new one, whose
                    // slots are free whatever is unread in the old one.
                    let start = device.index;
                    device.write(5, start);
                    let switched = device.index;
                    device.switched = Some(switched);
                    assert_eq!(device.write(100, switched), 16);
                }
            }
            self.memory.is_written(slot)
        }
    }

    #[test]
    fn a_device_that_switches_between_two_looks_loses_nothing() -> Result {
        for start in [0u32, 5, 13, u32::MAX - 7] {
            let (old, new) = (Memory::new(16)?, Memory::new(16)?);
            let device = RefCell::new(Writer {
                rings: [&old, &new],
                switched: None,
                index: start,
            });
            let ring = |memory, meanwhile| Ring {
                slots: Racing { memory, meanwhile },
                log_entries: 4,
            };
            let mut consumer = Consumer::new(ring(&old, None));
            consumer.index = start;
            assert!(consumer.offer(ring(&new, Some(&device))).is_ok());
            let mut next = start;
            assert_eq!(
                consumer.drain(|entry| {
                    assert_eq!(entry.id, next);
                    next = next.wrapping_add(1);
                }),
                21
            );
            assert_eq!(next, device.borrow().index);
            // The old one was left, and is the consumer's until the command is answered.
            assert!(consumer.left.is_some() && consumer.next.is_none());
            assert!(matches!(consumer.settle(true), Settled::Over(_)));
        }
        Ok(())
    }

    #[test]
    fn an_old_ring_is_kept_until_the_command_is_answered() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut consumer = Consumer::new(Ring::of(&old));
        old.put(0, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        // All of it is consumed, and the device may still write there.
        assert_eq!(consumer.drain(|_| {}), 1);
        assert_eq!(consumer.drain(|_| {}), 0);
        assert!(consumer.left.is_none() && consumer.next.is_some());
        old.put(1, 1);
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 1)), 1);
        // An entry in the new one, before the answer: kept still.
        new.put(2, 2);
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 2)), 1);
        assert!(consumer.left.is_some());
        match consumer.settle(true) {
            Settled::Over(ring) => assert_eq!(ring.log_entries, 4),
            _ => return Err(EINVAL),
        }
        Ok(())
    }

    #[test]
    fn an_old_ring_is_kept_until_it_was_read() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut device = Writer {
            rings: [&old, &new],
            switched: None,
            index: 0,
        };
        let mut consumer = Consumer::new(Ring::of(&old));
        device.write(16, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        // Not two at a time.
        assert!(consumer.offer(Ring::of(&new)).is_err());
        device.switched = Some(16);
        device.write(4, 0);
        assert!(matches!(consumer.settle(true), Settled::Unread));
        let mut next = 0;
        let consumed = consumer.drain(|entry| {
            assert_eq!(entry.id, next);
            next += 1;
        });
        assert_eq!(consumed, 20);
        assert!(consumer.offer(Ring::of(&new)).is_err());
        assert!(matches!(consumer.settle(true), Settled::Over(_)));
        let larger = Memory::new(64)?;
        assert!(consumer.offer(Ring::of(&larger)).is_ok());
        Ok(())
    }

    #[test]
    fn a_device_that_does_not_switch_keeps_its_ring() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut consumer = Consumer::new(Ring::of(&old));
        old.put(0, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        match consumer.settle(false) {
            Settled::Over(ring) => assert_eq!(ring.log_entries, 5),
            _ => return Err(EINVAL),
        }
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 0)), 1);
        assert_eq!(consumer.ring.log_entries, 4);
        // One that says so, and has written to the new one nonetheless.
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        new.put(1, 1);
        assert_eq!(consumer.drain(|_| {}), 1);
        assert!(matches!(consumer.settle(false), Settled::Contradicted));
        // Neither ring is given back while the device works.
        assert!(consumer.left.is_some());
        Ok(())
    }
}
