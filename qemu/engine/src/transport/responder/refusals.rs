// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Why a request is not carried out, now or at all: what is waited for, what the requester is told, and
//! what the consumer of the queue pair is.

use super::answers::Answer;
use super::ask_again;
use crate::core::{Core, ReceiveCompletion};
use crate::counters::count;
use crate::cq::CompletionQueueDead;
use crate::memory::Host;
use crate::paging::{Fault, Outcome, Side};
use crate::qp::{OwedEvent, QueuePair};
use crate::roce::{NakCode, Packet, Syndrome};
use crate::tpt::TptError;
use ferrite_abi::{CompletionStatus, EventCode};

/// What a peer is told to wait at least for a page: code of 2.56 ms.
const PAGE_RNR_TIMER: u8 = 16;

/// Why an access is refused that no tag can make right: the queue pair has not the right for it. It goes on
/// from [`TptError::vendor_syndrome`].
pub(super) const QUEUE_PAIR_RIGHT: u32 = 21;

/// Why a request is refused, and what the consumer of this queue pair is told.
pub(super) enum Refusal {
    /// The requester is at fault in form.
    Invalid,
    /// The requester may not do this; the number says why.
    Access(u32),
    /// A receive ends with this status; the code goes to the requester.
    Receive {
        status: CompletionStatus,
        vendor_syndrome: u32,
        code: NakCode,
    },
    /// No receive is at fault, yet the request cannot be carried out.
    Failed,
    /// The completion queue does not take the completion.
    QueueDead,
    /// What the peer has lent is there no more, as if the packet had not come.
    Lost,
    /// There is no receive: try later.
    NotReady,
    /// A page is not there: try later.
    PageAbsent,
    /// A page that the peer names is not there, and nobody was asked for it yet.
    Absent(Fault),
    /// A page of a receive is not there, likewise.
    AbsentReceive(Fault),
    /// The tag with this index is pending: the request waits.
    Pending(u32),
    /// The table refuses what the peer names, as far as it knows.
    Table(TptError),
    /// The table refuses a receive, likewise.
    TableReceive(TptError),
}

impl From<TptError> for Refusal {
    fn from(error: TptError) -> Self {
        match error {
            TptError::Absent(fault) => Self::Absent(fault),
            TptError::Pending(index) => Self::Pending(index),
            error => Self::Table(error),
        }
    }
}

/// That a receive cannot be placed.
fn receive_refused(error: TptError) -> Refusal {
    Refusal::Receive {
        status: CompletionStatus::LocalProtection,
        vendor_syndrome: error.vendor_syndrome(),
        code: NakCode::RemoteOperation,
    }
}

/// Has the host see to a page that is not there, and waits for a pending tag, and for commands that
/// may make one; what is refused otherwise stays refused.
pub(super) fn settle(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    refusal: Refusal,
    host: &mut dyn Host,
) -> Refusal {
    let mut waited = qp.transport.responder.waited(psn);
    let refusal = match refusal {
        Refusal::Table(error) => match core.confirm(error, waited, host) {
            TptError::Pending(index) => Refusal::Pending(index),
            error => Refusal::Access(error.vendor_syndrome()),
        },
        Refusal::TableReceive(error) => match core.confirm(error, waited, host) {
            TptError::Pending(index) => Refusal::Pending(index),
            error => receive_refused(error),
        },
        refusal => refusal,
    };
    let (fault, otherwise) = match refusal {
        Refusal::Pending(index) => {
            core.wait_for_tag(qp.number, Side::Responder, index, &mut waited);
            qp.transport.responder.request_waited = Some((psn, waited));
            return Refusal::Pending(index);
        }
        Refusal::Absent(fault) => (
            fault,
            Refusal::Access(TptError::Absent(fault).vendor_syndrome()),
        ),
        Refusal::AbsentReceive(fault) => (fault, receive_refused(TptError::Absent(fault))),
        refusal => return refusal,
    };
    match core.page_fault(qp.number, Side::Responder, fault, host) {
        Outcome::Wait => Refusal::PageAbsent,
        Outcome::Fail => otherwise,
    }
}

/// Completes the receive in use with an error.
pub(super) fn fail_receive(
    core: &mut Core,
    qp: &mut QueuePair,
    status: CompletionStatus,
    vendor_syndrome: u32,
    host: &mut dyn Host,
) -> Result<(), CompletionQueueDead> {
    qp.transport.responder.taken = false;
    let completion =
        ReceiveCompletion::failed(&qp.transport.responder.receive, status, vendor_syndrome);
    core.complete_receive(qp, &completion, host)
}

/// Refuses the request at `packet`, and tells the consumer of this queue pair.
pub(super) fn refuse(
    core: &mut Core,
    qp: &mut QueuePair,
    packet: &Packet<'_>,
    refusal: Refusal,
    host: &mut dyn Host,
) {
    let psn = packet.bth.psn;
    let (code, event) = match refusal {
        Refusal::NotReady => {
            let responder = &mut qp.transport.responder;
            responder.told = true;
            responder.answers.push_back(Answer::NotNow {
                psn,
                syndrome: Syndrome::ReceiverNotReady(qp.attributes.min_rnr_timer),
            });
            core.schedule(qp);
            return;
        }
        Refusal::PageAbsent => {
            let least = qp.attributes.min_rnr_timer;
            // Code 0 is the longest.
            let code = if least == 0 {
                0
            } else {
                least.max(PAGE_RNR_TIMER)
            };
            let responder = &mut qp.transport.responder;
            responder.told = true;
            responder.answers.push_back(Answer::NotNow {
                psn,
                syndrome: Syndrome::ReceiverNotReady(code),
            });
            core.schedule(qp);
            return;
        }
        Refusal::Lost => {
            // It was what the requester was told to send: it has to be told once more.
            qp.transport.responder.told = false;
            return ask_again(core, qp);
        }
        Refusal::Invalid => (
            NakCode::InvalidRequest,
            Some((EventCode::QueuePairRequestError, 0)),
        ),
        Refusal::Access(why) => access_refused(core, qp, why),
        Refusal::Absent(fault) | Refusal::AbsentReceive(fault) => {
            access_refused(core, qp, TptError::Absent(fault).vendor_syndrome())
        }
        Refusal::Pending(index) => {
            access_refused(core, qp, TptError::Pending(index).vendor_syndrome())
        }
        Refusal::Table(error) | Refusal::TableReceive(error) => {
            access_refused(core, qp, error.vendor_syndrome())
        }
        Refusal::Receive {
            status,
            vendor_syndrome,
            code,
        } => {
            let told = fail_receive(core, qp, status, vendor_syndrome, host);
            let event = told.is_err().then_some((EventCode::QueuePairFatal, 0));
            (code, event)
        }
        Refusal::Failed | Refusal::QueueDead => (
            NakCode::RemoteOperation,
            Some((EventCode::QueuePairFatal, 0)),
        ),
    };
    close(core, qp, psn, code, event);
}

/// The answer to an access that is refused, and the event that says why.
fn access_refused(core: &mut Core, qp: &mut QueuePair, why: u32) -> (NakCode, Option<OwedEvent>) {
    count!(core, qp, access_errors);
    let event = (EventCode::QueuePairAccessError, why.into());
    (NakCode::RemoteAccess, Some(event))
}

/// Has the request at `psn` refused after all that is still to be answered. The consumer of this
/// queue pair is told by `event` when it is in error.
pub(super) fn close(
    core: &mut Core,
    qp: &mut QueuePair,
    psn: u32,
    code: NakCode,
    event: Option<OwedEvent>,
) {
    let responder = &mut qp.transport.responder;
    responder.closing = true;
    responder.event = event;
    responder.answers.push_back(Answer::Refuse { psn, code });
    core.schedule(qp);
}

/// The tag of the request at `psn` was revoked before all of it was carried out.
pub(super) fn revoked(core: &mut Core, qp: &mut QueuePair, psn: u32, error: TptError) {
    qp.transport.responder.answers.clear();
    let (code, event) = access_refused(core, qp, error.vendor_syndrome());
    close(core, qp, psn, code, event);
}
