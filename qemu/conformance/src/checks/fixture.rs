// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What checks of several chapters begin with.

use crate::host::{Connection, Host, PD, QKEY};
use crate::memory::PAGE;
use crate::outcome::Outcome;
use crate::packet::{aeth, rc, Packet};
use crate::rings::{Cq, EventRing, Qp, Region, Srq};
use crate::wire::Neighbour;
use crate::work::Work;
use ferrite_abi::*;
use std::time::{Duration, Instant};

/// Two queue pairs of the device that are connected to each other, and their completion queue.
pub struct Pair {
    /// Of both.
    pub cq: Cq,
    /// The one that sends.
    pub a: Qp,
    /// The one that answers.
    pub b: Qp,
    /// Completions of `b` that were met while one of `a` was waited for.
    pub of_b: Vec<CompletionEntry>,
}

impl Pair {
    /// A pair of a device that runs.
    pub fn new(host: &mut Host) -> Outcome<Self> {
        Self::by(host, Service::Rc, |_, _| (), |_| ())
    }

    /// A pair with these flags of creation.
    pub fn flagged(host: &mut Host, flags: u16) -> Outcome<Self> {
        Self::by(
            host,
            Service::Rc,
            |a, b| (a.flags, b.flags) = (flags, flags),
            |_| (),
        )
    }

    /// A pair of this service, whose commands and connections may be changed before.
    pub fn by(
        host: &mut Host,
        service: Service,
        make: impl FnOnce(&mut CreateQueuePair, &mut CreateQueuePair),
        connect: impl Fn(&mut Connection),
    ) -> Outcome<Self> {
        let cq = host.create_cq()?;
        Self::on(host, cq, service, make, connect)
    }

    /// A pair of a completion queue of `1 << log_entries` entries.
    pub fn with_entries(host: &mut Host, log_entries: u8) -> Outcome<Self> {
        let command = host.cq_command(log_entries);
        host.execute(&command)?;
        Self::on(host, Cq::new(&command), Service::Rc, |_, _| (), |_| ())
    }

    fn on(
        host: &mut Host,
        cq: Cq,
        service: Service,
        make: impl FnOnce(&mut CreateQueuePair, &mut CreateQueuePair),
        connect: impl Fn(&mut Connection),
    ) -> Outcome<Self> {
        let mut a = host.qp_command(service, &cq);
        let mut b = host.qp_command(service, &cq);
        make(&mut a, &mut b);
        let (a, b) = (host.make_qp(&a)?, host.make_qp(&b)?);
        let (mut to_a, mut to_b) = (host.to_self(a.qpn), host.to_self(b.qpn));
        connect(&mut to_a);
        connect(&mut to_b);
        host.bring(service, &a, QueuePairStateCode::Rts, &to_b)?;
        host.bring(service, &b, QueuePairStateCode::Rts, &to_a)?;
        Ok(Self {
            cq,
            a,
            b,
            of_b: Vec::new(),
        })
    }

    /// Posts to the sending one and says how that ended.
    pub fn post(&mut self, host: &mut Host, work: &Work) -> Outcome<CompletionEntry> {
        let index = host.post(&mut self.a, work)?;
        self.of_a(host, index)
    }

    /// The completion of a work request of the sending one.
    pub fn of_a(&mut self, host: &mut Host, index: u32) -> Outcome<CompletionEntry> {
        loop {
            let entry = host.completion(&mut self.cq)?;
            if (entry.qpn, entry.index) == (self.a.qpn, index) {
                return Ok(entry);
            }
            self.of_b.push(entry);
        }
    }

    /// The next completion of the answering one.
    pub fn received(&mut self, host: &mut Host) -> Outcome<CompletionEntry> {
        if !self.of_b.is_empty() {
            return Ok(self.of_b.remove(0));
        }
        loop {
            let entry = host.completion(&mut self.cq)?;
            if entry.qpn == self.b.qpn {
                return Ok(entry);
            }
        }
    }

    /// Posts to the sending one, which must end with this status.
    pub fn ends(&mut self, host: &mut Host, work: &Work, status: CompletionStatus) -> Outcome {
        let entry = self.post(host, work)?;
        let found = CompletionStatus::from_number(entry.status);
        crate::ensure_eq!(found, Some(status), "the status ({entry:x?})");
        Ok(())
    }
}

/// A queue pair of the device that is connected to a neighbour on the wire.
pub struct Wired {
    /// Its completion queue.
    pub cq: Cq,
    /// The queue pair.
    pub qp: Qp,
    /// The neighbour.
    pub neighbour: Neighbour,
}

impl Wired {
    /// A reliable connection.
    pub fn new(host: &mut Host) -> Outcome<Self> {
        Self::by(host, Service::Rc, |_| ())
    }

    /// One of this service, connected as `change` says.
    pub fn by(
        host: &mut Host,
        service: Service,
        change: impl FnOnce(&mut Connection),
    ) -> Outcome<Self> {
        let cq = host.create_cq()?;
        let mut connection = host.to_neighbour();
        change(&mut connection);
        let (qp, neighbour) = host.wired_by(service, &cq, &connection)?;
        Ok(Self { cq, qp, neighbour })
    }

    /// The neighbour sends a packet.
    pub fn send(&self, host: &mut Host, opcode: u8, psn: u32, body: Vec<u8>) -> Outcome {
        let packet = self.neighbour.packet(opcode, psn, body);
        host.wire()?.send(&packet.encode())
    }

    /// The neighbour sends a packet; returns what the device answers.
    pub fn ask(&self, host: &mut Host, opcode: u8, psn: u32, body: Vec<u8>) -> Outcome<Packet> {
        self.send(host, opcode, psn, body)?;
        host.wire()?.packet()
    }

    /// Posts a work request; returns its first packet.
    pub fn request(&mut self, host: &mut Host, work: &Work) -> Outcome<Packet> {
        host.post(&mut self.qp, work)?;
        host.wire()?.packet()
    }

    /// The neighbour acknowledges.
    pub fn acknowledge(&self, host: &mut Host, psn: u32, syndrome: u8) -> Outcome {
        self.send(host, rc::ACKNOWLEDGE, psn, aeth(syndrome, 1))
    }

    /// The next completion, which must be that of the work request or receive of this index.
    pub fn completes(
        &mut self,
        host: &mut Host,
        index: u32,
        status: CompletionStatus,
    ) -> Outcome<CompletionEntry> {
        host.completes(&mut self.cq, (self.qp.qpn, index), status)
    }
}

/// The answer is an acknowledgement with this syndrome.
pub fn is_answer(answer: &Packet, syndrome: u8) -> Outcome {
    let found = (answer.opcode, answer.aeth().0);
    crate::ensure_eq!(
        found,
        (rc::ACKNOWLEDGE, syndrome),
        "opcode and syndrome of the answer"
    );
    Ok(())
}

/// A new pair carries out a work request, which must end with this status.
pub fn ends(host: &mut Host, work: &Work, status: CompletionStatus) -> Outcome {
    Pair::new(host)?.ends(host, work, status)
}

/// A new pair sends from an entry, which must end with this status.
pub fn send_ends(host: &mut Host, sge: Sge, status: CompletionStatus) -> Outcome {
    let mut pair = Pair::new(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, 4 * PAGE)?;
    host.post_receive(&mut pair.b, &[sink.sge(0, 4 * PAGE as u32)])?;
    pair.ends(host, &Work::send(&[sge]), status)
}

/// A write of eight bytes of inline data.
pub fn write8(address: u64, rkey: u32) -> Work {
    Work::remote(SendOpcode::Write, &[], address, rkey).inline(&[0x5a; 8])
}

/// A read of eight bytes to a region.
pub fn read8(to: &Region, address: u64, rkey: u32) -> Work {
    Work::remote(SendOpcode::Read, &[to.sge(0, 8)], address, rkey)
}

/// A fetch and add to a region.
pub fn add8(to: &Region, address: u64, rkey: u32) -> Work {
    let part = AtomicPart {
        address,
        rkey,
        operand: 1,
        ..AtomicPart::zeroed()
    };
    Work::with_part(SendOpcode::FetchAdd, &part, &[to.sge(0, 8)])
}

/// A command that reserves a tag.
pub fn allocation(host: &mut Host, kind: TagKind) -> AllocateTag {
    AllocateTag {
        tag: host.fresh_tag(),
        pd: PD,
        kind: kind.number(),
        reserved: [0; 3],
        max_pages: match kind {
            TagKind::Region | TagKind::List => 4,
            TagKind::Window1 | TagKind::Window2B => 0,
        },
    }
}

/// Reserves a tag.
pub fn allocate(host: &mut Host, kind: TagKind) -> Outcome<u32> {
    let command = allocation(host, kind);
    host.execute(&command)?;
    Ok(command.tag)
}

/// A registration of a new page through a send queue.
pub fn fast_register(host: &mut Host, tag: u32, access: u32) -> (Work, Region) {
    let dma = host.memory.allocate(PAGE);
    let region = Region {
        tag,
        address: 0x6000_0000_0000 + dma,
        dma,
        length: PAGE,
    };
    let part = FastRegisterPart {
        tag,
        access,
        address: region.address,
        buffer: Buffer::contiguous(dma, PAGE),
        reserved: 0,
    };
    (
        Work::with_part(SendOpcode::FastRegister, &part, &[]),
        region,
    )
}

/// The same registration, and a send of these entries in one work request with it.
pub fn and_send(registration: Work, data: &[Sge]) -> Work {
    let mut work = registration;
    let list = work.header.opcode == SendOpcode::RegisterList.number();
    work.header.opcode = match list {
        true => SendOpcode::RegisterListSend.number(),
        false => SendOpcode::RegisterSend.number(),
    };
    work.part.extend(SendPart::zeroed().as_bytes());
    work.sges.extend(data);
    work
}

/// The first address of lists.
pub const LIST_ADDRESS: u64 = 0x4000_0000_0000;

/// A list to register.
#[derive(Clone, Debug)]
pub struct List {
    /// What it is to be; the number of pieces is filled in.
    pub part: ListPart,
    /// Its pieces.
    pub pieces: Vec<Sge>,
}

impl List {
    /// The work request that registers it.
    pub fn work(&self, opcode: SendOpcode) -> Work {
        let part = ListPart {
            pieces: self.pieces.len() as u8,
            ..self.part
        };
        Work::with_part(opcode, &part, &self.pieces)
    }

    /// What it looks like to its users; it has no memory of its own.
    pub fn region(&self) -> Region {
        Region {
            tag: self.part.tag,
            address: self.part.address,
            dma: 0,
            length: self
                .pieces
                .iter()
                .map(|piece| u64::from(piece.length))
                .sum(),
        }
    }
}

/// A bind of all of a region.
pub fn bind(window: u32, region: &Region, access: u32) -> BindPart {
    BindPart {
        window,
        new_window: window + 1,
        region: region.tag,
        access,
        address: region.address,
        length: region.length,
        reserved: [0; 2],
    }
}

/// The work request of a bind.
pub fn bind_work(part: &BindPart) -> Work {
    Work::with_part(SendOpcode::Bind, part, &[])
}

/// A datagram queue pair that can send, and what it sends to the neighbour.
pub fn datagrams(host: &mut Host, cq: &Cq) -> Outcome<(Qp, DatagramPart)> {
    let qp = host.create_qp(Service::Ud, cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Ud, &qp, QueuePairStateCode::Rts, &connection)?;
    let part = DatagramPart {
        address_vector: connection.address_vector,
        qpn: connection.qpn,
        qkey: QKEY,
        ..DatagramPart::zeroed()
    };
    Ok((qp, part))
}

/// A queue pair of a shared receive queue that is connected to a neighbour.
pub fn shared(host: &mut Host, cq: &Cq) -> Outcome<(Qp, Srq)> {
    let srq = host.create_srq()?;
    let mut command = host.qp_command(Service::Rc, cq);
    (command.flags, command.srqn) = (QP_FLAG_SRQ, srq.srqn);
    let qp = host.make_qp(&command)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    Ok((qp, srq))
}

/// A region whose pages come and go, and its table.
pub struct OnDemand {
    /// The region.
    pub region: Region,
    /// Its table, of one level.
    pub table: u64,
    /// Its pages.
    pub pages: u64,
}

impl OnDemand {
    /// Of some pages, none of which is present.
    pub fn new(host: &mut Host, access: u32, pages: u64) -> Outcome<Self> {
        let (table, dma) = (
            host.memory.allocate(PAGE),
            host.memory.allocate(pages * PAGE),
        );
        let command = RegisterRegion {
            tag: host.fresh_tag(),
            pd: PD,
            access,
            flags: REGION_ON_DEMAND,
            address: 0x5000_0000_0000,
            buffer: Buffer {
                root: table,
                length: pages * PAGE,
                order: 1,
                page_shift: ON_DEMAND_PAGE_SHIFT,
                ..Buffer::zeroed()
            },
        };
        host.execute(&command)?;
        let region = Region {
            tag: command.tag,
            address: command.address,
            dma,
            length: pages * PAGE,
        };
        Ok(Self {
            region,
            table,
            pages: dma,
        })
    }

    /// Makes a page present, or not.
    pub fn set(&self, host: &Host, page: u64, bits: u64) {
        let entry = if bits == 0 {
            0
        } else {
            (self.pages + page * PAGE) | bits
        };
        host.memory.store64(self.table + 8 * page, entry);
    }

    /// Takes a page back, and has the device forget it.
    pub fn take_back(&self, host: &mut Host, page: u64) -> Outcome {
        self.set(host, page, 0);
        host.execute(&InvalidatePages {
            tag: self.region.tag,
            reserved: 0,
            first: page,
            count: 1,
        })
    }
}

/// Takes the faults there are.
pub fn take_faults(host: &mut Host) -> Outcome<Vec<PageFault>> {
    let faults: PageFaults = host.query(CommandOpcode::TakeFaults, None)?;
    Ok(faults.faults[..(faults.count as usize).min(7)].to_vec())
}

/// Waits for a fault to be told of, and takes it.
pub fn one_fault(host: &mut Host) -> Outcome<PageFault> {
    host.event(EQ_ASYNC, EventCode::PageFaults, 0)?;
    let faults = take_faults(host)?;
    crate::ensure_eq!(faults.len(), 1, "the faults to take");
    Ok(faults[0])
}

/// Lets what waits for a fault go on.
pub fn resolve(host: &mut Host, fault: &PageFault, failed: bool) -> Outcome {
    host.execute(&ResolveFault {
        token: fault.token,
        failed: failed.into(),
        reserved: 0,
    })
}

/// A completion queue, and a queue pair that [`complete`] has it get completions by.
pub fn with_queue(host: &mut Host) -> Outcome<(Cq, Qp)> {
    let command = host.cq_command(6);
    with_queue_of(host, &command)
}

/// The same, of a completion queue by this command.
pub fn with_queue_of(host: &mut Host, command: &CreateCompletionQueue) -> Outcome<(Cq, Qp)> {
    host.execute(command)?;
    let cq = Cq::new(command);
    let qp = host.create_qp(Service::Rc, &cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    host.move_qp(qp.qpn, QueuePairStateCode::Error)?;
    Ok((cq, qp))
}

/// Has a completion written: that of a work request that is flushed at once.
pub fn complete(host: &mut Host, cq: &mut Cq, qp: &mut Qp) -> Outcome {
    host.post(qp, &Work::send(&[]))?;
    host.completion(cq)?;
    Ok(())
}

/// Has so many completions written, and leaves them.
pub fn complete_unread(host: &mut Host, cq: &Cq, qp: &mut Qp, count: u32) -> Outcome {
    for _ in 0..count {
        host.post(qp, &Work::send(&[]))?;
    }
    let last = cq.consumer + count - 1;
    crate::outcome::wait_for("the last of the completions", || {
        Ok(cq.at(&host.memory, last).map(drop))
    })
}

/// Sets entries of one row of the vector map: event queue and message, from processor `first` on.
pub fn map_command(row: SubFunction, first: u16, entries: &[(u16, u16)]) -> SetVectorMap {
    let mut command = SetVectorMap {
        sub_function: row.number(),
        first,
        count: entries.len() as u16,
        ..SetVectorMap::zeroed()
    };
    for (entry, &(eqn, message)) in command.entries.iter_mut().zip(entries) {
        *entry = VectorMapEntry { eqn, message };
    }
    command
}

/// The command that gives an event queue another ring, of `1 << log_entries` entries.
pub fn switch_command(host: &mut Host, eqn: u16, log_entries: u8) -> SwitchEventQueue {
    let length = (size_of::<EventEntry>() as u64) << log_entries;
    SwitchEventQueue {
        eqn,
        log_entries,
        ring: Buffer::contiguous(host.memory.allocate(length), length),
        ..SwitchEventQueue::zeroed()
    }
}

/// Gives an event queue other than 0 another ring, which is returned; the host goes on with the old
/// one.
pub fn switch(host: &mut Host, eqn: u16, log_entries: u8) -> Outcome<EventRing> {
    let command = switch_command(host, eqn, log_entries);
    host.execute(&command)?;
    let mut ring = host.queues[&eqn].clone();
    (ring.ring, ring.log_entries) = (command.ring.root, log_entries);
    Ok(ring)
}

/// A write of nothing, which succeeds on every reliable connection.
pub fn empty_write() -> Work {
    Work::remote(SendOpcode::Write, &[], 0, 0)
}

/// After `InvalidatePages` is done nothing is written through an older entry, however much is under
/// way.
pub fn no_access_after_invalidation(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    let mut pair = Pair::new(host)?;
    let work = write8(memory.region.address, memory.region.tag);
    for _ in 0..10 {
        host.post(&mut pair.a, &work.clone().flags(SEND_INLINE))?;
    }
    memory.take_back(host, 0)?;
    host.memory.fill(memory.pages, PAGE, 0);
    host.post(&mut pair.a, &work)?;
    host.untouched(memory.pages, PAGE)
}

/// Something is done in less than the longest moderation takes. One of some tries is enough: this
/// program may be held up, but what waits for its time is never early.
pub fn at_once(mut act: impl FnMut() -> Outcome) -> Outcome {
    let most = Duration::from_micros(u16::MAX.into()) / 2;
    let mut fastest = Duration::MAX;
    for _ in 0..20 {
        let start = Instant::now();
        act()?;
        fastest = fastest.min(start.elapsed());
        if fastest < most {
            return Ok(());
        }
    }
    crate::outcome::failed(format!("it was held back for {fastest:?}"))
}
