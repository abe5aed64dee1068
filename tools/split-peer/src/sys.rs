// SPDX-License-Identifier: GPL-2.0
//! Structures, constants and functions of librdmacm and libibverbs.
#![allow(
    missing_docs,
    dead_code,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    unsafe_op_in_unsafe_fn
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
