// SPDX-License-Identifier: GPL-2.0

//! What devices can do for kernel users beyond what the core has names for.
//!
//! The core leaves some numbers to the drivers: flags of queue pairs, opcodes. What one of them means
//! by such a number need not be what another means. So a device says what it has of this, in bits of
//! `kernel_cap_flags` from the highest down, where the core assigns them from the lowest up; and
//! [`super::ulp`] uses none of the numbers on a device that has not said so. All of them are for
//! kernel users alone: the core takes none from processes.

use super::Access;
use crate::bindings;

flags! {
    /// Which of the extensions a device has.
    pub struct Extensions(u64) {
        /// [`QpCreateFlags::REGISTER_SEND`].
        REGISTER_SEND = 1 << 63,
        /// [`QpCreateFlags::REGISTER_DRAINS`]. A device with this refuses a registration whose key is
        /// that of no region of the domain, is in use, or is that of a region with room for fewer
        /// pages; it changes nothing then.
        REGISTER_DRAINS = 1 << 62,
        /// [`Access::ONE_TOUCH`].
        ONE_TOUCH = 1 << 61,
    }
}

/// All that there are.
const ALL: Extensions = Extensions::from_raw(7 << 61);

impl Extensions {
    /// Those that a device says it has.
    pub(super) fn of(raw: &bindings::ib_device_attr) -> Self {
        Self::from_raw(raw.kernel_cap_flags & ALL.as_raw())
    }
}

/// The first of the flags that are a driver's.
const FIRST_CREATE_FLAG: u32 = bindings::ib_qp_create_flags_IB_QP_CREATE_RESERVED_START as u32;

flags! {
    /// What a queue pair of the kernel is to be able to do: flags of its creation.
    pub struct QpCreateFlags(u32) {
        /// A registration by work request that fails drains the send queue: state SQD, what is posted
        /// after it is flushed until the consumer goes on (SQD->RTS). Without it the queue pair is
        /// in error. What is flushed has its completion, signalled or not: the completion queue needs
        /// room for all sends that may be posted.
        REGISTER_DRAINS = FIRST_CREATE_FLAG,
        /// There is room for work requests that register and send, [`REGISTER_SEND_OPCODE`].
        REGISTER_SEND = FIRST_CREATE_FLAG << 1,
    }
}

/// The opcode of an `ib_reg_wr` that registers and then sends its own `sg_list`, and has the peer
/// invalidate `invalidate_rkey` unless that is zero. It completes as a send.
pub const REGISTER_SEND_OPCODE: u32 = bindings::ib_wr_opcode_IB_WR_RESERVED1;

impl Access {
    /// What is registered by work request ends with the first message that writes to it.
    pub const ONE_TOUCH: Self = Self::from_raw(1 << 30);
}

const _: () = {
    // Nothing that the core knows, and nothing that it lets a process ask for.
    assert!(bindings::ib_access_flags_IB_ACCESS_SUPPORTED & Access::ONE_TOUCH.as_raw() == 0);
    assert!(QpCreateFlags::REGISTER_SEND.as_raw() > QpCreateFlags::REGISTER_DRAINS.as_raw());
};
