// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that need virtual machines, in groups that share booted machines.

mod affinity;
mod allocations;
mod basics;
mod clients;
mod connections;
mod counters;
mod driver;
mod endurance;
mod faults;
mod growth;
mod inside;
mod interfaces;
mod interrupts;
mod iser;
mod lifecycle;
mod limits;
mod memory;
mod misbehaviour;
pub(crate) mod moderation;
mod moving;
pub(crate) mod nfs;
mod notification;
mod numbers;
pub(crate) mod nvme;
mod one_adapter;
mod only_card;
mod priority;
mod rds;
mod recovery;
mod registration;
mod smb;
mod smc;
pub mod soak;
mod soft;
mod split;
mod srp;
pub(crate) mod storage;
mod vector_map;
mod vectors;
mod wire;

use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use crate::cluster::{Cluster, Options};
use crate::kernel::Flavour;
use crate::klog;
use crate::process::wait_until;
use crate::vm::{Running, Vm};

/// One test.
pub struct VmTest {
    /// What it proves.
    pub name: &'static str,
    /// The test itself.
    pub run: fn(&Cluster) -> Result<()>,
    /// The machines cannot be used after it.
    pub ends_group: bool,
    /// It needs machines of its own.
    pub fresh: bool,
}

impl VmTest {
    const fn new(name: &'static str, run: fn(&Cluster) -> Result<()>) -> Self {
        Self {
            name,
            run,
            ends_group: false,
            fresh: false,
        }
    }

    const fn last(name: &'static str, run: fn(&Cluster) -> Result<()>) -> Self {
        Self {
            name,
            run,
            ends_group: true,
            fresh: false,
        }
    }

    /// On machines that no other test uses, before or after.
    const fn alone(name: &'static str, run: fn(&Cluster) -> Result<()>) -> Self {
        Self {
            name,
            run,
            ends_group: true,
            fresh: true,
        }
    }
}

/// Tests on the same machines.
pub struct Group {
    /// What the machines are called.
    pub name: &'static str,
    /// The guests' kernel.
    pub flavour: Flavour,
    /// Load the driver before the first test.
    pub load_driver: bool,
    /// Changes to the usual pair of machines.
    pub options: fn(Options) -> Options,
    /// How long all its tests take, in seconds, about: what takes longest begins first.
    pub seconds: usize,
    /// Only for the long run, or for who asks for its tests by name.
    pub long: bool,
    /// In the order in which they run: a subject and its tests.
    pub tests: &'static [(&'static str, &'static [VmTest])],
}

impl Group {
    /// All its tests, each with its full name.
    pub fn tests(&self) -> impl Iterator<Item = (String, &'static VmTest)> {
        self.tests.iter().flat_map(|(subject, tests)| {
            tests
                .iter()
                .map(move |test| (format!("{subject}: {}", test.name), test))
        })
    }
}

/// One has a vector for each processor and queue, the other has fewer.
fn four_processors(usual: Options) -> Options {
    Options {
        cpus: 4,
        own_device_args: vec![vec![], notification::vectors(3, 5)],
        ..usual
    }
}

/// All groups. What a checker of the kernel can find runs on the test kernel, where everything is some
/// times slower; what only the wire or the programs show runs on the stock kernel. A boot takes as long
/// as many tests, so that what can share machines does.
pub fn groups() -> Vec<Group> {
    vec![
        Group {
            name: "stock",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            seconds: 1000,
            long: false,
            tests: &[
                ("stock", basics::STOCK),
                ("wire", wire::TESTS),
                ("stock", faults::NEIGHBOURS),
                ("neighbours", interfaces::TESTS),
                ("neighbours", limits::TESTS),
                ("neighbours", endurance::LIMITS),
                ("clients", clients::TESTS),
                ("clients", connections::TESTS),
                ("clients", inside::TESTS),
                ("registration", registration::TESTS),
                ("memory", memory::BETWEEN),
                ("wire", memory::WIRE),
                ("clients", moderation::TESTS),
                ("clients", growth::FAILING),
                ("neighbours", lifecycle::FAILING),
                ("recovery", recovery::BUS),
                ("moving", moving::FAILING),
                ("registration", registration::SLOW),
                ("registration", registration::FAILING),
                ("NVMe-oF", nvme::TESTS),
                ("iSER", iser::SHORT),
                ("NFS/RDMA", nfs::SHORT),
                ("RDS", rds::SHORT),
                ("SRP", srp::SHORT),
                ("kernel users", storage::AFTERWARDS),
            ],
        },
        Group {
            name: "kernel users",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            seconds: 500,
            long: true,
            tests: &[
                ("iSER", iser::TESTS),
                ("NFS/RDMA", nfs::TESTS),
                ("RDS", rds::TESTS),
                ("SRP", srp::TESTS),
                ("kernel users", storage::AFTERWARDS),
            ],
        },
        Group {
            name: "checked kernel users",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| Options { cpus: 1, ..o },
            seconds: 400,
            long: true,
            tests: &[
                ("SMB Direct", smb::TESTS),
                ("SMC-R", smc::TESTS),
                ("kernel users", storage::AFTERWARDS),
            ],
        },
        Group {
            name: "reference",
            flavour: Flavour::Stock,
            load_driver: false,
            options: |o| Options {
                cpus: 1,
                device: false,
                ..o
            },
            seconds: 100,
            long: true,
            tests: &[("reference", wire::REFERENCE)],
        },
        Group {
            name: "crowds",
            flavour: Flavour::Stock,
            load_driver: true,
            options: recovery::beside_another,
            seconds: 600,
            long: true,
            tests: &[
                ("one processor", moving::TESTS),
                ("one processor", moving::OF_THE_KERNEL),
                ("clients", clients::LONG),
                ("neighbours", limits::LONG),
                ("recovery", recovery::STOCK),
                ("clients", growth::LONG),
            ],
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
            seconds: 110,
            long: false,
            tests: &[("interoperation", wire::INTEROPERATION)],
        },
        Group {
            name: "four processors",
            flavour: Flavour::Stock,
            load_driver: true,
            options: four_processors,
            seconds: 200,
            long: false,
            tests: &[
                ("few vectors", notification::FEW_VECTORS),
                ("few vectors", priority::SHARED),
                ("four processors", priority::APART),
                ("four processors", moving::TESTS),
                ("four processors", moving::OF_THE_KERNEL),
                ("four processors", moving::SERVES),
                ("four processors", affinity::TESTS),
                ("four processors", affinity::MORE),
                ("vector map", vector_map::LAYOUTS),
                ("few vectors", vector_map::FEW),
                ("four processors", basics::THREADS),
                ("four processors", lifecycle::KILLED),
            ],
        },
        Group {
            name: "large page",
            flavour: Flavour::Stock,
            load_driver: true,
            options: registration::with_a_large_page,
            seconds: 60,
            long: true,
            tests: &[("registration", registration::LARGE_PAGE)],
        },
        Group {
            name: "all layouts",
            flavour: Flavour::Stock,
            load_driver: true,
            options: four_processors,
            seconds: 300,
            long: true,
            tests: &[("vector map", vector_map::ALL_LAYOUTS)],
        },
        Group {
            name: "interrupt modes",
            flavour: Flavour::Stock,
            load_driver: true,
            options: interrupts::options,
            seconds: 60,
            long: false,
            tests: &[("interrupt modes", interrupts::MODES)],
        },
        Group {
            name: "other numbers",
            flavour: Flavour::Stock,
            load_driver: true,
            options: numbers::options,
            seconds: 150,
            long: false,
            tests: &[
                ("few vectors", notification::ONE_VECTOR),
                ("one vector", vector_map::FEW),
                ("other numbers", numbers::TESTS),
                ("other numbers", limits::NUMBERS),
                ("shutdown", lifecycle::ENDING),
            ],
        },
        Group {
            name: "two processors",
            flavour: Flavour::Stock,
            load_driver: true,
            options: numbers::options,
            seconds: 60,
            long: true,
            tests: &[("two processors", affinity::TESTS)],
        },
        Group {
            name: "only card",
            flavour: Flavour::Test,
            load_driver: true,
            options: only_card::options,
            seconds: 600,
            long: true,
            tests: &[
                ("only card", only_card::TESTS),
                ("only card", only_card::LIFECYCLE),
            ],
        },
        Group {
            name: "one card",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options {
                cpus: 4,
                only_card: true,
                ..o
            },
            seconds: 120,
            long: false,
            tests: &[("one card", only_card::SHORT_TESTS)],
        },
        Group {
            name: "floods",
            flavour: Flavour::Stock,
            load_driver: true,
            options: |o| Options {
                cpus: 4,
                only_card: true,
                ..o
            },
            seconds: 100,
            long: true,
            tests: &[("one card", only_card::FLOODS)],
        },
        Group {
            name: "one adapter",
            flavour: Flavour::Stock,
            load_driver: true,
            options: one_adapter::options,
            seconds: 60,
            long: false,
            tests: &[("one adapter", one_adapter::TESTS)],
        },
        Group {
            name: "split",
            flavour: Flavour::Test,
            load_driver: false,
            options: split::options,
            seconds: 150,
            long: false,
            tests: &[("split", split::TESTS), ("split", split::AFTERWARDS)],
        },
        Group {
            name: "split at length",
            flavour: Flavour::Test,
            load_driver: false,
            options: split::options,
            seconds: 900,
            long: true,
            tests: &[
                ("split at length", split::LONG_TESTS),
                ("split at length", split::AFTERWARDS),
            ],
        },
        Group {
            name: "split over rxe",
            flavour: Flavour::Test,
            load_driver: false,
            options: split::plain_options,
            seconds: 300,
            long: true,
            tests: &[("split over rxe", split::OVER_RXE)],
        },
        Group {
            name: "recovery",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            seconds: 500,
            long: true,
            tests: &[
                ("checked", moving::OF_THE_KERNEL),
                ("checked", growth::THREADS),
                ("vector map", vector_map::MORE_CHANGES),
                ("recovery", recovery::LONG),
                ("recovery", growth::STARVED),
                ("recovery", lifecycle::KILLED),
                ("recovery", recovery::REMOVAL),
            ],
        },
        Group {
            name: "endurance",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            seconds: 3600,
            long: true,
            tests: &[("endurance", endurance::LONG)],
        },
        Group {
            name: "checked",
            flavour: Flavour::Test,
            load_driver: true,
            options: |o| o,
            seconds: 1200,
            long: false,
            tests: &[
                ("checked", basics::CHECKED),
                ("loopback", memory::WITHIN),
                ("checked", notification::TESTS),
                ("checked", moving::TESTS),
                ("checked", counters::TESTS),
                ("checked", growth::TESTS),
                ("checked", moving::ENDING),
                ("checked", faults::TESTS),
                ("checked", basics::THREADS),
                ("allocations", allocations::TESTS),
                ("checked", endurance::TESTS),
                ("checked", lifecycle::LOADING),
                ("sample", soft::TESTS),
                ("misbehaviour", misbehaviour::TESTS),
                ("recovery", recovery::TESTS),
                ("vector map", vector_map::CHANGES),
                ("SMB Direct", smb::SHORT),
                ("SMC-R", smc::SHORT),
                ("kernel users", storage::AFTERWARDS),
                ("checked", lifecycle::REMOVAL),
                ("misbehaviour", misbehaviour::LEAKING),
            ],
        },
    ]
}

/// Shell text that succeeds where an RDMA port is active. It runs no other program: in an emulator that is what takes
/// time.
const PORT_ACTIVE: &str = "for state in /sys/class/infiniband/*/ports/*/state; do
        read -r state <$state && [[ $state == *ACTIVE ]] && break
    done";

/// Waits until the RDMA port of a machine is active and has its address.
pub fn wait_active(vm: &Vm) -> Result<()> {
    let active = vm.wait_for(
        &format!(
            "{{ {PORT_ACTIVE}; }} && ({})",
            crate::traffic::DEVICE_AND_GID
        ),
        Duration::from_secs(60),
    );
    active.map_err(|error| {
        let state = vm.sh("rdma link; ip addr
            grep -H . /sys/class/infiniband/*/ports/1/gid*/* 2>/dev/null | grep -v :0000:0000:0000:0000$
            dmesg | tail -n 20");
        error.context(format!("the port does not become active: {state:?}"))
    })
}

/// Waits until a server, which is a program, takes connections of rdma_cm: the kernel may listen, too. Of several
/// that a client makes too early it might get some, and wait for what they send.
fn once_it_listens<'v>(vm: &Vm, server: Running<'v>) -> Result<Running<'v>> {
    let listens = vm.wait_for(
        "rdma resource show cm_id | grep LISTEN | grep -q ' pid '",
        Duration::from_secs(60),
    );
    if let Err(error) = listens {
        server.signal(libc::SIGTERM)?;
        return Err(error.context(format!("it does not listen: {:?}", server.wait()?)));
    }
    Ok(server)
}

/// What programs say, each in its way, whose server did not take connections yet, or could not be asked where it is in
/// the time that they give it.
const NOT_HEARD: &str = "REJECTED|ADDR_ERROR|ROUTE_ERROR|Unexpected CM event|[Cc]onnection refused";

/// A client that is tried until its server, which has no TCP socket to wait for, has heard it. One that fails in
/// another way, or crashes, is not tried again.
fn tried_until_heard(vm: &Vm, client: &str) -> String {
    // Some that were rejected do not end: rping waits for a thread of its own.
    format!(
        "for n in $(seq 20); do
             timeout {} {client} >/run/client-$$ 2>&1; rc=$?
             cat /run/client-$$
             [ $rc -ne 0 ] || exit 0
             [ $rc -lt 128 ] && grep -qE '{NOT_HEARD}' /run/client-$$ || exit $rc
             sleep 0.3
         done; exit 1",
        vm.at_most(Duration::from_secs(20)).as_secs()
    )
}

/// How often memory that seems leaked is looked for again.
const RESCANS: usize = 3;

/// Fails when the kernel's leak detector finds something in any machine.
pub fn no_leaks(cluster: &Cluster) -> Result<()> {
    let mut scans = Vec::new();
    for vm in &cluster.vms {
        // An object counts as leaked only when it is some seconds old, and a pointer that was
        // on the move during one scan is found by the next.
        let scan = vm.spawn(
            "set -e
             k=/sys/kernel/debug/kmemleak; sleep 6; echo scan >$k; sleep 1; echo scan >$k
             head -c 100000 $k",
            Duration::from_secs(240),
        )?;
        scans.push((vm, scan));
    }
    let mut found = String::new();
    for (vm, scan) in scans {
        let mut text = scan.success()?;
        // What is leaked stays so: what a later scan finds was on the move, or about to be freed.
        for _ in 0..RESCANS {
            if klog::leaks(&text).others.is_empty() {
                break;
            }
            text = vm.sh_in(
                "set -e
                 k=/sys/kernel/debug/kmemleak; sleep 5; echo scan >$k
                 head -c 100000 $k",
                Duration::from_secs(240),
            )?;
        }
        let leaks = klog::leaks(&text);
        if !leaks.others.is_empty() {
            found += &format!("{}:\n{}", vm.name(), leaks.others.concat());
            continue;
        }
        if leaks.of_the_core > 0 {
            println!(
                "  note    {}: {} nodes leaked by the RDMA core, which had no memory for the next",
                vm.name(),
                leaks.of_the_core
            );
            // It scans when it is asked to, so that there are no others in between.
            let text = vm.sh("set -e
                 k=/sys/kernel/debug/kmemleak
                 head -c 100000 $k; echo clear >$k")?;
            found += &klog::leaks(&text).others.concat();
        }
        // Each scan says what is new to it, also where the next one has found who has it.
        let mut findings = vm.new_findings();
        findings.retain(|finding| !finding.contains(klog::NEW_LEAKS));
        if !findings.is_empty() {
            bail!("{}", findings.join("\n"));
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
    // queue, and a queue pair that no table counts. The core keeps queues that its users had for the next ones.
    // One program for all of it: to start one takes longer than what it does.
    let script = r#"printf 'resource show %s\n' qp mr cq pd srq | rdma -b - >/run/resources || echo "rdma: $?"
        kept=0
        while read -r line; do
            [[ ! $line =~ pid\ [0-9]+ ]] || echo "$line"
            [[ ! $line =~ cqn\ .*users\ 0\ .*comm\ \[ib_core\] ]] || kept=$((kept + 1))
        done </run/resources
        tables=/sys/kernel/debug/ferrite0/tables
        [ -r $tables ] || { echo "no tables"; exit 0; }
        while read -r name count _; do
            case $name/$count in
                protection_domains/1 | completion_queues/$((1 + kept)) | table/*) ;;
                protection_domains/* | completion_queues/*) echo "$name $count";;
                */0) ;;
                *) echo "$name $count";;
            esac
        done <$tables"#;
    let mut left = String::new();
    let patience = vm.at_most(Duration::from_secs(60));
    let gone = wait_until(Instant::now() + patience, || {
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
