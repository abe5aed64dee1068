// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared receive queues.

use super::checks;
use super::fixture::*;
use crate::host::{Host, PD, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{not_here, Outcome};
use crate::packet::{rc, syndrome};
use crate::rings::{Cq, Qp, Srq};
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{
    BadNumber, BadParameter, BadState, Busy, Exists, HostMemory, NotFound, Unsupported,
};
use ferrite_abi::CompletionStatus::{LocalProtection, Success};
use ferrite_abi::*;

checks! {
    "DEV-9-1" => copied_when_taken,
    "DEV-9-2" => identifiers,
    "DEV-9-3" => impossible_producers,
    "DEV-9-4" => feature_agreed_on,
    "DEV-9-5" => |h| creations(h, BadNumber, |c, caps| {
        vec![CreateSrq { srqn: caps.srq_first + caps.srq_count, ..c }, CreateSrq { srqn: u32::MAX, ..c }]
    }),
    "DEV-9-6" => |h| {
        h.start_needing(FEATURE_SRQ)?;
        let command = h.srq_command();
        h.execute(&command)?;
        h.refuse(&command, Exists)
    },
    "DEV-9-7" => |h| creations(h, BadParameter, |c, _| {
        [2, 1 << 15].map(|flags| CreateSrq { flags, ..c }).to_vec()
    }),
    "DEV-9-8" => |h| creations(h, BadParameter, |c, caps| vec![
        CreateSrq { log_entries: caps.rq_max_log_entries + 1, ..c },
        CreateSrq { log_stride: RQ_MIN_LOG_STRIDE - 1, ..c },
        CreateSrq { log_stride: RQ_MAX_LOG_STRIDE + 1, ..c },
    ]),
    "DEV-9-9" => |h| creations(h, BadParameter, |c, _| {
        let mut askew = c;
        askew.buffer.fbo = 32;
        vec![
            askew,
            CreateSrq { ring_offset: 8, ..c },
            CreateSrq { record_offset: c.record_offset - 8, ..c },
            CreateSrq { record_offset: c.record_offset + 64, ..c },
            CreateSrq { record_offset: 0, ..c },
        ]
    }),
    "DEV-9-10" => |h| {
        let pages = h.device.register32(REG_DOORBELL_PAGES)?;
        h.start_needing(FEATURE_SRQ)?;
        let mut command = h.srq_command();
        command.doorbell_page = pages;
        h.refuse(&command, BadParameter)
    },
    "DEV-9-11" => |h| extended(h, BadNumber, |c, caps| vec![
        CreateSrq { xrcd: 0, ..c },
        CreateSrq { xrcd: caps.max_xrcd, ..c },
    ]),
    "DEV-9-12" => |h| extended(h, NotFound, |c, caps| {
        vec![CreateSrq { cqn: caps.cq_first + caps.cq_count - 1, ..c }]
    }),
    "DEV-9-13" => fields_of_extended_ones,
    "DEV-9-14" => limits,
    "DEV-9-15" => limit_reached,
    "DEV-9-16" => limit_reached_before,
    "DEV-9-17" => what_it_says,
    "DEV-9-18" => in_use,
    "DEV-9-19" => destroyed,
    "DEV-9-20" => resized,
    "DEV-9-21" => old_buffer,
    "DEV-9-22" => resize_agreed_on,
    "DEV-9-23" => failed_is_not_resized,
    "DEV-9-24" => |h| resizes(h, BadParameter, |c, caps| {
        c.log_entries = caps.rq_max_log_entries + 1;
    }),
    "DEV-9-25" => |h| resizes(h, BadParameter, |c, _| c.record_offset -= 128),
    "DEV-9-26" => too_small,
    "DEV-9-27" => |h| resizes(h, HostMemory, |c, _| c.buffer.root = NOWHERE),
    "DEV-9-28" => producer_is_read_when_needed,
    "DEV-9-29" => no_wake,
    "DEV-9-30" => no_entry,
    "DEV-9-31" => domain,
    "DEV-9-32" => all_memory,
    "DEV-9-33" => protection_failure,
    "DEV-9-34" => memory_gone,
}

/// A connection whose receives come from a shared receive queue.
struct Shared {
    cq: Cq,
    qp: Qp,
    srq: Srq,
    psn: u32,
}

impl Shared {
    fn new(host: &mut Host) -> Outcome<Self> {
        host.start_needing(FEATURE_SRQ)?;
        let cq = host.create_cq()?;
        host.wire()?;
        let (qp, srq) = shared(host, &cq)?;
        let psn = RECEIVE_PSN;
        Ok(Self { cq, qp, srq, psn })
    }

    /// The neighbour sends a message; returns the syndrome of the answer.
    fn message(&mut self, host: &mut Host, bytes: usize) -> Outcome<u8> {
        let body = vec![0x6b; bytes];
        let packet = host
            .neighbour(&self.qp)
            .packet(rc::SEND_ONLY, self.psn, body);
        host.wire()?.send(&packet.encode())?;
        let syndrome = host.wire()?.packet()?.aeth().0;
        self.psn += u32::from(syndrome == syndrome::ACK);
        Ok(syndrome)
    }

    /// The neighbour sends a message, which takes the entry with this identifier.
    fn takes(&mut self, host: &mut Host, id: u32) -> Outcome<CompletionEntry> {
        ensure_eq!(self.message(host, 0)?, syndrome::ACK, "the answer");
        host.completes(&mut self.cq, (self.qp.qpn, id), Success)
    }
}

fn copied_when_taken(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let region = host.region(ACCESS_LOCAL_WRITE, 2 * PAGE)?;
    shared
        .srq
        .post(&host.memory, 3, &[region.sge(0, 2 * PAGE as u32)]);
    let neighbour = host.neighbour(&shared.qp);
    let first = neighbour.packet(rc::SEND_FIRST, RECEIVE_PSN, vec![1; 1024]);
    host.wire()?.send(&first.encode())?;
    host.wire()?.packet()?;
    // What the host writes there meanwhile is another entry.
    host.memory.fill(shared.srq.ring, 64, 0xff);
    let last = neighbour.packet(rc::SEND_LAST, RECEIVE_PSN + 1, vec![1; 8]);
    host.wire()?.send(&last.encode())?;
    host.completes(&mut shared.cq, (shared.qp.qpn, 3), Success)?;
    ensure_eq!(
        host.memory.bytes(region.dma + 1024, 8),
        [1; 8],
        "the last bytes"
    );
    Ok(())
}

fn identifiers(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    for id in [7, u32::MAX, 0] {
        shared.srq.post(&host.memory, id, &[]);
        let entry = shared.takes(host, id)?;
        ensure!(entry.flags & COMPLETION_SRQ != 0, "COMPLETION_SRQ");
        ensure_eq!(entry.srqn, shared.srq.srqn, "the shared receive queue");
    }
    Ok(())
}

fn impossible_producers(host: &mut Host) -> Outcome {
    for producer in [17, u32::MAX] {
        host.device.control_reset()?;
        let mut shared = Shared::new(host)?;
        host.memory.store32(shared.srq.record, producer);
        shared.message(host, 0)?;
        host.event(EQ_ASYNC, EventCode::SrqError, shared.srq.srqn)?;
    }
    Ok(())
}

fn feature_agreed_on(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    let command = host.srq_command();
    host.refuse(&command, Unsupported)?;
    host.device.control_reset()?;
    host.start_with(FEATURE_SRQ)?;
    if host.features & FEATURE_SRQ == 0 {
        return not_here("the device has no shared receive queues");
    }
    let cq = host.create_cq()?;
    let mut command = host.srq_command();
    (command.flags, command.xrcd, command.cqn) = (SRQ_FLAG_XRC, 1, cq.cqn);
    host.refuse(&command, Unsupported)
}

type Variants = fn(CreateSrq, &DeviceCaps) -> Vec<CreateSrq>;

fn creations(host: &mut Host, status: CommandStatus, of: Variants) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let right = host.srq_command();
    refused(host, right, status, of)
}

fn extended(host: &mut Host, status: CommandStatus, of: Variants) -> Outcome {
    host.start_needing(FEATURE_SRQ | FEATURE_XRC)?;
    let cq = host.create_cq()?;
    let mut right = host.srq_command();
    (right.flags, right.xrcd, right.cqn) = (SRQ_FLAG_XRC, 1, cq.cqn);
    refused(host, right, status, of)
}

/// Variants of a right command, each of which must be refused; the right one is not.
fn refused(host: &mut Host, right: CreateSrq, status: CommandStatus, of: Variants) -> Outcome {
    let caps = host.caps;
    for command in of(right, &caps) {
        host.refuse(&command, status)?;
    }
    host.execute(&right)
}

fn fields_of_extended_ones(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let good = host.srq_command();
    host.refuse(&CreateSrq { xrcd: 1, ..good }, BadParameter)?;
    let cqn = cq.cqn.max(1);
    host.refuse(&CreateSrq { cqn, ..good }, BadParameter)?;
    host.execute(&good)?;
    host.destroy(Op::DestroyCompletionQueue, cq.cqn)
}

fn limits(host: &mut Host) -> Outcome {
    let shared = Shared::new(host)?;
    let srqn = shared.srq.srqn;
    host.refuse(&ModifySrq { srqn, limit: 17 }, BadParameter)?;
    host.execute(&ModifySrq { srqn, limit: 0 })?;
    host.no_event(EQ_ASYNC)
}

fn limit_reached(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let srqn = shared.srq.srqn;
    for id in 0..6 {
        shared.srq.post(&host.memory, id, &[]);
    }
    host.execute(&ModifySrq { srqn, limit: 5 })?;
    shared.takes(host, 0)?;
    host.no_event(EQ_ASYNC)?;
    shared.takes(host, 1)?;
    host.event(EQ_ASYNC, EventCode::SrqLimit, srqn)?;
    let state: SrqState = host.query(Op::QuerySrq, Some(srqn))?;
    ensure_eq!(state.limit, 0, "the limit");
    shared.takes(host, 2)?;
    host.no_event(EQ_ASYNC)
}

fn limit_reached_before(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let srqn = shared.srq.srqn;
    shared.srq.post(&host.memory, 0, &[]);
    host.execute(&ModifySrq { srqn, limit: 2 })?;
    host.event(EQ_ASYNC, EventCode::SrqLimit, srqn)?;
    Ok(())
}

fn what_it_says(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let srqn = shared.srq.srqn;
    for id in 0..5 {
        shared.srq.post(&host.memory, id, &[]);
    }
    host.execute(&ModifySrq { srqn, limit: 3 })?;
    shared.takes(host, 0)?;
    let state: SrqState = host.query(Op::QuerySrq, Some(srqn))?;
    ensure_eq!((state.limit, state.available), (3, 4), "limit and entries");
    ensure!(state.reserved_is_zero(), "reserved fields");
    let made = (state.srqn, state.users, state.producer);
    let known = match host.features & FEATURE_CONTEXTS {
        0 => (0, 0, 0),
        _ => (srqn, 1, 5),
    };
    ensure_eq!(made, known, "its number, users and producer index");
    Ok(())
}

fn in_use(host: &mut Host) -> Outcome {
    let shared = Shared::new(host)?;
    host.object(Op::DestroySrq, shared.srq.srqn, Busy)?;
    host.destroy(Op::DestroyQueuePair, shared.qp.qpn)?;
    host.destroy(Op::DestroySrq, shared.srq.srqn)
}

fn destroyed(host: &mut Host) -> Outcome {
    let shared = Shared::new(host)?;
    host.destroy(Op::DestroyQueuePair, shared.qp.qpn)?;
    host.destroy(Op::DestroySrq, shared.srq.srqn)?;
    let (ring, length) = (shared.srq.ring, 1024 + 128);
    host.memory.fill(ring, length, 0xee);
    let packet = host
        .neighbour(&shared.qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    host.untouched(ring, length)?;
    host.object(Op::DestroySrq, shared.srq.srqn, NotFound)
}

/// A command that gives a queue another ring, with what the host writes before.
fn resize(host: &mut Host, srq: &Srq, log_entries: u8) -> (ResizeSrq, Srq) {
    let ring = 1u64 << (log_entries + srq.log_stride);
    let buffer = Buffer::contiguous(host.memory.allocate(ring + 128), ring + 128);
    let new = Srq {
        ring: buffer.root,
        record: buffer.root + ring,
        log_entries,
        ..srq.clone()
    };
    host.memory.store32(new.record, new.producer);
    let command = ResizeSrq {
        srqn: srq.srqn,
        log_entries,
        reserved: [0; 3],
        ring_offset: 0,
        record_offset: ring as u32,
        buffer,
    };
    (command, new)
}

/// A connection with five entries of which two were taken.
fn with_entries(host: &mut Host) -> Outcome<Shared> {
    host.start_needing(FEATURE_SRQ | FEATURE_RESIZE_SRQ)?;
    host.device.control_reset()?;
    let mut shared = Shared::new(host)?;
    for id in 0..5 {
        shared.srq.post(&host.memory, id, &[]);
    }
    shared.takes(host, 0)?;
    shared.takes(host, 1)?;
    Ok(shared)
}

fn resized(host: &mut Host) -> Outcome {
    for log_entries in [6, 2] {
        host.device.control_reset()?;
        let mut shared = with_entries(host)?;
        let (command, new) = resize(host, &shared.srq, log_entries);
        host.execute(&command)?;
        shared.srq = new;
        for id in 2..5 {
            shared.takes(host, id)?;
        }
        shared.srq.post(&host.memory, 50, &[]);
        shared.takes(host, 50)?;
    }
    Ok(())
}

fn old_buffer(host: &mut Host) -> Outcome {
    let mut shared = with_entries(host)?;
    let old = shared.srq.clone();
    let (command, new) = resize(host, &shared.srq, 6);
    host.execute(&command)?;
    shared.srq = new;
    host.memory.fill(old.ring, 1024 + 128, 0xee);
    for id in 2..5 {
        shared.takes(host, id)?;
    }
    let found = host.memory.bytes(old.ring, 1024 + 128);
    ensure!(
        found.iter().all(|byte| *byte == 0xee),
        "the old buffer was written"
    );
    Ok(())
}

fn resize_agreed_on(host: &mut Host) -> Outcome {
    host.start_with(FEATURE_SRQ)?;
    if host.features & FEATURE_SRQ == 0 {
        return not_here("the device has no shared receive queues");
    }
    let srq = host.create_srq()?;
    let (command, _) = resize(host, &srq, 5);
    host.refuse(&command, Unsupported)
}

fn failed_is_not_resized(host: &mut Host) -> Outcome {
    let mut shared = with_entries(host)?;
    for id in 2..5 {
        shared.takes(host, id)?;
    }
    host.memory.store32(shared.srq.record, 1000);
    shared.message(host, 0)?;
    host.event(EQ_ASYNC, EventCode::SrqError, shared.srq.srqn)?;
    let (command, _) = resize(host, &shared.srq, 6);
    host.refuse(&command, BadState)
}

/// A resize that was spoiled; the right one is taken afterwards.
fn resizes(
    host: &mut Host,
    status: CommandStatus,
    spoil: fn(&mut ResizeSrq, &DeviceCaps),
) -> Outcome {
    let mut shared = with_entries(host)?;
    let (right, new) = resize(host, &shared.srq, 5);
    let mut bad = right;
    let caps = host.caps;
    spoil(&mut bad, &caps);
    // Apart from the ring, with another producer index, where it was moved.
    if bad.record_offset != right.record_offset {
        bad.log_entries = 4;
    }
    host.refuse(&bad, status)?;
    shared.takes(host, 2)?;
    host.execute(&right)?;
    shared.srq = new;
    shared.takes(host, 3)?;
    Ok(())
}

fn too_small(host: &mut Host) -> Outcome {
    let shared = with_entries(host)?;
    let (command, _) = resize(host, &shared.srq, 1);
    host.refuse(&command, BadParameter)
}

fn producer_is_read_when_needed(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    // No doorbell is rung for any of these.
    for id in 0..40 {
        shared.srq.post(&host.memory, id, &[]);
        shared.takes(host, id)?;
    }
    Ok(())
}

fn no_wake(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    shared.srq.post(&host.memory, 0, &[]);
    shared.takes(host, 0)?;
    host.move_qp(shared.qp.qpn, QueuePairStateCode::Error)?;
    let record: SrqRecord = host.memory.get(shared.srq.record);
    ensure_eq!(record.wake, 0, "the wake word");
    Ok(())
}

fn no_entry(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let found = shared.message(host, 0)?;
    ensure_eq!(found & 0xe0, syndrome::RNR, "the answer");
    shared.srq.post(&host.memory, 8, &[]);
    shared.takes(host, 8)?;
    Ok(())
}

fn domain(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let mut cq = host.create_cq()?;
    let mut command = host.srq_command();
    command.pd = PD + 1;
    host.execute(&command)?;
    let mut srq = Srq::new(&command);
    let mut command = host.qp_command(Service::Rc, &cq);
    (command.flags, command.srqn) = (QP_FLAG_SRQ, srq.srqn);
    let qp = host.make_qp(&command)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let mut region = host.region_command(ACCESS_LOCAL_WRITE, PAGE);
    region.pd = PD + 1;
    host.execute(&region)?;
    srq.post(
        &host.memory,
        1,
        &[crate::host::region_of(&region).sge(0, 64)],
    );
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![1; 8]);
    host.wire()?.send(&packet.encode())?;
    host.completes(&mut cq, (qp.qpn, 1), Success)?;
    // One of the queue pair's own domain is refused.
    let own = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    srq.post(&host.memory, 2, &[own.sge(0, 64)]);
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN + 1, vec![1; 8]);
    host.wire()?.send(&packet.encode())?;
    host.completes(&mut cq, (qp.qpn, 2), LocalProtection)?;
    Ok(())
}

fn all_memory(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cases = [
        (QP_FLAG_PRIVILEGED, 0, Success),
        (QP_FLAG_PRIVILEGED, 1, LocalProtection),
        (0, 0, LocalProtection),
    ];
    for (flags, page, status) in cases {
        let mut cq = host.create_cq()?;
        let mut command = host.srq_command();
        command.doorbell_page = page;
        host.execute(&command)?;
        let mut srq = Srq::new(&command);
        let mut command = host.qp_command(Service::Rc, &cq);
        (command.flags, command.srqn) = (flags | QP_FLAG_SRQ, srq.srqn);
        let qp = host.make_qp(&command)?;
        let connection = host.to_neighbour();
        host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
        let sge = Sge {
            address: host.memory.allocate(PAGE),
            length: 64,
            lkey: TAG_ALL_MEMORY,
        };
        srq.post(&host.memory, 1, &[sge]);
        let packet = host
            .neighbour(&qp)
            .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![1; 8]);
        host.wire()?.send(&packet.encode())?;
        host.completes(&mut cq, (qp.qpn, 1), status)?;
    }
    Ok(())
}

fn protection_failure(host: &mut Host) -> Outcome {
    let mut shared = Shared::new(host)?;
    let nonsense = Sge {
        address: 0,
        length: 64,
        lkey: 0xdead_be00,
    };
    shared.srq.post(&host.memory, 6, &[nonsense]);
    let found = shared.message(host, 8)?;
    ensure_eq!(found, syndrome::NAK_REMOTE_OPERATION, "the answer");
    host.completes(&mut shared.cq, (shared.qp.qpn, 6), LocalProtection)?;
    host.comes_to(shared.qp.qpn, QueuePairStateCode::Error)?;
    // The queue itself goes on.
    host.event(EQ_ASYNC, EventCode::LastWqeReached, shared.qp.qpn)?;
    host.no_event(EQ_ASYNC)
}

fn memory_gone(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let mut command = host.srq_command();
    // The ring is in a page that is not there, the record in one that is.
    let (table, rest) = (host.memory.allocate(PAGE), host.memory.allocate(PAGE));
    host.memory.store64(table, NOWHERE);
    host.memory.store64(table + 8, rest);
    (command.buffer.root, command.buffer.order) = (table, 1);
    command.buffer.length = 2 * PAGE;
    command.record_offset = PAGE as u32;
    host.execute(&command)?;
    host.memory.store32(rest, 1);
    let srqn = command.srqn;
    let mut command = host.qp_command(Service::Rc, &cq);
    (command.flags, command.srqn) = (QP_FLAG_SRQ, srqn);
    let qp = host.make_qp(&command)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let packet = host
        .neighbour(&qp)
        .packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&packet.encode())?;
    host.event(EQ_ASYNC, EventCode::SrqError, srqn)?;
    host.comes_to(qp.qpn, QueuePairStateCode::Error)?;
    // Once only.
    host.event(EQ_ASYNC, EventCode::LastWqeReached, qp.qpn)?;
    Ok(())
}
