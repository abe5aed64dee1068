// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several virtual machines on one wire, each with its RDMA device.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{anyhow, bail, Context, Result};

use crate::artifacts::program;
use crate::bench::processes::usage;
use crate::kernel::{Flavour, Kernel};
use crate::process::{lock, Daemon, FileLock};
use crate::vm::{mac, wait_for_socket, BootFailed, Config, Vm};
use crate::{guest, payload, OUT};

/// How long guests may take to boot.
const BOOT: Duration = Duration::from_secs(600);

/// How often guests that hang while booting are started.
const BOOT_ATTEMPTS: usize = 5;

/// How long a process may take to answer, or to end.
const ANSWER: Duration = Duration::from_secs(120);

/// How many runs' logs are kept.
const KEEP_RUNS: usize = 4;

/// A folder for one run of the lab: sockets, disks, logs. Kept afterwards, for its logs, until
/// some more runs have passed.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: FileLock,
}

impl RunDir {
    /// Makes a fresh one and removes old ones that no run uses.
    pub fn new() -> Result<Self> {
        let base = Path::new(OUT).join("run");
        fs::create_dir_all(&base)?;
        let mut old: Vec<(SystemTime, PathBuf)> = fs::read_dir(&base)?
            .flatten()
            .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
            .collect();
        old.sort();
        let spare = old.len().saturating_sub(KEEP_RUNS - 1);
        for (_, path) in old.iter().take(spare) {
            if !FileLock::is_taken(&path.join("lock")) {
                let _ = fs::remove_dir_all(path);
            }
        }
        let stamp = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |d| d.as_millis());
        let mut salt = 0;
        let path = loop {
            let path = base.join(format!("{stamp:x}{salt}"));
            match fs::create_dir(&path) {
                Ok(()) => break path,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => salt += 1,
                Err(error) => return Err(error.into()),
            }
        };
        let lock = FileLock::take(&path.join("lock"))?;
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder name for its logs.
    pub label: String,
    /// How many VMs.
    pub vms: usize,
    /// Virtual processors of each.
    pub cpus: usize,
    /// Memory of each, in MiB.
    pub memory_mib: usize,
    /// Whether they have the RDMA device; plain VMs hang on the fabric directly.
    pub device: bool,
    /// Whether that is their network card, too: they have no other.
    pub only_card: bool,
    /// Whether one device process is the adapter of all of them, with a function for each; only with
    /// `only_card`, and without VMs that have no device.
    pub one_adapter: bool,
    /// Functions that the adapter has beyond those: the VM whose next device each is, and its `--personality`. Their
    /// numbers follow those of the VMs, and their interfaces are left as the driver makes them. Only with `one_adapter`.
    pub further_functions: Vec<(usize, &'static str)>,
    /// Numbers of VMs that have no device all the same.
    pub plain: Vec<usize>,
    /// Further arguments of each device process.
    pub device_args: Vec<String>,
    /// Those of single device processes, from the first VM's on.
    pub own_device_args: Vec<Vec<String>>,
    /// Further arguments of QEMU, from the first VM on; `{dir}` stands for the cluster's folder.
    pub qemu_args: Vec<Vec<String>>,
    /// Further arguments of the fabric.
    pub fabric_args: Vec<String>,
    /// Record the wire.
    pub pcap: bool,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// Those of single VMs, from the first on.
    pub own_kernel_args: Vec<String>,
    /// Kernel modules built from this tree.
    pub modules: Vec<PathBuf>,
    /// Tests take the time to try everything.
    pub thorough: bool,
}

impl Options {
    /// Two VMs with the device.
    pub fn pair(label: &str, modules: Vec<PathBuf>) -> Self {
        Self {
            label: label.to_owned(),
            vms: 2,
            cpus: 2,
            memory_mib: 1024,
            device: true,
            only_card: false,
            one_adapter: false,
            further_functions: Vec::new(),
            plain: Vec::new(),
            device_args: Vec::new(),
            own_device_args: Vec::new(),
            qemu_args: Vec::new(),
            fabric_args: Vec::new(),
            pcap: false,
            kernel_args: String::new(),
            own_kernel_args: Vec::new(),
            modules,
            thorough: false,
        }
    }
}

/// Running VMs with their devices and the wire between.
#[derive(Debug)]
pub struct Cluster {
    /// The machines.
    pub vms: Vec<Vm>,
    /// None where it was taken away.
    devices: Mutex<Vec<Option<Daemon>>>,
    fabric: Option<Daemon>,
    dir: PathBuf,
    flavour: Flavour,
    thorough: bool,
    one_adapter: bool,
}

impl Cluster {
    /// Boots everything and waits until all agents answer.
    ///
    /// A guest may hang in the emulator before anything of this tree runs in it. That says nothing
    /// about what is tested, so it is said and the machines are started anew.
    pub fn boot(run: &RunDir, kernel: &Kernel, options: &Options) -> Result<Self> {
        let mut attempt = 1;
        loop {
            let dir = match attempt {
                1 => options.label.clone(),
                n => format!("{}-boot{n}", options.label),
            };
            match Self::boot_once(&run.path().join(dir), kernel, options) {
                Err(error) if error.is::<BootFailed>() && attempt < BOOT_ATTEMPTS => {
                    println!("  note    {error}; booting again");
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// Boots everything in a folder of its own, without a second attempt.
    pub fn boot_once(dir: &Path, kernel: &Kernel, options: &Options) -> Result<Self> {
        let dir = dir.to_owned();
        fs::create_dir_all(&dir)?;
        let initramfs = dir.join("initramfs");
        payload::initramfs(kernel, &initramfs)?;
        let disk = dir.join("payload.img");
        payload::disk(&options.modules, &dir, &disk)?;
        let root = guest::image()?;
        let mut cluster = Self {
            vms: Vec::new(),
            devices: Mutex::new(Vec::new()),
            fabric: None,
            dir: dir.clone(),
            flavour: kernel.flavour,
            thorough: options.thorough,
            one_adapter: options.one_adapter,
        };
        cluster.start_fabric(options)?;
        if options.one_adapter {
            cluster.start_adapter(options)?;
        }
        for index in 1..=options.vms {
            let (net, devices) = if options.one_adapter {
                let further = (options.vms + 1..).zip(&options.further_functions);
                let its = further.filter(|(_, (vm, _))| *vm == index);
                let numbers = std::iter::once(index).chain(its.map(|(number, _)| number));
                let sockets = numbers.map(|number| cluster.function_socket(number));
                (None, sockets.collect())
            } else if options.device && !options.plain.contains(&index) {
                let (net, device) = cluster.start_device(index, options)?;
                (net, vec![device])
            } else {
                (Some(dir.join("fabric")), Vec::new())
            };
            cluster.vms.push(Vm::start(&Config {
                index,
                dir: dir.clone(),
                kernel: kernel.image.clone(),
                initramfs: initramfs.clone(),
                disks: [root.clone(), disk.clone(), kernel.modules_image.clone()],
                cpus: options.cpus,
                memory_mib: options.memory_mib,
                kernel_args: format!(
                    "{} {}",
                    options.kernel_args,
                    options
                        .own_kernel_args
                        .get(index - 1)
                        .map_or("", String::as_str)
                ),
                net,
                devices,
                patience: kernel.flavour.slowness(),
                qemu_args: options
                    .qemu_args
                    .get(index - 1)
                    .into_iter()
                    .flatten()
                    .map(|arg| arg.replace("{dir}", &dir.display().to_string()))
                    .collect(),
            })?);
        }
        let deadline = Instant::now() + BOOT * kernel.flavour.slowness();
        for vm in &cluster.vms {
            vm.wait_up(deadline)?;
        }
        for vm in &cluster.vms {
            vm.sh(&format!(
                "set -e; hostname vm{}; \
                 for n in $(seq {}); do echo 10.77.0.$n vm$n; done >>/etc/hosts",
                vm.index, options.vms
            ))?;
            // The device's own interface comes with the driver.
            if options.only_card && !options.plain.contains(&vm.index) {
                Self::configure_later(vm)?;
            } else {
                Self::give_address(vm)?;
            }
            // One that is not given a processor of the machine in time is taken for broken by the others.
            let processors: usize = vm.sh("nproc")?.trim().parse()?;
            if processors != options.cpus {
                return Err(anyhow!(BootFailed {
                    vm: vm.name(),
                    how: "has too few processors",
                    last: format!("{processors} of {}", options.cpus),
                    more: vm.serial().to_owned(),
                }));
            }
        }
        Ok(cluster)
    }

    /// Brings the interface of a VM up, with its address.
    fn give_address(vm: &Vm) -> Result<()> {
        vm.sh(&format!(
            "set -e; ip addr add {}/24 dev eth0; ip link set eth0 up",
            vm.ip()
        ))?;
        Ok(())
    }

    /// Leaves `/run/interface` in a VM, which whoever loads or binds the driver runs: it brings the interface of the VM's own
    /// device up, with its address and the MTU that the other kind of interface begins with.
    fn configure_later(vm: &Vm) -> Result<()> {
        vm.sh(&format!(
            "cat >/run/interface <<'end'
for i in /sys/class/net/*; do
    case $(readlink $i/device/driver)/$(<$i/address) in
        */ferrite/{}) ip addr replace {}/24 dev ${{i##*/}} && ip link set ${{i##*/}} mtu 9000 up || return;;
    esac
done
end",
            mac(vm.index),
            vm.ip()
        ))?;
        Ok(())
    }

    fn start_fabric(&mut self, options: &Options) -> Result<()> {
        let socket = self.dir.join("fabric");
        let mut fabric = Command::new(program("ferrite-fabric"));
        fabric.arg("--listen").arg(&socket);
        fabric.arg("--control").arg(self.fabric_control());
        if options.pcap {
            fabric.arg("--pcap").arg(self.pcap());
        }
        fabric.args(&options.fabric_args);
        let mut fabric =
            Daemon::start("ferrite-fabric", &mut fabric, &self.dir.join("fabric.log"))?;
        wait_for_socket(&socket, &mut fabric)?;
        self.fabric = Some(fabric);
        Ok(())
    }

    fn start_device(
        &mut self,
        index: usize,
        options: &Options,
    ) -> Result<(Option<PathBuf>, PathBuf)> {
        let name = format!("device{index}");
        let vfio = self.dir.join(format!("{name}.vfio"));
        let net = (!options.only_card).then(|| self.dir.join(format!("{name}.net")));
        let mut device = Command::new(program("ferrite-device"));
        device.arg("--socket").arg(&vfio);
        match &net {
            Some(net) => device.arg("--net").arg(net),
            None => device.args(["--personality", "combined"]),
        };
        device.arg("--uplink").arg(self.dir.join("fabric"));
        device.arg("--mac").arg(mac(index));
        device.arg("--counters").arg(self.counters_socket(index));
        device.arg("--control").arg(self.device_control(index));
        device.args(&options.device_args);
        device.args(options.own_device_args.get(index - 1).into_iter().flatten());
        let log = self.dir.join(format!("{name}.log"));
        let mut device = Daemon::start(&format!("ferrite-device {index}"), &mut device, &log)?;
        wait_for_socket(&vfio, &mut device)?;
        if let Some(net) = &net {
            wait_for_socket(net, &mut device)?;
        }
        lock(&self.devices).push(Some(device));
        Ok((net, vfio))
    }

    /// Where a function is of an adapter for all: that of a VM has the same number.
    fn function_socket(&self, index: usize) -> PathBuf {
        self.dir.join(format!("function{index}.vfio"))
    }

    /// Starts the device process of all VMs, which is told of as that of the first.
    fn start_adapter(&mut self, options: &Options) -> Result<()> {
        let mut device = Command::new(program("ferrite-device"));
        let further = options.further_functions.iter();
        let personalities = std::iter::repeat_n("combined", options.vms)
            .chain(further.map(|(_, personality)| *personality));
        let mut sockets = Vec::new();
        for (number, personality) in (1..).zip(personalities) {
            let socket = self.function_socket(number);
            device.arg("--function").arg(format!(
                "socket={},mac={},personality={personality}",
                socket.display(),
                mac(number)
            ));
            sockets.push(socket);
        }
        device.arg("--uplink").arg(self.dir.join("fabric"));
        device.arg("--counters").arg(self.counters_socket(1));
        device.arg("--control").arg(self.device_control(1));
        device.args(&options.device_args);
        let log = self.dir.join("adapter.log");
        let mut device = Daemon::start("ferrite-device", &mut device, &log)?;
        for socket in sockets {
            wait_for_socket(&socket, &mut device)?;
        }
        lock(&self.devices).push(Some(device));
        Ok(())
    }

    fn counters_socket(&self, index: usize) -> PathBuf {
        let index = if self.one_adapter { 1 } else { index };
        self.dir.join(format!("device{index}.counters"))
    }

    fn device_control(&self, index: usize) -> PathBuf {
        let index = if self.one_adapter { 1 } else { index };
        self.dir.join(format!("device{index}.control"))
    }

    /// The fabric's control socket.
    pub fn fabric_control(&self) -> PathBuf {
        self.dir.join("fabric.control")
    }

    /// Where the wire is recorded, if it is.
    pub fn pcap(&self) -> PathBuf {
        self.dir.join("wire.pcap")
    }

    /// Whether tests shall take the time to try everything.
    pub fn thorough(&self) -> bool {
        self.thorough
    }

    /// The guests' kernel.
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }

    /// The cluster's folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The counters of the device of the VM with this number (from 1).
    pub fn counters(&self, index: usize) -> Result<serde_json::Value> {
        let path = self.counters_socket(index);
        let mut stream = UnixStream::connect(&path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut text = String::new();
        stream
            .read_to_string(&mut text)
            .context("reading the device's counters")?;
        let all: serde_json::Value =
            serde_json::from_str(&text).context("the device's counters are not JSON")?;
        if !self.one_adapter {
            return Ok(all);
        }
        let function = all["functions"].get(index - 1);
        function.cloned().context("the device has no such function")
    }

    /// Sends a request to the fabric and gives its answer.
    pub fn fabric_command(&self, request: &serde_json::Value) -> Result<serde_json::Value> {
        control(&self.fabric_control(), request).context("the fabric")
    }

    /// Sends a request to the device of the VM with this number and gives its answer.
    pub fn device_command(
        &self,
        index: usize,
        request: &serde_json::Value,
    ) -> Result<serde_json::Value> {
        let mut request = request.clone();
        if self.one_adapter && request["cmd"] != "link" {
            request["function"] = (index - 1).into();
        }
        control(&self.device_control(index), &request).with_context(|| format!("device {index}"))
    }

    /// The device process of the VM with this number.
    pub fn device_pid(&self, index: usize) -> Option<u32> {
        let devices = lock(&self.devices);
        devices.get(index - 1)?.as_ref().map(Daemon::pid)
    }

    /// How long all processes of the machines had processors so far: what emulates them, devices, fabric.
    pub fn processor_time(&self) -> Duration {
        let devices = lock(&self.devices);
        let devices = devices.iter().flatten().map(Daemon::pid);
        let machines = self.vms.iter().map(Vm::pid);
        let all = machines.chain(devices).chain(self.fabric_pid());
        let used = all.filter_map(|pid| usage(pid).ok());
        Duration::from_secs_f64(used.map(|used| used.user + used.system).sum())
    }

    /// The fabric's process.
    pub fn fabric_pid(&self) -> Option<u32> {
        self.fabric.as_ref().map(Daemon::pid)
    }

    /// Ends the device process of the VM with this number: a surprise removal. Not by a signal that
    /// kills: QEMU itself ends when it reads a connection reset (see `Device::hang_up`).
    pub fn remove_device(&self, index: usize) -> Result<()> {
        self.device_command(index, &serde_json::json!({"cmd": "die"}))?;
        let removed = lock(&self.devices)
            .get_mut(index - 1)
            .and_then(Option::take);
        match removed {
            Some(mut device) => device.wait_for_end(ANSWER),
            None => Ok(()),
        }
    }

    /// Kills the device process of the VM with this number, and nothing else: the process that it keeps beside it
    /// hangs up for it.
    pub fn kill_device(&self, index: usize) -> Result<()> {
        let killed = lock(&self.devices)
            .get_mut(index - 1)
            .and_then(Option::take);
        let Some(mut device) = killed else {
            bail!("VM {index} has no device");
        };
        // SAFETY: no memory is involved; the process is a child that was not waited for.
        unsafe { libc::kill(device.pid() as libc::pid_t, libc::SIGKILL) };
        device.wait_for_end(ANSWER)
    }

    /// Fails if the fabric or the process of a device that was not taken away has ended.
    pub fn check_processes(&mut self) -> Result<()> {
        for device in lock(&self.devices).iter_mut().flatten() {
            device.check_alive()?;
        }
        if let Some(fabric) = &mut self.fabric {
            fabric.check_alive()?;
        }
        Ok(())
    }

    /// Kernel reports of all VMs since the last call, each under its VM's name.
    pub fn new_findings(&self) -> Vec<String> {
        self.vms
            .iter()
            .flat_map(|vm| {
                vm.new_findings()
                    .into_iter()
                    .map(|text| format!("{}: {text}", vm.name()))
            })
            .collect()
    }

    /// The first two machines.
    pub fn two(&self) -> Result<(&Vm, &Vm)> {
        match self.vms.as_slice() {
            [a, b, ..] => Ok((a, b)),
            _ => bail!("two VMs are needed"),
        }
    }
}

/// Sends a request to a control socket and gives the answer.
fn control(socket: &Path, request: &serde_json::Value) -> Result<serde_json::Value> {
    let mut stream = UnixStream::connect(socket).context("its control socket")?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let answer: serde_json::Value = serde_json::from_str(&line).context("its answer")?;
    if answer["ok"] == false {
        bail!("refuses {request}: {answer}");
    }
    Ok(answer)
}
