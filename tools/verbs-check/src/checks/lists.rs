// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists: keys that stand for pieces of regions, registered through a send queue (`ferritedv.h`).
//! What goes through one goes to its pieces and to no byte beside them; what may not be registered or
//! used is refused, and then nothing moves at all.

use std::time::{Duration, Instant};

use super::refusal::{
    failed, fails_locally, flushes, from_there, mark, must_fail, next_key, no_events,
    refused_as_it_is, second, untouched, vendor, work, wrong, MARKED,
};
use crate::agent::Counter;
use crate::bench::{
    At, Bench, End, Pair, PairEnd, PairOptions, ALL_ACCESS, ATOMIC_ACCESS, PATIENCE,
};
use crate::direct::{ListWork, LISTS, MAX_PIECES, WC_REGISTER_LIST};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{BindWork, Change, SendWork};

/// What no message brings.
const CANARY: u8 = 0xa5;

/// Two regions of a pair's buffer: offset and length.
const FIRST: (usize, usize) = (4096, 32768);
const SECOND: (usize, usize) = (65536, 32768);

/// Where messages are at the end that has no list.
const PLAIN: usize = 4096 + 29;

/// An address under which a list is used. The bytes of its second piece are then at addresses that an
/// atomic can have.
const ADDRESS: u64 = 0x7000_1234_5007;

/// A piece of a list: where it is in the buffer, and the key of its region.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub offset: usize,
    pub length: usize,
    pub lkey: u32,
}

/// A list as these checks know it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Number of the key.
    pub list: u64,
    /// The key itself.
    pub key: u32,
    pub access: u32,
    pub address: u64,
    pub pieces: Vec<Piece>,
}

/// A part of a message: offset in a buffer, bytes, which byte of the message is the first.
type Part = (usize, usize, u64);

impl Listed {
    pub fn length(&self) -> usize {
        self.pieces.iter().map(|piece| piece.length).sum()
    }

    /// The registration of it, by the end that has the pieces.
    pub fn work(&self, own: &PairEnd) -> ListWork {
        let entry = |piece: &Piece| {
            let address = own.address + piece.offset as u64;
            (address, piece.length as u32, piece.lkey)
        };
        ListWork {
            wr_id: 31,
            flags: IBV_SEND_SIGNALED,
            key: self.key,
            access: self.access,
            address: self.address,
            pieces: self.pieces.iter().map(entry).collect(),
            message: None,
            remote_srqn: 0,
        }
    }

    /// What byte `at` and those behind it are in the buffer.
    fn parts(&self, at: usize, length: usize) -> Vec<Part> {
        let (mut first, mut parts) = (0, Vec::new());
        for piece in &self.pieces {
            let behind = first + piece.length;
            let (low, high) = (at.max(first), (at + length).min(behind));
            if low < high {
                let offset = piece.offset + (low - first);
                parts.push((offset, high - low, (low - at) as u64));
            }
            first = behind;
        }
        parts
    }
}

pub fn run(bench: &mut Bench, report: &mut Report) {
    type Body = fn(&mut Bench) -> Check;
    let checks: &[(&str, Body)] = &[
        ("a peer writes and reads across pieces", across),
        ("a peer's atomics, in one piece and over the end", atomics),
        ("what is sent, received and read here", locally),
        ("the extended way of posting", extended),
        ("used before the registration has completed", early),
        ("a message tells the peer, whose answer ends it", told),
        ("ended by a work request", invalidated),
        ("ended by the peer's registration of its own", exchanged),
        ("ended with the region of a piece", deregistered),
        ("ended when a region is registered anew", changed),
        ("ended with its key", released),
        ("addresses from zero", zero_based),
        ("fewer rights than the pieces have", fewer_rights),
        ("not over the ends of the list", bounds),
        ("no windows over lists, no change of keys", not_for_lists),
        ("what cannot be asked for", not_asked),
        ("as many as the queue has room for", full),
        ("round the ring, and round the keys", rounds),
        ("pieces that are not in memory", absent),
    ];
    for (name, body) in checks {
        let result = with_lists(bench).and_then(|()| body(bench));
        bench.conclude(report, &format!("lists: {name}"), result);
    }
    for cause in CAUSES {
        let result = with_lists(bench).and_then(|()| {
            refuses(bench, cause, false)?;
            refuses(bench, cause, true)
        });
        bench.conclude(report, &format!("lists: refused: {}", cause.0), result);
    }
}

/// Skips where there are none.
pub fn with_lists(bench: &Bench) -> Check {
    if bench.hello_here.lists && bench.hello_there.lists {
        Ok(())
    } else {
        Err(Outcome::Skipped("there are no lists".into()))
    }
}

/// Every right of a region that the devices have.
fn rights(bench: &Bench) -> u32 {
    if bench.hello_here.atomics && bench.hello_there.atomics {
        ATOMIC_ACCESS
    } else {
        ALL_ACCESS
    }
}

/// Pairs whose queue pairs can do so much beyond the verbs.
pub fn options(bench: &Bench, direct: u32) -> PairOptions {
    let mut options = PairOptions {
        mr_access: rights(bench),
        qp_access: rights(bench),
        ..Default::default()
    };
    options.qp.send_sge = MAX_PIECES as u32;
    options.qp.direct = direct;
    options
}

/// A region over a part of an end's buffer: number and key.
fn region(
    bench: &mut Bench,
    end: End,
    own: &PairEnd,
    at: (usize, usize),
    access: u32,
) -> Check<(u64, u32)> {
    let (mr, lkey, _) = bench
        .side(end)
        .mr(own.pd, own.buffer, at.0, at.1, access)
        .at("ibv_reg_mr")?;
    Ok((mr, lkey))
}

/// A list to be registered, of pieces of two regions of which none is where another ends; also gives
/// the numbers of the regions.
fn described(bench: &mut Bench, end: End, own: &PairEnd) -> Check<(Listed, [u64; 2])> {
    let access = rights(bench);
    let (one, first) = region(bench, end, own, FIRST, access)?;
    let (other, second) = region(bench, end, own, SECOND, access)?;
    let piece = |lkey, offset, length| Piece {
        offset,
        length,
        lkey,
    };
    let (list, key) = bench
        .side(end)
        .list(own.pd, MAX_PIECES)
        .at("ferritedv_alloc_list")?;
    let listed = Listed {
        list,
        key: next_key(key),
        access,
        address: ADDRESS,
        pieces: vec![
            piece(first, FIRST.0 + 13, 1001),
            piece(second, SECOND.0, 20_480),
            piece(first, 16_384 - 3, 7),
            piece(second, 90_000, 8191),
            piece(first, 30_000, 1),
        ],
    };
    Ok((listed, [one, other]))
}

/// Registers a list and waits for its completion.
pub fn register(bench: &mut Bench, end: End, own: &PairEnd, listed: &Listed) -> Check {
    bench
        .side(end)
        .post_list(own.qp.qp, listed.list, &listed.work(own))
        .at("ferritedv_post_register_list")?;
    registered(bench, end, own, 31)
}

/// Waits for the completion of a registration.
fn registered(bench: &mut Bench, end: End, own: &PairEnd, wr_id: u64) -> Check {
    let done = bench.status(end, own.send_cq, IBV_WC_SUCCESS, "the registration")?;
    expect!(
        (done.wr_id, done.opcode),
        (wr_id, WC_REGISTER_LIST),
        "completion of the registration"
    );
    Ok(())
}

/// A connected pair, and a list that is registered here.
fn listed(bench: &mut Bench) -> Check<(Pair, Listed)> {
    let pair = bench.pair(&options(bench, LISTS))?;
    let (listed, _) = described(bench, End::Here, &pair.here)?;
    register(bench, End::Here, &pair.here, &listed)?;
    Ok((pair, listed))
}

/// A buffer gets parts of a message, and is of one byte else.
fn lay(bench: &mut Bench, end: End, buffer: u64, seed: u64, parts: &[Part]) -> Check {
    let side = bench.side(end);
    side.set(buffer, 0, MARKED, CANARY).at("set")?;
    for &(offset, length, start) in parts {
        side.fill_part(buffer, offset, length, seed, start)
            .at("fill")?;
    }
    Ok(())
}

/// A buffer has parts of a message, and nothing beside them was touched.
fn lies(bench: &mut Bench, end: End, buffer: u64, seed: u64, parts: &[Part]) -> Check {
    let side = bench.side(end);
    let mut parts = parts.to_vec();
    parts.sort_unstable();
    let mut gap = 0;
    for (offset, length, start) in parts {
        let wrong = side
            .check_part(buffer, offset, length, seed, start)
            .at("check")?;
        expect!(wrong, None, "first wrong byte of the part at {offset}");
        let wrong = side
            .check_set(buffer, gap, offset - gap, CANARY)
            .at("check")?;
        expect!(wrong, None, "first touched byte between {gap} and {offset}");
        gap = offset + length;
    }
    let wrong = side
        .check_set(buffer, gap, MARKED - gap, CANARY)
        .at("check")?;
    expect!(wrong, None, "first touched byte behind {gap}");
    Ok(())
}

/// A request of the peer's: to the list here, with its own plain memory.
pub fn peers_work(pair: &Pair, listed: &Listed, opcode: u32, at: usize, length: usize) -> SendWork {
    SendWork {
        wr_id: 32,
        opcode,
        flags: IBV_SEND_SIGNALED,
        immediate: 0,
        remote_address: listed.address + at as u64,
        rkey: listed.key,
        operands: (0, 0),
        entries: vec![(
            pair.there.address + PLAIN as u64,
            length as u32,
            pair.there.lkey,
        )],
    }
}

/// The peer writes to the list here, or reads from it; every byte is looked at.
pub fn by_peer(
    bench: &mut Bench,
    pair: &Pair,
    listed: &Listed,
    opcode: u32,
    at: usize,
    length: usize,
) -> Check {
    let seed = bench.seed();
    let plain = [(PLAIN, length, 0)];
    let parts = listed.parts(at, length);
    let read = opcode == IBV_WR_RDMA_READ;
    let nothing: &[Part] = &[];
    let (here, there) = (pair.here.buffer, pair.there.buffer);
    let (source, target) = if read {
        (&parts[..], nothing)
    } else {
        (nothing, &plain[..])
    };
    lay(bench, End::Here, here, seed, source)?;
    lay(bench, End::There, there, seed, target)?;
    bench
        .there
        .post_send(
            pair.there.qp.qp,
            &peers_work(pair, listed, opcode, at, length),
        )
        .at("ibv_post_send")?;
    let done = bench.status(
        End::There,
        pair.there.send_cq,
        IBV_WC_SUCCESS,
        "the peer's request",
    )?;
    expect!(done.wr_id, 32, "wr_id of the peer's request");
    lies(bench, End::Here, here, seed, &parts)?;
    lies(bench, End::There, there, seed, &plain)
}

/// Ranges of the list of [`described`], over the ends of its pieces and up to them.
fn ranges(listed: &Listed) -> Vec<(usize, usize)> {
    let all = listed.length();
    vec![
        (0, all),
        (0, 1),
        (0, 1001),
        (1000, 1),
        (1000, 2),
        (1001, 20_480),
        (990, 20_510),
        (21_481, 7),
        (21_480, 9),
        (21_485, 4096),
        (all - 2, 2),
        (all - 1, 1),
    ]
}

fn across(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    for (at, length) in ranges(&listed) {
        for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            by_peer(bench, &pair, &listed, opcode, at, length)
                .map_err(|outcome| Outcome::Failed(format!("{length} at {at}: {outcome:?}")))?;
        }
    }
    bench.exchange(&pair)
}

/// A peer's request that must be refused, and no byte of either end changed: on this connection,
/// which is of no use afterwards.
pub fn peer_is_refused(bench: &mut Bench, pair: &Pair, bad: &SendWork) -> Check {
    mark(bench, pair)?;
    from_there(bench, pair, |bench, back| {
        refused_as_it_is(bench, back, bad)
    })?;
    untouched(bench, pair)
}

/// A work request here that must fail, and no byte of either end changed: likewise.
fn fails_here(bench: &mut Bench, pair: &Pair, bad: &SendWork, vendor_err: u32) -> Check {
    mark(bench, pair)?;
    bench
        .here
        .post_send(pair.here.qp.qp, bad)
        .at("ibv_post_send")?;
    failed(
        bench,
        End::Here,
        pair.here.send_cq,
        bad.wr_id,
        IBV_WC_LOC_PROT_ERR,
        vendor_err,
    )?;
    flushes(bench, pair)?;
    untouched(bench, pair)
}

/// Another connection of the same domains, to be spoiled.
fn another(bench: &mut Bench, pair: &Pair) -> Check<Pair> {
    let options = options(bench, LISTS);
    second(bench, pair, &options)
}

fn atomics(bench: &mut Bench) -> Check {
    if rights(bench) & IBV_ACCESS_REMOTE_ATOMIC == 0 {
        return Err(Outcome::Skipped("atomics are not offered".into()));
    }
    let (pair, listed) = listed(bench)?;
    let add = |at: usize| {
        let mut add = peers_work(&pair, &listed, IBV_WR_ATOMIC_FETCH_AND_ADD, at, 8);
        add.operands = (u64::from_ne_bytes([1; 8]), 0);
        add.entries[0].0 = pair.there.address + 4096;
        add
    };
    // The first word of the second piece, and its last.
    for at in [1001, 1001 + 20_480 - 8] {
        let offset = SECOND.0 + at - 1001;
        let here = pair.here.buffer;
        bench.here.set(here, 0, MARKED, CANARY).at("set")?;
        bench
            .there
            .post_send(pair.there.qp.qp, &add(at))
            .at("ibv_post_send")?;
        bench.status(
            End::There,
            pair.there.send_cq,
            IBV_WC_SUCCESS,
            "the addition",
        )?;
        for (from, to, byte) in [
            (0, offset, CANARY),
            (offset, offset + 8, CANARY + 1),
            (offset + 8, MARKED, CANARY),
        ] {
            let wrong = bench
                .here
                .check_set(here, from, to - from, byte)
                .at("check")?;
            expect!(wrong, None, "first byte that is not {byte:#x} from {from}");
        }
    }
    // Seven bytes of one piece and one of the next are eight bytes nowhere; and what is eight bytes at
    // an address that is none of an atomic in memory cannot be changed at once either.
    for at in [21_481, 21_489] {
        let other = another(bench, &pair)?;
        peer_is_refused(bench, &other, &add(at))?;
    }
    Ok(())
}

/// Everything that a work request here does with memory, through a list.
fn uses(bench: &mut Bench, pair: &Pair, listed: &Listed, at: usize, length: usize) -> Check {
    let entry = (listed.address + at as u64, length as u32, listed.key);
    let plain = (
        pair.there.address + PLAIN as u64,
        length as u32,
        pair.there.lkey,
    );
    let (parts, whole) = (listed.parts(at, length), [(PLAIN, length, 0)]);
    let (here, there) = (pair.here.buffer, pair.there.buffer);
    let nothing: &[Part] = &[];
    for opcode in [IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let seed = bench.seed();
        let read = opcode == IBV_WR_RDMA_READ;
        let (source, target) = if read {
            (nothing, &whole[..])
        } else {
            (&parts[..], nothing)
        };
        lay(bench, End::Here, here, seed, source)?;
        lay(bench, End::There, there, seed, target)?;
        if opcode == IBV_WR_SEND {
            bench
                .there
                .post_recv(pair.there.qp.qp, 33, &[plain])
                .at("ibv_post_recv")?;
        }
        let mut request = work(pair, opcode, length as u32);
        request.entries = vec![entry];
        request.remote_address += PLAIN as u64;
        bench
            .here
            .post_send(pair.here.qp.qp, &request)
            .at("ibv_post_send")?;
        bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the request")?;
        if opcode == IBV_WR_SEND {
            bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
        }
        lies(bench, End::Here, here, seed, &parts)?;
        lies(bench, End::There, there, seed, &whole)?;
    }
    // And what comes in.
    let seed = bench.seed();
    lay(bench, End::Here, here, seed, &[])?;
    lay(bench, End::There, there, seed, &whole)?;
    bench
        .here
        .post_recv(pair.here.qp.qp, 34, &[entry])
        .at("ibv_post_recv")?;
    let mut send = work(pair, IBV_WR_SEND, 0);
    send.entries = vec![plain];
    bench
        .there
        .post_send(pair.there.qp.qp, &send)
        .at("ibv_post_send")?;
    bench.status(End::There, pair.there.send_cq, IBV_WC_SUCCESS, "the send")?;
    let done = bench.status(End::Here, pair.here.recv_cq, IBV_WC_SUCCESS, "the receive")?;
    expect!(done.byte_len as usize, length, "length of the receive");
    lies(bench, End::Here, here, seed, &parts)
}

fn locally(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    for (at, length) in [(0, listed.length()), (999, 20_500), (21_480, 9)] {
        uses(bench, &pair, &listed, at, length)?;
    }
    Ok(())
}

fn extended(bench: &mut Bench) -> Check {
    let mut options = options(bench, LISTS);
    options.qp.extended = true;
    options.cq_extended = true;
    let pair = bench.pair(&options)?;
    let (mut listed, _) = described(bench, End::Here, &pair.here)?;
    for _ in 0..3 {
        listed.key = next_key(listed.key);
        register(bench, End::Here, &pair.here, &listed)?;
        by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 990, 20_510)?;
        uses(bench, &pair, &listed, 990, 20_510)?;
        tells(bench, &pair, &mut listed)?;
    }
    Ok(())
}

/// Ends the registration of a key by a work request.
fn invalidate(bench: &mut Bench, pair: &Pair, key: u32) -> Check {
    let mut end = work(pair, IBV_WR_LOCAL_INV, 0);
    end.immediate = key;
    end.entries = Vec::new();
    bench
        .here
        .post_send(pair.here.qp.qp, &end)
        .at("ibv_post_send")?;
    let done = bench.status(
        End::Here,
        pair.here.send_cq,
        IBV_WC_SUCCESS,
        "the invalidation",
    )?;
    expect!(done.opcode, IBV_WC_LOCAL_INV, "opcode of the invalidation");
    Ok(())
}

/// The registration and what uses it are posted together, behind a read whose answer takes its time:
/// nothing behind that can have completed when the list is used.
fn early(bench: &mut Bench) -> Check {
    let mut options = options(bench, LISTS);
    // Messages are placed behind what is looked at.
    options.size = 2 * MARKED;
    let pair = bench.pair(&options)?;
    let (mut listed, _) = described(bench, End::Here, &pair.here)?;
    let count = |bench: &mut Bench, counter| bench.here.counter(counter).at("hw_counters");
    let before = [
        count(bench, Counter::Registrations)?,
        count(bench, Counter::EarlyUses)?,
    ];
    const ROUNDS: u64 = 8;
    for round in 0..ROUNDS {
        let (at, length) = (990, 20_510);
        let seed = bench.seed();
        let parts = listed.parts(at, length);
        lay(bench, End::Here, pair.here.buffer, seed, &parts)?;
        lay(bench, End::There, pair.there.buffer, seed, &[])?;
        // A message that is not complete before there is a receive for it.
        let held = work(&pair, IBV_WR_SEND, 64);
        let mut registration = listed.work(&pair.here);
        // That a completion is not asked for changes nothing.
        registration.flags = if round % 2 == 0 { IBV_SEND_SIGNALED } else { 0 };
        let mut write = work(&pair, IBV_WR_RDMA_WRITE, 0);
        write.entries = vec![(listed.address + at as u64, length as u32, listed.key)];
        write.remote_address += PLAIN as u64;
        let mut end = work(&pair, IBV_WR_LOCAL_INV, 0);
        end.immediate = listed.key;
        end.entries = Vec::new();
        let side = &mut bench.here;
        let qp = pair.here.qp.qp;
        side.post_send(qp, &held).at("ibv_post_send")?;
        side.post_list(qp, listed.list, &registration)
            .at("ferritedv_post_register_list")?;
        side.post_send(qp, &write).at("ibv_post_send")?;
        side.post_send(qp, &end).at("ibv_post_send")?;
        let inbox = (pair.there.address + MARKED as u64, 64, pair.there.lkey);
        bench
            .there
            .post_recv(pair.there.qp.qp, 5, &[inbox])
            .at("ibv_post_recv")?;
        let mut opcodes = vec![IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_LOCAL_INV];
        if round % 2 == 0 {
            opcodes.insert(1, WC_REGISTER_LIST);
        }
        for opcode in opcodes {
            let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "request")?;
            expect!(done.opcode, opcode, "order of completions");
        }
        bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
        let plain = [(PLAIN, length, 0)];
        lies(bench, End::There, pair.there.buffer, seed, &plain)?;
        listed.key = next_key(listed.key);
    }
    // The kernel reads them anew only from time to time.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let registrations = count(bench, Counter::Registrations)? - before[0];
        let uses = count(bench, Counter::EarlyUses)? - before[1];
        if registrations >= ROUNDS && uses >= ROUNDS {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!(
                "{registrations} registrations counted and {uses} early uses, of {ROUNDS} each"
            )
            .into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A list that is registered anew is told to the peer by a message of the same work request; the peer
/// uses it, and its answer ends it.
fn tells(bench: &mut Bench, pair: &Pair, listed: &mut Listed) -> Check {
    let old = listed.key;
    invalidate(bench, pair, old)?;
    listed.key = next_key(old);
    let seed = bench.seed();
    let length = 3000;
    lay(bench, End::There, pair.there.buffer, seed, &[])?;
    lay(
        bench,
        End::Here,
        pair.here.buffer,
        seed,
        &[(100_000, length, 0)],
    )?;
    let (there, here) = (pair.there, pair.here);
    let inbox = (there.address + PLAIN as u64, 4000, there.lkey);
    bench
        .there
        .post_recv(there.qp.qp, 35, &[inbox])
        .at("ibv_post_recv")?;
    let mut work = listed.work(&here);
    // In two entries.
    let message = [
        (here.address + 100_000, 1000, here.lkey),
        (here.address + 101_000, length as u32 - 1000, here.lkey),
    ];
    work.message = Some((message.to_vec(), 0));
    bench
        .here
        .post_list(here.qp.qp, listed.list, &work)
        .at("ferritedv_post_register_list_and_send")?;
    let done = bench.status(End::Here, here.send_cq, IBV_WC_SUCCESS, "the message")?;
    expect!(
        (done.wr_id, done.opcode),
        (31, IBV_WC_SEND),
        "completion of the message"
    );
    let done = bench.status(End::There, there.recv_cq, IBV_WC_SUCCESS, "its receive")?;
    expect!(
        (done.wr_id, done.byte_len as usize, done.flags),
        (35, length, 0),
        "completion of the receive"
    );
    lies(bench, End::There, there.buffer, seed, &[(PLAIN, length, 0)])?;
    by_peer(bench, pair, listed, IBV_WR_RDMA_WRITE, 990, 20_510)?;
    by_peer(bench, pair, listed, IBV_WR_RDMA_READ, 0, 2000)?;
    answer(bench, pair, listed.key)
}

/// The peer's message that ends a registration.
fn answer(bench: &mut Bench, pair: &Pair, key: u32) -> Check {
    let inbox = (pair.here.address, 100, pair.here.lkey);
    bench
        .here
        .post_recv(pair.here.qp.qp, 36, &[inbox])
        .at("ibv_post_recv")?;
    let mut send = work(pair, IBV_WR_SEND_WITH_INV, 0);
    send.immediate = key;
    send.entries = vec![(pair.there.address, 10, pair.there.lkey)];
    bench
        .there
        .post_send(pair.there.qp.qp, &send)
        .at("ibv_post_send")?;
    bench.status(End::There, pair.there.send_cq, IBV_WC_SUCCESS, "the answer")?;
    let done = bench.status(End::Here, pair.here.recv_cq, IBV_WC_SUCCESS, "its receive")?;
    expect!(
        (done.wr_id, done.byte_len, done.flags),
        (36, 10, IBV_WC_WITH_INV),
        "completion of the answer"
    );
    expect!(done.immediate, key, "the key that has ended");
    Ok(())
}

/// The list is refused, to the peer and here: it is not valid.
fn has_ended(bench: &mut Bench, pair: &Pair, listed: &Listed, vendor_err: u32) -> Check {
    // A part that lies in the first region alone, and one over both.
    for (at, length) in [(10, 100), (990, 5000)] {
        for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            let other = another(bench, pair)?;
            let bad = peers_work(&other, listed, opcode, at, length);
            peer_is_refused(bench, &other, &bad)?;
        }
    }
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let other = another(bench, pair)?;
        let mut bad = work(&other, opcode, 100);
        bad.entries = vec![(listed.address + 10, 100, listed.key)];
        fails_here(bench, &other, &bad, vendor_err)?;
    }
    Ok(())
}

/// Registered anew under the next key, all is well.
fn and_again(bench: &mut Bench, pair: &Pair, listed: &Listed) -> Check {
    let again = Listed {
        key: next_key(listed.key),
        ..listed.clone()
    };
    register(bench, End::Here, &pair.here, &again)?;
    by_peer(bench, pair, &again, IBV_WR_RDMA_WRITE, 0, again.length())
}

fn told(bench: &mut Bench) -> Check {
    let (pair, mut listed) = listed(bench)?;
    tells(bench, &pair, &mut listed)?;
    has_ended(bench, &pair, &listed, vendor::NOT_VALID)?;
    and_again(bench, &pair, &listed)
}

fn invalidated(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    invalidate(bench, &pair, listed.key)?;
    has_ended(bench, &pair, &listed, vendor::NOT_VALID)?;
    and_again(bench, &pair, &listed)
}

/// Both ends have a list. The message with which one is registered here ends the one there.
fn exchanged(bench: &mut Bench) -> Check {
    let (pair, mut mine) = listed(bench)?;
    let (theirs, _) = described(bench, End::There, &pair.there)?;
    register(bench, End::There, &pair.there, &theirs)?;
    from_there(bench, &pair, |bench, back| {
        by_peer(bench, back, &theirs, IBV_WR_RDMA_WRITE, 0, 5000)
    })?;
    invalidate(bench, &pair, mine.key)?;
    mine.key = next_key(mine.key);
    let inbox = (pair.there.address, 100, pair.there.lkey);
    bench
        .there
        .post_recv(pair.there.qp.qp, 37, &[inbox])
        .at("ibv_post_recv")?;
    let mut work = mine.work(&pair.here);
    work.message = Some((vec![(pair.here.address, 50, pair.here.lkey)], theirs.key));
    bench
        .here
        .post_list(pair.here.qp.qp, mine.list, &work)
        .at("ferritedv_post_register_list_and_send")?;
    let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the message")?;
    expect!(done.opcode, IBV_WC_SEND, "opcode of the message");
    let done = bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
    expect!(
        (done.byte_len, done.flags, done.immediate),
        (50, IBV_WC_WITH_INV, theirs.key),
        "completion of the receive"
    );
    by_peer(bench, &pair, &mine, IBV_WR_RDMA_WRITE, 0, mine.length())?;
    from_there(bench, &pair, |bench, back| {
        has_ended(bench, back, &theirs, vendor::NOT_VALID)
    })
}

fn deregistered(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(bench, LISTS))?;
    let (mut list, regions) = described(bench, End::Here, &pair.here)?;
    register(bench, End::Here, &pair.here, &list)?;
    by_peer(bench, &pair, &list, IBV_WR_RDMA_WRITE, 0, list.length())?;
    // A list is no reason to keep a region.
    bench.here.destroy(regions[1]).at("ibv_dereg_mr")?;
    has_ended(bench, &pair, &list, vendor::NOT_VALID)?;
    // The same memory under another key, and under the table entry that was given back or another.
    let access = rights(bench);
    let (_, lkey) = region(bench, End::Here, &pair.here, SECOND, access)?;
    has_ended(bench, &pair, &list, vendor::NOT_VALID)?;
    for piece in &mut list.pieces {
        if piece.offset >= SECOND.0 {
            piece.lkey = lkey;
        }
    }
    and_again(bench, &pair, &list)
}

fn changed(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(bench, LISTS))?;
    let (mut list, regions) = described(bench, End::Here, &pair.here)?;
    register(bench, End::Here, &pair.here, &list)?;
    // Memory and domain stay; and with the same rights it is another registration all the same.
    let access = rights(bench);
    let lkey = bench
        .here
        .change_mr(regions[0], access)
        .at("ibv_rereg_mr")?;
    has_ended(bench, &pair, &list, vendor::NOT_VALID)?;
    for piece in &mut list.pieces {
        if piece.offset < SECOND.0 {
            piece.lkey = lkey;
        }
    }
    and_again(bench, &pair, &list)
}

fn released(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    bench.here.destroy(listed.list).at("ibv_dereg_mr")?;
    has_ended(bench, &pair, &listed, vendor::NO_ENTRY)?;
    // The regions are what they were.
    bench.exchange(&pair)
}

fn zero_based(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(bench, LISTS))?;
    let (mut list, _) = described(bench, End::Here, &pair.here)?;
    list.access |= IBV_ACCESS_ZERO_BASED;
    register(bench, End::Here, &pair.here, &list)?;
    list.address = 0;
    for (at, length) in ranges(&list) {
        by_peer(bench, &pair, &list, IBV_WR_RDMA_WRITE, at, length)?;
    }
    list.address = ADDRESS;
    let bad = peers_work(&pair, &list, IBV_WR_RDMA_WRITE, 0, 1);
    peer_is_refused(bench, &pair, &bad)
}

fn fewer_rights(bench: &mut Bench) -> Check {
    for (access, good, bad) in [
        (IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE),
        (
            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
            IBV_WR_RDMA_WRITE,
            IBV_WR_RDMA_READ,
        ),
    ] {
        let pair = bench.pair(&options(bench, LISTS))?;
        let (mut list, _) = described(bench, End::Here, &pair.here)?;
        list.access = access;
        register(bench, End::Here, &pair.here, &list)?;
        by_peer(bench, &pair, &list, good, 990, 5000)?;
        let bad = peers_work(&pair, &list, bad, 990, 5000);
        peer_is_refused(bench, &pair, &bad)?;
    }
    // And without the right to write here, nothing is read into it.
    let pair = bench.pair(&options(bench, LISTS))?;
    let (mut list, _) = described(bench, End::Here, &pair.here)?;
    list.access = IBV_ACCESS_REMOTE_READ;
    register(bench, End::Here, &pair.here, &list)?;
    let mut bad = work(&pair, IBV_WR_RDMA_READ, 0);
    bad.entries = vec![(list.address, 100, list.key)];
    fails_locally(bench, &pair, &bad, vendor::NO_RIGHT)
}

fn bounds(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    let all = listed.length();
    for (address, length) in [
        (ADDRESS + all as u64 - 99, 100),
        (ADDRESS - 1, 100),
        (ADDRESS + all as u64, 1),
        (ADDRESS, all + 1),
        (u64::MAX - 50, 100),
    ] {
        let other = another(bench, &pair)?;
        let mut bad = peers_work(&other, &listed, IBV_WR_RDMA_WRITE, 0, length);
        bad.remote_address = address;
        peer_is_refused(bench, &other, &bad)?;
        let other = another(bench, &pair)?;
        let mut bad = work(&other, IBV_WR_RDMA_WRITE, 0);
        bad.entries = vec![(address, length as u32, listed.key)];
        fails_here(bench, &other, &bad, vendor::OUT_OF_BOUNDS)?;
    }
    by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 0, all)
}

fn not_for_lists(bench: &mut Bench) -> Check {
    let (pair, listed) = listed(bench)?;
    let access = rights(bench);
    let result = bench.here.change_mr(listed.list, access);
    must_fail(result, libc::EOPNOTSUPP, "ibv_rereg_mr of a list")?;
    by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 0, 5000)?;
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        let other = another(bench, &pair)?;
        let (mw, rkey) = bench.here.window(pair.here.pd, kind).at("ibv_alloc_mw")?;
        // A bind names the region by its structure, which has the first key: the list has it now.
        let bind = BindWork {
            wr_id: 6,
            rkey: next_key(rkey),
            address: listed.address,
            length: 100,
            access: IBV_ACCESS_REMOTE_READ,
        };
        bench
            .here
            .bind(other.here.qp.qp, mw, listed.list, &bind)
            .at("bind")?;
        failed(
            bench,
            End::Here,
            other.here.send_cq,
            6,
            IBV_WC_MW_BIND_ERR,
            vendor::WRONG_KIND,
        )?;
        flushes(bench, &other)?;
    }
    by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 0, 5000)
}

/// What the provider or the kernel can tell by itself.
fn not_asked(bench: &mut Bench) -> Check {
    let plain = bench.pair(&PairOptions::default())?;
    for pieces in [0, MAX_PIECES + 1] {
        let result = bench.here.list(plain.here.pd, pieces);
        must_fail(result, libc::EINVAL, &format!("a key for {pieces} pieces"))?;
    }
    let mut unknown = options(bench, LISTS).qp;
    unknown.direct |= 1 << 3;
    let own = plain.here;
    let result = bench.here.qp(own.pd, own.send_cq, own.recv_cq, &unknown);
    must_fail(
        result,
        libc::EINVAL,
        "a queue pair that can do what is not known",
    )?;
    let pair = bench.pair(&options(bench, LISTS))?;
    let (listed, _) = described(bench, End::Here, &pair.here)?;
    let good = listed.work(&pair.here);
    let change = |change: fn(&mut ListWork)| {
        let mut work = good.clone();
        change(&mut work);
        work
    };
    for (what, work) in [
        ("no pieces", change(|work| work.pieces.clear())),
        ("a key of another", change(|work| work.key += 0x100)),
        (
            "windows over it",
            change(|work| work.access |= IBV_ACCESS_MW_BIND),
        ),
        (
            "pages on demand",
            change(|work| work.access |= IBV_ACCESS_ON_DEMAND),
        ),
        (
            "a message too many",
            change(|work| {
                work.pieces = vec![work.pieces[0]; MAX_PIECES];
                work.message = Some((vec![work.pieces[0]], 0));
            }),
        ),
        (
            "inline data",
            change(|work| {
                work.flags |= IBV_SEND_INLINE;
                work.message = Some((vec![work.pieces[0]], 0));
            }),
        ),
    ] {
        let result = bench.here.post_list(pair.here.qp.qp, listed.list, &work);
        must_fail(result, libc::EINVAL, what)?;
    }
    // On a queue pair that was not made for it.
    let result = bench.here.post_list(plain.here.qp.qp, listed.list, &good);
    must_fail(result, libc::EINVAL, "on a queue pair without lists")?;
    // Nothing of all that has been posted.
    register(bench, End::Here, &pair.here, &listed)?;
    bench.exchange(&plain)?;
    bench.exchange(&pair)
}

/// Registrations and their ends, as large as they can be: as many as were promised, and no more.
fn full(bench: &mut Bench) -> Check {
    for (send_wr, send_sge) in [(16, MAX_PIECES), (5, 3), (64, 1)] {
        let mut options = options(bench, LISTS);
        options.qp.send_wr = send_wr;
        options.qp.send_sge = send_sge as u32;
        options.cq_entries = 256;
        let pair = bench.pair(&options)?;
        let access = rights(bench);
        let (_, lkey) = region(bench, End::Here, &pair.here, FIRST, access)?;
        let most = (pair.here.qp.send_sge as usize).min(MAX_PIECES);
        let (list, key) = bench
            .here
            .list(pair.here.pd, most)
            .at("ferritedv_alloc_list")?;
        let mut listed = Listed {
            list,
            key: next_key(key),
            access,
            address: ADDRESS,
            pieces: (0..most)
                .map(|n| Piece {
                    offset: FIRST.0 + 100 * n,
                    length: 50,
                    lkey,
                })
                .collect(),
        };
        let mut end = work(&pair, IBV_WR_LOCAL_INV, 0);
        end.entries = Vec::new();
        let promised = pair.here.qp.send_wr;
        for round in 0..3 {
            let mut posted = 0;
            loop {
                let result = if posted % 2 == 0 {
                    listed.key = next_key(listed.key);
                    bench
                        .here
                        .post_list(pair.here.qp.qp, list, &listed.work(&pair.here))
                } else {
                    end.immediate = listed.key;
                    bench.here.post_send(pair.here.qp.qp, &end)
                };
                match result {
                    Ok(()) => posted += 1,
                    refused => {
                        must_fail(refused, libc::ENOMEM, "one more than there is room for")?;
                        break;
                    }
                }
                if posted > promised {
                    return Err(format!("{posted} of {promised} were taken").into());
                }
            }
            expect!(posted, promised, "posts that were taken in round {round}");
            for n in 0..posted {
                let done = bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "it")?;
                let opcode = if n % 2 == 0 {
                    WC_REGISTER_LIST
                } else {
                    IBV_WC_LOCAL_INV
                };
                expect!(done.opcode, opcode, "order of completions");
            }
            if posted % 2 == 1 {
                invalidate(bench, &pair, listed.key)?;
            }
        }
        bench.exchange(&pair)?;
    }
    Ok(())
}

/// Lists of one to sixteen pieces, some with messages, one after another: often enough for the ring
/// to have come round many times and the 256 keys once.
fn rounds(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(bench, LISTS))?;
    let access = rights(bench);
    let (_, lkey) = region(bench, End::Here, &pair.here, FIRST, access)?;
    let (list, key) = bench
        .here
        .list(pair.here.pd, MAX_PIECES)
        .at("ferritedv_alloc_list")?;
    let mut listed = Listed {
        list,
        key,
        access,
        address: ADDRESS,
        pieces: Vec::new(),
    };
    for round in 0..300usize {
        listed.key = next_key(listed.key);
        let count = 1 + round * 7 % MAX_PIECES;
        listed.pieces = (0..count)
            .map(|n| Piece {
                // From the last to the first.
                offset: FIRST.0 + 1000 * (count - n) + round,
                length: 1 + (round * 13 + n * 29) % 400,
                lkey,
            })
            .collect();
        if round % 3 == 0 && count < MAX_PIECES {
            let inbox = (pair.there.address, 100, pair.there.lkey);
            bench
                .there
                .post_recv(pair.there.qp.qp, 38, &[inbox])
                .at("ibv_post_recv")?;
            let mut work = listed.work(&pair.here);
            work.message = Some((vec![(pair.here.address, 60, pair.here.lkey)], 0));
            bench
                .here
                .post_list(pair.here.qp.qp, list, &work)
                .at("ferritedv_post_register_list_and_send")?;
            bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the message")?;
            bench.status(End::There, pair.there.recv_cq, IBV_WC_SUCCESS, "receive")?;
        } else {
            register(bench, End::Here, &pair.here, &listed)?;
        }
        let length = listed.length();
        by_peer(bench, &pair, &listed, IBV_WR_RDMA_WRITE, 0, length)
            .map_err(|outcome| Outcome::Failed(format!("round {round}: {outcome:?}")))?;
        invalidate(bench, &pair, listed.key)?;
    }
    Ok(())
}

/// Pieces of a region on demand, of which no page is there when the peer comes.
fn absent(bench: &mut Bench) -> Check {
    let pair = bench.pair(&options(bench, LISTS))?;
    let access = rights(bench);
    let own = pair.here;
    let (_, pinned) = region(bench, End::Here, &own, FIRST, access)?;
    let (_, lkey) = match bench.here.mr(
        own.pd,
        own.buffer,
        SECOND.0,
        SECOND.1,
        ALL_ACCESS | IBV_ACCESS_ON_DEMAND,
    ) {
        Ok((mr, lkey, _)) => (mr, lkey),
        Err(errno) => return Err(Outcome::Skipped(format!("no regions on demand: {errno}"))),
    };
    let (list, key) = bench.here.list(own.pd, 4).at("ferritedv_alloc_list")?;
    let listed = Listed {
        list,
        key: next_key(key),
        access: ALL_ACCESS,
        address: ADDRESS,
        pieces: [
            (FIRST.0, 3000, pinned),
            (SECOND.0 + 100, 20_000, lkey),
            (FIRST.0 + 8192, 3000, pinned),
            (SECOND.0 + 28_672, 100, lkey),
        ]
        .map(|(offset, length, lkey)| Piece {
            offset,
            length,
            lkey,
        })
        .to_vec(),
    };
    register(bench, End::Here, &own, &listed)?;
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        for (at, length) in [(0, listed.length()), (2990, 20), (22_000, 4100)] {
            // What is given back reads as zero.
            bench
                .here
                .change(own.buffer, Change::Discard, SECOND.0, SECOND.1)
                .at("madvise")?;
            let seed = bench.seed();
            let plain = [(PLAIN, length, 0)];
            lay(bench, End::There, pair.there.buffer, seed, &plain)?;
            bench
                .there
                .post_send(
                    pair.there.qp.qp,
                    &peers_work(&pair, &listed, opcode, at, length),
                )
                .at("ibv_post_send")?;
            bench.status(
                End::There,
                pair.there.send_cq,
                IBV_WC_SUCCESS,
                "the peer's request",
            )?;
            for (offset, length, start) in listed.parts(at, length) {
                let wrong = if opcode == IBV_WR_RDMA_WRITE {
                    bench
                        .here
                        .check_part(own.buffer, offset, length, seed, start)
                        .at("check")?
                } else if offset >= SECOND.0 {
                    bench
                        .there
                        .check_set(pair.there.buffer, PLAIN + start as usize, length, 0)
                        .at("check")?
                } else {
                    None
                };
                expect!(wrong, None, "first wrong byte of the part at {offset}");
            }
        }
    }
    Ok(())
}

/// A registration that must be refused: how, and as what.
pub struct Bad {
    /// Number of the key.
    pub list: u64,
    pub work: ListWork,
    pub vendor_err: u32,
}

impl Bad {
    /// It completes here as `wr_id` with its error, and what is behind it is flushed, in order.
    pub fn fails(&self, bench: &mut Bench, pair: &Pair, wr_id: u64, behind: &[u64]) -> Check {
        let cq = pair.here.send_cq;
        failed(
            bench,
            End::Here,
            cq,
            wr_id,
            IBV_WC_LOC_PROT_ERR,
            self.vendor_err,
        )?;
        for wr_id in behind {
            let done = bench.status(End::Here, cq, IBV_WC_WR_FLUSH_ERR, "what is behind it")?;
            expect!(done.wr_id, *wr_id, "order of what is flushed");
        }
        Ok(())
    }

    /// Nothing has changed in the table: by its key the peer reaches nothing, on a connection of its own.
    pub fn opens_nothing(&self, bench: &mut Bench, pair: &Pair) -> Check {
        let other = another(bench, pair)?;
        let mut peers = work(&other, IBV_WR_RDMA_READ, 0);
        peers.entries = vec![(other.there.address, 10, other.there.lkey)];
        (peers.remote_address, peers.rkey) = (self.work.address, self.work.key);
        peer_is_refused(bench, &other, &peers)
    }
}

/// What can be wrong with a registration, and nothing else with it.
pub type Cause = (&'static str, fn(&mut Bench, &Pair) -> Check<Bad>);

pub const CAUSES: &[Cause] = &[
    ("a piece under no key", |bench, pair| {
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            piece.2 = wrong(piece.2);
        })
    }),
    ("a piece under a key of another instance", |bench, pair| {
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            piece.2 = next_key(piece.2);
        })
    }),
    ("a piece past the end of its region", |bench, pair| {
        let end = pair.here.address + (FIRST.0 + FIRST.1) as u64;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            piece.0 = end - u64::from(piece.1) + 1;
        })
    }),
    ("a piece before the start of its region", |bench, pair| {
        let start = pair.here.address + FIRST.0 as u64;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            piece.0 = start - 1;
        })
    }),
    ("a piece around the end of all addresses", |bench, pair| {
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            piece.0 = u64::MAX - 50;
        })
    }),
    ("a piece without bytes", |bench, pair| {
        piece(bench, pair, vendor::PIECE_EMPTY, |piece| piece.1 = 0)
    }),
    ("a piece of all memory", |bench, pair| {
        piece(bench, pair, vendor::PIECE_KIND, |piece| piece.2 = 0)
    }),
    ("a piece of a region that is deregistered", |bench, pair| {
        let access = rights(bench);
        let (mr, lkey) = region(bench, End::Here, &pair.here, FIRST, access)?;
        bench.here.destroy(mr).at("ibv_dereg_mr")?;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| piece.2 = lkey)
    }),
    ("a piece of another domain", |bench, pair| {
        let access = rights(bench);
        let pd = bench.here.pd().at("ibv_alloc_pd")?;
        let own = PairEnd { pd, ..pair.here };
        let (_, lkey) = region(bench, End::Here, &own, FIRST, access)?;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| piece.2 = lkey)
    }),
    ("a piece of another process", |bench, pair| {
        let (_, key, address) = bench.here.foreign().at("another process")?;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            (piece.0, piece.2) = (address, key);
        })
    }),
    ("a piece of a window", |bench, pair| {
        let own = pair.here;
        let access = rights(bench) | IBV_ACCESS_MW_BIND;
        let (mr, _) = region(bench, End::Here, &own, FIRST, access)?;
        let (mw, rkey) = bench
            .here
            .window(own.pd, IBV_MW_TYPE_1)
            .at("ibv_alloc_mw")?;
        let bind = BindWork {
            wr_id: 6,
            rkey,
            address: own.address + FIRST.0 as u64,
            length: FIRST.1 as u64,
            access: rights(bench) & !IBV_ACCESS_LOCAL_WRITE,
        };
        let rkey = bench
            .here
            .bind(own.qp.qp, mw, mr, &bind)
            .at("ibv_bind_mw")?;
        bench.status(End::Here, own.send_cq, IBV_WC_SUCCESS, "the bind")?;
        piece(bench, pair, vendor::PIECE_KIND, |piece| piece.2 = rkey)
    }),
    ("a piece of a list", |bench, pair| {
        let (other, _) = described(bench, End::Here, &pair.here)?;
        register(bench, End::Here, &pair.here, &other)?;
        piece(bench, pair, vendor::PIECE_KIND, |piece| {
            (piece.0, piece.2) = (other.address, other.key);
        })
    }),
    ("a piece of a list that is not registered", |bench, pair| {
        let (other, _) = described(bench, End::Here, &pair.here)?;
        piece(bench, pair, vendor::PIECE_REFUSED, |piece| {
            (piece.0, piece.2) = (other.address, other.key);
        })
    }),
    ("the last of many pieces", |bench, pair| {
        let mut bad = piece(bench, pair, vendor::PIECE_REFUSED, |_| ())?;
        bad.work.pieces = vec![bad.work.pieces[0]; MAX_PIECES - 1];
        let mut last = bad.work.pieces[0];
        last.2 = wrong(last.2);
        // One is left for a message.
        bad.work.pieces[MAX_PIECES - 2] = last;
        Ok(bad)
    }),
    ("the right to write here", |bench, pair| {
        right(bench, pair, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ)
    }),
    ("the peer's right to write", |bench, pair| {
        let others = rights(bench) & !IBV_ACCESS_REMOTE_WRITE;
        right(bench, pair, IBV_ACCESS_REMOTE_WRITE, others)
    }),
    ("the peer's right to read", |bench, pair| {
        let others = rights(bench) & !IBV_ACCESS_REMOTE_READ;
        right(bench, pair, IBV_ACCESS_REMOTE_READ, others)
    }),
    ("the peer's right to atomics", |bench, pair| {
        if rights(bench) & IBV_ACCESS_REMOTE_ATOMIC == 0 {
            return Err(Outcome::Skipped("atomics are not offered".into()));
        }
        right(bench, pair, IBV_ACCESS_REMOTE_ATOMIC, ALL_ACCESS)
    }),
    ("the peer's right to flush", |bench, pair| {
        let all = rights(bench);
        right(bench, pair, IBV_ACCESS_FLUSH_GLOBAL, all)
    }),
    ("more pieces than its key has room for", |bench, pair| {
        let mut bad = piece(bench, pair, vendor::NOT_REGISTRABLE, |_| ())?;
        (bad.list, bad.work.key) = bench
            .here
            .list(pair.here.pd, 2)
            .at("ferritedv_alloc_list")?;
        Ok(bad)
    }),
    ("a list that is registered", |bench, pair| {
        let (listed, _) = described(bench, End::Here, &pair.here)?;
        register(bench, End::Here, &pair.here, &listed)?;
        let mut work = listed.work(&pair.here);
        work.key = next_key(work.key);
        Ok(Bad {
            list: listed.list,
            work,
            vendor_err: vendor::VALID_ALREADY,
        })
    }),
    ("a list of another domain", |bench, pair| {
        let mut bad = piece(bench, pair, vendor::WRONG_DOMAIN, |_| ())?;
        let pd = bench.here.pd().at("ibv_alloc_pd")?;
        (bad.list, bad.work.key) = bench.here.list(pd, MAX_PIECES).at("ferritedv_alloc_list")?;
        Ok(bad)
    }),
    ("the key of a region", |bench, pair| {
        let mut bad = piece(bench, pair, vendor::NOT_REGISTRABLE, |_| ())?;
        let access = rights(bench);
        let (mr, lkey) = region(bench, End::Here, &pair.here, FIRST, access)?;
        (bad.list, bad.work.key) = (mr, next_key(lkey));
        Ok(bad)
    }),
    ("addresses around the end of all", |bench, pair| {
        let mut bad = piece(bench, pair, vendor::OUT_OF_BOUNDS, |_| ())?;
        bad.work.address = u64::MAX - 10;
        Ok(bad)
    }),
];

/// A good registration, but for one piece: the middle one of three.
fn piece(
    bench: &mut Bench,
    pair: &Pair,
    vendor_err: u32,
    change: impl FnOnce(&mut (u64, u32, u32)),
) -> Check<Bad> {
    let own = pair.here;
    let access = rights(bench);
    let (_, lkey) = region(bench, End::Here, &own, FIRST, access)?;
    let (list, key) = bench
        .here
        .list(own.pd, MAX_PIECES)
        .at("ferritedv_alloc_list")?;
    let entry = |offset: usize| (own.address + offset as u64, 100, lkey);
    let mut pieces = [FIRST.0, FIRST.0 + 200, FIRST.0 + 400].map(entry);
    change(&mut pieces[1]);
    Ok(Bad {
        list,
        work: ListWork {
            wr_id: 39,
            flags: IBV_SEND_SIGNALED,
            key: next_key(key),
            access,
            address: ADDRESS,
            pieces: pieces.to_vec(),
            message: None,
            remote_srqn: 0,
        },
        vendor_err,
    })
}

/// A list that is to give a right, over a piece that has others.
fn right(bench: &mut Bench, pair: &Pair, right: u32, others: u32) -> Check<Bad> {
    let (_, lkey) = region(bench, End::Here, &pair.here, FIRST, others)?;
    let mut bad = piece(bench, pair, vendor::PIECE_RIGHTS, |piece| piece.2 = lkey)?;
    bad.work.access = right;
    Ok(bad)
}

/// A receive for a message that goes with a registration.
pub fn inbox(bench: &mut Bench, pair: &Pair) -> Check {
    let inbox = (pair.there.address, 8192, pair.there.lkey);
    bench
        .there
        .post_recv(pair.there.qp.qp, 40, &[inbox])
        .at("ibv_post_recv")
}

/// A bad registration ends the connection: it has its error, what is behind it is flushed, nothing is
/// sent, and its key opens nothing.
fn refuses(bench: &mut Bench, cause: &Cause, with_message: bool) -> Check {
    no_events(bench)?;
    let pair = bench.pair(&options(bench, LISTS))?;
    let mut bad = (cause.1)(bench, &pair)?;
    mark(bench, &pair)?;
    if with_message {
        inbox(bench, &pair)?;
        bad.work.message = Some((vec![(pair.here.address, 100, pair.here.lkey)], 0));
    }
    let receive = (pair.here.address, 64, pair.here.lkey);
    bench
        .here
        .post_recv(pair.here.qp.qp, 42, &[receive])
        .at("ibv_post_recv")?;
    // Whether a completion is asked for or not: there is one.
    bad.work.flags = if with_message { 0 } else { IBV_SEND_SIGNALED };
    bench
        .here
        .post_list(pair.here.qp.qp, bad.list, &bad.work)
        .at("ferritedv_post_register_list")?;
    let mut behind = work(&pair, IBV_WR_RDMA_WRITE, 100);
    behind.wr_id = 41;
    behind.flags = 0;
    bench
        .here
        .post_send(pair.here.qp.qp, &behind)
        .at("ibv_post_send")?;
    bad.fails(bench, &pair, bad.work.wr_id, &[41])?;
    flushes(bench, &pair)?;
    // Of both queues, unlike one that drains.
    let flushed = bench.status(
        End::Here,
        pair.here.recv_cq,
        IBV_WC_WR_FLUSH_ERR,
        "a receive of the queue pair",
    )?;
    expect!(flushed.wr_id, 42, "wr_id of the receive");
    untouched(bench, &pair)?;
    let received = bench
        .there
        .poll(pair.there.recv_cq, Duration::ZERO)
        .at("ibv_poll_cq")?;
    expect!(received, None, "what the peer received");
    let event = bench.here.async_event(Duration::ZERO).at("events")?;
    expect!(event, None, "an event here");
    let result = bench.here.set_state(pair.here.qp.qp, IBV_QPS_RTS);
    must_fail(result, libc::EINVAL, "from ERR to RTS")?;
    // What is registered there stays, the flushed receive is nobody's any more.
    bad.opens_nothing(bench, &pair)
}
