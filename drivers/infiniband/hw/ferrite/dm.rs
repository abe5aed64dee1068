// SPDX-License-Identifier: GPL-2.0

//! Memory of the device that processes use: whole pages of BAR 2, each mapped by one process.

use crate::{
    abi,
    device::Ferrite,
    doorbell_bar,
    kernel_ext::{
        errno,
        io::clear_bar,
        memory, //
    },
    mr::FerriteMr,
    rdma::{
        kind,
        Caching,
        Device,
        Dm,
        DmAllocAttr,
        DmOps,
        DmRegion,
        Handle,
        Method,
        Mr,
        New,
        Out,
        Pd,
        Ucontext,
        UcontextRef, //
    },
    shares::{
        Holder,
        Shares,
        Spare, //
    },
    ucontext::Part,
};
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// Which pages of device memory are in use, and how many by whom.
pub(crate) struct PageMap {
    used: KVVec<bool>,
    shares: Shares,
}

impl PageMap {
    fn new(pages: usize) -> Result<Self> {
        let mut used = KVVec::with_capacity(pages, GFP_KERNEL)?;
        for _ in 0..pages {
            used.push(false, GFP_KERNEL)?;
        }
        let shares = Shares::new(pages as u64);
        Ok(Self { used, shares })
    }

    /// Takes `count` free pages in a row, the first a multiple of `align`: `ENOMEM` where there are none, `EDQUOT`
    /// beyond the share of a user who is `bound` by it.
    fn take(
        &mut self,
        holder: Holder,
        count: usize,
        align: usize,
        bound: bool,
        spare: &mut Spare,
    ) -> Result<usize> {
        let first = self.find(count, align).ok_or(ENOMEM)?;
        self.shares.take(holder, count as u64, bound, spare)?;
        self.mark(first, count, true);
        Ok(first)
    }

    fn find(&self, count: usize, align: usize) -> Option<usize> {
        let mut first = 0;
        while let Some(pages) = self.used.get(first..).and_then(|all| all.get(..count)) {
            match pages.iter().rposition(|used| *used) {
                None => return Some(first),
                Some(last) => first = (first + last + 1).next_multiple_of(align),
            }
        }
        None
    }

    fn mark(&mut self, first: usize, count: usize, used: bool) {
        if let Some(pages) = self.used.get_mut(first..first + count) {
            pages.fill(used);
        }
    }

    /// Gives pages back, which the same one must have taken.
    fn give_back(&mut self, holder: Holder, first: usize, count: usize) {
        self.mark(first, count, false);
        self.shares.give_back(holder, count as u64);
    }
}

/// The device's memory.
#[pin_data]
pub(crate) struct DeviceMemoryPool {
    /// Where it is in the doorbell BAR.
    offset: u64,
    #[pin]
    map: Mutex<PageMap>,
}

impl DeviceMemoryPool {
    /// The memory at `place` in the doorbell BAR.
    pub(crate) fn new(place: doorbell_bar::BarPart) -> Result<Arc<Self>> {
        let map = PageMap::new(usize::try_from(place.length)? / PAGE_SIZE)?;
        let pool = Arc::pin_init(
            pin_init!(Self {
                offset: place.offset,
                map <- new_mutex!(map, "ferrite_device_memory"),
            }),
            GFP_KERNEL,
        )?;
        memory::taken_in_reclaim(|| drop(pool.map.lock()));
        Ok(pool)
    }

    /// How many pages are in use, and how many there are. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        let map = self.map.lock();
        let used = map.used.iter().filter(|used| **used).count();
        (used as u32, map.used.len() as u32)
    }

    fn take(self: &Arc<Self>, pages: usize, align: usize) -> Result<Arc<DmPages>> {
        let holder = Holder::current();
        let first = holder.take_from(&self.map, |map, bound, spare| {
            map.take(holder, pages, align, bound, spare)
        })?;
        let taken = DmPages {
            memory: self.clone(),
            holder,
            first,
            pages,
        };
        // On failure they are dropped, which gives them back.
        Ok(Arc::new(taken, GFP_KERNEL_ACCOUNT)?)
    }
}

/// Pages of the device's memory; given back when neither object, region nor mapping has them.
pub(crate) struct DmPages {
    memory: Arc<DeviceMemoryPool>,
    holder: Holder,
    first: usize,
    pages: usize,
}

impl DmPages {
    /// Where it starts in the device's memory.
    pub(crate) fn offset(&self) -> u64 {
        (self.first * PAGE_SIZE) as u64
    }

    /// Where it starts in the doorbell BAR.
    pub(crate) fn bar_offset(&self) -> u64 {
        self.memory.offset + self.offset()
    }

    /// How many bytes it has.
    pub(crate) fn length(&self) -> usize {
        self.pages * PAGE_SIZE
    }
}

impl Drop for DmPages {
    fn drop(&mut self) {
        let mut map = self.memory.map.lock();
        map.give_back(self.holder, self.first, self.pages);
    }
}

/// The driver's data of device memory that a process has.
pub(crate) struct FerriteDm {
    dm_pages: Arc<DmPages>,
    context: UcontextRef<Ferrite>,
    mapping: u64,
    /// As the process asked for.
    length: u64,
}

/// What a process is told of the memory that it allocates: the offset to map it by, if it asks.
pub(crate) type AllocAttributes<'a> = (Option<Out<'a, u64, { abi::UVERBS_DM_ALLOC_OFFSET }>>,);

/// A process that shares the context of another asks what its allocator was told.
pub(crate) struct QueryDm;

impl Method<Ferrite> for QueryDm {
    type Kind = kind::Dm;
    const ID: u32 = abi::UVERBS_DM_QUERY;
    type Attributes<'a> = (
        Handle<'a, kind::Dm, Ferrite, { abi::UVERBS_DM_QUERY_HANDLE }>,
        Out<'a, u64, { abi::UVERBS_DM_QUERY_OFFSET }>,
        Out<'a, u64, { abi::UVERBS_DM_QUERY_LENGTH }>,
    );

    fn call(_: &Ucontext<Ferrite>, (dm, offset, length): Self::Attributes<'_>) -> Result {
        offset.write(&dm.mapping)?;
        length.write(&dm.length)
    }
}

impl FerriteDm {
    /// The pages.
    pub(crate) fn dm_pages(&self) -> &Arc<DmPages> {
        &self.dm_pages
    }
}

impl DmOps for Ferrite {
    type Dm = FerriteDm;
    type AllocAttributes<'a> = AllocAttributes<'a>;

    /// Allocates device memory and lets the process map it.
    fn alloc_dm<'a>(
        dev: &Device<Self>,
        context: &Ucontext<Self>,
        new: New<'a, kind::Dm, Self>,
        attr: &DmAllocAttr,
        (told_offset,): Self::AllocAttributes<'_>,
    ) -> Result<&'a Dm<Self>> {
        if !dev.has(abi::FEATURE_DEVICE_MEMORY) {
            return Err(errno::eopnotsupp());
        }
        let pages = usize::try_from(attr.length)?.div_ceil(PAGE_SIZE);
        if pages == 0 || attr.log_alignment > 30 {
            return Err(EINVAL);
        }
        let align = (1usize << attr.log_alignment).div_ceil(PAGE_SIZE);
        let dm_pages = dev.memory.take(pages, align)?;
        let (offset, length) = (dm_pages.bar_offset(), dm_pages.length());
        // What another process left there is not for this one.
        clear_bar(dev.parent().try_into()?, abi::BAR_DOORBELLS, offset, length)?;
        // The mapping keeps the pages until it is gone from the process too.
        let keep = KBox::new(dm_pages.clone(), GFP_KERNEL_ACCOUNT)?;
        let range = Part::Memory(&dm_pages).range(dev)?;
        let mapping = context.map_range_keeping(range, Caching::Uncached, keep)?;
        let told = told_offset
            .map_or(Ok(()), |told| told.write(&mapping))
            .and_then(|()| {
                new.init(Ok::<_, Error>(FerriteDm {
                    dm_pages,
                    context: context.get_ref().ok_or(ENODEV)?,
                    mapping,
                    length: attr.length,
                }))
            });
        if told.is_err() {
            context.unmap_range(mapping);
        }
        told
    }

    /// Ends device memory of a process: it cannot be mapped any more.
    fn dealloc_dm(dm: &Dm<Self>) -> Result {
        dm.context.unmap_range(dm.mapping);
        Ok(())
    }

    fn reg_dm_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        dm: &Dm<Self>,
        region: &DmRegion,
    ) -> Result<&'a Mr<Self>> {
        FerriteMr::register_device_memory(pd, new, dm, region)
    }
}

#[kunit_tests(ferrite_dm)]
mod tests {
    use super::*;

    fn take(map: &mut PageMap, count: usize, align: usize) -> Result<usize> {
        take_of(map, Holder::KERNEL, count, align, false)
    }

    fn take_of(
        map: &mut PageMap,
        holder: Holder,
        count: usize,
        align: usize,
        bound: bool,
    ) -> Result<usize> {
        Spare::provide(|spare| map.take(holder, count, align, bound, spare))
    }

    #[test]
    fn pages_do_not_overlap_and_are_used_again() -> Result {
        let mut map = PageMap::new(8)?;
        assert_eq!(take(&mut map, 3, 1), Ok(0));
        assert_eq!(take(&mut map, 2, 1), Ok(3));
        assert_eq!(take(&mut map, 4, 1), Err(ENOMEM));
        map.give_back(Holder::KERNEL, 0, 3);
        assert_eq!(take(&mut map, 4, 1), Err(ENOMEM));
        assert_eq!(take(&mut map, 3, 1), Ok(0));
        assert_eq!(take(&mut map, 3, 1), Ok(5));
        assert_eq!(take(&mut map, 1, 1), Err(ENOMEM));
        Ok(())
    }

    #[test]
    fn alignment_is_kept() -> Result {
        let mut map = PageMap::new(16)?;
        assert_eq!(take(&mut map, 1, 1), Ok(0));
        assert_eq!(take(&mut map, 2, 4), Ok(4));
        assert_eq!(take(&mut map, 1, 8), Ok(8));
        assert_eq!(take(&mut map, 9, 1), Err(ENOMEM));
        assert_eq!(take(&mut map, 1, 16), Err(ENOMEM));
        Ok(())
    }

    #[test]
    fn no_user_takes_all_pages() -> Result {
        let mut map = PageMap::new(16)?;
        let (one, other) = (Holder::user(1), Holder::user(2));
        assert_eq!(take_of(&mut map, one, 16, 1, true), Err(errno::edquot()));
        assert_eq!(take_of(&mut map, one, 12, 1, true), Ok(0));
        assert_eq!(take_of(&mut map, one, 1, 1, true), Err(errno::edquot()));
        assert_eq!(take_of(&mut map, other, 3, 1, true), Ok(12));
        // There is one left, for who is not bound.
        assert_eq!(take_of(&mut map, one, 2, 1, false), Err(ENOMEM));
        assert_eq!(take_of(&mut map, one, 1, 1, false), Ok(15));
        map.give_back(one, 0, 12);
        assert_eq!(take_of(&mut map, other, 6, 1, true), Ok(0));
        Ok(())
    }
}
