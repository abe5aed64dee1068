// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether a message costs the same however many objects there are, and what these take.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::machines::{Driver, Machines, Serving};
use super::processes::{forget_peak, usage};
use super::{Plan, Run};
use crate::process::check_interrupted;

/// Long enough for the largest number of objects.
const PATIENCE: Duration = Duration::from_secs(400);

/// Measures; gives what is to be known of limits.
pub fn run<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    run: &mut Run,
) -> Result<Vec<String>> {
    let mut notes = vec![limits(machines)?];
    for object in ["cq", "qp", "mr"] {
        memory(machines, serving, object, plan.objects, run)
            .unwrap_or_else(|error| run.miss(&format!("memory of a {object}"), &error));
    }
    // Up and down again, so that a machine that gets slower does not look like a slope.
    let both_ways = |sizes: &[u64]| -> Vec<u64> {
        let (last, rest) = sizes
            .split_last()
            .map_or((None, sizes), |(l, r)| (Some(*l), r));
        rest.iter()
            .copied()
            .chain(last)
            .chain(rest.iter().rev().copied())
            .collect()
    };
    for qps in both_ways(&plan.scale_qps) {
        check_interrupted()?;
        let arguments = format!("--clone --qps {qps} --ms 300 write_bw:64");
        let test = ("scale_qps", "queue pairs");
        one(serving, test, qps, &arguments, run, &mut notes);
    }
    let mut slow = None;
    for regions in both_ways(&plan.scale_regions) {
        check_interrupted()?;
        if slow.is_some_and(|least| regions >= least) {
            continue;
        }
        let start = Instant::now();
        let arguments = format!("--ms 300 regions:{regions}");
        let test = ("scale_regions", "regions");
        let good = one(serving, test, regions, &arguments, run, &mut notes);
        // Once is enough of what takes minutes.
        if !good || start.elapsed() > Duration::from_secs(60) {
            slow = Some(regions);
        }
    }
    Ok(notes)
}

fn one(
    serving: &mut Serving<'_>,
    (test, what): (&str, &str),
    number: u64,
    arguments: &str,
    run: &mut Run,
    notes: &mut Vec<String>,
) -> bool {
    run.progress(&format!("{number} {what}"));
    let measured = serving
        .measure(Driver::Ferrite, arguments, PATIENCE)
        .and_then(|lines| lines.into_iter().next().context("no result"));
    match measured {
        Ok(line) => {
            let each = line.seconds / line.count as f64 * 1e6;
            run.results.add(
                Driver::Ferrite,
                test,
                (64, number),
                ("us/message", false),
                each,
            );
            true
        }
        Err(error) => {
            let why = format!("{error:#}");
            let why = why.lines().last().unwrap_or_default().to_owned();
            println!("      {number} {what}: {why}");
            notes.push(format!("{number} {what}: {why}"));
            false
        }
    }
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
    run.progress(&format!("memory of {count} {object}s"));
    let pid = machines
        .cluster
        .device_pid(1)
        .context("no device process")?;
    forget_peak(pid);
    let before = usage(pid)?;
    let arguments = format!("--qps 1 memory_{object}:{count}");
    let lines = serving.measure(Driver::Ferrite, &arguments, PATIENCE)?;
    let line = lines.first().context("no result")?;
    let grown = usage(pid)?.peak.saturating_sub(before.resident);
    let per = |bytes: u64| bytes as f64 / line.count as f64;
    let key = (0, count);
    let unit = ("bytes", false);
    let test = |place: &str| format!("memory_{object}_{place}");
    run.results
        .add(Driver::Ferrite, &test("guest"), key, unit, per(line.bytes));
    run.results
        .add(Driver::Ferrite, &test("device"), key, unit, per(grown));
    run.results.add(
        Driver::Ferrite,
        &format!("create_{object}"),
        key,
        ("/s", true),
        line.count as f64 / line.seconds,
    );
    Ok(())
}
