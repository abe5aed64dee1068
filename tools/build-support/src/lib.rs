// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the build scripts of the provider and of the programs that call verbs have in common: the
//! bindings of a C header, made with the `bindgen` program.

use std::path::Path;
use std::process::Command;

/// What of a header a crate wants, each a regular expression of `bindgen`'s.
pub struct Wanted<'a> {
    /// Names of types.
    pub types: &'a str,
    /// Names of constants.
    pub constants: &'a str,
    /// Names of functions.
    pub functions: &'a str,
    /// The libraries that have the functions.
    pub libraries: &'a [&'a str],
}

/// Makes `bindings.rs` in the build's output folder of the `bindings.h` beside the build script, and
/// links the libraries.
///
/// # Panics
///
/// If there is no `bindgen`, or it fails: a build script has no better way to say so.
pub fn bind(wanted: &Wanted<'_>) {
    println!("cargo::rerun-if-changed=bindings.h");
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    // The program, not the crate: the build root has it for the kernel's sake already.
    let status = Command::new("bindgen")
        .arg("bindings.h")
        .arg("--output")
        .arg(Path::new(&out).join("bindings.rs"))
        .args(["--default-enum-style", "consts", "--no-prepend-enum-name"])
        .args(["--rust-target", "1.82", "--use-core"])
        .args(["--no-doc-comments", "--with-derive-default"])
        .args(["--allowlist-type", wanted.types])
        .args(["--allowlist-var", wanted.constants])
        .args(["--allowlist-function", wanted.functions])
        .status()
        .expect("bindgen must be installed (Debian: bindgen, libclang-dev, librdmacm-dev)");
    assert!(status.success(), "bindgen failed");
    for library in wanted.libraries {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
}
