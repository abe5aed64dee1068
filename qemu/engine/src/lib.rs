// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The Ferrite RNIC engine, without I/O of its own: no sockets, no threads, no clock.
//!
//! What happens comes in through the methods of [`Engine`]; what the device does about it goes
//! out through the [`Host`] that each of them is given. So two devices and a bad wire between them
//! run in one thread of a test, repeatably.
//!
//! The modules follow the chapters of the device specification. [`core::Core`] is everything but
//! the queue pairs, so that work on one queue pair can borrow both; the [`transport`] is written
//! against these two.
//!
//! Everything that comes from the guest or the wire is hostile: each number is checked where it
//! enters, and nothing is allocated by such a number beyond the limits the device announces.

pub mod att;
pub mod core;
pub mod counters;
pub mod cq;
mod cqp;
pub mod device_memory;
pub mod eq;
pub mod flows;
pub mod gid;
pub mod loan;
pub mod memory;
pub mod misbehaviour;
pub mod multicast;
pub mod network;
#[cfg(test)]
mod notification;
pub mod numbers;
pub mod paging;
pub mod pins;
pub mod qp;
pub mod queue;
pub mod roce;
pub mod srq;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod timers;
pub mod tpt;
pub mod transport;
mod vectors;

pub use crate::core::{Config, Core, Personality};
pub use crate::counters::{Counters, QpCounters};
pub use crate::loan::Loan;
pub use crate::memory::{DmaError, Host, HostMemory, Lending, Room, Way};
pub use crate::misbehaviour::Misbehaviour;
pub use crate::numbers::Numbers;
pub use crate::qp::{QueuePair, QueuePairs};
pub use crate::queue::{QueueError, ReceiveRequest, SendRequest};
pub use crate::roce::Medium;

use crate::core::COPIES_PER_FRAME;
use crate::paging::Side;
use crate::timers::TimerOwner;
use ferrite_abi::{
    complete_features, control_record_offset, BootBlock, Buffer, ControlRecord, DeviceState,
    EventCode, EventDoorbell, EventEntry, FatalCode, Function, Management, Plain,
    QueuePairStateCode, Reserved, ABI_MAJOR, ABI_MINOR, BAR_DOORBELLS, BAR_REGISTERS,
    CONTROL_ENABLE, CONTROL_RESET, CQP_MAX_LOG_ENTRIES, DOORBELL_CHANNEL, DOORBELL_COMPLETION,
    DOORBELL_CONTROL, DOORBELL_EVENT_QUEUE, DOORBELL_RECEIVE, DOORBELL_SEND, DOORBELL_SRQ,
    EQ_CONTROL, EQ_MAX_LOG_ENTRIES, EQ_MIN_LOG_ENTRIES, FEATURE_CONTEXTS, FEATURE_DEVICE_MEMORY,
    FEATURE_EQ_CONTROL, FEATURE_ETHERNET, FEATURE_FAST_REGISTER, FEATURE_LISTS, FEATURE_ONE_TOUCH,
    FEATURE_ON_DEMAND, FEATURE_PENDING_TAGS, FEATURE_PORT_MTU, FEATURE_QP_COUNTERS,
    FEATURE_QUIET_COMMANDS, FEATURE_RAW_PACKETS, FEATURE_RECEIVE_TABLES, FEATURE_REDIRECTION,
    FEATURE_REGISTER_SEND, FEATURE_RESIZE_CQ, FEATURE_RESIZE_SRQ, FEATURE_SRQ, FEATURE_SWITCH_EQ,
    FEATURE_TURNS, FEATURE_VECTOR_MAP, FEATURE_WINDOWS, FEATURE_WINDOWS_ONLY, MAGIC,
    QUEUE_NUMBER_MASK, REG_ABI_VERSION, REG_BOOT, REG_CONTROL, REG_DEVICE_MEMORY_OFFSET,
    REG_DEVICE_MEMORY_SIZE, REG_DOORBELL_OFFSET, REG_DOORBELL_PAGES, REG_DOORBELL_STRIDE,
    REG_DRIVER_FEATURES, REG_DRIVER_VERSION, REG_FEATURES, REG_FIRMWARE, REG_FUNCTION, REG_MAC,
    REG_MAGIC, REG_MESSAGES, REG_RESET_TIMEOUT, REG_STATUS,
};
use std::sync::Arc;

/// Features that version 1.1 of the interface brought.
const FEATURES_OF_1_1: u64 = FEATURE_VECTOR_MAP | FEATURE_SWITCH_EQ | FEATURE_EQ_CONTROL;
/// Features that version 1.2 brought.
const FEATURES_OF_1_2: u64 =
    FEATURE_REGISTER_SEND | FEATURE_LISTS | FEATURE_PENDING_TAGS | FEATURE_TURNS;
/// Features that version 1.3 brought.
const FEATURES_OF_1_3: u64 = FEATURE_QP_COUNTERS | FEATURE_CONTEXTS;
/// Features that version 1.4 brought.
const FEATURES_OF_1_4: u64 = FEATURE_WINDOWS_ONLY;
/// Features that version 1.5 brought.
const FEATURES_OF_1_5: u64 = ETHERNET_FEATURES;
/// Features that version 1.6 brought.
const FEATURES_OF_1_6: u64 = FEATURE_RAW_PACKETS | FEATURE_RECEIVE_TABLES;

/// The features of the RDMA part.
pub const FEATURES: u64 = FEATURE_RESIZE_CQ
    | FEATURE_FAST_REGISTER
    | FEATURE_SRQ
    | FEATURE_WINDOWS
    | FEATURE_DEVICE_MEMORY
    | FEATURE_ONE_TOUCH
    | FEATURE_RESIZE_SRQ
    | FEATURE_ON_DEMAND
    | FEATURE_PORT_MTU
    | FEATURE_QUIET_COMMANDS
    | FEATURE_VECTOR_MAP
    | FEATURE_SWITCH_EQ
    | FEATURE_EQ_CONTROL
    | FEATURE_REGISTER_SEND
    | FEATURE_LISTS
    | FEATURE_PENDING_TAGS
    | FEATURE_TURNS
    | FEATURE_QP_COUNTERS
    | FEATURE_CONTEXTS
    | FEATURE_WINDOWS_ONLY
    | FEATURE_RAW_PACKETS
    | FEATURE_RECEIVE_TABLES
    | transport::FEATURES;

/// The features of the Ethernet part.
pub const ETHERNET_FEATURES: u64 = FEATURE_ETHERNET | FEATURE_REDIRECTION;

/// The features that are of neither part.
pub const COMMON_FEATURES: u64 =
    FEATURE_QUIET_COMMANDS | FEATURE_VECTOR_MAP | FEATURE_SWITCH_EQ | FEATURE_EQ_CONTROL;

// None is offered without what it needs.
const _: () = assert!(complete_features(FEATURES) == FEATURES);
const _: () = assert!(complete_features(ETHERNET_FEATURES) == ETHERNET_FEATURES);

/// Model version, for `REG_FIRMWARE`: major.minor.patch in bits 31:16, 15:8, 7:0.
pub const FIRMWARE: u32 = 1 << 8;

/// The most milliseconds that a reset takes, for `REG_RESET_TIMEOUT`.
///
/// The device resets at once; the rest is for a process that does not get to run.
pub const RESET_TIMEOUT: u32 = 5_000;

/// Frames of the loopback delivered in one go, where they make no further work.
const LOOPBACK_BUDGET: u32 = 256;
/// Entries of queues that are flushed in one poll because timers ran out, and timers, before it is enough.
const TIMER_WORK: u64 = 2048;
/// Queue pairs that try again in one poll because a tag is no longer pending.
const WAKE_BUDGET: usize = 256;
/// Frames that have waited and are looked at again in one poll, and those of a queue pair before it
/// is another's turn.
const PARKED_BUDGET: u32 = 256;
const PARKED_BURST: u32 = 16;
/// Queue pairs that are looked at in one go because they are spared their doorbells.
const LOOKS: usize = 64;
/// What is done for queue pairs in one poll: each costs one, and each of its packets another.
const TURN: u32 = 512;
/// Packets a queue pair sends before it is another's turn: fewer, the more there are, so that a
/// round does not take long.
const MAX_BURST: u32 = 64;
const MIN_BURST: u32 = 8;
/// Packets of all queue pairs in a round, as far as the limits of a burst allow.
const ROUND: u32 = 256;

/// Whether all of a range lies in host memory: every byte of it is read.
fn is_host_memory(host: &dyn Host, start: u64, length: u64) -> bool {
    let mut piece = [0; 4096];
    let Some(end) = start.checked_add(length) else {
        return false;
    };
    (start..end).step_by(piece.len()).all(|at| {
        let length = (end - at).min(piece.len() as u64) as usize;
        host.read(at, &mut piece[..length]).is_ok()
    })
}

/// A frame as it would be on the wire: one of RoCE comes by memory without its CRC, which others may
/// look at.
fn as_on_wire(frame: &[u8], medium: Medium) -> std::borrow::Cow<'_, [u8]> {
    if medium == Medium::Wire || roce::Frame::parse(frame).is_none() {
        return frame.into();
    }
    let mut sealed = frame.to_vec();
    roce::seal(&mut sealed);
    sealed.into()
}

/// What became of a frame from the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It was for the RNIC, which has dealt with it (or dropped it).
    Consumed,
    /// It is for the ordinary network interface.
    PassToHost,
}

/// What happens on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// Packets came.
    Packets,
    /// Descriptors were returned.
    Descriptors,
    /// The pool has fewer buffers than its threshold.
    PoolLow,
    /// Buffers were posted that may not be.
    BadBuffers,
}

impl ChannelEvent {
    fn code(self) -> EventCode {
        match self {
            Self::Packets => EventCode::ChannelPackets,
            Self::Descriptors => EventCode::ChannelDescriptors,
            Self::PoolLow => EventCode::ChannelPoolLow,
            Self::BadBuffers => EventCode::ChannelBadBuffers,
        }
    }
}

/// Where the transport's `send` left off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Everything posted was taken up (it may still be unacknowledged), as far as the producer
    /// index last looked at says. The engine looks once more and then lets the queue pair sleep.
    Drained,
    /// It waits for an answer of the peer or for its timer, and will schedule itself then.
    Blocked,
    /// Its burst is used up; the engine calls again in its turn.
    More,
    /// There is no room on its way; the engine calls again when there is and its turn has come.
    Full(Way),
}

/// One RNIC.
#[derive(Debug)]
pub struct Engine {
    core: Core,
    qps: QueuePairs,
    /// The commands that were taken up and are not finished.
    commands: cqp::Commands,
    /// How many turns were begun within each other.
    turns: u32,
    /// How often something was asked of it, see [`Self::steps`].
    steps: u64,
    driver_version: u32,
    driver_features: u64,
    boot: u64,
}

impl Engine {
    /// A device after power-on.
    pub fn new(config: Config) -> Self {
        Self {
            qps: QueuePairs::new(config.qps),
            core: Core::new(config),
            commands: cqp::Commands::default(),
            turns: 0,
            steps: 0,
            driver_version: 0,
            driver_features: 0,
            boot: 0,
        }
    }

    /// Steps since the engine was made: accesses to registers and doorbells, frames that came, and polls.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Counters since the engine was made.
    pub fn counters(&self) -> &Counters {
        &self.core.counters
    }

    /// What the engine was told.
    pub fn config(&self) -> &Config {
        &self.core.config
    }

    /// Everything but the queue pairs, to look at.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The queue pairs, to look at.
    pub fn queue_pairs(&self) -> &QueuePairs {
        &self.qps
    }

    /// True while commands and work requests are served.
    pub fn is_running(&self) -> bool {
        self.core.is_running()
    }

    /// A function-level reset; returns whether it had an effect, as it has unless the device
    /// misbehaves.
    pub fn function_reset(&mut self) -> bool {
        let misbehaviour = self.core.misbehaviour.as_mut();
        let takes = misbehaviour.is_none_or(|misbehaving| misbehaving.takes_function_reset());
        if takes {
            self.reset();
        }
        takes
    }

    /// Sets what the device does wrong from now on; `rules` have passed [`Misbehaviour::check`].
    /// Rules that ask for nothing restore good behaviour. A reset that is under way ends now.
    pub fn misbehave(&mut self, rules: Misbehaviour, now: u64, host: &mut dyn Host) {
        self.core.now = now;
        if self.core.is_resetting() {
            self.reset();
        }
        self.take_held_doorbells(u64::MAX, host);
        self.core.misbehave(rules, host);
    }

    /// Back to the state after power-on: bus reset, `CONTROL_RESET`.
    pub fn reset(&mut self) {
        self.core.reset();
        self.qps.clear();
        self.commands = cqp::Commands::default();
        self.turns = 0;
        self.driver_version = 0;
        self.driver_features = 0;
        self.boot = 0;
    }

    /// Back to the state after power-on for another host, which reads nothing of what the one before had counted.
    pub fn power_off(&mut self) {
        self.reset();
        self.core.forget_counters();
    }

    /// Tells of the state of the Ethernet link.
    pub fn set_link(&mut self, up: bool, now: u64, host: &mut dyn Host) {
        self.core.now = now;
        if self.core.link_up != up {
            self.core.link_up = up;
            self.room_again();
            if self.core.is_running() {
                self.core
                    .global_event(EventCode::LinkChange, 0, u64::from(up), host);
            }
        }
    }

    /// There may be room on a way where there was not enough; see [`Host::room`].
    pub fn room_again(&mut self) {
        self.core.room.look = true;
        self.core.network.room_again();
    }

    /// Queue pairs that wait for room on their way.
    pub fn waiting_for_room(&self) -> usize {
        self.core.room.len()
    }

    /// The level of the interrupt pin, as the pin bits of event queues have it.
    pub fn pin(&self) -> bool {
        self.core.eqs.pins.any()
    }

    /// Raises the messages of event queues whose pin bits are set, when the host has changed the
    /// mode of its interrupts.
    pub fn raise_again(&mut self, host: &mut dyn Host) {
        self.core.raise_again(host);
    }

    /// Stops the device with a fatal error, to see what the driver does.
    pub fn inject_fatal(&mut self, host: &mut dyn Host) {
        self.core.fail(FatalCode::Injected, host);
    }

    /// The device's own memory failed at `place`, and what it held was corrected or lost.
    pub fn internal_memory_error(
        &mut self,
        place: u64,
        corrected: bool,
        now: u64,
        host: &mut dyn Host,
    ) {
        self.core.now = now;
        self.core.internal_memory_error(place, corrected, host);
    }

    /// Host memory at `address` turned out to be poisoned when it was read.
    pub fn external_memory_error(&mut self, address: u64, now: u64, host: &mut dyn Host) {
        self.core.now = now;
        self.core.external_memory_error(address, host);
    }

    /// Something happened on a channel.
    pub fn channel_event(
        &mut self,
        event: ChannelEvent,
        channel: u16,
        now: u64,
        host: &mut dyn Host,
    ) {
        self.core.now = now;
        self.core.channel_event(event.code(), channel, host);
    }

    /// Somebody changed the device by its management: `on` says to what.
    pub fn managed(&mut self, what: Management, on: bool, now: u64, host: &mut dyn Host) {
        self.core.now = now;
        self.core.management_event(what, on, host);
    }

    /// A read of `size` bytes at `offset` of a BAR. Reads of anything but a register or device
    /// memory give 0.
    pub fn mmio_read(&mut self, bar: u32, offset: u64, size: usize) -> u64 {
        self.steps += 1;
        if bar == BAR_DOORBELLS {
            return match self.device_memory(offset) {
                Some(at) => self.core.tpt.device.load(at, size),
                None => 0,
            };
        }
        if bar != BAR_REGISTERS {
            return 0;
        }
        self.core.counters.register_reads += 1;
        let Ok(offset) = usize::try_from(offset) else {
            return 0;
        };
        let is_wide = |offset| {
            matches!(
                offset,
                REG_FEATURES
                    | REG_MAC
                    | REG_DOORBELL_OFFSET
                    | REG_DEVICE_MEMORY_OFFSET
                    | REG_DEVICE_MEMORY_SIZE
            )
        };
        let value = match size {
            8 if is_wide(offset) => self.register(offset),
            // A 64-bit register may be read in halves.
            4 if is_wide(offset & !4) => {
                (self.register(offset & !4) >> ((offset & 4) * 8)) & 0xffff_ffff
            }
            4 => self.register(offset),
            _ => 0,
        };
        match &mut self.core.misbehaviour {
            None => value,
            Some(misbehaving) => misbehaving.spoil_register(value, size),
        }
    }

    fn register(&self, offset: usize) -> u64 {
        let config = &self.core.config;
        match offset {
            REG_MAGIC => u64::from(MAGIC),
            REG_ABI_VERSION => (u64::from(ABI_MAJOR) << 16) | u64::from(ABI_MINOR),
            REG_STATUS => u64::from(self.core.status().0),
            REG_FEATURES => config.offered_features(),
            REG_MAC => {
                let [a, b, c, d, e, f] = config.mac;
                u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
            }
            REG_MESSAGES => u64::from(config.messages),
            REG_FIRMWARE => u64::from(FIRMWARE),
            REG_DOORBELL_PAGES => u64::from(config.doorbell_pages),
            REG_DOORBELL_STRIDE => u64::from(config.doorbell_log_stride),
            // They are at the start of the BAR.
            REG_DOORBELL_OFFSET => 0,
            REG_DEVICE_MEMORY_OFFSET if config.device_memory_size() != 0 => {
                config.device_memory_offset()
            }
            REG_DEVICE_MEMORY_SIZE => config.device_memory_size(),
            // Where it has no Ethernet interface, that is another device's, of the same address.
            REG_FUNCTION => {
                let models = config.personality.models();
                u64::from(Function::new(models, config.number, None).0)
            }
            REG_RESET_TIMEOUT => u64::from(RESET_TIMEOUT),
            _ => 0,
        }
    }

    /// A write of `size` bytes at `offset` of a BAR.
    pub fn mmio_write(
        &mut self,
        bar: u32,
        offset: u64,
        size: usize,
        value: u64,
        now: u64,
        host: &mut dyn Host,
    ) {
        self.steps += 1;
        self.core.now = now;
        let Ok(offset) = usize::try_from(offset) else {
            return;
        };
        match bar {
            BAR_REGISTERS => self.write_register(offset, size, value, host),
            BAR_DOORBELLS => match self.device_memory(offset as u64) {
                Some(at) => {
                    if !self.core.tpt.device.store(at, size, value) {
                        self.core.counters.bad_doorbells += 1;
                    }
                }
                None => self.ring_doorbell(offset, size, value, host),
            },
            _ => {}
        }
    }

    /// The offset in device memory of an offset in the doorbell BAR; none below it, or when the
    /// device has none.
    fn device_memory(&self, offset: u64) -> Option<u64> {
        if self.core.config.device_memory_size() == 0 {
            return None;
        }
        offset.checked_sub(self.core.config.device_memory_offset())
    }

    fn write_register(&mut self, offset: usize, size: usize, value: u64, host: &mut dyn Host) {
        self.core.counters.register_writes += 1;
        let half = |old: u64, high: bool| match (size, high) {
            (8, false) => value,
            (4, false) => (old & !0xffff_ffff) | (value & 0xffff_ffff),
            (4, true) => (old & 0xffff_ffff) | (value << 32),
            _ => old,
        };
        match offset {
            REG_CONTROL if size == 4 => {
                let value = value as u32;
                if value & CONTROL_RESET != 0 {
                    let now = self.core.now;
                    let misbehaviour = self.core.misbehaviour.as_mut();
                    if misbehaviour.is_none_or(|misbehaving| misbehaving.reset_now(now)) {
                        self.reset();
                    }
                } else if value & CONTROL_ENABLE != 0
                    && self.core.status().state() == Some(DeviceState::Ready)
                {
                    if let Err(code) = self.enable(host) {
                        self.core.fail(code, host);
                    }
                }
            }
            REG_DRIVER_VERSION if size == 4 => self.driver_version = value as u32,
            REG_DRIVER_FEATURES => self.driver_features = half(self.driver_features, false),
            _ if offset == REG_DRIVER_FEATURES + 4 => {
                self.driver_features = half(self.driver_features, true);
            }
            REG_BOOT => self.boot = half(self.boot, false),
            _ if offset == REG_BOOT + 4 => self.boot = half(self.boot, true),
            _ => {}
        }
    }

    /// Checks the handshake, reads the boot block and starts.
    fn enable(&mut self, host: &mut dyn Host) -> Result<(), FatalCode> {
        let offered = self.core.config.offered_features();
        if self.driver_version >> 16 != u32::from(ABI_MAJOR)
            || self.driver_features & !offered != 0
            || self.driver_features != complete_features(self.driver_features)
        {
            return Err(FatalCode::BadHandshake);
        }
        let mut boot = BootBlock::zeroed();
        if self.boot % 64 != 0 || host.read(self.boot, boot.as_bytes_mut()).is_err() {
            return Err(FatalCode::BadBootBlock);
        }
        if boot.cqp_log_entries == 0
            || boot.cqp_log_entries > CQP_MAX_LOG_ENTRIES
            || !(EQ_MIN_LOG_ENTRIES..=EQ_MAX_LOG_ENTRIES).contains(&boot.eq0_log_entries)
            || boot.cqp_ring % 64 != 0
            || boot.eq0_ring % 64 != 0
            || boot.eq0_message >= self.core.config.messages
            || !boot.reserved_is_zero()
        {
            return Err(FatalCode::BadBootBlock);
        }
        let mut features = self.driver_features;
        let driver_minor = self.driver_version as u16;
        let versions = [
            (1, FEATURES_OF_1_1),
            (2, FEATURES_OF_1_2),
            (3, FEATURES_OF_1_3),
            (4, FEATURES_OF_1_4),
            (5, FEATURES_OF_1_5),
            (6, FEATURES_OF_1_6),
        ];
        for (minor, brought) in versions {
            if driver_minor < minor {
                // It cannot mean what later versions made of these bits.
                features &= !brought;
            }
        }
        let record_offset = control_record_offset(boot.cqp_log_entries);
        let has_record = features & FEATURE_PENDING_TAGS != 0;
        let record_bytes = if has_record {
            size_of::<ControlRecord>() as u64
        } else {
            0
        };
        let cqp_bytes = record_offset + record_bytes;
        let eq_bytes = (size_of::<EventEntry>() as u64) << boot.eq0_log_entries;
        if !is_host_memory(host, boot.cqp_ring, cqp_bytes)
            || !is_host_memory(host, boot.eq0_ring, eq_bytes)
        {
            return Err(FatalCode::BadBootBlock);
        }
        // The last thing that can be refused: without this queue nothing is written anywhere.
        let ring = Buffer::contiguous(boot.eq0_ring, eq_bytes);
        self.core
            .eqs
            .define(EQ_CONTROL, boot.eq0_message, boot.eq0_log_entries, &ring)
            .map_err(|_| FatalCode::BadBootBlock)?;
        self.core.eqs.reserve_answers(1 << boot.cqp_log_entries);
        let control = core::ControlRing::new(
            boot.cqp_ring,
            boot.cqp_log_entries,
            has_record,
            features & FEATURE_TURNS != 0,
        );
        control
            .show_no_turn(host)
            .map_err(|_| FatalCode::BadBootBlock)?;
        self.core.control = Some(control);
        self.core.driver_minor = driver_minor;
        self.core.features = features;
        self.core.state = DeviceState::Running;
        Ok(())
    }

    fn ring_doorbell(&mut self, offset: usize, size: usize, word: u64, host: &mut dyn Host) {
        // In every state: a device that failed must let go of the pin.
        if size == 8 && offset == DOORBELL_EVENT_QUEUE {
            let doorbell = EventDoorbell::decode(word);
            self.core.eqs.pins.clear(doorbell.eqn);
        }
        let config = &self.core.config;
        let (page, within) = (
            offset >> config.doorbell_log_stride,
            offset & ((1 << config.doorbell_log_stride) - 1),
        );
        if size != 8 || page >= config.doorbell_pages as usize || !self.core.is_running() {
            self.core.counters.bad_doorbells += 1;
            return;
        }
        let now = self.core.now;
        let page_number = page as u32;
        let counters = &mut self.core.counters;
        match within {
            DOORBELL_SEND => {
                counters.send_doorbells += 1;
                self.queue_pair_doorbell(page_number, word, host);
            }
            DOORBELL_RECEIVE => {
                counters.receive_doorbells += 1;
                self.queue_pair_doorbell(page_number, word, host);
            }
            DOORBELL_COMPLETION => {
                counters.completion_doorbells += 1;
                self.core.cq_doorbell(page_number, word, now, host);
            }
            DOORBELL_SRQ => {
                // The record says all; the device looks at it when a message needs an entry.
                let srqn = word as u32 & QUEUE_NUMBER_MASK;
                if self.core.srqs.answers_to(srqn, page_number) {
                    self.core.counters.receive_doorbells += 1;
                } else {
                    self.core.counters.bad_doorbells += 1;
                }
            }
            DOORBELL_CHANNEL => {
                counters.channel_doorbells += 1;
                if !self.core.network.ring(word as u16, page_number) {
                    self.core.counters.bad_doorbells += 1;
                }
            }
            DOORBELL_EVENT_QUEUE if page == 0 => {
                counters.event_doorbells += 1;
                self.core.eq_doorbell(word, now, host);
            }
            DOORBELL_CONTROL if page == 0 => {
                counters.control_doorbells += 1;
                let misbehaviour = self.core.misbehaviour.as_mut();
                let held = misbehaviour.is_some_and(|m| m.hold_control(word as u32, now));
                if !held {
                    self.control_doorbell(word as u32, host);
                }
            }
            _ => counters.bad_doorbells += 1,
        }
    }

    /// A send or receive doorbell. The record in host memory is what counts.
    fn queue_pair_doorbell(&mut self, page: u32, word: u64, host: &mut dyn Host) {
        let qpn = word as u32 & QUEUE_NUMBER_MASK;
        match self.qps.get_mut(qpn) {
            Some(qp) if qp.doorbell_page == page => match qp.state {
                QueuePairStateCode::Rts => self.core.schedule(qp),
                QueuePairStateCode::Error => qp::flush(&mut self.core, qp, host),
                QueuePairStateCode::Sqe => qp::flush_stopped(&mut self.core, qp, host),
                QueuePairStateCode::Sqd if qp.stopped => {
                    qp::flush_stopped(&mut self.core, qp, host);
                }
                // Nothing is sent now; the producer index is looked at on the way to RTS.
                _ => {}
            },
            _ => self.core.counters.bad_doorbells += 1,
        }
    }

    /// A frame came.
    pub fn receive_frame(
        &mut self,
        frame: &[u8],
        medium: Medium,
        now: u64,
        host: &mut dyn Host,
    ) -> Disposition {
        self.steps += 1;
        self.core.now = now;
        if self.turns == 0 && self.core.flows.is_empty() && roce::Frame::parse(frame).is_none() {
            return self.receive_ordinary(frame, medium, host);
        }
        self.begin_turn(host);
        let disposition = if self.core.is_running() {
            self.take_frame(frame, medium, host)
        } else {
            Disposition::PassToHost
        };
        self.end_turn(host);
        match disposition {
            Disposition::Consumed => disposition,
            Disposition::PassToHost => self.receive_ordinary(frame, medium, host),
        }
    }

    /// Packets came of another engine of this process, which lends their payload
    /// ([`Host::transmit_lent`]).
    pub fn receive_lent(&mut self, head: &[u8], loan: &Arc<Loan>, now: u64, host: &mut dyn Host) {
        self.steps += 1;
        self.core.now = now;
        self.begin_turn(host);
        if self.core.is_running() {
            transport::receive_lent(&mut self.core, &mut self.qps, head, loan, host);
            self.serve_requests(host);
        } else {
            self.core.counters.rx_dropped += 1;
        }
        self.end_turn(host);
    }

    /// A frame came that is not for a queue pair.
    fn receive_ordinary(
        &mut self,
        frame: &[u8],
        medium: Medium,
        host: &mut dyn Host,
    ) -> Disposition {
        if !self.core.has_interface() {
            return Disposition::PassToHost;
        }
        self.core.work += 1;
        self.core.receive_ordinary(&as_on_wire(frame, medium), host);
        Disposition::Consumed
    }

    /// What the Ethernet interface has counted.
    pub fn interface_counters(&self) -> &network::ChannelCounters {
        self.core.network.counters()
    }

    /// Begins a turn: from now on tags may be used. [`Self::receive_frame`] and [`Self::poll`] are turns
    /// of their own, but for those that come before [`Self::end_turn`].
    ///
    /// Where that was agreed on the driver is shown that a turn has begun, and then the control record is
    /// looked at. So a driver that has stored an index there and then sees no turn knows that the commands
    /// before it are taken up before any tag is used again.
    pub fn begin_turn(&mut self, host: &mut dyn Host) {
        self.turns += 1;
        if self.turns == 1 && self.core.begin_turn(host) {
            self.take_up(host);
        }
    }

    /// Ends a turn: no tag is in use.
    pub fn end_turn(&mut self, host: &mut dyn Host) {
        self.turns = self.turns.saturating_sub(1);
        if self.turns == 0 {
            self.core.end_turn(host);
        }
    }

    fn take_frame(&mut self, frame: &[u8], medium: Medium, host: &mut dyn Host) -> Disposition {
        let (core, qps) = (&mut self.core, &mut self.qps);
        let mut disposition = transport::receive_frame(core, qps, frame, medium, host);
        if disposition == Disposition::PassToHost {
            disposition = self.take_by_rules(frame, medium, host);
        }
        self.serve_requests(host);
        disposition
    }

    /// Takes commands up for which a request waits that has just come.
    fn serve_requests(&mut self, host: &mut dyn Host) {
        if std::mem::take(&mut self.core.paging.request_waits) && self.has_commands() {
            // What a doorbell would do if it had come: mostly nobody waits then. But what was posted
            // here and waits, too, comes first.
            self.run_commands(false, host);
            if !self.try_again() {
                self.deliver_parked(host);
            }
        }
    }

    /// Gives a frame to those that rules name.
    fn take_by_rules(&mut self, frame: &[u8], medium: Medium, host: &mut dyn Host) -> Disposition {
        let (core, qps) = (&mut self.core, &mut self.qps);
        let taken = !core.flows.is_empty()
            && transport::receive_raw(core, qps, &as_on_wire(frame, medium), host);
        if taken {
            Disposition::Consumed
        } else {
            Disposition::PassToHost
        }
    }

    /// Does what is due: timers, frames to itself, and a burst for each queue pair that has
    /// something to send. Call it after input, and when [`Engine::next_timeout`] has come.
    pub fn poll(&mut self, now: u64, host: &mut dyn Host) {
        self.steps += 1;
        self.core.now = now;
        self.begin_turn(host);
        self.do_what_is_due(now, host);
        self.end_turn(host);
    }

    fn do_what_is_due(&mut self, now: u64, host: &mut dyn Host) {
        if let Some(misbehaving) = &self.core.misbehaviour {
            if misbehaving.reset_due(now) {
                self.reset();
            }
            self.core.write_late_events(host);
        }
        self.take_held_doorbells(now, host);
        if !self.core.is_running() {
            return;
        }
        let (start, mut timers) = (self.core.work, 0);
        // Those of many queue pairs may run out at once; what is left is due at the next poll.
        // Where some event queues are of low latency, their interrupts and events come first.
        while self.core.work.wrapping_sub(start) + timers < TIMER_WORK {
            let Some((entry, owner)) = self.core.timers.pop(now) else {
                break;
            };
            timers += 1;
            if self.core.is_bulk_event(owner) {
                self.core.late_timers.push((owner, entry));
                continue;
            }
            match owner {
                TimerOwner::QueuePair(qpn) => {
                    if let Some(qp) = self.qps.get_mut(qpn) {
                        let timers = &mut self.core.timers;
                        if timers.expired(&mut qp.timer, owner, entry, now) {
                            transport::expired(&mut self.core, qp, host);
                        }
                    }
                }
                TimerOwner::EventQueue(_) | TimerOwner::CompletionQueue(_) => {
                    self.core.event_timer(owner, entry, host);
                }
            }
        }
        self.core.serve_late_timers(host);
        while self.core.naps.front().is_some_and(|nap| nap.0 <= now) {
            let Some((_, qpn)) = self.core.naps.pop_front() else {
                break;
            };
            if let Some(qp) = self.qps.get_mut(qpn) {
                qp.nap.queued = false;
                self.core.schedule(qp);
            }
        }
        while let Some(qpn) = self.core.next_behind_lent() {
            if let Some(qp) = self.qps.get_mut(qpn) {
                self.core.schedule(qp);
            }
        }
        if self.core.timers.needs_sweep() {
            self.sweep_timers();
        }
        if self.has_commands() {
            self.run_commands(true, host);
        }
        self.try_again();
        self.deliver_loopback(host);
        let channels_first = self.core.network.goes_first();
        if channels_first {
            self.core.transmit_ordinary(host);
        }
        // Half for those who wait for room and half for the others: neither holds up the other.
        self.serve_waiting(TURN / 2, host);
        let mut budget = TURN / 2;
        for _ in 0..self.core.ready.len() {
            if budget == 0 {
                break;
            }
            let Some(qpn) = self.core.ready.pop() else {
                break;
            };
            budget = budget.saturating_sub(self.serve(qpn, None, host));
        }
        if !channels_first {
            self.core.transmit_ordinary(host);
        }
        self.deliver_parked(host);
        self.deliver_loopback(host);
    }

    /// Looks at the producer indices of queue pairs that are spared their doorbells, of so many of them in
    /// turn. Call it when there was other work to do, before [`Engine::poll`]: while the device is at work
    /// anyway, who posts a stream over many queue pairs does not wait for the end of a nap.
    pub fn look_around(&mut self, now: u64, host: &mut dyn Host) {
        self.core.now = now;
        let naps = self.core.naps.len();
        for _ in 0..naps.min(LOOKS) {
            self.core.looked = (self.core.looked + 1) % naps;
            let (_, qpn) = self.core.naps[self.core.looked];
            if let Some(qp) = self.qps.get_mut(qpn) {
                // What was known to be posted goes on by itself. Whatever is wrong with the record is found
                // in the turn of the queue pair.
                if qp.nap.queued
                    && qp.may_send()
                    && !qp.send.has_next()
                    && (qp.send.refresh(host).is_err() || qp.send.has_next())
                {
                    self.core.schedule(qp);
                }
            }
        }
    }

    /// Takes the control doorbells that were held back until then at the latest.
    fn take_held_doorbells(&mut self, until: u64, host: &mut dyn Host) {
        let next = |core: &mut Core| core.misbehaviour.as_mut()?.held_doorbell(until);
        while let Some(producer) = next(&mut self.core) {
            if self.core.is_running() {
                self.control_doorbell(producer, host);
            }
        }
    }

    /// Serves queue pairs that wait for room, as far as there is some.
    fn serve_waiting(&mut self, mut budget: u32, host: &mut dyn Host) {
        if self.core.room.is_empty() {
            self.core.room.look = false;
            return;
        }
        self.core.room.look = false;
        for way in self.core.room.ways() {
            let stuck = self.core.has_room(way, host).is_none();
            self.core.room.note(way, stuck);
            // Those who are content with losses do not wait for a way that is stuck; the others
            // begin to wait anew.
            while self.core.room.outwaited(way) || self.core.has_room(way, host) == Some(true) {
                if budget == 0 {
                    self.core.room.look = true;
                    return;
                }
                let Some(qpn) = self.core.room.pop(way) else {
                    break;
                };
                budget = budget.saturating_sub(self.serve(qpn, Some(way), host));
            }
        }
    }

    /// Has those try again who waited for a tag that something has become of; true when work requests
    /// are among them.
    fn try_again(&mut self) -> bool {
        let mut work_requests = false;
        for _ in 0..WAKE_BUDGET {
            let Some((qpn, side)) = self.core.paging.next_woken() else {
                break;
            };
            if let Some(qp) = self.qps.get_mut(qpn) {
                transport::page_resolved(&mut self.core, qp, side);
            }
            work_requests |= side == Side::Requester;
        }
        work_requests
    }

    /// Looks again at frames that waited, as far as what they waited for has come.
    fn deliver_parked(&mut self, host: &mut dyn Host) {
        let mut budget = PARKED_BUDGET;
        while budget > 0 {
            let Some(qpn) = self.core.paging.next_due() else {
                break;
            };
            if let Some(qp) = self.qps.get_mut(qpn) {
                let most = budget.min(PARKED_BURST);
                let work = self.core.work;
                let frames = transport::deliver_parked(&mut self.core, qp, most, host);
                budget = budget.saturating_sub(frames + self.cost_since(work));
            }
        }
        // They were looked at after the commands.
        self.core.paging.request_waits = false;
    }

    fn sweep_timers(&mut self) {
        let core = &mut self.core;
        let (qps, eqs, cqs) = (&self.qps, &core.eqs, &core.cqs);
        core.timers.sweep(|owner| match owner {
            TimerOwner::QueuePair(qpn) => qps.get(qpn).map(|qp| qp.timer),
            TimerOwner::EventQueue(eqn) => eqs.timer(eqn),
            TimerOwner::CompletionQueue(cqn) => cqs.timer(cqn),
        });
    }

    fn deliver_loopback(&mut self, host: &mut dyn Host) {
        let mut budget = LOOPBACK_BUDGET;
        while budget > 0 {
            let Some((medium, frame)) = self.core.loopback.pop() else {
                break;
            };
            let work = self.core.work;
            let is_raw = medium == Medium::Wire;
            // The wire may bring a packet of anybody. What came from here was not sent by who it says, and
            // a program that sends raw packets is no peer of another's queue pair.
            let disposition = if is_raw && self.core.is_foreign(&frame) {
                self.take_by_rules(&frame, medium, host)
            } else {
                self.take_frame(&frame, medium, host)
            };
            let is_own = frame.starts_with(&self.core.config.mac);
            if disposition == Disposition::PassToHost
                && is_raw
                && is_own
                && self.core.has_interface()
            {
                self.core.receive_ordinary(&frame, host);
            }
            budget = budget.saturating_sub(1 + self.cost_since(work));
            self.core.loopback.recycle(frame);
            self.core.room.look = true;
        }
    }

    /// What the work since then costs, in packets.
    fn cost_since(&self, work: u64) -> u32 {
        (self.core.work - work) as u32 / COPIES_PER_FRAME as u32
    }

    /// What was done so far that a packet may have much of: entries flushed, copies for members of a group.
    pub fn work(&self) -> u64 {
        self.core.work
    }

    /// One turn of a queue pair: from the ready list, or of one that has waited for room on the
    /// way `turn`. Returns what it cost.
    fn serve(&mut self, qpn: u32, turn: Option<Way>, host: &mut dyn Host) -> u32 {
        let others = self.core.ready.len() + self.core.room.len();
        let Some(qp) = self.qps.get_mut(qpn) else {
            return 1;
        };
        match turn {
            Some(_) => qp.waits_for_room = None,
            None => qp.ready = false,
        }
        let core = &mut self.core;
        let (sent, work) = (core.counters.tx_packets, core.work);
        let burst = u32::try_from(others + 1).map_or(MIN_BURST, |contenders| {
            (ROUND / contenders).clamp(MIN_BURST, MAX_BURST)
        });
        Self::send(core, qp, burst, turn, host);
        let packets = core.counters.tx_packets - sent;
        1 + packets as u32 + self.cost_since(work)
    }

    fn send(
        core: &mut Core,
        qp: &mut QueuePair,
        burst: u32,
        turn: Option<Way>,
        host: &mut dyn Host,
    ) {
        match qp.state {
            QueuePairStateCode::Rts if qp.has_send_queue() => {
                if qp.send.wake(host).is_err() {
                    qp::fail(core, qp, host);
                    return;
                }
            }
            // What is left to be flushed.
            QueuePairStateCode::Sqd if qp.stopped => {
                qp::flush_stopped(core, qp, host);
                if qp.state != QueuePairStateCode::Sqd {
                    return;
                }
            }
            QueuePairStateCode::Error => {
                qp::flush(core, qp, host);
                return;
            }
            QueuePairStateCode::Sqe => {
                qp::flush_stopped(core, qp, host);
                return;
            }
            // Answers to the peer; and a drain lets what was taken up come to its end.
            QueuePairStateCode::Rtr | QueuePairStateCode::Rts | QueuePairStateCode::Sqd => {}
            _ => return,
        }
        if let Some(word) = core.misbehaviour.as_mut().and_then(|m| m.wake_word()) {
            qp.send.scribble_wake(host, word);
        }
        match transport::send(core, qp, burst, turn, host) {
            Progress::More => core.schedule(qp),
            Progress::Full(way) => core.wait_for_room(qp, way),
            Progress::Blocked => {}
            Progress::Drained if qp.may_send() && qp.has_send_queue() => {
                if core.takes_a_nap(qp) {
                    return;
                }
                match qp.send.sleep(host) {
                    Ok(true) => core.schedule(qp),
                    Ok(false) => {}
                    Err(_) => qp::fail(core, qp, host),
                }
            }
            Progress::Drained => {}
        }
    }

    /// When [`Engine::poll`] wants to be called next; a time that has passed means at once.
    pub fn next_timeout(&self) -> Option<u64> {
        let look = self.core.next_look_at_lent();
        self.next_work().into_iter().chain(look).min()
    }

    /// The same, but for looks whether what was lent is still read.
    #[cfg(any(test, feature = "testing"))]
    pub fn next_timeout_but_looks(&self) -> Option<u64> {
        self.next_work()
    }

    fn next_work(&self) -> Option<u64> {
        let late = self.core.misbehaviour.as_ref();
        let late = late.and_then(|misbehaving| misbehaving.next_timeout());
        if !self.core.is_running() {
            return late;
        }
        if !self.core.ready.is_empty()
            || self.core.network.is_ready()
            || self.has_commands()
            || self.core.paging.has_woken()
            || self.core.paging.has_due()
            || self.core.loopback.len() > 0
            || self.core.room.look && !self.core.room.is_empty()
        {
            return Some(self.core.now);
        }
        let nap = self.core.naps.front().map(|(until, _)| *until);
        let behind_lent = self.core.behind_lent.first().map(|(at, _)| *at);
        self.core
            .timers
            .next()
            .into_iter()
            .chain(nap)
            .chain(behind_lent)
            .chain(late)
            .chain(self.next_command())
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Node, QpOptions, SendWork, CROWD};
    use ferrite_abi::*;

    /// What driver and device speak.
    const VERSION: u64 = ((ABI_MAJOR as u64) << 16) | ABI_MINOR as u64;

    #[test]
    fn timers_that_run_out_at_once_are_served_in_turns() {
        const QPS: u32 = 5000;
        let mut node = Node::new(1);
        // None of them is used: all may have the same memory.
        let template = node.qp_template(QpOptions::default());
        let deadline = node.now + 1000;
        for qpn in 2..2 + QPS {
            node.execute(&CreateQueuePair { qpn, ..template });
            let qp = node.engine.qps.get_mut(qpn).unwrap();
            node.engine.core.start_timer(qp, deadline);
        }
        node.now = deadline;
        let running = |node: &Node| {
            let qps = node.engine.qps.iter();
            qps.filter(|qp| qp.timer.is_running()).count() as u64
        };
        let mut left = running(&node);
        assert_eq!(left, QPS.into());
        while left > 0 {
            assert_eq!(node.engine.next_timeout(), Some(deadline));
            node.engine.poll(node.now, &mut node.host);
            assert_eq!(running(&node), left.saturating_sub(TIMER_WORK));
            left = running(&node);
        }
    }

    #[test]
    fn copies_for_the_members_of_a_group_are_made_in_turns() {
        const MEMBERS: u64 = multicast::MAX_MULTICAST as u64;
        const FRAMES: u64 = 200;
        let mut node = Node::new(1);
        let frame = node.crowd(MEMBERS as usize);
        // Nobody has posted a receive.
        assert_eq!(node.engine.counters().rx_dropped, MEMBERS);
        for sent in 0..FRAMES {
            // Whoever asks for room first is told of what they cost, not how many they are.
            let has_room = sent * (1 + MEMBERS / 4) < 1024;
            let room = node.engine.core.loopback.room();
            assert_eq!(room != Room::Bytes(0), has_room, "after {sent}");
            node.engine
                .core
                .transmit(&frame, &mut QpCounters::default(), &mut node.host);
        }
        // What a go is over at, and the last frame of it, twice.
        let most = 2 * (4 * u64::from(LOOPBACK_BUDGET) + MEMBERS);
        while node.engine.core.loopback.len() > 0 {
            assert_eq!(node.engine.next_timeout(), Some(node.now));
            let work = node.engine.core.work;
            node.engine.poll(node.now, &mut node.host);
            let done = node.engine.core.work - work;
            assert!(done <= most, "{done} copies in a turn");
        }
        let room = node.engine.core.loopback.room();
        assert_eq!(room, core::Loopback::default().room());
        let copies = (1 + FRAMES) * MEMBERS;
        assert_eq!(node.engine.counters().rx_dropped, copies);
        // To look for a member among all of them is work, too.
        let work = node.engine.core.work;
        let destroy = CommandOpcode::DestroyQueuePair;
        assert_eq!(node.object_command(destroy, 3), CommandStatus::Ok);
        assert_eq!(node.engine.core.work - work, MEMBERS / 64);
        let gid = gid::gid_of_ipv4(CROWD);
        let members = node.engine.core.groups.members(&gid);
        assert_eq!(members.len() as u64, MEMBERS - 1);
    }

    #[test]
    fn copies_that_rules_make_of_raw_packets_take_room() {
        const TAKERS: u32 = 64;
        const QPN: u32 = 2;
        let mut node = Node::new(1);
        let options = QpOptions {
            service: Service::Raw,
            ..QpOptions::default()
        };
        node.create_qp(options);
        let template = node.qp_template(options);
        for taker in 0..TAKERS {
            let qpn = QPN + 1 + taker;
            node.execute(&CreateQueuePair { qpn, ..template });
            node.execute(&CreateFlow {
                flow: taker,
                target: qpn,
                ..CreateFlow::zeroed()
            });
        }
        for state in [
            QueuePairStateCode::Init,
            QueuePairStateCode::Rtr,
            QueuePairStateCode::Rts,
        ] {
            assert_eq!(node.set_state(QPN, state), CommandStatus::Ok);
        }
        let region = node.register(Tag::new(5, 1).0, 1, ACCESS_LOCAL_WRITE, 4096);
        node.fill(&region, 0, &[1, 0, 0x5e, 0, 0, 9]);
        let work = SendWork::new(SendOpcode::Send, &[region.sge(0, 64)]);
        let bytes = |room: Room| match room {
            Room::Bytes(bytes) => bytes,
            Room::Stuck => 0,
        };
        let all = bytes(node.engine.core.loopback.room());
        for sent in 1..=8 {
            node.post_send(QPN, &work);
            node.engine.serve(QPN, None, &mut node.host);
            assert_eq!(node.engine.core.loopback.len(), sent);
            let taken = all - bytes(node.engine.core.loopback.room());
            assert_eq!(taken, sent * (1 + TAKERS as usize / 4) * (all / 1024));
        }
    }

    #[test]
    fn queue_pairs_that_fail_by_frames_to_itself_are_flushed_in_turns() {
        const QPS: u32 = 16;
        const POSTED: u32 = 1500;
        let mut node = Node::new(1);
        node.create_cq(2, EQ_FIRST_HANDLER, 15);
        // The peer knows no such tag, and says so in a frame.
        let write = SendWork::new(SendOpcode::Write, &[]).remote(0, 0x7701);
        let write = write.inline(&[1; 8]).encode();
        let send = SendWork::new(SendOpcode::Send, &[]).encode();
        for qpn in 2..2 + QPS {
            let peer = qpn + QPS;
            for (qpn, other, cqn, log_blocks) in [(qpn, peer, 2, 11), (peer, qpn, 1, 1)] {
                node.create_qp(QpOptions {
                    qpn,
                    cqn,
                    log_blocks,
                    log_entries: 1,
                    ..QpOptions::default()
                });
                let other = node.as_peer(other);
                node.connect(qpn, &other);
            }
            node.write_blocks(qpn, &write);
            for _ in 1..POSTED {
                node.write_blocks(qpn, &send);
            }
            node.publish_send(qpn);
        }
        let mut ended = 0;
        while node.engine.next_timeout().is_some_and(|at| at <= node.now) {
            let work = node.engine.core.work;
            node.engine.poll(node.now, &mut node.host);
            let done = node.engine.core.work - work;
            assert!(done <= 2 * TIMER_WORK, "{done} entries in a turn");
            while node.poll_cq(2).is_some() {
                ended += 1;
            }
        }
        assert_eq!(ended, QPS * POSTED);
    }

    #[test]
    fn registers_tell_what_the_device_is() {
        let mut node = Node::power_on(7);
        assert_eq!(node.read_register(REG_MAGIC, 4), u64::from(MAGIC));
        assert_eq!(node.read_register(REG_ABI_VERSION, 4), VERSION);
        assert_eq!(node.status().state(), Some(DeviceState::Ready));
        assert!(node.status().link_up());
        assert_eq!(
            node.read_register(REG_MAC, 8).to_le_bytes(),
            [2, 0xfe, 0, 0, 0, 7, 0, 0]
        );
        assert_eq!(node.read_register(REG_MAC + 4, 4), 0x0700);
        assert_eq!(node.read_register(REG_MESSAGES, 4), 8);
        assert_eq!(node.read_register(REG_FEATURES, 8), FEATURES);
        assert_eq!(node.read_register(REG_DOORBELL_PAGES, 4), 1024);
        assert_eq!(node.read_register(REG_DOORBELL_STRIDE, 4), 12);
        assert_eq!(node.read_register(REG_DOORBELL_OFFSET, 8), 0);
        assert_eq!(node.read_register(REG_DEVICE_MEMORY_OFFSET, 8), 4 << 20);
        assert_eq!(node.read_register(REG_DEVICE_MEMORY_SIZE, 8), 1 << 20);
        let function = Function(node.read_register(REG_FUNCTION, 4) as u32);
        assert_eq!(function.models(), FUNCTION_RDMA);
        assert_eq!((function.number(), function.partner()), (0, None));
        assert_eq!(node.read_register(REG_RESET_TIMEOUT, 4), 5_000);
        assert_eq!(node.read_register(0xff8, 8), 0);
        assert_eq!(node.engine.mmio_read(BAR_DOORBELLS, 0, 8), 0);
        assert_eq!(node.engine.mmio_read(BAR_REGISTERS, u64::MAX, 8), 0);
    }

    #[test]
    fn what_is_asked_of_an_engine_is_counted() {
        let mut node = Node::power_on(7);
        let before = node.engine.steps();
        node.status();
        node.write_register(REG_CONTROL, 4, 0);
        node.doorbell(0, 0, 0);
        node.receive(&[0; 64]);
        node.engine.poll(node.now, &mut node.host);
        let counted = node.engine.steps();
        assert_eq!(counted - before, 5);
        // Others end at the same time.
        let before = testing::steps();
        drop(node);
        assert!(testing::steps() >= before + counted);
    }

    #[test]
    fn registers_are_read_in_their_own_size_and_place_alone() {
        let mut node = Node::power_on(7);
        let whole = [
            (REG_MAGIC, 4),
            (REG_STATUS, 4),
            (REG_FEATURES, 4),
            (REG_FEATURES, 8),
            (REG_MAC, 4),
            (REG_MAC + 4, 4),
            (REG_MAC, 8),
            (REG_MESSAGES, 4),
            (REG_FIRMWARE, 4),
            (REG_DOORBELL_PAGES, 4),
            (REG_DOORBELL_STRIDE, 4),
            (REG_DEVICE_MEMORY_OFFSET, 4),
            (REG_DEVICE_MEMORY_OFFSET, 8),
            (REG_DEVICE_MEMORY_SIZE, 4),
            (REG_DEVICE_MEMORY_SIZE, 8),
            (REG_FUNCTION, 4),
            (REG_RESET_TIMEOUT, 4),
        ];
        assert_eq!(node.read_register(REG_ABI_VERSION, 4), VERSION);
        // Of version 0.0 there is nothing to be seen, nor of features without any this high.
        let may_be_zero = [(REG_ABI_VERSION, 4), (REG_FEATURES + 4, 4)];
        for offset in 0..0x80 {
            for size in [1, 2, 3, 4, 8] {
                let value = node.read_register(offset, size);
                if may_be_zero.contains(&(offset, size)) {
                    continue;
                }
                if whole.contains(&(offset, size)) {
                    assert_ne!(value, 0, "{size} bytes at {offset:#x}");
                } else {
                    assert_eq!(value, 0, "{size} bytes at {offset:#x}");
                }
            }
        }
    }

    #[test]
    fn a_bad_handshake_is_fatal_until_reset() {
        // The second is that of a driver that wrote none, once there is a version but 0.
        for (version, features) in [
            (VERSION + (1 << 16), 0),
            (VERSION ^ (1 << 16), 0),
            (9 << 16, 0),
            (VERSION, 1 << 63),
        ] {
            let mut node = Node::power_on(1);
            node.write_register(REG_DRIVER_VERSION, 4, version);
            node.write_register(REG_DRIVER_FEATURES + 4, 4, features >> 32);
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
            assert_eq!(node.status().fatal(), Some(FatalCode::BadHandshake));
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
            assert_eq!(node.status().state(), Some(DeviceState::Fatal));
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
            assert_eq!(node.status().state(), Some(DeviceState::Ready));
            node.boot();
        }
    }

    /// What becomes of a device whose driver does all right but for these two.
    fn start_with(node: &mut Node, version: Option<u64>, features: u64) -> Status {
        let (boot, block) = boot_block(node, 4, 4);
        node.host.memory.put(boot, &block);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        if let Some(version) = version {
            node.write_register(REG_DRIVER_VERSION, 4, version);
        }
        node.write_register(REG_DRIVER_FEATURES, 8, features);
        node.write_register(REG_BOOT, 8, boot);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
        node.status()
    }

    #[test]
    fn a_driver_that_does_not_say_what_it_speaks_speaks_version_0() {
        let mut node = Node::power_on(1);
        let good = start_with(&mut node, Some(VERSION), 0);
        assert_eq!(good.state(), Some(DeviceState::Running));
        // A reset forgets what was said.
        let said_nothing = start_with(&mut node, None, 0);
        let refused = (ABI_MAJOR != 0).then_some(FatalCode::BadHandshake);
        assert_eq!(said_nothing.fatal(), refused);
    }

    #[test]
    fn a_feature_is_refused_without_those_it_needs() {
        let mut node = Node::power_on(1);
        for (feature, needed) in [
            (FEATURE_XRC, FEATURE_SRQ),
            (FEATURE_RESIZE_SRQ, FEATURE_SRQ),
            (FEATURE_MULTICAST, FEATURE_UD),
        ] {
            for with in [0, FEATURE_UC, FEATURES & !needed] {
                let status = start_with(&mut node, Some(VERSION), feature | with);
                assert_eq!(status.fatal(), Some(FatalCode::BadHandshake));
            }
            for features in [feature | needed, needed] {
                let status = start_with(&mut node, Some(VERSION), features);
                assert_eq!(status.state(), Some(DeviceState::Running));
            }
        }
        // Nor are they offered.
        for (without, also) in [
            (FEATURE_SRQ, FEATURE_XRC | FEATURE_RESIZE_SRQ),
            (FEATURE_UD, FEATURE_MULTICAST),
            (FEATURE_XRC, 0),
        ] {
            let mut node = Node::power_on_with(1, |config| config.features &= !without);
            let offered = FEATURES & !(without | also);
            assert_eq!(node.read_register(REG_FEATURES, 8), offered);
            node.boot();
            node.create_eq(EQ_ASYNC, 1);
            let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
            assert_eq!(caps.features, offered);
        }
    }

    /// A place for a boot block, and a good one with rings of so many entries.
    fn boot_block(node: &mut Node, cqp_log_entries: u8, eq0_log_entries: u8) -> (u64, BootBlock) {
        let block = BootBlock {
            cqp_ring: node.allocate(4096),
            eq0_ring: node.allocate(4096),
            cqp_log_entries,
            eq0_log_entries,
            ..BootBlock::zeroed()
        };
        (node.allocate(64), block)
    }

    #[test]
    fn a_bad_boot_block_is_fatal() {
        let mut node = Node::power_on(1);
        let (boot, good) = boot_block(&mut node, 4, 4);
        let cqp_ring = good.cqp_ring;
        let mut start = |address: u64, block: BootBlock| {
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
            node.host.memory.put(boot, &block);
            node.write_register(REG_DRIVER_VERSION, 4, VERSION);
            node.write_register(REG_BOOT, 8, address);
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
            node.status()
        };
        type B = BootBlock;
        let cases = [
            B {
                cqp_ring: 0,
                ..good
            },
            B {
                cqp_ring: cqp_ring + 4,
                ..good
            },
            B {
                cqp_ring: u64::MAX - 63,
                ..good
            },
            B {
                eq0_ring: u64::MAX - 63,
                ..good
            },
            B {
                cqp_log_entries: 13,
                ..good
            },
            B {
                cqp_log_entries: 255,
                ..good
            },
            B {
                eq0_log_entries: 3,
                ..good
            },
            B {
                eq0_log_entries: 255,
                ..good
            },
            B {
                eq0_message: 8,
                ..good
            },
            B {
                reserved0: 1,
                ..good
            },
            B {
                reserved1: [0, 0, 0, 0, 1 << 63],
                ..good
            },
        ];
        for block in cases {
            assert_eq!(
                start(boot, block).fatal(),
                Some(FatalCode::BadBootBlock),
                "{block:?}"
            );
        }
        for address in [0, boot + 8, u64::MAX - 63] {
            assert_eq!(start(address, good).fatal(), Some(FatalCode::BadBootBlock));
        }
        assert_eq!(start(boot, good).state(), Some(DeviceState::Running));
    }

    #[test]
    fn a_start_that_is_refused_changes_nothing() {
        let mut node = Node::power_on(1);
        let (boot, good) = boot_block(&mut node, 5, 7);
        let BootBlock {
            cqp_ring, eq0_ring, ..
        } = good;
        let beyond = BootBlock {
            cqp_ring: u64::MAX - 63,
            ..good
        };
        // Where the control ring cannot be, and where a piece is missing in the midst of either.
        let cases = [
            (beyond, None),
            (good, Some(cqp_ring + 0x840..cqp_ring + 0x841)),
            (good, Some(eq0_ring + 0xa00..eq0_ring + 0xa20)),
        ];
        for (block, hole) in cases {
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
            node.host.memory.put(boot, &block);
            if let Some(hole) = hole {
                node.host.memory.take_away(hole);
            }
            *node.host.accesses.borrow_mut() = Some(Vec::new());
            node.write_register(REG_DRIVER_VERSION, 4, VERSION);
            node.write_register(REG_BOOT, 8, boot);
            node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
            assert_eq!(node.status().fatal(), Some(FatalCode::BadBootBlock));
            assert!(node.host.raised.is_empty(), "{:?}", node.host.raised);
            let accesses = node.host.accesses.borrow_mut().take().unwrap();
            let writes = accesses.iter().filter(|access| {
                matches!(
                    access,
                    testing::Access::Write(..) | testing::Access::Store(..)
                )
            });
            assert_eq!(writes.count(), 0, "{block:?}");
            node.host.memory.give_back();
        }
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        node.boot();
    }

    #[test]
    fn many_commands_are_in_flight_and_each_is_answered() {
        let mut node = Node::new(1);
        let nop = CommandEntry::new(CommandOpcode::Nop, 0, (0, 0), &0u64);
        let unknown = CommandEntry { opcode: 999, ..nop };
        for _ in 0..10 {
            let mut entries = [nop; 32];
            entries[7] = unknown;
            let statuses = node.commands(&entries);
            for (index, status) in statuses.into_iter().enumerate() {
                let expected = if index == 7 {
                    CommandStatus::BadOpcode
                } else {
                    CommandStatus::Ok
                };
                assert_eq!(status, expected);
            }
        }
        assert_eq!(node.engine.counters().failed_commands, 10);
    }

    #[test]
    fn an_impossible_command_index_is_fatal() {
        for producer in [33 + 4, u32::MAX] {
            let mut node = Node::new(1);
            node.doorbell(0, DOORBELL_CONTROL, u64::from(producer));
            assert_eq!(node.status().fatal(), Some(FatalCode::BadCommandIndex));
        }
    }

    #[test]
    fn commands_come_from_page_0_alone() {
        let mut node = Node::new(1);
        let commands = node.engine.counters().commands;
        node.doorbell(1, DOORBELL_CONTROL, commands + 1);
        node.doorbell(1, DOORBELL_EVENT_QUEUE, u64::MAX);
        assert_eq!(node.engine.counters().commands, commands);
        assert_eq!(node.engine.counters().bad_doorbells, 2);
        assert_eq!(node.status().state(), Some(DeviceState::Running));
    }

    #[test]
    fn replies_are_written_where_the_driver_said_or_refused() {
        let mut node = Node::new(1);
        let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
        assert_eq!(caps.max_sge as usize, MAX_SGE);
        assert_eq!(caps.features, FEATURES);
        assert_eq!(caps.page_sizes, 0x7fff_f000);
        let query = |node: &mut Node, reply| {
            let entry = CommandEntry::new(CommandOpcode::QueryDevice, 0, reply, &0u64);
            node.commands(&[entry])[0]
        };
        assert_eq!(query(&mut node, (0, 64)), CommandStatus::BadParameter);
        assert_eq!(
            query(&mut node, (testing::MEMORY_BASE + 8, 64)),
            CommandStatus::BadParameter
        );
        assert_eq!(query(&mut node, (0x40, 64)), CommandStatus::HostMemory);
        assert_eq!(
            query(&mut node, (u64::MAX - 63, 64)),
            CommandStatus::HostMemory
        );
    }

    #[test]
    fn counters_are_queried_in_their_order() {
        let mut node = Node::new(1);
        node.engine.core.counters.tx_packets = 11;
        node.engine.core.counters.completions = 22;
        let counters: [u8; 128] = {
            let first: DeviceCaps = node.query(CommandOpcode::QueryCounters, 0).unwrap();
            first.as_bytes()[..128].try_into().unwrap()
        };
        let counter = |name: &str| {
            let at = COUNTER_NAMES.iter().position(|&other| other == name);
            u64::from_le_bytes(counters[at.unwrap() * 8..][..8].try_into().unwrap())
        };
        assert_eq!(counter("tx_packets"), 11);
        assert_eq!(counter("completions"), 22);
        assert_eq!(counter("rx_bytes"), 0);
    }

    #[test]
    fn what_is_not_offered_is_unsupported() {
        let mut node = Node::power_on(1);
        node.engine = Engine::new(Config {
            features: 0,
            ..Node::config(node.mac)
        });
        node.boot();
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        node.create_cq(1, EQ_FIRST_HANDLER, 4);
        for opcode in [
            CommandOpcode::CreateSrq,
            CommandOpcode::ModifySrq,
            CommandOpcode::QuerySrq,
            CommandOpcode::DestroySrq,
            CommandOpcode::AttachMulticast,
            CommandOpcode::DetachMulticast,
        ] {
            assert_eq!(node.object_command(opcode, 1), CommandStatus::Unsupported);
        }
        for (qpn, service) in [
            (1, Service::Gsi),
            (2, Service::Uc),
            (2, Service::Ud),
            (2, Service::XrcIni),
            (2, Service::XrcTgt),
        ] {
            let command = node.qp_template(QpOptions {
                qpn,
                service,
                ..QpOptions::default()
            });
            assert_eq!(
                node.command(CommandOpcode::CreateQueuePair, &command),
                CommandStatus::Unsupported
            );
        }
        node.create_qp(QpOptions::default());
    }

    #[test]
    fn reset_clears_everything_but_the_counters() {
        let mut node = Node::new(1);
        node.create_qp(QpOptions::default());
        let peer = node.as_peer(77);
        node.connect(2, &peer);
        node.register(Tag::new(5, 1).0, 1, 0, 100);
        node.arm_cq(1, 0, false);
        node.ring_eq(EQ_CONTROL, true);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET | CONTROL_ENABLE));
        assert_eq!(node.status().state(), Some(DeviceState::Ready));
        assert_eq!(node.engine.next_timeout(), None);
        // Doorbells do nothing.
        node.doorbell(0, DOORBELL_CONTROL, 100);
        node.doorbell(1, DOORBELL_SEND, send_doorbell(2, 0));
        node.settle();
        assert_eq!(node.status().state(), Some(DeviceState::Ready));
        node.boot();
        for opcode in [
            CommandOpcode::DestroyQueuePair,
            CommandOpcode::DestroyCompletionQueue,
            CommandOpcode::DestroyEventQueue,
        ] {
            assert_eq!(node.object_command(opcode, 2), CommandStatus::NotFound);
        }
        assert_eq!(
            node.object_command(CommandOpcode::ReleaseTag, Tag::new(5, 1).0),
            CommandStatus::NotFound
        );
        assert!(node.engine.core().gids.get(0).is_none());
        assert_eq!(node.engine.counters().resets, 1);
        assert!(node.engine.counters().commands > 4);
        assert!(node.host.raised.is_empty());
    }

    #[test]
    fn an_injected_fault_stops_the_device_and_tells_the_driver() {
        let mut node = Node::new(1);
        node.engine.inject_fatal(&mut node.host);
        assert_eq!(node.status().fatal(), Some(FatalCode::Injected));
        assert_eq!(node.event_codes(EQ_CONTROL), [(EventCode::DeviceFatal, 0)]);
        assert_eq!(node.host.raised, [0]);
        // Nothing is done any more, and frames are the host's.
        node.doorbell(0, DOORBELL_CONTROL, 1000);
        assert_eq!(node.receive(&[0; 64]), Disposition::PassToHost);
        assert_eq!(node.status().fatal(), Some(FatalCode::Injected));
        assert!(node.events(EQ_CONTROL).is_empty());
    }

    #[test]
    fn changes_of_the_link_are_told_once() {
        let mut node = Node::new(1);
        for up in [true, false, false, true] {
            node.engine.set_link(up, node.now, &mut node.host);
            assert_eq!(node.status().link_up(), up);
        }
        let told: Vec<u64> = node
            .events(EQ_CONTROL)
            .iter()
            .inspect(|event| assert_eq!(event.code, EventCode::LinkChange.number()))
            .map(|event| event.param0)
            .collect();
        assert_eq!(told, [0, 1]);
    }

    #[test]
    fn doorbells_of_a_wrong_size_or_outside_are_ignored() {
        let mut node = Node::new(1);
        let behind = node.engine.config().doorbell_bar_size();
        let mut write = |offset: u64, size| {
            node.engine
                .mmio_write(BAR_DOORBELLS, offset, size, 1 << 40, 0, &mut node.host);
        };
        write(DOORBELL_CONTROL as u64, 4);
        write(behind + DOORBELL_CONTROL as u64, 8);
        write(u64::MAX, 8);
        write(0x100, 8);
        assert_eq!(node.engine.counters().bad_doorbells, 4);
        assert_eq!(node.status().state(), Some(DeviceState::Running));
    }
}
