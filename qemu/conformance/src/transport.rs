// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device as its bus sees it: configuration space, BARs, interrupts, DMA.

use crate::memory::Memory;
use crate::outcome::{failed, wait_for, Outcome, Stop};
use ferrite_abi::{
    fold_message, DeviceState, Status, BAR_DOORBELLS, BAR_REGISTERS, CONTROL_RESET, REG_CONTROL,
    REG_DOORBELL_OFFSET, REG_DOORBELL_STRIDE, REG_STATUS,
};
use rustix::event::{eventfd, EventfdFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use vfio_user::Client;

/// The vfio region of configuration space.
pub const CONFIG: u32 = 7;
/// The vfio region of the expansion ROM.
pub const ROM: u32 = 6;
/// The vfio kind of interrupt INTx.
pub const INTX: u32 = 0;
/// The vfio kind of interrupt MSI.
pub const MSI: u32 = 1;
/// The vfio kind of interrupt MSI-X.
pub const MSIX: u32 = 2;
/// vfio: trigger, eventfds.
pub const SET_EVENTFD: u32 = 0x24;
/// vfio: trigger, no data.
pub const SET_NONE: u32 = 0x21;
/// vfio: unmask, no data.
pub const UNMASK_NONE: u32 = 0x11;
/// vfio: unmask, eventfd.
pub const UNMASK_EVENTFD: u32 = 0x14;

/// Configuration space: the Command register.
pub const PCI_COMMAND: u64 = 0x04;
/// Command register: memory space.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: bus master.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command register: Interrupt Disable.
pub const COMMAND_NO_PIN: u16 = 1 << 10;
/// Configuration space: the Status register.
pub const PCI_STATUS: u64 = 0x06;
/// Status register: Interrupt Status.
pub const STATUS_PIN: u16 = 1 << 3;
/// Configuration space: the interrupt pin.
pub const PCI_PIN: u64 = 0x3d;
/// Capability: power management.
pub const CAPABILITY_POWER: u8 = 0x01;
/// Capability: MSI.
pub const CAPABILITY_MSI: u8 = 0x05;
/// Capability: PCI Express.
pub const CAPABILITY_EXPRESS: u8 = 0x10;
/// Capability: MSI-X.
pub const CAPABILITY_MSIX: u8 = 0x11;

/// Most interrupts that a check looks at: what one message may carry.
const MAX_INTERRUPTS: usize = 16;

/// Reads some bytes of a region at once.
pub fn read<const N: usize>(
    client: &mut Client,
    region: u32,
    offset: u64,
) -> Result<[u8; N], vfio_user::Error> {
    let mut bytes = [0; N];
    client.region_read(region, offset, &mut bytes)?;
    Ok(bytes)
}

/// The offset of a capability in configuration space, if there is one of this number.
pub fn find_capability(client: &mut Client, id: u8) -> Result<Option<u64>, vfio_user::Error> {
    /// As many as there is room for.
    const MOST: usize = 48;
    let [mut at] = read(client, CONFIG, 0x34)?;
    for _ in 0..MOST {
        if at == 0 {
            break;
        }
        let [found, next] = read(client, CONFIG, at.into())?;
        if found == id {
            return Ok(Some(at.into()));
        }
        at = next;
    }
    Ok(None)
}

/// An eventfd for an interrupt.
pub fn event() -> Result<OwnedFd, rustix::io::Errno> {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
}

/// A way in which a function interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By the entries of the MSI-X table.
    MsiX,
    /// By as many MSI vectors, as a power of two.
    Msi(u16),
    /// By the pin.
    Pin,
}

impl Mode {
    fn index(self) -> u32 {
        match self {
            Self::MsiX => MSIX,
            Self::Msi(_) => MSI,
            Self::Pin => INTX,
        }
    }
}

/// A connection to a device.
pub struct Device {
    client: Client,
    interrupts: Vec<OwnedFd>,
    vectors: u16,
    mode: Mode,
    stride: u32,
    doorbells: u64,
}

impl Device {
    /// Connects to the device that listens at a socket.
    pub fn connect(path: &Path) -> Outcome<Self> {
        // The file is there a moment before somebody listens.
        let mut client =
            wait_for(
                "somebody who listens at the device's socket",
                || match Client::new(path) {
                    Ok(client) => Ok(Some(client)),
                    Err(vfio_user::Error::Connect(_)) => Ok(None),
                    Err(error) => Err(Stop::from(error)),
                },
            )?;
        let mut vectors = [0; 3];
        for (index, count) in (INTX..).zip(&mut vectors) {
            *count = client.get_irq_info(index)?.count as u16;
        }
        let mode = match vectors {
            [_, 0, 0] => Mode::Pin,
            [_, vectors, 0] => Mode::Msi(vectors),
            _ => Mode::MsiX,
        };
        let mut transport = Self {
            client,
            interrupts: Vec::new(),
            vectors: vectors[mode.index() as usize],
            mode,
            stride: 0,
            doorbells: 0,
        };
        let most = MAX_INTERRUPTS.min(transport.vectors.into());
        transport.interrupts = (0..most).map(|_| event()).collect::<Result<_, _>>()?;
        transport.stride = transport.register32(REG_DOORBELL_STRIDE)?;
        transport.doorbells = transport.register64(REG_DOORBELL_OFFSET)?;
        Ok(transport)
    }

    /// Bytes of a BAR or other region.
    pub fn region_size(&self, region: u32) -> u64 {
        self.client.region(region).map_or(0, |region| region.size)
    }

    /// Vectors of the mode, as the bus has them.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// The mode that is enabled.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The modes that the function has, the best first.
    pub fn modes(&mut self) -> Outcome<Vec<Mode>> {
        let mut modes = Vec::new();
        if self.client.get_irq_info(MSIX)?.count > 0 {
            modes.push(Mode::MsiX);
        }
        let mut msi = self.client.get_irq_info(MSI)?.count as u16;
        while msi > 0 {
            modes.push(Mode::Msi(msi));
            msi /= 2;
        }
        if self.client.get_irq_info(INTX)?.count > 0 {
            modes.push(Mode::Pin);
        }
        Ok(modes)
    }

    /// Changes the mode, as a host does: what was there is disabled before.
    pub fn set_mode(&mut self, mode: Mode) -> Outcome {
        self.enable(false)?;
        self.client
            .set_irqs(self.mode.index(), SET_NONE, 0, 0, &[])?;
        self.mode = mode;
        self.vectors = match mode {
            Mode::MsiX => self.client.get_irq_info(MSIX)?.count as u16,
            Mode::Msi(vectors) => vectors,
            Mode::Pin => 1,
        };
        let most = MAX_INTERRUPTS.min(self.vectors.into());
        self.interrupts = (0..most).map(|_| event()).collect::<Result<_, _>>()?;
        self.enable(true)?;
        self.assign()
    }

    /// Gives the device the eventfds of the mode.
    fn assign(&mut self) -> Outcome {
        let fds: Vec<_> = self.interrupts.iter().map(AsRawFd::as_raw_fd).collect();
        let index = self.mode.index();
        Ok(self
            .client
            .set_irqs(index, SET_EVENTFD, 0, fds.len() as u32, &fds)?)
    }

    /// Enables the mode in configuration space, or disables it. The pin is what is left where
    /// neither MSI nor MSI-X is.
    fn enable(&mut self, on: bool) -> Outcome {
        let (capability, bits) = match self.mode {
            Mode::MsiX => (CAPABILITY_MSIX, 1 << 15),
            Mode::Msi(vectors) => (CAPABILITY_MSI, 1 | ((vectors.ilog2() as u16) << 4)),
            Mode::Pin => return Ok(()),
        };
        let at = self.capability(capability)?;
        self.set_config16(at + 2, if on { bits } else { 0 })
    }

    /// Lets the pin tell of its level again, after it has told of it once.
    pub fn unmask_pin(&mut self) -> Outcome {
        Ok(self.client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[])?)
    }

    /// Reads some bytes of a region at once.
    pub fn read<const N: usize>(&mut self, region: u32, offset: u64) -> Outcome<[u8; N]> {
        Ok(read(&mut self.client, region, offset)?)
    }

    /// Writes some bytes of a region at once.
    pub fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) -> Outcome {
        Ok(self.client.region_write(region, offset, bytes)?)
    }

    /// Reads a 32-bit register.
    pub fn register32(&mut self, register: usize) -> Outcome<u32> {
        Ok(u32::from_le_bytes(
            self.read(BAR_REGISTERS, register as u64)?,
        ))
    }

    /// Reads a 64-bit register.
    pub fn register64(&mut self, register: usize) -> Outcome<u64> {
        Ok(u64::from_le_bytes(
            self.read(BAR_REGISTERS, register as u64)?,
        ))
    }

    /// Writes a 32-bit register.
    pub fn set_register32(&mut self, register: usize, value: u32) -> Outcome {
        self.write(BAR_REGISTERS, register as u64, &value.to_le_bytes())
    }

    /// Writes a 64-bit register.
    pub fn set_register64(&mut self, register: usize, value: u64) -> Outcome {
        self.write(BAR_REGISTERS, register as u64, &value.to_le_bytes())
    }

    /// Reads `REG_STATUS`.
    pub fn status(&mut self) -> Outcome<Status> {
        Ok(Status(self.register32(REG_STATUS)?))
    }

    /// Waits for a state.
    pub fn wait_state(&mut self, state: DeviceState) -> Outcome {
        wait_for(&format!("the state {state:?}"), || {
            Ok((self.status()?.state() == Some(state)).then_some(()))
        })
    }

    /// Resets by register, and waits until that is done.
    pub fn control_reset(&mut self) -> Outcome {
        self.set_register32(REG_CONTROL, CONTROL_RESET)?;
        self.wait_state(DeviceState::Ready)
    }

    /// Where a doorbell is in its BAR.
    pub fn doorbell_offset(&self, page: u32, offset: usize) -> u64 {
        self.doorbells + (u64::from(page) << self.stride) + offset as u64
    }

    /// Rings a doorbell of a page.
    pub fn doorbell(&mut self, page: u32, offset: usize, word: u64) -> Outcome {
        let at = self.doorbell_offset(page, offset);
        self.write(BAR_DOORBELLS, at, &word.to_le_bytes())
    }

    /// Reads 32 bits of configuration space.
    pub fn config32(&mut self, offset: u64) -> Outcome<u32> {
        Ok(u32::from_le_bytes(self.read(CONFIG, offset)?))
    }

    /// Reads 16 bits of configuration space.
    pub fn config16(&mut self, offset: u64) -> Outcome<u16> {
        Ok(u16::from_le_bytes(self.read(CONFIG, offset)?))
    }

    /// Writes 16 bits of configuration space.
    pub fn set_config16(&mut self, offset: u64, value: u16) -> Outcome {
        self.write(CONFIG, offset, &value.to_le_bytes())
    }

    /// Writes 32 bits of configuration space.
    pub fn set_config32(&mut self, offset: u64, value: u32) -> Outcome {
        self.write(CONFIG, offset, &value.to_le_bytes())
    }

    /// The offset of a capability, if there is one of this number.
    pub fn find_capability(&mut self, id: u8) -> Outcome<Option<u64>> {
        Ok(find_capability(&mut self.client, id)?)
    }

    /// The offset of a capability.
    pub fn capability(&mut self, id: u8) -> Outcome<u64> {
        match self.find_capability(id)? {
            Some(at) => Ok(at),
            None => failed(format!("there is no capability {id:#x}")),
        }
    }

    /// Lets the device reach memory and raise interrupts, or keeps it from that.
    pub fn set_bus_master(&mut self, on: bool) -> Outcome {
        let command = COMMAND_MEMORY | if on { COMMAND_MASTER } else { 0 };
        self.set_config16(PCI_COMMAND, command)
    }

    /// Resets the function by its PCI Express capability.
    pub fn function_level_reset(&mut self) -> Outcome {
        const DEVICE_CONTROL: u64 = 8;
        const INITIATE: u16 = 1 << 15;
        let express = self.capability(CAPABILITY_EXPRESS)?;
        let control = self.config16(express + DEVICE_CONTROL)?;
        self.set_config16(express + DEVICE_CONTROL, control | INITIATE)?;
        self.wait_state(DeviceState::Ready)?;
        // As a host restores what it had set.
        self.enable(true)
    }

    /// Resets as the machine does, and takes the interrupts.
    pub fn reset(&mut self) -> Outcome {
        self.client.reset()?;
        let mode = self.modes()?.first().copied();
        let Some(mode) = mode else {
            return failed("the device has nothing to interrupt by");
        };
        self.set_mode(mode)?;
        for fd in &self.interrupts {
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
        self.wait_state(DeviceState::Ready)
    }

    /// Gives the device a stretch of memory.
    pub fn map(&mut self, memory: &Memory) -> Outcome {
        let (base, size) = (memory.base(), memory.size());
        Ok(self
            .client
            .dma_map(0, base, size, memory.file().as_raw_fd())?)
    }

    /// Takes a stretch of memory away.
    pub fn unmap(&mut self, memory: &Memory) -> Outcome {
        Ok(self.client.dma_unmap(memory.base(), memory.size())?)
    }

    /// How often the interrupt of a message was raised since the last call.
    pub fn interrupts(&self, message: u16) -> u64 {
        let fd = fold_message(message, self.vectors)
            .and_then(|vector| self.interrupts.get(usize::from(vector)));
        let mut count = [0; 8];
        match fd.map(|fd| rustix::io::read(fd, &mut count)) {
            Some(Ok(_)) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// How many messages checks may use, each with an interrupt of its own.
    pub fn own_messages(&self) -> u16 {
        self.interrupts.len() as u16
    }
}
