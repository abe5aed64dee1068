// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that need virtual machines, in groups that share booted machines.

mod allocations;
mod basics;
mod clients;
mod connections;
mod faults;
mod inside;
mod interfaces;
mod lifecycle;
mod limits;
mod misbehaviour;
mod notification;
mod wire;

use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use crate::cluster::{Cluster, Options};
use crate::kernel::Flavour;
use crate::process::wait_until;
use crate::vm::Vm;

/// One test.
pub struct VmTest {
    /// What it proves.
    pub name: &'static str,
    /// The test itself.
    pub run: fn(&Cluster) -> Result<()>,
    /// The machines cannot be used after it.
    pub ends_group: bool,
}

impl VmTest {
    const fn new(name: &'static str, run: fn(&Cluster) -> Result<()>) -> Self {
        Self {
            name,
            run,
            ends_group: false,
        }
    }

    const fn last(name: &'static str, run: fn(&Cluster) -> Result<()>) -> Self {
        Self {
            name,
            run,
            ends_group: true,
        }
    }
}

/// Tests on the same machines.
pub struct Group {
    /// What it is about.
    pub name: &'static str,
    /// The guests' kernel.
    pub flavour: Flavour,
    /// Load the driver before the first test.
    pub load_driver: bool,
    /// Changes to the usual pair of machines.
    pub options: fn(Options) -> Options,
    /// In the order in which they run, by subject.
    pub tests: &'static [&'static [VmTest]],
}

impl Group {
    /// All its tests.
    pub fn tests(&self) -> impl Iterator<Item = &'static VmTest> {
        self.tests.iter().copied().flatten()
    }
}

/// The groups of an ordinary run, and with `all` those as well that take long. What a checker of the
/// kernel can find runs on the test kernel, where everything is some times slower; what only the wire
/// or the programs show runs on the stock kernel.
pub fn groups(all: bool) -> Vec<Group> {
    let mut groups = ordinary();
    if all {
        groups.extend(long());
    }
    groups
}

fn ordinary() -> Vec<Group> {
    vec![
        Group {
            name: "stock",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            tests: &[basics::STOCK, faults::NEIGHBOURS],
        },
        Group {
            name: "neighbours",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            tests: &[interfaces::TESTS, limits::TESTS, lifecycle::FAILING],
        },
        Group {
            name: "clients",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            tests: &[clients::TESTS, connections::TESTS, inside::TESTS],
        },
        Group {
            name: "wire",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options {
                cpus: 1,
                pcap: true,
                ..o
            },
            tests: &[wire::TESTS],
        },
        Group {
            name: "reference",
            flavour: Flavour::Stock,
            load_driver: false,
            options: |o| Options {
                cpus: 1,
                device: false,
                pcap: true,
                ..o
            },
            tests: &[wire::REFERENCE],
        },
        Group {
            name: "interoperation",
            flavour: Flavour::Stock,
            load_driver: false,
            options: |o| Options {
                cpus: 1,
                plain: vec![2],
                ..o
            },
            tests: &[wire::INTEROPERATION],
        },
        Group {
            name: "few vectors",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options {
                cpus: 4,
                device_args: vec!["--vectors".into(), "3".into()],
                ..o
            },
            tests: &[notification::FEW_VECTORS],
        },
        Group {
            name: "checked",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            tests: &[
                basics::CHECKED,
                notification::TESTS,
                faults::TESTS,
                lifecycle::LOADING,
                lifecycle::REMOVAL,
            ],
        },
    ]
}

fn long() -> Vec<Group> {
    vec![
        Group {
            name: "threads",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| Options { cpus: 4, ..o },
            tests: &[basics::THREADS],
        },
        Group {
            name: "allocations",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            tests: &[allocations::TESTS],
        },
        Group {
            name: "misbehaviour",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            tests: &[misbehaviour::TESTS],
        },
    ]
}

/// Waits until the RDMA port of a machine is active and has its address.
pub fn wait_active(vm: &Vm) -> Result<()> {
    vm.wait_for(
        &format!(
            "rdma link | grep -q 'state ACTIVE' && ({})",
            crate::traffic::DEVICE_AND_GID
        ),
        Duration::from_secs(30),
    )
}

/// Fails when the kernel's leak detector finds something in any machine.
pub fn no_leaks(cluster: &Cluster) -> Result<()> {
    let mut scans = Vec::new();
    for vm in &cluster.vms {
        // An object counts as leaked only when it is some seconds old, and a pointer that was
        // on the move during one scan is found by the next.
        let scan = vm.spawn(
            "k=/sys/kernel/debug/kmemleak; sleep 6; echo scan >$k; sleep 1; echo scan >$k; head -c 20000 $k",
            Duration::from_secs(240),
        )?;
        scans.push((vm, scan));
    }
    let mut found = String::new();
    for (vm, scan) in scans {
        let text = scan.success()?;
        if text.contains("unreferenced object") {
            found += &format!("{}:\n{text}", vm.name());
        }
    }
    if !found.is_empty() {
        bail!("kmemleak reports:\n{found}");
    }
    Ok(())
}

/// Fails unless no object of user programs is left, neither in the kernel's list nor in the
/// driver's own tables.
fn nothing_left(vm: &Vm) -> Result<()> {
    // What remains belongs to the kernel itself: its port management has a domain and a completion
    // queue, and a queue pair that no table counts.
    let script = "for kind in qp mr cq pd srq; do
            rdma resource show $kind >/run/resources || echo \"rdma resource show $kind: $?\"
            grep -E 'pid [0-9]+' /run/resources
        done
        awk '
            BEGIN { kept[\"protection_domains\"] = kept[\"completion_queues\"] = 1 }
            NR > 1 && $2 != 0 + kept[$1]
        ' /sys/kernel/debug/ferrite0/tables 2>&1
        true";
    let mut left = String::new();
    let gone = wait_until(Instant::now() + Duration::from_secs(30), || {
        left = vm.sh(script)?;
        Ok(left.trim().is_empty())
    })?;
    if !gone {
        bail!("{}: left behind:\n{left}", vm.name());
    }
    Ok(())
}

/// A short pingpong: the machines are still fit for service.
fn still_works(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    crate::traffic::pingpong(one, two, 4096, 50, false)?;
    Ok(())
}
