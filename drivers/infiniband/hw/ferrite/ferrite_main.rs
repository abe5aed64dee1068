// SPDX-License-Identifier: GPL-2.0

//! Driver for the Ferrite RDMA adapter.

use kernel::prelude::*;

#[path = "../../../../include/src/abi/mod.rs"]
pub mod abi;
#[path = "../../../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../../../rust/rdma/mod.rs"]
pub mod rdma;

mod bars;
mod cqp;
mod dma_types;
mod eq;
mod numbers;
mod tpt;

struct FerriteModule;

impl kernel::Module for FerriteModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(FerriteModule)
    }
}

module! {
    type: FerriteModule,
    name: "ferrite",
    authors: ["Ferrite contributors"],
    description: "Ferrite RDMA adapter driver",
    license: "GPL",
}
