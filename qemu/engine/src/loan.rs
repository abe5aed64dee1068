// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Payload that is not copied into frames: host memory that a sender lends to another engine of the same
//! process, where it lies until it is placed, or to one of another process, whose host copies it at once to
//! memory that both have, from where it is placed.
//!
//! A [`Loan`] names checked and translated pieces of host memory and the [`Lease`]s on which they may
//! be read. Each lease is somebody's who can end it, its [`Lender`]: the engine, a connection, a work
//! request, the registration of a tag, the memory itself. When one of them ends, the loan is over,
//! and whoever ends it goes on only when nobody reads there any more. So what lets go of memory
//! (a completion, a command, a reset, an unmap) need not know who was lent it.
//!
//! Who places a loan [holds](Loan::hold) it meanwhile, and neither waits for anything nor ends a
//! lease of its own as long as it does: a lender waits for one copy at most.

use std::any::Any;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{fence, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A lease that has ended; the lower bits count who holds it.
const ENDED: usize = 1 << (usize::BITS - 1);

/// How often who ends a lease looks whether it is held before it sleeps.
const SPINS: u32 = 1000;

/// Those sleep here who wait for the end of a copy, which few do and seldom: so all leases share it, and none
/// has to be there for who lets go of it.
static WAITS: Mutex<()> = Mutex::new(());
/// That one of those leases is held by nobody any more.
static LET_GO: Condvar = Condvar::new();

/// What a loan depends on.
#[derive(Debug, Default)]
pub struct Lease(AtomicUsize);

impl Lease {
    /// Holds it as long as the result lives; `None` if it has ended.
    pub fn hold(&self) -> Option<Hold<'_>> {
        let more = |state| (state & ENDED == 0).then_some(state + 1);
        // What was written before it was made is seen by who holds it.
        let held = (self.0).fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        held.ok().map(|_| Hold(self))
    }

    /// Ends it. When this returns nobody holds it, nor will anybody.
    pub fn end(&self) {
        let is_held = |state| state & !ENDED != 0;
        if !is_held(self.0.fetch_or(ENDED, Ordering::AcqRel)) {
            return;
        }
        // Most copies are short.
        for _ in 0..SPINS {
            std::hint::spin_loop();
            if !is_held(self.0.load(Ordering::Acquire)) {
                return;
            }
        }
        // Who copies may have no processor, which who waits does not take.
        let mut waits = WAITS.lock().unwrap_or_else(PoisonError::into_inner);
        while is_held(self.0.load(Ordering::Acquire)) {
            waits = LET_GO.wait(waits).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// That a lease does not end.
#[derive(Debug)]
pub struct Hold<'a>(&'a Lease);

impl Hold<'_> {
    /// Whether it is this lease that does not end.
    pub fn is_of(&self, lease: &Lease) -> bool {
        std::ptr::eq(self.0, lease)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // What was read is read before it ends.
        let before = self.0 .0.fetch_sub(1, Ordering::Release);
        // The lease may be gone from here on, for who has ended it.
        if before == ENDED | 1 {
            // Not between a look of who waits and its wait.
            drop(WAITS.lock().unwrap_or_else(PoisonError::into_inner));
            LET_GO.notify_all();
        }
    }
}

/// Gives out a lease, and ends it when it goes itself.
#[derive(Default)]
pub struct Lender(OnceCell<Arc<Lease>>);

impl Lender {
    /// Its lease.
    pub fn lease(&self) -> &Arc<Lease> {
        self.0.get_or_init(Arc::default)
    }

    /// Whether there is still a loan on its lease. When there is none, what was read of the last was read.
    pub fn is_lent(&self) -> bool {
        let is_lent = (self.0.get()).is_some_and(|lease| Arc::strong_count(lease) > 1);
        // Who lets go of an `Arc` does so after all that it did before.
        fence(Ordering::Acquire);
        is_lent
    }

    /// Ends the lease that was given out; what is lent from now on is lent on another.
    pub fn end(&mut self) {
        if let Some(lease) = self.0.take() {
            lease.end();
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.end();
    }
}

/// The copy of something has lent nothing yet.
impl Clone for Lender {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lends = self.0.get().is_some();
        f.debug_struct("Lender").field("lends", &lends).finish()
    }
}

/// Memory of which a part was lent.
pub trait Lent: fmt::Debug + Send + Sync {
    /// Copies from the memory; false if `held` is not of a loan of it, or it is not so long. It is read
    /// on what is held: a lease whose end is waited for cannot be held once more.
    fn read(&self, held: &Held<'_>, offset: usize, bytes: &mut [u8]) -> bool;
    /// Itself, for a host that knows how to copy from its own kind.
    fn as_any(&self) -> &dyn Any;
}

/// A contiguous piece of lent memory.
#[derive(Debug)]
struct Piece {
    /// Where it is in the payload.
    start: usize,
    memory: Arc<dyn Lent>,
    offset: usize,
    length: usize,
}

/// Payload where it lies in the memory of the sender's host.
#[derive(Debug, Default)]
pub struct Loan {
    leases: Vec<Arc<Lease>>,
    pieces: Vec<Piece>,
    length: usize,
    log_mtu: u8,
    passing: bool,
}

impl Loan {
    /// One of nothing yet, whose sender puts so much into a packet: it goes for as many packets as that
    /// makes.
    pub fn in_packets(log_mtu: u8) -> Self {
        Self {
            log_mtu,
            ..Self::default()
        }
    }

    /// One of all of this memory, which is there until it was looked at once, on no lease.
    pub fn passing(log_mtu: u8, memory: &Arc<impl Lent + 'static>, length: usize) -> Self {
        let mut loan = Self::in_packets(log_mtu);
        loan.passing = true;
        loan.add(memory, 0, length);
        loan
    }

    /// Whether it cannot be kept for later.
    pub fn is_passing(&self) -> bool {
        self.passing
    }

    /// How many bytes its sender puts into a packet, as a power of two.
    pub fn log_mtu(&self) -> u8 {
        self.log_mtu
    }

    /// Bytes of the payload.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it is of nothing.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// What it takes in memory at most, beside the payload.
    pub fn cost(&self) -> usize {
        size_of::<Self>()
            + self.pieces.capacity() * size_of::<Piece>()
            + self.leases.capacity() * size_of::<Arc<Lease>>()
    }

    /// Takes no more memory than it needs, where it is of many pieces: it may be kept for long.
    pub fn fit(&mut self) {
        if self.pieces.len() > FEW {
            self.pieces.shrink_to_fit();
            self.leases.shrink_to_fit();
        }
    }

    /// It is over when the lease ends that is given out here.
    pub fn depend_on(&mut self, lender: &Lender) {
        self.depend_on_lease(lender.lease());
    }

    /// It is over when this lease ends.
    pub fn depend_on_lease(&mut self, lease: &Arc<Lease>) {
        if !self.leases.iter().any(|known| Arc::ptr_eq(known, lease)) {
            self.leases.push(Arc::clone(lease));
        }
    }

    /// Adds bytes of a memory behind what there is.
    pub fn add(&mut self, memory: &Arc<impl Lent + 'static>, offset: usize, length: usize) {
        let start = self.length;
        self.length += length;
        if let Some(last) = self.pieces.last_mut() {
            let same = std::ptr::addr_eq(Arc::as_ptr(&last.memory), Arc::as_ptr(memory));
            if same && last.offset + last.length == offset {
                last.length += length;
                return;
            }
        }
        self.pieces.push(Piece {
            start,
            memory: Arc::clone(memory) as Arc<dyn Lent>,
            offset,
            length,
        });
    }

    /// Has all its leases go on as long as the result lives; `None` if one has ended.
    pub fn hold(&self) -> Option<Held<'_>> {
        let mut holds = [const { None }; HOLDS];
        let (first, rest) = self.leases.split_at(self.leases.len().min(HOLDS));
        for (hold, lease) in holds.iter_mut().zip(first) {
            *hold = Some(lease.hold()?);
        }
        // A list of scatter/gather entries may be of many regions.
        let rest: Option<Vec<_>> = rest.iter().map(|lease| lease.hold()).collect();
        Some(Held {
            loan: self,
            first: holds,
            rest: rest?,
        })
    }
}

/// Pieces for which there is room from the first on.
const FEW: usize = 4;

/// Leases of most loans: of the engine, of the connection or work request, of a tag, of a range of memory,
/// of the right to access any.
const HOLDS: usize = 5;

/// A loan that is not over.
#[derive(Debug)]
pub struct Held<'a> {
    loan: &'a Loan,
    first: [Option<Hold<'a>>; HOLDS],
    rest: Vec<Hold<'a>>,
}

impl Held<'_> {
    /// That this lease does not end, if the loan depends on it.
    pub fn hold_of(&self, lease: &Lease) -> Option<&Hold<'_>> {
        let holds = self.first.iter().flatten().chain(&self.rest);
        holds.into_iter().find(|hold| hold.is_of(lease))
    }

    /// All of it.
    pub fn data(&self) -> Data<'_> {
        Data::Lent(self, 0, self.loan.length)
    }
}

/// What a packet carries, as it came.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// What the sender lends, of several packets in a row as the case may be.
    Lent(&'a Arc<Loan>),
}

impl<'a> Payload<'a> {
    /// How many bytes.
    pub fn len(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Lent(loan) => loan.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// As how many packets it came.
    pub fn packets(self) -> u32 {
        match self {
            Self::Bytes(_) => 1,
            // At least one, like a packet of nothing.
            Self::Lent(loan) => loan.len().div_ceil(1 << loan.log_mtu).max(1) as u32,
        }
    }

    /// Whether it takes as many sequence numbers where a packet holds so much as it took where it came from.
    /// Packets that go as one do not show how long each is.
    pub fn is_in_packets(self, log_mtu: u8) -> bool {
        match self {
            Self::Bytes(_) => true,
            Self::Lent(loan) => {
                loan.log_mtu == log_mtu || loan.len() <= 1 << loan.log_mtu.min(log_mtu)
            }
        }
    }

    /// The bytes, if it is bytes.
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Lent(_) => None,
        }
    }

    /// What can be placed as long as the result lives; `None` if the loan is over.
    pub fn hold(self) -> Option<HeldPayload<'a>> {
        Some(match self {
            Self::Bytes(bytes) => HeldPayload::Bytes(bytes),
            Self::Lent(loan) => HeldPayload::Lent(loan.hold()?),
        })
    }
}

/// A payload that can be placed.
#[derive(Debug)]
pub enum HeldPayload<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// A loan that is not over.
    Lent(Held<'a>),
}

impl HeldPayload<'_> {
    /// All of it.
    pub fn data(&self) -> Data<'_> {
        match self {
            Self::Bytes(bytes) => Data::Bytes(bytes),
            Self::Lent(held) => held.data(),
        }
    }
}

/// Data to be placed: bytes, or some of what is lent.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// So many bytes of a loan, from an offset on.
    Lent(&'a Held<'a>, usize, usize),
}

impl<'a> From<&'a [u8]> for Data<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Data<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::Bytes(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for Data<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl<'a> Data<'a> {
    /// How many bytes.
    pub fn len(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Lent(_, _, length) => length,
        }
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// A part of it.
    ///
    /// # Panics
    ///
    /// If it is not all inside, like a slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::Bytes(bytes) => Self::Bytes(&bytes[range]),
            Self::Lent(held, from, length) => {
                assert!(range.start <= range.end && range.end <= length);
                Self::Lent(held, from + range.start, range.len())
            }
        }
    }

    /// Calls `each` for every piece of what is lent: what holds it, the memory, where in it, and the range
    /// of the piece in the data. Not for bytes. Ends with the first that says false; whether none did.
    pub fn for_pieces(
        self,
        mut each: impl FnMut(&Held<'_>, &dyn Lent, usize, Range<usize>) -> bool,
    ) -> bool {
        let Self::Lent(held, from, length) = self else {
            return true;
        };
        let pieces = &held.loan.pieces;
        let first = pieces.partition_point(|piece| piece.start + piece.length <= from);
        let mut done = 0;
        for piece in &pieces[first..] {
            if done == length {
                break;
            }
            let skip = from + done - piece.start;
            let part = (piece.length - skip).min(length - done);
            if !each(held, &*piece.memory, piece.offset + skip, done..done + part) {
                return false;
            }
            done += part;
        }
        true
    }

    /// The bytes, copied if they are lent. `None` if the memory is not there.
    pub fn bytes(self) -> Option<Cow<'a, [u8]>> {
        if let Self::Bytes(bytes) = self {
            return Some(Cow::Borrowed(bytes));
        }
        let mut bytes = vec![0; self.len()];
        let whole = self
            .for_pieces(|held, memory, offset, range| memory.read(held, offset, &mut bytes[range]));
        whole.then_some(Cow::Owned(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    #[derive(Debug)]
    struct Bytes(Vec<u8>);

    impl Lent for Bytes {
        fn read(&self, _: &Held<'_>, offset: usize, bytes: &mut [u8]) -> bool {
            let from = self.0.get(offset..offset + bytes.len());
            from.map(|from| bytes.copy_from_slice(from)).is_some()
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn memory() -> Arc<Bytes> {
        Arc::new(Bytes((0..=255).collect()))
    }

    #[test]
    fn pieces_are_one_after_another_and_joined_where_they_touch() {
        let (one, other) = (memory(), memory());
        let mut loan = Loan::default();
        loan.add(&one, 10, 5);
        loan.add(&one, 15, 5);
        loan.add(&other, 20, 4);
        loan.add(&one, 0, 2);
        assert_eq!((loan.len(), loan.pieces.len()), (16, 3));
        let all: Vec<u8> = (10..24).chain(0..2).collect();
        let held = loan.hold().unwrap();
        for from in 0..=all.len() {
            for to in from..=all.len() {
                let data = held.data().slice(from..to);
                assert_eq!(data.len(), to - from);
                assert_eq!(*data.bytes().unwrap(), all[from..to]);
                let twice = data.slice(0..(to - from) / 2);
                assert_eq!(*twice.bytes().unwrap(), all[from..from + (to - from) / 2]);
            }
        }
        drop(held);
        // What is not there is not made up.
        loan.add(&one, 255, 2);
        assert!(loan.hold().unwrap().data().bytes().is_none());
    }

    #[test]
    fn a_loan_of_as_much_as_there_may_be_takes_what_a_packet_takes_that_waits() {
        let mut loan = Loan::default();
        // 256 KiB in pages that do not touch, of 16 entries that begin within one.
        for _ in 0..81 {
            loan.add(&memory(), 0, 1);
        }
        for _ in 0..20 {
            loan.depend_on(&Lender::default());
        }
        loan.fit();
        assert_eq!((loan.pieces.len(), loan.leases.len()), (81, 20));
        // The headers go beside it.
        assert!(loan.cost() + 128 < 4300, "{}", loan.cost());
    }

    #[test]
    fn a_loan_is_over_when_one_of_its_leases_ends() {
        let mut lenders: [Lender; HOLDS + 3] = Default::default();
        for last in 0..lenders.len() {
            let mut loan = Loan::default();
            for lender in lenders.iter().chain(&lenders) {
                loan.depend_on(lender);
            }
            assert_eq!(loan.leases.len(), lenders.len(), "each once");
            assert!(loan.hold().is_some());
            lenders[last].end();
            assert!(loan.hold().is_none());
            let others = loan.leases.iter().filter(|lease| lease.hold().is_some());
            assert_eq!(others.count(), lenders.len() - 1, "and they are let go");
        }
        // A lender that is dropped ends it, too; its copy has lent nothing.
        let lender = Lender::default();
        let mut loan = Loan::default();
        loan.depend_on(&lender);
        drop(lender.clone());
        assert!(loan.hold().is_some());
        drop(lender);
        assert!(loan.hold().is_none());
    }

    #[test]
    fn who_ends_a_lease_waits_for_who_holds_it() {
        let mut lender = Lender::default();
        let mut loan = Loan::default();
        loan.depend_on(&lender);
        let (held, done) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let hold = loan.hold().unwrap();
                held.store(true, Ordering::SeqCst);
                // Until the lender has begun to wait.
                while loan.leases[0].0.load(Ordering::SeqCst) & ENDED == 0 {
                    thread::yield_now();
                }
                assert!(loan.hold().is_none());
                // Longer than it looks.
                for _ in 0..100 * SPINS {
                    std::hint::spin_loop();
                }
                done.store(true, Ordering::SeqCst);
                drop(hold);
            });
            while !held.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            lender.end();
            assert!(done.load(Ordering::SeqCst));
        });
    }
}
