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
/// The vfio kind of interrupt MSI-X.
pub const MSIX: u32 = 2;
/// vfio: trigger, eventfds.
pub const SET_EVENTFD: u32 = 0x24;
/// vfio: trigger, no data.
pub const SET_NONE: u32 = 0x21;

/// Configuration space: the Command register.
pub const PCI_COMMAND: u64 = 0x04;
/// Command register: memory space.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: bus master.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Capability: power management.
pub const CAPABILITY_POWER: u8 = 0x01;
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

/// A connection to a device.
pub struct Device {
    client: Client,
    interrupts: Vec<OwnedFd>,
    vectors: u16,
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
        let vectors = client.get_irq_info(MSIX)?.count as u16;
        let interrupts = (0..MAX_INTERRUPTS.min(vectors.into()))
            .map(|_| event())
            .collect::<Result<Vec<_>, _>>()?;
        let mut transport = Self {
            client,
            interrupts,
            vectors,
            stride: 0,
            doorbells: 0,
        };
        transport.stride = transport.register32(REG_DOORBELL_STRIDE)?;
        transport.doorbells = transport.register64(REG_DOORBELL_OFFSET)?;
        Ok(transport)
    }

    /// Bytes of a BAR or other region.
    pub fn region_size(&self, region: u32) -> u64 {
        self.client.region(region).map_or(0, |region| region.size)
    }

    /// Entries of the MSI-X table, as the bus has them.
    pub fn vectors(&self) -> u16 {
        self.vectors
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
        self.wait_state(DeviceState::Ready)
    }

    /// Resets as the machine does, and takes the interrupts.
    pub fn reset(&mut self) -> Outcome {
        self.client.reset()?;
        let fds: Vec<_> = self.interrupts.iter().map(AsRawFd::as_raw_fd).collect();
        self.client
            .set_irqs(MSIX, SET_EVENTFD, 0, fds.len() as u32, &fds)?;
        self.client
            .set_irqs(MSIX, SET_NONE, 0, 0, &[])
            .map_err(Stop::from)?;
        self.client
            .set_irqs(MSIX, SET_EVENTFD, 0, fds.len() as u32, &fds)?;
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
