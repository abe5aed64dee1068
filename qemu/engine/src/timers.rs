// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Deadlines of everything in the engine, in one heap.
//!
//! A deadline that moves later, the common case (every acknowledgement restarts a timer), leaves
//! the heap as it is: the entry is moved when it comes up.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Whose deadline an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimerOwner {
    /// Queue pair, by number: retransmission and receiver-not-ready timers.
    QueuePair(u32),
    /// Event queue, by number: interrupt moderation.
    EventQueue(u16),
    /// Completion queue, by number: event moderation.
    CompletionQueue(u32),
}

/// One deadline, kept by its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timer {
    /// When to fire; none when stopped.
    deadline: Option<u64>,
    /// The deadline of the owner's live entry in the heap.
    queued: Option<u64>,
}

impl Timer {
    /// When the timer fires, if it runs.
    pub fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// True while it runs.
    pub fn is_running(&self) -> bool {
        self.deadline.is_some()
    }

    /// Stops it. The heap forgets it when its entry comes up.
    pub fn stop(&mut self) {
        self.deadline = None;
    }
}

/// The heap of deadlines.
#[derive(Debug, Default)]
pub struct Timers {
    heap: BinaryHeap<Reverse<(u64, TimerOwner)>>,
    /// Entries left by the last sweep.
    swept: usize,
}

impl Timers {
    /// Starts or restarts `timer`, which belongs to `owner`.
    pub fn start(&mut self, timer: &mut Timer, owner: TimerOwner, deadline: u64) {
        timer.deadline = Some(deadline);
        if timer.queued.is_none_or(|queued| queued > deadline) {
            timer.queued = Some(deadline);
            self.heap.push(Reverse((deadline, owner)));
        }
    }

    /// The next time at which [`Timers::pop`] has something.
    pub fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }

    /// Takes an entry that is due; ask [`Timers::expired`] whether its owner's timer really is.
    pub fn pop(&mut self, now: u64) -> Option<(u64, TimerOwner)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// Settles an entry that [`Timers::pop`] gave: true when `timer` has run out (it is stopped
    /// then); else it is queued again where it still runs.
    pub fn expired(&mut self, timer: &mut Timer, owner: TimerOwner, entry: u64, now: u64) -> bool {
        if timer.queued != Some(entry) {
            return false;
        }
        timer.queued = None;
        match timer.deadline {
            Some(deadline) if deadline <= now => {
                timer.deadline = None;
                true
            }
            Some(deadline) => {
                self.start(timer, owner, deadline);
                false
            }
            None => false,
        }
    }

    /// True when stale entries may have piled up: owners destroyed, deadlines moved earlier.
    pub fn needs_sweep(&self) -> bool {
        self.heap.len() > 64 + 2 * self.swept
    }

    /// Drops the entries that `timer_of` knows no timer for, or one that has another entry.
    pub fn sweep(&mut self, timer_of: impl Fn(TimerOwner) -> Option<Timer>) {
        let mut entries = std::mem::take(&mut self.heap).into_vec();
        entries.retain(|Reverse((deadline, owner))| {
            timer_of(*owner).is_some_and(|timer| timer.queued == Some(*deadline))
        });
        entries.sort_unstable();
        entries.dedup();
        self.swept = entries.len();
        self.heap = entries.into();
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.heap.clear();
        self.swept = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: TimerOwner = TimerOwner::QueuePair(1);

    #[test]
    fn a_restarted_timer_fires_once_at_its_last_deadline() {
        let mut timers = Timers::default();
        let mut timer = Timer::default();
        for deadline in [10, 20, 30] {
            timers.start(&mut timer, OWNER, deadline);
        }
        assert_eq!(timers.heap.len(), 1);
        let (entry, _) = timers.pop(10).unwrap();
        assert!(!timers.expired(&mut timer, OWNER, entry, 10));
        assert_eq!(timers.pop(29), None);
        let (entry, _) = timers.pop(30).unwrap();
        assert!(timers.expired(&mut timer, OWNER, entry, 30));
        assert!(!timer.is_running());
        assert_eq!(timers.pop(u64::MAX), None);
    }

    #[test]
    fn entries_of_owners_that_are_gone_do_not_pile_up() {
        let mut timers = Timers::default();
        for number in 0..100_000 {
            let mut timer = Timer::default();
            timers.start(&mut timer, TimerOwner::QueuePair(number), u64::MAX);
            if timers.needs_sweep() {
                timers.sweep(|owner| (owner == TimerOwner::QueuePair(number)).then_some(timer));
            }
        }
        assert!(timers.heap.len() < 100);
    }

    #[test]
    fn an_earlier_deadline_overtakes_and_a_stopped_timer_stays_silent() {
        let mut timers = Timers::default();
        let mut timer = Timer::default();
        timers.start(&mut timer, OWNER, 50);
        timers.start(&mut timer, OWNER, 5);
        let (entry, _) = timers.pop(5).unwrap();
        assert!(timers.expired(&mut timer, OWNER, entry, 5));
        let (entry, _) = timers.pop(50).unwrap();
        assert!(!timers.expired(&mut timer, OWNER, entry, 50));
        timers.start(&mut timer, OWNER, 60);
        timer.stop();
        let (entry, _) = timers.pop(60).unwrap();
        assert!(!timers.expired(&mut timer, OWNER, entry, 60));
    }
}
