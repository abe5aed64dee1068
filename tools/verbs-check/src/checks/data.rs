// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every operation with every size around a boundary, verified byte by byte.

use crate::bench::{At, Bench, End, Message, Pair, PairOptions, Pieces};
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Errno, QpOptions, SendWork};

/// The operations, with the names used in the report.
pub const OPERATIONS: [(&str, u32); 5] = [
    ("send", IBV_WR_SEND),
    ("send-imm", IBV_WR_SEND_WITH_IMM),
    ("write", IBV_WR_RDMA_WRITE),
    ("write-imm", IBV_WR_RDMA_WRITE_WITH_IMM),
    ("read", IBV_WR_RDMA_READ),
];

const PAGE: usize = 4096;
const LARGEST: usize = 1 << 20;

/// Options of the pair that the sizes are run on.
pub fn options() -> PairOptions {
    PairOptions {
        size: LARGEST + (64 << 10),
        ..Default::default()
    }
}

pub fn sizes(mtu: usize) -> Vec<usize> {
    let mut sizes = vec![
        0,
        1,
        mtu - 1,
        mtu,
        mtu + 1,
        2 * mtu,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        64 << 10,
        LARGEST,
    ];
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

pub fn run(bench: &mut Bench, report: &mut Report) {
    let sizes = sizes(bench.mtu_bytes());
    match bench.pair(&options()) {
        Ok(pair) => {
            for (name, opcode) in OPERATIONS {
                for &size in &sizes {
                    let result = bench.transfer(&pair, &Message::simple(opcode, size));
                    report.enter(&format!("data: {name} of {size} bytes"), result);
                }
            }
        }
        Err(outcome) => report.enter("data: connect", Err(outcome)),
    }
    report.enter("data: destroy", bench.reset());

    for (name, opcode) in OPERATIONS {
        let result = scattered(bench, opcode);
        bench.conclude(report, &format!("data: {name} in unaligned pieces"), result);
    }
    for (name, opcode) in &OPERATIONS[..4] {
        let result = inline(bench, *opcode);
        bench.conclude(report, &format!("data: {name} inline"), result);
    }
    for (name, opcode) in OPERATIONS {
        let result = new_keys(bench, opcode);
        let name = format!("data: {name} under keys made right before");
        bench.conclude(report, &name, result);
    }
    let result = unsignaled(bench);
    bench.conclude(
        report,
        "data: unsignaled sends complete with the next",
        result,
    );
    let result = pipelined(bench);
    bench.conclude(report, "data: a full queue again and again", result);
    let result = larger_receive(bench);
    bench.conclude(report, "data: a receive larger than the message", result);
    let result = limit(bench);
    bench.conclude(report, "data: longest message announced and kept", result);
}

/// Splits `length` bytes into pieces with gaps between them.
fn pieces(lengths: &[usize], start: usize) -> Pieces {
    let mut offset = start;
    lengths
        .iter()
        .map(|&length| {
            let piece = (offset, length);
            offset += length + 5;
            piece
        })
        .collect()
}

fn scattered(bench: &mut Bench, opcode: u32) -> Check {
    let sge = bench
        .hello_here
        .max_sge
        .min(bench.hello_there.max_sge)
        .min(6);
    let mut options = options();
    options.qp.send_sge = sge;
    options.qp.recv_sge = sge;
    let pair = bench.pair(&options)?;
    let mtu = bench.mtu_bytes();
    for lengths in [
        vec![1, 1, 1],
        vec![1, mtu - 1, 1],
        vec![7, 0, mtu + 3, PAGE + 1, 13, 2 * PAGE - 1],
        vec![30_001, 3, 50_000],
    ] {
        let lengths = &lengths[..lengths.len().min(sge as usize)];
        let total: usize = lengths.iter().sum();
        let message = Message {
            opcode,
            flags: 0,
            local: pieces(lengths, PAGE - 3),
            remote: match opcode {
                IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => {
                    // Other borders than the sender's.
                    let mut lengths: Vec<usize> = lengths.to_vec();
                    lengths.reverse();
                    pieces(&lengths, 2 * PAGE - 1)
                }
                _ => vec![(2 * PAGE - 1, total)],
            },
        };
        bench.transfer(&pair, &message)?;
    }
    Ok(())
}

fn inline(bench: &mut Bench, opcode: u32) -> Check {
    let mut options = options();
    options.qp.inline = 64;
    options.qp.send_sge = 2;
    let pair = bench.pair(&options)?;
    let most = pair.here.qp.inline as usize;
    if most < 64 {
        return Err(format!("asked for 64 inline bytes, got {most}").into());
    }
    for size in [0, 1, 15, 16, 17, 31, 33, 64, most] {
        let message = Message {
            flags: IBV_SEND_INLINE,
            ..Message::simple(opcode, size)
        };
        bench.transfer(&pair, &message)?;
    }
    let message = Message {
        opcode,
        flags: IBV_SEND_INLINE,
        local: pieces(&[13, 29], PAGE - 3),
        remote: vec![(2 * PAGE - 1, 42)],
    };
    bench.transfer(&pair, &message)?;
    // One byte too many.
    let work = SendWork {
        opcode,
        flags: IBV_SEND_INLINE,
        entries: vec![(pair.here.address, most as u32 + 1, pair.here.lkey)],
        ..Default::default()
    };
    match bench.here.post_send(pair.here.qp.qp, &work) {
        Ok(()) => Err("too much inline data was taken".into()),
        Err(Errno(libc::EINVAL)) => bench.exchange(&pair),
        Err(errno) => Err(format!("refused with {errno} instead of EINVAL").into()),
    }
}

/// Each end has its memory registered when the connection is there, and uses the key at once: nothing is
/// waited for between the two.
fn new_keys(bench: &mut Bench, opcode: u32) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    for _ in 0..4 {
        let mut with_new = pair;
        for (end, own) in [
            (End::There, &mut with_new.there),
            (End::Here, &mut with_new.here),
        ] {
            (own.mr, own.lkey, own.rkey) = bench
                .side(end)
                .mr(own.pd, own.buffer, 0, options.size, options.mr_access)
                .at("ibv_reg_mr")?;
        }
        bench.transfer(&with_new, &Message::simple(opcode, PAGE + 1))?;
        for (end, own) in [(End::There, with_new.there), (End::Here, with_new.here)] {
            bench.side(end).destroy(own.mr).at("ibv_dereg_mr")?;
        }
    }
    Ok(())
}

/// A write work request between the buffers of a pair.
fn write_work(pair: &Pair, offset: usize, length: usize, wr_id: u64, flags: u32) -> SendWork {
    SendWork {
        wr_id,
        opcode: IBV_WR_RDMA_WRITE,
        flags,
        remote_address: pair.there.address + offset as u64,
        rkey: pair.there.rkey,
        entries: vec![(
            pair.here.address + offset as u64,
            length as u32,
            pair.here.lkey,
        )],
        ..Default::default()
    }
}

fn unsignaled(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let seed = bench.seed();
    bench
        .here
        .fill(pair.here.buffer, 0, 10_000, seed)
        .map_err(|errno| Outcome::Failed(errno.to_string()))?;
    // Many times the queue's length; only every fourth completes.
    for round in 0..50u64 {
        for part in 0..4 {
            let flags = if part == 3 { IBV_SEND_SIGNALED } else { 0 };
            let work = write_work(&pair, part * 2500, 2500, round, flags);
            bench
                .here
                .post_send(pair.here.qp.qp, &work)
                .map_err(|errno| Outcome::Failed(format!("post in round {round}: {errno}")))?;
        }
        let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "write")?;
        crate::expect!(done.wr_id, round, "wr_id");
    }
    let more = bench
        .here
        .poll(pair.here.send_cq, crate::bench::SHORT)
        .map_err(|errno| Outcome::Failed(errno.to_string()))?;
    crate::expect!(more, None, "a completion that was not asked for");
    let wrong = bench
        .there
        .check_part(pair.there.buffer, 0, 10_000, seed, 0)
        .map_err(|errno| Outcome::Failed(errno.to_string()))?;
    crate::expect!(wrong, None, "first wrong byte");
    Ok(())
}

/// Fills the send queue to its last place, takes all, and so on, past the end of all rings.
fn pipelined(bench: &mut Bench) -> Check {
    let mut options = PairOptions {
        size: 64 << 10,
        ..Default::default()
    };
    options.qp = QpOptions {
        send_wr: 20,
        send_sge: 4,
        ..options.qp
    };
    options.cq_entries = 512;
    let pair = bench.pair(&options)?;
    let depth = u64::from(pair.here.qp.send_wr).min(500);
    let failed = |errno: crate::verbs::Errno| Outcome::Failed(errno.to_string());
    for round in 0..5u64 {
        let seed = bench.seed();
        let length = 64 * depth as usize;
        bench
            .here
            .fill(pair.here.buffer, 0, length, seed)
            .map_err(failed)?;
        for index in 0..depth {
            let mut work = write_work(
                &pair,
                64 * index as usize,
                64,
                (round << 32) | index,
                IBV_SEND_SIGNALED,
            );
            if index % 3 == 1 {
                // Of another size, to move the borders of work requests in the ring.
                let (address, _, key) = work.entries[0];
                work.entries = vec![
                    (address, 1, key),
                    (address + 1, 30, key),
                    (address + 31, 32, key),
                    (address + 63, 1, key),
                ];
            }
            bench
                .here
                .post_send(pair.here.qp.qp, &work)
                .map_err(|errno| {
                    Outcome::Failed(format!("post {index} of {depth}, round {round}: {errno}"))
                })?;
        }
        for index in 0..depth {
            let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "write")?;
            crate::expect!(done.wr_id, (round << 32) | index, "order of completions");
        }
        let wrong = bench
            .there
            .check_part(pair.there.buffer, 0, length, seed, 0)
            .map_err(failed)?;
        crate::expect!(wrong, None, "first wrong byte in round {round}");
    }
    Ok(())
}

fn larger_receive(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let mut message = Message::simple(IBV_WR_SEND, 1000);
    message.remote = vec![(9000, 2000)];
    bench.transfer(&pair, &message)
}

/// The port announces the longest message; one byte more is refused, at once or by completion.
fn limit(bench: &mut Bench) -> Check {
    let most = bench.hello_here.max_message;
    if most < 1 << 20 {
        return Err(format!("the longest message is announced as {most} bytes").into());
    }
    let mut options = PairOptions::default();
    options.qp.send_sge = 3;
    let pair = bench.pair(&options)?;
    let half = (most / 2) as u32;
    let mut work = write_work(&pair, 0, 0, 7, IBV_SEND_SIGNALED);
    work.entries = vec![
        (pair.here.address, half, pair.here.lkey),
        (
            pair.here.address,
            (most - u64::from(half)) as u32,
            pair.here.lkey,
        ),
        (pair.here.address, 1, pair.here.lkey),
    ];
    match bench.here.post_send(pair.here.qp.qp, &work) {
        Err(Errno(libc::EINVAL)) => bench.exchange(&pair),
        Err(errno) => Err(format!("refused with {errno} instead of EINVAL").into()),
        Ok(()) => {
            let done = bench.completion(End::Here, pair.here.send_cq)?;
            if done.status == IBV_WC_SUCCESS {
                Err("more than the longest message went through".into())
            } else {
                Ok(())
            }
        }
    }
}
