// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is built from this tree: programs by cargo, the module by Kbuild.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Result};

use crate::kernel::Kernel;
use crate::process::FileLock;
use crate::step::{log_path, run, say};
use crate::{OUT, PROJECT};

/// Where cargo leaves a program.
pub fn program(name: &str) -> PathBuf {
    Path::new(OUT).join("target/release").join(name)
}

/// Cargo in the project, with the output where it belongs (the environment says where). What would make a second build
/// of a changed crate quicker makes the first one slower, and the tests: each crate is compiled in many more parts.
pub fn cargo(subcommand: &str) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(PROJECT).arg(subcommand);
    cargo.env("CARGO_INCREMENTAL", "0");
    cargo
}

/// Builds the programs that run on the host and in the guests.
pub fn build_programs() -> Result<()> {
    // Who comes second finds all of it made.
    let _lock = FileLock::take(&Path::new(OUT).join("programs.lock"))?;
    say("building the device, the fabric, the provider and the guest programs");
    let log = log_path("cargo-build");
    let _ = fs::remove_file(&log);
    let mut cargo = cargo("build");
    cargo.args(["--release", "--workspace", "--exclude", "ferrite-lab"]);
    run(&mut cargo, &log)
}

/// Builds the fabric alone, for VMs without the device.
pub fn build_fabric() -> Result<()> {
    let log = log_path("cargo-build-fabric");
    let _ = fs::remove_file(&log);
    run(
        cargo("build").args(["--release", "-p", "ferrite-fabric"]),
        &log,
    )
}

/// The folder the modules of a kernel are built in.
pub fn module_dir(kernel: &Kernel) -> PathBuf {
    Path::new(OUT).join(format!("module-{}", kernel.flavour.name()))
}

/// A `make` for this tree's modules against a kernel, with its own output folder.
pub fn module_make(kernel: &Kernel, out: &Path) -> Result<Command> {
    fs::create_dir_all(out)?;
    let mut make = kernel.make();
    make.arg(format!("M={PROJECT}"))
        .arg(format!("MO={}", out.display()));
    Ok(make)
}

/// Builds the kernel modules for a kernel; gives the `.ko` files.
pub fn build_modules(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    let out = module_dir(kernel);
    say(&format!("building the module for Linux {}", kernel.release));
    let _lock =
        FileLock::take(&Path::new(OUT).join(format!("module-{}.lock", kernel.flavour.name())))?;
    let log = log_path(&format!("module-{}", kernel.flavour.name()));
    let _ = fs::remove_file(&log);
    run(module_make(kernel, &out)?.arg("modules"), &log)?;
    let found = modules(&out)?;
    if !found.iter().any(|ko| ko.ends_with("ferrite.ko")) {
        bail!("the build left no ferrite.ko in {}", out.display());
    }
    Ok(found)
}

/// The `.ko` files below a folder.
pub fn modules(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|e| e == "ko") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
