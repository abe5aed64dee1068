// SPDX-License-Identifier: GPL-2.0

//! Rules of flows (flow steering): which frames a queue pair of raw packets gets.

use super::{kind, New, Object, ObjectRef, Ops, Qp, QpOps, Udata};
use crate::bindings;
use core::marker::PhantomData;
use core::mem::{offset_of, size_of, MaybeUninit};
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// A rule of flows.
pub type Flow<D> = Object<kind::Flow, D>;
/// A counted reference to a rule of flows.
pub type FlowRef<D> = ObjectRef<kind::Flow, D>;

/// Rules of flows. Who may make them is seen to by the core, as with queue pairs of raw packets: it takes
/// `CAP_NET_RAW`.
pub trait FlowOps: QpOps {
    /// Driver's data of a rule.
    type Flow: Send + Sync;

    /// Makes a rule, by which a queue pair gets frames until it is ended. The queue pair stays as long.
    fn create_flow<'a>(
        qp: &Qp<Self>,
        new: New<'a, kind::Flow, Self>,
        attr: &FlowAttr<'_>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Flow<Self>>;

    /// Ends a rule.
    fn destroy_flow(flow: &Flow<Self>) -> Result;
}

impl<D: FlowOps> Ops<D> {
    /// Offers rules of flows.
    pub const fn with_flows(mut self) -> Self {
        self.raw.create_flow = Some(create_flow::<D>);
        self.raw.destroy_flow = Some(destroy_flow::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads, with as
/// many specifications behind it as it says.
unsafe extern "C" fn create_flow<D: FlowOps>(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_flow_attr,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_flow {
    let made = || -> Result<*mut bindings::ib_flow> {
        // SAFETY: `attr` is of `ib_uverbs_ex_create_flow`, which waits, and has put the specifications there.
        let attr = unsafe { FlowAttr::from_raw(attr) };
        // SAFETY: `create_qp` made the queue pair, whose object the command holds until this returns.
        let qp = unsafe { Qp::<D>::from_raw(qp) };
        let flow = KBox::into_raw(KBox::<Flow<D>>::new_uninit(GFP_KERNEL_ACCOUNT)?);
        let raw = flow.cast::<bindings::ib_flow>();
        // SAFETY: The memory was allocated just now, for a `Flow<D>`.
        unsafe { ptr::write_bytes(flow, 0, 1) };
        // SAFETY: The memory is ours, and of the core's part all zeroes are a value. The device is what
        // the core will set it to.
        unsafe { (*raw).device = qp.device().as_raw() };
        // SAFETY: All of the memory but what was written of the core's part is zero, and nobody else has
        // it. `udata` is null or that of the command, which waits.
        let created = unsafe {
            Flow::create_with(raw, udata, |new, udata| {
                D::create_flow(qp, new, &attr, udata)
            })
        };
        if created.is_err() {
            // SAFETY: It came from `into_raw` above, and `create_with` has dropped what was initialised in
            // it.
            drop(unsafe { KBox::from_raw(flow) });
        }
        created.map(|()| raw)
    };
    made().unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_flow<D: FlowOps>(flow: *mut bindings::ib_flow) -> c_int {
    from_result(|| {
        // SAFETY: `create_flow` made the rule. `uverbs_free_flow` calls this when its object is destroyed,
        // and does not touch it any more where this succeeds; else it is as before.
        unsafe { Flow::destroy(flow, D::destroy_flow) }?;
        // SAFETY: The memory came from `create_flow`, and nothing in it is initialised any more.
        drop(unsafe { KBox::from_raw(flow.cast::<MaybeUninit<Flow<D>>>()) });
        Ok(0)
    })
}

c_enum! {
    /// What a rule is for.
    pub enum FlowType {
        /// Frames that its specifications tell.
        Normal = ib_flow_attr_type_IB_FLOW_ATTR_NORMAL,
        /// All that no other rule is for.
        AllDefault = ib_flow_attr_type_IB_FLOW_ATTR_ALL_DEFAULT,
        /// Those to groups that no other rule is for, broadcast among them: whose address has the bit of groups.
        MulticastDefault = ib_flow_attr_type_IB_FLOW_ATTR_MC_DEFAULT,
        /// A copy of all frames.
        Sniffer = ib_flow_attr_type_IB_FLOW_ATTR_SNIFFER,
    }
}

/// What is asked of a new rule.
///
/// # Invariants
///
/// `raw` is valid, and behind it are `size` bytes less its own of specifications.
pub struct FlowAttr<'a> {
    raw: *const bindings::ib_flow_attr,
    _p: PhantomData<&'a bindings::ib_flow_attr>,
}

impl<'a> FlowAttr<'a> {
    /// # Safety
    ///
    /// `raw` must be valid for `'a`, and so must what it says is behind it.
    unsafe fn from_raw(raw: *const bindings::ib_flow_attr) -> Self {
        // INVARIANT: The caller vouches for it.
        Self {
            raw,
            _p: PhantomData,
        }
    }

    /// What it is for; none for what the core has no name for.
    pub fn flow_type(&self) -> Option<FlowType> {
        // SAFETY: By the type invariant it is valid.
        FlowType::from_raw(unsafe { (*self.raw).type_ })
    }

    /// Of two rules that are for a frame the one with the lower number counts.
    pub fn priority(&self) -> u16 {
        // SAFETY: By the type invariant it is valid.
        unsafe { (*self.raw).priority }
    }

    /// Whether it is to do anything but take frames that come in.
    pub fn has_flags(&self) -> bool {
        // SAFETY: By the type invariant it is valid.
        unsafe { (*self.raw).flags != 0 }
    }

    /// The port.
    pub fn port(&self) -> u32 {
        // SAFETY: By the type invariant it is valid.
        unsafe { (*self.raw).port }
    }

    /// What the frames are: all of it has to be so.
    pub fn specs(&self) -> FlowSpecs<'a> {
        let own = size_of::<bindings::ib_flow_attr>();
        // SAFETY: By the type invariant it is valid.
        let size = unsafe { usize::from((*self.raw).size) };
        let start = self.raw.wrapping_add(1).cast::<u8>();
        // SAFETY: By the type invariant so many bytes are behind it, all written by the core, for `'a`.
        FlowSpecs(unsafe { core::slice::from_raw_parts(start, size.saturating_sub(own)) })
    }
}

/// The specifications of a rule, each in its turn.
pub struct FlowSpecs<'a>(pub(super) &'a [u8]);

/// What a rule asks of a part of a frame: values, and a mask of the bits that count. All of it is as in
/// the frame, in network order.
pub enum FlowSpec {
    /// Ethernet.
    Ethernet(Masked<bindings::ib_flow_eth_filter>),
    /// IPv4.
    Ipv4(Masked<bindings::ib_flow_ipv4_filter>),
    /// IPv6.
    Ipv6(Masked<bindings::ib_flow_ipv6_filter>),
    /// TCP.
    Tcp(Masked<bindings::ib_flow_tcp_udp_filter>),
    /// UDP.
    Udp(Masked<bindings::ib_flow_tcp_udp_filter>),
    /// Anything else: other protocols, what is in tunnels, what is to be done.
    Other,
}

/// A value, and which of its bits count.
pub struct Masked<T> {
    /// The value.
    pub value: T,
    /// The bits that count.
    pub mask: T,
}

impl<T> Masked<T> {
    /// # Safety
    ///
    /// Any bytes must make a `T`.
    unsafe fn read(bytes: &[u8], value: usize, mask: usize) -> Option<Self> {
        let read = |at: usize| {
            let bytes = bytes.get(at..at.checked_add(size_of::<T>())?)?;
            // SAFETY: There are as many bytes as a `T` has. The caller vouches that they make one.
            Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
        };
        Some(Self {
            value: read(value)?,
            mask: read(mask)?,
        })
    }
}

impl Iterator for FlowSpecs<'_> {
    type Item = FlowSpec;

    /// What cannot be told apart ends them, as one of which nothing is known ([`FlowSpec::Other`]): a rule that leaves it out would
    /// be for more frames than were asked for.
    fn next(&mut self) -> Option<FlowSpec> {
        if self.0.is_empty() {
            return None;
        }
        let (spec, rest) = take_spec(self.0).unwrap_or((FlowSpec::Other, &[]));
        self.0 = rest;
        Some(spec)
    }
}

/// The first of some specifications, and the others; none where it says more bytes than there are, or less than it begins with.
fn take_spec(specs: &[u8]) -> Option<(FlowSpec, &[u8])> {
    /// Type and size begin each of them.
    const TYPE: usize = 4;
    const BEGINNING: usize = TYPE + 2;
    macro_rules! masked {
        ($bytes:ident, $raw:ident, $kind:ident) => {{
            // SAFETY: The filter is made of integers, and arrays of these.
            let masked = unsafe {
                Masked::read(
                    $bytes,
                    offset_of!(bindings::$raw, val),
                    offset_of!(bindings::$raw, mask),
                )
            };
            // One that is longer says something that is not known here.
            let whole = $bytes.len() == size_of::<bindings::$raw>();
            masked.filter(|_| whole).map(FlowSpec::$kind)
        }};
    }
    let kind = u32::from_ne_bytes(*specs.first_chunk::<TYPE>()?);
    let size = u16::from_ne_bytes(*specs.get(TYPE..)?.first_chunk()?);
    if usize::from(size) < BEGINNING {
        return None;
    }
    let (bytes, rest) = specs.split_at_checked(size.into())?;
    let spec = match kind {
        bindings::ib_flow_spec_type_IB_FLOW_SPEC_ETH => {
            masked!(bytes, ib_flow_spec_eth, Ethernet)
        }
        bindings::ib_flow_spec_type_IB_FLOW_SPEC_IPV4 => {
            masked!(bytes, ib_flow_spec_ipv4, Ipv4)
        }
        bindings::ib_flow_spec_type_IB_FLOW_SPEC_IPV6 => {
            masked!(bytes, ib_flow_spec_ipv6, Ipv6)
        }
        bindings::ib_flow_spec_type_IB_FLOW_SPEC_TCP => {
            masked!(bytes, ib_flow_spec_tcp_udp, Tcp)
        }
        bindings::ib_flow_spec_type_IB_FLOW_SPEC_UDP => {
            masked!(bytes, ib_flow_spec_tcp_udp, Udp)
        }
        _ => None,
    };
    Some((spec.unwrap_or(FlowSpec::Other), rest))
}
