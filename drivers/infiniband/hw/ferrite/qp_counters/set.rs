// SPDX-License-Identifier: GPL-2.0

//! What the members of one counter have counted, and what those had who left.

use super::{
    add,
    subtract,
    Values,
    NOTHING, //
};
use crate::abi;
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    time::{
        Delta,
        Instant,
        Monotonic, //
    }, //
};

/// How long what was read of a set is not read again: the core asks for all of it once for each counter.
pub(super) const FRESH: Delta = Delta::from_millis(10);

/// How often members that leave while they are asked for have who reads a set ask anew.
pub(super) const MOST_IN_VAIN: u32 = 8;

/// Some members of a set, whom the device is asked for at once.
pub(super) struct Asked {
    qpns: [u32; abi::COUNTED_QUEUE_PAIRS],
    count: usize,
    /// What they had counted together when they were bound.
    before: Values,
}

impl Asked {
    pub(super) fn qpns(&self) -> &[u32] {
        &self.qpns[..self.count]
    }
}

/// What is to be done next by who reads a set.
// It is on the stack of who reads, once, and moved nowhere.
#[expect(clippy::large_enum_variant)]
pub(super) enum Next {
    /// To ask for these members.
    Ask(Asked),
    /// Nothing: that is what it has counted.
    Done(Values),
}

/// How far somebody has come who reads a set, by asking the device again and again. Members come and go meanwhile:
/// what each of them counted is in the sum once, as of when it was asked for or of when it left before that.
struct Reading {
    /// Members of lesser numbers were asked for. Who comes with such a number comes too late.
    next: u32,
    /// Members of lesser numbers are being asked for.
    ahead: u32,
    /// One of these has left: what is answered is of no use, and the others are asked for again.
    again: bool,
    /// How often that was so.
    in_vain: u32,
    /// A member came or went.
    changed: bool,
    /// What those have counted that were asked for, and former members.
    sum: Values,
}

/// Who reads a set: one of each kind at a time.
#[derive(Clone, Copy)]
pub(super) enum Reader {
    /// Of the set alone, for whom the core locks it.
    OfSet,
    /// Of all sets of the port, who have a lock of their own.
    OfPort,
}

/// A set of counters.
pub(super) struct Set {
    /// What each member had counted when it was bound.
    pub(super) members: RBTree<u32, Values>,
    /// What former members counted while they were members.
    pub(super) kept: Values,
    /// What the set had counted when it was last read.
    pub(super) seen: Values,
    /// When that was, unless a member came or went since.
    pub(super) read: Option<Instant<Monotonic>>,
    /// By [`Reader`].
    readings: [Option<Reading>; 2],
}

impl Set {
    pub(super) fn new() -> Self {
        Self {
            members: RBTree::new(),
            kept: NOTHING,
            seen: NOTHING,
            read: None,
            readings: [None, None],
        }
    }

    /// A queue pair that is no member, and has counted so much, becomes one.
    pub(super) fn bind(&mut self, member: RBTreeNode<u32, Values>) {
        self.members.insert(member);
        self.changes();
    }

    /// A member that has counted `so_far` leaves; what it counted stays. Where the device does not say any
    /// more how much that is, only what others have counted does.
    pub(super) fn unbind(&mut self, qpn: u32, so_far: Option<Values>) {
        let Some(before) = self.members.remove(&qpn) else {
            return;
        };
        let mut counted = so_far.unwrap_or(before);
        subtract(&mut counted, &before);
        add(&mut self.kept, &counted);
        for reading in self.readings.iter_mut().flatten() {
            if qpn >= reading.next {
                add(&mut reading.sum, &counted);
                reading.again |= qpn < reading.ahead;
            }
        }
        self.changes();
    }

    fn changes(&mut self) {
        self.read = None;
        for reading in self.readings.iter_mut().flatten() {
            reading.changed = true;
        }
    }

    /// Begins to read it; else what it has counted, where that was read just now, or is by another.
    pub(super) fn begin(&mut self, reader: Reader) -> Option<Values> {
        let reading = &mut self.readings[reader as usize];
        if reading.is_some() || self.read.is_some_and(|read| read.elapsed() < FRESH) {
            return Some(self.seen);
        }
        *reading = Some(Reading {
            next: 0,
            ahead: 0,
            again: false,
            in_vain: 0,
            changed: false,
            sum: self.kept,
        });
        None
    }

    /// What is to be done next by who has begun to read it.
    pub(super) fn next(&mut self, reader: Reader) -> Result<Next> {
        let slot = &mut self.readings[reader as usize];
        let reading = slot.as_mut().ok_or(EINVAL)?;
        let mut asked = Asked {
            qpns: [0; abi::COUNTED_QUEUE_PAIRS],
            count: 0,
            before: NOTHING,
        };
        let mut cursor = self.members.cursor_lower_bound_mut(&reading.next);
        while let Some(member) = cursor.filter(|_| asked.count < asked.qpns.len()) {
            let (qpn, before) = member.current();
            asked.qpns[asked.count] = *qpn;
            asked.count += 1;
            add(&mut asked.before, before);
            reading.ahead = qpn + 1;
            cursor = member.move_next();
        }
        reading.again = false;
        if asked.count != 0 {
            return Ok(Next::Ask(asked));
        }
        let (sum, changed) = (reading.sum, reading.changed);
        *slot = None;
        self.seen = sum;
        self.read = (!changed).then(Instant::now);
        Ok(Next::Done(sum))
    }

    /// These members have counted so much together. What the set has counted as far as is known, where members have left
    /// so often while they were asked for that it is not worth going on: it is read no more then.
    pub(super) fn answered(
        &mut self,
        reader: Reader,
        asked: &Asked,
        mut counted: Values,
    ) -> Option<Values> {
        let slot = &mut self.readings[reader as usize];
        let reading = slot.as_mut()?;
        if !reading.again {
            subtract(&mut counted, &asked.before);
            add(&mut reading.sum, &counted);
            reading.next = reading.ahead;
            return None;
        }
        reading.in_vain += 1;
        if reading.in_vain < MOST_IN_VAIN {
            return None;
        }
        *slot = None;
        Some(self.seen)
    }

    /// Nobody reads it any more.
    pub(super) fn leave(&mut self, reader: Reader) {
        self.readings[reader as usize] = None;
    }
}
