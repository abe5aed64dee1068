// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The split driver: an interface at the far end of an RDMA connection beside one that is on the same LAN itself.
//!
//! Three machines: a host, an I/O unit, and a machine on the LAN, whose wire is a socket from QEMU to QEMU. The host
//! reaches the machine on the LAN through the I/O unit, by push or by pull, or by a virtio-net interface of its own with
//! a wire of the same kind. So the split driver has one machine and one connection more on its way, which is what it is
//! for; what is told is what that costs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use super::machines::{counted, spans, Counted, Driver};
use super::Run;
use crate::artifacts::program;
use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel::Kernel;
use crate::process::check_interrupted;
use crate::shell::LOAD_DRIVER;
use crate::tests::wait_active;
use crate::traffic::wait_listening;
use crate::vm::{Running, Vm};

/// What there is: times, and what a frame takes.
pub const PARTS: [&str; 2] = ["split-time", "split-counts"];

const PATIENCE: Duration = Duration::from_secs(120);
const HOST: usize = 1;
const UNIT: usize = 2;
const LAN: usize = 3;

/// In the order of a round.
pub const DRIVERS: [Driver; 4] = [
    Driver::SplitPush,
    Driver::SplitPull,
    Driver::Virtio,
    Driver::VirtioPlain,
];

/// Bytes of data in a frame, by ping: with its headers of 42 bytes the smaller one is of the smallest size.
pub const SIZES: [u64; 2] = [18, 1472];

/// The machines.
pub struct Machines {
    cluster: Cluster,
    counts: Option<[PathBuf; 2]>,
}

/// A wire of its own kind between two machines.
fn wire(name: &str, vm: usize, is_server: bool) -> Vec<String> {
    let server = if is_server { "on" } else { "off" };
    let number = name.len();
    vec![
        "-netdev".to_owned(),
        format!("stream,id={name},server={server},addr.type=unix,addr.path={{dir}}/wire.{name}"),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev={name},romfile=,mac=52:54:00:fd:{number:02x}:{vm:02x}"),
    ]
}

impl Machines {
    /// Boots them, with the I/O unit at work.
    pub fn boot(
        run: &RunDir,
        kernel: &Kernel,
        modules: &[PathBuf],
        is_counted: bool,
    ) -> Result<Self> {
        let mut qemu_args = vec![
            wire("direct", HOST, true),
            wire("lan", UNIT, true),
            [wire("lan", LAN, false), wire("direct", LAN, false)].concat(),
        ];
        if is_counted {
            for (vm, args) in qemu_args.iter_mut().enumerate().take(2) {
                args.push("-plugin".to_owned());
                args.push(format!(
                    "{},counts={{dir}}/counts{},registers=off",
                    program("libferrite_count_plugin.so").display(),
                    vm + 1
                ));
            }
        }
        let label = if is_counted { "split-counts" } else { "split" };
        let options = Options {
            vms: 3,
            cpus: 1,
            plain: vec![LAN],
            qemu_args,
            ..Options::pair(label, modules.to_vec())
        };
        let cluster = Cluster::boot(run, kernel, &options)?;
        let folder = cluster.dir();
        let counts = is_counted.then(|| [1, 2].map(|vm| folder.join(format!("counts{vm}"))));
        let machines = Self { cluster, counts };
        machines.prepare()?;
        Ok(machines)
    }

    fn vm(&self, index: usize) -> Result<&Vm> {
        self.cluster.vms.get(index - 1).context("no such machine")
    }

    fn prepare(&self) -> Result<()> {
        for index in [HOST, UNIT] {
            let vm = self.vm(index)?;
            vm.sh(LOAD_DRIVER)?;
            wait_active(vm)?;
            vm.sh("modprobe rdma_cm")?;
        }
        self.vm(HOST)?
            .sh("ip addr add 192.168.9.1/24 dev eth1; ip link set eth1 up")?;
        self.vm(UNIT)?.sh(
            "ip link set eth1 up && insmod /ferrite/modules/rust_rdma_split_unit.ko lan=eth1 key=815",
        )?;
        self.vm(LAN)?.sh("ip link set eth0 down
             ip addr add 192.168.7.3/24 dev eth1; ip link set eth1 up
             ip addr add 192.168.9.3/24 dev eth2; ip link set eth2 up")?;
        Ok(())
    }

    /// Findings of the kernels.
    pub fn findings(&self) -> Vec<String> {
        self.cluster.new_findings()
    }

    /// Does `f` while the host has its way to the LAN.
    fn with<T>(&self, driver: Driver, f: impl FnOnce() -> Result<T>) -> Result<T> {
        if interface(driver) != "split0" {
            self.offload(driver == Driver::Virtio)?;
            return self.met(driver).and_then(|()| f());
        }
        let host = self.vm(HOST)?;
        let variant = if driver == Driver::SplitPull { 2 } else { 1 };
        let loaded = host.sh_in(
            &format!(
                "set -e
                 insmod /ferrite/modules/rust_rdma_split_host.ko server=10.77.0.{UNIT} key=815 variant={variant}
                 ip addr add 192.168.7.1/24 dev split0
                 ip link set split0 up"
            ),
            PATIENCE,
        );
        let result = loaded
            .and_then(|_| host.wait_for("[ $(cat /sys/class/net/split0/carrier) = 1 ]", PATIENCE))
            .and_then(|()| self.met(driver))
            .and_then(|()| f());
        // Also where it is not connected: the next one is loaded anew.
        let unloaded = host.sh_in("rmmod rust_rdma_split_host", PATIENCE);
        let result = result?;
        unloaded?;
        Ok(result)
    }

    /// The first frames find each other's addresses: those of another variant have gone.
    fn met(&self, driver: Driver) -> Result<()> {
        self.vm(LAN)?.sh("ip neigh flush all")?;
        let ping = format!("ping -q -c 1 -W 2 {}", address(driver));
        self.vm(HOST)?.wait_for(&ping, PATIENCE)
    }

    /// Has virtio-net segment and join frames as far as it can, or not at all, as the split driver's interface, which has no
    /// offloads.
    fn offload(&self, is_wanted: bool) -> Result<()> {
        let state = if is_wanted { "on" } else { "off" };
        for (vm, name) in [(self.vm(HOST)?, "eth1"), (self.vm(LAN)?, "eth2")] {
            // What a card on such a wire does not have is off for good, which `ethtool` takes for a failure.
            vm.sh(&format!(
                "for what in tso gso gro; do ethtool -K {name} $what {state} || :; done"
            ))?;
            if !is_wanted {
                vm.sh(&format!(
                    "! ethtool -k {name} | grep -E '^(tcp-seg|generic-seg|generic-rec).*: on'"
                ))?;
            }
        }
        Ok(())
    }

    fn iperf(&self, driver: Driver, more: &str) -> Result<Value> {
        let serving = self.serve()?;
        let said = self.vm(HOST)?.sh_in(
            &format!("iperf3 -J {more} -c {}", address(driver)),
            PATIENCE,
        );
        match said {
            Ok(said) => {
                serving.success()?;
                Ok(serde_json::from_str::<Value>(&said)?["end"].clone())
            }
            Err(error) => {
                // The next one needs its port.
                serving.end()?;
                Err(error)
            }
        }
    }

    /// A server on the LAN, for one client.
    fn serve(&self) -> Result<Running<'_>> {
        let lan = self.vm(LAN)?;
        let serving = lan.spawn("exec iperf3 -s -1 >/dev/null 2>&1", PATIENCE)?;
        wait_listening(lan, 5201)?;
        Ok(serving)
    }

    /// Half of the mean time there and back, in microseconds.
    fn latency(&self, driver: Driver, size: u64) -> Result<f64> {
        let said = self.vm(HOST)?.sh_in(
            &format!("ping -f -q -c 1000 -s {size} {}", address(driver)),
            PATIENCE,
        )?;
        let times = said.rsplit("= ").next().context("no times")?;
        let mean = times.split('/').nth(1).context("no mean")?;
        Ok(mean.parse::<f64>()? * 1000.0 / 2.0)
    }

    /// Interrupts of devices that a machine with one processor has served.
    fn interrupts(&self, vm: usize) -> Result<u64> {
        let said = self
            .vm(vm)?
            .sh("awk '$1 ~ /^[0-9]+:$/ { s += $2 } END { print s }' /proc/interrupts")?;
        Ok(said.trim().parse()?)
    }

    /// Requests of RDMA that both ends of the split driver have posted.
    fn requests(&self, driver: Driver) -> Result<u64> {
        if interface(driver) != "split0" {
            return Ok(0);
        }
        let host = self.vm(HOST)?.sh("ethtool -S split0 | tr -d :")?;
        let unit = self
            .vm(UNIT)?
            .sh("cat /sys/kernel/debug/rust_rdma_split_unit/statistics")?;
        let names = ["rdma_sends", "rdma_writes", "rdma_reads", "control_sent"];
        let mut sum = 0;
        for line in host.lines().chain(unit.lines()) {
            let mut words = line.split_whitespace();
            if let (Some(name), Some(value)) = (words.next(), words.next()) {
                if names.contains(&name) {
                    sum += value.parse::<u64>()?;
                }
            }
        }
        Ok(sum)
    }

    /// Frames of the host's interface, both ways.
    fn frames(&self, driver: Driver) -> Result<u64> {
        let said = self.vm(HOST)?.sh(&format!(
            "cd /sys/class/net/{}/statistics; echo $(($(cat rx_packets) + $(cat tx_packets)))",
            interface(driver)
        ))?;
        Ok(said.trim().parse()?)
    }

    /// Runs a command in the host, with all that it and the I/O unit do meanwhile counted.
    fn count(&self, driver: Driver, command: &str) -> Result<Counts> {
        let (host, unit) = (self.vm(HOST)?, self.vm(UNIT)?);
        let [here, there] = self.counts.as_ref().context("nothing is counted")?;
        unit.sh(&format!("[ -p {SPAN} ] || mkfifo {SPAN}"))?;
        let before = (
            [counted(here)?, counted(there)?],
            [self.interrupts(HOST)?, self.interrupts(UNIT)?],
            self.requests(driver)?,
            self.frames(driver)?,
        );
        let (begun, _) = spans(there)?;
        let counting = unit.spawn(
            &format!("exec /ferrite/bin/verbs-bench count cat {SPAN}"),
            PATIENCE,
        )?;
        while spans(there)?.0 == begun {
            ensure!(counting.ended().is_none(), "the I/O unit does not count");
            std::thread::sleep(Duration::from_millis(5));
        }
        let done = host.sh_in(
            &format!("exec /ferrite/bin/verbs-bench count {command} >/dev/null"),
            PATIENCE,
        );
        unit.sh(&format!(": >{SPAN}"))?;
        counting.success()?;
        done?;
        let interrupts = [self.interrupts(HOST)?, self.interrupts(UNIT)?];
        Ok(Counts {
            instructions: [counted(here)? - before.0[0], counted(there)? - before.0[1]],
            interrupts: [interrupts[0] - before.1[0], interrupts[1] - before.1[1]],
            requests: self.requests(driver)? - before.2,
            frames: self.frames(driver)? - before.3,
        })
    }
}

/// Where a span of the I/O unit is ended from.
const SPAN: &str = "/run/span";

/// What a command took, in the host and in the I/O unit.
struct Counts {
    instructions: [Counted; 2],
    interrupts: [u64; 2],
    requests: u64,
    frames: u64,
}

fn interface(driver: Driver) -> &'static str {
    match driver {
        Driver::SplitPush | Driver::SplitPull => "split0",
        _ => "eth1",
    }
}

/// The machine on the LAN.
fn address(driver: Driver) -> &'static str {
    match interface(driver) {
        "split0" => "192.168.7.3",
        _ => "192.168.9.3",
    }
}

/// One round of times.
pub fn time_round(machines: &Machines, run: &mut Run) -> Result<()> {
    for driver in DRIVERS {
        check_interrupted()?;
        run.progress(&format!("split: {}", driver.name()));
        let measured = machines.with(driver, || {
            for size in SIZES {
                let value = machines.latency(driver, size)?;
                let key = (size + 42, 1);
                run.results
                    .add(driver, "split_lat", key, ("us", false), value);
            }
            for (test, more) in [("split_tcp_out", ""), ("split_tcp_in", "-R")] {
                let end = machines.iperf(driver, &format!("-t 2 {more}"))?;
                let bits = end["sum_received"]["bits_per_second"].as_f64();
                let value = bits.context("iperf3 moved nothing")? / 8.0 / f64::from(1 << 20);
                run.results
                    .add(driver, test, (1514, 1), ("MiB/s", true), value);
            }
            for (test, more) in [("split_udp_out", ""), ("split_udp_in", "-R")] {
                let end = machines.iperf(driver, &format!("-u -b 0 -l 18 -t 2 {more}"))?;
                let sum = &end["sum"];
                let number = |name: &str| sum[name].as_f64().context("iperf3 counted nothing");
                let value = (number("packets")? - number("lost_packets")?) / number("seconds")?;
                run.results.add(driver, test, (60, 1), ("/s", true), value);
            }
            Ok(())
        });
        if let Err(error) = measured {
            run.miss(&format!("split: {}", driver.name()), &error);
        }
    }
    Ok(())
}

/// What is counted: in results, and so many of it by a command.
type Work = (&'static str, u64, [u64; 2], fn(&str, u64) -> String);

const WORKS: [Work; 3] = [
    ("split_ping", 60, [100, 500], |to, count| {
        format!("ping -f -q -c {count} -s 18 {to}")
    }),
    ("split_ping", 1514, [100, 500], |to, count| {
        format!("ping -f -q -c {count} -s 1472 {to}")
    }),
    ("split_stream", 1514, [1, 6], |to, count| {
        format!("iperf3 -n {count}M -c {to}")
    }),
];

/// One round of counts.
pub fn count_round(machines: &Machines, run: &mut Run) -> Result<()> {
    // TCP makes larger frames of virtio-net as it is: those are not comparable.
    for driver in DRIVERS
        .into_iter()
        .filter(|driver| *driver != Driver::Virtio)
    {
        for (name, size, counts, command) in WORKS {
            check_interrupted()?;
            run.progress(&format!("split counts: {}: {name} {size}", driver.name()));
            let measured = machines.with(driver, || {
                let mut seen = Vec::new();
                // What begins and ends is the same both times.
                for count in counts {
                    let serving = machines.serve()?;
                    let counted = machines.count(driver, &command(address(driver), count));
                    if name == "split_stream" && counted.is_ok() {
                        serving.success()?;
                    } else {
                        serving.end()?;
                    }
                    seen.push(counted?);
                }
                Ok(seen)
            });
            let seen = match measured {
                Ok(seen) => seen,
                Err(error) => {
                    run.miss(&format!("split counts: {} {name}", driver.name()), &error);
                    continue;
                }
            };
            let [few, many] = &seen[..] else { continue };
            let frames = many.frames.saturating_sub(few.frames) as f64;
            if frames == 0.0 {
                let none = anyhow::anyhow!("too few frames to tell what one takes");
                run.miss(&format!("split counts: {} {name}", driver.name()), &none);
                continue;
            }
            let mut add = |what: &str, few: u64, many: u64| {
                let test = format!("{name}_{what}");
                let Some(more) = many.checked_sub(few) else {
                    // What else the machine did was more than what the frames took.
                    let less = anyhow::anyhow!("{few} with few frames, {many} with many");
                    run.miss(&format!("split counts: {} {test}", driver.name()), &less);
                    return;
                };
                let value = more as f64 / frames;
                run.results
                    .add(driver, &test, (size, 1), ("/frame", false), value);
            };
            let all = |counted: &Counted| counted.user + counted.kernel;
            for (vm, there) in ["", "_unit"].into_iter().enumerate() {
                if vm == 1 && interface(driver) != "split0" {
                    continue;
                }
                add(
                    &format!("instructions{there}"),
                    all(&few.instructions[vm]),
                    all(&many.instructions[vm]),
                );
                add(
                    &format!("interrupts{there}"),
                    few.interrupts[vm],
                    many.interrupts[vm],
                );
            }
            add("requests", few.requests, many.requests);
        }
    }
    Ok(())
}
