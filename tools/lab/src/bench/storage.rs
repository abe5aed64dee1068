// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Users of the device inside the kernel: a disk over NVMe-oF and files over NFS, by Ferrite, rxe, siw and
//! TCP in turn, each with the same job of fio's.
//!
//! What limits them is told in two ways. Processor time of all processes that a request passes through,
//! and the counters of Ferrite's devices, are taken together with the times. The guests' instructions are
//! counted in other VMs, and beside them those of the same job on a disk of the client's own: so much of it
//! is fio and the block layer, whatever the disk.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use super::machines::{Driver, Machines};
use super::processes::processor_time;
use super::results::{human, short};
use super::{difference, Plan, Run};
use crate::process::check_interrupted;
use crate::tests::{nfs, nvme};
use crate::vm::Vm;

/// What there is: disks, and files.
pub const PARTS: [&str; 2] = ["storage-nvme", "storage-nfs"];

const PATIENCE: Duration = Duration::from_secs(120);
/// MiB of the disk, or of the file, that are used.
const AREA: u64 = 64;
/// A disk in memory that goes through the same queues of the block layer as NVMe does.
const DISK: &str = "/dev/nullb0";
/// The version of NFS.
const VERSION: &str = "4.2";
/// The file of the client's own.
const OWN_FILE: &str = "/run/bench-file";

/// A job of fio's.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// In results.
    pub test: &'static str,
    /// What fio calls the pattern.
    pattern: &'static str,
    /// Bytes of a request.
    size: u64,
    /// Requests under way.
    depth: u64,
}

/// All jobs, those of the disk first.
pub const JOBS: [Job; 6] = [
    Job {
        test: "nvme_randread",
        pattern: "randread",
        size: 4 << 10,
        depth: 32,
    },
    Job {
        test: "nvme_randwrite",
        pattern: "randwrite",
        size: 4 << 10,
        depth: 32,
    },
    Job {
        test: "nvme_read",
        pattern: "read",
        size: 128 << 10,
        depth: 8,
    },
    Job {
        test: "nvme_write",
        pattern: "write",
        size: 128 << 10,
        depth: 8,
    },
    Job {
        test: "nfs_read",
        pattern: "read",
        size: 128 << 10,
        depth: 8,
    },
    Job {
        test: "nfs_write",
        pattern: "write",
        size: 128 << 10,
        depth: 8,
    },
];

/// How long a job goes on.
enum Length {
    Milliseconds(u64),
    Requests(u64),
}

/// What a job has done.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Done {
    requests: u64,
    seconds: f64,
}

impl Job {
    /// Whether requests a second are what matters, and not bytes.
    pub fn is_small(&self) -> bool {
        self.size <= 4 << 10
    }

    /// Size and requests under way, as results have them.
    pub fn key(&self) -> (u64, u64) {
        (self.size, self.depth)
    }

    /// For people.
    pub fn words(&self) -> String {
        let what = if self.test.starts_with("nfs") {
            "NFS"
        } else {
            "NVMe-oF"
        };
        format!(
            "{what} {} {}, {} under way",
            human(self.size),
            self.pattern,
            self.depth
        )
    }

    /// The command; its times are taken for the whole only, as clocks take many instructions.
    fn fio(&self, path: &str, length: &Length) -> String {
        let length = match length {
            Length::Milliseconds(ms) => format!("--time_based --runtime={ms}ms"),
            Length::Requests(count) => format!("--io_size={}", count * self.size),
        };
        format!(
            "fio --name={} --thread --ioengine=libaio --direct=1 --gtod_reduce=1 --norandommap \
             --filename={path} --size={AREA}m --rw={} --bs={} --iodepth={} {length} \
             --output-format=json",
            self.test, self.pattern, self.size, self.depth
        )
    }

    /// Reads what fio has said.
    fn done(&self, said: &str) -> Result<Done> {
        // There may be notes before it.
        let text = said.find('{').map_or("", |at| &said[at..]);
        let all: Value = serde_json::from_str(text).with_context(|| format!("fio said: {said}"))?;
        let job = &all["jobs"][0];
        ensure!(job["error"] == 0, "fio failed: {job}");
        let way = &job[if self.pattern.ends_with("read") {
            "read"
        } else {
            "write"
        }];
        let requests = way["total_ios"].as_u64().unwrap_or(0);
        let milliseconds = way["runtime"].as_f64().unwrap_or(0.0);
        ensure!(requests > 0 && milliseconds > 0.0, "nothing was done");
        Ok(Done {
            requests,
            seconds: milliseconds / 1000.0,
        })
    }

    /// Its result.
    fn value(&self, done: Done) -> ((&'static str, bool), f64) {
        let rate = done.requests as f64 / done.seconds;
        if self.is_small() {
            (("requests/s", true), rate)
        } else {
            (
                ("MiB/s", true),
                rate * self.size as f64 / f64::from(1 << 20),
            )
        }
    }
}

/// Makes disks in memory in both machines, and offers that of the second, and a folder.
pub fn serve(machines: &Machines) -> Result<()> {
    let (client, server) = machines.cluster.two()?;
    for vm in [client, server] {
        vm.sh(&format!(
            "set -e
             modprobe null_blk nr_devices=1 gb=1 memory_backed=1 queue_mode=2 irqmode=0
             dd if=/dev/urandom of={DISK} bs=1M count={AREA} oflag=direct status=none"
        ))?;
    }
    let addresses = Driver::OF_STORAGE.map(|driver| Some((driver.transport()?, driver.address(2))));
    let listen: Vec<_> = addresses
        .iter()
        .flatten()
        .map(|(transport, address)| (*transport, address.as_str()))
        .collect();
    nvme::serve_disk(server, DISK, &listen)?;
    nfs::serve(server)?;
    let fill = |vm: &Vm, file: &str| {
        vm.sh(&format!(
            "dd if=/dev/urandom of={file} bs=1M count={AREA} status=none"
        ))
    };
    fill(server, &format!("{}/file", nfs::FOLDER))?;
    fill(client, OWN_FILE)?;
    Ok(())
}

/// Takes all of it back.
pub fn end(machines: &Machines) -> Result<()> {
    let (client, server) = machines.cluster.two()?;
    nvme::end(server)?;
    nfs::end(server)?;
    for vm in [client, server] {
        vm.sh(&format!("rm -f {OWN_FILE}; modprobe -r null_blk"))?;
    }
    Ok(())
}

/// What is done with each job: it is [`timed`], or it is [`counted`].
type Measure = fn(&Machines, &Plan, (Driver, &str), &Job, &mut Run) -> Result<()>;

/// A round of the jobs of all candidates, as far as their part is wanted.
pub fn round(
    machines: &Machines,
    plan: &Plan,
    (wanted, measure): (impl Fn(&str) -> bool, Measure),
    run: &mut Run,
) -> Result<()> {
    for (part, prefix) in PARTS.into_iter().zip(["nvme_", "nfs_"]) {
        if !wanted(part) {
            continue;
        }
        let jobs = JOBS.iter().filter(|job| job.test.starts_with(prefix));
        for driver in Driver::OF_STORAGE {
            check_interrupted()?;
            run.progress(&format!("{part}: {}", driver.name()));
            let use_it = |path: &str, run: &mut Run| {
                for job in jobs.clone() {
                    if let Err(error) = measure(machines, plan, (driver, path), job, run) {
                        run.miss(&format!("{} {}", driver.name(), job.test), &error);
                    }
                }
            };
            let used = match prefix {
                "nvme_" => with_disk(machines, driver, |path| use_it(path, run)),
                _ => with_file(machines, driver, |path| use_it(path, run)),
            };
            if let Err(error) = used {
                run.miss(&format!("{part} {}", driver.name()), &error);
            }
        }
    }
    Ok(())
}

/// Uses a candidate's disk. One at a time: the kernel takes several ways to a disk for one disk.
fn with_disk(machines: &Machines, driver: Driver, use_it: impl FnOnce(&str)) -> Result<()> {
    let client = machines.client()?;
    let Some(transport) = driver.transport() else {
        use_it(DISK);
        return Ok(());
    };
    let connected = nvme::connect_to(client, transport, &driver.address(2));
    if let Ok(disk) = connected {
        use_it(disk);
    }
    let ended = nvme::disconnect(client);
    connected.map(|_| ()).and(ended)
}

/// Uses a candidate's file. One at a time: the client takes several addresses for one server.
fn with_file(machines: &Machines, driver: Driver, use_it: impl FnOnce(&str)) -> Result<()> {
    let client = machines.client()?;
    let Some(transport) = driver.transport() else {
        use_it(OWN_FILE);
        return Ok(());
    };
    let at = nfs::mount_from(client, (transport, &driver.address(2)), VERSION)?;
    use_it(&format!("{at}/file"));
    nfs::unmount(client, &at)
}

/// Processor time so far, in nanoseconds, of what runs the client, the server and the devices.
fn processors(machines: &Machines) -> Result<[u64; 3]> {
    let (client, server) = machines.cluster.two()?;
    let devices = [1, 2].map(|vm| machines.cluster.device_pid(vm).map_or(0, processor_time));
    Ok([
        processor_time(client.pid()),
        processor_time(server.pid()),
        devices.iter().sum(),
    ])
}

/// What the devices count, for a request.
const COUNTERS: [(&str, &str); 16] = [
    ("send_doorbells", "/mmio/sq_doorbell/writes"),
    ("receive_doorbells", "/mmio/rq_doorbell/writes"),
    ("completion_doorbells", "/mmio/cq_doorbell/writes"),
    ("register_writes", "/engine/register_writes"),
    ("interrupts", "/interrupts/total"),
    ("events", "/engine/events"),
    ("dma_reads", "/dma/reads"),
    ("dma_writes", "/dma/writes"),
    ("packets_sent", "/engine/tx_packets"),
    ("packets_received", "/engine/rx_packets"),
    ("completions", "/engine/completions"),
    ("sq_registrations", "/engine/sq_registrations"),
    ("retransmissions", "/engine/retransmissions"),
    ("ack_timeouts", "/engine/ack_timeouts"),
    ("shortcut_drops", "/shortcuts/tx_drops"),
    ("uplink_drops", "/uplink/tx_drops"),
];

/// Times a job, and tells what a request of it takes beside time.
pub fn timed(
    machines: &Machines,
    plan: &Plan,
    (driver, path): (Driver, &str),
    job: &Job,
    run: &mut Run,
) -> Result<()> {
    let client = machines.client()?;
    let counters = || -> Result<[Value; 2]> {
        Ok([machines.cluster.counters(1)?, machines.cluster.counters(2)?])
    };
    // Some requests at first, by which everything is found out that is found out once; and so that what fio
    // itself takes can be told from what a request takes.
    let mut seen = Vec::new();
    for length in [
        Length::Requests(4 * job.depth),
        Length::Milliseconds(plan.storage_milliseconds),
    ] {
        let before = (processors(machines)?, counters()?);
        let done = job.done(&client.sh_in(&job.fio(path, &length), PATIENCE)?)?;
        let after = (processors(machines)?, counters()?);
        let used: [f64; 3] =
            std::array::from_fn(|at| after.0[at].saturating_sub(before.0[at]) as f64);
        let counted: [Value; 2] = std::array::from_fn(|at| difference(&after.1[at], &before.1[at]));
        seen.push((done, used, counted));
    }
    let [few, many] = &seen[..] else {
        return Ok(());
    };
    let (unit, value) = job.value(many.0);
    run.results.add(driver, job.test, job.key(), unit, value);
    println!(
        "      {} {}: {} {}",
        driver.name(),
        job.words(),
        short(value),
        unit.0
    );
    let more = many.0.requests.saturating_sub(few.0.requests) as f64;
    ensure!(more > 0.0, "too few requests to tell what one takes");
    let mut add = |name: &str, unit: &'static str, value: f64| {
        let test = format!("{}_{name}", job.test);
        run.results
            .add(driver, &test, job.key(), (unit, false), value / more);
    };
    let names = ["processor_client", "processor_server", "processor_devices"];
    for (at, name) in names.into_iter().enumerate() {
        // Beside Ferrite the devices have nothing to do, and the server has not for the client's own disk.
        let has = match at {
            0 => true,
            1 => driver != Driver::Local,
            _ => driver == Driver::Ferrite,
        };
        if has {
            add(name, "us/request", (many.1[at] - few.1[at]).max(0.0) / 1e3);
        }
    }
    if driver == Driver::Ferrite {
        for (vm, end) in ["client", "server"].into_iter().enumerate() {
            for (name, path) in COUNTERS {
                let of = |counted: &[Value; 2]| counted[vm].pointer(path).and_then(Value::as_f64);
                if let (Some(few), Some(many)) = (of(&few.2), of(&many.2)) {
                    add(&format!("{name}_{end}"), "/request", (many - few).max(0.0));
                }
            }
        }
    }
    Ok(())
}

/// Waits on the server, counting, until it is told to end.
const SPAN: &str = "/run/span";

/// Counts the instructions of both machines for a request.
pub fn counted(
    machines: &Machines,
    plan: &Plan,
    (driver, path): (Driver, &str),
    job: &Job,
    run: &mut Run,
) -> Result<()> {
    let (client, server) = machines.cluster.two()?;
    let requests = if job.is_small() {
        plan.storage_requests
    } else {
        plan.storage_requests / 8
    };
    server.sh(&format!("[ -p {SPAN} ] || mkfifo {SPAN}"))?;
    client.sh_in(&job.fio(path, &Length::Requests(4 * job.depth)), PATIENCE)?;
    let mut seen = Vec::new();
    // What fio takes to begin and to end is the same both times.
    for requests in [requests / 4, requests] {
        let before = [machines.counted(1)?, machines.counted(2)?];
        let (begun, _) = machines.spans(2)?;
        let there = server.spawn(
            &format!("exec /ferrite/bin/verbs-bench count cat {SPAN}"),
            PATIENCE,
        )?;
        while machines.spans(2)?.0 == begun {
            ensure!(there.ended().is_none(), "the server does not count");
            std::thread::sleep(Duration::from_millis(5));
        }
        let fio = job.fio(path, &Length::Requests(requests));
        let said = client.sh_in(
            &format!("exec /ferrite/bin/verbs-bench count {fio}"),
            PATIENCE,
        );
        server.sh(&format!(": >{SPAN}"))?;
        there.success()?;
        let done = job.done(&said?)?;
        let after = [machines.counted(1)?, machines.counted(2)?];
        seen.push((done.requests, [after[0] - before[0], after[1] - before[1]]));
    }
    let [few, many] = &seen[..] else {
        return Ok(());
    };
    let more = many.0.saturating_sub(few.0) as f64;
    ensure!(more > 0.0, "too few requests to tell what one takes");
    let [here, there] = [0, 1].map(|vm| many.1[vm] - few.1[vm]);
    let mut add = |name: &str, value: u64| {
        run.results.add(
            driver,
            &format!("{}_{name}", job.test),
            job.key(),
            ("/request", false),
            value as f64 / more,
        );
    };
    println!(
        "      {} {}: {} instructions",
        driver.name(),
        job.words(),
        short((here.user + here.kernel) as f64 / more)
    );
    add("instructions", here.user + here.kernel);
    add("instructions_user", here.user);
    add("instructions_modules", here.modules);
    if driver != Driver::Local {
        add("instructions_there", there.user + there.kernel);
        add("instructions_modules_there", there.modules);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_time_are_those_of_the_jobs_direction() {
        let said = r#"fio: a note
            {"jobs": [{"error": 0,
              "read": {"total_ios": 2000, "runtime": 500},
              "write": {"total_ios": 30, "runtime": 1000}}]}"#;
        let job = |test| JOBS.iter().find(|job| job.test == test).expect("a job");
        let small = job("nvme_randread");
        let done = small.done(said).expect("read");
        assert_eq!(small.value(done), (("requests/s", true), 4000.0));
        let large = job("nfs_write");
        let done = large.done(said).expect("written");
        assert_eq!(large.value(done), (("MiB/s", true), 3.75));
        assert!(small.done(&said.replace("2000", "0")).is_err());
        assert!(small
            .done(&said.replace(r#""error": 0"#, r#""error": 5"#))
            .is_err());
        assert!(small.done("nothing").is_err());
    }

    #[test]
    fn a_job_lasts_some_time_or_some_requests() {
        let job = &JOBS[0];
        let timed = job.fio("/dev/x", &Length::Milliseconds(700));
        assert!(timed.contains("--runtime=700ms") && timed.contains("--filename=/dev/x"));
        let counted = job.fio("/dev/x", &Length::Requests(10));
        assert!(counted.contains("--io_size=40960") && !counted.contains("--time_based"));
    }

    #[test]
    fn every_job_has_a_name_and_words_of_its_own() {
        for (n, one) in JOBS.iter().enumerate() {
            for other in &JOBS[n + 1..] {
                assert_ne!(one.test, other.test);
                assert_ne!(one.words(), other.words());
            }
        }
    }
}
