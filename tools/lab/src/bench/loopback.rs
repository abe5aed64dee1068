// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Latency within one machine: a program's two queue pairs on one device.
//!
//! A machine with one processor and its device process, on two cores, so that each has one; and a single thread for
//! both ends, so that nothing in the guest is switched. What is left is the device: a doorbell, the message, and what
//! the guest sees of it in its memory.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::machines::{Driver, Line};
use super::{Plan, Run};
use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel::Kernel;
use crate::process::check_interrupted;
use crate::shell::LOAD_DRIVER;
use crate::tests::wait_active;
use crate::traffic::wait_listening;

/// What there is.
pub const PART: &str = "loopback";

const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a message.
const SIZE: u64 = 64;

/// One machine with its device.
pub struct Machine {
    cluster: Cluster,
}

impl Machine {
    /// Boots it.
    pub fn boot(run: &RunDir, kernel: &Kernel, modules: &[PathBuf]) -> Result<Self> {
        let options = Options {
            vms: 1,
            cpus: 1,
            ..Options::pair(PART, modules.to_vec())
        };
        let cluster = Cluster::boot(run, kernel, &options)?;
        for vm in &cluster.vms {
            vm.sh(LOAD_DRIVER)?;
            wait_active(vm)?;
            // By which a machine's own address is reached.
            vm.sh("ip link set lo up")?;
        }
        Ok(Self { cluster })
    }

    /// Findings of the kernel.
    pub fn findings(&self) -> Vec<String> {
        self.cluster.new_findings()
    }

    fn doorbells(&self) -> Result<f64> {
        let counters = self.cluster.counters(1)?;
        let writes = counters.pointer("/mmio/sq_doorbell/writes");
        let writes = writes.and_then(Value::as_f64);
        writes.context("the device does not count doorbells")
    }

    /// Runs a test; gives its line, and the doorbells that its messages took.
    fn measure(&self, test: &str, milliseconds: u64) -> Result<(Line, f64)> {
        let vm = self.cluster.vms.first().context("there is no machine")?;
        let (address, port) = (Driver::Ferrite.address(1), Driver::Ferrite.port());
        let serving = vm.spawn(
            &format!("exec /ferrite/bin/verbs-bench serve --rdma {address} --port {port}"),
            PATIENCE,
        )?;
        wait_listening(vm, port)?;
        let before = self.doorbells()?;
        // The other process only makes the path; who waits for it lets it run.
        let said = vm.sh_in(
            &format!(
                "exec /ferrite/bin/verbs-bench run --rdma {address} --control {address} --port {port} \
                 --wait yield --ms {milliseconds} {test}:{SIZE}"
            ),
            PATIENCE,
        );
        let after = self.doorbells()?;
        serving.end()?;
        let line: Line = serde_json::from_str(said?.trim()).context("no result")?;
        Ok((line, after - before))
    }
}

/// One round.
pub fn round(machine: &Machine, plan: &Plan, run: &mut Run) -> Result<()> {
    for kind in ["send", "write"] {
        check_interrupted()?;
        run.progress(&format!("loopback: {kind}s"));
        match machine.measure(&format!("loop_{kind}"), 4 * plan.milliseconds) {
            Ok((line, doorbells)) => {
                let way = line.seconds / line.count as f64 / 2.0 * 1e6;
                println!("      {way:.2} us, {doorbells:.0} doorbells in all");
                let test = format!("loopback_{kind}");
                let key = (SIZE, 1);
                run.results
                    .add(Driver::Ferrite, &test, key, ("us", false), way);
            }
            Err(error) => run.miss(&format!("loopback: {kind}s"), &error),
        }
    }
    Ok(())
}
