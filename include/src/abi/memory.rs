// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The translation and protection table: steering tags and rights.

/// Access right: the device may write on behalf of a local work request.
pub const ACCESS_LOCAL_WRITE: u32 = 1 << 0;
/// Access right: a peer may write.
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
/// Access right: a peer may read.
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
/// Access right: a peer may run atomic operations.
pub const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
/// Access right: windows may be bound to the region.
pub const ACCESS_WINDOW_BIND: u32 = 1 << 4;
/// Addresses count from zero at the start of the region.
pub const ACCESS_ZERO_BASED: u32 = 1 << 5;
/// The entry becomes invalid when the first message that writes to it is complete.
pub const ACCESS_ONE_TOUCH: u32 = 1 << 6;
/// Access right: a peer may have what it wrote made visible to all ([`super::FLUSH_GLOBAL`]).
/// There is no such right for persistence: the device does not know what becomes of host memory.
pub const ACCESS_FLUSH_GLOBAL: u32 = 1 << 7;
/// Every right a region may be given.
pub const ACCESS_ALL: u32 = 0xff;
/// The rights that a peer uses.
pub const ACCESS_REMOTE: u32 = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;

/// The tag that stands for all of host memory by DMA address, for work requests (never for a
/// peer) of queue pairs created with [`super::QP_FLAG_PRIVILEGED`].
pub const TAG_ALL_MEMORY: u32 = 0;

/// A steering tag: what the verbs call lkey and rkey. 24-bit index, 8-bit instance.
///
/// The driver chooses both. Another instance of the same index is another tag, so that a tag that
/// was revoked stays refused when the index is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u32);

impl Tag {
    /// Puts a tag together.
    pub const fn new(index: u32, instance: u8) -> Self {
        Self((index << 8) | instance as u32)
    }

    /// The table index.
    pub const fn index(self) -> u32 {
        self.0 >> 8
    }

    /// The instance.
    pub const fn instance(self) -> u8 {
        self.0 as u8
    }
}

numbers! {
    /// What a table entry stands for.
    pub enum TagKind: u8 {
        /// A memory region.
        Region = 1,
        /// A memory window, type 1: bound through any queue pair of its domain.
        Window1 = 2,
        /// A memory window, type 2B: bound to a queue pair and a domain.
        Window2B = 3,
        /// A list of pieces of regions, one after another.
        List = 5,
    }
}

/// Longest message and longest work request, in bytes.
pub const MAX_MESSAGE: u32 = 1 << 31;
