// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Prints the C header of the uverbs interface: `include/uapi/rdma/ferrite-abi.h`.

use ferrite_abi::{Field, Layout};
use std::fmt::Write;

fn main() {
    print!("{}", header());
}

fn header() -> String {
    let mut text = String::from(
        "/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */\n\
         /*\n \
         * Private part of the uverbs commands of Ferrite devices.\n \
         *\n \
         * Generated from include/src/abi/uverbs.rs, which tells what the fields mean. Do not edit.\n \
         */\n\
         #ifndef FERRITE_ABI_H\n\
         #define FERRITE_ABI_H\n\
         \n\
         #include <linux/types.h>\n\
         \n",
    );
    define(
        &mut text,
        "FERRITE_UVERBS_ABI_VERSION",
        ferrite_abi::UVERBS_ABI_VERSION,
    );
    for (name, value) in [
        (
            "CONTEXT_QUERY_RESPONSE",
            ferrite_abi::UVERBS_CONTEXT_QUERY_RESPONSE,
        ),
        (
            "CONTEXT_QUERY_CLOCK",
            ferrite_abi::UVERBS_CONTEXT_QUERY_CLOCK,
        ),
        (
            "CONTEXT_QUERY_CLOCK_NOW",
            ferrite_abi::UVERBS_CONTEXT_QUERY_CLOCK_NOW,
        ),
        ("PD_QUERY", ferrite_abi::UVERBS_PD_QUERY),
        ("PD_QUERY_HANDLE", ferrite_abi::UVERBS_PD_QUERY_HANDLE),
        ("DM_ALLOC_OFFSET", ferrite_abi::UVERBS_DM_ALLOC_OFFSET),
        ("DM_QUERY", ferrite_abi::UVERBS_DM_QUERY),
        ("DM_QUERY_HANDLE", ferrite_abi::UVERBS_DM_QUERY_HANDLE),
        ("DM_QUERY_OFFSET", ferrite_abi::UVERBS_DM_QUERY_OFFSET),
        ("DM_QUERY_LENGTH", ferrite_abi::UVERBS_DM_QUERY_LENGTH),
        ("CQ_MOVE", ferrite_abi::UVERBS_CQ_MOVE),
        ("CQ_MOVE_HANDLE", ferrite_abi::UVERBS_CQ_MOVE_HANDLE),
        ("CQ_MOVE_VECTOR", ferrite_abi::UVERBS_CQ_MOVE_VECTOR),
        ("CQ_QUERY", ferrite_abi::UVERBS_CQ_QUERY),
        ("CQ_QUERY_HANDLE", ferrite_abi::UVERBS_CQ_QUERY_HANDLE),
        ("CQ_QUERY_VECTOR", ferrite_abi::UVERBS_CQ_QUERY_VECTOR),
        ("VECTOR_MODIFY", ferrite_abi::UVERBS_VECTOR_MODIFY),
        (
            "VECTOR_MODIFY_VECTOR",
            ferrite_abi::UVERBS_VECTOR_MODIFY_VECTOR,
        ),
        (
            "VECTOR_MODIFY_PRIORITY",
            ferrite_abi::UVERBS_VECTOR_MODIFY_PRIORITY,
        ),
        ("VECTOR_QUERY", ferrite_abi::UVERBS_VECTOR_QUERY),
        (
            "VECTOR_QUERY_VECTOR",
            ferrite_abi::UVERBS_VECTOR_QUERY_VECTOR,
        ),
        (
            "VECTOR_QUERY_PRIORITY",
            ferrite_abi::UVERBS_VECTOR_QUERY_PRIORITY,
        ),
        ("CQ_VECTOR_LOCAL", ferrite_abi::UVERBS_CQ_VECTOR_LOCAL),
        ("CQ_VECTOR_NONE", ferrite_abi::UVERBS_CQ_VECTOR_NONE),
        ("QP_LISTS", ferrite_abi::UVERBS_QP_LISTS.into()),
        (
            "QP_REGISTER_DRAINS",
            ferrite_abi::UVERBS_QP_REGISTER_DRAINS.into(),
        ),
        (
            "QP_WINDOWS_ONLY",
            ferrite_abi::UVERBS_QP_WINDOWS_ONLY.into(),
        ),
        ("MR_LIST", ferrite_abi::UVERBS_MR_LIST),
        ("MR_SHARED", ferrite_abi::UVERBS_MR_SHARED),
    ] {
        define(&mut text, &format!("FERRITE_{name}"), value);
    }
    structure::<ferrite_abi::UverbsContextRequest>(&mut text);
    structure::<ferrite_abi::UverbsContextResponse>(&mut text);
    structure::<ferrite_abi::UverbsPdResponse>(&mut text);
    structure::<ferrite_abi::UverbsCqRequest>(&mut text);
    structure::<ferrite_abi::UverbsCqResponse>(&mut text);
    structure::<ferrite_abi::UverbsQpRequest>(&mut text);
    structure::<ferrite_abi::UverbsHashRequest>(&mut text);
    structure::<ferrite_abi::UverbsWqRequest>(&mut text);
    structure::<ferrite_abi::UverbsQpResponse>(&mut text);
    structure::<ferrite_abi::UverbsMrRequest>(&mut text);
    structure::<ferrite_abi::UverbsSrqRequest>(&mut text);
    structure::<ferrite_abi::UverbsSrqResponse>(&mut text);
    text.push_str("\n#endif /* FERRITE_ABI_H */\n");
    text
}

fn define(text: &mut String, name: &str, value: u32) {
    // What is larger than C's `int` says that it is unsigned.
    let value = match i32::try_from(value) {
        Ok(value) => value.to_string(),
        Err(_) => format!("{value:#x}U"),
    };
    writeln!(text, "#define {name} {value}").expect("writing to a string");
}

/// Adds a structure.
fn structure<L: Layout>(text: &mut String) {
    let name = c_name(L::NAME);
    writeln!(text, "\nstruct {name} {{").expect("writing to a string");
    for field in L::FIELDS {
        writeln!(text, "\t{};", declaration(field)).expect("writing to a string");
    }
    text.push_str("};\n");
}

/// `UverbsQpRequest` is `ferrite_qp_request` in C.
fn c_name(name: &str) -> String {
    let mut result = String::from("ferrite");
    for character in name.strip_prefix("Uverbs").unwrap_or(name).chars() {
        if character.is_ascii_uppercase() {
            result.push('_');
        }
        result.push(character.to_ascii_lowercase());
    }
    result
}

fn declaration(field: &Field) -> String {
    let (element, length) = match field.ty.strip_prefix('[') {
        Some(array) => {
            let array = array.trim_end_matches(']');
            let (element, length) = array.split_once(';').expect("an array has a length");
            (element.trim(), format!("[{}]", length.trim()))
        }
        None => (field.ty, String::new()),
    };
    let element = match element {
        "u8" => "__u8",
        "u16" => "__u16",
        "u32" => "__u32",
        "u64" => "__aligned_u64",
        other => panic!("{}: no C type for {other}", field.name),
    };
    format!("{element} {}{length}", field.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_all_that_both_sides_know() {
        let (header, source) = (header(), include_str!("../abi/uverbs.rs"));
        for line in source.lines() {
            if let Some(constant) = line.strip_prefix("pub const ") {
                let name = constant.split(':').next().unwrap_or_default();
                let name = match name.strip_prefix("UVERBS_") {
                    Some("ABI_VERSION") => "FERRITE_UVERBS_ABI_VERSION".to_owned(),
                    Some(name) => format!("FERRITE_{name}"),
                    None => panic!("{name} is of another kind"),
                };
                assert!(header.contains(&format!("#define {name} ")), "{name}");
            }
            if let Some(name) = line.trim_start().strip_prefix("pub struct ") {
                let name = c_name(name.split(':').next().unwrap_or_default());
                assert!(header.contains(&format!("struct {name} {{")), "{name}");
            }
        }
    }
}
