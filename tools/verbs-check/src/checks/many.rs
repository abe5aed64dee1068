// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many queue pairs at once.

use super::data::OPERATIONS;
use crate::bench::{Bench, Message, Pair, PairOptions};
use crate::report::{Check, Report};

const PAIRS: usize = 64;
const ROUNDS: usize = 3;

pub fn run(bench: &mut Bench, report: &mut Report) {
    let result = mixed(bench);
    report.enter(
        &format!("many: {PAIRS} queue pairs with mixed operations"),
        result,
    );
    report.enter("many: destroy", bench.reset());
}

fn mixed(bench: &mut Bench) -> Check {
    let options = PairOptions {
        size: 128 << 10,
        ..Default::default()
    };
    let pairs: Vec<Pair> = (0..PAIRS)
        .map(|_| bench.pair(&options))
        .collect::<Check<_>>()?;
    for round in 0..ROUNDS {
        // All are posted before any is waited for.
        let mut posted = Vec::new();
        for (index, pair) in pairs.iter().enumerate() {
            let (_, opcode) = OPERATIONS[(index + round) % OPERATIONS.len()];
            let length = 1 + (index * 977 + round * 31_337) % 60_000;
            let message = Message::simple(opcode, length);
            let seed = bench.prepare(pair, &message)?;
            posted.push((message, seed));
        }
        for (pair, (message, seed)) in pairs.iter().zip(&posted) {
            bench.post(pair, message, *seed)?;
        }
        for (pair, (message, seed)) in pairs.iter().zip(&posted) {
            bench.finish(pair, message, *seed)?;
        }
        bench.turn();
        let pairs: Vec<Pair> = pairs
            .iter()
            .map(|pair| Pair {
                here: pair.there,
                there: pair.here,
            })
            .collect();
        let mut result = Ok(());
        for pair in &pairs {
            let message = Message::simple(crate::sys::IBV_WR_RDMA_WRITE_WITH_IMM, 3000);
            result = bench.transfer(pair, &message);
            if result.is_err() {
                break;
            }
        }
        bench.turn();
        result?;
    }
    Ok(())
}
