// SPDX-License-Identifier: GPL-2.0

//! Work requests as the core takes them.

use crate::bindings;
use crate::rdma::{Access, Remote};
use kernel::prelude::*;

/// The C form of a request that has no more than this; `ex` is a key, or immediate data as they are on the wire.
pub(in crate::rdma) fn send_wr(opcode: bindings::ib_wr_opcode, ex: u32) -> bindings::ib_send_wr {
    let mut wr: bindings::ib_send_wr = pin_init::zeroed();
    wr.opcode = opcode;
    // SAFETY: All views of the union are four bytes of plain data.
    unsafe { *wr.ex.invalidate_rkey.as_mut() = ex };
    wr
}

/// That of one that reads or writes the peer's memory.
pub(in crate::rdma) fn rdma_wr(
    opcode: bindings::ib_wr_opcode,
    remote: Remote,
    ex: u32,
) -> bindings::ib_rdma_wr {
    let mut wr: bindings::ib_rdma_wr = pin_init::zeroed();
    wr.wr = send_wr(opcode, ex);
    wr.remote_addr = remote.addr;
    wr.rkey = remote.rkey;
    wr
}

/// That of a registration.
pub(in crate::rdma) fn reg_wr(
    opcode: bindings::ib_wr_opcode,
    ex: u32,
    mr: *mut bindings::ib_mr,
    key: u32,
    access: Access,
) -> bindings::ib_reg_wr {
    let mut wr: bindings::ib_reg_wr = pin_init::zeroed();
    wr.wr = send_wr(opcode, ex);
    wr.mr = mr;
    wr.key = key;
    wr.access = access.as_raw() as c_int;
    wr
}
