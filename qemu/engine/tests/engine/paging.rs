// SPDX-License-Identifier: Apache-2.0 OR MIT

//! On-demand regions: pages that come and go under every operation, over good wires and bad.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Access, Node, QpOptions, SendWork};

const PAGE: u64 = 4096;
const FBO: u64 = 64;

/// An on-demand region and what the host knows of its pages.
pub(crate) struct Paged {
    pub(crate) tag: u32,
    pub(crate) address: u64,
    length: u64,
    table: u64,
    /// Where each page is now, whether the device knows or not.
    pages: Vec<u64>,
    /// Pages that were taken back; nobody may write them any more.
    old: Vec<u64>,
    /// The first page that cannot be had.
    limit: u64,
}

const POISON: u8 = 0xdd;

impl Paged {
    /// A region of `length` bytes, at most 512 pages, of which nothing is present.
    pub(crate) fn new(node: &mut Node, tag: u32, length: u64) -> Self {
        Self::with_access(node, tag, length, ALL)
    }

    fn with_access(node: &mut Node, tag: u32, length: u64, access: u32) -> Self {
        let pages = node.allocate_pages((FBO + length).div_ceil(PAGE) as usize);
        let table = node.allocate_pages(1)[0];
        let address = 0x7f00_0000_0000 + u64::from(tag) * 0x1000_0000 + FBO;
        let region = Self {
            tag,
            address,
            length,
            table,
            limit: pages.len() as u64,
            pages,
            old: Vec::new(),
        };
        node.execute(&region.command(access));
        region
    }

    fn command(&self, access: u32) -> RegisterRegion {
        RegisterRegion {
            tag: self.tag,
            pd: PD,
            access,
            flags: REGION_ON_DEMAND,
            address: self.address,
            buffer: Buffer {
                root: self.table,
                length: self.length,
                fbo: FBO as u32,
                page_shift: 12,
                order: 1,
                reserved: 0,
            },
        }
    }

    pub(crate) fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.address + offset,
            length,
            lkey: self.tag,
        }
    }

    pub(crate) fn bring_in(&self, node: &Node, page: u64, write: bool) {
        let mut entry = self.pages[page as usize] | ON_DEMAND_PRESENT;
        if write {
            entry |= ON_DEMAND_WRITE;
        }
        node.host.memory.put(self.table + page * 8, &entry);
    }

    fn is_present(&self, node: &Node, page: u64) -> bool {
        node.host.memory.get::<u64>(self.table + page * 8) & ON_DEMAND_PRESENT != 0
    }

    /// Takes a page back and moves what is in it to another place.
    fn evict(&mut self, node: &mut Node, page: u64) {
        if !self.is_present(node, page) {
            return;
        }
        node.host.memory.put(self.table + page * 8, &0u64);
        node.execute(&InvalidatePages {
            tag: self.tag,
            reserved: 0,
            first: page,
            count: 1,
        });
        let from = self.pages[page as usize];
        let to = node.allocate_pages(1)[0];
        for at in (0..PAGE).step_by(8) {
            let word: u64 = node.host.memory.get(from + at);
            node.host.memory.put(to + at, &word);
            node.host
                .memory
                .put(from + at, &u64::from_le_bytes([POISON; 8]));
        }
        self.pages[page as usize] = to;
        self.old.push(from);
    }

    fn fill(&self, node: &Node, offset: u64, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            let at = FBO + offset + index as u64;
            let place = self.pages[(at / PAGE) as usize] + at % PAGE;
            ferrite_engine::HostMemory::write(&node.host.memory, place, &[*byte]).unwrap();
        }
    }

    pub(crate) fn contents(&self, node: &Node, offset: u64, length: usize) -> Vec<u8> {
        (0..length as u64)
            .map(|index| {
                let at = FBO + offset + index;
                let place = self.pages[(at / PAGE) as usize] + at % PAGE;
                let mut byte = [0];
                ferrite_engine::HostMemory::read(&node.host.memory, place, &mut byte).unwrap();
                byte[0]
            })
            .collect()
    }

    /// Nothing was written to a page after it was taken back.
    fn assert_old_untouched(&self, node: &Node) {
        for &page in &self.old {
            for at in (0..PAGE).step_by(8) {
                let word: u64 = node.host.memory.get(page + at);
                assert_eq!(word, u64::from_le_bytes([POISON; 8]), "stale write");
            }
        }
    }
}

/// Takes all faults of a node.
fn take(node: &mut Node) -> Vec<PageFault> {
    let mut all = Vec::new();
    loop {
        let taken: PageFaults = node.query(CommandOpcode::TakeFaults, 0).unwrap();
        let count = taken.count as usize;
        all.extend_from_slice(&taken.faults[..count]);
        if count < taken.faults.len() {
            return all;
        }
    }
}

fn resolve(node: &mut Node, fault: &PageFault, failed: bool) -> CommandStatus {
    node.command(
        CommandOpcode::ResolveFault,
        &ResolveFault {
            token: fault.token,
            failed: failed.into(),
            reserved: 0,
        },
    )
}

/// Deals with a fault as a driver does: one page.
fn bring_in(node: &mut Node, regions: &[Paged], fault: &PageFault) {
    let region = regions.iter().find(|region| region.tag == fault.tag);
    let failed = match region {
        Some(region) => {
            assert!(fault.offset < region.length && fault.length > 0);
            let page = (FBO + fault.offset) / PAGE;
            let there = page < region.limit;
            if there {
                region.bring_in(node, page, fault.flags & FAULT_WRITE != 0);
            }
            !there
        }
        None => true,
    };
    assert_eq!(resolve(node, fault, failed), CommandStatus::Ok);
}

pub(crate) fn serve(node: &mut Node, regions: &[Paged]) -> usize {
    let faults = take(node);
    for fault in &faults {
        bring_in(node, regions, fault);
    }
    faults.len()
}

/// Runs until nothing moves; returns the faults of both sides.
fn run(pair: &mut Pair, a: &[Paged], b: &[Paged]) -> (usize, usize) {
    run_by(pair, a, b, Pair::exchange)
}

/// The same, with packets exchanged by `exchange`.
pub(crate) fn run_by(
    pair: &mut Pair,
    a: &[Paged],
    b: &[Paged],
    mut exchange: impl FnMut(&mut Pair),
) -> (usize, usize) {
    let mut faults = (0, 0);
    for _ in 0..10_000 {
        exchange(pair);
        let served = (serve(&mut pair.a, a), serve(&mut pair.b, b));
        faults = (faults.0 + served.0, faults.1 + served.1);
        if served == (0, 0) && !pair.pass_time() {
            return faults;
        }
    }
    panic!("no end in sight");
}

#[test]
fn every_operation_waits_for_its_pages_and_moves_its_data() {
    let setup = Setup {
        rnr_retry: 7,
        retry_count: 1,
        ..Setup::default()
    };
    let length = 20_000;
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let mut pair = Pair::new(setup);
        let a = [Paged::new(&mut pair.a, 0x101, 64 << 10)];
        let b = [Paged::new(&mut pair.b, 0x201, 64 << 10)];
        let data = pattern(1, length as usize);
        if opcode == SendOpcode::Write {
            a[0].fill(&pair.a, 5, &data);
        } else {
            b[0].fill(&pair.b, 77, &data);
        }
        let work =
            SendWork::new(opcode, &[a[0].sge(5, length)]).remote(b[0].address + 77, b[0].tag);
        pair.a.post_send(QPN_A, &work);
        let faults = run(&mut pair, &a, &b);
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        // Five pages each.
        assert!(faults.0 >= 5 && faults.1 >= 5, "{faults:?}");
        let got = if opcode == SendOpcode::Write {
            b[0].contents(&pair.b, 77, length as usize)
        } else {
            a[0].contents(&pair.a, 5, length as usize)
        };
        assert!(got == data, "{opcode:?}");
        assert_eq!(pair.a.engine.counters().ack_timeouts, 0);
    }
}

#[test]
fn sends_are_received_where_pages_come_late() {
    let mut pair = Pair::new(Setup::default());
    let length = 20_000;
    let a = [Paged::new(&mut pair.a, 0x101, 64 << 10)];
    let b = [Paged::new(&mut pair.b, 0x201, 64 << 10)];
    let data = pattern(1, length as usize);
    a[0].fill(&pair.a, 0, &data);
    pair.b.post_recv(QPN_B, &[b[0].sge(9, length)]);
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Send, &[a[0].sge(0, length)]),
    );
    run(&mut pair, &a, &b);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    let received = pair.completions_b();
    assert_eq!(statuses(&received), [CompletionStatus::Success]);
    assert_eq!(received[0].byte_count, length);
    assert!(b[0].contents(&pair.b, 9, length as usize) == data);
}

#[test]
fn atomics_are_done_once_however_often_pages_are_missed() {
    let mut pair = Pair::new(Setup::default());
    let mut a = [Paged::new(&mut pair.a, 0x101, 8192)];
    let mut b = [Paged::new(&mut pair.b, 0x201, 8192)];
    for round in 0..6u64 {
        if round % 2 == 0 {
            // So that it is the answer that finds its page gone.
            b[0].bring_in(&pair.b, 0, true);
        }
        let work = SendWork::new(SendOpcode::FetchAdd, &[a[0].sge(0, 8)]).part(&AtomicPart {
            address: b[0].address,
            rkey: b[0].tag,
            reserved: 0,
            operand: 3,
            compare: 0,
        });
        pair.a.post_send(QPN_A, &work);
        // The place of the answer goes while the request is under way.
        for _ in 0..4 {
            pair.a.settle();
            serve(&mut pair.a, &a);
        }
        a[0].evict(&mut pair.a, 0);
        run(&mut pair, &a, &b);
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        assert_eq!(
            a[0].contents(&pair.a, 0, 8),
            (round * 3).to_le_bytes(),
            "what was there before"
        );
        assert_eq!(
            b[0].contents(&pair.b, 0, 8),
            ((round + 1) * 3).to_le_bytes()
        );
        b[0].evict(&mut pair.b, 0);
        a[0].evict(&mut pair.a, 0);
    }
    a[0].assert_old_untouched(&pair.a);
    b[0].assert_old_untouched(&pair.b);
    // Answers that found no place were asked for again, not waited for in vain.
    assert!(pair.a.engine.counters().retransmissions >= 6);
    assert_eq!(pair.a.engine.counters().ack_timeouts, 0);
}

#[test]
fn the_host_is_told_once_until_it_has_taken_all() {
    let mut node = Node::new(1);
    let region = Paged::new(&mut node, 0x101, 8192);
    let qps: Vec<u32> = (10..30).collect();
    for &qpn in &qps {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            ..QpOptions::default()
        });
        let peer = node.as_peer(77);
        node.connect(qpn, &peer);
        node.post_send(qpn, &SendWork::new(SendOpcode::Send, &[region.sge(0, 8)]));
    }
    node.settle();
    let told = |node: &mut Node| {
        node.event_codes(EQ_ASYNC)
            .into_iter()
            .filter(|(code, _)| *code == EventCode::PageFaults)
            .count()
    };
    assert_eq!(told(&mut node), 1);
    let first: PageFaults = node.query(CommandOpcode::TakeFaults, 0).unwrap();
    assert_eq!(first.count, 7);
    // With room for no more than two, two are taken and the others left.
    let reply = node.allocate(4096);
    let mut some = Vec::new();
    for (room, count) in [(1, 0), (63, 0), (64, 1), (96 + 31, 2)] {
        let entry = CommandEntry::new(CommandOpcode::TakeFaults, 0, (reply, room), &0u64);
        let done = node.command_done(&entry);
        assert_eq!((done.param0, done.param1), (0, 256));
        let taken: PageFaults = node.host.memory.get(reply);
        assert_eq!(taken.count, count);
        some.extend(taken.faults[..count as usize].iter().copied());
        assert!(taken.faults[count as usize..].iter().all(Reserved::is_zero));
    }
    // A fault that cannot be told of is not taken, and a reply is written whole and once.
    let entry = CommandEntry::new(CommandOpcode::TakeFaults, 0, (1 << 60, 256), &0u64);
    let refused = CommandStatus::HostMemory.number();
    assert_eq!(node.command_done(&entry).param0, refused.into());
    let entry = CommandEntry::new(CommandOpcode::TakeFaults, 0, (reply, 64), &0u64);
    node.host.accesses.replace(Some(Vec::new()));
    assert_eq!(node.command_done(&entry).param0, 0);
    let accesses = node.host.accesses.take().unwrap();
    let written = accesses
        .iter()
        .filter(|access| matches!(access, Access::Write(at, _) if *at == reply));
    assert_eq!(written.count(), 1);
    let taken: PageFaults = node.host.memory.get(reply);
    some.push(taken.faults[0]);
    let rest = [some, take(&mut node)].concat();
    assert_eq!(rest.len(), 13);
    assert_eq!(take(&mut node).len(), 0);
    assert_eq!(told(&mut node), 0);
    // A fault that comes later is told of again.
    region.bring_in(&node, 0, false);
    for fault in first.faults.iter().chain(&rest) {
        assert_eq!(fault.offset, 0);
        assert_eq!(fault.tag, region.tag);
        assert_eq!(fault.flags, 0);
        assert_eq!(resolve(&mut node, fault, false), CommandStatus::Ok);
    }
    node.settle();
    assert_eq!(told(&mut node), 0);
    node.post_send(10, &SendWork::new(SendOpcode::Send, &[region.sge(5000, 8)]));
    node.settle();
    assert_eq!(told(&mut node), 1);
}

#[test]
fn pages_that_cannot_be_had_are_protection_errors() {
    // On the sending side.
    let mut pair = Pair::new(Setup::default());
    let mut a = [Paged::new(&mut pair.a, 0x101, 8192)];
    let to = pair.b.register(0x201, PD, ALL, 8192);
    a[0].limit = 1;
    let work = SendWork::new(SendOpcode::Write, &[a[0].sge(0, 8192)]).remote(to.address, to.tag);
    pair.a.post_send(QPN_A, &work);
    run(&mut pair, &a, &[]);
    let done = pair.completions_a();
    assert_eq!(statuses(&done), [CompletionStatus::LocalProtection]);
    assert_eq!(done[0].vendor_syndrome, 20);

    // At the peer.
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let mut pair = Pair::new(Setup::default());
        let from = pair.a.register(0x101, PD, ALL, 8192);
        let mut b = [Paged::new(&mut pair.b, 0x201, 8192)];
        b[0].limit = 1;
        let work = SendWork::new(opcode, &[from.sge(0, 8192)]).remote(b[0].address, b[0].tag);
        pair.a.post_send(QPN_A, &work);
        run(&mut pair, &[], &b);
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::RemoteAccess],
            "{opcode:?}"
        );
        assert_eq!(pair.b.qp_state(QPN_B), QueuePairStateCode::Error);
    }

    // In a receive.
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 8192);
    let mut b = [Paged::new(&mut pair.b, 0x201, 8192)];
    b[0].limit = 0;
    pair.b.post_recv(QPN_B, &[b[0].sge(0, 100)]);
    pair.a.post_send(QPN_A, &send(&from, 100));
    run(&mut pair, &[], &b);
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::RemoteOperation]
    );
    assert_eq!(
        statuses(&pair.completions_b()),
        [CompletionStatus::LocalProtection]
    );
}

#[test]
fn a_page_for_reading_is_not_written() {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 8192);
    let b = [Paged::new(&mut pair.b, 0x201, 8192)];
    pair.a.fill(&from, 0, &[7; 100]);
    b[0].bring_in(&pair.b, 0, false);
    let work = SendWork::new(SendOpcode::Write, &[from.sge(0, 100)]).remote(b[0].address, b[0].tag);
    pair.a.post_send(QPN_A, &work);
    pair.exchange();
    assert_eq!(b[0].contents(&pair.b, 0, 100), [0; 100]);
    let faults = take(&mut pair.b);
    assert_eq!(faults.len(), 1);
    assert_eq!(faults[0].flags, FAULT_WRITE);
    bring_in(&mut pair.b, &b, &faults[0]);
    run(&mut pair, &[], &b);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(b[0].contents(&pair.b, 0, 100), [7; 100]);
}

#[test]
fn tokens_that_do_not_stand_for_a_fault_are_refused() {
    let mut pair = Pair::new(Setup::default());
    let a = [Paged::new(&mut pair.a, 0x101, 8192)];
    pair.b.register(0x201, PD, ALL, 8192);
    let work = SendWork::new(SendOpcode::Send, &[a[0].sge(0, 8)]);
    pair.a.post_send(QPN_A, &work);
    pair.exchange();
    let garbage = |node: &mut Node, token: u64, failed: u32| {
        node.command(
            CommandOpcode::ResolveFault,
            &ResolveFault {
                token,
                failed,
                reserved: 0,
            },
        )
    };
    // Not even a true one, before it is taken: it is the first of this queue pair.
    let guess = (1 << 25) | u64::from(QPN_A);
    for token in [0, 1, u64::MAX, u64::from(QPN_A), guess, guess | (1 << 24)] {
        assert_eq!(garbage(&mut pair.a, token, 0), CommandStatus::NotFound);
    }
    let faults = take(&mut pair.a);
    assert_eq!(faults.len(), 1);
    assert_eq!(faults[0].token, guess);
    assert_eq!(garbage(&mut pair.a, guess, 2), CommandStatus::BadParameter);
    assert_eq!(resolve(&mut pair.a, &faults[0], false), CommandStatus::Ok);
    assert_eq!(
        resolve(&mut pair.a, &faults[0], false),
        CommandStatus::NotFound
    );
    // It was not brought in: the same fault again, by another name.
    pair.exchange();
    let again = take(&mut pair.a);
    assert_eq!(again.len(), 1);
    assert!(again[0].token != guess);
    // A queue pair that goes takes its fault with it.
    pair.a.set_state(QPN_A, QueuePairStateCode::Error);
    assert_eq!(
        resolve(&mut pair.a, &again[0], true),
        CommandStatus::NotFound
    );
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Flushed]);
}

#[test]
fn a_released_region_fails_what_waited_for_it() {
    let mut pair = Pair::new(Setup::default());
    let a = [Paged::new(&mut pair.a, 0x101, 8192)];
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[a[0].sge(0, 8)]));
    pair.exchange();
    let faults = take(&mut pair.a);
    assert_eq!(
        pair.a.object_command(CommandOpcode::ReleaseTag, a[0].tag),
        CommandStatus::Ok
    );
    // A driver that finds no region says so, or comes too late: both end well.
    assert_eq!(resolve(&mut pair.a, &faults[0], false), CommandStatus::Ok);
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::LocalProtection]
    );
    assert_eq!(take(&mut pair.a).len(), 0);
}

#[test]
fn impossible_regions_and_invalidations_are_refused() {
    let mut node = Node::new(1);
    let region = Paged::new(&mut node, 0x101, 8192);
    let good = RegisterRegion {
        tag: 0x301,
        ..region.command(ALL)
    };
    type R = RegisterRegion;
    let buffer = |change: fn(&mut Buffer)| {
        let mut command = good;
        change(&mut command.buffer);
        command
    };
    for command in [
        buffer(|buffer| buffer.order = 0),
        buffer(|buffer| buffer.order = 2),
        buffer(|buffer| buffer.order = 5),
        buffer(|buffer| buffer.page_shift = 13),
        buffer(|buffer| buffer.fbo = 4096),
        buffer(|buffer| buffer.length = u64::MAX),
        buffer(|buffer| {
            buffer.length = ON_DEMAND_MAX_LENGTH + 1;
            buffer.order = 4;
        }),
        R {
            flags: REGION_ON_DEMAND | REGION_DEVICE_MEMORY,
            ..good
        },
        R {
            flags: REGION_ON_DEMAND | REGION_REPLACE,
            ..good
        },
    ] {
        assert_eq!(
            node.command(CommandOpcode::RegisterRegion, &command),
            CommandStatus::BadParameter,
            "{command:?}"
        );
    }
    let plain = node.register(0x401, PD, ALL, 4096);
    let pages = InvalidatePages {
        tag: region.tag,
        reserved: 0,
        first: 0,
        count: 3,
    };
    type I = InvalidatePages;
    for (status, command) in [
        (CommandStatus::Ok, pages),
        (
            CommandStatus::Ok,
            I {
                first: 3,
                count: 0,
                ..pages
            },
        ),
        (CommandStatus::BadParameter, I { count: 4, ..pages }),
        (
            CommandStatus::BadParameter,
            I {
                first: u64::MAX,
                ..pages
            },
        ),
        (
            CommandStatus::BadParameter,
            I {
                tag: plain.tag,
                ..pages
            },
        ),
        (
            CommandStatus::NotFound,
            I {
                tag: 0x102,
                ..pages
            },
        ),
        (
            CommandStatus::NotFound,
            I {
                tag: 0x501,
                ..pages
            },
        ),
        (CommandStatus::BadNumber, I { tag: 0, ..pages }),
    ] {
        assert_eq!(
            node.command(CommandOpcode::InvalidatePages, &command),
            status,
            "{command:?}"
        );
    }
}

#[test]
fn four_levels_of_tables_reach_the_end_of_the_address_space() {
    let mut pair = Pair::new(Setup::default());
    let to = pair.b.register(0x201, PD, ALL, 4096);
    let root = pair.a.allocate_pages(1)[0];
    let tag = 0x101;
    pair.a.execute(&RegisterRegion {
        tag,
        pd: PD,
        access: ALL,
        flags: REGION_ON_DEMAND,
        address: 0,
        buffer: Buffer {
            root,
            length: ON_DEMAND_MAX_LENGTH,
            fbo: 0,
            page_shift: 12,
            order: 4,
            reserved: 0,
        },
    });
    for (n, address) in [0u64, 0x7fff_1234_5678, ON_DEMAND_MAX_LENGTH - 100]
        .into_iter()
        .enumerate()
    {
        let sge = Sge {
            address,
            length: 100,
            lkey: tag,
        };
        pair.b.post_recv(QPN_B, &[to.sge(0, 100)]);
        pair.a
            .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[sge]));
        // Each level in turn: a table that is absent is a page that is absent.
        let mut table = root;
        let mut place = 0;
        for level in (0..4).rev() {
            pair.exchange();
            let faults = take(&mut pair.a);
            assert_eq!(faults.len(), 1);
            assert_eq!((faults[0].offset, faults[0].length), (address, 100));
            place = pair.a.allocate_pages(1)[0];
            let index = (address >> (12 + 9 * level)) & 511;
            pair.a
                .host
                .memory
                .put(table + index * 8, &(place | ON_DEMAND_PRESENT));
            table = place;
            if level == 0 {
                let data = pattern(n as u64, 100);
                let at = place + address % PAGE;
                ferrite_engine::HostMemory::write(&pair.a.host.memory, at, &data).unwrap();
            }
            assert_eq!(resolve(&mut pair.a, &faults[0], false), CommandStatus::Ok);
            if n > 0 {
                // Only to see that it is asked for again where the tables are not all there.
                pair.exchange();
            }
        }
        assert!(place != 0);
        pair.run();
        assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
        pair.completions_b();
        assert_eq!(pair.b.contents(&to, 0, 100), pattern(n as u64, 100));
        // Start over with an empty tree, for the next address.
        for index in 0..512u64 {
            pair.a.host.memory.put(root + index * 8, &0u64);
        }
    }
}

#[test]
fn datagrams_and_unreliable_connections_wait_in_line() {
    // Datagrams, sent from absent pages and received to absent pages, in order.
    let mut a = Node::new(1);
    let mut b = Node::new(2);
    let qkey = 0x1234;
    for (node, qpn) in [(&mut a, QPN_A), (&mut b, QPN_B)] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            service: Service::Ud,
            ..QpOptions::default()
        });
        node.start_datagrams(qpn, qkey);
    }
    let mut pair = Pair {
        a,
        b,
        passed: Vec::new(),
    };
    let from = [Paged::new(&mut pair.a, 0x101, 64 << 10)];
    let to = [Paged::new(&mut pair.b, 0x201, 64 << 10)];
    let peer = pair.b.as_peer(QPN_B);
    for n in 0..8u64 {
        from[0].fill(&pair.a, n * 5000, &pattern(n, 1000));
        pair.b.post_recv(QPN_B, &[to[0].sge(n * 5000, 1040)]);
        let work = SendWork::new(SendOpcode::Send, &[from[0].sge(n * 5000, 1000)])
            .datagram(&peer.datagram(qkey));
        pair.a.post_send(QPN_A, &work);
    }
    run(&mut pair, &from, &to);
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 8]
    );
    let received = pair.completions_b();
    assert_eq!(statuses(&received), [CompletionStatus::Success; 8]);
    for (n, entry) in received.iter().enumerate() {
        assert_eq!((entry.index, entry.byte_count), (n as u32, 1040));
        let got = to[0].contents(&pair.b, n as u64 * 5000 + 40, 1000);
        assert!(got == pattern(n as u64, 1000), "datagram {n}");
    }

    // Unreliable connections.
    let mut a = Node::new(1);
    let mut b = Node::new(2);
    for (node, qpn) in [(&mut a, QPN_A), (&mut b, QPN_B)] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            service: Service::Uc,
            ..QpOptions::default()
        });
    }
    let (to_b, to_a) = (b.as_peer(QPN_B), a.as_peer(QPN_A));
    a.connect_unreliable(QPN_A, &to_b);
    b.connect_unreliable(QPN_B, &to_a);
    let mut pair = Pair {
        a,
        b,
        passed: Vec::new(),
    };
    let from = [Paged::new(&mut pair.a, 0x101, 64 << 10)];
    let to = [Paged::new(&mut pair.b, 0x201, 64 << 10)];
    let data = pattern(3, 20_000);
    from[0].fill(&pair.a, 0, &data);
    pair.b.post_recv(QPN_B, &[to[0].sge(0, 20_000)]);
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Send, &[from[0].sge(0, 20_000)]),
    );
    run(&mut pair, &from, &to);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    assert!(to[0].contents(&pair.b, 0, 20_000) == data);
    let work = SendWork::new(SendOpcode::Write, &[from[0].sge(0, 20_000)])
        .remote(to[0].address + 30_000, to[0].tag);
    pair.a.post_send(QPN_A, &work);
    run(&mut pair, &from, &to);
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert!(to[0].contents(&pair.b, 30_000, 20_000) == data);
}

#[test]
fn frames_that_wait_for_a_page_are_bounded_and_the_rest_is_lost() {
    const SENT: usize = 100;
    const KEPT: usize = 64;
    let mut a = Node::new(1);
    let mut b = Node::new(2);
    let qkey = 0x1234;
    for (node, qpn) in [(&mut a, QPN_A), (&mut b, QPN_B)] {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            service: Service::Ud,
            log_blocks: 9,
            log_entries: 7,
            ..QpOptions::default()
        });
        node.start_datagrams(qpn, qkey);
    }
    let mut pair = Pair {
        a,
        b,
        passed: Vec::new(),
    };
    let to = [Paged::new(&mut pair.b, 0x201, 64 << 10)];
    let peer = pair.b.as_peer(QPN_B);
    for n in 0..SENT {
        pair.b.post_recv(QPN_B, &[to[0].sge(n as u64 * 64, 64)]);
        let work = SendWork::new(SendOpcode::Send, &[]).inline(&[n as u8; 8]);
        pair.a
            .post_send(QPN_A, &work.datagram(&peer.datagram(qkey)));
    }
    pair.exchange();
    let dropped = pair.b.engine.counters().rx_dropped;
    assert_eq!(dropped as usize, SENT - KEPT);
    run(&mut pair, &[], &to);
    assert_eq!(
        statuses(&pair.completions_b()),
        [CompletionStatus::Success; KEPT]
    );
    for n in 0..KEPT {
        let got = to[0].contents(&pair.b, n as u64 * 64 + 40, 8);
        assert_eq!(got, [n as u8; 8]);
    }
}

/// A small generator of random numbers, so that a failing case is its seed.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % below
    }
}

/// Pages come and go at random while a random program runs over a wire that loses, repeats and
/// reorders: every byte arrives, no old page is touched.
fn storm(seed: u64) {
    const SLOT: u64 = 16 << 10;
    const STEPS: u64 = 10;
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut pair = Pair::new(Setup {
        timeout: 12,
        ..Setup::default()
    });
    let mut a = [Paged::new(&mut pair.a, 0x101, SLOT * (STEPS + 1))];
    let mut b = [Paged::new(&mut pair.b, 0x201, SLOT * (STEPS + 1))];
    let mut expected = Vec::new();
    let mut sum = 0u64;
    for step in 0..STEPS {
        let at = step * SLOT;
        let length = (random.next(SLOT - 8) + 8) as u32;
        let data = pattern(seed ^ step, length as usize);
        let sge = a[0].sge(at, length);
        match random.next(4) {
            0 => {
                a[0].fill(&pair.a, at, &data);
                pair.b.post_recv(QPN_B, &[b[0].sge(at, length)]);
                pair.a
                    .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[sge]));
                expected.push((false, at, data));
            }
            1 => {
                a[0].fill(&pair.a, at, &data);
                let work =
                    SendWork::new(SendOpcode::Write, &[sge]).remote(b[0].address + at, b[0].tag);
                pair.a.post_send(QPN_A, &work);
                expected.push((false, at, data));
            }
            2 => {
                b[0].fill(&pair.b, at, &data);
                let work =
                    SendWork::new(SendOpcode::Read, &[sge]).remote(b[0].address + at, b[0].tag);
                pair.a.post_send(QPN_A, &work);
                expected.push((true, at, data));
            }
            _ => {
                // All on one word, so that one done twice shows.
                let work =
                    SendWork::new(SendOpcode::FetchAdd, &[a[0].sge(at, 8)]).part(&AtomicPart {
                        address: b[0].address + SLOT * STEPS,
                        rkey: b[0].tag,
                        reserved: 0,
                        operand: step + 1,
                        compare: 0,
                    });
                pair.a.post_send(QPN_A, &work);
                expected.push((true, at, sum.to_le_bytes().to_vec()));
                sum += step + 1;
            }
        }
    }
    let mut done = Vec::new();
    let mut waiting: [Vec<PageFault>; 2] = Default::default();
    for _ in 0..200_000 {
        pair.poll();
        let mut moved = false;
        for way in [Way::AToB, Way::BToA] {
            let (from, to) = match way {
                Way::AToB => (&mut pair.a, &mut pair.b),
                Way::BToA => (&mut pair.b, &mut pair.a),
            };
            let mut frames: Vec<_> = std::mem::take(&mut from.host.sent).into();
            if frames.len() > 1 && random.next(100) < 5 {
                let at = random.next(frames.len() as u64 - 1) as usize;
                frames.swap(at, at + 1);
            }
            for frame in frames {
                moved = true;
                match random.next(100) {
                    0..=2 => {}
                    3..=4 => {
                        to.receive(&frame);
                        to.receive(&frame);
                    }
                    _ => {
                        to.receive(&frame);
                    }
                }
                // In the middle of everything, pages go.
                if random.next(100) < 15 {
                    let region = match way {
                        Way::AToB => &mut b[0],
                        Way::BToA => &mut a[0],
                    };
                    let page = random.next(region.pages.len() as u64);
                    region.evict(to, page);
                }
            }
        }
        // Faults are dealt with late, one at a time, in any order.
        let [waiting_a, waiting_b] = &mut waiting;
        for (node, regions, waiting) in [
            (&mut pair.a, &mut a, waiting_a),
            (&mut pair.b, &mut b, waiting_b),
        ] {
            waiting.extend(take(node));
            if !waiting.is_empty() && random.next(100) < 50 {
                moved = true;
                let at = random.next(waiting.len() as u64) as usize;
                let fault = waiting.swap_remove(at);
                bring_in(node, regions, &fault);
            }
            if random.next(100) < 10 {
                let page = random.next(regions[0].pages.len() as u64);
                regions[0].evict(node, page);
            }
        }
        done.extend(statuses(&pair.completions_a()));
        pair.completions_b();
        if done.len() as u64 == STEPS {
            break;
        }
        if !moved && waiting.iter().all(Vec::is_empty) {
            pair.pass_time();
        }
    }
    assert_eq!(
        done,
        [CompletionStatus::Success; STEPS as usize],
        "seed {seed}"
    );
    for (at_a, at, data) in expected {
        let got = if at_a {
            a[0].contents(&pair.a, at, data.len())
        } else {
            b[0].contents(&pair.b, at, data.len())
        };
        assert!(got == data, "seed {seed}: data at {at:#x} differ");
    }
    let word = b[0].contents(&pair.b, SLOT * STEPS, 8);
    assert_eq!(word, sum.to_le_bytes(), "seed {seed}: atomics");
    a[0].assert_old_untouched(&pair.a);
    b[0].assert_old_untouched(&pair.b);
}

#[test]
fn pages_that_come_and_go_at_random_lose_nothing() {
    for seed in 1..=40 {
        storm(seed);
    }
}

/// Datagrams into pages that never come, as many as there may be; and of another process into pages that do.
#[test]
fn pages_that_never_come_leave_room_for_the_datagrams_of_others() {
    const QPS: u32 = 32;
    const KEPT: u64 = 64;
    const QKEY: u32 = 0x1234;
    const VICTIM: u32 = 0x700;
    let mut a = Node::new(1);
    let mut b = Node::new(2);
    for node in [&mut a, &mut b] {
        for qpn in (0x400..0x400 + QPS).chain([VICTIM]) {
            node.create_qp(QpOptions {
                qpn,
                pd: PD,
                service: Service::Ud,
                page: if qpn == VICTIM { 2 } else { 1 },
                log_blocks: 9,
                log_entries: 7,
                ..QpOptions::default()
            });
            node.start_datagrams(qpn, QKEY);
        }
    }
    let mut pair = Pair {
        a,
        b,
        passed: Vec::new(),
    };
    let never = Paged::new(&mut pair.b, 0x201, 64 << 10);
    let soon = [Paged::new(&mut pair.b, 0x301, 64 << 10)];
    let send = |pair: &mut Pair, qpn, byte| {
        let peer = pair.b.as_peer(qpn);
        let work = SendWork::new(SendOpcode::Send, &[]).inline(&[byte; 8]);
        pair.a.post_send(qpn, &work.datagram(&peer.datagram(QKEY)));
    };
    for n in 0..KEPT {
        for qpn in 0x400..0x400 + QPS {
            let sge = never.sge(n * 64, 64);
            pair.b.post_recv(qpn, &[sge]);
            send(&mut pair, qpn, n as u8);
        }
        pair.exchange();
        // So that the queue has room for those of the next ones.
        drain(&mut pair.a);
    }
    // He loses his own.
    let lost = pair.b.engine.counters().rx_dropped;
    assert_eq!(lost, u64::from(QPS) * KEPT / 2);
    for n in 0..8 {
        let sge = soon[0].sge(n * 5000, 64);
        pair.b.post_recv(VICTIM, &[sge]);
        send(&mut pair, VICTIM, n as u8);
    }
    pair.exchange();
    let mut received = Vec::new();
    for _ in 0..32 {
        for fault in take(&mut pair.b) {
            if fault.tag != never.tag {
                bring_in(&mut pair.b, &soon, &fault);
            }
        }
        pair.exchange();
        received.extend(drain(&mut pair.b));
    }
    assert_eq!(pair.b.engine.counters().rx_dropped, lost);
    assert_eq!(statuses(&received), [CompletionStatus::Success; 8]);
}
