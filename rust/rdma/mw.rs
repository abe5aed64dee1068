// SPDX-License-Identifier: GPL-2.0

//! Memory windows.

use super::{kind, New, Object, ObjectRef, Ops, Pd, PdOps, Udata};
use crate::bindings;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// A memory window.
pub type Mw<D> = Object<kind::Mw, D>;
/// A counted reference to a memory window.
pub type MwRef<D> = ObjectRef<kind::Mw, D>;

/// Memory windows.
pub trait MwOps: PdOps {
    /// Driver's data of a memory window.
    type Mw: Send + Sync;

    /// Makes a memory window.
    fn alloc_mw<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mw, Self>,
        type2: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mw<Self>>;

    /// Ends a memory window.
    fn dealloc_mw(mw: &Mw<Self>) -> Result;
}

impl<D: MwOps> Ops<D> {
    /// Offers memory windows.
    pub const fn with_mw(mut self) -> Self {
        self.raw.alloc_mw = Some(alloc_mw::<D>);
        self.raw.dealloc_mw = Some(dealloc_mw::<D>);
        self.raw.size_ib_mw = Mw::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a window that it has just
/// allocated.
unsafe extern "C" fn alloc_mw<D: MwOps>(
    mw: *mut bindings::ib_mw,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_uverbs_alloc_mw` has set the domain, which `alloc_pd` made and whose object it
        // holds until this returns.
        let pd = unsafe { Object::from_raw((*mw).pd) };
        // SAFETY: `ib_uverbs_alloc_mw` has set the type; nobody else has the window yet.
        let type2 = unsafe { (*mw).type_ } == bindings::ib_mw_type_IB_MW_TYPE_2;
        // SAFETY: `ib_uverbs_alloc_mw` got `mw` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_mw` bytes. It
        // shows it to nobody before this returns. `udata` is that of the command, which waits.
        unsafe { Mw::create_with(mw, udata, |new, udata| D::alloc_mw(pd, new, type2, udata)) }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dealloc_mw<D: MwOps>(mw: *mut bindings::ib_mw) -> c_int {
    from_result(|| {
        // SAFETY: `alloc_mw` made the window. `uverbs_dealloc_mw` is called when its object is destroyed, and
        // frees it where this succeeds; else it is as before.
        unsafe { Mw::destroy(mw, D::dealloc_mw) }?;
        Ok(0)
    })
}

impl<D: MwOps> New<'_, kind::Mw, D> {
    /// Tells the core the window's key.
    pub fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: The core is creating the window and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).rkey = rkey }
    }
}

impl<D: MwOps> Object<kind::Mw, D> {
    /// Its protection domain.
    pub fn pd(&self) -> &Pd<D> {
        // SAFETY: The domain was set before the driver made the window; the core counts the window
        // as a user of it until the window is gone.
        unsafe { Object::from_raw((*self.as_raw()).pd) }
    }

    /// Its key.
    pub fn rkey(&self) -> u32 {
        // SAFETY: `&self` is a window that is not freed; a bind may change the key meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).rkey).read_volatile() }
    }
}
