// SPDX-License-Identifier: GPL-2.0

//! What host and I/O unit of the split driver say to each other, and when: `Documentation/split.md`.
//!
//! There is no I/O here, no clock and no allocation. An [`Endpoint`] is told what arrived and what was
//! sent, and says what is to be sent; the memory of its tables is its owner's. Nothing that a peer can
//! say makes it panic: what is wrong is a [`Violation`], with a counter, after which it does nothing
//! more until it is [started](Endpoint::start) on a new connection.

#[macro_use]
mod layout;

mod endpoint;
mod message;
mod pool;
mod violation;
mod wire;

pub use endpoint::*;
pub use layout::*;
pub use message::*;
pub use pool::*;
pub use violation::*;
pub use wire::*;
