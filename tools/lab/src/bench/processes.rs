// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What processes of this machine use: time, and where in their code they are.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

/// What a process has used so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Seconds in its own code.
    pub user: f64,
    /// Seconds in the kernel for it.
    pub system: f64,
    /// Times it waited for something.
    pub waits: u64,
    /// Times it was made to wait.
    pub preempted: u64,
}

impl std::ops::Sub for Usage {
    type Output = Self;

    /// What was used in between.
    fn sub(self, earlier: Self) -> Self {
        Self {
            user: self.user - earlier.user,
            system: self.system - earlier.system,
            waits: self.waits.saturating_sub(earlier.waits),
            preempted: self.preempted.saturating_sub(earlier.preempted),
        }
    }
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// What a process has used.
pub fn usage(pid: u32) -> Result<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("no process {pid}"))?;
    // The second field is a name in parentheses that may hold anything.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // SAFETY: no memory is involved.
    let tick = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let ticks = |index: usize| -> f64 {
        fields
            .get(index)
            .and_then(|text| text.parse::<f64>().ok())
            .unwrap_or(0.0)
            / tick
    };
    let mut usage = Usage {
        user: ticks(11),
        system: ticks(12),
        ..Usage::default()
    };
    for thread in threads(pid) {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status"));
        let status = status.unwrap_or_default();
        usage.waits += field(&status, "voluntary_ctxt_switches:");
        usage.preempted += field(&status, "nonvoluntary_ctxt_switches:");
    }
    Ok(usage)
}

/// Nanoseconds that all threads of a process have run.
pub fn processor_time(pid: u32) -> u64 {
    threads(pid)
        .into_iter()
        .filter_map(|thread| {
            fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).ok()
        })
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

fn threads(pid: u32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Where a process was found, by how often.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    /// Looks at a thread.
    pub looks: u64,
    /// Of these, the thread was running or ready to.
    pub running: u64,
    /// Where it was then: an address, or the number of a call to the kernel.
    places: BTreeMap<Place, u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Code(u64),
    Kernel(i64),
}

fn running(pid: u32, thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).unwrap_or_default();
    let rest = stat.rsplit(')').next().unwrap_or_default();
    rest.split_whitespace().next() == Some("R")
}

/// Looks into a running thread: stops it for a moment and reads its registers.
fn look(thread: i32) -> Option<Place> {
    // SAFETY: the thread was seized by this one; registers are written to a local of their type;
    // the thread goes on whatever happened.
    unsafe {
        if libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0) != 0 {
            return None;
        }
        let mut status = 0;
        if libc::waitpid(thread, &mut status, libc::__WALL) != thread {
            return None;
        }
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        let got = libc::ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut registers) == 0;
        libc::ptrace(libc::PTRACE_CONT, thread, 0, 0);
        if !got {
            return None;
        }
        // Outside of a call the field is -1.
        Some(match registers.orig_rax as i64 {
            number if number >= 0 => Place::Kernel(number),
            _ => Place::Code(registers.rip),
        })
    }
}

/// Looks at all threads of a process again and again, until told to stop. Threads that wait are
/// left alone: a call to the kernel that is interrupted may not go on as if nothing had been.
pub fn sample(pid: u32, stop: &AtomicBool) -> Samples {
    let mut samples = Samples::default();
    let seized: Vec<i32> = threads(pid)
        .into_iter()
        .filter(|thread| {
            // SAFETY: no memory is involved.
            unsafe { libc::ptrace(libc::PTRACE_SEIZE, *thread, 0, 0) == 0 }
        })
        .collect();
    while !stop.load(Ordering::Relaxed) {
        for thread in &seized {
            samples.looks += 1;
            if running(pid, *thread) {
                samples.running += 1;
                if let Some(place) = look(*thread) {
                    *samples.places.entry(place).or_default() += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    for thread in &seized {
        // A thread can only be let go while it is stopped; where this fails, the end of this
        // thread does it.
        // SAFETY: as in `look`.
        unsafe {
            if libc::ptrace(libc::PTRACE_INTERRUPT, *thread, 0, 0) == 0 {
                let mut status = 0;
                let stopped = libc::waitpid(*thread, &mut status, libc::__WALL) == *thread;
                if stopped {
                    libc::ptrace(libc::PTRACE_DETACH, *thread, 0, 0);
                }
            }
        }
    }
    samples
}

/// Names of calls to the kernel that a device process makes.
fn call_name(number: i64) -> String {
    let name = match number {
        libc::SYS_read => "read",
        libc::SYS_write => "write",
        libc::SYS_readv => "readv",
        libc::SYS_writev => "writev",
        libc::SYS_recvmsg => "recvmsg",
        libc::SYS_sendmsg => "sendmsg",
        libc::SYS_recvfrom => "recvfrom",
        libc::SYS_sendto => "sendto",
        libc::SYS_recvmmsg => "recvmmsg",
        libc::SYS_sendmmsg => "sendmmsg",
        libc::SYS_epoll_wait => "epoll_wait",
        libc::SYS_epoll_pwait => "epoll_pwait",
        libc::SYS_poll => "poll",
        libc::SYS_ppoll => "ppoll",
        libc::SYS_futex => "futex",
        libc::SYS_sched_yield => "sched_yield",
        other => return format!("kernel: call {other}"),
    };
    format!("kernel: {name}")
}

/// The functions a process was found in, most frequent first, with the share of all looks at
/// running threads.
pub fn functions(pid: u32, program: &Path, samples: &Samples) -> Vec<(String, f64)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let wanted = program
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let wanted = wanted.unwrap_or_default();
    let base = maps
        .lines()
        .find(|line| line.ends_with(&wanted))
        .and_then(|line| u64::from_str_radix(line.split('-').next()?, 16).ok())
        .unwrap_or(0);
    let end = maps
        .lines()
        .filter(|line| line.ends_with(&wanted))
        .filter_map(|line| {
            let range = line.split_whitespace().next()?;
            u64::from_str_radix(range.split('-').nth(1)?, 16).ok()
        })
        .max()
        .unwrap_or(0);
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    let mut code = Vec::new();
    for (place, count) in &samples.places {
        match place {
            Place::Kernel(number) => *sums.entry(call_name(*number)).or_default() += count,
            Place::Code(at) if (base..end).contains(at) => code.push((at - base, *count)),
            Place::Code(_) => *sums.entry("libraries (memcpy, libc)".into()).or_default() += count,
        }
    }
    if !code.is_empty() {
        let mut tool = Command::new("addr2line");
        tool.args(["-f", "-C", "-e"]).arg(program);
        for (at, _) in &code {
            tool.arg(format!("{at:#x}"));
        }
        let out = tool.output().map(|out| out.stdout).unwrap_or_default();
        let out = String::from_utf8_lossy(&out).into_owned();
        let names: Vec<&str> = out.lines().step_by(2).collect();
        for (index, (at, count)) in code.iter().enumerate() {
            let name = match names.get(index) {
                Some(name) if *name != "??" => (*name).to_owned(),
                _ => format!("{at:#x}"),
            };
            *sums.entry(name).or_default() += count;
        }
    }
    let total: u64 = sums.values().sum();
    let mut all: Vec<(String, f64)> = sums
        .into_iter()
        .map(|(name, count)| (name, count as f64 / total.max(1) as f64))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// Mebibytes that no cache holds.
pub const MANY: usize = 128;

/// Bytes a second that this machine copies, from one mebibyte to another: the same two again and
/// again, and through so many that no cache holds them.
pub fn memcpy_speed() -> (f64, f64) {
    const BLOCK: usize = 1 << 20;
    let source = vec![1_u8; BLOCK * MANY];
    let mut target = vec![2_u8; BLOCK * MANY];
    let mut best = |blocks: usize| {
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            let start = std::time::Instant::now();
            for index in 0..MANY {
                let at = index % blocks * BLOCK;
                target[at..at + BLOCK].copy_from_slice(&source[at..at + BLOCK]);
                std::hint::black_box(&mut target);
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        (BLOCK * MANY) as f64 / best
    };
    (best(1), best(MANY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_what_it_uses() {
        let before = usage(std::process::id()).expect("this process");
        // On a busy machine it may take a while to get a processor for so long.
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        let spent = loop {
            let used = usage(std::process::id()).expect("this process") - before;
            let spent = used.user + used.system > 0.0;
            if spent && processor_time(std::process::id()) > 30_000_000 {
                break true;
            }
            if std::time::Instant::now() > deadline {
                break false;
            }
            std::hint::spin_loop();
        };
        assert!(spent, "neither clock says that time was spent");
        assert_eq!(processor_time(0x7fff_ffff), 0);
        assert!(usage(0x7fff_ffff).is_err());
    }

    #[test]
    fn a_running_child_is_seen_running() {
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("a shell");
        let stop = AtomicBool::new(false);
        let pid = child.id();
        let samples = std::thread::scope(|scope| {
            let sampling = scope.spawn(|| sample(pid, &stop));
            std::thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            sampling.join().expect("samples")
        });
        let found = functions(pid, Path::new("/bin/sh"), &samples);
        child.kill().expect("killed");
        child.wait().expect("gone");
        assert!(samples.running > 0 && samples.running <= samples.looks);
        assert!(!found.is_empty());
    }
}
