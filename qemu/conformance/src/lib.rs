// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A conformance test of the device specification.
//!
//! It drives any Ferrite device over vfio-user as a guest would, without a virtual machine and
//! without knowing how the device is made: [`transport`] speaks with it, [`memory`] is the host's,
//! [`host`] brings it up and gives commands, [`rings`] are the queues of a driver, [`wire`] and
//! [`packet`] are its neighbour. [`checks`] has one check for each requirement that the chapters of
//! `Documentation/device` number; [`requirements`] reads those numbers out of the text, so that none
//! is forgotten, and [`report`] says what came of each.

pub mod checks;
pub mod host;
pub mod memory;
pub mod outcome;
pub mod packet;
pub mod process;
pub mod report;
pub mod requirements;
pub mod rings;
pub mod run;
pub mod transport;
pub mod wire;
pub mod work;
