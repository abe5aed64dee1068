// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make demo`: two VMs on the unmodified Debian kernel whose only network card is the device, and RDMA between them.

use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel;
use crate::shell::{build, LOAD_DRIVER};
use crate::step::{outside, say};
use crate::tests::wait_active;
use crate::traffic::{client_server, perftest, pingpong};
use crate::vm::{kvm_usable, Vm};

/// Runs the demonstration.
pub fn run() -> Result<()> {
    let kernel = kernel::stock()?;
    crate::guest::image()?;
    let modules = build(&kernel)?;
    let run = RunDir::new()?;
    let how = if kvm_usable() { "KVM" } else { "TCG, emulated" };
    say(&format!(
        "booting two VMs ({how}) on Linux {}",
        kernel.release
    ));
    let start = Instant::now();
    let cluster = Cluster::boot(
        &run,
        &kernel,
        &Options {
            cpus: 1,
            only_card: true,
            ..Options::pair("demo", modules)
        },
    )?;
    println!("      up in {:.1} s", start.elapsed().as_secs_f32());
    show(&cluster).with_context(|| {
        format!(
            "the demo failed; logs are in {}",
            outside(cluster.dir()).display()
        )
    })?;
    let findings = cluster.new_findings();
    if !findings.is_empty() {
        bail!("the kernel reported:\n{}", findings.join("\n"));
    }
    say("done; both VMs are gone");
    Ok(())
}

fn show(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for vm in [one, two] {
        say(&format!("{}: insmod ferrite.ko", vm.name()));
        vm.sh(LOAD_DRIVER)?;
    }
    for vm in [one, two] {
        wait_active(vm)?;
    }
    say("vm1: its only network card, and the RDMA device that is the same function");
    println!("{}", one.sh(ONE_FUNCTION)?.trim_end());
    say("vm1: ibv_devinfo -v");
    println!("{}", vm_devinfo(one)?);

    let mut table: Vec<[String; 4]> = Vec::new();
    say("ibv_rc_pingpong, data checked, by polling and by events");
    for events in [false, true] {
        for (size, iterations) in [(64, 500), (4096, 500), (65536, 200), (1 << 20, 20)] {
            let result = pingpong(one, two, size, iterations, events)?;
            table.push([
                format!("ibv_rc_pingpong{}", if events { " -e" } else { "" }),
                human(size),
                format!("{:.1}", result.usec_per_iteration),
                "us there and back".into(),
            ]);
        }
    }
    for (program, sizes) in [
        (
            "ib_write_bw",
            &[(4096, 500), (65536, 200), (1 << 20, 20)][..],
        ),
        ("ib_read_bw", &[(4096, 500), (65536, 200), (1 << 20, 20)]),
        ("ib_send_lat", &[(64, 500), (4096, 500)]),
    ] {
        say(program);
        for &(size, iterations) in sizes {
            let result = perftest(one, two, program, size, iterations, "")?;
            let (value, unit) = if program.ends_with("_bw") {
                (result.average_bandwidth(), "MiB/s")
            } else {
                (result.typical_latency(), "us one way")
            };
            table.push([
                program.into(),
                human(size),
                format!("{value:.1}"),
                unit.into(),
            ]);
        }
    }
    say("iperf3: TCP by the same function");
    table.push([
        "iperf3".into(),
        String::new(),
        format!("{:.1}", tcp(one, two)?),
        "MiB/s of TCP".into(),
    ]);
    println!();
    println!("  {:<20} {:>8} {:>12}", "between vm1 and vm2", "size", "");
    for [what, size, value, unit] in &table {
        println!("  {what:<20} {size:>8} {value:>12} {unit}");
    }
    println!();
    Ok(())
}

/// What a machine has of the function: interface and RDMA device, and that both are the same one.
const ONE_FUNCTION: &str = "ip -br -4 addr show dev eth0
    ethtool -i eth0 | grep -E '^(driver|bus-info)'
    rdma link
    echo rdma device at: $(basename $(readlink /sys/class/infiniband/*/device))";

/// MiB/s of a TCP stream.
fn tcp(from: &Vm, to: &Vm) -> Result<f64> {
    let (said, _) = client_server(
        (to, "iperf3 -s -1 -p $port"),
        (from, "iperf3 -J -c $peer -p $port -t 3"),
        7001,
        Duration::from_secs(60),
    )?;
    let said: serde_json::Value = serde_json::from_str(&said).context("iperf3")?;
    let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(bits.context("iperf3 moved nothing")? / 8.0 / f64::from(1 << 20))
}

fn vm_devinfo(vm: &Vm) -> Result<String> {
    let text = vm.sh_in("ibv_devinfo -v", Duration::from_secs(60))?;
    if !text.contains("PORT_ACTIVE") {
        bail!("the port is not active:\n{text}");
    }
    Ok(text)
}

/// A size as people write it.
fn human(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}
