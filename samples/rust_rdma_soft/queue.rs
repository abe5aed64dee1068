// SPDX-License-Identifier: GPL-2.0

//! Queues, and what is in them.

use crate::driver::Soft;
use crate::memory::Local;
use crate::rdma::{Access, MrRef, QpRef, Remote, SendFlags, WcOpcode, WcStatus};
use kernel::prelude::*;

/// A queue with room for a fixed number of entries, so that adding one allocates nothing.
pub(crate) struct Ring<T> {
    /// `None` where there is no entry, and where the first one was lent.
    entries: KVVec<Option<T>>,
    first: usize,
    len: usize,
}

impl<T> Ring<T> {
    /// A queue with room for `room` entries.
    pub(crate) fn new(room: usize) -> Result<Self> {
        let mut entries = KVVec::with_capacity(room, GFP_KERNEL)?;
        for _ in 0..room {
            entries.push(None, GFP_KERNEL)?;
        }
        Ok(Self {
            entries,
            first: 0,
            len: 0,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry behind all others; `ENOMEM` where there is no room.
    pub(crate) fn push(&mut self, entry: T) -> Result {
        if self.len == self.entries.len() {
            return Err(ENOMEM);
        }
        let at = (self.first + self.len) % self.entries.len();
        self.entries[at] = Some(entry);
        self.len += 1;
        Ok(())
    }

    /// Takes the first entry.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let entry = self.lend()?;
        self.end_loan();
        Some(entry)
    }

    /// The first entry, which keeps its room until it is given back or its loan is ended.
    pub(crate) fn lend(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        self.entries[self.first].take()
    }

    /// Puts what was lent where it was.
    pub(crate) fn give_back(&mut self, entry: T) {
        if !self.is_empty() {
            self.entries[self.first] = Some(entry);
        }
    }

    /// Frees the room of what was lent.
    pub(crate) fn end_loan(&mut self) {
        if !self.is_empty() {
            self.entries[self.first] = None;
            self.first = (self.first + 1) % self.entries.len();
            self.len -= 1;
        }
    }

    /// Keeps the entries that `keep` says, in their order.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for _ in 0..self.len {
            match self.pop() {
                // There is room: one was taken just now.
                Some(entry) if keep(&entry) => drop(self.push(entry)),
                _ => {}
            }
        }
    }

    /// Forgets all entries.
    pub(crate) fn clear(&mut self) {
        self.retain(|_| false);
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
    Register {
        mr: MrRef<Soft>,
        key: u32,
        access: Access,
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
    pub(crate) id: u64,
    pub(crate) flags: SendFlags,
    pub(crate) op: Op,
    pub(crate) local: Local,
}

/// A receive work request.
pub(crate) struct Recv {
    pub(crate) id: u64,
    pub(crate) local: Local,
}

/// A completion. Its reference keeps the queue pair, whose end takes it out of the queue.
pub(crate) struct Cqe {
    pub(crate) qp: QpRef<Soft>,
    pub(crate) id: u64,
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
                ring.push(3 * round + entry)?;
            }
            assert_eq!(ring.push(99), Err(ENOMEM));
            for entry in 0..3 {
                assert_eq!(ring.pop(), Some(3 * round + entry));
            }
            assert_eq!(ring.pop(), None);
        }
        assert_eq!(Ring::new(0)?.push(1), Err(ENOMEM));
        Ok(())
    }

    #[test]
    fn what_is_lent_keeps_its_room() -> Result {
        let mut ring = Ring::new(2)?;
        ring.push(1)?;
        ring.push(2)?;
        assert_eq!(ring.lend(), Some(1));
        assert_eq!(ring.push(3), Err(ENOMEM));
        ring.give_back(1);
        assert_eq!(ring.lend(), Some(1));
        ring.end_loan();
        ring.push(3)?;
        assert_eq!((ring.pop(), ring.pop()), (Some(2), Some(3)));
        Ok(())
    }

    #[test]
    fn what_is_not_kept_is_gone() -> Result {
        let mut ring = Ring::new(4)?;
        ring.push(0)?;
        let _ = ring.pop();
        for entry in 1..5 {
            ring.push(entry)?;
        }
        ring.retain(|entry| entry % 2 == 0);
        assert_eq!(
            (ring.pop(), ring.pop(), ring.pop()),
            (Some(2), Some(4), None)
        );
        Ok(())
    }
}
