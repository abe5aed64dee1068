// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The extended interfaces: `ibv_start_poll` and its kin, `ibv_wr_*`.

use super::data::{options, OPERATIONS};
use crate::bench::{Bench, Message};
use crate::report::{Check, Outcome, Report};
use crate::sys::*;

pub fn run(bench: &mut Bench, report: &mut Report) {
    for (name, cq, qp) in [
        ("cq-ex", true, false),
        ("qp-ex", false, true),
        ("both", true, true),
    ] {
        let result = both(bench, cq, qp);
        bench.conclude(
            report,
            &format!("extended: all operations with {name}"),
            result,
        );
    }
    let result = resize(bench);
    bench.conclude(
        report,
        "extended: a completion queue resized with entries in it",
        result,
    );
}

fn both(bench: &mut Bench, cq: bool, qp: bool) -> Check {
    let mut options = options();
    options.cq_extended = cq;
    options.qp.extended = qp;
    options.qp.inline = 32;
    let pair = bench.pair(&options)?;
    for (_, opcode) in OPERATIONS {
        for size in [0, 1, 5000, 100_000] {
            bench.transfer(&pair, &Message::simple(opcode, size))?;
        }
        if opcode != IBV_WR_RDMA_READ {
            let message = Message {
                flags: IBV_SEND_INLINE,
                ..Message::simple(opcode, 21)
            };
            bench.transfer(&pair, &message)?;
        }
    }
    Ok(())
}

/// Completions that were there before stay, in order, and new ones follow them.
fn resize(bench: &mut Bench) -> Check {
    let failed = |errno: crate::verbs::Errno| Outcome::Failed(errno.to_string());
    let pair = bench.pair(&Default::default())?;
    let message = Message::simple(IBV_WR_RDMA_WRITE, 100);
    let mut seeds = Vec::new();
    for round in 0..3u32 {
        for _ in 0..3 {
            let seed = bench.prepare(&pair, &message)?;
            bench.post(&pair, &message, seed)?;
            seeds.push(seed);
        }
        let words = [pair.here.send_cq, u64::from(300 - 100 * round)];
        match bench.here.call(crate::agent::Operation::ResizeCq, &words) {
            Ok(_) => {}
            Err(crate::verbs::Errno(libc::EOPNOTSUPP | libc::ENOSYS)) if round == 0 => {
                return Err(Outcome::Skipped("resizing is not offered".into()));
            }
            Err(errno) => return Err(failed(errno)),
        }
    }
    for seed in seeds {
        let done = bench.status(
            crate::bench::End::Here,
            pair.here.send_cq,
            IBV_WC_SUCCESS,
            "write",
        )?;
        crate::expect!(done.wr_id, !seed, "order of completions");
    }
    bench.exchange(&pair)
}
