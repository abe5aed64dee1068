// SPDX-License-Identifier: GPL-2.0

//! The RDMA device: what the driver knows about it, and the operations that are about the device as a whole. Those
//! that are about an object are in the file of that.

use crate::{
    abi,
    abi::DeviceCaps,
    bars::Identity,
    caps,
    dm::DeviceMemoryPool,
    doorbell_pages::DoorbellPages,
    flow::RawPackets,
    gids::GidFollower,
    handler::Handlers,
    hardware::{
        device_event,
        Hardware, //
    },
    kernel_ext::{
        errno,
        memory, //
    },
    numbers::Numbers,
    occupancy::Tables,
    odp::{
        OdpBudget,
        Pager,
        PagingQueues, //
    },
    port,
    port::MtuFollower,
    qp_counters, rdma,
    rdma::{
        Device,
        DeviceAttr,
        EventSink,
        Ops,
        PortAttr,
        PortImmutable, //
    },
    tpt::Tags,
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc, //
};

/// The queue pair of general services.
pub(crate) const GSI_QPN: u32 = 1;

/// The driver's data of one device.
pub(crate) struct Ferrite {
    /// Where faults of on-demand regions are dealt with.
    pub(crate) paging: PagingQueues,
    pub(crate) pager: Arc<Pager>,
    pub(crate) paging_memory: Arc<OdpBudget>,
    /// Files that refer to them are gone before the RDMA device is, and they are taken down after it, while the hardware
    /// still answers.
    pub(crate) handlers: Arc<Handlers>,
    pub(crate) hw: Arc<Hardware>,
    pub(crate) caps: DeviceCaps,
    pub(crate) identity: Identity,
    pub(crate) tags: Arc<Tags>,
    pub(crate) pds: Arc<Numbers>,
    pub(crate) cqns: Arc<Numbers>,
    pub(crate) qpns: Arc<Numbers>,
    pub(crate) srqns: Arc<Numbers>,
    pub(crate) xrcds: Arc<Numbers>,
    /// Rules of flows, and receive tables.
    pub(crate) flows: Arc<Numbers>,
    pub(crate) receive_tables: Arc<Numbers>,
    pub(crate) raw_packets: Arc<RawPackets>,
    /// The one number of the queue pair of general services.
    pub(crate) gsi: Arc<Numbers>,
    pub(crate) doorbell_pages: Arc<DoorbellPages>,
    pub(crate) memory: Arc<DeviceMemoryPool>,
    pub(crate) mtu: Arc<MtuFollower>,
    pub(crate) gids: Arc<GidFollower>,
    pub(crate) qp_counters: Arc<qp_counters::Sets>,
}

impl Drop for Ferrite {
    fn drop(&mut self) {
        // Before the queue that it runs on is waited for.
        self.pager.close();
    }
}

impl Ferrite {
    /// For a started device that said what it can do, and whose event queues were made.
    pub(crate) fn new(
        hw: &Arc<Hardware>,
        identity: Identity,
        caps: DeviceCaps,
        handlers: &Arc<Handlers>,
    ) -> Result<Self> {
        let layout = hw.doorbells.layout();
        let ferrite = Self {
            paging: PagingQueues::new()?,
            pager: Pager::new(hw, caps.qp_count)?,
            paging_memory: OdpBudget::new(memory::total())?,
            handlers: handlers.clone(),
            tags: Tags::new(caps::tags(&caps))?,
            // Protection domains are numbers only; the device sets no bound. As many as the device needs, and no
            // more: what the core keeps for each is charged to nobody.
            pds: Numbers::new(1..caps.qp_count.max(1 << 16))?,
            cqns: Numbers::new(caps::cqns(&caps))?,
            // The core lists queue pairs by number, and forgets one only after it was destroyed here.
            qpns: Numbers::with_reserve(caps::qpns(&caps))?,
            srqns: Numbers::new(caps::srqns(&caps))?,
            xrcds: Numbers::for_users(1..caps.max_xrcd.max(1))?,
            flows: Numbers::for_users(0..caps.max_flows)?,
            receive_tables: Numbers::for_users(0..caps.max_receive_tables.into())?,
            raw_packets: RawPackets::new(hw)?,
            gsi: Numbers::new(GSI_QPN..GSI_QPN + 1)?,
            doorbell_pages: DoorbellPages::new(layout.user_pages(PAGE_SIZE as u64))?,
            memory: DeviceMemoryPool::new(layout.memory())?,
            mtu: MtuFollower::new(hw)?,
            gids: GidFollower::new(hw, caps.max_gid)?,
            qp_counters: qp_counters::Sets::new(hw)?,
            hw: hw.clone(),
            caps,
            identity,
        };
        hw.tables.populate(Tables::of(&ferrite));
        Ok(ferrite)
    }

    /// The features that both sides agreed on.
    pub(crate) fn features(&self) -> u64 {
        self.identity.features & self.caps.features
    }

    /// Whether both sides agreed on a feature.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features() & feature == feature
    }

    /// Has faults taken from the device and dealt with.
    pub(crate) fn take_faults(&self) {
        // Where it is queued already, it has yet to look.
        drop(self.paging.take(self.pager.clone()));
    }

    /// The device's EUI-64.
    pub(crate) fn guid(&self) -> u64 {
        port::eui64(&self.identity.mac)
    }
}

/// What a consumer in the kernel is told of an object that was to be made or connected. Where the device has
/// failed it is about to be taken from them, and to come back: those that connect again by themselves, such as
/// the RPC client of NFS, try again later where there is no way to the peer, and give up what they were
/// asked for on most other errors. (A network that is down is to that client, in a container, one that is
/// gone for good.)
pub(crate) fn told_to_kernel<T>(dev: &Device<Ferrite>, result: Result<T>) -> Result<T> {
    result.map_err(|error| match dev.hw.is_dead() {
        true => errno::ehostunreach(),
        false => error,
    })
}

#[vtable]
impl rdma::Driver for Ferrite {
    const NAME: &'static CStr = c"ferrite%d";
    const ABI_VERSION: u32 = abi::UVERBS_ABI_VERSION;
    const OPS: Ops<Self> = Ops::new()
        .with_user()
        .with_user_cqs()
        .with_context_query()
        .with_ah()
        .with_gids()
        .with_netdev()
        .with_counters()
        .with_qp_counters()
        .with_raw_dumps()
        .with_raw_srq_dumps()
        .with_events()
        .with_frwr()
        .with_odp()
        .with_mw()
        .with_srq()
        .with_xrc()
        .with_dm()
        .with_mcast()
        .with_flows()
        .with_wqs();

    fn query_device(dev: &Device<Self>) -> Result<DeviceAttr> {
        Ok(port::device_attributes(dev))
    }

    fn query_port(dev: &Device<Self>, port: u32) -> Result<PortAttr> {
        port::attributes(dev, port)
    }

    fn port_immutable(dev: &Device<Self>, port: u32) -> Result<PortImmutable> {
        port::immutable(dev, port)
    }

    fn query_pkey(_dev: &Device<Self>, _port: u32, index: u16) -> Result<u16> {
        port::partition_key(index)
    }

    fn firmware_version(dev: &Device<Self>) -> (u16, u16, u16) {
        let (major, minor, patch) = dev.identity.firmware;
        (major, minor.into(), patch.into())
    }
}

impl rdma::CounterOps for Ferrite {
    fn read_counters(dev: &Device<Self>, port: u32, values: &mut [u64]) -> Result {
        port::read_counters(dev, port, values)
    }
}

impl rdma::EventOps for Ferrite {
    fn event_sink(dev: &Device<Self>) -> &EventSink<Self> {
        &dev.hw.sink
    }

    fn device_events(dev: &Device<Self>, events: u32) {
        if events & device_event::FATAL != 0 {
            dev.report_fatal();
        }
        if events & device_event::LINK != 0 {
            dev.report_port(port::PORT, dev.hw.link_up());
        }
        if events & device_event::PAGE_FAULTS != 0 {
            dev.take_faults();
        }
    }
}
