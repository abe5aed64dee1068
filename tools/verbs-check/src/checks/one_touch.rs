// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Windows and lists of one touch (`ferritedv.h`; chapter 4 of the specification has six cases): gone
//! when the first message that writes there is complete.
//!
//! What connections can be made to show here: a packet that is not the last leaves the entry alone
//! (case 1), the last of an entry without the mark too (2), the last in order ends it (4). Packets
//! ahead of others and behind their time (3, 5, 6) do not reach an entry: they are dropped and come
//! again, or are acknowledged without a look. [`touches`] is to be run over a wire that loses, doubles
//! and reorders frames, and shows that.

use super::lists::{by_peer, options, peer_is_refused, peers_work, with_lists, Listed, Piece};
use super::refusal::{failed, flushes, mark, next_key, second, untouched, vendor, work, MARKED};
use crate::bench::{At, Bench, End, Pair, ALL_ACCESS, ATOMIC_ACCESS};
use crate::direct::{LISTS, ONE_TOUCH, WC_REGISTER_LIST};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::BindWork;

/// What is of one touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Window1,
    Window2,
    List,
}

const KINDS: [Kind; 3] = [Kind::Window1, Kind::Window2, Kind::List];

/// The part of the buffer here that it gives: several packets long at any MTU.
const OFFSET: usize = 8192;
const LENGTH: usize = 40_000;

pub fn run(bench: &mut Bench, report: &mut Report) {
    type Body = fn(&mut Bench, Kind) -> Check;
    let checks: &[(&str, Body)] = &[
        ("one write, of one packet or many", one_write),
        ("without the mark, any number", without),
        ("an atomic touches", atomic),
        ("a write with immediate data touches", immediate),
        ("what the peer reads does not touch", reads),
        ("a message without bytes does not touch", nothing),
        ("what is refused does not touch", refused),
        ("opened again it is as new", again),
        ("only the first of several that are under way", race),
    ];
    for (name, body) in checks {
        let result = with_lists(bench).and_then(|()| {
            for kind in KINDS {
                body(bench, kind).map_err(|outcome| match outcome {
                    Outcome::Failed(why) => Outcome::Failed(format!("{kind:?}: {why}")),
                    skipped => skipped,
                })?;
            }
            Ok(())
        });
        bench.conclude(report, &format!("one-touch: {name}"), result);
    }
    let result = with_lists(bench).and_then(|()| own_read(bench));
    bench.conclude(
        report,
        "one-touch: the answer to a read touches where it is placed",
        result,
    );
}

fn has_atomics(bench: &Bench) -> bool {
    bench.hello_here.atomics && bench.hello_there.atomics
}

/// An entry here, of one touch or not, open on this connection.
struct Entry {
    kind: Kind,
    /// Number of the window or list.
    object: u64,
    /// Number of the region.
    mr: u64,
    /// As a peer uses it.
    listed: Listed,
}

/// Makes what there is to open.
fn entry(bench: &mut Bench, pair: &Pair, kind: Kind) -> Check<Entry> {
    let own = pair.here;
    let all = if has_atomics(bench) {
        ATOMIC_ACCESS
    } else {
        ALL_ACCESS
    };
    let (mr, lkey, _) = bench
        .here
        .mr(own.pd, own.buffer, 0, MARKED, all | IBV_ACCESS_MW_BIND)
        .at("ibv_reg_mr")?;
    let (object, key) = match kind {
        Kind::Window1 => bench.here.window(own.pd, IBV_MW_TYPE_1),
        Kind::Window2 => bench.here.window(own.pd, IBV_MW_TYPE_2),
        Kind::List => bench.here.list(own.pd, 2),
    }
    .at("window or list")?;
    // A list in two pieces, so that packets are over the end of the first.
    let pieces = match kind {
        Kind::List => vec![(OFFSET, 5000), (OFFSET + 5000, LENGTH - 5000)],
        _ => vec![(OFFSET, LENGTH)],
    };
    let pieces = pieces.into_iter().map(|(offset, length)| Piece {
        offset,
        length,
        lkey,
    });
    Ok(Entry {
        kind,
        object,
        mr,
        listed: Listed {
            list: object,
            key,
            access: all,
            address: own.address + OFFSET as u64,
            pieces: pieces.collect(),
        },
    })
}

/// Opens it, by a work request on this connection, under its next key.
fn open(bench: &mut Bench, pair: &Pair, entry: &mut Entry, mark: u32) -> Check {
    let own = pair.here;
    entry.listed.key = next_key(entry.listed.key);
    if entry.kind == Kind::List {
        let mut work = entry.listed.work(&own);
        work.access |= mark;
        bench
            .here
            .post_list(own.qp.qp, entry.object, &work)
            .at("ferritedv_post_register_list")?;
    } else {
        let bind = BindWork {
            wr_id: 31,
            rkey: entry.listed.key,
            address: entry.listed.address,
            length: LENGTH as u64,
            access: (entry.listed.access & !IBV_ACCESS_LOCAL_WRITE) | mark,
        };
        // Of type 1 the provider chooses.
        entry.listed.key = bench
            .here
            .bind(own.qp.qp, entry.object, entry.mr, &bind)
            .at("bind")?;
    }
    let opcode = match entry.kind {
        Kind::List => WC_REGISTER_LIST,
        _ => IBV_WC_BIND_MW,
    };
    let done = bench.status(End::Here, own.send_cq, IBV_WC_SUCCESS, "opening it")?;
    expect!((done.wr_id, done.opcode), (31, opcode), "its completion");
    Ok(())
}

/// A connection with an entry that is open.
fn opened(bench: &mut Bench, kind: Kind, mark: u32) -> Check<(Pair, Entry)> {
    let options = options(bench, LISTS);
    let pair = bench.pair(&options)?;
    let mut entry = entry(bench, &pair, kind)?;
    open(bench, &pair, &mut entry, mark)?;
    Ok((pair, entry))
}

/// It is gone: a further message is refused, and no byte moves.
fn is_gone(bench: &mut Bench, pair: &Pair, entry: &Entry) -> Check {
    let bad = peers_work(pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, 100);
    peer_is_refused(bench, pair, &bad)
}

fn one_write(bench: &mut Bench, kind: Kind) -> Check {
    let mtu = bench.mtu_bytes();
    for (at, length) in [(0, 1), (LENGTH - mtu, mtu), (4999, mtu + 2), (0, LENGTH)] {
        let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
        by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, at, length)?;
        is_gone(bench, &pair, &entry)?;
    }
    Ok(())
}

fn without(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, entry) = opened(bench, kind, 0)?;
    for _ in 0..5 {
        by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, LENGTH)?;
    }
    Ok(())
}

fn atomic(bench: &mut Bench, kind: Kind) -> Check {
    if !has_atomics(bench) {
        return Err(Outcome::Skipped("atomics are not offered".into()));
    }
    for opcode in [IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP] {
        let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
        let mut add = peers_work(&pair, &entry.listed, opcode, 800, 8);
        add.entries[0].0 = pair.there.address;
        // One adds nothing, the other finds zero and stores seven: both write.
        add.operands = (0, 7);
        bench.here.set(pair.here.buffer, 0, MARKED, 0).at("set")?;
        bench
            .there
            .post_send(pair.there.qp.qp, &add)
            .at("ibv_post_send")?;
        bench.status(End::There, pair.there.send_cq, IBV_WC_SUCCESS, "the atomic")?;
        is_gone(bench, &pair, &entry)?;
    }
    Ok(())
}

fn immediate(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
    bench
        .here
        .post_recv(pair.here.qp.qp, 33, &[])
        .at("ibv_post_recv")?;
    let opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    by_peer(bench, &pair, &entry.listed, opcode, 0, LENGTH)?;
    let done = bench.status(End::Here, pair.here.recv_cq, IBV_WC_SUCCESS, "receive")?;
    expect!(
        (done.opcode, done.byte_len as usize),
        (IBV_WC_RECV_RDMA_WITH_IMM, LENGTH),
        "completion of the receive"
    );
    is_gone(bench, &pair, &entry)
}

fn reads(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
    for _ in 0..3 {
        by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_READ, 0, LENGTH)?;
    }
    by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, LENGTH)?;
    // And then nothing is read either.
    let bad = peers_work(&pair, &entry.listed, IBV_WR_RDMA_READ, 0, 100);
    peer_is_refused(bench, &pair, &bad)
}

fn nothing(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
    for _ in 0..3 {
        let mut empty = peers_work(&pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, 0);
        empty.entries = Vec::new();
        bench
            .there
            .post_send(pair.there.qp.qp, &empty)
            .at("ibv_post_send")?;
        bench.status(End::There, pair.there.send_cq, IBV_WC_SUCCESS, "no bytes")?;
    }
    by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, LENGTH)?;
    is_gone(bench, &pair, &entry)
}

/// A window of type 2 ends with its queue pair, which a refused request takes along; that it was not
/// touched shows with the others, which other connections can use.
fn refused(bench: &mut Bench, kind: Kind) -> Check {
    if kind == Kind::Window2 {
        return Ok(());
    }
    let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
    let options = options(bench, LISTS);
    let other = second(bench, &pair, &options)?;
    let bad = peers_work(&other, &entry.listed, IBV_WR_RDMA_WRITE, LENGTH - 99, 100);
    peer_is_refused(bench, &other, &bad)?;
    by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, LENGTH)?;
    is_gone(bench, &pair, &entry)
}

/// What was used up needs no invalidation to be opened again, and the region is what it was.
fn again(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, mut entry) = opened(bench, kind, ONE_TOUCH)?;
    for _ in 0..10 {
        by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 100, 20_000)?;
        open(bench, &pair, &mut entry, ONE_TOUCH)?;
    }
    bench.exchange(&pair)?;
    by_peer(bench, &pair, &entry.listed, IBV_WR_RDMA_WRITE, 0, LENGTH)?;
    is_gone(bench, &pair, &entry)
}

/// Several writes are posted at once: the first is carried out, the second refused, and with it the
/// connection, so that the others are flushed.
fn race(bench: &mut Bench, kind: Kind) -> Check {
    let (pair, entry) = opened(bench, kind, ONE_TOUCH)?;
    mark(bench, &pair)?;
    for n in 0..4usize {
        let mut write = peers_work(&pair, &entry.listed, IBV_WR_RDMA_WRITE, 9000 * n, 9000);
        write.wr_id = n as u64;
        bench
            .there
            .post_send(pair.there.qp.qp, &write)
            .at("ibv_post_send")?;
    }
    for (n, status) in [
        IBV_WC_SUCCESS,
        IBV_WC_REM_ACCESS_ERR,
        IBV_WC_WR_FLUSH_ERR,
        IBV_WC_WR_FLUSH_ERR,
    ]
    .into_iter()
    .enumerate()
    {
        let done = bench.status(End::There, pair.there.send_cq, status, "one of several")?;
        expect!(done.wr_id, n as u64, "order of the writes");
    }
    let event = bench
        .here
        .async_event(crate::bench::PATIENCE)
        .at("events")?;
    let told = Some((IBV_EVENT_QP_ACCESS_ERR, pair.here.qp.qpn));
    expect!(event, told, "asynchronous event");
    for (from, to, byte) in [
        (0, OFFSET, 0x11),
        (OFFSET, OFFSET + 9000, 0x22),
        (OFFSET + 9000, MARKED, 0x11),
    ] {
        let wrong = bench
            .here
            .check_set(pair.here.buffer, from, to - from, byte)
            .at("check")?;
        expect!(wrong, None, "first byte that is not {byte:#x} from {from}");
    }
    Ok(())
}

/// A list as the place of a read of one's own.
fn own_read(bench: &mut Bench) -> Check {
    for length in [100, LENGTH] {
        let (pair, mut entry) = opened(bench, Kind::List, ONE_TOUCH)?;
        for round in 0..2 {
            if round != 0 {
                open(bench, &pair, &mut entry, ONE_TOUCH)?;
            }
            let mut read = work(&pair, IBV_WR_RDMA_READ, 0);
            read.entries = vec![(entry.listed.address, length as u32, entry.listed.key)];
            mark(bench, &pair)?;
            bench
                .here
                .post_send(pair.here.qp.qp, &read)
                .at("ibv_post_send")?;
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the read")?;
            for (from, to, byte) in [
                (0, OFFSET, 0x11),
                (OFFSET, OFFSET + length, 0x22),
                (OFFSET + length, MARKED, 0x11),
            ] {
                let wrong = bench
                    .here
                    .check_set(pair.here.buffer, from, to - from, byte)
                    .at("check")?;
                expect!(wrong, None, "first byte that is not {byte:#x} from {from}");
            }
        }
        let mut read = work(&pair, IBV_WR_RDMA_READ, 0);
        read.entries = vec![(entry.listed.address, 10, entry.listed.key)];
        mark(bench, &pair)?;
        bench
            .here
            .post_send(pair.here.qp.qp, &read)
            .at("ibv_post_send")?;
        failed(
            bench,
            End::Here,
            pair.here.send_cq,
            read.wr_id,
            IBV_WC_LOC_PROT_ERR,
            vendor::NOT_VALID,
        )?;
        flushes(bench, &pair)?;
        untouched(bench, &pair)?;
    }
    Ok(())
}

/// Whole messages to entries of one touch, one after another, and nothing that is refused: over a bad
/// wire a refusal can be lost. Each entry was used up by its message, or it could not be opened again;
/// and none by a repeated packet, or the message would not have ended well.
pub fn touches(bench: &mut Bench, report: &mut Report) {
    for kind in [Kind::Window2, Kind::List] {
        let result = with_lists(bench).and_then(|()| {
            let (pair, mut entry) = opened(bench, kind, ONE_TOUCH)?;
            for round in 0..40 {
                let length = LENGTH - 997 * round;
                by_peer(
                    bench,
                    &pair,
                    &entry.listed,
                    IBV_WR_RDMA_WRITE,
                    round,
                    length,
                )?;
                open(bench, &pair, &mut entry, ONE_TOUCH)?;
            }
            Ok(())
        });
        bench.conclude(report, &format!("touches: {kind:?}"), result);
    }
}
