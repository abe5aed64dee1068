// SPDX-License-Identifier: GPL-2.0
//! The protocol of the push-push split driver, without a kernel around it.
//!
//! The modules include [`protocol`](self) as a module of their own crates; its tests link this crate.
//! `Documentation/split.md` gives the rules that go with the layouts.
#![no_std]
#![forbid(unsafe_code)]

mod protocol;
pub use protocol::*;
