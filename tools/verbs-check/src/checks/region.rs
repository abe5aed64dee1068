// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Large regions: more than a gibibyte, with page tables of tables; huge pages.

use crate::bench::{At, Bench, End, Pair, PairEnd, PairOptions, ALL_ACCESS};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{BufferKind, SendWork, REPEAT};

/// More than a gibibyte, and not a whole number of anything.
const LARGE: usize = (5 << 28) + (37 << 12);
pub const CHUNK: usize = 10_000;

pub fn run(bench: &mut Bench, report: &mut Report) {
    let result = large(bench);
    bench.conclude(report, "region: more than 1 GiB", result);
    let result = huge(bench);
    bench.conclude(report, "region: huge pages", result);
    let result = odd(bench);
    bench.conclude(report, "region: odd start and length", result);
}

/// The other end's region: address and key.
#[derive(Clone, Copy)]
pub struct Target {
    pub buffer: u64,
    pub address: u64,
    pub rkey: u32,
}

fn target(bench: &mut Bench, end: &PairEnd, length: usize, kind: BufferKind) -> Check<Target> {
    let (buffer, address) = match bench.there.buffer(length, kind) {
        Ok(made) => made,
        Err(errno) => {
            return Err(Outcome::Skipped(format!("no such memory here: {errno}")));
        }
    };
    let (_, _, rkey) = bench
        .there
        .mr(end.pd, buffer, 0, length, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    Ok(Target {
        buffer,
        address,
        rkey,
    })
}

/// Does one operation between offset 0 here and `offset` there.
pub fn operate(
    bench: &mut Bench,
    pair: &Pair,
    target: &Target,
    opcode: u32,
    offset: usize,
    length: usize,
) -> Check<u32> {
    let work = SendWork {
        wr_id: 1,
        opcode,
        flags: IBV_SEND_SIGNALED,
        remote_address: target.address + offset as u64,
        rkey: target.rkey,
        entries: vec![(pair.here.address, length as u32, pair.here.lkey)],
        ..Default::default()
    };
    bench
        .here
        .post_send(pair.here.qp.qp, &work)
        .at("ibv_post_send")?;
    Ok(bench.completion(End::Here, pair.here.send_cq)?.status)
}

/// Writes at an offset and reads it back, verifying both.
pub fn round_trip(bench: &mut Bench, pair: &Pair, target: &Target, offset: usize) -> Check {
    let seed = bench.seed();
    bench
        .here
        .fill(pair.here.buffer, 0, CHUNK, seed)
        .at("fill")?;
    let status = operate(bench, pair, target, IBV_WR_RDMA_WRITE, offset, CHUNK)?;
    expect!(status, IBV_WC_SUCCESS, "write at {offset:#x}");
    let wrong = bench
        .there
        .check_part(target.buffer, offset, CHUNK, seed, 0)
        .at("check")?;
    expect!(wrong, None, "first wrong byte written at {offset:#x}");
    bench.here.set(pair.here.buffer, 0, CHUNK, 0).at("set")?;
    let status = operate(bench, pair, target, IBV_WR_RDMA_READ, offset, CHUNK)?;
    expect!(status, IBV_WC_SUCCESS, "read at {offset:#x}");
    let wrong = bench
        .here
        .check_part(pair.here.buffer, 0, CHUNK, seed, 0)
        .at("check")?;
    expect!(wrong, None, "first wrong byte read at {offset:#x}");
    Ok(())
}

fn large(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let target = target(bench, &pair.there, LARGE, BufferKind::Repeated)?;
    for offset in [
        0,
        (2 << 20) - 5000,
        (1 << 30) - 1,
        (1 << 30) + (2 << 20) - 1234,
        LARGE / 2 + 77,
        LARGE - CHUNK,
    ] {
        round_trip(bench, &pair, &target, offset)?;
        // The same page, seen at another address of the region.
        let twin = (offset + REPEAT) % (LARGE - CHUNK) / REPEAT * REPEAT + offset % REPEAT;
        if twin + CHUNK <= LARGE && offset % REPEAT + CHUNK <= REPEAT {
            let seed = bench.seed();
            bench
                .here
                .fill(pair.here.buffer, 0, CHUNK, seed)
                .at("fill")?;
            operate(bench, &pair, &target, IBV_WR_RDMA_WRITE, twin, CHUNK)?;
            let wrong = bench
                .there
                .check_part(target.buffer, offset, CHUNK, seed, 0)
                .at("check")?;
            expect!(wrong, None, "first wrong byte of the twin of {offset:#x}");
        }
    }
    let status = operate(
        bench,
        &pair,
        &target,
        IBV_WR_RDMA_WRITE,
        LARGE - CHUNK + 1,
        CHUNK,
    )?;
    expect!(status, IBV_WC_REM_ACCESS_ERR, "one byte past the end");
    Ok(())
}

fn huge(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let length = 4 << 20;
    let target = target(bench, &pair.there, length, BufferKind::Huge)?;
    for offset in [0, (2 << 20) - 5000, length - CHUNK] {
        round_trip(bench, &pair, &target, offset)?;
    }
    Ok(())
}

/// A region that starts and ends in the middle of pages.
fn odd(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let (start, length) = (4096 + 77, 3 * 4096 + 5);
    let (_, _, rkey) = bench
        .there
        .mr(pair.there.pd, pair.there.buffer, start, length, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    let target = Target {
        buffer: pair.there.buffer,
        address: pair.there.address,
        rkey,
    };
    for offset in [start, start + 1, start + length - CHUNK] {
        round_trip(bench, &pair, &target, offset)?;
    }
    let status = operate(
        bench,
        &pair,
        &target,
        IBV_WR_RDMA_WRITE,
        start + length - CHUNK + 1,
        CHUNK,
    )?;
    expect!(status, IBV_WC_REM_ACCESS_ERR, "one byte past the end");
    let pair = bench.pair(&PairOptions::default())?;
    let target = Target {
        rkey: bench
            .there
            .mr(pair.there.pd, pair.there.buffer, start, length, ALL_ACCESS)
            .at("ibv_reg_mr")?
            .2,
        buffer: pair.there.buffer,
        address: pair.there.address,
    };
    let status = operate(bench, &pair, &target, IBV_WR_RDMA_READ, start - 1, CHUNK)?;
    expect!(status, IBV_WC_REM_ACCESS_ERR, "one byte before the start");
    Ok(())
}
