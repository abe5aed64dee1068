// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files of one machine in another by SMB Direct: the kernel's client, and ksmbd, the kernel's server.

use anyhow::Result;

use super::driver::bind_anew;
use super::storage::{self, begins_anew, cable_pulled, Load, PATIENCE};
use super::VmTest;
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On the test kernel, whose client can do it. The driver is loaded.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "what was written in 4 KiB and 1 MiB is read from a share that was away",
    exchanged,
)];

/// The same with all that users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "fio with verification in 4 KiB, 64 KiB and 1 MiB; files are as they were written",
        verified,
    ),
    VmTest::new("a verified load goes on after a pulled cable", cable),
    VmTest::new(
        "a verified load goes on after a fatal stop of the client's device, and of the server's",
        fatal,
    ),
];

/// Offers a folder in memory.
fn serve(vm: &Vm) -> Result<()> {
    vm.sh("set -e
         modprobe ksmbd
         mkdir -p /export
         mount -t tmpfs none /export
         printf '%s\\n' '[global]' '[share]' 'path = /export' 'read only = no' >/run/ksmbd.conf
         rm -f /run/ksmbd.users
         ksmbd.adduser -C /run/ksmbd.conf -P /run/ksmbd.users -a -p secret user
         ksmbd.mountd -C /run/ksmbd.conf -P /run/ksmbd.users")?;
    vm.wait_for(
        "rdma resource show cm_id | grep LISTEN | grep -q ':445'",
        PATIENCE,
    )
}

/// Takes it back.
fn end(vm: &Vm) -> Result<()> {
    vm.sh_in(
        "set -e
         ksmbd.control -s",
        PATIENCE,
    )?;
    // The server lets go of files in its own time.
    vm.wait_for("! mountpoint -q /export || umount /export", PATIENCE)?;
    vm.wait_for("modprobe -r ksmbd", PATIENCE)
}

const AT: &str = "/run/smb";

/// Mounts the folder of `server`. Requests wait for a server that does not answer, and are not kept back.
fn mount(vm: &Vm, server: &Vm) -> Result<()> {
    vm.sh_in(
        &format!(
            "set -e
             mkdir -p {AT}
             modprobe cifs
             mount -i -t cifs -o ip={0},rdma,vers=3.1.1,username=user,password=secret,hard,cache=none,echo_interval=4 \\
                 //{0}/share {AT}
             grep ' {AT} ' /proc/mounts | grep -q ,rdma,",
            server.ip()
        ),
        PATIENCE,
    )?;
    Ok(())
}

fn unmount(vm: &Vm) -> Result<()> {
    vm.sh_in(&format!("umount {AT}"), PATIENCE)?;
    vm.wait_for("modprobe -r cifs", PATIENCE)
}

/// Succeeds where the client is connected: nobody else in the kernel is.
const CONNECTED: &str = "rdma resource show qp | grep -q 'state RTS.*rdma_cm'";

fn exchanged(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    mount(one, two)?;
    one.sh_in(
        &format!(
            "set -e
             head -c 2M /dev/urandom >/run/written
             dd if=/run/written of={AT}/small bs=4k count=64 status=none
             dd if=/run/written of={AT}/large bs=1M status=none
             umount {AT}"
        ),
        PATIENCE,
    )?;
    mount(one, two)?;
    one.sh_in(
        &format!(
            "set -e
             cmp -n $((64 * 4096)) /run/written {AT}/small
             cmp /run/written {AT}/large
             [ $(stat -c %s {AT}/small) = $((64 * 4096)) ]"
        ),
        PATIENCE,
    )?;
    unmount(one)?;
    end(two)
}

fn verified(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    mount(one, two)?;
    storage::verify(one, &format!("{AT}/fio"))?;
    one.sh_in(
        &format!(
            "set -e
             cp -rL /usr/lib/x86_64-linux-gnu/libibverbs /usr/sbin/*fs* {AT}
             (cd {AT}; find . -type f -exec sha256sum {{}} +) >/run/sums
             umount {AT}"
        ),
        PATIENCE,
    )?;
    mount(one, two)?;
    one.sh_in(
        &format!("cd {AT} && sha256sum --quiet -c /run/sums"),
        PATIENCE,
    )?;
    unmount(one)?;
    end(two)
}

/// Uses files of the second machine in the first.
fn with_files(
    cluster: &Cluster,
    test: impl FnOnce(&Vm, &Vm, &Load<'_>) -> Result<()>,
) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    mount(one, two)?;
    let load = Load::start(cluster, one, &format!("{AT}/load"))?;
    test(one, two, &load)?;
    load.goes_on(cluster)?;
    load.finish()?;
    unmount(one)?;
    end(two)
}

fn cable(cluster: &Cluster) -> Result<()> {
    with_files(cluster, |one, two, _| {
        cable_pulled(cluster, two, one, CONNECTED)
    })
}

fn fatal(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    with_files(cluster, |one, two, load| {
        begins_anew(cluster, one, one, CONNECTED)?;
        load.goes_on(cluster)?;
        begins_anew(cluster, two, one, CONNECTED)
    })
}
