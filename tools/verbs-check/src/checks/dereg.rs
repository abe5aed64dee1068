// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When `ibv_dereg_mr` has returned, nobody but its owner uses the memory: whatever was under way then,
//! and however many regions and windows end at once. Both ends of each connection are in this process.

use std::collections::HashSet;
use std::ptr;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::objects::{bind1_to, close_window, made, well, window, work};
use super::objects::{Made, Pair, Rig, LENGTH, PATIENCE, RIGHTS};
use super::threads::{post, Raw};
use crate::bench::{status_name, At};
use crate::expect;
use crate::pattern;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::{pinned, Buffer, BufferKind, Change, Errno, Options};

type Body = fn(&Rig) -> Check;

const CHECKS: &[(&str, Body)] = &[
    (
        "memory is its owner's alone when its region or window has ended under a stream",
        streams,
    ),
    (
        "a key that one of many threads has just released is refused",
        released_keys,
    ),
    ("hundreds of regions end in any order", regions),
    ("hundreds of windows end in any order", windows),
];

pub fn run(options: &Options, report: &mut Report) {
    for (name, body) in CHECKS {
        let result = Rig::new(options).and_then(|rig| body(&rig));
        report.enter(&format!("dereg: {name}"), result);
    }
}

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as usize % end
    }

    fn shuffle<T>(&mut self, things: &mut [T]) {
        for at in (1..things.len()).rev() {
            things.swap(at, self.below(at + 1));
        }
    }
}

fn connected(rig: &Rig, cq: *mut ibv_cq) -> Check<Pair> {
    rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq,
        operations: 0,
    })
}

fn destroy(pair: &Pair) -> Check {
    for qp in [pair.a, pair.b] {
        // SAFETY: the queue pair lives and is not used afterwards.
        well(unsafe { ibv_destroy_qp(qp) }, "ibv_destroy_qp")?;
    }
    Ok(())
}

/// All rights, but no windows: what may have some ends another way, since they could be in its way.
const PLAIN: u32 = RIGHTS & !IBV_ACCESS_MW_BIND;

fn register(rig: &Rig, address: u64, length: usize, access: u32) -> Check<*mut ibv_mr> {
    // SAFETY: the domain lives, and the caller's memory longer than the region.
    let mr = unsafe { ibv_reg_mr(rig.pd, address as *mut _, length, access as i32) };
    made(mr, "ibv_reg_mr")
}

fn deregister(mr: *mut ibv_mr) -> Check {
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")
}

/// A few bytes that are written with this key, over a queue pair of their own, are refused.
fn is_refused(rig: &Rig, cq: *mut ibv_cq, address: u64, rkey: u32, what: &str) -> Check {
    let pair = connected(rig, cq)?;
    rig.write_to(pair.a, FEW, address, rkey)?;
    rig.ends(cq, IBV_WC_REM_ACCESS_ERR, what)?;
    destroy(&pair)
}

/// Bytes of a message.
const PIECE: usize = 16 << 10;
/// Bytes of one that only asks whether it may.
const FEW: u32 = 64;
/// Messages under way.
const DEPTH: u32 = 96;
const ROUNDS: u64 = 200;
/// After that there are no more rounds of a kind that had its turn with both ends of its memory, and something under
/// way in one.
const ENOUGH: Duration = Duration::from_secs(10);
/// Where in the rig's buffer comes what is read from the memory; messages are sent from its start.
const SINK: usize = 32768;

/// What is in the memory until a message comes.
const BEFORE: u8 = 0x11;
/// What messages bring.
const BROUGHT: u8 = 0x22;
/// What is in the sink until a message comes.
const EMPTY: u8 = 0x33;

/// What is done with the memory while its owner takes it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A peer writes.
    Writes,
    /// The same, where the region could have had windows.
    WindowsPossible,
    /// A peer writes and sends, and the memory is where that is received.
    Receives,
    /// A peer writes and reads.
    Reads,
    /// It is sent from here.
    Sources,
    /// A peer writes into a window, which ends instead of its region.
    Window,
}

const KINDS: [Kind; 6] = [
    Kind::Writes,
    Kind::WindowsPossible,
    Kind::Receives,
    Kind::Reads,
    Kind::Sources,
    Kind::Window,
];

impl Kind {
    fn access(self) -> u32 {
        match self {
            Kind::WindowsPossible | Kind::Window => RIGHTS,
            _ => PLAIN,
        }
    }

    /// Whether the first message that is refused may have this status.
    fn fails_with(self, status: u32) -> bool {
        match self {
            Kind::Writes | Kind::WindowsPossible | Kind::Reads | Kind::Window => {
                status == IBV_WC_REM_ACCESS_ERR
            }
            // It depends on what it was: the peer of a receive that fails has not done wrong.
            Kind::Receives => matches!(status, IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR),
            Kind::Sources => status == IBV_WC_LOC_PROT_ERR,
        }
    }
}

/// Marks what a receive is called.
const RECEIVE: u64 = 1 << 31;

/// Messages from one queue pair to the other.
struct Stream<'a> {
    rig: &'a Rig,
    pair: Pair,
    kind: Kind,
    round: u64,
    /// The memory, with its keys.
    address: u64,
    lkey: u32,
    rkey: u32,
    posted: u32,
    ended: u32,
    /// The first that was refused.
    refused: Option<u32>,
}

impl Stream<'_> {
    fn post(&mut self) -> Check {
        let rig = self.rig;
        let id = (self.round << 32) | u64::from(self.posted);
        let place = self.address + u64::from(self.posted / 2 % 4) * PIECE as u64;
        let from = (rig.buffer.address(), PIECE as u32, rig.lkey());
        let sink = rig.buffer.address() + SINK as u64;
        let other = self.posted % 4 == 3;
        let (opcode, remote, entry) = match self.kind {
            Kind::Receives if other => {
                self.receive(id | RECEIVE, (place, PIECE as u32, self.lkey))?;
                (IBV_WR_SEND, (0, 0), from)
            }
            Kind::Reads if other => {
                let into = (sink, PIECE as u32, rig.lkey());
                (IBV_WR_RDMA_READ, (place, self.rkey), into)
            }
            Kind::Sources => {
                let from = (place, PIECE as u32, self.lkey);
                (IBV_WR_RDMA_WRITE, (sink, rig.rkey()), from)
            }
            _ => (IBV_WR_RDMA_WRITE, (place, self.rkey), from),
        };
        let mut wr = work(opcode);
        wr.wr_id = id;
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = remote;
        rig.send(self.pair.a, wr, entry)?;
        self.posted += 1;
        Ok(())
    }

    fn receive(&self, wr_id: u64, (addr, length, lkey): (u64, u32, u32)) -> Check {
        let mut sge = ibv_sge { addr, length, lkey };
        let mut wr = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, the work request and its list are complete.
        let result = unsafe {
            match (*self.rig.raw()).ops.post_recv {
                Some(post) => post(self.pair.b, &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        };
        well(result, "ibv_post_recv")
    }

    /// Takes all completions that there are.
    fn take(&mut self) -> Check {
        while let Some(wc) = self.rig.poll(self.pair.cq)? {
            // Receives are told by the messages that took them; some are left of rounds before.
            if wc.wr_id >> 32 != self.round || wc.wr_id & RECEIVE != 0 {
                continue;
            }
            expect!(wc.wr_id as u32, self.ended, "the next message that ends");
            match (wc.status, self.refused) {
                (IBV_WC_SUCCESS, None) | (IBV_WC_WR_FLUSH_ERR, Some(_)) => {}
                (status, None) if self.kind.fails_with(status) => self.refused = Some(self.ended),
                (status, refused) => {
                    let status = status_name(status);
                    let (kind, at) = (self.kind, self.ended);
                    let what = format!("{kind:?}: message {at}: {status}, refused: {refused:?}");
                    return Err(what.into());
                }
            }
            self.ended += 1;
        }
        Ok(())
    }

    /// Posts for what has ended.
    fn go_on(&mut self) -> Check {
        self.take()?;
        expect!(self.refused, None, "refused while all is well");
        while self.posted - self.ended < DEPTH {
            self.post()?;
        }
        Ok(())
    }

    /// Goes on until so many have ended, and for a while from then on.
    fn go_on_until(&mut self, ended: u32, pause: Duration) -> Check {
        let deadline = Instant::now() + PATIENCE;
        self.go_on()?;
        while self.ended < ended {
            self.go_on()?;
            expect!(Instant::now() < deadline, true, "the stream goes on");
        }
        let moment = Instant::now() + pause;
        while Instant::now() < moment {
            self.go_on()?;
        }
        Ok(())
    }

    /// Waits until all has ended, at the latest with one more message; returns whether one was refused that
    /// was under way before.
    fn end(&mut self) -> Check<bool> {
        self.post()?;
        let deadline = Instant::now() + PATIENCE;
        while self.ended < self.posted {
            self.take()?;
            expect!(Instant::now() < deadline, true, "the stream ends");
        }
        let last = self.posted - 1;
        match self.refused {
            Some(refused) => Ok(refused < last),
            None => Err("a message after the end was not refused".into()),
        }
    }
}

/// A round: memory that is used, taken back at some moment, and has its owner's bytes from then on. Returns
/// whether something was under way at that moment.
fn stream(rig: &Rig, cq: *mut ibv_cq, round: u64, random: &mut Random) -> Check<bool> {
    let kind = KINDS[round as usize % KINDS.len()];
    // Pages of the memory that was there would be others' by now. What only has its window closed is still
    // pinned.
    let is_replaced = round as usize / KINDS.len() % 2 == 1 && kind != Kind::Window;
    let memory = Buffer::new(LENGTH, BufferKind::Plain).at("memory")?;
    memory.write(0, &[BEFORE; LENGTH]).at("memory")?;
    rig.set(0, &[BROUGHT; PIECE])?;
    rig.set(SINK, &[EMPTY; PIECE])?;
    let mut owners = vec![0; LENGTH];
    pattern::fill(&mut owners, round, 0);

    let pair = connected(rig, cq)?;
    let address = memory.address();
    let mr = register(rig, address, LENGTH, kind.access())?;
    // SAFETY: the region lives.
    let (lkey, mut rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
    let mut mw = None;
    if kind == Kind::Window {
        let opened = window(rig, IBV_MW_TYPE_1)?;
        let place = ibv_mw_bind_info {
            mr,
            addr: address,
            length: LENGTH as u64,
            mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
        };
        bind1_to(rig, &pair, opened, place)?;
        // SAFETY: the window lives.
        rkey = unsafe { (*opened).rkey };
        mw = Some(opened);
    }
    let mut stream = Stream {
        rig,
        pair,
        kind,
        round,
        address,
        lkey,
        rkey,
        posted: 0,
        ended: 0,
        refused: None,
    };
    let ended = random.below(DEPTH as usize) as u32;
    let pause = Duration::from_micros(random.below(200) as u64);
    stream.go_on_until(ended, pause)?;
    match mw {
        Some(mw) => close_window(rig, mw)?,
        None => deregister(mr)?,
    }
    if is_replaced {
        memory.change(Change::Unmap, 0, LENGTH).at("munmap")?;
        memory.change(Change::Replace, 0, LENGTH).at("mmap")?;
    }
    memory.write(0, &owners).at("the owner's bytes")?;
    let was_under_way = stream.end()?;
    // From here on there is nobody who could.
    destroy(&stream.pair)?;
    if mw.is_some() {
        deregister(mr)?;
    }
    let mut bytes = vec![0; LENGTH];
    memory.read(0, &mut bytes).at("memory")?;
    if let Some(at) = pattern::mismatch(&bytes, round, 0) {
        return Err(format!("{kind:?}: byte {at} was written: {:#x}", bytes[at]).into());
    }
    let sink = rig.get(SINK, PIECE)?;
    if let Some(at) = sink
        .iter()
        .position(|byte| ![BEFORE, BROUGHT, EMPTY].contains(byte))
    {
        return Err(format!("{kind:?}: the owner's bytes were read, see {at}").into());
    }
    Ok(was_under_way)
}

fn streams(rig: &Rig) -> Check {
    let cq = rig.cq(512)?;
    let mut random = Random::new();
    let mut under_way = [0; KINDS.len()];
    let least = 2 * KINDS.len() as u64;
    let start = Instant::now();
    let mut round = 0;
    while round < ROUNDS && (round < least || start.elapsed() < ENOUGH || under_way.contains(&0)) {
        let kind = &mut under_way[round as usize % KINDS.len()];
        // When it is enough, only those go on of which nothing was shown yet.
        let is_wanted = round < least || start.elapsed() < ENOUGH || *kind == 0;
        if is_wanted && stream(rig, cq, round, &mut random)? {
            *kind += 1;
        }
        round += 1;
    }
    println!("{round} rounds, {under_way:?} of them with something under way, of {KINDS:?}");
    for (kind, count) in KINDS.iter().zip(under_way) {
        // Else nothing was shown of it.
        expect!(count > 0, true, "{kind:?}: something under way");
    }
    Ok(())
}

/// Registers and releases the halves of some memory until `ready` ends. With each queue pair from there it
/// writes at once under the key that it has released, to the half which it leaves alone from then on, and
/// tells when it needs the queue pair no more.
fn churn(
    (context, pd): (Raw<ibv_context>, Raw<ibv_pd>),
    memory: u64,
    (from, lkey): (u64, u32),
    ready: &mpsc::Receiver<Raw<ibv_qp>>,
    posted: &mpsc::Sender<()>,
) -> Result<(), String> {
    let mut half = 0;
    loop {
        let qp = match ready.try_recv() {
            Ok(qp) => Some(qp),
            Err(mpsc::TryRecvError::Empty) => None,
            Err(mpsc::TryRecvError::Disconnected) => return Ok(()),
        };
        let address = memory + half * PIECE as u64;
        // SAFETY: the domain lives, and so does the memory.
        let mr = unsafe { ibv_reg_mr(pd.get(), address as *mut _, PIECE, PLAIN as i32) };
        if mr.is_null() {
            return Err(format!("ibv_reg_mr: {}", crate::verbs::last_errno()));
        }
        // SAFETY: the region lives, and is not used afterwards.
        let (rkey, result) = unsafe { ((*mr).rkey, ibv_dereg_mr(mr)) };
        if result != 0 {
            return Err(format!("ibv_dereg_mr: {}", Errno(result)));
        }
        if let Some(qp) = qp {
            let mut sge = ibv_sge {
                addr: from,
                length: FEW,
                lkey,
            };
            let mut wr = work(IBV_WR_RDMA_WRITE);
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
            wr.wr.rdma.remote_addr = address;
            wr.wr.rdma.rkey = rkey;
            let result = post(context.get(), qp.get(), &mut wr);
            if result != 0 {
                return Err(format!("ibv_post_send: {}", Errno(result)));
            }
            half = 1 - half;
            if posted.send(()).is_err() {
                return Ok(());
            }
        }
    }
}

fn released_keys(rig: &Rig) -> Check {
    const THREADS: usize = 4;
    const KEYS: usize = 100;
    const ENOUGH: Duration = Duration::from_secs(5);
    let memory = (0..THREADS)
        .map(|_| Buffer::new(2 * PIECE, BufferKind::Plain))
        .collect::<Result<Vec<Rc<Buffer>>, Errno>>()
        .at("memory")?;
    rig.set(0, &[BROUGHT; PIECE])?;
    let cq = rig.cq(64)?;
    let objects = (Raw(rig.raw()), Raw(rig.pd));
    let from = (rig.buffer.address(), rig.lkey());
    std::thread::scope(|scope| -> Check {
        let mut threads = Vec::new();
        let mut ends = Vec::new();
        for memory in &memory {
            let (ready, next) = mpsc::channel();
            let (told, posted) = mpsc::channel();
            let address = memory.address();
            threads.push(scope.spawn(move || churn(objects, address, from, &next, &told)));
            ends.push((ready, posted));
        }
        let start = Instant::now();
        let mut checked = 0;
        let mut check = || -> Check {
            while checked < KEYS && (checked < THREADS || start.elapsed() < ENOUGH) {
                let pair = connected(rig, cq)?;
                let (ready, posted) = &ends[checked % THREADS];
                // A thread that has ended tells why.
                let gone = "a thread ended";
                ready.send(Raw(pair.a)).map_err(|_| gone)?;
                posted.recv_timeout(PATIENCE).map_err(|_| gone)?;
                rig.ends(cq, IBV_WC_REM_ACCESS_ERR, "a write under a released key")?;
                destroy(&pair)?;
                checked += 1;
            }
            Ok(())
        };
        let result = check();
        drop(ends);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        println!("{checked} keys");
        result
    })?;
    for memory in &memory {
        let mut bytes = vec![0; 2 * PIECE];
        memory.read(0, &mut bytes).at("memory")?;
        let written = bytes.iter().position(|&byte| byte != 0);
        expect!(written, None, "a byte that was written");
    }
    Ok(())
}

/// How many regions or windows there are at once.
const CROWD: usize = 200;

fn regions(rig: &Rig) -> Check {
    const PAGE: usize = 4096;
    let memory = Buffer::new(CROWD * PAGE, BufferKind::Plain).at("memory")?;
    let cq = rig.cq(512)?;
    let mut random = Random::new();
    let before = pinned().at("VmPin")?;
    for _ in 0..3 {
        let mut all = Vec::new();
        for n in 0..CROWD {
            let address = memory.address() + (n * PAGE) as u64;
            let mr = register(rig, address, PAGE, [PLAIN, RIGHTS][n % 2])?;
            // SAFETY: the region lives.
            all.push((address, unsafe { (*mr).rkey }, mr));
        }
        let keys: HashSet<u32> = all.iter().map(|&(_, rkey, _)| rkey).collect();
        expect!(keys.len(), CROWD, "different keys");
        random.shuffle(&mut all);
        let left = all.split_off(CROWD / 2);
        for &(_, _, mr) in &all {
            deregister(mr)?;
        }
        // Those that are left are as they were.
        let pair = connected(rig, cq)?;
        for &(address, rkey, _) in &left {
            rig.write_to(pair.a, FEW, address, rkey)?;
        }
        for _ in &left {
            rig.ends(cq, IBV_WC_SUCCESS, "a write to a region that is left")?;
        }
        destroy(&pair)?;
        for &(_, _, mr) in &left {
            deregister(mr)?;
        }
        expect!(pinned().at("VmPin")?, before, "bytes that are pinned");
        for some in [all, left] {
            let (address, rkey, _) = some[random.below(some.len())];
            is_refused(rig, cq, address, rkey, "a write to a region that ended")?;
        }
    }
    Ok(())
}

fn windows(rig: &Rig) -> Check {
    let cq = rig.cq(512)?;
    let mut random = Random::new();
    let address = rig.buffer.address() + SINK as u64;
    for _ in 0..3 {
        let pair = connected(rig, cq)?;
        let mut all = Vec::new();
        let mut open = Vec::new();
        for n in 0..CROWD {
            let mw = window(rig, [IBV_MW_TYPE_1, IBV_MW_TYPE_2][n % 2])?;
            // Some are of a region of their own, which ends with them.
            let own = match n % 40 {
                20 => Some(register(rig, address, LENGTH - SINK, RIGHTS)?),
                _ => None,
            };
            if n % 20 == 0 {
                let place = ibv_mw_bind_info {
                    mr: own.unwrap_or(rig.mr),
                    addr: address,
                    length: FEW.into(),
                    mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
                };
                bind1_to(rig, &pair, mw, place)?;
                // SAFETY: the window lives.
                let rkey = unsafe { (*mw).rkey };
                rig.write_to(pair.a, FEW, address, rkey)?;
                rig.ends(cq, IBV_WC_SUCCESS, "a write into a window")?;
                open.push(rkey);
            }
            all.push((mw, own));
        }
        random.shuffle(&mut all);
        for (mw, own) in all {
            close_window(rig, mw)?;
            // It is not busy: its window is no more.
            own.map_or(Ok(()), deregister)?;
        }
        for rkey in open {
            is_refused(rig, cq, address, rkey, "a write into a window that ended")?;
        }
        destroy(&pair)?;
    }
    Ok(())
}
