// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.

use super::ops::op_if;
use super::restrack::fill_entry;
use super::udata::expect_none;
use super::{kind, Details, New, Object, ObjectRef, Ops, Pd, PdOps, RecvList, Udata};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use kernel::build_error;
use kernel::error::{from_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;

/// A shared receive queue.
pub type Srq<D> = Object<kind::Srq, D>;
/// A counted reference to a shared receive queue.
pub type SrqRef<D> = ObjectRef<kind::Srq, D>;

/// Shared receive queues.
#[vtable]
pub trait SrqOps: PdOps {
    /// Driver's data of a shared receive queue.
    type Srq: Send + Sync;

    /// Makes a shared receive queue. `attr` may be written: capabilities are what was granted.
    fn create_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>>;

    /// Sets the limit of a shared receive queue: an event is raised when fewer are left.
    fn modify_srq_limit(_srq: &Srq<Self>, _limit: u32) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Makes a shared receive queue hold at least `max_wr` requests, and those that it has.
    fn resize_srq(_srq: &Srq<Self>, _max_wr: u32, _udata: Option<&Udata<'_, Self>>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells the attributes of a shared receive queue.
    fn query_srq(_srq: &Srq<Self>) -> Result<SrqAttr> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a shared receive queue.
    fn destroy_srq(srq: &Srq<Self>) -> Result;

    /// Posts work requests on a shared receive queue of the kernel. Atomic context.
    fn post_srq_recv(srq: &Srq<Self>, list: &mut RecvList<'_>) -> Result;

    /// Tells details of a shared receive queue to whoever lists them. May be called while it is
    /// destroyed.
    fn describe_srq(_srq: &Srq<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

impl<D: SrqOps> Ops<D> {
    /// Offers shared receive queues.
    pub const fn with_srq(mut self) -> Self {
        // That of XRC makes both kinds.
        if self.raw.create_srq.is_none() {
            self.raw.create_srq = Some(create_srq::<D>);
        }
        self.raw.modify_srq = op_if!(
            D::HAS_MODIFY_SRQ_LIMIT || D::HAS_RESIZE_SRQ,
            modify_srq::<D>
        );
        self.raw.query_srq = op_if!(D::HAS_QUERY_SRQ, query_srq::<D>);
        self.raw.destroy_srq = Some(destroy_srq::<D>);
        self.raw.post_srq_recv = Some(post_srq_recv::<D>);
        self.raw.fill_res_srq_entry = op_if!(D::HAS_DESCRIBE_SRQ, fill_res_srq::<D>);
        self.raw.size_ib_srq = Srq::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue that it has just
/// allocated; `attr` must be valid for reads and writes.
unsafe extern "C" fn create_srq<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_create_srq_user` called this, whose caller gave it the attributes and waits.
        let attr = unsafe { &mut *attr };
        if attr.srq_type != bindings::ib_srq_type_IB_SRQT_BASIC {
            return Err(eopnotsupp());
        }
        // SAFETY: `ib_create_srq_user` has just allocated the queue; `udata` is null or that of the
        // uverbs command, which waits.
        unsafe { create::<D>(srq, &mut attr.attr, udata, D::create_srq) }?;
        Ok(0)
    })
}

/// Lets the driver make a queue of either kind, and tells the consumer what it was given.
///
/// # Safety
///
/// `ib_create_srq_user` must have allocated `srq` just now. For `udata` see [`Udata::from_raw`].
pub(super) unsafe fn create<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    raw: &mut bindings::ib_srq_attr,
    udata: *mut bindings::ib_udata,
    create: impl for<'a> FnOnce(
        &Pd<D>,
        New<'a, kind::Srq, D>,
        &mut SrqAttr,
        Option<&Udata<'_, D>>,
    ) -> Result<&'a Srq<D>>,
) -> Result {
    let mut attr = SrqAttr {
        max_wr: raw.max_wr,
        max_sge: raw.max_sge,
        limit: raw.srq_limit,
    };
    // SAFETY: `ib_create_srq_user` has set the domain, which `alloc_pd` made, and counts the queue as
    // its user.
    let pd = unsafe { Object::from_raw((*srq).pd) };
    // SAFETY: `ib_create_srq_user` got `srq` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_srq` bytes. It
    // shows it to nobody before this returns. The caller vouches for `udata`.
    unsafe { Srq::create_with(srq, udata, |new, udata| create(pd, new, &mut attr, udata)) }?;
    raw.max_wr = attr.max_wr;
    raw.max_sge = attr.max_sge;
    Ok(())
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
unsafe extern "C" fn modify_srq<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
    mask: bindings::ib_srq_attr_mask,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_srq` made the queue. The caller of `ib_modify_srq` has it, and
        // `ib_uverbs_modify_srq` holds the object of a process's.
        let srq = unsafe { Object::from_raw(srq) };
        // SAFETY: `attr` is of the caller of `ib_modify_srq`, or a local of `ib_uverbs_modify_srq`.
        let attr = unsafe { &*attr };
        if mask & bindings::ib_srq_attr_mask_IB_SRQ_MAX_WR == 0 {
            // SAFETY: `udata` is null or that of the uverbs command, which waits for this.
            unsafe { expect_none::<D>(udata)? };
        } else if D::HAS_RESIZE_SRQ {
            // SAFETY: `udata` is null or that of the uverbs command, which waits for this.
            let udata = unsafe { Udata::<D>::from_raw(udata) };
            D::resize_srq(srq, attr.max_wr, udata.as_ref())?;
            if let Some(udata) = udata {
                let _ = udata.finish();
            }
        } else {
            return Err(eopnotsupp());
        }
        if mask & bindings::ib_srq_attr_mask_IB_SRQ_LIMIT != 0 {
            if !D::HAS_MODIFY_SRQ_LIMIT {
                return Err(eopnotsupp());
            }
            D::modify_srq_limit(srq, attr.srq_limit)?;
        }
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
/// writes.
unsafe extern "C" fn query_srq<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_srq` made the queue, and the caller of `ib_query_srq` has it.
        let values = D::query_srq(unsafe { Object::from_raw(srq) })?;
        // SAFETY: `attr` is of the caller of `ib_query_srq`, who waits.
        let attr = unsafe { &mut *attr };
        attr.max_wr = values.max_wr;
        attr.max_sge = values.max_sge;
        attr.srq_limit = values.limit;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_srq<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_srq` made the queue. `ib_destroy_srq_user` calls this only for one whose `usecnt` is
        // zero, and frees it where this succeeds; else it is as before.
        unsafe { Srq::destroy(srq, D::destroy_srq) }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with a list of requests;
/// `bad_wr` must be valid for writes.
unsafe extern "C" fn post_srq_recv<D: SrqOps>(
    srq: *mut bindings::ib_srq,
    wr: *const bindings::ib_recv_wr,
    bad_wr: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: The caller of `ib_post_srq_recv` keeps the list, and what it points to, until this
    // returns.
    let mut list = unsafe { RecvList::new(wr) };
    // SAFETY: `create_srq` made the queue, and the caller of `ib_post_srq_recv` has it: it does not
    // destroy it meanwhile.
    match D::post_srq_recv(unsafe { Object::from_raw(srq) }, &mut list) {
        Ok(()) => 0,
        Err(err) => {
            // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_srq_recv`.
            unsafe { *bad_wr = list.current() };
            err.to_errno()
        }
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_res_srq<D: SrqOps>(
    msg: *mut bindings::sk_buff,
    srq: *mut bindings::ib_srq,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which
    // `rdma_restrack_commit_del` waits before the queue is freed; it is listed by `rdma_restrack_add`,
    // after `D` made it. `msg` is the message that `nldev` is filling.
    unsafe { fill_entry::<kind::Srq, D>(msg, srq, D::describe_srq) }
}

/// Attributes of a shared receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqAttr {
    /// Work requests it holds.
    pub max_wr: u32,
    /// Scatter entries of each.
    pub max_sge: u32,
    /// An event is raised when fewer than this are left; zero for none.
    pub limit: u32,
}

impl<D: SrqOps> Object<kind::Srq, D> {
    /// Its protection domain.
    pub fn pd(&self) -> &Pd<D> {
        // SAFETY: The domain was set before the driver made the queue; the core counts the queue as
        // a user of it until the queue is gone.
        unsafe { Object::from_raw((*self.as_raw()).pd) }
    }

    /// Whether the queue belongs to a process.
    pub fn is_user(&self) -> bool {
        // SAFETY: `&self` is a queue that is not freed; `uobject` is set before it is made and
        // never changed.
        unsafe { !(*self.as_raw()).uobject.is_null() }
    }

    /// Tells the consumer that the limit was reached. May be called in interrupt context.
    pub fn report_limit(&self) {
        self.report(bindings::ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED);
    }

    /// Tells the consumer that the queue failed. May be called in interrupt context.
    pub fn report_error(&self) {
        self.report(bindings::ib_event_type_IB_EVENT_SRQ_ERR);
    }

    fn report(&self, kind: bindings::ib_event_type) {
        let srq = self.as_raw();
        let mut event: bindings::ib_event = pin_init::zeroed();
        // SAFETY: `&self` is a queue that is not freed; its device does not change.
        event.device = unsafe { (*srq).device };
        event.event = kind;
        // SAFETY: The event is a local, of whose union all views are plain data.
        unsafe { *event.element.srq.as_mut() = srq };
        // SAFETY: `&self` is a queue that is not freed; `ib_create_srq_user` set handler and context
        // before it had the driver make it.
        let (handler, context) = unsafe { ((*srq).event_handler, (*srq).srq_context) };
        if let Some(handler) = handler {
            // SAFETY: A handler is called with the context that was set with it, and only reads the
            // event.
            unsafe { handler(&mut event, context) };
        }
    }
}
