// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make soak`: everything at once, for as long as one likes. Programs and kernel users exchange verified
//! data while the wire loses frames, memory is short, processors come and go, and devices stop, are reset,
//! taken from their driver and given back. What happens in which order is chosen by a seed.
//!
//! After each round, when nothing is under way, it is looked at what the kernels and the processes of the
//! devices and of the fabric hold: what grows from round to round is not given back.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};

use super::basics::verbs_check;
use super::driver::{bind, bind_anew, ended_well, program_in_the_middle, unbind, PATIENCE};
use super::misbehaviour::reset;
use super::recovery::{lives, wait_back};
use super::storage::{self, Disk, Load, Transport};
use super::{
    lifecycle, nfs, nothing_left, nvme, once_it_listens, still_works, tried_until_heard,
    vector_map, wait_active,
};
use super::{Group, Vm};
use crate::bench::plot::{Plot, Point, Series};
use crate::cluster::{Cluster, Options as ClusterOptions, RunDir};
use crate::kernel::Flavour;
use crate::process::check_interrupted;
use crate::report::Report;
use crate::shell::LOAD_DRIVER;
use crate::step::{outside, say};
use crate::traffic::{client_server, perftest, pingpong, pingpong_over_loss};
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::Running;
use crate::{suite, OUT};

/// Options of `soak`.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long.
    pub minutes: f64,
    /// What happens; a fresh one if there is none.
    pub seed: Option<u64>,
    /// How many machines.
    pub vms: usize,
    /// The kernel.
    pub flavour: Flavour,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            minutes: 30.0,
            seed: None,
            vms: 2,
            flavour: Flavour::Test,
        }
    }
}

/// Numbers by seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % limit.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at + 1));
        }
    }
}

/// What happens to machines that are at work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    /// Nothing.
    Calm,
    /// The wire loses, doubles, reorders and damages frames.
    BadWire,
    /// The cable is pulled for a moment.
    LinkFlap,
    /// A device stops with a fatal error.
    Fatal,
    /// Somebody resets a function.
    Flr,
    /// A program is killed in the middle of a transfer.
    Kill,
    /// Memory is short.
    Pressure,
    /// A processor is taken away and given back, again and again.
    Hotplug,
    /// A machine sleeps.
    Sleep,
    /// Another layout of event queues and vectors is set.
    VectorMap,
    /// A device answers late, twice and out of order.
    Misbehave,
}

const ACTS: [Act; 11] = [
    Act::Calm,
    Act::BadWire,
    Act::LinkFlap,
    Act::Fatal,
    Act::Flr,
    Act::Kill,
    Act::Pressure,
    Act::Hotplug,
    Act::Sleep,
    Act::VectorMap,
    Act::Misbehave,
];

impl Act {
    fn name(self) -> &'static str {
        match self {
            Self::Calm => "traffic alone",
            Self::BadWire => "traffic over a bad wire",
            Self::LinkFlap => "a pulled cable",
            Self::Fatal => "a fatal stop",
            Self::Flr => "a reset by others",
            Self::Kill => "a killed program",
            Self::Pressure => "traffic with little memory",
            Self::Hotplug => "traffic while processors come and go",
            Self::Sleep => "a machine that sleeps",
            Self::VectorMap => "another vector map",
            Self::Misbehave => "traffic with a device that misbehaves",
        }
    }

    /// Whether a device begins anew by it.
    fn renews(self) -> bool {
        matches!(
            self,
            Self::Fatal | Self::Flr | Self::Sleep | Self::VectorMap
        )
    }

    /// Whose connections may end by it, where it meets a machine.
    fn spoils(self) -> Spoils {
        match self {
            Self::BadWire => Spoils::All,
            Self::LinkFlap => Spoils::Met,
            _ if self.renews() => Spoils::Met,
            _ => Spoils::Nothing,
        }
    }
}

/// Whose connections are spoilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoils {
    Nothing,
    /// Those of the machine that is met.
    Met,
    All,
}

/// How many acts a round has.
const ACTS_OF_A_ROUND: usize = 4;
/// So often a driver tries a device again in a round, which is less often than it does at all.
const RENEWALS: usize = 2;

/// Takes all memory but so many MiB, and keeps it until its input ends.
const HOG: &str = r"import sys
def available():
    for line in open('/proc/meminfo'):
        if line.startswith('MemAvailable'):
            return int(line.split()[1]) >> 10
held = []
while available() > int(sys.argv[1]):
    held.append(bytearray(b'x' * (4 << 20)))
print('ready', flush=True)
while True:
    for part in held:
        part[::4096] = b'y' * len(part[::4096])";
/// What is left to others, of a machine with so little.
const LEFT_MIB: u32 = 96;

/// What is held when nothing is under way, by name.
type Held = BTreeMap<String, f64>;

/// How much something may grow from one round to the last: a share of it, and so much.
struct Bound {
    share: f64,
    more: f64,
}

/// By the end of a sample's name.
const BOUNDS: &[(&str, Bound)] = &[
    (
        "descriptors",
        Bound {
            share: 0.0,
            more: 3.0,
        },
    ),
    (
        "threads",
        Bound {
            share: 0.0,
            more: 3.0,
        },
    ),
    // What a device's process has in use by its own count.
    (
        "heap KiB",
        Bound {
            share: 0.10,
            more: 512.0,
        },
    ),
    (
        "memory KiB",
        Bound {
            share: 0.20,
            more: 16_384.0,
        },
    ),
    // Caches of the kernel's that it has for the next one.
    (
        "slab KiB",
        Bound {
            share: 0.15,
            more: 8_192.0,
        },
    ),
    (
        "open files",
        Bound {
            share: 0.0,
            more: 64.0,
        },
    ),
];

/// What has grown beyond its bound, between the first samples after a round of warming up, and the last.
fn drift(samples: &[Held]) -> Vec<String> {
    // With fewer there is no telling a trend from one round's weather.
    if samples.len() < 4 {
        return Vec::new();
    }
    let samples = &samples[1..];
    let part = (samples.len() / 3).max(1);
    let least = |samples: &[Held], name: &str| -> Option<f64> {
        let values = samples.iter().filter_map(|held| held.get(name).copied());
        values.reduce(f64::min)
    };
    let mut found = Vec::new();
    for name in samples[0].keys() {
        let Some((_, bound)) = BOUNDS.iter().find(|(end, _)| name.ends_with(end)) else {
            continue;
        };
        let first = least(&samples[..part], name);
        let last = least(&samples[samples.len() - part..], name);
        if let (Some(first), Some(last)) = (first, last) {
            if last > first * (1.0 + bound.share) + bound.more {
                found.push(format!("{name}: {first:.0} became {last:.0}"));
            }
        }
    }
    found
}

/// A field of a process's status, in KiB or as a count.
fn status(pid: u32, field: &str) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    value.with_context(|| format!("process {pid} has no {field}"))
}

fn process(held: &mut Held, name: &str, pid: u32) -> Result<()> {
    held.insert(format!("{name}: memory KiB"), status(pid, "VmRSS")?);
    held.insert(format!("{name}: threads"), status(pid, "Threads")?);
    let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    held.insert(format!("{name}: descriptors"), open as f64);
    Ok(())
}

/// What is held now; nothing is under way.
fn held(cluster: &Cluster) -> Result<Held> {
    let mut held = Held::new();
    for vm in &cluster.vms {
        let name = vm.name();
        let said = vm.sh("sync; echo 3 >/proc/sys/vm/drop_caches
             read -r open _ </proc/sys/fs/file-nr
             while read -r what value _; do
                 [ $what != SUnreclaim: ] || echo $value $open
             done </proc/meminfo")?;
        let numbers: Vec<f64> = said
            .split_whitespace()
            .map(|word| word.parse().context("no number"))
            .collect::<Result<_>>()?;
        let [slab, open] = numbers[..] else {
            bail!("cannot read: {said}");
        };
        held.insert(format!("{name}: slab KiB"), slab);
        held.insert(format!("{name}: open files"), open);
        let heap = cluster.counters(vm.index)?["heap_bytes"]
            .as_u64()
            .context("the device does not tell its heap")?;
        held.insert(
            format!("device {}: heap KiB", vm.index),
            heap as f64 / 1024.0,
        );
        let pid = cluster.device_pid(vm.index).context("no device")?;
        process(&mut held, &format!("device {}", vm.index), pid)?;
    }
    let fabric = cluster.fabric_pid().context("no fabric")?;
    process(&mut held, "fabric", fabric)?;
    Ok(held)
}

/// Users inside the kernel of both machines, for a round.
struct KernelUsers {
    /// The disk that the first machine has from the second.
    disk: String,
    /// Files that it has from there, where the kernel has NFS.
    files: Option<String>,
}

impl KernelUsers {
    fn begin(one: &Vm, two: &Vm) -> Result<Self> {
        nvme::Nvme::serve(two)?;
        let disk = nvme::Nvme::connect(one, two, storage::LONG)?;
        let has_nfs = |vm: &Vm| -> Result<bool> {
            let found = vm.run(
                "modprobe -nq nfsd && modprobe -nq nfs",
                Duration::from_secs(20),
            );
            Ok(found?.ok())
        };
        let files = if has_nfs(one)? {
            nfs::serve(two)?;
            Some(nfs::mount_from(one, (Transport::Rdma, &two.ip()), "4.2")?)
        } else {
            None
        };
        Ok(Self { disk, files })
    }

    /// Loads on all of them, which verify what they read.
    fn loads<'v>(&self, cluster: &Cluster, one: &'v Vm) -> Result<Vec<Load<'v>>> {
        let files = self.files.iter().map(|at| format!("{at}/load"));
        std::iter::once(self.disk.clone())
            .chain(files)
            .map(|path| Load::start(cluster, one, &path))
            .collect()
    }

    fn end(self, one: &Vm, two: &Vm) -> Result<()> {
        if let Some(at) = &self.files {
            nfs::unmount(one, at)?;
            nfs::end(two)?;
        }
        nvme::Nvme::disconnect(one)?;
        nvme::Nvme::end(two)
    }
}

/// Programs that exchange messages and must not notice anything.
fn traffic(cluster: &Cluster, random: &mut Random) -> Result<()> {
    let (one, two) = cluster.two()?;
    let (one, two) = if random.below(2) == 0 {
        (one, two)
    } else {
        (two, one)
    };
    match random.below(9) {
        0 => {
            let size = random.pick(&[1, 64, 4096, 65_536]);
            pingpong(one, two, size, 200, random.below(2) == 0)?;
        }
        1 => {
            let program = random.pick(&["ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_atomic_bw"]);
            let size = match program {
                "ib_atomic_bw" => 8,
                _ => random.pick(&[64, 4096, 65_536]),
            };
            perftest(one, two, program, size, 100, "")?;
        }
        2 => verbs_check(cluster, "stress --seconds 5")?,
        3 => verbs_check(cluster, "data")?,
        4 => verbs_check(cluster, "atomics")?,
        5 => verbs_check(cluster, "extended")?,
        6 => verbs_check(cluster, "paging")?,
        7 => {
            let (program, size) =
                random.pick(&[("ibv_ud_pingpong", 2048), ("ibv_uc_pingpong", 4096)]);
            let command = format!("exec {program} -d $dev -g $gid -p $port -s {size} -n 100 -c");
            let client = format!("{command} $peer");
            client_server((one, &command), (two, &client), 18518, PATIENCE)?;
        }
        _ => rping(one, two)?,
    }
    Ok(())
}

/// A connection of rdma_cm, whose data both ends verify.
fn rping(one: &Vm, two: &Vm) -> Result<()> {
    let time = Duration::from_secs(120);
    let server = one.spawn("exec rping -s -C 50 -S 4096 -V", time)?;
    let server = once_it_listens(one, server)?;
    let client = format!("rping -c -a {} -C 50 -S 4096 -V", one.ip());
    two.sh_in(&tried_until_heard(two, &client), time)?;
    server.success()?;
    Ok(())
}

/// Pairs of so many machines, by their places, but for the first two.
fn other_pairs(machines: usize) -> Vec<(usize, usize)> {
    let all = (0..machines).flat_map(|one| (one + 1..machines).map(move |two| (one, two)));
    all.filter(|pair| *pair != (0, 1)).collect()
}

/// What the pairs are doing that the acts are not about: writes and reads, which are verified every few seconds.
struct Crowd<'v> {
    pairs: Vec<(&'v Vm, &'v Vm, [Running<'v>; 2])>,
}

impl<'v> Crowd<'v> {
    /// Its first port.
    const PORT: usize = 18_700;

    fn begin(vms: &'v [Vm]) -> Result<Self> {
        let time = 8 * PATIENCE;
        for vm in vms {
            vm.sh("rm -f /run/crowd-ends")?;
        }
        let mut pairs = Vec::new();
        for (number, (one, two)) in other_pairs(vms.len()).into_iter().enumerate() {
            let (one, two, port) = (&vms[one], &vms[two], Self::PORT + number);
            let server = one.spawn(
                &format!("{DEVICE_AND_GID} exec verbs-check serve --port {port}"),
                time,
            )?;
            wait_listening(one, port as u16)?;
            let client = two.spawn(
                &format!(
                    "until [ -e /run/crowd-ends ]; do
                         verbs-check run stress --seconds 5 --peer {} --port {port} --ack-timeout {} || exit
                     done",
                    one.ip(),
                    one.ack_timeout()
                ),
                time,
            )?;
            pairs.push((one, two, [server, client]));
        }
        Ok(Self { pairs })
    }

    /// Ends it. Whose connections were spoilt may have failed, and has not seen wrong data; nobody else has noticed
    /// anything.
    fn end(self, spoils: Spoils, met: &Vm) -> Result<()> {
        for (_, two, _) in &self.pairs {
            two.sh("touch /run/crowd-ends")?;
        }
        for (one, two, [server, client]) in self.pairs {
            let names = format!("{} and {}", one.name(), two.name());
            let spoilt = match spoils {
                Spoils::Nothing => false,
                Spoils::Met => [one.index, two.index].contains(&met.index),
                Spoils::All => true,
            };
            if spoilt {
                let outcome = client.end().with_context(|| names.clone())?;
                ensure!(!outcome.out.contains("wrong byte"), "{names}: {outcome:?}");
                server.end().context(names)?;
            } else {
                let outcome = client.wait()?;
                ensure!(outcome.ok(), "{names}: {outcome:?}");
                server.end_with(libc::SIGTERM).context(names)?;
            }
        }
        Ok(())
    }
}

/// A stream between two machines that never ends by itself.
fn stream<'v>(cluster: &Cluster, one: &'v Vm, two: &'v Vm) -> Result<[Running<'v>; 2]> {
    const PROGRAM: &str = "exec ib_write_bw -d $dev -x $gid -p 18520 -s 65536 -D 600 -F";
    let time = 4 * PATIENCE;
    let server = one.spawn(&format!("{DEVICE_AND_GID} {PROGRAM}"), time)?;
    wait_listening(one, 18520)?;
    let client = two.spawn(&format!("{DEVICE_AND_GID} {PROGRAM} {}", one.ip()), time)?;
    super::faults::wait_for_traffic(cluster, two.index, &[&server, &client])?;
    Ok([server, client])
}

/// One thing after the other that happens, while kernel users verify what they read.
fn act(cluster: &Cluster, act: Act, users: &KernelUsers, random: &mut Random) -> Result<()> {
    let (one, two) = cluster.two()?;
    let loads = users.loads(cluster, one)?;
    let crowd = Crowd::begin(&cluster.vms)?;
    // The locks of the kernel's NVMe target are not as lockdep wants them when its device goes.
    let only_one = act.renews() && cluster.flavour() == Flavour::Test;
    let met = if random.below(2) == 0 || only_one {
        one
    } else {
        two
    };
    match act {
        Act::Calm => {
            traffic(cluster, random)?;
            traffic(cluster, random)?;
        }
        Act::BadWire => {
            let mut share = |most| random.below(most) as f64 / 1000.0;
            let faults = json!({
                "cmd": "faults", "only": "roce", "loss": share(20), "duplicate": share(30),
                "reorder": share(30), "corrupt": share(20),
            });
            cluster.fabric_command(&faults)?;
            let size = random.pick(&[1024, 65_536]);
            let over = pingpong_over_loss(one, two, size, 50, 6 * PATIENCE);
            let loads = loads.iter().try_for_each(|load| load.goes_on(cluster));
            cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
            over.and(loads).with_context(|| faults.to_string())?;
        }
        Act::LinkFlap => {
            let programs = stream(cluster, one, two)?;
            for _ in 0..1 + random.below(3) {
                cluster.device_command(met.index, &json!({"cmd": "link", "up": false}))?;
                met.wait_for("rdma link | grep -q 'state DOWN'", PATIENCE)?;
                cluster.device_command(met.index, &json!({"cmd": "link", "up": true}))?;
                wait_active(met)?;
            }
            // They may have given up meanwhile, and not crashed.
            for program in programs {
                program.end()?;
            }
        }
        Act::Fatal | Act::Flr | Act::Sleep | Act::VectorMap => {
            let before = lives(met)?;
            let program = program_in_the_middle(met)?;
            match act {
                Act::Flr => reset(met)?,
                Act::Sleep => lifecycle::sleep(met, random.pick(&lifecycle::SLEEP))?,
                Act::VectorMap => {
                    let mut others = vector_map::SOME.to_vec();
                    let now = vector_map::get(met)?;
                    others.retain(|layout| *layout != now);
                    // It may take longer than who sets it waits.
                    met.run(&vector_map::setting(random.pick(&others)), PATIENCE)?;
                }
                _ => drop(cluster.device_command(met.index, &json!({"cmd": "fatal"}))?),
            }
            ended_well(met, program)?;
            wait_back(met, before)?;
        }
        Act::Misbehave => {
            let seed = random.below(1 << 20);
            let mut disorder = || {
                let mut share = || random.below(200) as f64 / 1000.0;
                json!({"double": share(), "reorder": share(), "delay": share()})
            };
            let rules = json!({
                "cmd": "misbehave", "seed": seed, "hold": 5, "answers": disorder(), "events": disorder(),
            });
            cluster.device_command(met.index, &rules)?;
            let under = traffic(cluster, random);
            let loads = loads.iter().try_for_each(|load| load.goes_on(cluster));
            cluster.device_command(met.index, &json!({"cmd": "misbehave"}))?;
            under.and(loads).with_context(|| rules.to_string())?;
        }
        Act::Kill => {
            let [server, client] = stream(cluster, one, two)?;
            if random.below(2) == 0 {
                client.end_with(libc::SIGKILL)?;
                server.end()?;
            } else {
                server.end_with(libc::SIGKILL)?;
                client.end()?;
            }
        }
        Act::Pressure => {
            met.sh(&format!(
                "rm -f /run/hog; cat >/run/hog.py <<'END'\n{HOG}\nEND"
            ))?;
            let hog = met.spawn(
                &format!("exec python3 /run/hog.py {LEFT_MIB} >/run/hog"),
                8 * PATIENCE,
            )?;
            let under = met
                .wait_for("test -s /run/hog", PATIENCE)
                .and_then(|()| traffic(cluster, random));
            let ended = hog.end_with(libc::SIGKILL);
            under?;
            ended?;
        }
        Act::Hotplug => {
            let cpu = "/sys/devices/system/cpu/cpu1/online";
            met.sh("rm -f /run/enough")?;
            let plugging = met.spawn(
                &format!(
                    "[ -e {cpu} ] || exit 0
                     until [ -e /run/enough ]; do
                         echo 0 >{cpu} || exit; sleep 0.2; echo 1 >{cpu} || exit; sleep 0.2
                     done"
                ),
                8 * PATIENCE,
            )?;
            let under = traffic(cluster, random);
            met.sh("touch /run/enough")?;
            plugging.success()?;
            under?;
        }
    }
    crowd.end(act.spoils(), met).context("the other pairs")?;
    for load in &loads {
        load.goes_on(cluster)?;
    }
    loads.into_iter().try_for_each(Load::finish)?;
    still_works(cluster)
}

/// What is done with each device when nobody uses it.
fn begin_anew(vm: &Vm, random: &mut Random) -> Result<&'static str> {
    match random.below(3) {
        0 => {
            vm.sh_in(&format!("rmmod ferrite; {LOAD_DRIVER}"), PATIENCE)?;
            wait_active(vm)?;
            Ok("a module reload")
        }
        1 => {
            unbind(vm)?;
            bind(vm)?;
            Ok("unbound and bound")
        }
        _ => {
            vm.sh("ip link set eth0 down")?;
            vm.wait_for("rdma link | grep -q 'state DOWN'", PATIENCE)?;
            vm.sh(&format!(
                "ip link set eth0 up; ip addr replace {}/24 dev eth0",
                vm.ip()
            ))?;
            wait_active(vm)?;
            // The core keeps completion queues of kernel users as long as there is the device.
            bind_anew(vm)?;
            Ok("its interface down and up")
        }
    }
}

/// What was seen.
#[derive(Default)]
struct Seen {
    samples: Vec<(f64, Held)>,
    counts: BTreeMap<&'static str, u32>,
    lines: Vec<String>,
}

impl Seen {
    fn note(&mut self, start: Instant, what: &'static str, took: Duration) {
        *self.counts.entry(what).or_default() += 1;
        let line = format!(
            "{:6.1} min  {what} ({:.0} s)",
            start.elapsed().as_secs_f64() / 60.0,
            took.as_secs_f64()
        );
        println!("      {line}");
        self.lines.push(line);
    }
}

fn no_findings(cluster: &mut Cluster) -> Result<()> {
    let findings = cluster.new_findings();
    ensure!(
        findings.is_empty(),
        "the kernel reported:\n{}",
        findings.join("\n")
    );
    cluster.check_processes()
}

fn round(
    cluster: &mut Cluster,
    random: &mut Random,
    seen: &mut Seen,
    start: Instant,
    end: Instant,
) -> Result<()> {
    // Which two they are, and who serves.
    random.shuffle(&mut cluster.vms);
    let mut acts = ACTS.to_vec();
    let (one, two) = cluster.two()?;
    if !lifecycle::can_sleep(one)? || !lifecycle::can_sleep(two)? {
        acts.retain(|act| *act != Act::Sleep);
    }
    random.shuffle(&mut acts);
    let mut renewals = 0;
    let users = {
        let (one, two) = cluster.two()?;
        KernelUsers::begin(one, two).context("the kernel's users begin")?
    };
    for what in acts.into_iter().take(ACTS_OF_A_ROUND) {
        if Instant::now() >= end {
            break;
        }
        if what.renews() {
            renewals += 1;
            if renewals > RENEWALS {
                continue;
            }
        }
        let begun = Instant::now();
        let result = act(cluster, what, &users, random);
        // What the kernel has to say explains most.
        no_findings(cluster).with_context(|| format!("{}: {result:?}", what.name()))?;
        result.context(what.name())?;
        seen.note(start, what.name(), begun.elapsed());
    }
    let (one, two) = cluster.two()?;
    users.end(one, two).context("the kernel's users end")?;
    for vm in &cluster.vms {
        let begun = Instant::now();
        let what = begin_anew(vm, random)?;
        nothing_left(vm).context(what)?;
        seen.note(start, what, begun.elapsed());
    }
    still_works(cluster)?;
    no_findings(cluster)?;
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    seen.samples.push((minutes, held(cluster)?));
    Ok(())
}

/// The process of a device is killed: its machine loses a device and nothing else.
fn kill_device(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let program = program_in_the_middle(one)?;
    cluster.kill_device(one.index)?;
    ended_well(one, program)?;
    one.sh_in("rmmod ferrite", PATIENCE)
        .context("the driver does not unload")?;
    ensure!(one.alive(), "{} ended with its device", one.name());
    two.sh("rdma link | grep -q 'state ACTIVE'")?;
    Ok(())
}

const COLOURS: [&str; 6] = [
    "#1b6ac9", "#c9381b", "#1b8f3a", "#8a1bc9", "#b8860b", "#444",
];

/// The page: what happened, what was held, as plots.
fn write_page(dir: &Path, title: &str, verdict: &str, seen: &Seen) -> Result<()> {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=en><meta charset=utf-8><title>{title}</title>\n\
         <style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto}}\
         svg{{border:1px solid #eee;width:49%}}pre{{background:#f6f6f6;padding:1em}}</style>\n\
         <h1>{title}</h1>\n<pre>{}</pre>\n<h2>What happened, and how often</h2><table>",
        verdict.replace('&', "&amp;").replace('<', "&lt;")
    );
    for (what, count) in &seen.counts {
        let _ = write!(page, "<tr><td>{what}<td>{count}");
    }
    page += "</table>\n<h2>What is held when nothing is under way</h2>\n";
    for (end, _) in BOUNDS {
        let mut series: BTreeMap<&str, Vec<Point>> = BTreeMap::new();
        for (minutes, held) in &seen.samples {
            for (name, value) in held.iter().filter(|(name, _)| name.ends_with(end)) {
                let who = name.split(':').next().unwrap_or(name);
                series.entry(who).or_default().push(Point {
                    x: *minutes,
                    y: *value,
                    min: *value,
                    max: *value,
                });
            }
        }
        let plot = Plot {
            title: (*end).to_owned(),
            x_label: "minutes".to_owned(),
            y_label: (*end).to_owned(),
            x_name: |minutes| format!("{minutes:.0}"),
            series: series
                .into_iter()
                .zip(COLOURS.iter().cycle())
                .map(|((name, points), colour)| Series {
                    name: name.to_owned(),
                    colour,
                    points,
                })
                .collect(),
        };
        page += &plot.svg().unwrap_or_default();
    }
    let _ = write!(
        page,
        "\n<h2>In order</h2><pre>{}</pre>\n",
        seen.lines.join("\n")
    );
    fs::write(dir.join("report.html"), page)?;
    let samples: Vec<Value> = seen
        .samples
        .iter()
        .map(|(minutes, held)| json!({"minutes": minutes, "held": held}))
        .collect();
    let results = json!({
        "title": title, "verdict": verdict, "counts": seen.counts, "samples": samples,
        "events": seen.lines,
    });
    fs::write(
        dir.join("results.json"),
        serde_json::to_string_pretty(&results)?,
    )?;
    Ok(())
}

/// As many machines as are wanted: a group's options are a function.
fn machines(vms: usize) -> Result<fn(ClusterOptions) -> ClusterOptions> {
    Ok(match vms {
        2 => |usual| usual,
        3 => |usual| ClusterOptions { vms: 3, ..usual },
        4 => |usual| ClusterOptions { vms: 4, ..usual },
        5 => |usual| ClusterOptions { vms: 5, ..usual },
        6 => |usual| ClusterOptions { vms: 6, ..usual },
        _ => bail!("two to six machines"),
    })
}

fn soak(options: &Options, seed: u64, seen: &mut Seen) -> Result<()> {
    let group = Group {
        name: "soak",
        flavour: options.flavour,
        load_driver: true,
        options: machines(options.vms)?,
        seconds: 0,
        long: true,
        tests: &[],
    };
    suite::build_for(options.flavour)?;
    let run = RunDir::new()?;
    let wanted = suite::Options::default();
    let mut cluster = suite::boot_group(&group, &wanted, &run, 1)?;
    say(&format!(
        "{} machines are up; logs: {}",
        options.vms,
        outside(cluster.dir()).display()
    ));
    let mut random = Random::new(seed);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(options.minutes * 60.0);
    let mut number = 0;
    while Instant::now() < end {
        check_interrupted()?;
        number += 1;
        round(&mut cluster, &mut random, seen, start, end)
            .with_context(|| format!("in round {number} of seed {seed}"))?;
    }
    let begun = Instant::now();
    kill_device(&cluster).context("a killed device process")?;
    seen.note(start, "a killed device process", begun.elapsed());
    suite::last_look(&cluster, options.flavour)
}

/// `make soak`; false when something was found.
pub fn run_command(options: &Options) -> Result<bool> {
    let seed = match options.seed {
        Some(seed) => seed,
        None => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)?
            .as_secs(),
    };
    ensure!(options.minutes > 0.0, "the time is to be more than nothing");
    say(&format!("SEED={seed}"));
    let mut report = Report::default();
    let mut seen = Seen::default();
    let start = Instant::now();
    let result = soak(options, seed, &mut seen);
    check_interrupted()?;
    let samples: Vec<Held> = seen.samples.iter().map(|(_, held)| held.clone()).collect();
    let drifted = drift(&samples);
    let title = format!(
        "Soak: seed {seed}, {} machines, {} kernel, {:.0} minutes",
        options.vms,
        options.flavour.name(),
        start.elapsed().as_secs_f64() / 60.0
    );
    let verdict = match (&result, drifted.is_empty()) {
        (Err(error), _) => format!("{error:#}"),
        (Ok(()), false) => drifted.join("\n"),
        (Ok(()), true) => "nothing was found".to_owned(),
    };
    let dir = Path::new(OUT).join("soak");
    fs::create_dir_all(&dir)?;
    write_page(&dir, &title, &verdict, &seen)?;
    for (what, count) in &seen.counts {
        println!("      {count:5}  {what}");
    }
    say(&format!(
        "{} rounds; report: {}",
        seen.samples.len(),
        outside(&dir.join("report.html")).display()
    ));
    report.record(
        "soak: everything goes on, and data are right",
        start.elapsed(),
        result,
    );
    report.record(
        "soak: nothing grows from round to round",
        start.elapsed(),
        match drifted.is_empty() {
            true => Ok(()),
            false => Err(anyhow::anyhow!(drifted.join("\n"))),
        },
    );
    report.close();
    Ok(report.good())
}

#[cfg(test)]
mod tests {
    use super::{drift, other_pairs, Act, Held, Random, Spoils, ACTS};

    fn samples(name: &str, values: &[f64]) -> Vec<Held> {
        let held = |value: &f64| Held::from([(name.to_owned(), *value)]);
        values.iter().map(held).collect()
    }

    #[test]
    fn what_grows_from_round_to_round_is_found() {
        let leaks = samples("device 1: descriptors", &[9., 10., 12., 14., 16., 18., 20.]);
        assert_eq!(drift(&leaks).len(), 1);
        // The first round fills caches.
        let warm = samples("device 1: descriptors", &[9., 20., 20., 21., 20., 20., 20.]);
        assert_eq!(drift(&warm), [""; 0]);
        // One round's weather is no trend.
        let once = samples("vm1: slab KiB", &[4e4, 5e4, 5e4, 5e4, 5e4, 5e4, 9e4]);
        assert_eq!(drift(&once), [""; 0]);
        let grows = samples("vm1: slab KiB", &[4e4, 5e4, 5e4, 6e4, 7e4, 8e4, 9e4]);
        assert_eq!(drift(&grows).len(), 1);
        assert_eq!(drift(&grows[..3]), [""; 0]);
    }

    #[test]
    fn each_pair_is_at_work_once() {
        assert_eq!(other_pairs(2), []);
        assert_eq!(other_pairs(3), [(0, 2), (1, 2)]);
        for machines in 2..=6 {
            let mut pairs = other_pairs(machines);
            pairs.push((0, 1));
            pairs.sort_unstable();
            pairs.dedup();
            assert_eq!(pairs.len(), machines * (machines - 1) / 2);
        }
        // A device that begins anew takes nobody's connections but its own.
        assert!(ACTS
            .iter()
            .all(|act| !act.renews() || act.spoils() == Spoils::Met));
    }

    #[test]
    fn every_act_is_chosen_and_a_seed_repeats_itself() {
        let order = |seed| {
            let mut acts = ACTS;
            Random::new(seed).shuffle(&mut acts);
            acts
        };
        assert_eq!(order(7), order(7));
        let first: std::collections::BTreeSet<Act> = (0..200).map(|seed| order(seed)[0]).collect();
        assert_eq!(first.len(), ACTS.len());
    }
}
