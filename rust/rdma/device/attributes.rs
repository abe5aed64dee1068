// SPDX-License-Identifier: GPL-2.0

//! What a device can do, as its driver says.

use crate::bindings;
use crate::rdma::OnDemandAttr;
use kernel::prelude::*;

c_flags! {
    /// What a device can do.
    pub struct DeviceCaps(u64) {
        /// It changes a port's state by itself.
        PORT_ACTIVE_EVENT = ib_device_cap_flags_IB_DEVICE_PORT_ACTIVE_EVENT,
        /// It has a system image GUID.
        SYS_IMAGE_GUID = ib_device_cap_flags_IB_DEVICE_SYS_IMAGE_GUID,
        /// It sends a receiver-not-ready reply.
        RC_RNR_NAK_GEN = ib_device_cap_flags_IB_DEVICE_RC_RNR_NAK_GEN,
        /// A completion queue may be resized.
        RESIZE_MAX_WR = ib_device_cap_flags_IB_DEVICE_RESIZE_MAX_WR,
        /// It has memory windows.
        MEM_WINDOW = ib_device_cap_flags_IB_DEVICE_MEM_WINDOW,
        /// Fast registration, local and remote invalidation.
        MEM_MGT_EXTENSIONS = ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS,
        /// XRC.
        XRC = ib_device_cap_flags_IB_DEVICE_XRC,
        /// A shared receive queue may be resized.
        SRQ_RESIZE = ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE,
        /// Peers may make what they wrote visible to all.
        FLUSH_GLOBAL = ib_device_cap_flags_IB_DEVICE_FLUSH_GLOBAL,
        /// Atomic writes.
        ATOMIC_WRITE = ib_device_cap_flags_IB_DEVICE_ATOMIC_WRITE,
        /// Rules of flows.
        MANAGED_FLOW_STEERING = ib_device_cap_flags_IB_DEVICE_MANAGED_FLOW_STEERING,
        /// Memory windows of type 2B.
        MEM_WINDOW_TYPE_2B = ib_device_cap_flags_IB_DEVICE_MEM_WINDOW_TYPE_2B,
    }
}

/// The bits of `kernel_cap_flags` that are the core's: it assigns them from the lowest up.
pub(in crate::rdma) const CAPS_OF_CORE: u64 = u32::MAX as u64;

/// What a device is and can do.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub fw_ver: u64,
    /// In host byte order.
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    /// The page sizes a region may have, a bit each.
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub caps: DeviceCaps,
    /// The device has a key for all local memory ([`DeviceInfo::local_dma_lkey`](super::DeviceInfo::local_dma_lkey)).
    pub local_dma_lkey: bool,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_sge_rd: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u32,
    pub max_qp_init_rd_atom: u32,
    pub max_res_rd_atom: u32,
    /// Atomics are atomic among all queue pairs of the device.
    pub atomic_hca: bool,
    pub max_mw: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_total_mcast_qp_attach: u32,
    pub max_ah: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_fast_reg_page_list_len: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub timestamp_mask: u64,
    /// In kilohertz.
    pub core_clock: u64,
    pub max_cq_moderation_count: u16,
    pub max_cq_moderation_period: u16,
    pub max_sgl_rd: u32,
    /// Bytes of device memory for processes.
    pub max_dm_size: u64,
    /// Work queues, and tables of them with so many entries at most, where it has those.
    pub max_wq: u32,
    pub max_rwq_tables: u32,
    pub max_rwq_table_entries: u32,
    /// On-demand memory, where it has that.
    pub on_demand: Option<OnDemandAttr>,
    /// What it has of its driver's own for kernel users: bits of `kernel_cap_flags`
    /// ([`Extension`](crate::rdma::Extension)). A device that says something of the core's by them is not registered.
    pub driver_caps: u64,
}

impl DeviceAttr {
    /// `EINVAL` where it says what it cannot.
    pub(in crate::rdma) fn fill(&self, raw: &mut bindings::ib_device_attr) -> Result {
        if self.driver_caps & CAPS_OF_CORE != 0 {
            return Err(EINVAL);
        }
        raw.fw_ver = self.fw_ver;
        raw.sys_image_guid = self.sys_image_guid.to_be();
        raw.max_mr_size = self.max_mr_size;
        raw.page_size_cap = self.page_size_cap;
        raw.vendor_id = self.vendor_id;
        raw.vendor_part_id = self.vendor_part_id;
        raw.hw_ver = self.hw_ver;
        raw.max_qp = self.max_qp as c_int;
        raw.max_qp_wr = self.max_qp_wr as c_int;
        raw.device_cap_flags = self.caps.as_raw();
        raw.kernel_cap_flags = self.driver_caps;
        if self.local_dma_lkey {
            raw.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY);
        }
        raw.max_send_sge = self.max_send_sge as c_int;
        raw.max_recv_sge = self.max_recv_sge as c_int;
        raw.max_sge_rd = self.max_sge_rd as c_int;
        raw.max_cq = self.max_cq as c_int;
        raw.max_cqe = self.max_cqe as c_int;
        raw.max_mr = self.max_mr as c_int;
        raw.max_pd = self.max_pd as c_int;
        raw.max_qp_rd_atom = self.max_qp_rd_atom as c_int;
        raw.max_qp_init_rd_atom = self.max_qp_init_rd_atom as c_int;
        raw.max_res_rd_atom = self.max_res_rd_atom as c_int;
        raw.atomic_cap = if self.atomic_hca {
            bindings::ib_atomic_cap_IB_ATOMIC_HCA
        } else {
            bindings::ib_atomic_cap_IB_ATOMIC_NONE
        };
        raw.max_mw = self.max_mw as c_int;
        raw.max_mcast_grp = self.max_mcast_grp as c_int;
        raw.max_mcast_qp_attach = self.max_mcast_qp_attach as c_int;
        raw.max_total_mcast_qp_attach = self.max_total_mcast_qp_attach as c_int;
        raw.max_ah = self.max_ah as c_int;
        raw.max_srq = self.max_srq as c_int;
        raw.max_srq_wr = self.max_srq_wr as c_int;
        raw.max_srq_sge = self.max_srq_sge as c_int;
        raw.max_fast_reg_page_list_len = self.max_fast_reg_page_list_len;
        raw.max_pkeys = self.max_pkeys;
        raw.local_ca_ack_delay = self.local_ca_ack_delay;
        raw.timestamp_mask = self.timestamp_mask;
        raw.hca_core_clock = self.core_clock;
        raw.cq_caps.max_cq_moderation_count = self.max_cq_moderation_count;
        raw.cq_caps.max_cq_moderation_period = self.max_cq_moderation_period;
        raw.max_sgl_rd = self.max_sgl_rd;
        raw.max_dm_size = self.max_dm_size;
        raw.max_wq_type_rq = self.max_wq;
        raw.rss_caps.max_rwq_indirection_tables = self.max_rwq_tables;
        raw.rss_caps.max_rwq_indirection_table_size = self.max_rwq_table_entries;
        if self.max_rwq_tables != 0 {
            raw.rss_caps.supported_qpts = 1 << bindings::ib_qp_type_IB_QPT_RAW_PACKET;
        }
        if let Some(on_demand) = &self.on_demand {
            on_demand.fill(raw);
        }
        Ok(())
    }
}
