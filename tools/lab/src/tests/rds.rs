// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reliable datagrams, RDS: sockets whose messages arrive once and in order, whatever becomes of the
//! connection under them.

use anyhow::{ensure, Context, Result};

use super::driver::{bind, bind_anew, unbind};
use super::faults::wait_for_traffic;
use super::storage::{begins_anew, cable_pulled, PATIENCE};
use super::VmTest;
use crate::cluster::Cluster;
use crate::vm::{Running, Vm};

/// On machines with the driver loaded, on the stock kernel.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "messages of up to 64 KiB; memory of the peer read and written by RDMA",
    messages,
)];

/// The same with what users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "messages arrive once and in order, also after a pulled cable",
        cable,
    ),
    VmTest::new(
        "messages arrive once and in order, also after a fatal stop of the sender's device, and of the receiver's",
        fatal,
    ),
];

const PROGRAM: &str = "/ferrite/tests/clients/rds-check";

/// Succeeds where there is a connection of the kernel: nobody else has one.
const CONNECTED: &str = "rdma resource show qp | grep -q 'state RTS.*rdma_cm'";

/// Starts what answers.
fn serve(vm: &Vm) -> Result<Running<'_>> {
    vm.sh("modprobe rds_rdma; rm -f /run/rds-check")?;
    let server = vm.spawn(
        &format!("exec {PROGRAM} serve {} >/run/rds-check 2>&1", vm.ip()),
        4 * PATIENCE,
    )?;
    vm.wait_for("grep -q listening /run/rds-check", PATIENCE)
        .with_context(|| format!("{:?}", vm.sh("cat /run/rds-check")))?;
    Ok(server)
}

/// Ends it, and takes RDS from both machines.
fn end(cluster: &Cluster, server: Running<'_>) -> Result<()> {
    server.end_with(libc::SIGKILL)?;
    for vm in &cluster.vms {
        // The kernel (7.2) leaks connections that it still has when RDS is unloaded: it does not wait for the queue
        // of work of each. It has none left without a device.
        unbind(vm)?;
        vm.wait_for("modprobe -r rds_rdma", PATIENCE)?;
        bind(vm)?;
    }
    Ok(())
}

fn messages(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = serve(two)?;
    one.sh_in(
        &format!(
            "modprobe rds_rdma; exec {PROGRAM} run {} {}",
            one.ip(),
            two.ip()
        ),
        PATIENCE,
    )?;
    end(cluster, server)
}

/// Messages from the first machine to the second go on while something happens.
fn stream_through(
    cluster: &Cluster,
    happens: impl FnOnce(&Vm, &Vm, &dyn Fn() -> Result<()>) -> Result<()>,
) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = serve(two)?;
    let client = one.spawn(
        &format!(
            "modprobe rds_rdma; exec {PROGRAM} stream {} {}",
            one.ip(),
            two.ip()
        ),
        4 * PATIENCE,
    )?;
    let goes_on = || wait_for_traffic(cluster, one.index, &[&client]);
    goes_on()?;
    happens(one, two, &goes_on)?;
    goes_on()?;
    client.signal(libc::SIGTERM)?;
    let said = client.success()?;
    ensure!(said.contains("messages"), "{said}");
    end(cluster, server)
}

fn cable(cluster: &Cluster) -> Result<()> {
    stream_through(cluster, |one, two, _| {
        cable_pulled(cluster, two, one, CONNECTED)
    })
}

fn fatal(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    stream_through(cluster, |one, two, goes_on| {
        begins_anew(cluster, one, one, CONNECTED)?;
        goes_on()?;
        begins_anew(cluster, two, one, CONNECTED)
    })
}
