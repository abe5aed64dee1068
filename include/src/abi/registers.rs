// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The register BAR: identity, handshake, start and stop. Nothing here is used on a data path.

/// `REG_MAGIC` reads as these four bytes, "FeR1".
pub const MAGIC: u32 = u32::from_le_bytes(*b"FeR1");
/// Interface version: a driver and a device of the same major version work together.
pub const ABI_MAJOR: u16 = 1;
/// Interface revision within a major version; a larger one only adds.
pub const ABI_MINOR: u16 = 6;

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
/// 32-bit, read: message numbers the function has. An event queue names one; it is raised as the
/// MSI-X or MSI vector of that number, or folded onto fewer: see [`fold_message`].
pub const REG_MESSAGES: usize = 0x038;
/// 32-bit, read: model version, major.minor.patch in bits 31:16, 15:8, 7:0.
pub const REG_FIRMWARE: usize = 0x03c;
/// 32-bit, read: doorbell pages of the function; page 0 is the kernel's, each user context gets one
/// other.
pub const REG_DOORBELL_PAGES: usize = 0x040;
/// 32-bit, read: base-2 logarithm of the bytes from one doorbell page to the next, 12 to
/// [`super::DOORBELL_MAX_LOG_STRIDE`].
pub const REG_DOORBELL_STRIDE: usize = 0x044;
/// 64-bit, read: offset of doorbell page 0 in the doorbell BAR, a multiple of the stride.
pub const REG_DOORBELL_OFFSET: usize = 0x048;
/// 64-bit, read: offset of device memory in the doorbell BAR, a multiple of the largest stride; it
/// can be read and written.
pub const REG_DEVICE_MEMORY_OFFSET: usize = 0x050;
/// 64-bit, read: bytes of device memory, 0 for none.
pub const REG_DEVICE_MEMORY_SIZE: usize = 0x058;
/// 32-bit, read: what the function is, see [`Function`].
pub const REG_FUNCTION: usize = 0x060;
/// 32-bit, read: the most milliseconds that a reset takes.
pub const REG_RESET_TIMEOUT: usize = 0x064;

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
        /// A reset is under way; `Ready` follows.
        Resetting = 4,
    }

    /// Why the device stopped: bits 15:8 of `REG_STATUS`.
    pub enum FatalCode: u8 {
        /// The boot block could not be read, or says something impossible.
        BadBootBlock = 1,
        /// The driver speaks another major version, or wants a feature that was not offered or
        /// without another that it needs.
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

/// `REG_FUNCTION`: the function has RDMA.
pub const FUNCTION_RDMA: u8 = 1 << 0;
/// `REG_FUNCTION`: the function has an Ethernet interface of its own: channels.
pub const FUNCTION_ETHERNET: u8 = 1 << 1;

/// The parts of `REG_FUNCTION`: models 7:0, number 15:8, partner 23:16, has a partner 24.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u32);

impl Function {
    /// Builds the register value.
    pub const fn new(models: u8, number: u8, partner: Option<u8>) -> Self {
        let partner = match partner {
            Some(number) => (1 << 24) | ((number as u32) << 16),
            None => 0,
        };
        Self(models as u32 | ((number as u32) << 8) | partner)
    }

    /// What it is: `FUNCTION_*`.
    pub const fn models(self) -> u8 {
        self.0 as u8
    }

    /// Its number among the functions of the device.
    pub const fn number(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// The PCI function of the same device that has the Ethernet interface of this one's RDMA
    /// ports, or the other way round. Without one the pair is found by `REG_MAC`.
    pub const fn partner(self) -> Option<u8> {
        if self.0 & (1 << 24) != 0 {
            Some((self.0 >> 16) as u8)
        } else {
            None
        }
    }
}

/// The vector that stands for a message number where the host has `vectors` of them, MSI-X or MSI.
/// Without any, every message is the function's interrupt pin.
pub const fn fold_message(message: u16, vectors: u16) -> Option<u16> {
    if vectors == 0 {
        None
    } else {
        Some(message % vectors)
    }
}

layout! {
    /// What the device needs to take its first command: where the control queue and event queue 0
    /// are. 64-byte aligned, in host memory, read once.
    pub struct BootBlock: 64 {
        /// DMA address of the control ring: contiguous, entries of [`super::CommandEntry`], and with
        /// [`super::FEATURE_PENDING_TAGS`] a [`super::ControlRecord`] behind them.
        0 => cqp_ring: u64,
        /// DMA address of event queue 0: contiguous, zeroed, entries of [`super::EventEntry`].
        8 => eq0_ring: u64,
        /// Base-2 logarithm of the number of control ring entries.
        16 => cqp_log_entries: u8,
        /// Base-2 logarithm of the number of entries of event queue 0.
        17 => eq0_log_entries: u8,
        /// Message number of event queue 0.
        18 => eq0_message: u16,
        /// Zero.
        20 => reserved0: u32,
        /// Zero.
        24 => reserved1: [u64; 5],
    }
}

/// Most entries of the control ring, base-2 logarithm.
pub const CQP_MAX_LOG_ENTRIES: u8 = 12;
