// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the time of a message goes into: processor time of every process it passes through, and
//! the functions the device processes were found in.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

use super::difference;
use super::machines::{Driver, Machines};
use super::processes::{functions, sample, usage};
use crate::artifacts::program;

/// How long each kind of traffic runs.
const TIME: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures some kinds of traffic; gives tables as text.
pub fn run(machines: &Machines) -> Result<String> {
    let mut text = String::new();
    for (what, test) in [
        ("64 B sends, one queue pair, a stream", "send_bw:64"),
        ("64 B sends, one at a time", "send_lat:64"),
        ("64 KiB writes, a stream", "write_bw:65536"),
        ("1 MiB writes, a stream", "write_bw:1048576"),
    ] {
        one(machines, what, test, &mut text)?;
    }
    Ok(text)
}

fn one(machines: &Machines, what: &str, test: &str, text: &mut String) -> Result<()> {
    let arguments = format!("--ms {} --wait spin {test}", TIME.as_millis());
    let cluster = &machines.cluster;
    let mut processes = Vec::new();
    for vm in [1, 2] {
        if let Some(pid) = cluster.device_pid(vm) {
            processes.push((format!("device {vm}"), pid));
        }
    }
    if let Some(pid) = cluster.fabric_pid() {
        processes.push(("fabric".to_owned(), pid));
    }
    for vm in &cluster.vms {
        processes.push((format!("QEMU of {}", vm.name()), vm.pid()));
    }
    let mut before = Vec::new();
    for (_, pid) in &processes {
        before.push(usage(*pid)?);
    }
    let counters = cluster.counters(1)?;
    let start = Instant::now();
    machines.measure(Driver::Ferrite, &arguments, PATIENCE)?;
    let wall = start.elapsed().as_secs_f64();
    let counted = difference(&cluster.counters(1)?, &counters);
    let number = |path: &str| counted.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    let packets = number("/engine/tx_packets") + number("/engine/rx_packets");
    let _ = writeln!(
        text,
        "{what} ({wall:.1} s, {packets:.0} packets of device 1)"
    );
    let _ = writeln!(
        text,
        "  {:<12} {:>8} {:>8} {:>14} {:>16} {:>12}",
        "process", "user %", "system %", "us per packet", "waits per packet", "preempted/s"
    );
    for ((name, pid), before) in processes.iter().zip(before) {
        let used = usage(*pid)? - before;
        let _ = writeln!(
            text,
            "  {name:<12} {:>8.1} {:>8.1} {:>14.2} {:>16.2} {:>12.0}",
            used.user / wall * 100.0,
            used.system / wall * 100.0,
            (used.user + used.system) * 1e6 / packets.max(1.0),
            used.waits as f64 / packets.max(1.0),
            used.preempted as f64 / wall
        );
    }
    for (name, path) in [
        ("DMA reads", "/dma/reads"),
        ("DMA writes", "/dma/writes"),
        ("register writes", "/engine/register_writes"),
        ("send doorbells", "/mmio/sq_doorbell/writes"),
        ("receive doorbells", "/mmio/rq_doorbell/writes"),
        ("completion doorbells", "/mmio/cq_doorbell/writes"),
        ("interrupts", "/interrupts/total"),
        ("retransmissions", "/engine/retransmissions"),
    ] {
        let _ = writeln!(
            text,
            "  {:.3} {name} per packet",
            number(path) / packets.max(1.0)
        );
    }
    // Once more for the functions: looking at a process takes time from it.
    let stop = AtomicBool::new(false);
    let (sampled, measured) = std::thread::scope(|scope| {
        let threads: Vec<_> = processes[..2]
            .iter()
            .map(|(name, pid)| (name, *pid, scope.spawn(|| sample(*pid, &stop))))
            .collect();
        let measured = machines.measure(Driver::Ferrite, &arguments, PATIENCE);
        stop.store(true, Ordering::Relaxed);
        let sampled: Vec<_> = threads
            .into_iter()
            .filter_map(|(name, pid, thread)| Some((name, pid, thread.join().ok()?)))
            .collect();
        (sampled, measured)
    });
    measured?;
    for (name, pid, samples) in sampled {
        let _ = writeln!(
            text,
            "  {name}: a thread was running in {:.0} % of {} looks; then in",
            samples.running as f64 / samples.looks.max(1) as f64 * 100.0,
            samples.looks
        );
        for (function, share) in functions(pid, &program("ferrite-device"), &samples)
            .iter()
            .take(14)
        {
            let _ = writeln!(text, "    {:>5.1} %  {function}", share * 100.0);
        }
    }
    text.push('\n');
    Ok(())
}
