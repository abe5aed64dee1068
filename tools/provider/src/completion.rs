// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! A completion: what the device wrote, and what this process remembers of its work request.

use ferrite_abi::{
    CompletionEntry, CompletionOpcode, Plain, COMPLETION_CHECKSUM, COMPLETION_GRH,
    COMPLETION_IMMEDIATE, COMPLETION_INVALIDATED, COMPLETION_IPV6, COMPLETION_RECEIVE,
    COMPLETION_SRQ,
};

use crate::cq_ring::Written;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::sys::*;
use crate::table::NumberTable;

/// An entry with what the work request's poster wants to know.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) entry: CompletionEntry,
    pub(crate) finished: Finished,
}

impl Completion {
    #[inline]
    pub(crate) fn new(entry: &Written<'_>, finished: Finished) -> Self {
        Self {
            entry: entry.copy(),
            finished,
        }
    }

    pub(crate) fn none() -> Self {
        Self {
            entry: CompletionEntry::zeroed(),
            finished: Finished {
                wr_id: 0,
                opcode: 0,
            },
        }
    }

    /// What `ibv_wc` has for immediate data or the invalidated rkey.
    pub(crate) fn imm_data(&self) -> __be32 {
        self.immediate_and_flags().0
    }

    /// `ibv_wc_flags` of the entry.
    pub(crate) fn wc_flags(&self) -> u32 {
        self.immediate_and_flags().1
    }

    fn immediate_and_flags(&self) -> (__be32, u32) {
        let entry = &self.entry;
        immediate_and_flags(entry.flags, || entry.immediate, || entry.tag)
    }
}

/// What `ibv_wc` has for immediate data (in wire order) or the invalidated rkey, and `ibv_wc_flags`, which
/// say which of the two it is. The verbs have one place for both: of an entry with both, the rkey is not
/// told.
#[inline]
pub(crate) fn immediate_and_flags(
    flags: u16,
    immediate: impl FnOnce() -> u64,
    tag: impl FnOnce() -> u32,
) -> (__be32, u32) {
    const TOLD: u16 =
        COMPLETION_IMMEDIATE | COMPLETION_INVALIDATED | COMPLETION_GRH | COMPLETION_CHECKSUM;
    if flags & TOLD == 0 {
        return (0, 0);
    }
    let (value, mut told) = if flags & COMPLETION_IMMEDIATE != 0 {
        // Four bytes are all that an operation of the verbs brings along.
        (immediate() as u32, IBV_WC_WITH_IMM)
    } else if flags & COMPLETION_INVALIDATED != 0 {
        (tag(), IBV_WC_WITH_INV)
    } else {
        (0, 0)
    };
    if flags & COMPLETION_GRH != 0 {
        told |= IBV_WC_GRH;
    }
    if flags & COMPLETION_CHECKSUM != 0 {
        told |= IBV_WC_IP_CSUM_OK;
    }
    (value, told)
}

/// What a work request was that an entry says is done.
#[derive(Clone, Copy)]
pub(crate) struct Finished {
    pub(crate) wr_id: u64,
    pub(crate) opcode: ibv_wc_opcode,
}

/// A queue pair that was found by its number, to be found again without the table.
pub(crate) struct Last {
    qpn: u32,
    qp: *const Qp,
}

// SAFETY: who follows the pointer has its own reasons (`QueuesByNumber::resolve`).
unsafe impl Send for Last {}

impl Last {
    pub(crate) fn none() -> Self {
        Self {
            qpn: 0,
            qp: core::ptr::null(),
        }
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

    /// A queue pair is not found for the completion queue `home` any more, whose lock the caller holds.
    pub(crate) fn leave(&self, qp: &Qp, home: *const ibv_cq) {
        // SAFETY: the table lives (`new`).
        unsafe { (*self.queue_pairs).leave(qp.qpn, qp, home) };
    }

    /// As [`QueuesByNumber::leave`], of an XRC SRQ.
    pub(crate) fn leave_xrc_srq(&self, srq: &Srq, home: *const ibv_cq) {
        // SAFETY: the table lives (`new`).
        unsafe { (*self.xrc_srqs).leave(srq.srqn, srq, home) };
    }

    /// Finds what an entry of the completion queue `home` says is done, and frees the room of its work
    /// request; nothing, if it names nothing whose completions come there.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of `home`, which `last` is of. Whoever destroys a queue pair or an XRC
    /// SRQ drops its entries and `last` and has it leave `home`, all while it holds that lock once, before
    /// it frees it: what is found here is allocated, and so is what was found since.
    #[inline(always)]
    pub(crate) unsafe fn resolve(
        &self,
        entry: &Written<'_>,
        last: &mut Last,
        home: *const ibv_cq,
    ) -> Option<Finished> {
        let (qpn, flags) = (entry.qpn(), entry.flags());
        let shared = flags & SHARED_RECEIVE == SHARED_RECEIVE;
        if shared {
            // SAFETY: the tables live (`new`); the SRQ does, as the caller holds the lock.
            if let Some(srq) = unsafe { (*self.xrc_srqs).get(entry.srqn(), home).as_ref() } {
                // The queue pair may be another process's.
                return Some(received(entry, srq.done(entry.index())));
            }
        }
        if last.qpn != qpn || last.qp.is_null() {
            // SAFETY: the table lives (`new`).
            let qp = unsafe { (*self.queue_pairs).get(qpn, home) };
            *last = Last { qpn, qp };
        }
        // SAFETY: it is null, or was found for `home`, which it has not left since, or else nothing were
        // remembered: the queue pair lives, as the caller holds the lock.
        let qp = unsafe { last.qp.as_ref() }?;
        let index = entry.index();
        Some(if flags & COMPLETION_RECEIVE == 0 {
            let (wr_id, opcode) = qp.send_done(index);
            Finished { wr_id, opcode }
        } else {
            let wr_id = match qp.srq() {
                Some(srq) => srq.done(index),
                None => qp.receive_done(index),
            };
            received(entry, wr_id)
        })
    }
}

/// Flags of a receive from an SRQ.
const SHARED_RECEIVE: u16 = COMPLETION_RECEIVE | COMPLETION_SRQ;

/// Whether an entry is of a receive from an SRQ.
#[inline]
pub(crate) fn is_shared_receive(entry: &CompletionEntry) -> bool {
    entry.flags & SHARED_RECEIVE == SHARED_RECEIVE
}

/// A receive that is done.
#[inline]
fn received(entry: &Written<'_>, wr_id: u64) -> Finished {
    Finished {
        wr_id,
        opcode: if entry.opcode() == CompletionOpcode::ReceiveWrite.number() {
            IBV_WC_RECV_RDMA_WITH_IMM
        } else {
            IBV_WC_RECV
        },
    }
}

/// The service level of a received datagram. On Ethernet there is none; devices tell in its
/// place what the routing header is (IBTA annex 17, A17.4.5.1: a flag for IPv4, IPv6 or none), and
/// programs look for it there: UCX finds a datagram's destination by it.
#[inline]
pub(crate) fn service_level(flags: u16) -> u8 {
    /// UDP is below the transport header.
    const UDP: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    if flags & COMPLETION_GRH == 0 {
        0
    } else if flags & COMPLETION_IPV6 != 0 {
        UDP | IPV6
    } else {
        UDP | IPV4
    }
}
