// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Child processes that never outlive the lab, and the lab's own interruption.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_signal: libc::c_int) {
    if INTERRUPTED.swap(true, Ordering::SeqCst) {
        // The second one means it: leave at once; the namespace takes the children along.
        // SAFETY: `_exit` is async-signal-safe and does not return.
        unsafe { libc::_exit(130) };
    }
}

/// Makes SIGINT, SIGTERM and SIGHUP end the run in order: every wait in the lab notices.
pub fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `on_signal` only touches an atomic and calls an async-signal-safe function.
        unsafe {
            libc::signal(signal, on_signal as *const () as libc::sighandler_t);
        }
    }
}

/// Fails when somebody asked the lab to stop.
pub fn check_interrupted() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    Ok(())
}

/// A lock that a panic elsewhere does not spoil.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long who waits sleeps before the next look, who has waited for so long: what takes long is looked for less
/// often. A look may be a program that is started in a guest, which takes time from what is waited for.
fn pause_after(waited: Duration) -> Duration {
    (waited / 32).clamp(Duration::from_millis(20), Duration::from_millis(250))
}

/// Sleeps in small steps until `ready` says so; false when the deadline came first.
pub fn wait_until(deadline: Instant, mut ready: impl FnMut() -> Result<bool>) -> Result<bool> {
    let start = Instant::now();
    loop {
        if ready()? {
            return Ok(true);
        }
        check_interrupted()?;
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(pause_after(start.elapsed()));
    }
}

/// Makes the command's process die with the lab and lead a process group of its own.
pub fn tie(command: &mut Command) -> &mut Command {
    // SAFETY: only async-signal-safe calls are made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setpgid(0, 0);
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    }
}

/// A long-running child with its output in a log; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    log: std::path::PathBuf,
}

impl Daemon {
    /// Starts `command` with both output streams in `log`.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let child = tie(command)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {name} ({:?})", command.get_program()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// What it is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file its output goes to.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Fails with the end of its log when it has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.ended()? {
            bail!(
                "{} ended ({status}); its last words:\n{}",
                self.name,
                crate::step::tail(&self.log, 20)
            );
        }
        Ok(())
    }

    /// Waits until it has ended by itself.
    pub fn wait_for_end(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while self.ended()?.is_none() {
            if Instant::now() > deadline {
                bail!("{} does not end", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Kills it and everything in its process group, and waits for the end.
    pub fn kill(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let group = -(self.child.id() as libc::pid_t);
            // SAFETY: no memory is involved; the group is this child's own (`tie`).
            unsafe { libc::kill(group, libc::SIGKILL) };
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An exclusive lock on a file, given back when dropped.
#[derive(Debug)]
pub struct FileLock(#[allow(dead_code)] File);

impl FileLock {
    /// Waits for the lock, saying so when it has to.
    pub fn take(path: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .with_context(|| format!("opening {}", path.display()))?;
        let mut said = false;
        loop {
            // SAFETY: the descriptor is open for as long as `file` lives.
            let rc = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
            if rc == 0 {
                return Ok(Self(file));
            }
            check_interrupted()?;
            if !said {
                println!(
                    "      another run, or a step beside this one, holds {}; waiting",
                    path.display()
                );
                said = true;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Whether somebody holds the lock.
    pub fn is_taken(path: &Path) -> bool {
        let Ok(file) = File::open(path) else {
            return false;
        };
        // SAFETY: the descriptor is open for as long as `file` lives.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) != 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_further_apart_the_longer_it_takes() {
        let after = |waited| pause_after(Duration::from_millis(waited)).as_millis();
        assert_eq!([0, 640, 3200, 60_000].map(after), [20, 20, 100, 250]);
    }
}
