// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections, and the port under them as it changes: cable, MTU, addresses.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::clients::until_heard;
use super::faults::wait_for_traffic;
use super::wire::{captured, frames};
use super::{once_it_listens, still_works, tried_until_heard, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{client_server, wait_listening, DEVICE_AND_GID};
use crate::vm::{Running, Vm};

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "rdma_cm: private data, rejection, a hundred connections at once",
        connection_manager,
    ),
    VmTest::new(
        "a pulled cable is reported, and traffic goes on when it is back",
        cable,
    ),
    VmTest::new(
        "the MTU follows the interface, and queue pairs go on",
        mtu_change,
    ),
    VmTest::new(
        "GIDs follow the addresses: IPv4, IPv6, VLAN; each carries traffic",
        gids_follow_addresses,
    ),
];

const TIME: Duration = Duration::from_secs(60);

fn connection_manager(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let program = "/ferrite/tests/clients/cm-check";
    one.sh("rm -f /tmp/cm-check")?;
    let server = one.spawn(
        &format!("exec {program} serve {} >/tmp/cm-check 2>&1", one.ip()),
        TIME,
    )?;
    one.wait_for("grep -qs listening /tmp/cm-check", TIME)?;
    let outcome = two.run(&format!("exec {program} run {}", one.ip()), TIME)?;
    if !outcome.ok() {
        server.signal(libc::SIGTERM)?;
    }
    let served = server.wait()?;
    if !outcome.ok() || !served.ok() {
        let server = one.sh("cat /tmp/cm-check")?;
        bail!("{}{}--- server:\n{server}", outcome.out, outcome.err);
    }
    Ok(())
}

/// Programs that use the wire while something is done to it: one queue pair with a retry budget
/// of some seconds, sending for a while, and one that rdma_cm connected.
struct Traffic<'v> {
    two: &'v Vm,
    stream: [Running<'v>; 2],
    ping: [Running<'v>; 2],
}

impl<'v> Traffic<'v> {
    fn start(cluster: &'v Cluster) -> Result<Self> {
        let (one, two) = cluster.two()?;
        let send = "exec ib_send_bw -d $dev -x $gid -p 18520 -s 65536 -u 17 -D 6 -F";
        let server = one.spawn(&format!("{DEVICE_AND_GID} {send}"), TIME)?;
        // A client of rping that is early does not end.
        let pong = once_it_listens(one, one.spawn("exec rping -s -a 0.0.0.0", TIME)?)?;
        wait_listening(one, 18520)?;
        two.sh("rm -f /tmp/rping")?;
        let ping = two.spawn(
            &format!(
                "for n in $(seq 20); do stdbuf -oL rping -c -v -a {} >/tmp/rping; sleep 0.3; done",
                one.ip()
            ),
            TIME,
        )?;
        two.wait_for(
            "test -e /tmp/rping && test $(wc -l </tmp/rping) -gt 5",
            TIME,
        )?;
        let client = two.spawn(&format!("{DEVICE_AND_GID} {send} {}", one.ip()), TIME)?;
        let traffic = Self {
            two,
            stream: [client, server],
            ping: [ping, pong],
        };
        let [client, server] = &traffic.stream;
        let [ping, pong] = &traffic.ping;
        wait_for_traffic(cluster, 2, &[client, server, ping, pong])?;
        Ok(traffic)
    }

    /// Both programs must have come through; the second must still be at it.
    fn finish(self) -> Result<()> {
        let lines = self.two.sh("wc -l </tmp/rping")?;
        let lines: u64 = lines.trim().parse()?;
        let alive = self.two.wait_for(
            &format!("test $(wc -l </tmp/rping) -gt {}", lines + 5),
            TIME,
        );
        let stream = self.stream.map(Running::success);
        let ping = self.ping.map(Running::end);
        alive.context("the connection of rdma_cm does not go on")?;
        for end in stream {
            end.context("the queue pair does not go on")?;
        }
        for end in ping {
            end?;
        }
        Ok(())
    }
}

const DOWN: &str = "rdma link | grep -q 'state DOWN'";

/// For how long the cable is out while programs send, at the most: rdma_cm's connection is given up after four seconds.
const OUT: Duration = Duration::from_secs(2);

/// How often the cable is pulled where it was out for longer than the programs wait, by no fault of theirs.
const PULLS: usize = 8;

/// Pulls the cable of the first machine under traffic until a program is told, and puts it back. False where that took
/// so long that traffic did not go on, or the machine that nobody was told.
fn pulled_under_traffic(cluster: &Cluster) -> Result<bool> {
    let (one, _) = cluster.two()?;
    let traffic = Traffic::start(cluster)?;
    // IBV_EVENT_PORT_ERR, once more than before.
    let before = one.sh("grep -c '(10)' /run/events || true")?;
    let told = format!("[ $(grep -c '(10)' /run/events) -gt {} ]", before.trim());
    let watching = one.spawn(&format!("until {told}; do sleep 0.02; done"), TIME)?;
    let start = Instant::now();
    cluster.device_command(1, &json!({"cmd": "link", "up": false}))?;
    // A machine may take as long to say this.
    wait_until(start + OUT, || Ok(watching.ended().is_some()))?;
    cluster.device_command(1, &json!({"cmd": "link", "up": true}))?;
    let out = start.elapsed();
    watching.signal(libc::SIGKILL)?;
    wait_active(one)?;
    match traffic.finish() {
        Err(error) if out > OUT + OUT / 2 => {
            println!("          the cable was out for {out:?}: {error:#}");
            Ok(false)
        }
        finished => {
            finished?;
            Ok(one.run(&told, TIME)?.ok())
        }
    }
}

fn cable(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("rm -f /run/events")?;
    let watch = one.spawn(
        &format!("{DEVICE_AND_GID} exec stdbuf -oL ibv_asyncwatch -d $dev >/run/events"),
        PULLS as u32 * TIME,
    )?;
    // It has the device open.
    one.wait_for("grep -qs ferrite /run/events", TIME)?;
    let mut pulls = 0;
    while !pulled_under_traffic(cluster)? {
        pulls += 1;
        ensure!(pulls < PULLS, "the cable is not put back in time");
    }
    watch.end_with(libc::SIGTERM)?;
    let events = one.sh("cat /run/events")?;
    // IBV_EVENT_PORT_ERR and IBV_EVENT_PORT_ACTIVE, in this order.
    let at = |event: &str| {
        events
            .find(event)
            .with_context(|| format!("no {event} in:\n{events}"))
    };
    if at("(10)")? > at("(9)")? {
        bail!("the port was reported active before it was down:\n{events}");
    }
    // With nobody to wait for.
    cluster.device_command(1, &json!({"cmd": "link", "up": false}))?;
    let down = one.wait_for(DOWN, TIME);
    cluster.device_command(1, &json!({"cmd": "link", "up": true}))?;
    down?;
    wait_active(one)?;
    still_works(cluster)
}

fn active_mtu(vm: &Vm, wanted: &str) -> Result<()> {
    vm.wait_for(
        &format!("ibv_devinfo | grep -E 'active_mtu:[[:space:]]+{wanted} '"),
        TIME,
    )
}

fn mtu_change(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    let traffic = Traffic::start(cluster)?;
    let changed = || -> Result<()> {
        two.sh("ip link set eth0 mtu 1500")?;
        active_mtu(two, "1024")?;
        // A new pair agrees on what both ends have now.
        still_works(cluster)
    }();
    two.sh("ip link set eth0 mtu 9000")?;
    changed?;
    active_mtu(two, "4096")?;
    traffic.finish()
}

/// A way to give the interface one more address, and to take it back.
struct Addition {
    what: &'static str,
    /// `{n}` is the machine's number.
    add: &'static str,
    remove: &'static str,
    address: &'static str,
    /// As the kernel shows it.
    gid: &'static str,
    /// What its frames are tagged with.
    vlan: Option<u16>,
}

const ADDITIONS: &[Addition] = &[
    Addition {
        what: "IPv4",
        add: "ip addr add 10.79.0.{n}/24 dev eth0",
        remove: "ip addr del 10.79.0.{n}/24 dev eth0",
        address: "10.79.0.{n}",
        gid: "0000:0000:0000:0000:0000:ffff:0a4f:000{n}",
        vlan: None,
    },
    Addition {
        what: "IPv6",
        add: "ip addr add fd77::{n}/64 dev eth0 nodad",
        remove: "ip addr del fd77::{n}/64 dev eth0",
        address: "fd77::{n}",
        gid: "fd77:0000:0000:0000:0000:0000:0000:000{n}",
        vlan: None,
    },
    Addition {
        what: "VLAN",
        add: "ip link add link eth0 name eth0.7 type vlan id 7 && \
              ip addr add 10.78.0.{n}/24 dev eth0.7 && ip link set eth0.7 up",
        remove: "ip link del eth0.7",
        address: "10.78.0.{n}",
        gid: "0000:0000:0000:0000:0000:ffff:0a4e:000{n}",
        vlan: Some(7),
    },
];

/// The VLAN of a frame with a datagram to the group 239.77.0.7, or none; of another frame, nothing.
fn tag_of_group(frame: &[u8]) -> Option<Option<u16>> {
    let (vlan, packet) = match *frame.get(12..18)? {
        [0x08, 0x00, ..] => (None, frame.get(14..)?),
        [0x81, 0x00, high, low, 0x08, 0x00] => {
            let vlan = u16::from_be_bytes([high, low]) & 0xfff;
            (Some(vlan), frame.get(18..)?)
        }
        _ => return None,
    };
    const UDP: u8 = 17;
    let is_group = *packet.get(9)? == UDP && packet.get(16..20)? == [239, 77, 0, 7];
    is_group.then_some(vlan)
}

fn gids_follow_addresses(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for addition in ADDITIONS {
        let of = |text: &str, vm: &Vm| text.replace("{n}", &vm.index.to_string());
        let listed = |vm: &Vm| {
            // The file of its entry. `ibv_devinfo` would ask for each of 256, with a call.
            format!(
                "grep -slxF {} /sys/class/infiniband/*/ports/1/gids/* | grep .",
                of(addition.gid, vm)
            )
        };
        for vm in [one, two] {
            vm.sh(&of(addition.add, vm))?;
            vm.wait_for(&listed(vm), TIME)
                .with_context(|| format!("{}: no GID", addition.what))?;
        }
        let used = || -> Result<()> {
            let index = |vm: &Vm| format!("gid=$({}); gid=${{gid##*/}}", listed(vm));
            let command = "exec ibv_rc_pingpong -d $dev -g $gid -p $port -s 4096 -n 20 -c";
            client_server(
                (one, &format!("{}; {command}", index(one))),
                (two, &format!("{}; {command} $peer", index(two))),
                18521,
                TIME,
            )?;
            let address = of(addition.address, one);
            let server = one.spawn(&format!("exec rping -s -a {address} -C 10"), TIME)?;
            let server = once_it_listens(one, server)?;
            let outcome = two.run(
                &tried_until_heard(two, &format!("rping -c -a {address} -C 10 -V")),
                TIME,
            )?;
            if !outcome.ok() {
                server.signal(libc::SIGTERM)?;
            }
            let served = server.wait()?;
            if !outcome.ok() {
                bail!("rping: {outcome:?}\nserver: {served:?}");
            }
            // Datagrams to a group: on a VLAN they are for those who are on it.
            if !address.contains(':') {
                let member = |vm: &Vm, role: &str| {
                    let address = of(addition.address, vm);
                    format!("mckey {role} -m 239.77.0.7 -b {address} -C 5")
                };
                let file = captured(cluster, || {
                    until_heard((one, &member(one, "")), (two, &member(two, "-s")))
                })
                .context("multicast")?;
                let mut tags = frames(&file)?.into_iter().filter_map(tag_of_group);
                let count = tags.clone().count();
                ensure!(count >= 5, "{count} datagrams to a group were captured");
                ensure!(
                    tags.all(|tag| tag == addition.vlan),
                    "datagrams to a group: not all of them have the tag {:?}",
                    addition.vlan
                );
            }
            Ok(())
        }();
        for vm in [one, two] {
            vm.sh(&of(addition.remove, vm))?;
            vm.wait_for(&format!("! ({})", listed(vm)), TIME)
                .with_context(|| format!("{}: the GID stays", addition.what))?;
        }
        used.context(addition.what)?;
    }
    still_works(cluster)
}
