// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The stock programs of rdma-core and perftest, and the project's own data checks.

use std::time::Duration;

use anyhow::{bail, Context, Result};

use super::{nothing_left, once_it_listens, tried_until_heard, VmTest};
use crate::cluster::Cluster;
use crate::protocol::Outcome;
use crate::skips::{self, Checks, Skips};
use crate::traffic::{client_server, perftest, pingpong};
use crate::vm::{Running, Vm};

/// On the unmodified Debian kernel.
pub const STOCK: &[VmTest] = &[
    VmTest::new(
        "the port is active and paired with its interface",
        link_is_active,
    ),
    VmTest::new("ibv_devinfo tells what the device can do", devinfo),
    VmTest::new(
        "ibv_rc_pingpong at many sizes, by polling",
        pingpong_polling,
    ),
    VmTest::new("ibv_rc_pingpong at many sizes, by events", pingpong_events),
    VmTest::new("perftest: write, read and send", perftest_programs),
    VmTest::new("every operation delivers every byte", |c| {
        verbs_check(c, "data")
    }),
    VmTest::new("completion events, none lost", |c| verbs_check(c, "events")),
    VmTest::new("ping and TCP beside RDMA", tcp_beside_rdma),
];

/// On the kernel with the checkers: once through every path of driver and provider.
pub const CHECKED: &[VmTest] = &[
    VmTest::new("ibv_devinfo tells what the device can do", devinfo),
    VmTest::new("ibv_rc_pingpong, by polling and by events", pingpong_both),
    VmTest::new("every operation delivers every byte", |c| {
        verbs_check(c, "data")
    }),
    VmTest::new("atomic operations, each done once", |c| {
        verbs_check(c, "atomics")
    }),
    VmTest::new(
        "writes and reads over several queue pairs for some seconds",
        |c| verbs_check(c, "stress --seconds 4"),
    ),
    VmTest::new("the extended posting and polling calls", |c| {
        verbs_check(c, "extended")
    }),
    VmTest::new("completion events, none lost", |c| verbs_check(c, "events")),
    VmTest::new("every error has its status and harms nobody else", |c| {
        verbs_check(c, "errors")
    }),
    VmTest::new(
        "windows, device memory, shared queues, sizes and states",
        |c| alone(c, "objects"),
    ),
    VmTest::new("regions of every kind and size", |c| {
        verbs_check(c, "region")
    }),
    VmTest::new("on-demand regions, whatever happens to their memory", |c| {
        verbs_check(c, "paging")
    }),
    VmTest::new(
        "processes killed in the middle of page faults",
        killed_while_paging,
    ),
    VmTest::new("many queue pairs at once", |c| verbs_check(c, "many")),
    VmTest::new("unreliable and shared-receive pingpongs", other_pingpongs),
    VmTest::new(
        "connections made by rdma_cm: rping and ucmatose",
        connection_manager,
    ),
    VmTest::new("programs leave nothing behind", everything_is_given_back),
];

/// Several threads on the same objects.
pub const THREADS: &[VmTest] = &[VmTest::new(
    "threads that share queues; lists, overflows and what one may do while another waits",
    |c| alone(c, "threads"),
)];

fn link_is_active(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        let text = vm.sh("rdma link; cat /sys/class/infiniband/*/ports/1/link_layer")?;
        for part in [
            "state ACTIVE",
            "physical_state LINK_UP",
            "netdev eth0",
            "Ethernet",
        ] {
            if !text.contains(part) {
                bail!("{}: no '{part}' in:\n{text}", vm.name());
            }
        }
    }
    Ok(())
}

/// The value after `name:` in `ibv_devinfo -v`.
fn field<'t>(text: &'t str, name: &str) -> Result<&'t str> {
    text.lines()
        .find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
        .with_context(|| format!("no field {name} in:\n{text}"))
}

fn devinfo(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        let text = vm.sh("ibv_devinfo -v")?;
        for (name, wanted) in [
            ("transport", "InfiniBand (0)"),
            ("state", "PORT_ACTIVE (4)"),
            ("link_layer", "Ethernet"),
            ("active_mtu", "4096 (5)"),
            ("phys_port_cnt", "1"),
            ("max_msg_sz", "0x80000000"),
        ] {
            let value = field(&text, name)?;
            if value != wanted {
                bail!("{}: {name} is '{value}', not '{wanted}'", vm.name());
            }
        }
        for name in [
            "max_qp",
            "max_cq",
            "max_mr",
            "max_pd",
            "max_sge",
            "vendor_part_id",
        ] {
            let number: u64 = field(&text, name)?.parse()?;
            if number == 0 {
                bail!("{}: {name} is 0", vm.name());
            }
        }
        if field(&text, "node_guid")?.starts_with("0000:0000") {
            bail!("{}: no node GUID", vm.name());
        }
        // One completion handler for each processor.
        let handlers: usize = field(&text, "num_comp_vectors")?.parse()?;
        let cpus: usize = vm.sh("nproc")?.trim().parse()?;
        if handlers != cpus {
            bail!(
                "{}: {handlers} completion vectors on {cpus} processors",
                vm.name()
            );
        }
        if !text.contains("::ffff:10.77.0.") {
            bail!("{}: no GID for the IPv4 address:\n{text}", vm.name());
        }
    }
    Ok(())
}

/// Sizes around what the wire and the pages cut at.
const SIZES: &[(usize, usize)] = &[
    (1, 20),
    (1023, 20),
    (1024, 20),
    (4095, 20),
    (4096, 200),
    (4097, 20),
    (8193, 20),
    (65536, 20),
    (1 << 20, 10),
];

fn pingpong_polling(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for &(size, iterations) in SIZES {
        pingpong(one, two, size, iterations, false).with_context(|| format!("size {size}"))?;
    }
    Ok(())
}

fn pingpong_events(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for &(size, iterations) in SIZES {
        pingpong(two, one, size, iterations, true).with_context(|| format!("size {size}"))?;
    }
    Ok(())
}

fn pingpong_both(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for events in [false, true] {
        for (size, iterations) in [(1, 20), (4097, 50), (1 << 20, 5)] {
            pingpong(one, two, size, iterations, events)
                .with_context(|| format!("size {size}, events: {events}"))?;
        }
    }
    Ok(())
}

fn perftest_programs(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (program, size, iterations, more) in [
        ("ib_write_bw", 65536, 50, ""),
        ("ib_write_bw", 4096, 50, "-q 4"),
        ("ib_read_bw", 65536, 50, ""),
        ("ib_send_bw", 65536, 50, ""),
        ("ib_send_bw", 4096, 100, "-e"),
        ("ib_send_lat", 64, 100, ""),
        ("ib_write_lat", 64, 100, ""),
        ("ib_read_lat", 64, 100, ""),
    ] {
        perftest(one, two, program, size, iterations, more)
            .with_context(|| format!("{program} -s {size} {more}"))?;
    }
    Ok(())
}

/// Kills programs that use on-demand regions, at all moments of their lives.
fn killed_while_paging(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let mut killed = Vec::new();
    for tenths in [3, 5, 7, 12, 20] {
        let said = one.sh(&format!(
            "timeout -s KILL {}.{} verbs-check run paging --loopback >/run/paging 2>&1
             echo $? $(grep -c '^ok ' /run/paging)",
            tenths / 10,
            tenths % 10
        ))?;
        let numbers: Vec<i32> = said
            .split_whitespace()
            .map(|word| word.parse().with_context(|| said.clone()))
            .collect::<Result<_>>()?;
        match numbers[..] {
            [code, checks] if code == 128 + libc::SIGKILL => killed.push(checks),
            // On a fast machine the later ones are through.
            [0, checks] if checks > 0 => {}
            _ => bail!(
                "neither killed nor ended well (exit code and checks passed: {}):\n{}",
                said.trim(),
                one.sh("cat /run/paging")?
            ),
        }
    }
    if killed.len() < 3 {
        bail!("only {} were killed before their end", killed.len());
    }
    println!("          killed after {killed:?} checks");
    nothing_left(one)
}

pub(super) fn verbs_check(cluster: &Cluster, case: &str) -> Result<()> {
    let (one, two) = cluster.two()?;
    verbs_check_between(one, two, case)
}

/// Fails unless all checks that verbs-check made passed, but for those that may be skipped.
fn judge(outcome: &Outcome, server: &str) -> Result<()> {
    let checks = Checks::read(&outcome.out, &Skips::read(skips::VERBS_CHECK, " -- ")?);
    if !outcome.ok() || !checks.wrong.is_empty() {
        bail!(
            "{} checks passed, exit code {}{}:\n{}\n--- output:\n{}{}{server}",
            checks.passed,
            outcome.code,
            if outcome.timed_out {
                " (timed out)"
            } else {
                ""
            },
            checks.wrong.join("\n"),
            outcome.out,
            outcome.err,
        );
    }
    println!("          {} checks", checks.passed);
    Ok(())
}

/// Runs the guest program that checks data and completions itself.
pub(super) fn verbs_check_between(one: &Vm, two: &Vm, case: &str) -> Result<()> {
    let server = one.spawn(
        &format!(
            "{} exec verbs-check serve --port 18600",
            crate::traffic::DEVICE_AND_GID
        ),
        Duration::from_secs(600),
    )?;
    crate::traffic::wait_listening(one, 18600)?;
    let outcome = two.run(
        &format!(
            "verbs-check run {case} --peer {} --port 18600 --ack-timeout {}",
            one.ip(),
            one.ack_timeout()
        ),
        Duration::from_secs(580),
    )?;
    server.signal(libc::SIGTERM)?;
    let served = server.wait()?;
    let words = format!(
        "--- server ({}):\n{}{}",
        served.code, served.out, served.err
    );
    judge(&outcome, &words)?;
    // It serves until it is told to end.
    if !served.ended_by(libc::SIGTERM) {
        bail!("{words}");
    }
    Ok(())
}

/// The same within one machine: both ends are in one process, on one port.
pub(super) fn verbs_check_within(vm: &Vm, case: &str) -> Result<()> {
    let outcome = vm.run(
        &format!(
            "exec verbs-check run {case} --loopback --ack-timeout {}",
            vm.ack_timeout()
        ),
        Duration::from_secs(580),
    )?;
    judge(&outcome, "")
}

/// Runs the checks that one process makes by itself.
pub(super) fn alone(cluster: &Cluster, case: &str) -> Result<()> {
    let (one, _) = cluster.two()?;
    let outcome = one.run(
        &format!("exec verbs-check run {case}"),
        Duration::from_secs(300),
    )?;
    judge(&outcome, "")
}

fn other_pingpongs(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (program, flags) in [
        ("ibv_uc_pingpong", "-s 4096 -n 100 -c"),
        ("ibv_ud_pingpong", "-s 2048 -n 100 -c"),
        ("ibv_srq_pingpong", "-s 4096 -n 100 -q 4 -c"),
        ("ibv_srq_pingpong", "-s 4096 -n 100 -q 4 -c -e"),
    ] {
        let command = format!("exec {program} -d $dev -g $gid -p $port {flags}");
        client_server(
            (one, &command),
            (two, &format!("{command} $peer")),
            18518,
            Duration::from_secs(90),
        )
        .with_context(|| format!("{program} {flags}"))?;
    }
    Ok(())
}

pub(super) fn connection_manager(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (server, client) in [
        ("rping -s -a 0.0.0.0 -C 50 -V", "rping -c -C 50 -V -a"),
        ("ucmatose -c 5", "ucmatose -c 5 -s"),
    ] {
        connect(one, server, two, client)?;
    }
    Ok(())
}

/// A listener of rdma_cm has no TCP socket to wait for: the client, whose last argument is the
/// server's address, tries until it is heard. Returns the server, whose client is done.
pub(super) fn ask<'v>(one: &'v Vm, server: &str, two: &Vm, client: &str) -> Result<Running<'v>> {
    let time = Duration::from_secs(90);
    let seconds = one.at_most(Duration::from_secs(50)).as_secs();
    let serving = one.spawn(&format!("timeout {seconds} {server}"), time)?;
    let serving = once_it_listens(one, serving)?;
    let outcome = two.run(
        &tried_until_heard(two, &format!("{client} {}", one.ip())),
        time,
    )?;
    if !outcome.ok() {
        serving.signal(libc::SIGTERM)?;
        let served = serving.wait()?;
        bail!("{client}: {outcome:?}\nserver: {served:?}");
    }
    Ok(serving)
}

/// Like [`ask`], with a server that notices that its client is done.
pub(super) fn connect(one: &Vm, server: &str, two: &Vm, client: &str) -> Result<()> {
    // rping's server ends with an error when its client hangs up; what counts is the client.
    let served = ask(one, server, two, client)?.wait()?;
    if served.timed_out || served.code == 124 || served.crashed() {
        bail!("{server} crashed or does not end: {served:?}");
    }
    Ok(())
}

/// Frames that belong to no queue pair reach the ordinary interface while RDMA is under way.
fn tcp_beside_rdma(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let receive = one.spawn("nc -l -p 7000 | sha256sum", Duration::from_secs(120))?;
    crate::traffic::wait_listening(one, 7000)?;
    let sending = two.spawn(
        &format!(
            "head -c 3000000 /dev/urandom >/tmp/data; sha256sum </tmp/data; nc -N {} 7000 </tmp/data",
            one.ip()
        ),
        Duration::from_secs(100),
    )?;
    // Where queues are full a frame may be lost, but not for long.
    let ping = two.spawn(
        &format!(
            "for n in {{1..5}}; do
                 ping -c 5 -i 0.3 -s 8000 -M do {} | tee /run/ping
                 ! grep -q ' 0% packet loss' /run/ping || exit 0
             done; exit 1",
            one.ip()
        ),
        Duration::from_secs(120),
    )?;
    client_server(
        (
            one,
            "exec ibv_rc_pingpong -d $dev -g $gid -p $port -s 16384 -n 200 -c",
        ),
        (
            two,
            "exec ibv_rc_pingpong -d $dev -g $gid -p $port -s 16384 -n 200 -c $peer",
        ),
        18517,
        Duration::from_secs(120),
    )?;
    ping.success().context("frames were lost")?;
    let sent = sending.success()?;
    let received = receive.success()?;
    if sent.trim() != received.trim() {
        bail!("TCP data differ: sent {sent}, received {received}");
    }
    Ok(())
}

fn everything_is_given_back(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        nothing_left(vm)?;
    }
    Ok(())
}
