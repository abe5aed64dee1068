// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The Ethernet part of a function: channels, the interface, redirection.
//!
//! A channel is a transmit ring, a receive ring, a ring of received entries and a record, in one
//! buffer of host memory. Its events are those of channels in [`super::EventCode`].

use super::Buffer;

/// Most channels of a function.
pub const MAX_CHANNELS: u16 = 512;
/// No channel: of a redirection entry that is not there, and in `QueryChannelCounters` for the whole
/// interface.
pub const CHANNEL_NONE: u16 = 0xffff;
/// Bytes of a block of a transmit ring.
pub const TRANSMIT_BLOCK_SIZE: usize = 64;
/// Most blocks of a transmit ring, base-2 logarithm.
pub const TRANSMIT_MAX_LOG_BLOCKS: u8 = 15;
/// Most pieces of a transmit request that any device takes.
pub const TRANSMIT_MAX_PIECES: usize = 18;
/// Fewest bytes of TCP data in a segment.
pub const TRANSMIT_MIN_SEGMENT: u16 = 48;
/// Most entries of a receive ring, base-2 logarithm.
pub const RECEIVE_MAX_LOG_ENTRIES: u8 = 15;
/// Shortest receive buffer, in bytes.
pub const RECEIVE_MIN_BUFFER: u32 = 256;
/// Longest receive buffer, in bytes.
pub const RECEIVE_MAX_BUFFER: u32 = 0x1_0000;
/// Smallest MTU of an interface: that of IPv4.
pub const INTERFACE_MIN_MTU: u16 = 68;
/// Multicast addresses that `SetMulticastFilter` has room for.
pub const MULTICAST_ADDRESSES: usize = 32;
/// Bytes of the secret key of redirection.
pub const REDIRECTION_KEY_SIZE: usize = 40;
/// Entries of the redirection table that one command sets at most.
pub const REDIRECTION_ENTRIES: usize = 27;

/// `TransmitHeader::flags`: finish the checksum from `checksum_start` on.
pub const TRANSMIT_CHECKSUM: u16 = 1 << 0;
/// `TransmitHeader::flags`: cut the TCP data into segments of `segment_size` bytes.
pub const TRANSMIT_SEGMENT: u16 = 1 << 1;
/// `TransmitHeader::flags`: insert an 802.1Q tag with `vlan`.
pub const TRANSMIT_VLAN: u16 = 1 << 2;

/// `ReceivedEntry::flags`: an 802.1Q tag was taken out; it is in `vlan`.
pub const RECEIVED_VLAN: u16 = 1 << 0;
/// `ReceivedEntry::flags`: the TCP or UDP checksum, and that of the IPv4 header, are right.
pub const RECEIVED_CHECKSUM: u16 = 1 << 1;

/// `SetInterface::flags`: frames are received.
pub const INTERFACE_UP: u16 = 1 << 0;
/// `SetInterface::flags`: all frames, whatever their destination.
pub const INTERFACE_PROMISCUOUS: u16 = 1 << 1;
/// `SetInterface::flags`: those to any group.
pub const INTERFACE_ALL_MULTICAST: u16 = 1 << 2;
/// `SetInterface::flags`: those to everybody.
pub const INTERFACE_BROADCAST: u16 = 1 << 3;
/// `SetInterface::flags`: 802.1Q tags are taken out of received frames.
pub const INTERFACE_STRIP_VLAN: u16 = 1 << 4;

/// `SetRedirection::types`: IPv4 addresses.
pub const HASH_IPV4: u16 = 1 << 0;
/// `SetRedirection::types`: IPv4 addresses and TCP ports.
pub const HASH_TCP_IPV4: u16 = 1 << 1;
/// `SetRedirection::types`: IPv6 addresses.
pub const HASH_IPV6: u16 = 1 << 2;
/// `SetRedirection::types`: IPv6 addresses and TCP ports.
pub const HASH_TCP_IPV6: u16 = 1 << 3;
/// `SetRedirection::types`: IPv4 addresses and UDP ports.
pub const HASH_UDP_IPV4: u16 = 1 << 4;
/// `SetRedirection::types`: IPv6 addresses and UDP ports.
pub const HASH_UDP_IPV6: u16 = 1 << 5;
/// `SetRedirection::types`: all of these, which are the bits up to the last.
pub const ALL_HASHES: u16 = (HASH_UDP_IPV6 << 1) - 1;

/// `param1` of `ChannelBadBuffers`: it is about the transmit ring; else about the receive ring.
pub const BAD_BUFFERS_TRANSMIT: u64 = 1 << 0;
/// `param1` of `ChannelBadBuffers`: nothing more is taken from that ring.
pub const BAD_BUFFERS_STOPPED: u64 = 1 << 1;

numbers! {
    /// What became of receive descriptors.
    pub enum ReceivedStatus: u8 {
        /// A frame is in them.
        Good = 0,
        /// They cannot be used; the frame that was to be put there is lost.
        BadBuffer = 1,
    }
}

/// Blocks that a transmit request of so many pieces has.
pub const fn transmit_blocks(pieces: u8) -> u32 {
    const PER_BLOCK: u32 = (TRANSMIT_BLOCK_SIZE / core::mem::size_of::<TransmitPiece>()) as u32;
    // The header is as long as a piece.
    (1 + pieces as u32).div_ceil(PER_BLOCK)
}

/// Whether the entry of index `arm` is among those from `old` up to `new`, which come after each
/// other: then an event is due.
pub const fn is_due(arm: u32, old: u32, new: u32) -> bool {
    arm.wrapping_sub(old) < new.wrapping_sub(old)
}

layout! {
    /// Begins a transmit request; as many [`TransmitPiece`]s follow as it says.
    pub struct TransmitHeader: 16 {
        /// Pieces of the frame, at least 1.
        0 => pieces: u8,
        /// Zero.
        1 => reserved0: u8,
        /// See `TRANSMIT_*`.
        2 => flags: u16,
        /// With [`TRANSMIT_VLAN`]: tag control information.
        4 => vlan: u16,
        /// With [`TRANSMIT_SEGMENT`]: bytes of TCP data in a segment.
        6 => segment_size: u16,
        /// With [`TRANSMIT_CHECKSUM`]: where the sum begins, from the start of the frame as it is in the
        /// pieces; with [`TRANSMIT_SEGMENT`] that is the TCP header.
        8 => checksum_start: u16,
        /// With [`TRANSMIT_CHECKSUM`]: where it is stored, from there on.
        10 => checksum_offset: u16,
        /// Zero.
        12 => reserved1: u32,
    }

    /// A piece of a frame to be sent.
    pub struct TransmitPiece: 16 {
        /// DMA address.
        0 => address: u64,
        /// Bytes, at least 1.
        8 => length: u32,
        /// Zero.
        12 => reserved: u32,
    }

    /// A buffer for received frames.
    pub struct ReceiveDescriptor: 16 {
        /// DMA address.
        0 => address: u64,
        /// Bytes, [`RECEIVE_MIN_BUFFER`] to [`RECEIVE_MAX_BUFFER`].
        8 => length: u32,
        /// Zero.
        12 => reserved: u32,
    }

    /// What was received. The device writes the last eight bytes last, together.
    pub struct ReceivedEntry: 32 {
        /// Free-running index of the first descriptor that it took.
        0 => index: u32,
        /// Bytes of the frame.
        4 => length: u32,
        /// The hash, where there is one.
        8 => hash: u32,
        /// With [`RECEIVED_VLAN`]: tag control information.
        12 => vlan: u16,
        /// See `RECEIVED_*`.
        14 => flags: u16,
        /// Time of the device's clock.
        16 => timestamp: u64,
        /// What the hash is of, one of `HASH_*`, 0 for none.
        24 => hash_type: u8,
        /// Descriptors that it took.
        25 => buffers: u8,
        /// Zero.
        26 => reserved: [u8; 4],
        /// See [`ReceivedStatus`].
        30 => status: u8,
        /// Bit 0: as of completions, [`super::phase_of`].
        31 => phase: u8,
    }

    /// The record of a channel: the first half is the host's, the second the device's.
    pub struct ChannelRecord: 128 {
        /// Blocks posted, free-running.
        0 => transmit_producer: u32,
        /// Receive descriptors posted, free-running.
        4 => receive_producer: u32,
        /// Index of the block whose end is told of by an event.
        8 => transmit_arm: u32,
        /// Index of the received entry that is told of by an event.
        12 => receive_arm: u32,
        /// Zero.
        16 => reserved0: [u32; 12],
        /// Not zero: ring the doorbell after a request was posted.
        64 => transmit_wake: u32,
        /// Blocks that are done, free-running.
        68 => transmit_consumer: u32,
        /// Zero.
        72 => reserved1: [u32; 14],
    }

    /// Makes a channel.
    pub struct CreateChannel: 64 {
        /// Its number.
        0 => channel: u16,
        /// Event queue of its handler, [`super::EQ_NONE`] or [`super::EQ_MAPPED`].
        2 => eqn: u16,
        /// With [`super::EQ_MAPPED`]: the processor of its handler; else zero.
        4 => processor: u16,
        /// Fewer receive buffers than this are told of; 0 for none.
        6 => pool_threshold: u16,
        /// Base-2 logarithm of the transmit ring's blocks.
        8 => transmit_log_blocks: u8,
        /// Base-2 logarithm of the receive ring's entries, and of the received entries.
        9 => receive_log_entries: u8,
        /// The port, from 0.
        10 => port: u8,
        /// Zero.
        11 => reserved0: u8,
        /// Doorbell page it is posted to from.
        12 => doorbell_page: u32,
        /// All rings and the [`ChannelRecord`]; received entries and record zeroed.
        16 => buffer: Buffer,
        /// Offset of the transmit ring in `buffer`, 64-byte aligned.
        40 => transmit_offset: u32,
        /// Offset of the receive ring in `buffer`, 64-byte aligned.
        44 => receive_offset: u32,
        /// Offset of the received entries in `buffer`, 64-byte aligned.
        48 => received_offset: u32,
        /// Offset of the record in `buffer`, 64-byte aligned.
        52 => record_offset: u32,
        /// Zero.
        56 => reserved1: u64,
    }

    /// Gives a channel another handler or threshold.
    pub struct ModifyChannel: 16 {
        /// Its number.
        0 => channel: u16,
        /// As in [`CreateChannel`].
        2 => eqn: u16,
        /// As in [`CreateChannel`].
        4 => processor: u16,
        /// As in [`CreateChannel`].
        6 => pool_threshold: u16,
        /// Zero.
        8 => reserved: u64,
    }

    /// Sets what the interface of a port receives.
    pub struct SetInterface: 32 {
        /// The port, from 0.
        0 => port: u8,
        /// Zero.
        1 => reserved0: u8,
        /// See `INTERFACE_*`.
        2 => flags: u16,
        /// Most bytes of a frame behind its Ethernet header and tag.
        4 => mtu: u16,
        /// Its address.
        6 => mac: [u8; 6],
        /// The channel of frames that redirection says nothing of, or [`CHANNEL_NONE`].
        12 => default_channel: u16,
        /// Zero.
        14 => reserved1: u16,
        /// Zero.
        16 => reserved2: [u64; 2],
    }

    /// Sets the groups whose frames the interface of a port receives.
    pub struct SetMulticastFilter: 200 {
        /// The port, from 0.
        0 => port: u8,
        /// Zero.
        1 => reserved0: u8,
        /// How many addresses there are.
        2 => count: u16,
        /// Zero.
        4 => reserved1: u32,
        /// The addresses, followed by zeroes.
        8 => addresses: [[u8; 6]; 32],
    }

    /// Asks for the counters of a channel or of the interface.
    pub struct QueryChannelCounters: 8 {
        /// The channel, or [`CHANNEL_NONE`] for the interface.
        0 => channel: u16,
        /// The port, from 0.
        2 => port: u8,
        /// Zero.
        3 => reserved: [u8; 5],
    }

    /// Sets what the hash of redirection is made of, and how much of it counts.
    pub struct SetRedirection: 64 {
        /// The port, from 0.
        0 => port: u8,
        /// Zero.
        1 => reserved0: u8,
        /// See `HASH_*`; 0 for no redirection.
        2 => types: u16,
        /// The bits of the hash that are the index of the table: one less than a power of two.
        4 => mask: u16,
        /// Zero.
        6 => reserved1: u16,
        /// The secret key.
        8 => key: [u8; 40],
        /// Zero.
        48 => reserved2: [u64; 2],
    }

    /// An entry of the redirection table.
    pub struct RedirectionEntry: 8 {
        /// The channel, or [`CHANNEL_NONE`] for an entry that is not there.
        0 => channel: u16,
        /// Event queue of its packets: a number, [`super::EQ_NONE`] for that of the channel, or
        /// [`super::EQ_MAPPED`].
        2 => eqn: u16,
        /// With [`super::EQ_MAPPED`]: the processor; else zero.
        4 => processor: u16,
        /// Zero.
        6 => reserved: u16,
    }

    /// Sets entries of the redirection table.
    pub struct SetRedirectionTable: 224 {
        /// The port, from 0.
        0 => port: u8,
        /// Zero.
        1 => reserved0: u8,
        /// The first entry.
        2 => first: u16,
        /// How many there are, 1 to [`REDIRECTION_ENTRIES`].
        4 => count: u16,
        /// Zero.
        6 => reserved1: u16,
        /// The entries, followed by zeroes.
        8 => entries: [RedirectionEntry; 27],
    }
}

/// Offset of the eight bytes that make a received entry valid.
pub const RECEIVED_VALID_OFFSET: usize = 24;

/// Names of the counters that `QueryChannelCounters` fills in, in order.
pub const CHANNEL_COUNTER_NAMES: [&str; 12] = [
    "tx_requests",
    "tx_frames",
    "tx_bytes",
    "tx_errors",
    "rx_frames",
    "rx_bytes",
    "rx_multicast",
    "rx_no_buffer",
    "rx_bad_buffers",
    "rx_no_channel",
    "rx_filtered",
    "rx_length_errors",
];
