// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The longest message, 2 GiB. The memory behind it is a few megabytes, seen again and again.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, SendWork};

const PAGE_SHIFT: u8 = 21;
const PAGE: u64 = 1 << PAGE_SHIFT;

/// Registers `length` bytes of which every page is the same. Returns the address of that page.
fn register_repeated(node: &mut Node, tag: u32, address: u64, length: u64) -> u64 {
    let page = node.allocate(PAGE);
    let count = length.div_ceil(PAGE) as usize;
    let tables: Vec<u64> = vec![page; count]
        .chunks(ATT_TABLE_ENTRIES)
        .map(|chunk| node.table(chunk))
        .collect();
    let root = node.table(&tables);
    node.execute(&RegisterRegion {
        tag,
        pd: PD,
        access: ALL,
        flags: 0,
        address,
        buffer: Buffer {
            root,
            length,
            fbo: 0,
            page_shift: PAGE_SHIFT,
            order: AttOrder::Second.number(),
            reserved: 0,
        },
    });
    page
}

fn sge(address: u64, length: u64, lkey: u32) -> Sge {
    Sge {
        address,
        length: length as u32,
        lkey,
    }
}

#[test]
fn the_longest_message_arrives_by_send_write_and_read() {
    let mut pair = Pair::new(Setup {
        log_mtu: 12,
        ..Setup::default()
    });
    let length = u64::from(MAX_MESSAGE);
    let from = register_repeated(&mut pair.a, 0x101, 0, length);
    let to = register_repeated(&mut pair.b, 0x201, 0, length);
    let data = pattern(1, PAGE as usize);
    ferrite_engine::HostMemory::write(&pair.a.host, from, &data).unwrap();
    let contents = |node: &Node, page| {
        let mut bytes = vec![0; PAGE as usize];
        ferrite_engine::HostMemory::read(&node.host, page, &mut bytes).unwrap();
        bytes
    };
    let clear = |node: &mut Node, page| {
        ferrite_engine::HostMemory::write(&node.host, page, &vec![0; PAGE as usize]).unwrap();
    };
    pair.b.post_recv(QPN_B, &[sge(0, length, 0x201)]);
    pair.a.post_send(
        QPN_A,
        &SendWork::new(SendOpcode::Send, &[sge(0, length, 0x101)]),
    );
    pair.run();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(pair.completions_b()[0].byte_count, MAX_MESSAGE);
    assert!(contents(&pair.b, to) == data);

    clear(&mut pair.b, to);
    let work = SendWork::new(SendOpcode::Write, &[sge(0, length, 0x101)]).remote(0, 0x201);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert!(contents(&pair.b, to) == data);

    clear(&mut pair.a, from);
    let work = SendWork::new(SendOpcode::Read, &[sge(0, length, 0x101)]).remote(0, 0x201);
    pair.a.post_send(QPN_A, &work);
    pair.run();
    let done = pair.completions_a();
    assert_eq!(statuses(&done), [CompletionStatus::Success]);
    assert_eq!(done[0].byte_count, MAX_MESSAGE);
    assert!(contents(&pair.a, from) == data);
    assert_eq!(pair.a.engine.counters().retransmissions, 0);
}

#[test]
fn one_byte_more_than_the_longest_message_is_refused() {
    for opcode in [SendOpcode::Send, SendOpcode::Write, SendOpcode::Read] {
        let mut pair = Pair::new(Setup::default());
        let length = u64::from(MAX_MESSAGE) + 1;
        register_repeated(&mut pair.a, 0x101, 0, length);
        register_repeated(&mut pair.b, 0x201, 0, length);
        let work = SendWork::new(opcode, &[sge(0, length, 0x101)]);
        let work = match opcode {
            SendOpcode::Send => work,
            _ => work.remote(0, 0x201),
        };
        pair.a.post_send(QPN_A, &work);
        pair.run();
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::LocalLength]
        );
        assert_eq!(pair.b.engine.counters().rx_packets, 0);
    }
}

#[test]
fn the_longest_message_in_the_smallest_packets_starts_again_after_loss() {
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let setup = Setup {
            log_mtu: 8,
            ..Setup::default()
        };
        let mut pair = Pair::new(setup);
        let length = u64::from(MAX_MESSAGE);
        register_repeated(&mut pair.a, 0x101, 0, length);
        register_repeated(&mut pair.b, 0x201, 0, length);
        let work = SendWork::new(opcode, &[sge(0, length, 0x101)]).remote(0, 0x201);
        pair.a.post_send(QPN_A, &work);
        let mut first = Vec::new();
        for _ in 0..3 {
            pair.poll();
            let frames = std::mem::take(&mut pair.a.host.sent);
            first.push(frames.front().expect("sent again").len());
            assert!(pair.pass_time());
        }
        assert_eq!(first, [first[0]; 3]);
        // Now the wire is good for a while.
        for _ in 0..10 {
            pair.poll();
            for frame in std::mem::take(&mut pair.a.host.sent) {
                pair.b.receive(&frame);
            }
            pair.b.settle();
            for frame in std::mem::take(&mut pair.b.host.sent) {
                pair.a.receive(&frame);
            }
        }
        assert_eq!(pair.a.qp_state(QPN_A), QueuePairStateCode::Rts);
        let counters = pair.b.engine.counters();
        let most = counters.rx_packets.max(counters.tx_packets);
        assert!(most > 2000, "{most}");
        assert_eq!(pair.completions_a(), []);
    }
}
