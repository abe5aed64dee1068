// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A received Ethernet frame, looked at as RoCEv2: Ethernet, IP and UDP.

use super::icrc::{icrc, ICRC_LEN};
use super::BTH_LEN;

/// An Ethernet address.
pub type Mac = [u8; 6];
/// A global identifier: an IPv6 address, or an IPv4 address mapped into one.
pub type Gid = [u8; 16];

/// The UDP destination port of RoCEv2.
pub const ROCE_UDP_PORT: u16 = 4791;

pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
pub(super) const ETHERTYPE_VLAN: u16 = 0x8100;
/// Bits of the tag control information that name the VLAN.
pub const VLAN_ID_MASK: u16 = 0xfff;
pub(super) const PROTOCOL_UDP: u8 = 17;
pub(super) const IPV4_LEN: usize = 20;
pub(super) const IPV6_LEN: usize = 40;
pub(super) const UDP_LEN: usize = 8;

/// The GID that stands for an IPv4 address.
pub const fn gid_from_ipv4(address: [u8; 4]) -> Gid {
    let [a, b, c, d] = address;
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// The IPv4 address a GID stands for, if it does.
pub fn ipv4_of_gid(gid: &Gid) -> Option<[u8; 4]> {
    let [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] = *gid else {
        return None;
    };
    Some([a, b, c, d])
}

/// A frame that is an unfragmented UDP datagram for the RoCEv2 port and long enough to hold a
/// base transport header and the invariant CRC.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Destination Ethernet address.
    pub destination_mac: Mac,
    /// Source Ethernet address.
    pub source_mac: Mac,
    /// VLAN tag control information, if tagged.
    pub vlan: Option<u16>,
    /// Destination address.
    pub destination: Gid,
    /// Source address.
    pub source: Gid,
    /// The network header is IPv6.
    pub ipv6: bool,
    /// Hop limit or time to live.
    pub hop_limit: u8,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    /// The IP header, for datagrams that deliver it.
    pub network_header: &'a [u8],
    /// UDP source port.
    pub udp_source_port: u16,
    /// From the IP header to the end of the payload and its padding.
    covered: &'a [u8],
    /// From the base transport header to the end of the payload and its padding.
    pub transport: &'a [u8],
    received_icrc: u32,
}

impl<'a> Frame<'a> {
    /// The VLAN it is in, 0 for none: a tag with identifier 0 is there for its priority alone.
    pub fn vlan_id(&self) -> u16 {
        self.vlan.unwrap_or(0) & VLAN_ID_MASK
    }

    /// Looks at a frame; `None` when it is not RoCEv2 and belongs to the ordinary network stack.
    pub fn parse(frame: &'a [u8]) -> Option<Self> {
        let destination_mac: Mac = frame.get(0..6)?.try_into().ok()?;
        let source_mac: Mac = frame.get(6..12)?.try_into().ok()?;
        let mut ethertype = be16(frame, 12)?;
        let mut at = 14;
        let mut vlan = None;
        if ethertype == ETHERTYPE_VLAN {
            vlan = Some(be16(frame, 14)?);
            ethertype = be16(frame, 16)?;
            at = 18;
        }
        let packet = frame.get(at..)?;
        let (header_len, total) = match ethertype {
            ETHERTYPE_IPV4 => {
                // Version 4 without options, neither a fragment nor followed by one.
                if *packet.first()? != 0x45
                    || be16(packet, 6)? & 0x3fff != 0
                    || *packet.get(9)? != PROTOCOL_UDP
                {
                    return None;
                }
                (IPV4_LEN, be16(packet, 2)? as usize)
            }
            ETHERTYPE_IPV6 => {
                if *packet.first()? >> 4 != 6 || *packet.get(6)? != PROTOCOL_UDP {
                    return None;
                }
                (IPV6_LEN, IPV6_LEN + be16(packet, 4)? as usize)
            }
            _ => return None,
        };
        // Whatever follows the datagram is Ethernet padding.
        let datagram = packet.get(..total)?;
        let network_header = datagram.get(..header_len)?;
        let udp = datagram.get(header_len..)?;
        if be16(udp, 2)? != ROCE_UDP_PORT {
            return None;
        }
        let udp_len = be16(udp, 4)? as usize;
        if udp_len < UDP_LEN + BTH_LEN + ICRC_LEN || udp_len > udp.len() {
            return None;
        }
        let end = header_len + udp_len - ICRC_LEN;
        let covered = datagram.get(..end)?;
        let received_icrc = u32::from_le_bytes(datagram.get(end..end + 4)?.try_into().ok()?);
        let ipv6 = header_len == IPV6_LEN;
        let (source, destination, hop_limit, traffic_class) = if ipv6 {
            (
                network_header.get(8..24)?.try_into().ok()?,
                network_header.get(24..40)?.try_into().ok()?,
                network_header[7],
                (network_header[0] << 4) | (network_header[1] >> 4),
            )
        } else {
            if !header_checksum_ok(network_header) {
                return None;
            }
            (
                gid_from_ipv4(network_header.get(12..16)?.try_into().ok()?),
                gid_from_ipv4(network_header.get(16..20)?.try_into().ok()?),
                network_header[8],
                network_header[1],
            )
        };
        Some(Self {
            destination_mac,
            source_mac,
            vlan,
            destination,
            source,
            ipv6,
            hop_limit,
            traffic_class,
            network_header,
            udp_source_port: be16(udp, 0)?,
            covered,
            transport: covered.get(header_len + UDP_LEN..)?,
            received_icrc,
        })
    }

    /// Whether the invariant CRC is right.
    pub fn icrc_ok(&self) -> bool {
        icrc(self.covered) == Some(self.received_icrc)
    }

    /// Destination queue pair number, read without looking at the rest of the header.
    pub fn destination_qpn(&self) -> u32 {
        match self.transport {
            [_, _, _, _, _, a, b, c, ..] => u32::from_be_bytes([0, *a, *b, *c]),
            _ => 0,
        }
    }
}

/// What carries a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Something that may change a frame on its way: the invariant CRC is made and checked.
    Wire,
    /// Memory of this machine, which does not: the place of the invariant CRC holds nothing.
    Memory,
}

/// Fills in the invariant CRC of a frame that was made for [`Medium::Memory`] and goes on by wire.
/// What is no RoCEv2 frame stays as it is.
pub fn seal(frame: &mut [u8]) {
    let crc = Frame::parse(frame).and_then(|parsed| {
        let ip = if parsed.vlan.is_some() { 18 } else { 14 };
        Some((ip + parsed.covered.len(), icrc(parsed.covered)?))
    });
    if let Some((at, crc)) = crc {
        frame[at..at + ICRC_LEN].copy_from_slice(&crc.to_le_bytes());
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The one's complement sum of the header's 16-bit words, not inverted.
pub(super) fn header_sum(header: &[u8]) -> u16 {
    let mut sum: u32 = header
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn header_checksum_ok(header: &[u8]) -> bool {
    header_sum(header) == 0xffff
}
