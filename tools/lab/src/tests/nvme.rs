// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NVMe over Fabrics between two machines: a user of the device inside the kernel, with shared
//! receive queues, fast registration and its own ways to begin again after errors.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::json;

use super::driver::bind_anew;
use super::storage::{self, Disk, Load, Transport, CONFIGFS};
use super::VmTest;
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On machines with the driver loaded, on the stock kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "discovery, connection, fio with verification in 4 KiB, 64 KiB and 1 MiB, whose keys the target ends; a file system",
        verified,
    ),
    VmTest::new(
        "a verified load goes on after a pulled cable, after a fatal stop of the initiator's device and of the \
         target's; it fails when the target is removed, and both sides let go",
        troubles,
    ),
];

/// How long the target or the initiator may take to let go of connections that do not answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Offers a small disk in `vm`.
pub fn serve(vm: &Vm) -> Result<()> {
    serve_at(vm, &vm.ip(), 16)
}

/// Offers a disk of so many MiB in `vm` to whoever comes to `address`.
fn serve_at(vm: &Vm, address: &str, mebibytes: u32) -> Result<()> {
    vm.sh(&format!("truncate -s {mebibytes}M /run/disk"))?;
    serve_disk(vm, "/run/disk", &[(Transport::Rdma, address)])
}

/// The service that a transport is listened for at. They differ: siw listens at a port of TCP's.
fn service(transport: Transport) -> u16 {
    match transport {
        Transport::Rdma => 4420,
        Transport::Tcp => 4421,
    }
}

/// Offers a disk, or a file as one, to whoever comes to one of the addresses, each a port of its own.
pub fn serve_disk(vm: &Vm, path: &str, listen: &[(Transport, &str)]) -> Result<()> {
    let mut script = format!(
        "set -e
         modprobe nvmet_rdma use_srq=1
         grep -q Y /sys/module/nvmet_rdma/parameters/use_srq
         {CONFIGFS}
         cd /sys/kernel/config/nvmet
         mkdir subsystems/disk subsystems/disk/namespaces/1
         echo 1 >subsystems/disk/attr_allow_any_host
         echo {path} >subsystems/disk/namespaces/1/device_path
         [ -b {path} ] || echo 1 >subsystems/disk/namespaces/1/buffered_io
         echo 1 >subsystems/disk/namespaces/1/enable\n"
    );
    for (port, (transport, address)) in (1..).zip(listen) {
        script += &format!(
            "modprobe nvmet_{name}
             mkdir ports/{port}
             echo {name} >ports/{port}/addr_trtype
             echo ipv4 >ports/{port}/addr_adrfam
             echo {address} >ports/{port}/addr_traddr
             echo {service} >ports/{port}/addr_trsvcid
             ln -s /sys/kernel/config/nvmet/subsystems/disk ports/{port}/subsystems/disk\n",
            name = transport.name(),
            service = service(*transport),
        );
    }
    vm.sh(&script)?;
    Ok(())
}

/// Loads what connects. It gives a target that is gone less time to take leave.
pub fn prepare(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "set -e; modprobe nvme_rdma; echo {} >/sys/module/nvme_core/parameters/admin_timeout",
        20 * vm.patience()
    ))?;
    Ok(())
}

/// Waits until the disk that there was before is gone, if it goes: the next one would have another name.
fn wait_for_the_name(vm: &Vm) -> Result<()> {
    vm.sh("for n in {1..100}; do
             compgen -G '/sys/class/nvme*/nvme*' >/dev/null || break
             sleep 0.1
         done")?;
    Ok(())
}

/// What connects a machine to the disk of `target`, after [`prepare`].
pub fn connecting(target: &Vm) -> String {
    connecting_to(Transport::Rdma, &target.ip(), 30 * target.patience())
}

/// The same to an address of the target's, which has so many seconds to answer.
fn connecting_to(transport: Transport, address: &str, seconds: u32) -> String {
    format!(
        "echo transport={},traddr={address},trsvcid={},nqn=disk,nr_io_queues=1,ctrl_loss_tmo=0,\
             keep_alive_tmo={seconds} >/dev/nvme-fabrics",
        transport.name(),
        service(transport),
    )
}

/// Connects `vm` to the disk at an address; gives its name. Nothing else is connected.
pub fn connect_to(vm: &Vm, transport: Transport, address: &str) -> Result<&'static str> {
    prepare(vm)?;
    vm.sh(&format!(
        "set -e; modprobe nvme_{}; {}",
        transport.name(),
        connecting_to(transport, address, PATIENCE.as_secs() as u32)
    ))?;
    vm.wait_for("test -b /dev/nvme0n1", PATIENCE)?;
    Ok("/dev/nvme0n1")
}

/// What ends all connections of a machine.
pub const DISCONNECTING: &str = "for c in /sys/class/nvme/nvme*/delete_controller; do
        [ ! -e $c ] || echo 1 >$c || true
    done";

/// Connects `vm` to the disk of `target`.
pub fn connect(vm: &Vm, target: &Vm) -> Result<()> {
    prepare(vm)?;
    wait_for_the_name(vm)?;
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
         rm -f ports/*/subsystems/disk
         rmdir ports/* subsystems/disk/namespaces/1 subsystems/disk",
        PATIENCE,
    )?;
    // What is left of connections goes in its own time.
    vm.wait_for("modprobe -r nvmet_rdma", PATIENCE)
}

/// Has a machine connect to the disk that another one serves, and connect again whenever it loses it.
pub fn connect_for_good(initiator: &Vm, target: &Vm) -> Result<()> {
    Nvme::connect(initiator, target, 600).map(drop)
}

/// A disk for as long as both machines want it, whichever devices they have meanwhile.
pub struct Nvme;

impl Disk for Nvme {
    fn serve(target: &Vm) -> Result<()> {
        // Who listens at one address alone gives its port up together with the device.
        serve_at(target, "0.0.0.0", 32)
    }

    fn connect(initiator: &Vm, target: &Vm, lost_after: u32) -> Result<String> {
        prepare(initiator)?;
        wait_for_the_name(initiator)?;
        // Who tries again before a device that failed is taken away loses his disk with it: the driver gives
        // its users a second.
        initiator.sh(&format!(
            "nvme connect -t rdma -a {} -s 4420 -n disk -i 1 --reconnect-delay=2 \
                 --ctrl-loss-tmo={lost_after} --keep-alive-tmo={}",
            target.ip(),
            5 * target.patience()
        ))?;
        initiator.wait_for("test -b /dev/nvme0n1", PATIENCE)?;
        Ok("/dev/nvme0n1".to_owned())
    }

    const CONNECTED: &str = "for state in /sys/class/nvme/nvme*/state; do
            read -r state <$state && [ $state = live ] && exit
        done; exit 1";

    fn remove(target: &Vm) -> Result<()> {
        target.sh_in(
            "rm /sys/kernel/config/nvmet/ports/1/subsystems/disk",
            PATIENCE,
        )?;
        Ok(())
    }

    fn disconnect(initiator: &Vm) -> Result<()> {
        disconnect(initiator)?;
        // A controller that is gone may still be held by who was told last.
        initiator.wait_for("modprobe -r nvme_rdma", PATIENCE)
    }

    fn end(target: &Vm) -> Result<()> {
        end(target)
    }
}

/// Finds the disk, writes it in every size of block, and has a file system on it.
fn verified(cluster: &Cluster) -> Result<()> {
    storage::with_disk::<Nvme>(cluster, |one, two, disk| {
        let offered = one.sh(&format!("nvme discover -t rdma -a {} -s 4420", two.ip()))?;
        let listed = |name: &str, value: &str| {
            offered.lines().any(|line| {
                let mut words = line.split_whitespace();
                words.next() == Some(name) && words.next() == Some(value)
            })
        };
        ensure!(
            listed("subnqn:", "disk") && listed("traddr:", &two.ip()),
            "the disk is not listed:\n{offered}"
        );
        let before = registered_and_ended(cluster, one)?;
        storage::verify(one, disk)?;
        let after = registered_and_ended(cluster, one)?;
        // Memory of a request is registered with it, and the target's answer ends that; else the initiator would, and
        // nobody would see a difference.
        for (what, index) in [("registered", 0), ("ended by the target", 1)] {
            let count = after[index] - before[index];
            ensure!(count > 0, "no memory was {what}");
        }
        storage::file_system(one, disk)
    })
}

/// How often the device of a machine has registered memory by work request, and how often a peer's message has ended a
/// key.
fn registered_and_ended(cluster: &Cluster, vm: &Vm) -> Result<[u64; 2]> {
    let report = cluster.device_command(vm.index, &json!({"cmd": "counters"}))?;
    let counted = |name: &str| {
        let count = report["engine"][name].as_u64();
        count.with_context(|| format!("no {name} in {report}"))
    };
    Ok([counted("sq_registrations")?, counted("peer_invalidations")?])
}

/// All that users see go wrong, one after another under one load: a connection is what takes longest.
fn troubles(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    storage::with_disk::<Nvme>(cluster, |one, two, disk| {
        let load = Load::start(cluster, one, disk)?;
        storage::cable_pulled(cluster, two, one, Nvme::CONNECTED)?;
        load.goes_on(cluster).context("after the cable was back")?;
        for vm in [one, two] {
            storage::begins_anew(cluster, vm, one, Nvme::CONNECTED)?;
            load.goes_on(cluster)
                .with_context(|| format!("after {} had another device", vm.name()))?;
        }
        // From here on nobody brings the connection back.
        one.sh("for c in /sys/class/nvme/nvme*/ctrl_loss_tmo; do echo 2 >$c; done")?;
        Nvme::remove(two)?;
        load.fails()
    })
}
