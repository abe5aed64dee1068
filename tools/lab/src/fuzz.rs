// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make fuzz`: the targets of `qemu/fuzz`, by libFuzzer.
//!
//! The programs are built as `cargo fuzz` builds them without a sanitiser, which Debian's compiler
//! can: it instruments code for coverage, but comes without the runtime of the address sanitiser.
//! What runs is Rust with all its checks; the targets have oracles of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure, Context, Result};

use crate::kernel::jobs;
use crate::process::{check_interrupted, lock};
use crate::report::Report;
use crate::step::{log_path, outside, run, run_within, say};
use crate::{OUT, PROJECT};

/// Options of `fuzz`.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How long, for all targets together.
    pub minutes: Option<f64>,
    /// Only this target.
    pub target: Option<String>,
}

/// How long, if nothing else is said.
const MINUTES: f64 = 10.0;
/// And in the long run.
const LONG_MINUTES: f64 = 60.0;
/// The longest input. What a longer one could say is said by several steps of a short one.
const MOST_BYTES: u32 = 1024;
/// Seconds that one input may take (some targets wait for 20 before they say what has not come), and MiB.
const INPUT_SECONDS: u32 = 60;
const MEMORY_MIB: u32 = 2048;
/// What a run may take beyond its time.
const GRACE: Duration = Duration::from_secs(120);

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The compiler counts edges, and tells what is compared with what.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

fn project() -> PathBuf {
    Path::new(PROJECT).join("qemu/fuzz/libfuzzer")
}

fn target_dir() -> PathBuf {
    Path::new(OUT).join("target-fuzz")
}

/// All targets: each has a program.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(project().join("fuzz_targets"))? {
        let path = entry?.path();
        if let Some(name) = path.file_stem() {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn build() -> Result<()> {
    say("building the fuzz targets with instrumentation");
    let log = log_path("fuzz-build");
    let _ = fs::remove_file(&log);
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(project())
        // With a target named, what runs at build time is built without.
        .args(["build", "--release", "--locked", "--target", TRIPLE])
        .env("RUSTFLAGS", FLAGS)
        .env("CARGO_TARGET_DIR", target_dir());
    run(&mut cargo, &log)
}

/// What a run of libFuzzer says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Statistics {
    executions: u64,
    /// What engines were asked for, until a second before the end at the most.
    steps: u64,
    new_inputs: u64,
    edges: u64,
}

fn statistics(text: &str) -> Statistics {
    let mut statistics = Statistics::default();
    for line in text.lines() {
        let number = |name: &str| line.strip_prefix(name)?.trim().parse().ok();
        if let Some(count) = number("stat::number_of_executed_units:") {
            statistics.executions = count;
        } else if let Some(count) = number("stat::engine_steps:") {
            statistics.steps = count;
        } else if let Some(count) = number("stat::new_units_added:") {
            statistics.new_inputs = count;
        } else if let Some((_, rest)) = line.split_once(" cov: ") {
            let edges = rest.split(' ').next().and_then(|word| word.parse().ok());
            statistics.edges = edges.unwrap_or(statistics.edges);
        }
    }
    statistics
}

/// The seed of this run: a fresh one, or what `FERRITE_SEED` says.
fn seed() -> Result<u32> {
    if let Ok(text) = std::env::var("FERRITE_SEED") {
        return text.parse().context("FERRITE_SEED is a number of 32 bits");
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    // libFuzzer takes 0 for none.
    Ok((now.as_micros() as u32).max(1))
}

/// Runs one target for so long; says what came of it, and how many steps engines did.
fn try_target(name: &str, time: Duration, seed: u32) -> Result<(String, u64)> {
    let folder = Path::new(OUT).join("fuzz").join(name);
    let (corpus, findings) = (folder.join("corpus"), folder.join("findings"));
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&findings)?;
    let log = log_path(&format!("fuzz-{name}"));
    let _ = fs::remove_file(&log);
    let program = target_dir().join(TRIPLE).join("release").join(name);
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(&corpus)
        .arg(Path::new(PROJECT).join("qemu/fuzz/corpus").join(name))
        .arg(format!("-max_total_time={}", time.as_secs().max(1)))
        .arg(format!("-seed={seed}"))
        .arg(format!("-max_len={MOST_BYTES}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg("-print_final_stats=1");
    let result = run_within(&mut fuzzer, &log, Some(time + GRACE));
    let Statistics {
        executions,
        steps,
        new_inputs,
        edges,
    } = statistics(&fs::read_to_string(&log).unwrap_or_default());
    let said = format!(
        "{name}: {executions} executions, {steps} engine steps, {edges} edges, {new_inputs} new inputs in {}",
        outside(&corpus).display()
    );
    result.with_context(|| {
        format!(
            "{said}\nthe input is in {}; as a file of qemu/fuzz/corpus/{name} it is tried by \
             'cargo test -p ferrite-fuzz', too",
            outside(&findings).display()
        )
    })?;
    ensure!(
        executions > 0,
        "{name} did nothing; see {}",
        outside(&log).display()
    );
    Ok((said, steps))
}

/// Runs the targets for `minutes` in all.
pub fn fuzz(options: &Options, minutes: f64, report: &mut Report) -> Result<()> {
    let all = targets()?;
    let wanted: Vec<String> = match &options.target {
        Some(target) if !all.contains(target) => {
            bail!("no target {target}; there are: {}", all.join(", "))
        }
        Some(target) => vec![target.clone()],
        None => all,
    };
    ensure!(minutes > 0.0, "the time is to be more than nothing");
    build()?;
    let seed = seed()?;
    say(&format!("FERRITE_SEED={seed}"));
    let lanes = jobs().min(wanted.len());
    let rounds = wanted.len().div_ceil(lanes);
    let time = Duration::from_secs_f64(minutes * 60.0 / rounds as f64);
    let waiting = Mutex::new(wanted.into_iter());
    let report = Mutex::new(report);
    let all_steps = AtomicU64::new(0);
    let lane = || -> Result<()> {
        loop {
            // Not held while the target runs.
            let next = lock(&waiting).next();
            let Some(name) = next else { return Ok(()) };
            let start = Instant::now();
            let result = try_target(&name, time, seed);
            check_interrupted()?;
            if let Ok((said, steps)) = &result {
                say(said);
                all_steps.fetch_add(*steps, Ordering::Relaxed);
            }
            lock(&report).record(
                &format!("fuzz: {name}"),
                start.elapsed(),
                result.map(|_| ()),
            );
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..lanes).map(|_| scope.spawn(lane)).collect();
        let mut result = lane();
        for other in others {
            let ended = other
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a lane of targets panicked")));
            result = result.and(ended);
        }
        say(&format!(
            "{} engine steps in all",
            all_steps.load(Ordering::Relaxed)
        ));
        result
    })
}

/// `make fuzz`; false when something was found.
pub fn run_command(options: &Options) -> Result<bool> {
    let mut report = Report::default();
    let minutes = options.minutes.unwrap_or(MINUTES);
    let result = fuzz(options, minutes, &mut report);
    report.close();
    result?;
    Ok(report.good())
}

/// The stage of the long run.
pub fn stage(wanted: impl Fn(&str) -> bool, report: &mut Report) -> Result<()> {
    if wanted("fuzz") {
        fuzz(&Options::default(), LONG_MINUTES, report)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_says_is_understood() {
        let text = "#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb\n\
                    stat::engine_steps: 300\n\
                    #512\tpulse  cov: 3456 ft: 9000 corp: 300/20Kb lim: 64 exec/s: 256 rss: 50Mb\n\
                    stat::engine_steps: 12000\n\
                    Done 700 runs in 3 second(s)\n\
                    stat::number_of_executed_units: 700\n\
                    stat::average_exec_per_sec:     233\n\
                    stat::new_units_added:          41\n";
        let expected = Statistics {
            executions: 700,
            steps: 12_000,
            new_inputs: 41,
            edges: 3456,
        };
        assert_eq!(statistics(text), expected);
    }
}
