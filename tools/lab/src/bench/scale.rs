// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether a message costs the same however many objects there are, and what these take.
//!
//! What a message costs is counted between the markers of `verbs-bench`: guest instructions by
//! QEMU, accesses to memory and doorbells by the device, and the device's processor time. There are
//! two spans for each number of objects, and the difference between them belongs to the messages
//! that the second has more.
//!
//! Completions by events are looked at the same way, with more and more handlers: each in a thread
//! on the processor that its vector interrupts, and all of them on one vector for comparison. The wire
//! is a long one there, so that every thread sleeps until its event: without that it is chance who
//! finds the completion before it sleeps, and most of what is counted is the scheduler's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};

use super::goals::STREAM;
use super::machines::{Counted, Driver, Line, Machines, Serving};
use super::processes::processor_time;
use super::results::median;
use super::{difference, Plan, Run};
use crate::process::check_interrupted;

/// Long enough for the largest number of objects.
const PATIENCE: Duration = Duration::from_secs(900);
/// Messages of each queue pair where many stream, on average: enough for shares to be told to two of a hundred.
const OF_EACH: u64 = 64;
/// Queue pairs that complete at each handler, in turn.
const QPS_OF_A_HANDLER: u64 = 8;
/// Milliseconds that a frame takes where events are waited for: some times what it takes a thread to
/// go to sleep.
const LONG_WIRE: f64 = 1.0;
/// How often to look whether a span has begun or ended; spans are much longer.
const LOOK: Duration = Duration::from_millis(1);

/// What is read when a span begins and when it ends.
#[derive(Debug, Clone)]
struct Sample {
    /// Nanoseconds of both device processes.
    processor: u64,
    /// The counters of the first device.
    counters: Value,
    /// What the plugin of the first VM has counted so far.
    guest: Counted,
}

/// What was between two markers.
#[derive(Debug, Clone)]
struct Span {
    begin: Sample,
    end: Sample,
}

impl Span {
    fn processor(&self) -> f64 {
        self.end.processor.saturating_sub(self.begin.processor) as f64
    }

    fn instructions(&self) -> f64 {
        let counted = self.end.guest - self.begin.guest;
        (counted.user + counted.kernel) as f64
    }

    fn kernel(&self) -> f64 {
        (self.end.guest - self.begin.guest).kernel as f64
    }

    fn modules(&self) -> f64 {
        (self.end.guest - self.begin.guest).modules as f64
    }

    /// Bytes of memory that the first device process has in use, beyond what it had.
    fn grown(&self, before: &Value) -> f64 {
        let bytes = |counters: &Value| counters["heap_bytes"].as_f64().unwrap_or(0.0);
        (bytes(&self.begin.counters) - bytes(before)).max(0.0)
    }

    fn counter(&self, path: &str) -> f64 {
        let counted = difference(&self.end.counters, &self.begin.counters);
        counted.pointer(path).and_then(Value::as_f64).unwrap_or(0.0)
    }
}

fn sample(machines: &Machines) -> Result<Sample> {
    let pids = [1, 2].map(|vm| machines.cluster.device_pid(vm));
    let [Some(first), Some(second)] = pids else {
        bail!("a device process is gone");
    };
    Ok(Sample {
        processor: processor_time(first) + processor_time(second),
        counters: machines.cluster.counters(1)?,
        guest: machines.counted_so_far(1)?,
    })
}

/// Samples at each marker until told to stop.
fn watch(machines: &Machines, stop: &AtomicBool) -> Result<Vec<Span>> {
    let (mut seen, _) = machines.spans(1)?;
    let mut begin = None;
    let mut spans = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (begun, ended) = machines.spans(1)?;
        if begun > seen && begin.is_none() {
            seen = begun;
            begin = Some(sample(machines)?);
        }
        if ended == seen {
            if let Some(begin) = begin.take() {
                let end = sample(machines)?;
                spans.push(Span { begin, end });
            }
        }
        std::thread::sleep(LOOK);
    }
    Ok(spans)
}

/// Runs one test; gives its line and the spans in it.
fn measure(
    machines: &Machines,
    serving: &mut Serving<'_>,
    arguments: &str,
) -> Result<(Line, Vec<Span>)> {
    let stop = AtomicBool::new(false);
    let (lines, spans) = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch(machines, &stop));
        let lines = serving.measure(Driver::Ferrite, arguments, PATIENCE);
        stop.store(true, Ordering::Relaxed);
        (lines, watching.join())
    });
    let line = lines?.into_iter().next().context("no result")?;
    let spans = spans.map_err(|_| anyhow::anyhow!("the watching thread is gone"))??;
    Ok((line, spans))
}

/// What [`run`] consists of.
pub const PARTS: [&str; 4] = [
    "scale-objects",
    "scale-qps",
    "scale-streams",
    "scale-regions",
];

/// Measures the parts that are wanted; gives what is to be known of limits.
pub fn run<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    wanted: impl Fn(&str) -> bool,
    run: &mut Run,
) -> Result<Vec<String>> {
    let [objects, over_qps, over_streams, over_regions] = PARTS.map(wanted);
    let only = |wanted: bool, sizes: Vec<u64>| if wanted { sizes } else { Vec::new() };
    let mut notes = vec![limits(machines)?];
    for (object, count) in ["cq", "mr", "qp"].into_iter().zip(plan.objects) {
        if !objects {
            break;
        }
        memory(machines, serving, object, count, run)
            .unwrap_or_else(|error| run.miss(&format!("memory of a {object}"), &error));
    }
    for qps in only(over_qps, both_ways(&plan.scale_qps)) {
        let messages = plan.scale_messages.max(4 * qps);
        let arguments = format!("--clone --qps {qps} --ms 300 --messages {messages} scale_qps:64");
        one(
            machines,
            serving,
            ("qps", qps),
            (&arguments, messages),
            run,
            &mut notes,
        )?;
    }
    for qps in only(over_streams, plan.stream_qps.clone()) {
        streams(machines, serving, qps, run)
            .unwrap_or_else(|error| run.miss(&format!("streams over {qps} QPs"), &error));
    }
    // Once is enough of what takes long, and of what fails.
    let mut enough = Vec::new();
    for regions in only(over_regions, both_ways(&plan.scale_regions)) {
        if enough.contains(&regions) {
            continue;
        }
        let start = Instant::now();
        let messages = plan.scale_messages;
        let arguments = format!("--ms 300 --messages {messages} scale_regions:{regions}");
        let test = ("regions", regions);
        let good = one(
            machines,
            serving,
            test,
            (&arguments, messages),
            run,
            &mut notes,
        )?;
        if !good || start.elapsed() > Duration::from_secs(20) {
            enough.push(regions);
        }
    }
    Ok(notes)
}

/// Up and down again, so that a machine that gets slower does not look like a slope; the largest
/// once, as it takes longest.
fn both_ways(sizes: &[u64]) -> Vec<u64> {
    let rest = &sizes[..sizes.len().saturating_sub(1)];
    sizes.iter().chain(rest.iter().rev()).copied().collect()
}

fn one(
    machines: &Machines,
    serving: &mut Serving<'_>,
    (what, number): (&str, u64),
    (arguments, messages): (&str, u64),
    run: &mut Run,
    notes: &mut Vec<String>,
) -> Result<bool> {
    check_interrupted()?;
    run.progress(&format!("{number} {what}"));
    let before = machines.cluster.counters(1)?;
    let (line, spans) = match measure(machines, serving, arguments) {
        Ok(measured) => measured,
        Err(error) => {
            let why = format!("{error:#}");
            let why = why.lines().last().unwrap_or_default().to_owned();
            println!("      {number} {what}: {why}");
            notes.push(format!("{number} {what}: {why}"));
            return Ok(false);
        }
    };
    let key = (64, number);
    let test = |measure: &str| format!("scale_{what}{measure}");
    let mut add = |measure: &str, unit: &'static str, value: f64| {
        run.results
            .add(Driver::Ferrite, &test(measure), key, (unit, false), value);
    };
    add("", "us/message", line.seconds / line.count as f64 * 1e6);
    if let [short, long] = &spans[..] {
        let messages = (messages - messages / 4) as f64;
        let per = |of: &dyn Fn(&Span) -> f64| ((of(long) - of(short)) / messages).max(0.0);
        add("_device", "us/message", per(&Span::processor) / 1000.0);
        // All that the guest does counts: what it did beside may be more than the difference.
        match per(&Span::instructions) {
            count if count > 0.0 => {
                add("_instructions", "/message", count);
                let user = |span: &Span| span.instructions() - span.kernel();
                add("_user", "/message", per(&user));
            }
            _ => notes.push(format!(
                "{number} {what}: no count of instructions, other work disturbed it"
            )),
        }
        for (name, path) in [
            ("_dma_reads", "/dma/reads"),
            ("_dma_writes", "/dma/writes"),
            ("_doorbells", "/mmio/sq_doorbell/writes"),
        ] {
            add(name, "/message", per(&|span| span.counter(path)));
        }
    } else {
        notes.push(format!("{number} {what}: {} spans, not two", spans.len()));
    }
    if line.made_seconds > 0.0 {
        let objects = number as f64;
        run.results.add(
            Driver::Ferrite,
            "scale_regions_made",
            key,
            ("/s", true),
            objects / line.made_seconds,
        );
        // Of a few regions nothing can be seen.
        if let (Some(span), true) = (spans.first(), number >= 10_000) {
            let device = span.grown(&before) / objects;
            for (place, bytes) in [("guest", line.bytes as f64 / objects), ("device", device)] {
                run.results.add(
                    Driver::Ferrite,
                    &format!("memory_mr_{place}"),
                    (0, number),
                    ("bytes", false),
                    bytes,
                );
            }
        }
    }
    Ok(true)
}

/// What a completion costs that comes by an event, over the number of handlers.
pub fn handlers<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    run: &mut Run,
) -> Result<()> {
    let wire = json!({"cmd": "faults", "only": "roce", "delay": LONG_WIRE});
    machines.cluster.fabric_command(&wire)?;
    let up = plan.handlers.iter();
    let up_and_down: Vec<u64> = up.clone().chain(up.rev()).copied().collect();
    let rounds = up_and_down.len() * plan.count_rounds;
    for handlers in up_and_down.into_iter().cycle().take(rounds) {
        for one_vector in [false, true] {
            check_interrupted()?;
            let vectors = if one_vector { 1 } else { handlers };
            run.progress(&format!("{handlers} handlers on {vectors} vectors"));
            handlers_on(machines, serving, plan, (handlers, one_vector), run).unwrap_or_else(
                |error| run.miss(&format!("{handlers} handlers on {vectors} vectors"), &error),
            );
        }
    }
    Ok(())
}

fn handlers_on(
    machines: &Machines,
    serving: &mut Serving<'_>,
    plan: &Plan,
    (handlers, one_vector): (u64, bool),
    run: &mut Run,
) -> Result<()> {
    let messages = plan.scale_messages;
    // One more for rdma_cm, which the others are made beside.
    let qps = 1 + handlers * QPS_OF_A_HANDLER;
    let arguments = format!(
        "--clone --qps {qps} --ms 200 --messages {messages} --handlers {handlers}{} scale_handlers:64",
        if one_vector { " --one-vector" } else { "" }
    );
    let (line, spans) = measure(machines, serving, &arguments)?;
    let [short, long] = &spans[..] else {
        bail!("{} spans, not two", spans.len());
    };
    let more = (messages - messages / 4) as f64;
    let per = |of: &dyn Fn(&Span) -> f64| (of(long) - of(short)) / more;
    let which = if one_vector { "_one" } else { "" };
    for (name, value) in [
        ("instructions", per(&Span::instructions)),
        ("kernel", per(&Span::kernel)),
        ("modules", per(&Span::modules)),
        ("events", per(&|span| span.counter("/engine/events"))),
        ("interrupts", line.interrupts as f64 / messages as f64),
        ("busiest", line.interrupts_busiest as f64 / messages as f64),
    ] {
        if value <= 0.0 {
            bail!("no count of {name}");
        }
        let test = format!("scale_handlers{which}_{name}");
        let key = (64, handlers);
        let unit = ("/completion", false);
        run.results.add(Driver::Ferrite, &test, key, unit, value);
    }
    Ok(())
}

/// What queue pairs got through beside each other, by the mean of all.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shares {
    slowest: f64,
    median: f64,
    fastest: f64,
    /// The fastest by the slowest.
    fairness: f64,
}

impl Shares {
    /// From the messages of each. One with none is taken to have had half of one, which is more than it had.
    fn new(each: &[u64]) -> Option<Self> {
        let all: u64 = each.iter().sum();
        let (slowest, fastest) = (*each.iter().min()?, *each.iter().max()?);
        if all == 0 {
            return None;
        }
        let of_mean = |messages: f64| messages.max(0.5) * each.len() as f64 / all as f64;
        let middle = median(&each.iter().map(|each| *each as f64).collect::<Vec<_>>());
        let (slowest, fastest) = (of_mean(slowest as f64), of_mean(fastest as f64));
        Some(Self {
            slowest,
            median: of_mean(middle),
            fastest,
            fairness: fastest / slowest,
        })
    }
}

/// Long messages on many queue pairs that all want the wire at once: how fast they are together, what each got
/// through, and what got lost in queues of the device itself, which should be nothing.
fn streams(machines: &Machines, serving: &mut Serving<'_>, qps: u64, run: &mut Run) -> Result<()> {
    check_interrupted()?;
    run.progress(&format!("streams over {qps} QPs"));
    let before = machines.cluster.counters(1)?;
    let arguments = format!("--clone --qps {qps} --messages {OF_EACH} fair_write:{STREAM}");
    let lines = serving.measure(Driver::Ferrite, &arguments, PATIENCE)?;
    let line = lines.first().context("no result")?;
    let counted = difference(&machines.cluster.counters(1)?, &before);
    let counter = |path: &str| counted.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    let drops = counter("/shortcuts/tx_drops") + counter("/uplink/tx_drops");
    let speed = (line.count * STREAM) as f64 / line.seconds / f64::from(1 << 20);
    ensure!(line.each.len() as u64 == qps, "{} QPs", line.each.len());
    let shares = Shares::new(&line.each).context("nothing was sent")?;
    println!(
        "      {speed:.0} MiB/s, {drops:.0} dropped; by the mean of all the slowest {:.2}, the fastest {:.2}",
        shares.slowest, shares.fastest
    );
    let of_mean = ("of the mean", false);
    for (test, unit, value) in [
        ("stream_qps", ("MiB/s", true), speed),
        ("stream_qps_drops", ("frames", false), drops),
        (
            "stream_qps_timeouts",
            ("", false),
            counter("/engine/ack_timeouts"),
        ),
        (
            "stream_qps_again",
            ("packets", false),
            counter("/engine/retransmissions"),
        ),
        ("stream_qps_slowest", ("of the mean", true), shares.slowest),
        ("stream_qps_median", of_mean, shares.median),
        ("stream_qps_fastest", of_mean, shares.fastest),
        ("stream_qps_fairness", ("to one", false), shares.fairness),
    ] {
        run.results
            .add(Driver::Ferrite, test, (STREAM, qps), unit, value);
    }
    Ok(())
}

/// The limits that the device states.
fn limits(machines: &Machines) -> Result<String> {
    let text = machines.client()?.sh("ibv_devinfo -v -d ferrite0")?;
    let fields: Vec<String> = text
        .lines()
        .filter_map(|line| line.trim().split_once(':'))
        .filter(|(name, _)| matches!(*name, "max_qp" | "max_cq" | "max_mr" | "max_mr_size"))
        .map(|(name, value)| format!("{name} {}", value.trim()))
        .collect();
    Ok(format!("the device states: {}", fields.join(", ")))
}

/// Memory that objects take in the guest and in the device process.
fn memory(
    machines: &Machines,
    serving: &mut Serving<'_>,
    object: &str,
    count: u64,
    run: &mut Run,
) -> Result<()> {
    check_interrupted()?;
    run.progress(&format!("memory of {count} {object}s"));
    let before = machines.cluster.counters(1)?;
    // A queue pair takes what its rings take; these are the smallest that anybody would use.
    let arguments = format!("--qps 1 --shallow memory_{object}:{count}");
    let (line, spans) = measure(machines, serving, &arguments)?;
    let span = spans.first().context("nothing was noticed")?;
    let per = |bytes: f64| bytes / line.count as f64;
    let key = (0, count);
    let unit = ("bytes", false);
    let test = |place: &str| format!("memory_{object}_{place}");
    run.results.add(
        Driver::Ferrite,
        &test("guest"),
        key,
        unit,
        per(line.bytes as f64),
    );
    run.results.add(
        Driver::Ferrite,
        &test("device"),
        key,
        unit,
        per(span.grown(&before)),
    );
    run.results.add(
        Driver::Ferrite,
        &format!("create_{object}"),
        key,
        ("/s", true),
        line.count as f64 / line.seconds,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_comes_once_in_the_middle() {
        assert_eq!(both_ways(&[1, 10, 100]), [1, 10, 100, 10, 1]);
        assert_eq!(both_ways(&[7]), [7]);
        assert!(both_ways(&[]).is_empty());
    }

    #[test]
    fn shares_are_by_the_mean_and_none_is_nothing() {
        let shares = Shares::new(&[8, 12, 10, 10]).expect("some");
        assert_eq!((shares.slowest, shares.fastest), (0.8, 1.2));
        assert_eq!(shares.median, 1.0);
        assert!((shares.fairness - 1.5).abs() < 1e-9);
        let starved = Shares::new(&[0, 16]).expect("some");
        assert_eq!((starved.slowest, starved.fairness), (0.0625, 32.0));
        assert_eq!((Shares::new(&[]), Shares::new(&[0, 0])), (None, None));
    }

    #[test]
    fn a_span_is_what_was_between() {
        let sample = |processor, user, reads: u64| Sample {
            processor,
            counters: serde_json::json!({"dma": {"reads": reads}, "heap_bytes": 10 * reads}),
            guest: Counted {
                user,
                ..Counted::default()
            },
        };
        let span = Span {
            begin: sample(100, 7, 1),
            end: sample(400, 17, 6),
        };
        assert_eq!(span.processor(), 300.0);
        assert_eq!((span.instructions(), span.kernel()), (10.0, 0.0));
        assert_eq!(span.counter("/dma/reads"), 5.0);
        assert_eq!(span.grown(&serde_json::json!({"heap_bytes": 3})), 7.0);
        assert_eq!(span.counter("/dma/nothing"), 0.0);
    }
}
