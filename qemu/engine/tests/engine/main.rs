// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of the engine as its device and its peers see it, in one program: what they share is
//! compiled once.

mod accesses;
#[allow(dead_code)] // The hostile tests, another program, use the rest of it.
mod attack;
mod device_memory;
mod errors;
mod faults;
mod isolation;
mod long;
mod one_touch;
mod ordering;
mod paging;
mod placement;
mod rc;
mod registration;
mod repetition;
mod room;
mod services;
mod windows;
mod wire;
