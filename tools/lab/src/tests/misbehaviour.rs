// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that does not keep to its specification, and one that goes at random moments: the
//! driver neither oopses, warns, hangs nor leaks, and serves again when the device behaves.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};

use super::basics::alone;
use super::driver::{
    bind, ended_well, leave_failed, program_in_the_middle, unbind, BIND, PATIENCE,
};
use super::{nothing_left, nvme, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::shell::LOAD_DRIVER;
use crate::traffic::DEVICE_AND_GID;
use crate::vm::{Running, Vm};

/// The driver is loaded when these begin and when they end.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "answers and events that are late, doubled or out of order harm no program",
        disorder,
    ),
    VmTest::new(
        "late events meet no completion queue that is gone",
        late_events,
    ),
    VmTest::new(
        "nonsense in all that the driver reads: no oops, no hang, no leak",
        |cluster| nonsense_by(cluster, first_seed(cluster), rounds(cluster, 1, 12)),
    ),
    VmTest::new(
        "the device goes or is taken at random moments, and comes back",
        |cluster| chaos_by(cluster, first_seed(cluster), rounds(cluster, 3, 48)),
    ),
    VmTest::new(
        "a device that answers nothing is given up, and does not stop network configuration",
        silence,
    ),
    VmTest::new(
        "a device that fails while its driver binds is noticed, and works after the next bind",
        fails_while_binding,
    ),
    VmTest::new(
        "a device that fails before its registration is done: who has opened it is told",
        fails_before_it_is_registered,
    ),
    VmTest::new(
        "a reset by others ends the wait for completions that never come, and programs are told",
        reset_under_a_drain,
    ),
    VmTest::new(
        "a reset by others under a program, also of a failed device, is survived",
        reset_under_a_program,
    ),
    VmTest::new("a slow reset is waited for", slow_reset),
    VmTest::new(
        "a start waits for a slow reset and writes to no device that it does not know",
        careful_start,
    ),
    VmTest::new(
        "a device whose reset never ends is stopped by the bus",
        stopped_by_the_bus,
    ),
];

/// What is left to the device here is leaked on purpose. Only the first machine is needed, with its driver or
/// without.
pub const LEAKING: &[VmTest] = &[VmTest::last(
    "what a device knows that nothing stops is never freed",
    unstoppable,
)];

/// Traffic of every kind in one machine. Checks may fail as they like, and one that waits for what was
/// spoilt is not waited for; a program that crashes ends it.
const TRAFFIC: &str = "while :; do
        for what in objects \"all --loopback\"; do
            timeout 8 verbs-check run $what; rc=$?; [ $rc -lt 128 ] || exit $rc
        done
    done";

pub(super) fn misbehave(cluster: &Cluster, rules: &Value) -> Result<()> {
    let mut request = rules.clone();
    request["cmd"] = json!("misbehave");
    cluster.device_command(1, &request)?;
    Ok(())
}

pub(super) fn behave(cluster: &Cluster) -> Result<()> {
    misbehave(cluster, &json!({}))
}

/// What the device did wrong since it was told to.
fn misdeeds(cluster: &Cluster) -> Result<Value> {
    Ok(cluster.counters(1)?["misbehaviour"]["done"].clone())
}

/// How many seeds are tried.
fn rounds(cluster: &Cluster, usual: u64, thorough: u64) -> u64 {
    if cluster.thorough() {
        thorough
    } else {
        usual
    }
}

/// The seed to be repeated, if one is.
pub(super) fn given_seed() -> Option<u64> {
    std::env::var("FERRITE_SEED").ok()?.parse().ok()
}

/// The first seed: always the same, or a fresh one in the long run. `FERRITE_SEED` repeats one.
fn first_seed(cluster: &Cluster) -> u64 {
    match given_seed() {
        Some(seed) => seed,
        None if cluster.thorough() => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(1, |time| time.as_secs()),
        None => 1,
    }
}

/// Loads the driver anew, with `parameters`.
fn reload(vm: &Vm, parameters: &str) -> Result<()> {
    vm.sh_in(
        &format!("rmmod ferrite; {LOAD_DRIVER} {parameters}"),
        PATIENCE,
    )?;
    wait_active(vm)
}

/// Resets the function behind the driver's back.
pub(super) fn reset(vm: &Vm) -> Result<()> {
    vm.sh_in(
        "for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do echo 1 >$f/reset || exit; done",
        PATIENCE,
    )?;
    Ok(())
}

/// Takes the driver off the device and puts it back on one that behaves; afterwards everything
/// works.
fn start_over(cluster: &Cluster, vm: &Vm) -> Result<()> {
    serves_again(cluster, vm)?;
    still_works(cluster)
}

/// The same, without a peer.
fn serves_again(cluster: &Cluster, vm: &Vm) -> Result<()> {
    unbind(vm)?;
    behave(cluster)?;
    bind(vm)?;
    nothing_left(vm)
}

/// Fails if more pages than so many stay pinned. Those of a process that has ended may be given back a little later.
pub(super) fn none_pinned_since(vm: &Vm, before: u64) -> Result<()> {
    let mut stayed = 0;
    wait_until(Instant::now() + vm.at_most(PATIENCE), || {
        stayed = pinned(vm)?.saturating_sub(before);
        Ok(stayed == 0)
    })?;
    ensure!(stayed == 0, "{stayed} pages stay pinned");
    Ok(())
}

/// Pages of user memory that are pinned.
pub(super) fn pinned(vm: &Vm) -> Result<u64> {
    let pages = vm.sh("cat /proc/sys/vm/stat_refresh
         awk '/^nr_foll_pin_acquired/ { n += $2 } /^nr_foll_pin_released/ { n -= $2 } END { print n }' \
             /proc/vmstat")?;
    Ok(pages.trim().parse()?)
}

fn disorder(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let seed = first_seed(cluster);
    println!("      seed {seed}");
    misbehave(
        cluster,
        &json!({
            // Late is late: a program gives thousands of commands.
            "seed": seed, "hold": 5,
            "answers": {"double": 0.2, "reorder": 0.2, "delay": 0.2},
            "events": {"double": 0.2, "reorder": 0.1, "delay": 0.2},
        }),
    )?;
    alone(cluster, "objects")?;
    let done = misdeeds(cluster)?;
    for kind in ["doubled", "reordered", "delayed"] {
        ensure!(done[kind].as_u64() > Some(0), "nothing was {kind}: {done}");
    }
    behave(cluster)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn late_events(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let seed = first_seed(cluster);
    println!("      seed {seed}");
    misbehave(
        cluster,
        &json!({
            "seed": seed, "hold": 60,
            "events": {"delay": 0.7, "double": 0.5},
        }),
    )?;
    // Makes and ends completion queues of the kernel, in every way of polling.
    one.sh_in(
        &format!(
            "set -e
             for n in $(seq {}); do
                 insmod /ferrite/modules/rust_rdma_loop.ko
                 rmmod rust_rdma_loop
             done
             # This device has all that it tests.
             ! dmesg | grep 'ferrite.*: rust_rdma_loop: skipped'",
            rounds(cluster, 1, 2)
        ),
        Duration::from_secs(120),
    )?;
    let done = misdeeds(cluster)?;
    ensure!(
        done["delayed"].as_u64() > Some(0),
        "nothing was late: {done}"
    );
    behave(cluster)?;
    nothing_left(one)?;
    still_works(cluster)
}

/// What the driver and programs read in service, and how often it is nonsense. One at a time: much of it
/// ends the service, and nobody reads the others any more.
const READ_IN_SERVICE: [(&str, f64); 5] = [
    ("records", 0.2),
    ("completions", 0.2),
    ("events", 0.2),
    ("replies", 0.2),
    ("answers", 0.02),
];

/// The same of the driver's start.
const READ_AT_START: [(&str, f64); 3] = [("registers", 0.1), ("replies", 0.2), ("answers", 0.05)];

/// Where there is no time, answers are nonsense at the start alone, in which the driver gives commands of most kinds, and
/// registers in [`careful_start`] alone.
fn is_for_long_runs(at_start: bool, what: &str) -> bool {
    matches!((at_start, what), (false, "answers") | (true, "registers"))
}

/// So often the driver is started until something was nonsense.
const STARTS: usize = 10;

/// Nonsense during traffic, while the driver lets go and during its start, for `count` seeds from
/// `first` on.
pub fn nonsense_by(cluster: &Cluster, first: u64, count: u64) -> Result<()> {
    let (one, _) = cluster.two()?;
    // An answer that is not understood counts as none.
    reload(one, "command_timeout_ms=3000")?;
    let spoil = |seed: u64, what: &str, chance: f64| {
        misbehave(
            cluster,
            &json!({
                "seed": seed, "hold": 100,
                "events": {"double": 0.1, "delay": 0.1},
                "nonsense": {what: chance},
            }),
        )
    };
    let spoiled = |what: &str| -> Result<u64> {
        let done = misdeeds(cluster)?;
        let count = done["nonsense"][what].as_u64();
        count.with_context(|| format!("no count of {what}: {done}"))
    };
    let in_service = |seed: u64, what: &str, chance: f64| -> Result<()> {
        spoil(seed, what, chance)?;
        let traffic = one.spawn(TRAFFIC, 3 * PATIENCE)?;
        let patience = Duration::from_secs(30) * one.patience();
        // The first may be the last.
        wait_until(Instant::now() + patience, || Ok(spoiled(what)? >= 3))?;
        wait_until(Instant::now() + one.at_most(PATIENCE), || {
            Ok(spoiled(what)? > 0)
        })?;
        traffic.end()?;
        ensure!(spoiled(what)? > 0, "nothing was nonsense");
        unbind(one)?;
        behave(cluster)?;
        bind(one)
    };
    let at_start = |seed: u64, what: &str, chance: f64| -> Result<()> {
        unbind(one)?;
        spoil(seed, what, chance)?;
        for _ in 0..STARTS {
            // What it makes of such a device is its affair, as long as it says so in time.
            let bound = one.run(BIND, PATIENCE)?;
            ensure!(!bound.timed_out, "the driver hangs: {bound:?}");
            if spoiled(what)? > 0 {
                return Ok(());
            }
            unbind(one)?;
        }
        bail!("nothing was nonsense");
    };
    for seed in first..first + count {
        println!("      seed {seed}");
        let wanted =
            |at_start: bool, what: &str| cluster.thorough() || !is_for_long_runs(at_start, what);
        for (what, chance) in READ_IN_SERVICE {
            if !wanted(false, what) {
                continue;
            }
            in_service(seed, what, chance).with_context(|| format!("{what}, seed {seed}"))?;
        }
        for (what, chance) in READ_AT_START {
            if !wanted(true, what) {
                continue;
            }
            at_start(seed, what, chance)
                .with_context(|| format!("{what} at the start, seed {seed}"))?;
        }
        start_over(cluster, one).with_context(|| format!("seed {seed}"))?;
    }
    reload(one, "")
}

/// Who uses the device of machine 1 when something happens to it. Each of them makes and ends what
/// it has, over and over, and may fail as it likes.
#[derive(Clone, Copy, Debug)]
enum User {
    /// Programs with objects and operations of every kind.
    Programs,
    /// Members of a multicast group that come and go.
    Multicast,
    /// The sample: the abstractions' own user in the kernel.
    Sample,
    /// A target of NVMe over Fabrics, and its initiator in machine 2.
    Nvme,
}

impl User {
    /// By seed: a short run, of seeds 1 to 3, is without the first one, whose connections take many seconds to be
    /// found dead.
    const ALL: [Self; 4] = [Self::Nvme, Self::Programs, Self::Multicast, Self::Sample];

    /// How many commands it gives the device before it begins again, about.
    fn commands(self) -> u64 {
        match self {
            Self::Programs => 400,
            Self::Multicast => 12,
            Self::Sample => 150,
            Self::Nvme => 40,
        }
    }

    fn start<'vm>(self, one: &'vm Vm, two: &'vm Vm) -> Result<Running<'vm>> {
        let endless = |vm: &'vm Vm, work: &str| {
            vm.spawn(
                &format!("while :; do {work}; done >/run/user 2>&1"),
                2 * PATIENCE,
            )
        };
        match self {
            Self::Programs => endless(one, TRAFFIC),
            Self::Multicast => endless(
                one,
                &format!(
                    "stdbuf -oL mckey -m 239.77.0.2 -b {} -C 1000 >/run/member 2>&1 & member=$!
                     for n in $(seq 50); do
                         grep -q receiving /run/member && break; kill -0 $member || break; sleep 0.05
                     done
                     kill $member; wait $member",
                    one.ip()
                ),
            ),
            Self::Sample => endless(
                one,
                "insmod /ferrite/modules/rust_rdma_loop.ko; rmmod rust_rdma_loop",
            ),
            Self::Nvme => {
                nvme::serve(one)?;
                nvme::prepare(two)?;
                let work = format!(
                    "{}; dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64; {}",
                    nvme::connecting(one),
                    nvme::DISCONNECTING
                );
                endless(two, &work)
            }
        }
    }

    fn end(self, one: &Vm, two: &Vm, running: Running<'_>) -> Result<()> {
        running.end()?;
        match self {
            Self::Programs | Self::Multicast => {}
            Self::Sample => {
                // Who was killed while it was being loaded is at it until the kernel is done.
                one.wait_for(
                    "! lsmod | grep -q ^rust_rdma_loop || rmmod rust_rdma_loop",
                    PATIENCE,
                )?;
            }
            Self::Nvme => {
                nvme::disconnect(two)?;
                nvme::end(one)?;
            }
        }
        Ok(())
    }
}

/// How many commands machine 1 has given its device.
pub(super) fn commands_given(cluster: &Cluster) -> Result<u64> {
    let counters = cluster.counters(1)?;
    counters["engine"]["commands"]
        .as_u64()
        .context("no engine.commands")
}

/// Waits until machine 1 has given its device so many commands.
pub(super) fn wait_for_commands(cluster: &Cluster, count: u64) -> Result<()> {
    let patience = cluster.two()?.0.at_most(Duration::from_secs(60));
    let come = wait_until(Instant::now() + patience, || {
        Ok(commands_given(cluster)? >= count)
    })?;
    ensure!(come, "the device has nothing to do");
    Ok(())
}

/// Waits for a moment in the work of machine 1, by how many commands it has given its device.
fn wait_for_moment(cluster: &Cluster, commands: u64) -> Result<()> {
    wait_for_commands(cluster, commands_given(cluster)? + commands)
}

/// The device fails, is taken away or is reset behind the driver's back, under every kind of user at
/// random moments, for `count` seeds from `first` on.
pub fn chaos_by(cluster: &Cluster, first: u64, count: u64) -> Result<()> {
    let (one, two) = cluster.two()?;
    reload(one, "command_timeout_ms=3000")?;
    for seed in first..first + count {
        // Whoever uses it, what happens and which of the two lets go first: each with each.
        let user = User::ALL[seed as usize % User::ALL.len()];
        println!("      seed {seed}: {user:?}");
        let round = || -> Result<()> {
            let running = user.start(one, two)?;
            wait_for_moment(
                cluster,
                1 + seed.wrapping_mul(0x9e37_79b9) % user.commands(),
            )?;
            match seed % 3 {
                0 => {
                    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
                }
                1 => {
                    unbind(one)?;
                }
                _ => reset(one)?,
            }
            if seed / 12 % 2 == 0 {
                unbind(one)?;
            }
            user.end(one, two, running)?;
            start_over(cluster, one)
        };
        round().with_context(|| format!("seed {seed}"))?;
    }
    reload(one, "")
}

/// The kernel drains a queue pair whose flushed work requests never complete, and nobody gives the
/// device a command, so that only the reset itself can tell that it was reset.
fn reset_under_a_drain(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    one.sh("rm -f /run/events")?;
    let watch = one.spawn(
        &format!("{DEVICE_AND_GID} exec stdbuf -oL ibv_asyncwatch -d $dev >/run/events"),
        2 * PATIENCE,
    )?;
    one.wait_for("grep -qs ferrite /run/events", PATIENCE)?;
    // Else it is given commands when it comes back.
    leave_failed(one)?;
    misbehave(cluster, &json!({"lose_flushes": true}))?;
    let sample = one.spawn("exec insmod /ferrite/modules/rust_rdma_loop.ko", PATIENCE)?;
    one.wait_for(
        "grep -q ib_drain_qp /proc/$(pgrep -x insmod)/stack",
        PATIENCE,
    )
    .context("the sample drains nothing")?;
    let lost = |done: &Value| done["flushes"].as_u64() > Some(0);
    let patience = one.at_most(Duration::from_secs(60));
    wait_until(Instant::now() + patience, || Ok(lost(&misdeeds(cluster)?)))?;
    let done = misdeeds(cluster)?;
    ensure!(lost(&done), "no flushed work request was lost: {done}");
    let commands = commands_given(cluster)?;
    reset(one)?;
    one.wait_for("! pgrep -x insmod", PATIENCE)
        .context("who drains waits for a device that was reset")?;
    // IBV_EVENT_DEVICE_FATAL.
    one.wait_for("grep -q '(8)' /run/events", PATIENCE)
        .context("no program was told")?;
    ensure!(
        commands_given(cluster)? == commands,
        "the device was given a command after its reset"
    );
    let sample = sample.wait()?;
    ensure!(
        !sample.ok() && !sample.crashed() && !sample.timed_out,
        "the sample passed without a device: {sample:?}"
    );
    unbind(one)?;
    watch.end()?;
    start_over(cluster, one)
}

fn reset_under_a_program(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let before = pinned(one)?;
    let program = program_in_the_middle(one)?;
    leave_failed(one)?;
    reset(one)?;
    one.wait_for("rdma link | grep -q 'state DOWN'", PATIENCE)
        .context("the driver did not notice")?;
    // It has failed by now.
    reset(one)?;
    unbind(one)?;
    ended_well(one, program)?;
    none_pinned_since(one, before)?;
    // No driver is there to be told of this one.
    one.sh_in(
        "for f in $(cat /run/functions); do echo 1 >/sys/bus/pci/devices/$f/reset || exit; done",
        PATIENCE,
    )?;
    start_over(cluster, one)
}

/// The device fails while the driver binds to it, at moments all over that.
fn fails_while_binding(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    reload(one, "command_timeout_ms=3000")?;
    unbind(one)?;
    let before = commands_given(cluster)?;
    bind(one)?;
    let all = commands_given(cluster)? - before;
    ensure!(all > 8, "only {all} commands bind a driver");
    let count = rounds(cluster, 3, 24);
    for moment in 0..count {
        let command = 1 + all * moment / count;
        let round = || -> Result<()> {
            unbind(one)?;
            one.sh("dmesg -C")?;
            // So that there is a moment between one command and the next.
            misbehave(
                cluster,
                &json!({"seed": moment, "hold": 100, "answers": {"delay": 1.0}}),
            )?;
            let before = commands_given(cluster)?;
            let binding = one.spawn(BIND, PATIENCE)?;
            wait_for_commands(cluster, before + command)?;
            cluster.device_command(1, &json!({"cmd": "fatal"}))?;
            let bound = binding.wait()?;
            ensure!(!bound.timed_out, "the driver hangs: {bound:?}");
            // Bound or not, it knows, and so do those who ask, until it has come back.
            one.wait_for(
                "dmesg >/run/said; grep -q 'device failed' /run/said &&
                 { ! rdma link | grep -q 'state ACTIVE' || grep -q 'device works again' /run/said; }",
                PATIENCE,
            )
            .context("the driver did not notice")?;
            // It is coming back by now, which is to take no longer than it has to.
            behave(cluster)?;
            start_over(cluster, one)
        };
        round().with_context(|| format!("at command {command} of {all}"))?;
    }
    reload(one, "")
}

/// A kernel user is still being shown the device when that fails, and a program has opened it.
fn fails_before_it_is_registered(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    // The sample stays, and tries a device that comes back all over.
    one.sh_in("insmod /ferrite/modules/rust_rdma_loop.ko", PATIENCE)?;
    unbind(one)?;
    misbehave(
        cluster,
        &json!({"seed": 1, "hold": 200, "answers": {"delay": 1.0}}),
    )?;
    one.sh("rm -f /run/events /run/bound")?;
    let binding = one.spawn(&format!("{BIND}; touch /run/bound"), PATIENCE)?;
    let watch = one.spawn(
        "until [ -e /dev/infiniband/uverbs0 ]; do sleep 0.02; done
         dev=$(cat /sys/class/infiniband_verbs/uverbs0/ibdev)
         exec stdbuf -oL ibv_asyncwatch -d $dev >/run/events",
        2 * PATIENCE,
    )?;
    one.wait_for("grep -qs ferrite /run/events", PATIENCE)?;
    one.sh("! test -e /run/bound")
        .context("the driver was bound too soon")?;
    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
    let bound = binding.wait()?;
    ensure!(!bound.timed_out, "the driver hangs: {bound:?}");
    behave(cluster)?;
    // IBV_EVENT_DEVICE_FATAL, twice: the core says the same of a device that goes, as this one does to come back.
    one.wait_for("[ $(grep -c '(8)' /run/events) -ge 2 ]", PATIENCE)
        .context("the program was not told")?;
    one.sh("rmmod rust_rdma_loop")?;
    unbind(one)?;
    watch.end()?;
    start_over(cluster, one)
}

/// What is done to the network of a machine by those who hold RTNL, and need the device to be told:
/// of an MTU, of addresses, of a VLAN, of a card that goes and comes back with all of them.
fn reconfigure(vm: &Vm) -> Result<Duration> {
    let start = Instant::now();
    vm.sh_in(
        &format!(
            "set -e
             mtu=$(cat /sys/class/net/eth0/mtu)
             ip link set eth0 mtu 1280
             ip addr add 10.79.0.1/24 dev eth0
             ip link add link eth0 name lan9 type vlan id 9
             ip addr add 10.77.9.1/24 dev lan9
             ip link set lan9 up
             ip netns add away
             ip link set eth0 netns away
             ip -n away link set eth0 netns 1
             ip netns del away
             ip addr replace {}/24 dev eth0
             ip link set eth0 up
             ip link set lan9 up
             ip link add silent0 type dummy
             ip link del silent0
             ip link del lan9
             ip link set eth0 mtu $mtu",
            vm.ip()
        ),
        PATIENCE,
    )?;
    Ok(start.elapsed())
}

/// For how long the driver waits for the answer to a command in [`silence`], where all of the network configuration
/// takes `usual` with a device that answers: the second is for a machine that became busier meanwhile.
fn answer_times(usual: Duration, patience: u32) -> [Duration; 2] {
    [
        2 * usual + Duration::from_secs(5) * patience,
        4 * usual + Duration::from_secs(15) * patience,
    ]
}

fn silence(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // Which is not what takes time.
    one.sh("modprobe dummy")?;
    let usual = reconfigure(one)?;
    let mut late = Vec::new();
    for timeout in answer_times(usual, one.patience()) {
        let (took, is_given_up) = reconfigured_in_silence(cluster, timeout)?;
        // The first command that is not answered is the device's last: who waits for one is over when it is given up,
        // and behind that nobody waits any more, and nothing is seen.
        if !is_given_up && took < timeout - Duration::from_secs(2) {
            return reload(one, "");
        }
        late.push((took, timeout));
    }
    bail!(
        "network configuration ended with the command that is not answered, (took, command): {late:?}, \
         and takes {usual:?} with a device that answers"
    );
}

/// How long network configuration takes with a device that answers nothing, and whether the driver had given that up by
/// its end; it does, after so long. The device works afterwards.
fn reconfigured_in_silence(cluster: &Cluster, timeout: Duration) -> Result<(Duration, bool)> {
    const GIVEN_UP: &str = "dmesg | grep -q 'no answer to command'";
    let (one, _) = cluster.two()?;
    reload(one, &format!("command_timeout_ms={}", timeout.as_millis()))?;
    let program = program_in_the_middle(one)?;
    leave_failed(one)?;
    misbehave(cluster, &json!({"answers": {"drop": 1.0}}))?;
    one.sh("dmesg -C")?;
    let took = reconfigure(one)?;
    let is_given_up = one.run(GIVEN_UP, PATIENCE)?.ok();
    one.wait_for(GIVEN_UP, PATIENCE)?;
    unbind(one)?;
    ended_well(one, program)?;
    start_over(cluster, one)?;
    Ok((took, is_given_up))
}

/// Makes the device fail while it misbehaves as `rules` say, and has the driver and a program let go
/// of it. Gives what the kernel said and how many pages were pinned before. The driver does not have it afterwards.
fn let_go_with(cluster: &Cluster, rules: &Value) -> Result<(String, u64)> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    one.sh("dmesg -C")?;
    let before = pinned(one)?;
    let program = program_in_the_middle(one)?;
    ensure!(pinned(one)? > before, "the program has no memory");
    // One whose memory is taken back while the device is being stopped.
    one.sh("rm -f /run/killed /run/killed.pid")?;
    let killed = one.spawn(
        "echo $$ >/run/killed.pid; exec verbs-check run removal >/run/killed 2>&1",
        2 * PATIENCE,
    )?;
    one.wait_for("grep -qs ready /run/killed", PATIENCE)?;
    leave_failed(one)?;
    misbehave(cluster, rules)?;
    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
    one.sh("kill -9 $(cat /run/killed.pid)")?;
    unbind(one)?;
    ended_well(one, program)?;
    killed.wait()?;
    let said = one.sh("dmesg")?;
    Ok((said, before))
}

/// The same; no page stays pinned, and afterwards everything works.
fn let_go_and_start_over(cluster: &Cluster, rules: &Value) -> Result<String> {
    let (one, _) = cluster.two()?;
    let (said, before) = let_go_with(cluster, rules)?;
    none_pinned_since(one, before).with_context(|| said.clone())?;
    start_over(cluster, one)?;
    Ok(said)
}

fn slow_reset(cluster: &Cluster) -> Result<()> {
    let said = let_go_and_start_over(cluster, &json!({"reset": "slow", "hold": 2000}))?;
    ensure!(
        !said.contains("reset failed"),
        "a reset of two seconds is not waited for:\n{said}"
    );
    Ok(())
}

fn careful_start(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let written = || -> Result<u64> {
        cluster.counters(1)?["engine"]["register_writes"]
            .as_u64()
            .context("no count of register writes")
    };
    unbind(one)?;
    // Every register reads as nonsense, the magic number too.
    misbehave(cluster, &json!({"nonsense": {"registers": 1.0}}))?;
    let before = written()?;
    for _ in 0..4 {
        ensure!(!one.run(BIND, PATIENCE)?.ok(), "any device will do");
    }
    let after = written()?;
    ensure!(after == before, "{} registers were written", after - before);
    // One that stopped before the driver came says so until its reset is done.
    misbehave(cluster, &json!({"reset": "slow", "hold": 2000}))?;
    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
    bind(one)?;
    start_over(cluster, one)
}

fn stopped_by_the_bus(cluster: &Cluster) -> Result<()> {
    let said = let_go_and_start_over(cluster, &json!({"reset": "never"}))?;
    ensure!(
        said.contains("reset failed") && !said.contains("cannot be stopped"),
        "the function was not reset:\n{said}"
    );
    Ok(())
}

fn unstoppable(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    reload(one, "")?;
    let rules = json!({"reset": "never", "ignore_function_reset": true});
    let (said, before) = let_go_with(cluster, &rules)?;
    ensure!(
        said.contains("cannot be stopped"),
        "a device that was never reset is taken for quiet:\n{said}"
    );
    ensure!(
        pinned(one)? > before,
        "pages were freed that the device may write to"
    );
    // It works when the device does.
    serves_again(cluster, one)?;
    crate::traffic::pingpong(one, one, 4096, 50, false)?;
    // A kernel that keeps books on mappings for the device tells of those that are left.
    let mut findings = one.new_findings();
    findings.retain(|finding| !finding.contains("at dma_debug_device_change"));
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    Ok(())
}
