// SPDX-License-Identifier: GPL-2.0

//! The other side of verbs: kernel users of RDMA devices (upper-layer protocols).
//!
//! A [`Client`] is called with every device there is, and every one that comes later. What it makes
//! of a device holds a [`Lease`] of it: the call ends when the last one is gone.
//!
//! Each object keeps what it needs: a region its domain and its memory, a queue pair its domain and its
//! completion queue. Work requests are owned by their queue pair, with the [`Buffer`]s and regions ([`Mr`])
//! that they use, until they complete; dropping a queue pair drains it first. [`Ticket::wait`] tells how one
//! ended. Who forgets an object ([`core::mem::forget`]) loses memory, and a device that cannot be removed, but
//! nothing is freed that somebody may still use.

mod client;
mod device;
mod memory;
mod qp;
mod request;
mod ticket;

pub use self::client::{Client, Registration};
pub use self::device::{Device, Port};
pub use self::memory::{Buffer, Mr};
pub use self::qp::{Peer, Qp, QpLimits};
pub use self::request::{LocalMemory, Op, Outcome, RegMr};
pub use self::ticket::Ticket;
pub use super::consumer::{Cq, Lease, Pd, PollContext};
/// A place in the peer's memory.
pub use super::Remote;
