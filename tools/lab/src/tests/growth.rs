// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event queues that are out of room: they grow while events come, and none is lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::json;

use super::{basics, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::wait_listening;
use crate::vm::Vm;

/// On machines with the driver loaded, which have it loaded as usual afterwards.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "tiny event queues grow under a flood of events, and none is lost",
        flood,
    ),
    VmTest::new(
        "event queue 0 grows under a flood of events, and answers still come",
        control,
    ),
    VmTest::new(
        "threads find nothing wrong while event queues grow",
        threads,
    ),
];

/// Entries of the smallest event queue.
const TINY: u64 = 16;
/// The event queues of commands, of asynchronous events and of the first completion handler.
const CONTROL: u64 = 0;
const ASYNC: u64 = 1;
const HANDLER: u64 = 2;

/// A machine that does not run until this is dropped. Its device does.
struct Stopped<'a>(&'a Vm);

impl<'a> Stopped<'a> {
    fn new(vm: &'a Vm) -> Self {
        signal(vm, libc::SIGSTOP);
        Self(vm)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        signal(self.0, libc::SIGCONT);
    }
}

fn signal(vm: &Vm, signal: i32) {
    // SAFETY: The process is one that the lab has started and not waited for.
    unsafe { libc::kill(vm.pid() as i32, signal) };
}

/// Loads the driver anew with parameters.
fn load(vm: &Vm, parameters: &str) -> Result<()> {
    vm.sh_in(
        &format!("rmmod ferrite; {} {parameters}", crate::shell::LOAD_DRIVER),
        Duration::from_secs(60),
    )?;
    wait_active(vm)
}

/// What debugfs says of an event queue, by name.
pub type Row = BTreeMap<String, String>;

/// What debugfs says of each event queue, by number.
pub fn event_queues(vm: &Vm) -> Result<BTreeMap<u64, Row>> {
    let text = vm.sh("cat /sys/kernel/debug/ferrite0/eqs")?;
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().context("eqs is empty")?.split(' ').collect();
    lines
        .map(|line| {
            let row: Row = names
                .iter()
                .map(|name| (*name).to_owned())
                .zip(line.split(' ').map(str::to_owned))
                .collect();
            Ok((number(&row, "eqn")?, row))
        })
        .collect()
}

/// A number in such a row.
pub fn number(row: &Row, name: &str) -> Result<u64> {
    row.get(name)
        .and_then(|value| value.parse().ok())
        .with_context(|| format!("no {name} in {row:?}"))
}

/// Entries of an event queue, and how often it was out of room.
fn room(vm: &Vm, eqn: u64) -> Result<(u64, u64)> {
    let queues = event_queues(vm)?;
    let row = queues
        .get(&eqn)
        .with_context(|| format!("no event queue {eqn}"))?;
    Ok((number(row, "entries")?, number(row, "overflows")?))
}

/// Runs `test` on machines of which the first has tiny event queues.
fn with_tiny_queues(cluster: &Cluster, test: impl FnOnce(&Vm, &Vm) -> Result<()>) -> Result<()> {
    let (one, two) = cluster.two()?;
    load(one, "eq_log_entries=4")?;
    for (eqn, row) in event_queues(one)? {
        // Those that serve nobody yet, that is.
        if eqn > CONTROL && number(&row, "entries")? != TINY {
            bail!("event queue {eqn} begins with {row:?}");
        }
    }
    test(one, two)?;
    load(one, "")
}

fn flood(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |one, two| {
        // The second time they have to grow further, if at all: they are larger by then.
        for round in 0..2 {
            flood_once(one, two, round)?;
        }
        for eqn in [ASYNC, HANDLER] {
            let (entries, overflows) = room(one, eqn)?;
            println!("          event queue {eqn}: {entries} entries, {overflows} overflows");
            // Sixteen have to become more than a hundred, by doubling.
            if entries < 8 * TINY || overflows < 3 {
                bail!("event queue {eqn} has {entries} entries after {overflows} overflows");
            }
        }
        Ok(())
    })
}

fn flood_once(one: &Vm, two: &Vm, round: u32) -> Result<()> {
    let port = 18610 + round as u16;
    let server = one.spawn(
        &format!(
            "{} exec verbs-check serve --port {port}",
            crate::traffic::DEVICE_AND_GID
        ),
        Duration::from_secs(300),
    )?;
    wait_listening(one, port)?;
    two.sh("rm -f /run/go-* /run/flood")?;
    let client = two.spawn(
        &format!(
            "exec verbs-check run flood --go /run/go --peer {} --port {port} --ack-timeout {} \
                 >/run/flood 2>&1",
            one.ip(),
            one.ack_timeout()
        ),
        Duration::from_secs(280),
    )?;
    for step in [1, 2] {
        let waits = two.wait_for(
            &format!("grep -q 'waits for /run/go-{step}' /run/flood"),
            Duration::from_secs(60),
        );
        waits
            .and_then(|()| {
                let stopped = Stopped::new(one);
                two.sh(&format!("touch /run/go-{step}"))?;
                let done = two.wait_for(
                    &format!("grep -q 'done with /run/go-{step}' /run/flood"),
                    Duration::from_secs(30),
                );
                drop(stopped);
                done
            })
            .with_context(|| two.sh("cat /run/flood").unwrap_or_default())?;
    }
    let outcome = client.wait()?;
    let out = two.sh("cat /run/flood")?;
    server.signal(libc::SIGTERM)?;
    let served = server.wait()?;
    if !outcome.ok() || !out.contains("0 failed") {
        bail!("{out}--- server:\n{}{}", served.out, served.err);
    }
    Ok(())
}

fn control(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |one, _| {
        let before = room(one, CONTROL)?;
        let stopped = Stopped::new(one);
        for change in 0..100 {
            cluster.device_command(1, &json!({"cmd": "link", "up": change % 2 == 1}))?;
        }
        drop(stopped);
        let mut after = before;
        let grown = wait_until(Instant::now() + Duration::from_secs(30), || {
            after = room(one, CONTROL)?;
            Ok(after.0 >= 8 * TINY)
        })?;
        println!("          event queue 0: {before:?} to {after:?}");
        if !grown {
            bail!("event queue 0 had (entries, overflows) {before:?}, and has {after:?}");
        }
        wait_active(one)?;
        super::still_works(cluster)
    })
}

fn threads(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |_, _| {
        basics::alone(cluster, "threads")?;
        basics::verbs_check(cluster, "events")
    })
}
