// SPDX-License-Identifier: GPL-2.0

//! Who waits for requests to connect.

use super::address::Address;
use super::id::{create_id, current, reject, Id, Inner};
use super::parameters::Reads;
use super::{private_data, Acceptor, Handler};
use crate::bindings;
use crate::kernel_ext::errno::econnrefused;
use crate::rdma::QpType;
use core::net::SocketAddr;
use core::ptr::{self, NonNull};
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::Relaxed;
use kernel::sync::Arc;

/// A peer that wants to connect. Dropping it refuses.
pub struct Request<'a> {
    raw: NonNull<bindings::rdma_cm_id>,
    client: &'static CStr,
    private_data: &'a [u8],
    offered: Reads,
    /// What becomes of it.
    fate: &'a mut Fate,
}

/// What became of a request.
enum Fate {
    /// Nobody wanted it.
    Refused,
    /// It is an identifier, of which the second has the context: whether it was dropped, and how it is ended then.
    Taken(NonNull<c_void>, unsafe fn(NonNull<c_void>) -> c_int),
}

impl Request<'_> {
    /// What the peer says, with zeros behind it.
    pub fn private_data(&self) -> &[u8] {
        self.private_data
    }

    /// The service that it wants.
    pub fn qp_type(&self) -> Option<QpType> {
        // SAFETY: The core's identifier is there until the handler returns; its type does not change.
        QpType::from_raw(unsafe { (*self.raw.as_ptr()).qp_type })
    }

    /// Where it says that it comes from; `None` where that is no IP address. Nobody vouches for address and port: a process
    /// that connects by GID (`AF_IB`) writes all private data itself, those in which the connection manager has them for others
    /// among them. On RoCE it finds devices that go by IP addresses and do not mind to whom a frame is addressed.
    pub fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: The core's identifier is there until the handler returns, whose lock the core holds; it has filled in the
        // address of the peer, of which the family is 0 if it has none.
        unsafe { Address::read(ptr::addr_of!((*self.raw.as_ptr()).route.addr.dst_addr)) }
    }

    /// Refuses, and says something.
    pub fn refuse(self, private_data: &[u8]) {
        // SAFETY: The core's identifier is there until the handler returns.
        let _ = unsafe { reject(self.raw.as_ptr(), private_data) };
    }

    /// Makes an identifier of it, bound to its device, which is yet to be [accepted](Id::accept), or not.
    pub fn into_id<H: Handler>(self, handler: Arc<H>) -> Result<Id<H>> {
        let inner = Inner::new(handler, self.client, Some(self.offered))?;
        // SAFETY: Made just now. The handler of this identifier runs, which is the listener's so far.
        unsafe { inner.as_ref() }.running.store(current(), Relaxed);
        let raw = self.raw.as_ptr();
        // SAFETY: The core's identifier is there until the handler returns, and it holds the lock of its handler: nobody
        // else looks at these two.
        unsafe {
            (*raw).context = inner.as_ptr().cast();
            (*raw).event_handler = Some(Id::<H>::dispatch);
        }
        *self.fate = Fate::Taken(inner.cast(), end_request::<H>);
        // INVARIANT: It is ours from now on: the handler will return zero.
        Ok(Id {
            raw: self.raw,
            inner,
        })
    }
}

/// The end of the handler that has made an identifier of a request.
///
/// # Safety
///
/// `inner` has to be what [`Request::into_id`] has made for a handler of this type, in a call of the core's that ends with
/// this.
unsafe fn end_request<H: Handler>(inner: NonNull<c_void>) -> c_int {
    let inner = inner.cast::<Inner<H>>();
    // SAFETY: The caller vouches for what it is. If the identifier was dropped since, it was either by this task, which
    // leaves freeing it to us, or by another one, which waits for the lock of its handler, which the core holds.
    let shared = unsafe { inner.as_ref() };
    shared.running.store(0, Relaxed);
    let is_dropped = shared.is_dropped.load(Relaxed);
    // SAFETY: This is the end of the handler.
    unsafe { Id::end_if(is_dropped, inner) }
}

/// Whether queue pairs of that type have connections.
fn is_connected(qp_type: bindings::ib_qp_type) -> bool {
    [
        bindings::ib_qp_type_IB_QPT_RC,
        bindings::ib_qp_type_IB_QPT_UC,
        bindings::ib_qp_type_IB_QPT_XRC_INI,
        bindings::ib_qp_type_IB_QPT_XRC_TGT,
    ]
    .contains(&qp_type)
}

/// Waits for peers. Dropping it ends that; connections stay.
///
/// # Invariants
///
/// `raw` is owned by this value, with `inner` as its context and [`Listener::dispatch`] for a handler.
pub struct Listener<A: Acceptor> {
    raw: NonNull<bindings::rdma_cm_id>,
    inner: NonNull<Listening<A>>,
}

/// What the core's calls find behind a listener.
struct Listening<A> {
    acceptor: Arc<A>,
    client: &'static CStr,
}

// SAFETY: A listener belongs to no task; its acceptor can be sent and shared.
unsafe impl<A: Acceptor> Send for Listener<A> {}

// SAFETY: A reference to a listener leads to nothing.
unsafe impl<A: Acceptor> Sync for Listener<A> {}

impl<A: Acceptor> Listener<A> {
    /// Waits for peers at an address of this machine, or at all of its family: on all devices, also those to come. Any
    /// connected service is accepted. In the initial network namespace.
    pub fn new(
        client: &'static CStr,
        address: &SocketAddr,
        backlog: u16,
        acceptor: Arc<A>,
    ) -> Result<Self> {
        let inner = KBox::new(Listening { acceptor, client }, GFP_KERNEL)?;
        let inner = NonNull::new(KBox::into_raw(inner)).ok_or(ENOMEM)?;
        // A listener of type 0 gets requests for queue pairs of all types; `dispatch` refuses those of datagrams.
        let context = inner.as_ptr().cast();
        // SAFETY: The context is valid until the identifier is destroyed, and of the type that `dispatch` expects.
        let raw = match unsafe { create_id(Self::dispatch, context, 0, client) } {
            Ok(raw) => raw,
            Err(error) => {
                // SAFETY: It came from `into_raw`, and nobody else knows it.
                drop(unsafe { KBox::from_raw(inner.as_ptr()) });
                return Err(error);
            }
        };
        // INVARIANT: Made just now.
        let this = Self { raw, inner };
        let mut address = Address::new(address);
        // SAFETY: By the type invariant the identifier is ours, and nobody else uses it yet. The address is copied.
        unsafe {
            // Other families may have listeners of the same port.
            to_result(bindings::rdma_set_afonly(raw.as_ptr(), 1))?;
            to_result(bindings::rdma_bind_addr(raw.as_ptr(), address.as_ptr()))?;
            to_result(bindings::rdma_listen(raw.as_ptr(), backlog.into()))?;
        }
        Ok(this)
    }

    /// # Safety
    ///
    /// To be called by the core as the handler of a listener with a `Listening<A>`, or of a new identifier of one.
    unsafe extern "C" fn dispatch(
        raw: *mut bindings::rdma_cm_id,
        event: *mut bindings::rdma_cm_event,
    ) -> c_int {
        // SAFETY: The caller vouches for the identifier; the listener waits for its handlers before its context is freed.
        let listening = unsafe { &*(*raw).context.cast::<Listening<A>>() };
        // SAFETY: The caller vouches for the event, which is there until this returns.
        let event = unsafe { &*event };
        match event.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_REQUEST => {}
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => {
                listening.acceptor.device_removal();
                return 0;
            }
            _ => return 0,
        }
        // A listener of type 0 gets requests of datagrams, too, which have no connection.
        // SAFETY: The caller vouches for the identifier.
        let qp_type = unsafe { (*raw).qp_type };
        if !is_connected(qp_type) {
            return econnrefused().to_errno();
        }
        // SAFETY: The caller vouches for the event; `is_connected` has refused those of datagrams.
        let conn = unsafe { event.param.conn.as_ref() };
        let offered = Reads {
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
        };
        let mut fate = Fate::Refused;
        listening.acceptor.request(Request {
            // SAFETY: The caller vouches for the identifier.
            raw: unsafe { NonNull::new_unchecked(raw) },
            client: listening.client,
            // SAFETY: The caller vouches for the event; `is_connected` has refused those of datagrams.
            private_data: unsafe { private_data(event) },
            offered,
            fate: &mut fate,
        });
        match fate {
            // The core destroys it, and refuses if nobody has.
            Fate::Refused => econnrefused().to_errno(),
            // SAFETY: This is what `into_id` has made, and the end of the handler.
            Fate::Taken(inner, end) => unsafe { end(inner) },
        }
    }
}

impl<A: Acceptor> Drop for Listener<A> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the identifier is ours, and destroyed here and nowhere else.
        unsafe { bindings::rdma_destroy_id(self.raw.as_ptr()) };
        // SAFETY: By the type invariant it is ours and came from `into_raw`; no handler runs any more.
        drop(unsafe { KBox::from_raw(self.inner.as_ptr()) });
    }
}

#[cfg(not(rdma_cm_no_tests))]
#[kunit_tests(rust_rdma_cm_listener)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_have_no_connection() {
        for connected in [QpType::Rc, QpType::Uc] {
            assert!(is_connected(connected.as_raw()));
        }
        for none in [
            0,
            bindings::ib_qp_type_IB_QPT_UD,
            bindings::ib_qp_type_IB_QPT_GSI,
        ] {
            assert!(!is_connected(none));
        }
    }
}
