// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What a completion costs does not depend on how many queue pairs or handlers there are.
//!
//! Nothing is timed: what the device does to host memory is counted, and frames, and instructions.

use crate::steps;
use crate::wire::*;
use ferrite_abi::*;
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

/// Of the completion queues of handlers.
const CQ_LOG_ENTRIES: u8 = 4;

/// Completion queues with an event queue each, and a queue pair for each of them.
struct Handlers {
    many: Many,
    count: u16,
    rounds: u32,
}

impl Handlers {
    fn new(count: u16) -> Self {
        let mut many = Many::new(1);
        let node = &mut many.pair.a;
        for number in 1..count {
            node.create_eq(EQ_FIRST_HANDLER + number, 2);
        }
        for number in 0..count {
            node.create_cq(
                0x100 + u32::from(number),
                EQ_FIRST_HANDLER + number,
                CQ_LOG_ENTRIES,
            );
        }
        many.spread(count.into());
        let mut handlers = Self {
            many,
            count,
            rounds: 0,
        };
        // The first time, the device also fetches what it then remembers.
        for _ in 0..8 {
            handlers.event();
        }
        handlers
    }

    /// A completion, its event and its interrupt, on one handler after the other.
    fn event(&mut self) {
        let number = (self.rounds % u32::from(self.count)) as u16;
        let (cqn, eqn) = (0x100 + u32::from(number), EQ_FIRST_HANDLER + number);
        let sequence = (self.rounds / u32::from(self.count)) as u8 & 3;
        let pair = &mut self.many.pair;
        pair.a.ring_eq(eqn, true);
        pair.a.arm_cq(cqn, sequence, false);
        self.many.post(number.into());
        let pair = &mut self.many.pair;
        pair.exchange();
        assert!(pair.a.poll_cq(cqn).is_some());
        assert_eq!(
            pair.a.event_codes(eqn),
            [(EventCode::Completion, cqn)],
            "round {} of {} handlers",
            self.rounds,
            self.count
        );
        self.rounds += 1;
    }
}

#[test]
fn as_many_events_as_completions_whatever_the_number_of_handlers() {
    // As often round the ring of each of them as round that of one: at its end the device looks how
    // far the consumer is.
    const ROUNDS: u64 = 8 * (1 << CQ_LOG_ENTRIES);
    let cost = |count: u16| {
        let mut handlers = Handlers::new(count);
        let node = &handlers.many.pair.a;
        let (events, interrupts) = {
            let counters = node.engine.counters();
            (counters.events, counters.interrupts)
        };
        node.host.accesses.replace(Some(Vec::new()));
        for _ in 0..ROUNDS {
            handlers.event();
        }
        let node = &handlers.many.pair.a;
        let accesses = node.host.accesses.replace(None).map_or(0, |all| all.len());
        let counters = node.engine.counters();
        assert_eq!(counters.events - events, ROUNDS);
        assert_eq!(counters.interrupts - interrupts, ROUNDS);
        accesses
    };
    let one = cost(1);
    for handlers in [2, 4, 8] {
        assert_eq!(cost(handlers), one, "{handlers} handlers");
    }
}

/// Completions whose instructions are counted; each takes thousands of steps.
const COUNTED: u32 = 16;

/// Instructions of both engines and of the test's driver for each of [`COUNTED`] times of something.
fn instructions(mut something: impl FnMut()) -> f64 {
    let all = steps::count(|| (0..COUNTED).for_each(|_| something()));
    all as f64 / f64::from(COUNTED)
}

/// Fails where costs differ by more than this part from that of the first number.
fn is_flat(costs: &[(u32, f64)], part: f64) {
    let (_, first) = costs[0];
    for (number, cost) in costs {
        assert!(
            (cost - first).abs() <= first * part,
            "{cost:.0} instructions with {number}; all: {costs:.0?}"
        );
    }
}

#[test]
fn as_many_instructions_for_a_completion_with_one_queue_pair_and_with_many() {
    let costs = [1, 100, 1500].map(|qps| {
        let mut many = visited(qps, 1);
        (qps, instructions(|| assert_eq!(many.visit(1).0, 1)))
    });
    is_flat(&costs, 0.05);
}

#[test]
fn as_many_instructions_for_an_event_with_one_handler_and_with_eight() {
    let costs = [1, 8].map(|count| {
        let mut handlers = Handlers::new(count);
        (count.into(), instructions(|| handlers.event()))
    });
    // Most of it is the test's own driver, and the same.
    is_flat(&costs, 0.01);
}
