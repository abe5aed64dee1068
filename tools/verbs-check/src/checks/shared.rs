// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Regions that share memory and translation (`ferritedv.h`): each has its own domain, rights, keys and
//! end; the bytes are the same.

use super::lists::{by_peer, options, peer_is_refused, peers_work, register, Listed, Piece};
use super::refusal::{
    fails_locally, from_there, must_fail, next_key, no_events, refused_as_it_is, vendor, work,
    wrong,
};
use super::region::{operate, round_trip, Target, CHUNK};
use crate::bench::{At, Bench, End, Pair, PairEnd, PairOptions, ALL_ACCESS};
use crate::direct::LISTS;
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::BufferKind;

/// Bytes of a pair's buffers.
const SIZE: usize = 128 << 10;

/// What no message brings.
const CANARY: u8 = 0x5c;

pub fn run(bench: &mut Bench, report: &mut Report) {
    type Body = fn(&mut Bench) -> Check;
    let checks: &[(&str, Body)] = &[
        ("another domain reaches the same bytes", another_domain),
        ("the end that has them uses both keys", locally),
        ("each key is of its own domain", own_domain),
        ("fewer rights than the other one has", fewer_rights),
        ("more rights than the other one has", more_rights),
        ("memory for reading only stays so", read_only),
        ("the other one ends first", original_first),
        ("the new one ends first", share_first),
        ("shares of shares", chain),
        ("rights of one are changed", changed_rights),
        ("memory of one is changed", changed_memory),
        (
            "pages are pinned once, until the last one ends",
            pinned_once,
        ),
        ("a list ends with the region that it is of", listed),
        ("what cannot be shared", not_shared),
        ("keys of others, and keys that are none", not_named),
    ];
    for (name, body) in checks {
        let result = with_sharing(bench).and_then(|()| {
            no_events(bench)?;
            body(bench)
        });
        bench.conclude(report, &format!("shared: {name}"), result);
    }
}

/// Skips where there is none.
fn with_sharing(bench: &Bench) -> Check {
    if bench.hello_here.sharing && bench.hello_there.sharing {
        Ok(())
    } else {
        Err(Outcome::Skipped("regions share no memory".into()))
    }
}

/// A region of the other end's, and another one of its memory. Each is in the domain of a connection of
/// its own.
struct Shared {
    one: Pair,
    other: Pair,
    /// The second region: number and keys.
    mr: u64,
    lkey: u32,
    rkey: u32,
}

impl Shared {
    fn new(bench: &mut Bench, first: u32, second: u32) -> Check<Self> {
        let options = PairOptions {
            mr_access: first,
            ..Default::default()
        };
        let one = bench.pair(&options)?;
        let other = bench.pair(&PairOptions::default())?;
        let (mr, lkey, rkey) = bench
            .there
            .shared(other.there.pd, one.there.mr, second)
            .at("ferritedv_reg_shared_mr")?;
        let mut keys = vec![one.there.lkey, other.there.lkey, lkey];
        keys.sort_unstable();
        keys.dedup();
        expect!(keys.len(), 3, "different keys of three regions");
        Ok(Self {
            one,
            other,
            mr,
            lkey,
            rkey,
        })
    }

    /// The memory by the key of the first region.
    fn by_first(&self) -> Target {
        target(&self.one.there, self.one.there.rkey)
    }

    /// The memory by the key of the second region.
    fn by_second(&self) -> Target {
        target(&self.one.there, self.rkey)
    }
}

fn target(of: &PairEnd, rkey: u32) -> Target {
    Target {
        buffer: of.buffer,
        address: of.address,
        rkey,
    }
}

/// Memory is written and read by a key, in several places.
fn works(bench: &mut Bench, pair: &Pair, target: &Target) -> Check {
    for offset in [0, 4096 - 17, SIZE - CHUNK] {
        round_trip(bench, pair, target, offset)?;
    }
    Ok(())
}

/// An operation is refused, and no byte of the memory moves; the connection has ended.
fn is_refused(bench: &mut Bench, pair: &Pair, target: &Target, opcode: u32) -> Check {
    bench.there.set(target.buffer, 0, SIZE, CANARY).at("set")?;
    let mut bad = work(pair, opcode, 1000);
    (bad.remote_address, bad.rkey) = (target.address + 5000, target.rkey);
    refused_as_it_is(bench, pair, &bad)?;
    let touched = bench
        .there
        .check_set(target.buffer, 0, SIZE, CANARY)
        .at("check")?;
    expect!(touched, None, "first touched byte");
    Ok(())
}

fn another_domain(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    works(bench, &shared.one, &shared.by_first())?;
    works(bench, &shared.other, &shared.by_second())?;
    // What is written by one is read by the other.
    let ways = [
        (shared.one, shared.by_first()),
        (shared.other, shared.by_second()),
    ];
    for (writer, reader) in [(0, 1), (1, 0)] {
        let ((writer, by_writer), (reader, by_reader)) = (ways[writer], ways[reader]);
        let seed = bench.seed();
        let (source, place) = (writer.here.buffer, reader.here.buffer);
        bench.here.fill(source, 0, CHUNK, seed).at("fill")?;
        bench.here.set(place, 0, CHUNK, CANARY).at("set")?;
        let status = operate(bench, &writer, &by_writer, IBV_WR_RDMA_WRITE, 4321, CHUNK)?;
        expect!(status, IBV_WC_SUCCESS, "a write by one key");
        let status = operate(bench, &reader, &by_reader, IBV_WR_RDMA_READ, 4321, CHUNK)?;
        expect!(status, IBV_WC_SUCCESS, "a read by the other");
        let wrong = bench
            .here
            .check_part(place, 0, CHUNK, seed, 0)
            .at("check")?;
        expect!(wrong, None, "first byte that is not what was written");
    }
    Ok(())
}

/// The owner of the memory writes from it and reads to it, by the local key.
fn locally(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    let memory = shared.one.there;
    for (pair, lkey) in [(shared.one, memory.lkey), (shared.other, shared.lkey)] {
        for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            let seed = bench.seed();
            let read = opcode == IBV_WR_RDMA_READ;
            let ends = [
                (End::There, memory.buffer, 7000),
                (End::Here, pair.here.buffer, 0),
            ];
            let [source, place] = if read { [ends[1], ends[0]] } else { ends };
            let side = bench.side(source.0);
            side.fill(source.1, source.2, CHUNK, seed).at("fill")?;
            let side = bench.side(place.0);
            side.set(place.1, place.2, CHUNK, CANARY).at("set")?;
            from_there(bench, &pair, |bench, back| {
                let mut work = work(back, opcode, 0);
                work.entries = vec![(memory.address + 7000, CHUNK as u32, lkey)];
                bench
                    .here
                    .post_send(back.here.qp.qp, &work)
                    .at("ibv_post_send")?;
                bench.status(End::Here, back.here.send_cq, IBV_WC_SUCCESS, "its owner's")
            })?;
            let wrong = bench
                .side(place.0)
                .check_part(place.1, place.2, CHUNK, seed, 0)
                .at("check")?;
            expect!(wrong, None, "first wrong byte");
        }
    }
    Ok(())
}

fn own_domain(bench: &mut Bench) -> Check {
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
        is_refused(bench, &shared.one, &shared.by_second(), opcode)?;
        is_refused(bench, &shared.other, &shared.by_first(), opcode)?;
    }
    // Nor does a queue pair use the local key of another domain.
    for of_first in [true, false] {
        let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
        let memory = shared.one.there;
        let (pair, lkey) = match of_first {
            true => (shared.other, memory.lkey),
            false => (shared.one, shared.lkey),
        };
        from_there(bench, &pair, |bench, back| {
            let mut bad = work(back, IBV_WR_RDMA_WRITE, 0);
            bad.entries = vec![(memory.address, 100, lkey)];
            fails_locally(bench, back, &bad, vendor::WRONG_DOMAIN)
        })?;
    }
    Ok(())
}

fn fewer_rights(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, IBV_ACCESS_REMOTE_READ)?;
    let by_second = shared.by_second();
    let seed = bench.seed();
    let memory = shared.one.there;
    bench
        .there
        .fill(memory.buffer, 3000, CHUNK, seed)
        .at("fill")?;
    let status = operate(
        bench,
        &shared.other,
        &by_second,
        IBV_WR_RDMA_READ,
        3000,
        CHUNK,
    )?;
    expect!(status, IBV_WC_SUCCESS, "a read by the key for reading");
    let wrong = bench
        .here
        .check_part(shared.other.here.buffer, 0, CHUNK, seed, 0)
        .at("check")?;
    expect!(wrong, None, "first wrong byte read");
    is_refused(bench, &shared.other, &by_second, IBV_WR_RDMA_WRITE)?;
    // The other one can do what it could.
    works(bench, &shared.one, &shared.by_first())?;
    // Its owner may not have anything placed there either.
    let shared = Shared::new(bench, ALL_ACCESS, IBV_ACCESS_REMOTE_READ)?;
    let entry = (shared.one.there.address, 100, shared.lkey);
    from_there(bench, &shared.other, |bench, back| {
        let mut bad = work(back, IBV_WR_RDMA_READ, 0);
        bad.entries = vec![entry];
        fails_locally(bench, back, &bad, vendor::NO_RIGHT)
    })
}

fn more_rights(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, IBV_ACCESS_LOCAL_WRITE, ALL_ACCESS)?;
    works(bench, &shared.other, &shared.by_second())?;
    is_refused(bench, &shared.one, &shared.by_first(), IBV_WR_RDMA_WRITE)
}

fn read_only(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_READ)?;
    let (pd, first) = (shared.other.there.pd, shared.one.there.mr);
    for of in [first, shared.mr] {
        for access in [
            IBV_ACCESS_LOCAL_WRITE,
            ALL_ACCESS,
            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND,
        ] {
            let result = bench.there.shared(pd, of, access);
            must_fail(result, libc::EACCES, "a share for writing")?;
        }
        // As for any region.
        let result = bench.there.shared(pd, of, IBV_ACCESS_REMOTE_WRITE);
        must_fail(result, libc::EINVAL, "remote writes without local ones")?;
        let result = bench.there.change_mr(of, ALL_ACCESS);
        must_fail(result, libc::EACCES, "a change to a region for writing")?;
    }
    // Only the other connection has memory here that what is read can be placed in.
    let (pair, target) = (shared.other, shared.by_second());
    let status = operate(bench, &pair, &target, IBV_WR_RDMA_READ, 0, CHUNK)?;
    expect!(status, IBV_WC_SUCCESS, "a read");
    is_refused(bench, &pair, &target, IBV_WR_RDMA_WRITE)?;
    is_refused(bench, &shared.one, &shared.by_first(), IBV_WR_RDMA_WRITE)
}

fn original_first(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    works(bench, &shared.one, &shared.by_first())?;
    bench
        .there
        .destroy(shared.one.there.mr)
        .at("ibv_dereg_mr")?;
    works(bench, &shared.other, &shared.by_second())?;
    is_refused(bench, &shared.one, &shared.by_first(), IBV_WR_RDMA_WRITE)?;
    works(bench, &shared.other, &shared.by_second())
}

fn share_first(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    works(bench, &shared.other, &shared.by_second())?;
    bench.there.destroy(shared.mr).at("ibv_dereg_mr")?;
    works(bench, &shared.one, &shared.by_first())?;
    is_refused(bench, &shared.other, &shared.by_second(), IBV_WR_RDMA_READ)?;
    works(bench, &shared.one, &shared.by_first())
}

fn chain(bench: &mut Bench) -> Check {
    let mut shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    let mut ended = vec![shared.one.there.mr];
    for _ in 0..10 {
        let (mr, _, rkey) = bench
            .there
            .shared(shared.other.there.pd, shared.mr, ALL_ACCESS)
            .at("ferritedv_reg_shared_mr")?;
        ended.push(shared.mr);
        (shared.mr, shared.rkey) = (mr, rkey);
    }
    // Those between them, then the first ones.
    for mr in ended.into_iter().rev() {
        works(bench, &shared.other, &shared.by_second())?;
        bench.there.destroy(mr).at("ibv_dereg_mr")?;
    }
    works(bench, &shared.other, &shared.by_second())
}

fn changed_rights(bench: &mut Bench) -> Check {
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    let change = |bench: &mut Bench, mr| {
        bench
            .there
            .change_mr(mr, IBV_ACCESS_REMOTE_READ)
            .at("ibv_rereg_mr")
    };
    change(bench, shared.one.there.mr)?;
    works(bench, &shared.other, &shared.by_second())?;
    is_refused(bench, &shared.one, &shared.by_first(), IBV_WR_RDMA_WRITE)?;
    let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
    change(bench, shared.mr)?;
    works(bench, &shared.one, &shared.by_first())?;
    is_refused(bench, &shared.other, &shared.by_second(), IBV_WR_RDMA_WRITE)
}

fn changed_memory(bench: &mut Bench) -> Check {
    for first_moves in [true, false] {
        let shared = Shared::new(bench, ALL_ACCESS, ALL_ACCESS)?;
        let (buffer, address) = bench.there.buffer(SIZE, BufferKind::Plain).at("mmap")?;
        bench.there.set(buffer, 0, SIZE, CANARY).at("set")?;
        let ways = [
            (shared.one, shared.one.there.mr, shared.by_first()),
            (shared.other, shared.mr, shared.by_second()),
        ];
        let [moved, stays] = if first_moves {
            ways
        } else {
            [ways[1], ways[0]]
        };
        let rkey = bench
            .there
            .move_mr(moved.1, buffer, SIZE)
            .at("ibv_rereg_mr")?;
        works(bench, &stays.0, &stays.2)?;
        let touched = bench.there.check_set(buffer, 0, SIZE, CANARY).at("check")?;
        expect!(touched, None, "first touched byte of the other memory");
        let elsewhere = Target {
            buffer,
            address,
            rkey,
        };
        works(bench, &moved.0, &elsewhere)?;
        // A share of it is of what it has now.
        let (_, _, rkey) = bench
            .there
            .shared(moved.0.there.pd, moved.1, ALL_ACCESS)
            .at("ferritedv_reg_shared_mr")?;
        bench.there.destroy(moved.1).at("ibv_dereg_mr")?;
        works(bench, &moved.0, &Target { rkey, ..elsewhere })?;
        works(bench, &stays.0, &stays.2)?;
    }
    Ok(())
}

fn pinned_once(bench: &mut Bench) -> Check {
    const LENGTH: usize = 1 << 20;
    let pair = bench.pair(&PairOptions::default())?;
    let (buffer, _) = bench.there.buffer(LENGTH, BufferKind::Plain).at("mmap")?;
    let before = bench.there.pinned().at("VmPin")?;
    let pd = pair.there.pd;
    let (mr, _, _) = bench
        .there
        .mr(pd, buffer, 0, LENGTH, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    let once = before + LENGTH as u64;
    let mut regions = vec![mr];
    for _ in 0..50 {
        let pinned = bench.there.pinned().at("VmPin")?;
        expect!(pinned, once, "bytes pinned by {} regions", regions.len());
        let (mr, _, _) = bench
            .there
            .shared(pd, mr, ALL_ACCESS)
            .at("ferritedv_reg_shared_mr")?;
        regions.push(mr);
    }
    // The first one, and the rest.
    for (ended, mr) in regions.into_iter().enumerate() {
        let pinned = bench.there.pinned().at("VmPin")?;
        expect!(pinned, once, "bytes pinned when {ended} have ended");
        bench.there.destroy(mr).at("ibv_dereg_mr")?;
    }
    let pinned = bench.there.pinned().at("VmPin")?;
    expect!(pinned, before, "bytes pinned when all have ended");
    Ok(())
}

fn listed(bench: &mut Bench) -> Check {
    if !(bench.hello_here.lists && bench.hello_there.lists) {
        return Err(Outcome::Skipped("there are no lists".into()));
    }
    let pair = bench.pair(&options(bench, LISTS))?;
    let own = pair.here;
    let (mr, lkey, _) = bench
        .here
        .shared(own.pd, own.mr, ALL_ACCESS)
        .at("ferritedv_reg_shared_mr")?;
    let (list, key) = bench.here.list(own.pd, 2).at("ferritedv_alloc_list")?;
    let listed = Listed {
        list,
        key: next_key(key),
        access: ALL_ACCESS,
        address: own.address,
        pieces: [(20_000, 3000), (10_000, 3000)]
            .map(|(offset, length)| Piece {
                offset,
                length,
                lkey,
            })
            .to_vec(),
    };
    register(bench, End::Here, &own, &listed)?;
    by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 2000, 2000)?;
    bench.here.destroy(own.mr).at("ibv_dereg_mr")?;
    by_peer(bench, &pair, &listed, IBV_WR_RDMA_READ, 2000, 2000)?;
    bench.here.destroy(mr).at("ibv_dereg_mr")?;
    let bad = peers_work(&pair, &listed, IBV_WR_RDMA_WRITE, 0, 100);
    peer_is_refused(bench, &pair, &bad)
}

fn not_shared(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let own = pair.there;
    let result = bench
        .there
        .shared(own.pd, own.mr, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
    must_fail(result, libc::EOPNOTSUPP, "a share on demand")?;
    let paged = bench.there.mr(
        own.pd,
        own.buffer,
        0,
        SIZE,
        ALL_ACCESS | IBV_ACCESS_ON_DEMAND,
    );
    if let Ok((paged, key, _)) = paged {
        let result = bench.there.shared(own.pd, paged, ALL_ACCESS);
        must_fail(result, libc::EOPNOTSUPP, "memory on demand")?;
        let at = (own.address, SIZE);
        let result = bench.there.share_by_key(own.pd, key, at, ALL_ACCESS);
        must_fail(result, libc::EINVAL, "the key of memory on demand")?;
    }
    if bench.hello_there.lists {
        let (list, key) = bench.there.list(own.pd, 4).at("ferritedv_alloc_list")?;
        let result = bench.there.shared(own.pd, list, ALL_ACCESS);
        must_fail(result, libc::EINVAL, "a list")?;
        let result = bench.there.share_by_key(own.pd, key, (0, 0), ALL_ACCESS);
        must_fail(result, libc::EINVAL, "the key of a list")?;
    }
    bench.exchange(&pair)
}

/// The kernel is asked itself, which has to refuse what the provider would not even ask for.
fn not_named(bench: &mut Bench) -> Check {
    let pair = bench.pair(&PairOptions::default())?;
    let (own, side) = (pair.there, &mut bench.there);
    let at = (own.address, SIZE);
    side.share_by_key(own.pd, own.lkey, at, ALL_ACCESS)
        .at("a share by the key")?;
    let (_held, foreign, address) = side.foreign().at("another process")?;
    let result = side.share_by_key(own.pd, foreign, (address, 16 << 10), ALL_ACCESS);
    must_fail(result, libc::EINVAL, "a region of another process")?;
    let (mr, ended, _) = side
        .mr(own.pd, own.buffer, 0, SIZE, ALL_ACCESS)
        .at("ibv_reg_mr")?;
    side.destroy(mr).at("ibv_dereg_mr")?;
    let (_, window) = side.window(own.pd, IBV_MW_TYPE_1).at("ibv_alloc_mw")?;
    for (key, at, what) in [
        (ended, at, "a region that has ended"),
        (next_key(own.lkey), at, "another instance"),
        (wrong(own.lkey), at, "a key that is none"),
        (window, at, "a window"),
        (0, at, "all memory"),
        (u32::MAX, at, "the last key"),
        (own.lkey, (own.address, SIZE - 1), "less of it"),
        (own.lkey, (own.address, SIZE + 1), "more of it"),
        (own.lkey, (own.address + 4096, SIZE), "another address"),
    ] {
        let result = side.share_by_key(own.pd, key, at, ALL_ACCESS);
        must_fail(result, libc::EINVAL, what)?;
    }
    bench.exchange(&pair)
}
