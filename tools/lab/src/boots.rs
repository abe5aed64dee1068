// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether guests come up, each time: many boots, some at a time, and nothing else.

use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::artifacts;
use crate::cluster::{Cluster, Options as ClusterOptions, RunDir};
use crate::kernel::{self, Flavour, Kernel};
use crate::process::check_interrupted;
use crate::report::Report;
use crate::step::say;
use crate::vm::BootFailed;

/// Options of `boots`.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many boots in all.
    pub count: usize,
    /// How many machines at a time.
    pub at_a_time: usize,
    /// Virtual processors of each.
    pub cpus: usize,
    /// The kernel.
    pub flavour: Flavour,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// Begin no further boot after this long.
    pub at_most: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            count: 200,
            at_a_time: 4,
            cpus: 4,
            flavour: Flavour::Stock,
            kernel_args: String::new(),
            at_most: None,
        }
    }
}

/// The command: false when a boot failed.
pub fn run(options: &Options) -> Result<bool> {
    artifacts::build_fabric()?;
    crate::guest::image()?;
    let kernel = kernel::get(options.flavour)?;
    let mut report = Report::default();
    boots(options, &kernel, &mut report)?;
    report.close();
    Ok(report.good())
}

/// Boots machines without the device, and counts each.
pub fn boots(options: &Options, kernel: &Kernel, report: &mut Report) -> Result<()> {
    if options.at_a_time == 0 || options.at_a_time > 16 {
        bail!("between 1 and 16 machines can boot at a time");
    }
    let run = RunDir::new()?;
    let start = Instant::now();
    let (mut done, mut failed) = (0, 0);
    while done < options.count {
        check_interrupted()?;
        if options
            .at_most
            .is_some_and(|limit| start.elapsed() >= limit)
        {
            say(&format!("{done} boots are all that the time allowed"));
            break;
        }
        let vms = options.at_a_time.min(options.count - done);
        let portion = Instant::now();
        let dir = run.path().join(format!("boot-{done}"));
        let result = Cluster::boot_once(
            &dir,
            kernel,
            &ClusterOptions {
                vms,
                cpus: options.cpus,
                memory_mib: 512,
                device: false,
                kernel_args: options.kernel_args.clone(),
                ..ClusterOptions::pair("", Vec::new())
            },
        );
        done += vms;
        match result {
            Ok(cluster) => {
                drop(cluster);
                std::fs::remove_dir_all(&dir).context("removing what a boot left")?;
                for number in done - vms + 1..=done {
                    let name = format!("boot {number}, {} processors", options.cpus);
                    report.record(&name, portion.elapsed(), Ok(()));
                }
            }
            Err(error) => {
                failed += usize::from(error.is::<BootFailed>());
                let name = format!("one of boots {} to {done}", done - vms + 1);
                report.record(&name, portion.elapsed(), Err(error));
            }
        }
    }
    say(&format!(
        "{done} boots in {} s, {failed} times with a machine that hung or gave up",
        start.elapsed().as_secs()
    ));
    Ok(())
}
