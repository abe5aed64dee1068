// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Page lists: tables of any shape and contents, which change while the device reads them. They
//! name pages of a pool, tables, and nonsense, but never a page with a secret: so none is reached.

use crate::secret::Secret;
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork, Unsteady};
use ferrite_engine::HostMemory;

const STEPS: usize = 48;
const PAGE: u64 = 4096;
const POOL: u64 = 16;
/// A page of a list has no more than this: so much is left behind the last page of the pool.
const LARGEST: u64 = 4;
const TABLES: u64 = 4;
/// Queue pairs, to each other: they may register through their send queues.
const QPS: [u32; 2] = [4, 5];
const PD: u32 = 1;
/// Tags that are registered by commands, and by work requests.
const TAGS: u32 = 4;
const FRESH: u32 = 8;

struct Lists {
    node: Node,
    secret: Secret,
    guards: Vec<u64>,
    pool: u64,
    tables: u64,
    /// Memory that is registered as it should be.
    good: Region,
    /// Registrations that succeeded: tags and their first addresses.
    made: Vec<(u32, u64)>,
}

impl Lists {
    fn new(data: &[u8]) -> Self {
        let secret = Secret::of(data);
        let mut node = Node::new(1);
        let mut guards = Vec::new();
        let page = secret.fill(PAGE as usize);
        let mut guard = |node: &mut Node| {
            let at = node.allocate(PAGE);
            node.host.memory.write(at, &page).expect("test memory");
            guards.push(at);
        };
        for qpn in QPS {
            guard(&mut node);
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                flags: QP_FLAG_FAST_REGISTER,
                ..QpOptions::default()
            });
        }
        guard(&mut node);
        // Pages of a list are aligned to their size, and so is the pool.
        while node.allocate(0) % (LARGEST * PAGE) != 0 {
            guard(&mut node);
        }
        let pool = node.allocate((POOL + LARGEST) * PAGE);
        guard(&mut node);
        while node.allocate(0) % (LARGEST * PAGE) != 0 {
            guard(&mut node);
        }
        // A table may be taken for a page.
        let tables = node.allocate((TABLES + LARGEST) * PAGE);
        guard(&mut node);
        let all = ACCESS_LOCAL_WRITE | ACCESS_REMOTE;
        let good = node.register(Tag::new(1, 1).0, PD, all, 8192);
        guard(&mut node);
        for index in FRESH..FRESH + 2 {
            node.execute(&AllocateTag {
                tag: Tag::new(index, 0).0,
                pd: PD,
                kind: TagKind::Region.number(),
                reserved: [0; 3],
                max_pages: 8,
            });
        }
        for (qpn, to) in [(QPS[0], QPS[1]), (QPS[1], QPS[0])] {
            let peer = node.as_peer(to);
            node.connect(qpn, &peer);
        }
        Self {
            node,
            secret,
            guards,
            pool,
            tables,
            good,
            made: Vec::new(),
        }
    }

    /// What a table may hold.
    fn entry(&self, input: &mut Input<'_>) -> u64 {
        let choice = input.u8();
        let low = u64::from(choice & 15);
        match choice >> 4 {
            0..=8 => self.pool + low % POOL * PAGE,
            9 | 10 => self.tables + low % TABLES * PAGE,
            11 => self.pool + low % POOL * PAGE + 8,
            12 => 0,
            13 => u64::MAX << low,
            14 => low,
            _ => 1 << 40,
        }
    }

    fn buffer(&self, input: &mut Input<'_>) -> Buffer {
        let order = input.u8();
        let shift = input.pick(&[12, 12, 12, 13, 14, 0, 11, 31, 64, 255]);
        let direct = order & 3 == AttOrder::Direct.number() & 3;
        let length = input.number();
        let fbo = input.number() as u32;
        Buffer {
            root: if direct {
                self.pool + u64::from(input.u8()) % POOL * PAGE
            } else {
                self.tables + u64::from(input.u8()) % TABLES * PAGE
            },
            // What lies in one piece has to lie in the pool.
            length: if direct {
                length % (LARGEST * PAGE / 2)
            } else {
                length
            },
            fbo: if direct { fbo % PAGE as u32 } else { fbo },
            page_shift: shift,
            order: if order < 192 { order & 3 } else { order },
            reserved: 0,
        }
    }

    fn place(&self, input: &mut Input<'_>) -> (u32, u64) {
        let choice = usize::from(input.u8());
        let (tag, address) = match self.made.get(choice) {
            Some(&made) => made,
            None => (self.good.tag, self.good.address),
        };
        (tag, address.wrapping_add(input.number()))
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 12 {
            0..=2 => {
                let table = self.tables + u64::from(input.u8()) % TABLES * PAGE;
                let first = input.number() % 512;
                for at in first..(first + 1 + u64::from(input.u8() % 16)).min(512) {
                    let entry = self.entry(input);
                    self.node.host.memory.put(table + at * 8, &entry);
                }
            }
            3 | 4 => {
                let tag = Tag::new(2 + u32::from(input.u8()) % TAGS, 1).0;
                let address = input.little() * 8;
                let command = RegisterRegion {
                    tag,
                    pd: PD,
                    access: u32::from(input.u8()),
                    flags: u32::from(input.u8() & 7) & !1,
                    address,
                    buffer: self.buffer(input),
                };
                self.node
                    .post_command(CommandOpcode::RegisterRegion, &command);
                self.made.push((tag, address));
            }
            5 => {
                let tag = Tag::new(2 + u32::from(input.u8()) % TAGS, 1).0;
                let opcode = input.pick(&[CommandOpcode::ReleaseTag, CommandOpcode::QueryTag]);
                let number = ObjectNumber {
                    number: tag,
                    reserved: 0,
                };
                self.node.post_command(opcode, &number);
            }
            6 => {
                let tag = Tag::new(FRESH + u32::from(input.u8() & 1), input.u8()).0;
                let address = input.little() * 8;
                let part = FastRegisterPart {
                    tag,
                    access: u32::from(input.u8()),
                    address,
                    buffer: self.buffer(input),
                    reserved: 0,
                };
                let work = SendWork::new(SendOpcode::FastRegister, &[]).part(&part);
                self.node.post_send(input.pick(&QPS), &work);
                self.made.push((tag, address));
            }
            7 => {
                let (lkey, address) = self.place(input);
                let length = length(input);
                let sge = Sge {
                    address,
                    length,
                    lkey,
                };
                self.node.post_recv(input.pick(&QPS), &[sge]);
            }
            8..=10 => {
                let (lkey, address) = self.place(input);
                let (rkey, to) = self.place(input);
                let sge = Sge {
                    address,
                    length: length(input),
                    lkey,
                };
                let opcode = input.pick(&[
                    SendOpcode::Write,
                    SendOpcode::Read,
                    SendOpcode::Send,
                    SendOpcode::FetchAdd,
                    SendOpcode::CompareSwap,
                ]);
                let work = SendWork::new(opcode, &[sge]);
                let work = match opcode {
                    SendOpcode::Send => work,
                    _ => work.remote(to, rkey),
                };
                self.node.post_send(input.pick(&QPS), &work);
            }
            _ => {
                self.node.now += input.little() * 10_000;
                for qpn in QPS {
                    self.restart(qpn);
                }
            }
        }
    }

    fn restart(&mut self, qpn: u32) {
        let unsteady = self.node.host.unsteady.take();
        self.poll();
        if self.node.engine.is_running() && self.node.qp_state(qpn) == QueuePairStateCode::Error {
            self.node.set_state(qpn, QueuePairStateCode::Reset);
            let to = QPS[usize::from(qpn == QPS[0])];
            let peer = self.node.as_peer(to);
            self.node.connect(qpn, &peer);
        }
        self.node.host.unsteady.replace(unsteady);
    }

    fn poll(&mut self) {
        for _ in 0..8 {
            self.node.engine.poll(self.node.now, &mut self.node.host);
            while let Some(frame) = self.node.host.sent.pop_front() {
                assert!(!self.secret.is_in(&frame), "a secret is on the wire");
            }
        }
        for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
            self.node.events(eqn);
            self.node.ring_eq(eqn, true);
        }
        while self.node.poll_cq(1).is_some() {}
        self.node.host.raised.clear();
    }

    fn check(&self) {
        let mut page = [0; PAGE as usize];
        let memory = &self.node.host.memory;
        for &at in &self.guards {
            memory.read(at, &mut page).expect("test memory");
            assert!(self.secret.is_whole(&page), "memory of nobody has changed");
        }
        for at in 0..POOL + LARGEST {
            memory
                .read(self.pool + at * PAGE, &mut page)
                .expect("test memory");
            assert!(!self.secret.is_in(&page), "a secret was read");
        }
        assert!(self.node.engine.is_running(), "the device was stopped");
    }
}

/// Bytes of a message: more than the pool has, but not so many that copying is all that is done.
fn length(input: &mut Input<'_>) -> u32 {
    input.number() as u32 % 200_000
}

/// The target.
pub fn lists(data: &[u8]) {
    let mut input = Input::new(data);
    let mut lists = Lists::new(data);
    let one_in = input.u8();
    if one_in != 0 {
        let seed = u64::from(input.u8());
        let values = (0..8).map(|_| lists.entry(&mut input)).collect();
        let tables = lists.tables..lists.tables + TABLES * PAGE;
        let unsteady = Unsteady::new(vec![tables], u64::from(one_in).max(2), seed);
        lists
            .node
            .host
            .unsteady
            .replace(Some(unsteady.choosing(values)));
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        lists.step(&mut input);
        lists.poll();
    }
    lists.node.now += 1_000_000_000;
    lists.poll();
    lists.check();
}
