// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events of many objects of the other end at once, while it may be kept from looking at them.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use super::refusal::{work, wrong};
use crate::bench::{At, Bench, End, Message, Pair, PairOptions, PATIENCE, SHORT};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;

/// More than twice as many as the smallest event queue has entries: one that has grown once has no room for all of
/// them either.
const PAIRS: usize = 40;

/// Says when it is about to post, waits for a file `go`-1, and for `go`-2 the second time, and says when
/// the other end's device has done everything.
pub fn run(bench: &mut Bench, report: &mut Report, go: &str) {
    let pairs: Check<Vec<Pair>> = (0..PAIRS)
        .map(|_| {
            bench.pair(&PairOptions {
                events: true,
                ..Default::default()
            })
        })
        .collect();
    let result = match pairs {
        Ok(pairs) => {
            let result = completions(bench, &pairs, &format!("{go}-1"));
            report.enter(
                &format!("flood: {PAIRS} armed queues raise one event each"),
                result,
            );
            failures(bench, &pairs, &format!("{go}-2"))
        }
        Err(outcome) => Err(outcome),
    };
    report.enter(
        &format!("flood: {PAIRS} queue pairs that fail raise one event each"),
        result,
    );
    report.enter("flood: destroy", bench.reset());
}

pub(super) fn say(line: &str) -> Check {
    println!("{line}");
    std::io::stdout()
        .flush()
        .map_err(|error| error.to_string().into())
}

/// Waits until somebody has made the file.
pub(super) fn wait_for(file: &str) -> Check {
    say(&format!("waits for {file}"))?;
    let deadline = Instant::now() + PATIENCE;
    while !Path::new(file).exists() {
        if Instant::now() > deadline {
            return Err(format!("nobody made {file}").into());
        }
        std::thread::sleep(SHORT / 10);
    }
    Ok(())
}

fn completions(bench: &mut Bench, pairs: &[Pair], go: &str) -> Check {
    let message = Message::simple(IBV_WR_SEND, 300);
    let mut seeds = Vec::new();
    for pair in pairs {
        bench.there.arm(pair.there.recv_cq, false).at("arm")?;
        seeds.push(bench.prepare(pair, &message)?);
    }
    wait_for(go)?;
    for (pair, seed) in pairs.iter().zip(&seeds) {
        bench.post(pair, &message, *seed)?;
    }
    let mut sent = Vec::new();
    for pair in pairs {
        sent.push(bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the send")?);
    }
    say(&format!("done with {go}"))?;
    for pair in pairs {
        let event = bench
            .there
            .channel_event(pair.there.channel, PATIENCE)
            .at("channel")?;
        expect!(event, Some(pair.there.recv_cq), "the queue of the event");
        bench.status(
            End::There,
            pair.there.recv_cq,
            IBV_WC_SUCCESS,
            "the receive",
        )?;
    }
    for pair in [&pairs[0], &pairs[PAIRS / 2], &pairs[PAIRS - 1]] {
        let event = bench
            .there
            .channel_event(pair.there.channel, SHORT)
            .at("channel")?;
        expect!(event, None, "a second event of one arming");
    }
    Ok(())
}

fn failures(bench: &mut Bench, pairs: &[Pair], go: &str) -> Check {
    wait_for(go)?;
    for pair in pairs {
        let mut work = work(pair, IBV_WR_RDMA_WRITE, 100);
        work.rkey = wrong(work.rkey);
        bench
            .here
            .post_send(pair.here.qp.qp, &work)
            .at("ibv_post_send")?;
    }
    for pair in pairs {
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_REM_ACCESS_ERR,
            "the write",
        )?;
    }
    say(&format!("done with {go}"))?;
    let mut missing: BTreeSet<u32> = pairs.iter().map(|pair| pair.there.qp.qpn).collect();
    while !missing.is_empty() {
        match bench.there.async_event(PATIENCE).at("async event")? {
            None => return Err(format!("no event of queue pairs {missing:?}").into()),
            Some((IBV_EVENT_QP_ACCESS_ERR, qpn)) if missing.remove(&qpn) => {}
            // That it is connected is said of some.
            Some((IBV_EVENT_COMM_EST, _)) => {}
            Some((event, qpn)) => {
                return Err(format!("event {event} of queue pair {qpn}").into());
            }
        }
    }
    let more = bench.there.async_event(SHORT).at("async event")?;
    expect!(more, None, "one event more");
    Ok(())
}
