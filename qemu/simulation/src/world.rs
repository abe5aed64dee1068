// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Carries a plan out, and looks at everything.

use crate::atomics::{is_linearizable, Atomic, Operation, MOST};
use crate::plan::{Connection, End, Kind, Plan, Step, COUNTERS, MAX_LENGTH};
use crate::Random;
use ferrite_abi::*;
use ferrite_engine::testing::{
    Access, Node, Peer, QpOptions, Region, SendWork, CQP_LOG_ENTRIES, MEMORY_BASE, MEMORY_SIZE,
};
use ferrite_engine::HostMemory;
use ferrite_fabric::fault::Faults;
use ferrite_fabric::switch::{Mac, Output, PortId, Side, Switch};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

type Result<T> = std::result::Result<T, Failure>;

fn failed<T>(text: impl Into<String>) -> Result<T> {
    Err(Failure(text.into()))
}

/// How often things came about, so that a test can tell whether it tests anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Work requests that were posted.
    pub posted: u64,
    /// Those that were successful.
    pub successes: u64,
    /// Those that ended with an error, flushed ones too.
    pub errors: u64,
    /// Messages that were received.
    pub received: u64,
    /// Atomics that were looked at.
    pub atomics: u64,
    /// Frames that arrived somewhere.
    pub frames: u64,
    /// Frames that faults or cuts have kept from that.
    pub lost: u64,
    /// Frames that came twice.
    pub duplicated: u64,
    /// Frames that were overtaken.
    pub reordered: u64,
    /// Frames with a flipped bit.
    pub corrupted: u64,
    /// Frames that cuts have kept from arriving.
    pub cut: u64,
    /// Packets that were sent again.
    pub retransmissions: u64,
    /// Receivers that were not ready.
    pub not_ready: u64,
    /// Devices that went.
    pub stops: u64,
    /// Connections that were made anew.
    pub reconnections: u64,
    /// Connections given up because the peer did not answer.
    pub given_up: u64,
    /// Writes that were refused.
    pub refused: u64,
    /// Accesses to memory that were looked at.
    pub accesses: u64,
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        for (sum, part) in [
            (&mut self.posted, other.posted),
            (&mut self.successes, other.successes),
            (&mut self.errors, other.errors),
            (&mut self.received, other.received),
            (&mut self.atomics, other.atomics),
            (&mut self.frames, other.frames),
            (&mut self.lost, other.lost),
            (&mut self.duplicated, other.duplicated),
            (&mut self.reordered, other.reordered),
            (&mut self.corrupted, other.corrupted),
            (&mut self.cut, other.cut),
            (&mut self.retransmissions, other.retransmissions),
            (&mut self.not_ready, other.not_ready),
            (&mut self.stops, other.stops),
            (&mut self.reconnections, other.reconnections),
            (&mut self.given_up, other.given_up),
            (&mut self.refused, other.refused),
            (&mut self.accesses, other.accesses),
        ] {
            *sum += part;
        }
    }
}

const PD: u32 = 1;
const QKEY: u32 = 0x1234;
const CQN: u32 = 2;
const CQ_LOG_ENTRIES: u8 = 11;
/// Shared receive queues of every device: for reliable connections, and for extended ones.
const SRQ: u32 = 1;
const SRQ_EXTENDED: u32 = 2;
const XRCD: u32 = 7;
const SRQ_LOG_ENTRIES: u8 = 6;
/// Memory of a device that work requests use.
const REGION: u64 = 3 << 19;
/// Bytes between two places of it that nobody may touch.
const GAP: u64 = 24;
/// In front of the data of a datagram.
const GRH: u32 = 40;
/// Bytes of a receive: more than any message and its header.
const RECEIVE: u32 = MAX_LENGTH + GRH + 8;
/// Work requests of a queue pair that are not complete, and receives.
const MOST_POSTED: usize = 24;
const MOST_RECEIVES: usize = 32;
/// Starts of a device, as many as its memory has room for.
const MOST_STARTS: u32 = 8;
/// Rounds in which frames are exchanged at one moment, beyond which they go round in circles.
const MOST_ROUNDS: u32 = 20_000;
/// Nanoseconds within which all ends once the network is well: much more than all retries take.
const REST: u64 = 120_000_000_000;
/// Moments of that time at which something happens.
const MOST_MOMENTS: u32 = 200_000;

/// A piece of the memory of a device: offset in its region, and bytes.
#[derive(Clone, Copy, Debug)]
struct Slot {
    device: usize,
    offset: u64,
    length: u32,
}

/// A work request that was posted.
#[derive(Clone, Debug)]
struct Posted {
    /// Its first block.
    index: u32,
    number: usize,
}

/// What is to become of a work request.
#[derive(Clone, Debug)]
struct Work {
    end: End,
    what: What,
    /// The data that travel.
    data: Vec<u8>,
    immediate: Option<u32>,
    /// Consumes a receive: it is the n-th of its connection, since that was made, that does.
    ordinal: Option<usize>,
    state: Ended,
    /// How often it was received.
    received: u32,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Send,
    Write(Slot),
    Read(Slot),
    Atomic { slot: Slot, word: usize, of: usize },
    BadKey,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Open,
    Success,
    /// It failed, or its device went: nobody knows what it did.
    Unknown,
}

/// One end of a connection, as its consumer sees it.
#[derive(Debug, Default)]
struct EndState {
    qpn: u32,
    /// The queue pair exists since this start of its device.
    start: Option<u32>,
    connected: bool,
    /// The start of the peer's device that it is connected to.
    peer_start: u32,
    failed: bool,
    /// It has asked for what the peer refuses, which ends the connection.
    asked_wrong: bool,
    posted: VecDeque<Posted>,
    receives: VecDeque<(u32, Slot)>,
    /// Work requests since the connection was made that consume receives of the peer.
    consuming: Vec<usize>,
    /// How many of the peer's were received.
    received: usize,
    /// The last message received, of those that may be lost.
    last: Option<usize>,
    /// The last atomic, as an index in those of its word.
    last_atomic: HashMap<usize, usize>,
    send_psn: u32,
    /// What the network had done to frames when the connection was made.
    disturbed: u64,
}

#[derive(Debug)]
struct Device {
    node: Node,
    port: Option<PortId>,
    on: bool,
    start: u32,
    region: Region,
    register: RegisterRegion,
    /// The tables of the region.
    tables: Range<u64>,
    /// Where the next slot is.
    next: u64,
    /// What is to be in the region.
    model: Vec<u8>,
    ends: HashMap<u32, End>,
    shared: HashMap<(u32, u32), Slot>,
}

impl Device {
    fn new(number: usize, random: &mut Random) -> Self {
        let mut node = Node::power_on(number as u8 + 1);
        let start = node.allocate(0);
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE;
        let (register, region) = node.region(Tag::new(5, 1).0, PD, access, REGION);
        let tables = start + region.pages.len() as u64 * 4096..node.allocate(0);
        // A hole before anything else.
        node.allocate(4096);
        let mut model = vec![0; REGION as usize];
        let words = u64::from(COUNTERS) * 8;
        for word in model[..words as usize].chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes());
        }
        node.fill(&region, 0, &model[..words as usize]);
        Self {
            node,
            port: None,
            on: false,
            start: 0,
            region,
            register,
            tables,
            next: words + GAP,
            model,
            ends: HashMap::new(),
            shared: HashMap::new(),
        }
    }

    /// Brings the device up, with everything but queue pairs.
    fn boot(&mut self) {
        self.start += 1;
        self.on = true;
        let node = &mut self.node;
        node.boot();
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        node.set_address();
        node.create_cq(CQN, EQ_FIRST_HANDLER, CQ_LOG_ENTRIES);
        node.create_srq(SRQ, SRQ_LOG_ENTRIES, None);
        node.create_srq(SRQ_EXTENDED, SRQ_LOG_ENTRIES, Some((XRCD, CQN)));
        // Nobody who knew the old key has a right.
        let tag = Tag::new(5, self.start as u8).0;
        self.register.tag = tag;
        self.region.tag = tag;
        node.execute(&self.register);
        node.ring_eq(EQ_CONTROL, true);
    }

    fn contents(&self, slot: &Slot, length: usize) -> Vec<u8> {
        self.node.contents(&self.region, slot.offset, length)
    }

    fn word(&self, word: usize) -> u64 {
        let bytes = self.node.contents(&self.region, word as u64 * 8, 8);
        u64::from_le_bytes(bytes.try_into().unwrap_or_default())
    }

    /// What the device may write, and what it may only read: queues and records, and tables.
    fn queues(&self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let node = &self.node;
        if !self.on {
            return (Vec::new(), Vec::new());
        }
        let sized = |start: u64, length: usize| start..start + length as u64;
        let control = node.control_record();
        let completions = node.completion_ring(CQN);
        let mut written = vec![
            sized(control, size_of::<ControlRecord>()),
            sized(node.reply(), 4096),
            completions.start..completions.end + size_of::<CompletionRecord>() as u64,
            node.srq_buffer(SRQ),
            node.srq_buffer(SRQ_EXTENDED),
        ];
        written.extend([EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER].map(|eqn| node.event_ring(eqn)));
        written.extend(self.ends.keys().map(|&qpn| node.qp_buffer(qpn)));
        let read = vec![
            control - control_record_offset(CQP_LOG_ENTRIES)..control,
            self.tables.clone(),
        ];
        (written, read)
    }

    /// Whether an access is to bytes of the region.
    fn is_data(&self, address: u64, length: u64) -> bool {
        // Pages are in order, the last first.
        let pages = &self.region.pages;
        let (Some(&first), Some(&last)) = (pages.first(), pages.last()) else {
            return false;
        };
        if !self.on || address < last || address + length > first + 4096 {
            return false;
        }
        let page = address & !4095;
        let index = (first - page) / 4096;
        let position = index * 4096 + (address - page);
        (address + length - 1) & !4095 == page && position >= 64 && position + length <= 64 + REGION
    }

    /// Looks at what the device did to its machine's memory since the last time.
    fn check_accesses(&mut self, number: usize) -> Result<u64> {
        let accesses = self.node.host.accesses.borrow_mut().replace(Vec::new());
        let accesses = accesses.unwrap_or_default();
        if accesses.is_empty() {
            return Ok(0);
        }
        let (written, read) = self.queues();
        let within = |ranges: &[Range<u64>], at: u64, length: u64| {
            ranges
                .iter()
                .any(|range| range.start <= at && at + length <= range.end)
        };
        for access in &accesses {
            let (at, length, writes) = match *access {
                Access::Read(at, length) => (at, length as u64, false),
                Access::Write(at, length) => (at, length as u64, true),
                Access::Load(at) => (at, 4, false),
                Access::Store(at, _) => (at, 4, true),
                Access::Exchange(at) => (at, 8, true),
                Access::Fence => continue,
            };
            let may = length == 0
                || within(&written, at, length)
                || self.is_data(at, length)
                || !writes && within(&read, at, length);
            if !may {
                return failed(format!(
                    "device {number} touched memory that it was not given: {access:x?}"
                ));
            }
        }
        Ok(accesses.len() as u64)
    }
}

/// Frames that leave the switch.
#[derive(Default)]
struct Leaving(VecDeque<(PortId, Vec<u8>)>);

impl Output for Leaving {
    fn send(&mut self, port: PortId, frame: &[u8]) -> bool {
        self.0.push_back((port, frame.to_vec()));
        true
    }

    fn capture(&mut self, _frame: &[u8]) {}
}

/// A word that atomics work on.
#[derive(Debug)]
struct Word {
    first: u64,
    operations: Vec<Operation>,
}

/// Changes frames on their way as no network would, to see whether that is found out.
pub type Sabotage<'a> = &'a mut dyn FnMut(&mut Vec<u8>);

struct World<'a> {
    plan: &'a Plan,
    random: Random,
    now: u64,
    /// Counts what happens, where virtual time does not pass.
    clock: u64,
    switch: Switch,
    leaving: Leaving,
    devices: Vec<Device>,
    ends: BTreeMap<End, EndState>,
    works: Vec<Work>,
    words: BTreeMap<(usize, usize), Word>,
    /// Places of which nobody knows what they hold.
    free: Vec<Slot>,
    /// Frames may come twice, or in another order.
    ever_duplicated: bool,
    ever_reordered: bool,
    /// The network is well, and everything has to succeed.
    well: bool,
    seen: Seen,
    sabotage: Option<Sabotage<'a>>,
}

/// Carries a plan out. `sabotage`, if there is any, sees each frame that arrives.
pub fn run<'a>(
    plan: &'a Plan,
    sabotage: Option<Sabotage<'a>>,
) -> std::result::Result<Seen, Failure> {
    let result = catch_unwind(AssertUnwindSafe(|| -> Result<Seen> {
        let mut world = World::new(plan, sabotage);
        world.run()?;
        Ok(world.seen)
    }));
    result.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        failed(format!("panic: {}", text.unwrap_or_default()))
    })
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan, sabotage: Option<Sabotage<'a>>) -> Self {
        let mut random = Random::new(plan.seed.wrapping_add(1));
        let devices = (0..usize::from(plan.devices))
            .map(|number| Device::new(number, &mut random))
            .collect();
        Self {
            plan,
            random,
            now: 1_000_000,
            clock: 0,
            switch: Switch::new(plan.seed, Faults::default()),
            leaving: Leaving::default(),
            devices,
            ends: BTreeMap::new(),
            works: Vec::new(),
            words: BTreeMap::new(),
            free: Vec::new(),
            ever_duplicated: false,
            ever_reordered: false,
            well: false,
            seen: Seen::default(),
            sabotage,
        }
    }

    fn run(&mut self) -> Result<()> {
        for number in 0..self.devices.len() {
            self.start(number);
        }
        let used: Vec<usize> = (0..self.plan.connections.len())
            .filter(|&index| self.plan.uses(index))
            .collect();
        for &index in &used {
            self.connect(index)?;
        }
        for step in &self.plan.steps {
            self.step(step)?;
            self.exchange()?;
        }
        // All is well from now on.
        self.switch.set_faults(Faults::default());
        self.switch.heal(None, None);
        for number in 0..self.devices.len() {
            self.start(number);
        }
        self.rest()?;
        self.check_ended()?;
        // What has failed is connected anew, and everything goes through.
        for &index in &used {
            if self.is_broken(index) {
                self.connect(index)?;
            }
        }
        self.well = true;
        let before = self.works.len();
        for &index in &used {
            for side in 0..2 {
                self.last_words(End {
                    connection: index,
                    side,
                })?;
            }
        }
        self.rest()?;
        self.check_ended()?;
        self.check_last_words(before)?;
        self.check_memory()?;
        self.check_atomics()
    }

    fn connection(&self, end: End) -> Connection {
        self.plan.connections[end.connection]
    }

    fn device_of(&self, end: End) -> usize {
        usize::from(self.connection(end).devices[end.side])
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match *step {
            Step::Send {
                end,
                length,
                immediate,
            } => self.post(end, Wish::Send(length, immediate)),
            Step::Write {
                end,
                length,
                immediate,
            } => self.post(end, Wish::Write(length, immediate)),
            Step::Read { end, length } => self.post(end, Wish::Read(length)),
            Step::FetchAdd {
                end,
                counter,
                operand,
            } => self.post(end, Wish::FetchAdd(counter, operand)),
            Step::CompareSwap {
                end,
                counter,
                operand,
            } => self.post(end, Wish::CompareSwap(counter, operand)),
            Step::BadKey { end } => self.post(end, Wish::BadKey),
            Step::Receive { end, count } => (0..count).for_each(|_| {
                self.receive(end);
            }),
            Step::Network(faults) => {
                self.ever_duplicated |= faults.duplicate > 0.0;
                self.ever_reordered |= faults.reorder > 0.0;
                self.switch.set_faults(faults);
            }
            Step::Cut(a, b) => {
                let [a, b] = [a, b].map(|device| Side::Mac(self.mac(device.into()).to_string()));
                self.switch.partition(a, Some(b));
            }
            Step::Heal => self.switch.heal(None, None),
            Step::Stop(device) => self.stop(device.into()),
            Step::Start(device) => self.start(device.into()),
            Step::Reconnect(connection) => self.connect(connection)?,
            Step::Wait(microseconds) => {
                return self.run_until(self.now + u64::from(microseconds) * 1000)
            }
        }
        Ok(())
    }

    fn mac(&self, device: usize) -> Mac {
        Mac(self.devices[device].node.mac)
    }

    /// Brings a device up that is not.
    fn start(&mut self, number: usize) {
        let mac = self.mac(number);
        let device = &mut self.devices[number];
        if device.on || device.start >= MOST_STARTS {
            return;
        }
        device.node.now = self.now;
        // What it does to come up is looked at by other tests.
        device.node.host.accesses.replace(None);
        device.boot();
        device.node.host.accesses.replace(Some(Vec::new()));
        let port = self.switch.attach();
        self.switch.claim(port, mac, false);
        self.devices[number].port = Some(port);
    }

    /// A device goes.
    fn stop(&mut self, number: usize) {
        if !self.devices[number].on || self.devices[number].start + 1 >= MOST_STARTS {
            return;
        }
        self.seen.stops += 1;
        let device = &mut self.devices[number];
        device.on = false;
        let node = &mut device.node;
        if self.random.one_in(2) {
            node.engine.inject_fatal(&mut node.host);
        }
        node.engine.function_reset();
        node.host.sent.clear();
        node.host.raised.clear();
        // Anything it does from now on is wrong.
        node.host.accesses.replace(Some(Vec::new()));
        self.free
            .extend(device.shared.drain().map(|(_, slot)| slot));
        device.ends.clear();
        if let Some(port) = device.port.take() {
            self.count_port(port);
            self.switch.detach(port, self.now);
        }
        let gone: Vec<End> = self
            .ends
            .keys()
            .copied()
            .filter(|&end| self.device_of(end) == number)
            .collect();
        for end in gone {
            self.forget(end);
            let state = self.ends.entry(end).or_default();
            state.start = None;
            state.connected = false;
        }
    }

    /// What was under way at an end is not any more, and nobody is told.
    fn forget(&mut self, end: End) {
        let state = self.ends.entry(end).or_default();
        for posted in state.posted.drain(..) {
            self.works[posted.number].state = Ended::Unknown;
        }
        self.free
            .extend(state.receives.drain(..).map(|(_, slot)| slot));
    }

    fn count_port(&mut self, port: PortId) {
        for report in self.switch.report() {
            if report.port == port {
                self.seen.lost += report.faults.lost;
                self.seen.duplicated += report.faults.duplicated;
                self.seen.reordered += report.faults.reordered;
                self.seen.corrupted += report.faults.corrupted;
                self.seen.cut += report.counters.partition_drops;
            }
        }
    }

    /// What the network has done to frames of these devices that may keep them from arriving.
    fn disturbances(&self, devices: [u8; 2]) -> u64 {
        let ports = devices.map(|device| self.devices[usize::from(device)].port);
        self.switch
            .report()
            .iter()
            .filter(|report| ports.contains(&Some(report.port)))
            .map(|report| {
                let faults = &report.faults;
                faults.lost
                    + faults.corrupted
                    + faults.reordered
                    + faults.overflowed
                    + report.counters.partition_drops
                    + report.counters.queue_drops
            })
            .sum()
    }

    /// Whether a connection has to be made anew.
    fn is_broken(&self, index: usize) -> bool {
        (0..2).any(|side| {
            let end = End {
                connection: index,
                side,
            };
            let peer = self.device_of(end.peer());
            match self.ends.get(&end) {
                Some(state) => {
                    !state.connected || state.failed || state.peer_start != self.devices[peer].start
                }
                None => true,
            }
        })
    }

    /// Connects both ends, anew if they were.
    fn connect(&mut self, index: usize) -> Result<()> {
        let connection = self.plan.connections[index];
        let ends = [0, 1].map(|side| End {
            connection: index,
            side,
        });
        if ends
            .iter()
            .any(|&end| !self.devices[self.device_of(end)].on)
        {
            return Ok(());
        }
        self.collect()?;
        let disturbed = self.disturbances(connection.devices);
        let again = self.ends.contains_key(&ends[0]);
        self.seen.reconnections += u64::from(again);
        for end in ends {
            self.collect()?;
            let number = self.device_of(end);
            let peer_start = self.devices[self.device_of(end.peer())].start;
            // Anywhere, or near the end of the circle; then beyond all that may still be on its way.
            let ahead = match (again, self.random.one_in(2)) {
                (true, _) => 0x1000 + self.random.below(0x1000) as u32,
                (false, true) => 0xff_ff00 + self.random.below(0x100) as u32,
                (false, false) => self.random.next() as u32,
            };
            let device = &mut self.devices[number];
            device.node.now = self.now;
            let state = self.ends.entry(end).or_default();
            if state.start == Some(device.start) {
                let qpn = state.qpn;
                let reset = device.node.set_state(qpn, QueuePairStateCode::Reset);
                if reset != CommandStatus::Ok {
                    return failed(format!("{end} cannot be reset: {reset:?}"));
                }
                self.drop_completions(number, qpn)?;
            } else {
                state.qpn = 0x10 + device.start * 0x100 + (index * 2 + end.side) as u32;
                device.node.host.accesses.replace(None);
                device.node.create_qp(options(&connection, end, state.qpn));
                device.node.host.accesses.replace(Some(Vec::new()));
                device.ends.insert(state.qpn, end);
            }
            self.forget(end);
            let state = self.ends.entry(end).or_default();
            *state = EndState {
                qpn: state.qpn,
                start: Some(self.devices[number].start),
                connected: true,
                peer_start,
                send_psn: state.send_psn.wrapping_add(ahead) & 0xff_ffff,
                disturbed,
                ..EndState::default()
            };
            self.devices[number].node.ring_eq(EQ_CONTROL, true);
        }
        for end in ends {
            let (own, other) = (&self.ends[&end], &self.ends[&end.peer()]);
            let peer = Peer {
                send_psn: own.send_psn,
                receive_psn: other.send_psn,
                log_mtu: connection.log_mtu,
                timeout: connection.timeout,
                retry_count: connection.retry_count,
                rnr_retry: 7,
                min_rnr_timer: connection.min_rnr_timer,
                depth: connection.depth,
                ..self.devices[self.device_of(end.peer())]
                    .node
                    .as_peer(other.qpn)
            };
            let qpn = own.qpn;
            let number = self.device_of(end);
            let node = &mut self.devices[number].node;
            match connection.kind {
                Kind::Rc | Kind::Xrc => node.connect(qpn, &peer),
                Kind::Uc => node.connect_unreliable(qpn, &peer),
                Kind::Ud => node.start_datagrams(qpn, QKEY),
            }
            node.ring_eq(EQ_CONTROL, true);
        }
        self.collect()
    }

    /// Takes the completions of a device; those of a queue pair that was reset tell of nothing.
    fn drop_completions(&mut self, number: usize, qpn: u32) -> Result<()> {
        while let Some(entry) = self.devices[number].node.poll_cq(CQN) {
            if entry.qpn != qpn {
                self.complete(number, &entry)?;
            } else if entry.flags & COMPLETION_SRQ != 0 {
                let shared = &mut self.devices[number].shared;
                self.free.extend(shared.remove(&(entry.srqn, entry.index)));
            }
        }
        Ok(())
    }

    /// A place in the memory of a device, with bytes that are not zero in and around it.
    fn slot(&mut self, device: usize, length: u32) -> Option<Slot> {
        let filling = self.random.bytes(length as usize + GAP as usize);
        let of = &mut self.devices[device];
        let offset = of.next;
        let end = offset + filling.len() as u64;
        if end > REGION - 4096 {
            return None;
        }
        of.next = end.next_multiple_of(8);
        of.node.fill(&of.region, offset, &filling);
        of.model[offset as usize..end as usize].copy_from_slice(&filling);
        Some(Slot {
            device,
            offset,
            length,
        })
    }

    /// The place holds these from now on.
    fn expect(&mut self, slot: &Slot, data: &[u8]) {
        let at = slot.offset as usize;
        self.devices[slot.device].model[at..at + data.len()].copy_from_slice(data);
    }

    /// A place that holds these bytes.
    fn source(&mut self, device: usize, data: &[u8]) -> Option<Slot> {
        let slot = self.slot(device, data.len() as u32)?;
        let of = &mut self.devices[device];
        of.node.fill(&of.region, slot.offset, data);
        self.expect(&slot, data);
        Some(slot)
    }

    /// Posts a receive, if there is a queue for it.
    fn receive(&mut self, end: End) -> bool {
        let connection = self.connection(end);
        let number = self.device_of(end);
        let srqn = match connection.kind {
            Kind::Xrc if end.side == 0 => return false,
            Kind::Xrc => Some(SRQ_EXTENDED),
            _ if connection.shared => Some(SRQ),
            _ => None,
        };
        let usable = self.ends.get(&end).is_some_and(|state| {
            state.connected && state.start.is_some() && state.receives.len() < MOST_RECEIVES
        });
        if !usable {
            return false;
        }
        if let Some(srqn) = srqn {
            // Those that were taken and are not complete count, though they have left the ring.
            if self.waiting(number, srqn) >= 1 << SRQ_LOG_ENTRIES {
                return false;
            }
        }
        let Some(slot) = self.slot(number, RECEIVE) else {
            return false;
        };
        let device = &mut self.devices[number];
        device.node.now = self.now;
        let sge = device.region.sge(slot.offset, RECEIVE);
        match srqn {
            Some(srqn) => {
                let name = device.node.post_srq(srqn, &[sge]);
                device.shared.insert((srqn, name), slot);
            }
            None => {
                let qpn = self.ends[&end].qpn;
                let index = device.node.post_recv(qpn, &[sge]);
                if let Some(state) = self.ends.get_mut(&end) {
                    state.receives.push_back((index, slot));
                }
            }
        }
        true
    }

    /// Posts a work request, if that can be.
    fn post(&mut self, end: End, wish: Wish) {
        let connection = self.connection(end);
        let number = self.device_of(end);
        let peer = self.device_of(end.peer());
        let usable = self.ends.get(&end).is_some_and(|state| {
            state.connected && state.start.is_some() && state.posted.len() < MOST_POSTED
        });
        if !usable || !self.devices[number].on {
            return;
        }
        let reliable = connection.kind.is_reliable();
        let name = self.works.len() as u32;
        let length = match wish {
            Wish::Send(length, _) | Wish::Write(length, _) | Wish::Read(length) => length,
            Wish::FetchAdd(..) | Wish::CompareSwap(..) => 8,
            Wish::BadKey => 16,
        };
        let length = match connection.kind {
            Kind::Ud => length.min(1 << connection.log_mtu),
            _ => length,
        };
        let data = self.random.bytes(length as usize);
        let key = self.devices[peer].region.tag;
        let base = self.devices[peer].region.address;
        let mut immediate = None;
        let mut consumes = false;
        let (what, work) = match wish {
            Wish::Send(_, with) => {
                let Some(from) = self.source(number, &data) else {
                    return;
                };
                consumes = true;
                immediate = (with || !reliable).then_some(name);
                let opcode = match immediate {
                    Some(_) => SendOpcode::SendImmediate,
                    None => SendOpcode::Send,
                };
                let sge = self.devices[number].region.sge(from.offset, length);
                let mut work = SendWork::new(opcode, &[sge]).immediate(immediate.unwrap_or(0));
                if connection.kind == Kind::Ud {
                    let qpn = self.ends.get(&end.peer()).map_or(0, |state| state.qpn);
                    let part = self.devices[peer].node.as_peer(qpn).datagram(QKEY);
                    work = work.datagram(&part);
                }
                (What::Send, work)
            }
            Wish::Write(_, with) => {
                let (Some(from), Some(to)) = (self.source(number, &data), self.slot(peer, length))
                else {
                    return;
                };
                consumes = with;
                immediate = with.then_some(name);
                let opcode = match immediate {
                    Some(_) => SendOpcode::WriteImmediate,
                    None => SendOpcode::Write,
                };
                let sge = self.devices[number].region.sge(from.offset, length);
                let work = SendWork::new(opcode, &[sge])
                    .remote(base + to.offset, key)
                    .immediate(immediate.unwrap_or(0));
                (What::Write(to), work)
            }
            Wish::Read(_) => {
                let (Some(from), Some(to)) = (self.source(peer, &data), self.slot(number, length))
                else {
                    return;
                };
                let sge = self.devices[number].region.sge(to.offset, length);
                let work = SendWork::new(SendOpcode::Read, &[sge]).remote(base + from.offset, key);
                (What::Read(to), work)
            }
            Wish::FetchAdd(counter, operand) | Wish::CompareSwap(counter, operand) => {
                let word = usize::from(counter % COUNTERS);
                let current = self.devices[peer].word(word);
                let state = self.words.entry((peer, word)).or_insert(Word {
                    first: current,
                    operations: Vec::new(),
                });
                if state.operations.len() >= MOST {
                    return;
                }
                let Some(slot) = self.slot(number, 8) else {
                    return;
                };
                let swaps = matches!(wish, Wish::CompareSwap(..));
                let (opcode, atomic) = if swaps {
                    (
                        SendOpcode::CompareSwap,
                        Atomic::CompareSwap(current, operand),
                    )
                } else {
                    (SendOpcode::FetchAdd, Atomic::FetchAdd(operand))
                };
                let operations = &mut self.words.get_mut(&(peer, word)).expect("made").operations;
                let of = operations.len();
                let own = self.ends.get_mut(&end).expect("looked at");
                operations.push(Operation {
                    atomic,
                    posted: self.clock,
                    done: None,
                    after: own.last_atomic.insert(word, of),
                });
                self.clock += 1;
                let part = AtomicPart {
                    address: base + word as u64 * 8,
                    rkey: key,
                    operand,
                    compare: if swaps { current } else { 0 },
                    ..AtomicPart::zeroed()
                };
                let sge = self.devices[number].region.sge(slot.offset, 8);
                self.seen.atomics += 1;
                (
                    What::Atomic { slot, word, of },
                    SendWork::new(opcode, &[sge]).part(&part),
                )
            }
            Wish::BadKey => {
                let Some(from) = self.source(number, &data) else {
                    return;
                };
                let sge = self.devices[number].region.sge(from.offset, length);
                let work = SendWork::new(SendOpcode::Write, &[sge]).remote(base, key ^ 0x55);
                (What::BadKey, work)
            }
        };
        let work = match connection.kind {
            Kind::Xrc => work.srqn(SRQ_EXTENDED),
            _ => work,
        };
        let device = &mut self.devices[number];
        device.node.now = self.now;
        let own = self.ends.get_mut(&end).expect("looked at");
        let index = device.node.post_send(own.qpn, &work);
        let number = self.works.len();
        own.posted.push_back(Posted { index, number });
        own.asked_wrong |= matches!(wish, Wish::BadKey);
        let ordinal = consumes.then_some(own.consuming.len());
        own.consuming.extend(consumes.then_some(number));
        self.works.push(Work {
            end,
            what,
            data,
            immediate,
            ordinal,
            state: Ended::Open,
            received: 0,
        });
        self.seen.posted += 1;
    }

    /// One of everything, when the network is well.
    fn last_words(&mut self, end: End) -> Result<()> {
        let connection = self.connection(end);
        if connection.kind == Kind::Xrc && end.side == 1 {
            return Ok(());
        }
        let before = self.works.len();
        if connection.kind != Kind::Ud {
            self.post(end, Wish::Write(700, false));
        }
        if connection.kind.is_reliable() {
            self.post(end, Wish::Read(1500));
            let operand = self.random.next();
            self.post(end, Wish::FetchAdd(0, operand));
        }
        self.receive(end.peer());
        self.post(end, Wish::Send(200, true));
        if self.works.len() == before {
            return failed(format!("{end} takes no work request"));
        }
        Ok(())
    }

    /// Over a network that is well messages arrive that may be lost.
    fn check_last_words(&self, from: usize) -> Result<()> {
        for work in &self.works[from..] {
            if work.ordinal.is_some() && work.received == 0 {
                return failed(format!("{}: a message is lost for no reason", work.end));
            }
        }
        Ok(())
    }

    /// Everything that moves without time passing.
    fn exchange(&mut self) -> Result<()> {
        for _ in 0..MOST_ROUNDS {
            let mut moved = false;
            for device in self.devices.iter_mut().filter(|device| device.on) {
                device.node.now = self.now;
                device.node.settle();
                let Some(port) = device.port else { continue };
                while let Some(frame) = device.node.host.sent.pop_front() {
                    moved = true;
                    self.switch
                        .receive(port, &frame, self.now, &mut self.leaving);
                }
            }
            if self.switch.next_timeout().is_some_and(|at| at <= self.now) {
                moved = true;
                self.switch.poll(self.now, &mut self.leaving);
            }
            while let Some((port, mut frame)) = self.leaving.0.pop_front() {
                moved = true;
                let to = self
                    .devices
                    .iter_mut()
                    .find(|device| device.port == Some(port));
                if let Some(device) = to {
                    self.seen.frames += 1;
                    if let Some(sabotage) = &mut self.sabotage {
                        (*sabotage)(&mut frame);
                    }
                    device.node.receive(&frame);
                }
            }
            self.collect()?;
            if !moved {
                return Ok(());
            }
        }
        failed("frames go round and round without time passing")
    }

    /// The next moment at which something happens.
    fn next_moment(&self) -> Option<u64> {
        let devices = self.devices.iter().filter(|device| device.on);
        devices
            .filter_map(|device| device.node.engine.next_timeout())
            .chain(self.switch.next_timeout())
            .min()
    }

    fn run_until(&mut self, end: u64) -> Result<()> {
        loop {
            self.exchange()?;
            if self.now >= end {
                return Ok(());
            }
            let next = self.next_moment().unwrap_or(end);
            self.now = next.max(self.now + 1).min(end);
        }
    }

    /// Posts receives for what cannot go on without.
    fn top_up(&mut self) {
        let ends: Vec<End> = self.ends.keys().copied().collect();
        for end in ends {
            let connection = self.connection(end);
            let state = &self.ends[&end];
            let open = self.ends[&end.peer()]
                .posted
                .iter()
                .filter(|posted| self.works[posted.number].ordinal.is_some())
                .count();
            let srqn = match connection.kind {
                Kind::Xrc => Some(SRQ_EXTENDED),
                _ => connection.shared.then_some(SRQ),
            };
            let waiting = match srqn {
                Some(srqn) => self.waiting(self.device_of(end), srqn),
                None => state.receives.len(),
            };
            if connection.kind.is_reliable() {
                for _ in waiting..open {
                    self.receive(end);
                }
            }
        }
    }

    /// Receives in a shared queue of a device.
    fn waiting(&self, device: usize, srqn: u32) -> usize {
        let shared = self.devices[device].shared.keys();
        shared.filter(|(queue, _)| *queue == srqn).count()
    }

    /// Everything that is to happen, until nothing is left to wait for.
    fn rest(&mut self) -> Result<()> {
        let deadline = self.now + REST;
        for _ in 0..MOST_MOMENTS {
            self.top_up();
            self.exchange()?;
            match self.next_moment() {
                None => return Ok(()),
                Some(at) if at > deadline => break,
                Some(at) => self.now = at.max(self.now + 1),
            }
        }
        failed(format!(
            "something is waited for without end; open work requests: {:?}",
            self.open()
        ))
    }

    fn open(&self) -> Vec<String> {
        let mut open = Vec::new();
        for (end, state) in &self.ends {
            for posted in &state.posted {
                let work = &self.works[posted.number];
                open.push(format!(
                    "{end}: {:?} of {} bytes",
                    work.what,
                    work.data.len()
                ));
            }
        }
        open
    }

    /// Takes completions and events of all devices, and looks at what they did to memory.
    fn collect(&mut self) -> Result<()> {
        for number in 0..self.devices.len() {
            self.seen.accesses += self.devices[number].check_accesses(number)?;
            if !self.devices[number].on {
                continue;
            }
            while let Some(entry) = self.devices[number].node.poll_cq(CQN) {
                self.complete(number, &entry)?;
            }
            let node = &mut self.devices[number].node;
            if !node.engine.is_running() {
                return failed(format!(
                    "device {number} stopped by itself: {:?}",
                    node.status()
                ));
            }
            node.host.raised.clear();
            for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
                if !node.events(eqn).is_empty() {
                    node.ring_eq(eqn, true);
                }
            }
            // Its registers and doorbells are not memory of the machine.
            self.seen.accesses += self.devices[number].check_accesses(number)?;
        }
        Ok(())
    }

    fn complete(&mut self, number: usize, entry: &CompletionEntry) -> Result<()> {
        let Some(&end) = self.devices[number].ends.get(&entry.qpn) else {
            return failed(format!("a completion of nobody: {entry:?}"));
        };
        let Some(status) = CompletionStatus::from_number(entry.status) else {
            return failed(format!("a completion without a status: {entry:?}"));
        };
        if entry.flags & COMPLETION_RECEIVE != 0 {
            self.complete_receive(number, end, entry, status)
        } else {
            self.complete_send(number, end, entry, status)
        }
    }

    fn complete_send(
        &mut self,
        number: usize,
        end: End,
        entry: &CompletionEntry,
        status: CompletionStatus,
    ) -> Result<()> {
        let state = self.ends.get_mut(&end).expect("it has a queue pair");
        let Some(posted) = state.posted.pop_front() else {
            return failed(format!("{end}: a completion of what was not posted"));
        };
        if posted.index != entry.index {
            return failed(format!(
                "{end}: work request {} completes before {}",
                entry.index, posted.index
            ));
        }
        self.clock += 1;
        if status != CompletionStatus::Success {
            self.seen.errors += 1;
            self.works[posted.number].state = Ended::Unknown;
            return self.check_error(end, posted.number, status);
        }
        if state.failed {
            return failed(format!("{end}: a success after an error"));
        }
        self.seen.successes += 1;
        let work = &mut self.works[posted.number];
        work.state = Ended::Success;
        let (what, data) = (work.what, work.data.clone());
        let reliable = self.connection(end).kind.is_reliable();
        match what {
            What::Send => {}
            What::Write(slot) if reliable => {
                if self.devices[slot.device].contents(&slot, data.len()) != data {
                    return failed(format!(
                        "{end}: a write is complete and its data are not there"
                    ));
                }
                self.expect(&slot, &data);
            }
            What::Write(_) => {}
            What::Read(slot) => {
                if entry.byte_count as usize != data.len() {
                    return failed(format!("{end}: a read of {} bytes: {entry:?}", data.len()));
                }
                if self.devices[number].contents(&slot, data.len()) != data {
                    return failed(format!("{end}: a read has brought other data"));
                }
                self.expect(&slot, &data);
            }
            What::Atomic { slot, word, of } => {
                let found = self.devices[number].contents(&slot, 8);
                self.expect(&slot, &found);
                let found = u64::from_le_bytes(found.try_into().unwrap_or_default());
                let peer = self.device_of(end.peer());
                let word = self.words.get_mut(&(peer, word)).expect("posted");
                word.operations[of].done = Some((self.clock, found));
            }
            What::BadKey => return failed(format!("{end}: a write by a wrong key succeeded")),
        }
        Ok(())
    }

    /// Whether what happened explains an error.
    fn check_error(&mut self, end: End, number: usize, status: CompletionStatus) -> Result<()> {
        let connection = self.connection(end);
        let peer = self.device_of(end.peer());
        let (own, other) = (&self.ends[&end], self.ends.get(&end.peer()));
        let is_bad = matches!(self.works[number].what, What::BadKey);
        let asked_wrong = own.asked_wrong || other.is_some_and(|other| other.asked_wrong);
        let peer_gone = own.peer_start != self.devices[peer].start
            || other.is_none_or(|other| !other.connected || other.failed)
            || !self.devices[peer].on;
        let disturbed = self
            .disturbances(connection.devices)
            .saturating_sub(own.disturbed);
        let explained = match status {
            CompletionStatus::Flushed => own.failed || other.is_some_and(|other| other.asked_wrong),
            _ if own.failed => false,
            CompletionStatus::RetryExceeded => {
                peer_gone || asked_wrong || disturbed >= connection.retry_count.into()
            }
            CompletionStatus::RemoteAccess => is_bad,
            _ => false,
        };
        if !explained || self.well || !connection.kind.is_reliable() {
            return failed(format!(
                "{end}: {status:?} for no reason (peer gone: {peer_gone}, {disturbed} frames lost \
                 or late)"
            ));
        }
        self.seen.given_up += u64::from(status == CompletionStatus::RetryExceeded);
        self.seen.refused += u64::from(status == CompletionStatus::RemoteAccess);
        self.ends.get_mut(&end).expect("it has a queue pair").failed = true;
        Ok(())
    }

    fn complete_receive(
        &mut self,
        number: usize,
        end: End,
        entry: &CompletionEntry,
        status: CompletionStatus,
    ) -> Result<()> {
        let connection = self.connection(end);
        let state = self.ends.get_mut(&end).expect("it has a queue pair");
        let slot = if entry.flags & COMPLETION_SRQ != 0 {
            let slot = self.devices[number]
                .shared
                .remove(&(entry.srqn, entry.index));
            match slot {
                Some(slot) => slot,
                None => return failed(format!("{end}: a shared receive completes twice")),
            }
        } else {
            match state.receives.pop_front() {
                Some((index, slot)) if index == entry.index => slot,
                _ => return failed(format!("{end}: a receive out of turn: {entry:?}")),
            }
        };
        match status {
            CompletionStatus::Success => {}
            CompletionStatus::Flushed => {
                let other_asked = self
                    .ends
                    .get(&end.peer())
                    .is_some_and(|other| other.asked_wrong);
                let state = self.ends.get_mut(&end).expect("it has a queue pair");
                // One of a shared queue may be given back when its connection is made anew.
                if !state.failed && !other_asked && entry.flags & COMPLETION_SRQ == 0 {
                    return failed(format!("{end}: a receive is flushed for no reason"));
                }
                state.failed |= other_asked;
                self.free.push(slot);
                return Ok(());
            }
            _ => return failed(format!("{end}: a receive fails: {status:?}")),
        }
        self.seen.received += 1;
        let immediate = (entry.flags & COMPLETION_IMMEDIATE != 0).then_some(entry.immediate as u32);
        let index = if connection.kind.is_reliable() {
            let received = state.received;
            state.received += 1;
            match self.ends[&end.peer()].consuming.get(received) {
                Some(&index) => index,
                None => return failed(format!("{end}: more is received than was sent")),
            }
        } else {
            match immediate {
                Some(name) => name as usize,
                None => return failed(format!("{end}: immediate data are lost")),
            }
        };
        let in_order = !self.ever_duplicated && !self.ever_reordered;
        let Some(work) = self
            .works
            .get_mut(index)
            .filter(|work| work.end == end.peer())
        else {
            return failed(format!("{end}: received what was sent to others"));
        };
        work.received += 1;
        if work.received > 1 && (connection.kind.is_reliable() || !self.ever_duplicated) {
            return failed(format!("{end}: received twice: {:?}", work.what));
        }
        let state = self.ends.get_mut(&end).expect("it has a queue pair");
        if in_order && state.last.is_some_and(|last| last >= index) {
            return failed(format!("{end}: received in another order than sent"));
        }
        state.last = Some(index);
        let work = &self.works[index];
        let length = work.data.len() as u32;
        let header = if connection.kind == Kind::Ud { GRH } else { 0 };
        if entry.byte_count != header + length || immediate != work.immediate {
            return failed(format!(
                "{end}: {length} bytes with {:?} were sent: {entry:?}",
                work.immediate
            ));
        }
        let wrote = match work.what {
            What::Send => None,
            What::Write(to) => Some(to),
            other => return failed(format!("{end}: {other:?} took a receive")),
        };
        let opcode = match wrote {
            None => CompletionOpcode::Receive,
            Some(_) => CompletionOpcode::ReceiveWrite,
        };
        if entry.opcode != opcode.number() {
            return failed(format!("{end}: not {opcode:?}: {entry:?}"));
        }
        let data = work.data.clone();
        let (place, from) = match wrote {
            None => (slot, header as usize),
            Some(to) => (to, 0),
        };
        let got = self.devices[number].contents(&place, from + data.len());
        if got[from..] != data {
            return failed(format!("{end}: other bytes are received than were sent"));
        }
        // It stays what it is now, behind the message too; but there a message may have been that
        // lost its end.
        self.expect(&place, &got);
        let whole = self.devices[number].contents(&slot, slot.length as usize);
        if !connection.kind.is_reliable() {
            self.expect(&slot, &whole);
        } else if wrote.is_none() {
            let model = &self.devices[number].model[slot.offset as usize..];
            let rest = got.len()..slot.length as usize;
            if whole[rest.clone()] != model[rest] {
                return failed(format!("{end}: bytes behind the message have changed"));
            }
        }
        Ok(())
    }

    /// Nothing is left of what was posted, and queue pairs are in the state that they should be in.
    fn check_ended(&mut self) -> Result<()> {
        let open = self.open();
        if !open.is_empty() {
            return failed(format!("work requests never complete: {open:?}"));
        }
        let ends: Vec<End> = self.ends.keys().copied().collect();
        for end in ends {
            let state = &self.ends[&end];
            let Some(start) = state.start else { continue };
            let connection = self.connection(end);
            let number = self.device_of(end);
            let (qpn, has_failed) = (state.qpn, state.failed);
            let peer = &self.ends[&end.peer()];
            let asked = state.asked_wrong || peer.asked_wrong;
            if !state.connected || start != self.devices[number].start {
                continue;
            }
            let peer_here = peer.start == Some(self.devices[self.device_of(end.peer())].start)
                && peer.connected
                && state.peer_start == self.devices[self.device_of(end.peer())].start;
            let node = &mut self.devices[number].node;
            let is = node.qp_state(qpn);
            node.ring_eq(EQ_CONTROL, true);
            let good = match is {
                QueuePairStateCode::Rts => !has_failed,
                QueuePairStateCode::Error => has_failed || asked,
                _ => false,
            };
            if !good {
                return failed(format!("{end} is in state {is:?}, failed: {has_failed}"));
            }
            if is == QueuePairStateCode::Error {
                self.ends.get_mut(&end).expect("there").failed = true;
            }
            // Whatever the sender was told has arrived did.
            if connection.kind.is_reliable() && peer_here {
                let received = self.ends[&end].received;
                let arrived = self.ends[&end.peer()]
                    .consuming
                    .iter()
                    .filter(|&&index| self.works[index].state == Ended::Success)
                    .count();
                if received < arrived {
                    return failed(format!(
                        "{end} has received {received} messages, and {arrived} were successful"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Memory holds what it should, everywhere.
    fn check_memory(&mut self) -> Result<()> {
        let mut loose: HashMap<usize, Vec<(Slot, Option<usize>)>> = HashMap::new();
        for (index, work) in self.works.iter().enumerate() {
            let reliable = self.connection(work.end).kind.is_reliable();
            match work.what {
                What::Write(slot) if work.state != Ended::Success || !reliable => {
                    loose
                        .entry(slot.device)
                        .or_default()
                        .push((slot, Some(index)));
                }
                What::Read(slot) if work.state != Ended::Success => {
                    loose
                        .entry(slot.device)
                        .or_default()
                        .push((slot, Some(index)));
                }
                What::Atomic { slot, .. } if work.state != Ended::Success => {
                    loose.entry(slot.device).or_default().push((slot, None));
                }
                _ => {}
            }
        }
        let waiting = self.ends.values().flat_map(|state| state.receives.iter());
        let waiting: Vec<Slot> = waiting.map(|(_, slot)| *slot).collect();
        for slot in self.free.iter().chain(&waiting) {
            loose.entry(slot.device).or_default().push((*slot, None));
        }
        for number in 0..self.devices.len() {
            let device = &self.devices[number];
            let shared = device.shared.values().map(|slot| (*slot, None));
            // Up to what was given to nobody, and some of that.
            let used = device.next as usize + 4096;
            let is = device.node.contents(&device.region, 0, used);
            let mut expected = device.model[..used].to_vec();
            let words = usize::from(COUNTERS) * 8;
            expected[..words].copy_from_slice(&is[..words]);
            for (slot, of) in loose
                .remove(&number)
                .unwrap_or_default()
                .into_iter()
                .chain(shared)
            {
                let at = slot.offset as usize;
                match of {
                    None => {
                        let end = at + slot.length as usize;
                        expected[at..end].copy_from_slice(&is[at..end]);
                    }
                    Some(index) => {
                        for (offset, &byte) in self.works[index].data.iter().enumerate() {
                            if is[at + offset] == byte {
                                expected[at + offset] = byte;
                            }
                        }
                    }
                }
            }
            if let Some(at) = (0..is.len()).find(|&at| is[at] != expected[at]) {
                return failed(format!(
                    "device {number}: byte {at} of its region is {:#x} and not {:#x}",
                    is[at], expected[at]
                ));
            }
            // Nor has what lies behind the region.
            let whole = MEMORY_BASE..MEMORY_BASE + MEMORY_SIZE as u64;
            let mut hole = [0; 4096];
            let at = self.devices[number].tables.end;
            if whole.contains(&at) {
                let node = &self.devices[number].node;
                let read = node.host.memory.read(at, &mut hole);
                if read.is_err() || hole != [0; 4096] {
                    return failed(format!("device {number}: memory of nobody has changed"));
                }
            }
        }
        Ok(())
    }

    fn check_atomics(&mut self) -> Result<()> {
        for (&(device, word), state) in &self.words {
            let last = self.devices[device].word(word);
            if !is_linearizable(&state.operations, state.first, last) {
                return failed(format!(
                    "word {word} of device {device}, {:#x} first and {last:#x} in the end: no order \
                     explains what these found: {:x?}",
                    state.first, state.operations
                ));
            }
        }
        for number in 0..self.devices.len() {
            let counters = self.devices[number].node.engine.counters();
            self.seen.retransmissions += counters.retransmissions;
            self.seen.not_ready += counters.rnr_naks_sent;
            if let Some(port) = self.devices[number].port {
                self.count_port(port);
            }
        }
        Ok(())
    }
}

/// What is to be posted.
#[derive(Clone, Copy, Debug)]
enum Wish {
    Send(u32, bool),
    Write(u32, bool),
    Read(u32),
    FetchAdd(u8, u64),
    CompareSwap(u8, u64),
    BadKey,
}

fn options(connection: &Connection, end: End, qpn: u32) -> QpOptions {
    let options = QpOptions {
        qpn,
        pd: PD,
        cqn: CQN,
        log_blocks: 7,
        log_entries: 6,
        ..QpOptions::default()
    };
    match (connection.kind, end.side) {
        (Kind::Rc, _) if connection.shared => QpOptions {
            flags: QP_FLAG_SRQ,
            srqn: SRQ,
            ..options
        },
        (Kind::Rc, _) => options,
        (Kind::Uc, _) => QpOptions {
            service: Service::Uc,
            ..options
        },
        (Kind::Ud, _) => QpOptions {
            service: Service::Ud,
            ..options
        },
        (Kind::Xrc, 0) => QpOptions {
            service: Service::XrcIni,
            ..options
        },
        (Kind::Xrc, _) => QpOptions {
            service: Service::XrcTgt,
            pd: 0,
            xrcd: XRCD,
            ..options
        },
    }
}
