// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What waits for a function: frames of the other functions and of the wire.
//!
//! Each sender has a queue of its own, of so many bytes, and they are read in turn: one that sends
//! more than is read loses its own frames and nobody else's, as behind a switch. Payload that is lent
//! takes no memory, but it is what the reader has to copy: there is a bound of that, too. Whose it was
//! that was long is passed over until the others have had as much.

use ferrite_engine::memory::FRAME_OVERHEAD;
use ferrite_engine::roce::Medium;
use ferrite_engine::Loan;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of one sender that wait at most, with what each frame takes beside its own.
pub const ROOM: usize = 1024 * 1024;
/// The same with what is lent.
pub const LENT_ROOM: usize = 6 * 1024 * 1024;
/// Bytes that a sender's turn is for. What is longer takes several, one after the other.
const TURN: usize = 16 * 1024;
/// Bytes, with what is lent, after which no more are taken out at once.
const TAKE: usize = 1024 * 1024;
/// Bytes of the wire that wait at most: who sends there is not told of room, and comes in bursts.
const WIRE_ROOM: usize = 4 * 1024 * 1024;

/// A frame on its way to a function.
pub struct Parcel {
    /// The function that it is from, or none if it came by the uplink.
    pub from: Option<usize>,
    /// Without its CRC, if this is memory and it is one of a queue pair.
    pub medium: Medium,
    /// The frame, or what of it goes before payload that is lent.
    pub frame: Box<[u8]>,
    /// That payload.
    pub loan: Option<Arc<Loan>>,
}

impl Parcel {
    /// Bytes of memory that it takes.
    fn cost(&self) -> usize {
        self.frame.len() + FRAME_OVERHEAD + self.loan.as_ref().map_or(0, |loan| loan.cost())
    }

    /// Bytes that are lent.
    fn lent(&self) -> usize {
        self.loan.as_ref().map_or(0, |loan| loan.len())
    }

    /// Bytes of the frame, those that are lent included.
    pub fn length(&self) -> usize {
        self.frame.len() + self.lent()
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// The first that waits; its reader is to be woken.
    First,
    /// Others wait, too.
    Behind,
    /// There was no room, or nobody reads.
    Dropped,
}

/// What one sender has sent.
#[derive(Default)]
struct Queue {
    frames: VecDeque<Parcel>,
    bytes: usize,
    lent: usize,
    drops: u64,
    /// The sender waits for room.
    wanted: bool,
    most: usize,
    /// Bytes of the last that was taken out beyond what its turns were for.
    debt: usize,
}

impl Queue {
    fn new(most: usize) -> Self {
        Self {
            most,
            ..Self::default()
        }
    }

    fn room(&self) -> usize {
        let lent = LENT_ROOM.saturating_sub(self.bytes + self.lent);
        self.most.saturating_sub(self.bytes).min(lent)
    }
}

struct State {
    /// By the senders' numbers; the last is the wire's.
    queues: Vec<Queue>,
    /// Whose turn it is.
    next: usize,
    /// Nobody reads any more.
    closed: bool,
}

impl State {
    /// Forgets what waits. Returns who waits for room, bit by bit.
    fn clear(&mut self) -> u64 {
        let mut wake = 0;
        for (place, queue) in self.queues.iter_mut().enumerate() {
            queue.frames.clear();
            (queue.bytes, queue.lent, queue.debt) = (0, 0, 0);
            wake |= u64::from(std::mem::take(&mut queue.wanted)) << place;
        }
        wake
    }
}

/// What waits for one function.
pub struct Inbox(Mutex<State>);

impl Inbox {
    /// One with so many functions that may send.
    pub fn new(functions: usize) -> Self {
        Self(Mutex::new(State {
            queues: (0..functions)
                .map(|_| Queue::new(ROOM))
                .chain([Queue::new(WIRE_ROOM)])
                .collect(),
            next: 0,
            closed: false,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in a frame of a function's, or of the wire's.
    pub fn give(&self, from: Option<usize>, medium: Medium, frame: &[u8]) -> Given {
        self.put(from, medium, frame, None)
    }

    /// Puts in a frame of a function's whose payload is lent.
    pub fn lend(&self, from: usize, head: &[u8], loan: Arc<Loan>) -> Given {
        self.put(Some(from), Medium::Memory, head, Some(loan))
    }

    fn put(
        &self,
        from: Option<usize>,
        medium: Medium,
        frame: &[u8],
        loan: Option<Arc<Loan>>,
    ) -> Given {
        let parcel = Parcel {
            from,
            medium,
            frame: frame.into(),
            loan,
        };
        let cost = parcel.cost();
        let mut guard = self.state();
        let state = &mut *guard;
        let place = from.unwrap_or(state.queues.len() - 1);
        let Some(queue) = state.queues.get_mut(place) else {
            return Given::Dropped;
        };
        if state.closed || cost.max(parcel.lent()) > queue.room() {
            queue.drops += 1;
            return Given::Dropped;
        }
        queue.bytes += cost;
        queue.lent += parcel.lent();
        queue.frames.push_back(parcel);
        match queue.frames.len() {
            1 => Given::First,
            _ => Given::Behind,
        }
    }

    /// What a function may put in without loss; without end where all is lost, so that nobody waits.
    pub fn room(&self, from: usize) -> usize {
        let mut state = self.state();
        if state.closed {
            return usize::MAX;
        }
        let Some(queue) = state.queues.get_mut(from) else {
            return 0;
        };
        let room = queue.room();
        // Not enough to be woken for, whatever takes what there is meanwhile.
        queue.wanted |= room <= ROOM / 2;
        room
    }

    /// Takes out so many at most, one of each sender in turn, and no more once they are long. Returns the
    /// functions that wait for the room that there is now, bit by bit.
    pub fn take(&self, into: &mut VecDeque<Parcel>, most: usize) -> u64 {
        let mut wake = 0;
        let mut guard = self.state();
        let state = &mut *guard;
        let senders = state.queues.len();
        let (mut empty, mut taken, mut bytes) = (0, 0, 0);
        while empty < senders && taken < most && bytes < TAKE {
            let place = state.next % senders;
            state.next = (place + 1) % senders;
            let Some(queue) = state.queues.get_mut(place) else {
                break;
            };
            let in_debt = queue.debt > 0;
            queue.debt = queue.debt.saturating_sub(TURN);
            if queue.frames.is_empty() {
                empty += 1;
                continue;
            }
            // Where nobody else has anything nobody is kept waiting.
            if in_debt && empty + 1 < senders {
                empty = 0;
                continue;
            }
            let Some(parcel) = queue.frames.pop_front() else {
                break;
            };
            (empty, taken) = (0, taken + 1);
            bytes += parcel.length();
            queue.debt = parcel.length().saturating_sub(TURN);
            queue.bytes -= parcel.cost();
            queue.lent -= parcel.lent();
            if queue.wanted && queue.room() > ROOM / 2 {
                queue.wanted = false;
                wake |= 1 << place;
            }
            into.push_back(parcel);
        }
        wake
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        let state = self.state();
        state.queues.iter().all(|queue| queue.frames.is_empty())
    }

    /// Frames for which there was no room, or no reader.
    pub fn drops(&self) -> u64 {
        self.state().queues.iter().map(|queue| queue.drops).sum()
    }

    /// Forgets what waits: its reader is another from now on. Returns who waits for room, as
    /// [`Inbox::take`].
    pub fn clear(&self) -> u64 {
        self.state().clear()
    }

    /// Forgets what waits, and from now on what is put in: nobody reads any more. What was lent would never
    /// be let go of. Returns who waits for room, as [`Inbox::take`].
    pub fn close(&self) -> u64 {
        let mut state = self.state();
        state.closed = true;
        state.clear()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: usize = 1000;

    fn fill(inbox: &Inbox, from: Option<usize>) -> usize {
        let mut taken = 0;
        while inbox.give(from, Medium::Wire, &[0; FRAME]) != Given::Dropped {
            taken += 1;
        }
        taken
    }

    #[test]
    fn a_flood_takes_nobody_elses_room_nor_turn() {
        let inbox = Inbox::new(3);
        let flood = fill(&inbox, Some(0));
        assert!(flood <= ROOM / FRAME);
        assert_eq!(fill(&inbox, Some(0)), 0);
        assert_eq!(inbox.drops(), 2);
        let given = inbox.give(Some(2), Medium::Memory, &[2; 60]);
        assert_eq!(given, Given::First, "its reader is told of it");
        assert_eq!(inbox.give(None, Medium::Wire, &[3; 60]), Given::First);
        assert_eq!(inbox.give(None, Medium::Wire, &[4; 60]), Given::Behind);
        let mut parcels = VecDeque::new();
        inbox.take(&mut parcels, 4);
        let first: Vec<_> = parcels.iter().map(|parcel| parcel.from).collect();
        assert_eq!(first, [Some(0), Some(2), None, Some(0)]);
        inbox.take(&mut parcels, usize::MAX);
        assert_eq!(parcels.len(), flood + 3);
        assert!(inbox.is_empty());
        assert_eq!(inbox.give(Some(7), Medium::Wire, &[0; 60]), Given::Dropped);
    }

    #[derive(Debug)]
    struct Nothing;

    impl ferrite_engine::loan::Lent for Nothing {
        fn read(&self, _: &ferrite_engine::loan::Held<'_>, _: usize, _: &mut [u8]) -> bool {
            false
        }

        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    fn lend(inbox: &Inbox, from: usize, length: usize) -> Given {
        let mut loan = Loan::default();
        loan.add(&Arc::new(Nothing), 0, length);
        inbox.lend(from, &[0; 60], Arc::new(loan))
    }

    #[test]
    fn who_lends_much_takes_no_more_than_others() {
        const LONG: usize = 256 << 10;
        let inbox = Inbox::new(2);
        while lend(&inbox, 0, LONG) != Given::Dropped {}
        let frames = fill(&inbox, Some(1));
        let mut parcels = VecDeque::new();
        let (mut lent, mut given) = (0, 0);
        while given < frames {
            inbox.take(&mut parcels, 64);
            let bytes: usize = parcels.iter().map(Parcel::length).sum();
            assert!(bytes < TAKE + LONG, "{bytes} at once");
            for parcel in parcels.drain(..) {
                if parcel.loan.is_some() {
                    lent += 1;
                } else {
                    given += 1;
                }
                // One more than its share is under way.
                assert!(
                    (lent - 1) * (LONG / TURN - 1) <= given.max(1),
                    "{lent} {given}"
                );
            }
        }
        // It is alone, and goes on at once.
        while lend(&inbox, 0, LONG) != Given::Dropped {}
        inbox.take(&mut parcels, 3);
        assert_eq!(parcels.len(), 3);
        parcels.clear();
        inbox.take(&mut parcels, 64);
        assert_eq!(parcels.len(), TAKE / LONG);
    }

    #[test]
    fn what_is_lent_is_bounded_for_each_sender() {
        const LENT: usize = 64 << 10;
        let inbox = Inbox::new(2);
        let lend = |from| lend(&inbox, from, LENT);
        let mut taken = 0;
        while lend(0) != Given::Dropped {
            taken += 1;
        }
        assert!((ROOM..LENT_ROOM).contains(&(taken * LENT)));
        assert!(inbox.room(0) < LENT);
        assert_eq!(inbox.room(1), ROOM);
        assert_eq!(lend(1), Given::First);
        let mut parcels = VecDeque::new();
        // There is room for frames again before all of it is read.
        let mut wake = 0;
        while parcels.len() < 2 * taken / 3 {
            let more = 2 * taken / 3 - parcels.len();
            wake |= inbox.take(&mut parcels, more);
        }
        assert_eq!(wake, 1 << 0);
        assert_eq!(inbox.room(0), ROOM - (inbox.state().queues[0].bytes));
        while !inbox.is_empty() {
            inbox.take(&mut parcels, usize::MAX);
        }
        assert_eq!(parcels.len(), taken + 1);
        let lent: usize = parcels.iter().map(Parcel::lent).sum();
        assert_eq!(lent, (taken + 1) * LENT);
        assert_eq!((inbox.room(0), inbox.room(1)), (ROOM, ROOM));
    }

    #[test]
    fn what_nobody_reads_any_more_is_lost_and_waited_for_by_nobody() {
        let loan = Arc::new(Loan::default());
        let lend = |inbox: &Inbox| inbox.lend(0, &[0; 60], Arc::clone(&loan));
        let inbox = Inbox::new(2);
        assert_eq!(lend(&inbox), Given::First);
        fill(&inbox, Some(1));
        assert!(inbox.room(1) < FRAME + FRAME_OVERHEAD);
        assert_eq!(inbox.close(), 1 << 1, "who waits is told");
        assert_eq!(Arc::strong_count(&loan), 1);
        let drops = inbox.drops();
        assert_eq!(lend(&inbox), Given::Dropped);
        assert_eq!(inbox.give(None, Medium::Wire, &[0; 60]), Given::Dropped);
        assert_eq!(Arc::strong_count(&loan), 1);
        assert_eq!((inbox.drops(), inbox.is_empty()), (drops + 2, true));
        assert_eq!((inbox.room(0), inbox.room(1)), (usize::MAX, usize::MAX));
        // One whose reader is another from now on takes what comes.
        let inbox = Inbox::new(2);
        inbox.clear();
        assert_eq!(lend(&inbox), Given::First);
    }

    #[test]
    fn who_waits_for_room_is_woken_when_there_is_enough() {
        let inbox = Inbox::new(2);
        assert_eq!(inbox.room(1), ROOM);
        fill(&inbox, Some(1));
        assert!(inbox.room(1) < FRAME + FRAME_OVERHEAD);
        let mut parcels = VecDeque::new();
        assert_eq!(inbox.take(&mut parcels, 10), 0, "that is little");
        assert_eq!(inbox.take(&mut parcels, usize::MAX), 1 << 1);
        assert_eq!(inbox.take(&mut parcels, usize::MAX), 0, "told once");
        fill(&inbox, Some(1));
        inbox.room(1);
        assert_eq!(inbox.clear(), 1 << 1);
        assert!(inbox.is_empty());
        assert_eq!(inbox.room(1), ROOM);
    }
}
