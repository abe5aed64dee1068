// SPDX-License-Identifier: GPL-2.0

//! Completion queues and completions.

use super::ops::op_if;
use super::restrack::fill_entry;
use super::udata::expect_none;
use super::{kind, Details, Device, Driver, New, Object, ObjectRef, Ops, Qp, QpOps};
use crate::bindings;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr;
use kernel::build_error;
use kernel::error::{from_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Full};

/// A completion queue.
pub type Cq<D> = Object<kind::Cq, D>;
/// A counted reference to a completion queue.
pub type CqRef<D> = ObjectRef<kind::Cq, D>;

/// Completion queues, which every device has.
#[vtable]
pub trait CqOps: Driver {
    /// Driver's data of a completion queue.
    type Cq: Send + Sync;

    /// Makes a completion queue for the kernel; for a process too, where the driver has no
    /// [`super::UserCqOps::create_user_cq`]: then the core polls it for the process.
    fn create_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>>;

    /// Ends a completion queue, that of a kernel user without fail: takes it out of every table
    /// that events find it by, the device's and the driver's.
    ///
    /// The data stays until the core has stopped polling the queue: [`CqOps::poll_cq`] and
    /// [`CqOps::req_notify_cq`] may still be called.
    fn destroy_cq(cq: &Cq<Self>) -> Result;

    /// Takes completions off a queue of the kernel. Atomic context. The core polls for a process, too, if it asks for
    /// it ([`Cq::is_user`]).
    fn poll_cq(cq: &Cq<Self>, completions: &mut Completions<'_>) -> Result;

    /// Asks for an event at the next completion. Returns whether there are completions already,
    /// if that was asked for. Atomic context.
    fn req_notify_cq(cq: &Cq<Self>, notify: Notify) -> Result<bool>;

    /// Sets the moderation of a completion queue: events after `count` completions or `period`
    /// microseconds.
    fn modify_cq(_cq: &Cq<Self>, _count: u16, _period: u16) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a completion queue to whoever lists them. May be called while it is
    /// destroyed.
    fn describe_cq(_cq: &Cq<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

impl<D: CqOps> Ops<D> {
    pub(super) const fn with_cqs(mut self) -> Self {
        self.raw.create_cq = Some(create_cq::<D>);
        self.raw.pre_destroy_cq = Some(pre_destroy_cq::<D>);
        self.raw.destroy_cq = Some(destroy_cq::<D>);
        self.raw.post_destroy_cq = Some(post_destroy_cq::<D>);
        self.raw.poll_cq = Some(poll_cq::<D>);
        self.raw.req_notify_cq = Some(req_notify_cq::<D>);
        self.raw.modify_cq = op_if!(D::HAS_MODIFY_CQ, modify_cq::<D>);
        self.raw.fill_res_cq_entry = op_if!(D::HAS_DESCRIBE_CQ, fill_res_cq::<D>);
        self.raw.size_ib_cq = Cq::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue that it has just
/// allocated; `attr` must be valid for reads, `attrs` null or those of the command.
unsafe extern "C" fn create_cq<D: CqOps>(
    cq: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    from_result(|| {
        if !attrs.is_null() {
            // SAFETY: `attrs` are those of a uverbs command, which waits; the driver's part is in
            // them.
            unsafe { expect_none::<D>(bindings::rdma_driver_udata(attrs))? };
        }
        // SAFETY: `__ib_alloc_cq`, `__ib_create_cq` and the uverbs commands have set the device, which
        // is a `Device<D>` as it has this table, and which they keep registered meanwhile.
        let dev = unsafe { Device::from_raw((*cq).device) };
        // SAFETY: `attr` is a local of who calls, or its own caller's.
        let attr = unsafe { CqInitAttr::from_raw(attr) };
        // SAFETY: All of them got `cq` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_cq` bytes. They
        // show it to nobody before this returns.
        unsafe {
            Cq::create(cq, |new| {
                new.open_where_ready();
                D::create_cq(dev, new, &attr)
            })
        }?;
        Ok(0)
    })
}

/// Makes sure that the consumer's handler does not run any more, and will not: the core takes
/// away what the handler needs next.
///
/// # Safety
///
/// `cq` must be a completion queue that `D` made and that nobody uses any more.
unsafe fn silence_cq<D: CqOps>(cq: *mut bindings::ib_cq) -> Result {
    // SAFETY: The caller vouches that `D` made the queue, and it is ended only after this.
    D::destroy_cq(unsafe { Object::from_raw(cq) })?;
    // SAFETY: The caller vouches that `D` made the queue, and it is ended only after this.
    unsafe { Cq::<D>::quiesce(cq) };
    Ok(())
}

/// # Safety
///
/// To be called by the core for a completion queue of the kernel, before it cancels the work
/// that the handler of the queue starts.
unsafe extern "C" fn pre_destroy_cq<D: CqOps>(cq: *mut bindings::ib_cq) -> c_int {
    from_result(|| {
        // SAFETY: `create_cq` made the queue; `ib_free_cq` calls this only for one whose `usecnt` and
        // `cqe_used` are zero.
        unsafe { silence_cq::<D>(cq)? };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core for a completion queue of the kernel, after `pre_destroy_cq`.
unsafe extern "C" fn post_destroy_cq<D: CqOps>(cq: *mut bindings::ib_cq) {
    // SAFETY: `create_cq` made the queue; `ib_free_cq` has cancelled what polled it, and frees it
    // right after this.
    unsafe { Cq::<D>::finish(cq) };
}

/// # Safety
///
/// To be called by the core for a completion queue that `D` made: one of a process, or of a
/// kernel user that has a handler of its own.
unsafe extern "C" fn destroy_cq<D: CqOps>(
    cq: *mut bindings::ib_cq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_destroy_cq_user` ends only a queue whose `usecnt` is zero.
        unsafe { silence_cq::<D>(cq)? };
        // SAFETY: `create_cq` or `create_user_cq` made it, and `ib_destroy_cq_user` frees it next.
        unsafe { Cq::<D>::finish(cq) };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `wc` must have room for
/// `entries` completions.
unsafe extern "C" fn poll_cq<D: CqOps>(
    cq: *mut bindings::ib_cq,
    entries: c_int,
    wc: *mut bindings::ib_wc,
) -> c_int {
    // SAFETY: `D` made the queue. Who calls `ib_poll_cq` has it: a consumer, which does not free it
    // meanwhile, or the core's own work, which `ib_free_cq` cancels before it ends the queue.
    let cq = unsafe { Cq::<D>::from_raw(cq) };
    // SAFETY: The caller of `ib_poll_cq` gives room for `entries` completions at `wc`, and waits.
    let mut completions = unsafe { Completions::new(wc, entries.max(0) as usize, cq.is_user()) };
    match D::poll_cq(cq, &mut completions) {
        // What was taken off the queue has to be told even if the next one failed.
        Err(err) if completions.is_empty() => err.to_errno(),
        _ => completions.len() as c_int,
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn req_notify_cq<D: CqOps>(
    cq: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    from_result(|| {
        let notify = Notify::from_raw(flags);
        // SAFETY: `D` made the queue. Who calls `ib_req_notify_cq` has it: a consumer, which does not
        // free it meanwhile, or the core's own work, which `ib_free_cq` cancels before it ends it.
        let cq = unsafe { Object::from_raw(cq) };
        let missed = D::req_notify_cq(cq, notify)?;
        Ok(c_int::from(missed && notify.report_missed))
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn modify_cq<D: CqOps>(
    cq: *mut bindings::ib_cq,
    count: u16,
    period: u16,
) -> c_int {
    from_result(|| {
        // SAFETY: `D` made the queue. Who calls `rdma_set_cq_moderation` has it and does not free it
        // meanwhile; the work of its `dim` is cancelled by `ib_free_cq` before it ends the queue.
        D::modify_cq(unsafe { Object::from_raw(cq) }, count, period)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_res_cq<D: CqOps>(
    msg: *mut bindings::sk_buff,
    cq: *mut bindings::ib_cq,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which
    // `rdma_restrack_del` or `rdma_restrack_commit_del` waits before the queue is freed; it is listed by `rdma_restrack_add`, after
    // `D` made it. `msg` is the message that `nldev` is filling.
    unsafe { fill_entry::<kind::Cq, D>(msg, cq, D::describe_cq) }
}

/// What is asked of a new completion queue.
#[derive(Clone, Copy, Debug)]
pub struct CqInitAttr {
    /// Entries, at least.
    pub entries: u32,
    /// The completion vector for its events.
    pub comp_vector: u32,
    /// Flags, `IB_UVERBS_CQ_FLAGS_*`.
    pub flags: u32,
}

impl CqInitAttr {
    /// # Safety
    ///
    /// `raw` must be valid for reads.
    pub(super) unsafe fn from_raw(raw: *const bindings::ib_cq_init_attr) -> Self {
        // SAFETY: The caller vouches that it can be read.
        let raw = unsafe { &*raw };
        Self {
            entries: raw.cqe,
            comp_vector: raw.comp_vector,
            flags: raw.flags,
        }
    }
}

/// Whether events of a queue are passed on to its consumer.
///
/// `__ib_alloc_cq` has the driver make a queue, then sets its handler, and makes what the handler needs only after
/// that (`INIT_WORK`, `comp_wq`). Whoever has a work queue complete there was given the queue by then; what the device
/// says before is kept until then. All others set their handler before the driver makes the queue, with nothing missing.
pub struct Gate(Atomic<u32>);

impl Gate {
    const CLOSED: u32 = 0;
    const KNOCKED: u32 = 1;
    const OPEN: u32 = 2;

    /// Whether an event is to be passed on now; else it is kept.
    #[inline]
    fn pass(&self) -> bool {
        // Pairs with the exchange in `open`: what the core made is seen.
        self.0.load(Acquire) == Self::OPEN
            || self.0.cmpxchg(Self::CLOSED, Self::KNOCKED, Full) == Err(Self::OPEN)
    }

    /// Lets events pass from now on; returns whether one was kept, which is to be passed on now.
    fn open(&self) -> bool {
        self.0.xchg(Self::OPEN, Full) == Self::KNOCKED
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self(Atomic::new(Self::CLOSED))
    }
}

impl<D: CqOps> New<'_, kind::Cq, D> {
    /// Lets events pass from the beginning where the consumer has set its handler.
    pub(super) fn open_where_ready(&self) {
        // SAFETY: The core is creating the queue and shows it to nobody before the operation returns.
        if unsafe { (*self.as_raw()).comp_handler }.is_some() {
            self.own().open();
        }
    }

    /// Tells the core how many entries the queue has; consumers may rely on `entries` completions
    /// fitting.
    pub fn set_entries(&mut self, entries: u32) {
        // SAFETY: The core is creating the queue and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).cqe = entries as i32 }
    }
}

impl<D: CqOps> Object<kind::Cq, D> {
    /// Whether the queue belongs to a process.
    pub fn is_user(&self) -> bool {
        // SAFETY: `&self` is a queue that is not freed; `uobject` is set before it is made and
        // never changed.
        unsafe { !(*self.as_raw()).uobject.is_null() }
    }

    /// Whether the queue is one of the core's pool, which users inside the kernel have in common, one
    /// after the other too.
    pub fn is_shared(&self) -> bool {
        // SAFETY: `&self` is a queue that is not freed. The core sets the flag before it puts the queue
        // into its pool, with the flags beside it, and nobody changes them afterwards. No reference is made
        // to the fields that are changed.
        unsafe { bindings::ib_cq::shared_raw(self.as_raw()) != 0 }
    }

    /// How many entries the queue has.
    pub fn entries(&self) -> u32 {
        // SAFETY: `&self` is a queue that is not freed; a resize may change the number meanwhile,
        // hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).cqe).read_volatile() as u32 }
    }

    /// Notes how many entries the queue has after a resize. To be called before another resize can
    /// take effect: the last call counts.
    pub fn set_entries(&self, entries: u32) {
        // SAFETY: `&self` is a queue that is not freed; others read the number meanwhile, hence the
        // volatile write, and find it as it was or as it is.
        unsafe { ptr::addr_of_mut!((*self.as_raw()).cqe).write_volatile(entries as i32) }
    }

    /// A work queue is to complete here: its consumer has the queue.
    pub(super) fn open(&self) {
        if self.own().open() {
            self.complete();
        }
    }

    /// Calls the consumer's completion handler. May be called in interrupt context.
    ///
    /// The handler of a queue of the kernel is called when somebody has a work queue complete there, and not before:
    /// the core sets it before what it needs ([`Gate`]). A queue that its consumer polls when it likes
    /// (`IB_POLL_DIRECT`) has no use for the call, and none is made.
    #[inline]
    pub fn complete(&self) {
        if !self.own().pass() {
            return;
        }
        let cq = self.as_raw();
        // SAFETY: `&self` is a queue that is not freed. `__ib_alloc_cq` sets how it is polled before it
        // has the driver make it; queues of others have zero there. Nobody changes it.
        if unsafe { (*cq).poll_ctx } == bindings::ib_poll_context_IB_POLL_DIRECT {
            return;
        }
        // SAFETY: `&self` is a queue that is not freed. The gate is open: handler and context were set before the
        // driver made the queue, or a work queue was made to complete here, which takes a queue that
        // `__ib_alloc_cq` has returned. They do not change afterwards.
        let (handler, context) = unsafe { ((*cq).comp_handler, (*cq).cq_context) };
        if let Some(handler) = handler {
            // SAFETY: A handler is called with its queue and the context that was set with it.
            unsafe { handler(cq, context) };
        }
    }

    /// Tells the consumer that the queue failed. May be called in interrupt context.
    pub fn report_error(&self) {
        let cq = self.as_raw();
        let mut event: bindings::ib_event = pin_init::zeroed();
        // SAFETY: `&self` is a queue that is not freed; its device does not change.
        event.device = unsafe { (*cq).device };
        event.event = bindings::ib_event_type_IB_EVENT_CQ_ERR;
        // SAFETY: The event is a local, of whose union all views are plain data.
        unsafe { *event.element.cq.as_mut() = cq };
        // SAFETY: `&self` is a queue that is not freed. `__ib_create_cq` and the uverbs commands set
        // handler and context before the driver makes the queue; one that the core polls
        // (`__ib_alloc_cq`) has no handler of events, ever.
        let (handler, context) = unsafe { ((*cq).event_handler, (*cq).cq_context) };
        if let Some(handler) = handler {
            // SAFETY: A handler is called with the context that was set with it, and only reads the
            // event.
            unsafe { handler(&mut event, context) };
        }
    }
}

/// What a consumer wants to be told about next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notify {
    /// Only completions of solicited messages, and errors.
    pub solicited: bool,
    /// Whether to look for completions that were there before.
    pub report_missed: bool,
}

impl Notify {
    pub(super) fn from_raw(raw: u32) -> Self {
        Self {
            solicited: raw & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
                == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED,
            report_missed: raw & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0,
        }
    }
}

c_enum! {
    /// How a work request ended.
    pub enum WcStatus {
        /// It succeeded.
        Success = ib_wc_status_IB_WC_SUCCESS,
        /// A message was longer than the buffer.
        LocalLength = ib_wc_status_IB_WC_LOC_LEN_ERR,
        /// The queue pair could not do it.
        LocalQpOperation = ib_wc_status_IB_WC_LOC_QP_OP_ERR,
        /// Local memory may not be used so.
        LocalProtection = ib_wc_status_IB_WC_LOC_PROT_ERR,
        /// The queue pair was in error.
        WorkRequestFlushed = ib_wc_status_IB_WC_WR_FLUSH_ERR,
        /// A window could not be bound.
        MemoryWindowBind = ib_wc_status_IB_WC_MW_BIND_ERR,
        /// The peer answered what it may not.
        BadResponse = ib_wc_status_IB_WC_BAD_RESP_ERR,
        /// A local buffer may not be used so.
        LocalAccess = ib_wc_status_IB_WC_LOC_ACCESS_ERR,
        /// The peer found the request invalid.
        RemoteInvalidRequest = ib_wc_status_IB_WC_REM_INV_REQ_ERR,
        /// The peer's memory may not be used so.
        RemoteAccess = ib_wc_status_IB_WC_REM_ACCESS_ERR,
        /// The peer could not do it.
        RemoteOperation = ib_wc_status_IB_WC_REM_OP_ERR,
        /// The peer did not answer.
        RetryExceeded = ib_wc_status_IB_WC_RETRY_EXC_ERR,
        /// The peer had no receive work request.
        RnrRetryExceeded = ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR,
        /// The peer aborted.
        RemoteAborted = ib_wc_status_IB_WC_REM_ABORT_ERR,
        /// The device failed.
        Fatal = ib_wc_status_IB_WC_FATAL_ERR,
        /// Anything else.
        General = ib_wc_status_IB_WC_GENERAL_ERR,
    }
}

c_enum! {
    /// Which work request ended.
    pub enum WcOpcode {
        /// A send.
        Send = ib_wc_opcode_IB_WC_SEND,
        /// An RDMA write.
        RdmaWrite = ib_wc_opcode_IB_WC_RDMA_WRITE,
        /// An RDMA read.
        RdmaRead = ib_wc_opcode_IB_WC_RDMA_READ,
        /// A compare and swap.
        CompareSwap = ib_wc_opcode_IB_WC_COMP_SWAP,
        /// A fetch and add.
        FetchAdd = ib_wc_opcode_IB_WC_FETCH_ADD,
        /// A window bind.
        BindMw = ib_wc_opcode_IB_WC_BIND_MW,
        /// A local invalidation.
        LocalInvalidate = ib_wc_opcode_IB_WC_LOCAL_INV,
        /// A fast registration.
        RegMr = ib_wc_opcode_IB_WC_REG_MR,
        /// A receive.
        Recv = ib_wc_opcode_IB_WC_RECV,
        /// A receive that an RDMA write with immediate consumed.
        RecvRdmaWithImm = ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM,
    }
}

/// A completion, as the driver tells it.
pub struct Wc<'a, D: QpOps> {
    /// The consumer's name for the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// The queue pair.
    pub qp: &'a Qp<D>,
    /// Bytes received or read.
    pub byte_len: u32,
    /// The device's own error code.
    pub vendor_err: u32,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// The key that the peer invalidated.
    pub invalidated: Option<u32>,
    /// The sender's queue pair, for datagrams.
    pub src_qp: u32,
    /// Index of the partition key, for the GSI queue pair.
    pub pkey_index: u16,
    /// The service level.
    pub sl: u8,
    /// Whether a routing header precedes the data.
    pub grh: bool,
    /// The port, for datagrams.
    pub port: u32,
    /// The sender's MAC address, for datagrams.
    pub smac: Option<[u8; 6]>,
    /// The VLAN, for datagrams.
    pub vlan: Option<u16>,
    /// Whether the datagram was IPv4 (`Some(true)`) or IPv6, with RoCEv2.
    pub ipv4: Option<bool>,
}

impl<'a, D: QpOps> Wc<'a, D> {
    /// A successful completion with nothing else to tell.
    pub fn new(qp: &'a Qp<D>, wr_id: u64, opcode: WcOpcode) -> Self {
        Self {
            wr_id,
            status: WcStatus::Success,
            opcode,
            qp,
            byte_len: 0,
            vendor_err: 0,
            imm_data: None,
            invalidated: None,
            src_qp: 0,
            pkey_index: 0,
            sl: 0,
            grh: false,
            port: 0,
            smac: None,
            vlan: None,
            ipv4: None,
        }
    }
}

/// Has a completion that is going to be at `place` tell the number of its queue pair itself; returns what `qp` has to
/// be for that.
///
/// `ib_uverbs_poll_cq` reads `wc.qp->qp_num`, and nothing else of the queue pair, after the driver has let go of the
/// completion. It holds the completion queue only: another thread of the process may have destroyed the queue pair,
/// which the core has freed, by then. The number is put where the sender's MAC address would be, of which processes are
/// not told, and lives as long as the completion does.
fn number_within(
    place: *mut bindings::ib_wc,
    wc: &mut bindings::ib_wc,
    number: u32,
) -> *mut bindings::ib_qp {
    const PLACE: usize = offset_of!(bindings::ib_wc, smac);
    const NUMBER: usize = offset_of!(bindings::ib_qp, qp_num);
    const { assert!(PLACE % align_of::<u32>() == 0) };
    let bytes = number.to_ne_bytes();
    wc.smac[..bytes.len()].copy_from_slice(&bytes);
    place
        .cast::<u8>()
        .wrapping_add(PLACE)
        .wrapping_sub(NUMBER)
        .cast()
}

/// Room of a consumer for completions.
///
/// # Invariants
///
/// `wcs` has room for `capacity` completions, of which `len` are written.
pub struct Completions<'a> {
    wcs: *mut bindings::ib_wc,
    capacity: usize,
    len: usize,
    /// Whether the core polls for a process.
    user: bool,
    _p: PhantomData<&'a mut bindings::ib_wc>,
}

impl Completions<'_> {
    /// # Safety
    ///
    /// `wcs` must be valid for writes of `capacity` completions.
    pub(super) unsafe fn new(wcs: *mut bindings::ib_wc, capacity: usize, user: bool) -> Self {
        // INVARIANT: The caller vouches for room for `capacity`, of which none is used.
        Self {
            wcs,
            capacity,
            len: 0,
            user,
            _p: PhantomData,
        }
    }

    /// How many were written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none was written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether there is no more room.
    pub fn is_full(&self) -> bool {
        self.len == self.capacity
    }

    /// Adds a completion; returns whether there was room for it.
    pub fn push<D: QpOps>(&mut self, wc: &Wc<'_, D>) -> bool {
        if self.is_full() {
            return false;
        }
        let mut raw: bindings::ib_wc = pin_init::zeroed();
        let mut flags = 0;
        // SAFETY: `raw` is a local; the name is one of two views of a union, of eight bytes each.
        unsafe { *raw.__bindgen_anon_1.wr_id.as_mut() = wc.wr_id };
        if let Some(imm) = wc.imm_data {
            // SAFETY: `raw` is a local; all views of the union are integers of four bytes.
            unsafe { *raw.ex.imm_data.as_mut() = imm.to_be() };
            flags |= bindings::ib_wc_flags_IB_WC_WITH_IMM;
        } else if let Some(key) = wc.invalidated {
            // SAFETY: `raw` is a local; the key is a view of that union of four bytes, too.
            unsafe { *raw.ex.invalidate_rkey.as_mut() = key };
            flags |= bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE;
        }
        raw.status = wc.status.as_raw();
        raw.opcode = wc.opcode.as_raw();
        raw.vendor_err = wc.vendor_err;
        raw.byte_len = wc.byte_len;
        raw.qp = wc.qp.as_raw();
        raw.src_qp = wc.src_qp;
        raw.pkey_index = wc.pkey_index;
        raw.sl = wc.sl;
        raw.port_num = wc.port;
        if wc.grh {
            flags |= bindings::ib_wc_flags_IB_WC_GRH;
        }
        if let Some(smac) = wc.smac {
            raw.smac = smac;
            flags |= bindings::ib_wc_flags_IB_WC_WITH_SMAC;
        }
        if let Some(vlan) = wc.vlan {
            raw.vlan_id = vlan;
            flags |= bindings::ib_wc_flags_IB_WC_WITH_VLAN;
        }
        if let Some(ipv4) = wc.ipv4 {
            raw.network_hdr_type = if ipv4 {
                bindings::rdma_network_type_RDMA_NETWORK_IPV4
            } else {
                bindings::rdma_network_type_RDMA_NETWORK_IPV6
            } as u8;
            flags |= bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE;
        }
        raw.wc_flags = flags as i32;
        // SAFETY: By the type invariant there is room for `capacity` completions, and `len` was
        // compared with that above.
        let place = unsafe { self.wcs.add(self.len) };
        if self.user {
            raw.qp = number_within(place, &mut raw, wc.qp.number());
        }
        // SAFETY: There is room for a completion at `place`, as said above.
        unsafe { place.write(raw) };
        // INVARIANT: One more is written.
        self.len += 1;
        true
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_cq)]
mod tests {
    use super::*;

    #[test]
    fn an_event_before_the_consumer_is_ready_is_kept_until_it_is() {
        let gate = Gate::default();
        assert!(!gate.pass());
        assert!(!gate.pass());
        // However many there were, the consumer looks once.
        assert!(gate.open());
        assert!(gate.pass());
        assert!(!gate.open());
        assert!(gate.pass());

        let gate = Gate::default();
        assert!(!gate.open());
        assert!(gate.pass());
    }
}
