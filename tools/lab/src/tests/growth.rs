// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event queues that are out of room: they grow while events come, and none is lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use super::{allocations, basics, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{wait_connected, wait_listening};
use crate::vm::Vm;

/// On machines with the driver loaded, which have it loaded as usual afterwards.
pub const TESTS: &[VmTest] = &[VmTest::new(
    "tiny event queues grow under a flood of events, and none is lost",
    flood,
)];

/// The same with more than one thread, for the long run.
pub const THREADS: &[VmTest] = &[VmTest::new(
    "threads find nothing wrong while event queues grow",
    threads,
)];

/// On the unmodified Debian kernel.
pub const FAILING: &[VmTest] = &[VmTest::new(
    "a thousand queue pairs fail at once with tiny event queues, and others go on",
    |cluster| with_tiny_queues(cluster, |one, two| all_fail(one, two, 1000)),
)];

/// The same, with as many as the device has, of some minutes.
pub const LONG: &[VmTest] = &[VmTest::new(
    "sixteen thousand queue pairs fail at once, and others go on",
    |cluster| {
        let (one, two) = cluster.two()?;
        all_fail(one, two, 16_000)?;
        with_tiny_queues(cluster, |one, two| all_fail(one, two, 16_000))
    },
)];

/// With the kernel's fault injection.
pub const STARVED: &[VmTest] = &[VmTest::new(
    "an event queue that finds no memory to grow does when there is some",
    starved,
)];

/// Has so many queue pairs of one program fail while another one is served, which is not to notice.
fn all_fail(one: &Vm, two: &Vm, count: u32) -> Result<()> {
    const PORT: u16 = 18630;
    let time = Duration::from_secs(600);
    let pingpong = format!(
        "{} exec ibv_rc_pingpong -d $dev -g $gid -p {PORT} -s 64 -n 100000000 -e",
        crate::traffic::DEVICE_AND_GID
    );
    let server = one.spawn(&pingpong, time)?;
    wait_listening(one, PORT)?;
    let client = two.spawn(&format!("{pingpong} {}", one.ip()), time)?;
    wait_connected(one)?;
    let events = |eqn| -> Result<u64> {
        let queues = event_queues(one)?;
        number(queues.get(&eqn).context("no such queue")?, "events")
    };
    let before = events(ASYNC)?;
    let failed = one.sh_in(
        &format!("verbs-check run failures --count {count} 2>&1"),
        time,
    );
    // The other program goes on, by its interrupts.
    let served = events(HANDLER)?;
    let goes_on = wait_until(
        Instant::now() + one.at_most(Duration::from_secs(60)),
        || Ok(events(HANDLER)? > served + 10),
    );
    for running in [client, server] {
        running.end_with(libc::SIGKILL)?;
    }
    println!(
        "          (entries, overflows): {:?}",
        [room(one, 0)?, room(one, ASYNC)?]
    );
    failed.context("the queue pairs that fail")?;
    if !goes_on? {
        bail!("the other program stands still");
    }
    let told = events(ASYNC)? - before;
    if told < u64::from(count) {
        bail!("{told} asynchronous events of {count} queue pairs");
    }
    Ok(())
}

/// Entries of the smallest event queue.
const TINY: u64 = 16;
/// The event queues of asynchronous events and of the first completion handler.
const ASYNC: u64 = 1;
const HANDLER: u64 = 2;

/// A machine that does not run until this is dropped. Its device does.
pub struct Stopped<'a>(&'a Vm);

impl<'a> Stopped<'a> {
    pub fn new(vm: &'a Vm) -> Self {
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
        // The first one has room for the answers to all commands.
        if eqn > 0 && number(&row, "entries")? != TINY {
            bail!("event queue {eqn} begins with {row:?}");
        }
    }
    test(one, two)?;
    load(one, "")
}

fn flood(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |one, two| {
        // How often they have to grow depends on how fast they are read meanwhile: twice at the least,
        // and after some rounds at the latest.
        let mut found = Vec::new();
        for round in 0..4 {
            flood_once(one, two, round)?;
            found = [ASYNC, HANDLER]
                .into_iter()
                .map(|eqn| room(one, eqn))
                .collect::<Result<Vec<_>>>()?;
            println!("          (entries, overflows): {found:?}");
            if found.iter().any(|&(entries, _)| entries == TINY) {
                bail!("a queue did not grow: {found:?}");
            }
            if found.iter().all(|&(entries, _)| entries >= 4 * TINY) {
                break;
            }
        }
        if found
            .iter()
            .any(|&(entries, overflows)| entries < 4 * TINY || overflows < 2)
        {
            bail!("queues have (entries, overflows) {found:?}");
        }
        super::still_works(cluster)
    })
}

fn starved(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |one, two| {
        allocations::fail_pages_of_work_items(one)?;
        // Nothing is lost for that.
        let flooded = flood_once(one, two, 0);
        let found = room(one, HANDLER);
        allocations::fail_no_more(one)?;
        flooded?;
        let (entries, overflows) = found?;
        println!("          without memory: {entries} entries, {overflows} overflows");
        if entries != TINY || overflows == 0 {
            bail!("it was not out of room, or had memory for more");
        }
        // It need not be out of room once more for that.
        let deadline = Instant::now() + one.at_most(Duration::from_secs(60));
        if !wait_until(deadline, || Ok(room(one, HANDLER)?.0 > TINY))? {
            bail!("it did not grow afterwards: {:?}", room(one, HANDLER)?);
        }
        super::still_works(cluster)
    })
}

fn flood_once(one: &Vm, two: &Vm, round: u32) -> Result<()> {
    let port = 18610 + round as u16;
    let server = one.spawn(
        &format!(
            // Its completion queues are at the first handler.
            "{} exec taskset -c 0 verbs-check serve --port {port}",
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

fn threads(cluster: &Cluster) -> Result<()> {
    with_tiny_queues(cluster, |_, _| {
        basics::alone(cluster, "threads")?;
        basics::verbs_check(cluster, "events")
    })
}
