// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Commands of the control queue pair (CQP).
//!
//! The control ring holds [`CommandEntry`]s. The device copies entries in order, may work on many
//! at once, and reports each with a `CommandDone` event on event queue 0. The driver keeps fewer
//! commands unfinished than the ring has entries. All numbers (queues, tags, protection domains)
//! are chosen by the driver, those of queues and tags from the ranges in [`DeviceCaps`].

use super::{
    AddressVector, Buffer, CreateChannel, CreateFlow, CreateReceiveTable, ModifyChannel,
    QueryChannelCounters, SetInterface, SetMulticastFilter, SetRedirection, SetRedirectionTable,
};

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
        /// [`CreateSrq`].
        CreateSrq = 18,
        /// [`ModifySrq`].
        ModifySrq = 19,
        /// [`ObjectNumber`]; fills a [`SrqState`] at `reply`.
        QuerySrq = 20,
        /// [`ObjectNumber`]; refused while a queue pair uses the queue.
        DestroySrq = 21,
        /// [`QueryCounters`]; fills [`COUNTER_NAMES`]`.len()` 64-bit counters at `reply`.
        QueryCounters = 22,
        /// [`MulticastMember`]: add.
        AttachMulticast = 23,
        /// [`MulticastMember`]: remove.
        DetachMulticast = 24,
        /// [`ResizeSrq`].
        ResizeSrq = 25,
        /// [`SetPort`].
        SetPort = 26,
        /// Fill a [`ClockReading`] at `reply`.
        QueryClock = 27,
        /// [`SetVectorMap`].
        SetVectorMap = 28,
        /// [`QueryVectorMap`]; fills `count` [`VectorMapEntry`]s at `reply`.
        QueryVectorMap = 29,
        /// [`SwitchEventQueue`].
        SwitchEventQueue = 32,
        /// [`SetRedirection`].
        SetRedirection = 36,
        /// [`SetRedirectionTable`].
        SetRedirectionTable = 37,
        /// Fill a [`PageFaults`] at `reply` with faults that were not taken yet.
        TakeFaults = 40,
        /// [`ResolveFault`].
        ResolveFault = 41,
        /// [`InvalidatePages`]; afterwards the device uses no older translation of them.
        InvalidatePages = 42,
        /// [`ObjectNumber`] holding a tag of any instance; fills a [`TagState`] at `reply`.
        QueryTag = 43,
        /// [`CreateChannel`].
        CreateChannel = 64,
        /// [`ModifyChannel`].
        ModifyChannel = 65,
        /// [`ObjectNumber`]; afterwards the device touches neither rings nor buffers.
        DestroyChannel = 66,
        /// [`SetInterface`].
        SetInterface = 68,
        /// [`SetMulticastFilter`].
        SetMulticastFilter = 69,
        /// [`QueryChannelCounters`]; fills [`super::CHANNEL_COUNTER_NAMES`]`.len()` 64-bit
        /// counters at `reply`.
        QueryChannelCounters = 70,
        /// [`CreateFlow`].
        CreateFlow = 71,
        /// [`ObjectNumber`]; afterwards no frame is steered by the rule.
        DestroyFlow = 72,
        /// [`CreateReceiveTable`].
        CreateReceiveTable = 80,
        /// [`ObjectNumber`]; refused while a rule names the table.
        DestroyReceiveTable = 81,
        /// [`ObjectNumber`]; fills a [`CompletionQueueState`] at `reply`.
        QueryCompletionQueue = 128,
        /// [`QueryQueuePairCounters`]; fills as many 64-bit counters at `reply` as `QueryCounters`.
        QueryQueuePairCounters = 129,
    }

    /// What becomes of an event queue that has no room for an event.
    pub enum EventOverflow: u8 {
        /// The event is kept back in the device, and the driver is told by `EventQueueOverflow`.
        Hold = 0,
        /// The device stops.
        Stop = 1,
        /// The queue becomes undefined, the event is lost, and the driver is told by
        /// `EventQueueOverflow`.
        Undefine = 2,
    }

    /// Which event queues are served first where several have something.
    pub enum EventPriority: u8 {
        /// After the others.
        Bulk = 0,
        /// Before the others.
        LowLatency = 1,
    }

    /// Rows of the vector map: the parts of a function's work.
    pub enum SubFunction: u8 {
        /// All that have no entry of their own.
        Any = 0,
        /// Answers to commands.
        Commands = 1,
        /// Global events: link, memory errors, overflow.
        Global = 2,
        /// Management.
        Management = 3,
        /// RDMA: asynchronous events.
        Async = 4,
        /// RDMA: completions of send queues.
        SendCompletions = 5,
        /// RDMA: completions of receive queues.
        ReceiveCompletions = 6,
        /// Ethernet: transmit.
        Transmit = 7,
        /// Ethernet: receive.
        Receive = 8,
        /// Plain TCP streams.
        Stream = 9,
        /// iSCSI.
        Iscsi = 10,
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

/// `CommandEntry::flags`: the command's structure is at `request`, not in the entry.
pub const COMMAND_INDIRECT: u16 = 1 << 0;
/// Most entries of the vector map that one command sets or asks for.
pub const VECTOR_MAP_ENTRIES: usize = 52;
/// Processors that the vector map has columns for.
pub const VECTOR_MAP_PROCESSORS: u16 = 512;
/// Bytes of a structure that an entry holds.
pub const COMMAND_PAYLOAD: usize = 224;
/// Most queue pairs whose counters one command asks for.
pub const COUNTED_QUEUE_PAIRS: usize = 54;
/// Most bytes of a structure that is not in the entry.
pub const COMMAND_MAX_REQUEST: u32 = 4096;

/// Bytes from the start of a control ring with this logarithm of entries to its [`ControlRecord`].
pub const fn control_record_offset(log_entries: u8) -> u64 {
    (core::mem::size_of::<CommandEntry>() as u64) << log_entries
}

layout! {
    /// An entry of the control ring.
    pub struct CommandEntry: 256 {
        /// See [`CommandOpcode`].
        0 => opcode: u16,
        /// See `COMMAND_*`.
        2 => flags: u16,
        /// Returned in the `CommandDone` event.
        4 => cookie: u32,
        /// DMA address for the reply of a query, 64-byte aligned; else zero.
        8 => reply: u64,
        /// Bytes there; the device writes no more, and says in the event how many it had.
        16 => reply_length: u32,
        /// Bytes of the command's own structure.
        20 => request_length: u32,
        /// With [`COMMAND_INDIRECT`]: DMA address of that structure, 64-byte aligned; else zero.
        24 => request: u64,
        /// Without it: the structure itself, followed by zeroes.
        32 => payload: [u8; 224],
    }

    /// The control record: behind the last entry of the control ring ([`control_record_offset`]), with
    /// [`FEATURE_PENDING_TAGS`].
    pub struct ControlRecord: 64 {
        /// Commands posted, free-running: stored after the entries that it covers were written, and
        /// before the doorbell that tells the same. The driver writes it, the device reads it.
        0 => producer: u32,
        /// With [`FEATURE_TURNS`] the device's turns, free-running: odd while it is in one, even between
        /// them. The device writes it, the driver reads it. Else zero.
        4 => turn: u32,
        /// Zero.
        8 => reserved: [u32; 14],
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
        /// Message number; several queues may share one.
        2 => message: u16,
        /// Base-2 logarithm of its entries.
        4 => log_entries: u8,
        /// What happens when it is full, [`EventOverflow`].
        5 => overflow: u8,
        /// Whether it is served before others, [`EventPriority`].
        6 => priority: u8,
        /// Zero.
        7 => reserved: u8,
        /// The zeroed ring.
        8 => ring: Buffer,
    }

    /// Changes an event queue.
    pub struct ModifyEventQueue: 16 {
        /// Its number.
        0 => eqn: u16,
        /// Message number.
        2 => message: u16,
        /// Moderation: hold an interrupt back for at most this many microseconds, 0 for none.
        4 => moderation_microseconds: u16,
        /// Moderation: or until this many entries are unread, 0 or 1 for none.
        6 => moderation_count: u16,
        /// What happens when it is full, [`EventOverflow`].
        8 => overflow: u8,
        /// Whether it is served before others, [`EventPriority`].
        9 => priority: u8,
        /// Zero.
        10 => reserved: [u8; 6],
    }

    /// Gives an event queue another ring while events come, in one step: what was written stays in
    /// the old one, the next entry and all after it go to the new one, each at the slot of its
    /// index.
    pub struct SwitchEventQueue: 32 {
        /// Its number.
        0 => eqn: u16,
        /// Zero.
        2 => reserved0: u16,
        /// Base-2 logarithm of its new entries, no fewer than it has.
        4 => log_entries: u8,
        /// Zero.
        5 => reserved1: [u8; 3],
        /// The new ring, zeroed.
        8 => ring: Buffer,
    }

    /// Where an event goes, and by which message its queue then interrupts.
    pub struct VectorMapEntry: 4 {
        /// Event queue, or [`super::EQ_NONE`] for an entry that is not there.
        0 => eqn: u16,
        /// Message number, or [`super::MESSAGE_OF_QUEUE`].
        2 => message: u16,
    }

    /// Sets entries of the vector map: of one part of the work, for processors in a row.
    pub struct SetVectorMap: 224 {
        /// See [`SubFunction`].
        0 => sub_function: u8,
        /// Zero.
        1 => reserved0: u8,
        /// The first processor.
        2 => first: u16,
        /// How many entries there are, 1 to [`VECTOR_MAP_ENTRIES`].
        4 => count: u16,
        /// Zero.
        6 => reserved1: [u16; 5],
        /// The entries, followed by zeroes.
        16 => entries: [VectorMapEntry; 52],
    }

    /// Asks for entries of the vector map.
    pub struct QueryVectorMap: 8 {
        /// See [`SubFunction`].
        0 => sub_function: u8,
        /// Zero.
        1 => reserved0: u8,
        /// The first processor.
        2 => first: u16,
        /// How many entries, 1 to [`VECTOR_MAP_ENTRIES`].
        4 => count: u16,
        /// Zero.
        6 => reserved1: u16,
    }

    /// Makes a completion queue, unarmed.
    pub struct CreateCompletionQueue: 48 {
        /// Its number.
        0 => cqn: u32,
        /// Event queue of its handler, [`super::EQ_NONE`] or [`super::EQ_MAPPED`].
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
        /// With [`super::EQ_MAPPED`]: the processor of its consumer; else zero.
        40 => processor: u16,
        /// Zero.
        42 => reserved1: [u16; 3],
    }

    /// Moves a completion queue to another handler or changes its moderation.
    pub struct ModifyCompletionQueue: 16 {
        /// Its number.
        0 => cqn: u32,
        /// Event queue of its handler from now on, [`super::EQ_NONE`] or [`super::EQ_MAPPED`].
        4 => eqn: u16,
        /// Raise its event after this many completions, 0 or 1 for each.
        6 => moderation_count: u16,
        /// Or after this many microseconds.
        8 => moderation_microseconds: u16,
        /// With [`super::EQ_MAPPED`]: the processor of its consumer; else zero.
        10 => processor: u16,
        /// Zero.
        12 => reserved: [u16; 2],
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
    pub struct CreateQueuePair: 96 {
        /// Its number.
        0 => qpn: u32,
        /// Protection domain.
        4 => pd: u32,
        /// Completion queue of the send queue.
        8 => send_cqn: u32,
        /// Completion queue of the receive queue.
        12 => receive_cqn: u32,
        /// See [`Service`].
        16 => service: u8,
        /// See [`Transport`].
        17 => transport: u8,
        /// See `QP_FLAG_*`.
        18 => flags: u16,
        /// Base-2 logarithm of the send queue's blocks.
        20 => sq_log_blocks: u8,
        /// Base-2 logarithm of the receive queue's entries; ignored with a shared one.
        21 => rq_log_entries: u8,
        /// Base-2 logarithm of the bytes of a receive queue entry.
        22 => rq_log_stride: u8,
        /// The port, from 0.
        23 => port: u8,
        /// Shared receive queue, with `QP_FLAG_SRQ`; else zero.
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
        /// Zero.
        72 => reserved: [u64; 3],
    }

    /// Changes a queue pair: its state, its attributes, or both.
    pub struct ModifyQueuePair: 160 {
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
        /// ORD: reads and atomics in flight as requester, 0 to `max_ord`.
        15 => ord: u8,
        /// IRD: reads and atomics served at once as responder, 0 to `max_ird`.
        16 => ird: u8,
        /// Zero: the migration state of a queue pair with an alternate path.
        17 => reserved_migration: u8,
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
        /// Address vector of the peer.
        40 => address_vector: AddressVector,
        /// Zero: the alternate path.
        80 => reserved_alternate: AddressVector,
        /// Zero: its local ACK timeout.
        120 => reserved_alternate_timeout: u8,
        /// Zero: the port, which the verbs know at INIT.
        121 => reserved0: u8,
        /// Zero: its partition key index.
        122 => reserved_alternate_pkey_index: u16,
        /// Zero.
        124 => reserved1: u32,
        /// Zero.
        128 => reserved2: [u64; 4],
    }

    /// Reply of `QueryQueuePair`: what it is made of from `pd` on is there with [`FEATURE_CONTEXTS`].
    pub struct QueuePairState: 256 {
        /// The attributes, as they were set; `state` is the present state.
        0 => attributes: ModifyQueuePair,
        /// The next sequence number to send.
        160 => send_psn: u32,
        /// The next sequence number to expect.
        164 => receive_psn: u32,
        /// 1 while a drain is under way.
        168 => draining: u8,
        /// Zero.
        169 => reserved0: [u8; 7],
        /// Zero.
        176 => reserved1: [u64; 2],
        /// Protection domain.
        192 => pd: u32,
        /// Completion queue of the send queue; [`QUEUE_NONE`] where it has none.
        196 => send_cqn: u32,
        /// Completion queue of the receive queue; [`QUEUE_NONE`] where it has none.
        200 => receive_cqn: u32,
        /// Shared receive queue, with `QP_FLAG_SRQ`; else zero.
        204 => srqn: u32,
        /// XRC domain of an extended reliable connection's target; else zero.
        208 => xrcd: u32,
        /// Doorbell page it is posted to from.
        212 => doorbell_page: u32,
        /// See `QP_FLAG_*`.
        216 => flags: u16,
        /// See [`Service`].
        218 => service: u8,
        /// See [`Transport`].
        219 => transport: u8,
        /// Base-2 logarithm of the send queue's blocks; 0 where it has none.
        220 => sq_log_blocks: u8,
        /// Base-2 logarithm of the receive queue's entries; 0 where it has none.
        221 => rq_log_entries: u8,
        /// Base-2 logarithm of the bytes of a receive queue entry; 0 where it has none.
        222 => rq_log_stride: u8,
        /// 1 while a failed registration has the send queue stopped.
        223 => stopped: u8,
        /// Send queue: the producer index that the device knows of.
        224 => send_producer: u32,
        /// Send queue: the first block that was not taken up.
        228 => send_next: u32,
        /// Send queue: the first block of the oldest work request without completion.
        232 => send_retired: u32,
        /// Receive queue: the producer index that the device knows of.
        236 => receive_producer: u32,
        /// Receive queue: the first entry that was not taken.
        240 => receive_next: u32,
        /// Receive queue: the oldest entry without completion.
        244 => receive_retired: u32,
        /// Zero.
        248 => reserved2: u64,
    }

    /// Reply of `QueryCompletionQueue`.
    pub struct CompletionQueueState: 64 {
        /// Its number.
        0 => cqn: u32,
        /// Event queue of its handler, [`super::EQ_NONE`] or [`super::EQ_MAPPED`].
        4 => eqn: u16,
        /// With [`super::EQ_MAPPED`]: the processor of its consumer; else zero.
        6 => processor: u16,
        /// Doorbell page it is armed from.
        8 => doorbell_page: u32,
        /// Entries written, free-running.
        12 => producer: u32,
        /// Entries that the device knows to be consumed, free-running.
        16 => consumer: u32,
        /// Send and receive queues that complete to it.
        20 => users: u32,
        /// Moderation: completions until its event.
        24 => moderation_count: u16,
        /// Moderation: microseconds until its event.
        26 => moderation_microseconds: u16,
        /// Base-2 logarithm of its entries.
        28 => log_entries: u8,
        /// What raises its event: 0 nothing, 1 the next completion, 2 the next solicited one.
        29 => arming: u8,
        /// The sequence number of its last arming.
        30 => sequence: u8,
        /// 1 when it has failed.
        31 => failed: u8,
        /// Zero.
        32 => reserved: [u64; 4],
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

    /// Reserves a table entry: a region or list to be registered, or a window to be bound, through
    /// a send queue.
    pub struct AllocateTag: 16 {
        /// The tag; its index is reserved, its instance is that of the first registration.
        0 => tag: u32,
        /// Protection domain.
        4 => pd: u32,
        /// See [`super::TagKind`].
        8 => kind: u8,
        /// Zero.
        9 => reserved: [u8; 3],
        /// For a region: most pages it will have; for a list: most pieces, 1 to
        /// [`super::MAX_PIECES`]; for a window zero.
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
        /// The port, from 0.
        26 => port: u8,
        /// Zero.
        27 => reserved: [u8; 5],
    }

    /// Makes a shared receive queue.
    pub struct CreateSrq: 56 {
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
        /// Ring and [`super::SrqRecord`].
        16 => buffer: Buffer,
        /// Offset of the ring in `buffer`, 64-byte aligned.
        40 => ring_offset: u32,
        /// Offset of the record in `buffer`, 64-byte aligned.
        44 => record_offset: u32,
        /// XRC domain, with [`SRQ_FLAG_XRC`].
        48 => xrcd: u32,
        /// Completion queue of what it receives, with [`SRQ_FLAG_XRC`].
        52 => cqn: u32,
    }

    /// Arms the limit of a shared receive queue.
    pub struct ModifySrq: 8 {
        /// Its number.
        0 => srqn: u32,
        /// Raise an event once when fewer entries are left; 0 disarms.
        4 => limit: u32,
    }

    /// Gives a shared receive queue another ring, of entries of the same size. Entries not yet
    /// taken are moved to it, and keep their free-running index.
    pub struct ResizeSrq: 40 {
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

    /// Reply of `QuerySrq`: what it is made of from `srqn` on is there with [`FEATURE_CONTEXTS`].
    pub struct SrqState: 64 {
        /// The armed limit.
        0 => limit: u32,
        /// Entries not consumed.
        4 => available: u32,
        /// Its number.
        8 => srqn: u32,
        /// Protection domain.
        12 => pd: u32,
        /// Doorbell page it is posted to from.
        16 => doorbell_page: u32,
        /// Queue pairs that use it.
        20 => users: u32,
        /// The producer index that the device knows of.
        24 => producer: u32,
        /// The first entry that was not taken.
        28 => next: u32,
        /// XRC domain, with [`SRQ_FLAG_XRC`].
        32 => xrcd: u32,
        /// Completion queue of what it receives, with [`SRQ_FLAG_XRC`].
        36 => cqn: u32,
        /// See `SRQ_FLAG_*`.
        40 => flags: u16,
        /// Base-2 logarithm of its entries.
        42 => log_entries: u8,
        /// Base-2 logarithm of the bytes of an entry.
        43 => log_stride: u8,
        /// 1 when it has failed.
        44 => failed: u8,
        /// Zero.
        45 => reserved0: [u8; 3],
        /// Zero.
        48 => reserved1: [u64; 2],
    }

    /// Reply of `QueryTag`.
    pub struct TagState: 64 {
        /// The tag, with its present instance.
        0 => tag: u32,
        /// Protection domain.
        4 => pd: u32,
        /// See `ACCESS_*`.
        8 => access: u32,
        /// What memory it is: [`REGION_DEVICE_MEMORY`], [`REGION_ON_DEMAND`], or neither.
        12 => flags: u32,
        /// Address of the first byte, as work requests and peers say it.
        16 => address: u64,
        /// Bytes; 0 while it is not valid.
        24 => length: u64,
        /// See [`super::TagKind`].
        32 => kind: u8,
        /// 1 when it is valid.
        33 => valid: u8,
        /// 1 when its registration by command has failed.
        34 => failed: u8,
        /// Zero.
        35 => reserved0: u8,
        /// What `AllocateTag` reserved: pages, or pieces; 0 for a window and a region by command.
        36 => max_pages: u32,
        /// Windows bound to the region.
        40 => windows: u32,
        /// Of a window that is bound: the region's tag; else zero.
        44 => region: u32,
        /// Of a type 2 window that is bound: its queue pair; else zero.
        48 => qpn: u32,
        /// Zero.
        52 => reserved1: u32,
        /// Zero.
        56 => reserved2: u64,
    }

    /// Whose counters are asked for.
    pub struct QueryCounters: 8 {
        /// The port, from 0.
        0 => port: u8,
        /// Zero.
        1 => reserved: [u8; 7],
    }

    /// Asks for the counters of queue pairs, added up.
    pub struct QueryQueuePairCounters: 224 {
        /// How many queue pairs there are, 1 to [`COUNTED_QUEUE_PAIRS`].
        0 => count: u32,
        /// Zero.
        4 => reserved: u32,
        /// Their numbers, followed by zeroes.
        8 => qpns: [u32; 54],
    }

    /// Tells what the port's link takes.
    pub struct SetPort: 8 {
        /// Base-2 logarithm of the port's active MTU: 8 to 12. The longest datagram.
        0 => log_mtu: u8,
        /// The port, from 0.
        1 => port: u8,
        /// Zero.
        2 => reserved: [u8; 6],
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
        /// Queue pairs: the first number of the function's own. Number 1 is not among them.
        0 => qp_first: u32,
        /// Queue pairs: how many numbers there are from there on.
        4 => qp_count: u32,
        /// Completion queues, likewise.
        8 => cq_first: u32,
        /// Completion queues, likewise.
        12 => cq_count: u32,
        /// Shared receive queues, likewise.
        16 => srq_first: u32,
        /// Shared receive queues, likewise.
        20 => srq_count: u32,
        /// Table entries: the first tag index, not 0.
        24 => tag_first: u32,
        /// Table entries: how many there are from there on.
        28 => tag_count: u32,
        /// Event queues, the two fixed ones included.
        32 => max_eq: u16,
        /// GID table entries of a port.
        34 => max_gid: u16,
        /// Most reads and atomics in flight of a queue pair, as requester.
        36 => max_ord: u8,
        /// Most reads and atomics that a queue pair serves at once, as responder.
        37 => max_ird: u8,
        /// Largest MTU, base-2 logarithm.
        38 => max_log_mtu: u8,
        /// Base-2 logarithm of the most blocks of a send queue.
        39 => sq_max_log_blocks: u8,
        /// Base-2 logarithm of the most entries of a receive queue.
        40 => rq_max_log_entries: u8,
        /// Base-2 logarithm of the most entries of a completion queue.
        41 => cq_max_log_entries: u8,
        /// Base-2 logarithm of the most entries of an event queue.
        42 => eq_max_log_entries: u8,
        /// Most scatter/gather entries of a work request.
        43 => max_sge: u8,
        /// Most bytes of inline data.
        44 => max_inline: u32,
        /// Longest message in bytes.
        48 => max_message: u64,
        /// Longest region in bytes.
        56 => max_region: u64,
        /// Page sizes a buffer may have: bit n for `1 << n` bytes.
        64 => page_sizes: u64,
        /// Operations and kinds it offers, `FEATURE_*`, as in `REG_FEATURES`.
        72 => features: u64,
        /// Globally unique identifier.
        80 => guid: u64,
        /// Ticks of the device's clock per millisecond; 0 for no clock.
        88 => clock_khz: u32,
        /// Bits of the clock that count; the others are zero.
        92 => clock_bits: u8,
        /// Bits of a DMA address that the device can put on the bus.
        93 => dma_bits: u8,
        /// Ports; they are numbered from 0.
        94 => ports: u8,
        /// Transports, bit n for number n of [`Transport`].
        95 => transports: u8,
        /// XRC domains: numbers from 1 to one less than this.
        96 => max_xrcd: u32,
        /// Queue pairs attached to one multicast group at most, and groups; 0 for no multicast.
        100 => max_multicast: u32,
        /// Most pages of a region that is registered through a send queue.
        104 => max_fast_register_pages: u32,
        /// The most milliseconds that a command takes whose memory answers.
        108 => command_timeout: u32,
        /// Counters that `QueryCounters` has.
        112 => counters: u32,
        /// Completion handlers: event queues from [`super::EQ_FIRST_HANDLER`] on with a message each.
        116 => handlers: u32,
        /// Counters that `QueryQueuePairCounters` has: bit n for the n-th of [`COUNTER_NAMES`].
        120 => qp_counters: u64,
        /// Channels: numbers from 0 to one less than this; 0 for no Ethernet.
        128 => max_channels: u16,
        /// Largest MTU of the interface.
        130 => max_mtu: u16,
        /// Base-2 logarithm of the most blocks of a transmit ring.
        132 => transmit_max_log_blocks: u8,
        /// Base-2 logarithm of the most entries of a receive ring.
        133 => receive_max_log_entries: u8,
        /// Most pieces of a transmit request.
        134 => max_transmit_pieces: u8,
        /// Base-2 logarithm of the entries of the redirection table.
        135 => redirection_log_entries: u8,
        /// Most bytes of a transmit request, before segmentation.
        136 => max_transmit_bytes: u32,
        /// Counters that `QueryChannelCounters` has.
        140 => channel_counters: u32,
        /// Multicast addresses of the interface's filter.
        144 => max_multicast_addresses: u32,
        /// Rules of flows: numbers from 0 to one less than this; 0 for no raw packets.
        148 => max_flows: u32,
        /// Receive tables: numbers from 0 to one less than this; 0 for none.
        152 => max_receive_tables: u16,
        /// Base-2 logarithm of the most entries of a receive table.
        154 => receive_table_log_entries: u8,
        /// Zero.
        155 => reserved0: u8,
        /// Zero.
        156 => reserved1: u32,
        /// Zero.
        160 => reserved: [u64; 12],
    }
}

numbers! {
    /// What carries a queue pair's messages.
    pub enum Transport: u8 {
        /// RoCEv2: the InfiniBand transport in UDP.
        RoceV2 = 1,
    }

    /// The service a queue pair gives; numbers as in the verbs.
    pub enum Service: u8 {
        /// Management datagrams; queue pair 1.
        Gsi = 1,
        /// Reliable connection.
        Rc = 2,
        /// Unreliable connection.
        Uc = 3,
        /// Unreliable datagrams.
        Ud = 4,
        /// Raw packets: whole Ethernet frames.
        Raw = 8,
        /// Extended reliable connection, sending side.
        XrcIni = 9,
        /// Extended reliable connection, receiving side.
        XrcTgt = 10,
    }

    /// States of a queue pair; numbers as in the verbs.
    pub enum QueuePairStateCode: u8 {
        /// Just made, or reset.
        Reset = 0,
        /// Receives may be posted.
        Init = 1,
        /// Ready to receive.
        Rtr = 2,
        /// Ready to send.
        Rts = 3,
        /// Send queue drained.
        Sqd = 4,
        /// Send queue in error (datagrams).
        Sqe = 5,
        /// In error; everything is flushed.
        Error = 6,
    }
}

/// `CreateQueuePair::flags`: work requests may use [`super::TAG_ALL_MEMORY`] and register memory.
pub const QP_FLAG_PRIVILEGED: u16 = 1 << 0;
/// `CreateQueuePair::flags`: receives come from the shared receive queue `srqn`.
pub const QP_FLAG_SRQ: u16 = 1 << 1;
/// `CreateQueuePair::flags`: registrations through the send queue are allowed.
pub const QP_FLAG_FAST_REGISTER: u16 = 1 << 2;
/// `CreateQueuePair::flags`: a failed registration drains the send queue instead of failing the
/// queue pair.
pub const QP_FLAG_FAST_REGISTER_DRAINS: u16 = 1 << 3;
/// `CreateQueuePair::flags`: the peer reaches memory through windows only.
pub const QP_FLAG_WINDOWS_ONLY: u16 = 1 << 4;
/// `CreateQueuePair::flags`: registrations of lists through the send queue are allowed.
pub const QP_FLAG_LISTS: u16 = 1 << 5;
/// `CreateQueuePair::flags`: a work queue of raw packets, without a send queue.
pub const QP_FLAG_RECEIVE_ONLY: u16 = 1 << 6;

/// `QueuePairState::send_cqn`, `QueuePairState::receive_cqn`: the queue pair has no such queue.
pub const QUEUE_NONE: u32 = 0xffff_ffff;

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

/// `CreateSrq::flags`: for extended reliable connections of the domain `xrcd`.
pub const SRQ_FLAG_XRC: u16 = 1 << 0;

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
/// `ModifyQueuePair::mask`: `address_vector`.
pub const MODIFY_ADDRESS_VECTOR: u32 = 1 << 5;
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
/// `ModifyQueuePair::mask`: `ord`.
pub const MODIFY_ORD: u32 = 1 << 11;
/// `ModifyQueuePair::mask`: `min_rnr_timer`.
pub const MODIFY_MIN_RNR_TIMER: u32 = 1 << 12;
/// `ModifyQueuePair::mask`: `send_psn`.
pub const MODIFY_SEND_PSN: u32 = 1 << 13;
/// `ModifyQueuePair::mask`: `ird`.
pub const MODIFY_IRD: u32 = 1 << 14;
/// `ModifyQueuePair::mask`: `destination_qpn`.
pub const MODIFY_DESTINATION: u32 = 1 << 15;

/// Feature: shared receive queues.
pub const FEATURE_SRQ: u64 = 1 << 0;
/// Feature: atomic operations.
pub const FEATURE_ATOMICS: u64 = 1 << 1;
/// Feature: memory windows.
pub const FEATURE_WINDOWS: u64 = 1 << 2;
/// Feature: registration and invalidation through the send queue.
pub const FEATURE_FAST_REGISTER: u64 = 1 << 3;
/// Feature: unreliable connections.
pub const FEATURE_UC: u64 = 1 << 4;
/// Feature: datagrams and queue pair 1.
pub const FEATURE_UD: u64 = 1 << 5;
/// Feature: `ResizeCompletionQueue`.
pub const FEATURE_RESIZE_CQ: u64 = 1 << 6;

/// Feature: extended reliable connections.
pub const FEATURE_XRC: u64 = 1 << 7;
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
/// Feature: `ResizeSrq`.
pub const FEATURE_RESIZE_SRQ: u64 = 1 << 13;
/// Feature: `SetPort`.
pub const FEATURE_PORT_MTU: u64 = 1 << 14;
/// Feature: tags can be used as soon as the command that makes them is covered by the
/// [`ControlRecord`]: what uses one waits until the command is finished.
pub const FEATURE_PENDING_TAGS: u64 = 1 << 15;
/// Feature: regions whose pages come and go, [`REGION_ON_DEMAND`].
pub const FEATURE_ON_DEMAND: u64 = 1 << 16;
/// Where events go and by which message can be told by the vector map ([`SetVectorMap`]), and
/// completion queues can be bound to it.
pub const FEATURE_VECTOR_MAP: u64 = 1 << 18;
/// Event queues can be given another ring while events come ([`SwitchEventQueue`]).
pub const FEATURE_SWITCH_EQ: u64 = 1 << 19;
/// Feature: event queues that are armed, but not for the answers to commands.
pub const FEATURE_QUIET_COMMANDS: u64 = 1 << 20;
/// Feature: received frames are spread over channels by a hash, [`SetRedirection`].
pub const FEATURE_REDIRECTION: u64 = 1 << 21;
/// Event queues have a choice of what an overflow does and a priority, and can be disarmed.
pub const FEATURE_EQ_CONTROL: u64 = 1 << 26;
/// Feature: [`super::SendOpcode::RegisterSend`].
pub const FEATURE_REGISTER_SEND: u64 = 1 << 27;
/// Feature: lists of pieces of regions, [`super::TagKind::List`].
pub const FEATURE_LISTS: u64 = 1 << 28;
/// Feature: the device uses tags in turns, which it shows in the [`ControlRecord`], and takes up the
/// commands that the record covers when a turn begins.
pub const FEATURE_TURNS: u64 = 1 << 29;
/// Feature: counters of queue pairs, `QueryQueuePairCounters`.
pub const FEATURE_QP_COUNTERS: u64 = 1 << 30;
/// Feature: what the device has of an object can be read: `QueryCompletionQueue`, `QueryTag`, and all of
/// [`QueuePairState`] and [`SrqState`].
pub const FEATURE_CONTEXTS: u64 = 1 << 31;
/// Feature: queue pairs whose peers reach memory through windows only, [`QP_FLAG_WINDOWS_ONLY`].
pub const FEATURE_WINDOWS_ONLY: u64 = 1 << 32;

/// Feature: an Ethernet interface, [`CreateChannel`].
pub const FEATURE_ETHERNET: u64 = 1 << 33;
/// Feature: raw packets and rules of flows, [`Service::Raw`] and [`CreateFlow`].
pub const FEATURE_RAW_PACKETS: u64 = 1 << 34;
/// Feature: raw packets are spread over work queues by a hash, [`CreateReceiveTable`].
pub const FEATURE_RECEIVE_TABLES: u64 = 1 << 35;

/// Features that need another: `(feature, needed)`.
const NEEDS: &[(u64, u64)] = &[
    (FEATURE_XRC, FEATURE_SRQ),
    (FEATURE_MULTICAST, FEATURE_UD),
    (FEATURE_RESIZE_SRQ, FEATURE_SRQ),
    (FEATURE_REGISTER_SEND, FEATURE_FAST_REGISTER),
    (FEATURE_TURNS, FEATURE_PENDING_TAGS),
    (FEATURE_WINDOWS_ONLY, FEATURE_WINDOWS),
    (FEATURE_REDIRECTION, FEATURE_ETHERNET),
    (FEATURE_RECEIVE_TABLES, FEATURE_RAW_PACKETS),
];

/// Those of `features` whose needs are met by others of them: a device offers no others, and a
/// driver asks for no others.
pub const fn complete_features(mut features: u64) -> u64 {
    loop {
        let mut left = features;
        let mut at = 0;
        while at < NEEDS.len() {
            let (feature, needed) = NEEDS[at];
            if features & needed != needed {
                left &= !feature;
            }
            at += 1;
        }
        if left == features {
            return features;
        }
        // Something may need what is gone now.
        features = left;
    }
}

/// Names of the counters that `QueryCounters` fills in, in order.
pub const COUNTER_NAMES: [&str; 19] = [
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
    "sq_registrations",
    "early_uses",
    "pending_waits",
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
        const _: () = assert!(core::mem::size_of::<$name>() <= COMMAND_PAYLOAD);
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
    CreateSrq,
    ModifySrq,
    ResizeSrq,
    QueryCounters,
    QueryQueuePairCounters,
    SetPort,
    ResolveFault,
    InvalidatePages,
    SetVectorMap,
    QueryVectorMap,
    SwitchEventQueue,
    CreateChannel,
    ModifyChannel,
    SetInterface,
    SetMulticastFilter,
    QueryChannelCounters,
    SetRedirection,
    SetRedirectionTable,
    CreateFlow,
    CreateReceiveTable,
}

impl CommandEntry {
    /// An entry that carries `payload`.
    pub fn new<P: super::Plain>(
        opcode: CommandOpcode,
        cookie: u32,
        (reply, reply_length): (u64, u32),
        payload: &P,
    ) -> Self {
        const { assert!(core::mem::size_of::<P>() <= COMMAND_PAYLOAD) }
        let mut entry = Self {
            opcode: opcode as u16,
            flags: 0,
            cookie,
            reply,
            reply_length,
            request_length: core::mem::size_of::<P>() as u32,
            request: 0,
            payload: [0; COMMAND_PAYLOAD],
        };
        entry.payload[..core::mem::size_of::<P>()].copy_from_slice(payload.as_bytes());
        entry
    }
}
