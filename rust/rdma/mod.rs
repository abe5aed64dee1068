// SPDX-License-Identifier: GPL-2.0

//! Abstractions of the RDMA core, for drivers of RDMA devices.
//!
//! A driver implements [`Driver`], and the traits of what its device has, for the type of its
//! per-device data, makes an [`Unregistered`] device and registers it. From then on the core calls the driver's operations with typed
//! references to verbs objects: each [`Object`] is the core's structure with the driver's own data
//! behind it.
//!
//! C headers: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h),
//! [`include/rdma/ib_umem.h`](srctree/include/rdma/ib_umem.h).

#[macro_use]
mod macros;

mod address;
mod ah;
pub mod consumer;
mod counters;
mod cq;
mod device;
mod dm;
mod driver;
mod event;
mod extension;
mod flow;
mod hold;
mod memory;
mod method;
mod mw;
mod netdev;
mod object;
mod odp;
mod ops;
mod pd;
mod port;
mod print;
mod qp;
mod qp_counters;
mod raw_dump;
mod restrack;
mod srq;
#[cfg(all(CONFIG_KUNIT, not(rdma_no_tests)))]
mod tests;
mod udata;
pub mod ulp;
mod umem;
mod user;
mod work;
mod wq;
mod xrc;

pub use address::*;
pub use ah::*;
pub use counters::*;
pub use cq::*;
pub use device::*;
pub use dm::*;
pub use driver::*;
pub use event::*;
pub use extension::*;
pub use flow::*;
pub use memory::*;
pub use method::*;
pub use mw::*;
pub use netdev::*;
pub use object::*;
pub use odp::*;
pub use ops::*;
pub use pd::*;
pub use port::*;
pub use print::*;
pub use qp::*;
pub use qp_counters::*;
pub use raw_dump::*;
pub use restrack::*;
pub use srq::*;
pub use udata::*;
pub use umem::*;
pub use user::*;
pub use work::*;
pub use wq::*;
pub use xrc::*;
