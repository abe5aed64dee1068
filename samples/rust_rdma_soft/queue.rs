// SPDX-License-Identifier: GPL-2.0

//! Queues, and what is in them.

use crate::driver::Soft;
use crate::memory::{Local, Mapping};
use crate::rdma::{QpRef, Remote, SendFlags, WcOpcode, WcStatus};
use kernel::prelude::*;

/// A queue with room for a fixed number of entries, so that adding one allocates nothing.
pub(crate) struct Ring<T> {
    /// `None` where there is no entry, where the first one was lent, and where a [`Sweep`] has taken one out.
    entries: KVVec<Option<T>>,
    /// How many have left the queue, and how many have ever been in it: the first one's place, and that
    /// behind the last.
    head: u64,
    tail: u64,
}

/// How far [`Ring::sweep`] has come. Whoever takes entries meanwhile finds those that stay, in their order.
#[derive(Default)]
pub(crate) struct Sweep {
    /// Those before it stay.
    kept: u64,
    /// Those from it on were not looked at. Between both there is nothing any more.
    next: u64,
}

impl<T> Ring<T> {
    /// A queue with room for `room` entries.
    pub(crate) fn new(room: usize) -> Result<Self> {
        // As many as a process likes.
        let mut entries = KVVec::with_capacity(room, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..room {
            entries.push(None, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(Self {
            entries,
            head: 0,
            tail: 0,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The place of an entry, of a queue that has room for any.
    fn place(&mut self, at: u64) -> &mut Option<T> {
        let at = at % self.entries.len() as u64;
        &mut self.entries[at as usize]
    }

    /// Adds an entry behind all others; gives it back where there is no room.
    pub(crate) fn push(&mut self, entry: T) -> Result<(), T> {
        if self.tail - self.head == self.entries.len() as u64 {
            return Err(entry);
        }
        *self.place(self.tail) = Some(entry);
        self.tail += 1;
        Ok(())
    }

    /// Takes the first entry.
    pub(crate) fn pop(&mut self) -> Option<T> {
        while !self.is_empty() {
            let entry = self.lend();
            self.end_loan();
            if entry.is_some() {
                return entry;
            }
        }
        None
    }

    /// The first entry, which keeps its room until it is given back or its loan is ended.
    pub(crate) fn lend(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        self.place(self.head).take()
    }

    /// Puts what was lent where it was.
    pub(crate) fn give_back(&mut self, entry: T) {
        if !self.is_empty() {
            *self.place(self.head) = Some(entry);
        }
    }

    /// Frees the room of what was lent.
    pub(crate) fn end_loan(&mut self) {
        if !self.is_empty() {
            *self.place(self.head) = None;
            self.head += 1;
        }
    }

    /// Takes out the entries that `keep` does not say, of the next `most`; returns whether it has looked at
    /// all. None may be lent meanwhile.
    pub(crate) fn sweep(
        &mut self,
        sweep: &mut Sweep,
        most: usize,
        keep: impl Fn(&T) -> bool,
    ) -> bool {
        // Others may have taken entries since, also those that were not looked at.
        sweep.kept = sweep.kept.max(self.head);
        sweep.next = sweep.next.max(self.head);
        for _ in 0..most {
            if sweep.next == self.tail {
                break;
            }
            let entry = self.place(sweep.next).take();
            if let Some(entry) = entry.filter(&keep) {
                *self.place(sweep.kept) = Some(entry);
                sweep.kept += 1;
            }
            sweep.next += 1;
        }
        let all = sweep.next == self.tail;
        if all {
            self.tail = sweep.kept;
        }
        all
    }

    /// Forgets all entries.
    pub(crate) fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

/// What a send work request is, with all that it needs until it is done.
pub(crate) enum Op {
    Send {
        imm: Option<u32>,
        invalidate: Option<u32>,
    },
    Write {
        remote: Remote,
        imm: Option<u32>,
    },
    Read(Remote),
    CompareSwap {
        remote: Remote,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        remote: Remote,
        add: u64,
    },
    /// The region is looked up when it is done: a reference in here would keep it from ending.
    Register {
        /// Which region ([`crate::driver::SoftMr::serial`]).
        serial: u64,
        key: u32,
        mapping: Mapping,
    },
    Invalidate(u32),
}

impl Op {
    pub(crate) fn opcode(&self) -> WcOpcode {
        match self {
            Self::Send { .. } => WcOpcode::Send,
            Self::Write { .. } => WcOpcode::RdmaWrite,
            Self::Read(_) => WcOpcode::RdmaRead,
            Self::CompareSwap { .. } => WcOpcode::CompareSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::Register { .. } => WcOpcode::RegMr,
            Self::Invalidate(_) => WcOpcode::LocalInvalidate,
        }
    }
}

/// A send work request.
pub(crate) struct Send {
    pub(crate) wr_id: u64,
    pub(crate) flags: SendFlags,
    pub(crate) op: Op,
    pub(crate) local: Local,
}

/// A receive work request.
pub(crate) struct Recv {
    pub(crate) wr_id: u64,
    pub(crate) local: Local,
}

/// A completion. Its reference keeps the queue pair, whose end takes it out of the queue.
pub(crate) struct Cqe {
    pub(crate) qp: QpRef<Soft>,
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated: Option<u32>,
}

#[kunit_tests(rust_rdma_soft_queue)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_out_as_they_went_in_and_there_is_so_much_room() -> Result {
        let mut ring = Ring::new(3)?;
        for round in 0..5 {
            for entry in 0..3 {
                assert_eq!(ring.push(3 * round + entry), Ok(()));
            }
            assert_eq!(ring.push(99), Err(99));
            for entry in 0..3 {
                assert_eq!(ring.pop(), Some(3 * round + entry));
            }
            assert_eq!(ring.pop(), None);
        }
        let mut none = Ring::new(0)?;
        assert_eq!((none.push(1), none.pop()), (Err(1), None));
        Ok(())
    }

    #[test]
    fn what_is_lent_keeps_its_room() -> Result {
        let mut ring = Ring::new(2)?;
        for entry in 1..3 {
            assert_eq!(ring.push(entry), Ok(()));
        }
        assert_eq!(ring.lend(), Some(1));
        assert_eq!(ring.push(3), Err(3));
        ring.give_back(1);
        assert_eq!(ring.lend(), Some(1));
        ring.end_loan();
        assert_eq!(ring.push(3), Ok(()));
        assert_eq!((ring.pop(), ring.pop()), (Some(2), Some(3)));
        Ok(())
    }

    /// A ring of six, somewhere in the middle of its life, with 1 to 6.
    fn full() -> Result<Ring<i32>> {
        let mut ring = Ring::new(6)?;
        for _ in 0..4 {
            assert_eq!(ring.push(0), Ok(()));
        }
        ring.clear();
        assert!(ring.is_empty());
        for entry in 1..7 {
            assert_eq!(ring.push(entry), Ok(()));
        }
        Ok(ring)
    }

    #[test]
    fn what_is_not_kept_is_gone_and_leaves_room() -> Result {
        let mut ring = full()?;
        let mut sweep = Sweep::default();
        assert!(!ring.sweep(&mut sweep, 5, |entry| entry % 2 == 0));
        assert!(ring.sweep(&mut sweep, 5, |entry| entry % 2 == 0));
        for entry in 7..10 {
            assert_eq!(ring.push(entry), Ok(()));
        }
        assert_eq!(ring.push(10), Err(10));
        for entry in [2, 4, 6, 7, 8, 9] {
            assert_eq!(ring.pop(), Some(entry));
        }
        assert_eq!(ring.pop(), None);
        assert!(ring.sweep(&mut Sweep::default(), 1, |_| false));
        Ok(())
    }

    #[test]
    fn who_takes_entries_during_a_sweep_finds_those_that_stay() -> Result {
        // However many it takes, and however far the sweep has come.
        for taken in 0..4 {
            for most in 1..6 {
                let mut ring = full()?;
                let mut sweep = Sweep::default();
                let mut found = KVec::new();
                // It may still find what was not looked at.
                let mut done = ring.sweep(&mut sweep, most, |entry| entry % 3 == 0);
                for _ in 0..taken {
                    if let Some(entry) = ring.pop() {
                        found.push(entry, GFP_KERNEL)?;
                    }
                }
                assert_eq!(found.len(), taken.min(most / 3 + 6 - most));
                while !done {
                    done = ring.sweep(&mut sweep, most, |entry| entry % 3 == 0);
                }
                while let Some(entry) = ring.pop() {
                    assert_eq!(entry % 3, 0);
                    found.push(entry, GFP_KERNEL)?;
                }
                assert!(found.is_sorted());
                assert!([3, 6].iter().all(|kept| found.contains(kept)));
                assert!((1..=most as i32).all(|at| at % 3 == 0 || !found.contains(&at)));
            }
        }
        Ok(())
    }
}
