// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the bindings of the public verbs and rdma_cm headers with the `bindgen` program.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=bindings.h");
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let output = Path::new(&out).join("bindings.rs");
    // The program, not the crate: the build root has it for the kernel's sake already.
    let status = Command::new("bindgen")
        .arg("bindings.h")
        .arg("--output")
        .arg(&output)
        .args(["--default-enum-style", "consts"])
        .args(["--no-prepend-enum-name", "--no-doc-comments"])
        .args([
            "--rust-target",
            "1.82",
            "--use-core",
            "--with-derive-default",
        ])
        .args(["--allowlist-type", "(ibv|rdma)_.*|verbs_context"])
        .args(["--allowlist-var", "(IBV|RDMA)_.*"])
        .args(["--allowlist-function", "(ibv|rdma)_.*"])
        .status()
        .expect("bindgen must be installed (Debian: bindgen, libclang-dev, librdmacm-dev)");
    assert!(status.success(), "bindgen failed");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    println!("cargo::rustc-link-lib=dylib=rdmacm");
}
