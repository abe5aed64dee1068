// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handlers of low latency (`ferritedv.h`): who may have them, and that they come first.

use std::ptr;
use std::time::{Duration, Instant};

use super::flood::{say, wait_for};
use super::moving::Direct;
use super::objects::{made, well, Rig};
use crate::bench::{At, Bench, End, Message, Pair, PairOptions, PATIENCE};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::Options;

/// `FERRITEDV_BULK` and `FERRITEDV_LOW_LATENCY`.
const BULK: u32 = 0;
const LOW_LATENCY: u32 = 1;
/// `FERRITEDV_LOCAL_VECTOR`.
const LOCAL: u32 = u32::MAX - 1;

/// A user that has no rights.
const NOBODY: libc::uid_t = 65534;

type Modify = unsafe extern "C" fn(*mut ibv_context, u32, u32) -> i32;
type Query = unsafe extern "C" fn(*mut ibv_context, u32, *mut u32) -> i32;

/// The provider's functions.
#[derive(Clone, Copy)]
struct Priorities {
    context: *mut ibv_context,
    modify: Modify,
    query: Query,
}

impl Priorities {
    fn load(rig: &Rig) -> Check<Self> {
        let modify = Direct::symbol(c"ferritedv_modify_vector_priority")?;
        let query = Direct::symbol(c"ferritedv_query_vector_priority")?;
        // SAFETY: symbols of those names are the functions that ferritedv.h declares.
        unsafe {
            Ok(Self {
                context: rig.raw(),
                modify: std::mem::transmute::<*mut libc::c_void, Modify>(modify),
                query: std::mem::transmute::<*mut libc::c_void, Query>(query),
            })
        }
    }

    /// What setting a priority says: 0 or an errno value.
    fn set(&self, vector: u32, priority: u32) -> i32 {
        // SAFETY: the context is open.
        unsafe { (self.modify)(self.context, vector, priority) }
    }

    /// The priority of a vector, or an errno value.
    fn get(&self, vector: u32) -> Result<u32, i32> {
        let mut priority = u32::MAX;
        // SAFETY: the context is open, and there is a place for the number.
        match unsafe { (self.query)(self.context, vector, &mut priority) } {
            0 => Ok(priority),
            errno => Err(errno),
        }
    }
}

/// Makes all of the process one of a user without rights until it is dropped.
struct AsNobody;

impl AsNobody {
    fn new() -> Check<Self> {
        // SAFETY: it only changes the credentials of this process.
        match unsafe { libc::seteuid(NOBODY) } {
            0 => Ok(Self),
            _ => Err(Outcome::Skipped(
                "only root can become somebody else".into(),
            )),
        }
    }
}

impl Drop for AsNobody {
    fn drop(&mut self) {
        // SAFETY: it only changes the credentials of this process.
        unsafe { libc::seteuid(0) };
    }
}

pub fn run(options: &Options, report: &mut Report) {
    let result = Rig::new(options).and_then(|rig| {
        let priorities = Priorities::load(&rig)?;
        let checked = rights(&rig, priorities);
        for vector in 0..rig.context.comp_vectors() {
            priorities.set(vector, BULK);
        }
        checked
    });
    report.enter(
        "priority: it is set and used by who may, and by nobody else",
        result,
    );
}

/// A completion queue that was made for a vector.
fn queue(rig: &Rig, vector: u32) -> Check<*mut ibv_cq> {
    let none = ptr::null_mut();
    // SAFETY: the context is open; there is no channel.
    let cq = unsafe { ibv_create_cq(rig.raw(), 16, none, ptr::null_mut(), vector as i32) };
    made(cq, "ibv_create_cq")
}

/// Waits until a queue is at a vector for which `is_wanted`: the driver moves it when a priority has changed.
fn settles(direct: Direct, cq: *mut ibv_cq, what: &str, is_wanted: impl Fn(u32) -> bool) -> Check {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let vector = direct.query(cq)?;
        if is_wanted(vector) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("{what}: it stays at vector {vector}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn rights(rig: &Rig, priorities: Priorities) -> Check {
    let direct = Direct::load()?;
    let vectors = rig.context.comp_vectors();
    for vector in 0..vectors {
        expect!(priorities.get(vector), Ok(BULK), "vector {vector} at first");
    }
    for wrong in [vectors, vectors + 1, 1 << 16, LOCAL, u32::MAX] {
        expect!(
            priorities.set(wrong, LOW_LATENCY),
            libc::EINVAL,
            "vector {wrong}"
        );
        expect!(priorities.get(wrong), Err(libc::EINVAL), "vector {wrong}");
    }
    for wrong in [2, 255, 256, 257, u32::MAX] {
        expect!(priorities.set(0, wrong), libc::EINVAL, "priority {wrong}");
    }
    // Not vector 0 where there are others, which is no wish.
    let marked = vectors - 1;
    let before = queue(rig, marked)?;
    well(direct.modify(before, marked), "moving there")?;
    let alone = vectors == 1;
    let anybodys = {
        let _nobody = AsNobody::new()?;
        expect!(
            priorities.set(marked, LOW_LATENCY),
            libc::EPERM,
            "anybody marks"
        );
        expect!(priorities.get(marked), Ok(BULK), "after that");
        let made = queue(rig, marked)?;
        let moved = queue(rig, 0)?;
        well(direct.modify(moved, marked), "anybody moves to a bulk one")?;
        [made, moved]
    };
    well(priorities.set(marked, LOW_LATENCY), "marking a vector")?;
    well(priorities.set(marked, LOW_LATENCY), "marking it again")?;
    expect!(
        priorities.get(marked),
        Ok(LOW_LATENCY),
        "the one that is marked"
    );
    // Who was there before has it no more than others, where all are not alike.
    for cq in anybodys {
        settles(direct, cq, "anybody's queue that was there", |vector| {
            (vector == marked) == alone
        })?;
    }
    expect!(
        direct.query(before)?,
        marked,
        "the vector of root's queue that was there"
    );
    // Who may have it, has it.
    let own = queue(rig, marked)?;
    expect!(direct.query(own)?, marked, "the vector of root's queue");
    {
        let _nobody = AsNobody::new()?;
        expect!(priorities.set(marked, BULK), libc::EPERM, "anybody unmarks");
        expect!(priorities.get(marked), Ok(LOW_LATENCY), "anybody asks");
        let other = queue(rig, marked)?;
        if alone {
            // All are alike.
            expect!(direct.query(other)?, 0, "the only vector");
            well(direct.modify(other, 0), "moving to the only vector")?;
        } else {
            expect!(direct.query(other)?, 0, "the vector of anybody's queue");
            expect!(
                direct.modify(other, marked),
                libc::EPERM,
                "anybody moves there"
            );
            expect!(direct.query(other)?, 0, "the vector after that");
        }
    }
    well(priorities.set(marked, BULK), "unmarking it")?;
    let pinned = Pinned::new()?;
    let checked = local_rights(rig, priorities, direct);
    drop(pinned);
    checked?;
    let _nobody = AsNobody::new()?;
    well(direct.modify(before, 0), "moving to a bulk one")?;
    well(direct.modify(before, marked), "moving to another one")
}

/// The same for queues that are to be where the process is, which does not move.
fn local_rights(rig: &Rig, priorities: Priorities, direct: Direct) -> Check {
    let alone = rig.context.comp_vectors() == 1;
    let first = queue(rig, 0)?;
    let local = direct.query(first)?;
    well(priorities.set(local, LOW_LATENCY), "marking the local one")?;
    settles(direct, first, "a queue that was local", |vector| {
        (vector == local) == alone
    })?;
    // Who names none does not get it, whoever he is.
    for anybody in [false, true] {
        let _nobody = anybody.then(AsNobody::new).transpose()?;
        let other = queue(rig, 0)?;
        let found = direct.query(other)?;
        expect!(
            found == local,
            alone,
            "a new local queue at {found}, marked is {local} (anybody: {anybody})"
        );
        well(direct.modify(other, LOCAL), "moving to a local one")?;
        let found = direct.query(other)?;
        expect!(
            found == local,
            alone,
            "a local queue at {found}, marked is {local} (anybody: {anybody})"
        );
    }
    // By its number root does.
    well(direct.modify(first, local), "moving to the marked one")?;
    expect!(direct.query(first)?, local, "the vector it was moved to");
    let follows = queue(rig, 0)?;
    well(priorities.set(local, BULK), "unmarking the local one")?;
    settles(
        direct,
        follows,
        "a local queue when all are bulk",
        |vector| vector == local,
    )?;
    let _nobody = AsNobody::new()?;
    expect!(
        direct.query(queue(rig, 0)?)?,
        local,
        "the local vector when it is a bulk one"
    );
    Ok(())
}

/// Keeps this thread on the processor that it is on until it is dropped.
struct Pinned(libc::cpu_set_t);

impl Pinned {
    fn new() -> Check<Self> {
        // SAFETY: the sets are as large as is said, of plain bits; the processor is one that there is.
        unsafe {
            let size = size_of::<libc::cpu_set_t>();
            let mut before: libc::cpu_set_t = std::mem::zeroed();
            well(libc::sched_getaffinity(0, size, &mut before), "affinity")?;
            let mut here: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(libc::sched_getcpu() as usize, &mut here);
            well(libc::sched_setaffinity(0, size, &here), "staying here")?;
            Ok(Self(before))
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the set is as large as is said.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &self.0) };
    }
}

/// Events of bulk queues at a time: more than the driver handles in a turn while another one waits.
const CROWD: usize = 64;

/// A round for each of the files `go`-1 to `go`-`rounds`: says when it is about to post, waits for the file, and says when
/// the other end's device has done everything. Then it tells how many events of bulk queues were
/// handled before that of a queue of another vector, whose completion came last: all of them share a
/// channel, which keeps the order of the interrupts.
pub fn turns(bench: &mut Bench, report: &mut Report, go: &str, rounds: u32, vectors: (u32, u32)) {
    let result = crowd(bench, vectors).and_then(|(pairs, channel)| {
        for round in 1..=rounds {
            let before = turn(bench, &pairs, channel, &format!("{go}-{round}"))?;
            say(&format!("round {round}: after {before} bulk events"))?;
        }
        Ok(())
    });
    bench.conclude(report, "turns: each event comes once", result);
}

/// Pairs whose other ends have their completion queues at the first of two vectors, but the last, which
/// has it at the second; and their channel.
fn crowd(bench: &mut Bench, vectors: (u32, u32)) -> Check<(Vec<Pair>, u64)> {
    if bench.hello_there.vectors <= vectors.0.max(vectors.1) {
        return Err(Outcome::Skipped("there are fewer vectors".into()));
    }
    let channel = bench.there.channel().at("ibv_create_comp_channel")?;
    let mut pairs = Vec::new();
    for number in 0..=CROWD {
        let here = PairOptions {
            size: 16 << 10,
            ..Default::default()
        };
        let there = PairOptions {
            channel: Some(channel),
            vector: if number < CROWD { vectors.0 } else { vectors.1 },
            ..here
        };
        let pair = Pair {
            here: bench.end(End::Here, &here)?,
            there: bench.end(End::There, &there)?,
        };
        bench.connect(&pair, &here)?;
        pairs.push(pair);
    }
    Ok((pairs, channel))
}

/// One event of each: how many came before the last pair's.
fn turn(bench: &mut Bench, pairs: &[Pair], channel: u64, go: &str) -> Check<usize> {
    let message = Message::simple(IBV_WR_SEND, 300);
    let mut seeds = Vec::new();
    for pair in pairs {
        bench.there.arm(pair.there.recv_cq, false).at("arm")?;
        seeds.push(bench.prepare(pair, &message)?);
    }
    wait_for(go)?;
    for (pair, seed) in pairs.iter().zip(&seeds) {
        bench.post(pair, &message, *seed)?;
        bench.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "the send")?;
    }
    say(&format!("done with {go}"))?;
    let mut order = Vec::new();
    for _ in pairs {
        match bench.there.channel_event(channel, PATIENCE).at("channel")? {
            Some(cq) => order.push(cq),
            None => return Err(format!("only {} events", order.len()).into()),
        }
    }
    for pair in pairs {
        let cq = pair.there.recv_cq;
        let times = order.iter().filter(|other| **other == cq).count();
        expect!(times, 1, "events of queue {cq}");
        bench.status(End::There, cq, IBV_WC_SUCCESS, "the receive")?;
    }
    let last = pairs[CROWD].there.recv_cq;
    order
        .iter()
        .position(|cq| *cq == last)
        .ok_or_else(|| "no event of the last".into())
}
