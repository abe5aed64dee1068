// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion events: one for each arming, none without, solicited or not.

use std::time::{Duration, Instant};

use crate::bench::{At, Bench, End, Message, Pair, PairOptions, PATIENCE, SHORT};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::Errno;

pub fn run(bench: &mut Bench, report: &mut Report) {
    let result = next(bench);
    bench.conclude(report, "events: one event for each arming", result);
    let result = unpolled(bench);
    bench.conclude(
        report,
        "events: an arming is for what comes after it",
        result,
    );
    let result = solicited(bench);
    bench.conclude(
        report,
        "events: solicited only for solicited messages",
        result,
    );
    let result = solicited_error(bench);
    bench.conclude(
        report,
        "events: a failed completion counts as solicited",
        result,
    );
    let result = moderated(bench);
    bench.conclude(report, "events: moderated, by count and by time", result);
    let vectors = bench.hello_there.vectors;
    for vector in 0..vectors.min(8) {
        let result = on_vector(bench, vector);
        bench.conclude(
            report,
            &format!("events: on completion vector {vector}"),
            result,
        );
    }
    let result = beyond_vectors(bench);
    bench.conclude(report, "events: no vector beyond the last", result);
}

fn options() -> PairOptions {
    PairOptions {
        events: true,
        ..Default::default()
    }
}

fn no_event(bench: &mut Bench, pair: &Pair) -> Check {
    let event = bench
        .there
        .channel_event(pair.there.channel, SHORT)
        .at("channel")?;
    expect!(event, None, "an event that was not asked for");
    Ok(())
}

fn event(bench: &mut Bench, pair: &Pair) -> Check {
    let event = bench
        .there
        .channel_event(pair.there.channel, PATIENCE)
        .at("channel")?;
    expect!(event, Some(pair.there.recv_cq), "the queue of the event");
    Ok(())
}

/// Sends a message with flags and leaves its completions to be taken.
fn send(bench: &mut Bench, pair: &Pair, flags: u32) -> Check<(Message, u64)> {
    let message = Message {
        flags,
        ..Message::simple(IBV_WR_SEND, 300)
    };
    let seed = bench.prepare(pair, &message)?;
    bench.post(pair, &message, seed)?;
    Ok((message, seed))
}

fn next(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options())?;
    for _ in 0..5 {
        bench.there.arm(pair.there.recv_cq, false).at("arm")?;
        let (message, seed) = send(bench, &pair, 0)?;
        event(bench, &pair)?;
        bench.finish(&pair, &message, seed)?;
        // Not armed again: silence.
        let (message, seed) = send(bench, &pair, 0)?;
        bench.finish(&pair, &message, seed)?;
        no_event(bench, &pair)?;
    }
    Ok(())
}

/// A completion that is there when the queue is armed is none to wait for, polled or not.
fn unpolled(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options())?;
    bench.there.arm(pair.there.recv_cq, false).at("arm")?;
    for solicited in [false, true, false] {
        let (message, seed) = send(bench, &pair, IBV_SEND_SOLICITED)?;
        event(bench, &pair)?;
        bench.there.arm(pair.there.recv_cq, solicited).at("arm")?;
        no_event(bench, &pair)?;
        bench.finish(&pair, &message, seed)?;
        no_event(bench, &pair)?;
    }
    Ok(())
}

fn solicited(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options())?;
    for _ in 0..3 {
        bench.there.arm(pair.there.recv_cq, true).at("arm")?;
        let (message, seed) = send(bench, &pair, 0)?;
        bench.finish(&pair, &message, seed)?;
        no_event(bench, &pair)?;
        let (message, seed) = send(bench, &pair, IBV_SEND_SOLICITED)?;
        event(bench, &pair)?;
        bench.finish(&pair, &message, seed)?;
    }
    Ok(())
}

fn solicited_error(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options())?;
    bench.there.arm(pair.there.recv_cq, true).at("arm")?;
    bench
        .there
        .post_recv(pair.there.qp.qp, 1, &[])
        .at("ibv_post_recv")?;
    bench
        .there
        .set_state(pair.there.qp.qp, IBV_QPS_ERR)
        .at("to ERR")?;
    event(bench, &pair)?;
    bench.status(
        End::There,
        pair.there.recv_cq,
        IBV_WC_WR_FLUSH_ERR,
        "the receive",
    )?;
    Ok(())
}

/// Moderation holds an event back until so many completions are there, or for so long.
fn moderated(bench: &mut Bench) -> Check {
    const COUNT: u16 = 3;
    const PERIOD: Duration = Duration::from_millis(65);
    let pair = bench.pair(&options())?;
    let cq = pair.there.recv_cq;
    bench
        .there
        .moderate(cq, COUNT, PERIOD.as_micros() as u16)
        .at("ibv_modify_cq")?;
    let round = |bench: &mut Bench, messages: u16| -> Check<Duration> {
        bench.there.arm(cq, false).at("arm")?;
        let message = Message::simple(IBV_WR_SEND, 300);
        let seeds: Vec<u64> = (0..messages)
            .map(|_| bench.prepare(&pair, &message))
            .collect::<Check<_>>()?;
        let start = Instant::now();
        for seed in seeds {
            bench.post(&pair, &message, seed)?;
        }
        event(bench, &pair)?;
        let time = start.elapsed();
        // The messages have one buffer in common: what is in it now is not looked at.
        for _ in 0..messages {
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the send")?;
            bench.status(End::There, cq, IBV_WC_SUCCESS, "the receive")?;
        }
        Ok(time)
    };
    for _ in 0..3 {
        let time = round(bench, 1)?;
        if time < PERIOD {
            return Err(format!("one of {COUNT} completions raised an event in {time:?}").into());
        }
    }
    // On a busy machine each may take long; not all do.
    for _ in 0..200 {
        if round(bench, COUNT)? < PERIOD {
            return Ok(());
        }
    }
    Err(format!("{COUNT} completions never raised an event before the time was over").into())
}

fn on_vector(bench: &mut Bench, vector: u32) -> Check {
    let here = bench.end(End::Here, &PairOptions::default())?;
    let there = bench.end(
        End::There,
        &PairOptions {
            vector,
            ..options()
        },
    )?;
    let pair = Pair { here, there };
    bench.connect(&pair, &PairOptions::default())?;
    for _ in 0..3 {
        bench.there.arm(pair.there.recv_cq, false).at("arm")?;
        let (message, seed) = send(bench, &pair, 0)?;
        event(bench, &pair)?;
        bench.finish(&pair, &message, seed)?;
    }
    Ok(())
}

fn beyond_vectors(bench: &mut Bench) -> Check {
    let vectors = bench.hello_there.vectors;
    let channel = bench.there.channel().at("channel")?;
    match bench.there.cq(16, channel, vectors, false) {
        Ok(_) => Err(format!("vector {vectors} of {vectors} was taken").into()),
        Err(Errno(libc::EINVAL)) => Ok(()),
        Err(errno) => Err(format!("refused with {errno} instead of EINVAL").into()),
    }
}
