// SPDX-License-Identifier: GPL-2.0

//! Reliable connections between kernel users.

use super::memory::{Buffer, Home, Mr};
use super::request::{LocalMemory, Op, RegMr, Request};
use super::ticket::{Held, Slot, Ticket, WrSlots};
use crate::bindings;
use crate::rdma::consumer::{Cq, Pd, Room};
use crate::rdma::{Access, Extension, Gid, Mtu, QpState, QpType};
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, to_result};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Release};
use kernel::sync::Arc;

/// What a queue pair is to hold.
#[derive(Clone, Copy, Debug)]
pub struct QpLimits {
    /// Send work requests.
    pub sends: u32,
    /// Receive work requests.
    pub recvs: u32,
}

/// Where a connection goes.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The queue pair there.
    pub qp_num: u32,
    /// Its GID.
    pub gid: Gid,
    /// The MAC address of the next hop; the core finds it for processes only.
    pub mac: [u8; 6],
    /// The own port.
    pub port: u32,
    /// Index of the own GID.
    pub sgid_index: u8,
    /// The payload of a packet.
    pub mtu: Mtu,
}

/// A client's reliable connection.
///
/// # Invariants
///
/// `raw` is owned by this value, in the domain `pd`, and completes to the queue of `room`.
pub struct Qp {
    raw: NonNull<bindings::ib_qp>,
    pd: Arc<Pd>,
    lkey: u32,
    extensions: &'static [Extension],
    /// Whether it left the reset state, before which nothing can be posted.
    used: Atomic<bool>,
    sends: Arc<WrSlots>,
    recvs: Arc<WrSlots>,
    room: Room,
}

impl Qp {
    /// Makes a queue pair for a reliable connection.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, limits: QpLimits) -> Result<Self> {
        Self::with_extensions(pd, cq, limits, &[])
    }

    /// The same with extensions; `EOPNOTSUPP` where the device does not have them, `EBUSY` where `cq` has no room left
    /// for the completions.
    pub fn with_extensions(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        limits: QpLimits,
        extensions: &'static [Extension],
    ) -> Result<Self> {
        if !ptr::eq(cq.lease().raw_device(), pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        let flags = Extension::flags_for(extensions, pd.lease().device().kernel_cap_flags())?;
        // With those that drain it.
        let requests = u64::from(limits.sends) + u64::from(limits.recvs) + 2;
        let room = Room::new(cq, requests)?;
        let (sends, recvs) = (WrSlots::new(limits.sends)?, WrSlots::new(limits.recvs)?);
        let mut attr: bindings::ib_qp_init_attr = pin_init::zeroed();
        attr.send_cq = cq.as_raw();
        attr.recv_cq = cq.as_raw();
        attr.qp_type = QpType::Rc.as_raw();
        attr.sq_sig_type = bindings::ib_sig_type_IB_SIGNAL_ALL_WR;
        attr.create_flags = flags.as_raw();
        // One more of each for draining.
        attr.cap.max_send_wr = limits.sends.saturating_add(1);
        attr.cap.max_recv_wr = limits.recvs.saturating_add(1);
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        let client = pd.lease().client().as_char_ptr();
        // SAFETY: The queue pair keeps protection domain and completion queue for as long as it is there; the
        // attributes are a local, and the name is static.
        let made = unsafe { bindings::ib_create_qp_kernel(pd.as_raw(), &mut attr, client) };
        let raw = from_err_ptr(made)?;
        // INVARIANT: Made just now.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            pd: pd.clone(),
            lkey: pd.local_dma_lkey(),
            extensions,
            used: Atomic::new(false),
            sends,
            recvs,
            room,
        })
    }

    /// The core's queue pair, which is there for as long as this is.
    pub fn as_raw(&self) -> *mut bindings::ib_qp {
        self.raw.as_ptr()
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: By the type invariant the queue pair is ours; its number does not change.
        unsafe { self.raw.as_ref().qp_num }
    }

    fn modify(&self, attr: &mut bindings::ib_qp_attr, mask: u32) -> Result {
        // SAFETY: By the type invariant the queue pair is ours; the core checks attributes and
        // mask.
        to_result(unsafe { bindings::ib_modify_qp(self.raw.as_ptr(), attr, mask as c_int) })
    }

    /// Takes the queue pair from reset to ready to send.
    pub fn connect(&self, peer: &Peer, access: Access) -> Result {
        use bindings as b;

        let mut attr: b::ib_qp_attr = pin_init::zeroed();
        attr.qp_state = QpState::Init.as_raw();
        attr.port_num = peer.port;
        attr.qp_access_flags = access.as_raw() as c_int;
        self.modify(
            &mut attr,
            b::ib_qp_attr_mask_IB_QP_STATE
                | b::ib_qp_attr_mask_IB_QP_PKEY_INDEX
                | b::ib_qp_attr_mask_IB_QP_PORT
                | b::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
        )?;

        self.used.store(true, Release);

        attr.qp_state = QpState::Rtr.as_raw();
        attr.path_mtu = peer.mtu.as_raw();
        attr.dest_qp_num = peer.qp_num;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        crate::rdma::Path {
            dgid: peer.gid,
            dmac: peer.mac,
            sgid_index: peer.sgid_index,
            hop_limit: 64,
            port: peer.port,
            ..crate::rdma::Path::default()
        }
        .fill(&mut attr.ah_attr);
        self.modify(
            &mut attr,
            b::ib_qp_attr_mask_IB_QP_STATE
                | b::ib_qp_attr_mask_IB_QP_AV
                | b::ib_qp_attr_mask_IB_QP_PATH_MTU
                | b::ib_qp_attr_mask_IB_QP_DEST_QPN
                | b::ib_qp_attr_mask_IB_QP_RQ_PSN
                | b::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC
                | b::ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER,
        )?;

        attr.qp_state = QpState::Rts.as_raw();
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        self.modify(
            &mut attr,
            b::ib_qp_attr_mask_IB_QP_STATE
                | b::ib_qp_attr_mask_IB_QP_TIMEOUT
                | b::ib_qp_attr_mask_IB_QP_RETRY_CNT
                | b::ib_qp_attr_mask_IB_QP_RNR_RETRY
                | b::ib_qp_attr_mask_IB_QP_SQ_PSN
                | b::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Its state now, as the device says.
    pub fn state(&self) -> Result<QpState> {
        let mut attr: bindings::ib_qp_attr = pin_init::zeroed();
        let mut init_attr: bindings::ib_qp_init_attr = pin_init::zeroed();
        let mask = bindings::ib_qp_attr_mask_IB_QP_STATE as c_int;
        // SAFETY: By the type invariant the queue pair is ours; the attributes are locals.
        to_result(unsafe {
            bindings::ib_query_qp(self.raw.as_ptr(), &mut attr, mask, &mut init_attr)
        })?;
        QpState::from_raw(attr.qp_state).ok_or(EIO)
    }

    /// Drains the send queue (SQD): what is posted from now on waits until [`Qp::resume`]. The peer is served
    /// meanwhile.
    pub fn suspend(&self) -> Result {
        let mut attr: bindings::ib_qp_attr = pin_init::zeroed();
        attr.qp_state = QpState::Sqd.as_raw();
        self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE)
    }

    /// Goes on after [`Qp::suspend`], or after a failed registration has drained the send queue, on a device that has
    /// such an extension. What was posted until this returns is flushed or carried
    /// out, in order; what is posted afterwards is carried out.
    pub fn resume(&self) -> Result {
        let mut attr: bindings::ib_qp_attr = pin_init::zeroed();
        attr.cur_qp_state = QpState::Sqd.as_raw();
        attr.qp_state = QpState::Rts.as_raw();
        self.modify(
            &mut attr,
            bindings::ib_qp_attr_mask_IB_QP_STATE | bindings::ib_qp_attr_mask_IB_QP_CUR_STATE,
        )
    }

    pub(super) fn give_back(slot: &Slot) {
        // SAFETY: `busy` was set by us and nothing was posted, so that no handler uses the slot.
        unsafe { *slot.held.get() = Held::default() };
        slot.busy.store(false, Release);
    }

    /// Part of a buffer, by a key of which its first byte has the address `start`.
    fn sge(
        buffer: &Buffer,
        range: &Range<usize>,
        start: u64,
        lkey: u32,
    ) -> Result<bindings::ib_sge> {
        if range.start > range.end || range.end > buffer.len() {
            return Err(EINVAL);
        }
        Ok(bindings::ib_sge {
            addr: start + range.start as u64,
            length: u32::try_from(range.len()).map_err(|_| EINVAL)?,
            lkey,
        })
    }

    /// Part of a buffer, which needs no registration.
    fn buffer_sge(&self, buffer: &Buffer, range: &Range<usize>) -> Result<bindings::ib_sge> {
        if !ptr::eq(buffer.memory.device(), self.pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        Self::sge(buffer, range, buffer.memory.dma(), self.lkey)
    }

    /// `EINVAL` for a region that the queue pair cannot use: of another device or domain.
    fn check_region(&self, mr: &Mr) -> Result {
        if mr.home() == Home::of(&self.pd) {
            Ok(())
        } else {
            Err(EINVAL)
        }
    }

    /// Checks what a request does and with what; gives what it holds, and its entry if it has one.
    fn prepare(
        &self,
        op: &Op<'_>,
        memory: &LocalMemory<'_>,
    ) -> Result<(Held, Option<bindings::ib_sge>)> {
        let registered = match op.registration() {
            Some(RegMr { mr, access }) => {
                self.check_region(mr)?;
                Extension::check_access(self.extensions, access)?;
                Some(mr.clone())
            }
            None => None,
        };
        if let Op::Driver { opcode, .. } = op {
            if opcode.opcode().is_none() || !self.extensions.contains(opcode) {
                return Err(EINVAL);
            }
        }
        let (buffer, region, sge) = match memory {
            LocalMemory::None => (None, None, None),
            LocalMemory::Buffer(buffer, range) => {
                let sge = self.buffer_sge(buffer, range)?;
                (Some((*buffer).clone()), None, Some(sge))
            }
            LocalMemory::Region(mr, range) => {
                self.check_region(mr)?;
                let sge = Self::sge(&mr.buffer, range, mr.iova(), mr.lkey())?;
                (None, Some((*mr).clone()), Some(sge))
            }
        };
        let held = Held {
            _buffer: buffer,
            _region: region,
            _registered: registered,
        };
        Ok((held, sge))
    }

    /// Posts a receive into `range` of `buffer`.
    pub fn recv(&self, buffer: &Arc<Buffer>, range: Range<usize>) -> Result<Ticket<'_>> {
        let mut sge = self.buffer_sge(buffer, &range)?;
        let slot = self.recvs.take(Held {
            _buffer: Some(buffer.clone()),
            ..Held::default()
        })?;
        let mut wr: bindings::ib_recv_wr = pin_init::zeroed();
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wr.__bindgen_anon_1.wr_cqe.as_mut() = slot.cqe.get() };
        // SAFETY: By the type invariant the queue pair is ours. The request and its entry are locals, which
        // the driver copies; the slot and what it holds live until the request is complete.
        let ret = unsafe { bindings::ib_post_recv(self.raw.as_ptr(), &wr, ptr::null_mut()) };
        if ret != 0 {
            Self::give_back(slot);
        }
        to_result(ret)?;
        Ok(Ticket { slot })
    }

    /// Posts a send work request with local memory.
    pub fn send(&self, op: Op<'_>, memory: LocalMemory<'_>) -> Result<Ticket<'_>> {
        let [ticket] = self.send_all([(op, memory)])?;
        Ok(ticket)
    }

    /// Posts several at once: the device finds all of them when it looks for the first. If one is
    /// refused those before it are carried out, and there is no ticket for any.
    pub fn send_all<const N: usize>(
        &self,
        posts: [(Op<'_>, LocalMemory<'_>); N],
    ) -> Result<[Ticket<'_>; N]> {
        self.post(posts, None)
    }

    /// Posts a request that registers a region under a key that need not be its own, to see what a device
    /// does about it.
    ///
    /// # Safety
    ///
    /// The device must refuse it, or `key` be the region's own: what is registered under the key of
    /// another region is there for peers when this one and its memory are gone.
    pub unsafe fn register_under(
        &self,
        key: u32,
        op: Op<'_>,
        memory: LocalMemory<'_>,
    ) -> Result<Ticket<'_>> {
        let [ticket] = self.post([(op, memory)], Some(key))?;
        Ok(ticket)
    }

    /// Posts requests in one list. Registrations are under `key`, if there is one, and else under that
    /// of their region.
    fn post<const N: usize>(
        &self,
        posts: [(Op<'_>, LocalMemory<'_>); N],
        key: Option<u32>,
    ) -> Result<[Ticket<'_>; N]> {
        let any: &Slot = self.sends.0.first().ok_or(EBUSY)?;
        let mut slots = [any; N];
        let mut sges: [Option<bindings::ib_sge>; N] = [const { None }; N];
        for (at, (op, memory)) in posts.iter().enumerate() {
            let taken = self.prepare(op, memory).and_then(|(held, sge)| {
                sges[at] = sge;
                self.sends.take(held)
            });
            match taken {
                Ok(slot) => slots[at] = slot,
                Err(error) => {
                    slots[..at].iter().for_each(|slot| Self::give_back(slot));
                    return Err(error);
                }
            }
        }
        let mut requests = posts.each_ref().map(|(op, _)| Request::new(op, key));
        let mut first = ptr::null_mut();
        for ((request, sge), slot) in requests.iter_mut().zip(&mut sges).zip(&slots).rev() {
            first = request.link(slot.cqe.get(), sge.as_mut(), first);
        }
        let mut bad: *const bindings::ib_send_wr = ptr::null();
        // SAFETY: By the type invariant the queue pair is ours. `first` is the first of a list of
        // locals, with entries that are locals, and the core copies them. The slots and what they hold
        // live until the requests are complete.
        let ret = unsafe { bindings::ib_post_send(self.raw.as_ptr(), first, &mut bad) };
        if ret != 0 {
            // Those from the bad one on were not posted; the others keep their slots.
            let not_posted = requests
                .iter_mut()
                .position(|request| ptr::eq(request.raw(), bad))
                .unwrap_or(N);
            slots[not_posted..]
                .iter()
                .for_each(|slot| Self::give_back(slot));
        }
        to_result(ret)?;
        Ok(slots.map(|slot| Ticket { slot }))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // There is no way from reset to error, which draining takes.
        if self.used.load(Acquire) {
            // SAFETY: By the type invariant the queue pair is ours; both queues have room for the request
            // that drains them.
            unsafe { bindings::ib_drain_qp(self.raw.as_ptr()) };
        }
        // A device that fails may have refused to be drained, which nobody is told.
        for slots in [&self.sends, &self.recvs] {
            if slots.is_used() {
                self.room.bury(slots.clone());
            }
        }
        // SAFETY: By the type invariant the queue pair is ours, and destroyed here and nowhere else. Requests that are not
        // complete have what they use, see above. Where a driver refuses, domain and completion queue stay, as they are
        // counted as used.
        unsafe { bindings::ib_destroy_qp_user(self.raw.as_ptr(), ptr::null_mut()) };
    }
}
