// SPDX-License-Identifier: GPL-2.0

//! Where doorbell pages and device memory are in their BAR: what the registers say, checked against
//! the BAR and brought to the pages of the host.

use crate::abi;
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};

// Device memory starts at a multiple of the largest stride. With pages of the host that are larger, one
// could have doorbells of others, or memory, beside what a process is to have.
const _: () = assert!(PAGE_SIZE <= 1 << abi::DOORBELL_MAX_LOG_STRIDE);

/// Device memory that is made use of, in bytes: each page of it is noted.
const MOST_MEMORY: u64 = 1 << 32;

/// What the registers say about the doorbell BAR.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Said {
    /// `REG_DOORBELL_PAGES`.
    pub(crate) pages: u32,
    /// `REG_DOORBELL_STRIDE`.
    pub(crate) log_stride: u32,
    /// `REG_DOORBELL_OFFSET`.
    pub(crate) offset: u64,
    /// `REG_DEVICE_MEMORY_OFFSET`.
    pub(crate) memory_offset: u64,
    /// `REG_DEVICE_MEMORY_SIZE`.
    pub(crate) memory_size: u64,
}

/// A part of the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BarPart {
    /// Where it starts.
    pub(crate) offset: u64,
    /// Its bytes.
    pub(crate) length: u64,
}

impl BarPart {
    /// Where it ends; `None` where that is beyond all numbers.
    fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }
}

/// The doorbell BAR.
///
/// # Invariants
///
/// `doorbells` is `pages << log_stride` bytes long, with at least one page; it and `memory` are
/// inside the BAR, and apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoorbellBar {
    doorbells: BarPart,
    pages: u32,
    log_stride: u8,
    memory: BarPart,
}

impl DoorbellBar {
    /// What the device says, if that makes sense in a BAR of `length` bytes; else what does not.
    pub(crate) fn new(said: &Said, length: u64) -> Result<Self, &'static str> {
        let strides = abi::DOORBELL_PAGE_SIZE.ilog2()..=abi::DOORBELL_MAX_LOG_STRIDE.into();
        if !strides.contains(&said.log_stride) {
            return Err("the stride of doorbell pages is none that there is");
        }
        if said.pages == 0 {
            return Err("there is no doorbell page");
        }
        if said.offset % (1 << said.log_stride) != 0 {
            return Err("doorbell pages do not start at a multiple of their stride");
        }
        let doorbells = BarPart {
            offset: said.offset,
            // 48 bits at the most.
            length: u64::from(said.pages) << said.log_stride,
        };
        let inside = |part: &BarPart| part.end().is_some_and(|end| end <= length);
        if !inside(&doorbells) {
            return Err("doorbell pages are beyond the end of their BAR");
        }
        let mut memory = BarPart {
            offset: said.memory_offset,
            length: said.memory_size,
        };
        if memory.length == 0 {
            memory.offset = 0;
        } else {
            if memory.offset % (1 << abi::DOORBELL_MAX_LOG_STRIDE) != 0 {
                return Err("device memory does not start at a multiple of the largest stride");
            }
            if !inside(&memory) {
                return Err("device memory is beyond the end of its BAR");
            }
            if memory.offset < doorbells.offset + doorbells.length
                && doorbells.offset < memory.offset + memory.length
            {
                return Err("device memory is where doorbell pages are");
            }
            memory.length = memory.length.min(MOST_MEMORY);
        }
        // INVARIANT: Both were found to be inside, and apart; there is a page.
        Ok(Self {
            doorbells,
            pages: said.pages,
            log_stride: said.log_stride as u8,
            memory,
        })
    }

    /// Device memory.
    pub(crate) fn memory(&self) -> BarPart {
        self.memory
    }

    /// Offset of page 0, the kernel's.
    pub(crate) fn kernel_page(&self) -> u64 {
        self.doorbells.offset
    }

    /// The pages for processes, on a host with pages of `page_size` bytes, a power of two.
    pub(crate) fn user_pages(&self, page_size: u64) -> UserPages {
        let stride = 1 << self.log_stride;
        let unit = page_size.max(stride);
        // The first place after page 0 where a page of the host starts.
        let place = (self.doorbells.offset / unit).checked_add(1);
        let first = place
            .and_then(|place| place.checked_mul(unit))
            .map_or(u64::MAX, |at| (at - self.doorbells.offset) / stride);
        let step = unit / stride;
        UserPages {
            // By the invariant all that is less than `pages` fits.
            first: first.min(self.pages.into()) as u32,
            // So that no page of the host has anything else in it.
            count: (u64::from(self.pages).saturating_sub(first) / step) as u32,
            step: step as u32,
            offset: self.doorbells.offset,
            log_stride: self.log_stride,
        }
    }
}

/// The doorbell pages that processes can be given: where pages of the host are larger than the
/// stride, one of the device for each of the host, so that no two processes have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserPages {
    /// The device's number of the first.
    first: u32,
    /// How many there are.
    count: u32,
    /// Pages of the device from one to the next.
    step: u32,
    /// Where page 0 is in the BAR.
    offset: u64,
    log_stride: u8,
}

impl UserPages {
    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// The device's number of the page at `index`, which is less than [`Self::count`].
    pub(crate) fn number(&self, index: u32) -> u32 {
        self.first + index * self.step
    }

    /// Where that page is in the BAR.
    pub(crate) fn offset(&self, index: u32) -> u64 {
        self.offset + (u64::from(self.number(index)) << self.log_stride)
    }
}

#[kunit_tests(ferrite_doorbell_bar)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// A thousand pages of 4 KiB, then a megabyte of memory, in 8 MiB.
    const GOOD: Said = Said {
        pages: 1024,
        log_stride: 12,
        offset: 0,
        memory_offset: 4 * MIB,
        memory_size: MIB,
    };

    fn said(change: impl FnOnce(&mut Said)) -> Said {
        let mut said = GOOD;
        change(&mut said);
        said
    }

    #[test]
    fn what_fits_the_bar_is_taken_as_it_is() {
        let bar = DoorbellBar::new(&GOOD, 8 * MIB);
        assert!(bar.is_ok_and(|bar| bar.kernel_page() == 0
            && bar.memory()
                == BarPart {
                    offset: 4 * MIB,
                    length: MIB
                }));
        // To the last byte.
        let memory_size = 4 * MIB;
        assert!(DoorbellBar::new(
            &Said {
                memory_size,
                ..GOOD
            },
            8 * MIB
        )
        .is_ok());
        // Memory may come first.
        let other_way_round = Said {
            offset: 4 * MIB,
            memory_offset: 0,
            ..GOOD
        };
        assert!(DoorbellBar::new(&other_way_round, 8 * MIB)
            .is_ok_and(|bar| bar.kernel_page() == 4 * MIB));
        // What there is not is nowhere.
        let none = said(|said| {
            said.memory_offset = u64::MAX;
            said.memory_size = 0;
        });
        assert!(DoorbellBar::new(&none, 4 * MIB).is_ok_and(|bar| bar.memory().length == 0));
    }

    /// As [`said`], of a BAR that has no device memory: there is nothing to be in the way of.
    fn bare(change: impl FnOnce(&mut Said)) -> Said {
        said(|said| {
            said.memory_size = 0;
            change(said);
        })
    }

    #[test]
    fn a_bar_that_is_not_as_the_registers_say_is_refused_for_that() {
        let refused = |bad: &Said, length| DoorbellBar::new(bad, length).err().unwrap_or("");
        for (bad, why) in [
            (bare(|said| said.pages = 0), "there is no doorbell page"),
            (bare(|said| said.pages = 2049), "beyond the end of their"),
            (
                bare(|said| said.pages = u32::MAX),
                "beyond the end of their",
            ),
            (bare(|said| said.log_stride = 16), "beyond the end of their"),
            (bare(|said| said.offset = 1), "multiple of their stride"),
            (bare(|said| said.offset = 0x800), "multiple of their stride"),
            (
                bare(|said| said.offset = 5 * MIB),
                "beyond the end of their",
            ),
            (
                bare(|said| said.offset = 8 * MIB),
                "beyond the end of their",
            ),
            (
                bare(|said| said.offset = u64::MAX - 4095),
                "beyond the end of their",
            ),
            (said(|said| said.pages = 1025), "where doorbell pages are"),
            (
                said(|said| said.offset = 4 * KIB),
                "where doorbell pages are",
            ),
            (
                said(|said| said.memory_offset = 0),
                "where doorbell pages are",
            ),
            (
                said(|said| said.memory_offset = 4 * MIB - 64 * KIB),
                "where doorbell pages are",
            ),
            (
                said(|said| said.memory_offset = 4 * MIB + 4 * KIB),
                "multiple of the largest stride",
            ),
            (
                said(|said| said.memory_offset = 8 * MIB),
                "memory is beyond the end",
            ),
            (
                said(|said| said.memory_offset = u64::MAX - 64 * KIB + 1),
                "memory is beyond the end",
            ),
            (
                said(|said| said.memory_size = 4 * MIB + 1),
                "memory is beyond the end",
            ),
            (
                said(|said| said.memory_size = u64::MAX),
                "memory is beyond the end",
            ),
        ] {
            assert!(refused(&bad, 8 * MIB).contains(why));
        }
        // Two pages fit, whatever their stride.
        for log_stride in 12..=16 {
            let good = bare(|said| (said.pages, said.log_stride) = (2, log_stride));
            assert_eq!(refused(&good, 8 * MIB), "");
        }
        for log_stride in [0, 11, 17, 32, 64, u32::MAX] {
            let bad = bare(|said| (said.pages, said.log_stride) = (2, log_stride));
            assert!(refused(&bad, 8 * MIB).contains("none that there is"));
        }
        // A BAR that is too short, or not there.
        for length in [0, 1, 4 * KIB, 4 * MIB - 1] {
            assert!(refused(&GOOD, length).contains("beyond the end of their"));
        }
        for length in [4 * MIB, 5 * MIB - 1] {
            assert!(refused(&GOOD, length).contains("memory is beyond the end"));
        }
    }

    /// The user pages of `said` on a host with pages of `page_size`.
    fn pages_of(said: &Said, page_size: u64) -> Result<UserPages> {
        let bar = DoorbellBar::new(said, u64::MAX).map_err(|_| EINVAL)?;
        let pages = bar.user_pages(page_size);
        let doorbells = bar.doorbells;
        let mut last = said.offset;
        for index in 0..pages.count() {
            let offset = pages.offset(index);
            let stride = 1 << said.log_stride;
            // What the device takes it for.
            assert_eq!(
                offset,
                said.offset + u64::from(pages.number(index)) * stride
            );
            // A page of the host, after that of the last one, with nothing but doorbells in it.
            assert_eq!(offset % page_size, 0);
            assert!(offset / page_size > last / page_size);
            assert!(offset + page_size <= doorbells.offset + doorbells.length);
            last = offset;
        }
        Ok(pages)
    }

    #[test]
    fn each_page_is_used_where_the_host_has_pages_of_the_stride() -> Result {
        let pages = pages_of(&GOOD, 4 * KIB)?;
        assert_eq!(
            (pages.count(), pages.number(0), pages.number(1022)),
            (1023, 1, 1023)
        );
        let wide = said(|said| {
            said.log_stride = 16;
            said.memory_size = 0;
        });
        // With smaller pages of the host too: what has a meaning is at the start of a page.
        for page_size in [4 * KIB, 16 * KIB, 64 * KIB] {
            let pages = pages_of(&wide, page_size)?;
            assert_eq!((pages.count(), pages.number(0)), (1023, 1));
            assert_eq!(pages.offset(1), 128 * KIB);
        }
        Ok(())
    }

    #[test]
    fn a_host_with_larger_pages_uses_every_nth_page() -> Result {
        let pages = pages_of(&GOOD, 16 * KIB)?;
        assert_eq!(
            (pages.count(), pages.number(0), pages.number(1)),
            (255, 4, 8)
        );
        let pages = pages_of(&GOOD, 64 * KIB)?;
        assert_eq!(
            (pages.count(), pages.number(0), pages.number(1)),
            (63, 16, 32)
        );
        assert_eq!(pages.offset(62), 4 * MIB - 64 * KIB);
        let half = said(|said| {
            said.log_stride = 14;
            said.memory_size = 0;
        });
        let pages = pages_of(&half, 64 * KIB)?;
        assert_eq!(
            (pages.count(), pages.number(0), pages.number(1)),
            (255, 4, 8)
        );
        Ok(())
    }

    #[test]
    fn pages_that_do_not_start_where_those_of_the_host_do_are_shared_with_nobody() -> Result {
        let shifted = said(|said| {
            said.offset = 20 * KIB;
            said.memory_size = 0;
        });
        // The kernel's is in the page of the host before.
        let pages = pages_of(&shifted, 16 * KIB)?;
        assert_eq!((pages.number(0), pages.offset(0)), (3, 32 * KIB));
        // The last page of the host is not all doorbells.
        assert_eq!(pages.count(), 255);
        let pages = pages_of(&shifted, 64 * KIB)?;
        assert_eq!(
            (pages.number(0), pages.offset(0), pages.count()),
            (11, 64 * KIB, 63)
        );
        Ok(())
    }

    #[test]
    fn few_pages_may_be_too_few_for_a_process() -> Result {
        for (count, page_size, users) in [
            (1, 4 * KIB, 0),
            (2, 4 * KIB, 1),
            (7, 16 * KIB, 0),
            (8, 16 * KIB, 1),
            (16, 64 * KIB, 0),
            (31, 64 * KIB, 0),
            (32, 64 * KIB, 1),
        ] {
            let few = said(|said| said.pages = count);
            assert_eq!(pages_of(&few, page_size)?.count(), users);
        }
        // At the end of all numbers.
        let last = Said {
            pages: 1,
            log_stride: 12,
            offset: u64::MAX - 8191,
            memory_offset: 0,
            memory_size: 0,
        };
        assert_eq!(pages_of(&last, 64 * KIB)?.count(), 0);
        Ok(())
    }
}
