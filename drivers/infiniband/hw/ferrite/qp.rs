// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! Both rings and the record lie in one buffer: of the process for its own queue pairs, coherent
//! memory for those of the kernel. Only the latter are posted to here ([`posting`]).

mod attributes;
mod create;
mod layout;
mod posting;

use self::{
    layout::RingLayout,
    posting::KernelRings, //
};
use crate::{
    abi,
    abi::{
        CommandOpcode,
        CompletionEntry,
        MulticastMember,
        QueuePairState, //
    },
    commands::DeviceObject,
    cq::FerriteCq,
    cqp::object,
    device::{
        told_to_kernel,
        Ferrite, //
    },
    flow::PortInterface,
    kernel_ext::errno,
    numbers::Number,
    qp_event::QpEvents,
    queue::QueueMemory,
    rdma::{
        ibdev_err,
        kind,
        Cq,
        Details,
        Device,
        Gid,
        McastOps,
        New,
        Qp,
        QpAttr,
        QpEvent,
        QpInitAttr,
        QpOps,
        QpQuery,
        QpState,
        QpValues,
        RecvList,
        SendList,
        Udata, //
    },
    srq::FerriteSrq,
    wq::Spread, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc,
        Mutex, //
    }, //
};

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

    /// Drops the completions that nobody has polled: the next queue pair of this number must not
    /// see them, nor must this one if it is used again. Receives of a shared queue are given back.
    fn forget_completions(qp: &Qp<Ferrite>) {
        for cq in Self::cqs(qp) {
            FerriteCq::purge(cq, qp.number(), |entry| Self::give_back_shared(qp, entry));
        }
    }

    /// Has its completion queues know it no more.
    fn detach_cqs(qp: &Qp<Ferrite>) {
        Self::cqs(qp).for_each(|cq| FerriteCq::detach(cq, qp.number()));
    }

    /// The completion queues that it has; one twice that serves both its queues.
    fn cqs(qp: &Qp<Ferrite>) -> impl Iterator<Item = &Cq<Ferrite>> + '_ {
        [qp.send_cq(), qp.recv_cq()].into_iter().flatten()
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
        qp.device().hw.qps.remove(qp.number() as usize);
        FerriteQp::forget_completions(qp);
        FerriteQp::detach_cqs(qp);
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
                ibdev_err!(
                    qp.device(),
                    "a member cannot leave its group: {:?}\n",
                    error
                );
                hw.fail();
            }
        }
        Ok(())
    }
}
