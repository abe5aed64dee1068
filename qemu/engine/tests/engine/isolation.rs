// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What must neither change nor leave.
//!
//! A machine with an honest driver, a process that writes what it likes into its own rings and
//! records while the device reads them, and peers that send what they like to it and to a process
//! that never harmed anyone. Whatever they say: memory that is not theirs keeps its bytes, and what
//! is secret is on no wire and in no memory of theirs.

use crate::attack::{forge, seeds, Random};
use ferrite_abi::*;
use ferrite_engine::testing::{Node, Peer, QpOptions, Region, SendWork, Unsteady};
use ferrite_engine::HostMemory;
use std::collections::HashMap;

/// What secret memory is full of. Nothing else has eight of them in a row.
const SECRET: u8 = 0xc3;
const RUN: usize = 8;
const PAGE: u64 = 4096;
const KEPT_FRAMES: usize = 64;

/// Protection domains.
const ATTACKER: u32 = 1;
const VICTIM: u32 = 2;

/// The attacker's: to its peer; datagrams; to each other, the second with the shared queue.
const TO_PEER: u32 = 2;
const DATAGRAM: u32 = 3;
const OWN: [u32; 2] = [4, 5];
const ATTACKERS: [u32; 4] = [TO_PEER, DATAGRAM, OWN[0], OWN[1]];
/// The victim's, to a peer that is no friend.
const VICTIMS: u32 = 8;
/// The kernel's, for extended connections: it may use all memory, but not on behalf of a process.
const KERNELS: u32 = 9;
/// Shared receive queues of the attacker: ordinary, and of the extended domain.
const SHARED: u32 = 1;
const SHARED_EXTENDED: u32 = 2;
const EXTENDED_DOMAIN: u32 = 7;

/// Bytes of each region.
const LENGTH: u64 = 20_000;

fn has_secret(bytes: &[u8]) -> bool {
    let mut run = 0;
    bytes.iter().any(|&byte| {
        run = if byte == SECRET { run + 1 } else { 0 };
        run == RUN
    })
}

/// The machine under attack.
struct Machine {
    node: Node,
    /// Pages that belong to nobody, between everything else.
    guards: Vec<u64>,
    /// The attacker's own memory: all rights, and reading alone.
    own: Region,
    own_read_only: Region,
    /// The victim's: for itself alone; to be read by peers; to be written by peers; for messages.
    local: Region,
    readable: Region,
    writable: Region,
    inbox: Region,
}

impl Machine {
    fn new() -> Self {
        let mut node = Node::new(1);
        let mut guards = Vec::new();
        let mut guard = |node: &mut Node| {
            let page = node.allocate(PAGE);
            for at in (page..page + PAGE).step_by(8) {
                node.host.memory.put(at, &u64::from_le_bytes([SECRET; 8]));
            }
            guards.push(page);
        };
        guard(&mut node);
        node.create_cq(2, EQ_FIRST_HANDLER, 8);
        guard(&mut node);
        node.create_srq(SHARED, 5, None);
        guard(&mut node);
        node.create_srq(SHARED_EXTENDED, 5, Some((EXTENDED_DOMAIN, 1)));
        for qpn in ATTACKERS {
            guard(&mut node);
            let shared = qpn == OWN[1];
            node.create_qp(QpOptions {
                qpn,
                pd: ATTACKER,
                flags: if shared { QP_FLAG_SRQ } else { 0 },
                srqn: if shared { SHARED } else { 0 },
                service: if qpn == DATAGRAM {
                    Service::Ud
                } else {
                    Service::Rc
                },
                ..QpOptions::default()
            });
        }
        guard(&mut node);
        node.create_qp(QpOptions {
            qpn: VICTIMS,
            pd: VICTIM,
            cqn: 2,
            page: 2,
            ..QpOptions::default()
        });
        guard(&mut node);
        node.create_qp(QpOptions {
            qpn: KERNELS,
            pd: 0,
            // It has none.
            cqn: 0x77,
            page: 0,
            flags: QP_FLAG_PRIVILEGED,
            service: Service::XrcTgt,
            xrcd: EXTENDED_DOMAIN,
            ..QpOptions::default()
        });
        let mut region = |index: u32, pd, access, fill: u8| {
            let region = node.register(Tag::new(index, 1).0, pd, access, LENGTH);
            node.fill(&region, 0, &[fill; LENGTH as usize]);
            guard(&mut node);
            region
        };
        let own = region(
            1,
            ATTACKER,
            ACCESS_LOCAL_WRITE | ACCESS_REMOTE | ACCESS_WINDOW_BIND,
            0x11,
        );
        let own_read_only = region(2, ATTACKER, ACCESS_REMOTE_READ | ACCESS_WINDOW_BIND, 0x22);
        let local = region(3, VICTIM, ACCESS_LOCAL_WRITE, SECRET);
        let readable = region(4, VICTIM, ACCESS_REMOTE_READ, 0x44);
        let writable = region(5, VICTIM, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, SECRET);
        let inbox = region(6, VICTIM, ACCESS_LOCAL_WRITE, 0x66);
        Self {
            node,
            guards,
            own,
            own_read_only,
            local,
            readable,
            writable,
            inbox,
        }
    }

    /// The attacker's rings and records change while the device reads them.
    fn disturb(&mut self, seed: u64) {
        let node = &self.node;
        let mut ranges: Vec<_> = ATTACKERS.iter().map(|&qpn| node.qp_buffer(qpn)).collect();
        ranges.push(node.srq_buffer(SHARED));
        ranges.push(node.srq_buffer(SHARED_EXTENDED));
        let unsteady = Unsteady::new(ranges, 40, seed);
        self.node.host.unsteady.replace(Some(unsteady));
    }

    /// A key: the attacker's, the victim's, one next to them, or that of all memory.
    fn key(&self, random: &mut Random) -> u32 {
        let tag = random.pick(&[
            self.own.tag,
            self.own.tag,
            self.own_read_only.tag,
            self.local.tag,
            self.readable.tag,
            self.writable.tag,
            self.inbox.tag,
            TAG_ALL_MEMORY,
        ]);
        match random.below(16) {
            0 => tag.wrapping_add(1),
            1 => random.nasty() as u32,
            _ => tag,
        }
    }

    /// An address: in any region, around its end, or physical.
    fn address(&self, random: &mut Random) -> u64 {
        let region = random.pick(&[0, 0, 0, 1, 2, 3, 4, 5]);
        let region = [
            &self.own,
            &self.own_read_only,
            &self.local,
            &self.readable,
            &self.writable,
            &self.inbox,
        ][region];
        match random.below(8) {
            0 => random.pick(&self.guards) + random.below(PAGE),
            1 => random.pick(&self.local.pages) + random.below(PAGE),
            2 => region.address + LENGTH - random.below(64),
            3 => random.nasty(),
            _ => region.address + random.below(LENGTH),
        }
    }

    /// A key and an address that go together mostly, whoever they belong to.
    fn target(&self, random: &mut Random) -> (u32, u64) {
        let regions = [
            &self.own,
            &self.own_read_only,
            &self.local,
            &self.readable,
            &self.writable,
            &self.inbox,
        ];
        let region = regions[random.below(regions.len() as u64) as usize];
        if random.one_in(2) {
            (self.key(random), self.address(random))
        } else {
            (region.tag, region.address + random.below(LENGTH) / 8 * 8)
        }
    }

    fn sge(&self, random: &mut Random) -> Sge {
        let (lkey, address) = self.target(random);
        Sge {
            address,
            length: random.pick(&[1, 8, 8, 100, 1024, 3000, 5000]),
            lkey,
        }
    }

    /// Something for queue pair `qpn` to do.
    fn work(&self, random: &mut Random, qpn: u32, peer: &Peer) -> SendWork {
        let opcode = random.pick(&[
            SendOpcode::Send,
            SendOpcode::Send,
            SendOpcode::SendImmediate,
            SendOpcode::SendInvalidate,
            SendOpcode::Write,
            SendOpcode::WriteImmediate,
            SendOpcode::Read,
            SendOpcode::Read,
            SendOpcode::CompareSwap,
            SendOpcode::FetchAdd,
            SendOpcode::AtomicWrite,
            SendOpcode::Bind,
            SendOpcode::LocalInvalidate,
            SendOpcode::FastRegister,
        ]);
        let sges: Vec<Sge> = (0..random.below(4)).map(|_| self.sge(random)).collect();
        let mut work = SendWork::new(opcode, &sges)
            .immediate(self.key(random))
            .invalidate(self.key(random));
        let flags = random.below(8) as u16;
        work = match opcode {
            SendOpcode::Send | SendOpcode::SendImmediate
                if (qpn == DATAGRAM) != random.one_in(16) =>
            {
                work.datagram(&peer.datagram(0))
            }
            SendOpcode::Send
            | SendOpcode::SendImmediate
            | SendOpcode::SendInvalidate
            | SendOpcode::LocalInvalidate => work,
            SendOpcode::Bind => work.part(&BindPart {
                window: self.key(random),
                new_window: self.key(random),
                region: self.key(random),
                access: random.below(256) as u32,
                address: self.address(random),
                length: random.pick(&[8, LENGTH, u64::MAX]),
                reserved: [0; 2],
            }),
            _ => {
                let (rkey, address) = self.target(random);
                work.remote(address, rkey)
            }
        };
        work.flags(flags | 1)
    }

    /// The attacker posts something that is right, or nearly, or not at all.
    fn attack(&mut self, random: &mut Random) {
        let qpn = random.pick(&ATTACKERS);
        let peer = self.node.as_peer(random.pick(&ATTACKERS));
        match random.below(8) {
            0..=3 => {
                let work = self.work(random, qpn, &peer);
                let mut blocks = work.encode();
                if random.one_in(6) {
                    let at = random.below(blocks.len() as u64) as usize;
                    blocks[at] = random.nasty() as u8;
                }
                self.node.write_blocks(qpn, &blocks);
                self.node.publish_send(qpn);
            }
            4 => {
                let sges = [self.sge(random), self.sge(random)];
                self.node.post_recv(qpn, &sges);
            }
            5 => {
                let sges = [self.sge(random), self.sge(random)];
                let srqn = random.pick(&[SHARED, SHARED_EXTENDED]);
                self.node.post_srq(srqn, &sges);
            }
            6 => {
                // Into its rings, behind the driver's back.
                let ranges = [
                    self.node.qp_buffer(qpn),
                    self.node.srq_buffer(SHARED),
                    self.node.srq_buffer(SHARED_EXTENDED),
                ];
                let range = &ranges[random.below(3) as usize];
                let words = (range.end - range.start) / 8;
                let at = range.start + random.below(words) * 8;
                let value = random.nasty();
                self.node.host.memory.put(at, &value);
            }
            _ => {
                let offset = random.pick(&[
                    DOORBELL_SEND,
                    DOORBELL_RECEIVE,
                    DOORBELL_COMPLETION,
                    DOORBELL_SRQ,
                    DOORBELL_EVENT_QUEUE,
                    DOORBELL_CONTROL,
                ]);
                let word = u64::from(random.number()) | (random.nasty() << 32);
                // Its page, and no other.
                self.node.doorbell(1, offset, word);
            }
        }
    }

    /// The driver serves its queues, and starts over what has failed.
    fn serve(&mut self, random: &mut Random, peers: &HashMap<u32, Peer>) {
        for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
            self.node.events(eqn);
            self.node.ring_eq(eqn, true);
        }
        for cqn in [1, 2] {
            while self.node.poll_cq(cqn).is_some() {}
        }
        self.node.host.raised.clear();
        for (&qpn, peer) in peers {
            if random.one_in(8) && self.node.qp_state(qpn) == QueuePairStateCode::Error {
                self.node.set_state(qpn, QueuePairStateCode::Reset);
                self.start(qpn, peer);
            }
        }
    }

    fn start(&mut self, qpn: u32, peer: &Peer) {
        if qpn == DATAGRAM {
            self.node.start_datagrams(qpn, 0);
        } else {
            self.node.connect(qpn, peer);
        }
    }

    /// What nobody had a right to change has not changed.
    fn check(&self) {
        for &page in &self.guards {
            let mut bytes = [0; PAGE as usize];
            let memory = &self.node.host.memory;
            memory.read(page, &mut bytes).expect("test memory");
            assert!(
                bytes.iter().all(|&byte| byte == SECRET),
                "memory that belongs to nobody has changed"
            );
        }
        for (region, fill, whose) in [
            (&self.own_read_only, 0x22, "read-only memory"),
            (&self.local, SECRET, "memory that no peer may touch"),
            (&self.readable, 0x44, "memory that peers may only read"),
        ] {
            let bytes = self.node.contents(region, 0, LENGTH as usize);
            assert!(
                bytes.iter().all(|&byte| byte == fill),
                "{whose} has changed"
            );
        }
        let own = self.node.contents(&self.own, 0, LENGTH as usize);
        assert!(!has_secret(&own), "the attacker has read a secret");
        assert!(self.node.engine.is_running(), "the device was stopped");
    }
}

/// The peers' machine: its queue pairs have the numbers of those they are connected to.
fn peers_machine() -> (Node, Region) {
    let mut node = Node::new(2);
    for (qpn, service) in [
        (TO_PEER, Service::Rc),
        (VICTIMS, Service::Rc),
        (KERNELS, Service::XrcIni),
    ] {
        node.create_qp(QpOptions {
            qpn,
            service,
            ..QpOptions::default()
        });
    }
    let region = node.register(
        Tag::new(7, 1).0,
        1,
        ACCESS_LOCAL_WRITE | ACCESS_REMOTE,
        LENGTH,
    );
    node.fill(&region, 0, &[0x77; LENGTH as usize]);
    (node, region)
}

/// What a peer sends to the machine, by whichever of its connections.
fn send_to(machine: &Machine, peers: &mut Node, from: &Region, random: &mut Random) {
    let qpn = random.pick(&[TO_PEER, VICTIMS, VICTIMS, KERNELS]);
    let opcode = random.pick(&[
        SendOpcode::Send,
        SendOpcode::Send,
        SendOpcode::Write,
        SendOpcode::WriteImmediate,
        SendOpcode::Read,
        SendOpcode::FetchAdd,
        SendOpcode::CompareSwap,
        SendOpcode::SendInvalidate,
    ]);
    let atomic = matches!(opcode, SendOpcode::FetchAdd | SendOpcode::CompareSwap);
    let length = if atomic {
        8
    } else {
        random.pick(&[1, 8, 100, 1024, 5000])
    };
    let mut work = SendWork::new(opcode, &[from.sge(random.below(1000), length)]);
    work = match opcode {
        SendOpcode::Send => work,
        SendOpcode::SendInvalidate => work.invalidate(machine.key(random)),
        _ => {
            let (rkey, address) = machine.target(random);
            work.remote(address & !if atomic { 7 } else { 0 }, rkey)
        }
    };
    if qpn == KERNELS {
        work = work.srqn(SHARED_EXTENDED);
    }
    peers.post_recv(qpn, &[from.sge(0, 8192)]);
    peers.post_send(qpn, &work);
}

fn run(seed: u64, steps: usize) {
    let mut random = Random::new(seed);
    let mut machine = Machine::new();
    let (mut peers, from) = peers_machine();
    let mut connections = HashMap::new();
    for qpn in [TO_PEER, VICTIMS, KERNELS] {
        connections.insert(qpn, peers.as_peer(qpn));
        let peer = machine.node.as_peer(qpn);
        peers.connect(qpn, &peer);
    }
    connections.insert(DATAGRAM, machine.node.as_peer(DATAGRAM));
    connections.insert(OWN[0], machine.node.as_peer(OWN[1]));
    connections.insert(OWN[1], machine.node.as_peer(OWN[0]));
    for (&qpn, peer) in &connections {
        machine.start(qpn, peer);
    }
    machine.disturb(seed);
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for _ in 0..steps {
        match random.below(8) {
            0..=3 => machine.attack(&mut random),
            4 | 5 => send_to(&machine, &mut peers, &from, &mut random),
            6 => {
                // The victim expects messages and nothing else.
                let inbox = machine.inbox.sge(0, 8192);
                if machine.node.qp_state(VICTIMS) == QueuePairStateCode::Rts {
                    machine.node.post_recv(VICTIMS, &[inbox]);
                }
            }
            _ if !kept.is_empty() => {
                let at = random.below(kept.len() as u64) as usize;
                let frame = forge(&mut random, &kept[at]);
                machine.node.receive(&frame);
            }
            _ => {}
        }
        for _ in 0..3 {
            machine
                .node
                .engine
                .poll(machine.node.now, &mut machine.node.host);
            peers.engine.poll(peers.now, &mut peers.host);
            while let Some(frame) = machine.node.host.sent.pop_front() {
                assert!(!has_secret(&frame), "a secret is on the wire");
                peers.receive(&frame);
            }
            while let Some(frame) = peers.host.sent.pop_front() {
                if kept.len() < KEPT_FRAMES {
                    kept.push(frame.clone());
                } else if random.one_in(10) {
                    let at = random.below(KEPT_FRAMES as u64) as usize;
                    kept[at].clone_from(&frame);
                }
                machine.node.receive(&frame);
            }
        }
        let step = if random.one_in(8) { 50_000_000 } else { 10_000 };
        machine.node.now += step;
        peers.now = machine.node.now;
        machine.serve(&mut random, &connections);
        for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
            peers.events(eqn);
            peers.ring_eq(eqn, true);
        }
        while peers.poll_cq(1).is_some() {}
        peers.host.raised.clear();
        for qpn in [TO_PEER, VICTIMS, KERNELS] {
            if random.one_in(8) && peers.qp_state(qpn) == QueuePairStateCode::Error {
                peers.set_state(qpn, QueuePairStateCode::Reset);
                let peer = machine.node.as_peer(qpn);
                peers.connect(qpn, &peer);
            }
        }
        machine.check();
    }
}

#[test]
fn nothing_changes_or_leaves_without_a_right() {
    for seed in seeds(&[1, 2, 3, 4, 5, 6, 7, 8], 8) {
        run(seed, 800);
    }
}

/// A message by the kernel's extended connection into a process's queue, which names all memory.
#[test]
fn a_process_gets_no_right_to_all_memory_from_who_receives_for_it() {
    let mut machine = Machine::new();
    let (mut peers, from) = peers_machine();
    let peer = machine.node.as_peer(KERNELS);
    peers.connect(KERNELS, &peer);
    machine.node.connect(KERNELS, &peers.as_peer(KERNELS));
    let target = machine.guards[0];
    machine.node.post_srq(
        SHARED_EXTENDED,
        &[Sge {
            address: target,
            length: 4096,
            lkey: TAG_ALL_MEMORY,
        }],
    );
    let work = SendWork::new(SendOpcode::Send, &[from.sge(0, 100)]).srqn(SHARED_EXTENDED);
    peers.post_send(KERNELS, &work);
    for _ in 0..4 {
        peers.settle();
        while let Some(frame) = peers.host.sent.pop_front() {
            machine.node.receive(&frame);
        }
        machine.node.settle();
        while let Some(frame) = machine.node.host.sent.pop_front() {
            peers.receive(&frame);
        }
    }
    machine.check();
    let entry = machine.node.poll_cq(1).expect("its end");
    assert_eq!(entry.status, CompletionStatus::LocalProtection.number());
}
