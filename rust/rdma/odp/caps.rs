// SPDX-License-Identifier: GPL-2.0

//! What a device can do on demand, and what processes may advise it.

use crate::bindings;

c_enum! {
    /// What a process says about memory that it is going to use.
    pub enum Advice {
        /// It will be read.
        Prefetch = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        /// It will be written.
        PrefetchWrite = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        /// It will be used; only pages that are present count.
        PrefetchNoFault = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    }
}

/// A part of a region that an advice is about.
#[derive(Clone, Copy, Debug)]
pub struct AdvisedRange {
    /// Address, as work requests say it.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: u32,
}

c_flags! {
    /// What a service can do with on-demand memory.
    pub struct OdpCaps(u32) {
        /// Send from it.
        SEND = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SEND,
        /// Receive to it.
        RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_RECV,
        /// Write, from it and to it.
        WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_WRITE,
        /// Read, from it and to it.
        READ = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_READ,
        /// Atomics.
        ATOMIC = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC,
        /// Receive to it through a shared receive queue.
        SRQ_RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SRQ_RECV,
        /// Flushes.
        FLUSH = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_FLUSH,
        /// Atomic writes.
        ATOMIC_WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC_WRITE,
    }
}

/// What a device can do with on-demand memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnDemandAttr {
    /// Regions of all of a process's memory.
    pub implicit: bool,
    /// Reliable connections.
    pub rc: OdpCaps,
    /// Unreliable connections.
    pub uc: OdpCaps,
    /// Datagrams.
    pub ud: OdpCaps,
    /// XRC.
    pub xrc: OdpCaps,
}

impl OnDemandAttr {
    pub(in crate::rdma) fn fill(&self, raw: &mut bindings::ib_device_attr) {
        let mut general = bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT;
        if self.implicit {
            general |= bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT_IMPLICIT;
        }
        raw.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_ON_DEMAND_PAGING);
        raw.odp_caps.general_caps = general.into();
        let services = &mut raw.odp_caps.per_transport_caps;
        services.rc_odp_caps = self.rc.as_raw();
        services.uc_odp_caps = self.uc.as_raw();
        services.ud_odp_caps = self.ud.as_raw();
        services.xrc_odp_caps = self.xrc.as_raw();
    }
}
