// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interrupts of bulk traffic are fewer where moderation adapts to it.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::growth::{event_queues, number};
use super::{nvme, VmTest};
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On machines with the driver loaded.
pub const TESTS: &[VmTest] = &[VmTest::new(
    "bulk reads of a disk take fewer interrupts where moderation adapts",
    disk,
)];

const TIME: Duration = Duration::from_secs(120);

/// Interrupts for each completion of bulk traffic, below which there is nothing to gain.
const ENOUGH: f64 = 0.1;

/// How often it is measured until it is so.
const MEASUREMENTS: usize = 3;

/// Interrupts of completion handlers, and completions that the kernel has consumed.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    interrupts: u64,
    completions: u64,
}

impl Sample {
    /// What there was so far.
    pub fn take(vm: &Vm) -> Result<Self> {
        let mut interrupts = 0;
        for (eqn, row) in event_queues(vm)? {
            if eqn >= 2 {
                interrupts += number(&row, "interrupts")?;
            }
        }
        let consumed = vm.sh(
            "awk 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"consumed\") column = i; next }
                  { sum += $column } END { print sum + 0 }' /sys/kernel/debug/ferrite0/cqs",
        )?;
        Ok(Self {
            interrupts,
            completions: consumed.trim().parse().context("completions")?,
        })
    }

    /// What there was in between.
    pub fn since(self, before: Self) -> Self {
        Self {
            interrupts: self.interrupts - before.interrupts,
            completions: self.completions - before.completions,
        }
    }

    /// Interrupts for a completion.
    pub fn rate(self) -> f64 {
        self.interrupts as f64 / self.completions as f64
    }
}

/// Sets whether moderation adapts to the traffic.
pub fn set_adaptive(vm: &Vm, adaptive: bool) -> Result<()> {
    let word = if adaptive { "on" } else { "off" };
    vm.sh(&format!(
        "set -e
         rdma dev set ferrite0 adaptive-moderation {word}
         rdma -d dev show ferrite0 | grep -q 'adaptive-moderation {word}'"
    ))?;
    Ok(())
}

/// Reads the disk with as many requests at a time as it takes, and one after the other; gives what there
/// was in the first case, and how long one takes in the second.
fn read(vm: &Vm) -> Result<(Sample, Duration)> {
    let bulk = "dd if=/dev/nvme0n1 of=/dev/null bs=2M iflag=direct status=none";
    let single = "dd if=/dev/nvme0n1 of=/dev/null bs=4k count=500 iflag=direct status=none";
    // It takes a while to find out what is best.
    vm.sh_in(&format!("{bulk}; {bulk}"), TIME)?;
    let before = Sample::take(vm)?;
    vm.sh_in(bulk, TIME)?;
    let bulk = Sample::take(vm)?.since(before);
    vm.sh_in(single, TIME)?;
    let start = Instant::now();
    vm.sh_in(single, TIME)?;
    Ok((bulk, start.elapsed() / 500))
}

fn measure(one: &Vm, two: &Vm, adaptive: bool) -> Result<Sample> {
    set_adaptive(one, adaptive)?;
    nvme::connect(one, two)?;
    let result: Result<_> = (|| {
        one.wait_for("test -b /dev/nvme0n1", TIME)?;
        // Many small requests instead of a few large ones.
        one.sh("echo 4 >/sys/block/nvme0n1/queue/max_sectors_kb")?;
        let (bulk, single) = read(one)?;
        println!("          adaptive {adaptive}: {bulk:?}, {single:?} for a single read");
        Ok(bulk)
    })();
    let end = nvme::disconnect(one);
    let result = result?;
    end?;
    Ok(result)
}

fn disk(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    nvme::serve(two)?;
    let result: Result<()> = (|| {
        let mut seen = Vec::new();
        // What a machine does besides may make one of the two slower, and have fewer interrupts for that.
        for _ in 0..MEASUREMENTS {
            let plain = measure(one, two, false)?;
            let adaptive = measure(one, two, true);
            set_adaptive(one, false)?;
            let adaptive = adaptive?;
            for sample in [plain, adaptive] {
                ensure!(
                    sample.completions > 2000,
                    "only {} completions: this measures nothing",
                    sample.completions
                );
            }
            // A machine that is busy with other things is late by itself, and needs no moderation for that.
            if plain.rate() < ENOUGH {
                println!(
                    "  note    few interrupts without moderation: it is not seen to do anything"
                );
            }
            // One with a sanitiser has few completions in the time in which it is found out what is best.
            if adaptive.rate() < ENOUGH || adaptive.rate() < plain.rate() || one.patience() > 1 {
                return Ok(());
            }
            seen.push((adaptive, plain));
        }
        bail!("with and without moderation: {seen:?}");
    })();
    let end = nvme::end(two);
    result?;
    end
}
