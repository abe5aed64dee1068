// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Ferrite device process: the engine behind vfio-user.
//!
//! A process is an [`adapter::Adapter`]: one [`port::Port`] with the uplink, and one function or
//! several. Each function has a thread that speaks vfio-user with its virtual machine monitor, and
//! one that moves Ethernet frames and runs timers. Both work on its [`function::Core`], under its
//! lock: the engine with all that it can reach. Of a function that is alone the second thread is the
//! port's, too; else that has one more, which takes frames from the uplink to where the
//! [table](mapping) says. A second process ([`keeper`]) only waits for the end of the first.

pub mod adapter;
pub mod config_space;
pub mod control;
pub mod copies;
pub mod counters;
pub mod function;
pub mod guest_memory;
pub mod heap;
pub mod inbox;
pub mod interrupts;
pub mod io_loop;
pub mod keeper;
pub mod logger;
pub mod mapping;
pub mod port;
pub mod share;
pub mod shortcuts;
pub mod vfio_user;
