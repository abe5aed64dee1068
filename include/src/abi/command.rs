// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Commands of the control queue pair (CQP).
//!
//! The control ring holds [`CommandEntry`]s. The device copies entries in order, may work on many
//! at once, and reports each with a `CommandDone` event on event queue 0. The driver keeps fewer
//! commands unfinished than the ring has entries. All numbers (queues, tags, protection domains)
//! are chosen by the driver.

use super::{Buffer, Path};

numbers! {
    /// What a command does.
    pub enum CommandOpcode: u16 {
        /// Nothing; for tests and to order others.
        Nop = 1,
        /// Fill a [`DeviceCaps`] at `reply`.
        QueryDevice = 2,
        /// [`CreateEventQueue`].
        CreateEventQueue = 3,
        /// [`ObjectNumber`]; afterwards no event is written to the queue.
        DestroyEventQueue = 4,
        /// [`ModifyEventQueue`].
        ModifyEventQueue = 5,
        /// [`CreateCompletionQueue`].
        CreateCompletionQueue = 6,
        /// [`ModifyCompletionQueue`].
        ModifyCompletionQueue = 7,
        /// [`ResizeCompletionQueue`].
        ResizeCompletionQueue = 8,
        /// [`ObjectNumber`]; refused while a queue pair uses the queue.
        DestroyCompletionQueue = 9,
        /// [`CreateQueuePair`].
        CreateQueuePair = 10,
        /// [`ModifyQueuePair`].
        ModifyQueuePair = 11,
        /// [`ObjectNumber`]; fills a [`QueuePairState`] at `reply`.
        QueryQueuePair = 12,
        /// [`ObjectNumber`]; afterwards the device touches neither queues nor buffers.
        DestroyQueuePair = 13,
        /// [`RegisterRegion`].
        RegisterRegion = 14,
        /// [`AllocateTag`].
        AllocateTag = 15,
        /// [`ObjectNumber`] holding a tag; afterwards the device does not touch the memory.
        /// Refused for a region with windows bound to it.
        ReleaseTag = 16,
        /// [`SetGid`].
        SetGid = 17,
        /// [`CreateSharedReceive`].
        CreateSharedReceive = 18,
        /// [`ModifySharedReceive`].
        ModifySharedReceive = 19,
        /// [`ObjectNumber`]; fills a [`SharedReceiveState`] at `reply`.
        QuerySharedReceive = 20,
        /// [`ObjectNumber`]; refused while a queue pair uses the queue.
        DestroySharedReceive = 21,
        /// Fill [`COUNTER_NAMES`]`.len()` 64-bit counters at `reply`.
        QueryCounters = 22,
        /// [`MulticastMember`]: add.
        AttachMulticast = 23,
        /// [`MulticastMember`]: remove.
        DetachMulticast = 24,
        /// [`ResizeSharedReceive`].
        ResizeSharedReceive = 25,
        /// [`SetPort`].
        SetPort = 26,
        /// Fill a [`ClockReading`] at `reply`.
        QueryClock = 27,
        /// Fill a [`PageFaults`] at `reply` with faults that were not taken yet.
        TakeFaults = 40,
        /// [`ResolveFault`].
        ResolveFault = 41,
        /// [`InvalidatePages`]; afterwards the device uses no older translation of them.
        InvalidatePages = 42,
    }

    /// How a command ended.
    pub enum CommandStatus: u8 {
        /// Done.
        Ok = 0,
        /// No such opcode.
        BadOpcode = 1,
        /// A field has a value that is not allowed.
        BadParameter = 2,
        /// A number is outside the device's range.
        BadNumber = 3,
        /// There is already an object with that number.
        Exists = 4,
        /// There is no object with that number.
        NotFound = 5,
        /// Something still uses the object.
        Busy = 6,
        /// The queue pair's state does not allow it.
        BadState = 7,
        /// The device is out of room for such objects.
        NoResource = 8,
        /// Host memory that the command names could not be accessed.
        HostMemory = 9,
        /// The device does not offer this.
        Unsupported = 10,
    }
}

layout! {
    /// An entry of the control ring.
    pub struct CommandEntry: 128 {
        /// See [`CommandOpcode`].
        0 => opcode: u16,
        /// Zero.
        2 => reserved: u16,
        /// Returned in the `CommandDone` event.
        4 => cookie: u32,
        /// DMA address for the reply of a query, 64-byte aligned; else zero.
        8 => reply: u64,
        /// The command's own structure, followed by zeroes.
        16 => payload: [u8; 112],
    }

    /// An object to query or destroy.
    pub struct ObjectNumber: 8 {
        /// Its number (or tag).
        0 => number: u32,
        /// Zero.
        4 => reserved: u32,
    }

    /// Makes an event queue, unarmed.
    pub struct CreateEventQueue: 32 {
        /// Its number, not 0.
        0 => eqn: u16,
        /// MSI-X vector; several queues may share one.
        2 => vector: u16,
        /// Base-2 logarithm of its entries.
        4 => log_entries: u8,
        /// Zero.
        5 => reserved: [u8; 3],
        /// The zeroed ring.
        8 => ring: Buffer,
    }

    /// Changes an event queue.
    pub struct ModifyEventQueue: 16 {
        /// Its number.
        0 => eqn: u16,
        /// MSI-X vector.
        2 => vector: u16,
        /// Moderation: hold an interrupt back for at most this many microseconds, 0 for none.
        4 => moderation_microseconds: u16,
        /// Moderation: or until this many entries are unread, 0 or 1 for none.
        6 => moderation_count: u16,
        /// Zero.
        8 => reserved: u64,
    }

    /// Makes a completion queue, unarmed.
    pub struct CreateCompletionQueue: 48 {
        /// Its number.
        0 => cqn: u32,
        /// Event queue of its handler.
        4 => eqn: u16,
        /// Base-2 logarithm of its entries.
        6 => log_entries: u8,
        /// Zero.
        7 => reserved0: u8,
        /// Doorbell page it is armed from.
        8 => doorbell_page: u32,
        /// Offset of the [`super::CompletionRecord`] in `buffer`, 64-byte aligned. The ring is
        /// at offset 0.
        12 => record_offset: u32,
        /// Ring and record; the ring zeroed.
        16 => buffer: Buffer,
        /// Zero.
        40 => reserved1: u64,
    }

    /// Moves a completion queue to another handler or changes its moderation.
    pub struct ModifyCompletionQueue: 16 {
        /// Its number.
        0 => cqn: u32,
        /// Event queue of its handler from now on.
        4 => eqn: u16,
        /// Raise its event after this many completions, 0 or 1 for each.
        6 => moderation_count: u16,
        /// Or after this many microseconds.
        8 => moderation_microseconds: u16,
        /// Zero.
        10 => reserved: [u16; 3],
    }

    /// Gives a completion queue another ring. Entries not yet consumed are moved to it.
    pub struct ResizeCompletionQueue: 40 {
        /// Its number.
        0 => cqn: u32,
        /// Base-2 logarithm of its new entries.
        4 => log_entries: u8,
        /// Zero.
        5 => reserved: [u8; 3],
        /// Offset of the record in the new buffer.
        8 => record_offset: u32,
        /// Zero.
        12 => reserved1: u32,
        /// The new ring, zeroed but for the phases, and record, filled in (chapter 6).
        16 => buffer: Buffer,
    }

    /// Makes a queue pair in state RESET.
    pub struct CreateQueuePair: 72 {
        /// Its number.
        0 => qpn: u32,
        /// Protection domain.
        4 => pd: u32,
        /// Completion queue of the send queue.
        8 => send_cqn: u32,
        /// Completion queue of the receive queue.
        12 => receive_cqn: u32,
        /// See [`QueuePairKind`].
        16 => kind: u8,
        /// See `QP_FLAG_*`.
        17 => flags: u8,
        /// Base-2 logarithm of the send queue's blocks.
        18 => sq_log_blocks: u8,
        /// Base-2 logarithm of the receive queue's entries; ignored with a shared one.
        19 => rq_log_entries: u8,
        /// Base-2 logarithm of the bytes of a receive queue entry.
        20 => rq_log_stride: u8,
        /// Zero.
        21 => reserved0: [u8; 3],
        /// Shared receive queue, with `QP_FLAG_SHARED_RECEIVE`.
        24 => srqn: u32,
        /// Doorbell page it is posted to from.
        28 => doorbell_page: u32,
        /// Both rings and the [`super::QueuePairRecord`].
        32 => buffer: Buffer,
        /// Offset of the send queue in `buffer`, 64-byte aligned.
        56 => sq_offset: u32,
        /// Offset of the receive queue in `buffer`, 64-byte aligned.
        60 => rq_offset: u32,
        /// Offset of the record in `buffer`, 64-byte aligned.
        64 => record_offset: u32,
        /// XRC domain of an extended reliable connection's target; else zero.
        68 => xrcd: u32,
    }

    /// Changes a queue pair: its state, its attributes, or both.
    pub struct ModifyQueuePair: 104 {
        /// Its number.
        0 => qpn: u32,
        /// Which fields count, `MODIFY_*`.
        4 => mask: u32,
        /// New state, [`QueuePairStateCode`].
        8 => state: u8,
        /// The state the caller believes it is in.
        9 => current_state: u8,
        /// Base-2 logarithm of the path MTU: 8 to 12.
        10 => log_mtu: u8,
        /// Local ACK timeout: 4.096 us << n, 0 for none.
        11 => timeout: u8,
        /// Retries after a timeout or sequence error, 0 to 7.
        12 => retry_count: u8,
        /// Retries while the receiver is not ready, 7 for ever.
        13 => rnr_retry: u8,
        /// What to tell a peer to wait while not ready, code 0 to 31 of the IBTA's table.
        14 => min_rnr_timer: u8,
        /// Reads and atomics in flight as requester, 0 to 16.
        15 => max_read_out: u8,
        /// Reads and atomics served at once as responder, 0 to 16.
        16 => max_read_in: u8,
        /// Zero.
        17 => reserved0: u8,
        /// Partition key index; only 0 exists.
        18 => pkey_index: u16,
        /// What a peer may do: `ACCESS_REMOTE_*`.
        20 => access: u32,
        /// Peer's queue pair number.
        24 => destination_qpn: u32,
        /// First packet sequence number to send.
        28 => send_psn: u32,
        /// First packet sequence number to expect.
        32 => receive_psn: u32,
        /// Queue key, for datagrams.
        36 => qkey: u32,
        /// Path to the peer.
        40 => path: Path,
        /// Zero.
        80 => reserved1: [u64; 3],
    }

    /// Reply of `QueryQueuePair`.
    pub struct QueuePairState: 128 {
        /// The attributes, as they were set; `state` is the present state.
        0 => attributes: ModifyQueuePair,
        /// The next sequence number to send.
        104 => send_psn: u32,
        /// The next sequence number to expect.
        108 => receive_psn: u32,
        /// 1 while a drain is under way.
        112 => draining: u8,
        /// Zero.
        113 => reserved0: [u8; 7],
        /// Zero.
        120 => reserved1: u64,
    }

    /// Makes a table entry valid as a region.
    pub struct RegisterRegion: 48 {
        /// The tag.
        0 => tag: u32,
        /// Protection domain.
        4 => pd: u32,
        /// See `ACCESS_*`.
        8 => access: u32,
        /// See `REGION_*`.
        12 => flags: u32,
        /// Address of the first byte, as work requests and peers say it.
        16 => address: u64,
        /// Where the memory is.
        24 => buffer: Buffer,
    }

    /// Reserves a table entry: a region to be registered, or a window to be bound, through a
    /// send queue.
    pub struct AllocateTag: 16 {
        /// The tag; its index is reserved, its instance is that of the first registration.
        0 => tag: u32,
        /// Protection domain.
        4 => pd: u32,
        /// See [`super::TagKind`].
        8 => kind: u8,
        /// Zero.
        9 => reserved: [u8; 3],
        /// For a region: most pages it will have.
        12 => max_pages: u32,
    }

    /// Sets or clears an entry of the GID table.
    pub struct SetGid: 32 {
        /// The GID; all zero clears the entry.
        0 => gid: [u8; 16],
        /// Index.
        16 => index: u16,
        /// VLAN identifier, 0xffff for none.
        18 => vlan: u16,
        /// Source MAC address.
        20 => mac: [u8; 6],
        /// Zero.
        26 => reserved: [u16; 3],
    }

    /// Makes a shared receive queue.
    pub struct CreateSharedReceive: 56 {
        /// Its number.
        0 => srqn: u32,
        /// Protection domain.
        4 => pd: u32,
        /// Base-2 logarithm of its entries.
        8 => log_entries: u8,
        /// Base-2 logarithm of the bytes of an entry.
        9 => log_stride: u8,
        /// See `SRQ_FLAG_*`.
        10 => flags: u16,
        /// Doorbell page.
        12 => doorbell_page: u32,
        /// Ring and [`super::SharedReceiveRecord`].
        16 => buffer: Buffer,
        /// Offset of the ring in `buffer`, 64-byte aligned.
        40 => ring_offset: u32,
        /// Offset of the record in `buffer`, 64-byte aligned.
        44 => record_offset: u32,
        /// XRC domain, with [`SRQ_FLAG_EXTENDED`].
        48 => xrcd: u32,
        /// Completion queue of what it receives, with [`SRQ_FLAG_EXTENDED`].
        52 => cqn: u32,
    }

    /// Arms the limit of a shared receive queue.
    pub struct ModifySharedReceive: 8 {
        /// Its number.
        0 => srqn: u32,
        /// Raise an event once when fewer entries are left; 0 disarms.
        4 => limit: u32,
    }

    /// Gives a shared receive queue another ring, of entries of the same size. Entries not yet
    /// taken are moved to it, and keep their free-running index.
    pub struct ResizeSharedReceive: 40 {
        /// Its number.
        0 => srqn: u32,
        /// Base-2 logarithm of its new entries.
        4 => log_entries: u8,
        /// Zero.
        5 => reserved: [u8; 3],
        /// Offset of the ring in the new buffer, 64-byte aligned.
        8 => ring_offset: u32,
        /// Offset of the record in the new buffer, 64-byte aligned.
        12 => record_offset: u32,
        /// The new ring, and record with `producer` as in the old one.
        16 => buffer: Buffer,
    }

    /// Reply of `QuerySharedReceive`.
    pub struct SharedReceiveState: 64 {
        /// The armed limit.
        0 => limit: u32,
        /// Entries not consumed.
        4 => available: u32,
        /// Zero.
        8 => reserved: [u64; 7],
    }

    /// Tells what the port's link takes.
    pub struct SetPort: 8 {
        /// Base-2 logarithm of the port's active MTU: 8 to 12. The longest datagram.
        0 => log_mtu: u8,
        /// Zero.
        1 => reserved: [u8; 7],
    }

    /// A datagram queue pair that receives what is sent to a multicast group.
    pub struct MulticastMember: 24 {
        /// The group.
        0 => gid: [u8; 16],
        /// The queue pair.
        16 => qpn: u32,
        /// Zero.
        20 => reserved: u32,
    }

    /// An access to a page of an on-demand region that is not there.
    pub struct PageFault: 32 {
        /// Names the fault until it is resolved.
        0 => token: u64,
        /// First byte needed, as an offset in the region.
        8 => offset: u64,
        /// The region's tag.
        16 => tag: u32,
        /// Bytes from there on that the same work wants, at least 1.
        20 => length: u32,
        /// See `FAULT_*`.
        24 => flags: u32,
        /// Zero.
        28 => reserved: u32,
    }

    /// Reply of `TakeFaults`.
    pub struct PageFaults: 256 {
        /// How many of `faults` are filled in.
        0 => count: u32,
        /// Zero.
        4 => reserved0: u32,
        /// Zero.
        8 => reserved1: [u64; 3],
        /// The faults.
        32 => faults: [PageFault; 7],
    }

    /// Lets what waits for a page go on.
    pub struct ResolveFault: 16 {
        /// Of the fault.
        0 => token: u64,
        /// 0: the pages are there, try again. 1: they cannot be had.
        8 => failed: u32,
        /// Zero.
        12 => reserved: u32,
    }

    /// Ends the use of translations that the host has taken out of an on-demand region's tables.
    pub struct InvalidatePages: 24 {
        /// The region's tag.
        0 => tag: u32,
        /// Zero.
        4 => reserved: u32,
        /// First page, counted from the first page of the region.
        8 => first: u64,
        /// Pages.
        16 => count: u64,
    }

    /// The device's time: reply of `QueryClock`.
    pub struct ClockReading: 64 {
        /// Ticks of the clock that completions are stamped with.
        0 => ticks: u64,
        /// Zero.
        8 => reserved: [u64; 7],
    }

    /// What the device can do: reply of `QueryDevice`.
    pub struct DeviceCaps: 256 {
        /// Queue pairs: numbers from 1 to one less than this.
        0 => max_qp: u32,
        /// Completion queues: numbers from 0 to one less than this.
        4 => max_cq: u32,
        /// Shared receive queues, likewise.
        8 => max_srq: u32,
        /// Table entries: tag indices from 1 to one less than this.
        12 => max_tags: u32,
        /// Event queues, the two fixed ones included.
        16 => max_eq: u16,
        /// GID table entries.
        18 => max_gid: u16,
        /// Reads and atomics in flight per queue pair, each way.
        20 => max_read: u8,
        /// Largest MTU, base-2 logarithm.
        21 => max_log_mtu: u8,
        /// Base-2 logarithm of the most blocks of a send queue.
        22 => sq_max_log_blocks: u8,
        /// Base-2 logarithm of the most entries of a receive queue.
        23 => rq_max_log_entries: u8,
        /// Base-2 logarithm of the most entries of a completion queue.
        24 => cq_max_log_entries: u8,
        /// Base-2 logarithm of the most entries of an event queue.
        25 => eq_max_log_entries: u8,
        /// Most scatter/gather entries of a work request.
        26 => max_sge: u8,
        /// Zero.
        27 => reserved0: u8,
        /// Most bytes of inline data.
        28 => max_inline: u32,
        /// Longest message in bytes.
        32 => max_message: u64,
        /// Longest region in bytes.
        40 => max_region: u64,
        /// Page sizes a buffer may have: bit n for `1 << n` bytes.
        48 => page_sizes: u64,
        /// Operations and kinds it offers, `FEATURE_*`, as in `REG_FEATURES`.
        56 => features: u64,
        /// Globally unique identifier.
        64 => guid: u64,
        /// Doorbell pages.
        72 => doorbell_pages: u32,
        /// Ticks of the device's clock per millisecond; 0 for no clock.
        76 => clock_khz: u32,
        /// Bytes of device memory.
        80 => device_memory: u64,
        /// XRC domains: numbers from 1 to one less than this.
        88 => max_xrcd: u32,
        /// Queue pairs attached to one multicast group at most, and groups; 0 for no multicast.
        92 => max_multicast: u32,
        /// Zero.
        96 => reserved1: [u64; 20],
    }
}

numbers! {
    /// The service a queue pair gives; numbers as in the verbs.
    pub enum QueuePairKind: u8 {
        /// Management datagrams; queue pair 1.
        Gsi = 1,
        /// Reliable connection.
        ReliableConnected = 2,
        /// Unreliable connection.
        UnreliableConnected = 3,
        /// Unreliable datagrams.
        Datagram = 4,
        /// Extended reliable connection, sending side.
        ExtendedInitiator = 9,
        /// Extended reliable connection, receiving side.
        ExtendedTarget = 10,
    }

    /// States of a queue pair; numbers as in the verbs.
    pub enum QueuePairStateCode: u8 {
        /// Just made, or reset.
        Reset = 0,
        /// Receives may be posted.
        Init = 1,
        /// Ready to receive.
        ReadyToReceive = 2,
        /// Ready to send.
        ReadyToSend = 3,
        /// Send queue drained.
        SendDrain = 4,
        /// Send queue in error (datagrams).
        SendError = 5,
        /// In error; everything is flushed.
        Error = 6,
    }
}

/// `CreateQueuePair::flags`: work requests may use [`super::TAG_ALL_MEMORY`] and register memory.
pub const QP_FLAG_PRIVILEGED: u8 = 1 << 0;
/// `CreateQueuePair::flags`: receives come from the shared receive queue `srqn`.
pub const QP_FLAG_SHARED_RECEIVE: u8 = 1 << 1;
/// `CreateQueuePair::flags`: registrations through the send queue are allowed.
pub const QP_FLAG_REGISTER: u8 = 1 << 2;
/// `CreateQueuePair::flags`: a failed registration drains the send queue instead of failing the
/// queue pair.
pub const QP_FLAG_REGISTER_DRAINS: u8 = 1 << 3;

/// `RegisterRegion::flags`: the tag exists and is changed (or moved) in place.
pub const REGION_REPLACE: u32 = 1 << 0;
/// `RegisterRegion::flags`: the region is device memory; `buffer.root` is the offset in it, the
/// order is direct.
pub const REGION_DEVICE_MEMORY: u32 = 1 << 1;

/// `RegisterRegion::flags`: pages of the region come and go; its tables are those of
/// [`super::ON_DEMAND_PRESENT`], `buffer.order` is the number of their levels.
pub const REGION_ON_DEMAND: u32 = 1 << 8;

/// `PageFault::flags`: the page is to be written.
pub const FAULT_WRITE: u32 = 1 << 0;

/// `CreateSharedReceive::flags`: for extended reliable connections of the domain `xrcd`.
pub const SRQ_FLAG_EXTENDED: u16 = 1 << 0;

/// `ModifyQueuePair::mask`: `state`.
pub const MODIFY_STATE: u32 = 1 << 0;
/// `ModifyQueuePair::mask`: `current_state`.
pub const MODIFY_CURRENT_STATE: u32 = 1 << 1;
/// `ModifyQueuePair::mask`: `access`.
pub const MODIFY_ACCESS: u32 = 1 << 2;
/// `ModifyQueuePair::mask`: `pkey_index`.
pub const MODIFY_PKEY: u32 = 1 << 3;
/// `ModifyQueuePair::mask`: `qkey`.
pub const MODIFY_QKEY: u32 = 1 << 4;
/// `ModifyQueuePair::mask`: `path`.
pub const MODIFY_PATH: u32 = 1 << 5;
/// `ModifyQueuePair::mask`: `log_mtu`.
pub const MODIFY_MTU: u32 = 1 << 6;
/// `ModifyQueuePair::mask`: `timeout`.
pub const MODIFY_TIMEOUT: u32 = 1 << 7;
/// `ModifyQueuePair::mask`: `retry_count`.
pub const MODIFY_RETRY: u32 = 1 << 8;
/// `ModifyQueuePair::mask`: `rnr_retry`.
pub const MODIFY_RNR_RETRY: u32 = 1 << 9;
/// `ModifyQueuePair::mask`: `receive_psn`.
pub const MODIFY_RECEIVE_PSN: u32 = 1 << 10;
/// `ModifyQueuePair::mask`: `max_read_out`.
pub const MODIFY_READ_OUT: u32 = 1 << 11;
/// `ModifyQueuePair::mask`: `min_rnr_timer`.
pub const MODIFY_MIN_RNR_TIMER: u32 = 1 << 12;
/// `ModifyQueuePair::mask`: `send_psn`.
pub const MODIFY_SEND_PSN: u32 = 1 << 13;
/// `ModifyQueuePair::mask`: `max_read_in`.
pub const MODIFY_READ_IN: u32 = 1 << 14;
/// `ModifyQueuePair::mask`: `destination_qpn`.
pub const MODIFY_DESTINATION: u32 = 1 << 15;

/// Feature: shared receive queues.
pub const FEATURE_SHARED_RECEIVE: u64 = 1 << 0;
/// Feature: atomic operations.
pub const FEATURE_ATOMICS: u64 = 1 << 1;
/// Feature: memory windows.
pub const FEATURE_WINDOWS: u64 = 1 << 2;
/// Feature: registration and invalidation through the send queue.
pub const FEATURE_SEND_QUEUE_REGISTRATION: u64 = 1 << 3;
/// Feature: unreliable connections.
pub const FEATURE_UNRELIABLE_CONNECTED: u64 = 1 << 4;
/// Feature: datagrams and queue pair 1.
pub const FEATURE_DATAGRAM: u64 = 1 << 5;
/// Feature: `ResizeCompletionQueue`.
pub const FEATURE_RESIZE_CQ: u64 = 1 << 6;

/// Feature: extended reliable connections.
pub const FEATURE_EXTENDED_CONNECTED: u64 = 1 << 7;
/// Feature: device memory.
pub const FEATURE_DEVICE_MEMORY: u64 = 1 << 8;
/// Feature: multicast for datagrams.
pub const FEATURE_MULTICAST: u64 = 1 << 9;
/// Feature: [`super::ACCESS_ONE_TOUCH`].
pub const FEATURE_ONE_TOUCH: u64 = 1 << 10;

/// Feature: atomic writes.
pub const FEATURE_ATOMIC_WRITE: u64 = 1 << 11;
/// Feature: flushes, and [`super::ACCESS_FLUSH_GLOBAL`].
pub const FEATURE_FLUSH: u64 = 1 << 12;
/// Feature: `ResizeSharedReceive`.
pub const FEATURE_RESIZE_SRQ: u64 = 1 << 13;
/// Feature: `SetPort`.
pub const FEATURE_PORT_MTU: u64 = 1 << 14;
/// Feature: regions whose pages come and go, [`REGION_ON_DEMAND`].
pub const FEATURE_ON_DEMAND: u64 = 1 << 16;
/// Feature: event queues that are armed, but not for the answers to commands.
pub const FEATURE_QUIET_COMMANDS: u64 = 1 << 20;

/// Names of the counters that `QueryCounters` fills in, in order.
pub const COUNTER_NAMES: [&str; 16] = [
    "tx_packets",
    "tx_bytes",
    "rx_packets",
    "rx_bytes",
    "rx_icrc_errors",
    "rx_dropped",
    "duplicate_requests",
    "out_of_sequence",
    "retransmissions",
    "ack_timeouts",
    "rnr_naks_sent",
    "rnr_naks_received",
    "naks_sent",
    "naks_received",
    "access_errors",
    "completions",
];

/// A command with its opcode and reply; the payload types implement it.
pub trait Command: super::Plain {
    /// What stands in `CommandEntry::opcode`.
    const OPCODE: CommandOpcode;
}

macro_rules! commands {
    ($($name:ident,)*) => {$(
        impl Command for $name {
            const OPCODE: CommandOpcode = CommandOpcode::$name;
        }
        const _: () = assert!(core::mem::size_of::<$name>() <= 112);
    )*};
}

commands! {
    CreateEventQueue,
    ModifyEventQueue,
    CreateCompletionQueue,
    ModifyCompletionQueue,
    ResizeCompletionQueue,
    CreateQueuePair,
    ModifyQueuePair,
    RegisterRegion,
    AllocateTag,
    SetGid,
    CreateSharedReceive,
    ModifySharedReceive,
    ResizeSharedReceive,
    SetPort,
    ResolveFault,
    InvalidatePages,
}

impl CommandEntry {
    /// An entry that carries `payload`.
    pub fn new<P: super::Plain>(
        opcode: CommandOpcode,
        cookie: u32,
        reply: u64,
        payload: &P,
    ) -> Self {
        const { assert!(core::mem::size_of::<P>() <= 112) }
        let mut entry = Self {
            opcode: opcode as u16,
            reserved: 0,
            cookie,
            reply,
            payload: [0; 112],
        };
        entry.payload[..core::mem::size_of::<P>()].copy_from_slice(payload.as_bytes());
        entry
    }
}
