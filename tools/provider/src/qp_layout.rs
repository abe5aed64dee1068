// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What a queue pair is asked to take, and what it gets: sizes and places in its buffer.

use core::ffi::c_int;
use core::mem::size_of;

use ferrite_abi::{
    blocks_per_registering_request, blocks_per_request, longest_before_entries, opcode_part,
    SendHeader, SendOpcode, Sge, UverbsContextResponse, BLOCK_SIZE, UVERBS_QP_LISTS,
};

use crate::ring::{ReceiveRing, Ring};
use crate::sys::*;

/// Sizes and places in a queue pair's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpLayout {
    pub(crate) capacity: ibv_qp_cap,
    /// The send queue, at the start; its entries are blocks.
    pub(crate) send: Ring,
    /// The receive queue, behind it.
    pub(crate) receive: ReceiveRing,
}

/// What its work requests can be, which makes some longer than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requests {
    /// UD: sends that name their peer.
    Ud,
    /// All that the verbs have for a connection.
    Connected,
    /// The same, and registrations of lists.
    Registering,
}

impl Requests {
    pub(crate) fn of(qp_type: ibv_qp_type, flags: u8) -> Self {
        if qp_type == IBV_QPT_UD {
            Self::Ud
        } else if flags & UVERBS_QP_LISTS != 0 {
            Self::Registering
        } else {
            Self::Connected
        }
    }

    pub(crate) fn are_datagrams(self) -> bool {
        self == Self::Ud
    }

    /// Blocks that are enough for each of them.
    fn blocks(self, sges: usize, inline: usize) -> usize {
        match self {
            Self::Registering => blocks_per_registering_request(sges, inline),
            _ => blocks_per_request(self.are_datagrams(), sges, inline),
        }
    }

    /// The most bytes that any of them has before its entries.
    fn before_entries(self) -> usize {
        match self {
            Self::Registering => {
                size_of::<SendHeader>() + opcode_part(SendOpcode::RegisterListSend, false)
            }
            _ => longest_before_entries(self.are_datagrams()),
        }
    }
}

impl QpLayout {
    pub(crate) fn new(
        wanted: &ibv_qp_cap,
        limits: &UverbsContextResponse,
        requests: Requests,
    ) -> Result<Self, c_int> {
        if wanted.max_send_sge > limits.max_sge || wanted.max_inline_data > limits.max_inline {
            return Err(libc::EINVAL);
        }
        // Every work request may be of any kind: what is promised holds for all of them.
        let request_blocks = requests.blocks(
            wanted.max_send_sge.max(1) as usize,
            wanted.max_inline_data as usize,
        );
        let send_blocks = (wanted.max_send_wr.max(1) as usize)
            .checked_mul(request_blocks)
            .ok_or(libc::EINVAL)?;
        let send = Ring::new(0, send_blocks, BLOCK_SIZE, limits.sq_max_log_blocks.min(24))?;
        let receive = ReceiveRing::new(
            send.end(),
            wanted.max_recv_wr.max(1),
            wanted.max_recv_sge,
            limits,
        )?;

        let bytes = request_blocks * BLOCK_SIZE;
        let room = bytes - requests.before_entries();
        // Of what takes inline data a write has most before them; datagrams are sends only.
        let datagram = requests.are_datagrams();
        let with_data = if datagram {
            SendOpcode::Send
        } else {
            SendOpcode::Write
        };
        let inline_room = bytes - size_of::<SendHeader>() - opcode_part(with_data, datagram);
        Ok(Self {
            capacity: ibv_qp_cap {
                max_send_wr: send.entries / request_blocks as u32,
                max_recv_wr: receive.ring.entries,
                max_send_sge: ((room / size_of::<Sge>()) as u32).min(limits.max_sge),
                max_recv_sge: receive.max_sge,
                max_inline_data: (inline_room as u32).min(limits.max_inline),
            },
            send,
            receive,
        })
    }

    /// Bytes of both rings.
    pub(crate) fn rings(&self) -> usize {
        self.receive.ring.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cap, limits};
    use ferrite_abi::{
        blocks_for, has_entries, is_long_registration, MAX_BLOCKS, UVERBS_QP_REGISTER_DRAINS,
    };

    #[test]
    fn only_connections_that_asked_have_room_for_lists() {
        for (qp_type, flags, requests) in [
            (IBV_QPT_UD, 0, Requests::Ud),
            (IBV_QPT_RC, 0, Requests::Connected),
            (IBV_QPT_UC, UVERBS_QP_REGISTER_DRAINS, Requests::Connected),
            (IBV_QPT_RC, UVERBS_QP_LISTS, Requests::Registering),
            (IBV_QPT_XRC_SEND, u8::MAX, Requests::Registering),
        ] {
            assert_eq!(Requests::of(qp_type, flags), requests);
        }
    }

    #[test]
    fn every_capacity_asked_for_is_met() {
        for wr in [1, 2, 3, 100, 128, 4096] {
            for sge in [0, 1, 2, 3, 7, 16] {
                for inline in [0, 1, 32, 33, 96, 97, 256] {
                    for requests in [Requests::Connected, Requests::Ud, Requests::Registering] {
                        is_met(&cap(wr, wr, sge, sge, inline), requests);
                    }
                }
            }
        }
    }

    fn is_met(wanted: &ibv_qp_cap, requests: Requests) {
        let layout = QpLayout::new(wanted, &limits(), requests).unwrap();
        let datagram = requests.are_datagrams();
        let given = layout.capacity;
        assert!(given.max_send_wr >= wanted.max_send_wr);
        assert!(given.max_recv_wr >= wanted.max_recv_wr);
        assert!(given.max_send_sge >= wanted.max_send_sge);
        assert!(given.max_recv_sge >= wanted.max_recv_sge);
        assert!(given.max_inline_data >= wanted.max_inline_data);
        // The largest work request of every kind, as often as promised, fits in the ring.
        let sends = [SendOpcode::Send, SendOpcode::SendImmediate];
        for opcode in (0..u8::MAX).filter_map(SendOpcode::from_number) {
            // Programs register lists alone, and only where they have asked for it.
            let registers = requests == Requests::Registering && opcode != SendOpcode::RegisterSend;
            if datagram && !sends.contains(&opcode) || is_long_registration(opcode) && !registers {
                continue;
            }
            let entries = given.max_send_sge as usize * size_of::<Sge>();
            let inline = given.max_inline_data as usize;
            let payload = match opcode {
                SendOpcode::AtomicWrite => 8,
                SendOpcode::Read | SendOpcode::CompareSwap | SendOpcode::FetchAdd => entries,
                SendOpcode::RegisterList | SendOpcode::RegisterListSend => entries,
                _ if has_entries(opcode) => entries.max(inline),
                _ => 0,
            };
            let blocks = blocks_for(opcode, datagram, payload);
            assert!(blocks <= MAX_BLOCKS, "{opcode:?}, {given:?}");
            assert!(
                blocks * given.max_send_wr as usize <= layout.send.entries as usize,
                "{opcode:?}, {given:?}"
            );
        }
        let receive = layout.receive.ring;
        assert!(16 + 16 * given.max_recv_sge <= receive.stride);
        assert_eq!(receive.offset % 64, 0);
        assert_eq!(receive.offset, layout.send.entries as usize * BLOCK_SIZE);
        let length = (receive.entries * receive.stride) as usize;
        assert_eq!(layout.rings(), receive.offset + length);
    }

    /// What fits without taking more blocks is promised, and no more than that.
    #[test]
    fn capacities_are_those_of_the_blocks() {
        let given = |sge, inline, requests| {
            let layout = QpLayout::new(&cap(64, 1, sge, 1, inline), &limits(), requests);
            let layout = layout.unwrap();
            let capacity = layout.capacity;
            (
                layout.send.entries,
                capacity.max_send_wr,
                capacity.max_send_sge,
                capacity.max_inline_data,
            )
        };
        // A block has 16 bytes after the parts of a write and of an atomic.
        assert_eq!(given(1, 0, Requests::Connected), (64, 64, 1, 16));
        assert_eq!(given(1, 17, Requests::Connected), (128, 64, 5, 80));
        assert_eq!(given(16, 256, Requests::Connected), (512, 102, 16, 256));
        // The part of a datagram begins in one block and ends in the next.
        assert_eq!(given(1, 0, Requests::Ud), (128, 64, 3, 48));
        assert_eq!(given(3, 48, Requests::Ud), (128, 64, 3, 48));
        assert_eq!(given(16, 256, Requests::Ud), (512, 85, 16, 256));
        // The parts of a list and of its message fill a block.
        assert_eq!(given(1, 0, Requests::Registering), (128, 64, 4, 80));
        assert_eq!(given(3, 80, Requests::Registering), (256, 85, 8, 144));
        assert_eq!(given(16, 256, Requests::Registering), (512, 85, 16, 256));
    }

    #[test]
    fn capacities_beyond_the_limits_are_refused() {
        for wanted in [
            cap(1, 1, 17, 1, 0),
            cap(1, 1, 1, 17, 0),
            cap(1, 1, 1, 1, 257),
            cap((1 << 17) + 1, 1, 1, 1, 0),
            cap(u32::MAX, 1, 16, 1, 0),
            cap(1, (1 << 15) + 1, 1, 1, 0),
            cap(1, u32::MAX, 1, 1, 0),
        ] {
            assert_eq!(
                QpLayout::new(&wanted, &limits(), Requests::Connected).err(),
                Some(libc::EINVAL),
                "{wanted:?}"
            );
        }
        let most = cap(1 << 17, 1 << 15, 1, 1, 0);
        assert!(QpLayout::new(&most, &limits(), Requests::Connected).is_ok());
        // With lists each takes two blocks.
        assert!(QpLayout::new(&most, &limits(), Requests::Registering).is_err());
    }
}
