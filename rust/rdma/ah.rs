// SPDX-License-Identifier: GPL-2.0

//! Address handles.

use super::{kind, Ah, AhAttr, New, Object, Ops, Pd, PdOps, Udata};
use crate::bindings;
use kernel::error::from_result;
use kernel::prelude::*;

/// Address handles, without which there are no datagrams, nor a communication manager.
pub trait AhOps: PdOps {
    /// Driver's data of an address handle.
    type Ah: Send + Sync;

    /// Makes an address handle. May be in atomic context unless `sleepable`.
    fn create_ah<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Ah, Self>,
        attr: &AhAttr,
        sleepable: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Ah<Self>>;

    /// Ends an address handle. May be in atomic context unless `sleepable`.
    fn destroy_ah(ah: &Ah<Self>, sleepable: bool) -> Result;
}

impl<D: AhOps> Ops<D> {
    /// Offers address handles.
    pub const fn with_ah(mut self) -> Self {
        self.raw.create_ah = Some(create_ah::<D>);
        self.raw.create_user_ah = Some(create_ah::<D>);
        self.raw.destroy_ah = Some(destroy_ah::<D>);
        self.raw.size_ib_ah = Ah::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a handle that it has just
/// allocated; `attr` must be valid for reads.
unsafe extern "C" fn create_ah<D: AhOps>(
    ah: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `_rdma_create_ah` has set the domain, which `alloc_pd` made and its caller has.
        let pd = unsafe { Object::from_raw((*ah).pd) };
        // SAFETY: `attr` is a local of `_rdma_create_ah`, which waits.
        let attr = unsafe { &*attr };
        let sleepable = attr.flags & bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE != 0;
        // SAFETY: The address is of the caller of `_rdma_create_ah`, which waits and holds the GID
        // that is in it.
        let address = unsafe { AhAttr::from_raw(attr.ah_attr) };
        // SAFETY: `_rdma_create_ah` got `ah` from `rdma_zalloc_drv_obj_gfp`: zeroed, `size_ib_ah` bytes. It
        // shows it to nobody before this returns. `udata` is null or that of the uverbs command, which
        // waits.
        unsafe {
            Ah::create_with(ah, udata, |new, udata| {
                D::create_ah(pd, new, address, sleepable, udata)
            })
        }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_ah<D: AhOps>(ah: *mut bindings::ib_ah, flags: u32) -> c_int {
    from_result(|| {
        let sleepable = flags & bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE != 0;
        // SAFETY: `create_ah` made the handle. Who calls `rdma_destroy_ah_user` is its owner, and it frees the
        // handle where this succeeds; else it is as before.
        unsafe { Ah::destroy(ah, |ah| D::destroy_ah(ah, sleepable)) }?;
        Ok(0)
    })
}
