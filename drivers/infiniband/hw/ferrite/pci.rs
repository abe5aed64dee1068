// SPDX-License-Identifier: GPL-2.0

//! Binding to the PCI function: start, register, and take down in the reverse order.

use crate::{
    abi,
    abi::{
        BootBlock,
        CommandOpcode,
        DeviceCaps, //
    },
    bars::Identity,
    caps, cqp,
    debugfs::DebugFiles,
    device::Ferrite,
    handler::Interrupts,
    hardware::Hardware,
    kernel_ext::pci::ResetHandlers,
    lent::{
        DeviceReach,
        Lent, //
    },
    rdma::{
        DeviceInfo,
        Registration,
        Unregistered, //
    },
};
use kernel::{
    device::{
        Bound,
        Core, //
    },
    dma::{
        Coherent,
        CoherentBox,
        Device as _,
        DmaMask, //
    },
    pci,
    prelude::*,
    sync::Arc, //
};

/// Bytes of contiguous memory that may be one entry of a scatter list. The device knows no bound;
/// the default would make sixteen thousand entries of a gigabyte.
const MAX_SEGMENT: u32 = 1 << 31;

/// The driver of the PCI function.
pub(crate) struct FerriteDriver;

kernel::pci_device_table!(
    PCI_TABLE,
    MODULE_PCI_TABLE,
    <FerriteDriver as pci::Driver>::IdInfo,
    [(
        pci::DeviceId::from_id(pci::Vendor::REDHAT_QUMRANET, abi::PCI_DEVICE_ID as u32),
        ()
    )]
);

/// A device from start to reset: dropping it stops the device for good.
struct Started {
    hw: Arc<Hardware>,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.hw.stop();
    }
}

/// What is bound to a PCI function.
///
/// Dropped in order: consumers lose the device first, then it is reset, then its interrupts and
/// its memory go.
pub(crate) struct BoundDevice {
    _debug_files: Option<DebugFiles>,
    registration: Pin<KBox<Registration<Ferrite>>>,
    _started: Started,
    _interrupts: Interrupts,
}

/// Gives the device its control ring and event queue 0, and starts it.
fn start(pdev: &pci::Device<Bound>, hw: &Arc<Hardware>, identity: &Identity) -> Result<Started> {
    let eq0 = hw.cqp.events();
    let mut boot: CoherentBox<BootBlock> = CoherentBox::zeroed(pdev.as_ref(), GFP_KERNEL)?;
    *boot = BootBlock {
        cqp_ring: hw.cqp.dma_address(),
        eq0_ring: eq0.dma_address(),
        cqp_log_entries: cqp::LOG_ENTRIES,
        eq0_log_entries: eq0.log_entries(),
        eq0_vector: eq0.vector(),
        reserved0: 0,
        reserved1: [0; 5],
    };
    let boot: Lent<Coherent<BootBlock>> = Lent::new(&hw.reach, boot.into());
    // From here on the device may touch memory: reset it, whatever happens.
    let started = Started { hw: hw.clone() };
    hw.registers.enable(identity.features, boot.dma_handle())?;
    if identity.features & abi::FEATURE_QUIET_COMMANDS != 0 {
        eq0.keep_quiet();
    }
    eq0.arm(&hw.doorbells);
    Ok(started)
}

impl pci::Driver for FerriteDriver {
    type IdInfo = ();
    type Data<'bound> = BoundDevice;

    const ID_TABLE: pci::IdTable<Self::IdInfo> = &PCI_TABLE;

    fn probe<'bound>(
        pdev: &'bound pci::Device<Core<'_>>,
        _info: &'bound Self::IdInfo,
    ) -> impl PinInit<Self::Data<'bound>, Error> + 'bound {
        pdev.enable_device_mem()?;
        // SAFETY: Nothing has allocated DMA memory for this device yet.
        unsafe { pdev.dma_set_mask_and_coherent(DmaMask::new::<64>())? };
        // SAFETY: Nothing maps memory for this device yet.
        unsafe { pdev.dma_set_max_seg_size(MAX_SEGMENT) };

        let reach = DeviceReach::new()?;
        let hw = Arc::pin_init(Hardware::new(pdev, &reach), GFP_KERNEL)?;
        hw.registers.check()?;
        hw.registers.reset()?;
        let identity = hw.registers.identify()?;
        // Not before it was reset: who knows what it was told by another driver.
        pdev.set_master();
        hw.set_link(identity.link_up);
        let mut interrupts = Interrupts::new(pdev, &hw, identity.vectors)?;
        let started = start(pdev, &hw, &identity)?;

        let said: DeviceCaps = hw.query(CommandOpcode::QueryDevice, 0)?;
        let caps = caps::bounded(&said).inspect_err(|_| {
            dev_err!(pdev, "device can do nothing that it could be used for\n");
        })?;
        interrupts.complete(pdev, &hw, &caps)?;
        let ferrite = Ferrite::new(&hw, identity, caps, interrupts.queues())?;
        let info = DeviceInfo {
            node_guid: ferrite.guid(),
            ports: 1,
            comp_vectors: ferrite.handlers.count(),
            description: c"Ferrite RDMA adapter",
            local_dma_lkey: abi::TAG_ALL_MEMORY,
            port_mac: Some(identity.mac),
        };
        let unregistered =
            Unregistered::<Ferrite>::new(pdev.as_ref(), &info, Ok::<_, Error>(ferrite))?;
        let registration = unregistered.register(&crate::THIS_MODULE)?;
        // The port is what its interface says by the time the device is there.
        hw.work.flush();

        let name = registration.device().name();
        let debug_files = DebugFiles::new(&name, registration.device(), &interrupts);
        dev_info!(
            pdev,
            "{}: version {}.{}.{}, {} completion vectors\n",
            name.to_str().unwrap_or("ferrite"),
            identity.firmware.0,
            identity.firmware.1,
            identity.firmware.2,
            info.comp_vectors
        );
        Ok(BoundDevice {
            // Files to look at are no reason to fail.
            _debug_files: debug_files.ok(),
            registration,
            _started: started,
            _interrupts: interrupts,
        })
    }

    fn unbind<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        // A device that was pulled out answers no command; there is no need to wait for it.
        this.registration.device().hw.check_presence();
    }
}

impl ResetHandlers for FerriteDriver {
    fn reset_prepare<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.registration.device().hw.reset_by_others();
    }

    fn reset_done<'bound>(pdev: &'bound pci::Device<Core<'_>>, _this: Pin<&Self::Data<'bound>>) {
        dev_info!(
            pdev,
            "reset by others: bind the driver again to use the device\n"
        );
    }
}
