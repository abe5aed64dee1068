// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is not a message: registrations and connections. How many a second, what they take in instructions,
//! and what their time goes into.
//!
//! The last is what the kernel's function graph tells of a few functions, below system calls of the
//! program's only. Functions of Rust have no place for it to begin at, so that what a driver in Rust does
//! itself is in the rest.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::machines::{Driver, Machines, Serving};
use super::{count_one, time_group, Counts, Group, Plan, Run};
use crate::process::check_interrupted;

/// Its parts: what is timed, and what is counted.
pub const PARTS: [&str; 2] = ["control-time", "control-counts"];

const PATIENCE: Duration = Duration::from_secs(120);

/// Sizes of regions that are registered.
const SIZES: [u64; 2] = [4 << 10, 1 << 20];

/// A round of all drivers: how many a second.
pub fn time_round(serving: &mut Serving<'_>, plan: &Plan, run: &mut Run) -> Result<()> {
    let regions = SIZES.map(|size| format!("reg:{size}")).join(" ");
    for arguments in [regions, "connect:0".to_owned()] {
        for driver in Driver::ALL {
            run.progress(&format!("{}: {arguments}", driver.name()));
            let group = Group {
                what: arguments.clone(),
                arguments: arguments.clone(),
                rename: None,
                way: Some("spin"),
                is_tried_once: false,
            };
            time_group(serving, driver, &group, plan.control_milliseconds, run)?;
        }
    }
    Ok(())
}

/// A round of all drivers: instructions and what the device counts. Gives a table of the functions that the
/// instructions are in, where these are counted.
pub fn count_round<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    plan: &Plan,
    run: &mut Run,
) -> Result<String> {
    let mut tables = String::new();
    let [registrations, connections] = plan.control_counts;
    let regions = SIZES.map(|size| Counts {
        name: "registrations",
        test: "reg",
        size,
        count: registrations,
    });
    let connections = Counts {
        name: "connections",
        test: "connect",
        size: 0,
        count: connections,
    };
    for counts in regions.into_iter().chain([connections]) {
        for driver in Driver::ALL {
            check_interrupted()?;
            if let Err(error) = count_one(machines, serving, driver, &counts, run) {
                run.miss(&format!("{} {} counts", driver.name(), counts.name), &error);
                continue;
            }
            if let Some(functions) = machines.functions()? {
                let what = format!("{} of {}", counts.name, driver.name());
                let _ = writeln!(tables, "{what}, {} B: instructions of one", counts.size);
                functions.write(counts.count, &mut tables);
            }
        }
    }
    Ok(tables)
}

/// System calls that all of it is below.
const ENTRIES: [&str; 3] = ["ib_uverbs_ioctl", "ib_uverbs_write", "ucma_write"];

/// Functions whose time is a part of something.
struct Part {
    name: &'static str,
    functions: &'static [&'static str],
}

const PIN: Part = Part {
    name: "pin",
    functions: &["ib_umem_get_desc", "ib_umem_release"],
};
const TABLES: Part = Part {
    name: "tables",
    functions: &["dma_alloc_attrs", "dma_free_attrs"],
};
const WAIT: Part = Part {
    name: "wait",
    functions: &[
        "wait_for_completion",
        "wait_for_completion_timeout",
        "wait_for_completion_killable_timeout",
        "wait_for_completion_interruptible_timeout",
    ],
};
const EVENTS: Part = Part {
    name: "events",
    functions: &["ucma_get_event"],
};

/// What is looked at.
struct Split {
    test: &'static str,
    arguments: &'static str,
    size: u64,
    /// Called once for each.
    once: &'static str,
    parts: &'static [&'static Part],
}

const SPLITS: [Split; 3] = [
    Split {
        test: "registrations",
        arguments: "reg:4096",
        size: 4 << 10,
        once: "ib_umem_get_desc",
        parts: &[&PIN, &TABLES, &WAIT],
    },
    Split {
        test: "registrations",
        arguments: "reg:1048576",
        size: 1 << 20,
        once: "ib_umem_get_desc",
        parts: &[&PIN, &TABLES, &WAIT],
    },
    Split {
        test: "connections",
        arguments: "connect:0",
        size: 0,
        once: "ucma_connect",
        parts: &[&PIN, &TABLES, &WAIT, &EVENTS],
    },
];

/// Lines of the graph that are looked at, the last ones.
const LINES: usize = 6000;

/// Calls, and microseconds of all of them, by function.
fn durations(graph: &str) -> BTreeMap<&str, (u64, f64)> {
    let mut all: BTreeMap<&str, (u64, f64)> = BTreeMap::new();
    for line in graph.lines() {
        // Where a call begins there is no time; where it ends its name stands in a comment.
        let Some((time, call)) = line.split_once('|') else {
            continue;
        };
        let mut words = time.split_whitespace().rev();
        let (Some("us"), Some(Ok(time))) = (words.next(), words.next().map(str::parse::<f64>))
        else {
            continue;
        };
        let call = call.trim().trim_start_matches("} /* ");
        let name = call.split([' ', '(', ';']).next().unwrap_or_default();
        let sum = all.entry(name).or_default();
        sum.0 += 1;
        sum.1 += time;
    }
    all
}

/// Microseconds of each part for one of what is done, by the part's name; of all system calls, and of what
/// is in no part, at last.
fn parts(split: &Split, graph: &str) -> Result<Vec<(String, f64)>> {
    let all = durations(graph);
    let time = |names: &[&str]| -> f64 {
        names
            .iter()
            .filter_map(|name| all.get(name))
            .map(|(_, time)| time)
            .sum()
    };
    let count = all.get(split.once).map_or(0, |(count, _)| *count) as f64;
    ensure!(count > 0.0, "{} was not seen", split.once);
    let mut found = Vec::new();
    let mut rest = time(&ENTRIES);
    let whole = rest;
    for part in split.parts {
        let time = time(part.functions);
        rest -= time;
        found.push((format!("us_{}", part.name), time / count));
    }
    found.push(("us_calls".to_owned(), whole / count));
    found.push(("us_rest".to_owned(), rest.max(0.0) / count));
    Ok(found)
}

/// What the time goes into, of all drivers.
pub fn split_round<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    run: &mut Run,
) -> Result<()> {
    for split in &SPLITS {
        for driver in Driver::ALL {
            check_interrupted()?;
            run.progress(&format!("what {} of {} are", split.test, driver.name()));
            let graph = traced(machines, serving, driver, split);
            match graph.and_then(|graph| parts(split, &graph)) {
                Ok(found) => {
                    for (name, value) in found {
                        let test = format!("{}_{name}", split.test);
                        let key = (split.size, 1);
                        run.results.add(driver, &test, key, ("us", false), value);
                    }
                }
                Err(error) => {
                    run.miss(
                        &format!("{} {} in parts", driver.name(), split.test),
                        &error,
                    );
                }
            }
        }
    }
    Ok(())
}

fn traced<'m>(
    machines: &'m Machines,
    serving: &mut Serving<'m>,
    driver: Driver,
    split: &Split,
) -> Result<String> {
    let client = machines.client()?;
    let parts = split.parts.iter().flat_map(|part| part.functions);
    let functions: Vec<&str> = parts
        .chain(&ENTRIES)
        .chain([&split.once])
        .copied()
        .collect();
    // Not every function is there with every kernel.
    client.sh_in(
        &format!(
            "mountpoint -q /sys/kernel/tracing || mount -t tracefs none /sys/kernel/tracing
             set -e; cd /sys/kernel/tracing
             echo 0 >tracing_on; echo nop >current_tracer; : >set_ftrace_filter; : >set_graph_function
             for f in {}; do echo $f >>set_ftrace_filter || true; done 2>/dev/null
             for f in {}; do echo $f >>set_graph_function || true; done 2>/dev/null
             echo function_graph >current_tracer
             echo 1 >options/funcgraph-tail
             : >trace; echo 1 >tracing_on",
            functions.join(" "),
            ENTRIES.join(" ")
        ),
        PATIENCE,
    )?;
    let measured = serving.measure(
        driver,
        &format!("--ms 60 --wait spin {}", split.arguments),
        PATIENCE,
    );
    let graph = client.sh_in(
        &format!(
            "cd /sys/kernel/tracing; echo 0 >tracing_on
             grep '|' trace | tail -n {LINES}
             echo nop >current_tracer; : >set_ftrace_filter; : >set_graph_function"
        ),
        PATIENCE,
    )?;
    measured.context("while it was traced")?;
    Ok(graph)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPH: &str = "# CPU  DURATION                  FUNCTION CALLS
# |     |   |                     |   |   |   |
 0)               |  ib_uverbs_ioctl [ib_uverbs]() {
 0)   5.500 us    |    ib_umem_get_desc [ib_uverbs]();
 0) + 20.000 us   |    wait_for_completion_timeout();
 0) + 40.000 us   |  } /* ib_uverbs_ioctl [ib_uverbs] */
 0)               |  ib_uverbs_ioctl [ib_uverbs]() {
 0)   4.500 us    |    ib_umem_release [ib_uverbs]();
 0) ! 110.000 us  |  } /* ib_uverbs_ioctl [ib_uverbs] */
";

    #[test]
    fn a_graph_is_told_in_parts() {
        let all = durations(GRAPH);
        assert_eq!(all["ib_uverbs_ioctl"], (2, 150.0));
        assert_eq!(all["wait_for_completion_timeout"], (1, 20.0));
        let found: BTreeMap<_, _> = parts(&SPLITS[0], GRAPH)
            .expect("parts")
            .into_iter()
            .collect();
        let wanted = [
            ("us_calls", 150.0),
            ("us_pin", 10.0),
            ("us_rest", 120.0),
            ("us_tables", 0.0),
            ("us_wait", 20.0),
        ];
        assert_eq!(
            found,
            wanted.map(|(name, time)| (name.to_owned(), time)).into()
        );
    }

    #[test]
    fn a_graph_of_nothing_is_an_error() {
        assert!(parts(&SPLITS[2], GRAPH).is_err());
        assert!(parts(&SPLITS[0], "").is_err());
    }
}
