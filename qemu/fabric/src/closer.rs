// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Closes files whose close may take long, where nobody waits for it.
//!
//! With a socket everything goes that lies unread in it, descriptors that
//! another process has sent included. If such a one is the last of its file,
//! that is closed in turn, and another process has chosen what that means: a
//! TCP connection with `SO_LINGER` and unsent data waits for its peer.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// Closes that may be stuck before others have to wait for them.
const MAX_THREADS: usize = 16;

#[derive(Debug)]
struct State {
    waiting: VecDeque<OwnedFd>,
    threads: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    waiting: VecDeque::new(),
    threads: 0,
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes a file at some time; never waits.
pub fn close(file: OwnedFd) {
    let mut state = state();
    state.waiting.push_back(file);
    // Each thread that is there takes one more at least, if it is not stuck.
    if state.threads < MAX_THREADS {
        let builder = thread::Builder::new().name("closer".into());
        // Without a thread the file stays open until there is one.
        if builder.spawn(run).is_ok() {
            state.threads += 1;
        }
    }
}

/// Files that are not closed yet.
pub fn pending() -> usize {
    let state = state();
    state.waiting.len() + state.threads
}

fn run() {
    loop {
        let mut state = state();
        let Some(file) = state.waiting.pop_front() else {
            state.threads -= 1;
            return;
        };
        // Others go on meanwhile.
        drop(state);
        drop(file);
    }
}
