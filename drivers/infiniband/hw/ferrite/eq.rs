// SPDX-License-Identifier: GPL-2.0

//! Event queues.
//!
//! The ring is host memory that the device writes: an entry is the device's until its code is not
//! zero, then the driver's until the driver has zeroed the code and said so with its doorbell. An
//! interrupt comes once per arming; arming with the read index makes the device look for entries
//! that came meanwhile, so that none is missed.

use crate::{
    abi::{
        Buffer,
        CreateEventQueue,
        EventDoorbell,
        EventEntry, //
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
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc, //
    },
};

/// Events that are handled before the queue is armed again. What is left raises the next interrupt
/// at once, so that others get the processor in between.
const BUDGET: u32 = 128;

/// Memory of event queue entries.
pub(crate) trait Slots {
    /// Takes the entry at `slot` out, if there is one.
    fn take(&self, slot: usize) -> Result<Option<EventEntry>>;
}

impl Slots for Coherent<[EventEntry]> {
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
}

/// Where the driver is in the ring.
pub(crate) struct Consumer {
    /// Entries consumed, free-running.
    index: u32,
    /// What the device was told of that.
    told: u32,
    /// Entries were consumed by a look of [`EventQueue::poll`] since the queue was armed: the
    /// interrupt that they raised may find nothing.
    polled: bool,
    log_entries: u8,
}

impl Consumer {
    /// At the start of a ring of `1 << log_entries`.
    pub(crate) const fn new(log_entries: u8) -> Self {
        Self {
            index: 0,
            told: 0,
            polled: false,
            log_entries,
        }
    }

    /// Consumes what is there, [`BUDGET`] at the most; returns how many.
    ///
    /// The bound keeps a device that writes without end from holding the processor: arming a queue
    /// with entries that were not read raises its interrupt at once.
    pub(crate) fn drain(&mut self, slots: &impl Slots, mut each: impl FnMut(&EventEntry)) -> u32 {
        let entries = 1u32 << self.log_entries;
        let mut consumed = 0;
        while consumed < BUDGET {
            let slot = (self.index & (entries - 1)) as usize;
            let Ok(Some(entry)) = slots.take(slot) else {
                break;
            };
            self.index = self.index.wrapping_add(1);
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
        if self.index.wrapping_sub(self.told) < (1 << self.log_entries) / 2 {
            return None;
        }
        self.told = self.index;
        Some(EventDoorbell {
            eqn,
            read_index: self.index,
            relative: false,
            valid: true,
            arm: false,
            quiet: false,
            disarm: false,
        })
    }
}

/// An event queue.
#[pin_data]
pub(crate) struct EventQueue {
    number: u16,
    message: u16,
    log_entries: u8,
    ring: Lent<Coherent<[EventEntry]>>,
    #[pin]
    consumer: IrqSpinLock<Consumer>,
    /// The queue may be armed without regard to answers to commands.
    may_be_quiet: Atomic<u32>,
    /// Those who sleep until an answer to a command raises the interrupt.
    sleepers: Atomic<u32>,
    events: Atomic<u64>,
    interrupts: Atomic<u64>,
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
            ring: Lent::new(
                reach,
                Coherent::zeroed_slice(dev, 1 << log_entries, flags)?
            ),
            consumer <- new_irq_spinlock!(Consumer::new(log_entries), "ferrite_eq"),
            number,
            message,
            log_entries,
            may_be_quiet: Atomic::new(0),
            sleepers: Atomic::new(0),
            events: Atomic::new(0),
            interrupts: Atomic::new(0),
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

    /// Base-2 logarithm of its entries.
    pub(crate) fn log_entries(&self) -> u8 {
        self.log_entries
    }

    /// DMA address of its ring.
    pub(crate) fn dma_address(&self) -> u64 {
        self.ring.dma_handle()
    }

    /// Events consumed so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// Interrupts in which there were events.
    pub(crate) fn interrupts(&self) -> u64 {
        self.interrupts.load(Relaxed)
    }

    /// Entries consumed, free-running.
    pub(crate) fn read_index(&self) -> u32 {
        self.consumer.lock().index
    }

    /// The command that makes the queue known to the device.
    pub(crate) fn create_command(&self) -> CreateEventQueue {
        CreateEventQueue {
            eqn: self.number,
            message: self.message,
            log_entries: self.log_entries,
            overflow: 0,
            priority: 0,
            reserved: 0,
            ring: Buffer::contiguous(self.ring.dma_handle(), self.ring.size() as u64),
        }
    }

    /// From now on answers to commands raise interrupts only while somebody sleeps until one
    /// comes ([`EventQueue::sleep`]).
    pub(crate) fn keep_quiet(&self) {
        self.may_be_quiet.store(1, Relaxed);
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
        let consumed = consumer.drain(&*self.ring, each);
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
    pub(crate) fn service(&self, doorbells: &Doorbells, each: impl FnMut(&EventEntry)) -> bool {
        let mut consumer = self.consumer.lock();
        let consumed = consumer.drain(&*self.ring, each);
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
    use crate::abi::{EventCode, Plain};
    use core::cell::RefCell;

    struct Memory(RefCell<KVec<EventEntry>>);

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

    impl Slots for Memory {
        fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
            let mut memory = self.0.borrow_mut();
            let entry = memory.get_mut(slot).ok_or(EINVAL)?;
            let taken = *entry;
            entry.code = 0;
            Ok((taken.code != 0).then_some(taken))
        }
    }

    #[test]
    fn a_zero_code_is_an_empty_entry() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(4);
        assert_eq!(consumer.drain(&memory, |_| {}), 0);
        memory.put(1, 7);
        // Entry 0 is still empty: nothing after it counts.
        assert_eq!(consumer.drain(&memory, |_| {}), 0);
        memory.put(0, 6);
        let mut ids = KVec::new();
        assert_eq!(
            consumer.drain(&memory, |entry| {
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
        let mut consumer = Consumer::new(4);
        for round in 0..5u32 {
            for slot in 0..16usize {
                memory.put(slot, round);
                assert_eq!(
                    consumer.drain(&memory, |entry| assert_eq!(entry.id, round)),
                    1
                );
            }
            // The ring has wrapped: old entries must not be seen again.
            assert_eq!(consumer.drain(&memory, |_| {}), 0);
        }
        assert_eq!(consumer.rearm(3, false).read_index, 80);
        Ok(())
    }

    #[test]
    fn the_ring_is_drained_before_it_is_armed() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(4);
        memory.put(0, 1);
        // Another event arrives while the first is handled; it belongs to this interrupt.
        let consumed = consumer.drain(&memory, |entry| {
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
        let mut consumer = Consumer::new(4);
        let mut told = KVec::new();
        for round in 0..20u32 {
            memory.put(round as usize % 16, round);
            assert_eq!(consumer.drain(&memory, |_| {}), 1);
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
        memory.put(4, 1);
        consumer.drain(&memory, |_| {});
        assert!(consumer.note_polled(0).is_none());
        Ok(())
    }

    #[test]
    fn a_flood_is_left_after_the_budget() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(4);
        for slot in 0..16 {
            memory.put(slot, 0);
        }
        let mut slot = 0;
        let consumed = consumer.drain(&memory, |_| {
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
        let mut consumer = Consumer::new(log_entries);
        for slot in 0..entries {
            memory.put(slot as usize, slot);
        }
        let (mut next, mut interrupts) = (0, 0);
        // As the device does: an armed queue with unread entries interrupts at once.
        let mut told = 0;
        while told != entries {
            interrupts += 1;
            let consumed = consumer.drain(&memory, |entry| {
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
}
