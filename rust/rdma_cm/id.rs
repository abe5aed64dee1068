// SPDX-License-Identifier: GPL-2.0

//! Identifiers: who connects, or was connected to.

use super::address::Address;
use super::parameters::{Parameters, Reads};
use super::qp::{Connected, QpOwner};
use super::{view, Event, Handler};
use crate::bindings;
use crate::kernel_ext::errno::econnaborted;
use crate::rdma::consumer::{Cq, Depth, Landlord, Lease, Pd, Qp, User};
use crate::rdma::QpType;
use core::net::SocketAddr;
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, to_result};
use kernel::new_mutex;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::{Arc, Mutex};
use kernel::task::Task;

/// What the core's calls find behind an identifier.
#[pin_data]
pub(super) struct Inner<H> {
    handler: Arc<H>,
    client: &'static CStr,
    /// Whether it is bound to a device, which it stays until it is destroyed.
    is_bound: Atomic<bool>,
    /// Who has leases of that.
    #[pin]
    landlord: Mutex<Option<Landlord>>,
    /// The task that runs the handler now, by its address; 0 if there is none.
    pub(super) running: Atomic<usize>,
    /// Whether the identifier was dropped by its handler.
    pub(super) is_dropped: Atomic<bool>,
    /// What the peer has asked for, if it is one that asked.
    offered: Option<Reads>,
}

/// The current task, for comparing only.
pub(super) fn current() -> usize {
    Task::current_raw() as usize
}

impl<H> Inner<H> {
    /// Of a new identifier, or of a peer's request, whose device it is bound to.
    pub(super) fn new(
        handler: Arc<H>,
        client: &'static CStr,
        offered: Option<Reads>,
    ) -> Result<NonNull<Self>> {
        let is_bound = offered.is_some();
        let init = try_pin_init!(Self {
            handler,
            client,
            is_bound: Atomic::new(is_bound),
            landlord <- new_mutex!(None),
            running: Atomic::new(0),
            is_dropped: Atomic::new(false),
            offered,
        });
        let inner = KBox::pin_init(init, GFP_KERNEL)?;
        // SAFETY: It stays where it is until `free`.
        let inner = KBox::into_raw(unsafe { Pin::into_inner_unchecked(inner) });
        NonNull::new(inner).ok_or(ENOMEM)
    }

    /// # Safety
    ///
    /// `inner` has to come from [`Inner::new`], and nobody may use it any more.
    unsafe fn free(inner: NonNull<Self>) {
        // SAFETY: The caller vouches for where it is from, and that it is its own.
        drop(unsafe { KBox::from_raw(inner.as_ptr()) });
    }

    /// Waits until nobody has a lease. There is none afterwards.
    fn vacate(&self) {
        let landlord = self.landlord.lock().take();
        drop(landlord);
    }

    /// Whether this task runs the handler.
    fn is_in_handler(&self) -> bool {
        self.running.load(Relaxed) == current()
    }

    /// Runs something as the handler; gives whether the identifier was dropped meanwhile.
    fn run(&self, f: impl FnOnce(&H)) -> bool {
        self.running.store(current(), Relaxed);
        f(&self.handler);
        self.running.store(0, Relaxed);
        self.is_dropped.load(Relaxed)
    }
}

/// One end of a connection, or what may become one.
///
/// Functions that do not say otherwise return before what they begin is done, of which the handler is told; and fail if
/// it is not their turn. They may sleep.
///
/// # Invariants
///
/// `raw` and `inner` are owned by this value; the former has the latter as its context, and [`Id::dispatch`] for a
/// handler.
pub struct Id<H: Handler> {
    pub(super) raw: NonNull<bindings::rdma_cm_id>,
    pub(super) inner: NonNull<Inner<H>>,
}

// SAFETY: An identifier belongs to no task; the handler can be sent and shared.
unsafe impl<H: Handler> Send for Id<H> {}

// SAFETY: Each function takes the lock of the identifier's handler; `Inner` is `Sync`, as `H` is.
unsafe impl<H: Handler> Sync for Id<H> {}

impl<H: Handler> Id<H> {
    /// Makes an identifier for a connection of this service, in the initial network namespace; `client` names its user
    /// to those who list what a device has.
    pub fn new(client: &'static CStr, qp_type: QpType, handler: Arc<H>) -> Result<Self> {
        let inner = Inner::new(handler, client, None)?;
        let context = inner.as_ptr().cast();
        // SAFETY: The context is valid until the identifier is destroyed, and of the type that `dispatch` expects.
        match unsafe { create_id(Self::dispatch, context, qp_type.as_raw(), client) } {
            // INVARIANT: Made just now.
            Ok(raw) => Ok(Self { raw, inner }),
            Err(error) => {
                // SAFETY: Nobody else knows it.
                unsafe { Inner::free(inner) };
                Err(error)
            }
        }
    }

    fn inner(&self) -> &Inner<H> {
        // SAFETY: By the type invariant it is ours, and freed only when this is dropped.
        unsafe { self.inner.as_ref() }
    }

    /// Calls the core with the lock of the handler held.
    fn locked<T>(&self, f: impl FnOnce(*mut bindings::rdma_cm_id) -> T) -> T {
        let raw = self.raw.as_ptr();
        if self.inner().is_in_handler() {
            return f(raw);
        }
        // SAFETY: By the type invariant the identifier is ours; this task does not run its handler, so that it does
        // not hold the lock.
        unsafe { bindings::rdma_lock_handler(raw) };
        let result = f(raw);
        // SAFETY: This task has taken the lock of the identifier above and has not given it back.
        unsafe { bindings::rdma_unlock_handler(raw) };
        result
    }

    /// Looks for the device and the address that lead to `address`: [`Event::AddrResolved`].
    pub fn resolve_addr(&self, address: &SocketAddr, timeout_ms: usize) -> Result {
        let mut address = Address::new(address);
        self.locked(|raw| {
            // SAFETY: By the type invariant the identifier is ours; the address is copied.
            to_result(unsafe {
                bindings::rdma_resolve_addr(raw, ptr::null_mut(), address.as_ptr(), timeout_ms)
            })
        })
    }

    /// Looks for a way to the address: [`Event::RouteResolved`].
    pub fn resolve_route(&self, timeout_ms: usize) -> Result {
        // SAFETY: By the type invariant the identifier is ours; the core looks whether it is bound.
        self.locked(|raw| to_result(unsafe { bindings::rdma_resolve_route(raw, timeout_ms) }))
    }

    /// How long the queue pair waits for an acknowledgement, before it connects: 4.096 microseconds times two to the power
    /// of this. RC only.
    pub fn set_ack_timeout(&self, timeout: u8) -> Result {
        // SAFETY: By the type invariant the identifier is ours.
        self.locked(|raw| to_result(unsafe { bindings::rdma_set_ack_timeout(raw, timeout) }))
    }

    /// How long a peer is to wait that found no receive here, before the queue pair connects: a code of the InfiniBand
    /// specification ("Encoding for RNR NAK timer field"). RC only.
    pub fn set_min_rnr_timer(&self, timer: u8) -> Result {
        // SAFETY: By the type invariant the identifier is ours.
        self.locked(|raw| to_result(unsafe { bindings::rdma_set_min_rnr_timer(raw, timer) }))
    }

    /// Whether it is bound to a port that speaks iWARP.
    pub fn is_iwarp(&self) -> bool {
        self.inner().is_bound.load(Acquire)
            && self.locked(|raw| {
                // SAFETY: By the type invariant the identifier is ours. It is bound, and stays bound to that port of that
                // device, which is not gone before the identifier is.
                unsafe { bindings::rdma_protocol_iwarp((*raw).device, (*raw).port_num) }
            })
    }

    /// A lease of the device that the identifier is bound to; `ENODEV` if it is to none.
    pub fn lease(&self) -> Result<Lease> {
        let inner = self.inner();
        if !inner.is_bound.load(Acquire) {
            return Err(ENODEV);
        }
        let mut landlord = inner.landlord.lock();
        if let Some(landlord) = &*landlord {
            return Ok(landlord.lease());
        }
        // SAFETY: By the type invariant the identifier is ours; its device does not change while it is bound.
        let device = unsafe { (*self.raw.as_ptr()).device };
        // SAFETY: The core counts the device for an identifier that is bound to it, and waits for that to be destroyed
        // before it lets the device go. The landlord is dropped before.
        let made = unsafe { Landlord::new(device, inner.client)? };
        Ok(landlord.insert(made).lease())
    }

    /// Makes the queue pair that is to be connected, of the identifier's service. One at a time: `EBUSY`.
    pub fn create_qp<U: User>(
        &self,
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        depth: Depth,
        user: &Arc<U>,
    ) -> Result<Connected<U>> {
        let lease = self.lease()?;
        self.locked(|raw| {
            // SAFETY: By the type invariant the identifier is ours; its type does not change. Its queue pair is set with
            // the lock held that we have, and cleared last when one is destroyed, hence the volatile read.
            let (qp, qp_type) = unsafe {
                let qp = ptr::addr_of!((*raw).qp).read_volatile();
                (qp, (*raw).qp_type)
            };
            if !qp.is_null() {
                return Err(EBUSY);
            }
            // INVARIANT: A lease of the identifier, which has no queue pair.
            let maker = QpOwner {
                raw: self.raw,
                qp_type: QpType::from_raw(qp_type).ok_or(EINVAL)?,
                _lease: lease,
            };
            Qp::new(maker, pd, cq, depth, user)
        })
    }

    /// Asks the peer: [`Event::Established`] or [`Event::Rejected`].
    pub fn connect(&self, parameters: &Parameters<'_>) -> Result {
        let mut parameters = parameters.raw()?;
        self.locked(|raw| {
            // SAFETY: By the type invariant the identifier is ours, and its handler is locked; the data are copied.
            to_result(unsafe { bindings::rdma_connect_locked(raw, &mut parameters) })
        })
    }

    /// Accepts what the peer has asked: [`Event::Established`]. The queue pair can be used from now on. There are no more
    /// reads under way than the peer has asked for.
    pub fn accept(&self, parameters: &Parameters<'_>) -> Result {
        let mut parameters = parameters.within(self.inner().offered).raw()?;
        // Its reference to the device is what accepting takes it for.
        self.lease()?;
        self.locked(|raw| {
            // SAFETY: By the type invariant the identifier is ours, and its handler is locked; it is bound to a device.
            // The data are copied.
            to_result(unsafe { bindings::rdma_accept(raw, &mut parameters) })
        })
    }

    /// Refuses what the peer has asked.
    pub fn reject(&self, private_data: &[u8]) -> Result {
        // SAFETY: By the type invariant the identifier is ours.
        self.locked(|raw| unsafe { reject(raw, private_data) })
    }

    /// Ends the connection: the queue pair is in error from now on, and the peer is told.
    pub fn disconnect(&self) -> Result {
        // SAFETY: By the type invariant the identifier is ours. The function looks whether it is connected.
        self.locked(|raw| to_result(unsafe { bindings::rdma_disconnect(raw) }))
    }

    /// # Safety
    ///
    /// To be called by the core as the handler of an identifier with an `Inner<H>`.
    pub(super) unsafe extern "C" fn dispatch(
        raw: *mut bindings::rdma_cm_id,
        event: *mut bindings::rdma_cm_event,
    ) -> c_int {
        // SAFETY: The caller vouches for the identifier, whose context is freed only after its last call.
        let inner = unsafe { NonNull::new_unchecked((*raw).context.cast::<Inner<H>>()) };
        // SAFETY: The caller vouches for the event, which is there until this returns; an identifier for connected
        // services has events of connections only.
        let event = unsafe { view(&*event) };
        // SAFETY: The context is freed only after the last call of this function.
        let shared = unsafe { inner.as_ref() };
        if event == Event::AddrResolved {
            shared.is_bound.store(true, Release);
        }
        let is_dropped = shared.run(|handler| handler.event(event));
        // SAFETY: It is this task that runs the handler, and it was dropped if it says so.
        unsafe { Self::end_if(is_dropped, inner) }
    }

    /// What a handler returns; where its identifier was dropped meanwhile the core destroys that.
    ///
    /// # Safety
    ///
    /// To be called at the end of a handler, with what its identifier has, and whether that was dropped.
    pub(super) unsafe fn end_if(is_dropped: bool, inner: NonNull<Inner<H>>) -> c_int {
        if !is_dropped {
            return 0;
        }
        // SAFETY: Whoever dropped the identifier has left it to us.
        unsafe { inner.as_ref() }.vacate();
        // SAFETY: Nobody has the identifier any more; the core holds the lock of its handler, and calls that never again.
        unsafe { Inner::free(inner) };
        econnaborted().to_errno()
    }
}

impl<H: Handler> Drop for Id<H> {
    fn drop(&mut self) {
        if self.inner().is_in_handler() {
            // By this task, which will look at it.
            self.inner().is_dropped.store(true, Relaxed);
            return;
        }
        self.inner().vacate();
        // SAFETY: By the type invariant the identifier is ours, and destroyed here and nowhere else, by a task that does
        // not run its handler. Nobody has a lease, so that there is no queue pair.
        unsafe { bindings::rdma_destroy_id(self.raw.as_ptr()) };
        // SAFETY: By the type invariant it is ours; no handler runs any more.
        unsafe { Inner::free(self.inner) };
    }
}

/// Makes an identifier of the connection manager, in the initial network namespace, for connections.
///
/// # Safety
///
/// `handler` has to be one that may be called with an identifier of that context, which has to be valid until the
/// identifier is destroyed.
pub(super) unsafe fn create_id(
    handler: unsafe extern "C" fn(*mut bindings::rdma_cm_id, *mut bindings::rdma_cm_event) -> c_int,
    context: *mut c_void,
    qp_type: bindings::ib_qp_type,
    client: &'static CStr,
) -> Result<NonNull<bindings::rdma_cm_id>> {
    // SAFETY: The namespace is a static of the kernel, and the name is static; the caller vouches for handler and context.
    let made = from_err_ptr(unsafe {
        bindings::__rdma_create_kernel_id(
            ptr::addr_of_mut!(bindings::init_net),
            Some(handler),
            context,
            bindings::rdma_ucm_port_space_RDMA_PS_TCP,
            qp_type,
            client.as_char_ptr(),
        )
    });
    NonNull::new(made?).ok_or(ENOMEM)
}

/// Refuses a peer.
///
/// # Safety
///
/// `raw` has to be an identifier that is not destroyed meanwhile.
pub(super) unsafe fn reject(raw: *mut bindings::rdma_cm_id, private_data: &[u8]) -> Result {
    let length = u8::try_from(private_data.len()).map_err(|_| EINVAL)?;
    // SAFETY: The caller vouches for the identifier; the function looks whether there is anything to refuse, and copies
    // the data.
    to_result(unsafe {
        bindings::rdma_reject(
            raw,
            private_data.as_ptr().cast(),
            length,
            bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED as u8,
        )
    })
}
