// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic for some time, or without end, for tests that kill a process in the middle of it.

use std::time::{Duration, Instant};

use crate::bench::{At, Bench, End, PairOptions};
use crate::expect;
use crate::report::Check;
use crate::sys::*;
use crate::verbs::SendWork;

const SIZE: usize = 256 << 10;

/// Keeps several queue pairs full of writes and reads until the time is over, and verifies what is
/// then at both ends; messages done.
pub fn stress(bench: &mut Bench, time: Option<Duration>) -> Check<u64> {
    let end = time.map(|time| Instant::now() + time);
    let options = PairOptions {
        size: SIZE,
        ..Default::default()
    };
    let pairs = (0..4)
        .map(|_| bench.pair(&options))
        .collect::<Check<Vec<_>>>()?;
    // The first is a write, so that all that is read is what this end had.
    let mut seeds = Vec::new();
    for pair in &pairs {
        let seed = bench.seed();
        bench
            .here
            .fill(pair.here.buffer, 0, SIZE, seed)
            .at("fill")?;
        bench
            .there
            .set(pair.there.buffer, 0, SIZE, 0xee)
            .at("set")?;
        seeds.push(seed);
    }
    let mut done = 0;
    let mut opcode = IBV_WR_RDMA_WRITE;
    for pair in &pairs {
        for _ in 0..4 {
            post(bench, pair, opcode)?;
        }
    }
    // Tells whoever wants to interrupt it that it is under way.
    println!("running");
    while end.is_none_or(|end| Instant::now() < end) {
        for pair in &pairs {
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "traffic")?;
            done += 1;
            opcode = if done % 3 == 0 {
                IBV_WR_RDMA_READ
            } else {
                IBV_WR_RDMA_WRITE
            };
            post(bench, pair, opcode)?;
        }
    }
    for pair in &pairs {
        for _ in 0..4 {
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "traffic")?;
            done += 1;
        }
    }
    for (pair, seed) in pairs.iter().zip(seeds) {
        for (end, own) in [(End::Here, pair.here), (End::There, pair.there)] {
            let side = bench.side(end);
            let name = side.name;
            let wrong = side.check_part(own.buffer, 0, SIZE, seed, 0).at("check")?;
            expect!(wrong, None, "first wrong byte {name}");
        }
    }
    bench.reset()?;
    Ok(done)
}

fn post(bench: &mut Bench, pair: &crate::bench::Pair, opcode: u32) -> Check {
    let work = SendWork {
        wr_id: 0,
        opcode,
        flags: IBV_SEND_SIGNALED,
        remote_address: pair.there.address,
        rkey: pair.there.rkey,
        entries: vec![(pair.here.address, SIZE as u32, pair.here.lkey)],
        ..Default::default()
    };
    bench
        .here
        .post_send(pair.here.qp.qp, &work)
        .at("ibv_post_send")
}
