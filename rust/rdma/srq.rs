// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.

use super::{kind, Cq, Driver, New, Object, ObjectRef, Pd};
use crate::bindings;

/// A shared receive queue.
pub type Srq<D> = Object<kind::Srq, D>;
/// A counted reference to a shared receive queue.
pub type SrqRef<D> = ObjectRef<kind::Srq, D>;

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

/// A domain of extended reliable connections.
pub type Xrcd<D> = Object<kind::Xrcd, D>;
/// A counted reference to a domain of extended reliable connections.
pub type XrcdRef<D> = ObjectRef<kind::Xrcd, D>;

/// What a shared receive queue for extended reliable connections belongs to.
pub struct ExtendedSrq<'a, D: Driver> {
    /// Its domain.
    pub xrcd: &'a Xrcd<D>,
    /// Where its receives complete.
    pub cq: &'a Cq<D>,
}

impl<'a, D: Driver> ExtendedSrq<'a, D> {
    /// # Safety
    ///
    /// `srq` must be a queue that the core is creating, with its type and what it belongs to set.
    pub(super) unsafe fn from_raw(srq: *mut bindings::ib_srq) -> Option<Self> {
        // SAFETY: The caller vouches for an XRC queue that is being created, so that this view of
        // the union is the one that is set; the core counts the queue as a user of domain and
        // completion queue until it is gone.
        unsafe {
            let ext = &(*srq).ext;
            let (xrcd, cq) = (ext.__bindgen_anon_1.xrc.as_ref().xrcd, ext.cq);
            if xrcd.is_null() || cq.is_null() {
                return None;
            }
            Some(Self {
                xrcd: Object::from_raw(xrcd),
                cq: Object::from_raw(cq),
            })
        }
    }
}

impl<D: Driver> New<'_, kind::Srq, D> {
    /// Tells the core the number of a queue for extended reliable connections.
    pub fn set_extended_number(&mut self, number: u32) {
        // SAFETY: The object is not shared yet; the core only looks at the number of extended ones.
        unsafe {
            let ext = &mut (*self.as_raw()).ext;
            ext.__bindgen_anon_1.xrc.as_mut().srq_num = number;
        }
    }
}

impl<D: Driver> Object<kind::Srq, D> {
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
        // SAFETY: `&self` is a queue that is not freed; its handler was set before the driver made
        // it, and only reads the event.
        unsafe {
            event.device = (*srq).device;
            event.event = kind;
            *event.element.srq.as_mut() = srq;
            if let Some(handler) = (*srq).event_handler {
                handler(&mut event, (*srq).srq_context);
            }
        }
    }
}
