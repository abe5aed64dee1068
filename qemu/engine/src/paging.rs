// SPDX-License-Identifier: Apache-2.0 OR MIT

//! On-demand regions: their tables, and the faults of those who found a page absent; and who waits
//! for a pending tag, which is much the same.
//!
//! The tables are read at every access and nothing of them is kept, so that a page that the host
//! takes out is gone for the next access. What a queue pair wanted with an absent page waits until
//! the host says that it is there, or that it cannot be had; a queue pair waits for one page as
//! requester and one as responder at most.

use crate::att::AttError;
use crate::loan::{Data, Loan};
use crate::memory::HostMemory;
use crate::roce::psn_diff;
use ferrite_abi::{
    on_demand_levels, Buffer, CommandStatus, PageFault, PageFaults, Plain, ResolveFault,
    ATT_TABLE_ENTRIES, FAULT_WRITE, ON_DEMAND_ADDRESS, ON_DEMAND_MAX_LENGTH, ON_DEMAND_PAGE_SHIFT,
    ON_DEMAND_PRESENT, ON_DEMAND_WRITE,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const PAGE_SIZE: u64 = 1 << ON_DEMAND_PAGE_SHIFT;
const TABLE_BITS: u32 = ATT_TABLE_ENTRIES.ilog2();

/// Frames that wait for pages and tags, for one queue pair.
const MAX_PARKED: usize = 64;
/// The same for all queue pairs, of each [`Lot`].
const MAX_PARKED_ALL: usize = 2048;

/// An access that found a page absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The region.
    pub tag: u32,
    /// The first byte that is not there, as an offset in the region.
    pub offset: u64,
    /// Bytes from there on that will be wanted, at least 1.
    pub length: u32,
    /// It is to be written.
    pub write: bool,
}

impl Fault {
    /// Whether the other is about the same page and right.
    fn is_same(&self, other: &Self) -> bool {
        // Offsets count from the first byte of the region, pages from its first page; but the
        // offset of the first absent byte is either where the work starts or the start of a page.
        self.tag == other.tag && self.offset == other.offset && self.write == other.write
    }
}

/// Why a page cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// It is not there, or may not be written: the byte at this offset is the first.
    Absent(u64),
    /// The tables cannot be read, or the range is not inside.
    Att(AttError),
}

impl From<AttError> for PageError {
    fn from(error: AttError) -> Self {
        Self::Att(error)
    }
}

/// The tables of an on-demand region.
#[derive(Clone, Debug)]
pub struct PagedAtt {
    root: u64,
    length: u64,
    fbo: u64,
    levels: u8,
}

impl PagedAtt {
    /// Checks a description. Reads no table.
    pub fn new(buffer: &Buffer) -> Result<Self, AttError> {
        if buffer.page_shift != ON_DEMAND_PAGE_SHIFT {
            return Err(AttError::PageSize);
        }
        if u64::from(buffer.fbo) >= PAGE_SIZE {
            return Err(AttError::Fbo);
        }
        if buffer.length > ON_DEMAND_MAX_LENGTH {
            return Err(AttError::TooLong);
        }
        let pages = buffer.pages().ok_or(AttError::TooLong)?;
        let levels = on_demand_levels(pages).ok_or(AttError::TooLong)?;
        if buffer.order != levels {
            return Err(AttError::Order);
        }
        Ok(Self {
            root: buffer.root,
            length: buffer.length,
            fbo: u64::from(buffer.fbo),
            levels,
        })
    }

    /// Bytes in the region.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Pages of the region.
    pub fn pages(&self) -> u64 {
        // Cannot wrap: both are bounded.
        (self.fbo + self.length).div_ceil(PAGE_SIZE)
    }

    /// The entry of a page; without [`ON_DEMAND_PRESENT`] where it or a table above it is absent.
    fn entry<M: HostMemory + ?Sized>(&self, memory: &M, page: u64) -> Result<u64, AttError> {
        let mut table = self.root;
        let mut entry = 0;
        for level in (0..u32::from(self.levels)).rev() {
            let index = (page >> (level * TABLE_BITS)) & (ATT_TABLE_ENTRIES as u64 - 1);
            let address = table.checked_add(index * 8).ok_or(AttError::OutOfRange)?;
            entry = memory.load_u64(address)?;
            if entry & ON_DEMAND_PRESENT == 0 {
                return Ok(0);
            }
            table = entry & ON_DEMAND_ADDRESS;
        }
        Ok(entry)
    }

    /// The address of byte `offset`, and how many bytes follow in its page.
    pub fn resolve<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        write: bool,
    ) -> Result<(u64, u64), PageError> {
        let left = self
            .length
            .checked_sub(offset)
            .filter(|&left| left > 0)
            .ok_or(AttError::OutOfRange)?;
        // Cannot wrap: both are bounded.
        let position = self.fbo + offset;
        let entry = self.entry(memory, position >> ON_DEMAND_PAGE_SHIFT)?;
        if entry & ON_DEMAND_PRESENT == 0 || write && entry & ON_DEMAND_WRITE == 0 {
            return Err(PageError::Absent(offset));
        }
        let within = position & (PAGE_SIZE - 1);
        // Cannot wrap: the address is that of a whole page.
        let address = (entry & ON_DEMAND_ADDRESS) + within;
        Ok((address, left.min(PAGE_SIZE - within)))
    }

    /// The pieces of `offset..offset + length`, one for each page: address and bytes. All have
    /// to be there.
    pub fn pieces<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: u64,
        write: bool,
        mut each: impl FnMut(u64, usize),
    ) -> Result<(), PageError> {
        let end = offset
            .checked_add(length)
            .filter(|&end| end <= self.length)
            .ok_or(AttError::OutOfRange)?;
        let mut at = offset;
        while at < end {
            let (address, contiguous) = self.resolve(memory, at, write)?;
            let piece = contiguous.min(end - at);
            // At most a page.
            each(address, piece as usize);
            at += piece;
        }
        Ok(())
    }

    /// Where the pieces of a range are, once all of its pages are known to be there.
    fn locate<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        length: u64,
        write: bool,
    ) -> Result<Vec<(u64, usize)>, PageError> {
        let mut pieces = Vec::with_capacity(2);
        self.pieces(memory, offset, length, write, |address, length| {
            pieces.push((address, length));
        })?;
        Ok(pieces)
    }

    /// Copies from the region; nothing, unless all of the pages are there.
    pub fn read<M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), PageError> {
        let pieces = self.locate(memory, offset, bytes.len() as u64, false)?;
        let mut rest = bytes;
        for (address, length) in pieces {
            let (piece, behind) = rest.split_at_mut(length);
            memory.read(address, piece).map_err(AttError::from)?;
            rest = behind;
        }
        Ok(())
    }

    /// Copies to the region; nothing, unless all of the pages are there and may be written.
    pub fn write<'a, M: HostMemory + ?Sized>(
        &self,
        memory: &M,
        offset: u64,
        data: impl Into<Data<'a>>,
    ) -> Result<(), PageError> {
        let data = data.into();
        let pieces = self.locate(memory, offset, data.len() as u64, true)?;
        let mut done = 0;
        for (address, length) in pieces {
            let piece = data.slice(done..done + length);
            memory.place(address, piece).map_err(AttError::from)?;
            done += length;
        }
        Ok(())
    }
}

/// On which side of a queue pair a page is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Data to send, or the place of what was asked for.
    Requester,
    /// What the peer sends or asks for.
    Responder,
}

/// What becomes of an access that found a page absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done again when the page is there.
    Wait,
    /// The host said that the page cannot be had.
    Fail,
}

/// How far the host is with a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Raised,
    Taken,
    /// The page cannot be had; whoever wants it again is refused.
    Failed,
}

#[derive(Debug)]
struct Open {
    token: u64,
    fault: Fault,
    stage: Stage,
}

/// A frame that waits until what it asks for can be done.
#[derive(Debug)]
pub(crate) struct Parked {
    pub(crate) frame: Vec<u8>,
    /// Its payload, if that is lent.
    pub(crate) loan: Option<Arc<Loan>>,
    pub(crate) place: Place,
    /// Where it is counted, and for which doorbell page; the same for all of a queue pair's.
    lot: Lot,
    owner: u32,
}

/// Where a frame stands among those that wait for the same queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the order of arrival. With `Some` it is for a group the queue pair is in, and this says
    /// whether it comes from this device.
    Last(Option<bool>),
    /// In the order of sequence numbers, each once: it has this one.
    Psn(u32),
}

/// Frames that wait are counted by what they wait for: a page may be waited for as long as a process likes,
/// and others do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lot {
    /// For a page, in the order of arrival. Whoever has a doorbell page has as many of these at most as there
    /// is room left for all others: the more that have some, the less.
    Pages,
    /// For a tag, in the order of arrival.
    Tags,
    /// For a tag, in the order of sequence numbers. (Who waits for a page has the peer send again.)
    Sequence,
}

const LOTS: usize = 3;

/// The frames that wait for a queue pair.
#[derive(Debug, Default)]
struct Line {
    frames: VecDeque<Parked>,
    /// What they waited for has come; it is among [`Paging::due`].
    due: bool,
    /// The last sequence number of those there was no room for: nobody else knows that it is missing.
    lost: Option<u32>,
}

impl Line {
    fn lose(&mut self, psn: u32) {
        let later = self.lost.filter(|&lost| psn_diff(lost, psn) > 0);
        self.lost = Some(later.unwrap_or(psn));
    }
}

/// Bits of a token: queue pair, side, then a number that does not come again.
const TOKEN_SIDE: u32 = 24;
const TOKEN_SEQUENCE: u32 = 25;

/// Whose fault a token stands for.
fn waiting_side(token: u64) -> (u32, Side) {
    let qpn = token as u32 & ((1 << TOKEN_SIDE) - 1);
    match (token >> TOKEN_SIDE) & 1 {
        0 => (qpn, Side::Requester),
        _ => (qpn, Side::Responder),
    }
}

/// The faults of all queue pairs, and their waits for tags.
#[derive(Debug, Default)]
pub struct Paging {
    open: BTreeMap<(u32, Side), Open>,
    sequence: u64,
    /// The host was told that there are faults, and has not taken all yet.
    told: bool,
    /// Whose fault was taken last: the next taken is that of another.
    last: Option<(u32, Side)>,
    parked: BTreeMap<u32, Line>,
    /// How many they are, by [`Lot`].
    parked_frames: [usize; LOTS],
    /// And those of [`Lot::Pages`] by doorbell page, where there are any.
    of_owners: BTreeMap<u32, usize>,
    /// Queue pairs whose frames can be looked at again, in turn.
    due: VecDeque<u32>,
    /// A request of a peer began to wait for a tag just now.
    pub(crate) request_waits: bool,
    /// The index of the tag that each waits for ([`crate::core::COMMANDS`] where it may be one that a
    /// command is about to make), and its ticket.
    tags: BTreeMap<(u32, Side), (u32, u64)>,
    /// The same by index and ticket.
    waiting: BTreeMap<(u32, u64), (u32, Side)>,
    tickets: u64,
    /// Indices of tags that something has become of, in the order it has; and for each the first
    /// ticket of those who began to wait afterwards.
    woken: VecDeque<u32>,
    later: BTreeMap<u32, u64>,
}

impl Paging {
    /// Queue pair `qpn` waits for what becomes of the tag with this index.
    pub(crate) fn wait_for_tag(&mut self, qpn: u32, side: Side, index: u32) {
        let waits = self.tags.get(&(qpn, side));
        if waits.is_some_and(|(other, _)| *other == index) {
            return;
        }
        self.stop_waiting(qpn, side);
        self.request_waits |= side == Side::Responder;
        self.tickets += 1;
        self.tags.insert((qpn, side), (index, self.tickets));
        self.waiting.insert((index, self.tickets), (qpn, side));
    }

    /// Something has become of the tag with this index: those who wait for it now try again.
    pub(crate) fn wake(&mut self, index: u32) {
        let later = self.tickets + 1;
        let mut waiting = self.waiting.range((index, 0)..(index, later));
        if waiting.next().is_some() && self.later.insert(index, later).is_none() {
            self.woken.push_back(index);
        }
    }

    /// Whether somebody is to try again.
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// Takes one who is to try again.
    pub(crate) fn next_woken(&mut self) -> Option<(u32, Side)> {
        loop {
            let &index = self.woken.front()?;
            let later = self.later.get(&index).copied().unwrap_or(0);
            let mut waiting = self.waiting.range((index, 0)..(index, later));
            if let Some((_, &(qpn, side))) = waiting.next() {
                self.stop_waiting(qpn, side);
                return Some((qpn, side));
            }
            self.woken.pop_front();
            self.later.remove(&index);
        }
    }

    fn stop_waiting(&mut self, qpn: u32, side: Side) {
        if let Some(ticket) = self.tags.remove(&(qpn, side)) {
            self.waiting.remove(&ticket);
        }
    }

    /// An access of queue pair `qpn` faulted. The second result: the host is to be told.
    pub(crate) fn raise(&mut self, qpn: u32, side: Side, fault: Fault) -> (Outcome, bool) {
        let key = (qpn, side);
        match self.open.get(&key) {
            Some(open) if open.stage != Stage::Failed => return (Outcome::Wait, false),
            Some(open) if open.fault.is_same(&fault) => {
                self.open.remove(&key);
                return (Outcome::Fail, false);
            }
            _ => {}
        }
        self.sequence += 1;
        let side_bit = u64::from(side == Side::Responder) << TOKEN_SIDE;
        let token = (self.sequence << TOKEN_SEQUENCE) | side_bit | u64::from(qpn);
        self.open.insert(
            key,
            Open {
                token,
                fault,
                stage: Stage::Raised,
            },
        );
        let tell = !self.told;
        self.told = true;
        (Outcome::Wait, tell)
    }

    /// Whether queue pair `qpn` waits for a page or a tag.
    pub fn is_waiting(&self, qpn: u32, side: Side) -> bool {
        let key = (qpn, side);
        let of_page = self.open.get(&key);
        of_page.is_some_and(|open| open.stage != Stage::Failed) || self.tags.contains_key(&key)
    }

    /// An access of queue pair `qpn` went well: a page that could not be had is of no concern.
    pub(crate) fn went_on(&mut self, qpn: u32, side: Side) {
        if self.open.is_empty() {
            return;
        }
        let key = (qpn, side);
        if matches!(self.open.get(&key), Some(open) if open.stage == Stage::Failed) {
            self.open.remove(&key);
        }
    }

    /// The reply to `TakeFaults`, with room for so many faults; see [`Paging::take`].
    pub(crate) fn raised(&self, room: usize) -> PageFaults {
        let mut reply = PageFaults::zeroed();
        // In turn, from behind the one taken last to the end, then from the beginning.
        let behind = self
            .last
            .map_or((0, Side::Requester), |(qpn, side)| match side {
                Side::Requester => (qpn, Side::Responder),
                Side::Responder => (qpn + 1, Side::Requester),
            });
        let raised = self
            .open
            .range(behind..(u32::MAX, Side::Responder))
            .chain(self.open.range((0, Side::Requester)..behind))
            .map(|(_, open)| open)
            .filter(|open| open.stage == Stage::Raised);
        for (slot, open) in reply.faults.iter_mut().take(room).zip(raised) {
            *slot = PageFault {
                token: open.token,
                offset: open.fault.offset,
                tag: open.fault.tag,
                length: open.fault.length,
                flags: if open.fault.write { FAULT_WRITE } else { 0 },
                reserved: 0,
            };
            reply.count += 1;
        }
        reply
    }

    /// Carries out `TakeFaults`, once its reply with room for so many is written.
    pub(crate) fn take(&mut self, reply: &PageFaults, room: usize) {
        for fault in reply.faults.iter().take(reply.count as usize) {
            let key = waiting_side(fault.token);
            if let Some(open) = self.open.get_mut(&key) {
                open.stage = Stage::Taken;
                self.last = Some(key);
            }
        }
        if (reply.count as usize) < room.min(reply.faults.len()) {
            // All are taken: the next is told of.
            self.told = false;
        }
    }

    /// Carries out `ResolveFault`: who waited.
    pub(crate) fn resolve(&mut self, command: &ResolveFault) -> Result<(u32, Side), CommandStatus> {
        if command.failed > 1 {
            return Err(CommandStatus::BadParameter);
        }
        let key = waiting_side(command.token);
        match self.open.get_mut(&key) {
            Some(open) if open.token == command.token && open.stage == Stage::Taken => {
                if command.failed != 0 {
                    open.stage = Stage::Failed;
                } else {
                    self.open.remove(&key);
                }
                Ok(key)
            }
            _ => Err(CommandStatus::NotFound),
        }
    }

    /// Where frames that queue pair `qpn` has wait are counted if it waits for what it waits for now.
    fn lot(&self, qpn: u32, place: Place) -> Lot {
        let page = self.open.get(&(qpn, Side::Responder));
        match place {
            Place::Psn(_) => Lot::Sequence,
            Place::Last(_) if page.is_some_and(|open| open.stage != Stage::Failed) => Lot::Pages,
            Place::Last(_) => Lot::Tags,
        }
    }

    /// Whether there is room for one more.
    fn has_room(&self, lot: Lot, owner: u32) -> bool {
        let left = MAX_PARKED_ALL.saturating_sub(self.parked_frames[lot as usize]);
        let own = match lot {
            Lot::Pages => self.of_owners.get(&owner).copied().unwrap_or(0),
            Lot::Tags | Lot::Sequence => 0,
        };
        own < left
    }

    /// Keeps a frame until what queue pair `qpn`, with this doorbell page, waits for is there. False when one
    /// is lost: there are too many, of which the earliest are kept, or the same was kept before.
    pub(crate) fn park(
        &mut self,
        qpn: u32,
        owner: u32,
        frame: &[u8],
        loan: Option<&Arc<Loan>>,
        place: Place,
    ) -> bool {
        let frames = self.parked.get(&qpn).map(|line| &line.frames);
        let count = frames.map_or(0, VecDeque::len);
        let first = frames.and_then(VecDeque::front);
        let lot = first.map_or_else(|| self.lot(qpn, place), |first| first.lot);
        let at = match (place, frames) {
            (Place::Psn(psn), Some(frames)) => {
                let from = |parked: &Parked| match parked.place {
                    Place::Psn(other) => psn_diff(other, psn),
                    Place::Last(_) => -1,
                };
                let at = frames.partition_point(|parked| from(parked) < 0);
                if frames.get(at).is_some_and(|parked| from(parked) == 0) {
                    return false;
                }
                at
            }
            _ => count,
        };
        let parked = Parked {
            frame: frame.to_vec(),
            loan: loan.cloned(),
            place,
            lot,
            owner,
        };
        if count >= MAX_PARKED || !self.has_room(lot, owner) {
            let Place::Psn(psn) = place else {
                return false;
            };
            let line = self.parked.entry(qpn).or_default();
            if at == count {
                line.lose(psn);
                return false;
            }
            // Those further ahead do not keep out the next ones.
            if let Some(last) = line.frames.pop_back() {
                if let Place::Psn(psn) = last.place {
                    line.lose(psn);
                }
                self.discount(last.lot, last.owner);
            }
            self.put(qpn, at, parked);
            return false;
        }
        self.put(qpn, at, parked);
        true
    }

    /// A frame is not kept, though it waits for queue pair `qpn`.
    pub(crate) fn lose(&mut self, qpn: u32, place: Place) {
        if let Place::Psn(psn) = place {
            self.parked.entry(qpn).or_default().lose(psn);
        }
    }

    fn put(&mut self, qpn: u32, at: usize, parked: Parked) {
        self.count(parked.lot, parked.owner);
        let line = self.parked.entry(qpn).or_default();
        line.frames.insert(at, parked);
    }

    fn count(&mut self, lot: Lot, owner: u32) {
        self.parked_frames[lot as usize] += 1;
        if lot == Lot::Pages {
            *self.of_owners.entry(owner).or_default() += 1;
        }
    }

    fn discount(&mut self, lot: Lot, owner: u32) {
        self.parked_frames[lot as usize] -= 1;
        if lot != Lot::Pages {
            return;
        }
        if let Some(own) = self.of_owners.get_mut(&owner) {
            *own -= 1;
            if *own == 0 {
                self.of_owners.remove(&owner);
            }
        }
    }

    /// Whether frames wait for queue pair `qpn`.
    pub(crate) fn has_parked(&self, qpn: u32) -> bool {
        let line = self.parked.get(&qpn);
        line.is_some_and(|line| !line.frames.is_empty())
    }

    /// Whether a request with this sequence number has to stand behind one that waits.
    pub(crate) fn stands_behind(&self, qpn: u32, psn: u32) -> bool {
        let Some(line) = self.parked.get(&qpn) else {
            return false;
        };
        match line.frames.front() {
            Some(first) => {
                matches!(first.place, Place::Psn(first) if psn_diff(psn, first) >= 0)
            }
            // There was no room for the one that waits.
            None => self.tags.contains_key(&(qpn, Side::Responder)),
        }
    }

    /// What queue pair `qpn` waited for has come: its frames are looked at in their turn.
    pub(crate) fn deliver(&mut self, qpn: u32) {
        if let Some(line) = self.parked.get_mut(&qpn).filter(|line| !line.due) {
            line.due = true;
            self.due.push_back(qpn);
        }
    }

    /// Whether frames are to be looked at again.
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Takes a queue pair whose frames are to be looked at again. (They may be gone meanwhile.)
    pub(crate) fn next_due(&mut self) -> Option<u32> {
        let qpn = self.due.pop_front()?;
        if let Some(line) = self.parked.get_mut(&qpn) {
            line.due = false;
        }
        Some(qpn)
    }

    /// Takes the first frame that waits for queue pair `qpn`.
    pub(crate) fn unpark(&mut self, qpn: u32) -> Option<Parked> {
        let line = self.parked.get_mut(&qpn)?;
        let first = line.frames.pop_front();
        if line.frames.is_empty() && line.lost.is_none() {
            self.parked.remove(&qpn);
        }
        if let Some(first) = &first {
            self.discount(first.lot, first.owner);
        }
        first
    }

    /// Once no frame waits for queue pair `qpn` any more: the last sequence number that was lost behind
    /// them.
    pub(crate) fn take_lost(&mut self, qpn: u32) -> Option<u32> {
        let drained = self.parked.get(&qpn)?.frames.is_empty();
        drained.then(|| self.parked.remove(&qpn)?.lost).flatten()
    }

    /// Puts the first frame back, which waits for something else. Returns how many are lost, of those that
    /// came last: a tag was waited for before and a page is now, or the other way round, and there is less
    /// room for that.
    pub(crate) fn park_again(&mut self, qpn: u32, parked: Parked) -> u64 {
        let (lot, owner) = (self.lot(qpn, parked.place), parked.owner);
        if lot == parked.lot {
            self.put(qpn, 0, parked);
            return 0;
        }
        let behind = self.parked.get_mut(&qpn).map(|line| &mut line.frames);
        let behind = behind.map(std::mem::take).unwrap_or_default();
        for other in &behind {
            self.discount(other.lot, other.owner);
        }
        let mut lost = 0;
        for (at, other) in std::iter::once(parked).chain(behind).enumerate() {
            if self.has_room(lot, owner) {
                self.put(qpn, at, Parked { lot, ..other });
            } else {
                lost += 1;
            }
        }
        lost
    }

    /// Queue pair `qpn` waits for nothing any more.
    pub(crate) fn forget(&mut self, qpn: u32) {
        self.open.remove(&(qpn, Side::Requester));
        self.open.remove(&(qpn, Side::Responder));
        self.stop_waiting(qpn, Side::Requester);
        self.stop_waiting(qpn, Side::Responder);
        let line = self.parked.remove(&qpn).unwrap_or_default();
        for parked in line.frames {
            self.discount(parked.lot, parked.owner);
        }
    }
}

#[cfg(test)]
mod tests;
