// SPDX-License-Identifier: GPL-2.0

//! Memory barriers between a processor and a device (for `rust/kernel/sync/barrier.rs`).
//!
//! The `smp_*` barriers order processors against each other only; memory that a device reads or
//! writes by DMA needs these.

use crate::bindings;

/// Orders earlier writes to coherent memory before later ones, as seen by a device.
///
/// Use it between filling a descriptor and handing it over.
#[inline]
pub fn dma_wmb() {
    // SAFETY: A barrier has no preconditions.
    unsafe { bindings::dma_wmb() }
}

/// Orders earlier reads of coherent memory before later ones, against writes of a device.
///
/// Use it between seeing that a descriptor is owned by the processor and reading its contents.
#[inline]
pub fn dma_rmb() {
    // SAFETY: A barrier has no preconditions.
    unsafe { bindings::dma_rmb() }
}

/// Orders all earlier memory and device accesses before all later ones.
///
/// Needed where a write to coherent memory has to be visible before a read of coherent memory that
/// the device writes (a store-load pair, such as "publish index, then look whether the device
/// sleeps").
#[inline]
pub fn mb() {
    // SAFETY: A barrier has no preconditions.
    unsafe { bindings::mb() }
}

/// Orders earlier writes, to memory as well as to devices, before later ones.
#[inline]
pub fn wmb() {
    // SAFETY: A barrier has no preconditions.
    unsafe { bindings::wmb() }
}
