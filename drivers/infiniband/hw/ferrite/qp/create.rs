// SPDX-License-Identifier: GPL-2.0

//! How a queue pair is made: with rings of its own, or with a table that it receives by.

use super::{
    layout::{
        Abilities,
        RingLayout,
        SendUse, //
    },
    posting::KernelRings,
    FerriteQp, //
};
use crate::{
    abi,
    abi::{
        CommandOpcode,
        CreateQueuePair,
        Service,
        Transport,
        UverbsHashRequest,
        UverbsQpRequest,
        UverbsQpResponse, //
    },
    commands::DeviceObject,
    cq::FerriteCq,
    device::Ferrite,
    flow::RawPackets,
    kernel_ext::errno,
    numbers::Number,
    port::{
        DEVICE_PORT,
        PORT, //
    },
    qp_event::QpEvents,
    queue::{
        announce,
        QueueMemory, //
    },
    rdma::{
        kind,
        Cq,
        Device,
        New,
        Qp,
        QpCap,
        QpCreateFlags,
        QpInitAttr,
        QpState,
        QpType,
        QpValues,
        RwqTable,
        Udata, //
    },
    shares::Holder,
    wq::Spread,
    wqe::SendTerms,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::Atomic,
        Arc, //
    },
    types::ScopeGuard, //
};

/// Completion queue of a queue pair that is not there.
const NO_CQ: u32 = u32::MAX;

/// What differs between queue pairs with rings and those with a table.
///
/// The fields are dropped in order, as those of [`FerriteQp`] are.
struct Parts<'a> {
    object: Option<DeviceObject>,
    memory: QueueMemory<KernelRings>,
    number: Number,
    layout: RingLayout,
    events: Arc<QpEvents>,
    spread: Option<Spread>,
    cap: QpCap,
    /// The completion queues that are to know it.
    cqs: [Option<&'a Cq<Ferrite>>; 2],
}

impl FerriteQp {
    fn service(dev: &Device<Ferrite>, qp_type: Option<QpType>) -> Result<Service> {
        match qp_type {
            Some(QpType::Rc) => Ok(Service::Rc),
            Some(QpType::Uc) if dev.has(abi::FEATURE_UC) => Ok(Service::Uc),
            Some(QpType::Ud) if dev.has(abi::FEATURE_UD) => Ok(Service::Ud),
            Some(QpType::Gsi) if dev.has(abi::FEATURE_UD) => Ok(Service::Gsi),
            Some(QpType::XrcInitiator) if dev.has(abi::FEATURE_XRC) => Ok(Service::XrcIni),
            Some(QpType::XrcTarget) if dev.has(abi::FEATURE_XRC) => Ok(Service::XrcTgt),
            Some(QpType::RawPacket) if dev.has(abi::FEATURE_RAW_PACKETS) => Ok(Service::Raw),
            _ => Err(errno::eopnotsupp()),
        }
    }

    /// Makes a queue pair.
    pub(super) fn create<'a>(
        dev: &Device<Ferrite>,
        mut new: New<'a, kind::Qp, Ferrite>,
        attr: &mut QpInitAttr<'_, Ferrite>,
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<&'a Qp<Ferrite>> {
        let service = Self::service(dev, attr.qp_type())?;
        if attr.srq().is_some() && !dev.has(abi::FEATURE_SRQ) {
            return Err(errno::eopnotsupp());
        }
        let interface = match (service, udata) {
            (Service::Raw, None) => return Err(errno::eopnotsupp()),
            (Service::Raw, Some(_)) => Some(RawPackets::interface(dev)?),
            _ => None,
        };
        let parts = match (attr.rwq_table(), udata) {
            (Some(table), Some(udata)) => {
                if interface.is_none() {
                    return Err(errno::eopnotsupp());
                }
                Parts::with_table(dev, attr, table, udata)?
            }
            _ => Parts::with_rings(dev, service, attr, udata)?,
        };
        let (qpn, cqs) = (parts.number.get(), parts.cqs);
        let values = QpValues {
            cap: parts.cap,
            signal_all: attr.signal_all(),
            port: PORT,
            ..QpValues::default()
        };
        new.set_number(qpn);
        attr.set_cap(&values.cap);
        let qp = new.init(pin_init!(Self {
            object: parts.object,
            memory: parts.memory,
            number: parts.number,
            layout: parts.layout,
            state: Atomic::new(QpState::Reset.as_raw()),
            events: parts.events,
            last_receive: Atomic::new(0),
            refused: Atomic::new(0),
            spread: parts.spread,
            interface,
            values <- new_mutex!(values, "ferrite_qp"),
            groups <- new_mutex!(KVec::new(), "ferrite_qp_groups"),
        }))?;
        let attached = ScopeGuard::new(|| Self::detach_cqs(qp));
        let mut known_by = cqs.into_iter().flatten();
        known_by.try_for_each(|cq| FerriteCq::attach(cq, qp))?;
        let found = qp.get_ref().ok_or(ENODEV)?;
        announce(&dev.hw.qps, qpn, found, || match udata {
            Some(udata) => udata.respond(&UverbsQpResponse { qpn, reserved: 0 }),
            None => Ok(()),
        })?;
        attached.dismiss();
        Ok(qp)
    }
}

impl<'a> Parts<'a> {
    /// Those of a queue pair with rings of its own, or of none.
    fn with_rings(
        dev: &Device<Ferrite>,
        service: Service,
        attr: &QpInitAttr<'a, Ferrite>,
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<Self> {
        let request: Option<UverbsQpRequest> = match udata {
            // A target has no queues to say anything about.
            Some(udata) if service == Service::XrcTgt => Some(udata.read(0)?),
            Some(udata) => Some(udata.read(core::mem::size_of::<UverbsQpRequest>())?),
            None => None,
        };
        let features = dev.features();
        let abilities = match &request {
            // The core takes other flags of processes, none of which the device has.
            Some(_) if attr.create_flags() != QpCreateFlags::default() => {
                return Err(errno::eopnotsupp());
            }
            Some(request) => Abilities::of_process(request.flags, service, features)?,
            None => Abilities::of_kernel(attr.create_flags(), service, features)?,
        };
        let roles = Roles::new(service, attr)?;
        let mut cap = checked_cap(dev, &attr.cap())?;
        if !roles.receives {
            cap.max_recv_wr = 0;
            cap.max_recv_sge = 0;
        }
        let number = match service {
            Service::Gsi => dev.gsi.take(Holder::KERNEL)?,
            _ => dev.qpns.take(Holder::of(udata.is_some()))?,
        };
        let qpn = number.get();

        let mut flags = 0;
        let (layout, (memory, place)) = match (udata, &request) {
            _ if service == Service::XrcTgt => {
                let layout = RingLayout::RECORD_ONLY;
                (layout, QueueMemory::of_nobody(dev, layout.blocks())?)
            }
            (Some(udata), Some(request)) => {
                let (layout, extent) =
                    RingLayout::from_request(request, &dev.caps, roles.receives)?;
                (layout, QueueMemory::of_process(dev, udata, extent)?)
            }
            _ => {
                let requests = abilities.requests(service);
                let layout = RingLayout::for_kernel(&cap, requests);
                if layout.sq_log_blocks > dev.caps.sq_max_log_blocks
                    || layout.rq_log_entries > dev.caps.rq_max_log_entries
                {
                    return Err(EINVAL);
                }
                let terms = SendTerms {
                    signal_all: attr.signal_all(),
                    register_send: abilities.register_send,
                    features,
                };
                flags |= abi::QP_FLAG_PRIVILEGED;
                if requests != SendUse::Ud && dev.has(abi::FEATURE_FAST_REGISTER) {
                    flags |= abi::QP_FLAG_FAST_REGISTER;
                }
                (layout, KernelRings::new(dev, layout, terms)?)
            }
        };
        // Before the device has it: what fails afterwards takes it from the device before its memory goes.
        let events = QpEvents::new()?;
        let object = DeviceObject::create(
            &dev.hw,
            &CreateQueuePair {
                qpn,
                pd: roles.pd,
                send_cqn: roles.send_cq.map_or(NO_CQ, |cq| cq.number()),
                receive_cqn: roles.recv_cq.map_or(NO_CQ, |cq| cq.number()),
                service: service.number(),
                transport: Transport::RoceV2.number(),
                flags: flags | roles.flags | abilities.flags(),
                sq_log_blocks: layout.sq_log_blocks,
                rq_log_entries: layout.rq_log_entries,
                rq_log_stride: layout.rq_log_stride,
                port: DEVICE_PORT,
                srqn: roles.srqn,
                doorbell_page: place.doorbell_page,
                buffer: place.buffer,
                sq_offset: layout.sq_offset,
                rq_offset: layout.rq_offset,
                record_offset: layout.record_offset,
                xrcd: roles.xrcd,
                reserved: [0; 3],
            },
            CommandOpcode::DestroyQueuePair,
            qpn,
        )?;
        Ok(Self {
            object: Some(object),
            memory,
            number,
            layout,
            events,
            spread: None,
            cap,
            cqs: [roles.send_cq, roles.recv_cq],
        })
    }

    /// Those of a queue pair that receives by a table, and sends nothing.
    fn with_table(
        dev: &Device<Ferrite>,
        attr: &QpInitAttr<'_, Ferrite>,
        table: &RwqTable<Ferrite>,
        udata: &Udata<'_, Ferrite>,
    ) -> Result<Self> {
        if attr.send_cq().is_some() || attr.create_flags() != QpCreateFlags::default() {
            return Err(errno::eopnotsupp());
        }
        let request: UverbsHashRequest = udata.read(core::mem::size_of::<UverbsHashRequest>())?;
        let spread = Spread::new(table, &request)?;
        Ok(Self {
            object: None,
            memory: QueueMemory::Nothing,
            // To the core a queue pair has a number; the device knows of none.
            number: dev.qpns.take(Holder::current())?,
            layout: RingLayout::RECORD_ONLY,
            events: QpEvents::new()?,
            spread: Some(spread),
            cap: QpCap::default(),
            cqs: [None, None],
        })
    }
}

/// Checks what is asked of a queue pair; returns what it gets.
fn checked_cap(dev: &Device<Ferrite>, asked: &QpCap) -> Result<QpCap> {
    let caps = &dev.caps;
    if asked.max_send_wr > 1 << caps.sq_max_log_blocks
        || asked.max_recv_wr > 1 << caps.rq_max_log_entries
        || asked.max_send_sge > caps.max_sge.into()
        || asked.max_recv_sge > caps.max_sge.into()
        || asked.max_inline_data > caps.max_inline
    {
        return Err(EINVAL);
    }
    Ok(*asked)
}

/// What a new queue pair belongs to, by service: targets of extended connections (XRC) have neither
/// protection domain nor completion queues, initiators no receive queue.
struct Roles<'a> {
    pd: u32,
    send_cq: Option<&'a Cq<Ferrite>>,
    recv_cq: Option<&'a Cq<Ferrite>>,
    srqn: u32,
    xrcd: u32,
    flags: u16,
    /// Whether it has a receive queue of its own.
    receives: bool,
}

impl<'a> Roles<'a> {
    fn new(service: Service, attr: &QpInitAttr<'a, Ferrite>) -> Result<Self> {
        let mut roles = Self {
            pd: 0,
            send_cq: None,
            recv_cq: None,
            srqn: 0,
            xrcd: 0,
            flags: 0,
            receives: false,
        };
        if service == Service::XrcTgt {
            roles.xrcd = attr.xrcd().ok_or(EINVAL)?.number();
            return Ok(roles);
        }
        roles.pd = attr.pd().ok_or(EINVAL)?.number();
        roles.send_cq = Some(attr.send_cq().ok_or(EINVAL)?);
        if service == Service::XrcIni {
            return Ok(roles);
        }
        roles.recv_cq = Some(attr.recv_cq().ok_or(EINVAL)?);
        roles.receives = attr.srq().is_none();
        if let Some(srq) = attr.srq() {
            roles.srqn = srq.number();
            roles.flags = abi::QP_FLAG_SRQ;
        }
        Ok(roles)
    }
}
