// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A guest and a wire that say whatever they like, by seed: nothing they do may stop the process,
//! keep it busy for ever, make it hold memory without bound, or disturb a peer's other
//! connections. A program of its own, since it counts all memory that is allocated.

#[allow(dead_code)] // The engine's other tests use the rest of it.
#[path = "engine/attack.rs"]
mod attack;
#[allow(dead_code)]
#[path = "engine/wire.rs"]
mod wire;

use attack::{clear_reserved, forge, seal, seeds, Random};
use ferrite_abi::*;
use ferrite_engine::misbehaviour::Reset;
use ferrite_engine::multicast::MULTICAST_QPN;
use ferrite_engine::roce::{BTH_LEN, ICRC_LEN, RETH_LEN};
use ferrite_engine::testing::{
    self, Node, Peer, QpOptions, SendWork, Unsteady, MEMORY_BASE, MEMORY_SIZE,
};
use ferrite_engine::{Config, HostMemory, Misbehaviour, Numbers};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes allocated now and at most, to see what a guest can make the process hold.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator with the arguments it came with; only
// counters are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `alloc` above, and so from the system's allocator, with
        // this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// More than two machines of a test and their queues ever need.
const MOST_MEMORY: usize = 160 << 20;
/// Commands in the ring.
const CONTROL_LOG_ENTRIES: u8 = 6;
/// One in so many work requests has a field that should be zero and is not. Each ends its queue
/// pair's work, and there is more to try.
const RARELY: u64 = 500;
/// Steps of a seed.
const STEPS: usize = 600;
/// Frames of one step beyond which the device works without end.
const MOST_FRAMES: usize = 20_000;

/// What is added to the small numbers of objects that are used here.
#[derive(Clone, Copy, Default)]
struct Numbering {
    qp: u32,
    cq: u32,
    srq: u32,
    tag: u32,
}

impl Numbering {
    fn qpn(self, number: u32) -> u32 {
        self.qp.wrapping_add(number)
    }

    fn cqn(self, number: u32) -> u32 {
        self.cq.wrapping_add(number)
    }

    fn srqn(self, number: u32) -> u32 {
        self.srq.wrapping_add(number)
    }

    fn tag(self, index: u32) -> u32 {
        self.tag.wrapping_add(index) << 8
    }

    /// Has the device use the last numbers that there are, as few as are used here.
    fn at_the_end(config: &mut Config) -> Self {
        let last = |end: u32, count: u32| Numbers {
            first: end - count,
            count,
        };
        config.qps = last(MULTICAST_QPN, QUEUE_PAIRS - 2);
        config.cqs = last(QUEUE_NUMBER_MASK + 1, 9);
        config.srqs = last(QUEUE_NUMBER_MASK + 1, 9);
        config.tags = last(QUEUE_NUMBER_MASK + 1, 8);
        Self {
            qp: config.qps.first - 2,
            cq: config.cqs.first,
            srq: config.srqs.first,
            tag: config.tags.first - 1,
        }
    }
}

/// How often what is rare came about.
#[derive(Default)]
struct Seen {
    /// Shared receive queues were moved.
    moves: u64,
    /// Completion queues were armed and given another handler, or none.
    bindings: u64,
    /// Slow resets came to their end.
    resets: u64,
    /// Raw packets came and went by the first that may, and came by the second.
    raw: [u64; 2],
}

/// Tags made for registrations by work request: two of lists, one of a region.
const LISTS: [u32; 3] = [5, 6, 7];

/// A machine whose driver has lost its mind.
struct Hostile {
    node: Node,
    random: Random,
    base: Numbering,
    /// Where the shared receive queues are: in one of two places each.
    moved: [bool; 2],
    resetting: bool,
    seen: Seen,
    control: u64,
    producer: u32,
    /// Completions consumed of queues 1 to 3.
    consumed: [u32; 3],
    /// The next command may be wrong in what all commands have in common.
    careless: bool,
    peer: Peer,
}

/// Where completion queue `cqn` of the first start lies: ring, then record.
fn completion_queue(cqn: u32) -> u64 {
    MEMORY_BASE + 0x30_0000 + u64::from(cqn) * 0x4000
}

/// Where queue pair `qpn` of the first start lies: send ring, receive ring, record.
fn queue_pair_at(qpn: u32) -> u64 {
    MEMORY_BASE + 0x40_0000 + u64::from(qpn % 16) * 0x4000
}

/// Event queues of completion queues.
const HANDLERS: [u16; 2] = [EQ_FIRST_HANDLER, EQ_FIRST_HANDLER + 1];

/// Queue pairs are from 2 to one less than this. The areas of the next two numbers are those of
/// shared receive queues 1 (ordinary) and 2 (extended).
const QUEUE_PAIRS: u32 = 14;
/// Queue pairs of raw packets: one that sends, and a work queue.
const RAW: [u32; 2] = [12, 13];
/// Where what raw packets are made of is, in the regions of all memory.
const FRAME_AT: u64 = 0x5_0000;

/// The service of queue pair `qpn`.
fn service_of(qpn: u32) -> Service {
    match qpn {
        6 | 7 => Service::Ud,
        8 => Service::Uc,
        9 => Service::XrcIni,
        10 => Service::XrcTgt,
        12 | 13 => Service::Raw,
        _ => Service::Rc,
    }
}

fn is_datagram(qpn: u32) -> bool {
    service_of(qpn) == Service::Ud
}

/// Whom queue pair `qpn` is connected to; 0 is the honest peer.
fn partner_of(qpn: u32) -> u32 {
    match qpn {
        2 => 0,
        9 => 10,
        10 => 9,
        _ => qpn,
    }
}

/// The multicast group: 239.1.2.3.
const GROUP: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];

const CQ_LOG_ENTRIES: u8 = 6;
const RECORD: u64 = 8192;

/// Where in its area a shared receive queue is before and after it was moved: ring and record.
fn shared_place(moved: bool) -> (u64, u64) {
    if moved {
        (12288, RECORD + 64)
    } else {
        (4096, RECORD)
    }
}

impl Hostile {
    fn new(seed: u64, peer: Peer) -> Self {
        let mut random = Random::new(seed);
        let mut base = Numbering::default();
        let node = Node::power_on_with(1, |config| {
            config.doorbell_log_stride = random.pick(&[12, 14, DOORBELL_MAX_LOG_STRIDE]);
            if random.one_in(2) {
                base = Numbering::at_the_end(config);
            }
        });
        let mut hostile = Self {
            node,
            random,
            base,
            moved: [false; 2],
            resetting: false,
            seen: Seen::default(),
            control: 0,
            producer: 0,
            consumed: [0; 3],
            careless: false,
            peer,
        };
        hostile.control = hostile
            .node
            .allocate((size_of::<CommandEntry>() as u64) << CONTROL_LOG_ENTRIES);
        hostile.boot();
        // Rings, records and tables change while the device reads them.
        let used = MEMORY_BASE..MEMORY_BASE + MEMORY_SIZE as u64;
        let unsteady = Unsteady::new(vec![used], 200, seed);
        hostile.node.host.unsteady.replace(Some(unsteady));
        hostile
    }

    fn boot(&mut self) {
        let base = self.base;
        let node = &mut self.node;
        let good = Misbehaviour::default();
        node.engine.misbehave(good, node.now, &mut node.host);
        let eq0 = MEMORY_BASE + MEMORY_SIZE as u64 - 0x8000;
        let boot = MEMORY_BASE + MEMORY_SIZE as u64 - 0x1000;
        let block = BootBlock {
            cqp_ring: self.control,
            eq0_ring: eq0,
            cqp_log_entries: CONTROL_LOG_ENTRIES,
            eq0_log_entries: 8,
            eq0_message: 0,
            reserved0: 0,
            reserved1: [0; 5],
        };
        node.host.memory.put(boot, &block);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        let features = node.read_register(REG_FEATURES, 8);
        let version = (u64::from(ABI_MAJOR) << 16) | u64::from(ABI_MINOR);
        node.write_register(REG_DRIVER_VERSION, 4, version);
        node.write_register(REG_DRIVER_FEATURES, 8, features);
        node.write_register(REG_BOOT, 8, boot);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
        self.producer = 0;
        for eqn in [EQ_ASYNC, HANDLERS[0], HANDLERS[1]] {
            self.command(&CreateEventQueue {
                eqn,
                message: eqn,
                log_entries: 5,
                overflow: 0,
                priority: 0,
                reserved: 0,
                ring: Buffer::contiguous(MEMORY_BASE + 0x20_0000 + u64::from(eqn) * 4096, 1024),
            });
        }
        let (gid, mac) = (self.node.gid, self.node.mac);
        self.command(&SetGid {
            gid,
            index: 0,
            vlan: VLAN_NONE,
            mac,
            port: 0,
            reserved: [0; 5],
        });
        self.consumed = [0; 3];
        for cqn in 1..4 {
            self.zero(completion_queue(cqn), 8192);
            self.command(&CreateCompletionQueue {
                cqn: base.cqn(cqn),
                eqn: EQ_FIRST_HANDLER,
                log_entries: CQ_LOG_ENTRIES,
                reserved0: 0,
                doorbell_page: 1,
                record_offset: 4096,
                buffer: Buffer::contiguous(MEMORY_BASE + 0x30_0000 + u64::from(cqn) * 0x4000, 8192),
                processor: 0,
                reserved1: [0; 3],
            });
        }
        self.moved = [false; 2];
        for srqn in [1, 2] {
            let create = self.shared_queue(srqn);
            self.command(&create);
        }
        for qpn in 2..QUEUE_PAIRS {
            let create = self.queue_pair(qpn);
            self.command(&create);
            // To the honest peer, and among themselves.
            self.connect(qpn, partner_of(qpn));
        }
        self.first_rules();
        for tag in 1..5 {
            self.command(&RegisterRegion {
                tag: base.tag(tag),
                pd: 1,
                // Some of them for as many messages as there are.
                access: match tag {
                    1 | 2 => ACCESS_ALL & !ACCESS_ZERO_BASED,
                    _ => ACCESS_ALL & !(ACCESS_ZERO_BASED | ACCESS_ONE_TOUCH),
                },
                flags: 0,
                address: 0,
                buffer: Buffer::contiguous(MEMORY_BASE, MEMORY_SIZE as u64),
            });
        }
        for (tag, kind) in [
            (LISTS[0], TagKind::List),
            (LISTS[1], TagKind::List),
            (LISTS[2], TagKind::Region),
        ] {
            self.command(&AllocateTag {
                tag: base.tag(tag),
                pd: 1,
                kind: kind.number(),
                reserved: [0; 3],
                max_pages: 4,
            });
        }
    }

    /// What is sent to all goes to the work queue, and what is sent to this machine to the other.
    fn first_rules(&mut self) {
        let raw = RAW.map(|qpn| self.base.qpn(qpn));
        let mut table = CreateReceiveTable {
            log_entries: 1,
            ..CreateReceiveTable::zeroed()
        };
        table.qpns[..2].fill(raw[1]);
        self.command(&table);
        for (flow, to, target) in [(0, [0xff; 6], 0), (1, self.node.mac, raw[0])] {
            let mut rule = CreateFlow {
                flow,
                target,
                ..CreateFlow::zeroed()
            };
            if flow == 0 {
                (rule.flags, rule.hash_types) = (FLOW_TO_TABLE, HASH_IPV4);
            }
            rule.value.as_bytes_mut()[..6].copy_from_slice(&to);
            rule.mask.as_bytes_mut()[..6].fill(0xff);
            self.command(&rule);
        }
    }

    fn shared_queue(&mut self, srqn: u32) -> CreateSrq {
        let at = queue_pair_at(QUEUE_PAIRS + srqn - 1);
        self.zero(at + RECORD, 64);
        let extended = srqn == 2;
        CreateSrq {
            srqn: self.base.srqn(srqn),
            pd: 1,
            log_entries: 5,
            log_stride: 6,
            flags: if extended { SRQ_FLAG_XRC } else { 0 },
            doorbell_page: 1,
            buffer: Buffer::contiguous(at, 0x4000),
            ring_offset: 4096,
            record_offset: RECORD as u32,
            xrcd: if extended { 7 } else { 0 },
            cqn: if extended { self.base.cqn(3) } else { 0 },
        }
    }

    fn queue_pair(&mut self, qpn: u32) -> CreateQueuePair {
        let shared = matches!(qpn, 7 | 11);
        let base = self.base;
        CreateQueuePair {
            qpn: base.qpn(qpn),
            pd: 1,
            send_cqn: base.cqn(1),
            receive_cqn: base.cqn(2),
            service: service_of(qpn).number(),
            transport: Transport::RoceV2.number(),
            flags: (self.random.below(16) as u16 & !QP_FLAG_SRQ)
                | self.random.pick(&[0, QP_FLAG_LISTS, QP_FLAG_LISTS])
                | self.random.pick(&[0, 0, 0, QP_FLAG_WINDOWS_ONLY])
                | if shared { QP_FLAG_SRQ } else { 0 }
                | if qpn == RAW[1] {
                    QP_FLAG_RECEIVE_ONLY
                } else {
                    0
                },
            sq_log_blocks: 6,
            rq_log_entries: 5,
            rq_log_stride: 6,
            port: 0,
            srqn: if shared { base.srqn(1) } else { 0 },
            doorbell_page: 1,
            buffer: Buffer::contiguous(queue_pair_at(qpn), 0x4000),
            sq_offset: 0,
            rq_offset: 4096,
            record_offset: RECORD as u32,
            xrcd: if service_of(qpn) == Service::XrcTgt {
                7
            } else {
                0
            },
            reserved: [0; 3],
        }
    }

    fn zero(&mut self, address: u64, length: u64) {
        for at in (0..length).step_by(8) {
            self.node.host.memory.put(address + at, &0u64);
        }
    }

    /// Takes completions off the queues, most of the time.
    fn consume(&mut self) {
        let raw = RAW.map(|qpn| self.base.qpn(qpn));
        for cqn in 1..4 {
            let at = completion_queue(cqn);
            let consumed = &mut self.consumed[cqn as usize - 1];
            for _ in 0..1 << CQ_LOG_ENTRIES {
                let slot = u64::from(*consumed & ((1 << CQ_LOG_ENTRIES) - 1));
                let entry: CompletionEntry = self.node.host.memory.get(at + slot * 64);
                if entry.phase & 1 != phase_of(*consumed, CQ_LOG_ENTRIES) {
                    break;
                }
                *consumed = consumed.wrapping_add(1);
                let is_good = entry.status == CompletionStatus::Success as u8;
                if let (true, Some(which)) = (is_good, raw.iter().position(|qpn| *qpn == entry.qpn))
                {
                    self.seen.raw[which] += 1;
                }
            }
            self.node.host.memory.put(at + 4096, consumed);
        }
    }

    /// Posts a command without waiting for anything.
    fn command<P: Command>(&mut self, payload: &P) {
        self.raw_command(P::OPCODE as u16, payload.as_bytes());
    }

    fn raw_command(&mut self, opcode: u16, payload: &[u8]) {
        let random = &mut self.random;
        let mut entry = CommandEntry::zeroed();
        entry.opcode = opcode;
        entry.cookie = random.next() as u32;
        let queries = [
            CommandOpcode::QueryDevice,
            CommandOpcode::QueryClock,
            CommandOpcode::QueryQueuePair,
            CommandOpcode::QuerySrq,
            CommandOpcode::QueryCounters,
            CommandOpcode::TakeFaults,
            CommandOpcode::QueryCompletionQueue,
            CommandOpcode::QueryTag,
            CommandOpcode::QueryQueuePairCounters,
        ];
        let careless = std::mem::take(&mut self.careless);
        let queries = queries.iter().any(|query| *query as u16 == opcode);
        if queries != (careless && random.one_in(30)) {
            entry.reply = random.address() & !63;
            entry.reply_length = random.pick(&[64, 128, 256, 4096, 1, u32::MAX]);
        }
        entry.request_length = payload.len() as u32;
        if random.one_in(8) {
            entry.flags = COMMAND_INDIRECT;
            entry.request = MEMORY_BASE + MEMORY_SIZE as u64 - 0x4000;
            let written = self.node.host.memory.write(entry.request, payload);
            written.expect("test memory");
        } else {
            entry.payload[..payload.len()].copy_from_slice(payload);
        }
        if careless && random.one_in(15) {
            match random.below(5) {
                0 => entry.flags = random.next() as u16,
                1 => entry.request_length = random.nasty() as u32,
                2 => entry.request = random.nasty(),
                3 => entry.reply_length = random.nasty() as u32,
                // A reserved field, or what is behind the structure.
                _ => entry.payload[random.below(224) as usize] ^= 1 << random.below(8),
            }
        }
        let slot = u64::from(self.producer & ((1 << CONTROL_LOG_ENTRIES) - 1));
        let at = self.control + slot * size_of::<CommandEntry>() as u64;
        self.node.host.memory.put(at, &entry);
        self.producer = self.producer.wrapping_add(1);
        let record = self.control + control_record_offset(CONTROL_LOG_ENTRIES);
        self.node.host.memory.put(record, &self.producer);
        self.node
            .doorbell(0, DOORBELL_CONTROL, u64::from(self.producer));
        // Event queue 0 is served, or the device would stop for want of room.
        let word = EventDoorbell {
            eqn: EQ_CONTROL,
            read_index: 1,
            relative: true,
            valid: true,
            arm: true,
            quiet: false,
            disarm: false,
        };
        self.node.doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
    }

    /// Brings a queue pair to RTS; to the honest peer with `to` 0.
    fn connect(&mut self, qpn: u32, to: u32) {
        let mut modify = ModifyQueuePair::zeroed();
        modify.qpn = self.base.qpn(qpn);
        modify.access = ACCESS_REMOTE;
        self.zero(queue_pair_at(qpn) + RECORD, 64);
        modify.log_mtu = self.random.pick(&[8, 10, 12]);
        modify.timeout = self.random.below(12) as u8;
        modify.retry_count = self.random.below(8) as u8;
        modify.rnr_retry = self.random.below(8) as u8;
        modify.min_rnr_timer = self.random.below(32) as u8;
        modify.ird = 16;
        modify.ord = 16;
        modify.address_vector.vlan = VLAN_NONE;
        if to == 0 {
            modify.log_mtu = self.peer.log_mtu;
            modify.address_vector.mac = self.peer.mac;
            modify.address_vector.gid = self.peer.gid;
            modify.destination_qpn = self.peer.qpn;
            modify.send_psn = self.peer.send_psn;
            modify.receive_psn = self.peer.receive_psn;
        } else {
            modify.address_vector.mac = self.node.mac;
            modify.address_vector.gid = self.node.gid;
            modify.destination_qpn = self.base.qpn(to);
        }
        // The attributes that the service has.
        let attributes = match service_of(qpn) {
            Service::Raw => 0,
            Service::Ud => MODIFY_PKEY | MODIFY_QKEY | MODIFY_SEND_PSN,
            Service::Uc => {
                MODIFY_PKEY
                    | MODIFY_ACCESS
                    | MODIFY_ADDRESS_VECTOR
                    | MODIFY_MTU
                    | MODIFY_DESTINATION
                    | MODIFY_RECEIVE_PSN
                    | MODIFY_SEND_PSN
            }
            _ => !MODIFY_QKEY,
        };
        for (state, mask) in [
            (QueuePairStateCode::Reset, 0),
            (
                QueuePairStateCode::Init,
                MODIFY_PKEY | MODIFY_ACCESS | MODIFY_QKEY,
            ),
            (
                QueuePairStateCode::Rtr,
                MODIFY_ADDRESS_VECTOR
                    | MODIFY_MTU
                    | MODIFY_DESTINATION
                    | MODIFY_RECEIVE_PSN
                    | MODIFY_IRD
                    | MODIFY_MIN_RNR_TIMER,
            ),
            (
                QueuePairStateCode::Rts,
                MODIFY_SEND_PSN | MODIFY_TIMEOUT | MODIFY_RETRY | MODIFY_RNR_RETRY | MODIFY_ORD,
            ),
        ] {
            modify.state = state.number();
            modify.mask = MODIFY_STATE | (mask & attributes);
            let modify = modify;
            self.command(&modify);
        }
    }

    /// A command that is almost right, or not at all.
    fn random_command(&mut self) {
        self.careless = true;
        let base = self.base;
        let random = &mut self.random;
        let number = random.number();
        match random.below(20) {
            16 | 17 => self.random_flow(),
            18 => self.random_table(),
            19 => {
                let opcode = random.pick(&[
                    CommandOpcode::DestroyFlow,
                    CommandOpcode::DestroyReceiveTable,
                ]);
                self.raw_command(opcode as u16, &u64::from(number).to_le_bytes());
            }
            0 => {
                let command = CreateEventQueue {
                    eqn: number as u16,
                    message: random.number() as u16,
                    log_entries: random.log(5),
                    overflow: random.pick(&[0, 0, 0, 0, 2, 9]),
                    priority: random.pick(&[0, 1, 1, 9]),
                    reserved: 0,
                    ring: random.buffer(),
                };
                self.command(&command);
            }
            1 => {
                let command = ModifyEventQueue {
                    eqn: number as u16,
                    message: random.number() as u16,
                    moderation_microseconds: random.nasty() as u16,
                    moderation_count: random.nasty() as u16,
                    overflow: random.pick(&[0, 0, 0, 0, 0, 0, 0, 1, 9]),
                    priority: random.pick(&[0, 1, 1, 9]),
                    reserved: [0; 6],
                };
                self.command(&command);
            }
            2 => {
                let command = CreateCompletionQueue {
                    cqn: base.cqn(number),
                    eqn: Self::random_handler(random),
                    log_entries: random.log(4),
                    reserved0: 0,
                    doorbell_page: random.number(),
                    record_offset: random.pick(&[1024, 4096, 64, u32::MAX]),
                    buffer: random.buffer(),
                    processor: 0,
                    reserved1: [0; 3],
                };
                self.command(&command);
            }
            3 => {
                let command = ModifyCompletionQueue {
                    cqn: base.cqn(number),
                    eqn: Self::random_handler(random),
                    moderation_count: random.nasty() as u16,
                    moderation_microseconds: random.nasty() as u16,
                    processor: random.pick(&[0, 0, 1, 512, u16::MAX]),
                    reserved: [0; 2],
                };
                self.command(&command);
            }
            4 => {
                let command = ResizeCompletionQueue {
                    cqn: base.cqn(number),
                    log_entries: random.log(7),
                    reserved: [0; 3],
                    record_offset: random.pick(&[8192, 4096, 0, u32::MAX]),
                    reserved1: 0,
                    buffer: random.buffer(),
                };
                self.command(&command);
            }
            5 => {
                let mut command = self.queue_pair(number);
                let random = &mut self.random;
                if random.one_in(4) {
                    command.service = random.below(12) as u8;
                    command.transport = random.below(3) as u8;
                    command.port = u8::from(random.one_in(4));
                    command.srqn = base.srqn(random.number());
                    command.xrcd = random.number();
                }
                command.sq_log_blocks = random.log(4);
                command.rq_log_entries = random.log(4);
                command.rq_log_stride = random.log(6);
                if random.one_in(4) {
                    command.buffer = random.buffer();
                    command.sq_offset = random.nasty() as u32;
                    command.record_offset = random.nasty() as u32 & !63;
                }
                self.command(&command);
            }
            6 => {
                let mut command = ModifyQueuePair::zeroed();
                for byte in command.as_bytes_mut() {
                    *byte = random.next() as u8;
                }
                if !random.one_in(20) {
                    clear_reserved(&mut command);
                    clear_reserved(&mut command.address_vector);
                }
                command.qpn = base.qpn(number);
                command.mask = random.nasty() as u32 | MODIFY_STATE;
                command.state = random.below(8) as u8;
                if random.one_in(2) {
                    command.mask = MODIFY_STATE;
                }
                self.command(&command);
            }
            7 => {
                let command = RegisterRegion {
                    tag: base.tag(number) | random.below(3) as u32,
                    pd: random.below(3) as u32,
                    access: random.below(256) as u32,
                    flags: random.below(5) as u32,
                    address: random.nasty(),
                    buffer: random.buffer(),
                };
                self.command(&command);
            }
            8 => {
                let command = AllocateTag {
                    tag: base.tag(number),
                    pd: 1,
                    kind: random.below(7) as u8,
                    reserved: [0; 3],
                    max_pages: match random.below(3) {
                        0 => 0,
                        1 => 1 + random.below(17) as u32,
                        _ => random.nasty() as u32,
                    },
                };
                self.command(&command);
            }
            9 => {
                let to = random.number();
                self.connect(number, to);
            }
            10 => {
                let opcode = random.pick(&[
                    CommandOpcode::DestroyEventQueue,
                    CommandOpcode::DestroyCompletionQueue,
                    CommandOpcode::DestroyQueuePair,
                    CommandOpcode::QueryQueuePair,
                    CommandOpcode::DestroySrq,
                    CommandOpcode::QuerySrq,
                    CommandOpcode::ReleaseTag,
                    CommandOpcode::QueryDevice,
                    CommandOpcode::QueryCounters,
                    CommandOpcode::QueryCompletionQueue,
                    CommandOpcode::QueryTag,
                    CommandOpcode::QueryQueuePairCounters,
                ]);
                if opcode == CommandOpcode::DestroyEventQueue && !random.one_in(20) {
                    return;
                }
                let number = match opcode {
                    CommandOpcode::ReleaseTag | CommandOpcode::QueryTag => base.tag(number),
                    CommandOpcode::DestroyCompletionQueue | CommandOpcode::QueryCompletionQueue => {
                        base.cqn(number)
                    }
                    CommandOpcode::QueryQueuePairCounters => {
                        let mut command = QueryQueuePairCounters::zeroed();
                        command.count = random.pick(&[1, 2, 54, 55, u32::MAX]);
                        for qpn in command.qpns.iter_mut().take(random.pick(&[1, 2, 54])) {
                            *qpn = base.qpn(random.number());
                        }
                        self.command(&command);
                        return;
                    }
                    CommandOpcode::DestroyQueuePair | CommandOpcode::QueryQueuePair => {
                        base.qpn(number)
                    }
                    CommandOpcode::DestroySrq | CommandOpcode::QuerySrq => base.srqn(number),
                    // The port; or nothing.
                    CommandOpcode::QueryCounters | CommandOpcode::QueryDevice => {
                        u32::from(random.one_in(8))
                    }
                    _ => number,
                };
                self.raw_command(opcode as u16, &u64::from(number).to_le_bytes());
            }
            11 => {
                let mut command = self.shared_queue(1 + number % 2);
                let random = &mut self.random;
                command.srqn = base.srqn(number);
                command.log_entries = random.log(5);
                command.log_stride = random.log(6);
                if random.one_in(4) {
                    command.flags = random.below(3) as u16;
                    command.buffer = random.buffer();
                    command.ring_offset = random.nasty() as u32 & !63;
                    command.cqn = base.cqn(random.number());
                }
                self.command(&command);
                let limit = ModifySrq {
                    srqn: base.srqn(self.random.number()),
                    limit: self.random.below(40) as u32,
                };
                self.command(&limit);
            }
            12 => {
                let member = MulticastMember {
                    gid: if random.one_in(4) { [0xff; 16] } else { GROUP },
                    qpn: base.qpn(number),
                    reserved: 0,
                };
                let opcode = random.pick(&[
                    CommandOpcode::AttachMulticast,
                    CommandOpcode::AttachMulticast,
                    CommandOpcode::DetachMulticast,
                ]);
                self.raw_command(opcode as u16, member.as_bytes());
            }
            13 => {
                let command = SwitchEventQueue {
                    eqn: random.pick(&[HANDLERS[0], HANDLERS[1], EQ_ASYNC, number as u16]),
                    log_entries: random.log(5),
                    ring: random.buffer(),
                    ..SwitchEventQueue::zeroed()
                };
                if command.eqn != EQ_CONTROL {
                    self.command(&command);
                }
            }
            14 => {
                let mut command = SetVectorMap {
                    sub_function: random.below(12) as u8,
                    first: random.pick(&[0, 0, 1, 511, u16::MAX]),
                    count: random.pick(&[1, 1, 2, 52, 0, u16::MAX]),
                    ..SetVectorMap::zeroed()
                };
                for entry in &mut command.entries[..usize::from(command.count).min(52)] {
                    entry.eqn = Self::random_handler(random);
                    entry.message = random.pick(&[MESSAGE_OF_QUEUE, 1, 7, u16::MAX - 1]);
                }
                self.command(&command);
            }
            _ => {
                // Some bytes, or all.
                let mut payload = [0; COMMAND_PAYLOAD];
                let all = random.one_in(4);
                for byte in &mut payload {
                    if all || random.one_in(20) {
                        *byte = random.next() as u8;
                    }
                }
                let length = random.below(COMMAND_PAYLOAD as u64 + 1) as usize;
                let opcode = random.below(44) as u16;
                self.raw_command(opcode, &payload[..length]);
            }
        }
    }

    /// A queue pair of raw packets mostly.
    fn random_raw(&mut self) -> u32 {
        let number = self.random.number();
        let qpn = self.random.pick(&[RAW[0], RAW[1], RAW[1], number]);
        self.base.qpn(qpn)
    }

    /// A rule for some of the frames that there are: those of the peer's and of this machine's own.
    fn random_flow(&mut self) {
        let target = self.random_raw();
        let (own, peer) = (self.node.mac, self.peer.mac);
        let random = &mut self.random;
        let mut command = CreateFlow {
            flow: random.number(),
            target,
            priority: random.below(4) as u16,
            ..CreateFlow::zeroed()
        };
        if random.one_in(3) {
            command.flags = FLOW_TO_TABLE;
            command.target = random.number();
            command.hash_types = random.below(128) as u16;
            command.key = [random.next() as u8; REDIRECTION_KEY_SIZE];
        }
        // Addresses stand first in the fields, as in a frame.
        let destination = random.pick(&[own, peer, [0xff; 6]]);
        let fields = [&mut command.value, &mut command.mask];
        for (fields, bytes) in fields.into_iter().zip([destination, [0xff; 6]]) {
            if !random.one_in(4) {
                fields.as_bytes_mut()[..6].copy_from_slice(&bytes);
            }
        }
        if random.one_in(3) {
            command.layers = random.next() as u8;
            let at = random.below(size_of::<FlowFields>() as u64) as usize;
            command.mask.as_bytes_mut()[at] = random.pick(&[0xff, 0xff, 1, 0xf0]);
            command.value.as_bytes_mut()[at] = random.next() as u8 & command.mask.as_bytes()[at];
        }
        self.command(&command);
    }

    fn random_table(&mut self) {
        let random = &mut self.random;
        let mut command = CreateReceiveTable {
            table: random.number(),
            log_entries: random.log(3),
            ..CreateReceiveTable::zeroed()
        };
        let entries = random.pick(&[8, 8, 8, 1, 32]);
        for at in 0..entries {
            command.qpns[at] = self.random_raw();
        }
        self.command(&command);
    }

    /// Something that can be sent as it is: to itself, to the peer, to all; as its own, or another's.
    fn random_frame(&mut self) {
        let (own, peer) = (self.node.mac, self.peer.mac);
        let random = &mut self.random;
        let mut frame = random.pick(&[own, peer, [0xff; 6]]).to_vec();
        frame.extend(random.pick(&[own, own, peer]));
        frame.extend(random.pick(&[[8, 0, 0x45, 0], [0x81, 0, 0, 7], [0x88, 0xb5, 0, 0]]));
        frame.resize(64, random.next() as u8);
        let written = self.node.host.memory.write(MEMORY_BASE + FRAME_AT, &frame);
        written.expect("test memory");
    }

    /// An event queue for a completion queue, or none.
    fn random_handler(random: &mut Random) -> u16 {
        if random.one_in(8) {
            return random.number() as u16;
        }
        random.pick(&[HANDLERS[0], HANDLERS[1], EQ_NONE, EQ_MAPPED])
    }

    /// Arms a completion queue for what was not seen, and says who is to be told.
    fn random_arming(&mut self) {
        let random = &mut self.random;
        let cqn = 1 + random.below(3) as u32;
        let arm = CompletionDoorbell {
            cqn: self.base.cqn(cqn),
            seen: self.consumed[cqn as usize - 1].wrapping_sub(random.below(3) as u32),
            sequence: random.below(4) as u8,
            solicited: random.one_in(2),
        };
        let modify = ModifyCompletionQueue {
            cqn: arm.cqn,
            eqn: Self::random_handler(random),
            moderation_count: random.pick(&[0, 0, 3]),
            moderation_microseconds: random.pick(&[0, 0, 50]),
            processor: 0,
            reserved: [0; 2],
        };
        self.node.doorbell(1, DOORBELL_COMPLETION, arm.encode());
        if self.random.one_in(2) {
            self.command(&modify);
            self.seen.bindings += 1;
        }
        if self.random.one_in(2) {
            // Somebody reads what is told.
            for eqn in HANDLERS {
                let word = EventDoorbell {
                    eqn,
                    read_index: 1,
                    relative: true,
                    valid: true,
                    arm: true,
                    quiet: false,
                    disarm: false,
                };
                self.node.doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
            }
        }
    }

    /// Gives a shared receive queue its other place, mostly.
    fn random_move(&mut self) {
        let random = &mut self.random;
        let which = random.below(2) as usize;
        let at = queue_pair_at(QUEUE_PAIRS + which as u32);
        let [old, new] = [self.moved[which], !self.moved[which]].map(shared_place);
        let producer: u32 = self.node.host.memory.get(at + old.1);
        self.node.host.memory.put(at + new.1, &producer);
        let mut command = ResizeSrq {
            srqn: self.base.srqn(1 + which as u32),
            log_entries: 5,
            reserved: [0; 3],
            ring_offset: new.0 as u32,
            record_offset: new.1 as u32,
            buffer: Buffer::contiguous(at, 0x4000),
        };
        if random.one_in(4) {
            match random.below(5) {
                0 => command.srqn = self.base.srqn(random.number()),
                1 => command.log_entries = random.nasty() as u8,
                2 => command.ring_offset = random.nasty() as u32,
                3 => command.record_offset = random.nasty() as u32 & !63,
                _ => command.buffer = random.buffer(),
            }
            self.command(&command);
            return;
        }
        let counts = |node: &Node| {
            let counters = node.engine.counters();
            counters.commands - counters.failed_commands
        };
        let before = counts(&self.node);
        self.command(&command);
        if counts(&self.node) > before {
            self.moved[which] = !self.moved[which];
            self.seen.moves += 1;
        }
    }

    /// A reset that takes its time, while all goes on.
    fn random_reset(&mut self) {
        let rules = Misbehaviour {
            reset: Reset::Slow,
            hold: 0.01 * (1 + self.random.below(100)) as f64,
            ..Misbehaviour::default()
        };
        let node = &mut self.node;
        node.engine.misbehave(rules, node.now, &mut node.host);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        self.resetting = true;
    }

    /// A scatter/gather entry that is right mostly.
    fn random_sge(random: &mut Random, base: Numbering) -> Sge {
        let right = !random.one_in(30);
        Sge {
            address: random.below(MEMORY_SIZE as u64 / 2),
            length: if right {
                random.pick(&[0, 1, 8, 100, 4096, 100_000])
            } else {
                random.nasty() as u32
            },
            lkey: if right && random.one_in(6) {
                base.tag(random.pick(&LISTS)) | random.below(2) as u32
            } else if right {
                base.tag(1 + random.below(4) as u32)
            } else {
                base.tag(random.number())
            },
        }
    }

    /// Loads and stores around device memory.
    fn random_device_memory(&mut self) {
        let random = &mut self.random;
        let config = self.node.engine.config();
        let edges = [
            config.device_memory_offset(),
            config.device_memory_offset() + config.device_memory_size(),
            config.doorbell_bar_size(),
        ];
        let offset = random
            .pick(&edges)
            .wrapping_add(random.below(32))
            .wrapping_sub(16);
        let size = random.below(10) as usize;
        let value = random.next();
        let node = &mut self.node;
        node.engine
            .mmio_write(BAR_DOORBELLS, offset, size, value, node.now, &mut node.host);
        node.engine.mmio_read(BAR_DOORBELLS, offset, size);
    }

    /// Work requests that are right mostly, straight into the ring.
    fn random_work(&mut self) {
        let numbers = self.base;
        self.random_frame();
        let random = &mut self.random;
        let qpn = 2 + random.below(u64::from(QUEUE_PAIRS) - 2) as u32;
        let datagram = is_datagram(qpn);
        let is_raw = service_of(qpn) == Service::Raw;
        let base = queue_pair_at(qpn);
        let (mac, gid) = (self.node.mac, self.node.gid);
        let mut producer: u32 = self.node.host.memory.get(base + RECORD);
        for _ in 0..1 + random.below(6) {
            let opcode = if datagram && !random.one_in(40) {
                1 + random.below(2) as u8
            } else if is_raw && !random.one_in(40) {
                SendOpcode::Send as u8
            } else {
                random.pick(&[
                    1, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 13, 15, 15, 28, 28, 28, 29, 29,
                ])
            };
            let parsed = SendOpcode::from_number(opcode).expect("an opcode");
            let atomic = matches!(
                parsed,
                SendOpcode::CompareSwap | SendOpcode::FetchAdd | SendOpcode::AtomicWrite
            );
            let local = (9..=13).contains(&opcode);
            let listed = matches!(
                parsed,
                SendOpcode::RegisterList | SendOpcode::RegisterListSend
            );
            let count = match (atomic, local) {
                (true, _) => 1,
                (_, true) => 0,
                _ if listed => 1 + random.below(5) as usize,
                _ => random.below(4) as usize,
            };
            let mut bytes = [0u8; MAX_BLOCKS * BLOCK_SIZE];
            let mut header = SendHeader {
                opcode,
                blocks: blocks_for(parsed, datagram, count * 16) as u8,
                sge_count: count as u8,
                flags: random.below(8) as u16,
                ..SendHeader::zeroed()
            };
            if (service_of(qpn) == Service::XrcIni) != random.one_in(RARELY) {
                header.srqn = numbers.srqn(random.pick(&[2, 2, 2, 2, 2, 2, 1, 9]));
            }
            if random.one_in(8) && matches!(opcode, 1..=5 | 15 | 29) {
                header.flags |= SEND_INLINE;
                header.sge_count = 0;
                header.inline_length = random.below(257) as u16;
                let length = usize::from(header.inline_length);
                header.blocks = blocks_for(parsed, datagram, length) as u8;
            }
            if random.one_in(40) {
                match random.below(7) {
                    4 => {
                        // More entries than a work request may have, in as many blocks as it may.
                        header.sge_count = 17 + random.below(2) as u8;
                        header.blocks = MAX_BLOCKS as u8;
                    }
                    0 => header.opcode = random.next() as u8,
                    1 => header.flags = random.next() as u16,
                    2 => header.blocks = random.next() as u8,
                    3 => header.reserved = random.next() as u8,
                    5 => header.reserved_channel = random.nasty() as u32,
                    _ => header.sge_count = random.next() as u8,
                }
            }
            bytes[..16].copy_from_slice(header.as_bytes());
            let remote = RemotePart {
                address: random.below(MEMORY_SIZE as u64 / 2) & !7,
                rkey: if random.one_in(30) {
                    random.nasty() as u32
                } else if qpn == 2 {
                    0x900
                } else if random.one_in(6) {
                    numbers.tag(random.pick(&LISTS)) | random.below(2) as u32
                } else {
                    numbers.tag(1)
                },
                immediate: match parsed {
                    SendOpcode::WriteImmediate => random.next() & 0xffff_ffff,
                    _ => 0,
                },
                ..RemotePart::zeroed()
            };
            bytes[16..48].copy_from_slice(remote.as_bytes());
            let part = opcode_part(parsed, datagram);
            if matches!(
                parsed,
                SendOpcode::Send
                    | SendOpcode::SendImmediate
                    | SendOpcode::SendInvalidate
                    | SendOpcode::LocalInvalidate
            ) {
                let immediate = match parsed {
                    SendOpcode::SendImmediate => random.next() & 0xffff_ffff,
                    _ => 0,
                };
                if datagram {
                    let multicast = random.one_in(3);
                    let mut part = DatagramPart::zeroed();
                    part.immediate = immediate;
                    part.address_vector.port = u8::from(random.one_in(RARELY));
                    part.address_vector.mac = if multicast {
                        [1, 0, 0x5e, 1, 2, 3]
                    } else {
                        mac
                    };
                    part.address_vector.gid = if multicast { GROUP } else { gid };
                    part.address_vector.vlan = VLAN_NONE;
                    part.address_vector.source_gid_index = u16::from(random.one_in(40));
                    part.qpn = if multicast {
                        0xff_ffff
                    } else {
                        numbers.qpn(random.number())
                    };
                    part.qkey = u32::from(random.one_in(10));
                    bytes[16..80].copy_from_slice(part.as_bytes());
                } else {
                    let invalidates = matches!(
                        parsed,
                        SendOpcode::SendInvalidate | SendOpcode::LocalInvalidate
                    );
                    let part = SendPart {
                        immediate,
                        tag: if invalidates && random.one_in(2) {
                            numbers.tag(random.pick(&LISTS)) | random.below(2) as u32
                        } else if invalidates {
                            numbers.tag(1 + random.below(4) as u32)
                        } else {
                            0
                        },
                        reserved: 0,
                    };
                    bytes[16..32].copy_from_slice(part.as_bytes());
                }
            }
            if parsed == SendOpcode::Flush {
                let flush = FlushPart {
                    address: remote.address,
                    rkey: remote.rkey,
                    length: random.nasty() as u32,
                    placement: random.pick(&[1, 1, 2, 3, 0, 17]),
                    selectivity: random.pick(&[0, 1, 2]),
                    reserved: 0,
                };
                bytes[16..48].copy_from_slice(flush.as_bytes());
            }
            if listed {
                let mut list = ListPart {
                    tag: numbers.tag(random.pick(&LISTS)) | random.below(2) as u32,
                    access: random.below(256) as u32 & !ACCESS_WINDOW_BIND,
                    address: random.pick(&[0, 0, 0, u64::MAX - 5000, 12]),
                    pieces: count as u8,
                    ..ListPart::zeroed()
                };
                if parsed == SendOpcode::RegisterListSend && random.one_in(2) {
                    list.pieces = 1;
                }
                if random.one_in(20) {
                    list.pieces = random.next() as u8;
                    list.access = random.nasty() as u32;
                }
                bytes[16..48].copy_from_slice(list.as_bytes());
            }
            if matches!(parsed, SendOpcode::FastRegister | SendOpcode::RegisterSend) {
                let register = FastRegisterPart {
                    tag: numbers.tag(random.pick(&LISTS)) | random.below(2) as u32,
                    access: random.below(256) as u32,
                    address: random.pick(&[0, 0, 0, u64::MAX - 5000, 12]),
                    buffer: random.buffer(),
                    reserved: 0,
                };
                bytes[16..64].copy_from_slice(register.as_bytes());
            }
            if matches!(
                parsed,
                SendOpcode::RegisterSend | SendOpcode::RegisterListSend
            ) {
                let there = numbers.tag(1 + random.below(4) as u32);
                let send = SendPart {
                    tag: random.pick(&[0, 0, there]),
                    ..SendPart::zeroed()
                };
                let at = 16 + part - size_of::<SendPart>();
                bytes[at..16 + part].copy_from_slice(send.as_bytes());
            }
            if parsed == SendOpcode::Bind {
                let window = numbers.tag(random.number());
                let bind = BindPart {
                    window: window | random.below(2) as u32,
                    new_window: window | random.below(2) as u32,
                    region: numbers.tag(random.number()),
                    access: random.below(128) as u32 & !ACCESS_LOCAL_WRITE,
                    address: random.nasty(),
                    length: random.nasty(),
                    reserved: [0; 2],
                };
                bytes[16..64].copy_from_slice(bind.as_bytes());
            }
            if random.one_in(RARELY) {
                // A reserved field, perhaps.
                bytes[16 + random.below(part as u64) as usize] ^= 1 << random.below(8);
            }
            for sge in bytes[16 + part..].chunks_exact_mut(16) {
                let mut entry = Self::random_sge(random, numbers);
                if atomic {
                    entry.length = 8;
                }
                if listed && !random.one_in(10) {
                    entry.length = entry.length.max(1);
                    entry.lkey = numbers.tag(3 + random.below(2) as u32);
                }
                sge.copy_from_slice(entry.as_bytes());
            }
            if let (true, Some(first)) = (is_raw, bytes[16 + part..].first_chunk_mut::<16>()) {
                let frame = Sge {
                    lkey: numbers.tag(3),
                    address: FRAME_AT,
                    length: 60 + random.below(2000) as u32,
                };
                if count > 0 && !random.one_in(8) {
                    first.copy_from_slice(frame.as_bytes());
                }
            }
            let blocks = u32::from(header.blocks.clamp(1, MAX_BLOCKS as u8));
            for n in 0..blocks {
                let slot = u64::from(producer.wrapping_add(n) & 63);
                let block = &bytes[n as usize * 64..][..64];
                for (at, word) in block.chunks_exact(8).enumerate() {
                    let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
                    let address = base + slot * 64 + at as u64 * 8;
                    self.node.host.memory.put(address, &word);
                }
            }
            producer = producer.wrapping_add(blocks);
        }
        if random.one_in(80) {
            producer = random.nasty() as u32;
        }
        self.node.host.memory.put(base + RECORD, &producer);
        self.node
            .doorbell(1, DOORBELL_SEND, send_doorbell(numbers.qpn(qpn), producer));
    }

    /// Receives, likewise.
    fn random_receives(&mut self) {
        let numbers = self.base;
        let random = &mut self.random;
        // The last two are the shared ones.
        let qpn = 2 + random.below(u64::from(QUEUE_PAIRS)) as u32;
        let base = queue_pair_at(qpn);
        let (ring, word) = if qpn < QUEUE_PAIRS {
            (4096, RECORD + 4)
        } else {
            shared_place(self.moved[(qpn - QUEUE_PAIRS) as usize])
        };
        let mut producer: u32 = self.node.host.memory.get(base + word);
        for _ in 0..random.below(12) {
            let at = base + ring + u64::from(producer & 31) * 64;
            let header = ReceiveHeader {
                sge_count: if random.one_in(40) {
                    random.nasty() as u32
                } else {
                    random.below(4) as u32
                },
                // Of shared queues alone.
                id: if (qpn < QUEUE_PAIRS) != random.one_in(RARELY) {
                    0
                } else {
                    random.nasty() as u32
                },
                reserved: [u32::from(random.one_in(RARELY)), 0],
            };
            self.node.host.memory.put(at, &header);
            for n in 0..3 {
                let mut sge = Self::random_sge(random, numbers);
                if RAW.contains(&qpn) && !random.one_in(8) {
                    // There is room for any frame.
                    sge = Sge {
                        lkey: numbers.tag(3),
                        address: 2 * FRAME_AT,
                        length: 10_000,
                    };
                }
                self.node.host.memory.put(at + 16 + n * 16, &sge);
            }
            producer = producer.wrapping_add(1);
        }
        self.node.host.memory.put(base + word, &producer);
        let doorbell = queue_doorbell(numbers.qpn(qpn));
        self.node.doorbell(1, DOORBELL_RECEIVE, doorbell);
    }

    fn random_doorbell(&mut self) {
        let base = self.base;
        let random = &mut self.random;
        let page = random.pick(&[0, 1, 1, 2, 1023]);
        let offset = random.pick(&[
            DOORBELL_SEND,
            DOORBELL_RECEIVE,
            DOORBELL_COMPLETION,
            DOORBELL_SRQ,
            DOORBELL_EVENT_QUEUE,
        ]);
        let word = match offset {
            DOORBELL_COMPLETION => CompletionDoorbell {
                cqn: base.cqn(random.number()),
                seen: random.nasty() as u32,
                sequence: random.below(4) as u8,
                solicited: random.one_in(2),
            }
            .encode(),
            DOORBELL_EVENT_QUEUE => EventDoorbell {
                eqn: random.number() as u16,
                read_index: random.nasty() as u32,
                relative: random.one_in(2),
                valid: random.one_in(2),
                arm: random.one_in(2),
                quiet: random.one_in(2),
                disarm: random.one_in(2),
            }
            .encode(),
            DOORBELL_SRQ => u64::from(base.srqn(random.number())),
            _ => u64::from(base.qpn(random.number())) | (random.nasty() << 32),
        };
        self.node.doorbell(page, offset, word);
    }

    /// Writes to memory that the device is using, behind its back.
    fn random_store(&mut self) {
        let random = &mut self.random;
        let area = random.pick(&[0x20_0000, 0x30_0000, 0x40_0000, 0]);
        let address = MEMORY_BASE + area + random.below(0x1_8000) / 8 * 8;
        let value = random.nasty();
        self.node.host.memory.put(address, &value);
    }

    /// Looks after the device: rounds of work, and a new start when it has stopped.
    fn rest(&mut self) {
        for _ in 0..4 {
            self.node.engine.poll(self.node.now, &mut self.node.host);
        }
        let step = if self.random.one_in(8) {
            self.random.below(2_000_000_000)
        } else {
            self.random.below(100_000)
        };
        self.node.now += step;
        self.node.engine.poll(self.node.now, &mut self.node.host);
        assert!(
            self.node.host.sent.len() < MOST_FRAMES,
            "the device does not stop sending"
        );
        self.node.host.raised.clear();
        if !self.random.one_in(20) {
            self.consume();
        }
        if !self.node.engine.is_running() {
            if std::mem::take(&mut self.resetting) {
                self.seen.resets += 1;
            }
            self.boot();
        }
    }
}

/// The honest machine: one queue pair toward the hostile one, two of its own connected together.
fn honest() -> Node {
    let mut node = Node::new(2);
    for qpn in [2, 3, 4] {
        node.create_qp(QpOptions {
            qpn,
            ..QpOptions::default()
        });
    }
    let three = node.as_peer(3);
    let four = node.as_peer(4);
    node.connect(3, &four);
    node.connect(4, &three);
    node
}

/// Returns commands, those of them that failed, and completions of the hostile machine; and how
/// often shared receive queues were moved, completion queues bound anew, slow resets done,
/// registrations by work request made, and raw packets completed by either queue pair.
fn run(seed: u64, steps: usize) -> [u64; 9] {
    let mut b = honest();
    let peer = Peer {
        receive_psn: 100,
        send_psn: 200,
        ..b.as_peer(2)
    };
    let mut a = Hostile::new(seed, peer);
    let toward_a = Peer {
        qpn: a.base.qpn(2),
        mac: a.node.mac,
        gid: a.node.gid,
        send_psn: 100,
        receive_psn: 200,
        ..peer
    };
    b.connect(2, &toward_a);
    let region = b.register(0x900, 1, ACCESS_LOCAL_WRITE | ACCESS_REMOTE, 64 << 10);
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for step in 0..steps {
        match a.random.below(33) {
            25 | 26 => a.random_arming(),
            27 | 28 => a.random_move(),
            29 if a.random.one_in(8) => a.random_reset(),
            24 => a.random_device_memory(),
            0 | 1 => a.random_command(),
            2..=8 => a.random_work(),
            9..=11 => a.random_receives(),
            12 => a.random_doorbell(),
            13 => a.random_store(),
            14 | 15 => {
                let qpn = 3 + a.random.below(u64::from(QUEUE_PAIRS) - 3) as u32;
                let partner = partner_of(qpn);
                a.connect(qpn, partner);
                if partner != qpn {
                    a.connect(partner, qpn);
                }
            }
            16..=18 => {
                if b.qp_state(2) == QueuePairStateCode::Rts {
                    let length = a.random.below(9000) as u32;
                    let opcode =
                        a.random
                            .pick(&[SendOpcode::Send, SendOpcode::Write, SendOpcode::Read]);
                    let sges = [region.sge(0, length)];
                    let mut work = SendWork::new(opcode, &sges);
                    if opcode != SendOpcode::Send {
                        work = work.remote(a.random.below(4096), a.base.tag(1));
                    }
                    b.post_recv(2, &[region.sge(0, 32 << 10)]);
                    b.post_send(2, &work);
                } else {
                    // The honest driver takes what was flushed and starts over.
                    b.set_state(2, QueuePairStateCode::Reset);
                    b.connect(2, &toward_a);
                    a.connect(2, 0);
                }
            }
            23 | 30..=32 => {
                // A frame that is for no queue pair but those of raw packets.
                a.random_frame();
                let length = 14 + a.random.below(1500);
                let mut frame = vec![0; length as usize];
                let read = a.node.host.memory.read(MEMORY_BASE + FRAME_AT, &mut frame);
                read.expect("test memory");
                a.node.receive(&frame);
            }
            19..=22 if !kept.is_empty() => {
                let at = a.random.below(kept.len() as u64) as usize;
                let frame = forge(&mut a.random, &kept[at]);
                a.node.receive(&frame);
                b.receive(&frame);
            }
            _ => {}
        }
        a.rest();
        b.now = a.node.now;
        for _ in 0..4 {
            b.engine.poll(b.now, &mut b.host);
        }
        while let Some(frame) = a.node.host.sent.pop_front() {
            if kept.len() < 64 || a.random.one_in(50) {
                let at = a.random.below(64) as usize;
                if at < kept.len() {
                    kept[at] = frame.clone();
                } else {
                    kept.push(frame.clone());
                }
            }
            b.receive(&frame);
        }
        while let Some(frame) = b.host.sent.pop_front() {
            a.node.receive(&frame);
        }
        // The honest driver goes on serving its queues.
        while b.poll_cq(1).is_some() {}
        for eqn in [EQ_ASYNC, EQ_FIRST_HANDLER] {
            b.events(eqn);
            b.ring_eq(eqn, true);
        }
        b.host.raised.clear();
        let held = HELD.load(Ordering::Relaxed);
        assert!(held < MOST_MEMORY, "{held} bytes after step {step}");
    }
    // What the neighbour did was its own affair.
    assert!(b.engine.is_running());
    b.post_recv(4, &[region.sge(0, 4096)]);
    b.post_send(3, &SendWork::new(SendOpcode::Send, &[region.sge(0, 4096)]));
    b.settle();
    let mut statuses = Vec::new();
    while let Some(entry) = b.poll_cq(1) {
        if entry.qpn != 2 {
            statuses.push((entry.qpn, entry.status));
        }
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [(3, 0), (4, 0)]);
    let counters = a.node.engine.counters();
    [
        counters.commands,
        counters.failed_commands,
        counters.completions,
        a.seen.moves,
        a.seen.bindings,
        a.seen.resets,
        counters.sq_registrations,
        a.seen.raw[0],
        a.seen.raw[1],
    ]
}

#[test]
fn a_hostile_guest_harms_nobody_else() {
    let (mut runs, mut all) = (0, [0; 9]);
    for seed in seeds(&[1, 2, 3, 5, 8, 13, 21, 34], 8) {
        for (sum, count) in all.iter_mut().zip(run(seed, STEPS)) {
            *sum += count;
        }
        runs += 1;
    }
    // What is refused at once tries little.
    let [commands, failed, completions, moves, bindings, resets, registrations, raw, raw_received] =
        all;
    println!(
        "{runs} seeds of {STEPS} steps, {} of engines",
        testing::steps()
    );
    println!("{commands} commands, {failed} failed, {completions} completions");
    println!("{moves} moves, {bindings} bindings, {resets} resets, {registrations} registrations");
    println!("{raw} raw packets, {raw_received} received by the work queue");
    if runs > 4 {
        assert!(raw > 4 * runs && raw_received > runs);
        assert!(failed > runs && failed * 4 < commands);
        assert!(completions > 200 * runs);
        assert!(moves > 2 * runs && bindings > 8 * runs && resets > runs);
        assert!(registrations > runs);
    }
    println!("{} bytes at most", PEAK.load(Ordering::Relaxed));
}

#[test]
fn more_entries_than_there_may_be_are_refused() {
    use crate::wire::{statuses, Pair, Setup, ALL, PD, QPN_A, QPN_B};
    for count in [17, 18] {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 4096);
        pair.a.post_send(
            QPN_A,
            &SendWork::new(SendOpcode::Send, &vec![from.sge(0, 1); count]),
        );
        pair.run();
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::LocalQueuePairOperation]
        );
    }
    for count in [17, 31] {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 4096);
        let to = pair.b.register(0x201, PD, ALL, 4096);
        pair.b.post_recv(QPN_B, &vec![to.sge(0, 1); count]);
        pair.a
            .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[from.sge(0, 20)]));
        pair.run();
        assert_eq!(
            statuses(&pair.completions_b()),
            [CompletionStatus::LocalQueuePairOperation]
        );
    }
}

#[test]
fn a_write_is_as_long_as_it_said() {
    use crate::wire::{statuses, Pair, Setup, Way, ALL, PD, QPN_A};
    // In one packet, and in three.
    for length in [100u32, 3000] {
        for said in [
            0,
            1,
            length - 1,
            length + 1,
            length + 1024,
            1 << 20,
            u32::MAX,
        ] {
            let mut pair = Pair::new(Setup::default());
            let from = pair.a.register(0x101, PD, ALL, 8192);
            let to = pair.b.register(0x201, PD, ALL, 2 << 20);
            let work = SendWork::new(SendOpcode::Write, &[from.sge(0, length)]);
            pair.a.post_send(QPN_A, &work.remote(to.address, to.tag));
            let mut first = true;
            pair.run_with(|way, mut frame| {
                if way == Way::AToB && std::mem::take(&mut first) {
                    let at = 14 + 20 + 8 + BTH_LEN + RETH_LEN - 4;
                    frame[at..at + 4].copy_from_slice(&said.to_be_bytes());
                    assert!(frame.len() >= at + 4 + ICRC_LEN);
                    seal(&mut frame);
                }
                vec![frame]
            });
            assert_eq!(
                statuses(&pair.completions_a()),
                [CompletionStatus::RemoteInvalidRequest],
                "{length} bytes that said they were {said}"
            );
        }
    }
}
