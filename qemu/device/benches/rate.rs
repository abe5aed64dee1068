// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What two devices and the shared memory between them carry, without guests.
//!
//! Two device processes and the fabric, as in a VM test, or one process with two functions (`inside`); in
//! the place of the guests a thread of this
//! program posts to the one and polls. It takes seconds, and no kernel's time is in it. Numbers are the
//! best of several runs and for comparison on one machine, before and after a change; nothing is
//! asserted here. Those of `many` and `same` go through 128 MiB of each memory or one, and are told beside
//! what memcpy takes for as much, just before: processor time by processor time, which is much the same
//! where the machine has other work.
//!
//! `cargo bench -p ferrite-device`, after `cargo build --release -p ferrite-fabric`.

use ferrite_abi::*;
use ferrite_conformance::host::{
    region_of, Connection, Host, OWN_GID, OWN_GID6, PEER_GID, PEER_GID6,
};
use ferrite_conformance::memory::PAGE;
use ferrite_conformance::outcome::Outcome;
use ferrite_conformance::rings::{Cq, Qp, Region};
use ferrite_conformance::transport::Device;
use ferrite_conformance::work::Work;
use rustix::time::{clock_gettime, ClockId};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const ACCESS: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
/// One measurement takes so long.
const SPAN: Duration = Duration::from_millis(400);
const ROUNDS: usize = 3;

/// Mebibytes that no cache holds.
const MANY: u64 = 128;
const MIB: u64 = 1 << 20;
/// Where memory of its own for a long region begins.
const FURTHER: u64 = 1 << 32;

/// A process that ends with this value.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("a program that can be started"))
    }

    /// Nanoseconds of processor time of all its threads.
    fn time(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("its threads");
        let time = |path: PathBuf| -> Option<u64> {
            let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
            text.split(' ').next()?.parse().ok()
        };
        tasks.flatten().filter_map(|task| time(task.path())).sum()
    }

    /// How often its threads have gone to sleep.
    fn sleeps(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("its threads");
        let sleeps = |path: PathBuf| -> Option<u64> {
            let text = std::fs::read_to_string(path.join("status")).ok()?;
            let name = "voluntary_ctxt_switches:";
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok()
        };
        tasks.flatten().filter_map(|task| sleeps(task.path())).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mac(number: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0xfe, 0, 1 + number as u8]
}

fn gids(number: usize) -> [[u8; 16]; 2] {
    [[OWN_GID, OWN_GID6], [PEER_GID, PEER_GID6]][number]
}

/// A host that runs.
fn host(device: &mut Device, number: usize) -> Outcome<Host<'_>> {
    let mut host = Host::new(device, None, None)?;
    host.start()?;
    for (index, gid) in (0..).zip(gids(number)) {
        host.set_gid(index, gid, VLAN_NONE)?;
    }
    Ok(host)
}

/// A region of so many bytes; a long one has memory of its own, and tables of its pages as a driver makes
/// them.
fn long_region(host: &mut Host<'_>, length: u64) -> Outcome<Region> {
    if length <= MIB {
        return host.region(ACCESS, length);
    }
    host.map(FURTHER, length)?;
    let mut command = host.region_command(ACCESS, PAGE);
    let pages = length / PAGE;
    let tables = host.memory.allocate(pages * 8);
    let root = host.memory.allocate(PAGE);
    for page in 0..pages {
        (host.memory).store64(tables + page * 8, FURTHER + page * PAGE);
    }
    for table in 0..pages.div_ceil(ATT_TABLE_ENTRIES as u64) {
        (host.memory).store64(root + table * 8, tables + table * ATT_TABLE_SIZE as u64);
    }
    command.buffer = Buffer {
        root,
        length,
        fbo: 0,
        page_shift: PAGE_SHIFT_MIN,
        order: AttOrder::Second.number(),
        ..Buffer::zeroed()
    };
    host.execute(&command)?;
    Ok(region_of(&command))
}

/// Queue pairs of a host, all with one completion queue.
struct End {
    qps: Vec<Qp>,
    cq: Cq,
    region: Region,
}

impl End {
    fn new(host: &mut Host<'_>, count: usize, length: u64) -> Outcome<Self> {
        let command = host.cq_command(15);
        host.execute(&command)?;
        let cq = Cq::new(&command);
        let region = long_region(host, length)?;
        let qps = (0..count).map(|_| host.create_qp(Service::Rc, &cq));
        let qps = qps.collect::<Outcome<_>>()?;
        Ok(Self { qps, cq, region })
    }

    /// Connects all of them to those of another host.
    fn join(&self, host: &mut Host<'_>, number: usize, peer: &End) -> Outcome {
        for (own, other) in self.qps.iter().zip(&peer.qps) {
            let to_peer = host.to_neighbour();
            let to_peer = Connection {
                qpn: other.qpn,
                address_vector: AddressVector {
                    mac: mac(number),
                    gid: gids(number)[0],
                    ..to_peer.address_vector
                },
                send_psn: 0x300,
                receive_psn: 0x300,
                log_mtu: 12,
                ..to_peer
            };
            host.bring(Service::Rc, own, QueuePairStateCode::Rts, &to_peer)?;
        }
        Ok(())
    }
}

/// What was measured, for each message.
#[derive(Clone, Copy)]
struct Sample {
    nanoseconds: f64,
    device: f64,
    doorbells: f64,
    /// Times that a thread of a device has gone to sleep.
    sleeps: f64,
    /// Packets that were sent again, as after a loss, and acknowledgements that were waited for in vain,
    /// in all.
    losses: [u64; 2],
}

/// Writes of `size` bytes over all queue pairs in turn, through `span` bytes of the regions, up to `depth` under way on each and `width` on all
/// of them, every `signal`th with a completion.
fn stream(
    host: &mut Host<'_>,
    (own, peer): (&mut End, &End),
    (size, span): (u32, u64),
    (depth, width, signal): (u32, u32, u32),
    devices: &[Process],
) -> Outcome<Sample> {
    let region = &own.region;
    let work = |flags, at: u64| {
        let sges = [region.sge(at, size)];
        let to = peer.region.address + at;
        Work::remote(SendOpcode::Write, &sges, to, peer.region.tag)
            .flags(flags)
            .encode()
    };
    let works: Vec<_> = (0..(span / u64::from(size)).max(1))
        .map(|place| place * u64::from(size))
        .map(|at| (work(0, at), work(SEND_SIGNALED, at)))
        .collect();
    let mut under_way = vec![0u32; own.qps.len()];
    let numbers: HashMap<u32, usize> = (own.qps.iter().map(|qp| qp.qpn)).zip(0..).collect();
    let (mut posted, mut all, mut doorbells, mut next) = (0u64, 0u32, 0u64, 0usize);
    let time = |devices: &[Process]| devices.iter().map(Process::time).sum::<u64>();
    let sleeps = |devices: &[Process]| devices.iter().map(Process::sleeps).sum::<u64>();
    let asleep = sleeps(devices);
    let (start, before) = (Instant::now(), time(devices));
    let mut ending = false;
    while !ending || all > 0 {
        ending |= start.elapsed() > SPAN;
        let mut passed = 0;
        while !ending && passed < own.qps.len() && all + signal <= width {
            let qp = &mut own.qps[next];
            if under_way[next] + signal <= depth {
                passed = 0;
                for message in 1..=signal {
                    let (quiet, told) = &works[(posted as usize + message as usize) % works.len()];
                    qp.write_send(&host.memory, if message == signal { told } else { quiet });
                    // As a program that posts one after the other.
                    let wake = qp.record + std::mem::offset_of!(QueuePairRecord, send_wake) as u64;
                    host.memory.store32(qp.record, qp.send_producer);
                    host.memory.barrier();
                    if host.memory.load32(wake) != 0 {
                        doorbells += 1;
                        let word = send_doorbell(qp.qpn, qp.send_producer);
                        host.device.doorbell(qp.page, DOORBELL_SEND, word)?;
                    }
                }
                under_way[next] += signal;
                all += signal;
                posted += u64::from(signal);
            } else {
                passed += 1;
            }
            next = (next + 1) % own.qps.len();
        }
        let mut found = false;
        while let Some(entry) = own.cq.take(&host.memory) {
            assert_eq!(entry.status, CompletionStatus::Success.number());
            under_way[numbers[&entry.qpn]] -= signal;
            all -= signal;
            found = true;
        }
        if !found {
            std::thread::yield_now();
        }
        assert!(start.elapsed() < 20 * SPAN, "messages are stuck: {all}");
    }
    let each = |value: u64| value as f64 / posted as f64;
    Ok(Sample {
        nanoseconds: each(start.elapsed().as_nanos() as u64),
        device: each(time(devices) - before),
        doorbells: each(doorbells),
        sleeps: each(sleeps(devices) - asleep),
        losses: [0; 2],
    })
}

fn measure(
    paths: &[PathBuf],
    devices: &[Process],
    (qps, size, span): (usize, u32, u64),
    (depth, width, signal): (u32, u32, u32),
) -> Outcome<Sample> {
    let mut ends = paths.iter().map(|path| Device::connect(path));
    let (mut a, mut b) = (ends.next().expect("two")?, ends.next().expect("two")?);
    let (mut a, mut b) = (host(&mut a, 0)?, host(&mut b, 1)?);
    let length = span.max(PAGE);
    let (mut own, peer) = (
        End::new(&mut a, qps, length)?,
        End::new(&mut b, qps, length)?,
    );
    own.join(&mut a, 1, &peer)?;
    peer.join(&mut b, 0, &own)?;
    let mut best: Option<Sample> = None;
    for _ in 0..=ROUNDS {
        let sample = stream(
            &mut a,
            (&mut own, &peer),
            (size, span),
            (depth, width, signal),
            devices,
        )?;
        if best.is_none_or(|best| sample.nanoseconds < best.nanoseconds) {
            best = Some(sample);
        }
    }
    let losses = [a.counter("retransmissions")?, a.counter("ack_timeouts")?];
    a.finish()?;
    b.finish()?;
    let best = best.expect("several rounds");
    Ok(Sample { losses, ..best })
}

fn run(directory: &Path) -> Outcome {
    let device = PathBuf::from(env!("CARGO_BIN_EXE_ferrite-device"));
    let path = |name: &str| directory.join(name);
    let _fabric = Process::start(
        Command::new(device.with_file_name("ferrite-fabric"))
            .arg("--listen")
            .arg(path("fabric")),
    );
    while !path("fabric").exists() {
        std::thread::yield_now();
    }
    let paths = [path("a"), path("b")];
    let mac_text = |number| {
        let [a, b, c, d, e, f] = mac(number);
        format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    };
    let two = || -> Vec<_> {
        let start = |(number, socket): (usize, &PathBuf)| {
            Process::start(
                Command::new(&device)
                    .args(["--log", "error", "--mac"])
                    .arg(mac_text(number))
                    .arg("--socket")
                    .arg(socket)
                    .arg("--net")
                    .arg(path(&format!("net{number}")))
                    .arg("--uplink")
                    .arg(path("fabric")),
            )
        };
        paths.iter().enumerate().map(start).collect()
    };
    let one = || -> Vec<_> {
        let mut command = Command::new(&device);
        command.args(["--log", "error"]);
        for (number, socket) in paths.iter().enumerate() {
            let socket = socket.display();
            let function = format!("socket={socket},mac={}", mac_text(number));
            command.arg("--function").arg(function);
        }
        vec![Process::start(&mut command)]
    };
    let only = std::env::args().nth(1).filter(|arg| !arg.starts_with('-'));
    let wanted = |name: &str| only.as_deref().is_none_or(|only| name.contains(only));
    println!("   messages              a second  device ns/message  doorbells/message");
    let show = |name: &str, qps: usize, size: u32, shape: (u32, u32, u32)| -> Outcome {
        if !wanted(name) {
            return Ok(());
        }
        // A guest that goes ends its device.
        let devices = two();
        let sample = measure(&paths, &devices, (qps, size, size.into()), shape)?;
        let rate = 1e9 / sample.nanoseconds;
        println!(
            "{name:>10} {size:8} B {qps:5} qps {rate:10.0} {:12.0} {:12.3}   {:6.0} MiB/s, {} again, {} timeouts",
            sample.device,
            sample.doorbells,
            rate * f64::from(size) / 1048576.0,
            sample.losses[0],
            sample.losses[1],
        );
        drop(devices);
        for path in &paths {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    };
    for qps in [1, 4, 16, 64, 256, 1000] {
        show("stream", qps, 64, (16, u32::MAX, 8))?;
    }
    for qps in [1, 4, 16, 64, 256, 1000] {
        show("single", qps, 64, (1, 64, 1))?;
    }
    // One message at a time: what each takes.
    for qps in [1, 2, 4, 16] {
        show("turn", qps, 64, (1, 1, 1))?;
    }
    for (qps, size) in [
        (1, 65536),
        (1, 1 << 20),
        (4, 1 << 20),
        (64, 65536),
        (256, 65536),
        (1000, 65536),
    ] {
        show("bulk", qps, size, (8, 256, 4))?;
    }
    println!("  1 MiB writes through      device us/MiB     MiB/s  sleeps/MiB  memcpy us/MiB     MiB/s  share");
    let share = |name: &str, span: u64, start: &dyn Fn() -> Vec<Process>| -> Outcome {
        if !wanted(name) {
            return Ok(());
        }
        let devices = start();
        let memcpy = memcpy(span);
        let shape = (16, 16, 1);
        let sample = measure(&paths, &devices, (1, MIB as u32, span * MIB), shape)?;
        println!(
            "{name:>16} {span:4} MiB {:12.1} {:13.0} {:11.2} {:14.1} {:9.0} {:6.2}   {} again, {} timeouts",
            sample.device / 1e3,
            1e9 / sample.nanoseconds,
            sample.sleeps,
            memcpy / 1e3,
            1e9 / memcpy,
            memcpy / sample.device,
            sample.losses[0],
            sample.losses[1],
        );
        drop(devices);
        for path in &paths {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    };
    share("inside same", 1, &one)?;
    share("inside many", MANY, &one)?;
    share("shortcut same", 1, &two)?;
    share("shortcut many", MANY, &two)
}

/// Nanoseconds of processor time that memcpy of a MiB takes, through so many of them.
fn memcpy(span: u64) -> f64 {
    let source = vec![1u8; (span * MIB) as usize];
    let mut target = vec![2u8; (span * MIB) as usize];
    let time = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    let mut once = || {
        let start = time();
        for index in 0..MANY {
            let at = (index % span * MIB) as usize;
            target[at..][..MIB as usize].copy_from_slice(&source[at..][..MIB as usize]);
            std::hint::black_box(&mut target);
        }
        (time() - start) as f64 / MANY as f64
    };
    (0..8).map(|_| once()).fold(f64::INFINITY, f64::min)
}

fn main() {
    let directory = std::env::temp_dir().join(format!("ferrite-rate-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a folder for sockets");
    let result = run(&directory);
    let _ = std::fs::remove_dir_all(&directory);
    if let Err(stop) = result {
        eprintln!("{stop:?}");
        std::process::exit(1);
    }
}
