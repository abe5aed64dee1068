// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make pyverbs`: the tests that rdma-core brings along, on the device in a VM.
//!
//! The suite is that of the rdma-core source package whose libraries the guests have. All its
//! traffic is loopback, so one VM does; as a part of `make test` its modules are spread over two.
//! Each test module has its own process, where several are run a copy of one that has loaded what all of
//! them need; one that dies or hangs costs the test it was at, and the rest of the module runs in a new
//! one. Results are what the runner prints for each test: exit
//! codes mean nothing here, because some of the libraries the suite loads crash on their way out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};

use crate::cache::artifact;
use crate::cluster::{Cluster, Options as ClusterOptions, RunDir};
use crate::kernel::{self, Flavour};
use crate::shell::{build, LOAD_DRIVER};
use crate::skips::Skips;
use crate::step::{output, outside, run as run_step, say, shell};
use crate::tests::wait_active;
use crate::traffic::DEVICE_AND_GID;
use crate::vm::Vm;

/// A package made from the source that is wanted, to learn its version and place.
const BINARY: &str = "python3-pyverbs";
/// The source package.
const SOURCE: &str = "rdma-core";
/// Endings that a source archive may have.
const ENDINGS: &[&str] = &["orig.tar.gz", "orig.tar.xz", "orig.tar.bz2"];
/// The tests that may be skipped, and why, below the project.
const SKIPS: &str = "tests/pyverbs-skips.txt";
/// Where the suite is in the guest.
const PLACE: &str = "/var/tmp/rdma-core";
/// Modules of the suite that are for other vendors' devices.
const OTHERS: &[&str] = &["test_mlx5_", "test_efa"];
/// Time for one test on a kernel that is as fast as usual; its process is ended after it.
const TEST_SECONDS: u32 = 240;
/// Tests of the suite that have to pass in all.
const AT_LEAST: usize = 167;
/// Time for one module's process.
const MODULE: Duration = Duration::from_secs(420);
/// Modules that one process is loaded for: to load one takes seconds in an emulator.
const BATCH: usize = 4;

/// Runs the tests of a module, given as first argument, but for those listed in the file given as second
/// one; says what becomes of each. Of names that each end with a comma, what each says is behind its name.
const RUNNER: &str = r#"
import faulthandler, importlib, os, sys, types, unittest
place, modules, done, seconds, only = sys.argv[1:6]
sys.argv[1:6] = []
sys.path[:0] = [place, os.path.join(place, 'tests')]
# The package's own start would load all modules, those for other devices too.
package = types.ModuleType('tests')
package.__path__ = [os.path.join(place, 'tests')]
sys.modules['tests'] = package
from args_parser import parser
parser.parse_args()
done = set(open(done).read().split())

def be_patient():
    # The suite's own limits are those of hardware: seconds for what is polled for, a quarter of a minute for both ends
    # to come to the same place, half of one for them to end, and 67 ms for a packet to be acknowledged.
    import multiprocessing.context, multiprocessing.process
    from tests import base, utils
    utils.POLL_CQ_TIMEOUT = 60
    base.TIMEOUT = 16
    barrier = multiprocessing.context.BaseContext.Barrier
    multiprocessing.context.BaseContext.Barrier = lambda self, parties, action=None, timeout=None: barrier(
        self, parties, action, timeout and 8 * timeout)
    join = multiprocessing.process.BaseProcess.join
    multiprocessing.process.BaseProcess.join = lambda self, timeout=None: join(self, timeout and 5 * timeout)

def say(what, test, text=''):
    text = str(text).replace('\\', '\\\\').replace('\n', '\\n')
    sys.stdout.write('\n@@ %s %s %s\n' % (what, test.id(), text))
    sys.stdout.flush()

class Result(unittest.TestResult):
    def startTest(self, test):
        super().startTest(test)
        say('start', test)
        faulthandler.dump_traceback_later(float(seconds), exit=True)
    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)
    def addSuccess(self, test):
        say('pass', test)
    def addSkip(self, test, reason):
        say('skip', test, reason)
    def addError(self, test, error):
        say('fail', test, self._exc_info_to_string(error, test))
    addFailure = addError
    def addSubTest(self, test, subtest, error):
        if error is not None:
            say('fail', test, self._exc_info_to_string(error, test))
    def addUnexpectedSuccess(self, test):
        say('fail', test, 'unexpected success')
    def addExpectedFailure(self, test, error):
        say('pass', test)

def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test

def run(module):
    faulthandler.enable()
    be_patient()
    tests = list(flat(unittest.defaultTestLoader.loadTestsFromName('tests.' + module)))
    tests = [test for test in tests if only in test.id()]
    for test in tests:
        say('list', test)
    unittest.TestSuite(test for test in tests if test.id() not in done).run(Result())

def run_each(modules):
    for common in ('tests.base', 'tests.utils', 'tests.base_rdmacm'):
        try:
            importlib.import_module(common)
        except ImportError:
            pass
    said = os.path.join(place, 'said')
    for module in modules:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            output = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run(module)
            # Ends as any program does.
            return
        os.waitpid(child, 0)
        with open(said, errors='replace') as output:
            sys.stdout.write('\n@@ module %s\n%s\n' % (module, output.read()))

if modules.endswith(','):
    run_each(modules[:-1].split(','))
else:
    run(modules)
"#;

/// Options of `pyverbs`.
#[derive(Debug, Default)]
pub struct Options {
    /// Only modules or tests whose names contain this.
    pub filter: Option<String>,
    /// Use what was built last.
    pub no_build: bool,
    /// The kernel with the checkers.
    pub test_kernel: bool,
}

/// What became of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// A line of the runner.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    what: &'a str,
    test: &'a str,
    text: String,
}

/// The runner's lines in a process's output.
fn lines(text: &str) -> Vec<Line<'_>> {
    text.lines()
        .filter_map(|line| {
            let mut parts = line.strip_prefix("@@ ")?.splitn(3, ' ');
            Some(Line {
                what: parts.next()?,
                test: parts.next()?,
                text: unescape(parts.next().unwrap_or_default()),
            })
        })
        .collect()
}

/// Undoes what the runner does to keep a text on one line.
fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => match chars.next() {
                Some('n') => out.push('\n'),
                Some(other) => out.push(other),
                None => {}
            },
            (c, false) => out.push(c),
        }
    }
    out
}

/// Enters the results of one process into `results`. The test at which it ended, if it did not
/// end by itself, has failed with the process's last words.
fn judge(text: &str, last_words: &str, results: &mut BTreeMap<String, Outcome>) {
    let mut running = None;
    for line in lines(text) {
        let outcome = match line.what {
            "start" => {
                running = Some(line.test.to_owned());
                continue;
            }
            "pass" => Outcome::Passed,
            "skip" => Outcome::Skipped(line.text),
            "fail" => Outcome::Failed(line.text),
            _ => continue,
        };
        running = None;
        // A test whose cleaning up fails as well has failed once.
        match results.get_mut(line.test) {
            Some(Outcome::Failed(_)) => {}
            _ => {
                results.insert(line.test.to_owned(), outcome);
            }
        }
    }
    if let Some(test) = running {
        results.insert(
            test,
            Outcome::Failed(format!("the process ended in this test\n{last_words}")),
        );
    }
}

/// Counts, and what is wrong.
#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    passed: usize,
    skipped: usize,
    failed: Vec<(String, String)>,
    /// Listed as skips, but they pass.
    stale: Vec<String>,
}

/// Compares results with what may be skipped.
fn summarize(results: &BTreeMap<String, Outcome>, allowed: &Skips) -> Summary {
    let mut summary = Summary::default();
    for (test, outcome) in results {
        let listed = allowed
            .0
            .contains_key(test.strip_prefix("tests.").unwrap_or(test));
        match outcome {
            Outcome::Passed => {
                summary.passed += 1;
                if listed {
                    summary.stale.push(test.clone());
                }
            }
            Outcome::Skipped(reason) => {
                if listed {
                    summary.skipped += 1;
                } else {
                    let text = format!("skipped, and {SKIPS} does not say why it may be: {reason}");
                    summary.failed.push((test.clone(), text));
                }
            }
            Outcome::Failed(text) => summary.failed.push((test.clone(), text.clone())),
        }
    }
    summary
}

/// The suite's folder, fetched with the package manager if need be.
fn suite() -> Result<PathBuf> {
    let uris = output(Command::new("apt-get").args(["download", "--print-uris", BINARY]))
        .context("asking the package manager where rdma-core's packages are")?;
    // 'URI' file-name size checksum
    let uri = uris
        .split_whitespace()
        .next()
        .map(|word| word.trim_matches('\''))
        .unwrap_or_default();
    let (folder, file) = uri
        .rsplit_once('/')
        .with_context(|| format!("no package {BINARY} in the distribution"))?;
    let version = file
        .split('_')
        .nth(1)
        .and_then(|version| version.rsplit_once('-'))
        .map(|(upstream, _)| upstream)
        .with_context(|| format!("cannot read a version in {file}"))?
        .to_owned();
    let folder = folder.to_owned();
    let dir = artifact(
        "pyverbs",
        &format!("fetching the source of {SOURCE} {version} for its tests (once)"),
        &[&version, "1"],
        |dir, log| {
            let archive = dir.join("source.tar");
            let found = ENDINGS.iter().any(|ending| {
                let mut helper = Command::new("/usr/lib/apt/apt-helper");
                helper
                    .arg("download-file")
                    .arg(format!("{folder}/{SOURCE}_{version}.{ending}"))
                    .arg(&archive);
                run_step(&mut helper, log).is_ok()
            });
            if !found {
                bail!(
                    "the distribution's server has no source archive of {SOURCE} {version} \
                     beside its packages; log: {}",
                    outside(log).display()
                );
            }
            let mut tar = Command::new("tar");
            tar.arg("-xf").arg(&archive).arg("-C").arg(dir).args([
                "--strip-components=1",
                "--wildcards",
                "*/tests/*.py",
            ]);
            run_step(&mut tar, log)?;
            fs::remove_file(archive)?;
            Ok(())
        },
    )?;
    if !dir.join("tests/base.py").exists() {
        bail!("the source of {SOURCE} {version} has no tests/base.py");
    }
    Ok(dir)
}

/// The generic modules of the suite.
fn modules(suite: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(suite.join("tests"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(name) = name.strip_suffix(".py") {
            if name.starts_with("test_") && !OTHERS.iter().any(|other| name.starts_with(other)) {
                names.push(name.to_owned());
            }
        }
    }
    names.sort();
    Ok(names)
}

/// Puts the suite into the guest, through the agent.
fn install(vm: &Vm, suite: &Path) -> Result<()> {
    let text = output(&mut shell(&format!(
        "tar -C {} -cJ tests | base64 -w0",
        suite.display()
    )))?;
    vm.sh(&format!("mkdir -p {PLACE} && : >{PLACE}/suite"))?;
    // In pieces that fit in a command line.
    for piece in text.trim().as_bytes().chunks(96 << 10) {
        let piece = std::str::from_utf8(piece)?;
        vm.sh(&format!("cat >>{PLACE}/suite <<'END'\n{piece}\nEND\n"))?;
    }
    vm.sh(&format!(
        "cd {PLACE} && base64 -di suite >suite.tar.xz && python3 -c \
         'import tarfile; tarfile.open(\"suite.tar.xz\").extractall(\".\", filter=\"data\")' && \
         cat >run.py <<'END'\n{RUNNER}\nEND\n"
    ))
    .context("unpacking the suite in the guest")?;
    Ok(())
}

/// The modules that were run by one command, and what each of them said.
fn of_each_module(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let parts = text.split("\n@@ module ").skip(1);
    parts.filter_map(|part| part.split_once('\n'))
}

/// A command that runs a module, or several as [`RUNNER`] takes them, but for the tests that `results` has.
fn command(vm: &Vm, modules: &str, only: &str, results: &BTreeMap<String, Outcome>) -> String {
    let mut done = String::new();
    for test in results.keys() {
        let _ = writeln!(done, "{test}");
    }
    let seconds = TEST_SECONDS * vm.patience();
    format!(
        "cd {PLACE} && cat >done <<'END'\n{done}END\n{DEVICE_AND_GID}\n\
         exec python3 run.py {PLACE} {modules} {PLACE}/done {seconds} \
         '{only}' --dev $dev --port 1 --gid $gid"
    )
}

/// The tests that a module has, as it said.
fn listed(text: &str) -> Vec<String> {
    let lines = lines(text).into_iter().filter(|line| line.what == "list");
    lines.map(|line| line.test.to_owned()).collect()
}

/// Runs all tests of some modules; what a process leaves of its module runs in others.
fn run_modules(vm: &Vm, modules: &[String], results: &mut BTreeMap<String, Outcome>) -> Result<()> {
    let script = command(vm, &format!("{},", modules.join(",")), "", &BTreeMap::new());
    let outcome = vm.run(&script, MODULE * modules.len() as u32)?;
    let said: BTreeMap<&str, &str> = of_each_module(&outcome.out).collect();
    for module in modules {
        let said = said.get(module.as_str()).copied().unwrap_or_default();
        judge(said, &end(said, 30), results);
        let tests = listed(said);
        if tests.is_empty() || tests.iter().any(|test| !results.contains_key(test)) {
            run_module(vm, module, "", results)?;
        }
    }
    Ok(())
}

/// Runs the tests of one module whose names contain `only`, in as many processes as it takes.
fn run_module(
    vm: &Vm,
    module: &str,
    only: &str,
    results: &mut BTreeMap<String, Outcome>,
) -> Result<()> {
    loop {
        let outcome = vm.run(&command(vm, module, only, results), MODULE)?;
        let before = results.len();
        let words = end(&outcome.err, 30);
        let listed = listed(&outcome.out);
        if listed.is_empty() && !only.is_empty() && outcome.ok() {
            return Ok(());
        }
        if listed.is_empty() {
            bail!("{module} did not start:\n{}{}", outcome.out, outcome.err);
        }
        judge(&outcome.out, &words, results);
        let missing = listed.iter().any(|test| !results.contains_key(test));
        if !missing {
            return Ok(());
        }
        if results.len() == before {
            bail!(
                "{module} came to nothing:\n{}{}",
                end(&outcome.out, 30),
                words
            );
        }
    }
}

/// The last lines of a text.
fn end(text: &str, count: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(count)..].join("\n")
}

/// Fetches the suite into the cache.
pub fn prepare() -> Result<()> {
    suite().map(|_| ())
}

/// The list of the project.
fn allowed() -> Result<Skips> {
    Skips::read(SKIPS, " ")
}

/// Makes a guest ready for the suite.
fn set_up(vm: &Vm, suite: &Path) -> Result<()> {
    install(vm, suite)?;
    // Some tests want huge pages.
    vm.sh("echo 24 >/proc/sys/vm/nr_hugepages")?;
    Ok(())
}

/// The whole suite as one of the project's own tests, its modules spread over all machines.
pub fn on_all(cluster: &Cluster) -> Result<()> {
    let allowed = allowed()?;
    let suite = suite()?;
    let left = Mutex::new(modules(&suite)?);
    let results = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| -> Result<()> {
        let machines: Vec<_> = cluster
            .vms
            .iter()
            .map(|vm| {
                scope.spawn(|| -> Result<()> {
                    set_up(vm, &suite)?;
                    loop {
                        let next = {
                            let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
                            let rest = left.len().saturating_sub(BATCH);
                            left.split_off(rest)
                        };
                        if next.is_empty() {
                            break;
                        }
                        let mut of_module = BTreeMap::new();
                        run_modules(vm, &next, &mut of_module)?;
                        results
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .append(&mut of_module);
                    }
                    vm.sh("echo 0 >/proc/sys/vm/nr_hugepages")?;
                    Ok(())
                })
            })
            .collect();
        for machine in machines {
            machine
                .join()
                .map_err(|_| anyhow!("the thread of a machine panicked"))??;
        }
        Ok(())
    })?;
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let summary = summarize(&results, &allowed);
    let mut text = String::new();
    for (test, why) in &summary.failed {
        let _ = writeln!(text, "{test}: {why}");
    }
    for test in &summary.stale {
        let _ = writeln!(text, "{test} passes, but is listed in {SKIPS}: remove it");
    }
    if summary.passed < AT_LEAST {
        let _ = writeln!(text, "{} tests passed, not {AT_LEAST}", summary.passed);
    }
    if !text.is_empty() {
        bail!("{text}");
    }
    println!(
        "          {} passed, {} skipped",
        summary.passed, summary.skipped
    );
    Ok(())
}

/// Runs `check` with the suite's folder in a guest that has the suite.
pub fn with_suite<T>(vm: &Vm, check: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    set_up(vm, &suite()?)?;
    let checked = check(PLACE);
    vm.sh("echo 0 >/proc/sys/vm/nr_hugepages")?;
    checked
}

/// Runs modules of the suite on another device than Ferrite's, in a guest that has the suite ([`with_suite`]). None of
/// their tests may fail; tells which passed and which were skipped.
pub fn of_modules(vm: &Vm, modules: &[&str]) -> Result<[Vec<String>; 2]> {
    let modules: Vec<String> = modules.iter().map(|name| (*name).to_owned()).collect();
    let mut results = BTreeMap::new();
    run_modules(vm, &modules, &mut results)?;
    let mut ended = [Vec::new(), Vec::new()];
    let mut failed = String::new();
    for (test, outcome) in results {
        match outcome {
            Outcome::Passed => ended[0].push(test),
            Outcome::Skipped(_) => ended[1].push(test),
            Outcome::Failed(why) => {
                let _ = writeln!(failed, "{test}: {why}");
            }
        }
    }
    if !failed.is_empty() {
        bail!("{failed}");
    }
    Ok(ended)
}

/// Runs the suite; false when something failed.
pub fn run(options: &Options) -> Result<bool> {
    let allowed = allowed()?;
    let flavour = if options.test_kernel {
        Flavour::Test
    } else {
        Flavour::Stock
    };
    let kernel = kernel::get(flavour)?;
    crate::guest::image()?;
    let suite = suite()?;
    let only = options.filter.as_deref().unwrap_or_default();
    if only.contains(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '.') {
        bail!("names of tests have letters, digits, '_' and '.'");
    }
    let wanted: Vec<String> = modules(&suite)?
        .into_iter()
        // A class or test may be in any module.
        .filter(|module| {
            !only.starts_with("test_")
                || only.contains(module.as_str())
                || module.contains(only.split('.').next().unwrap_or(only))
        })
        .collect();
    if wanted.is_empty() {
        bail!("no module of the suite has that name; tests are named like test_qp.QPTest.test_x");
    }
    let built = if options.no_build {
        crate::artifacts::modules(&crate::artifacts::module_dir(&kernel))?
    } else {
        build(&kernel)?
    };
    let run = RunDir::new()?;
    let cluster = Cluster::boot(
        &run,
        &kernel,
        &ClusterOptions {
            vms: 1,
            cpus: 1,
            ..ClusterOptions::pair("pyverbs", built)
        },
    )?;
    say(&format!(
        "a VM is up; logs: {}",
        outside(cluster.dir()).display()
    ));
    let vm = cluster.vms.first().context("no VM")?;
    vm.sh(LOAD_DRIVER)?;
    wait_active(vm)?;
    set_up(vm, &suite)?;

    let mut results = BTreeMap::new();
    let mut broken = Vec::new();
    for module in &wanted {
        let start = Instant::now();
        let mut of_module = BTreeMap::new();
        if let Err(error) = run_module(vm, module, only, &mut of_module) {
            broken.push((module.clone(), format!("{error:#}")));
        }
        let summary = summarize(&of_module, &allowed);
        println!(
            "  {:<24} {:>3} passed, {} failed, {} skipped ({:.1} s)",
            module,
            summary.passed,
            summary.failed.len(),
            summary.skipped,
            start.elapsed().as_secs_f32()
        );
        results.append(&mut of_module);
        for finding in cluster.new_findings() {
            broken.push((module.clone(), format!("the kernel reported: {finding}")));
        }
    }
    let mut summary = summarize(&results, &allowed);
    summary.failed.append(&mut broken);
    for (test, text) in &summary.failed {
        println!("  FAILED  {test}");
        for line in text.lines() {
            println!("          {line}");
        }
    }
    for test in &summary.stale {
        println!("  {test} passes, but is listed in {SKIPS}: remove it there");
    }
    let reasons = fs::File::create(cluster.dir().join("results.txt"));
    if let Ok(mut file) = reasons {
        use std::io::Write as _;
        for (test, outcome) in &results {
            let _ = match outcome {
                Outcome::Passed => writeln!(file, "pass {test}"),
                Outcome::Skipped(reason) => writeln!(file, "skip {test} {reason}"),
                Outcome::Failed(text) => writeln!(file, "FAIL {test} {text}"),
            };
        }
    }
    println!(
        "{} passed, {} failed, {} skipped",
        summary.passed,
        summary.failed.len(),
        summary.skipped
    );
    Ok(summary.failed.is_empty() && summary.stale.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_that_began_has_one_result() {
        let text = "noise\n@@ list tests.a.B.c \n@@ start tests.a.B.c \n@@ pass tests.a.B.c \n\
                    @@ start tests.a.B.d \nprinted\n@@ skip tests.a.B.d not here\\nreally\n\
                    @@ start tests.a.B.e \n@@ fail tests.a.B.e why\n@@ fail tests.a.B.e again\n\
                    @@ start tests.a.B.f \n";
        let mut results = BTreeMap::new();
        judge(text, "Segmentation fault", &mut results);
        assert_eq!(results["tests.a.B.c"], Outcome::Passed);
        assert_eq!(
            results["tests.a.B.d"],
            Outcome::Skipped("not here\nreally".into())
        );
        assert_eq!(results["tests.a.B.e"], Outcome::Failed("why".into()));
        assert!(
            matches!(&results["tests.a.B.f"], Outcome::Failed(text) if text.contains("Segmentation"))
        );
    }

    #[test]
    fn modules_that_share_a_process_are_told_apart() {
        let text = "noise\n@@ module test_a\n\n@@ list tests.test_a.B.c \nmore\n\n\
                    @@ module test_b\n\n@@ list tests.test_b.B.d \n@@ list tests.test_b.B.e \n";
        let found: Vec<_> = of_each_module(text)
            .map(|(module, said)| (module, listed(said).len()))
            .collect();
        assert_eq!(found, [("test_a", 1), ("test_b", 2)]);
    }

    #[test]
    fn a_crash_after_the_last_result_costs_nothing() {
        let mut results = BTreeMap::new();
        judge(
            "@@ start tests.a.B.c \n@@ pass tests.a.B.c \n",
            "Segmentation fault",
            &mut results,
        );
        assert_eq!(results["tests.a.B.c"], Outcome::Passed);
        assert_eq!(results.len(), 1);
    }

    #[test]
    fn only_listed_skips_are_forgiven() {
        let list = "# why\na.B.c no GPU  # here\n\na.B.d  the same\n";
        let allowed = Skips::parse(list, " ").unwrap();
        assert_eq!(allowed.0["a.B.c"], "no GPU");
        assert!(Skips::parse("a.B.c\n", " ").is_err());
        let results = BTreeMap::from([
            ("tests.a.B.c".to_owned(), Outcome::Skipped("x".into())),
            ("tests.a.B.d".to_owned(), Outcome::Passed),
            ("tests.a.B.e".to_owned(), Outcome::Skipped("x".into())),
        ]);
        let summary = summarize(&results, &allowed);
        assert_eq!((summary.passed, summary.skipped), (1, 1));
        assert_eq!(summary.failed.len(), 1);
        assert_eq!(summary.failed[0].0, "tests.a.B.e");
        assert_eq!(summary.stale, ["tests.a.B.d"]);
    }
}
