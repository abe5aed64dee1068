// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's memory, mapped into this process.
//!
//! All of it is owned by the one lock that the engine runs under: a mapping
//! cannot go away while the engine copies through it. What is lent to the
//! engines of other functions ([`Loan`]) they read under locks of their own;
//! a mapping goes when none of them does, and none can from then on. What is
//! for the device of another process is copied at once to memory that both
//! have ([`copy_out`]), and taken from there ([`Passing`]).

use crate::copies::{copy_past_caches, Recent, LONG};
use crate::vfio_user::DmaMap;
use ferrite_engine::loan::{Data, Held, Hold, Lease, Lender, Lent, Loan};
use ferrite_engine::memory::{DmaError, HostMemory};
use ferrite_fabric::ring::Span;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use serde::Serialize;
use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::io;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// A stretch of guest memory in this process's address space.
///
/// # Invariants
///
/// Until `lease` has ended, `base` is the start of a shared mapping of `length` bytes with the rights
/// of its range. It is ended by [`Owned`] alone, whose mapping it is.
#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    length: usize,
    readable: bool,
    lease: Arc<Lease>,
}

// SAFETY: the mapping belongs to the process, not to a thread; the pointer is
// only used for accesses that tolerate concurrent ones.
unsafe impl Send for Mapping {}
// SAFETY: likewise, and what changes is `lease`, which threads may share.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Where so many bytes from `offset` on can be read from, as long as `hold` is held.
    fn readable_at(&self, offset: usize, length: usize, hold: &Hold<'_>) -> Option<*const u8> {
        let inside = offset.checked_add(length)? <= self.length;
        if !inside || !self.readable || !hold.is_of(&self.lease) {
            return None;
        }
        // SAFETY: by the invariant the mapping is there, since its lease has not ended, and `offset` is
        // not behind its end.
        Some(unsafe { self.base.add(offset) }.cast_const())
    }
}

impl Lent for Mapping {
    fn read(&self, held: &Held<'_>, offset: usize, bytes: &mut [u8]) -> bool {
        let hold = held.hold_of(&self.lease);
        let from = hold.and_then(|hold| self.readable_at(offset, bytes.len(), hold));
        let Some(from) = from else {
            return false;
        };
        // SAFETY: there are as many bytes at `from` while `hold` is held; `bytes` is a Rust slice, which
        // never lies in guest memory.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Payload in memory that is shared with the device of another process.
#[derive(Debug)]
pub struct Passing(pub Span);

impl Lent for Passing {
    fn read(&self, _: &Held<'_>, offset: usize, bytes: &mut [u8]) -> bool {
        let Some(from) = self.0.at(offset, bytes.len()) else {
            return false;
        };
        // SAFETY: `at` vouches for as many bytes at `from`; `bytes` is a Rust slice, which never lies in
        // memory that is shared. The neighbour may write at the same time; any bytes are a valid result.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Where so many bytes of what is lent can be read from as long as `held` is held, whichever of the kinds
/// it is that a device lends.
fn source(held: &Held<'_>, memory: &dyn Lent, offset: usize, length: usize) -> Option<*const u8> {
    let memory = memory.as_any();
    if let Some(passing) = memory.downcast_ref::<Passing>() {
        return Some(passing.0.at(offset, length)?.cast_const());
    }
    let mapping = memory.downcast_ref::<Mapping>()?;
    let hold = held.hold_of(&mapping.lease)?;
    mapping.readable_at(offset, length, hold)
}

/// Copies what is lent to memory that is shared with the device of another process; false if some of it
/// is not there.
pub fn copy_out(loan: &Loan, to: &Span) -> bool {
    let Some(held) = loan.hold() else {
        return false;
    };
    held.data().for_pieces(|held, memory, offset, part| {
        let from = source(held, memory, offset, part.len());
        let (Some(from), Some(to)) = (from, to.at(part.start, part.len())) else {
            return false;
        };
        // SAFETY: `source` vouches for that many bytes at `from` while `held` is held, `at` for those at
        // `to`. Guest and neighbour may write to either at the same time: any bytes are a valid result.
        unsafe { std::ptr::copy(from, to, part.len()) };
        true
    })
}

/// The mapping of a range.
struct Owned(Arc<Mapping>);

impl Drop for Owned {
    fn drop(&mut self) {
        let mapping = &self.0;
        // What is lent of it may wait long for its reader, and the memory does not.
        mapping.lease.end();
        // SAFETY: by the invariant these are the bounds of a mapping that is
        // owned here, and no reference into it was ever made; nobody holds the
        // lease, nor will.
        // A failure leaves address space behind, nothing else.
        let _ = unsafe { rustix::mm::munmap(mapping.base.cast::<c_void>(), mapping.length) };
    }
}

/// A guest-physical range.
struct Range {
    size: u64,
    readable: bool,
    writable: bool,
    /// Absent where the monitor gave no descriptor: the range exists and
    /// cannot be accessed.
    mapping: Option<Owned>,
}

/// How much the device moved to and from guest memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DmaCounters {
    /// Reads of guest memory.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes to guest memory, atomic operations included.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Of these, bytes that were copied from where their sender had them, or had put them: the memory of
    /// another function, or that of a shortcut.
    pub direct_bytes: u64,
    /// Accesses that failed: nothing there, not allowed, or bus mastering off.
    pub errors: u64,
}

/// Where a range of guest memory lies in this process.
#[derive(Clone, Copy)]
struct Place {
    start: u64,
    length: usize,
    base: *mut u8,
    readable: bool,
    writable: bool,
}

// SAFETY: as for `Mapping`, from which the pointer comes.
unsafe impl Send for Place {}

/// The counters, each on its own: one access changes few of them.
#[derive(Default)]
struct Counts {
    reads: Cell<u64>,
    read_bytes: Cell<u64>,
    writes: Cell<u64>,
    write_bytes: Cell<u64>,
    direct_bytes: Cell<u64>,
    errors: Cell<u64>,
}

fn add(counter: &Cell<u64>, count: u64) {
    counter.set(counter.get().wrapping_add(count));
}

/// The guest's memory by guest-physical address.
///
/// # Invariants
///
/// `last` is one of `ranges`, with its mapping.
pub struct GuestMemory {
    ranges: BTreeMap<u64, Range>,
    /// Of them at most.
    most: usize,
    bus_master: bool,
    /// What is lent is lent until the right to access any goes; or, of a range, with its own lease.
    lender: Lender,
    counts: Counts,
    /// The range of the last access, where the next is likely to be.
    last: Cell<Option<Place>>,
    /// What long messages were written to.
    recent: Recent,
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.ranges.iter().map(|(start, range)| {
                (
                    format!("{start:#x}"),
                    (range.size, range.mapping.is_some(), range.writable),
                )
            }))
            .finish()
    }
}

impl GuestMemory {
    /// No memory, and no right to access it; there may be so many ranges.
    pub fn with_room_for(most: usize) -> Self {
        Self {
            ranges: BTreeMap::new(),
            most,
            bus_master: false,
            lender: Lender::default(),
            counts: Counts::default(),
            last: Cell::new(None),
            recent: Recent::default(),
        }
    }

    /// Adds a range. It must not overlap another, and its descriptor must be
    /// long enough.
    pub fn map(&mut self, map: &DmaMap) -> io::Result<()> {
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let Some(end) = map.address.checked_add(map.size) else {
            return invalid("the range wraps around");
        };
        if map.size == 0 {
            return invalid("the range is empty");
        }
        if self.ranges.len() >= self.most {
            return Err(Errno::NOSPC.into());
        }
        if let Some((start, range)) = self.ranges.range(..end).next_back() {
            if start + range.size > map.address {
                return invalid("the range overlaps another");
            }
        }
        let mapping = match &map.fd {
            Some(fd) if map.readable || map.writable => {
                let Ok(length) = usize::try_from(map.size) else {
                    return invalid("the range is too large");
                };
                // Access behind the end of a file would be a fatal signal.
                let available = rustix::fs::fstat(fd)?.st_size;
                let wanted = map.offset.checked_add(map.size);
                if wanted.is_none_or(|wanted| wanted > u64::try_from(available).unwrap_or(0)) {
                    return invalid("the file is shorter than the range");
                }
                let mut protection = ProtFlags::empty();
                protection.set(ProtFlags::READ, map.readable);
                protection.set(ProtFlags::WRITE, map.writable);
                // SAFETY: a new mapping at an address of the kernel's choice
                // touches no memory that exists already.
                let base = unsafe {
                    rustix::mm::mmap(
                        std::ptr::null_mut(),
                        length,
                        protection,
                        MapFlags::SHARED | MapFlags::NORESERVE,
                        fd,
                        map.offset,
                    )
                }?;
                // INVARIANT: just mapped with these bounds and rights.
                Some(Owned(Arc::new(Mapping {
                    base: base.cast(),
                    length,
                    readable: map.readable,
                    lease: Arc::default(),
                })))
            }
            _ => None,
        };
        self.ranges.insert(
            map.address,
            Range {
                size: map.size,
                readable: map.readable,
                writable: map.writable,
                mapping,
            },
        );
        Ok(())
    }

    /// Removes all ranges that lie in `address..address + size` and returns
    /// their size. Part of a range cannot be removed: nothing is then.
    pub fn unmap(&mut self, address: u64, size: u64) -> io::Result<u64> {
        let end = address.checked_add(size).ok_or(Errno::INVAL)?;
        let mut inside = Vec::new();
        let mut unmapped = 0;
        // They do not overlap, so the last to begin is the last to end.
        for (&start, range) in self.ranges.range(..end).rev() {
            if start + range.size <= address {
                break;
            }
            if start < address || start + range.size > end {
                return Err(Errno::INVAL.into());
            }
            inside.push(start);
            unmapped += range.size;
        }
        if inside.is_empty() {
            return Err(Errno::NOENT.into());
        }
        // INVARIANT: it may have been one of these.
        self.last.set(None);
        for start in inside {
            self.ranges.remove(&start);
        }
        Ok(unmapped)
    }

    /// Removes all ranges and returns their size.
    pub fn unmap_all(&mut self) -> u64 {
        // INVARIANT: there are none.
        self.last.set(None);
        let ranges = std::mem::take(&mut self.ranges);
        ranges.values().map(|range| range.size).sum()
    }

    /// Allows or forbids access, as the Bus Master bit says.
    pub fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
        if !on {
            self.lender.end();
        }
    }

    /// Whether there is memory, but none of it can be accessed.
    pub fn is_unreachable(&self) -> bool {
        !self.ranges.is_empty() && self.ranges.values().all(|range| range.mapping.is_none())
    }

    /// Bytes that can be accessed.
    pub fn mapped_bytes(&self) -> u64 {
        self.ranges
            .values()
            .filter(|range| range.mapping.is_some())
            .map(|range| range.size)
            .sum()
    }

    /// What was moved so far.
    pub fn counters(&self) -> DmaCounters {
        let counts = &self.counts;
        DmaCounters {
            reads: counts.reads.get(),
            read_bytes: counts.read_bytes.get(),
            writes: counts.writes.get(),
            write_bytes: counts.write_bytes.get(),
            direct_bytes: counts.direct_bytes.get(),
            errors: counts.errors.get(),
        }
    }

    /// The bytes from `address` on, as many as lie in one range, at most `length`.
    ///
    /// The pointer is good for accesses of that many bytes until the range is
    /// unmapped, which needs `&mut self`.
    fn locate(
        &self,
        address: u64,
        length: usize,
        write: bool,
    ) -> Result<(*mut u8, usize), DmaError> {
        let fail = DmaError { address };
        if !self.bus_master {
            return Err(fail);
        }
        let place = match self.last.get() {
            // An address below `start` is a large number here.
            Some(place) if address.wrapping_sub(place.start) < place.length as u64 => place,
            _ => {
                let place = self.place_of(address).ok_or(fail)?;
                // INVARIANT: just found there.
                self.last.set(Some(place));
                place
            }
        };
        let allowed = if write {
            place.writable
        } else {
            place.readable
        };
        if !allowed {
            return Err(fail);
        }
        let offset = (address - place.start) as usize;
        let count = length.min(place.length - offset);
        // SAFETY: `offset` is less than the length of the mapping, which is
        // still there by the invariant of `last`.
        Ok((unsafe { place.base.add(offset) }, count))
    }

    /// The last range that does not begin behind `address`, and where it begins.
    fn range_of(&self, address: u64) -> Option<(u64, &Range)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        Some((start, range))
    }

    /// The range that holds `address`, if it can be accessed.
    fn place_of(&self, address: u64) -> Option<Place> {
        let (start, range) = self.range_of(address)?;
        let mapping = &range.mapping.as_ref()?.0;
        (address - start < mapping.length as u64).then_some(Place {
            start,
            length: mapping.length,
            base: mapping.base,
            readable: range.readable,
            writable: range.writable,
        })
    }

    /// A naturally aligned word of `size` bytes.
    fn word(&self, address: u64, size: usize, write: bool) -> Result<*mut u8, DmaError> {
        let (pointer, count) = self.locate(address, size, write)?;
        if count < size || address % size as u64 != 0 || pointer as usize % size != 0 {
            return Err(DmaError { address });
        }
        Ok(pointer)
    }

    fn count<T>(
        &self,
        result: Result<T, DmaError>,
        read: usize,
        written: usize,
    ) -> Result<T, DmaError> {
        let counts = &self.counts;
        if result.is_err() {
            add(&counts.errors, 1);
            return result;
        }
        if read > 0 {
            add(&counts.reads, 1);
            add(&counts.read_bytes, read as u64);
        }
        if written > 0 {
            add(&counts.writes, 1);
            add(&counts.write_bytes, written as u64);
        }
        result
    }

    /// Calls `each` with every contiguous piece of a range of guest memory.
    fn pieces(
        &self,
        address: u64,
        length: usize,
        write: bool,
        mut each: impl FnMut(*mut u8, std::ops::Range<usize>),
    ) -> Result<(), DmaError> {
        let mut done = 0;
        while done < length {
            let at = address
                .checked_add(done as u64)
                .ok_or(DmaError { address })?;
            let (pointer, count) = self.locate(at, length - done, write)?;
            each(pointer, done..done + count);
            done += count;
        }
        Ok(())
    }

    /// Copies what is lent to this memory. What another function lends depends on the lease of its mapping and
    /// is inside it ([`HostMemory::lend`]), so that who has it to place finds it there: what can fail is this
    /// side.
    fn copy(
        &self,
        address: u64,
        (held, memory, offset): (&Held<'_>, &dyn Lent, usize),
        length: usize,
    ) -> Result<(), DmaError> {
        let from = source(held, memory, offset, length).ok_or(DmaError { address })?;
        let is_long = held.data().len() >= LONG;
        self.pieces(address, length, true, |to, mut part| {
            let start = part.start;
            while !part.is_empty() {
                let (count, past_caches) = if is_long {
                    let at = address.wrapping_add(part.start as u64);
                    self.recent.next(at, part.len())
                } else {
                    (part.len(), false)
                };
                // SAFETY: `source` vouches for `length` bytes at `from` while `held` is held, `locate`
                // for the part at `to`, of which the next `count` bytes are some. They may be the same memory,
                // mapped twice or, here, once; and who has it may
                // write to either at the same time: any bytes are a valid result.
                unsafe {
                    let (from, to) = (from.add(part.start), to.add(part.start - start));
                    if past_caches {
                        copy_past_caches(from, to, count);
                    } else {
                        std::ptr::copy(from, to, count);
                    }
                }
                part.start += count;
            }
        })
    }

    /// A 32-bit word for atomic access.
    fn atomic_u32(&self, address: u64, write: bool) -> Result<&AtomicU32, DmaError> {
        let pointer = self.word(address, 4, write)?;
        // SAFETY: `word` checked alignment and bounds; the mapping outlives
        // `self`, and everyone else who accesses it, the guest, does so with
        // accesses that are atomic for the processor.
        Ok(unsafe { AtomicU32::from_ptr(pointer.cast()) })
    }

    /// A 64-bit word for atomic access.
    fn atomic_u64(&self, address: u64, write: bool) -> Result<&AtomicU64, DmaError> {
        let pointer = self.word(address, 8, write)?;
        // SAFETY: as for `atomic_u32`.
        Ok(unsafe { AtomicU64::from_ptr(pointer.cast()) })
    }

    /// A 64-bit word to be changed, of which the old value is told.
    fn fetch_u64(&self, address: u64) -> Result<&AtomicU64, DmaError> {
        self.atomic_u64(address, false)?;
        self.atomic_u64(address, true)
    }
}

/// Has the pages of what is lent brought in by who lends it, whose memory it is: who copies it later would
/// wait for them in its own turn. They may be gone again by then, but not all and every time.
///
/// # Safety
///
/// There are so many bytes at `from`, and one at least.
unsafe fn touch(from: *const u8, length: usize) {
    const PAGE: usize = 4096;
    let next = PAGE - from as usize % PAGE;
    for at in std::iter::once(0).chain((next..length).step_by(PAGE)) {
        // SAFETY: `at` is less than `length`. The guest may write at the same time, and what is read is of
        // no interest.
        unsafe { from.add(at).read_volatile() };
    }
}

impl HostMemory for GuestMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        let length = bytes.len();
        let result = self.pieces(address, length, false, |from, part| {
            let to = &mut bytes[part];
            // SAFETY: `locate` vouches for that many bytes at `from`; `to` is a
            // Rust slice, which never lies in guest memory. The guest may
            // write at the same time; any bytes are a valid result.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        });
        self.count(result, length, 0)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError> {
        let length = bytes.len();
        let result = self.pieces(address, length, true, |to, part| {
            let from = &bytes[part];
            // SAFETY: as for `read`, with the roles exchanged.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        });
        self.count(result, 0, length)
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaError> {
        let word = self.atomic_u32(address, false);
        self.count(word.map(|word| word.load(Ordering::Acquire)), 4, 0)
    }

    fn load_u64(&self, address: u64) -> Result<u64, DmaError> {
        let word = self.atomic_u64(address, false);
        self.count(word.map(|word| word.load(Ordering::Acquire)), 8, 0)
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError> {
        let word = self.atomic_u32(address, true);
        self.count(word.map(|word| word.store(value, Ordering::Release)), 0, 4)
    }

    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError> {
        let word = self.atomic_u64(address, true);
        self.count(word.map(|word| word.store(value, Ordering::Release)), 0, 8)
    }

    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError> {
        let old = self.fetch_u64(address).map(|word| {
            match word.compare_exchange(compare, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(old) | Err(old) => old,
            }
        });
        self.count(old, 8, 8)
    }

    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError> {
        let old = self
            .fetch_u64(address)
            .map(|word| word.fetch_add(addend, Ordering::SeqCst));
        self.count(old, 8, 8)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn lend(&self, address: u64, length: usize, loan: &mut Loan) -> Result<bool, DmaError> {
        loan.depend_on(&self.lender);
        let mut done = 0;
        while done < length {
            let at = address.checked_add(done as u64);
            let at = at.ok_or(DmaError { address })?;
            let (from, count) = self.locate(at, length - done, false)?;
            // SAFETY: `locate` vouches for that many bytes at `from`, and there is something left to lend.
            unsafe { touch(from, count) };
            let (start, range) = self.range_of(at).ok_or(DmaError { address: at })?;
            let mapping = range.mapping.as_ref().ok_or(DmaError { address: at })?;
            loan.depend_on_lease(&mapping.0.lease);
            // Inside the mapping, which `locate` has found.
            loan.add(&mapping.0, (at - start) as usize, count);
            done += count;
        }
        Ok(true)
    }

    fn place(&self, address: u64, data: Data<'_>) -> Result<(), DmaError> {
        let length = data.len();
        if let Data::Bytes(bytes) = data {
            return self.write(address, bytes);
        }
        let mut result = Ok(());
        let mut copied = 0;
        let whole = data.for_pieces(|held, memory, offset, part| {
            let at = address.wrapping_add(part.start as u64);
            copied += part.len();
            result = self.copy(at, (held, memory, offset), part.len());
            result.is_ok()
        });
        if whole && copied == length {
            add(&self.counts.direct_bytes, length as u64);
        }
        self.count(result, 0, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio_user::MAX_DMA_MAPS;
    use rustix::fs::MemfdFlags;
    use std::os::fd::OwnedFd;

    const PAGE: u64 = 4096;

    fn file(pages: u64) -> OwnedFd {
        let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
        fd
    }

    fn range(address: u64, pages: u64, fd: Option<OwnedFd>) -> DmaMap {
        DmaMap {
            address,
            size: pages * PAGE,
            offset: 0,
            readable: true,
            writable: true,
            fd,
        }
    }

    fn memory(maps: Vec<DmaMap>) -> GuestMemory {
        let mut memory = GuestMemory::with_room_for(MAX_DMA_MAPS);
        memory.set_bus_master(true);
        for map in &maps {
            memory.map(map).unwrap();
        }
        memory
    }

    #[test]
    fn what_is_written_is_in_the_guests_file() {
        let fd = file(2);
        let memory = memory(vec![range(0x10_0000, 2, Some(fd.try_clone().unwrap()))]);
        let bytes: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        memory.write(0x10_0010, &bytes).unwrap();
        let mut seen = vec![0; 5000];
        rustix::io::pread(&fd, &mut seen, 0x10).unwrap();
        assert_eq!(seen, bytes);
        let mut back = vec![0; 5000];
        memory.read(0x10_0010, &mut back).unwrap();
        assert_eq!(back, bytes);
        let counters = memory.counters();
        assert_eq!((counters.reads, counters.read_bytes), (1, 5000));
        assert_eq!((counters.writes, counters.write_bytes), (1, 5000));
    }

    #[test]
    fn an_access_crosses_ranges_that_touch_and_stops_at_a_hole() {
        let memory = memory(vec![
            range(0, 1, Some(file(1))),
            range(PAGE, 1, Some(file(1))),
        ]);
        memory.write(PAGE - 2, &[1, 2, 3, 4]).unwrap();
        let mut back = [0; 4];
        memory.read(PAGE - 2, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        let error = memory.write(2 * PAGE - 2, &[0; 4]).unwrap_err();
        assert_eq!(error.address, 2 * PAGE);
        assert!(memory.read(u64::MAX - 1, &mut [0; 4]).is_err());
        assert!(memory.read(u64::MAX, &mut []).is_ok());
        assert_eq!(memory.counters().errors, 2);
    }

    #[test]
    fn a_range_that_was_just_used_is_gone_when_unmapped() {
        let mut memory = memory(vec![
            range(0, 1, Some(file(1))),
            range(PAGE, 1, Some(file(1))),
        ]);
        memory.write(8, &[1]).unwrap();
        memory.unmap(0, PAGE).unwrap();
        assert!(memory.read(8, &mut [0]).is_err());
        memory.write(PAGE, &[2]).unwrap();
        assert!(memory.read(PAGE - 1, &mut [0]).is_err());
        memory.unmap_all();
        assert!(memory.read(PAGE, &mut [0]).is_err());
    }

    #[test]
    fn pages_that_are_lent_are_brought_in_by_who_lends_them() {
        let fd = file(4);
        let memory = memory(vec![range(0, 4, Some(fd.try_clone().unwrap()))]);
        let there = || rustix::fs::fstat(&fd).unwrap().st_blocks * 512 / PAGE as i64;
        for (address, length, pages) in
            [(PAGE - 1, 1, 1), (PAGE - 1, PAGE + 2, 3), (0, 4 * PAGE, 4)]
        {
            let mut loan = Loan::default();
            assert_eq!(memory.lend(address, length as usize, &mut loan), Ok(true));
            assert_eq!(there(), pages);
        }
    }

    #[test]
    fn what_is_lent_is_lent_until_its_range_goes_or_all_access() {
        let ranges = |count| (0..count).map(|n| range(n * PAGE, 1, Some(file(1))));
        let mut memory = memory(ranges(3).collect());
        let lend = |memory: &GuestMemory, address, length| {
            let mut loan = Loan::default();
            assert_eq!(memory.lend(address, length, &mut loan), Ok(true));
            loan
        };
        let first = lend(&memory, 8, 8);
        let both = lend(&memory, PAGE - 8, 16);
        let third = lend(&memory, 2 * PAGE, 8);
        memory.unmap(PAGE, PAGE).unwrap();
        assert!(both.hold().is_none());
        assert!(first.hold().is_some() && third.hold().is_some());
        memory.set_bus_master(false);
        assert!(first.hold().is_none() && third.hold().is_none());
        memory.set_bus_master(true);
        let anew = lend(&memory, 8, 8);
        assert!(anew.hold().is_some());
        memory.unmap_all();
        assert!(anew.hold().is_none());
    }

    #[test]
    fn a_range_goes_when_what_is_lent_of_it_was_placed() {
        let mut from = memory(vec![range(0, 1, Some(file(1)))]);
        let to = memory(vec![range(0, 2, Some(file(2)))]);
        from.write(8, &[7; 3000]).unwrap();
        let mut loan = Loan::default();
        assert_eq!(from.lend(8, 3000, &mut loan), Ok(true));
        let held = loan.hold().unwrap();
        std::thread::scope(|scope| {
            let gone = scope.spawn(move || from.unmap(0, PAGE).unwrap());
            // Until its end is waited for.
            while loan.hold().is_some() {
                std::thread::yield_now();
            }
            to.place(100, held.data()).unwrap();
            assert!(held.data().bytes().is_some());
            assert!(!gone.is_finished());
            drop(held);
            assert_eq!(gone.join().unwrap(), PAGE);
        });
        let mut got = [0; 3000];
        to.read(100, &mut got).unwrap();
        assert_eq!(got, [7; 3000]);
        assert_eq!(to.counters().direct_bytes, 3000);
    }

    #[test]
    fn nothing_is_accessed_without_bus_mastering() {
        let mut memory = memory(vec![range(0, 1, Some(file(1)))]);
        memory.set_bus_master(false);
        assert!(memory.read(0, &mut [0]).is_err());
        assert!(memory.write(0, &[0]).is_err());
        assert!(memory.load_u32(0).is_err());
        assert!(memory.store_u64(0, 0).is_err());
        assert!(memory.fetch_add_u64(0, 1).is_err());
        memory.set_bus_master(true);
        assert!(memory.read(0, &mut [0]).is_ok());
    }

    #[test]
    fn words_are_aligned_and_inside() {
        let memory = memory(vec![range(0, 1, Some(file(1)))]);
        memory.store_u64(8, 0x1122_3344_5566_7788).unwrap();
        assert_eq!(memory.load_u64(8), Ok(0x1122_3344_5566_7788));
        assert_eq!(memory.load_u32(8), Ok(0x5566_7788));
        assert_eq!(memory.load_u32(10), Err(DmaError { address: 10 }));
        assert_eq!(memory.load_u64(12), Err(DmaError { address: 12 }));
        assert!(memory.load_u64(PAGE).is_err());
        assert_eq!(memory.compare_exchange_u64(16, 0, 7), Ok(0));
        assert_eq!(memory.compare_exchange_u64(16, 0, 9), Ok(7));
        assert_eq!(memory.fetch_add_u64(16, u64::MAX), Ok(7));
        assert_eq!(memory.load_u64(16), Ok(6));
    }

    #[test]
    fn rights_of_a_range_hold() {
        let mut map = range(0, 1, Some(file(1)));
        map.writable = false;
        let memory = memory(vec![map]);
        assert!(memory.read(0, &mut [0]).is_ok());
        assert!(memory.write(0, &[0]).is_err());
        assert!(memory.store_u32(0, 0).is_err());
        assert!(memory.fetch_add_u64(0, 1).is_err());
    }

    #[test]
    fn what_may_not_be_read_is_not_told_by_an_atomic_operation() {
        let mut map = range(0, 1, Some(file(1)));
        map.readable = false;
        let memory = memory(vec![map]);
        assert!(memory.store_u64(0, 7).is_ok());
        assert!(memory.load_u64(0).is_err());
        assert!(memory.fetch_add_u64(0, 1).is_err());
        assert!(memory.compare_exchange_u64(0, 0, 1).is_err());
    }

    #[test]
    fn part_of_a_range_cannot_be_unmapped() {
        let mut memory = memory(vec![
            range(PAGE, 1, Some(file(1))),
            range(2 * PAGE, 2, Some(file(2))),
            range(8 * PAGE, 1, Some(file(1))),
        ]);
        // The first is inside, the second only in part: none goes.
        for (from, to) in [(0, 3), (1, 3), (3, 4), (3, 20), (0, 0)] {
            assert!(memory.unmap(from * PAGE, (to - from) * PAGE).is_err());
        }
        assert!(memory.unmap(u64::MAX, 2).is_err());
        assert!(memory.unmap(PAGE, u64::MAX).is_err());
        for page in [1, 2, 3, 8] {
            assert!(memory.read(page * PAGE, &mut [0]).is_ok());
        }
        assert_eq!(memory.unmap(0, 5 * PAGE).unwrap(), 3 * PAGE);
        assert!(memory.read(PAGE, &mut [0]).is_err());
        assert!(memory.read(3 * PAGE, &mut [0]).is_err());
        assert_eq!(memory.unmap_all(), PAGE);
    }

    #[test]
    fn ranges_are_counted() {
        let mut memory = GuestMemory::with_room_for(MAX_DMA_MAPS);
        for page in 0..MAX_DMA_MAPS as u64 {
            memory.map(&range(page * PAGE, 1, None)).unwrap();
        }
        let one_more = range(MAX_DMA_MAPS as u64 * PAGE, 1, None);
        assert!(memory.map(&one_more).is_err());
        memory.unmap(0, PAGE).unwrap();
        memory.map(&one_more).unwrap();
    }

    #[test]
    fn bad_ranges_are_refused() {
        let mut memory = memory(vec![range(PAGE, 2, Some(file(2)))]);
        assert!(memory.map(&range(0, 2, Some(file(2)))).is_err());
        assert!(memory.map(&range(2 * PAGE, 1, None)).is_err());
        assert!(memory.map(&range(8 * PAGE, 0, None)).is_err());
        assert!(memory.map(&range(u64::MAX - 10, 1, None)).is_err());
        // Longer than its file.
        assert!(memory.map(&range(8 * PAGE, 2, Some(file(1)))).is_err());
        let mut shifted = range(8 * PAGE, 1, Some(file(1)));
        shifted.offset = PAGE;
        assert!(memory.map(&shifted).is_err());
        shifted.offset = u64::MAX;
        assert!(memory.map(&shifted).is_err());
    }

    #[test]
    fn a_range_without_a_file_exists_and_cannot_be_accessed() {
        let mut memory = memory(vec![range(0, 1, None)]);
        assert!(memory.is_unreachable());
        assert!(memory.read(0, &mut [0]).is_err());
        memory.unmap(0, PAGE).unwrap();
        assert!(!memory.is_unreachable());
    }

    #[test]
    fn an_unmapped_range_is_gone() {
        let mut memory = memory(vec![
            range(0, 1, Some(file(1))),
            range(PAGE, 1, Some(file(1))),
        ]);
        memory.unmap(0, PAGE).unwrap();
        assert!(memory.read(0, &mut [0]).is_err());
        assert!(memory.read(PAGE, &mut [0]).is_ok());
        assert!(memory.unmap(0, PAGE).is_err());
        memory.unmap_all();
        assert!(memory.read(PAGE, &mut [0]).is_err());
        assert_eq!(memory.mapped_bytes(), 0);
    }
}
