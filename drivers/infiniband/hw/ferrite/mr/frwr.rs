// SPDX-License-Identifier: GPL-2.0

//! Fast registration (FRWR): lists of pages of kernel users, and their registration by work request.

use super::{
    rights::registered_access,
    FerriteMr,
    RegionMemory, //
};
use crate::{
    abi,
    abi::{
        AttOrder,
        Buffer,
        FastRegisterPart,
        TagKind,
        ATT_TABLE_ENTRIES, //
    },
    device::Ferrite,
    kernel_ext::errno,
    lent::{
        Leak,
        Lent, //
    },
    rdma::{
        kind,
        Device,
        FrwrOps,
        Mr,
        New,
        Pd,
        RegWr, //
    }, //
};
use core::mem;
use kernel::{
    dma::Coherent,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

/// The pages of a region that is registered by work request (FRWR).
pub(super) struct FrwrPages {
    tables: Lent<FrwrTables>,
    used: Atomic<u32>,
}

/// Room for the addresses of those pages.
struct FrwrTables {
    /// All but the last are full tables.
    leaves: KVec<Coherent<[u64]>>,
    /// The addresses of those, where there are several.
    root: Option<Coherent<[u64]>>,
    /// How many pages there is room for.
    pages: u32,
}

impl Leak for FrwrTables {
    fn leak(self) {
        mem::forget(self);
    }
}

/// The lengths of the tables that `pages` pages take.
fn leaf_lengths(pages: u32) -> impl Iterator<Item = usize> {
    let pages = pages as usize;
    (0..pages)
        .step_by(ATT_TABLE_ENTRIES)
        .map(move |first| ATT_TABLE_ENTRIES.min(pages - first))
}

/// In which of those tables the page at `index` is, and where in it; none beyond the last page.
fn place_in_leaves(index: u32, pages: u32) -> Option<(usize, usize)> {
    let at = index as usize;
    (index < pages).then_some((at / ATT_TABLE_ENTRIES, at % ATT_TABLE_ENTRIES))
}

impl FrwrTables {
    /// Room for `pages` pages, at least one.
    fn new(dev: &Device<Ferrite>, pages: u32) -> Result<Self> {
        let parent = dev.parent();
        let mut leaves = KVec::new();
        for entries in leaf_lengths(pages) {
            leaves.push(
                Coherent::zeroed_slice(parent, entries, GFP_KERNEL)?,
                GFP_KERNEL,
            )?;
        }
        let root = if leaves.len() > 1 {
            let root: Coherent<[u64]> = Coherent::zeroed_slice(parent, leaves.len(), GFP_KERNEL)?;
            for (index, leaf) in leaves.iter().enumerate() {
                kernel::dma_write!(root, [try: index], leaf.dma_handle());
            }
            Some(root)
        } else {
            None
        };
        Ok(Self {
            leaves,
            root,
            pages,
        })
    }

    /// Sets the address of a page; `ENOMEM` where there is no room for it.
    fn set(&self, index: u32, address: u64) -> Result {
        let (leaf, at) = place_in_leaves(index, self.pages).ok_or(ENOMEM)?;
        let leaf = self.leaves.get(leaf).ok_or(ENOMEM)?;
        kernel::dma_write!(leaf, [try: at], address);
        Ok(())
    }

    /// How the first `pages` of them are told to the device: the order, and the address of the table.
    fn start(&self, pages: u64) -> Result<(AttOrder, u64)> {
        let order = list_order(pages).ok_or(EINVAL)?;
        let table = match order {
            AttOrder::Second => self.root.as_ref(),
            _ => self.leaves.first(),
        };
        Ok((order, table.ok_or(EINVAL)?.dma_handle()))
    }
}

/// The order of a list of `pages` pages, which are in tables however few there are.
fn list_order(pages: u64) -> Option<AttOrder> {
    match Buffer::order_for(pages)? {
        AttOrder::Direct => Some(AttOrder::First),
        order => Some(order),
    }
}

impl FerriteMr {
    /// Makes a key under which lists of up to `pieces` pieces of other regions are registered by work
    /// request. Nothing is pinned for it.
    pub(super) fn allocate_list<'a>(
        pd: &Pd<Ferrite>,
        new: New<'a, kind::Mr, Ferrite>,
        pieces: u32,
    ) -> Result<&'a Mr<Ferrite>> {
        let memory = RegionMemory::List { most: pieces };
        Self::allocate_tag(pd, new, TagKind::List, pieces, memory)
    }

    /// The work request that registers the listed pages.
    pub(crate) fn register_part(registration: &RegWr<'_, Ferrite>) -> Result<FastRegisterPart> {
        let &RegWr { mr, key, access } = registration;
        let RegionMemory::Frwr(list) = &mr.memory else {
            return Err(EINVAL);
        };
        let page_size = u64::from(mr.page_size());
        if !page_size.is_power_of_two() || mr.device().caps.page_sizes & page_size == 0 {
            return Err(EINVAL);
        }
        let pages = list.used.load(Relaxed).into();
        let (order, root) = list.tables.start(pages)?;
        let buffer = Buffer {
            root,
            length: mr.length(),
            fbo: (mr.iova() & (page_size - 1)) as u32,
            page_shift: page_size.trailing_zeros() as u8,
            order: order.number(),
            reserved: 0,
        };
        if buffer.pages() != Some(pages) {
            return Err(EINVAL);
        }
        Ok(FastRegisterPart {
            tag: key,
            access: registered_access(access, mr.device().features())?,
            address: mr.iova(),
            buffer,
            reserved: 0,
        })
    }
}

impl FrwrOps for Ferrite {
    /// Makes a region of up to `pages` pages that is registered by work request.
    fn alloc_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        pages: u32,
    ) -> Result<&'a Mr<Self>> {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_FAST_REGISTER) {
            return Err(errno::eopnotsupp());
        }
        if pages == 0 || pages > dev.caps.max_fast_register_pages {
            return Err(EINVAL);
        }
        let list = FrwrPages {
            tables: Lent::new(&dev.hw.reach, FrwrTables::new(dev, pages)?),
            used: Atomic::new(0),
        };
        FerriteMr::allocate_tag(pd, new, TagKind::Region, pages, RegionMemory::Frwr(list))
    }

    /// Forgets the pages that were listed.
    fn begin_mr_map(mr: &Mr<Self>) {
        if let RegionMemory::Frwr(list) = &mr.memory {
            list.used.store(0, Relaxed);
        }
    }

    /// Adds the page at `addr` to the list; `ENOMEM` when it is full.
    fn push_mr_page(mr: &Mr<Self>, addr: u64) -> Result {
        let RegionMemory::Frwr(list) = &mr.memory else {
            return Err(EINVAL);
        };
        let index = list.used.load(Relaxed);
        list.tables.set(index, addr)?;
        list.used.store(index + 1, Relaxed);
        Ok(())
    }
}

#[kunit_tests(ferrite_mr_frwr)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_pages_is_in_one_table_or_in_tables_of_a_table() {
        let entries = ATT_TABLE_ENTRIES as u64;
        for pages in [0, 1, 2, entries] {
            assert_eq!(list_order(pages), Some(AttOrder::First));
        }
        for pages in [entries + 1, 1 << 16] {
            assert_eq!(list_order(pages), Some(AttOrder::Second));
        }
    }

    #[test]
    fn each_page_of_a_list_has_a_place_and_those_beyond_it_none() {
        let entries = ATT_TABLE_ENTRIES as u32;
        for pages in [
            1,
            2,
            entries - 1,
            entries,
            entries + 1,
            600,
            2 * entries,
            1 << 16,
        ] {
            let mut next = 0;
            for (leaf, length) in leaf_lengths(pages).enumerate() {
                assert!((1..=ATT_TABLE_ENTRIES).contains(&length));
                for at in 0..length {
                    assert_eq!(place_in_leaves(next, pages), Some((leaf, at)));
                    next += 1;
                }
            }
            assert_eq!(next, pages);
            for beyond in [pages, pages + 1, pages.next_multiple_of(entries), u32::MAX] {
                assert_eq!(place_in_leaves(beyond, pages), None);
            }
        }
    }
}
