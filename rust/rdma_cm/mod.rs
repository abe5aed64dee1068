// SPDX-License-Identifier: GPL-2.0

//! Connections between queue pairs, by IP address: the RDMA connection manager.
//!
//! An [`Id`] is one end of a connection: it finds a device and a way to an address, connects, and takes its queue pair
//! ([`Id::create_qp`]) through its states. A [`Listener`] has a [`Request`] for each peer that wants to connect, out of
//! which another [`Id`] is made. What happens is told to a [`Handler`].
//!
//! An identifier that is bound to a device keeps that registered: what is made on the device has a [`Lease`] of it
//! ([`Id::lease`]), and dropping the identifier waits for all of these. When the device is to be removed the handler is
//! told ([`Event::DeviceRemoval`]), and the device waits until the identifier is dropped.
//!
//! An identifier may be dropped by its own handler: the core then ends it when the handler returns, as it would by the
//! value that a handler in C returns. All leases have to go without the handler's help in that case. From a handler no
//! other identifier may be called, and a listener not be dropped by its own: that waits for itself, for ever.
//!
//! This is a folder of its own, apart from [`rdma`](crate::rdma), so that only who connects needs `rdma_cm.ko`.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h).

use crate::bindings;
use crate::kernel_ext::errno::{econnaborted, econnrefused};
use crate::rdma::consumer::{Cq, Depth, Landlord, Lease, Maker, Pd, Qp, User};
use crate::rdma::QpType;
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, to_result};
use kernel::new_mutex;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::{Arc, Mutex};
use kernel::task::Task;

/// The most bytes of private data that a request has room for.
pub const REQUEST_DATA_MAX: usize = 56;

/// Something that has happened to an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The address is found, and the identifier is bound to a device: [`Id::lease`], [`Id::resolve_route`].
    AddrResolved,
    /// A way to it is found: [`Id::connect`].
    RouteResolved,
    /// The connection is there. With what the peer has accepted it with, where this side asked for it.
    Established(&'a [u8]),
    /// The peer does not want to, for a reason (`enum ib_cm_rej_reason`), and with what it says.
    Rejected(i32, &'a [u8]),
    /// Address, route or peer are not found, or connecting failed otherwise.
    Failed(Error),
    /// The connection is over.
    Disconnected,
    /// The device goes, and waits until the identifier is dropped.
    DeviceRemoval,
    /// The address has moved to another device.
    AddrChange,
    /// The queue pair's number may be used again.
    TimewaitExit,
    /// Something else.
    Other(u32),
}

/// Who is told what happens to an identifier.
pub trait Handler: Send + Sync + 'static {
    /// Something has happened. Called one at a time for each identifier, and may sleep.
    fn event(&self, event: Event<'_>);
}

/// Who is told that a peer would like to connect.
pub trait Acceptor: Send + Sync + 'static {
    /// A peer wants to connect; a request that is dropped is refused. May sleep. Called at the same time for several
    /// devices.
    fn request(self: &Arc<Self>, request: Request<'_>);

    /// The listener's device goes, if it was bound to the address of one.
    fn device_removal(&self) {}
}

/// What both sides of a connection can say about it.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    /// For the peer. The core adds zeros.
    pub private_data: &'a [u8],
    /// RDMA reads of the peer that may be under way.
    pub responder_resources: u8,
    /// RDMA reads of this side that may be under way.
    pub initiator_depth: u8,
}

/// Numbers of RDMA reads that a peer has asked for, as they are for this side.
#[derive(Clone, Copy, Debug)]
struct Reads {
    responder_resources: u8,
    initiator_depth: u8,
}

impl Parameters<'_> {
    /// The same, with no more reads than a peer can have under way that has asked for so many.
    fn within(&self, offered: Option<Reads>) -> Self {
        let Some(offered) = offered else {
            return *self;
        };
        Self {
            responder_resources: self.responder_resources.min(offered.responder_resources),
            initiator_depth: self.initiator_depth.min(offered.initiator_depth),
            ..*self
        }
    }

    /// With up to 7 retries of what is not acknowledged, and as many as it takes where the peer has no receive posted.
    fn raw(&self) -> Result<bindings::rdma_conn_param> {
        let mut raw: bindings::rdma_conn_param = pin_init::zeroed();
        raw.private_data = self.private_data.as_ptr().cast();
        raw.private_data_len = u8::try_from(self.private_data.len()).map_err(|_| EINVAL)?;
        raw.responder_resources = self.responder_resources;
        raw.initiator_depth = self.initiator_depth;
        raw.flow_control = 1;
        raw.retry_count = 7;
        raw.rnr_retry_count = 7;
        Ok(raw)
    }
}

/// An address as C has it.
enum Address {
    V4(bindings::sockaddr_in),
    V6(bindings::sockaddr_in6),
}

impl Address {
    fn new(address: &SocketAddr) -> Self {
        match address {
            SocketAddr::V4(address) => {
                let mut v4: bindings::sockaddr_in = pin_init::zeroed();
                v4.sin_family = bindings::AF_INET as u16;
                v4.sin_port = address.port().to_be();
                v4.sin_addr.s_addr = u32::from(*address.ip()).to_be();
                Self::V4(v4)
            }
            SocketAddr::V6(address) => {
                let mut v6: bindings::sockaddr_in6 = pin_init::zeroed();
                v6.sin6_family = bindings::AF_INET6 as u16;
                v6.sin6_port = address.port().to_be();
                v6.sin6_flowinfo = address.flowinfo().to_be();
                v6.sin6_addr.in6_u.u6_addr8 = address.ip().octets();
                v6.sin6_scope_id = address.scope_id();
                Self::V6(v6)
            }
        }
    }

    /// Reads one; `None` if it is of another family.
    ///
    /// # Safety
    ///
    /// `raw` has to be valid for reads, and begin with an address of the family that it says.
    unsafe fn read(raw: *const bindings::__kernel_sockaddr_storage) -> Option<SocketAddr> {
        // SAFETY: All addresses begin with their family, as this does, and the storage has room for any.
        let v4 = unsafe { raw.cast::<bindings::sockaddr_in>().read_unaligned() };
        match u32::from(v4.sin_family) {
            bindings::AF_INET => {
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::from((ip, u16::from_be(v4.sin_port))))
            }
            bindings::AF_INET6 => {
                // SAFETY: It says that it is one of these; the storage has room for it.
                let v6 = unsafe { raw.cast::<bindings::sockaddr_in6>().read_unaligned() };
                // SAFETY: All views of the union are plain data.
                let ip = Ipv6Addr::from(unsafe { v6.sin6_addr.in6_u.u6_addr8 });
                let flow = u32::from_be(v6.sin6_flowinfo);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, flow, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }

    fn as_ptr(&mut self) -> *mut bindings::sockaddr {
        match self {
            Self::V4(address) => ptr::from_mut(address).cast(),
            Self::V6(address) => ptr::from_mut(address).cast(),
        }
    }
}

/// What an event brings, if anything.
///
/// # Safety
///
/// `event` has to be one of a connection, in the call of the core's that tells of it, which `'a` is.
unsafe fn private_data<'a>(event: &'a bindings::rdma_cm_event) -> &'a [u8] {
    // SAFETY: The caller vouches for an event of a connection; where there is no data the length is zero.
    let param = unsafe { event.param.conn.as_ref() };
    let data = param.private_data.cast::<u8>();
    if data.is_null() {
        return &[];
    }
    // SAFETY: The caller vouches for the event, whose data the core has for as long as the call.
    unsafe { core::slice::from_raw_parts(data, param.private_data_len.into()) }
}

/// # Safety
///
/// As for [`private_data`].
unsafe fn view(event: &bindings::rdma_cm_event) -> Event<'_> {
    use bindings as b;

    let failed = || Event::Failed(to_result(event.status).err().unwrap_or(EIO));
    // SAFETY: The caller vouches for the event.
    let data = || unsafe { private_data(event) };
    match event.event {
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => Event::AddrResolved,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => Event::RouteResolved,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE => failed(),
        b::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => Event::Rejected(event.status, data()),
        b::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => Event::Established(data()),
        b::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Event::Disconnected,
        b::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Event::DeviceRemoval,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE => Event::AddrChange,
        b::rdma_cm_event_type_RDMA_CM_EVENT_TIMEWAIT_EXIT => Event::TimewaitExit,
        other => Event::Other(other),
    }
}

/// What the core's calls find behind an identifier.
#[pin_data]
struct Inner<H> {
    handler: Arc<H>,
    client: &'static CStr,
    /// Whether it is bound to a device, which it stays until it is destroyed.
    is_bound: Atomic<bool>,
    /// Who has leases of that.
    #[pin]
    landlord: Mutex<Option<Landlord>>,
    /// The task that runs the handler now, by its address; 0 if there is none.
    running: Atomic<usize>,
    /// Whether the identifier was dropped by its handler.
    is_dropped: Atomic<bool>,
    /// What the peer has asked for, if it is one that asked.
    offered: Option<Reads>,
}

/// The current task, for comparing only.
fn current() -> usize {
    Task::current_raw() as usize
}

impl<H> Inner<H> {
    /// Of a new identifier, or of a peer's request, whose device it is bound to.
    fn new(
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
    raw: NonNull<bindings::rdma_cm_id>,
    inner: NonNull<Inner<H>>,
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
        // SAFETY: The namespace is a static of the kernel; the context is valid until the identifier is destroyed, and
        // of the type that `dispatch` expects; the name is static.
        let made = from_err_ptr(unsafe {
            bindings::__rdma_create_kernel_id(
                ptr::addr_of_mut!(bindings::init_net),
                Some(Self::dispatch),
                inner.as_ptr().cast(),
                bindings::rdma_ucm_port_space_RDMA_PS_TCP,
                qp_type.as_raw(),
                client.as_char_ptr(),
            )
        });
        match made.and_then(|raw| NonNull::new(raw).ok_or(ENOMEM)) {
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
        // SAFETY: Taken above.
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
    unsafe extern "C" fn dispatch(
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
    unsafe fn end_if(is_dropped: bool, inner: NonNull<Inner<H>>) -> c_int {
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

/// Refuses a peer.
///
/// # Safety
///
/// `raw` has to be an identifier that is not destroyed meanwhile.
unsafe fn reject(raw: *mut bindings::rdma_cm_id, private_data: &[u8]) -> Result {
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

/// A queue pair of a connection.
pub type Connected<U> = Qp<U, QpOwner>;

/// An identifier, as the owner of its queue pair.
///
/// # Invariants
///
/// `raw` is an identifier that is destroyed only when nobody has a lease of it.
pub struct QpOwner {
    raw: NonNull<bindings::rdma_cm_id>,
    qp_type: QpType,
    _lease: Lease,
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
        // SAFETY: The namespace is a static of the kernel; the context is valid until the identifier is destroyed, and of
        // the type that `dispatch` expects; the name is static.
        let made = from_err_ptr(unsafe {
            bindings::__rdma_create_kernel_id(
                ptr::addr_of_mut!(bindings::init_net),
                Some(Self::dispatch),
                inner.as_ptr().cast(),
                bindings::rdma_ucm_port_space_RDMA_PS_TCP,
                0,
                client.as_char_ptr(),
            )
        });
        let raw = match made.and_then(|raw| NonNull::new(raw).ok_or(ENOMEM)) {
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
#[kunit_tests(rust_rdma_cm)]
mod tests {
    use super::*;
    use crate::kernel_ext::completion::Completion;
    use core::net::SocketAddrV4;
    use kernel::time::msecs_to_jiffies;

    const CLIENT: &CStr = c"kunit_rdma_cm";

    #[test]
    fn addresses_are_in_network_byte_order() -> Result {
        let v4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 2, 3), 4791);
        let Address::V4(raw) = Address::new(&v4.into()) else {
            return Err(EINVAL);
        };
        assert_eq!(u32::from(raw.sin_family), bindings::AF_INET);
        assert_eq!(raw.sin_port.to_ne_bytes(), [0x12, 0xb7]);
        assert_eq!(raw.sin_addr.s_addr.to_ne_bytes(), [10, 1, 2, 3]);

        let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x12, 0x3456);
        let v6 = SocketAddrV6::new(ip, 4791, 0, 7);
        let Address::V6(raw) = Address::new(&v6.into()) else {
            return Err(EINVAL);
        };
        assert_eq!(u32::from(raw.sin6_family), bindings::AF_INET6);
        assert_eq!(raw.sin6_port.to_ne_bytes(), [0x12, 0xb7]);
        // SAFETY: All views of the union are plain data.
        let bytes = unsafe { raw.sin6_addr.in6_u.u6_addr8 };
        assert_eq!(bytes, ip.octets());
        assert_eq!(raw.sin6_scope_id, 7);
        Ok(())
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let v4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 2, 3), 815);
        let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x12, 0x3456);
        let v6 = SocketAddrV6::new(ip, 815, 9, 7);
        for address in [SocketAddr::from(v4), v6.into()] {
            let mut storage: bindings::__kernel_sockaddr_storage = pin_init::zeroed();
            let to = ptr::from_mut(&mut storage);
            // SAFETY: The storage has room for an address of any family, and is of plain data.
            unsafe {
                match Address::new(&address) {
                    Address::V4(raw) => to.cast::<bindings::sockaddr_in>().write_unaligned(raw),
                    Address::V6(raw) => to.cast::<bindings::sockaddr_in6>().write_unaligned(raw),
                }
            }
            // SAFETY: It was written just now.
            assert_eq!(unsafe { Address::read(&storage) }, Some(address));
        }
        let storage: bindings::__kernel_sockaddr_storage = pin_init::zeroed();
        // SAFETY: It says that it is of no family.
        assert_eq!(unsafe { Address::read(&storage) }, None);
    }

    #[test]
    fn no_more_reads_are_accepted_than_were_asked_for() {
        let own = Parameters {
            private_data: b"x",
            responder_resources: 8,
            initiator_depth: 8,
        };
        let numbers = |offered| {
            let within = own.within(offered);
            (within.responder_resources, within.initiator_depth)
        };
        assert_eq!(numbers(None), (8, 8));
        for (responder_resources, initiator_depth) in [(1, 16), (16, 1), (0, 0)] {
            let offered = Reads {
                responder_resources,
                initiator_depth,
            };
            let expected = (responder_resources.min(8), initiator_depth.min(8));
            assert_eq!(numbers(Some(offered)), expected);
        }
    }

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

    #[pin_data]
    struct Told {
        failed: Atomic<bool>,
        #[pin]
        done: Completion,
    }

    impl Handler for Told {
        fn event(&self, event: Event<'_>) {
            if matches!(event, Event::Failed(_)) {
                self.failed.store(true, Release);
                self.done.complete();
            }
        }
    }

    fn told() -> Result<Arc<Told>> {
        let init = pin_init!(Told {
            failed: Atomic::new(false),
            done <- Completion::new(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// An address that is for documentation only, which no device leads to.
    const NOWHERE: SocketAddr =
        SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 4791));

    #[test]
    fn an_identifier_without_a_device_lends_none_and_does_nothing() -> Result {
        let told = told()?;
        let id = Id::new(CLIENT, QpType::Rc, told.clone())?;
        assert_eq!(id.lease().err(), Some(ENODEV));
        let parameters = Parameters {
            private_data: &[],
            responder_resources: 0,
            initiator_depth: 0,
        };
        assert_eq!(id.accept(&parameters).err(), Some(ENODEV));
        assert!(id.connect(&parameters).is_err());
        assert!(id.resolve_route(10).is_err());
        assert!(id.disconnect().is_err());
        assert!(id.reject(&[]).is_err());
        drop(id);
        // Handler and all are given back.
        assert!(Arc::into_unique_or_drop(told).is_some());
        Ok(())
    }

    #[test]
    fn who_finds_nobody_is_told() -> Result {
        let told = told()?;
        let id = Id::new(CLIENT, QpType::Rc, told.clone())?;
        if id.resolve_addr(&NOWHERE, 100).is_ok() {
            assert!(told.done.wait_timeout(msecs_to_jiffies(10_000)));
            assert!(told.failed.load(Acquire));
        }
        assert_eq!(id.lease().err(), Some(ENODEV));
        Ok(())
    }

    /// A handler that drops its own identifier.
    #[pin_data]
    struct Dropping {
        #[pin]
        id: Mutex<Option<Id<Dropping>>>,
        #[pin]
        done: Completion,
    }

    impl Handler for Dropping {
        fn event(&self, _event: Event<'_>) {
            let id = self.id.lock().take();
            drop(id);
            self.done.complete();
        }
    }

    /// The core's view of that: it is told to destroy the identifier, once, and what belongs to it is gone.
    #[test]
    fn a_handler_may_drop_its_own_identifier() -> Result {
        let init = try_pin_init!(Dropping {
            id <- new_mutex!(None),
            done <- Completion::new(),
        }? Error);
        let dropping = Arc::pin_init(init, GFP_KERNEL)?;
        let id = Id::new(CLIENT, QpType::Rc, dropping.clone())?;
        let raw = id.raw.as_ptr();
        *dropping.id.lock() = Some(id);
        let mut event: bindings::rdma_cm_event = pin_init::zeroed();
        event.event = bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED;
        // SAFETY: As the core does, for an identifier of that type that exists.
        let returned = unsafe { Id::<Dropping>::dispatch(raw, &mut event) };
        assert_ne!(returned, 0);
        assert!(dropping.done.try_wait());
        // SAFETY: The handler has left it to the core, which we are here.
        unsafe { bindings::rdma_destroy_id(raw) };
        assert!(Arc::into_unique_or_drop(dropping).is_some());
        Ok(())
    }

    struct Nobody;

    impl Acceptor for Nobody {
        fn request(self: &Arc<Self>, request: Request<'_>) {
            request.refuse(b"no");
        }
    }

    #[test]
    fn a_port_has_one_listener_of_each_family() -> Result {
        let acceptor = Arc::new(Nobody, GFP_KERNEL)?;
        let any = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 47_910));
        let first = Listener::new(CLIENT, &any, 1, acceptor.clone())?;
        assert!(Listener::new(CLIENT, &any, 1, acceptor.clone()).is_err());
        drop(first);
        drop(Listener::new(CLIENT, &any, 1, acceptor.clone())?);
        assert!(Arc::into_unique_or_drop(acceptor).is_some());
        Ok(())
    }
}
