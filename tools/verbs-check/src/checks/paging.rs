// SPDX-License-Identifier: Apache-2.0 OR MIT
//! On-demand regions: what is behind them changes, before and while they are used.

use crate::bench::{At, Bench, End, Pair, PairOptions, ALL_ACCESS, SHORT};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::{Change, SendWork};

const PAGE: usize = 4096;
const SIZE: usize = 64 * PAGE;
const CHUNK: usize = 3 * PAGE + 100;

/// A check and what it is called.
type Named = (&'static str, fn(&mut Bench) -> Check);

pub fn run(bench: &mut Bench, report: &mut Report) {
    let checks: [Named; 6] = [
        ("paging: pages come with their use", first_use),
        ("paging: memory changes between messages", changes),
        ("paging: memory changes under traffic", under_traffic),
        (
            "paging: memory that is not there is refused there",
            peer_unmapped,
        ),
        (
            "paging: memory that is not there is refused here",
            own_unmapped,
        ),
        ("paging: regions end under traffic", ends),
    ];
    for (name, check) in checks {
        let result = check(bench);
        bench.conclude(report, name, result);
    }
}

/// Two connected queue pairs with on-demand regions at both ends.
fn pair(bench: &mut Bench) -> Check<Pair> {
    let options = PairOptions {
        size: SIZE,
        mr_access: ALL_ACCESS | IBV_ACCESS_ON_DEMAND,
        ..Default::default()
    };
    bench.pair(&options)
}

fn post(bench: &mut Bench, pair: &Pair, opcode: u32, offset: usize, wr_id: u64) -> Check {
    let work = SendWork {
        wr_id,
        opcode,
        flags: IBV_SEND_SIGNALED,
        remote_address: pair.there.address + offset as u64,
        rkey: pair.there.rkey,
        entries: vec![(
            pair.here.address + offset as u64,
            CHUNK as u32,
            pair.here.lkey,
        )],
        ..Default::default()
    };
    bench
        .here
        .post_send(pair.here.qp.qp, &work)
        .at("ibv_post_send")
}

fn operate(bench: &mut Bench, pair: &Pair, opcode: u32, offset: usize) -> Check<u32> {
    post(bench, pair, opcode, offset, 1)?;
    Ok(bench.completion(End::Here, pair.here.send_cq)?.status)
}

/// Writes, reads back and sends at an offset, verifying each.
fn round_trip(bench: &mut Bench, pair: &Pair, offset: usize) -> Check {
    let seed = bench.seed();
    let (here, there) = (pair.here.buffer, pair.there.buffer);
    bench.here.fill(here, offset, CHUNK, seed).at("fill")?;
    let status = operate(bench, pair, IBV_WR_RDMA_WRITE, offset)?;
    expect!(status, IBV_WC_SUCCESS, "write at {offset:#x}");
    let wrong = bench.there.check_part(there, offset, CHUNK, seed, 0);
    expect!(wrong.at("check")?, None, "first wrong byte written");
    bench
        .here
        .change(here, Change::Discard, offset / PAGE * PAGE, 4 * PAGE)
        .at("madvise")?;
    let status = operate(bench, pair, IBV_WR_RDMA_READ, offset)?;
    expect!(status, IBV_WC_SUCCESS, "read at {offset:#x}");
    let wrong = bench.here.check_part(here, offset, CHUNK, seed, 0);
    expect!(wrong.at("check")?, None, "first wrong byte read");
    let entry = (
        pair.there.address + offset as u64,
        CHUNK as u32,
        pair.there.lkey,
    );
    let seed = bench.seed();
    bench.here.fill(here, offset, CHUNK, seed).at("fill")?;
    bench
        .there
        .change(there, Change::Discard, offset / PAGE * PAGE, 4 * PAGE)
        .at("madvise")?;
    bench
        .there
        .post_recv(pair.there.qp.qp, 7, &[entry])
        .at("ibv_post_recv")?;
    let status = operate(bench, pair, IBV_WR_SEND, offset)?;
    expect!(status, IBV_WC_SUCCESS, "send at {offset:#x}");
    let received = bench.completion(End::There, pair.there.recv_cq)?;
    expect!(received.status, IBV_WC_SUCCESS, "receive at {offset:#x}");
    let wrong = bench.there.check_part(there, offset, CHUNK, seed, 0);
    expect!(wrong.at("check")?, None, "first wrong byte received");
    Ok(())
}

/// Pages that nobody has touched.
fn first_use(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    for offset in [0, 1, 8 * PAGE - 50, 30 * PAGE, SIZE - CHUNK] {
        round_trip(bench, &pair, offset)?;
    }
    // What was never written reads as zero.
    let status = operate(bench, &pair, IBV_WR_RDMA_READ, 20 * PAGE)?;
    expect!(status, IBV_WC_SUCCESS, "read of fresh memory");
    let wrong = bench
        .here
        .check_set(pair.here.buffer, 20 * PAGE, CHUNK, 0)
        .at("check")?;
    expect!(wrong, None, "first byte that is not zero");
    Ok(())
}

/// Each change, at both ends, and the data afterwards.
fn changes(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let at = 16 * PAGE;
    for change in [Change::Discard, Change::Replace, Change::Move, Change::Fork] {
        round_trip(bench, &pair, at)?;
        for (side, buffer) in [
            (End::Here, pair.here.buffer),
            (End::There, pair.there.buffer),
        ] {
            let made = bench.side(side).change(buffer, change, at, 8 * PAGE);
            made.at(&format!("{change:?}"))?;
        }
        if matches!(change, Change::Discard | Change::Replace) {
            // The device sees what the process sees.
            let status = operate(bench, &pair, IBV_WR_RDMA_READ, at)?;
            expect!(status, IBV_WC_SUCCESS, "read after {change:?}");
            let wrong = bench.here.check_set(pair.here.buffer, at, CHUNK, 0);
            expect!(wrong.at("check")?, None, "old bytes after {change:?}");
        }
        round_trip(bench, &pair, at)?;
    }
    Ok(())
}

/// Many writes under way while their target is discarded, moved and forked: all succeed, and the
/// last ones are whole.
fn under_traffic(bench: &mut Bench) -> Check {
    let pair = pair(bench)?;
    let depth = 12;
    for round in 0..8 {
        let seed = bench.seed();
        for slot in 0..depth {
            let at = slot * 4 * PAGE;
            bench
                .here
                .fill(pair.here.buffer, at, CHUNK, seed + slot as u64)
                .at("fill")?;
            post(bench, &pair, IBV_WR_RDMA_WRITE, at, slot as u64)?;
        }
        let change = [Change::Discard, Change::Replace, Change::Fork][round % 3];
        for slot in (0..depth).step_by(3) {
            let at = slot * 4 * PAGE;
            let made = bench.there.change(pair.there.buffer, change, at, 8 * PAGE);
            made.at(&format!("{change:?}"))?;
        }
        for slot in 0..depth {
            let done = bench.completion(End::Here, pair.here.send_cq)?;
            expect!(done.status, IBV_WC_SUCCESS, "write in round {round}");
            expect!(done.wr_id, slot as u64, "order");
        }
        // Once more, with nothing in between.
        for slot in 0..depth {
            let at = slot * 4 * PAGE;
            let status = operate(bench, &pair, IBV_WR_RDMA_WRITE, at)?;
            expect!(status, IBV_WC_SUCCESS, "write after round {round}");
            let wrong = bench
                .there
                .check_part(pair.there.buffer, at, CHUNK, seed + slot as u64, 0);
            expect!(wrong.at("check")?, None, "first wrong byte in slot {slot}");
        }
    }
    Ok(())
}

/// The peer's memory is gone, or may not be written.
fn peer_unmapped(bench: &mut Bench) -> Check {
    for (change, opcode) in [
        (Change::Unmap, IBV_WR_RDMA_WRITE),
        (Change::Unmap, IBV_WR_RDMA_READ),
        (Change::ReadOnly, IBV_WR_RDMA_WRITE),
    ] {
        let pair = pair(bench)?;
        round_trip(bench, &pair, 16 * PAGE)?;
        let made = bench
            .there
            .change(pair.there.buffer, change, 16 * PAGE, 8 * PAGE);
        made.at(&format!("{change:?}"))?;
        let status = operate(bench, &pair, opcode, 16 * PAGE)?;
        expect!(status, IBV_WC_REM_ACCESS_ERR, "{change:?}, {opcode}");
        // So that the buffer is whole when it is given back.
        bench
            .there
            .change(pair.there.buffer, Change::Replace, 16 * PAGE, 8 * PAGE)
            .at("mmap")?;
        bench.reset()?;
    }
    Ok(())
}

/// Our own memory is gone.
fn own_unmapped(bench: &mut Bench) -> Check {
    for (opcode, expected) in [
        (IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR),
        (IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR),
    ] {
        let pair = pair(bench)?;
        round_trip(bench, &pair, 16 * PAGE)?;
        bench
            .here
            .change(pair.here.buffer, Change::Unmap, 16 * PAGE, 8 * PAGE)
            .at("munmap")?;
        let status = operate(bench, &pair, opcode, 16 * PAGE)?;
        expect!(status, expected, "{opcode}");
        bench
            .here
            .change(pair.here.buffer, Change::Replace, 16 * PAGE, 8 * PAGE)
            .at("mmap")?;
        bench.reset()?;
    }
    Ok(())
}

/// A region is deregistered, or everything destroyed, while faults are under way.
fn ends(bench: &mut Bench) -> Check {
    for round in 0..6 {
        let pair = pair(bench)?;
        for slot in 0..12 {
            post(bench, &pair, IBV_WR_RDMA_WRITE, slot * 4 * PAGE, 1)?;
        }
        if round % 3 == 0 {
            let made = bench.there.destroy(pair.there.mr);
            made.at("ibv_dereg_mr")?;
            for _ in 0..12 {
                let status = bench.completion(End::Here, pair.here.send_cq)?.status;
                let fine = [IBV_WC_SUCCESS, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR];
                expect!(fine.contains(&status), true, "status {status}");
            }
        } else if round % 3 == 1 {
            let _ = bench.here.poll(pair.here.send_cq, SHORT);
        }
        bench.reset()?;
    }
    Ok(())
}
