// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Finding the end of a completion ring by its phases.

use ferrite_abi::{first_unwritten, phase_of};
use std::cell::Cell;

/// The phases of a ring after `producer` completions.
fn ring(producer: u32, log_entries: u8) -> Vec<u8> {
    let entries = 1 << log_entries;
    let mut ring = vec![0; entries as usize];
    for back in (1..=entries).rev() {
        let index = producer.wrapping_sub(back);
        ring[(index % entries) as usize] = phase_of(index, log_entries);
    }
    ring
}

#[test]
fn the_end_is_found_wherever_it_is() {
    for log_entries in [0, 1, 3, 5] {
        let entries = 1u32 << log_entries;
        for consumer in [entries, 7 * entries + entries / 2, u32::MAX - entries / 2] {
            for waiting in 0..=entries {
                let producer = consumer.wrapping_add(waiting);
                let ring = ring(producer, log_entries);
                let end = first_unwritten(consumer, log_entries, |index| {
                    ring[(index % entries) as usize] == phase_of(index, log_entries)
                });
                assert_eq!(
                    end, producer,
                    "{entries} entries, {waiting} from {consumer}"
                );
            }
        }
    }
}

#[test]
fn few_entries_are_looked_at() {
    for (waiting, most) in [(0, 1), (1, 3), (1000, 20), (1 << 20, 40)] {
        let looks = Cell::new(0);
        let end = first_unwritten(5, 20, |index| {
            looks.set(looks.get() + 1);
            index < 5 + waiting
        });
        assert_eq!(end, 5 + waiting);
        assert!(looks.get() <= most, "{} looks for {waiting}", looks.get());
    }
}
