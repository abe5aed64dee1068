// SPDX-License-Identifier: GPL-2.0

//! What there is to see of all commands at once, for people who look after a failure: not what they are about, which
//! may be a key.

use super::{
    state::State,
    PostedFor, //
};
use kernel::{
    prelude::*,
    time::Instant, //
};

/// A command that the device has.
#[derive(Clone, Copy)]
pub(crate) struct CommandView {
    /// How many were put in the ring from this one on.
    pub(super) behind: u32,
    /// By [`CommandOpcode`](crate::abi::CommandOpcode), or what was asked for instead.
    pub(crate) opcode: u16,
    /// For how many milliseconds.
    pub(crate) age: u64,
    /// What for, if nobody waits for it.
    pub(crate) posted: Option<PostedFor>,
    /// Whether its answer is still expected.
    pub(crate) expected: bool,
}

/// The control ring and who waits for it.
pub(crate) struct RingView {
    /// Commands put in the ring, those that the device was told of by its doorbell, and those that it answered: all
    /// free-running.
    pub(crate) producer: u32,
    pub(crate) told: u32,
    pub(crate) answers: u32,
    /// No command is taken any more.
    pub(crate) closed: bool,
    /// Places that are free.
    pub(crate) free: u32,
    /// Commands that wait for one.
    pub(crate) waiting: u32,
    /// Commands that the device has, the oldest first: when they are given up, too, as long as no others have their
    /// places.
    pub(crate) commands: KVec<CommandView>,
}

impl RingView {
    /// How many registrations the device has that nobody waits for.
    pub(crate) fn registrations(&self) -> usize {
        let is_one = |command: &&CommandView| command.posted == Some(PostedFor::Making);
        self.commands.iter().filter(is_one).count()
    }
}

impl State {
    /// All that there is; as many `commands` as there is room for.
    pub(super) fn look(&self, mut commands: KVec<CommandView>) -> RingView {
        let now = Instant::now();
        for (index, slot) in self.slots.iter().enumerate() {
            // One that was given up has nobody who expects an answer, and is not free.
            if self.free.contains(index) {
                continue;
            }
            let command = CommandView {
                behind: self.producer.wrapping_sub(slot.place),
                opcode: slot.opcode,
                age: (now - slot.since).as_millis().unsigned_abs(),
                posted: slot.posted,
                expected: slot.owner.is_some(),
            };
            // There is room for all.
            let _ = commands.push_within_capacity(command);
        }
        let queues = self.turns.iter().flat_map(|turns| turns.queues.iter());
        RingView {
            producer: self.producer,
            told: self.told,
            answers: self.answers,
            closed: self.closed,
            free: self.free.len(),
            waiting: queues.map(|queue| queue.length).sum(),
            commands,
        }
    }
}
