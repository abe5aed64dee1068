// SPDX-License-Identifier: GPL-2.0

//! Memory of a process whose pages come and go: brought in, and given back when the kernel wants them.

use super::mapped::{flag, LockedPages, MappedPages, Mapping};
use super::{core_odp, BringIn, MappedPage, PageUser};
use crate::bindings;
use crate::rdma::hold::Hold;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::container_of;
use kernel::error::to_result;
use kernel::mm::{Mm, MmWithUser};
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};
use kernel::prelude::*;
use kernel::sync::aref::ARef;
use kernel::sync::atomic::Relaxed;
use kernel::sync::Arc;
use kernel::task::Task;
use kernel::time::{Delta, Instant, Monotonic};
use kernel::types::NotThreadSafe;

/// How many pages are brought in at a time: what is known of them stands on the stack.
const AT_A_TIME: usize = 64;

/// What attempts to bring pages in may take in all that come to nothing, for one [`OdpUmem::map`]: as
/// the kernel's own way waits, but for all pages together.
const MOST_LOST: Delta = Delta::from_secs(1);

/// Time that attempts may still take which come to nothing, as pages are taken back meanwhile. A
/// process that does nothing but take its own back keeps nobody up for longer.
///
/// The time of attempts that succeed does not count: there are as many as there is memory, and its
/// pages come from wherever they are, gigabytes of them from a disk if need be.
struct Patience(Delta);

impl Patience {
    /// Calls `attempt` until it does not fail with `EBUSY`, or time is up. `clock` says how long some
    /// moment is ago, always the same.
    fn retry<R>(
        &mut self,
        clock: impl Fn() -> Delta,
        mut attempt: impl FnMut() -> Result<R>,
    ) -> Result<R> {
        let mut begun = clock();
        loop {
            match attempt() {
                Err(error) if error == EBUSY => {}
                result => return result,
            }
            let now = clock();
            self.0 -= now - begun;
            if self.0 <= Delta::ZERO {
                return Err(EBUSY);
            }
            begun = now;
        }
    }
}

/// The table of what the kernel calls, for one kind of user.
pub(super) struct Notify<T>(PhantomData<T>);

impl<T: PageUser> Notify<T> {
    pub(super) const OPS: bindings::mmu_interval_notifier_ops =
        bindings::mmu_interval_notifier_ops {
            invalidate: Some(Self::invalidate),
            invalidate_start: None,
            invalidate_finish: None,
        };

    /// # Safety
    ///
    /// To be called by the kernel only, for a notifier of an [`OdpUmem`] of `T`.
    unsafe extern "C" fn invalidate(
        notifier: *mut bindings::mmu_interval_notifier,
        range: *const bindings::mmu_notifier_range,
        seq: c_ulong,
    ) -> bool {
        // SAFETY: `range` is that of the invalidation, which whoever invalidates keeps until this returns.
        if !unsafe { bindings::mmu_notifier_range_blockable(range) } {
            // Taking the lock sleeps.
            return false;
        }
        // SAFETY: `OPS` is given to `ib_umem_odp_alloc_child` only, which makes the notifier part of an
        // `ib_umem_odp`; `ib_umem_odp_release` removes the notifier, which waits for this, before it frees
        // that.
        let odp = unsafe { container_of!(notifier, bindings::ib_umem_odp, notifier) };
        let Some(odp) = NonNull::new(odp) else {
            return false;
        };
        // SAFETY: `ib_umem_odp_release` waits for this before it frees the memory.
        let locked = unsafe { Locked::lock(odp) };
        // SAFETY: `notifier` is valid, and the lock is held under which `bring_in` compares the number.
        unsafe { bindings::mmu_interval_set_seq(notifier, seq) };
        // SAFETY: The pointer is set with the lock held, which is held here: to a `Mapping<T>`, by
        // `OdpRoot::part` for the `T` of `OPS`. It lives until after the notifier is removed. Until it is
        // set nothing is mapped.
        let mapping = unsafe { (*odp.as_ptr()).private.cast::<Mapping<T>>().as_ref() };
        if let Some(mapping) = mapping {
            // SAFETY: `range` is that of the invalidation, which whoever invalidates keeps until this returns.
            let (start, end) = unsafe { ((*range).start as u64, (*range).end as u64) };
            let covered = locked.addresses();
            let taken = start.max(covered.start)..end.min(covered.end);
            if !taken.is_empty() {
                mapping.take_back(&locked, taken);
            }
        }
        true
    }
}

/// Memory of the kernel's, locked until this is dropped.
///
/// # Invariants
///
/// The pointer is valid for `'a`, and the current task holds its `umem_mutex`.
pub(super) struct Locked<'a> {
    odp: NonNull<bindings::ib_umem_odp>,
    _odp: PhantomData<&'a bindings::ib_umem_odp>,
    _task: NotThreadSafe,
}

impl Locked<'_> {
    /// Locks on-demand memory. Sleeps.
    ///
    /// # Safety
    ///
    /// `odp` must be memory of `ib_umem_odp_alloc_child` that is not released for as long as the result
    /// exists.
    pub(super) unsafe fn lock(odp: NonNull<bindings::ib_umem_odp>) -> Self {
        // SAFETY: The caller vouches for the memory, whose mutex was initialised when it was made.
        unsafe { bindings::mutex_lock(ptr::addr_of_mut!((*odp.as_ptr()).umem_mutex)) };
        // INVARIANT: The caller vouches for the pointer; the mutex was taken just now.
        Self {
            odp,
            _odp: PhantomData,
            _task: NotThreadSafe,
        }
    }

    /// The addresses of the process that it covers, in whole pages.
    fn addresses(&self) -> Range<u64> {
        // SAFETY: Valid by the type invariant.
        unsafe { addresses(self.odp) }
    }

    /// The device that does the DMA.
    fn device(&self) -> *mut bindings::device {
        // SAFETY: Valid by the type invariant; `ib_umem_odp_alloc_child` sets the RDMA device, of which `OdpUmem` has
        // a hold until the memory was released, and neither is changed afterwards.
        unsafe { (*(*self.odp.as_ptr()).umem.ibdev).dma_device }
    }

    /// Calls `f` with the mappings of the memory, with `mapped` for the list of pages, of which zero is a
    /// page that is not mapped. The memory's own list is never written: releasing the memory finds nothing
    /// to unmap.
    fn with_mappings<R>(
        &self,
        mapped: &MappedPages,
        f: impl FnOnce(*mut bindings::device, *mut bindings::hmm_dma_map) -> R,
    ) -> R {
        let own = self.odp.as_ptr();
        // SAFETY: Valid by the type invariant; mappings are used with the lock held, which is held. The
        // lists that the copy points to are there as long as the memory.
        let mut map = unsafe { ptr::addr_of!((*own).map).read() };
        map.pfn_list = mapped.as_ptr();
        let result = f(self.device(), &mut map);
        // SAFETY: The memory is valid by the type invariant, and the lock under which its mappings are used is still
        // held: nobody else looks at their state.
        unsafe { (*own).map.state = map.state };
        result
    }

    /// Maps a page that is noted in `mapped`, unless it is; returns its address for the device. One that
    /// cannot be mapped is noted no more.
    fn map(&self, mapped: &MappedPages, page: usize) -> Result<u64> {
        let noted = mapped.words.get(page).ok_or(EFAULT)?;
        let mut p2pdma: bindings::pci_p2pdma_map_state = pin_init::zeroed();
        let dma = self.with_mappings(mapped, |dev, map| {
            // SAFETY: Device and mappings are those of memory that is locked, of which `mapped` has a word
            // for each page, `page` among them. That word was noted by what `hmm_range_fault` said, and the
            // page is the process's as long as the lock is held. `p2pdma` is a local, and zeroed, as it is
            // to begin with.
            unsafe { core_odp::hmm_dma_map_pfn(dev, map, page, &mut p2pdma) }
        });
        // SAFETY: The device is valid, and the address one that it was given.
        if unsafe { bindings::dma_mapping_error(self.device(), dma) } != 0 {
            if noted.load(Relaxed) & flag::DMA_MAPPED == 0 {
                noted.store(0, Relaxed);
            }
            return Err(EFAULT);
        }
        Ok(dma)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the memory is valid and this task has the mutex.
        unsafe { bindings::mutex_unlock(ptr::addr_of_mut!((*self.odp.as_ptr()).umem_mutex)) };
    }
}

impl LockedPages for Locked<'_> {
    fn start(&self) -> u64 {
        self.addresses().start
    }

    fn keep(&self, word: usize) {
        if word & flag::VALID == 0 {
            return;
        }
        // SAFETY: Words with this bit are written by `MappedPages::take_in` only, for pages that are mapped,
        // and back to zero with the memory locked before such a page goes: it is there.
        let page = unsafe { bindings::hmm_pfn_to_page(word) };
        // SAFETY: The page is mapped until its word is zero, with the memory locked: it has a `struct page`.
        if !unsafe { bindings::is_pci_p2pdma_page(page) } {
            // SAFETY: The page is mapped in the process, which has a count of it until the invalidation
            // has returned.
            unsafe { bindings::get_page(page) };
        }
    }

    fn unmap(&self, mapped: &MappedPages, page: usize) {
        let Some(noted) = mapped.words.get(page) else {
            return;
        };
        let word = noted.load(Relaxed);
        let unmapped = self.with_mappings(mapped, |dev, map| {
            // SAFETY: Device and mappings are those of memory that is locked, of which `mapped` has a word
            // for each page, `page` among them.
            unsafe { core_odp::hmm_dma_unmap_pfn(dev, map, page) }
        });
        if unmapped && word & flag::WRITE != 0 {
            // SAFETY: The page was mapped until now, so that it is there: it is taken from the process
            // after this.
            unsafe { bindings::set_page_dirty(bindings::hmm_pfn_to_page(word)) };
        }
        noted.store(0, Relaxed);
    }
}

/// The addresses of the process that on-demand memory covers, in whole pages.
///
/// # Safety
///
/// `odp` must be memory of `ib_umem_odp_alloc_child`.
pub(super) unsafe fn addresses(odp: NonNull<bindings::ib_umem_odp>) -> Range<u64> {
    // SAFETY: The caller vouches for the memory; `mmu_interval_notifier_insert` set the addresses of its
    // notifier, which do not change.
    let (start, last) = unsafe {
        let interval = ptr::addr_of!((*odp.as_ptr()).notifier.interval_tree);
        ((*interval).start, (*interval).last)
    };
    start as u64..last as u64 + 1
}

/// On-demand memory of a process. Dropping it takes its pages back, which sleeps: the device must
/// not use them any more by then.
///
/// # Invariants
///
/// `raw` is on-demand memory that this value owns, whose private pointer is that of `mapping`, and whose device is that
/// of `_hold`.
pub struct OdpUmem<T: PageUser> {
    pub(super) raw: NonNull<bindings::ib_umem_odp>,
    pub(super) mapping: KBox<Mapping<T>>,
    /// Given back after the memory was released.
    pub(super) _hold: Hold,
}

// SAFETY: On-demand memory belongs to no task: it holds the process's memory map itself. `T` is
// `Send` and `Sync`, as `PageUser` demands.
unsafe impl<T: PageUser> Send for OdpUmem<T> {}

// SAFETY: DMA mappings, and the words of `mapped` that tell of them, are changed with `umem_mutex` held,
// by `map`, by invalidations and by dropping; nothing else of the memory is changed. `user` is `Sync`,
// as `PageUser` demands, and how many pages are mapped is an atomic.
unsafe impl<T: PageUser> Sync for OdpUmem<T> {}

impl<T: PageUser> OdpUmem<T> {
    /// Who uses the pages.
    pub fn user(&self) -> &Arc<T> {
        &self.mapping.user
    }

    /// How many pages are mapped. It may change at any time, but for becoming more while nobody
    /// calls [`OdpUmem::map`].
    pub fn mapped(&self) -> usize {
        self.mapping.mapped.count()
    }

    /// The addresses of the process that it covers, in whole pages.
    pub fn addresses(&self) -> Range<u64> {
        // SAFETY: By the type invariant the memory is ours, made by `ib_umem_odp_alloc_child`.
        unsafe { addresses(self.raw) }
    }

    /// Locks the memory. Sleeps.
    pub(super) fn lock(&self) -> Locked<'_> {
        // SAFETY: By the type invariant the memory is ours, and released only when this is dropped.
        unsafe { Locked::lock(self.raw) }
    }

    /// Tries to bring in the pages of a range, and takes the lock: what `pfns` says of them holds as long
    /// as that is held. `EBUSY` where some were taken back meanwhile: then try again.
    ///
    /// As `ib_umem_odp_map_dma_and_lock`, but with a list of the caller's own. `hmm_range_fault` writes it
    /// without the lock, so that those who bring pages in at the same time would spoil a list for all of
    /// them, or wait for each other's pages.
    fn bring_in(
        &self,
        addresses: &Range<u64>,
        pfns: &mut [c_ulong],
        how: BringIn,
    ) -> Result<Locked<'_>> {
        let covered = self.addresses();
        if addresses.start < covered.start || addresses.end > covered.end {
            return Err(EFAULT);
        }
        if (addresses.end - addresses.start) >> PAGE_SHIFT > pfns.len() as u64 {
            return Err(EINVAL);
        }
        let raw = self.raw.as_ptr();
        // SAFETY: The memory is ours by the type invariant, and has a count of the process's number.
        let task = unsafe { bindings::get_pid_task((*raw).tgid, bindings::pid_type_PIDTYPE_PID) };
        let task = NonNull::new(task.cast::<Task>()).ok_or(EINVAL)?;
        // SAFETY: `Task` is a transparent wrapper, and `get_pid_task` has counted it for us.
        let _task = unsafe { ARef::from_raw(task) };
        // SAFETY: The notifier of the memory keeps the memory map, until it is removed when this is dropped.
        let mm = unsafe { Mm::from_raw((*raw).umem.owning_mm) };
        let mm = MmWithUser::into_mmput_async(mm.mmget_not_zero().ok_or(EINVAL)?);

        // SAFETY: The notifier is part of the memory.
        let notifier = unsafe { ptr::addr_of_mut!((*raw).notifier) };
        // SAFETY: `ib_umem_odp_alloc_child` has inserted the notifier, and it is removed when this is
        // dropped.
        let notifier_seq = unsafe { core_odp::mmu_interval_read_begin(notifier) };
        let mut range = bindings::hmm_range {
            notifier,
            notifier_seq,
            start: usize::try_from(addresses.start)?,
            end: usize::try_from(addresses.end)?,
            hmm_pfns: pfns.as_mut_ptr(),
            default_flags: how.flags(),
            ..pin_init::zeroed()
        };
        {
            let _mmap = mm.mmap_read_lock();
            // SAFETY: The memory map is that of the notifier, has a user and is locked. There are as many
            // words as the range has pages, by the check above.
            to_result(unsafe { core_odp::hmm_range_fault(&mut range) })?;
        }
        let locked = self.lock();
        // SAFETY: The notifier is inserted, and the lock is held under which invalidations set its number.
        if unsafe { bindings::mmu_interval_read_retry(notifier, notifier_seq) } {
            return Err(EBUSY);
        }
        Ok(locked)
    }

    /// Maps the pages of `length` bytes from `address` on, and calls `each` for every one that is
    /// present, with the memory locked: what `each` tells the device holds until
    /// [`PageUser::invalidate`] is called. `each` must not allocate. `EBUSY` where pages are taken back
    /// as fast as they are brought in. Sleeps.
    pub fn map(
        &self,
        address: u64,
        length: u64,
        how: BringIn,
        mut each: impl FnMut(MappedPage),
    ) -> Result {
        let page_size = PAGE_SIZE as u64;
        let end = address.checked_add(length).ok_or(EFAULT)?;
        let end = end.checked_next_multiple_of(page_size).ok_or(EFAULT)?;
        let mut next = address & !(page_size - 1);
        let mut patience = Patience(MOST_LOST);
        while next < end {
            let last = end.min(next + AT_A_TIME as u64 * page_size);
            self.map_some(next..last, how, &mut patience, &mut each)?;
            next = last;
        }
        Ok(())
    }

    /// [`OdpUmem::map`] for a few whole pages.
    fn map_some(
        &self,
        addresses: Range<u64>,
        how: BringIn,
        patience: &mut Patience,
        each: &mut impl FnMut(MappedPage),
    ) -> Result {
        let mut pfns = [0; AT_A_TIME];
        let count = ((addresses.end - addresses.start) >> PAGE_SHIFT) as usize;
        let pfns = pfns.get_mut(..count).ok_or(EINVAL)?;
        let begun = Instant::<Monotonic>::now();
        let locked = patience.retry(|| begun.elapsed(), || self.bring_in(&addresses, pfns, how))?;
        // SAFETY: The memory is ours by the type invariant; what it is for does not change.
        let writable = unsafe { (*self.raw.as_ptr()).umem.writable() } != 0;
        let start = locked.start();
        let mapped = &self.mapping.mapped;
        for (page, pfn) in addresses.step_by(PAGE_SIZE).zip(pfns.iter()) {
            let index = ((page - start) >> PAGE_SHIFT) as usize;
            let taken = mapped.take_in(index, *pfn, || locked.map(mapped, index))?;
            if let Some((dma, write)) = taken {
                each(MappedPage {
                    address: page,
                    dma,
                    writable: write && writable,
                });
            }
        }
        Ok(())
    }
}

impl<T: PageUser> Drop for OdpUmem<T> {
    fn drop(&mut self) {
        let all = 0..self.mapping.mapped.pages();
        self.mapping.give_back(&self.lock(), all);
        // SAFETY: Ours by the type invariant, and not locked any more. This removes the notifier, which is
        // the last to use the mapping: that is dropped after it.
        unsafe { core_odp::ib_umem_odp_release(self.raw.as_ptr()) }
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_odp_umem)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn attempts_that_come_to_nothing_have_one_limit_for_all_pages() {
        let time = Cell::new(0);
        let clock = || Delta::from_millis(time.get());
        let mut patience = Patience(Delta::from_millis(10));
        // What succeeds takes as long as it takes.
        for _ in 0..3 {
            let slow = || {
                time.set(time.get() + 100);
                Ok(())
            };
            assert_eq!(patience.retry(clock, slow), Ok(()));
        }
        // Each of these loses 4 ms.
        for result in [Ok(()), Ok(()), Err(EBUSY)] {
            let mut answers = [Err(EBUSY), Ok(())].into_iter();
            let attempt = || {
                time.set(time.get() + 4);
                answers.next().unwrap_or(Err(EIO))
            };
            assert_eq!(patience.retry(clock, attempt), result);
        }
        // Other errors are not tried again.
        let mut patience = Patience(Delta::from_millis(10));
        let refused = || -> Result { Err(EFAULT) };
        assert_eq!(patience.retry(clock, refused), Err(EFAULT));
    }
}
