// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same again and again, and requests by seed: what one round leaves behind a thousand show. And limits that
//! the kernel sets to a process, which the driver has to keep.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::{lifecycle, nothing_left, still_works, VmTest};
use crate::cluster::Cluster;
use crate::skips::{self, Checks, Skips};
use crate::vm::Vm;

/// On the kernel with the checkers, a moment each.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "processes killed with queue pairs and regions leave nothing behind",
        |cluster| killed(cluster, 4, 50),
    ),
    VmTest::new(
        "a thousand uverbs requests of an ordinary user by a fresh seed",
        |cluster| requests(cluster, 1000),
    ),
];

/// The same at length.
pub const LONG: &[VmTest] = &[
    VmTest::new(
        "uverbs requests of an ordinary user by seed, right, almost right and any",
        |cluster| requests(cluster, if cluster.thorough() { 100_000 } else { 5_000 }),
    ),
    VmTest::new("a million uverbs requests of an ordinary user", |cluster| {
        requests(cluster, 1_000_000)
    }),
    VmTest::new(
        "a thousand processes killed with a thousand queue pairs and regions each",
        |cluster| killed(cluster, 1000, 1000),
    ),
    VmTest::new("a thousand loads and unloads", |cluster| {
        lifecycle::cycles(cluster, 1000)
    }),
];

/// What the kernel allows a process, on Debian's kernel.
pub const LIMITS: &[VmTest] = &[
    VmTest::new(
        "no more memory is pinned than a process may lock",
        pinned_memory,
    ),
    VmTest::new(
        "no group has more contexts and objects than the rdma controller allows",
        controlled,
    ),
    VmTest::new(
        "a process whose group may have no more memory is told so, or ended, and others are served",
        without_memory,
    ),
];

/// Who is not root.
const ORDINARY: &str = "setpriv --reuid 1000 --regid 1000 --clear-groups";

/// The same, but that he may have raw packets.
const RAW: &str = "setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps +net_raw \
                   --ambient-caps +net_raw";

/// Runs a check of verbs-check that takes its time, as `who`.
fn check(vm: &Vm, who: &str, case: &str, time: Duration) -> Result<()> {
    let outcome = vm.run(&format!("exec {who} verbs-check run {case}"), time)?;
    let skips = Skips::read(skips::VERBS_CHECK, " -- ")?;
    let checks = Checks::read(&outcome.out, &skips);
    let said = format!("{}{}", outcome.out, outcome.err);
    ensure!(
        outcome.ok() && checks.wrong.is_empty(),
        "{}: {case}:\n{}\n{said}",
        vm.name(),
        checks.wrong.join("\n")
    );
    for line in outcome.out.lines().filter(|line| !line.starts_with("ok ")) {
        println!("          {line}");
    }
    Ok(())
}

/// Requests in one machine, by fresh seeds or by that which is said, while others use the device.
fn requests(cluster: &Cluster, count: u64) -> Result<()> {
    let (one, _) = cluster.two()?;
    let seed = std::env::var("FERRITE_SEED").map_or(String::new(), |seed| format!("--seed {seed}"));
    // A hundred in a second are done on the slowest machine.
    let time = Duration::from_secs(120 + count / 100);
    for who in [ORDINARY, RAW] {
        let count = count / 2;
        check(one, who, &format!("uverbs --count {count} {seed}"), time)?;
    }
    nothing_left(one)?;
    still_works(cluster)
}

fn killed(cluster: &Cluster, rounds: u64, objects: u64) -> Result<()> {
    let (one, _) = cluster.two()?;
    let time = Duration::from_secs(120 + rounds * objects / 25);
    check(
        one,
        ORDINARY,
        &format!("killed --rounds {rounds} --count {objects}"),
        time,
    )?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Says, in a line each: how many regions of 64 KiB there can be, with which error that ends, how many more after one
/// was given back, and the error of one that is longer than what is allowed.
const PIN: &str = "import mmap, sys
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.mr import MR
from pyverbs.pyverbs_error import PyverbsRDMAError
SIZE = 64 << 10
pd = PD(Context(name=sys.argv[1]))
def take(held):
    try:
        while len(held) < 100:
            held.append(MR(pd, SIZE, 1))
    except PyverbsRDMAError as error:
        return error.error_code
    return 0
held = []
error = take(held)
first = len(held)
held.pop().close()
again = take(held)
second = len(held)
try:
    MR(pd, 4 << 20, 1)
    long = 0
except PyverbsRDMAError as refused:
    long = refused.error_code
print(first, error, second, again, long)
";

/// Puts a program into a machine and runs it on the device; gives the numbers that it says.
fn numbers(vm: &Vm, name: &str, text: &str, who: &str) -> Result<Vec<i64>> {
    vm.sh(&format!("cat >/run/{name} <<'END'\n{text}\nEND"))?;
    let said = vm.sh_in(
        &format!("{who} python3 /run/{name} $(ls /sys/class/infiniband)"),
        Duration::from_secs(120),
    )?;
    said.split_whitespace()
        .map(|word| word.parse().with_context(|| format!("cannot read: {said}")))
        .collect()
}

fn pinned_memory(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let none = i64::from(libc::ENOMEM);
    let said = numbers(
        one,
        "pin.py",
        PIN,
        &format!("prlimit --memlock=1048576 {ORDINARY}"),
    )?;
    ensure!(
        matches!(said[..], [first, error, second, again, long]
            if (8..=16).contains(&first) && second == first && [error, again, long] == [none; 3]),
        "regions of 64 KiB in 1 MiB, error, regions again, error, error of one of 4 MiB: {said:?}"
    );
    // With more, there is more.
    let said = numbers(
        one,
        "pin.py",
        PIN,
        &format!("prlimit --memlock=16777216 {ORDINARY}"),
    )?;
    ensure!(
        matches!(said[..], [100, 0, 100, 0, 0]),
        "in 16 MiB: {said:?}"
    );
    nothing_left(one)
}

/// Takes keys until there is no more memory in its group, gives some of its own back, takes keys again, then regions.
/// Says how many there were and with which error that ended, of each, and keeps all.
///
/// It needs no memory itself by then: not for its heap, its text, nor for what it says; nor to give some back, as it does
/// where the kernel has to split a mapping for that. One that is `told` is none that
/// the kernel may end to have memory.
const LIMITED: &str = "import ctypes, mmap, sys, time
GROUP = '/sys/fs/cgroup/limited/'
if sys.argv[1] == 'told':
    open('/proc/self/oom_score_adj', 'w').write('-1000')
libc = ctypes.CDLL('libc.so.6', use_errno=True)
verbs = ctypes.CDLL('libibverbs.so.1', use_errno=True)
name = '/usr/lib/x86_64-linux-gnu/libibverbs/libferrite-rdmav34.so'
ferrite = ctypes.CDLL(name, use_errno=True)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
allocate = libc.malloc, verbs.ibv_open_device, verbs.ibv_alloc_pd, verbs.ibv_reg_mr, ferrite.ferritedv_alloc_list
for function in allocate:
    function.restype = ctypes.c_void_p
THP_DISABLE, TRIM_THRESHOLD, MMAP_THRESHOLD, CURRENT, DONTNEED_LOCKED = 41, -1, -3, 1, 24
libc.prctl(THP_DISABLE, 1, 0, 0, 0)
libc.mallopt(TRIM_THRESHOLD, 1 << 30)
libc.mallopt(MMAP_THRESHOLD, 32 << 20)
heap = ctypes.c_void_p(libc.malloc(8 << 20))
libc.memset(heap, 1, 8 << 20)
libc.free(heap)
def memory(length):
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
spare = [memory(1 << 20) for _ in range(2)]
length = 2 << 20
area = memory(length)
start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
context = ctypes.c_void_p(verbs.ibv_open_device(ctypes.c_void_p(verbs.ibv_get_device_list(None)[0])))
pd = ctypes.c_void_p(verbs.ibv_alloc_pd(context))
def take(function, *arguments):
    for count in range(100000):
        if not function(*arguments):
            return count, ctypes.get_errno()
    return count, 0
assert libc.mlockall(CURRENT) == 0
current = int(open(GROUP + 'memory.current').read())
open(GROUP + 'memory.max', 'w').write(str(current + (2 << 20)))
first, error = take(ferrite.ferritedv_alloc_list, pd, 1)
spare[0].madvise(DONTNEED_LOCKED)
again, again_error = take(ferrite.ferritedv_alloc_list, pd, 1)
regions, region_error = take(verbs.ibv_reg_mr, pd, start, ctypes.c_size_t(length), 1)
spare[1].madvise(DONTNEED_LOCKED)
print(first, error, again, again_error, regions, region_error, flush=True)
time.sleep(600)
";

fn without_memory(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh(&format!(
        "set -e
         mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
         echo +memory >/sys/fs/cgroup/cgroup.subtree_control
         mkdir -p /sys/fs/cgroup/limited
         rm -f /run/limited; cat >/run/limited.py <<'END'\n{LIMITED}\nEND"
    ))?;
    let begin = |what: &str| {
        format!(
            "cd /sys/fs/cgroup/limited; echo max >memory.max; echo $$ >cgroup.procs
             exec python3 /run/limited.py {what} >/run/limited"
        )
    };
    let time = Duration::from_secs(600);
    let checked = (|| -> Result<()> {
        let told = one.spawn(&begin("told"), time)?;
        let served = (|| -> Result<()> {
            one.wait_for("test -s /run/limited", Duration::from_secs(180))?;
            let said = one.sh("cat /run/limited")?;
            let said: Vec<i64> = said
                .split_whitespace()
                .map(|word| word.parse().with_context(|| format!("cannot read: {said}")))
                .collect::<Result<_>>()?;
            let none = i64::from(libc::ENOMEM);
            ensure!(
                matches!(said[..], [first, error, again, again_error, _, region_error]
                    if first > 100 && again > 100 && [error, again_error, region_error] == [none; 3]),
                "keys, their error, keys again, their error, regions, their error: {said:?}"
            );
            still_works(cluster).context("beside it")
        })();
        let ended = told.end_with(libc::SIGKILL);
        served?;
        ended?;
        nothing_left(one)?;
        // One that may be ended is, in the middle of a call.
        one.sh("dmesg -C")?;
        let killed = one.run(&begin("killed"), time)?;
        ensure!(killed.ended_by(libc::SIGKILL), "{killed:?}");
        one.sh("dmesg | grep 'Memory cgroup out of memory: Killed process'")
            .context("not the kernel ended it")?;
        nothing_left(one)?;
        still_works(cluster)
    })();
    one.sh("rmdir /sys/fs/cgroup/limited")?;
    checked
}

/// How many contexts a group may have, and how many objects.
const CONTEXTS: i64 = 2;
const OBJECTS: i64 = 20;

/// Says how many there are of domains, in one context, and of contexts, and with which errors that ends.
const TAKE: &str = "import sys
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsError
def take(make):
    held = []
    try:
        while len(held) < 100:
            held.append(make())
    except PyverbsRDMAError as error:
        return held, error.error_code
    except PyverbsError:
        return held, -1
    return held, 0
context = Context(name=sys.argv[1])
domains, domain = take(lambda: PD(context))
contexts, _ = take(lambda: Context(name=sys.argv[1]))
print(len(domains), domain, len(contexts) + 1)
";

fn controlled(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    one.sh(&format!(
        "set -e
         mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
         echo +rdma >/sys/fs/cgroup/cgroup.subtree_control
         mkdir -p /sys/fs/cgroup/controlled
         cd /sys/fs/cgroup/controlled
         echo $(ls /sys/class/infiniband) hca_handle={CONTEXTS} hca_object={OBJECTS} >rdma.max"
    ))?;
    let inside = "bash -c 'echo $$ >/sys/fs/cgroup/controlled/cgroup.procs; exec \"$@\"' inside";
    let checked = (|| -> Result<()> {
        let said = numbers(one, "take.py", TAKE, &format!("{inside} {ORDINARY}"))?;
        ensure!(
            matches!(said[..], [OBJECTS, error, CONTEXTS] if error == i64::from(libc::EAGAIN)),
            "domains, their error, contexts: {said:?}"
        );
        // It is given back, and others are not held to it.
        let left = one.sh("cat /sys/fs/cgroup/controlled/rdma.current")?;
        ensure!(!left.contains("=1") && !left.contains("=2"), "{left}");
        let said = numbers(one, "take.py", TAKE, ORDINARY)?;
        ensure!(said == [100, 0, 101], "outside of the group: {said:?}");
        Ok(())
    })();
    one.sh("rmdir /sys/fs/cgroup/controlled")?;
    checked?;
    nothing_left(one)
}
