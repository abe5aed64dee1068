// SPDX-License-Identifier: GPL-2.0

//! The Rust abstractions of RDMA by themselves, with their tests.

pub mod bindings;
pub mod kernel_ext;
pub mod net;
pub mod rdma;
pub mod rdma_cm;

use kernel::prelude::*;

module! {
    type: Tests,
    name: "rdma_rust_kunit",
    authors: ["Ferrite contributors"],
    description: "KUnit tests of the Rust abstractions of RDMA",
    license: "GPL",
}

struct Tests;

impl kernel::Module for Tests {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(Self)
    }
}
