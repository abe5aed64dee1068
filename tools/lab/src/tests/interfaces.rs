// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which network interface the port is paired with, whatever is done to the interfaces.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::driver::{bind, unbind};
use super::{nvme, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::vm::Vm;

/// On the unmodified Debian kernel, which has all kinds of interfaces.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "an interface with the card's address in a user's namespace changes nothing",
        address_taken_by_a_user,
    ),
    VmTest::new(
        "interfaces stacked on the card leave its port alone",
        stacked_on_the_card,
    ),
    VmTest::new("the port of a card under a bond works", under_a_bond),
    VmTest::new("the port of a card under a bridge works", under_a_bridge),
    VmTest::new("the port follows its interface to another name", renamed),
    VmTest::new(
        "the port is down while its interface is in another namespace",
        moved_to_a_namespace,
    ),
    VmTest::new(
        "a card that moves away from below a VLAN takes all GIDs, and finds those that are left",
        moved_below_a_vlan,
    ),
    VmTest::new(
        "card and RDMA device work in a namespace of their own",
        moved_together,
    ),
    VmTest::new(
        "an RDMA device that moves alone leaves its GIDs behind, and finds them again",
        moved_alone,
    ),
    VmTest::new(
        "the port has its interface again when that was unbound and bound",
        rebound,
    ),
    VmTest::new(
        "a driver that is unbound ends connections: the peer is told",
        unbound_under_a_connection,
    ),
    VmTest::new(
        "a driver that is unbound under an NVMe disk lets its user shut that down",
        unbound_under_a_disk,
    ),
];

const TIME: Duration = Duration::from_secs(60);

/// Checks that the port is paired with an interface. What the kernel does with an interface that was changed may take
/// a moment; who is paired with another one stays so.
fn paired_with(vm: &Vm, netdev: &str) -> Result<()> {
    let paired = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.windows(2).any(|pair| pair == ["state", "ACTIVE"])
            && words.windows(2).any(|pair| pair == ["netdev", netdev])
    };
    let mut text = String::new();
    let found = wait_until(Instant::now() + TIME, || {
        text = vm.sh("rdma link")?;
        Ok(text.lines().any(paired))
    })?;
    ensure!(found, "{}: not active with {netdev}:\n{text}", vm.name());
    Ok(())
}

/// Has RDMA devices shared by all namespaces, or not. The kernel refuses it while there is a namespace but the first,
/// and one that was removed stays for a moment.
fn set_namespaces(vm: &Vm, mode: &str) -> Result<()> {
    vm.wait_for(&format!("rdma system set netns {mode}"), TIME)
}

/// Waits until the port has no interface.
fn wait_unpaired(vm: &Vm) -> Result<()> {
    vm.wait_for("rdma link | grep 'state DOWN' | grep -vq 'netdev '", TIME)
}

/// A command that prints the GIDs of a device that are set, each in a line.
fn gids_of(device: &str) -> String {
    format!(
        "cat /sys/class/infiniband/{device}/ports/1/gids/* 2>/dev/null | grep -v '^\\(0000:\\)*0000$'"
    )
}

/// A command that succeeds where a device has a GID table of which nothing is set.
fn no_gids_of(device: &str) -> String {
    format!(
        "test -e /sys/class/infiniband/{device}/ports/1/gids/0 && ! {}",
        gids_of(device)
    )
}

/// The GIDs that the device of machine 1 has.
fn device_gids(cluster: &Cluster) -> Result<BTreeSet<String>> {
    let counters = cluster.counters(1)?;
    let gids = counters["gids"].as_array().context("no gids")?;
    let text = |gid: &Value| Some(gid.as_str()?.to_owned());
    gids.iter().map(text).collect::<Option<_>>().context("gids")
}

/// Waits until they are as they should be: the device is told by a work item.
fn wait_device_gids(cluster: &Cluster, good: impl Fn(&BTreeSet<String>) -> bool) -> Result<()> {
    let come = wait_until(Instant::now() + TIME, || Ok(good(&device_gids(cluster)?)))?;
    ensure!(come, "the device has the GIDs {:?}", device_gids(cluster)?);
    Ok(())
}

/// Gives the card its address and brings it up.
fn configure(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "ip addr replace {}/24 dev eth0; ip link set eth0 up",
        vm.ip()
    ))?;
    Ok(())
}

/// Runs `script` in a machine, then `undo`, whatever came of it and of `check`.
fn while_changed(
    vm: &Vm,
    script: &str,
    undo: &str,
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let checked = vm
        .sh_in(script, TIME)
        .and_then(|_| check())
        .with_context(|| format!("after {script}"));
    vm.sh_in(undo, TIME)?;
    configure(vm)?;
    checked?;
    paired_with(vm, "eth0").with_context(|| format!("after {undo}"))
}

fn address_taken_by_a_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("modprobe -a veth ipvlan macvlan")?;
    // As anybody may, in namespaces of his own.
    let user = "setpriv --reuid 1000 --regid 1000 --clear-groups unshare -Urn sh -ec";
    let mac = crate::vm::mac(1);
    for kind in ["ipvlan", "macvlan mode passthru"] {
        let script = |rest: &str| {
            format!(
                "{user} 'ip link add v0 address {mac} type veth peer name v1
                    ip link add i0 link v0 type {kind}
                    ip link set v1 up; ip link set v0 up; ip link set i0 up
                    {rest}'"
            )
        };
        one.sh_in(&script("ip link del i0; ip link del v0"), TIME)?;
        paired_with(one, "eth0").with_context(|| format!("{kind} that is gone"))?;
        let there = one.spawn(&script("echo >/tmp/there; exec sleep infinity"), 3 * TIME)?;
        one.wait_for("test -e /tmp/there", TIME)?;
        let checked = paired_with(one, "eth0").with_context(|| format!("{kind} that is there"));
        there.end_with(libc::SIGKILL)?;
        one.sh("rm /tmp/there")?;
        checked?;
    }
    still_works(cluster)
}

fn stacked_on_the_card(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    for kind in [
        "vlan id 9",
        "ipvlan",
        "macvlan mode bridge",
        "macvlan mode passthru",
        "macsec",
    ] {
        while_changed(
            one,
            &format!("ip link add link eth0 name top type {kind} && ip link set top up"),
            "ip link del top",
            || paired_with(one, "eth0"),
        )?;
        still_works(cluster).with_context(|| format!("after {kind}"))?;
    }
    Ok(())
}

/// Puts the card under a master that gets its address, and checks that RDMA works so.
fn under_a_master(cluster: &Cluster, make: &str) -> Result<()> {
    let (one, _) = cluster.two()?;
    while_changed(
        one,
        &format!(
            "set -e
             ip link add top {make}
             ip link set eth0 down
             ip addr flush dev eth0
             ip link set eth0 master top
             ip link set eth0 up
             ip link set top up
             ip addr add {}/24 dev top",
            one.ip()
        ),
        "ip link set eth0 nomaster; ip link del top",
        || {
            wait_active(one)?;
            paired_with(one, "eth0")?;
            still_works(cluster)
        },
    )?;
    wait_active(one)?;
    still_works(cluster)
}

fn under_a_bond(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("modprobe bonding max_bonds=0")?;
    under_a_master(cluster, "type bond mode active-backup miimon 100")?;
    // A bond of another address gives that to the card.
    let bond = "ip link add top type bond mode active-backup miimon 100
        ip link set top address 02:00:00:00:00:77
        ip link set eth0 down
        ip link set eth0 master top
        ip link set top up
        grep -q 02:00:00:00:00:77 /sys/class/net/eth0/address";
    let mac = crate::vm::mac(1);
    while_changed(
        one,
        bond,
        "ip link set eth0 nomaster; ip link del top",
        || paired_with(one, "eth0"),
    )?;
    one.sh(&format!("grep -q {mac} /sys/class/net/eth0/address"))
        .context("the card has not got its own address back")?;
    wait_active(one)?;
    still_works(cluster)
}

fn under_a_bridge(cluster: &Cluster) -> Result<()> {
    under_a_master(cluster, "type bridge forward_delay 0")
}

fn renamed(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let rename = |from: &str, to: &str| {
        format!("ip link set {from} down && ip link set {from} name {to} && ip link set {to} up")
    };
    while_changed(
        one,
        &rename("eth0", "lan7"),
        &rename("lan7", "eth0"),
        || {
            one.wait_for("rdma link | grep -q 'state ACTIVE'", TIME)?;
            paired_with(one, "lan7")
        },
    )?;
    wait_active(one)?;
    still_works(cluster)
}

fn moved_to_a_namespace(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("rm -f /run/raw")?;
    // Who has raw packets of the interface hears of it, and has none any more.
    let raw = one.spawn("exec verbs-check run raw-lost >/run/raw 2>&1", 2 * TIME)?;
    one.wait_for("grep -qs ready /run/raw", TIME)?;
    one.sh("ip netns add away; ip link set eth0 netns away")?;
    let gone = wait_unpaired(one);
    let lost = raw.wait()?;
    let said = one.sh("cat /run/raw")?;
    // Once by hand, once with the namespace.
    one.sh("ip netns exec away ip link set eth0 netns 1")?;
    configure(one)?;
    gone?;
    ensure!(
        lost.ok() && said.contains("done"),
        "the program with raw packets did not end well: {lost:?}\n{said}"
    );
    wait_active(one)?;
    still_works(cluster)?;
    one.sh("ip link set eth0 netns away; ip netns del away")?;
    one.wait_for("ip link show eth0", TIME)?;
    configure(one)?;
    wait_active(one)?;
    still_works(cluster)
}

fn moved_together(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let device = one.sh("ls /sys/class/infiniband | head -n1")?;
    let device = device.trim();
    set_namespaces(one, "exclusive")?;
    one.sh("ip netns add box")?;
    // The interface is complete before the RDMA device comes: no event of it tells of that.
    one.sh(&format!(
        "set -e
         ip link set eth0 netns box
         ip -n box addr add {}/24 dev eth0
         ip -n box link set eth0 up
         ip -n box link set lo up
         rdma dev set {device} netns box",
        one.ip()
    ))?;
    let worked = (|| {
        let inside = "ip netns exec box";
        one.wait_for(
            &format!("{inside} rdma link | grep 'state ACTIVE' | grep -q 'netdev eth0'"),
            TIME,
        )?;
        let flags = format!("-d {device} -g $gid -p 18517 -n 50 -c");
        let script = format!(
            "{} exec ibv_rc_pingpong {flags}",
            crate::traffic::DEVICE_AND_GID
        );
        let server = one.spawn(
            &format!("{inside} bash -c '{script}'"),
            Duration::from_secs(60),
        )?;
        let listening = format!("{inside} ss -tlnH 'sport = :18517' | grep -q .");
        if let Err(error) = one.wait_for(&listening, TIME) {
            bail!("{error:#}\nthe server: {:?}", server.end()?);
        }
        two.sh_in(
            &format!(
                "{} exec ibv_rc_pingpong -d $dev -g $gid -p 18517 -n 50 -c {}",
                crate::traffic::DEVICE_AND_GID,
                one.ip()
            ),
            Duration::from_secs(60),
        )?;
        server.success()
    })();
    // Both come back when the namespace goes.
    one.sh("ip netns del box")?;
    one.wait_for(
        &format!("ip link show eth0 && rdma dev | grep -q {device}"),
        TIME,
    )?;
    configure(one)?;
    set_namespaces(one, "shared")?;
    worked?;
    wait_active(one)?;
    paired_with(one, "eth0")?;
    still_works(cluster)
}

fn moved_below_a_vlan(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let device = one.sh("ls /sys/class/infiniband | head -n1")?;
    let device = device.trim();
    let gids = gids_of(device);
    let moved = (|| {
        one.sh("set -e
             ip netns add away
             ip link add link eth0 name lan7 type vlan id 7
             ip addr add 10.77.7.1/24 dev lan7
             ip addr add 10.77.7.2/24 dev lan7
             ip link set lan7 up")?;
        one.wait_for(&format!("{gids} | grep -q '0a4d:0702$'"), TIME)?;
        wait_device_gids(cluster, |gids| gids.contains("::ffff:10.77.7.2"))?;
        // The VLAN stays, and loses an address that nobody tells the port of.
        one.sh("ip link set eth0 netns away")?;
        wait_unpaired(one)?;
        one.wait_for(&no_gids_of(device), TIME)?;
        wait_device_gids(cluster, BTreeSet::is_empty)?;
        one.sh("ip addr del 10.77.7.2/24 dev lan7")
    })();
    // Whatever came of it, the next test has its card and no more.
    let back = one
        .sh("! ip -n away link show eth0 || ip -n away link set eth0 netns 1")
        .and_then(|_| configure(one));
    let found = moved.and_then(|_| {
        back?;
        one.sh("ip link set lan7 up")?;
        one.wait_for(&format!("{gids} | grep -q '0a4d:0701$'"), TIME)?;
        wait_device_gids(cluster, |gids| gids.contains("::ffff:10.77.7.1"))?;
        let now = one.sh(&gids)?;
        let told = device_gids(cluster)?;
        ensure!(
            !now.contains("0a4d:0702") && !told.contains("::ffff:10.77.7.2"),
            "a GID of an address that was removed:\n{now}\nthe device has {told:?}"
        );
        Ok(())
    });
    let clean = one.sh("ip link del lan7; ip netns del away");
    found?;
    clean?;
    wait_active(one)?;
    paired_with(one, "eth0")?;
    still_works(cluster)
}

fn moved_alone(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let device = one.sh("ls /sys/class/infiniband | head -n1")?;
    let device = device.trim();
    let gids = gids_of(device);
    let moved = (|| {
        set_namespaces(one, "exclusive")?;
        one.sh("set -e
             ip netns add box
             ip link add link eth0 name lan7 type vlan id 7
             ip addr add 10.77.7.1/24 dev lan7
             ip link set lan7 up")?;
        // Of the card, and of what is stacked on it.
        one.wait_for(&format!("{gids} | grep -q '0a4d:0701$'"), TIME)?;
        one.sh(&format!("rdma dev set {device} netns box"))?;
        let inside = "ip netns exec box";
        one.wait_for(&format!("{inside} rdma link | grep -q {device}/1"), TIME)?;
        one.wait_for(&format!("{inside} sh -c \"{}\"", no_gids_of(device)), TIME)
            .context("GIDs of another namespace, or no table")?;
        wait_device_gids(cluster, BTreeSet::is_empty)?;
        let link = one.sh(&format!("{inside} rdma link"))?;
        ensure!(!link.contains("netdev"), "an interface is paired:\n{link}");
        Ok(())
    })();
    let back = one
        .sh("ip netns del box")
        .and_then(|_| one.wait_for(&format!("rdma dev | grep -q {device}"), TIME));
    let found = moved.and_then(|()| {
        back?;
        one.wait_for(&format!("{gids} | grep -q '0a4d:0701$'"), TIME)?;
        wait_device_gids(cluster, |gids| gids.contains("::ffff:10.77.7.1"))
    });
    let clean = one
        .sh("ip link del lan7")
        .and_then(|_| set_namespaces(one, "shared"));
    found?;
    clean?;
    wait_active(one)?;
    paired_with(one, "eth0")?;
    still_works(cluster)
}

fn rebound(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh(
        "basename $(readlink -f /sys/class/net/eth0/device) >/run/card
         cat /run/card >/sys/bus/virtio/drivers/virtio_net/unbind",
    )?;
    let gone = wait_unpaired(one);
    one.sh("cat /run/card >/sys/bus/virtio/drivers/virtio_net/bind")?;
    one.wait_for("ip link show eth0", TIME)?;
    configure(one)?;
    gone?;
    wait_active(one)?;
    paired_with(one, "eth0")?;
    still_works(cluster)
}

fn unbound_under_a_connection(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let program = "/ferrite/tests/clients/cm-check";
    one.sh("rm -f /run/cm-check")?;
    two.sh("rm -f /run/cm-check")?;
    let server = one.spawn(
        &format!("exec {program} serve {} >/run/cm-check 2>&1", one.ip()),
        6 * TIME,
    )?;
    one.wait_for("grep -q listening /run/cm-check", TIME)?;
    let client = two.spawn(
        &format!("exec {program} hold {} >/run/cm-check 2>&1", one.ip()),
        6 * TIME,
    )?;
    let told = (|| {
        two.wait_for("grep -q ^connected /run/cm-check", TIME)?;
        unbind(one)?;
        // Nothing was under way: only the end that lets go can tell.
        two.wait_for("grep -q ^disconnected /run/cm-check", TIME)
            .context("the peer was not told of the end of the connection")
    })();
    let ended = server.end().and_then(|_| client.end());
    let back = bind(one);
    // What was to be seen comes first: the rest may fail because of it.
    told?;
    ended?;
    back?;
    still_works(cluster)
}

fn unbound_under_a_disk(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    nvme::serve(two)?;
    nvme::connect(one, two)?;
    one.wait_for("test -b /dev/nvme0n1", TIME)?;
    let let_go = (|| {
        one.sh("dd if=/dev/nvme0n1 of=/dev/null bs=64k count=16 iflag=direct status=none")?;
        one.sh("dmesg -C")?;
        unbind(one)?;
        // Its user tells the other side that it shuts down, and waits for the answer.
        let said = one.sh("dmesg")?;
        let failed = |line: &str| {
            let line = line.to_lowercase();
            let bad = ["error", "fail", "timeout", "timed out", "incomplete"];
            line.contains("nvme") && bad.iter().any(|word| line.contains(word))
        };
        ensure!(
            !said.lines().any(failed),
            "the disk was not shut down:\n{said}"
        );
        Ok(())
    })();
    let back = bind(one)
        .and_then(|_| nvme::disconnect(one))
        .and_then(|_| nvme::end(two));
    let_go.and(back)?;
    still_works(cluster)
}
