// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several threads on the same objects, and what one of them may do while another waits; lists of
//! work requests, and queues that are too short. Both ends of each connection are in this process.

use std::collections::HashSet;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

use super::objects::{
    bind2, errno, made, query, shares, to_state, well, window, work, Made, Pair, Rig,
};
use crate::bench::At;
use crate::direct;
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{check, last_errno, not_null, pinned, Errno, Options};

type Body = fn(&Rig) -> Check;

const CHECKS: &[(&str, Body)] = &[
    (
        "post, poll, arm, resize, make and destroy on one completion queue",
        everything_at_once,
    ),
    (
        "an event that is not acknowledged keeps nobody from making queue pairs",
        unacknowledged,
    ),
    (
        "between start and end of polling: arm, make, and destroy elsewhere",
        inside_polling,
    ),
    ("a list of work requests ends at its bad one", lists),
    (
        "queue pairs that share completion and receive queue, in any order",
        shared_queues,
    ),
    (
        "a resize to too few entries changes nothing",
        refused_resize,
    ),
    (
        "a window is bound again after a bind that failed",
        bind_again,
    ),
    ("a completion queue that overflows tells so, once", overflow),
    (
        "regions share the memory of one that ends or changes meanwhile",
        shared_meanwhile,
    ),
];

/// Whatever takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn run(options: &Options, report: &mut Report) {
    for (name, body) in CHECKS {
        let result = Rig::new(options).and_then(|rig| body(&rig));
        report.enter(&format!("threads: {name}"), result);
    }
}

/// A pointer to an object of the verbs, which are made for use by many threads.
pub(super) struct Raw<T>(pub(super) *mut T);

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

// SAFETY: libibverbs lets every thread use every object; who destroys one sees to it that no other
// thread does so any more.
unsafe impl<T> Send for Raw<T> {}

impl<T> Raw<T> {
    pub(super) fn get(self) -> *mut T {
        self.0
    }
}

/// Runs `body` in a thread of its own. If it does not end, the check says so, and the thread is left
/// behind.
pub(super) fn in_time<T: Send + 'static>(
    what: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Check<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(body()));
    receiver
        .recv_timeout(PATIENCE)
        .map_err(|_| format!("{what}: hangs").into())
}

pub(super) fn post(context: *mut ibv_context, qp: *mut ibv_qp, wr: &mut ibv_send_wr) -> i32 {
    let mut bad = ptr::null_mut();
    // SAFETY: the queue pair lives, the work request and its list are complete.
    unsafe {
        match (*context).ops.post_send {
            Some(post) => post(qp, wr, &mut bad),
            None => libc::ENOSYS,
        }
    }
}

/// A queue pair in state RESET of the completion queue.
fn spare(pd: *mut ibv_pd, cq: *mut ibv_cq) -> Result<*mut ibv_qp, i32> {
    let mut attr = ibv_qp_init_attr {
        send_cq: cq,
        recv_cq: cq,
        cap: ibv_qp_cap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        qp_type: IBV_QPT_RC,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and the objects live.
    let qp = unsafe { ibv_create_qp(pd, &mut attr) };
    if qp.is_null() {
        Err(errno())
    } else {
        Ok(qp)
    }
}

/// To INIT, with receives that will be flushed, and to ERR: completions of a queue pair that is about
/// to go.
fn flushed(context: *mut ibv_context, qp: *mut ibv_qp, port: u8) -> Result<(), i32> {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: port,
        ..Default::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    let done = |result: i32| if result == 0 { Ok(()) } else { Err(result) };
    // SAFETY: the queue pair lives, and the work request is complete.
    unsafe {
        done(ibv_modify_qp(qp, &mut attr, mask as i32))?;
        let mut wr = ibv_recv_wr {
            wr_id: u64::MAX,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        let post = (*context).ops.post_recv.ok_or(libc::ENOSYS)?;
        for _ in 0..3 {
            done(post(qp, &mut wr, &mut bad))?;
        }
        attr.qp_state = IBV_QPS_ERR;
        done(ibv_modify_qp(qp, &mut attr, IBV_QP_STATE as i32))
    }
}

/// Three threads post to one queue pair, two take the completions, one arms, one changes the size of
/// the queue, one makes and destroys queue pairs that leave completions in it: each completion comes
/// once, and nothing waits for ever.
fn everything_at_once(rig: &Rig) -> Check {
    const POSTERS: u64 = 3;
    const EACH: u64 = 1000;
    let pair = rig.pair()?;
    let (context, pd) = (Raw(rig.raw()), Raw(rig.pd));
    let (qp, cq) = (Raw(pair.a), Raw(pair.cq));
    let (lkey, rkey, from) = (rig.lkey(), rig.rkey(), rig.buffer.address());
    let port = rig.context.port;
    in_time(
        "threads on one completion queue",
        move || -> Result<(), String> {
            let taken = AtomicU64::new(0);
            let failed = AtomicBool::new(false);
            let (taken, failed) = (&taken, &failed);
            let over = || {
                taken.load(Ordering::Acquire) >= POSTERS * EACH || failed.load(Ordering::Acquire)
            };
            let over = &over;
            let fail = |what: &str, errno: i32| {
                failed.store(true, Ordering::Release);
                Err::<Vec<u64>, String>(format!("{what}: {}", Errno(errno)))
            };
            let fail = &fail;
            let seen = std::thread::scope(|scope| {
                let mut threads = Vec::new();
                for poster in 0..POSTERS {
                    threads.push(scope.spawn(move || {
                        let (context, qp) = (context, qp);
                        for n in 0..EACH {
                            let mut sge = ibv_sge {
                                addr: from,
                                length: 64,
                                lkey,
                            };
                            let mut wr = work(IBV_WR_RDMA_WRITE);
                            wr.wr_id = (poster << 32) | n;
                            wr.sg_list = &mut sge;
                            wr.num_sge = 1;
                            wr.wr.rdma.remote_addr = from + 32768;
                            wr.wr.rdma.rkey = rkey;
                            loop {
                                match post(context.get(), qp.get(), &mut wr) {
                                    0 => break,
                                    libc::ENOMEM if !over() => std::thread::yield_now(),
                                    errno => return fail("ibv_post_send", errno),
                                }
                            }
                        }
                        Ok(Vec::new())
                    }));
                }
                for _ in 0..2 {
                    threads.push(scope.spawn(move || {
                        let (context, cq) = (context, cq);
                        let mut seen = Vec::new();
                        while !over() {
                            // SAFETY: zero is a valid value of all fields; the queue lives, and there
                            // is room for that many.
                            let (wc, count) = unsafe {
                                let mut wc: [ibv_wc; 5] = std::mem::zeroed();
                                let count = match (*context.get()).ops.poll_cq {
                                    Some(poll) => poll(cq.get(), 5, wc.as_mut_ptr()),
                                    None => -1,
                                };
                                (wc, count)
                            };
                            let Ok(count) = usize::try_from(count) else {
                                return fail("ibv_poll_cq", libc::EIO);
                            };
                            for wc in &wc[..count] {
                                // Others are those of queue pairs that come and go.
                                if wc.wr_id == u64::MAX {
                                    continue;
                                }
                                if wc.status != IBV_WC_SUCCESS {
                                    failed.store(true, Ordering::Release);
                                    return Err(format!("{:#x}: status {}", wc.wr_id, wc.status));
                                }
                                seen.push(wc.wr_id);
                                taken.fetch_add(1, Ordering::AcqRel);
                            }
                            if count == 0 {
                                std::thread::yield_now();
                            }
                        }
                        Ok(seen)
                    }));
                }
                threads.push(scope.spawn(move || {
                    let (context, cq) = (context, cq);
                    while !over() {
                        // SAFETY: the queue lives.
                        let result = unsafe {
                            match (*context.get()).ops.req_notify_cq {
                                Some(arm) => arm(cq.get(), 0),
                                None => libc::ENOSYS,
                            }
                        };
                        if result != 0 {
                            return fail("ibv_req_notify_cq", result);
                        }
                        std::thread::yield_now();
                    }
                    Ok(Vec::new())
                }));
                threads.push(scope.spawn(move || {
                    let cq = cq;
                    for entries in [1024, 600, 2048].into_iter().cycle() {
                        if over() {
                            break;
                        }
                        // SAFETY: the queue lives.
                        match unsafe { ibv_resize_cq(cq.get(), entries) } {
                            0 => {}
                            result => return fail("ibv_resize_cq", result),
                        }
                    }
                    Ok(Vec::new())
                }));
                threads.push(scope.spawn(move || {
                    let (context, pd, cq) = (context, pd, cq);
                    while !over() {
                        let qp = match spare(pd.get(), cq.get()) {
                            Ok(qp) => qp,
                            Err(errno) => return fail("ibv_create_qp", errno),
                        };
                        if let Err(errno) = flushed(context.get(), qp, port) {
                            return fail("to ERR", errno);
                        }
                        // SAFETY: the queue pair lives and nobody else has it.
                        match unsafe { ibv_destroy_qp(qp) } {
                            0 => {}
                            result => return fail("ibv_destroy_qp", result),
                        }
                    }
                    Ok(Vec::new())
                }));
                let mut seen = Vec::new();
                let mut result = Ok(());
                for thread in threads {
                    match thread.join() {
                        Ok(Ok(more)) => seen.extend(more),
                        Ok(Err(what)) => result = Err(what),
                        Err(_) => result = Err("a thread panicked".into()),
                    }
                }
                result.map(|()| seen)
            })?;
            let different: HashSet<u64> = seen.iter().copied().collect();
            if seen.len() as u64 != POSTERS * EACH || different.len() != seen.len() {
                return Err(format!(
                    "{} completions, {} different, of {}",
                    seen.len(),
                    different.len(),
                    POSTERS * EACH
                ));
            }
            Ok(())
        },
    )?
    .map_err(Into::into)
}

/// `ibv_destroy_qp` waits until the events of its queue pair are acknowledged. Meanwhile others are
/// made and destroyed.
fn unacknowledged(rig: &Rig) -> Check {
    let pair = rig.pair()?;
    // A write with a wrong key: the responder tells of it by an event.
    rig.write_to(pair.a, 64, rig.buffer.address() + 32768, rig.rkey() ^ 0xff)?;
    rig.ends(pair.cq, IBV_WC_REM_ACCESS_ERR, "a write with a wrong key")?;
    let context = Raw(rig.raw());
    let mut event = in_time("ibv_get_async_event", move || {
        let context = context;
        let mut event = ibv_async_event {
            // SAFETY: zero is a valid value of the union of pointers and numbers.
            element: unsafe { std::mem::zeroed() },
            event_type: 0,
        };
        // SAFETY: the context is open.
        let result = unsafe { ibv_get_async_event(context.get(), &mut event) };
        (result, EventBox(event))
    })
    .and_then(|(result, event)| well(result, "ibv_get_async_event").map(|()| event.0))?;
    // SAFETY: the event is one of a queue pair, if it is the right one.
    let told = unsafe { (event.event_type, event.element.qp) };
    expect!(told, (IBV_EVENT_QP_ACCESS_ERR, pair.b), "the event");

    let (qp, gone) = (Raw(pair.b), std::sync::Arc::new(AtomicBool::new(false)));
    let (started, starting) = mpsc::channel();
    let ended = gone.clone();
    let destroying = std::thread::spawn(move || {
        let qp = qp;
        let _ = started.send(());
        // SAFETY: the queue pair lives and is not used afterwards.
        let result = unsafe { ibv_destroy_qp(qp.get()) };
        ended.store(true, Ordering::Release);
        result
    });
    let _ = starting.recv();
    let (pd, cq) = (Raw(rig.pd), Raw(pair.cq));
    // Long enough for the other thread to get to where it waits.
    let made = in_time("ibv_create_qp beside ibv_destroy_qp", move || {
        let (pd, cq) = (pd, cq);
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            let qp = spare(pd.get(), cq.get())?;
            // SAFETY: the queue pair lives and nobody else has it.
            match unsafe { ibv_destroy_qp(qp) } {
                0 => {}
                errno => return Err(errno),
            }
        }
        Ok(())
    });
    let waits = !gone.load(Ordering::Acquire);
    // SAFETY: the event was got, and is acknowledged once.
    unsafe { ibv_ack_async_event(&mut event) };
    expect!(made?, Ok(()), "queue pairs made and destroyed");
    expect!(waits, true, "ibv_destroy_qp waits for the acknowledgement");
    let result = in_time("ibv_destroy_qp", move || destroying.join().unwrap_or(-1))?;
    well(result, "ibv_destroy_qp")
}

/// An event on its way between threads.
struct EventBox(ibv_async_event);

// SAFETY: it is a pointer to an object that any thread may use, and a number.
unsafe impl Send for EventBox {}

/// A thread between `ibv_start_poll` and `ibv_end_poll` arms the queue, makes a queue pair and
/// destroys one of it; another thread destroys one, and gets on when the first has ended polling.
fn inside_polling(rig: &Rig) -> Check {
    let mut attr = ibv_cq_init_attr_ex {
        cqe: 64,
        wc_flags: u64::from(IBV_WC_EX_WITH_QP_NUM),
        ..Default::default()
    };
    let create = rig.extended().create_cq_ex.ok_or("no ibv_create_cq_ex")?;
    // SAFETY: the context is open, and the attributes are complete.
    let cq = made(unsafe { create(rig.raw(), &mut attr) }, "ibv_create_cq_ex")?;
    let pair = rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq: cq.cast(),
        operations: 0,
    })?;
    let other = spare(rig.pd, cq.cast()).map_err(|e| Errno(e).to_string())?;
    let port = rig.context.port;
    flushed(rig.raw(), other, port).map_err(|e| Errno(e).to_string())?;
    rig.write(pair.a, 64)?;
    let (context, pd, cq, other) = (Raw(rig.raw()), Raw(rig.pd), Raw(cq), Raw(other));
    in_time("what is done between start and end of polling", move || {
        let (context, pd, cq) = (context, pd, cq);
        let mut none = ibv_poll_cq_attr::default();
        // SAFETY: the queue is of the extended interface, the objects live, and the calls are made
        // in the order the verbs demand.
        unsafe {
            let operations = &*cq.get();
            let (Some(start), Some(next), Some(end)) = (
                operations.start_poll,
                operations.next_poll,
                operations.end_poll,
            ) else {
                return Err("no extended polling".to_owned());
            };
            let deadline = Instant::now() + PATIENCE;
            while start(cq.get(), &mut none) != 0 {
                if Instant::now() > deadline {
                    return Err("no completion".into());
                }
                std::thread::yield_now();
            }
            let failed = |what: &str, errno: i32| format!("{what}: {}", Errno(errno));
            let arm = (*context.get()).ops.req_notify_cq.ok_or("no arming")?;
            for solicited in [1, 0] {
                match arm(cq.get().cast(), solicited) {
                    0 => {}
                    errno => return Err(failed("ibv_req_notify_cq", errno)),
                }
            }
            // Waits for the queue, and for nothing else.
            let destroying = std::thread::spawn(move || {
                let other = other;
                ibv_destroy_qp(other.get())
            });
            for _ in 0..20 {
                let qp = spare(pd.get(), cq.get().cast())
                    .map_err(|errno| failed("ibv_create_qp", errno))?;
                flushed(context.get(), qp, port).map_err(|errno| failed("to ERR", errno))?;
                match ibv_destroy_qp(qp) {
                    0 => {}
                    errno => return Err(failed("ibv_destroy_qp", errno)),
                }
            }
            while next(cq.get()) == 0 {}
            end(cq.get());
            match destroying.join() {
                Ok(0) => Ok(()),
                Ok(errno) => Err(failed("ibv_destroy_qp beside polling", errno)),
                Err(_) => Err("the other thread panicked".into()),
            }
        }
    })?
    .map_err(Into::into)
}

/// Those before the bad one are carried out, it is named, and none after it is.
fn lists(rig: &Rig) -> Check {
    for bad_at in [0usize, 2, 4] {
        let pair = rig.pair()?;
        let mut sge = ibv_sge {
            addr: rig.buffer.address(),
            length: 32,
            lkey: rig.lkey(),
        };
        let mut list: Vec<ibv_send_wr> = (0..5)
            .map(|n| {
                let mut wr = work(IBV_WR_RDMA_WRITE);
                wr.wr_id = n as u64;
                wr.sg_list = &mut sge;
                // More entries than any queue pair has.
                wr.num_sge = if n == bad_at { 10_000 } else { 1 };
                wr.wr.rdma.remote_addr = rig.buffer.address() + 32768 + 64 * n as u64;
                wr.wr.rdma.rkey = rig.rkey();
                wr
            })
            .collect();
        let mut next = ptr::null_mut();
        for wr in list.iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        rig.set(0, &[0x5a; 32])?;
        rig.set(32768, &[0; 512])?;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the list ends.
        let result = unsafe {
            match (*rig.raw()).ops.post_send {
                Some(post) => post(pair.a, next, &mut bad),
                None => libc::ENOSYS,
            }
        };
        expect!(
            result,
            libc::EINVAL,
            "ibv_post_send of a list with a bad one"
        );
        expect!(bad, &raw mut list[bad_at], "the bad one of the list");
        // One more shows that nothing came between.
        rig.write_to(pair.a, 32, rig.buffer.address() + 33280, rig.rkey())?;
        for n in 0..bad_at {
            let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "one before the bad one")?;
            expect!(wc.wr_id, n as u64, "its number");
        }
        rig.ends(pair.cq, IBV_WC_SUCCESS, "the one posted afterwards")?;
        for n in 0..5 {
            let expected = if n < bad_at { 0x5a } else { 0 };
            let bytes = rig.get(32768 + 64 * n, 32)?;
            expect!(bytes, vec![expected; 32], "what number {n} was to write");
        }
    }
    Ok(())
}

/// Four connections into one shared receive queue and one completion queue. The receives are taken
/// in turns and posted again as they come.
fn shared_queues(rig: &Rig) -> Check {
    const PAIRS: usize = 4;
    const ROUNDS: u64 = 50;
    let mut attr = ibv_srq_init_attr {
        srq_context: ptr::null_mut(),
        attr: ibv_srq_attr {
            max_wr: 16,
            max_sge: 1,
            srq_limit: 0,
        },
    };
    // SAFETY: the domain lives.
    let srq = unsafe { ibv_create_srq(rig.pd, &mut attr) };
    let srq = made(srq, "ibv_create_srq")?;
    let cq = rig.cq(256)?;
    let pairs = (0..PAIRS)
        .map(|_| {
            rig.pair_of(Made {
                kind: IBV_QPT_RC,
                srq,
                cq,
                operations: 0,
            })
        })
        .collect::<Check<Vec<Pair>>>()?;
    let refused = |errno: i32| Errno(errno).to_string();
    let mut waiting: HashSet<u64> = (0..attr.attr.max_wr.into()).collect();
    for &wr_id in &waiting {
        rig.recv_shared(srq, wr_id).map_err(refused)?;
    }
    expect!(
        rig.recv_shared(srq, 99),
        Err(libc::ENOMEM),
        "one receive more than there is room for"
    );
    for round in 0..ROUNDS {
        // Another order in each round.
        for n in 0..PAIRS {
            let pair = &pairs[(n * 3 + round as usize) % PAIRS];
            let entry = (rig.buffer.address(), 16, rig.lkey());
            rig.send(pair.a, work(IBV_WR_SEND), entry)?;
        }
        let (mut sent, mut received) = (0, Vec::new());
        while sent < PAIRS || received.len() < PAIRS {
            let wc = rig.ends(cq, IBV_WC_SUCCESS, "a message")?;
            if wc.opcode == IBV_WC_RECV {
                let known = waiting.remove(&wc.wr_id);
                expect!(known, true, "receive {} was outstanding", wc.wr_id);
                received.push(wc.wr_id);
            } else {
                sent += 1;
            }
        }
        for wr_id in received.into_iter().rev() {
            let wr_id = wr_id + 100;
            rig.recv_shared(srq, wr_id).map_err(refused)?;
            waiting.insert(wr_id);
        }
    }
    Ok(())
}

/// Waits for something that only asking tells.
fn until(what: &str, mut done: impl FnMut() -> Check<bool>) -> Check {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        if Instant::now() > deadline {
            return Err(format!("not within {PATIENCE:?}: {what}").into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// More than the shortest queue has room for, which is a page of entries.
const WAITING: u32 = 60;

/// Completions that wait do not fit in the shorter queue: it stays as it is.
fn refused_resize(rig: &Rig) -> Check {
    let pair = rig.pair()?;
    let first = query(pair.b)?.0.rq_psn;
    for _ in 0..WAITING {
        rig.write(pair.a, 64)?;
    }
    // What the peer has received was begun, and a send queue that is drained has the completions
    // of all that was begun.
    let all = (first + WAITING) & 0xff_ffff;
    until("the writes arrive", || Ok(query(pair.b)?.0.rq_psn == all))?;
    to_state(pair.a, IBV_QPS_SQD)?;
    until("the send queue is drained", || {
        Ok(query(pair.a)?.0.sq_draining == 0)
    })?;
    for (entries, expected) in [(1, libc::EINVAL), (32, libc::EINVAL), (64, 0)] {
        // SAFETY: the queue lives.
        let result = unsafe { ibv_resize_cq(pair.cq, entries) };
        expect!(
            result,
            expected,
            "{WAITING} completions into {entries} entries"
        );
    }
    to_state(pair.a, IBV_QPS_RTS)?;
    for _ in 0..WAITING {
        rig.ends(pair.cq, IBV_WC_SUCCESS, "after a refused resize")?;
    }
    expect!(
        rig.poll(pair.cq)?.is_none(),
        true,
        "no more than there were"
    );
    // SAFETY: the queue lives.
    well(unsafe { ibv_resize_cq(pair.cq, 4) }, "ibv_resize_cq")?;
    rig.write(pair.a, 64)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "in the shorter queue")?;
    Ok(())
}

/// The program knows which key of a window is in force: neither a refused bind nor one that was
/// flushed moves it.
fn bind_again(rig: &Rig) -> Check {
    let mw = window(rig, IBV_MW_TYPE_2)?;
    // SAFETY: the window lives.
    let first = unsafe { (*mw).rkey };
    let key = first & !0xff | first.wrapping_add(1) & 0xff;
    let bad = rig.pair()?;
    let mut wr = work(IBV_WR_BIND_MW);
    wr.__bindgen_anon_2.bind_mw.mw = mw;
    wr.__bindgen_anon_2.bind_mw.rkey = key;
    wr.__bindgen_anon_2.bind_mw.bind_info = ibv_mw_bind_info {
        mr: rig.mr,
        addr: rig.buffer.address(),
        // Longer than the region.
        length: 1 << 30,
        mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
    };
    rig.send(bad.b, wr, (0, 0, 0))?;
    rig.send(bad.b, wr, (0, 0, 0))?;
    rig.ends(bad.cq, IBV_WC_MW_BIND_ERR, "a bind that is too long")?;
    rig.ends(bad.cq, IBV_WC_WR_FLUSH_ERR, "the bind behind it")?;
    // SAFETY: the window lives; nobody else looks at it.
    expect!(unsafe { (*mw).rkey }, first, "the window's key afterwards");
    let pair = rig.pair()?;
    bind2(rig, &pair, mw, key)?;
    rig.write_to(pair.a, 100, rig.buffer.address() + 32768, key)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write into the window")?;
    Ok(())
}

/// The queue fails, and so does the queue pair that has a completion more than there is room for;
/// each is told once, and others work.
fn overflow(rig: &Rig) -> Check {
    let cq = rig.cq(4)?;
    let pair = rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq,
        operations: 0,
    })?;
    for _ in 0..WAITING {
        rig.write(pair.a, 64)?;
    }
    // SAFETY: the queue pair lives.
    let failed = unsafe { (*pair.a).qp_num };
    let mut events = Vec::new();
    while events.len() < 2 {
        match rig.context.async_event(PATIENCE) {
            Ok(Some(event)) => events.push(event),
            Ok(None) => return Err(format!("only these events came: {events:?}").into()),
            Err(errno) => return Err(format!("ibv_get_async_event: {errno}").into()),
        }
    }
    events.sort_unstable();
    let mut expected = [(IBV_EVENT_CQ_ERR, 0), (IBV_EVENT_QP_FATAL, failed)];
    expected.sort_unstable();
    expect!(events, expected, "the events");
    let other = rig.pair()?;
    rig.write(other.a, 64)?;
    rig.ends(other.cq, IBV_WC_SUCCESS, "on another queue")?;
    let more = rig
        .context
        .async_event(Duration::ZERO)
        .map_err(|errno| errno.to_string())?;
    expect!(more, None, "one event too many");
    Ok(())
}

/// One thread makes, changes and ends a region; others have its memory shared by its key, at any time.
fn shared_meanwhile(rig: &Rig) -> Check {
    const ROUNDS: u32 = 300;
    const LENGTH: usize = 16 << 10;
    if !shares(rig)? {
        return Err(Outcome::Skipped("regions share no memory".into()));
    }
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    let (base, pd) = (rig.buffer.address(), Raw(rig.pd));
    let before = pinned().at("VmPin")?;
    // The key, and how many looked at it or shared by it.
    let key = Arc::new(AtomicU64::new(0));
    let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let over = Arc::new(AtomicBool::new(false));
    let sharers: Vec<_> = (0..2)
        .map(|_| {
            let (key, counts, over) = (key.clone(), counts.clone(), over.clone());
            std::thread::spawn(move || -> Result<(), Errno> {
                while !over.load(Ordering::Relaxed) {
                    let key = key.load(Ordering::Relaxed) as u32;
                    // SAFETY: the domain lives until the thread has ended.
                    let shared =
                        unsafe { direct::share_by_key(pd.get(), key, base, LENGTH as u64, access) };
                    match shared {
                        Ok(()) => counts[1].fetch_add(1, Ordering::Relaxed),
                        // It has ended, or is elsewhere, or is about to be.
                        Err(Errno(libc::EINVAL)) => 0,
                        Err(other) => return Err(other),
                    };
                    counts[0].fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        })
        .collect();
    let made = in_time("making and ending a region", {
        let (key, counts) = (key.clone(), counts.clone());
        move || -> Result<(), Errno> {
            for round in 0..ROUNDS {
                // SAFETY: the buffer is longer than twice this, and outlives the region.
                unsafe {
                    let start = base as *mut libc::c_void;
                    let mr = not_null(ibv_reg_mr(pd.get(), start, LENGTH, access as i32))?;
                    let looked = counts[0].load(Ordering::Relaxed);
                    key.store((*mr).lkey.into(), Ordering::Relaxed);
                    // Others look at it, then it goes at any time.
                    while counts[0].load(Ordering::Relaxed) < looked + u64::from(round % 5) {
                        std::thread::yield_now();
                    }
                    if round % 2 == 0 {
                        let flags = IBV_REREG_MR_CHANGE_TRANSLATION as i32;
                        let elsewhere = start.add(LENGTH);
                        let none = ptr::null_mut();
                        if ibv_rereg_mr(mr, flags, none, elsewhere, LENGTH, 0) != 0 {
                            return Err(last_errno());
                        }
                    }
                    check(ibv_dereg_mr(mr))?;
                }
            }
            Ok(())
        }
    });
    over.store(true, Ordering::Relaxed);
    for sharer in sharers {
        let result = sharer.join().map_err(|_| "a thread panicked".to_string())?;
        result.at("a share by the key")?;
    }
    made?.at("a region that is shared")?;
    let shared = counts[1].load(Ordering::Relaxed);
    expect!(shared > 0, true, "something was shared");
    expect!(pinned().at("VmPin")?, before, "bytes that are pinned");
    Ok(())
}
