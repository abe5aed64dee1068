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
pub(crate) const MAX_THREADS: usize = 16;

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
        start(&mut state);
    }
}

/// Files that are not closed yet.
pub fn pending() -> usize {
    let mut state = state();
    // Nobody may come who closes another: this is the next try.
    if state.threads == 0 && !state.waiting.is_empty() {
        start(&mut state);
    }
    state.waiting.len() + state.threads
}

/// Starts one more thread, if it can be had: without any the files stay open
/// until the next try.
fn start(state: &mut State) {
    let builder = thread::Builder::new().name("closer".into());
    if builder.spawn(run).is_ok() {
        state.threads += 1;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn what_was_left_without_a_thread_is_closed_by_who_asks() {
        // As if no thread could be had at the time.
        let file = std::fs::File::open("/dev/null").unwrap();
        state().waiting.push_back(file.into());
        let end = Instant::now() + Duration::from_secs(120);
        while pending() > 0 {
            assert!(Instant::now() < end, "nobody closes it");
            thread::yield_now();
        }
    }
}
