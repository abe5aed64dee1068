// SPDX-License-Identifier: GPL-2.0

//! Ports: what they are, their state and their GID tables.

use super::ops::op_if;
use super::{Device, Driver, GidAttr, Ops};
use crate::bindings;
use kernel::error::from_result;
use kernel::prelude::*;

impl<D: Driver> Ops<D> {
    pub(super) const fn with_ports(mut self) -> Self {
        self.raw.query_port = Some(query_port::<D>);
        self.raw.get_port_immutable = Some(get_port_immutable::<D>);
        self.raw.get_link_layer = Some(get_link_layer::<D>);
        self.raw.query_pkey = op_if!(D::HAS_QUERY_PKEY, query_pkey::<D>);
        self.raw.query_gid = op_if!(D::HAS_QUERY_GID, query_gid::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
/// writes.
unsafe extern "C" fn query_port<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    attr: *mut bindings::ib_port_attr,
) -> c_int {
    from_result(|| {
        // SAFETY: The device is a `Device<D>`, as it has this table, and who calls `ib_query_port` has it.
        let dev = unsafe { Device::from_raw(dev) };
        // SAFETY: `attr` is of the caller of `ib_query_port`, which has cleared it; who calls waits.
        D::query_port(dev, port)?.fill(unsafe { &mut *attr });
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `immutable` must be valid for
/// writes.
unsafe extern "C" fn get_port_immutable<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    immutable: *mut bindings::ib_port_immutable,
) -> c_int {
    from_result(|| {
        // SAFETY: The device is a `Device<D>`, as it has this table, and `ib_register_device` is
        // registering it (`setup_port_data`).
        let values = D::port_immutable(unsafe { Device::from_raw(dev) }, port)?;
        // SAFETY: It is part of the core's data of the port, which nobody reads before
        // `setup_port_data` has returned.
        let raw = unsafe { &mut *immutable };
        raw.pkey_tbl_len = values.pkey_tbl_len as c_int;
        raw.gid_tbl_len = values.gid_tbl_len as c_int;
        raw.core_cap_flags = values.core_cap_flags;
        raw.max_mad_size = values.max_mad_size;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn get_link_layer<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
) -> bindings::rdma_link_layer {
    // SAFETY: The device is a `Device<D>`, as it has this table, and who calls
    // `rdma_port_get_link_layer` has it.
    D::link_layer(unsafe { Device::from_raw(dev) }, port).as_raw()
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `pkey` must be valid for
/// writes.
unsafe extern "C" fn query_pkey<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    from_result(|| {
        // SAFETY: The device is a `Device<D>`, as it has this table, and who calls `ib_query_pkey` has it.
        let value = D::query_pkey(unsafe { Device::from_raw(dev) }, port, index)?;
        // SAFETY: `pkey` is of the caller of `ib_query_pkey`, who waits.
        unsafe { *pkey = value };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `gid` must be valid for writes.
unsafe extern "C" fn query_gid<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    index: c_int,
    gid: *mut bindings::ib_gid,
) -> c_int {
    from_result(|| {
        // SAFETY: The device is a `Device<D>`, as it has this table. `config_non_roce_gid_cache` calls this,
        // while the device is registered.
        let value = D::query_gid(unsafe { Device::from_raw(dev) }, port, index as u32)?;
        // SAFETY: `gid` is a local of `config_non_roce_gid_cache`; a GID is sixteen bytes in any view.
        unsafe { gid.cast::<[u8; 16]>().write_unaligned(value.0) };
        Ok(0)
    })
}

/// Ports with a GID table that the core fills from the addresses of a network interface: RoCE.
pub trait GidOps: Driver {
    /// A GID came into the table of a port. May sleep.
    fn add_gid(dev: &Device<Self>, attr: &GidAttr) -> Result;

    /// A GID left the table of a port. May sleep.
    fn del_gid(dev: &Device<Self>, attr: &GidAttr) -> Result;
}

impl<D: GidOps> Ops<D> {
    /// Offers GID tables that the core fills.
    pub const fn with_gids(mut self) -> Self {
        self.raw.add_gid = Some(add_gid::<D>);
        self.raw.del_gid = Some(del_gid::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with an entry that it is adding.
unsafe extern "C" fn add_gid<D: GidOps>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    from_result(|| {
        // SAFETY: `__ib_cache_gid_add` holds the lock of the GID table: the entry is its own, and constant
        // until this returns, with a count of its interface.
        let (dev, port, netdev) = unsafe { ((*attr).device, (*attr).port_num, (*attr).ndev) };
        // SAFETY: The device is a `Device<D>`, as it has this table; its GID table goes before its data
        // (`ib_cache_cleanup_one`).
        let dev = unsafe { Device::<D>::from_raw(dev) };
        // Who adds it may have asked which interface is the port's before that changed.
        // SAFETY: The entry has a count of the interface, or none.
        if !unsafe { dev.takes_gids_of(port, netdev) } {
            return Err(ENODEV);
        }
        // SAFETY: The lock of the GID table is held until this returns.
        D::add_gid(dev, unsafe { GidAttr::from_raw(attr) })?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with an entry that `add_gid` was
/// called with.
unsafe extern "C" fn del_gid<D: GidOps>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    from_result(|| {
        // SAFETY: `del_gid` of the core holds the lock of the GID table, and a count of the entry, which is
        // constant. Its device is a `Device<D>`, as it has this table; the GID table goes before its
        // data (`ib_cache_cleanup_one`).
        let dev = unsafe { Device::from_raw((*attr).device) };
        // SAFETY: The core has a count of the entry until this returns.
        D::del_gid(dev, unsafe { GidAttr::from_raw(attr) })?;
        Ok(0)
    })
}

c_enum! {
    /// The largest payload of a packet.
    pub enum Mtu {
        /// 256 bytes.
        Bytes256 = ib_mtu_IB_MTU_256,
        /// 512 bytes.
        Bytes512 = ib_mtu_IB_MTU_512,
        /// 1024 bytes.
        Bytes1024 = ib_mtu_IB_MTU_1024,
        /// 2048 bytes.
        Bytes2048 = ib_mtu_IB_MTU_2048,
        /// 4096 bytes.
        Bytes4096 = ib_mtu_IB_MTU_4096,
    }
}

impl Mtu {
    /// The largest one whose packets fit an interface of that MTU, if any does.
    pub fn from_netdev(mtu: u32) -> Option<Self> {
        // SAFETY: The function only computes with its argument.
        Self::from_raw(unsafe { bindings::iboe_get_mtu(mtu as c_int) } as u32)
    }

    /// The bytes.
    pub const fn bytes(self) -> u32 {
        128 << self.as_raw()
    }
}

c_enum! {
    /// What kind of link a port has.
    pub enum LinkLayer {
        /// InfiniBand.
        Infiniband = rdma_link_layer_IB_LINK_LAYER_INFINIBAND,
        /// Ethernet.
        Ethernet = rdma_link_layer_IB_LINK_LAYER_ETHERNET,
    }
}

/// What a network interface says about an RDMA port.
#[derive(Clone, Copy, Debug, Default)]
pub struct EthernetPort {
    /// Whether frames can be sent.
    pub up: bool,
    /// The interface's MTU.
    pub mtu: u32,
    /// `IB_SPEED_*` that comes nearest.
    pub speed: u16,
    /// `IB_WIDTH_*` that comes nearest.
    pub width: u8,
}

/// The state of a port.
#[derive(Clone, Copy, Debug)]
pub struct PortAttr {
    /// Whether the port can send and receive.
    pub active: bool,
    /// The largest payload the device can do.
    pub max_mtu: Mtu,
    /// The largest payload that fits the link.
    pub active_mtu: Mtu,
    /// The link's MTU.
    pub phys_mtu: u32,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// Entries of the partition key table.
    pub pkey_tbl_len: u16,
    /// The largest message.
    pub max_msg_size: u32,
    /// `IB_SPEED_*`.
    pub speed: u16,
    /// `IB_WIDTH_*`.
    pub width: u8,
    /// `IB_PORT_*` capabilities beyond [`PortAttr::CM_SUP`].
    pub cap_flags: u32,
    /// How many virtual lanes it has, as `PortInfo:VLCap` of InfiniBand says it.
    pub max_vl_num: u8,
    /// Whether its GIDs are of IP addresses.
    pub ip_gids: bool,
}

impl PortAttr {
    /// The port has a communication manager.
    pub const CM_SUP: u32 = bindings::ib_port_capability_mask_bits_IB_PORT_CM_SUP;

    /// The attributes of a RoCE port behind a network interface.
    pub fn ethernet(port: &EthernetPort, max_mtu: Mtu, gid_tbl_len: u32) -> Self {
        let fits = Mtu::from_netdev(port.mtu).unwrap_or(Mtu::Bytes256);
        Self {
            active: port.up,
            max_mtu,
            active_mtu: if fits.as_raw() < max_mtu.as_raw() {
                fits
            } else {
                max_mtu
            },
            phys_mtu: port.mtu,
            gid_tbl_len,
            pkey_tbl_len: 1,
            max_msg_size: 1 << 31,
            speed: port.speed,
            width: port.width,
            cap_flags: Self::CM_SUP,
            max_vl_num: 1,
            ip_gids: true,
        }
    }

    pub(super) fn fill(&self, raw: &mut bindings::ib_port_attr) {
        let (state, phys) = if self.active {
            (
                bindings::ib_port_state_IB_PORT_ACTIVE,
                bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_LINK_UP,
            )
        } else {
            (
                bindings::ib_port_state_IB_PORT_DOWN,
                bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_DISABLED,
            )
        };
        raw.state = state;
        raw.phys_state = phys as u8;
        raw.max_mtu = self.max_mtu.as_raw();
        raw.active_mtu = self.active_mtu.as_raw();
        raw.phys_mtu = self.phys_mtu;
        raw.gid_tbl_len = self.gid_tbl_len as c_int;
        raw.pkey_tbl_len = self.pkey_tbl_len;
        raw.max_msg_sz = self.max_msg_size;
        raw.active_speed = self.speed;
        raw.active_width = self.width;
        raw.port_cap_flags = self.cap_flags;
        raw.max_vl_num = self.max_vl_num;
        raw.set_ip_gids(self.ip_gids.into());
    }
}

/// What never changes about a port.
#[derive(Clone, Copy, Debug)]
pub struct PortImmutable {
    /// Entries of the partition key table.
    pub pkey_tbl_len: u32,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// The protocol, `RDMA_CORE_PORT_*`.
    pub core_cap_flags: u32,
    /// The largest management datagram.
    pub max_mad_size: u32,
}

impl PortImmutable {
    /// A RoCEv2 port.
    pub fn roce_v2(gid_tbl_len: u32) -> Self {
        Self {
            pkey_tbl_len: 1,
            gid_tbl_len,
            core_cap_flags: bindings::RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP
                | bindings::RDMA_CORE_CAP_IB_MAD
                | bindings::RDMA_CORE_CAP_IB_CM
                | bindings::RDMA_CORE_CAP_AF_IB
                | bindings::RDMA_CORE_CAP_ETH_AH,
            max_mad_size: bindings::IB_MGMT_MAD_SIZE,
        }
    }
}
