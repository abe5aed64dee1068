// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one user may take of a device and of the kernel's memory, and who pays for it.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::registration::run_sample;
use super::{nothing_left, still_works, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::vm::{Running, Vm};

/// On the unmodified Debian kernel, which has control groups.
pub const TESTS: &[VmTest] = &[
    VmTest::new("no user takes all contexts of a device", contexts_for_all),
    VmTest::new(
        "no container takes all contexts of a device, nor those of another",
        contexts_for_containers,
    ),
    VmTest::new(
        "device memory is cleared, and is so before anybody has it",
        device_memory_is_cleared,
    ),
    VmTest::new(
        "on-demand tables for memory that is not there are given back",
        tables_for_nothing,
    ),
    VmTest::new(
        "what is kept for on-demand memory is given back when its pages are taken back",
        parts_for_nothing,
    ),
    VmTest::new(
        "on-demand regions that wander through memory keep no tables of where they were",
        tables_of_a_wanderer,
    ),
    VmTest::new(
        "on-demand pages are taken back that are asked for while they are unmapped",
        asked_for_while_unmapped,
    ),
    VmTest::new(
        "an on-demand region ends though advice about hours of its pages is not followed yet",
        ends_before_advice,
    ),
    VmTest::new(
        "no user takes all memory of the kernel by on-demand regions",
        paging_memory_is_bounded,
    ),
    VmTest::new(
        "on-demand tables are charged to the process that needs them",
        tables_are_charged,
    ),
];

/// The same, of some minutes.
pub const LONG: &[VmTest] = &[VmTest::new(
    "users whose threads are not running do not hold up the commands of others",
    commands_of_others,
)];

/// The same, on machines whose devices have fewer tags than usual, so that it does not take long to have them.
pub const NUMBERS: &[VmTest] = &[VmTest::new(
    "no user takes all domains, keys or memory of a device, nor all users what the kernel needs",
    numbers_for_all,
)];

const TIME: Duration = Duration::from_secs(180);

/// Puts a program into a machine.
fn write_program(vm: &Vm, name: &str, text: &str) -> Result<()> {
    vm.sh(&format!("cat >/run/{name} <<'END'\n{text}\nEND"))?;
    Ok(())
}

/// Runs a program on the device of a machine. Gives the numbers that it says, which are all it says.
fn numbers_of<const COUNT: usize>(vm: &Vm, name: &str, text: &str) -> Result<[i64; COUNT]> {
    write_program(vm, name, text)?;
    let said = vm.sh_in(
        &format!("python3 /run/{name} $(ls /sys/class/infiniband)"),
        TIME,
    )?;
    let numbers: Option<Vec<i64>> = said
        .split_whitespace()
        .map(|word| word.parse().ok())
        .collect();
    numbers
        .and_then(|numbers| numbers.try_into().ok())
        .with_context(|| format!("cannot read: {said}"))
}

/// Has a program take all contexts of a device that it gets, and keep them; `who` begins its
/// command. Gives it, and how many it has.
pub(super) fn hold_contexts<'vm>(vm: &'vm Vm, who: &str) -> Result<(Running<'vm>, u32)> {
    write_program(
        vm,
        "contexts.py",
        "import sys, time
from pyverbs.device import Context
held = []
try:
    while len(held) < 2000:
        held.append(Context(name=sys.argv[1]))
except Exception as error:
    print(len(held), error, flush=True)
time.sleep(600)",
    )?;
    vm.sh("rm -f /run/held")?;
    let greedy = vm.spawn(
        &format!(
            "ulimit -n 8192; echo $$ >/run/greedy
             exec {who} python3 /run/contexts.py $(ls /sys/class/infiniband) >/run/held"
        ),
        Duration::from_secs(300),
    )?;
    vm.wait_for("test -s /run/held", TIME)?;
    let held = vm.sh("cat /run/held")?;
    let count = held
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("cannot read: {held}"))?;
    Ok((greedy, count))
}

/// Fails unless a process that is made by `who` can run, and is refused a context by the device.
pub(super) fn no_more(vm: &Vm, who: &str) -> Result<()> {
    vm.sh(&format!("{who} true"))?;
    let refused = vm.run(&format!("{who} ibv_devinfo"), Duration::from_secs(30))?;
    ensure!(!refused.ok(), "by `{who}` there is more");
    ensure!(
        refused.err.contains("Failed to open device"),
        "not the driver refused it: {refused:?}"
    );
    Ok(())
}

/// Fails if the processes of `who` that are refused a context stay in the kernel's memory.
fn refused_are_forgotten(vm: &Vm, who: &str) -> Result<()> {
    const COUNT: i64 = 64;
    let text = format!(
        "import os, sys
from pyverbs.device import Context
for number in range({COUNT}):
    if os.fork() == 0:
        try:
            Context(name=sys.argv[1])
        except Exception:
            os._exit(0)
        os._exit(1)
    if os.wait()[1] != 0:
        sys.exit('it was not refused')"
    );
    write_program(vm, "refused.py", &text)?;
    let tasks = || -> Result<i64> {
        let count = vm.sh("awk '$1 == \"task_struct\" { print $2 }' /proc/slabinfo")?;
        count.trim().parse().context("no count of tasks")
    };
    let before = tasks()?;
    let run = "python3 /run/refused.py $(ls /sys/class/infiniband)";
    vm.sh_in(&format!("{who} {run}"), TIME)?;
    // They are freed after a grace period, and others come and go meanwhile.
    let mut kept = COUNT;
    wait_until(Instant::now() + vm.at_most(TIME), || {
        kept = tasks()? - before;
        Ok(kept < COUNT / 2)
    })?;
    ensure!(kept < COUNT / 2, "{kept} of {COUNT} processes are kept");
    Ok(())
}

fn contexts_for_all(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let as_user = |user: u32| format!("setpriv --reuid {user} --regid {user} --clear-groups");
    let (greedy, count) = hold_contexts(one, &as_user(1000))?;
    let checked = (|| -> Result<()> {
        if !(500..1000).contains(&count) {
            bail!("one user has {count} contexts");
        }
        one.sh(&format!("{} ibv_devinfo", as_user(1001)))
            .context("another user gets no context")?;
        one.sh("ibv_devinfo").context("root gets no context")?;
        // A namespace of his own gives a user no second share.
        no_more(one, &as_user(1000))?;
        refused_are_forgotten(one, &as_user(1000))?;
        no_more(one, &format!("{} unshare -Ur", as_user(1000)))
    })();
    let held = greedy.end_with(libc::SIGKILL);
    checked?;
    held?;
    nothing_left(one)
}

/// A user with more processes than there are places for commands, which hardly ever run: they share a
/// processor with others that never wait. They count what they have done; `ready` is made when all have.
const CROWD: &str = "import mmap, os, struct, sys, time
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.cq import CQ
from pyverbs.qp import QP, QPCap, QPInitAttr
import pyverbs.enums as e
COUNT = 90
counts = mmap.mmap(-1, 8 * COUNT)
cpu = max(os.sched_getaffinity(0))
parent = os.getpid()
os.sched_setaffinity(0, [cpu])
def member(at):
    context = Context(name=sys.argv[1])
    pd, cq = PD(context), CQ(context, 4)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(1, 1, 1, 1))
    qp = QP(pd, init)
    done = 1
    struct.pack_into('Q', counts, 8 * at, done)
    while not os.path.exists('/run/crowd/go'):
        time.sleep(0.1)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        qp.query(e.IBV_QP_STATE)
        done += 1
        struct.pack_into('Q', counts, 8 * at, done)
def spin():
    while os.getppid() == parent:
        pass
def start(body, *arguments):
    if os.fork() == 0:
        try:
            body(*arguments)
        finally:
            os._exit(0)
def total():
    return sum(struct.unpack('%dQ' % COUNT, counts))
for at in range(COUNT):
    start(member, at)
while any(count == 0 for count in struct.unpack('%dQ' % COUNT, counts)):
    time.sleep(0.1)
for _ in range(6):
    start(spin)
open('/run/crowd/go', 'w').close()
os.sched_setaffinity(0, [0])
while True:
    with open('/run/crowd/new', 'w') as new:
        new.write(str(total()))
    os.rename('/run/crowd/new', '/run/crowd/done')
    time.sleep(0.1)
";

/// Somebody else, who asks for one thing after the other for a while; says how often that was answered,
/// and how often those of the crowd were meanwhile.
const VICTIM: &str = "import os, sys, time
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.cq import CQ
from pyverbs.qp import QP, QPCap, QPInitAttr
import pyverbs.enums as e
os.sched_setaffinity(0, [0])
context = Context(name=sys.argv[1])
pd, cq = PD(context), CQ(context, 4)
init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(1, 1, 1, 1))
qp = QP(pd, init)
crowd = lambda: int(open('/run/crowd/done').read())
# Until the crowd has done a little of what it does.
begin, start = crowd(), time.monotonic()
while crowd() < begin + 1000 and time.monotonic() < start + 20:
    time.sleep(0.1)
begin, done, start = crowd(), 0, time.monotonic()
while time.monotonic() < start + 20:
    qp.query(e.IBV_QP_STATE)
    done += 1
print(done, crowd() - begin)
";

fn commands_of_others(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let as_user = |user: u32| format!("setpriv --reuid {user} --regid {user} --clear-groups");
    one.sh("rm -rf /run/crowd; mkdir -m 777 /run/crowd")?;
    write_program(one, "crowd.py", CROWD)?;
    let crowd = one.spawn(
        &format!(
            "exec {} python3 /run/crowd.py $(ls /sys/class/infiniband)",
            as_user(1000)
        ),
        TIME,
    )?;
    let checked = (|| -> Result<()> {
        one.wait_for("test -e /run/crowd/done", TIME)?;
        write_program(one, "victim.py", VICTIM)?;
        let said = one.sh_in(
            &format!(
                "{} python3 /run/victim.py $(ls /sys/class/infiniband)",
                as_user(1001)
            ),
            TIME,
        )?;
        let counts: Vec<u64> = said
            .split_whitespace()
            .map(|word| word.parse().context("no number"))
            .collect::<Result<_>>()?;
        let [own, others] = counts[..] else {
            bail!("cannot read: {said}");
        };
        // Each of them is still there, those that keep the processor busy, and who started them.
        let left = one.sh("pgrep -c -u 1000")?;
        ensure!(
            left.trim() == "97" && others > 0,
            "{} of the crowd are left, and had {others} commands done",
            left.trim()
        );
        // Theirs hardly run; in one line with all of them it would have a ninetieth.
        ensure!(
            own > others,
            "one who runs had {own} commands done, 90 who hardly do {others}"
        );
        Ok(())
    })();
    // They end with it, those that wait for a command too.
    let ended = crowd.end_with(libc::SIGKILL);
    checked?;
    ended?;
    one.wait_for("! pgrep -u 1000", TIME)?;
    nothing_left(one)
}

fn contexts_for_containers(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // As root, who makes them for others.
    let (greedy, count) = hold_contexts(one, "unshare -Ur")?;
    let checked = (|| -> Result<()> {
        if !(500..1000).contains(&count) {
            bail!("one container has {count} contexts");
        }
        one.sh("unshare -Ur ibv_devinfo")
            .context("another container gets no context")?;
        let inside = "nsenter --preserve-credentials -U -t $(cat /run/greedy)";
        no_more(one, inside)?;
        no_more(one, &format!("{inside} unshare -U"))
    })();
    let held = greedy.end_with(libc::SIGKILL);
    checked?;
    held?;
    nothing_left(one)
}

/// Takes domains and list keys until there are so many, or it is refused more. Says how many there are and
/// with which error that ended, of each; the bytes of kernel memory that each key was charged with, in the group of
/// control that it runs in; and keeps all.
const TAKE_NUMBERS: &str = "import ctypes, sys, time
most = int(sys.argv[1])
verbs = ctypes.CDLL('libibverbs.so.1', use_errno=True)
name = '/usr/lib/x86_64-linux-gnu/libibverbs/libferrite-rdmav34.so'
ferrite = ctypes.CDLL(name, use_errno=True)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
for function in verbs.ibv_open_device, verbs.ibv_alloc_pd, ferrite.ferritedv_alloc_list:
    function.restype = ctypes.c_void_p
def charged():
    for line in open('/sys/fs/cgroup/numbers/memory.stat'):
        name, value = line.split()
        if name == 'slab':
            return int(value)
def take(function, *arguments):
    for count in range(most):
        if not function(*arguments):
            return count, ctypes.get_errno()
    return most, 0
context = ctypes.c_void_p(verbs.ibv_open_device(ctypes.c_void_p(verbs.ibv_get_device_list(None)[0])))
pd = ctypes.c_void_p(verbs.ibv_alloc_pd(context))
before = charged()
keys, keys_errno = take(ferrite.ferritedv_alloc_list, pd, 1)
each = (charged() - before) // max(keys, 1)
domains, domains_errno = take(verbs.ibv_alloc_pd, context)
print(domains + 1, domains_errno, keys, keys_errno, each, flush=True)
time.sleep(600)";

/// The same with pages of device memory.
const TAKE_MEMORY: &str = "import sys, time
from pyverbs.device import AllocDmAttr, Context, DM
from pyverbs.pyverbs_error import PyverbsRDMAError
context = Context(name=sys.argv[2])
held, error = [], 0
try:
    while len(held) < int(sys.argv[1]):
        held.append(DM(context, AllocDmAttr(length=4096)))
except PyverbsRDMAError as refused:
    error = refused.error_code
print(len(held), error, flush=True)
time.sleep(600)";

/// What programs say to have taken, and keep.
struct Taken<'vm> {
    programs: Vec<Running<'vm>>,
}

impl<'vm> Taken<'vm> {
    /// Has a user run one of the programs above, for so much at the most. Gives the numbers that it says.
    fn take<const COUNT: usize>(
        &mut self,
        vm: &'vm Vm,
        program: &str,
        user: u32,
        most: u32,
    ) -> Result<[u32; COUNT]> {
        let said = format!("/run/taken-{user}-{program}");
        vm.sh(&format!("rm -f {said}"))?;
        self.programs.push(vm.spawn(
            &format!(
                "echo $$ >/sys/fs/cgroup/numbers/cgroup.procs
                 exec setpriv --reuid {user} --regid {user} --clear-groups \
                     python3 /run/{program}.py {most} $(ls /sys/class/infiniband) >{said}"
            ),
            Duration::from_secs(600),
        )?);
        vm.wait_for(&format!("test -s {said}"), TIME)?;
        let said = vm.sh(&format!("cat {said}"))?;
        let numbers: Option<Vec<u32>> = said
            .split_whitespace()
            .map(|word| word.parse().ok())
            .collect();
        numbers
            .and_then(|numbers| numbers.try_into().ok())
            .with_context(|| format!("cannot read: {said}"))
    }

    fn end(self) -> Result<()> {
        for program in self.programs {
            program.end_with(libc::SIGKILL)?;
        }
        Ok(())
    }
}

/// How many of a table's entries are in use, and how many there are.
fn table(vm: &Vm, name: &str) -> Result<(u32, u32)> {
    let line = vm.sh(&format!(
        "grep '^{name} ' /sys/kernel/debug/ferrite0/tables"
    ))?;
    let mut numbers = line.split_whitespace().skip(1).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(used)), Some(Ok(entries))) => Ok((used, entries)),
        _ => bail!("cannot read: {line}"),
    }
}

/// What is left of so many when one more has taken all he gets.
fn left_by_one(count: u32) -> u32 {
    count / 4
}

fn numbers_for_all(cluster: &Cluster) -> Result<()> {
    const ALL: u32 = 1 << 20;
    const EDQUOT: u32 = libc::EDQUOT as u32;
    let (one, _) = cluster.two()?;
    write_program(one, "numbers.py", TAKE_NUMBERS)?;
    write_program(one, "memory.py", TAKE_MEMORY)?;
    one.sh(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
         echo +memory >/sys/fs/cgroup/cgroup.subtree_control
         mkdir -p /sys/fs/cgroup/numbers",
    )?;
    let mut taken = Taken {
        programs: Vec::new(),
    };
    let checked = (|| -> Result<()> {
        let tables = ["protection_domains", "tpt"];
        // A sixteenth is for the kernel.
        let entries = |name| -> Result<u32> { Ok(table(one, name)?.1) };
        let for_users = |name| -> Result<u32> { Ok(entries(name)? - entries(name)? / 16) };
        let [domains, keys] = [for_users(tables[0])?, for_users(tables[1])?];
        let [had_domains, domains_error, had_keys, keys_error, charged] =
            taken.take(one, "numbers", 1000, ALL)?;
        ensure!(
            (had_domains, had_keys) == (domains - left_by_one(domains), keys - left_by_one(keys)),
            "one user has {had_domains} of {domains} domains and {had_keys} of {keys} keys"
        );
        ensure!(
            (domains_error, keys_error) == (EDQUOT, EDQUOT),
            "refused with {domains_error} and {keys_error}"
        );
        ensure!(charged >= 256, "{charged} bytes are charged for each key");
        let (_, pages) = table(one, "device_memory_pages")?;
        let said: [u32; 2] = taken.take(one, "memory", 1000, ALL)?;
        ensure!(
            said == [pages - left_by_one(pages), EDQUOT],
            "of {pages} pages one user has {said:?}"
        );
        // Another one has what programs need.
        let said: [u32; 5] = taken.take(one, "numbers", 1001, 100)?;
        ensure!(
            said[..4] == [101, 0, 100, 0],
            "another user has {said:?} of domains and keys"
        );
        let said: [u32; 2] = taken.take(one, "memory", 1001, 4)?;
        ensure!(said == [4, 0], "another user has {said:?} of the pages");
        // And if there are some like the first, the kernel has its part, and who may exceed limits.
        for user in 1002..1005 {
            let _: [u32; 5] = taken.take(one, "numbers", user, ALL)?;
        }
        for name in tables {
            let (used, entries) = table(one, name)?;
            let (left, kept) = (entries - used, entries / 16);
            ensure!(
                (kept - 16..kept + entries / 200).contains(&left),
                "{name}: {left} of {entries} are left"
            );
        }
        still_works(cluster)?;
        let said = run_sample(one)?;
        ensure!(!said.contains("not ok"), "{said}");
        Ok(())
    })();
    let ended = taken.end();
    checked?;
    ended?;
    nothing_left(one)
}

/// Writes to it are posted, and what names the memory to the device takes another way, by which it could come first. So
/// the last access is a read, of the kernel where it clears, and of the provider where it copies.
fn device_memory_is_cleared(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = "import sys
from pyverbs.device import AllocDmAttr, Context, DM
context = Context(name=sys.argv[1])
wrong = 0
for filling in sys.argv[2]:
    # More than half of it: what two have in turn is the same memory.
    with DM(context, AllocDmAttr(length=600 << 10)) as memory:
        wrong += sum(map(bool, memory.copy_from_dm(0, 4096)))
        memory.copy_to_dm(0, bytes(filling * 4096, 'ascii'), 4096)
        wrong += sum(byte != ord(filling) for byte in memory.copy_from_dm(0, 4096))
print(wrong)";
    write_program(one, "device-memory.py", text)?;
    let reads = |copied: &str| -> Result<i64> {
        let count = || -> Result<i64> {
            let counters = cluster.counters(one.index)?;
            let reads = counters["mmio"]["device_memory"]["reads"].as_i64();
            reads.context("no counter of reads of device memory")
        };
        let before = count()?;
        let command = format!("python3 /run/device-memory.py $(ls /sys/class/infiniband) {copied}");
        let wrong = one.sh_in(&command, TIME)?;
        ensure!(
            wrong.trim() == "0",
            "{wrong} bytes are not what they should be"
        );
        Ok(count()? - before)
    };
    // Of each two reads of a page, one word at a time, and one behind each of two rounds of writes.
    let (one_copy, three_copies) = (reads("x")?, reads("xyz")?);
    ensure!(
        one_copy == 2 * 512 + 2 && three_copies == 3 * one_copy,
        "{one_copy} and {three_copies} reads of device memory"
    );
    nothing_left(one)
}

/// The beginning of programs that have an on-demand region of all their memory.
const IMPLICIT: &str = "import mmap, sys, time
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.wr import SGE
# The names of these differ between versions.
LOCAL_WRITE, ON_DEMAND, PREFETCH, FLUSH = 1, 1 << 6, 0, 1
context = Context(name=sys.argv[1])
pd = PD(context)
mr = MR(pd, 0, LOCAL_WRITE | ON_DEMAND, implicit=True)
def advise(address, flags):
    pd.advise_mr(PREFETCH, flags, [SGE(address, 4096, mr.lkey)])
# Kilobytes of memory that the machine has left.
def available():
    for line in open('/proc/meminfo'):
        if line.startswith('MemAvailable'):
            return int(line.split()[1])
# And those that are gone since it had so many, once there are no more than should be. What is given back
# after a grace period comes late where the machine is busy.
def gone_since(before, most):
    gone = before - available()
    for _ in range(600):
        if gone <= most:
            break
        time.sleep(0.1)
        gone = min(gone, before - available())
    return gone";

/// Kilobytes of memory of a machine.
fn memory(vm: &Vm) -> Result<i64> {
    let total = vm.sh("awk '/^MemTotal/ {print $2}' /proc/meminfo")?;
    Ok(total.trim().parse()?)
}

/// Kilobytes that may be gone though nobody has them: sanitisers keep what was freed for a while, and
/// notes of it for ever.
fn kept_when_freed(vm: &Vm) -> Result<i64> {
    Ok(if vm.patience() > 1 {
        memory(vm)? / 16
    } else {
        0
    })
}

fn tables_for_nothing(cluster: &Cluster) -> Result<()> {
    const PLACES: i64 = 4000;
    let (one, _) = cluster.two()?;
    // Kept, they would take eight kilobytes each.
    let most = 4 * PLACES + kept_when_freed(one)?;
    let text = format!(
        "{IMPLICIT}
before = available()
refused = 0
# One address in each gigabyte, where nothing is mapped: two tables each.
for gigabyte in range(16, 16 + {PLACES}):
    try:
        advise(gigabyte << 30, FLUSH)
    except Exception:
        refused += 1
print(refused, gone_since(before, {most}))"
    );
    let [refused, kilobytes] = numbers_of(one, "nothing.py", &text)?;
    if refused != PLACES {
        bail!("{refused} of {PLACES} were refused");
    }
    if kilobytes > most {
        bail!("{kilobytes} KB of memory are gone");
    }
    nothing_left(one)
}

fn parts_for_nothing(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // The process's own page tables take 6 MB. What the kernel keeps for each 32 MB would take 190.
    let most = 48_000 + kept_when_freed(one)?;
    let text = format!(
        "{IMPLICIT}
import ctypes
step, parts = 32 << 20, 1500
area = mmap.mmap(-1, step * parts, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)
area.madvise(mmap.MADV_NOHUGEPAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
before = available()
for offset in range(0, step * parts, step):
    area[offset] = 1
    advise(start + offset, FLUSH)
    area.madvise(mmap.MADV_DONTNEED, offset, 4096)
print(gone_since(before, {most}))"
    );
    let [kilobytes] = numbers_of(one, "parts.py", &text)?;
    if kilobytes > most {
        bail!("{kilobytes} KB of memory are gone");
    }
    nothing_left(one)
}

/// What programs need that map memory where they want to.
const MAPPING: &str = "import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
READ_WRITE, ANONYMOUS, AT_THIS_ADDRESS = 3, 0x4022, 0x100000
def map_at(address, size):
    return libc.mmap(address, size, READ_WRITE, ANONYMOUS | AT_THIS_ADDRESS, -1, 0) == address";

/// Advice without `FLUSH` is followed by the kernel later, which holds the region meanwhile.
fn ends_before_advice(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = format!(
        "{IMPLICIT}
{MAPPING}
START, LENGTH = 2 << 40, 256 << 20
if not map_at(START, LENGTH):
    sys.exit('it cannot be mapped')
# As many pieces as a request has room for.
pieces = [SGE(START, LENGTH, mr.lkey)] * 4000
for _ in range(32):
    pd.advise_mr(PREFETCH, 0, pieces)
mr.close()
print(len(pieces))"
    );
    let [pieces] = numbers_of(one, "advice.py", &text)?;
    ensure!(pieces == 4000, "{pieces} pieces");
    nothing_left(one)
}

/// The kernel forgets pages of a process before it says so to the driver.
fn asked_for_while_unmapped(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = format!(
        "{IMPLICIT}
{MAPPING}
import threading
NO_FAULT, START, STEP, PARTS = 2, 2 << 40, 32 << 20, 8
last = START + (PARTS - 1) * STEP
end = time.time() + 3
rounds = asked = 0
while time.time() < end:
    if not map_at(START, PARTS * STEP):
        sys.exit('it cannot be mapped')
    for part in range(PARTS):
        ctypes.memset(START + part * STEP, 1, 1)
        advise(START + part * STEP, FLUSH)
    gone = threading.Thread(target=libc.munmap, args=(START, PARTS * STEP))
    gone.start()
    while gone.is_alive():
        try:
            pd.advise_mr(NO_FAULT, FLUSH, [SGE(last, 4096, mr.lkey)])
        except Exception:
            pass
        asked += 1
    gone.join()
    rounds += 1
print(rounds, asked)"
    );
    write_program(one, "unmapped.py", &text)?;
    one.sh_in("python3 /run/unmapped.py $(ls /sys/class/infiniband)", TIME)?;
    nothing_left(one)
}

fn tables_of_a_wanderer(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // One table for each would take 16 MB; parts that are kept without use take 6.
    let most = 11_000 + kept_when_freed(one)?;
    let text = format!(
        "{IMPLICIT}
{MAPPING}
# A page in each gigabyte, one after the other: each has two tables of its own.
def visit(gigabyte):
    address = gigabyte << 30
    if not map_at(address, 4096):
        return 0
    advise(address, FLUSH)
    libc.munmap(address, 4096)
    return 1
# What the process itself takes for it is there before.
for gigabyte in range(1024, 1034):
    visit(gigabyte)
before = available()
visited = sum(visit(gigabyte) for gigabyte in range(2048, 6048))
print(visited, gone_since(before, {most}))"
    );
    let [visited, kilobytes] = numbers_of(one, "wanderer.py", &text)?;
    if visited < 3_900 {
        bail!("only {visited} of 4000 pages were visited");
    }
    println!("          {kilobytes} KB");
    if kilobytes > most {
        bail!("{kilobytes} KB of memory are gone");
    }
    nothing_left(one)
}

fn paging_memory_is_bounded(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // A page in each 32 megabytes that is only read takes nothing of the process's own, but for
    // its page table.
    let text = format!(
        "{IMPLICIT}
import ctypes
step, most = 32 << 20, 12000
def map_area():
    area = mmap.mmap(-1, step * most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))
area, start = map_area()
before = available()
# Where nothing is mapped, and for whole terabytes.
idle = [MR(pd, 1 << 39, LOCAL_WRITE | ON_DEMAND, address=(number + 1) << 40) for number in range(8)]
for_idle = before - available()
def fill(first, wanted=0):
    tries = 600
    for part in range(most):
        while True:
            try:
                advise(start + part * step + first, FLUSH)
                break
            except Exception:
                # What is given back after a grace period comes late where the machine is busy.
                if part >= wanted or tries == 0:
                    return part
                tries -= 1
                time.sleep(0.1)
    return most
parts = fill(0)
enough = parts * 9 // 10
for_parts = before - available()
# What is taken back makes room: in the same region, in another beside it, and in one after it.
area.madvise(mmap.MADV_DONTNEED)
again = fill(4096, enough)
area.madvise(mmap.MADV_DONTNEED)
first, mr = mr, MR(pd, 0, LOCAL_WRITE | ON_DEMAND, implicit=True)
beside = fill(12288, enough)
mr.close()
first.close()
mr = MR(pd, 0, LOCAL_WRITE | ON_DEMAND, implicit=True)
anew = fill(8192, enough)
print(for_idle, parts, for_parts, again, beside, anew, flush=True)
if len(sys.argv) > 2:
    time.sleep(600)"
    );
    write_program(one, "paging.py", &text)?;
    let total = memory(one)?;
    let as_user = |user: u32| format!("setpriv --reuid {user} --regid {user} --clear-groups");
    let run = "python3 /run/paging.py $(ls /sys/class/infiniband)";
    one.sh("rm -f /run/paged")?;
    let greedy = one.spawn(
        &format!("exec {} {run} hold >/run/paged", as_user(1000)),
        Duration::from_secs(300),
    )?;
    let checked = (|| -> Result<()> {
        one.wait_for("test -s /run/paged", TIME)?;
        let said = one.sh("cat /run/paged")?;
        let numbers: Vec<i64> = said
            .split_whitespace()
            .map(|word| word.parse().context("a number"))
            .collect::<Result<_>>()?;
        let [for_idle, parts, for_parts, again, beside, anew] = numbers[..] else {
            bail!("cannot read: {said}");
        };
        // Noting each of their pages would take eight gigabytes.
        if for_idle > 16_000 + kept_when_freed(one)? {
            bail!("{for_idle} KB of memory are gone for regions that are not used");
        }
        if !(100..12_000).contains(&parts) {
            bail!("{parts} parts of a region were had");
        }
        // An eighth is for all users; the rest is the process's own page tables.
        if for_parts > total / 8 + kept_when_freed(one)? {
            bail!("{for_parts} of {total} KB of memory are gone for {parts} parts");
        }
        for later in [again, beside, anew] {
            if later < parts * 9 / 10 {
                bail!("of {parts} parts {later} were had again");
            }
        }
        // Another user has a share too.
        let said = one.sh_in(&format!("{} {run}", as_user(1001)), TIME)?;
        let parts = said.split_whitespace().nth(1).unwrap_or_default();
        if parts.parse::<i64>().with_context(|| said.clone())? < 20 {
            bail!("another user had: {said}");
        }
        Ok(())
    })();
    let held = greedy.end_with(libc::SIGKILL);
    checked?;
    held?;
    nothing_left(one)
}

fn tables_are_charged(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = format!(
        "{IMPLICIT}
import ctypes
size = 8 << 30
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
def stat(what):
    for line in open('/sys/fs/cgroup/tables/memory.stat'):
        name, value = line.split()
        if name == what:
            return int(value)
def ours():
    return stat('kernel') - stat('pagetables') - stat('slab')
before = ours()
# A page in each two megabytes has a table of its own. Brought in by a worker.
for offset in range(0, size, 2 << 20):
    advise(start + offset, 0)
end = time.time() + 300
while ours() - before < 12 << 20 and time.time() < end:
    time.sleep(0.1)
print((ours() - before) >> 10)"
    );
    write_program(one, "charged.py", &text)?;
    one.sh(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
         echo +memory >/sys/fs/cgroup/cgroup.subtree_control
         mkdir -p /sys/fs/cgroup/tables",
    )?;
    let said = one.sh_in(
        "echo $$ >/sys/fs/cgroup/tables/cgroup.procs
         python3 /run/charged.py $(ls /sys/class/infiniband)",
        TIME,
    )?;
    let kilobytes: i64 = said.trim().parse().with_context(|| said.clone())?;
    // 4096 tables of four kilobytes.
    if kilobytes < 12_000 {
        bail!("only {kilobytes} KB were charged");
    }
    nothing_left(one)
}
