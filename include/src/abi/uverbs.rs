// SPDX-License-Identifier: GPL-2.0 OR MIT

//! What the provider and the kernel driver say to each other through uverbs.
//!
//! `include/uapi/rdma/ferrite-abi.h` is generated from this file.

/// Version of the private part of the uverbs commands (`uverbs_abi_ver`).
///
/// A provider writes work requests and doorbells and reads completions by itself: any change of
/// `work.rs`, `completion.rs` or `doorbell.rs` that one of the other version would misread raises
/// this too.
pub const UVERBS_ABI_VERSION: u32 = 2;

/// First number of what a driver adds to the kernel's `ioctl` interface.
const FIRST_OF_DRIVER: u32 = 1 << 12;

/// Attribute of querying a context: a [`UverbsContextResponse`] as its maker got it.
pub const UVERBS_CONTEXT_QUERY_RESPONSE: u32 = FIRST_OF_DRIVER;
/// Attribute of querying a context: the time of the device's clock, 64 bits.
pub const UVERBS_CONTEXT_QUERY_CLOCK: u32 = FIRST_OF_DRIVER + 1;
/// Attribute of querying a context: the same, but `EAGAIN` where the device cannot be asked at once.
pub const UVERBS_CONTEXT_QUERY_CLOCK_NOW: u32 = FIRST_OF_DRIVER + 2;
/// Method of a protection domain: succeeds where there is one.
pub const UVERBS_PD_QUERY: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the handle.
pub const UVERBS_PD_QUERY_HANDLE: u32 = FIRST_OF_DRIVER;
/// Attribute of allocating device memory: the offset for `mmap`, 64 bits.
pub const UVERBS_DM_ALLOC_OFFSET: u32 = FIRST_OF_DRIVER;
/// Method of device memory: what its maker was told.
pub const UVERBS_DM_QUERY: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the handle.
pub const UVERBS_DM_QUERY_HANDLE: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the offset for `mmap`, 64 bits.
pub const UVERBS_DM_QUERY_OFFSET: u32 = FIRST_OF_DRIVER + 1;
/// Attribute of it: the bytes that were asked for, 64 bits.
pub const UVERBS_DM_QUERY_LENGTH: u32 = FIRST_OF_DRIVER + 2;
/// Method of a completion queue: moves it to another handler, or to none.
pub const UVERBS_CQ_MOVE: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the handle.
pub const UVERBS_CQ_MOVE_HANDLE: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the completion vector of the handler, [`UVERBS_CQ_VECTOR_LOCAL`] or
/// [`UVERBS_CQ_VECTOR_NONE`], 32 bits.
pub const UVERBS_CQ_MOVE_VECTOR: u32 = FIRST_OF_DRIVER + 1;
/// Method of a completion queue: at which handler it is.
pub const UVERBS_CQ_QUERY: u32 = FIRST_OF_DRIVER + 1;
/// Attribute of it: the handle.
pub const UVERBS_CQ_QUERY_HANDLE: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the completion vector of its handler or [`UVERBS_CQ_VECTOR_NONE`], 32 bits.
pub const UVERBS_CQ_QUERY_VECTOR: u32 = FIRST_OF_DRIVER + 1;
/// Method of a device: sets the priority of a handler.
pub const UVERBS_VECTOR_MODIFY: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the completion vector of the handler, 32 bits.
pub const UVERBS_VECTOR_MODIFY_VECTOR: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the number of an `EventPriority`, 32 bits.
pub const UVERBS_VECTOR_MODIFY_PRIORITY: u32 = FIRST_OF_DRIVER + 1;
/// Method of a device: which priority a handler has.
pub const UVERBS_VECTOR_QUERY: u32 = FIRST_OF_DRIVER + 1;
/// Attribute of it: the completion vector of the handler, 32 bits.
pub const UVERBS_VECTOR_QUERY_VECTOR: u32 = FIRST_OF_DRIVER;
/// Attribute of it: the number of an `EventPriority`, 32 bits.
pub const UVERBS_VECTOR_QUERY_PRIORITY: u32 = FIRST_OF_DRIVER + 1;
/// In place of a completion vector: that of the handler whose interrupt arrives at the processor that
/// the caller runs on.
pub const UVERBS_CQ_VECTOR_LOCAL: u32 = u32::MAX - 1;
/// In place of a completion vector: no handler, the completion queue is polled only.
pub const UVERBS_CQ_VECTOR_NONE: u32 = u32::MAX;

/// `UverbsQpRequest::flags`: lists are registered through the send queue ([`super::QP_FLAG_LISTS`]).
pub const UVERBS_QP_LISTS: u8 = 1 << 0;
/// `UverbsQpRequest::flags`: a failed registration drains the send queue
/// ([`super::QP_FLAG_FAST_REGISTER_DRAINS`]).
pub const UVERBS_QP_REGISTER_DRAINS: u8 = 1 << 1;
/// `UverbsQpRequest::flags`: the peer reaches memory through windows only ([`super::QP_FLAG_WINDOWS_ONLY`]).
pub const UVERBS_QP_WINDOWS_ONLY: u8 = 1 << 2;
/// `UverbsMrRequest::kind`: a key for lists ([`super::TagKind::List`]).
pub const UVERBS_MR_LIST: u32 = 1;
/// `UverbsMrRequest::kind`: one more region of the pinned memory of another region, with rights and in
/// a protection domain of its own. Both have one translation.
pub const UVERBS_MR_SHARED: u32 = 2;

layout! {
    /// Private request of allocating a user context.
    pub struct UverbsContextRequest: 8 {
        /// [`UVERBS_ABI_VERSION`] of the provider.
        0 => abi_version: u32,
        /// Zero.
        4 => reserved: u32,
    }

    /// Private response of allocating a user context.
    pub struct UverbsContextResponse: 64 {
        /// Offset for `mmap` of the context's doorbell page.
        0 => doorbell_offset: u64,
        /// Bytes of the doorbell page.
        8 => doorbell_size: u32,
        /// Most scatter/gather entries.
        12 => max_sge: u32,
        /// Most inline bytes.
        16 => max_inline: u32,
        /// Base-2 logarithm of the most send queue blocks.
        20 => sq_max_log_blocks: u8,
        /// Base-2 logarithm of the most receive queue entries.
        21 => rq_max_log_entries: u8,
        /// Base-2 logarithm of the most completion queue entries.
        22 => cq_max_log_entries: u8,
        /// Bits of the clock that completions are stamped with, 32 to 64; 0 for none.
        23 => clock_bits: u8,
        /// Device features, `FEATURE_*`.
        24 => features: u64,
        /// Kilohertz of the clock that completions are stamped with; 0 for none.
        32 => clock_khz: u32,
        /// The longest message, in bytes.
        36 => max_message: u32,
        /// Zero.
        40 => reserved: [u64; 3],
    }

    /// Private response of allocating a protection domain.
    pub struct UverbsPdResponse: 8 {
        /// Its number.
        0 => pdn: u32,
        /// Zero.
        4 => reserved: u32,
    }

    /// Private request of creating (or resizing) a completion queue.
    pub struct UverbsCqRequest: 24 {
        /// User address of the zeroed ring followed by the record.
        0 => buffer: u64,
        /// Bytes of it.
        8 => length: u64,
        /// Offset of the record.
        16 => record_offset: u32,
        /// Base-2 logarithm of the entries.
        20 => log_entries: u32,
    }

    /// Private response of creating a completion queue.
    pub struct UverbsCqResponse: 8 {
        /// Its number.
        0 => cqn: u32,
        /// Entries, as asked for.
        4 => entries: u32,
    }

    /// Private request of creating a queue pair.
    pub struct UverbsQpRequest: 40 {
        /// User address of rings and record.
        0 => buffer: u64,
        /// Bytes of it.
        8 => length: u64,
        /// Offset of the send queue.
        16 => sq_offset: u32,
        /// Offset of the receive queue.
        20 => rq_offset: u32,
        /// Offset of the record.
        24 => record_offset: u32,
        /// Base-2 logarithm of the send queue's blocks.
        28 => sq_log_blocks: u8,
        /// Base-2 logarithm of the receive queue's entries.
        29 => rq_log_entries: u8,
        /// Base-2 logarithm of the bytes of a receive queue entry.
        30 => rq_log_stride: u8,
        /// See `UVERBS_QP_*`: what the queue pair is to be able to do beyond the verbs.
        31 => flags: u8,
        /// Zero.
        32 => reserved: u64,
    }

    /// Private request of creating a queue pair that receives by a receive table: how it hashes.
    pub struct UverbsHashRequest: 48 {
        /// See `HASH_*`.
        0 => types: u32,
        /// Zero.
        4 => reserved: u32,
        /// The key.
        8 => key: [u8; 40],
    }

    /// Private request of creating a work queue.
    pub struct UverbsWqRequest: 32 {
        /// User address of ring and record.
        0 => buffer: u64,
        /// Bytes of it.
        8 => length: u64,
        /// Offset of the ring.
        16 => rq_offset: u32,
        /// Offset of the record.
        20 => record_offset: u32,
        /// Base-2 logarithm of the entries.
        24 => rq_log_entries: u8,
        /// Base-2 logarithm of the bytes of an entry.
        25 => rq_log_stride: u8,
        /// Zero.
        26 => reserved: [u16; 3],
    }

    /// Private response of creating a queue pair.
    pub struct UverbsQpResponse: 8 {
        /// Its number.
        0 => qpn: u32,
        /// Zero.
        4 => reserved: u32,
    }

    /// Private request of registering memory: what is to be made in place of a region. Without one, a
    /// region.
    pub struct UverbsMrRequest: 16 {
        /// See `UVERBS_MR_*`; 0 for a region of the process's memory.
        0 => kind: u32,
        /// [`UVERBS_MR_LIST`]: most pieces the list will have, 1 to [`super::MAX_PIECES`]. Else zero.
        4 => max_pieces: u32,
        /// [`UVERBS_MR_SHARED`]: key of the other region, which is of the same user context. Address and
        /// length of the request are those that it has. Else zero.
        8 => key: u32,
        /// Zero.
        12 => reserved: u32,
    }

    /// Private request of creating a shared receive queue.
    pub struct UverbsSrqRequest: 32 {
        /// User address of ring and record.
        0 => buffer: u64,
        /// Bytes of it.
        8 => length: u64,
        /// Offset of the ring.
        16 => ring_offset: u32,
        /// Offset of the record.
        20 => record_offset: u32,
        /// Base-2 logarithm of the entries.
        24 => log_entries: u8,
        /// Base-2 logarithm of the bytes of an entry.
        25 => log_stride: u8,
        /// Zero.
        26 => reserved: [u16; 3],
    }

    /// Private response of creating a shared receive queue.
    pub struct UverbsSrqResponse: 8 {
        /// Its number.
        0 => srqn: u32,
        /// Zero.
        4 => reserved: u32,
    }
}
