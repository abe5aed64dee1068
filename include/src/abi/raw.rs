// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Raw packets: rules of flows, and tables that spread frames over work queues.

use super::REDIRECTION_KEY_SIZE;

/// Most bytes that a frame of a raw packet has behind its header and one tag, where there is no
/// interface that says less.
pub const RAW_MAX_MTU: u16 = 9000;
/// Most entries of a receive table of any device.
pub const RECEIVE_TABLE_ENTRIES: usize = 32;

/// `CreateFlow::flags`: `target` is a receive table, and the hash of the frame chooses the entry.
pub const FLOW_TO_TABLE: u16 = 1 << 0;

/// `CreateFlow::layers`: the frame has an 802.1Q tag.
pub const FLOW_LAYER_VLAN: u8 = 1 << 0;
/// `CreateFlow::layers`: it is an IPv4 packet.
pub const FLOW_LAYER_IPV4: u8 = 1 << 1;
/// `CreateFlow::layers`: it is an IPv6 packet.
pub const FLOW_LAYER_IPV6: u8 = 1 << 2;
/// `CreateFlow::layers`: it is a TCP segment, whose ports can be seen.
pub const FLOW_LAYER_TCP: u8 = 1 << 3;
/// `CreateFlow::layers`: it is a UDP datagram, whose ports can be seen.
pub const FLOW_LAYER_UDP: u8 = 1 << 4;

/// `FlowFields::fragment`: the packet is not to be fragmented.
pub const FRAGMENT_NONE: u8 = 1 << 1;
/// `FlowFields::fragment`: more fragments follow.
pub const FRAGMENT_MORE: u8 = 1 << 2;

layout! {
    /// What rules look at. Addresses and numbers are as they are in the frame; what a frame has not is
    /// zero.
    pub struct FlowFields: 64 {
        /// Ethernet: where to.
        0 => destination_mac: [u8; 6],
        /// Ethernet: where from.
        6 => source_mac: [u8; 6],
        /// Ethernet: type, behind a tag if there is one.
        12 => ether_type: [u8; 2],
        /// 802.1Q: tag control information.
        14 => vlan: [u8; 2],
        /// IPv6: where from; IPv4: the same in the first four bytes, the others zero.
        16 => source: [u8; 16],
        /// IPv6: where to; IPv4: the same in the first four bytes, the others zero.
        32 => destination: [u8; 16],
        /// TCP, UDP: source port.
        48 => source_port: [u8; 2],
        /// TCP, UDP: destination port.
        50 => destination_port: [u8; 2],
        /// IPv4: protocol; IPv6: next header.
        52 => protocol: u8,
        /// IPv4: type of service; IPv6: traffic class.
        53 => traffic_class: u8,
        /// IPv4: time to live; IPv6: hop limit.
        54 => hop_limit: u8,
        /// IPv4: [`FRAGMENT_NONE`], [`FRAGMENT_MORE`].
        55 => fragment: u8,
        /// IPv6: flow label, in the lower 20 bits.
        56 => flow_label: [u8; 4],
        /// Zero.
        60 => reserved: u32,
    }

    /// Makes a rule: what frames it is for, and who gets them.
    pub struct CreateFlow: 192 {
        /// Its number.
        0 => flow: u32,
        /// The queue pair of raw packets, or with [`FLOW_TO_TABLE`] the receive table.
        4 => target: u32,
        /// Of two rules that match, the one with the smaller number counts.
        8 => priority: u16,
        /// See `FLOW_TO_TABLE`.
        10 => flags: u16,
        /// What the frame has to have: `FLOW_LAYER_VLAN` to `FLOW_LAYER_UDP`.
        12 => layers: u8,
        /// The port, from 0.
        13 => port: u8,
        /// With [`FLOW_TO_TABLE`]: what the hash is of, `HASH_*`; else zero.
        14 => hash_types: u16,
        /// What the fields have to be, where the mask is one; zero elsewhere.
        16 => value: FlowFields,
        /// The bits that count.
        80 => mask: FlowFields,
        /// With [`FLOW_TO_TABLE`]: the key of the hash; else zero.
        144 => key: [u8; 40],
        /// Zero.
        184 => reserved: u64,
    }

    /// Makes a receive table.
    pub struct CreateReceiveTable: 144 {
        /// Its number.
        0 => table: u32,
        /// Base-2 logarithm of its entries.
        4 => log_entries: u8,
        /// Zero.
        5 => reserved0: [u8; 3],
        /// Zero.
        8 => reserved1: u64,
        /// The queue pairs of raw packets, mostly work queues ([`super::QP_FLAG_RECEIVE_ONLY`]), followed by
        /// zeroes. One may be there more than once.
        16 => qpns: [u32; 32],
    }
}

const _: () = assert!(
    core::mem::size_of::<[u32; RECEIVE_TABLE_ENTRIES]>() == 128 && REDIRECTION_KEY_SIZE == 40
);
