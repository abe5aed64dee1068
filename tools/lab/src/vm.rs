// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One virtual machine: a QEMU process and the talk with the agent inside.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Result};

use crate::klog;
use crate::process::{check_interrupted, lock, wait_until, Daemon};
use crate::protocol::{Answer, Outcome, Request};
use crate::step::{outside, tail};

/// The niceness of threads that run a guest's processors.
const PROCESSOR_NICENESS: i32 = 10;

/// How many times longer than it should something may take that must happen: whoever waits for it goes on as soon as
/// it has happened, so that only what never does costs this time; and machines are busy at times.
const LENIENCE: u32 = 3;

/// How long after the guest's own deadline the host waits before it calls the guest wedged.
const GRACE: Duration = Duration::from_secs(60);

/// How long a guest may say nothing on its serial line before its agent answers, while it has a
/// processor of the machine to run on. An emulated boot writes a line every second or two.
const SILENCE: Duration = Duration::from_secs(60);

/// How long a process may take to make its sockets.
const STARTED: Duration = Duration::from_secs(120);

/// What a guest needs to boot in an emulator whose clocks stand still while the machine does other
/// things: interrupts of the timer that come late are not counted and found missing (a panic: the
/// timer does not work), and the processors' counters, which all are one, are not compared.
const EMULATED_TIME: &str = "no_timer_check tsc=reliable";

/// After how long the kernel says that something hangs: a minute for processors, some for tasks. A guest that is not
/// given a processor of the machine, or is stopped by a test, hangs as well to its own clock.
const WATCHDOGS: &str = "rcupdate.rcu_cpu_stall_timeout=60 watchdog_thresh=30 \
    sysctl.kernel.hung_task_timeout_secs=240";

/// The frequency of this machine's time stamp counter in kHz, which is that of emulated processors too.
///
/// A guest that measures it against emulated timers may be off by any factor where the machine does other
/// things meanwhile (125 MHz for 2.5 GHz was seen), and all its time is then.
#[cfg(target_arch = "x86_64")]
fn counter_khz() -> Option<u64> {
    static FREQUENCY: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    /// The counter at a time, which nothing came between.
    fn look() -> (u64, Instant) {
        let looks = (0..100).map(|_| {
            let before = Instant::now();
            // SAFETY: every x86_64 processor has this instruction, and Linux lets programs use it.
            let counter = unsafe { core::arch::x86_64::_rdtsc() };
            (before.elapsed(), counter, before)
        });
        let best = looks.min_by_key(|(took, ..)| *took);
        best.map_or((0, Instant::now()), |(took, counter, before)| {
            (counter, before + took / 2)
        })
    }
    Some(*FREQUENCY.get_or_init(|| {
        let (first, start) = look();
        std::thread::sleep(Duration::from_millis(50));
        let (last, end) = look();
        last.wrapping_sub(first) * 1_000_000 / (end - start).as_nanos() as u64
    }))
}

/// Of another machine nobody knows: a guest measures it.
#[cfg(not(target_arch = "x86_64"))]
fn counter_khz() -> Option<u64> {
    None
}

/// Has a guest boot with one processor, and the agent start the others. While it boots the kernel changes
/// its own code again and again, by way of a breakpoint; the emulator may keep a translation of that for
/// another processor for good, which ends in a panic (`Oops: int3`) or a processor that hangs.
const EMULATED_BOOT: &str = "maxcpus=1";

/// The processor that is emulated. It has an instruction for random numbers: without that a guest's kernel has
/// nothing to make them of for minutes, and takes some eleven thousand instructions for each one until then, which is
/// more than most of what is measured here.
pub const EMULATED_CPU: &str = "qemu64,+rdrand";

/// A guest that hung or gave up while it booted, before anything of this tree ran in it.
#[derive(Debug)]
pub struct BootFailed {
    /// Which one.
    pub vm: String,
    /// What happened.
    pub how: &'static str,
    /// The last line it wrote, or that which says why it gave up.
    pub last: String,
    /// Where more is written down.
    pub more: PathBuf,
}

impl std::fmt::Display for BootFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {} while booting: {} ({})",
            self.vm,
            self.how,
            self.last.trim(),
            outside(&self.more).display()
        )
    }
}

impl std::error::Error for BootFailed {}

/// What a VM is made of.
#[derive(Debug, Clone)]
pub struct Config {
    /// Counted from 1.
    pub index: usize,
    /// Folder for sockets and logs.
    pub dir: PathBuf,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial file system.
    pub initramfs: PathBuf,
    /// Disks in order: root, payload, modules.
    pub disks: [PathBuf; 3],
    /// Number of virtual processors.
    pub cpus: usize,
    /// Memory in MiB.
    pub memory_mib: usize,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// The socket that the network interface connects to; without it the device has that itself.
    pub net: Option<PathBuf>,
    /// The vfio-user sockets of its devices, in the order of their slots.
    pub devices: Vec<PathBuf>,
    /// Further arguments of QEMU.
    pub qemu_args: Vec<String>,
    /// How many times longer than usual everything may take.
    pub patience: u32,
}

/// The hardware address of the interface of the VM with this number.
pub fn mac(index: usize) -> String {
    format!("52:54:00:fe:{:02x}:{:02x}", index >> 8, index & 0xff)
}

/// Whether hardware virtualisation can be used: the processor must say so as well, since
/// `/dev/kvm` is there on machines where a guest then hangs.
pub fn kvm_usable() -> bool {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = info
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    flags.split_whitespace().any(|f| f == "vmx" || f == "svm")
        && fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok()
}

type Waiting = Arc<Mutex<HashMap<u64, Sender<Outcome>>>>;

/// A virtual machine; killed when dropped.
#[derive(Debug)]
pub struct Vm {
    /// Counted from 1.
    pub index: usize,
    qemu: Mutex<Daemon>,
    writer: Mutex<UnixStream>,
    waiting: Waiting,
    next: AtomicU64,
    hello: Mutex<Receiver<String>>,
    serial: PathBuf,
    scanned: Mutex<usize>,
    other_races: AtomicU64,
    dir: PathBuf,
    patience: u32,
}

/// A script that runs in a guest.
#[derive(Debug)]
pub struct Running<'vm> {
    vm: &'vm Vm,
    id: u64,
    script: String,
    done: Receiver<Outcome>,
    deadline: Instant,
}

impl Vm {
    /// Starts QEMU and connects to the agent's port; [`Vm::wait_up`] waits for the guest.
    pub fn start(config: &Config) -> Result<Self> {
        let name = format!("vm{}", config.index);
        let path = |suffix: &str| config.dir.join(format!("{name}.{suffix}"));
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.env("TMPDIR", &config.dir);
        qemu.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        // No HPET: the kernel measures it with interrupts off, which never ends when the emulator
        // is late, and has better clocks.
        let machine = "q35,memory-backend=mem,hpet=off";
        qemu.args(["-name", &name, "-machine", machine]);
        let emulated = if kvm_usable() {
            qemu.args(["-accel", "kvm", "-cpu", "host"]);
            String::new()
        } else {
            qemu.args(["-accel", "tcg,thread=multi", "-cpu", EMULATED_CPU]);
            let khz = counter_khz().map(|khz| format!("tsc_early_khz={khz}"));
            let khz = khz.unwrap_or_default();
            format!("{EMULATED_TIME} {khz} {EMULATED_BOOT}")
        };
        qemu.arg("-smp").arg(config.cpus.to_string());
        qemu.arg("-m").arg(format!("{}M", config.memory_mib));
        // The device process maps the guest's memory, so it must be shared.
        qemu.arg("-object").arg(format!(
            "memory-backend-memfd,id=mem,size={}M,share=on",
            config.memory_mib
        ));
        qemu.arg("-kernel").arg(&config.kernel);
        qemu.arg("-initrd").arg(&config.initramfs);
        qemu.arg("-append").arg(format!(
            "console=ttyS0 loglevel=7 panic=-1 mitigations=off {WATCHDOGS} {emulated} {}",
            config.kernel_args
        ));
        let serial = path("serial.log");
        qemu.arg("-chardev")
            .arg(format!("file,id=serial,path={}", serial.display()));
        qemu.args(["-serial", "chardev:serial"]);
        for (index, disk) in config.disks.iter().enumerate() {
            let mode = if index == 0 {
                "snapshot=on"
            } else {
                "readonly=on"
            };
            qemu.arg("-drive").arg(format!(
                "if=none,id=disk{index},format=raw,{mode},cache=unsafe,file={}",
                disk.display()
            ));
            qemu.arg("-device")
                .arg(format!("virtio-blk-pci,drive=disk{index}"));
        }
        qemu.args(["-device", "virtio-serial-pci"]);
        for (id, device) in [
            ("agent", "virtserialport,chardev=agent,name=ferrite.agent"),
            ("console", "virtconsole,chardev=console"),
        ] {
            qemu.arg("-chardev").arg(format!(
                "socket,id={id},server=on,wait=off,path={}",
                path(id).display()
            ));
            qemu.args(["-device", device]);
        }
        qemu.arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", path("qmp").display()));
        if let Some(net) = &config.net {
            qemu.arg("-netdev").arg(format!(
                "stream,id=net0,server=off,addr.type=unix,addr.path={}",
                net.display()
            ));
            qemu.arg("-device").arg(format!(
                "virtio-net-pci,netdev=net0,romfile=,host_mtu=9000,mac={}",
                mac(config.index)
            ));
        }
        for (number, socket) in config.devices.iter().enumerate() {
            let chassis = number + 1;
            // A link of that speed says when it is there again after a reset of the bus; a faster one has to say more.
            let port =
                format!("pcie-root-port,id=rp{number},bus=pcie.0,chassis={chassis},x-speed=5");
            qemu.arg("-device").arg(port);
            let device = serde_json::json!({
                "driver": "vfio-user-pci",
                "bus": format!("rp{number}"),
                // One late answer loses the device for good.
                "x-msg-timeout": 60000,
                "socket": { "type": "unix", "path": socket },
            });
            qemu.arg("-device").arg(device.to_string());
        }
        qemu.args(&config.qemu_args);
        let mut qemu = Daemon::start(&name, &mut qemu, &path("qemu.log"))?;
        let agent = path("agent");
        let mut stream = None;
        wait_until(Instant::now() + STARTED, || {
            qemu.check_alive()?;
            stream = UnixStream::connect(&agent).ok();
            Ok(stream.is_some())
        })?;
        let stream = stream.with_context(|| format!("{name}: QEMU opened no agent port"))?;
        let waiting = Waiting::default();
        let (hello_out, hello) = channel();
        read_answers(stream.try_clone()?, Arc::clone(&waiting), hello_out);
        Ok(Self {
            index: config.index,
            qemu: Mutex::new(qemu),
            writer: Mutex::new(stream),
            waiting,
            next: AtomicU64::new(1),
            hello: Mutex::new(hello),
            serial,
            scanned: Mutex::new(0),
            other_races: AtomicU64::new(0),
            dir: config.dir.clone(),
            patience: config.patience.max(1),
        })
    }

    /// What it is called in messages.
    pub fn name(&self) -> String {
        format!("vm{}", self.index)
    }

    /// Its address on the lab's network.
    pub fn ip(&self) -> String {
        format!("10.77.0.{}", self.index)
    }

    /// How many times longer than usual everything may take.
    pub fn patience(&self) -> u32 {
        self.patience
    }

    /// How long that may take which should not take longer than `usual`.
    pub fn at_most(&self, usual: Duration) -> Duration {
        usual * self.patience * LENIENCE
    }

    /// A code for the time within which a peer acknowledges: a quarter of a second where it is as fast
    /// as usual.
    pub fn ack_timeout(&self) -> u32 {
        16 + self.patience.next_power_of_two().ilog2()
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        lock(&self.qemu).pid()
    }

    /// The socket behind the guest's interactive console.
    pub fn console(&self) -> PathBuf {
        self.dir.join(format!("{}.console", self.name()))
    }

    /// Waits until the agent has said hello; fails with [`BootFailed`] when the guest hangs before.
    pub fn wait_up(&self, deadline: Instant) -> Result<()> {
        let mut quiet = Quiet::default();
        loop {
            match lock(&self.hello).recv_timeout(Duration::from_millis(50)) {
                Ok(_release) => {
                    self.let_devices_first();
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    if let Some(panic) = self.panic() {
                        return Err(anyhow!(BootFailed {
                            vm: self.name(),
                            how: "panicked",
                            last: panic,
                            more: self.serial.clone(),
                        }));
                    }
                    lock(&self.qemu).check_alive()?;
                    bail!("{} ended while booting\n{}", self.name(), self.last_words())
                }
            }
            check_interrupted()?;
            if quiet.lasts(&self.serial, self.pid()) >= SILENCE {
                let more = self.write_state();
                self.kill();
                return Err(anyhow!(BootFailed {
                    vm: self.name(),
                    how: "fell silent",
                    last: tail(&self.serial, 1),
                    more,
                }));
            }
            if Instant::now() >= deadline {
                self.kill();
                bail!(
                    "{} did not come up in time\n{}",
                    self.name(),
                    self.last_words()
                );
            }
        }
    }

    /// The line with which the guest's kernel gave up, if it did.
    fn panic(&self) -> Option<String> {
        let log = self.serial_log();
        let line = log.lines().find(|line| line.contains("Kernel panic"))?;
        Some(line.to_owned())
    }

    /// Writes down what QEMU says of the machine, for whoever looks into a hang; gives the file.
    fn write_state(&self) -> PathBuf {
        let path = self.dir.join(format!("{}.state", self.name()));
        let mut text = String::new();
        for command in ["info cpus", "info registers -a", "info lapic", "info pic"] {
            let answer = self.monitor(command);
            text += &format!(
                "--- {command}\n{}\n",
                answer.unwrap_or_else(|e| e.to_string())
            );
        }
        let _ = fs::write(&path, text);
        path
    }

    /// Gives a command for people to QEMU's monitor.
    fn monitor(&self, command: &str) -> Result<String> {
        let arguments = serde_json::json!({ "command-line": command });
        let answer = self.qmp("human-monitor-command", &arguments)?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    /// Gives a command to QEMU's monitor; gives what it returns.
    fn qmp(&self, command: &str, arguments: &serde_json::Value) -> Result<serde_json::Value> {
        let mut stream = UnixStream::connect(self.dir.join(format!("{}.qmp", self.name())))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        for request in [
            serde_json::json!({"execute": "qmp_capabilities"}),
            serde_json::json!({"execute": command, "arguments": arguments}),
        ] {
            stream.write_all(format!("{request}\n").as_bytes())?;
            // Events may come before the answer.
            loop {
                line.clear();
                if reader.read_line(&mut line)? == 0 {
                    bail!("QEMU closed its monitor");
                }
                if line.contains("\"return\"") || line.contains("\"error\"") {
                    break;
                }
            }
        }
        let mut answer: serde_json::Value = serde_json::from_str(&line)?;
        if answer.get("return").is_none() {
            bail!("QEMU refuses {command}: {answer}");
        }
        Ok(answer["return"].take())
    }

    /// Has the port above its first device report an error of the bus (AER), by the name that QEMU has for it.
    pub fn bus_error(&self, error: &str) -> Result<()> {
        let said = self.monitor(&format!("pcie_aer_inject_error rp0 {error}"))?;
        ensure!(said.starts_with("OK"), "QEMU reports no error: {said}");
        Ok(())
    }

    /// Has a guest that switches its machine off leave it as it is then, and its devices, to be looked at.
    pub fn stay_when_off(&self) -> Result<()> {
        self.qmp("set-action", &serde_json::json!({"shutdown": "pause"}))?;
        Ok(())
    }

    /// Whether it has.
    pub fn is_off(&self) -> Result<bool> {
        let status = self.qmp("query-status", &serde_json::json!({}))?;
        Ok(status["status"] == "shutdown")
    }

    /// Puts the threads that run the guest's processors behind everything else of the lab.
    ///
    /// A program that polls keeps its processor busy whatever happens. On a machine with no more
    /// cores than that, the device it waits for must not wait for its slice of time.
    fn let_devices_first(&self) {
        for (thread, _) in processor_threads(self.pid()) {
            // SAFETY: the call takes no pointer. A thread that is gone is no harm.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, PROCESSOR_NICENESS) };
        }
    }

    /// Starts a script in the guest, which gets more time than it should need ([`Vm::at_most`]).
    pub fn spawn(&self, script: &str, timeout: Duration) -> Result<Running<'_>> {
        self.spawn_within(script, self.at_most(timeout))
    }

    /// Starts a script that has no more time than this.
    pub fn spawn_within(&self, script: &str, timeout: Duration) -> Result<Running<'_>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, done) = channel();
        lock(&self.waiting).insert(id, sender);
        self.send(&Request::Run {
            id,
            script: script.to_owned(),
            timeout_ms: timeout.as_millis() as u64,
        })?;
        Ok(Running {
            vm: self,
            id,
            script: script.to_owned(),
            done,
            deadline: Instant::now() + timeout + GRACE,
        })
    }

    fn send(&self, request: &Request) -> Result<()> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        lock(&self.writer)
            .write_all(&line)
            .with_context(|| format!("{}: the agent's port is closed", self.name()))
    }

    /// Runs a script to its end, whatever its exit code.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<Outcome> {
        self.spawn(script, timeout)?.wait()
    }

    /// Runs a script that must succeed; gives its standard output.
    pub fn sh_in(&self, script: &str, timeout: Duration) -> Result<String> {
        self.spawn(script, timeout)?.success()
    }

    /// [`Vm::sh_in`] with a minute's time.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.sh_in(script, Duration::from_secs(60))
    }

    /// Repeats a script until it succeeds.
    pub fn wait_for(&self, script: &str, timeout: Duration) -> Result<()> {
        let said = format!("/run/waiting-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let outcome = self.run(&repeated_until_it_succeeds(script, &said), timeout)?;
        if outcome.ok() {
            return Ok(());
        }
        bail!(
            "{}: waited {} s in vain for: {script}\n{}{}{}",
            self.name(),
            self.at_most(timeout).as_secs(),
            outcome.out,
            outcome.err,
            self.sh(&format!("cat {said}"))?
        );
    }

    /// Ends QEMU.
    pub fn kill(&self) {
        lock(&self.qemu).kill();
    }

    /// Whether QEMU still runs.
    pub fn alive(&self) -> bool {
        matches!(lock(&self.qemu).ended(), Ok(None))
    }

    /// The file with the serial log.
    pub fn serial(&self) -> &Path {
        &self.serial
    }

    /// The whole serial log.
    pub fn serial_log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.serial).unwrap_or_default()).into_owned()
    }

    /// Kernel reports since the last call.
    pub fn new_findings(&self) -> Vec<String> {
        let log = fs::read(&self.serial).unwrap_or_default();
        let mut scanned = lock(&self.scanned);
        let fresh = &log[(*scanned).min(log.len())..];
        let fresh = &fresh[..klog::readable(fresh)];
        *scanned += fresh.len();
        let reading = klog::read(&String::from_utf8_lossy(fresh));
        self.other_races
            .fetch_add(reading.other_races.len() as u64, Ordering::Relaxed);
        reading.findings
    }

    /// How many data races of the kernel's own were reported.
    pub fn other_races(&self) -> u64 {
        self.other_races.load(Ordering::Relaxed)
    }

    /// The end of the serial log, for messages.
    pub fn last_words(&self) -> String {
        format!(
            "--- end of {}\n{}\n---",
            outside(&self.serial).display(),
            tail(&self.serial, 40)
        )
    }
}

/// A script that repeats another one until it succeeds, which says to a file what it says.
///
/// All in one shell of the guest, which sleeps without another program's help: starting programs is what takes time
/// there, and whoever is waited for needs it. So does who is in the other machines: what takes long is looked for less
/// often, by a sixteenth of what it took so far, and every half second at the least.
fn repeated_until_it_succeeds(script: &str, said: &str) -> String {
    format!(
        "exec {{never}}<> <(:)
         since=${{EPOCHREALTIME/./}}
         while :; do
             (
                 {script}
             ) >{said} 2>&1
             [ $? -ne 0 ] || break
             pause=$(((${{EPOCHREALTIME/./}} - since) / 16000))
             printf -v pause 0.%03d $((pause < 50 ? 50 : pause > 500 ? 500 : pause))
             read -rt $pause -u $never
         done
         rm {said}"
    )
}

/// The threads of a QEMU that run the guest's processors, and the folders that tell of them.
fn processor_threads(qemu: u32) -> Vec<(libc::id_t, PathBuf)> {
    let tasks = fs::read_dir(format!("/proc/{qemu}/task"));
    let threads = tasks.into_iter().flatten().flatten().filter_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let number = task.file_name().to_string_lossy().parse().ok()?;
        name.starts_with("CPU ").then(|| (number, task.path()))
    });
    threads.collect()
}

/// For how long a guest has said nothing although it could have.
#[derive(Debug, Default)]
struct Quiet {
    written: Option<u64>,
    since: Option<Instant>,
    /// What each processor had waited for its turn when the silence began.
    waited: HashMap<libc::id_t, Duration>,
}

impl Quiet {
    /// The time since the last output on `serial`, without that which a thread of the guest's
    /// processors spent waiting for a processor of the machine.
    fn lasts(&mut self, serial: &Path, qemu: u32) -> Duration {
        let written = fs::metadata(serial).map_or(0, |meta| meta.len());
        let waited = processor_threads(qemu)
            .into_iter()
            .filter_map(|(thread, task)| Some((thread, turn_wait(&task)?)))
            .collect();
        self.after(written, Instant::now(), waited)
    }

    fn after(
        &mut self,
        written: u64,
        now: Instant,
        waited: HashMap<libc::id_t, Duration>,
    ) -> Duration {
        if self.written != Some(written) {
            *self = Self {
                written: Some(written),
                since: Some(now),
                waited,
            };
            return Duration::ZERO;
        }
        let starved = waited
            .iter()
            .map(|(thread, now)| now.saturating_sub(*self.waited.get(thread).unwrap_or(now)))
            .max()
            .unwrap_or_default();
        let quiet = self.since.map_or(Duration::ZERO, |since| now - since);
        quiet.saturating_sub(starved)
    }
}

/// How long a thread has waited for its turn on a processor, where the kernel counts it.
fn turn_wait(task: &Path) -> Option<Duration> {
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    let nanoseconds = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

impl Running<'_> {
    /// Waits for the end. A guest that does not answer in time is wedged: it is killed, and the
    /// error shows its serial log.
    pub fn wait(self) -> Result<Outcome> {
        let end = self.deadline;
        self.ended_until(end)?.ok_or_else(|| {
            self.vm.kill();
            anyhow!(
                "{} is wedged (no answer to: {}); killed\n{}",
                self.vm.name(),
                self.script,
                self.vm.last_words()
            )
        })
    }

    /// Waits until then for the end (its outcome is then lost to [`Running::wait`]).
    pub fn ended_until(&self, then: Instant) -> Result<Option<Outcome>> {
        loop {
            match self.done.recv_timeout(Duration::from_millis(50)) {
                Ok(outcome) => return Ok(Some(outcome)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!(
                    "{} ended during: {}\n{}",
                    self.vm.name(),
                    self.script,
                    self.vm.last_words()
                ),
            }
            check_interrupted()?;
            if Instant::now() >= then {
                return Ok(None);
            }
        }
    }

    /// Waits for the end, which must be a success; gives standard output.
    pub fn success(self) -> Result<String> {
        let (name, script) = (self.vm.name(), self.script.clone());
        let outcome = self.wait()?;
        if outcome.ok() {
            return Ok(outcome.out);
        }
        let how = if outcome.timed_out {
            "timed out".to_owned()
        } else {
            format!("exit code {}", outcome.code)
        };
        Err(anyhow!(
            "{name}: {how}: {script}\n{}{}",
            outcome.out,
            outcome.err
        ))
    }

    /// Ends the script, which must be under way still, with a signal; gives what it said.
    pub fn end_with(self, signal: i32) -> Result<Outcome> {
        self.signal(signal)?;
        let (name, script) = (self.vm.name(), self.script.clone());
        let outcome = self.wait()?;
        if !outcome.ended_by(signal) {
            bail!("{name}: ended before it was told to: {script}\n{outcome:?}");
        }
        Ok(outcome)
    }

    /// Kills the script unless it has ended, as it may when the other end or the device is gone;
    /// it must not have crashed.
    pub fn end(self) -> Result<Outcome> {
        self.signal(libc::SIGKILL)?;
        let (name, script) = (self.vm.name(), self.script.clone());
        let outcome = self.wait()?;
        if outcome.crashed() || outcome.timed_out {
            bail!("{name}: crashed or hung: {script}\n{outcome:?}");
        }
        Ok(outcome)
    }

    /// Whether it has ended (its outcome is then lost to [`Running::wait`]).
    pub fn ended(&self) -> Option<Outcome> {
        self.done.try_recv().ok()
    }

    /// Sends a signal to the script's process group.
    pub fn signal(&self, signal: i32) -> Result<()> {
        self.vm.send(&Request::Signal {
            id: self.id,
            signal,
        })
    }
}

fn read_answers(stream: UnixStream, waiting: Waiting, hello: Sender<String>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
            match serde_json::from_slice::<Answer>(&line) {
                Ok(Answer::Hello { release }) => {
                    let _ = hello.send(release);
                }
                Ok(Answer::Done { id, outcome }) => {
                    if let Some(sender) = lock(&waiting).remove(&id) {
                        let _ = sender.send(outcome);
                    }
                }
                Err(_) => {}
            }
        }
        // The VM has ended; everyone who waits learns it.
        lock(&waiting).clear();
    });
}

/// Waits until a process has made a socket.
pub fn wait_for_socket(path: &Path, owner: &mut Daemon) -> Result<()> {
    let there = wait_until(Instant::now() + STARTED, || {
        owner.check_alive()?;
        Ok(path.exists())
    })?;
    if !there {
        bail!("{} made no socket {}", owner.name(), path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_counter_is_as_fast_as_processors_are() {
        // Half a gigahertz to ten.
        let khz = counter_khz().unwrap();
        assert!((500_000..10_000_000).contains(&khz), "{khz}");
    }

    #[test]
    fn a_script_is_repeated_until_it_succeeds_and_less_often_with_time() {
        let at = std::env::temp_dir().join(format!("ferrite-waiting-{}", std::process::id()));
        fs::create_dir_all(&at).unwrap();
        let (said, looks) = (at.join("said"), at.join("looks"));
        let script = format!(
            "echo >>{}; echo not yet; [ $((${{EPOCHREALTIME/./}} - since)) -ge 3000000 ]",
            looks.display()
        );
        let script = repeated_until_it_succeeds(&script, &said.display().to_string());
        let ended = Command::new("/bin/bash").args(["-c", &script]).status();
        let count = fs::read_to_string(&looks).unwrap().lines().count();
        let is_left = said.exists();
        fs::remove_dir_all(&at).unwrap();
        assert!(ended.unwrap().success() && !is_left);
        // Sixteen in the first 800 ms, then each a sixteenth of the time later than the one before; one each 50 ms would
        // be sixty.
        assert!((2..=42).contains(&count), "{count}");
    }

    #[test]
    fn a_guest_is_quiet_only_while_it_could_have_spoken() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let waited =
            |first: u32, other: u32| HashMap::from([(1, second * first), (2, second * other)]);
        let mut quiet = Quiet::default();
        assert_eq!(quiet.after(10, start, waited(5, 5)), Duration::ZERO);
        // Ten seconds on, all of them with a processor to run on.
        assert_eq!(
            quiet.after(10, start + second * 10, waited(5, 5)),
            second * 10
        );
        // One of its processors waited eight of them for its turn.
        assert_eq!(
            quiet.after(10, start + second * 10, waited(13, 6)),
            second * 2
        );
        // A line was written: it begins anew.
        assert_eq!(
            quiet.after(11, start + second * 20, waited(13, 6)),
            Duration::ZERO
        );
        assert_eq!(
            quiet.after(11, start + second * 23, waited(13, 6)),
            second * 3
        );
    }
}
