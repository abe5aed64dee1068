// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Completion queue entries.

/// Most entries of a completion queue, base-2 logarithm.
pub const CQ_MAX_LOG_ENTRIES: u8 = 20;

numbers! {
    /// How a work request ended; numbers as in the verbs.
    pub enum CompletionStatus: u8 {
        /// Well.
        Success = 0,
        /// A message longer than the receive buffers, or than the largest allowed.
        LocalLength = 1,
        /// Something inconsistent in the work request or queue pair.
        LocalQueuePairOperation = 2,
        /// A local key, address or right is wrong.
        LocalProtection = 4,
        /// Not executed: the queue pair went to the error state.
        Flushed = 5,
        /// A memory window could not be bound.
        WindowBind = 6,
        /// The responder answered with something that makes no sense.
        BadResponse = 7,
        /// A protection error on a local buffer while the peer's data arrived.
        LocalAccess = 8,
        /// The responder found the request invalid.
        RemoteInvalidRequest = 9,
        /// The responder refused the key, address or right.
        RemoteAccess = 10,
        /// The responder could not complete the request.
        RemoteOperation = 11,
        /// The peer did not answer, however often asked.
        RetryExceeded = 12,
        /// The peer had no receive buffer, however often asked.
        RnrRetryExceeded = 13,
        /// The device failed.
        Fatal = 19,
        /// Any other error.
        General = 21,
    }

    /// What the completed work request was.
    pub enum CompletionOpcode: u8 {
        /// A send, with or without immediate data or invalidation.
        Send = 0,
        /// An RDMA write, with or without immediate data.
        Write = 1,
        /// An RDMA read.
        Read = 2,
        /// Compare and swap.
        CompareSwap = 3,
        /// Fetch and add.
        FetchAdd = 4,
        /// A window bind.
        Bind = 5,
        /// A local invalidation.
        LocalInvalidate = 6,
        /// A registration through the send queue.
        FastRegister = 7,
        /// A flush.
        Flush = 8,
        /// An atomic write.
        AtomicWrite = 9,
        /// A receive that took a send.
        Receive = 128,
        /// A receive that took the immediate data of an RDMA write.
        ReceiveWrite = 129,
    }
}

/// `CompletionEntry::flags`: of a receive queue, not of a send queue.
pub const COMPLETION_RECEIVE: u16 = 1 << 0;
/// `CompletionEntry::flags`: `immediate` holds immediate data, as it was on the wire.
pub const COMPLETION_IMMEDIATE: u16 = 1 << 1;
/// `CompletionEntry::flags`: `tag` holds the tag the peer invalidated.
pub const COMPLETION_INVALIDATED: u16 = 1 << 2;
/// `CompletionEntry::flags`: the peer asked for a solicited event.
pub const COMPLETION_SOLICITED: u16 = 1 << 3;
/// `CompletionEntry::flags`: the first 40 bytes of the buffer are a global routing header.
pub const COMPLETION_GRH: u16 = 1 << 4;
/// `CompletionEntry::flags`: the entry came through a shared receive queue.
pub const COMPLETION_SRQ: u16 = 1 << 5;
/// `CompletionEntry::flags`: the network header was IPv6 (else IPv4); for datagrams.
pub const COMPLETION_IPV6: u16 = 1 << 6;
/// `CompletionEntry::flags`: the TCP or UDP checksum, and that of the IPv4 header, are right; for raw
/// packets.
pub const COMPLETION_CHECKSUM: u16 = 1 << 9;

/// `CompletionEntry::phase`: bit 0; see [`phase_of`].
pub const COMPLETION_PHASE: u8 = 1;

/// The phase of the entry with free-running index `index` in a queue of `1 << log_entries`.
///
/// The queue starts zeroed, so that the first round has phase 1.
pub const fn phase_of(index: u32, log_entries: u8) -> u8 {
    (!(index >> log_entries) & 1) as u8
}

/// The index of the first entry that is yet to be written, in a queue of `1 << log_entries` whose
/// host has consumed `consumer` entries; `is_written` looks at the phase of one.
///
/// Entries are written in order, so that few need to be looked at: one where nothing is there.
pub fn first_unwritten(consumer: u32, log_entries: u8, is_written: impl Fn(u32) -> bool) -> u32 {
    // All entries before `written` are written; the one at `unwritten` is not, or not in the ring.
    let (mut written, mut unwritten) = (0, 1u32 << log_entries);
    while written < unwritten {
        // Ever further at first, then in the middle.
        let probe = (2 * written).min(written + (unwritten - written) / 2);
        if is_written(consumer.wrapping_add(probe)) {
            written = probe + 1;
        } else {
            unwritten = probe;
        }
    }
    consumer.wrapping_add(written)
}

layout! {
    /// An entry of a completion queue. The device writes the last eight bytes last, together.
    pub struct CompletionEntry: 64 {
        /// Queue pair number.
        0 => qpn: u32,
        /// Send queue: free-running index of the first block of the work request.
        /// Receive queues: free-running index of the entry; shared ones: the entry's `id`.
        4 => index: u32,
        /// Bytes received or read.
        8 => byte_count: u32,
        /// With [`COMPLETION_INVALIDATED`]: the tag that the peer invalidated.
        12 => tag: u32,
        /// With [`COMPLETION_IMMEDIATE`]: immediate data, as they were on the wire; four bytes stand
        /// in the lower half, the upper one is zero.
        16 => immediate: u64,
        /// Time of the device's clock at completion.
        24 => timestamp: u64,
        /// Datagrams: the sender's queue pair number.
        32 => source_qpn: u32,
        /// Datagrams: the sender's MAC address.
        36 => source_mac: [u8; 6],
        /// Datagrams: the VLAN tag control information, 0xffff for none.
        42 => vlan: u16,
        /// With [`COMPLETION_SRQ`]: number of the shared receive queue.
        44 => srqn: u32,
        /// Zero: the channel of a send queue that is shared by several.
        48 => reserved_channel: u32,
        /// Partition key index.
        52 => pkey_index: u16,
        /// See `COMPLETION_*`.
        54 => flags: u16,
        /// What the device knows of an error beyond its status; see the chapter on errors.
        56 => vendor_syndrome: u32,
        /// See [`CompletionStatus`].
        60 => status: u8,
        /// See [`CompletionOpcode`].
        61 => opcode: u8,
        /// The port it came in by, from 0.
        62 => port: u8,
        /// See [`phase_of`].
        63 => phase: u8,
    }
}

/// Offset of the eight bytes that make an entry valid.
pub const COMPLETION_VALID_OFFSET: usize = 56;
