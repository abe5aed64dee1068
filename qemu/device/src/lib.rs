// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Ferrite device process: the engine behind vfio-user.
//!
//! One thread speaks vfio-user with the virtual machine monitor, another moves
//! Ethernet frames and runs timers. Both work on the one [`function::Core`],
//! under its lock: the engine with all that it can reach. A second process
//! ([`keeper`]) only waits for the end of the first.

pub mod config_space;
pub mod control;
pub mod counters;
pub mod function;
pub mod guest_memory;
pub mod heap;
pub mod interrupts;
pub mod io_loop;
pub mod keeper;
pub mod logger;
pub mod mapping;
pub mod port;
pub mod share;
pub mod shortcuts;
pub mod vfio_user;
