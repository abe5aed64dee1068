// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The translation and protection table: which memory a tag stands for, and who may do what.

use crate::att::{Att, AttError};
use crate::memory::HostMemory;
use ferrite_abi::{
    AllocateTag, CommandStatus, RegisterPart, RegisterRegion, Tag, TagKind, ACCESS_ALL,
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED, REGION_DEVICE_MEMORY, REGION_REPLACE, TAG_ALL_MEMORY,
};
use std::fmt;

/// Table entries: tag indices are from 1 to one less than this.
pub const MAX_TAGS: u32 = 1 << 17;
/// Longest region in bytes.
pub const MAX_REGION: u64 = 1 << 40;
/// Most pages that `AllocateTag` may ask for.
pub const MAX_FAST_PAGES: u32 = 1 << 16;

/// Why the table refuses an access. The order is that of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TptError {
    /// The index is out of range, or there is no entry.
    NoEntry,
    /// The entry is not valid (not registered yet, or invalidated).
    NotValid,
    /// The entry is of the wrong kind: a window for local access.
    WrongKind,
    /// The entry belongs to another protection domain.
    WrongDomain,
    /// The tag is of another instance.
    WrongInstance,
    /// The range is not all inside.
    OutOfBounds,
    /// The right is missing.
    AccessDenied,
    /// The tag for all of memory, on a queue pair that may not use it or from a peer.
    NotPrivileged,
    /// The entry has too few pages, or was not made for registration through a send queue.
    NotRegistrable,
    /// The entry is valid already.
    AlreadyValid,
    /// The description of the memory is impossible, or the memory is not there.
    Translation(AttError),
}

impl fmt::Display for TptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoEntry => "no such tag",
            Self::NotValid => "tag is not valid",
            Self::WrongKind => "tag is of the wrong kind",
            Self::WrongDomain => "tag belongs to another protection domain",
            Self::WrongInstance => "tag is of another instance",
            Self::OutOfBounds => "range is out of bounds",
            Self::AccessDenied => "access right is missing",
            Self::NotPrivileged => "queue pair may not use the tag for all of memory",
            Self::NotRegistrable => "tag cannot be registered so through a send queue",
            Self::AlreadyValid => "tag is valid already",
            Self::Translation(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for TptError {}

impl From<AttError> for TptError {
    fn from(error: AttError) -> Self {
        Self::Translation(error)
    }
}

impl TptError {
    /// A number for `CompletionEntry::detail`.
    pub fn detail(self) -> u32 {
        match self {
            Self::NoEntry => 1,
            Self::NotValid => 2,
            Self::WrongKind => 3,
            Self::WrongDomain => 4,
            Self::WrongInstance => 5,
            Self::OutOfBounds => 6,
            Self::AccessDenied => 7,
            Self::NotPrivileged => 8,
            Self::NotRegistrable => 9,
            Self::AlreadyValid => 10,
            Self::Translation(_) => 11,
        }
    }
}

/// What a work request wants to do with local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalAccess {
    /// Send from it.
    Read,
    /// Receive into it, or place the data of a read or atomic there.
    Write,
}

/// What a peer wants to do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    /// RDMA write.
    Write,
    /// RDMA read.
    Read,
    /// Atomic operation.
    Atomic,
}

/// A range of memory that passed its check. Each access through it looks at the tag once more, so
/// that a tag revoked meanwhile is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    tag: Tag,
    /// Offset in the region's buffer; with [`TAG_ALL_MEMORY`] the DMA address.
    start: u64,
    length: u64,
    /// The registration that was checked: the same tag may stand for other memory meanwhile.
    generation: u64,
}

impl Span {
    /// The span of nothing: zero-length accesses have no key to check.
    pub const EMPTY: Self = Self {
        tag: Tag(TAG_ALL_MEMORY),
        start: 0,
        length: 0,
        generation: 0,
    };

    /// Bytes in the span.
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// Where accesses of a work request come from: what the local checks compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Protection domain.
    pub pd: u32,
    /// May use [`TAG_ALL_MEMORY`].
    pub privileged: bool,
}

/// An entry of the table.
#[derive(Clone, Debug)]
struct Entry {
    instance: u8,
    pd: u32,
    access: u32,
    /// Address of the first byte, as users of the tag say it.
    address: u64,
    /// The memory; none while the entry is not valid.
    att: Option<Att>,
    /// Most pages, for an entry reserved with `AllocateTag`; zero for a region by command.
    max_pages: u32,
    /// Which registration this is, of all there ever were.
    generation: u64,
}

impl Entry {
    fn length(&self) -> u64 {
        self.att.as_ref().map_or(0, Att::length)
    }

    /// Offset in the buffer of a range, when it is all inside.
    fn offset_of(&self, address: u64, length: u64) -> Option<u64> {
        let base = if self.access & ACCESS_ZERO_BASED != 0 {
            0
        } else {
            self.address
        };
        let offset = address.checked_sub(base)?;
        let end = offset.checked_add(length)?;
        (end <= self.length()).then_some(offset)
    }
}

/// The table.
#[derive(Debug, Default)]
pub struct Tpt {
    entries: Vec<Option<Box<Entry>>>,
    /// Registrations so far.
    generation: u64,
}

fn att_status(error: AttError) -> CommandStatus {
    match error {
        AttError::Memory(_) => CommandStatus::HostMemory,
        _ => CommandStatus::BadParameter,
    }
}

impl Tpt {
    /// The slot of an index that is in range.
    fn slot(&mut self, tag: Tag) -> Result<&mut Option<Box<Entry>>, CommandStatus> {
        let index = tag.index();
        if index == 0 || index >= MAX_TAGS {
            return Err(CommandStatus::BadNumber);
        }
        let index = index as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, None);
        }
        Ok(&mut self.entries[index])
    }

    fn entry(&self, tag: Tag) -> Result<&Entry, TptError> {
        self.entries
            .get(tag.index() as usize)
            .and_then(Option::as_deref)
            .ok_or(TptError::NoEntry)
    }

    fn entry_mut(&mut self, tag: Tag) -> Result<&mut Entry, TptError> {
        self.entries
            .get_mut(tag.index() as usize)
            .and_then(Option::as_deref_mut)
            .ok_or(TptError::NoEntry)
    }

    /// Carries out `RegisterRegion`.
    pub(crate) fn register(&mut self, command: &RegisterRegion) -> Result<(), CommandStatus> {
        let tag = Tag(command.tag);
        if command.flags & REGION_DEVICE_MEMORY != 0 {
            return Err(CommandStatus::Unsupported);
        }
        if command.access & !ACCESS_ALL != 0 || command.flags & !REGION_REPLACE != 0 {
            return Err(CommandStatus::BadParameter);
        }
        let att = Att::new(&command.buffer).map_err(att_status)?;
        if att.length() > MAX_REGION || command.address.checked_add(att.length()).is_none() {
            return Err(CommandStatus::BadParameter);
        }
        self.generation += 1;
        let generation = self.generation;
        let slot = self.slot(tag)?;
        match (slot.is_some(), command.flags & REGION_REPLACE != 0) {
            (true, false) => return Err(CommandStatus::Exists),
            (false, true) => return Err(CommandStatus::NotFound),
            _ => {}
        }
        *slot = Some(Box::new(Entry {
            instance: tag.instance(),
            pd: command.pd,
            access: command.access,
            address: command.address,
            att: Some(att),
            max_pages: 0,
            generation,
        }));
        Ok(())
    }

    /// Carries out `AllocateTag`.
    pub(crate) fn allocate(&mut self, command: &AllocateTag) -> Result<(), CommandStatus> {
        let tag = Tag(command.tag);
        match TagKind::from_number(command.kind) {
            Some(TagKind::Region) => {}
            Some(TagKind::Window1 | TagKind::Window2) => return Err(CommandStatus::Unsupported),
            None => return Err(CommandStatus::BadParameter),
        }
        if command.max_pages == 0 || command.max_pages > MAX_FAST_PAGES {
            return Err(CommandStatus::BadParameter);
        }
        let slot = self.slot(tag)?;
        if slot.is_some() {
            return Err(CommandStatus::Exists);
        }
        *slot = Some(Box::new(Entry {
            instance: tag.instance(),
            pd: command.pd,
            access: 0,
            address: 0,
            att: None,
            max_pages: command.max_pages,
            generation: 0,
        }));
        Ok(())
    }

    /// Carries out `ReleaseTag`. A tag made with `AllocateTag` is released under any instance,
    /// since its registrations change that.
    pub(crate) fn release(&mut self, tag: Tag) -> Result<(), CommandStatus> {
        if tag.index() == 0 || tag.index() >= MAX_TAGS {
            return Err(CommandStatus::BadNumber);
        }
        match self.entry(tag) {
            Ok(entry) if entry.max_pages != 0 || entry.instance == tag.instance() => {
                *self.slot(tag)? = None;
                Ok(())
            }
            _ => Err(CommandStatus::NotFound),
        }
    }

    /// Carries out a registration from the send queue of a queue pair in domain `pd`.
    pub fn register_from_queue(&mut self, part: &RegisterPart, pd: u32) -> Result<(), TptError> {
        let tag = Tag(part.tag);
        self.generation += 1;
        let generation = self.generation;
        let entry = self.entry_mut(tag)?;
        if entry.max_pages == 0 {
            return Err(TptError::NotRegistrable);
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        if entry.att.is_some() {
            return Err(TptError::AlreadyValid);
        }
        if part.access & !ACCESS_ALL != 0 {
            return Err(TptError::AccessDenied);
        }
        let att = Att::new(&part.buffer)?;
        if att.pages() > u64::from(entry.max_pages) {
            return Err(TptError::NotRegistrable);
        }
        if att.length() > MAX_REGION || part.address.checked_add(att.length()).is_none() {
            return Err(TptError::OutOfBounds);
        }
        entry.instance = tag.instance();
        entry.access = part.access;
        entry.address = part.address;
        entry.att = Some(att);
        entry.generation = generation;
        Ok(())
    }

    /// Invalidates a tag, for a work request (`LocalInvalidate`) or a peer (`SendInvalidate`) of a
    /// queue pair in domain `pd`. Only entries made with `AllocateTag` can be invalidated.
    pub fn invalidate(&mut self, tag: u32, pd: u32) -> Result<(), TptError> {
        let tag = Tag(tag);
        let entry = self.entry_mut(tag)?;
        if entry.att.is_none() {
            return Err(TptError::NotValid);
        }
        if entry.max_pages == 0 {
            return Err(TptError::WrongKind);
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        entry.att = None;
        Ok(())
    }

    /// The checks that local and remote accesses share, in the specification's order.
    fn check(
        &self,
        tag: Tag,
        pd: u32,
        address: u64,
        length: u64,
        needed: u32,
    ) -> Result<Span, TptError> {
        let entry = self.entry(tag)?;
        if entry.att.is_none() {
            return Err(TptError::NotValid);
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        let start = entry
            .offset_of(address, length)
            .ok_or(TptError::OutOfBounds)?;
        if entry.access & needed != needed {
            return Err(TptError::AccessDenied);
        }
        Ok(Span {
            tag,
            start,
            length,
            generation: entry.generation,
        })
    }

    /// Checks a scatter/gather entry of a work request. Zero bytes need no key.
    pub fn check_local(
        &self,
        lkey: u32,
        address: u64,
        length: u64,
        domain: Domain,
        access: LocalAccess,
    ) -> Result<Span, TptError> {
        if length == 0 {
            return Ok(Span::EMPTY);
        }
        if lkey == TAG_ALL_MEMORY {
            if !domain.privileged {
                return Err(TptError::NotPrivileged);
            }
            address.checked_add(length).ok_or(TptError::OutOfBounds)?;
            return Ok(Span {
                tag: Tag(lkey),
                start: address,
                length,
                generation: 0,
            });
        }
        let needed = match access {
            LocalAccess::Read => 0,
            LocalAccess::Write => ACCESS_LOCAL_WRITE,
        };
        self.check(Tag(lkey), domain.pd, address, length, needed)
    }

    /// Checks what a peer of a queue pair in domain `pd` asks for. Zero bytes need no key. The
    /// queue pair's own rights (`access`) are the caller's to check.
    pub fn check_remote(
        &self,
        rkey: u32,
        address: u64,
        length: u64,
        pd: u32,
        access: RemoteAccess,
    ) -> Result<Span, TptError> {
        if length == 0 {
            return Ok(Span::EMPTY);
        }
        if rkey == TAG_ALL_MEMORY {
            return Err(TptError::NotPrivileged);
        }
        let needed = match access {
            RemoteAccess::Write => ACCESS_REMOTE_WRITE,
            RemoteAccess::Read => ACCESS_REMOTE_READ,
            RemoteAccess::Atomic => ACCESS_REMOTE_ATOMIC,
        };
        self.check(Tag(rkey), pd, address, length, needed)
    }

    /// The memory behind a span, if its tag still stands for it, and the offset of byte `offset`
    /// of the span; `None` for the tag of all memory.
    fn locate(
        &self,
        span: &Span,
        offset: u64,
        length: usize,
    ) -> Result<(Option<&Att>, u64), TptError> {
        if offset
            .checked_add(length as u64)
            .is_none_or(|end| end > span.length)
        {
            return Err(TptError::OutOfBounds);
        }
        let start = span.start + offset;
        if span.tag.0 == TAG_ALL_MEMORY {
            return Ok((None, start));
        }
        let entry = self.entry(span.tag)?;
        if entry.instance != span.tag.instance() {
            return Err(TptError::WrongInstance);
        }
        let att = entry.att.as_ref().ok_or(TptError::NotValid)?;
        if entry.generation != span.generation {
            return Err(TptError::NotValid);
        }
        Ok((Some(att), start))
    }

    /// Copies from a span, starting at its byte `offset`.
    pub fn read<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), TptError> {
        match self.locate(span, offset, bytes.len())? {
            _ if bytes.is_empty() => Ok(()),
            (Some(att), start) => Ok(att.read(memory, start, bytes)?),
            (None, start) => Ok(memory.read(start, bytes).map_err(AttError::from)?),
        }
    }

    /// Copies to a span, starting at its byte `offset`.
    pub fn write<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), TptError> {
        match self.locate(span, offset, bytes.len())? {
            _ if bytes.is_empty() => Ok(()),
            (Some(att), start) => Ok(att.write(memory, start, bytes)?),
            (None, start) => Ok(memory.write(start, bytes).map_err(AttError::from)?),
        }
    }

    /// The DMA address of an eight-byte span, for an atomic operation. The caller has refused
    /// addresses that are not multiples of eight.
    pub fn atomic_address<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
    ) -> Result<u64, TptError> {
        match self.locate(span, 0, 8)? {
            (Some(att), start) => Ok(att.address_of(memory, start, 8)?),
            (None, start) => Ok(start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestMemory;
    use ferrite_abi::Buffer;

    const PD: u32 = 7;
    const DOMAIN: Domain = Domain {
        pd: PD,
        privileged: false,
    };
    const ADDRESS: u64 = 0x7000_0000;
    const LENGTH: u64 = 8192;
    const TAG: Tag = Tag::new(3, 9);

    fn command(tag: Tag, access: u32) -> RegisterRegion {
        RegisterRegion {
            tag: tag.0,
            pd: PD,
            access,
            flags: 0,
            address: ADDRESS,
            buffer: Buffer::contiguous(0x1_0000, LENGTH),
        }
    }

    fn table(access: u32) -> Tpt {
        let mut tpt = Tpt::default();
        tpt.register(&command(TAG, access)).unwrap();
        tpt
    }

    fn allocated(max_pages: u32) -> Tpt {
        let mut tpt = Tpt::default();
        tpt.allocate(&AllocateTag {
            tag: TAG.0,
            pd: PD,
            kind: TagKind::Region.number(),
            reserved: [0; 3],
            max_pages,
        })
        .unwrap();
        tpt
    }

    fn part(tag: Tag) -> RegisterPart {
        RegisterPart {
            tag: tag.0,
            access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ,
            address: ADDRESS,
            buffer: Buffer::contiguous(0x1_0000, LENGTH),
            reserved: 0,
        }
    }

    #[test]
    fn local_checks_are_refused_each_with_its_own_error() {
        let tpt = table(0);
        let check = |tag: Tag, domain, address, length, access| {
            tpt.check_local(tag.0, address, length, domain, access)
                .map(|span| span.length())
        };
        let read = LocalAccess::Read;
        assert_eq!(check(TAG, DOMAIN, ADDRESS, LENGTH, read), Ok(LENGTH));
        assert_eq!(
            check(Tag::new(4, 9), DOMAIN, ADDRESS, 1, read),
            Err(TptError::NoEntry)
        );
        assert_eq!(
            check(Tag::new(0xff_ffff, 9), DOMAIN, ADDRESS, 1, read),
            Err(TptError::NoEntry)
        );
        let foreign = Domain { pd: 8, ..DOMAIN };
        assert_eq!(
            check(TAG, foreign, ADDRESS, 1, read),
            Err(TptError::WrongDomain)
        );
        assert_eq!(
            check(Tag::new(3, 10), DOMAIN, ADDRESS, 1, read),
            Err(TptError::WrongInstance)
        );
        assert_eq!(
            check(TAG, DOMAIN, ADDRESS, 1, LocalAccess::Write),
            Err(TptError::AccessDenied)
        );
        assert_eq!(
            allocated(4)
                .check_local(TAG.0, ADDRESS, 1, DOMAIN, read)
                .unwrap_err(),
            TptError::NotValid
        );
    }

    #[test]
    fn bounds_are_exact_and_do_not_wrap() {
        let tpt = table(0);
        let check = |address, length| {
            tpt.check_local(TAG.0, address, length, DOMAIN, LocalAccess::Read)
                .map(|_| ())
        };
        assert_eq!(check(ADDRESS + LENGTH - 1, 1), Ok(()));
        for (address, length) in [
            (ADDRESS - 1, 1),
            (ADDRESS - 1, LENGTH),
            (ADDRESS, LENGTH + 1),
            (ADDRESS + LENGTH, 1),
            (ADDRESS + 1, u64::MAX),
            (u64::MAX, 2),
            (0, 1),
        ] {
            assert_eq!(check(address, length), Err(TptError::OutOfBounds));
        }
    }

    #[test]
    fn remote_checks_need_the_very_right() {
        let rights = [
            (RemoteAccess::Write, ACCESS_REMOTE_WRITE),
            (RemoteAccess::Read, ACCESS_REMOTE_READ),
            (RemoteAccess::Atomic, ACCESS_REMOTE_ATOMIC),
        ];
        for (access, right) in rights {
            let check = |tpt: &Tpt| {
                tpt.check_remote(TAG.0, ADDRESS, 8, PD, access)
                    .map(|span| span.length())
            };
            assert_eq!(check(&table(right)), Ok(8));
            assert_eq!(
                check(&table(ACCESS_ALL & !ACCESS_ZERO_BASED & !right)),
                Err(TptError::AccessDenied)
            );
        }
        let tpt = table(ACCESS_REMOTE_WRITE);
        let check = |tag: Tag, address, pd| {
            tpt.check_remote(tag.0, address, 1, pd, RemoteAccess::Write)
                .unwrap_err()
        };
        assert_eq!(check(Tag::new(9, 0), ADDRESS, PD), TptError::NoEntry);
        assert_eq!(check(TAG, ADDRESS, 1), TptError::WrongDomain);
        assert_eq!(check(Tag::new(3, 0), ADDRESS, PD), TptError::WrongInstance);
        assert_eq!(check(TAG, ADDRESS + LENGTH, PD), TptError::OutOfBounds);
    }

    #[test]
    fn the_tag_of_all_memory_is_for_privileged_queue_pairs_and_never_for_a_peer() {
        let tpt = Tpt::default();
        let privileged = Domain {
            privileged: true,
            ..DOMAIN
        };
        let local = |domain, address| {
            tpt.check_local(TAG_ALL_MEMORY, address, 16, domain, LocalAccess::Write)
        };
        assert_eq!(local(DOMAIN, 0x1000), Err(TptError::NotPrivileged));
        assert_eq!(local(privileged, u64::MAX), Err(TptError::OutOfBounds));
        assert_eq!(
            tpt.check_remote(TAG_ALL_MEMORY, 0x1000, 16, PD, RemoteAccess::Write),
            Err(TptError::NotPrivileged)
        );
        let memory = TestMemory::new(0, 0x2000);
        let span = local(privileged, 0x1000).unwrap();
        tpt.write(&memory, &span, 4, &[1, 2]).unwrap();
        assert_eq!(memory.load_u64(0x1000).unwrap(), 0x0201_0000_0000);
    }

    #[test]
    fn zero_bytes_need_no_key() {
        let tpt = Tpt::default();
        let span = tpt
            .check_remote(0xdead_beef, 0, 0, PD, RemoteAccess::Write)
            .unwrap();
        let memory = TestMemory::new(0, 0);
        assert_eq!(tpt.write(&memory, &span, 0, &[]), Ok(()));
        assert_eq!(
            tpt.write(&memory, &span, 0, &[1]),
            Err(TptError::OutOfBounds)
        );
    }

    #[test]
    fn zero_based_addresses_count_from_the_start() {
        let tpt = table(ACCESS_ZERO_BASED);
        let check = |address| {
            tpt.check_local(TAG.0, address, 1, DOMAIN, LocalAccess::Read)
                .map(|_| ())
        };
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(LENGTH), Err(TptError::OutOfBounds));
        assert_eq!(check(ADDRESS), Err(TptError::OutOfBounds));
    }

    #[test]
    fn a_span_dies_with_the_registration_it_was_checked_against() {
        let memory = TestMemory::new(0, 0x10_0000);
        let mut tpt = table(ACCESS_REMOTE_WRITE);
        let span = tpt
            .check_remote(TAG.0, ADDRESS, 100, PD, RemoteAccess::Write)
            .unwrap();
        assert_eq!(tpt.write(&memory, &span, 50, &[1; 50]), Ok(()));
        assert_eq!(
            tpt.write(&memory, &span, 51, &[1; 50]),
            Err(TptError::OutOfBounds)
        );
        // The same tag, other rights and memory.
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(TAG, 0)
        })
        .unwrap();
        assert_eq!(
            tpt.write(&memory, &span, 0, &[1; 50]),
            Err(TptError::NotValid)
        );
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(Tag::new(3, 10), 0)
        })
        .unwrap();
        assert_eq!(
            tpt.write(&memory, &span, 0, &[1; 50]),
            Err(TptError::WrongInstance)
        );
        tpt.release(Tag::new(3, 10)).unwrap();
        assert_eq!(
            tpt.read(&memory, &span, 0, &mut [0; 50]),
            Err(TptError::NoEntry)
        );
    }

    #[test]
    fn commands_on_tags_are_checked() {
        let mut tpt = table(0);
        let register = |tpt: &mut Tpt, command: RegisterRegion| tpt.register(&command);
        let good = command(Tag::new(4, 0), 0);
        assert_eq!(
            register(&mut tpt, command(TAG, 0)),
            Err(CommandStatus::Exists)
        );
        for index in [0, MAX_TAGS, 0xff_ffff] {
            assert_eq!(
                register(&mut tpt, command(Tag::new(index, 1), 0)),
                Err(CommandStatus::BadNumber)
            );
            assert_eq!(
                tpt.release(Tag::new(index, 1)),
                Err(CommandStatus::BadNumber)
            );
        }
        assert_eq!(
            register(
                &mut tpt,
                RegisterRegion {
                    flags: REGION_REPLACE,
                    ..good
                }
            ),
            Err(CommandStatus::NotFound)
        );
        assert_eq!(
            register(
                &mut tpt,
                RegisterRegion {
                    access: ACCESS_ALL + 1,
                    ..good
                }
            ),
            Err(CommandStatus::BadParameter)
        );
        assert_eq!(
            register(
                &mut tpt,
                RegisterRegion {
                    address: u64::MAX - 10,
                    ..good
                }
            ),
            Err(CommandStatus::BadParameter)
        );
        assert_eq!(
            register(
                &mut tpt,
                RegisterRegion {
                    buffer: Buffer::contiguous(0, MAX_REGION + 1),
                    ..good
                }
            ),
            Err(CommandStatus::BadParameter)
        );
        assert_eq!(tpt.release(Tag::new(3, 8)), Err(CommandStatus::NotFound));
        assert_eq!(tpt.release(TAG), Ok(()));
        assert_eq!(tpt.release(TAG), Err(CommandStatus::NotFound));
    }

    #[test]
    fn a_queue_registers_an_allocated_tag_and_invalidates_it() {
        let mut tpt = allocated(2);
        let tag = Tag::new(3, 77);
        let read = |tpt: &Tpt| {
            tpt.check_remote(tag.0, ADDRESS, 1, PD, RemoteAccess::Read)
                .map(|_| ())
        };
        assert_eq!(
            tpt.register_from_queue(&part(tag), PD + 1),
            Err(TptError::WrongDomain)
        );
        assert_eq!(tpt.register_from_queue(&part(tag), PD), Ok(()));
        assert_eq!(read(&tpt), Ok(()));
        assert_eq!(
            tpt.register_from_queue(&part(tag), PD),
            Err(TptError::AlreadyValid)
        );
        assert_eq!(tpt.invalidate(TAG.0, PD), Err(TptError::WrongInstance));
        assert_eq!(tpt.invalidate(tag.0, PD + 1), Err(TptError::WrongDomain));
        assert_eq!(tpt.invalidate(tag.0, PD), Ok(()));
        assert_eq!(read(&tpt), Err(TptError::NotValid));
        assert_eq!(tpt.invalidate(tag.0, PD), Err(TptError::NotValid));
        assert_eq!(tpt.release(TAG), Ok(()));
    }

    #[test]
    fn a_queue_cannot_register_more_pages_or_invalidate_a_region_by_command() {
        let mut tpt = allocated(1);
        assert_eq!(
            tpt.register_from_queue(&part(TAG), PD),
            Err(TptError::NotRegistrable)
        );
        let mut tpt = table(0);
        assert_eq!(
            tpt.register_from_queue(&part(TAG), PD),
            Err(TptError::NotRegistrable)
        );
        assert_eq!(tpt.invalidate(TAG.0, PD), Err(TptError::WrongKind));
    }
}
