// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make bench`: Ferrite beside rxe and siw, in the same two VMs, in one run.
//!
//! Times are taken in VMs that nothing else is done to. Counts are taken in a second pair of VMs,
//! because QEMU's counting slows a guest down, most of all where the guest does most of the work.

mod adapter;
mod control;
mod functions;
mod goals;
mod interface;
mod limits;
mod loopback;
mod machines;
mod moderation;
mod page;
pub(crate) mod plot;
pub(crate) mod processes;
mod profile;
mod results;
mod scale;
mod split;
mod storage;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{json, Value};

use crate::artifacts;
use crate::cluster::RunDir;
use crate::kernel::{self, Kernel};
use crate::process::check_interrupted;
use crate::shell::build;
use crate::step::say;
use crate::vm::{kvm_usable, EMULATED_CPU};
use crate::PROJECT;
use goals::Bar;
use machines::{Counting, Driver, Line, Machines, Serving, Size};
use results::{human, Record, Results};

/// Options of `bench`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Rounds of every measurement; a few if nothing is said.
    pub rounds: Option<usize>,
    /// Fewer sizes, less time.
    pub quick: bool,
    /// Build first.
    pub build: bool,
    /// Look at what the device's time goes into.
    pub profile: bool,
    /// Only parts whose names contain one of these, with `|` between them: `time`, `rates`, `span`, `moderation`,
    /// `count`, [`control::PARTS`], [`storage::PARTS`], [`scale::PARTS`], [`split::PARTS`], [`interface::PARTS`],
    /// [`adapter::PART`], [`loopback::PART`], `handlers`, `profile`. What the others have measured before is kept.
    pub only: Option<String>,
    /// Measure nothing: make the page of what was measured before.
    pub page: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rounds: None,
            quick: false,
            build: true,
            profile: false,
            only: None,
            page: false,
        }
    }
}

impl Options {
    /// Whether a part is to be measured.
    fn wants(&self, part: &str) -> bool {
        let Some(only) = &self.only else { return true };
        only.split('|').any(|word| part.contains(word))
    }
}

/// Queue pairs that a program takes long to connect, over which the software drivers are measured once.
const MANY_QPS: u64 = 1000;

/// What is measured.
struct Plan {
    rounds: usize,
    milliseconds: u64,
    sizes: Vec<u64>,
    qps: Vec<u64>,
    count_rounds: usize,
    count_sizes: Vec<(u64, u64)>,
    scale_qps: Vec<u64>,
    /// Queue pairs that all have long messages to send.
    stream_qps: Vec<u64>,
    scale_regions: Vec<u64>,
    /// Completion handlers.
    handlers: Vec<u64>,
    /// Messages under way whose completions are moderated.
    loads: Vec<u64>,
    /// Messages of a counted span.
    scale_messages: u64,
    /// Completion queues, regions and queue pairs whose memory is looked at.
    objects: [u64; 3],
    /// How long a disk or a file is used.
    storage_milliseconds: u64,
    /// Registrations and connections go through so much of a guest's kernel that a short time is spent
    /// translating it.
    control_milliseconds: u64,
    /// Requests of 4 KiB whose instructions are counted; of large ones an eighth.
    storage_requests: u64,
    /// Registrations and connections whose instructions are counted.
    control_counts: [u64; 2],
}

impl Plan {
    fn new(options: &Options) -> Self {
        let all: Vec<u64> = vec![
            2,
            8,
            32,
            64,
            256,
            1 << 10,
            4 << 10,
            16 << 10,
            64 << 10,
            256 << 10,
            1 << 20,
            4 << 20,
            8 << 20,
        ];
        if options.quick {
            return Self {
                rounds: options.rounds.unwrap_or(2),
                milliseconds: 120,
                sizes: vec![64, 4 << 10, 64 << 10, 1 << 20],
                qps: vec![1, 16, MANY_QPS],
                count_rounds: 1,
                count_sizes: vec![(64, 1024)],
                scale_qps: vec![1, 100, 10_000],
                stream_qps: vec![256, 1024],
                scale_regions: vec![10, 1000],
                handlers: vec![1, 2, 4, 8],
                loads: vec![1, 4, 16, 64, 256],
                scale_messages: 4096,
                objects: [1000, 10_000, 500],
                storage_milliseconds: 1000,
                control_milliseconds: 1000,
                storage_requests: 2048,
                control_counts: [128, 16],
            };
        }
        Self {
            rounds: options.rounds.unwrap_or(3),
            milliseconds: 150,
            sizes: all,
            qps: goals::RATES.to_vec(),
            count_rounds: 3,
            count_sizes: vec![(64, 4096), (4 << 10, 1024), (64 << 10, 256)],
            scale_qps: vec![1, 10, 100, 1000, 10_000],
            stream_qps: vec![1, 16, 256, 1024],
            scale_regions: vec![10, 1000, 100_000, 1_000_000],
            handlers: vec![1, 2, 4, 8],
            loads: vec![1, 2, 4, 8, 16, 32, 64, 128, 256],
            scale_messages: 16_384,
            objects: [4000, 30_000, 2000],
            storage_milliseconds: 2000,
            control_milliseconds: 1500,
            storage_requests: 8192,
            control_counts: [512, 64],
        }
    }
}

/// What goes wrong with one measurement does not end the others; it is written down.
struct Run {
    results: Results,
    missing: Vec<String>,
    /// What a driver could not do or took too long for: it is not tried again.
    given_up: Vec<(Driver, String)>,
    start: Instant,
}

impl Run {
    fn miss(&mut self, what: &str, error: &anyhow::Error) {
        let first = format!("{error:#}");
        let first = first.lines().take(3).collect::<Vec<_>>().join(" / ");
        println!("      no result for {what}: {first}");
        self.missing.push(format!("{what}: {first}"));
    }

    fn progress(&self, what: &str) {
        say(&format!("[{:4} s] {what}", self.start.elapsed().as_secs()));
    }
}

/// Measures everything and writes it down.
pub fn run(options: &Options) -> Result<()> {
    if options.page {
        return page_again(&bench_folder());
    }
    let plan = Plan::new(options);
    let wanted = |part: &str| options.wants(part);
    let kernel = kernel::stock()?;
    crate::guest::image()?;
    let modules = if options.build {
        build(&kernel)?
    } else {
        artifacts::modules(&artifacts::module_dir(&kernel))?
    };
    let folder = RunDir::new()?;
    let boot = |label: &str, (cpus, memory_mib), counting| {
        let size = Size { cpus, memory_mib };
        Machines::boot(&folder, &kernel, &modules, label, size, counting)
    };
    let mut run = Run {
        results: Results::default(),
        missing: Vec::new(),
        given_up: Vec::new(),
        start: Instant::now(),
    };
    let mut notes = Vec::new();
    let mut profile_text = None;
    let [time_control, count_control] = control::PARTS.map(wanted);
    let of_storage = storage::PARTS.into_iter().any(wanted);
    let timed = ["time", "rates", "span", "moderation", "profile"];
    if timed.into_iter().any(wanted) || time_control || of_storage {
        run.progress("booting the VMs that are timed");
        let counting = Counting::No;
        let machines = boot("time", (1, 2048), counting)?;
        let mut serving = Serving::all(&machines)?;
        if wanted("time") {
            idle(&machines, &mut run)?;
            for round in 1..=plan.rounds {
                memcpy_round(&mut run);
                time_round(&machines, &mut serving, &plan, round, &mut run)?;
            }
        }
        for round in 1..=plan.rounds {
            if wanted("rates") {
                rates_round(&mut serving, &plan, round, &mut run)?;
            }
            if wanted("span") {
                run.progress(&format!("span, round {round} of {}", plan.rounds));
                span_round(&mut serving, &plan, &mut run);
            }
        }
        for round in 1..=plan.rounds {
            if wanted("moderation") {
                run.progress(&format!("moderation, round {round} of {}", plan.rounds));
                moderation::round(&machines, &mut serving, &plan, &mut run)?;
                moderation::disk_round(&machines, &mut run)?;
            }
        }
        if time_control {
            for round in 1..=plan.rounds {
                run.progress(&format!("control, round {round} of {}", plan.rounds));
                control::time_round(&mut serving, &plan, &mut run)?;
            }
            control::split_round(&machines, &mut serving, &mut run)?;
        }
        if of_storage && served(&machines, &mut run) {
            for round in 1..=plan.rounds {
                run.progress(&format!("storage, round {round} of {}", plan.rounds));
                storage::round(&machines, &plan, (wanted, storage::timed), &mut run)?;
            }
            if let Err(error) = storage::end(&machines) {
                run.miss("the end of disks and files", &error);
            }
        }
        if options.profile && wanted("profile") {
            run.progress("where the device's time goes");
            match profile::run(&machines) {
                Ok(text) => profile_text = Some(text),
                Err(error) => run.miss("profile", &error),
            }
        }
        report_kernels(&machines, &mut run);
    }
    let scaled = scale::PARTS.into_iter().any(wanted);
    if scaled || count_control || of_storage {
        run.progress("booting the VMs with many objects, and disks that are counted");
        let counting = if options.profile && count_control {
            Counting::Functions
        } else {
            Counting::Instructions
        };
        let machines = boot("scale", (1, 4096), counting)?;
        let mut serving = Serving::all(&machines)?;
        if scaled {
            notes = scale::run(&machines, &mut serving, &plan, wanted, &mut run)?;
        }
        let of_storage = of_storage && served(&machines, &mut run);
        for round in 1..=plan.count_rounds {
            if count_control {
                run.progress(&format!("control counts, round {round}"));
                let text = control::count_round(&machines, &mut serving, &plan, &mut run)?;
                if !text.is_empty() {
                    profile_text.get_or_insert_with(String::new).push_str(&text);
                }
            }
            if of_storage {
                run.progress(&format!("storage counts, round {round}"));
                storage::round(&machines, &plan, (wanted, storage::counted), &mut run)?;
            }
        }
        report_kernels(&machines, &mut run);
    }
    if wanted("handlers") {
        run.progress("booting the VMs with many handlers");
        let most = plan.handlers.iter().copied().max().unwrap_or(1) as usize;
        let counting = Counting::Instructions;
        let machines = boot("handlers", (most, 1536), counting)?;
        let mut serving = Serving::all(&machines)?;
        scale::handlers(&machines, &mut serving, &plan, &mut run)?;
        report_kernels(&machines, &mut run);
    }
    if wanted("count") {
        run.progress("booting the VMs whose instructions are counted");
        let counting = Counting::All;
        let machines = boot("count", (1, 1024), counting)?;
        let mut serving = Serving::all(&machines)?;
        for round in 1..=plan.count_rounds {
            run.progress(&format!("counts, round {round} of {}", plan.count_rounds));
            count_round(&machines, &mut serving, &plan, &mut run)?;
        }
        report_kernels(&machines, &mut run);
    }
    for (part, rounds) in split::PARTS
        .into_iter()
        .zip([plan.rounds, plan.count_rounds])
    {
        if !wanted(part) {
            continue;
        }
        run.progress("booting a host, an I/O unit and a machine on its LAN");
        let is_counted = part == "split-counts";
        let machines = split::Machines::boot(&folder, &kernel, &modules, is_counted)?;
        for round in 1..=rounds {
            run.progress(&format!("{part}, round {round} of {rounds}"));
            if is_counted {
                split::count_round(&machines, &mut run)?;
            } else {
                split::time_round(&machines, &mut run)?;
            }
        }
        for finding in machines.findings() {
            println!("      kernel report: {finding}");
            run.missing.push(format!("kernel report: {finding}"));
        }
    }
    for (part, rounds) in interface::PARTS
        .into_iter()
        .zip([plan.rounds, plan.count_rounds])
    {
        if !wanted(part) {
            continue;
        }
        run.progress("booting two machines with two network cards");
        let is_counted = part == "interface-counts";
        let machines = interface::Machines::boot(&folder, &kernel, &modules, is_counted)?;
        for round in 1..=rounds {
            run.progress(&format!("{part}, round {round} of {rounds}"));
            if is_counted {
                interface::count_round(&machines, &mut run)?;
            } else {
                interface::time_round(&machines, &mut run)?;
            }
        }
        for finding in machines.findings() {
            println!("      kernel report: {finding}");
            run.missing.push(format!("kernel report: {finding}"));
        }
    }
    if wanted(adapter::PART) {
        run.progress("booting two machines with a function each of one device");
        let machines = adapter::Machines::boot(&folder, &kernel, &modules)?;
        for round in 1..=plan.rounds {
            run.progress(&format!("adapter, round {round} of {}", plan.rounds));
            adapter::round(&machines, &plan, &mut run)?;
        }
        for finding in machines.findings() {
            println!("      kernel report: {finding}");
            run.missing.push(format!("kernel report: {finding}"));
        }
    }
    if wanted(loopback::PART) {
        run.progress("booting a machine that talks to itself");
        let machine = loopback::Machine::boot(&folder, &kernel, &modules)?;
        for round in 1..=plan.rounds {
            run.progress(&format!("loopback, round {round} of {}", plan.rounds));
            loopback::round(&machine, &plan, &mut run)?;
        }
        for finding in machine.findings() {
            println!("      kernel report: {finding}");
            run.missing.push(format!("kernel report: {finding}"));
        }
    }
    write_down(options, &plan, &kernel, &mut run, notes, profile_text)
}

/// Offers disks and files; whether that went well.
fn served(machines: &Machines, run: &mut Run) -> bool {
    let served = storage::serve(machines);
    if let Err(error) = &served {
        run.miss("disks and files", error);
    }
    served.is_ok()
}

fn report_kernels(machines: &Machines, run: &mut Run) {
    for finding in machines.cluster.new_findings() {
        println!("      kernel report: {finding}");
        run.missing.push(format!("kernel report: {finding}"));
    }
}

/// Processor time of device processes while nothing happens.
fn idle(machines: &Machines, run: &mut Run) -> Result<()> {
    let pids: Vec<u32> = [1, 2]
        .iter()
        .filter_map(|vm| machines.cluster.device_pid(*vm))
        .collect();
    let before: Vec<_> = pids
        .iter()
        .map(|pid| processes::usage(*pid))
        .collect::<Result<_>>()?;
    let time = Duration::from_secs(5);
    std::thread::sleep(time);
    for (pid, before) in pids.iter().zip(before) {
        let used = processes::usage(*pid)? - before;
        let share = (used.user + used.system) / time.as_secs_f64() * 100.0;
        run.results.add(
            Driver::Ferrite,
            "idle_device_cpu",
            (0, 1),
            ("% of a core", false),
            share,
        );
        run.results.add(
            Driver::Ferrite,
            "idle_device_wakeups",
            (0, 1),
            ("/s", false),
            used.waits as f64 / time.as_secs_f64(),
        );
    }
    Ok(())
}

/// A test's unit, whether more of it is better, and a line's value.
fn value(line: &Line, test: &str) -> (&'static str, bool, f64) {
    let each = line.seconds / line.count as f64;
    match test.rsplit('_').next() {
        Some("bw") => ("MiB/s", true, line.size as f64 / each / f64::from(1 << 20)),
        // There and back is two messages; a read is one.
        Some("lat") if test.starts_with("read") => ("us", false, each * 1e6),
        Some("lat" | "event") => ("us", false, each * 1e6 / 2.0),
        _ => ("/s", true, 1.0 / each),
    }
}

/// Runs a group of tests in all ways that a driver is measured in; a sample for each test is that
/// of its best way.
fn time_group(
    serving: &mut Serving<'_>,
    driver: Driver,
    group: &Group,
    milliseconds: u64,
    run: &mut Run,
) -> Result<()> {
    let ways = match group.way {
        Some(way) => vec![way],
        None => driver.waits().to_vec(),
    };
    let mut best: Vec<(Line, String, (&'static str, bool, f64))> = Vec::new();
    for way in ways {
        check_interrupted()?;
        if run.given_up.contains(&(driver, group.what.clone())) {
            break;
        }
        let arguments = format!("--ms {milliseconds} --wait {way} {}", group.arguments);
        let lines = match serving.measure(driver, &arguments, Duration::from_secs(200)) {
            Ok(lines) => lines,
            Err(error) => {
                run.miss(&format!("{} {} ({way})", driver.name(), group.what), &error);
                if group.is_tried_once {
                    run.given_up.push((driver, group.what.clone()));
                }
                continue;
            }
        };
        for line in lines {
            let test = match (group.rename, line.test.as_str()) {
                (Some(rename), test) => {
                    format!("{}_{rename}", test.split('_').next().unwrap_or(test))
                }
                (None, "reg") => "registrations".to_owned(),
                (None, "connect") => "connections".to_owned(),
                (None, test) => test.to_owned(),
            };
            let new = value(&line, &test);
            let same = |old: &&mut (Line, String, (&'static str, bool, f64))| {
                old.1 == test && old.0.size == line.size
            };
            match best.iter_mut().find(same) {
                Some(old) if (new.2 > old.2 .2) == new.1 => old.2 = new,
                Some(_) => {}
                None => best.push((line, test, new)),
            }
        }
    }
    for (line, test, (unit, higher, value)) in best {
        let key = (line.size, line.qps.max(1));
        run.results.add(driver, &test, key, (unit, higher), value);
    }
    Ok(())
}

/// Tests that share a connection.
struct Group {
    what: String,
    arguments: String,
    /// What the second half of the tests' names becomes.
    rename: Option<&'static str>,
    /// The only way to wait that makes sense.
    way: Option<&'static str>,
    /// Whether a driver that fails is left out from then on.
    is_tried_once: bool,
}

/// Has what this machine copies beside the figures that are compared with it.
fn memcpy_round(run: &mut Run) {
    let (same, many) = processes::memcpy_speed();
    let mib = 1 << 20;
    for (test, speed) in [("memcpy_same", same), ("memcpy_many", many)] {
        let (key, unit) = ((mib, 1), ("MiB/s", true));
        let value = speed / mib as f64;
        run.results.add(Driver::Memcpy, test, key, unit, value);
    }
}

/// Small messages over more and more queue pairs, of all drivers. So many that it takes long to connect them
/// are of the software drivers in the first round only, and for each that fails it is the last time.
fn rates_round(serving: &mut Serving<'_>, plan: &Plan, round: usize, run: &mut Run) -> Result<()> {
    for qps in &plan.qps {
        let is_many = *qps >= MANY_QPS;
        for driver in Driver::ALL {
            if is_many && round > 1 && driver != Driver::Ferrite {
                continue;
            }
            let group = Group {
                what: format!("64 B messages, {qps} QPs"),
                arguments: format!(
                    "--qps {qps}{} send_bw:64 write_bw:64",
                    if is_many { clones(driver) } else { "" }
                ),
                rename: Some("rate"),
                way: None,
                is_tried_once: is_many,
            };
            run.progress(&format!(
                "round {round} of {}: {}: {}",
                plan.rounds,
                group.what,
                driver.name()
            ));
            time_group(serving, driver, &group, plan.milliseconds, run)?;
        }
    }
    Ok(())
}

/// How many queue pairs of a driver are connected: without rdma_cm where that can be done.
fn clones(driver: Driver) -> &'static str {
    match driver {
        Driver::Siw => "",
        _ => " --clone",
    }
}

/// Writes of 1 MiB through so much memory that no cache holds it, beside memcpy through as much just before.
fn span_round(serving: &mut Serving<'_>, plan: &Plan, run: &mut Run) {
    let memcpy = processes::memcpy_speed().1;
    let size: u64 = 1 << 20;
    let arguments = format!(
        "--ms {} --span {} write_span:{size}",
        // The machines have less than a processor each.
        4 * plan.milliseconds,
        processes::MANY
    );
    let measured = serving
        .measure(Driver::Ferrite, &arguments, Duration::from_secs(120))
        .and_then(|lines| lines.into_iter().next().context("no result"));
    match measured {
        Ok(line) => {
            let speed = (line.count * size) as f64 / line.seconds;
            for (driver, speed) in [(Driver::Ferrite, speed), (Driver::Memcpy, memcpy)] {
                let unit = ("MiB/s", true);
                let value = speed / size as f64;
                run.results
                    .add(driver, "span_write", (size, 1), unit, value);
            }
        }
        Err(error) => run.miss("writes through many MiB", &error),
    }
}

/// One round of all timed measurements of all drivers.
fn time_round<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    round: usize,
    run: &mut Run,
) -> Result<()> {
    let mut groups = Vec::new();
    for measure in ["lat", "bw"] {
        let mut tests = String::new();
        for kind in ["send", "write", "read"] {
            for size in &plan.sizes {
                tests.push_str(&format!(" {kind}_{measure}:{size}"));
            }
        }
        groups.push(Group {
            what: format!("all sizes, {measure}"),
            arguments: tests,
            rename: None,
            way: None,
            is_tried_once: false,
        });
    }
    groups.push(Group {
        what: "latency by events".into(),
        arguments: "send_lat:64".into(),
        rename: Some("event"),
        way: Some("event"),
        is_tried_once: false,
    });
    for group in &groups {
        for driver in Driver::ALL {
            run.progress(&format!(
                "round {round} of {}: {}: {}",
                plan.rounds,
                group.what,
                driver.name()
            ));
            time_group(serving, driver, group, plan.milliseconds, run)?;
        }
    }
    for driver in Driver::ALL {
        check_interrupted()?;
        run.progress(&format!(
            "round {round} of {}: perftest: {}",
            plan.rounds,
            driver.name()
        ));
        for (program, size, iterations) in [("ib_send_lat", 64, 300), ("ib_write_bw", 65_536, 100)]
        {
            match machines.perftest(driver, program, size, iterations) {
                Ok(value) => {
                    let (unit, higher) = if program.ends_with("bw") {
                        ("MiB/s", true)
                    } else {
                        ("us", false)
                    };
                    let test = format!("perftest_{program}");
                    run.results
                        .add(driver, &test, (size, 1), (unit, higher), value);
                }
                Err(error) => run.miss(&format!("{} {program}", driver.name()), &error),
            }
        }
    }
    Ok(())
}

/// One round of all counts.
fn count_round<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    run: &mut Run,
) -> Result<()> {
    for (size, messages) in &plan.count_sizes {
        for kind in ["send", "write", "read"] {
            for driver in Driver::ALL {
                check_interrupted()?;
                let what = format!("{} {kind} counts, {}", driver.name(), human(*size));
                let counts = Counts {
                    name: kind,
                    test: kind,
                    size: *size,
                    count: *messages,
                };
                if let Err(error) = count_one(machines, serving, driver, &counts, run) {
                    run.miss(&what, &error);
                }
            }
        }
    }
    Ok(())
}

/// What is counted.
struct Counts {
    /// In results.
    name: &'static str,
    /// What `verbs-bench` calls it.
    test: &'static str,
    /// Bytes of one.
    size: u64,
    /// How many.
    count: u64,
}

fn count_one<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    driver: Driver,
    counts: &Counts,
    run: &mut Run,
) -> Result<()> {
    let (test, size, messages) = (counts.test, counts.size, counts.count);
    // What is no message has a name for many.
    let unit = if counts.name == test {
        "/message"
    } else {
        "each"
    };
    let mut add = |name: &str, value: f64| {
        run.results.add(
            driver,
            &format!("{}_{name}", counts.name),
            (size, 1),
            (unit, false),
            value,
        );
    };
    let mut device: Vec<Value> = Vec::new();
    // Twice, with different numbers: what the connection takes is the same both times, so that
    // the difference belongs to the messages.
    for messages in [messages / 4, messages] {
        let before = [machines.counted(1)?, machines.counted(2)?];
        let device_before = machines.cluster.counters(1)?;
        let arguments = format!("--messages {messages} {test}_count:{size}");
        let lines = serving.measure(driver, &arguments, Duration::from_secs(150))?;
        let line = lines.first().context("no result")?;
        let after = [machines.counted(1)?, machines.counted(2)?];
        device.push(difference(&machines.cluster.counters(1)?, &device_before));
        if device.len() == 1 {
            continue;
        }
        let per = |value: u64| value as f64 / line.count as f64;
        let here = after[0] - before[0];
        let there = after[1] - before[1];
        add("instructions", per(here.user + here.kernel));
        add("instructions_user", per(here.user));
        add("interrupts", per(line.interrupts));
        // Only messages are counted at both ends.
        if there.kernel > 0 {
            add("instructions_there", per(there.user + there.kernel));
            add("interrupts_there", per(line.interrupts_there));
        }
        if machines.counting == Counting::All {
            add("register_writes", per(here.writes));
            add("register_writes_there", per(there.writes));
            add("register_reads", per(here.reads));
        }
    }
    if driver == Driver::Ferrite {
        let messages = (messages - messages / 4) as f64;
        let of = |path: &str| {
            let value = |index: usize| device[index].pointer(path).and_then(Value::as_f64);
            Some((value(1)? - value(0)?) / messages)
        };
        for (name, path) in [
            ("device_dma_reads", "/dma/reads"),
            ("device_dma_writes", "/dma/writes"),
            ("device_interrupts", "/interrupts/total"),
            ("device_send_doorbells", "/mmio/sq_doorbell/writes"),
            ("device_completion_doorbells", "/mmio/cq_doorbell/writes"),
            ("device_packets_sent", "/engine/tx_packets"),
            ("device_packets_received", "/engine/rx_packets"),
            ("device_register_writes", "/engine/register_writes"),
            ("device_commands", "/engine/commands"),
            ("device_control_doorbells", "/engine/control_doorbells"),
        ] {
            if let Some(value) = of(path) {
                add(name, value);
            }
        }
    }
    Ok(())
}

/// Numbers of a document less those of an earlier one.
fn difference(after: &Value, before: &Value) -> Value {
    match (after, before) {
        (Value::Object(after), Value::Object(before)) => Value::Object(
            after
                .iter()
                .filter_map(|(name, value)| {
                    Some((name.clone(), difference(value, before.get(name)?)))
                })
                .collect(),
        ),
        _ => match (after.as_f64(), before.as_f64()) {
            (Some(after), Some(before)) => json!(after - before),
            _ => Value::Null,
        },
    }
}

fn output(program: &str, arguments: &[&str]) -> String {
    let out = Command::new(program).args(arguments).output();
    let out = out.map(|out| out.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&out);
    text.lines().next().unwrap_or_default().trim().to_owned()
}

fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown processor", |rest| {
            rest.trim_start_matches([' ', '\t', ':'])
        });
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: u64 = memory
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemTotal:")?
                .split_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .unwrap_or(0);
    format!("{model}, {cores} cores, {} GiB", kib >> 20)
}

/// What the tree was when the lab was started; a clone's history may be out of reach in here.
fn commit() -> String {
    match std::env::var("FERRITE_COMMIT") {
        Ok(commit) if !commit.is_empty() => commit,
        _ => "unknown".into(),
    }
}

/// The header of a run of everything, with that of a later run of parts beside it: figures of two
/// runs are in one file, and each says which machine and commit it is of.
fn beside(earlier: &Value, header: Value, only: &str) -> Value {
    let mut both = earlier.clone();
    if let Some(fields) = both.as_object_mut() {
        let line = [
            "date",
            "commit",
            "machine",
            "guests",
            "rounds",
            "quick",
            "load_at_the_end",
        ]
        .map(|name| match header[name].as_str() {
            Some(text) => format!("{name}: {text}"),
            None => format!("{name}: {}", header[name]),
        });
        let list = |name: &str| {
            let lines = header[name].as_array().into_iter().flatten();
            let lines: Vec<&str> = lines.filter_map(Value::as_str).collect();
            match &lines[..] {
                [] => format!("{name}: nothing"),
                some => format!("{name}: {}", some.join("; ")),
            }
        };
        let text = format!(
            "{}; {}; {}",
            line.join("; "),
            list("limits"),
            list("missing")
        );
        fields.insert(format!("measured_again_{only}"), json!(text));
    }
    both
}

/// Where everything is written down.
fn bench_folder() -> PathBuf {
    Path::new(PROJECT).join("bench")
}

/// What an earlier run has written down.
struct Written {
    header: Value,
    records: Vec<Record>,
    profile: Option<String>,
}

impl Written {
    /// From its file; nothing if there is none.
    fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join("results.json");
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text)
                .map(Some)
                .with_context(|| format!("{}", path.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let all: Value = serde_json::from_str(text)?;
        let mut written = Self {
            header: all["header"].clone(),
            records: serde_json::from_value(all["records"].clone())?,
            profile: all["profile"].as_str().map(str::to_owned),
        };
        written.memcpy_of_the_header();
        Ok(written)
    }

    /// Files of before had memcpy in their header, the median of the rounds. It is a record as all others are.
    fn memcpy_of_the_header(&mut self) {
        let Some(fields) = self.header.as_object_mut() else {
            return;
        };
        fields.remove("share_of_memcpy_of_1_mib_writes");
        let mut results = Results::default();
        for (test, field) in [
            ("memcpy_same", "memcpy_same_mebibyte_mib_s"),
            ("memcpy_many", "memcpy_many_mebibytes_mib_s"),
        ] {
            if let Some(speed) = fields.remove(field).as_ref().and_then(Value::as_f64) {
                let (key, unit) = ((1 << 20, 1), ("MiB/s", true));
                results.add(Driver::Memcpy, test, key, unit, speed);
            }
        }
        self.records.append(&mut results.records);
    }

    /// Writes the file and its page; gives what of the goals is reached.
    fn write(self, folder: &Path) -> Result<Vec<Bar>> {
        let results = Results {
            records: self.records,
        };
        let bars = goals::bars(&results);
        let document = json!({
            // Sorted to the top, where it is looked for.
            "_licence": "SPDX-License-Identifier: Apache-2.0 OR MIT",
            "header": self.header,
            "bars": bars,
            "records": results.records,
            "profile": self.profile,
        });
        fs::create_dir_all(folder)?;
        fs::write(
            folder.join("results.json"),
            serde_json::to_string_pretty(&document)? + "\n",
        )?;
        page::write(
            &page::Report {
                header: &self.header,
                results: &results,
                bars: &bars,
                profile: self.profile.as_deref(),
            },
            folder,
        )?;
        Ok(bars)
    }
}

/// Makes the page anew of what was measured before.
fn page_again(folder: &Path) -> Result<()> {
    let written = Written::read(folder)?.context("nothing was measured yet")?;
    say_bars(&written.write(folder)?);
    Ok(())
}

fn say_bars(bars: &[Bar]) {
    for bar in bars {
        let reached = bar.reached.map(|reached| bar.measure.text(reached));
        println!(
            "      {:<12} {:>6} of {:>5}  {}",
            bar.verdict.words().0,
            reached.as_deref().unwrap_or("-"),
            bar.measure.text(bar.wanted),
            bar.what
        );
    }
}

fn write_down(
    options: &Options,
    plan: &Plan,
    kernel: &Kernel,
    run: &mut Run,
    notes: Vec<String>,
    mut profile: Option<String>,
) -> Result<()> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut header = json!({
        "machine": machine(),
        "date": output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
        "commit": commit(),
        "guests": format!(
            "Linux {}, {}, one processor, 2 GiB; {}",
            kernel.release,
            if kvm_usable() { "KVM, -cpu host".to_owned() } else { format!("TCG, -cpu {EMULATED_CPU}") },
            "counts in VMs of their own with 1 GiB and a counting plugin; scale in others with 4 GiB, \
             of which only instructions are counted; handlers in others with a processor for each"
        ),
        "qemu": output("qemu-system-x86_64", &["--version"]),
        "compiler": output("rustc", &["--version"]),
        "wires": "Ferrite: RoCEv2 frames in memory that the two device processes share (a shortcut of the fabric); \
                  rxe and siw: a virtio-net interface each, MTU 9000, the two VMs' QEMUs directly connected by a Unix socket",
        "programs": "tools/verbs-bench for all three (connections by rdma_cm, of which Ferrite and rxe make the first only \
                     where there are 1000, messages up to 64 B inline, \
                     one completion for 16 messages in streams, up to 128 under way); perftest beside it",
        "waiting": Driver::ALL.map(|driver| format!("{}: {}", driver.name(), driver.waits().join(" or "))),
        "rounds": plan.rounds,
        "milliseconds_of_a_measurement": plan.milliseconds,
        "quick": options.quick,
        "seconds_of_the_run": run.start.elapsed().as_secs(),
        "load_at_the_end": load.split_whitespace().take(3).collect::<Vec<_>>().join(" "),
        "limits": notes,
        "missing": run.missing,
    });
    let folder = bench_folder();
    if let Some(earlier) = Written::read(&folder)? {
        run.results.compare(&earlier.records);
        if let Some(only) = &options.only {
            header = beside(&earlier.header, header, only);
            run.results.keep(earlier.records);
            profile = profile.or(earlier.profile);
        }
    }
    let records = std::mem::take(&mut run.results.records);
    let bars = Written {
        header,
        records,
        profile,
    }
    .write(&folder)?;
    say(&format!(
        "done in {} s; bench/results.json, bench/report.html",
        run.start.elapsed().as_secs()
    ));
    say_bars(&bars);
    if !run.missing.is_empty() {
        println!("      without a result: {}", run.missing.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_one_part_leaves_the_header_of_the_others() {
        let earlier = json!({"date": "first", "commit": "a", "rounds": 3});
        let later = json!({"date": "second", "commit": "b", "rounds": 1, "missing": ["x: y"]});
        let both = beside(&earlier, later, "scale");
        assert_eq!(
            (&both["date"], &both["rounds"]),
            (&json!("first"), &json!(3))
        );
        let text = both["measured_again_scale"].as_str().expect("text");
        assert!(text.contains("second") && text.contains("commit: b") && text.contains("x: y"));
        assert!(text.contains("rounds: 1"));
        let third = json!({"date": "third"});
        let all = beside(&both, third, "handlers");
        assert_eq!(all["measured_again_scale"], both["measured_again_scale"]);
        let text = all["measured_again_handlers"].as_str().expect("text");
        assert!(text.contains("third") && text.contains("missing: nothing"));
    }

    #[test]
    fn a_page_is_made_of_the_file_alone() {
        let folder = std::env::temp_dir().join(format!("ferrite-again-{}", std::process::id()));
        assert!(page_again(&folder).is_err());
        fs::create_dir_all(&folder).expect("a folder");
        let mut results = Results::default();
        let key = (1 << 20, 1);
        // Not every reader of numbers reads this one as it was written.
        let odd = 500.566_997_746_382_6;
        results.add(Driver::Ferrite, "write_bw", key, ("MiB/s", true), odd);
        let old = json!({
            "header": {
                "machine": "one", "memcpy_same_mebibyte_mib_s": 1000.0, "share_of_memcpy_of_1_mib_writes": "50.0 %"
            },
            "records": results.records,
            "bars": [{"what": "of another list"}],
            "profile": "all of it",
        });
        fs::write(folder.join("results.json"), old.to_string()).expect("written");
        // What memcpy was is a record now; making the page twice changes nothing.
        let texts = [0, 1].map(|_| {
            page_again(&folder).expect("a page");
            fs::read_to_string(folder.join("results.json")).expect("the file")
        });
        assert_eq!(texts[0], texts[1]);
        let again = Written::parse(&texts[0]).expect("read");
        assert_eq!(
            (again.header, again.records.len()),
            (json!({"machine": "one"}), 2)
        );
        assert_eq!(again.profile.as_deref(), Some("all of it"));
        let all: Value = serde_json::from_str(&texts[0]).expect("read");
        let met = all["bars"].as_array().into_iter().flatten();
        let met: Vec<_> = met.filter(|bar| bar["verdict"] == "met").collect();
        assert_eq!((met.len(), &met[0]["ferrite"]), (1, &json!(odd)));
        assert!((met[0]["reached"].as_f64().expect("a share") - 50.056_699).abs() < 1e-5);
        assert!(folder.join("report.html").exists());
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn siw_makes_all_its_connections_itself() {
        assert_eq!(clones(Driver::Siw), "");
        assert_eq!(clones(Driver::Rxe), clones(Driver::Ferrite));
        assert!(goals::RATES.contains(&MANY_QPS));
    }

    #[test]
    fn parts_are_wanted_by_any_of_their_words() {
        let only = |words: Option<&str>| Options {
            only: words.map(str::to_owned),
            ..Options::default()
        };
        assert!(only(None).wants("count"));
        let some = only(Some("scale|handlers"));
        assert!(scale::PARTS.into_iter().all(|part| some.wants(part)));
        assert!(some.wants("handlers") && !some.wants("time") && !some.wants("moderation"));
        assert!(storage::PARTS.into_iter().all(|part| !some.wants(part)));
        let files = only(Some("nfs|control"));
        assert_eq!(storage::PARTS.map(|part| files.wants(part)), [false, true]);
        assert!(control::PARTS.into_iter().all(|part| files.wants(part)) && !files.wants("count"));
    }
}
