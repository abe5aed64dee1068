// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SMC-R: sockets that programs take for those of TCP, whose data goes by RDMA between two buffers.

use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use serde_json::json;

use super::driver::bind_anew;
use super::faults::wait_for_traffic;
use super::recovery::{lives, wait_back};
use super::storage::PATIENCE;
use super::{wait_active, VmTest};
use crate::cluster::Cluster;
use crate::traffic::wait_listening;
use crate::vm::{Running, Vm};

/// On the test kernel: Debian's has no SMC. The driver is loaded.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "a socket's bytes arrive, and go by RDMA",
    bytes,
)];

/// The same with what users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a socket whose cable is pulled fails, and the next one goes by RDMA again",
        cable,
    ),
    VmTest::new(
        "a socket whose device stops fails, on either side, and the next one goes by RDMA again",
        fatal,
    ),
];

const PROGRAM: &str = "/ferrite/tests/clients/smc-check";
const PORT: u16 = 7518;

/// Succeeds where SMC has a link by RDMA.
const LINKED: &str = "rdma resource show qp | grep -q 'state RTS.*smc'";

/// Starts what answers in the second machine; both have SMC.
fn serve(cluster: &Cluster) -> Result<Running<'_>> {
    let (one, vm) = cluster.two()?;
    for vm in [one, vm] {
        vm.sh("modprobe smc")?;
    }
    let server = vm.spawn(&format!("exec {PROGRAM} serve {PORT}"), 6 * PATIENCE)?;
    wait_listening(vm, PORT)?;
    Ok(server)
}

fn end(cluster: &Cluster, server: Running<'_>) -> Result<()> {
    server.end_with(libc::SIGKILL)?;
    for vm in &cluster.vms {
        // As long as a socket lingers it is in use.
        vm.wait_for("modprobe -r smc", PATIENCE)?;
    }
    Ok(())
}

/// Sends some megabytes and has them back; says whether they went by RDMA.
fn exchange(one: &Vm, two: &Vm) -> Result<bool> {
    one.sh_in(&format!("exec {PROGRAM} run {} {PORT}", two.ip()), PATIENCE)?;
    for vm in [one, two] {
        // A link is kept for the next socket.
        if !vm.run(LINKED, PATIENCE)?.ok() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How often sockets are tried until one goes by RDMA, a second apart.
const ATTEMPTS: usize = 60;

/// The same until a socket goes by RDMA: SMC looks at a port in its own time when it or the device has come, and its
/// sockets go by TCP until then. With `lost`, the link that was before may fail one more of them; none has other bytes
/// than were sent.
fn exchange_by_rdma(one: &Vm, two: &Vm, lost: bool) -> Result<()> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        match exchange(one, two) {
            Ok(true) => return Ok(()),
            Ok(false) => last = None,
            Err(error) if lost && !format!("{error:#}").contains("not what was sent") => {
                last = Some(error);
            }
            Err(error) => return Err(error),
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    Err(last.unwrap_or_else(|| anyhow!("all sockets went by TCP")))
}

fn bytes(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = serve(cluster)?;
    exchange_by_rdma(one, two, false)?;
    end(cluster, server)
}

/// A socket that is busy while something happens must end with an error.
fn fails_when(cluster: &Cluster, happens: impl FnOnce() -> Result<()>) -> Result<()> {
    let (one, two) = cluster.two()?;
    let client = one.spawn(
        &format!("exec {PROGRAM} stream {} {PORT}", two.ip()),
        2 * PATIENCE,
    )?;
    wait_for_traffic(cluster, one.index, &[&client])?;
    happens()?;
    let end = client.wait()?;
    ensure!(
        !end.timed_out && end.code == 1 && end.err.contains("the connection is lost"),
        "the program was not told: {end:?}"
    );
    Ok(())
}

fn cable(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = serve(cluster)?;
    fails_when(cluster, || {
        cluster.device_command(2, &json!({"cmd": "link", "up": false}))?;
        let lost = one.wait_for(&format!("! {LINKED}"), PATIENCE);
        cluster.device_command(2, &json!({"cmd": "link", "up": true}))?;
        lost.context("a link without a cable is not found dead")
    })?;
    wait_active(two)?;
    exchange_by_rdma(one, two, true)?;
    end(cluster, server)
}

fn fatal(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    let server = serve(cluster)?;
    for vm in [one, two] {
        let count = lives(vm)?;
        fails_when(cluster, || {
            cluster.device_command(vm.index, &json!({"cmd": "fatal"}))?;
            wait_back(vm, count)
        })?;
        exchange_by_rdma(one, two, true)
            .with_context(|| format!("after {} had another device", vm.name()))?;
    }
    end(cluster, server)
}
