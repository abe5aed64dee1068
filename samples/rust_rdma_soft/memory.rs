// SPDX-License-Identifier: GPL-2.0

//! Memory that work requests name, and the copying of it.
//!
//! The device is registered as one whose DMA addresses are addresses of the kernel
//! ([`crate::rdma::DeviceInfo::virtual_dma`]): what a work request names can be copied by the processor.

use crate::bindings;
use crate::driver::{Soft, MAX_PAGES};
use crate::kernel_ext::cpu::cond_resched;
use crate::kernel_ext::errno::eopnotsupp;
use crate::rdma::{Access, Device, MrRef, Qp, Sge, Umem, UserRegion};
use core::marker::PhantomData;
use core::ptr;
use kernel::page::PAGE_SIZE;
use kernel::prelude::*;

/// Entries of a gather or scatter list.
pub(crate) const MAX_SGE: usize = 4;

/// The key for all local memory, of users in the kernel only.
pub(crate) const LOCAL_DMA_LKEY: u32 = 0;

/// A gather or scatter list, as posted.
///
/// # Invariants
///
/// With `of_kernel` it was posted by a user in the kernel, for whom [`LOCAL_DMA_LKEY`] stands for memory of its own,
/// which it leaves until the work request is complete.
#[derive(Clone, Copy)]
pub(crate) struct Local {
    entries: [Entry; MAX_SGE],
    count: usize,
    of_kernel: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    addr: u64,
    length: u32,
    key: u32,
}

impl Local {
    /// A copy of a list that is posted to `qp`; `EINVAL` where it has too many entries.
    pub(crate) fn new(qp: &Qp<Soft>, sges: &[Sge]) -> Result<Self> {
        let mut entries = [Entry {
            addr: 0,
            length: 0,
            key: 0,
        }; MAX_SGE];
        if sges.len() > MAX_SGE {
            return Err(EINVAL);
        }
        for (entry, sge) in entries.iter_mut().zip(sges) {
            *entry = Entry {
                addr: sge.addr(),
                length: sge.length(),
                key: sge.lkey(),
            };
        }
        // INVARIANT: To a queue pair that is no process's only its owner in the kernel posts, as it must for any
        // device: memory of its own, until it is told of the completion.
        Ok(Self {
            entries,
            count: sges.len(),
            of_kernel: !qp.is_user(),
        })
    }

    /// How many bytes it has.
    pub(crate) fn length(&self) -> u64 {
        let entries = &self.entries[..self.count];
        entries.iter().map(|entry| u64::from(entry.length)).sum()
    }

    /// The memory of the first `length` bytes of it, if `find` finds what each entry names of them: what nobody touches
    /// may be wrong. The work request is not complete before it is gone.
    pub(crate) fn spans(
        &self,
        length: u64,
        find: impl Fn(u32, u64, u64) -> Option<Span<'static>>,
    ) -> Option<Spans<'_>> {
        let mut spans = Spans::default();
        let mut left = length;
        let entries = &self.entries[..self.count];
        for (span, entry) in spans.0.iter_mut().zip(entries) {
            let length = left.min(u64::from(entry.length));
            if length == 0 {
                continue;
            }
            left -= length;
            // Nothing ends beyond the last address.
            entry.addr.checked_add(length)?;
            *span = Some(if self.of_kernel && entry.key == LOCAL_DMA_LKEY {
                // SAFETY: By the type invariant it is memory of who posted, who leaves it until the work request is
                // complete: after this list, which the span borrows, is done with.
                unsafe { Span::of_kernel(entry.addr, length) }
            } else {
                find(entry.key, entry.addr, length)?
            });
        }
        Some(spans)
    }
}

/// What a registration says of a region besides its key, as of when it was posted.
#[derive(Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: Access,
}

/// What processes may ask for of a region.
const PROCESS_ACCESS: u32 = Access::LOCAL_WRITE.as_raw()
    | Access::REMOTE_READ.as_raw()
    | Access::REMOTE_WRITE.as_raw()
    | Access::REMOTE_ATOMIC.as_raw()
    | Access::HUGETLB.as_raw();

/// What processes may ask for without knowing whether the device has it.
const OPTIONAL_ACCESS: u32 = bindings::ib_access_flags_IB_ACCESS_OPTIONAL;

/// The pages of a region: what its consumer mapped last, and what a work request registered it with; or those of a
/// process's memory.
///
/// # Invariants
///
/// `list` has addresses of the kernel, of pages that can be read, and written as far as the region is registered so, as
/// long as work requests are done with them.
pub(crate) struct Pages {
    /// Addresses of pages; there is room for as many as the region may have.
    list: KVVec<u64>,
    room: usize,
    iova: u64,
    length: u64,
    /// Set while it is registered.
    valid: Option<(u32, Access)>,
    /// The process's memory, which is pinned with this.
    umem: Option<Umem>,
}

impl Pages {
    /// Room for so many pages.
    pub(crate) fn new(room: usize) -> Result<Self> {
        Ok(Self {
            list: KVVec::with_capacity(room, GFP_KERNEL_ACCOUNT)?,
            room,
            iova: 0,
            length: 0,
            valid: None,
            umem: None,
        })
    }

    /// Memory of the current process, pinned and registered for as long as the region is there, under a key that
    /// [`Pages::with_key`] has yet to say. Waits for the pages, which the process may keep from being there
    /// (`userfaultfd`).
    pub(crate) fn of_process(dev: &Device<Soft>, region: &UserRegion) -> Result<Self> {
        // Of what is optional a device does what it can.
        let access = Access::from_raw(region.access.as_raw() & !OPTIONAL_ACCESS);
        if access.as_raw() & !PROCESS_ACCESS != 0 {
            return Err(eopnotsupp());
        }
        let in_page = |addr: u64| addr % PAGE_SIZE as u64;
        let length = usize::try_from(region.length)?;
        if length > MAX_PAGES as usize * PAGE_SIZE || in_page(region.start) != in_page(region.iova)
        {
            return Err(EINVAL);
        }
        let umem = Umem::get(dev, region.start, length, access)?;
        let mut pages = Self::new(umem.num_blocks(PAGE_SIZE))?;
        for addr in umem.blocks(PAGE_SIZE) {
            // SAFETY: DMA addresses of the device are those of the kernel (`virtual_dma`). The page is pinned until
            // `pages`, which gets the umem below, is dropped; it is pinned to be written where the rights, which it is
            // registered with below, say so (`ib_access_writable`).
            unsafe { pages.push(addr) }?;
        }
        let mapping = Mapping {
            iova: region.iova,
            length: region.length,
            access,
        };
        if !pages.register(LOCAL_DMA_LKEY, &mapping) {
            return Err(EINVAL);
        }
        pages.umem = Some(umem);
        Ok(pages)
    }

    /// The same, under `key` if it is registered.
    pub(crate) fn with_key(mut self, key: u32) -> Self {
        self.valid = self.valid.map(|(_, access)| (key, access));
        self
    }

    /// Forgets all pages.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Adds a page; `ENOMEM` where there is no room.
    ///
    /// # Safety
    ///
    /// It must be one that the processor can read and write at `addr`, as far as the region is registered to be
    /// written, as long as work requests that name the region are done.
    pub(crate) unsafe fn push(&mut self, addr: u64) -> Result {
        if self.list.len() == self.room {
            return Err(ENOMEM);
        }
        // INVARIANT: The caller vouches for the page.
        self.list.push_within_capacity(addr).map_err(|_| ENOMEM)
    }

    /// Registers what was mapped; returns whether that could be: not while it is registered, and nothing that
    /// ends beyond the last address.
    pub(crate) fn register(&mut self, key: u32, mapping: &Mapping) -> bool {
        let (iova, length) = (mapping.iova, mapping.length);
        let Some(end) = iova.checked_add(length) else {
            return false;
        };
        let pages = end.div_ceil(PAGE_SIZE as u64) - iova / PAGE_SIZE as u64;
        if self.valid.is_some() || pages > self.list.len() as u64 {
            return false;
        }
        (self.iova, self.length) = (iova, length);
        self.valid = Some((key, mapping.access));
        true
    }

    /// Ends the registration under `key`; returns whether there was one that work requests may end: a process's memory
    /// stays registered.
    pub(crate) fn invalidate(&mut self, key: u32) -> bool {
        let was = self.umem.is_none() && self.valid.is_some_and(|(valid, _)| valid == key);
        if was {
            self.valid = None;
        }
        was
    }

    /// Whether `length` bytes from `addr` on may be used so under `key`.
    pub(crate) fn allows(&self, key: u32, addr: u64, length: u64, access: Access) -> bool {
        let Some(offset) = addr.checked_sub(self.iova) else {
            return false;
        };
        let inside = offset <= self.length && length <= self.length - offset;
        self.valid
            .is_some_and(|(valid, allowed)| valid == key && allowed.contains(access) && inside)
    }

    /// Where a byte is, and how many follow it there.
    fn at(&self, addr: u64) -> Option<(u64, usize)> {
        let in_page = addr % PAGE_SIZE as u64;
        let first = self.iova - self.iova % PAGE_SIZE as u64;
        let page = addr.checked_sub(first)? / PAGE_SIZE as u64;
        let page = *self.list.get(usize::try_from(page).ok()?)?;
        Some((page + in_page, PAGE_SIZE - in_page as usize))
    }
}

/// Memory in one piece, as somebody sees it.
///
/// # Invariants
///
/// Without a region it is memory of the kernel that can be read, and written where it is the sink of a [`copy`], for
/// `'a`.
pub(crate) struct Span<'a> {
    /// The region that addresses are of; those of the kernel without.
    mr: Option<MrRef<Soft>>,
    addr: u64,
    length: u64,
    _bytes: PhantomData<&'a mut [u8]>,
}

impl<'a> Span<'a> {
    /// Memory of the kernel's.
    ///
    /// # Safety
    ///
    /// It must be memory that can be read, and written where this is the sink of a [`copy`], for `'a`.
    unsafe fn of_kernel(addr: u64, length: u64) -> Self {
        // INVARIANT: The caller vouches for the memory.
        Self {
            mr: None,
            addr,
            length,
            _bytes: PhantomData,
        }
    }

    /// Memory of the caller's.
    pub(crate) fn of_bytes(bytes: &'a mut [u8]) -> Self {
        // SAFETY: It is borrowed for `'a`.
        unsafe { Self::of_kernel(bytes.as_mut_ptr() as u64, bytes.len() as u64) }
    }

    /// Memory of a region, which must be found to allow that.
    pub(crate) fn of_region(mr: MrRef<Soft>, addr: u64, length: u64) -> Self {
        Self {
            mr: Some(mr),
            addr,
            length,
            _bytes: PhantomData,
        }
    }

    /// Where byte `offset` is, and how many follow it there.
    fn at(&self, offset: u64) -> Option<(u64, usize)> {
        let left = self.length.checked_sub(offset).filter(|left| *left != 0)?;
        let addr = self.addr + offset;
        let (addr, there) = match &self.mr {
            None => (addr, usize::MAX),
            Some(mr) => mr.pages.lock().at(addr)?,
        };
        Some((addr, there.min(usize::try_from(left).unwrap_or(usize::MAX))))
    }
}

/// Memory in several pieces, one behind the other.
#[derive(Default)]
pub(crate) struct Spans<'a>([Option<Span<'a>>; MAX_SGE]);

impl<'a> From<Span<'a>> for Spans<'a> {
    fn from(span: Span<'a>) -> Self {
        let mut spans = Self::default();
        spans.0[0] = Some(span);
        spans
    }
}

impl Spans<'_> {
    fn at(&self, mut offset: u64) -> Option<(u64, usize)> {
        for span in self.0.iter().flatten() {
            if offset < span.length {
                return span.at(offset);
            }
            offset -= span.length;
        }
        None
    }
}

/// The side of a copy that had fewer bytes than were to be copied.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Short {
    Source,
    Sink,
}

/// What is copied in one piece. Others may want the processor afterwards.
const AT_ONCE: usize = 1 << 18;

/// Copies `length` bytes. May sleep.
pub(crate) fn copy(from: &Spans<'_>, to: &Spans<'_>, length: u64) -> Result<(), Short> {
    let mut done = 0;
    while done < length {
        let (source, have) = from.at(done).ok_or(Short::Source)?;
        let (sink, room) = to.at(done).ok_or(Short::Sink)?;
        let left = usize::try_from(length - done).unwrap_or(usize::MAX);
        let part = have.min(room).min(left).min(AT_ONCE);
        // SAFETY: By the invariants of spans and of the pages of regions, which the spans have counts of, both are
        // memory of the kernel that can be read, and written where it is the sink; the work request that they are
        // of is not complete. `at` has told how many bytes are there. Source and sink may be the same.
        unsafe { ptr::copy(source as *const u8, sink as *mut u8, part) };
        done += part as u64;
        cond_resched();
    }
    Ok(())
}

#[kunit_tests(rust_rdma_soft_memory)]
mod tests {
    use super::*;
    use core::cell::Cell;

    const PAGE: u64 = PAGE_SIZE as u64;

    /// Pages that nobody copies.
    fn two_pages() -> Result<Pages> {
        let mut pages = Pages::new(2)?;
        for addr in [7 * PAGE, 3 * PAGE] {
            // SAFETY: No work request is done with it: the tests look at addresses only.
            unsafe { pages.push(addr) }?;
        }
        Ok(pages)
    }

    #[test]
    fn a_region_is_used_as_it_was_registered() -> Result {
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let mut pages = two_pages()?;
        // SAFETY: It is not added.
        assert_eq!(unsafe { pages.push(5 * PAGE) }, Err(ENOMEM));
        let mapping = |length| Mapping {
            iova: PAGE + 10,
            length,
            access: all,
        };
        // More than was mapped.
        assert!(!pages.register(0x101, &mapping(2 * PAGE)));
        assert!(pages.register(0x100, &mapping(PAGE)));
        assert!(!pages.register(0x102, &mapping(PAGE)));
        let mut pages = pages.with_key(0x101);
        assert!(!pages.allows(0x100, PAGE + 10, PAGE, Access::REMOTE_READ));
        assert!(pages.allows(0x101, PAGE + 10, PAGE, Access::REMOTE_READ));
        assert!(pages.allows(0x101, 2 * PAGE + 10, 0, Access::REMOTE_READ));
        assert!(!pages.allows(0x101, PAGE + 9, 1, Access::REMOTE_READ));
        assert!(!pages.allows(0x101, PAGE + 11, PAGE, Access::REMOTE_READ));
        assert!(!pages.allows(0x101, PAGE + 10, u64::MAX, Access::REMOTE_READ));
        assert!(!pages.allows(0x101, PAGE + 10, 1, Access::REMOTE_WRITE));
        assert!(!pages.allows(0x102, PAGE + 10, 1, Access::REMOTE_READ));
        assert_eq!(pages.at(PAGE + 10), Some((7 * PAGE + 10, PAGE_SIZE - 10)));
        assert_eq!(pages.at(2 * PAGE + 3), Some((3 * PAGE + 3, PAGE_SIZE - 3)));
        assert_eq!(pages.at(3 * PAGE), None);
        assert!(!pages.invalidate(0x102) && pages.invalidate(0x101));
        assert!(!pages.allows(0x101, PAGE + 10, 1, Access::REMOTE_READ));
        Ok(())
    }

    #[test]
    fn bytes_are_copied_from_piece_to_piece() {
        let mut sources = ([1u8, 2], [4u8, 5, 6], [7u8]);
        let mut sinks = ([0u8; 4], [0u8], [0u8; 2]);
        let mut from = Spans::from(Span::of_bytes(&mut sources.0));
        from.0[1] = Some(Span::of_bytes(&mut sources.1));
        let mut to = Spans::from(Span::of_bytes(&mut sinks.0));
        to.0[1] = Some(Span::of_bytes(&mut sinks.1));
        assert_eq!(copy(&from, &to, 5), Ok(()));
        // One side is too short.
        from.0[2] = Some(Span::of_bytes(&mut sources.2));
        assert_eq!(copy(&from, &to, 6), Err(Short::Sink));
        to.0[2] = Some(Span::of_bytes(&mut sinks.2));
        assert_eq!(copy(&from, &to, 7), Err(Short::Source));
        assert_eq!(sinks, ([1, 2, 4, 5], [6], [7, 0]));
    }

    #[test]
    fn nothing_ends_beyond_the_last_address() -> Result {
        let mut pages = two_pages()?;
        let mapping = |iova: u64, length| Mapping {
            iova,
            length,
            access: Access::LOCAL_WRITE,
        };
        let end = u64::MAX - PAGE + 1;
        for (iova, length) in [
            (end, PAGE),
            (end + 8, 2 * PAGE),
            (8, u64::MAX),
            (8, u64::MAX - 8),
        ] {
            assert!(!pages.register(0x101, &mapping(iova, length)));
        }
        assert!(pages.register(0x101, &mapping(end, PAGE - 1)));
        assert!(pages.allows(0x101, end, PAGE - 1, Access::LOCAL_WRITE));
        assert_eq!(pages.at(u64::MAX - 1), Some((8 * PAGE - 2, 2)));
        // Nor does what is named without a region.
        let named = |addr, length, of_kernel| {
            let mut local = Local {
                entries: [Entry {
                    addr: 0,
                    length: 0,
                    key: LOCAL_DMA_LKEY,
                }; MAX_SGE],
                count: 1,
                of_kernel,
            };
            (local.entries[0].addr, local.entries[0].length) = (addr, length);
            local.spans(u64::MAX, |_, _, _| None).is_some()
        };
        assert!(named(u64::MAX - 8, 8, true) && !named(u64::MAX - 8, 9, true));
        // Processes have no key for all memory.
        assert!(!named(u64::MAX - 8, 8, false));
        Ok(())
    }

    #[test]
    fn entries_are_looked_at_as_far_as_a_message_goes() {
        let entry = |addr, length, key| Entry { addr, length, key };
        let local = Local {
            entries: [
                // One that has no byte may name anything.
                entry(u64::MAX, 0, 5),
                entry(100, 8, 6),
                entry(200, 8, 7),
                entry(300, 8, 8),
            ],
            count: MAX_SGE,
            of_kernel: false,
        };
        let mut bytes = [0u8; 16];
        let (addr, seen) = (bytes.as_mut_ptr() as u64, Cell::new([(0, 0); 3]));
        let spans = |length, last| {
            seen.set([(0, 0); 3]);
            let spans = local.spans(length, |key, _, length| {
                let mut all = seen.get();
                all[key as usize - 6] = (key, length);
                seen.set(all);
                // SAFETY: As many bytes are there, which nobody copies.
                (key <= last).then(|| unsafe { Span::of_kernel(addr, length) })
            });
            (spans.is_some(), seen.get())
        };
        assert_eq!(spans(12, 7), (true, [(6, 8), (7, 4), (0, 0)]));
        assert_eq!(spans(16, 7), (true, [(6, 8), (7, 8), (0, 0)]));
        assert_eq!(spans(17, 7), (false, [(6, 8), (7, 8), (8, 1)]));
        assert_eq!(spans(0, 0), (true, [(0, 0); 3]));
        assert_eq!(spans(1, 5), (false, [(6, 1), (0, 0), (0, 0)]));
    }
}
