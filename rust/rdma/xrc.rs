// SPDX-License-Identifier: GPL-2.0

//! Extended reliable connections (XRC): their domains, and shared receive queues for them.

use super::{
    kind, srq, Cq, Device, New, Object, ObjectRef, Ops, Pd, QpOps, Srq, SrqAttr, SrqOps, Udata,
};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use kernel::error::from_result;
use kernel::prelude::*;

/// Extended reliable connections (XRC): queue pairs of them, [`super::QpType::XrcInitiator`] and
/// [`super::QpType::XrcTarget`], are made by [`QpOps::create_qp`].
pub trait XrcOps: SrqOps + QpOps {
    /// Driver's data of an XRC domain.
    type Xrcd: Send + Sync;

    /// Makes an XRC domain.
    fn alloc_xrcd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Xrcd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Xrcd<Self>>;

    /// Ends an XRC domain.
    fn dealloc_xrcd(xrcd: &Xrcd<Self>) -> Result;

    /// As [`SrqOps::create_srq`], for XRC: the number of the queue has to
    /// be told by [`New::set_xrc_srq_num`].
    fn create_xrc_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        xrc: &XrcSrq<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>>;
}

impl<D: XrcOps> Ops<D> {
    /// Offers XRC, besides shared receive queues ([`Ops::with_srq`]).
    pub const fn with_xrc(self) -> Self {
        let mut this = self.with_srq();
        this.raw.create_srq = Some(create_srq::<D>);
        this.raw.alloc_xrcd = Some(alloc_xrcd::<D>);
        this.raw.dealloc_xrcd = Some(dealloc_xrcd::<D>);
        this.raw.size_ib_xrcd = Xrcd::<D>::SIZE;
        this
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue that it has just
/// allocated; `attr` must be valid for reads and writes.
unsafe extern "C" fn create_srq<D: XrcOps>(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_create_srq_user` called this, whose caller gave it the attributes and waits.
        let attr = unsafe { &mut *attr };
        match attr.srq_type {
            // SAFETY: `ib_create_srq_user` has just allocated the queue; `udata` is null or that of the
            // uverbs command, which waits.
            bindings::ib_srq_type_IB_SRQT_BASIC => unsafe {
                srq::create::<D>(srq, &mut attr.attr, udata, D::create_srq)
            },
            bindings::ib_srq_type_IB_SRQT_XRC => {
                // SAFETY: `ib_create_srq_user` has just allocated the queue, and set its type and what
                // it belongs to.
                let xrc = unsafe { XrcSrq::<D>::from_raw(srq) }.ok_or(EINVAL)?;
                xrc.cq.open();
                // SAFETY: `ib_create_srq_user` has just allocated the queue; `udata` is null or that of the
                // uverbs command, which waits.
                unsafe {
                    srq::create::<D>(srq, &mut attr.attr, udata, |pd, new, attr, udata| {
                        D::create_xrc_srq(pd, new, attr, &xrc, udata)
                    })
                }
            }
            _ => Err(eopnotsupp()),
        }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a domain that it has just
/// allocated.
unsafe extern "C" fn alloc_xrcd<D: XrcOps>(
    xrcd: *mut bindings::ib_xrcd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_alloc_xrcd_user` has set the device, which is a `Device<D>` as it has this table, and
        // which its caller keeps registered meanwhile.
        let dev = unsafe { Device::from_raw((*xrcd).device) };
        // SAFETY: `ib_alloc_xrcd_user` got `xrcd` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_xrcd` bytes. It
        // shows it to nobody before this returns. `udata` is null or that of the uverbs command, which
        // waits.
        unsafe { Xrcd::create_with(xrcd, udata, |new, udata| D::alloc_xrcd(dev, new, udata)) }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dealloc_xrcd<D: XrcOps>(
    xrcd: *mut bindings::ib_xrcd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `alloc_xrcd` made the domain. `ib_dealloc_xrcd_user` calls this only for one whose `usecnt`
        // is zero, and frees it where this succeeds; else it is as before.
        unsafe { Xrcd::destroy(xrcd, D::dealloc_xrcd) }?;
        Ok(0)
    })
}

/// An XRC domain.
pub type Xrcd<D> = Object<kind::Xrcd, D>;
/// A counted reference to an XRC domain.
pub type XrcdRef<D> = ObjectRef<kind::Xrcd, D>;

/// What a shared receive queue for XRC belongs to.
pub struct XrcSrq<'a, D: XrcOps> {
    /// Its domain.
    pub xrcd: &'a Xrcd<D>,
    /// Where its receives complete.
    pub cq: &'a Cq<D>,
}

impl<'a, D: XrcOps> XrcSrq<'a, D> {
    /// # Safety
    ///
    /// `srq` must be a queue that the core is creating, with its type and what it belongs to set.
    pub(super) unsafe fn from_raw(srq: *mut bindings::ib_srq) -> Option<Self> {
        // SAFETY: The caller vouches for a queue that is being created: nobody else has it.
        let ext = unsafe { &(*srq).ext };
        // SAFETY: The queue is for XRC, so that this view of the union is the one that is set.
        let xrcd = unsafe { ext.__bindgen_anon_1.xrc.as_ref() }.xrcd;
        Some(Self {
            // SAFETY: `ib_create_srq_user` counts the queue as a user of the domain, which `alloc_xrcd`
            // made, until the queue is gone.
            xrcd: unsafe { Object::from_nullable(xrcd) }?,
            // SAFETY: `ib_create_srq_user` counts the queue as a user of the completion queue, which `create_cq`
            // or `create_user_cq` made, until the queue is gone.
            cq: unsafe { Object::from_nullable(ext.cq) }?,
        })
    }
}

impl<D: SrqOps> New<'_, kind::Srq, D> {
    /// Tells the core the number of a queue for XRC.
    pub fn set_xrc_srq_num(&mut self, number: u32) {
        // SAFETY: The core is creating the queue and shows it to nobody before the operation returns,
        // and only `New` leads to it.
        let ext = unsafe { &mut (*self.as_raw()).ext };
        // SAFETY: All views of the union are plain data; the core looks at the number of XRC ones
        // only.
        unsafe { ext.__bindgen_anon_1.xrc.as_mut() }.srq_num = number;
    }
}
