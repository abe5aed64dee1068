// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Completion queues.

use crate::att::Att;
use crate::core::Core;
use crate::eq::{event, EventQueueState};
use crate::memory::{Host, HostMemory};
use crate::timers::{Timer, TimerOwner};
use ferrite_abi::{
    phase_of, Buffer, CommandStatus, CompletionDoorbell, CompletionEntry, CompletionRecord,
    CreateCompletionQueue, EventCode, ModifyCompletionQueue, Plain, ResizeCompletionQueue,
    COMPLETION_VALID_OFFSET, CQ_MAX_LOG_ENTRIES, DOORBELL_PAGES,
};
use std::mem::size_of;

/// Completion queues: numbers from 0 to one less than this.
pub const MAX_CQ: u32 = 1 << 14;

const ENTRY_SIZE: u64 = size_of::<CompletionEntry>() as u64;

/// A completion could not be written: the queue overflowed or its memory is gone. The queue pair
/// that wanted to complete has to go to the error state with [`crate::qp::fail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionQueueDead;

/// What a completion queue waits for to raise its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arming {
    None,
    Next,
    Solicited,
}

/// A ring of completions with its record.
#[derive(Debug)]
struct CompletionRing {
    att: Att,
    log_entries: u8,
    /// DMA address of the consumer index in the record.
    consumer_address: u64,
}

impl CompletionRing {
    fn new<M: HostMemory + ?Sized>(
        memory: &M,
        buffer: &Buffer,
        log_entries: u8,
        record_offset: u32,
    ) -> Result<Self, CommandStatus> {
        if log_entries > CQ_MAX_LOG_ENTRIES {
            return Err(CommandStatus::BadParameter);
        }
        let att = Att::new(buffer).map_err(|_| CommandStatus::BadParameter)?;
        let ring_size = ENTRY_SIZE << log_entries;
        let record = u64::from(record_offset);
        let record_end = record + size_of::<CompletionRecord>() as u64;
        if ring_size > att.length()
            || record_end > att.length()
            || record < ring_size
            || att.offset_in_page(0) % 64 != 0
            || att.offset_in_page(record) % 64 != 0
        {
            return Err(CommandStatus::BadParameter);
        }
        let consumer_address = att
            .address_of(memory, record, 4)
            .map_err(|_| CommandStatus::HostMemory)?;
        Ok(Self {
            att,
            log_entries,
            consumer_address,
        })
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn offset(&self, index: u32) -> u64 {
        u64::from(index & (self.entries() - 1)) * ENTRY_SIZE
    }

    /// Writes an entry, its last eight bytes last and together.
    fn write<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        index: u32,
        entry: &mut CompletionEntry,
    ) -> Result<(), CompletionQueueDead> {
        entry.phase = phase_of(index, self.log_entries);
        let (body, valid) = entry.as_bytes().split_at(COMPLETION_VALID_OFFSET);
        let valid = u64::from_le_bytes(valid.try_into().map_err(|_| CompletionQueueDead)?);
        let address = self
            .att
            .address_of(memory, self.offset(index), ENTRY_SIZE)
            .map_err(|_| CompletionQueueDead)?;
        memory
            .write(address, body)
            .and_then(|()| memory.store_u64(address + COMPLETION_VALID_OFFSET as u64, valid))
            .map_err(|_| CompletionQueueDead)
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    ring: CompletionRing,
    eqn: u16,
    doorbell_page: u32,
    /// Entries written, free-running.
    producer: u32,
    /// Entries the host is known to have consumed.
    consumer: u32,
    /// The index after the last entry that a solicited arming waits for.
    solicited_end: u32,
    arming: Arming,
    sequence: u8,
    dead: bool,
    /// Queue pairs that use it, one for each of their queues.
    pub(crate) users: u32,
    moderation_ns: u64,
    moderation_count: u32,
    /// Completions since the arming, for moderation.
    since_armed: u32,
    timer: Timer,
}

/// All completion queues.
#[derive(Debug, Default)]
pub struct CompletionQueues {
    queues: Vec<Option<Box<CompletionQueue>>>,
}

impl CompletionQueues {
    pub(crate) fn get_mut(&mut self, cqn: u32) -> Option<&mut CompletionQueue> {
        self.queues.get_mut(cqn as usize)?.as_deref_mut()
    }

    /// The moderation timer of queue `cqn`.
    pub(crate) fn timer(&self, cqn: u32) -> Option<Timer> {
        self.queues
            .get(cqn as usize)?
            .as_ref()
            .map(|queue| queue.timer)
    }

    /// True when there is such a queue.
    pub fn exists(&self, cqn: u32) -> bool {
        matches!(self.queues.get(cqn as usize), Some(Some(_)))
    }

    /// Carries out `DestroyCompletionQueue`.
    pub(crate) fn destroy(&mut self, cqn: u32) -> Result<(), CommandStatus> {
        if cqn >= MAX_CQ {
            return Err(CommandStatus::BadNumber);
        }
        match self.queues.get_mut(cqn as usize) {
            Some(Some(queue)) if queue.users > 0 => Err(CommandStatus::Busy),
            Some(slot @ Some(_)) => {
                *slot = None;
                Ok(())
            }
            _ => Err(CommandStatus::NotFound),
        }
    }
}

impl Core {
    /// Carries out `CreateCompletionQueue`.
    pub(crate) fn create_cq(
        &mut self,
        command: &CreateCompletionQueue,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        if command.cqn >= MAX_CQ {
            return Err(CommandStatus::BadNumber);
        }
        if command.doorbell_page as usize >= DOORBELL_PAGES {
            return Err(CommandStatus::BadParameter);
        }
        if self.eqs.state(command.eqn) == EventQueueState::Undefined {
            return Err(CommandStatus::NotFound);
        }
        if self.cqs.exists(command.cqn) {
            return Err(CommandStatus::Exists);
        }
        let ring = CompletionRing::new(
            host,
            &command.buffer,
            command.log_entries,
            command.record_offset,
        )?;
        let index = command.cqn as usize;
        if self.cqs.queues.len() <= index {
            self.cqs.queues.resize_with(index + 1, || None);
        }
        self.cqs.queues[index] = Some(Box::new(CompletionQueue {
            ring,
            eqn: command.eqn,
            doorbell_page: command.doorbell_page,
            producer: 0,
            consumer: 0,
            solicited_end: 0,
            arming: Arming::None,
            sequence: 0,
            dead: false,
            users: 0,
            moderation_ns: 0,
            moderation_count: 0,
            since_armed: 0,
            timer: Timer::default(),
        }));
        Ok(())
    }

    /// Carries out `ModifyCompletionQueue`.
    pub(crate) fn modify_cq(
        &mut self,
        command: &ModifyCompletionQueue,
    ) -> Result<(), CommandStatus> {
        if command.cqn >= MAX_CQ {
            return Err(CommandStatus::BadNumber);
        }
        if self.eqs.state(command.eqn) == EventQueueState::Undefined {
            return Err(CommandStatus::NotFound);
        }
        let queue = self
            .cqs
            .get_mut(command.cqn)
            .ok_or(CommandStatus::NotFound)?;
        // An event already written to the old queue stays there; the arming moves along.
        queue.eqn = command.eqn;
        queue.moderation_ns = u64::from(command.moderation_microseconds) * 1000;
        queue.moderation_count = u32::from(command.moderation_count);
        Ok(())
    }

    /// Carries out `ResizeCompletionQueue`.
    pub(crate) fn resize_cq(
        &mut self,
        command: &ResizeCompletionQueue,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        if command.cqn >= MAX_CQ {
            return Err(CommandStatus::BadNumber);
        }
        let queue = self
            .cqs
            .get_mut(command.cqn)
            .ok_or(CommandStatus::NotFound)?;
        if queue.dead {
            return Err(CommandStatus::BadState);
        }
        let ring = CompletionRing::new(
            host,
            &command.buffer,
            command.log_entries,
            command.record_offset,
        )?;
        // The new record says what was consumed; everything after that is moved, to the places
        // and phases that the same indices have in the new ring.
        let consumer = host
            .load_u32(ring.consumer_address)
            .map_err(|_| CommandStatus::HostMemory)?;
        let unread = queue.producer.wrapping_sub(consumer);
        if unread > queue.ring.entries() {
            return Err(CommandStatus::BadParameter);
        }
        if unread > ring.entries() {
            return Err(CommandStatus::NoResource);
        }
        let mut index = consumer;
        while index != queue.producer {
            let mut entry = CompletionEntry::zeroed();
            queue
                .ring
                .att
                .read(host, queue.ring.offset(index), entry.as_bytes_mut())
                .map_err(|_| CommandStatus::HostMemory)?;
            ring.write(host, index, &mut entry)
                .map_err(|_| CommandStatus::HostMemory)?;
            index = index.wrapping_add(1);
        }
        queue.consumer = consumer;
        queue.ring = ring;
        Ok(())
    }

    /// A completion queue doorbell from doorbell page `page`.
    pub(crate) fn cq_doorbell(&mut self, page: u32, word: u64, now: u64, host: &mut dyn Host) {
        let doorbell = CompletionDoorbell::decode(word);
        let queue = match self.cqs.get_mut(doorbell.cqn) {
            Some(queue) if queue.doorbell_page == page => queue,
            _ => {
                self.counters.bad_doorbells += 1;
                return;
            }
        };
        let unread = queue.producer.wrapping_sub(doorbell.consumer);
        if unread > queue.ring.entries() {
            self.counters.bad_doorbells += 1;
            return;
        }
        if unread < queue.producer.wrapping_sub(queue.consumer) {
            queue.consumer = doorbell.consumer;
        }
        queue.sequence = doorbell.sequence;
        queue.arming = if doorbell.solicited {
            Arming::Solicited
        } else {
            Arming::Next
        };
        let awaited = if doorbell.solicited {
            // Beyond `unread` the last solicited entry is one that was consumed long ago.
            queue.solicited_end.wrapping_sub(doorbell.consumer).min(
                if queue.solicited_end.wrapping_sub(doorbell.consumer) > unread {
                    0
                } else {
                    unread
                },
            )
        } else {
            unread
        };
        queue.since_armed = awaited;
        if awaited > 0 {
            self.cq_notify(doorbell.cqn, now, host);
        }
    }

    /// Raises the event of a queue whose arming is fulfilled, or holds it back by moderation.
    fn cq_notify(&mut self, cqn: u32, now: u64, host: &mut dyn Host) {
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return;
        };
        let held = queue.moderation_ns != 0
            && queue.moderation_count > 1
            && queue.since_armed < queue.moderation_count;
        if held {
            if !queue.timer.is_running() {
                let deadline = now.saturating_add(queue.moderation_ns);
                let owner = TimerOwner::CompletionQueue(cqn);
                self.timers.start(&mut queue.timer, owner, deadline);
            }
            return;
        }
        self.cq_event(cqn, host);
    }

    fn cq_event(&mut self, cqn: u32, host: &mut dyn Host) {
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return;
        };
        queue.arming = Arming::None;
        queue.timer.stop();
        let (eqn, sequence) = (queue.eqn, queue.sequence);
        let entry = event(EventCode::Completion, cqn, u64::from(sequence), 0);
        self.post_event(eqn, entry, host);
    }

    /// A moderation timer's entry came up.
    pub(crate) fn cq_timer(&mut self, cqn: u32, entry: u64, now: u64, host: &mut dyn Host) {
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return;
        };
        let owner = TimerOwner::CompletionQueue(cqn);
        if self.timers.expired(&mut queue.timer, owner, entry, now)
            && queue.arming != Arming::None
            && queue.since_armed > 0
        {
            self.cq_event(cqn, host);
        }
    }

    /// Writes a completion. `solicited` is for entries that a solicited arming waits for.
    pub(crate) fn write_completion(
        &mut self,
        cqn: u32,
        mut entry: CompletionEntry,
        solicited: bool,
        host: &mut dyn Host,
    ) -> Result<(), CompletionQueueDead> {
        let now = self.now;
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return Err(CompletionQueueDead);
        };
        if queue.dead {
            return Err(CompletionQueueDead);
        }
        entry.timestamp_low = now as u32;
        entry.timestamp_high = (now >> 32) as u32;
        let written = queue
            .make_room(host)
            .and_then(|()| queue.ring.write(host, queue.producer, &mut entry));
        if written.is_err() {
            queue.dead = true;
            self.async_event(EventCode::CompletionQueueError, cqn, host);
            return Err(CompletionQueueDead);
        }
        queue.producer = queue.producer.wrapping_add(1);
        if solicited {
            queue.solicited_end = queue.producer;
        }
        let fulfilled = match queue.arming {
            Arming::None => false,
            Arming::Next => true,
            Arming::Solicited => solicited,
        };
        self.counters.completions += 1;
        if fulfilled {
            queue.since_armed = queue.since_armed.saturating_add(1);
            self.cq_notify(cqn, now, host);
        }
        Ok(())
    }
}

impl CompletionQueue {
    /// Checks that the next slot was consumed; looks at the record only when it seems full.
    fn make_room<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), CompletionQueueDead> {
        if self.producer.wrapping_sub(self.consumer) < self.ring.entries() {
            return Ok(());
        }
        let consumer = memory
            .load_u32(self.ring.consumer_address)
            .map_err(|_| CompletionQueueDead)?;
        if self.producer.wrapping_sub(consumer) >= self.ring.entries() {
            return Err(CompletionQueueDead);
        }
        self.consumer = consumer;
        Ok(())
    }
}
