// SPDX-License-Identifier: GPL-2.0

//! What the device itself has of an object, as bytes, for administrators who look for a mistake.
//!
//! The core gives it to nobody without `CAP_NET_ADMIN` (`rdma resource show qp -r`).

use super::{kind, CqOps, Driver, Kind, MrOps, Object, Ops, QpOps, SrqOps};
use super::{Cq, Mr, Qp, Srq};
use crate::bindings;
use core::marker::PhantomData;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;

/// Dumps of completion queues, queue pairs and regions.
///
/// Each may be called while the object is being destroyed, and may sleep. What fails with `EAGAIN` is left
/// out of a list; any other error ends it.
pub trait RawDumpOps: CqOps + QpOps + MrOps {
    /// Dumps a completion queue.
    fn dump_cq(cq: &Cq<Self>, dump: &mut RawDump<'_>) -> Result;

    /// Dumps a queue pair.
    fn dump_qp(qp: &Qp<Self>, dump: &mut RawDump<'_>) -> Result;

    /// Dumps a region.
    fn dump_mr(mr: &Mr<Self>, dump: &mut RawDump<'_>) -> Result;
}

/// Dumps of shared receive queues, likewise.
pub trait RawSrqDumpOps: SrqOps {
    /// Dumps a shared receive queue.
    fn dump_srq(srq: &Srq<Self>, dump: &mut RawDump<'_>) -> Result;
}

impl<D: RawDumpOps> Ops<D> {
    /// Offers dumps of completion queues, queue pairs and regions.
    pub const fn with_raw_dumps(mut self) -> Self {
        self.raw.fill_res_cq_entry_raw = Some(fill_res_cq_raw::<D>);
        self.raw.fill_res_qp_entry_raw = Some(fill_res_qp_raw::<D>);
        self.raw.fill_res_mr_entry_raw = Some(fill_res_mr_raw::<D>);
        self
    }
}

impl<D: RawSrqDumpOps> Ops<D> {
    /// Offers dumps of shared receive queues.
    pub const fn with_raw_srq_dumps(mut self) -> Self {
        self.raw.fill_res_srq_entry_raw = Some(fill_res_srq_raw::<D>);
        self
    }
}

/// Room for the bytes of an object, in an answer to whoever lists the objects.
///
/// # Invariants
///
/// `msg` is valid, and the core is writing an entry to it.
pub struct RawDump<'a> {
    msg: *mut bindings::sk_buff,
    _p: PhantomData<&'a mut bindings::sk_buff>,
}

impl RawDump<'_> {
    /// The bytes, all of them at once.
    pub fn put(&mut self, bytes: &[u8]) -> Result {
        let length = c_int::try_from(bytes.len())?;
        // SAFETY: By the type invariant the core is filling the message; the bytes are copied.
        to_result(unsafe {
            bindings::nla_put(
                self.msg,
                bindings::rdma_nldev_attr_RDMA_NLDEV_ATTR_RES_RAW as c_int,
                length,
                bytes.as_ptr().cast(),
            )
        })
    }
}

/// Lets the driver dump an object that is listed. The core keeps its memory meanwhile, but the driver may be
/// destroying it.
///
/// # Safety
///
/// As for [`Object::try_ref`]; `msg` must be a message that the core is writing an entry to.
unsafe fn fill_raw<K: Kind<D>, D: Driver>(
    msg: *mut bindings::sk_buff,
    raw: *mut K::Raw,
    dump: fn(&Object<K, D>, &mut RawDump<'_>) -> Result,
) -> c_int {
    from_result(|| {
        // SAFETY: The caller vouches that the object was created and that its memory stays.
        let object = unsafe { Object::<K, D>::try_ref(raw) }.ok_or(EAGAIN)?;
        // INVARIANT: The caller vouches that the core is filling the message.
        let mut room = RawDump {
            msg,
            _p: PhantomData,
        };
        dump(&object, &mut room)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_res_cq_raw<D: RawDumpOps>(
    msg: *mut bindings::sk_buff,
    cq: *mut bindings::ib_cq,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which `ib_free_cq` and
    // `ib_destroy_cq_user` wait before the queue is freed; it is listed by `rdma_restrack_add`, after `D` made
    // it. `msg` is the message that `nldev` is filling.
    unsafe { fill_raw::<kind::Cq, D>(msg, cq, D::dump_cq) }
}

/// # Safety
///
/// As for [`fill_res_cq_raw`].
unsafe extern "C" fn fill_res_qp_raw<D: RawDumpOps>(
    msg: *mut bindings::sk_buff,
    qp: *mut bindings::ib_qp,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which `ib_destroy_qp_user`
    // waits before the queue pair is freed; it is listed by `rdma_restrack_add`, after `D` made it. `msg` is
    // the message that `nldev` is filling.
    unsafe { fill_raw::<kind::Qp, D>(msg, qp, D::dump_qp) }
}

/// # Safety
///
/// As for [`fill_res_cq_raw`].
unsafe extern "C" fn fill_res_mr_raw<D: RawDumpOps>(
    msg: *mut bindings::sk_buff,
    mr: *mut bindings::ib_mr,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which `rdma_restrack_del`
    // waits before `dereg_mr` is called; it is listed by `rdma_restrack_add`, after `D` made it. `msg` is the
    // message that `nldev` is filling.
    unsafe { fill_raw::<kind::Mr, D>(msg, mr, D::dump_mr) }
}

/// # Safety
///
/// As for [`fill_res_cq_raw`].
unsafe extern "C" fn fill_res_srq_raw<D: RawSrqDumpOps>(
    msg: *mut bindings::sk_buff,
    srq: *mut bindings::ib_srq,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which `ib_destroy_srq_user`
    // waits before the queue is freed; it is listed by `rdma_restrack_add`, after `D` made it. `msg` is the
    // message that `nldev` is filling.
    unsafe { fill_raw::<kind::Srq, D>(msg, srq, D::dump_srq) }
}
