// SPDX-License-Identifier: GPL-2.0 OR MIT

//! How the device appears on the PCI bus.

/// PCI vendor: the experimental range of the virtio vendor.
pub const PCI_VENDOR_ID: u16 = 0x1af4;
/// PCI device: a Ferrite RNIC.
pub const PCI_DEVICE_ID: u16 = 0x10f0;
/// PCI class code: network controller, other.
pub const PCI_CLASS: u32 = 0x02_80_00;
/// PCI revision.
pub const PCI_REVISION: u8 = 1;

/// BAR of the registers (64-bit, not prefetchable).
pub const BAR_REGISTERS: u32 = 0;
/// BAR of the doorbell pages (64-bit, not prefetchable).
pub const BAR_DOORBELLS: u32 = 2;
/// BAR of the MSI-X table and pending bits (64-bit, not prefetchable).
pub const BAR_MSIX: u32 = 4;

/// Size of the register BAR in bytes.
pub const BAR_REGISTERS_SIZE: usize = 0x1000;
/// Smallest stride of doorbell pages in bytes, and the bytes of a page that have a meaning; the
/// stride itself is in [`super::REG_DOORBELL_STRIDE`].
pub const DOORBELL_PAGE_SIZE: usize = 0x1000;
/// Largest stride of doorbell pages, base-2 logarithm: the largest pages that processors have.
pub const DOORBELL_MAX_LOG_STRIDE: u8 = 16;
/// Size of the MSI-X BAR in bytes.
pub const BAR_MSIX_SIZE: usize = 0x4000;
/// Offset of the pending bits in the MSI-X BAR; the table is at its start.
pub const MSIX_PBA_OFFSET: usize = 0x2000;
/// The most message numbers, and MSI-X vectors, a function may have.
pub const MAX_MESSAGES: usize = 512;
