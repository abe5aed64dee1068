// SPDX-License-Identifier: GPL-2.0

//! Memory of a device that processes use.

use super::memory::create_mr;
use super::method::Addition;
use super::{
    kind, ops, Access, Attributes, Device, Mr, MrOps, New, Object, ObjectRef, Ops, Pd, Ucontext,
    UserOps,
};
use crate::bindings;
use core::mem::MaybeUninit;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// A piece of a device's memory.
pub type Dm<D> = Object<kind::Dm, D>;
/// A counted reference to a piece of a device's memory.
pub type DmRef<D> = ObjectRef<kind::Dm, D>;

/// Memory of the device that processes use (DM).
pub trait DmOps: UserOps + MrOps {
    /// Driver's data of a piece of device memory.
    type Dm: Send + Sync;
    /// Attributes that the driver adds to the method that allocates device memory; `()` for none.
    type AllocAttributes<'a>: Attributes<'a, Self>;

    /// Allocates memory of the device for a process.
    fn alloc_dm<'a>(
        dev: &Device<Self>,
        context: &Ucontext<Self>,
        new: New<'a, kind::Dm, Self>,
        attr: &DmAllocAttr,
        attributes: Self::AllocAttributes<'_>,
    ) -> Result<&'a Dm<Self>>;

    /// Frees memory of the device.
    fn dealloc_dm(dm: &Dm<Self>) -> Result;

    /// Registers memory of the device.
    fn reg_dm_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        dm: &Dm<Self>,
        region: &DmRegion,
    ) -> Result<&'a Mr<Self>>;
}

impl<D: DmOps> Ops<D> {
    /// Offers device memory.
    pub const fn with_dm(mut self) -> Self {
        self.raw.alloc_dm = Some(alloc_dm::<D>);
        self.raw.dealloc_dm = Some(dealloc_dm::<D>);
        self.raw.reg_dm_mr = Some(reg_dm_mr::<D>);
        self.additions[ops::ALLOC_DM] = Addition::<
            D,
            kind::Dm,
            D::AllocAttributes<'static>,
            { bindings::uverbs_methods_dm_UVERBS_METHOD_DM_ALLOC },
        >::OBJECT;
        self
    }
}

/// Lets the driver allocate a piece, of which the driver's side allocates the object.
///
/// # Safety
///
/// `dev` must be a device of `D` and `attrs` the attributes of the command that allocates the piece
/// for `context`.
unsafe fn create_dm<D: DmOps>(
    dev: *mut bindings::ib_device,
    context: &Ucontext<D>,
    attr: &DmAllocAttr,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> Result<*mut bindings::ib_dm> {
    // SAFETY: The caller vouches for the attributes of the command, which the core has checked against
    // what `with_dm` adds to those of its own, and which it keeps until this returns.
    let attributes = unsafe { <D::AllocAttributes<'_> as Attributes<'_, D>>::get(attrs)? };
    let dm = KBox::into_raw(KBox::<Dm<D>>::new_uninit(GFP_KERNEL_ACCOUNT)?);
    let raw = dm.cast::<bindings::ib_dm>();
    // SAFETY: The memory was allocated just now, for a `Dm<D>`.
    unsafe { ptr::write_bytes(dm, 0, 1) };
    // SAFETY: The memory is ours, and of the core's part all zeroes are a value. The device is what the
    // core will set it to.
    unsafe { (*raw).device = dev };
    // SAFETY: The caller vouches for a device of `D`, which the command keeps registered.
    let dev = unsafe { Device::from_raw(dev) };
    // SAFETY: All of the memory but what was written of the core's part is zero, and nobody else has
    // it.
    let created =
        unsafe { Dm::create(raw, |new| D::alloc_dm(dev, context, new, attr, attributes)) };
    if created.is_err() {
        // SAFETY: It came from `into_raw` above, and `create` has dropped what was initialised in
        // it.
        drop(unsafe { KBox::from_raw(dm) });
    }
    created.map(|()| raw)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the attributes of the
/// command; `attr` must be valid for reads.
unsafe extern "C" fn alloc_dm<D: DmOps>(
    dev: *mut bindings::ib_device,
    context: *mut bindings::ib_ucontext,
    attr: *mut bindings::ib_dm_alloc_attr,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> *mut bindings::ib_dm {
    // SAFETY: `attr` is a local of the uverbs method (`UVERBS_METHOD_DM_ALLOC`), which waits.
    let attr = unsafe { &*attr };
    let attr = DmAllocAttr {
        length: attr.length,
        log_alignment: attr.alignment,
    };
    // SAFETY: `alloc_ucontext` made the context, and the method that is called for it keeps it.
    let context = unsafe { Object::from_raw(context) };
    // SAFETY: The device is a `Device<D>`, as it has this table; `attrs` are those of the method.
    let dm = unsafe { create_dm::<D>(dev, context, &attr, attrs) };
    dm.unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dealloc_dm<D: DmOps>(
    dm: *mut bindings::ib_dm,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_dm` made the piece. `uverbs_free_dm` calls this only for one whose `usecnt` is
        // zero, and does not touch it any more where this succeeds; else it is as before.
        unsafe { Dm::destroy(dm, D::dealloc_dm) }?;
        // SAFETY: The memory came from `create_dm`, and nothing in it is initialised any more.
        drop(unsafe { KBox::from_raw(dm.cast::<MaybeUninit<Dm<D>>>()) });
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
unsafe extern "C" fn reg_dm_mr<D: DmOps>(
    pd: *mut bindings::ib_pd,
    dm: *mut bindings::ib_dm,
    attr: *mut bindings::ib_dm_mr_attr,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> *mut bindings::ib_mr {
    // SAFETY: `attr` is a local of the uverbs method (`UVERBS_METHOD_DM_MR_REG`), which waits.
    let attr = unsafe { &*attr };
    let region = DmRegion {
        offset: attr.offset,
        length: attr.length,
        access: Access::from_raw(attr.access_flags),
    };
    // SAFETY: `create_dm` made the piece, and the method holds its object until this returns.
    let dm = unsafe { Object::from_raw(dm) };
    // SAFETY: `alloc_pd` made the domain, and the method holds its object until this returns. A null
    // `udata` is none.
    let mr = unsafe {
        create_mr(pd, ptr::null_mut(), |pd, new, _| {
            D::reg_dm_mr(pd, new, dm, &region)
        })
    };
    mr.unwrap_or_else(Error::to_ptr)
}

/// What is asked of a new piece of device memory.
#[derive(Clone, Copy, Debug)]
pub struct DmAllocAttr {
    /// How many bytes it is to have.
    pub length: u64,
    /// Base-2 logarithm of what its address has to be a multiple of.
    pub log_alignment: u32,
}

/// A part of device memory to be registered. It lies inside the piece.
#[derive(Clone, Copy, Debug)]
pub struct DmRegion {
    /// Where it starts.
    pub offset: u64,
    /// How many bytes it is.
    pub length: u64,
    /// What may be done to it; addresses count from zero always.
    pub access: Access,
}
