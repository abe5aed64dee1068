// SPDX-License-Identifier: GPL-2.0

//! The RDMA device: what the driver knows about it, and its operations, each of which is carried
//! out in the file of the object it is about.

use crate::{
    abi,
    abi::DeviceCaps,
    ah::FerriteAh,
    bars::Identity,
    caps,
    cq::{
        FerriteCq,
        MoveCq,
        QueryCq, //
    },
    dm,
    dm::{
        DeviceMemory,
        FerriteDm,
        QueryDm, //
    },
    doorbell_pages::DoorbellPages,
    gids::GidFollower,
    handler::{
        Handlers,
        Interrupts, //
    },
    hardware::{
        device_event,
        Hardware, //
    },
    kernel_ext::{
        errno,
        memory, //
    },
    mr::{
        FerriteMr,
        UserState, //
    },
    mw::{
        FerriteMw,
        Windows, //
    },
    named::Names,
    numbers::{
        Number,
        Numbers, //
    },
    odp,
    odp::{
        Pager,
        PagingMemory,
        PagingQueues, //
    },
    port,
    port::MtuFollower,
    priority::{
        ModifyVector,
        QueryVector, //
    },
    qp::FerriteQp,
    rdma,
    rdma::{
        kind,
        Access,
        Advice,
        AdvisedRange,
        Ah,
        AhAttr,
        Completions,
        Counts,
        Cq,
        CqInitAttr,
        Details,
        Device,
        DeviceAttr,
        Dm,
        DmAllocAttr,
        DmRegion,
        DmabufRegion,
        EventSink,
        ExtendedSrq,
        Gid,
        GidAttr,
        Handle,
        Method,
        MethodDef,
        Mr,
        Mw,
        Netdev,
        NetdevEvent,
        New,
        Notify,
        Ops,
        Pd,
        PortAttr,
        PortImmutable,
        Qp,
        QpAttr,
        QpInitAttr,
        QpQuery,
        RecvList,
        RegionChange,
        Rtnl,
        SendList,
        Srq,
        SrqAttr,
        Ucontext,
        Udata,
        UserRegion,
        Xrcd, //
    },
    shares::Holder,
    srq::FerriteSrq,
    tpt::Tags,
    ucontext,
    ucontext::FerriteUcontext,
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// The queue pair of general services.
pub(crate) const GSI_QPN: u32 = 1;

/// The driver's data of one device.
pub(crate) struct Ferrite {
    /// Where faults of on-demand regions are dealt with.
    pub(crate) paging: PagingQueues,
    pub(crate) pager: Arc<Pager>,
    pub(crate) paging_memory: Arc<PagingMemory>,
    /// Taken down with the RDMA device, while the hardware still answers: files that refer to it are gone before.
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
    /// The one number of the queue pair of general services.
    pub(crate) gsi: Arc<Numbers>,
    pub(crate) doorbell_pages: Arc<DoorbellPages>,
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) mtu: Arc<MtuFollower>,
    pub(crate) gids: Arc<GidFollower>,
}

impl Drop for Ferrite {
    fn drop(&mut self) {
        // Before the queue that it runs on is waited for.
        self.pager.close();
    }
}

impl Ferrite {
    /// For a started device that said what it can do: makes its event queues.
    pub(crate) fn new(
        hw: &Arc<Hardware>,
        identity: Identity,
        caps: DeviceCaps,
        interrupts: &Interrupts,
    ) -> Result<Self> {
        let layout = hw.doorbells.layout();
        Ok(Self {
            paging: PagingQueues::new()?,
            pager: Pager::new(hw, caps.qp_count)?,
            paging_memory: PagingMemory::new(memory::total())?,
            handlers: Handlers::start(hw, interrupts, identity.features & caps.features)?,
            tags: Tags::new(caps::tags(&caps))?,
            // Protection domains are numbers only; the device sets no bound. As many as the device needs, and no
            // more: what the core keeps for each is charged to nobody.
            pds: Numbers::new(1..caps.qp_count.max(1 << 16))?,
            cqns: Numbers::new(caps::cqns(&caps))?,
            // The core lists queue pairs by number, and forgets one only after it was destroyed here.
            qpns: Numbers::with_reserve(caps::qpns(&caps))?,
            srqns: Numbers::new(caps::srqns(&caps))?,
            xrcds: Numbers::for_users(1..caps.max_xrcd.max(1))?,
            gsi: Numbers::new(GSI_QPN..GSI_QPN + 1)?,
            doorbell_pages: DoorbellPages::new(layout.user_pages(PAGE_SIZE as u64))?,
            memory: DeviceMemory::new(layout.memory())?,
            mtu: MtuFollower::new(hw)?,
            gids: GidFollower::new(hw, caps.max_gid)?,
            hw: hw.clone(),
            caps,
            identity,
        })
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

/// The driver's data of a protection domain.
pub(crate) struct FerritePd {
    number: Number,
    pub(crate) windows: Windows,
    /// The regions of the user context that it is of, if it is of one.
    pub(crate) regions: Option<Arc<Names<Mutex<UserState>>>>,
}

impl FerritePd {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }

    /// Whose what is made in it now is.
    pub(crate) fn holder(&self) -> Holder {
        Holder::of(self.regions.is_some())
    }
}

/// A process that shares the context of another finds out whether there is a protection domain: its
/// handle is looked up before, and that is all there is to it.
pub(crate) struct QueryPd;

impl Method<Ferrite> for QueryPd {
    type Kind = kind::Pd;
    const ID: u32 = abi::UVERBS_PD_QUERY;
    type Attributes<'a> = (Handle<'a, kind::Pd, Ferrite, { abi::UVERBS_PD_QUERY_HANDLE }>,);

    fn call(_: &Ucontext<Ferrite>, _: Self::Attributes<'_>) -> Result {
        Ok(())
    }
}

/// The driver's data of a domain of extended reliable connections.
pub(crate) struct FerriteXrcd {
    number: Number,
}

impl FerriteXrcd {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }
}

/// What a consumer in the kernel is told of an object that was to be made or connected. Where the device has
/// failed it is about to be taken from them, and to come back: those that connect again by themselves, such as
/// the RPC client of NFS, try again later where there is no way to the peer, and give up what they were
/// asked for on most other errors. (A network that is down is to that client, in a container, one that is
/// gone for good.)
fn told_to_kernel<T>(dev: &Device<Ferrite>, result: Result<T>) -> Result<T> {
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
        .with_context_query()
        .with_ah()
        .with_gids()
        .with_netdev()
        .with_counters()
        .with_events()
        .with_fast_registration()
        .with_odp()
        .with_mw()
        .with_srq()
        .with_xrc()
        .with_dm()
        .with_mcast();

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

impl rdma::GidOps for Ferrite {
    fn add_gid(dev: &Device<Self>, attr: &GidAttr) -> Result {
        port::add_gid(dev, attr)
    }

    fn del_gid(dev: &Device<Self>, attr: &GidAttr) -> Result {
        port::del_gid(dev, attr)
    }
}

impl rdma::NetdevOps for Ferrite {
    fn shares_link(dev: &Device<Self>, rtnl: &Rtnl, netdev: &Netdev) -> bool {
        port::shares_link(dev, rtnl, netdev)
    }

    fn netdev_event(dev: &Device<Self>, netdev: &Netdev, event: NetdevEvent) {
        if matches!(
            event,
            NetdevEvent::Register | NetdevEvent::Up | NetdevEvent::ChangeMtu
        ) {
            port::follow_mtu(dev, netdev);
        }
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

#[vtable]
impl rdma::UserOps for Ferrite {
    type Ucontext = FerriteUcontext;
    const METHODS: &'static [MethodDef<Self>] = &[
        MethodDef::new::<MoveCq>(),
        MethodDef::new::<QueryCq>(),
        MethodDef::new::<ModifyVector>(),
        MethodDef::new::<QueryVector>(),
        MethodDef::new::<QueryPd>(),
        MethodDef::new::<QueryDm>(),
    ];

    fn alloc_ucontext<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Ucontext, Self>,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Ucontext<Self>> {
        FerriteUcontext::create(dev, new, udata)
    }

    fn create_user_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Cq<Self>> {
        FerriteCq::create_user(dev, new, attr, udata)
    }

    fn resize_user_cq(cq: &Cq<Self>, entries: u32, udata: &Udata<'_, Self>) -> Result {
        FerriteCq::resize(cq, entries, udata)
    }
}

impl rdma::QueryContextOps for Ferrite {
    type QueryAttributes<'a> = ucontext::QueryAttributes<'a>;

    fn query_ucontext(ctx: &Ucontext<Self>, attributes: Self::QueryAttributes<'_>) -> Result {
        FerriteUcontext::query(ctx, attributes)
    }
}

impl rdma::PdOps for Ferrite {
    type Pd = FerritePd;

    fn alloc_pd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>> {
        let number = dev.pds.take(Holder::of(udata.is_some()))?;
        let response = abi::UverbsPdResponse {
            pdn: number.get(),
            reserved: 0,
        };
        let pd = new.init(Ok::<_, Error>(FerritePd {
            number,
            windows: Windows::new(),
            regions: udata
                .and_then(Udata::context)
                .map(|context| context.regions.clone()),
        }))?;
        if let Some(udata) = udata {
            udata.expect_empty()?;
            udata.respond(&response)?;
        }
        Ok(pd)
    }

    fn dealloc_pd(_pd: &Pd<Self>) -> Result {
        Ok(())
    }
}

#[vtable]
impl rdma::CqOps for Ferrite {
    type Cq = FerriteCq;

    fn create_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>> {
        told_to_kernel(dev, FerriteCq::create_kernel(dev, new, attr))
    }

    fn destroy_cq(cq: &Cq<Self>) -> Result {
        FerriteCq::destroy(cq);
        Ok(())
    }

    fn poll_cq(cq: &Cq<Self>, completions: &mut Completions<'_>) -> Result {
        FerriteCq::poll(cq, completions)
    }

    fn req_notify_cq(cq: &Cq<Self>, notify: Notify) -> Result<bool> {
        FerriteCq::request_notification(cq, notify)
    }

    fn modify_cq(cq: &Cq<Self>, count: u16, period: u16) -> Result {
        FerriteCq::moderate(cq, count, period)
    }

    fn describe_cq(cq: &Cq<Self>, details: &mut Details<'_>) -> Result {
        details.number(c"cqn", cq.number())?;
        let handlers = &cq.device().handlers;
        match cq.handler() {
            Some(handler) => {
                details.number(c"eqn", handlers.main_queue(handler).into())?;
                details.number(c"vector", handler.into())?;
            }
            None => details.text(c"vector", c"none")?,
        }
        match cq.consumed() {
            Some(consumed) => details.number(c"consumed", consumed),
            None => Ok(()),
        }
    }
}

#[vtable]
impl rdma::QpOps for Ferrite {
    type Qp = FerriteQp;

    fn create_qp<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Qp, Self>,
        attr: &mut QpInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Qp<Self>> {
        let created = FerriteQp::create(dev, new, attr, udata);
        match udata {
            Some(_) => created,
            None => told_to_kernel(dev, created),
        }
    }

    fn modify_qp(qp: &Qp<Self>, attr: &QpAttr<'_>, udata: Option<&Udata<'_, Self>>) -> Result {
        match udata {
            Some(udata) => {
                udata.expect_empty()?;
                FerriteQp::modify(qp, attr)
            }
            None => told_to_kernel(qp.device(), FerriteQp::modify(qp, attr)),
        }
    }

    fn query_qp(qp: &Qp<Self>, attr: &mut QpQuery<'_>) -> Result {
        FerriteQp::query(qp, attr)
    }

    fn destroy_qp(qp: &Qp<Self>) -> Result {
        FerriteQp::destroy(qp);
        Ok(())
    }

    fn post_send(qp: &Qp<Self>, list: &mut SendList<'_, Self>) -> Result {
        FerriteQp::post_send(qp, list)
    }

    fn post_recv(qp: &Qp<Self>, list: &mut RecvList<'_>) -> Result {
        FerriteQp::post_receive(qp, list)
    }

    fn describe_qp(qp: &Qp<Self>, details: &mut Details<'_>) -> Result {
        let (send_log_blocks, receive_log_entries) = qp.ring_sizes();
        details.number(c"send_blocks", 1 << send_log_blocks)?;
        details.number(c"receive_entries", 1 << receive_log_entries)?;
        if let Some(srq) = qp.srq() {
            details.number(c"srqn", srq.number())?;
        }
        match qp.outstanding() {
            Some((sends, receives)) => {
                details.number(c"send_blocks_used", sends)?;
                details.number(c"receives_posted", receives)
            }
            None => Ok(()),
        }
    }
}

impl rdma::McastOps for Ferrite {
    fn attach_mcast(qp: &Qp<Self>, gid: Gid) -> Result {
        FerriteQp::join(qp, gid)
    }

    fn detach_mcast(qp: &Qp<Self>, gid: Gid) -> Result {
        FerriteQp::leave(qp, gid)
    }
}

#[vtable]
impl rdma::MrOps for Ferrite {
    type Mr = FerriteMr;

    fn get_dma_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        access: Access,
    ) -> Result<&'a Mr<Self>> {
        FerriteMr::all_memory(pd, new, access)
    }

    fn reg_user_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &UserRegion,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>> {
        FerriteMr::register(pd, new, region, udata)
    }

    fn reg_user_mr_dmabuf<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &DmabufRegion,
    ) -> Result<&'a Mr<Self>> {
        FerriteMr::register_dmabuf(pd, new, region)
    }

    fn rereg_user_mr(
        mr: &Mr<Self>,
        change: &RegionChange<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        FerriteMr::change(mr, change)
    }

    fn dereg_mr(mr: &Mr<Self>, pd: &Pd<Self>) -> Result {
        FerriteMr::deregister(mr, pd)
    }

    fn describe_mr(mr: &Mr<Self>, details: &mut Details<'_>) -> Result {
        FerriteMr::describe(mr, details)
    }

    fn count_mr(mr: &Mr<Self>, counts: &mut Counts<'_>) -> Result {
        let Some(region) = mr.on_demand() else {
            return Ok(());
        };
        let (faults, invalidations, prefetches) = region.counts();
        counts.counter(c"page_faults", faults)?;
        counts.counter(c"page_invalidations", invalidations)?;
        counts.counter(c"page_prefetch", prefetches)
    }
}

impl rdma::FastRegOps for Ferrite {
    fn alloc_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        pages: u32,
    ) -> Result<&'a Mr<Self>> {
        if !pd.device().has(abi::FEATURE_FAST_REGISTER) {
            return Err(errno::eopnotsupp());
        }
        FerriteMr::allocate(pd, new, pages)
    }

    fn begin_mr_map(mr: &Mr<Self>) {
        mr.begin_pages();
    }

    fn push_mr_page(mr: &Mr<Self>, addr: u64) -> Result {
        mr.push_page(addr)
    }
}

impl rdma::OdpOps for Ferrite {
    fn advise_mr(pd: &Pd<Self>, advice: Advice, wait: bool, ranges: &[AdvisedRange]) -> Result {
        odp::advise(pd, advice, wait, ranges)
    }
}

impl rdma::MwOps for Ferrite {
    type Mw = FerriteMw;

    fn alloc_mw<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mw, Self>,
        type2: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mw<Self>> {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        FerriteMw::create(pd, new, type2)
    }

    fn dealloc_mw(mw: &Mw<Self>) -> Result {
        FerriteMw::destroy(mw);
        Ok(())
    }
}

impl rdma::DmOps for Ferrite {
    type Dm = FerriteDm;
    type AllocAttributes<'a> = dm::AllocAttributes<'a>;

    fn alloc_dm<'a>(
        dev: &Device<Self>,
        context: &Ucontext<Self>,
        new: New<'a, kind::Dm, Self>,
        attr: &DmAllocAttr,
        attributes: Self::AllocAttributes<'_>,
    ) -> Result<&'a Dm<Self>> {
        FerriteDm::create(dev, context, new, attr, attributes)
    }

    fn dealloc_dm(dm: &Dm<Self>) -> Result {
        FerriteDm::destroy(dm);
        Ok(())
    }

    fn reg_dm_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        dm: &Dm<Self>,
        region: &DmRegion,
    ) -> Result<&'a Mr<Self>> {
        FerriteMr::register_device_memory(pd, new, dm, region)
    }
}

impl rdma::AhOps for Ferrite {
    type Ah = FerriteAh;

    fn create_ah<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Ah, Self>,
        attr: &AhAttr,
        sleepable: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Ah<Self>> {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        FerriteAh::create(pd, new, attr, sleepable)
    }

    fn destroy_ah(_ah: &Ah<Self>, _sleepable: bool) -> Result {
        Ok(())
    }
}

#[vtable]
impl rdma::SrqOps for Ferrite {
    type Srq = FerriteSrq;

    fn create_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        FerriteSrq::create(pd, new, attr, None, udata)
    }

    fn modify_srq_limit(srq: &Srq<Self>, limit: u32) -> Result {
        FerriteSrq::set_limit(srq, limit)
    }

    fn resize_srq(srq: &Srq<Self>, max_wr: u32, udata: Option<&Udata<'_, Self>>) -> Result {
        FerriteSrq::resize(srq, max_wr, udata)
    }

    fn query_srq(srq: &Srq<Self>) -> Result<SrqAttr> {
        FerriteSrq::query(srq)
    }

    fn destroy_srq(srq: &Srq<Self>) -> Result {
        FerriteSrq::destroy(srq);
        Ok(())
    }

    fn post_srq_recv(srq: &Srq<Self>, list: &mut RecvList<'_>) -> Result {
        FerriteSrq::post(srq, list)
    }

    fn describe_srq(srq: &Srq<Self>, details: &mut Details<'_>) -> Result {
        details.number(c"srqn", srq.number())
    }
}

impl rdma::XrcOps for Ferrite {
    type Xrcd = FerriteXrcd;

    fn alloc_xrcd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Xrcd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Xrcd<Self>> {
        if !dev.has(abi::FEATURE_XRC) {
            return Err(errno::eopnotsupp());
        }
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        let number = dev.xrcds.take(Holder::of(udata.is_some()))?;
        new.init(Ok::<_, Error>(FerriteXrcd { number }))
    }

    fn dealloc_xrcd(_xrcd: &Xrcd<Self>) -> Result {
        Ok(())
    }

    fn create_xrc_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        extended: &ExtendedSrq<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        FerriteSrq::create(pd, new, attr, Some(extended), udata)
    }
}
