// SPDX-License-Identifier: GPL-2.0

//! On-demand paging (ODP): memory of a process that is not pinned. Its pages are mapped for a device
//! when the device needs them, and taken back when the process or the kernel wants them.
//!
//! C header: [`include/rdma/ib_umem_odp.h`](srctree/include/rdma/ib_umem_odp.h).

use super::hold::Hold;
use super::{Access, Device, Driver};
use crate::bindings;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::container_of;
use kernel::error::{from_err_ptr, to_result};
use kernel::mm::{Mm, MmWithUser};
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};
use kernel::prelude::*;
use kernel::sync::aref::ARef;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::task::Task;
use kernel::time::{Delta, Instant, Monotonic};
use kernel::types::NotThreadSafe;

#[cfg(not(CONFIG_INFINIBAND_ON_DEMAND_PAGING))]
use absent as core_odp;
#[cfg(CONFIG_INFINIBAND_ON_DEMAND_PAGING)]
use bindings as core_odp;

/// Whether the kernel has on-demand memory.
pub const ON_DEMAND_AVAILABLE: bool = cfg!(CONFIG_INFINIBAND_ON_DEMAND_PAGING);

/// Stands for what a kernel without on-demand memory does not have: there is no root, so that nothing
/// else is called.
#[cfg(not(CONFIG_INFINIBAND_ON_DEMAND_PAGING))]
#[allow(clippy::missing_safety_doc)]
mod absent {
    use crate::bindings::{
        device, dma_addr_t, hmm_dma_map, hmm_range, ib_device, ib_umem_odp, mmu_interval_notifier,
        mmu_interval_notifier_ops, pci_p2pdma_map_state,
    };
    use crate::kernel_ext::errno::eopnotsupp;
    use kernel::ffi::{c_int, c_ulong};

    pub(super) unsafe fn ib_umem_odp_alloc_implicit(
        _: *mut ib_device,
        _: c_int,
    ) -> *mut ib_umem_odp {
        eopnotsupp().to_ptr()
    }

    pub(super) unsafe fn ib_umem_odp_alloc_child(
        _: *mut ib_umem_odp,
        _: c_ulong,
        _: usize,
        _: *const mmu_interval_notifier_ops,
    ) -> *mut ib_umem_odp {
        eopnotsupp().to_ptr()
    }

    pub(super) unsafe fn ib_umem_odp_release(_: *mut ib_umem_odp) {}

    pub(super) unsafe fn mmu_interval_read_begin(_: *mut mmu_interval_notifier) -> c_ulong {
        0
    }

    pub(super) unsafe fn hmm_range_fault(_: *mut hmm_range) -> c_int {
        eopnotsupp().to_errno()
    }

    pub(super) unsafe fn hmm_dma_map_pfn(
        _: *mut device,
        _: *mut hmm_dma_map,
        _: usize,
        _: *mut pci_p2pdma_map_state,
    ) -> dma_addr_t {
        dma_addr_t::MAX
    }

    pub(super) unsafe fn hmm_dma_unmap_pfn(_: *mut device, _: *mut hmm_dma_map, _: usize) -> bool {
        false
    }
}

/// Who uses the pages of on-demand memory: the part of a driver that tells its device of them.
pub trait PageUser: Send + Sync {
    /// The pages of these addresses of the process are taken back, of which some are mapped. When
    /// this returns, the device must not use them any more; the memory is locked against new
    /// mappings meanwhile.
    ///
    /// This is called when the kernel reclaims memory: it may sleep, but neither allocate memory
    /// that has to be reclaimed nor wait for somebody who does.
    fn invalidate(&self, addresses: Range<u64>);

    /// No page is mapped any more of on-demand memory of which some were; as [`PageUser::invalidate`].
    fn unused(&self) {}

    /// Whether the device may go on using pages although it was told not to: it does not answer and
    /// cannot be stopped. Pages that it was told of are never freed then.
    fn may_still_use(&self) -> bool {
        false
    }
}

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

/// What the kernel says of a page in a word, other than its number.
mod flag {
    use crate::bindings;

    /// The page is present; else the word says nothing.
    pub(super) const VALID: usize = bindings::hmm_pfn_flags_HMM_PFN_VALID;
    /// It may be written.
    pub(super) const WRITE: usize = bindings::hmm_pfn_flags_HMM_PFN_WRITE;
    /// It is mapped for the device.
    pub(super) const DMA_MAPPED: usize = bindings::hmm_pfn_flags_HMM_PFN_DMA_MAPPED;
    /// It is to be made present, or writable.
    pub(super) const REQ_FAULT: usize = bindings::hmm_pfn_flags_HMM_PFN_REQ_FAULT;
    pub(super) const REQ_WRITE: usize = bindings::hmm_pfn_flags_HMM_PFN_REQ_WRITE;
    /// All bits that are not the number.
    pub(super) const ALL: usize = bindings::hmm_pfn_flags_HMM_PFN_FLAGS;
}

/// How pages are brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringIn {
    /// To be read; they are made present.
    Read,
    /// To be written; they are made present and writable.
    Write,
    /// Only those that are present.
    Present,
}

impl BringIn {
    /// What is asked of each page, in the kernel's words.
    fn flags(self) -> usize {
        match self {
            Self::Read => flag::REQ_FAULT,
            Self::Write => flag::REQ_FAULT | flag::REQ_WRITE,
            Self::Present => 0,
        }
    }
}

/// A page that is mapped for the device.
#[derive(Clone, Copy, Debug)]
pub struct MappedPage {
    /// Its address in the process.
    pub address: u64,
    /// Its address for the device.
    pub dma: u64,
    /// The device may write it.
    pub writable: bool,
}

/// The table of what the kernel calls, for one kind of user.
struct Notify<T>(PhantomData<T>);

impl<T: PageUser> Notify<T> {
    const OPS: bindings::mmu_interval_notifier_ops = bindings::mmu_interval_notifier_ops {
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

/// Which pages of on-demand memory are mapped for the device, by their place in it: for each its
/// number and flags, in the kernel's words, or zero.
///
/// The kernel has such a list too, which its own way to bring pages in writes without the lock: it
/// loses a page that the process has unmapped before that is invalidated. It is not used. What is
/// noted here is changed only with the memory locked.
struct MappedPages {
    words: KVVec<Atomic<usize>>,
    count: Atomic<usize>,
}

/// Bytes of memory that on-demand memory takes for each of its pages, mapped or not: the kernel's word
/// for it, its DMA address, and the word of [`MappedPages`].
pub const ON_DEMAND_BYTES_PER_PAGE: usize =
    size_of::<c_ulong>() + size_of::<bindings::dma_addr_t>() + size_of::<Atomic<usize>>();

impl MappedPages {
    /// Of memory of so many pages, none of which is mapped.
    fn new(pages: usize) -> Result<Self> {
        let mut words = KVVec::with_capacity(pages, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..pages {
            words.push(Atomic::new(0), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(Self {
            words,
            count: Atomic::new(0),
        })
    }

    fn pages(&self) -> usize {
        self.words.len()
    }

    fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// What is noted of a page; zero where it is not mapped. The memory has to be locked.
    fn word(&self, page: usize) -> usize {
        self.words.get(page).map_or(0, |word| word.load(Relaxed))
    }

    /// All words, to be written with the memory locked.
    fn as_ptr(&self) -> *mut c_ulong {
        const { assert!(size_of::<Atomic<usize>>() == size_of::<c_ulong>()) };
        self.words.as_ptr().cast_mut().cast()
    }

    /// Calls `change` for a page, which may map it or give it back, and counts it if that was done.
    /// The memory has to be locked.
    fn change<R>(&self, page: usize, change: impl FnOnce() -> R) -> R {
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
    fn take_in(
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
    fn first(&self, range: Range<usize>) -> Option<usize> {
        if self.count() == 0 {
            return None;
        }
        range.into_iter().find(|page| self.word(*page) != 0)
    }
}

/// On-demand memory as those see it who take its pages back: with `umem_mutex` held.
trait LockedPages {
    /// Address in the process of the first page.
    fn start(&self) -> u64;
    /// Keeps a page that is mapped from ever being freed; `word` is what is noted of it.
    fn keep(&self, word: usize);
    /// Gives a mapped page back, by what is noted of it, and notes that.
    fn unmap(&self, mapped: &MappedPages, page: usize);
}

/// Memory of the kernel's, locked until this is dropped.
///
/// # Invariants
///
/// The pointer is valid for `'a`, and the current task holds its `umem_mutex`.
struct Locked<'a> {
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
    unsafe fn lock(odp: NonNull<bindings::ib_umem_odp>) -> Self {
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
unsafe fn addresses(odp: NonNull<bindings::ib_umem_odp>) -> Range<u64> {
    // SAFETY: The caller vouches for the memory; `mmu_interval_notifier_insert` set the addresses of its
    // notifier, which do not change.
    let (start, last) = unsafe {
        let interval = ptr::addr_of!((*odp.as_ptr()).notifier.interval_tree);
        ((*interval).start, (*interval).last)
    };
    start as u64..last as u64 + 1
}

/// Who uses the pages of on-demand memory, and which of them.
struct Mapping<T> {
    user: Arc<T>,
    mapped: MappedPages,
}

impl<T: PageUser> Mapping<T> {
    fn new(user: Arc<T>, pages: usize) -> Result<KBox<Self>> {
        let mapped = MappedPages::new(pages)?;
        Ok(KBox::new(Self { user, mapped }, GFP_KERNEL_ACCOUNT)?)
    }

    /// Takes the pages of these addresses back from the device, and gives them back to the kernel.
    fn take_back(&self, memory: &impl LockedPages, addresses: Range<u64>) {
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
    fn give_back(&self, memory: &impl LockedPages, pages: Range<usize>) {
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

/// On-demand memory of a process. Dropping it takes its pages back, which sleeps: the device must
/// not use them any more by then.
///
/// # Invariants
///
/// `raw` is on-demand memory that this value owns, whose private pointer is that of `mapping`, and whose device is that
/// of `_hold`.
pub struct OdpUmem<T: PageUser> {
    raw: NonNull<bindings::ib_umem_odp>,
    mapping: KBox<Mapping<T>>,
    /// Given back after the memory was released.
    _hold: Hold,
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
    fn lock(&self) -> Locked<'_> {
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

/// All memory of a process, to make on-demand memory of parts of it later, from any task.
///
/// # Invariants
///
/// `raw` is a root that this value owns, of the memory map `mm` and the device of `hold`.
pub struct OdpRoot {
    raw: NonNull<bindings::ib_umem_odp>,
    /// Given back after the root was released.
    hold: Hold,
    /// A root has no notifier that would keep it.
    _mm: ARef<Mm>,
}

// SAFETY: A root belongs to no task: it holds the process's memory map itself.
unsafe impl Send for OdpRoot {}
// SAFETY: A root is only read after it was made.
unsafe impl Sync for OdpRoot {}

impl OdpRoot {
    /// All memory of the current process.
    pub fn new<D: Driver>(dev: &Device<D>, access: Access) -> Result<Self> {
        let access = access.as_raw() & !Access::HUGETLB.as_raw();
        let hold = dev.hold();
        let dev = dev.as_raw();
        // SAFETY: `dev` comes from a reference to a device, which is not freed before `hold` is given back.
        let root = unsafe { core_odp::ib_umem_odp_alloc_implicit(dev, access as c_int) };
        let raw = NonNull::new(from_err_ptr(root)?).ok_or(ENOMEM)?;
        // SAFETY: The root was made just now, for the memory map of the current task, which keeps it
        // meanwhile.
        let mm = unsafe { Mm::from_raw((*raw.as_ptr()).umem.owning_mm) };
        // INVARIANT: Made just now, of that memory map.
        Ok(Self {
            raw,
            hold,
            _mm: mm.into(),
        })
    }

    /// On-demand memory of `length` bytes from `address` on. Fails when the process is gone.
    pub fn part<T: PageUser>(&self, address: u64, length: u64, user: Arc<T>) -> Result<OdpUmem<T>> {
        let end = address.checked_add(length).ok_or(EOVERFLOW)?;
        let pages = end.div_ceil(PAGE_SIZE as u64) - address / PAGE_SIZE as u64;
        let mapping = Mapping::new(user, usize::try_from(pages)?)?;
        let (address, length) = (usize::try_from(address)?, usize::try_from(length)?);
        // SAFETY: The root is ours by the type invariant, and keeps the process's memory map. The operations
        // are constants.
        let raw = from_err_ptr(unsafe {
            core_odp::ib_umem_odp_alloc_child(self.raw.as_ptr(), address, length, &Notify::<T>::OPS)
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        {
            // Invalidations may come since the memory was made.
            // SAFETY: Made just now, and nobody else can release it.
            let _locked = unsafe { Locked::lock(raw) };
            // SAFETY: The memory is valid, and the lock held under which invalidations read the pointer.
            unsafe { (*raw.as_ptr()).private = ptr::from_ref(&*mapping).cast_mut().cast() };
        }
        // INVARIANT: Made just now, of the device of the root, and the pointer was set.
        Ok(OdpUmem {
            raw,
            mapping,
            _hold: self.hold.clone(),
        })
    }
}

impl Drop for OdpRoot {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the root is ours. Parts hold the memory map themselves, by their
        // notifiers.
        unsafe { core_odp::ib_umem_odp_release(self.raw.as_ptr()) }
    }
}

c_enum! {
    /// What a process says about memory that it is going to use.
    pub enum Advice {
        /// It will be read.
        Prefetch = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        /// It will be written.
        PrefetchWrite = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        /// It will be used; only pages that are present count.
        PrefetchNoFault = ib_uverbs_advise_mr_advice_IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    }
}

/// A part of a region that an advice is about.
#[derive(Clone, Copy, Debug)]
pub struct AdvisedRange {
    /// Address, as work requests say it.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: u32,
}

c_flags! {
    /// What a service can do with on-demand memory.
    pub struct OdpCaps(u32) {
        /// Send from it.
        SEND = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SEND,
        /// Receive to it.
        RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_RECV,
        /// Write, from it and to it.
        WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_WRITE,
        /// Read, from it and to it.
        READ = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_READ,
        /// Atomics.
        ATOMIC = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC,
        /// Receive to it through a shared receive queue.
        SRQ_RECV = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_SRQ_RECV,
        /// Flushes.
        FLUSH = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_FLUSH,
        /// Atomic writes.
        ATOMIC_WRITE = ib_odp_transport_cap_bits_IB_ODP_SUPPORT_ATOMIC_WRITE,
    }
}

/// What a device can do with on-demand memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnDemandAttr {
    /// Regions of all of a process's memory.
    pub implicit: bool,
    /// Reliable connections.
    pub rc: OdpCaps,
    /// Unreliable connections.
    pub uc: OdpCaps,
    /// Datagrams.
    pub ud: OdpCaps,
    /// XRC.
    pub xrc: OdpCaps,
}

impl OnDemandAttr {
    pub(super) fn fill(&self, raw: &mut bindings::ib_device_attr) {
        let mut general = bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT;
        if self.implicit {
            general |= bindings::ib_odp_general_cap_bits_IB_ODP_SUPPORT_IMPLICIT;
        }
        raw.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_ON_DEMAND_PAGING);
        raw.odp_caps.general_caps = general.into();
        let services = &mut raw.odp_caps.per_transport_caps;
        services.rc_odp_caps = self.rc.as_raw();
        services.uc_odp_caps = self.uc.as_raw();
        services.ud_odp_caps = self.ud.as_raw();
        services.xrc_odp_caps = self.xrc.as_raw();
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_odp)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};

    /// A user of pages, told how often to let go of some, and that there are none.
    struct User {
        may_still_use: bool,
        told: Atomic<u32>,
        unused: Atomic<u32>,
    }

    impl PageUser for User {
        fn invalidate(&self, _addresses: Range<u64>) {
            self.told.fetch_add(1, Relaxed);
        }

        fn unused(&self) {
            self.unused.fetch_add(1, Relaxed);
        }

        fn may_still_use(&self) -> bool {
            self.may_still_use
        }
    }

    const START: u64 = 0x10_0000;
    const PAGES: usize = 200;

    /// What was done to pages, each by its word.
    struct Record {
        kept: RefCell<KVec<usize>>,
        unmapped: RefCell<KVec<usize>>,
    }

    impl Record {
        fn new() -> Self {
            Self {
                kept: RefCell::new(KVec::new()),
                unmapped: RefCell::new(KVec::new()),
            }
        }
    }

    impl LockedPages for Record {
        fn start(&self) -> u64 {
            START
        }

        fn keep(&self, word: usize) {
            let _ = self.kept.borrow_mut().push(word, GFP_KERNEL);
        }

        fn unmap(&self, mapped: &MappedPages, page: usize) {
            let word = mapped.word(page);
            let _ = self.unmapped.borrow_mut().push(word, GFP_KERNEL);
            write(mapped, page, 0);
        }
    }

    /// Notes something of a page.
    fn write(mapped: &MappedPages, page: usize, word: usize) {
        if let Some(noted) = mapped.words.get(page) {
            noted.store(word, Relaxed);
        }
    }

    /// The word of a page.
    fn word_of(page: usize) -> usize {
        0x1000 + page
    }

    fn map(mapped: &MappedPages, page: usize) {
        mapped.change(page, || write(mapped, page, word_of(page)));
    }

    fn mapping(may_still_use: bool, mapped: &[usize]) -> Result<KBox<Mapping<User>>> {
        let user = User {
            may_still_use,
            told: Atomic::new(0),
            unused: Atomic::new(0),
        };
        let mapping = Mapping::new(Arc::new(user, GFP_KERNEL)?, PAGES)?;
        for page in mapped {
            map(&mapping.mapped, *page);
        }
        Ok(mapping)
    }

    fn addresses(pages: Range<u64>) -> Range<u64> {
        START + (pages.start << PAGE_SHIFT)..START + (pages.end << PAGE_SHIFT)
    }

    #[test]
    fn mapped_pages_are_counted_once_and_found() -> Result {
        let mapped = MappedPages::new(PAGES)?;
        assert_eq!(mapped.first(0..PAGES), None);
        for _ in 0..2 {
            for page in [3, 62, 63, 64, 65, 199] {
                map(&mapped, page);
            }
            // There is no such page.
            map(&mapped, 256);
        }
        assert_eq!(mapped.count(), 6);
        assert_eq!(mapped.first(0..PAGES), Some(3));
        assert_eq!(mapped.first(4..PAGES), Some(62));
        assert_eq!(mapped.first(4..62), None);
        assert_eq!(mapped.first(66..199), None);
        assert_eq!(mapped.first(66..PAGES), Some(199));
        for _ in 0..2 {
            mapped.change(63, || write(&mapped, 63, 0));
        }
        assert_eq!(mapped.count(), 5);
        assert_eq!(mapped.first(63..PAGES), Some(64));
        Ok(())
    }

    #[test]
    fn a_late_reader_leaves_a_page_writable() -> Result {
        const DMA: u64 = 0x5000;
        let mapped = MappedPages::new(PAGES)?;
        let to_read = flag::VALID | 77;
        let to_write = to_read | flag::WRITE;
        let taken = |word| mapped.take_in(3, word, || Ok(DMA));
        assert_eq!(taken(to_read), Ok(Some((DMA, false))));
        assert_eq!(taken(to_write), Ok(Some((DMA, true))));
        // What this one was told is from before the page could be written.
        assert_eq!(taken(to_read), Ok(Some((DMA, true))));
        assert_eq!(mapped.count(), 1);
        // What held before the page was taken back does not hold any more.
        mapped.change(3, || write(&mapped, 3, 0));
        assert_eq!(taken(to_read), Ok(Some((DMA, false))));
        Ok(())
    }

    #[test]
    fn only_what_is_present_is_mapped() -> Result {
        let mapped = MappedPages::new(PAGES)?;
        let refuse = || -> Result<u64> { Err(EIO) };
        assert_eq!(mapped.take_in(3, flag::WRITE | 77, refuse), Ok(None));
        assert_eq!(
            mapped.take_in(3, flag::VALID | 77, || Ok(0))?,
            Some((0, false))
        );
        assert_eq!(mapped.take_in(PAGES, flag::VALID | 77, refuse), Err(EFAULT));
        assert_eq!(mapped.word(3), flag::VALID | 77);
        assert_eq!(mapped.count(), 1);
        Ok(())
    }

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

    #[test]
    fn pages_that_were_told_to_a_device_which_cannot_be_stopped_are_kept() -> Result {
        let mapping = mapping(true, &[3, 64, 65, 120])?;
        let record = Record::new();
        mapping.take_back(&record, addresses(0..100));
        // Those that were mapped, by what was noted then.
        let taken = [word_of(3), word_of(64), word_of(65)];
        assert_eq!(&record.kept.borrow()[..], &taken);
        assert_eq!(&record.unmapped.borrow()[..], &taken);
        assert_eq!(mapping.mapped.count(), 1);
        Ok(())
    }

    #[test]
    fn pages_are_taken_back_once_and_only_where_some_are_mapped() -> Result {
        let mapping = mapping(false, &[3, 64, 65])?;
        let record = Record::new();
        // Nothing is mapped there.
        mapping.take_back(&record, addresses(4..64));
        assert_eq!(mapping.user.told.load(Relaxed), 0);
        for _ in 0..2 {
            mapping.take_back(&record, addresses(0..PAGES as u64));
            assert_eq!(mapping.user.told.load(Relaxed), 1);
        }
        let taken = [word_of(3), word_of(64), word_of(65)];
        assert_eq!(&record.unmapped.borrow()[..], &taken);
        assert!(record.kept.borrow().is_empty());
        assert_eq!(mapping.mapped.count(), 0);
        // One that is told again counts again, once.
        map(&mapping.mapped, 3);
        map(&mapping.mapped, 3);
        mapping.take_back(&record, addresses(3..4));
        assert_eq!(mapping.mapped.count(), 0);
        Ok(())
    }

    #[test]
    fn a_user_is_told_when_nothing_is_mapped_any_more() -> Result {
        let mapping = mapping(false, &[3, 64])?;
        let record = Record::new();
        let unused = || mapping.user.unused.load(Relaxed);
        mapping.take_back(&record, addresses(0..10));
        assert_eq!(unused(), 0);
        mapping.take_back(&record, addresses(10..100));
        assert_eq!(unused(), 1);
        // That is no news.
        mapping.take_back(&record, addresses(0..PAGES as u64));
        assert_eq!(unused(), 1);
        Ok(())
    }
}
