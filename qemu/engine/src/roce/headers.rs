// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The transport headers (IBTA volume 1, chapter 9.2 to 9.6). All fields are big-endian.

/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
/// Bytes of the RDMA extended header.
pub const RETH_LEN: usize = 16;
/// Bytes of the acknowledgement header.
pub const AETH_LEN: usize = 4;
/// Bytes of the atomic header.
pub const ATOMIC_ETH_LEN: usize = 28;
/// Bytes of the atomic acknowledgement header.
pub const ATOMIC_ACK_ETH_LEN: usize = 8;
/// Bytes of immediate data.
pub const IMMEDIATE_LEN: usize = 4;
/// Bytes of the invalidation header.
pub const IETH_LEN: usize = 4;
/// Bytes of the header of extended connections.
pub const XRCETH_LEN: usize = 4;
/// Bytes of the flush header.
pub const FETH_LEN: usize = 4;
/// Bytes of the datagram header.
pub const DETH_LEN: usize = 8;

/// The partition key of the only partition: the default one, full member.
pub const PKEY_DEFAULT: u16 = 0xffff;

/// The credit count of an ACK that says nothing about credits.
pub const CREDIT_UNLIMITED: u8 = 31;

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// The base transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bth {
    /// See [`super::Opcode`].
    pub opcode: u8,
    /// The requester wants an event at the responder.
    pub solicited: bool,
    /// Path migration state; always set, as no path migrates.
    pub migrated: bool,
    /// Bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// Transport header version; 0.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Destination queue pair number, 24 bits.
    pub qpn: u32,
    /// The requester wants an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
}

impl Bth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let flags = *bytes.get(1)?;
        let last = be32(bytes, 8)?;
        Some(Self {
            opcode: bytes[0],
            solicited: flags & 0x80 != 0,
            migrated: flags & 0x40 != 0,
            pad: (flags >> 4) & 3,
            version: flags & 0xf,
            pkey: be16(bytes, 2)?,
            qpn: be32(bytes, 4)? & 0xff_ffff,
            ack_request: last >> 31 != 0,
            psn: last & 0xff_ffff,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; BTH_LEN] {
        let mut bytes = [0; BTH_LEN];
        bytes[0] = self.opcode;
        bytes[1] = ((self.solicited as u8) << 7)
            | ((self.migrated as u8) << 6)
            | ((self.pad & 3) << 4)
            | (self.version & 0xf);
        bytes[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        bytes[4..8].copy_from_slice(&(self.qpn & 0xff_ffff).to_be_bytes());
        let last = ((self.ack_request as u32) << 31) | (self.psn & 0xff_ffff);
        bytes[8..12].copy_from_slice(&last.to_be_bytes());
        bytes
    }
}

/// The RDMA extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Address at the responder.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub length: u32,
}

impl Reth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            address: be64(bytes, 0)?,
            rkey: be32(bytes, 8)?,
            length: be32(bytes, 12)?,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; RETH_LEN] {
        let mut bytes = [0; RETH_LEN];
        bytes[0..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// Why a responder refuses a request (chapter 9.7.5.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NakCode {
    /// A packet is missing.
    Sequence,
    /// The request is malformed or not supported.
    InvalidRequest,
    /// The key, address or right is wrong.
    RemoteAccess,
    /// The responder failed.
    RemoteOperation,
}

/// The meaning of an acknowledgement (table 45).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// All is well up to here; the credit count.
    Ack(u8),
    /// No receive buffer; the timer code.
    ReceiverNotReady(u8),
    /// Refused.
    Nak(NakCode),
    /// A value the specification reserves.
    Reserved(u8),
}

impl Syndrome {
    /// The meaning of the number.
    pub const fn from_number(number: u8) -> Self {
        let value = number & 0x1f;
        match number >> 5 {
            0 => Self::Ack(value),
            1 => Self::ReceiverNotReady(value),
            3 => match value {
                0 => Self::Nak(NakCode::Sequence),
                1 => Self::Nak(NakCode::InvalidRequest),
                2 => Self::Nak(NakCode::RemoteAccess),
                3 => Self::Nak(NakCode::RemoteOperation),
                _ => Self::Reserved(number),
            },
            _ => Self::Reserved(number),
        }
    }

    /// The number for this meaning.
    pub const fn number(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 0x1f,
            Self::ReceiverNotReady(timer) => 0x20 | (timer & 0x1f),
            Self::Nak(NakCode::Sequence) => 0x60,
            Self::Nak(NakCode::InvalidRequest) => 0x61,
            Self::Nak(NakCode::RemoteAccess) => 0x62,
            Self::Nak(NakCode::RemoteOperation) => 0x63,
            Self::Reserved(number) => number,
        }
    }
}

/// The acknowledgement header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// What is said.
    pub syndrome: Syndrome,
    /// Messages completed by the responder, 24 bits.
    pub msn: u32,
}

impl Aeth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let word = be32(bytes, 0)?;
        Some(Self {
            syndrome: Syndrome::from_number((word >> 24) as u8),
            msn: word & 0xff_ffff,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; AETH_LEN] {
        (((self.syndrome.number() as u32) << 24) | (self.msn & 0xff_ffff)).to_be_bytes()
    }
}

/// The atomic header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address at the responder.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// The value to store or to add.
    pub operand: u64,
    /// The value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            address: be64(bytes, 0)?,
            rkey: be32(bytes, 8)?,
            operand: be64(bytes, 12)?,
            compare: be64(bytes, 20)?,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; ATOMIC_ETH_LEN] {
        let mut bytes = [0; ATOMIC_ETH_LEN];
        bytes[0..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.operand.to_be_bytes());
        bytes[20..28].copy_from_slice(&self.compare.to_be_bytes());
        bytes
    }
}

/// The atomic acknowledgement header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicAckEth {
    /// What the memory held before the operation.
    pub original: u64,
}

impl AtomicAckEth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            original: be64(bytes, 0)?,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; ATOMIC_ACK_ETH_LEN] {
        self.original.to_be_bytes()
    }
}

/// The flush header (annex A19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feth {
    /// What is asked for, four bits.
    pub placement: u8,
    /// Of what, two bits.
    pub selectivity: u8,
}

impl Feth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let word = be32(bytes, 0)?;
        Some(Self {
            placement: (word & 0xf) as u8,
            selectivity: ((word >> 4) & 3) as u8,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; FETH_LEN] {
        (u32::from(self.placement & 0xf) | (u32::from(self.selectivity & 3) << 4)).to_be_bytes()
    }
}

/// The datagram header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// The sender's queue pair number, 24 bits.
    pub source_qpn: u32,
}

impl Deth {
    /// Reads the header at the front of `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            qkey: be32(bytes, 0)?,
            source_qpn: be32(bytes, 4)? & 0xff_ffff,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; DETH_LEN] {
        let mut bytes = [0; DETH_LEN];
        bytes[0..4].copy_from_slice(&self.qkey.to_be_bytes());
        bytes[4..8].copy_from_slice(&(self.source_qpn & 0xff_ffff).to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_header_round_trips_and_has_its_bits_in_place() {
        let bth = Bth {
            opcode: 0x04,
            solicited: true,
            migrated: true,
            pad: 3,
            version: 0,
            pkey: 0xffff,
            qpn: 0x12_3456,
            ack_request: true,
            psn: 0xab_cdef,
        };
        let bytes = bth.to_bytes();
        assert_eq!(
            bytes,
            [0x04, 0xf0, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef]
        );
        assert_eq!(Bth::parse(&bytes), Some(bth));
        assert_eq!(Bth::parse(&bytes[..11]), None);
    }

    #[test]
    fn every_syndrome_round_trips() {
        for number in 0..=255u8 {
            assert_eq!(Syndrome::from_number(number).number(), number);
        }
        assert_eq!(Syndrome::from_number(0x1f), Syndrome::Ack(CREDIT_UNLIMITED));
        assert_eq!(
            Syndrome::from_number(0x62),
            Syndrome::Nak(NakCode::RemoteAccess)
        );
    }

    #[test]
    fn extended_headers_round_trip() {
        let reth = Reth {
            address: 0x0102_0304_0506_0708,
            rkey: 0x0a0b_0c0d,
            length: 0x8000_0000,
        };
        let bytes = reth.to_bytes();
        assert_eq!(bytes[..9], [1, 2, 3, 4, 5, 6, 7, 8, 0x0a]);
        assert_eq!(Reth::parse(&bytes), Some(reth));
        let atomic = AtomicEth {
            address: 1,
            rkey: 2,
            operand: 3,
            compare: u64::MAX,
        };
        assert_eq!(AtomicEth::parse(&atomic.to_bytes()), Some(atomic));
        let aeth = Aeth {
            syndrome: Syndrome::ReceiverNotReady(12),
            msn: 0xff_ffff,
        };
        assert_eq!(aeth.to_bytes(), [0x2c, 0xff, 0xff, 0xff]);
        assert_eq!(Aeth::parse(&aeth.to_bytes()), Some(aeth));
        let deth = Deth {
            qkey: 0x8001_0000,
            source_qpn: 1,
        };
        assert_eq!(Deth::parse(&deth.to_bytes()), Some(deth));
        let feth = Feth {
            placement: 2,
            selectivity: 1,
        };
        assert_eq!(feth.to_bytes(), [0, 0, 0, 0x12]);
        assert_eq!(Feth::parse(&feth.to_bytes()), Some(feth));
        let ack = AtomicAckEth { original: 77 };
        assert_eq!(AtomicAckEth::parse(&ack.to_bytes()), Some(ack));
    }
}
