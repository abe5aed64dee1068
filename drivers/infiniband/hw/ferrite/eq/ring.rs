// SPDX-License-Identifier: GPL-2.0

//! The ring of an event queue and who reads it, who moves to a larger one while the device writes.

use super::BUDGET;
use crate::{
    abi::{
        Buffer,
        EventDoorbell,
        EventEntry, //
    },
    kernel_ext::barrier::dma_rmb,
    lent::{
        DeviceReach,
        Lent, //
    }, //
};
use kernel::{
    alloc::Flags,
    device::{
        Bound,
        Device, //
    },
    dma::Coherent,
    prelude::*,
    sync::Arc, //
};

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
    pub(super) slots: S,
    pub(super) log_entries: u8,
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
    pub(super) fn buffer(&self) -> Buffer {
        Buffer::contiguous(self.slots.dma_handle(), self.slots.size() as u64)
    }
}

/// Where the driver is in the ring, or in two of them while the device leaves one for the other.
pub(crate) struct Consumer<S> {
    /// Entries consumed, free-running.
    pub(super) index: u32,
    /// What the device was told of that.
    told: u32,
    /// Entries were consumed by a look of [`EventQueue::poll`](super::EventQueue::poll) since the queue was armed: the
    /// interrupt that they raised may find nothing.
    pub(super) polled: bool,
    /// It was armed.
    armed: bool,
    /// What is read.
    pub(super) ring: Ring<S>,
    /// What the device was given to go on in, until an entry is found there.
    pub(super) next: Option<Ring<S>>,
    /// What was read before that. The device may not have said yet that it left it.
    pub(super) left: Option<Ring<S>>,
}

impl<S: EventSlots> Consumer<S> {
    /// At the start of a ring.
    pub(crate) const fn new(ring: Ring<S>) -> Self {
        Self {
            index: 0,
            told: 0,
            polled: false,
            armed: false,
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
    pub(super) fn drain_some(&mut self, budget: u32, mut each: impl FnMut(&EventEntry)) -> u32 {
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
        self.armed = true;
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
    pub(super) fn note_polled(&mut self, eqn: u16) -> Option<EventDoorbell> {
        self.polled = true;
        if self.index.wrapping_sub(self.told) < (1 << self.ring.log_entries) / 2 {
            return None;
        }
        Some(self.tell(eqn))
    }

    /// The doorbell that tells how far the driver is, and leaves the arming as it is.
    pub(super) fn tell(&mut self, eqn: u16) -> EventDoorbell {
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
    pub(super) fn offer(&mut self, next: Ring<S>) -> Result<(), Ring<S>> {
        if self.next.is_some() || self.left.is_some() {
            return Err(next);
        }
        self.next = Some(next);
        Ok(())
    }

    /// The device has answered to the command that gave it another ring: from the answer on it is in
    /// that one if it `switched`, else in the old one. Hands the ring back that it is not in.
    pub(super) fn settle(&mut self, switched: bool) -> Settled<S> {
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

/// What the driver knows of a queue's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueView {
    /// Base-2 logarithm of the entries of the ring that is read.
    pub(crate) log_entries: u8,
    /// Entries consumed, and what the device was told of that: free-running.
    pub(crate) index: u32,
    pub(crate) told: u32,
    /// Nothing was consumed since it was armed: the next entry raises the interrupt, or has.
    pub(crate) armed: bool,
    /// There is one that was not consumed.
    pub(crate) unread: bool,
    /// There are two rings, as the device is to leave one, or has.
    pub(crate) moving: bool,
}

impl<S: EventSlots> Consumer<S> {
    /// What there is to see, in host memory.
    pub(super) fn look(&self) -> QueueView {
        QueueView {
            log_entries: self.ring.log_entries,
            index: self.index,
            told: self.told,
            armed: self.armed && self.index == self.told && !self.polled,
            unread: self.ring.is_written(self.index),
            moving: self.next.is_some() || self.left.is_some(),
        }
    }
}

/// What becomes of the rings of a queue whose device has answered to the command that gives it another
/// one. What is handed back is freed without the lock.
pub(super) enum Settled<S> {
    /// There was only one.
    Nothing,
    /// The device is not in this one any more, or was never, and it has no entry.
    Over(Ring<S>),
    /// There is something to read in the old one.
    Unread,
    /// The device says that it stayed in the old one, and there was an entry in the other.
    Contradicted,
}
