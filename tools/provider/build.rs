// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Makes the bindings of the public verbs headers with the `bindgen` program.

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
        .args(["--allowlist-type", "(ibv|verbs|ib_uverbs|uverbs)_.*"])
        .args(["--allowlist-var", "(IBV|IB|UVERBS)_.*"])
        .args(["--allowlist-function", "ibv_resolve_eth_l2_from_gid"])
        .args(["--allowlist-function", "_ibv_query_gid_ex"])
        .args(["--allowlist-function", "ibv_query_qp_data_in_order"])
        .status()
        .expect("bindgen must be installed (Debian: bindgen, libclang-dev, libibverbs-dev)");
    assert!(status.success(), "bindgen failed");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    // Programs that call what is in ferritedv.h are linked with it by this name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libferrite.so.1");
}
