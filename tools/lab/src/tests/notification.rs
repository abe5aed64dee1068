// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion handlers, their interrupts, and what an interrupt costs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};

use super::{vectors, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{perftest, pingpong};
use crate::vm::Vm;

/// With a vector for every processor.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "each completion vector has its own interrupt",
        vectors_move_apart,
    ),
    VmTest::new("no register is read after probe", no_reads_after_probe),
    VmTest::new(
        "one register write for each interrupt",
        one_write_per_interrupt,
    ),
    VmTest::new(
        "a device wakes the other for frames alone",
        wakes_are_for_frames,
    ),
    VmTest::new(
        "events about no queue are counted by class, and printed for who should know",
        classes,
    ),
];

/// With a vector for each of four processors on one machine, and with three in all on the other.
pub const FEW_VECTORS: &[VmTest] = &[VmTest::new(
    "events arrive with fewer vectors than processors",
    |cluster| vectors_of(cluster, 6, 3),
)];

/// With more vectors than two processors need on one machine, and with one in all on the other.
pub const ONE_VECTOR: &[VmTest] = &[VmTest::new(
    "events of all queues arrive by one vector",
    |cluster| vectors_of(cluster, 4, 1),
)];

/// Options of a device with so many vectors, and so many messages that fold onto them.
pub fn vectors(vectors: u16, messages: u16) -> Vec<String> {
    let (vectors, messages) = (vectors.to_string(), messages.to_string());
    vec!["--vectors".into(), vectors, "--messages".into(), messages]
}

/// How long something may take that is on its way.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often each MSI-X vector of the device has been taken, in the order of its table.
fn interrupts(vm: &Vm) -> Result<Vec<u64>> {
    let taken = vectors::taken(vm)?;
    Ok(taken.iter().map(|by_cpu| by_cpu.iter().sum()).collect())
}

fn vectors_move_apart(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let handlers: usize = two.sh("nproc")?.trim().parse()?;
    for handler in 0..handlers {
        let mut seen = Vec::new();
        // What is left of connections of other tests may come between: their ends are said again, seconds later.
        while !uses_one_vector(one, two, handler, handlers, &mut seen)? {
            ensure!(
                seen.len() < 5,
                "interrupts on vectors while {handler} was used: {seen:?}"
            );
        }
    }
    Ok(())
}

/// Whether a program that wants one handler of the second machine has interrupts on its vector alone. Adds how many
/// came on each, before and after, to `seen`.
fn uses_one_vector(
    one: &Vm,
    two: &Vm,
    handler: usize,
    handlers: usize,
    seen: &mut Vec<(Vec<u64>, Vec<u64>)>,
) -> Result<bool> {
    let before = interrupts(two)?;
    if before.len() < handlers + 2 {
        bail!("{} vectors for {handlers} handlers", before.len());
    }
    // Vector zero is no wish: it is had on its processor.
    let program = if handler == 0 {
        "taskset -c 0 ib_send_bw"
    } else {
        "ib_send_bw"
    };
    perftest(one, two, program, 4096, 200, &format!("-e -X {handler}"))?;
    let after = interrupts(two)?;
    // Vectors 0 and 1 are for commands and asynchronous events.
    let of_handlers = 2..2 + handlers;
    let right = before[of_handlers.clone()]
        .iter()
        .zip(&after[of_handlers])
        .enumerate()
        .all(|(other, (before, after))| (after > before) == (other == handler));
    seen.push((before, after));
    Ok(right)
}

/// Sum of one kind of access over the named classes, all classes where none are named.
pub(super) fn accesses(counters: &Value, kind: &str, only: Option<&str>) -> Result<u64> {
    let classes = counters["mmio"]
        .as_object()
        .with_context(|| format!("no mmio in the counters: {counters}"))?;
    let mut sum = 0;
    for (name, class) in classes {
        if only.is_none_or(|wanted| wanted == name) {
            sum += class[kind]
                .as_u64()
                .with_context(|| format!("no {name}.{kind} in the counters: {counters}"))?;
        }
    }
    Ok(sum)
}

fn no_reads_after_probe(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let before: Vec<Value> = [1, 2]
        .into_iter()
        .map(|i| cluster.counters(i))
        .collect::<Result<_>>()?;
    pingpong(one, two, 4096, 200, false)?;
    pingpong(one, two, 4096, 200, true)?;
    perftest(one, two, "ib_write_bw", 65536, 50, "")?;
    for (index, before) in [1, 2].into_iter().zip(&before) {
        let after = cluster.counters(index)?;
        let reads = accesses(&after, "reads", None)? - accesses(before, "reads", None)?;
        if reads != 0 {
            bail!("device {index}: {reads} register reads\nbefore {before}\nafter {after}");
        }
        let writes = accesses(&after, "writes", None)? - accesses(before, "writes", None)?;
        if writes == 0 {
            bail!("device {index}: the counters do not move: {after}");
        }
    }
    Ok(())
}

fn one_write_per_interrupt(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let sample = |vm: &Vm| -> Result<(u64, u64, u64)> {
        // A late interrupt would spoil the sum: wait until nothing moves.
        let mut last = None;
        let quiet = wait_until(Instant::now() + vm.at_most(PATIENCE), || {
            let counters = cluster.counters(vm.index)?;
            let now = (
                interrupts(vm)?.iter().sum::<u64>(),
                accesses(&counters, "writes", Some("eq_doorbell"))?,
                counters["engine"]["commands"]
                    .as_u64()
                    .with_context(|| format!("no commands in the counters: {counters}"))?,
            );
            let still = last == Some(now);
            last = Some(now);
            Ok(still)
        })?;
        match last {
            Some(sample) if quiet => Ok(sample),
            _ => bail!("{}: interrupts never rest", vm.name()),
        }
    };
    let before = [sample(one)?, sample(two)?];
    pingpong(one, two, 1024, 500, true)?;
    let after = [sample(one)?, sample(two)?];
    for (vm, (before, after)) in [one, two].into_iter().zip(before.into_iter().zip(after)) {
        let (taken, written) = (after.0 - before.0, after.1 - before.1);
        if taken < 100 {
            bail!("{}: only {taken} interrupts in 500 round trips", vm.name());
        }
        // Who sleeps until a command is done arms for it, and may be overtaken by one who looks;
        // the few commands here are those of setting up.
        let commands = after.2 - before.2;
        if taken.abs_diff(written) > commands || commands * 4 > taken {
            bail!(
                "{}: {taken} interrupts, {written} event queue doorbells, {commands} commands",
                vm.name()
            );
        }
    }
    Ok(())
}

fn wakes_are_for_frames(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let sample = || -> Result<Vec<(u64, u64)>> {
        [1, 2]
            .into_iter()
            .map(|index| {
                let counters = cluster.counters(index)?;
                let value = |name: &str| counters["shortcuts"][name].as_u64();
                value("wakes")
                    .zip(value("tx_frames"))
                    .with_context(|| format!("no shortcuts in the counters: {counters}"))
            })
            .collect()
    };
    let before = sample()?;
    pingpong(one, two, 1024, 500, false)?;
    for (index, (before, after)) in before.into_iter().zip(sample()?).enumerate() {
        let (wakes, frames) = (after.0 - before.0, after.1 - before.1);
        if frames < 500 || wakes > frames {
            bail!("device {}: {wakes} wakes for {frames} frames", index + 1);
        }
    }
    Ok(())
}

/// Events arrive at both machines, which take so many vectors.
fn vectors_of(cluster: &Cluster, of_one: usize, of_two: usize) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (vm, expected) in [(one, of_one), (two, of_two)] {
        let vectors = interrupts(vm)?.len();
        if vectors != expected {
            bail!("{}: {vectors} vectors, expected were {expected}", vm.name());
        }
    }
    pingpong(one, two, 4096, 200, true)?;
    pingpong(two, one, 65536, 20, true)?;
    Ok(())
}

/// How many events of each class the driver has counted.
pub(super) fn class_counts(vm: &Vm) -> Result<BTreeMap<String, u64>> {
    let text = vm.sh("tail -n +2 /sys/kernel/debug/ferrite0/events")?;
    text.lines()
        .map(|line| {
            let (class, count) = line.split_once(' ').context("no count")?;
            Ok((class.to_owned(), count.parse()?))
        })
        .collect()
}

fn classes(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let internal = |address: u64, contained: bool| {
        json!({"cmd": "memory-error", "where": "internal", "address": address,
               "contained": contained})
    };
    // The device has none.
    let of_no_channel = |event: &str| json!({"cmd": "channel", "event": event, "channel": 3});
    for (request, class, said) in [
        (
            internal(0x77, true),
            "internal_memory",
            "info: memory of the device failed at 0x77: corrected",
        ),
        (
            internal(0x78, false),
            "internal_memory",
            "err: memory of the device failed at 0x78: given up",
        ),
        (
            json!({"cmd": "memory-error", "where": "external", "address": 0x1000}),
            "external_memory",
            "err: host memory is poisoned: DMA address 0x1000",
        ),
        (of_no_channel("packets"), "channel", ""),
        (of_no_channel("descriptors"), "channel", ""),
        (of_no_channel("pool-low"), "channel", ""),
        (of_no_channel("bad-buffers"), "channel", ""),
        // A fault that nobody meets, and none.
        (
            json!({"cmd": "misbehave", "lose_flushes": true}),
            "management",
            "info: changed by its management: Faults",
        ),
        (
            json!({"cmd": "misbehave"}),
            "management",
            "info: changed by its management: Faults",
        ),
    ] {
        one.sh("dmesg -C")?;
        let mut expected = class_counts(one)?;
        *expected.get_mut(class).context("no such class")? += 1;
        cluster.device_command(1, &request)?;
        let (mut found, mut log) = (BTreeMap::new(), String::new());
        wait_until(Instant::now() + one.at_most(PATIENCE), || {
            found = class_counts(one)?;
            // As "ferrite 0000:00:05.0: what it says", by level. It is counted first, and then said.
            log =
                one.sh("dmesg -x | sed -n 's/^kern *:\\([a-z]*\\) *:.* ferrite [^ ]*: /\\1: /p'")?;
            Ok(found == expected && log.trim() == said)
        })?;
        ensure!(
            found == expected,
            "{request}: {found:?}, expected {expected:?}"
        );
        ensure!(log.trim() == said, "{request}: {log:?}");
    }
    Ok(())
}
