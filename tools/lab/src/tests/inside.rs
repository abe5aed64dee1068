// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Looking into the device from inside a guest.

use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use serde_json::Value;

use super::{nothing_left, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{wait_connected, wait_listening, DEVICE_AND_GID};
use crate::vm::Vm;

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "ferritectl and rdma show what the device holds and counts",
        ferritectl,
    ),
    VmTest::new(
        "ferritectl top redraws its page on a terminal, takes keys and leaves it as it was",
        terminal,
    ),
];

fn ferritectl(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(60);
    // What other programs had is gone.
    nothing_left(one)?;
    // Something to see.
    let endless = "exec ibv_rc_pingpong -d $dev -g $gid -p 18522 -s 4096 -n 100000000 -e";
    let server = one.spawn(&format!("{DEVICE_AND_GID} {endless}"), time)?;
    wait_listening(one, 18522)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {endless} {}", one.ip()), time)?;
    let looked = || -> Result<()> {
        one.wait_for(
            "ferritectl show qps --json | grep -q 'ibv_rc_pingpong'",
            time,
        )?;
        wait_connected(one)?;
        let processors = one.sh("nproc")?.trim().parse()?;
        // The programs may have done little yet.
        let shown = until_right(one, || {
            let text = one.sh("ferritectl show --json")?;
            let shown: Value = serde_json::from_str(&text).context("show --json")?;
            Ok(check(&shown, processors)
                .with_context(|| text.clone())
                .map(|()| shown))
        })?;
        // In such a short time they may not have had the processor.
        until_right(one, || {
            let text = one.sh("ferritectl top -n 1 -i 0.5 --json")?;
            let change: Value = serde_json::from_str(&text).context("top --json")?;
            let rate = &change["counters"]["tx_packets"]["per_second"];
            if rate.as_f64().is_none_or(|rate| rate < 1.0) {
                return Ok(Err(anyhow!(
                    "{rate} packets per second while a pingpong runs:\n{text}"
                )));
            }
            Ok(Ok(()))
        })?;
        // The kernel's own view has the same counters.
        let statistic = one.sh("rdma statistic show link ferrite0/1")?;
        for name in shown["counters"].as_object().into_iter().flatten() {
            if !statistic.contains(name.0.as_str()) {
                bail!("rdma statistic does not show {}:\n{statistic}", name.0);
            }
        }
        Ok(())
    }();
    for running in [client, server] {
        running.end_with(libc::SIGKILL)?;
    }
    looked?;
    let outcome = one.run(
        "mount --move /sys/kernel/debug /mnt; ferritectl show device eqs; code=$?
        mount --move /mnt /sys/kernel/debug; exit $code",
        time,
    )?;
    if outcome.ok() || !outcome.err.contains("debugfs is not mounted") {
        bail!("without debugfs: {outcome:?}");
    }
    Ok(())
}

/// Looks until it finds what it should, for a while.
fn until_right<T>(vm: &Vm, look: impl Fn() -> Result<Result<T>>) -> Result<T> {
    let mut found = look()?;
    wait_until(Instant::now() + vm.at_most(Duration::from_secs(60)), || {
        if found.is_err() {
            found = look()?;
        }
        Ok(found.is_ok())
    })?;
    found
}

fn terminal(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let page = one.sh_in(
        "/ferrite/tests/clients/terminal 'qQ^C' ferritectl top -i 0.2",
        Duration::from_secs(300),
    )?;
    if !page.contains("(q ends)") || !page.contains("tx_packets") {
        bail!("the page is:\n{page}");
    }
    Ok(())
}

/// Whether `show` tells what a guest with so many processors has, and a pingpong that runs.
fn check(shown: &Value, processors: usize) -> Result<()> {
    let version = shown["device"]["version"].as_str().unwrap_or_default();
    if version.split('.').count() != 3 {
        bail!("the version is '{version}'");
    }
    let queues = shown["eqs"].as_array().context("no event queues")?;
    let handlers = shown["handlers"].as_array().context("no handlers")?;
    // A handler for each processor, beside the queues of answers and of other events.
    if queues.len() != processors + 2 || handlers.len() != processors {
        bail!(
            "{} event queues and {} handlers for {processors} processors",
            queues.len(),
            handlers.len()
        );
    }
    for (number, handler) in handlers.iter().enumerate() {
        if handler["cpus"].as_str() != Some(&number.to_string()) {
            bail!("handler {number}: {handler}");
        }
    }
    if !handlers
        .iter()
        .any(|handler| handler["events"].as_u64() > Some(0))
    {
        bail!("no handler had events: {handlers:?}");
    }
    let owned = |section: &str| {
        let rows = shown[section].as_array().into_iter().flatten();
        rows.filter(|row| row["comm"] == "ibv_rc_pingpong").count()
    };
    if owned("qps") != 1 || owned("cqs") != 1 {
        bail!(
            "{} queue pairs, {} completion queues",
            owned("qps"),
            owned("cqs")
        );
    }
    let (used, entries) = (&shown["tpt"]["used"], &shown["tpt"]["entries"]);
    if used.as_u64().is_none_or(|used| used == 0) || entries.as_u64() <= used.as_u64() {
        bail!("{used} of {entries} protection table entries");
    }
    let table = |name: &str| {
        let rows = shown["tables"].as_array().into_iter().flatten();
        rows.filter(|row| row["table"] == name)
            .find_map(|row| row["used"].as_u64())
    };
    // One of the program; the kernel's management has its own number.
    if table("queue_pairs") != Some(1) {
        bail!(
            "the table of queue pairs has {:?} entries",
            table("queue_pairs")
        );
    }
    if shown["counters"]["rx_packets"].as_u64() == Some(0) {
        bail!("no packet was counted");
    }
    Ok(())
}
