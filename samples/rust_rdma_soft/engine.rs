// SPDX-License-Identifier: GPL-2.0

//! The device: a work item that does what was posted, one request after the other.

use crate::driver::{add_completion, Soft, MANY, OF_KERNEL};
use crate::kernel_ext::cpu::cond_resched;
use crate::memory::{copy, Short, Span, Spans};
use crate::queue::{Cqe, Op, Recv, Send};
use crate::rdma::{
    Access, MrRef, Qp, QpRef, QpState, QpValues, Remote, SendFlags, WcOpcode, WcStatus,
};
use kernel::prelude::*;
use kernel::sync::{new_mutex, Arc, Mutex};
use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

/// The device.
#[pin_data]
pub(crate) struct Engine {
    /// Queue pairs and regions by number. Held while a request is done: what is taken out is not used
    /// any more.
    #[pin]
    pub(crate) objects: Mutex<Objects>,
    #[pin]
    work: Work<Engine>,
}

impl_has_work! {
    impl HasWork<Self> for Engine { self.work }
}

/// What requests find by number.
pub(crate) struct Objects {
    pub(crate) qps: Numbered<QpRef<Soft>>,
    pub(crate) mrs: Numbered<MrRef<Soft>>,
}

/// Objects of one kind by number, beginning with [`FIRST`].
pub(crate) struct Numbered<T>(KVVec<Option<T>>);

/// Bytes of a message, at the most: as `PortAttr::ethernet` says.
const MAX_MESSAGE: u64 = 1 << 31;

/// Numbers before it are those of special queue pairs, and key 0 is that of all local memory.
const FIRST: u32 = 2;

/// The number of no queue pair, for who is connected with one that is gone.
pub(crate) const NOBODY: u32 = 0;

impl<T> Numbered<T> {
    fn new() -> Self {
        Self(KVVec::new())
    }

    /// A number that is free, with room for its object; `ENOMEM` where there are as many as there may be, so that
    /// numbers have 24 bits. Processes do not get the last ones.
    pub(crate) fn reserve(&mut self, of_process: bool) -> Result<u32> {
        let free = self.0.iter().position(Option::is_none);
        let at = free.unwrap_or(self.0.len());
        let end = MANY - if of_process { OF_KERNEL } else { 0 };
        if at >= end as usize {
            return Err(ENOMEM);
        }
        if at == self.0.len() {
            self.0.push(None, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(at as u32 + FIRST)
    }

    pub(crate) fn set(&mut self, number: u32, object: Option<T>) {
        if let Some(place) = number
            .checked_sub(FIRST)
            .and_then(|at| self.0.get_mut(at as usize))
        {
            *place = object;
        }
    }

    fn get(&self, number: u32) -> Option<&T> {
        self.0.get(number.checked_sub(FIRST)? as usize)?.as_ref()
    }

    /// The first object at place `from` or behind it, and the place behind that.
    fn next(&self, from: usize) -> Option<(&T, usize)> {
        let places = self.0.iter().enumerate().skip(from);
        places
            .filter_map(|(at, object)| Some((object.as_ref()?, at + 1)))
            .next()
    }
}

/// What became of a request.
enum End {
    /// It is done, and had so many bytes.
    Done(u32),
    /// The peer has nothing to receive it with yet.
    Waits,
    /// It failed.
    Failed(WcStatus),
}

impl Engine {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            objects <- new_mutex!(Objects {
                qps: Numbered::new(),
                mrs: Numbered::new(),
            }, "rust_rdma_soft::objects"),
            work <- new_work!("rust_rdma_soft::Engine"),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }
}

impl WorkItem for Engine {
    type Pointer = Arc<Self>;

    /// Does one request of each queue pair at a time, until none can be done.
    fn run(this: Arc<Self>) {
        loop {
            let mut any = false;
            let mut place = 0;
            loop {
                // Of each anew: who makes an object does not wait for all that was posted.
                let objects = this.objects.lock();
                let Some((qp, next)) = objects.qps.next(place) else {
                    break;
                };
                any |= objects.step(qp);
                place = next;
                drop(objects);
                cond_resched();
            }
            if !any {
                return;
            }
        }
    }
}

impl Objects {
    /// Does the first request of a queue pair; returns whether anything was done.
    fn step(&self, qp: &QpRef<Soft>) -> bool {
        let mut queues = qp.queues.lock();
        match queues.state {
            QpState::Rts => {}
            QpState::Err => {
                drop(queues);
                return flush(qp);
            }
            _ => return false,
        }
        let Some(send) = queues.sends.lend() else {
            return false;
        };
        drop(queues);
        let values = *qp.values.lock();
        match self.execute(qp, &values, &send) {
            End::Waits => {
                qp.queues.lock().sends.give_back(send);
                false
            }
            End::Done(byte_len) => {
                qp.queues.lock().sends.end_loan();
                if values.signal_all || send.flags.contains(SendFlags::SIGNALED) {
                    complete_send(qp, &send, WcStatus::Success, byte_len);
                }
                true
            }
            End::Failed(status) => {
                qp.queues.lock().sends.end_loan();
                // Who sees the completion finds the queue pair in error.
                fail(qp);
                complete_send(qp, &send, status, 0);
                true
            }
        }
    }

    /// The region that `key` is of, if it is one of domain `pd` and allows that.
    fn find(
        &self,
        pd: u64,
        key: u32,
        addr: u64,
        length: u64,
        access: Access,
    ) -> Option<Span<'static>> {
        let mr = self.mrs.get(key >> 8)?;
        let allowed = mr.pd == pd && mr.pages.lock().allows(key, addr, length, access);
        allowed.then(|| Span::of_region(mr.clone(), addr, length))
    }

    /// The peer's memory that a request names.
    fn remote(
        &self,
        peer: &Peer<'_>,
        remote: Remote,
        length: u64,
        access: Access,
    ) -> Result<Spans<'static>, WcStatus> {
        if length == 0 {
            return Ok(Spans::default());
        }
        let allowed = peer.values.access.contains(access);
        let span = allowed
            .then(|| self.find(peer.qp.pd, remote.rkey, remote.addr, length, access))
            .flatten();
        match span {
            Some(span) => Ok(span.into()),
            None => {
                // A peer whose memory was asked for wrongly ends the connection, too.
                fail(peer.qp);
                Err(WcStatus::RemoteAccess)
            }
        }
    }

    /// The queue pair that one was connected with, if that still is.
    pub(crate) fn connected_with(&self, qp: &Qp<Soft>) -> Option<&QpRef<Soft>> {
        let peer = self.qps.get(qp.values.lock().dest_qp_num)?;
        let values = peer.values.lock();
        let is_connected = matches!(values.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        (is_connected && values.dest_qp_num == qp.number()).then_some(peer)
    }

    /// The queue pair that one is connected with.
    fn peer(&self, qp: &Qp<Soft>, values: &QpValues) -> Result<Peer<'_>, WcStatus> {
        let peer = self.qps.get(values.dest_qp_num);
        let peer = peer.map(|peer| Peer {
            values: *peer.values.lock(),
            qp: peer,
        });
        peer.filter(|peer| {
            // Its sends are drained (SQD), not what it receives.
            let receives = matches!(
                peer.values.state,
                QpState::Rtr | QpState::Rts | QpState::Sqd
            );
            receives && peer.values.dest_qp_num == qp.number() && agree(values, &peer.values)
        })
        // Nobody answers.
        .ok_or(WcStatus::RetryExceeded)
    }

    fn execute(&self, qp: &Qp<Soft>, values: &QpValues, send: &Send) -> End {
        match self.try_execute(qp, values, send) {
            Ok(end) => end,
            Err(status) => End::Failed(status),
        }
    }

    fn try_execute(&self, qp: &Qp<Soft>, values: &QpValues, send: &Send) -> Result<End, WcStatus> {
        let length = send.local.length();
        let local = |access: Access| {
            let find = |key, addr, length| self.find(qp.pd, key, addr, length, access);
            let spans = send.local.spans(length, find);
            spans.ok_or(WcStatus::LocalProtection)
        };
        let failed = |good: bool| good.then_some(()).ok_or(WcStatus::LocalProtection);
        if length > MAX_MESSAGE {
            return Err(WcStatus::LocalLength);
        }
        Ok(match &send.op {
            Op::Send { imm, invalidate } => {
                let from = local(Access::default())?;
                let peer = self.peer(qp, values)?;
                let message = Message {
                    from: &from,
                    length,
                    imm: *imm,
                    invalidate: *invalidate,
                    solicited: send.flags.contains(SendFlags::SOLICITED),
                };
                self.deliver(&peer, &message)?
            }
            Op::Write { remote, imm } => {
                let from = local(Access::default())?;
                let peer = self.peer(qp, values)?;
                if imm.is_some() && peer.qp.queues.lock().recvs.is_empty() {
                    return Ok(End::Waits);
                }
                let to = self.remote(&peer, *remote, length, Access::REMOTE_WRITE)?;
                copy(&from, &to, length).map_err(|short| peer.is_short(short == Short::Sink))?;
                if let Some(imm) = imm {
                    let recv = peer.qp.queues.lock().recvs.pop();
                    if let Some(recv) = recv {
                        let cqe = Cqe {
                            byte_len: length as u32,
                            imm: Some(*imm),
                            ..received(peer.qp, &recv, WcOpcode::RecvRdmaWithImm)
                        };
                        let solicited = send.flags.contains(SendFlags::SOLICITED);
                        complete_recv(peer.qp, cqe, solicited);
                    }
                }
                End::Done(length as u32)
            }
            Op::Read(remote) => {
                let to = local(Access::LOCAL_WRITE)?;
                let peer = self.peer(qp, values)?;
                let from = self.remote(&peer, *remote, length, Access::REMOTE_READ)?;
                copy(&from, &to, length).map_err(|short| peer.is_short(short == Short::Source))?;
                End::Done(length as u32)
            }
            Op::CompareSwap {
                remote,
                compare,
                swap,
            } => {
                let to = local(Access::LOCAL_WRITE)?;
                let new = |old| if old == *compare { *swap } else { old };
                self.atomic(&self.peer(qp, values)?, *remote, &to, new)?
            }
            Op::FetchAdd { remote, add } => {
                let to = local(Access::LOCAL_WRITE)?;
                let new = |old: u64| old.wrapping_add(*add);
                self.atomic(&self.peer(qp, values)?, *remote, &to, new)?
            }
            Op::Register {
                serial,
                key,
                mapping,
            } => {
                let mr = self.mrs.get(key >> 8);
                let mr = mr.filter(|mr| mr.serial == *serial && mr.pd == qp.pd);
                failed(mr.is_some_and(|mr| mr.pages.lock().register(*key, mapping)))?;
                End::Done(0)
            }
            Op::Invalidate(key) => {
                failed(self.invalidate(qp.pd, *key))?;
                End::Done(0)
            }
        })
    }

    /// Ends the registration under `key`; returns whether there was one in domain `pd`.
    fn invalidate(&self, pd: u64, key: u32) -> bool {
        let mr = self.mrs.get(key >> 8).filter(|mr| mr.pd == pd);
        mr.is_some_and(|mr| mr.pages.lock().invalidate(key))
    }

    /// Puts a message into the peer's first receive.
    fn deliver(&self, peer: &Peer<'_>, message: &Message<'_>) -> Result<End, WcStatus> {
        let recv = peer.qp.queues.lock().recvs.lend();
        let Some(recv) = recv else {
            // As with `rnr_retry` 7, however long that takes.
            return Ok(End::Waits);
        };
        let refuse = |status, answer| {
            peer.qp.queues.lock().recvs.end_loan();
            let cqe = Cqe {
                status,
                ..received(peer.qp, &recv, WcOpcode::Recv)
            };
            fail(peer.qp);
            complete_recv(peer.qp, cqe, true);
            Err(answer)
        };
        if message.length > recv.local.length() {
            return refuse(WcStatus::LocalLength, WcStatus::RemoteInvalidRequest);
        }
        let pd = peer.qp.pd;
        let find = |key, addr, length| self.find(pd, key, addr, length, Access::LOCAL_WRITE);
        let copied = match recv.local.spans(message.length, find) {
            Some(to) => copy(message.from, &to, message.length),
            None => Err(Short::Sink),
        };
        match copied {
            Ok(()) => {}
            Err(Short::Sink) => {
                return refuse(WcStatus::LocalProtection, WcStatus::RemoteOperation);
            }
            Err(Short::Source) => {
                // No message came of it.
                peer.qp.queues.lock().recvs.give_back(recv);
                return Err(WcStatus::LocalProtection);
            }
        }
        if message
            .invalidate
            .is_some_and(|key| !self.invalidate(pd, key))
        {
            return refuse(WcStatus::LocalProtection, WcStatus::RemoteOperation);
        }
        peer.qp.queues.lock().recvs.end_loan();
        let cqe = Cqe {
            byte_len: message.length as u32,
            imm: message.imm,
            invalidated: message.invalidate,
            ..received(peer.qp, &recv, WcOpcode::Recv)
        };
        complete_recv(peer.qp, cqe, message.solicited);
        Ok(End::Done(message.length as u32))
    }

    /// Changes eight bytes of the peer's memory, and tells what they were. The engine does one request at
    /// a time, which makes it atomic among all of the device.
    fn atomic(
        &self,
        peer: &Peer<'_>,
        remote: Remote,
        to: &Spans<'_>,
        new: impl FnOnce(u64) -> u64,
    ) -> Result<End, WcStatus> {
        const LENGTH: u64 = size_of::<u64>() as u64;
        if remote.addr % LENGTH != 0 {
            fail(peer.qp);
            return Err(WcStatus::RemoteInvalidRequest);
        }
        let memory = self.remote(peer, remote, LENGTH, Access::REMOTE_ATOMIC)?;
        let mut old = [0; LENGTH as usize];
        let was = Span::of_bytes(&mut old).into();
        copy(&memory, &was, LENGTH).map_err(|_| peer.is_short(true))?;
        copy(&was, to, LENGTH).map_err(|_| peer.is_short(false))?;
        let mut new = new(u64::from_ne_bytes(old)).to_ne_bytes();
        let is = Span::of_bytes(&mut new).into();
        copy(&is, &memory, LENGTH).map_err(|_| peer.is_short(true))?;
        Ok(End::Done(LENGTH as u32))
    }
}

/// Whether the two ends of a connection were told the same sequence numbers to begin with (PSN): numbers of queue pairs
/// are easily guessed. The device itself counts no packets.
fn agree(near: &QpValues, far: &QpValues) -> bool {
    // Before it may send, an end has not been told what it would begin with.
    let sends = matches!(far.state, QpState::Rts | QpState::Sqd);
    let same = |sent: u32, expected: u32| (sent ^ expected) & 0xff_ffff == 0;
    same(near.sq_psn, far.rq_psn) && (!sends || same(far.sq_psn, near.rq_psn))
}

/// The other end of a connection.
struct Peer<'a> {
    qp: &'a QpRef<Soft>,
    values: QpValues,
}

impl Peer<'_> {
    /// How a request ends of which one side had fewer bytes than its region had when it was looked at. A peer
    /// whose memory that is fails, too.
    fn is_short(&self, theirs: bool) -> WcStatus {
        if !theirs {
            return WcStatus::LocalProtection;
        }
        fail(self.qp);
        WcStatus::RemoteOperation
    }
}

/// A message on its way.
struct Message<'a> {
    from: &'a Spans<'a>,
    length: u64,
    imm: Option<u32>,
    invalidate: Option<u32>,
    solicited: bool,
}

/// The completion of a receive, with nothing else to tell.
fn received(qp: &QpRef<Soft>, recv: &Recv, opcode: WcOpcode) -> Cqe {
    Cqe {
        qp: qp.clone(),
        wr_id: recv.wr_id,
        status: WcStatus::Success,
        opcode,
        byte_len: 0,
        imm: None,
        invalidated: None,
    }
}

fn complete_send(qp: &QpRef<Soft>, send: &Send, status: WcStatus, byte_len: u32) {
    if let Some(cq) = qp.send_cq() {
        let cqe = Cqe {
            qp: qp.clone(),
            wr_id: send.wr_id,
            status,
            opcode: send.op.opcode(),
            byte_len,
            imm: None,
            invalidated: None,
        };
        add_completion(cq, cqe, false);
    }
}

fn complete_recv(qp: &Qp<Soft>, cqe: Cqe, solicited: bool) {
    if let Some(cq) = qp.recv_cq() {
        add_completion(cq, cqe, solicited);
    }
}

/// A queue pair failed: what is posted to it is flushed when its turn comes.
pub(crate) fn fail(qp: &Qp<Soft>) {
    qp.values.lock().state = QpState::Err;
    qp.queues.lock().state = QpState::Err;
}

/// Completes the first of what was posted to a queue pair in error; returns whether there was any. The next
/// one has to wait for its turn: who is told of this one may post again.
fn flush(qp: &QpRef<Soft>) -> bool {
    let mut queues = qp.queues.lock();
    if let Some(send) = queues.sends.pop() {
        // Not held while completing.
        drop(queues);
        complete_send(qp, &send, WcStatus::WorkRequestFlushed, 0);
        return true;
    }
    let recv = queues.recvs.pop();
    drop(queues);
    let Some(recv) = recv else {
        return false;
    };
    let cqe = Cqe {
        status: WcStatus::WorkRequestFlushed,
        ..received(qp, &recv, WcOpcode::Recv)
    };
    complete_recv(qp, cqe, false);
    true
}

#[kunit_tests(rust_rdma_soft_engine)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again_and_begin_behind_special_ones() -> Result {
        let mut table = Numbered::new();
        for expected in FIRST..FIRST + 3 {
            assert_eq!(table.reserve(true)?, expected);
            table.set(expected, Some(10 * expected));
        }
        assert_eq!(
            (table.get(0), table.get(3), table.get(5)),
            (None, Some(&30), None)
        );
        table.set(3, None);
        table.set(0, Some(1));
        assert_eq!(table.get(3), None);
        // In their order, without those that are gone.
        assert_eq!(table.next(0), Some((&20, 1)));
        assert_eq!(table.next(1), Some((&40, 3)));
        assert_eq!(table.next(3), None);
        assert_eq!(table.reserve(true)?, 3);
        Ok(())
    }

    #[test]
    fn there_are_no_more_numbers_than_are_told() -> Result {
        let mut table = Numbered::new();
        for _ in 0..MANY {
            table.0.push(Some(()), GFP_KERNEL)?;
        }
        assert_eq!(table.reserve(false), Err(ENOMEM));
        table.set(FIRST + 5, None);
        assert_eq!(table.reserve(false), Ok(FIRST + 5));
        Ok(())
    }

    #[test]
    fn processes_leave_numbers_to_the_kernel() -> Result {
        let mut table = Numbered::new();
        for _ in 0..MANY - OF_KERNEL - 1 {
            table.0.push(Some(()), GFP_KERNEL)?;
        }
        let last = table.reserve(true)?;
        assert_eq!(last, FIRST + MANY - OF_KERNEL - 1);
        table.set(last, Some(()));
        assert_eq!(table.reserve(true), Err(ENOMEM));
        assert_eq!(table.reserve(false), Ok(last + 1));
        Ok(())
    }

    #[test]
    fn ends_of_a_connection_agree_on_what_they_begin_with() {
        let end = |state, sq_psn, rq_psn| QpValues {
            state,
            sq_psn,
            rq_psn,
            ..QpValues::default()
        };
        let near = end(QpState::Rts, 7, 9);
        assert!(agree(&near, &end(QpState::Rts, 9, 7)));
        assert!(agree(&near, &end(QpState::Sqd, 9, 7)));
        assert!(!agree(&near, &end(QpState::Rts, 9, 8)));
        assert!(!agree(&near, &end(QpState::Rts, 8, 7)));
        // It has yet to be told what to begin with.
        assert!(agree(&near, &end(QpState::Rtr, 0, 7)));
        assert!(!agree(&near, &end(QpState::Rtr, 0, 8)));
    }
}
