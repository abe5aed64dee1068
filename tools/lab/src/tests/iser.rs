// SPDX-License-Identifier: Apache-2.0 OR MIT
//! iSCSI over RDMA: the kernel's initiator, which iscsid logs in again when its connection is lost, and the
//! kernel's target.

use anyhow::{ensure, Context, Result};

use super::storage::{self, Disk, CONFIGFS, PATIENCE};
use super::VmTest;
use crate::vm::Vm;

/// On machines with the driver loaded, on the stock kernel.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "discovery, login, fio with verification in 4 KiB, 64 KiB and 1 MiB",
    storage::blocks::<Iser>,
)];

/// The same with all that users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "discovery, login, fio with verification in 4 KiB, 64 KiB and 1 MiB, a file system",
        storage::verified::<Iser>,
    ),
    VmTest::new(
        "a verified load goes on after a pulled cable",
        storage::cable::<Iser>,
    ),
    VmTest::new(
        "a verified load goes on after a fatal stop of the initiator's device, and of the target's",
        storage::fatal::<Iser>,
    ),
    VmTest::new(
        "a load whose target is removed fails, and both sides let go",
        storage::removed::<Iser>,
    ),
];

/// What the target is called.
const NAME: &str = "iqn.2026-11.example.ferrite:disk";

/// How often the target is asked what it has.
const QUESTIONS: u32 = 6;

/// Asks the target what it has. `iscsiadm` (open-iscsi 2.1, `discovery_sendtargets`) waits until its socket has something to
/// read, also where it has read the answer already: it does so if that comes before the kernel has told it that
/// the question was sent (`__kipc_call` puts aside what else it finds). A device that is as fast as its program is slow
/// shows that often. Left to itself it then crashes in its next attempt, by what it still has of the first; so each
/// attempt is a process.
fn discover(initiator: &Vm, portal: &str) -> Result<()> {
    let record = format!("iscsiadm -m discoverydb -t sendtargets -p {portal} -I iser");
    let said = initiator.sh_in(
        &format!(
            "set -e
             {record} -o new >/dev/null
             {record} -o update -n discovery.sendtargets.reopen_max -v 0 \
                 -n discovery.sendtargets.timeo.active_timeout -v 10
             for question in $(seq {QUESTIONS}); do
                 if {record} --discover; then exit; fi
             done
             exit 1"
        ),
        2 * PATIENCE,
    )?;
    ensure!(said.contains(NAME), "found: {said}");
    Ok(())
}

/// A disk in the target's memory. Its portal has no address of its own: one that has is gone with the device.
struct Iser;

impl Disk for Iser {
    fn serve(target: &Vm) -> Result<()> {
        target.sh(&format!(
            "set -e
             modprobe -a iscsi_target_mod ib_isert
             {CONFIGFS}
             cd /sys/kernel/config/target
             mkdir -p core/rd_mcp_0/disk iscsi/{NAME}/tpgt_1/lun/lun_0
             echo rd_pages=8192 >core/rd_mcp_0/disk/control
             echo 1 >core/rd_mcp_0/disk/enable
             cd iscsi/{NAME}/tpgt_1
             ln -s /sys/kernel/config/target/core/rd_mcp_0/disk lun/lun_0/disk
             mkdir np/0.0.0.0:3260
             echo 1 >np/0.0.0.0:3260/iser
             echo 0 >attrib/authentication
             echo 1 >attrib/generate_node_acls
             echo 0 >attrib/demo_mode_write_protect
             echo 1 >enable"
        ))?;
        Ok(())
    }

    /// No answer comes in so little time that [`discover`] misses it.
    const CONNECTING_DELAY: u32 = 100;

    fn connect(initiator: &Vm, target: &Vm, lost_after: u32) -> Result<String> {
        // One request for 1 MiB, as it is asked for.
        initiator.sh(&format!(
            "set -e
             modprobe sd_mod
             modprobe ib_iser max_sectors=2048
             mkdir -p /run/lock/iscsi
             echo InitiatorName=iqn.2026-11.example.ferrite:{} >/etc/iscsi/initiatorname.iscsi
             setsid iscsid -f >/run/iscsid 2>&1 </dev/null &",
            initiator.name()
        ))?;
        initiator.wait_for("grep -q @ISCSIADM /proc/net/unix", PATIENCE)?;
        let portal = format!("{}:3260", target.ip());
        discover(initiator, &portal)
            .and_then(|()| {
                initiator.sh(&format!(
                    "set -e
                     iscsiadm -m node -T {NAME} -p {portal} -o update \
                         -n node.session.timeo.replacement_timeout -v {lost_after}
                     iscsiadm -m node -T {NAME} -p {portal} --login"
                ))
            })
            .with_context(|| format!("{:?}", initiator.sh("cat /run/iscsid; dmesg | tail")))?;
        let disk = "/sys/class/iscsi_session/session*/device/target*/*/block/*";
        initiator.wait_for(&format!("test -b /dev/$(basename {disk})"), PATIENCE)?;
        let disk = initiator.sh(&format!("basename {disk}"))?;
        Ok(format!("/dev/{}", disk.trim()))
    }

    const CONNECTED: &str = "for state in /sys/class/iscsi_session/session*/state; do
            read -r state <$state && [ $state = LOGGED_IN ] && exit
        done; exit 1";

    fn remove(target: &Vm) -> Result<()> {
        target.sh_in(
            &format!("echo 0 >/sys/kernel/config/target/iscsi/{NAME}/tpgt_1/enable"),
            PATIENCE,
        )?;
        Ok(())
    }

    fn disconnect(initiator: &Vm) -> Result<()> {
        initiator.sh_in(
            &format!(
                "set -e
                 iscsiadm -m node -T {NAME} --logout
                 iscsiadm -m node -T {NAME} -o delete
                 iscsiadm -k 0"
            ),
            PATIENCE,
        )?;
        // Neither is over when that has returned.
        initiator.wait_for("! pgrep -x iscsid && modprobe -r ib_iser", PATIENCE)
    }

    fn end(target: &Vm) -> Result<()> {
        target.sh_in(
            &format!(
                "set -e
                 cd /sys/kernel/config/target/iscsi/{NAME}/tpgt_1
                 [ $(cat enable) = 0 ] || echo 0 >enable
                 rm lun/lun_0/disk
                 rmdir lun/lun_0 np/0.0.0.0:3260
                 cd /sys/kernel/config/target
                 rmdir iscsi/{NAME}/tpgt_1 iscsi/{NAME} iscsi core/rd_mcp_0/disk core/rd_mcp_0"
            ),
            PATIENCE,
        )?;
        // What is left of connections goes in its own time.
        target.wait_for("modprobe -r ib_isert iscsi_target_mod", PATIENCE)
    }
}
