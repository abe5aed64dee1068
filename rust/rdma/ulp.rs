// SPDX-License-Identifier: GPL-2.0

//! The other side of verbs: kernel users of RDMA devices (upper-layer protocols).
//!
//! A [`Client`] is called with every device there is, and every one that comes later. What it makes
//! of a device holds a [`Lease`] of it: the call ends when the last one is gone.
//!
//! Each object keeps what it needs: a region its domain and its memory, a queue pair its domain and its
//! completion queue. Work requests are owned by their queue pair, with the [`Buffer`]s and regions ([`Mr`])
//! that they use, until they complete; dropping a queue pair drains it first. [`Ticket::wait`] tells how one
//! ended. Who forgets an object ([`core::mem::forget`]) loses memory, and a device that cannot be removed, but
//! nothing is freed that somebody may still use.

use super::consumer::request::{rdma_wr, reg_wr, send_wr};
use super::consumer::{self, Landlord, Room};
use super::{
    Access, DeviceName, Extension, Gid, GidAttr, GidType, Mtu, QpState, QpType, SendOp, WcOpcode,
    WcStatus,
};
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

    /// A device is there. May sleep; the device stays until this returns and the last clone of the lease is gone.
    ///
    /// The core does not say which client it calls, so there is no `self`.
    fn add(lease: &Lease) -> Result;
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
                let described = bindings::ib_client {
                    name: T::NAME.as_char_ptr(),
                    add: Some(Self::add),
                    ..pin_init::zeroed()
                };
                // SAFETY: `client` is memory for a client that nobody else knows yet.
                unsafe { client.write(described) };
                // SAFETY: It was described just now, and is pinned until `drop` unregisters it.
                to_result(unsafe { bindings::ib_register_client(client) })
            }),
            _p: PhantomData,
        })
    }

    /// # Safety
    ///
    /// To be called by the core as `add` of a client, with a device that is registered until this returns.
    unsafe extern "C" fn add(device: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            // SAFETY: The caller vouches that the device stays registered until this returns, before which the value
            // is dropped.
            let landlord = unsafe { Landlord::new(device, T::NAME)? };
            T::add(&landlord.lease())?;
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
    /// # Safety
    ///
    /// `raw` has to be registered for `'a`.
    pub(super) unsafe fn from_raw(raw: *mut bindings::ib_device) -> Self {
        // INVARIANT: The caller vouches for that.
        Self {
            raw,
            _p: PhantomData,
        }
    }

    /// The name.
    pub fn name(&self) -> DeviceName {
        // SAFETY: By the type invariant the device is registered, so that it is not freed.
        unsafe { DeviceName::read(self.raw) }
    }

    /// How many pages a region may have that is registered by work request.
    pub fn max_registered_pages(&self) -> u32 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.max_fast_reg_page_list_len }
    }

    /// The page sizes that a region may have, a bit each.
    pub fn page_sizes(&self) -> u64 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.page_size_cap }
    }

    fn kernel_cap_flags(&self) -> u64 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.kernel_cap_flags }
    }

    /// Whether it has something that the core has no name for.
    pub fn has(&self, extension: &Extension) -> bool {
        extension.is_among(self.kernel_cap_flags())
    }

    /// How many RDMA reads a queue pair may have under way, and be asked for at a time.
    pub fn max_reads(&self) -> u8 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attributes do not change.
        let attrs = unsafe { &(*self.raw).attrs };
        let most = attrs.max_qp_rd_atom.min(attrs.max_qp_init_rd_atom);
        most.clamp(0, u8::MAX.into()) as u8
    }

    /// Whether it has atomic operations.
    pub fn has_atomics(&self) -> bool {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.atomic_cap != bindings::ib_atomic_cap_IB_ATOMIC_NONE }
    }

    /// The state of a port.
    pub fn port(&self, port: u32) -> Result<Port> {
        let mut attr: bindings::ib_port_attr = pin_init::zeroed();
        // SAFETY: By the type invariant the device is registered, so that it is not freed; `attr` is a
        // local, and the function checks `port`.
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
            // SAFETY: By the type invariant the device is registered, so that it is not freed; the
            // function checks port and index.
            let attr = unsafe { bindings::rdma_get_gid_attr(self.raw, port, index as c_int) };
            let Ok(attr) = from_err_ptr(attr.cast_mut()) else {
                continue;
            };
            // SAFETY: `rdma_get_gid_attr` has counted the entry for us, until it is put below; an entry
            // that is counted does not change.
            let entry = unsafe { GidAttr::from_raw(attr) };
            let (gid, gid_type, l2) = (entry.gid(), entry.gid_type(), entry.l2());
            // SAFETY: `rdma_get_gid_attr` has counted the entry for us, and it is not used any more.
            unsafe { bindings::rdma_put_gid_attr(attr) };
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

pub use super::consumer::{Cq, Lease, Pd, PollContext};

/// Memory that a device reads and writes, and who has a reference as well, at any time: in single bytes.
pub struct Buffer {
    /// Nobody makes chunks or regions of it, which would be somebody's alone.
    memory: consumer::Buffer,
}

impl Buffer {
    /// Allocates zeroed memory.
    pub fn new(lease: &Lease, length: usize) -> Result<Arc<Self>> {
        let memory = consumer::Buffer::new(lease, length)?;
        Ok(Arc::new(Self { memory }, GFP_KERNEL)?)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    fn cpu(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Sets each byte to `f` of its index.
    pub fn fill(&self, f: impl Fn(usize) -> u8) {
        for index in 0..self.len() {
            // SAFETY: `index` is less than the length, by the loop. The device and others may look at the
            // memory at any time, hence the volatile write.
            unsafe { self.cpu().add(index).write_volatile(f(index)) };
        }
    }

    /// A byte, `None` beyond the end.
    pub fn byte(&self, index: usize) -> Option<u8> {
        // SAFETY: `index` was compared with the length. The device and others may write the memory at any
        // time, hence the volatile read.
        (index < self.len()).then(|| unsafe { self.cpu().add(index).read_volatile() })
    }

    /// The first index in `range` whose byte is not `f` of its index.
    pub fn first_difference(&self, range: Range<usize>, f: impl Fn(usize) -> u8) -> Option<usize> {
        range
            .into_iter()
            .find(|&index| self.byte(index) != Some(f(index)))
    }
}

/// A region for fast registration, mapped to a buffer.
///
/// What is mapped does not change: it may be registered, invalidated and registered again, and be in
/// use meanwhile. It ends with the last reference; who posts it has one until the request is complete.
///
/// # Invariants
///
/// `raw` is owned by this value, and in the domain `pd`.
pub struct Mr {
    raw: NonNull<bindings::ib_mr>,
    buffer: Arc<Buffer>,
    pd: Arc<Pd>,
}

// SAFETY: `ib_dereg_mr_user` may be called by any task.
unsafe impl Send for Mr {}
// SAFETY: What changes of a region are its keys, whole words that are read and written as such.
unsafe impl Sync for Mr {}

impl Mr {
    /// Makes a region and maps it to `buffer`. It has to be registered by work request
    /// ([`Op::reg_mr`]) before it can be used.
    pub fn new(pd: &Arc<Pd>, buffer: Arc<Buffer>) -> Result<Arc<Self>> {
        Self::with_page_size(pd, buffer, kernel::page::PAGE_SIZE as u32)
    }

    /// The same in pages of another size ([`Device::page_sizes`]).
    pub fn with_page_size(pd: &Arc<Pd>, buffer: Arc<Buffer>, page_size: u32) -> Result<Arc<Self>> {
        Self::make(pd, buffer, page_size, 0)
    }

    /// The same in pages of the usual size, with room for `pages` of them if the buffer has fewer.
    pub fn with_room(pd: &Arc<Pd>, buffer: Arc<Buffer>, pages: u32) -> Result<Arc<Self>> {
        Self::make(pd, buffer, kernel::page::PAGE_SIZE as u32, pages)
    }

    fn make(pd: &Arc<Pd>, buffer: Arc<Buffer>, page_size: u32, room: u32) -> Result<Arc<Self>> {
        let sizes = pd.lease().device().page_sizes();
        let known = page_size.is_power_of_two() && sizes & u64::from(page_size) != 0;
        if !known || !ptr::eq(buffer.memory.device(), pd.lease().raw_device()) {
            return Err(EINVAL);
        }
        let pages = buffer.memory.pages(page_size)?;
        // SAFETY: `pd` is borrowed, so that the domain is not freed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(
                pd.as_raw(),
                bindings::ib_mr_type_IB_MR_TYPE_MEM_REG,
                pages.max(room),
            )
        })?;
        // INVARIANT: Made just now.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            buffer,
            pd: pd.clone(),
        };
        // SAFETY: The region was made just now, for so many pages and for the device of the buffer, as was compared above;
        // nobody else has it yet. It goes before its buffer: `drop` comes before the fields, and leaks the buffer where the
        // region stays.
        unsafe { this.buffer.memory.map_to(raw, page_size)? };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// The core's region, which is there for as long as this is.
    pub fn as_raw(&self) -> *mut bindings::ib_mr {
        self.raw.as_ptr()
    }

    /// The memory that it is mapped to.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Its device and domain.
    fn home(&self) -> Home {
        Home::of(&self.pd)
    }

    /// The key for peers, as of the last registration or [`Mr::renew_key`].
    pub fn rkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; the key may be renewed meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).rkey).read_volatile() }
    }

    /// The key for local work requests, likewise.
    fn lkey(&self) -> u32 {
        // SAFETY: By the type invariant the region is ours; the key may be renewed meanwhile, hence
        // the volatile read.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).lkey).read_volatile() }
    }

    /// The address of the first byte for peers.
    pub fn iova(&self) -> u64 {
        // SAFETY: By the type invariant the region is ours; the driver may look at it meanwhile, and
        // nobody writes it after it was mapped.
        unsafe { ptr::addr_of!((*self.raw.as_ptr()).iova).read_volatile() }
    }

    /// Gives the region another key for its next registration: the next of 256.
    pub fn renew_key(&self) {
        let next = |key: u32| (key & !0xff) | u32::from((key as u8).wrapping_add(1));
        let (lkey, rkey) = (next(self.lkey()), next(self.rkey()));
        // SAFETY: By the type invariant the region is ours. Others read the keys meanwhile, or renew
        // them too, hence the volatile writes: each finds a key of the region.
        unsafe {
            ptr::addr_of_mut!((*self.raw.as_ptr()).lkey).write_volatile(lkey);
            ptr::addr_of_mut!((*self.raw.as_ptr()).rkey).write_volatile(rkey);
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the region is ours, and ended here and nowhere else: no work
        // request has it, as the last reference goes. The memory goes after it.
        let ended = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        if ended != 0 {
            // A device that did not let go may still use the memory, and the core lists the region with its domain:
            // both are lost.
            core::mem::forget(self.buffer.clone());
            core::mem::forget(self.pd.clone());
        }
    }
}

/// Where something belongs. What is used together belongs to the same.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Home {
    device: *mut bindings::ib_device,
    pd: *mut bindings::ib_pd,
}

impl Home {
    fn of(pd: &Pd) -> Self {
        Self {
            device: pd.lease().raw_device(),
            pd: pd.as_raw(),
        }
    }
}

/// A place in the peer's memory.
pub use super::Remote;

/// The registration of a region, of [`Op::reg_mr`] and [`Op::driver`].
#[derive(Clone, Copy)]
pub struct RegMr<'r> {
    mr: &'r Arc<Mr>,
    access: Access,
}

/// What a send work request does.
pub type Op<'r> = SendOp<RegMr<'r>, Extension>;

impl<'r> Op<'r> {
    /// The registration of a region, with what may be done to it then.
    pub fn reg_mr(mr: &'r Arc<Mr>, access: Access) -> Self {
        Self::RegMr(RegMr { mr, access })
    }

    /// The same by the opcode of an extension, on a queue pair that has it, with what the driver takes as
    /// immediate data or key (`ib_send_wr::ex`).
    pub fn driver(extension: Extension, mr: &'r Arc<Mr>, access: Access, ex: u32) -> Self {
        Self::Driver {
            opcode: extension,
            registration: RegMr { mr, access },
            ex,
        }
    }

    fn registration(&self) -> Option<RegMr<'r>> {
        match *self {
            Self::RegMr(registration) | Self::Driver { registration, .. } => Some(registration),
            _ => None,
        }
    }
}

/// The local memory of a work request.
#[derive(Clone)]
pub enum LocalMemory<'r> {
    /// None.
    None,
    /// Part of a buffer, which needs no registration.
    Buffer(&'r Arc<Buffer>, Range<usize>),
    /// Part of a region, by the key that it has now.
    Region(&'r Arc<Mr>, Range<usize>),
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether and why not.
    pub status: WcStatus,
    /// What it was, of one that succeeded; else nobody says.
    pub opcode: Option<WcOpcode>,
    /// The device's own number for why not.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// The key that the peer invalidated.
    pub invalidated: Option<u32>,
}

impl Outcome {
    /// What a completion says.
    pub(super) fn of(wc: &bindings::ib_wc) -> Self {
        let flags = wc.wc_flags as u32;
        // SAFETY: All views of the union are plain data.
        let ex = unsafe { *wc.ex.invalidate_rkey.as_ref() };
        let status = WcStatus::from_raw(wc.status).unwrap_or(WcStatus::General);
        Self {
            status,
            opcode: WcOpcode::from_raw(wc.opcode).filter(|_| status == WcStatus::Success),
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            imm_data: (flags & bindings::ib_wc_flags_IB_WC_WITH_IMM != 0)
                .then_some(u32::from_be(ex)),
            invalidated: (flags & bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE != 0).then_some(ex),
        }
    }
}

/// Room for one work request that is not complete yet.
#[repr(C)]
#[pin_data]
struct Slot {
    // First, because the core hands this part back.
    cqe: Opaque<bindings::ib_cqe>,
    busy: Atomic<bool>,
    outcome: UnsafeCell<Option<Outcome>>,
    held: UnsafeCell<Held>,
    #[pin]
    done: Completion,
}

/// What a work request uses, and has to stay until it is complete.
#[derive(Default)]
struct Held {
    _buffer: Option<Arc<Buffer>>,
    _region: Option<Arc<Mr>>,
    _registered: Option<Arc<Mr>>,
}

// SAFETY: `outcome` belongs to whoever took the slot, then to the completion handler, then to whoever
// waits for it; `held` to whoever took the slot, then to whoever waits for it, and in the end to who
// drops the queue pair. `busy` and `done` order these.
unsafe impl Send for Slot {}
// SAFETY: `outcome` and `held` are reached only by whose turn it is, which `busy` and `done` order.
unsafe impl Sync for Slot {}

impl Slot {
    fn new() -> impl PinInit<Self> {
        let mut cqe: bindings::ib_cqe = pin_init::zeroed();
        cqe.done = Some(Self::complete);
        pin_init!(Self {
            cqe: Opaque::new(cqe),
            busy: Atomic::new(false),
            outcome: UnsafeCell::new(None),
            held: UnsafeCell::new(Held::default()),
            done <- Completion::new(),
        })
    }

    /// # Safety
    ///
    /// To be called by the core with a completion of a request that was posted with a slot.
    unsafe extern "C" fn complete(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: The caller vouches for the completion, which is its own until this returns.
        let wc = unsafe { &*wc };
        // SAFETY: Both views of the union are eight bytes of plain data, and this one was posted.
        let cqe = unsafe { *wc.__bindgen_anon_1.wr_cqe.as_ref() };
        // SAFETY: The caller vouches for a request that was posted with a slot, which begins with what the
        // core hands back; until `done` the slot is there, either since the queue pair is, or in the graveyard of the
        // completion queue, which is there for as long as that is polled.
        let slot = unsafe { &*cqe.cast::<Self>() };
        let outcome = Outcome::of(wc);
        // SAFETY: The request is complete, so that the slot is the handler's until `done`. What it
        // held is left to who waits: to end a region takes its time.
        unsafe { *slot.outcome.get() = Some(outcome) };
        slot.done.complete();
    }
}

/// A work request that was posted.
pub struct Ticket<'q> {
    slot: &'q Slot,
}

impl Ticket<'_> {
    /// Whether the request is complete.
    pub fn is_complete(&self) -> bool {
        self.slot.done.is_done()
    }

    /// Waits until the request is complete. `ETIMEDOUT` leaves it to the queue pair.
    pub fn wait(self, timeout: Jiffies) -> Result<Outcome> {
        if !self.slot.done.wait_timeout(timeout) {
            return Err(ETIMEDOUT);
        }
        // SAFETY: `done` was waited for, which the handler signals last.
        let (outcome, held) = unsafe {
            (
                (*self.slot.outcome.get()).take(),
                core::mem::take(&mut *self.slot.held.get()),
            )
        };
        self.slot.busy.store(false, Release);
        drop(held);
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

/// Room for work requests of one queue: no more are posted to it, so that it has room for the one that drains
/// it.
struct WrSlots(KVec<Pin<KBox<Slot>>>);

impl WrSlots {
    fn new(count: u32) -> Result<Arc<Self>> {
        let mut slots = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for _ in 0..count {
            slots.push(KBox::pin_init(Slot::new(), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        Ok(Arc::new(Self(slots), GFP_KERNEL)?)
    }

    /// Whether a request is under way, when nobody posts any more.
    fn is_used(&self) -> bool {
        // One that is done may still be busy, where nobody waits for it.
        self.0
            .iter()
            .any(|slot| slot.busy.load(Acquire) && !slot.done.is_done())
    }

    /// Takes a slot for a request that holds what it uses; `EBUSY` where there is none.
    fn take(&self, held: Held) -> Result<&Slot> {
        let slot = self
            .0
            .iter()
            .find(|slot| slot.busy.cmpxchg(false, true, Acquire).is_ok())
            .ok_or(EBUSY)?;
        // SAFETY: `busy` was false and was set by us in one step, so that the slot is ours.
        unsafe { *slot.held.get() = held };
        Ok(slot)
    }
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
        super::Path {
            dgid: peer.gid,
            dmac: peer.mac,
            sgid_index: peer.sgid_index,
            hop_limit: 64,
            port: peer.port,
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

    fn give_back(slot: &Slot) {
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

/// A send work request with room for any kind.
enum Request {
    Plain(bindings::ib_send_wr),
    Rdma(bindings::ib_rdma_wr),
    Atomic(bindings::ib_atomic_wr),
    Reg(bindings::ib_reg_wr),
}

impl Request {
    /// The form of an operation; a registration is under `key`, or that of its region.
    fn new(op: &Op<'_>, key: Option<u32>) -> Self {
        use bindings as b;

        let rdma = |opcode, remote, imm| Self::Rdma(rdma_wr(opcode, remote, imm));
        let atomic = |opcode, remote: Remote, compare_add, swap| {
            let mut wr: b::ib_atomic_wr = pin_init::zeroed();
            wr.wr = send_wr(opcode, 0);
            wr.remote_addr = remote.addr;
            wr.rkey = remote.rkey;
            wr.compare_add = compare_add;
            wr.swap = swap;
            Self::Atomic(wr)
        };
        let register = |opcode, ex, RegMr { mr, access }: RegMr<'_>| {
            let key = key.unwrap_or_else(|| mr.rkey());
            Self::Reg(reg_wr(opcode, ex, mr.raw.as_ptr(), key, access))
        };
        match *op {
            Op::Send => Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND, 0)),
            Op::SendWithImm(imm) => {
                Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND_WITH_IMM, imm.to_be()))
            }
            Op::SendWithInvalidate(key) => {
                Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_SEND_WITH_INV, key))
            }
            Op::RdmaWrite(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_WRITE, remote, 0),
            Op::RdmaWriteWithImm(remote, imm) => rdma(
                b::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
                remote,
                imm.to_be(),
            ),
            Op::RdmaRead(remote) => rdma(b::ib_wr_opcode_IB_WR_RDMA_READ, remote, 0),
            Op::CompareSwap {
                remote,
                compare,
                swap,
            } => atomic(
                b::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
                remote,
                compare,
                swap,
            ),
            Op::FetchAdd { remote, add } => {
                atomic(b::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD, remote, add, 0)
            }
            Op::RegMr(registration) => register(b::ib_wr_opcode_IB_WR_REG_MR, 0, registration),
            Op::Driver {
                opcode: extension,
                registration,
                ex,
            } => {
                // `Qp::prepare` has looked whether there is one.
                let opcode = extension.opcode().unwrap_or(b::ib_wr_opcode_IB_WR_REG_MR);
                register(opcode, ex, registration)
            }
            Op::LocalInvalidate(key) => Self::Plain(send_wr(b::ib_wr_opcode_IB_WR_LOCAL_INV, key)),
        }
    }

    /// The part that all kinds begin with (`rust/rdma/work.rs` looks whether they do).
    fn raw(&mut self) -> *mut bindings::ib_send_wr {
        match self {
            Self::Plain(wr) => wr,
            Self::Rdma(wr) => ptr::from_mut(wr).cast(),
            Self::Atomic(wr) => ptr::from_mut(wr).cast(),
            Self::Reg(wr) => ptr::from_mut(wr).cast(),
        }
    }

    /// Puts it in front of `next`, to be done with the memory of `sge` and completed by `cqe`. Returns
    /// the whole list.
    fn link(
        &mut self,
        cqe: *mut bindings::ib_cqe,
        sge: Option<&mut bindings::ib_sge>,
        next: *mut bindings::ib_send_wr,
    ) -> *mut bindings::ib_send_wr {
        let raw = self.raw();
        // SAFETY: All kinds begin with an `ib_send_wr`, which `self` owns.
        let wr = unsafe { &mut *raw };
        wr.num_sge = c_int::from(sge.is_some());
        wr.sg_list = sge.map_or(ptr::null_mut(), ptr::from_mut);
        wr.next = next;
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wr.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
        raw
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_ulp)]
mod tests {
    use super::*;
    use crate::rdma::consumer::{Grave, Graveyard};

    #[test]
    fn no_more_is_posted_than_a_queue_was_made_for() -> Result {
        let slots = WrSlots::new(2)?;
        let first = slots.take(Held::default())?;
        slots.take(Held::default())?;
        assert_eq!(slots.take(Held::default()).err(), Some(EBUSY));
        Qp::give_back(first);
        slots.take(Held::default())?;
        assert_eq!(slots.take(Held::default()).err(), Some(EBUSY));
        // One that was made for none has none.
        let none = WrSlots::new(0)?;
        assert_eq!(none.take(Held::default()).err(), Some(EBUSY));
        Ok(())
    }

    /// What the core says of a request.
    fn report(cqe: *mut bindings::ib_cqe) {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        wc.status = WcStatus::Success.as_raw();
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wc.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
        // SAFETY: As the core does; the test hands in that of a slot.
        unsafe { Slot::complete(ptr::null_mut(), &mut wc) };
    }

    #[test]
    fn what_was_not_drained_stays_until_nobody_polls() -> Result {
        let graveyard = KBox::pin_init(Graveyard::new(), GFP_KERNEL)?;
        let mut late = ptr::null_mut();
        for is_late in [false, true] {
            let slots = WrSlots::new(2)?;
            late = slots.take(Held::default())?.cqe.get();
            assert!(slots.is_used());
            if !is_late {
                report(late);
            }
            // As the queue pair does when it goes.
            if slots.is_used() {
                graveyard.bury(slots, Grave::new()?);
            }
            assert_eq!(graveyard.len(), usize::from(is_late));
        }
        report(late);
        Ok(())
    }
}
