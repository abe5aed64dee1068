// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The interface of the device beside one of virtio-net, in the same two machines.
//!
//! The device is the network card of both machines, with the switch between; the other card has a wire of its own, a socket
//! from QEMU to QEMU with nothing between.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use serde_json::Value;

use super::machines::{counted, spans, Counted, Driver};
use super::Run;
use crate::artifacts::program;
use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel::Kernel;
use crate::process::check_interrupted;
use crate::shell::LOAD_DRIVER;
use crate::traffic::wait_listening;
use crate::vm::{Running, Vm};

/// What there is: times, and what traffic takes.
pub const PARTS: [&str; 2] = ["interface-time", "interface-counts"];

/// In the order of a round.
pub const DRIVERS: [Driver; 2] = [Driver::Ferrite, Driver::Virtio];

/// What is to be at least as good as by virtio-net: a test, the size of its frames, what is said of it.
pub const GOALS: [(&str, u64, &str); 3] = [
    ("interface_tcp", 1514, "TCP, frames of 1514 bytes,"),
    ("interface_tcp", 9014, "TCP, frames of 9014 bytes,"),
    ("interface_udp", 60, "frames of 60 bytes a second"),
];

const PATIENCE: Duration = Duration::from_secs(120);
/// The usual MTU, and the largest of both.
const MTUS: [u64; 2] = [1500, 9000];
const HEADER: u64 = 14;
/// Bytes of data in a frame, by ping: with its headers of 42 bytes the smaller one is of the smallest size.
const SIZES: [u64; 2] = [18, 1472];

/// The machines.
pub struct Machines {
    cluster: Cluster,
    counts: Option<[PathBuf; 2]>,
}

/// The name of an interface: what comes with the driver is the second.
fn interface(driver: Driver) -> &'static str {
    match driver {
        Driver::Ferrite => "eth1",
        _ => "eth0",
    }
}

impl Machines {
    /// Boots them, both interfaces up.
    pub fn boot(
        run: &RunDir,
        kernel: &Kernel,
        modules: &[PathBuf],
        is_counted: bool,
    ) -> Result<Self> {
        let qemu_args = [("on", 1), ("off", 2)].map(|(server, vm)| {
            let mut args = vec![
                "-netdev".to_owned(),
                format!("stream,id=wire,server={server},addr.type=unix,addr.path={{dir}}/wire"),
                "-device".to_owned(),
                format!(
                    "virtio-net-pci,netdev=wire,romfile=,host_mtu=9000,mac=52:54:00:fd:00:{vm:02x}"
                ),
            ];
            if is_counted {
                args.push("-plugin".to_owned());
                args.push(format!(
                    "{},counts={{dir}}/counts{vm},registers=off",
                    program("libferrite_count_plugin.so").display(),
                ));
            }
            args
        });
        let label = if is_counted {
            "interface-counts"
        } else {
            "interface"
        };
        let options = Options {
            cpus: 1,
            only_card: true,
            qemu_args: qemu_args.to_vec(),
            ..Options::pair(label, modules.to_vec())
        };
        let cluster = Cluster::boot(run, kernel, &options)?;
        let folder = cluster.dir();
        let counts = is_counted.then(|| [1, 2].map(|vm| folder.join(format!("counts{vm}"))));
        let machines = Self { cluster, counts };
        for vm in &machines.cluster.vms {
            let address = Driver::Virtio.address(vm.index);
            vm.sh(&format!(
                "ip addr add {address}/24 dev eth0; ip link set eth0 up"
            ))?;
            vm.sh(LOAD_DRIVER)?;
            for driver in DRIVERS {
                let is_its = vm.sh(&format!(
                    "basename $(readlink /sys/class/net/{}/device/driver)",
                    interface(driver)
                ))?;
                ensure!(
                    is_its.starts_with(&driver.name()[..6]),
                    "{} is of {is_its}",
                    interface(driver)
                );
            }
        }
        Ok(machines)
    }

    fn two(&self) -> Result<(&Vm, &Vm)> {
        self.cluster.two()
    }

    /// Findings of the kernels.
    pub fn findings(&self) -> Vec<String> {
        self.cluster.new_findings()
    }

    /// Sets the MTU of both ends, and sees that frames pass.
    fn set_mtu(&self, driver: Driver, mtu: u64) -> Result<()> {
        for vm in &self.cluster.vms {
            vm.sh(&format!("ip link set {} mtu {mtu}", interface(driver)))?;
        }
        let (one, _) = self.two()?;
        let ping = format!("ping -q -c 1 -W 2 {}", driver.address(2));
        one.wait_for(&ping, PATIENCE)
    }

    fn serve(&self) -> Result<Running<'_>> {
        let (_, two) = self.two()?;
        let serving = two.spawn("exec iperf3 -s -1 >/dev/null 2>&1", PATIENCE)?;
        wait_listening(two, 5201)?;
        Ok(serving)
    }

    fn iperf(&self, driver: Driver, more: &str) -> Result<Value> {
        let serving = self.serve()?;
        let (one, _) = self.two()?;
        let command = format!("iperf3 -J {more} -c {}", driver.address(2));
        match one.sh_in(&command, PATIENCE) {
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

    /// Half of the mean time there and back, in microseconds.
    fn latency(&self, driver: Driver, size: u64) -> Result<f64> {
        let (one, _) = self.two()?;
        let command = format!("ping -f -q -c 1000 -s {size} {}", driver.address(2));
        let said = one.sh_in(&command, PATIENCE)?;
        let times = said.rsplit("= ").next().context("no times")?;
        let mean = times.split('/').nth(1).context("no mean")?;
        Ok(mean.parse::<f64>()? * 1000.0 / 2.0)
    }

    /// Runs a command in the first machine, with all that both do meanwhile counted.
    fn count(&self, command: &str) -> Result<[Counted; 2]> {
        let (one, two) = self.two()?;
        let [here, there] = self.counts.as_ref().context("nothing is counted")?;
        two.sh(&format!("[ -p {SPAN} ] || mkfifo {SPAN}"))?;
        let before = [counted(here)?, counted(there)?];
        let (begun, _) = spans(there)?;
        let counting = two.spawn(
            &format!("exec /ferrite/bin/verbs-bench count cat {SPAN}"),
            PATIENCE,
        )?;
        while spans(there)?.0 == begun {
            ensure!(
                counting.ended().is_none(),
                "the other machine does not count"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let done = one.sh_in(
            &format!("exec /ferrite/bin/verbs-bench count {command} >/dev/null"),
            PATIENCE,
        );
        two.sh(&format!(": >{SPAN}"))?;
        counting.success()?;
        done?;
        Ok([counted(here)? - before[0], counted(there)? - before[1]])
    }
}

/// Where a span of the second machine is ended from.
const SPAN: &str = "/run/span";

/// One round of times.
pub fn time_round(machines: &Machines, run: &mut Run) -> Result<()> {
    for driver in DRIVERS {
        check_interrupted()?;
        run.progress(&format!("interface: {}", driver.name()));
        let mut add = |test: &str, size, (unit, higher), value| {
            run.results
                .add(driver, test, (size, 1), (unit, higher), value);
        };
        let measured = (|| -> Result<()> {
            for mtu in MTUS {
                machines.set_mtu(driver, mtu)?;
                let end = machines.iperf(driver, "-t 3")?;
                let bits = end["sum_received"]["bits_per_second"].as_f64();
                let value = bits.context("iperf3 moved nothing")? / 8.0 / f64::from(1 << 20);
                add("interface_tcp", mtu + HEADER, ("MiB/s", true), value);
            }
            machines.set_mtu(driver, MTUS[0])?;
            let end = machines.iperf(driver, "-u -b 0 -l 18 -t 3")?;
            let sum = &end["sum"];
            let number = |name: &str| sum[name].as_f64().context("iperf3 counted nothing");
            let value = (number("packets")? - number("lost_packets")?) / number("seconds")?;
            add("interface_udp", 60, ("/s", true), value);
            for size in SIZES {
                let value = machines.latency(driver, size)?;
                add("interface_lat", size + 42, ("us", false), value);
            }
            Ok(())
        })();
        if let Err(error) = measured {
            run.miss(&format!("interface: {}", driver.name()), &error);
        }
    }
    Ok(())
}

/// What is counted: a name in results, the size of a frame, what one of them is called, so many of them by a command.
type Work = (
    &'static str,
    u64,
    &'static str,
    [u64; 2],
    fn(&str, u64) -> String,
);

const WORKS: [Work; 2] = [
    ("interface_stream", 1514, "/MiB", [4, 24], |to, count| {
        format!("iperf3 -n {count}M -c {to}")
    }),
    ("interface_ping", 60, "/echo", [100, 500], |to, count| {
        format!("ping -f -q -c {count} -s 18 {to}")
    }),
];

/// One round of counts.
pub fn count_round(machines: &Machines, run: &mut Run) -> Result<()> {
    for driver in DRIVERS {
        for (name, size, unit, counts, command) in WORKS {
            check_interrupted()?;
            run.progress(&format!("interface counts: {}: {name}", driver.name()));
            let measured = (|| -> Result<Vec<[Counted; 2]>> {
                machines.set_mtu(driver, MTUS[0])?;
                let mut seen = Vec::new();
                // What begins and ends is the same both times.
                for count in counts {
                    let serving = machines.serve()?;
                    let counted = machines.count(&command(&driver.address(2), count));
                    if name == "interface_stream" && counted.is_ok() {
                        serving.success()?;
                    } else {
                        serving.end()?;
                    }
                    seen.push(counted?);
                }
                Ok(seen)
            })();
            let seen = match measured {
                Ok(seen) => seen,
                Err(error) => {
                    let what = format!("interface counts: {} {name}", driver.name());
                    run.miss(&what, &error);
                    continue;
                }
            };
            let [few, many] = &seen[..] else { continue };
            let all = |counted: &Counted| counted.user + counted.kernel;
            for (vm, there) in ["", "_there"].into_iter().enumerate() {
                let test = format!("{name}_instructions{there}");
                let (many, few) = (all(&many[vm]), all(&few[vm]));
                let Some(more) = many.checked_sub(few).filter(|more| *more > 0) else {
                    // What else the machine did was more.
                    let what = format!("{} {test}", driver.name());
                    run.miss(
                        &what,
                        &anyhow!("{many} for many, {few} for few instructions"),
                    );
                    continue;
                };
                let value = more as f64 / (counts[1] - counts[0]) as f64;
                run.results
                    .add(driver, &test, (size, 1), (unit, false), value);
            }
        }
    }
    Ok(())
}
