// SPDX-License-Identifier: Apache-2.0 OR MIT
//! RoCEv2 packets, as chapter 12 of the specification has them.
//!
//! Written from the text and not from the device, so that a mistake there is not made here too.

/// UDP port of RoCEv2.
const ROCE_PORT: u16 = 4791;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const PROTOCOL_UDP: u8 = 17;
const ICRC: usize = 4;
const BTH: usize = 12;
const UDP: usize = 8;

/// Operations of the reliable connected service; the unreliable one has [`UNRELIABLE`] added.
#[allow(missing_docs)]
pub mod rc {
    pub const SEND_FIRST: u8 = 0x00;
    pub const SEND_MIDDLE: u8 = 0x01;
    pub const SEND_LAST: u8 = 0x02;
    pub const SEND_ONLY: u8 = 0x04;
    pub const SEND_ONLY_IMMEDIATE: u8 = 0x05;
    pub const WRITE_FIRST: u8 = 0x06;
    pub const WRITE_MIDDLE: u8 = 0x07;
    pub const WRITE_LAST: u8 = 0x08;
    pub const WRITE_ONLY: u8 = 0x0a;
    pub const WRITE_ONLY_IMMEDIATE: u8 = 0x0b;
    pub const READ_REQUEST: u8 = 0x0c;
    pub const READ_RESPONSE_FIRST: u8 = 0x0d;
    pub const READ_RESPONSE_MIDDLE: u8 = 0x0e;
    pub const READ_RESPONSE_LAST: u8 = 0x0f;
    pub const READ_RESPONSE_ONLY: u8 = 0x10;
    pub const ACKNOWLEDGE: u8 = 0x11;
    pub const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
    pub const COMPARE_SWAP: u8 = 0x13;
    pub const FETCH_ADD: u8 = 0x14;
    pub const SEND_ONLY_INVALIDATE: u8 = 0x17;
    pub const FLUSH: u8 = 0x1c;
    pub const ATOMIC_WRITE: u8 = 0x1d;
}
/// Added to an operation: unreliable connections.
pub const UNRELIABLE: u8 = 0x20;
/// Added to an operation: extended reliable connections.
pub const EXTENDED: u8 = 0xa0;
/// A datagram.
pub const UD_SEND: u8 = 0x64;
/// A datagram with immediate data.
pub const UD_SEND_IMMEDIATE: u8 = 0x65;

/// AETH syndromes.
#[allow(missing_docs)]
pub mod syndrome {
    pub const ACK: u8 = 0x1f;
    pub const RNR: u8 = 0x20;
    pub const NAK_SEQUENCE: u8 = 0x60;
    pub const NAK_INVALID_REQUEST: u8 = 0x61;
    pub const NAK_REMOTE_ACCESS: u8 = 0x62;
    pub const NAK_REMOTE_OPERATION: u8 = 0x63;
}

/// A packet of the wire, from its Ethernet header to its ICRC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Ethernet destination.
    pub to_mac: [u8; 6],
    /// Ethernet source.
    pub from_mac: [u8; 6],
    /// Tag control information.
    pub vlan: Option<u16>,
    /// Source address; an IPv4-mapped one for IPv4.
    pub from: [u8; 16],
    /// Destination address, of the same kind.
    pub to: [u8; 16],
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// UDP source port.
    pub udp_source: u16,
    /// UDP checksum.
    pub udp_checksum: u16,
    /// IPv4: don't fragment, more fragments and offset.
    pub fragment: u16,
    /// BTH operation.
    pub opcode: u8,
    /// BTH solicited event.
    pub solicited: bool,
    /// BTH migration request.
    pub migrated: bool,
    /// BTH transport version.
    pub version: u8,
    /// BTH partition key.
    pub pkey: u16,
    /// BTH byte in front of the destination: FECN, BECN.
    pub congestion: u8,
    /// BTH destination.
    pub qpn: u32,
    /// BTH acknowledge request.
    pub acknowledge: bool,
    /// BTH sequence number.
    pub psn: u32,
    /// Extended headers and payload, without the pad.
    pub body: Vec<u8>,
}

impl Packet {
    /// A packet as most are; the addresses come from [`crate::wire::Neighbour`].
    pub fn new(opcode: u8, qpn: u32, psn: u32, body: Vec<u8>) -> Self {
        Self {
            to_mac: [0; 6],
            from_mac: [0; 6],
            vlan: None,
            from: [0; 16],
            to: [0; 16],
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            udp_source: 0xc123,
            udp_checksum: 0,
            fragment: 0x4000,
            opcode,
            solicited: false,
            migrated: true,
            version: 0,
            pkey: 0xffff,
            congestion: 0,
            qpn,
            acknowledge: true,
            psn,
            body,
        }
    }

    /// Whether it is IPv4.
    pub fn is_ipv4(&self) -> bool {
        ipv4(&self.to).is_some()
    }

    /// Big-endian 32 bits of the body.
    pub fn word(&self, at: usize) -> u32 {
        let bytes = self.body.get(at..at + 4);
        bytes.map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    }

    /// AETH of an answer: syndrome and message sequence number.
    pub fn aeth(&self) -> (u8, u32) {
        ((self.word(0) >> 24) as u8, self.word(0) & 0xff_ffff)
    }

    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let pad = self.body.len().wrapping_neg() % 4;
        let length = UDP + BTH + self.body.len() + pad + ICRC;
        let mut frame = Vec::with_capacity(length + 64);
        frame.extend(self.to_mac);
        frame.extend(self.from_mac);
        if let Some(tag) = self.vlan {
            frame.extend(ETHERTYPE_VLAN.to_be_bytes());
            frame.extend(tag.to_be_bytes());
        }
        let network = match (ipv4(&self.from), ipv4(&self.to)) {
            (Some(from), Some(to)) => {
                frame.extend(ETHERTYPE_IPV4.to_be_bytes());
                let at = frame.len();
                frame.extend([0x45, self.traffic_class]);
                frame.extend((20 + length as u16).to_be_bytes());
                frame.extend([0, 0]);
                frame.extend(self.fragment.to_be_bytes());
                frame.extend([self.hop_limit, PROTOCOL_UDP, 0, 0]);
                frame.extend(from);
                frame.extend(to);
                let sum = checksum(&frame[at..]).to_be_bytes();
                frame[at + 10..at + 12].copy_from_slice(&sum);
                at
            }
            _ => {
                frame.extend(ETHERTYPE_IPV6.to_be_bytes());
                let at = frame.len();
                let first = (6 << 28) | (u32::from(self.traffic_class) << 20) | self.flow_label;
                frame.extend(first.to_be_bytes());
                frame.extend((length as u16).to_be_bytes());
                frame.extend([PROTOCOL_UDP, self.hop_limit]);
                frame.extend(self.from);
                frame.extend(self.to);
                at
            }
        };
        frame.extend(self.udp_source.to_be_bytes());
        frame.extend(ROCE_PORT.to_be_bytes());
        frame.extend((length as u16).to_be_bytes());
        frame.extend(self.udp_checksum.to_be_bytes());
        let bits = (u8::from(self.solicited) << 7)
            | (u8::from(self.migrated) << 6)
            | ((pad as u8) << 4)
            | self.version;
        frame.extend([self.opcode, bits]);
        frame.extend(self.pkey.to_be_bytes());
        frame.extend(((u32::from(self.congestion) << 24) | self.qpn).to_be_bytes());
        frame.extend(((u32::from(self.acknowledge) << 31) | self.psn).to_be_bytes());
        frame.extend(&self.body);
        frame.resize(frame.len() + pad, 0);
        let icrc = icrc(&frame[network..]);
        frame.extend(icrc.to_le_bytes());
        frame
    }

    /// Reads a frame: `None` for one that is not RoCEv2, an error for one that breaks its rules.
    pub fn parse(frame: &[u8]) -> Option<Result<Self, &'static str>> {
        let mut at = 12;
        let mut vlan = None;
        let mut ethertype = be16(frame, at)?;
        if ethertype == ETHERTYPE_VLAN {
            vlan = Some(be16(frame, at + 2)?);
            at += 4;
            ethertype = be16(frame, at)?;
        }
        let network = at + 2;
        let mut packet = Self::new(0, 0, 0, Vec::new());
        packet.to_mac.copy_from_slice(frame.get(..6)?);
        packet.from_mac.copy_from_slice(frame.get(6..12)?);
        packet.vlan = vlan;
        let (udp, length) = match ethertype {
            ETHERTYPE_IPV4 => {
                let header = frame.get(network..network + 20)?;
                if header[0] != 0x45 || header[9] != PROTOCOL_UDP {
                    return None;
                }
                packet.traffic_class = header[1];
                packet.hop_limit = header[8];
                packet.fragment = be16(header, 6)?;
                packet.from = mapped(&header[12..16]);
                packet.to = mapped(&header[16..20]);
                let length = usize::from(be16(header, 2)?).checked_sub(20)?;
                (network + 20, length)
            }
            ETHERTYPE_IPV6 => {
                let header = frame.get(network..network + 40)?;
                if header[6] != PROTOCOL_UDP {
                    return None;
                }
                let first = (u32::from(be16(header, 0)?) << 16) | u32::from(be16(header, 2)?);
                packet.traffic_class = (first >> 20) as u8;
                packet.flow_label = first & 0xf_ffff;
                packet.hop_limit = header[7];
                packet.from.copy_from_slice(&header[8..24]);
                packet.to.copy_from_slice(&header[24..40]);
                (network + 40, usize::from(be16(header, 4)?))
            }
            _ => return None,
        };
        if be16(frame, udp + 2)? != ROCE_PORT {
            return None;
        }
        Some(packet.parse_transport(frame, network, udp, length))
    }

    fn parse_transport(
        mut self,
        frame: &[u8],
        network: usize,
        udp: usize,
        length: usize,
    ) -> Result<Self, &'static str> {
        const SHORT: &str = "a packet shorter than its headers";
        if self.is_ipv4() && checksum(&frame[network..udp]) != 0 {
            return Err("a wrong IPv4 header checksum");
        }
        self.udp_source = be16(frame, udp).ok_or(SHORT)?;
        self.udp_checksum = be16(frame, udp + 6).ok_or(SHORT)?;
        if be16(frame, udp + 4) != Some(length as u16) {
            return Err("a UDP length that is not that of IP");
        }
        if frame.len() < udp + length {
            return Err("a frame shorter than IP says");
        }
        let end = (udp + length).checked_sub(ICRC).ok_or(SHORT)?;
        let bth = frame.get(udp + UDP..end).ok_or(SHORT)?;
        if bth.len() < BTH {
            return Err(SHORT);
        }
        let sent = [frame[end], frame[end + 1], frame[end + 2], frame[end + 3]];
        if u32::from_le_bytes(sent) != icrc(&frame[network..end]) {
            return Err("a wrong ICRC");
        }
        self.opcode = bth[0];
        self.solicited = bth[1] & 0x80 != 0;
        self.migrated = bth[1] & 0x40 != 0;
        let pad = usize::from((bth[1] >> 4) & 3);
        self.version = bth[1] & 0xf;
        self.pkey = be16(bth, 2).ok_or(SHORT)?;
        self.congestion = bth[4];
        self.qpn = u32::from_be_bytes([0, bth[5], bth[6], bth[7]]);
        self.acknowledge = bth[8] & 0x80 != 0;
        self.psn = u32::from_be_bytes([0, bth[9], bth[10], bth[11]]);
        let body = &bth[BTH..];
        if body.len() % 4 != 0 || body.len() < pad {
            return Err("a payload that is not padded to four bytes");
        }
        self.body = body[..body.len() - pad].to_vec();
        Ok(self)
    }
}

/// RETH.
pub fn reth(address: u64, rkey: u32, length: u32) -> Vec<u8> {
    let mut bytes = address.to_be_bytes().to_vec();
    bytes.extend(rkey.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// AtomicETH.
pub fn atomic_eth(address: u64, rkey: u32, operand: u64, compare: u64) -> Vec<u8> {
    let mut bytes = address.to_be_bytes().to_vec();
    bytes.extend(rkey.to_be_bytes());
    bytes.extend(operand.to_be_bytes());
    bytes.extend(compare.to_be_bytes());
    bytes
}

/// AETH.
pub fn aeth(syndrome: u8, messages: u32) -> Vec<u8> {
    ((u32::from(syndrome) << 24) | messages)
        .to_be_bytes()
        .to_vec()
}

/// DETH.
pub fn deth(qkey: u32, source_qpn: u32) -> Vec<u8> {
    let mut bytes = qkey.to_be_bytes().to_vec();
    bytes.extend(source_qpn.to_be_bytes());
    bytes
}

/// The IPv4 address that a GID stands for.
fn ipv4(gid: &[u8; 16]) -> Option<[u8; 4]> {
    let address = gid.strip_prefix(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])?;
    address.try_into().ok()
}

fn mapped(address: &[u8]) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(address);
    gid
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// The Internet checksum: zero over a header that has the right one.
fn checksum(header: &[u8]) -> u16 {
    let words = header
        .chunks(2)
        .map(|word| (u32::from(word[0]) << 8) | u32::from(word[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// The invariant CRC of a packet from its network header to its pad.
fn icrc(packet: &[u8]) -> u32 {
    let mut bytes = vec![0xff; 8];
    bytes.extend(packet);
    let udp = if packet[0] >> 4 == 4 {
        for variable in [1, 8, 10, 11] {
            bytes[8 + variable] = 0xff;
        }
        8 + 20
    } else {
        bytes[8] |= 0x0f;
        for variable in [1, 2, 3, 7] {
            bytes[8 + variable] = 0xff;
        }
        8 + 40
    };
    bytes[udp + 6..udp + 8].fill(0xff);
    bytes[udp + UDP + 4] = 0xff;
    crc32(&bytes)
}

/// The CRC of Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(to: [u8; 16]) -> Packet {
        Packet {
            to_mac: [1; 6],
            from_mac: [2; 6],
            from: to,
            to,
            ..Packet::new(rc::SEND_ONLY, 0x12, 0x34, vec![1, 2, 3, 4, 5])
        }
    }

    #[test]
    fn what_is_encoded_is_parsed() {
        for to in [mapped(&[10, 0, 0, 1]), [0x20; 16]] {
            for vlan in [None, Some(0x2005)] {
                let packet = Packet { vlan, ..packet(to) };
                assert_eq!(Packet::parse(&packet.encode()), Some(Ok(packet)));
            }
        }
    }

    #[test]
    fn a_changed_byte_is_found_unless_it_may_change_on_the_way() {
        let frame = packet(mapped(&[10, 0, 0, 1])).encode();
        let udp_checksum = 14 + 20 + 6;
        let congestion = 14 + 20 + UDP + 4;
        for at in 14 + 20..frame.len() {
            let mut changed = frame.clone();
            changed[at] ^= 1;
            let invariant = ![udp_checksum, udp_checksum + 1, congestion].contains(&at);
            let good = matches!(Packet::parse(&changed), Some(Ok(_)));
            assert_eq!(good, !invariant, "byte {at}");
        }
    }

    #[test]
    fn the_crc_is_that_of_ethernet() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
