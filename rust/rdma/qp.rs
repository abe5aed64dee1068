// SPDX-License-Identifier: GPL-2.0

//! Queue pairs, their attributes and states.

use super::ops::op_if;
use super::restrack::fill_entry;
use super::{
    kind, Access, AhAttr, Cq, CqOps, Details, Device, Driver, Gid, Mtu, New, Object, ObjectRef,
    Ops, Path, Pd, PdOps, RecvList, SendList, Srq, SrqOps, Udata, XrcOps, Xrcd,
};
use crate::bindings;
use core::marker::PhantomData;
use kernel::build_error;
use kernel::error::{from_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;

/// A queue pair.
pub type Qp<D> = Object<kind::Qp, D>;
/// A counted reference to a queue pair.
pub type QpRef<D> = ObjectRef<kind::Qp, D>;

/// Queue pairs, which every device has.
#[vtable]
pub trait QpOps: PdOps + CqOps {
    /// Driver's data of a queue pair.
    type Qp: Send + Sync;

    /// Makes a queue pair. `attr` may be written: capabilities are what was granted.
    fn create_qp<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Qp, Self>,
        attr: &mut QpInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Qp<Self>>;

    /// Changes state and attributes of a queue pair.
    fn modify_qp(qp: &Qp<Self>, attr: &QpAttr<'_>, udata: Option<&Udata<'_, Self>>) -> Result;

    /// Tells state and attributes of a queue pair.
    fn query_qp(_qp: &Qp<Self>, _attr: &mut QpQuery<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a queue pair.
    fn destroy_qp(qp: &Qp<Self>) -> Result;

    /// Posts work requests on the send queue of the kernel. On failure the request that
    /// [`SendList::next`] returned last is reported as the bad one. Atomic context.
    ///
    /// The core posts for a process, too, if it asks for it ([`Qp::is_user`]): addresses and keys are the process's
    /// own then, and nothing about them is known to be right. Process context, where that is so.
    fn post_send(qp: &Qp<Self>, list: &mut SendList<'_, Self>) -> Result;

    /// Posts work requests on the receive queue of the kernel, as for `post_send`.
    fn post_recv(qp: &Qp<Self>, list: &mut RecvList<'_>) -> Result;

    /// Waits until all send work requests of a queue pair in error are completed.
    fn drain_sq(_qp: &Qp<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Waits until all receive work requests of a queue pair in error are completed.
    fn drain_rq(_qp: &Qp<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a queue pair to whoever lists them. May be called while it is destroyed.
    fn describe_qp(_qp: &Qp<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

impl<D: QpOps> Ops<D> {
    pub(super) const fn with_qps(mut self) -> Self {
        self.raw.create_qp = Some(create_qp::<D>);
        self.raw.modify_qp = Some(modify_qp::<D>);
        self.raw.query_qp = op_if!(D::HAS_QUERY_QP, query_qp::<D>);
        self.raw.destroy_qp = Some(destroy_qp::<D>);
        self.raw.post_send = Some(post_send::<D>);
        self.raw.post_recv = Some(post_recv::<D>);
        self.raw.drain_sq = op_if!(D::HAS_DRAIN_SQ, drain_sq::<D>);
        self.raw.drain_rq = op_if!(D::HAS_DRAIN_RQ, drain_rq::<D>);
        self.raw.fill_res_qp_entry = op_if!(D::HAS_DESCRIBE_QP, fill_res_qp::<D>);
        self.raw.size_ib_qp = Qp::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue pair that it has
/// just allocated; `attr` must be valid for reads and writes.
unsafe extern "C" fn create_qp<D: QpOps>(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_qp` of the core has set the device, which is a `Device<D>` as it has this
        // table, and which its caller keeps registered meanwhile.
        let dev = unsafe { Device::from_raw((*qp).device) };
        // SAFETY: `attr` is of the caller of `ib_create_qp_kernel` or `ib_create_qp_user`, who waits
        // and looks at it only afterwards; `qp` is what the core creates with it.
        let mut attr = unsafe { QpInitAttr::<D>::new(&mut *attr, qp) };
        for cq in [attr.send_cq(), attr.recv_cq()].into_iter().flatten() {
            cq.open();
        }
        // SAFETY: `create_qp` of the core got `qp` from `rdma_zalloc_drv_obj_numa`: zeroed,
        // `size_ib_qp` bytes. It shows it to nobody before this returns. `udata` is null or that of
        // the uverbs command, which waits.
        unsafe {
            Qp::create_with(qp, udata, |new, udata| {
                D::create_qp(dev, new, &mut attr, udata)
            })
        }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
unsafe extern "C" fn modify_qp<D: QpOps>(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_qp` made the queue pair, and the caller of `ib_modify_qp` has it: it does not
        // destroy it meanwhile, and a uverbs command holds the object of a process's.
        let qp = unsafe { Object::from_raw(qp) };
        // SAFETY: `attr` is of the caller of `ib_modify_qp`, or a local of the core, which waits.
        let attr = QpAttr::new(unsafe { &*attr }, mask as u32);
        // SAFETY: `udata` is null or that of the uverbs command, which waits for this.
        let udata = unsafe { Udata::<D>::from_raw(udata) };
        D::modify_qp(qp, &attr, udata.as_ref())?;
        if let Some(udata) = udata {
            udata.finish()?;
        }
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` and `init_attr` must be
/// valid for writes.
unsafe extern "C" fn query_qp<D: QpOps>(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    init_attr: *mut bindings::ib_qp_init_attr,
) -> c_int {
    from_result(|| {
        // SAFETY: `attr` and `init_attr` are of the caller of `ib_query_qp`, who waits; both are plain
        // data and pointers, of which any bytes will do.
        let (attr, init_attr) = unsafe { (&mut *attr, &mut *init_attr) };
        // SAFETY: `create_qp` made the queue pair, and the caller of `ib_query_qp` has it.
        let qp = unsafe { Qp::<D>::from_raw(qp) };
        let mut query = QpQuery::new(attr, init_attr, mask as u32);
        query.copy_of(qp);
        D::query_qp(qp, &mut query)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_qp<D: QpOps>(
    qp: *mut bindings::ib_qp,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_qp` made the queue pair. `ib_destroy_qp_user` is called when nobody uses it any
        // more (`usecnt`), and frees it where this succeeds; else it is as before.
        unsafe { Qp::destroy(qp, D::destroy_qp) }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with a list of requests;
/// `bad_wr` must be valid for writes.
unsafe extern "C" fn post_send<D: QpOps>(
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
    bad_wr: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: `create_qp` made the queue pair, of a device of `D`. The caller of `ib_post_send` keeps
    // the list, and what it points to, until this returns; requests of a datagram queue pair are
    // `ib_ud_wr`.
    let mut list = unsafe { SendList::new(qp, wr) };
    // SAFETY: `create_qp` made the queue pair, and the caller of `ib_post_send` has it: it does not
    // destroy it meanwhile.
    match D::post_send(unsafe { Object::from_raw(qp) }, &mut list) {
        Ok(()) => 0,
        Err(err) => {
            // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_send`.
            unsafe { *bad_wr = list.current() };
            err.to_errno()
        }
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with a list of requests;
/// `bad_wr` must be valid for writes.
unsafe extern "C" fn post_recv<D: QpOps>(
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad_wr: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: The caller of `ib_post_recv` keeps the list, and what it points to, until this returns.
    let mut list = unsafe { RecvList::new(wr) };
    // SAFETY: `create_qp` made the queue pair, and the caller of `ib_post_recv` has it: it does not
    // destroy it meanwhile.
    match D::post_recv(unsafe { Object::from_raw(qp) }, &mut list) {
        Ok(()) => 0,
        Err(err) => {
            // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_recv`.
            unsafe { *bad_wr = list.current() };
            err.to_errno()
        }
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn drain_sq<D: QpOps>(qp: *mut bindings::ib_qp) {
    // SAFETY: `create_qp` made the queue pair, and the caller of `ib_drain_sq` has it.
    D::drain_sq(unsafe { Object::from_raw(qp) })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn drain_rq<D: QpOps>(qp: *mut bindings::ib_qp) {
    // SAFETY: `create_qp` made the queue pair, and the caller of `ib_drain_rq` has it.
    D::drain_rq(unsafe { Object::from_raw(qp) })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_res_qp<D: QpOps>(
    msg: *mut bindings::sk_buff,
    qp: *mut bindings::ib_qp,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which
    // `rdma_restrack_commit_del` waits before the queue pair is freed; it is listed by `rdma_restrack_add`,
    // after `D` made it. `msg` is the message that `nldev` is filling.
    unsafe { fill_entry::<kind::Qp, D>(msg, qp, D::describe_qp) }
}

/// Multicast groups.
pub trait McastOps: QpOps {
    /// Lets a datagram queue pair receive what is sent to a multicast group.
    fn attach_mcast(qp: &Qp<Self>, gid: Gid) -> Result;

    /// Undoes `attach_mcast`.
    fn detach_mcast(qp: &Qp<Self>, gid: Gid) -> Result;
}

impl<D: McastOps> Ops<D> {
    /// Offers multicast groups.
    pub const fn with_mcast(mut self) -> Self {
        self.raw.attach_mcast = Some(attach_mcast::<D>);
        self.raw.detach_mcast = Some(detach_mcast::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `gid` must be valid for reads.
unsafe extern "C" fn attach_mcast<D: McastOps>(
    qp: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    from_result(|| {
        // SAFETY: `gid` is of the caller of `ib_attach_mcast`, who waits.
        let gid = unsafe { Gid::from_raw(gid) };
        // SAFETY: `create_qp` made the queue pair, and the caller of `ib_attach_mcast` has it.
        D::attach_mcast(unsafe { Object::from_raw(qp) }, gid)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `gid` must be valid for reads.
unsafe extern "C" fn detach_mcast<D: McastOps>(
    qp: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    from_result(|| {
        // SAFETY: `gid` is of the caller of `ib_detach_mcast`, who waits.
        let gid = unsafe { Gid::from_raw(gid) };
        // SAFETY: `create_qp` made the queue pair, and the caller of `ib_detach_mcast` has it.
        D::detach_mcast(unsafe { Object::from_raw(qp) }, gid)?;
        Ok(0)
    })
}

c_enum! {
    /// The service of a queue pair.
    pub enum QpType {
        /// The subnet manager's.
        Smi = ib_qp_type_IB_QPT_SMI,
        /// The general services' one, which has number 1.
        Gsi = ib_qp_type_IB_QPT_GSI,
        /// Reliable connection.
        Rc = ib_qp_type_IB_QPT_RC,
        /// Unreliable connection.
        Uc = ib_qp_type_IB_QPT_UC,
        /// Unreliable datagram.
        Ud = ib_qp_type_IB_QPT_UD,
        /// Initiator of an XRC connection.
        XrcInitiator = ib_qp_type_IB_QPT_XRC_INI,
        /// Target of an XRC connection.
        XrcTarget = ib_qp_type_IB_QPT_XRC_TGT,
        /// Raw packets.
        RawPacket = ib_qp_type_IB_QPT_RAW_PACKET,
    }
}

c_enum! {
    /// The state of a queue pair.
    pub enum QpState {
        /// Reset.
        Reset = ib_qp_state_IB_QPS_RESET,
        /// Initialised: receives may be posted.
        Init = ib_qp_state_IB_QPS_INIT,
        /// Ready to receive.
        Rtr = ib_qp_state_IB_QPS_RTR,
        /// Ready to send.
        Rts = ib_qp_state_IB_QPS_RTS,
        /// The send queue is being drained, or is drained.
        Sqd = ib_qp_state_IB_QPS_SQD,
        /// The send queue is in error.
        Sqe = ib_qp_state_IB_QPS_SQE,
        /// In error.
        Err = ib_qp_state_IB_QPS_ERR,
    }
}

c_enum! {
    /// Something that happened to a queue pair.
    pub enum QpEvent {
        /// It failed.
        Fatal = ib_event_type_IB_EVENT_QP_FATAL,
        /// The peer sent an invalid request.
        RequestError = ib_event_type_IB_EVENT_QP_REQ_ERR,
        /// The peer touched memory it may not.
        AccessError = ib_event_type_IB_EVENT_QP_ACCESS_ERR,
        /// A message came before the queue pair was ready to send.
        CommunicationEstablished = ib_event_type_IB_EVENT_COMM_EST,
        /// The send queue is drained.
        SendQueueDrained = ib_event_type_IB_EVENT_SQ_DRAINED,
        /// No more receives of the shared receive queue will be used.
        LastWqeReached = ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED,
        /// The path migrated.
        PathMigrated = ib_event_type_IB_EVENT_PATH_MIG,
    }
}

impl<D: QpOps> New<'_, kind::Qp, D> {
    /// Tells the core the queue pair's number.
    pub fn set_number(&mut self, number: u32) {
        // SAFETY: The core is creating the queue pair and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).qp_num = number }
    }
}

impl<D: QpOps> Object<kind::Qp, D> {
    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: `&self` is a queue pair that is not freed; the field does not change after
        // creation.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// Its service.
    pub fn qp_type(&self) -> Option<QpType> {
        // SAFETY: `&self` is a queue pair that is not freed; the field does not change after
        // creation.
        QpType::from_raw(unsafe { (*self.as_raw()).qp_type })
    }

    /// Its protection domain.
    pub fn pd(&self) -> Option<&Pd<D>> {
        // SAFETY: The domain was set before the driver made the queue pair. Its creator holds it
        // until the core counts the queue pair as a user of it. Only XRC targets have none.
        unsafe { Object::from_nullable((*self.as_raw()).pd) }
    }

    /// The completion queue of its send queue.
    pub fn send_cq(&self) -> Option<&Cq<D>> {
        // SAFETY: While the queue pair is being made its creator holds the completion queue; then the
        // core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe { Object::from_nullable((*self.as_raw()).send_cq) }
    }

    /// The completion queue of its receive queue.
    pub fn recv_cq(&self) -> Option<&Cq<D>> {
        // SAFETY: While the queue pair is being made its creator holds the completion queue; then the
        // core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe { Object::from_nullable((*self.as_raw()).recv_cq) }
    }

    /// Its shared receive queue.
    pub fn srq(&self) -> Option<&Srq<D>>
    where
        D: SrqOps,
    {
        // SAFETY: While the queue pair is being made its creator holds the shared receive queue; then
        // the core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe { Object::from_nullable((*self.as_raw()).srq) }
    }

    /// Whether it belongs to a process.
    pub fn is_user(&self) -> bool {
        // SAFETY: `&self` is a queue pair that is not freed; the field does not change after
        // creation.
        unsafe { !(*self.as_raw()).uobject.is_null() }
    }

    /// Tells the consumer that something happened. Process context: kernel consumers may sleep.
    pub fn report(&self, what: QpEvent) {
        let qp = self.as_raw();
        let mut event: bindings::ib_event = pin_init::zeroed();
        // SAFETY: `&self` is a queue pair that is not freed; its device does not change.
        event.device = unsafe { (*qp).device };
        event.event = what.as_raw();
        // SAFETY: The event is a local, of whose union all views are plain data.
        unsafe { *event.element.qp.as_mut() = qp };
        // SAFETY: `&self` is a queue pair that is not freed; `create_qp` of the core set handler and
        // context before it had the driver make it. `create_xrc_qp_user` sets those of an XRC target
        // anew, before anybody who could connect it has it.
        let (handler, context) = unsafe { ((*qp).event_handler, (*qp).qp_context) };
        if let Some(handler) = handler {
            // SAFETY: A handler is called with the context that was set with it, and only reads the
            // event.
            unsafe { handler(&mut event, context) };
        }
    }
}

/// How much a queue pair can hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    /// Send work requests.
    pub max_send_wr: u32,
    /// Receive work requests.
    pub max_recv_wr: u32,
    /// Entries of a send's gather list.
    pub max_send_sge: u32,
    /// Entries of a receive's scatter list.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

impl QpCap {
    fn from_raw(raw: &bindings::ib_qp_cap) -> Self {
        Self {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline_data: raw.max_inline_data,
        }
    }

    fn fill(&self, raw: &mut bindings::ib_qp_cap) {
        raw.max_send_wr = self.max_send_wr;
        raw.max_recv_wr = self.max_recv_wr;
        raw.max_send_sge = self.max_send_sge;
        raw.max_recv_sge = self.max_recv_sge;
        raw.max_inline_data = self.max_inline_data;
    }
}

/// What is asked of a new queue pair.
pub struct QpInitAttr<'a, D: Driver> {
    raw: &'a mut bindings::ib_qp_init_attr,
    qp: *mut bindings::ib_qp,
    _p: PhantomData<&'a D>,
}

impl<'a, D: QpOps> QpInitAttr<'a, D> {
    /// # Safety
    ///
    /// The core must be creating `qp` with the attributes `raw`, for `'a`.
    pub(super) unsafe fn new(
        raw: &'a mut bindings::ib_qp_init_attr,
        qp: *mut bindings::ib_qp,
    ) -> Self {
        Self {
            raw,
            qp,
            _p: PhantomData,
        }
    }

    pub(super) fn raw(&self) -> &bindings::ib_qp_init_attr {
        self.raw
    }

    /// The service; `None` for one this module does not know.
    pub fn qp_type(&self) -> Option<QpType> {
        QpType::from_raw(self.raw.qp_type)
    }

    /// The protection domain.
    pub fn pd(&self) -> Option<&'a Pd<D>> {
        // SAFETY: The core set the field before it called the driver; the protection domain
        // outlives the queue pair.
        unsafe { Object::from_nullable((*self.qp).pd) }
    }

    /// The completion queue of the send queue.
    pub fn send_cq(&self) -> Option<&'a Cq<D>> {
        // SAFETY: Whoever has the queue pair created holds the completion queue, and the core
        // counts the queue pair as a user of it until it is gone.
        unsafe { Object::from_nullable(self.raw.send_cq) }
    }

    /// The completion queue of the receive queue.
    pub fn recv_cq(&self) -> Option<&'a Cq<D>> {
        // SAFETY: Whoever has the queue pair created holds the completion queue, and the core
        // counts the queue pair as a user of it until it is gone.
        unsafe { Object::from_nullable(self.raw.recv_cq) }
    }

    /// The shared receive queue.
    pub fn srq(&self) -> Option<&'a Srq<D>>
    where
        D: SrqOps,
    {
        // SAFETY: Whoever has the queue pair created holds the shared receive queue, and the core
        // counts the queue pair as a user of it until it is gone.
        unsafe { Object::from_nullable(self.raw.srq) }
    }

    /// The domain, of the target of an XRC connection.
    pub fn xrcd(&self) -> Option<&'a Xrcd<D>>
    where
        D: XrcOps,
    {
        // SAFETY: Whoever has the queue pair created holds the domain, and the core counts the
        // queue pair as a user of it until it is gone.
        unsafe { Object::from_nullable(self.raw.xrcd) }
    }

    /// How much it has to hold.
    pub fn cap(&self) -> QpCap {
        QpCap::from_raw(&self.raw.cap)
    }

    /// Tells the consumer how much it does hold.
    pub fn set_cap(&mut self, cap: &QpCap) {
        cap.fill(&mut self.raw.cap);
    }

    /// Whether every send work request shall complete, signalled or not.
    pub fn signal_all(&self) -> bool {
        self.raw.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR
    }

    /// The port, for special queue pairs.
    pub fn port(&self) -> u32 {
        self.raw.port_num
    }

    /// What it is to be able to do besides, of what the core knows and drivers do.
    pub fn create_flags(&self) -> QpCreateFlags {
        QpCreateFlags::from_raw(self.raw.create_flags)
    }
}

flags! {
    /// What a queue pair of the kernel is to be able to do: flags of its creation.
    pub struct QpCreateFlags(u32) {
        /// All that are drivers' own.
        OF_DRIVERS = !(bindings::ib_qp_create_flags_IB_QP_CREATE_RESERVED_START as u32 - 1),
    }
}

/// What is to be changed of a queue pair.
///
/// Each attribute is `Some` only if the consumer gave it.
pub struct QpAttr<'a> {
    raw: &'a bindings::ib_qp_attr,
    mask: u32,
}

macro_rules! qp_attrs {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $field:ident if $bit:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(&self) -> Option<$ty> {
            self.has(bindings::$bit).then_some(self.raw.$field as $ty)
        }
    )*};
}

impl<'a> QpAttr<'a> {
    pub(crate) fn new(raw: &'a bindings::ib_qp_attr, mask: u32) -> Self {
        Self { raw, mask }
    }

    fn has(&self, bit: bindings::ib_qp_attr_mask) -> bool {
        self.mask & bit != 0
    }

    /// The raw mask, `IB_QP_*`.
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// The state to change to.
    pub fn state(&self) -> Option<QpState> {
        self.has(bindings::ib_qp_attr_mask_IB_QP_STATE)
            .then(|| QpState::from_raw(self.raw.qp_state))
            .flatten()
    }

    /// The state that the consumer believes the queue pair to be in.
    pub fn current_state(&self) -> Option<QpState> {
        self.has(bindings::ib_qp_attr_mask_IB_QP_CUR_STATE)
            .then(|| QpState::from_raw(self.raw.cur_qp_state))
            .flatten()
    }

    /// Whether going from `current` to `next` is allowed with the attributes that are given.
    pub fn transition_is_ok(&self, current: QpState, next: QpState, qp_type: QpType) -> bool {
        // SAFETY: The function looks at its arguments and at a constant table.
        unsafe {
            bindings::ib_modify_qp_is_ok(
                current.as_raw(),
                next.as_raw(),
                qp_type.as_raw(),
                self.mask as bindings::ib_qp_attr_mask,
            )
        }
    }

    /// The payload of a packet.
    pub fn path_mtu(&self) -> Option<Mtu> {
        self.has(bindings::ib_qp_attr_mask_IB_QP_PATH_MTU)
            .then(|| Mtu::from_raw(self.raw.path_mtu))
            .flatten()
    }

    /// What the peer may do.
    pub fn access(&self) -> Option<Access> {
        self.has(bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS)
            .then(|| Access::from_raw(self.raw.qp_access_flags as u32))
    }

    /// Where packets go.
    pub fn address(&self) -> Option<&'a AhAttr> {
        if !self.has(bindings::ib_qp_attr_mask_IB_QP_AV) {
            return None;
        }
        // SAFETY: The attributes are borrowed for as long as `self`, and nobody changes what is
        // borrowed.
        Some(unsafe { AhAttr::from_raw(&self.raw.ah_attr) })
    }

    qp_attrs! {
        /// The Q_Key.
        qkey: u32 = qkey if ib_qp_attr_mask_IB_QP_QKEY;
        /// First packet number to receive.
        rq_psn: u32 = rq_psn if ib_qp_attr_mask_IB_QP_RQ_PSN;
        /// First packet number to send.
        sq_psn: u32 = sq_psn if ib_qp_attr_mask_IB_QP_SQ_PSN;
        /// The peer's queue pair.
        dest_qp_num: u32 = dest_qp_num if ib_qp_attr_mask_IB_QP_DEST_QPN;
        /// Index of the partition key.
        pkey_index: u16 = pkey_index if ib_qp_attr_mask_IB_QP_PKEY_INDEX;
        /// Whether to raise an event when the send queue is drained.
        notify_drained: u8 = en_sqd_async_notify if ib_qp_attr_mask_IB_QP_EN_SQD_ASYNC_NOTIFY;
        /// Reads and atomics in flight to the peer.
        max_rd_atomic: u8 = max_rd_atomic if ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC;
        /// Reads and atomics in flight from the peer.
        max_dest_rd_atomic: u8 = max_dest_rd_atomic if ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC;
        /// How long the peer shall wait when no receive is posted.
        min_rnr_timer: u8 = min_rnr_timer if ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER;
        /// The port.
        port: u32 = port_num if ib_qp_attr_mask_IB_QP_PORT;
        /// How long to wait for an acknowledgement.
        timeout: u8 = timeout if ib_qp_attr_mask_IB_QP_TIMEOUT;
        /// How often to try again.
        retry_count: u8 = retry_cnt if ib_qp_attr_mask_IB_QP_RETRY_CNT;
        /// How often to try again when the peer has no receive posted.
        rnr_retry: u8 = rnr_retry if ib_qp_attr_mask_IB_QP_RNR_RETRY;
    }
}

/// Where to write the attributes of a queue pair that a consumer asked for.
pub struct QpQuery<'a> {
    raw: &'a mut bindings::ib_qp_attr,
    init: &'a mut bindings::ib_qp_init_attr,
    /// `ib_qp_attr_mask`: what was asked for. All is told but for what only the owner of the queue pair is to know.
    mask: u32,
}

/// Attributes of a queue pair, by value.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct QpValues {
    pub state: QpState,
    pub path_mtu: Mtu,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub access: Access,
    pub cap: QpCap,
    pub path: Path,
    pub pkey_index: u16,
    pub sq_draining: bool,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port: u32,
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub signal_all: bool,
}

impl Default for QpValues {
    fn default() -> Self {
        Self {
            state: QpState::Reset,
            path_mtu: Mtu::Bytes1024,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            dest_qp_num: 0,
            access: Access::default(),
            cap: QpCap::default(),
            path: Path::default(),
            pkey_index: 0,
            sq_draining: false,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port: 0,
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            signal_all: false,
        }
    }
}

impl QpValues {
    /// Takes over every attribute that a consumer gave, except the state.
    pub fn merge(&mut self, attr: &QpAttr<'_>) {
        macro_rules! take {
            ($($field:ident = $get:ident;)*) => {$(
                if let Some(value) = attr.$get() {
                    self.$field = value;
                }
            )*};
        }
        take! {
            path_mtu = path_mtu;
            qkey = qkey;
            rq_psn = rq_psn;
            sq_psn = sq_psn;
            dest_qp_num = dest_qp_num;
            access = access;
            pkey_index = pkey_index;
            max_rd_atomic = max_rd_atomic;
            max_dest_rd_atomic = max_dest_rd_atomic;
            min_rnr_timer = min_rnr_timer;
            port = port;
            timeout = timeout;
            retry_count = retry_count;
            rnr_retry = rnr_retry;
        }
        if let Some(address) = attr.address() {
            self.path = address.path();
        }
    }
}

impl<'a> QpQuery<'a> {
    pub(super) fn new(
        raw: &'a mut bindings::ib_qp_attr,
        init: &'a mut bindings::ib_qp_init_attr,
        mask: u32,
    ) -> Self {
        Self { raw, init, mask }
    }

    /// Whether somebody asks who lists queue pairs, be they his own or not (`rdma resource show qp`, which every user may):
    /// he asks for nothing in particular, and neither is to wait for him whoever uses the queue pair.
    pub fn is_listing(&self) -> bool {
        self.mask == 0
    }

    /// `value` where that attribute was asked for.
    fn asked(&self, attribute: bindings::ib_qp_attr_mask, value: u32) -> u32 {
        match self.mask & attribute {
            0 => 0,
            _ => value,
        }
    }

    /// Tells what the core set when the queue pair was made.
    fn copy_of<D: QpOps>(&mut self, qp: &Qp<D>) {
        let raw = qp.as_raw();
        // SAFETY: `qp` is not freed, and neither type nor context change after creation. No reference is made
        // to other fields, which may.
        let (qp_type, context) = unsafe { ((*raw).qp_type, (*raw).qp_context) };
        (self.init.qp_type, self.init.qp_context) = (qp_type, context);
        // SAFETY: `qp` is not freed, and its queues do not change after creation. No reference is made to
        // other fields, which may.
        let (send_cq, recv_cq, srq) = unsafe { ((*raw).send_cq, (*raw).recv_cq, (*raw).srq) };
        (self.init.send_cq, self.init.recv_cq, self.init.srq) = (send_cq, recv_cq, srq);
    }

    /// Writes all attributes. Those by which anybody could take part in a connection that is not his (packet sequence numbers
    /// and Q_Key) are told only to who asks for them: of the listing of all users' queue pairs they are no part.
    pub fn fill(&mut self, values: &QpValues) {
        let qkey = self.asked(bindings::ib_qp_attr_mask_IB_QP_QKEY, values.qkey);
        let rq_psn = self.asked(bindings::ib_qp_attr_mask_IB_QP_RQ_PSN, values.rq_psn);
        let sq_psn = self.asked(bindings::ib_qp_attr_mask_IB_QP_SQ_PSN, values.sq_psn);
        let raw = &mut *self.raw;
        raw.qp_state = values.state.as_raw();
        raw.cur_qp_state = values.state.as_raw();
        raw.path_mtu = values.path_mtu.as_raw();
        (raw.qkey, raw.rq_psn, raw.sq_psn) = (qkey, rq_psn, sq_psn);
        raw.dest_qp_num = values.dest_qp_num;
        raw.qp_access_flags = values.access.as_raw() as i32;
        raw.pkey_index = values.pkey_index;
        raw.sq_draining = values.sq_draining.into();
        raw.max_rd_atomic = values.max_rd_atomic;
        raw.max_dest_rd_atomic = values.max_dest_rd_atomic;
        raw.min_rnr_timer = values.min_rnr_timer;
        raw.port_num = values.port;
        raw.timeout = values.timeout;
        raw.retry_cnt = values.retry_count;
        raw.rnr_retry = values.rnr_retry;
        values.cap.fill(&mut raw.cap);
        values.cap.fill(&mut self.init.cap);
        values.path.fill(&mut raw.ah_attr);
        self.init.sq_sig_type = if values.signal_all {
            bindings::ib_sig_type_IB_SIGNAL_ALL_WR
        } else {
            bindings::ib_sig_type_IB_SIGNAL_REQ_WR
        };
    }
}
