// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Looking into the VMs by hand: an interactive prompt, and scripts given on the command line.

use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::artifacts;
use crate::cluster::{Cluster, Options as ClusterOptions, RunDir};
use crate::kernel::{self, Flavour, Kernel};
use crate::process::check_interrupted;
use crate::step::{outside, say};
use crate::vm::Vm;

/// Loads the driver and what it stands on; parameters may follow. An interface that comes with it is configured, as
/// `/run/interface` says ([`Cluster`]).
pub const LOAD_DRIVER: &str = "
depends=$(modinfo -F depends /ferrite/modules/ferrite.ko)
modprobe -qa ${depends//,/ } ib_uverbs rdma_ucm || true
load() { insmod /ferrite/modules/ferrite.ko \"$@\" || return; [ ! -e /run/interface ] || . /run/interface; }
load";

/// Builds programs and modules for a kernel and gives the modules.
pub fn build(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    artifacts::build_programs()?;
    artifacts::build_modules(kernel)
}

/// Options of `shell`.
#[derive(Debug)]
pub struct Options {
    /// The VM whose prompt comes first.
    pub vm: usize,
    /// The kernel.
    pub flavour: Flavour,
    /// VMs have a network card beside the device.
    pub two_cards: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            vm: 1,
            flavour: Flavour::Stock,
            two_cards: false,
        }
    }
}

/// Options of `try`.
#[derive(Debug)]
pub struct TryOptions {
    /// The kernel.
    pub flavour: Flavour,
    /// VMs without the device.
    pub plain: bool,
    /// VMs with a network card beside the device.
    pub two_cards: bool,
    /// How many VMs.
    pub vms: usize,
    /// Virtual processors of each.
    pub cpus: usize,
    /// Build first.
    pub build: bool,
    /// Load the driver.
    pub insmod: bool,
    /// Record the wire.
    pub pcap: bool,
    /// Show the whole serial logs at the end.
    pub keep: bool,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// Time for each script.
    pub timeout_s: u64,
    /// One for each VM; run at the same time.
    pub scripts: Vec<String>,
}

impl Default for TryOptions {
    fn default() -> Self {
        Self {
            flavour: Flavour::Stock,
            plain: false,
            two_cards: false,
            vms: 2,
            cpus: 1,
            build: true,
            insmod: true,
            pcap: false,
            keep: false,
            kernel_args: String::new(),
            timeout_s: 120,
            scripts: Vec::new(),
        }
    }
}

/// Boots VMs, runs a script in each at the same time, shows all that came of it.
pub fn try_scripts(options: &TryOptions) -> Result<bool> {
    let kernel = kernel::get(options.flavour)?;
    crate::guest::image()?;
    let modules = if options.plain {
        artifacts::build_fabric()?;
        Vec::new()
    } else if options.build {
        build(&kernel)?
    } else {
        artifacts::modules(&artifacts::module_dir(&kernel))?
    };
    let run = RunDir::new()?;
    let start = Instant::now();
    let cluster = Cluster::boot(
        &run,
        &kernel,
        &ClusterOptions {
            vms: options.vms,
            cpus: options.cpus,
            device: !options.plain,
            only_card: !options.plain && !options.two_cards,
            pcap: options.pcap,
            kernel_args: options.kernel_args.clone(),
            ..ClusterOptions::pair("try", modules)
        },
    )?;
    say(&format!(
        "{} VMs up in {:.1} s; logs: {}",
        options.vms,
        start.elapsed().as_secs_f32(),
        outside(cluster.dir()).display()
    ));
    let mut good = true;
    if !options.plain && options.insmod {
        for vm in &cluster.vms {
            let outcome = vm.run(LOAD_DRIVER, Duration::from_secs(60))?;
            good &= outcome.ok();
            println!(
                "[{}] insmod: exit {} {}{}",
                vm.name(),
                outcome.code,
                outcome.out,
                outcome.err
            );
        }
    }
    let timeout = Duration::from_secs(options.timeout_s);
    let mut runs = Vec::new();
    for (index, vm) in cluster.vms.iter().enumerate() {
        let Some(script) = options.scripts.get(index).or(options.scripts.last()) else {
            continue;
        };
        runs.push((vm, vm.spawn_within(script, timeout)?));
    }
    for (vm, run) in runs {
        match run.wait() {
            Ok(outcome) => {
                good &= outcome.ok();
                println!(
                    "[{}] exit {}{}\n{}{}",
                    vm.name(),
                    outcome.code,
                    if outcome.timed_out {
                        " (timed out)"
                    } else {
                        ""
                    },
                    outcome.out,
                    outcome.err
                );
            }
            Err(error) => {
                good = false;
                println!("{error:#}");
            }
        }
    }
    for finding in cluster.new_findings() {
        good = false;
        println!("kernel report: {finding}");
    }
    if options.keep {
        for vm in &cluster.vms {
            println!("--- serial log of {}\n{}", vm.name(), vm.serial_log());
        }
    }
    Ok(good)
}

/// Puts the terminal into raw mode; back to what it was when dropped.
struct RawTerminal(libc::termios);

impl RawTerminal {
    fn new() -> Result<Self> {
        let fd = std::io::stdin().as_raw_fd();
        // SAFETY: all-zero is a valid `termios`, and it is filled in before use.
        let mut saved: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and `saved` is a live local.
        if unsafe { libc::tcgetattr(fd, &mut saved) } != 0 {
            bail!("standard input is not a terminal");
        }
        let mut raw = saved;
        // SAFETY: `raw` is a live, filled-in `termios`.
        unsafe {
            libc::cfmakeraw(&mut raw);
            libc::tcsetattr(fd, libc::TCSANOW, &raw);
        }
        Ok(Self(saved))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // SAFETY: standard input's descriptor is open and the settings came from it.
        unsafe { libc::tcsetattr(std::io::stdin().as_raw_fd(), libc::TCSANOW, &self.0) };
    }
}

/// Boots the VMs and connects the terminal to their prompts.
pub fn run(options: &Options) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        bail!("shell needs a terminal; for scripts use: tools/lab/bootstrap try -- 'SCRIPT'");
    }
    let kernel = kernel::get(options.flavour)?;
    crate::guest::image()?;
    let modules = build(&kernel)?;
    let run = RunDir::new()?;
    let cluster = Cluster::boot(
        &run,
        &kernel,
        &ClusterOptions {
            only_card: !options.two_cards,
            ..ClusterOptions::pair("shell", modules)
        },
    )?;
    for vm in &cluster.vms {
        if let Err(error) = vm.sh(LOAD_DRIVER) {
            println!("{error:#}");
        }
    }
    if options.vm == 0 || options.vm > cluster.vms.len() {
        bail!("there are VMs 1 to {}", cluster.vms.len());
    }
    println!(
        "{} VMs are up ({}), the driver is loaded. They reach each other as {}.",
        cluster.vms.len(),
        kernel.release,
        cluster
            .vms
            .iter()
            .map(Vm::name)
            .collect::<Vec<_>>()
            .join(", ")
    );
    println!("Ctrl-] then 1 or 2 switches to that VM, Ctrl-] then q leaves and stops them.");
    println!(
        "Kernel logs: {}/vm*.serial.log",
        outside(cluster.dir()).display()
    );
    interact(&cluster, options.vm - 1)
}

fn interact(cluster: &Cluster, first: usize) -> Result<()> {
    let current = Arc::new(AtomicUsize::new(first));
    let mut consoles = Vec::new();
    for (index, vm) in cluster.vms.iter().enumerate() {
        let stream = UnixStream::connect(vm.console())
            .with_context(|| format!("connecting to the console of {}", vm.name()))?;
        let mut reader = stream.try_clone()?;
        let current = Arc::clone(&current);
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n) = reader.read(&mut chunk) {
                if n == 0 {
                    break;
                }
                if current.load(Ordering::Relaxed) == index {
                    let mut out = std::io::stdout();
                    let _ = out.write_all(&chunk[..n]);
                    let _ = out.flush();
                }
            }
        });
        consoles.push(stream);
    }
    let _raw = RawTerminal::new()?;
    consoles[first].write_all(b"\n")?;
    let mut input = std::io::stdin();
    let mut escape = false;
    let mut byte = [0];
    loop {
        check_interrupted()?;
        if input.read(&mut byte)? == 0 {
            return Ok(());
        }
        match (escape, byte[0]) {
            (false, 0x1d) => escape = true,
            (true, b'q') => {
                print!("\r\n");
                return Ok(());
            }
            (true, digit @ b'1'..=b'9') if usize::from(digit - b'1') < consoles.len() => {
                escape = false;
                let index = usize::from(digit - b'1');
                current.store(index, Ordering::Relaxed);
                print!("\r\n-- vm{}\r\n", index + 1);
                std::io::stdout().flush()?;
                consoles[index].write_all(b"\n")?;
            }
            (_, other) => {
                escape = false;
                let index = current.load(Ordering::Relaxed);
                consoles[index].write_all(&[other])?;
            }
        }
        if cluster.vms.iter().all(|vm| !vm.alive()) {
            return Ok(());
        }
    }
}
