// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the engine costs by itself: two engines and a good wire in one thread, no guest, no socket.
//!
//! Numbers are of both sides together and hold the best of several runs. They are for comparison
//! on one machine, before and after a change; nothing is asserted here.
//!
//! With `small` or `large` as argument it only streams so many messages of that size, for tools
//! that count instructions (`valgrind --tool=callgrind`): the difference of two counts is free of
//! what it costs to begin. With `spread`, a number of queue pairs and one of rounds it writes 64
//! bytes over all of them in turn, 16 at a time.

#[allow(dead_code)] // The tests use the rest of it.
#[path = "../tests/engine/wire.rs"]
mod wire;

use ferrite_abi::*;
use ferrite_engine::testing::{QpOptions, SendWork};
use std::time::Instant;
use wire::*;

const MESSAGE: u32 = 1 << 20;
const SMALL: u32 = 64;
/// Small messages that are posted before the engines run.
const BATCH: u32 = 16;
const ROUNDS: usize = 5;

struct Bench {
    pair: Pair,
    /// Tags at both ends.
    from: ferrite_engine::testing::Region,
    to: ferrite_engine::testing::Region,
}

impl Bench {
    /// Two connected queue pairs among so many others, and regions.
    fn new(qps: u32, regions: u32) -> Self {
        let mut pair = Pair::new(Setup {
            log_mtu: 12,
            ..Setup::default()
        });
        let from = pair.a.register(0x101, PD, ALL, MESSAGE.into());
        let to = pair.b.register(0x201, PD, ALL, MESSAGE.into());
        for node in [&mut pair.a, &mut pair.b] {
            let template = node.qp_template(QpOptions::default());
            for number in 0..qps {
                node.execute(&CreateQueuePair {
                    qpn: 0x100 + number,
                    ..template
                });
            }
            let memory = node.allocate(4096);
            for number in 0..regions {
                node.execute(&RegisterRegion {
                    tag: 0x10_0000 + (number << 8),
                    pd: PD,
                    access: ALL,
                    flags: 0,
                    address: 0x1_0000_0000 + u64::from(number) * 4096,
                    buffer: Buffer::contiguous(memory, 4096),
                });
            }
        }
        Self { pair, from, to }
    }

    /// Nanoseconds of the best of some runs of `once`, by the `count` things it does.
    fn best(&mut self, count: u32, mut once: impl FnMut(&mut Self)) -> f64 {
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            once(self);
            best = best.min(start.elapsed().as_nanos() as f64 / f64::from(count));
        }
        best
    }

    fn write_packet(&mut self) -> f64 {
        const COUNT: u32 = 8;
        self.best(COUNT * (MESSAGE >> 12), |bench| {
            for _ in 0..COUNT {
                let work = SendWork::new(SendOpcode::Write, &[bench.from.sge(0, MESSAGE)])
                    .remote(bench.to.address, bench.to.tag)
                    .flags(SEND_SIGNALED);
                bench.pair.a.post_send(QPN_A, &work);
                bench.pair.exchange();
                assert_eq!(bench.pair.completions_a().len(), 1);
            }
        })
    }

    /// Sends of 64 bytes, all signaled: one completion each on both sides.
    fn small_send(&mut self) -> f64 {
        const COUNT: u32 = 200;
        self.best(COUNT * BATCH, |bench| {
            for _ in 0..COUNT {
                for _ in 0..BATCH {
                    let sge = bench.to.sge(0, SMALL);
                    bench.pair.b.post_recv(QPN_B, &[sge]);
                    let work = SendWork::new(SendOpcode::Send, &[bench.from.sge(0, SMALL)])
                        .flags(SEND_SIGNALED);
                    bench.pair.a.post_send(QPN_A, &work);
                }
                bench.pair.exchange();
                assert_eq!(bench.pair.completions_a().len(), BATCH as usize);
                assert_eq!(bench.pair.completions_b().len(), BATCH as usize);
            }
        })
    }
}

/// Streams `rounds` rounds of messages and says nothing.
fn stream(kind: &str, rounds: u32) {
    let mut bench = Bench::new(0, 0);
    for _ in 0..rounds {
        match kind {
            "small" => bench.small_send(),
            _ => bench.write_packet(),
        };
    }
}

/// Visits `qps` queue pairs in turn, [`BATCH`] at a time, and says nothing.
fn spread(qps: u32, rounds: u32) {
    let mut many = Many::new(qps);
    for _ in 0..rounds {
        assert_eq!(many.visit(BATCH).0, BATCH as usize);
    }
}

fn main() {
    // `cargo bench` adds an argument of its own.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [kind @ ("small" | "large"), rounds] =
        arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        stream(kind, rounds.parse().expect("a number of rounds"));
        return;
    }
    if let [kind, qps, rounds] = &arguments[..] {
        if kind == "spread" {
            let number = |text: &str| text.parse().expect("a number");
            spread(number(qps), number(rounds));
            return;
        }
    }
    // Memory and clock of the processor get warm.
    Bench::new(0, 0).write_packet();
    println!("ns per 4 KiB packet of a write, ns per 64 B send with both completions");
    for (qps, regions) in [
        (0, 0),
        (100, 0),
        (10_000, 0),
        (0, 1_000),
        (0, 100_000),
        (10_000, 100_000),
    ] {
        let mut bench = Bench::new(qps, regions);
        let (packet, send) = (bench.write_packet(), bench.small_send());
        println!("{qps:6} other queue pairs, {regions:7} regions: {packet:7.0} {send:7.0}");
    }
}
