// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What waits for a function: frames of the other functions and of the wire.
//!
//! Each sender has a queue of its own, of so many bytes, and they are read in turn: one that sends
//! more than is read loses its own frames and nobody else's, as behind a switch.

use ferrite_engine::memory::FRAME_OVERHEAD;
use ferrite_engine::roce::Medium;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of one sender that wait at most, with what each frame takes beside its own.
pub const ROOM: usize = 1024 * 1024;
/// The same of the wire: who sends there is not told of room, and comes in bursts.
const WIRE_ROOM: usize = 4 * 1024 * 1024;

/// A frame on its way to a function.
pub struct Parcel {
    /// The function that it is from, or none if it came by the uplink.
    pub from: Option<usize>,
    /// Without its CRC, if this is memory and it is one of a queue pair.
    pub medium: Medium,
    /// The frame.
    pub frame: Box<[u8]>,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// The first that waits; its reader is to be woken.
    First,
    /// Others wait, too.
    Behind,
    /// There was no room.
    Dropped,
}

/// What one sender has sent.
#[derive(Default)]
struct Queue {
    frames: VecDeque<(Medium, Box<[u8]>)>,
    bytes: usize,
    drops: u64,
    /// The sender waits for room.
    wanted: bool,
    most: usize,
}

impl Queue {
    fn new(most: usize) -> Self {
        Self {
            most,
            ..Self::default()
        }
    }

    fn room(&self) -> usize {
        self.most.saturating_sub(self.bytes)
    }
}

struct State {
    /// By the senders' numbers; the last is the wire's.
    queues: Vec<Queue>,
    /// Whose turn it is.
    next: usize,
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
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in a frame of a function's, or of the wire's.
    pub fn give(&self, from: Option<usize>, medium: Medium, frame: &[u8]) -> Given {
        let cost = frame.len() + FRAME_OVERHEAD;
        let mut state = self.state();
        let place = from.unwrap_or(state.queues.len() - 1);
        let Some(queue) = state.queues.get_mut(place) else {
            return Given::Dropped;
        };
        if cost > queue.room() {
            queue.drops += 1;
            return Given::Dropped;
        }
        queue.bytes += cost;
        queue.frames.push_back((medium, frame.into()));
        match queue.frames.len() {
            1 => Given::First,
            _ => Given::Behind,
        }
    }

    /// What a function may put in without loss.
    pub fn room(&self, from: usize) -> usize {
        let mut state = self.state();
        let Some(queue) = state.queues.get_mut(from) else {
            return 0;
        };
        let room = queue.room();
        // Not enough to be woken for, whatever takes what there is meanwhile.
        queue.wanted |= room <= ROOM / 2;
        room
    }

    /// Takes out so many at most, one of each sender in turn. Returns the functions that wait for
    /// the room that there is now, bit by bit.
    pub fn take(&self, into: &mut VecDeque<Parcel>, most: usize) -> u64 {
        let mut wake = 0;
        let mut guard = self.state();
        let state = &mut *guard;
        let senders = state.queues.len();
        let mut empty = 0;
        let mut taken = 0;
        while empty < senders && taken < most {
            let place = state.next % senders;
            state.next = (place + 1) % senders;
            let Some(queue) = state.queues.get_mut(place) else {
                break;
            };
            let Some((medium, frame)) = queue.frames.pop_front() else {
                empty += 1;
                continue;
            };
            (empty, taken) = (0, taken + 1);
            queue.bytes -= frame.len() + FRAME_OVERHEAD;
            if queue.wanted && queue.room() > ROOM / 2 {
                queue.wanted = false;
                wake |= 1 << place;
            }
            into.push_back(Parcel {
                from: (place + 1 < senders).then_some(place),
                medium,
                frame,
            });
        }
        wake
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        let state = self.state();
        state.queues.iter().all(|queue| queue.frames.is_empty())
    }

    /// Frames for which there was no room.
    pub fn drops(&self) -> u64 {
        self.state().queues.iter().map(|queue| queue.drops).sum()
    }

    /// Forgets what waits: its reader is another from now on. Returns who waits for room, as
    /// [`Inbox::take`].
    pub fn clear(&self) -> u64 {
        let mut wake = 0;
        for (place, queue) in self.state().queues.iter_mut().enumerate() {
            queue.frames.clear();
            queue.bytes = 0;
            wake |= u64::from(std::mem::take(&mut queue.wanted)) << place;
        }
        wake
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
