// SPDX-License-Identifier: GPL-2.0

//! The tables that tell the device which pages of an on-demand region are there.

use super::{
    Account,
    Charge,
    PAGE, //
};
use crate::{
    abi,
    abi::{
        InvalidatePages,
        ATT_TABLE_ENTRIES, //
    },
    hardware::Hardware,
    kernel_ext::{
        memcg::MemoryGroup,
        table::{
            new_irq_xarray,
            IrqXArray, //
        },
    },
    lent::{
        Lent,
        Reach, //
    },
    rdma::{
        MappedPage,
        PageUser, //
    },
};
use core::ops::Range;
use kernel::{
    device::{
        Bound,
        Device as ParentDevice, //
    },
    dma::Coherent,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        Arc,
        Mutex, //
    },
};

pub(super) const TABLE_BITS: u32 = ATT_TABLE_ENTRIES.ilog2();
/// Tables of a region at the most: 128 GiB in use at once, in one piece.
const MOST_TABLES: usize = 1 << 16;

/// A table of a region: of pages, or of tables.
pub(super) struct OdpTable {
    entries: Lent<Coherent<[u64]>>,
    _charge: Charge,
}

impl OdpTable {
    pub(super) fn new(
        parent: &ParentDevice<Bound>,
        hw: &Hardware,
        account: &Account,
    ) -> Result<Arc<Self>> {
        let charge = account.charge((ATT_TABLE_ENTRIES * size_of::<u64>()) as u64)?;
        let table = Coherent::zeroed_slice(parent, ATT_TABLE_ENTRIES, GFP_KERNEL_ACCOUNT)?;
        let table = Lent::new(&hw.reach, table);
        // No command tells the device of a table: that would be refused.
        if hw.is_dead() {
            return Err(EIO);
        }
        let table = Self {
            entries: table,
            _charge: charge,
        };
        Ok(Arc::new(table, GFP_KERNEL_ACCOUNT)?)
    }

    fn dma_address(&self) -> u64 {
        self.entries.dma_handle()
    }

    fn set(&self, index: usize, entry: u64) -> Result {
        kernel::dma_write!(self.entries, [try: index], entry);
        Ok(())
    }

    /// Whether there is an entry.
    fn has(&self, index: usize) -> Result<bool> {
        let entry = kernel::dma_read!(self.entries, [try: index]);
        Ok(entry & abi::ON_DEMAND_PRESENT != 0)
    }

    /// Whether there is no entry at all.
    fn is_empty(&self) -> Result<bool> {
        for index in 0..ATT_TABLE_ENTRIES {
            if self.has(index)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Clears an entry; returns whether there was one.
    fn clear(&self, index: usize) -> Result<bool> {
        let was_set = self.has(index)?;
        if was_set {
            self.set(index, 0)?;
        }
        Ok(was_set)
    }
}

/// Where the table of `level` that leads to page `page` is found.
const fn table_key(level: u8, page: u64) -> usize {
    // A page number has at most 36 bits.
    ((level as u64) << 40 | page >> ((level as u32 + 1) * TABLE_BITS)) as usize
}

/// The place in the table of `level` that leads to page `page`.
const fn table_index(level: u8, page: u64) -> usize {
    (page >> (level as u32 * TABLE_BITS)) as usize & (ATT_TABLE_ENTRIES - 1)
}

/// The pages that the table of `level` that leads to page `page` leads to.
const fn reach_of(level: u8, page: u64) -> Range<u64> {
    let pages = 1u64 << ((level as u32 + 1) * TABLE_BITS);
    let first = page & !(pages - 1);
    first..first + pages
}

/// How the tables of a region name each other.
trait Links {
    /// Whether there is this table, and no entry in it.
    fn is_empty(&self, level: u8, page: u64) -> bool;
    /// Whether the table is named by the one above it.
    fn is_linked(&self, level: u8, page: u64) -> bool;
    /// Clears the entry that names it.
    fn unlink(&self, level: u8, page: u64);

    /// Unlinks the table of `level` that leads to a page if it leads nowhere, and so those above it,
    /// but for the root of `levels`. Returns what pages the highest one led to.
    fn unlink_empty(&self, levels: u8, level: u8, page: u64) -> Option<Range<u64>> {
        let mut reach = None;
        for level in level..levels - 1 {
            if !self.is_empty(level, page) {
                break;
            }
            self.unlink(level, page);
            reach = Some(reach_of(level, page));
        }
        reach
    }
}

/// Joins ranges that overlap or follow each other.
struct Joined(Option<Range<u64>>);

impl Joined {
    /// Adds a range; returns what it cannot be joined to.
    fn add(&mut self, next: Range<u64>) -> Option<Range<u64>> {
        let last = self.0.take();
        match last {
            Some(last) if next.start <= last.end && last.start <= next.end => {
                self.0 = Some(last.start.min(next.start)..last.end.max(next.end));
                None
            }
            last => {
                self.0 = Some(next);
                last
            }
        }
    }
}

/// Whether there may be unused parts of a region that nobody has looked for yet.
pub(super) struct UnusedParts {
    /// How often a part became unused.
    pub(super) times: Atomic<u64>,
    /// How often that was when all parts had been looked at, and none was unused.
    pub(super) known: Atomic<u64>,
}

impl UnusedParts {
    const fn new() -> Self {
        Self {
            times: Atomic::new(0),
            known: Atomic::new(0),
        }
    }

    /// A part is unused from now on.
    pub(super) fn note(&self) {
        self.times.fetch_add(1, Release);
    }

    pub(super) fn is_news(&self) -> bool {
        self.times.load(Acquire) != self.known.load(Relaxed)
    }
}

/// What the device knows of the pages of a region.
#[pin_data]
pub(super) struct OdpTables {
    hw: Arc<Hardware>,
    tag: u32,
    /// Address in the process of the first page.
    pub(super) base: u64,
    /// How many pages there are.
    pages: u64,
    pub(super) levels: u8,
    /// Who pays for the tables, whoever needs them.
    payer: MemoryGroup,
    /// Whose share tables and parts count against.
    pub(super) account: Account,
    /// All tables, by [`table_key`]. Those of level 0 hold pages.
    #[pin]
    tables: IrqXArray<Arc<OdpTable>>,
    /// How many there are. Locked while tables are made or given back, never where pages are told
    /// or taken back.
    #[pin]
    count: Mutex<usize>,
    pub(super) unused: UnusedParts,
    pub(super) faults: Atomic<u64>,
    invalidations: Atomic<u64>,
    pub(super) prefetches: Atomic<u64>,
}

impl OdpTables {
    pub(super) fn new(
        root: Arc<OdpTable>,
        hw: &Arc<Hardware>,
        tag: u32,
        base: u64,
        pages: u64,
        account: Account,
    ) -> Result<Arc<Self>> {
        let levels = abi::on_demand_levels(pages).ok_or(EFBIG)?;
        let tables = Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                tag,
                base,
                pages,
                levels,
                payer: MemoryGroup::of_current(),
                account,
                tables <- new_irq_xarray!("ferrite_odp_tables"),
                count <- new_mutex!(1, "ferrite_page_tables"),
                unused: UnusedParts::new(),
                faults: Atomic::new(0),
                invalidations: Atomic::new(0),
                prefetches: Atomic::new(0),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        tables.tables.insert(table_key(levels - 1, 0), root)?;
        Ok(tables)
    }

    /// DMA address of the table that leads to all others.
    pub(super) fn root(&self) -> Result<u64> {
        let key = table_key(self.levels - 1, 0);
        let root = self.tables.with(key, |table| table.dma_address());
        root.ok_or(EINVAL)
    }

    /// The number of the page at an address of the process.
    pub(super) fn page_of(&self, address: u64) -> u64 {
        address.saturating_sub(self.base) / PAGE
    }

    /// Makes the tables for these pages; returns those that were not there before, by level and
    /// page, the lower ones later. Sleeps.
    pub(super) fn grow(
        &self,
        parent: &ParentDevice<Bound>,
        pages: Range<u64>,
    ) -> Result<KVec<(u8, u64)>> {
        let mut made = KVec::new();
        let grown = self
            .payer
            .charge(|| self.grow_noting(parent, pages, &mut made));
        match grown {
            Ok(()) => Ok(made),
            Err(error) => {
                self.undo(&made);
                Err(error)
            }
        }
    }

    fn grow_noting(
        &self,
        parent: &ParentDevice<Bound>,
        pages: Range<u64>,
        made: &mut KVec<(u8, u64)>,
    ) -> Result {
        let mut count = self.count.lock();
        let mut page = pages.start;
        while page < pages.end {
            let mut above = self.levels - 1;
            while above > 0 {
                let level = above - 1;
                let key = table_key(level, page);
                if self.tables.with(key, |_| ()).is_none() {
                    if *count >= MOST_TABLES {
                        return Err(ENOMEM);
                    }
                    made.reserve(1, GFP_KERNEL_ACCOUNT)?;
                    let table = OdpTable::new(parent, &self.hw, &self.account)?;
                    let entry = table.dma_address() | abi::ON_DEMAND_PRESENT;
                    self.tables.insert(key, table)?;
                    *count += 1;
                    made.push((level, page), GFP_KERNEL_ACCOUNT)?;
                    let linked = self.tables.with(table_key(above, page), |parent| {
                        parent.set(table_index(above, page), entry)
                    });
                    linked.ok_or(EINVAL)??;
                }
                above = level;
            }
            // The first page of the next table.
            page = (page | (ATT_TABLE_ENTRIES as u64 - 1)) + 1;
        }
        Ok(())
    }

    /// Gives back tables that [`OdpTables::grow`] made for nothing, those excepted that somebody
    /// else has put to use. Sleeps.
    pub(super) fn undo(&self, made: &[(u8, u64)]) {
        let mut count = self.count.lock();
        // From the pages up: a table is empty when those below it are gone. A page that was told
        // meanwhile faults once more; nobody finds it to take it back.
        let made = made.iter().rev().copied();
        let unlinked = made
            .clone()
            .filter_map(|(level, page)| self.unlink_empty(self.levels, level, page));
        self.forget(unlinked);
        for (level, page) in made {
            self.remove_unlinked(level, page, &mut count);
        }
    }

    /// Gives back the tables of these parts, of which hardly any page is present: those fault once
    /// more. Sleeps.
    pub(super) fn shrink(&self, parts: impl Iterator<Item = Range<u64>> + Clone) {
        if self.levels < 2 {
            return;
        }
        let mut count = self.count.lock();
        let leaves = |pages: Range<u64>| pages.step_by(ATT_TABLE_ENTRIES);
        let unlinked = parts.clone().map(|pages| {
            leaves(pages.clone()).for_each(|page| self.unlink(0, page));
            // They have the table above them in common.
            self.unlink_empty(self.levels, 1, pages.start)
                .unwrap_or(pages)
        });
        // Until the device has let go of them, they are still found by those who take pages back.
        self.forget(unlinked);
        for page in parts.flat_map(leaves) {
            self.remove_unlinked(0, page, &mut count);
        }
    }

    /// Makes the device use tables no more that led to these pages, and were unlinked when `unlinked`
    /// says so: it may be looking at them. Sleeps.
    fn forget(&self, unlinked: impl Iterator<Item = Range<u64>>) {
        let forget = |pages: Range<u64>| {
            let command = InvalidatePages {
                tag: self.tag,
                reserved: 0,
                first: pages.start,
                count: pages.end.min(self.pages) - pages.start,
            };
            // Also where a worker does it: the kernel's turn is for what is nobody's.
            self.hw.forget_pages(self.account.user, &command)
        };
        let mut joined = Joined(None);
        for pages in unlinked {
            joined.add(pages).into_iter().for_each(forget);
        }
        joined.0.into_iter().for_each(forget);
    }

    /// Frees the table of `level` that leads to a page, and those above it, as far as they are not
    /// linked.
    fn remove_unlinked(&self, level: u8, page: u64, count: &mut usize) {
        for level in level..self.levels - 1 {
            if self.is_linked(level, page) {
                break;
            }
            if self.tables.remove(table_key(level, page)).is_some() {
                *count -= 1;
            }
        }
    }

    /// Tells the device of a page. One whose table is not there (any more) faults once more.
    pub(super) fn set(&self, page: &MappedPage) {
        let number = self.page_of(page.address);
        let mut entry = page.dma | abi::ON_DEMAND_PRESENT;
        if page.writable {
            entry |= abi::ON_DEMAND_WRITE;
        }
        let _ = self.tables.with(table_key(0, number), |table| {
            table.set(table_index(0, number), entry)
        });
    }

    /// Faults, pages taken back, and pages brought in on advice.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        (
            self.faults.load(Relaxed),
            self.invalidations.load(Relaxed),
            self.prefetches.load(Relaxed),
        )
    }

    /// How many bytes the region has, in whole pages.
    pub(super) fn length(&self) -> u64 {
        self.pages * PAGE
    }
}

impl Links for OdpTables {
    fn is_empty(&self, level: u8, page: u64) -> bool {
        let empty = self
            .tables
            .with(table_key(level, page), |table| table.is_empty());
        matches!(empty, Some(Ok(true)))
    }

    fn is_linked(&self, level: u8, page: u64) -> bool {
        let above = level + 1;
        let linked = self.tables.with(table_key(above, page), |table| {
            table.has(table_index(above, page))
        });
        matches!(linked, Some(Ok(true)))
    }

    fn unlink(&self, level: u8, page: u64) {
        let above = level + 1;
        // There is nothing to clear where there is no table.
        let _ = self.tables.with(table_key(above, page), |table| {
            table.set(table_index(above, page), 0)
        });
    }
}

impl PageUser for OdpTables {
    fn unused(&self) {
        self.unused.note();
    }

    fn may_still_use(&self) -> bool {
        self.hw.reach.get() == Reach::Unstoppable
    }

    fn invalidate(&self, addresses: Range<u64>) {
        let first = self.page_of(addresses.start);
        let end = self.page_of(addresses.end + (PAGE - 1));
        let mut cleared = 0;
        let mut page = first;
        while page < end {
            // As far as this table reaches.
            let next = ((page | (ATT_TABLE_ENTRIES as u64 - 1)) + 1).min(end);
            self.tables.with(table_key(0, page), |table| {
                for page in page..next {
                    if matches!(table.clear(table_index(0, page)), Ok(true)) {
                        cleared += 1;
                    }
                }
            });
            page = next;
        }
        if cleared > 0 {
            self.invalidations.fetch_add(cleared, Relaxed);
            self.hw.take_pages_back(&InvalidatePages {
                tag: self.tag,
                reserved: 0,
                first,
                count: end - first,
            });
        }
    }
}

#[kunit_tests(ferrite_odp_tables)]
mod tests {
    use super::*;
    use kernel::rbtree::RBTree;

    #[test]
    fn tables_are_found_by_level_and_page() {
        assert_eq!(table_key(0, 0), table_key(0, 511));
        assert!(table_key(0, 511) != table_key(0, 512));
        assert!(table_key(0, 0) != table_key(1, 0));
        assert_eq!(table_key(1, 0), table_key(1, 512 * 512 - 1));
        assert!(table_key(1, 0) != table_key(1, 512 * 512));
        assert_eq!(table_index(0, 513), 1);
        assert_eq!(table_index(1, 513), 1);
        assert_eq!(table_index(1, 512 * 512 + 1), 0);
        assert_eq!(table_index(2, 512 * 512 + 1), 1);
        // The last page there can be.
        let last = (abi::ON_DEMAND_MAX_LENGTH >> abi::ON_DEMAND_PAGE_SHIFT) - 1;
        for level in 0..abi::ON_DEMAND_MAX_LEVELS {
            assert_eq!(table_index(level, last), ATT_TABLE_ENTRIES - 1);
        }
        assert_eq!(table_key(3, last), table_key(3, 0));
    }

    #[test]
    fn a_table_leads_to_the_pages_that_are_found_by_it() {
        for page in [0, 511, 512, 512 * 512 - 1, 512 * 512 + 7] {
            for level in 0..abi::ON_DEMAND_MAX_LEVELS {
                let reach = reach_of(level, page);
                assert!(reach.contains(&page));
                assert_eq!(reach.end - reach.start, 512u64.pow(level as u32 + 1));
                assert_eq!(table_key(level, reach.start), table_key(level, page));
                assert_eq!(table_key(level, reach.end - 1), table_key(level, page));
                assert!(table_key(level, reach.end) != table_key(level, page));
            }
        }
    }

    #[test]
    fn ranges_that_follow_each_other_are_told_to_the_device_at_once() {
        let mut joined = Joined(None);
        assert_eq!(joined.add(0..10), None);
        assert_eq!(joined.add(10..20), None);
        // A gap.
        assert_eq!(joined.add(30..40), Some(0..20));
        assert_eq!(joined.add(40..50), None);
        // A table that leads to more.
        assert_eq!(joined.add(0..512), None);
        assert_eq!(joined.add(100..110), None);
        // What comes before.
        assert_eq!(joined.add(600..610), Some(0..512));
        assert_eq!(joined.add(590..600), None);
        assert_eq!(joined.0, Some(590..610));
    }

    /// Entries of tables, each by the level and number of the table that it names.
    struct FakeLinks(core::cell::RefCell<RBTree<(u8, u64), ()>>);

    impl FakeLinks {
        /// The key of the entry that names a table, or of level 0 one of a page.
        fn name(level: u8, page: u64) -> (u8, u64) {
            (level, page >> (u32::from(level + 1) * TABLE_BITS))
        }

        fn link(&self, levels: u8, page: u64) -> Result {
            for level in 0..levels - 1 {
                let mut entries = self.0.borrow_mut();
                entries.try_create_and_insert(Self::name(level, page), (), GFP_KERNEL)?;
            }
            Ok(())
        }

        fn count(&self) -> usize {
            self.0.borrow().iter().count()
        }
    }

    impl Links for FakeLinks {
        fn is_empty(&self, level: u8, page: u64) -> bool {
            let reach = reach_of(level, page);
            let entries = self.0.borrow();
            let mut below = entries.keys().filter(|(of, number)| {
                *of + 1 == level && reach.contains(&(number << (u32::from(*of + 1) * TABLE_BITS)))
            });
            below.next().is_none()
        }

        fn is_linked(&self, level: u8, page: u64) -> bool {
            self.0.borrow().get(&Self::name(level, page)).is_some()
        }

        fn unlink(&self, level: u8, page: u64) {
            self.0.borrow_mut().remove(&Self::name(level, page));
        }
    }

    #[test]
    fn tables_that_lead_nowhere_are_given_back_up_to_the_root() -> Result {
        let levels = abi::ON_DEMAND_MAX_LEVELS;
        let links = FakeLinks(core::cell::RefCell::new(RBTree::new()));
        // Two in the same gigabyte, and one far away.
        let (one, near, far) = (5 << 18, (5 << 18) + 512, 7 << 27);
        for page in [one, near, far] {
            links.link(levels, page)?;
        }
        assert_eq!(links.count(), 3 + 2 + 2);
        links.unlink(0, one);
        assert_eq!(links.unlink_empty(levels, 1, one), None);
        links.unlink(0, near);
        // All up to the root, with every page that they led to.
        let reach = links.unlink_empty(levels, 1, near);
        assert_eq!(reach, Some(reach_of(levels - 2, near)));
        assert_eq!(links.count(), 3);
        assert!(links.is_linked(2, far));
        links.unlink(0, far);
        assert_eq!(
            links.unlink_empty(levels, 1, far),
            Some(reach_of(levels - 2, far))
        );
        assert_eq!(links.count(), 0);
        Ok(())
    }

    #[test]
    fn what_became_unused_is_looked_for_once() {
        let unused = UnusedParts::new();
        assert!(!unused.is_news());
        unused.note();
        let times = unused.times.load(Acquire);
        unused.note();
        // All were looked at after the first.
        unused.known.store(times, Relaxed);
        assert!(unused.is_news());
        unused.known.store(unused.times.load(Acquire), Relaxed);
        assert!(!unused.is_news());
    }

    #[test]
    fn levels_grow_with_the_pages() {
        assert_eq!(abi::on_demand_levels(1), Some(1));
        assert_eq!(abi::on_demand_levels(512), Some(1));
        assert_eq!(abi::on_demand_levels(513), Some(2));
        assert_eq!(abi::on_demand_levels(1 << 36), Some(4));
        assert_eq!(abi::on_demand_levels((1 << 36) + 1), None);
    }
}
