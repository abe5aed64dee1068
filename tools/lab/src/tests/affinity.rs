// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which processor serves: queues without a wish, processors that go and come back, interrupts that are
//! steered elsewhere.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use super::moving::{queue_of, shown, Endless, Served};
use super::{still_works, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::vm::Vm;

/// With a vector for each processor of the first machine, of which there are several. The machine is left with
/// all processors online, and each handler on its own.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a queue without a wish is served on the processor of its program, and stays there",
        without_a_wish,
    ),
    VmTest::new(
        "a handler goes on elsewhere while its processor is offline, and comes back with it",
        offline,
    ),
    VmTest::new(
        "a queue follows its processor to no handler of low latency",
        not_everywhere,
    ),
    VmTest::new(
        "a queue leaves a handler that becomes one of low latency, unless root put it there",
        leaves,
    ),
];

/// With three processors or more.
pub const MORE: &[VmTest] = &[VmTest::new(
    "a queue follows when its handler may arrive at several other processors",
    several,
)];

const TIME: Duration = Duration::from_secs(60);
const PROGRAM: &str = "ibv_rc_pingpong";

/// The vector of a handler that does not share it.
fn vector(handler: usize) -> usize {
    2 + handler
}

fn processors(vm: &Vm) -> Result<usize> {
    let processors = vm.sh("nproc")?.trim().parse()?;
    ensure!(processors > 1, "{processors} processors");
    Ok(processors)
}

/// The Linux interrupt of a handler.
fn irq(vm: &Vm, handler: usize) -> Result<u64> {
    let handlers = shown(vm, "handlers")?;
    let row = handlers.get(handler).context("too few handlers")?;
    row["irq"].as_u64().with_context(|| format!("{row}"))
}

/// Where the interrupt of a handler is steered to.
fn steered_to(vm: &Vm, handler: usize) -> Result<String> {
    let irq = irq(vm, handler)?;
    let list = vm.sh(&format!("cat /proc/irq/{irq}/smp_affinity_list"))?;
    Ok(list.trim().to_owned())
}

fn steer(vm: &Vm, handler: usize, cpu: usize) -> Result<()> {
    steer_to(vm, handler, &cpu.to_string())
}

/// Steers the interrupt of a handler to any of a list of processors.
fn steer_to(vm: &Vm, handler: usize, cpus: &str) -> Result<()> {
    let irq = irq(vm, handler)?;
    vm.sh(&format!("echo {cpus} >/proc/irq/{irq}/smp_affinity_list"))?;
    Ok(())
}

/// Waits until the queue of the program is at `handler`.
fn comes_to(vm: &Vm, handler: usize, what: &str) -> Result<()> {
    let is_there = || Ok(queue_of(vm, PROGRAM)?["handler"] == handler);
    let came = wait_until(Instant::now() + vm.at_most(TIME), is_there)?;
    ensure!(came, "{what}: {}", queue_of(vm, PROGRAM)?);
    Ok(())
}

/// The queue of the program is at `handler`, which serves it on `cpu`.
fn served_by(vm: &Vm, handler: usize, cpu: usize, what: &str) -> Result<()> {
    Served::by(handler as u64, vector(handler), cpu)
        .expect(vm, what)
        .with_context(|| format!("the queue is {:?}", queue_of(vm, PROGRAM)))?;
    let now = queue_of(vm, PROGRAM)?;
    ensure!(now["handler"] == handler, "{what}: {now}");
    Ok(())
}

fn without_a_wish(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let processors = processors(one)?;
    // Where there is no time, the first one and the last.
    for cpu in (0..processors).filter(|cpu| cluster.thorough() || [0, processors - 1].contains(cpu))
    {
        let running = Endless::start_by(one, &format!("taskset -c {cpu}"), two)?;
        let stays = (|| {
            let queue = queue_of(one, PROGRAM)?;
            ensure!(queue["follows"] == cpu, "{queue} of a program on {cpu}");
            served_by(one, cpu, cpu, &format!("a program on {cpu}"))?;
            if cpu + 1 < processors {
                return Ok(());
            }
            // Nobody else arrives at that processor: the queue stays with its handler.
            steer(one, cpu, 0)?;
            served_by(one, cpu, 0, "its handler steered away")?;
            // Now somebody does.
            steer(one, 0, cpu)?;
            served_by(one, 0, cpu, "two handlers exchanged")?;
            one.sh("ferritectl balance")?;
            served_by(one, cpu, cpu, "balanced again")?;
            for handler in 0..processors {
                let at = steered_to(one, handler)?;
                ensure!(at == handler.to_string(), "{handler} is at {at}");
            }
            // Who is asked for by number is where it is, wherever that is.
            let cqn: &Value = &queue["cqn"];
            one.sh(&format!("ferritectl cq move {cqn} 0"))?;
            let queue = queue_of(one, PROGRAM)?;
            ensure!(queue["follows"].is_null(), "{queue} after a move to 0");
            steer(one, 0, cpu)?;
            steer(one, cpu, 0)?;
            served_by(one, 0, cpu, "moved by number")
        })();
        one.sh("ferritectl balance")?;
        let ended = running.end();
        stays?;
        ended?;
    }
    still_works(cluster)
}

/// Takes a processor off, or brings it back.
fn set_online(vm: &Vm, cpu: usize, online: bool) -> Result<()> {
    let value = u8::from(online);
    vm.sh_in(
        &format!("echo {value} >/sys/devices/system/cpu/cpu{cpu}/online"),
        TIME,
    )?;
    Ok(())
}

fn offline(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let last = processors(one)? - 1;
    let running = Endless::start_by(one, &format!("taskset -c {last}"), two)?;
    let goes_on = (|| {
        served_by(one, last, last, "before")?;
        // While events come, so that some are on their way to it.
        for _ in 0..5 {
            set_online(one, last, false)?;
            set_online(one, last, true)?;
        }
        served_by(one, last, last, "after it came and went")?;
        set_online(one, last, false)?;
        let elsewhere: usize = steered_to(one, last)?.parse()?;
        ensure!(elsewhere < last, "an offline processor has an interrupt");
        served_by(one, last, elsewhere, "while it is offline")?;
        set_online(one, last, true)?;
        ensure!(steered_to(one, last)? == last.to_string());
        served_by(one, last, last, "after it came back")
    })();
    set_online(one, last, true)?;
    let ended = running.end();
    goes_on?;
    ended?;
    still_works(cluster)
}

fn not_everywhere(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    processors(one)?;
    let nobody = "taskset -c 1 setpriv --reuid 65534 --clear-groups";
    let running = Endless::start_by(one, nobody, two)?;
    let stays = (|| {
        served_by(one, 1, 1, "before")?;
        one.sh("ferritectl handler priority 0 low-latency")?;
        steer(one, 1, 0)?;
        steer(one, 0, 1)?;
        served_by(one, 1, 0, "only one of low latency is there")?;
        one.sh("ferritectl handler priority 0 bulk")?;
        comes_to(one, 0, "it is a bulk one")?;
        served_by(one, 0, 1, "it is a bulk one")
    })();
    one.sh("ferritectl handler priority 0 bulk; ferritectl balance")?;
    let ended = running.end();
    stays?;
    ended?;
    still_works(cluster)
}

fn leaves(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    processors(one)?;
    let nobody = "taskset -c 1 setpriv --reuid 65534 --clear-groups";
    let running = Endless::start_by(one, nobody, two)?;
    let left = (|| {
        let priority = |priority| one.sh(&format!("ferritectl handler priority 1 {priority}"));
        served_by(one, 1, 1, "before")?;
        priority("low-latency")?;
        // Of those that do not arrive where it is.
        comes_to(one, 2 % processors(one)?, "its handler is marked")?;
        priority("bulk")?;
        comes_to(one, 1, "its handler is a bulk one again")?;
        served_by(one, 1, 1, "after it came back")?;
        // What root puts there stays, marked before or after.
        let queue = queue_of(one, PROGRAM)?;
        let cqn = &queue["cqn"];
        for marked in ["low-latency", "bulk"] {
            priority(marked)?;
            one.sh(&format!("ferritectl cq move {cqn} 1"))?;
            priority("low-latency")?;
            served_by(one, 1, 1, "root put it there")?;
            one.sh(&format!("ferritectl cq move {cqn} local"))?;
            let now = queue_of(one, PROGRAM)?;
            ensure!(now["handler"] != 1, "nobody put it there: {now}");
        }
        Ok(())
    })();
    one.sh("ferritectl handler priority 1 bulk; ferritectl balance")?;
    let ended = running.end();
    left?;
    ended?;
    still_works(cluster)
}

fn several(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let last = processors(one)? - 1;
    ensure!(last > 1, "{last} other processors");
    let running = Endless::start_by(one, &format!("taskset -c {last}"), two)?;
    let follows = (|| {
        served_by(one, last, last, "before")?;
        // Another one arrives there too: the queue has no reason to move.
        steer(one, 0, last)?;
        served_by(one, last, last, "with another one there")?;
        // Its own goes, to one of several, once it is due: only its interrupts tell.
        steer_to(one, last, &format!("0-{}", last - 1))?;
        comes_to(one, 0, "its handler steered to several")?;
        served_by(one, 0, last, "its handler steered to several")
    })();
    one.sh("ferritectl balance")?;
    let ended = running.end();
    follows?;
    ended?;
    still_works(cluster)
}
