// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ferrite-lab`: the commands behind the Makefile.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, Result};
use ferrite_lab::kernel::Flavour;
use ferrite_lab::tests::soak;
use ferrite_lab::{bench, boots, demo, fuzz, mutants, patches, process, pyverbs, shell, suite};

const USAGE: &str = "\
usage: ferrite-lab <command> [options]

  prepare [--kernel NAME] make what is cached (guest root, kernels), or only that kernel;
                          kernels are: stock, test, kasan, kcsan
  demo                    two VMs on the stock Debian kernel, pingpong and perftest between
  test  [--stage NAME] [--filter TEXT] [--kernel NAME] [--repeat N] [--lanes N]
                          all checks and tests; ends with 'N passed, N failed'
  test  --long [--stage NAME] [--filter TEXT] [--seeds N] [--lanes N]
                          the long ones: many seeds, 200 boots, and everything in VMs with the
                          address and the data-race sanitiser
  test  --list            names of all tests in VMs; those of the long run are marked
  fuzz  [--minutes N] [--target NAME]
                          what guests, peers and neighbours can say, by libFuzzer: for so long,
                          all targets together; ends with 'N passed, N failed'
  mutants [--minutes N] [--file NAME]
                          change the code in small places for so long, or in this file (several:
                          'one|another'), and see whether the tests notice
  soak  [--minutes N] [--seed N] [--vms N] [--kernel NAME]
                          traffic, kernel users, faults, life-cycle events, little memory and processors
                          that come and go, by seed; looks what grows; ends with 'N passed, N failed'
  pyverbs [--filter TEXT] [--test] [--no-build]
                          rdma-core's own tests on the device; ends with
                          'N passed, N failed, N skipped'
  bench [--rounds N] [--quick] [--profile] [--only PART] [--page] [--no-build]
                          Ferrite beside rxe and siw; writes bench/results.json and
                          bench/report.html. Parts: time, rates, span, moderation, count, control-time,
                          control-counts, storage-nvme, storage-nfs, split-time, split-counts, interface-time,
                          interface-counts, adapter, loopback, scale-objects, scale-qps,
                          scale-streams, scale-regions, handlers, profile; what those that are
                          left out have measured before is kept. With --page nothing is measured: the page
                          is made of the file anew
  shell [--vm N] [--test] [--kernel NAME] [--two-cards]
                          VMs up and a prompt in each; with a virtio-net card beside the device
  try   [--test] [--plain] [--two-cards] [--vms N] [--cpus N] [--no-build] [--no-insmod] [--pcap]
        [--kernel-args TEXT] [--keep] [--] SCRIPT..
                          boot VMs, load the driver, run SCRIPT n in VM n (the last one in all
                          that follow), show the output, the kernel logs' findings, and leave
  boots [--count N] [--vms N] [--cpus N] [--kernel NAME] [--kernel-args TEXT] [--seconds N]
                          boot machines without the device, N at a time, and count which come
                          up; begins no further ones after so many seconds
  patches                 the kernel side as a series of patches to a kernel tree
  clean [--all]           remove build output (or the whole cache)
";

fn value(args: &mut impl Iterator<Item = String>, name: &str) -> Result<String> {
    match args.next() {
        Some(value) => Ok(value),
        None => bail!("{name} needs a value"),
    }
}

fn command(mut args: impl Iterator<Item = String>) -> Result<bool> {
    let Some(command) = args.next() else {
        print!("{USAGE}");
        return Ok(false);
    };
    match command.as_str() {
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(true)
        }
        "prepare" => {
            let mut kernel = None;
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--kernel" => kernel = Some(Flavour::named(&value(&mut args, "--kernel")?)?),
                    other => bail!("prepare: unknown option {other}"),
                }
            }
            match kernel {
                Some(flavour) => {
                    ferrite_lab::kernel::get(flavour)?;
                }
                None => suite::prepare_all()?,
            }
            Ok(true)
        }
        "demo" => {
            demo::run()?;
            Ok(true)
        }
        "test" => {
            let mut options = suite::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--stage" => options.stage = Some(value(&mut args, "--stage")?),
                    "--filter" => options.filter = Some(value(&mut args, "--filter")?),
                    "--list" => options.list = true,
                    "--long" => options.long = true,
                    "--lanes" => options.lanes = Some(value(&mut args, "--lanes")?.parse()?),
                    "--repeat" => options.repeat = Some(value(&mut args, "--repeat")?.parse()?),
                    "--seeds" => options.seeds = Some(value(&mut args, "--seeds")?.parse()?),
                    "--kernel" => {
                        options.kernel = Some(Flavour::named(&value(&mut args, "--kernel")?)?)
                    }
                    other => bail!("test: unknown option {other}"),
                }
            }
            suite::run(&options)
        }
        "fuzz" => {
            let mut options = fuzz::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--minutes" => {
                        options.minutes = Some(value(&mut args, "--minutes")?.parse()?);
                    }
                    "--target" => options.target = Some(value(&mut args, "--target")?),
                    other => bail!("fuzz: unknown option {other}"),
                }
            }
            fuzz::run_command(&options)
        }
        "mutants" => {
            let mut options = mutants::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--minutes" => {
                        options.minutes = Some(value(&mut args, "--minutes")?.parse()?);
                    }
                    "--file" => options.file = Some(value(&mut args, "--file")?),
                    other => bail!("mutants: unknown option {other}"),
                }
            }
            mutants::run_command(&options)
        }
        "soak" => {
            let mut options = soak::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--minutes" => options.minutes = value(&mut args, "--minutes")?.parse()?,
                    "--seed" => options.seed = Some(value(&mut args, "--seed")?.parse()?),
                    "--vms" => options.vms = value(&mut args, "--vms")?.parse()?,
                    "--kernel" => options.flavour = Flavour::named(&value(&mut args, "--kernel")?)?,
                    other => bail!("soak: unknown option {other}"),
                }
            }
            soak::run_command(&options)
        }
        "pyverbs" => {
            let mut options = pyverbs::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--filter" => options.filter = Some(value(&mut args, "--filter")?),
                    "--test" => options.test_kernel = true,
                    "--no-build" => options.no_build = true,
                    other => bail!("pyverbs: unknown option {other}"),
                }
            }
            pyverbs::run(&options)
        }
        "bench" => {
            let mut options = bench::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--rounds" => {
                        options.rounds = Some(value(&mut args, "--rounds")?.parse()?);
                    }
                    "--quick" => options.quick = true,
                    "--profile" => options.profile = true,
                    "--page" => options.page = true,
                    "--no-build" => options.build = false,
                    "--only" => options.only = Some(value(&mut args, "--only")?),
                    other => bail!("bench: unknown option {other}"),
                }
            }
            bench::run(&options)?;
            Ok(true)
        }
        "boots" => {
            let mut options = boots::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--count" => options.count = value(&mut args, "--count")?.parse()?,
                    "--vms" => options.at_a_time = value(&mut args, "--vms")?.parse()?,
                    "--cpus" => options.cpus = value(&mut args, "--cpus")?.parse()?,
                    "--kernel" => options.flavour = Flavour::named(&value(&mut args, "--kernel")?)?,
                    "--kernel-args" => options.kernel_args = value(&mut args, "--kernel-args")?,
                    "--seconds" => {
                        let seconds = value(&mut args, "--seconds")?.parse()?;
                        options.at_most = Some(Duration::from_secs(seconds));
                    }
                    other => bail!("boots: unknown option {other}"),
                }
            }
            boots::run(&options)
        }
        "patches" => {
            if let Some(other) = args.next() {
                bail!("patches: unknown option {other}");
            }
            patches::run()?;
            Ok(true)
        }
        "shell" => {
            let mut options = shell::Options::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--vm" => options.vm = value(&mut args, "--vm")?.parse()?,
                    "--test" => options.flavour = Flavour::Test,
                    "--kernel" => options.flavour = Flavour::named(&value(&mut args, "--kernel")?)?,
                    "--two-cards" => options.two_cards = true,
                    other => bail!("shell: unknown option {other}"),
                }
            }
            shell::run(&options)?;
            Ok(true)
        }
        "try" => {
            let mut options = shell::TryOptions::default();
            while let Some(arg) = args.next() {
                match arg.as_str() {
                    "--test" => options.flavour = Flavour::Test,
                    "--kernel" => options.flavour = Flavour::named(&value(&mut args, "--kernel")?)?,
                    "--plain" => options.plain = true,
                    "--two-cards" => options.two_cards = true,
                    "--vms" => options.vms = value(&mut args, "--vms")?.parse()?,
                    "--cpus" => options.cpus = value(&mut args, "--cpus")?.parse()?,
                    "--no-build" => options.build = false,
                    "--no-insmod" => options.insmod = false,
                    "--pcap" => options.pcap = true,
                    "--keep" => options.keep = true,
                    "--kernel-args" => options.kernel_args = value(&mut args, "--kernel-args")?,
                    "--timeout" => options.timeout_s = value(&mut args, "--timeout")?.parse()?,
                    "--" => {
                        options.scripts.extend(args.by_ref());
                    }
                    other if other.starts_with("--") => bail!("try: unknown option {other}"),
                    script => options.scripts.push(script.to_owned()),
                }
            }
            shell::try_scripts(&options)
        }
        other => bail!("unknown command {other}\n{USAGE}"),
    }
}

fn main() -> ExitCode {
    process::catch_signals();
    match command(std::env::args().skip(1)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ferrite: {error:#}");
            ExitCode::FAILURE
        }
    }
}
