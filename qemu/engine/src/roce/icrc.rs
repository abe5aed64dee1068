// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The invariant CRC (IBTA volume 1, chapter 7.8.1 and annex A17.3.3).
//!
//! It is the CRC-32 of Ethernet over the packet from the network header to the padding, preceded
//! by eight bytes of ones where InfiniBand has its local route header, with ones in place of every
//! field that a router may change. It follows the packet with its least significant byte first.

use super::frame::{IPV4_LEN, IPV6_LEN, UDP_LEN};
use super::headers::BTH_LEN;

/// Bytes of the invariant CRC.
pub const ICRC_LEN: usize = 4;

/// CRC-32 of eight bytes of ones.
const LOCAL_ROUTE_HEADER: u32 = 0x2144_df1c;

/// The invariant CRC of `packet`: IP, UDP and transport headers, payload and padding.
///
/// `None` when that is neither IPv4 nor IPv6 or too short to hold a base transport header.
pub fn icrc(packet: &[u8]) -> Option<u32> {
    let mut masked = [0; IPV6_LEN + UDP_LEN + BTH_LEN];
    let ip = match packet.first()? >> 4 {
        4 => IPV4_LEN,
        6 => IPV6_LEN,
        _ => return None,
    };
    let bth = ip + UDP_LEN;
    let masked = &mut masked[..bth + BTH_LEN];
    masked.copy_from_slice(packet.get(..bth + BTH_LEN)?);
    if ip == IPV4_LEN {
        masked[1] = 0xff; // Type of service.
        masked[8] = 0xff; // Time to live.
        masked[10..12].fill(0xff); // Header checksum.
    } else {
        masked[0] |= 0x0f; // Traffic class and flow label.
        masked[1..4].fill(0xff);
        masked[7] = 0xff; // Hop limit.
    }
    masked[ip + 6..ip + 8].fill(0xff); // UDP checksum.
    masked[bth + 4] = 0xff; // Congestion bits and the reserved ones beside them.
    let mut hasher = crc32fast::Hasher::new_with_initial(LOCAL_ROUTE_HEADER);
    hasher.update(masked);
    hasher.update(&packet[bth + BTH_LEN..]);
    Some(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CRC of Ethernet, one bit at a time, as the reference.
    fn crc_by_bits(bytes: impl IntoIterator<Item = u8>) -> u32 {
        let mut crc = u32::MAX;
        for byte in bytes {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = if crc & 1 != 0 {
                    (crc >> 1) ^ 0xedb8_8320
                } else {
                    crc >> 1
                };
            }
        }
        !crc
    }

    #[test]
    fn reference_gives_the_published_check_value() {
        assert_eq!(crc_by_bits(*b"123456789"), 0xcbf4_3926);
        assert_eq!(crc_by_bits([0xff; 8]), LOCAL_ROUTE_HEADER);
    }

    #[test]
    fn ipv4_matches_the_reference() {
        // RC SEND only of 4 bytes, written out field by field.
        let packet = [
            0x45, 0x02, 0x00, 0x30, 0x12, 0x34, 0x40, 0x00, 0x40, 0x11, 0xab, 0xcd, // IP
            10, 0, 0, 1, 10, 0, 0, 2, // addresses
            0xc0, 0x00, 0x12, 0xb7, 0x00, 0x1c, 0x55, 0xaa, // UDP
            0x04, 0x40, 0xff, 0xff, 0xc0, 0x00, 0x00, 0x11, 0x80, 0x00, 0x00, 0x07, // BTH
            1, 2, 3, 4, // payload
        ];
        let mut masked = packet;
        for at in [1, 8, 10, 11, 26, 27, 32] {
            masked[at] = 0xff;
        }
        let expected = crc_by_bits([0xff; 8].into_iter().chain(masked));
        assert_eq!(icrc(&packet), Some(expected));
        // Every masked bit may change on the way, no other may.
        for at in 0..packet.len() {
            for bit in 0..8 {
                let mut changed = packet;
                changed[at] ^= 1 << bit;
                let masked_bit = [1, 8, 10, 11, 26, 27, 32].contains(&at);
                assert_eq!(
                    icrc(&changed) == Some(expected),
                    masked_bit,
                    "byte {at} bit {bit}"
                );
            }
        }
    }

    #[test]
    fn ipv6_matches_the_reference() {
        let mut packet = vec![0x60, 0x12, 0x34, 0x56, 0x00, 0x1c, 17, 64];
        packet.extend((0..32).map(|n| n as u8));
        packet.extend([0xc0, 0x01, 0x12, 0xb7, 0x00, 0x1c, 0, 0]);
        packet.extend([0x11, 0, 0xff, 0xff, 0, 1, 2, 3, 0, 4, 5, 6, 0x1f, 0, 0, 9]);
        let mut masked = packet.clone();
        masked[0] |= 0xf;
        for at in [1, 2, 3, 7, 46, 47, 52] {
            masked[at] = 0xff;
        }
        let expected = crc_by_bits([0xff; 8].into_iter().chain(masked));
        assert_eq!(icrc(&packet), Some(expected));
    }

    #[test]
    fn too_short_or_of_another_version_is_refused() {
        assert_eq!(icrc(&[]), None);
        assert_eq!(icrc(&[0x45; 39]), None);
        assert!(icrc(&[0x45; 40]).is_some());
        assert_eq!(icrc(&[0x55; 90]), None);
    }
}
