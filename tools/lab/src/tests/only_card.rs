// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Machines whose only network card is the device: network and RDMA in one PCI function.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::driver::{bind, bind_anew, unbind, PATIENCE};
use super::notification::class_counts;
use super::{still_works, wait_active, VmTest};
use crate::cluster::{Cluster, Options};
use crate::process::wait_until;
use crate::traffic::{client_server, perftest, wait_listening};
use crate::vm::{Running, Vm};

/// One device may send from any address, the other from its own alone.
pub fn options(usual: Options) -> Options {
    Options {
        only_card: true,
        own_device_args: vec![vec!["--any-source-mac".to_owned()]],
        ..usual
    }
}

/// While the interface works.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "the function is the only card, and its port has its interface",
        paired,
    ),
    VmTest::new(
        "frames pass, large ones too once the MTU allows them",
        frames,
    ),
    VmTest::new(
        "TCP streams arrive whole in both directions, with and without offloads",
        streams,
    ),
    VmTest::new("RDMA works beside", beside),
    VmTest::new("VLANs have their tags", vlans),
    VmTest::new(
        "groups are received that were joined, and all by who wants all",
        groups,
    ),
    VmTest::new(
        "an address changes where the device may send from it",
        addresses,
    ),
    VmTest::new("ethtool shows what there is, and counts", shown),
    VmTest::new("rings and channels change under traffic", resized),
    VmTest::new("a table spreads what is received over channels", spread),
    VmTest::new("interrupts are put off as asked for", coalesced),
    VmTest::new(
        "events of channels that say nothing new are borne, and those of none are counted",
        events,
    ),
    VmTest::new("a cable that is pulled is a carrier that is lost", cable),
];

/// While it goes and comes back.
pub const LIFECYCLE: &[VmTest] = &[
    VmTest::new(
        "the interface goes down and up under traffic, and its MTU changes",
        down_and_up,
    ),
    VmTest::new(
        "a device that fails comes back with its interface as it was",
        failure,
    ),
    VmTest::new(
        "what a device says of frames that cannot be is not believed: it is given up, and comes back",
        nonsense,
    ),
    VmTest::new(
        "the driver lets go under traffic, and takes it again",
        unbound,
    ),
    VmTest::new("the module goes under traffic", unloaded),
    VmTest::last("the process of the device is killed under traffic", killed),
];

/// Of both as much as every run has time for, with four processors and a vector for each.
pub const SHORT_TESTS: &[VmTest] = &[
    VmTest::new(
        "the function is the only card, and its port has its interface",
        paired,
    ),
    VmTest::new(
        "TCP streams arrive whole, cut and summed up by the device and by the machine",
        short_streams,
    ),
    VmTest::new("ethtool shows what there is, and counts", shown),
    VmTest::new(
        "flows are spread over processors and each stays on one, while key and table change",
        flows,
    ),
    VmTest::new(
        "events of channels that say nothing new are borne, and those of none are counted",
        events,
    ),
    VmTest::new("a cable that is pulled is a carrier that is lost", cable),
    VmTest::new(
        "the interface goes down and up under traffic, and its MTU changes",
        down_and_up,
    ),
    VmTest::new(
        "a device that fails comes back with its interface as it was",
        failure,
    ),
    VmTest::new("the module goes under traffic", unloaded),
];

/// With four processors, too.
pub const FLOODS: &[VmTest] = &[VmTest::new(
    "a flood of small frames, to everybody and with tags, and RDMA both get on",
    flood,
)];

const SHORT: Duration = Duration::from_secs(60);

/// Pings the other machine, with so many bytes that must not be fragmented.
fn ping(from: &Vm, to: &Vm, bytes: usize) -> Result<()> {
    from.wait_for(
        &format!("ping -c 1 -W 2 -M do -s {bytes} {}", to.ip()),
        SHORT,
    )
    .with_context(|| format!("{} bytes do not pass", bytes + 28))
}

fn both_ways(cluster: &Cluster, bytes: usize) -> Result<()> {
    let (one, two) = cluster.two()?;
    ping(one, two, bytes)?;
    ping(two, one, bytes)
}

fn paired(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        let cards = vm.sh("for i in /sys/class/net/*; do
                 [ -e $i/device ] && echo ${i##*/} $(basename $(readlink $i/device/driver))
             done; true")?;
        ensure!(cards.trim() == "eth0 ferrite", "network cards: {cards}");
        let functions = vm.sh("ls -d /sys/bus/pci/drivers/ferrite/*:*:*.* | wc -l")?;
        ensure!(functions.trim() == "1", "{functions} functions");
        let link = vm.sh("rdma link")?;
        ensure!(
            link.contains("state ACTIVE") && link.contains("netdev eth0"),
            "{link}"
        );
    }
    Ok(())
}

fn set_mtu(cluster: &Cluster, mtu: u32) -> Result<()> {
    for vm in &cluster.vms {
        vm.sh(&format!("ip link set eth0 mtu {mtu}"))?;
    }
    Ok(())
}

fn frames(cluster: &Cluster) -> Result<()> {
    set_mtu(cluster, 1500)?;
    // The shortest, those that are copied and those that are not, the largest.
    for bytes in [0, 18, 200, 214, 215, 300, 1472] {
        both_ways(cluster, bytes)?;
    }
    let (one, two) = cluster.two()?;
    let long = one.run(&format!("ping -c 1 -W 2 -M do -s 1473 {}", two.ip()), SHORT)?;
    ensure!(!long.ok(), "more than the MTU was sent");
    let refused = one.run("ip link set eth0 mtu 9001", SHORT)?;
    ensure!(!refused.ok(), "a larger MTU than there is was set");
    set_mtu(cluster, 9000)?;
    // In one buffer, in two and in three.
    for bytes in [1472, 4054, 4055, 8150, 8151, 8972] {
        both_ways(cluster, bytes)?;
    }
    set_mtu(cluster, 1500)?;
    // In fragments.
    one.sh(&format!("ping -c 3 -s 20000 {}", two.ip()))?;
    // By the other version of IP, which finds its neighbours by multicast.
    let address =
        two.sh("ip -6 -o addr show dev eth0 scope link | { read -r _ _ _ a _; echo ${a%/*}; }")?;
    one.wait_for(&format!("ping -c 1 -W 2 {}%eth0", address.trim()), SHORT)
}

/// Has `from` send a file of so many KiB to `to`, where it must arrive as it was.
fn copy(from: &Vm, to: &Vm, kib: usize, port: u16) -> Result<()> {
    let (client, server) = client_server(
        (to, "nc -d -l -w 60 $port | sha256sum"),
        (
            from,
            &format!(
                "head -c {}K /dev/urandom >/run/file; sha256sum </run/file
                 nc -N -w 60 $peer $port </run/file",
                kib
            ),
        ),
        port,
        4 * SHORT,
    )?;
    let (sent, received) = (client.trim(), server.trim());
    ensure!(
        !sent.is_empty() && sent == received,
        "{sent} became {received}"
    );
    Ok(())
}

/// Streams both ways of so many KiB each, with all offloads or none, and with such an MTU.
fn streams_with(cluster: &Cluster, cases: &[(&str, u32, usize)]) -> Result<()> {
    let (one, two) = cluster.two()?;
    let offloads = |on: &str| -> Result<()> {
        for vm in [one, two] {
            vm.sh(&format!(
                "ethtool -K eth0 tso {on} tx {on} rx {on} sg {on} gro {on} rxhash {on}"
            ))?;
        }
        Ok(())
    };
    for (on, mtu, kib) in cases.iter().copied() {
        offloads(on)?;
        set_mtu(cluster, mtu)?;
        for (from, to, port) in [(one, two, 7001), (two, one, 7002)] {
            let before = made(from)?;
            copy(from, to, kib, port).with_context(|| format!("offloads {on}, MTU {mtu}"))?;
            // The frames that the device made of longer ones.
            let cut = made(from)? - before;
            let frames = kib as u64 * 1024 / u64::from(mtu);
            ensure!(
                if on == "on" {
                    cut > frames / 4
                } else {
                    cut == 0
                },
                "offloads {on}, MTU {mtu}: the device made {cut} of {frames} frames"
            );
        }
    }
    offloads("on")?;
    set_mtu(cluster, 1500)
}

/// How many frames the device of a machine has made of longer ones: of each all but one.
fn made(vm: &Vm) -> Result<u64> {
    let text = vm.sh("ethtool -S eth0 | sed -n 's/^ *device_tx_\\(requests\\|frames\\): //p'")?;
    let counts: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
    match counts[..] {
        [requests, frames] => Ok(frames - requests),
        _ => bail!("{}: {text:?}", vm.name()),
    }
}

fn no_errors(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        let errors = vm.sh("ethtool -S eth0 | grep -E 'tx_errors|rx_bad_buffers|rx_no_channel|tx_timeouts' | grep -v ': 0$'
             nstat -as | grep CsumErrors; true")?;
        ensure!(errors.trim().is_empty(), "{}: {errors}", vm.name());
    }
    Ok(())
}

fn short_streams(cluster: &Cluster) -> Result<()> {
    streams_with(
        cluster,
        &[("off", 1500, 256), ("on", 1500, 2048), ("on", 9000, 2048)],
    )?;
    no_errors(cluster)
}

fn streams(cluster: &Cluster) -> Result<()> {
    streams_with(
        cluster,
        &[
            ("on", 1500, 16384),
            ("on", 9000, 16384),
            ("off", 1500, 2048),
        ],
    )?;
    let (one, two) = cluster.two()?;
    let (said, _) = client_server(
        (two, "iperf3 -s -1 -p $port"),
        (one, "iperf3 -c $peer -p $port -t 5 -P 4 --bidir"),
        7003,
        2 * SHORT,
    )?;
    println!(
        "  note    {}",
        said.lines()
            .filter(|line| line.contains("SUM") && line.contains("receiver"))
            .collect::<Vec<_>>()
            .join("; ")
    );
    no_errors(cluster)
}

fn beside(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    // Both at once.
    let server = two.spawn("iperf3 -s -1 -p 7004", 2 * SHORT)?;
    wait_listening(two, 7004)?;
    let client = one.spawn(&format!("iperf3 -c {} -p 7004 -t 8", two.ip()), 2 * SHORT)?;
    for _ in 0..3 {
        still_works(cluster)?;
    }
    client.success()?;
    server.success()?;
    Ok(())
}

fn vlans(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for strip in ["on", "off"] {
        for vm in [one, two] {
            vm.sh(&format!(
                "set -e; ethtool -K eth0 rxvlan {strip} txvlan {strip}
                 ip link add link eth0 name v5 type vlan id 5
                 ip addr add 10.78.0.{}/24 dev v5; ip link set v5 up",
                vm.index
            ))?;
        }
        let works = one
            .wait_for("ping -c 1 -W 2 -M do -s 1472 10.78.0.2", SHORT)
            .and_then(|()| {
                // Large frames are cut, also behind a tag.
                let (_, said) = client_server(
                    (two, "nc -d -l -w 60 $port | wc -c"),
                    (one, "head -c 2M /dev/zero | nc -N -w 60 10.78.0.2 $port"),
                    7005,
                    2 * SHORT,
                )?;
                ensure!(said.trim() == "2097152", "{said} bytes arrived");
                Ok(())
            });
        for vm in [one, two] {
            vm.sh("ip link del v5; ethtool -K eth0 rxvlan on txvlan on")?;
        }
        works.with_context(|| format!("with offload {strip}"))?;
    }
    both_ways(cluster, 1472)
}

/// What the device of a machine has counted.
fn counter(vm: &Vm, name: &str) -> Result<u64> {
    let value = vm.sh(&format!("ethtool -S eth0 | sed -n 's/^ *{name}: //p'"))?;
    value
        .trim()
        .parse()
        .with_context(|| format!("{}: no counter {name}: {value:?}", vm.name()))
}

fn groups(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let send = || {
        one.sh(
            "ip route replace 239.7.7.7 dev eth0; ping -c 3 -i 0.2 -W 1 239.7.7.7 >/dev/null; true",
        )
    };
    let difference = |what: &str| -> Result<u64> {
        let before = counter(two, what)?;
        send()?;
        Ok(counter(two, what)? - before)
    };
    let filtered = difference("device_rx_filtered")?;
    ensure!(
        filtered >= 3,
        "{filtered} frames of a strange group were left out"
    );
    two.sh("ip maddr add 01:00:5e:07:07:07 dev eth0")?;
    let received = difference("device_rx_multicast")?;
    two.sh("ip maddr del 01:00:5e:07:07:07 dev eth0")?;
    ensure!(received >= 3, "{received} frames of a group were received");
    for (how, undo) in [
        ("ip link set eth0 promisc on", "ip link set eth0 promisc off"),
        ("ip link set eth0 allmulticast on", "ip link set eth0 allmulticast off"),
        // More than the filter has room for.
        (
            "for n in $(seq 40); do printf -v m '01:00:5e:01:01:%02x' $n; ip maddr add $m dev eth0; done",
            "for n in $(seq 40); do printf -v m '01:00:5e:01:01:%02x' $n; ip maddr del $m dev eth0; done",
        ),
    ] {
        two.sh(how)?;
        let received = difference("device_rx_multicast");
        two.sh(undo)?;
        let received = received?;
        ensure!(received >= 3, "{received} frames after: {how}");
    }
    let filtered = difference("device_rx_filtered")?;
    ensure!(filtered >= 3, "{filtered} frames were left out afterwards");
    Ok(())
}

fn addresses(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let own = two.sh("cat /sys/class/net/eth0/address")?;
    let refused = two.run("ip link set eth0 address 02:00:00:00:00:77", SHORT)?;
    ensure!(
        !refused.ok(),
        "a device took an address that it may not send from"
    );
    ensure!(
        two.sh("cat /sys/class/net/eth0/address")? == own,
        "an address that was refused is there"
    );
    both_ways(cluster, 56)?;
    let before = one.sh("cat /sys/class/net/eth0/address")?;
    one.sh("ip link set eth0 address 02:00:00:00:00:77")?;
    two.sh("ip neigh flush dev eth0")?;
    let works = both_ways(cluster, 56).and_then(|()| {
        let seen = two.sh(&format!("ip neigh show {}", one.ip()))?;
        ensure!(seen.contains("02:00:00:00:00:77"), "{seen}");
        Ok(())
    });
    one.sh(&format!("ip link set eth0 address {}", before.trim()))?;
    two.sh("ip neigh flush dev eth0")?;
    works?;
    both_ways(cluster, 56)?;
    for vm in [one, two] {
        wait_active(vm)?;
    }
    Ok(())
}

fn shown(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let info = one.sh("ethtool -i eth0")?;
    let slot = one.sh("basename $(readlink /sys/class/net/eth0/device)")?;
    for what in ["driver: ferrite", "firmware-version: ", slot.trim()] {
        ensure!(info.contains(what), "no {what:?} in {info}");
    }
    let features = one.sh("ethtool -k eth0")?;
    for what in [
        "tx-checksumming: on",
        "rx-checksumming: on",
        "scatter-gather: on",
        "tcp-segmentation-offload: on",
        "receive-hashing: on",
        "rx-vlan-offload: on",
        "tx-vlan-offload: on",
    ] {
        ensure!(features.contains(what), "no {what:?} in {features}");
    }
    let count = |vm: &Vm| -> Result<[u64; 3]> {
        let all = vm.sh("cat /sys/class/net/eth0/statistics/{rx_packets,tx_packets}")?;
        let all: Vec<u64> = all.lines().map(str::parse).collect::<Result<_, _>>()?;
        Ok([all[0], all[1], counter(vm, "device_rx_frames")?])
    };
    let before = count(two)?;
    one.sh(&format!("ping -q -c 20 -i 0.05 {}", two.ip()))?;
    let after = count(two)?;
    for (before, after) in before.into_iter().zip(after) {
        ensure!(after >= before + 20, "{before} became {after}");
    }
    let link = one.sh("ethtool eth0")?;
    ensure!(link.contains("Link detected: yes"), "{link}");
    Ok(())
}

const RX_PACKETS: &str = "/sys/class/net/eth0/statistics/rx_packets";

fn rx_packets(vm: &Vm) -> Result<u64> {
    let count = vm.sh(&format!("cat {RX_PACKETS}"))?;
    Ok(count.trim().parse()?)
}

/// Runs `f` while frames pass, but not so many that nothing else gets its turn in an emulated machine.
fn under_traffic(cluster: &Cluster, f: impl FnOnce() -> Result<()>) -> Result<()> {
    let (one, two) = cluster.two()?;
    let sink = two.spawn("exec iperf3 -s -p 7010 >/dev/null 2>&1", 20 * SHORT)?;
    wait_listening(two, 7010)?;
    let source = one.spawn(
        &format!(
            "while :; do timeout 10 iperf3 -c {0} -p 7010 -t 100 -b 10M --bidir; \
             timeout 2 ping -i 0.01 -s 3000 {0}; done >/dev/null 2>&1",
            two.ip()
        ),
        20 * SHORT,
    )?;
    let begun = rx_packets(two)?;
    let result = two
        .wait_for(&format!("[ $(<{RX_PACKETS}) -gt {} ]", begun + 200), SHORT)
        .context("there is no traffic")
        .and_then(|()| f());
    source.end()?;
    sink.end()?;
    two.sh("killall -q iperf3; true")?;
    one.sh("killall -q iperf3 ping; true")?;
    result
}

fn resized(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    under_traffic(cluster, || {
        for (rx, tx) in [(16, 32), (1024, 1024), (64, 4096), (256, 512)] {
            for vm in [one, two] {
                vm.sh(&format!("ethtool -G eth0 rx {rx} tx {tx}"))?;
                let shown = vm.sh("ethtool -g eth0 | sed -n '/Current/,$p'")?;
                ensure!(
                    shown.contains(&format!("RX:\t\t\t{rx}\n"))
                        || shown.split_whitespace().any(|word| word == rx.to_string()),
                    "{shown}"
                );
            }
            both_ways(cluster, 1000)?;
        }
        for channels in [1, 2] {
            for vm in [one, two] {
                vm.sh(&format!("ethtool -L eth0 combined {channels}"))?;
            }
            both_ways(cluster, 1000)?;
        }
        Ok(())
    })?;
    for what in [
        "-G eth0 rx 100000",
        "-L eth0 combined 3",
        "-L eth0 combined 0",
    ] {
        let refused = one.run(&format!("ethtool {what}"), SHORT)?;
        ensure!(!refused.ok(), "ethtool {what} was done");
    }
    Ok(())
}

fn spread(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let key = "01:".repeat(39) + "02";
    let show = two.sh("ethtool -x eth0")?;
    ensure!(show.contains("toeplitz: on"), "{show}");
    // Streams of many ports, from the machine that sends; counted by channel at the other.
    let counts = || -> Result<[u64; 2]> {
        Ok([
            counter(two, "channel0_rx_packets")?,
            counter(two, "channel1_rx_packets")?,
        ])
    };
    let send = || -> Result<[u64; 2]> {
        let before = counts()?;
        one.sh(&format!(
            "for port in $(seq 9000 9063); do echo x >/dev/udp/{}/$port; done",
            two.ip()
        ))?;
        let after = counts()?;
        Ok([after[0] - before[0], after[1] - before[1]])
    };
    two.sh("ethtool -X eth0 equal 2")?;
    let [first, second] = send()?;
    ensure!(first >= 8 && second >= 8, "spread as {first} and {second}");
    for (weights, channel) in [("0 1", 1), ("1 0", 0)] {
        two.sh(&format!("ethtool -X eth0 weight {weights}"))?;
        let got = send()?;
        ensure!(
            got[channel] >= 60 && got[1 - channel] <= 8,
            "with weights {weights}: {got:?}"
        );
    }
    two.sh(&format!("ethtool -X eth0 hkey {key} equal 2"))?;
    let show = two.sh("ethtool -x eth0")?;
    ensure!(show.contains(&key), "{show}");
    // Changes while frames come.
    under_traffic(cluster, || {
        for _ in 0..3 {
            for how in ["weight 0 1", "weight 1 0", "equal 2"] {
                two.sh(&format!("ethtool -X eth0 {how}"))?;
            }
        }
        both_ways(cluster, 1000)
    })?;
    // A table that was chosen names no channel that goes.
    let refused = two.run("ethtool -L eth0 combined 1", SHORT)?;
    ensure!(!refused.ok(), "a channel went that the table names");
    two.sh("ethtool -X eth0 default")?;
    both_ways(cluster, 56)
}

fn coalesced(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("ethtool -C eth0 rx-usecs 50 rx-frames 16")?;
    let shown = one.sh("ethtool -c eth0")?;
    for what in [("rx-usecs", "50"), ("rx-frames", "16")] {
        let line = shown.lines().find(|line| line.starts_with(what.0));
        ensure!(line.is_some_and(|line| line.ends_with(what.1)), "{shown}");
    }
    both_ways(cluster, 1000)?;
    one.sh("ethtool -C eth0 rx-usecs 0 rx-frames 0")?;
    both_ways(cluster, 1000)
}

/// What the device can be told to say of a channel, of those that there are and of one that there is not.
fn events(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let channels: u64 = one
        .sh("ethtool -l eth0 | sed -n 's/^Combined:[[:space:]]*//p' | tail -n 1")?
        .trim()
        .parse()?;
    let strange = channels + 5;
    let counted = || -> Result<u64> {
        let counts = class_counts(one)?;
        counts.get("channel").copied().context("no such class")
    };
    let before = counted()?;
    one.sh("dmesg -C")?;
    under_traffic(cluster, || {
        for event in ["packets", "descriptors", "pool-low", "bad-buffers"] {
            for channel in (0..channels).chain([strange]) {
                cluster.device_command(
                    1,
                    &json!({"cmd": "channel", "event": event, "channel": channel}),
                )?;
            }
        }
        // Nobody has asked when the pool of a channel is low, and of the strange one nobody knows.
        let expected = before + channels + 4;
        let mut found = 0;
        wait_until(Instant::now() + one.at_most(SHORT), || {
            found = counted()?;
            Ok(found >= expected)
        })?;
        ensure!(found == expected, "{found} events of none, not {expected}");
        both_ways(cluster, 1000)
    })?;
    let said = one.sh("dmesg")?;
    ensure!(
        said.contains("channel 0: the device refuses what was posted to receive at 0")
            && !said.contains("device failed"),
        "{said}"
    );
    still_works(cluster)
}

fn cable(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    under_traffic(cluster, || {
        for _ in 0..if cluster.thorough() { 2 } else { 1 } {
            cluster.device_command(1, &json!({"cmd": "link", "up": false}))?;
            one.wait_for("[ $(cat /sys/class/net/eth0/carrier) = 0 ]", SHORT)?;
            let lost = one.run(&format!("ping -c 1 -W 1 {}", two.ip()), SHORT)?;
            ensure!(!lost.ok(), "frames pass without a cable");
            cluster.device_command(1, &json!({"cmd": "link", "up": true}))?;
            one.wait_for("[ $(cat /sys/class/net/eth0/carrier) = 1 ]", SHORT)?;
            both_ways(cluster, 56)?;
        }
        Ok(())
    })?;
    wait_active(one)?;
    still_works(cluster)
}

fn down_and_up(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    under_traffic(cluster, || {
        for _ in 0..if cluster.thorough() { 3 } else { 1 } {
            one.sh("ip link set eth0 down; ip link set eth0 up")?;
            two.sh("ip link set eth0 down; ip link set eth0 up")?;
            both_ways(cluster, 56)?;
        }
        let mtus: &[u32] = if cluster.thorough() {
            &[9000, 1500, 2000, 1500]
        } else {
            &[9000, 1500]
        };
        for mtu in mtus.iter().copied() {
            set_mtu(cluster, mtu)?;
            both_ways(cluster, mtu as usize - 28)?;
        }
        Ok(())
    })?;
    for vm in [one, two] {
        wait_active(vm)?;
    }
    still_works(cluster)
}

fn failure(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let before =
        one.sh("cat /sys/class/net/eth0/ifindex; ip -o addr show dev eth0 | grep -c 10.77")?;
    one.sh("dmesg -C")?;
    under_traffic(cluster, || {
        cluster.device_command(1, &json!({"cmd": "fatal"}))?;
        one.wait_for("dmesg | grep -q 'device failed'", SHORT)?;
        // It comes back by itself, and nobody gives it its address again.
        one.wait_for(&format!("ping -c 1 -W 2 {}", two.ip()), 2 * SHORT)?;
        Ok(())
    })?;
    let after =
        one.sh("cat /sys/class/net/eth0/ifindex; ip -o addr show dev eth0 | grep -c 10.77")?;
    ensure!(before == after, "{before:?} became {after:?}");
    wait_active(one)?;
    both_ways(cluster, 1472)?;
    still_works(cluster)
}

fn nonsense(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    // Entries of received frames, and how far the device has sent.
    for what in ["completions", "records"] {
        one.sh("dmesg -C")?;
        under_traffic(cluster, || {
            let rules = json!({"cmd": "misbehave", "seed": 5, "nonsense": {what: 0.2}});
            cluster.device_command(1, &rules)?;
            let failed = one.wait_for("dmesg | grep -q 'device failed'", SHORT);
            cluster.device_command(1, &json!({"cmd": "misbehave"}))?;
            failed.with_context(|| format!("nonsense in {what} was believed"))?;
            one.wait_for(&format!("ping -c 1 -W 2 {}", two.ip()), 2 * SHORT)
        })?;
        let said = one.sh("dmesg")?;
        ensure!(
            said.lines().any(|line| line.contains(": channel ")),
            "another part of the driver gave the device up after nonsense in {what}:\n{said}"
        );
        wait_active(one)?;
        both_ways(cluster, 1472)?;
    }
    // Two failures in a row are waited for longer: the next test begins anew.
    bind_anew(one)?;
    still_works(cluster)
}

fn unbound(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    for _ in 0..2 {
        under_traffic(cluster, || {
            unbind(one)?;
            let there = one.run("ip link show eth0", SHORT)?;
            ensure!(!there.ok(), "the interface is there without the driver");
            one.sh_in(super::driver::BIND, PATIENCE)?;
            both_ways(cluster, 56)
        })?;
    }
    bind(one)?;
    still_works(cluster)
}

fn unloaded(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    under_traffic(cluster, || {
        one.sh_in("rmmod ferrite", PATIENCE)?;
        one.sh(crate::shell::LOAD_DRIVER)?;
        both_ways(cluster, 56)
    })?;
    wait_active(one)?;
    match still_works(cluster) {
        Ok(()) => Ok(()),
        Err(error) => bail!("after it was loaded again: {error:#}"),
    }
}

fn killed(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    under_traffic(cluster, || {
        cluster.remove_device(2)?;
        // Whoever asks it something finds that it is not there.
        two.wait_for(
            "ethtool -S eth0 >/dev/null; ! ip link show eth0 >/dev/null || [ $(cat /sys/class/net/eth0/carrier) = 0 ]",
            2 * SHORT,
        )?;
        let lost = one.run(&format!("ping -c 1 -W 1 {}", two.ip()), SHORT)?;
        ensure!(
            !lost.ok(),
            "frames are answered by a machine without a card"
        );
        // Whoever asks and changes is answered.
        two.run("ethtool -S eth0; ethtool -L eth0 combined 1; ip link set eth0 mtu 2000; ip link set eth0 down; ip link set eth0 up", 2 * SHORT)?;
        Ok(())
    })?;
    two.sh_in("rmmod ferrite", PATIENCE)
        .context("the driver does not unload")?;
    let there = two.run("ip link show eth0", SHORT)?;
    ensure!(!there.ok(), "the interface is there without the driver");
    // The machine left behind serves on.
    one.sh("rdma link | grep -q 'state ACTIVE'")?;
    one.sh_in("rmmod ferrite", PATIENCE)?;
    super::no_leaks(cluster)
}

const FLOWS: u16 = 32;
const CHANNELS: usize = 4;
/// The first port of those that send them, and that of who receives them (`tests/clients/flows`).
const FIRST_PORT: u16 = 10_000;
const TO_PORT: u16 = 7020;

/// The key that the published vectors of the hash are for.
const PUBLISHED: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Toeplitz's hash: for each bit of the input that is set the 32 bits of the key from there on.
fn hash(key: &[u8; 40], input: &[u8]) -> u32 {
    let bit = |bytes: &[u8], at: usize| (bytes[at / 8] >> (7 - at % 8)) & 1;
    (0..input.len() * 8)
        .filter(|at| bit(input, *at) == 1)
        .map(|at| (at..at + 32).fold(0, |word, at| (word << 1) | u32::from(bit(key, at))))
        .fold(0, |hash, word| hash ^ word)
}

/// The input of the hash for a flow between two addresses.
fn tuple(from: ([u8; 4], u16), to: ([u8; 4], u16)) -> Vec<u8> {
    [
        &from.0[..],
        &to.0,
        &from.1.to_be_bytes(),
        &to.1.to_be_bytes(),
    ]
    .concat()
}

/// Of each flow, by its port: the bytes that it has carried, and the processors that have served it.
type Flows = BTreeMap<u16, (u64, BTreeSet<usize>)>;

/// The processors that have served each flow in a span that begins now, in which each flow has carried something.
fn span(vm: &Vm, serving: &Running<'_>) -> Result<BTreeMap<u16, BTreeSet<usize>>> {
    let told = || -> Result<(u64, Flows)> {
        let text = vm.sh("cat /run/flows")?;
        let mut lines = text.lines();
        let span = lines.next().context("no span")?.parse()?;
        let mut flows = BTreeMap::new();
        for line in lines {
            let words: Vec<u64> = line
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()?;
            let [port, bytes, processors @ ..] = &words[..] else {
                bail!("no flow: {line}");
            };
            let processors = processors.iter().map(|one| *one as usize).collect();
            flows.insert(u16::try_from(*port)?, (*bytes, processors));
        }
        Ok((span, flows))
    };
    // What was on its way when something was changed is of the first span.
    for _ in 0..2 {
        let (before, _) = told()?;
        serving.signal(libc::SIGUSR1)?;
        let all = wait_until(Instant::now() + vm.at_most(2 * SHORT), || {
            let (now, flows) = told()?;
            Ok(now > before
                && flows.len() == usize::from(FLOWS)
                && flows.values().all(|(bytes, _)| *bytes >= 1000))
        })?;
        ensure!(all, "some flows carry nothing: {:?}", told()?);
    }
    let (_, flows) = told()?;
    Ok(flows
        .into_iter()
        .map(|(port, (_, processors))| (port, processors))
        .collect())
}

fn flows(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let channels = two.sh("ethtool -l eth0 | grep -c 'Combined:[[:space:]]*4$'")?;
    ensure!(channels.trim() == "2", "there are not four channels");
    two.sh("rm -f /run/flows")?;
    let program = "exec /ferrite/tests/clients/flows";
    let serving = two.spawn(
        &format!("{program} serve {} {FLOWS} /run/flows 2>&1", two.ip()),
        20 * SHORT,
    )?;
    wait_listening(two, TO_PORT)?;
    let sending = one.spawn(
        &format!("{program} send {} {FLOWS} 2>&1", two.ip()),
        20 * SHORT,
    )?;
    let seen = spread_as_told(two, &serving);
    let sent = sending.end_with(libc::SIGTERM)?;
    let received = serving.wait()?;
    two.sh("ethtool -X eth0 default")?;
    seen.with_context(|| format!("{sent:?}, {received:?}"))?;
    // Nothing was lost or doubled on the way.
    ensure!(received.out.contains("whole"), "{received:?}");
    Ok(())
}

fn spread_as_told(two: &Vm, serving: &Running<'_>) -> Result<()> {
    two.wait_for("test -s /run/flows", SHORT)?;
    // Each channel has a processor of its own.
    let mut processors = Vec::new();
    for channel in 0..CHANNELS {
        let weights: Vec<_> = (0..CHANNELS)
            .map(|other| u8::from(other == channel).to_string())
            .collect();
        two.sh(&format!("ethtool -X eth0 weight {}", weights.join(" ")))?;
        let all: BTreeSet<usize> = span(two, serving)?.into_values().flatten().collect();
        ensure!(all.len() == 1, "channel {channel} is served by {all:?}");
        processors.extend(all);
    }
    let different: BTreeSet<_> = processors.iter().collect();
    ensure!(
        different.len() == CHANNELS,
        "channels are served by {processors:?}"
    );
    // Each flow is where its hash says, by the one key and by the other.
    let other = std::array::from_fn(|at| PUBLISHED[39 - at]);
    for key in [PUBLISHED, other] {
        let text: Vec<_> = key.iter().map(|byte| format!("{byte:02x}")).collect();
        two.sh(&format!(
            "ethtool -X eth0 hkey {} equal {CHANNELS}",
            text.join(":")
        ))?;
        let seen = span(two, serving)?;
        for (port, by) in &seen {
            ensure!(
                (FIRST_PORT..FIRST_PORT + FLOWS).contains(port),
                "a flow of port {port}"
            );
            let input = tuple(([10, 77, 0, 1], *port), ([10, 77, 0, 2], TO_PORT));
            // A table of 256 entries names all channels in turn.
            let expected = processors[(hash(&key, &input) as usize & 0xff) % CHANNELS];
            ensure!(
                by.iter().eq([&expected]),
                "port {port} is served by {by:?}, not by {expected}: {seen:?}"
            );
        }
        let all: BTreeSet<_> = seen.values().flatten().collect();
        ensure!(all.len() == CHANNELS, "flows are not spread: {seen:?}");
    }
    Ok(())
}

/// What is left at least to each of two that are in each other's way, of what it has alone: who starves has next to
/// nothing, and who shares two processors of an emulator with the other's programs has some tenths.
const SHARE: f64 = 0.05;

fn flood(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let address = two.sh("cat /sys/class/net/eth0/address")?;
    let received = || counter(two, "device_rx_frames");
    // The way of the flood, and against it.
    let write = || -> Result<[f64; 2]> {
        let mut rates = [0.0; 2];
        for (rate, (to, from)) in rates.iter_mut().zip([(two, one), (one, two)]) {
            *rate = perftest(to, from, "ib_write_bw", 65536, 500, "")?.average_bandwidth();
        }
        Ok(rates)
    };
    let alone = write()?;
    let flood = one.spawn(
        &format!("exec /ferrite/tests/clients/flood eth0 {}", address.trim()),
        20 * SHORT,
    )?;
    let both = (|| {
        let begun = received()?;
        let under_way = wait_until(Instant::now() + SHORT, || Ok(received()? > begun + 1000))?;
        ensure!(under_way, "there is no flood");
        // Frames a second, while something is done.
        let rate = |work: &dyn Fn() -> Result<()>| -> Result<f64> {
            let (begun, before) = (Instant::now(), received()?);
            work()?;
            Ok((received()? - before) as f64 / begun.elapsed().as_secs_f64())
        };
        let undisturbed = rate(&|| two.sh("sleep 3").map(drop))?;
        for _ in 0..2 {
            let beside = std::cell::Cell::new([0.0; 2]);
            let frames = rate(&|| {
                beside.set(write()?);
                Ok(())
            })?;
            let beside = beside.get();
            println!(
                "  note    {beside:.0?} MiB/s of {alone:.0?} beside {frames:.0} frames a second of {undisturbed:.0}"
            );
            ensure!(
                beside
                    .iter()
                    .zip(alone)
                    .all(|(now, alone)| *now >= SHARE * alone),
                "RDMA has {beside:?} MiB/s beside a flood, {alone:?} alone"
            );
            ensure!(
                frames >= SHARE * undisturbed,
                "{frames} frames a second of the flood come beside RDMA, {undisturbed} alone"
            );
            still_works(cluster)?;
        }
        // And so does other traffic.
        copy(one, two, 512, 7021)
    })();
    flood.end_with(libc::SIGTERM)?;
    both?;
    still_works(cluster)
}

#[cfg(test)]
mod checks {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        let first = tuple(([66, 9, 149, 187], 2794), ([161, 142, 100, 80], 1766));
        assert_eq!(hash(&PUBLISHED, &first), 0x51cc_c178);
        assert_eq!(hash(&PUBLISHED, &first[..8]), 0x323e_8fc2);
    }
}
