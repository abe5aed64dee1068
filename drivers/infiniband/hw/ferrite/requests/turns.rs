// SPDX-License-Identifier: GPL-2.0

//! Whose turn it is among those who wait for room in the ring.

use super::request::Request;
use crate::kernel_ext::scoped::ScopedRef;
use kernel::prelude::*;

/// Users who wait at once and have a turn each, of every class; what is beyond shares.
pub(super) const QUEUES: usize = u64::BITS as usize;

/// Requests of a user that wait, in the order they came.
pub(super) struct Waiting {
    user: u64,
    pub(super) first: Option<ScopedRef<Request>>,
    pub(super) last: Option<ScopedRef<Request>>,
    pub(super) length: u32,
}

/// Requests of one class that wait: users in turn.
pub(super) struct Turns {
    pub(super) queues: KVec<Waiting>,
    /// Which queues are not empty.
    pub(super) used: u64,
    /// The queue whose turn it is.
    next: usize,
}

impl Turns {
    pub(super) fn new() -> Result<Self> {
        let mut queues = KVec::with_capacity(QUEUES, GFP_KERNEL)?;
        for _ in 0..QUEUES {
            let queue = Waiting {
                user: 0,
                first: None,
                last: None,
                length: 0,
            };
            queues.push(queue, GFP_KERNEL)?;
        }
        Ok(Self {
            queues,
            used: 0,
            next: 0,
        })
    }

    /// The queue of a user: the one that is, else a new one, else the shortest, which is shared.
    pub(super) fn queue_of(&mut self, user: u64) -> usize {
        let used = |queue: usize| self.used & 1 << queue != 0;
        let own = (0..QUEUES).find(|queue| used(*queue) && self.queues[*queue].user == user);
        if let Some(own) = own {
            return own;
        }
        match (0..QUEUES).find(|queue| !used(*queue)) {
            Some(new) => {
                self.queues[new].user = user;
                new
            }
            None => (0..QUEUES)
                .min_by_key(|queue| self.queues[*queue].length)
                .unwrap_or(0),
        }
    }

    /// The queue whose turn it is, which then is the next one's.
    pub(super) fn take_turn(&mut self) -> Option<usize> {
        if self.used == 0 {
            return None;
        }
        let ahead = self.used.rotate_right(self.next as u32).trailing_zeros();
        let queue = (self.next + ahead as usize) % QUEUES;
        self.next = (queue + 1) % QUEUES;
        Some(queue)
    }
}
