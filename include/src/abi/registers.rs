// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The register BAR: identity, handshake, start and stop. Nothing here is used on a data path.

/// `REG_MAGIC` reads as these four bytes, "FeR1".
pub const MAGIC: u32 = u32::from_le_bytes(*b"FeR1");
/// Interface version: a driver and a device of the same major version work together.
pub const ABI_MAJOR: u16 = 1;
/// Interface revision within a major version; a larger one only adds.
pub const ABI_MINOR: u16 = 0;

/// 32-bit, read: [`MAGIC`].
pub const REG_MAGIC: usize = 0x000;
/// 32-bit, read: interface version, major in the upper half.
pub const REG_ABI_VERSION: usize = 0x004;
/// 32-bit, read: see [`Status`].
pub const REG_STATUS: usize = 0x008;
/// 32-bit, write: see `CONTROL_*`.
pub const REG_CONTROL: usize = 0x00c;
/// 64-bit, read: optional features the device offers, `FEATURE_*`.
pub const REG_FEATURES: usize = 0x010;
/// 64-bit, write: the features the driver will use, a subset; written before `CONTROL_ENABLE`.
pub const REG_DRIVER_FEATURES: usize = 0x018;
/// 32-bit, write: interface version the driver speaks; written before `CONTROL_ENABLE`.
pub const REG_DRIVER_VERSION: usize = 0x020;
/// 64-bit, write: DMA address of the [`BootBlock`]; read by the device at `CONTROL_ENABLE`.
pub const REG_BOOT: usize = 0x028;
/// 64-bit, read: MAC address of the paired network interface, first byte lowest; upper 16 bits 0.
pub const REG_MAC: usize = 0x030;
/// 32-bit, read: MSI-X vectors the device has.
pub const REG_VECTORS: usize = 0x038;
/// 32-bit, read: model version, major.minor.patch in bits 31:16, 15:8, 7:0.
pub const REG_FIRMWARE: usize = 0x03c;

/// `REG_CONTROL`: return to the state after power-on. Any other bit is ignored beside it.
pub const CONTROL_RESET: u32 = 1 << 0;
/// `REG_CONTROL`: read the boot block and start. Only in state `READY`.
pub const CONTROL_ENABLE: u32 = 1 << 1;

/// A read of a register of a device that is gone gives all ones.
pub const GONE: u32 = u32::MAX;

numbers! {
    /// What the device is doing: bits 7:0 of `REG_STATUS`.
    pub enum DeviceState: u8 {
        /// Reset is done; waiting for `CONTROL_ENABLE`.
        Ready = 1,
        /// Commands and work requests are served.
        Running = 2,
        /// Stopped by an error, see [`FatalCode`]; only a reset leads out.
        Fatal = 3,
    }

    /// Why the device stopped: bits 15:8 of `REG_STATUS`.
    pub enum FatalCode: u8 {
        /// The boot block could not be read, or says something impossible.
        BadBootBlock = 1,
        /// The driver speaks another major version, or wants a feature that was not offered.
        BadHandshake = 2,
        /// An event had to be written to an event queue that does not exist.
        UndefinedEventQueue = 3,
        /// An event queue had no room.
        EventQueueOverflow = 4,
        /// Host memory the device was given for its own rings could not be accessed.
        HostMemory = 5,
        /// The driver rang the command doorbell with an impossible index.
        BadCommandIndex = 6,
        /// Asked for from outside, to see what the driver does.
        Injected = 7,
    }
}

/// The parts of `REG_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// Builds the register value.
    pub const fn new(state: DeviceState, fatal: Option<FatalCode>, link_up: bool) -> Self {
        let code = match fatal {
            Some(code) => code as u32,
            None => 0,
        };
        Self(state as u32 | (code << 8) | ((link_up as u32) << 16))
    }

    /// True when the read failed because the device is gone.
    pub const fn is_gone(self) -> bool {
        self.0 == GONE
    }

    /// What the device is doing, if that is a known state.
    pub const fn state(self) -> Option<DeviceState> {
        DeviceState::from_number(self.0 as u8)
    }

    /// Why it stopped.
    pub const fn fatal(self) -> Option<FatalCode> {
        FatalCode::from_number((self.0 >> 8) as u8)
    }

    /// Whether the Ethernet link is up.
    pub const fn link_up(self) -> bool {
        self.0 & (1 << 16) != 0
    }
}

layout! {
    /// What the device needs to take its first command: where the control queue and event queue 0
    /// are. 64-byte aligned, in host memory, read once.
    pub struct BootBlock: 64 {
        /// DMA address of the control ring: contiguous, entries of [`super::CommandEntry`].
        0 => cqp_ring: u64,
        /// DMA address of event queue 0: contiguous, zeroed, entries of [`super::EventEntry`].
        8 => eq0_ring: u64,
        /// Base-2 logarithm of the number of control ring entries.
        16 => cqp_log_entries: u8,
        /// Base-2 logarithm of the number of entries of event queue 0.
        17 => eq0_log_entries: u8,
        /// MSI-X vector of event queue 0.
        18 => eq0_vector: u16,
        /// Zero.
        20 => reserved0: u32,
        /// Zero.
        24 => reserved1: [u64; 5],
    }
}

/// Most entries of the control ring, base-2 logarithm.
pub const CQP_MAX_LOG_ENTRIES: u8 = 12;
