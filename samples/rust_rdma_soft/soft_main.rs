// SPDX-License-Identifier: GPL-2.0

//! An RDMA device made of software: the smallest driver on the abstractions.
//!
//! Its queue pairs are reliable connections (RC) with each other; nothing leaves the device. Kernel users
//! have all of it: sends, RDMA writes and reads, atomics, fast registration. Processes have the same but for
//! the last: their memory is registered by a call. The core posts and polls for them, so that their provider
//! does nothing but hand over what it is asked for. Its port is RoCEv2, and shares addresses with the first
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
use kernel::devres::Devres;
use kernel::faux;
use kernel::prelude::*;
use rdma::{DeviceInfo, Registration, Unregistered};

/// The module: one device, for as long as it is loaded.
struct SoftModule {
    _device: Devres<Registration<Soft>>,
    _parent: faux::Registration,
}

/// Makes the device known, until what this returns is dropped or its parent goes.
fn register(
    module: &'static ThisModule,
    parent: &faux::Registration,
) -> Result<Devres<Registration<Soft>>> {
    // SAFETY: `faux_device_create` has bound the device to the driver of its bus, which has no files to unbind it
    // by: it stays bound until the registration, which is borrowed, is dropped.
    let parent = unsafe { parent.as_ref().as_bound() };
    let info = DeviceInfo {
        node_guid: u64::from(driver::OUI) << 40 | 0xff_fe00_0001,
        ports: 1,
        comp_vectors: 1,
        description: c"RDMA device of software, in Rust",
        local_dma_lkey: memory::LOCAL_DMA_LKEY,
        virtual_dma: true,
        ..DeviceInfo::default()
    };
    Unregistered::new(parent, &info, Soft::new()?)?.register(module, None)
}

impl kernel::Module for SoftModule {
    fn init(module: &'static ThisModule) -> Result<Self> {
        let parent = faux::Registration::new(c"rust_rdma_soft", None)?;
        Ok(Self {
            _device: register(module, &parent)?,
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

#[kunit_tests(rust_rdma_soft_registration)]
mod registration_tests {
    use super::*;
    use kernel::sync::Arc;

    /// Whether the engine of a device is all that is left of it, where its registration was given to `done_with`, and
    /// then its parent was unbound.
    fn is_gone_with_its_parent(done_with: impl FnOnce(Devres<Registration<Soft>>)) -> Result<bool> {
        let parent = faux::Registration::new(c"rust_rdma_soft_test", None)?;
        let device = register(&THIS_MODULE, &parent)?;
        let engine = device
            .try_access_with(|registration| registration.device().engine.clone())
            .ok_or(ENODEV)?;
        done_with(device);
        drop(parent);
        Ok(Arc::into_unique_or_drop(engine).is_some())
    }

    #[test]
    fn a_registration_that_is_dropped_is_gone_before_its_parent() -> Result {
        assert!(is_gone_with_its_parent(drop)?);
        Ok(())
    }

    // Forgotten it would end as well; but what is left of it then is a leak, of which the kernel's detector tells.
    #[test]
    fn a_registration_that_nobody_drops_ends_when_its_parent_is_unbound() -> Result {
        let mut kept = None;
        assert!(is_gone_with_its_parent(|device| kept = Some(device))?);
        // There is nothing left in it.
        let device = kept.ok_or(EINVAL)?;
        assert!(device.try_access_with(|_| ()).is_none());
        Ok(())
    }
}
