// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device on MSI and on the interrupt pin, alone on a line and with others.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;

use super::notification::accesses;
use super::recovery::{lives, survives_resets_of_attempts, wait_back};
use super::{driver, still_works, VmTest};
use crate::cluster::{Cluster, Options};
use crate::process::wait_until;
use crate::traffic::{perftest, pingpong};
use crate::vm::Vm;

/// One machine has MSI at the best, the other the pin alone.
pub const MODES: &[VmTest] = &[
    VmTest::new("MSI and INTx lose no event under load", loses_nothing),
    VmTest::new("a line that is shared serves all who share it", shared_line),
    VmTest::new(
        "a device that failed does not hold its line",
        failure_lets_go,
    ),
    VmTest::new(
        "a device that hangs does not hold its line, and is stopped",
        hung_lets_go,
    ),
    VmTest::new(
        "a reset by others in the middle of an attempt, with MSI and with INTx: the device comes back",
        survives_resets,
    ),
];

/// The device of the first machine has no MSI-X. The kernel of the second has neither that nor MSI,
/// whatever the device has, and others on each line: the pins of four slots in a row are four lines.
pub fn options(options: Options) -> Options {
    let neighbours = (0x10..0x14)
        .flat_map(|slot| {
            [
                "-device".into(),
                format!("virtio-rng-pci,bus=pcie.0,addr={slot:#x}"),
            ]
        })
        .collect();
    Options {
        own_device_args: vec![vec!["--interrupts".into(), "msi,intx".into()]],
        own_kernel_args: vec![String::new(), "pci=nomsi".into()],
        qemu_args: vec![Vec::new(), neighbours],
        ..options
    }
}

/// What the driver says of the interrupts of its device.
struct Interrupts {
    mode: String,
    unhandled: u64,
    /// Events that it has served.
    served: u64,
    /// The line of the first vector in `/proc/interrupts`, and how often it was taken.
    line: String,
    taken: u64,
}

impl Interrupts {
    /// The kernel's number of the first vector.
    fn irq(&self) -> &str {
        self.line.split(':').next().unwrap_or("").trim()
    }
}

fn interrupts(vm: &Vm) -> Result<Interrupts> {
    let text = vm.sh("set -e; cd /sys/kernel/debug/ferrite0
         sed -n 2p interrupts
         awk 'NR > 1 { n += $6; irq = $3 } END { print n, irq }' eqs
         grep \"^ *$(awk 'NR == 2 { print $3 }' eqs):\" /proc/interrupts; nproc")?;
    let mut lines = text.lines();
    let mut next = || lines.next().with_context(|| format!("too little: {text}"));
    let (mode, served, line, cpus) = (next()?, next()?, next()?, next()?);
    let words: Vec<&str> = mode.split_whitespace().collect();
    let [mode, _, unhandled] = words[..] else {
        bail!("the mode of interrupts: {text}");
    };
    let counts = line.split_whitespace().skip(1).take(cpus.parse()?);
    Ok(Interrupts {
        mode: mode.to_owned(),
        unhandled: unhandled.parse()?,
        served: served.split(' ').next().unwrap_or("").parse()?,
        taken: counts.filter_map(|count| count.parse::<u64>().ok()).sum(),
        line: line.to_owned(),
    })
}

/// The kernel has not given a line up.
fn nobody_screams(vm: &Vm) -> Result<()> {
    let said = vm.sh("dmesg | grep -i 'nobody cared\\|Disabling IRQ' || true")?;
    ensure!(said.is_empty(), "{}: {said}", vm.name());
    Ok(())
}

fn loses_nothing(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let before = [interrupts(one)?, interrupts(two)?];
    for ((vm, now), mode) in [one, two].into_iter().zip(&before).zip(["MSI", "INTx"]) {
        ensure!(now.mode == mode, "{}: mode {}", vm.name(), now.mode);
    }
    let reads = |index| accesses(&cluster.counters(index)?, "reads", None);
    let read = [reads(1)?, reads(2)?];
    pingpong(one, two, 4096, 200, true)?;
    // Several queue pairs, and both directions at once.
    perftest(one, two, "ib_send_bw", 4096, 50, "-e -b -q 4")?;
    for (index, (vm, before)) in (1..).zip([one, two].into_iter().zip(&before)) {
        // What was raised last may be on its way.
        let mut state = String::new();
        let all = wait_until(Instant::now() + vm.at_most(Duration::from_secs(60)), || {
            let (now, counters) = (interrupts(vm)?, cluster.counters(index)?);
            let events = counters["engine"]["events"].as_u64();
            state = format!(
                "{events:?} events, {} served; {}; {}",
                now.served, now.line, counters["interrupts"]
            );
            Ok(events == Some(now.served) && now.taken >= before.taken + 100)
        })?;
        ensure!(all, "{}: {state}", vm.name());
        let read = reads(index)? - read[index - 1];
        ensure!(read == 0, "{}: {read} register reads", vm.name());
        nobody_screams(vm)?;
    }
    Ok(())
}

/// Has each of the neighbours on the lines interrupt some times.
const NEIGHBOURS: &str = "modprobe virtio_rng; cd /sys/class/misc/hw_random
    for rng in $(cat rng_available); do
        case $rng in virtio*) echo $rng >rng_current; dd if=/dev/hwrng of=/dev/null bs=64 count=5;; esac
    done 2>&1";

/// Does something while the neighbours on the lines of `vm` interrupt all the time.
fn with_neighbours<T>(vm: &Vm, what: impl FnOnce() -> Result<T>) -> Result<T> {
    vm.sh("rm -f /run/enough")?;
    let busy = vm.spawn(
        // Once at the least.
        &format!("until {NEIGHBOURS}\n [ -e /run/enough ]; do :; done >/dev/null"),
        Duration::from_secs(240),
    )?;
    let result = what();
    vm.sh("touch /run/enough")?;
    busy.success()?;
    result
}

fn shared_line(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    two.sh(NEIGHBOURS)?;
    let before = interrupts(two)?;
    ensure!(
        before.line.contains("ferrite") && before.line.contains("virtio"),
        "the device shares its line with nobody: {}",
        before.line
    );
    two.sh(&format!(
        "set -e; mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
         cd /sys/kernel/tracing/events/irq
         for event in irq_handler_entry irq_handler_exit; do
             echo 'irq == {}' >$event/filter; echo 1 >$event/enable
         done",
        before.irq()
    ))?;
    with_neighbours(two, || pingpong(one, two, 4096, 200, true))?;
    let after = interrupts(two)?;
    ensure!(
        after.unhandled > before.unhandled,
        "no interrupt was another's: {}",
        after.line
    );
    // What the kernel was answered, too: a handler that takes everything for its own would hide
    // that a line screams.
    let answers = two.sh("cd /sys/kernel/tracing; echo 0 >events/irq/enable
         grep -A1 'irq_handler_entry:.*name=ferrite' trace | grep -o 'ret=.*' | sort | uniq -c")?;
    ensure!(
        answers.contains("ret=unhandled") && answers.contains("ret=handled"),
        "answers of the handler: {answers:?}"
    );
    nobody_screams(two)
}

fn failure_lets_go(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    let before = interrupts(two)?;
    let (irq, line) = (before.irq(), &before.line);
    cluster.device_command(2, &json!({"cmd": "fatal"}))?;
    two.wait_for("dmesg | grep -q 'device failed'", Duration::from_secs(60))?;
    // The neighbours go on, and the line rests when they do.
    two.sh(NEIGHBOURS)?;
    let quiet = two.sh(&format!(
        "count() {{ grep '^ *{irq}:' /proc/interrupts | awk '{{ print $2 + $3 }}'; }}
         before=$(count); sleep 1; echo $(($(count) - before))"
    ))?;
    let taken: u64 = quiet.trim().parse()?;
    ensure!(taken < 100, "{taken} interrupts in a second of {line}");
    nobody_screams(two)?;
    driver::unbind(two)?;
    two.sh(NEIGHBOURS)?;
    nobody_screams(two)?;
    driver::bind(two)?;
    still_works(cluster)
}

/// The interrupt is taken all the time while the device is being stopped, by what works in the end.
fn hung_lets_go(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    let count = lives(two)?;
    two.sh("dmesg -C")?;
    cluster.device_command(2, &json!({"cmd": "misbehave", "reset": "never"}))?;
    with_neighbours(two, || {
        cluster.device_command(2, &json!({"cmd": "fatal"}))?;
        wait_back(two, count)
    })?;
    cluster.device_command(2, &json!({"cmd": "misbehave"}))?;
    let said = two.sh("dmesg")?;
    ensure!(
        said.contains("reset failed") && !said.contains("cannot be stopped"),
        "the function was not reset:\n{said}"
    );
    nobody_screams(two)?;
    still_works(cluster)
}

fn survives_resets(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        survives_resets_of_attempts(vm).with_context(|| vm.name())?;
        nobody_screams(vm)?;
    }
    still_works(cluster)
}
