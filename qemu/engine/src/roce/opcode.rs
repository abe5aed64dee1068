// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The opcodes of the base transport header: what follows each and what it is for.

use super::headers::{
    AETH_LEN, ATOMIC_ACK_ETH_LEN, ATOMIC_ETH_LEN, BTH_LEN, DETH_LEN, FETH_LEN, IETH_LEN,
    IMMEDIATE_LEN, RETH_LEN, XRCETH_LEN,
};

/// The transport service an opcode belongs to (bits 7:5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection.
    Xrc,
}

/// What a packet does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Part of a send.
    Send,
    /// Part of an RDMA write.
    Write,
    /// A request to read.
    ReadRequest,
    /// Part of the answer to a read.
    ReadResponse,
    /// An acknowledgement, positive or negative.
    Acknowledge,
    /// The answer to an atomic operation.
    AtomicAcknowledge,
    /// A request to compare and swap.
    CompareSwap,
    /// A request to fetch and add.
    FetchAdd,
    /// A request to write eight bytes at once.
    AtomicWrite,
    /// A request to make what was written visible.
    Flush,
}

/// Where a packet stands in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The message is one packet.
    Only,
}

impl Position {
    /// Whether a message starts with this packet.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends with this packet.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }

    /// The position of a packet that starts and ends a message as said.
    pub const fn of(starts: bool, ends: bool) -> Self {
        match (starts, ends) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }
}

/// What is known of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpcodeInfo {
    /// The name the specification gives it, for logs.
    pub name: &'static str,
    /// Its service.
    pub service: Service,
    /// What it does.
    pub operation: Operation,
    /// Its place in the message.
    pub position: Position,
    /// The extension headers in `HAS_*` bits; they follow in the order of the bits, but those of
    /// extended connections and of flushes come before all others.
    pub headers: u16,
    /// Whether data may follow the headers.
    pub payload: bool,
}

/// A datagram header follows.
pub const HAS_DETH: u16 = 1 << 0;
/// An RDMA header follows.
pub const HAS_RETH: u16 = 1 << 1;
/// An atomic header follows.
pub const HAS_ATOMIC: u16 = 1 << 2;
/// An acknowledgement header follows.
pub const HAS_AETH: u16 = 1 << 3;
/// An atomic acknowledgement header follows.
pub const HAS_ATOMIC_ACK: u16 = 1 << 4;
/// Immediate data follow.
pub const HAS_IMMEDIATE: u16 = 1 << 5;
/// A tag to invalidate follows.
pub const HAS_IETH: u16 = 1 << 6;
/// The header of extended connections follows.
pub const HAS_XRCETH: u16 = 1 << 7;
/// A flush header follows; before the RDMA header.
pub const HAS_FETH: u16 = 1 << 8;

impl OpcodeInfo {
    /// Bytes of all transport headers, the base header included.
    pub const fn header_len(&self) -> usize {
        let mut len = BTH_LEN;
        let sizes = [
            (HAS_DETH, DETH_LEN),
            (HAS_RETH, RETH_LEN),
            (HAS_ATOMIC, ATOMIC_ETH_LEN),
            (HAS_AETH, AETH_LEN),
            (HAS_ATOMIC_ACK, ATOMIC_ACK_ETH_LEN),
            (HAS_IMMEDIATE, IMMEDIATE_LEN),
            (HAS_IETH, IETH_LEN),
            (HAS_XRCETH, XRCETH_LEN),
            (HAS_FETH, FETH_LEN),
        ];
        let mut i = 0;
        while i < sizes.len() {
            if self.headers & sizes[i].0 != 0 {
                len += sizes[i].1;
            }
            i += 1;
        }
        len
    }

    /// Whether the header with this `HAS_*` bit follows.
    pub const fn has(&self, header: u16) -> bool {
        self.headers & header != 0
    }

    /// Whether the packet goes from requester to responder.
    pub const fn is_request(&self) -> bool {
        !matches!(
            self.operation,
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge
        )
    }
}

/// The opcodes this engine speaks, by number.
pub struct Opcode;

macro_rules! opcodes {
    ($(
        $number:literal $name:ident $service:ident $operation:ident $position:ident
        [$($header:ident)*] $payload:literal;
    )*) => {
        #[allow(missing_docs)]
        impl Opcode {
            $( pub const $name: u8 = $number; )*
        }

        const fn table() -> [Option<OpcodeInfo>; 256] {
            let mut table = [None; 256];
            $( table[$number] = Some(OpcodeInfo {
                name: stringify!($name),
                service: Service::$service,
                operation: Operation::$operation,
                position: Position::$position,
                headers: 0 $( | $header )*,
                payload: $payload,
            }); )*
            table
        }
    };
}

opcodes! {
    0x00 RC_SEND_FIRST           Rc Send First   [] true;
    0x01 RC_SEND_MIDDLE          Rc Send Middle  [] true;
    0x02 RC_SEND_LAST            Rc Send Last    [] true;
    0x03 RC_SEND_LAST_IMMEDIATE  Rc Send Last    [HAS_IMMEDIATE] true;
    0x04 RC_SEND_ONLY            Rc Send Only    [] true;
    0x05 RC_SEND_ONLY_IMMEDIATE  Rc Send Only    [HAS_IMMEDIATE] true;
    0x06 RC_WRITE_FIRST          Rc Write First  [HAS_RETH] true;
    0x07 RC_WRITE_MIDDLE         Rc Write Middle [] true;
    0x08 RC_WRITE_LAST           Rc Write Last   [] true;
    0x09 RC_WRITE_LAST_IMMEDIATE Rc Write Last   [HAS_IMMEDIATE] true;
    0x0a RC_WRITE_ONLY           Rc Write Only   [HAS_RETH] true;
    0x0b RC_WRITE_ONLY_IMMEDIATE Rc Write Only   [HAS_RETH HAS_IMMEDIATE] true;
    0x0c RC_READ_REQUEST         Rc ReadRequest Only    [HAS_RETH] false;
    0x0d RC_READ_RESPONSE_FIRST  Rc ReadResponse First  [HAS_AETH] true;
    0x0e RC_READ_RESPONSE_MIDDLE Rc ReadResponse Middle [] true;
    0x0f RC_READ_RESPONSE_LAST   Rc ReadResponse Last   [HAS_AETH] true;
    0x10 RC_READ_RESPONSE_ONLY   Rc ReadResponse Only   [HAS_AETH] true;
    0x11 RC_ACKNOWLEDGE          Rc Acknowledge Only    [HAS_AETH] false;
    0x12 RC_ATOMIC_ACKNOWLEDGE   Rc AtomicAcknowledge Only [HAS_AETH HAS_ATOMIC_ACK] false;
    0x13 RC_COMPARE_SWAP         Rc CompareSwap Only    [HAS_ATOMIC] false;
    0x14 RC_FETCH_ADD            Rc FetchAdd Only       [HAS_ATOMIC] false;
    0x16 RC_SEND_LAST_INVALIDATE Rc Send Last    [HAS_IETH] true;
    0x17 RC_SEND_ONLY_INVALIDATE Rc Send Only    [HAS_IETH] true;
    0x1c RC_FLUSH                Rc Flush Only          [HAS_FETH HAS_RETH] false;
    0x1d RC_ATOMIC_WRITE         Rc AtomicWrite Only    [HAS_RETH] true;
    0x20 UC_SEND_FIRST           Uc Send First   [] true;
    0x21 UC_SEND_MIDDLE          Uc Send Middle  [] true;
    0x22 UC_SEND_LAST            Uc Send Last    [] true;
    0x23 UC_SEND_LAST_IMMEDIATE  Uc Send Last    [HAS_IMMEDIATE] true;
    0x24 UC_SEND_ONLY            Uc Send Only    [] true;
    0x25 UC_SEND_ONLY_IMMEDIATE  Uc Send Only    [HAS_IMMEDIATE] true;
    0x26 UC_WRITE_FIRST          Uc Write First  [HAS_RETH] true;
    0x27 UC_WRITE_MIDDLE         Uc Write Middle [] true;
    0x28 UC_WRITE_LAST           Uc Write Last   [] true;
    0x29 UC_WRITE_LAST_IMMEDIATE Uc Write Last   [HAS_IMMEDIATE] true;
    0x2a UC_WRITE_ONLY           Uc Write Only   [HAS_RETH] true;
    0x2b UC_WRITE_ONLY_IMMEDIATE Uc Write Only   [HAS_RETH HAS_IMMEDIATE] true;
    0x64 UD_SEND_ONLY            Ud Send Only    [HAS_DETH] true;
    0x65 UD_SEND_ONLY_IMMEDIATE  Ud Send Only    [HAS_DETH HAS_IMMEDIATE] true;
    0xa0 XRC_SEND_FIRST Xrc Send First [HAS_XRCETH] true;
    0xa1 XRC_SEND_MIDDLE Xrc Send Middle [HAS_XRCETH] true;
    0xa2 XRC_SEND_LAST Xrc Send Last [HAS_XRCETH] true;
    0xa3 XRC_SEND_LAST_IMMEDIATE Xrc Send Last [HAS_XRCETH HAS_IMMEDIATE] true;
    0xa4 XRC_SEND_ONLY Xrc Send Only [HAS_XRCETH] true;
    0xa5 XRC_SEND_ONLY_IMMEDIATE Xrc Send Only [HAS_XRCETH HAS_IMMEDIATE] true;
    0xa6 XRC_WRITE_FIRST Xrc Write First [HAS_XRCETH HAS_RETH] true;
    0xa7 XRC_WRITE_MIDDLE Xrc Write Middle [HAS_XRCETH] true;
    0xa8 XRC_WRITE_LAST Xrc Write Last [HAS_XRCETH] true;
    0xa9 XRC_WRITE_LAST_IMMEDIATE Xrc Write Last [HAS_XRCETH HAS_IMMEDIATE] true;
    0xaa XRC_WRITE_ONLY Xrc Write Only [HAS_XRCETH HAS_RETH] true;
    0xab XRC_WRITE_ONLY_IMMEDIATE Xrc Write Only [HAS_XRCETH HAS_RETH HAS_IMMEDIATE] true;
    0xac XRC_READ_REQUEST Xrc ReadRequest Only [HAS_XRCETH HAS_RETH] false;
    0xad XRC_READ_RESPONSE_FIRST Xrc ReadResponse First [HAS_AETH] true;
    0xae XRC_READ_RESPONSE_MIDDLE Xrc ReadResponse Middle [] true;
    0xaf XRC_READ_RESPONSE_LAST Xrc ReadResponse Last [HAS_AETH] true;
    0xb0 XRC_READ_RESPONSE_ONLY Xrc ReadResponse Only [HAS_AETH] true;
    0xb1 XRC_ACKNOWLEDGE Xrc Acknowledge Only [HAS_AETH] false;
    0xb2 XRC_ATOMIC_ACKNOWLEDGE Xrc AtomicAcknowledge Only [HAS_AETH HAS_ATOMIC_ACK] false;
    0xb3 XRC_COMPARE_SWAP Xrc CompareSwap Only [HAS_XRCETH HAS_ATOMIC] false;
    0xb4 XRC_FETCH_ADD Xrc FetchAdd Only [HAS_XRCETH HAS_ATOMIC] false;
    0xb6 XRC_SEND_LAST_INVALIDATE Xrc Send Last [HAS_XRCETH HAS_IETH] true;
    0xb7 XRC_SEND_ONLY_INVALIDATE Xrc Send Only [HAS_XRCETH HAS_IETH] true;
}

static TABLE: [Option<OpcodeInfo>; 256] = table();

impl Opcode {
    /// What is known of opcode `number`; `None` when it is not spoken here.
    pub fn info(number: u8) -> Option<&'static OpcodeInfo> {
        TABLE[number as usize].as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_lengths_follow_the_specification() {
        for (opcode, len) in [
            (Opcode::RC_SEND_MIDDLE, 12),
            (Opcode::RC_SEND_ONLY_IMMEDIATE, 16),
            (Opcode::RC_SEND_ONLY_INVALIDATE, 16),
            (Opcode::RC_WRITE_FIRST, 28),
            (Opcode::RC_WRITE_ONLY_IMMEDIATE, 32),
            (Opcode::RC_READ_REQUEST, 28),
            (Opcode::RC_READ_RESPONSE_MIDDLE, 12),
            (Opcode::RC_READ_RESPONSE_LAST, 16),
            (Opcode::RC_ACKNOWLEDGE, 16),
            (Opcode::RC_ATOMIC_ACKNOWLEDGE, 24),
            (Opcode::RC_FETCH_ADD, 40),
            (Opcode::RC_FLUSH, 32),
            (Opcode::RC_ATOMIC_WRITE, 28),
            (Opcode::UD_SEND_ONLY, 20),
            (Opcode::UD_SEND_ONLY_IMMEDIATE, 24),
            (Opcode::XRC_SEND_MIDDLE, 16),
            (Opcode::XRC_WRITE_ONLY_IMMEDIATE, 36),
            (Opcode::XRC_ACKNOWLEDGE, 16),
        ] {
            assert_eq!(Opcode::info(opcode).map(OpcodeInfo::header_len), Some(len));
        }
        assert!(Opcode::info(0x15).is_none());
        assert!(Opcode::info(0xff).is_none());
    }
}
