// SPDX-License-Identifier: GPL-2.0

//! Memory of processes that is pinned, for regions and for rings.

use crate::{
    abi::{
        AttOrder,
        Buffer, //
    },
    device::Ferrite,
    kernel_ext::random,
    lent::{
        Leak,
        Lent, //
    },
    rdma::{
        Access,
        Device,
        DmabufRegion,
        Umem, //
    },
    tpt::Att, //
};
use core::mem;
use kernel::{
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

/// Memory of a process, pinned and described for the device.
pub(crate) struct PinnedMemory(Lent<Described>);

/// Pinned memory with the tables that describe it.
struct Described {
    att: Att,
    umem: Umem,
    /// Tells it from others, to who looks: zero until somebody does.
    number: Atomic<u64>,
}

impl Leak for Described {
    fn leak(self) {
        // Who removes the device does not wait for memory that is never given back.
        self.umem.leak();
        mem::forget(self.att);
    }
}

/// How many bits of a number those keep who read it in JSON.
const NUMBER_BITS: u32 = 53;

/// A number that no other memory has, out of random words. It is drawn, so that it says nothing of how many others
/// there are: of 53 bits two of a million are the same in one of twenty thousand cases. It is not zero.
fn drawn_number(words: [u32; 2]) -> u64 {
    let [low, high] = words.map(u64::from);
    ((high << 32 | low) >> (u64::BITS - NUMBER_BITS)).max(1)
}

/// The number that is `noted`, which is `drawn` by who looks first, and is the same for all who look.
fn number_once(noted: &Atomic<u64>, draw: impl FnOnce() -> u64) -> u64 {
    match noted.load(Relaxed) {
        0 => {
            let drawn = draw();
            noted
                .cmpxchg(0, drawn, Relaxed)
                .map_or_else(|earlier| earlier, |_| drawn)
        }
        number => number,
    }
}

/// Refuses to map memory (`EIO`) for a device that failed: one that nothing stops still uses addresses of what was
/// unmapped, and they would be those of other memory.
fn may_be_mapped(dev: &Device<Ferrite>) -> Result {
    if dev.hw.is_dead() {
        Err(EIO)
    } else {
        Ok(())
    }
}

impl PinnedMemory {
    /// Pins `length` bytes from `address` on, which the device knows as `iova`.
    pub(crate) fn pin(
        dev: &Device<Ferrite>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Self> {
        may_be_mapped(dev)?;
        let umem = Umem::get(dev, address, usize::try_from(length)?, access)?;
        Self::describe(dev, umem, length, iova)
    }

    /// Pins part of a DMA buffer. It is pinned, not mapped as its exporter likes: the device has no
    /// way to let go of a region for a while when the exporter wants to move it.
    pub(super) fn pin_dmabuf(dev: &Device<Ferrite>, region: &DmabufRegion) -> Result<Self> {
        if region.length > dev.caps.max_region {
            return Err(EINVAL);
        }
        may_be_mapped(dev)?;
        let bytes = usize::try_from(region.length)?;
        let umem = Umem::get_dmabuf_pinned(dev, region.fd, region.offset, bytes, region.access)?;
        Self::describe(dev, umem, region.length, region.iova)
    }

    /// Describes pinned memory for the device, which knows it as `iova`.
    fn describe(dev: &Device<Ferrite>, mut umem: Umem, length: u64, iova: u64) -> Result<Self> {
        let page_size = umem
            .best_page_size(dev.caps.page_sizes, iova)
            .ok_or(EINVAL)?;
        let fbo = (iova & (page_size as u64 - 1)) as u32;
        let shift = page_size.trailing_zeros() as u8;
        let describe = |pages: &[u64]| Att::new(dev.parent(), pages, shift, fbo, length);
        let att = match umem.num_blocks(page_size) {
            // Which takes no list.
            1 => describe(umem.blocks(page_size).next().as_slice())?,
            count => {
                let mut pages = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
                for page in umem.blocks(page_size) {
                    pages.push(page, GFP_KERNEL_ACCOUNT)?;
                }
                describe(&pages)?
            }
        };
        let described = Described {
            att,
            umem,
            number: Atomic::new(0),
        };
        Ok(Self(Lent::new(&dev.hw.reach, described)))
    }

    /// Pins the rings of a queue, which the device writes.
    pub(crate) fn pin_rings(dev: &Device<Ferrite>, address: u64, length: u64) -> Result<Self> {
        Self::pin(dev, address, length, address, Access::LOCAL_WRITE)
    }

    /// Checks that the memory can be used with other rights.
    pub(super) fn check_access(&self, access: Access) -> Result {
        self.0.umem.check_access(access)
    }

    /// What to tell the device.
    pub(crate) fn buffer(&self) -> Buffer {
        self.0.att.buffer()
    }

    /// What tells it from other memory. It says nothing about where that is.
    pub(super) fn number(&self) -> u64 {
        number_once(&self.0.number, || {
            drawn_number([random::get_u32(), random::get_u32()])
        })
    }
}

/// The page size of a buffer, and how many addresses of pages the device was told of.
pub(super) fn shape(buffer: &Buffer) -> Option<(u32, u32)> {
    let page_size = 1u32.checked_shl(buffer.page_shift.into())?;
    let entries = match AttOrder::from_number(buffer.order)? {
        AttOrder::Direct => 1,
        AttOrder::First | AttOrder::Second => u32::try_from(buffer.pages()?).ok()?,
    };
    Some((page_size, entries))
}

#[kunit_tests(ferrite_mr_pinned)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_of_one_by_one_unless_they_follow_each_other() {
        let buffer = |pages: u64, page_shift: u8, order: AttOrder| Buffer {
            root: 0x10_0000,
            length: pages << page_shift,
            fbo: 0,
            page_shift,
            order: order.number(),
            reserved: 0,
        };
        for (shift, size) in [(12, 4096), (21, 1 << 21), (30, 1 << 30)] {
            let direct = buffer(3, shift, AttOrder::Direct);
            assert_eq!(shape(&direct), Some((size, 1)));
            let listed = buffer(3, shift, AttOrder::First);
            assert_eq!(shape(&listed), Some((size, 3)));
        }
        let large = buffer(1 << 20, 12, AttOrder::Second);
        assert_eq!(shape(&large), Some((4096, 1 << 20)));
        // The first byte may be anywhere in the first page.
        let late = Buffer {
            fbo: 4095,
            ..buffer(3, 12, AttOrder::First)
        };
        assert_eq!(shape(&late), Some((4096, 4)));
    }

    #[test]
    fn the_number_of_memory_has_all_the_bits_that_readers_keep() {
        assert_eq!(drawn_number([u32::MAX; 2]), (1 << 53) - 1);
        // Both words count.
        assert_eq!(drawn_number([1 << 11, 0]), 1);
        assert_eq!(drawn_number([0, 1]), 1 << 21);
        assert_eq!(drawn_number([0, 1 << 31]), 1 << 52);
        let numbers = [(); 2].map(|_| drawn_number([random::get_u32(), random::get_u32()]));
        assert!(numbers[0] != numbers[1]);
    }

    #[test]
    fn the_number_of_memory_is_drawn_once_by_who_looks_first() {
        let noted = Atomic::new(0u64);
        assert_eq!(number_once(&noted, || 7), 7);
        assert_eq!(number_once(&noted, || 8), 7);
        // Another one looks at the same time, and was first.
        let noted = Atomic::new(0u64);
        let late = number_once(&noted, || {
            noted.store(5, Relaxed);
            6
        });
        assert_eq!((late, noted.load(Relaxed)), (5, 5));
        // What is drawn stands for no number that was not.
        assert_eq!(drawn_number([0, 0]), 1);
    }
}
