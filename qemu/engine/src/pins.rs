// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Pin bits of event queues (specification, chapter 1, "INTx"): which queues have raised their
//! interrupt and got no doorbell since.

use crate::eq::MAX_EQ;

const WORDS: usize = (MAX_EQ as usize).div_ceil(64);

/// A bit for each event queue.
#[derive(Debug, Default)]
pub struct PinBits {
    words: [u64; WORDS],
}

impl PinBits {
    /// The queue raises its interrupt.
    pub(crate) fn set(&mut self, eqn: u16) {
        if let Some(word) = self.words.get_mut(usize::from(eqn) / 64) {
            *word |= 1 << (eqn % 64);
        }
    }

    /// A doorbell for the queue came, or the queue is gone.
    pub(crate) fn clear(&mut self, eqn: u16) {
        if let Some(word) = self.words.get_mut(usize::from(eqn) / 64) {
            *word &= !(1 << (eqn % 64));
        }
    }

    /// Whether any is set: the level of the pin, where nothing else keeps it low.
    pub(crate) fn any(&self) -> bool {
        self.words.iter().any(|word| *word != 0)
    }

    /// Whether the bit of the queue is set.
    pub(crate) fn is_set(&self, eqn: u16) -> bool {
        let word = self.words.get(usize::from(eqn) / 64);
        word.is_some_and(|word| (word >> (eqn % 64)) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Node;
    use ferrite_abi::{
        CommandOpcode, CommandStatus, EventCode, EventDoorbell, CONTROL_RESET,
        DOORBELL_EVENT_QUEUE, EQ_ASYNC, EQ_CONTROL, EQ_FIRST_HANDLER, REG_CONTROL,
    };

    fn doorbell(node: &mut Node, eqn: u16, valid: bool, arm: bool) {
        let word = EventDoorbell {
            eqn,
            read_index: 0,
            relative: true,
            valid,
            arm,
            quiet: false,
            disarm: false,
        };
        node.doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
    }

    fn raise(node: &mut Node, id: u32) {
        let (core, host) = (&mut node.engine.core, &mut node.host);
        core.async_event(EventCode::SrqLimit, id, host);
    }

    #[test]
    fn each_queue_has_its_bit_and_no_other() {
        let mut bits = PinBits::default();
        for eqn in [0, 1, 63, 64, 500, MAX_EQ - 1] {
            bits.set(eqn);
            assert!(bits.any());
            assert!((0..MAX_EQ).all(|other| bits.is_set(other) == (other == eqn)));
            bits.clear(eqn ^ 1);
            assert!(bits.any());
            bits.clear(eqn);
            assert!(!bits.any());
        }
        // The number in a doorbell may be any.
        bits.set(u16::MAX);
        bits.clear(u16::MAX);
        assert!(!bits.any());
    }

    #[test]
    fn the_pin_follows_what_is_raised_and_any_doorbell_for_it() {
        let mut node = Node::new(1);
        assert!(!node.engine.pin());
        for (valid, arm) in [(false, false), (true, false), (false, true)] {
            let read = node.events(EQ_ASYNC).len();
            node.ring_eq(EQ_ASYNC, true);
            assert!(!node.engine.pin(), "{read} were read");
            raise(&mut node, 1);
            assert!(node.engine.pin());
            // It holds until a doorbell comes, and one for another queue is none.
            doorbell(&mut node, EQ_CONTROL, true, false);
            doorbell(&mut node, EQ_FIRST_HANDLER, false, false);
            assert!(node.engine.pin());
            doorbell(&mut node, EQ_ASYNC, valid, arm);
            // Armed with an entry that was not read it is raised again at once.
            assert_eq!(node.engine.pin(), arm);
        }
    }

    #[test]
    fn an_event_of_an_unarmed_queue_leaves_the_pin_alone() {
        let mut node = Node::new(1);
        raise(&mut node, 1);
        assert!(!node.engine.pin());
    }

    #[test]
    fn who_is_destroyed_holds_the_pin_no_more() {
        let mut node = Node::new(1);
        node.ring_eq(EQ_ASYNC, true);
        raise(&mut node, 1);
        let destroy = CommandOpcode::DestroyEventQueue;
        let status = node.object_command(destroy, u32::from(EQ_ASYNC));
        assert_eq!(status, CommandStatus::Ok);
        doorbell(&mut node, EQ_CONTROL, false, false);
        assert!(!node.engine.pin());
    }

    #[test]
    fn a_device_that_failed_lets_the_pin_go_at_a_doorbell_or_a_reset() {
        let mut node = Node::new(1);
        node.engine.inject_fatal(&mut node.host);
        assert!(node.engine.pin());
        doorbell(&mut node, EQ_CONTROL, false, false);
        assert!(!node.engine.pin());
        let mut node = Node::new(1);
        node.engine.inject_fatal(&mut node.host);
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        assert!(!node.engine.pin());
    }

    #[test]
    fn what_was_raised_and_not_served_is_raised_in_another_mode() {
        let mut node = Node::new(1);
        node.ring_eq(EQ_ASYNC, true);
        raise(&mut node, 1);
        let before = node.host.raised.clone();
        node.engine.raise_again(&mut node.host);
        assert_eq!(node.host.raised, [&before[..], &before[..]].concat());
        doorbell(&mut node, EQ_ASYNC, false, false);
        node.engine.raise_again(&mut node.host);
        assert_eq!(node.host.raised.len(), 2 * before.len());
    }
}
