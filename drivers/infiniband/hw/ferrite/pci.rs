// SPDX-License-Identifier: GPL-2.0

//! Binding to the PCI function, and the lives of its device: start, register, and take down in the reverse
//! order.

use crate::{
    abi,
    abi::{
        BootBlock,
        DeviceCaps, //
    },
    bars::{
        Identity,
        Registers, //
    },
    caps,
    debugfs::DebugFiles,
    device::Ferrite,
    dma_types::Nothing,
    handler::{
        Handlers,
        Interrupts, //
    },
    hardware::Hardware,
    interface::{
        Attachment,
        Behind, //
    },
    kernel_ext::{
        bound_work::Opened,
        cpu_hotplug::State,
        pci as pci_ext,
        pci::{
            Channel,
            Config,
            ConfigLock,
            ErrorHandlers,
            FollowsProcessors,
            ResetHandlers,
            ShutdownHandler,
            SleepHandlers, //
        }, //
    },
    lent::{
        DeviceReach,
        Lent, //
    },
    port,
    rdma::{
        DeviceInfo,
        DeviceName,
        NodeType,
        Registration,
        Unregistered, //
    },
    recovery::{
        Kept,
        Recovery, //
    },
    requests,
    steering,
    steering::Steering,
    vector_map::Layout, //
};
use kernel::{
    device::{
        Bound,
        Core, //
    },
    devres::Devres,
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

/// Sets the DMA mask until the device has said how many bits it has: the least that any has. Where the
/// host has no memory there, a device that does not reach what it has refuses to start.
fn set_first_mask(mut set: impl FnMut(DmaMask) -> Result) -> Result {
    set(DmaMask::new::<{ *caps::DMA_BITS.start() as u32 }>())
        .or_else(|_| set(DmaMask::new::<{ *caps::DMA_BITS.end() as u32 }>()))
}

/// A device from start to reset: dropping it stops the device for good.
struct Started {
    hw: Arc<Hardware>,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.hw.stop();
    }
}

/// A device that is told of resets by others, and has the right to the bus, until this is dropped: nothing of
/// it runs after that.
struct Noted {
    hw: Arc<Hardware>,
    recovery: Arc<Recovery>,
}

impl Noted {
    /// `EBUSY` where such a reset is under way.
    fn new(
        pdev: &pci::Device<Bound>,
        recovery: &Arc<Recovery>,
        hw: &Arc<Hardware>,
    ) -> Result<Self> {
        let config = ConfigLock::new(pdev);
        recovery.set_current(hw)?;
        config.set_master();
        Ok(Self {
            hw: hw.clone(),
            recovery: recovery.clone(),
        })
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.recovery.part(&self.hw);
    }
}

/// A device at work, from one reset to the next.
///
/// Dropped in order: consumers lose the device first, then the interface does, then it is reset, then its
/// interrupts and its memory go.
pub(crate) struct Life {
    debug_files: Option<DebugFiles>,
    /// None where the function has no RDMA.
    registration: Option<Devres<Registration<Ferrite>>>,
    /// None where it has no Ethernet.
    interface: Option<Attachment>,
    /// Event queues, after all that raises events.
    handlers: Arc<Handlers>,
    hw: Arc<Hardware>,
    _started: Started,
    interrupts: Interrupts,
    _growth: Devres<Opened<Hardware>>,
    _noted: Noted,
    layout: Layout,
}

/// What is bound to a PCI function.
pub(crate) struct BoundDevice {
    recovery: Arc<Recovery>,
}

impl Drop for BoundDevice {
    fn drop(&mut self) {
        // Where `probe` fails: nothing is left to do of it after `unbind`.
        self.recovery.close();
    }
}

/// Gives the device its control ring and event queue 0, and starts it.
fn start(
    pdev: &pci::Device<Bound>,
    recovery: &Recovery,
    hw: &Arc<Hardware>,
    identity: &Identity,
) -> Result<Started> {
    let eq0 = hw.cqp.events();
    let mut boot: CoherentBox<BootBlock> = CoherentBox::zeroed(pdev.as_ref(), GFP_KERNEL)?;
    *boot = BootBlock {
        cqp_ring: hw.cqp.dma_address(),
        eq0_ring: eq0.dma_address(),
        cqp_log_entries: requests::LOG_ENTRIES,
        eq0_log_entries: eq0.log_entries(),
        eq0_message: eq0.message(),
        reserved0: 0,
        reserved1: [0; 5],
    };
    let boot: Lent<Coherent<BootBlock>> = Lent::new(&hw.reach, boot.into());
    // From here on the device may touch memory: reset it, whatever happens.
    let started = Started { hw: hw.clone() };
    recovery.start(hw, || {
        hw.registers.enable(identity.features, boot.dma_handle())
    })?;
    if identity.features & abi::FEATURE_QUIET_COMMANDS != 0 {
        eq0.keep_quiet();
    }
    eq0.arm(&hw.doorbells);
    Ok(started)
}

impl Life {
    /// Resets the device, starts it and registers it, as `name` if it can be; for the first time, or again
    /// after what was registered before is gone.
    ///
    /// No life begins before the device has said itself that it was reset: it touches nothing then that it
    /// was told of in another life.
    pub(crate) fn begin(
        pdev: &pci::Device<Bound>,
        recovery: &Arc<Recovery>,
        kept: &mut Kept,
    ) -> Result<Self> {
        set_first_mask(|mask| {
            // SAFETY: Nothing allocates DMA memory for this device between two masks that are tried: only
            // this function does, which one task runs at a time, and who uses a registered device, of
            // which there is none; a network interface without a device behind it has no channels.
            unsafe { pci_ext::set_dma_mask(pdev, mask) }
        })?;
        let reach = DeviceReach::new()?;
        let registers = recovery.registers();
        registers.check(pdev)?;
        registers
            .reset()
            .inspect_err(|error| dev_err!(pdev, "device does not reset: {:?}\n", error))?;
        let identity = registers.identify()?;
        recovery.note_identity(&identity);
        let doorbells = kept.doorbells(pdev, registers)?;
        let hw = Hardware::new(pdev, &reach, registers.clone(), doorbells, recovery);
        let hw = Arc::pin_init(hw, GFP_KERNEL)?;
        // Not before it was reset: who knows what it was told by another driver.
        let noted = Noted::new(pdev, recovery, &hw)?;
        let growth = hw.growth.open(pdev.as_ref())?;
        hw.set_link(identity.link_up);
        let has_table = identity.features & abi::FEATURE_VECTOR_MAP != 0;
        let layout = recovery.layout_of_life(has_table);
        let mut interrupts = Interrupts::new(pdev, &hw, identity.messages, layout)?;
        let started = start(pdev, recovery, &hw, &identity)?;

        let said: DeviceCaps = hw.query(&Nothing)?;
        let unusable = |why| {
            dev_err!(pdev, "device cannot be used: {}\n", why);
            EINVAL
        };
        let bounded = if identity.has_rdma() {
            caps::bounded
        } else {
            caps::bounded_network
        };
        let caps = bounded(&said, identity.offered).map_err(unusable)?;
        let ethernet = match caps::ethernet(&caps, identity.features & caps.features) {
            // It is an RDMA device all the same.
            Err(why) if identity.has_rdma() => {
                dev_err!(pdev, "device has no network interface: {}\n", why);
                None
            }
            ethernet => ethernet.map_err(unusable)?,
        };
        hw.cqp.set_timeout(caps::command_timeout(&caps));
        if identity.features & caps.features & abi::FEATURE_TURNS != 0 {
            hw.cqp.use_turns();
        }
        let mask = DmaMask::try_new(caps.dma_bits.into())?;
        // SAFETY: Nobody else knows the device yet: nothing but this function allocates or maps
        // memory for it.
        unsafe { pci_ext::set_dma_mask(pdev, mask)? };
        interrupts.complete(pdev, &hw, identity.features & caps.features, &caps)?;
        let features = identity.features & caps.features;
        let handlers = Handlers::start(&hw, &interrupts, features)?;
        let mut this = Self {
            debug_files: None,
            registration: None,
            interface: None,
            handlers,
            hw,
            _started: started,
            interrupts,
            _growth: growth,
            _noted: noted,
            layout,
        };
        if identity.has_rdma() {
            this.register(pdev, kept, identity, caps)?;
        }
        if let Some(caps) = ethernet {
            let behind = Behind {
                hw: this.hw.clone(),
                handlers: this.handlers.clone(),
                caps,
                identity,
            };
            let interface = kept.interface(pdev, &behind)?;
            this.interface = Some(Attachment::new(interface, behind)?);
        }
        Ok(this)
    }

    /// Makes the RDMA device known.
    fn register(
        &mut self,
        pdev: &pci::Device<Bound>,
        kept: &Kept,
        identity: Identity,
        caps: DeviceCaps,
    ) -> Result {
        let ferrite = Ferrite::new(&self.hw, identity, caps, &self.handlers)?;
        let info = DeviceInfo {
            node_type: NodeType::IbCa,
            node_guid: ferrite.guid(),
            ports: port::PORT,
            comp_vectors: ferrite.handlers.count(),
            description: c"Ferrite RDMA adapter",
            local_dma_lkey: abi::TAG_ALL_MEMORY,
            virtual_dma: false,
            counter_names: port::counter_names(&caps),
            // Whoever wants it says so (`rdma dev set`): it makes single messages late at times.
            adaptive_moderation: false,
        };
        let unregistered =
            Unregistered::<Ferrite>::new(pdev.as_ref(), &info, Ok::<_, Error>(ferrite))?;
        let registration = unregistered.register(&crate::THIS_MODULE, kept.name())?;
        // The port is what its interface says by the time the device is there.
        self.hw.work.flush();

        let device = registration.access(pdev.as_ref())?.device();
        let name = device.name();
        let debug_files = DebugFiles::new(&name, device, &self.interrupts);
        dev_info!(
            pdev,
            "{}: version {}.{}.{}, {} completion vectors\n",
            name.to_str().unwrap_or("ferrite"),
            identity.firmware.0,
            identity.firmware.1,
            identity.firmware.2,
            info.comp_vectors
        );
        // Files to look at are no reason to fail.
        self.debug_files = debug_files.ok();
        self.registration = Some(registration);
        Ok(())
    }

    /// What it is called, while it is registered: it can be renamed.
    pub(crate) fn name(&self) -> Option<DeviceName> {
        self.registration
            .as_ref()?
            .try_access_with(|registration| registration.device().name())
    }

    /// How its event queues and vectors are spread.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The device itself.
    pub(crate) fn hw(&self) -> &Arc<Hardware> {
        &self.hw
    }
}

impl pci::Driver for FerriteDriver {
    type IdInfo = ();
    type Data<'bound> = BoundDevice;

    const ID_TABLE: pci::IdTable<Self::IdInfo> = &PCI_TABLE;

    fn probe<'bound>(
        pdev: &'bound pci::Device<Core<'_>>,
        _info: &'bound Self::IdInfo,
    ) -> impl PinInit<Self::Data<'bound>, Error> + 'bound {
        if pdev.pci_class().as_raw() != abi::PCI_CLASS {
            dev_dbg!(pdev, "not a Ferrite adapter: {:?}\n", pdev.pci_class());
            return Err(ENODEV);
        }
        pci_ext::enable_device_mem(pdev)?;
        // SAFETY: Nothing maps memory for this device yet.
        unsafe { pdev.dma_set_max_seg_size(MAX_SEGMENT) };
        let registers = Registers::map(pdev)?;
        let saved = {
            let config = ConfigLock::new(pdev);
            // Whoever had it before may have left it the bus. Who is given this back is not to have it.
            config.clear_master();
            // It answered just now.
            config.keep()?
        };
        let bound = BoundDevice {
            recovery: Recovery::new(pdev, registers, saved)?,
        };
        bound.recovery.open(pdev)?;
        Ok(bound)
    }

    /// Here, not as the data goes: the PCI core may have put the function to sleep by then, or the port above it.
    fn unbind<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.recovery.close();
    }
}

// SAFETY: `steering` has the state for its followers, which are those of this driver, and nobody registers it but the
// adapter.
unsafe impl FollowsProcessors for FerriteDriver {
    type Follower = Steering;

    const STATE: &'static CStr = c"infiniband/ferrite:online";

    fn state() -> &'static State<Steering> {
        &steering::HOTPLUG
    }
}

impl ResetHandlers for FerriteDriver {
    fn reset_prepare<'bound>(
        _pdev: &'bound pci::Device<Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        config: &Config<'_>,
    ) {
        this.recovery.hold(config);
    }

    fn reset_done<'bound>(
        _pdev: &'bound pci::Device<Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        config: &Config<'_>,
    ) {
        this.recovery.was_reset(config);
    }
}

impl ErrorHandlers for FerriteDriver {
    fn error_detected<'bound>(
        _pdev: &'bound pci::Device<Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        channel: Channel,
    ) {
        this.recovery.bus_failed(channel);
    }

    fn slot_reset<'bound>(
        _pdev: &'bound pci::Device<Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
    ) -> Result {
        this.recovery.bus_was_reset()
    }

    fn resume<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.recovery.bus_works();
    }
}

impl SleepHandlers for FerriteDriver {
    fn suspend<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.recovery.sleep();
    }

    fn complete<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.recovery.wake_up();
    }
}

impl ShutdownHandler for FerriteDriver {
    fn shutdown<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Self::Data<'bound>>) {
        this.recovery.shut_down();
    }
}

#[kunit_tests(ferrite_pci)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_memory_below_4_gib_is_no_reason_to_fail() {
        for (refused, expected) in [(0, Ok(())), (1, Ok(())), (2, Err(EIO))] {
            let mut asked = 0;
            let set = set_first_mask(|mask| {
                let bits = if asked == 0 { 32 } else { 64 };
                assert!(DmaMask::try_new(bits).is_ok_and(|wanted| wanted.value() == mask.value()));
                asked += 1;
                if asked > refused {
                    Ok(())
                } else {
                    Err(EIO)
                }
            });
            assert_eq!(set, expected);
        }
    }
}
