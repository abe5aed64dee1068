// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guests' root file system: plain Debian, never written to (each VM has its own overlay).

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::cache::artifact;
use crate::kernel::ext4_image;
use crate::step::run;

/// What a guest has beyond Debian's essential packages.
const PACKAGES: &[&str] = &[
    "bash",
    "ethtool",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "iputils-ping",
    "kmod",
    "less",
    "netcat-openbsd",
    "pciutils",
    "perftest",
    "procps",
    "psmisc",
    "python3-minimal",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "strace",
    "util-linux",
];

/// The image of the guests' root, made if need be.
pub fn image() -> Result<PathBuf> {
    let packages = PACKAGES.join(",");
    let dir = artifact(
        "guest",
        "making the guests' root file system (1 to 2 minutes, once)",
        &[&packages, "1"],
        |dir, log| {
            let root = dir.join("root");
            let mut mmdebstrap = Command::new("mmdebstrap");
            mmdebstrap
                .args([
                    "--variant=essential",
                    "--aptopt=Acquire::Languages \"none\"",
                ])
                .arg("--dpkgopt=path-exclude=/usr/share/man/*")
                .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
                .arg("--dpkgopt=force-unsafe-io")
                .arg(format!("--include={packages}"))
                .arg("trixie")
                .arg(&root)
                .arg("/etc/apt/sources.list");
            run(&mut mmdebstrap, log)?;
            for folder in ["ferrite", "lib/modules", "sys/kernel/debug"] {
                std::fs::create_dir_all(root.join(folder))?;
            }
            ext4_image(&root, &dir.join("root.img"), 256, log)?;
            std::fs::remove_dir_all(&root)?;
            Ok(())
        },
    )?;
    Ok(dir.join("root.img"))
}
