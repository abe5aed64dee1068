// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A learning Ethernet switch with faults and capture.
//!
//! The library has no sockets, threads or clocks: the switch is told which
//! frame arrived on which port at what time and hands back what leaves. The
//! `ferrite-fabric` binary puts unix sockets around it. [`framing`] is also
//! what the device process uses for its own ends of such links.

pub mod closer;
pub mod connection;
pub mod console;
pub mod control;
pub mod descriptors;
pub mod fault;
pub mod framing;
pub mod outbox;
pub mod pcap;
pub mod ring;
pub mod shortcut;
pub mod socket;
pub mod switch;
pub mod wake;
