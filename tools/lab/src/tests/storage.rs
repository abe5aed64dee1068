// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What users of the device inside the kernel have in common: they give a machine the disk or the files of
//! another, and whoever uses those must not notice that a cable was pulled or that a device began anew, only
//! wait; and must be told when they are gone.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::json;

use super::driver::bind_anew;
use super::faults::wait_for_traffic;
use super::recovery::{lives, wait_back};
use super::{nothing_left, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::vm::{Running, Vm};

/// Shell text that sees to it that the kernel's targets can be configured.
pub const CONFIGFS: &str =
    "mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config";

/// When all kernel users have ended.
pub const AFTERWARDS: &[VmTest] = &[VmTest::new(
    "none of them leaves anything of the device behind",
    nothing_of_them_left,
)];

/// How long a connection may take to be made, found dead or made again: retries of the transport last four
/// seconds, and some users double the time between their attempts.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// What carries requests and their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// An RDMA device.
    Rdma,
    /// A network interface.
    Tcp,
}

impl Transport {
    /// As the kernel's users of both call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// What every load has in common: many requests at a time past the page cache, each block with its checksum
/// and the number of its write, so that data that is wrong, old or elsewhere is found.
const VERIFYING: &str = "fio --thread --ioengine=libaio --direct=1 --iodepth=8 --rw=randwrite \
    --verify=crc32c --verify_fatal=1";

/// Block sizes, with how much is written and read back of each.
const SIZES: &[(&str, u32)] = &[("4k", 2), ("64k", 4), ("1m", 8)];

/// Writes a disk or a file in blocks of every size and reads it back; all of it takes 14 MiB.
pub fn verify(vm: &Vm, path: &str) -> Result<()> {
    let mut jobs = String::new();
    let mut offset = 0;
    for (block, mebibytes) in SIZES {
        jobs += &format!(
            " --name={block} --bs={block} --offset={offset}m --size={mebibytes}m --stonewall"
        );
        offset += mebibytes;
    }
    let said = vm.sh_in(&format!("{VERIFYING} --filename={path} {jobs}"), PATIENCE)?;
    let jobs = said.matches("err= 0").count();
    ensure!(jobs == SIZES.len(), "{jobs} jobs went well:\n{said}");
    Ok(())
}

/// Makes a file system on a disk, and finds what was written to it after it was away.
pub fn file_system(vm: &Vm, disk: &str) -> Result<()> {
    vm.sh_in(
        &format!(
            "set -e
             mkdir -p /run/mnt
             mkfs.ext4 -q -F {disk}
             mount {disk} /run/mnt
             cp -r /usr/lib/x86_64-linux-gnu/libibverbs /usr/sbin/*fs* /run/mnt
             (cd /run/mnt; find . -type f -exec sha256sum {{}} +) >/run/sums
             umount /run/mnt
             e2fsck -fn {disk}
             mount {disk} /run/mnt
             cd /run/mnt; sha256sum --quiet -c /run/sums; cd /
             umount /run/mnt"
        ),
        PATIENCE,
    )?;
    Ok(())
}

/// A verified load that goes on until it is told to end.
pub struct Load<'v> {
    vm: &'v Vm,
    fio: Running<'v>,
}

impl<'v> Load<'v> {
    /// Begins to write and to read back a disk or a file, and waits until that is under way.
    pub fn start(cluster: &Cluster, vm: &'v Vm, path: &str) -> Result<Self> {
        Self::start_by(cluster, vm, "", path)
    }

    /// The same, started by a command.
    pub fn start_by(cluster: &Cluster, vm: &'v Vm, command: &str, path: &str) -> Result<Self> {
        let fio = vm.spawn(
            &format!(
                "exec {command} {VERIFYING} --filename={path} --name=load --bs=64k --size=4m --loops=1000000"
            ),
            4 * PATIENCE,
        )?;
        let load = Self { vm, fio };
        load.goes_on(cluster)?;
        Ok(load)
    }

    /// Waits until requests are carried out.
    pub fn goes_on(&self, cluster: &Cluster) -> Result<()> {
        wait_for_traffic(cluster, self.vm.index, &[&self.fio])
    }

    /// Ends it: nothing that it read was wrong.
    pub fn finish(self) -> Result<()> {
        self.fio.signal(libc::SIGINT)?;
        let end = self.fio.wait()?;
        // Its exit code when it is told to end.
        ensure!(
            [0, 128].contains(&end.code) && end.out.contains("err= 0"),
            "{end:?}"
        );
        Ok(())
    }

    /// It ends by itself, with an error of its disk and not with wrong data.
    pub fn fails(self) -> Result<()> {
        let end = self.fio.wait()?;
        let said = format!("{}{}", end.out, end.err);
        ensure!(
            !end.ok() && !end.timed_out && !end.crashed() && !said.contains("verify"),
            "{end:?}"
        );
        Ok(())
    }
}

/// A disk that one machine has from another.
pub trait Disk {
    /// Offers it, in a machine whose device may go and come.
    fn serve(target: &Vm) -> Result<()>;

    /// For how many milliseconds the wire holds back each packet while [`Disk::connect`] is under way.
    const CONNECTING_DELAY: u32 = 0;

    /// Connects to it; gives its name in the initiator. For `lost_after` seconds without a connection
    /// requests wait.
    fn connect(initiator: &Vm, target: &Vm, lost_after: u32) -> Result<String>;

    /// A script that succeeds where the initiator is connected.
    const CONNECTED: &str;

    /// Takes it back while it is in use.
    fn remove(target: &Vm) -> Result<()>;

    /// Ends the connection, if there still is one.
    fn disconnect(initiator: &Vm) -> Result<()>;

    /// Ends what [`Disk::serve`] began, whether it was removed or not.
    fn end(target: &Vm) -> Result<()>;
}

/// For so many seconds requests wait where a test brings the connection back.
pub const LONG: u32 = 300;

/// The same where nobody does.
const SHORT: u32 = 2;

/// Uses a disk of the second machine in the first.
pub fn with_disk<D: Disk>(
    cluster: &Cluster,
    test: impl FnOnce(&Vm, &Vm, &str) -> Result<()>,
) -> Result<()> {
    with_disk_lost_after::<D>(cluster, LONG, test)
}

fn with_disk_lost_after<D: Disk>(
    cluster: &Cluster,
    lost_after: u32,
    test: impl FnOnce(&Vm, &Vm, &str) -> Result<()>,
) -> Result<()> {
    let (one, two) = cluster.two()?;
    D::serve(two)?;
    let slow = D::CONNECTING_DELAY > 0;
    if slow {
        let delay = D::CONNECTING_DELAY;
        cluster.fabric_command(&json!({"cmd": "faults", "only": "roce", "delay": delay}))?;
    }
    let connected = D::connect(one, two, lost_after);
    if slow {
        cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
    }
    let disk = connected?;
    test(one, two, &disk)?;
    D::disconnect(one)?;
    D::end(two)
}

/// Every size of block.
pub fn blocks<D: Disk>(cluster: &Cluster) -> Result<()> {
    with_disk::<D>(cluster, |one, _, disk| verify(one, disk))
}

/// Every size of block, and a file system.
pub fn verified<D: Disk>(cluster: &Cluster) -> Result<()> {
    with_disk::<D>(cluster, |one, _, disk| {
        verify(one, disk)?;
        file_system(one, disk)
    })
}

/// A verified load that outlasts a pulled cable.
pub fn cable<D: Disk>(cluster: &Cluster) -> Result<()> {
    with_disk::<D>(cluster, |one, two, disk| {
        let load = Load::start(cluster, one, disk)?;
        cable_pulled(cluster, two, one, D::CONNECTED)?;
        load.goes_on(cluster)?;
        load.finish()
    })
}

/// A verified load that outlasts a fatal stop of the initiator's device, and one of the target's.
pub fn fatal<D: Disk>(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    with_disk::<D>(cluster, |one, two, disk| {
        let load = Load::start(cluster, one, disk)?;
        for vm in [one, two] {
            begins_anew(cluster, vm, one, D::CONNECTED)?;
            load.goes_on(cluster)
                .with_context(|| format!("after {} had another device", vm.name()))?;
        }
        load.finish()
    })
}

/// A load whose disk is taken back.
pub fn removed<D: Disk>(cluster: &Cluster) -> Result<()> {
    with_disk_lost_after::<D>(cluster, SHORT, |one, two, disk| {
        let load = Load::start(cluster, one, disk)?;
        D::remove(two)?;
        load.fails()
    })
}

/// Pulls the cable of a machine until `user` has lost the connection that `connected` tells of, and waits
/// until it has one again.
pub fn cable_pulled(cluster: &Cluster, vm: &Vm, user: &Vm, connected: &str) -> Result<()> {
    cluster.device_command(vm.index, &json!({"cmd": "link", "up": false}))?;
    let lost = user.wait_for(&format!("! ({connected})"), PATIENCE);
    cluster.device_command(vm.index, &json!({"cmd": "link", "up": true}))?;
    lost.context("a connection without a cable is not found dead")?;
    wait_active(vm)?;
    user.wait_for(connected, PATIENCE)
        .context("the connection is not made again")
}

/// Shell text that says the numbers of the connections of a machine.
const CONNECTIONS: &str =
    "rdma res show qp | sed -n 's/.* lqpn \\([0-9]*\\) .*type RC .*state RTS.*/\\1/p'";

/// Has the device of a machine stop with a fatal error, and waits until it is registered anew and `user` has
/// other connections, of which `connected` tells.
pub fn begins_anew(cluster: &Cluster, vm: &Vm, user: &Vm, connected: &str) -> Result<()> {
    let count = lives(vm)?;
    let old = user.sh(CONNECTIONS)?;
    let old: Vec<&str> = old.split_whitespace().collect();
    ensure!(!old.is_empty(), "{} has no connection", user.name());
    cluster.device_command(vm.index, &json!({"cmd": "fatal"}))?;
    wait_back(vm, count)?;
    // A device that came back begins with the same numbers again, and has nothing of what was before.
    let left = match vm.index == user.index {
        true => "false".to_owned(),
        false => format!("{CONNECTIONS} | grep -qxF '{}'", old.join("\n")),
    };
    user.wait_for(&format!("({connected}) && ! ({left})"), PATIENCE)
        .context("the connection is not made again")
}

fn nothing_of_them_left(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        // The core keeps completion queues for the next user as long as there is the device.
        bind_anew(vm)?;
        nothing_left(vm)?;
    }
    still_works(cluster)
}
