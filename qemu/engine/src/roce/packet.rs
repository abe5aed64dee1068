// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A received transport packet: the base header, the headers its opcode calls for, the payload.

use super::headers::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Reth, AETH_LEN, ATOMIC_ACK_ETH_LEN,
    ATOMIC_ETH_LEN, BTH_LEN, DETH_LEN, FETH_LEN, IETH_LEN, IMMEDIATE_LEN, RETH_LEN, XRCETH_LEN,
};
use super::opcode::{
    Opcode, OpcodeInfo, HAS_AETH, HAS_ATOMIC, HAS_ATOMIC_ACK, HAS_DETH, HAS_FETH, HAS_IETH,
    HAS_IMMEDIATE, HAS_RETH, HAS_XRCETH,
};
use crate::loan::{Loan, Payload};
use std::sync::Arc;

/// Why a packet cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketError {
    /// Shorter than its headers and padding.
    Truncated,
    /// The header version is not 0.
    Version,
    /// The opcode is not known; the base header is.
    Opcode(Bth),
}

/// A transport packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The base header.
    pub bth: Bth,
    /// What its opcode means.
    pub info: &'static OpcodeInfo,
    /// Flush header.
    pub feth: Option<Feth>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Acknowledgement header.
    pub aeth: Option<Aeth>,
    /// Atomic header.
    pub atomic: Option<AtomicEth>,
    /// Atomic acknowledgement header.
    pub atomic_ack: Option<AtomicAckEth>,
    /// Immediate data, the four bytes as they stand on the wire.
    pub immediate: Option<[u8; 4]>,
    /// The tag to invalidate.
    pub invalidate: Option<u32>,
    /// Datagram header.
    pub deth: Option<Deth>,
    /// Extended connections: the shared receive queue.
    pub srqn: Option<u32>,
    /// The data, without padding.
    pub payload: Payload<'a>,
}

impl<'a> Packet<'a> {
    /// Takes apart a packet from its base header to its padding (without invariant CRC).
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let bth = Bth::parse(bytes).ok_or(PacketError::Truncated)?;
        if bth.version != 0 {
            return Err(PacketError::Version);
        }
        let info = Opcode::info(bth.opcode).ok_or(PacketError::Opcode(bth))?;
        let mut packet = Self {
            bth,
            info,
            feth: None,
            reth: None,
            aeth: None,
            atomic: None,
            atomic_ack: None,
            immediate: None,
            invalidate: None,
            deth: None,
            srqn: None,
            payload: Payload::Bytes(&[]),
        };
        let rest = packet
            .parse_extended(&bytes[BTH_LEN..])
            .ok_or(PacketError::Truncated)?;
        let len = rest
            .len()
            .checked_sub(bth.pad as usize)
            .ok_or(PacketError::Truncated)?;
        packet.payload = Payload::Bytes(&rest[..len]);
        Ok(packet)
    }

    /// The packet with payload that is lent, and so is not behind its headers.
    pub fn with_loan(self, loan: &'a Arc<Loan>) -> Result<Self, PacketError> {
        if !self.payload.is_empty() || self.bth.pad != 0 || !self.info.payload {
            return Err(PacketError::Truncated);
        }
        let payload = Payload::Lent(loan);
        Ok(Self { payload, ..self })
    }

    fn parse_extended(&mut self, mut rest: &'a [u8]) -> Option<&'a [u8]> {
        let info = self.info;
        if info.has(HAS_XRCETH) {
            self.srqn = Some(u32::from_be_bytes(*rest.first_chunk()?) & 0xff_ffff);
            rest = &rest[XRCETH_LEN..];
        }
        if info.has(HAS_FETH) {
            self.feth = Some(Feth::parse(rest)?);
            rest = &rest[FETH_LEN..];
        }
        if info.has(HAS_DETH) {
            self.deth = Some(Deth::parse(rest)?);
            rest = &rest[DETH_LEN..];
        }
        if info.has(HAS_RETH) {
            self.reth = Some(Reth::parse(rest)?);
            rest = &rest[RETH_LEN..];
        }
        if info.has(HAS_ATOMIC) {
            self.atomic = Some(AtomicEth::parse(rest)?);
            rest = &rest[ATOMIC_ETH_LEN..];
        }
        if info.has(HAS_AETH) {
            self.aeth = Some(Aeth::parse(rest)?);
            rest = &rest[AETH_LEN..];
        }
        if info.has(HAS_ATOMIC_ACK) {
            self.atomic_ack = Some(AtomicAckEth::parse(rest)?);
            rest = &rest[ATOMIC_ACK_ETH_LEN..];
        }
        if info.has(HAS_IMMEDIATE) {
            self.immediate = Some(*rest.first_chunk()?);
            rest = &rest[IMMEDIATE_LEN..];
        }
        if info.has(HAS_IETH) {
            self.invalidate = Some(u32::from_be_bytes(*rest.first_chunk()?));
            rest = &rest[IETH_LEN..];
        }
        Some(rest)
    }
}
