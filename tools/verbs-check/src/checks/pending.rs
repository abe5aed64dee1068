// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keys that the device does not have yet, of a device that takes its time for commands on tags: what uses one stands
//! still, alone, and goes on when the device has it; or is refused when it never will, because the registration has
//! failed, or was ended by then.

use std::time::Duration;

use super::refusal::{
    failed, fails_locally, flushes, in_error, mark, next_key, no_events, refused_as_it_is,
    refused_for, untouched, vendor, work,
};
use crate::bench::{At, Bench, End, Pair, PairOptions, ALL_ACCESS};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::{BindWork, SendWork};

/// Where in a pair's buffer the regions begin that are pending.
const OFFSET: usize = 8192;
const LENGTH: usize = 8192;
/// Bytes of regions whose registration the device is told to fail (`fail_length`).
pub const FAILING: usize = 20480;
/// Bytes of a message.
const MESSAGE: usize = 100;

type Body = fn(&mut Bench) -> Check;

const CHECKS: &[(&str, Body)] = &[
    (
        "a write from a pending region stands still, and another queue pair does not",
        from_it,
    ),
    (
        "a peer's write to a pending region stands still, and another queue pair does not",
        to_it,
    ),
    (
        "a write from a region that ends while it is pending is refused",
        from_what_ends,
    ),
    (
        "a peer's write to a region that ends while it is pending is refused",
        to_what_ends,
    ),
    (
        "a region whose registration fails refuses its owner",
        from_what_failed,
    ),
    (
        "a region whose registration fails refuses peers",
        to_what_failed,
    ),
    (
        "windows that the device did not make are bound to nothing, and end as any other",
        windows_that_failed,
    ),
];

pub fn run(bench: &mut Bench, report: &mut Report) {
    for (name, body) in CHECKS {
        let result = no_events(bench).and_then(|()| body(bench));
        bench.conclude(report, &format!("pending: {name}"), result);
    }
}

/// Regions that are used as soon as they are registered, whatever the device knows by then: here, and by a peer. For
/// devices that hear late of new commands.
pub fn run_at_once(bench: &mut Bench, report: &mut Report) {
    let used: [(&str, Body); 2] = [
        ("a write from a region that was just registered", |bench| {
            used_at_once(bench, End::Here)
        }),
        (
            "a peer's write to a region that was just registered",
            |bench| used_at_once(bench, End::There),
        ),
    ];
    for (name, body) in used {
        let result = no_events(bench).and_then(|()| body(bench));
        bench.conclude(report, &format!("at once: {name}"), result);
    }
}

fn used_at_once(bench: &mut Bench, end: End) -> Check {
    let pair = pair(bench)?;
    for _ in 0..5 {
        let (mr, address, key) = region(bench, &pair, end, LENGTH)?;
        let write = match end {
            End::Here => write_from(&pair, (address, key)),
            End::There => write_to(&pair, (address, key)),
        };
        post(bench, &pair, &write)?;
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_SUCCESS,
            "a write by the new key",
        )?;
        bench.side(end).destroy(mr).at("ibv_dereg_mr")?;
    }
    bench.destroy(&pair)
}

/// A pair whose own regions the device has.
fn pair(bench: &mut Bench) -> Check<Pair> {
    let pair = bench.pair(&PairOptions::default())?;
    bench.exchange(&pair)?;
    mark(bench, &pair)?;
    Ok(pair)
}

/// A region that the device does not have yet: number, address, key.
fn region(bench: &mut Bench, pair: &Pair, end: End, length: usize) -> Check<(u64, u64, u32)> {
    let own = match end {
        End::Here => &pair.here,
        End::There => &pair.there,
    };
    let (mr, key, _) = bench
        .side(end)
        .mr(own.pd, own.buffer, OFFSET, length, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    Ok((mr, own.address + OFFSET as u64, key))
}

/// A write from a region here.
fn write_from(pair: &Pair, (address, key): (u64, u32)) -> SendWork {
    let mut work = work(pair, IBV_WR_RDMA_WRITE, MESSAGE as u32);
    work.entries = vec![(address, MESSAGE as u32, key)];
    work
}

/// A write to a region there.
fn write_to(pair: &Pair, (address, key): (u64, u32)) -> SendWork {
    let mut work = work(pair, IBV_WR_RDMA_WRITE, MESSAGE as u32);
    (work.remote_address, work.rkey) = (address, key);
    work
}

fn post(bench: &mut Bench, pair: &Pair, work: &SendWork) -> Check {
    bench
        .here
        .post_send(pair.here.qp.qp, work)
        .at("ibv_post_send")
}

/// The write stands still while those of another queue pair of the same machines are carried out, and is carried out
/// in the end: what was sent is there from `offset` on.
fn stands_still(
    bench: &mut Bench,
    pair: &Pair,
    other: &Pair,
    stalled: &SendWork,
    offset: usize,
) -> Check {
    post(bench, pair, stalled)?;
    for _ in 0..3 {
        post(
            bench,
            other,
            &work(other, IBV_WR_RDMA_WRITE, MESSAGE as u32),
        )?;
        bench.status(
            End::Here,
            other.here.send_cq,
            IBV_WC_SUCCESS,
            "a write of another queue pair",
        )?;
    }
    let early = bench
        .here
        .poll(pair.here.send_cq, Duration::ZERO)
        .at("ibv_poll_cq")?;
    expect!(early, None, "completion before the device has the key");
    let done = bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_SUCCESS,
        "the write that stood still",
    )?;
    expect!(done.wr_id, stalled.wr_id, "wr_id of the write");
    let arrived = bench
        .there
        .check_set(pair.there.buffer, offset, MESSAGE, 0x11)
        .at("check")?;
    expect!(arrived, None, "first byte that did not arrive");
    bench.destroy(pair)?;
    bench.destroy(other)
}

fn from_it(bench: &mut Bench) -> Check {
    let (one, other) = (pair(bench)?, pair(bench)?);
    let (_, address, key) = region(bench, &one, End::Here, LENGTH)?;
    stands_still(bench, &one, &other, &write_from(&one, (address, key)), 0)
}

fn to_it(bench: &mut Bench) -> Check {
    let (one, other) = (pair(bench)?, pair(bench)?);
    let (_, address, key) = region(bench, &one, End::There, LENGTH)?;
    stands_still(bench, &one, &other, &write_to(&one, (address, key)), OFFSET)
}

fn from_what_ends(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let (mr, address, key) = region(bench, &pair, End::Here, LENGTH)?;
    post(bench, &pair, &write_from(&pair, (address, key)))?;
    bench.here.destroy(mr).at("ibv_dereg_mr")?;
    bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_LOC_PROT_ERR,
        "the write from what has ended",
    )?;
    in_error(bench, End::Here, pair.here.qp.qp)?;
    untouched(bench, &pair)?;
    bench.destroy(&pair)
}

fn to_what_ends(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let (mr, address, key) = region(bench, &pair, End::There, LENGTH)?;
    bench.there.destroy(mr).at("ibv_dereg_mr")?;
    refused_as_it_is(bench, &pair, &write_to(&pair, (address, key)))?;
    untouched(bench, &pair)?;
    bench.destroy(&pair)
}

fn from_what_failed(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let (mr, address, key) = region(bench, &pair, End::Here, FAILING)?;
    let bad = write_from(&pair, (address, key));
    fails_locally(bench, &pair, &bad, vendor::REGISTRATION_FAILED)?;
    // It ends as any other.
    bench.here.destroy(mr).at("ibv_dereg_mr")
}

fn to_what_failed(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let (mr, address, key) = region(bench, &pair, End::There, FAILING)?;
    let bad = write_to(&pair, (address, key));
    refused_for(bench, &pair, &bad, vendor::REGISTRATION_FAILED)?;
    bench.there.destroy(mr).at("ibv_dereg_mr")
}

/// Of either kind. The device is told to fail them all (`fail_windows`).
fn windows_that_failed(bench: &mut Bench) -> Check {
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        let pair = pair(bench)?;
        let own = pair.here;
        let access = ALL_ACCESS | IBV_ACCESS_MW_BIND;
        let side = &mut bench.here;
        let (mr, ..) = side
            .mr(own.pd, own.buffer, OFFSET, LENGTH, access)
            .at("ibv_reg_mr")?;
        let (mw, rkey) = side.window(own.pd, kind).at("ibv_alloc_mw")?;
        let bind = BindWork {
            wr_id: 6,
            rkey: next_key(rkey),
            address: own.address + OFFSET as u64,
            length: LENGTH as u64,
            access: IBV_ACCESS_REMOTE_READ,
        };
        side.bind(own.qp.qp, mw, mr, &bind).at("bind")?;
        let (status, why) = (IBV_WC_MW_BIND_ERR, vendor::REGISTRATION_FAILED);
        failed(bench, End::Here, own.send_cq, bind.wr_id, status, why)?;
        flushes(bench, &pair)?;
        untouched(bench, &pair)?;
        bench.here.destroy(mw).at("ibv_dealloc_mw")?;
        bench.here.destroy(mr).at("ibv_dereg_mr")?;
        bench.destroy(&pair)?;
    }
    Ok(())
}
