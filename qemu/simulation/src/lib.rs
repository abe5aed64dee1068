// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Whole networks of Ferrite devices, in one thread and in virtual time.
//!
//! A [`Plan`] is what happens: which devices there are, how their queue pairs are connected, and
//! then a list of [`Step`]s, one after the other: work requests, receives, faults of the network,
//! cables that are cut, devices that stop and come back. It is made from a seed, and the same plan
//! always goes the same way. [`run`] carries it out with the real engine in every device and with
//! the real switch between them, and looks at everything:
//!
//! - Every byte arrives once and in order: receives complete in the order of the sends, each with
//!   what was sent; what is complete does not change any more.
//! - No queue pair is stuck. When the network is well again each work request completes, with
//!   success or with the error that what happened explains; and a connection that is made anew
//!   carries everything.
//! - Atomics are linearizable ([`atomics`]), whoever made them and however often they were sent.
//! - A device reads and writes what it was given, and nothing else of its machine's memory.
//!
//! Of a plan that goes wrong [`shrink::shrink`] finds a short one that still does.

pub mod atomics;
pub mod plan;
mod random;
pub mod shrink;
mod world;

pub use plan::{Connection, End, Kind, Plan, Step};
pub use random::Random;
pub use world::{run, Failure, Sabotage, Seen};
