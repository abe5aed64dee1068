// SPDX-License-Identifier: GPL-2.0

//! Queue pairs, their attributes and states.

use super::{
    kind, Access, AhAttr, Cq, Driver, Mtu, New, Object, ObjectRef, Path, Pd, QpCreateFlags, Srq,
    Xrcd,
};
use crate::bindings;
use core::marker::PhantomData;

/// A queue pair.
pub type Qp<D> = Object<kind::Qp, D>;
/// A counted reference to a queue pair.
pub type QpRef<D> = ObjectRef<kind::Qp, D>;

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
        /// Initiator of an extended reliable connection.
        XrcInitiator = ib_qp_type_IB_QPT_XRC_INI,
        /// Target of an extended reliable connection.
        XrcTarget = ib_qp_type_IB_QPT_XRC_TGT,
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

impl<D: Driver> New<'_, kind::Qp, D> {
    /// Tells the core the queue pair's number.
    pub fn set_number(&mut self, number: u32) {
        // SAFETY: The core is creating the queue pair and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).qp_num = number }
    }
}

impl<D: Driver> Object<kind::Qp, D> {
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
        unsafe {
            let pd = (*self.as_raw()).pd;
            (!pd.is_null()).then(|| Object::from_raw(pd))
        }
    }

    /// The completion queue of its send queue.
    pub fn send_cq(&self) -> Option<&Cq<D>> {
        // SAFETY: While the queue pair is being made its creator holds the completion queue; then the
        // core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe {
            let cq = (*self.as_raw()).send_cq;
            (!cq.is_null()).then(|| Object::from_raw(cq))
        }
    }

    /// The completion queue of its receive queue.
    pub fn recv_cq(&self) -> Option<&Cq<D>> {
        // SAFETY: While the queue pair is being made its creator holds the completion queue; then the
        // core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe {
            let cq = (*self.as_raw()).recv_cq;
            (!cq.is_null()).then(|| Object::from_raw(cq))
        }
    }

    /// Its shared receive queue.
    pub fn srq(&self) -> Option<&Srq<D>> {
        // SAFETY: While the queue pair is being made its creator holds the shared receive queue; then
        // the core counts the queue pair as a user of it, until the queue pair is gone.
        unsafe {
            let srq = (*self.as_raw()).srq;
            (!srq.is_null()).then(|| Object::from_raw(srq))
        }
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
        // SAFETY: `&self` is a queue pair that is not freed; its handler was set before the driver
        // made it, and only reads the event.
        unsafe {
            event.device = (*qp).device;
            event.event = what.as_raw();
            *event.element.qp.as_mut() = qp;
            if let Some(handler) = (*qp).event_handler {
                handler(&mut event, (*qp).qp_context);
            }
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

impl<'a, D: Driver> QpInitAttr<'a, D> {
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

    /// The service; `None` for one this module does not know.
    pub fn qp_type(&self) -> Option<QpType> {
        QpType::from_raw(self.raw.qp_type)
    }

    /// The protection domain.
    pub fn pd(&self) -> Option<&'a Pd<D>> {
        // SAFETY: The core set the field before it called the driver; the protection domain
        // outlives the queue pair.
        unsafe {
            let pd = (*self.qp).pd;
            (!pd.is_null()).then(|| Object::from_raw(pd))
        }
    }

    /// The completion queue of the send queue.
    pub fn send_cq(&self) -> Option<&'a Cq<D>> {
        // SAFETY: Whoever has the queue pair created holds the completion queue, and the core
        // counts the queue pair as a user of it until it is gone.
        (!self.raw.send_cq.is_null()).then(|| unsafe { Object::from_raw(self.raw.send_cq) })
    }

    /// The completion queue of the receive queue.
    pub fn recv_cq(&self) -> Option<&'a Cq<D>> {
        // SAFETY: Whoever has the queue pair created holds the completion queue, and the core
        // counts the queue pair as a user of it until it is gone.
        (!self.raw.recv_cq.is_null()).then(|| unsafe { Object::from_raw(self.raw.recv_cq) })
    }

    /// The shared receive queue.
    pub fn srq(&self) -> Option<&'a Srq<D>> {
        // SAFETY: Whoever has the queue pair created holds the shared receive queue, and the core
        // counts the queue pair as a user of it until it is gone.
        (!self.raw.srq.is_null()).then(|| unsafe { Object::from_raw(self.raw.srq) })
    }

    /// The domain, of the target of an extended reliable connection.
    pub fn xrcd(&self) -> Option<&'a Xrcd<D>> {
        // SAFETY: Whoever has the queue pair created holds the domain, and the core counts the
        // queue pair as a user of it until it is gone.
        (!self.raw.xrcd.is_null()).then(|| unsafe { Object::from_raw(self.raw.xrcd) })
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

    /// `IB_QP_CREATE_*`, and those of drivers.
    pub fn create_flags(&self) -> QpCreateFlags {
        QpCreateFlags::from_raw(self.raw.create_flags)
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
            port: 1,
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
    ) -> Self {
        Self { raw, init }
    }

    /// Writes all attributes.
    pub fn fill(&mut self, values: &QpValues) {
        let raw = &mut *self.raw;
        raw.qp_state = values.state.as_raw();
        raw.cur_qp_state = values.state.as_raw();
        raw.path_mtu = values.path_mtu.as_raw();
        raw.qkey = values.qkey;
        raw.rq_psn = values.rq_psn;
        raw.sq_psn = values.sq_psn;
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
