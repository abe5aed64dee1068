// SPDX-License-Identifier: GPL-2.0

//! On-demand memory: memory of a process that is not pinned. Its pages are mapped for a device
//! when the device needs them, and taken back when the process or the kernel wants them.
//!
//! C header: [`include/rdma/ib_umem_odp.h`](srctree/include/rdma/ib_umem_odp.h).

use super::{Access, Device, Driver};
use crate::bindings;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::NonNull;
use kernel::error::{from_err_ptr, to_result};
use kernel::page::{PAGE_SHIFT, PAGE_SIZE};
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;

/// Whether the kernel has on-demand memory.
pub const ON_DEMAND_AVAILABLE: bool = cfg!(CONFIG_INFINIBAND_ON_DEMAND_PAGING);

/// Who uses the pages of on-demand memory: the part of a driver that tells its device of them.
pub trait PageUser: Send + Sync {
    /// The pages of these addresses of the process are taken back, of which some are mapped. When
    /// this returns, the device must not use them any more; the memory is locked against new
    /// mappings meanwhile.
    ///
    /// This is called when the kernel reclaims memory: it may sleep, but neither allocate memory
    /// that has to be reclaimed nor wait for somebody who does.
    fn invalidate(&self, addresses: Range<u64>);

    /// Whether the device may go on using pages although it was told not to: it does not answer and
    /// cannot be stopped. Pages that it was told of are never freed then.
    fn may_still_use(&self) -> bool {
        false
    }
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
        let (mut start, mut end) = (0, 0);
        // SAFETY: The kernel calls notifiers with what was registered: one that is part of an
        // `ib_umem_odp`, which is not freed before the notifier is removed. `start` and `end` are
        // locals.
        let odp = unsafe { bindings::rdma_odp_begin(notifier, range, seq, &mut start, &mut end) };
        if odp.is_null() {
            return false;
        }
        if start < end {
            // SAFETY: The range is not empty, so that the private pointer was set before: to a
            // `Mapping<T>` that lives until after the notifier is removed.
            let mapping = unsafe { &*bindings::rdma_odp_private(odp).cast::<Mapping<T>>() };
            // SAFETY: `odp` is valid while its notifier is called, and `rdma_odp_begin` has taken
            // `umem_mutex`.
            mapping.take_back(&unsafe { Locked::new(odp) }, start..end);
        }
        // SAFETY: `rdma_odp_begin` has taken `umem_mutex`.
        unsafe { bindings::rdma_odp_unlock(odp) };
        true
    }
}

/// Which pages of on-demand memory are mapped for the device, by their place in it.
///
/// The kernel notes that too, by flags in its list of pages. But who brings pages in writes that list
/// without the lock, so that a flag may be lost, or come back. What is noted here is changed only
/// with the memory locked, and decides.
struct MappedPages {
    pages: usize,
    words: KVVec<Atomic<u64>>,
    count: Atomic<usize>,
}

impl MappedPages {
    /// Of memory of so many pages, none of which is mapped.
    fn new(pages: usize) -> Result<Self> {
        let count = pages.div_ceil(Self::WORD);
        let mut words = KVVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            words.push(Atomic::new(0), GFP_KERNEL)?;
        }
        Ok(Self {
            pages,
            words,
            count: Atomic::new(0),
        })
    }

    /// Pages that a word tells of.
    const WORD: usize = u64::BITS as usize;

    fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    fn contains(&self, page: usize) -> bool {
        let word = self.words.get(page / Self::WORD);
        word.is_some_and(|word| word.load(Relaxed) & 1 << (page % Self::WORD) != 0)
    }

    /// Notes whether a page is mapped. The memory has to be locked.
    fn set(&self, page: usize, mapped: bool) {
        let Some(word) = self.words.get(page / Self::WORD) else {
            return;
        };
        if self.contains(page) == mapped {
            return;
        }
        word.store(word.load(Relaxed) ^ 1 << (page % Self::WORD), Relaxed);
        let count = self.count();
        let count = if mapped { count + 1 } else { count - 1 };
        self.count.store(count, Relaxed);
    }

    /// The first page from `from` on that is mapped, or that is not; the end where there is none.
    fn find(&self, from: usize, mapped: bool) -> usize {
        let mut page = from;
        while let Some(word) = self.words.get(page / Self::WORD) {
            let word = word.load(Relaxed);
            let found = if mapped { word } else { !word } >> (page % Self::WORD);
            if found != 0 {
                return (page + found.trailing_zeros() as usize).min(self.pages);
            }
            page = (page / Self::WORD + 1) * Self::WORD;
        }
        self.pages
    }

    /// The first of the mapped pages in a range that follow each other.
    fn first_run(&self, range: Range<usize>) -> Option<Range<usize>> {
        if self.count() == 0 {
            return None;
        }
        let start = self.find(range.start, true);
        let end = self.find(start, false).min(range.end);
        (start < end).then_some(start..end)
    }
}

/// On-demand memory as those see it who take its pages back: with `umem_mutex` held.
trait LockedPages {
    /// Address in the process of the first page.
    fn start(&self) -> u64;
    /// Keeps a page that is mapped from ever being freed.
    fn keep(&self, page: usize);
    /// Gives mapped pages back.
    fn unmap(&self, pages: Range<usize>);
}

/// Locked memory of the kernel's.
///
/// # Invariants
///
/// The pointer is valid, and `umem_mutex` held.
struct Locked(*mut bindings::ib_umem_odp);

impl Locked {
    /// # Safety
    ///
    /// `odp` must be valid and `umem_mutex` held for as long as the result is used.
    unsafe fn new(odp: *mut bindings::ib_umem_odp) -> Self {
        // INVARIANT: The caller vouches for both.
        Self(odp)
    }
}

impl LockedPages for Locked {
    fn start(&self) -> u64 {
        // SAFETY: Valid by the type invariant; addresses do not change.
        unsafe { bindings::rdma_odp_start(self.0) as u64 }
    }

    fn keep(&self, page: usize) {
        // SAFETY: Valid and locked by the type invariant; the helper checks the place.
        unsafe { bindings::rdma_odp_keep_page(self.0, page) }
    }

    fn unmap(&self, pages: Range<usize>) {
        // SAFETY: Valid and locked by the type invariant; the helper checks the places.
        unsafe { bindings::rdma_odp_unmap(self.0, pages.start, pages.end) }
    }
}

/// Who uses the pages of on-demand memory, and which of them.
struct Mapping<T> {
    user: Arc<T>,
    mapped: MappedPages,
}

impl<T: PageUser> Mapping<T> {
    /// Takes the pages of these addresses back from the device, and gives them back to the kernel.
    fn take_back(&self, memory: &impl LockedPages, addresses: Range<u64>) {
        let start = memory.start();
        let place = |address: u64| (address.saturating_sub(start) >> PAGE_SHIFT) as usize;
        let pages = place(addresses.start)..place(addresses.end + (PAGE_SIZE as u64 - 1));
        let Some(first) = self.mapped.first_run(pages.clone()) else {
            return;
        };
        let address = |page: usize| start + ((page as u64) << PAGE_SHIFT);
        self.user
            .invalidate(address(first.start)..address(pages.end));
        self.give_back(memory, first.start..pages.end);
    }

    /// Gives mapped pages back to the kernel, or keeps them for ever where the device may still use
    /// them.
    fn give_back(&self, memory: &impl LockedPages, pages: Range<usize>) {
        let keep = self.user.may_still_use();
        while let Some(run) = self.mapped.first_run(pages.clone()) {
            if keep {
                run.clone().for_each(|page| memory.keep(page));
            }
            memory.unmap(run.clone());
            run.for_each(|page| self.mapped.set(page, false));
        }
    }
}

/// On-demand memory of a process. Dropping it takes its pages back, which sleeps: the device must
/// not use them any more by then.
///
/// # Invariants
///
/// `raw` is on-demand memory that this value owns, whose private pointer is that of `mapping`.
pub struct OdpUmem<T: PageUser> {
    raw: NonNull<bindings::ib_umem_odp>,
    mapping: KBox<Mapping<T>>,
}

// SAFETY: On-demand memory belongs to no task: it holds the process's memory map itself. `T` is
// `Send` and `Sync`, as `PageUser` demands.
unsafe impl<T: PageUser> Send for OdpUmem<T> {}
// SAFETY: `map` may be called at once. All that changes does so with `umem_mutex` held, but for the
// words of `pfn_list`: bringing pages in reads and writes those without it, as it does for every user
// of `ib_umem_odp`. They are words of the C side, so that who writes one last decides what is in it.
// Which page it is is the same for all, or the sequence of the notifier says that something was
// invalidated, and it is brought in again. The flag that says that it is mapped may be lost or come
// back. What was told to the device, and so what is taken back from it and kept, is known from
// `mapped`, which is made of atomics; by that the flag is set right before the core looks at it. One
// that comes back between the two makes the mapping fail, as the address that is found is none or one
// of the page's own that leads nowhere; by one that is lost between the two a page stays mapped in an
// IOMMU that was taken back from the device.
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
        // SAFETY: By the type invariant the memory is ours; its addresses do not change.
        let (start, end) = unsafe {
            (
                bindings::rdma_odp_start(self.raw.as_ptr()),
                bindings::rdma_odp_end(self.raw.as_ptr()),
            )
        };
        start as u64..end as u64
    }

    /// Maps the pages of `length` bytes from `address` on, and calls `each` for every one that is
    /// present, with the memory locked: what `each` tells the device holds until
    /// [`PageUser::invalidate`] is called. `each` must not allocate. Sleeps.
    pub fn map(
        &self,
        address: u64,
        length: u64,
        how: BringIn,
        mut each: impl FnMut(MappedPage),
    ) -> Result {
        let raw = self.raw.as_ptr();
        let end = address.checked_add(length).ok_or(EFAULT)?;
        let write = how == BringIn::Write;
        let fault = how != BringIn::Present;
        // SAFETY: Valid by the type invariant; the range is checked by the callee.
        let pages = unsafe { bindings::rdma_odp_map_and_lock(raw, address, length, write, fault) };
        to_result(pages.min(0))?;
        let start = self.addresses().start;
        let mapped = &self.mapping.mapped;
        let mut result = Ok(());
        let mut page = address & !(PAGE_SIZE as u64 - 1);
        while page < end {
            let index = ((page - start) >> PAGE_SHIFT) as usize;
            let (mut dma, mut writable) = (0, false);
            let known = mapped.contains(index);
            // SAFETY: `rdma_odp_map_and_lock` has taken `umem_mutex`, and `index` lies in the range
            // that it mapped; the others are locals.
            match unsafe { bindings::rdma_odp_map_page(raw, index, known, &mut dma, &mut writable) }
            {
                0 => {}
                1 => {
                    mapped.set(index, true);
                    each(MappedPage {
                        address: page,
                        dma,
                        writable,
                    })
                }
                error => {
                    result = to_result(error);
                    break;
                }
            }
            page += PAGE_SIZE as u64;
        }
        // SAFETY: `rdma_odp_map_and_lock` has taken `umem_mutex`.
        unsafe { bindings::rdma_odp_unlock(raw) };
        result
    }
}

impl<T: PageUser> Drop for OdpUmem<T> {
    fn drop(&mut self) {
        let raw = self.raw.as_ptr();
        // SAFETY: By the type invariant the memory is ours; `umem_mutex` is taken before it is used
        // and given back after.
        unsafe {
            bindings::rdma_odp_lock(raw);
            self.mapping
                .give_back(&Locked::new(raw), 0..self.mapping.mapped.pages);
            bindings::rdma_odp_unlock(raw);
        }
        // SAFETY: Ours by the type invariant. The mapping lives until the notifier is
        // removed: it is dropped after this.
        unsafe { bindings::rdma_odp_release(raw) }
    }
}

/// All memory of a process, to make on-demand memory of parts of it later, from any task.
///
/// # Invariants
///
/// The pointer is a root that this value owns.
pub struct OdpRoot(NonNull<bindings::ib_umem_odp>);

// SAFETY: A root belongs to no task: it holds the process's memory map itself.
unsafe impl Send for OdpRoot {}
// SAFETY: A root is only read after it was made.
unsafe impl Sync for OdpRoot {}

impl OdpRoot {
    /// All memory of the current process.
    pub fn new<D: Driver>(dev: &Device<D>, access: Access) -> Result<Self> {
        let access = access.as_raw() & !Access::HUGETLB.as_raw();
        let dev = dev.as_raw();
        // SAFETY: `dev` comes from a reference to a device, which the root does not outlive.
        let root = unsafe { bindings::rdma_odp_alloc_root(dev, access as c_int) };
        let root = from_err_ptr(root)?;
        // INVARIANT: Made just now.
        NonNull::new(root).map(Self).ok_or(ENOMEM)
    }

    /// On-demand memory of `length` bytes from `address` on. Fails when the process is gone.
    pub fn part<T: PageUser>(&self, address: u64, length: u64, user: Arc<T>) -> Result<OdpUmem<T>> {
        let end = address.checked_add(length).ok_or(EOVERFLOW)?;
        let pages = end.div_ceil(PAGE_SIZE as u64) - address / PAGE_SIZE as u64;
        let mapped = MappedPages::new(usize::try_from(pages)?)?;
        let mapping = KBox::new(Mapping { user, mapped }, GFP_KERNEL)?;
        // SAFETY: The root is valid by the type invariant, and keeps the process's memory map.
        let raw = from_err_ptr(unsafe {
            bindings::rdma_odp_alloc_child(
                self.0.as_ptr(),
                usize::try_from(address)?,
                usize::try_from(length)?,
                &Notify::<T>::OPS,
            )
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        let private = core::ptr::from_ref(&*mapping).cast_mut().cast();
        // SAFETY: The memory was made just now; who is told of invalidations reads the pointer with
        // the mutex held, as it is written.
        unsafe { bindings::rdma_odp_set_private(raw.as_ptr(), private) };
        // INVARIANT: Made just now, and the pointer was set.
        Ok(OdpUmem { raw, mapping })
    }
}

impl Drop for OdpRoot {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the root is ours, and its children hold the memory map
        // themselves.
        unsafe { bindings::rdma_odp_release_root(self.0.as_ptr()) }
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
    /// Extended reliable connections.
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
    use core::cell::RefCell;

    /// A user of pages, told how often to let go of some.
    struct User {
        may_still_use: bool,
        told: Atomic<u32>,
    }

    impl PageUser for User {
        fn invalidate(&self, _addresses: Range<u64>) {
            self.told.fetch_add(1, Relaxed);
        }

        fn may_still_use(&self) -> bool {
            self.may_still_use
        }
    }

    const START: u64 = 0x10_0000;

    /// What was done to pages.
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

        fn keep(&self, page: usize) {
            let _ = self.kept.borrow_mut().push(page, GFP_KERNEL);
        }

        fn unmap(&self, pages: Range<usize>) {
            for page in pages {
                let _ = self.unmapped.borrow_mut().push(page, GFP_KERNEL);
            }
        }
    }

    fn mapping(may_still_use: bool, mapped: &[usize]) -> Result<Mapping<User>> {
        let user = User {
            may_still_use,
            told: Atomic::new(0),
        };
        let mapping = Mapping {
            user: Arc::new(user, GFP_KERNEL)?,
            mapped: MappedPages::new(200)?,
        };
        for page in mapped {
            mapping.mapped.set(*page, true);
        }
        Ok(mapping)
    }

    fn addresses(pages: Range<u64>) -> Range<u64> {
        START + (pages.start << PAGE_SHIFT)..START + (pages.end << PAGE_SHIFT)
    }

    #[test]
    fn mapped_pages_are_counted_once_and_found_in_runs() -> Result {
        let mapped = MappedPages::new(200)?;
        assert!(mapped.first_run(0..200).is_none());
        for _ in 0..2 {
            for page in [3, 62, 63, 64, 65, 199] {
                mapped.set(page, true);
            }
            // There is no such page.
            mapped.set(256, true);
        }
        assert_eq!(mapped.count(), 6);
        assert_eq!(mapped.first_run(0..200), Some(3..4));
        assert_eq!(mapped.first_run(4..200), Some(62..66));
        assert_eq!(mapped.first_run(4..64), Some(62..64));
        assert_eq!(mapped.first_run(66..199), None);
        assert_eq!(mapped.first_run(66..200), Some(199..200));
        for _ in 0..2 {
            mapped.set(63, false);
        }
        assert_eq!(mapped.count(), 5);
        assert_eq!(mapped.first_run(4..200), Some(62..63));
        Ok(())
    }

    #[test]
    fn pages_that_were_told_to_a_device_which_cannot_be_stopped_are_kept() -> Result {
        let mapping = mapping(true, &[3, 64, 65, 120])?;
        let record = Record::new();
        mapping.take_back(&record, addresses(0..100));
        assert_eq!(&record.kept.borrow()[..], &[3, 64, 65]);
        assert_eq!(&record.unmapped.borrow()[..], &[3, 64, 65]);
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
            mapping.take_back(&record, addresses(0..200));
            assert_eq!(mapping.user.told.load(Relaxed), 1);
        }
        assert_eq!(&record.unmapped.borrow()[..], &[3, 64, 65]);
        assert!(record.kept.borrow().is_empty());
        assert_eq!(mapping.mapped.count(), 0);
        // One that is told again counts again, once.
        mapping.mapped.set(3, true);
        mapping.mapped.set(3, true);
        mapping.take_back(&record, addresses(3..4));
        assert_eq!(mapping.mapped.count(), 0);
        Ok(())
    }
}
