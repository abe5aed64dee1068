// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long steps: progress on the screen, everything else in a log, the log's end on failure.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::process::{check_interrupted, tie};
use crate::{CACHE, OUT};

/// How often a long step says that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Prints one line about what happens next.
pub fn say(text: &str) {
    println!("ferrite: {text}");
}

/// The path a user can open for a path inside the root.
pub fn outside(path: &Path) -> PathBuf {
    for (inside, variable) in [
        (CACHE, "FERRITE_CACHE"),
        (OUT, "FERRITE_OUT"),
        (crate::PROJECT, "FERRITE_PROJECT"),
    ] {
        if let (Ok(rest), Some(real)) = (path.strip_prefix(inside), std::env::var_os(variable)) {
            return Path::new(&real).join(rest);
        }
    }
    path.to_owned()
}

/// The last `lines` lines of a file.
pub fn tail(path: &Path, lines: usize) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// A log file for a step, in the cache's log folder.
pub fn log_path(name: &str) -> PathBuf {
    let _ = fs::create_dir_all("/out/log");
    Path::new("/out/log").join(format!("{name}.log"))
}

/// Runs a command to its end with its output appended to `log`; fails with the log's end.
pub fn run(command: &mut Command, log: &Path) -> Result<()> {
    run_within(command, log, None)
}

/// [`run`], but not for longer than `limit`.
pub fn run_within(command: &mut Command, log: &Path, limit: Option<Duration>) -> Result<()> {
    let file = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("opening {}", log.display()))?;
    let mut child = tie(command)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("starting {:?}", command.get_program()))?;
    let start = Instant::now();
    let mut next = start + HEARTBEAT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let in_time = || match limit {
            Some(limit) if start.elapsed() >= limit => bail!(
                "{:?} was ended after {} s; the end of {}:\n{}",
                command.get_program(),
                limit.as_secs(),
                outside(log).display(),
                tail(log, 40)
            ),
            _ => Ok(()),
        };
        if let Err(error) = check_interrupted().and_then(|()| in_time()) {
            // SAFETY: no memory is involved; the group is this child's own (`tie`).
            unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
            let _ = child.wait();
            return Err(error);
        }
        if Instant::now() >= next {
            next += HEARTBEAT;
            let mut last = tail(log, 1);
            if let Some((at, _)) = last.char_indices().nth(90) {
                last.truncate(at);
            }
            println!("      ... {} s  {}", start.elapsed().as_secs(), last.trim());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        bail!(
            "{:?} failed ({status}); the end of {}:\n{}",
            command.get_program(),
            outside(log).display(),
            tail(log, 40)
        );
    }
    Ok(())
}

/// Runs a short command and gives its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let out = tie(command)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {:?}", command.get_program()))?;
    if !out.status.success() {
        bail!(
            "{:?} failed ({}): {}",
            command,
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// A shell command line as a [`Command`].
pub fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/bash");
    command.args(["-euo", "pipefail", "-c", script]);
    command
}
