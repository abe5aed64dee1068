// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Device memory: reached by the host through the BAR, by work requests, and by a peer.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::device_memory::DEVICE_MEMORY_SIZE;
use ferrite_engine::testing::{Node, SendWork};

const TAG: u32 = 0x301;
/// Addresses count from zero, as the verbs have it.
const RIGHTS: u32 = ALL | ACCESS_ZERO_BASED;
const SIZE: u64 = DEVICE_MEMORY_SIZE as u64;

/// Where it lies in the doorbell BAR.
fn start(node: &Node) -> u64 {
    node.engine.config().device_memory_offset()
}

fn store(node: &mut Node, offset: u64, size: usize, value: u64) {
    let at = start(node) + offset;
    node.engine
        .mmio_write(BAR_DOORBELLS, at, size, value, node.now, &mut node.host);
}

fn load(node: &mut Node, offset: u64, size: usize) -> u64 {
    let at = start(node) + offset;
    node.engine.mmio_read(BAR_DOORBELLS, at, size)
}

fn store_all(node: &mut Node, offset: u64, bytes: &[u8]) {
    for (at, byte) in (offset..).zip(bytes) {
        store(node, at, 1, u64::from(*byte));
    }
}

fn load_all(node: &mut Node, offset: u64, length: usize) -> Vec<u8> {
    (offset..)
        .take(length)
        .map(|at| load(node, at, 1) as u8)
        .collect()
}

fn register(node: &mut Node, offset: u64, length: u64) -> CommandStatus {
    node.command(
        CommandOpcode::RegisterRegion,
        &RegisterRegion {
            tag: TAG,
            pd: PD,
            access: RIGHTS,
            flags: REGION_DEVICE_MEMORY,
            address: 0,
            buffer: Buffer::contiguous(offset, length),
        },
    )
}

fn sge(address: u64, length: u32) -> Sge {
    Sge {
        address,
        length,
        lkey: TAG,
    }
}

#[test]
fn the_host_reaches_it_through_the_bar() {
    let mut node = Node::new(1);
    let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    assert_eq!(node.read_register(REG_DEVICE_MEMORY_SIZE, 8), SIZE);
    let place = node.read_register(REG_DEVICE_MEMORY_OFFSET, 8);
    assert_eq!(
        (place, place % (1 << DOORBELL_MAX_LOG_STRIDE)),
        (start(&node), 0)
    );
    assert_ne!(caps.features & FEATURE_DEVICE_MEMORY, 0);
    store(&mut node, 0, 8, 0x8877_6655_4433_2211);
    assert_eq!(load(&mut node, 0, 4), 0x4433_2211);
    assert_eq!(load(&mut node, 3, 2), 0x5544);
    store(&mut node, 1, 4, 0xddcc_bbaa);
    assert_eq!(load(&mut node, 0, 8), 0x8877_66dd_ccbb_aa11);
    store(&mut node, SIZE - 1, 1, 0x7f);
    assert_eq!(load(&mut node, SIZE - 1, 1), 0x7f);
    let before = start(&node);
    let bad = node.engine.counters().bad_doorbells;
    // What is behind it is nothing, and what stands in front are doorbells.
    store(&mut node, SIZE - 1, 2, 0);
    store(&mut node, SIZE, 8, 1);
    assert_eq!(node.engine.counters().bad_doorbells, bad + 2);
    assert_eq!(load(&mut node, SIZE - 1, 1), 0x7f);
    assert_eq!(load(&mut node, SIZE, 8), 0);
    assert_eq!(node.engine.mmio_read(BAR_DOORBELLS, before - 4, 8), 0);
    // Loads and stores there are neither register accesses nor doorbells.
    let counters = node.engine.counters().clone();
    store(&mut node, DOORBELL_SEND as u64, 8, 2);
    load(&mut node, 0, 4);
    assert_eq!(*node.engine.counters(), counters);
}

#[test]
fn work_requests_send_from_it_and_receive_into_it() {
    let mut pair = Pair::new(Setup::default());
    let data = pattern(4, 5000);
    assert_eq!(register(&mut pair.a, 4096, 8192), CommandStatus::Ok);
    assert_eq!(register(&mut pair.b, 100, 8192), CommandStatus::Ok);
    store_all(&mut pair.a, 4096 + 7, &data);
    pair.b.post_recv(QPN_B, &[sge(11, 5000)]);
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[sge(7, 5000)]));
    pair.exchange();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    assert_eq!(load_all(&mut pair.b, 111, 5000), data);
    assert_eq!(load_all(&mut pair.b, 110, 1), [0]);
    // Beyond the region is refused, though there is memory.
    pair.a
        .post_send(QPN_A, &SendWork::new(SendOpcode::Send, &[sge(8192, 1)]));
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::LocalProtection]
    );
}

#[test]
fn a_peer_writes_reads_and_changes_it() {
    let mut pair = Pair::new(Setup::default());
    let data = pattern(5, 5000);
    let local = pair.a.register(0x101, PD, ALL, 16 << 10);
    pair.a.fill(&local, 0, &data);
    assert_eq!(register(&mut pair.b, SIZE - 8192, 8192), CommandStatus::Ok);
    let write = SendWork::new(SendOpcode::Write, &[local.sge(0, 5000)]).remote(3000, TAG);
    pair.a.post_send(QPN_A, &write);
    let read = SendWork::new(SendOpcode::Read, &[local.sge(8000, 5000)]).remote(3000, TAG);
    pair.a.post_send(QPN_A, &read);
    let add = SendWork::new(SendOpcode::FetchAdd, &[local.sge(0, 8)]).part(&AtomicPart {
        address: 16,
        rkey: TAG,
        reserved: 0,
        operand: 5,
        compare: 0,
    });
    pair.a.post_send(QPN_A, &add);
    let swap = SendWork::new(SendOpcode::CompareSwap, &[local.sge(8, 8)]).part(&AtomicPart {
        address: 16,
        rkey: TAG,
        reserved: 0,
        operand: 0x1234,
        compare: 5,
    });
    pair.a.post_send(QPN_A, &swap);
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::Success; 4]
    );
    assert_eq!(load_all(&mut pair.b, SIZE - 8192 + 3000, 5000), data);
    assert_eq!(pair.a.contents(&local, 8000, 5000), data);
    assert_eq!(pair.a.contents(&local, 8, 8), 5u64.to_le_bytes());
    assert_eq!(load(&mut pair.b, SIZE - 8192 + 16, 8), 0x1234);
    let beyond = SendWork::new(SendOpcode::Write, &[local.sge(0, 2)]).remote(8191, TAG);
    pair.a.post_send(QPN_A, &beyond);
    pair.exchange();
    assert_eq!(
        statuses(&pair.completions_a()),
        [CompletionStatus::RemoteAccess]
    );
}

#[test]
fn a_window_gives_a_part_of_it() {
    let mut pair = Pair::new(Setup::default());
    let local = pair.a.register(0x101, PD, ALL, 4096);
    pair.a.fill(&local, 0, &pattern(6, 4096));
    let status = pair.b.command(
        CommandOpcode::RegisterRegion,
        &RegisterRegion {
            tag: TAG,
            pd: PD,
            access: RIGHTS | ACCESS_WINDOW_BIND,
            flags: REGION_DEVICE_MEMORY,
            address: 0,
            buffer: Buffer::contiguous(0x2000, 4096),
        },
    );
    assert_eq!(status, CommandStatus::Ok);
    pair.b.execute(&AllocateTag {
        tag: 0x401,
        pd: PD,
        kind: TagKind::Window1.number(),
        reserved: [0; 3],
        max_pages: 0,
    });
    let bind = SendWork::new(SendOpcode::Bind, &[]).part(&BindPart {
        window: 0x401,
        new_window: 0x402,
        region: TAG,
        access: ACCESS_REMOTE_WRITE | ACCESS_ZERO_BASED,
        address: 500,
        length: 20,
        reserved: [0; 2],
    });
    pair.b.post_send(QPN_B, &bind);
    pair.exchange();
    assert_eq!(statuses(&pair.completions_b()), [CompletionStatus::Success]);
    let write = SendWork::new(SendOpcode::Write, &[local.sge(0, 20)]).remote(0, 0x402);
    pair.a.post_send(QPN_A, &write);
    pair.exchange();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    let got = load_all(&mut pair.b, 0x2000 + 499, 22);
    assert_eq!(got[1..21], pattern(6, 4096)[..20]);
    assert_eq!((got[0], got[21]), (0, 0));
}

#[test]
fn a_reset_clears_it() {
    let mut node = Node::new(1);
    store(&mut node, 0, 8, u64::MAX);
    store(&mut node, SIZE - 8, 8, u64::MAX);
    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
    assert_eq!(load(&mut node, 0, 8), 0);
    assert_eq!(load(&mut node, SIZE - 8, 8), 0);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut node = Node::new(1);
    for (offset, length) in [(SIZE, 1), (0, SIZE + 1), (SIZE - 1, 2), (1 << 40, 1)] {
        assert_eq!(
            register(&mut node, offset, length),
            CommandStatus::BadParameter
        );
    }
    assert_eq!(register(&mut node, 0, SIZE), CommandStatus::Ok);
}
