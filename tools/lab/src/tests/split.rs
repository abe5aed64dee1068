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

/// Over Ferrite's devices, with all checkers of the test kernel: a short selection, for each run. Each finds the modules
/// as the one before has left them, so that they are loaded once.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a host's interface has address, MTU, carrier and statistics of the far one, and reaches the LAN: ping",
        reaches,
    ),
    VmTest::new(
        "two hosts behind one I/O unit reach the LAN, and each other; files both ways arrive as they were sent",
        two_hosts,
    ),
    VmTest::new(
        "some of what a host should not say is refused and counted, and others work",
        some_bad_hosts,
    ),
    VmTest::new("either module goes at full load", unloaded),
];

/// The rest, for the long run.
pub const LONG_TESTS: &[VmTest] = &[
    VmTest::new(
        "an indication never overtakes its data, however the wire reorders: each datagram is there once, as it was sent",
        indications,
    ),
    VmTest::new(
        "at the end of an orderly connection each buffer of both sides is flushed, and counted so at either",
        flushed,
    ),
    VmTest::new(
        "a host sends as itself and to its VLANs only, and an ordinary user is neither host nor I/O unit",
        impostors,
    ),
    VmTest::new(
        "one machine that comes all the time gets its own places only, and others come",
        crowded,
    ),
    VmTest::new(
        "iperf3 both ways, ssh, and a file that arrives as it was sent",
        traffic,
    ),
    VmTest::new(
        "address, groups, VLANs and filters that a host wants are those of the far interface; ethtool shows its counters",
        configured,
    ),
    VmTest::new(
        "frames that a host has no room for are counted, each of them, and it gets more room; no other is lost",
        room,
    ),
    VmTest::new(
        "a host that says what it should not, and one that says nothing more: refused, counted, and others work",
        bad_hosts,
    ),
    VmTest::new(
        "an I/O unit that says what it should not: refused, counted, and the next one works",
        bad_unit,
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
        "the device below either module goes at full load, and the module stays",
        removed,
    ),
];

/// The last of the machines: nothing may be left.
pub const AFTERWARDS: &[VmTest] = &[VmTest::last("nothing leaks", no_leaks)];

/// Over Linux's software RoCEv2.
pub const OVER_RXE: &[VmTest] = &[
    VmTest::new(
        "iperf3 both ways, ssh, files that arrive as they were sent, and two hosts",
        over_rxe,
    ),
    VmTest::new(
        "a device that speaks iWARP is refused, and the log says why",
        iwarp_is_refused,
    ),
];

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
fn unit_up(cluster: &Cluster, parameters: &str) -> Result<()> {
    let unit = vm(cluster, UNIT)?;
    let lan = on_lan(cluster)?;
    lan.sh(&format!(
        "ip link set eth0 down; ip addr replace {}/24 dev eth1; ip link set eth1 up",
        lan_ip(lan)
    ))?;
    unit.sh("ip link set eth1 up")?;
    with_driver(cluster, unit)?;
    load_unit(unit, parameters)
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

/// What hosts have to know.
const KEY: u64 = 0x0bad_cafe_0000_0815;

/// Parameters of a module with the usual key, unless they name another: a module in Rust takes each parameter once, and says
/// that the second one is there already (`EEXIST`), as if the module were.
fn with_key(parameters: &str) -> String {
    let is_key = |parameter: &str| parameter.starts_with("key=");
    match parameters.split(' ').any(is_key) {
        true => parameters.to_owned(),
        false => format!("key={KEY} {parameters}"),
    }
}

fn load_unit(unit: &Vm, parameters: &str) -> Result<()> {
    let parameters = with_key(parameters);
    unit.sh_in(
        &format!(
            "modprobe rdma_cm && insmod /ferrite/modules/rust_rdma_split_unit.ko lan=eth1 {parameters}"
        ),
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
             insmod /ferrite/modules/rust_rdma_split_host.ko server={} {}
             ip addr replace {}/24 dev {OWN}
             ip link set {OWN} up",
            unit.ip(),
            with_key(parameters),
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
    with_modules(cluster, "", parameters, test)
}

/// The same with parameters of both.
fn with_modules(
    cluster: &Cluster,
    of_unit: &str,
    of_host: &str,
    test: impl FnOnce(&Vm, &Vm, &Vm) -> Result<()>,
) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    unit_up(cluster, of_unit)?;
    host_up(cluster, HOST, of_host)?;
    // The LAN may know an address of the host that was another test's.
    lan.sh("ip neigh flush all")?;
    test(host, unit, lan)?;
    host_down(host)?;
    unit_down(unit)
}

/// Does `test` with unit and first host connected as they are meant to be, be it since an earlier test; they stay so.
fn with_usual(cluster: &Cluster, test: impl FnOnce(&Vm, &Vm, &Vm) -> Result<()>) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    if !has_module(unit, "rust_rdma_split_unit")? {
        unit_up(cluster, "")?;
    }
    if has_module(host, "rust_rdma_split_host")? {
        connected(host)?;
    } else {
        host_up(cluster, HOST, "")?;
        lan.sh("ip neigh flush all")?;
    }
    test(host, unit, lan)
}

fn has_module(vm: &Vm, name: &str) -> Result<bool> {
    Ok(vm.run(&format!("[ -e /sys/module/{name} ]"), TIME)?.code == 0)
}

/// So many pings of each size.
const PINGS: u64 = 5;

/// Pings by small frames, by larger ones and by the largest that the interface takes.
fn pings(from: &Vm, to: &Vm) -> Result<()> {
    // One command for all: to start one takes longer than what it does.
    from.sh_in(
        &format!(
            "for size in 8 600 1472; do ping -q -c {PINGS} -i 0.02 -W 5 -M do -s $size {} || exit; done",
            lan_ip(to)
        ),
        TIME,
    )
    .with_context(|| format!("from {}", from.name()))
    .map(drop)
}

fn reaches(cluster: &Cluster) -> Result<()> {
    with_usual(cluster, |host, unit, lan| {
        pings(host, lan)?;
        pings(lan, host)?;
        // The unit's machine has the LAN as well.
        unit.sh(&format!("ip addr replace {}/24 dev eth1", lan_ip(unit)))?;
        pings(unit, lan)?;
        host.sh(&format!(
            "set -e
             ip -s link show {OWN}
             ethtool -i {OWN} | grep -q 'driver: rust_rdma_split'
             [ $(cat /sys/class/net/{OWN}/statistics/rx_packets) -ge {least} ]
             [ $(cat /sys/class/net/{OWN}/statistics/tx_packets) -ge {least} ]",
            // Of three sizes, asked and answered.
            least = 6 * PINGS
        ))?;
        // Larger frames, where both ends take them; not more than the far interface does.
        for vm in [unit, lan] {
            vm.sh("ip link set eth1 mtu 4000")?;
        }
        host.wait_for(&format!("ip link set {OWN} mtu 4000"), TIME)?;
        host.sh_in(
            &format!("ping -q -c 3 -i 0.02 -W 5 -M do -s 3900 {}", lan_ip(lan)),
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
        host.sh_in("ping -q -c 3 -i 0.02 -W 5 192.168.8.4", TIME)?;
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

/// iperf3 from one machine to another, so many bytes however long they take; the bits that arrived in a second.
fn iperf(server: &Vm, client: &Vm, more: &str) -> Result<f64> {
    let serving = server.spawn("exec iperf3 -s -1 >/run/iperf 2>&1", LONG)?;
    crate::traffic::wait_listening(server, 5201)?;
    let said = client.sh_in(
        &format!("iperf3 -J -n 2M {more} -c {}", lan_ip(server)),
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
        .with_context(|| format!("iperf3 moved nothing: {end}"))
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
        let mib = if cluster.thorough() { 16 } else { 4 };
        file(host, lan, mib)?;
        file(lan, host, mib)?;
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
    with_usual(cluster, |host, _, lan| {
        host_up(cluster, OTHER_HOST, "")?;
        for (from, to) in [(host, lan), (other, lan), (host, other), (other, host)] {
            pings(from, to)?;
        }
        let mib = if cluster.thorough() { 4 } else { 1 };
        for (from, to) in [(host, lan), (lan, host), (host, other), (other, lan)] {
            file(from, to, mib)?;
        }
        // One goes, the other stays.
        host_down(other)?;
        pings(host, lan)
    })
}

/// Lists what the RDMA core knows of regions and of connections on a machine's devices.
const REGISTERED: &str = "rdma resource show mr; rdma resource show cm_id";

/// That is there while a module has a connection.
fn is_registered(vms: &[&Vm]) -> Result<()> {
    for vm in vms {
        ensure!(
            !vm.sh(REGISTERED)?.trim().is_empty(),
            "{} is connected without a region or a connection",
            vm.name()
        );
    }
    Ok(())
}

/// And gone with the modules: each pool is deregistered, each connection destroyed.
fn nothing_is_registered(vms: &[&Vm]) -> Result<()> {
    for vm in vms {
        vm.wait_for(&format!("[ -z \"$({REGISTERED})\" ]"), TIME)
            .with_context(|| format!("{} has some left: {:?}", vm.name(), vm.sh(REGISTERED)))?;
    }
    Ok(())
}

/// Of two hosts one goes, then the I/O unit.
fn flushed(cluster: &Cluster) -> Result<()> {
    let other = vm(cluster, OTHER_HOST)?;
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    unit_up(cluster, "")?;
    for index in [HOST, OTHER_HOST] {
        host_up(cluster, index, "")?;
        pings(vm(cluster, index)?, lan)?;
    }
    is_registered(&[host, other, unit])?;
    let (there, before) = (lent(&counters_of(other)?)?, counters_of_unit(unit)?);
    host_down(other)?;
    are_flushed(there, &before, &counters_of_unit(unit)?)?;
    pings(host, lan)?;
    let before = counters_of(host)?;
    unit_down(unit)?;
    are_flushed(lent(&before)?, &before, &counters_of(host)?)?;
    host_down(host)?;
    nothing_is_registered(&[host, other, unit])
}

fn counted(counters: &Counters, name: &str) -> Result<u64> {
    let value = counters.get(name).copied();
    value.with_context(|| format!("no counter {name}"))
}

/// Buffers, of both sides, that are announced on connections that are there.
fn lent(counters: &Counters) -> Result<u64> {
    let of = |name: &str| counted(counters, &format!("elements_{name}"));
    let lent = of("announced")? - of("flushed")? - of("forfeited")?;
    ensure!(lent != 0, "nobody has announced anything");
    Ok(lent)
}

/// A connection with so many buffers has ended in an orderly way: each of them was given up by both sides.
fn are_flushed(lent: u64, before: &Counters, after: &Counters) -> Result<()> {
    let more = |name: &str| -> Result<u64> { Ok(counted(after, name)? - counted(before, name)?) };
    let ended = (more("elements_flushed")?, more("elements_forfeited")?);
    ensure!(
        ended == (lent, 0),
        "of {lent} buffers so many were flushed, and so many went with the connection: {ended:?}"
    );
    Ok(())
}

/// Parameters of a host, and counters that grow with them. In the pull variant nobody writes to the other, in all others
/// nobody reads.
const VARIANTS: &[(&str, &str, &str)] = &[
    ("threshold=65535", "sent_by_message", "rdma_reads"),
    ("threshold=0", "told_by_immediate", "rdma_reads"),
    (
        "threshold=0 separate_indication=1",
        "told_by_indicate",
        "rdma_reads",
    ),
    ("variant=2", "sent_by_read", "rdma_writes"),
    ("service=2", "sent_by_message", "rdma_reads"),
];

fn variants(cluster: &Cluster) -> Result<()> {
    for (parameters, counter, never) in VARIANTS {
        with_host(cluster, parameters, |host, unit, lan| {
            pings(host, lan)?;
            // One after the other, so that each finds an element: those of the two larger sizes at least. Where many
            // are under way they take what way there is.
            let counted = counter_of(host, counter)?;
            ensure!(counted >= 2 * PINGS, "{counter} is {counted} only");
            file(host, lan, 2)?;
            file(lan, host, 2)?;
            for counters in [counters_of(host)?, counters_of_unit(unit)?] {
                let wrong = counters.get(*never).copied();
                ensure!(wrong == Some(0), "{never} is {wrong:?}");
            }
            Ok(())
        })
        .with_context(|| format!("with {parameters:?}"))?;
    }
    Ok(())
}

/// The cable of RDMA is pulled, and comes back.
fn without_cable(cluster: &Cluster, host: &Vm, unit: &Vm, lan: &Vm) -> Result<()> {
    pings(host, lan)?;
    cluster.device_command(UNIT, &json!({"cmd": "link", "up": false}))?;
    let lost = host.wait_for(
        &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
        LONG,
    );
    cluster.device_command(UNIT, &json!({"cmd": "link", "up": true}))?;
    lost.context("a connection without a cable is not found dead")?;
    wait_active(unit)?;
    connected(host)?;
    pings(host, lan)
}

fn reconnects(cluster: &Cluster) -> Result<()> {
    // Where nothing is acknowledged by an adapter it is the missing answers that tell.
    with_host(cluster, "service=2", |host, unit, lan| {
        without_cable(cluster, host, unit, lan)
    })
    .context("the unacknowledged service")?;
    with_host(cluster, "", |host, unit, lan| {
        without_cable(cluster, host, unit, lan)?;
        // The unit's module.
        unit_down(unit)?;
        host.wait_for(
            &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
            TIME,
        )?;
        load_unit(unit, "")?;
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
    let frames = of_host(host, "rx_packets")? + FLOODED;
    host.wait_for(
        &format!("[ $(cat /sys/class/net/{OWN}/statistics/rx_packets) -ge {frames} ]"),
        TIME,
    )
}

/// Frames that a host has received of a flood before something happens.
const FLOODED: u64 = 200;

fn end_flood(host: &Vm, lan: &Vm) -> Result<()> {
    for vm in [host, lan] {
        // One whose interface has gone counts nothing and would never end.
        vm.sh(
            "touch /run/enough; while pkill -x ping; do sleep 0.1; done; sleep 0.2; rm /run/enough",
        )?;
    }
    Ok(())
}

/// Each leaves the other alone with what was under way.
fn unloaded(cluster: &Cluster) -> Result<()> {
    with_usual(cluster, |host, unit, lan| {
        flood(host, lan)?;
        host_down(host)?;
        end_flood(host, lan)?;
        host_up(cluster, HOST, "")?;
        pings(host, lan)?;
        flood(host, lan)?;
        unit_down(unit)?;
        end_flood(host, lan)?;
        load_unit(unit, "")?;
        connected(host)?;
        pings(host, lan)?;
        is_registered(&[host, unit])?;
        host_down(host)?;
        unit_down(unit)?;
        nothing_is_registered(&[host, unit])
    })
}

/// Datagrams in each direction, and how many of them are under way.
const DATAGRAMS: u64 = 400;
const WINDOW: u64 = 16;

/// What both ends of a stream of datagrams know: they are of one size, and each has a number and bytes of its own.
fn stream(rest: &str) -> String {
    format!(
        "python3 -u -c \"
import socket
def datagram(n): return n.to_bytes(4, 'big') + bytes([n % 251]) * 1396
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
{rest}\""
    )
}

/// Datagrams from one machine to another, each of which is answered: all are there, once and in order, as they were sent.
fn datagrams(from: &Vm, to: &Vm) -> Result<()> {
    let receiving = to.spawn(
        &format!(
            "exec {} >/run/datagrams 2>&1",
            stream(&format!(
                "s.bind(('0.0.0.0', 7001))
print('ready')
for n in range({DATAGRAMS}):
    data, who = s.recvfrom(2000)
    if data != datagram(n):
        print('not', n, 'but', data[:8].hex())
        raise SystemExit(1)
    s.sendto(data[:4], who)"
            ))
        ),
        LONG,
    )?;
    to.wait_for("grep -q ready /run/datagrams", TIME)?;
    let sent = from.sh_in(
        &stream(&format!(
            "s.connect(('{}', 7001))
done = 0
def answer():
    global done
    n = int.from_bytes(s.recv(2000), 'big')
    if n != done: raise SystemExit(f'the answer to {{done}} is one to {{n}}')
    done += 1
for n in range({DATAGRAMS}):
    s.send(datagram(n))
    if n - done >= {WINDOW}: answer()
while done < {DATAGRAMS}: answer()",
            lan_ip(to)
        )),
        LONG,
    );
    let received = receiving.wait()?;
    let said = to.sh("cat /run/datagrams")?;
    ensure!(
        sent.is_ok() && received.ok(),
        "from {}: {sent:?}, and there: {said}",
        from.name()
    );
    Ok(())
}

/// The indication travels on another connection than the data, and each packet may be overtaken by those behind it. An
/// element whose frame is not there yet has an earlier one, which the machines would take for one that was sent twice.
fn indications(cluster: &Cluster) -> Result<()> {
    let separate = "threshold=0 separate_indication=1";
    with_modules(cluster, separate, separate, |host, unit, lan| {
        pings(host, lan)?;
        let reordered = || -> Result<u64> {
            let stats = cluster.fabric_command(&json!({"cmd": "stats"}))?;
            Ok(super::wire::counted(&stats, "reordered"))
        };
        let before = reordered()?;
        cluster.fabric_command(&json!({"cmd": "faults", "only": "roce", "reorder": 0.1}))?;
        let arrived = datagrams(host, lan).and_then(|()| datagrams(lan, host));
        let overtaken = reordered();
        cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
        arrived?;
        let overtaken = overtaken? - before;
        ensure!(
            overtaken >= DATAGRAMS / 10,
            "only {overtaken} packets were overtaken"
        );
        for counters in [counters_of(host)?, counters_of_unit(unit)?] {
            let by = |name: &str| counted(&counters, name);
            let (indicated, immediate) = (by("told_by_indicate")?, by("told_by_immediate")?);
            // Those of one direction at least, which fit no message.
            ensure!(
                indicated > DATAGRAMS && immediate == 0,
                "{indicated} frames were told of by messages, {immediate} by immediate data"
            );
        }
        pings(host, lan)
    })
}

/// A device that goes takes the connection with it, and the module stays.
fn removed(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, unit, lan| {
        for vm in [host, unit] {
            flood(host, lan)?;
            super::driver::unbind(vm)?;
            host.wait_for(
                &format!("[ $(cat /sys/class/net/{OWN}/carrier) = 0 ]"),
                TIME,
            )?;
            end_flood(host, lan)?;
            super::driver::bind(vm)?;
            connected(host)?;
            pings(host, lan)?;
        }
        let gone = counter_of(host, "device_removed")?;
        ensure!(gone == 1, "the host has seen its device go {gone} times");
        Ok(())
    })
}

fn over_rxe(cluster: &Cluster) -> Result<()> {
    for index in [HOST, UNIT, OTHER_HOST] {
        vm(cluster, index)?.sh_in(
            "set -e; modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0",
            TIME,
        )?;
    }
    traffic(cluster)?;
    two_hosts(cluster)?;
    host_down(vm(cluster, HOST)?)?;
    unit_down(vm(cluster, UNIT)?)?;
    for index in [HOST, UNIT, OTHER_HOST] {
        vm(cluster, index)?.sh_in("rdma link del rxe0", TIME)?;
    }
    no_leaks(cluster)
}

/// iWARP has neither writes with immediate data nor completions that tell of what has arrived.
fn iwarp_is_refused(cluster: &Cluster) -> Result<()> {
    let (host, unit) = (vm(cluster, HOST)?, vm(cluster, UNIT)?);
    for vm in [host, unit] {
        vm.sh_in(
            "set -e; modprobe siw; rdma link add siw0 type siw netdev eth0",
            TIME,
        )?;
    }
    unit_up(cluster, "")?;
    host.sh_in(
        &format!(
            "insmod /ferrite/modules/rust_rdma_split_host.ko server={} key={KEY}",
            unit.ip()
        ),
        TIME,
    )?;
    host.wait_for("dmesg | grep -q 'iWARP has no writes with immediate'", TIME)?;
    host_down(host)?;
    unit_down(unit)?;
    for vm in [host, unit] {
        vm.sh_in("rdma link del siw0", TIME)?;
    }
    Ok(())
}

/// A number of the host's interface, as all interfaces have it.
fn of_host(host: &Vm, name: &str) -> Result<u64> {
    let said = host.sh(&format!("cat /sys/class/net/{OWN}/statistics/{name}"))?;
    Ok(said.trim().parse()?)
}

/// Counters by their names.
type Counters = std::collections::BTreeMap<String, u64>;

/// Lines of a name and a number; others are none.
fn counters(said: &str, between: char) -> Counters {
    let lines = said.lines().filter_map(|line| line.split_once(between));
    let numbers = lines.filter_map(|(name, value)| {
        let value = value.trim().parse().ok()?;
        Some((name.trim().to_owned(), value))
    });
    numbers.collect()
}

/// What `ethtool -S` shows of the host's interface.
fn counters_of(host: &Vm) -> Result<Counters> {
    Ok(counters(&host.sh(&format!("ethtool -S {OWN}"))?, ':'))
}

fn counter_of(host: &Vm, name: &str) -> Result<u64> {
    counted(&counters_of(host)?, name)
}

/// What was counted of all hosts that an I/O unit has had.
fn counters_of_unit(unit: &Vm) -> Result<Counters> {
    let said = unit.sh("cat /sys/kernel/debug/rust_rdma_split_unit/statistics")?;
    Ok(counters(&said, ' '))
}

/// What the I/O unit shows of its one host.
fn host_line(unit: &Vm) -> Result<String> {
    unit.sh("grep '^host' /sys/kernel/debug/rust_rdma_split_unit/hosts")
        .context("the I/O unit has no host")
}

/// The number after a word; what is 0 is not shown.
fn word_after(line: &str, name: &str) -> Result<u64> {
    let mut words = line.split_whitespace();
    words
        .find(|word| *word == name)
        .and_then(|_| words.next())
        .map_or(Ok(0), |value| Ok(value.parse()?))
}

fn shown(unit: &Vm, name: &str) -> Result<u64> {
    word_after(&host_line(unit)?, name)
}

/// Another address, which an interface takes that is down.
fn new_mac(mac: &str) -> String {
    format!("ip link set {OWN} down && ip link set {OWN} address {mac} && ip link set {OWN} up")
}

/// The host's log says that the I/O unit refuses something, and why: by name or number, as its kernel has them.
fn is_refused(host: &Vm, operation: &str, name: &str, number: i32) -> Result<()> {
    let why = format!("\\({name}\\|Error({number})\\)");
    host.wait_for(
        &format!("dmesg | grep -q 'the I/O unit refuses {operation}: {why}'"),
        TIME,
    )
}

/// VLANs of a host, at most.
const MOST_VLANS: usize = 64;

fn configured(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, unit, lan| {
        let_trust(host, unit)?;
        let group = "33:33:00:00:77:77";
        let mac = "52:54:00:00:99:02";
        let has_group = format!("ip maddr show dev eth1 | grep -q {group}");
        let has_mac = format!("bridge fdb show dev eth1 | grep -q {mac}");
        let is_promiscuous = "ip -d link show eth1 | grep -q 'promiscuity 1'";
        let groups = "grep -q 'vlans 1' /sys/kernel/debug/rust_rdma_split_unit/hosts";
        for (what, add, remove, seen) in [
            (
                "a group",
                format!("ip maddr add {group} dev {OWN}"),
                format!("ip maddr del {group} dev {OWN}"),
                has_group.as_str(),
            ),
            (
                "an address",
                new_mac(mac),
                new_mac("52:54:00:00:99:03"),
                has_mac.as_str(),
            ),
            (
                "all frames",
                format!("ip link set {OWN} promisc on"),
                format!("ip link set {OWN} promisc off"),
                is_promiscuous,
            ),
            (
                "a VLAN",
                format!("ip link add link {OWN} name v6 type vlan id 6"),
                "ip link del v6".to_owned(),
                groups,
            ),
        ] {
            ensure!(
                unit.run(seen, TIME)?.code != 0,
                "{what} is there before it is wanted"
            );
            host.sh(&add)?;
            unit.wait_for(seen, TIME).context(what)?;
            host.sh(&remove)?;
            unit.wait_for(&format!("! ({seen})"), TIME).context(what)?;
        }
        // One more than a host may have: it is told that there is no room, and those before stay.
        let vlans = |verb: &str| {
            format!(
                "for n in $(seq 100 {last}); do echo link {verb}; done | ip -batch -",
                last = 100 + MOST_VLANS,
            )
        };
        let has_vlans = |count: usize| {
            let hosts = "/sys/kernel/debug/rust_rdma_split_unit/hosts";
            unit.wait_for(&format!("grep -q ' vlans {count} ' {hosts}"), TIME)
                .with_context(|| format!("{count} VLANs"))
        };
        host.sh_in(
            &vlans(&format!("add link {OWN} name v$n type vlan id $n")),
            TIME,
        )?;
        is_refused(host, "AddVlan", "ENOSPC", 28)?;
        has_vlans(MOST_VLANS)?;
        host.sh_in(&vlans("del v$n"), TIME)?;
        has_vlans(0)?;
        connected(host)?;
        pings(host, lan)?;
        // What the far interface counts, which is asked for now and then.
        let sent = unit.sh("cat /sys/class/net/eth1/statistics/tx_packets")?;
        let sent: u64 = sent.trim().parse()?;
        ensure!(sent >= 15, "the LAN's interface has sent {sent} frames");
        host.wait_for(
            &format!("[ $(ethtool -S {OWN} | sed -n 's/.*far_tx_packets: //p') -ge {sent} ]"),
            TIME,
        )?;
        // All frames are written from now on, the small ones, too.
        host.sh(&format!(
            "ethtool {OWN} | grep -q 'Speed' && ethtool --set-tunable {OWN} tx-copybreak 0 \
             && ethtool --get-tunable {OWN} tx-copybreak | grep -q ' 0$'"
        ))?;
        let before = counter_of(host, "sent_by_write")?;
        pings(host, lan)?;
        let written = counter_of(host, "sent_by_write")? - before;
        ensure!(written >= 3 * PINGS, "{written} frames were written");
        Ok(())
    })
}

/// Frames that are sent to a host that does not run, each of which an element would fit: more than twice as many as it has
/// elements, and no more, for the I/O unit gives up a host that has said nothing for half a minute.
const FLOOD: u64 = 200;

/// Sends them, as soon as it is told to: it takes its time to begin.
fn flood_of_datagrams(to: &Vm) -> String {
    format!(
        "rm -f /run/flood; exec python3 -u -c \"
import os, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print('ready')
while not os.path.exists('/run/flood'): time.sleep(0.05)
for n in range({FLOOD}): s.sendto(bytes(1400), ('{}', 9))\" >/run/flooding 2>&1",
        lan_ip(to)
    )
}

/// Frames for the one host: those that the I/O unit has delivered, and those that met no element, or no memory that is not
/// under way.
fn delivered_and_dropped(unit: &Vm) -> Result<(u64, u64)> {
    let line = host_line(unit)?;
    let of = |name| word_after(&line, name);
    Ok((
        of("delivered")?,
        of("dropped_no_element")? + of("dropped_no_room")?,
    ))
}

fn room(cluster: &Cluster) -> Result<()> {
    with_host(cluster, "", |host, unit, lan| {
        pings(lan, host)?;
        let came =
            || -> Result<u64> { Ok(of_host(host, "rx_packets")? + of_host(host, "rx_dropped")?) };
        // What is under way is there soon.
        let is_even = || -> Result<bool> { Ok(shown(unit, "delivered")? == came()?) };
        let settled =
            || crate::process::wait_until(std::time::Instant::now() + host.at_most(TIME), is_even);
        ensure!(settled()?, "frames are lost without a flood");
        let before = delivered_and_dropped(unit)?;
        let flood = lan.spawn(&flood_of_datagrams(host), TIME)?;
        lan.wait_for("grep -q ready /run/flooding", TIME)?;
        let stopped = super::growth::Stopped::new(host);
        let began = std::time::Instant::now();
        let sent = lan
            .sh("touch /run/flood")
            .and_then(|_| flood.success().map(drop));
        // Frames that the LAN still has for the unit.
        let mut after = before;
        let all_seen =
            crate::process::wait_until(std::time::Instant::now() + unit.at_most(TIME), || {
                after = delivered_and_dropped(unit)?;
                Ok((after.0 - before.0) + (after.1 - before.1) >= FLOOD)
            })
            .with_context(|| format!("a host that has not run for {:?}", began.elapsed()));
        drop(stopped);
        sent?;
        ensure!(
            all_seen?,
            "frames are neither delivered nor counted: {before:?}, then {after:?}"
        );
        ensure!(
            after.1 > before.1,
            "a host that does not run has room for all"
        );
        ensure!(
            settled()?,
            "{} frames were delivered, and {} came",
            shown(unit, "delivered")?,
            came()?
        );
        host.wait_for(
            &format!("[ $(ethtool -S {OWN} | sed -n 's/.*pools_added: //p') -ge 1 ]"),
            TIME,
        )
        .context("who asked for more got none")?;
        pings(host, lan)
    })
}

/// What a program that attacks a peer says: what the peer is to count, and how often. It did things of so many kinds at
/// least.
fn attacks(said: &str, kinds: usize) -> Result<Counters> {
    let mut counts = Counters::new();
    for line in said.lines() {
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("ok"), Some(counter)) => *counts.entry(counter.to_owned()).or_default() += 1,
            _ => anyhow::bail!("{line}"),
        }
    }
    ensure!(counts.len() >= kinds, "it did next to nothing: {said}");
    Ok(counts)
}

/// That of a connection that was lost has no name of a wrong.
const LOST: &str = "disconnected";

/// Wrongs of those who are not even connected by them, so that nothing is reset: at the most so many.
const NOT_CONNECTED: u64 = 8;

/// The peer has counted each attack as what it was; `before` is what it had counted.
fn are_counted(expected: &Counters, before: &Counters, after: &Counters) -> Result<()> {
    let counted = |name: &str| -> Result<u64> {
        let of = |counters: &Counters| counters.get(name).copied();
        let (before, after) = of(before).zip(of(after)).context(name.to_owned())?;
        Ok(after - before)
    };
    let mut wrong = 0;
    for (name, count) in expected.iter().filter(|(name, _)| *name != LOST) {
        let counted = counted(&format!("peer_{name}"))?;
        ensure!(counted == *count, "{name}: {counted}, not {count}");
        wrong += count;
    }
    let reset = counted("reset")?;
    ensure!(
        reset <= wrong && reset + NOT_CONNECTED >= wrong,
        "{reset} connections were reset, for {wrong} wrongs"
    );
    Ok(())
}

/// What a host does that is looked at in each run: something old, something twice, something out of range, and somebody
/// who is none.
const SOME_WRONGS: [&str; 4] = ["replayed", "pool_twice", "element_beyond", "bad_join"];

/// The other host attacks the I/O unit, by all that it can do or by what is counted as one of these.
fn attack_unit(cluster: &Cluster, wrongs: &[&str], kinds: usize) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    let other = vm(cluster, OTHER_HOST)?;
    with_driver(cluster, other)?;
    let ends =
        || -> Result<u64> { Ok(counter_of(host, "disconnected")? + counter_of(host, "reset")?) };
    let (before, ended) = (counters_of_unit(unit)?, ends()?);
    let said = other.run(
        &format!(
            "SPLIT_KEY={KEY} exec split-peer host {} {} 2>&1",
            unit.ip(),
            wrongs.join(" ")
        ),
        LONG,
    )?;
    let expected = attacks(&said.out, kinds)?;
    are_counted(&expected, &before, &counters_of_unit(unit)?)?;
    // The good one has not noticed.
    ensure!(
        ends()? == ended,
        "another host's connection has ended as well"
    );
    pings(host, lan)
}

fn some_bad_hosts(cluster: &Cluster) -> Result<()> {
    with_usual(cluster, |_, _, _| {
        attack_unit(cluster, &SOME_WRONGS, SOME_WRONGS.len())
    })
}

/// Kinds of wrongs, at least, where all that there are are tried.
const ALL_WRONGS: usize = 16;

fn bad_hosts(cluster: &Cluster) -> Result<()> {
    let other = vm(cluster, OTHER_HOST)?;
    with_host(cluster, "", |host, unit, lan| {
        attack_unit(cluster, &[], ALL_WRONGS)?;
        // One that stops in the middle: it does not answer what it is asked.
        let silent = other.spawn(
            &format!(
                "SPLIT_KEY={KEY} exec split-peer silent {} >/run/silent 2>&1",
                unit.ip()
            ),
            LONG,
        )?;
        other.wait_for("grep -q connected /run/silent", TIME)?;
        unit.sh("ip link set eth1 mtu 1600")?;
        let ended = silent.success();
        unit.sh("ip link set eth1 mtu 1500")?;
        ended?;
        ensure!(
            counters_of_unit(unit)?.get("peer_silent") == Some(&1),
            "a silent peer is not counted"
        );
        connected(host)?;
        pings(host, lan)
    })
}

fn bad_unit(cluster: &Cluster) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    with_driver(cluster, unit)?;
    let peer = unit.spawn(
        &format!("SPLIT_KEY={KEY} exec split-peer unit >/run/peer 2>&1"),
        LONG,
    )?;
    with_driver(cluster, host)?;
    host.sh_in(
        &format!(
            "set -e
             modprobe rdma_cm
             insmod /ferrite/modules/rust_rdma_split_host.ko server={} key={KEY}
             ip addr replace {}/24 dev {OWN}
             ip link set {OWN} up",
            unit.ip(),
            lan_ip(host)
        ),
        TIME,
    )?;
    peer.wait()?;
    let said = unit.sh("cat /run/peer")?;
    let expected = attacks(&said, ALL_WRONGS)?;
    // The module was loaded for this, and has counted nothing before.
    let after = counters_of(host)?;
    let before = after.keys().map(|name| (name.clone(), 0)).collect();
    are_counted(&expected, &before, &after)?;
    // Then one that does as it should.
    unit_up(cluster, "")?;
    connected(host)?;
    pings(host, lan)?;
    host_down(host)?;
    unit_down(unit)
}

/// Hosts that an I/O unit takes from one address, if nothing else is said.
const OF_ONE: usize = 4;

/// Without a limit for each address the other machine would have all places there are, and keep them.
fn crowded(cluster: &Cluster) -> Result<()> {
    let (host, unit, lan) = (vm(cluster, HOST)?, vm(cluster, UNIT)?, on_lan(cluster)?);
    let other = vm(cluster, OTHER_HOST)?;
    unit_up(cluster, &format!("hosts={}", OF_ONE + 1))?;
    with_driver(cluster, other)?;
    let crowd = other.spawn(
        &format!(
            "SPLIT_KEY={KEY} exec split-peer crowd {} >/run/crowd 2>&1",
            unit.ip()
        ),
        LONG,
    )?;
    other.wait_for("grep -q full /run/crowd", TIME)?;
    let said = other.sh("cat /run/crowd")?;
    let came = host_up(cluster, HOST, "").and_then(|()| pings(host, lan));
    crowd.end_with(libc::SIGKILL)?;
    came.context("another host does not come")?;
    ensure!(
        said.trim() == format!("full {OF_ONE}"),
        "one machine that wants all places: {said}"
    );
    let refused = counted(&counters_of_unit(unit)?, "peer_crowded")?;
    ensure!(refused != 0, "who was refused is not counted");
    // What it had is free again, for itself as well.
    unit.wait_for(
        "[ $(grep -c '^host' /sys/kernel/debug/rust_rdma_split_unit/hosts) = 1 ]",
        TIME,
    )?;
    host_up(cluster, OTHER_HOST, "")?;
    pings(other, lan)?;
    for vm in [other, host] {
        host_down(vm)?;
    }
    unit_down(unit)
}

/// The unit is loaded anew, for hosts that may have all frames.
fn let_trust(host: &Vm, unit: &Vm) -> Result<()> {
    unit_down(unit)?;
    load_unit(unit, "trust=1")?;
    // What it had before is gone.
    host.wait_for(
        &format!("[ $(ethtool -S {OWN} | sed -n 's/^ *connected: //p') -ge 2 ]"),
        TIME,
    )?;
    connected(host)
}

/// Sends frames of a kind for experiments from a host to all: one with the address of another, one to a VLAN that it has
/// not asked for, one whose tag ends in the middle, and then one as it should.
const IMPOSTOR: &str = "python3 -c \"
import socket
own = bytes.fromhex(open('/sys/class/net/split0/address').read().strip().replace(':', ''))
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(('split0', 0))
kind = bytes.fromhex('88b5')
all = bytes([255] * 6)
s.send(all + bytes.fromhex('525400fd7704') + kind + b'as another'.ljust(60))
s.send(all + own + bytes.fromhex('81000009') + kind + b'to others'.ljust(60))
s.send(all + own + bytes.fromhex('810005'))
s.send(all + own + kind + b'as itself'.ljust(60))\"";

/// What arrives of them, in a line for each, until the last.
const WITNESS: &str = "exec python3 -u -c \"
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(('eth1', 3))
s.settimeout(60)
print('ready')
while True:
    frame = s.recv(2000)
    for said in [b'as another', b'to others', b'as itself']:
        if said in frame: print(said.decode())
    if b'as itself' in frame: break\" >/run/witness 2>&1";

fn impostors(cluster: &Cluster) -> Result<()> {
    let other = vm(cluster, OTHER_HOST)?;
    with_driver(cluster, other)?;
    with_host(cluster, "", |host, unit, lan| {
        pings(host, lan)?;
        let before = shown(unit, "dropped")?;
        let witness = lan.spawn(WITNESS, TIME)?;
        lan.wait_for("grep -q ready /run/witness", TIME)?;
        host.sh_in(IMPOSTOR, TIME)?;
        witness.success()?;
        let seen = lan.sh("cat /run/witness")?;
        ensure!(seen.trim() == "ready\nas itself", "the LAN has seen {seen}");
        let dropped = shown(unit, "dropped")? - before;
        ensure!(dropped == 3, "{dropped} frames were counted as dropped");
        // All frames are for those who are trusted, and a VLAN of the machine's own is for no host.
        unit.sh("ip link add link eth1 name own5 type vlan id 5 && ip link set own5 up")?;
        host.sh(&format!(
            "ip link set {OWN} promisc on; ip link add link {OWN} name v5 type vlan id 5"
        ))?;
        for refused in ["SetFilter", "AddVlan"] {
            is_refused(host, refused, "EPERM", 1)?;
        }
        unit.sh("ip -d link show eth1 | grep -q 'promiscuity 0' && ip link del own5")?;
        host.sh(&format!("ip link del v5; ip link set {OWN} promisc off"))?;
        // Users of other machines, who do not know the key. By a path of their own they can write what the system of their
        // machine writes else, that they come from a port of root's.
        let user = "setpriv --reuid 65534 --regid 65534 --clear-groups split-peer";
        let refused = |unit: &Vm| -> Result<u64> {
            let counters = counters_of_unit(unit)?;
            Ok(counters.get("peer_bad_key").copied().unwrap_or(0))
        };
        let before = refused(unit)?;
        let said = other.run(&format!("{user} silent {} 2>&1", unit.ip()), LONG)?;
        ensure!(said.code != 0, "any user is a host: {}", said.out);
        ensure!(
            refused(unit)? == before + 1,
            "a user who was refused is not counted: {}",
            said.out
        );
        for how in ["gid", "link", "path"] {
            let command = format!(
                "timeout 20 {user} forge {} {} {how} 2>&1",
                unit.ip(),
                other.ip()
            );
            let said = other.run(&command, LONG)?;
            ensure!(said.code != 0, "by {how} any user is a host: {}", said.out);
        }
        ensure!(
            refused(unit)? > before + 1,
            "no request with a header of its sender's own has come"
        );
        // There is no I/O unit without a key, unless it is said that there is to be none.
        let keyless = "insmod /ferrite/modules/rust_rdma_split_unit.ko lan=eth0 2>/dev/null";
        ensure!(
            other.run(keyless, TIME)?.code != 0,
            "an I/O unit wants no key"
        );
        other.sh("dmesg | grep -q 'a key that hosts have to know is needed'")?;
        let said = other.run(&format!("timeout 10 {user} unit 2>&1"), TIME)?;
        ensure!(
            said.code != 0 && said.out.contains("rdma_bind_addr"),
            "any user is an I/O unit: {}",
            said.out
        );
        pings(host, lan)
    })?;
    // Where it is said, who knows none is a host, and who says one is not.
    with_modules(cluster, "key=0 insecure=1", "key=0", |host, unit, lan| {
        pings(host, lan)?;
        let said = other.run(
            &format!("SPLIT_KEY={KEY} split-peer silent {} 2>&1", unit.ip()),
            LONG,
        )?;
        ensure!(
            said.code != 0 && counted(&counters_of_unit(unit)?, "peer_bad_key")? == 1,
            "a host with a key is one of an I/O unit that has none: {}",
            said.out
        );
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_named_once() {
        let keys = |text: &str| with_key(text).matches("key=").count();
        for parameters in ["", "hosts=5", "key=0 insecure=1", "insecure=1 key=0"] {
            assert_eq!(keys(parameters), 1, "{parameters}");
        }
        assert!(with_key("key=0").contains("key=0") && with_key("").contains(&KEY.to_string()));
    }
}
