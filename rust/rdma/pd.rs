// SPDX-License-Identifier: GPL-2.0

//! Protection domains.

use super::{kind, Device, Driver, New, Object, ObjectRef, Ops, Udata};
use crate::bindings;
use kernel::error::from_result;
use kernel::prelude::*;

/// A protection domain.
pub type Pd<D> = Object<kind::Pd, D>;
/// A counted reference to a protection domain.
pub type PdRef<D> = ObjectRef<kind::Pd, D>;

/// Protection domains, which every device has.
pub trait PdOps: Driver {
    /// Driver's data of a protection domain.
    type Pd: Send + Sync;

    /// Makes a protection domain.
    fn alloc_pd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>>;

    /// Ends a protection domain.
    fn dealloc_pd(pd: &Pd<Self>) -> Result;
}

impl<D: PdOps> Ops<D> {
    pub(super) const fn with_pds(mut self) -> Self {
        self.raw.alloc_pd = Some(alloc_pd::<D>);
        self.raw.dealloc_pd = Some(dealloc_pd::<D>);
        self.raw.size_ib_pd = Pd::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a domain that it has just
/// allocated.
unsafe extern "C" fn alloc_pd<D: PdOps>(
    pd: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `__ib_alloc_pd` and `ib_uverbs_alloc_pd` have set the device, which is a `Device<D>`
        // as it has this table, and which they keep registered meanwhile.
        let dev = unsafe { Device::from_raw((*pd).device) };
        // SAFETY: Both got `pd` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_pd` bytes. They show it
        // to nobody before this returns. `udata` is null or that of the uverbs command, which waits.
        unsafe { Pd::create_with(pd, udata, |new, udata| D::alloc_pd(dev, new, udata)) }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dealloc_pd<D: PdOps>(
    pd: *mut bindings::ib_pd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `alloc_pd` made the domain. Nothing is in it any more: `uverbs_free_pd` looks (`usecnt`),
        // and a user inside the kernel has to have ended what it made. `ib_dealloc_pd_user` frees the domain
        // where this succeeds; else it is as before.
        unsafe { Pd::destroy(pd, D::dealloc_pd) }?;
        Ok(0)
    })
}
