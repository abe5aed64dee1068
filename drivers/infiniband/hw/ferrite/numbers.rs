// SPDX-License-Identifier: GPL-2.0

//! Numbers for objects: a number that was freed rests a while before it is used again, so that
//! late packets, events and keys meet nothing rather than a stranger.

use core::ops::Range;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// End of the list of freed numbers.
const NONE: u32 = u32::MAX;
/// How many numbers are freed after one before it is used again, as long as there are others.
const REST: u32 = 256;

/// A range of numbers to take from and give back to.
///
/// Freed numbers form a queue that is linked through `links`, so that giving one back needs no
/// memory and cannot fail.
pub(crate) struct NumberPool {
    first: u32,
    limit: u32,
    /// Freed numbers that are never used again before others were freed after them.
    reserve: u32,
    links: KVVec<u32>,
    head: u32,
    tail: u32,
    resting: u32,
}

impl NumberPool {
    /// The numbers from `first` to `limit - 1`.
    pub(crate) const fn new(first: u32, limit: u32) -> Self {
        Self::with_reserve(first, limit, 0)
    }

    /// The same, of which all but `reserve` can be in use at once: a number always rests until as
    /// many were freed after it.
    pub(crate) const fn with_reserve(first: u32, limit: u32, reserve: u32) -> Self {
        Self {
            first,
            limit,
            reserve,
            links: KVVec::new(),
            head: NONE,
            tail: NONE,
            resting: 0,
        }
    }

    /// How many numbers are in use, and how many can be.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        (
            self.links.len() as u32 - self.resting,
            (self.limit.saturating_sub(self.first)).saturating_sub(self.reserve),
        )
    }

    /// Takes a number: `ENOSPC` when all are in use.
    pub(crate) fn take(&mut self) -> Result<u32> {
        let (used, usable) = self.occupancy();
        if used >= usable {
            return Err(ENOSPC);
        }
        let fresh = self
            .first
            .checked_add(self.links.len() as u32)
            .ok_or(ENOSPC)?;
        if fresh < self.limit && self.resting < REST {
            self.links.push(NONE, GFP_KERNEL)?;
            return Ok(fresh);
        }
        let slot = self.head;
        let next = *self.links.get(slot as usize).ok_or(ENOSPC)?;
        self.head = next;
        if next == NONE {
            self.tail = NONE;
        }
        self.resting -= 1;
        Ok(self.first + slot)
    }

    /// Gives `number` back; it must have been taken.
    pub(crate) fn give_back(&mut self, number: u32) {
        let slot = number.wrapping_sub(self.first);
        let Some(link) = self.links.get_mut(slot as usize) else {
            return;
        };
        *link = NONE;
        match self.links.get_mut(self.tail as usize) {
            Some(last) => *last = slot,
            None => self.head = slot,
        }
        self.tail = slot;
        self.resting += 1;
    }
}

/// The numbers below a limit in an order that only who knows the keys can tell: a Feistel network
/// over the next power of four, walked until it is back in the range.
pub(crate) struct Shuffle {
    limit: u32,
    half_bits: u32,
    keys: [u32; 4],
}

impl Shuffle {
    /// The numbers below `limit`, which is at most 2^24, in the order that `keys` give.
    pub(crate) const fn new(limit: u32, keys: [u32; 4]) -> Self {
        let bits = u32::BITS - limit.saturating_sub(1).leading_zeros();
        Self {
            limit,
            half_bits: bits.div_ceil(2),
            keys,
        }
    }

    /// Mixes one half of a number with a key.
    fn mix(&self, half: u32, key: u32) -> u32 {
        let mut mixed = (half ^ key).wrapping_mul(0x9e37_79b1);
        mixed ^= mixed >> 15;
        mixed = mixed.wrapping_mul(0x85eb_ca77) ^ key;
        mixed ^= mixed >> 13;
        mixed & ((1 << self.half_bits) - 1)
    }

    /// Once through the network: for each number another one of as many bits.
    fn forth(&self, number: u32) -> u32 {
        let (mut left, mut right) = self.split(number);
        for key in self.keys {
            (left, right) = (right, left ^ self.mix(right, key));
        }
        (left << self.half_bits) | right
    }

    /// Once through the network the other way.
    fn back(&self, number: u32) -> u32 {
        let (mut left, mut right) = self.split(number);
        for key in self.keys.into_iter().rev() {
            (left, right) = (right ^ self.mix(left, key), left);
        }
        (left << self.half_bits) | right
    }

    fn split(&self, number: u32) -> (u32, u32) {
        (
            number >> self.half_bits,
            number & ((1 << self.half_bits) - 1),
        )
    }

    /// The number at `place`, which is below the limit. Each number is at one place.
    pub(crate) fn get(&self, place: u32) -> u32 {
        let mut number = self.forth(place);
        // Ends, as `place` itself comes round in the end; after four times on average at most.
        while number >= self.limit {
            number = self.forth(number);
        }
        number
    }

    /// The place of `number`, which is below the limit.
    pub(crate) fn place_of(&self, number: u32) -> u32 {
        let mut place = self.back(number);
        while place >= self.limit {
            place = self.back(place);
        }
        place
    }
}

/// A [`NumberPool`] that is shared by those who took numbers from it.
#[pin_data]
pub(crate) struct Numbers {
    #[pin]
    pool: Mutex<NumberPool>,
}

impl Numbers {
    /// The numbers of a range.
    pub(crate) fn new(range: Range<u32>) -> Result<Arc<Self>> {
        let numbers = pin_init!(Self {
            pool <- new_mutex!(NumberPool::new(range.start, range.end), "ferrite_numbers"),
        });
        Arc::pin_init(numbers, GFP_KERNEL)
    }

    /// As [`Numbers::new`], of which some are never in use: however many there are, a number that was
    /// freed rests until [`REST`] others were freed after it (an eighth of all, where there are few).
    pub(crate) fn with_reserve(range: Range<u32>) -> Result<Arc<Self>> {
        let reserve = REST.min(range.len() as u32 / 8);
        let numbers = pin_init!(Self {
            pool <- new_mutex!(
                NumberPool::with_reserve(range.start, range.end, reserve),
                "ferrite_numbers"
            ),
        });
        Arc::pin_init(numbers, GFP_KERNEL)
    }

    /// How many numbers are in use, and how many can be. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.pool.lock().occupancy()
    }

    /// Takes a number until the result is dropped: `ENOSPC` when all are in use. Sleeps.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Number> {
        let value = self.pool.lock().take()?;
        Ok(Number {
            value,
            numbers: self.clone(),
        })
    }
}

/// A number that is in use; given back when dropped, which sleeps.
pub(crate) struct Number {
    value: u32,
    numbers: Arc<Numbers>,
}

impl Number {
    /// The number.
    pub(crate) fn get(&self) -> u32 {
        self.value
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        self.numbers.pool.lock().give_back(self.value);
    }
}

#[kunit_tests(ferrite_numbers)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_of_the_range_and_no_other_are_given_out() -> Result {
        let mut pool = NumberPool::new(2, 6);
        for expected in 2..6 {
            assert_eq!(pool.take()?, expected);
        }
        assert_eq!(pool.take(), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn a_freed_number_comes_back_in_the_order_of_freeing() -> Result {
        let mut pool = NumberPool::new(1, 4);
        for _ in 0..3 {
            pool.take()?;
        }
        pool.give_back(3);
        pool.give_back(1);
        assert_eq!(pool.occupancy(), (1, 3));
        assert_eq!(pool.take()?, 3);
        assert_eq!(pool.take()?, 1);
        assert_eq!(pool.take(), Err(ENOSPC));
        assert_eq!(pool.occupancy(), (3, 3));
        pool.give_back(2);
        assert_eq!(pool.take()?, 2);
        Ok(())
    }

    #[test]
    fn a_shuffle_has_each_number_once_in_an_order_of_its_keys() -> Result {
        for limit in [1u32, 2, 3, 16, 17, 1000] {
            let mut seen = KVVec::from_elem(false, limit as usize, GFP_KERNEL)?;
            let shuffle = Shuffle::new(limit, [1, 2, 3, 4]);
            for place in 0..limit {
                let number = shuffle.get(place);
                assert_eq!(shuffle.place_of(number), place);
                assert!(!core::mem::replace(&mut seen[number as usize], true));
            }
        }
        // Neither in sequence nor the same twice.
        let (one, other) = (
            Shuffle::new(1 << 20, [1, 2, 3, 4]),
            Shuffle::new(1 << 20, [1, 2, 3, 5]),
        );
        let next = (0..1000).filter(|&n| one.get(n + 1).abs_diff(one.get(n)) < 16);
        assert!(next.count() < 10);
        let same = (0..1000).filter(|&n| one.get(n) == other.get(n));
        assert!(same.count() < 10);
        Ok(())
    }

    #[test]
    fn a_freed_number_rests_while_there_are_fresh_ones() -> Result {
        let mut pool = NumberPool::new(1, 10_000);
        for _ in 0..REST {
            let number = pool.take()?;
            pool.give_back(number);
        }
        assert_eq!(pool.take()?, 1);
        Ok(())
    }

    #[test]
    fn with_a_reserve_a_number_rests_even_when_there_are_no_others() -> Result {
        let mut pool = NumberPool::with_reserve(10, 20, 4);
        for _ in 0..6 {
            pool.take()?;
        }
        assert_eq!(pool.take(), Err(ENOSPC));
        assert_eq!(pool.occupancy(), (6, 6));
        // One at a time is freed and taken: it comes back after four others.
        pool.give_back(10);
        for _ in 0..4 {
            let other = pool.take()?;
            assert!(other != 10);
            pool.give_back(other);
        }
        assert_eq!(pool.take()?, 10);
        Ok(())
    }
}
