// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What an ordinary frame says of itself: looked at once, for its hash, its checksums and its
//! segments.

use super::toeplitz::{self, Key};
use ferrite_abi::{
    HASH_IPV4, HASH_IPV6, HASH_TCP_IPV4, HASH_TCP_IPV6, HASH_UDP_IPV4, HASH_UDP_IPV6,
};

/// Bytes of an Ethernet header, and of an 802.1Q tag.
pub(crate) const ETHERNET: usize = 14;
pub(crate) const TAG: usize = 4;
/// Bytes in front of the tag: both addresses.
pub(crate) const ADDRESSES: usize = 12;
/// What is in front of the tag control information.
pub(super) const TAG_TYPE: [u8; 2] = [0x81, 0x00];

/// Protocols that are looked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Where its checksum is.
    fn checksum(self) -> usize {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// An IP packet in a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// Version 6, else 4.
    pub(crate) is_v6: bool,
    /// Where its header begins.
    pub(crate) start: usize,
    /// What is in it and where that begins; none for fragments and what is not looked into.
    pub(crate) transport: Option<(Protocol, usize)>,
}

/// A frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headers {
    /// Tag control information.
    pub(crate) vlan: Option<u16>,
    pub(crate) packet: Option<Packet>,
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Adds 16-bit words to a sum; an odd byte is the first of a word.
fn sum(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    let mut sum: u64 = 0;
    for word in &mut words {
        sum += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    }
    let mut last = [0; 4];
    let rest = words.remainder();
    last[..rest.len()].copy_from_slice(rest);
    sum + u64::from(u32::from_be_bytes(last))
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The ones' complement sum of some bytes.
pub(super) fn checksum(bytes: &[u8]) -> u16 {
    sum_from(0, bytes)
}

/// The same that goes on from another sum.
pub(super) fn sum_from(start: u64, bytes: &[u8]) -> u16 {
    fold(start + sum(bytes))
}

impl Packet {
    fn parse(frame: &[u8], start: usize, ethertype: u16) -> Option<Self> {
        let header = frame.get(start..)?;
        let (is_v6, protocol, transport, whole) = match ethertype {
            0x0800 => {
                let first = *header.first()?;
                let length = usize::from(first & 0xf) * 4;
                if first >> 4 != 4 || length < 20 || header.len() < length {
                    return None;
                }
                // Neither a fragment nor followed by one.
                (false, header[9], length, be16(header, 6)? & 0x3fff == 0)
            }
            0x86dd => {
                if *header.first()? >> 4 != 6 || header.len() < 40 {
                    return None;
                }
                (true, header[6], 40, true)
            }
            _ => return None,
        };
        let (protocol, least) = match protocol {
            6 => (Some(Protocol::Tcp), 20),
            17 => (Some(Protocol::Udp), 8),
            _ => (None, 0),
        };
        let fits = whole && header.len() >= transport + least;
        Some(Self {
            is_v6,
            start,
            transport: protocol
                .filter(|_| fits)
                .map(|protocol| (protocol, start + transport)),
        })
    }

    /// Both addresses, the source first.
    fn addresses<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        let (at, length) = if self.is_v6 { (8, 32) } else { (12, 8) };
        frame
            .get(self.start + at..self.start + at + length)
            .unwrap_or_default()
    }

    /// The sum over the pseudo header of `length` bytes of a protocol.
    pub(super) fn pseudo(&self, frame: &[u8], protocol: Protocol, length: usize) -> u64 {
        sum(self.addresses(frame)) + u64::from(protocol.number()) + length as u64
    }

    /// Where the packet ends, if that is in the frame; padding may follow.
    fn end(&self, frame: &[u8]) -> Option<usize> {
        let length = if self.is_v6 {
            40 + usize::from(be16(frame, self.start + 4)?)
        } else {
            usize::from(be16(frame, self.start + 2)?)
        };
        Some(self.start + length).filter(|end| *end <= frame.len())
    }

    /// Whether all checksums are there and right.
    fn checks(&self, frame: &[u8]) -> Option<bool> {
        let (protocol, at) = self.transport?;
        let end = self.end(frame)?;
        let header = frame.get(self.start..at)?;
        if !self.is_v6 && checksum(header) != 0xffff {
            return None;
        }
        let segment = frame.get(at..end)?;
        let stored = be16(segment, protocol.checksum())?;
        if protocol == Protocol::Udp
            && (stored == 0 || usize::from(be16(segment, 4)?) != segment.len())
        {
            // It has none, or is of another length than IP says: what the sum is of is not clear.
            return None;
        }
        let pseudo = self.pseudo(frame, protocol, segment.len());
        Some(sum_from(pseudo, segment) == 0xffff)
    }
}

impl Headers {
    pub(crate) fn parse(frame: &[u8]) -> Self {
        let mut ethertype = be16(frame, ADDRESSES);
        let mut start = ETHERNET;
        let mut vlan = None;
        if ethertype == Some(u16::from_be_bytes(TAG_TYPE)) {
            vlan = be16(frame, ETHERNET);
            ethertype = be16(frame, ETHERNET + 2);
            start += TAG;
        }
        let packet = ethertype.and_then(|ethertype| Packet::parse(frame, start, ethertype));
        Self { vlan, packet }
    }

    /// Whether the frame has checksums, all of which are right.
    pub(crate) fn checksums_good(&self, frame: &[u8]) -> bool {
        self.packet.and_then(|packet| packet.checks(frame)) == Some(true)
    }

    /// The hash and what it is of; none where no type that is wanted fits.
    pub(crate) fn hash(&self, frame: &[u8], key: &Key, types: u16) -> Option<(u32, u16)> {
        let packet = self.packet?;
        let addresses = packet.addresses(frame);
        let (both, with_tcp, with_udp) = if packet.is_v6 {
            (HASH_IPV6, HASH_TCP_IPV6, HASH_UDP_IPV6)
        } else {
            (HASH_IPV4, HASH_TCP_IPV4, HASH_UDP_IPV4)
        };
        let with_ports = packet.transport.and_then(|(protocol, at)| {
            let kind = match protocol {
                Protocol::Tcp => with_tcp,
                Protocol::Udp => with_udp,
            };
            Some((kind, frame.get(at..at + 4)?)).filter(|_| types & kind != 0)
        });
        let mut input = [0; 36];
        let held = input.get_mut(..addresses.len())?;
        held.copy_from_slice(addresses);
        let mut length = addresses.len();
        let kind = match with_ports {
            Some((kind, ports)) => {
                input.get_mut(length..length + 4)?.copy_from_slice(ports);
                length += 4;
                kind
            }
            None if types & both != 0 => both,
            None => return None,
        };
        Some((toeplitz::hash(key, input.get(..length)?), kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_can_be_looked_at(mut bytes: Vec<u8>, types: u16, ethertype in 0usize..4) {
            if let (Some(at), Some(chosen)) = (
                bytes.get_mut(12..14),
                [[8, 0], [0x86, 0xdd], [0x81, 0]].get(ethertype),
            ) {
                at.copy_from_slice(chosen);
            }
            let headers = Headers::parse(&bytes);
            headers.checksums_good(&bytes);
            headers.hash(&bytes, &[7; 40], types);
        }
    }

    #[test]
    fn sums_are_of_words_in_network_order() {
        // RFC 1071, section 3.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&bytes), 0xddf2);
        assert_eq!(checksum(&bytes[..7]), 0xddf2 - 0xf7);
        assert_eq!(checksum(&[]), 0);
    }
}
