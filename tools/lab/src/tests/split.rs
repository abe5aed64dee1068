// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The split driver: hosts whose network interface is at the far end of an RDMA connection.
//!
//! Four machines: the I/O unit, with a second interface to a LAN of its own, a machine on that LAN, and two
//! hosts. Only the unit is on both networks, so that what a host reaches on the LAN it reaches through it.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::json;

use super::{no_leaks, wait_active, VmTest};
use crate::cluster::{Cluster, Options};
use crate::vm::Vm;

/// Over Ferrite's devices, with all checkers of the test kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a host's interface has address, MTU, carrier and statistics of the far one, and reaches the LAN: ping",
        reaches,
    ),
    VmTest::new(
        "iperf3 both ways, ssh, and a file that arrives as it was sent",
        traffic,
    ),
    VmTest::new(
        "two hosts behind one I/O unit reach the LAN, and each other",
        two_hosts,
    ),
    VmTest::new(
        "messages only, writes only, separate indications, pull, unacknowledged service: every byte arrives",
        variants,
    ),
    VmTest::new(
        "the connection is made again after a pulled cable, and after either module was loaded anew",
        reconnects,
    ),
    VmTest::new(
        "either module goes at full load, and so does the device below it",
        unloaded,
    ),
];

/// The last of the machines: nothing may be left.
pub const AFTERWARDS: &[VmTest] = &[VmTest::last("nothing leaks", no_leaks)];

/// Over Linux's software RoCEv2.
pub const OVER_RXE: &[VmTest] = &[VmTest::last(
    "over rxe: ping, iperf3 both ways, and a file that arrives as it was sent",
    over_rxe,
)];

const TIME: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(180);

/// Numbers of the machines.
const HOST: usize = 1;
const UNIT: usize = 2;
const OTHER_HOST: usize = 3;

/// Addresses on the LAN, by machine.
fn lan_ip(vm: &Vm) -> String {
    format!("192.168.7.{}", vm.index)
}

/// A wire between unit and LAN that is neither the fabric's nor RDMA's.
fn wire(vm: usize) -> Vec<String> {
    let server = if vm == UNIT { "on" } else { "off" };
    vec![
        "-netdev".to_owned(),
        format!("stream,id=lan,server={server},addr.type=unix,addr.path={{dir}}/wire.lan"),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=lan,romfile=,host_mtu=9000,mac=52:54:00:fd:77:{vm:02x}"),
    ]
}

/// The four machines.
pub fn options(usual: Options) -> Options {
    Options {
        vms: 4,
        cpus: 1,
        plain: vec![4],
        qemu_args: vec![vec![], wire(UNIT), vec![], wire(4)],
        ..usual
    }
}

/// The same without Ferrite's devices.
pub fn plain_options(usual: Options) -> Options {
    Options {
        device: false,
        plain: vec![],
        vms: 3,
        qemu_args: vec![vec![], wire(UNIT), wire(3)],
        ..options(usual)
    }
}

fn vm(cluster: &Cluster, index: usize) -> Result<&Vm> {
    cluster
        .vms
        .get(index - 1)
        .with_context(|| format!("there is no machine {index}"))
}

/// The machine on the LAN: the last one, which needs no device.
fn on_lan(cluster: &Cluster) -> Result<&Vm> {
    vm(cluster, cluster.vms.len())
}

/// The host's interface.
const OWN: &str = "split0";

/// The I/O unit begins to serve, and the LAN's machine has its address.
fn unit_up(cluster: &Cluster) -> Result<()> {
    let unit = vm(cluster, UNIT)?;
    let lan = on_lan(cluster)?;
    lan.sh(&format!(
        "ip link set eth0 down; ip addr replace {}/24 dev eth1; ip link set eth1 up",
        lan_ip(lan)
    ))?;
    unit.sh("ip link set eth1 up")?;
    with_driver(cluster, unit)?;
    load_unit(unit)
}

/// A machine with Ferrite's device has its driver.
fn with_driver(cluster: &Cluster, vm: &Vm) -> Result<()> {
    if cluster.device_pid(vm.index).is_none() || vm.run("lsmod | grep -q ^ferrite", TIME)?.code == 0
    {
        return Ok(());
    }
    vm.sh(crate::shell::LOAD_DRIVER)
        .context("loading the driver")?;
    wait_active(vm)
}

fn load_unit(unit: &Vm) -> Result<()> {
    unit.sh_in(
        "modprobe rdma_cm && insmod /ferrite/modules/rust_rdma_split_unit.ko lan=eth1",
        TIME,
    )
    .map(drop)
}

/// A host is connected with these parameters, and its interface has its address.
fn host_up(cluster: &Cluster, index: usize, parameters: &str) -> Result<()> {
    let (host, unit) = (vm(cluster, index)?, vm(cluster, UNIT)?);
    with_driver(cluster, host)?;
    host.sh_in(
        &format!(
            "set -e
             modprobe rdma_cm
             insmod /ferrite/modules/rust_rdma_split_host.ko server={} {parameters}
             ip addr replace {}/24 dev {OWN}
             ip link set {OWN} up",
            unit.ip(),
            lan_ip(host)
        ),
        TIME,
    )?;
    connected(host)
}

fn connected(host: &Vm) -> Result<()> {
    host.wait_for(
        &format!("[ \"$(cat /sys/class/net/{OWN}/carrier)\" = 1 ]"),
        TIME,
    )
    .map_err(|error| {
        let state = host.sh(&format!(
            "ip addr; ethtool -S {OWN} | grep -v ': 0$'; dmesg | tail -n 20"
        ));
        error.context(format!("no connection: {state:?}"))
    })
}

fn host_down(host: &Vm) -> Result<()> {
    host.sh_in("rmmod rust_rdma_split_host", TIME).map(drop)
}

fn unit_down(unit: &Vm) -> Result<()> {
    unit.sh_in("rmmod rust_rdma_split_unit", TIME).map(drop)
}

/// Does `test` with unit and first host connected.
fn with_host(
    cluster: &Cluster,
    parameters: &str,
    test: impl FnOnce(&Vm, &Vm, &Vm) -> Result<()>,
) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    unit_up(cluster)?;
    host_up(cluster, HOST, parameters)?;
    test(host, unit, lan)?;
    host_down(host)?;
    unit_down(unit)
}

/// Pings by small frames, by larger ones and by the largest that the interface takes.
fn pings(from: &Vm, to: &Vm) -> Result<()> {
    let to = lan_ip(to);
    for size in ["8", "600", "1472"] {
        from.sh_in(
            &format!("ping -q -c 5 -i 0.2 -W 5 -M do -s {size} {to}"),
            TIME,
        )
        .with_context(|| format!("{} bytes from {}", size, from.name()))?;
    }
    Ok(())
}

fn reaches(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, unit, lan| {
        pings(host, lan)?;
        pings(lan, host)?;
        // The unit's machine has the LAN as well.
        unit.sh(&format!("ip addr replace {}/24 dev eth1", lan_ip(unit)))?;
        pings(unit, lan)?;
        host.sh(&format!(
            "set -e
             ip -s link show {OWN}
             ethtool -i {OWN} | grep -q 'driver: rust_rdma_split'
             [ $(cat /sys/class/net/{OWN}/statistics/rx_packets) -ge 30 ]
             [ $(cat /sys/class/net/{OWN}/statistics/tx_packets) -ge 30 ]"
        ))?;
        // Larger frames, where both ends take them; not more than the far interface does.
        for vm in [unit, lan] {
            vm.sh("ip link set eth1 mtu 4000")?;
        }
        host.wait_for(&format!("ip link set {OWN} mtu 4000"), TIME)?;
        host.sh_in(
            &format!("ping -q -c 3 -i 0.2 -W 5 -M do -s 3900 {}", lan_ip(lan)),
            TIME,
        )?;
        let refused = host.run(&format!("ip link set {OWN} mtu 9000"), TIME)?;
        ensure!(
            refused.code != 0,
            "a larger frame than the far interface takes"
        );
        host.sh(&format!("ip link set {OWN} mtu 1500"))?;
        for vm in [unit, lan] {
            vm.sh("ip link set eth1 mtu 1500")?;
        }
        // Another address.
        host.sh_in(
            &format!("set -e; ip link set {OWN} down; ip link set {OWN} address 52:54:00:00:99:01; ip link set {OWN} up"),
            TIME,
        )?;
        connected(host)?;
        pings(host, lan)?;
        lan.sh(&format!(
            "ip neigh show {} | grep -q 52:54:00:00:99:01",
            lan_ip(host)
        ))?;
        // A VLAN.
        for (vm, below, net) in [(host, OWN, 1), (lan, "eth1", 4)] {
            vm.sh(&format!(
                "set -e; ip link add link {below} name v5 type vlan id 5
                 ip addr add 192.168.8.{net}/24 dev v5; ip link set v5 up"
            ))?;
        }
        host.sh_in("ping -q -c 3 -i 0.2 -W 5 192.168.8.4", TIME)?;
        for vm in [host, lan] {
            vm.sh("ip link del v5")?;
        }
        // The far link.
        unit.sh("ip link set eth1 down")?;
        host.wait_for(
            &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
            TIME,
        )?;
        unit.sh("ip link set eth1 up")?;
        connected(host)?;
        unit.sh(&format!("ip addr replace {}/24 dev eth1", lan_ip(unit)))?;
        pings(host, lan)
    })
}

/// iperf3 from one machine to another; the bits that arrived in a second.
fn iperf(server: &Vm, client: &Vm, more: &str) -> Result<f64> {
    let serving = server.spawn("exec iperf3 -s -1 >/run/iperf 2>&1", LONG)?;
    crate::traffic::wait_listening(server, 5201)?;
    let said = client.sh_in(
        &format!("iperf3 -J -t 3 {more} -c {}", lan_ip(server)),
        LONG,
    )?;
    serving.success()?;
    let report: serde_json::Value = serde_json::from_str(&said)?;
    let end = &report["end"];
    let received = [&end["sum_received"], &end["sum"]]
        .into_iter()
        .find_map(|sum| sum["bits_per_second"].as_f64());
    received
        .filter(|&bits| bits > 0.0)
        .context("iperf3 moved nothing")
}

/// A file of so many MiB from one machine to another, compared.
fn file(from: &Vm, to: &Vm, mib: usize) -> Result<()> {
    to.sh("rm -f /run/arrived")?;
    let receiving = to.spawn("exec nc -l -N 7000 >/run/arrived", LONG)?;
    crate::traffic::wait_listening(to, 7000)?;
    let sum = from.sh_in(
        &format!(
            "set -e
             head -c {mib}M /dev/urandom >/run/sent
             nc -N {} 7000 </run/sent
             sha256sum </run/sent",
            lan_ip(to)
        ),
        LONG,
    )?;
    receiving.success()?;
    let arrived = to.sh_in("sha256sum </run/arrived; rm /run/arrived", TIME)?;
    from.sh("rm /run/sent")?;
    ensure!(
        sum == arrived,
        "{mib} MiB from {} are not as they were",
        from.name()
    );
    Ok(())
}

fn traffic(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, _, lan| {
        iperf(lan, host, "")?;
        iperf(host, lan, "")?;
        iperf(lan, host, "-u -b 5M -l 1200")?;
        file(host, lan, 16)?;
        file(lan, host, 16)?;
        // A server and its client as users have them.
        lan.sh_in(
            "set -e
             mkdir -p /run/sshd /root/.ssh; rm -f /run/hostkey*
             ssh-keygen -q -t ed25519 -N '' -f /run/hostkey",
            TIME,
        )?;
        let public = host.sh_in(
            "set -e; rm -f /run/key*; ssh-keygen -q -t ed25519 -N '' -f /run/key; cat /run/key.pub",
            TIME,
        )?;
        lan.sh(&format!(
            "set -e; umask 077; echo '{}' >/root/.ssh/authorized_keys
             /usr/sbin/sshd -h /run/hostkey -o StrictModes=no -o UsePAM=no -o PidFile=/run/sshd.pid",
            public.trim()
        ))?;
        crate::traffic::wait_listening(lan, 22)?;
        let name = host.sh_in(
            &format!(
                "ssh -i /run/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectTimeout=30 \
                 root@{} hostname",
                lan_ip(lan)
            ),
            LONG,
        );
        lan.sh("kill $(cat /run/sshd.pid)")?;
        ensure!(name?.trim() == lan.name(), "ssh ends elsewhere");
        for name in ["tx_dropped", "rx_dropped"] {
            let count = host.sh(&format!("cat /sys/class/net/{OWN}/statistics/{name}"))?;
            // TCP fills all elements there are; then the queue is stopped, and nothing dropped.
            ensure!(
                count.trim() == "0" || name == "rx_dropped",
                "{name}: {count}"
            );
        }
        Ok(())
    })
}

fn two_hosts(cluster: &Cluster) -> Result<()> {
    let other = vm(cluster, OTHER_HOST)?;
    with_host(cluster, "", |host, _, lan| {
        host_up(cluster, OTHER_HOST, "")?;
        for (from, to) in [(host, lan), (other, lan), (host, other), (other, host)] {
            pings(from, to)?;
        }
        file(host, other, 4)?;
        file(other, lan, 4)?;
        // One goes, the other stays.
        host_down(other)?;
        pings(host, lan)
    })
}

/// Parameters of a host, and counters that grow with them.
const VARIANTS: &[(&str, &str)] = &[
    ("threshold=65535", "frames by message"),
    ("threshold=0", "frames by write"),
    ("threshold=0 separate_indication=1", "frames by write"),
    ("variant=2", "frames by read"),
    ("service=2", "frames by message"),
];

fn variants(cluster: &Cluster) -> Result<()> {
    for (parameters, _) in VARIANTS {
        with_host(cluster, parameters, |host, _, lan| {
            pings(host, lan)?;
            file(host, lan, 2)?;
            file(lan, host, 2)
        })
        .with_context(|| format!("with {parameters:?}"))?;
    }
    Ok(())
}

fn reconnects(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, unit, lan| {
        pings(host, lan)?;
        // By the cable of RDMA.
        cluster.device_command(UNIT, &json!({"cmd": "link", "up": false}))?;
        let lost = host.wait_for(
            &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
            LONG,
        );
        cluster.device_command(UNIT, &json!({"cmd": "link", "up": true}))?;
        lost.context("a connection without a cable is not found dead")?;
        wait_active(unit)?;
        connected(host)?;
        pings(host, lan)?;
        // The unit's module.
        unit_down(unit)?;
        host.wait_for(
            &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
            TIME,
        )?;
        load_unit(unit)?;
        connected(host)?;
        pings(host, lan)?;
        // The host's.
        host_down(host)?;
        host_up(cluster, HOST, "")?;
        pings(host, lan)
    })
}

/// Frames both ways as fast as they go, until it is told to end or can do no more.
fn flood(host: &Vm, lan: &Vm) -> Result<()> {
    for (from, to) in [(host, lan), (lan, host)] {
        from.sh(&format!(
            "(while [ ! -e /run/enough ]; do ping -q -f -s 1400 -c 2000 -W 1 {} >/dev/null 2>&1 || sleep 0.05; done) &",
            lan_ip(to)
        ))?;
    }
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

fn end_flood(host: &Vm, lan: &Vm) -> Result<()> {
    for vm in [host, lan] {
        vm.sh("touch /run/enough; while pgrep -x ping >/dev/null; do sleep 0.1; done; sleep 0.2; rm /run/enough")?;
    }
    Ok(())
}

fn unloaded(cluster: &Cluster) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    // Each leaves the other alone with what was under way.
    unit_up(cluster)?;
    host_up(cluster, HOST, "")?;
    flood(host, lan)?;
    host_down(host)?;
    end_flood(host, lan)?;
    host_up(cluster, HOST, "")?;
    pings(host, lan)?;
    flood(host, lan)?;
    unit_down(unit)?;
    end_flood(host, lan)?;
    load_unit(unit)?;
    connected(host)?;
    // A device that goes takes the connection with it, and the module stays.
    for vm in [host, unit] {
        flood(host, lan)?;
        super::driver::bind_anew(vm)?;
        end_flood(host, lan)?;
        connected(host)?;
        pings(host, lan)?;
    }
    host_down(host)?;
    unit_down(unit)
}

fn over_rxe(cluster: &Cluster) -> Result<()> {
    for index in [HOST, UNIT] {
        vm(cluster, index)?.sh_in(
            "set -e; modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0",
            TIME,
        )?;
    }
    with_host(cluster, "", |host, _, lan| {
        pings(host, lan)?;
        iperf(lan, host, "")?;
        iperf(host, lan, "")?;
        file(host, lan, 4)?;
        file(lan, host, 4)
    })?;
    no_leaks(cluster)
}
