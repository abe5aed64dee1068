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
    "e2fsprogs",
    "ethtool",
    "fio",
    "ibverbs-providers",
    "ibverbs-utils",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "ksmbd-tools",
    "less",
    "libfabric-bin",
    "netcat-openbsd",
    "nfs-kernel-server",
    "nvme-cli",
    "open-iscsi",
    "openssh-client",
    "openssh-server",
    "openmpi-bin",
    "pciutils",
    "perftest",
    "procps",
    "psmisc",
    "python3",
    "python3-pyverbs",
    "qperf",
    "rdma-core",
    "rdmacm-utils",
    "strace",
    "ucx-utils",
    "util-linux",
];

/// Files that come with these packages and only serve graphics processors: plugins that are
/// looked for at run time and left out when missing. They would double the image's size, and
/// the programs that load them would start much later.
const EXCLUDED: &[&str] = &[
    "/usr/lib/*/hwloc/*",
    "/usr/lib/*/libLLVM*",
    "/usr/lib/*/libamd_comgr*",
    "/usr/lib/*/libamdhip64*",
    "/usr/lib/*/ucx/*rocm*",
    "/usr/lib/llvm-17/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
];

/// The image of the guests' root, made if need be.
pub fn image() -> Result<PathBuf> {
    let packages = PACKAGES.join(",");
    let excluded = EXCLUDED.join(",");
    let dir = artifact(
        "guest",
        "making the guests' root file system (1 to 2 minutes, once)",
        &[&packages, &excluded, "1"],
        |dir, log| {
            let root = dir.join("root");
            let mut mmdebstrap = Command::new("mmdebstrap");
            mmdebstrap
                .args([
                    "--variant=essential",
                    "--aptopt=Acquire::Languages \"none\"",
                ])
                .args(
                    EXCLUDED
                        .iter()
                        .map(|path| format!("--dpkgopt=path-exclude={path}")),
                )
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
