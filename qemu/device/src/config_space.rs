// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PCI configuration space (specification, chapter 1).
//!
//! The monitor emulates BARs, the MSI-X table and much of the header for the
//! guest, and passes every write on to the device. The device keeps what it
//! must act on: memory and bus-master enable, power state and function-level
//! reset.

use ferrite_abi as abi;
use ferrite_engine::Config;

/// Size of a PCIe function's configuration space.
pub const SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const CAP_PM: usize = 0x40;
const CAP_MSIX: usize = 0x50;
const CAP_PCIE: usize = 0x60;
const CAP_DSN: usize = 0x100;

const ID_PM: u8 = 0x01;
const ID_MSIX: u8 = 0x11;
const ID_PCIE: u8 = 0x10;
const EXT_ID_DSN: u16 = 0x0003;

/// Command: memory space, bus master, parity, SERR#, INTx disable.
const COMMAND_WRITABLE: u16 = 0x0546;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const STATUS_CAPABILITIES: u16 = 1 << 4;
/// A memory BAR of 64 bits.
const BAR_MEMORY_64: u32 = 0b100;

const PM_STATUS: usize = CAP_PM + 4;
const PM_NO_SOFT_RESET: u16 = 1 << 3;
const PM_STATE: u16 = 3;
const MSIX_CONTROL: usize = CAP_MSIX + 2;
/// MSI-X enable and function mask.
const MSIX_WRITABLE: u16 = 0xc000;

const DEVICE_CAPABILITIES: usize = CAP_PCIE + 4;
const DEVICE_CONTROL: usize = CAP_PCIE + 8;
const LINK_CAPABILITIES: usize = CAP_PCIE + 0xc;
const LINK_STATUS: usize = CAP_PCIE + 0x12;
const LINK_CAPABILITIES_2: usize = CAP_PCIE + 0x2c;
const DEVICE_CAPABILITY_ROLE_BASED: u32 = 1 << 15;
const DEVICE_CAPABILITY_FLR: u32 = 1 << 28;
/// All of Device Control but the reset bit, which reads as zero.
const DEVICE_CONTROL_WRITABLE: u16 = 0x7fff;
const DEVICE_CONTROL_FLR: u16 = 1 << 15;
const LINK_SPEED: u32 = 4;
const LINK_WIDTH: u32 = 16;
/// Speeds up to 16 GT/s.
const LINK_SPEEDS: u32 = 0b1111 << 1;

/// What a write asks the device to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing beyond the register itself.
    None,
    /// A function-level reset.
    FunctionReset,
}

/// A function's configuration space.
pub struct ConfigSpace {
    bytes: Box<[u8; SIZE]>,
    writable: Box<[u8; SIZE]>,
    initial: Box<[u8; SIZE]>,
}

impl ConfigSpace {
    /// The space of a device that is made so.
    pub fn new(config: &Config) -> Self {
        let mut space = Self {
            bytes: Box::new([0; SIZE]),
            writable: Box::new([0; SIZE]),
            initial: Box::new([0; SIZE]),
        };
        space.set16(0x00, abi::PCI_VENDOR_ID);
        space.set16(0x02, abi::PCI_DEVICE_ID);
        space.set16(STATUS, STATUS_CAPABILITIES);
        space.set32(0x08, (abi::PCI_CLASS << 8) | u32::from(abi::PCI_REVISION));
        space.set16(SUBSYSTEM, abi::PCI_VENDOR_ID);
        space.set16(SUBSYSTEM + 2, abi::PCI_DEVICE_ID);
        space.bytes[CAPABILITIES] = CAP_PM as u8;
        space.allow16(COMMAND, COMMAND_WRITABLE);
        for (bar, size) in [
            (abi::BAR_REGISTERS, abi::BAR_REGISTERS_SIZE as u64),
            (abi::BAR_DOORBELLS, config.doorbell_bar_size()),
            (abi::BAR_MSIX, abi::BAR_MSIX_SIZE as u64),
        ] {
            let at = BAR0 + 4 * bar as usize;
            space.set32(at, BAR_MEMORY_64);
            // What is not writable in a BAR tells its size.
            let mask = !(size - 1);
            space.allow16(at, mask as u16);
            space.allow16(at + 2, (mask >> 16) as u16);
            space.allow16(at + 4, (mask >> 32) as u16);
            space.allow16(at + 6, (mask >> 48) as u16);
        }

        space.capability(CAP_PM, ID_PM, CAP_MSIX);
        space.set16(CAP_PM + 2, 3);
        space.set16(PM_STATUS, PM_NO_SOFT_RESET);
        space.allow16(PM_STATUS, PM_STATE);

        space.capability(CAP_MSIX, ID_MSIX, CAP_PCIE);
        // A vector for each message.
        space.set16(MSIX_CONTROL, config.messages.max(1) - 1);
        space.allow16(MSIX_CONTROL, MSIX_WRITABLE);
        space.set32(CAP_MSIX + 4, abi::BAR_MSIX);
        space.set32(CAP_MSIX + 8, abi::MSIX_PBA_OFFSET as u32 | abi::BAR_MSIX);

        space.capability(CAP_PCIE, ID_PCIE, 0);
        // Version 2, endpoint.
        space.set16(CAP_PCIE + 2, 2);
        space.set32(
            DEVICE_CAPABILITIES,
            DEVICE_CAPABILITY_ROLE_BASED | DEVICE_CAPABILITY_FLR,
        );
        space.allow16(DEVICE_CONTROL, DEVICE_CONTROL_WRITABLE);
        let link = LINK_SPEED | (LINK_WIDTH << 4);
        space.set32(LINK_CAPABILITIES, link);
        space.set16(LINK_STATUS, link as u16);
        space.set32(LINK_CAPABILITIES_2, LINK_SPEEDS);

        space.set16(CAP_DSN, EXT_ID_DSN);
        // Version 1, and nothing behind it.
        space.set16(CAP_DSN + 2, 1);
        // The serial number is the address widened as for an EUI-64.
        let [a, b, c, d, e, f] = config.mac;
        space.set32(CAP_DSN + 4, u32::from_be_bytes([0xfe, d, e, f]));
        space.set32(CAP_DSN + 8, u32::from_be_bytes([a, b, c, 0xff]));

        *space.initial = *space.bytes;
        space
    }

    /// Reads; what lies outside reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = position(offset, index)
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    /// Writes the writable bits.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let mut effect = Effect::None;
        for (index, byte) in data.iter().enumerate() {
            let Some(at) = position(offset, index) else {
                continue;
            };
            if at == DEVICE_CONTROL + 1 && byte & (DEVICE_CONTROL_FLR >> 8) as u8 != 0 {
                effect = Effect::FunctionReset;
            }
            if let (Some(old), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *old = *old & !mask | byte & mask;
            }
        }
        effect
    }

    /// Returns everything but the BARs to its state after power-on. The
    /// monitor keeps the BARs itself and does not ask for them again.
    pub fn reset(&mut self) {
        let bars = BAR0..BAR0 + 24;
        let mut fresh = *self.initial;
        fresh[bars.clone()].copy_from_slice(&self.bytes[bars]);
        *self.bytes = fresh;
    }

    /// Whether the device may access guest memory and raise interrupts.
    pub fn bus_master(&self) -> bool {
        self.get16(COMMAND) & COMMAND_BUS_MASTER != 0 && self.get16(PM_STATUS) & PM_STATE == 0
    }

    fn capability(&mut self, at: usize, id: u8, next: usize) {
        self.bytes[at] = id;
        self.bytes[at + 1] = next as u8;
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn set16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn allow16(&mut self, at: usize, mask: u16) {
        self.writable[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }
}

/// Where byte `index` of an access at `offset` lies.
fn position(offset: u64, index: usize) -> Option<usize> {
    usize::try_from(offset).ok()?.checked_add(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0xfe, 0, 1];

    fn read<const N: usize>(space: &ConfigSpace, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        space.read(at as u64, &mut bytes);
        bytes
    }

    fn read16(space: &ConfigSpace, at: usize) -> u16 {
        u16::from_le_bytes(read(space, at))
    }

    fn read32(space: &ConfigSpace, at: usize) -> u32 {
        u32::from_le_bytes(read(space, at))
    }

    #[test]
    fn the_capability_list_holds_each_capability_once() {
        let space = ConfigSpace::new(&Config::new(MAC, 64));
        let mut found = Vec::new();
        let mut at = usize::from(read::<1>(&space, CAPABILITIES)[0]);
        while at != 0 {
            let [id, next] = read(&space, at);
            found.push(id);
            at = usize::from(next);
            assert!(found.len() < 10);
        }
        assert_eq!(found, [ID_PM, ID_MSIX, ID_PCIE]);
        assert_eq!(read32(&space, CAP_DSN), 0x0001_0003);
        assert_eq!(
            read::<8>(&space, CAP_DSN + 4),
            [1, 0, 0xfe, 0xfe, 0xff, 0, 0x54, 0x52]
        );
        assert_eq!(read16(&space, MSIX_CONTROL) & 0x7ff, 63);
    }

    #[test]
    fn a_bar_tells_its_size() {
        for (pages, stride, size) in [(2, 12, 2 << 20), (1024, 12, 8 << 20), (16384, 16, 2 << 30)] {
            let config = Config {
                doorbell_pages: pages,
                doorbell_log_stride: stride,
                ..Config::new(MAC, 1)
            };
            let mut space = ConfigSpace::new(&config);
            let at = BAR0 + 8;
            space.write(at as u64, &[0xff; 8]);
            let value = u64::from_le_bytes(read(&space, at));
            assert_eq!(!(value & !0xf) + 1, size);
            assert_eq!(value & 0xf, 4);
        }
    }

    #[test]
    fn bus_master_follows_command_and_power_state() {
        let mut space = ConfigSpace::new(&Config::new(MAC, 1));
        assert!(!space.bus_master());
        space.write(COMMAND as u64, &[6, 0]);
        assert!(space.bus_master());
        space.write(PM_STATUS as u64, &[3, 0]);
        assert!(!space.bus_master());
        space.write(PM_STATUS as u64, &[0, 0]);
        assert!(space.bus_master());
    }

    #[test]
    fn a_function_reset_is_asked_for_by_one_bit() {
        let mut space = ConfigSpace::new(&Config::new(MAC, 1));
        let at = DEVICE_CONTROL as u64;
        assert_eq!(space.write(at, &[0xff, 0x7f]), Effect::None);
        assert_eq!(space.write(at, &[0x10, 0x80]), Effect::FunctionReset);
        assert_eq!(read16(&space, DEVICE_CONTROL), 0x0010);
        assert_eq!(space.write(at + 1, &[0x80]), Effect::FunctionReset);
        space.write(COMMAND as u64, &[6, 0]);
        space.write(BAR0 as u64, &[0, 0, 0, 0xfe]);
        space.reset();
        assert!(!space.bus_master());
        assert_eq!(read16(&space, DEVICE_CONTROL), 0);
        assert_eq!(read32(&space, BAR0), 0xfe00_0004);
    }

    #[test]
    fn identity_is_read_only_and_nothing_lies_outside() {
        let mut space = ConfigSpace::new(&Config::new(MAC, 1));
        space.write(0, &[0; 4]);
        assert_eq!(read16(&space, 0), abi::PCI_VENDOR_ID);
        space.write(SIZE as u64 - 1, &[1, 2, 3]);
        space.write(u64::MAX - 1, &[1]);
        assert_eq!(read::<4>(&space, SIZE - 2), [0; 4]);
    }
}
