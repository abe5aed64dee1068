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

mod faults;
mod tables;

pub(crate) use self::faults::{
    Pager,
    PagingQueues, //
};

use self::tables::{
    OdpTable,
    OdpTables,
    TABLE_BITS, //
};
use crate::{
    abi,
    abi::{
        Buffer,
        PageFault, //
    },
    device::Ferrite,
    kernel_ext::{
        memory,
        user, //
    },
    rdma::{
        Access,
        Advice,
        AdvisedRange,
        BringIn,
        Device,
        OdpRoot,
        OdpUmem,
        UserRegion,
        ON_DEMAND_BYTES_PER_PAGE, //
    },
    shares::{
        Holder,
        Shares,
        Spare, //
    },
};
use core::ops::Range;
use kernel::{
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
};

const PAGE: u64 = 1 << abi::ON_DEMAND_PAGE_SHIFT;
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
/// Bytes brought in for one fault at the most.
const MOST_PER_FAULT: u64 = 1 << 20;
/// Bytes brought in at once for an advice.
const MOST_AT_ONCE: u64 = 4 << 20;

/// Memory of the kernel's that on-demand regions of a device take, by user.
#[pin_data]
pub(crate) struct OdpBudget {
    #[pin]
    shares: Mutex<Shares>,
    /// The regions that take it, by user and number.
    #[pin]
    regions: Mutex<RBTree<(u64, u64), Arc<Region>>>,
    next_number: Atomic<u64>,
}

impl OdpBudget {
    /// For a machine with so many bytes of memory.
    pub(crate) fn new(machine: u64) -> Result<Arc<Self>> {
        let memory = pin_init!(Self {
            shares <- new_mutex!(Shares::new(machine / PAGING_SHARE), "ferrite_paging_memory"),
            regions <- new_mutex!(RBTree::new(), "ferrite_paging_regions"),
            next_number: Atomic::new(0),
        });
        let memory = Arc::pin_init(memory, GFP_KERNEL)?;
        memory::taken_in_reclaim(|| drop(memory.shares.lock()));
        Ok(memory)
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
    memory: Arc<OdpBudget>,
    user: u64,
    bound: bool,
}

impl Account {
    /// That of the current process.
    fn of_current(memory: &Arc<OdpBudget>) -> Self {
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
            let taken = Spare::provide(|spare| {
                let mut shares = self.memory.shares.lock();
                shares.take(Holder::user(self.user), bytes, true, spare)
            });
            // Beyond the share it is as where there is no memory: what is not used is given back for it.
            taken.map_err(|_| ENOMEM)?;
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
    memory: Arc<OdpBudget>,
    user: u64,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let mut shares = self.memory.shares.lock();
            shares.give_back(Holder::user(self.user), self.bytes);
        }
    }
}

/// A part of a region.
struct Part {
    umem: OdpUmem<OdpTables>,
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
    tables: Arc<OdpTables>,
    #[pin]
    parts: Mutex<Parts<Part>>,
    /// Held while parts are given back, so that the region does not end meanwhile.
    #[pin]
    sweeping: Mutex<()>,
}

impl Region {
    fn new(tables: Arc<OdpTables>) -> Result<Arc<Self>> {
        let region = pin_init!(Self {
            tables,
            parts <- new_mutex!(Parts::new(), "ferrite_parts"),
            sweeping <- new_mutex!((), "ferrite_sweeping"),
        });
        Arc::pin_init(region, GFP_KERNEL_ACCOUNT)
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
    /// What it is found by in [`OdpBudget`].
    number: u64,
    tables: Arc<OdpTables>,
    pd: u32,
    writable: bool,
    start: u64,
    iova: u64,
    length: u64,
    /// The device has let go of it: who ends it waits for those who bring pages in.
    ended: Atomic<bool>,
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
        let root = account.make_room(None, || OdpTable::new(dev.parent(), &dev.hw, &account))?;
        let tables = OdpTables::new(root, &dev.hw, tag, base, pages, account)?;
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
            ended: Atomic::new(false),
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

    /// The device uses the region no more: no advice about it is followed any further.
    pub(crate) fn end(&self) {
        self.ended.store(true, Relaxed);
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
            if self.ended.load(Relaxed) {
                return Err(EINVAL);
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

#[kunit_tests(ferrite_odp)]
mod tests {
    use super::*;
    use crate::abi::ATT_TABLE_ENTRIES;

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
        let memory = OdpBudget::new(PAGING_SHARE << 20)?;
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
}
