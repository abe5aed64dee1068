// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The translation and protection table: which memory a tag stands for, and who may do what.

use crate::att::{Att, AttError};
use crate::device_memory::{DeviceMemory, DEVICE_MEMORY_SIZE};
use crate::loan::{Data, Lender, Loan};
use crate::memory::HostMemory;
use crate::numbers::{NumberTable, Numbers};
use crate::paging::{Fault, PageError, PagedAtt};
use ferrite_abi::{
    AllocateTag, AttOrder, BindPart, CommandStatus, FastRegisterPart, InvalidatePages, ListPart,
    Plain, RegisterRegion, Sge, Tag, TagKind, TagState, ACCESS_ALL, ACCESS_FLUSH_GLOBAL,
    ACCESS_LOCAL_WRITE, ACCESS_ONE_TOUCH, ACCESS_REMOTE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE, ACCESS_WINDOW_BIND, ACCESS_ZERO_BASED, FEATURE_ATOMICS, FEATURE_FLUSH,
    FEATURE_ONE_TOUCH, MAX_PIECES, MAX_SGE, REGION_DEVICE_MEMORY, REGION_ON_DEMAND, REGION_REPLACE,
    TAG_ALL_MEMORY,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// Table entries.
///
/// The table grows with the highest index in use (8 bytes each) and the entries there are (see
/// `what_a_guest_can_make_the_table_take_is_bounded`): that is all a guest can make it take.
pub const MAX_TAGS: u32 = 1 << 20;
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
    /// The entry is of the wrong kind: a window for local access, or for a peer a region or list without any
    /// remote right, or on a queue pair that lets in windows only.
    WrongKind,
    /// The window is bound to another queue pair.
    WrongQueuePair,
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
    /// Windows are bound to the region.
    HasWindows,
    /// A second message to an entry that takes one.
    Touched,
    /// A piece of a list to be registered fails the checks of a local access.
    PieceRefused,
    /// A piece has not all the rights that the list is to give.
    PieceRights,
    /// A piece is of the wrong kind: a window, another list, or the tag for all of memory.
    PieceKind,
    /// A piece has no bytes.
    PieceEmpty,
    /// The description of the memory is impossible, or the memory is not there.
    Translation(AttError),
    /// A page of an on-demand region is not there, or may not be written.
    Absent(Fault),
    /// The command that registers the tag failed.
    RegistrationFailed,
    /// The command that makes what this index stands for is not finished.
    Pending(u32),
}

impl fmt::Display for TptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoEntry => "no such tag",
            Self::NotValid => "tag is not valid",
            Self::WrongKind => "tag is of the wrong kind",
            Self::WrongQueuePair => "window is bound to another queue pair",
            Self::WrongDomain => "tag belongs to another protection domain",
            Self::WrongInstance => "tag is of another instance",
            Self::OutOfBounds => "range is out of bounds",
            Self::AccessDenied => "access right is missing",
            Self::NotPrivileged => "queue pair may not use the tag for all of memory",
            Self::NotRegistrable => "tag cannot be registered so through a send queue",
            Self::AlreadyValid => "tag is valid already",
            Self::HasWindows => "windows are bound to the region",
            Self::Touched => "one-touch tag was used before",
            Self::PieceRefused => "piece of a list may not be accessed",
            Self::PieceRights => "piece of a list has not the rights of the list",
            Self::PieceKind => "piece of a list is no region",
            Self::PieceEmpty => "piece of a list has no bytes",
            Self::Translation(error) => return error.fmt(f),
            Self::Absent(_) => "page cannot be had",
            Self::RegistrationFailed => "registration of the tag failed",
            Self::Pending(_) => "tag is pending",
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
    /// Whether it says that a tag stands for nothing, or a piece of a list may not be used: what a
    /// command that the device has not taken up could have changed.
    pub(crate) fn is_of_no_tag(self) -> bool {
        matches!(
            self,
            Self::NoEntry
                | Self::NotValid
                | Self::WrongInstance
                | Self::RegistrationFailed
                | Self::PieceRefused
        )
    }

    /// A number for `CompletionEntry::vendor_syndrome`.
    pub fn vendor_syndrome(self) -> u32 {
        match self {
            Self::NoEntry => 1,
            // What is pending is waited for, not refused.
            Self::NotValid | Self::Pending(_) => 2,
            Self::WrongKind => 3,
            Self::WrongDomain => 4,
            Self::WrongInstance => 5,
            Self::OutOfBounds => 6,
            Self::AccessDenied => 7,
            Self::NotPrivileged => 8,
            Self::NotRegistrable => 9,
            Self::AlreadyValid => 10,
            Self::Translation(_) => 11,
            Self::WrongQueuePair => 12,
            Self::HasWindows => 13,
            Self::Touched => 14,
            Self::PieceRefused => 15,
            Self::PieceRights => 16,
            Self::PieceKind => 17,
            Self::PieceEmpty => 18,
            Self::RegistrationFailed => 19,
            Self::Absent(_) => 20,
        }
    }
}

/// The features that go with rights.
pub(crate) fn access_features(access: u32) -> u64 {
    [
        (ACCESS_REMOTE_ATOMIC, FEATURE_ATOMICS),
        (ACCESS_ONE_TOUCH, FEATURE_ONE_TOUCH),
        (ACCESS_FLUSH_GLOBAL, FEATURE_FLUSH),
    ]
    .into_iter()
    .filter(|(right, _)| access & right != 0)
    .fold(0, |features, (_, feature)| features | feature)
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

/// Where the packet of a message that writes stands in the stream of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Everything before it was received.
    InOrder,
    /// Something before it is missing; its last byte (or packet) has this sequence number.
    Ahead(u32),
    /// It is outside of what may be received now.
    Outside,
}

/// What becomes of the payload of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// It is placed.
    Place,
    /// It is dropped; the sender will send it again.
    Drop,
}

impl Touch {
    /// What becomes of it where the rule holds for another entry as well: that says `other`.
    fn and(self, other: Result<Self, TptError>) -> Result<Self, TptError> {
        match self {
            Self::Place => other,
            Self::Drop => Ok(Self::Drop),
        }
    }
}

/// An atomic operation on eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Store `new` where `compare` stands.
    CompareSwap {
        /// What must stand there.
        compare: u64,
        /// What to store.
        new: u64,
    },
    /// Add, wrapping.
    FetchAdd(u64),
    /// Store, whatever stands there; returns zero.
    Store(u64),
}

/// A range of memory that passed its check. Each access through it looks at the tag once more, so
/// that a tag revoked meanwhile is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    tag: Tag,
    /// Offset in the region's buffer, through a window too; of a list, in its pieces put together;
    /// with [`TAG_ALL_MEMORY`] the DMA address.
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

/// The queue pair on whose behalf the table is used: what remote checks, binds and invalidations
/// compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its protection domain.
    pub pd: u32,
    /// Its number: a type 2 window belongs to one.
    pub qpn: u32,
    /// Its peer is let in through windows only.
    pub windows_only: bool,
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
struct Binding {
    /// The region, and which registration of it.
    region: Tag,
    generation: u64,
    /// Offset in the region's buffer, and bytes.
    offset: u64,
    length: u64,
    /// The queue pair of a type 2 window.
    qpn: Option<u32>,
}

/// What a valid entry stands for.
#[derive(Clone, Debug)]
enum Target {
    /// Host memory; what is lent of it is lent as long as this stands.
    Host(Att, Lender),
    /// Host memory whose pages come and go.
    Paged(PagedAtt),
    /// Device memory: offset and bytes.
    Device { offset: u64, length: u64 },
    /// A part of a region.
    Window(Binding),
    /// Pieces of regions: those of [`Entry::list`].
    List,
}

/// A piece of a list.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// The region, and which registration of it.
    region: Tag,
    generation: u64,
    /// Offset in the region's buffer, and bytes.
    offset: u64,
    length: u32,
}

/// The pieces of a list, one after another. It is made with its entry, so that registrations take no
/// memory.
#[derive(Clone, Debug)]
struct List {
    length: u64,
    pieces: Vec<Piece>,
}

/// The memory behind a span, or behind what of it lies in one piece of a list.
struct Part<'a> {
    memory: Backing<'a>,
    /// Where in that memory.
    start: u64,
    /// Where in that memory the span ends: how much of it will be wanted.
    end: u64,
}

/// Where a part of a span is.
enum Place<'a> {
    Part(Part<'a>),
    /// In the pieces of a list, from this byte of them on.
    List(&'a List, u64),
}

/// What is behind a span.
#[derive(Clone, Copy)]
enum Backing<'a> {
    /// All of host memory, by DMA address.
    All,
    Host(&'a Att),
    /// Pages that come and go, and the tag of the region.
    Paged(&'a PagedAtt, u32),
    /// Device memory, from this offset on.
    Device(u64),
}

/// An entry of the table.
#[derive(Clone, Debug)]
struct Entry {
    kind: TagKind,
    instance: u8,
    pd: u32,
    access: u32,
    /// Address of the first byte, as users of the tag say it.
    address: u64,
    /// What it stands for; none while the entry is not valid.
    target: Option<Target>,
    /// Most pages, for a region reserved with `AllocateTag`; zero for a region by command.
    max_pages: u32,
    /// Which registration or bind this is, of all there ever were.
    generation: u64,
    /// Windows bound to this region.
    windows: u32,
    /// One-touch: where the first message ends, when its end has come before its beginning.
    touched: Option<u32>,
    /// It was registered by a work request that is not complete because something before it is not.
    early: bool,
    /// There is nothing but the memory that its registration failed. Made by `RegisterRegion`
    /// it has no `max_pages`, by `AllocateTag` it has.
    failed: bool,
    /// Of a list: its pieces, of use while it is valid.
    list: Option<Box<List>>,
}

impl Entry {
    fn length(&self) -> u64 {
        match &self.target {
            Some(Target::Host(att, _)) => att.length(),
            Some(Target::Paged(att)) => att.length(),
            Some(Target::Device { length, .. }) => *length,
            Some(Target::Window(binding)) => binding.length,
            Some(Target::List) => self.list.as_ref().map_or(0, |list| list.length),
            None => 0,
        }
    }

    fn is_window(&self) -> bool {
        matches!(self.kind, TagKind::Window1 | TagKind::Window2B)
    }

    /// Whether `ReleaseTag` may name it so: what was made with `AllocateTag` under any instance, since
    /// its registrations or binds change that.
    fn is_released_by(&self, tag: Tag) -> bool {
        self.is_window() || self.max_pages != 0 || self.instance == tag.instance()
    }

    /// Offset of a range from the first byte, when it is all inside.
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

/// A registration by `RegisterRegion`, or a reservation by `AllocateTag`, that was taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Registration {
    tag: Tag,
    /// The tag can be used under any instance, as registrations and binds give it one.
    any: bool,
}

impl Registration {
    fn is_of(&self, tag: Tag) -> bool {
        self.any || self.tag == tag
    }
}

/// Commands on the tags of one index that were taken up and are not finished. Meanwhile the entry,
/// if there is one, stands for nothing.
#[derive(Debug, Default)]
struct InFlight {
    commands: u32,
    /// The registrations among them that no release behind them undoes; each once, so that there are
    /// hardly more than instances.
    pending: Vec<Registration>,
    /// The tags that are released among them, each once.
    leaving: Vec<Tag>,
    /// What the entry stood for.
    aside: Option<Target>,
}

impl InFlight {
    /// Whether a use of `tag` waits, where `entry` is what there is.
    fn awaits(&self, tag: Tag, entry: Option<&Entry>) -> bool {
        // A registration that is refused leaves what was there before it.
        let may_stay = self.aside.is_some()
            && entry.is_some_and(|entry| {
                let leaves = self.leaving.iter().any(|tag| entry.is_released_by(*tag));
                entry.instance == tag.instance() && !leaves
            });
        may_stay || self.pending.iter().any(|pending| pending.is_of(tag))
    }
}

/// The table.
#[derive(Debug)]
pub struct Tpt {
    entries: NumberTable<Entry>,
    /// By index. No more than commands fit in the control ring.
    in_flight: BTreeMap<u32, InFlight>,
    /// Registrations and binds so far.
    generation: u64,
    /// Queue pairs with the indices of the type 2 windows that are bound to them.
    bound: BTreeSet<(u32, u32)>,
    /// Registrations by work requests that are not complete because something before them is not.
    early: u32,
    /// Device memory.
    pub device: DeviceMemory,
}

fn att_status(error: AttError) -> CommandStatus {
    match error {
        AttError::Memory(_) => CommandStatus::HostMemory,
        _ => CommandStatus::BadParameter,
    }
}

/// What a page error of an access to the region `tag` is, of which bytes up to `end` will be wanted.
fn absent(error: PageError, end: u64, tag: u32, write: bool) -> TptError {
    match error {
        PageError::Att(error) => error.into(),
        PageError::Absent(offset) => {
            // The offset lies before the end.
            let rest = end.saturating_sub(offset);
            TptError::Absent(Fault {
                tag,
                offset,
                length: u32::try_from(rest).unwrap_or(u32::MAX).max(1),
                write,
            })
        }
    }
}

impl Tpt {
    pub(crate) fn new(indices: Numbers) -> Self {
        Self {
            entries: NumberTable::new(indices),
            in_flight: BTreeMap::new(),
            generation: 0,
            bound: BTreeSet::new(),
            early: 0,
            device: DeviceMemory::default(),
        }
    }

    fn entry(&self, tag: Tag) -> Result<&Entry, TptError> {
        let entry = self.entries.get(tag.index());
        entry.ok_or_else(|| self.not_valid(tag))
    }

    /// Why a tag stands for nothing.
    #[cold]
    fn not_valid(&self, tag: Tag) -> TptError {
        let entry = self.entries.get(tag.index());
        if let Some(in_flight) = self.in_flight.get(&tag.index()) {
            if in_flight.awaits(tag, entry) {
                return TptError::Pending(tag.index());
            }
        }
        match entry {
            Some(entry) if !entry.failed => TptError::NotValid,
            Some(entry) if entry.max_pages != 0 || entry.instance == tag.instance() => {
                TptError::RegistrationFailed
            }
            _ => TptError::NoEntry,
        }
    }

    /// Refuses what would make a tag valid while commands on it are not finished, or after its
    /// registration failed.
    fn at_rest(&self, tag: Tag) -> Result<(), TptError> {
        let failed = self.entry(tag)?.failed;
        if failed || self.in_flight.contains_key(&tag.index()) {
            return Err(self.not_valid(tag));
        }
        Ok(())
    }

    /// Refuses a use of a tag that has to wait; nearly always nothing has.
    pub(crate) fn ready(&self, tag: u32) -> Result<(), TptError> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        let tag = Tag(tag);
        match self.in_flight.get(&tag.index()) {
            Some(in_flight) if in_flight.awaits(tag, self.entries.get(tag.index())) => {
                Err(TptError::Pending(tag.index()))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a tag that stands for nothing, whatever it would be used for.
    pub(crate) fn stands(&self, tag: u32) -> Result<(), TptError> {
        let tag = Tag(tag);
        let entry = self.entry(tag)?;
        if entry.target.is_none() {
            return Err(self.not_valid(tag));
        }
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        Ok(())
    }

    /// A registration of `tag` by `RegisterRegion` or, under `any` instance, a reservation by
    /// `AllocateTag` was taken up: until it is [finished](Tpt::finish) the tag is pending. False when
    /// there can be no such tag.
    pub(crate) fn take_up_registration(&mut self, tag: Tag, any: bool) -> bool {
        if self.entries.check(tag.index()).is_err() {
            return false;
        }
        let in_flight = self.in_flight.entry(tag.index()).or_default();
        // As many as the ring has entries at most.
        in_flight.commands += 1;
        let registration = Registration { tag, any };
        if !in_flight.pending.contains(&registration) {
            in_flight.pending.push(registration);
        }
        self.set_aside(tag.index());
        true
    }

    /// A release of `tag` was taken up: until it is [finished](Tpt::finish) the tag is leaving. False
    /// when it names nothing that there is or will be, or something that will stay.
    pub(crate) fn take_up_release(&mut self, tag: Tag) -> bool {
        let entry = self.entries.get(tag.index());
        let is_there = entry.is_some_and(|entry| entry.is_released_by(tag));
        let will_be = self.in_flight.get(&tag.index()).is_some_and(|in_flight| {
            let mut pending = in_flight.pending.iter();
            pending.any(|pending| pending.is_of(tag))
        });
        if !is_there && !will_be || self.is_busy(tag) {
            return false;
        }
        let in_flight = self.in_flight.entry(tag.index()).or_default();
        in_flight.commands += 1;
        if !in_flight.leaving.contains(&tag) {
            in_flight.leaving.push(tag);
        }
        in_flight.pending.retain(|pending| !pending.is_of(tag));
        self.set_aside(tag.index());
        // What was lent of it is read from here on no more than it is used otherwise.
        let in_flight = self.in_flight.get_mut(&tag.index());
        if let Some(Target::Host(_, lender)) = in_flight.and_then(|it| it.aside.as_mut()) {
            lender.end();
        }
        true
    }

    /// Whether a release that is taken up now will find windows bound to the region, as far as can be
    /// said: nothing else becomes of it before, nor of so many windows.
    fn is_busy(&self, tag: Tag) -> bool {
        let entry = self.entries.get(tag.index());
        let windows = entry.map_or(0, |entry| entry.windows as usize);
        if windows == 0 || self.in_flight.contains_key(&tag.index()) {
            return false;
        }
        let of_region = |in_flight: &&InFlight| matches!(&in_flight.aside, Some(Target::Window(window)) if window.region.index() == tag.index());
        self.in_flight
            .values()
            .filter(of_region)
            .take(windows)
            .count()
            < windows
    }

    /// The entry stands for nothing while there are commands on it.
    fn set_aside(&mut self, index: u32) {
        if let (Some(in_flight), Some(entry)) =
            (self.in_flight.get_mut(&index), self.entries.get_mut(index))
        {
            if entry.target.is_some() {
                in_flight.aside = entry.target.take();
            }
        }
    }

    /// The entry stands for what it did again, until [`Tpt::finish`] or [`Tpt::leave`]: a command on
    /// it is carried out.
    pub(crate) fn enter(&mut self, tag: Tag) {
        if let Some(in_flight) = self.in_flight.get_mut(&tag.index()) {
            let aside = in_flight.aside.take();
            if let Some(entry) = self.entries.get_mut(tag.index()) {
                if aside.is_some() {
                    entry.target = aside;
                }
            }
        }
    }

    /// A command that is not counted among those that were taken up was carried out.
    pub(crate) fn leave(&mut self, tag: Tag) {
        self.set_aside(tag.index());
    }

    /// A command that was taken up was carried out.
    pub(crate) fn finish(&mut self, tag: Tag) {
        let index = tag.index();
        if let Some(in_flight) = self.in_flight.get_mut(&index) {
            in_flight.commands = in_flight.commands.saturating_sub(1);
            if in_flight.commands == 0 {
                self.in_flight.remove(&index);
            }
        }
        self.set_aside(index);
    }

    /// The registration of `tag`, or its reservation under `any` instance, failed. What else has its
    /// index stays what it is.
    pub(crate) fn registration_failed(&mut self, tag: Tag, any: bool) {
        let Ok(slot) = self.entries.slot(tag.index()) else {
            return;
        };
        if slot.as_ref().is_none_or(|entry| entry.failed) {
            *slot = Some(Box::new(Entry {
                kind: TagKind::Region,
                instance: tag.instance(),
                pd: 0,
                access: 0,
                address: 0,
                target: None,
                max_pages: any.into(),
                generation: 0,
                windows: 0,
                touched: None,
                early: false,
                failed: true,
                list: None,
            }));
        }
    }

    /// Commands that were taken up and are not finished, for tests of what is left over.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn entry_mut(&mut self, tag: Tag) -> Result<&mut Entry, TptError> {
        if self.entries.get(tag.index()).is_none() {
            return Err(self.not_valid(tag));
        }
        self.entries.get_mut(tag.index()).ok_or(TptError::NoEntry)
    }

    /// Carries out `RegisterRegion`.
    pub(crate) fn register(&mut self, command: &RegisterRegion) -> Result<(), CommandStatus> {
        let tag = Tag(command.tag);
        let known = REGION_REPLACE | REGION_DEVICE_MEMORY | REGION_ON_DEMAND;
        if command.access & !ACCESS_ALL != 0 || command.flags & !known != 0 {
            return Err(CommandStatus::BadParameter);
        }
        let buffer = &command.buffer;
        let length = buffer.length;
        let paged = command.flags & REGION_ON_DEMAND != 0;
        if (length > MAX_REGION && !paged) || command.address.checked_add(length).is_none() {
            return Err(CommandStatus::BadParameter);
        }
        let target = if paged {
            // What waits for a page waits for that of a registration, which stays what it is.
            if command.flags != REGION_ON_DEMAND {
                return Err(CommandStatus::BadParameter);
            }
            Target::Paged(PagedAtt::new(buffer).map_err(att_status)?)
        } else if command.flags & REGION_DEVICE_MEMORY != 0 {
            // Cannot wrap for a direct buffer.
            let offset = buffer.root.wrapping_add(u64::from(buffer.fbo));
            Att::new(buffer).map_err(att_status)?;
            if buffer.order != AttOrder::Direct.number()
                || offset > DEVICE_MEMORY_SIZE as u64
                || length > DEVICE_MEMORY_SIZE as u64 - offset
            {
                return Err(CommandStatus::BadParameter);
            }
            Target::Device { offset, length }
        } else {
            Target::Host(Att::new(buffer).map_err(att_status)?, Lender::default())
        };
        self.generation += 1;
        let generation = self.generation;
        let replace = command.flags & REGION_REPLACE != 0;
        let slot = self.entries.slot(tag.index())?;
        match slot.as_ref().filter(|entry| !entry.failed) {
            Some(_) if !replace => return Err(CommandStatus::Exists),
            None if replace => return Err(CommandStatus::NotFound),
            Some(entry) if entry.kind != TagKind::Region => {
                return Err(CommandStatus::BadParameter);
            }
            Some(entry) if entry.windows != 0 => return Err(CommandStatus::Busy),
            _ => {}
        }
        *slot = Some(Box::new(Entry {
            kind: TagKind::Region,
            instance: tag.instance(),
            pd: command.pd,
            access: command.access,
            address: command.address,
            target: Some(target),
            max_pages: 0,
            generation,
            windows: 0,
            touched: None,
            early: false,
            failed: false,
            list: None,
        }));
        Ok(())
    }

    /// Carries out `AllocateTag`.
    pub(crate) fn allocate(&mut self, command: &AllocateTag) -> Result<(), CommandStatus> {
        let tag = Tag(command.tag);
        let kind = TagKind::from_number(command.kind).ok_or(CommandStatus::BadParameter)?;
        let pages = match kind {
            TagKind::Region => 1..=MAX_FAST_PAGES,
            TagKind::Window1 | TagKind::Window2B => 0..=0,
            TagKind::List => 1..=MAX_PIECES as u32,
        };
        if !pages.contains(&command.max_pages) {
            return Err(CommandStatus::BadParameter);
        }
        let slot = self.entries.slot(tag.index())?;
        if slot.as_ref().is_some_and(|entry| !entry.failed) {
            return Err(CommandStatus::Exists);
        }
        // Every tag may be that of a list of the most pieces: pieces are nothing that one user could
        // take from all others while there are tags.
        let list = (kind == TagKind::List).then(|| {
            Box::new(List {
                length: 0,
                pieces: Vec::with_capacity(command.max_pages as usize),
            })
        });
        *slot = Some(Box::new(Entry {
            kind,
            instance: tag.instance(),
            pd: command.pd,
            access: 0,
            address: 0,
            target: None,
            max_pages: command.max_pages,
            generation: 0,
            windows: 0,
            touched: None,
            early: false,
            failed: false,
            list,
        }));
        Ok(())
    }

    /// Carries out `ReleaseTag`.
    pub(crate) fn release(&mut self, tag: Tag) -> Result<(), CommandStatus> {
        self.entries.check(tag.index())?;
        match self.entry(tag) {
            Ok(entry) if entry.windows != 0 => Err(CommandStatus::Busy),
            Ok(entry) if entry.is_released_by(tag) => {
                self.unbind(tag);
                *self.entries.slot(tag.index())? = None;
                Ok(())
            }
            _ => Err(CommandStatus::NotFound),
        }
    }

    /// Carries out `QueryTag`, whatever the instance.
    pub(crate) fn query(&self, tag: Tag) -> Result<TagState, CommandStatus> {
        let entry = self.entries.find(tag.index())?;
        let (flags, binding) = match &entry.target {
            Some(Target::Paged(_)) => (REGION_ON_DEMAND, None),
            Some(Target::Device { .. }) => (REGION_DEVICE_MEMORY, None),
            Some(Target::Window(binding)) => (0, Some(binding)),
            Some(Target::Host(..) | Target::List) | None => (0, None),
        };
        Ok(TagState {
            tag: Tag::new(tag.index(), entry.instance).0,
            pd: entry.pd,
            access: entry.access,
            flags,
            address: entry.address,
            length: entry.length(),
            kind: entry.kind.number(),
            valid: u8::from(entry.target.is_some()),
            failed: u8::from(entry.failed),
            // One that failed has it for a mark only.
            max_pages: if entry.failed { 0 } else { entry.max_pages },
            windows: entry.windows,
            region: binding.map_or(0, |binding| binding.region.0),
            qpn: binding.and_then(|binding| binding.qpn).unwrap_or(0),
            ..TagState::zeroed()
        })
    }

    /// Carries out a registration from the send queue of a queue pair in domain `pd`.
    pub fn register_from_queue(
        &mut self,
        part: &FastRegisterPart,
        pd: u32,
    ) -> Result<(), TptError> {
        let tag = Tag(part.tag);
        self.at_rest(tag)?;
        self.generation += 1;
        let generation = self.generation;
        let entry = self.entry_mut(tag)?;
        if entry.kind != TagKind::Region || entry.max_pages == 0 {
            return Err(TptError::NotRegistrable);
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        if entry.target.is_some() {
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
        entry.target = Some(Target::Host(att, Lender::default()));
        entry.generation = generation;
        entry.touched = None;
        entry.early = false;
        Ok(())
    }

    /// Carries out the registration of a list from the send queue of a queue pair in domain `pd`.
    /// Nothing is changed when it is refused.
    pub fn register_list(
        &mut self,
        part: &ListPart,
        sges: &[Sge],
        pd: u32,
    ) -> Result<(), TptError> {
        let tag = Tag(part.tag);
        self.at_rest(tag)?;
        let entry = self.entry(tag)?;
        if entry.kind != TagKind::List {
            return Err(TptError::NotRegistrable);
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        // One that lost a piece is as good as invalidated.
        if entry.target.is_some() {
            match self.check_pieces(entry) {
                Ok(()) => return Err(TptError::AlreadyValid),
                Err(error @ TptError::Pending(_)) => return Err(error),
                Err(_) => {}
            }
        }
        if part.access & !(ACCESS_ALL & !ACCESS_WINDOW_BIND) != 0 {
            return Err(TptError::AccessDenied);
        }
        if sges.is_empty() || sges.len() > entry.max_pages as usize {
            return Err(TptError::NotRegistrable);
        }
        let mut pieces = [None; MAX_PIECES];
        let mut length = 0;
        for (slot, sge) in pieces.iter_mut().zip(sges) {
            *slot = Some(self.check_piece(sge, part.access, pd)?);
            length += u64::from(sge.length);
        }
        if part.address.checked_add(length).is_none() {
            return Err(TptError::OutOfBounds);
        }
        self.generation += 1;
        let generation = self.generation;
        let entry = self.entry_mut(tag)?;
        let list = entry.list.as_mut().ok_or(TptError::NotRegistrable)?;
        list.length = length;
        list.pieces.clear();
        // Within the capacity it was made with.
        list.pieces.extend(pieces.into_iter().flatten());
        entry.instance = tag.instance();
        entry.access = part.access;
        entry.address = part.address;
        entry.target = Some(Target::List);
        entry.generation = generation;
        entry.touched = None;
        entry.early = false;
        Ok(())
    }

    /// Checks a piece of a list that is to give the rights `access` in domain `pd`.
    fn check_piece(&self, sge: &Sge, access: u32, pd: u32) -> Result<Piece, TptError> {
        let region = Tag(sge.lkey);
        if sge.length == 0 {
            return Err(TptError::PieceEmpty);
        }
        if sge.lkey == TAG_ALL_MEMORY {
            return Err(TptError::PieceKind);
        }
        let span = self
            .check(region, pd, None, sge.address, sge.length.into(), 0)
            .map_err(|error| match error {
                TptError::WrongKind => TptError::PieceKind,
                TptError::Pending(_) | TptError::RegistrationFailed => error,
                _ => TptError::PieceRefused,
            })?;
        let entry = self.entry(region)?;
        if entry.kind != TagKind::Region {
            return Err(TptError::PieceKind);
        }
        let mut needed = access & (ACCESS_REMOTE | ACCESS_LOCAL_WRITE | ACCESS_FLUSH_GLOBAL);
        if access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0 {
            needed |= ACCESS_LOCAL_WRITE;
        }
        if entry.access & needed != needed {
            return Err(TptError::PieceRights);
        }
        Ok(Piece {
            region,
            generation: span.generation,
            offset: span.start,
            length: sge.length,
        })
    }

    /// Checks that every piece of a list is still the registration that it was made of.
    fn check_pieces(&self, entry: &Entry) -> Result<(), TptError> {
        let list = entry.list.as_ref().ok_or(TptError::NotValid)?;
        let mut pending = Ok(());
        for piece in &list.pieces {
            match self.target(piece.region, piece.generation) {
                Ok(_) => {}
                // Nothing is waited for in vain.
                Err(error @ TptError::Pending(_)) => pending = Err(error),
                Err(_) => return Err(TptError::NotValid),
            }
        }
        pending
    }

    /// What a tag was made as, valid or not.
    pub fn kind(&self, tag: u32) -> Option<TagKind> {
        let entry = self.entry(Tag(tag)).ok();
        entry.filter(|entry| !entry.failed).map(|entry| entry.kind)
    }

    /// Notes that the work request that has just registered `tag` is not complete because something
    /// before it is not; until [`Tpt::settled`], to which the result is given.
    pub(crate) fn unsettled(&mut self, tag: u32) -> u64 {
        self.early += 1;
        match self.entry_mut(Tag(tag)) {
            Ok(entry) => {
                entry.early = true;
                entry.generation
            }
            // Nobody calls it for such a tag; no registration has this number.
            Err(_) => 0,
        }
    }

    /// Nothing before the work request that registered `tag` is open any more.
    pub(crate) fn settled(&mut self, tag: u32, generation: u64) {
        self.early = self.early.saturating_sub(1);
        if let Ok(entry) = self.entry_mut(Tag(tag)) {
            if entry.generation == generation {
                entry.early = false;
            }
        }
    }

    /// Whether any use may be an [early](Tpt::is_early) one; nearly always none is.
    pub(crate) fn has_early(&self) -> bool {
        self.early != 0
    }

    /// Whether a use of `tag` is an early one: of a registration that is [not
    /// settled](Tpt::unsettled), directly or through a window or list.
    pub(crate) fn is_early(&self, tag: u32) -> bool {
        if !self.has_early() {
            return false;
        }
        let is_early = |tag: Tag| self.entry(tag).is_ok_and(|entry| entry.early);
        let tag = Tag(tag);
        let Ok(entry) = self.entry(tag) else {
            return false;
        };
        entry.early
            || match &entry.target {
                Some(Target::Window(binding)) => is_early(binding.region),
                Some(Target::List) => entry.list.as_ref().is_some_and(|list| {
                    let mut pieces = list.pieces.iter();
                    pieces.any(|piece| is_early(piece.region))
                }),
                _ => false,
            }
    }

    /// The same of a span that passed its check.
    pub(crate) fn is_early_span(&self, span: &Span) -> bool {
        span.tag.0 != TAG_ALL_MEMORY && self.is_early(span.tag.0)
    }

    /// Invalidates a tag, for a work request (`LocalInvalidate`) or a peer (`SendInvalidate`) of
    /// the queue pair `holder`. Only regions and lists made with `AllocateTag` can be invalidated,
    /// and type 2 windows bound to that queue pair.
    pub fn invalidate(&mut self, tag: u32, holder: Holder) -> Result<(), TptError> {
        let tag = Tag(tag);
        let entry = self.entry(tag)?;
        let target = entry.target.as_ref();
        match target.ok_or_else(|| self.not_valid(tag))? {
            Target::Window(Binding { qpn: None, .. }) => return Err(TptError::WrongKind),
            Target::Window(Binding { qpn: Some(qpn), .. }) if *qpn != holder.qpn => {
                return Err(TptError::WrongQueuePair);
            }
            Target::Window(_) => {}
            _ if entry.max_pages == 0 => return Err(TptError::WrongKind),
            _ => {}
        }
        if entry.pd != holder.pd {
            return Err(TptError::WrongDomain);
        }
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        if entry.windows != 0 {
            return Err(TptError::HasWindows);
        }
        self.unbind(tag);
        self.entry_mut(tag)?.target = None;
        Ok(())
    }

    /// Carries out a bind from the send queue of the queue pair `holder`. Nothing is changed when
    /// it is refused.
    pub fn bind(&mut self, part: &BindPart, holder: Holder) -> Result<(), TptError> {
        let tag = Tag(part.window);
        let new_tag = Tag(part.new_window);
        self.at_rest(tag)?;
        let window = self.entry(tag)?;
        if !window.is_window() {
            return Err(TptError::WrongKind);
        }
        if window.pd != holder.pd {
            return Err(TptError::WrongDomain);
        }
        // The instance of `window` does not count: a host that had binds refused or flushed cannot
        // know which of them was the last to be carried out.
        if new_tag.index() != tag.index() {
            return Err(TptError::WrongInstance);
        }
        let qpn = match window.kind {
            TagKind::Window2B if window.target.is_some() => return Err(TptError::AlreadyValid),
            // Those are invalidated, never unbound.
            TagKind::Window2B if part.length == 0 => return Err(TptError::OutOfBounds),
            TagKind::Window2B => Some(holder.qpn),
            _ => None,
        };
        if part.length == 0 {
            self.unbind(tag);
            let window = self.entry_mut(tag)?;
            window.instance = new_tag.instance();
            window.target = None;
            return Ok(());
        }
        let region_tag = Tag(part.region);
        let region = self.entry(region_tag)?;
        if region.target.is_none() {
            return Err(self.not_valid(region_tag));
        }
        if region.kind != TagKind::Region {
            return Err(TptError::WrongKind);
        }
        if region.pd != holder.pd {
            return Err(TptError::WrongDomain);
        }
        if region.instance != region_tag.instance() {
            return Err(TptError::WrongInstance);
        }
        let offset = region
            .offset_of(part.address, part.length)
            .ok_or(TptError::OutOfBounds)?;
        let mut needed = ACCESS_WINDOW_BIND;
        if part.access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0 {
            needed |= ACCESS_LOCAL_WRITE;
        }
        if part.access & !(ACCESS_REMOTE | ACCESS_ZERO_BASED | ACCESS_ONE_TOUCH) != 0
            || region.access & needed != needed
        {
            return Err(TptError::AccessDenied);
        }
        let binding = Binding {
            region: region_tag,
            generation: region.generation,
            offset,
            length: part.length,
            qpn,
        };
        self.unbind(tag);
        self.generation += 1;
        let generation = self.generation;
        // As many as there are entries at most.
        self.entry_mut(region_tag)?.windows += 1;
        if let Some(qpn) = qpn {
            self.bound.insert((qpn, tag.index()));
        }
        let window = self.entry_mut(tag)?;
        window.instance = new_tag.instance();
        window.access = part.access;
        window.address = part.address;
        window.generation = generation;
        window.target = Some(Target::Window(binding));
        window.touched = None;
        Ok(())
    }

    /// Frees the region and the queue pair of a window, if `tag` is one and bound; the window
    /// itself is left for the caller to change.
    fn unbind(&mut self, tag: Tag) {
        let Ok(Entry {
            target: Some(Target::Window(binding)),
            ..
        }) = self.entry(tag)
        else {
            return;
        };
        let Binding { region, qpn, .. } = *binding;
        if let Some(qpn) = qpn {
            self.bound.remove(&(qpn, tag.index()));
        }
        if let Ok(region) = self.entry_mut(region) {
            region.windows = region.windows.saturating_sub(1);
        }
    }

    /// Invalidates type 2 windows bound to a queue pair that is gone or reset, `limit` at most. Returns
    /// how many; when that is fewer, there are no others.
    ///
    /// None of them can be used meanwhile, since only that queue pair's peer could.
    pub(crate) fn invalidate_windows(&mut self, qpn: u32, limit: u32) -> u32 {
        for done in 0..limit {
            let mut bound = self.bound.range((qpn, 0)..=(qpn, u32::MAX));
            let Some(&(_, index)) = bound.next() else {
                return done;
            };
            let tag = Tag::new(index, 0);
            // It may be leaving, or about to be replaced.
            self.enter(tag);
            self.unbind(tag);
            // Taken away by `unbind` already, unless the table contradicts itself.
            self.bound.remove(&(qpn, index));
            if let Ok(window) = self.entry_mut(tag) {
                window.target = None;
            }
        }
        limit
    }

    /// The checks that local and remote accesses share, in the specification's order. `peer_of` is
    /// the queue pair whose peer asks, if it is a peer.
    fn check(
        &self,
        tag: Tag,
        pd: u32,
        peer_of: Option<Holder>,
        address: u64,
        length: u64,
        needed: u32,
    ) -> Result<Span, TptError> {
        let entry = self.entry(tag)?;
        let target = entry.target.as_ref();
        let mut first = 0;
        match target.ok_or_else(|| self.not_valid(tag))? {
            Target::Window(binding) => {
                let peer_of = peer_of.ok_or(TptError::WrongKind)?;
                if binding.qpn.is_some_and(|qpn| qpn != peer_of.qpn) {
                    return Err(TptError::WrongQueuePair);
                }
                first = binding.offset;
            }
            target => {
                if matches!(target, Target::List) {
                    self.check_pieces(entry)?;
                }
                let rights = ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL;
                let is_let_in = |peer: Holder| !peer.windows_only && entry.access & rights != 0;
                if !peer_of.is_none_or(is_let_in) {
                    return Err(TptError::WrongKind);
                }
            }
        }
        if entry.pd != pd {
            return Err(TptError::WrongDomain);
        }
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        let within = entry
            .offset_of(address, length)
            .ok_or(TptError::OutOfBounds)?;
        if entry.access & needed != needed {
            return Err(TptError::AccessDenied);
        }
        Ok(Span {
            tag,
            // Inside the region, whose length is bounded.
            start: first + within,
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
        self.check(Tag(lkey), domain.pd, None, address, length, needed)
    }

    /// Checks what the peer of the queue pair `holder` asks for. Zero bytes need no key. The queue
    /// pair's own rights (`access`) are the caller's to check.
    pub fn check_remote(
        &self,
        rkey: u32,
        address: u64,
        length: u64,
        holder: Holder,
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
        self.check(Tag(rkey), holder.pd, Some(holder), address, length, needed)
    }

    /// Checks a flush that the peer of the queue pair `holder` asks for: of a range, given by
    /// address and length, or of the whole region. The key is checked even for no bytes at all.
    pub fn check_flush(
        &self,
        rkey: u32,
        range: Option<(u64, u64)>,
        holder: Holder,
    ) -> Result<(), TptError> {
        if rkey == TAG_ALL_MEMORY {
            return Err(TptError::NotPrivileged);
        }
        let (address, length) = match range {
            Some(range) => range,
            None => {
                let entry = self.entry(Tag(rkey))?;
                let zero_based = entry.access & ACCESS_ZERO_BASED != 0;
                (if zero_based { 0 } else { entry.address }, entry.length())
            }
        };
        let needed = ACCESS_FLUSH_GLOBAL;
        self.check(Tag(rkey), holder.pd, Some(holder), address, length, needed)?;
        Ok(())
    }

    /// Where byte `offset` of a span is, if its tag still stands for it; `length` bytes from there on
    /// are in the span.
    fn locate(&self, span: &Span, offset: u64, length: usize) -> Result<Place<'_>, TptError> {
        if offset
            .checked_add(length as u64)
            .is_none_or(|end| end > span.length)
        {
            return Err(TptError::OutOfBounds);
        }
        let start = span.start + offset;
        let end = span.start + span.length;
        let part = |memory| Place::Part(Part { memory, start, end });
        if span.tag.0 == TAG_ALL_MEMORY {
            return Ok(part(Backing::All));
        }
        let mut tag = span.tag;
        let mut target = self.target(tag, span.generation)?;
        match target {
            Target::Window(binding) => {
                tag = binding.region;
                target = self.target(tag, binding.generation)?;
            }
            Target::List => {
                let entry = self.entry(tag)?;
                self.check_pieces(entry)?;
                let list = entry.list.as_ref().ok_or(TptError::NotValid)?;
                return Ok(Place::List(list, start));
            }
            _ => {}
        }
        Ok(part(Self::memory(target, tag)?))
    }

    /// The memory of a region.
    fn memory(target: &Target, tag: Tag) -> Result<Backing<'_>, TptError> {
        match target {
            Target::Paged(att) => Ok(Backing::Paged(att, tag.0)),
            Target::Host(att, _) => Ok(Backing::Host(att)),
            Target::Device { offset, .. } => Ok(Backing::Device(*offset)),
            Target::Window(_) | Target::List => Err(TptError::WrongKind),
        }
    }

    /// Calls `each` for what of bytes `from..from + length` of a list lies in each of its pieces,
    /// with the range of it in those bytes. `end` is how far the span reaches.
    fn for_pieces<'a>(
        &'a self,
        list: &'a List,
        from: u64,
        length: usize,
        end: u64,
        mut each: impl FnMut(&Part<'a>, Range<usize>) -> Result<(), TptError>,
    ) -> Result<(), TptError> {
        let to = from + length as u64;
        // Where the piece begins in the list.
        let mut first = 0;
        for piece in &list.pieces {
            let behind = first + u64::from(piece.length);
            let (low, high) = (from.max(first), to.min(behind));
            if low < high {
                let target = self.target(piece.region, piece.generation)?;
                let part = Part {
                    memory: Self::memory(target, piece.region)?,
                    start: piece.offset + (low - first),
                    end: piece.offset + (end.min(behind) - first),
                };
                // Both are less than `length` from the beginning.
                each(&part, (low - from) as usize..(high - from) as usize)?;
            }
            first = behind;
        }
        Ok(())
    }

    /// What a tag stands for, if it is still the registration or bind that was checked.
    fn target(&self, tag: Tag, generation: u64) -> Result<&Target, TptError> {
        let entry = self.entry(tag)?;
        if entry.instance != tag.instance() {
            return Err(TptError::WrongInstance);
        }
        match &entry.target {
            Some(target) if entry.generation == generation => Ok(target),
            Some(_) => Err(TptError::NotValid),
            None => Err(self.not_valid(tag)),
        }
    }

    /// The one-touch rule, for a packet of a message that writes to `span`: whether its payload is
    /// placed. `last` for the last packet of the message. A caller that places the payload does so
    /// before it asks, with the last packet of a message in order, since the entry is not valid
    /// afterwards.
    ///
    /// The six cases: a packet that is not the last is placed (1), and any to an entry without
    /// `ACCESS_ONE_TOUCH` (2). The last packet to one that was touched is an error and makes it
    /// invalid (3). Else, in order, it makes the entry invalid (4); ahead of its time it touches the
    /// entry, which becomes invalid when the stream has come so far, see [`Tpt::caught_up`] (5);
    /// and outside of what may be received it is dropped (6).
    pub fn touch(&mut self, span: &Span, last: bool, arrival: Arrival) -> Result<Touch, TptError> {
        if span.tag.0 == TAG_ALL_MEMORY {
            return Ok(Touch::Place);
        }
        let target = self.target(span.tag, span.generation)?;
        if !last {
            return Ok(Touch::Place);
        }
        match *target {
            Target::List => self.touch_list(span, arrival),
            Target::Window(binding) => self.touch_window(span.tag, binding, arrival),
            _ => self.touch_entry(span.tag, arrival),
        }
    }

    /// The same for the last packet of a message to the entry `tag`.
    fn touch_entry(&mut self, tag: Tag, arrival: Arrival) -> Result<Touch, TptError> {
        let entry = self.entry_mut(tag)?;
        if entry.access & ACCESS_ONE_TOUCH == 0 {
            return Ok(Touch::Place);
        }
        if entry.touched.is_some() {
            self.used_up(tag);
            return Err(TptError::Touched);
        }
        match arrival {
            Arrival::InOrder => {
                self.used_up(tag);
                Ok(Touch::Place)
            }
            Arrival::Ahead(sequence) => {
                entry.touched = Some(sequence);
                Ok(Touch::Place)
            }
            Arrival::Outside => Ok(Touch::Drop),
        }
    }

    /// The same for a list: the message touches it, and the regions that it wrote to through it. So
    /// a region that takes one message takes no more by way of a list.
    fn touch_list(&mut self, span: &Span, arrival: Arrival) -> Result<Touch, TptError> {
        self.check_pieces(self.entry(span.tag)?)?;
        let mut touch = self.touch_entry(span.tag, arrival);
        self.for_touched(span, |tpt, region| {
            let piece = tpt.touch_entry(region, arrival);
            touch = touch.and_then(|touch| touch.and(piece));
        });
        touch
    }

    /// The same for a window: the message touches it, and the region that it was bound to. So it is as
    /// with a list of one piece.
    fn touch_window(
        &mut self,
        tag: Tag,
        binding: Binding,
        arrival: Arrival,
    ) -> Result<Touch, TptError> {
        self.target(binding.region, binding.generation)?;
        let touch = self.touch_entry(tag, arrival);
        let region = self.touch_entry(binding.region, arrival);
        touch.and_then(|touch| touch.and(region))
    }

    /// Calls `each` for every region, once, of which a span of a list has bytes and which is still
    /// the registration that the list was made of.
    fn for_touched(&mut self, span: &Span, mut each: impl FnMut(&mut Self, Tag)) {
        let Some(list) = self.entry_mut(span.tag).ok().and_then(|e| e.list.take()) else {
            return;
        };
        let (mut first, mut touched) = (0, None);
        for (n, piece) in list.pieces.iter().enumerate() {
            let behind = first + u64::from(piece.length);
            if span.start < behind && first < span.start + span.length {
                let earlier = &list.pieces[*touched.get_or_insert(n)..n];
                let is_first = earlier.iter().all(|other| other.region != piece.region);
                if is_first && self.target(piece.region, piece.generation).is_ok() {
                    each(self, piece.region);
                }
            }
            first = behind;
        }
        if let Ok(entry) = self.entry_mut(span.tag) {
            entry.list = Some(list);
        }
    }

    /// The stream of the connection that touched `tag` has been received up to and including
    /// `sequence`. True when that ends the tag's life, or that of a region of the list or window that it
    /// is.
    pub fn caught_up(&mut self, tag: Tag, sequence: u32) -> bool {
        let mut ends = false;
        // Before the window is unbound.
        if let Ok(&Entry {
            target:
                Some(Target::Window(Binding {
                    region, generation, ..
                })),
            ..
        }) = self.entry(tag)
        {
            ends =
                self.target(region, generation).is_ok() && self.entry_caught_up(region, sequence);
        }
        ends |= self.entry_caught_up(tag, sequence);
        if let Ok(Entry {
            kind: TagKind::List,
            list: Some(list),
            generation,
            ..
        }) = self.entry(tag)
        {
            let all = Span {
                tag,
                start: 0,
                length: list.length,
                generation: *generation,
            };
            self.for_touched(&all, |tpt, region| {
                ends |= tpt.entry_caught_up(region, sequence);
            });
        }
        ends
    }

    fn entry_caught_up(&mut self, tag: Tag, sequence: u32) -> bool {
        let ends = self.entry(tag).is_ok_and(|entry| {
            entry.instance == tag.instance()
                && entry
                    .touched
                    .is_some_and(|end| sequence.wrapping_sub(end) < 1 << 31)
        });
        if ends {
            self.used_up(tag);
        }
        ends
    }

    /// A read or atomic of a queue pair in `domain` has filled the memory that scatter/gather entries
    /// describe: the message that its answer is was complete, in order.
    pub fn touch_local(&mut self, sges: &[Sge], domain: Domain) {
        // All of it is found before any is touched: what one entry uses up may be a piece of the list
        // that the next one is of.
        let mut spans = [None; MAX_SGE];
        for (span, sge) in spans.iter_mut().zip(sges) {
            *span = self.filled(sge, domain);
        }
        for span in spans.into_iter().flatten() {
            // What was touched before is not valid afterwards either.
            let _ = self.touch_entry(span.tag, Arrival::InOrder);
            self.for_touched(&span, |tpt, region| {
                let _ = tpt.touch_entry(region, Arrival::InOrder);
            });
        }
    }

    /// What an entry that was filled stands for, if it has bytes and its tag still stands for
    /// anything. A list that has lost a piece meanwhile still has others that were written.
    fn filled(&self, sge: &Sge, domain: Domain) -> Option<Span> {
        let tag = Tag(sge.lkey);
        let length = u64::from(sge.length);
        let entry = self.entry(tag).ok()?;
        let present = entry.target.is_some() && entry.instance == tag.instance();
        if length == 0 || !present || entry.is_window() || entry.pd != domain.pd {
            return None;
        }
        Some(Span {
            tag,
            start: entry.offset_of(sge.address, length)?,
            length,
            generation: entry.generation,
        })
    }

    /// Makes a one-touch entry invalid.
    fn used_up(&mut self, tag: Tag) {
        self.unbind(tag);
        if let Ok(entry) = self.entry_mut(tag) {
            entry.target = None;
            entry.touched = None;
        }
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
            Place::Part(part) => self.read_part(memory, &part, bytes),
            Place::List(list, from) => {
                let end = span.start + span.length;
                self.for_pieces(list, from, bytes.len(), end, |part, range| {
                    self.read_part(memory, part, &mut bytes[range])
                })
            }
        }
    }

    fn read_part<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        part: &Part<'_>,
        bytes: &mut [u8],
    ) -> Result<(), TptError> {
        let start = part.start;
        Ok(match part.memory {
            Backing::Paged(att, tag) => {
                let read = att.read(memory, start, bytes);
                return read.map_err(|error| absent(error, part.end, tag, false));
            }
            Backing::All => memory.read(start, bytes).map_err(AttError::from),
            Backing::Host(att) => att.read(memory, start, bytes),
            // Inside device memory, whose size is bounded.
            Backing::Device(offset) => self.device.read(offset + start, bytes),
        }?)
    }

    /// Copies to a span, starting at its byte `offset`.
    pub fn write<'a, M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        offset: u64,
        data: impl Into<Data<'a>>,
    ) -> Result<(), TptError> {
        let data = data.into();
        match self.locate(span, offset, data.len())? {
            _ if data.is_empty() => Ok(()),
            Place::Part(part) => self.write_part(memory, &part, data),
            Place::List(list, from) => {
                let end = span.start + span.length;
                // Nothing is written unless all of the pages are there.
                self.for_pieces(list, from, data.len(), end, |part, range| {
                    Self::probe_part(memory, part, range.len(), true)
                })?;
                self.for_pieces(list, from, data.len(), end, |part, range| {
                    self.write_part(memory, part, data.slice(range))
                })
            }
        }
    }

    /// Lends a part of a span, from its byte `offset` on, until the registration ends. False where that
    /// cannot be: what ends a window or a list is not only what ends the registrations behind it, pages
    /// come and go, and device memory is nobody else's. What was added to the loan then is of no use.
    pub fn lend<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        offset: u64,
        length: usize,
        loan: &mut Loan,
    ) -> Result<bool, TptError> {
        let Place::Part(part) = self.locate(span, offset, length)? else {
            return Ok(false);
        };
        match part.memory {
            // Only those who may read all of it at any time have that.
            Backing::All => Ok(memory
                .lend(part.start, length, loan)
                .map_err(AttError::from)?),
            Backing::Host(att) => {
                let Target::Host(_, lender) = self.target(span.tag, span.generation)? else {
                    return Ok(false);
                };
                loan.depend_on(lender);
                Ok(att.lend(memory, part.start, length, loan)?)
            }
            Backing::Paged(..) | Backing::Device(_) => Ok(false),
        }
    }

    fn write_part<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        part: &Part<'_>,
        data: Data<'_>,
    ) -> Result<(), TptError> {
        let start = part.start;
        Ok(match part.memory {
            Backing::Paged(att, tag) => {
                let written = att.write(memory, start, data);
                return written.map_err(|error| absent(error, part.end, tag, true));
            }
            Backing::All => memory.place(start, data).map_err(AttError::from),
            Backing::Host(att) => att.write(memory, start, data),
            Backing::Device(offset) => match data.bytes() {
                Some(bytes) => self.device.write(offset + start, &bytes),
                None => Err(AttError::OutOfRange),
            },
        }?)
    }

    /// Looks whether the pages of a part of a span are there, so that a copy from it or, with
    /// `write`, to it will not find one absent. Only on-demand regions are looked at.
    pub fn probe<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        offset: u64,
        length: usize,
        write: bool,
    ) -> Result<(), TptError> {
        match self.locate(span, offset, length)? {
            Place::Part(part) => Self::probe_part(memory, &part, length, write),
            Place::List(list, from) => {
                let end = span.start + span.length;
                self.for_pieces(list, from, length, end, |part, range| {
                    Self::probe_part(memory, part, range.len(), write)
                })
            }
        }
    }

    fn probe_part<M: HostMemory + ?Sized>(
        memory: &M,
        part: &Part<'_>,
        length: usize,
        write: bool,
    ) -> Result<(), TptError> {
        match part.memory {
            Backing::Paged(att, tag) => att
                .pieces(memory, part.start, length as u64, write, |_, _| {})
                .map_err(|error| absent(error, part.end, tag, write)),
            _ => Ok(()),
        }
    }

    /// Carries out `InvalidatePages`. Tables are read at every access, and an access ends before
    /// the next command begins: there is nothing to do.
    pub(crate) fn invalidate_pages(&self, command: &InvalidatePages) -> Result<(), CommandStatus> {
        let tag = Tag(command.tag);
        let entry = self.entries.find(tag.index())?;
        if entry.failed || entry.instance != tag.instance() {
            return Err(CommandStatus::NotFound);
        }
        let Some(Target::Paged(att)) = &entry.target else {
            return Err(CommandStatus::BadParameter);
        };
        let end = command.first.checked_add(command.count);
        if end.is_none_or(|end| end > att.pages()) {
            return Err(CommandStatus::BadParameter);
        }
        Ok(())
    }

    /// Changes the eight bytes of a span; returns what they were. The caller has refused addresses
    /// that are not multiples of eight. This is a message that [touches](Tpt::touch), in order.
    pub fn atomic<M: HostMemory + ?Sized>(
        &mut self,
        memory: &M,
        span: &Span,
        operation: AtomicOperation,
    ) -> Result<u64, TptError> {
        let original = self.change(memory, span, operation)?;
        self.touch(span, true, Arrival::InOrder)?;
        Ok(original)
    }

    fn change<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        span: &Span,
        operation: AtomicOperation,
    ) -> Result<u64, TptError> {
        let mut found = None;
        match self.locate(span, 0, 8)? {
            Place::Part(part) => found = Some(part),
            Place::List(list, from) => {
                let end = span.start + span.length;
                self.for_pieces(list, from, 8, end, |part, range| {
                    // Else they are in several pieces, and not together anywhere.
                    if range.len() == 8 {
                        found = Some(Part { ..*part });
                    }
                    Ok(())
                })?;
            }
        }
        let part = found.ok_or(TptError::OutOfBounds)?;
        let start = part.start;
        let address = match part.memory {
            Backing::All => start,
            Backing::Paged(att, tag) => {
                let mut found = None;
                att.pieces(memory, start, 8, true, |address, length| {
                    if length == 8 {
                        found = Some(address);
                    }
                })
                .map_err(|error| absent(error, part.end, tag, true))?;
                found.ok_or(AttError::OutOfRange)?
            }
            Backing::Host(att) => att.address_of(memory, start, 8)?,
            Backing::Device(offset) => {
                let changed = self.device.update(offset + start, |old| match operation {
                    AtomicOperation::CompareSwap { compare, new } if old == compare => new,
                    AtomicOperation::CompareSwap { .. } => old,
                    AtomicOperation::FetchAdd(addend) => old.wrapping_add(addend),
                    AtomicOperation::Store(new) => new,
                });
                return Ok(changed?);
            }
        };
        Ok(match operation {
            AtomicOperation::CompareSwap { compare, new } => {
                memory.compare_exchange_u64(address, compare, new)
            }
            AtomicOperation::FetchAdd(addend) => memory.fetch_add_u64(address, addend),
            AtomicOperation::Store(new) => memory.store_u64(address, new).map(|()| 0),
        }
        .map_err(AttError::from)?)
    }
}

#[cfg(test)]
mod tests;
