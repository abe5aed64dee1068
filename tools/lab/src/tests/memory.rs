// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What programs do with memory beyond registering it, and every check that stands before an access.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};

use super::basics::{alone, verbs_check, verbs_check_within};
use super::{nothing_left, still_works, wire, VmTest};
use crate::cluster::Cluster;

/// Between two machines.
pub const BETWEEN: &[VmTest] = &[
    VmTest::new(
        "each access check, broken alone, has its status and its number, and no byte moves",
        |c| verbs_check(c, "access"),
    ),
    VmTest::new(
        "lists of pieces of regions: reached by peers and here, used before they are complete, refused, ended",
        |c| verbs_check(c, "lists"),
    ),
    VmTest::new(
        "a registration that fails drains the send queue, whatever the cause; mended, the program goes on",
        |c| verbs_check(c, "drains"),
    ),
    VmTest::new(
        "a window or list of one touch takes one message, and no second one",
        |c| verbs_check(c, "one-touch"),
    ),
    VmTest::new(
        "regions share memory: own domain, rights and end, the same bytes, pinned once",
        |c| verbs_check(c, "shared"),
    ),
    VmTest::new(
        "regions that share memory have one table of pages, others their own",
        one_table,
    ),
    VmTest::new(
        "lists, windows and shared memory leave nothing behind",
        nothing_is_left,
    ),
];

/// Within one machine: both ends in one process, on one port.
pub const WITHIN: &[VmTest] = &[
    VmTest::new(
        "after deregistration no access comes, whatever is under way",
        |c| alone(c, "dereg"),
    ),
    VmTest::new(
        "each access check, broken alone, has its status and its number, and no byte moves",
        |c| within(c, "access"),
    ),
    VmTest::new(
        "lists of pieces of regions: reached, used before they are complete, refused, ended",
        |c| within(c, "lists"),
    ),
    VmTest::new(
        "a registration that fails drains the send queue, whatever the cause",
        |c| within(c, "drains"),
    ),
    VmTest::new("a window or list of one touch takes one message", |c| {
        within(c, "one-touch")
    }),
    VmTest::new(
        "regions share memory: own domain, rights and end, the same bytes, pinned once",
        |c| within(c, "shared"),
    ),
    VmTest::new(
        "lists, windows and shared memory leave nothing behind",
        nothing_is_left,
    ),
];

/// Over a wire that is no good.
pub const WIRE: &[VmTest] = &[VmTest::new(
    "frames lost, doubled and reordered are no second touch",
    touches_over_a_bad_wire,
)];

fn within(cluster: &Cluster, case: &str) -> Result<()> {
    let (one, _) = cluster.two()?;
    verbs_check_within(one, case)
}

fn touches_over_a_bad_wire(cluster: &Cluster) -> Result<()> {
    cluster.fabric_command(&json!({
        "cmd": "faults", "only": "roce",
        "loss": 0.01, "duplicate": 0.05, "reorder": 0.05,
    }))?;
    let result = || -> Result<()> {
        verbs_check(cluster, "touches")?;
        let stats = cluster.fabric_command(&json!({"cmd": "stats"}))?;
        for fault in ["lost", "duplicated", "reordered"] {
            ensure!(
                wire::counted(&stats, fault) > 0,
                "nothing was {fault}: {stats}"
            );
        }
        Ok(())
    }();
    cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
    result?;
    still_works(cluster)
}

/// How many regions share the memory of another.
const SHARES: usize = 5;

/// Has a program make a region of 16 KiB, one more of the same memory that is registered anew, and
/// others that share the first one's; shows what the kernel tells of them, before and after.
fn shown() -> String {
    format!(
        "set -e
         rm -f /tmp/input /tmp/output
         mkfifo /tmp/input
         verbs-check hold --count {SHARES} </tmp/input >/tmp/output &
         exec 9>/tmp/input
         until [ -s /tmp/output ]; do sleep 0.1; kill -0 $!; done
         rdma -dd -j resource show mr
         exec 9>&-
         wait $!
         echo
         rdma -dd -j resource show mr"
    )
}

/// Fails if the driver adds anything to what everybody is shown of a region by which its key could be guessed, such as
/// the index of its tag. The core shows keys to administrators alone.
fn says_nothing_of_its_key(region: &Value) -> Result<()> {
    const SHOWN: [&str; 4] = [
        "drv_page_size",
        "drv_registration",
        "drv_table",
        "drv_translations",
    ];
    let fields = region.as_object().into_iter().flatten();
    let mut added = fields.filter(|(name, _)| name.starts_with("drv_"));
    ensure!(
        added.all(|(name, _)| SHOWN.contains(&name.as_str())),
        "{region}"
    );
    Ok(())
}

/// Each region has the number of its table, by which tables are counted.
fn one_table(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = one.sh_in(&shown(), Duration::from_secs(120))?;
    let mut reports = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    let mut tables = || -> Result<BTreeMap<i64, usize>> {
        let report = reports.next().context("no report")??;
        let mut tables = BTreeMap::new();
        for region in report.as_array().into_iter().flatten() {
            if region["mrlen"].as_u64() == Some(16 << 10) {
                says_nothing_of_its_key(region)?;
                // The tool shows the lower half of it, as a number with a sign.
                let table = region["drv_table"].as_i64();
                let table = table.with_context(|| format!("no table in {region}"))?;
                *tables.entry(table).or_default() += 1;
            }
        }
        Ok(tables)
    };
    let mut regions: Vec<usize> = tables()?.into_values().collect();
    regions.sort_unstable();
    ensure!(
        regions == [1, SHARES + 1],
        "regions by table: {regions:?}\n{text}"
    );
    let left = tables()?;
    ensure!(left.is_empty(), "tables that are left: {left:?}\n{text}");
    Ok(())
}

fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        nothing_left(vm)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    /// A case that no test runs proves nothing.
    #[test]
    fn every_case_of_verbs_check_is_run() {
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let cases = std::fs::read_to_string(tools.join("verbs-check/src/checks.rs")).unwrap();
        let names: BTreeSet<&str> = cases
            .lines()
            .filter_map(|line| line.trim().strip_prefix("name: \"")?.strip_suffix("\","))
            .collect();
        assert!(names.contains("atomics") && names.len() > 8, "{names:?}");
        let mut run = String::new();
        for file in std::fs::read_dir(tools.join("lab/src/tests")).unwrap() {
            run += &std::fs::read_to_string(file.unwrap().path()).unwrap();
        }
        let left_out: Vec<_> = names
            .into_iter()
            // As the last argument of what runs it on machines.
            .filter(|name| !run.contains(&format!(", \"{name}\")")))
            .collect();
        assert_eq!(left_out, [""; 0], "no test runs them");
    }
}
