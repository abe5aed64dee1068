// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Are atomics linearizable? Each must have taken effect at one moment between the time it was
//! posted and the time it was complete, and those of one queue pair in their order.
//!
//! Of one that failed nobody knows: it may have taken effect, once, at any time since, or not.

use std::collections::HashSet;

/// What an atomic does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Adds.
    FetchAdd(u64),
    /// Stores the second if the word is the first.
    CompareSwap(u64, u64),
}

impl Atomic {
    fn apply(self, value: u64) -> u64 {
        match self {
            Self::FetchAdd(operand) => value.wrapping_add(operand),
            Self::CompareSwap(compare, operand) if value == compare => operand,
            Self::CompareSwap(..) => value,
        }
    }
}

/// An atomic that was posted.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// What it does.
    pub atomic: Atomic,
    /// When it was posted.
    pub posted: u64,
    /// When it was complete, and what it found; none where that is not known.
    pub done: Option<(u64, u64)>,
    /// The one before it of its queue pair.
    pub after: Option<usize>,
}

/// The most operations on one word.
pub const MOST: usize = 128;

/// Whether the operations on a word can have taken place in some order that explains what they
/// found, and what is there in the end.
pub fn is_linearizable(operations: &[Operation], first: u64, last: u64) -> bool {
    assert!(operations.len() <= MOST);
    let mut tried = HashSet::new();
    search(operations, 0, first, last, &mut tried)
}

/// `applied` has a bit for each that has taken effect; the rest has to find an order.
fn search(
    operations: &[Operation],
    applied: u128,
    value: u64,
    last: u64,
    tried: &mut HashSet<(u128, u64)>,
) -> bool {
    let is_applied = |index: usize| (applied >> index) & 1 != 0;
    let open = || (0..operations.len()).filter(|&index| !is_applied(index));
    if value == last && open().all(|index| operations[index].done.is_none()) {
        return true;
    }
    if !tried.insert((applied, value)) {
        return false;
    }
    // Nothing takes effect that was posted when another was complete that has not.
    let first_end = open()
        .filter_map(|index| operations[index].done)
        .map(|(at, _)| at)
        .min()
        .unwrap_or(u64::MAX);
    let may_be_next = |index: usize| {
        let operation = &operations[index];
        operation.posted <= first_end
            && operation
                .after
                .is_none_or(|before| is_applied(before) || operations[before].done.is_none())
            && operation.done.is_none_or(|(_, found)| found == value)
    };
    // Those of which more is known first.
    let known = open().filter(|&index| operations[index].done.is_some());
    let unknown = open().filter(|&index| operations[index].done.is_none());
    known
        .chain(unknown)
        .filter(|&index| may_be_next(index))
        .any(|index| {
            let next = operations[index].atomic.apply(value);
            search(operations, applied | (1 << index), next, last, tried)
        })
}

#[cfg(test)]
mod tests {
    use super::Atomic::{CompareSwap, FetchAdd};
    use super::*;

    fn done(atomic: Atomic, posted: u64, at: u64, found: u64) -> Operation {
        Operation {
            atomic,
            posted,
            done: Some((at, found)),
            after: None,
        }
    }

    fn unknown(atomic: Atomic, posted: u64) -> Operation {
        Operation {
            atomic,
            posted,
            done: None,
            after: None,
        }
    }

    #[test]
    fn each_counts_once() {
        let twice = [done(FetchAdd(1), 0, 9, 5), done(FetchAdd(1), 0, 9, 6)];
        assert!(is_linearizable(&twice, 5, 7));
        assert!(!is_linearizable(&twice, 5, 8));
        assert!(!is_linearizable(&twice, 5, 6));
        // Both found the same.
        let same = [done(FetchAdd(1), 0, 9, 5), done(FetchAdd(1), 0, 9, 5)];
        assert!(!is_linearizable(&same, 5, 6));
        assert!(!is_linearizable(&same, 5, 7));
    }

    #[test]
    fn what_is_complete_comes_before_what_is_posted_later() {
        let backwards = [done(FetchAdd(1), 10, 11, 5), done(FetchAdd(1), 0, 9, 6)];
        assert!(!is_linearizable(&backwards, 5, 7));
        let overlapping = [done(FetchAdd(1), 8, 11, 5), done(FetchAdd(1), 0, 9, 6)];
        assert!(is_linearizable(&overlapping, 5, 7));
    }

    #[test]
    fn those_of_one_queue_pair_keep_their_order() {
        let mut both = [done(FetchAdd(1), 0, 9, 6), done(FetchAdd(1), 0, 9, 5)];
        assert!(is_linearizable(&both, 5, 7));
        both[1].after = Some(0);
        assert!(!is_linearizable(&both, 5, 7));
    }

    #[test]
    fn one_that_failed_may_have_been_done_once() {
        let failed = [unknown(FetchAdd(4), 3), done(FetchAdd(1), 0, 9, 5)];
        assert!(is_linearizable(&failed, 5, 6));
        assert!(is_linearizable(&failed, 5, 10));
        assert!(!is_linearizable(&failed, 5, 14));
        // Not before it was posted.
        let early = [unknown(FetchAdd(4), 10), done(FetchAdd(1), 0, 9, 9)];
        assert!(!is_linearizable(&early, 5, 10));
    }

    #[test]
    fn a_swap_takes_place_only_where_it_compares() {
        let swaps = [
            done(CompareSwap(5, 8), 0, 9, 5),
            done(CompareSwap(5, 9), 0, 9, 8),
        ];
        assert!(is_linearizable(&swaps, 5, 8));
        assert!(!is_linearizable(&swaps, 5, 9));
    }
}
