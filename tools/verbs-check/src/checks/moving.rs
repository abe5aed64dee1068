// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A completion queue that is moved from handler to handler, and to none, while it is in use
//! (`ferritedv.h`). Both ends of each connection are in this process.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::objects::{errno, made, well, work, Made, Pair, Rig};
use super::threads::{in_time, post, Raw};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Errno, Options};

/// `FERRITEDV_NO_VECTOR` and `FERRITEDV_LOCAL_VECTOR`.
const NONE: u32 = u32::MAX;
const LOCAL: u32 = u32::MAX - 1;

/// An event that takes longer than this is late: everything else takes milliseconds, or some seconds where the machine
/// has other things to do.
const LATE: Duration = Duration::from_secs(30);
/// Long enough for an event that nobody asked for.
const SHORT: Duration = Duration::from_millis(200);

type Move = unsafe extern "C" fn(*mut ibv_cq, u32) -> i32;
type Query = unsafe extern "C" fn(*mut ibv_cq, *mut u32) -> i32;

/// The provider's functions.
#[derive(Clone, Copy)]
pub(super) struct Direct {
    modify: Move,
    query: Query,
}

impl Direct {
    /// Finds a function in the library that libibverbs has loaded already.
    pub(super) fn symbol(name: &CStr) -> Check<*mut libc::c_void> {
        match crate::direct::symbol(name) {
            None => Err(Outcome::Skipped("there is no libferrite.so.1".into())),
            Some(symbol) if symbol.is_null() => {
                Err("libferrite.so.1 has not the functions of ferritedv.h".into())
            }
            Some(symbol) => Ok(symbol),
        }
    }

    /// Finds the functions.
    pub(super) fn load() -> Check<Self> {
        let modify = Self::symbol(c"ferritedv_modify_cq_vector")?;
        let query = Self::symbol(c"ferritedv_query_cq_vector")?;
        // SAFETY: symbols of those names are the functions that ferritedv.h declares.
        unsafe {
            Ok(Self {
                modify: std::mem::transmute::<*mut libc::c_void, Move>(modify),
                query: std::mem::transmute::<*mut libc::c_void, Query>(query),
            })
        }
    }

    /// What a move says: 0 or an errno value.
    pub(super) fn modify(&self, cq: *mut ibv_cq, vector: u32) -> i32 {
        // SAFETY: the queue lives.
        unsafe { (self.modify)(cq, vector) }
    }

    /// The vector of a queue.
    pub(super) fn query(&self, cq: *mut ibv_cq) -> Check<u32> {
        let mut vector = 0;
        // SAFETY: the queue lives, and there is a place for the number.
        let errno = unsafe { (self.query)(cq, &mut vector) };
        well(errno, "ferritedv_query_cq_vector")?;
        Ok(vector)
    }
}

type Body = fn(&Rig, Direct, &Options) -> Check;

const CHECKS: &[(&str, Body)] = &[
    ("to every vector, to none and back; nowhere else", places),
    ("the local vector is one that there is", local),
    (
        "an arming without a handler fires when there is one again",
        kept,
    ),
    ("moderation stays", moderated),
    (
        "post, poll, arm and sleep while the queue moves at random",
        under_load,
    ),
    (
        "a queue is destroyed while others try to move it",
        destroyed,
    ),
    ("nobody moves the queue of another", foreign),
];

pub fn run(options: &Options, report: &mut Report, moves: u32) {
    MOVES.store(moves.into(), Ordering::Relaxed);
    for (name, body) in CHECKS {
        let result = Rig::new(options).and_then(|rig| body(&rig, Direct::load()?, options));
        report.enter(&format!("move: {name}"), result);
    }
}

/// How many moves the check under load makes.
static MOVES: AtomicU64 = AtomicU64::new(0);

/// A pair whose completion queue has a channel.
fn pair(rig: &Rig) -> Check<(Pair, *mut ibv_comp_channel)> {
    // SAFETY: the context is open.
    let channel = unsafe { ibv_create_comp_channel(rig.raw()) };
    let channel = made(channel, "ibv_create_comp_channel")?;
    // SAFETY: the context is open, and the channel lives.
    let cq = unsafe { ibv_create_cq(rig.raw(), 512, ptr::null_mut(), channel, 0) };
    let pair = rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq: made(cq, "ibv_create_cq")?,
        operations: 0,
    })?;
    Ok((pair, channel))
}

fn arm(context: *mut ibv_context, cq: *mut ibv_cq) -> i32 {
    // SAFETY: the queue lives.
    unsafe {
        match (*context).ops.req_notify_cq {
            Some(arm) => arm(cq, 0),
            None => libc::ENOSYS,
        }
    }
}

fn moderate(context: *mut ibv_context, cq: *mut ibv_cq, count: u16, microseconds: u16) -> i32 {
    let mut attributes = ibv_modify_cq_attr {
        attr_mask: IBV_CQ_ATTR_MODERATE,
        moderate: ibv_moderate_cq {
            cq_count: count,
            cq_period: microseconds,
        },
    };
    // SAFETY: the context is open, and every one of this libibverbs is the last field of a
    // `verbs_context`; the queue lives.
    unsafe {
        let extended = context.byte_sub(std::mem::offset_of!(verbs_context, context));
        match (*extended.cast::<verbs_context>()).modify_cq {
            Some(modify) => modify(cq, &mut attributes),
            None => libc::ENOSYS,
        }
    }
}

/// Takes and acknowledges an event, if one comes in time.
fn event(channel: *mut ibv_comp_channel, patience: Duration) -> Result<bool, i32> {
    // SAFETY: the channel lives.
    let fd = unsafe { (*channel).fd };
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one `pollfd` is passed.
    match unsafe { libc::poll(&mut poll, 1, patience.as_millis() as i32) } {
        -1 => return Err(errno()),
        0 => return Ok(false),
        _ => {}
    }
    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the channel lives, and an event that was got is acknowledged once.
    unsafe {
        if ibv_get_cq_event(channel, &mut cq, &mut context) != 0 {
            return Err(errno());
        }
        ibv_ack_cq_events(cq, 1);
    }
    Ok(true)
}

fn comes(channel: *mut ibv_comp_channel, patience: Duration) -> Check<bool> {
    event(channel, patience).map_err(|errno| format!("event: {}", Errno(errno)).into())
}

/// Takes completions: their numbers; a failed one is an error.
fn take(context: *mut ibv_context, cq: *mut ibv_cq) -> Result<Vec<u64>, String> {
    // SAFETY: zero is a valid value of all fields; the queue lives, and there is room for that many.
    let (wc, count) = unsafe {
        let mut wc: [ibv_wc; 8] = std::mem::zeroed();
        let count = match (*context).ops.poll_cq {
            Some(poll) => poll(cq, 8, wc.as_mut_ptr()),
            None => -1,
        };
        (wc, count)
    };
    let count = usize::try_from(count).map_err(|_| "ibv_poll_cq fails".to_owned())?;
    wc[..count]
        .iter()
        .map(|wc| match wc.status {
            IBV_WC_SUCCESS => Ok(wc.wr_id),
            status => Err(format!("{:#x}: status {status}", wc.wr_id)),
        })
        .collect()
}

/// Writes a few bytes from one end to the other; the completion has number `id`.
fn write(rig: &Rig, pair: &Pair, id: u64) -> Check {
    let mut wr = work(IBV_WR_RDMA_WRITE);
    wr.wr_id = id;
    let from = rig.buffer.address();
    wr.wr.rdma.remote_addr = from + 32768;
    wr.wr.rdma.rkey = rig.rkey();
    rig.send(pair.a, wr, (from, 64, rig.lkey()))
}

/// Waits for completion `id` and nothing else.
fn completes(rig: &Rig, pair: &Pair, id: u64) -> Check {
    let deadline = Instant::now() + LATE;
    while Instant::now() < deadline {
        let taken = take(rig.raw(), pair.cq)?;
        if !taken.is_empty() {
            expect!(taken, [id], "completions");
            return Ok(());
        }
        std::thread::yield_now();
    }
    Err(format!("completion {id} does not come").into())
}

fn places(rig: &Rig, direct: Direct, _options: &Options) -> Check {
    let (pair, channel) = pair(rig)?;
    let vectors = rig.context.comp_vectors();
    // It was made with vector zero, which is no wish.
    let made = direct.query(pair.cq)?;
    expect!(made < vectors, true, "vector {made} of a new queue");
    let (mut id, mut before) = (0, 0);
    for vector in (0..vectors).chain([NONE]).chain((0..vectors).rev()) {
        well(direct.modify(pair.cq, vector), "moving it")?;
        if before == NONE {
            expect!(comes(channel, LATE)?, true, "the event that had to wait");
        }
        before = vector;
        expect!(direct.query(pair.cq)?, vector, "the vector it was moved to");
        for wrong in [vectors, vectors + 1, 1 << 16, LOCAL - 1] {
            expect!(
                direct.modify(pair.cq, wrong),
                libc::EINVAL,
                "vector {wrong}"
            );
        }
        expect!(direct.query(pair.cq)?, vector, "the vector after a refusal");
        well(arm(rig.raw(), pair.cq), "arming it")?;
        write(rig, &pair, id)?;
        let wanted = vector != NONE;
        let patience = if wanted { LATE } else { SHORT };
        expect!(comes(channel, patience)?, wanted, "an event at {vector}");
        completes(rig, &pair, id)?;
        id += 1;
    }
    Ok(())
}

fn local(rig: &Rig, direct: Direct, _options: &Options) -> Check {
    let (pair, channel) = pair(rig)?;
    well(direct.modify(pair.cq, LOCAL), "moving it")?;
    let vector = direct.query(pair.cq)?;
    if vector >= rig.context.comp_vectors() {
        return Err(format!("it is at vector {vector}").into());
    }
    well(arm(rig.raw(), pair.cq), "arming it")?;
    write(rig, &pair, 1)?;
    expect!(comes(channel, LATE)?, true, "an event");
    completes(rig, &pair, 1)
}

fn kept(rig: &Rig, direct: Direct, _options: &Options) -> Check {
    let (pair, channel) = pair(rig)?;
    let mut id = 0;
    for vector in 0..rig.context.comp_vectors() {
        // The completion comes before there is a handler again, or after.
        for before in [true, false] {
            well(direct.modify(pair.cq, NONE), "moving it away")?;
            well(arm(rig.raw(), pair.cq), "arming it")?;
            if before {
                write(rig, &pair, id)?;
                completes(rig, &pair, id)?;
                expect!(comes(channel, SHORT)?, false, "an event without a handler");
                id += 1;
            }
            well(direct.modify(pair.cq, vector), "moving it back")?;
            if !before {
                expect!(comes(channel, SHORT)?, false, "an event of nothing");
                write(rig, &pair, id)?;
                completes(rig, &pair, id)?;
                id += 1;
            }
            expect!(comes(channel, LATE)?, true, "the event of the arming");
            expect!(comes(channel, SHORT)?, false, "another event");
        }
    }
    Ok(())
}

/// What holds events back does so wherever the queue is.
fn moderated(rig: &Rig, direct: Direct, _options: &Options) -> Check {
    const PERIOD: Duration = Duration::from_millis(65);
    let (pair, channel) = pair(rig)?;
    let errno = moderate(rig.raw(), pair.cq, 3, PERIOD.as_micros() as u16);
    well(errno, "ibv_modify_cq")?;
    for (id, vector) in (0..rig.context.comp_vectors()).rev().enumerate() {
        // By way of none, and directly.
        if id % 2 == 0 {
            well(direct.modify(pair.cq, NONE), "moving it away")?;
        }
        well(direct.modify(pair.cq, vector), "moving it")?;
        well(arm(rig.raw(), pair.cq), "arming it")?;
        let start = Instant::now();
        write(rig, &pair, id as u64)?;
        expect!(comes(channel, LATE)?, true, "an event at {vector}");
        let time = start.elapsed();
        if time < PERIOD {
            return Err(format!("one of 3 completions raised an event in {time:?}").into());
        }
        completes(rig, &pair, id as u64)?;
    }
    Ok(())
}

/// Two threads write from both ends, one sleeps until an event comes, takes the completions and arms
/// again, one moves the queue to any vector or to none, one changes its size and moderation. Each
/// completion comes once, so does the event of each arming, and within [`LATE`].
fn under_load(rig: &Rig, direct: Direct, _options: &Options) -> Check {
    let moves = MOVES.load(Ordering::Relaxed);
    let (pair, channel) = pair(rig)?;
    let vectors = rig.context.comp_vectors();
    let (context, channel) = (Raw(rig.raw()), Raw(channel));
    let (ends, cq) = ([Raw(pair.a), Raw(pair.b)], Raw(pair.cq));
    let (lkey, rkey, from) = (rig.lkey(), rig.rkey(), rig.buffer.address());
    in_time("moving under load", move || -> Result<(), String> {
        let (context, channel, ends, cq) = (context, channel, ends, cq);
        let (moved, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let posted = [AtomicU64::new(0), AtomicU64::new(0)];
        let (taken, posters) = (AtomicU64::new(0), AtomicU64::new(2));
        let (moved, failed, posted, taken) = (&moved, &failed, &posted, &taken);
        let posters = &posters;
        let fail = |what: String| {
            failed.store(true, Ordering::Release);
            Err::<(), String>(what)
        };
        let fail = &fail;
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (end, qp) in ends.into_iter().enumerate() {
                threads.push(scope.spawn(move || {
                    let (context, qp) = (context, qp);
                    let mut sge = ibv_sge {
                        addr: from,
                        length: 64,
                        lkey,
                    };
                    let mut wr = work(IBV_WR_RDMA_WRITE);
                    wr.sg_list = &mut sge;
                    wr.num_sge = 1;
                    wr.wr.rdma.remote_addr = from + 32768;
                    wr.wr.rdma.rkey = rkey;
                    let mut next = 0;
                    while !moved.load(Ordering::Acquire) && !failed.load(Ordering::Acquire) {
                        wr.wr_id = ((end as u64) << 32) | next;
                        match post(context.get(), qp.get(), &mut wr) {
                            0 => {
                                next += 1;
                                posted[end].store(next, Ordering::Release);
                            }
                            libc::ENOMEM => std::thread::yield_now(),
                            errno => return fail(format!("ibv_post_send: {}", Errno(errno))),
                        }
                    }
                    posters.fetch_sub(1, Ordering::AcqRel);
                    Ok(())
                }));
            }
            threads.push(scope.spawn(move || {
                let (context, channel, cq) = (context, channel, cq);
                // The completions of a queue pair come in its order: the number that is next.
                let mut next = [0u64; 2];
                let (mut armings, mut events, mut longest) = (0u64, 0u64, Duration::ZERO);
                loop {
                    armings += 1;
                    let result = arm(context.get(), cq.get());
                    if result != 0 {
                        return fail(format!("ibv_req_notify_cq: {}", Errno(result)));
                    }
                    // What came before the arming raises no event.
                    loop {
                        let ids = match take(context.get(), cq.get()) {
                            Ok(ids) if ids.is_empty() => break,
                            Ok(ids) => ids,
                            Err(why) => return fail(why),
                        };
                        for id in ids {
                            let end = (id >> 32) as usize;
                            if id as u32 as u64 != next[end] {
                                return fail(format!("{id:#x} where {} is next", next[end]));
                            }
                            next[end] += 1;
                            taken.fetch_add(1, Ordering::AcqRel);
                        }
                    }
                    let done = || {
                        posters.load(Ordering::Acquire) == 0
                            && (0..2).all(|end| next[end] == posted[end].load(Ordering::Acquire))
                    };
                    let asleep = Instant::now();
                    loop {
                        if failed.load(Ordering::Acquire) {
                            return Ok(());
                        }
                        let over = done();
                        match event(channel.get(), SHORT) {
                            Ok(true) => {
                                events += 1;
                                if events > armings {
                                    return fail(format!("{events} events of {armings} armings"));
                                }
                                longest = longest.max(asleep.elapsed());
                                // At the end, what was not asked for is waited for.
                                if !over {
                                    break;
                                }
                            }
                            Ok(false) if over => {
                                println!("# {events} events, the latest after {longest:?}");
                                return Ok(());
                            }
                            Ok(false) if asleep.elapsed() < LATE => {}
                            Ok(false) => {
                                let left = take(context.get(), cq.get());
                                return fail(format!(
                                    "no event for {LATE:?} after {next:?}; there are {left:?}"
                                ));
                            }
                            Err(errno) => return fail(format!("event: {}", Errno(errno))),
                        }
                    }
                }
            }));
            threads.push(scope.spawn(move || {
                let (context, cq) = (context, cq);
                let mut turn = 0u16;
                while !moved.load(Ordering::Acquire) && !failed.load(Ordering::Acquire) {
                    turn = turn.wrapping_add(1);
                    let resize = |entries| {
                        // SAFETY: the queue lives.
                        unsafe { ibv_resize_cq(cq.get(), entries) }
                    };
                    let errno = match turn % 4 {
                        0 => resize(512),
                        2 => resize(1024),
                        odd => moderate(context.get(), cq.get(), odd, 20 * odd),
                    };
                    if errno != 0 {
                        return fail(format!("change {turn}: {}", Errno(errno)));
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            }));
            threads.push(scope.spawn(move || {
                let cq = cq;
                let mut random = 0x9e37_79b9_7f4a_7c15u64;
                for _ in 0..moves {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let choice = (random >> 32) as u32 % (vectors + 1);
                    let vector = if choice == vectors { NONE } else { choice };
                    let before = taken.load(Ordering::Acquire);
                    let errno = direct.modify(cq.get(), vector);
                    if errno != 0 {
                        return fail(format!("vector {vector}: {}", Errno(errno)));
                    }
                    if failed.load(Ordering::Acquire) {
                        break;
                    }
                    // At a handler, until it has served something: else only moves would be seen.
                    let started = Instant::now();
                    while vector != NONE
                        && random & 7 == 0
                        && taken.load(Ordering::Acquire) == before
                        && !failed.load(Ordering::Acquire)
                    {
                        if started.elapsed() > LATE {
                            return fail(format!("nothing is served at {vector}"));
                        }
                        std::thread::yield_now();
                    }
                }
                // The last word: a handler, so that everybody is woken.
                let errno = direct.modify(cq.get(), 0);
                moved.store(true, Ordering::Release);
                if errno != 0 {
                    return fail(format!("vector 0: {}", Errno(errno)));
                }
                Ok(())
            }));
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| "a thread panics".to_owned())?)
                .collect::<Result<Vec<()>, String>>()
        })?;
        let posted: u64 = posted.iter().map(|n| n.load(Ordering::Acquire)).sum();
        let taken = taken.load(Ordering::Acquire);
        if taken != posted || taken < moves / 32 {
            return Err(format!(
                "{taken} completions of {posted}, with {moves} moves"
            ));
        }
        println!("# {moves} moves, {taken} completions");
        Ok(())
    })??;
    Ok(())
}

/// Threads move a queue all the time while it is made and destroyed: no call hurts, and no destroy
/// fails for long.
fn destroyed(rig: &Rig, _direct: Direct, _options: &Options) -> Check {
    let context = Raw(rig.raw());
    in_time("destroying", move || -> Result<(), String> {
        let context = context;
        for _ in 0..20 {
            // SAFETY: the context is open.
            let cq =
                unsafe { ibv_create_cq(context.get(), 16, ptr::null_mut(), ptr::null_mut(), 0) };
            if cq.is_null() {
                return Err(format!("ibv_create_cq: {}", Errno(errno())));
            }
            let cq = Raw(cq);
            // SAFETY: the queue lives.
            let (cmd_fd, handle) = unsafe { ((*context.get()).cmd_fd, (*cq.get()).handle) };
            let over = AtomicBool::new(false);
            let over = &over;
            std::thread::scope(|scope| -> Result<(), String> {
                let mover = scope.spawn(move || {
                    // By its handle alone: the structure goes.
                    while !over.load(Ordering::Acquire) {
                        let errno = move_by_handle(cmd_fd, handle, NONE);
                        if ![0, libc::ENOENT, libc::EBUSY].contains(&errno) {
                            return Err(format!("moving it: {}", Errno(errno)));
                        }
                    }
                    Ok(())
                });
                std::thread::sleep(Duration::from_millis(2));
                let deadline = Instant::now() + LATE;
                let destroyed = loop {
                    // SAFETY: the queue lives, and only its handle is used elsewhere.
                    match unsafe { ibv_destroy_cq(cq.get()) } {
                        0 => break Ok(()),
                        libc::EBUSY if Instant::now() < deadline => {}
                        errno => break Err(format!("ibv_destroy_cq: {}", Errno(errno))),
                    }
                };
                over.store(true, Ordering::Release);
                mover.join().map_err(|_| "a thread panics".to_owned())??;
                destroyed
            })?;
            expect_gone(cmd_fd, handle)?;
        }
        Ok(())
    })??;
    Ok(())
}

fn foreign(rig: &Rig, direct: Direct, options: &Options) -> Check {
    // So many that the last has a number that means nothing elsewhere.
    let mut cq = rig.cq(16)?;
    for _ in 0..16 {
        cq = rig.cq(16)?;
    }
    // SAFETY: the queue lives.
    let handle = unsafe { (*cq).handle };
    // SAFETY: the context is open.
    let own = unsafe { (*rig.raw()).cmd_fd };
    for vector in [NONE, 0] {
        expect!(move_by_handle(own, handle, vector), 0, "the queue's own");
        expect!(direct.query(cq)?, vector, "the vector of the queue");
    }
    let other = Rig::new(options)?;
    // SAFETY: the context is open.
    let fd = unsafe { (*other.raw()).cmd_fd };
    expect!(
        move_by_handle(fd, handle, NONE),
        libc::ENOENT,
        "a handle of another context"
    );
    // An object of its own that is no completion queue.
    // SAFETY: the domain lives.
    let domain = unsafe { (*other.pd).handle };
    let errno = move_by_handle(fd, domain, NONE);
    if ![libc::EINVAL, libc::ENOENT].contains(&errno) {
        return Err(format!("a domain is moved: {}", Errno(errno)).into());
    }
    expect!(direct.query(cq)?, 0, "the vector of the other's queue");
    Ok(())
}

fn expect_gone(fd: i32, handle: u32) -> Result<(), String> {
    match move_by_handle(fd, handle, 0) {
        libc::ENOENT => Ok(()),
        errno => Err(format!("a queue that is gone: {}", Errno(errno))),
    }
}

/// The method of the kernel, without the provider: 0 or an errno value.
fn move_by_handle(fd: i32, handle: u32, vector: u32) -> i32 {
    // The header of `struct ib_uverbs_ioctl_hdr` with two attributes: object CQ, the driver's first
    // method, its first attribute a handle and its second a number.
    #[repr(C)]
    struct Attr {
        id: u16,
        length: u16,
        flags: u16,
        reserved: u16,
        data: u64,
    }
    #[repr(C)]
    struct Command {
        length: u16,
        object: u16,
        method: u16,
        count: u16,
        reserved1: u64,
        driver: u32,
        reserved2: u32,
        attrs: [Attr; 2],
    }
    const FIRST: u16 = 1 << 12;
    const MANDATORY: u16 = 1;
    const CQ: u16 = 3;
    const HEADER: libc::c_ulong = 24;
    const IOCTL: libc::c_ulong = (3 << 30) | (HEADER << 16) | (0x1b << 8) | 1;
    let attr = |id, length, data| Attr {
        id,
        length,
        flags: MANDATORY,
        reserved: 0,
        data,
    };
    let mut command = Command {
        length: size_of::<Command>() as u16,
        object: CQ,
        method: FIRST,
        count: 2,
        reserved1: 0,
        driver: 0,
        reserved2: 0,
        attrs: [
            attr(FIRST, 0, handle.into()),
            attr(FIRST + 1, 4, vector.into()),
        ],
    };
    // SAFETY: the command is laid out as the kernel expects, and points nowhere.
    match unsafe { libc::ioctl(fd, IOCTL, &mut command) } {
        0 => 0,
        _ => errno(),
    }
}
