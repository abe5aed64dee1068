// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion handlers of low latency: who may have them, and how much of others' work they wait for.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::growth::Stopped;
use super::moving::shown;
use super::{basics, VmTest};
use crate::cluster::Cluster;
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::Vm;

/// Where handlers of the second machine share a vector.
pub const SHARED: &[VmTest] = &[
    VmTest::new(
        "a handler of low latency is served before a bulk one of the same vector",
        same_vector,
    ),
    VmTest::new("only who may marks handlers and uses those", rights),
];

/// Where each handler has its own, on two processors at least.
pub const APART: &[VmTest] = &[VmTest::new(
    "a handler of low latency is served before a bulk one of the same processor",
    same_processor,
)];

/// Bulk events of each round (`verbs-check run turns`), and the most of them that one of low latency waits for:
/// a turn of the driver.
const CROWD: u64 = 64;
const TURN: u64 = 16;
/// Rounds in which one that is not marked has to wait, at the least one of them: its interrupt may overtake.
const UNMARKED: u32 = 6;
/// Rounds in which a marked one does not.
const ROUNDS: u32 = 3;

fn handlers(vm: &Vm) -> Result<Vec<Value>> {
    let text = vm.sh("ferritectl handler list --json")?;
    let shown: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let rows = shown["handlers"].as_array().with_context(|| text.clone())?;
    Ok(rows.clone())
}

/// Sets the priority of a handler, and looks whether that is what it is.
fn set(vm: &Vm, handler: u32, priority: &str) -> Result<()> {
    vm.sh(&format!("ferritectl handler priority {handler} {priority}"))?;
    let now = &handlers(vm)?[handler as usize]["priority"];
    ensure!(now == priority, "handler {handler} is {now}");
    Ok(())
}

/// A program that has many completion queues at one handler of a machine, and one at another; and its peer.
struct Turns<'a> {
    machine: &'a Vm,
    peer: &'a Vm,
    round: u32,
}

impl Turns<'_> {
    /// How many bulk events were handled before that of the one queue, which was raised last while the
    /// machine did not run.
    fn next(&mut self) -> Result<u64> {
        self.round += 1;
        let (round, peer) = (self.round, self.peer);
        let waits = peer.wait_for(
            &format!("grep -q 'waits for /run/go-{round}$' /run/turns"),
            Duration::from_secs(60),
        );
        let counted = waits.and_then(|()| {
            let stopped = Stopped::new(self.machine);
            peer.sh(&format!("touch /run/go-{round}"))?;
            let done = peer.wait_for(
                &format!("grep -q 'done with /run/go-{round}$' /run/turns"),
                Duration::from_secs(60),
            );
            drop(stopped);
            done?;
            peer.wait_for(
                &format!("grep -q '^round {round}: ' /run/turns"),
                Duration::from_secs(60),
            )?;
            peer.sh(&format!(
                "sed -n 's/^round {round}: after \\([0-9]*\\) .*/\\1/p' /run/turns"
            ))
        });
        let text = counted.with_context(|| peer.sh("cat /run/turns").unwrap_or_default())?;
        text.trim().parse().with_context(|| text.clone())
    }
}

/// Runs `test` while handlers `bulk` and `other` of a machine have such queues.
fn with_turns(
    (machine, peer): (&Vm, &Vm),
    (bulk, other): (u32, u32),
    rounds: u32,
    test: impl FnOnce(&mut Turns<'_>) -> Result<()>,
) -> Result<()> {
    const PORT: u16 = 18640;
    let time = Duration::from_secs(300);
    let server = machine.spawn(
        // Vector 0 is no wish: it is had on its processor.
        &format!("{DEVICE_AND_GID} exec taskset -c 0 verbs-check serve --port {PORT}"),
        time,
    )?;
    wait_listening(machine, PORT)?;
    peer.sh("rm -f /run/go-* /run/turns")?;
    let client = peer.spawn(
        &format!(
            "exec verbs-check run turns --go /run/go --rounds {rounds} --vectors {bulk},{other} \
                 --peer {} --port {PORT} --ack-timeout {} >/run/turns 2>&1",
            machine.ip(),
            machine.ack_timeout()
        ),
        time,
    )?;
    let mut turns = Turns {
        machine,
        peer,
        round: 0,
    };
    let tested = test(&mut turns);
    // What is left of the rounds needs no machine that is stopped.
    peer.sh(&format!("touch $(seq -f /run/go-%g {rounds})"))?;
    let outcome = client.wait()?;
    let out = peer.sh("cat /run/turns")?;
    server.signal(libc::SIGTERM)?;
    let served = server.wait()?;
    for handler in [bulk, other] {
        set(machine, handler, "bulk")?;
    }
    tested?;
    if !outcome.ok() || !out.contains("0 failed") {
        bail!("{out}--- server:\n{}{}", served.out, served.err);
    }
    Ok(())
}

/// Compares in one run how many bulk events `other` waits for, as it is and as one of low latency. Returns whether
/// it ever had to wait for them.
fn compare(machines: (&Vm, &Vm), bulk: u32, other: u32) -> Result<bool> {
    let mut waited = false;
    with_turns(machines, (bulk, other), UNMARKED + 1 + ROUNDS, |turns| {
        let (mut unmarked, mut marked) = (Vec::new(), Vec::new());
        while !waited && unmarked.len() < UNMARKED as usize {
            unmarked.push(turns.next()?);
            waited = unmarked.last() >= Some(&(CROWD / 2));
        }
        // By its number: one that was made without a wish would leave.
        for cq in shown(machines.0, "cqs")? {
            if cq["comm"] == "verbs-check" && cq["handler"] == other {
                machines
                    .0
                    .sh(&format!("ferritectl cq move {} {other}", cq["cqn"]))?;
            }
        }
        set(machines.0, other, "low-latency")?;
        // The driver learns by its first interrupt where it is served.
        turns.next()?;
        for _ in 0..ROUNDS {
            marked.push(turns.next()?);
        }
        println!(
            "          bulk events before that of handler {other}: {unmarked:?}, marked {marked:?}"
        );
        ensure!(
            marked.iter().all(|before| *before <= TURN),
            "handler {other} of low latency waited for {marked:?} of {CROWD} events"
        );
        Ok(())
    })?;
    Ok(waited)
}

fn same_vector(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let rows = handlers(two)?;
    ensure!(
        rows.len() > 1 && rows[0]["irq"] == rows[1]["irq"],
        "handlers do not share: {rows:?}"
    );
    // The second is served after the first, unless it is marked.
    ensure!(compare((two, one), 0, 1)?, "a bulk handler did not wait");
    super::still_works(cluster)
}

fn same_processor(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let rows = handlers(one)?;
    let mut homes = Vec::new();
    for row in &rows[..2] {
        let irq = row["irq"].as_u64().context("no irq")?;
        let home = one.sh(&format!("cat /proc/irq/{irq}/smp_affinity_list"))?;
        homes.push((irq, home));
    }
    ensure!(homes[0].0 != homes[1].0, "handlers share: {rows:?}");
    for (irq, _) in &homes {
        one.sh(&format!("echo 0 >/proc/irq/{irq}/smp_affinity_list"))?;
    }
    let compared = (|| {
        // Which of two interrupts that wait is taken first is the processor's choice: it is the same each
        // time, and one of the two has to wait.
        let machines = (one, two);
        let waited = compare(machines, 0, 1)?;
        // Where there is no time, only the one that has to wait is tried.
        if waited && !cluster.thorough() {
            return Ok(());
        }
        let other_waited = compare(machines, 1, 0)?;
        ensure!(waited || other_waited, "no bulk handler had to wait");
        Ok(())
    })();
    for (irq, home) in &homes {
        one.sh(&format!(
            "echo {} >/proc/irq/{irq}/smp_affinity_list",
            home.trim()
        ))?;
    }
    compared?;
    super::still_works(cluster)
}

fn rights(cluster: &Cluster) -> Result<()> {
    basics::alone(cluster, "priority")?;
    let (one, _) = cluster.two()?;
    let count = handlers(one)?.len();
    for (script, why) in [
        (
            format!("ferritectl handler priority {count} low-latency"),
            "no handler",
        ),
        ("ferritectl handler priority 0 fast".into(), "invalid value"),
        (
            "setpriv --reuid 65534 --clear-groups ferritectl handler priority 0 low-latency".into(),
            "only root",
        ),
        (
            "echo 0 low-latency now >/sys/kernel/debug/ferrite0/handler_priority".into(),
            "nvalid argument",
        ),
        (
            "head -c 4096 /dev/zero >/sys/kernel/debug/ferrite0/handler_priority".into(),
            "nvalid argument",
        ),
    ] {
        let outcome = one.run(&script, Duration::from_secs(60))?;
        ensure!(
            !outcome.ok() && outcome.err.contains(why),
            "{script}: {outcome:?}"
        );
    }
    let rows = handlers(one)?;
    ensure!(
        rows.iter().all(|row| row["priority"] == "bulk"),
        "{rows:?} after refusals"
    );
    Ok(())
}
