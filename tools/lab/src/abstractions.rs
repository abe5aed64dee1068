// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the project demands of the abstractions, which are to serve any driver: that they name none, and that C is
//! there only for what cannot be bound.

use anyhow::{ensure, Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Words that only a driver of one device has a use for.
const DEVICES: &[&str] = &["ferrite", "mlx5", "erdma", "irdma", "efa_", "rxe_"];

/// Exported functions that have a helper, and why: where the kernel is built otherwise they are inlines.
const INLINES_ELSEWHERE: &[(&str, &str)] = &[
    ("__vlan_find_dev_deep_rcu", "without VLANs"),
    ("cpus_read_lock", "without CPU hotplug"),
    ("cpus_read_unlock", "without CPU hotplug"),
    ("get_mem_cgroup_from_mm", "without memory control groups"),
    ("irq_set_affinity", "without SMP"),
    ("irq_set_affinity_notifier", "without SMP"),
    ("pgprot_writecombine", "a macro on some architectures"),
    ("vlan_vid_add", "without VLANs"),
    ("vlan_vid_del", "without VLANs"),
];

/// Fails with what is wrong in `files`, which are those of `rust/`, for a kernel that exports `symbols` (its
/// `Module.symvers`).
pub(crate) fn check(files: &[PathBuf], symbols: &Path) -> Result<()> {
    let symbols =
        fs::read_to_string(symbols).with_context(|| format!("reading {}", symbols.display()))?;
    let exported = exported(&symbols);
    ensure!(!exported.is_empty(), "the kernel exports nothing");
    let mut wrong = Vec::new();
    for file in files {
        let text = fs::read_to_string(file)?;
        for (line, name) in named(&text) {
            wrong.push(format!("{}:{line}: names {name}", file.display()));
        }
        if file.extension().is_some_and(|end| end == "c") {
            for name in needless(&text, &exported) {
                wrong.push(format!("{}: {name} is exported: bind it", file.display()));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The names in `Module.symvers`.
fn exported(symbols: &str) -> BTreeSet<&str> {
    let names = symbols.lines().map(|line| line.split('\t').nth(1));
    names.flatten().collect()
}

/// Where a text names a device.
fn named(text: &str) -> Vec<(usize, &'static str)> {
    let lines = text.lines().map(str::to_lowercase).enumerate();
    lines
        .filter_map(|(at, line)| {
            let name = DEVICES.iter().find(|name| line.contains(**name))?;
            Some((at + 1, *name))
        })
        .collect()
}

/// Helpers of a C file for functions that are exported.
fn needless<'a>(text: &'a str, exported: &BTreeSet<&str>) -> Vec<&'a str> {
    let helpers = text.split("rust_helper_").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        Some(&rest[..end])
    });
    helpers
        .filter(|name| exported.contains(name))
        .filter(|name| !INLINES_ELSEWHERE.iter().any(|(known, _)| known == name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helper_of_what_is_exported_is_needless() {
        let symvers = "0x1\tfree_netdev\tvmlinux\tEXPORT_SYMBOL\t\n\
                       0x2\tcpus_read_lock\tvmlinux\tEXPORT_SYMBOL_GPL\t\n";
        let exported = exported(symvers);
        let helper = |name: &str| format!("void rust_helper_{name}(void)\n{{\n\t{name}();\n}}\n");
        assert_eq!(needless(&helper("free_netdev"), &exported), ["free_netdev"]);
        // Of an inline, and of what is one in other kernels.
        for name in ["dev_hold", "cpus_read_lock", "free_netdev_twice"] {
            assert_eq!(needless(&helper(name), &exported), [""; 0], "{name}");
        }
    }

    #[test]
    fn what_names_a_device_is_found() {
        assert_eq!(
            named("// Of any device.\n// As Ferrite does.\n"),
            [(2, "ferrite")]
        );
        assert_eq!(named("let x = mlx5_av();\n"), [(1, "mlx5")]);
        assert_eq!(named("// What drivers have.\n"), []);
    }
}
