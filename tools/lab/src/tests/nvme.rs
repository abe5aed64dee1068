// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NVMe over Fabrics between two machines: a user of the device inside the kernel, with shared
//! receive queues, fast registration and its own ways to begin again after errors.

use std::time::Duration;

use anyhow::Result;

use crate::vm::Vm;

/// How long the target or the initiator may take to let go of connections that do not answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Offers a small disk in `vm`.
pub fn serve(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "set -e
         modprobe nvmet_rdma use_srq=1
         grep -q Y /sys/module/nvmet_rdma/parameters/use_srq
         mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
         truncate -s 16M /run/disk
         cd /sys/kernel/config/nvmet
         mkdir subsystems/disk subsystems/disk/namespaces/1 ports/1
         echo 1 >subsystems/disk/attr_allow_any_host
         echo /run/disk >subsystems/disk/namespaces/1/device_path
         echo 1 >subsystems/disk/namespaces/1/buffered_io
         echo 1 >subsystems/disk/namespaces/1/enable
         echo rdma >ports/1/addr_trtype
         echo ipv4 >ports/1/addr_adrfam
         echo {} >ports/1/addr_traddr
         echo 4420 >ports/1/addr_trsvcid
         ln -s /sys/kernel/config/nvmet/subsystems/disk ports/1/subsystems/disk",
        vm.ip()
    ))?;
    Ok(())
}

/// Loads what connects. It gives a target that is gone less time to take leave.
pub fn prepare(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "set -e; modprobe nvme_rdma; echo {} >/sys/module/nvme_core/parameters/admin_timeout",
        10 * vm.patience()
    ))?;
    Ok(())
}

/// What connects a machine to the disk of `target`, after [`prepare`].
pub fn connecting(target: &Vm) -> String {
    format!(
        "echo transport=rdma,traddr={},trsvcid=4420,nqn=disk,nr_io_queues=1,ctrl_loss_tmo=0,\
             keep_alive_tmo={} >/dev/nvme-fabrics",
        target.ip(),
        5 * target.patience()
    )
}

/// What ends all connections of a machine.
pub const DISCONNECTING: &str = "for c in /sys/class/nvme/nvme*/delete_controller; do
        [ ! -e $c ] || echo 1 >$c || true
    done";

/// Connects `vm` to the disk of `target`.
pub fn connect(vm: &Vm, target: &Vm) -> Result<()> {
    prepare(vm)?;
    vm.sh(&connecting(target))?;
    Ok(())
}

/// Ends the connections of `vm`.
pub fn disconnect(vm: &Vm) -> Result<()> {
    vm.sh_in(DISCONNECTING, PATIENCE)?;
    Ok(())
}

/// Has `vm` listen again, after its device was taken from it: the kernel's target gives its port up then, and
/// leaves the rest to the administrator.
pub fn listen_again(vm: &Vm) -> Result<()> {
    vm.sh("set -e
         cd /sys/kernel/config/nvmet/ports/1/subsystems
         rm disk
         ln -s /sys/kernel/config/nvmet/subsystems/disk disk")?;
    Ok(())
}

/// Takes the disk of `vm` back.
pub fn end(vm: &Vm) -> Result<()> {
    vm.sh_in(
        "set -e
         cd /sys/kernel/config/nvmet
         rm ports/1/subsystems/disk
         rmdir ports/1 subsystems/disk/namespaces/1 subsystems/disk
         modprobe -r nvmet_rdma",
        PATIENCE,
    )?;
    Ok(())
}
