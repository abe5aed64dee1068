// SPDX-License-Identifier: GPL-2.0

//! On-demand regions: the tables that tell the device which pages are there, and the faults of
//! those that are not (chapter 4 of the device specification).
//!
//! A page is told to the device with the memory locked against invalidation, and taken back from
//! it in the invalidation, which does not return before the device has let go. Nothing on that way
//! allocates memory: tables are made before, and given back when the region ends.
//!
//! What the kernel notes of each page takes memory too, and for as many pages as a region could have,
//! not as it has. So regions are made of parts, of which there are those that are in use, and both are
//! counted by user.

use crate::{
    abi,
    abi::{
        Buffer,
        InvalidatePages,
        PageFault,
        PageFaults,
        ResolveFault,
        ATT_TABLE_ENTRIES, //
    },
    device::Ferrite,
    dma_types::Nothing,
    hardware::Hardware,
    kernel_ext::{
        errno,
        memcg::MemoryGroup,
        table::{
            new_irq_table,
            IrqTable, //
        },
        user,
        workqueue::OwnedQueue, //
    },
    lent::{
        Lent,
        Reach, //
    },
    rdma::{
        Access,
        Advice,
        AdvisedRange,
        BringIn,
        Device,
        MappedPage,
        Mr,
        MrRef,
        OdpRoot,
        OdpUmem,
        PageUser,
        Pd,
        UserRegion,
        ON_DEMAND_BYTES_PER_PAGE, //
    },
    shares::Shares,
};
use core::ops::Range;
use kernel::{
    device::{
        Bound,
        Device as ParentDevice, //
    },
    dma::Coherent,
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
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
    workqueue::{
        impl_has_work,
        new_work,
        RawWorkItem,
        Work,
        WorkItem, //
    },
};

const PAGE: u64 = 1 << abi::ON_DEMAND_PAGE_SHIFT;
const TABLE_BITS: u32 = ATT_TABLE_ENTRIES.ilog2();
// The device's pages are the system's.
const _: () = assert!(PAGE == PAGE_SIZE as u64);
// The tables of a part's pages are named by one table.
const _: () = assert!((1u64 << (2 * TABLE_BITS)) % (PART / PAGE) == 0);

/// Bytes of a region that are looked after together.
const PART: u64 = 32 << 20;
/// Parts of a region that are kept although nothing of them is mapped.
const SPARE_PARTS: usize = 64;
/// Parts that are looked at in one go for those of which nothing is mapped: few enough not to keep up
/// who needs a part.
const PARTS_AT_ONCE: usize = 32;
/// With how many new parts that is done: less than are looked at, so that all are in the end; and some,
/// so that neighbours are given back together.
const PARTS_BETWEEN: usize = PARTS_AT_ONCE / 2;
/// Regions that are looked at in one go for those that have such parts.
const REGIONS_AT_ONCE: usize = 256;
/// How often at the most unused parts are given back for who needs memory: others may be faster to
/// take what was given back.
const MOST_TRIES: usize = 16;
/// Which part of memory goes to paging for all users together, but for those who may exceed limits.
const PAGING_SHARE: u64 = 8;
/// Tables of a region at the most: 128 GiB in use at once, in one piece.
const MOST_TABLES: usize = 1 << 16;
/// Bytes brought in for one fault at the most.
const MOST_PER_FAULT: u64 = 1 << 20;
/// Bytes brought in at once for an advice.
const MOST_AT_ONCE: u64 = 4 << 20;
/// Faults of a user that are dealt with at once, at the most; further ones of his wait for those. A
/// small part of what a workqueue does at once: a page may take as long as its owner likes.
const MOST_FAULTS: usize = 32;
/// Faults of a user that wait, at the most, whatever number of queue pairs the device says it has.
const MOST_PARKED: usize = 1 << 16;
/// Advices of a user that are followed later, at the most; who gives more of them follows them
/// himself.
const MOST_ADVICES: u32 = 64;

/// Memory of the kernel's that on-demand regions of a device take, by user.
#[pin_data]
pub(crate) struct PagingMemory {
    #[pin]
    shares: Mutex<Shares>,
    /// The regions that take it, by user and number.
    #[pin]
    regions: Mutex<RBTree<(u64, u64), Arc<Region>>>,
    next_number: Atomic<u64>,
}

impl PagingMemory {
    /// For a machine with so many bytes of memory.
    pub(crate) fn new(machine: u64) -> Result<Arc<Self>> {
        let memory = pin_init!(Self {
            shares <- new_mutex!(Shares::new(machine / PAGING_SHARE), "ferrite_paging_memory"),
            regions <- new_mutex!(RBTree::new(), "ferrite_paging_regions"),
            next_number: Atomic::new(0),
        });
        Arc::pin_init(memory, GFP_KERNEL)
    }

    /// The first region of a user, from that number on, that may have unused parts.
    fn next_with_unused(&self, user: u64, from: u64) -> Option<(u64, Arc<Region>)> {
        let mut from = from;
        loop {
            let mut regions = self.regions.lock();
            let mut cursor = regions.cursor_lower_bound_mut(&(user, from));
            for _ in 0..REGIONS_AT_ONCE {
                let current = cursor?;
                let ((of, number), region) = current.current();
                if *of != user {
                    return None;
                }
                if region.tables.unused.is_news() {
                    return Some((*number, region.clone()));
                }
                from = number + 1;
                cursor = current.move_next();
            }
        }
    }

    /// Gives back unused parts of a user's regions, from that number on, until some were; returns
    /// whether. Sleeps.
    fn give_back_some(&self, user: u64, from: &mut u64) -> bool {
        while let Some((number, region)) = self.next_with_unused(user, *from) {
            *from = number;
            if region.give_back_some() {
                return true;
            }
            *from = number + 1;
        }
        false
    }
}

/// Whose share the memory of a region comes from; nobody's, where its owner may exceed limits.
struct Account {
    memory: Arc<PagingMemory>,
    user: u64,
    bound: bool,
}

impl Account {
    /// That of the current process.
    fn of_current(memory: &Arc<PagingMemory>) -> Self {
        Self {
            memory: memory.clone(),
            user: user::accountable(),
            bound: !user::may_exceed_limits_noaudit(),
        }
    }

    /// Counts so many bytes until the result is dropped; `ENOMEM` where that is too much. Sleeps.
    fn charge(&self, bytes: u64) -> Result<Charge> {
        let bytes = if self.bound { bytes } else { 0 };
        if bytes > 0 {
            self.memory.shares.lock().take(self.user, bytes)?;
        }
        Ok(Charge {
            memory: self.memory.clone(),
            user: self.user,
            bytes,
        })
    }

    /// Does what takes memory. Where there is not enough, unused parts are given back for it: of `own`,
    /// the region that it is for, and of the user's others. Sleeps.
    fn make_room<T>(&self, own: Option<&Region>, attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut from = 0;
        try_with_room(attempt, || {
            own.is_some_and(Region::give_back_some)
                || self.memory.give_back_some(self.user, &mut from)
        })
    }
}

/// Calls `attempt`, and again when it lacked memory and `give_back` was called, which returns whether
/// it found something to give back.
fn try_with_room<T>(
    mut attempt: impl FnMut() -> Result<T>,
    mut give_back: impl FnMut() -> bool,
) -> Result<T> {
    let mut result = attempt();
    for _ in 0..MOST_TRIES {
        if !matches!(result, Err(error) if error == ENOMEM) {
            break;
        }
        let more = give_back();
        // Also if there was nothing: then somebody else may just have given it back.
        result = attempt();
        if !more {
            break;
        }
    }
    result
}

/// Memory that is counted; dropping it sleeps.
struct Charge {
    memory: Arc<PagingMemory>,
    user: u64,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.shares.lock().give_back(self.user, self.bytes);
        }
    }
}

/// A table of a region: of pages, or of tables.
struct Table {
    entries: Lent<Coherent<[u64]>>,
    _charge: Charge,
}

impl Table {
    fn new(parent: &ParentDevice<Bound>, hw: &Hardware, account: &Account) -> Result<Arc<Self>> {
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
struct UnusedParts {
    /// How often a part became unused.
    times: Atomic<u64>,
    /// How often that was when all parts had been looked at, and none was unused.
    known: Atomic<u64>,
}

impl UnusedParts {
    const fn new() -> Self {
        Self {
            times: Atomic::new(0),
            known: Atomic::new(0),
        }
    }

    /// A part is unused from now on.
    fn note(&self) {
        self.times.fetch_add(1, Release);
    }

    fn is_news(&self) -> bool {
        self.times.load(Acquire) != self.known.load(Relaxed)
    }
}

/// What the device knows of the pages of a region.
#[pin_data]
pub(crate) struct PageTables {
    hw: Arc<Hardware>,
    tag: u32,
    /// Address in the process of the first page.
    base: u64,
    /// How many pages there are.
    pages: u64,
    levels: u8,
    /// Who pays for the tables, whoever needs them.
    payer: MemoryGroup,
    /// Whose share tables and parts count against.
    account: Account,
    /// All tables, by [`table_key`]. Those of level 0 hold pages.
    #[pin]
    tables: IrqTable<Arc<Table>>,
    /// How many there are. Locked while tables are made or given back, never where pages are told
    /// or taken back.
    #[pin]
    count: Mutex<usize>,
    unused: UnusedParts,
    faults: Atomic<u64>,
    invalidations: Atomic<u64>,
    prefetches: Atomic<u64>,
}

impl PageTables {
    fn new(
        root: Arc<Table>,
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
                tables <- new_irq_table!("ferrite_odp_tables"),
                count <- new_mutex!(1, "ferrite_page_tables"),
                unused: UnusedParts::new(),
                faults: Atomic::new(0),
                invalidations: Atomic::new(0),
                prefetches: Atomic::new(0),
            }),
            GFP_KERNEL,
        )?;
        tables.tables.insert(table_key(levels - 1, 0), root)?;
        Ok(tables)
    }

    /// DMA address of the table that leads to all others.
    fn root(&self) -> Result<u64> {
        let key = table_key(self.levels - 1, 0);
        let root = self.tables.with(key, |table| table.dma_address());
        root.ok_or(EINVAL)
    }

    /// The number of the page at an address of the process.
    fn page_of(&self, address: u64) -> u64 {
        address.saturating_sub(self.base) / PAGE
    }

    /// Makes the tables for these pages; returns those that were not there before, by level and
    /// page, the lower ones later. Sleeps.
    fn grow(&self, parent: &ParentDevice<Bound>, pages: Range<u64>) -> Result<KVec<(u8, u64)>> {
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
                    let table = Table::new(parent, &self.hw, &self.account)?;
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

    /// Gives back tables that [`PageTables::grow`] made for nothing, those excepted that somebody
    /// else has put to use. Sleeps.
    fn undo(&self, made: &[(u8, u64)]) {
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
    fn shrink(&self, parts: impl Iterator<Item = Range<u64>> + Clone) {
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
    fn set(&self, page: &MappedPage) {
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
    fn counts(&self) -> (u64, u64, u64) {
        (
            self.faults.load(Relaxed),
            self.invalidations.load(Relaxed),
            self.prefetches.load(Relaxed),
        )
    }

    /// How many bytes the region has, in whole pages.
    fn length(&self) -> u64 {
        self.pages * PAGE
    }
}

impl Links for PageTables {
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

impl PageUser for PageTables {
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

/// A part of a region.
struct Part {
    umem: OdpUmem<PageTables>,
    /// How many map pages of it now; taken with the tree locked.
    users: Atomic<u32>,
    _charge: Charge,
}

/// What may be unused.
trait MayBeUnused {
    /// Whether it is, while nobody can begin to use it.
    fn is_unused(&self) -> bool;
}

impl MayBeUnused for Part {
    fn is_unused(&self) -> bool {
        self.users.load(Acquire) == 0 && self.umem.mapped() == 0
    }
}

/// The parts there are.
struct Parts<P> {
    by_number: RBTree<u64, Arc<P>>,
    count: usize,
    /// Where looking for unused ones goes on.
    next: u64,
    /// How many were made since that was done.
    made: usize,
}

impl<P: MayBeUnused> Parts<P> {
    fn new() -> Self {
        Self {
            by_number: RBTree::new(),
            count: 0,
            next: 0,
            made: 0,
        }
    }

    /// Adds one; returns whether it is time to look for unused ones.
    fn insert(&mut self, node: RBTreeNode<u64, Arc<P>>) -> bool {
        if self.by_number.insert(node).is_none() {
            self.count += 1;
            self.made += 1;
        }
        self.count > SPARE_PARTS && self.made >= PARTS_BETWEEN
    }

    /// Looks at some, after those that were looked at before, and moves the unused ones to `unused`, as
    /// many as that has room for, in order. Returns how many were looked at: none if there are none.
    fn take_unused(&mut self, unused: &mut KVec<Arc<P>>) -> usize {
        let mut looked_at = 0;
        self.made = 0;
        if self.by_number.cursor_lower_bound(&self.next).is_none() {
            self.next = 0;
        }
        let mut cursor = self.by_number.cursor_lower_bound_mut(&self.next);
        self.next = 0;
        while let Some(current) = cursor {
            let (number, part) = current.current();
            if looked_at == PARTS_AT_ONCE {
                self.next = *number;
                break;
            }
            looked_at += 1;
            // Nobody begins to use it while the tree is locked.
            let taken = part.is_unused() && unused.push_within_capacity(part.clone()).is_ok();
            cursor = if taken {
                self.count -= 1;
                current.remove_current().0
            } else {
                current.move_next()
            };
        }
        looked_at
    }
}

/// A part that stays while pages of it are mapped.
struct PartInUse(Arc<Part>);

impl PartInUse {
    /// The tree that the part is in has to be locked.
    fn new(part: &Arc<Part>) -> Self {
        part.users.fetch_add(1, Relaxed);
        Self(part.clone())
    }
}

impl Drop for PartInUse {
    fn drop(&mut self) {
        let umem = &self.0.umem;
        self.0.users.fetch_sub(1, Release);
        // Pages were taken back as soon as they were mapped, or there were none.
        if umem.mapped() == 0 {
            umem.user().unused.note();
        }
    }
}

/// The parts and tables of an on-demand region, which may be given back for another region of the same
/// user.
#[pin_data]
struct Region {
    tables: Arc<PageTables>,
    #[pin]
    parts: Mutex<Parts<Part>>,
    /// Held while parts are given back, so that the region does not end meanwhile.
    #[pin]
    sweeping: Mutex<()>,
}

impl Region {
    fn new(tables: Arc<PageTables>) -> Result<Arc<Self>> {
        let region = pin_init!(Self {
            tables,
            parts <- new_mutex!(Parts::new(), "ferrite_parts"),
            sweeping <- new_mutex!((), "ferrite_sweeping"),
        });
        Arc::pin_init(region, GFP_KERNEL)
    }

    /// Looks at some parts, and gives those back of which nothing is mapped. Returns how many it looked
    /// at, and how many it gave back. Sleeps.
    fn sweep(&self) -> Result<(usize, usize)> {
        let mut unused = KVec::with_capacity(PARTS_AT_ONCE, GFP_KERNEL)?;
        let _alone = self.sweeping.lock();
        let looked_at = self.parts.lock().take_unused(&mut unused);
        let pages = |part: &Arc<Part>| {
            let addresses = part.umem.addresses();
            self.tables.page_of(addresses.start)..self.tables.page_of(addresses.end)
        };
        if !unused.is_empty() {
            self.tables.shrink(unused.iter().map(pages));
        }
        let given_back = unused.len();
        // Before another looks, who finds nothing and tries again.
        drop(unused);
        Ok((looked_at, given_back))
    }

    /// Looks for unused parts until some were given back, or all were looked at; returns whether some
    /// were given back. Sleeps.
    fn give_back_some(&self) -> bool {
        let unused = &self.tables.unused;
        if !unused.is_news() {
            return false;
        }
        // What becomes unused from now on may not be seen below.
        let times = unused.times.load(Acquire);
        let mut left = self.parts.lock().count;
        while left > 0 {
            match self.sweep() {
                Ok((_, given_back)) if given_back > 0 => return true,
                Ok((looked_at, _)) if looked_at > 0 => left = left.saturating_sub(looked_at),
                Ok(_) => break,
                Err(_) => return false,
            }
        }
        unused.known.store(times, Relaxed);
        false
    }

    /// Gives all parts back: the region ends, and nobody uses them.
    fn end(&self) {
        let _alone = self.sweeping.lock();
        let parts = core::mem::replace(&mut *self.parts.lock(), Parts::new());
        drop(parts);
    }
}

/// An on-demand region.
///
/// Dropped after the device has let go of the tag: the pages are given back, then the tables.
pub(crate) struct OnDemand {
    /// The process's memory, of which parts are made as they are needed.
    root: OdpRoot,
    region: Arc<Region>,
    /// What it is found by in [`PagingMemory`].
    number: u64,
    tables: Arc<PageTables>,
    pd: u32,
    writable: bool,
    start: u64,
    iova: u64,
    length: u64,
}

/// Whether all of the process's memory is meant.
pub(crate) fn is_implicit(region: &UserRegion) -> bool {
    region.start == 0 && region.length == u64::MAX
}

impl OnDemand {
    /// Makes what a region needs on this side; `tag` is what the device will know it by.
    pub(crate) fn new(
        dev: &Device<Ferrite>,
        pd: u32,
        tag: u32,
        region: &UserRegion,
    ) -> Result<Self> {
        let implicit = is_implicit(region);
        if implicit && region.iova != 0 {
            return Err(EINVAL);
        }
        let length = if implicit {
            abi::ON_DEMAND_MAX_LENGTH
        } else {
            region.length
        };
        if length == 0 || length > abi::ON_DEMAND_MAX_LENGTH {
            return Err(EINVAL);
        }
        // The device finds the page by the offset, so that both have to agree on it.
        if (region.start ^ region.iova) & (PAGE - 1) != 0 {
            return Err(EINVAL);
        }
        let fbo = region.start & (PAGE - 1);
        let pages = (fbo + length).div_ceil(PAGE);
        let base = region.start - fbo;
        base.checked_add(pages * PAGE).ok_or(EOVERFLOW)?;
        let account = Account::of_current(&dev.paging_memory);
        let root = account.make_room(None, || Table::new(dev.parent(), &dev.hw, &account))?;
        let tables = PageTables::new(root, &dev.hw, tag, base, pages, account)?;
        let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let memory = OdpRoot::new(dev, region.access)?;
        let parts = Region::new(tables.clone())?;
        let number = dev.paging_memory.next_number.fetch_add(1, Relaxed);
        let name = (tables.account.user, number);
        let node = RBTreeNode::new(name, parts.clone(), GFP_KERNEL_ACCOUNT)?;
        dev.paging_memory.regions.lock().insert(node);
        Ok(Self {
            root: memory,
            region: parts,
            number,
            tables,
            pd,
            writable: region.access.intersects(writes | Access::MW_BIND),
            start: region.start,
            iova: region.iova,
            length,
        })
    }

    /// What to tell the device.
    pub(crate) fn buffer(&self) -> Result<Buffer> {
        Ok(Buffer {
            root: self.tables.root()?,
            length: self.length,
            fbo: (self.start & (PAGE - 1)) as u32,
            page_shift: abi::ON_DEMAND_PAGE_SHIFT,
            order: self.tables.levels,
            reserved: 0,
        })
    }

    /// Faults, pages taken back, and pages brought in on advice.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        self.tables.counts()
    }

    /// Who registered it.
    fn user(&self) -> u64 {
        self.tables.account.user
    }

    /// The part with that number, which lies in the region.
    fn part(&self, number: u64) -> Result<PartInUse> {
        if let Some(part) = self.region.parts.lock().by_number.get(&number) {
            return Ok(PartInUse::new(part));
        }
        let addresses = part_addresses(self.tables.base, self.tables.length(), number);
        let bytes = addresses.end - addresses.start;
        let noted = bytes / PAGE * ON_DEMAND_BYTES_PER_PAGE as u64 + PAGE;
        let account = &self.tables.account;
        // Made without the lock, since this takes that of the process's memory map.
        let part = account.make_room(Some(&self.region), || {
            let charge = account.charge(noted)?;
            let user = self.tables.clone();
            Ok(Part {
                umem: self.root.part(addresses.start, bytes, user)?,
                users: Atomic::new(0),
                _charge: charge,
            })
        })?;
        let part = Arc::new(part, GFP_KERNEL_ACCOUNT)?;
        let node = RBTreeNode::new(number, part.clone(), GFP_KERNEL_ACCOUNT)?;
        let in_use = {
            let mut parts = self.region.parts.lock();
            // Somebody may have been faster: then ours is given back, without the lock.
            if let Some(other) = parts.by_number.get(&number) {
                return Ok(PartInUse::new(other));
            }
            let in_use = PartInUse::new(&part);
            if !parts.insert(node) {
                return Ok(in_use);
            }
            in_use
        };
        // Where this fails for want of memory, the next one does it.
        let _ = self.region.sweep();
        Ok(in_use)
    }

    /// Brings in the pages of a range of the process's addresses, which lies in the region.
    fn map(&self, dev: &Device<Ferrite>, addresses: Range<u64>, how: BringIn) -> Result<u64> {
        // Nobody waits for them, and where the device cannot be stopped pages that it is told of are
        // never freed.
        if dev.hw.is_dead() {
            return Err(EIO);
        }
        let tables = &self.tables;
        let first = tables.page_of(addresses.start);
        let end = tables.page_of(addresses.end + (PAGE - 1));
        let made = tables
            .account
            .make_room(Some(&self.region), || tables.grow(dev.parent(), first..end))?;
        let mut count = 0;
        let mapped = self.map_pages(addresses, how, || count += 1);
        if mapped.is_err() || count == 0 {
            tables.undo(&made);
        }
        mapped.map(|()| count)
    }

    /// Maps the pages of a range, tells the device of every one that is present, and calls `each`.
    fn map_pages(&self, addresses: Range<u64>, how: BringIn, mut each: impl FnMut()) -> Result {
        let (base, length) = (self.tables.base, self.tables.length());
        let mut at = addresses.start;
        while at < addresses.end {
            let number = (at - base) / PART;
            let next = part_addresses(base, length, number).end.min(addresses.end);
            let part = self.part(number)?;
            part.0.umem.map(at, next - at, how, |page| {
                self.tables.set(&page);
                each();
            })?;
            at = next;
        }
        Ok(())
    }

    /// The addresses in the process of a part of the region.
    fn addresses(&self, offset: u64, length: u64) -> Result<Range<u64>> {
        let left = self.length.checked_sub(offset).ok_or(EFAULT)?;
        if length == 0 || length > left {
            return Err(EFAULT);
        }
        let start = self.start.checked_add(offset).ok_or(EFAULT)?;
        let end = start.checked_add(length).ok_or(EFAULT)?;
        Ok(start..end)
    }

    /// Brings in the page that the device needs, and what it will need soon if that can be had.
    fn handle(&self, dev: &Device<Ferrite>, fault: &PageFault) -> Result {
        let write = fault.flags & abi::FAULT_WRITE != 0;
        if write && !self.writable {
            return Err(EPERM);
        }
        let how = if write { BringIn::Write } else { BringIn::Read };
        let left = self.length.checked_sub(fault.offset).ok_or(EFAULT)?;
        let length = u64::from(fault.length).min(left).min(MOST_PER_FAULT);
        let all = self.addresses(fault.offset, length)?;
        self.tables.faults.fetch_add(1, Relaxed);
        if self.map(dev, all, how).is_ok() {
            return Ok(());
        }
        let first = self.addresses(fault.offset, 1)?;
        self.map(dev, first, how).map(|_| ())
    }

    /// Brings in a part of the region that the process advised to. Sleeps.
    fn prefetch(&self, dev: &Device<Ferrite>, range: &AdvisedRange, advice: Advice) -> Result {
        let how = match advice {
            Advice::Prefetch => BringIn::Read,
            Advice::PrefetchWrite => BringIn::Write,
            Advice::PrefetchNoFault => BringIn::Present,
        };
        let offset = range.address.checked_sub(self.iova).ok_or(EFAULT)?;
        let all = self.addresses(offset, range.length.into())?;
        let mut at = all.start;
        while at < all.end {
            // It is gigabytes at the most, and may be the process itself that waits.
            if user::is_dying() {
                return Err(EINTR);
            }
            let next = (at + MOST_AT_ONCE).min(all.end);
            let count = self.map(dev, at..next, how)?;
            self.tables.prefetches.fetch_add(count, Relaxed);
            at = next;
        }
        Ok(())
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        let account = &self.tables.account;
        let key = (account.user, self.number);
        let region = account.memory.regions.lock().remove(&key);
        drop(region);
        self.region.end();
    }
}

/// The addresses of a part of a region of `length` bytes, in whole pages, from `base` on.
fn part_addresses(base: u64, length: u64, number: u64) -> Range<u64> {
    let offset = number * PART;
    base + offset..base + length.min(offset + PART)
}

/// A fault that is being dealt with. It keeps the region.
#[pin_data]
struct FaultWork {
    mr: MrRef<Ferrite>,
    fault: PageFault,
    /// Whose faults it counts among.
    user: u64,
    #[pin]
    work: Work<FaultWork>,
}

impl_has_work! {
    impl HasWork<Self> for FaultWork { self.work }
}

impl WorkItem for FaultWork {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        deal_with(&this.mr, &this.fault, this.user);
        this.mr.device().pager.finish(this.user, this.user);
    }
}

fn deal_with(mr: &MrRef<Ferrite>, fault: &PageFault, user: u64) {
    let dev = mr.device();
    let failed = match mr.on_demand() {
        Some(region) => region.handle(dev, fault).is_err(),
        None => true,
    };
    resolve(&dev.hw, user, fault, failed);
}

/// Answers a fault in the turn of `user`: whose fault it is where a worker of his does it, and the kernel
/// where the pager does, which is not to wait for what one user asks for.
fn resolve(hw: &Arc<Hardware>, user: u64, fault: &PageFault, failed: bool) {
    let command = ResolveFault {
        token: fault.token,
        failed: failed.into(),
        reserved: 0,
    };
    // The queue pair may be gone meanwhile, or the device: then nobody waits.
    let _ = hw.execute_for(user, &command);
}

/// The faults of a user.
struct Backlog {
    under_way: usize,
    /// Those that wait, the oldest at `first`. They hold no region: one that ends does not wait for
    /// them.
    parked: KVVec<PageFault>,
    first: usize,
}

impl Backlog {
    const fn new() -> Self {
        Self {
            under_way: 0,
            parked: KVVec::new(),
            first: 0,
        }
    }

    fn park(&mut self, fault: &PageFault) -> Result {
        // Room that was used comes first, when it is half of all.
        if self.first > 0 && self.first >= self.parked.len() / 2 {
            self.parked.copy_within(self.first.., 0);
            self.parked.truncate(self.parked.len() - self.first);
            self.first = 0;
        }
        Ok(self.parked.push(*fault, GFP_KERNEL)?)
    }

    fn parked(&self) -> usize {
        self.parked.len() - self.first
    }

    fn unpark(&mut self) -> Option<PageFault> {
        let fault = *self.parked.get(self.first)?;
        self.first += 1;
        Some(fault)
    }
}

/// What is to become of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// It is dealt with now.
    Now,
    /// It waits for others of the same user.
    Later,
    /// Its user has more than all his queue pairs can have.
    Never,
}

/// The faults that were taken from the device, by user: who does not give his pages keeps up his own
/// faults, and nobody else's.
struct Backlogs {
    users: RBTree<u64, Backlog>,
    /// How many a user may have waiting: those of queue pairs that are gone count as well.
    most_parked: usize,
}

impl Backlogs {
    fn new(most_parked: usize) -> Self {
        Self {
            users: RBTree::new(),
            most_parked,
        }
    }

    /// A fault of a region of `user` was taken.
    fn admit(&mut self, user: u64, fault: &PageFault) -> Result<Admission> {
        if self.users.get(&user).is_none() {
            self.users
                .try_create_and_insert(user, Backlog::new(), GFP_KERNEL)?;
        }
        let backlog = self.users.get_mut(&user).ok_or(ENOMEM)?;
        if backlog.under_way < MOST_FAULTS {
            backlog.under_way += 1;
            return Ok(Admission::Now);
        }
        if backlog.parked() >= self.most_parked {
            return Ok(Admission::Never);
        }
        backlog.park(fault)?;
        Ok(Admission::Later)
    }

    /// One of `user` was dealt with. Returns the one that takes its place.
    fn finish(&mut self, user: u64) -> Option<PageFault> {
        let backlog = self.users.get_mut(&user)?;
        let next = backlog.unpark();
        if next.is_none() {
            backlog.under_way -= 1;
            if backlog.under_way == 0 {
                self.users.remove(&user);
            }
        }
        next
    }
}

/// Takes faults by `take` until there are none, or `closed` says that nobody waits for them, and
/// calls `start` for each.
fn take_all(
    closed: impl Fn() -> bool,
    mut take: impl FnMut() -> Result<PageFaults>,
    mut start: impl FnMut(&PageFault),
) -> Result {
    while !closed() {
        let taken = take()?;
        let count = (taken.count as usize).min(taken.faults.len());
        for fault in taken.faults.iter().take(count) {
            start(fault);
        }
        if count < taken.faults.len() {
            break;
        }
    }
    Ok(())
}

/// How many faults of a user may wait where the device has so many queue pairs: one as requester and
/// one as responder each, within reason.
fn most_parked(queue_pairs: u32) -> usize {
    (2 * queue_pairs as usize).min(MOST_PARKED)
}

/// The advices that are to be followed later, by user.
struct Advices {
    users: RBTree<u64, u32>,
}

impl Advices {
    fn new() -> Self {
        Self {
            users: RBTree::new(),
        }
    }

    /// Whether one more of `user` may be followed later: then it counts until [`Advices::finish`].
    fn admit(&mut self, user: u64) -> bool {
        match self.users.get_mut(&user) {
            Some(count) if *count >= MOST_ADVICES => false,
            Some(count) => {
                *count += 1;
                true
            }
            // Without memory to note it he follows it himself.
            None => self
                .users
                .try_create_and_insert(user, 1, GFP_KERNEL)
                .is_ok(),
        }
    }

    /// One of `user` was followed.
    fn finish(&mut self, user: u64) {
        if let Some(count) = self.users.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                self.users.remove(&user);
            }
        }
    }
}

/// Where paging is done. Pages may take as long as their owners like, so that those who wait for
/// them keep up nobody who does not: neither the pager, without which no fault is taken, nor the
/// other kind of them.
///
/// Dropped in this order: the pager has faults dealt with.
pub(crate) struct PagingQueues {
    /// Of the [`Pager`].
    pager: OwnedQueue,
    faults: OwnedQueue,
    advices: OwnedQueue,
}

impl PagingQueues {
    pub(crate) fn new() -> Result<Self> {
        Self::with_workers(OwnedQueue::MOST_ACTIVE)
    }

    fn with_workers(most: u32) -> Result<Self> {
        Ok(Self {
            pager: OwnedQueue::ordered(c"ferrite_pager")?,
            faults: OwnedQueue::for_faults(c"ferrite_faults", most)?,
            advices: OwnedQueue::for_faults(c"ferrite_advices", most)?,
        })
    }

    /// Runs the [`Pager`], one at a time.
    pub(crate) fn take<W, const ID: u64>(&self, pager: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.pager.enqueue(pager)
    }

    /// Runs what deals with a fault.
    fn deal_with<W, const ID: u64>(&self, fault: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.faults.enqueue(fault)
    }

    /// Runs what follows an advice.
    fn follow<W, const ID: u64>(&self, advice: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.advices.enqueue(advice)
    }
}

/// Where the region of a fault is found, while it is there.
fn index_of(fault: &PageFault) -> usize {
    abi::Tag(fault.tag).index() as usize
}

/// The key and the user of a region, if it is of on-demand memory.
fn key_and_user(mr: &Mr<Ferrite>) -> Option<(u32, u64)> {
    mr.on_demand().map(|region| (mr.lkey(), region.user()))
}

/// Whose fault it is, where a region with this key and user is found at its index: nobody's, if that
/// is another region than the one that the device meant.
fn owner_of(fault: &PageFault, found: Option<(u32, u64)>) -> Option<u64> {
    found
        .filter(|(key, _)| *key == fault.tag)
        .map(|(_, user)| user)
}

/// Takes faults from the device and has them dealt with, each by a worker of its own.
#[pin_data]
pub(crate) struct Pager {
    hw: Arc<Hardware>,
    /// Nobody waits for a page any more.
    closed: Atomic<u32>,
    /// Locked while faults are counted, not while they are dealt with.
    #[pin]
    backlogs: Mutex<Backlogs>,
    /// Locked while advices are counted, not while they are followed.
    #[pin]
    advices: Mutex<Advices>,
    #[pin]
    work: Work<Pager>,
}

impl_has_work! {
    impl HasWork<Self> for Pager { self.work }
}

impl Pager {
    /// For a device with so many queue pairs.
    pub(crate) fn new(hw: &Arc<Hardware>, queue_pairs: u32) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                closed: Atomic::new(0),
                backlogs <- new_mutex!(Backlogs::new(most_parked(queue_pairs)), "ferrite_backlogs"),
                advices <- new_mutex!(Advices::new(), "ferrite_advices"),
                work <- new_work!("ferrite_pager"),
            }),
            GFP_KERNEL,
        )
    }

    /// Takes no more faults: a device that never runs out of them is not waited for.
    pub(crate) fn close(&self) {
        self.closed.store(1, Relaxed);
    }

    /// Has a fault dealt with, now or when others of the same user were.
    fn start(&self, fault: &PageFault) {
        let user = self
            .hw
            .regions
            .with(index_of(fault), |mr| owner_of(fault, key_and_user(mr)));
        let Some(user) = user.flatten() else {
            resolve(&self.hw, user::KERNEL, fault, true);
            return;
        };
        let admission = self.backlogs.lock().admit(user, fault);
        match admission {
            Ok(Admission::Now) => {
                if !self.begin(user::KERNEL, user, fault) {
                    self.finish(user::KERNEL, user);
                }
            }
            Ok(Admission::Later) => {}
            // Without memory to note it there is none for the page.
            Ok(Admission::Never) | Err(_) => resolve(&self.hw, user::KERNEL, fault, true),
        }
    }

    /// Has a fault that counts among those of `user` dealt with by a worker, or answers it in the turn
    /// of `caller`. Returns false where there is nothing to wait for.
    fn begin(&self, caller: u64, user: u64, fault: &PageFault) -> bool {
        // It may have waited, and the region be gone: its index is another's then.
        let mr = self.hw.regions.get(index_of(fault));
        let mr = mr.filter(|mr| owner_of(fault, key_and_user(mr)) == Some(user));
        let Some(mr) = mr else {
            resolve(&self.hw, caller, fault, true);
            return false;
        };
        let kept = mr.clone();
        let work = Arc::pin_init(
            pin_init!(FaultWork {
                mr: kept,
                fault: *fault,
                user,
                work <- new_work!("ferrite_fault"),
            }),
            GFP_KERNEL,
        );
        match work {
            Ok(work) => {
                // A work item that was made just now is not queued yet.
                drop(mr.device().paging.deal_with(work));
                true
            }
            Err(_) => {
                // Dealt with here the page might keep up everybody.
                resolve(&self.hw, caller, fault, true);
                false
            }
        }
    }

    /// A fault that counted among those of `user` was dealt with: the next one begins, as by
    /// [`Pager::begin`].
    fn finish(&self, caller: u64, user: u64) {
        loop {
            let next = self.backlogs.lock().finish(user);
            match next {
                Some(fault) if self.begin(caller, user, &fault) => return,
                Some(_) => {}
                None => return,
            }
        }
    }
}

impl WorkItem for Pager {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let taken = take_all(
            || this.closed.load(Relaxed) != 0,
            || this.hw.query(&Nothing),
            |fault| this.start(fault),
        );
        if let Err(error) = taken {
            if !this.hw.is_dead() {
                // It may have faults left, and says so only once.
                dev_err!(this.hw.pdev, "faults cannot be taken: {:?}\n", error);
                this.hw.fail();
            }
        }
    }
}

/// Leave to follow an advice later.
struct Later {
    pager: Arc<Pager>,
    user: u64,
}

impl Later {
    /// For the current process; `None` where there are too many of its user already.
    fn new(pager: &Arc<Pager>) -> Option<Self> {
        let user = user::accountable();
        let admitted = pager.advices.lock().admit(user);
        admitted.then(|| Self {
            pager: pager.clone(),
            user,
        })
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        self.pager.advices.lock().finish(self.user);
    }
}

/// An advice that is followed later. It keeps the regions.
#[pin_data]
struct PrefetchWork {
    advice: Advice,
    _leave: Later,
    ranges: KVVec<(MrRef<Ferrite>, AdvisedRange)>,
    #[pin]
    work: Work<PrefetchWork>,
}

impl_has_work! {
    impl HasWork<Self> for PrefetchWork { self.work }
}

impl WorkItem for PrefetchWork {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        for (mr, range) in &this.ranges {
            if let Some(region) = mr.on_demand() {
                // What does not come now comes with its fault.
                let _ = region.prefetch(mr.device(), range, this.advice);
            }
        }
    }
}

/// Follows an advice of a process.
pub(crate) fn advise(
    pd: &Pd<Ferrite>,
    advice: Advice,
    wait: bool,
    ranges: &[AdvisedRange],
) -> Result {
    let dev = pd.device();
    if !dev.has(abi::FEATURE_ON_DEMAND) {
        return Err(errno::eopnotsupp());
    }
    let mut found = KVVec::with_capacity(ranges.len(), GFP_KERNEL_ACCOUNT)?;
    for range in ranges {
        let index = abi::Tag(range.lkey).index() as usize;
        let mr = dev.hw.regions.get(index).ok_or(EINVAL)?;
        let region = mr.on_demand().ok_or(EINVAL)?;
        if mr.lkey() != range.lkey || region.pd != pd.number() {
            return Err(EINVAL);
        }
        if advice == Advice::PrefetchWrite && !region.writable {
            return Err(EPERM);
        }
        found.push((mr, *range), GFP_KERNEL_ACCOUNT)?;
    }
    let leave = if wait { None } else { Later::new(&dev.pager) };
    let Some(leave) = leave else {
        for (mr, range) in &found {
            let region = mr.on_demand().ok_or(EINVAL)?;
            region.prefetch(dev, range, advice)?;
        }
        return Ok(());
    };
    let work = Arc::pin_init(
        pin_init!(PrefetchWork {
            advice,
            _leave: leave,
            ranges: found,
            work <- new_work!("ferrite_prefetch"),
        }),
        GFP_KERNEL,
    )?;
    // A work item that was made just now is not queued yet.
    drop(dev.paging.follow(work));
    Ok(())
}

#[kunit_tests(ferrite_odp)]
mod tests {
    use super::*;
    use crate::{
        abi::Plain,
        kernel_ext::completion::Completion, //
    };
    use kernel::time::msecs_to_jiffies;

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

    fn fault(token: u32) -> PageFault {
        PageFault {
            token: token.into(),
            ..PageFault::zeroed()
        }
    }

    #[test]
    fn a_user_who_gives_no_pages_keeps_up_only_himself() -> Result {
        let most = 3 * MOST_FAULTS;
        let mut backlogs = Backlogs::new(most);
        // One whose pages never come has as many faults as he can have.
        for _ in 0..MOST_FAULTS {
            assert_eq!(backlogs.admit(1, &fault(0))?, Admission::Now);
        }
        for number in 0..most {
            assert_eq!(backlogs.admit(1, &fault(number as u32))?, Admission::Later);
        }
        // What is more is from queue pairs that are gone, or made up.
        assert_eq!(backlogs.admit(1, &fault(0))?, Admission::Never);
        // That is nothing to another.
        assert_eq!(backlogs.admit(2, &fault(7))?, Admission::Now);
        assert!(backlogs.finish(2).is_none());
        // When they come each makes room for the next, in order.
        for number in 0..most {
            let next = backlogs.finish(1).ok_or(ENOENT)?;
            assert_eq!(next.token, fault(number as u32).token);
        }
        for _ in 0..MOST_FAULTS {
            assert!(backlogs.finish(1).is_none());
        }
        assert!(backlogs.users.is_empty());
        Ok(())
    }

    #[test]
    fn a_fault_is_of_the_region_that_the_device_meant_and_no_later_one() {
        let of = |index, instance| PageFault {
            tag: abi::Tag::new(index, instance).0,
            ..PageFault::zeroed()
        };
        let (first, second) = (of(7, 1), of(7, 2));
        assert_eq!(index_of(&first), index_of(&second));
        // While the first is registered, and when the second has its index.
        assert_eq!(owner_of(&first, Some((first.tag, 1000))), Some(1000));
        assert_eq!(owner_of(&first, Some((second.tag, 1001))), None);
        assert_eq!(owner_of(&second, Some((second.tag, 1001))), Some(1001));
        // One that is not of on-demand memory.
        assert_eq!(owner_of(&first, None), None);
    }

    /// A part in name only.
    struct Fake {
        unused: Atomic<u32>,
    }

    impl MayBeUnused for Fake {
        fn is_unused(&self) -> bool {
            self.unused.load(Relaxed) != 0
        }
    }

    /// Makes one; returns whether it is time to look for unused ones too.
    fn fake(parts: &mut Parts<Fake>, number: u64, unused: bool) -> Result<(Arc<Fake>, bool)> {
        let part = Fake {
            unused: Atomic::new(unused.into()),
        };
        let part = Arc::new(part, GFP_KERNEL)?;
        let look = parts.insert(RBTreeNode::new(number, part.clone(), GFP_KERNEL)?);
        Ok((part, look))
    }

    #[test]
    fn looking_for_unused_parts_costs_little_each_time_and_finds_all() -> Result {
        let mut parts = Parts::new();
        let all = 10 * PARTS_AT_ONCE as u64 + 3;
        let mut kept = KVVec::new();
        for number in 0..all {
            kept.push(fake(&mut parts, number, false)?.0, GFP_KERNEL)?;
        }
        let mut unused = KVec::with_capacity(PARTS_AT_ONCE, GFP_KERNEL)?;
        // All are in use.
        for _ in 0..20 {
            let looked_at = parts.take_unused(&mut unused);
            assert!((1..=PARTS_AT_ONCE).contains(&looked_at));
            assert!(unused.is_empty());
        }
        // One here and there is not: they are found before all were looked at twice.
        for number in [0, 1, 100, all - 1] {
            kept[number as usize].unused.store(1, Relaxed);
        }
        let (mut looked_at, mut found) = (0, 0);
        while looked_at < 2 * all as usize && found < 4 {
            looked_at += parts.take_unused(&mut unused);
            found += unused.len();
            unused.clear();
        }
        assert_eq!(found, 4);
        assert_eq!(parts.count, all as usize - 4);
        assert!(parts.by_number.get(&100).is_none());
        Ok(())
    }

    #[test]
    fn a_region_that_wanders_keeps_few_parts() -> Result {
        let mut parts = Parts::new();
        let mut unused = KVec::with_capacity(PARTS_AT_ONCE, GFP_KERNEL)?;
        let mut last: Option<Arc<Fake>> = None;
        let mut looks = 0;
        for number in 0..500 {
            let (part, look) = fake(&mut parts, number, false)?;
            if let Some(last) = last.replace(part) {
                last.unused.store(1, Relaxed);
            }
            if look {
                parts.take_unused(&mut unused);
                looks += 1;
                // Neighbours, at least in two runs.
                assert!(unused.len() >= PARTS_BETWEEN / 2);
                unused.clear();
            }
            assert!(parts.count <= SPARE_PARTS + PARTS_AT_ONCE);
        }
        assert!(looks <= 500 / PARTS_BETWEEN);
        // None is left over when there is none.
        let mut none = Parts::<Fake>::new();
        assert_eq!(none.take_unused(&mut unused), 0);
        Ok(())
    }

    #[test]
    fn no_more_parts_are_taken_than_there_is_room_for() -> Result {
        let mut parts = Parts::new();
        for number in 0..4 {
            fake(&mut parts, number, true)?;
        }
        let mut none = KVec::new();
        assert_eq!(parts.take_unused(&mut none), 4);
        assert_eq!(parts.count, 4);
        let mut unused = KVec::with_capacity(PARTS_AT_ONCE, GFP_KERNEL)?;
        assert_eq!(parts.take_unused(&mut unused), 4);
        assert_eq!((parts.count, unused.len()), (0, 4));
        Ok(())
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
    fn memory_is_refused_only_when_nothing_of_the_user_is_unused() {
        let run = |needed: u32, unused: u32| {
            let (mut free, mut unused, mut tries) = (0, unused, 0);
            let room = core::cell::Cell::new(0);
            let result = try_with_room(
                || {
                    tries += 1;
                    free = room.get();
                    if free < needed {
                        Err(ENOMEM)
                    } else {
                        Ok(())
                    }
                },
                || {
                    let more = unused > 0;
                    if more {
                        unused -= 1;
                        room.set(room.get() + 1);
                    }
                    more
                },
            );
            (result, tries)
        };
        assert_eq!(run(0, 5), (Ok(()), 1));
        assert_eq!(run(3, 5), (Ok(()), 4));
        // Nothing is unused: once more, as somebody else may have given something back.
        assert_eq!(run(1, 0), (Err(ENOMEM), 2));
        assert_eq!(run(3, 2), (Err(ENOMEM), 4));
        // Others take what is given back: not for ever.
        assert_eq!(run(u32::MAX, u32::MAX), (Err(ENOMEM), 1 + MOST_TRIES));
        // Memory does not help.
        let other = try_with_room(|| Err::<(), _>(EIO), || true);
        assert_eq!(other, Err(EIO));
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
    fn parts_cover_a_region_and_nothing_else() {
        let base = 0x7f00_1234_5000;
        for length in [PAGE, PART - PAGE, PART, PART + PAGE, 3 * PART + 5 * PAGE] {
            let mut at = base;
            for number in 0..length.div_ceil(PART) {
                let part = part_addresses(base, length, number);
                assert_eq!(part.start, at);
                assert!(part.end > at && part.end - at <= PART);
                // Tables are given back with it, so that it shares none.
                assert_eq!((part.start - base) / PAGE % ATT_TABLE_ENTRIES as u64, 0);
                at = part.end;
            }
            assert_eq!(at, base + length);
        }
        // The last addresses there are.
        let part = part_addresses(u64::MAX - PART - PAGE + 1, PART, 0);
        assert_eq!(part.end, u64::MAX - PAGE + 1);
    }

    #[test]
    fn memory_for_paging_is_bounded_by_user_and_given_back() -> Result {
        let memory = PagingMemory::new(PAGING_SHARE << 20)?;
        let account = |user, bound| Account {
            memory: memory.clone(),
            user,
            bound,
        };
        let (one, other) = (account(1, true), account(2, true));
        let mut charges = KVec::new();
        while let Ok(charge) = one.charge(PAGE) {
            charges.push(charge, GFP_KERNEL)?;
        }
        assert_eq!(charges.len() as u64 * PAGE, 3 << 18);
        // Others get theirs, and who may exceed limits whatever there is.
        drop(other.charge(PAGE)?);
        drop(account(1, false).charge(1 << 40)?);
        assert!(one.charge(PAGE).is_err());
        drop(charges);
        drop(one.charge(3 << 18)?);
        drop(other.charge(3 << 18)?);
        Ok(())
    }

    #[test]
    fn what_the_device_says_does_not_size_what_waits() {
        assert_eq!(most_parked(100), 200);
        assert_eq!(most_parked((1 << 24) - 1), MOST_PARKED);
        assert_eq!(most_parked(u32::MAX), MOST_PARKED);
    }

    #[test]
    fn advices_of_a_user_keep_up_nobody_elses() {
        let mut advices = Advices::new();
        for _ in 0..MOST_ADVICES {
            assert!(advices.admit(1));
        }
        assert!(!advices.admit(1));
        assert!(advices.admit(2));
        advices.finish(1);
        assert!(advices.admit(1));
        assert!(!advices.admit(1));
        advices.finish(2);
        for _ in 0..MOST_ADVICES {
            advices.finish(1);
        }
        assert!(advices.users.is_empty());
    }

    /// Work that says that it began, and waits for leave to end.
    #[pin_data]
    struct Step {
        #[pin]
        begun: Completion,
        #[pin]
        leave: Completion,
        #[pin]
        work: Work<Step>,
    }

    impl_has_work! {
        impl HasWork<Self> for Step { self.work }
    }

    impl Step {
        fn new() -> Result<Arc<Self>> {
            let step = pin_init!(Self {
                begun <- Completion::new(),
                leave <- Completion::new(),
                work <- new_work!("ferrite_step"),
            });
            Arc::pin_init(step, GFP_KERNEL)
        }

        /// Whether it begins, on however slow a machine.
        fn begins(&self) -> bool {
            self.begun.wait_timeout(msecs_to_jiffies(30_000))
        }

        /// Whether it is kept up for now.
        fn is_kept_up(&self) -> bool {
            !self.begun.wait_timeout(msecs_to_jiffies(500))
        }
    }

    impl WorkItem for Step {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            this.begun.complete_all();
            this.leave.wait();
        }
    }

    #[test]
    fn pages_that_never_come_keep_up_no_other_kind_of_paging() -> Result {
        // As many as there can be at once, of which none ends.
        let queues = PagingQueues::with_workers(2)?;
        // All are made before the first is queued: the queues wait for what was queued, and that
        // for leave.
        let faults = [Step::new()?, Step::new()?, Step::new()?];
        let (taken, followed) = (Step::new()?, Step::new()?);
        for step in &faults {
            drop(queues.deal_with(step.clone()));
        }
        let full = [faults[0].begins(), faults[1].begins()];
        let kept_up = faults[2].is_kept_up();
        drop(queues.take(taken.clone()));
        drop(queues.follow(followed.clone()));
        let begun = [taken.begins(), followed.begins()];
        for step in [&faults[0], &faults[1], &faults[2], &taken, &followed] {
            step.leave.complete_all();
        }
        assert_eq!(full, [true; 2]);
        assert!(kept_up);
        assert_eq!(begun, [true; 2]);
        Ok(())
    }

    #[test]
    fn parked_faults_stay_in_order_while_others_come() -> Result {
        let mut backlog = Backlog::new();
        let mut expected = 0;
        for number in 0..1_000u32 {
            backlog.park(&fault(number))?;
            if number % 3 != 0 {
                let next = backlog.unpark().ok_or(ENOENT)?;
                assert_eq!(next.token, fault(expected).token);
                expected += 1;
            }
        }
        assert_eq!(backlog.parked(), 1_000 - expected as usize);
        // Room is used again.
        assert!(backlog.parked.len() <= 2 * backlog.parked() + 2);
        Ok(())
    }

    #[test]
    fn faults_are_taken_until_there_are_none_or_it_fails() {
        let batch = PageFaults::zeroed().faults.len() as u32;
        let with = |count| PageFaults {
            count,
            ..PageFaults::zeroed()
        };
        let run = |answers: &[Result<u32>]| {
            let (mut taken, mut started) = (0, 0);
            let result = take_all(
                || false,
                || {
                    taken += 1;
                    answers[taken - 1].map(with)
                },
                |_| started += 1,
            );
            (result, taken, started)
        };
        assert_eq!(run(&[Ok(batch), Ok(2)]), (Ok(()), 2, batch + 2));
        // What the device says is not believed.
        assert_eq!(run(&[Ok(batch + 1), Ok(0)]), (Ok(()), 2, batch));
        assert_eq!(run(&[Ok(batch), Err(EINVAL)]), (Err(EINVAL), 2, batch));
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
