// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Work requests.
//!
//! A send queue is a ring of 64-byte blocks; a work request takes one to [`MAX_BLOCKS`] of them
//! and may wrap around the end of the ring. It is a [`SendHeader`], a part that depends on the
//! opcode ([`opcode_part`]), then either scatter/gather entries or, with
//! [`SEND_INLINE`], `inline_length` bytes of data.
//! A receive queue is a ring of entries of one stride: a [`ReceiveHeader`], then scatter/gather
//! entries.

/// Bytes of a send queue block.
pub const BLOCK_SIZE: usize = 64;
/// Most blocks of a work request.
pub const MAX_BLOCKS: usize = 6;
/// Most scatter/gather entries of a work request.
pub const MAX_SGE: usize = 16;
/// Most pieces of a list.
pub const MAX_PIECES: usize = MAX_SGE;
/// Most bytes of inline data.
pub const MAX_INLINE: usize = 256;
/// Most blocks of a send queue, base-2 logarithm.
pub const SQ_MAX_LOG_BLOCKS: u8 = 17;
/// Most entries of a receive queue, base-2 logarithm.
pub const RQ_MAX_LOG_ENTRIES: u8 = 15;
/// Smallest receive entry, base-2 logarithm: one scatter/gather entry.
pub const RQ_MIN_LOG_STRIDE: u8 = 5;
/// Largest receive entry, base-2 logarithm.
pub const RQ_MAX_LOG_STRIDE: u8 = 9;

numbers! {
    /// What a send queue work request does.
    pub enum SendOpcode: u8 {
        /// Send a message.
        Send = 1,
        /// Send a message with immediate data.
        SendImmediate = 2,
        /// Send a message and invalidate a tag of the peer.
        SendInvalidate = 3,
        /// Write to the peer's memory.
        Write = 4,
        /// Write to the peer's memory and complete a receive there with immediate data.
        WriteImmediate = 5,
        /// Read from the peer's memory.
        Read = 6,
        /// Compare and swap eight bytes of the peer's memory.
        CompareSwap = 7,
        /// Fetch and add eight bytes of the peer's memory.
        FetchAdd = 8,
        /// Invalidate a local tag.
        LocalInvalidate = 9,
        /// Register memory under a tag.
        FastRegister = 10,
        /// Bind or unbind a memory window.
        Bind = 11,
        /// Write eight aligned bytes of the peer's memory at once.
        AtomicWrite = 12,
        /// Have the peer's memory hold, for all to see, what was written to it before.
        Flush = 13,
        /// Register memory under a tag, then send a message.
        RegisterSend = 15,
        /// Register pieces of regions, one after another, under the tag of a list.
        RegisterList = 28,
        /// Register pieces of regions under the tag of a list, then send a message.
        RegisterListSend = 29,
    }
}

/// `SendHeader::flags`: write a completion on success too.
pub const SEND_SIGNALED: u16 = 1 << 0;
/// `SendHeader::flags`: ask for a solicited event at the peer.
pub const SEND_SOLICITED: u16 = 1 << 1;
/// `SendHeader::flags`: wait for all earlier reads and atomics.
pub const SEND_FENCE: u16 = 1 << 2;
/// `SendHeader::flags`: the data stand in the work request.
pub const SEND_INLINE: u16 = 1 << 3;

layout! {
    /// The start of a send queue work request.
    pub struct SendHeader: 16 {
        /// See [`SendOpcode`].
        0 => opcode: u8,
        /// Blocks of this work request.
        1 => blocks: u8,
        /// Scatter/gather entries; zero with inline data.
        2 => sge_count: u8,
        /// Zero.
        3 => reserved: u8,
        /// See `SEND_*`.
        4 => flags: u16,
        /// Bytes of inline data.
        6 => inline_length: u16,
        /// Zero: the channel of a send queue that is shared by several.
        8 => reserved_channel: u32,
        /// Extended reliable connections: shared receive queue at the peer, the lower 24 bits, the
        /// others are ignored; else zero.
        12 => srqn: u32,
    }

    /// The part for sends on connected queue pairs, and for local invalidations. Where a registration
    /// and a send are one work request it follows the part for the registration, and `tag` is zero
    /// where nothing is invalidated at the peer.
    pub struct SendPart: 16 {
        /// Immediate data in wire order: four bytes in the lower half; else zero.
        0 => immediate: u64,
        /// The tag to invalidate, here or at the peer; else zero.
        8 => tag: u32,
        /// Zero.
        12 => reserved: u32,
    }

    /// The part for reads and writes; that of an atomic write is followed by scatter/gather entries
    /// of eight bytes in all, or eight bytes inline.
    pub struct RemotePart: 32 {
        /// Address at the peer.
        0 => address: u64,
        /// Tag at the peer.
        8 => rkey: u32,
        /// Zero.
        12 => reserved0: u32,
        /// Immediate data in wire order: four bytes in the lower half; else zero.
        16 => immediate: u64,
        /// Zero.
        24 => reserved1: u64,
    }

    /// The part for atomic operations; scatter/gather entries of eight bytes in all follow.
    pub struct AtomicPart: 32 {
        /// Address at the peer.
        0 => address: u64,
        /// Tag at the peer.
        8 => rkey: u32,
        /// Zero.
        12 => reserved: u32,
        /// The value to add, or to store when the comparison holds.
        16 => operand: u64,
        /// The value to compare with, of [`SendOpcode::CompareSwap`]; else zero.
        24 => compare: u64,
    }

    /// The part for flushes; no scatter/gather entries follow.
    pub struct FlushPart: 32 {
        /// Address at the peer; zero and ignored with [`FLUSH_REGION`].
        0 => address: u64,
        /// Tag at the peer.
        8 => rkey: u32,
        /// Bytes; zero and ignored with [`FLUSH_REGION`].
        12 => length: u32,
        /// What is asked for: `FLUSH_GLOBAL`, `FLUSH_PERSISTENT` or both.
        16 => placement: u32,
        /// Of what: [`FLUSH_RANGE`] or [`FLUSH_REGION`].
        20 => selectivity: u32,
        /// Zero.
        24 => reserved: u64,
    }

    /// The part for datagrams.
    pub struct DatagramPart: 64 {
        /// Where to.
        0 => address_vector: AddressVector,
        /// Queue pair at the peer: the lower 24 bits, the others are ignored.
        40 => qpn: u32,
        /// Queue key.
        44 => qkey: u32,
        /// Immediate data in wire order: four bytes in the lower half; else zero.
        48 => immediate: u64,
        /// Zero.
        56 => reserved: u64,
    }

    /// The part for registrations; scatter/gather entries follow, after a [`SendPart`], with
    /// [`SendOpcode::RegisterSend`] alone.
    pub struct FastRegisterPart: 48 {
        /// The tag to make valid; its index was reserved with `AllocateTag`.
        0 => tag: u32,
        /// See `ACCESS_*`.
        4 => access: u32,
        /// Address of the first byte.
        8 => address: u64,
        /// Where the memory is.
        16 => buffer: super::Buffer,
        /// Zero.
        40 => reserved: u64,
    }

    /// The part for registrations of lists; scatter/gather entries follow, after a [`SendPart`] with
    /// [`SendOpcode::RegisterListSend`]. The first of them are the pieces.
    pub struct ListPart: 32 {
        /// The tag to make valid; its index was reserved with `AllocateTag`.
        0 => tag: u32,
        /// See `ACCESS_*`.
        4 => access: u32,
        /// Address of the first byte.
        8 => address: u64,
        /// How many of the entries are pieces, 1 to [`MAX_PIECES`]; with
        /// [`SendOpcode::RegisterList`] all of them.
        16 => pieces: u8,
        /// Zero.
        17 => reserved0: [u8; 7],
        /// Zero.
        24 => reserved1: u64,
    }

    /// The part for window binds; no scatter/gather entries follow. Zero length unbinds.
    pub struct BindPart: 48 {
        /// The window's tag, of any instance.
        0 => window: u32,
        /// The tag it has afterwards: same index.
        4 => new_window: u32,
        /// The region's tag.
        8 => region: u32,
        /// See `ACCESS_*`.
        12 => access: u32,
        /// First byte.
        16 => address: u64,
        /// Bytes.
        24 => length: u64,
        /// Zero.
        32 => reserved: [u64; 2],
    }

    /// A scatter/gather entry.
    pub struct Sge: 16 {
        /// First byte.
        0 => address: u64,
        /// Bytes.
        8 => length: u32,
        /// Local tag.
        12 => lkey: u32,
    }

    /// The start of a receive queue entry.
    pub struct ReceiveHeader: 16 {
        /// Scatter/gather entries.
        0 => sge_count: u32,
        /// Shared receive queues: what the completion's `index` is to be; else zero.
        4 => id: u32,
        /// Zero.
        8 => reserved: [u32; 2],
    }

    /// An address vector: the path to a peer, of an address handle or a connected queue pair.
    pub struct AddressVector: 40 {
        /// MAC address of the next hop.
        0 => mac: [u8; 6],
        /// VLAN tag control information, 0xffff for none.
        6 => vlan: u16,
        /// Destination GID.
        8 => gid: [u8; 16],
        /// Index of the source GID.
        24 => source_gid_index: u16,
        /// Hop limit.
        26 => hop_limit: u8,
        /// Traffic class.
        27 => traffic_class: u8,
        /// Flow label, 20 bits.
        28 => flow_label: u32,
        /// UDP source port, host order; zero lets the device choose by queue pair.
        32 => udp_source_port: u16,
        /// The port to leave by, from 0.
        34 => port: u8,
        /// Zero: the priority of a traffic class.
        35 => reserved_priority: u8,
        /// Zero.
        36 => reserved: u32,
    }
}

/// `FlushPart::placement`: everybody sees what was written.
pub const FLUSH_GLOBAL: u32 = 1 << 0;
/// `FlushPart::placement`: what was written outlives the machine's power.
pub const FLUSH_PERSISTENT: u32 = 1 << 1;
/// `FlushPart::selectivity`: a range of addresses.
pub const FLUSH_RANGE: u32 = 0;
/// `FlushPart::selectivity`: the whole region.
pub const FLUSH_REGION: u32 = 1;

/// `AddressVector::vlan` and `CompletionEntry::vlan`: untagged.
pub const VLAN_NONE: u16 = 0xffff;

/// Bytes of the opcode-dependent part of a work request.
pub const fn opcode_part(opcode: SendOpcode, datagram: bool) -> usize {
    match opcode {
        SendOpcode::Send | SendOpcode::SendImmediate | SendOpcode::SendInvalidate => {
            if datagram {
                core::mem::size_of::<DatagramPart>()
            } else {
                core::mem::size_of::<SendPart>()
            }
        }
        SendOpcode::Write
        | SendOpcode::WriteImmediate
        | SendOpcode::Read
        | SendOpcode::AtomicWrite => core::mem::size_of::<RemotePart>(),
        SendOpcode::Flush => core::mem::size_of::<FlushPart>(),
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => core::mem::size_of::<AtomicPart>(),
        SendOpcode::LocalInvalidate => core::mem::size_of::<SendPart>(),
        SendOpcode::FastRegister => core::mem::size_of::<FastRegisterPart>(),
        SendOpcode::Bind => core::mem::size_of::<BindPart>(),
        SendOpcode::RegisterSend => {
            core::mem::size_of::<FastRegisterPart>() + core::mem::size_of::<SendPart>()
        }
        SendOpcode::RegisterList => core::mem::size_of::<ListPart>(),
        SendOpcode::RegisterListSend => {
            core::mem::size_of::<ListPart>() + core::mem::size_of::<SendPart>()
        }
    }
}

/// Blocks of a work request with this many scatter/gather entries or inline bytes.
pub const fn blocks_for(opcode: SendOpcode, datagram: bool, payload_bytes: usize) -> usize {
    let bytes = core::mem::size_of::<SendHeader>() + opcode_part(opcode, datagram) + payload_bytes;
    bytes.div_ceil(BLOCK_SIZE)
}

/// Whether a list of scatter/gather entries of any length belongs to a work request of this kind.
/// The others have all they need in their part, or bring a few bytes along: those of an atomic
/// write are reckoned with as one entry.
pub const fn has_entries(opcode: SendOpcode) -> bool {
    match opcode {
        SendOpcode::Send
        | SendOpcode::SendImmediate
        | SendOpcode::SendInvalidate
        | SendOpcode::Write
        | SendOpcode::WriteImmediate
        | SendOpcode::Read
        | SendOpcode::CompareSwap
        | SendOpcode::FetchAdd
        | SendOpcode::RegisterSend
        | SendOpcode::RegisterList
        | SendOpcode::RegisterListSend => true,
        SendOpcode::LocalInvalidate
        | SendOpcode::FastRegister
        | SendOpcode::Bind
        | SendOpcode::AtomicWrite
        | SendOpcode::Flush => false,
    }
}

/// Whether a work request has both what a registration needs and a list of entries: only queue pairs
/// that asked for these have room for them, see [`blocks_per_registering_request`].
pub const fn is_long_registration(opcode: SendOpcode) -> bool {
    matches!(
        opcode,
        SendOpcode::RegisterSend | SendOpcode::RegisterList | SendOpcode::RegisterListSend
    )
}

/// Bytes of header and part before the entries of that work request with a list where they are most,
/// of those that every connected queue pair has room for.
pub const fn longest_before_entries(datagram: bool) -> usize {
    let opcode = if datagram {
        SendOpcode::Send
    } else {
        SendOpcode::FetchAdd
    };
    core::mem::size_of::<SendHeader>() + opcode_part(opcode, datagram)
}

/// Blocks that are enough for every work request, whatever it does, with up to `sges`
/// scatter/gather entries or `inline` bytes of data; but not for a registration with entries.
pub const fn blocks_per_request(datagram: bool, sges: usize, inline: usize) -> usize {
    let entries = longest_before_entries(datagram) + sges * core::mem::size_of::<Sge>();
    let entries = entries.div_ceil(BLOCK_SIZE);
    let with_data = if datagram {
        SendOpcode::Send
    } else {
        SendOpcode::Write
    };
    let inline = blocks_for(with_data, datagram, inline);
    if entries > inline {
        entries
    } else {
        inline
    }
}

/// The same of a connected queue pair on which registrations come with entries too
/// ([`is_long_registration`]): `sges` are the most entries of a work request, of which pieces of a
/// list are some.
pub const fn blocks_per_registering_request(sges: usize, inline: usize) -> usize {
    let entries = sges * core::mem::size_of::<Sge>();
    let payload = if entries > inline { entries } else { inline };
    // The longest part of all, whatever follows.
    blocks_for(SendOpcode::RegisterSend, false, payload)
}

const _: () = {
    // What `blocks_per_request` reckons with: no other part before a list is longer than that of an
    // atomic, none before inline data longer than that of a write, and what has no list fits in a
    // block.
    let mut number = 0;
    while number < u8::MAX {
        if let Some(opcode) = SendOpcode::from_number(number) {
            let part = core::mem::size_of::<SendHeader>() + opcode_part(opcode, false);
            if is_long_registration(opcode) {
                assert!(opcode_part(opcode, false) <= opcode_part(SendOpcode::RegisterSend, false));
            } else if has_entries(opcode) {
                assert!(part <= longest_before_entries(false));
            } else {
                assert!(part <= BLOCK_SIZE);
            }
        }
        number += 1;
    }
    assert!(
        opcode_part(SendOpcode::Write, false) >= opcode_part(SendOpcode::Send, false)
            && blocks_for(SendOpcode::Write, false, core::mem::size_of::<Sge>()) == 1
            && blocks_for(SendOpcode::AtomicWrite, false, 8) == 1
    );
    assert!(blocks_per_request(false, MAX_SGE, MAX_INLINE) <= MAX_BLOCKS);
    assert!(blocks_per_request(true, MAX_SGE, MAX_INLINE) == MAX_BLOCKS);
    assert!(longest_before_entries(false) <= opcode_part(SendOpcode::RegisterSend, false));
    assert!(blocks_per_registering_request(MAX_SGE, MAX_INLINE) == MAX_BLOCKS);
};

const _: () = {
    let sges = MAX_SGE * core::mem::size_of::<Sge>();
    assert!(blocks_for(SendOpcode::Send, true, sges) == MAX_BLOCKS);
    assert!(blocks_for(SendOpcode::Send, true, MAX_INLINE) == MAX_BLOCKS);
    assert!(blocks_for(SendOpcode::Write, false, sges) <= MAX_BLOCKS);
    assert!(
        core::mem::size_of::<ReceiveHeader>() + sges <= 1 << RQ_MAX_LOG_STRIDE
            && core::mem::size_of::<ReceiveHeader>() + core::mem::size_of::<Sge>()
                == 1 << RQ_MIN_LOG_STRIDE
    );
};
