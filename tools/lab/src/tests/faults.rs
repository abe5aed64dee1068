// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Things that go wrong under running programs.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use serde_json::json;

use super::{nothing_left, still_works, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::protocol::Outcome;
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::Running;

/// On the kernel with the checkers.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a program killed in mid-transfer leaves nothing behind",
        killed_in_transfer,
    ),
    VmTest::new(
        "a server killed in mid-transfer fails its client",
        killed_server,
    ),
    VmTest::new(
        "a peer that is gone is reported: retries exceeded",
        peer_gone,
    ),
    VmTest::new(
        "the port follows the interface down and up",
        link_follows_interface,
    ),
];

/// On the stock kernel.
pub const NEIGHBOURS: &[VmTest] = &[VmTest::new(
    "a guest cannot take its neighbour's address",
    stolen_address,
)];

/// Packets the adapter has sent, whichever way they went to the peer.
fn packets_sent(cluster: &Cluster, index: usize) -> Result<u64> {
    let counters = cluster.counters(index)?;
    counters["engine"]["tx_packets"]
        .as_u64()
        .ok_or_else(|| anyhow::anyhow!("no engine.tx_packets in {counters}"))
}

/// How long programs may take to begin, to be told of something and to end.
const TRAFFIC: Duration = Duration::from_secs(180);

/// Waits until the adapter of a machine sends a stream, which these programs make.
pub(super) fn wait_for_traffic(
    cluster: &Cluster,
    index: usize,
    programs: &[&Running<'_>],
) -> Result<()> {
    let start = packets_sent(cluster, index)?;
    let mut ends: Vec<_> = programs.iter().map(|_| None).collect();
    let look = |ends: &mut Vec<Option<Outcome>>| {
        for (end, program) in ends.iter_mut().zip(programs) {
            *end = end.take().or_else(|| program.ended());
        }
        ends.iter().flatten().count()
    };
    let mut sent = 0;
    wait_until(Instant::now() + TRAFFIC, || {
        sent = packets_sent(cluster, index)?.saturating_sub(start);
        Ok(sent > 200 || look(&mut ends) > 0)
    })?;
    if sent > 200 {
        return Ok(());
    }
    for program in programs {
        program.signal(libc::SIGKILL)?;
    }
    wait_until(Instant::now() + TRAFFIC, || {
        Ok(look(&mut ends) == programs.len())
    })?;
    bail!("no traffic: {sent} packets; the programs: {ends:#?}");
}

const ENDLESS: &str = "exec ibv_rc_pingpong -d $dev -g $gid -p 18520 -s 65536 -n 100000000";

fn killed_in_transfer(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for program in [
        "exec ib_write_bw -d $dev -x $gid -p 18520 -s 1048576 -D 100 -F",
        "exec ib_read_bw -d $dev -x $gid -p 18520 -s 1048576 -D 100 -F",
        ENDLESS,
    ] {
        let time = Duration::from_secs(120);
        let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
        wait_listening(one, 18520)?;
        let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
        wait_for_traffic(cluster, 2, &[&server, &client])?;
        client.end_with(libc::SIGKILL)?;
        server.end()?;
        for vm in [one, two] {
            nothing_left(vm)?;
        }
        still_works(cluster)?;
    }
    Ok(())
}

fn killed_server(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(120);
    // The client always has writes under way, so the silence cannot escape it.
    let program = "exec ib_write_bw -d $dev -x $gid -p 18520 -s 1048576 -D 100 -F";
    let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
    wait_listening(one, 18520)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
    wait_for_traffic(cluster, 2, &[&server, &client])?;
    server.end_with(libc::SIGKILL)?;
    let outcome = client.wait()?;
    let said = format!("{}{}", outcome.out, outcome.err);
    if outcome.ok() || outcome.timed_out || !said.contains("Failed status 12") {
        bail!("the client did not learn of it: {outcome:?}");
    }
    for vm in [one, two] {
        nothing_left(vm)?;
    }
    still_works(cluster)
}

fn peer_gone(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(120);
    let server = one.spawn(&format!("{DEVICE_AND_GID} {ENDLESS}"), time)?;
    wait_listening(one, 18520)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {ENDLESS} {}", one.ip()), time)?;
    wait_for_traffic(cluster, 2, &[&server, &client])?;
    cluster.fabric_command(&json!({"cmd": "partition", "a": crate::vm::mac(1)}))?;
    // One of the two has a request under way when the wire is cut, and must be told.
    let told = "transport retry counter exceeded";
    let mut ends = [None, None];
    let result = wait_until(Instant::now() + TRAFFIC, || {
        for (slot, program) in ends.iter_mut().zip([&server, &client]) {
            if slot.is_none() {
                *slot = program.ended();
            }
        }
        Ok(ends.iter().flatten().any(|end| end.err.contains(told)))
    });
    cluster.fabric_command(&json!({"cmd": "heal"}))?;
    server.signal(libc::SIGKILL)?;
    client.signal(libc::SIGKILL)?;
    if !result? {
        bail!("nobody was told that retries were exceeded: {ends:?}");
    }
    if ends.iter().flatten().any(|end| end.crashed()) {
        bail!("one of the programs crashed: {ends:?}");
    }
    for vm in [one, two] {
        nothing_left(vm)?;
    }
    still_works(cluster)
}

fn link_follows_interface(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    let time = Duration::from_secs(20);
    two.sh("ip link set eth0 down")?;
    two.wait_for("rdma link | grep -q 'state DOWN'", time)?;
    two.sh(&format!(
        "ip link set eth0 up; ip addr replace {}/24 dev eth0",
        two.ip()
    ))?;
    super::wait_active(two)?;
    still_works(cluster)
}

/// While the two exchange messages, the second sends frames from the first's address: a switch that
/// learned from them would send the first's frames to the second.
fn stolen_address(cluster: &Cluster) -> Result<()> {
    const FORGED: u64 = 200;
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(120);
    let program = "exec ibv_rc_pingpong -d $dev -g $gid -p 18520 -s 4096 -n 100000000";
    let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
    wait_listening(one, 18520)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
    wait_for_traffic(cluster, 2, &[&server, &client])?;
    let granted = || -> Result<serde_json::Value> {
        Ok(cluster.counters(1)?["shortcuts"]["granted"].clone())
    };
    let before = granted()?;
    two.sh(&format!(
        r#"python3 -c '
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
forged = bytes.fromhex("{}".replace(":", ""))
for n in range({FORGED}):
    s.send(b"\xff" * 6 + forged + b"\x88\xb6" + bytes(46))
'"#,
        crate::vm::mac(1)
    ))?;
    let dropped = wait_until(Instant::now() + TRAFFIC, || {
        Ok(cluster.counters(2)?["vm"]["source_drops"].as_u64() >= Some(FORGED))
    })?;
    if !dropped {
        bail!("the device lets them pass: {}", cluster.counters(2)?);
    }
    wait_for_traffic(cluster, 1, &[&server, &client])?;
    wait_for_traffic(cluster, 2, &[&server, &client])?;
    if granted()? != before {
        bail!("the shortcut was taken away");
    }
    for running in [&client, &server] {
        if let Some(outcome) = running.ended() {
            bail!("a program ended: {outcome:?}");
        }
    }
    client.end_with(libc::SIGKILL)?;
    server.end()?;
    still_works(cluster)
}
