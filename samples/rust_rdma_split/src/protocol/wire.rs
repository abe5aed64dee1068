// SPDX-License-Identifier: GPL-2.0

//! The layouts of all messages.

use super::layout::{is_reserved, Field, FieldInfo, Layout};

/// Where an I/O unit listens if nothing else is said: a port that a user of its machine cannot have.
pub const DEFAULT_PORT: u16 = 815;
/// The version that is spoken here, in each message.
pub const VERSION: u16 = 1;
/// Bytes of the longest message of the control channel.
pub const CONTROL_MAX: usize = 256;
/// Receive buffers of [`CONTROL_MAX`] bytes that each side has posted on the control channel.
pub const CONTROL_DEPTH: usize = 16;
/// The first bytes of the private data of a connection request, and of the answer to it.
pub const JOIN_MAGIC: u32 = u32::from_be_bytes(*b"FeSp");
/// Added to a pool's index where a message refers to a pool of its receiver; indices are smaller.
pub const REFERENCE_YOURS: u32 = 1 << 31;
/// The largest MTU that anybody may tell of.
pub const MTU_MAX: u32 = 65_535;
/// `FilterFlags::flags`: all frames are wanted.
pub const FILTER_PROMISCUOUS: u32 = 1 << 0;
/// `FilterFlags::flags`: all multicast frames are wanted.
pub const FILTER_ALL_MULTICAST: u32 = 1 << 1;
/// `Link::flags`: it can send and receive.
pub const LINK_UP: u32 = 1 << 0;
/// `Link::flags`: in both directions at a time.
pub const LINK_FULL_DUPLEX: u32 = 1 << 1;

numbers! {
    /// What a message is.
    pub enum Function: u16 {
        /// The sender has pools.
        BufferRecvPool = 1,
        /// The sender would like its peer to have more. No reply is owed.
        BufferRecvPoolGet = 2,
        /// Elements may be used again.
        BufferRecvPoolUpdate = 3,
        /// Pools are to be given up.
        BufferPoolFlushRequest = 4,
        /// Pools were given up.
        BufferPoolFlushReply = 5,
        /// A frame, in the message itself.
        SendData = 6,
        /// Elements were filled.
        BufferRDMAIndicate = 7,
        /// Something about the interface is asked, set or told.
        CfgUtilRequest = 8,
        /// The answer to that, or the confirmation of a message without another reply.
        CfgUtilReply = 9,
    }

    /// How frames get into and out of the elements of a pool.
    pub enum PoolKind: u16 {
        /// By RDMA writes of the owner's peer. Push: the owner receives.
        Write = 1,
        /// In `SendData` messages to receive buffers of the data channel: they have no address.
        Send = 2,
        /// By RDMA reads of the owner's peer. Pull: the owner sends.
        Read = 3,
    }

    /// Who somebody is.
    pub enum Role: u8 {
        /// Has an interface, and no network.
        Host = 1,
        /// Has a network.
        Unit = 2,
    }

    /// What a connection is for.
    pub enum Channel: u8 {
        /// All but frames.
        Control = 0,
        /// Frames.
        Data = 1,
    }

    /// The transport of both channels.
    pub enum Service: u8 {
        /// Reliable connections: a request is complete once the peer has acknowledged it.
        Acknowledged = 1,
        /// Unreliable connections: it is complete once it is on the wire. Frames travel in messages only.
        Unacknowledged = 2,
    }

    /// Who moves frames that do not travel in messages.
    pub enum Variant: u8 {
        /// The sender writes them. Push-push.
        Push = 1,
        /// The receiver reads them. Push-pull, for comparison.
        Pull = 2,
    }

    /// What a `CfgUtilRequest` wants.
    pub enum Operation: u16 {
        /// The address of the far interface. Answer: `MacAddress`.
        GetMac = 1,
        /// Another address for it: `MacAddress`.
        SetMac = 2,
        /// What it has counted. Answer: `Statistics`.
        GetStatistics = 3,
        /// The state of its link. Answer: `Link`.
        GetLink = 4,
        /// Its largest frame without header. Answer: `Mtu`.
        GetMtu = 5,
        /// Another one: `Mtu`.
        SetMtu = 6,
        /// Frames of a VLAN are wanted: `Vlan`.
        AddVlan = 7,
        /// They are not any more: `Vlan`.
        RemoveVlan = 8,
        /// Frames to a multicast address are wanted: `MacAddress`.
        AddMulticast = 9,
        /// They are not any more: `MacAddress`.
        RemoveMulticast = 10,
        /// Which frames are wanted whatever their address: `FilterFlags`.
        SetFilter = 11,
        /// From the I/O unit: the link has changed: `Link`.
        LinkChanged = 12,
        /// In replies only: the message with this context has arrived. Unacknowledged service.
        Received = 13,
    }

    /// How a `CfgUtilRequest` ended.
    pub enum Status: u16 {
        /// Well.
        Done = 0,
        /// The peer cannot do that.
        NotSupported = 1,
        /// The peer does not accept the value.
        BadValue = 2,
        /// It may not be done by this host.
        NotPermitted = 3,
        /// It was tried, and failed.
        Failed = 4,
        /// There is no room for another one.
        NoRoom = 5,
    }
}

layout! {
    /// The private data of a connection request, and of the answer to it.
    pub struct Join: 28 {
        /// `JOIN_MAGIC`.
        0 => magic: u32,
        /// `VERSION`.
        4 => version: u16,
        /// What the connection is for, see `Channel`.
        6 => channel: u8,
        /// Who the sender is, see `Role`.
        7 => role: u8,
        /// The transport, see `Service`: the same on both sides.
        8 => service: u8,
        /// Who moves frames, see `Variant`: the same on both sides.
        9 => variant: u8,
        /// Zero.
        10 => reserved: u16,
        /// A number of the sender for this pair of channels, not the one before; not 0.
        12 => session: u32,
        /// The peer's number, or 0 in the request of the control channel, when it is not known yet.
        16 => peer_session: u32,
        /// What only hosts of this I/O unit and itself know: the same on both sides.
        20 => key: u64,
    }

    /// What every message begins with.
    pub struct Header: 12 {
        /// What the message is, see `Function`.
        0 => function: u16,
        /// `VERSION`.
        2 => version: u16,
        /// Transaction context: the sender's session in the upper half, the number of the message in the
        /// lower one, counted from 1 on each channel. A reply has that of its request.
        4 => context: u64,
    }

    /// What follows the header of messages with entries.
    pub struct EntryCount: 4 {
        /// How many entries follow; at least one.
        0 => count: u32,
    }

    /// An entry of `BufferRecvPool`: a pool of the sender.
    pub struct PoolEntry: 40 {
        /// Its index, less than `REFERENCE_YOURS`.
        0 => pool: u32,
        /// See `PoolKind`.
        4 => kind: u16,
        /// Zero.
        6 => reserved: u16,
        /// How many elements it has.
        8 => elements: u32,
        /// Bytes of each; they follow each other without gaps.
        12 => element_size: u32,
        /// Where the first one is, for RDMA; 0 for `Send`.
        16 => address: u64,
        /// The remote key of all of them; 0 for `Send`.
        24 => key: u32,
        /// Zero.
        28 => reserved2: u32,
        /// The pool context: means something to its owner only.
        32 => context: u64,
    }

    /// What follows the header of `BufferRecvPoolGet`.
    pub struct Get: 12 {
        /// How many elements are wanted; 0: none, only `sent` is told.
        0 => elements: u32,
        /// Bytes of the frame that there was no element for.
        4 => element_size: u32,
        /// How many `SendData` the sender has sent in this session, lower half.
        8 => sent: u32,
    }

    /// An entry of `BufferRecvPoolUpdate`: elements that may be used again.
    pub struct UpdateEntry: 12 {
        /// Reference of the pool.
        0 => pool: u32,
        /// The first element; 0 for `Send`.
        4 => first: u32,
        /// How many follow each other.
        8 => count: u32,
    }

    /// What follows the header of `BufferPoolFlushRequest`, as often as fits the message's length.
    pub struct PoolReference: 4 {
        /// Reference of the pool.
        0 => pool: u32,
    }

    /// What follows the header of `SendData`, before the frame.
    pub struct Data: 8 {
        /// Reference of the pool.
        0 => pool: u32,
        /// Bytes of the frame.
        4 => size: u32,
    }

    /// An entry of `BufferRDMAIndicate`: an element that was filled.
    pub struct IndicateEntry: 12 {
        /// Reference of the pool.
        0 => pool: u32,
        /// The element.
        4 => element: u32,
        /// Bytes of the frame in it.
        8 => size: u32,
    }

    /// What follows the header of `CfgUtilRequest`, before the data.
    pub struct Request: 8 {
        /// See `Operation`.
        0 => operation: u16,
        /// Zero.
        2 => reserved: u16,
        /// Bytes of data.
        4 => size: u32,
    }

    /// What follows the header of `CfgUtilReply`, before the data.
    pub struct Reply: 8 {
        /// The operation of the request, or `Received`.
        0 => operation: u16,
        /// See `Status`; there are data only with `Done`.
        2 => status: u16,
        /// Bytes of data.
        4 => size: u32,
    }

    /// Data of `GetMac`, `SetMac`, `AddMulticast` and `RemoveMulticast`.
    pub struct MacAddress: 8 {
        /// The address.
        0 => mac: [u8; 6],
        /// Zero.
        6 => reserved: u16,
    }

    /// Data of `GetMtu` and `SetMtu`.
    pub struct Mtu: 4 {
        /// Bytes of the largest frame, without its Ethernet header.
        0 => mtu: u32,
    }

    /// Data of `AddVlan` and `RemoveVlan`.
    pub struct Vlan: 4 {
        /// Its number, 1 to 4094.
        0 => vlan: u16,
        /// Zero.
        2 => reserved: u16,
    }

    /// Data of `SetFilter`.
    pub struct FilterFlags: 4 {
        /// `FILTER_*`.
        0 => flags: u32,
    }

    /// Data of `GetLink` and `LinkChanged`.
    pub struct Link: 12 {
        /// `LINK_*`.
        0 => flags: u32,
        /// Mbit/s, 0 if unknown.
        4 => speed: u32,
        /// As in `Mtu`.
        8 => mtu: u32,
    }

    /// Data of `GetStatistics`, as `struct rtnl_link_stats64` has them.
    pub struct Statistics: 72 {
        /// Frames received.
        0 => rx_packets: u64,
        /// Frames sent.
        8 => tx_packets: u64,
        /// Bytes received.
        16 => rx_bytes: u64,
        /// Bytes sent.
        24 => tx_bytes: u64,
        /// Bad frames received.
        32 => rx_errors: u64,
        /// Frames that could not be sent.
        40 => tx_errors: u64,
        /// Frames received for which there was no room.
        48 => rx_dropped: u64,
        /// Frames to be sent for which there was no room.
        56 => tx_dropped: u64,
        /// Multicast frames received.
        64 => multicast: u64,
    }
}

impl Operation {
    /// Who may ask it.
    pub const fn asked_by(self) -> Option<Role> {
        match self {
            Self::LinkChanged => Some(Role::Unit),
            Self::Received => None,
            _ => Some(Role::Host),
        }
    }

    /// Bytes of the data of a request, and of a reply that is `Done`.
    pub const fn data_sizes(self) -> (usize, usize) {
        match self {
            Self::GetMac => (0, MacAddress::SIZE),
            Self::SetMac | Self::AddMulticast | Self::RemoveMulticast => (MacAddress::SIZE, 0),
            Self::GetStatistics => (0, Statistics::SIZE),
            Self::GetLink => (0, Link::SIZE),
            Self::GetMtu => (0, Mtu::SIZE),
            Self::SetMtu => (Mtu::SIZE, 0),
            Self::AddVlan | Self::RemoveVlan => (Vlan::SIZE, 0),
            Self::SetFilter => (FilterFlags::SIZE, 0),
            Self::LinkChanged => (Link::SIZE, 0),
            Self::Received => (0, 0),
        }
    }
}

/// The immediate data of an RDMA write: which element it filled.
///
/// Bits 31:24 are the pool, 23:16 the element, 15:0 the bytes of the frame, where 0 stands for 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Index of the pool.
    pub pool: u32,
    /// The element.
    pub element: u32,
    /// Bytes of the frame.
    pub size: u32,
}

impl Immediate {
    /// The 32 bits, if these suffice.
    pub fn encode(&self) -> Option<u32> {
        let pool = u8::try_from(self.pool).ok()?;
        let element = u8::try_from(self.element).ok()?;
        // The largest size has the number of the smallest, which is no frame.
        let size = u16::try_from(self.size.checked_sub(1)?)
            .ok()?
            .wrapping_add(1);
        Some((u32::from(pool) << 24) | (u32::from(element) << 16) | u32::from(size))
    }

    /// What 32 bits say. All of them say something.
    pub fn decode(bits: u32) -> Self {
        let size = (bits & 0xffff).wrapping_sub(1) & 0xffff;
        Self {
            pool: bits >> 24,
            element: (bits >> 16) & 0xff,
            size: size + 1,
        }
    }
}

/// A transaction context: who says it, and the how manieth message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The session of who began the transaction.
    pub session: u32,
    /// The number of the message.
    pub sequence: u32,
}

impl Context {
    /// As it is in a header.
    pub const fn number(self) -> u64 {
        ((self.session as u64) << 32) | self.sequence as u64
    }

    /// As it was in a header.
    pub const fn from_number(number: u64) -> Self {
        Self {
            session: (number >> 32) as u32,
            sequence: number as u32,
        }
    }
}
