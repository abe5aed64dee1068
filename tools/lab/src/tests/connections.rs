// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What rdma_cm does beyond its example programs.

use std::time::Duration;

use anyhow::{bail, Result};

use super::VmTest;
use crate::cluster::Cluster;

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[VmTest::new(
    "rdma_cm: private data, rejection, a hundred connections at once",
    connection_manager,
)];

const TIME: Duration = Duration::from_secs(60);

fn connection_manager(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let program = "/ferrite/tests/clients/cm-check";
    let server = one.spawn(
        &format!("{program} serve {} >/tmp/cm-check 2>&1", one.ip()),
        TIME,
    )?;
    one.wait_for("grep -q listening /tmp/cm-check", TIME)?;
    let outcome = two.run(&format!("exec {program} run {}", one.ip()), TIME)?;
    if !outcome.ok() {
        server.signal(libc::SIGTERM)?;
    }
    let served = server.wait()?;
    if !outcome.ok() || !served.ok() {
        let server = one.sh("cat /tmp/cm-check")?;
        bail!("{}{}--- server:\n{server}", outcome.out, outcome.err);
    }
    Ok(())
}
