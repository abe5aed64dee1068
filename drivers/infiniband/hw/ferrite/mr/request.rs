// SPDX-License-Identifier: GPL-2.0

//! What a process asks for: a region, or a key for lists or for the memory of another.

use super::{
    pinned::PinnedMemory,
    rights::device_access, //
};
use crate::{
    abi,
    abi::{
        RegisterRegion,
        UverbsMrRequest, //
    },
    kernel_ext::errno,
    rdma::{
        Access,
        UserRegion, //
    }, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A region of a process as it was registered last.
#[derive(Clone)]
pub(crate) struct UserState {
    /// Other regions may be of it too.
    pub(super) memory: Arc<PinnedMemory>,
    pub(super) pd: u32,
    pub(super) access: Access,
    /// Address of the first byte, as work requests say it.
    pub(super) iova: u64,
}

impl UserState {
    /// One more region of the same memory, with rights and in a domain of its own. It is to be at the same address, of
    /// the same length: so the core shows it.
    pub(super) fn share(&self, pd: u32, region: &UserRegion) -> Result<Self> {
        if (region.iova, region.length) != (self.iova, self.memory.buffer().length) {
            return Err(EINVAL);
        }
        self.memory.check_access(region.access)?;
        Ok(Self {
            memory: self.memory.clone(),
            pd,
            access: region.access,
            iova: self.iova,
        })
    }

    pub(super) fn command(&self, tag: u32, flags: u32, features: u64) -> Result<RegisterRegion> {
        let access = device_access(self.access, features)?;
        let buffer = self.memory.buffer();
        Ok(RegisterRegion {
            tag,
            pd: self.pd,
            access,
            flags,
            address: device_address(access, self.iova, buffer.length)?,
            buffer,
        })
    }
}

/// The address of the first byte of a region with these rights, as the device is told. The last one has to have an
/// address as well: the device would refuse that, perhaps only after the key was given out.
pub(super) fn device_address(access: u32, iova: u64, length: u64) -> Result<u64> {
    let address = if access & abi::ACCESS_ZERO_BASED != 0 {
        0
    } else {
        iova
    };
    address.checked_add(length).ok_or(EINVAL)?;
    Ok(address)
}

/// What a process wants made when it registers memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A region of its memory.
    Region,
    /// A key for lists of so many pieces of regions at the most.
    List(u32),
    /// A region of the memory that the region with this key is of.
    Shared(u32),
}

impl Wanted {
    /// What the private part of a request says. A process without one, or a provider of before, wants a
    /// region.
    pub(super) fn new(
        request: &UverbsMrRequest,
        region: &UserRegion,
        features: u64,
    ) -> Result<Self> {
        // Of the others one field is used by each kind.
        let is_shared = request.kind == abi::UVERBS_MR_SHARED;
        let zeroes = (
            request.reserved,
            if is_shared {
                request.max_pieces
            } else {
                request.key
            },
        );
        if zeroes != (0, 0) {
            return Err(EINVAL);
        }
        match request.kind {
            0 if request.max_pieces == 0 => Ok(Self::Region),
            0 => Err(EINVAL),
            abi::UVERBS_MR_LIST if features & abi::FEATURE_LISTS == 0 => Err(errno::eopnotsupp()),
            abi::UVERBS_MR_LIST => {
                // It has neither memory nor rights before it is registered.
                let memory = (region.start, region.length, region.iova);
                let is_empty = memory == (0, 0, 0) && region.access == Access::default();
                let pieces = 1..=abi::MAX_PIECES as u32;
                if is_empty && pieces.contains(&request.max_pieces) {
                    Ok(Self::List(request.max_pieces))
                } else {
                    Err(EINVAL)
                }
            }
            abi::UVERBS_MR_SHARED => Ok(Self::Shared(request.key)),
            _ => Err(errno::eopnotsupp()),
        }
    }
}

#[kunit_tests(ferrite_mr_request)]
mod tests {
    use super::*;

    #[test]
    fn the_last_byte_of_a_region_has_an_address() {
        assert_eq!(device_address(0, 0x1000, 0x1000), Ok(0x1000));
        let last = u64::MAX - 0xfff;
        assert_eq!(device_address(0, last, 0xfff), Ok(last));
        assert_eq!(device_address(0, last, 0x1000), Err(EINVAL));
        assert_eq!(device_address(0, u64::MAX, 1), Err(EINVAL));
        // Nothing has an address, whichever.
        for address in [0, 0x1000, u64::MAX] {
            assert_eq!(device_address(0, address, 0), Ok(address));
        }
        // Addresses that count from zero are whatever they were asked to be.
        assert_eq!(device_address(abi::ACCESS_ZERO_BASED, last, 0x1000), Ok(0));
    }
}
