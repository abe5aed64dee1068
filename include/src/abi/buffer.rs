// SPDX-License-Identifier: GPL-2.0 OR MIT

//! How the device is told where a buffer of host memory lies: the address translation table (ATT).

numbers! {
    /// How many tables lie between a [`Buffer`] and its pages.
    pub enum AttOrder: u8 {
        /// `root` is the DMA address of the page that holds byte 0; pages are contiguous.
        Direct = 0,
        /// `root` is the DMA address of one table of page addresses.
        First = 1,
        /// `root` is the DMA address of a table of addresses of tables of page addresses.
        Second = 2,
    }
}

/// Size in bytes of a table of page addresses.
pub const ATT_TABLE_SIZE: usize = 4096;
/// Entries of such a table.
pub const ATT_TABLE_ENTRIES: usize = ATT_TABLE_SIZE / 8;
/// Most entries of the root table of a second-order buffer; it is contiguous.
pub const ATT_MAX_ROOT_ENTRIES: usize = 1 << 16;
/// Smallest page, base-2 logarithm.
pub const PAGE_SHIFT_MIN: u8 = 12;
/// Largest page, base-2 logarithm.
pub const PAGE_SHIFT_MAX: u8 = 30;

layout! {
    /// A buffer of host memory: byte `b` is byte `o % page` of page `o / page`, where
    /// `o = first_byte + b`.
    pub struct Buffer: 24 {
        /// See [`AttOrder`].
        0 => root: u64,
        /// Bytes in the buffer.
        8 => length: u64,
        /// Offset of byte 0 in the first page; less than the page size.
        16 => first_byte: u32,
        /// Base-2 logarithm of the page size.
        20 => page_shift: u8,
        /// See [`AttOrder`].
        21 => order: u8,
        /// Zero.
        22 => reserved: u16,
    }
}

impl Buffer {
    /// A buffer that is contiguous for the device, starting at `address`.
    pub const fn contiguous(address: u64, length: u64) -> Self {
        let page = 1u64 << PAGE_SHIFT_MIN;
        Self {
            root: address & !(page - 1),
            length,
            first_byte: (address & (page - 1)) as u32,
            page_shift: PAGE_SHIFT_MIN,
            order: AttOrder::Direct as u8,
            reserved: 0,
        }
    }

    /// Pages the buffer touches; `None` when the numbers make no sense.
    pub const fn pages(&self) -> Option<u64> {
        if self.page_shift < PAGE_SHIFT_MIN || self.page_shift > PAGE_SHIFT_MAX {
            return None;
        }
        let page = 1u64 << self.page_shift;
        if self.first_byte as u64 >= page {
            return None;
        }
        match self.length.checked_add(self.first_byte as u64 + page - 1) {
            Some(end) => Some(end >> self.page_shift),
            None => None,
        }
    }

    /// The least order whose tables can hold `pages` scattered pages.
    pub const fn order_for(pages: u64) -> Option<AttOrder> {
        if pages <= 1 {
            Some(AttOrder::Direct)
        } else if pages <= ATT_TABLE_ENTRIES as u64 {
            Some(AttOrder::First)
        } else if pages <= (ATT_TABLE_ENTRIES * ATT_MAX_ROOT_ENTRIES) as u64 {
            Some(AttOrder::Second)
        } else {
            None
        }
    }
}
