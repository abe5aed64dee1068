// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! Both rings and the record lie in one buffer: of the process for its own queue pairs, coherent
//! memory for those of the kernel. Only the latter are posted to here ([`posting`]).

mod attributes;
mod layout;
mod posting;

use self::{
    layout::{
        Abilities,
        RingLayout,
        SendUse, //
    },
    posting::KernelRings,
};
use crate::{
    abi,
    abi::{
        CommandOpcode,
        CompletionEntry,
        CreateQueuePair,
        MulticastMember,
        QueuePairState,
        Service,
        Transport,
        UverbsHashRequest,
        UverbsQpRequest,
        UverbsQpResponse, //
    },
    commands::DeviceObject,
    cq::FerriteCq,
    cqp::object,
    device::{
        told_to_kernel,
        Ferrite, //
    },
    flow::{
        PortInterface,
        RawPackets, //
    },
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
        Details,
        Device,
        Gid,
        McastOps,
        New,
        Qp,
        QpAttr,
        QpCap,
        QpCreateFlags,
        QpEvent,
        QpInitAttr,
        QpOps,
        QpQuery,
        QpState,
        QpType,
        QpValues,
        RecvList,
        RwqTable,
        SendList,
        Udata, //
    },
    shares::Holder,
    srq::FerriteSrq,
    wq::Spread,
    wqe::SendTerms,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
    types::ScopeGuard,
};

/// Completion queue of a queue that is not there.
const NO_CQ: u32 = u32::MAX;

/// The driver's data of a queue pair.
///
/// The fields are dropped in order: the device lets go of the queue pair before its memory goes,
/// and the number is free last.
#[pin_data]
pub(crate) struct FerriteQp {
    /// None where it receives by a table: its rules and work queues are all that the device has of it.
    object: Option<DeviceObject>,
    memory: QueueMemory<KernelRings>,
    number: Number,
    layout: RingLayout,
    /// The state that the consumer brought the queue pair to; the device may have gone on to the
    /// error state.
    state: Atomic<u32>,
    events: Arc<QpEvents>,
    /// The consumer was told of the last receive off a shared queue, since state RESET.
    last_receive: Atomic<u32>,
    /// What the device said of the last access of the peer that it refused.
    refused: Atomic<u32>,
    /// How it receives by a table.
    spread: Option<Spread>,
    /// Of raw packets, the interface that these are of.
    interface: Option<PortInterface>,
    #[pin]
    values: Mutex<QpValues>,
    /// The multicast groups it is in, each as often as it was let in.
    #[pin]
    groups: Mutex<KVec<Gid>>,
}

impl FerriteQp {
    /// The state that the consumer brought it to.
    pub(crate) fn state(&self) -> QpState {
        QpState::from_raw(self.state.load(Relaxed)).unwrap_or(QpState::Err)
    }

    /// How it receives, if that is by a table.
    pub(crate) fn spread(&self) -> Option<&Spread> {
        self.spread.as_ref()
    }

    /// The interface that its packets are of, if they are raw.
    pub(crate) fn interface(&self) -> Option<PortInterface> {
        self.interface
    }

    /// Base-2 logarithms of send blocks and receive entries.
    pub(crate) fn ring_sizes(&self) -> (u8, u8) {
        (self.layout.sq_log_blocks, self.layout.rq_log_entries)
    }

    /// Has the consumer told that something happened. May be called from any context, and cannot
    /// fail; what happens more than once before the consumer is told counts once.
    pub(crate) fn raise(qp: &Qp<Ferrite>, event: QpEvent) {
        let hw = &qp.device().hw;
        // A device that failed may have said it, and it is said in its place: once is enough. While
        // the device works, one that came late, after state RESET, must not stand for the next.
        if event == QpEvent::LastWqeReached && qp.last_receive.xchg(1, Full) != 0 && hw.is_dead() {
            return;
        }
        qp.events.raise(&hw.events, qp, event);
    }

    /// The device refused an access of the peer, by which of its checks `why` says.
    pub(crate) fn refused_access(qp: &Qp<Ferrite>, why: u64) {
        // A number for people: one that is none of the device's is as good as another.
        qp.refused.store(why as u32, Relaxed);
        Self::raise(qp, QpEvent::AccessError);
    }

    /// Why the device refused an access of the peer the last time, zero where it never did.
    pub(crate) fn refused(&self) -> u32 {
        self.refused.load(Relaxed)
    }

    /// The device failed, and takes no more receives: a consumer in the kernel that shares them
    /// among queue pairs is told, as the device would have done. May be called from any context.
    pub(crate) fn stopped(qp: &Qp<Ferrite>) {
        if !qp.is_user() && qp.srq().is_some() {
            Self::raise(qp, QpEvent::LastWqeReached);
        }
    }

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
    fn create<'a>(
        dev: &Device<Ferrite>,
        mut new: New<'a, kind::Qp, Ferrite>,
        attr: &mut QpInitAttr<'_, Ferrite>,
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<&'a Qp<Ferrite>> {
        let service = Self::service(dev, attr.qp_type())?;
        if attr.srq().is_some() && !dev.has(abi::FEATURE_SRQ) {
            return Err(errno::eopnotsupp());
        }
        if service == Service::Raw && udata.is_none() {
            return Err(errno::eopnotsupp());
        }
        let interface = match service {
            Service::Raw => Some(RawPackets::interface(dev)?),
            _ => None,
        };
        if let (Some(table), Some(udata)) = (attr.rwq_table(), udata) {
            let interface = interface.ok_or(errno::eopnotsupp())?;
            return Self::create_spread(dev, new, attr, (table, interface), udata);
        }
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
        let values = QpValues {
            cap,
            signal_all: attr.signal_all(),
            port: PORT,
            ..QpValues::default()
        };
        new.set_number(qpn);
        attr.set_cap(&cap);
        let qp = new.init(pin_init!(Self {
            object: Some(object),
            memory,
            number,
            layout,
            state: Atomic::new(QpState::Reset.as_raw()),
            events,
            last_receive: Atomic::new(0),
            refused: Atomic::new(0),
            spread: None,
            interface,
            values <- new_mutex!(values, "ferrite_qp"),
            groups <- new_mutex!(KVec::new(), "ferrite_qp_groups"),
        }))?;
        let cqs = || [roles.send_cq, roles.recv_cq].into_iter().flatten();
        let attached = ScopeGuard::new(|| cqs().for_each(|cq| FerriteCq::detach(cq, qpn)));
        cqs().try_for_each(|cq| FerriteCq::attach(cq, qp))?;
        let found = qp.get_ref().ok_or(ENODEV)?;
        announce(&dev.hw.qps, qpn, found, || match udata {
            Some(udata) => udata.respond(&UverbsQpResponse { qpn, reserved: 0 }),
            None => Ok(()),
        })?;
        attached.dismiss();
        Ok(qp)
    }

    /// Makes a queue pair that receives by a table, and sends nothing.
    fn create_spread<'a>(
        dev: &Device<Ferrite>,
        mut new: New<'a, kind::Qp, Ferrite>,
        attr: &mut QpInitAttr<'_, Ferrite>,
        (table, interface): (&RwqTable<Ferrite>, PortInterface),
        udata: &Udata<'_, Ferrite>,
    ) -> Result<&'a Qp<Ferrite>> {
        if attr.send_cq().is_some() || attr.create_flags() != QpCreateFlags::default() {
            return Err(errno::eopnotsupp());
        }
        let request: UverbsHashRequest = udata.read(core::mem::size_of::<UverbsHashRequest>())?;
        let spread = Spread::new(table, &request)?;
        // To the core a queue pair has a number; the device knows of none.
        let number = dev.qpns.take(Holder::current())?;
        let qpn = number.get();
        let events = QpEvents::new()?;
        let values = QpValues {
            port: PORT,
            ..QpValues::default()
        };
        new.set_number(qpn);
        attr.set_cap(&values.cap);
        let qp = new.init(pin_init!(Self {
            object: None,
            memory: QueueMemory::Nothing,
            number,
            layout: RingLayout::RECORD_ONLY,
            state: Atomic::new(QpState::Reset.as_raw()),
            events,
            last_receive: Atomic::new(0),
            refused: Atomic::new(0),
            spread: Some(spread),
            interface: Some(interface),
            values <- new_mutex!(values, "ferrite_qp"),
            groups <- new_mutex!(KVec::new(), "ferrite_qp_groups"),
        }))?;
        let found = qp.get_ref().ok_or(ENODEV)?;
        // Nobody finds it before that, who could tell its process of a failure: of a queue pair whose making fails the core
        // forgets all but the events that are to be read, which lead to it.
        udata.respond(&UverbsQpResponse { qpn, reserved: 0 })?;
        announce(&dev.hw.qps, qpn, found, || Ok(()))?;
        Ok(qp)
    }

    /// Drops the completions that nobody has polled: the next queue pair of this number must not
    /// see them, nor must this one if it is used again. Receives of a shared queue are given back.
    fn forget_completions(qp: &Qp<Ferrite>) {
        let qpn = qp.number();
        if let Some(cq) = qp.send_cq() {
            FerriteCq::purge(cq, qpn, |entry| Self::give_back_shared(qp, entry));
        }
        if let Some(cq) = qp.recv_cq() {
            FerriteCq::purge(cq, qpn, |entry| Self::give_back_shared(qp, entry));
        }
    }

    /// Gives a receive of a shared queue back whose completion nobody will see.
    fn give_back_shared(qp: &Qp<Ferrite>, entry: &CompletionEntry) {
        if let Some(srq) = qp.srq() {
            if entry.flags & abi::COMPLETION_SRQ != 0 {
                FerriteSrq::complete(srq, entry.index);
            }
        }
    }

    fn tell_membership(qp: &Qp<Ferrite>, opcode: CommandOpcode, gid: Gid) -> Result {
        let member = MulticastMember {
            gid: gid.0,
            qpn: qp.number(),
            reserved: 0,
        };
        qp.device().hw.execute_as(opcode, &member)
    }
}

#[vtable]
impl QpOps for Ferrite {
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

    /// Tells state and attributes.
    fn query_qp(qp: &Qp<Self>, attr: &mut QpQuery<'_>) -> Result {
        let dev = qp.device();
        let answered = |values: &QpValues, reply: &QueuePairState| -> Result<QpValues> {
            let mut answer = *values;
            answer.state = QpState::from_raw(reply.attributes.state.into()).ok_or(EIO)?;
            answer.sq_psn = reply.send_psn;
            answer.rq_psn = reply.receive_psn;
            answer.sq_draining = reply.draining != 0;
            Ok(answer)
        };
        if qp.spread.is_some() {
            attr.fill(&qp.values.lock());
            return Ok(());
        }
        if attr.is_listing() {
            // In the turn of who lists, for which nobody is to wait who has this lock to take. What the device says may be
            // of before the last change, and is not kept.
            let reply = dev.hw.query_now::<QueuePairState>(&object(qp.number()));
            let values = *qp.values.lock();
            let answer = match reply {
                Ok(reply) => answered(&values, &reply)?,
                // The device has no time: then as it was last heard of.
                Err(error) if error == EAGAIN => values,
                Err(error) => return Err(error),
            };
            attr.fill(&answer);
            return Ok(());
        }
        let mut values = qp.values.lock();
        let reply = dev.hw.query(&object(qp.number()))?;
        let answer = answered(&values, &reply)?;
        let state = answer.state;
        values.state = state;
        qp.state.store(state.as_raw(), Relaxed);
        attr.fill(&answer);
        Ok(())
    }

    /// Ends a queue pair: afterwards the device touches neither its queues nor its buffers.
    fn destroy_qp(qp: &Qp<Self>) -> Result {
        if let Some(object) = &qp.object {
            object.destroy();
        }
        let qpn = qp.number();
        qp.device().hw.qps.remove(qpn as usize);
        FerriteQp::forget_completions(qp);
        for cq in [qp.send_cq(), qp.recv_cq()].into_iter().flatten() {
            FerriteCq::detach(cq, qpn);
        }
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

impl McastOps for Ferrite {
    /// Lets a datagram queue pair into a multicast group.
    fn attach_mcast(qp: &Qp<Self>, gid: Gid) -> Result {
        let dev = qp.device();
        if !dev.has(abi::FEATURE_MULTICAST) {
            return Err(errno::eopnotsupp());
        }
        let mut groups = qp.groups.lock();
        let member = groups.contains(&gid);
        groups.push(gid, GFP_KERNEL_ACCOUNT)?;
        if !member {
            let told = FerriteQp::tell_membership(qp, CommandOpcode::AttachMulticast, gid);
            if told.is_err() {
                groups.pop();
            }
            told?;
        }
        Ok(())
    }

    /// Lets a queue pair out of a multicast group. If it was in it, this always succeeds: the core
    /// would never let go of the queue pair otherwise.
    fn detach_mcast(qp: &Qp<Self>, gid: Gid) -> Result {
        let mut groups = qp.groups.lock();
        let place = groups.iter().position(|group| *group == gid);
        groups.remove(place.ok_or(EINVAL)?).map_err(|_| EINVAL)?;
        if groups.contains(&gid) {
            return Ok(());
        }
        let hw = &qp.device().hw;
        if let Err(error) = FerriteQp::tell_membership(qp, CommandOpcode::DetachMulticast, gid) {
            if !hw.is_dead() {
                dev_err!(hw.pdev, "a member cannot leave its group: {:?}\n", error);
                hw.fail();
            }
        }
        Ok(())
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
