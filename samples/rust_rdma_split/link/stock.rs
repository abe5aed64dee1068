// SPDX-License-Identifier: GPL-2.0

//! Memory to send from, in several sizes.

use super::{Shape, PIECE};
use crate::rdma::consumer::{Buffer, Chunk, Keep, Lease};
use core::ops::Deref;
use kernel::prelude::*;

/// Memory of `count` chunks of `size` bytes, which `keeps` keep when all of them are gone.
pub(super) fn chunks(
    lease: &Lease,
    count: usize,
    size: usize,
    keeps: &mut KVec<Keep>,
) -> Result<KVec<Chunk>> {
    let mut all = KVec::with_capacity(count, GFP_KERNEL)?;
    let at_once = (PIECE / size.max(1)).max(1);
    while all.len() < count {
        let next = at_once.min(count - all.len());
        let piece = Buffer::new(lease, size * next)?.cut(size)?;
        if let Some(chunk) = piece.first() {
            keeps.push(chunk.keep(), GFP_KERNEL)?;
        }
        for chunk in piece {
            all.push(chunk, GFP_KERNEL)?;
        }
    }
    Ok(all)
}

/// Things of several sizes that nobody uses.
pub(super) struct Stock<T> {
    /// From small to large, with room for all there are of each.
    shelves: KVec<(usize, KVec<T>)>,
}

impl<T: Deref<Target = [u8]>> Stock<T> {
    pub(super) const fn empty() -> Self {
        Self {
            shelves: KVec::new(),
        }
    }

    /// Adds things of one size, larger than those before.
    fn add(&mut self, size: usize, things: KVec<T>) -> Result {
        self.shelves.push((size, things), GFP_KERNEL)?;
        Ok(())
    }

    fn shelf(&self, size: usize) -> Option<usize> {
        let fits = |(room, things): &(usize, KVec<T>)| *room >= size && !things.is_empty();
        self.shelves.iter().position(fits)
    }

    /// Whether there is one of `size` bytes.
    pub(super) fn has(&self, size: usize) -> bool {
        self.shelf(size).is_some()
    }

    /// Whether there could be one of `size` bytes, if nobody used any.
    pub(super) fn fits(&self, size: usize) -> bool {
        self.shelves.last().is_some_and(|(room, _)| *room >= size)
    }

    /// Takes the smallest with at least `size` bytes.
    pub(super) fn take(&mut self, size: usize) -> Option<T> {
        let shelf = self.shelf(size)?;
        self.shelves.get_mut(shelf)?.1.pop()
    }

    /// Puts one back; gives it again where it does not belong here.
    pub(super) fn put(&mut self, thing: T) -> Option<T> {
        let size = thing.len();
        match self.shelves.iter_mut().find(|(room, _)| *room == size) {
            Some((_, things)) if things.len() < things.capacity() => {
                let _ = things.push_within_capacity(thing);
                None
            }
            _ => Some(thing),
        }
    }
}

impl Stock<Chunk> {
    /// Memory of these shapes, each with `more` bytes than it says, which `keeps` keep.
    pub(super) fn new(
        lease: &Lease,
        shapes: &[Shape],
        more: usize,
        keeps: &mut KVec<Keep>,
    ) -> Result<Self> {
        let mut stock = Self::empty();
        for shape in shapes.iter().filter(|shape| shape.elements != 0) {
            let size = shape.size as usize + more;
            stock.add(size, chunks(lease, shape.elements as usize, size, keeps)?)?;
        }
        Ok(stock)
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.shelves.iter().map(|(_, chunks)| chunks.len()).sum()
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_stock)]
mod tests {
    use super::*;

    fn thing(size: usize) -> Result<KVec<u8>> {
        Ok(KVec::from_elem(0, size, GFP_KERNEL)?)
    }

    fn things(count: usize, size: usize) -> Result<KVec<KVec<u8>>> {
        let mut things = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            things.push(thing(size)?, GFP_KERNEL)?;
        }
        Ok(things)
    }

    #[test]
    fn the_smallest_that_fits_is_taken_and_goes_where_it_was() -> Result {
        let mut stock = Stock::empty();
        stock.add(10, things(1, 10)?)?;
        stock.add(20, things(2, 20)?)?;
        assert!(stock.has(20) && !stock.has(21) && stock.fits(20) && !stock.fits(21));
        let first = stock.take(5).ok_or(EINVAL)?;
        assert_eq!(first.len(), 10);
        // None of that size is left.
        let second = stock.take(5).ok_or(EINVAL)?;
        let third = stock.take(11).ok_or(EINVAL)?;
        assert_eq!((second.len(), third.len()), (20, 20));
        assert!(stock.take(1).is_none() && !stock.has(1) && stock.fits(20));
        assert!(stock.put(third).is_none());
        assert!(!stock.has(21) && stock.has(11));
        // What is not of here, though there would be room.
        assert!(stock.put(thing(15)?).is_some());
        assert!(stock.put(first).is_none() && stock.put(second).is_none());
        assert!(stock.put(thing(10)?).is_some());
        assert!(stock.put(thing(15)?).is_some());
        assert_eq!(stock.take(10).map(|it| it.len()), Some(10));
        Ok(())
    }

    #[test]
    fn an_empty_stock_has_nothing() {
        let mut stock: Stock<KVec<u8>> = Stock::empty();
        assert!(!stock.has(0) && !stock.fits(0) && stock.take(0).is_none());
    }
}
