// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for processes, in the tests of those.

use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};

/// How long anything may take.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Waits until something is so.
pub fn until(mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "the condition never came true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Stops a process, and waits until it does nothing any more. `CONT` has it go on.
pub fn stop(child: &Child) -> Pid {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).unwrap();
    until(|| {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ")
                .next()
                .is_some_and(|rest| rest.starts_with('T'))
        })
    });
    pid
}
