// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Everything of an engine but its queue pairs, so that work on one queue pair can borrow both.

use crate::counters::{Counters, QpCounters};
use crate::cq::{CompletionQueueDead, CompletionQueues, MAX_CQ};
use crate::device_memory::DEVICE_MEMORY_SIZE;
use crate::eq::EventQueues;
use crate::flows::Flows;
use crate::gid::GidTable;
use crate::loan::{Data, Lender, Loan};
use crate::memory::{DmaError, Host, HostMemory, Room, Way, ENOUGH_ROOM, FRAME_OVERHEAD};
use crate::misbehaviour::Misbehaving;
use crate::multicast::{Groups, MULTICAST_QPN};
use crate::network::Network;
use crate::numbers::Numbers;
use crate::paging::{Fault, Outcome, Paging, Side};
use crate::qp::{QueuePair, MAX_QP};
use crate::queue::{completion_opcode, ReceiveRequest, SendRequest, SharedId};
use crate::roce::{Frame, Mac, Medium};
use crate::srq::{SharedReceiveQueues, MAX_SRQ};
use crate::timers::{TimerOwner, Timers};
use crate::tpt::{Domain, LocalAccess, Tpt, TptError, MAX_TAGS};
use crate::vectors::VectorMap;
use ferrite_abi::{
    complete_features, control_record_offset, CompletionEntry, CompletionOpcode, CompletionStatus,
    ControlRecord, DeviceState, EventCode, FatalCode, Plain, SendOpcode, Sge, Status,
    COMPLETION_RECEIVE, COMPLETION_SOLICITED, COMPLETION_SRQ, DOORBELL_MAX_LOG_STRIDE,
    DOORBELL_PAGE_SIZE, FEATURE_DEVICE_MEMORY, FUNCTION_ETHERNET, FUNCTION_RDMA, RAW_MAX_MTU,
    VLAN_NONE,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::offset_of;
use std::sync::Arc;

/// Base-2 logarithm of the largest MTU there is.
pub const MAX_LOG_MTU: u8 = 12;
/// Ports; they are numbered from 0.
pub const PORTS: u8 = 1;

/// What a function presents itself as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Personality {
    /// RDMA, beside an Ethernet interface of another device.
    #[default]
    Rdma,
    /// RDMA and Ethernet.
    Combined,
    /// Ethernet.
    Network,
}

impl Personality {
    /// The parts that it has: `FUNCTION_*`.
    pub fn models(self) -> u8 {
        match self {
            Self::Rdma => FUNCTION_RDMA,
            Self::Combined => FUNCTION_RDMA | FUNCTION_ETHERNET,
            Self::Network => FUNCTION_ETHERNET,
        }
    }

    /// Whether it has queue pairs, and all that goes with them.
    pub fn has_rdma(self) -> bool {
        self.models() & FUNCTION_RDMA != 0
    }

    /// Whether it has channels.
    pub fn has_ethernet(self) -> bool {
        self.models() & FUNCTION_ETHERNET != 0
    }

    /// The features it may offer.
    pub fn features(self) -> u64 {
        let of = |has, features| if has { features } else { 0 };
        crate::COMMON_FEATURES
            | of(self.has_rdma(), crate::FEATURES)
            | of(self.has_ethernet(), crate::ETHERNET_FEATURES)
    }
}

/// What an engine is told when it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// MAC address of the paired network interface.
    pub mac: [u8; 6],
    /// Message numbers, at least 1 and at most [`ferrite_abi::MAX_MESSAGES`].
    pub messages: u16,
    /// Globally unique identifier.
    pub guid: u64,
    /// The number of the function, among those of its adapter.
    pub number: u8,
    /// What the function is.
    pub personality: Personality,
    /// The interface may have, and send from, other addresses than `mac`.
    pub any_source: bool,
    /// Features to offer, as far as the personality has them; see [`Config::offered_features`].
    pub features: u64,
    /// Numbers of queue pairs, of 24 bits; those of management datagrams and of multicast groups
    /// are not among them.
    pub qps: Numbers,
    /// Numbers of completion queues, of 24 bits.
    pub cqs: Numbers,
    /// Numbers of shared receive queues, of 24 bits.
    pub srqs: Numbers,
    /// Indices of tags, of 24 bits and not 0.
    pub tags: Numbers,
    /// Doorbell pages, at least 2.
    pub doorbell_pages: u32,
    /// Base-2 logarithm of the bytes from one doorbell page to the next, 12 to
    /// [`DOORBELL_MAX_LOG_STRIDE`].
    pub doorbell_log_stride: u8,
}

impl Config {
    /// A configuration with everything the engine has, and a GUID made from the MAC address.
    pub fn new(mac: [u8; 6], messages: u16) -> Self {
        let [a, b, c, d, e, f] = mac;
        Self {
            mac,
            messages: messages.clamp(1, ferrite_abi::MAX_MESSAGES as u16),
            guid: u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]),
            number: 0,
            personality: Personality::default(),
            any_source: false,
            features: crate::FEATURES | crate::ETHERNET_FEATURES,
            qps: Numbers {
                first: 16,
                count: MAX_QP,
            },
            cqs: Numbers {
                first: 0,
                count: MAX_CQ,
            },
            srqs: Numbers {
                first: 1,
                count: MAX_SRQ,
            },
            tags: Numbers {
                first: 1,
                count: MAX_TAGS,
            },
            doorbell_pages: 1024,
            doorbell_log_stride: DOORBELL_PAGE_SIZE.ilog2() as u8,
        }
    }

    /// The features that are offered: none without those it needs.
    pub fn offered_features(&self) -> u64 {
        complete_features(self.features & self.personality.features())
    }

    /// Bytes of device memory.
    pub fn device_memory_size(&self) -> u64 {
        if self.offered_features() & FEATURE_DEVICE_MEMORY != 0 {
            DEVICE_MEMORY_SIZE as u64
        } else {
            0
        }
    }

    /// Offset of device memory in the doorbell BAR: behind the doorbell pages, where a page of any
    /// host can begin.
    pub fn device_memory_offset(&self) -> u64 {
        let pages = u64::from(self.doorbell_pages) << self.doorbell_log_stride;
        pages.next_multiple_of(1 << DOORBELL_MAX_LOG_STRIDE)
    }

    /// Bytes of the doorbell BAR: doorbell pages from offset 0 on, then device memory.
    pub fn doorbell_bar_size(&self) -> u64 {
        (self.device_memory_offset() + self.device_memory_size()).next_power_of_two()
    }
}

/// How a work request of a send queue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCompletion {
    /// Free-running index of its first block.
    pub index: u32,
    /// Its blocks.
    pub blocks: u32,
    /// What it was.
    pub opcode: SendOpcode,
    /// It wants a completion on success too.
    pub signaled: bool,
    /// How it ended.
    pub status: CompletionStatus,
    /// Bytes read, for reads and atomics; else 0 or the bytes sent.
    pub byte_count: u32,
    /// Of an error: [`TptError::vendor_syndrome`] or [`crate::QueueError::vendor_syndrome`].
    pub vendor_syndrome: u32,
}

impl SendCompletion {
    /// That `request` ended with `status`.
    pub fn of(request: &SendRequest, status: CompletionStatus) -> Self {
        Self {
            index: request.index,
            blocks: request.blocks,
            opcode: request.opcode,
            signaled: request.signaled(),
            status,
            byte_count: request.length,
            vendor_syndrome: 0,
        }
    }
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The sender's queue pair number.
    pub qpn: u32,
    /// The sender's MAC address.
    pub mac: [u8; 6],
    /// VLAN tag control information, or `VLAN_NONE`.
    pub vlan: u16,
}

/// How an entry of a receive queue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveCompletion {
    /// Free-running index of the entry; what the host calls it, if shared.
    pub index: u32,
    /// The shared receive queue it came from.
    pub shared: Option<SharedId>,
    /// Datagrams: where from.
    pub origin: Option<Origin>,
    /// How it ended.
    pub status: CompletionStatus,
    /// [`CompletionOpcode::Receive`] or [`CompletionOpcode::ReceiveWrite`].
    pub opcode: CompletionOpcode,
    /// Bytes received.
    pub byte_count: u32,
    /// Immediate data in wire order.
    pub immediate: u32,
    /// The tag that the peer invalidated.
    pub tag: u32,
    /// Any of `COMPLETION_IMMEDIATE`, `COMPLETION_INVALIDATED`, `COMPLETION_SOLICITED`.
    pub flags: u16,
    /// Of an error.
    pub vendor_syndrome: u32,
}

impl ReceiveCompletion {
    /// That `receive` ended with an error.
    pub fn failed(
        receive: &ReceiveRequest,
        status: CompletionStatus,
        vendor_syndrome: u32,
    ) -> Self {
        Self {
            index: receive.name(),
            shared: receive.shared,
            origin: None,
            status,
            opcode: CompletionOpcode::Receive,
            byte_count: 0,
            immediate: 0,
            tag: 0,
            flags: 0,
            vendor_syndrome,
        }
    }
}

/// One turn in so many is of a bulk queue pair, where there is one, however many of low latency
/// want theirs.
pub const BULK_SHARE: u32 = 8;

/// Whose turn it is: those of low latency first, but for one turn in [`BULK_SHARE`].
#[derive(Debug, Default)]
struct Turns {
    /// Turns that those of low latency had since others wait.
    urgent: u32,
}

impl Turns {
    /// Whether the next turn is one of low latency, where there are such or others or both.
    fn is_urgent(&mut self, urgent: bool, bulk: bool) -> bool {
        if !urgent || bulk && self.urgent + 1 >= BULK_SHARE {
            self.urgent = 0;
            return false;
        }
        self.urgent = if bulk { self.urgent + 1 } else { 0 };
        true
    }
}

/// Queue pairs that have something to send, each at most once.
#[derive(Debug, Default)]
pub struct ReadyList {
    /// Those with a completion queue of a handler of low latency.
    urgent: VecDeque<u32>,
    bulk: VecDeque<u32>,
    turns: Turns,
}

impl ReadyList {
    /// How many are in it.
    pub fn len(&self) -> usize {
        self.urgent.len() + self.bulk.len()
    }

    /// True when it is empty.
    pub fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.bulk.is_empty()
    }

    fn push(&mut self, qpn: u32, urgent: bool) {
        if urgent {
            self.urgent.push_back(qpn);
        } else {
            self.bulk.push_back(qpn);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<u32> {
        let (urgent, bulk) = (!self.urgent.is_empty(), !self.bulk.is_empty());
        if self.turns.is_urgent(urgent, bulk) {
            self.urgent.pop_front()
        } else {
            self.bulk.pop_front()
        }
    }
}

/// Where a queue pair stands among those that wait for room: the way, whether it is a bulk one, and
/// its ticket.
pub(crate) type RoomKey = (Way, bool, u64);

/// Queue pairs that wait for room on the way to their peer: by way, those of low latency first (but
/// for one turn in [`BULK_SHARE`] of a way), then in the order they came.
///
/// Who waits sends no data before its turn, and nobody overtakes those of its kind who wait for the
/// same way.
#[derive(Debug, Default)]
pub(crate) struct RoomList {
    waiting: BTreeMap<RoomKey, u32>,
    /// Of each way: what one has no room for takes no turn from those who wait for another.
    turns: BTreeMap<Way, Turns>,
    tickets: u64,
    /// There may be room where there was none.
    pub(crate) look: bool,
    /// The way that was looked at first the last time.
    last: Option<Way>,
    /// The ways that were stuck then, each with the first ticket of those who began to wait later.
    stuck: BTreeMap<Way, u64>,
}

impl RoomList {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    fn is_awaited(&self, way: Way) -> bool {
        !self.waiting.is_empty()
            && self
                .waiting
                .range((way, false, 0)..=(way, true, u64::MAX))
                .next()
                .is_some()
    }

    /// Who of one kind has waited longest for `way`: where that is stuck, of those who have since
    /// before.
    fn first(&self, way: Way, bulk: bool) -> Option<RoomKey> {
        let later = self.stuck.get(&way).copied().unwrap_or(u64::MAX);
        let mut waiting = self.waiting.range((way, bulk, 0)..(way, bulk, later));
        waiting.next().map(|(&key, _)| key)
    }

    /// Takes whose turn it is on `way`.
    pub(crate) fn pop(&mut self, way: Way) -> Option<u32> {
        let (urgent, bulk) = (self.first(way, false), self.first(way, true));
        let turns = self.turns.entry(way).or_default();
        let key = if turns.is_urgent(urgent.is_some(), bulk.is_some()) {
            urgent
        } else {
            bulk
        };
        self.waiting.remove(&key?)
    }

    /// The ways that somebody waits for, each first in its turn.
    pub(crate) fn ways(&mut self) -> Vec<Way> {
        use std::ops::Bound::{Excluded, Unbounded};
        let mut ways = Vec::new();
        let mut behind = Unbounded;
        while let Some((&(way, ..), _)) = self.waiting.range((behind, Unbounded)).next() {
            ways.push(way);
            behind = Excluded((way, true, u64::MAX));
        }
        let first = ways.iter().position(|&way| Some(way) > self.last);
        ways.rotate_left(first.unwrap_or(0));
        self.last = ways.first().copied();
        self.stuck.retain(|way, _| ways.contains(way));
        self.turns.retain(|way, _| ways.contains(way));
        ways
    }

    /// Notes whether a way is stuck.
    pub(crate) fn note(&mut self, way: Way, stuck: bool) {
        if stuck {
            self.stuck.entry(way).or_insert(self.tickets + 1);
        } else {
            self.stuck.remove(&way);
        }
    }

    /// Whether somebody has waited for `way` since before it was stuck.
    pub(crate) fn outwaited(&self, way: Way) -> bool {
        self.stuck.contains_key(&way)
            && [false, true]
                .into_iter()
                .any(|bulk| self.first(way, bulk).is_some())
    }
}

/// Packets that a queue pair may send in its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// Packets with data of any length.
    pub(crate) data: u32,
    /// Answers without data.
    pub(crate) answers: u32,
    /// There is so little room, or others wait for it: who is told of more when there is waits for that. The
    /// host tells nobody of more than [`ENOUGH_ROOM`], however much somebody could use.
    pub(crate) is_little: bool,
}

/// Bytes of headers in front of and behind the data of a packet at most.
pub(crate) const HEADERS: usize = 128;
/// Bytes of [`Room`] that an answer takes at most.
const ANSWER_SIZE: usize = HEADERS + FRAME_OVERHEAD;
/// Bytes of [`Room`] that are for answers alone: an acknowledgement does not wait behind the data
/// of others, or their peers would take it for lost.
pub const ANSWER_RESERVE: usize = 128 << 10;

/// How long a queue pair that sends a stream waits for more before it sleeps, in nanoseconds.
const NAP: u64 = 50_000;
/// Nanoseconds that a queue pair without work is looked at while others have some.
const LONG_NAP: u64 = 1_000_000;
/// Queue pairs that are looked at for the sake of others.
const MAX_LONG_NAPS: usize = 128;

/// The wait of a queue pair for more of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Nap {
    /// Where the send queue was when it began.
    taken: u32,
    /// Where the peer's requests were then.
    asked: u32,
    until: u64,
    /// It goes on while other queue pairs have work.
    is_long: bool,
    /// As long as that at most.
    last: u64,
    /// It is among [`Core::naps`].
    pub(crate) queued: bool,
}

/// Which queue pairs had work of late.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// The last, and when.
    last: (u32, u64),
    /// When the last other than that had some.
    other: Option<u64>,
}

impl Stream {
    /// Work of a queue pair was taken up.
    fn took(&mut self, qpn: u32, now: u64) {
        let (last, at) = self.last;
        if last != qpn {
            self.other = Some(at);
        }
        self.last = (qpn, now);
    }

    /// Whether another queue pair than the one whose work was taken up last had some of late.
    fn has_other(&self, qpn: u32, now: u64) -> bool {
        let (last, at) = self.last;
        let other = if last == qpn { self.other } else { Some(at) };
        other.is_some_and(|at| now.saturating_sub(at) < NAP)
    }
}

/// With frames to itself undelivered that cost so much, there is no room for more.
const LOOPBACK_LIMIT: usize = 1024;
/// Frames to itself that are kept at most.
const MAX_LOOPBACK: usize = 4096;

/// As many copies for members of a group cost as much as a frame.
pub(crate) const COPIES_PER_FRAME: usize = 4;

/// Frames from this device to itself, with the buffers of those delivered kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct Loopback {
    /// Each with what it costs to deliver it, in frames to one queue pair, and what has carried it: a raw
    /// packet is looked at as one from the wire.
    frames: VecDeque<(usize, Medium, Vec<u8>)>,
    /// The sum of that. Frames to a group do not keep those of others waiting behind a thousand like them.
    cost: usize,
    spare: Vec<Vec<u8>>,
}

impl Loopback {
    pub(crate) fn push(&mut self, frame: &[u8], cost: usize, medium: Medium) {
        if self.frames.len() >= MAX_LOOPBACK {
            // Lost like on any wire.
            return;
        }
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(frame);
        self.frames.push_back((cost, medium, buffer));
        self.cost += cost;
    }

    pub(crate) fn pop(&mut self) -> Option<(Medium, Vec<u8>)> {
        let (cost, medium, frame) = self.frames.pop_front()?;
        self.cost -= cost;
        Some((medium, frame))
    }

    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < 64 {
            self.spare.push(buffer);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(crate) fn room(&self) -> Room {
        let frames = LOOPBACK_LIMIT.saturating_sub(self.cost);
        Room::Bytes(frames * ((1 << MAX_LOG_MTU) + ANSWER_SIZE))
    }
}

/// The index of a tag that stands for the commands that were not taken up yet: who waits for it tries
/// again when they are. No tag has it.
pub(crate) const COMMANDS: u32 = 0;

/// How a use of a tag has waited so far; it begins with the use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Waited {
    #[default]
    No,
    /// For a pending tag.
    ForTag,
    /// For the commands before this index to be taken up, whatever else.
    ForCommands(u32),
}

/// When to look again whether something is lent: later each time that it still is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LentLook {
    at: u64,
    wait: u64,
}

impl LentLook {
    /// Nanoseconds until the second look. A copy takes some microseconds, and a driver that releases a tag looks for
    /// 50 before it waits for the answer.
    const FIRST: u64 = 50_000;
    /// And between two in the end, where who is to read it does not.
    const MOST: u64 = 5_000_000;

    /// Something is lent `now`.
    fn was_lent(&mut self, now: u64) {
        if now >= self.at {
            self.wait = (2 * self.wait).clamp(Self::FIRST, Self::MOST);
            self.at = now + self.wait;
        }
    }
}

/// A producer index that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadIndex;

/// The control ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlRing {
    pub(crate) address: u64,
    pub(crate) log_entries: u8,
    /// It has a [`ferrite_abi::ControlRecord`].
    has_record: bool,
    /// Commands taken up, free-running.
    pub(crate) consumer: u32,
    /// Commands posted, as far as the driver has said.
    pub(crate) producer: u32,
    /// What the last doorbell said.
    rung: u32,
    /// Commands that were taken up because of the record, and whose doorbell is still to come.
    early: u32,
    /// The driver is shown turns.
    shows_turns: bool,
    /// What it was shown last: odd within a turn.
    turn: u32,
}

impl ControlRing {
    /// An empty one.
    pub(crate) fn new(address: u64, log_entries: u8, has_record: bool, shows_turns: bool) -> Self {
        Self {
            address,
            log_entries,
            has_record,
            consumer: 0,
            producer: 0,
            rung: 0,
            early: 0,
            shows_turns,
            turn: 0,
        }
    }

    /// The address of a word of the record.
    fn record(&self, offset: usize) -> u64 {
        // Cannot wrap: the record was looked for at the start.
        self.address + control_record_offset(self.log_entries) + offset as u64
    }

    /// Looks at what the record says of the commands.
    fn look_at_record<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), FatalCode> {
        let producer = memory
            .load_u32(self.record(offset_of!(ControlRecord, producer)))
            .map_err(|_| FatalCode::HostMemory)?;
        self.read_record(producer)
            .map_err(|BadIndex| FatalCode::BadCommandIndex)
    }

    /// Shows the driver, where that was agreed on, that there was no turn yet.
    pub(crate) fn show_no_turn<M: HostMemory + ?Sized>(&self, memory: &M) -> Result<(), DmaError> {
        if !self.shows_turns {
            return Ok(());
        }
        memory.store_u32(self.record(offset_of!(ControlRecord, turn)), self.turn)
    }

    /// Shows the driver that a turn begins, or ends.
    fn show_turn<M: HostMemory + ?Sized>(&mut self, memory: &M) -> Result<(), FatalCode> {
        self.turn = self.turn.wrapping_add(1);
        memory
            .store_u32(self.record(offset_of!(ControlRecord, turn)), self.turn)
            .map_err(|_| FatalCode::HostMemory)
    }

    /// Commands before `producer` that were not taken up, unless there cannot be that many.
    fn ahead(&self, producer: u32) -> Result<u32, BadIndex> {
        let ahead = producer.wrapping_sub(self.consumer);
        if ahead > 1 << self.log_entries {
            return Err(BadIndex);
        }
        Ok(ahead)
    }

    /// A doorbell says that commands were posted up to `producer`.
    pub(crate) fn ring(&mut self, producer: u32) -> Result<(), BadIndex> {
        let behind = self.consumer.wrapping_sub(producer);
        if let Ok(ahead) = self.ahead(producer) {
            // What the record has said is not taken back by a doorbell that was written before.
            if !self.has_record || ahead > self.producer.wrapping_sub(self.consumer) {
                self.producer = producer;
            }
            self.early = 0;
        } else if behind <= self.early {
            // The record said so before.
            self.early = behind;
        } else {
            return Err(BadIndex);
        }
        self.rung = producer;
        Ok(())
    }

    /// Whether the commands before this index were taken up.
    fn has_taken_up(&self, index: u32) -> bool {
        // Those are never ahead by more than the ring is long, nor behind by more than a wait is.
        self.consumer.wrapping_sub(index) <= u32::MAX / 2
    }

    /// The record says so.
    fn read_record(&mut self, producer: u32) -> Result<(), BadIndex> {
        if self.ahead(producer)? > self.producer.wrapping_sub(self.consumer) {
            self.producer = producer;
        }
        Ok(())
    }

    /// The next command was taken up.
    pub(crate) fn taken_up(&mut self) {
        if self.early != 0 || self.consumer == self.rung {
            self.early = self.early.saturating_add(1);
        }
        self.consumer = self.consumer.wrapping_add(1);
    }
}

/// Everything but the queue pairs.
#[derive(Debug)]
pub struct Core {
    /// What the engine was told.
    pub config: Config,
    /// What it is doing.
    pub(crate) state: DeviceState,
    pub(crate) fatal: Option<FatalCode>,
    pub(crate) link_up: bool,
    /// Base-2 logarithm of the port's active MTU.
    pub(crate) log_mtu: u8,
    /// Features the driver said it will use.
    pub features: u64,
    /// The minor version of the interface that the driver speaks.
    pub(crate) driver_minor: u16,
    /// Where commands come from.
    pub(crate) control: Option<ControlRing>,
    /// Where events go, where the driver has said so.
    pub(crate) vectors: VectorMap,
    /// Tags.
    pub tpt: Tpt,
    /// Completion queues.
    pub cqs: CompletionQueues,
    /// Event queues.
    pub eqs: EventQueues,
    /// Shared receive queues.
    pub srqs: SharedReceiveQueues,
    /// Multicast groups.
    pub groups: Groups,
    /// Rules of raw packets.
    pub(crate) flows: Flows,
    /// Pages that are waited for.
    pub paging: Paging,
    /// Channels and the interface.
    pub(crate) network: Network,
    /// Addresses.
    pub gids: GidTable,
    /// Counters.
    pub counters: Counters,
    /// Deadlines.
    pub timers: Timers,
    /// Deadlines of bulk events that have come, while those of low latency are served.
    pub(crate) late_timers: Vec<(TimerOwner, u64)>,
    /// Queue pairs with something to send.
    pub ready: ReadyList,
    /// Queue pairs with something to send and no room for it.
    pub(crate) room: RoomList,
    /// Queue pairs to look at again, and when; the times hardly differ, so that their order is
    /// that of the queue.
    pub(crate) naps: VecDeque<(u64, u32)>,
    /// Where among these was looked last.
    pub(crate) looked: usize,
    /// Which queue pairs had work of late.
    pub(crate) stream: Stream,
    pub(crate) loopback: Loopback,
    /// What is lent is lent as long as the engine runs.
    lender: Lender,
    /// A turn goes on, since something is lent.
    lent_look: Option<LentLook>,
    /// When to look at queue pairs of which an answer waits until what they have lent was read.
    pub(crate) behind_lent: BTreeSet<(u64, u32)>,
    /// What the device does wrong on purpose.
    pub(crate) misbehaviour: Option<Box<Misbehaving>>,
    /// The time of the present call, in nanoseconds.
    pub now: u64,
    /// Entries of queues that were moved or flushed so far, windows that went with their queue pair,
    /// copies of a frame for members of a group, and of what is lent: what a turn may not have too much of.
    pub work: u64,
    /// What the transport shares among queue pairs: scratch buffers. Take it out with
    /// [`std::mem::take`] while calling methods of the core.
    pub transport: crate::transport::Shared,
}

impl Core {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            tpt: Tpt::new(config.tags),
            cqs: CompletionQueues::new(config.cqs),
            srqs: SharedReceiveQueues::new(config.srqs),
            network: Network::new(config.mac),
            config,
            state: DeviceState::Ready,
            fatal: None,
            link_up: true,
            log_mtu: MAX_LOG_MTU,
            features: 0,
            driver_minor: 0,
            control: None,
            vectors: VectorMap::default(),
            eqs: EventQueues::default(),
            groups: Groups::default(),
            flows: Flows::default(),
            paging: Paging::default(),
            gids: GidTable::default(),
            counters: Counters::default(),
            timers: Timers::default(),
            late_timers: Vec::new(),
            ready: ReadyList::default(),
            room: RoomList::default(),
            naps: VecDeque::new(),
            looked: 0,
            stream: Stream::default(),
            loopback: Loopback::default(),
            lender: Lender::default(),
            lent_look: None,
            behind_lent: BTreeSet::new(),
            misbehaviour: None,
            now: 0,
            work: 0,
            transport: crate::transport::Shared::default(),
        }
    }

    /// Back to the state after power-on; configuration, link, counters and misbehaviour stay.
    pub(crate) fn reset(&mut self) {
        let link_up = self.link_up;
        let mut counters = std::mem::take(&mut self.counters);
        counters.resets += 1;
        let now = self.now;
        let mut misbehaviour = self.misbehaviour.take();
        if let Some(misbehaving) = &mut misbehaviour {
            misbehaving.was_reset();
        }
        let mut network = std::mem::replace(&mut self.network, Network::new(self.config.mac));
        network.reset(self.config.mac);
        *self = Self::new(self.config.clone());
        self.network = network;
        self.misbehaviour = misbehaviour;
        self.link_up = link_up;
        self.counters = counters;
        self.now = now;
    }

    /// Counts from zero.
    pub(crate) fn forget_counters(&mut self) {
        self.counters = Counters::default();
        self.network.forget_counters();
    }

    /// True between `CONTROL_ENABLE` and a reset or fatal error.
    pub fn is_running(&self) -> bool {
        self.state == DeviceState::Running
    }

    /// True while a reset was asked for and is not done.
    pub(crate) fn is_resetting(&self) -> bool {
        self.misbehaviour
            .as_ref()
            .is_some_and(|misbehaving| misbehaving.is_resetting())
    }

    pub(crate) fn status(&self) -> Status {
        if self.is_resetting() {
            return Status::new(DeviceState::Resetting, None, self.link_up);
        }
        Status::new(self.state, self.fatal, self.link_up)
    }

    /// Stops the device: nothing is done any more until a reset.
    pub(crate) fn fail(&mut self, code: FatalCode, host: &mut dyn Host) {
        if self.state == DeviceState::Fatal {
            return;
        }
        self.state = DeviceState::Fatal;
        self.fatal = Some(code);
        // Who is told takes its memory for its own.
        self.lender.end();
        self.last_event(code, host);
        self.timers.clear();
        self.late_timers.clear();
        self.ready = ReadyList::default();
        self.room = RoomList::default();
        self.naps.clear();
        self.behind_lent.clear();
        self.loopback = Loopback::default();
        // What waited is not looked at again: that could touch memory.
        self.paging = Paging::default();
    }

    /// Has the transport's `send` called for this queue pair by the next poll.
    pub fn schedule(&mut self, qp: &mut QueuePair) {
        if !qp.ready {
            qp.ready = true;
            let urgent = self.is_urgent(qp);
            self.ready.push(qp.number, urgent);
        }
    }

    /// Whether a queue pair is served before others: one of its completion queues has its events in
    /// a queue of low latency.
    fn is_urgent(&self, qp: &QueuePair) -> bool {
        self.eqs.has_low_latency()
            && (self.completes_urgently(qp.send_cqn, false)
                || self.completes_urgently(qp.receive_cqn, true))
    }

    /// Whether a queue pair that has nothing to send stays awake a little longer. Whoever posts
    /// while others of its messages are under way posts a stream; it is spared the doorbells, and
    /// the device looks again with the next acknowledgement, at the latest after [`NAP`].
    ///
    /// So is who posts while messages of other queue pairs are under way that were posted of late: each
    /// stays awake as long as that is so, for [`LONG_NAP`] at most, and the device looks at it whenever it is
    /// at work ([`crate::Engine::look_around`]). Not so one that answers requests of its peer: who asks waits
    /// for it.
    pub(crate) fn takes_a_nap(&mut self, qp: &mut QueuePair) -> bool {
        let under_way = qp.transport.messages_under_way();
        let taken = qp.send.next();
        // Where nothing is under way somebody may be waiting for one answer after the other.
        let others = self.transport.under_way > under_way && self.naps.len() < MAX_LONG_NAPS;
        let nap = &mut qp.nap;
        if nap.taken != taken {
            self.stream.took(qp.number, self.now);
            let asked = qp.transport.expected_psn();
            nap.is_long = under_way > 0
                && nap.asked == asked
                && others
                && self.stream.has_other(qp.number, self.now);
            nap.asked = asked;
            nap.taken = taken;
            nap.until = self.now.saturating_add(NAP);
            nap.last = self.now.saturating_add(LONG_NAP);
        }
        if under_way <= 1 && !nap.is_long {
            return false;
        }
        if nap.until <= self.now {
            let goes_on = nap.is_long && others && self.stream.has_other(qp.number, self.now);
            if !goes_on || nap.last <= self.now {
                return false;
            }
            nap.until = self.now.saturating_add(NAP);
        }
        if !nap.queued {
            nap.queued = true;
            self.naps.push_back((nap.until, qp.number));
        }
        true
    }

    /// (Re)starts the timer of a queue pair.
    pub fn start_timer(&mut self, qp: &mut QueuePair, deadline: u64) {
        let owner = TimerOwner::QueuePair(qp.number);
        self.timers.start(&mut qp.timer, owner, deadline);
    }

    /// Whether the deadline is of an event that others come before.
    pub(crate) fn is_bulk_event(&self, owner: TimerOwner) -> bool {
        self.eqs.has_low_latency()
            && match owner {
                TimerOwner::QueuePair(_) => false,
                TimerOwner::EventQueue(eqn) => !self.eqs.is_low_latency(eqn),
                TimerOwner::CompletionQueue(cqn) => !self.tells_urgently(cqn),
            }
    }

    /// The entry of a deadline came up that is of an event.
    pub(crate) fn event_timer(&mut self, owner: TimerOwner, entry: u64, host: &mut dyn Host) {
        let now = self.now;
        match owner {
            TimerOwner::EventQueue(eqn) => self.eq_timer(eqn, entry, now, host),
            TimerOwner::CompletionQueue(cqn) => self.cq_timer(cqn, entry, now, host),
            TimerOwner::QueuePair(_) => {}
        }
    }

    /// Serves the deadlines of bulk events that were put off.
    pub(crate) fn serve_late_timers(&mut self, host: &mut dyn Host) {
        let mut late = std::mem::take(&mut self.late_timers);
        for (owner, entry) in late.drain(..) {
            // One of them may have stopped the device.
            if self.is_running() {
                self.event_timer(owner, entry, host);
            }
        }
        // Its memory is used again.
        self.late_timers = late;
    }

    /// Bytes that a raw packet may have behind its Ethernet header and tag.
    pub(crate) fn raw_mtu(&self) -> usize {
        if self.has_interface() {
            self.network.mtu()
        } else {
            RAW_MAX_MTU.into()
        }
    }

    /// What a frame to this address leaves by.
    pub fn way(&self, destination: &Mac, host: &dyn Host) -> Way {
        if *destination == self.config.mac {
            Way::Loopback
        } else {
            host.way(destination)
        }
    }

    pub(crate) fn room_on(&self, way: Way, host: &mut dyn Host) -> Room {
        match way {
            Way::Loopback => self.loopback.room(),
            // What is sent without a link is lost wherever it waits.
            _ if !self.link_up => Room::Bytes(usize::MAX),
            _ => host.room(way),
        }
    }

    /// What may be sent by `way` now, in packets with up to `mtu` bytes of data and at most `burst`
    /// of each kind. `turn` is the way on which it is the caller's turn, if it is.
    pub(crate) fn allowance(
        &self,
        way: Way,
        mtu: usize,
        burst: u32,
        turn: Option<Way>,
        host: &mut dyn Host,
    ) -> Allowance {
        let bytes = match self.room_on(way, host) {
            Room::Bytes(bytes) => bytes,
            Room::Stuck => 0,
        };
        let packets = |bytes: usize, size: usize| (bytes / size).min(burst as usize) as u32;
        let is_behind = turn != Some(way) && self.room.is_awaited(way);
        let data = if is_behind {
            0
        } else {
            packets(bytes.saturating_sub(ANSWER_RESERVE), mtu + ANSWER_SIZE)
        };
        Allowance {
            data,
            answers: packets(bytes, ANSWER_SIZE),
            is_little: is_behind || bytes < ENOUGH_ROOM,
        }
    }

    /// Whether a packet that may get lost, with up to `mtu` bytes of data, may leave now; else the
    /// way to wait for. Nobody waits for a way that is stuck.
    pub(crate) fn room_for_datagram(
        &self,
        destination: &Mac,
        mtu: usize,
        turn: Option<Way>,
        host: &mut dyn Host,
    ) -> Result<(), Way> {
        let way = self.way(destination, host);
        // A member of the group on this side gets a copy.
        let copied = destination[0] & 1 != 0 && !self.groups.is_empty();
        for way in [way, Way::Loopback]
            .into_iter()
            .take(1 + usize::from(copied))
        {
            if self.allowance(way, mtu, 1, turn, host).data == 0
                && self.room_on(way, host) != Room::Stuck
            {
                return Err(way);
            }
        }
        Ok(())
    }

    /// Whether there is room for a packet of any length on a way; `None` if it is stuck.
    pub(crate) fn has_room(&self, way: Way, host: &mut dyn Host) -> Option<bool> {
        match self.room_on(way, host) {
            Room::Bytes(bytes) => {
                Some(bytes.saturating_sub(ANSWER_RESERVE) >= (1 << MAX_LOG_MTU) + ANSWER_SIZE)
            }
            Room::Stuck => None,
        }
    }

    /// Has `qp` wait for room on `way`.
    pub(crate) fn wait_for_room(&mut self, qp: &mut QueuePair, way: Way) {
        if qp.waits_for_room.is_some_and(|(other, ..)| other == way) {
            return;
        }
        self.stop_waiting(qp);
        self.room.tickets += 1;
        let key = (way, !self.is_urgent(qp), self.room.tickets);
        qp.waits_for_room = Some(key);
        self.room.waiting.insert(key, qp.number);
    }

    /// `qp` waits for no room any more.
    pub(crate) fn stop_waiting(&mut self, qp: &mut QueuePair) {
        if let Some(key) = qp.waits_for_room.take() {
            self.room.waiting.remove(&key);
        }
    }

    /// Sends a frame of the queue pair with these counters: to the wire, or, where it is addressed to
    /// this device, to itself.
    pub fn transmit(&mut self, frame: &[u8], counters: &mut QpCounters, host: &mut dyn Host) {
        if !self.is_running() {
            return;
        }
        self.counters.tx_packets += 1;
        self.counters.tx_bytes += frame.len() as u64;
        counters.tx_packets += 1;
        counters.tx_bytes += frame.len() as u64;
        if frame.get(..6) == Some(&self.config.mac[..]) {
            let takers = self.flows.takers(frame).len();
            let cost = self.cost_of_coming_back(frame, takers);
            self.loopback.push(frame, cost, Medium::Memory);
            return;
        }
        if frame.first().is_some_and(|byte| byte & 1 != 0) && !self.groups.is_empty() {
            // Members of the group on this side get a copy.
            let takers = self.flows.takers(frame).len();
            let cost = self.cost_of_coming_back(frame, takers);
            self.loopback.push(frame, cost, Medium::Memory);
        }
        if self.link_up {
            host.transmit(frame);
        }
    }

    /// Sends the headers of so many packets of the queue pair with these counters, which a peer in this
    /// process takes at once, with what they carry.
    pub(crate) fn transmit_lent(
        &mut self,
        head: &[u8],
        mut loan: Loan,
        packets: u32,
        counters: &mut QpCounters,
        host: &mut dyn Host,
    ) {
        if !self.is_running() {
            return;
        }
        let bytes = (head.len() + loan.len()) as u64;
        self.counters.tx_packets += u64::from(packets);
        self.counters.tx_bytes += bytes;
        counters.tx_packets += u64::from(packets);
        counters.tx_bytes += bytes;
        if self.link_up {
            loan.fit();
            host.transmit_lent(head, Arc::new(loan));
        }
    }

    /// What a frame costs that comes back, in packets: its copies are for the members of a group, or else
    /// for so many that rules name.
    pub(crate) fn cost_of_coming_back(&self, frame: &[u8], takers: usize) -> usize {
        1 + self.copies(frame).max(takers) / COPIES_PER_FRAME
    }

    /// Whether a frame is from another address than this device's.
    pub(crate) fn is_foreign(&self, frame: &[u8]) -> bool {
        frame.get(6..12) != Some(&self.config.mac[..])
            || Frame::parse(frame)
                .is_some_and(|frame| !self.gids.contains(&frame.source, frame.vlan_id()))
    }

    /// How many members of a group on this side a frame is for. What address of Ethernet it has does not
    /// matter, which is the program's to choose.
    fn copies(&self, frame: &[u8]) -> usize {
        if self.groups.is_empty() {
            return 0;
        }
        let frame = Frame::parse(frame);
        frame
            .filter(|frame| frame.destination_qpn() == MULTICAST_QPN)
            .map_or(0, |frame| self.groups.members(&frame.destination).len())
    }

    /// Ends a work request of `qp`'s send queue, and with it (in order) all before it: writes the
    /// completion, if one is wanted or `status` is an error, and frees its blocks.
    ///
    /// After an error status the caller calls [`crate::qp::enter_error`]; when this returns an
    /// error, [`crate::qp::fail`].
    pub fn complete_send(
        &mut self,
        qp: &mut QueuePair,
        completion: &SendCompletion,
        host: &mut dyn Host,
    ) -> Result<(), CompletionQueueDead> {
        qp.send
            .retire(completion.index.wrapping_add(completion.blocks));
        let failed = completion.status != CompletionStatus::Success;
        let written = if failed || completion.signaled {
            let entry = CompletionEntry {
                qpn: qp.number,
                index: completion.index,
                byte_count: completion.byte_count,
                vendor_syndrome: completion.vendor_syndrome,
                status: completion.status.number(),
                opcode: completion_opcode(completion.opcode).number(),
                vlan: VLAN_NONE,
                ..CompletionEntry::zeroed()
            };
            let written = self.write_completion(qp.send_cqn, entry, failed, host);
            qp.counters.completions += u64::from(written.is_ok());
            written
        } else {
            Ok(())
        };
        if qp.draining && qp.send.retired() == qp.send.next() && !failed {
            qp.draining = false;
            self.async_event(EventCode::SendQueueDrained, qp.number, host);
        }
        written
    }

    /// Ends an entry of `qp`'s receive queue. Errors as for [`Core::complete_send`].
    pub fn complete_receive(
        &mut self,
        qp: &mut QueuePair,
        completion: &ReceiveCompletion,
        host: &mut dyn Host,
    ) -> Result<(), CompletionQueueDead> {
        let mut cqn = qp.receive_cqn;
        let mut flags = completion.flags | COMPLETION_RECEIVE;
        match completion.shared {
            Some(shared) => {
                // It may have been destroyed under an extended connection.
                let queue = self.srqs.current(shared).ok_or(CompletionQueueDead)?;
                flags |= COMPLETION_SRQ;
                cqn = queue.cqn().unwrap_or(cqn);
            }
            None => qp.receive.retire(completion.index.wrapping_add(1)),
        }
        let solicited = completion.status != CompletionStatus::Success
            || completion.flags & COMPLETION_SOLICITED != 0;
        let entry = CompletionEntry {
            qpn: qp.number,
            index: completion.index,
            byte_count: completion.byte_count,
            tag: completion.tag,
            immediate: completion.immediate.into(),
            vendor_syndrome: completion.vendor_syndrome,
            status: completion.status.number(),
            opcode: completion.opcode.number(),
            flags,
            srqn: completion.shared.map_or(0, |shared| shared.srqn),
            source_qpn: completion.origin.map_or(0, |origin| origin.qpn),
            source_mac: completion.origin.map_or([0; 6], |origin| origin.mac),
            vlan: completion.origin.map_or(VLAN_NONE, |origin| origin.vlan),
            ..CompletionEntry::zeroed()
        };
        let written = self.write_completion(cqn, entry, solicited, host);
        qp.counters.completions += u64::from(written.is_ok());
        written
    }

    /// Copies bytes `offset..` of the message that `request` sends (its scatter/gather entries or
    /// inline data) into `bytes`, with the checks of each entry touched.
    pub fn gather<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        domain: Domain,
        request: &SendRequest,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), TptError> {
        if let Some(data) = request.inline() {
            let data = usize::try_from(offset)
                .ok()
                .and_then(|offset| data.get(offset..)?.get(..bytes.len()))
                .ok_or(TptError::OutOfBounds)?;
            bytes.copy_from_slice(data);
            return Ok(());
        }
        let length = bytes.len();
        for_pieces(request.sges(), offset, length, |sge, within, range| {
            let span = self.check_piece(sge, within, range.len(), domain, LocalAccess::Read)?;
            self.tpt.read(memory, &span, 0, &mut bytes[range])
        })
    }

    /// Copies `bytes` to bytes `offset..` of what scatter/gather entries describe (those of a
    /// receive, a read or an atomic), with the checks of what is touched of each entry. Nothing is
    /// copied unless all of it may be, and the pages of on-demand regions are there.
    pub fn scatter<'a, M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        domain: Domain,
        sges: &[Sge],
        offset: u64,
        data: impl Into<Data<'a>>,
    ) -> Result<(), TptError> {
        let data = data.into();
        let check = |sge: &Sge, within, length| {
            self.check_piece(sge, within, length, domain, LocalAccess::Write)
        };
        // What goes to one entry is written when all of its pages are there, and not before.
        if sges.len() > 1 {
            let mut pages = Ok(());
            for_pieces(sges, offset, data.len(), |sge, within, range| {
                let length = range.len();
                let span = check(sge, within, length)?;
                // A page is not waited for in vain: all may be written before one is looked for.
                pages = pages.and_then(|()| self.tpt.probe(memory, &span, 0, length, true));
                Ok(())
            })?;
            pages?;
        }
        for_pieces(sges, offset, data.len(), |sge, within, range| {
            let span = check(sge, within, range.len())?;
            self.tpt.write(memory, &span, 0, data.slice(range))
        })
    }

    /// Lends bytes `offset..offset + length` of the message that `request` sends in packets of this MTU, with the checks of
    /// [`Core::gather`]. `None` where some of it cannot be lent, or something is wrong, as is found out
    /// by who gathers it then.
    pub(crate) fn lend<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        domain: Domain,
        request: &SendRequest,
        offset: u64,
        (length, log_mtu): (usize, u8),
    ) -> Option<Loan> {
        if request.inline().is_some() {
            return None;
        }
        let mut loan = self.new_loan(log_mtu);
        let mut lent = true;
        let checked = for_pieces(request.sges(), offset, length, |sge, within, range| {
            let length = range.len();
            let span = self.check_piece(sge, within, length, domain, LocalAccess::Read)?;
            lent = lent && self.tpt.lend(memory, &span, 0, length, &mut loan)?;
            Ok(())
        });
        (checked.is_ok() && lent).then_some(loan)
    }

    /// A loan of nothing yet, that is over when the engine does nothing any more.
    pub(crate) fn new_loan(&self, log_mtu: u8) -> Loan {
        let mut loan = Loan::in_packets(log_mtu);
        loan.depend_on(&self.lender);
        loan
    }

    /// Looks whether the pages that bytes `offset..offset + length` of what scatter/gather entries
    /// describe go to are there and may be written.
    pub fn probe<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        domain: Domain,
        sges: &[Sge],
        offset: u64,
        length: usize,
    ) -> Result<(), TptError> {
        for_pieces(sges, offset, length, |sge, within, range| {
            let length = range.len();
            let span = self.check_piece(sge, within, length, domain, LocalAccess::Write)?;
            self.tpt.probe(memory, &span, 0, length, true)
        })
    }

    /// A page that queue pair `qpn` needs is not there: has the host see to it, unless it has said
    /// that the page cannot be had.
    pub fn page_fault(
        &mut self,
        qpn: u32,
        side: Side,
        fault: Fault,
        host: &mut dyn Host,
    ) -> Outcome {
        let (outcome, tell) = self.paging.raise(qpn, side, fault);
        if tell {
            self.async_event(EventCode::PageFaults, 0, host);
        }
        outcome
    }

    /// Whether all commands were taken up that the device knows of.
    pub(crate) fn has_taken_up_all(&self) -> bool {
        let ring = self.control.as_ref();
        ring.is_none_or(|ring| ring.consumer == ring.producer)
    }

    /// The table refuses a use of a tag: that counts if it has heard of every command that the driver
    /// gave before the use was posted. Else what is to be waited for first: they are taken up in the next
    /// turn, whatever the doorbell says. A use that has `waited` for that does not wait for commands that
    /// were given later.
    ///
    /// Whoever posted the use, here or at the peer, had the tag after the driver had stored the index
    /// of its command; what made the device see the use so makes it see that index.
    #[cold]
    pub(crate) fn confirm(
        &mut self,
        error: TptError,
        waited: Waited,
        host: &mut dyn Host,
    ) -> TptError {
        let ring = self.control.as_mut().filter(|ring| ring.has_record);
        let (Some(ring), true) = (ring, error.is_of_no_tag()) else {
            return error;
        };
        if let Waited::ForCommands(index) = waited {
            return if ring.has_taken_up(index) {
                error
            } else {
                TptError::Pending(COMMANDS)
            };
        }
        match ring.look_at_record(host) {
            Ok(()) if ring.consumer == ring.producer => return error,
            Ok(()) => {}
            Err(code) => self.fail(code, host),
        }
        TptError::Pending(COMMANDS)
    }

    /// A turn begins. Returns whether there are commands to take up.
    pub(crate) fn begin_turn(&mut self, host: &mut dyn Host) -> bool {
        let running = self.is_running();
        let ring = self.control.as_mut().filter(|ring| ring.shows_turns);
        let Some(ring) = ring.filter(|_| running) else {
            return false;
        };
        // One that goes on, since something was lent, shows no other number: that would say that it is over.
        let begun = if ring.turn % 2 == 0 {
            ring.show_turn(host)
        } else {
            Ok(())
        };
        let shown = begun.and_then(|()| {
            // Against that of who stores an index and looks for a turn: one of the two sees the other's.
            host.fence();
            ring.look_at_record(host)
        });
        let more = ring.consumer != ring.producer;
        if let Err(code) = shown {
            self.fail(code, host);
        }
        more
    }

    /// The turn ends, unless something is lent: tags are used as long as others may read what they name. It then
    /// goes on until the end of one after which nothing is.
    pub(crate) fn end_turn(&mut self, host: &mut dyn Host) {
        let running = self.is_running();
        let is_lent = self.lender.is_lent();
        let ring = self.control.as_mut().filter(|ring| ring.shows_turns);
        // A device that failed shows nothing: the driver finds that out in another way.
        let Some(ring) = ring.filter(|ring| running && ring.turn % 2 == 1) else {
            self.lent_look = None;
            return;
        };
        if is_lent {
            let look = self.lent_look.get_or_insert_default();
            return look.was_lent(self.now);
        }
        self.lent_look = None;
        if let Err(code) = ring.show_turn(host) {
            self.fail(code, host);
        }
    }

    /// When to look whether what was lent is still read, so that a turn ends for which nothing else is due: who has
    /// read it says nothing. As long as messages are under way there is mostly more to come, in whose turn that is seen:
    /// then it is later, so that not each message wakes who looks.
    pub(crate) fn next_look_at_lent(&self) -> Option<u64> {
        let look = self.lent_look.as_ref().filter(|_| self.is_running())?;
        let later = match self.transport.under_way {
            0 => 0,
            _ => LentLook::MOST,
        };
        Some(look.at + later)
    }

    /// An answer of `qp` waits until what it has lent was read: who reads that tells nobody.
    pub(crate) fn wait_behind_lent(&mut self, qp: &mut QueuePair) {
        let look = qp.transport.behind_lent.get_or_insert_default();
        look.was_lent(self.now);
        self.behind_lent.insert((look.at, qp.number));
    }

    /// No answer of `qp` waits for that any more.
    pub(crate) fn goes_past_lent(&mut self, qp: &mut QueuePair) {
        if let Some(look) = qp.transport.behind_lent.take() {
            self.behind_lent.remove(&(look.at, qp.number));
        }
    }

    /// The next queue pair whose answer waited so until now.
    pub(crate) fn next_behind_lent(&mut self) -> Option<u32> {
        let first = self.behind_lent.first();
        let (at, qpn) = *first.filter(|(at, _)| *at <= self.now)?;
        self.behind_lent.remove(&(at, qpn));
        Some(qpn)
    }

    /// A use of queue pair `qpn` waits for what becomes of the tag with this index; it is counted once.
    pub(crate) fn wait_for_tag(&mut self, qpn: u32, side: Side, index: u32, waited: &mut Waited) {
        self.counters.pending_waits += u64::from(matches!(waited, Waited::No));
        match (&self.control, &waited) {
            (_, Waited::ForCommands(_)) => {}
            (Some(ring), _) if index == COMMANDS => *waited = Waited::ForCommands(ring.producer),
            _ => *waited = Waited::ForTag,
        }
        self.paging.wait_for_tag(qpn, side, index);
    }

    /// Checks every entry that has bytes, before anything is sent or asked of a peer. Not for
    /// receives, of which a message may need less than there is.
    pub fn check_sges(
        &self,
        domain: Domain,
        sges: &[Sge],
        access: LocalAccess,
    ) -> Result<(), TptError> {
        sges.iter().try_for_each(|sge| {
            self.check_piece(sge, 0, sge.length as usize, domain, access)
                .map(|_| ())
        })
    }

    /// Whether bytes `offset..offset + length` of what these entries describe include memory whose
    /// registration by work request is not
    /// complete because something before it is not: a use that [`crate::Counters::early_uses`]
    /// counts.
    pub(crate) fn uses_early(&self, sges: &[Sge], offset: u64, length: usize) -> bool {
        if !self.tpt.has_early() {
            return false;
        }
        let mut early = false;
        // What is not there was refused before.
        let _ = for_pieces(sges, offset, length, |sge, _, _| {
            early |= self.tpt.is_early(sge.lkey);
            Ok(())
        });
        early
    }

    /// Checks the `length` bytes from byte `within` of an entry.
    fn check_piece(
        &self,
        sge: &Sge,
        within: u64,
        length: usize,
        domain: Domain,
        access: LocalAccess,
    ) -> Result<crate::tpt::Span, TptError> {
        let address = sge.address.checked_add(within);
        self.tpt.check_local(
            sge.lkey,
            address.ok_or(TptError::OutOfBounds)?,
            length as u64,
            domain,
            access,
        )
    }

    /// Takes the next entry of `qp`'s receive queue, or of the shared one: `srqn` with extended
    /// connections, else its own. `Ok(false)`: the receiver is not ready.
    pub fn take_receive(
        &mut self,
        host: &mut dyn Host,
        qp: &mut QueuePair,
        srqn: Option<u32>,
        request: &mut ReceiveRequest,
    ) -> Result<bool, crate::QueueError> {
        if !qp.may_receive() {
            return Ok(false);
        }
        request.domain = qp.domain();
        if let Some(srqn) = srqn.or(qp.srqn) {
            return self.take_shared(srqn, request, host);
        }
        request.shared = None;
        qp.receive.take(&*host, request)
    }
}

/// Calls `access` for each piece of `offset..offset + length` of what `sges` describe: the entry,
/// the offset in it, and the range of the piece in the bytes copied.
fn for_pieces(
    sges: &[Sge],
    offset: u64,
    length: usize,
    mut access: impl FnMut(&Sge, u64, std::ops::Range<usize>) -> Result<(), TptError>,
) -> Result<(), TptError> {
    let mut skip = offset;
    let mut done = 0;
    for sge in sges {
        if done == length {
            break;
        }
        let sge_length = u64::from(sge.length);
        if skip >= sge_length {
            skip -= sge_length;
            continue;
        }
        let piece = usize::try_from(sge_length - skip)
            .unwrap_or(usize::MAX)
            .min(length - done);
        access(sge, skip, done..done + piece)?;
        done += piece;
        skip = 0;
    }
    if done < length {
        return Err(TptError::OutOfBounds);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring of 16 entries that has come to this index.
    fn ring(at: u32, has_record: bool) -> ControlRing {
        ControlRing {
            consumer: at,
            producer: at,
            rung: at,
            ..ControlRing::new(0x1000, 4, has_record, false)
        }
    }

    fn take_up(ring: &mut ControlRing, count: u32) {
        for _ in 0..count {
            assert_ne!(ring.consumer, ring.producer);
            ring.taken_up();
        }
    }

    #[test]
    fn the_control_ring_goes_through_the_end_of_its_index() {
        // From before it, at it and behind it.
        for back in 0..8 {
            let at = |n: u32| 4u32.wrapping_sub(back).wrapping_add(n);
            // Doorbells alone: all, none, too many, behind what was taken up.
            let mut alone = ring(at(0), false);
            assert_eq!(alone.ring(at(16)), Ok(()));
            assert_eq!(alone.ring(at(17)), Err(BadIndex));
            take_up(&mut alone, 6);
            assert_eq!(alone.ring(at(16)), Ok(()));
            assert_eq!(alone.ring(at(5)), Err(BadIndex));
            assert_eq!(alone.ring(at(7)), Ok(()));
            take_up(&mut alone, 1);
            assert_eq!(alone.consumer, at(7));
            // The record first, then the doorbells that were written before it.
            let mut early = ring(at(0), true);
            assert_eq!(early.read_record(at(17)), Err(BadIndex));
            assert_eq!(early.read_record(at(0).wrapping_sub(1)), Err(BadIndex));
            assert_eq!(early.read_record(at(9)), Ok(()));
            assert!(!early.has_taken_up(at(9)) && early.has_taken_up(at(0)));
            take_up(&mut early, 9);
            assert!(early.has_taken_up(at(9)) && !early.has_taken_up(at(10)));
            for n in [1, 1, 4, 9] {
                assert_eq!(early.ring(at(n)), Ok(()), "{n}");
                assert_eq!(early.producer, at(9));
            }
            assert_eq!(early.ring(at(8)), Err(BadIndex));
            assert_eq!(early.ring(at(11)), Ok(()));
            take_up(&mut early, 2);
            assert_eq!(early.ring(at(10)), Err(BadIndex));
        }
    }

    #[test]
    fn a_doorbell_takes_back_what_was_not_taken_up_unless_there_is_a_record() {
        for has_record in [false, true] {
            let mut ring = ring(u32::MAX - 2, has_record);
            assert_eq!(ring.ring(5), Ok(()));
            assert_eq!(ring.ring(1), Ok(()));
            assert_eq!(ring.producer, if has_record { 5 } else { 1 });
            // A late one of what the record said is in order.
            if has_record {
                assert_eq!(ring.read_record(7), Ok(()));
                assert_eq!(ring.ring(6), Ok(()));
                assert_eq!(ring.producer, 7);
            }
        }
    }
}
