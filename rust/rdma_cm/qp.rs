// SPDX-License-Identifier: GPL-2.0

//! Queue pairs that go through their states with a connection.

use crate::bindings;
use crate::rdma::consumer::{Lease, Maker, Qp};
use crate::rdma::QpType;
use core::ptr::NonNull;
use kernel::error::to_result;
use kernel::prelude::*;

/// A queue pair of a connection.
pub type Connected<U> = Qp<U, QpOwner>;

/// An identifier, as the owner of its queue pair.
///
/// # Invariants
///
/// `raw` is an identifier that is destroyed only when nobody has a lease of it.
pub struct QpOwner {
    pub(super) raw: NonNull<bindings::rdma_cm_id>,
    pub(super) qp_type: QpType,
    pub(super) _lease: Lease,
}

// SAFETY: Queue pairs of an identifier are made and destroyed by any task.
unsafe impl Send for QpOwner {}

// SAFETY: A reference leads to nothing but calls of the core.
unsafe impl Sync for QpOwner {}

// SAFETY: The core makes the queue pair of the domain and the attributes, initialised; it is the identifier's, which takes
// it through its states and does nothing else with it.
unsafe impl Maker for QpOwner {
    fn qp_type(&self) -> QpType {
        self.qp_type
    }

    unsafe fn create(
        &self,
        pd: *mut bindings::ib_pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>> {
        let raw = self.raw.as_ptr();
        // SAFETY: By the type invariant the identifier is there, and `create_qp`, which has made this value just now, holds
        // the lock of its handler. The caller vouches for the domain and the attributes.
        to_result(unsafe { bindings::rdma_create_qp(raw, pd, attr) })?;
        // SAFETY: By the type invariant the identifier is there; nobody changes its queue pair, which is the one that was made.
        NonNull::new(unsafe { (*raw).qp }).ok_or(EIO)
    }

    unsafe fn destroy(&self, _qp: NonNull<bindings::ib_qp>) {
        // SAFETY: By the type invariant the identifier is there. It has one queue pair, which is this one: `create_qp` makes
        // no other while it has it.
        unsafe { bindings::rdma_destroy_qp(self.raw.as_ptr()) };
    }
}
