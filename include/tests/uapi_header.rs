// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The C header of the uverbs interface says the same as the Rust definitions.

use ferrite_abi::{Layout, Plain};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/uapi/rdma/ferrite-abi.h");

#[test]
fn the_committed_header_is_the_generated_one() {
    let output = Command::new(env!("CARGO_BIN_EXE_uapi-header"))
        .output()
        .expect("the generator runs");
    assert!(output.status.success());
    let generated = String::from_utf8(output.stdout).expect("the header is text");
    let committed = std::fs::read_to_string(HEADER).expect("the header is there");
    assert!(
        generated == committed,
        "{HEADER} is out of date; write it anew with\n\
         cargo run -p ferrite-abi --bin uapi-header > include/uapi/rdma/ferrite-abi.h"
    );
}

#[test]
fn no_structure_is_left_out_of_the_header() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/abi/uverbs.rs");
    let source = std::fs::read_to_string(source).expect("the source is there");
    let header = std::fs::read_to_string(HEADER).expect("the header is there");
    assert_eq!(
        source.matches("pub struct Uverbs").count(),
        header.matches("\nstruct ferrite_").count()
    );
}

/// Adds C assertions for a structure.
fn check<L: Layout + Plain>(program: &mut String, c_name: &str) {
    let size = size_of::<L>();
    writeln!(
        program,
        "_Static_assert(sizeof(struct {c_name}) == {size}, \"size of {c_name}\");"
    )
    .expect("writing to a string");
    for field in L::FIELDS {
        let (name, offset) = (field.name, field.offset);
        writeln!(
            program,
            "_Static_assert(offsetof(struct {c_name}, {name}) == {offset}, \"{c_name}.{name}\");"
        )
        .expect("writing to a string");
    }
}

#[test]
fn a_c_compiler_lays_the_structures_out_alike() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("no C compiler here, nothing checked");
        return;
    }
    let mut program = format!("#include <stddef.h>\n#include \"{HEADER}\"\n");
    check::<ferrite_abi::UverbsContextRequest>(&mut program, "ferrite_context_request");
    check::<ferrite_abi::UverbsContextResponse>(&mut program, "ferrite_context_response");
    check::<ferrite_abi::UverbsPdResponse>(&mut program, "ferrite_pd_response");
    check::<ferrite_abi::UverbsCqRequest>(&mut program, "ferrite_cq_request");
    check::<ferrite_abi::UverbsCqResponse>(&mut program, "ferrite_cq_response");
    check::<ferrite_abi::UverbsQpRequest>(&mut program, "ferrite_qp_request");
    check::<ferrite_abi::UverbsQpResponse>(&mut program, "ferrite_qp_response");
    check::<ferrite_abi::UverbsSrqRequest>(&mut program, "ferrite_srq_request");
    check::<ferrite_abi::UverbsSrqResponse>(&mut program, "ferrite_srq_response");
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = directory.join("uapi_header.c");
    std::fs::write(&source, program).expect("the program is written");
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Werror", "-c", "-o"])
        .arg(directory.join("uapi_header.o"))
        .arg(&source)
        .output()
        .expect("the compiler runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
