// SPDX-License-Identifier: GPL-2.0

//! Completion queues and completions.

use super::{kind, Driver, New, Object, ObjectRef, Qp};
use crate::bindings;
use core::marker::PhantomData;
use core::ptr;

/// A completion queue.
pub type Cq<D> = Object<kind::Cq, D>;
/// A counted reference to a completion queue.
pub type CqRef<D> = ObjectRef<kind::Cq, D>;

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

impl<D: Driver> New<'_, kind::Cq, D> {
    /// Tells the core how many entries the queue has; consumers may rely on `entries` completions
    /// fitting.
    pub fn set_entries(&mut self, entries: u32) {
        // SAFETY: The core is creating the queue and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe { (*self.as_raw()).cqe = entries as i32 }
    }
}

impl<D: Driver> Object<kind::Cq, D> {
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

    /// Calls the consumer's completion handler. May be called in interrupt context.
    ///
    /// For a queue of the kernel, not before somebody who was given the queue uses it: the core
    /// sets the handler before what the handler needs. A queue that its consumer polls when it
    /// likes (`IB_POLL_DIRECT`) has no use for the call, and none is made.
    pub fn complete(&self) {
        let cq = self.as_raw();
        // SAFETY: `&self` is a queue that is not freed. The core sets handler and context of a queue
        // of the kernel after the driver made it; the caller has kept events back until somebody
        // uses it, which is later. They do not change afterwards.
        unsafe {
            if (*cq).poll_ctx == bindings::ib_poll_context_IB_POLL_DIRECT {
                return;
            }
            if let Some(handler) = (*cq).comp_handler {
                handler(cq, (*cq).cq_context);
            }
        }
    }

    /// Tells the consumer that the queue failed. May be called in interrupt context.
    pub fn report_error(&self) {
        let cq = self.as_raw();
        let mut event: bindings::ib_event = pin_init::zeroed();
        // SAFETY: `&self` is a queue that is not freed; its handler of events was set before the
        // driver made it or, for a queue that the core polls, is null for ever. It only reads the
        // event.
        unsafe {
            event.device = (*cq).device;
            event.event = bindings::ib_event_type_IB_EVENT_CQ_ERR;
            *event.element.cq.as_mut() = cq;
            if let Some(handler) = (*cq).event_handler {
                handler(&mut event, (*cq).cq_context);
            }
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
pub struct Wc<'a, D: Driver> {
    /// The work request's id.
    pub id: u64,
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
    /// Immediate data, in network byte order as received.
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

impl<'a, D: Driver> Wc<'a, D> {
    /// A successful completion with nothing else to tell.
    pub fn new(qp: &'a Qp<D>, id: u64, opcode: WcOpcode) -> Self {
        Self {
            id,
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
            port: 1,
            smac: None,
            vlan: None,
            ipv4: None,
        }
    }
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
    _p: PhantomData<&'a mut bindings::ib_wc>,
}

impl Completions<'_> {
    /// # Safety
    ///
    /// `wcs` must be valid for writes of `capacity` completions.
    pub(super) unsafe fn new(wcs: *mut bindings::ib_wc, capacity: usize) -> Self {
        // INVARIANT: The caller vouches for room for `capacity`, of which none is used.
        Self {
            wcs,
            capacity,
            len: 0,
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
    pub fn push<D: Driver>(&mut self, wc: &Wc<'_, D>) -> bool {
        if self.is_full() {
            return false;
        }
        let mut raw: bindings::ib_wc = pin_init::zeroed();
        let mut flags = 0;
        // The fields of a union do not need `unsafe` to be written.
        // SAFETY: `raw` is a local; all views of its unions are plain integers.
        unsafe {
            *raw.__bindgen_anon_1.wr_id.as_mut() = wc.id;
            if let Some(imm) = wc.imm_data {
                *raw.ex.imm_data.as_mut() = imm;
                flags |= bindings::ib_wc_flags_IB_WC_WITH_IMM;
            } else if let Some(key) = wc.invalidated {
                *raw.ex.invalidate_rkey.as_mut() = key;
                flags |= bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE;
            }
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
        unsafe { self.wcs.add(self.len).write(raw) };
        // INVARIANT: One more is written.
        self.len += 1;
        true
    }
}
