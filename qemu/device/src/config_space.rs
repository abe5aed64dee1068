// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PCI configuration space (specification, chapter 1).
//!
//! The monitor emulates BARs, the MSI-X table and much of the header for the
//! guest, and passes every write on to the device. The device keeps what it
//! must act on: memory and bus-master enable, the mode of its interrupts, power
//! state and function-level reset.

use crate::interrupts::{Kinds, Mode};
use ferrite_abi as abi;
use ferrite_engine::Config;

/// Size of a PCIe function's configuration space.
pub const SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const CAP_PM: usize = 0x40;
const CAP_MSIX: usize = 0x50;
const CAP_PCIE: usize = 0x60;
const CAP_MSI: usize = 0xa0;
const CAP_DSN: usize = 0x100;

const ID_PM: u8 = 0x01;
const ID_MSI: u8 = 0x05;
const ID_MSIX: u8 = 0x11;
const ID_PCIE: u8 = 0x10;
const EXT_ID_DSN: u16 = 0x0003;

/// Command: memory space, bus master, parity, SERR#, INTx disable.
const COMMAND_WRITABLE: u16 = 0x0546;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTERRUPT_DISABLE: u16 = 1 << 10;
const STATUS_INTERRUPT: u16 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
/// A memory BAR of 64 bits.
const BAR_MEMORY_64: u32 = 0b100;

const PM_STATUS: usize = CAP_PM + 4;
const PM_NO_SOFT_RESET: u16 = 1 << 3;
const PM_STATE: u16 = 3;
const MSIX_CONTROL: usize = CAP_MSIX + 2;
/// MSI-X enable and function mask.
const MSIX_WRITABLE: u16 = 0xc000;
const MSIX_ENABLE: u16 = 1 << 15;
const MSI_CONTROL: usize = CAP_MSI + 2;
const MSI_ADDRESS: usize = CAP_MSI + 4;
const MSI_DATA: usize = CAP_MSI + 0xc;
const MSI_ENABLE: u16 = 1 << 0;
/// How many the function can send, and how many it may, as powers of two.
const MSI_CAPABLE_SHIFT: u32 = 1;
const MSI_ENABLED_SHIFT: u32 = 4;
const MSI_64_BITS: u16 = 1 << 7;
const MSI_WRITABLE: u16 = MSI_ENABLE | (7 << MSI_ENABLED_SHIFT);

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
    kinds: Kinds,
}

impl ConfigSpace {
    /// The space of a device that is made so and interrupts in these ways.
    pub fn new(config: &Config, kinds: Kinds) -> Self {
        let mut space = Self {
            kinds,
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

        let mut last = CAP_PM;
        space.capability(CAP_PM, ID_PM);
        space.set16(CAP_PM + 2, 3);
        space.set16(PM_STATUS, PM_NO_SOFT_RESET);
        space.allow16(PM_STATUS, PM_STATE);

        if let Some(most) = kinds.msix.checked_sub(1) {
            space.chain(&mut last, CAP_MSIX, ID_MSIX);
            space.set16(MSIX_CONTROL, most);
            space.allow16(MSIX_CONTROL, MSIX_WRITABLE);
            space.set32(CAP_MSIX + 4, abi::BAR_MSIX);
            space.set32(CAP_MSIX + 8, abi::MSIX_PBA_OFFSET as u32 | abi::BAR_MSIX);
        }
        if let Some(log) = kinds.msi.checked_ilog2() {
            // Vectors are not masked one by one: QEMU does not keep such a mask where KVM
            // delivers them.
            space.chain(&mut last, CAP_MSI, ID_MSI);
            space.set16(
                MSI_CONTROL,
                MSI_64_BITS | ((log as u16) << MSI_CAPABLE_SHIFT),
            );
            space.allow16(MSI_CONTROL, MSI_WRITABLE);
            for at in [MSI_ADDRESS + 2, MSI_ADDRESS + 4, MSI_ADDRESS + 6, MSI_DATA] {
                space.allow16(at, 0xffff);
            }
            space.allow16(MSI_ADDRESS, 0xfffc);
        }
        if kinds.pin {
            space.bytes[INTERRUPT_PIN] = 1;
            space.writable[INTERRUPT_LINE] = 0xff;
        }

        space.chain(&mut last, CAP_PCIE, ID_PCIE);
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

    /// How the guest wants to be interrupted.
    pub fn mode(&self) -> Mode {
        let msi = self.get16(MSI_CONTROL);
        if self.get16(MSIX_CONTROL) & MSIX_ENABLE != 0 {
            Mode::MsiX
        } else if msi & MSI_ENABLE != 0 {
            // A guest may ask for more than there are.
            let asked = 1 << ((msi >> MSI_ENABLED_SHIFT) & 7);
            Mode::Msi(self.kinds.msi.min(asked))
        } else if self.kinds.pin && self.get16(COMMAND) & COMMAND_INTERRUPT_DISABLE == 0 {
            Mode::Pin
        } else {
            Mode::None
        }
    }

    /// Follows the pin bits with Interrupt Status, which only who has a pin has.
    pub fn set_interrupt_status(&mut self, on: bool) {
        let status = self.get16(STATUS) & !STATUS_INTERRUPT;
        let bit = if on && self.kinds.pin {
            STATUS_INTERRUPT
        } else {
            0
        };
        self.set16(STATUS, status | bit);
    }

    fn capability(&mut self, at: usize, id: u8) {
        self.bytes[at] = id;
    }

    /// Adds a capability behind the last one.
    fn chain(&mut self, last: &mut usize, at: usize, id: u8) {
        self.bytes[*last + 1] = at as u8;
        self.capability(at, id);
        *last = at;
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

    fn space(vectors: u16) -> ConfigSpace {
        ConfigSpace::new(&Config::new(MAC, vectors), Kinds::all(vectors))
    }

    fn capabilities(space: &ConfigSpace) -> Vec<u8> {
        let mut found = Vec::new();
        let mut at = usize::from(read::<1>(space, CAPABILITIES)[0]);
        while at != 0 {
            let [id, next] = read(space, at);
            found.push(id);
            at = usize::from(next);
            assert!(found.len() < 10);
        }
        found
    }

    #[test]
    fn what_is_not_offered_is_not_told_of_and_cannot_be_enabled() {
        let config = Config::new(MAC, 64);
        let none = Kinds::default();
        for (kinds, ids) in [
            (Kinds::all(64), vec![ID_PM, ID_MSIX, ID_MSI, ID_PCIE]),
            (
                Kinds {
                    msix: 0,
                    ..Kinds::all(64)
                },
                vec![ID_PM, ID_MSI, ID_PCIE],
            ),
            (
                Kinds {
                    msi: 0,
                    ..Kinds::all(64)
                },
                vec![ID_PM, ID_MSIX, ID_PCIE],
            ),
            (Kinds { pin: true, ..none }, vec![ID_PM, ID_PCIE]),
        ] {
            let mut space = ConfigSpace::new(&config, kinds);
            assert_eq!(capabilities(&space), ids);
            assert_eq!(read(&space, INTERRUPT_PIN), [u8::from(kinds.pin)]);
            // Interrupt Status and Interrupt Line are of the pin alone.
            space.set_interrupt_status(true);
            let pending = read16(&space, STATUS) & STATUS_INTERRUPT != 0;
            assert_eq!(pending, kinds.pin);
            space.write(INTERRUPT_LINE as u64, &[0x2b, 0xff]);
            let line = if kinds.pin { 0x2b } else { 0 };
            assert_eq!(read(&space, INTERRUPT_LINE), [line, u8::from(kinds.pin)]);
            let without_messages = if kinds.pin { Mode::Pin } else { Mode::None };
            assert_eq!(space.mode(), without_messages);
            space.write(MSI_CONTROL as u64, &[0xff; 2]);
            let msi = if kinds.msi > 0 {
                Mode::Msi(32)
            } else {
                without_messages
            };
            assert_eq!(space.mode(), msi);
            space.write(MSIX_CONTROL as u64, &[0xff; 2]);
            assert_eq!(space.mode(), if kinds.msix > 0 { Mode::MsiX } else { msi });
            space.reset();
            assert_eq!(space.mode(), without_messages);
        }
    }

    #[test]
    fn the_mode_is_the_best_that_is_enabled() {
        let mut space = space(16);
        assert_eq!(
            read16(&space, MSI_CONTROL),
            MSI_64_BITS | (4 << MSI_CAPABLE_SHIFT)
        );
        for (enabled, vectors) in [(0, 1), (2, 4), (4, 16), (5, 16), (7, 16)] {
            let control: u16 = MSI_ENABLE | (enabled << MSI_ENABLED_SHIFT);
            space.write(MSI_CONTROL as u64, &control.to_le_bytes());
            assert_eq!(space.mode(), Mode::Msi(vectors));
        }
        space.write(MSI_ADDRESS as u64, &[0xff; 12]);
        assert_eq!(
            read::<12>(&space, MSI_ADDRESS),
            [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]
        );
        space.write(MSI_CONTROL as u64, &[0, 0]);
        assert_eq!(space.mode(), Mode::Pin);
        space.write(COMMAND as u64, &COMMAND_INTERRUPT_DISABLE.to_le_bytes());
        assert_eq!(space.mode(), Mode::None);
        space.set_interrupt_status(true);
        assert_eq!(
            read16(&space, STATUS),
            STATUS_CAPABILITIES | STATUS_INTERRUPT
        );
        space.set_interrupt_status(false);
        assert_eq!(read16(&space, STATUS), STATUS_CAPABILITIES);
    }

    #[test]
    fn the_capability_list_holds_each_capability_once() {
        let space = space(64);
        assert_eq!(capabilities(&space), [ID_PM, ID_MSIX, ID_MSI, ID_PCIE]);
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
            let mut space = ConfigSpace::new(&config, Kinds::all(1));
            let at = BAR0 + 8;
            space.write(at as u64, &[0xff; 8]);
            let value = u64::from_le_bytes(read(&space, at));
            assert_eq!(!(value & !0xf) + 1, size);
            assert_eq!(value & 0xf, 4);
        }
    }

    #[test]
    fn bus_master_follows_command_and_power_state() {
        let mut space = space(1);
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
        let mut space = space(1);
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
        let mut space = space(1);
        space.write(0, &[0; 4]);
        assert_eq!(read16(&space, 0), abi::PCI_VENDOR_ID);
        space.write(SIZE as u64 - 1, &[1, 2, 3]);
        space.write(u64::MAX - 1, &[1]);
        assert_eq!(read::<4>(&space, SIZE - 2), [0; 4]);
    }
}
