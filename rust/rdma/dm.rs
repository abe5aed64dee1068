// SPDX-License-Identifier: GPL-2.0

//! Memory of a device that processes use.

use super::{kind, Access, Object, ObjectRef};
use crate::bindings;
use core::marker::PhantomData;
use kernel::error::to_result;
use kernel::prelude::*;

/// A piece of a device's memory.
pub type Dm<D> = Object<kind::Dm, D>;
/// A counted reference to a piece of a device's memory.
pub type DmRef<D> = ObjectRef<kind::Dm, D>;

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

/// Where to tell a process how to map device memory.
pub struct DmResponse<'a> {
    attrs: *mut bindings::uverbs_attr_bundle,
    dm: *mut bindings::rdma_dm,
    _p: PhantomData<&'a ()>,
}

impl DmResponse<'_> {
    /// # Safety
    ///
    /// `attrs` must be those of the allocation of `dm` that is being carried out.
    pub(super) unsafe fn new(
        attrs: *mut bindings::uverbs_attr_bundle,
        dm: *mut bindings::rdma_dm,
    ) -> Self {
        Self {
            attrs,
            dm,
            _p: PhantomData,
        }
    }

    /// Tells the process the offset to map the memory by, if it asked for it; and whoever shares
    /// its context, if they ask later.
    pub fn set_offset(&self, offset: u64) -> Result {
        // SAFETY: `new` was given the memory that is being allocated; it is the caller's alone
        // until the operation returns.
        unsafe { (*self.dm).offset = offset };
        // SAFETY: `new` was given the attributes of a command that outlives `self`.
        to_result(unsafe { bindings::rdma_dm_respond(self.attrs, offset) })
    }
}
