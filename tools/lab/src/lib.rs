// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab: everything between a bare machine and a tested Ferrite.
//!
//! It runs inside the Debian root that `tools/lab/bootstrap` makes, where the project is at
//! `/ferrite`, the cache at `/cache` and this tree's build output at `/out`.

mod abstractions;
pub mod artifacts;
pub mod bench;
pub mod boots;
pub mod cache;
pub mod cluster;
pub mod demo;
mod documents;
pub mod fuzz;
pub mod guest;
pub mod kernel;
pub mod klog;
pub mod ktap;
pub mod mutants;
pub mod patches;
pub mod payload;
pub mod process;
pub mod protocol;
pub mod pyverbs;
pub mod report;
mod safety;
pub mod shell;
pub mod skips;
pub mod step;
pub mod suite;
pub mod tests;
pub mod traffic;
pub mod vm;

/// Where the project is mounted.
pub const PROJECT: &str = "/ferrite";
/// Where this tree's build output is mounted.
pub const OUT: &str = "/out";
/// Where the cache is mounted.
pub const CACHE: &str = "/cache";
