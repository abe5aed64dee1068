// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A machine with an honest driver, of which somebody has a part: a process with queue pairs of
//! its own, or a peer. The rest is somebody else's, and secret.

use crate::secret::Secret;
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::roce::{Bth, Template};
use ferrite_engine::testing::{Node, Peer, QpOptions, Region, Unsteady};
use ferrite_engine::{HostMemory, Medium};

/// Protection domains.
pub const ATTACKER: u32 = 1;
pub const VICTIM: u32 = 2;

/// The attacker's queue pairs: to a peer outside; datagrams; to each other, the second with the
/// shared receive queue; an unreliable connection outside.
pub const TO_PEER: u32 = 2;
pub const DATAGRAM: u32 = 3;
pub const OWN: [u32; 2] = [4, 5];
pub const UNRELIABLE: u32 = 6;
pub const ATTACKERS: [u32; 5] = [TO_PEER, DATAGRAM, OWN[0], OWN[1], UNRELIABLE];
/// The victim's, to a peer outside.
pub const VICTIMS: u32 = 8;
/// The kernel's, for extended connections.
pub const EXTENDED: u32 = 9;
/// Shared receive queues of the attacker: ordinary, and of the extended domain.
pub const SHARED: u32 = 1;
pub const SHARED_EXTENDED: u32 = 2;
const DOMAIN: u32 = 7;

/// Bytes of each region.
pub const LENGTH: u64 = 6000;
const PAGE: u64 = 4096;
pub const QKEY: u32 = 7;
/// Sequence numbers of both sides begin here.
pub const PSN: u32 = 0xff_fff0;
/// Frames that one poll may bring; more is work without end.
const MOST_FRAMES: usize = 20_000;
/// Polls that one input may ask for in a row.
const POLLS: usize = 8;
/// A window, and a tag for registrations by work request, both the attacker's.
pub const WINDOW: u32 = 10;
pub const FRESH: u32 = 11;
pub const LIST: u32 = 12;

/// What regions without a secret are full of.
const READ_ONLY: u8 = 0x22;
const READABLE: u8 = 0x44;

/// The machine.
pub struct Machine {
    pub node: Node,
    pub secret: Secret,
    /// Pages of nobody.
    guards: Vec<u64>,
    /// The attacker's: all rights, and reading alone.
    pub own: Region,
    pub own_read_only: Region,
    /// The victim's: for itself alone, and secret; to be read by peers; to be written by peers;
    /// for messages.
    pub local: Region,
    pub readable: Region,
    pub writable: Region,
    pub inbox: Region,
    /// The peers outside have this address.
    pub outside: Peer,
    /// The driver can still be trusted to give commands.
    pub honest: bool,
}

impl Machine {
    /// A machine whose secret is that of the input.
    pub fn new(input: &[u8]) -> Self {
        let secret = Secret::of(input);
        let mut node = Node::new(1);
        let mut guards = Vec::new();
        let page = secret.fill(PAGE as usize);
        let mut guard = |node: &mut Node| {
            let at = node.allocate(PAGE);
            node.host.memory.write(at, &page).expect("test memory");
            guards.push(at);
        };
        guard(&mut node);
        node.create_cq(2, EQ_FIRST_HANDLER, 6);
        guard(&mut node);
        node.create_srq(SHARED, 4, None);
        guard(&mut node);
        node.create_srq(SHARED_EXTENDED, 4, Some((DOMAIN, 1)));
        for qpn in ATTACKERS {
            guard(&mut node);
            let shared = qpn == OWN[1];
            node.create_qp(QpOptions {
                qpn,
                pd: ATTACKER,
                flags: QP_FLAG_LISTS | if shared { QP_FLAG_SRQ } else { 0 },
                srqn: if shared { SHARED } else { 0 },
                service: service_of(qpn),
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
            qpn: EXTENDED,
            pd: 0,
            page: 0,
            flags: QP_FLAG_PRIVILEGED,
            service: Service::XrcTgt,
            xrcd: DOMAIN,
            ..QpOptions::default()
        });
        let mut region = |index: u32, pd, access, fill: Vec<u8>| {
            let region = node.register(Tag::new(index, 1).0, pd, access, LENGTH);
            node.fill(&region, 0, &fill);
            guard(&mut node);
            region
        };
        let plain = |byte: u8| vec![byte; LENGTH as usize];
        let whole = || secret.fill(LENGTH as usize);
        let all = ACCESS_LOCAL_WRITE | ACCESS_REMOTE | ACCESS_WINDOW_BIND;
        let own = region(1, ATTACKER, all, plain(0x11));
        let read = ACCESS_REMOTE_READ | ACCESS_WINDOW_BIND;
        let own_read_only = region(2, ATTACKER, read, plain(READ_ONLY));
        let local = region(3, VICTIM, ACCESS_LOCAL_WRITE, whole());
        let readable = region(4, VICTIM, ACCESS_REMOTE_READ, plain(READABLE));
        let written = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
        let writable = region(5, VICTIM, written, whole());
        let inbox = region(6, VICTIM, ACCESS_LOCAL_WRITE, plain(0x66));
        for (index, kind, max_pages) in [(WINDOW, TagKind::Window2B, 0), (LIST, TagKind::List, 4)] {
            node.execute(&AllocateTag {
                tag: Tag::new(index, 1).0,
                pd: ATTACKER,
                kind: kind.number(),
                reserved: [0; 3],
                max_pages,
            });
        }
        let outside = Peer {
            mac: [2, 0xfe, 0, 0, 0, 9],
            gid: ferrite_engine::gid::gid_of_ipv4([10, 0, 0, 9]),
            send_psn: PSN,
            receive_psn: PSN,
            ..node.as_peer(0)
        };
        let mut machine = Self {
            node,
            secret,
            guards,
            own,
            own_read_only,
            local,
            readable,
            writable,
            inbox,
            outside,
            honest: true,
        };
        for qpn in ATTACKERS.into_iter().chain([VICTIMS, EXTENDED]) {
            machine.connect(qpn);
        }
        machine.serve();
        machine
    }

    /// Connects a queue pair that is in state RESET.
    pub fn connect(&mut self, qpn: u32) {
        let other = match OWN.iter().position(|&own| own == qpn) {
            Some(index) => self.node.as_peer(OWN[1 - index]),
            None => self.outside,
        };
        let peer = Peer {
            qpn: if other.mac == self.outside.mac {
                qpn
            } else {
                other.qpn
            },
            send_psn: PSN,
            receive_psn: PSN,
            ..other
        };
        match qpn {
            DATAGRAM => self.node.start_datagrams(qpn, QKEY),
            UNRELIABLE => self.node.connect_unreliable(qpn, &peer),
            _ => self.node.connect(qpn, &peer),
        }
    }

    /// The attacker's rings and records change while the device reads them.
    pub fn disturb(&mut self, one_in: u8, seed: u64) {
        let node = &self.node;
        let mut ranges: Vec<_> = ATTACKERS.iter().map(|&qpn| node.qp_buffer(qpn)).collect();
        ranges.push(node.srq_buffer(SHARED));
        ranges.push(node.srq_buffer(SHARED_EXTENDED));
        let unsteady = Unsteady::new(ranges, u64::from(one_in).max(2), seed);
        self.node.host.unsteady.replace(Some(unsteady));
    }

    /// All regions.
    pub fn regions(&self) -> [&Region; 6] {
        [
            &self.own,
            &self.own_read_only,
            &self.local,
            &self.readable,
            &self.writable,
            &self.inbox,
        ]
    }

    /// A key: somebody's, one next to it, or any.
    pub fn key(&self, input: &mut Input<'_>) -> u32 {
        let choice = input.u8();
        let tag = match choice & 15 {
            known @ 0..=5 => self.regions()[usize::from(known)].tag,
            6 => TAG_ALL_MEMORY,
            7 => Tag::new(WINDOW, 1).0,
            8 => Tag::new(FRESH, 1).0,
            9 => Tag::new(LIST, 1).0,
            10 => Tag::new(LIST, 2).0,
            11 => return input.u32(),
            _ => self.own.tag,
        };
        tag.wrapping_add(u32::from(choice >> 6 == 3))
    }

    /// An address: in somebody's memory, at its end, physical, or any.
    pub fn address(&self, input: &mut Input<'_>) -> u64 {
        let choice = input.u8();
        let region = match choice & 7 {
            known @ 0..=5 => self.regions()[usize::from(known)],
            _ => &self.own,
        };
        match choice >> 3 {
            0 => self.guards[usize::from(input.u8()) % self.guards.len()],
            1 => self.local.pages[0] + input.number() % PAGE,
            2 => region.address + LENGTH - input.number() % 64,
            3 => input.u64(),
            4 => input.number(),
            _ => region.address + input.number() % LENGTH,
        }
    }

    /// A scatter/gather entry.
    pub fn sge(&self, input: &mut Input<'_>) -> Sge {
        Sge {
            lkey: self.key(input),
            address: self.address(input),
            length: input.number() as u32,
        }
    }

    /// The device does what it can, and what it says is looked at.
    pub fn poll(&mut self) {
        for _ in 0..POLLS {
            self.node.engine.poll(self.node.now, &mut self.node.host);
            assert!(
                self.node.host.sent.len() < MOST_FRAMES,
                "frames without end"
            );
            while let Some(frame) = self.node.host.sent.pop_front() {
                assert!(!self.secret.is_in(&frame), "a secret is on the wire");
            }
            let next = self.node.engine.next_timeout();
            if next.is_none_or(|at| at > self.node.now) {
                break;
            }
        }
    }

    /// The driver serves its queues.
    pub fn serve(&mut self) {
        for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
            self.node.events(eqn);
            self.node.ring_eq(eqn, true);
        }
        for cqn in [1, 2] {
            while self.node.poll_cq(cqn).is_some() {}
        }
        self.node.host.raised.clear();
    }

    /// A queue pair that has failed is started over.
    pub fn restart(&mut self, qpn: u32) {
        if !self.honest {
            return;
        }
        // The driver's own commands are no target of this.
        let unsteady = self.node.host.unsteady.take();
        self.serve();
        if matches!(
            self.node.qp_state(qpn),
            QueuePairStateCode::Error | QueuePairStateCode::Sqe
        ) {
            self.node.set_state(qpn, QueuePairStateCode::Reset);
            self.connect(qpn);
        }
        self.serve();
        self.node.host.unsteady.replace(unsteady);
    }

    /// A packet from outside to queue pair `qpn`, with checks that are right.
    pub fn packet(&self, bth: &Bth, rest: &[u8]) -> Vec<u8> {
        let template = Template::new(&ferrite_engine::roce::Path {
            source_mac: self.outside.mac,
            destination_mac: self.node.mac,
            vlan: None,
            source: self.outside.gid,
            destination: self.node.gid,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            udp_source_port: 50_000,
        })
        .expect("a path");
        let mut frame = Vec::new();
        template.begin(&mut frame, bth);
        frame.extend_from_slice(rest);
        template.finish(&mut frame, bth.pad, 0, Medium::Wire);
        frame
    }

    /// What nobody had a right to change has not changed, and what is secret is where it was.
    pub fn check(&self) {
        let mut bytes = [0; PAGE as usize];
        for &page in &self.guards {
            let memory = &self.node.host.memory;
            memory.read(page, &mut bytes).expect("test memory");
            assert!(self.secret.is_whole(&bytes), "memory of nobody has changed");
        }
        let contents = |region: &Region| self.node.contents(region, 0, LENGTH as usize);
        let all = |region: &Region, fill: u8| contents(region).iter().all(|&byte| byte == fill);
        assert!(
            all(&self.own_read_only, READ_ONLY),
            "read-only memory has changed"
        );
        assert!(
            all(&self.readable, READABLE),
            "memory that peers may only read has changed"
        );
        assert!(
            self.secret.is_whole(&contents(&self.local)),
            "memory that no peer may touch has changed"
        );
        for region in [&self.own, &self.inbox] {
            assert!(!self.secret.is_in(&contents(region)), "a secret was read");
        }
        assert!(self.node.engine.is_running(), "the device was stopped");
    }
}

/// The service of a queue pair.
fn service_of(qpn: u32) -> Service {
    match qpn {
        DATAGRAM => Service::Ud,
        UNRELIABLE => Service::Uc,
        _ => Service::Rc,
    }
}
