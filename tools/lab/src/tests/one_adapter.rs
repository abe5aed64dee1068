// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Machines whose devices are functions of one adapter: one process, one link to the wire, and what
//! they say to each other stays inside.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::json;

use super::VmTest;
use crate::cluster::{Cluster, Options};
use crate::traffic::pingpong;

/// One process for both.
pub fn options(usual: Options) -> Options {
    Options {
        only_card: true,
        one_adapter: true,
        ..usual
    }
}

/// While both run.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "machines on one adapter find each other, and stay inside",
        ping,
    ),
    VmTest::new("RDMA between them works and stays inside", rdma),
    VmTest::new("one that fails and comes back disturbs no other", failure),
];

const PATIENCE: Duration = Duration::from_secs(60);

/// What a function has counted of this.
fn count(cluster: &Cluster, index: usize, of: &str, what: &str) -> Result<u64> {
    let counters = cluster.counters(index)?;
    counters[of][what].as_u64().context("a counter is missing")
}

/// Frames by the wire, to nobody but who has to be found.
fn unicast_ways(cluster: &Cluster) -> Result<[u64; 2]> {
    Ok([
        count(cluster, 1, "inside", "tx_bytes")?,
        count(cluster, 1, "uplink", "tx_bytes")?,
    ])
}

fn ping(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (from, to) in [(one, two), (two, one)] {
        from.wait_for(&format!("ping -c 1 -W 2 {}", to.ip()), PATIENCE)?;
        from.sh(&format!("ping -c 20 -i 0.05 -s 8000 -M do {}", to.ip()))?;
    }
    let [inside, wire] = unicast_ways(cluster)?;
    ensure!(inside > 40 * 8000, "only {inside} bytes went inside");
    ensure!(wire < 20 * 8000, "{wire} bytes went by the wire");
    Ok(())
}

fn rdma(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let before = unicast_ways(cluster)?;
    for (size, events) in [(64, true), (4096, false), (1 << 20, false)] {
        pingpong(one, two, size, 200, events)?;
    }
    let after = unicast_ways(cluster)?;
    let [inside, wire] = [0, 1].map(|way| after[way] - before[way]);
    ensure!(inside > 200 << 20, "only {inside} bytes went inside");
    ensure!(wire < 1 << 20, "{wire} bytes went by the wire");
    Ok(())
}

fn failure(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let resets = count(cluster, 1, "resets", "function")?;
    cluster.device_command(2, &json!({"cmd": "fatal"}))?;
    one.wait_for(&format!("ping -c 1 -W 2 {}", two.ip()), PATIENCE)?;
    pingpong(two, one, 4096, 200, true)?;
    let since = count(cluster, 1, "resets", "function")? - resets;
    ensure!(since == 0, "the other was reset as well");
    Ok(())
}
