// SPDX-License-Identifier: GPL-2.0

//! Work requests: those of kernel consumers, and those that the core posts for processes (uverbs).

use super::{kind, Access, Ah, AhOps, Driver, Mr, MrOps, Object};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr;
use core::slice;
use kernel::prelude::*;
use kernel::types::Opaque;

/// A piece of local memory.
///
/// # Invariants
///
/// Wraps an entry that is valid and does not change.
#[repr(transparent)]
pub struct Sge(Opaque<bindings::ib_sge>);

impl Sge {
    fn raw(&self) -> &bindings::ib_sge {
        // SAFETY: By the type invariant the element is valid and constant.
        unsafe { &*self.0.get() }
    }

    /// Where it starts.
    pub fn addr(&self) -> u64 {
        self.raw().addr
    }

    /// How many bytes it is.
    pub fn length(&self) -> u32 {
        self.raw().length
    }

    /// The key it is used with.
    pub fn lkey(&self) -> u32 {
        self.raw().lkey
    }
}

/// # Safety
///
/// `list` must be valid for `count` entries for `'a`.
unsafe fn sges<'a>(list: *const bindings::ib_sge, count: c_int) -> &'a [Sge] {
    if count <= 0 || list.is_null() {
        return &[];
    }
    // SAFETY: The caller vouches for `count` elements that are constant for `'a`; `Sge` is a
    // transparent wrapper.
    unsafe { slice::from_raw_parts(list.cast(), count as usize) }
}

c_flags! {
    /// How a send work request is to be done.
    pub struct SendFlags(u32) {
        /// Only after earlier reads and atomics are done.
        FENCE = ib_send_flags_IB_SEND_FENCE,
        /// With a completion.
        SIGNALED = ib_send_flags_IB_SEND_SIGNALED,
        /// With an event at the peer.
        SOLICITED = ib_send_flags_IB_SEND_SOLICITED,
        /// With the data copied while posting.
        INLINE = ib_send_flags_IB_SEND_INLINE,
    }
}

/// What a send work request does: an [`Op`](super::ulp::Op) to the consumer who posts it, a [`PostedOp`] to the
/// driver who finds it, which differ in what they know of a registration (`R`) and of a driver's own opcode (`O`).
#[derive(Clone, Copy)]
pub enum SendOp<R, O> {
    /// A message.
    Send,
    /// A message with immediate data.
    SendWithImm(u32),
    /// A message that invalidates a key of the peer.
    SendWithInvalidate(u32),
    /// A write to the peer's memory.
    RdmaWrite(Remote),
    /// A write to the peer's memory, then immediate data.
    RdmaWriteWithImm(Remote, u32),
    /// A read of the peer's memory.
    RdmaRead(Remote),
    /// A compare and swap of eight bytes of the peer's memory.
    CompareSwap {
        /// The peer's memory.
        remote: Remote,
        /// The value to compare with.
        compare: u64,
        /// The value to put there if equal.
        swap: u64,
    },
    /// A fetch and add to eight bytes of the peer's memory.
    FetchAdd {
        /// The peer's memory.
        remote: Remote,
        /// The value to add.
        add: u64,
    },
    /// The invalidation of a local key.
    LocalInvalidate(u32),
    /// The registration of a region. What is posted after it may use its key at once.
    RegMr(R),
    /// A registration by one of [`MrOps::REG_MR_OPCODES`]: what it does besides is the driver's to say.
    Driver {
        /// The opcode.
        opcode: O,
        /// The registration.
        registration: R,
        /// Immediate data or a key (`ib_send_wr::ex`), as the driver takes it.
        ex: u32,
    },
}

/// A registration that was posted.
pub struct RegWr<'a, D: MrOps> {
    /// The region, which was mapped before.
    pub mr: &'a Mr<D>,
    /// The key it is to have.
    pub key: u32,
    /// What may be done to it.
    pub access: Access,
}

/// What a send work request that was posted does.
pub type PostedOp<'a, D> = SendOp<RegWr<'a, D>, u32>;

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address.
    pub addr: u64,
    /// The key.
    pub rkey: u32,
}

/// Where a datagram (UD) goes.
pub struct UdWr<'a, D: AhOps> {
    /// The path.
    pub ah: &'a Ah<D>,
    /// The queue pair there.
    pub remote_qpn: u32,
    /// Its Q_Key.
    pub remote_qkey: u32,
    /// Index of the partition key, for the GSI queue pair.
    pub pkey_index: u16,
}

/// A send work request.
pub struct SendWr<'a, D: Driver> {
    raw: &'a bindings::ib_send_wr,
    qp: Poster,
    _p: PhantomData<&'a D>,
}

/// What there is to know of a queue pair to understand what is posted to it.
#[derive(Clone, Copy)]
struct Poster {
    device: *const bindings::ib_device,
    pd: *const bindings::ib_pd,
    /// Whether it sends datagrams (UD, GSI).
    is_ud: bool,
    /// Whether it belongs to a process.
    user: bool,
}

impl<'a, D: Driver> SendWr<'a, D> {
    /// The consumer's name for it, to be returned in the completion.
    pub fn wr_id(&self) -> u64 {
        // SAFETY: All views of the union are eight bytes of plain data.
        unsafe { *self.raw.__bindgen_anon_1.wr_id.as_ref() }
    }

    /// How it is to be done.
    pub fn flags(&self) -> SendFlags {
        SendFlags::from_raw(self.raw.send_flags as u32)
    }

    /// The gather list (scatter list of a read).
    pub fn sges(&self) -> &'a [Sge] {
        // SAFETY: Whoever posts keeps the list of elements, of that length, until posting returns
        // (`ib_post_send`, `ib_post_recv`, `ib_post_srq_recv`), and `'a` ends before.
        unsafe { sges(self.raw.sg_list, self.raw.num_sge) }
    }

    /// How many bytes the gather list has.
    pub fn length(&self) -> u64 {
        self.sges().iter().map(|sge| u64::from(sge.length())).sum()
    }

    /// Copies inline data to `to`; returns how many bytes there were.
    ///
    /// Fails if `to` is too small, the request is not [`SendFlags::INLINE`], or it is one of a process: what that
    /// posts (`ib_uverbs_post_send`) are addresses of its own.
    pub fn copy_inline(&self, to: &mut [u8]) -> Result<usize> {
        if self.qp.user || !self.flags().contains(SendFlags::INLINE) {
            return Err(EINVAL);
        }
        let mut used = 0;
        for sge in self.sges() {
            let length = sge.length() as usize;
            let room = to.get_mut(used..).and_then(|rest| rest.get_mut(..length));
            let room = room.ok_or(EINVAL)?;
            // SAFETY: The queue pair is no process's, so that it was not uverbs who posted: consumers in the
            // kernel give kernel addresses with inline data, of memory that can be read until posting returns.
            unsafe {
                ptr::copy_nonoverlapping(sge.addr() as *const u8, room.as_mut_ptr(), length);
            }
            used += length;
        }
        Ok(used)
    }

    fn ex(&self) -> u32 {
        // SAFETY: All views of the union are four bytes of plain data.
        unsafe { *self.raw.ex.invalidate_rkey.as_ref() }
    }

    fn imm_data(&self) -> u32 {
        u32::from_be(self.ex())
    }

    /// The request that this is the first member of; `EINVAL` on a queue pair that sends datagrams, where
    /// all are part of an `ib_ud_wr`.
    ///
    /// # Safety
    ///
    /// Consumers of connections must post the opcode of this request as a `T`.
    unsafe fn whole<T>(&self) -> Result<&'a T> {
        if self.qp.is_ud {
            return Err(EINVAL);
        }
        // SAFETY: The queue pair is one of a connection, so that the caller vouches that it was posted as a
        // `T`, which the consumer keeps until posting returns; `'a` ends before.
        Ok(unsafe { &*ptr::from_ref(self.raw).cast::<T>() })
    }

    /// What it is; `EOPNOTSUPP` for a kind that this module does not know.
    pub fn op(&self) -> Result<PostedOp<'a, D>>
    where
        D: MrOps,
    {
        let rdma = || -> Result<Remote> {
            // SAFETY: This is called for the opcodes of RDMA only, which consumers post as `ib_rdma_wr`.
            let wr = unsafe { self.whole::<bindings::ib_rdma_wr>() }?;
            Ok(Remote {
                addr: wr.remote_addr,
                rkey: wr.rkey,
            })
        };
        // SAFETY: This is called for atomic opcodes only, which consumers post as `ib_atomic_wr`.
        let atomic = || unsafe { self.whole::<bindings::ib_atomic_wr>() };
        let register = || {
            // SAFETY: This is called for registrations only, which consumers post as `ib_reg_wr`: `IB_WR_REG_MR`, and
            // `REG_MR_OPCODES`, which nobody posts but `ulp`, by `reg_wr`: uverbs refuses what it does not know.
            let wr = unsafe { self.whole::<bindings::ib_reg_wr>() }?;
            if wr.mr.is_null() {
                return Err(EINVAL);
            }
            // SAFETY: Whoever posts a registration keeps the region until the request is complete. Device
            // and domain are set where regions are made, and do not change.
            let (device, pd) = unsafe { ((*wr.mr).device, (*wr.mr).pd) };
            // That of another device need not be one of `D`. One of another domain is refused by the
            // device, which ends the connection.
            if !ptr::eq(device, self.qp.device) || !ptr::eq(pd, self.qp.pd) {
                return Err(EINVAL);
            }
            // SAFETY: Whoever posts keeps it, for longer than `'a`. It is of the queue pair's device, which
            // is one of `D`: whichever way it was made, `D` has made its data. That it need not be one for
            // registrations by work request is for `D` to find out.
            let mr = unsafe { Object::<kind::Mr, D>::from_raw(wr.mr) };
            Ok(RegWr {
                mr,
                key: wr.key,
                access: Access::from_raw(wr.access as u32),
            })
        };
        Ok(match self.raw.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => SendOp::Send,
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM => SendOp::SendWithImm(self.imm_data()),
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV => SendOp::SendWithInvalidate(self.ex()),
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => SendOp::RdmaWrite(rdma()?),
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM => {
                SendOp::RdmaWriteWithImm(rdma()?, self.imm_data())
            }
            bindings::ib_wr_opcode_IB_WR_RDMA_READ => SendOp::RdmaRead(rdma()?),
            bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP => {
                let wr = atomic()?;
                SendOp::CompareSwap {
                    remote: Remote {
                        addr: wr.remote_addr,
                        rkey: wr.rkey,
                    },
                    compare: wr.compare_add,
                    swap: wr.swap,
                }
            }
            bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD => {
                let wr = atomic()?;
                SendOp::FetchAdd {
                    remote: Remote {
                        addr: wr.remote_addr,
                        rkey: wr.rkey,
                    },
                    add: wr.compare_add,
                }
            }
            bindings::ib_wr_opcode_IB_WR_LOCAL_INV => SendOp::LocalInvalidate(self.ex()),
            bindings::ib_wr_opcode_IB_WR_REG_MR => SendOp::RegMr(register()?),
            opcode if D::REG_MR_OPCODES.contains(&opcode) => SendOp::Driver {
                opcode,
                registration: register()?,
                ex: self.ex(),
            },
            _ => return Err(eopnotsupp()),
        })
    }

    /// Where it goes, if the queue pair sends datagrams.
    pub fn ud(&self) -> Option<UdWr<'a, D>>
    where
        D: AhOps,
    {
        if !self.qp.is_ud {
            return None;
        }
        // SAFETY: Consumers of datagram queue pairs post `ib_ud_wr`, of which this is the first member, and
        // keep them until posting returns; `'a` ends before.
        let wr = unsafe { &*ptr::from_ref(self.raw).cast::<bindings::ib_ud_wr>() };
        Some(UdWr {
            // SAFETY: The address handle of a request is one of the queue pair's device, which is one of `D`,
            // and is not destroyed before the request is complete.
            ah: unsafe { Object::<kind::Ah, D>::from_raw(wr.ah) },
            remote_qpn: wr.remote_qpn,
            remote_qkey: wr.remote_qkey,
            pkey_index: wr.pkey_index,
        })
    }
}

const _: () = {
    assert!(offset_of!(bindings::ib_rdma_wr, wr) == 0);
    assert!(offset_of!(bindings::ib_atomic_wr, wr) == 0);
    assert!(offset_of!(bindings::ib_reg_wr, wr) == 0);
    assert!(offset_of!(bindings::ib_ud_wr, wr) == 0);
};

/// Send work requests that a consumer posts at once.
///
/// # Invariants
///
/// `next` is null or a list of valid work requests, for `'a`.
pub struct SendList<'a, D: Driver> {
    next: *const bindings::ib_send_wr,
    current: *const bindings::ib_send_wr,
    qp: Poster,
    _p: PhantomData<&'a D>,
}

impl<'a, D: Driver> SendList<'a, D> {
    /// # Safety
    ///
    /// `qp` must be a queue pair of a device of `D`, and `first` null or a list of valid work requests
    /// that are posted to it, for `'a`.
    pub(super) unsafe fn new(
        qp: *const bindings::ib_qp,
        first: *const bindings::ib_send_wr,
    ) -> Self {
        // SAFETY: The caller vouches for the queue pair; device, domain, type and whose it is are set before the
        // core calls `create_qp`, and do not change.
        let qp = unsafe {
            Poster {
                device: (*qp).device,
                pd: (*qp).pd,
                is_ud: matches!(
                    (*qp).qp_type,
                    bindings::ib_qp_type_IB_QPT_UD | bindings::ib_qp_type_IB_QPT_GSI
                ),
                user: !(*qp).uobject.is_null(),
            }
        };
        // INVARIANT: The caller vouches for a list that is kept for `'a`.
        Self {
            next: first,
            current: first,
            qp,
            _p: PhantomData,
        }
    }

    /// The request that was returned last, or the first.
    pub(super) fn current(&self) -> *const bindings::ib_send_wr {
        self.current
    }

    /// The next request.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<SendWr<'a, D>> {
        // SAFETY: By the type invariant it is null or the next request of a list that is kept for
        // `'a`.
        let raw = unsafe { self.next.as_ref() }?;
        self.current = raw;
        self.next = raw.next;
        Some(SendWr {
            raw,
            qp: self.qp,
            _p: PhantomData,
        })
    }
}

/// A receive work request.
pub struct RecvWr<'a> {
    raw: &'a bindings::ib_recv_wr,
}

impl<'a> RecvWr<'a> {
    /// The consumer's name for it, to be returned in the completion.
    pub fn wr_id(&self) -> u64 {
        // SAFETY: All views of the union are eight bytes of plain data.
        unsafe { *self.raw.__bindgen_anon_1.wr_id.as_ref() }
    }

    /// The scatter list.
    pub fn sges(&self) -> &'a [Sge] {
        // SAFETY: Whoever posts keeps the list of elements, of that length, until posting returns
        // (`ib_post_send`, `ib_post_recv`, `ib_post_srq_recv`), and `'a` ends before.
        unsafe { sges(self.raw.sg_list, self.raw.num_sge) }
    }
}

/// Receive work requests that a consumer posts at once.
///
/// # Invariants
///
/// `next` is null or a list of valid work requests, for `'a`.
pub struct RecvList<'a> {
    next: *const bindings::ib_recv_wr,
    current: *const bindings::ib_recv_wr,
    _p: PhantomData<&'a ()>,
}

impl<'a> RecvList<'a> {
    /// # Safety
    ///
    /// `first` must be null or a list of valid work requests for `'a`.
    pub(super) unsafe fn new(first: *const bindings::ib_recv_wr) -> Self {
        // INVARIANT: The caller vouches for a list that is kept for `'a`.
        Self {
            next: first,
            current: first,
            _p: PhantomData,
        }
    }

    /// The request that was returned last, or the first.
    pub(super) fn current(&self) -> *const bindings::ib_recv_wr {
        self.current
    }

    /// The next request.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<RecvWr<'a>> {
        // SAFETY: By the type invariant it is null or the next request of a list that is kept for
        // `'a`.
        let raw = unsafe { self.next.as_ref() }?;
        self.current = raw;
        self.next = raw.next;
        Some(RecvWr { raw })
    }
}
