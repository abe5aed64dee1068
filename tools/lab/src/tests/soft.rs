// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sample of a driver: another one than Ferrite's on the same abstractions.

use std::time::Duration;

use anyhow::{ensure, Result};

use super::driver::{bind, unbind};
use super::VmTest;
use crate::cluster::Cluster;
use crate::vm::Vm;

/// With all checkers of the test kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a kernel user passes its tests on the sample of a driver",
        kernel_user,
    ),
    VmTest::new(
        "rdma and sysfs show the sample's device, whose port follows its interface",
        shown,
    ),
];

const TIME: Duration = Duration::from_secs(180);

/// What every device does, of the tests of the kernel user.
const DONE: &[&str] = &[
    "sends_arrive",
    "immediate_data_arrives",
    "many_requests_complete",
    "writes_land_where_they_should",
    "writes_with_immediate_consume_a_receive",
    "reads_fetch_the_peers_memory",
    "atomics_are_done_once_and_return_what_was_there",
    "send_with_invalidate_ends_the_peers_region",
    "a_region_may_be_registered_again_under_another_key",
    "what_is_not_allowed_is_refused",
    "beyond_the_region_is_refused",
    "a_message_longer_than_the_receive_fails_at_both_ends",
    "a_region_is_used_before_its_registration_is_complete",
    "sends_and_receives_have_room_of_their_own",
    "rings_may_be_large",
    "regions_may_have_large_pages",
    "regions_of_other_domains_are_not_posted",
    "regions_may_have_many_pages",
    "regions_may_have_room_for_more_pages",
];

/// Runs `check` with the sample loaded, in a machine without another device.
fn with_sample(vm: &Vm, check: impl FnOnce() -> Result<()>) -> Result<()> {
    unbind(vm)?;
    let checked = vm
        .sh_in(
            "insmod /ferrite/modules/rust_rdma_soft.ko && cp /ferrite/lib/soft.driver /etc/libibverbs.d/",
            Duration::from_secs(60),
        )
        .and_then(|_| {
            vm.wait_for(
                "rdma link | grep 'soft0/1' | grep 'state ACTIVE' | grep -q 'netdev eth0'",
                Duration::from_secs(60),
            )
        })
        .and_then(|()| check());
    let removed = vm.sh_in(
        "rm -f /etc/libibverbs.d/soft.driver; rmmod rust_rdma_soft",
        Duration::from_secs(60),
    );
    bind(vm)?;
    checked?;
    removed.map(drop)
}

fn kernel_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        one.sh_in(
            "dmesg -C; insmod /ferrite/modules/rust_rdma_loop.ko; s=$?; rmmod rust_rdma_loop; exit $s",
            TIME,
        )?;
        let said = one.sh("dmesg | grep rust_rdma_loop")?;
        for test in DONE {
            ensure!(
                said.contains(&format!("rust_rdma_loop: soft0: ok {test}\n")),
                "not done: {test}\n{said}"
            );
        }
        ensure!(!said.contains("not ok"), "{said}");
        Ok(())
    })
}

fn shown(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        one.sh(
            "set -e
             rdma dev show soft0 | grep -q 'node_type ca' || { rdma dev; exit 1; }
             grep -q 'RDMA device of software' /sys/class/infiniband/soft0/node_desc
             grep -q RoCE /sys/class/infiniband/soft0/ports/1/gid_attrs/types/0
             rdma resource show | grep -q 'soft0: .*qp 0' || { rdma resource show; exit 1; }
             grep -qx 1 /sys/class/infiniband_verbs/uverbs*/abi_version
             rdma dev set soft0 name other0; rdma link | grep -q other0/1; rdma dev set other0 name soft0",
        )?;
        one.sh("ip link set eth0 down")?;
        let down = one.wait_for(
            "rdma link | grep 'soft0/1' | grep -q 'state DOWN'",
            Duration::from_secs(60),
        );
        one.sh(&format!(
            "ip link set eth0 up; ip addr replace {}/24 dev eth0",
            one.ip()
        ))?;
        down?;
        one.wait_for(
            "rdma link | grep 'soft0/1' | grep -q 'state ACTIVE'",
            Duration::from_secs(60),
        )
    })
}
