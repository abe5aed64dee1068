// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel has no memory for us: every allocation on the way to a device and its objects fails
//! once, in turn, and then everything works.

use std::time::{Duration, SystemTime};

use anyhow::{bail, ensure, Context, Result};

use super::{nothing_left, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::kernel::Flavour;
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
const PROBES: usize = 12;

/// How many such samples there are at most, until a quarter of one was needed.
const SAMPLES: usize = 6;

/// For how long they are tried in a long one, in random order.
const PROBING: Duration = Duration::from_secs(20 * 60);

/// The same number for each verb.
const SAMPLE: usize = 12;

/// Lets allocations that may sleep fail too, of slabs and of pages, without words about each. Of
/// pages, only several at once: single ones are mostly asked for by `vmalloc`, by the thousand, and it
/// asks again for one that it did not get. Those of the leak detector, one for each of all others, it
/// does without.
const ALL_KINDS: &str = r#"
set -e
cd /sys/kernel/debug
function_at() {
    awk -v name=$1 '$3 == name { start = $1; next } start && $1 != start { print "0x" start, "0x" $1; exit }' \
        /proc/kallsyms
}
read not_from not_to <<<"$(function_at __alloc_object)"
[ -n "$not_to" ] || read not_from not_to <<<"$(function_at __create_object)"
[ -n "$not_to" ]
for kind in failslab fail_page_alloc; do
    echo N >$kind/ignore-gfp-wait
    echo 0 >$kind/verbose
    echo 0 >$kind/probability
    echo -1 >$kind/times
    echo 32 >$kind/stacktrace-depth
    echo $not_from >$kind/reject-start
    echo $not_to >$kind/reject-end
done
echo N >fail_page_alloc/ignore-gfp-highmem
echo 1 >fail_page_alloc/min-order"#;

/// Of these, what the driver asks for, itself or through what it calls.
const OF_THE_DRIVER: &str = "
start=$(cat /sys/module/ferrite/sections/.text)
end=$(printf 0x%x $((start + $(cat /sys/module/ferrite/coresize))))
for kind in failslab fail_page_alloc; do
    echo $start >$kind/require-start
    echo $end >$kind/require-end
done";

/// Lets the next life of the device fail for want of memory, and none after that.
pub fn fail_next_life(vm: &Vm) -> Result<()> {
    // Of the driver's functions by address, the one that begins a life, and that after it.
    vm.sh(&format!(
        "{ALL_KINDS}
         read start end <<<\"$(grep '\\[ferrite\\]$' /proc/kallsyms | sort |
             awk '$3 ~ /4Life5begin$/ {{ start = $1; next }}
                  start && $1 != start {{ print \"0x\" start, \"0x\" $1; exit }}')\"
         [ -n \"$end\" ]
         echo $start >failslab/require-start
         echo $end >failslab/require-end
         echo 1 >failslab/times
         echo 100 >failslab/probability"
    ))?;
    Ok(())
}

/// What counts as an allocation that can fail: all of the kernel's where there is time.
fn choose(vm: &Vm, thorough: bool) -> Result<()> {
    let which = if thorough { "" } else { OF_THE_DRIVER };
    vm.sh(&format!("{ALL_KINDS}{which}"))?;
    Ok(())
}

/// More faults than there will be.
const PLENTY: u64 = 1_000_000;

/// Fails every 60th of what the driver asks for, or every 120th, so that some connections fail, and
/// not all.
fn fail_now_and_then(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "{ALL_KINDS}{OF_THE_DRIVER}
         for kind in failslab fail_page_alloc; do
             echo {PLENTY} >$kind/times
             echo 60 >$kind/interval
             echo 50 >$kind/probability
         done"
    ))?;
    Ok(())
}

/// How many have failed since [`fail_now_and_then`].
fn faults(vm: &Vm) -> Result<u64> {
    let left = vm.sh("cat /sys/kernel/debug/fail{slab,_page_alloc}/times")?;
    let left: u64 = left
        .split_whitespace()
        .map(str::parse::<u64>)
        .sum::<Result<_, _>>()?;
    Ok((2 * PLENTY).saturating_sub(left))
}

/// Fails all pages that the driver's work items ask for, and nothing of what programs do.
pub fn fail_pages_of_work_items(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "{ALL_KINDS}{OF_THE_DRIVER}
         echo 0 >fail_page_alloc/min-order
         # Workers that are yet to come have it from who makes them.
         for pid in $(pgrep kworker) $(pgrep -x kthreadd); do
             echo 1 >/proc/$pid/make-it-fail || true
         done
         cd fail_page_alloc
         echo Y >task-filter
         echo {PLENTY} >times
         echo 100 >probability"
    ))?;
    Ok(())
}

/// Everything as it was.
pub fn fail_no_more(vm: &Vm) -> Result<()> {
    vm.sh("set -e
         cd /sys/kernel/debug
         for kind in failslab fail_page_alloc; do
             echo 0 >$kind/probability
             echo 1 >$kind/interval
             echo N >$kind/task-filter
             echo 0 >$kind/require-start
             echo 0xffffffffffffffff >$kind/require-end
             echo 0 >$kind/reject-start
             echo 0 >$kind/reject-end
         done")?;
    Ok(())
}

/// A sequence that is as good as random.
struct Chance(u64);

impl Chance {
    /// A fresh one, which says how to have it again.
    fn new() -> Result<Self> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let seed = super::misbehaviour::given_seed().unwrap_or(now.as_micros() as u64);
        println!("      seed {seed}");
        Ok(Self(seed))
    }

    /// A number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

/// Whether to let all allocations fail. What goes wrong then is no race: it is enough on one of the sanitisers'
/// kernels.
fn thorough(cluster: &Cluster) -> bool {
    cluster.thorough() && cluster.flavour() != Flavour::Kcsan
}

fn verbs(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    choose(one, thorough(cluster))?;
    let (sample, time) = if thorough(cluster) {
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
    let plenty = PLENTY as usize;
    choose(one, thorough(cluster))?;
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
    let mut chance = Chance::new()?;
    let mut numbers = || -> Vec<usize> {
        if thorough(cluster) {
            let mut all: Vec<usize> = (1..=count).collect();
            for last in (1..all.len()).rev() {
                all.swap(last, chance.below(last + 1));
            }
            return all;
        }
        let stride = count.div_ceil(PROBES);
        let starts = (1..=count).step_by(stride);
        starts
            .map(|start| start + chance.below(stride.min(count + 1 - start)))
            .collect()
    };
    // Some of what the kernel asks for on the way, for its files below /sys and the like, it can do without, and all of
    // a sample may be of these. How many allocations there are differs a little.
    let mut said = String::new();
    let of = |said: &str, how: &str| said.lines().filter(|line| line.ends_with(how)).count();
    for _ in 0..SAMPLES {
        said += &fail_probes(one, &numbers())?;
        if thorough(cluster) || of(&said, "refused") >= PROBES / 4 {
            break;
        }
    }
    one.sh_in(
        "echo $(cat /run/device) >/sys/bus/pci/drivers/ferrite/bind",
        Duration::from_secs(60),
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
    let (refused, bound, unharmed) = (
        of(&said, "refused"),
        of(&said, "bound all the same"),
        of(&said, "unharmed"),
    );
    println!("          {count} allocations; {refused} refused, {bound} not needed");
    let least = if thorough(cluster) {
        (refused + bound) / 4
    } else {
        PROBES / 4
    };
    if refused < least || unharmed > (refused + bound) / 4 {
        bail!("of {count} allocations few were needed or tried:\n{said}");
    }
    wait_active(one)?;
    still_works(cluster)?;
    nothing_left(one)
}

/// Binds the device once for each number, with the allocation of that number failing; says how each went. The device is
/// not bound afterwards.
fn fail_probes(vm: &Vm, numbers: &[usize]) -> Result<String> {
    let list: Vec<String> = numbers.iter().map(usize::to_string).collect();
    vm.sh_in(
        &format!(
            "{BIND}
             device=$(cat /run/device)
             cat >/run/numbers <<'END'\n{}\nEND
             while read n; do
                 [ $SECONDS -lt {} ] || break
                 ! bound || echo $device >$drivers/unbind || exit 1
                 read left rc <<<\"$(try $n)\"
                 bound && how='bound all the same' || how=refused
                 [ \"$left\" = 0 ] || how=unharmed
                 echo $n $how
             done </run/numbers
             ! bound || echo $device >$drivers/unbind || exit 1",
            list.join("\n"),
            PROBING.as_secs()
        ),
        PROBING + Duration::from_secs(240),
    )
}

/// Whether a connection is made in so many seconds. It may fail as it likes, but must end. One server for each client:
/// what a fault leaves of it is not the next one's.
fn connects(one: &Vm, two: &Vm, seconds: u32) -> Result<bool> {
    let time = Duration::from_secs(120);
    let server = one.spawn(&format!("exec rping -s -a {} -C 3", one.ip()), time)?;
    // It may not come so far.
    one.sh("for n in {1..100}; do
             rdma resource show cm_id | grep -q LISTEN && break
             [ $n -lt 10 ] || pgrep -x rping >/dev/null || break
             sleep 0.1
         done")?;
    let client = two.run(
        &format!(
            "exec timeout -s KILL {seconds} rping -c -a {} -C 3",
            one.ip()
        ),
        time,
    )?;
    server.end()?;
    ensure!(!client.crashed() && !client.timed_out, "{client:?}");
    Ok(client.ok())
}

fn connections(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    // Where there is no time it is over when some were made and some were not.
    let (rounds, enough) = if thorough(cluster) {
        (200, 200)
    } else {
        (12, 2)
    };
    for vm in [one, two] {
        fail_now_and_then(vm)?;
    }
    // One takes a second on a quiet machine, and every other one meets a fault, of which some are waited for in vain.
    // Where none was made, the machine may be slow.
    let mut patience = 6 * two.patience();
    let (mut made, mut failed) = (0, 0);
    let tried = (|| -> Result<()> {
        for _ in 0..rounds {
            if connects(one, two, patience)? {
                made += 1;
            } else {
                failed += 1;
            }
            if made == 0 {
                patience = (patience * 3 / 2).min(60 * two.patience());
            }
            if made >= enough && failed >= enough {
                break;
            }
        }
        Ok(())
    })();
    let struck = [faults(one)?, faults(two)?];
    for vm in [one, two] {
        fail_no_more(vm)?;
        vm.sh("pkill -KILL rping; true")?;
    }
    tried?;
    println!("          {made} connections, {failed} attempts without one, {struck:?} faults");
    ensure!(
        made > 0 && struck != [0, 0],
        "no connection of {failed}, or no fault ({struck:?})"
    );
    for vm in [one, two] {
        vm.wait_for("! pgrep rping", Duration::from_secs(60))
            .context("a program without memory cannot be ended")?;
        nothing_left(vm)?;
    }
    still_works(cluster)
}
