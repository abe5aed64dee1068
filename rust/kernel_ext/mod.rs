// SPDX-License-Identifier: GPL-2.0

//! Kernel interfaces that the `kernel` crate does not wrap yet.
//!
//! Each file is written as the addition to the `kernel` crate it would become; its documentation
//! names the place.

pub mod barrier;
pub mod bound_work;
pub mod completion;
pub mod cpu;
pub mod cpu_hotplug;
pub mod devlink;
pub mod dim;
pub mod errno;
pub mod io;
pub mod irq;
pub mod memcg;
pub mod memory;
pub mod module_string;
pub mod pci;
pub mod print;
pub mod random;
pub mod ratelimit;
pub mod rcu;
pub mod rtnl;
pub mod scoped;
pub mod spinlock;
pub mod table;
pub mod user;
pub mod workqueue;
