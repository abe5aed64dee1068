// SPDX-License-Identifier: GPL-2.0

//! The register BAR (identity, handshake, start and stop) and the kernel's doorbell page.

use crate::{
    abi,
    abi::{
        CompletionDoorbell,
        DeviceState,
        EventDoorbell,
        Function,
        Status, //
    },
    doorbell_bar,
    doorbell_bar::DoorbellBar,
    kernel_ext::io::memory_bar_length,
    rdma, //
};
use kernel::{
    device::Bound,
    devres::Devres,
    io::{
        poll::read_poll_timeout,
        Io, //
    },
    page::PAGE_SHIFT,
    pci,
    prelude::*,
    time::Delta, //
};

/// How long a device may take to start.
const START_TIMEOUT: Delta = Delta::from_secs(10);
/// How often to look whether a device has started, or is reset.
const POLL: Delta = Delta::from_millis(1);

/// The most that a device may say that a reset takes, in milliseconds.
const MOST_RESET: u32 = 60_000;
/// A reset is waited for so many times as long as the device says, which may be emulated on a machine
/// that has other things to do.
const RESET_PATIENCE: u32 = 2;
/// But no less than that, in milliseconds.
const LEAST_RESET_TIMEOUT: u32 = 10_000;
/// The longest that a reset is waited for.
pub(crate) const MOST_RESET_TIMEOUT: Delta =
    Delta::from_millis((RESET_PATIENCE * MOST_RESET) as i64);

/// How long a reset of a device is waited for that says it takes `said` milliseconds; none where it
/// takes too long.
fn reset_timeout(said: u32) -> Option<Delta> {
    let timeout = (said <= MOST_RESET).then(|| RESET_PATIENCE * said)?;
    Some(Delta::from_millis(timeout.max(LEAST_RESET_TIMEOUT).into()))
}

/// Waits until a device that was told to reset has done so. Sleeps.
///
/// It may say for a while that it stopped itself, as it did before it was told, and that the reset
/// is under way: only the end counts.
fn wait_for_reset(status: impl FnMut() -> Result<Status>, timeout: Delta) -> Result {
    let done = |status: &Status| status.state() == Some(DeviceState::Ready);
    read_poll_timeout(status, done, POLL, timeout).map(|_| ())
}

/// The features this driver makes use of, where the device offers them.
const WANTED_FEATURES: u64 = abi::FEATURE_SRQ
    | abi::FEATURE_ATOMICS
    | abi::FEATURE_WINDOWS
    | abi::FEATURE_FAST_REGISTER
    | abi::FEATURE_UC
    | abi::FEATURE_UD
    | abi::FEATURE_RESIZE_CQ
    | abi::FEATURE_XRC
    | abi::FEATURE_MULTICAST
    | abi::FEATURE_DEVICE_MEMORY
    | abi::FEATURE_ATOMIC_WRITE
    | abi::FEATURE_FLUSH
    | abi::FEATURE_RESIZE_SRQ
    | abi::FEATURE_PORT_MTU
    | abi::FEATURE_SWITCH_EQ
    | abi::FEATURE_VECTOR_MAP
    | abi::FEATURE_EQ_CONTROL
    | abi::FEATURE_QUIET_COMMANDS
    | abi::FEATURE_ONE_TOUCH
    | abi::FEATURE_REGISTER_SEND
    | abi::FEATURE_LISTS
    | abi::FEATURE_PENDING_TAGS
    | abi::FEATURE_TURNS
    | abi::FEATURE_QP_COUNTERS
    | abi::FEATURE_CONTEXTS
    | abi::FEATURE_WINDOWS_ONLY
    | abi::FEATURE_RAW_PACKETS
    | abi::FEATURE_RECEIVE_TABLES
    | abi::FEATURE_ETHERNET
    | abi::FEATURE_REDIRECTION
    | if rdma::ON_DEMAND_AVAILABLE && PAGE_SHIFT == abi::ON_DEMAND_PAGE_SHIFT as usize {
        abi::FEATURE_ON_DEMAND
    } else {
        0
    };

/// What the registers say about the device before it is started.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    /// MAC address of the network interface the device shares its link with.
    pub(crate) mac: [u8; 6],
    /// What the function is.
    pub(crate) function: Function,
    /// Message numbers that event queues may have.
    pub(crate) messages: u32,
    /// Version of the interface: major, minor.
    pub(crate) interface: (u16, u16),
    /// Model version: major, minor, patch.
    pub(crate) firmware: (u16, u8, u8),
    /// The features that the device offers.
    pub(crate) offered: u64,
    /// The features agreed on.
    pub(crate) features: u64,
    /// Whether the link was up.
    pub(crate) link_up: bool,
}

/// The register BAR of a device that the driver can work with. Read only while the device is
/// started and stopped, and when it does not answer a command.
pub(crate) struct Registers {
    bar: Devres<pci::Bar<'static, { abi::BAR_REGISTERS_SIZE }>>,
    reset_timeout: Delta,
}

/// Finds out whether registers are those of a device that the driver can work with. Writes nothing:
/// it may be another one, to which a write would mean something else.
fn check(pdev: &pci::Device<Bound>, bar: &pci::Bar<'_, { abi::BAR_REGISTERS_SIZE }>) -> Result {
    let magic = bar.read32(abi::REG_MAGIC);
    if magic == abi::GONE {
        return Err(ENODEV);
    }
    if magic != abi::MAGIC {
        dev_err!(pdev, "not a Ferrite device: magic {:#x}\n", magic);
        return Err(ENODEV);
    }
    let version = bar.read32(abi::REG_ABI_VERSION);
    if (version >> 16) as u16 != abi::ABI_MAJOR {
        dev_err!(
            pdev,
            "device speaks version {}.{}, driver {}.{}\n",
            version >> 16,
            version & 0xffff,
            abi::ABI_MAJOR,
            abi::ABI_MINOR
        );
        return Err(ENODEV);
    }
    let function = Function(bar.read32(abi::REG_FUNCTION));
    if function.models() & (abi::FUNCTION_RDMA | abi::FUNCTION_ETHERNET) == 0 {
        // Another driver's.
        dev_dbg!(
            pdev,
            "function {} has neither RDMA nor Ethernet\n",
            function.number()
        );
        return Err(ENODEV);
    }
    Ok(())
}

/// The bytes of a BAR, which has to be memory to be mapped.
fn memory_bar(pdev: &pci::Device<Bound>, bar: u32) -> Result<u64> {
    memory_bar_length(pdev, bar)
        .inspect_err(|error| dev_err!(pdev, "BAR {} is not memory: {:?}\n", bar, error))
}

impl Identity {
    /// Whether the function has RDMA.
    pub(crate) fn has_rdma(&self) -> bool {
        self.function.models() & abi::FUNCTION_RDMA != 0
    }
}

impl Registers {
    /// Maps the registers, and finds out whether the driver can work with the device.
    pub(crate) fn map(pdev: &pci::Device<Bound>) -> Result<Self> {
        memory_bar(pdev, abi::BAR_REGISTERS)?;
        let bar =
            pdev.iomap_region_sized::<{ abi::BAR_REGISTERS_SIZE }>(abi::BAR_REGISTERS, c"ferrite")?;
        check(pdev, &bar)?;
        let said = bar.read32(abi::REG_RESET_TIMEOUT);
        Ok(Self {
            reset_timeout: reset_timeout(said).ok_or_else(|| {
                dev_err!(pdev, "a reset would take {} ms\n", said);
                EINVAL
            })?,
            bar: bar.into_devres()?,
        })
    }

    /// Finds out whether the device is still one that the driver can work with, as [`Self::map`] did.
    pub(crate) fn check(&self, pdev: &pci::Device<Bound>) -> Result {
        check(pdev, self.bar.access(pdev.as_ref())?)
    }

    fn status(&self) -> Result<Status> {
        let bar = self.bar.try_access().ok_or(ENXIO)?;
        let status = Status(bar.read32(abi::REG_STATUS));
        if status.is_gone() {
            return Err(ENODEV);
        }
        Ok(status)
    }

    fn wait_for(&self, state: DeviceState) -> Result<Status> {
        let reached = |status: &Status| {
            status.state() == Some(state) || status.state() == Some(DeviceState::Fatal)
        };
        let status = read_poll_timeout(|| self.status(), reached, POLL, START_TIMEOUT)?;
        if status.state() != Some(state) {
            dev_err!(
                self.bar.device(),
                "device stopped itself: {:?}\n",
                status.fatal()
            );
            return Err(EIO);
        }
        Ok(status)
    }

    /// `ENODEV` where the device is gone.
    pub(crate) fn presence(&self) -> Result {
        self.status().map(|_| ())
    }

    /// Whether the device is still there.
    pub(crate) fn is_present(&self) -> bool {
        self.presence().is_ok()
    }

    /// Whether the device is still there and at work.
    pub(crate) fn is_running(&self) -> bool {
        self.status()
            .is_ok_and(|status| status.state() == Some(DeviceState::Running))
    }

    /// Asks for a reset without waiting for it. May be called from any context.
    pub(crate) fn request_reset(&self) {
        if let Some(bar) = self.bar.try_access() {
            bar.write32(abi::CONTROL_RESET, abi::REG_CONTROL);
        }
    }

    /// Resets the device; afterwards it touches no host memory. `ETIMEDOUT` where it does not say
    /// so, `ENODEV` where it is gone. Sleeps.
    pub(crate) fn reset(&self) -> Result {
        self.request_reset();
        wait_for_reset(|| self.status(), self.reset_timeout)
    }

    /// Reads what a device that was reset says about itself.
    pub(crate) fn identify(&self) -> Result<Identity> {
        let bar = self.bar.try_access().ok_or(ENXIO)?;
        let interface = bar.read32(abi::REG_ABI_VERSION);
        let firmware = bar.read32(abi::REG_FIRMWARE);
        let mac = bar.read64(abi::REG_MAC).to_le_bytes();
        let offered = bar.read64(abi::REG_FEATURES);
        Ok(Identity {
            mac: [mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]],
            function: Function(bar.read32(abi::REG_FUNCTION)),
            messages: bar.read32(abi::REG_MESSAGES),
            interface: ((interface >> 16) as u16, interface as u16),
            firmware: (
                (firmware >> 16) as u16,
                (firmware >> 8) as u8,
                firmware as u8,
            ),
            offered,
            features: asked_for(offered),
            link_up: Status(bar.read32(abi::REG_STATUS)).link_up(),
        })
    }

    /// Reads what a device that was reset says about the doorbell BAR.
    fn doorbell_bar(&self) -> Result<doorbell_bar::Said> {
        let bar = self.bar.try_access().ok_or(ENXIO)?;
        Ok(doorbell_bar::Said {
            pages: bar.read32(abi::REG_DOORBELL_PAGES),
            log_stride: bar.read32(abi::REG_DOORBELL_STRIDE),
            offset: bar.read64(abi::REG_DOORBELL_OFFSET),
            memory_offset: bar.read64(abi::REG_DEVICE_MEMORY_OFFSET),
            memory_size: bar.read64(abi::REG_DEVICE_MEMORY_SIZE),
        })
    }

    /// Starts the device with the boot block at DMA address `boot`. Sleeps.
    pub(crate) fn enable(&self, features: u64, boot: u64) -> Result {
        {
            let bar = self.bar.try_access().ok_or(ENXIO)?;
            let version = u32::from(abi::ABI_MAJOR) << 16 | u32::from(abi::ABI_MINOR);
            bar.write32(version, abi::REG_DRIVER_VERSION);
            bar.write64(features, abi::REG_DRIVER_FEATURES);
            bar.write64(boot, abi::REG_BOOT);
            bar.write32(abi::CONTROL_ENABLE, abi::REG_CONTROL);
        }
        self.wait_for(DeviceState::Running).map(|_| ())
    }
}

/// The doorbell BAR, of which the kernel writes its own page.
pub(crate) struct Doorbells {
    bar: Devres<pci::Bar<'static>>,
    said: doorbell_bar::Said,
    layout: DoorbellBar,
    /// Offset of the kernel's page.
    kernel_page: usize,
}

impl Doorbells {
    /// The page of the kernel.
    pub(crate) const KERNEL_PAGE: u32 = 0;

    /// Maps the doorbells of a device that was reset: `EINVAL` where they are not where its
    /// registers say.
    pub(crate) fn map(pdev: &pci::Device<Bound>, registers: &Registers) -> Result<Self> {
        let said = registers.doorbell_bar()?;
        let length = memory_bar(pdev, abi::BAR_DOORBELLS)?;
        let layout = DoorbellBar::new(&said, length).map_err(|what| {
            dev_err!(pdev, "doorbell BAR of {:#x} bytes: {}\n", length, what);
            dev_err!(
                pdev,
                "{} pages of 1 << {} at {:#x}, memory of {:#x} bytes at {:#x}\n",
                said.pages,
                said.log_stride,
                said.offset,
                said.memory_size,
                said.memory_offset
            );
            EINVAL
        })?;
        Ok(Self {
            bar: pdev
                .iomap_region(abi::BAR_DOORBELLS, c"ferrite")?
                .into_devres()?,
            kernel_page: usize::try_from(layout.kernel_page())?,
            layout,
            said,
        })
    }

    /// Finds out whether a device that was reset says of its doorbells what it said when they were mapped.
    pub(crate) fn check(&self, pdev: &pci::Device<Bound>, registers: &Registers) -> Result {
        if registers.doorbell_bar()? == self.said {
            return Ok(());
        }
        dev_err!(pdev, "doorbells are not where they were before the reset\n");
        Err(EINVAL)
    }

    /// What is where in the BAR.
    pub(crate) fn layout(&self) -> &DoorbellBar {
        &self.layout
    }

    /// Rings: a posted write, ordered after earlier writes to memory.
    #[inline]
    fn ring<const OFFSET: usize>(&self, word: u64) {
        const { assert!(OFFSET < abi::DOORBELL_PAGE_SIZE) }
        // A device that is being unbound needs no doorbell any more.
        if let Some(bar) = self.bar.try_access() {
            // The page is inside the BAR, as was found out when it was mapped.
            let _ = bar.try_write64(word, self.kernel_page + OFFSET);
        }
    }

    /// Updates and arms an event queue.
    #[inline]
    pub(crate) fn event_queue(&self, doorbell: EventDoorbell) {
        self.ring::<{ abi::DOORBELL_EVENT_QUEUE }>(doorbell.encode());
    }

    /// Tells the device of commands up to `producer`.
    #[inline]
    pub(crate) fn control(&self, producer: u32) {
        self.ring::<{ abi::DOORBELL_CONTROL }>(u64::from(producer));
    }

    /// Arms a completion queue.
    #[inline]
    pub(crate) fn completion(&self, doorbell: CompletionDoorbell) {
        self.ring::<{ abi::DOORBELL_COMPLETION }>(doorbell.encode());
    }

    /// Wakes the send queue of a queue pair.
    #[inline]
    pub(crate) fn send(&self, qpn: u32, producer: u32) {
        self.ring::<{ abi::DOORBELL_SEND }>(abi::send_doorbell(qpn, producer));
    }

    /// Wakes the transmit ring of a channel.
    #[inline]
    pub(crate) fn channel(&self, channel: u16) {
        self.ring::<{ abi::DOORBELL_CHANNEL }>(u64::from(channel));
    }

    /// Wakes the receive queue of a queue pair.
    #[inline]
    pub(crate) fn receive(&self, qpn: u32) {
        self.ring::<{ abi::DOORBELL_RECEIVE }>(abi::queue_doorbell(qpn));
    }
}

/// What the driver asks for where so much is offered: not what is of no use as it needs something else
/// that is not.
fn asked_for(offered: u64) -> u64 {
    abi::complete_features(offered & WANTED_FEATURES)
}

#[kunit_tests(ferrite_bars)]
mod tests {
    use super::*;

    /// A device that says one thing after the other, and the last for ever.
    fn saying(said: &[Status]) -> impl FnMut() -> Result<Status> + '_ {
        let mut looks = 0;
        move || {
            let status = said.get(looks).or(said.last()).copied().ok_or(ENODEV);
            looks += 1;
            status
        }
    }

    fn state(state: DeviceState) -> Status {
        Status::new(state, None, false)
    }

    #[test]
    fn features_are_asked_for_with_all_that_they_need() {
        assert_eq!(asked_for(u64::MAX), WANTED_FEATURES);
        assert_eq!(asked_for(0), 0);
        let offered = abi::FEATURE_XRC | abi::FEATURE_MULTICAST | abi::FEATURE_ATOMICS;
        assert_eq!(asked_for(offered), abi::FEATURE_ATOMICS);
        let offered = offered | abi::FEATURE_SRQ;
        assert_eq!(asked_for(offered), offered & !abi::FEATURE_MULTICAST);
    }

    #[test]
    fn a_reset_is_over_when_the_device_is_ready_and_not_before() {
        let stopped = Status::new(DeviceState::Fatal, Some(abi::FatalCode::HostMemory), true);
        let (resetting, ready) = (state(DeviceState::Resetting), state(DeviceState::Ready));
        let timeout = Delta::from_secs(10);
        for said in [
            [ready; 4],
            [stopped, stopped, resetting, ready],
            [state(DeviceState::Running), resetting, resetting, ready],
            // A state that is not known is none to stop at.
            [Status(0), Status(77), resetting, ready],
        ] {
            assert_eq!(wait_for_reset(saying(&said), timeout), Ok(()));
        }
        let soon = Delta::from_millis(5);
        for last in [stopped, resetting, state(DeviceState::Running), Status(0)] {
            assert_eq!(wait_for_reset(saying(&[last]), soon), Err(ETIMEDOUT));
        }
        // A device that goes meanwhile is not waited for.
        assert_eq!(wait_for_reset(saying(&[]), timeout), Err(ENODEV));
    }

    #[test]
    fn a_reset_is_waited_for_longer_than_the_device_says() {
        let timeout = |said| reset_timeout(said).map(Delta::as_millis);
        assert_eq!(timeout(0), Some(10_000));
        assert_eq!(timeout(20_000), Some(40_000));
        assert_eq!(timeout(60_000), Some(MOST_RESET_TIMEOUT.as_millis()));
        // Nobody waits for ever.
        for said in [60_001, 1 << 31, u32::MAX] {
            assert_eq!(timeout(said), None);
        }
    }
}
