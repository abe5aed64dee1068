// SPDX-License-Identifier: GPL-2.0

//! On-demand paging (ODP): memory of a process that is not pinned. Its pages are mapped for a device
//! when the device needs them, and taken back when the process or the kernel wants them.
//!
//! C header: [`include/rdma/ib_umem_odp.h`](srctree/include/rdma/ib_umem_odp.h).

mod caps;
mod mapped;
mod umem;

pub use self::caps::{Advice, AdvisedRange, OdpCaps, OnDemandAttr};
pub use self::mapped::ON_DEMAND_BYTES_PER_PAGE;
use self::mapped::{flag, Mapping};
pub use self::umem::OdpUmem;
use self::umem::{Locked, Notify};
use super::hold::Hold;
use super::{Access, Device, Driver};
use crate::bindings;
#[cfg(not(CONFIG_INFINIBAND_ON_DEMAND_PAGING))]
use absent as core_odp;
#[cfg(CONFIG_INFINIBAND_ON_DEMAND_PAGING)]
use bindings as core_odp;
use core::ops::Range;
use core::ptr::{self, NonNull};
use kernel::error::from_err_ptr;
use kernel::mm::Mm;
use kernel::page::PAGE_SIZE;
use kernel::prelude::*;
use kernel::sync::aref::ARef;
use kernel::sync::Arc;

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

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_odp)]
mod tests {
    use super::mapped::{LockedPages, MappedPages};
    use super::*;
    use core::cell::RefCell;
    use kernel::page::PAGE_SHIFT;
    use kernel::sync::atomic::{Atomic, Relaxed};

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
