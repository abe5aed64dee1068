// SPDX-License-Identifier: GPL-2.0

//! Ranges of BARs (for `rust/kernel/pci/io.rs`).

use crate::bindings;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::{device, pci};

/// The bus address of `length` bytes at `offset` of a BAR, if they are inside it.
pub fn bar_range(
    pdev: &pci::Device<device::Bound>,
    bar: u32,
    offset: u64,
    length: usize,
) -> Result<u64> {
    let end = offset.checked_add(length as u64).ok_or(EINVAL)?;
    if end > pdev.resource_len(bar)? {
        return Err(EINVAL);
    }
    pdev.resource_start(bar)?.checked_add(offset).ok_or(EINVAL)
}

/// Writes zeroes to a range of a BAR that is memory. Sleeps.
pub fn clear_bar(
    pdev: &pci::Device<device::Bound>,
    bar: u32,
    offset: u64,
    length: usize,
) -> Result {
    let address = bar_range(pdev, bar, offset, length)?;
    // SAFETY: The range is inside a BAR of a device that is bound, by the check above.
    to_result(unsafe { bindings::rdma_clear_io(address, length) })
}
