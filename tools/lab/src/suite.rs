// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make test`: the stages, in the order in which a mistake is found soonest; and `make test-long`,
//! which takes the time for what finds mistakes that hide.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use crate::artifacts::{build_modules, build_programs, cargo, module_make, program};
use crate::cluster::{Cluster, Options as ClusterOptions, RunDir};
use crate::kernel::{self, Flavour, Kernel};
use crate::ktap::{self, Verdict};
use crate::process::{check_interrupted, lock};
use crate::report::Report;
use crate::step::{log_path, output, run as run_step, run_within, say, shell, tail};
use crate::tests::{groups, Group, VmTest};
use crate::{guest, OUT, PROJECT};

/// Options of `test`.
#[derive(Debug, Default, Clone)]
pub struct Options {
    /// Run only this stage.
    pub stage: Option<String>,
    /// Run only tests whose name contains this, or one of these: `one|another`.
    pub filter: Option<String>,
    /// Only list.
    pub list: bool,
    /// The long run, with its own stages.
    pub long: bool,
    /// Of what runs in VMs only the long groups.
    pub only_long_groups: bool,
    /// How many seeds and cases the long run tries.
    pub seeds: Option<u32>,
    /// Run everything that needs VMs on this kernel.
    pub kernel: Option<Flavour>,
    /// How often each test in VMs runs, to find one that fails at times.
    pub repeat: Option<u32>,
    /// How many groups of machines run at a time.
    pub lanes: Option<usize>,
}

/// All stages.
pub const STAGES: &[&str] = &["lint", "abi", "unit", "conformance", "kunit", "vm"];

/// All stages of the long run.
pub const LONG_STAGES: &[&str] = &[
    "seeds", "fuzz", "boots", "patches", "long", "kasan", "kcsan",
];

/// How many seeds of hostile guests and wires the long run tries, and how many cases of each
/// property.
const LONG_SEEDS: u32 = 2000;

/// How long the tests of user space may take, their build included: one that waits for what never
/// comes is found out.
const UNIT_LIMIT: Duration = Duration::from_secs(40 * 60);

/// The niceness of what is made beside the tests.
const NICENESS_BESIDE: libc::c_int = 10;

/// The test of user space that is what the stage `conformance` does.
const CONFORMANCE_TEST: &str = "the_device_keeps_every_requirement_of_its_specification";

/// How long the conformance test may take, some ten seconds usually.
const CONFORMANCE_LIMIT: Duration = Duration::from_secs(30 * 60);

/// How long the KUnit tests take, with the boot of their machine.
const KUNIT_SECONDS: usize = 45;

/// A command that loads modules runs all of their tests, of which there are hundreds.
const KUNIT_LIMIT: Duration = Duration::from_secs(5 * 60);

impl Options {
    /// The kernel that tests meant for another one run on.
    fn flavour(&self, usual: Flavour) -> Flavour {
        self.kernel.unwrap_or(usual)
    }

    /// How many groups of machines run at a time. A pair of guests has little more than one core busy: one
    /// of the two waits for the other mostly, and both for a device that is given time to answer.
    fn lanes(&self) -> usize {
        self.lanes.unwrap_or(kernel::jobs() / 2 + 1).max(1)
    }

    fn stage_wanted(&self, stage: &str) -> bool {
        self.stage.as_deref().is_none_or(|only| only == stage)
    }

    fn wanted(&self, name: &str) -> bool {
        self.filter
            .as_deref()
            .is_none_or(|texts| texts.split('|').any(|text| name.contains(text)))
    }

    /// What is wanted of a group.
    fn wanted_of(&self, group: &Group) -> Vec<(String, &'static VmTest)> {
        if group.long && !self.long && self.filter.is_none() {
            return Vec::new();
        }
        if !group.long && self.only_long_groups {
            return Vec::new();
        }
        let tests = group.tests();
        tests.filter(|(name, _)| self.wanted(name)).collect()
    }
}

/// Makes everything that is cached.
pub fn prepare_all() -> Result<()> {
    guest::image()?;
    kernel::stock()?;
    kernel::get(Flavour::Test)?;
    crate::pyverbs::prepare()?;
    Ok(())
}

/// Runs the tests; false when one failed.
pub fn run(options: &Options) -> Result<bool> {
    if options.list {
        for group in groups() {
            let mark = if group.long { " (long)" } else { "" };
            for (name, _) in group.tests() {
                println!("{name}{mark}");
            }
        }
        return Ok(true);
    }
    let known = if options.long { LONG_STAGES } else { STAGES };
    if let Some(stage) = &options.stage {
        if !known.contains(&stage.as_str()) {
            bail!("no stage {stage}; there are: {}", known.join(", "));
        }
    }
    let mut report = Report::default();
    let result = if options.long {
        long_stages(options, &mut report)
    } else {
        stages(options, &mut report)
    };
    report.close();
    result?;
    Ok(report.good())
}

fn stages(options: &Options, report: &mut Report) -> Result<()> {
    if options.stage.is_some() {
        return stages_in_turn(options, report);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| prepare_beside(options));
        stages_in_turn(options, report)
    })
}

/// Makes what the machines of the last stages need while the first ones run: the test kernel, the first
/// time, and always the programs and the modules, whose builds have one processor busy for much of their
/// time. Who needs a thing waits for it; what fails here is tried again and told there.
fn prepare_beside(options: &Options) {
    // SAFETY: Lowers the priority of this thread alone, and of what it starts; nothing else is
    // touched. Without effect it is only slower for others.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS_BESIDE) };
    let wanted = flavours(options);
    if wanted.is_empty() || guest::image().is_err() {
        return;
    }
    let mut kernels = Vec::new();
    for flavour in wanted {
        let Ok(kernel) = kernel::get(flavour) else {
            return;
        };
        kernels.push(kernel);
    }
    // One after the other: the stages before have something to do as well.
    for kernel in kernels {
        if build_modules(&kernel).is_err() {
            return;
        }
    }
    let _ = build_programs();
}

fn stages_in_turn(options: &Options, report: &mut Report) -> Result<()> {
    if options.stage_wanted("lint") {
        report.stage("lint: format and lints");
        lint(options, report)?;
    }
    if options.stage_wanted("abi") {
        report.stage("abi: the device interface");
        abi(options, report)?;
    }
    if options.stage_wanted("unit") {
        report.stage("unit: engine, device, fabric, lab");
        unit(options, report)?;
        cost(options, report);
    }
    if options.stage_wanted("conformance") {
        report.stage("conformance: the specification, and what checks it");
        conformance(options, report)?;
    }
    if options.stage_wanted("kunit") || options.stage_wanted("vm") {
        in_vms(options, report)?;
    }
    Ok(())
}

fn long_stages(options: &Options, report: &mut Report) -> Result<()> {
    if options.stage_wanted("seeds") {
        report.stage("seeds: the tests of user space, with many more seeds and cases");
        unit(options, report)?;
    }
    if options.stage_wanted("fuzz") {
        report.stage("fuzz: what guests, peers and neighbours can say");
        crate::fuzz::stage(|name| options.wanted(name), report)?;
    }
    if options.stage_wanted("boots") && options.wanted("boots") {
        report.stage("boots: do guests come up, each time");
        crate::artifacts::build_fabric()?;
        guest::image()?;
        crate::boots::boots(&Default::default(), &kernel::get(Flavour::Stock)?, report)?;
    }
    if options.stage_wanted("patches") {
        report.stage("patches: the kernel builds after each");
        crate::patches::build_tests(|name| options.wanted(name), report)?;
    }
    if options.stage_wanted("long") {
        // `make test` has the others on the kernels that they are meant for.
        let long = Options {
            stage: Some("vm".to_owned()),
            only_long_groups: true,
            ..options.clone()
        };
        in_vms(&long, report)?;
    }
    for flavour in [Flavour::Kasan, Flavour::Kcsan] {
        if options.stage_wanted(flavour.name()) {
            let all = Options {
                stage: None,
                kernel: Some(flavour),
                ..options.clone()
            };
            in_vms(&all, report)?;
        }
    }
    Ok(())
}

/// KUnit and the tests of whole machines.
fn in_vms(options: &Options, report: &mut Report) -> Result<()> {
    report.stage("programs, kernels and modules");
    if !build_for_vms(options, report)? {
        return Ok(());
    }
    in_lanes(options, report)
}

/// What one lane does at a time.
enum Work {
    Kunit,
    Group(Group),
}

impl Work {
    /// All that is wanted, what takes longest first, so that the lanes end at about the same time.
    fn wanted(options: &Options) -> Vec<Self> {
        let mut works = Vec::new();
        if options.stage_wanted("kunit") {
            works.push(Self::Kunit);
        }
        if options.stage_wanted("vm") {
            let groups = groups().into_iter();
            let wanted = groups.filter(|group| !options.wanted_of(group).is_empty());
            works.extend(wanted.map(Self::Group));
        }
        works.sort_by_key(|work| std::cmp::Reverse(work.seconds(options)));
        works
    }

    /// How long it takes, about.
    fn seconds(&self, options: &Options) -> usize {
        match self {
            Self::Kunit => KUNIT_SECONDS,
            Self::Group(group) => {
                let (wanted, all) = (options.wanted_of(group).len(), group.tests().count());
                group.seconds * wanted / all.max(1)
            }
        }
    }
}

/// KUnit and all groups of machines, as many at a time as there are lanes.
fn in_lanes(options: &Options, report: &mut Report) -> Result<()> {
    let works = Work::wanted(options);
    let lanes = options.lanes().min(works.len());
    report.end_stage();
    let report = Mutex::new(report);
    let waiting = Mutex::new(works.into_iter());
    let lane = || -> Result<()> {
        loop {
            // Not held while it is done.
            let next = lock(&waiting).next();
            match next {
                None => return Ok(()),
                Some(Work::Kunit) => kunit(options, &report)?,
                Some(Work::Group(group)) => vm_group(&group, options, &report)?,
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..lanes).map(|_| scope.spawn(lane)).collect();
        let mut result = lane();
        for other in others {
            let ended = other
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a lane of tests panicked")));
            result = result.and(ended);
        }
        result
    })
}

/// Files known to git below the project, with a given ending; all files where git does not know.
fn files(ending: &str) -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(PROJECT).args([
        "-c",
        "safe.directory=*",
        "ls-files",
        "-co",
        "--exclude-standard",
    ]);
    let list = match output(&mut git) {
        Ok(list) => list,
        // A source archive, or a work tree whose repository is out of sight (`.git` is a file).
        Err(_) => output(
            shell(
                "find . -type f -not -path './target/*' -not -path './.git/*' -not -path ./.git \
                 | sed 's,^./,,'",
            )
            .current_dir(PROJECT),
        )?,
    };
    let mut files: Vec<PathBuf> = list
        .lines()
        .filter(|name| name.ends_with(ending))
        .map(|name| Path::new(PROJECT).join(name))
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    Ok(files)
}

/// Whether a path belongs to the kernel side.
fn is_kernel(path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix(PROJECT) else {
        return false;
    };
    ["drivers", "rust", "samples"]
        .iter()
        .any(|top| rest.starts_with(top))
}

fn lint(options: &Options, report: &mut Report) -> Result<()> {
    let step = |report: &mut Report, name: &str, test: &mut dyn FnMut(&Path) -> Result<()>| {
        if !options.wanted(name) {
            return;
        }
        let log = log_path(&format!(
            "lint-{}",
            name.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
        ));
        let _ = fs::remove_file(&log);
        report.test(name, || test(&log));
    };
    step(report, "format: user space (cargo fmt)", &mut |log| {
        run_step(cargo("fmt").args(["--all", "--check"]), log)
    });
    step(report, "format: kernel side (rustfmt)", &mut |log| {
        let kernel_files: Vec<PathBuf> =
            files(".rs")?.into_iter().filter(|p| is_kernel(p)).collect();
        let config = kernel::stock()?.source.join(".rustfmt.toml");
        // Modules are found from the root files; each file is given by name, so children need
        // not be followed.
        let mut rustfmt = Command::new("rustfmt");
        rustfmt
            .args(["--check", "--edition", "2021", "--config-path"])
            .arg(config)
            .args(&kernel_files);
        run_step(&mut rustfmt, log)
    });
    step(report, "every file has its licence line", &mut |_| {
        let mut without = Vec::new();
        for path in files("")? {
            let name = path.to_string_lossy().into_owned();
            let exempt = [
                ".lock",
                ".png",
                ".svg",
                ".gitignore",
                ".proptest-regressions",
            ]
            .iter()
            .any(|end| name.ends_with(end))
                || name.contains("/LICENSES/")
                || name.contains("/qemu/fuzz/corpus/")
                || name.contains("proptest-regressions");
            let start = fs::read(&path)?;
            let start = String::from_utf8_lossy(&start[..start.len().min(400)]).into_owned();
            if !exempt && !start.contains("SPDX-License-Identifier:") {
                without.push(name);
            }
        }
        if !without.is_empty() {
            bail!("no SPDX line in:\n{}", without.join("\n"));
        }
        Ok(())
    });
    step(
        report,
        "lint: reasons of what is unsafe in the kernel",
        &mut |_| {
            let kernel_files: Vec<PathBuf> =
                files(".rs")?.into_iter().filter(|p| is_kernel(p)).collect();
            crate::safety::check(&kernel_files)
        },
    );
    step(
        report,
        "lint: the abstractions name no device, and helpers are inlines",
        &mut |_| {
            let ours = files("")?.into_iter();
            let ours: Vec<PathBuf> = ours
                .filter(|path| path.starts_with(Path::new(PROJECT).join("rust")))
                .collect();
            crate::abstractions::check(&ours, &kernel::stock()?.build.join("Module.symvers"))
        },
    );
    step(
        report,
        "documents of the kernel side name what is there",
        &mut |_| {
            let documents: Vec<PathBuf> = crate::documents::DOCUMENTS
                .iter()
                .map(|name| Path::new(PROJECT).join(name))
                .collect();
            let sources = files("")?.into_iter();
            let sources: Vec<PathBuf> = sources
                .filter(|path| {
                    !path
                        .extension()
                        .is_some_and(|end| end == "md" || end == "rst")
                })
                .collect();
            crate::documents::check(&documents, &sources)
        },
    );
    step(report, "lint: user space (clippy)", &mut |log| {
        let mut clippy = cargo("clippy");
        clippy.args(["--workspace", "--all-targets", "-q", "--", "-D", "warnings"]);
        run_step(&mut clippy, log)
    });
    step(
        report,
        "lint: module (clippy as in the kernel)",
        &mut |log| {
            let kernel = kernel::stock()?;
            let mut make = module_make(&kernel, &Path::new(OUT).join("module-clippy"))?;
            run_step(make.args(["CLIPPY=1", "modules"]), log)?;
            let text = fs::read_to_string(log)?;
            if let Some(at) = text.lines().position(|l| l.starts_with("warning")) {
                let lines: Vec<&str> = text.lines().skip(at).take(30).collect();
                bail!("{}", lines.join("\n"));
            }
            Ok(())
        },
    );
    step(report, "lint: C part (checkpatch)", &mut |log| {
        let kernel = kernel::stock()?;
        let mut sources: Vec<PathBuf> = files(".c")?;
        sources.extend(files(".h")?);
        sources.retain(|p| is_kernel(p) || p.starts_with(Path::new(PROJECT).join("include")));
        if sources.is_empty() {
            return Ok(());
        }
        let mut checkpatch = Command::new(kernel.source.join("scripts/checkpatch.pl"));
        checkpatch
            .current_dir(&kernel.source)
            .args([
                "--no-tree",
                "--terse",
                "--no-summary",
                "-f",
                "--max-line-length=100",
            ])
            .args(&sources);
        run_step(&mut checkpatch, log)
    });
    crate::patches::tests(|name| options.wanted(name), report);
    Ok(())
}

fn abi(options: &Options, report: &mut Report) -> Result<()> {
    let name = "the C header is what the Rust interface generates";
    if options.wanted(name) {
        report.test(name, || {
            let committed = Path::new(PROJECT).join("include/uapi/rdma/ferrite-abi.h");
            let generated = output(cargo("run").args(["-q", "-p", "ferrite-abi", "--bin", "uapi-header"]))
                .context("running the header generator")?;
            let committed = fs::read_to_string(&committed)
                .context("include/uapi/rdma/ferrite-abi.h is not there")?;
            if generated != committed {
                bail!("include/uapi/rdma/ferrite-abi.h differs from what the generator gives; run it and commit");
            }
            Ok(())
        });
    }
    let name = "a C compiler takes the header by itself";
    if options.wanted(name) {
        report.test(name, || {
            let log = log_path("abi-c");
            let _ = fs::remove_file(&log);
            run_step(
                &mut shell(
                    "cd /tmp; echo '#include <rdma/ferrite-abi.h>' > abi.c; \
                     gcc -std=gnu11 -Wall -Wextra -Werror -I /ferrite/include/uapi -c abi.c -o abi.o",
                ),
                &log,
            )
        });
    }
    let name = "C and C++ lay out ferritedv.h as the provider does";
    if options.wanted(name) {
        report.test(name, || {
            let log = log_path("ferritedv-c");
            let _ = fs::remove_file(&log);
            run_step(&mut shell(FERRITEDV_LAYOUT), &log)
        });
    }
    Ok(())
}

/// The numbers are those that `tools/provider/src/list.rs` asserts.
const FERRITEDV_LAYOUT: &str = r#"set -e; cd /tmp; cat >ferritedv.c <<'C'
#include <stddef.h>
#include <infiniband/ferritedv.h>
#ifdef __cplusplus
#define IS(what) static_assert(what, "layout")
#else
#define IS(what) _Static_assert(what, "layout")
#endif
IS(sizeof(struct ferritedv_list) == 40);
IS(offsetof(struct ferritedv_list, address) == 16);
IS(offsetof(struct ferritedv_list, pieces) == 24);
IS(offsetof(struct ferritedv_list, comp_mask) == 36);
IS(sizeof(struct ferritedv_message) == 24);
IS(offsetof(struct ferritedv_message, remote_srqn) == 16);
IS(sizeof(struct ferritedv_qp_init_attr) == 16);
IS(offsetof(struct ferritedv_qp_init_attr, flags) == 8);
int opcode(struct ibv_wc *wc);
int opcode(struct ibv_wc *wc) { return wc->opcode == FERRITEDV_WC_REGISTER_LIST; }
C
flags='-Wall -Wextra -Werror -I /ferrite/tools/provider/include -c ferritedv.c -o ferritedv.o'
gcc -std=gnu11 $flags; gcc -x c++ -std=c++11 $flags"#;

/// Prints those lines of a log that tell of coverage: a sum, and each requirement without a check.
fn print_coverage(log: &Path, sum: &str) -> Result<()> {
    let said = fs::read_to_string(log)?;
    let lines = said.lines().skip_while(|line| !line.contains(sum));
    // The harness puts a dot for each test before what that says.
    let lines = lines.map(|line| line.trim().trim_start_matches('.'));
    let is_of_it = |line: &&str| {
        line.contains(sum)
            || ["DEV-", "DRV-"]
                .iter()
                .any(|number| line.starts_with(number))
    };
    let lines: Vec<_> = lines.filter(is_of_it).collect();
    ensure!(
        !lines.is_empty(),
        "{} says nothing of coverage",
        log.display()
    );
    for line in lines {
        println!("          {line}");
    }
    Ok(())
}

/// Every requirement of the specification: those of the device are checked on ours, for those of the
/// driver there is a table of the tests that do so. Prints what is not covered, and why.
fn conformance(options: &Options, report: &mut Report) -> Result<()> {
    let name = "the device keeps every requirement of its specification";
    if options.wanted(name) {
        build_programs()?;
        report.test(name, || {
            let log = log_path("conformance");
            let _ = fs::remove_file(&log);
            let device = format!("{} --log error", program("ferrite-device").display());
            let mut conformance = Command::new(program("ferrite-conformance"));
            run_within(
                conformance.args(["--run", &device]),
                &log,
                Some(CONFORMANCE_LIMIT),
            )?;
            print_coverage(&log, " requirements: ")
        });
    }
    let name = "every requirement of the driver has its tests, or a reason why it has none";
    if options.wanted(name) {
        report.test(name, || {
            let log = log_path("coverage");
            let _ = fs::remove_file(&log);
            let mut coverage = cargo("test");
            coverage.args(["-q", "-p", "ferrite-abi", "--test", "documentation"]);
            coverage.args(["coverage::", "--", "--nocapture"]);
            run_within(&mut coverage, &log, Some(UNIT_LIMIT))?;
            print_coverage(&log, " requirements of the driver ")
        });
    }
    Ok(())
}

/// Results in the output of `cargo test`.
fn cargo_results(text: &str) -> Vec<(String, Option<bool>)> {
    let mut unit = String::new();
    let mut found = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(rest) = trimmed.strip_prefix("Running ") {
            // "unittests src/lib.rs (/out/target/debug/deps/ferrite_engine-0123)"
            let file = rest.rsplit('/').next().unwrap_or(rest);
            unit = file.split('-').next().unwrap_or(file).to_owned();
        } else if let Some(rest) = trimmed.strip_prefix("Doc-tests ") {
            unit = format!("{rest} (documentation)");
        } else if let Some((name, verdict)) = trimmed
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            let verdict = if verdict.starts_with("ok") {
                Some(true)
            } else if verdict.starts_with("ignored") {
                None
            } else {
                Some(false)
            };
            found.push((format!("{unit}: {name}"), verdict));
        }
    }
    found
}

fn unit(options: &Options, report: &mut Report) -> Result<()> {
    let log = log_path("cargo-test");
    let _ = fs::remove_file(&log);
    let start = Instant::now();
    let mut test = cargo("test");
    test.args(["--workspace", "--no-fail-fast", "--color", "never"]);
    if options.long {
        let seeds = options.seeds.unwrap_or(LONG_SEEDS).to_string();
        test.env("FERRITE_SEEDS", &seeds)
            .env("PROPTEST_CASES", &seeds);
    }
    match &options.filter {
        Some(filter) => {
            test.args(["--", "--show-output"]).args(filter.split('|'));
        }
        // The stage of that name does it, and says more; with other numbers all of it is checked here, too.
        None if options.stage.is_none() && !options.long => {
            test.args(["--", "--show-output", "--skip", CONFORMANCE_TEST]);
        }
        None => {
            test.args(["--", "--show-output"]);
        }
    }
    let limit = (!options.long).then_some(UNIT_LIMIT);
    let result = run_within(&mut test, &log, limit);
    let text = fs::read_to_string(&log)?;
    let results = cargo_results(&text);
    let took = start.elapsed() / (results.len().max(1) as u32);
    for (name, verdict) in &results {
        match verdict {
            Some(true) => {
                report.record(name, took, Ok(()));
            }
            Some(false) => {
                report.record(name, took, Err(anyhow::anyhow!("see {}", log.display())));
            }
            None => {}
        }
    }
    // A failure that no test line shows: a crate that does not compile, a test that crashed.
    if let Err(error) = result {
        if results.iter().all(|(_, verdict)| *verdict != Some(false)) {
            report.record("cargo test", start.elapsed(), Err(error));
        } else {
            println!("{}", tail(&log, 60));
        }
    } else if results.is_empty() && options.filter.is_none() {
        report.record(
            "cargo test",
            start.elapsed(),
            Err(anyhow::anyhow!("no test ran")),
        );
    }
    for line in fresh_seeds(&text) {
        println!("          {line}");
    }
    Ok(())
}

/// The lines of tests that say which fresh seeds they tried.
fn fresh_seeds(said: &str) -> Vec<&str> {
    said.lines()
        .filter(|line| line.contains(": fresh seeds from FERRITE_SEED="))
        .collect()
}

/// Counts the instructions of the provider's paths, and prints them. They have bounds where they are
/// optimised, as what is installed is, and the tests of the other crates are not: it takes a build of the
/// provider's tests of its own, and a second.
fn cost(options: &Options, report: &mut Report) {
    let name = "posting and polling take few instructions in a program that is optimised";
    if !options.wanted(name) {
        return;
    }
    report.test(name, || {
        let log = log_path("cost");
        let _ = fs::remove_file(&log);
        let mut test = cargo("test");
        test.args(["--release", "--lib", "-p", "ferrite-provider", "cost::"]);
        run_within(test.args(["--", "--nocapture"]), &log, Some(UNIT_LIMIT))?;
        let said = fs::read_to_string(&log)?;
        let counts = counts(&said);
        // Where it may not trace it counts nothing, and is content.
        ensure!(!counts.is_empty(), "{} has no counts", log.display());
        for count in counts {
            println!("          {count}");
        }
        Ok(())
    });
}

/// The lines of that test that say how many instructions something takes.
fn counts(said: &str) -> Vec<&str> {
    let is_count = |line: &&str| {
        line.strip_suffix(" instructions")
            .and_then(|line| line.rsplit_once(": "))
            .is_some_and(|(_, count)| count.parse::<u64>().is_ok())
    };
    said.lines().filter(is_count).collect()
}

/// The kernels that the wanted tests run on.
fn flavours(options: &Options) -> Vec<Flavour> {
    let mut flavours = Vec::new();
    if options.stage_wanted("kunit") {
        flavours.push(options.flavour(Flavour::Test));
    }
    if options.stage_wanted("vm") {
        for group in groups() {
            if !options.wanted_of(&group).is_empty() {
                flavours.push(options.flavour(group.flavour));
            }
        }
    }
    flavours.sort_by_key(|flavour| flavour.name());
    flavours.dedup();
    flavours
}

/// Builds what machines with a kernel need.
pub(crate) fn build_for(flavour: Flavour) -> Result<()> {
    guest::image()?;
    build_programs()?;
    build_modules(&kernel::get(flavour)?)?;
    Ok(())
}

/// False where something does not build.
fn build_for_vms(options: &Options, report: &mut Report) -> Result<bool> {
    if flavours(options).is_empty() {
        return Ok(true);
    }
    guest::image()?;
    let start = Instant::now();
    let built = build_programs().and_then(|()| {
        for flavour in flavours(options) {
            build_modules(&kernel::get(flavour)?)?;
        }
        Ok(())
    });
    if let Err(error) = built {
        check_interrupted()?;
        report.record("programs and modules build", start.elapsed(), Err(error));
        return Ok(false);
    }
    Ok(true)
}

/// What boot left behind is not ours, and the kernel's leak detector scans when it is asked to.
fn forget_leaks(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        vm.sh(
            "echo scan=off >/sys/kernel/debug/kmemleak && echo clear >/sys/kernel/debug/kmemleak",
        )?;
    }
    Ok(())
}

/// A last look at machines that are not used any more: what was leaked, and what the kernel said
/// after the last test.
pub(crate) fn last_look(cluster: &Cluster, flavour: Flavour) -> Result<()> {
    if flavour.finds_leaks() {
        crate::tests::no_leaks(cluster)?;
    }
    let findings = cluster.new_findings();
    if !findings.is_empty() {
        bail!("the kernel reported:\n{}", findings.join("\n"));
    }
    Ok(())
}

fn kernel_modules(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    crate::artifacts::modules(&crate::artifacts::module_dir(kernel))
}

fn kunit(options: &Options, report: &Mutex<&mut Report>) -> Result<()> {
    let stage = format!(
        "kunit: tests inside the module, on the {} kernel",
        options.flavour(Flavour::Test).name()
    );
    println!("--- {stage}");
    let start = Instant::now();
    let result = || -> Result<String> {
        let kernel = kernel::get(options.flavour(Flavour::Test))?;
        let run = RunDir::new()?;
        let cluster = Cluster::boot(
            &run,
            &kernel,
            &ClusterOptions {
                vms: 1,
                cpus: 1,
                ..ClusterOptions::pair("kunit", kernel_modules(&kernel)?)
            },
        )?;
        if kernel.flavour.finds_leaks() {
            forget_leaks(&cluster)?;
        }
        let vm = &cluster.vms[0];
        let script = "dmesg -C
             for ko in /ferrite/modules/*.ko; do
                 for m in $(modinfo -F depends $ko | tr , ' '); do modprobe -q $m || true; done
                 insmod $ko || exit 1
             done
             dmesg";
        let log = vm.sh_in(script, KUNIT_LIMIT)?;
        last_look(&cluster, kernel.flavour)?;
        Ok(log)
    };
    let result = result();
    let report = &mut *lock(report);
    report.stage_took(&stage, start.elapsed());
    let log = match result {
        Ok(log) => log,
        Err(error) => {
            check_interrupted()?;
            report.record("kunit: the module loads", start.elapsed(), Err(error));
            return Ok(());
        }
    };
    let cases = ktap::cases(&log);
    if cases.is_empty() {
        report.record(
            "kunit: the module has tests",
            start.elapsed(),
            Err(anyhow::anyhow!("no test result in the kernel log:\n{log}")),
        );
    }
    let took = start.elapsed() / (cases.len().max(1) as u32);
    for case in cases.iter().filter(|case| options.wanted(&case.name)) {
        match case.verdict {
            Verdict::Passed => report.record(&case.name, took, Ok(())),
            Verdict::Failed => {
                report.record(&case.name, took, Err(anyhow::anyhow!(case.notes.clone())))
            }
            Verdict::Skipped => {
                report.record(&case.name, took, Err(anyhow::anyhow!("it was skipped")))
            }
        };
    }
    Ok(())
}

/// How often the machines of a group are booted, at most: after a test that failed, the next gets
/// fresh ones.
const BOOTS: usize = 5;
/// The same where a failure takes nothing from the next test but time, of which there is plenty.
const LONG_BOOTS: usize = 100;

pub(crate) fn boot_group(
    group: &Group,
    wanted: &Options,
    run: &RunDir,
    attempt: usize,
) -> Result<Cluster> {
    let kernel = kernel::get(wanted.flavour(group.flavour))?;
    let mut options = (group.options)(ClusterOptions::pair("", kernel_modules(&kernel)?));
    options.label = format!("{}-{attempt}", group.name.replace(' ', "-"));
    options.thorough = wanted.long;
    // The module's own tests have a stage of their own; here each load would run them again.
    options.kernel_args = format!("kunit.enable=0 {}", options.kernel_args);
    if kernel.flavour.slowness() > 1 {
        // Sanitisers keep books on all memory, and freed memory for a while. What is slow hangs less
        // soon.
        options.memory_mib *= 2;
        options.kernel_args += " watchdog_thresh=60 sysctl.kernel.hung_task_timeout_secs=480";
    }
    if kernel.flavour == Flavour::Kcsan {
        // It takes two for a race.
        options.cpus = options.cpus.max(2);
    }
    let cluster = Cluster::boot(run, &kernel, &options)?;
    if kernel.flavour.finds_leaks() {
        forget_leaks(&cluster)?;
    }
    for vm in &cluster.vms {
        if group.load_driver {
            vm.sh(crate::shell::LOAD_DRIVER)
                .context("loading the driver")?;
        }
    }
    for vm in cluster.vms.iter().filter(|_| group.load_driver) {
        crate::tests::wait_active(vm)?;
    }
    Ok(cluster)
}

fn vm_group(group: &Group, options: &Options, report: &Mutex<&mut Report>) -> Result<()> {
    let wanted = options.wanted_of(group);
    let stage = format!(
        "vm: {} ({} kernel)",
        group.name,
        options.flavour(group.flavour).name()
    );
    println!("--- {stage}");
    let begun = Instant::now();
    let run = RunDir::new()?;
    let mut cluster: Option<Cluster> = None;
    let mut attempt = 0;
    let flavour = options.flavour(group.flavour);
    let boots = if flavour.slowness() > 1 {
        LONG_BOOTS
    } else {
        BOOTS
    };
    let mut seen_races = 0;
    let mut seen_boots = 0;
    let record = |name: &str, start: Instant, result| {
        let took = start.elapsed();
        lock(report).record(name, took, result)
    };
    let done_with = |cluster: &mut Option<Cluster>| {
        if let Some(up) = cluster.take() {
            let name = format!("{}: no memory is leaked, and no report is late", group.name);
            let start = Instant::now();
            let looked = last_look(&up, flavour);
            record(&name, start, looked);
        }
    };
    for (name, test) in &wanted {
        check_interrupted()?;
        if test.fresh {
            done_with(&mut cluster);
        }
        let start = Instant::now();
        if cluster.is_none() {
            attempt += 1;
            if attempt > boots {
                let died = anyhow::anyhow!("not run: the VMs died too often");
                record(name, start, Err(died));
                continue;
            }
            match boot_group(group, options, &run, attempt) {
                Ok(up) => cluster = Some(up),
                Err(error) => {
                    check_interrupted()?;
                    record(name, start, Err(error));
                    // What cannot boot once will not boot for each test.
                    attempt = boots;
                    continue;
                }
            }
        }
        let Some(up) = cluster.as_mut() else { continue };
        // The boot is counted in, where there was one.
        let before = match attempt > seen_boots {
            true => Duration::ZERO,
            false => up.processor_time(),
        };
        seen_boots = attempt;
        let mut result = (0..options.repeat.unwrap_or(1)).try_for_each(|_| (test.run)(up));
        let findings = up.new_findings();
        if !findings.is_empty() {
            let text = findings.join("\n");
            result = Err(match result {
                Ok(()) => anyhow::anyhow!("the kernel reported:\n{text}"),
                Err(error) => anyhow::anyhow!("{error:#}\nthe kernel reported:\n{text}"),
            });
        }
        if result.is_ok() && !test.ends_group {
            result = up.check_processes();
        }
        let races: u64 = up.vms.iter().map(crate::vm::Vm::other_races).sum();
        if races > seen_races {
            say(&format!(
                "{} data races of the kernel's own",
                races - seen_races
            ));
        }
        seen_races = races;
        let processors = up.processor_time().saturating_sub(before);
        let good = lock(report).record_with(name, start.elapsed(), processors, result);
        // A failed test may leave anything behind: the next ones get fresh machines.
        if !good || test.ends_group {
            cluster = None;
            seen_races = 0;
        }
    }
    check_interrupted()?;
    done_with(&mut cluster);
    lock(report).stage_took(&stage, begun.elapsed());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{cargo_results, counts, flavours, fresh_seeds, groups, Options, Work};
    use crate::kernel::Flavour;

    #[test]
    fn long_groups_are_of_the_long_run_and_of_its_stage_on_their_own_kernels() {
        let usual = Options {
            stage: Some("vm".to_owned()),
            ..Options::default()
        };
        let all = Options {
            long: true,
            ..usual.clone()
        };
        let stage = Options {
            only_long_groups: true,
            ..all.clone()
        };
        for group in groups() {
            let runs = |options: &Options| !options.wanted_of(&group).is_empty();
            assert!(runs(&all));
            assert_eq!(runs(&usual), !group.long, "{}", group.name);
            assert_eq!(runs(&stage), group.long, "{}", group.name);
        }
        assert_eq!(flavours(&stage), [Flavour::Stock, Flavour::Test]);
    }

    #[test]
    fn what_takes_longest_begins_first() {
        let names = |options: &Options| -> Vec<&'static str> {
            let works = Work::wanted(options).into_iter();
            let name = |work| match work {
                Work::Kunit => "kunit",
                Work::Group(group) => group.name,
            };
            works.map(name).collect()
        };
        let all = Options::default();
        let works = Work::wanted(&all);
        assert!(works.is_sorted_by_key(|work| std::cmp::Reverse(work.seconds(&all))));
        assert!(works.iter().all(|work| work.seconds(&all) > 0));
        assert_eq!(names(&all).first(), Some(&"checked"));
        assert_eq!(works.len(), 1 + groups().iter().filter(|g| !g.long).count());
        // A group of which little is wanted does not take long.
        let some = Options {
            filter: Some("NFS/RDMA: versions|interrupt modes: ".to_owned()),
            ..all.clone()
        };
        let some = names(&some);
        let at = |name| some.iter().position(|other| *other == name);
        assert!(at("interrupt modes") < at("stock"), "{some:?}");
        let only = Options {
            stage: Some("kunit".to_owned()),
            ..all
        };
        assert_eq!(names(&only), ["kunit"]);
    }

    #[test]
    fn fresh_seeds_are_found_and_do_not_pass_for_results() {
        let text = "test every_seed_ends_well ... ok\n\n\
            successes:\n\n\
            ---- frames_reach_nothing stdout ----\n\
            frames: fresh seeds from FERRITE_SEED=1763561234567890\n\
            FERRITE_SEED=7\n";
        let line = "frames: fresh seeds from FERRITE_SEED=1763561234567890";
        assert_eq!(fresh_seeds(text), [line]);
        assert_eq!(cargo_results(text).len(), 1);
    }

    #[test]
    fn counts_of_instructions_are_found_and_nothing_else() {
        let text = "running 3 tests\n\
            read: 148 instructions\n\
            skipped: this process may not trace its children\n\
            read: 148 instructions, 100 at most\n\
            test cost::posting_and_polling_take_few_instructions ... ok\n";
        assert_eq!(counts(text), ["read: 148 instructions"]);
        assert_eq!(counts("no: few instructions"), [""; 0]);
    }

    #[test]
    fn cargo_results_are_counted_by_crate() {
        let text =
            "     Running unittests src/lib.rs (/out/target/debug/deps/ferrite_engine-01ab)\n\
            \n\
            running 3 tests\n\
            test eq::tests::wraps ... ok\n\
            test eq::tests::drains ... FAILED\n\
            test slow ... ignored\n\
            test result: FAILED. 1 passed; 1 failed; 1 ignored\n";
        assert_eq!(
            cargo_results(text),
            [
                ("ferrite_engine: eq::tests::wraps".to_owned(), Some(true)),
                ("ferrite_engine: eq::tests::drains".to_owned(), Some(false)),
                ("ferrite_engine: slow".to_owned(), None),
            ]
        );
    }
}
