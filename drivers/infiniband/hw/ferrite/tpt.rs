// SPDX-License-Identifier: GPL-2.0

//! The translation and protection table: tags, and the address translation tables (ATT) that tell
//! the device where a buffer's pages are.

use crate::{
    abi::{
        self,
        AllocateTag,
        AttOrder,
        Buffer,
        Command,
        CommandOpcode,
        Tag,
        TagKind,
        ATT_MAX_ROOT_ENTRIES,
        ATT_TABLE_ENTRIES, //
    },
    commands::{
        is_disagreement,
        DeviceObject, //
    },
    device::Ferrite,
    kernel_ext::{
        memory,
        random, //
    },
    numbers::{
        NumberPool,
        NumberShares,
        Shuffle, //
    },
    rdma,
    shares::{
        Holder,
        Spare,
        Table, //
    },
};
use core::ops::Range;
use kernel::{
    device::{
        Bound,
        Device, //
    },
    dma::{
        Coherent,
        CoherentBox, //
    },
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};

/// Hands out tags, which are the keys (lkey, rkey) that work requests and peers name memory by: index and
/// instance are hard to guess from other keys. Each time an index is used again its instance is another one, so that a
/// key that was given away earlier stays refused.
pub(crate) struct TagAllocator {
    /// The least index.
    first: u32,
    /// Places in the shuffle.
    places: NumberShares,
    /// Which index each place has, less `first`.
    shuffle: Shuffle,
    /// By place.
    instances: Table<u8>,
    /// How many places there are.
    count: usize,
}

impl TagAllocator {
    /// An instance used again is ahead of the last one by this at most: so that the one before the
    /// last, and some before that, are not met again.
    const MAX_STEP: u8 = 64;

    /// For a device with table entries for these indices, of 24 bits.
    pub(crate) fn new(indices: Range<u32>) -> Result<Self> {
        let count = indices.len() as u32;
        Ok(Self {
            first: indices.start,
            places: NumberShares::for_all(NumberPool::new(0, count)?),
            shuffle: Shuffle::new(count, core::array::from_fn(|_| random::get_u32())),
            instances: Table::new(count as usize)?,
            count: count as usize,
        })
    }

    /// Takes a tag that is not in use, of a share as [`NumberShares::take`] does.
    pub(crate) fn take(&mut self, holder: Holder, bound: bool, spare: &mut Spare) -> Result<Tag> {
        let random = random::get_u32() as u8;
        // One more than were ever in use, before that: whatever fails, there is an instance for each place.
        if self.instances.len() < (self.places.begun() + 1).min(self.count) {
            self.instances.push(random, spare)?;
        }
        let place = self.places.take(holder, bound, spare)?;
        let last = self.instances.get(place as usize).ok_or(EINVAL)?;
        let instance = last.wrapping_add(1 + random % Self::MAX_STEP);
        self.instances.set(place as usize, instance);
        Ok(Tag::new(self.first + self.shuffle.get(place), instance))
    }

    /// Gives a tag back, which the same one must have taken. Its instance may have been changed since by its consumer (fast
    /// registration): the next use counts on from there.
    pub(crate) fn give_back(&mut self, holder: Holder, tag: Tag) {
        let place = self.shuffle.place_of(tag.index() - self.first);
        if self.instances.set(place as usize, tag.instance()) {
            self.places.give_back(holder, place);
        }
    }
}

/// A [`TagAllocator`] that is shared by those who took tags from it.
#[pin_data]
pub(crate) struct Tags {
    #[pin]
    allocator: Mutex<TagAllocator>,
}

impl Tags {
    /// For a device with table entries for these indices.
    pub(crate) fn new(indices: Range<u32>) -> Result<Arc<Self>> {
        let allocator = TagAllocator::new(indices)?;
        let tags = pin_init!(Self {
            allocator <- new_mutex!(allocator, "ferrite_tags"),
        });
        let tags = Arc::pin_init(tags, GFP_KERNEL)?;
        // Regions of kernel users that disks hang on end, and give their tags back.
        memory::taken_in_reclaim(|| drop(tags.allocator.lock()));
        Ok(tags)
    }

    /// How many tags are in use, and how many there are. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.allocator.lock().places.occupancy()
    }

    /// Takes a tag until the result is dropped: `EDQUOT` beyond a user's share, `ENOSPC` when all are in use.
    /// Sleeps.
    pub(crate) fn take(self: &Arc<Self>, holder: Holder) -> Result<TakenTag> {
        let tag = holder.take_from(&self.allocator, |allocator, bound, spare| {
            allocator.take(holder, bound, spare)
        })?;
        Ok(TakenTag {
            tag,
            holder,
            latest: Atomic::new(tag.0),
            tags: self.clone(),
        })
    }
}

/// A tag that is in use; given back when dropped, which sleeps.
pub(crate) struct TakenTag {
    tag: Tag,
    holder: Holder,
    latest: Atomic<u32>,
    tags: Arc<Tags>,
}

impl TakenTag {
    /// The tag as it was taken.
    pub(crate) fn get(&self) -> Tag {
        self.tag
    }

    /// Notes what the consumer has made of the tag: the instance may differ.
    pub(crate) fn note_latest(&self, tag: Tag) {
        if tag.index() == self.tag.index() {
            self.latest.store(tag.0, Relaxed);
        }
    }

    /// Notes that work requests of a process gave the tag instances of which the kernel does not know:
    /// the farthest one is the one that stays refused longest.
    pub(crate) fn note_farthest(&self) {
        let instance = self.tag.instance().wrapping_add(128);
        self.note_latest(Tag::new(self.tag.index(), instance));
    }
}

impl Drop for TakenTag {
    fn drop(&mut self) {
        let latest = Tag(self.latest.load(Relaxed));
        self.tags.allocator.lock().give_back(self.holder, latest);
    }
}

/// Has the device make what a tag is to stand for, by `command`. Where what uses a tag waits for that, this does not,
/// and what the command names has to stay until the result is dropped, which goes first then. Sleeps.
pub(crate) fn make<C: Command>(
    dev: &rdma::Device<Ferrite>,
    command: &C,
    tag: Tag,
) -> Result<DeviceObject> {
    let make = if dev.has(abi::FEATURE_PENDING_TAGS) {
        DeviceObject::post
    } else {
        DeviceObject::create
    };
    make(&dev.hw, command, CommandOpcode::ReleaseTag, tag.0).map_err(|error| {
        if !is_disagreement(error) {
            return error;
        }
        // There is something of which the driver does not know, and which may name memory that is somebody else's by now.
        dev.hw.fail();
        EIO
    })
}

/// A tag that the device keeps a place for. Whoever has both parts drops the object first: the tag is nobody else's
/// before the device has let go of it.
pub(crate) struct Allocated {
    pub(crate) object: DeviceObject,
    pub(crate) tag: TakenTag,
}

/// Takes a tag for what is registered by work request, or bound, and has the device keep a place for so many pages of
/// it. Sleeps.
pub(crate) fn allocate(pd: &rdma::Pd<Ferrite>, kind: TagKind, max_pages: u32) -> Result<Allocated> {
    let dev = pd.device();
    let tag = dev.tags.take(pd.holder())?;
    let command = AllocateTag {
        tag: tag.get().0,
        pd: pd.number(),
        kind: kind.number(),
        reserved: [0; 3],
        max_pages,
    };
    let object = make(dev, &command, tag.get())?;
    Ok(Allocated { object, tag })
}

/// Memory for address translation tables (ATT), which the device reads.
pub(crate) trait AttTables {
    /// Puts `entries` in a table of its own; returns the table's DMA address.
    fn table(&mut self, entries: &[u64]) -> Result<u64>;
}

/// Tables in coherent memory.
struct CoherentAttTables<'a> {
    dev: &'a Device<Bound>,
    tables: KVVec<Coherent<[u64]>>,
}

impl AttTables for CoherentAttTables<'_> {
    fn table(&mut self, entries: &[u64]) -> Result<u64> {
        // Coherent memory is page-aligned, as the device wants a table.
        let table: Coherent<[u64]> =
            CoherentBox::from_slice(self.dev, entries, GFP_KERNEL_ACCOUNT)?.into();
        let address = table.dma_handle();
        self.tables.push(table, GFP_KERNEL_ACCOUNT)?;
        Ok(address)
    }
}

/// Whether the pages follow each other, so that no table is needed.
fn contiguous(pages: &[u64], page_shift: u8) -> bool {
    pages
        .windows(2)
        .all(|pair| pair[0].checked_add(1 << page_shift) == Some(pair[1]))
}

/// Describes the `length` bytes that start at `fbo` of the first of `pages`.
pub(crate) fn lay_out(
    pages: &[u64],
    page_shift: u8,
    fbo: u32,
    length: u64,
    tables: &mut impl AttTables,
) -> Result<Buffer> {
    let mut buffer = Buffer {
        root: 0,
        length,
        fbo,
        page_shift,
        order: 0,
        reserved: 0,
    };
    if buffer.pages() != Some(pages.len() as u64) {
        return Err(EINVAL);
    }
    let order = if contiguous(pages, page_shift) {
        AttOrder::Direct
    } else {
        Buffer::order_for(pages.len() as u64).ok_or(EFBIG)?
    };
    buffer.order = order.number();
    buffer.root = match order {
        AttOrder::Direct => pages.first().copied().unwrap_or(0),
        AttOrder::First => tables.table(pages)?,
        AttOrder::Second => {
            let count = pages.len().div_ceil(ATT_TABLE_ENTRIES);
            if count > ATT_MAX_ROOT_ENTRIES {
                return Err(EFBIG);
            }
            let mut root = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
            for leaf in pages.chunks(ATT_TABLE_ENTRIES) {
                root.push(tables.table(leaf)?, GFP_KERNEL_ACCOUNT)?;
            }
            tables.table(&root)?
        }
    };
    Ok(buffer)
}

/// A buffer the device can reach, with the tables that describe it.
///
/// The device reads the tables whenever it uses the buffer: this must outlive what was made with
/// it.
pub(crate) struct Att {
    buffer: Buffer,
    _tables: KVVec<Coherent<[u64]>>,
}

impl Att {
    /// Describes `length` bytes from `fbo` of the first page of `pages`.
    pub(crate) fn new(
        dev: &Device<Bound>,
        pages: &[u64],
        page_shift: u8,
        fbo: u32,
        length: u64,
    ) -> Result<Self> {
        let mut tables = CoherentAttTables {
            dev,
            tables: KVVec::new(),
        };
        let buffer = lay_out(pages, page_shift, fbo, length, &mut tables)?;
        Ok(Self {
            buffer,
            _tables: tables.tables,
        })
    }

    /// What to tell the device.
    pub(crate) fn buffer(&self) -> Buffer {
        self.buffer
    }
}

#[kunit_tests(ferrite_tpt)]
mod tests {
    use super::*;

    fn take(tags: &mut TagAllocator) -> Result<Tag> {
        Spare::provide(|spare| tags.take(Holder::KERNEL, false, spare))
    }

    #[test]
    fn tags_are_given_out_after_some_could_not_be() -> Result {
        let mut tags = TagAllocator::new(1..1000)?;
        // There is no memory, or a place was taken and then nothing came of it.
        let failed = tags.take(Holder::KERNEL, false, &mut Spare::default());
        assert_eq!(failed, Err(ENOMEM));
        let place = Spare::provide(|spare| tags.places.take(Holder::KERNEL, false, spare))?;
        tags.places.give_back(Holder::KERNEL, place);
        for _ in 0..300 {
            take(&mut tags)?;
        }
        assert_eq!(tags.places.occupancy().0, 300);
        Ok(())
    }

    /// Tables in ordinary memory; table `n` has address `(n + 1) << 32`.
    struct Recorded(KVVec<KVVec<u64>>);

    impl AttTables for Recorded {
        fn table(&mut self, entries: &[u64]) -> Result<u64> {
            let mut table = KVVec::with_capacity(entries.len(), GFP_KERNEL)?;
            table.extend_from_slice(entries, GFP_KERNEL)?;
            self.0.push(table, GFP_KERNEL)?;
            Ok((self.0.len() as u64) << 32)
        }
    }

    /// Pages of 4 KiB, each two pages after the one before it.
    fn scattered(count: usize) -> Result<KVVec<u64>> {
        let mut pages = KVVec::with_capacity(count, GFP_KERNEL)?;
        for page in 0..count as u64 {
            pages.push(0x10_0000 + page * 0x2000, GFP_KERNEL)?;
        }
        Ok(pages)
    }

    /// Finds the page of byte `byte` as the device does.
    fn translate(buffer: &Buffer, tables: &Recorded, byte: u64) -> Option<u64> {
        let offset = u64::from(buffer.fbo) + byte;
        let page = (offset >> buffer.page_shift) as usize;
        let rest = offset & ((1 << buffer.page_shift) - 1);
        let at = |address: u64, index: usize| -> Option<u64> {
            let table = (address >> 32) as usize - 1;
            tables.0.get(table)?.get(index).copied()
        };
        let start = match AttOrder::from_number(buffer.order)? {
            AttOrder::Direct => buffer.root + ((page as u64) << buffer.page_shift),
            AttOrder::First => at(buffer.root, page)?,
            AttOrder::Second => at(
                at(buffer.root, page / ATT_TABLE_ENTRIES)?,
                page % ATT_TABLE_ENTRIES,
            )?,
        };
        Some(start + rest)
    }

    fn check(pages: usize, fbo: u32, order: AttOrder) -> Result {
        let addresses = scattered(pages)?;
        let length = pages as u64 * 4096 - u64::from(fbo);
        let mut tables = Recorded(KVVec::new());
        let buffer = lay_out(&addresses, 12, fbo, length, &mut tables)?;
        assert_eq!(buffer.order, order.number());
        for (index, address) in addresses.iter().enumerate() {
            // The last byte of each page.
            let byte = index as u64 * 4096 + 4095 - u64::from(fbo);
            assert_eq!(translate(&buffer, &tables, byte), Some(*address + 4095));
        }
        Ok(())
    }

    #[test]
    fn one_page_needs_no_table() -> Result {
        check(1, 17, AttOrder::Direct)
    }

    #[test]
    fn up_to_a_table_of_pages_is_first_order() -> Result {
        check(2, 0, AttOrder::First)?;
        check(ATT_TABLE_ENTRIES, 4095, AttOrder::First)
    }

    #[test]
    fn more_than_a_table_of_pages_is_second_order() -> Result {
        check(ATT_TABLE_ENTRIES + 1, 0, AttOrder::Second)?;
        check(3 * ATT_TABLE_ENTRIES, 100, AttOrder::Second)
    }

    #[test]
    fn contiguous_pages_are_direct_however_many() -> Result {
        let mut tables = Recorded(KVVec::new());
        let pages = [0x4000u64, 0x5000, 0x6000];
        let buffer = lay_out(&pages, 12, 8, 3 * 4096 - 8, &mut tables)?;
        assert_eq!(buffer.order, AttOrder::Direct.number());
        assert_eq!(buffer.root, 0x4000);
        assert!(tables.0.is_empty());
        Ok(())
    }

    #[test]
    fn pages_of_4_kib_to_1_gib_take_one_entry_each() -> Result {
        for shift in 12..=30u8 {
            let size = 1u64 << shift;
            let pages = [7 * size, 3 * size, 5 * size];
            let mut tables = Recorded(KVVec::new());
            let fbo = size as u32 - 1;
            let buffer = lay_out(&pages, shift, fbo, 2 * size + 1, &mut tables)?;
            assert_eq!(tables.0.iter().map(|table| table.len()).sum::<usize>(), 3);
            for (byte, place) in [
                (0, pages[0] + size - 1),
                (1, pages[1]),
                (size, pages[1] + size - 1),
                (size + 1, pages[2]),
                (2 * size, pages[2] + size - 1),
            ] {
                assert_eq!(translate(&buffer, &tables, byte), Some(place));
            }
        }
        Ok(())
    }

    #[test]
    fn a_page_count_that_does_not_fit_the_length_is_refused() -> Result {
        let mut tables = Recorded(KVVec::new());
        let pages = scattered(3)?;
        assert!(lay_out(&pages, 12, 0, 2 * 4096, &mut tables).is_err());
        assert!(lay_out(&pages, 12, 0, 3 * 4096 + 1, &mut tables).is_err());
        assert!(lay_out(&pages, 12, 4096, 2 * 4096, &mut tables).is_err());
        Ok(())
    }

    #[test]
    fn an_index_used_again_has_another_instance() -> Result {
        let mut tags = TagAllocator::new(1..2)?;
        let first = take(&mut tags)?;
        assert_eq!(first.index(), 1);
        assert_eq!(take(&mut tags), Err(ENOSPC));
        tags.give_back(Holder::KERNEL, first);
        let second = take(&mut tags)?;
        assert_eq!(second.index(), 1);
        assert!(second.instance() != first.instance());
        Ok(())
    }

    #[test]
    fn the_last_place_of_a_full_table_is_used_again() -> Result {
        // As many as a table has room for that grew to its end.
        const COUNT: u32 = 4096;
        let mut tags = TagAllocator::new(1..COUNT + 1)?;
        let mut last = take(&mut tags)?;
        for _ in 1..COUNT {
            last = take(&mut tags)?;
        }
        for _ in 0..3 {
            assert_eq!(take(&mut tags), Err(ENOSPC));
            tags.give_back(Holder::KERNEL, last);
            last = take(&mut tags)?;
        }
        Ok(())
    }

    #[test]
    fn the_instance_counts_on_from_what_the_consumer_made_of_it() -> Result {
        let mut tags = TagAllocator::new(1..2)?;
        let tag = take(&mut tags)?;
        let used = Tag::new(tag.index(), 255);
        tags.give_back(Holder::KERNEL, used);
        assert!(take(&mut tags)?.instance() < TagAllocator::MAX_STEP);
        Ok(())
    }

    #[test]
    fn a_key_says_little_about_the_next() -> Result {
        const TAGS: usize = 1000;
        let mut tags = TagAllocator::new(1..1 << 20)?;
        let mut last = take(&mut tags)?;
        let (mut near, mut same) = (0, 0);
        for _ in 0..TAGS {
            let tag = take(&mut tags)?;
            near += u32::from(tag.index().abs_diff(last.index()) < 256);
            same += u32::from(tag.instance() == last.instance());
            last = tag;
        }
        // By chance one in 2000 indices is near the last, and one in 256 instances the same.
        assert!(near < 20 && same < 50);
        // Another device, or the same one later, has others.
        let (mut one, mut other) = (
            TagAllocator::new(1..1 << 20)?,
            TagAllocator::new(1..1 << 20)?,
        );
        let mut met = 0;
        for _ in 0..TAGS {
            met += u32::from(take(&mut one)?.index() == take(&mut other)?.index());
        }
        assert!(met < 10);
        Ok(())
    }

    #[test]
    fn the_indices_of_the_device_are_given_out_and_no_others() -> Result {
        for indices in [1..100u32, 0xff_ff00..1 << 24] {
            let mut tags = TagAllocator::new(indices.clone())?;
            let mut seen = KVec::from_elem(false, indices.len(), GFP_KERNEL)?;
            for _ in indices.clone() {
                let tag = take(&mut tags)?;
                assert!(indices.contains(&tag.index()));
                let place = (tag.index() - indices.start) as usize;
                assert!(!core::mem::replace(&mut seen[place], true));
            }
            assert!(take(&mut tags).is_err());
            let last = Tag::new(indices.end - 1, 7);
            tags.give_back(Holder::KERNEL, last);
            assert_eq!(take(&mut tags)?.index(), last.index());
        }
        Ok(())
    }
}
