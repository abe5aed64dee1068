// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compare-and-swap and fetch-and-add.

use crate::bench::{status_name, At, Bench, End, Pair, PairOptions, ALL_ACCESS, ATOMIC_ACCESS};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::SendWork;

/// Where the word is in the other end's buffer, and the result in this end's.
const WORD: usize = 4096 - 8;
const RESULT: usize = 72;

pub fn run(bench: &mut Bench, report: &mut Report) {
    type Body = fn(&mut Bench) -> Check;
    let checks: &[(&str, Body)] = &[
        ("fetch and add", fetch_add),
        ("compare and swap", compare_swap),
        ("many in a row are each done once", many),
        ("an address that is not aligned", unaligned),
        ("a region without the right", no_right),
    ];
    for (name, body) in checks {
        let result = if bench.hello_here.atomics && bench.hello_there.atomics {
            body(bench)
        } else {
            Err(Outcome::Skipped("atomics are not offered".into()))
        };
        bench.conclude(report, &format!("atomics: {name}"), result);
    }
}

fn options(mr_access: u32) -> PairOptions {
    PairOptions {
        mr_access,
        qp_access: ATOMIC_ACCESS,
        ..Default::default()
    }
}

fn work(pair: &Pair, opcode: u32, operands: (u64, u64)) -> SendWork {
    SendWork {
        wr_id: 9,
        opcode,
        flags: IBV_SEND_SIGNALED,
        immediate: 0,
        remote_address: pair.there.address + WORD as u64,
        rkey: pair.there.rkey,
        operands,
        entries: vec![(pair.here.address + RESULT as u64, 8, pair.here.lkey)],
    }
}

/// Does one operation on a word that holds eight times `before`, and verifies what comes back.
fn operate(bench: &mut Bench, pair: &Pair, opcode: u32, operands: (u64, u64), before: u8) -> Check {
    bench
        .there
        .set(pair.there.buffer, WORD, 8, before)
        .at("set")?;
    bench
        .here
        .set(pair.here.buffer, RESULT - 8, 24, 0xee)
        .at("set")?;
    bench
        .here
        .post_send(pair.here.qp.qp, &work(pair, opcode, operands))
        .at("ibv_post_send")?;
    let done = bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_SUCCESS,
        "the operation",
    )?;
    let expected = if opcode == IBV_WR_ATOMIC_FETCH_AND_ADD {
        IBV_WC_FETCH_ADD
    } else {
        IBV_WC_COMP_SWAP
    };
    expect!(done.opcode, expected, "opcode of the completion");
    expect!(done.wr_id, 9, "wr_id of the completion");
    let wrong = bench
        .here
        .check_set(pair.here.buffer, RESULT, 8, before)
        .at("check")?;
    expect!(wrong, None, "first byte that is not the old value");
    for guard in [RESULT - 8, RESULT + 8] {
        let wrong = bench
            .here
            .check_set(pair.here.buffer, guard, 8, 0xee)
            .at("check")?;
        expect!(wrong, None, "first byte touched beside the result");
    }
    Ok(())
}

/// The word must be eight times this byte.
fn is_now(bench: &mut Bench, pair: &Pair, value: u8) -> Check {
    let wrong = bench
        .there
        .check_set(pair.there.buffer, WORD, 8, value)
        .at("check")?;
    expect!(wrong, None, "first byte that is not the new value");
    Ok(())
}

fn all(value: u8) -> u64 {
    u64::from_ne_bytes([value; 8])
}

fn fetch_add(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(ATOMIC_ACCESS))?;
    for (before, add, after) in [(0, all(1), 1), (0x11, all(0x22), 0x33), (0xff, 1, 0)] {
        operate(bench, &pair, IBV_WR_ATOMIC_FETCH_AND_ADD, (add, 0), before)?;
        is_now(bench, &pair, after)?;
    }
    Ok(())
}

fn compare_swap(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(ATOMIC_ACCESS))?;
    let operands = (all(5), all(6));
    operate(bench, &pair, IBV_WR_ATOMIC_CMP_AND_SWP, operands, 5)?;
    is_now(bench, &pair, 6)?;
    // Another value stays.
    operate(bench, &pair, IBV_WR_ATOMIC_CMP_AND_SWP, operands, 7)?;
    is_now(bench, &pair, 7)
}

fn many(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(ATOMIC_ACCESS))?;
    bench.there.set(pair.there.buffer, WORD, 8, 0).at("set")?;
    let add = work(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, (all(1), 0));
    for _ in 0..5 {
        for _ in 0..10 {
            bench
                .here
                .post_send(pair.here.qp.qp, &add)
                .at("ibv_post_send")?;
        }
        for _ in 0..10 {
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "an addition")?;
        }
    }
    is_now(bench, &pair, 50)
}

/// Fails at the other end, and leaves the word as it was.
fn refused(bench: &mut Bench, pair: &Pair, work: &SendWork, status: u32) -> Check {
    bench.there.set(pair.there.buffer, WORD, 8, 3).at("set")?;
    bench
        .here
        .post_send(pair.here.qp.qp, work)
        .at("ibv_post_send")?;
    let done = bench.completion(End::Here, pair.here.send_cq)?;
    expect!(
        status_name(done.status),
        status_name(status),
        "the operation"
    );
    is_now(bench, pair, 3)
}

fn unaligned(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(ATOMIC_ACCESS))?;
    let mut add = work(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, (1, 0));
    add.remote_address -= 4;
    refused(bench, &pair, &add, IBV_WC_REM_INV_REQ_ERR)
}

fn no_right(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(ALL_ACCESS))?;
    let add = work(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, (1, 0));
    refused(bench, &pair, &add, IBV_WC_REM_ACCESS_ERR)
}
