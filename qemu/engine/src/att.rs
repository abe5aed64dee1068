// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Address translation tables: from bytes of a [`Buffer`] to DMA addresses.
//!
//! Tables stay in host memory and are read as they are needed; the page found last is remembered.
//! What a table says is never trusted: whatever address comes out of it, host memory is accessed
//! through [`HostMemory`], which knows the bounds.

use crate::loan::{Data, Loan};
use crate::memory::{DmaError, HostMemory};
use ferrite_abi::{
    AttOrder, Buffer, ATT_MAX_ROOT_ENTRIES, ATT_TABLE_ENTRIES, PAGE_SHIFT_MAX, PAGE_SHIFT_MIN,
};
use std::cell::Cell;
use std::fmt;

/// Entries that are read at once of a table for an access to many pages.
const AHEAD: usize = 32;
/// So many pages are looked for one by one.
const FEW: u64 = 2;

/// Why a buffer is refused, or cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttError {
    /// The page size is not one the device knows.
    PageSize,
    /// The first byte lies outside the first page.
    Fbo,
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
            Self::Fbo => f.write_str("first byte outside the first page"),
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
    fbo: u64,
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
        if u64::from(buffer.fbo) >= 1 << buffer.page_shift {
            return Err(AttError::Fbo);
        }
        let order = AttOrder::from_number(buffer.order).ok_or(AttError::Order)?;
        let pages = buffer.pages().ok_or(AttError::TooLong)?;
        let most = match order {
            AttOrder::Direct => {
                // No table to run out of, but the addresses must not wrap around.
                buffer
                    .root
                    .checked_add(u64::from(buffer.fbo))
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
            fbo: u64::from(buffer.fbo),
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
        (self.fbo + self.length).div_ceil(1 << self.page_shift)
    }

    /// Offset of byte `offset` from the start of its page, for checks of alignment.
    pub fn offset_in_page(&self, offset: u64) -> u64 {
        self.fbo.wrapping_add(offset) & ((1 << self.page_shift) - 1)
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
        self.resolve_by(offset, left, |page| match self.last.get() {
            Some((last, address)) if last == page => Ok(address),
            _ => {
                let address = self.look_up(memory, page)?;
                self.last.set(Some((page, address)));
                Ok(address)
            }
        })
    }

    /// The same for an `offset` that has so many bytes `left`, with the address of a page from `look_up`.
    fn resolve_by(
        &self,
        offset: u64,
        left: u64,
        look_up: impl FnOnce(u64) -> Result<u64, AttError>,
    ) -> Result<(u64, u64), AttError> {
        // None of these sums wrap: `new` saw to `fbo + length`, and `offset < length`.
        let position = self.fbo + offset;
        if self.order == AttOrder::Direct {
            return Ok((self.root + position, left));
        }
        let page = position >> self.page_shift;
        let page_size = 1u64 << self.page_shift;
        let within = position & (page_size - 1);
        let address = look_up(page)?;
        let address = address.checked_add(within).ok_or(AttError::OutOfRange)?;
        let contiguous = left.min(page_size - within);
        // Callers add to the address; what a table says must not make that wrap around.
        address
            .checked_add(contiguous)
            .ok_or(AttError::OutOfRange)?;
        Ok((address, contiguous))
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

    /// Reads entries of a table: that of `page`, and as many of those behind it, up to `last`, as there is room
    /// for and the table has. Returns how many; none where they cannot be read at once.
    fn read_entries<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        (page, last): (u64, u64),
        entries: &mut [[u8; 8]; AHEAD],
    ) -> usize {
        const ENTRIES: u64 = ATT_TABLE_ENTRIES as u64;
        let (table, index) = match self.order {
            AttOrder::Direct => return 0,
            AttOrder::First => (Some(self.root), page),
            AttOrder::Second => {
                let pointer = self.root.checked_add(page / ENTRIES * 8);
                let table = pointer.and_then(|pointer| memory.load_u64(pointer).ok());
                (table, page % ENTRIES)
            }
        };
        // A table of order 1 has no more than that, either.
        let count = (AHEAD as u64).min(ENTRIES.saturating_sub(index));
        let count = count.min(last - page + 1) as usize;
        // What is wrong with one that is not aligned is found where an entry is read by itself.
        let address = table
            .and_then(|table| table.checked_add(index * 8))
            .filter(|address| address % 8 == 0);
        let entries = entries[..count].as_flattened_mut();
        let read = address.map(|address| memory.read(address, entries));
        match read {
            Some(Ok(())) => count,
            _ => 0,
        }
    }

    /// Calls `access` for each contiguous piece of `offset..offset + length`, with its address and
    /// where in the range it lies.
    fn pieces<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: usize,
        access: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), DmaError>,
    ) -> Result<(), AttError> {
        if offset
            .checked_add(length as u64)
            .is_none_or(|end| end > self.length)
        {
            return Err(AttError::OutOfRange);
        }
        // Cannot wrap, as in `resolve_by`.
        let page_of = |offset: u64| (self.fbo + offset) >> self.page_shift;
        let last = page_of((offset + length as u64).saturating_sub(1));
        if self.order == AttOrder::Direct || last.saturating_sub(page_of(offset)) < FEW {
            let resolve = |at| self.resolve(memory, offset + at);
            return join(length, resolve, access);
        }
        let mut ahead = 0..0;
        let mut entries = [[0; 8]; AHEAD];
        let resolve = |at| {
            let offset = offset + at;
            self.resolve_by(offset, self.length - offset, |page| {
                if !ahead.contains(&page) {
                    let count = self.read_entries(memory, (page, last), &mut entries);
                    ahead = page..page + count as u64;
                }
                if ahead.is_empty() {
                    return self.look_up(memory, page);
                }
                Ok(u64::from_le_bytes(entries[(page - ahead.start) as usize]))
            })
        };
        join(length, resolve, access)
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
    pub fn write<'a, M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        data: impl Into<Data<'a>>,
    ) -> Result<(), AttError> {
        let data = data.into();
        self.pieces(memory, offset, data.len(), |address, range| {
            memory.place(address, data.slice(range))
        })
    }

    /// Lends a part of the buffer; false where memory is not lent.
    pub fn lend<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: usize,
        loan: &mut Loan,
    ) -> Result<bool, AttError> {
        let mut lent = true;
        self.pieces(memory, offset, length, |address, range| {
            lent = lent && memory.lend(address, range.len(), loan)?;
            Ok(())
        })?;
        Ok(lent)
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

/// Calls `access` for each contiguous piece of `length` bytes, with its address and where in them it lies;
/// `resolve` says where a byte is, and how many from there on are contiguous.
fn join(
    length: usize,
    mut resolve: impl FnMut(u64) -> Result<(u64, u64), AttError>,
    mut access: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), DmaError>,
) -> Result<(), AttError> {
    let mut done = 0;
    while done < length {
        let (address, contiguous) = resolve(done as u64)?;
        let most = |contiguous| usize::try_from(contiguous).unwrap_or(usize::MAX);
        let mut piece = most(contiguous).min(length - done);
        // Pages that follow each other are one piece.
        while done + piece < length {
            match resolve((done + piece) as u64) {
                Ok((next, more)) if address.checked_add(piece as u64) == Some(next) => {
                    piece += most(more).min(length - done - piece);
                }
                // What is wrong is told in its turn.
                _ => break,
            }
        }
        access(address, done..done + piece)?;
        done += piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestMemory;
    use ferrite_abi::ATT_TABLE_SIZE;

    const PAGE: u64 = 4096;

    fn buffer(order: AttOrder, root: u64, length: u64, fbo: u32) -> Buffer {
        Buffer {
            root,
            length,
            fbo,
            page_shift: 12,
            order: order.number(),
            reserved: 0,
        }
    }

    /// Where page `n` of the test buffers lies: scattered.
    fn page_address(n: u64) -> u64 {
        0x100_0000 + (n ^ 5) * 2 * PAGE
    }

    /// Memory with a first-order table at 0x1000 and a second-order one at 0x2000 over
    /// `pages` pages.
    fn memory(pages: u64) -> TestMemory {
        let memory = TestMemory::new(0, 0x400_0000);
        for n in 0..pages {
            if n < 512 {
                memory.put(0x1000 + n * 8, &page_address(n));
            }
            // There is something else between them.
            let table = 0x10_0000 + n / 512 * 2 * ATT_TABLE_SIZE as u64;
            memory.put(0x2000 + n / 512 * 8, &table);
            memory.put(table + n % 512 * 8, &page_address(n));
        }
        memory
    }

    #[test]
    fn direct_buffers_are_contiguous() {
        let memory = TestMemory::new(0, 0x1_0000);
        let att = Att::new(&buffer(AttOrder::Direct, 0x2000, 0x3000, 100)).unwrap();
        assert_eq!(att.resolve(&memory, 0), Ok((0x2064, 0x3000)));
        assert_eq!(att.resolve(&memory, 0x2fff), Ok((0x5063, 1)));
        assert_eq!(att.resolve(&memory, 0x3000), Err(AttError::OutOfRange));
    }

    #[test]
    fn pages_that_follow_each_other_are_one_piece() {
        let memory = TestMemory::new(0, 0x10_0000);
        for (n, address) in [0x2000u64, 0x3000, 0x4000, 0x8000, 0x9000, 0x5000]
            .into_iter()
            .enumerate()
        {
            memory.put(0x1000 + n as u64 * 8, &address);
        }
        let att = Att::new(&buffer(AttOrder::First, 0x1000, 6 * PAGE - 100, 100)).unwrap();
        let mut pieces = Vec::new();
        let all = att.pieces(&memory, 10, 6 * PAGE as usize - 120, |address, range| {
            pieces.push((address, range.len()));
            Ok(())
        });
        assert_eq!(all, Ok(()));
        let page = PAGE as usize;
        let wanted = [
            (0x2000 + 110, 3 * page - 110),
            (0x8000, 2 * page),
            (0x5000, page - 10),
        ];
        assert_eq!(pieces, wanted);
    }

    #[test]
    fn tables_are_read_ahead_as_far_as_they_reach() {
        // Over the ends of what is read at once, and of tables.
        let memory = memory(1200);
        for (order, root, pages) in [
            (AttOrder::First, 0x1000, 512),
            (AttOrder::Second, 0x2000, 1200),
        ] {
            let att = Att::new(&buffer(order, root, pages * PAGE - 100, 100)).unwrap();
            for first in [0, 1, 31, 460, 479, 500].into_iter().chain(505..512) {
                for count in [1, 2, 3, 4, 31, 32, 33, 34, 65, 600] {
                    let offset = first * PAGE + 7;
                    let length = (count * PAGE).min(att.length() - offset);
                    let mut at = offset;
                    let all = att.pieces(&memory, offset, length as usize, |address, range| {
                        assert_eq!(range.start as u64, at - offset);
                        let position = at + 100;
                        let expected = page_address(position / PAGE) + position % PAGE;
                        assert_eq!(address, expected, "{first} {count}");
                        at += range.len() as u64;
                        Ok(())
                    });
                    assert_eq!((all, at), (Ok(()), offset + length), "{first} {count}");
                }
            }
        }
        // A table of which the last entries are nowhere: what is before them is translated.
        let end = 0x400_0000;
        for entry in 0..3 {
            memory.put(end - 24 + entry * 8, &page_address(entry));
        }
        let att = Att::new(&buffer(AttOrder::First, end - 24, 8 * PAGE, 0)).unwrap();
        let mut found = 0;
        let all = att.pieces(&memory, 0, 8 * PAGE as usize, |address, _| {
            assert_eq!(address, page_address(found));
            found += 1;
            Ok(())
        });
        let nowhere = AttError::Memory(DmaError { address: end });
        assert_eq!((all, found), (Err(nowhere), 3));
    }

    #[test]
    fn tables_translate_at_page_and_table_boundaries() {
        let pages = 1030;
        let memory = memory(pages);
        let fbo = 200;
        for (order, root, pages) in [
            (AttOrder::First, 0x1000, 512),
            (AttOrder::Second, 0x2000, pages),
        ] {
            let length = pages * PAGE - fbo;
            let att = Att::new(&buffer(order, root, length, fbo as u32)).unwrap();
            assert_eq!(att.pages(), pages);
            for n in [0, 1, 2, 510, 511, 512, 513, 1023, 1024, pages - 1] {
                if n >= pages {
                    continue;
                }
                for within in [0, 1, PAGE - 1] {
                    let Some(offset) = (n * PAGE + within).checked_sub(fbo) else {
                        continue;
                    };
                    assert_eq!(
                        att.resolve(&memory, offset),
                        Ok((page_address(n) + within, PAGE - within)),
                        "{order:?} page {n} byte {within}"
                    );
                }
            }
            assert_eq!(att.resolve(&memory, length), Err(AttError::OutOfRange));
        }
    }

    #[test]
    fn copies_cross_pages_and_tables() {
        let memory = memory(1030);
        let att = Att::new(&buffer(AttOrder::Second, 0x2000, 1030 * PAGE, 0)).unwrap();
        let data: Vec<u8> = (0..3 * PAGE).map(|n| (n % 251) as u8).collect();
        let offset = 511 * PAGE - 7;
        att.write(&memory, offset, &data).unwrap();
        let mut back = vec![0; data.len()];
        att.read(&memory, offset, &mut back).unwrap();
        assert!(back == data);
        let mut page = [0; 16];
        memory.read(page_address(512), &mut page).unwrap();
        assert_eq!(page, data[PAGE as usize + 7..][..16]);
    }

    #[test]
    fn nothing_is_copied_when_the_range_is_not_all_inside() {
        let memory = memory(2);
        let att = Att::new(&buffer(AttOrder::First, 0x1000, PAGE + 10, 0)).unwrap();
        assert_eq!(
            att.write(&memory, PAGE, &[1; 11]),
            Err(AttError::OutOfRange)
        );
        assert_eq!(
            att.write(&memory, u64::MAX, &[1; 11]),
            Err(AttError::OutOfRange)
        );
        let mut byte = [0xff];
        memory.read(page_address(1), &mut byte).unwrap();
        assert_eq!(byte, [0]);
        assert_eq!(att.write(&memory, PAGE, &[1; 10]), Ok(()));
    }

    #[test]
    fn page_sizes_from_4_kib_to_1_gib_work_and_others_are_refused() {
        let memory = TestMemory::new(0, 0x4000);
        memory.put(0x1000, &0x40_0000_0000u64);
        memory.put(0x1008, &0x80_0000_0000u64);
        for page_shift in 0..=255u8 {
            let result = Att::new(&Buffer {
                page_shift,
                ..buffer(AttOrder::First, 0x1000, 100, 4090)
            });
            if !(12..=30).contains(&page_shift) {
                assert_eq!(result.unwrap_err(), AttError::PageSize);
                continue;
            }
            let att = result.unwrap();
            let (address, contiguous) = att.resolve(&memory, 0).unwrap();
            assert_eq!(address, 0x40_0000_0000 + 4090);
            assert_eq!(contiguous, if page_shift == 12 { 6 } else { 100 });
            let beyond = if page_shift == 12 {
                0x80_0000_0000
            } else {
                0x40_0000_1000
            };
            assert_eq!(att.resolve(&memory, 6).unwrap().0, beyond);
        }
    }

    #[test]
    fn impossible_buffers_are_refused_with_their_own_error() {
        let good = buffer(AttOrder::First, 0x1000, 512 * PAGE, 0);
        assert!(Att::new(&good).is_ok());
        let refused = |buffer: Buffer| Att::new(&buffer).unwrap_err();
        assert_eq!(refused(Buffer { fbo: 4096, ..good }), AttError::Fbo);
        assert_eq!(refused(Buffer { order: 3, ..good }), AttError::Order);
        assert_eq!(refused(Buffer { fbo: 1, ..good }), AttError::TooLong);
        assert_eq!(
            refused(Buffer {
                length: u64::MAX,
                ..good
            }),
            AttError::TooLong
        );
        assert_eq!(
            refused(buffer(AttOrder::Second, 0, (1 << 37) + 1, 0)),
            AttError::TooLong
        );
        assert!(Att::new(&buffer(AttOrder::Second, 0, 1 << 37, 0)).is_ok());
        assert_eq!(
            refused(buffer(AttOrder::Direct, u64::MAX - 4095, 8192, 0)),
            AttError::TooLong
        );
    }

    #[test]
    fn tables_that_are_not_aligned_are_errors_however_much_is_translated() {
        let memory = memory(8);
        for n in 0..8 {
            memory.put(0x1001 + n * 8, &page_address(n));
            memory.put(0x10_0001 + n * 8, &page_address(n));
        }
        memory.put(0x3000, &0x10_0001u64);
        let nowhere = |address| Err(AttError::Memory(DmaError { address }));
        for (order, root, address) in [
            (AttOrder::First, 0x1001, 0x1001),
            (AttOrder::Second, 0x2001, 0x2001),
            (AttOrder::Second, 0x3000, 0x10_0001),
        ] {
            let att = Att::new(&buffer(order, root, 8 * PAGE, 0)).unwrap();
            for pages in [1, 2, 3, 8] {
                let all = att.pieces(&memory, 0, pages * PAGE as usize, |_, _| Ok(()));
                assert_eq!(all, nowhere(address), "{order:?} {root:#x} {pages}");
            }
        }
    }

    #[test]
    fn tables_and_pages_without_memory_are_errors() {
        let memory = memory(2);
        memory.put(0x1008, &(u64::MAX - 4095));
        let table = 0xffff_0000;
        let att = Att::new(&buffer(AttOrder::First, table, PAGE, 0)).unwrap();
        assert_eq!(
            att.resolve(&memory, 0),
            Err(AttError::Memory(DmaError { address: table }))
        );
        let att = Att::new(&buffer(AttOrder::First, 0x1000, 2 * PAGE, 0)).unwrap();
        assert_eq!(att.resolve(&memory, PAGE), Err(AttError::OutOfRange));
        assert!(att.read(&memory, PAGE, &mut [0; 16]).is_err());
        let att = Att::new(&buffer(AttOrder::Second, u64::MAX - 7, 1 << 30, 0)).unwrap();
        assert!(att.resolve(&memory, 1 << 29).is_err());
    }
}
