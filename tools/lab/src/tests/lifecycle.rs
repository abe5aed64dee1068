// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loading, unloading, and losing the device.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::driver::{bind, ended_well, leave_failed, program_in_the_middle, unbind};
use super::{nvme, recovery, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::shell::LOAD_DRIVER;
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::Vm;

/// The driver is loaded when these begin and when they end.
pub const LOADING: &[VmTest] = &[
    VmTest::new("loads and unloads", |cluster| {
        cycles(cluster, if cluster.thorough() { 20 } else { 3 })
    }),
    VmTest::new("traffic between loads", traffic_between_loads),
    VmTest::new(
        "a program whose device goes is told, and can end what it has",
        unbound_under_a_program,
    ),
    VmTest::new(
        "a device that the driver let go of under load raises and writes nothing more",
        silent_afterwards,
    ),
];

/// A device that fails under its users, who let go of it all the same. The driver is loaded when
/// these begin and when they end.
pub const FAILING: &[VmTest] = &[
    VmTest::new("many loads and unloads", |cluster| {
        cycles(cluster, if cluster.thorough() { 20 } else { 6 })
    }),
    VmTest::new(
        "a device that fails under a member of a multicast group is let go of",
        fails_under_multicast,
    ),
    VmTest::new(
        "a device that fails under an NVMe target with shared receives is let go of at once",
        fails_under_shared_receives,
    ),
    VmTest::new(
        "the device comes back when the machine has slept, and its users with it",
        sleeps,
    ),
];

/// Ends the machines.
pub const ENDING: &[VmTest] = &[VmTest::last(
    "a machine that is switched off has stopped its device before, one that just failed too",
    switched_off,
)];

/// Takes the device of the second machine away. The driver is not loaded afterwards.
pub const REMOVAL: &[VmTest] = &[VmTest::new(
    "the device vanishes under traffic: errors, no hang, unload works",
    |cluster| vanishes(cluster, |cluster| cluster.remove_device(2)),
)];

/// The same by a signal that nobody can take. Neither driver is loaded afterwards.
pub const KILLED: &[VmTest] = &[VmTest::last(
    "the process of a device is killed under traffic: its machine lives, errors, no hang, unload works",
    |cluster| vanishes(cluster, |cluster| cluster.kill_device(2)),
)];

pub(super) fn cycles(cluster: &Cluster, count: u32) -> Result<()> {
    let runs: Vec<_> = cluster
        .vms
        .iter()
        .map(|vm| {
            vm.spawn(
                &format!(
                    "set -e
                     rmmod ferrite
                     devices() {{ compgen -G '/sys/class/infiniband/*'; }}
                     for n in $(seq {count}); do
                         insmod /ferrite/modules/ferrite.ko
                         devices
                         ibv_devices
                         rmmod ferrite
                         if devices; then exit 1; fi
                     done >/dev/null
                     {LOAD_DRIVER}"
                ),
                Duration::from_secs(300.max(10 * u64::from(count))),
            )
        })
        .collect::<Result<_>>()?;
    for run in runs {
        run.success()?;
    }
    for vm in &cluster.vms {
        wait_active(vm)?;
    }
    still_works(cluster)
}

fn traffic_between_loads(cluster: &Cluster) -> Result<()> {
    for _ in 0..2 {
        for vm in &cluster.vms {
            vm.sh(&format!("rmmod ferrite; {LOAD_DRIVER}"))?;
        }
        for vm in &cluster.vms {
            wait_active(vm)?;
        }
        still_works(cluster)?;
    }
    Ok(())
}

fn unbound_under_a_program(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let program = program_in_the_middle(one)?;
    unbind(one)?;
    ended_well(one, program)?;
    bind(one)?;
    still_works(cluster)
}

/// What the device of a machine has raised and written, which is more whenever it does anything.
fn activity(cluster: &Cluster, index: usize) -> Result<Vec<u64>> {
    let counters = cluster.counters(index)?;
    let names = ["interrupts", "events", "completions"];
    let counter = |name: &str| {
        let value = counters["engine"][name].as_u64();
        value.with_context(|| format!("no {name} in {counters}"))
    };
    names.into_iter().map(counter).collect()
}

fn silent_afterwards(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(120);
    let program = "exec ibv_rc_pingpong -e -d $dev -g $gid -p 18521 -s 4096 -n 100000000";
    let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
    wait_listening(one, 18521)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
    super::faults::wait_for_traffic(cluster, 2, &[&server, &client])?;
    let sample = || activity(cluster, 1);
    let start = sample()?;
    ensure!(start.iter().all(|count| *count > 0), "{start:?}");
    unbind(one)?;
    // The peer sends on until it gives up.
    let before = sample()?;
    std::thread::sleep(Duration::from_secs(1));
    let after = sample()?;
    for running in [client, server] {
        running.end()?;
    }
    bind(one)?;
    ensure!(
        before == after,
        "interrupts, events, completions: {before:?}, then {after:?}"
    );
    still_works(cluster)
}

/// Makes the device of machine 1 fail for good.
pub(super) fn fail_device(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    leave_failed(one)?;
    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
    one.wait_for("rdma link | grep -q 'state DOWN'", Duration::from_secs(60))
}

fn fails_under_multicast(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh("rm -f /run/member")?;
    let member = one.spawn(
        &format!(
            "exec stdbuf -oL mckey -m 239.77.0.2 -b {} -C 1000 >/run/member 2>&1",
            one.ip()
        ),
        Duration::from_secs(180),
    )?;
    one.wait_for("grep -qs receiving /run/member", Duration::from_secs(60))?;
    fail_device(cluster)?;
    member.end()?;
    one.wait_for(
        "! rdma resource show qp | grep -q mckey",
        Duration::from_secs(60),
    )
    .context("the member is left behind")?;
    unbind(one)?;
    bind(one)?;
    super::nothing_left(one)?;
    still_works(cluster)
}

fn fails_under_shared_receives(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    nvme::serve(one)?;
    nvme::connect(two, one)?;
    two.wait_for("test -b /dev/nvme0n1", Duration::from_secs(60))?;
    two.sh("dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64")?;
    fail_device(cluster)?;
    let start = Instant::now();
    let let_go = unbind(one);
    let took = start.elapsed();
    let back = bind(one).and_then(|_| nvme::disconnect(two));
    let_go.and(back)?;
    // Each queue pair that is not told of its last receive is waited for for a minute.
    ensure!(took < Duration::from_secs(50), "unbound after {took:?}");
    nvme::end(one)?;
    super::nothing_left(one)?;
    still_works(cluster)
}

/// For sleep, and for being switched off with memory saved.
pub(super) const SLEEP: [&str; 2] = ["freeze", "disk"];

/// Whether the kernel of a machine can [`sleep`] so.
pub(super) fn can_sleep(vm: &Vm) -> Result<bool> {
    Ok(vm
        .run("test -w /sys/power/pm_test", Duration::from_secs(60))?
        .ok())
}

/// Has the kernel go through all of a machine's sleep but its last step, which is not ours: devices are put to sleep
/// and lose power, and are woken after a moment.
pub(super) fn sleep(vm: &Vm, state: &str) -> Result<()> {
    vm.sh_in(
        &format!(
            "set -e
             echo 1 >/sys/module/suspend/parameters/pm_test_delay
             echo platform >/sys/power/pm_test
             echo {state} >/sys/power/state
             echo none >/sys/power/pm_test"
        ),
        Duration::from_secs(120),
    )?;
    Ok(())
}

fn sleeps(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    nvme::serve(two)?;
    nvme::connect_for_good(one, two)?;
    let slept = (|| {
        for state in SLEEP {
            let before = recovery::lives(one)?;
            one.sh("dmesg -C")?;
            let server = one.spawn(
                &format!(
                    "{DEVICE_AND_GID} exec ibv_rc_pingpong -d $dev -g $gid -p 18522 -n 100000000"
                ),
                Duration::from_secs(600),
            )?;
            wait_listening(one, 18522)?;
            let client = two.spawn(
                &format!(
                    "{DEVICE_AND_GID} exec ibv_rc_pingpong -d $dev -g $gid -p 18522 -n 100000000 {}",
                    one.ip()
                ),
                Duration::from_secs(600),
            )?;
            super::faults::wait_for_traffic(cluster, 1, &[&server, &client])?;
            recovery::clear_dump(one)?;
            sleep(one, state)?;
            recovery::wait_back(one, before)?;
            // The one dump that is kept is for a failure that nobody knows of.
            recovery::none_dumped(one)?;
            // Of its own it had nothing to complain of: it was stopped before it lost the bus.
            let said = one.sh("dmesg")?;
            ensure!(
                said.contains("device is put to sleep") && !said.contains("device failed"),
                "the device was not stopped in time:\n{said}"
            );
            // Connections do not outlive it. Who polls, and asks for no event, hears nothing of that.
            client.end()?;
            server.end()?;
            still_works(cluster)?;
            // The disk is there, by a connection that was made anew. Who is about to make one when the machine goes to
            // sleep again loses his disk with the device.
            one.sh_in(
                "dd if=/dev/nvme0n1 of=/dev/null bs=64k count=16 iflag=direct status=none",
                Duration::from_secs(120),
            )?;
        }
        Ok(())
    })();
    let over = nvme::disconnect(one).and_then(|_| nvme::end(two));
    slept.and(over)
}

fn switched_off(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    if cluster.flavour().finds_leaks() {
        // Nobody can look afterwards.
        super::no_leaks(cluster)?;
    }
    let time = Duration::from_secs(300);
    let program = "exec ibv_rc_pingpong -e -d $dev -g $gid -p 18523 -s 4096 -n 100000000";
    let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
    wait_listening(one, 18523)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
    super::faults::wait_for_traffic(cluster, 1, &[&server, &client])?;
    // One under traffic, then one that is about to be tried again.
    for (index, vm) in [(1, one), (2, two)] {
        let has_bus = |wanted: bool| -> Result<()> {
            let counters = cluster.counters(index)?;
            ensure!(
                counters["bus_master"] == wanted,
                "machine {index}: {counters}"
            );
            Ok(())
        };
        has_bus(true)?;
        vm.stay_when_off()?;
        if index == 2 {
            cluster.device_command(index, &json!({"cmd": "fatal"}))?;
        }
        // Ends in order, as it does for who has no init to ask: devices are told, and processes are not waited for.
        drop(vm.spawn("echo o >/proc/sysrq-trigger; sleep 600", time)?);
        let off = wait_until(Instant::now() + vm.at_most(time), || vm.is_off())?;
        ensure!(
            off,
            "machine {index} is not switched off\n{}",
            vm.last_words()
        );
        // The machine stands still as its kernel has left it.
        has_bus(false).context("the device was not stopped")?;
        let before = activity(cluster, index)?;
        std::thread::sleep(Duration::from_secs(1));
        let after = activity(cluster, index)?;
        ensure!(
            before == after,
            "machine {index}: {before:?}, then {after:?}"
        );
    }
    let said = one.serial_log();
    ensure!(
        said.contains("device is stopped for good") && !said.contains("device is tried again"),
        "the driver does not say why:\n{}",
        one.last_words()
    );
    Ok(())
}

/// The device of the second machine vanishes by `remove`.
fn vanishes(cluster: &Cluster, remove: fn(&Cluster) -> Result<()>) -> Result<()> {
    let (one, two) = cluster.two()?;
    let time = Duration::from_secs(300);
    // The peer always has writes under way, so the silence cannot escape it.
    let program = "exec ib_write_bw -d $dev -x $gid -p 18520 -s 65536 -D 600 -F";
    let server = two.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
    wait_listening(two, 18520)?;
    let client = one.spawn(&format!("{DEVICE_AND_GID} {program} {}", two.ip()), time)?;
    super::faults::wait_for_traffic(cluster, 1, &[&server, &client])?;
    two.sh("rm -f /run/paging /run/member")?;
    // One that always has page faults under way, too.
    let paging = two.spawn("exec verbs-check run removal >/run/paging 2>&1", time)?;
    two.wait_for("grep -qs ready /run/paging", Duration::from_secs(60))?;
    // And one that lets go of all when it is told.
    let told = program_in_the_middle(two)?;
    // And users inside the kernel: a disk of the peer, a member of a multicast group.
    nvme::serve(one)?;
    nvme::connect(two, one)?;
    two.wait_for("test -b /dev/nvme0n1", Duration::from_secs(60))?;
    let disk = two.spawn(
        "while dd if=/dev/nvme0n1 of=/dev/null bs=64k iflag=direct; do :; done",
        time,
    )?;
    let member = two.spawn(
        &format!(
            "exec stdbuf -oL mckey -m 239.77.0.2 -b {} -C 1000 >/run/member 2>&1",
            two.ip()
        ),
        time,
    )?;
    two.wait_for("grep -qs receiving /run/member", Duration::from_secs(60))?;
    remove(cluster)?;
    ended_well(two, told)?;
    let outcome = client.wait()?;
    let said = format!("{}{}", outcome.out, outcome.err);
    if outcome.timed_out || !said.contains("Failed status 12") {
        bail!("the peer did not learn of it: {outcome:?}");
    }
    recovery::is_dumped(two)?;
    // A program that only polls memory may never learn; it must be possible to end it.
    server.signal(libc::SIGKILL)?;
    two.wait_for("! pgrep ib_write_bw", Duration::from_secs(90))
        .context("the program cannot be ended")?;
    paging.signal(libc::SIGKILL)?;
    two.wait_for("! pgrep verbs-check", Duration::from_secs(90))
        .context("the program with page faults cannot be ended")?;
    member.signal(libc::SIGKILL)?;
    two.wait_for("! pgrep mckey", Duration::from_secs(90))
        .context("the member of the group cannot be ended")?;
    let devinfo = two.run("exec ibv_devinfo -v", Duration::from_secs(60))?;
    if devinfo.timed_out {
        bail!("ibv_devinfo hangs on a device that is gone");
    }
    two.sh_in("rmmod ferrite", Duration::from_secs(120))
        .context("the driver does not unload")?;
    ensure!(two.alive(), "{} ended with its device", two.name());
    disk.end()?;
    nvme::end(one)?;
    // The machine left behind serves on.
    one.sh("rdma link | grep -q 'state ACTIVE'")?;
    one.sh_in("rmmod ferrite", Duration::from_secs(60))?;
    if cluster.flavour().finds_leaks() {
        super::no_leaks(cluster).context("after the device was gone")?;
    }
    Ok(())
}
