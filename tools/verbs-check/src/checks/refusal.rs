// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What both ends see of a work request that must fail: its status and `vendor_err`, the event at the
//! other end, what becomes of the queue pairs, and memory in which no byte has moved.

use std::time::{Duration, Instant};

use crate::bench::{status_name, At, Bench, End, Message, Pair, PairOptions, PATIENCE};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Errno, SendWork};

/// A check that has machines with another queue pair at work.
pub type Body = fn(&mut Bench) -> Check;

/// What the device says of the access checks (chapter 4 of its specification), in `vendor_err`.
pub mod vendor {
    pub const NO_ENTRY: u32 = 1;
    pub const NOT_VALID: u32 = 2;
    pub const WRONG_KIND: u32 = 3;
    pub const WRONG_DOMAIN: u32 = 4;
    pub const WRONG_INSTANCE: u32 = 5;
    pub const OUT_OF_BOUNDS: u32 = 6;
    pub const NO_RIGHT: u32 = 7;
    pub const ALL_MEMORY: u32 = 8;
    pub const NOT_REGISTRABLE: u32 = 9;
    pub const VALID_ALREADY: u32 = 10;
    pub const WRONG_QUEUE_PAIR: u32 = 12;
    pub const PIECE_REFUSED: u32 = 15;
    pub const PIECE_RIGHTS: u32 = 16;
    pub const PIECE_KIND: u32 = 17;
    pub const PIECE_EMPTY: u32 = 18;
    pub const REGISTRATION_FAILED: u32 = 19;
    pub const QUEUE_PAIR_RIGHT: u32 = 21;
}

/// Runs checks, each while another queue pair has a message under way; a new one works after each.
pub fn run_beside<F: Fn(&mut Bench) -> Check>(
    bench: &mut Bench,
    report: &mut Report,
    case: &str,
    checks: impl Iterator<Item = (String, F)>,
) {
    let bystander = match bench.pair(&PairOptions::default()) {
        Ok(pair) => pair,
        Err(outcome) => {
            bench.conclude(report, &format!("{case}: connect"), Err(outcome));
            return;
        }
    };
    for (name, body) in checks {
        let result = beside(bench, &bystander, body);
        report.enter(&format!("{case}: {name}"), result);
    }
    report.enter(&format!("{case}: destroy"), bench.reset());
}

fn beside(bench: &mut Bench, bystander: &Pair, body: impl Fn(&mut Bench) -> Check) -> Check {
    no_events(bench)?;
    let message = Message::simple(IBV_WR_RDMA_WRITE, 100_000);
    let seed = bench.prepare(bystander, &message)?;
    bench.post(bystander, &message, seed)?;
    let result = body(bench);
    let aside = bench
        .finish(bystander, &message, seed)
        .and_then(|()| bench.exchange(bystander))
        .map_err(|outcome| Outcome::Failed(format!("the queue pair beside it: {outcome:?}")));
    result.and(aside)?;
    let fresh = bench.pair(&PairOptions::default())?;
    bench.exchange(&fresh)?;
    bench.destroy(&fresh)
}

/// Forgets what was told of others.
pub fn no_events(bench: &mut Bench) -> Check {
    for end in [End::Here, End::There] {
        while bench
            .side(end)
            .async_event(Duration::ZERO)
            .at("events")?
            .is_some()
        {}
    }
    Ok(())
}

/// Another connection between the same domains, with the same buffers and completion queues.
pub fn second(bench: &mut Bench, pair: &Pair, options: &PairOptions) -> Check<Pair> {
    let mut other = *pair;
    for (end, own) in [(End::Here, &mut other.here), (End::There, &mut other.there)] {
        own.qp = bench
            .side(end)
            .qp(own.pd, own.send_cq, own.recv_cq, &options.qp)
            .at("ibv_create_qp")?;
    }
    bench.connect(&other, options)?;
    Ok(other)
}

/// The pair as the other end sees it.
pub fn turned(pair: &Pair) -> Pair {
    Pair {
        here: pair.there,
        there: pair.here,
    }
}

/// Does something from the other end's side of a pair.
pub fn from_there<T>(
    bench: &mut Bench,
    pair: &Pair,
    body: impl FnOnce(&mut Bench, &Pair) -> Check<T>,
) -> Check<T> {
    bench.turn();
    let result = body(bench, &turned(pair));
    bench.turn();
    result
}

/// A work request between the buffers of a pair.
pub fn work(pair: &Pair, opcode: u32, length: u32) -> SendWork {
    SendWork {
        wr_id: 77,
        opcode,
        flags: IBV_SEND_SIGNALED,
        immediate: 0,
        remote_address: pair.there.address,
        rkey: pair.there.rkey,
        operands: (0, 0),
        entries: vec![(pair.here.address, length, pair.here.lkey)],
    }
}

/// A key that was never given out for this device: another index, so not merely a stale one.
pub fn wrong(key: u32) -> u32 {
    key ^ 0x7f_ff00
}

/// The next key of the same index.
pub fn next_key(key: u32) -> u32 {
    (key & !0xff) | u32::from((key as u8).wrapping_add(1))
}

/// Bytes at the start of a pair's buffers that are looked at: all that they have usually.
pub const MARKED: usize = 128 << 10;

/// Both buffers get contents that show whether they were touched.
pub fn mark(bench: &mut Bench, pair: &Pair) -> Check {
    bench
        .here
        .set(pair.here.buffer, 0, MARKED, 0x11)
        .at("set")?;
    bench
        .there
        .set(pair.there.buffer, 0, MARKED, 0x22)
        .at("set")
}

/// Neither buffer was.
pub fn untouched(bench: &mut Bench, pair: &Pair) -> Check {
    let here = bench
        .here
        .check_set(pair.here.buffer, 0, MARKED, 0x11)
        .at("check")?;
    expect!(here, None, "first touched byte here");
    let there = bench
        .there
        .check_set(pair.there.buffer, 0, MARKED, 0x22)
        .at("check")?;
    expect!(there, None, "first touched byte there");
    Ok(())
}

/// Waits until a queue pair is in a state.
pub fn in_state(bench: &mut Bench, end: End, qp: u64, expected: u32) -> Check {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = bench.side(end).state(qp).at("ibv_query_qp")?;
        if state == expected {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("queue pair {end:?} is in state {state}, not {expected}").into());
        }
    }
}

/// Waits until a queue pair is in the error state.
pub fn in_error(bench: &mut Bench, end: End, qp: u64) -> Check {
    in_state(bench, end, qp, IBV_QPS_ERR)
}

/// A later post to a queue pair that has failed or stopped is flushed.
pub fn flushes_later(bench: &mut Bench, pair: &Pair) -> Check {
    let mut later = work(pair, IBV_WR_RDMA_WRITE, 1);
    later.wr_id = 78;
    bench
        .here
        .post_send(pair.here.qp.qp, &later)
        .at("post after the error")?;
    let done = bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_WR_FLUSH_ERR,
        "post after the error",
    )?;
    expect!(done.wr_id, 78, "wr_id of the flushed request");
    Ok(())
}

/// The queue pair here fails, and flushes what is posted later.
pub fn flushes(bench: &mut Bench, pair: &Pair) -> Check {
    in_error(bench, End::Here, pair.here.qp.qp)?;
    flushes_later(bench, pair)
}

/// The completion of a work request that failed here, of which a Ferrite device says why.
pub fn failed(
    bench: &mut Bench,
    end: End,
    cq: u64,
    wr_id: u64,
    status: u32,
    vendor_err: u32,
) -> Check {
    let done = bench.status(end, cq, status, "the bad request")?;
    expect!(done.wr_id, wr_id, "wr_id of the bad request");
    let hello = match end {
        End::Here => &bench.hello_here,
        End::There => &bench.hello_there,
    };
    if hello.ferrite {
        expect!(done.vendor_err, vendor_err, "vendor_err");
    }
    Ok(())
}

/// A work request that fails before anything is done: no message leaves, and nobody but its poster
/// learns of it.
pub fn fails_locally(bench: &mut Bench, pair: &Pair, work: &SendWork, vendor_err: u32) -> Check {
    mark(bench, pair)?;
    if matches!(work.opcode, IBV_WR_SEND) {
        bench
            .there
            .post_recv(
                pair.there.qp.qp,
                5,
                &[(pair.there.address, 8192, pair.there.lkey)],
            )
            .at("ibv_post_recv")?;
    }
    bench
        .here
        .post_send(pair.here.qp.qp, work)
        .at("ibv_post_send")?;
    failed(
        bench,
        End::Here,
        pair.here.send_cq,
        work.wr_id,
        IBV_WC_LOC_PROT_ERR,
        vendor_err,
    )?;
    flushes(bench, pair)?;
    untouched(bench, pair)?;
    let there = bench.there.state(pair.there.qp.qp).at("ibv_query_qp")?;
    expect!(there, IBV_QPS_RTS, "state of the other end");
    let received = bench
        .there
        .poll(pair.there.recv_cq, Duration::ZERO)
        .at("ibv_poll_cq")?;
    expect!(received, None, "what the other end received");
    bench.destroy(pair)
}

/// A receive whose memory is no good: an error for both.
pub fn bad_receive(
    bench: &mut Bench,
    pair: &Pair,
    entry: (u64, u32, u32),
    vendor_err: u32,
) -> Check {
    mark(bench, pair)?;
    bench
        .there
        .post_recv(pair.there.qp.qp, 5, &[entry])
        .at("ibv_post_recv")?;
    bench
        .here
        .post_send(pair.here.qp.qp, &work(pair, IBV_WR_SEND, 100))
        .at("ibv_post_send")?;
    failed(
        bench,
        End::There,
        pair.there.recv_cq,
        5,
        IBV_WC_LOC_PROT_ERR,
        vendor_err,
    )?;
    bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_REM_OP_ERR,
        "the send to it",
    )?;
    in_error(bench, End::There, pair.there.qp.qp)?;
    flushes(bench, pair)?;
    untouched(bench, pair)?;
    bench.destroy(pair)
}

/// A work request that the peer refuses by a NAK: remote access error. What it was that the peer did
/// not like is not told across the wire.
pub fn refused(bench: &mut Bench, pair: &Pair, work: &SendWork) -> Check {
    mark(bench, pair)?;
    refused_as_it_is(bench, pair, work)?;
    untouched(bench, pair)?;
    bench.destroy(pair)
}

/// As [`refused`]; a Ferrite device says at the other end why.
pub fn refused_for(bench: &mut Bench, pair: &Pair, work: &SendWork, why: u32) -> Check {
    mark(bench, pair)?;
    refused_as_it_is(bench, pair, work)?;
    untouched(bench, pair)?;
    if bench.hello_there.ferrite {
        let said = bench.there.refused(pair.there.qp.qpn);
        expect!(said.at("debugfs")?, why, "why the device refused it");
    }
    bench.destroy(pair)
}

/// As [`refused`], with memory left as it is: for the caller to look at.
pub fn refused_as_it_is(bench: &mut Bench, pair: &Pair, work: &SendWork) -> Check {
    bench
        .here
        .post_send(pair.here.qp.qp, work)
        .at("ibv_post_send")?;
    let done = bench.completion(End::Here, pair.here.send_cq)?;
    expect!(
        status_name(done.status),
        status_name(IBV_WC_REM_ACCESS_ERR),
        "the bad request"
    );
    expect!(done.wr_id, work.wr_id, "wr_id of the bad request");
    if bench.hello_here.ferrite {
        expect!(done.vendor_err, 0, "vendor_err of what the peer refuses");
    }
    let event = bench.there.async_event(PATIENCE).at("events")?;
    expect!(
        event,
        Some((IBV_EVENT_QP_ACCESS_ERR, pair.there.qp.qpn)),
        "asynchronous event there"
    );
    in_error(bench, End::There, pair.there.qp.qp)?;
    flushes(bench, pair)
}

/// The call must fail with this errno.
pub fn must_fail<T>(result: Result<T, Errno>, errno: i32, what: &str) -> Check {
    match result {
        Err(Errno(got)) if got == errno => Ok(()),
        Err(got) => Err(format!("{what}: {got} instead of {}", Errno(errno)).into()),
        Ok(_) => Err(format!("{what}: was allowed").into()),
    }
}
