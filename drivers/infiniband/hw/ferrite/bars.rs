// SPDX-License-Identifier: GPL-2.0

//! The register BAR (identity, handshake, start and stop) and the kernel's doorbell page.

use crate::abi;
use crate::abi::{CompletionDoorbell, DeviceState, EventDoorbell, Status};
use crate::rdma;
use kernel::{
    device::Bound,
    devres::Devres,
    io::{
        poll::read_poll_timeout,
        Io, //
    },
    pci,
    prelude::*,
    time::Delta, //
};

/// How long a device may take to reset or to start.
const START_TIMEOUT: Delta = Delta::from_secs(10);
/// How often to look meanwhile.
const START_POLL: Delta = Delta::from_millis(1);

/// The features this driver makes use of, where the device offers them.
const WANTED_FEATURES: u64 = abi::FEATURE_SHARED_RECEIVE
    | abi::FEATURE_ATOMICS
    | abi::FEATURE_WINDOWS
    | abi::FEATURE_SEND_QUEUE_REGISTRATION
    | abi::FEATURE_UNRELIABLE_CONNECTED
    | abi::FEATURE_DATAGRAM
    | abi::FEATURE_RESIZE_CQ
    | abi::FEATURE_EXTENDED_CONNECTED
    | abi::FEATURE_MULTICAST
    | abi::FEATURE_DEVICE_MEMORY
    | abi::FEATURE_ATOMIC_WRITE
    | abi::FEATURE_FLUSH
    | abi::FEATURE_RESIZE_SRQ
    | abi::FEATURE_PORT_MTU
    | abi::FEATURE_QUIET_COMMANDS
    | if rdma::ON_DEMAND_AVAILABLE {
        abi::FEATURE_ON_DEMAND
    } else {
        0
    };

/// What the registers say about the device before it is started.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    /// MAC address of the network interface the device shares its link with.
    pub(crate) mac: [u8; 6],
    /// MSI-X vectors the device has.
    pub(crate) vectors: u32,
    /// Model version: major, minor, patch.
    pub(crate) firmware: (u16, u8, u8),
    /// The features agreed on.
    pub(crate) features: u64,
    /// Whether the link was up.
    pub(crate) link_up: bool,
}

/// The register BAR. Read only while the device is started and stopped, and when it does not
/// answer a command.
pub(crate) struct Registers {
    bar: Devres<pci::Bar<'static, { abi::BAR_REGISTERS_SIZE }>>,
}

impl Registers {
    /// Maps the registers.
    pub(crate) fn map(pdev: &pci::Device<Bound>) -> Result<Self> {
        let bar =
            pdev.iomap_region_sized::<{ abi::BAR_REGISTERS_SIZE }>(abi::BAR_REGISTERS, c"ferrite")?;
        Ok(Self {
            bar: bar.into_devres()?,
        })
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
        let status = read_poll_timeout(|| self.status(), reached, START_POLL, START_TIMEOUT)?;
        if status.state() != Some(state) {
            pr_err!("ferrite: device stopped itself: {:?}\n", status.fatal());
            return Err(EIO);
        }
        Ok(status)
    }

    /// Whether the device is still there.
    pub(crate) fn is_present(&self) -> bool {
        self.status().is_ok()
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
        // One that stopped itself may say so until the reset is under way: only the end counts.
        let done = |status: &Status| status.state() == Some(DeviceState::Ready);
        read_poll_timeout(|| self.status(), done, START_POLL, START_TIMEOUT).map(|_| ())
    }

    /// Finds out whether this is a device that the driver can work with. Writes nothing: it may be
    /// another one, to which a write would mean something else.
    pub(crate) fn check(&self) -> Result {
        let bar = self.bar.try_access().ok_or(ENXIO)?;
        let magic = bar.read32(abi::REG_MAGIC);
        if magic == abi::GONE {
            return Err(ENODEV);
        }
        if magic != abi::MAGIC {
            pr_err!("ferrite: not a Ferrite device: magic {:#x}\n", magic);
            return Err(ENODEV);
        }
        let version = bar.read32(abi::REG_ABI_VERSION);
        if (version >> 16) as u16 != abi::ABI_MAJOR {
            pr_err!(
                "ferrite: device speaks version {}.{}, driver {}.{}\n",
                version >> 16,
                version & 0xffff,
                abi::ABI_MAJOR,
                abi::ABI_MINOR
            );
            return Err(ENODEV);
        }
        Ok(())
    }

    /// Reads what a device that was checked and reset says about itself.
    pub(crate) fn identify(&self) -> Result<Identity> {
        let bar = self.bar.try_access().ok_or(ENXIO)?;
        let firmware = bar.read32(abi::REG_FIRMWARE);
        let mac = bar.read64(abi::REG_MAC).to_le_bytes();
        Ok(Identity {
            mac: [mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]],
            vectors: bar.read32(abi::REG_VECTORS),
            firmware: (
                (firmware >> 16) as u16,
                (firmware >> 8) as u8,
                firmware as u8,
            ),
            features: bar.read64(abi::REG_FEATURES) & WANTED_FEATURES,
            link_up: Status(bar.read32(abi::REG_STATUS)).link_up(),
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

/// The kernel's doorbell page. Written only.
pub(crate) struct Doorbells {
    bar: Devres<pci::Bar<'static, { abi::DOORBELL_PAGE_SIZE }>>,
    pages: u32,
}

impl Doorbells {
    /// The page of the kernel.
    pub(crate) const KERNEL_PAGE: u32 = 0;

    /// Maps the doorbells.
    pub(crate) fn map(pdev: &pci::Device<Bound>) -> Result<Self> {
        let bar =
            pdev.iomap_region_sized::<{ abi::DOORBELL_PAGE_SIZE }>(abi::BAR_DOORBELLS, c"ferrite")?;
        let length = pdev.resource_len(abi::BAR_DOORBELLS)?;
        Ok(Self {
            // What follows the pages is no doorbell.
            pages: (length / abi::DOORBELL_PAGE_SIZE as u64).min(abi::DOORBELL_PAGES as u64) as u32,
            bar: bar.into_devres()?,
        })
    }

    /// Pages that the BAR has room for.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// Rings: a posted write, ordered after earlier writes to memory.
    #[inline]
    fn ring<const OFFSET: usize>(&self, word: u64) {
        // A device that is being unbound needs no doorbell any more.
        if let Some(bar) = self.bar.try_access() {
            bar.write64(word, OFFSET);
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

    /// Wakes the receive queue of a queue pair.
    #[inline]
    pub(crate) fn receive(&self, qpn: u32) {
        self.ring::<{ abi::DOORBELL_RECEIVE }>(abi::queue_doorbell(qpn));
    }
}
