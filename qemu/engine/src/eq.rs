// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Event queues: circular, in host memory, each with a message number.
//!
//! To the device a queue is undefined, unarmed or armed. Entries are written in every defined
//! state; an interrupt is raised only for an armed queue, which is unarmed by that. A queue can be
//! given another ring while events come; its indices go on.

use crate::att::Att;
use crate::core::Core;
use crate::memory::{Host, HostMemory};
use crate::pins::PinBits;
use crate::timers::{Timer, TimerOwner};
use crate::vectors::Route;
use ferrite_abi::{
    Buffer, CommandStatus, CreateEventQueue, EventCode, EventDoorbell, EventEntry, EventOverflow,
    EventPriority, FatalCode, Management, ModifyEventQueue, Plain, SwitchEventQueue, EQ_CONTROL,
    EQ_MAX_LOG_ENTRIES, EQ_MIN_LOG_ENTRIES, FEATURE_EQ_CONTROL, FEATURE_QUIET_COMMANDS,
    MEMORY_ERRORS_UNTOLD, MESSAGE_OF_QUEUE,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem::{offset_of, size_of};

/// Event queues, the fixed ones included.
pub const MAX_EQ: u16 = 514;

/// Asynchronous events that a queue pair can raise.
const QUEUE_PAIR_EVENTS: [EventCode; 6] = [
    EventCode::QueuePairFatal,
    EventCode::QueuePairRequestError,
    EventCode::QueuePairAccessError,
    EventCode::CommunicationEstablished,
    EventCode::SendQueueDrained,
    EventCode::LastWqeReached,
];
/// Asynchronous events that a completion queue can raise.
const COMPLETION_QUEUE_EVENTS: [EventCode; 1] = [EventCode::CompletionQueueError];
/// Events of a channel.
const CHANNEL_EVENTS: [EventCode; 4] = [
    EventCode::ChannelPackets,
    EventCode::ChannelDescriptors,
    EventCode::ChannelPoolLow,
    EventCode::ChannelBadBuffers,
];
/// Asynchronous events that a shared receive queue can raise.
const SHARED_RECEIVE_EVENTS: [EventCode; 2] = [EventCode::SrqLimit, EventCode::SrqError];

/// Which of the states of a queue a number has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventQueueState {
    /// There is no such queue. An event for it stops the device.
    Undefined,
    /// Entries are written, no interrupt is raised.
    Unarmed,
    /// The next entry raises an interrupt.
    Armed,
}

/// What became of the event of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    /// It is the entry of this number.
    Written(u32),
    /// It waits in the event queue's list under this ticket.
    Waiting(u64),
    /// The device has stopped.
    Not,
}

/// Events that found no room, in the order they happened.
///
/// An event of the same kind about the same object takes the place of the earlier one: so there are
/// never more than kinds of events and objects, however long a driver does not look.
#[derive(Debug, Default)]
struct Backlog {
    /// By their tickets, each with the message that it interrupts by.
    entries: BTreeMap<u64, (EventEntry, u16)>,
    /// The ticket of the event of a kind and an object.
    places: HashMap<(u32, u32), u64>,
}

impl Backlog {
    fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn push(&mut self, ticket: u64, mut entry: EventEntry, message: u16) {
        let of = (entry.code, entry.id);
        let place = *self.places.entry(of).or_insert(ticket);
        if let Some((earlier, _)) = self.entries.get(&place) {
            entry.param1 |= untold(earlier);
        }
        self.entries.insert(place, (entry, message));
    }

    /// The ticket of the first.
    fn first(&self) -> Option<u64> {
        self.entries.first_key_value().map(|(ticket, _)| *ticket)
    }

    fn pop(&mut self) -> Option<(EventEntry, u16)> {
        let (_, (entry, message)) = self.entries.pop_first()?;
        self.places.remove(&(entry.code, entry.id));
        Some((entry, message))
    }

    /// The event queues whose overflow is told of by what is here.
    fn overflows(&self) -> Vec<u16> {
        let code = EventCode::EventQueueOverflow.number();
        let entries = self.entries.values().map(|(entry, _)| entry);
        entries
            .filter(|entry| entry.code == code)
            .map(|entry| entry.id as u16)
            .collect()
    }

    /// Drops the event of a kind and an object, if there is one.
    fn remove(&mut self, code: u32, id: u32) -> Option<EventEntry> {
        let place = self.places.remove(&(code, id))?;
        self.entries.remove(&place).map(|(entry, _)| entry)
    }
}

/// What the event that takes the place of `earlier` says of it: of errors of memory, that there is
/// one more whose address is not told.
fn untold(earlier: &EventEntry) -> u64 {
    match EventCode::from_number(earlier.code) {
        Some(EventCode::MemoryErrorInternal | EventCode::MemoryErrorExternal) => {
            let before = (earlier.param1 >> MEMORY_ERRORS_UNTOLD) as u32;
            u64::from(before.saturating_add(1)) << MEMORY_ERRORS_UNTOLD
        }
        _ => 0,
    }
}

/// Completion queues whose event waits, each at most once, by their tickets.
#[derive(Debug, Default)]
struct Waiting {
    /// For room.
    room: BTreeMap<u64, u32>,
    /// For their last event to be read, each with that entry.
    unread: HashMap<u64, (u32, u64)>,
    /// The same by their entries: what a doorbell does is by the entries that it tells of, and not
    /// by how many wait.
    entries: BTreeSet<(u64, u64)>,
}

impl Waiting {
    fn contains(&self, ticket: u64) -> bool {
        self.room.contains_key(&ticket) || self.unread.contains_key(&ticket)
    }

    fn for_room(&mut self, ticket: u64, cqn: u32) {
        self.room.insert(ticket, cqn);
    }

    fn for_entry(&mut self, ticket: u64, cqn: u32, entry: u64) {
        self.unread.insert(ticket, (cqn, entry));
        self.entries.insert((entry, ticket));
    }

    fn remove(&mut self, ticket: u64) {
        if let Some((_, entry)) = self.unread.remove(&ticket) {
            self.entries.remove(&(entry, ticket));
        } else {
            self.room.remove(&ticket);
        }
    }

    /// All entries before `end` were read: whoever waited for one waits for room from now on, in
    /// the order in which all of them came. The last of them, in that order.
    fn release(&mut self, end: u64) -> Option<u64> {
        let mut last = None;
        while let Some(&(entry, ticket)) = self.entries.first().filter(|first| first.0 < end) {
            self.entries.remove(&(entry, ticket));
            if let Some((cqn, _)) = self.unread.remove(&ticket) {
                self.room.insert(ticket, cqn);
                last = last.max(Some(ticket));
            }
        }
        last
    }

    /// All, for whatever they wait.
    fn all(self) -> BTreeMap<u64, u32> {
        let mut all = self.room;
        all.extend(self.unread.iter().map(|(&ticket, &(cqn, _))| (ticket, cqn)));
        all
    }
}

/// What found no room and is next.
enum Next {
    /// An event, with the message that it interrupts by.
    Event(EventEntry, u16),
    /// The event of a completion queue that waits under this ticket.
    Completion(u64, u32),
}

/// Runs of messages that are kept of a queue.
const MAX_RUNS: usize = 1024;

/// The messages that unread entries interrupt by: runs of entries with the same, each with the
/// number of its first. What is before the first run has the queue's own message.
///
/// A host may tell of its reading late or never: of more than [`MAX_RUNS`] the last is for all that
/// is written, by the queue's own message. Without the vector map there are none.
#[derive(Debug, Default)]
struct Messages {
    runs: VecDeque<(u32, u16)>,
}

impl Messages {
    /// Entry `index` is written.
    fn push(&mut self, index: u32, message: u16) {
        let last = self.runs.back().map_or(MESSAGE_OF_QUEUE, |run| run.1);
        let message = if self.is_full() {
            MESSAGE_OF_QUEUE
        } else {
            message
        };
        if message != last {
            self.runs.push_back((index, message));
        }
    }

    /// Whether what is written from now on has the queue's own message.
    fn is_full(&self) -> bool {
        self.runs.len() >= MAX_RUNS - 1
    }

    /// All before entry `index` were read.
    fn read_to(&mut self, index: u32) {
        let began = |first: u32| index.wrapping_sub(first) <= u32::MAX / 2;
        while self.runs.get(1).is_some_and(|run| began(run.0)) {
            self.runs.pop_front();
        }
        match self.runs.front_mut() {
            Some(&mut (first, MESSAGE_OF_QUEUE)) if began(first) => {
                self.runs.pop_front();
            }
            // However long a run is, it begins not far behind what is unread.
            Some(run) if began(run.0) => run.0 = index,
            _ => {}
        }
    }

    /// The message of entry `index`, all before which were read.
    fn of(&self, index: u32) -> u16 {
        match self.runs.front() {
            Some(&(first, message)) if first == index => message,
            _ => MESSAGE_OF_QUEUE,
        }
    }
}

/// A defined event queue.
#[derive(Debug)]
struct EventQueue {
    ring: Att,
    log_entries: u8,
    message: u16,
    overflow: EventOverflow,
    priority: EventPriority,
    armed: bool,
    /// While armed: answers to commands raise no interrupt.
    quiet: bool,
    /// Entries written, free-running.
    write_index: u32,
    /// Entries the driver has said it consumed, without an end to the count.
    told: u64,
    /// Entries written to this ring, and not to those that it had before; no further than can be
    /// counted.
    in_ring: u32,
    /// All before this entry were read, as the last switch found; the host may not have said so.
    seen_read: u32,
    messages: Messages,
    moderation_ns: u64,
    moderation_count: u32,
    timer: Timer,
    /// While the timer runs: since when moderation holds an interrupt back.
    held_since: u64,
    /// What waited is being written: the interrupt is for all of it, and comes afterwards.
    draining: bool,
    backlog: Backlog,
    waiting: Waiting,
    /// Completion queues that went to another event queue, each with the number of the entry that
    /// was its last here: it may be unread when the queue comes back.
    left: HashMap<u32, u32>,
    /// When so many have left, those whose entry was read are dropped.
    left_limit: usize,
    /// The driver was told of the overflow.
    overflow_reported: bool,
    /// The message that was raised last, or that of the queue.
    raised: u16,
    /// The most answers to commands that may be unread, where they come here.
    answers: u32,
}

impl EventQueue {
    /// Entries the driver has said it consumed, free-running.
    fn read_index(&self) -> u32 {
        self.told as u32
    }

    fn unread(&self) -> u32 {
        self.write_index.wrapping_sub(self.read_index())
    }

    /// Entry `index`, which the driver has not said it consumed, without an end to the count.
    fn entry(&self, index: u32) -> u64 {
        self.told + u64::from(index.wrapping_sub(self.read_index()))
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn slot_offset(&self, index: u32) -> u64 {
        u64::from(index & (self.entries() - 1)) * size_of::<EventEntry>() as u64
    }

    /// Whether the driver has zeroed the slot of entry `index`.
    fn is_zeroed<M: HostMemory + ?Sized>(&self, memory: &M, index: u32) -> Result<bool, FatalCode> {
        let offset = self.slot_offset(index) + offset_of!(EventEntry, code) as u64;
        let code = self
            .ring
            .address_of(memory, offset, 4)
            .ok()
            .and_then(|address| memory.load_u32(address).ok())
            .ok_or(FatalCode::HostMemory)?;
        Ok(code == 0)
    }

    /// Whether the entry written as number `index` is known to be read without a look at it.
    fn is_past(&self, index: u32) -> bool {
        let behind = self.write_index.wrapping_sub(index);
        if behind == 0 {
            // It was an entry of another queue of this number.
            return true;
        }
        // Once a slot of this ring was written again, all before what it held was read, what was
        // in earlier rings too.
        behind > self.unread() || behind > self.entries() && self.in_ring > self.entries()
    }

    /// Whether the entry written as number `index` was read.
    fn was_read<M: HostMemory + ?Sized>(&self, memory: &M, index: u32) -> Result<bool, FatalCode> {
        if self.is_past(index) {
            return Ok(true);
        }
        if self.write_index.wrapping_sub(index) > self.in_ring {
            // It is in a ring that is not the device's any more.
            return Ok(false);
        }
        self.is_zeroed(memory, index)
    }

    /// The first entry that may be unread.
    fn oldest_unread(&self) -> u32 {
        if self.unread() > self.entries() && self.in_ring > self.entries() {
            self.write_index.wrapping_sub(self.entries())
        } else if self.seen_read.wrapping_sub(self.read_index()) <= self.unread() {
            self.seen_read
        } else {
            self.read_index()
        }
    }

    /// The message of an interrupt that is due for what is there already, or that of the queue.
    fn message_due(&mut self) -> u16 {
        let oldest = self.oldest_unread();
        self.messages.read_to(oldest);
        self.messages.of(oldest)
    }

    /// The number of a message, which may be that of the queue.
    fn resolved(&self, message: u16) -> u16 {
        if message == MESSAGE_OF_QUEUE {
            self.message
        } else {
            message
        }
    }

    /// Slots that only answers to commands are written to. The device stops where there is no room
    /// for one (DEV-5-21), and nothing else may bring that about: links that flap and queues that
    /// overflow while the driver does not look, however often. Half of a queue that is too small for
    /// so many is for the rest all the same.
    fn reserve(&self) -> u32 {
        match self.overflow {
            EventOverflow::Hold => self.answers.min(self.entries() / 2),
            // The driver wants to be stopped where there is no room for anything.
            EventOverflow::Stop | EventOverflow::Undefine => 0,
        }
    }

    /// Whether anything has found no room, and waits for it.
    fn is_awaited(&self) -> bool {
        !self.backlog.is_empty() || !self.waiting.room.is_empty()
    }

    /// Takes what came first of what waits for room; of completion queues, no ticket after `last`.
    fn take_next(&mut self, last: u64) -> Option<Next> {
        let event = self.backlog.first();
        match self.waiting.room.first_entry() {
            Some(first) if event.is_none_or(|event| *first.key() < event) => {
                if *first.key() > last {
                    return None;
                }
                let (ticket, cqn) = first.remove_entry();
                Some(Next::Completion(ticket, cqn))
            }
            _ => {
                let (entry, message) = self.backlog.pop()?;
                Some(Next::Event(entry, message))
            }
        }
    }

    /// Whether there is room for an event, and nothing that it must not overtake: what waits is
    /// overtaken by answers alone, whose room is their own.
    fn has_room_for<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        entry: &EventEntry,
    ) -> Result<bool, FatalCode> {
        if entry.code == EventCode::CommandDone.number() {
            self.has_room_behind(memory, 0)
        } else {
            Ok(!self.is_awaited() && self.has_room(memory)?)
        }
    }

    /// Whether there is room for an event that is no answer.
    fn has_room<M: HostMemory + ?Sized>(&self, memory: &M) -> Result<bool, FatalCode> {
        self.has_room_behind(memory, self.reserve())
    }

    /// Whether the next slot is free, and `reserve` more. The read index may lag behind what the
    /// driver consumed; a slot it has zeroed is free whatever the read index says, and so are those
    /// before it: it reads them in order.
    fn has_room_behind<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        reserve: u32,
    ) -> Result<bool, FatalCode> {
        if self.unread() < self.entries() - reserve {
            return Ok(true);
        }
        self.is_zeroed(memory, self.write_index.wrapping_add(reserve))
    }

    /// Writes an entry; the first eight bytes last, together.
    fn write<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        entry: &EventEntry,
        message: u16,
    ) -> Result<(), FatalCode> {
        let size = size_of::<EventEntry>() as u64;
        let address = self
            .ring
            .address_of(memory, self.slot_offset(self.write_index), size)
            .map_err(|_| FatalCode::HostMemory)?;
        let valid = u64::from(entry.code) | (u64::from(entry.id) << 32);
        memory
            .write(address + 8, &entry.as_bytes()[8..])
            .and_then(|()| memory.store_u64(address, valid))
            .map_err(|_| FatalCode::HostMemory)?;
        if self.messages.is_full() {
            self.messages.read_to(self.oldest_unread());
        }
        self.messages.push(self.write_index, message);
        self.write_index = self.write_index.wrapping_add(1);
        self.in_ring = self.in_ring.saturating_add(1);
        Ok(())
    }
}

/// Checks the ring of a queue.
fn check_ring(log_entries: u8, ring: &Buffer) -> Result<Att, CommandStatus> {
    if !(EQ_MIN_LOG_ENTRIES..=EQ_MAX_LOG_ENTRIES).contains(&log_entries) {
        return Err(CommandStatus::BadParameter);
    }
    let att = Att::new(ring).map_err(|_| CommandStatus::BadParameter)?;
    let size = (size_of::<EventEntry>() as u64) << log_entries;
    if att.length() < size || att.offset_in_page(0) % size_of::<EventEntry>() as u64 != 0 {
        return Err(CommandStatus::BadParameter);
    }
    Ok(att)
}

/// All event queues.
#[derive(Debug, Default)]
pub struct EventQueues {
    queues: Vec<Option<Box<EventQueue>>>,
    /// Queues that are undefined since they overflowed, each with the completion queues whose event
    /// waited there; their numbers are free when they were destroyed.
    lost: BTreeMap<u16, BTreeMap<u64, u32>>,
    /// How many queues are of low latency.
    low_latency: usize,
    /// Tickets handed out to whatever waits.
    tickets: u64,
    /// Which have raised the interrupt pin.
    pub(crate) pins: PinBits,
}

impl EventQueues {
    fn get(&self, eqn: u16) -> Option<&EventQueue> {
        self.queues.get(usize::from(eqn))?.as_deref()
    }

    fn get_mut(&mut self, eqn: u16) -> Option<&mut EventQueue> {
        self.queues.get_mut(usize::from(eqn))?.as_deref_mut()
    }

    /// The moderation timer of queue `eqn`.
    pub(crate) fn timer(&self, eqn: u16) -> Option<Timer> {
        self.get(eqn).map(|queue| queue.timer)
    }

    /// The next ticket: a place behind all that wait.
    fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Whether whoever has this ticket still waits in the list of queue `eqn`, which may be
    /// another queue of the same number by now.
    pub(crate) fn is_waiting(&self, eqn: u16, ticket: u64) -> bool {
        self.get(eqn)
            .is_some_and(|queue| queue.waiting.contains(ticket))
    }

    /// Takes whoever has this ticket out of the list of queue `eqn`.
    pub(crate) fn forget(&mut self, eqn: u16, ticket: u64) {
        if let Some(queue) = self.get_mut(eqn) {
            queue.waiting.remove(ticket);
        } else if let Some(waiting) = self.lost.get_mut(&eqn) {
            waiting.remove(&ticket);
        }
    }

    /// Completion queue `cqn`, whose last event in queue `eqn` is entry `index`, goes to another.
    pub(crate) fn leave(&mut self, eqn: u16, cqn: u32, index: u32) {
        let Some(queue) = self.get_mut(eqn) else {
            return;
        };
        let mut left = std::mem::take(&mut queue.left);
        if left.len() >= queue.left_limit {
            left.retain(|_, &mut index| !queue.is_past(index));
            // Not at each event, however many there are to keep.
            queue.left_limit = (2 * left.len()).max(queue.entries() as usize);
        }
        left.insert(cqn, index);
        queue.left = left;
    }

    /// Completion queue `cqn` comes to queue `eqn`; its last event there, if it had one that may be
    /// unread.
    pub(crate) fn come_back(&mut self, eqn: u16, cqn: u32) -> Option<u32> {
        self.get_mut(eqn)?.left.remove(&cqn)
    }

    /// Completion queues in the list of queue `eqn`.
    #[cfg(test)]
    pub(crate) fn waiting(&self, eqn: u16) -> usize {
        self.get(eqn).map_or(0, |queue| {
            let waiting = &queue.waiting;
            assert_eq!(waiting.entries.len(), waiting.unread.len());
            waiting.room.len() + waiting.unread.len()
        })
    }

    /// Drops asynchronous events about an object that were kept back, wherever they were to go.
    fn forget_events(&mut self, codes: &[EventCode], id: u32) {
        let queues = self.queues.iter_mut().flatten();
        for queue in queues.filter(|queue| !queue.backlog.is_empty()) {
            for &code in codes {
                queue.backlog.remove(code.number(), id);
            }
        }
    }

    /// Keeps an event back in queue `eqn`: one of the same kind about the same object that is kept
    /// back anywhere goes.
    fn keep_back(&mut self, eqn: u16, mut entry: EventEntry, message: u16, mapped: bool) {
        if mapped {
            // The map may have sent the earlier one elsewhere.
            for (other, queue) in (0..).zip(&mut self.queues) {
                let Some(queue) = queue.as_deref_mut().filter(|_| other != eqn) else {
                    continue;
                };
                if let Some(earlier) = queue.backlog.remove(entry.code, entry.id) {
                    entry.param1 |= untold(&earlier);
                }
            }
        }
        let ticket = self.ticket();
        if let Some(queue) = self.get_mut(eqn) {
            queue.backlog.push(ticket, entry, message);
        }
    }

    /// Completion queue `cqn` is gone.
    fn forget_completion_queue(&mut self, cqn: u32) {
        for queue in self.queues.iter_mut().flatten() {
            queue.left.remove(&cqn);
        }
    }

    /// Whether a queue is of low latency.
    pub(crate) fn is_low_latency(&self, eqn: u16) -> bool {
        self.get(eqn)
            .is_some_and(|queue| queue.priority == EventPriority::LowLatency)
    }

    /// Whether any is.
    #[inline]
    pub(crate) fn has_low_latency(&self) -> bool {
        self.low_latency > 0
    }

    /// Counts those of low latency after a change.
    fn count_low_latency(&mut self) {
        let queues = self.queues.iter().flatten();
        self.low_latency = queues
            .filter(|queue| queue.priority == EventPriority::LowLatency)
            .count();
    }

    /// Entries written to queue `eqn`, free-running.
    #[cfg(any(test, feature = "testing"))]
    pub fn written(&self, eqn: u16) -> u32 {
        self.get(eqn).map_or(0, |queue| queue.write_index)
    }

    /// The state of queue `eqn`.
    pub fn state(&self, eqn: u16) -> EventQueueState {
        match self.get(eqn) {
            None => EventQueueState::Undefined,
            Some(queue) if queue.armed => EventQueueState::Armed,
            Some(_) => EventQueueState::Unarmed,
        }
    }

    /// Defines queue `eqn`, which is in range and undefined.
    pub(crate) fn define(
        &mut self,
        eqn: u16,
        message: u16,
        log_entries: u8,
        ring: &Buffer,
    ) -> Result<(), CommandStatus> {
        let att = check_ring(log_entries, ring)?;
        let index = usize::from(eqn);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(Box::new(EventQueue {
            ring: att,
            log_entries,
            message,
            overflow: EventOverflow::Hold,
            priority: EventPriority::Bulk,
            armed: false,
            quiet: false,
            write_index: 0,
            told: 0,
            in_ring: 0,
            seen_read: 0,
            messages: Messages::default(),
            moderation_ns: 0,
            moderation_count: 0,
            timer: Timer::default(),
            held_since: 0,
            draining: false,
            backlog: Backlog::default(),
            waiting: Waiting::default(),
            left: HashMap::new(),
            left_limit: 1 << log_entries,
            overflow_reported: false,
            raised: MESSAGE_OF_QUEUE,
            answers: 0,
        }));
        Ok(())
    }

    /// Keeps room in queue 0 for the answers to so many commands.
    pub(crate) fn reserve_answers(&mut self, commands: u32) {
        if let Some(queue) = self.get_mut(EQ_CONTROL) {
            queue.answers = commands;
        }
    }
}

impl Core {
    /// Carries out `CreateEventQueue`.
    pub(crate) fn create_eq(&mut self, command: &CreateEventQueue) -> Result<(), CommandStatus> {
        if command.eqn == EQ_CONTROL || command.eqn >= MAX_EQ {
            return Err(CommandStatus::BadNumber);
        }
        if command.message >= self.config.messages {
            return Err(CommandStatus::BadParameter);
        }
        let (overflow, priority) =
            self.eq_control(command.eqn, command.overflow, command.priority)?;
        if self.eqs.get(command.eqn).is_some() || self.eqs.lost.contains_key(&command.eqn) {
            return Err(CommandStatus::Exists);
        }
        self.eqs.define(
            command.eqn,
            command.message,
            command.log_entries,
            &command.ring,
        )?;
        if let Some(queue) = self.eqs.get_mut(command.eqn) {
            (queue.overflow, queue.priority) = (overflow, priority);
        }
        self.eqs.count_low_latency();
        Ok(())
    }

    /// What a driver chooses for a queue where that was agreed on.
    fn eq_control(
        &self,
        eqn: u16,
        overflow: u8,
        priority: u8,
    ) -> Result<(EventOverflow, EventPriority), CommandStatus> {
        let agreed = self.features & FEATURE_EQ_CONTROL != 0;
        let overflow = EventOverflow::from_number(overflow);
        let priority = EventPriority::from_number(priority);
        match (overflow, priority) {
            (Some(EventOverflow::Hold), Some(EventPriority::Bulk)) => {}
            // Who would answer commands, or tell of the overflow?
            (Some(EventOverflow::Undefine), _) if eqn == EQ_CONTROL => {
                return Err(CommandStatus::BadParameter);
            }
            _ if !agreed => return Err(CommandStatus::BadParameter),
            _ => {}
        }
        overflow.zip(priority).ok_or(CommandStatus::BadParameter)
    }

    /// Carries out `DestroyEventQueue`.
    pub(crate) fn destroy_eq(
        &mut self,
        eqn: u32,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        let eqn = u16::try_from(eqn)
            .ok()
            .filter(|&eqn| eqn < MAX_EQ && eqn != EQ_CONTROL)
            .ok_or(CommandStatus::BadNumber)?;
        let is_lost = self.eqs.lost.contains_key(&eqn);
        if self.eqs.get(eqn).is_none() && !is_lost {
            return Err(CommandStatus::NotFound);
        }
        if self.vectors.names(eqn) || self.network.names(eqn) {
            return Err(CommandStatus::Busy);
        }
        let lost = self.eqs.lost.remove(&eqn);
        self.eqs.pins.clear(eqn);
        let slot = self.eqs.queues.get_mut(usize::from(eqn));
        let queue = slot.and_then(Option::take);
        self.eqs.count_low_latency();
        // Whatever has its number next has not overflowed.
        self.eqs
            .forget_events(&[EventCode::EventQueueOverflow], eqn.into());
        let overflows = queue.as_ref().map(|queue| queue.backlog.overflows());
        // Events of completion queues that the map sends elsewhere by now are due there.
        let waiting = queue.map(|queue| queue.waiting.all()).or(lost);
        for (ticket, cqn) in waiting.into_iter().flatten() {
            self.work += 1;
            self.cq_left_behind(cqn, ticket, eqn, host);
        }
        // So are overflows that it was to tell of.
        for other in overflows.into_iter().flatten() {
            self.tell_of_overflow(other, host);
        }
        Ok(())
    }

    /// Carries out `SwitchEventQueue`.
    pub(crate) fn switch_eq(
        &mut self,
        command: &SwitchEventQueue,
        now: u64,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        let eqn = command.eqn;
        if eqn >= MAX_EQ {
            return Err(CommandStatus::BadNumber);
        }
        let queue = self.eqs.get_mut(eqn).ok_or(CommandStatus::NotFound)?;
        let ring = check_ring(command.log_entries, &command.ring)?;
        if command.log_entries < queue.log_entries {
            return Err(CommandStatus::BadParameter);
        }
        // What is unread is in two rings at most, however often they change.
        if queue.unread() > queue.in_ring {
            return Err(CommandStatus::Busy);
        }
        queue.seen_read = queue.oldest_unread();
        queue.ring = ring;
        queue.log_entries = command.log_entries;
        queue.in_ring = 0;
        queue.overflow_reported = false;
        self.drain(eqn, host);
        if self.eqs.get(eqn).is_some_and(EventQueue::is_awaited) {
            self.report_overflow(eqn, host);
        }
        self.notify(eqn, None, now, host);
        Ok(())
    }

    /// Carries out `ModifyEventQueue`.
    pub(crate) fn modify_eq(
        &mut self,
        command: &ModifyEventQueue,
        now: u64,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        if command.eqn >= MAX_EQ {
            return Err(CommandStatus::BadNumber);
        }
        if command.message >= self.config.messages {
            return Err(CommandStatus::BadParameter);
        }
        let (overflow, priority) =
            self.eq_control(command.eqn, command.overflow, command.priority)?;
        let queue = self
            .eqs
            .get_mut(command.eqn)
            .ok_or(CommandStatus::NotFound)?;
        queue.message = command.message;
        (queue.overflow, queue.priority) = (overflow, priority);
        queue.moderation_ns = u64::from(command.moderation_microseconds) * 1000;
        queue.moderation_count = u32::from(command.moderation_count);
        // What was held back under the old moderation is judged by the new one, and not as if it
        // had come just now: a driver may change its mind often.
        let since = if queue.timer.is_running() {
            queue.held_since
        } else {
            now
        };
        queue.timer.stop();
        self.eqs.count_low_latency();
        self.notify(command.eqn, None, since, host);
        Ok(())
    }

    /// An event queue doorbell.
    pub(crate) fn eq_doorbell(&mut self, word: u64, now: u64, host: &mut dyn Host) {
        let doorbell = EventDoorbell::decode(word);
        let Some(queue) = self.eqs.get_mut(doorbell.eqn) else {
            self.counters.bad_doorbells += 1;
            return;
        };
        let mut released = None;
        if doorbell.valid {
            let advance = if doorbell.relative {
                doorbell.read_index
            } else {
                doorbell.read_index.wrapping_sub(queue.read_index())
            };
            if advance <= queue.unread() {
                queue.told += u64::from(advance);
                let read_index = queue.read_index();
                queue.messages.read_to(read_index);
                if queue.seen_read.wrapping_sub(read_index) > queue.unread() {
                    queue.seen_read = read_index;
                }
                if queue.unread() == 0 {
                    // Moderation holds back nothing: its time begins anew with the next entry.
                    queue.timer.stop();
                }
                released = queue.waiting.release(queue.told);
            } else {
                // Not a count of entries that were ever written.
                self.counters.bad_doorbells += 1;
            }
        }
        if doorbell.arm {
            // An arming for everything is not taken back.
            let for_all = queue.armed && !queue.quiet;
            let offered = self.features & FEATURE_QUIET_COMMANDS != 0;
            queue.quiet = offered && doorbell.quiet && !for_all;
            queue.armed = true;
        } else if doorbell.disarm && self.features & FEATURE_EQ_CONTROL != 0 {
            queue.armed = false;
            queue.timer.stop();
        }
        self.drain(doorbell.eqn, host);
        // Where room was made for fewer than may be written now, the queue has overflowed.
        let out_of_room = |queue: &EventQueue| {
            released.is_some_and(|ticket| queue.waiting.room.contains_key(&ticket))
        };
        if self.eqs.get(doorbell.eqn).is_some_and(out_of_room) && self.holds(doorbell.eqn, host) {
            self.report_overflow(doorbell.eqn, host);
        }
        self.notify(doorbell.eqn, None, now, host);
    }

    /// Writes what had found no room before, in the order it came, as far as there is room by now.
    fn drain(&mut self, eqn: u16, host: &mut dyn Host) {
        if let Some(queue) = self.eqs.get_mut(eqn) {
            queue.draining = true;
        }
        // A completion queue that has to wait on gets a new ticket, behind these.
        let last = self.eqs.tickets;
        let mut had_room = false;
        while self.is_running() {
            let Some(queue) = self.eqs.get_mut(eqn) else {
                return;
            };
            if !queue.is_awaited() && !queue.overflow_reported {
                break;
            }
            match queue.has_room(host) {
                Ok(true) => had_room = true,
                // Without room nobody gets further, and everybody keeps their place.
                Ok(false) => break,
                Err(code) => {
                    self.fail(code, host);
                    break;
                }
            }
            match queue.take_next(last) {
                Some(Next::Event(entry, message)) => {
                    self.put_event(Route { eqn, message }, entry, host);
                }
                Some(Next::Completion(ticket, cqn)) => self.cq_retry(cqn, ticket, eqn, host),
                None => break,
            }
            self.work += 1;
        }
        if let Some(queue) = self.eqs.get_mut(eqn) {
            queue.draining = false;
            if had_room && !queue.is_awaited() {
                queue.overflow_reported = false;
            }
        }
    }

    /// Something is to be written to a queue: first what waits, where the host has zeroed slots and
    /// not told yet. That is due before it, and raised by its own message.
    fn drain_before(&mut self, eqn: u16, host: &mut dyn Host) {
        let queue = self.eqs.get(eqn);
        let queue = queue.filter(|queue| queue.is_awaited() && !queue.draining);
        let Some(written) = queue.map(|queue| queue.write_index) else {
            return;
        };
        self.drain(eqn, host);
        let queue = self.eqs.get(eqn);
        if queue.is_some_and(|queue| queue.write_index != written) {
            self.notify(eqn, None, self.now, host);
        }
    }

    /// Writes the completion event of a queue, unless the last one, entry `last`, was not read,
    /// there is no room, or others wait for room and it is not its `turn` in that event queue: then
    /// the queue is remembered, until a doorbell tells that it was read or of room.
    ///
    /// So there is never more than one unread entry for a completion queue, however often a
    /// process arms it, and nobody is overtaken by those who fire more often.
    pub(crate) fn post_completion_event(
        &mut self,
        route: Route,
        last: Option<u32>,
        turn: Option<u16>,
        entry: EventEntry,
        host: &mut dyn Host,
    ) -> Posted {
        if !self.is_running() {
            return Posted::Not;
        }
        let eqn = route.eqn;
        let Some(queue) = self.eqs.get_mut(eqn) else {
            self.fail(FatalCode::UndefinedEventQueue, host);
            return Posted::Not;
        };
        let unread = match last.map(|index| (index, queue.was_read(host, index))) {
            None | Some((_, Ok(true))) => None,
            Some((index, Ok(false))) => Some(index),
            Some((_, Err(code))) => {
                self.fail(code, host);
                return Posted::Not;
            }
        };
        if let Some(index) = unread {
            let index = queue.entry(index);
            let ticket = self.eqs.ticket();
            if let Some(queue) = self.eqs.get_mut(eqn) {
                queue.waiting.for_entry(ticket, entry.id, index);
            }
            return Posted::Waiting(ticket);
        }
        if turn.is_none() {
            self.drain_before(eqn, host);
        }
        let running = self.is_running();
        let Some(queue) = self.eqs.get_mut(eqn).filter(|_| running) else {
            return Posted::Not;
        };
        match queue.has_room(host) {
            Ok(true) if turn == Some(eqn) || !queue.is_awaited() => {
                let index = queue.write_index;
                self.behave(route, entry, Self::put_event, host);
                Posted::Written(index)
            }
            Ok(room) => {
                let holds = room || self.holds(eqn, host);
                let ticket = self.eqs.ticket();
                if let Some(queue) = self.eqs.get_mut(eqn) {
                    queue.waiting.for_room(ticket, entry.id);
                } else if let Some(waiting) = self.eqs.lost.get_mut(&eqn) {
                    waiting.insert(ticket, entry.id);
                }
                if holds {
                    if !room {
                        self.report_overflow(eqn, host);
                    }
                    // Also where only answers to commands are unread, and raised nothing.
                    self.notify(eqn, None, self.now, host);
                }
                Posted::Waiting(ticket)
            }
            Err(code) => {
                self.fail(code, host);
                Posted::Not
            }
        }
    }

    /// A queue has no room: whether it holds events back. Else what the driver chose is done: the
    /// device stops, or the queue is undefined from now on.
    fn holds(&mut self, eqn: u16, host: &mut dyn Host) -> bool {
        match self.eqs.get(eqn).map(|queue| queue.overflow) {
            Some(EventOverflow::Hold) | None => return true,
            Some(EventOverflow::Stop) => self.fail(FatalCode::EventQueueOverflow, host),
            Some(EventOverflow::Undefine) => {
                let queue = self.eqs.queues[usize::from(eqn)].take();
                let overflows = queue.as_ref().map(|queue| queue.backlog.overflows());
                let waiting = queue.map(|queue| queue.waiting.all()).unwrap_or_default();
                self.eqs.lost.insert(eqn, waiting);
                self.eqs.pins.clear(eqn);
                self.eqs.count_low_latency();
                self.tell_of_overflow(eqn, host);
                // What it was to tell of others is told once, and not by it any more.
                for other in overflows.into_iter().flatten() {
                    self.tell_of_overflow(other, host);
                }
            }
        }
        false
    }

    /// Tells the driver, once, that a queue other than 0 has no room and holds events back.
    fn report_overflow(&mut self, eqn: u16, host: &mut dyn Host) {
        let Some(queue) = self.eqs.get_mut(eqn).filter(|_| eqn != EQ_CONTROL) else {
            return;
        };
        if queue.overflow == EventOverflow::Hold && !queue.overflow_reported {
            queue.overflow_reported = true;
            self.tell_of_overflow(eqn, host);
        }
    }

    fn tell_of_overflow(&mut self, eqn: u16, host: &mut dyn Host) {
        let code = EventCode::EventQueueOverflow;
        let mut route = self.route(code);
        if route.eqn == eqn || self.eqs.get(route.eqn).is_none() {
            // Not in the queue that it is about, nor in one that overflowed before.
            route = Route::to(EQ_CONTROL);
        }
        self.post_event(route, event(code, u32::from(eqn), 0, 0), host);
    }

    /// Raises the interrupt of an armed queue with unread entries, or holds it back by moderation.
    ///
    /// `cause` is the message of an entry that was written just now; else what is raised is the
    /// message of the oldest that is unread.
    fn notify(&mut self, eqn: u16, cause: Option<u16>, now: u64, host: &mut dyn Host) {
        // After the device has stopped nothing is raised.
        let running = self.is_running();
        let queue = self.eqs.get_mut(eqn);
        let Some(queue) = queue.filter(|queue| running && !queue.draining) else {
            return;
        };
        let unread = queue.unread();
        if !queue.armed || unread == 0 {
            return;
        }
        let held = queue.moderation_ns != 0
            && (queue.moderation_count <= 1 || unread < queue.moderation_count);
        if held {
            if !queue.timer.is_running() {
                let deadline = now.saturating_add(queue.moderation_ns);
                queue.held_since = now;
                self.timers
                    .start(&mut queue.timer, TimerOwner::EventQueue(eqn), deadline);
            }
            return;
        }
        self.interrupt(eqn, cause, host);
    }

    fn interrupt(&mut self, eqn: u16, cause: Option<u16>, host: &mut dyn Host) {
        if let Some(queue) = self.eqs.get_mut(eqn) {
            queue.armed = false;
            queue.timer.stop();
            self.counters.interrupts += 1;
            queue.raised = cause.unwrap_or_else(|| queue.message_due());
            host.raise(queue.resolved(queue.raised));
            self.eqs.pins.set(eqn);
        }
    }

    /// Raises once more what was raised and got no doorbell since: the host has another mode.
    pub(crate) fn raise_again(&mut self, host: &mut dyn Host) {
        for eqn in 0..MAX_EQ {
            if !self.eqs.pins.is_set(eqn) {
                continue;
            }
            if let Some(queue) = self.eqs.get(eqn) {
                host.raise(queue.resolved(queue.raised));
            }
        }
    }

    /// A moderation timer's entry came up.
    pub(crate) fn eq_timer(&mut self, eqn: u16, entry: u64, now: u64, host: &mut dyn Host) {
        let Some(queue) = self.eqs.get_mut(eqn) else {
            return;
        };
        let owner = TimerOwner::EventQueue(eqn);
        if self.timers.expired(&mut queue.timer, owner, entry, now)
            && queue.armed
            && queue.unread() > 0
        {
            self.interrupt(eqn, None, host);
        }
    }

    /// Writes an event where it goes.
    pub(crate) fn post_event(&mut self, route: Route, entry: EventEntry, host: &mut dyn Host) {
        if self.is_running() {
            self.behave(route, entry, Self::write_event, host);
        }
    }

    /// Has an event written by `write`, or what the device makes of it where it misbehaves.
    fn behave(
        &mut self,
        route: Route,
        entry: EventEntry,
        write: fn(&mut Self, Route, EventEntry, &mut dyn Host),
        host: &mut dyn Host,
    ) {
        if self.misbehaviour.is_none() {
            write(self, route, entry, host);
            return;
        }
        match self.event_to_write(route.eqn, entry) {
            Some(same) if same == entry => write(self, route, entry, host),
            // Nonsense is not kept back: there would be no end to what it may be about.
            Some(other) => self.write_late_event(route.eqn, other, host),
            None => {}
        }
        self.write_late_events(host);
    }

    /// Writes an event that was held back, unless its queue is gone or full by now.
    pub(crate) fn write_late_event(&mut self, eqn: u16, entry: EventEntry, host: &mut dyn Host) {
        let queue = self.eqs.get(eqn);
        let room = queue.is_some_and(|queue| queue.has_room_for(host, &entry) == Ok(true));
        if room && self.is_running() {
            self.write_event(Route::to(eqn), entry, host);
        }
    }

    /// Writes an event, or keeps it back.
    fn write_event(&mut self, route: Route, entry: EventEntry, host: &mut dyn Host) {
        let Route { eqn, message } = route;
        let Some(queue) = self.eqs.get(eqn) else {
            self.fail(FatalCode::UndefinedEventQueue, host);
            return;
        };
        let is_answer = entry.code == EventCode::CommandDone.number();
        if !is_answer && queue.is_awaited() {
            self.drain_before(eqn, host);
        }
        if !self.is_running() {
            return;
        }
        let is_overflow = entry.code == EventCode::EventQueueOverflow.number();
        let Some(queue) = self.eqs.get(eqn) else {
            // It is gone since it was drained, and so is what it was to tell of, but for this.
            if is_overflow {
                self.tell_of_overflow(entry.id as u16, host);
            }
            return;
        };
        match queue.has_room_for(host, &entry) {
            Ok(true) => self.put_event(route, entry, host),
            // More commands than there is room for answers: that is for the driver to know.
            Ok(false) if is_answer => self.fail(FatalCode::EventQueueOverflow, host),
            Ok(false) => {
                // An overflow of another queue that comes to light while this one is drained: it is behind
                // those who wait here, and its turn comes before that ends.
                let has_turn = queue.draining && queue.has_room(host) == Ok(true);
                if has_turn || self.holds(eqn, host) {
                    let mapped = !self.vectors.is_empty();
                    self.eqs.keep_back(eqn, entry, message, mapped);
                    if !has_turn {
                        self.report_overflow(eqn, host);
                        self.notify(eqn, None, self.now, host);
                    }
                } else if is_overflow {
                    // The queue that was to tell of it is gone just now.
                    self.tell_of_overflow(entry.id as u16, host);
                }
            }
            Err(code) => self.fail(code, host),
        }
    }

    /// Writes an event to a queue that has room for it.
    fn put_event(&mut self, route: Route, entry: EventEntry, host: &mut dyn Host) {
        let Some(queue) = self.eqs.get_mut(route.eqn) else {
            return;
        };
        self.counters.events += 1;
        if let Err(code) = queue.write(host, &entry, route.message) {
            self.fail(code, host);
            return;
        }
        let is_answer = entry.code == EventCode::CommandDone.number();
        if !(queue.quiet && is_answer) {
            self.notify(route.eqn, Some(route.message), self.now, host);
        }
    }

    /// Writes an asynchronous RDMA event.
    pub fn async_event(&mut self, code: EventCode, id: u32, host: &mut dyn Host) {
        self.async_event_with(code, id, 0, host);
    }

    /// The same with its `param0`.
    pub(crate) fn async_event_with(
        &mut self,
        code: EventCode,
        id: u32,
        param0: u64,
        host: &mut dyn Host,
    ) {
        self.post_event(self.route(code), event(code, id, param0, 0), host);
    }

    /// A queue pair is gone: no event is written for it any more.
    pub(crate) fn forget_queue_pair_events(&mut self, qpn: u32) {
        self.eqs.forget_events(&QUEUE_PAIR_EVENTS, qpn);
    }

    /// A completion queue is gone: no event is written for it any more.
    pub(crate) fn forget_completion_queue_events(&mut self, cqn: u32) {
        self.eqs.forget_events(&COMPLETION_QUEUE_EVENTS, cqn);
        self.eqs.forget_completion_queue(cqn);
    }

    /// A shared receive queue is gone: no event is written for it any more.
    pub(crate) fn forget_shared_receive_events(&mut self, srqn: u32) {
        self.eqs.forget_events(&SHARED_RECEIVE_EVENTS, srqn);
    }

    /// A channel is gone: no event is written for it any more.
    pub(crate) fn forget_channel_events(&mut self, channel: u32) {
        self.eqs.forget_events(&CHANNEL_EVENTS, channel);
    }

    /// Writes a global event.
    pub(crate) fn global_event(
        &mut self,
        code: EventCode,
        id: u32,
        param0: u64,
        host: &mut dyn Host,
    ) {
        self.post_event(self.route(code), event(code, id, param0, 0), host);
    }

    /// Writes an event that drivers know since version 1.1 of the interface.
    fn later_event(&mut self, entry: EventEntry, host: &mut dyn Host) {
        let code = EventCode::from_number(entry.code);
        if let Some(code) = code.filter(|_| self.driver_minor >= 1) {
            self.post_event(self.route(code), entry, host);
        }
    }

    /// The device's own memory failed at `place`; what it held was corrected or lost.
    pub(crate) fn internal_memory_error(
        &mut self,
        place: u64,
        corrected: bool,
        host: &mut dyn Host,
    ) {
        let code = EventCode::MemoryErrorInternal;
        self.later_event(event(code, 0, place, u64::from(!corrected)), host);
    }

    /// Host memory was poisoned where the device read it.
    pub(crate) fn external_memory_error(&mut self, address: u64, host: &mut dyn Host) {
        let code = EventCode::MemoryErrorExternal;
        self.later_event(event(code, 0, address, 0), host);
    }

    /// Something happened on a channel: `code` is one of those of channels.
    pub(crate) fn channel_event(&mut self, code: EventCode, channel: u16, host: &mut dyn Host) {
        self.later_event(event(code, channel.into(), 0, 0), host);
    }

    /// The device was changed from outside: `on` says to what.
    pub(crate) fn management_event(&mut self, what: Management, on: bool, host: &mut dyn Host) {
        let code = EventCode::ManagementAction;
        self.later_event(event(code, what.number(), u64::from(on), 0), host);
    }

    /// Tells the driver that the device stops, as far as that is possible.
    pub(crate) fn last_event(&mut self, code: FatalCode, host: &mut dyn Host) {
        let entry = event(EventCode::DeviceFatal, 0, u64::from(code.number()), 0);
        if let Some(queue) = self.eqs.get_mut(EQ_CONTROL) {
            if queue.has_room_behind(host, 0) == Ok(true)
                && queue.write(host, &entry, MESSAGE_OF_QUEUE).is_ok()
            {
                self.counters.events += 1;
            }
            // Armed or not: there will be no other interrupt.
            self.interrupt(EQ_CONTROL, Some(MESSAGE_OF_QUEUE), host);
        }
    }
}

/// Puts an entry together.
pub(crate) fn event(code: EventCode, id: u32, param0: u64, param1: u64) -> EventEntry {
    EventEntry {
        code: code.number(),
        id,
        param0,
        param1,
        reserved: 0,
    }
}

#[cfg(test)]
mod tests;
