// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queue pairs on which a registration that fails drains the send queue (`ferritedv.h`): what was
//! before it is finished, it has its error, what is behind it is flushed, the peer notices nothing; the
//! program mends what was wrong and goes on. That the same ends the connection of others is a matter
//! of `lists`, which has the same causes.

use std::time::Duration;

use super::lists::{
    by_peer, inbox, options, register, with_lists, Bad, Cause, Listed, Piece, CAUSES,
};
use super::refusal::{
    failed, flushes, flushes_later, from_there, in_error, in_state, mark, must_fail, next_key,
    no_events, vendor, work, wrong, MARKED,
};
use crate::bench::{At, Bench, End, Message, Pair, PATIENCE};
use crate::direct::{DRAINS, LISTS};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;

pub fn run(bench: &mut Bench, report: &mut Report) {
    for cause in CAUSES {
        let result = with_lists(bench).and_then(|()| {
            drains(bench, cause, false)?;
            drains(bench, cause, true)
        });
        bench.conclude(report, &format!("drains: {}", cause.0), result);
    }
    type Body = fn(&mut Bench) -> Check;
    let checks: &[(&str, Body)] = &[
        ("again and again", again),
        ("the first of two that fail", two),
        ("failed or reset instead of mended", given_up),
        ("what else fails ends the connection", others),
    ];
    for (name, body) in checks {
        let result = with_lists(bench).and_then(|()| body(bench));
        bench.conclude(report, &format!("drains: {name}"), result);
    }
}

/// A connected pair; both ends drain.
fn pair(bench: &mut Bench) -> Check<Pair> {
    no_events(bench)?;
    let options = options(bench, LISTS | DRAINS);
    bench.pair(&options)
}

/// Posts a bad registration here, and behind it a write that uses it and one that does not, neither
/// of which asks for a completion.
fn post(bench: &mut Bench, pair: &Pair, bad: &Bad) -> Check {
    let qp = pair.here.qp.qp;
    bench
        .here
        .post_list(qp, bad.list, &bad.work)
        .at("ferritedv_post_register_list")?;
    let mut uses = work(pair, IBV_WR_RDMA_WRITE, 0);
    uses.entries = vec![(bad.work.address, 10, bad.work.key)];
    (uses.wr_id, uses.flags) = (52, 0);
    let mut plain = work(pair, IBV_WR_RDMA_WRITE, 100);
    (plain.wr_id, plain.flags) = (53, 0);
    for work in [uses, plain] {
        bench.here.post_send(qp, &work).at("ibv_post_send")?;
    }
    Ok(())
}

/// Its error, and the flushes behind it; then the queue pair has drained, and said so once.
fn drained(bench: &mut Bench, pair: &Pair, bad: &Bad) -> Check {
    bad.fails(bench, pair, bad.work.wr_id, &[52, 53])?;
    let event = bench.here.async_event(PATIENCE).at("events")?;
    expect!(
        event,
        Some((IBV_EVENT_SQ_DRAINED, pair.here.qp.qpn)),
        "asynchronous event"
    );
    in_state(bench, End::Here, pair.here.qp.qp, IBV_QPS_SQD)
}

/// The program has mended what was wrong.
fn go_on(bench: &mut Bench, pair: &Pair) -> Check {
    bench
        .here
        .set_state(pair.here.qp.qp, IBV_QPS_RTS)
        .at("from SQD to RTS")?;
    in_state(bench, End::Here, pair.here.qp.qp, IBV_QPS_RTS)
}

/// A registration with which nothing is wrong.
fn good(bench: &mut Bench, pair: &Pair) -> Check<Listed> {
    let own = pair.here;
    let (list, key) = bench.here.list(own.pd, 2).at("ferritedv_alloc_list")?;
    Ok(Listed {
        list,
        key: next_key(key),
        access: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
        address: own.address,
        pieces: [(20_000, 3000), (10_000, 3000)]
            .map(|(offset, length)| Piece {
                offset,
                length,
                lkey: own.lkey,
            })
            .to_vec(),
    })
}

/// The peer's requests are served and its messages received, also by what was posted before.
fn peer_goes_on(bench: &mut Bench, pair: &Pair) -> Check {
    let mut send = work(pair, IBV_WR_SEND, 0);
    send.entries = vec![(pair.there.address, 100, pair.there.lkey)];
    bench
        .there
        .post_send(pair.there.qp.qp, &send)
        .at("ibv_post_send")?;
    bench.status(
        End::There,
        pair.there.send_cq,
        IBV_WC_SUCCESS,
        "peer's send",
    )?;
    let done = bench.status(End::Here, pair.here.recv_cq, IBV_WC_SUCCESS, "receive")?;
    expect!(
        (done.wr_id, done.byte_len),
        (54, 100),
        "what was posted before the failure"
    );
    from_there(bench, pair, |bench, back| {
        for opcode in [
            IBV_WR_SEND_WITH_IMM,
            IBV_WR_RDMA_WRITE,
            IBV_WR_RDMA_WRITE_WITH_IMM,
            IBV_WR_RDMA_READ,
        ] {
            bench.transfer(back, &Message::simple(opcode, 9000))?;
        }
        Ok(())
    })
}

fn drains(bench: &mut Bench, cause: &Cause, with_message: bool) -> Check {
    let pair = pair(bench)?;
    let mut bad = (cause.1)(bench, &pair)?;
    mark(bench, &pair)?;
    let receive = (pair.here.address + 100_000, 1000, pair.here.lkey);
    bench
        .here
        .post_recv(pair.here.qp.qp, 54, &[receive])
        .at("ibv_post_recv")?;
    if with_message {
        bad.work.message = Some((vec![(pair.here.address, 100, pair.here.lkey)], 0));
        bad.work.flags = 0;
    }
    // The queue stands still until the peer has a receive: nothing is over before that.
    let mut first = work(&pair, IBV_WR_SEND, 50);
    first.wr_id = 50;
    let mut second_write = work(&pair, IBV_WR_RDMA_WRITE, 70);
    second_write.wr_id = 51;
    second_write.remote_address += 1000;
    for work in [&first, &second_write] {
        bench
            .here
            .post_send(pair.here.qp.qp, work)
            .at("ibv_post_send")?;
    }
    post(bench, &pair, &bad)?;
    let early = bench
        .here
        .poll(pair.here.send_cq, Duration::from_millis(50))
        .at("ibv_poll_cq")?;
    expect!(early, None, "a completion before its time");
    // One for what is before it, and one that its own message would find.
    inbox(bench, &pair)?;
    inbox(bench, &pair)?;
    for wr_id in [50, 51] {
        let done = bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_SUCCESS,
            "what is before",
        )?;
        expect!(done.wr_id, wr_id, "order of what is before it");
    }
    drained(bench, &pair, &bad)?;
    flushes_later(bench, &pair)?;
    // What was before it has arrived, and nothing else.
    let received = pair.there.recv_cq;
    let done = bench.status(End::There, received, IBV_WC_SUCCESS, "receive")?;
    expect!(done.byte_len, 50, "length of the message before it");
    let another = bench
        .there
        .poll(received, Duration::ZERO)
        .at("ibv_poll_cq")?;
    expect!(another, None, "a second message");
    for (from, to, byte) in [
        (0, 50, 0x11),
        (50, 1000, 0x22),
        (1000, 1070, 0x11),
        (1070, MARKED, 0x22),
    ] {
        let wrong = bench
            .there
            .check_set(pair.there.buffer, from, to - from, byte)
            .at("check")?;
        expect!(wrong, None, "first byte that is not {byte:#x} from {from}");
    }
    let wrong = bench
        .here
        .check_set(pair.here.buffer, 0, MARKED, 0x11)
        .at("check")?;
    expect!(wrong, None, "first touched byte here");
    peer_goes_on(bench, &pair)?;
    bad.opens_nothing(bench, &pair)?;
    flushes_later(bench, &pair)?;

    go_on(bench, &pair)?;
    let listed = good(bench, &pair)?;
    // In the way in which it failed; a message then finds the receive that is left.
    if with_message {
        let mut work = listed.work(&pair.here);
        work.message = Some((vec![(pair.here.address, 60, pair.here.lkey)], 0));
        bench
            .here
            .post_list(pair.here.qp.qp, listed.list, &work)
            .at("ferritedv_post_register_list_and_send")?;
    } else {
        register(bench, End::Here, &pair.here, &listed)?;
        bench
            .here
            .post_send(pair.here.qp.qp, &work(&pair, IBV_WR_SEND, 60))
            .at("ibv_post_send")?;
    }
    let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the message")?;
    expect!(done.opcode, IBV_WC_SEND, "opcode of the message");
    let done = bench.status(End::There, received, IBV_WC_SUCCESS, "its receive")?;
    expect!((done.wr_id, done.byte_len), (40, 60), "its receive");
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        by_peer(bench, &pair, &listed, opcode, 2000, 2000)?;
    }
    bench.exchange(&pair)?;
    let event = bench.here.async_event(Duration::ZERO).at("events")?;
    expect!(event, None, "another event");
    in_state(bench, End::Here, pair.here.qp.qp, IBV_QPS_RTS)
}

/// A registration with which one thing is wrong, whatever it is.
fn bad(bench: &mut Bench, pair: &Pair) -> Check<Bad> {
    (CAUSES[0].1)(bench, pair)
}

fn again(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let bad = bad(bench, &pair)?;
    let mut listed = good(bench, &pair)?;
    for _ in 0..20 {
        post(bench, &pair, &bad)?;
        drained(bench, &pair, &bad)?;
        go_on(bench, &pair)?;
        listed.key = next_key(listed.key);
        register(bench, End::Here, &pair.here, &listed)?;
        by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 0, 6000)?;
        let mut end = work(&pair, IBV_WR_LOCAL_INV, 0);
        end.immediate = listed.key;
        end.entries = Vec::new();
        bench
            .here
            .post_send(pair.here.qp.qp, &end)
            .at("ibv_post_send")?;
        bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "its end")?;
    }
    bench.exchange(&pair)
}

/// Behind one that fails nothing is looked at, another that would fail neither.
fn two(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let bad = bad(bench, &pair)?;
    // Held back as above, so that both are there when the first fails.
    let first = work(&pair, IBV_WR_SEND, 50);
    bench
        .here
        .post_send(pair.here.qp.qp, &first)
        .at("ibv_post_send")?;
    for wr_id in [60, 61] {
        let mut work = bad.work.clone();
        work.wr_id = wr_id;
        bench
            .here
            .post_list(pair.here.qp.qp, bad.list, &work)
            .at("ferritedv_post_register_list")?;
    }
    inbox(bench, &pair)?;
    let cq = pair.here.send_cq;
    bench.status(End::Here, cq, IBV_WC_SUCCESS, "what is before")?;
    bad.fails(bench, &pair, 60, &[61])?;
    let event = bench.here.async_event(PATIENCE).at("events")?;
    let told = Some((IBV_EVENT_SQ_DRAINED, pair.here.qp.qpn));
    expect!(event, told, "asynchronous event");
    go_on(bench, &pair)?;
    let event = bench.here.async_event(Duration::ZERO).at("events")?;
    expect!(event, None, "a second event");
    bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
    bench.exchange(&pair)
}

fn given_up(bench: &mut Bench) -> Check {
    for state in [IBV_QPS_ERR, IBV_QPS_RESET] {
        let pair = pair(bench)?;
        let bad = bad(bench, &pair)?;
        let receive = (pair.here.address, 1000, pair.here.lkey);
        bench
            .here
            .post_recv(pair.here.qp.qp, 54, &[receive])
            .at("ibv_post_recv")?;
        post(bench, &pair, &bad)?;
        drained(bench, &pair, &bad)?;
        bench
            .here
            .set_state(pair.here.qp.qp, state)
            .at("from SQD")?;
        in_state(bench, End::Here, pair.here.qp.qp, state)?;
        if state == IBV_QPS_ERR {
            let done = bench.status(
                End::Here,
                pair.here.recv_cq,
                IBV_WC_WR_FLUSH_ERR,
                "the receive",
            )?;
            expect!(done.wr_id, 54, "wr_id of the receive");
            let result = bench.here.set_state(pair.here.qp.qp, IBV_QPS_RTS);
            must_fail(result, libc::EINVAL, "from ERR to RTS")?;
        } else {
            bench
                .there
                .set_state(pair.there.qp.qp, IBV_QPS_RESET)
                .at("to RESET")?;
            let options = options(bench, LISTS | DRAINS);
            bench.connect(&pair, &options)?;
            let listed = good(bench, &pair)?;
            register(bench, End::Here, &pair.here, &listed)?;
            bench.exchange(&pair)?;
            // And it drains as before.
            post(bench, &pair, &bad)?;
            drained(bench, &pair, &bad)?;
            go_on(bench, &pair)?;
        }
    }
    Ok(())
}

/// A key that is no good in a write, and the end of a list that is not registered.
fn others(bench: &mut Bench) -> Check {
    for invalidates in [false, true] {
        let pair = pair(bench)?;
        let mut request = work(&pair, IBV_WR_RDMA_WRITE, 100);
        let vendor_err = if invalidates {
            let listed = good(bench, &pair)?;
            request.opcode = IBV_WR_LOCAL_INV;
            request.immediate = listed.key;
            request.entries = Vec::new();
            vendor::NOT_VALID
        } else {
            request.entries[0].2 = wrong(request.entries[0].2);
            vendor::NO_ENTRY
        };
        bench
            .here
            .post_send(pair.here.qp.qp, &request)
            .at("ibv_post_send")?;
        failed(
            bench,
            End::Here,
            pair.here.send_cq,
            request.wr_id,
            IBV_WC_LOC_PROT_ERR,
            vendor_err,
        )?;
        in_error(bench, End::Here, pair.here.qp.qp)?;
        flushes(bench, &pair)?;
        let event = bench.here.async_event(Duration::ZERO).at("events")?;
        expect!(event, None, "an event");
    }
    Ok(())
}
