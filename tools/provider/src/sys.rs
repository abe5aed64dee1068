// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Public structures and constants of libibverbs and of the kernel's uverbs interface.
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    unsafe_op_in_unsafe_fn
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
