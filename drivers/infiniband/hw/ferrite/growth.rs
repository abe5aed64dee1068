// SPDX-License-Identifier: GPL-2.0

//! How many entries event queues have, and larger rings for those that are out of room.
//!
//! Queues are made for what the device can raise, within bounds: sixteen thousand queue pairs that
//! fail at once are rare, and memory for them in one piece is dear. Where there is no room after all,
//! the device keeps events back and says so on event queue 0, which itself always has room for the
//! answers to all commands. The queue is then given a ring of
//! twice as many entries, from a work item, while its consumer goes on reading. Where there is no
//! memory, or the device refuses, the queue stays as it is, and works: what is kept back comes as
//! room is made. The device does not say so again until nothing is kept back, so that it is tried again
//! with each look whether the device works.

use crate::{
    abi,
    abi::DeviceCaps,
    eq::{
        EventQueue,
        Ring, //
    },
    hardware::Hardware,
};
use kernel::{
    alloc::flags::__GFP_NOWARN,
    device::{
        Bound,
        Device, //
    },
    prelude::*,
    sync::Arc, //
};

/// Base-2 logarithm of the most entries that a queue is given: 2 MiB in one piece.
const MOST_LOG_ENTRIES: u8 = 16;
const _: () = assert!(MOST_LOG_ENTRIES <= abi::EQ_MAX_LOG_ENTRIES);

/// Base-2 logarithm of the entries that a queue begins with, which should have `wanted` of them: what
/// the module's `eq_log_entries` says, within that.
pub(crate) fn first_log_entries(wanted: u8) -> u8 {
    chosen(wanted, *crate::module_parameters::eq_log_entries.value())
}

fn chosen(wanted: u8, parameter: u8) -> u8 {
    match parameter {
        0 => wanted,
        parameter => parameter.max(abi::EQ_MIN_LOG_ENTRIES).min(wanted),
    }
}

/// Base-2 logarithm of the most entries that queues may be given, of a device with which `features`
/// were agreed on; zero where they cannot be given more.
pub(crate) fn most_log_entries(features: u64, caps: &DeviceCaps) -> u8 {
    if features & abi::FEATURE_SWITCH_EQ == 0 {
        return 0;
    }
    caps.eq_max_log_entries.min(MOST_LOG_ENTRIES)
}

/// The next size of a queue, if there is one within `most`.
fn larger(log_entries: u8, most: u8) -> Option<u8> {
    (log_entries < most).then(|| log_entries + 1)
}

/// Gives each queue more room that has run out of it. Sleeps.
pub(crate) fn grow(hw: &Arc<Hardware>, dev: &Device<Bound>) {
    let mut next = hw.event_queues.next_index(0);
    while let Some(index) = next {
        if let Some(queue) = hw.event_queues.get(index) {
            if queue.was_out_of_room() {
                if let Err(error) = grow_queue(hw, dev, &queue) {
                    dev_dbg!(dev, "event queue {}: {:?}\n", queue.number(), error);
                    queue.want_room();
                }
            }
        }
        next = hw.event_queues.next_index(index + 1);
    }
}

/// Whether there are queues that were not given the room that they want.
pub(crate) fn is_due(hw: &Hardware) -> bool {
    let mut next = hw.event_queues.next_index(0);
    while let Some(index) = next {
        if hw.event_queues.with(index, |queue| queue.wants_room()) == Some(true) {
            return true;
        }
        next = hw.event_queues.next_index(index + 1);
    }
    false
}

fn grow_queue(hw: &Arc<Hardware>, dev: &Device<Bound>, queue: &EventQueue) -> Result {
    let Some(log_entries) = larger(queue.log_entries(), queue.most_log_entries()) else {
        // It has what there is to have.
        return Ok(());
    };
    let ring = Ring::new(dev, &hw.reach, log_entries, GFP_KERNEL | __GFP_NOWARN)?;
    let command = queue.offer(ring)?;
    let result = hw.execute(&command);
    let settled = queue.settle(result.is_ok(), &hw.doorbells, |event| {
        hw.dispatch(event, &hw.answers(), queue.number());
    });
    if settled.is_err() && !hw.is_dead() {
        dev_err!(
            dev,
            "event queue {}: the device is not in the ring that it says\n",
            queue.number()
        );
        hw.fail();
    }
    result
}

#[kunit_tests(ferrite_growth)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    #[test]
    fn queues_double_up_to_what_both_sides_can_do() {
        let caps = |eq_max_log_entries| DeviceCaps {
            eq_max_log_entries,
            ..DeviceCaps::zeroed()
        };
        let all = u64::MAX;
        assert_eq!(most_log_entries(all, &caps(10)), 10);
        assert_eq!(most_log_entries(all, &caps(20)), MOST_LOG_ENTRIES);
        assert_eq!(most_log_entries(!abi::FEATURE_SWITCH_EQ, &caps(20)), 0);
        let mut log_entries = 4;
        let mut sizes = 1;
        while let Some(next) = larger(log_entries, 10) {
            assert_eq!(next, log_entries + 1);
            log_entries = next;
            sizes += 1;
        }
        assert_eq!((log_entries, sizes), (10, 7));
        assert_eq!(larger(8, 0), None);
    }

    #[test]
    fn queues_begin_as_small_as_the_parameter_says() {
        assert_eq!(chosen(12, 0), 12);
        assert_eq!(chosen(12, 4), 4);
        assert_eq!(chosen(12, 1), abi::EQ_MIN_LOG_ENTRIES);
        // Not larger than what the device can raise, or has room for.
        assert_eq!(chosen(12, 20), 12);
        assert_eq!(chosen(12, u8::MAX), 12);
    }
}
