// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The hash of redirection: Toeplitz, as receive-side scaling has it.

use ferrite_abi::REDIRECTION_KEY_SIZE;

/// The secret key.
pub type Key = [u8; REDIRECTION_KEY_SIZE];

/// The hash of `input`, of which the key is long enough for 36 bytes: two IPv6 addresses and two
/// ports. What is longer does not count.
pub fn hash(key: &Key, input: &[u8]) -> u32 {
    let [a, b, c, d, rest @ ..] = key;
    let mut window = u32::from_be_bytes([*a, *b, *c, *d]);
    let mut result = 0;
    for (byte, mut next) in input.iter().zip(rest.iter().copied()) {
        for bit in (0..8).rev() {
            if (byte >> bit) & 1 == 1 {
                result ^= window;
            }
            window = (window << 1) | u32::from(next >> 7);
            next <<= 1;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// The key and the vectors of Microsoft's "Verifying the RSS Hash Calculation".
    pub const KEY: Key = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    #[test]
    fn the_published_vectors_of_ipv4_are_met() {
        // Destination, source, hash of the addresses, hash with the ports.
        let vectors = [
            (
                "161.142.100.80",
                1766,
                "66.9.149.187",
                2794,
                0x323e_8fc2,
                0x51cc_c178,
            ),
            (
                "65.69.140.83",
                4739,
                "199.92.111.2",
                14230,
                0xd718_262a,
                0xc626_b0ea,
            ),
            (
                "12.22.207.184",
                38024,
                "24.19.198.95",
                12898,
                0xd2d0_a5de,
                0x5c2b_394a,
            ),
            (
                "209.142.163.6",
                2217,
                "38.27.205.30",
                48228,
                0x8298_9176,
                0xafc7_327f,
            ),
            (
                "202.188.127.2",
                1303,
                "153.39.163.191",
                44251,
                0x5d18_09c5,
                0x10e8_28a2,
            ),
        ];
        for (destination, to, source, from, addresses, ports) in vectors {
            let octets = |text: &str| text.parse::<Ipv4Addr>().unwrap().octets();
            let mut input = [octets(source), octets(destination)].concat();
            assert_eq!(hash(&KEY, &input), addresses, "{source} {destination}");
            input.extend(u16::to_be_bytes(from));
            input.extend(u16::to_be_bytes(to));
            assert_eq!(hash(&KEY, &input), ports, "{source} {destination}");
        }
    }

    #[test]
    fn the_published_vectors_of_ipv6_are_met() {
        let vectors = [
            (
                "3ffe:2501:200:3::1",
                1766,
                "3ffe:2501:200:1fff::7",
                2794,
                0x2cc1_8cd5,
                0x4020_7d3d,
            ),
            (
                "ff02::1",
                4739,
                "3ffe:501:8::260:97ff:fe40:efab",
                14230,
                0x0f0c_461c,
                0xdde5_1bbf,
            ),
            (
                "fe80::200:f8ff:fe21:67cf",
                38024,
                "3ffe:1900:4545:3:200:f8ff:fe21:67cf",
                44251,
                0x4b61_e985,
                0x02d1_feef,
            ),
        ];
        for (destination, to, source, from, addresses, ports) in vectors {
            let octets = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
            let mut input = [octets(source), octets(destination)].concat();
            assert_eq!(hash(&KEY, &input), addresses, "{source} {destination}");
            input.extend(u16::to_be_bytes(from));
            input.extend(u16::to_be_bytes(to));
            assert_eq!(hash(&KEY, &input), ports, "{source} {destination}");
        }
    }
}
