// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What a completion costs does not depend on how many queue pairs there are.
//!
//! Nothing is timed: what the device does to host memory is counted, and frames.

use crate::wire::*;
use std::fmt;

/// What was done for a number of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    completions: usize,
    /// Accesses to memory of the machine that sends, and of the other.
    accesses: [usize; 2],
    frames: usize,
    doorbells: usize,
}

impl Cost {
    fn per_completion(&self) -> [f64; 4] {
        [
            self.accesses[0],
            self.accesses[1],
            self.frames,
            self.doorbells,
        ]
        .map(|count| count as f64 / self.completions as f64)
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "accesses here, there, frames, doorbells: {:?} for each of {}",
            self.per_completion(),
            self.completions
        )
    }
}

/// So many queue pairs, each of which was visited before: a first visit also fills what the device
/// remembers.
fn visited(qps: u32, batch: u32) -> Many {
    let mut many = Many::new(qps);
    for _ in 0..qps.div_ceil(batch) {
        many.visit(batch);
    }
    many
}

/// Writes over `qps` queue pairs in turn, `batch` of them at a time.
fn visits(qps: u32, batch: u32, count: u32) -> Cost {
    let mut many = visited(qps, batch);
    let mut cost = Cost::default();
    let doorbells = many.pair.a.send_doorbells;
    for node in [&many.pair.a, &many.pair.b] {
        node.host.accesses.replace(Some(Vec::new()));
    }
    for _ in 0..count / batch {
        let (completions, frames) = many.visit(batch);
        cost.completions += completions;
        cost.frames += frames;
    }
    cost.accesses = [&many.pair.a, &many.pair.b]
        .map(|node| node.host.accesses.replace(None).map_or(0, |all| all.len()));
    cost.doorbells = (many.pair.a.send_doorbells - doorbells) as usize;
    assert_eq!(cost.completions as u32, count);
    assert_eq!(many.pair.a.engine.counters().retransmissions, 0);
    cost
}

#[test]
fn a_completion_costs_the_same_with_one_queue_pair_and_with_many() {
    let alone = visits(1, 1, 256);
    for qps in [16, 100, 1500] {
        let among_many = visits(qps, 1, 256);
        assert_eq!(among_many, alone, "{qps}: {among_many}; alone: {alone}");
    }
    let few = visits(16, 16, 1024);
    for qps in [112, 1504] {
        let many = visits(qps, 16, 1024);
        assert_eq!(many, few, "{qps}: {many}; 16: {few}");
    }
    // Turns shared with others make it cheaper, never dearer.
    for (batch, single) in few.per_completion().iter().zip(alone.per_completion()) {
        assert!(*batch <= single, "{few}; alone: {alone}");
    }
}

/// Nanoseconds between two posts of a program that is quick.
const SOON: u64 = 5_000;

/// A program that writes over several queue pairs in turn, each while the message before is under way, rings
/// hardly any doorbell, and all messages go out at once; when it stops, the device asks for doorbells again.
#[test]
fn who_posts_on_several_queue_pairs_in_turn_rings_no_doorbells() {
    for qps in [2, 16, 100] {
        let mut many = Many::new(qps);
        for _ in 0..2 * qps {
            many.visit_within(SOON, true);
        }
        let before = many.pair.a.send_doorbells;
        for _ in 0..4 * qps {
            assert_eq!(many.visit_within(SOON, true), 1, "of {qps}");
        }
        let rung = many.pair.a.send_doorbells - before;
        assert!(rung * 20 <= 4 * u64::from(qps), "{rung} of {qps}");
        assert!(
            many.awake() * 20 >= qps as usize * 19,
            "{} of {qps}",
            many.awake()
        );
        many.arrive();
        many.pair.run();
        assert_eq!(many.awake(), 0);
    }
}

/// No more than so many are looked at for the sake of others, and none for longer than a millisecond; the
/// others ring.
#[test]
fn few_queue_pairs_are_looked_at_for_the_sake_of_others() {
    let mut many = Many::new(1000);
    for _ in 0..3000 {
        many.visit_within(SOON, true);
        assert!(many.awake() <= 129, "{} of them", many.awake());
    }
    let mut many = Many::new(10);
    for _ in 0..40 {
        many.visit_within(SOON, true);
    }
    assert_eq!(many.awake(), 10);
    // Two of them go on.
    for round in 0..300 {
        many.only(round % 2);
        many.visit_within(SOON, true);
    }
    assert_eq!(many.awake(), 2);
}

/// One that answers what its peer asks has a doorbell for each answer: who asked waits for it.
#[test]
fn answers_in_turn_are_not_held_up() {
    let mut many = Many::new(4);
    for _ in 0..16 {
        many.is_asked();
        many.visit_within(SOON, true);
    }
    let before = many.pair.a.send_doorbells;
    for _ in 0..16 {
        many.is_asked();
        many.visit_within(SOON, true);
    }
    assert_eq!(many.pair.a.send_doorbells - before, 16);
}

/// Where each message waits for the one before, on whichever queue pair, each has a doorbell.
#[test]
fn one_message_at_a_time_rings() {
    for qps in [1, 2, 16] {
        let mut many = Many::new(qps);
        for _ in 0..4 * qps {
            assert_eq!(many.visit_within(SOON, false), 1);
        }
        assert_eq!(many.pair.a.send_doorbells, 4 * u64::from(qps), "of {qps}");
    }
}
