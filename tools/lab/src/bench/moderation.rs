// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What moderation saves and what it costs: interrupts for a completion, and the time until a
//! completion is taken, the more is under way. Two consumers are looked at: a program that polls
//! before it sleeps, and a disk of the kernel's, whose completions are each waited for.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use super::machines::{Driver, Line, Machines, Serving};
use super::{Plan, Run};
use crate::process::check_interrupted;
use crate::tests::moderation::{set_adaptive, Sample};
use crate::tests::nvme;
use crate::vm::Vm;

/// Connections that the messages are spread over; they share a completion queue.
const QPS: u64 = 8;
/// Completions and microseconds that an event waits for, where both are given.
const COUNT_AND_TIME: (u16, u16) = (16, 64);

/// How events wait for company.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moderation {
    /// Not at all.
    Off,
    /// By [`COUNT_AND_TIME`], as a program wants its completion queue.
    CountAndTime,
    /// As the driver finds best for its handler.
    Adaptive,
}

impl Moderation {
    /// All, in the order of a round.
    pub const ALL: [Self; 3] = [Self::Off, Self::CountAndTime, Self::Adaptive];

    /// In names of tests.
    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::CountAndTime => "count",
            Self::Adaptive => "adaptive",
        }
    }

    /// In plots.
    pub fn words(self) -> String {
        let (count, microseconds) = COUNT_AND_TIME;
        match self {
            Self::Off => "off".into(),
            Self::CountAndTime => format!("{count} or {microseconds} us"),
            Self::Adaptive => "adaptive".into(),
        }
    }

    /// The test of a measure.
    pub fn test(self, measure: &str) -> String {
        format!("moderation_{}_{measure}", self.name())
    }

    fn arguments(self) -> String {
        let (count, microseconds) = COUNT_AND_TIME;
        match self {
            Self::CountAndTime => format!("--moderation {count}:{microseconds}"),
            Self::Off | Self::Adaptive => String::new(),
        }
    }
}

/// What is drawn, with its unit.
pub const MEASURES: [(&str, &str); 3] = [
    ("interrupts", "/completion"),
    ("latency", "us"),
    ("late", "us"),
];

/// The values of a line, in the order of [`MEASURES`].
fn values(line: &Line) -> Result<[f64; 3]> {
    ensure!(line.count > 0 && line.median_us > 0.0, "nothing was done");
    Ok([
        line.interrupts as f64 / line.count as f64,
        line.median_us,
        line.late_us,
    ])
}

/// A round: all loads with each kind of moderation.
pub fn round<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    run: &mut Run,
) -> Result<()> {
    for moderation in Moderation::ALL {
        check_interrupted()?;
        run.progress(&format!("moderation: {}", moderation.words()));
        set_adaptive(machines.client()?, moderation == Moderation::Adaptive)?;
        let measured = loads(serving, plan, moderation);
        set_adaptive(machines.client()?, false)?;
        match measured {
            Ok(lines) => note(&lines, moderation, run)?,
            Err(error) => run.miss(&format!("moderation {}", moderation.name()), &error),
        }
    }
    Ok(())
}

/// Blocks of the disk that are read at a time.
const AT_A_TIME: [u64; 5] = [1, 4, 16, 64, 256];
/// KiB of a block.
const BLOCK: u64 = 4;
/// Blocks that are read in all, half of the disk.
const BLOCKS: u64 = 2048;

/// What is drawn of the disk, with its unit.
pub const DISK_MEASURES: [(&str, &str); 2] = [("interrupts", "/completion"), ("latency", "us")];

impl Moderation {
    /// Those that a disk of the kernel's can have: nobody but the driver sets how its queues wait.
    pub const OF_A_DISK: [Self; 2] = [Self::Off, Self::Adaptive];

    /// The test of a measure of the disk.
    pub fn disk_test(self, measure: &str) -> String {
        format!("disk_{}_{measure}", self.name())
    }
}

/// A round: a disk over NVMe-oF of which more and more blocks are read at a time.
pub fn disk_round(machines: &Machines, run: &mut Run) -> Result<()> {
    let (host, target) = machines.cluster.two()?;
    nvme::serve(target)?;
    for moderation in Moderation::OF_A_DISK {
        check_interrupted()?;
        run.progress(&format!("moderation: {}, a disk", moderation.words()));
        // It concerns completion queues that are made afterwards.
        set_adaptive(host, moderation == Moderation::Adaptive)?;
        nvme::connect(host, target)?;
        for blocks in AT_A_TIME {
            match disk(host, blocks) {
                Ok(values) => {
                    for ((measure, unit), value) in DISK_MEASURES.into_iter().zip(values) {
                        let (test, key) = (moderation.disk_test(measure), (BLOCK << 10, blocks));
                        run.results
                            .add(Driver::Ferrite, &test, key, (unit, false), value);
                    }
                }
                Err(error) => run.miss(&format!("{blocks} blocks of a disk"), &error),
            }
        }
        nvme::disconnect(host)?;
        set_adaptive(host, false)?;
    }
    nvme::end(target)
}

/// Interrupts for a completion, and microseconds until all blocks of a read are there, in the order of
/// [`DISK_MEASURES`].
fn disk(vm: &Vm, blocks: u64) -> Result<[f64; 2]> {
    const TIME: Duration = Duration::from_secs(120);
    vm.wait_for("test -b /dev/nvme0n1", TIME)?;
    // A request for each block, whatever is read at a time.
    vm.sh(&format!(
        "echo {BLOCK} >/sys/block/nvme0n1/queue/max_sectors_kb"
    ))?;
    let reads = BLOCKS / blocks;
    let read = format!(
        "dd if=/dev/nvme0n1 of=/dev/null bs={}k count={reads} iflag=direct status=none",
        blocks * BLOCK
    );
    // It takes a while to find out what is best.
    vm.sh_in(&format!("{read}; {read}"), TIME)?;
    let before = Sample::take(vm)?;
    let start = Instant::now();
    vm.sh_in(&read, TIME)?;
    let time = start.elapsed();
    let rate = Sample::take(vm)?.since(before).rate();
    ensure!(rate.is_finite(), "nothing was read");
    Ok([rate, time.as_secs_f64() * 1e6 / reads as f64])
}

fn loads(serving: &mut Serving<'_>, plan: &Plan, moderation: Moderation) -> Result<Vec<Line>> {
    // One after the other comes first: of so many interrupts the driver notices that moderation does
    // not adapt any more.
    let tests: Vec<String> = plan.loads.iter().map(|n| format!("load:{n}")).collect();
    let arguments = format!(
        "--clone --qps {QPS} --ms {} {} {}",
        plan.milliseconds,
        moderation.arguments(),
        tests.join(" ")
    );
    let lines = serving.measure(Driver::Ferrite, &arguments, Duration::from_secs(200))?;
    ensure!(lines.len() == tests.len(), "{} results", lines.len());
    Ok(lines)
}

fn note(lines: &[Line], moderation: Moderation, run: &mut Run) -> Result<()> {
    for line in lines {
        let values = values(line).with_context(|| format!("{} under way", line.size))?;
        for ((measure, unit), value) in MEASURES.into_iter().zip(values) {
            // What was under way has the place of connections.
            let (test, key) = (moderation.test(measure), (64, line.size));
            run.results
                .add(Driver::Ferrite, &test, key, (unit, false), value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_load_is_told_per_completion() {
        let text = r#"{"test":"load","size":64,"qps":8,"count":2000,"seconds":0.5,
                       "interrupts":500,"median_us":30.5,"late_us":80.0}"#;
        let line: Line = serde_json::from_str(text).expect("a line");
        assert_eq!(values(&line).expect("values"), [0.25, 30.5, 80.0]);
        let nothing = Line { count: 0, ..line };
        assert!(values(&nothing).is_err());
    }

    #[test]
    fn each_kind_has_tests_and_words_of_its_own() {
        for (n, one) in Moderation::ALL.into_iter().enumerate() {
            for other in &Moderation::ALL[n + 1..] {
                assert_ne!(one.test("latency"), other.test("latency"));
                assert_ne!(one.words(), other.words());
            }
        }
        assert_eq!(
            Moderation::CountAndTime.arguments(),
            "--moderation 16:64",
            "what verbs-bench reads"
        );
    }
}
