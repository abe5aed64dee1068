// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! A completion: what the device wrote, and what this process remembers of its work request.

use ferrite_abi::{
    CompletionEntry, CompletionOpcode, Plain, COMPLETION_CHECKSUM, COMPLETION_GRH,
    COMPLETION_IMMEDIATE, COMPLETION_INVALIDATED, COMPLETION_IPV6, COMPLETION_RECEIVE,
    COMPLETION_SRQ,
};

use crate::qp::Qp;
use crate::srq::Srq;
use crate::sys::*;
use crate::table::NumberTable;

/// An entry with what the work request's poster wants to know.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) entry: CompletionEntry,
    pub(crate) wr_id: u64,
    pub(crate) opcode: ibv_wc_opcode,
}

impl Completion {
    pub(crate) fn none() -> Self {
        Self {
            entry: CompletionEntry::zeroed(),
            wr_id: 0,
            opcode: 0,
        }
    }

    /// Immediate data in wire order, or the invalidated rkey, with the flag that says which. The
    /// verbs have one place for both: of an entry with both, the rkey is not told.
    fn immediate_or_rkey(&self) -> (u32, u32) {
        if self.entry.flags & COMPLETION_IMMEDIATE != 0 {
            // Four bytes are all that an operation of the verbs brings along.
            (self.entry.immediate as u32, IBV_WC_WITH_IMM)
        } else if self.entry.flags & COMPLETION_INVALIDATED != 0 {
            (self.entry.tag, IBV_WC_WITH_INV)
        } else {
            (0, 0)
        }
    }

    /// What `ibv_wc` has for immediate data or the invalidated rkey.
    pub(crate) fn imm_data(&self) -> __be32 {
        self.immediate_or_rkey().0
    }

    /// `ibv_wc_flags` of the entry.
    pub(crate) fn wc_flags(&self) -> u32 {
        let (_, mut flags) = self.immediate_or_rkey();
        if self.entry.flags & COMPLETION_GRH != 0 {
            flags |= IBV_WC_GRH;
        }
        if self.entry.flags & COMPLETION_CHECKSUM != 0 {
            flags |= IBV_WC_IP_CSUM_OK;
        }
        flags
    }
}

/// Where completions find what they are about: the tables of a context, which outlives its queues.
#[derive(Clone, Copy)]
pub(crate) struct QueuesByNumber {
    queue_pairs: *const NumberTable<Qp>,
    xrc_srqs: *const NumberTable<Srq>,
}

impl QueuesByNumber {
    /// # Safety
    ///
    /// The tables live as long as the result is used.
    pub(crate) unsafe fn new(queue_pairs: &NumberTable<Qp>, xrc_srqs: &NumberTable<Srq>) -> Self {
        Self {
            queue_pairs,
            xrc_srqs,
        }
    }

    /// Makes a completion of an entry, and frees the room of its work request; nothing, if nobody
    /// knows its queue pair.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the completion queue that the entry is of. Whoever destroys a queue
    /// pair or an XRC SRQ drops its entries under that lock before it frees it, so that what is found
    /// here is allocated.
    #[inline]
    pub(crate) unsafe fn resolve(&self, entry: CompletionEntry) -> Option<Completion> {
        if is_shared_receive(&entry) {
            // SAFETY: the tables live (`new`); the SRQ does, as the caller holds the lock.
            if let Some(srq) = unsafe { (*self.xrc_srqs).get(entry.srqn).as_ref() } {
                // The queue pair may be another process's.
                return Some(received(entry, srq.done(entry.index)));
            }
        }
        // SAFETY: the tables live (`new`); the queue pair does, as the caller holds the lock.
        let qp = unsafe { (*self.queue_pairs).get(entry.qpn).as_ref() }?;
        Some(resolve(qp, entry))
    }
}

/// Whether an entry is of a receive from an SRQ.
#[inline]
pub(crate) fn is_shared_receive(entry: &CompletionEntry) -> bool {
    entry.flags & COMPLETION_RECEIVE != 0 && entry.flags & COMPLETION_SRQ != 0
}

/// A completion of a receive.
fn received(entry: CompletionEntry, wr_id: u64) -> Completion {
    Completion {
        entry,
        wr_id,
        opcode: if entry.opcode == CompletionOpcode::ReceiveWrite.number() {
            IBV_WC_RECV_RDMA_WITH_IMM
        } else {
            IBV_WC_RECV
        },
    }
}

/// Adds what the queue pair remembers of the work request, and frees its room.
#[inline]
fn resolve(qp: &Qp, entry: CompletionEntry) -> Completion {
    if entry.flags & COMPLETION_RECEIVE != 0 {
        let wr_id = match qp.srq() {
            Some(srq) => srq.done(entry.index),
            None => qp.receive_done(entry.index),
        };
        received(entry, wr_id)
    } else {
        let (wr_id, opcode) = qp.send_done(entry.index);
        Completion {
            entry,
            wr_id,
            opcode,
        }
    }
}

/// The service level of a received datagram. On Ethernet there is none; devices tell in its
/// place what the routing header is (IBTA annex 17, A17.4.5.1: a flag for IPv4, IPv6 or none), and
/// programs look for it there: UCX finds a datagram's destination by it.
pub(crate) fn service_level(entry: &CompletionEntry) -> u8 {
    /// UDP is below the transport header.
    const UDP: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    if entry.flags & COMPLETION_GRH == 0 {
        0
    } else if entry.flags & COMPLETION_IPV6 != 0 {
        UDP | IPV6
    } else {
        UDP | IPV4
    }
}
