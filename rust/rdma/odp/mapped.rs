// SPDX-License-Identifier: GPL-2.0

//! Which pages are mapped for the device, and how they are taken back.

use super::PageUser;
use crate::bindings;
use core::ops::Range;
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;

/// What the kernel says of a page in a word, other than its number.
pub(super) mod flag {
    use crate::bindings;

    /// The page is present; else the word says nothing.
    pub(in crate::rdma) const VALID: usize = bindings::hmm_pfn_flags_HMM_PFN_VALID;
    /// It may be written.
    pub(in crate::rdma) const WRITE: usize = bindings::hmm_pfn_flags_HMM_PFN_WRITE;
    /// It is mapped for the device.
    pub(in crate::rdma) const DMA_MAPPED: usize = bindings::hmm_pfn_flags_HMM_PFN_DMA_MAPPED;
    /// It is to be made present, or writable.
    pub(in crate::rdma) const REQ_FAULT: usize = bindings::hmm_pfn_flags_HMM_PFN_REQ_FAULT;
    pub(in crate::rdma) const REQ_WRITE: usize = bindings::hmm_pfn_flags_HMM_PFN_REQ_WRITE;
    /// All bits that are not the number.
    pub(in crate::rdma) const ALL: usize = bindings::hmm_pfn_flags_HMM_PFN_FLAGS;
}

/// Which pages of on-demand memory are mapped for the device, by their place in it: for each its
/// number and flags, in the kernel's words, or zero.
///
/// The kernel has such a list too, which its own way to bring pages in writes without the lock: it
/// loses a page that the process has unmapped before that is invalidated. It is not used. What is
/// noted here is changed only with the memory locked.
pub(super) struct MappedPages {
    pub(super) words: KVVec<Atomic<usize>>,
    count: Atomic<usize>,
}

/// Bytes of memory that on-demand memory takes for each of its pages, mapped or not: the kernel's word
/// for it, its DMA address, and the word of [`MappedPages`].
pub const ON_DEMAND_BYTES_PER_PAGE: usize =
    size_of::<c_ulong>() + size_of::<bindings::dma_addr_t>() + size_of::<Atomic<usize>>();

impl MappedPages {
    /// Of memory of so many pages, none of which is mapped.
    pub(super) fn new(pages: usize) -> Result<Self> {
        let mut words = KVVec::with_capacity(pages, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..pages {
            words.push(Atomic::new(0), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(Self {
            words,
            count: Atomic::new(0),
        })
    }

    pub(super) fn pages(&self) -> usize {
        self.words.len()
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// What is noted of a page; zero where it is not mapped. The memory has to be locked.
    pub(super) fn word(&self, page: usize) -> usize {
        self.words.get(page).map_or(0, |word| word.load(Relaxed))
    }

    /// All words, to be written with the memory locked.
    pub(super) fn as_ptr(&self) -> *mut c_ulong {
        const { assert!(size_of::<Atomic<usize>>() == size_of::<c_ulong>()) };
        self.words.as_ptr().cast_mut().cast()
    }

    /// Calls `change` for a page, which may map it or give it back, and counts it if that was done.
    /// The memory has to be locked.
    pub(super) fn change<R>(&self, page: usize, change: impl FnOnce() -> R) -> R {
        let before = self.word(page) != 0;
        let result = change();
        match (before, self.word(page) != 0) {
            (false, true) => self.count.store(self.count() + 1, Relaxed),
            (true, false) => self.count.store(self.count() - 1, Relaxed),
            _ => {}
        }
        result
    }

    /// Takes a page in of which the kernel said `word`, and maps it by `map`: its address for the
    /// device and whether it may be written, or `None` if it is not present. The memory has to be
    /// locked.
    pub(super) fn take_in(
        &self,
        page: usize,
        word: usize,
        map: impl FnOnce() -> Result<u64>,
    ) -> Result<Option<(u64, bool)>> {
        if word & flag::VALID == 0 {
            return Ok(None);
        }
        let noted = self.words.get(page).ok_or(EFAULT)?;
        let before = noted.load(Relaxed);
        if before != 0 && (before ^ word) & !flag::ALL != 0 {
            // A page is taken back before another takes its place.
            kernel::do_once_lite! { kernel::warn_on!(true); };
            return Err(EFAULT);
        }
        let dma = self.change(page, || {
            // The right to write stays: what could be written once may be dirty.
            let kept = word & (flag::VALID | flag::WRITE | !flag::ALL);
            noted.store(before | kept, Relaxed);
            map()
        })?;
        // By what is noted, not by what was said just now. That may be older than what somebody else
        // was told, who brought the page in to write it; and the kernel takes a page back before it
        // takes the right to write it from the process.
        Ok(Some((dma, noted.load(Relaxed) & flag::WRITE != 0)))
    }

    /// The first page of a range that is mapped.
    pub(super) fn first(&self, range: Range<usize>) -> Option<usize> {
        if self.count() == 0 {
            return None;
        }
        range.into_iter().find(|page| self.word(*page) != 0)
    }
}

/// On-demand memory as those see it who take its pages back: with `umem_mutex` held.
pub(super) trait LockedPages {
    /// Address in the process of the first page.
    fn start(&self) -> u64;
    /// Keeps a page that is mapped from ever being freed; `word` is what is noted of it.
    fn keep(&self, word: usize);
    /// Gives a mapped page back, by what is noted of it, and notes that.
    fn unmap(&self, mapped: &MappedPages, page: usize);
}

/// Who uses the pages of on-demand memory, and which of them.
pub(super) struct Mapping<T> {
    pub(super) user: Arc<T>,
    pub(super) mapped: MappedPages,
}

impl<T: PageUser> Mapping<T> {
    pub(super) fn new(user: Arc<T>, pages: usize) -> Result<KBox<Self>> {
        let mapped = MappedPages::new(pages)?;
        Ok(KBox::new(Self { user, mapped }, GFP_KERNEL_ACCOUNT)?)
    }

    /// Takes the pages of these addresses back from the device, and gives them back to the kernel.
    pub(super) fn take_back(&self, memory: &impl LockedPages, addresses: Range<u64>) {
        let start = memory.start();
        let place = |address: u64| (address.saturating_sub(start) >> PAGE_SHIFT) as usize;
        let end = place(addresses.end + (PAGE_SIZE as u64 - 1)).min(self.mapped.pages());
        let Some(first) = self.mapped.first(place(addresses.start)..end) else {
            return;
        };
        let address = |page: usize| start + ((page as u64) << PAGE_SHIFT);
        self.user.invalidate(address(first)..address(end));
        self.give_back(memory, first..end);
        if self.mapped.count() == 0 {
            self.user.unused();
        }
    }

    /// Gives mapped pages back to the kernel, or keeps them for ever where the device may still use
    /// them.
    pub(super) fn give_back(&self, memory: &impl LockedPages, pages: Range<usize>) {
        let keep = self.user.may_still_use();
        let mut next = pages.start;
        while let Some(page) = self.mapped.first(next..pages.end) {
            if keep {
                memory.keep(self.mapped.word(page));
            }
            self.mapped
                .change(page, || memory.unmap(&self.mapped, page));
            next = page + 1;
        }
    }
}
