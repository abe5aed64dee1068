// SPDX-License-Identifier: GPL-2.0

//! What every driver of an RDMA device implements.

use super::*;
use kernel::build_error;
use kernel::error::VTABLE_DEFAULT_ERROR;
use kernel::prelude::*;

/// A driver of an RDMA device; the type itself is the driver's data of one device.
///
/// This trait is about the device and its ports. Those about objects come beside it: every driver
/// has [`PdOps`], [`CqOps`], [`QpOps`] and [`MrOps`], which are what the core demands. The others
/// are for those who have what they are about, and say so in [`Driver::OPS`]:
///
/// | trait | offers | by |
/// |---|---|---|
/// | [`UserOps`] | processes: contexts, mappings, methods | [`Ops::with_user`] |
/// | [`UserCqOps`] | completion queues that processes poll themselves | [`Ops::with_user_cqs`] |
/// | [`QueryContextOps`] | what processes ask about their context | [`Ops::with_context_query`] |
/// | [`AhOps`] | address handles: datagrams, the communication manager | [`Ops::with_ah`] |
/// | [`GidOps`] | a GID table that the device keeps: RoCE | [`Ops::with_gids`] |
/// | [`NetdevOps`] | a port that shares its link with a network interface | [`Ops::with_netdev`] |
/// | [`FrwrOps`] | regions registered by work request (FRWR) | [`Ops::with_frwr`] |
/// | [`OdpOps`] | advice about on-demand regions (ODP) | [`Ops::with_odp`] |
/// | [`MwOps`] | memory windows (MW) | [`Ops::with_mw`] |
/// | [`SrqOps`] | shared receive queues (SRQ) | [`Ops::with_srq`] |
/// | [`XrcOps`] | extended reliable connections (XRC) | [`Ops::with_xrc`] |
/// | [`DmOps`] | device memory (DM) | [`Ops::with_dm`] |
/// | [`FlowOps`] | rules of flows, for raw packets | [`Ops::with_flows`] |
/// | [`WqOps`] | work queues and tables of them (RSS) | [`Ops::with_wqs`] |
/// | [`McastOps`] | multicast groups | [`Ops::with_mcast`] |
/// | [`CounterOps`] | counters of ports | [`Ops::with_counters`] |
/// | [`QpCounterOps`] | counters of queue pairs | [`Ops::with_qp_counters`] |
/// | [`RawDumpOps`], [`RawSrqDumpOps`] | what the device has of an object | [`Ops::with_raw_dumps`], [`Ops::with_raw_srq_dumps`] |
/// | [`EventOps`] | events of the device as a whole | [`Ops::with_events`] |
///
/// Operations that create an object get a [`New`], initialise it with [`New::init`] and return what
/// that gave them. If they fail after initialising, the data is dropped. The operation that
/// destroys an object has to drop every [`ObjectRef`] the driver keeps; afterwards the data is
/// dropped.
///
/// An operation with a default that is not overridden is absent from the device's table.
///
/// Requests of user processes carry [`Udata`]; it is `None` for requests of the kernel. An
/// operation that gets one has to call [`Udata::read`] or [`Udata::expect_empty`]. Response bytes
/// that it does not write are zeroed for it.
#[vtable]
pub trait Driver: Sized + Send + Sync + 'static {
    /// Pattern of the device's name, with one `%d`.
    const NAME: &'static CStr;
    /// The driver's number in the user ABI; zero leaves finding the provider to the PCI id.
    const DRIVER_ID: u32 = 0;
    /// Version of the user ABI.
    const ABI_VERSION: u32;
    /// What the driver offers.
    const OPS: Ops<Self>;

    /// What the device is and can do.
    fn query_device(dev: &Device<Self>) -> Result<DeviceAttr>;

    /// The state of a port.
    fn query_port(dev: &Device<Self>, port: u32) -> Result<PortAttr>;

    /// What never changes about a port. Called once, while registering.
    fn port_immutable(dev: &Device<Self>, port: u32) -> Result<PortImmutable>;

    /// What kind of link a port has; Ethernet unless overridden.
    fn link_layer(_dev: &Device<Self>, _port: u32) -> LinkLayer {
        LinkLayer::Ethernet
    }

    /// An entry of the partition key table.
    fn query_pkey(_dev: &Device<Self>, _port: u32, _index: u16) -> Result<u16> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// An entry of the GID table of a port that is not RoCE.
    fn query_gid(_dev: &Device<Self>, _port: u32, _index: u32) -> Result<Gid> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Version of the firmware: major, minor, patch.
    fn firmware_version(_dev: &Device<Self>) -> (u16, u16, u16) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}
