// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes from one function of an adapter to another, beside memcpy.
//!
//! Both machines have the one device process, which copies what one writes into the other from memory to
//! memory. So the goals are shares of what the machine copies at all.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::machines::{Driver, Line};
use super::{processes, Plan, Run};
use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel::Kernel;
use crate::process::check_interrupted;
use crate::shell::LOAD_DRIVER;
use crate::tests::wait_active;
use crate::traffic::wait_listening;

/// What there is.
pub const PART: &str = "adapter";

/// Bytes of a write.
pub const SIZE: u64 = 1 << 20;

/// A test, the mebibytes that it goes through, what is said of it, and the share of memcpy that is wanted.
pub const WORKS: [(&str, u64, &str, f64); 2] = [
    ("adapter_write_same", 1, "one MiB over and over", 0.5),
    (
        "adapter_write_many",
        processes::MANY as u64,
        "many MiB",
        0.95,
    ),
];

const PATIENCE: Duration = Duration::from_secs(120);

/// What was measured: bytes a second, packets that were sent again, and nanoseconds of the device's
/// processor time for each byte, which depend less on what else the machine does.
struct Measured {
    speed: f64,
    again: u64,
    processor: f64,
}

/// Two machines with a function each.
pub struct Machines {
    cluster: Cluster,
}

impl Machines {
    /// Boots them.
    pub fn boot(run: &RunDir, kernel: &Kernel, modules: &[PathBuf]) -> Result<Self> {
        let options = Options {
            cpus: 1,
            only_card: true,
            one_adapter: true,
            ..Options::pair(PART, modules.to_vec())
        };
        let cluster = Cluster::boot(run, kernel, &options)?;
        for vm in &cluster.vms {
            vm.sh(LOAD_DRIVER)?;
            wait_active(vm)?;
        }
        Ok(Self { cluster })
    }

    /// Findings of the kernels.
    pub fn findings(&self) -> Vec<String> {
        self.cluster.new_findings()
    }

    /// Something that the function of a machine has counted.
    fn count(&self, vm: usize, of: &str, what: &str) -> Result<u64> {
        let count = &self.cluster.counters(vm)?[of][what];
        let count = count.as_u64();
        count.with_context(|| format!("the device does not count {what}"))
    }

    /// Bytes that the second machine's function has copied from the first one's memory, packets that
    /// the first one's has sent again, and the processor time of both.
    fn counts(&self) -> Result<[u64; 3]> {
        let process = self.cluster.device_pid(1).context("no device process")?;
        Ok([
            self.count(2, "dma", "direct_bytes")?,
            self.count(1, "engine", "retransmissions")?,
            processes::processor_time(process),
        ])
    }

    /// Writes through so many mebibytes.
    fn write(&self, span: u64, plan: &Plan) -> Result<Measured> {
        let (one, two) = self.cluster.two()?;
        let (address, port) = (Driver::Ferrite.address(2), Driver::Ferrite.port());
        let serving = two.spawn(
            &format!("exec /ferrite/bin/verbs-bench serve --rdma {address} --port {port}"),
            PATIENCE,
        )?;
        wait_listening(two, port)?;
        let before = self.counts()?;
        let said = one.sh_in(
            &format!(
                "exec /ferrite/bin/verbs-bench run --rdma {address} --control {address} --port {port} \
                 --ms {} --span {span} write_span:{SIZE}",
                // The machines have less than a processor each.
                4 * plan.milliseconds
            ),
            PATIENCE,
        );
        serving.end()?;
        let line: Line = serde_json::from_str(said?.trim()).context("no result")?;
        let bytes = line.count * SIZE;
        let after = self.counts()?;
        let [direct, again, time] = [0, 1, 2].map(|which| after[which] - before[which]);
        ensure!(
            direct >= bytes / 100 * 99,
            "of {bytes} bytes {direct} went from memory to memory"
        );
        Ok(Measured {
            speed: bytes as f64 / line.seconds,
            again,
            processor: time as f64 / direct as f64,
        })
    }
}

/// One round.
pub fn round(machines: &Machines, plan: &Plan, run: &mut Run) -> Result<()> {
    let mib = f64::from(1 << 20);
    let memcpy = processes::memcpy_speed();
    for ((test, span, words, _), memcpy) in WORKS.into_iter().zip([memcpy.0, memcpy.1]) {
        check_interrupted()?;
        run.progress(&format!("adapter: writes through {words}"));
        match machines.write(span, plan) {
            Ok(measured) => {
                let again = measured.again as f64;
                let time = measured.processor * mib / 1000.0;
                for (what, unit, value) in [
                    ("retransmissions", "packets", again),
                    ("processor", "us/MiB", time),
                ] {
                    let test = format!("{test}_{what}");
                    let unit = (unit, false);
                    run.results
                        .add(Driver::Ferrite, &test, (SIZE, 1), unit, value);
                }
                let both = [(Driver::Ferrite, measured.speed), (Driver::Memcpy, memcpy)];
                for (driver, speed) in both {
                    let unit = ("MiB/s", true);
                    run.results.add(driver, test, (SIZE, 1), unit, speed / mib);
                }
            }
            Err(error) => run.miss(&format!("writes through {words}"), &error),
        }
    }
    Ok(())
}
