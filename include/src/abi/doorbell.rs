// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Doorbell pages (BAR 2) and doorbell records (host memory).
//!
//! Doorbells are 64-bit writes; nothing in a doorbell page can be read. A queue answers only to
//! the page it was created with. Page 0 belongs to the kernel; the offsets from
//! [`DOORBELL_EVENT_QUEUE`] on exist in page 0 alone.

/// Send queue: [`send_doorbell`].
pub const DOORBELL_SEND: usize = 0x000;
/// Receive queue: [`queue_doorbell`]; only where [`QueuePairRecord::receive_wake`] asks for it.
pub const DOORBELL_RECEIVE: usize = 0x008;
/// Completion queue: [`CompletionDoorbell`].
pub const DOORBELL_COMPLETION: usize = 0x010;
/// Shared receive queue: [`queue_doorbell`]; only where its record asks for it.
pub const DOORBELL_SRQ: usize = 0x018;
/// Transmit ring of a channel: [`channel_doorbell`]; only where its record asks for it.
pub const DOORBELL_CHANNEL: usize = 0x020;
/// First of the offsets that are reserved for work requests pushed into the device; up to
/// [`DOORBELL_PUSH_END`].
pub const DOORBELL_PUSH: usize = 0x100;
/// End of them.
pub const DOORBELL_PUSH_END: usize = 0x200;
/// Event queue, page 0: [`EventDoorbell`].
pub const DOORBELL_EVENT_QUEUE: usize = 0x800;
/// Control queue, page 0: the producer index, free-running, in bits 31:0.
pub const DOORBELL_CONTROL: usize = 0x808;

/// Numbers of queue pairs, completion queues and shared receive queues have 24 bits.
pub const QUEUE_NUMBER_MASK: u32 = 0xff_ffff;

/// The send doorbell: queue number in bits 23:0, producer index in 63:32.
///
/// The index is a hint for the device to prefetch by; the record is what counts.
pub const fn send_doorbell(qpn: u32, producer: u32) -> u64 {
    (qpn & QUEUE_NUMBER_MASK) as u64 | ((producer as u64) << 32)
}

/// The receive doorbells: queue number in bits 23:0.
pub const fn queue_doorbell(number: u32) -> u64 {
    (number & QUEUE_NUMBER_MASK) as u64
}

/// The doorbell of a channel: its number in bits 15:0.
pub const fn channel_doorbell(channel: u16) -> u64 {
    channel as u64
}

/// Arms a completion queue: index seen 31:0, number 55:32, sequence 57:56, solicited 58.
///
/// An event is raised as soon as there is a completion (a solicited one, if that is asked) with
/// an index at or after `seen`, be it there already or yet to come; so none is missed. Nothing is
/// said about what was consumed: only [`CompletionRecord`] does that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionDoorbell {
    /// Completion queue number.
    pub cqn: u32,
    /// Index of the first completion that was not in the ring when its host looked, free-running;
    /// see [`first_unwritten`](super::first_unwritten).
    pub seen: u32,
    /// Returned in the event, so that an event can be told from that of an earlier arming.
    pub sequence: u8,
    /// Wait for a solicited or failed completion.
    pub solicited: bool,
}

impl CompletionDoorbell {
    /// The word to write.
    pub const fn encode(self) -> u64 {
        self.seen as u64
            | (((self.cqn & QUEUE_NUMBER_MASK) as u64) << 32)
            | (((self.sequence & 3) as u64) << 56)
            | ((self.solicited as u64) << 58)
    }

    /// The meaning of a written word.
    pub const fn decode(word: u64) -> Self {
        Self {
            cqn: (word >> 32) as u32 & QUEUE_NUMBER_MASK,
            seen: word as u32,
            sequence: (word >> 56) as u8 & 3,
            solicited: (word >> 58) & 1 != 0,
        }
    }
}

/// Updates and arms an event queue: read index 31:0, number 47:32, disarm 59, quiet 60,
/// relative 61, valid 62, arm 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventDoorbell {
    /// Event queue number.
    pub eqn: u16,
    /// Entries consumed: the free-running count, or with `relative` how many more than before.
    pub read_index: u32,
    /// `read_index` is an advance.
    pub relative: bool,
    /// `read_index` is to be taken.
    pub valid: bool,
    /// Raise an interrupt once there is an entry at or after the read index.
    pub arm: bool,
    /// With `arm`: entries of [`super::EventCode::CommandDone`] that are written from now on do
    /// not raise it ([`super::FEATURE_QUIET_COMMANDS`]).
    pub quiet: bool,
    /// Without `arm`: take the arming back ([`super::FEATURE_EQ_CONTROL`]).
    pub disarm: bool,
}

impl EventDoorbell {
    /// The word to write.
    pub const fn encode(self) -> u64 {
        self.read_index as u64
            | ((self.eqn as u64) << 32)
            | ((self.disarm as u64) << 59)
            | ((self.quiet as u64) << 60)
            | ((self.relative as u64) << 61)
            | ((self.valid as u64) << 62)
            | ((self.arm as u64) << 63)
    }

    /// The meaning of a written word.
    pub const fn decode(word: u64) -> Self {
        Self {
            eqn: (word >> 32) as u16,
            read_index: word as u32,
            disarm: (word >> 59) & 1 != 0,
            quiet: (word >> 60) & 1 != 0,
            relative: (word >> 61) & 1 != 0,
            valid: (word >> 62) & 1 != 0,
            arm: word >> 63 != 0,
        }
    }
}

layout! {
    /// Doorbell record of a queue pair, 64-byte aligned, in the queue pair's buffer. The first 64
    /// bytes are written by the host, the others by the device.
    ///
    /// To post: write the entries, then (release) the producer index, then a full barrier, then
    /// read the wake word; ring the doorbell if it is not zero. The device sets the wake word
    /// before it stops looking at the producer index and looks once more after a full barrier.
    pub struct QueuePairRecord: 128 {
        /// Blocks posted to the send queue, free-running.
        0 => send_producer: u32,
        /// Entries posted to the receive queue, free-running.
        4 => receive_producer: u32,
        /// Zero.
        8 => reserved0: [u32; 14],
        /// Not zero: the device sleeps; a post must ring [`DOORBELL_SEND`].
        64 => send_wake: u32,
        /// Not zero: a post must ring [`DOORBELL_RECEIVE`] (the queue pair is being flushed).
        68 => receive_wake: u32,
        /// Zero.
        72 => reserved1: [u32; 14],
    }

    /// Doorbell record of a completion queue, 64-byte aligned, in its buffer; written by the host.
    pub struct CompletionRecord: 64 {
        /// Completions consumed, free-running; tells the device what it may overwrite.
        0 => consumer: u32,
        /// Zero.
        4 => reserved: [u32; 15],
    }

    /// Doorbell record of a shared receive queue, as for a queue pair.
    pub struct SrqRecord: 128 {
        /// Entries posted, free-running.
        0 => producer: u32,
        /// Zero.
        4 => reserved0: [u32; 15],
        /// Not zero: a post must ring [`DOORBELL_SRQ`].
        64 => wake: u32,
        /// Zero.
        68 => reserved1: [u32; 15],
    }
}
