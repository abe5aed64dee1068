// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What posting and polling cost, in instructions.
//!
//! A child of the test's takes the same path twice, between stops at which its parent begins and ends
//! to count its steps. So a count is exact, the same each time, and takes no VM. Without optimisation
//! it means nothing, and there is no bound then:
//! `cargo test --release -p ferrite-provider cost -- --nocapture` prints them.

use core::cell::RefCell;
use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicI32, Ordering};
use std::panic::{catch_unwind, AssertUnwindSafe};

use crate::cq::tests::alone;
use crate::cq::{poll_cq, Cq};
use crate::post::{post_recv, post_send};
use crate::qp::Qp;
use crate::sys::*;
use crate::table::NumberTable;
use crate::testing::{cap, rc, wr, Page};
use ferrite_abi::{CompletionEntry, Plain, QueuePairRecord, COMPLETION_RECEIVE};

/// Instructions of `path` when it is taken the second time, beyond those of nothing.
fn instructions(mut path: impl FnMut()) -> u64 {
    let steps = |path: &mut dyn FnMut()| steps(path).expect("the child came to its end");
    steps(&mut path) - steps(&mut || {})
}

/// What a child says by its exit that this process may not count the steps of: a sandbox, a debugger.
const NOT_TRACED: c_int = 77;

/// No path takes as many steps: it is one that does not end.
const STEPS: u64 = 100_000;

/// Seconds until a child ends that makes no steps: a lock was another thread's when it was made.
const CHILD_LIMIT: libc::c_uint = 60;

/// A child that ends, at the latest, when this does.
struct Child {
    pid: libc::pid_t,
    /// It has ended and was waited for: its number may be another's.
    ended: bool,
}

impl Child {
    /// Its next stop, or the code that it has ended with: that of an end by a signal is as shells have it.
    fn wait(&mut self) -> Result<c_int, c_int> {
        let mut status = 0;
        // SAFETY: there is room for the answer.
        let found = unsafe { libc::waitpid(self.pid, &mut status, 0) };
        assert_eq!(found, self.pid);
        if libc::WIFSTOPPED(status) {
            return Ok(libc::WSTOPSIG(status));
        }
        self.ended = true;
        if libc::WIFEXITED(status) {
            Err(libc::WEXITSTATUS(status))
        } else {
            Err(128 + libc::WTERMSIG(status))
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // SAFETY: the number is the child's until it was waited for, and no status is asked for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, ptr::null_mut(), 0);
        }
    }
}

/// Ends a child where a panic would leave the path: what is beyond it is a copy of the test harness.
struct NoWayBack;

impl Drop for NoWayBack {
    fn drop(&mut self) {
        // SAFETY: nothing is to be done before the process ends.
        unsafe { libc::_exit(1) };
    }
}

/// Steps of a child from one stop to the next, with `path` between them; the code that it ended with, if
/// it did.
#[inline(never)]
fn steps(path: &mut dyn FnMut()) -> Result<u64, c_int> {
    // SAFETY: the call has no preconditions.
    let parent = unsafe { libc::getpid() };
    // SAFETY: the child calls nothing that another thread of this process could have been in the middle
    // of: no test's path allocates. It ends without returning.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let _guard = NoWayBack;
        // SAFETY: of all of these none touches memory.
        unsafe {
            libc::alarm(CHILD_LIMIT);
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // It may have ended before that was said.
            if libc::getppid() != parent {
                libc::_exit(1);
            }
            if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                libc::_exit(NOT_TRACED);
            }
        }
        let stop = || {
            // SAFETY: as above.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        };
        path();
        stop();
        path();
        stop();
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    let mut child = Child {
        pid: child,
        ended: false,
    };
    assert_eq!(child.wait()?, libc::SIGSTOP);
    for count in 0..STEPS {
        // SAFETY: the child has stopped, and no memory is read or written.
        let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child.pid, 0, 0) };
        assert_eq!(stepped, 0);
        match child.wait()? {
            libc::SIGSTOP => return Ok(count),
            signal => assert_eq!(signal, libc::SIGTRAP),
        }
    }
    panic!("{STEPS} steps, and no end");
}

/// A queue pair with its completion queue, whose device sleeps no more.
struct Pair {
    qp: Box<Qp>,
    cq: Box<Cq>,
    _tables: (Box<NumberTable<Qp>>, Box<NumberTable<crate::srq::Srq>>),
    /// Where completions are polled to.
    wc: RefCell<[ibv_wc; 16]>,
    _page: Page,
}

impl Pair {
    fn new() -> Self {
        let mut page = Page::new();
        let tables = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let cq = alone(64, page.doorbells(), &tables.0, &tables.1);
        let mut qp = rc(&cap(64, 64, 1, 1, 64), page.doorbells());
        tables.0.insert(qp.qpn, &raw mut *qp, cq.homes()).unwrap();
        for word in [
            offset_of!(QueuePairRecord, send_wake),
            offset_of!(QueuePairRecord, receive_wake),
        ] {
            qp.memory.record(word).store(0, Ordering::Relaxed);
        }
        Self {
            qp,
            cq,
            _tables: tables,
            wc: RefCell::default(),
            _page: page,
        }
    }

    /// Has the device complete what began at these indices.
    fn complete(&self, starts: impl IntoIterator<Item = u32>, flags: u16) {
        for (number, index) in starts.into_iter().enumerate() {
            let entry = CompletionEntry {
                qpn: self.qp.qpn,
                index,
                flags,
                ..CompletionEntry::zeroed()
            };
            self.cq.complete(number as u32, entry);
        }
    }

    fn poll(&self, wanted: i32, found: i32) {
        let mut wc = self.wc.borrow_mut();
        let cq = ptr::from_ref(&*self.cq).cast_mut().cast();
        // SAFETY: the queue lives, and there is room for sixteen.
        let polled = unsafe { poll_cq(cq, wanted, wc.as_mut_ptr()) };
        assert!(wanted <= 16 && polled == found);
    }

    fn send(&self, wr: &mut ibv_send_wr) {
        let mut bad = ptr::null_mut();
        let qp = ptr::from_ref(&*self.qp).cast_mut().cast();
        // SAFETY: the queue pair lives, and the work request is complete.
        assert_eq!(unsafe { post_send(qp, wr, &mut bad) }, 0);
    }

    fn receive(&self, wr: &mut ibv_recv_wr) {
        let mut bad = ptr::null_mut();
        let qp = ptr::from_ref(&*self.qp).cast_mut().cast();
        // SAFETY: the queue pair lives, and the work request is complete.
        assert_eq!(unsafe { post_recv(qp, wr, &mut bad) }, 0);
    }
}

/// Prints a count, and holds it against its bound.
fn at_most(bound: u64, what: &str, count: u64) {
    println!("{what}: {count} instructions");
    assert!(
        cfg!(debug_assertions) || count <= bound,
        "{what}: {count} instructions, {bound} at most"
    );
}

#[test]
fn a_child_whose_path_fails_is_seen_to_end() {
    match steps(&mut || {}) {
        Err(NOT_TRACED) => return,
        counted => assert_eq!(counted.err(), None),
    }
    // Without the message, which takes locks.
    let panics = &mut || std::panic::resume_unwind(Box::new(()));
    assert_eq!(steps(panics), Err(1));
    // SAFETY: only the child ends.
    let ends = &mut || unsafe { libc::_exit(5) };
    assert_eq!(steps(ends), Err(5));
}

#[test]
fn a_child_whose_path_does_not_end_is_ended() {
    // SAFETY: a fresh mapping touches no memory in use.
    let page = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        libc::mmap(ptr::null_mut(), 4096, access, shared, -1, 0)
    };
    assert_ne!(page, libc::MAP_FAILED);
    // SAFETY: the mapping stays to the end of the process, and is accessed as an atomic only.
    let pid = unsafe { &*page.cast::<AtomicI32>() };
    let mut again = false;
    let mut path = || {
        // SAFETY: the call has no preconditions.
        pid.store(unsafe { libc::getpid() }, Ordering::Relaxed);
        while core::hint::black_box(again) {}
        again = true;
    };
    let counted = catch_unwind(AssertUnwindSafe(|| steps(&mut path)));
    assert!(matches!(counted, Err(_) | Ok(Err(NOT_TRACED))));
    let pid = pid.load(Ordering::Relaxed);
    // SAFETY: no signal is sent.
    assert!(pid == 0 || unsafe { libc::kill(pid, 0) } != 0);
}

#[test]
fn posting_and_polling_take_few_instructions() {
    if steps(&mut || {}) == Err(NOT_TRACED) {
        println!("skipped: this process may not trace its children");
        return;
    }
    let data = [5_u8; 64];
    let mut entries = [ibv_sge {
        addr: data.as_ptr() as u64,
        length: 64,
        lkey: 7,
    }];
    for (bound, what, opcode, flags) in [
        (
            230,
            "inline write of 64 B",
            IBV_WR_RDMA_WRITE,
            IBV_SEND_INLINE,
        ),
        (230, "inline send of 64 B", IBV_WR_SEND, IBV_SEND_INLINE),
        (190, "write of one entry", IBV_WR_RDMA_WRITE, 0),
        (190, "send of one entry", IBV_WR_SEND, 0),
        (190, "read", IBV_WR_RDMA_READ, 0),
        (190, "addition", IBV_WR_ATOMIC_FETCH_AND_ADD, 0),
    ] {
        let pair = Pair::new();
        let mut wr = wr(opcode, &mut entries, flags | IBV_SEND_SIGNALED);
        at_most(bound, what, instructions(|| pair.send(&mut wr)));
    }
    let pair = Pair::new();
    let mut request = ibv_recv_wr {
        sg_list: entries.as_mut_ptr(),
        num_sge: 1,
        ..Default::default()
    };
    let count = instructions(|| pair.receive(&mut request));
    at_most(120, "receive of one entry", count);
    at_most(80, "polling for nothing", instructions(|| pair.poll(16, 0)));

    let mut wr = wr(IBV_WR_SEND, &mut entries, IBV_SEND_SIGNALED);
    for _ in 0..32 {
        pair.send(&mut wr);
        pair.receive(&mut request);
    }
    for (bounds, what, flags) in [
        ((165, 105), "completion of a send", 0),
        ((180, 125), "completion of a receive", COMPLETION_RECEIVE),
    ] {
        pair.complete(0..32, flags);
        let one = instructions(|| pair.poll(1, 1));
        at_most(bounds.0, what, one);
        let each = instructions(|| pair.poll(16, 16)) / 16;
        at_most(bounds.1, &format!("{what}, one of sixteen"), each);
    }
}
