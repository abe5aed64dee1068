// SPDX-License-Identifier: GPL-2.0

//! The driver's part of a request that a process made.

use super::{kind, Driver, Object, Ucontext, UserOps};
use crate::bindings;
use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::transmute::{AsBytes, FromBytes};

/// The driver's request and response of a uverbs command.
///
/// # Invariants
///
/// `raw` is the `driver_udata` of a command that is being carried out.
pub struct Udata<'a, D: Driver> {
    raw: *mut bindings::ib_udata,
    responded: Cell<bool>,
    _p: PhantomData<&'a D>,
}

impl<'a, D: Driver> Udata<'a, D> {
    /// # Safety
    ///
    /// `raw` must be null or the `driver_udata` of a command on a device of `D` that lasts for
    /// `'a`.
    pub(super) unsafe fn from_raw(raw: *mut bindings::ib_udata) -> Option<Self> {
        // INVARIANT: The caller vouches that it is null or of a command that lasts for `'a`.
        (!raw.is_null()).then_some(Self {
            raw,
            responded: Cell::new(false),
            _p: PhantomData,
        })
    }

    /// Reads the request.
    ///
    /// A request shorter than `min` bytes is refused; between `min` and the size of `T` the rest
    /// is zero; what is longer has to be zero, else `EOPNOTSUPP`.
    pub fn read<T: FromBytes>(&self, min: usize) -> Result<T> {
        let mut request = MaybeUninit::<T>::zeroed();
        // SAFETY: By the type invariant the udata is of a command that is under way; `request` is
        // as many bytes as announced.
        to_result(unsafe {
            bindings::_ib_copy_validate_udata_in(
                self.raw,
                request.as_mut_ptr().cast(),
                size_of::<T>(),
                min,
            )
        })?;
        // SAFETY: All bytes were written, and any bytes make a `T`.
        Ok(unsafe { request.assume_init() })
    }

    /// Checks that there is no request: `EOPNOTSUPP` if there is.
    pub fn expect_empty(&self) -> Result {
        // SAFETY: By the type invariant the udata is of a command that is under way.
        to_result(unsafe { bindings::ib_is_udata_in_empty(self.raw) })
    }

    /// Writes the response, cut or padded with zeroes to what the process gave room for.
    pub fn respond<T: AsBytes>(&self, response: &T) -> Result {
        self.responded.set(true);
        // SAFETY: By the type invariant the udata is of a command that is under way; `response` is
        // as many bytes as announced, all initialised.
        to_result(unsafe {
            bindings::_ib_respond_udata(
                self.raw,
                core::ptr::from_ref(response).cast(),
                size_of::<T>(),
            )
        })
    }

    /// Zeroes the response if the driver wrote none.
    pub(super) fn finish(&self) -> Result {
        if self.responded.get() {
            return Ok(());
        }
        // SAFETY: By the type invariant the udata is of a command that is under way.
        to_result(unsafe { bindings::ib_respond_empty_udata(self.raw) })
    }

    /// The user context that the request came through; `None` while it is being made.
    pub fn context(&self) -> Option<&Ucontext<D>>
    where
        D: UserOps,
    {
        // SAFETY: By the type invariant the udata is part of the command's attributes.
        let bundle = unsafe { bindings::rdma_udata_to_uverbs_attr_bundle(self.raw) };
        // SAFETY: By the type invariant the command is being carried out; the core has set its context
        // before it called anybody, and does not change it.
        let context = unsafe { (*bundle).__bindgen_anon_1.__bindgen_anon_1.context };
        // SAFETY: `alloc_ucontext` has initialised a context that is set, and the file of the command
        // keeps it.
        unsafe { Object::<kind::Ucontext, D>::from_nullable(context) }
    }
}

/// Checks that a command without driver data has none, and zeroes its response.
///
/// Not for what ends an object: it may be ended because the command that made it failed afterwards, and has the data of
/// that one then, whose memory may be gone. Where that fails the core warns (`rdma_alloc_abort_uobject`) and the object stays.
///
/// # Safety
///
/// As for [`Udata::from_raw`].
pub(super) unsafe fn expect_none<D: Driver>(raw: *mut bindings::ib_udata) -> Result {
    // SAFETY: The caller vouches that it is null or of a command that is under way.
    if let Some(udata) = unsafe { Udata::<D>::from_raw(raw) } {
        udata.expect_empty()?;
        udata.finish()?;
    }
    Ok(())
}
