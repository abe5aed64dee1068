// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Address translation tables: from bytes of a [`Buffer`] to DMA addresses.
//!
//! Tables stay in host memory and are read as they are needed; the page found last is remembered.
//! What a table says is never trusted: whatever address comes out of it, host memory is accessed
//! through [`HostMemory`], which knows the bounds.

use crate::memory::{DmaError, HostMemory};
use ferrite_abi::{
    AttOrder, Buffer, ATT_MAX_ROOT_ENTRIES, ATT_TABLE_ENTRIES, PAGE_SHIFT_MAX, PAGE_SHIFT_MIN,
};
use std::cell::Cell;
use std::fmt;

/// Why a buffer is refused, or cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttError {
    /// The page size is not one the device knows.
    PageSize,
    /// The first byte lies outside the first page.
    FirstByte,
    /// No such order of tables.
    Order,
    /// More pages than tables of this order can name, or a length that wraps around.
    TooLong,
    /// An access beyond the end of the buffer.
    OutOfRange,
    /// A table or page lies where there is no host memory.
    Memory(DmaError),
}

impl fmt::Display for AttError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PageSize => f.write_str("page size out of range"),
            Self::FirstByte => f.write_str("first byte outside the first page"),
            Self::Order => f.write_str("unknown table order"),
            Self::TooLong => f.write_str("more pages than the tables can name"),
            Self::OutOfRange => f.write_str("access beyond the end of the buffer"),
            Self::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for AttError {}

impl From<DmaError> for AttError {
    fn from(error: DmaError) -> Self {
        Self::Memory(error)
    }
}

/// A buffer whose description was checked.
#[derive(Clone, Debug)]
pub struct Att {
    root: u64,
    length: u64,
    first_byte: u64,
    page_shift: u8,
    order: AttOrder,
    /// The page translated last and its address.
    last: Cell<Option<(u64, u64)>>,
}

impl Att {
    /// Checks the description of a buffer. Reads no table.
    pub fn new(buffer: &Buffer) -> Result<Self, AttError> {
        if !(PAGE_SHIFT_MIN..=PAGE_SHIFT_MAX).contains(&buffer.page_shift) {
            return Err(AttError::PageSize);
        }
        if u64::from(buffer.first_byte) >= 1 << buffer.page_shift {
            return Err(AttError::FirstByte);
        }
        let order = AttOrder::from_number(buffer.order).ok_or(AttError::Order)?;
        let pages = buffer.pages().ok_or(AttError::TooLong)?;
        let most = match order {
            AttOrder::Direct => {
                // No table to run out of, but the addresses must not wrap around.
                buffer
                    .root
                    .checked_add(u64::from(buffer.first_byte))
                    .and_then(|start| start.checked_add(buffer.length))
                    .ok_or(AttError::TooLong)?;
                u64::MAX
            }
            AttOrder::First => ATT_TABLE_ENTRIES as u64,
            AttOrder::Second => (ATT_TABLE_ENTRIES * ATT_MAX_ROOT_ENTRIES) as u64,
        };
        if pages > most {
            return Err(AttError::TooLong);
        }
        Ok(Self {
            root: buffer.root,
            length: buffer.length,
            first_byte: u64::from(buffer.first_byte),
            page_shift: buffer.page_shift,
            order,
            last: Cell::new(None),
        })
    }

    /// Bytes in the buffer.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Pages the buffer touches.
    pub fn pages(&self) -> u64 {
        // Cannot wrap: `new` added the same numbers with a check.
        (self.first_byte + self.length).div_ceil(1 << self.page_shift)
    }

    /// Offset of byte `offset` from the start of its page, for checks of alignment.
    pub fn offset_in_page(&self, offset: u64) -> u64 {
        self.first_byte.wrapping_add(offset) & ((1 << self.page_shift) - 1)
    }

    /// The DMA address of byte `offset` and how many bytes from there on are contiguous.
    pub fn resolve<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
    ) -> Result<(u64, u64), AttError> {
        let left = self
            .length
            .checked_sub(offset)
            .filter(|&left| left > 0)
            .ok_or(AttError::OutOfRange)?;
        // None of these sums wrap: `new` saw to `first_byte + length`, and `offset < length`.
        let position = self.first_byte + offset;
        if self.order == AttOrder::Direct {
            return Ok((self.root + position, left));
        }
        let page = position >> self.page_shift;
        let page_size = 1u64 << self.page_shift;
        let within = position & (page_size - 1);
        let address = match self.last.get() {
            Some((last, address)) if last == page => address,
            _ => {
                let address = self.look_up(memory, page)?;
                self.last.set(Some((page, address)));
                address
            }
        };
        let address = address.checked_add(within).ok_or(AttError::OutOfRange)?;
        Ok((address, left.min(page_size - within)))
    }

    /// The address of a page, from the tables.
    fn look_up<M: HostMemory + ?Sized>(&self, memory: &M, page: u64) -> Result<u64, AttError> {
        const ENTRIES: u64 = ATT_TABLE_ENTRIES as u64;
        let entry = |table: u64, index: u64| {
            // `index` is below `1 << 16`.
            let address = table.checked_add(index * 8).ok_or(AttError::OutOfRange)?;
            Ok::<u64, AttError>(memory.load_u64(address)?)
        };
        match self.order {
            AttOrder::Direct => Ok(self.root + (page << self.page_shift)),
            AttOrder::First => entry(self.root, page),
            AttOrder::Second => {
                let table = entry(self.root, page / ENTRIES)?;
                entry(table, page % ENTRIES)
            }
        }
    }

    /// Calls `access` for each contiguous piece of `offset..offset + length`, with its address and
    /// where in the range it lies.
    fn pieces<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: usize,
        mut access: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), DmaError>,
    ) -> Result<(), AttError> {
        if offset
            .checked_add(length as u64)
            .is_none_or(|end| end > self.length)
        {
            return Err(AttError::OutOfRange);
        }
        let mut done = 0;
        while done < length {
            let (address, contiguous) = self.resolve(memory, offset + done as u64)?;
            let piece = usize::try_from(contiguous)
                .unwrap_or(usize::MAX)
                .min(length - done);
            access(address, done..done + piece)?;
            done += piece;
        }
        Ok(())
    }

    /// Copies from the buffer. Nothing is copied when the range is not all inside.
    pub fn read<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), AttError> {
        self.pieces(memory, offset, bytes.len(), |address, range| {
            memory.read(address, &mut bytes[range])
        })
    }

    /// Copies to the buffer. Nothing is copied when the range is not all inside.
    pub fn write<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), AttError> {
        self.pieces(memory, offset, bytes.len(), |address, range| {
            memory.write(address, &bytes[range])
        })
    }

    /// The address of `length` bytes that must be contiguous, as everything aligned is.
    pub fn address_of<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: u64,
    ) -> Result<u64, AttError> {
        let (address, contiguous) = self.resolve(memory, offset)?;
        if contiguous < length {
            return Err(AttError::OutOfRange);
        }
        Ok(address)
    }
}
