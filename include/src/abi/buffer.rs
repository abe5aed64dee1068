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

/// Entry of a table of an on-demand region: what it names is there.
pub const ON_DEMAND_PRESENT: u64 = 1 << 0;
/// Entry of a table of the lowest level of an on-demand region: the page may be written.
pub const ON_DEMAND_WRITE: u64 = 1 << 1;
/// Entry of a table of an on-demand region: the address, of a page or of a table.
pub const ON_DEMAND_ADDRESS: u64 = !0xfff;
/// Most levels of tables of an on-demand region.
pub const ON_DEMAND_MAX_LEVELS: u8 = 4;
/// Base-2 logarithm of the pages of an on-demand region, the only size there is.
pub const ON_DEMAND_PAGE_SHIFT: u8 = 12;
/// Longest on-demand region, in bytes.
pub const ON_DEMAND_MAX_LENGTH: u64 = 1 << 48;

/// The fewest levels of tables that hold `pages` pages of an on-demand region.
pub const fn on_demand_levels(pages: u64) -> Option<u8> {
    let mut levels = 1;
    let mut most = ATT_TABLE_ENTRIES as u64;
    while pages > most {
        if levels == ON_DEMAND_MAX_LEVELS {
            return None;
        }
        levels += 1;
        most *= ATT_TABLE_ENTRIES as u64;
    }
    Some(levels)
}

layout! {
    /// A buffer of host memory: byte `b` is byte `o % page` of page `o / page`, where
    /// `o = fbo + b`.
    pub struct Buffer: 24 {
        /// See [`AttOrder`].
        0 => root: u64,
        /// Bytes in the buffer.
        8 => length: u64,
        /// Offset of byte 0 in the first page; less than the page size.
        16 => fbo: u32,
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
            fbo: (address & (page - 1)) as u32,
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
        if self.fbo as u64 >= page {
            return None;
        }
        match self.length.checked_add(self.fbo as u64 + page - 1) {
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
