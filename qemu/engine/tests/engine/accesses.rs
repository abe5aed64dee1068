// SPDX-License-Identifier: Apache-2.0 OR MIT

//! In which order the device touches host memory: chapter 13 of the specification.
//!
//! Another processor that finds an entry valid finds all of it, and one that posts while the device
//! falls asleep is either seen or told to ring. What two processors see of that is tested beside the
//! code of the queues; here it is what the device does, access by access.

use ferrite_abi::*;
use ferrite_engine::testing::{Access, Node, QpOptions, Region, SendWork};
use std::ops::Range;

/// A machine with two queue pairs connected to each other, and memory; what the device does to memory
/// from now on is written down.
fn connected() -> (Node, Region) {
    let mut node = Node::new(1);
    for qpn in [2, 3] {
        node.create_qp(QpOptions {
            qpn,
            ..QpOptions::default()
        });
    }
    let (two, three) = (node.as_peer(2), node.as_peer(3));
    node.connect(2, &three);
    node.connect(3, &two);
    let region = node.register(0x101, 1, ACCESS_LOCAL_WRITE, 8192);
    node.host.accesses.replace(Some(Vec::new()));
    (node, region)
}

/// A machine with two queue pairs connected to each other and everything armed, after ten messages;
/// and what the device did to memory meanwhile.
fn messages() -> (Node, Vec<Access>) {
    let (mut node, region) = connected();
    for round in 0..10 {
        node.arm_cq(1, round, false);
        node.ring_eq(EQ_FIRST_HANDLER, true);
        node.post_recv(3, &[region.sge(4096, 64)]);
        node.post_send(2, &SendWork::new(SendOpcode::Send, &[region.sge(0, 64)]));
        node.settle();
        // An acknowledgement may be owed for a while.
        node.now += 1_000_000_000;
        node.settle();
        while node.poll_cq(1).is_some() {}
        assert!(!node.events(EQ_FIRST_HANDLER).is_empty());
    }
    let accesses = node.host.accesses.replace(None).unwrap_or_default();
    (node, accesses)
}

/// Checks all entries of `size` bytes written to `ring`: the word at `valid`, which is stored as a
/// whole, is the last that is written of an entry, and all others were written before. Returns how
/// many there were.
fn check_entries(accesses: &[Access], ring: &Range<u64>, size: u64, valid: u64) -> usize {
    let slots = ((ring.end - ring.start) / size) as usize;
    // Bytes of each slot written since it was last valid.
    let mut written = vec![0; slots];
    let mut entries = 0;
    for access in accesses {
        match *access {
            Access::Write(address, length) if ring.contains(&address) => {
                let slot = (address - ring.start) / size;
                assert_eq!(
                    (address - ring.start + length as u64 - 1) / size,
                    slot,
                    "one write for two entries"
                );
                let within = (address - ring.start) % size;
                let word = valid..valid + 8;
                assert!(
                    within >= word.end || within + length as u64 <= word.start,
                    "the word that makes an entry valid may tear"
                );
                written[slot as usize] += length as u64;
            }
            Access::Store(address, _) if ring.contains(&address) => {
                let slot = ((address - ring.start) / size) as usize;
                assert_eq!((address - ring.start) % size, valid);
                assert_eq!(
                    written[slot],
                    size - 8,
                    "entry {slot} became valid before it was whole"
                );
                written[slot] = 0;
                entries += 1;
            }
            _ => {}
        }
    }
    assert!(
        written.iter().all(|&bytes| bytes == 0),
        "something was written after the entry was valid"
    );
    entries
}

#[test]
fn a_completion_is_whole_before_it_is_valid() {
    let (node, accesses) = messages();
    let size = size_of::<CompletionEntry>() as u64;
    let valid = COMPLETION_VALID_OFFSET as u64;
    let entries = check_entries(&accesses, &node.completion_ring(1), size, valid);
    assert_eq!(entries, 20);
}

#[test]
fn an_event_is_whole_before_it_is_valid_and_comes_after_its_completion() {
    let (node, accesses) = messages();
    let size = size_of::<EventEntry>() as u64;
    let ring = node.event_ring(EQ_FIRST_HANDLER);
    let events = check_entries(&accesses, &ring, size, 0);
    assert!(events >= 10, "{events} events");
    let completions = node.completion_ring(1);
    let mut told = true;
    for access in &accesses {
        match access {
            Access::Store(address, _) if completions.contains(address) => told = false,
            Access::Store(address, _) if ring.contains(address) => {
                assert!(!told, "an event before its completion");
                told = true;
            }
            _ => {}
        }
    }
}

#[test]
fn data_is_in_place_before_the_completion_that_tells_of_it() {
    let (mut node, region) = connected();
    node.post_recv(3, &[region.sge(4096, 64)]);
    node.post_send(2, &SendWork::new(SendOpcode::Send, &[region.sge(0, 64)]));
    node.settle();
    let accesses = node.host.accesses.replace(None).unwrap_or_default();
    let completions = node.completion_ring(1);
    let pages = &region.pages;
    let data = accesses.iter().position(|access| {
        matches!(access, Access::Write(address, 64)
            if pages.iter().any(|page| (*page..page + 4096).contains(address)))
    });
    let first = accesses.iter().position(
        |access| matches!(access, Access::Store(address, _) if completions.contains(address)),
    );
    assert!(data.expect("the data") < first.expect("a completion"));
}

#[test]
fn a_device_that_falls_asleep_looks_once_more_behind_a_full_barrier() {
    let (node, accesses) = messages();
    let record = node.qp_record(2);
    let (producer, wake) = (record, record + 64);
    let mut naps = 0;
    for (index, access) in accesses.iter().enumerate() {
        if *access != Access::Store(wake, 1) {
            continue;
        }
        naps += 1;
        let after = &accesses[index + 1..];
        let look = after
            .iter()
            .position(|next| *next == Access::Load(producer));
        let fence = after.iter().position(|next| *next == Access::Fence);
        assert!(
            fence.expect("no barrier at all") < look.expect("no look at all"),
            "it looks before others can see that it sleeps"
        );
    }
    assert!(naps >= 10, "{naps} naps");
}
