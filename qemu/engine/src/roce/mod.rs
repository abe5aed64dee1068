// SPDX-License-Identifier: Apache-2.0 OR MIT

//! RoCEv2 on the wire: Ethernet, IP, UDP, the InfiniBand transport headers and the invariant CRC.
//!
//! Names and layouts are those of the InfiniBand Architecture Specification, volume 1 (chapter 9
//! for the transport headers, annex A17 for RoCEv2). Nothing here keeps state: [`Frame`] and
//! [`Packet`] look at received bytes, [`Template`] writes the headers of a path.

mod frame;
mod headers;
mod icrc;
mod opcode;
mod packet;
mod template;

pub use frame::{
    gid_from_ipv4, ipv4_of_gid, seal, Frame, Gid, Mac, Medium, ROCE_UDP_PORT, VLAN_ID_MASK,
};
pub use headers::{Aeth, NakCode, AETH_LEN, CREDIT_UNLIMITED, PKEY_DEFAULT};
pub use headers::{
    AtomicAckEth, AtomicEth, Bth, Deth, Feth, Reth, Syndrome, ATOMIC_ACK_ETH_LEN, ATOMIC_ETH_LEN,
    BTH_LEN, DETH_LEN, FETH_LEN, IETH_LEN, IMMEDIATE_LEN, RETH_LEN, XRCETH_LEN,
};
pub use icrc::{icrc, ICRC_LEN};
pub use opcode::{Opcode, OpcodeInfo, Operation, Position, Service};
pub use packet::{Packet, PacketError};
pub use template::{Path, PathError, Template, MAX_HEADERS};

/// Sequence numbers of packets have 24 bits.
pub const PSN_MASK: u32 = 0xff_ffff;

/// `psn + n`, modulo 2^24.
pub const fn psn_add(psn: u32, n: u32) -> u32 {
    psn.wrapping_add(n) & PSN_MASK
}

/// How far `a` is ahead of `b` in the circle of sequence numbers; negative when it is behind.
pub const fn psn_diff(a: u32, b: u32) -> i32 {
    // The sign bit of the 24-bit difference becomes that of the result.
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_wrap_at_24_bits() {
        assert_eq!(psn_add(0xff_ffff, 1), 0);
        assert_eq!(psn_diff(0, 0xff_ffff), 1);
        assert_eq!(psn_diff(0xff_ffff, 0), -1);
        assert_eq!(psn_diff(0x7f_ffff, 0), 0x7f_ffff);
        assert_eq!(psn_diff(0x80_0000, 0), -0x80_0000);
    }
}
