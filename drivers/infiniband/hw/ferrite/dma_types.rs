// SPDX-License-Identifier: GPL-2.0

//! Which layouts of the device interface may be copied as bytes: to and from DMA memory, or to
//! and from a process.

use crate::abi;
use crate::abi::Plain;
use crate::requests::{
    ENTRIES,
    LOG_ENTRIES, //
};

/// One 64-byte block of a ring, as the words it is written in.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// The contents.
    pub(crate) words: [u32; 16],
}

impl Block {
    /// A block of zeroes.
    pub(crate) const ZERO: Self = Self { words: [0; 16] };
}

const _: () = assert!(core::mem::size_of::<Block>() == abi::BLOCK_SIZE);

/// The control ring, and the record behind it.
#[repr(C)]
pub(crate) struct ControlRing {
    pub(crate) entries: [abi::CommandEntry; ENTRIES],
    pub(crate) record: abi::ControlRecord,
}

const _: () = {
    use core::mem::offset_of;
    let record = abi::control_record_offset(LOG_ENTRIES) as usize;
    assert!(offset_of!(ControlRing, record) == record);
    // There is no padding.
    assert!(size_of::<ControlRing>() == record + size_of::<abi::ControlRecord>());
};

/// Room for the reply of a query.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Reply {
    /// The reply, as the device wrote it.
    pub(crate) words: [u64; Reply::SIZE / size_of::<u64>()],
}

impl Reply {
    /// The largest reply there is.
    pub(crate) const SIZE: usize = 256;
}

/// The structure of a command that has none.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Nothing;

// SAFETY: there are no bytes in it.
unsafe impl Plain for Nothing {}

/// The reply of a query for counters.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Counters(pub(crate) [u64; abi::COUNTER_NAMES.len()]);

// SAFETY: an array of integers has no padding and accepts every bit pattern.
unsafe impl Plain for Counters {}

/// The reply of a query for counters of queue pairs.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpCounters(pub(crate) [u64; abi::COUNTER_NAMES.len()]);

// SAFETY: an array of integers has no padding and accepts every bit pattern.
unsafe impl Plain for QpCounters {}

/// The reply of a query for counters of channels, in the order of their names.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceChannelCounters(pub(crate) [u64; abi::CHANNEL_COUNTER_NAMES.len()]);

// SAFETY: an array of integers has no padding and accepts every bit pattern.
unsafe impl Plain for DeviceChannelCounters {}

/// Says that any bytes make a value of a type, and that all of its bytes are initialised.
macro_rules! dma_types {
    ($($type:ty),* $(,)?) => {$(
        // SAFETY: the type is made of integers only (a `Plain` layout, or declared above), so
        // that every bit pattern is a value of it, and it has no interior mutability.
        unsafe impl kernel::transmute::FromBytes for $type {}
        // SAFETY: the type has no padding (a `Plain` layout, or declared above with a size that
        // is a multiple of its alignment) and no interior mutability.
        unsafe impl kernel::transmute::AsBytes for $type {}
    )*};
}

dma_types! {
    Block,
    ControlRing,
    Reply,
    abi::BootBlock,
    abi::CommandEntry,
    abi::CompletionEntry,
    abi::EventEntry,
    abi::UverbsContextRequest,
    abi::UverbsContextResponse,
    abi::UverbsCqRequest,
    abi::UverbsCqResponse,
    abi::UverbsMrRequest,
    abi::UverbsPdResponse,
    abi::UverbsQpRequest,
    abi::UverbsQpResponse,
    abi::UverbsSrqRequest,
    abi::UverbsHashRequest,
    abi::UverbsWqRequest,
    abi::UverbsSrqResponse,
}
