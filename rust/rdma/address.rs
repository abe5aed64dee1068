// SPDX-License-Identifier: GPL-2.0

//! GIDs and where packets go.

use super::{kind, AhOps, Object, ObjectRef, Pd};
use crate::bindings;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::types::Opaque;

/// An address handle.
pub type Ah<D> = Object<kind::Ah, D>;
/// A counted reference to an address handle.
pub type AhRef<D> = ObjectRef<kind::Ah, D>;

impl<D: AhOps> Object<kind::Ah, D> {
    /// Its protection domain.
    pub fn pd(&self) -> &Pd<D> {
        // SAFETY: The core set the domain before the driver made the handle, and counts the handle
        // as a user of it until the handle is gone.
        unsafe { Object::from_raw((*self.as_raw()).pd) }
    }
}

/// A global identifier: an IPv6 address, or an IPv4 address mapped into one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether it stands for an IPv4 address.
    pub fn is_ipv4(&self) -> bool {
        self.0[..10] == [0; 10] && self.0[10..12] == [0xff; 2]
    }

    /// # Safety
    ///
    /// `raw` must be valid for reads.
    pub(super) unsafe fn from_raw(raw: *const bindings::ib_gid) -> Self {
        // SAFETY: The caller vouches that it can be read; a GID is sixteen bytes in any view.
        Self(unsafe { raw.cast::<[u8; 16]>().read_unaligned() })
    }
}

c_enum! {
    /// What a GID is for.
    pub enum GidType {
        /// InfiniBand and RoCEv1.
        Ib = ib_gid_type_IB_GID_TYPE_IB,
        /// RoCEv2.
        RoceV2 = ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP,
    }
}

/// An entry of a port's GID table.
///
/// # Invariants
///
/// Wraps an entry that is valid and does not change.
#[repr(transparent)]
pub struct GidAttr(Opaque<bindings::ib_gid_attr>);

impl GidAttr {
    /// # Safety
    ///
    /// `raw` must be valid and constant for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *const bindings::ib_gid_attr) -> &'a Self {
        // SAFETY: The caller vouches that the entry is valid and constant for `'a`; the wrapper is
        // transparent.
        unsafe { &*raw.cast() }
    }

    fn raw(&self) -> *mut bindings::ib_gid_attr {
        self.0.get()
    }

    /// The GID.
    pub fn gid(&self) -> Gid {
        // SAFETY: By the type invariant the entry is valid and does not change.
        unsafe { Gid::from_raw(core::ptr::addr_of!((*self.raw()).gid)) }
    }

    /// What it is for; `None` for a type this module does not know.
    pub fn gid_type(&self) -> Option<GidType> {
        // SAFETY: By the type invariant the entry is valid and does not change.
        GidType::from_raw(unsafe { (*self.raw()).gid_type })
    }

    /// Its place in the table.
    pub fn index(&self) -> u16 {
        // SAFETY: By the type invariant the entry is valid and does not change.
        unsafe { (*self.raw()).index }
    }

    /// The port.
    pub fn port(&self) -> u32 {
        // SAFETY: By the type invariant the entry is valid and does not change.
        unsafe { (*self.raw()).port_num }
    }

    /// The VLAN, if any, and the MAC address to send from.
    pub fn l2(&self) -> Result<(Option<u16>, [u8; 6])> {
        let mut vlan = 0xffff;
        let mut mac = [0; 6];
        // SAFETY: By the type invariant the entry is valid, inside an entry of the core's table;
        // the function writes the two locals.
        to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(self.raw(), &mut vlan, mac.as_mut_ptr())
        })?;
        Ok(((vlan < 0x1000).then_some(vlan), mac))
    }
}

/// Where packets of a queue pair or address handle go, by value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// The destination's GID.
    pub dgid: Gid,
    /// Index of the own GID.
    pub sgid_index: u8,
    /// The IPv6 flow label, and source of the UDP source port.
    pub flow_label: u32,
    /// The IP time to live.
    pub hop_limit: u8,
    /// The IP type of service.
    pub traffic_class: u8,
    /// The service level.
    pub sl: u8,
    /// The rate limit, `IB_RATE_*`.
    pub static_rate: u8,
    /// The port.
    pub port: u32,
    /// The MAC address of the next hop, on a RoCE port.
    pub dmac: [u8; 6],
    /// The destination's local identifier (LID), on a port of InfiniBand; there is none on a RoCE port.
    pub dlid: Option<u16>,
}

/// Attributes of an address handle, or of a queue pair's path.
///
/// # Invariants
///
/// Wraps valid attributes that do not change.
#[repr(transparent)]
pub struct AhAttr(Opaque<bindings::rdma_ah_attr>);

impl AhAttr {
    /// # Safety
    ///
    /// `raw` must be valid and constant for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *const bindings::rdma_ah_attr) -> &'a Self {
        // SAFETY: The caller vouches that the attributes are valid and constant for `'a`; the
        // wrapper is transparent.
        unsafe { &*raw.cast() }
    }

    fn raw(&self) -> &bindings::rdma_ah_attr {
        // SAFETY: By the type invariant the attributes are valid and constant for as long as
        // `self`.
        unsafe { &*self.0.get() }
    }

    /// Whether it is for a RoCE port, so that [`Path::dmac`] is set.
    pub fn is_roce(&self) -> bool {
        self.raw().type_ == bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE
    }

    /// Whether it is for a port of InfiniBand, so that [`Path::dlid`] is there.
    fn is_ib(&self) -> bool {
        self.raw().type_ == bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB
    }

    /// The path, by value.
    pub fn path(&self) -> Path {
        let raw = self.raw();
        Path {
            // SAFETY: `raw` is a reference, and the GID a field of what it refers to.
            dgid: unsafe { Gid::from_raw(&raw.grh.dgid) },
            sgid_index: raw.grh.sgid_index,
            flow_label: raw.grh.flow_label,
            hop_limit: raw.grh.hop_limit,
            traffic_class: raw.grh.traffic_class,
            sl: raw.sl,
            static_rate: raw.static_rate,
            port: raw.port_num,
            dmac: if self.is_roce() {
                // SAFETY: The type was looked at above: for RoCE it is this view of the union that
                // the core has set.
                unsafe { raw.__bindgen_anon_1.roce.as_ref().dmac }
            } else {
                [0; 6]
            },
            dlid: self.is_ib().then(|| {
                // SAFETY: The type was looked at: for InfiniBand it is this view of the union that the core has set.
                unsafe { raw.__bindgen_anon_1.ib.as_ref().dlid }
            }),
        }
    }

    /// The own GID, where the path has one.
    pub fn sgid(&self) -> Option<&GidAttr> {
        let sgid = self.raw().grh.sgid_attr;
        // SAFETY: Whoever filled the attributes in has taken a count of the entry, and keeps it for
        // as long as they are in use (`rdma_destroy_ah_attr`).
        (!sgid.is_null()).then(|| unsafe { GidAttr::from_raw(sgid) })
    }
}

impl Path {
    /// Writes the path where a consumer asked for it.
    pub(super) fn fill(&self, raw: &mut bindings::rdma_ah_attr) {
        // Within a subnet of InfiniBand packets need no global header.
        let is_local = self.dlid.is_some() && self.dgid == Gid::default();
        raw.ah_flags = if is_local {
            0
        } else {
            bindings::ib_ah_flags_IB_AH_GRH as u8
        };
        // SAFETY: `raw` is borrowed mutably; a GID is sixteen bytes in any view.
        unsafe {
            core::ptr::addr_of_mut!(raw.grh.dgid)
                .cast::<[u8; 16]>()
                .write_unaligned(self.dgid.0);
        }
        raw.grh.sgid_index = self.sgid_index;
        raw.grh.flow_label = self.flow_label;
        raw.grh.hop_limit = self.hop_limit;
        raw.grh.traffic_class = self.traffic_class;
        raw.sl = self.sl;
        raw.static_rate = self.static_rate;
        raw.port_num = self.port;
        match self.dlid {
            None => {
                raw.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
                // SAFETY: The type makes this view of the union the right one.
                unsafe { raw.__bindgen_anon_1.roce.as_mut().dmac = self.dmac };
            }
            Some(dlid) => {
                raw.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB;
                // SAFETY: The type makes this view of the union the right one.
                unsafe { raw.__bindgen_anon_1.ib.as_mut().dlid = dlid };
            }
        }
    }
}
