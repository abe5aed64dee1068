// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Writing frames: the Ethernet, IP and UDP headers of a path are made once and copied.

use super::frame::{
    header_sum, ipv4_of_gid, Gid, Mac, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, IPV4_LEN,
    IPV6_LEN, PROTOCOL_UDP, ROCE_UDP_PORT, UDP_LEN,
};
use super::headers::Bth;
use super::icrc::{icrc, ICRC_LEN};
use super::Medium;

/// Where the frames of a path go and how they are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Own Ethernet address.
    pub source_mac: Mac,
    /// Ethernet address of the next hop.
    pub destination_mac: Mac,
    /// VLAN tag control information, if tagged.
    pub vlan: Option<u16>,
    /// Own address.
    pub source: Gid,
    /// The peer's address.
    pub destination: Gid,
    /// Hop limit or time to live; zero stands for the default, 64.
    pub hop_limit: u8,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// UDP source port.
    pub udp_source_port: u16,
}

/// Why a path makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathError {
    /// One address is IPv4 and the other is not.
    MixedFamilies,
}

const MAX_TEMPLATE: usize = 18 + IPV6_LEN + UDP_LEN;

/// Most bytes a frame has beside its payload: all headers, padding and the invariant CRC.
pub const MAX_HEADERS: usize = MAX_TEMPLATE + 12 + 4 + 28 + 3 + ICRC_LEN;

/// The Ethernet, IP and UDP headers of a path, ready to be copied in front of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    bytes: [u8; MAX_TEMPLATE],
    len: u8,
    ip: u8,
    ipv6: bool,
    /// Sum of the IPv4 header without length and identification, which differ by packet.
    sum: u16,
}

impl Template {
    /// Makes the headers of `path`.
    pub fn new(path: &Path) -> Result<Self, PathError> {
        let mut bytes = [0; MAX_TEMPLATE];
        let mut at = 0;
        let mut put = |data: &[u8]| {
            bytes[at..at + data.len()].copy_from_slice(data);
            at += data.len();
        };
        let families = (ipv4_of_gid(&path.source), ipv4_of_gid(&path.destination));
        let ipv6 = match families {
            (Some(_), Some(_)) => false,
            (None, None) => true,
            _ => return Err(PathError::MixedFamilies),
        };
        put(&path.destination_mac);
        put(&path.source_mac);
        let mut ip = 14;
        if let Some(vlan) = path.vlan {
            put(&ETHERTYPE_VLAN.to_be_bytes());
            put(&vlan.to_be_bytes());
            ip = 18;
        }
        let hop_limit = if path.hop_limit == 0 {
            64
        } else {
            path.hop_limit
        };
        let mut sum = 0;
        if let (Some(source), Some(destination)) = families {
            put(&ETHERTYPE_IPV4.to_be_bytes());
            // Don't fragment: a lost fragment would cost the packet, and RoCE sizes it by the path.
            let header = [
                0x45,
                path.traffic_class,
                0,
                0,
                0,
                0,
                0x40,
                0,
                hop_limit,
                PROTOCOL_UDP,
                0,
                0,
            ];
            sum = header_sum(&[header.as_slice(), &source, &destination].concat());
            put(&header);
            put(&source);
            put(&destination);
        } else {
            put(&ETHERTYPE_IPV6.to_be_bytes());
            let first =
                (6 << 28) | (u32::from(path.traffic_class) << 20) | (path.flow_label & 0xf_ffff);
            put(&first.to_be_bytes());
            put(&[0, 0, PROTOCOL_UDP, hop_limit]);
            put(&path.source);
            put(&path.destination);
        }
        put(&path.udp_source_port.to_be_bytes());
        put(&ROCE_UDP_PORT.to_be_bytes());
        // Length by packet. No checksum: the invariant CRC covers more, and Linux does the same
        // for both address families.
        put(&[0; 4]);
        Ok(Self {
            bytes,
            len: at as u8,
            ip,
            ipv6,
            sum,
        })
    }

    /// The destination Ethernet address.
    pub fn destination_mac(&self) -> Mac {
        [
            self.bytes[0],
            self.bytes[1],
            self.bytes[2],
            self.bytes[3],
            self.bytes[4],
            self.bytes[5],
        ]
    }

    /// The source Ethernet address.
    pub fn source_mac(&self) -> Mac {
        let [.., a, b, c, d, e, f] = *self.bytes.first_chunk::<12>().unwrap_or(&[0; 12]);
        [a, b, c, d, e, f]
    }

    /// Starts a frame in `frame`, replacing what it holds, with `bth` as its transport header.
    pub fn begin(&self, frame: &mut Vec<u8>, bth: &Bth) {
        frame.clear();
        frame.extend_from_slice(&self.bytes[..self.len as usize]);
        frame.extend_from_slice(&bth.to_bytes());
    }

    /// Ends a frame that was begun with [`Self::begin`] and has its headers and payload: pads it
    /// by `pad` bytes, fills in lengths and checksum and appends the invariant CRC, or room for it
    /// where `medium` does without.
    ///
    /// `identification` is that of the IPv4 header.
    pub fn finish(&self, frame: &mut Vec<u8>, pad: u8, identification: u16, medium: Medium) {
        frame.extend_from_slice(&[0; 3][..(pad & 3) as usize]);
        let ip = self.ip as usize;
        let total = frame.len() - ip + ICRC_LEN;
        let udp_start = self.len as usize - UDP_LEN;
        let udp_len = ((total - (udp_start - ip)) as u16).to_be_bytes();
        frame[udp_start + 4..udp_start + 6].copy_from_slice(&udp_len);
        if self.ipv6 {
            frame[ip + 4..ip + 6].copy_from_slice(&udp_len);
        } else {
            let total = total as u16;
            frame[ip + 2..ip + 4].copy_from_slice(&total.to_be_bytes());
            frame[ip + 4..ip + 6].copy_from_slice(&identification.to_be_bytes());
            let mut sum = u32::from(self.sum) + u32::from(total) + u32::from(identification);
            while sum >> 16 != 0 {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            frame[ip + 10..ip + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        }
        let crc = match medium {
            // Always IPv4 or IPv6 and long enough, as `begin` has written it.
            Medium::Wire => icrc(&frame[ip..]).unwrap_or(0),
            Medium::Memory => 0,
        };
        frame.extend_from_slice(&crc.to_le_bytes());
    }
}

const _: () = assert!(IPV4_LEN + UDP_LEN < MAX_TEMPLATE);

#[cfg(test)]
mod tests {
    use super::super::{gid_from_ipv4, seal, Frame, Opcode, Packet, Reth};
    use super::*;
    use proptest::prelude::*;

    fn path(ipv6: bool, vlan: Option<u16>) -> Path {
        let gid = |n| {
            if ipv6 {
                let mut gid = [0; 16];
                gid[0] = 0xfe;
                gid[1] = 0x80;
                gid[15] = n;
                gid
            } else {
                gid_from_ipv4([10, 0, 0, n])
            }
        };
        Path {
            source_mac: [2, 0, 0, 0, 0, 1],
            destination_mac: [2, 0, 0, 0, 0, 2],
            vlan,
            source: gid(1),
            destination: gid(2),
            hop_limit: 0,
            traffic_class: 0x68,
            flow_label: 0x12345,
            udp_source_port: 0xc123,
        }
    }

    fn frame(path: &Path, payload: &[u8]) -> Vec<u8> {
        frame_for(path, payload, Medium::Wire)
    }

    fn frame_for(path: &Path, payload: &[u8], medium: Medium) -> Vec<u8> {
        let template = Template::new(path).unwrap();
        let pad = (payload.len().wrapping_neg() & 3) as u8;
        let mut frame = vec![0xee; 7];
        let bth = Bth {
            opcode: Opcode::RC_WRITE_ONLY,
            migrated: true,
            pad,
            pkey: 0xffff,
            qpn: 0x11,
            psn: 5,
            ..Bth::default()
        };
        template.begin(&mut frame, &bth);
        let reth = Reth {
            address: 0x1000,
            rkey: 0x77,
            length: payload.len() as u32,
        };
        frame.extend_from_slice(&reth.to_bytes());
        frame.extend_from_slice(payload);
        template.finish(&mut frame, pad, 0xbeef, medium);
        frame
    }

    #[test]
    fn frames_written_are_read_back() {
        for ipv6 in [false, true] {
            for vlan in [None, Some(0x2005)] {
                for len in [0usize, 1, 2, 3, 4, 1024, 4095, 4096] {
                    let payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
                    let path = path(ipv6, vlan);
                    let mut bytes = frame(&path, &payload);
                    let ip = if vlan.is_some() { 18 } else { 14 };
                    assert_eq!((bytes.len() - ip) % 4, 0);
                    let mut unsealed = frame_for(&path, &payload, Medium::Memory);
                    assert!(!Frame::parse(&unsealed).unwrap().icrc_ok());
                    seal(&mut unsealed);
                    assert_eq!(unsealed, bytes);
                    bytes.extend([0; 9]); // Ethernet padding is not part of the datagram.
                    let parsed = Frame::parse(&bytes).unwrap();
                    assert!(parsed.icrc_ok());
                    assert_eq!(parsed.vlan, vlan);
                    assert_eq!(parsed.ipv6, ipv6);
                    assert_eq!(
                        (parsed.source, parsed.destination),
                        (path.source, path.destination)
                    );
                    assert_eq!((parsed.hop_limit, parsed.traffic_class), (64, 0x68));
                    assert_eq!(parsed.udp_source_port, 0xc123);
                    assert_eq!(parsed.destination_qpn(), 0x11);
                    let packet = Packet::parse(parsed.transport).unwrap();
                    assert_eq!(packet.payload.bytes(), Some(&payload[..]));
                    assert_eq!(packet.reth.unwrap().length, len as u32);
                }
            }
        }
    }

    #[test]
    fn ipv4_header_checksum_is_right_and_checked() {
        let mut bytes = frame(&path(false, None), b"data");
        assert_eq!(header_sum(&bytes[14..34]), 0xffff);
        bytes[24] ^= 1;
        assert!(Frame::parse(&bytes).is_none());
    }

    #[test]
    fn families_are_not_mixed() {
        let mut path = path(false, None);
        path.source = [1; 16];
        assert_eq!(Template::new(&path).err(), Some(PathError::MixedFamilies));
    }

    #[test]
    fn other_traffic_is_left_to_the_host() {
        let good = frame(&path(false, None), b"data");
        assert!(Frame::parse(&good).is_some());
        // Another port, another protocol, a fragment, a truncated frame.
        for (at, value) in [(36, 0x13), (23, 6), (20, 0x20)] {
            let mut other = good.clone();
            other[at] = value;
            assert!(Frame::parse(&other).is_none());
        }
        assert!(Frame::parse(&good[..good.len() - 1]).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(frame) = Frame::parse(&bytes) {
                let _ = frame.icrc_ok();
                let _ = Packet::parse(frame.transport);
            }
            let _ = Packet::parse(&bytes);
            let _ = icrc(&bytes);
            seal(&mut bytes.clone());
        }

        #[test]
        fn damaged_frames_are_parsed_without_panic_and_found_out(
            ipv6: bool,
            len in 0usize..64,
            cut in 0usize..200,
            flips in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..6),
        ) {
            let path = path(ipv6, None);
            let good = frame(&path, &vec![0x5a; len]);
            let mut bytes = good.clone();
            for (at, bit) in flips {
                bytes[at.index(good.len())] ^= 1 << bit;
            }
            bytes.truncate(cut.max(60));
            if let Some(frame) = Frame::parse(&bytes) {
                if frame.icrc_ok() && bytes.len() >= good.len() {
                    // Only what the CRC leaves out may differ.
                    let packet = Packet::parse(frame.transport).unwrap();
                    let sent = vec![0x5a; len];
                    prop_assert_eq!(packet.payload.bytes(), Some(&sent[..]));
                }
            }
        }
    }
}
