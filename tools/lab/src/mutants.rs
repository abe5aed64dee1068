// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make mutants`: the code is changed in one small place after the other, and the tests are to notice.
//!
//! cargo-mutants makes the changes. What survives is listed with a reason, or is a failure: there is a
//! test missing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use crate::cache::artifact;
use crate::process::{check_interrupted, Daemon};
use crate::report::Report;
use crate::skips::Skips;
use crate::step::{log_path, outside, run, say, tail};
use crate::{OUT, PROJECT};

/// Options of `mutants`.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How long.
    pub minutes: Option<f64>,
    /// Only files of this name, or matching this pattern.
    pub file: Option<String>,
}

/// How long, if nothing else is said: with a whole crate to be built for each, some dozens of changes.
const MINUTES: f64 = 60.0;
/// What it may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(60);
/// A test run without an end is noticed after so many seconds, at the least.
const LEAST_TEST_SECONDS: u32 = 120;

/// The last version that Debian's compiler takes.
const VERSION: &str = "26.0.0";

/// What is changed. Each change is tried by the tests of the crate that it is in.
const CRATES: &[&str] = &[
    "ferrite-engine",
    "ferrite-fabric",
    "ferrite-device",
    "ferrite-provider",
];

/// What only tests use, or has no test because it only prints.
const EXCLUDED: &[&str] = &["**/testing.rs", "**/logger.rs", "**/build.rs"];

/// Changes that survive, and why they may, below the project.
const SURVIVORS: &str = "tests/mutants.txt";

/// Makes cargo-mutants.
fn tool() -> Result<PathBuf> {
    let dir = artifact(
        "cargo-mutants",
        &format!("building cargo-mutants {VERSION}"),
        &[VERSION],
        |dir, log| {
            let mut cargo = Command::new("cargo");
            cargo
                .args(["install", "cargo-mutants", "--locked", "--version", VERSION])
                .arg("--root")
                .arg(dir)
                .env("CARGO_TARGET_DIR", dir.join("target"));
            run(&mut cargo, log)?;
            fs::remove_dir_all(dir.join("target"))?;
            Ok(())
        },
    )?;
    Ok(dir.join("bin/cargo-mutants"))
}

/// A change without the line that it is in, which is another one tomorrow.
fn name_of(line: &str) -> String {
    // "qemu/engine/src/tpt.rs:12:34: replace < with <= in lookup"
    let mut parts = line.splitn(4, ':');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(file), Some(row), Some(column), Some(what))
            if [row, column].iter().all(|n| n.parse::<u32>().is_ok()) =>
        {
            format!("{file}:{what}")
        }
        _ => line.to_owned(),
    }
}

/// What became of the changes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcomes {
    /// A test failed, or came to no end.
    caught: Vec<String>,
    /// No test failed.
    missed: Vec<String>,
    /// It does not compile, and so is none.
    unviable: usize,
}

impl Outcomes {
    /// Reads what cargo-mutants has written, which may be under way.
    fn read(dir: &Path) -> Self {
        let lines = |name: &str| -> Vec<String> {
            let text = fs::read_to_string(dir.join(name)).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        };
        let mut caught = lines("caught.txt");
        caught.extend(lines("timeout.txt"));
        Self {
            caught,
            missed: lines("missed.txt"),
            unviable: lines("unviable.txt").len(),
        }
    }

    /// Those that survive and are not listed.
    fn unexplained(&self, listed: &Skips) -> Vec<&str> {
        self.missed
            .iter()
            .filter(|line| !listed.0.contains_key(&name_of(line)))
            .map(String::as_str)
            .collect()
    }

    /// Those that are listed, and were noticed all the same: the list need not have them.
    fn listed_for_nothing<'l>(&self, listed: &'l Skips) -> Vec<&'l str> {
        let names = |lines: &[String]| -> BTreeSet<String> {
            lines.iter().map(|line| name_of(line)).collect()
        };
        let (caught, missed) = (names(&self.caught), names(&self.missed));
        listed
            .0
            .keys()
            .filter(|name| caught.contains(*name) && !missed.contains(*name))
            .map(String::as_str)
            .collect()
    }

    fn sum(&self) -> String {
        let (caught, missed) = (self.caught.len(), self.missed.len());
        let share = 100.0 * caught as f64 / (caught + missed).max(1) as f64;
        format!(
            "{} changes that compile: {caught} caught, {missed} not ({share:.0} % caught)",
            caught + missed
        )
    }
}

/// Tries changes for so long, in an order of chance.
fn try_changes(options: &Options, report: &mut Report) -> Result<()> {
    let tool = tool()?;
    let listed = Skips::read(SURVIVORS, " -- ")?;
    let out = Path::new(OUT).join("mutants");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out)?;
    let minutes = options.minutes.unwrap_or(MINUTES);
    let mut command = Command::new(tool);
    command
        .current_dir(PROJECT)
        .args(["mutants", "--shuffle", "--jobs", "1", "--no-times"])
        .args(["--colors", "never", "--caught", "--annotations", "none"])
        .args(["--minimum-test-timeout", &LEAST_TEST_SECONDS.to_string()])
        .arg("--output")
        .arg(&out)
        .env("CARGO_TARGET_DIR", Path::new(OUT).join("target-mutants"));
    for name in CRATES {
        command.args(["--package", name]);
    }
    for pattern in EXCLUDED {
        command.args(["--exclude", pattern]);
    }
    if let Some(file) = &options.file {
        for file in file.split('|') {
            command.args(["--file", file]);
        }
    }
    command.args(["--", "--lib", "--bins", "--tests"]);
    let log = log_path("mutants");
    let done = out.join("mutants.out");
    say(&format!(
        "changing the code for {minutes} minutes; what is said: {}",
        outside(&log).display()
    ));
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(minutes * 60.0);
    let mut running = Daemon::start("cargo-mutants", &mut command, &log)?;
    let mut said = 0;
    while running.ended()?.is_none() && Instant::now() < end {
        check_interrupted()?;
        let outcomes = Outcomes::read(&done);
        let count = outcomes.caught.len() + outcomes.missed.len();
        if count > said {
            said = count;
            println!(
                "      ... {} s  {}",
                start.elapsed().as_secs(),
                outcomes.sum()
            );
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    if running.ended()?.is_none() {
        // It ends what it has begun, and its tests have a process group of their own.
        // SAFETY: no memory is involved; the process is a child that was not waited for.
        unsafe { libc::kill(running.pid() as libc::pid_t, libc::SIGINT) };
        running.wait_for_end(GRACE)?;
    }
    let outcomes = Outcomes::read(&done);
    for line in &outcomes.missed {
        let why = listed.0.get(&name_of(line));
        println!(
            "          survives: {line}{}",
            why.map_or(String::new(), |why| format!(" ({why})"))
        );
    }
    for name in outcomes.listed_for_nothing(&listed) {
        println!("  note    {name} is caught, and listed in {SURVIVORS}");
    }
    say(&outcomes.sum());
    say(&format!(
        "each of them: {}; {} others do not compile",
        outside(&done).display(),
        outcomes.unviable
    ));
    report.record(
        "mutants: every change is noticed, or listed with a reason",
        start.elapsed(),
        judge(&outcomes, &listed).with_context(|| tail(&log, 5)),
    );
    Ok(())
}

fn judge(outcomes: &Outcomes, listed: &Skips) -> Result<()> {
    ensure!(
        outcomes.caught.len() + outcomes.missed.len() > 0,
        "nothing was changed"
    );
    let unexplained = outcomes.unexplained(listed);
    ensure!(
        unexplained.is_empty(),
        "no test notices, and {SURVIVORS} says no reason:\n{}",
        unexplained.join("\n")
    );
    Ok(())
}

/// `make mutants`; false when a change survived.
pub fn run_command(options: &Options) -> Result<bool> {
    let mut report = Report::default();
    let result = try_changes(options, &mut report);
    report.close();
    result?;
    Ok(report.good())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "qemu/engine/src/tpt.rs:12:34: replace < with <= in Table::lookup";

    #[test]
    fn a_change_is_known_by_its_file_and_what_it_is() {
        assert_eq!(
            name_of(LINE),
            "qemu/engine/src/tpt.rs: replace < with <= in Table::lookup"
        );
        assert_eq!(name_of("something: else"), "something: else");
    }

    #[test]
    fn what_survives_needs_a_reason() {
        let outcomes = |caught: &[&str], missed: &[&str]| Outcomes {
            caught: caught.iter().map(|&line| line.to_owned()).collect(),
            missed: missed.iter().map(|&line| line.to_owned()).collect(),
            unviable: 0,
        };
        let none = Skips::default();
        let listed = Skips::parse(&format!("{} -- because\n", name_of(LINE)), " -- ").unwrap();
        assert!(judge(&outcomes(&[], &[]), &none).is_err());
        assert!(judge(&outcomes(&[LINE], &[]), &none).is_ok());
        assert!(judge(&outcomes(&[], &[LINE]), &none).is_err());
        assert!(judge(&outcomes(&[], &[LINE]), &listed).is_ok());
        assert_eq!(outcomes(&[LINE], &[]).listed_for_nothing(&listed).len(), 1);
        // In another line the same change may survive.
        let both = outcomes(&[LINE], &[&LINE.replace("12", "13")]);
        assert_eq!(both.listed_for_nothing(&listed), [""; 0]);
        assert!(both.sum().contains("50 %"), "{}", both.sum());
    }
}
