// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What must go wrong, in the right way: the proper errno, status or event, nothing touched, other
//! queue pairs undisturbed, and new ones working afterwards. Keys, ranges and rights are the matter
//! of `access`.

use super::refusal::{self, flushes, in_error, mark, must_fail, work, Body, MARKED};
use crate::bench::{entries, At, Bench, End, Message, Pair, PairOptions, ALL_ACCESS, SHORT};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::Errno;

const CHECKS: &[(&str, Body)] = &[
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
    let checks = CHECKS.iter().map(|&(name, body)| (name.to_owned(), body));
    refusal::run_beside(bench, report, "errors", checks);
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
            .check_set(
                pair.there.buffer,
                room as usize,
                MARKED - room as usize,
                0x22,
            )
            .at("check")?;
        expect!(wrong, None, "first byte touched behind the receive");
        bench.destroy(&pair)?;
    }
    Ok(())
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
