// SPDX-License-Identifier: GPL-2.0

//! What a device says it can do, within what the interface has room for: nothing that is reckoned
//! with it later can overflow, whatever the device said.

use crate::abi::{
    self,
    DeviceCaps, //
};
use kernel::prelude::*;

/// GIDs that are made use of: `sysfs` has some files of each.
const MOST_GIDS: u16 = 1024;
/// Keys that there are: 24 bits of one are its index.
const MOST_TAGS: u32 = 1 << 24;
/// The core counts most things with sign.
const MOST_OBJECTS: u32 = i32::MAX as u32;

/// Base-2 logarithms of the smallest and largest MTU.
const LOG_MTU: (u8, u8) = (8, 12);

/// The page sizes that a buffer can have at all.
const PAGE_SIZES: u64 = (2 << abi::PAGE_SHIFT_MAX) - (1 << abi::PAGE_SHIFT_MIN);

/// What is made use of; `EINVAL` where a driver can do nothing with the device.
pub(crate) fn bounded(said: &DeviceCaps) -> Result<DeviceCaps> {
    let numbers = |number: u32| number.min(abi::QUEUE_NUMBER_MASK);
    let caps = DeviceCaps {
        max_qp: numbers(said.max_qp),
        max_cq: numbers(said.max_cq),
        max_srq: numbers(said.max_srq),
        max_xrcd: numbers(said.max_xrcd),
        max_tags: said.max_tags.min(MOST_TAGS),
        max_gid: said.max_gid.min(MOST_GIDS),
        max_log_mtu: said.max_log_mtu.clamp(LOG_MTU.0, LOG_MTU.1),
        sq_max_log_blocks: said.sq_max_log_blocks.min(abi::SQ_MAX_LOG_BLOCKS),
        rq_max_log_entries: said.rq_max_log_entries.min(abi::RQ_MAX_LOG_ENTRIES),
        cq_max_log_entries: said.cq_max_log_entries.min(abi::CQ_MAX_LOG_ENTRIES),
        eq_max_log_entries: said.eq_max_log_entries.min(abi::EQ_MAX_LOG_ENTRIES),
        max_sge: said.max_sge.min(abi::MAX_SGE as u8),
        max_inline: said.max_inline.min(abi::MAX_INLINE as u32),
        max_message: said.max_message.min(abi::MAX_MESSAGE.into()),
        page_sizes: said.page_sizes & PAGE_SIZES,
        device_memory: said.device_memory.min(abi::DEVICE_MEMORY_SIZE as u64),
        max_multicast: said.max_multicast.min(MOST_OBJECTS),
        ..*said
    };
    // The memory of processes comes in pages of 4 KiB, and a port without an address is none.
    let pages_of_4k = caps.page_sizes & (1 << abi::PAGE_SHIFT_MIN) != 0;
    if !pages_of_4k || caps.max_gid == 0 {
        return Err(EINVAL);
    }
    Ok(caps)
}

#[kunit_tests(ferrite_caps)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    #[test]
    fn what_a_device_says_is_taken_within_bounds() -> Result {
        let mut wild = DeviceCaps::zeroed();
        wild.as_bytes_mut().fill(0xff);
        let caps = bounded(&wild)?;
        assert_eq!(caps.sq_max_log_blocks, abi::SQ_MAX_LOG_BLOCKS);
        assert_eq!(caps.rq_max_log_entries, abi::RQ_MAX_LOG_ENTRIES);
        assert_eq!(caps.cq_max_log_entries, abi::CQ_MAX_LOG_ENTRIES);
        assert_eq!(caps.max_sge as usize, abi::MAX_SGE);
        assert_eq!(caps.max_inline as usize, abi::MAX_INLINE);
        assert_eq!(caps.max_log_mtu, 12);
        assert_eq!(caps.max_gid, MOST_GIDS);
        assert_eq!(caps.page_sizes, 0x7fff_f000);
        for number in [caps.max_qp, caps.max_cq, caps.max_srq, caps.max_xrcd] {
            assert_eq!(number, abi::QUEUE_NUMBER_MASK);
        }
        // What is within them is taken as it is.
        let again = bounded(&caps)?;
        assert!(again == caps);
        Ok(())
    }

    #[test]
    fn a_device_that_nothing_can_be_done_with_is_refused() {
        let usable = DeviceCaps {
            max_gid: 1,
            page_sizes: 1 << abi::PAGE_SHIFT_MIN,
            ..DeviceCaps::zeroed()
        };
        assert!(bounded(&usable).is_ok());
        let page_sizes = 1 << 21;
        for useless in [
            DeviceCaps {
                max_gid: 0,
                ..usable
            },
            DeviceCaps {
                page_sizes,
                ..usable
            },
        ] {
            assert!(matches!(bounded(&useless), Err(error) if error == EINVAL));
        }
    }
}
