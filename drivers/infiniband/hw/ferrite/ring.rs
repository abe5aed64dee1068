// SPDX-License-Identifier: GPL-2.0

//! Memory of the rings that the kernel posts to or polls.
//!
//! It is made of chunks that are easily had, however large a ring is; the device finds them by a
//! table of pages, as it does those of a process.

use crate::{
    abi::{
        Buffer,
        BLOCK_SIZE, //
    },
    dma_types::Block,
    lent::Leak,
    tpt::Att,
};
use kernel::{
    device::{
        Bound,
        Device, //
    },
    dma::Coherent,
    page::{
        PAGE_SHIFT,
        PAGE_SIZE, //
    },
    prelude::*,
};

/// Blocks of a chunk: eight pages, the most that the page allocator takes for little.
const CHUNK_BLOCKS: usize = 8 * PAGE_SIZE / BLOCK_SIZE;

/// Where a block is: the chunk, and the place in it.
const fn place(block: usize) -> (usize, usize) {
    (block / CHUNK_BLOCKS, block % CHUNK_BLOCKS)
}

/// Blocks of memory that driver and device share.
pub(crate) struct KernelBlocks {
    // Before the chunks that it leads to.
    att: Att,
    chunks: KVVec<Coherent<[Block]>>,
}

impl Leak for KernelBlocks {
    fn leak(self) {
        core::mem::forget(self);
    }
}

impl KernelBlocks {
    /// Makes `blocks` blocks of zeroes. Sleeps.
    pub(crate) fn new(dev: &Device<Bound>, blocks: usize) -> Result<Self> {
        let bytes = blocks * BLOCK_SIZE;
        let mut chunks = KVVec::with_capacity(blocks.div_ceil(CHUNK_BLOCKS), GFP_KERNEL)?;
        let mut pages = KVVec::with_capacity(bytes.div_ceil(PAGE_SIZE), GFP_KERNEL)?;
        for first in (0..blocks).step_by(CHUNK_BLOCKS) {
            let count = (blocks - first).min(CHUNK_BLOCKS);
            let chunk: Coherent<[Block]> = Coherent::zeroed_slice(dev, count, GFP_KERNEL)?;
            for offset in (0..chunk.size()).step_by(PAGE_SIZE) {
                pages.push(chunk.dma_handle() + offset as u64, GFP_KERNEL)?;
            }
            chunks.push(chunk, GFP_KERNEL)?;
        }
        Ok(Self {
            att: Att::new(dev, &pages, PAGE_SHIFT as u8, 0, bytes as u64)?,
            chunks,
        })
    }

    /// What to tell the device.
    pub(crate) fn buffer(&self) -> Buffer {
        self.att.buffer()
    }

    #[inline]
    fn find(&self, block: usize) -> Result<(&Coherent<[Block]>, usize)> {
        let (chunk, index) = place(block);
        Ok((self.chunks.get(chunk).ok_or(EINVAL)?, index))
    }

    /// Reads a block.
    #[inline]
    pub(crate) fn get(&self, block: usize) -> Result<Block> {
        let (chunk, index) = self.find(block)?;
        Ok(kernel::dma_read!(chunk, [try: index]))
    }

    /// Writes a block.
    #[inline]
    pub(crate) fn put(&self, block: usize, contents: Block) -> Result {
        let (chunk, index) = self.find(block)?;
        kernel::dma_write!(chunk, [try: index], contents);
        Ok(())
    }

    /// Reads a word of a block.
    #[inline]
    pub(crate) fn word(&self, block: usize, word: usize) -> Result<u32> {
        let (chunk, index) = self.find(block)?;
        Ok(kernel::dma_read!(chunk, [try: index].words[try: word]))
    }

    /// Writes a word of a block.
    #[inline]
    pub(crate) fn set_word(&self, block: usize, word: usize, value: u32) -> Result {
        let (chunk, index) = self.find(block)?;
        kernel::dma_write!(chunk, [try: index].words[try: word], value);
        Ok(())
    }
}

#[kunit_tests(ferrite_ring)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_in_the_chunks_one_after_the_other() {
        assert_eq!(place(0), (0, 0));
        assert_eq!(place(CHUNK_BLOCKS - 1), (0, CHUNK_BLOCKS - 1));
        assert_eq!(place(CHUNK_BLOCKS), (1, 0));
        assert_eq!(place(3 * CHUNK_BLOCKS + 5), (3, 5));
    }

    #[test]
    fn chunks_are_whole_pages() {
        assert_eq!(CHUNK_BLOCKS * BLOCK_SIZE % PAGE_SIZE, 0);
    }
}
