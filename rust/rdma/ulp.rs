// SPDX-License-Identifier: GPL-2.0

//! The other side of verbs: kernel users of RDMA devices (upper-layer protocols).
//!
//! A [`Client`] is called with every device there is, and every one that comes later. What it makes
//! of a device lives at most as long as that call, which the lifetimes say.
//!
//! Work requests are owned by their queue pair, with the [`Buffer`]s they use, until they complete;
//! dropping a queue pair drains it first. [`Ticket::wait`] tells how one ended.

use super::{Access, DeviceName, Gid, GidAttr, GidType, Mtu, QpState, QpType, WcStatus};
use crate::bindings;
use crate::kernel_ext::completion::Completion;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, from_result, to_result};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Release};
use kernel::sync::Arc;
use kernel::time::Jiffies;
use kernel::types::Opaque;

/// A user of RDMA devices.
pub trait Client: 'static {
    /// The client's name.
    const NAME: &'static CStr;

    /// A device is there. May sleep; the device stays until this returns.
    ///
    /// The core does not say which client it calls, so there is no `self`.
    fn add(device: &Device<'_>) -> Result;
}

/// A client that the core knows, until this is dropped.
///
/// # Invariants
///
/// `client` is registered.
#[pin_data(PinnedDrop)]
pub struct Registration<T: Client> {
    #[pin]
    client: Opaque<bindings::ib_client>,
    _p: PhantomData<T>,
}

// SAFETY: `ib_unregister_client` may be called by any task.
unsafe impl<T: Client> Send for Registration<T> {}
// SAFETY: A reference to a registration leads to nothing.
unsafe impl<T: Client> Sync for Registration<T> {}

impl<T: Client> Registration<T> {
    /// Registers a client. It is called with all devices there are before this returns.
    pub fn new() -> impl PinInit<Self, Error> {
        // INVARIANT: Registered here.
        try_pin_init!(Self {
            client <- Opaque::try_ffi_init(|client: *mut bindings::ib_client| {
                // SAFETY: `client` is valid for writes and pinned until it is unregistered.
                to_result(unsafe {
                    ptr::write_bytes(client, 0, 1);
                    (*client).name = T::NAME.as_char_ptr();
                    (*client).add = Some(Self::add);
                    bindings::ib_register_client(client)
                })
            }),
            _p: PhantomData,
        })
    }

    /// # Safety
    ///
    /// To be called by the core.
    unsafe extern "C" fn add(device: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            T::add(&Device {
                raw: device,
                _p: PhantomData,
            })?;
            Ok(0)
        })
    }
}

#[pinned_drop]
impl<T: Client> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the client is registered; no callback of it runs when this
        // returns.
        unsafe { bindings::ib_unregister_client(self.client.get()) }
    }
}

/// A device, as a client sees it.
///
/// # Invariants
///
/// `raw` is registered for `'a`.
pub struct Device<'a> {
    raw: *mut bindings::ib_device,
    _p: PhantomData<&'a ()>,
}

/// The state of a port, as a client sees it.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// Whether it can send and receive.
    pub active: bool,
    /// The largest payload that fits the link.
    pub active_mtu: Mtu,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// The largest message.
    pub max_msg_size: u32,
}

impl<'a> Device<'a> {
    /// The name.
    pub fn name(&self) -> DeviceName {
        // SAFETY: The core does not free the device before the client's callback, which lent it, has
        // returned.
        unsafe { DeviceName::read(self.raw) }
    }

    /// How many pages a region may have that is registered by work request.
    pub fn max_registered_pages(&self) -> u32 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.max_fast_reg_page_list_len }
    }

    /// Whether it has atomic operations.
    pub fn has_atomics(&self) -> bool {
        // SAFETY: The core does not free the device before the client's callback, which lent it,
        // has returned; the attribute does not change.
        unsafe { (*self.raw).attrs.atomic_cap != bindings::ib_atomic_cap_IB_ATOMIC_NONE }
    }

    /// The state of a port.
    pub fn port(&self, port: u32) -> Result<Port> {
        let mut attr: bindings::ib_port_attr = pin_init::zeroed();
        // SAFETY: The core does not free the device before the client's callback, which lent it,
        // has returned; `attr` is a local.
        to_result(unsafe { bindings::ib_query_port(self.raw, port, &mut attr) })?;
        Ok(Port {
            active: attr.state == bindings::ib_port_state_IB_PORT_ACTIVE,
            active_mtu: Mtu::from_raw(attr.active_mtu).ok_or(EINVAL)?,
            gid_tbl_len: attr.gid_tbl_len as u32,
            max_msg_size: attr.max_msg_sz,
        })
    }

    /// The first RoCEv2 GID of a port, with its index and the MAC address it sends from; one of an
    /// IPv4 address if there is.
    pub fn roce_v2_gid(&self, port: u32) -> Result<(u8, Gid, [u8; 6])> {
        let mut found = None;
        for index in 0..self.port(port)?.gid_tbl_len.min(256) {
            // SAFETY: The core does not free the device before the client's callback, which lent
            // it, has returned; the function checks port and index.
            let attr = unsafe { bindings::rdma_get_gid_attr(self.raw, port, index as c_int) };
            let Ok(attr) = from_err_ptr(attr.cast_mut()) else {
                continue;
            };
            // SAFETY: `rdma_get_gid_attr` has counted the entry for us, which is given back here,
            // after its last use.
            let (gid, gid_type, l2) = unsafe {
                let entry = GidAttr::from_raw(attr);
                let values = (entry.gid(), entry.gid_type(), entry.l2());
                bindings::rdma_put_gid_attr(attr);
                values
            };
            let Ok((_, mac)) = l2 else {
                continue;
            };
            if gid_type == Some(GidType::RoceV2) && (gid.is_ipv4() || found.is_none()) {
                found = Some((index as u8, gid, mac));
                if gid.is_ipv4() {
                    break;
                }
            }
        }
        found.ok_or(ENOENT)
    }
}

/// A client's protection domain.
///
/// # Invariants
///
/// `raw` is owned by this value.
pub struct Pd<'a> {
    raw: NonNull<bindings::ib_pd>,
    _p: PhantomData<&'a Device<'a>>,
}

impl<'a> Pd<'a> {
    /// Makes a protection domain.
    pub fn new(device: &'a Device<'_>) -> Result<Self> {
        // SAFETY: The core does not free the device before the client's callback, which lent it,
        // has returned.
        let raw = from_err_ptr(unsafe { bindings::ib_alloc_pd(device.raw) })?;
        // INVARIANT: Made just now.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            _p: PhantomData,
        })
    }

    /// The key for all local memory, by DMA address.
    pub fn local_dma_lkey(&self) -> u32 {
        // SAFETY: By the type invariant the domain is ours; the key does not change.
        unsafe { self.raw.as_ref().local_dma_lkey }
    }
}

impl Drop for Pd<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the domain is ours; what was made in it borrows it, and is
        // gone.
        unsafe { bindings::ib_dealloc_pd(self.raw.as_ptr()) }
    }
}

/// A client's completion queue, served by a work queue of the core.
///
/// # Invariants
///
/// `raw` is owned by this value.
pub struct Cq<'a> {
    raw: NonNull<bindings::ib_cq>,
    _p: PhantomData<&'a Device<'a>>,
}

impl<'a> Cq<'a> {
    /// Makes a completion queue.
    pub fn new(device: &'a Device<'_>, entries: u32, vector: u32) -> Result<Self> {
        let entries = c_int::try_from(entries).map_err(|_| EINVAL)?;
        let vector = c_int::try_from(vector).map_err(|_| EINVAL)?;
        // SAFETY: The core does not free the device before the client's callback, which lent it,
        // has returned.
        let raw = from_err_ptr(unsafe { bindings::ib_alloc_cq(device.raw, entries, vector) })?;
        // INVARIANT: Made just now.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            _p: PhantomData,
        })
    }
}

impl Drop for Cq<'_> {
    fn drop(&mut self) {
        // SAFETY: Ours by the type invariant; queue pairs that use it borrow it.
        unsafe { bindings::ib_free_cq(self.raw.as_ptr()) }
    }
}

/// Memory that a device reads and writes.
///
/// # Invariants
///
/// `cpu` is `length` bytes of coherent memory at `dma` for the device, owned by this value.
pub struct Buffer<'a> {
    device: *mut bindings::ib_device,
    cpu: NonNull<u8>,
    dma: u64,
    length: usize,
    _p: PhantomData<&'a Device<'a>>,
}

// SAFETY: The memory may be used by any task; access is by copies.
unsafe impl Send for Buffer<'_> {}
// SAFETY: The memory may be used by any task; access is by copies.
unsafe impl Sync for Buffer<'_> {}

impl<'a> Buffer<'a> {
    /// Allocates zeroed memory.
    pub fn new(device: &'a Device<'_>, length: usize) -> Result<Arc<Self>> {
        let mut dma = 0;
        // SAFETY: The core does not free the device before the client's callback, which lent it,
        // has returned; `dma` is a local.
        let cpu = unsafe { bindings::ib_dma_alloc_coherent(device.raw, length, &mut dma) };
        // INVARIANT: Allocated just now.
        let this = Self {
            device: device.raw,
            cpu: NonNull::new(cpu.cast()).ok_or(ENOMEM)?,
            dma,
            length,
            _p: PhantomData,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Sets each byte to `f` of its index.
    pub fn fill(&self, f: impl Fn(usize) -> u8) {
        for index in 0..self.length {
            // SAFETY: `index` is less than the length, by the loop. The device may look at the
            // memory at any time, hence the volatile write.
            unsafe { self.cpu.as_ptr().add(index).write_volatile(f(index)) };
        }
    }

    /// A byte, `None` beyond the end.
    pub fn byte(&self, index: usize) -> Option<u8> {
        // SAFETY: `index` was compared with the length. The device may write the memory at any
        // time, hence the volatile read.
        (index < self.length).then(|| unsafe { self.cpu.as_ptr().add(index).read_volatile() })
    }

    /// The first index in `range` whose byte is not `f` of its index.
    pub fn first_difference(&self, range: Range<usize>, f: impl Fn(usize) -> u8) -> Option<usize> {
        range
            .into_iter()
            .find(|&index| self.byte(index) != Some(f(index)))
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the memory came from `ib_dma_alloc_coherent` with this
        // device and length; whoever posted it holds a reference to this, so that no request uses
        // it.
        unsafe {
            bindings::ib_dma_free_coherent(
                self.device,
                self.length,
                self.cpu.as_ptr().cast(),
                self.dma,
            );
        }
    }
}

/// A region for fast registration, mapped to a buffer.
///
/// # Invariants
///
/// `raw` is owned by this value.
pub struct Mr<'p> {
    raw: NonNull<bindings::ib_mr>,
    buffer: Arc<Buffer<'p>>,
}

impl<'p> Mr<'p> {
    /// Makes a region and maps it to `buffer`. It has to be registered by work request
    /// ([`Op::Register`]) before it can be used.
    pub fn new(pd: &'p Pd<'_>, buffer: Arc<Buffer<'p>>) -> Result<Self> {
        let pages = buffer.len().div_ceil(kernel::page::PAGE_SIZE) as u32;
        // SAFETY: `pd` is borrowed, so that the domain is not freed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(
                pd.raw.as_ptr(),
                bindings::ib_mr_type_IB_MR_TYPE_MEM_REG,
                pages,
            )
        })?;
        // INVARIANT: Made just now.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            buffer,
        };
        // SAFETY: The region is valid, and the memory is of the region's device.
        to_result(unsafe {
            bindings::rdma_map_mr_dma(raw, this.buffer.dma, this.buffer.len() as u32)
        })?;
        Ok(this)
    }

    /// The key for peers, as of the last registration.
    pub fn rkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; a registration may change the key
        // meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).rkey).read_volatile() }
    }

    /// The address of the first byte for peers.
    pub fn iova(&self) -> u64 {
        // SAFETY: By the type invariant the region is ours; a registration may change the address
        // meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).iova).read_volatile() }
    }

    /// Gives the region another key for its next registration.
    pub fn renew_key(&mut self) {
        // SAFETY: By the type invariant the region is ours, and nobody else has it while it is
        // borrowed mutably.
        unsafe {
            bindings::ib_update_fast_reg_key(self.raw.as_ptr(), (self.rkey() as u8).wrapping_add(1))
        }
    }
}

impl Drop for Mr<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the region is ours, and ended here and nowhere else. The
        // memory goes after it.
        unsafe {
            bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut());
        }
    }
}

/// A place in the peer's memory.
pub use super::Remote;

/// What a send work request does.
#[derive(Clone, Copy)]
pub enum Op<'r> {
    /// A message.
    Send,
    /// A message with immediate data.
    SendWithImm(u32),
    /// A message that invalidates a key of the peer.
    SendWithInvalidate(u32),
    /// A write to the peer's memory.
    Write(Remote),
    /// A write to the peer's memory, then immediate data.
    WriteWithImm(Remote, u32),
    /// A read of the peer's memory.
    Read(Remote),
    /// A compare (first) and swap (second).
    CompareSwap(Remote, u64, u64),
    /// A fetch and add.
    FetchAdd(Remote, u64),
    /// The registration of a region.
    Register(&'r Mr<'r>, Access),
    /// The invalidation of a local key.
    Invalidate(u32),
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether and why not.
    pub status: WcStatus,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// The key that the peer invalidated.
    pub invalidated: Option<u32>,
}

/// Room for one work request that is not complete yet.
#[repr(C)]
#[pin_data]
struct Slot<'p> {
    // First, because the core hands this part back.
    cqe: Opaque<bindings::ib_cqe>,
    busy: Atomic<bool>,
    outcome: UnsafeCell<Option<Outcome>>,
    buffer: UnsafeCell<Option<Arc<Buffer<'p>>>>,
    #[pin]
    done: Completion,
}

// SAFETY: `outcome` and `buffer` belong to whoever took the slot, then to the completion handler,
// then to whoever waits for it; `busy` and `done` order these.
unsafe impl Send for Slot<'_> {}
// SAFETY: `outcome` and `buffer` are reached only by whose turn it is, which `busy` and `done`
// order.
unsafe impl Sync for Slot<'_> {}

impl<'p> Slot<'p> {
    fn new() -> impl PinInit<Self> {
        let mut cqe: bindings::ib_cqe = pin_init::zeroed();
        cqe.done = Some(Self::complete);
        pin_init!(Self {
            cqe: Opaque::new(cqe),
            busy: Atomic::new(false),
            outcome: UnsafeCell::new(None),
            buffer: UnsafeCell::new(None),
            done <- Completion::new(),
        })
    }

    /// # Safety
    ///
    /// To be called by the core with a completion of a request that was posted with a slot.
    unsafe extern "C" fn complete(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: The caller vouches for a completion of a request that was posted with a slot; the
        // queue pair, which owns the slot, is drained before it drops it.
        let (wc, slot) = unsafe {
            let cqe = *(*wc).__bindgen_anon_1.wr_cqe.as_ref();
            (&*wc, &*cqe.cast::<Self>())
        };
        let flags = wc.wc_flags as u32;
        // SAFETY: All views of the union are plain data.
        let ex = unsafe { *wc.ex.invalidate_rkey.as_ref() };
        let outcome = Outcome {
            status: WcStatus::from_raw(wc.status).unwrap_or(WcStatus::General),
            byte_len: wc.byte_len,
            imm_data: (flags & bindings::ib_wc_flags_IB_WC_WITH_IMM != 0)
                .then_some(u32::from_be(ex)),
            invalidated: (flags & bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE != 0).then_some(ex),
        };
        // SAFETY: The request is complete, so that the slot is the handler's until `done`.
        unsafe {
            *slot.outcome.get() = Some(outcome);
            *slot.buffer.get() = None;
        }
        slot.done.complete();
    }
}

/// A work request that was posted.
pub struct Ticket<'q, 'p> {
    slot: &'q Slot<'p>,
}

impl Ticket<'_, '_> {
    /// Waits until the request is complete. `ETIMEDOUT` leaves it to the queue pair.
    pub fn wait(self, timeout: Jiffies) -> Result<Outcome> {
        if !self.slot.done.wait_timeout(timeout) {
            return Err(ETIMEDOUT);
        }
        // SAFETY: `done` was waited for, which the handler signals last.
        let outcome = unsafe { (*self.slot.outcome.get()).take() };
        self.slot.busy.store(false, Release);
        outcome.ok_or(EIO)
    }
}

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
    /// Index of the own GID.
    pub sgid_index: u8,
    /// The payload of a packet.
    pub mtu: Mtu,
}

/// A client's reliable connection.
///
/// # Invariants
///
/// `raw` is owned by this value.
pub struct Qp<'p> {
    raw: NonNull<bindings::ib_qp>,
    lkey: u32,
    /// Whether it left the reset state, before which nothing can be posted.
    used: Atomic<bool>,
    slots: KVec<Pin<KBox<Slot<'p>>>>,
}

impl<'p> Qp<'p> {
    /// Makes a queue pair for a reliable connection.
    pub fn new(pd: &'p Pd<'_>, cq: &'p Cq<'_>, limits: QpLimits) -> Result<Self> {
        let mut slots = KVec::new();
        for _ in 0..u64::from(limits.sends) + u64::from(limits.recvs) {
            slots.push(KBox::pin_init(Slot::new(), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        let mut attr: bindings::ib_qp_init_attr = pin_init::zeroed();
        attr.send_cq = cq.raw.as_ptr();
        attr.recv_cq = cq.raw.as_ptr();
        attr.qp_type = QpType::Rc.as_raw();
        attr.sq_sig_type = bindings::ib_sig_type_IB_SIGNAL_ALL_WR;
        // One more of each for draining.
        attr.cap.max_send_wr = limits.sends.saturating_add(1);
        attr.cap.max_recv_wr = limits.recvs.saturating_add(1);
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        // SAFETY: Protection domain and completion queue are valid, and outlive the queue pair.
        let raw = from_err_ptr(unsafe { bindings::ib_create_qp(pd.raw.as_ptr(), &mut attr) })?;
        // INVARIANT: Made just now.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            lkey: pd.local_dma_lkey(),
            used: Atomic::new(false),
            slots,
        })
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
        attr.port_num = 1;
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
        super::Path {
            dgid: peer.gid,
            dmac: peer.mac,
            sgid_index: peer.sgid_index,
            hop_limit: 64,
            port: 1,
            ..super::Path::default()
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

    fn take_slot(&self, buffer: Option<&Arc<Buffer<'p>>>) -> Result<&Slot<'p>> {
        let slot = self
            .slots
            .iter()
            .find(|slot| slot.busy.cmpxchg(false, true, Acquire).is_ok())
            .ok_or(EBUSY)?;
        // SAFETY: `busy` was false and was set by us in one step, so that the slot is ours.
        unsafe { *slot.buffer.get() = buffer.cloned() };
        Ok(slot)
    }

    fn give_back(slot: &Slot<'p>) {
        // SAFETY: `busy` was set by us and nothing was posted, so that no handler uses the slot.
        unsafe { *slot.buffer.get() = None };
        slot.busy.store(false, Release);
    }

    fn sge(&self, buffer: &Buffer<'_>, range: &Range<usize>) -> Result<bindings::ib_sge> {
        if range.start > range.end || range.end > buffer.len() {
            return Err(EINVAL);
        }
        Ok(bindings::ib_sge {
            addr: buffer.dma + range.start as u64,
            length: u32::try_from(range.len()).map_err(|_| EINVAL)?,
            lkey: self.lkey,
        })
    }

    /// Posts a receive into `range` of `buffer`.
    pub fn recv(&self, buffer: &Arc<Buffer<'p>>, range: Range<usize>) -> Result<Ticket<'_, 'p>> {
        let mut sge = self.sge(buffer, &range)?;
        let slot = self.take_slot(Some(buffer))?;
        let mut wr: bindings::ib_recv_wr = pin_init::zeroed();
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        // SAFETY: All views of the union are plain data. The core copies the request; the slot and
        // its buffer live until it is complete.
        let ret = unsafe {
            *wr.__bindgen_anon_1.wr_cqe.as_mut() = slot.cqe.get();
            bindings::ib_post_recv(self.raw.as_ptr(), &wr)
        };
        if ret != 0 {
            Self::give_back(slot);
        }
        to_result(ret)?;
        Ok(Ticket { slot })
    }

    /// Posts a send work request with `range` of `buffer`.
    ///
    /// A region to be registered has to live until the request is complete, and be dropped before
    /// the queue pair: wait for the ticket.
    pub fn send(
        &self,
        op: Op<'_>,
        memory: Option<(&Arc<Buffer<'p>>, Range<usize>)>,
    ) -> Result<Ticket<'_, 'p>> {
        let mut sge = match &memory {
            Some((buffer, range)) => self.sge(buffer, range)?,
            None => pin_init::zeroed(),
        };
        let slot = self.take_slot(memory.as_ref().map(|(buffer, _)| *buffer))?;
        let mut wr = Request::new(op);
        let raw = wr.raw();
        // SAFETY: `raw` is the first member of each view of the union, which is a local; the core
        // copies it; the slot and its buffer live until the request is complete.
        let ret = unsafe {
            *(*raw).__bindgen_anon_1.wr_cqe.as_mut() = slot.cqe.get();
            if memory.is_some() {
                (*raw).sg_list = &mut sge;
                (*raw).num_sge = 1;
            }
            bindings::ib_post_send(self.raw.as_ptr(), raw)
        };
        if ret != 0 {
            Self::give_back(slot);
        }
        to_result(ret)?;
        Ok(Ticket { slot })
    }
}

impl Drop for Qp<'_> {
    fn drop(&mut self) {
        // SAFETY: Ours by the type invariant. Draining completes all requests, so that slots and
        // buffers can go afterwards. There is no way from reset to error, which draining takes.
        unsafe {
            if self.used.load(Acquire) {
                bindings::ib_drain_qp(self.raw.as_ptr());
            }
            bindings::ib_destroy_qp(self.raw.as_ptr());
        }
    }
}

/// A send work request with room for any kind.
enum Request {
    Plain(bindings::ib_send_wr),
    Rdma(bindings::ib_rdma_wr),
    Atomic(bindings::ib_atomic_wr),
    Reg(bindings::ib_reg_wr),
}

impl Request {
    fn new(op: Op<'_>) -> Self {
        use bindings as b;

        let plain = |opcode, ex: u32| {
            let mut wr: b::ib_send_wr = pin_init::zeroed();
            wr.opcode = opcode;
            // SAFETY: All views of the union are plain data.
            unsafe { *wr.ex.invalidate_rkey.as_mut() = ex };
            wr
        };
        let rdma = |opcode, remote: Remote, imm: u32| {
            let mut wr: b::ib_rdma_wr = pin_init::zeroed();
            wr.wr = plain(opcode, imm);
            wr.remote_addr = remote.addr;
            wr.rkey = remote.rkey;
            Self::Rdma(wr)
        };
        let atomic = |opcode, remote: Remote, compare_add, swap| {
            let mut wr: b::ib_atomic_wr = pin_init::zeroed();
            wr.wr = plain(opcode, 0);
            wr.remote_addr = remote.addr;
            wr.rkey = remote.rkey;
            wr.compare_add = compare_add;
            wr.swap = swap;
            Self::Atomic(wr)
        };
        match op {
            Op::Send => Self::Plain(plain(b::ib_wr_opcode_IB_WR_SEND, 0)),
            Op::SendWithImm(imm) => {
                Self::Plain(plain(b::ib_wr_opcode_IB_WR_SEND_WITH_IMM, imm.to_be()))
            }
            Op::SendWithInvalidate(key) => {
                Self::Plain(plain(b::ib_wr_opcode_IB_WR_SEND_WITH_INV, key))
            }
            Op::Write(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_WRITE, remote, 0),
            Op::WriteWithImm(remote, imm) => rdma(
                b::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
                remote,
                imm.to_be(),
            ),
            Op::Read(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_READ, remote, 0),
            Op::CompareSwap(remote, compare, swap) => atomic(
                b::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
                remote,
                compare,
                swap,
            ),
            Op::FetchAdd(remote, add) => {
                atomic(b::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD, remote, add, 0)
            }
            Op::Register(mr, access) => {
                let mut wr: b::ib_reg_wr = pin_init::zeroed();
                wr.wr = plain(b::ib_wr_opcode_IB_WR_REG_MR, 0);
                wr.mr = mr.raw.as_ptr();
                wr.key = mr.rkey();
                wr.access = access.as_raw() as c_int;
                Self::Reg(wr)
            }
            Op::Invalidate(key) => Self::Plain(plain(b::ib_wr_opcode_IB_WR_LOCAL_INV, key)),
        }
    }

    fn raw(&mut self) -> *mut bindings::ib_send_wr {
        match self {
            Self::Plain(wr) => wr,
            Self::Rdma(wr) => &mut wr.wr,
            Self::Atomic(wr) => &mut wr.wr,
            Self::Reg(wr) => &mut wr.wr,
        }
    }
}
