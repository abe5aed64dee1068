// SPDX-License-Identifier: GPL-2.0

//! Ranges of BARs (for `rust/kernel/pci/io.rs`).

use crate::bindings;
use kernel::prelude::*;
use kernel::{device, pci};

/// What a BAR is.
const MEMORY: c_ulong = bindings::IORESOURCE_MEM as c_ulong;
const PORTS: c_ulong = bindings::IORESOURCE_IO as c_ulong;

/// Where a BAR is, and how long: of memory only. The address of ports is that of something else in
/// memory, and must be neither mapped nor given to anybody.
fn place_of(flags: c_ulong, start: u64, length: u64) -> Result<(u64, u64)> {
    if flags & (MEMORY | PORTS) != MEMORY {
        return Err(ENODEV);
    }
    Ok((start, length))
}

/// The bus address and the bytes of a BAR; `ENODEV` where it is not memory.
fn memory_bar(pdev: &pci::Device<device::Bound>, bar: u32) -> Result<(u64, u64)> {
    // Both find out whether there is a BAR of that number.
    let (start, length) = (pdev.resource_start(bar)?, pdev.resource_len(bar)?);
    // `pci::Device` is a transparent wrapper of `struct pci_dev`.
    let raw = core::ptr::from_ref(pdev).cast::<bindings::pci_dev>();
    // SAFETY: The borrow keeps the device; the number is that of a BAR, as was found out above.
    let flags = unsafe { (*raw).resource[bar as usize].flags };
    place_of(flags, start, length)
}

/// The bytes of a BAR that is memory, which a driver finds out before it maps it; `ENODEV` where it
/// is not.
pub fn memory_bar_length(pdev: &pci::Device<device::Bound>, bar: u32) -> Result<u64> {
    memory_bar(pdev, bar).map(|(_, length)| length)
}

/// Where `length` bytes at `offset` are, in a BAR at `start` of `size` bytes.
fn range_in((start, size): (u64, u64), offset: u64, length: usize) -> Result<u64> {
    let end = offset.checked_add(length as u64).ok_or(EINVAL)?;
    if end > size {
        return Err(EINVAL);
    }
    start.checked_add(offset).ok_or(EINVAL)
}

/// The bus address of `length` bytes at `offset` of a BAR that is memory, if they are inside it.
pub fn bar_range(
    pdev: &pci::Device<device::Bound>,
    bar: u32,
    offset: u64,
    length: usize,
) -> Result<u64> {
    range_in(memory_bar(pdev, bar)?, offset, length)
}

/// Writes zeroes to a range of a BAR that is memory, which are there when this returns. Sleeps.
pub fn clear_bar(
    pdev: &pci::Device<device::Bound>,
    bar: u32,
    offset: u64,
    length: usize,
) -> Result {
    let address = bar_range(pdev, bar, offset, length)?;
    // SAFETY: The range is inside a BAR of a device that is bound, which is memory, by the check above.
    let io = unsafe { bindings::ioremap(address, length) };
    if io.is_null() {
        return Err(ENOMEM);
    }
    // SAFETY: As many bytes were mapped just now, and nobody else knows of that.
    unsafe { bindings::memset_io(io, 0, length) };
    if length > 0 {
        // Writes are posted: the device may be told of the range, by memory, before they have come to it. A read
        // comes behind them.
        // SAFETY: The byte is one of those that were mapped.
        unsafe { bindings::readb(io) };
    }
    // SAFETY: It was mapped above, and is not used any more.
    unsafe { bindings::iounmap(io) };
    Ok(())
}

#[cfg(not(rdma_no_tests))]
#[kernel::prelude::kunit_tests(rust_bar_range)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bar_of_memory_is_mapped() {
        let wide = bindings::IORESOURCE_MEM_64 as c_ulong;
        for flags in [MEMORY, MEMORY | wide] {
            assert_eq!(place_of(flags, 0xfe00_0000, 4096), Ok((0xfe00_0000, 4096)));
        }
        for flags in [0, PORTS, wide, MEMORY | PORTS] {
            assert_eq!(place_of(flags, 0xc000, 4096), Err(ENODEV));
        }
    }

    #[test]
    fn a_range_is_inside_its_bar() {
        let bar = (0x1_0000_0000, 0x4000);
        assert_eq!(range_in(bar, 0x1000, 0x3000), Ok(0x1_0000_1000));
        for (offset, length) in [(0x1000, 0x3001), (0x4001, 0), (u64::MAX, 1), (u64::MAX, 2)] {
            assert_eq!(range_in(bar, offset, length), Err(EINVAL));
        }
        assert_eq!(range_in((u64::MAX - 1, 16), 8, 8), Err(EINVAL));
    }
}
