// SPDX-License-Identifier: GPL-2.0

//! Raw bindings of the RDMA core.
//!
//! The RDMA types come from this module's own bindgen run; everything else is the kernel crate's,
//! so that types shared with other abstractions are the same types.

#![allow(
    clippy::all,
    clippy::as_underscore,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    improper_ctypes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]
#![cfg_attr(CONFIG_RUSTC_HAS_UNNECESSARY_TRANSMUTES, allow(unnecessary_transmutes))]

pub use kernel::bindings::*;
use kernel::ffi;
use pin_init::{MaybeZeroable, Zeroable};

// SAFETY: A newtype around `Storage`.
unsafe impl<Storage: Zeroable> Zeroable for __BindgenBitfieldUnit<Storage> {}

// SAFETY: A marker without bytes of its own.
unsafe impl<T> Zeroable for __BindgenUnionField<T> {}

include!(env!("RDMA_BINDINGS"));

mod inlines;
pub use inlines::*;
