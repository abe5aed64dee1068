// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Two machines and a wire between them, in one thread, with time that passes when told.

use ferrite_abi::*;
use ferrite_engine::roce::{Bth, Frame, Opcode, Packet, Syndrome, Template};
use ferrite_engine::testing::{Node, Peer, QpOptions, Region, SendWork};
use ferrite_engine::{Medium, FEATURES};
use std::collections::{HashMap, VecDeque};

pub const QPN_A: u32 = 0x11;
pub const QPN_B: u32 = 0x22;
pub const PD: u32 = 1;
/// The queue key of datagrams between the nodes of a pair.
pub const QKEY: u32 = 7;
pub const ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE;

/// How two queue pairs are set up.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub log_mtu: u8,
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub psn_a: u32,
    pub psn_b: u32,
    /// Reads and atomics in flight, each way.
    pub depth: u8,
    pub flags: u16,
    pub log_blocks: u8,
    pub log_entries: u8,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            log_mtu: 10,
            timeout: 10,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            psn_a: 0xff_fff0,
            psn_b: 5,
            depth: 16,
            flags: QP_FLAG_FAST_REGISTER,
            log_blocks: 7,
            log_entries: 6,
        }
    }
}

/// Two nodes with a connected queue pair each.
pub struct Pair {
    pub a: Node,
    pub b: Node,
    /// Frames that the nodes did not take, as (to, frame).
    pub passed: Vec<Vec<u8>>,
}

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    AToB,
    BToA,
}

impl Pair {
    /// Two nodes with a queue pair each of a service that has no acknowledgements. They do not look for
    /// commands at every turn.
    pub fn unacknowledged(service: Service, flags: u16) -> Self {
        let node = |number| Node::with_features(number, FEATURES & !FEATURE_TURNS);
        let mut nodes = [node(1), node(2)];
        for (node, qpn) in nodes.iter_mut().zip([QPN_A, QPN_B]) {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                service,
                flags,
                ..QpOptions::default()
            });
        }
        let [a, b] = nodes;
        let mut pair = Self {
            a,
            b,
            passed: Vec::new(),
        };
        let (to_a, to_b) = (pair.a.as_peer(QPN_A), pair.b.as_peer(QPN_B));
        if service == Service::Uc {
            pair.a.connect_unreliable(QPN_A, &to_b);
            pair.b.connect_unreliable(QPN_B, &to_a);
        } else {
            pair.a.start_datagrams(QPN_A, QKEY);
            pair.b.start_datagrams(QPN_B, QKEY);
        }
        pair
    }

    /// Posts three messages of 100 bytes of such a pair, and receives for them 200 bytes apart.
    pub fn send_three(&mut self, service: Service, from: &Region, into: &Region) {
        for n in 0..3u64 {
            let data = pattern(n, 100);
            self.a.fill(from, n * 100, &data);
            self.b.post_recv(QPN_B, &[into.sge(n * 200, 140)]);
            let work =
                SendWork::new(SendOpcode::Send, &[from.sge(n * 100, 100)]).flags(SEND_SIGNALED);
            let work = match service {
                Service::Ud => work.datagram(&self.b.as_peer(QPN_B).datagram(QKEY)),
                _ => work,
            };
            self.a.post_send(QPN_A, &work);
        }
    }

    /// Two nodes with a queue pair each, in state RESET.
    pub fn unconnected(setup: Setup) -> Self {
        Self::of(setup, Node::new(1), Node::new(2))
    }

    /// The same of these nodes.
    pub fn of(setup: Setup, mut a: Node, mut b: Node) -> Self {
        let options = |qpn| QpOptions {
            qpn,
            pd: PD,
            flags: setup.flags,
            log_blocks: setup.log_blocks,
            log_entries: setup.log_entries,
            ..QpOptions::default()
        };
        a.create_qp(options(QPN_A));
        b.create_qp(options(QPN_B));
        Self {
            a,
            b,
            passed: Vec::new(),
        }
    }

    pub fn peer_of_a(&self, setup: Setup) -> Peer {
        peer(&self.b, QPN_B, setup, setup.psn_a, setup.psn_b)
    }

    pub fn peer_of_b(&self, setup: Setup) -> Peer {
        peer(&self.a, QPN_A, setup, setup.psn_b, setup.psn_a)
    }

    /// The same, connected.
    pub fn new(setup: Setup) -> Self {
        let mut pair = Self::unconnected(setup);
        pair.connect(setup);
        pair
    }

    /// Connects both queue pairs.
    pub fn connect(&mut self, setup: Setup) {
        let (to_b, to_a) = (self.peer_of_a(setup), self.peer_of_b(setup));
        self.a.connect(QPN_A, &to_b);
        self.b.connect(QPN_B, &to_a);
    }

    /// Lets time pass up to `now`.
    pub fn set_now(&mut self, now: u64) {
        self.a.now = now;
        self.b.now = now;
    }

    /// Both engines do what they can; frames stay in `sent`.
    pub fn poll(&mut self) {
        self.a.settle();
        self.b.settle();
    }

    /// Carries frames both ways until nothing moves without time passing. `fate` says for each
    /// frame what arrives in its place.
    pub fn exchange_with(&mut self, mut fate: impl FnMut(Way, Vec<u8>) -> Vec<Vec<u8>>) {
        for _ in 0..1_000_000 {
            self.poll();
            let mut moved = false;
            for way in [Way::AToB, Way::BToA] {
                let (from, to) = match way {
                    Way::AToB => (&mut self.a, &mut self.b),
                    Way::BToA => (&mut self.b, &mut self.a),
                };
                let frames: VecDeque<_> = std::mem::take(&mut from.host.sent);
                for frame in frames {
                    moved = true;
                    for frame in fate(way, frame) {
                        if to.receive(&frame) == ferrite_engine::Disposition::PassToHost {
                            self.passed.push(frame);
                        }
                    }
                }
            }
            if !moved {
                return;
            }
        }
        panic!("the exchange does not come to an end");
    }

    /// The same over a good wire.
    pub fn exchange(&mut self) {
        self.exchange_with(|_, frame| vec![frame]);
    }

    /// Advances time to the next deadline of either engine; false when there is none. (A test may keep what was lent as
    /// long as it likes.)
    pub fn pass_time(&mut self) -> bool {
        let next = [&self.a, &self.b]
            .into_iter()
            .filter_map(|node| node.engine.next_timeout_but_looks())
            .min();
        match next {
            Some(at) => {
                let now = at.max(self.a.now);
                self.set_now(now);
                true
            }
            None => false,
        }
    }

    /// Exchanges, and lets time pass, until nothing is left to wait for.
    pub fn run_with(&mut self, mut fate: impl FnMut(Way, Vec<u8>) -> Vec<Vec<u8>>) {
        for _ in 0..100_000 {
            self.exchange_with(&mut fate);
            if !self.pass_time() {
                return;
            }
        }
        panic!("no end in sight");
    }

    /// The same over a good wire.
    pub fn run(&mut self) {
        self.run_with(|_, frame| vec![frame]);
    }

    pub fn completions_a(&mut self) -> Vec<CompletionEntry> {
        drain(&mut self.a)
    }

    pub fn completions_b(&mut self) -> Vec<CompletionEntry> {
        drain(&mut self.b)
    }
}

/// Two nodes with many connected queue pairs, which have short messages to write in turn.
pub struct Many {
    pub pair: Pair,
    /// Numbers at both ends.
    qpns: Vec<(u32, u32)>,
    next: usize,
    work: SendWork,
    /// What the other end sends.
    question: SendWork,
    /// Frames on a slow wire.
    late: Vec<Vec<u8>>,
}

impl Many {
    /// So many, all of which complete at completion queue 1.
    pub fn new(qps: u32) -> Self {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 4096);
        let to = pair.b.register(0x201, PD, ALL, 4096);
        let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 64)])
            .remote(to.address, to.tag)
            .flags(SEND_SIGNALED);
        let question =
            SendWork::new(SendOpcode::Write, &[to.sge(0, 64)]).remote(from.address, from.tag);
        let mut many = Self {
            pair,
            question,
            late: Vec::new(),
            qpns: vec![(QPN_A, QPN_B)],
            next: 0,
            work,
        };
        for number in 1..qps {
            many.add(0x100 + number);
        }
        many
    }

    fn add(&mut self, qpn: u32) {
        for node in [&mut self.pair.a, &mut self.pair.b] {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                cqn: 1,
                log_blocks: 4,
                log_entries: 2,
                ..QpOptions::default()
            });
        }
        let (to_a, to_b) = (self.pair.a.as_peer(qpn), self.pair.b.as_peer(qpn));
        self.pair.a.connect(qpn, &to_b);
        self.pair.b.connect(qpn, &to_a);
        self.qpns.push((qpn, qpn));
    }

    /// Posts a message.
    fn post(&mut self, index: usize) {
        let (qpn, _) = self.qpns[index];
        self.pair.a.post_send(qpn, &self.work);
    }

    /// Posts a message on each of the next `batch` queue pairs, and lets everything happen; gives
    /// the completions and the frames.
    pub fn visit(&mut self, batch: u32) -> (usize, usize) {
        for _ in 0..batch {
            self.post(self.next);
            self.next = (self.next + 1) % self.qpns.len();
        }
        let mut frames = 0;
        self.pair.exchange_with(|_, frame| {
            frames += 1;
            vec![frame]
        });
        // Long enough for timers to run out, had they not been stopped, and for naps to end.
        self.pair.set_now(self.pair.a.now + 1_000_000);
        self.pair.poll();
        (self.pair.completions_a().len(), frames)
    }

    /// Posts a message on the next queue pair, and lets happen what happens within so many nanoseconds;
    /// gives the completions. Where the wire is slow what was sent arrives with the next visit.
    pub fn visit_within(&mut self, nanoseconds: u64, slow: bool) -> usize {
        self.post(self.next);
        self.next = (self.next + 1) % self.qpns.len();
        self.arrive();
        for nanoseconds in [0, nanoseconds] {
            self.pair.set_now(self.pair.a.now + nanoseconds);
            let late = &mut self.late;
            self.pair.exchange_with(|way, frame| {
                if slow && way == Way::AToB {
                    late.push(frame);
                    vec![]
                } else {
                    vec![frame]
                }
            });
        }
        self.pair.completions_a().len()
    }

    /// What a slow wire holds arrives.
    pub fn arrive(&mut self) {
        for frame in self.late.drain(..) {
            self.pair.b.receive(&frame);
        }
    }

    /// The next queue pair is this one.
    pub fn only(&mut self, index: usize) {
        self.next = index;
    }

    /// Queue pairs of the sender that are spared their doorbells.
    pub fn awake(&self) -> usize {
        let asleep = |&&(qpn, _): &&(u32, u32)| self.pair.a.record(qpn).send_wake != 0;
        self.qpns.len() - self.qpns.iter().filter(asleep).count()
    }

    /// The other end sends a message to the next queue pair.
    pub fn is_asked(&mut self) {
        let (_, qpn) = self.qpns[self.next];
        self.pair.b.post_send(qpn, &self.question);
        self.pair.exchange();
    }
}

fn peer(node: &Node, qpn: u32, setup: Setup, send_psn: u32, receive_psn: u32) -> Peer {
    Peer {
        send_psn,
        receive_psn,
        log_mtu: setup.log_mtu,
        timeout: setup.timeout,
        retry_count: setup.retry_count,
        rnr_retry: setup.rnr_retry,
        min_rnr_timer: setup.min_rnr_timer,
        depth: setup.depth,
        ..node.as_peer(qpn)
    }
}

/// All completions of completion queue 1.
pub fn drain(node: &mut Node) -> Vec<CompletionEntry> {
    std::iter::from_fn(|| node.poll_cq(1)).collect()
}

/// Statuses of completions.
pub fn statuses(completions: &[CompletionEntry]) -> Vec<CompletionStatus> {
    completions
        .iter()
        .map(|entry| CompletionStatus::from_number(entry.status).expect("status"))
        .collect()
}

/// Data that differ in every place and by `seed`.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// A send of `length` bytes from the start of `region`.
pub fn send(region: &Region, length: u32) -> SendWork {
    SendWork::new(SendOpcode::Send, &[region.sge(0, length)])
}

/// A small generator of random numbers, so that a failing case is its seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// True `percent` times of a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// Percentages of misfortune.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub drop: u64,
    pub duplicate: u64,
    pub corrupt: u64,
    pub delay: u64,
}

/// How often [`BadWire`] keeps the same frame from arriving at once: with a request and its answer
/// kept back so often, a requester has tries left, so that no test fails of mere bad luck.
const KEPT_BACK: u32 = 2;

/// A wire with faults: frames held back come out behind later ones.
pub struct BadWire {
    random: Random,
    faults: Faults,
    held: [Vec<Vec<u8>>; 2],
    /// How often the frames of each opcode and sequence number were lost or held back.
    kept_back: HashMap<(Way, u8, u32), u32>,
}

impl BadWire {
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self {
            random: Random(seed | 1),
            faults,
            held: [Vec::new(), Vec::new()],
            kept_back: HashMap::new(),
        }
    }

    pub fn fate(&mut self, way: Way, mut frame: Vec<u8>) -> Vec<Vec<u8>> {
        let random = &mut self.random;
        let held = &mut self.held[way as usize];
        let mut out = Vec::new();
        let corrupt = random.chance(self.faults.corrupt);
        let drop = random.chance(self.faults.drop);
        let delay = random.chance(self.faults.delay);
        let parsed = Frame::parse(&frame).expect("RoCEv2 from a node");
        let bth = Bth::parse(parsed.transport).expect("a base transport header");
        let kept_back = self
            .kept_back
            .entry((way, bth.opcode, bth.psn))
            .or_default();
        if *kept_back == KEPT_BACK {
            out.push(frame.clone());
        } else {
            *kept_back += u32::from(corrupt || drop || delay);
            if corrupt {
                let at = random.next() as usize % frame.len();
                frame[at] ^= 1 << (random.next() % 8);
            }
            if drop {
                // Gone.
            } else if delay {
                held.push(frame.clone());
            } else {
                out.push(frame.clone());
            }
        }
        if random.chance(self.faults.duplicate) {
            if random.chance(50) {
                held.push(frame);
            } else {
                out.push(frame);
            }
        }
        // What was held back comes out sooner or later, in any order.
        while !held.is_empty() && random.chance(30) {
            let at = random.next() as usize % held.len();
            out.push(held.swap_remove(at));
        }
        out
    }
}

/// Speaks to a node as its peer would, packet by packet.
pub struct Impostor {
    pub template: Template,
    pub qpn: u32,
}

impl Impostor {
    pub fn new(from: &Node, to: &Node, qpn: u32) -> Self {
        let template = Template::new(&ferrite_engine::roce::Path {
            source_mac: from.mac,
            destination_mac: to.mac,
            vlan: None,
            source: from.gid,
            destination: to.gid,
            hop_limit: 0,
            traffic_class: 0,
            flow_label: 0,
            udp_source_port: 50_000,
        })
        .unwrap();
        Self { template, qpn }
    }

    pub fn packet(&self, opcode: u8, psn: u32, rest: &[u8]) -> Vec<u8> {
        self.packet_with(rest, |bth| {
            bth.opcode = opcode;
            bth.psn = psn;
        })
    }

    pub fn packet_with(&self, rest: &[u8], change: impl FnOnce(&mut Bth)) -> Vec<u8> {
        let mut bth = Bth {
            opcode: Opcode::RC_SEND_ONLY,
            pkey: 0xffff,
            qpn: self.qpn,
            ack_request: true,
            pad: (rest.len().wrapping_neg() & 3) as u8,
            ..Bth::default()
        };
        change(&mut bth);
        let mut frame = Vec::new();
        self.template.begin(&mut frame, &bth);
        frame.extend_from_slice(rest);
        self.template.finish(&mut frame, bth.pad, 0, Medium::Wire);
        frame
    }
}

/// The acknowledgements in frames: syndrome and sequence number.
pub fn acknowledgements(node: &mut Node) -> Vec<(Syndrome, u32)> {
    node.settle();
    std::mem::take(&mut node.host.sent)
        .iter()
        .filter_map(|frame| {
            let frame = Frame::parse(frame)?;
            let packet = Packet::parse(frame.transport).ok()?;
            Some((packet.aeth?.syndrome, packet.bth.psn))
        })
        .collect()
}
