// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Everything that must go wrong, in the right way: the proper errno, status or event, nothing
//! touched, other queue pairs undisturbed, and new ones working afterwards.

use crate::bench::{
    entries, status_name, At, Bench, End, Message, Pair, PairOptions, ALL_ACCESS, PATIENCE, SHORT,
};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Errno, SendWork};

type Body = fn(&mut Bench) -> Check;

const CHECKS: &[(&str, Body)] = &[
    ("wrong lkey of a send", wrong_lkey_send),
    ("wrong lkey of a write", wrong_lkey_write),
    ("wrong lkey of a receive", wrong_lkey_receive),
    ("wrong rkey of a write", wrong_rkey_write),
    ("wrong rkey of a read", wrong_rkey_read),
    ("stale lkey", stale_lkey),
    (
        "stale rkey, and another one for the same memory",
        stale_rkey,
    ),
    ("one byte past a local region", local_bounds),
    ("one byte past a remote region", remote_bounds),
    ("one byte before a remote region", remote_start),
    ("an address that wraps around", remote_wrap),
    ("local region of another domain", local_domain),
    ("remote region of another domain", remote_domain),
    ("region without remote write", no_remote_write),
    ("region without remote read", no_remote_read),
    (
        "region without local write as receive",
        no_local_write_receive,
    ),
    (
        "region without local write as target of a read",
        no_local_write_read,
    ),
    ("queue pair without remote write", qp_no_remote_write),
    ("queue pair without remote read", qp_no_remote_read),
    ("receiver not ready", not_ready),
    ("receiver ready in time", ready_late),
    ("peer gone", peer_gone),
    ("peer in error", peer_in_error),
    ("message longer than the receive", oversize),
    ("transitions that are not allowed", transitions),
    ("posts that are not allowed", posts),
    ("send queue full", send_queue_full),
    ("receive queue full", receive_queue_full),
    ("flush in order", flush),
    ("a queue pair reset and used again", reset_and_reuse),
];

pub fn run(bench: &mut Bench, report: &mut Report) {
    let bystander = match bench.pair(&PairOptions::default()) {
        Ok(pair) => pair,
        Err(outcome) => {
            bench.conclude(report, "errors: connect", Err(outcome));
            return;
        }
    };
    for (name, body) in CHECKS {
        let result = beside(bench, &bystander, *body);
        report.enter(&format!("errors: {name}"), result);
    }
    report.enter("errors: destroy", bench.reset());
}

/// Runs a check while another queue pair has a message under way, and tries a new one afterwards.
fn beside(bench: &mut Bench, bystander: &Pair, body: Body) -> Check {
    for end in [End::Here, End::There] {
        while bench
            .side(end)
            .async_event(std::time::Duration::ZERO)
            .at("events")?
            .is_some()
        {}
    }
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

/// Both buffers get contents that show whether they were touched.
fn mark(bench: &mut Bench, pair: &Pair) -> Check {
    bench.here.set(pair.here.buffer, 0, 8192, 0x11).at("set")?;
    bench.there.set(pair.there.buffer, 0, 8192, 0x22).at("set")
}

fn untouched(bench: &mut Bench, pair: &Pair) -> Check {
    let here = bench
        .here
        .check_set(pair.here.buffer, 0, 8192, 0x11)
        .at("check")?;
    expect!(here, None, "first touched byte here");
    let there = bench
        .there
        .check_set(pair.there.buffer, 0, 8192, 0x22)
        .at("check")?;
    expect!(there, None, "first touched byte there");
    Ok(())
}

/// Waits until a queue pair is in the error state.
fn in_error(bench: &mut Bench, end: End, qp: u64) -> Check {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let state = bench.side(end).state(qp).at("ibv_query_qp")?;
        if state == IBV_QPS_ERR {
            return Ok(());
        }
        if std::time::Instant::now() > deadline {
            return Err(format!("queue pair {end:?} is in state {state}, not in error").into());
        }
    }
}

/// A later post to a failed queue pair is flushed.
fn flushes(bench: &mut Bench, pair: &Pair) -> Check {
    in_error(bench, End::Here, pair.here.qp.qp)?;
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

/// A work request that fails before anything is done.
fn fails_locally(bench: &mut Bench, pair: &Pair, work: &SendWork) -> Check {
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
    let done = bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_LOC_PROT_ERR,
        "the bad request",
    )?;
    expect!(done.wr_id, work.wr_id, "wr_id of the bad request");
    flushes(bench, pair)?;
    untouched(bench, pair)?;
    bench.destroy(pair)
}

/// A work request that the peer refuses.
fn refused(bench: &mut Bench, pair: &Pair, work: &SendWork, statuses: &[u32]) -> Check {
    mark(bench, pair)?;
    bench
        .here
        .post_send(pair.here.qp.qp, work)
        .at("ibv_post_send")?;
    let done = bench.completion(End::Here, pair.here.send_cq)?;
    if !statuses.contains(&done.status) {
        return Err(format!("status {}", status_name(done.status)).into());
    }
    expect!(done.wr_id, work.wr_id, "wr_id of the bad request");
    let event = bench.there.async_event(PATIENCE).at("events")?;
    let expected = if done.status == IBV_WC_REM_ACCESS_ERR {
        IBV_EVENT_QP_ACCESS_ERR
    } else {
        IBV_EVENT_QP_REQ_ERR
    };
    expect!(
        event,
        Some((expected, pair.there.qp.qpn)),
        "asynchronous event there"
    );
    in_error(bench, End::There, pair.there.qp.qp)?;
    flushes(bench, pair)?;
    untouched(bench, pair)?;
    bench.destroy(pair)
}

const ACCESS: &[u32] = &[IBV_WC_REM_ACCESS_ERR];

fn wrong_lkey_send(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_SEND, 100);
    work.entries[0].2 = wrong(work.entries[0].2);
    fails_locally(bench, &pair, &work)
}

fn wrong_lkey_write(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 100);
    work.entries[0].2 = wrong(work.entries[0].2);
    fails_locally(bench, &pair, &work)
}

/// A receive whose memory is no good: an error for both.
fn bad_receive(bench: &mut Bench, pair: &Pair, entry: (u64, u32, u32)) -> Check {
    mark(bench, pair)?;
    bench
        .there
        .post_recv(pair.there.qp.qp, 5, &[entry])
        .at("ibv_post_recv")?;
    bench
        .here
        .post_send(pair.here.qp.qp, &work(pair, IBV_WR_SEND, 100))
        .at("ibv_post_send")?;
    let received = bench.status(
        End::There,
        pair.there.recv_cq,
        IBV_WC_LOC_PROT_ERR,
        "the bad receive",
    )?;
    expect!(received.wr_id, 5, "wr_id of the bad receive");
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

fn wrong_lkey_receive(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let entry = (pair.there.address, 1000, wrong(pair.there.lkey));
    bad_receive(bench, &pair, entry)
}

fn wrong_rkey_write(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 6000);
    work.rkey = wrong(work.rkey);
    refused(bench, &pair, &work, ACCESS)
}

fn wrong_rkey_read(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_RDMA_READ, 6000);
    work.rkey = wrong(work.rkey);
    refused(bench, &pair, &work, ACCESS)
}

fn stale_lkey(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    bench.here.destroy(pair.here.mr).at("ibv_dereg_mr")?;
    fails_locally(bench, &pair, &work(&pair, IBV_WR_RDMA_WRITE, 100))
}

fn stale_rkey(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    let old = pair.there.rkey;
    bench.there.destroy(pair.there.mr).at("ibv_dereg_mr")?;
    refused(bench, &pair, &work(&pair, IBV_WR_RDMA_WRITE, 100), ACCESS)?;
    // The table entry may be used again, the key may not.
    let pair = bench.pair(&options)?;
    let mut keys = vec![old, pair.there.rkey];
    for _ in 0..10 {
        let (mr, _, rkey) = bench
            .there
            .mr(
                pair.there.pd,
                pair.there.buffer,
                0,
                options.size,
                ALL_ACCESS,
            )
            .at("ibv_reg_mr")?;
        if keys.contains(&rkey) {
            return Err(format!("key {rkey:#x} was given out again at once").into());
        }
        keys.push(rkey);
        bench.there.destroy(mr).at("ibv_dereg_mr")?;
    }
    let mut again = work(&pair, IBV_WR_RDMA_WRITE, 100);
    again.rkey = keys[keys.len() - 1];
    refused(bench, &pair, &again, ACCESS)
}

fn local_bounds(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 100);
    work.entries[0].0 += options.size as u64 - 99;
    fails_locally(bench, &pair, &work)
}

fn remote_bounds(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let pair = bench.pair(&options)?;
        let mut work = work(&pair, opcode, 5000);
        work.remote_address += options.size as u64 - 4999;
        refused(bench, &pair, &work, ACCESS)?;
    }
    Ok(())
}

fn remote_start(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 5000);
    work.remote_address -= 1;
    refused(bench, &pair, &work, ACCESS)
}

fn remote_wrap(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 5000);
    work.remote_address = u64::MAX - 100;
    refused(bench, &pair, &work, ACCESS)
}

fn local_domain(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    let pd = bench.here.pd().at("ibv_alloc_pd")?;
    let (_, lkey, _) = bench
        .here
        .mr(pd, pair.here.buffer, 0, options.size, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 100);
    work.entries[0].2 = lkey;
    fails_locally(bench, &pair, &work)
}

fn remote_domain(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    let pd = bench.there.pd().at("ibv_alloc_pd")?;
    let (_, _, rkey) = bench
        .there
        .mr(pd, pair.there.buffer, 0, options.size, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    let mut work = work(&pair, IBV_WR_RDMA_WRITE, 100);
    work.rkey = rkey;
    refused(bench, &pair, &work, ACCESS)
}

fn no_remote_write(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        mr_access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ,
        ..Default::default()
    })?;
    refused(bench, &pair, &work(&pair, IBV_WR_RDMA_WRITE, 100), ACCESS)
}

fn no_remote_read(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        mr_access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
        ..Default::default()
    })?;
    refused(bench, &pair, &work(&pair, IBV_WR_RDMA_READ, 100), ACCESS)
}

fn no_local_write_receive(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        mr_access: IBV_ACCESS_REMOTE_READ,
        ..Default::default()
    })?;
    let entry = (pair.there.address, 1000, pair.there.lkey);
    bad_receive(bench, &pair, entry)
}

fn no_local_write_read(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        mr_access: IBV_ACCESS_REMOTE_READ,
        ..Default::default()
    })?;
    fails_locally(bench, &pair, &work(&pair, IBV_WR_RDMA_READ, 100))
}

fn qp_no_remote_write(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        qp_access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ,
        ..Default::default()
    })?;
    let work = work(&pair, IBV_WR_RDMA_WRITE, 100);
    refused(
        bench,
        &pair,
        &work,
        &[IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR],
    )
}

fn qp_no_remote_read(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions {
        qp_access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
        ..Default::default()
    })?;
    let work = work(&pair, IBV_WR_RDMA_READ, 100);
    refused(
        bench,
        &pair,
        &work,
        &[IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR],
    )
}

fn not_ready(bench: &mut Bench) -> Check {
    for rnr_retry in [0, 2] {
        let pair = bench.pair(&PairOptions {
            rnr_retry,
            ..Default::default()
        })?;
        bench
            .here
            .post_send(pair.here.qp.qp, &work(&pair, IBV_WR_SEND, 100))
            .at("ibv_post_send")?;
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_RNR_RETRY_EXC_ERR,
            "send without a receive",
        )?;
        flushes(bench, &pair)?;
        // The receiver has done nothing wrong.
        let state = bench.there.state(pair.there.qp.qp).at("ibv_query_qp")?;
        expect!(state, IBV_QPS_RTS, "state of the receiver");
        bench.destroy(&pair)?;
    }
    Ok(())
}

fn ready_late(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let message = Message::simple(IBV_WR_RDMA_WRITE, 3000);
    let seed = bench.prepare(&pair, &message)?;
    let mut send = work(&pair, IBV_WR_SEND, 100);
    send.flags = IBV_SEND_SIGNALED;
    bench
        .here
        .post_send(pair.here.qp.qp, &send)
        .at("ibv_post_send")?;
    bench.post(&pair, &message, seed)?;
    let early = bench
        .here
        .poll(pair.here.send_cq, SHORT)
        .at("ibv_poll_cq")?;
    expect!(early, None, "a completion before there was a receive");
    let entry = (pair.there.address, 100, pair.there.lkey);
    bench
        .there
        .post_recv(pair.there.qp.qp, 6, &[entry])
        .at("ibv_post_recv")?;
    let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the send")?;
    expect!(done.wr_id, send.wr_id, "wr_id of the send");
    bench.status(
        End::There,
        pair.there.recv_cq,
        IBV_WC_SUCCESS,
        "the receive",
    )?;
    bench.finish(&pair, &message, seed)?;
    bench.destroy(&pair)
}

fn small_timeout() -> PairOptions {
    PairOptions {
        timeout: 12,
        retry: 2,
        ..Default::default()
    }
}

fn peer_gone(bench: &mut Bench) -> Check {
    for opcode in [IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let pair = bench.pair(&small_timeout())?;
        bench.there.destroy(pair.there.qp.qp).at("ibv_destroy_qp")?;
        bench
            .here
            .post_send(pair.here.qp.qp, &work(&pair, opcode, 5000))
            .at("ibv_post_send")?;
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_RETRY_EXC_ERR,
            "request to nobody",
        )?;
        flushes(bench, &pair)?;
        bench.destroy(&pair)?;
    }
    Ok(())
}

fn peer_in_error(bench: &mut Bench) -> Check {
    let pair = bench.pair(&small_timeout())?;
    bench
        .there
        .set_state(pair.there.qp.qp, IBV_QPS_ERR)
        .at("to ERR")?;
    bench
        .here
        .post_send(pair.here.qp.qp, &work(&pair, IBV_WR_RDMA_WRITE, 5000))
        .at("ibv_post_send")?;
    bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_RETRY_EXC_ERR,
        "request to a queue pair in error",
    )?;
    flushes(bench, &pair)?;
    bench.destroy(&pair)
}

fn oversize(bench: &mut Bench) -> Check {
    let mtu = bench.mtu_bytes() as u32;
    for (room, length) in [(50, 51), (0, 1), (mtu, mtu + 1), (5000, 20_000)] {
        let pair = bench.pair(&PairOptions::default())?;
        mark(bench, &pair)?;
        let entry = (pair.there.address, room, pair.there.lkey);
        let list = [entry];
        let list = if room == 0 { &list[..0] } else { &list[..] };
        bench
            .there
            .post_recv(pair.there.qp.qp, 5, list)
            .at("ibv_post_recv")?;
        bench
            .here
            .post_send(pair.here.qp.qp, &work(&pair, IBV_WR_SEND, length))
            .at("ibv_post_send")?;
        let received = bench.status(
            End::There,
            pair.there.recv_cq,
            IBV_WC_LOC_LEN_ERR,
            "the short receive",
        )?;
        expect!(received.wr_id, 5, "wr_id of the short receive");
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_REM_INV_REQ_ERR,
            "the long send",
        )?;
        in_error(bench, End::There, pair.there.qp.qp)?;
        flushes(bench, &pair)?;
        let wrong = bench
            .there
            .check_set(pair.there.buffer, room as usize, 8192 - room as usize, 0x22)
            .at("check")?;
        expect!(wrong, None, "first byte touched behind the receive");
        bench.destroy(&pair)?;
    }
    Ok(())
}

/// The call must fail with this errno.
fn must_fail<T>(result: Result<T, Errno>, errno: i32, what: &str) -> Check {
    match result {
        Err(Errno(got)) if got == errno => Ok(()),
        Err(got) => Err(format!("{what}: {got} instead of {}", Errno(errno)).into()),
        Ok(_) => Err(format!("{what}: was allowed").into()),
    }
}

fn transitions(bench: &mut Bench) -> Check {
    let end = bench.end(End::Here, &PairOptions::default())?;
    let qp = end.qp.qp;
    for state in [IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD] {
        let result = bench.here.set_state(qp, state);
        must_fail(result, libc::EINVAL, &format!("RESET to {state}"))?;
    }
    let result = bench.here.set_state(qp, IBV_QPS_INIT);
    must_fail(result, libc::EINVAL, "RESET to INIT without attributes")?;
    bench
        .here
        .call(
            crate::agent::Operation::ToInit,
            &[qp, u64::from(ALL_ACCESS)],
        )
        .at("to INIT")?;
    for state in [IBV_QPS_RTR, IBV_QPS_RTS] {
        let result = bench.here.set_state(qp, state);
        must_fail(
            result,
            libc::EINVAL,
            &format!("INIT to {state} without attributes"),
        )?;
    }
    let state = bench.here.state(qp).at("ibv_query_qp")?;
    expect!(state, IBV_QPS_INIT, "state after refused transitions");
    let pair = bench.pair(&PairOptions::default())?;
    for state in [IBV_QPS_INIT, IBV_QPS_RTR] {
        let result = bench.here.set_state(pair.here.qp.qp, state);
        must_fail(result, libc::EINVAL, &format!("RTS to {state}"))?;
    }
    bench.exchange(&pair)?;
    bench.destroy(&pair)
}

fn posts(bench: &mut Bench) -> Check {
    let end = bench.end(End::Here, &PairOptions::default())?;
    let alone = Pair {
        here: end,
        there: end,
    };
    let result = bench.here.post_recv(end.qp.qp, 1, &[]);
    must_fail(result, libc::EINVAL, "receive in RESET")?;
    let send = work(&alone, IBV_WR_SEND, 1);
    let result = bench.here.post_send(end.qp.qp, &send);
    must_fail(result, libc::EINVAL, "send in RESET")?;
    bench
        .here
        .call(
            crate::agent::Operation::ToInit,
            &[end.qp.qp, u64::from(ALL_ACCESS)],
        )
        .at("to INIT")?;
    bench
        .here
        .post_recv(end.qp.qp, 1, &[])
        .at("receive in INIT")?;
    let result = bench.here.post_send(end.qp.qp, &send);
    must_fail(result, libc::EINVAL, "send in INIT")?;

    let pair = bench.pair(&PairOptions::default())?;
    let mut many = work(&pair, IBV_WR_RDMA_WRITE, 1);
    many.entries = vec![many.entries[0]; pair.here.qp.send_sge as usize + 1];
    let result = bench.here.post_send(pair.here.qp.qp, &many);
    must_fail(result, libc::EINVAL, "too many entries in a send")?;
    let entries = vec![(pair.here.address, 1, pair.here.lkey); 33];
    let result = bench.here.post_recv(pair.here.qp.qp, 1, &entries);
    must_fail(result, libc::EINVAL, "too many entries in a receive")?;
    let unknown = work(&pair, 99, 1);
    let result = bench.here.post_send(pair.here.qp.qp, &unknown);
    must_fail(result, libc::EINVAL, "unknown opcode")?;
    bench.exchange(&pair)?;
    bench.destroy(&pair)
}

/// Posts until the queue is full; how many it took.
fn fill_up(mut post: impl FnMut(u64) -> Result<(), Errno>) -> Check<u64> {
    for index in 0..100_000 {
        match post(index) {
            Ok(()) => {}
            Err(Errno(libc::ENOMEM)) => return Ok(index),
            Err(errno) => return Err(format!("full after {index}: {errno}, not ENOMEM").into()),
        }
    }
    Err("the queue is never full".into())
}

fn send_queue_full(bench: &mut Bench) -> Check {
    let mut options = PairOptions {
        cq_entries: 256,
        ..Default::default()
    };
    options.qp.recv_wr = 128;
    let pair = bench.pair(&options)?;
    // Nothing can go: there is no receive.
    let posted = fill_up(|index| {
        let mut send = work(&pair, IBV_WR_SEND, 10);
        send.wr_id = index;
        bench.here.post_send(pair.here.qp.qp, &send)
    })?;
    expect!(
        posted,
        u64::from(pair.here.qp.send_wr),
        "posts that were taken"
    );
    for index in 0..posted {
        let entry = (pair.there.address, 10, pair.there.lkey);
        bench
            .there
            .post_recv(pair.there.qp.qp, index, &[entry])
            .at("ibv_post_recv")?;
    }
    for index in 0..posted {
        let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "send")?;
        expect!(done.wr_id, index, "order of sends");
        let done = bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
        expect!(done.wr_id, index, "order of receives");
    }
    bench.exchange(&pair)?;
    bench.destroy(&pair)
}

fn receive_queue_full(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let list = entries(&pair.there, &vec![(0, 100)]);
    let posted = fill_up(|index| bench.there.post_recv(pair.there.qp.qp, index, &list))?;
    if posted < 16 {
        return Err(format!("only {posted} receives were taken").into());
    }
    for index in 0..3 {
        bench
            .here
            .post_send(pair.here.qp.qp, &work(&pair, IBV_WR_SEND, 10))
            .at("ibv_post_send")?;
        bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "send")?;
        let done = bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
        expect!(done.wr_id, index, "order of receives");
        // One place is free again, and only one.
        bench
            .there
            .post_recv(pair.there.qp.qp, posted + index, &list)
            .at("ibv_post_recv")?;
        let result = bench.there.post_recv(pair.there.qp.qp, 0, &list);
        must_fail(result, libc::ENOMEM, "one receive more")?;
    }
    bench.destroy(&pair)
}

fn flush(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    // The sends wait for a receive that does not come.
    for index in 0..6 {
        let mut send = work(&pair, IBV_WR_SEND, 10);
        send.wr_id = 100 + index;
        // Asked for or not: every flushed request completes.
        send.flags = if index % 2 == 0 { IBV_SEND_SIGNALED } else { 0 };
        bench
            .here
            .post_send(pair.here.qp.qp, &send)
            .at("ibv_post_send")?;
        let entry = (pair.here.address, 10, pair.here.lkey);
        bench
            .here
            .post_recv(pair.here.qp.qp, 200 + index, &[entry])
            .at("ibv_post_recv")?;
    }
    bench
        .here
        .set_state(pair.here.qp.qp, IBV_QPS_ERR)
        .at("to ERR")?;
    // And two more of each when it is in error already.
    for index in 6..8 {
        let mut send = work(&pair, IBV_WR_SEND, 10);
        send.wr_id = 100 + index;
        bench
            .here
            .post_send(pair.here.qp.qp, &send)
            .at("post in ERR")?;
        bench
            .here
            .post_recv(pair.here.qp.qp, 200 + index, &[])
            .at("post in ERR")?;
    }
    for index in 0..8 {
        let cases = [
            (pair.here.send_cq, 100 + index, "send"),
            (pair.here.recv_cq, 200 + index, "receive"),
        ];
        for (cq, wr_id, what) in cases {
            let done = bench.status(End::Here, cq, IBV_WC_WR_FLUSH_ERR, what)?;
            expect!(done.wr_id, wr_id, "order of flushed {what}s");
            expect!(done.qpn, pair.here.qp.qpn, "queue pair of a flushed {what}");
        }
    }
    bench.destroy(&pair)
}

fn reset_and_reuse(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    for round in 0..3 {
        bench.exchange(&pair)?;
        // Leave something in every queue: nothing of it may come back.
        let entry = (pair.here.address, 10, pair.here.lkey);
        bench
            .here
            .post_recv(pair.here.qp.qp, 300 + round, &[entry])
            .at("ibv_post_recv")?;
        let mut write = work(&pair, IBV_WR_RDMA_WRITE, 10);
        write.wr_id = 400 + round;
        bench
            .here
            .post_send(pair.here.qp.qp, &write)
            .at("ibv_post_send")?;
        if round == 1 {
            bench
                .here
                .set_state(pair.here.qp.qp, IBV_QPS_ERR)
                .at("to ERR")?;
        }
        for (end, own) in [(End::Here, pair.here), (End::There, pair.there)] {
            bench
                .side(end)
                .set_state(own.qp.qp, IBV_QPS_RESET)
                .at("to RESET")?;
            for cq in [own.send_cq, own.recv_cq] {
                let left = bench
                    .side(end)
                    .poll(cq, std::time::Duration::ZERO)
                    .at("ibv_poll_cq")?;
                expect!(left, None, "completion left after RESET");
            }
        }
        bench.connect(&pair, &options)?;
    }
    bench.exchange(&pair)?;
    bench.destroy(&pair)
}
