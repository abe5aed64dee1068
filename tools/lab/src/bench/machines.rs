// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two VMs that are measured: Ferrite, rxe and siw side by side, each with a wire of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde::Deserialize;

use super::functions::Functions;
use crate::artifacts::program;
use crate::cache::artifact;
use crate::cluster::{Cluster, Options, RunDir};
use crate::kernel::Kernel;
use crate::shell::LOAD_DRIVER;
use crate::step;
use crate::tests::storage::Transport;
use crate::tests::wait_active;
use crate::traffic::{perftest_line, wait_listening};
use crate::vm::{Running, Vm};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// This project.
    Ferrite,
    /// RoCE in software, of Linux.
    Rxe,
    /// iWARP in software, of Linux.
    Siw,
    /// No RDMA at all: TCP over the interface that rxe has.
    Tcp,
    /// Nothing between: the client's own memory as a disk or a folder.
    Local,
    /// The split driver over Ferrite: both ends write to each other.
    SplitPush,
    /// The same, where the receiver reads.
    SplitPull,
    /// An interface of virtio-net on the same LAN.
    Virtio,
    /// The same without frames that are larger than its MTU.
    VirtioPlain,
    /// No device: what the machine copies in memory.
    Memcpy,
}

impl Driver {
    /// All that have verbs, in the order of a round.
    pub const ALL: [Self; 3] = [Self::Ferrite, Self::Rxe, Self::Siw];

    /// All that disks and files can be had by, in the order of a round.
    pub const OF_STORAGE: [Self; 5] = [Self::Ferrite, Self::Rxe, Self::Siw, Self::Tcp, Self::Local];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferrite => "ferrite",
            Self::Rxe => "rxe",
            Self::Siw => "siw",
            Self::Tcp => "tcp",
            Self::Local => "local",
            Self::SplitPush => "split-push",
            Self::SplitPull => "split-pull",
            Self::Virtio => "virtio-net",
            Self::VirtioPlain => "virtio-net-plain",
            Self::Memcpy => "memcpy",
        }
    }

    /// Third number of its network's addresses.
    fn net(self) -> u8 {
        match self {
            Self::Ferrite | Self::Local | Self::SplitPush | Self::SplitPull | Self::Memcpy => 0,
            Self::Rxe | Self::Tcp | Self::Virtio | Self::VirtioPlain => 1,
            Self::Siw => 2,
        }
    }

    /// The address of its interface in a VM.
    pub fn address(self, vm: usize) -> String {
        format!("10.77.{}.{vm}", self.net())
    }

    /// What its disks and files come over; nothing where they are the client's own.
    pub fn transport(self) -> Option<Transport> {
        match self {
            Self::Ferrite | Self::Rxe | Self::Siw => Some(Transport::Rdma),
            Self::Tcp => Some(Transport::Tcp),
            _ => None,
        }
    }

    /// How its programs wait. The software drivers work in threads of the guest, which a program
    /// that never lets go of the only processor holds up, and events take time of their own: they
    /// are measured both ways, and the better result counts.
    pub fn waits(self) -> &'static [&'static str] {
        match self {
            Self::Rxe | Self::Siw => &["spin", "event"],
            _ => &["spin"],
        }
    }

    /// Port of its server, over TCP and over rdma_cm.
    pub fn port(self) -> u16 {
        18_700 + u16::from(self.net())
    }
}

/// Writes and reads of a guest, and its instructions, between the markers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counted {
    /// Instructions of user space.
    pub user: u64,
    /// Instructions of the kernel.
    pub kernel: u64,
    /// Writes to registers of devices.
    pub writes: u64,
    /// Reads of registers of devices.
    pub reads: u64,
    /// Instructions of the kernel's modules, which are among those of the kernel.
    pub modules: u64,
}

// What one span counts more than another, which may be less than what the two differ by anyhow.
impl std::ops::Sub for Counted {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            user: self.user.saturating_sub(other.user),
            kernel: self.kernel.saturating_sub(other.kernel),
            writes: self.writes.saturating_sub(other.writes),
            reads: self.reads.saturating_sub(other.reads),
            modules: self.modules.saturating_sub(other.modules),
        }
    }
}

/// A line that `verbs-bench` prints.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    /// The test.
    pub test: String,
    /// Bytes of a message.
    pub size: u64,
    /// Connections.
    pub qps: u64,
    /// Messages.
    pub count: u64,
    /// Time for all.
    pub seconds: f64,
    /// Interrupts at the measuring end.
    #[serde(default)]
    pub interrupts: u64,
    /// Those of the processor that served most.
    #[serde(default)]
    pub interrupts_busiest: u64,
    /// Interrupts at the other end.
    #[serde(default)]
    pub interrupts_there: u64,
    /// Microseconds from a post until its completion was taken: what half of the messages do not
    /// exceed.
    #[serde(default)]
    pub median_us: f64,
    /// The same of 99 out of 100.
    #[serde(default)]
    pub late_us: f64,
    /// Memory that objects took.
    #[serde(default)]
    pub bytes: u64,
    /// Time that making objects took.
    #[serde(default)]
    pub made_seconds: f64,
    /// Messages of each connection.
    #[serde(default)]
    pub each: Vec<u64>,
}

/// What the plugin counts, if it is there: all that it can slows a guest down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counting {
    /// Nothing.
    No,
    /// Instructions.
    Instructions,
    /// Instructions, and which functions they are in.
    Functions,
    /// Instructions and accesses to registers.
    All,
}

/// What the VMs of a part have.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Processors of each.
    pub cpus: usize,
    /// Mebibytes of memory of each.
    pub memory_mib: usize,
}

/// Two booted VMs with all drivers loaded.
pub struct Machines {
    /// The VMs, their devices and the fabric.
    pub cluster: Cluster,
    /// What the plugin counts in them.
    pub counting: Counting,
    counts: [PathBuf; 2],
    /// The functions of the client's kernel, once they were asked for.
    symbols: OnceLock<String>,
}

/// Symbols that a guest tells at once: what it says is cut off where it is too much.
const SYMBOLS: usize = 40_000;

/// The functions of a guest's kernel and of its modules, as `/proc/kallsyms` has them.
fn symbols(vm: &Vm) -> Result<String> {
    let mut all = String::new();
    for page in 0.. {
        // What is called `__pfx_` is the room before a function.
        let some = vm.sh_in(
            &format!(
                "awk '$2 ~ /^[tTwW]$/ && $3 !~ /^__pfx_/' /proc/kallsyms |
                 tail -n +{} | head -n {SYMBOLS}",
                page * SYMBOLS + 1
            ),
            Duration::from_secs(120),
        )?;
        all.push_str(&some);
        if some.lines().count() < SYMBOLS {
            break;
        }
        all.push('\n');
    }
    Ok(all)
}

/// Debian's kernel leaves siw out; it is built from the same kernel's source.
fn siw(kernel: &Kernel) -> Result<PathBuf> {
    let folder = artifact(
        "siw",
        "building siw, which this kernel comes without (once)",
        &[&kernel.release, "1"],
        |dir, log| {
            step::run(
                Command::new("cp")
                    .arg("-rT")
                    .arg(kernel.source.join("drivers/infiniband/sw/siw"))
                    .arg(dir),
                log,
            )?;
            let mut make = kernel.make();
            make.arg(format!("M={}", dir.display()));
            make.args(["CONFIG_RDMA_SIW=m", "modules"]);
            step::run(&mut make, log)
        },
    )?;
    Ok(folder.join("siw.ko"))
}

/// Everything of the VMs that the measurements add: for each of the two software drivers an
/// interface, wired to the same interface of the other VM without anything between.
fn qemu_args(vm: usize, counting: Counting) -> Vec<String> {
    let mut args = Vec::new();
    for driver in [Driver::Rxe, Driver::Siw] {
        let name = driver.name();
        let server = if vm == 1 { "on" } else { "off" };
        args.push("-netdev".to_owned());
        args.push(format!(
            "stream,id={name},server={server},addr.type=unix,addr.path={{dir}}/wire.{name}"
        ));
        args.push("-device".to_owned());
        args.push(format!(
            "virtio-net-pci,netdev={name},romfile=,host_mtu=9000,mac=52:54:00:fd:{:02x}:{vm:02x}",
            driver.net()
        ));
    }
    if counting != Counting::No {
        args.push("-plugin".to_owned());
        let more = match counting {
            Counting::Functions => format!(",registers=off,blocks={{dir}}/blocks{vm}"),
            Counting::All => String::new(),
            Counting::No | Counting::Instructions => ",registers=off".to_owned(),
        };
        args.push(format!(
            "{},counts={{dir}}/counts{vm}{more}",
            program("libferrite_count_plugin.so").display(),
        ));
    }
    args
}

impl Machines {
    /// Boots two VMs and loads all drivers.
    pub fn boot(
        run: &RunDir,
        kernel: &Kernel,
        modules: &[PathBuf],
        label: &str,
        size: Size,
        counting: Counting,
    ) -> Result<Self> {
        let cluster = Cluster::boot(
            run,
            kernel,
            &Options {
                cpus: size.cpus,
                memory_mib: size.memory_mib,
                qemu_args: vec![qemu_args(1, counting), qemu_args(2, counting)],
                ..Options::pair(label, [modules, &[siw(kernel)?]].concat())
            },
        )?;
        let counts = [1, 2].map(|vm| cluster.dir().join(format!("counts{vm}")));
        let machines = Self {
            cluster,
            counting,
            counts,
            symbols: OnceLock::new(),
        };
        machines.load()?;
        Ok(machines)
    }

    fn load(&self) -> Result<()> {
        for vm in &self.cluster.vms {
            vm.sh(LOAD_DRIVER)?;
            wait_active(vm)?;
            for (interface, driver, load) in [
                ("eth1", Driver::Rxe, "modprobe rdma_rxe"),
                (
                    "eth2",
                    Driver::Siw,
                    "for m in $(modinfo -F depends /ferrite/modules/siw.ko | tr , ' '); do modprobe $m; done
                     insmod /ferrite/modules/siw.ko",
                ),
            ] {
                vm.sh(&format!(
                    "set -e; ip addr add {}/24 dev {interface}; ip link set {interface} up mtu 9000
                     {load}
                     rdma link add {name}0 type {name} netdev {interface}",
                    driver.address(vm.index),
                    name = driver.name(),
                ))?;
            }
        }
        Ok(())
    }

    /// The VM whose programs measure.
    pub fn client(&self) -> Result<&Vm> {
        Ok(self.cluster.two()?.0)
    }

    /// The VM at the other end.
    pub fn server(&self) -> Result<&Vm> {
        Ok(self.cluster.two()?.1)
    }

    /// Starts the other end of a driver's measurements; it ends when the VM does.
    pub fn serve(&self, driver: Driver) -> Result<Running<'_>> {
        let server = self.server()?;
        let running = server.spawn(
            &format!(
                "exec /ferrite/bin/verbs-bench serve --rdma {} --port {}",
                driver.address(2),
                driver.port()
            ),
            Duration::from_secs(3600),
        )?;
        wait_listening(server, driver.port())?;
        Ok(running)
    }

    /// Runs measurements; gives their lines.
    pub fn measure(&self, driver: Driver, arguments: &str, timeout: Duration) -> Result<Vec<Line>> {
        let out = self.client()?.sh_in(
            &format!(
                "exec /ferrite/bin/verbs-bench run --rdma {} --control {} --port {} {arguments}",
                driver.address(2),
                Driver::Ferrite.address(2),
                driver.port()
            ),
            timeout,
        )?;
        out.lines()
            .map(|line| serde_json::from_str(line).with_context(|| format!("cannot read: {line}")))
            .collect()
    }

    /// Runs a program of perftest, with rdma_cm, which all drivers can do; gives bandwidth in MiB/s
    /// or latency in microseconds.
    pub fn perftest(
        &self,
        driver: Driver,
        program: &str,
        size: u64,
        iterations: u64,
    ) -> Result<f64> {
        let port = driver.port() + 100;
        let flags = format!("-R -p {port} -s {size} -n {iterations} -F");
        let timeout = Duration::from_secs(60);
        let address = driver.address(2);
        let serving = self.server()?.spawn(
            &format!("exec {program} {flags} --bind_source_ip {address}"),
            timeout,
        )?;
        // With rdma_cm nothing listens on a TCP port.
        let listening = format!("rdma resource show cm_id | grep -q 'src-addr .*:{port} '");
        let client = self.server()?.wait_for(&listening, timeout).and_then(|()| {
            self.client()?
                .sh_in(&format!("exec {program} {flags} {address}"), timeout)
        });
        if client.is_err() {
            let _ = serving.signal(libc::SIGKILL);
        }
        let _ = serving.wait()?;
        let out = client?;
        let columns = perftest_line(&out).with_context(|| format!("no result in:\n{out}"))?;
        // Bandwidth: size, iterations, peak, average. Latency: size, iterations, least, most,
        // typical.
        let column = if program.ends_with("_bw") { 3 } else { 4 };
        columns.get(column).copied().context("too few columns")
    }

    /// What the plugin has counted in a VM.
    pub fn counted(&self, vm: usize) -> Result<Counted> {
        let (begun, ended) = self.spans(vm)?;
        if begun != ended {
            bail!("{begun} spans were begun, {ended} ended");
        }
        self.counted_so_far(vm)
    }

    /// The same, whether or not a span has begun that is not over; such a one counts for nothing.
    pub fn counted_so_far(&self, vm: usize) -> Result<Counted> {
        counted(&self.counts[vm - 1])
    }

    /// The functions of the client's kernel that the instructions of its last span are in, if that is
    /// counted.
    pub fn functions(&self) -> Result<Option<Functions>> {
        if self.counting != Counting::Functions {
            return Ok(None);
        }
        let blocks = self.cluster.dir().join("blocks1");
        let blocks =
            fs::read_to_string(&blocks).with_context(|| format!("reading {}", blocks.display()))?;
        if self.symbols.get().is_none() {
            let _ = self.symbols.set(symbols(self.client()?)?);
        }
        let symbols = self.symbols.get().context("no symbols")?;
        Functions::new(&blocks, symbols).map(Some)
    }

    /// How many spans have begun in a VM, and how many have ended.
    pub fn spans(&self, vm: usize) -> Result<(u64, u64)> {
        spans(&self.counts[vm - 1])
    }
}

/// The other ends of all drivers.
pub struct Serving<'m> {
    machines: &'m Machines,
    servers: Vec<(Driver, Running<'m>)>,
}

impl<'m> Serving<'m> {
    /// Starts them.
    pub fn all(machines: &'m Machines) -> Result<Self> {
        let mut servers = Vec::new();
        for driver in Driver::ALL {
            servers.push((driver, machines.serve(driver)?));
        }
        Ok(Self { machines, servers })
    }

    /// [`Machines::measure`]; after a failure the other end is started anew.
    pub fn measure(
        &mut self,
        driver: Driver,
        arguments: &str,
        timeout: Duration,
    ) -> Result<Vec<Line>> {
        let measured = self.machines.measure(driver, arguments, timeout);
        if measured.is_err() {
            if let Some(index) = self.servers.iter().position(|(which, _)| *which == driver) {
                let (_, old) = self.servers.swap_remove(index);
                old.signal(libc::SIGKILL)?;
                let _ = old.wait()?;
            }
            let fresh = self.machines.serve(driver)?;
            self.servers.push((driver, fresh));
        }
        measured
    }
}

/// The words that the plugin of a VM writes.
fn words(path: &Path) -> Result<[u64; 7]> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let mut words = [0; 7];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().context("eight bytes")?);
    }
    if bytes.len() < words.len() * 8 {
        bail!("the file of counts is too short");
    }
    Ok(words)
}

/// How many spans have begun in a VM, and how many have ended.
pub fn spans(path: &Path) -> Result<(u64, u64)> {
    let words = words(path)?;
    Ok((words[0], words[1]))
}

/// What the plugin of a VM has counted so far.
pub fn counted(path: &Path) -> Result<Counted> {
    let [_, _, user, kernel, writes, reads, modules] = words(path)?;
    Ok(Counted {
        user,
        kernel,
        writes,
        reads,
        modules,
    })
}
