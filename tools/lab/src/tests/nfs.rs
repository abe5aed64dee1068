// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files of one machine in another, by NFS over RDMA: each call and its answer in one message, and data by the
//! server's reads and writes of memory that the client registers.

use anyhow::{ensure, Result};

use super::driver::bind_anew;
use super::recovery::USERS_TOOK;
use super::storage::{self, begins_anew, cable_pulled, Load, Transport, PATIENCE};
use super::VmTest;
use crate::cluster::Cluster;
use crate::traffic::wait_listening;
use crate::vm::Vm;

/// On machines with the driver loaded, on the stock kernel.
pub const SHORT: &[VmTest] = &[VmTest::new(
    "versions 3 and 4.2: what one writes in 4 KiB and 1 MiB the other reads",
    exchanged,
)];

/// The same with all that users see go wrong.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "versions 3 and 4.2: fio with verification in 4 KiB, 64 KiB and 1 MiB; what one writes the other reads",
        verified,
    ),
    VmTest::new("a verified load goes on after a pulled cable", cable),
    VmTest::new(
        "a verified load goes on after a fatal stop of the server's device",
        server_fatal,
    ),
    VmTest::new(
        "a verified load goes on after a fatal stop of the client's device",
        client_fatal,
    ),
    VmTest::new(
        "a verified load in a container goes on after a fatal stop of the client's device",
        container_fatal,
    ),
    VmTest::new(
        "a verified load waits for a server that is stopped, and goes on when it is back",
        stopped,
    ),
];

/// What is offered.
pub const FOLDER: &str = "/export";

const MOUNTD: u16 = 20048;
const NFSD: u16 = 20049;

/// Has the kernel's server take calls over RDMA.
const START: &str = "rpc.nfsd 2 && echo rdma 20049 >/proc/fs/nfsd/portlist";

/// Offers a folder in memory, [`FOLDER`].
pub fn serve(vm: &Vm) -> Result<()> {
    vm.sh("set -e
         modprobe -a nfsd rpcrdma
         mkdir -p /export /run/rpcbind
         mount -t tmpfs none /export
         mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
         rpcbind")?;
    wait_listening(vm, 111)?;
    // Whoever held something of a server that was here before gets little time to ask for it: there was none. The
    // kernel says EBUSY where that is over already.
    vm.sh(&format!(
        "set -e
         exportfs -o rw,no_root_squash,insecure,no_subtree_check,fsid=0 '*:/export'
         echo 10 >/proc/fs/nfsd/nfsv4leasetime
         echo 10 >/proc/fs/nfsd/nfsv4gracetime
         rpc.mountd -p {MOUNTD}
         {START}
         echo Y 2>/dev/null >/proc/fs/nfsd/v4_end_grace || true"
    ))?;
    wait_listening(vm, MOUNTD)
}

/// Takes it back.
pub fn end(vm: &Vm) -> Result<()> {
    vm.sh_in(
        "set -e
         rpc.nfsd 0
         exportfs -ua
         # Until they have ended: their ports are those of the next ones.
         killall -w rpc.mountd rpcbind",
        PATIENCE,
    )?;
    // The server lets go of files in its own time.
    vm.wait_for(
        "for at in /export /proc/fs/nfsd; do ! mountpoint -q $at || umount $at || exit; done",
        PATIENCE,
    )
}

/// Mounts the folder of `server` by a version of the protocol; gives where.
fn mount(vm: &Vm, server: &Vm, version: &str) -> Result<String> {
    mount_from(vm, (Transport::Rdma, &server.ip()), version)
}

/// The same from an address of the server's.
pub fn mount_from(vm: &Vm, from: (Transport, &str), version: &str) -> Result<String> {
    let (at, script) = mounting(from, version);
    vm.sh_in(&script, PATIENCE)?;
    Ok(at)
}

/// Where the folder is mounted, and the script that does it.
fn mounting((transport, address): (Transport, &str), version: &str) -> (String, String) {
    let at = format!("/run/nfs-{version}");
    let (folder, more) = match version {
        "3" => (FOLDER, format!(",nolock,mountproto=tcp,mountport={MOUNTD}")),
        _ => ("/", String::new()),
    };
    let proto = transport.name();
    let port = match transport {
        Transport::Rdma => NFSD,
        Transport::Tcp => 2049,
    };
    let script = format!(
        "set -e
         mkdir -p {at}
         mount -t nfs -o vers={version},proto={proto},port={port}{more} {address}:{folder} {at}
         grep ' {at} ' /proc/mounts | grep vers={version}, | grep -q proto={proto}"
    );
    (at, script)
}

/// Takes back what was mounted.
pub fn unmount(vm: &Vm, at: &str) -> Result<()> {
    vm.sh_in(&format!("umount {at}"), PATIENCE)?;
    Ok(())
}

/// Succeeds where the client is connected.
const CONNECTED: &str =
    "grep -qw CONNECTED /sys/kernel/sunrpc/xprt-switches/switch-*/xprt-*-rdma/xprt_state";

fn exchanged(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    let three = mount(one, two, "3")?;
    let four = mount(one, two, "4.2")?;
    for (turn, writer, reader) in [(1, &three, &four), (2, &four, &three)] {
        // What one has named and removed the other may remember for a while.
        one.sh_in(
            &format!(
                "set -e
                 head -c 4M /dev/urandom >/run/written
                 dd if=/run/written of={writer}/small-{turn} bs=4k count=128 oflag=direct status=none
                 dd if=/run/written of={writer}/large-{turn} bs=1M oflag=direct status=none
                 cmp -n $((128 * 4096)) /run/written {reader}/small-{turn}
                 cmp /run/written {reader}/large-{turn}
                 [ $(stat -c %s {reader}/small-{turn}) = $((128 * 4096)) ]
                 rm {writer}/small-{turn} {writer}/large-{turn}"
            ),
            PATIENCE,
        )?;
    }
    unmount(one, &three)?;
    unmount(one, &four)?;
    end(two)
}

fn verified(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    let three = mount(one, two, "3")?;
    let four = mount(one, two, "4.2")?;
    for at in [&three, &four] {
        storage::verify(one, &format!("{at}/fio"))?;
        one.sh(&format!("rm {at}/fio"))?;
    }
    for (writer, reader) in [(&three, &four), (&four, &three)] {
        one.sh_in(
            &format!(
                "set -e
                 cp -r /usr/lib/x86_64-linux-gnu/libibverbs /usr/sbin/*fs* {writer}
                 (cd {writer}; find . -type f -exec sha256sum {{}} +) >/run/sums
                 [ $(wc -l </run/sums) -gt 3 ]
                 echo 3 >/proc/sys/vm/drop_caches
                 cd {reader}; sha256sum --quiet -c /run/sums
                 rm -r {reader}/*"
            ),
            PATIENCE,
        )?;
    }
    // The server does it by itself, in this version.
    one.sh(&format!(
        "set -e; cd {four}
         head -c 1M /dev/urandom >whole; fallocate -p -o 4096 -l 65536 whole
         [ $(stat -c %b whole) -lt 2048 ]; cp whole copy; cmp whole copy; rm whole copy"
    ))?;
    unmount(one, &three)?;
    unmount(one, &four)?;
    end(two)
}

/// Uses files of the second machine in the first.
fn with_files(
    cluster: &Cluster,
    version: &str,
    test: impl FnOnce(&Vm, &Vm) -> Result<()>,
) -> Result<()> {
    let (one, two) = cluster.two()?;
    serve(two)?;
    let at = mount(one, two, version)?;
    let load = Load::start(cluster, one, &format!("{at}/load"))?;
    test(one, two)?;
    load.goes_on(cluster)?;
    load.finish()?;
    unmount(one, &at)?;
    end(two)
}

fn cable(cluster: &Cluster) -> Result<()> {
    with_files(cluster, "4.2", |one, two| {
        cable_pulled(cluster, two, one, CONNECTED)
    })
}

fn server_fatal(cluster: &Cluster) -> Result<()> {
    let (_, two) = cluster.two()?;
    bind_anew(two)?;
    with_files(cluster, "4.2", |one, two| {
        begins_anew(cluster, two, one, CONNECTED)
    })
}

/// The client connects again at once, while the device that failed is still there, and waits only where it is told
/// that the network is down.
fn client_fatal(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    one.sh("dmesg -C")?;
    with_files(cluster, "4.2", |one, _| {
        begins_anew(cluster, one, one, CONNECTED)
    })?;
    let_go_in_time(one)
}

/// Fails where a device that failed could not be taken away at once: the client keeps it until the core has given up
/// to tell the server of the end of the connection, which the driver sees to beforehand. By the core's own timers that
/// takes 74 s.
fn let_go_in_time(vm: &Vm) -> Result<()> {
    let said = vm.sh("dmesg")?;
    let late = said.lines().filter_map(|line| {
        let time = line.split(USERS_TOOK).nth(1)?;
        time.split_whitespace().next()?.parse::<u64>().ok()
    });
    ensure!(
        late.max() < Some(60_000),
        "{}: users did not let go:\n{said}",
        vm.name()
    );
    Ok(())
}

/// Has a command run in the container's network and among its mounts.
const INSIDE: &str = "nsenter -t $(cat /run/container) -n -m";

/// A network and mounts of its own, as a container's runtime makes them, with a VLAN of the card for the network: the
/// RDMA device is everybody's. For who mounts there the kernel takes a network that is down, or to which there is no
/// way (`ENETDOWN`, `ENETUNREACH`), for one that is gone for good, and fails all requests; so the driver says of a
/// device that failed that it is the host that cannot be reached (`EHOSTUNREACH`).
fn container_fatal(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    bind_anew(one)?;
    one.sh("dmesg -C")?;
    serve(two)?;
    let add = "modprobe 8021q; ip link add link eth0 name lan9 type vlan id 9";
    two.sh(&format!(
        "set -e; {add}; ip addr add 10.77.9.2/24 dev lan9; ip link set lan9 up"
    ))?;
    one.sh(&format!(
        "set -e; {add}
         ip netns add container
         ip link set lan9 netns container
         ip -n container addr add 10.77.9.1/24 dev lan9
         ip -n container link set lo up
         ip -n container link set lan9 up
         rm -f /run/container"
    ))?;
    let container = one.spawn(
        "exec ip netns exec container bash -c 'echo $$ >/run/container; exec sleep infinity'",
        8 * PATIENCE,
    )?;
    one.wait_for("test -s /run/container", PATIENCE)?;
    for (vm, address) in [(one, "0a4d:0901"), (two, "0a4d:0902")] {
        let listed = format!("cat /sys/class/infiniband/*/ports/1/gids/* | grep -q ffff:{address}");
        vm.wait_for(&listed, PATIENCE)?;
    }
    let (at, mount) = mounting((Transport::Rdma, "10.77.9.2"), "4.2");
    one.sh_in(
        &format!(
            "{INSIDE} bash <<'END'
{mount}
grep ' {at} ' /proc/mounts | grep -q fatal_neterrors=ENETDOWN:ENETUNREACH
END"
        ),
        PATIENCE,
    )?;
    let load = Load::start_by(cluster, one, INSIDE, &format!("{at}/load"))?;
    begins_anew(
        cluster,
        one,
        one,
        &format!("{INSIDE} bash -c '{CONNECTED}'"),
    )?;
    load.goes_on(cluster)?;
    load.finish()?;
    let_go_in_time(one)?;
    one.sh_in(&format!("{INSIDE} umount {at}"), PATIENCE)?;
    container.end_with(libc::SIGKILL)?;
    // With its network goes what it had of the card.
    one.sh("ip netns del container")?;
    two.sh("ip link del lan9")?;
    end(two)
}

fn stopped(cluster: &Cluster) -> Result<()> {
    // This version has no state that the server could forget.
    with_files(cluster, "3", |one, two| {
        two.sh_in("rpc.nfsd 0", PATIENCE)?;
        one.wait_for(&format!("! ({CONNECTED})"), PATIENCE)?;
        two.sh(START)?;
        one.wait_for(CONNECTED, PATIENCE)
    })
}
