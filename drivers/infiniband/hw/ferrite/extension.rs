// SPDX-License-Identifier: GPL-2.0

//! What the device can do for kernel users beyond what the RDMA core has names for, in the numbers that it
//! leaves to drivers: the one place where they have a meaning.
//!
//! Users in the kernel compile this file, too, as those in C would include a header; so it depends on the
//! abstractions alone.

use crate::{
    bindings,
    rdma::{
        ulp,
        Access,
        DriverNumbers,
        Extension,
        QpCreateFlags, //
    },
};
use kernel::sync::Arc;

/// One that a device has whose `kernel_cap_flags` have that bit.
const fn said_by(bit: u32, numbers: DriverNumbers) -> Extension {
    // SAFETY: Bits from 61 up of `kernel_cap_flags` are set by this driver alone: the core assigns them from
    // the lowest up, and no other driver has any of its own. The numbers are read as below in `qp/layout.rs`,
    // `wqe.rs` and `mr.rs`; a registration keeps its region busy until it is complete, as any other.
    unsafe { Extension::new(1 << bit, numbers) }
}

/// The first of the flags that are a driver's.
const FIRST_CREATE_FLAG: u32 = bindings::ib_qp_create_flags_IB_QP_CREATE_RESERVED_START as u32;

/// Registration (FRWR) and message in one work request, [`register_send`].
pub const REGISTER_SEND: Extension = said_by(
    63,
    DriverNumbers::NONE
        .with_create_flags(QpCreateFlags::from_raw(FIRST_CREATE_FLAG << 1))
        .with_opcode(REGISTER_SEND_OPCODE),
);

/// A registration by work request that fails drains the send queue: state SQD, what is posted after it is
/// flushed until the consumer goes on (SQD->RTS). Without it the queue pair is in error. What is flushed
/// has its completion, signalled or not: the completion queue needs room for all sends that may be posted.
///
/// A device with this refuses a registration whose key is that of no region of the domain, is in use, or is
/// that of a region with room for fewer pages; it changes nothing then.
pub const REGISTER_DRAINS: Extension = said_by(
    62,
    DriverNumbers::NONE.with_create_flags(QpCreateFlags::from_raw(FIRST_CREATE_FLAG)),
);

/// What is registered by work request with [`ONE_TOUCH_ACCESS`] ends with the first message that writes to
/// it.
pub const ONE_TOUCH: Extension = said_by(61, DriverNumbers::NONE.with_access(ONE_TOUCH_ACCESS));

/// The opcode of an `ib_reg_wr` that registers and then sends its own `sg_list`, and has the peer
/// invalidate `invalidate_rkey` unless that is zero. It completes as a send.
pub const REGISTER_SEND_OPCODE: u32 = bindings::ib_wr_opcode_IB_WR_RESERVED1;

/// See [`ONE_TOUCH`].
pub const ONE_TOUCH_ACCESS: Access = Access::from_raw(1 << 30);

/// The key that a request of [`REGISTER_SEND_OPCODE`] has the peer invalidate.
pub fn invalidated_by(ex: u32) -> Option<u32> {
    (ex != 0).then_some(ex)
}

/// The registration of a region, then a message, in one, on a queue pair with [`REGISTER_SEND`].
/// `invalidate` is a key of the peer that the message invalidates.
pub fn register_send(mr: &Arc<ulp::Mr>, access: Access, invalidate: Option<u32>) -> ulp::Op<'_> {
    ulp::Op::driver(REGISTER_SEND, mr, access, invalidate.unwrap_or(0))
}
