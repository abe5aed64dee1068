// SPDX-License-Identifier: GPL-2.0

//! An RDMA device made of software: the smallest driver on the abstractions.
//!
//! Its queue pairs are reliable connections (RC) with each other; nothing leaves the device. Kernel users
//! have all of it: sends, RDMA writes and reads, atomics, fast registration. Processes do not, as the
//! driver does not have the trait for them. Its port is RoCEv2, and shares addresses with the first
//! Ethernet interface of a device that there is. Nothing is lost on the way, so that nothing is sent again:
//! `timeout` and `retry_cnt` mean nothing to it, and a message waits for its receive however long that takes,
//! as with an `rnr_retry` of 7.
//!
//! - `driver.rs`: the driver, trait by trait.
//! - `engine.rs`: the device, which does what was posted.
//! - `queue.rs`, `memory.rs`: what both know.
//! - `tests.rs`: tests as a kernel user, run when the module is loaded where the kernel has KUnit.
//!
//! `Documentation/rust-rdma-driver.md` walks through it.

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/rdma/mod.rs"]
pub mod rdma;

mod driver;
mod engine;
mod memory;
mod queue;
#[cfg(CONFIG_KUNIT)]
mod tests;

use driver::Soft;
use kernel::faux;
use kernel::prelude::*;
use rdma::{DeviceInfo, Registration, Unregistered};

/// The module: one device, for as long as it is loaded.
struct SoftModule {
    // Dropped before its parent.
    _device: Pin<KBox<Registration<Soft>>>,
    _parent: faux::Registration,
}

impl kernel::Module for SoftModule {
    fn init(module: &'static ThisModule) -> Result<Self> {
        let parent = faux::Registration::new(c"rust_rdma_soft", None)?;
        let info = DeviceInfo {
            node_guid: u64::from(driver::OUI) << 40 | 0xff_fe00_0001,
            ports: 1,
            comp_vectors: 1,
            description: c"RDMA device of software, in Rust",
            local_dma_lkey: memory::LOCAL_DMA_LKEY,
            virtual_dma: true,
            ..DeviceInfo::default()
        };
        let device = {
            // SAFETY: `faux_device_create` has bound the device to the bus's driver, which has it until
            // the registration is dropped: after the RDMA device, by the order of the fields below.
            let parent = unsafe { parent.as_ref().as_bound() };
            Unregistered::new(parent, &info, Soft::new()?)?.register(module, None)?
        };
        Ok(Self {
            _device: device,
            _parent: parent,
        })
    }
}

module! {
    type: SoftModule,
    name: "rust_rdma_soft",
    authors: ["Ferrite contributors"],
    description: "RDMA device of software",
    license: "GPL",
}
