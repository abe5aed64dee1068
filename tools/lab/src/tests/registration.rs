// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that is registered by work requests, and how the device is told where it is.

use std::time::Duration;

use anyhow::{ensure, Context, Error, Result};
use serde_json::{json, Value};

use super::basics::alone;
use super::driver::{bind_anew, leave_failed, unbind};
use super::recovery::{fatal, lives, load_with, wait_back};
use super::{driver, nothing_left, still_works, wait_active, VmTest};
use crate::cluster::{Cluster, Options};
use crate::shell::LOAD_DRIVER;
use crate::vm::{Vm, EMULATED_CPU};

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a kernel user registers on its send queue, uses that at once, and mends what failed",
        kernel_user,
    ),
    VmTest::new(
        "pages of 4 KiB and of 2 MiB are told to the device as such, by their number",
        page_sizes,
    ),
    VmTest::new(
        "private requests that are too short, too long or unknown have their errno and leave nothing",
        |cluster| by_itself(cluster, "private"),
    ),
    VmTest::new(
        "raw packets, work queues and rules of flows are for who may have those of the interface",
        |cluster| by_itself(cluster, "raw"),
    ),
    VmTest::new(
        "work requests that a process writes by hand register no pages and end nothing of others",
        |cluster| by_itself(cluster, "by-hand"),
    ),
    VmTest::new(
        "lists on UC and XRC, and of memory of the device",
        |cluster| by_itself(cluster, "pieces"),
    ),
    VmTest::new(
        "after deregistration no access comes, whatever is under way",
        |cluster| by_itself(cluster, "dereg"),
    ),
];

/// The same, with a device that takes its time for commands on tags.
pub const SLOW: &[VmTest] = &[
    VmTest::new(
        "a program is given keys before the device has them, and gives them back before it has answered",
        keys_at_once,
    ),
    VmTest::new(
        "what uses a key that the device does not have yet waits for it, of programs and of the kernel",
        pending_keys,
    ),
    VmTest::new(
        "a work request stands still for its key alone; who uses a key whose registration failed or ended is refused",
        pending_and_failed_keys,
    ),
    VmTest::new(
        "a registration that failed is told of, and is ended or mended like any other, of programs and of the kernel",
        failed_registration,
    ),
    VmTest::new(
        "control doorbells come late: what uses a key finds it",
        overtaken_doorbells,
    ),
];

/// The same, with a device that fails; it works when they end.
pub const FAILING: &[VmTest] = &[
    VmTest::new(
        "the device fails under a program whose queue stands still after a failed registration",
        fails_under_a_program,
    ),
    VmTest::new(
        "the device fails under a kernel user whose queue stands still after a failed registration",
        fails_under_a_kernel_user,
    ),
    VmTest::new(
        "a device that knows nothing of a key that is given back is given up, and comes back",
        denied_release,
    ),
];

const PATIENCE: Duration = Duration::from_secs(120);

/// What one process checks by itself, and that nothing of it stays when it has ended.
fn by_itself(cluster: &Cluster, case: &str) -> Result<()> {
    alone(cluster, case)?;
    let (one, _) = cluster.two()?;
    nothing_left(one)
}

fn fails_under_a_program(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let count = lives(one)?;
    one.sh("rm -f /run/stopped")?;
    let program = one.spawn(
        "exec verbs-check run stopped >/run/stopped 2>&1",
        2 * driver::PATIENCE,
    )?;
    one.wait_for("grep -q ready /run/stopped", driver::PATIENCE)?;
    fatal(cluster)?;
    let outcome = program.wait()?;
    let said = one.sh("cat /run/stopped")?;
    ensure!(
        outcome.ok() && said.contains("done"),
        "the program did not end well: {outcome:?}\n{said}"
    );
    wait_back(one, count)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn fails_under_a_kernel_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    // A device that came back would be shown to the sample again.
    leave_failed(one)?;
    one.sh("dmesg -C")?;
    let user = one.spawn(
        "exec insmod /ferrite/modules/rust_rdma_loop.ko device_fails=1",
        2 * driver::PATIENCE,
    )?;
    one.wait_for("dmesg | grep -q 'stands still until'", PATIENCE)?;
    fatal(cluster)?;
    let outcome = user.wait()?;
    let said = one.sh("dmesg")?;
    ensure!(
        outcome.ok() && said.contains("ok a_device_may_fail_while_a_queue_stands_still"),
        "the user did not end well: {outcome:?}\n{said}"
    );
    one.sh_in("rmmod rust_rdma_loop", driver::PATIENCE)?;
    // Unloading ends what it has of a failed device.
    unbind(one)?;
    one.sh_in(&format!("rmmod ferrite; {LOAD_DRIVER}"), driver::PATIENCE)?;
    wait_active(one)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn denied_release(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let count = lives(one)?;
    let rules = |deny: bool| json!({"cmd": "misbehave", "deny_tags": deny});
    cluster.device_command(one.index, &rules(true))?;
    one.sh("dmesg -C")?;
    let said = one.sh_in(
        "python3 - <<'END'
from pyverbs.device import Context
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE
from pyverbs.mr import MR
from pyverbs.pd import PD

with Context(name='ferrite0') as context, PD(context) as pd:
    MR(pd, 4096, IBV_ACCESS_LOCAL_WRITE).close()
END",
        PATIENCE,
    );
    let seen = one.wait_for("dmesg | grep -q 'release of tag index'", PATIENCE);
    cluster.device_command(one.index, &rules(false))?;
    seen.with_context(|| format!("the driver goes on: {said:?}"))?;
    wait_back(one, count)?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Runs `test` with devices that hold something (`hold_tags`, `hold_control`) back for so many
/// milliseconds.
fn with_held(
    cluster: &Cluster,
    (what, late): (&str, u32),
    test: impl FnOnce() -> Result<()>,
) -> Result<()> {
    with_rules(cluster, &json!({"cmd": "misbehave", what: late}), test)
}

/// Runs `test` with devices that do as the rules say.
fn with_rules(cluster: &Cluster, rules: &Value, test: impl FnOnce() -> Result<()>) -> Result<()> {
    let devices = |rules: &Value| -> Result<()> {
        for vm in &cluster.vms {
            cluster.device_command(vm.index, rules)?;
        }
        Ok(())
    };
    for vm in &cluster.vms {
        // The core keeps completion queues of the kernel's users as long as there is the device.
        bind_anew(vm)?;
    }
    devices(rules)?;
    let result = test();
    devices(&json!({"cmd": "misbehave"}))?;
    result?;
    for vm in &cluster.vms {
        nothing_left(vm)?;
    }
    still_works(cluster)
}

/// Registers some regions, makes windows and a completion queue and queue pair beside them, and says what the kernel
/// tells of the regions; then waits to be told to end. All but the queues is held back.
const REGISTER_SOME: &str = r#"
rm -f /run/registered /run/end
python3 - <<'END'
import os, subprocess, time
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import *
from pyverbs.mr import MR, MW
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr

def make_and_destroy_queues():
    with CQ(context, 16) as cq:
        with QP(pd, QPInitAttr(qp_type=IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1))):
            pass

with Context(name="ferrite0") as context, PD(context) as pd, PD(context) as other:
    regions = [MR(pd, 4096, IBV_ACCESS_LOCAL_WRITE) for _ in range(3)]
    regions += [MR(pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND) for _ in range(2)]
    windows = [MW(other, kind) for kind in (IBV_MW_TYPE_1, IBV_MW_TYPE_2)]
    make_and_destroy_queues()
    shown = subprocess.check_output(["rdma", "-dd", "resource", "show", "mr"], text=True)
    with open("/run/said", "w") as said:
        said.write(shown)
    os.rename("/run/said", "/run/registered")
    while not os.path.exists("/run/end"):
        time.sleep(0.05)
    for ends in windows + regions:
        ends.close()
    make_and_destroy_queues()
END
"#;

/// How much of one kind the device of a machine has held back so far, and then done.
fn held(cluster: &Cluster, vm: &Vm, what: &str) -> Result<u64> {
    let report = cluster.device_command(vm.index, &json!({"cmd": "counters"}))?;
    let done = report["misbehaviour"]["done"][what].as_u64();
    done.with_context(|| format!("no {what} in {report}"))
}

/// For how many milliseconds commands on tags are held back where none is to be done before all is looked at; and for
/// how many the driver waits for the answer to one.
const HELD: u32 = 240_000;
const ANSWERED: u32 = 300_000;

/// None of five registrations, and of windows beside them, is done when the last has returned, nor any deregistration
/// when the program has ended: nobody waited. Queues that were made and destroyed in between were: commands behind
/// those on tags overtake them.
fn keys_at_once(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    load_with(one, &format!("command_timeout_ms={ANSWERED}"))?;
    let mut program = None;
    let held = with_held(cluster, ("hold_tags", HELD), || {
        program = Some(one.spawn(REGISTER_SOME, PATIENCE)?);
        one.wait_for("test -e /run/registered", PATIENCE)?;
        let shown = one.sh("cat /run/registered; touch /run/end")?;
        let pending = shown.matches("registration pending").count();
        ensure!(pending == 5, "{pending} regions are pending:\n{shown}");
        if let Some(program) = program.take() {
            program.success()?;
        }
        let done = held(cluster, one, "held_tags")?;
        ensure!(done == 0, "the device has done {done} commands on tags");
        Ok(())
    });
    load_with(one, "")?;
    held
}

/// Work requests come before the doorbell of the command that makes their key: the device learns of that by the control
/// record, at the beginning of its turn or where it finds no such key, and nobody is refused.
fn overtaken_doorbells(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let [soon, late, _] = HELD_BACK;
    with_held(cluster, ("hold_control", late), || {
        super::basics::verbs_check_between(one, two, "at-once")?;
        for vm in [one, two] {
            ensure!(
                held(cluster, vm, "held_control")? > 0,
                "no doorbell was held"
            );
        }
        Ok(())
    })?;
    with_held(cluster, ("hold_control", soon), || {
        super::basics::verbs_check_between(one, two, "data")?;
        run_sample(one)?;
        if cluster.thorough() {
            by_itself(cluster, "dereg")?;
        }
        Ok(())
    })
}

/// For how many milliseconds commands on tags are held back: for longer where the machine is so slow that nobody
/// came before they were done.
const HELD_BACK: [u32; 3] = [20, 100, 500];

fn pending_keys(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let waits = || Ok::<_, Error>(counter(one, "pending_waits")? + counter(two, "pending_waits")?);
    let (mut of_programs, mut of_the_kernel) = (0, 0);
    for late in HELD_BACK {
        with_held(cluster, ("hold_tags", late), || {
            let before = waits()?;
            super::basics::verbs_check_between(one, two, "data")?;
            let between = waits()?;
            of_programs += between - before;
            run_sample(one)?;
            of_the_kernel += waits()? - between;
            Ok(())
        })?;
        println!("          {late} ms: programs waited {of_programs} times, the kernel's user {of_the_kernel} times");
        if of_programs > 0 && of_the_kernel > 0 {
            break;
        }
    }
    ensure!(of_programs > 0, "no program waited");
    ensure!(of_the_kernel > 0, "the kernel's user did not wait");
    if cluster.thorough() {
        with_held(cluster, ("hold_tags", HELD_BACK[0]), || {
            by_itself(cluster, "dereg")
        })?;
    }
    Ok(())
}

/// Bytes of regions whose registration is to fail, as `verbs-check run pending` has them.
const FAIL_LENGTH: u32 = 20480;

/// For how many milliseconds what uses a key is seen to wait: longer than others may take for their messages meanwhile.
/// The second is for a machine on which they took longer.
const STALLED: [u32; 2] = [500, 2000];

fn pending_and_failed_keys(cluster: &Cluster) -> Result<()> {
    let [usual, longer] = STALLED;
    stalled_for(cluster, usual).or_else(|error| {
        let said = format!("{error:#}");
        if !KEY_WAS_THERE.iter().any(|what| said.contains(what)) {
            return Err(error);
        }
        println!("          keys came after {usual} ms, which others took as well");
        stalled_for(cluster, longer)
    })
}

/// What `verbs-check` says of writes that are to find no key, where the device had it by then.
const KEY_WAS_THERE: [&str; 2] = [
    "completion before the device has the key",
    "the write from what has ended",
];

fn stalled_for(cluster: &Cluster, milliseconds: u32) -> Result<()> {
    let (one, two) = cluster.two()?;
    let rules = json!({
        "cmd": "misbehave", "hold_tags": milliseconds, "fail_length": FAIL_LENGTH, "fail_windows": true,
    });
    with_rules(cluster, &rules, || {
        super::basics::verbs_check_between(one, two, "pending")?;
        for vm in [one, two] {
            ensure!(
                held(cluster, vm, "failed_tags")? > 0,
                "no registration failed"
            );
        }
        Ok(())
    })
}

/// Registers what cannot be, says what the kernel tells of it then, mends it, and says so again.
fn register_failing() -> String {
    format!(
        r#"
dmesg -C
python3 - <<'END'
import ctypes, mmap, subprocess, time
from pyverbs.device import Context
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE, IBV_REREG_MR_CHANGE_TRANSLATION
from pyverbs.mr import MR
from pyverbs.pd import PD

def shown():
    return subprocess.check_output(["rdma", "-dd", "resource", "show", "mr"], text=True)

memory = mmap.mmap(-1, {FAIL_LENGTH})
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
with Context(name="ferrite0") as context, PD(context) as pd:
    for mends in (False, True):
        region = MR(pd, {FAIL_LENGTH}, IBV_ACCESS_LOCAL_WRITE, address)
        for _ in range(600):
            if "registration pending" not in shown():
                break
            time.sleep(0.05)
        print("before:", " ".join(shown().split()))
        if mends:
            region.rereg(IBV_REREG_MR_CHANGE_TRANSLATION, addr=address, length=4096)
            print("after:", " ".join(shown().split()))
        region.close()
END
dmesg"#
    )
}

fn failed_registration(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let rules = json!({"cmd": "misbehave", "fail_length": FAIL_LENGTH});
    with_rules(cluster, &rules, || {
        let said = one.sh_in(&register_failing(), PATIENCE)?;
        let told = |when: &'static str| said.lines().filter(move |line| line.starts_with(when));
        let failed = |line: &&str| {
            line.contains("registration failed") && line.contains("registration_errno")
        };
        ensure!(
            told("before:").count() == 2
                && told("before:").all(|line| failed(&line))
                && told("after:").count() == 1
                && !told("after:").any(|line| line.contains("registration"))
                && said.contains("a registration failed after its key was given out"),
            "{said}"
        );
        let said = run_sample_with(one, &format!("failing_pages={}", FAIL_LENGTH / 4096))?;
        ensure!(
            said.contains("not made: LocalProtection 19")
                && said.contains("ok a_region_that_was_not_made_is_not_registered"),
            "{said}"
        );
        ensure!(
            held(cluster, one, "failed_tags")? == 3,
            "not just what was to fail did"
        );
        Ok(())
    })
}

/// Loads and unloads the sample; gives what it said.
pub(super) fn run_sample(vm: &Vm) -> Result<String> {
    run_sample_with(vm, "")
}

/// The same with parameters.
fn run_sample_with(vm: &Vm, parameters: &str) -> Result<String> {
    vm.sh_in(
        &format!(
            "set -e
             dmesg -C
             insmod /ferrite/modules/rust_rdma_loop.ko {parameters}
             rmmod rust_rdma_loop
             dmesg"
        ),
        PATIENCE,
    )
}

/// A counter of the device, as the kernel tells it.
fn counter(vm: &Vm, name: &str) -> Result<u64> {
    let text = vm.sh("rdma -j statistic show link ferrite0/1")?;
    let shown: Value = serde_json::from_str(&text).context("rdma statistic")?;
    let value = shown[0][name].as_u64();
    value.with_context(|| format!("no counter {name} in:\n{text}"))
}

/// What the sample has to have done with a failed registration, by cause: what it says of each. The last
/// number is the device's own (chapter 4), which tells the causes apart.
const FAILED: [(&str, u32); 3] = [("NoSuchKey", 1), ("AlreadyValid", 10), ("NoRoom", 9)];

fn kernel_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let counted = || -> Result<[u64; 2]> {
        Ok([
            counter(one, "sq_registrations")?,
            counter(one, "early_uses")?,
        ])
    };
    let before = counted()?;
    let said = run_sample(one)?;
    let after = counted()?;
    for test in [
        "a_region_is_used_before_its_registration_is_complete",
        "an_offer_is_one_request_and_ends_with_the_answer",
        "an_offer_may_answer_an_offer",
        "an_offer_that_fails_is_not_sent",
        "a_failed_registration_drains_and_is_tried_again",
        "no_such_key_ends_the_connection",
        "a_key_in_use_ends_the_connection",
        "too_many_pages_end_the_connection",
        "a_region_may_be_for_one_message",
        "regions_may_have_many_pages",
        "regions_may_have_room_for_more_pages",
        "a_refusal_in_the_middle_of_a_list_leaves_nothing_behind",
        "regions_may_have_large_pages",
        "regions_of_other_domains_are_not_posted",
    ] {
        ensure!(
            said.contains(&format!("ferrite0: rust_rdma_loop: ok {test}")),
            "the sample does not say that {test}:\n{said}"
        );
    }
    for (cause, number) in FAILED {
        for line in [
            format!("drained by {cause}: LocalProtection {number}, then Sqd"),
            format!("mended after {cause}"),
            format!("ended by {cause}: LocalProtection {number}, then Err"),
            format!("not offered by {cause}: LocalProtection {number}, then Sqd"),
        ] {
            ensure!(
                said.contains(&line),
                "the sample does not say '{line}':\n{said}"
            );
        }
    }
    // The test of use before completion does it four times; whether others do depends on who is faster.
    let [registered, early] = [after[0] - before[0], after[1] - before[1]];
    ensure!(
        early >= 4,
        "{early} early uses, of {registered} registrations"
    );
    ensure!(registered > early, "{registered} registrations");
    nothing_left(one)
}

/// Registers 4 MiB of small pages, no two of which lie side by side, and 8 MiB of huge ones of 2 MiB, and prints what
/// the kernel tells of each region.
const REGISTER_PAGES: &str = r#"
set -e
# Memory that was used for other things has to be moved first.
for n in {1..20}; do
    echo 8 >/proc/sys/vm/nr_hugepages
    [ $(cat /proc/sys/vm/nr_hugepages) -lt 8 ] || break
    sync; echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory
done
python3 - <<'END'
import ctypes, mmap, subprocess
from pyverbs.device import Context
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE
from pyverbs.mr import MR
from pyverbs.pd import PD

MAP_HUGETLB, MADV_NOHUGEPAGE, MREMAP_TO = 0x40000, 15, 3
PAGE, APART, HUGE = 4096, 4 << 20, 8 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

def mapped(length, flags=0):
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))

# Every other page of memory that was given out in a row.
row, from_row = mapped(2 * APART)
row.madvise(MADV_NOHUGEPAGE)
for offset in range(0, 2 * APART, PAGE):
    row[offset] = 1
apart, to = mapped(APART)
for page in range(APART // PAGE):
    target = to + page * PAGE
    if libc.mremap(from_row + 2 * page * PAGE, PAGE, PAGE, MREMAP_TO, target) != target:
        raise OSError(ctypes.get_errno(), "mremap")
huge, address = mapped(HUGE, MAP_HUGETLB)
with Context(name="ferrite0") as context, PD(context) as pd:
    with MR(pd, APART, IBV_ACCESS_LOCAL_WRITE, to), MR(pd, HUGE, IBV_ACCESS_LOCAL_WRITE, address):
        shown = ["rdma", "-dd", "-j", "resource", "show", "mr"]
        print(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
END
echo 0 >/proc/sys/vm/nr_hugepages"#;

/// Registers one page of 1 GiB.
const REGISTER_GIBIBYTE: &str = r#"
set -e
python3 - <<'END'
import ctypes, mmap, subprocess
from pyverbs.device import Context
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE
from pyverbs.mr import MR
from pyverbs.pd import PD

MAP_HUGETLB, MAP_HUGE_1GB, LENGTH = 0x40000, 30 << 26, 1 << 30
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_1GB
memory = mmap.mmap(-1, LENGTH, flags=flags)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
with Context(name="ferrite0") as context, PD(context) as pd:
    with MR(pd, LENGTH, IBV_ACCESS_LOCAL_WRITE, address):
        shown = ["rdma", "-dd", "-j", "resource", "show", "mr"]
        print(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
END"#;

/// The page size of the region of that length, and how many pages the device was told of.
fn pages_of(text: &str, length: u64) -> Result<(u64, u64)> {
    let shown: Value = serde_json::from_str(text).context("rdma resource")?;
    let regions = shown.as_array().into_iter().flatten();
    let mut regions = regions.filter(|region| region["mrlen"].as_u64() == Some(length));
    let region = regions.next().with_context(|| text.to_owned())?;
    let number = |name: &str| {
        let value = region[name].as_u64();
        value.with_context(|| format!("no {name} in {region}"))
    };
    Ok((number("drv_page_size")?, number("drv_translations")?))
}

fn page_sizes(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = one.sh_in(REGISTER_PAGES, PATIENCE)?;
    let small = pages_of(&text, 4 << 20)?;
    ensure!(small == (4096, 1024), "(size, pages) {small:?} of 4 MiB");
    // Pages may follow each other in memory, and then there are fewer of them.
    let (size, pages) = pages_of(&text, 8 << 20)?;
    ensure!(
        size >= 2 << 20 && pages <= 4,
        "{pages} pages of {size} bytes of 8 MiB"
    );
    nothing_left(one)
}

/// Machines with room for a page of 1 GiB, and a processor that has such.
pub fn with_a_large_page(usual: Options) -> Options {
    let processor = format!("{EMULATED_CPU},+pdpe1gb");
    Options {
        vms: 1,
        cpus: 1,
        // Of 4 GiB two are above the hole for devices, and what the kernel takes before it looks for the page is at the
        // end of them.
        memory_mib: 4096,
        qemu_args: vec![vec!["-cpu".to_owned(), processor]],
        kernel_args: "hugepagesz=1G hugepages=1".to_owned(),
        ..usual
    }
}

/// On such a machine.
pub const LARGE_PAGE: &[VmTest] = &[VmTest::new(
    "a page of 1 GiB is told to the device as one",
    |cluster| {
        let vm = &cluster.vms[0];
        let text = vm.sh_in(REGISTER_GIBIBYTE, PATIENCE)?;
        let (size, pages) = pages_of(&text, 1 << 30)?;
        ensure!(
            size == 1 << 30 && pages == 1,
            "{pages} pages of {size} bytes of 1 GiB"
        );
        nothing_left(vm)
    },
)];
