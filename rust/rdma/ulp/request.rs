// SPDX-License-Identifier: GPL-2.0

//! Work requests: what is asked for, and what it came to.

use super::memory::{Buffer, Mr};
use super::Remote;
use crate::bindings;
use crate::rdma::consumer::request::{rdma_wr, reg_wr, send_wr};
use crate::rdma::{Access, Extension, SendOp, WcOpcode, WcStatus};
use core::ops::Range;
use core::ptr;
use kernel::prelude::*;
use kernel::sync::Arc;

/// The registration of a region, of [`Op::reg_mr`] and [`Op::driver`].
#[derive(Clone, Copy)]
pub struct RegMr<'r> {
    pub(super) mr: &'r Arc<Mr>,
    pub(super) access: Access,
}

/// What a send work request does.
pub type Op<'r> = SendOp<RegMr<'r>, Extension>;

impl<'r> Op<'r> {
    /// The registration of a region, with what may be done to it then.
    pub fn reg_mr(mr: &'r Arc<Mr>, access: Access) -> Self {
        Self::RegMr(RegMr { mr, access })
    }

    /// The same by the opcode of an extension, on a queue pair that has it, with what the driver takes as
    /// immediate data or key (`ib_send_wr::ex`).
    pub fn driver(extension: Extension, mr: &'r Arc<Mr>, access: Access, ex: u32) -> Self {
        Self::Driver {
            opcode: extension,
            registration: RegMr { mr, access },
            ex,
        }
    }

    pub(super) fn registration(&self) -> Option<RegMr<'r>> {
        match *self {
            Self::RegMr(registration) | Self::Driver { registration, .. } => Some(registration),
            _ => None,
        }
    }
}

/// The local memory of a work request.
#[derive(Clone)]
pub enum LocalMemory<'r> {
    /// None.
    None,
    /// Part of a buffer, which needs no registration.
    Buffer(&'r Arc<Buffer>, Range<usize>),
    /// Part of a region, by the key that it has now.
    Region(&'r Arc<Mr>, Range<usize>),
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether and why not.
    pub status: WcStatus,
    /// What it was, of one that succeeded; else nobody says.
    pub opcode: Option<WcOpcode>,
    /// The device's own number for why not.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// The key that the peer invalidated.
    pub invalidated: Option<u32>,
}

impl Outcome {
    /// What a completion says.
    pub(in crate::rdma) fn of(wc: &bindings::ib_wc) -> Self {
        let flags = wc.wc_flags as u32;
        // SAFETY: All views of the union are plain data.
        let ex = unsafe { *wc.ex.invalidate_rkey.as_ref() };
        let status = WcStatus::from_raw(wc.status).unwrap_or(WcStatus::General);
        Self {
            status,
            opcode: WcOpcode::from_raw(wc.opcode).filter(|_| status == WcStatus::Success),
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            imm_data: (flags & bindings::ib_wc_flags_IB_WC_WITH_IMM != 0)
                .then_some(u32::from_be(ex)),
            invalidated: (flags & bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE != 0).then_some(ex),
        }
    }
}

/// A send work request with room for any kind.
pub(super) enum Request {
    Plain(bindings::ib_send_wr),
    Rdma(bindings::ib_rdma_wr),
    Atomic(bindings::ib_atomic_wr),
    Reg(bindings::ib_reg_wr),
}

impl Request {
    /// The form of an operation; a registration is under `key`, or that of its region.
    pub(super) fn new(op: &Op<'_>, key: Option<u32>) -> Self {
        use bindings as b;

        let rdma = |opcode, remote, imm| Self::Rdma(rdma_wr(opcode, remote, imm));
        let atomic = |opcode, remote: Remote, compare_add, swap| {
            let mut wr: b::ib_atomic_wr = pin_init::zeroed();
            wr.wr = send_wr(opcode, 0);
            wr.remote_addr = remote.addr;
            wr.rkey = remote.rkey;
            wr.compare_add = compare_add;
            wr.swap = swap;
            Self::Atomic(wr)
        };
        let register = |opcode, ex, RegMr { mr, access }: RegMr<'_>| {
            let key = key.unwrap_or_else(|| mr.rkey());
            Self::Reg(reg_wr(opcode, ex, mr.raw.as_ptr(), key, access))
        };
        match *op {
            Op::Send => Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND, 0)),
            Op::SendWithImm(imm) => {
                Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND_WITH_IMM, imm.to_be()))
            }
            Op::SendWithInvalidate(key) => {
                Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND_WITH_INV, key))
            }
            Op::RdmaWrite(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_WRITE, remote, 0),
            Op::RdmaWriteWithImm(remote, imm) => rdma(
                b::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
                remote,
                imm.to_be(),
            ),
            Op::RdmaRead(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_READ, remote, 0),
            Op::CompareSwap {
                remote,
                compare,
                swap,
            } => atomic(
                b::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
                remote,
                compare,
                swap,
            ),
            Op::FetchAdd { remote, add } => {
                atomic(b::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD, remote, add, 0)
            }
            Op::RegMr(registration) => register(b::ib_wr_opcode_IB_WR_REG_MR, 0, registration),
            Op::Driver {
                opcode: extension,
                registration,
                ex,
            } => {
                // `Qp::prepare` has looked whether there is one.
                let opcode = extension.opcode().unwrap_or(b::ib_wr_opcode_IB_WR_REG_MR);
                register(opcode, ex, registration)
            }
            Op::LocalInvalidate(key) => Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_LOCAL_INV, key)),
        }
    }

    /// The part that all kinds begin with (`rust/rdma/work.rs` looks whether they do).
    pub(super) fn raw(&mut self) -> *mut bindings::ib_send_wr {
        match self {
            Self::Plain(wr) => wr,
            Self::Rdma(wr) => ptr::from_mut(wr).cast(),
            Self::Atomic(wr) => ptr::from_mut(wr).cast(),
            Self::Reg(wr) => ptr::from_mut(wr).cast(),
        }
    }

    /// Puts it in front of `next`, to be done with the memory of `sge` and completed by `cqe`. Returns
    /// the whole list.
    pub(super) fn link(
        &mut self,
        cqe: *mut bindings::ib_cqe,
        sge: Option<&mut bindings::ib_sge>,
        next: *mut bindings::ib_send_wr,
    ) -> *mut bindings::ib_send_wr {
        let raw = self.raw();
        // SAFETY: All kinds begin with an `ib_send_wr`, which `self` owns.
        let wr = unsafe { &mut *raw };
        wr.num_sge = c_int::from(sge.is_some());
        wr.sg_list = sge.map_or(ptr::null_mut(), ptr::from_mut);
        wr.next = next;
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wr.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
        raw
    }
}
