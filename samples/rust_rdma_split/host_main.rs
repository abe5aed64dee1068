// SPDX-License-Identifier: GPL-2.0

//! The host of the split driver.

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/net/mod.rs"]
pub mod net;

use kernel::prelude::*;

module_string!(server, "Address of the I/O unit: ADDRESS[:PORT]");

struct HostModule;

impl kernel::Module for HostModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        pr_info!("server {}\n", server.get().to_str().unwrap_or("?"));
        Ok(Self)
    }
}

module! {
    type: HostModule,
    name: "rust_rdma_split_host",
    authors: ["Ferrite contributors"],
    description: "Network interface at the far end of an RDMA connection",
    license: "GPL",
}
