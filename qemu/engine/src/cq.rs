// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Completion queues.

use crate::att::Att;
use crate::core::Core;
use crate::eq::{event, EventQueueState, Posted, MAX_EQ};
use crate::memory::{Host, HostMemory};
use crate::numbers::{NumberTable, Numbers};
use crate::timers::{Timer, TimerOwner};
use crate::vectors::{completions, Route};
use ferrite_abi::{
    phase_of, Buffer, CommandStatus, CompletionDoorbell, CompletionEntry, CompletionQueueState,
    CompletionRecord, CreateCompletionQueue, EventCode, ModifyCompletionQueue, Plain,
    ResizeCompletionQueue, SubFunction, COMPLETION_RECEIVE, COMPLETION_VALID_OFFSET,
    CQ_MAX_LOG_ENTRIES, EQ_MAPPED, EQ_NONE, FEATURE_VECTOR_MAP, VECTOR_MAP_PROCESSORS,
};
use std::mem::size_of;

/// Completion queues.
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

/// A resize that is under way.
#[derive(Debug)]
pub(crate) struct Resize {
    cqn: u32,
    ring: CompletionRing,
    /// Everything before was consumed, as the new record said at the beginning.
    consumer: u32,
    /// The next entry to move.
    next: u32,
}

/// A ring of completions with its record.
#[derive(Clone, Debug)]
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
    /// Where its events go: an event queue, [`EQ_NONE`] or [`EQ_MAPPED`].
    eqn: u16,
    /// The processor of its consumer, by which the map sends its events somewhere.
    processor: u16,
    /// The row of the map for its next event: that of the completion which made it due.
    row: SubFunction,
    /// The rows of its last completion, and of the last that a solicited arming waits for.
    last_rows: [SubFunction; 2],
    /// The event queue that its last event went to, or is waiting for.
    place: u16,
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
    /// The number of its last event in the event queue `place`, if it had one there.
    last_event: Option<u32>,
    /// Its event waits in the event queue's list, under this ticket.
    waiting: Option<u64>,
    /// An arming was fulfilled, and its event is not written for want of an event queue.
    owed: bool,
}

/// All completion queues.
#[derive(Debug)]
pub struct CompletionQueues {
    queues: NumberTable<CompletionQueue>,
}

impl CompletionQueues {
    pub(crate) fn new(numbers: Numbers) -> Self {
        Self {
            queues: NumberTable::new(numbers),
        }
    }

    pub(crate) fn get_mut(&mut self, cqn: u32) -> Option<&mut CompletionQueue> {
        self.queues.get_mut(cqn)
    }

    /// The moderation timer of queue `cqn`.
    pub(crate) fn timer(&self, cqn: u32) -> Option<Timer> {
        self.queues.get(cqn).map(|queue| queue.timer)
    }

    /// Refuses the number of a queue that there is not.
    pub(crate) fn check(&self, cqn: u32) -> Result<(), CommandStatus> {
        self.queues.find(cqn).map(|_| ())
    }
}

impl Core {
    /// Refuses what cannot be the event queue of a completion queue.
    pub(crate) fn check_handler(&self, eqn: u16, processor: u16) -> Result<(), CommandStatus> {
        let is_mapped = eqn == EQ_MAPPED && self.features & FEATURE_VECTOR_MAP != 0;
        if processor != 0 && (!is_mapped || processor >= VECTOR_MAP_PROCESSORS) {
            return Err(CommandStatus::BadParameter);
        }
        match eqn {
            EQ_NONE => Ok(()),
            EQ_MAPPED if is_mapped => Ok(()),
            MAX_EQ.. => Err(CommandStatus::BadNumber),
            _ if self.eqs.state(eqn) == EventQueueState::Undefined => Err(CommandStatus::NotFound),
            _ => Ok(()),
        }
    }

    /// Carries out `CreateCompletionQueue`.
    pub(crate) fn create_cq(
        &mut self,
        command: &CreateCompletionQueue,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        self.cqs.queues.check(command.cqn)?;
        if command.doorbell_page >= self.config.doorbell_pages {
            return Err(CommandStatus::BadParameter);
        }
        self.check_handler(command.eqn, command.processor)?;
        if self.cqs.queues.get(command.cqn).is_some() {
            return Err(CommandStatus::Exists);
        }
        let ring = CompletionRing::new(
            host,
            &command.buffer,
            command.log_entries,
            command.record_offset,
        )?;
        *self.cqs.queues.slot(command.cqn)? = Some(Box::new(CompletionQueue {
            ring,
            eqn: command.eqn,
            processor: command.processor,
            row: SubFunction::SendCompletions,
            last_rows: [SubFunction::SendCompletions; 2],
            place: EQ_NONE,
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
            last_event: None,
            waiting: None,
            owed: false,
        }));
        Ok(())
    }

    /// Carries out `QueryCompletionQueue`.
    pub(crate) fn query_cq(&self, cqn: u32) -> Result<CompletionQueueState, CommandStatus> {
        let queue = self.cqs.queues.find(cqn)?;
        Ok(CompletionQueueState {
            cqn,
            eqn: queue.eqn,
            processor: queue.processor,
            doorbell_page: queue.doorbell_page,
            producer: queue.producer,
            consumer: queue.consumer,
            users: queue.users,
            // They were told in so many bits.
            moderation_count: queue.moderation_count as u16,
            moderation_microseconds: (queue.moderation_ns / 1000) as u16,
            log_entries: queue.ring.log_entries,
            arming: match queue.arming {
                Arming::None => 0,
                Arming::Next => 1,
                Arming::Solicited => 2,
            },
            sequence: queue.sequence,
            failed: u8::from(queue.dead),
            reserved: [0; 4],
        })
    }

    /// Carries out `DestroyCompletionQueue`.
    pub(crate) fn destroy_cq(&mut self, cqn: u32) -> Result<(), CommandStatus> {
        let queue = self.cqs.queues.find(cqn)?;
        if queue.users > 0 {
            return Err(CommandStatus::Busy);
        }
        if let Some(ticket) = queue.waiting {
            self.eqs.forget(queue.place, ticket);
        }
        self.cqs.queues.take(cqn);
        self.forget_completion_queue_events(cqn);
        Ok(())
    }

    /// Carries out `ModifyCompletionQueue`.
    pub(crate) fn modify_cq(
        &mut self,
        command: &ModifyCompletionQueue,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        self.cqs.queues.check(command.cqn)?;
        self.check_handler(command.eqn, command.processor)?;
        let queue = self.cqs.queues.find_mut(command.cqn)?;
        // An event already written to the old queue stays there; the arming moves along.
        let old = (queue.eqn, queue.processor);
        (queue.eqn, queue.processor) = (command.eqn, command.processor);
        queue.moderation_ns = u64::from(command.moderation_microseconds) * 1000;
        queue.moderation_count = u32::from(command.moderation_count);
        if old == (command.eqn, command.processor) {
            self.cq_bound_again(command.cqn, host);
            return Ok(());
        }
        // What waits for the old event queue moves. What is written there does not hold the queue
        // up in the new one, unless it was there before: see `cq_post`.
        if let Some(ticket) = queue.waiting.take() {
            self.eqs.forget(queue.place, ticket);
            queue.owed = true;
        }
        let fulfilled = queue.arming != Arming::None && queue.since_armed > 0;
        if command.eqn == EQ_NONE {
            queue.timer.stop();
            return Ok(());
        }
        if std::mem::take(&mut queue.owed) {
            self.cq_post(command.cqn, None, host);
        }
        if old.0 == EQ_NONE && fulfilled {
            // What a later arming waited for has come while nobody was to be told.
            let now = self.now;
            self.cq_notify(command.cqn, now, host);
        }
        Ok(())
    }

    /// Begins to carry out `ResizeCompletionQueue`.
    pub(crate) fn begin_resize(
        &mut self,
        command: &ResizeCompletionQueue,
        host: &dyn Host,
    ) -> Result<Resize, CommandStatus> {
        let queue = self.cqs.queues.find_mut(command.cqn)?;
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
        if unread > queue.ring.entries() || unread > ring.entries() {
            return Err(CommandStatus::BadParameter);
        }
        Ok(Resize {
            cqn: command.cqn,
            ring,
            consumer,
            next: consumer,
        })
    }

    /// Goes on with a resize: moves `limit` entries at most. `None` when there are more. Entries
    /// that are written meanwhile go to the old ring and are moved like all others.
    pub(crate) fn resize_some(
        &mut self,
        resize: &mut Resize,
        limit: u32,
        host: &dyn Host,
    ) -> Option<Result<(), CommandStatus>> {
        let Some(queue) = self.cqs.get_mut(resize.cqn).filter(|queue| !queue.dead) else {
            return Some(Err(CommandStatus::BadState));
        };
        let ring = &resize.ring;
        if queue.producer.wrapping_sub(resize.consumer) > ring.entries() {
            return Some(Err(CommandStatus::BadParameter));
        }
        for _ in 0..limit {
            if resize.next == queue.producer {
                break;
            }
            self.work += 1;
            let mut entry = CompletionEntry::zeroed();
            let moved = queue
                .ring
                .att
                .read(host, queue.ring.offset(resize.next), entry.as_bytes_mut())
                .is_ok()
                && ring.write(host, resize.next, &mut entry).is_ok();
            if !moved {
                return Some(Err(CommandStatus::HostMemory));
            }
            resize.next = resize.next.wrapping_add(1);
        }
        if resize.next != queue.producer {
            return None;
        }
        queue.consumer = resize.consumer;
        queue.ring = ring.clone();
        Some(Ok(()))
    }

    /// A completion queue doorbell from doorbell page `page`.
    pub(crate) fn cq_doorbell(&mut self, page: u32, word: u64, now: u64, host: &mut dyn Host) {
        let doorbell = CompletionDoorbell::decode(word);
        let queue = match self.cqs.get_mut(doorbell.cqn) {
            Some(queue) if queue.doorbell_page == page && !queue.dead => queue,
            _ => {
                self.counters.bad_doorbells += 1;
                return;
            }
        };
        // Entries that the host had not seen. A doorbell may come late, when the ring has gone
        // round since; but nothing can be seen that was not written.
        let unseen = queue.producer.wrapping_sub(doorbell.seen);
        if unseen > u32::MAX / 2 {
            self.counters.bad_doorbells += 1;
            return;
        }
        queue.sequence = doorbell.sequence;
        let awaited = if doorbell.solicited {
            // Beyond `unseen` the last solicited entry is one that was seen.
            let ahead = queue.solicited_end.wrapping_sub(doorbell.seen);
            if ahead <= unseen {
                ahead
            } else {
                0
            }
        } else {
            unseen
        };
        (queue.arming, queue.since_armed) = match (queue.arming, doorbell.solicited) {
            (Arming::None, true) => (Arming::Solicited, awaited),
            (Arming::None, false) => (Arming::Next, awaited),
            // What an earlier arming waits for is still waited for, and what it holds back by
            // moderation will still come, whatever the host has seen since.
            (Arming::Solicited, true) => (Arming::Solicited, queue.since_armed.max(awaited)),
            _ => (Arming::Next, queue.since_armed.max(awaited)),
        };
        if awaited > 0 {
            queue.row = queue.last_rows[usize::from(doorbell.solicited)];
            self.cq_notify(doorbell.cqn, now, host);
        }
    }

    /// Raises the event of a queue whose arming is fulfilled, or holds it back by moderation.
    fn cq_notify(&mut self, cqn: u32, now: u64, host: &mut dyn Host) {
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return;
        };
        if queue.eqn == EQ_NONE {
            // The arming is kept until there is somebody to tell.
            return;
        }
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
        if let Some(queue) = self.cqs.get_mut(cqn) {
            queue.arming = Arming::None;
            queue.timer.stop();
            self.cq_post(cqn, None, host);
        }
    }

    /// Where the event of a queue that has a handler goes.
    fn completion_route(&self, queue: &CompletionQueue) -> Route {
        if queue.eqn == EQ_MAPPED {
            self.route_completion(queue.row, queue.processor)
        } else {
            Route::to(queue.eqn)
        }
    }

    /// Whether the completions of a queue, of one kind, are told of in a queue of low latency.
    pub(crate) fn completes_urgently(&self, cqn: u32, receive: bool) -> bool {
        let Some(queue) = self.cqs.queues.get(cqn) else {
            return false;
        };
        let eqn = match queue.eqn {
            EQ_MAPPED => {
                let row = completions(receive);
                self.route_completion(row, queue.processor).eqn
            }
            eqn => eqn,
        };
        self.eqs.is_low_latency(eqn)
    }

    /// Whether the event of a queue that is held back goes to a queue of low latency.
    pub(crate) fn tells_urgently(&self, cqn: u32) -> bool {
        let queue = self.cqs.queues.get(cqn);
        queue.is_some_and(|queue| self.eqs.is_low_latency(self.completion_route(queue).eqn))
    }

    /// Writes the event of an arming that is fulfilled, or has it wait: behind others who do, unless
    /// it is its `turn` in that event queue.
    fn cq_post(&mut self, cqn: u32, turn: Option<u16>, host: &mut dyn Host) {
        let Some(queue) = self.cqs.queues.get(cqn) else {
            return;
        };
        let (bound, place) = (queue.eqn, queue.place);
        if queue
            .waiting
            .is_some_and(|ticket| self.eqs.is_waiting(place, ticket))
        {
            // One event is for both.
            return;
        }
        let route = self.completion_route(queue);
        let Some(queue) = self.cqs.get_mut(cqn) else {
            return;
        };
        if bound == EQ_NONE {
            queue.owed = true;
            return;
        }
        if place != route.eqn {
            // There is one unread event of it in each event queue, wherever it was meanwhile.
            if let Some(index) = queue.last_event.take() {
                self.eqs.leave(place, cqn, index);
            }
            queue.last_event = self.eqs.come_back(route.eqn, cqn);
            queue.place = route.eqn;
        }
        let last = queue.last_event;
        let entry = event(EventCode::Completion, cqn, u64::from(queue.sequence), 0);
        let posted = self.post_completion_event(route, last, turn, entry, host);
        if let Some(queue) = self.cqs.get_mut(cqn) {
            queue.waiting = None;
            match posted {
                Posted::Written(index) => queue.last_event = Some(index),
                Posted::Waiting(ticket) => queue.waiting = Some(ticket),
                Posted::Not => {}
            }
        }
    }

    /// A queue is bound to what it was bound to. Where its event waited in an event queue that is
    /// gone, it is due in the one that is there instead by now.
    fn cq_bound_again(&mut self, cqn: u32, host: &mut dyn Host) {
        let Some(queue) = self.cqs.queues.get(cqn) else {
            return;
        };
        let waits = queue
            .waiting
            .is_some_and(|ticket| !self.eqs.is_waiting(queue.place, ticket));
        let eqn = self.completion_route(queue).eqn;
        if waits && self.eqs.state(eqn) != EventQueueState::Undefined {
            self.cq_post(cqn, None, host);
        }
    }

    /// Event queue `eqn` is gone where a queue waited under `ticket`: what the map sends elsewhere
    /// goes there.
    pub(crate) fn cq_left_behind(&mut self, cqn: u32, ticket: u64, eqn: u16, host: &mut dyn Host) {
        let waits = |queue: &&CompletionQueue| queue.waiting == Some(ticket);
        let queue = self.cqs.queues.get(cqn).filter(waits);
        if queue.is_some_and(|queue| self.completion_route(queue).eqn != eqn) {
            self.cq_post(cqn, None, host);
        }
    }

    /// Tries again to write an event that waited under `ticket` in queue `eqn`, where it is its turn.
    pub(crate) fn cq_retry(&mut self, cqn: u32, ticket: u64, eqn: u16, host: &mut dyn Host) {
        let queue = self.cqs.get_mut(cqn);
        if queue.is_some_and(|queue| queue.waiting == Some(ticket)) {
            self.cq_post(cqn, Some(eqn), host);
        }
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
        entry.timestamp = now;
        let is_receive = entry.flags & COMPLETION_RECEIVE != 0;
        if let Some(misbehaving) = &mut self.misbehaviour {
            if misbehaving.loses(&entry) {
                return Ok(());
            }
            misbehaving.spoil_completion(&mut entry);
        }
        let written = queue
            .make_room(host)
            .and_then(|()| queue.ring.write(host, queue.producer, &mut entry));
        if written.is_err() {
            if let Some(ticket) = queue.fail() {
                self.eqs.forget(queue.place, ticket);
            }
            self.async_event(EventCode::CompletionQueueError, cqn, host);
            return Err(CompletionQueueDead);
        }
        queue.producer = queue.producer.wrapping_add(1);
        let row = completions(is_receive);
        queue.last_rows[0] = row;
        if solicited {
            queue.solicited_end = queue.producer;
            queue.last_rows[1] = row;
        }
        let fulfilled = match queue.arming {
            Arming::None => false,
            Arming::Next => true,
            Arming::Solicited => solicited,
        };
        self.counters.completions += 1;
        if fulfilled {
            queue.row = row;
            queue.since_armed = queue.since_armed.saturating_add(1);
            self.cq_notify(cqn, now, host);
        }
        Ok(())
    }
}

impl CompletionQueue {
    /// It can be destroyed and nothing else: whoever waits for it learns of the failure. Returns
    /// the ticket of an event that waits.
    fn fail(&mut self) -> Option<u64> {
        self.dead = true;
        self.arming = Arming::None;
        self.owed = false;
        self.timer.stop();
        self.waiting.take()
    }

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

#[cfg(test)]
mod tests;
