// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The interface between the Ferrite RNIC, its drivers and its user-space provider.
//!
//! The kernel module includes [`abi`](self) as a module of its own crate; every other user links
//! this crate. `Documentation/device/` gives the rules that go with the layouts.
#![no_std]

mod abi;
pub use abi::*;
