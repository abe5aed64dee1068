// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The access checks of chapter 4 of the device specification: local a to g, remote a to f. Each is
//! broken alone, by every operation that it stands in the way of: what would otherwise be carried out
//! ends with its status and number, the other end sees what it is to see, and no byte moves.

use super::refusal::{
    bad_receive, failed, fails_locally, flushes, from_there, mark, next_key, refused, refused_for,
    run_beside, second, untouched, vendor, work, wrong,
};
use crate::bench::{At, Bench, End, Pair, PairEnd, PairOptions, ALL_ACCESS, ATOMIC_ACCESS};
use crate::direct::WINDOWS_ONLY;
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::BindWork;

/// Where in a pair's buffer the regions lie whose checks are broken: all around them is memory that
/// must not change. They neither begin nor end where an atomic operation may.
const OFFSET: usize = 8192 + 4;
const LENGTH: usize = 8192 - 8;

/// What is done with memory that is no good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Send,
    Write,
    Read,
    Atomic,
    Receive,
}

use Operation::*;

impl Operation {
    fn opcode(self) -> u32 {
        match self {
            Send | Receive => IBV_WR_SEND,
            Write => IBV_WR_RDMA_WRITE,
            Read => IBV_WR_RDMA_READ,
            Atomic => IBV_WR_ATOMIC_FETCH_AND_ADD,
        }
    }

    fn length(self) -> u32 {
        if self == Atomic {
            8
        } else {
            100
        }
    }
}

/// Memory that breaks a check.
struct Broken {
    address: u64,
    key: u32,
    /// What the device says of it: of a local access in `vendor_err`, of a peer's at the end that refuses it.
    vendor_err: u32,
}

type Break = fn(&mut Bench, &Pair, End, Operation) -> Check<Broken>;

const LOCALLY: &[Operation] = &[Send, Write, Read, Atomic, Receive];
const LOCAL: &[(&str, Break, &[Operation])] = &[
    ("local a: no entry has the index", no_entry, LOCALLY),
    ("local a: a region deregistered", deregistered, LOCALLY),
    ("local a: a list not registered", not_registered, LOCALLY),
    ("local b: a window", window, LOCALLY),
    ("local c: another domain", domain, LOCALLY),
    ("local d: another instance", instance, LOCALLY),
    ("local e: past the end", past_the_end, LOCALLY),
    ("local e: before the start", before_the_start, LOCALLY),
    ("local e: around the end of all addresses", around, LOCALLY),
    (
        "local f: no right to write",
        not_writable,
        &[Read, Atomic, Receive],
    ),
    ("the tag of all memory", all_memory, LOCALLY),
];

const REMOTELY: &[Operation] = &[Write, Read, Atomic];
const REMOTE: &[(&str, Break, &[Operation])] = &[
    ("remote a: no entry has the index", no_entry, REMOTELY),
    ("remote a: a region deregistered", deregistered, REMOTELY),
    ("remote a: a list not registered", not_registered, REMOTELY),
    ("remote b: no remote right at all", local_only, REMOTELY),
    (
        "remote b: a window of another queue pair",
        others_window,
        REMOTELY,
    ),
    ("remote c: another domain", domain, REMOTELY),
    ("remote d: another instance", instance, REMOTELY),
    ("remote e: past the end", past_the_end, REMOTELY),
    ("remote e: before the start", before_the_start, REMOTELY),
    (
        "remote e: around the end of all addresses",
        around,
        REMOTELY,
    ),
    ("remote f: all rights but this", but_this, REMOTELY),
    (
        "remote f: a window with all rights but this",
        window_but_this,
        REMOTELY,
    ),
    ("the tag of all memory, by a peer", all_memory, REMOTELY),
];

pub fn run(bench: &mut Bench, report: &mut Report) {
    type Boxed = Box<dyn Fn(&mut Bench) -> Check>;
    let mut checks: Vec<(String, Boxed)> = Vec::new();
    for &(name, make, operations) in LOCAL {
        let body = move |bench: &mut Bench| each(bench, operations, |b, op| local(b, make, op));
        checks.push((name.to_owned(), Box::new(body)));
    }
    for &(name, make, operations) in REMOTE {
        let body = move |bench: &mut Bench| each(bench, operations, |b, op| remote(b, make, op));
        checks.push((name.to_owned(), Box::new(body)));
    }
    for (name, body) in [
        (
            "local g: a region without the right to bind",
            not_bindable as fn(&mut Bench) -> Check,
        ),
        (
            "local g: a window that writes what may not be written",
            not_writable_window,
        ),
        ("a queue pair without the right", queue_pair),
        (
            "remote b: a region where only windows are let in",
            windows_only,
        ),
        ("a key is not given out again at once", keys),
    ] {
        checks.push((name.to_owned(), Box::new(body)));
    }
    run_beside(bench, report, "access", checks.into_iter());
}

/// Does it by each operation there is, and says by which it went wrong.
fn each(
    bench: &mut Bench,
    operations: &[Operation],
    body: impl Fn(&mut Bench, Operation) -> Check,
) -> Check {
    let atomics = bench.hello_here.atomics && bench.hello_there.atomics;
    for &operation in operations {
        if operation == Atomic && !atomics {
            continue;
        }
        body(bench, operation).map_err(|outcome| match outcome {
            Outcome::Failed(why) => Outcome::Failed(format!("{operation:?}: {why}")),
            skipped => skipped,
        })?;
    }
    Ok(())
}

/// Rights of everything that is not broken.
fn rights(bench: &Bench) -> u32 {
    if bench.hello_here.atomics && bench.hello_there.atomics {
        ATOMIC_ACCESS
    } else {
        ALL_ACCESS
    }
}

fn options(bench: &Bench) -> PairOptions {
    PairOptions {
        mr_access: rights(bench),
        qp_access: rights(bench),
        ..Default::default()
    }
}

fn local(bench: &mut Bench, make: Break, operation: Operation) -> Check {
    let pair = bench.pair(&options(bench))?;
    let end = if operation == Receive {
        End::There
    } else {
        End::Here
    };
    let broken = make(bench, &pair, end, operation)?;
    let entry = (broken.address, operation.length(), broken.key);
    if operation == Receive {
        return bad_receive(bench, &pair, entry, broken.vendor_err);
    }
    let mut bad = work(&pair, operation.opcode(), operation.length());
    bad.entries = vec![entry];
    fails_locally(bench, &pair, &bad, broken.vendor_err)
}

fn remote(bench: &mut Bench, make: Break, operation: Operation) -> Check {
    let pair = bench.pair(&options(bench))?;
    let broken = make(bench, &pair, End::There, operation)?;
    let mut bad = work(&pair, operation.opcode(), operation.length());
    bad.operands = (1, 0);
    (bad.remote_address, bad.rkey) = (broken.address, broken.key);
    refused_for(bench, &pair, &bad, broken.vendor_err)
}

fn own(pair: &Pair, end: End) -> &PairEnd {
    match end {
        End::Here => &pair.here,
        End::There => &pair.there,
    }
}

/// A region in the middle of a buffer: number, key, address of its first byte.
fn region(bench: &mut Bench, pair: &Pair, end: End, access: u32) -> Check<(u64, u32, u64)> {
    let own = own(pair, end);
    let (mr, key, _) = bench
        .side(end)
        .mr(own.pd, own.buffer, OFFSET, LENGTH, access)
        .at("ibv_reg_mr")?;
    Ok((mr, key, own.address + OFFSET as u64))
}

/// An address inside, at which every operation may be.
fn inside(first: u64) -> u64 {
    (first + 64) & !7
}

fn no_entry(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let access = rights(bench);
    let (_, key, first) = region(bench, pair, end, access)?;
    Ok(Broken {
        address: inside(first),
        key: wrong(key),
        vendor_err: vendor::NO_ENTRY,
    })
}

fn deregistered(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let access = rights(bench);
    let (mr, key, first) = region(bench, pair, end, access)?;
    bench.side(end).destroy(mr).at("ibv_dereg_mr")?;
    // The table entry may be used again, the key may not.
    let mut keys = vec![key];
    for _ in 0..10 {
        let (mr, key, _) = region(bench, pair, end, access)?;
        if keys.contains(&key) {
            return Err(format!("key {key:#x} was given out again at once").into());
        }
        keys.push(key);
        bench.side(end).destroy(mr).at("ibv_dereg_mr")?;
    }
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::NO_ENTRY,
    })
}

fn not_registered(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let own = own(pair, end);
    let (_, key) = match bench.side(end).list(own.pd, 4) {
        Err(crate::verbs::Errno(libc::EOPNOTSUPP)) => {
            return Err(Outcome::Skipped("there are no lists".into()));
        }
        made => made.at("ferritedv_alloc_list")?,
    };
    Ok(Broken {
        address: inside(own.address),
        key,
        vendor_err: vendor::NOT_VALID,
    })
}

/// Binds a new window over a region of all rights; its key, and the address of its first byte.
fn bound(bench: &mut Bench, own: &PairEnd, end: End, access: u32) -> Check<(u32, u64)> {
    let first = own.address + OFFSET as u64;
    let all = rights(bench) | IBV_ACCESS_MW_BIND;
    let side = bench.side(end);
    let (mr, ..) = side
        .mr(own.pd, own.buffer, OFFSET, LENGTH, all)
        .at("ibv_reg_mr")?;
    let (mw, rkey) = side.window(own.pd, IBV_MW_TYPE_2).at("ibv_alloc_mw")?;
    let bind = BindWork {
        wr_id: 6,
        rkey: next_key(rkey),
        address: first,
        length: LENGTH as u64,
        access,
    };
    let rkey = side.bind(own.qp.qp, mw, mr, &bind).at("bind")?;
    let done = bench.status(end, own.send_cq, IBV_WC_SUCCESS, "the bind")?;
    expect!(
        (done.opcode, done.wr_id),
        (IBV_WC_BIND_MW, 6),
        "completion of the bind"
    );
    Ok((rkey, first))
}

/// The rights that a window can give.
fn remote_rights(bench: &Bench) -> u32 {
    rights(bench) & !IBV_ACCESS_LOCAL_WRITE
}

fn window(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let access = remote_rights(bench);
    let (key, first) = bound(bench, own(pair, end), end, access)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::WRONG_KIND,
    })
}

/// A window of type 2, bound on another queue pair of the same domain.
fn others_window(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let options = options(bench);
    let other = second(bench, pair, &options)?;
    let access = remote_rights(bench);
    let (key, first) = bound(bench, own(&other, end), end, access)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::WRONG_QUEUE_PAIR,
    })
}

fn domain(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let access = rights(bench);
    let own = own(pair, end);
    let side = bench.side(end);
    let pd = side.pd().at("ibv_alloc_pd")?;
    let (_, key, _) = side
        .mr(pd, own.buffer, OFFSET, LENGTH, access)
        .at("ibv_reg_mr")?;
    Ok(Broken {
        address: inside(own.address + OFFSET as u64),
        key,
        vendor_err: vendor::WRONG_DOMAIN,
    })
}

fn instance(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let access = rights(bench);
    let (_, key, first) = region(bench, pair, end, access)?;
    Ok(Broken {
        address: inside(first),
        key: next_key(key),
        vendor_err: vendor::WRONG_INSTANCE,
    })
}

/// As few bytes past the end as can be.
fn past_the_end(bench: &mut Bench, pair: &Pair, end: End, operation: Operation) -> Check<Broken> {
    let access = rights(bench);
    let (_, key, first) = region(bench, pair, end, access)?;
    let outside = if operation == Atomic { 4 } else { 1 };
    Ok(Broken {
        address: first + LENGTH as u64 - u64::from(operation.length()) + outside,
        key,
        vendor_err: vendor::OUT_OF_BOUNDS,
    })
}

fn before_the_start(
    bench: &mut Bench,
    pair: &Pair,
    end: End,
    operation: Operation,
) -> Check<Broken> {
    let access = rights(bench);
    let (_, key, first) = region(bench, pair, end, access)?;
    let outside = if operation == Atomic { 4 } else { 1 };
    Ok(Broken {
        address: first - outside,
        key,
        vendor_err: vendor::OUT_OF_BOUNDS,
    })
}

/// The last byte would be at a low address.
fn around(bench: &mut Bench, pair: &Pair, end: End, operation: Operation) -> Check<Broken> {
    let access = rights(bench);
    let (_, key, _) = region(bench, pair, end, access)?;
    let address = if operation == Atomic {
        // As far as an atomic can go.
        u64::MAX - 7
    } else {
        u64::MAX - u64::from(operation.length() / 2)
    };
    Ok(Broken {
        address,
        key,
        vendor_err: vendor::OUT_OF_BOUNDS,
    })
}

fn not_writable(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let (_, key, first) = region(bench, pair, end, IBV_ACCESS_REMOTE_READ)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::NO_RIGHT,
    })
}

fn all_memory(_: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    Ok(Broken {
        address: inside(own(pair, end).address),
        key: 0,
        vendor_err: vendor::ALL_MEMORY,
    })
}

fn local_only(bench: &mut Bench, pair: &Pair, end: End, _: Operation) -> Check<Broken> {
    let (_, key, first) = region(bench, pair, end, IBV_ACCESS_LOCAL_WRITE)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::WRONG_KIND,
    })
}

/// The right that a peer needs for an operation.
fn needed(operation: Operation) -> u32 {
    match operation {
        Write => IBV_ACCESS_REMOTE_WRITE,
        Read => IBV_ACCESS_REMOTE_READ,
        _ => IBV_ACCESS_REMOTE_ATOMIC,
    }
}

fn but_this(bench: &mut Bench, pair: &Pair, end: End, operation: Operation) -> Check<Broken> {
    let access = rights(bench) & !needed(operation);
    let (_, key, first) = region(bench, pair, end, access)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::NO_RIGHT,
    })
}

fn window_but_this(
    bench: &mut Bench,
    pair: &Pair,
    end: End,
    operation: Operation,
) -> Check<Broken> {
    let access = remote_rights(bench) & !needed(operation);
    let (key, first) = bound(bench, own(pair, end), end, access)?;
    Ok(Broken {
        address: inside(first),
        key,
        vendor_err: vendor::NO_RIGHT,
    })
}

/// A bind that must fail; the window then is what it was, bound to nothing.
fn bind_fails(bench: &mut Bench, region_access: u32, window_access: u32) -> Check {
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        let pair = bench.pair(&options(bench))?;
        mark(bench, &pair)?;
        let (mr, _, first) = region(bench, &pair, End::Here, region_access)?;
        let side = &mut bench.here;
        let (mw, rkey) = side.window(pair.here.pd, kind).at("ibv_alloc_mw")?;
        let bind = BindWork {
            wr_id: 6,
            rkey: next_key(rkey),
            address: first,
            length: LENGTH as u64,
            access: window_access,
        };
        let rkey = side.bind(pair.here.qp.qp, mw, mr, &bind).at("bind")?;
        failed(
            bench,
            End::Here,
            pair.here.send_cq,
            6,
            IBV_WC_MW_BIND_ERR,
            vendor::NO_RIGHT,
        )?;
        flushes(bench, &pair)?;
        untouched(bench, &pair)?;
        // What the key would be opens nothing, on any queue pair.
        bench.here.destroy(pair.here.qp.qp).at("ibv_destroy_qp")?;
        let all = options(bench);
        let other = second(bench, &pair, &all)?;
        from_there(bench, &other, |bench, back| {
            let mut bad = work(back, IBV_WR_RDMA_READ, 100);
            (bad.remote_address, bad.rkey) = (first, rkey);
            refused(bench, back, &bad)
        })?;
    }
    Ok(())
}

fn not_bindable(bench: &mut Bench) -> Check {
    let access = rights(bench);
    bind_fails(bench, access, IBV_ACCESS_REMOTE_READ)
}

fn not_writable_window(bench: &mut Bench) -> Check {
    let readable = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND;
    let mut asked = vec![IBV_ACCESS_REMOTE_WRITE];
    if rights(bench) & IBV_ACCESS_REMOTE_ATOMIC != 0 {
        asked.push(IBV_ACCESS_REMOTE_ATOMIC);
    }
    for access in asked {
        bind_fails(bench, readable, access)?;
    }
    Ok(())
}

/// Of memory that gives every right.
fn queue_pair(bench: &mut Bench) -> Check {
    each(bench, REMOTELY, |bench, operation| {
        let all = options(bench);
        let pair = bench.pair(&PairOptions {
            qp_access: all.qp_access & !needed(operation),
            ..all
        })?;
        let mut bad = work(&pair, operation.opcode(), operation.length());
        bad.operands = (1, 0);
        refused_for(bench, &pair, &bad, vendor::QUEUE_PAIR_RIGHT)
    })
}

/// On a queue pair that lets in windows only, the peer is refused what others of the domain let in, and uses windows as
/// it does on others.
fn windows_only(bench: &mut Bench) -> Check {
    if !(bench.hello_here.ferrite && bench.hello_there.ferrite) {
        return Err(Outcome::Skipped("not of both devices".into()));
    }
    let mut only = options(bench);
    only.qp.direct = WINDOWS_ONLY;
    each(bench, REMOTELY, |bench, operation| {
        let pair = bench.pair(&only)?;
        let asked = |address: u64, key: u32| {
            let mut asked = work(&pair, operation.opcode(), operation.length());
            asked.operands = (1, 0);
            (asked.remote_address, asked.rkey) = (inside(address), key);
            asked
        };
        let access = remote_rights(bench);
        let (key, first) = bound(bench, &pair.there, End::There, access)?;
        bench
            .here
            .post_send(pair.here.qp.qp, &asked(first, key))
            .at("ibv_post_send")?;
        bench.status(
            End::Here,
            pair.here.send_cq,
            IBV_WC_SUCCESS,
            "what goes through a window",
        )?;
        let (address, key) = (pair.there.address, pair.there.rkey);
        // It has every right, as far as it goes.
        let plain = options(bench);
        let other = second(bench, &pair, &plain)?;
        let mut open = asked(address, key);
        open.wr_id = 79;
        bench
            .here
            .post_send(other.here.qp.qp, &open)
            .at("ibv_post_send")?;
        bench.status(
            End::Here,
            other.here.send_cq,
            IBV_WC_SUCCESS,
            "the same on another queue pair",
        )?;
        bench.here.destroy(other.here.qp.qp).at("ibv_destroy_qp")?;
        bench
            .there
            .destroy(other.there.qp.qp)
            .at("ibv_destroy_qp")?;
        refused_for(bench, &pair, &asked(address, key), vendor::WRONG_KIND)
    })
}

/// A table entry may be used again, a key may not.
fn keys(bench: &mut Bench) -> Check {
    let options = PairOptions::default();
    let pair = bench.pair(&options)?;
    let mut keys = vec![pair.there.rkey];
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
    refused_for(bench, &pair, &again, vendor::NO_ENTRY)
}
