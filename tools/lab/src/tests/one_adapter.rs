// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Machines whose devices are functions of one adapter: one process, one link to the wire, and what
//! they say to each other stays inside.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::json;

use super::{driver, still_works, wait_active, VmTest};
use crate::cluster::{Cluster, Options};
use crate::process::wait_until;
use crate::shell::LOAD_DRIVER;
use crate::traffic::pingpong;
use crate::vm::{mac, Vm};

/// One process for both, and a third function, of Ethernet alone, that is another card of the first machine.
pub fn options(usual: Options) -> Options {
    Options {
        only_card: true,
        one_adapter: true,
        further_functions: vec![(1, "network")],
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
    VmTest::new(
        "a function of Ethernet alone is an interface and no RDMA device, and comes back as it was",
        ethernet_alone,
    ),
    VmTest::new(
        "one that its driver lets go of disturbs no other, and the driver goes that has Ethernet alone",
        let_go,
    ),
    VmTest::last("a machine that is gone disturbs no other", gone),
];

const PATIENCE: Duration = Duration::from_secs(60);

/// The number of the third function, and its address in a network namespace of the first machine: what it has from there
/// passes through the adapter.
const THIRD: usize = 3;
const THIRD_IP: &str = "10.77.0.3";
const INSIDE: &str = "ip netns exec box";

/// What a function has counted of this.
fn count(cluster: &Cluster, index: usize, of: &str, what: &str) -> Result<u64> {
    let counters = cluster.counters(index)?;
    counters[of][what].as_u64().context("a counter is missing")
}

/// How often a function was reset by its driver, its machine or itself.
fn resets(cluster: &Cluster, index: usize) -> Result<u64> {
    count(cluster, index, "engine", "resets")
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
    let [first, second] = [resets(cluster, 1)?, resets(cluster, 2)?];
    cluster.device_command(2, &json!({"cmd": "fatal"}))?;
    one.wait_for(&format!("ping -c 1 -W 2 {}", two.ip()), PATIENCE)?;
    pingpong(two, one, 4096, 200, true)?;
    ensure!(resets(cluster, 1)? == first, "the other was reset as well");
    ensure!(resets(cluster, 2)? > second, "it was not reset");
    Ok(())
}

/// Puts the interface of the third function into its namespace, where it is not there.
fn put_inside(one: &Vm) -> Result<()> {
    one.sh(&format!(
        "set -e
         [ -e /run/netns/box ] || ip netns add box
         for i in /sys/class/net/*; do [ $(<$i/address) != {} ] || card=${{i##*/}}; done
         [ -n \"$card\" ] || exit 0
         ip link set $card netns box
         ip -n box addr add {THIRD_IP}/24 dev $card
         ip -n box link set lo up
         ip -n box link set $card mtu 9000 up",
        mac(THIRD)
    ))?;
    Ok(())
}

/// Who sends or receives: a machine, what its programs are started by, and its address.
type End<'a> = (&'a Vm, &'a str, &'a str);

/// Has one send bytes to the other, where they must arrive as they were.
fn stream(from: End<'_>, to: End<'_>, port: u16) -> Result<()> {
    let ((sender, from, _), (receiver, to, address)) = (from, to);
    let serving = receiver.spawn(
        &format!("{to} nc -d -l -w 60 {port} | sha256sum"),
        2 * PATIENCE,
    )?;
    receiver.wait_for(
        &format!("{to} ss -tlnH 'sport = :{port}' | grep -q ."),
        PATIENCE,
    )?;
    let sent = sender.sh_in(
        &format!(
            "head -c 4M /dev/urandom >/run/file; sha256sum </run/file
             {from} nc -N -w 60 {address} {port} </run/file"
        ),
        2 * PATIENCE,
    )?;
    let received = serving.success()?;
    let (sent, received) = (sent.trim(), received.trim());
    ensure!(
        !sent.is_empty() && sent == received,
        "{sent} became {received}"
    );
    Ok(())
}

/// The functions of a machine, in order, and whether each has an RDMA device.
fn functions(vm: &Vm) -> Result<Vec<bool>> {
    let said = vm.sh("for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do
             [ ! -e $f ] || { [ -d $f/infiniband ] && echo true || echo false; }
         done")?;
    Ok(said.lines().map(str::parse).collect::<Result<_, _>>()?)
}

fn ethernet_alone(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    put_inside(one)?;
    ensure!(
        functions(one)? == [true, false],
        "functions: {:?}",
        functions(one)?
    );
    let devices = one.sh("ls /sys/class/infiniband")?;
    ensure!(devices.lines().count() == 1, "RDMA devices: {devices}");
    let (third, second) = ((one, INSIDE, THIRD_IP), (two, "", &*two.ip()));
    let pings = || -> Result<()> {
        for (vm, by, to) in [
            (one, INSIDE, &*two.ip()),
            (one, INSIDE, &*one.ip()),
            (one, "", THIRD_IP),
            (two, "", THIRD_IP),
        ] {
            vm.wait_for(&format!("{by} ping -c 1 -W 2 -s 8000 -M do {to}"), PATIENCE)?;
        }
        Ok(())
    };
    pings()?;
    stream(third, second, 7031)?;
    stream(second, third, 7032)?;
    // It stops for good, and the device is reset and has its interface again, where that was put.
    let before = [resets(cluster, 1)?, resets(cluster, 2)?];
    one.sh("dmesg -C")?;
    cluster.device_command(THIRD, &json!({"cmd": "fatal"}))?;
    one.wait_for("dmesg | grep -q 'device failed'", PATIENCE)?;
    pings()?;
    stream(third, second, 7033)?;
    ensure!(
        [resets(cluster, 1)?, resets(cluster, 2)?] == before,
        "another was reset as well"
    );
    still_works(cluster)
}

fn let_go(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    put_inside(one)?;
    let (third, second) = ((one, INSIDE, THIRD_IP), (two, "", &*two.ip()));
    let before = [resets(cluster, 2)?, resets(cluster, THIRD)?];
    let traffic = one.spawn(
        &format!("{INSIDE} ping -q -c 100 -i 0.05 -s 3000 {}", two.ip()),
        PATIENCE,
    )?;
    one.sh_in(
        "echo $(basename $(readlink /sys/class/net/eth0/device)) >/sys/bus/pci/drivers/ferrite/unbind",
        driver::PATIENCE,
    )?;
    ensure!(
        functions(one)? == [false],
        "functions: {:?}",
        functions(one)?
    );
    let left = one.sh("ls /sys/class/infiniband; ls -d /sys/class/net/eth*; true")?;
    ensure!(left.trim().is_empty(), "left are {left}");
    let said = traffic.success()?;
    ensure!(said.contains(" 0% packet loss"), "{said}");
    stream(third, second, 7034)?;
    ensure!(
        [resets(cluster, 2)?, resets(cluster, THIRD)?] == before,
        "another was reset as well"
    );
    // All that the driver has is Ethernet.
    one.sh_in("rmmod ferrite", driver::PATIENCE)?;
    let left = one.sh("ip -n box -o link | grep -v ': lo:'; true")?;
    ensure!(left.trim().is_empty(), "left are {left}");
    one.sh_in(LOAD_DRIVER, driver::PATIENCE)?;
    wait_active(one)?;
    put_inside(one)?;
    stream(second, third, 7035)?;
    still_works(cluster)
}

fn gone(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    put_inside(one)?;
    let (third, first) = ((one, INSIDE, THIRD_IP), (one, "", &*one.ip()));
    let before = resets(cluster, 1)?;
    let traffic = one.spawn(
        &format!("{INSIDE} ping -q -c 100 -i 0.05 -s 3000 {}", one.ip()),
        PATIENCE,
    )?;
    // In the middle of something that it receives.
    let cut = one.spawn(&format!("ping -f -w 60 -s 3000 {}", two.ip()), 2 * PATIENCE)?;
    let begun = count(cluster, 1, "inside", "tx_bytes")?;
    let passes = wait_until(Instant::now() + one.at_most(PATIENCE), || {
        Ok(count(cluster, 1, "inside", "tx_bytes")? > begun + 100_000)
    })?;
    ensure!(passes, "nothing is sent to the machine that is to go");
    two.kill();
    let lost = one.run(&format!("ping -c 1 -W 1 {}", two.ip()), PATIENCE)?;
    ensure!(!lost.ok(), "a machine answers that is gone");
    cut.end()?;
    let said = traffic.success()?;
    ensure!(said.contains(" 0% packet loss"), "{said}");
    stream(first, third, 7036)?;
    stream(third, first, 7037)?;
    // And RDMA, from the function to itself.
    pingpong(one, one, 4096, 200, true)?;
    ensure!(resets(cluster, 1)? == before, "the other was reset as well");
    Ok(())
}
