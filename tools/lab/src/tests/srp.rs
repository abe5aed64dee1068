// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SCSI over RDMA, SRP: an initiator that the administrator points at its target, and the kernel's target.
//! Both forget what they had on a device that is taken from them.

use anyhow::Result;
use serde_json::json;

use super::driver::bind_anew;
use super::recovery::{lives, wait_back};
use super::storage::{self, with_disk, Disk, Load, CONFIGFS, PATIENCE};
use super::VmTest;
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On machines with the driver loaded, on the stock kernel.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "login, fio with verification in 4 KiB, 64 KiB and 1 MiB",
    storage::blocks::<Srp>,
)];

/// The same with all that users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "login, fio with verification in 4 KiB, 64 KiB and 1 MiB, a file system",
        storage::verified::<Srp>,
    ),
    VmTest::new(
        "a verified load goes on after a pulled cable",
        storage::cable::<Srp>,
    ),
    VmTest::new(
        "a verified load goes on after a fatal stop of the target's device, whose port is made again",
        fatal,
    ),
    VmTest::new(
        "a load whose target is removed fails, and both sides let go",
        storage::removed::<Srp>,
    ),
];

const PORT: u16 = 5555;

/// A disk in the target's memory.
struct Srp;

/// Makes the target's port out of that of the device, which is called by its first address. The kernel takes
/// the address that a login came to for the name of who sent it.
fn make_port(target: &Vm) -> Result<()> {
    target.sh(&format!(
        "set -e
         read -r gid </sys/class/infiniband/ferrite0/ports/1/gids/0
         cd /sys/kernel/config/target/srpt
         port=${{gid:20}}
         mkdir -p $port/$port/lun/lun_0 $port/$port/acls/{}/lun_0
         cd $port/$port
         ln -s /sys/kernel/config/target/core/rd_mcp_0/disk lun/lun_0/disk
         ln -s /sys/kernel/config/target/srpt/$port/$port/lun/lun_0 acls/{}/lun_0/lun
         echo 1 >enable",
        target.ip(),
        target.ip()
    ))?;
    Ok(())
}

/// Takes it apart, whether the device that it was made for is there or not.
fn end_port(target: &Vm) -> Result<()> {
    target.sh_in(
        &format!(
            "set -e
             cd /sys/kernel/config/target/srpt/*:*/*:*
             [ $(cat enable) = 0 ] || echo 0 >enable
             rm acls/{}/lun_0/lun
             rmdir acls/{}/lun_0 acls/{}
             rm lun/lun_0/disk
             rmdir lun/lun_0
             cd /sys/kernel/config/target/srpt
             rmdir *:*/*:* *:*",
            target.ip(),
            target.ip(),
            target.ip()
        ),
        PATIENCE,
    )?;
    Ok(())
}

impl Disk for Srp {
    fn serve(target: &Vm) -> Result<()> {
        target.sh(&format!(
            "set -e
             modprobe -a target_core_mod ib_srpt
             {CONFIGFS}
             cd /sys/kernel/config/target
             mkdir -p core/rd_mcp_0/disk srpt
             echo rd_pages=8192 >core/rd_mcp_0/disk/control
             echo 1 >core/rd_mcp_0/disk/enable
             echo {PORT} >srpt/discovery_auth/rdma_cm_port"
        ))?;
        make_port(target)
    }

    fn connect(initiator: &Vm, target: &Vm, lost_after: u32) -> Result<String> {
        let guid = target.sh("cat /sys/class/infiniband/ferrite0/node_guid")?;
        let guid = guid.trim().replace(':', "");
        initiator.sh_in(
            &format!(
                "set -e
                 modprobe sd_mod
                 modprobe ib_srp reconnect_delay=1 fast_io_fail_tmo={lost_after} dev_loss_tmo={}
                 echo id_ext={guid},ioc_guid={guid},dest={}:{PORT},max_sect=2048,cmd_sg_entries=255 \\
                     >/sys/class/infiniband_srp/srp-ferrite0-1/add_target",
                2 * lost_after + 10,
                target.ip()
            ),
            PATIENCE,
        )?;
        let disk = "/sys/class/srp_host/host*/device/target*/*/block/*";
        initiator.wait_for(&format!("test -b /dev/$(basename {disk})"), PATIENCE)?;
        let disk = initiator.sh(&format!("basename {disk}"))?;
        Ok(format!("/dev/{}", disk.trim()))
    }

    const CONNECTED: &str = "for state in /sys/class/srp_remote_ports/port-*/state; do
            read -r state <$state && [ $state = running ] && exit
        done; exit 1";

    fn remove(target: &Vm) -> Result<()> {
        target.sh_in(
            "echo 0 | tee /sys/kernel/config/target/srpt/*:*/*:*/enable",
            PATIENCE,
        )?;
        Ok(())
    }

    fn disconnect(initiator: &Vm) -> Result<()> {
        initiator.sh_in(
            "for port in /sys/class/srp_remote_ports/port-*/delete; do
                 [ ! -e $port ] || echo 1 >$port || exit
             done",
            PATIENCE,
        )?;
        initiator.wait_for("modprobe -r ib_srp", PATIENCE)
    }

    fn end(target: &Vm) -> Result<()> {
        end_port(target)?;
        target.sh_in(
            "set -e
             cd /sys/kernel/config/target
             echo 0 >srpt/discovery_auth/rdma_cm_port
             rmdir srpt core/rd_mcp_0/disk core/rd_mcp_0",
            PATIENCE,
        )?;
        // What is left of connections goes in its own time.
        target.wait_for("modprobe -r ib_srpt", PATIENCE)
    }
}

/// Not of the initiator's: Linux's initiator (as of 7.2) looks for requests in the tags of its host after the host
/// has given them back (`srp_remove_target` ends the host before it ends what is left of a connection that is being
/// made again), whatever the device that is taken from it, and oopses.
fn fatal(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    bind_anew(two)?;
    with_disk::<Srp>(cluster, |one, two, disk| {
        one.sh(&format!(
            "head -c 1M /dev/urandom >/run/written
             dd if=/run/written of={disk} bs=64k seek=256 oflag=direct status=none"
        ))?;
        let load = Load::start(cluster, one, disk)?;
        let count = lives(two)?;
        cluster.device_command(two.index, &json!({"cmd": "fatal"}))?;
        wait_back(two, count)?;
        end_port(two)?;
        make_port(two)?;
        // The initiator tries again by itself.
        one.wait_for(Srp::CONNECTED, PATIENCE)?;
        load.goes_on(cluster)?;
        load.finish()?;
        one.sh(&format!(
            "dd if={disk} bs=64k skip=256 count=16 iflag=direct status=none | cmp /run/written -"
        ))?;
        Ok(())
    })
}
