// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel has no memory for us: every allocation on the way to a device and its objects fails
//! once, in turn, and then everything works.

use std::time::{Duration, SystemTime};

use anyhow::{bail, Context, Result};

use super::{nothing_left, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On a kernel with fault injection.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "verbs whose allocations fail, one after the other, leave nothing behind",
        verbs,
    ),
    VmTest::new(
        "a device whose probe runs out of memory anywhere can be bound afterwards",
        probe,
    ),
    VmTest::new(
        "connections, while the driver gets no memory now and then",
        connections,
    ),
];

/// How many of a probe's allocations fail in a short run, spread over all of them.
const PROBES: usize = 20;

/// The same for each verb.
const SAMPLE: usize = 12;

/// Lets allocations that may sleep fail too, of slabs and of pages, without words about each.
const ALL_KINDS: &str = "
set -e
cd /sys/kernel/debug
for kind in failslab fail_page_alloc; do
    echo N >$kind/ignore-gfp-wait
    echo 0 >$kind/verbose
    echo 0 >$kind/probability
    echo -1 >$kind/times
    echo 32 >$kind/stacktrace-depth
done
echo N >fail_page_alloc/ignore-gfp-highmem
echo 0 >fail_page_alloc/min-order";

/// Of pages, only several at once: single ones are mostly asked for by `vmalloc`, by the thousand, and
/// it asks again for one that it did not get.
const NO_SINGLE_PAGES: &str = "
echo 1 >fail_page_alloc/min-order";

/// Of these, what the driver asks for, itself or through what it calls.
const OF_THE_DRIVER: &str = "
start=$(cat /sys/module/ferrite/sections/.text)
end=$(printf 0x%x $((start + $(cat /sys/module/ferrite/coresize))))
for kind in failslab fail_page_alloc; do
    echo $start >$kind/require-start
    echo $end >$kind/require-end
done";

/// What counts as an allocation that can fail: all of the kernel's where there is time.
fn choose(vm: &Vm, thorough: bool) -> Result<()> {
    let which = if thorough {
        String::new()
    } else {
        format!("{NO_SINGLE_PAGES}{OF_THE_DRIVER}")
    };
    vm.sh(&format!("{ALL_KINDS}{which}"))?;
    Ok(())
}

/// Fails what the driver asks for with this many percent.
fn fail_at_random(vm: &Vm, percent: usize) -> Result<()> {
    vm.sh(&format!(
        "{ALL_KINDS}{OF_THE_DRIVER}
         for kind in failslab fail_page_alloc; do echo {percent} >$kind/probability; done"
    ))?;
    Ok(())
}

/// Everything as it was.
fn fail_no_more(vm: &Vm) -> Result<()> {
    vm.sh("set -e
         cd /sys/kernel/debug
         for kind in failslab fail_page_alloc; do
             echo 0 >$kind/probability
             echo 0 >$kind/require-start
             echo 0xffffffffffffffff >$kind/require-end
         done")?;
    Ok(())
}

fn verbs(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    choose(one, cluster.thorough())?;
    let (sample, time) = if cluster.thorough() {
        (String::new(), 3600)
    } else {
        (format!(" --sample {SAMPLE}"), 120)
    };
    let said = one.sh_in(
        &format!("verbs-check run allocations{sample}"),
        Duration::from_secs(time),
    )?;
    fail_no_more(one)?;
    if let Some(skip) = said.lines().find(|line| line.starts_with("skip ")) {
        bail!("{skip}");
    }
    nothing_left(one)?;
    still_works(cluster)
}

/// Binds the device with the `n`th allocation failing; says what was left of `n`, and how it went.
const BIND: &str = "
try() {
    bash -c 'echo $1 >/proc/self/fail-nth
             echo $2 >/sys/bus/pci/drivers/ferrite/bind; rc=$?
             read left </proc/self/fail-nth; echo 0 >/proc/self/fail-nth
             echo $left $rc' try $1 $device 2>/dev/null
}
drivers=/sys/bus/pci/drivers/ferrite
bound() { [ -e $drivers/$device ]; }";

fn probe(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    // So many that none fails: what is left tells how many there are.
    let plenty = 1_000_000;
    choose(one, cluster.thorough())?;
    let said = one.sh(&format!(
        "set -e
         {BIND}
         cd $drivers; device=$(ls -d *:*:*.*); echo $device >/run/device; echo $device >unbind
         try {plenty}
         bound"
    ))?;
    let left: usize = said
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("no count of allocations: {said}"))?;
    let count = plenty - left;
    if count < 20 {
        bail!("a probe with {count} allocations?");
    }
    let stride = if cluster.thorough() {
        1
    } else {
        count.div_ceil(PROBES)
    };
    // Runs do not all try the same ones.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let first = 1 + now.subsec_micros() as usize % stride;
    let said = one.sh_in(
        &format!(
            "{BIND}
             device=$(cat /run/device)
             for n in $(seq {first} {stride} {count}); do
                 ! bound || echo $device >$drivers/unbind || exit 1
                 set -- $(try $n)
                 bound && echo $n bound all the same || echo $n refused
             done
             ! bound || echo $device >$drivers/unbind || exit 1
             echo $device >$drivers/bind"
        ),
        Duration::from_secs(if cluster.thorough() { 3600 } else { 240 }),
    )?;
    fail_no_more(one)?;
    // The kernel has an interrupt without an entry below /proc/irq when there is no memory for that,
    // and warns of it when the interrupt goes.
    let findings = cluster.new_findings();
    if let Some(ours) = findings
        .iter()
        .find(|text| !text.contains("unregister_irq_proc"))
    {
        bail!("the kernel reported:\n{ours}");
    }
    // Much of what the kernel asks for on the way, for its files below /sys and the like, it can do
    // without.
    if !said.lines().any(|line| line.ends_with("refused")) {
        bail!("of {count} allocations none was needed:\n{said}");
    }
    wait_active(one)?;
    still_works(cluster)?;
    nothing_left(one)
}

fn connections(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let rounds = if cluster.thorough() { 200 } else { 10 };
    for vm in [one, two] {
        fail_at_random(vm, 2)?;
    }
    // Each may fail as it likes, but must end.
    let time = Duration::from_secs(60 + 10 * rounds);
    let server = one.spawn(
        &format!("while :; do rping -s -P -a {}; done", one.ip()),
        time,
    )?;
    let client = two.spawn(
        &format!(
            "for n in $(seq {rounds}); do
                 timeout -s KILL 5 rping -c -a {} -C 3 && echo done || echo failed
             done",
            one.ip()
        ),
        time,
    )?;
    let result = client.success();
    server.end()?;
    for vm in [one, two] {
        fail_no_more(vm)?;
        vm.sh("pkill -KILL rping; true")?;
    }
    result?;
    for vm in [one, two] {
        vm.wait_for("! pgrep rping", Duration::from_secs(30))
            .context("a program without memory cannot be ended")?;
        nothing_left(vm)?;
    }
    still_works(cluster)
}
