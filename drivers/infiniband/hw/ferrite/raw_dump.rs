// SPDX-License-Identifier: GPL-2.0

//! What the device has of an object, for administrators: its answer to a query, as it stands in the device
//! specification (`Documentation/device/layouts.md`).

use crate::{
    abi,
    cqp::{
        object,
        Answer, //
    },
    device::Ferrite,
    kernel_ext::errno,
    rdma,
    rdma::{
        Cq,
        Device,
        Mr,
        Qp,
        RawDump,
        Srq, //
    },
};
use kernel::prelude::*;

/// Dumps the device's answer to a query for an object.
fn dump<A>(dev: &Device<Ferrite>, number: u32, dump: &mut RawDump<'_>) -> Result
where
    A: Answer<Request = abi::ObjectNumber>,
{
    if !dev.has(abi::FEATURE_CONTEXTS) {
        return Err(errno::eopnotsupp());
    }
    let answer: A = dev.hw.query(&object(number)).map_err(told)?;
    dump.put(answer.as_bytes())
}

/// What is told to who lists objects, of one that the device could not say anything of: one that it has no more,
/// or not yet, is left out.
fn told(error: Error) -> Error {
    match error {
        error if error == ENOENT => EAGAIN,
        error => error,
    }
}

impl rdma::RawDumpOps for Ferrite {
    fn dump_cq(cq: &Cq<Self>, room: &mut RawDump<'_>) -> Result {
        dump::<abi::CompletionQueueState>(cq.device(), cq.number(), room)
    }

    fn dump_qp(qp: &Qp<Self>, room: &mut RawDump<'_>) -> Result {
        dump::<abi::QueuePairState>(qp.device(), qp.number(), room)
    }

    fn dump_mr(mr: &Mr<Self>, room: &mut RawDump<'_>) -> Result {
        match mr.lkey() {
            // All of memory is no entry of the table.
            abi::TAG_ALL_MEMORY => Err(EAGAIN),
            tag => dump::<abi::TagState>(mr.device(), tag, room),
        }
    }
}

impl rdma::RawSrqDumpOps for Ferrite {
    fn dump_srq(srq: &Srq<Self>, room: &mut RawDump<'_>) -> Result {
        dump::<abi::SrqState>(srq.device(), srq.number(), room)
    }
}

#[kunit_tests(ferrite_raw_dump)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_has_no_more_is_left_out_and_no_other_mistake_is() {
        assert_eq!(told(ENOENT), EAGAIN);
        for error in [EIO, EINVAL, ENOMEM, EAGAIN] {
            assert_eq!(told(error), error);
        }
    }
}
