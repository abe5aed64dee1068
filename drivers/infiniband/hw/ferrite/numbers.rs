// SPDX-License-Identifier: GPL-2.0

//! Numbers for objects: a number that was freed rests a while before it is used again, so that
//! late packets, events and keys meet nothing rather than a stranger.

use crate::{
    kernel_ext::memory,
    shares::{
        Holder,
        Shares,
        Spare,
        Table, //
    },
};
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
    links: Table<u32>,
    head: u32,
    tail: u32,
    resting: u32,
}

impl NumberPool {
    /// The numbers from `first` to `limit - 1`.
    pub(crate) fn new(first: u32, limit: u32) -> Result<Self> {
        Self::with_reserve(first, limit, 0)
    }

    /// The same, of which all but `reserve` can be in use at once: a number always rests until as
    /// many were freed after it.
    pub(crate) fn with_reserve(first: u32, limit: u32, reserve: u32) -> Result<Self> {
        Ok(Self {
            first,
            limit,
            reserve,
            links: Table::new(limit.saturating_sub(first) as usize)?,
            head: NONE,
            tail: NONE,
            resting: 0,
        })
    }

    /// How many numbers can be in use.
    const fn usable(&self) -> u32 {
        (self.limit.saturating_sub(self.first)).saturating_sub(self.reserve)
    }

    /// How many numbers are in use, and how many can be.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        (self.links.len() as u32 - self.resting, self.usable())
    }

    /// How many numbers were given out at least once.
    pub(crate) fn begun(&self) -> usize {
        self.links.len()
    }

    /// Takes a number: `ENOSPC` when all are in use.
    pub(crate) fn take(&mut self, spare: &mut Spare) -> Result<u32> {
        let (used, usable) = self.occupancy();
        if used >= usable {
            return Err(ENOSPC);
        }
        let fresh = self
            .first
            .checked_add(self.links.len() as u32)
            .ok_or(ENOSPC)?;
        if fresh < self.limit && self.resting < REST {
            self.links.push(NONE, spare)?;
            return Ok(fresh);
        }
        let slot = self.head;
        let next = self.links.get(slot as usize).ok_or(ENOSPC)?;
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
        if !self.links.set(slot as usize, NONE) {
            return;
        }
        if !self.links.set(self.tail as usize, slot) {
            self.head = slot;
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

/// A [`NumberPool`] in which each user has a share.
pub(crate) struct NumberShares {
    pool: NumberPool,
    shares: Shares,
}

impl NumberShares {
    /// Numbers that are for users alone.
    pub(crate) fn for_users(pool: NumberPool) -> Self {
        let shares = Shares::new(pool.usable().into());
        Self { pool, shares }
    }

    /// Numbers that the kernel has some of as well.
    pub(crate) fn for_all(pool: NumberPool) -> Self {
        let shares = Shares::with_kernel(pool.usable().into());
        Self { pool, shares }
    }

    /// How many numbers are in use, and how many can be.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.pool.occupancy()
    }

    /// How many numbers were given out at least once.
    pub(crate) fn begun(&self) -> usize {
        self.pool.begun()
    }

    /// Takes a number: `EDQUOT` beyond the share of a user, where he is `bound` by it, `ENOSPC` where all are in
    /// use.
    pub(crate) fn take(&mut self, holder: Holder, bound: bool, spare: &mut Spare) -> Result<u32> {
        self.shares.take(holder, 1, bound, spare)?;
        self.pool
            .take(spare)
            .inspect_err(|_| self.shares.give_back(holder, 1))
    }

    /// Gives a number back, which the same one must have taken.
    pub(crate) fn give_back(&mut self, holder: Holder, number: u32) {
        self.pool.give_back(number);
        self.shares.give_back(holder, 1);
    }
}

/// [`NumberShares`] that are shared by those who took numbers from them.
#[pin_data]
pub(crate) struct Numbers {
    #[pin]
    shares: Mutex<NumberShares>,
}

impl Numbers {
    /// The numbers of a range, of which users leave some for the kernel.
    pub(crate) fn new(range: Range<u32>) -> Result<Arc<Self>> {
        Self::of(NumberShares::for_all(NumberPool::new(
            range.start,
            range.end,
        )?))
    }

    /// The same, for users alone.
    pub(crate) fn for_users(range: Range<u32>) -> Result<Arc<Self>> {
        Self::of(NumberShares::for_users(NumberPool::new(
            range.start,
            range.end,
        )?))
    }

    /// As [`Numbers::new`], of which some are never in use: however many there are, a number that was
    /// freed rests until [`REST`] others were freed after it (an eighth of all, where there are few).
    pub(crate) fn with_reserve(range: Range<u32>) -> Result<Arc<Self>> {
        let reserve = REST.min(range.len() as u32 / 8);
        let pool = NumberPool::with_reserve(range.start, range.end, reserve)?;
        Self::of(NumberShares::for_all(pool))
    }

    fn of(shares: NumberShares) -> Result<Arc<Self>> {
        let numbers = pin_init!(Self {
            shares <- new_mutex!(shares, "ferrite_numbers"),
        });
        let numbers = Arc::pin_init(numbers, GFP_KERNEL)?;
        // Objects of kernel users that disks hang on give their numbers back.
        memory::taken_in_reclaim(|| drop(numbers.shares.lock()));
        Ok(numbers)
    }

    /// How many numbers are in use, and how many can be. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.shares.lock().occupancy()
    }

    /// Takes a number until the result is dropped: `EDQUOT` beyond a user's share, `ENOSPC` when all are in
    /// use. Sleeps.
    pub(crate) fn take(self: &Arc<Self>, holder: Holder) -> Result<Number> {
        let value = holder.take_from(&self.shares, |shares, bound, spare| {
            shares.take(holder, bound, spare)
        })?;
        Ok(Number {
            value,
            holder,
            numbers: self.clone(),
        })
    }
}

/// A number that is in use; given back when dropped, which sleeps.
pub(crate) struct Number {
    value: u32,
    holder: Holder,
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
        let mut shares = self.numbers.shares.lock();
        shares.give_back(self.holder, self.value);
    }
}

#[kunit_tests(ferrite_numbers)]
mod tests {
    use super::*;
    use crate::kernel_ext::errno;

    fn take(pool: &mut NumberPool) -> Result<u32> {
        Spare::provide(|spare| pool.take(spare))
    }

    fn take_share(shares: &mut NumberShares, holder: Holder, bound: bool) -> Result<u32> {
        Spare::provide(|spare| shares.take(holder, bound, spare))
    }

    #[test]
    fn all_numbers_of_the_range_and_no_other_are_given_out() -> Result {
        let mut pool = NumberPool::new(2, 6)?;
        for expected in 2..6 {
            assert_eq!(take(&mut pool)?, expected);
        }
        assert_eq!(take(&mut pool), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn a_freed_number_comes_back_in_the_order_of_freeing() -> Result {
        let mut pool = NumberPool::new(1, 4)?;
        for _ in 0..3 {
            take(&mut pool)?;
        }
        pool.give_back(3);
        pool.give_back(1);
        assert_eq!(pool.occupancy(), (1, 3));
        assert_eq!(take(&mut pool)?, 3);
        assert_eq!(take(&mut pool)?, 1);
        assert_eq!(take(&mut pool), Err(ENOSPC));
        assert_eq!(pool.occupancy(), (3, 3));
        pool.give_back(2);
        assert_eq!(take(&mut pool)?, 2);
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
        let mut pool = NumberPool::new(1, 10_000)?;
        for _ in 0..REST {
            let number = take(&mut pool)?;
            pool.give_back(number);
        }
        assert_eq!(take(&mut pool)?, 1);
        Ok(())
    }

    #[test]
    fn with_a_reserve_a_number_rests_even_when_there_are_no_others() -> Result {
        let mut pool = NumberPool::with_reserve(10, 20, 4)?;
        for _ in 0..6 {
            take(&mut pool)?;
        }
        assert_eq!(take(&mut pool), Err(ENOSPC));
        assert_eq!(pool.occupancy(), (6, 6));
        // One at a time is freed and taken: it comes back after four others.
        pool.give_back(10);
        for _ in 0..4 {
            let other = take(&mut pool)?;
            assert!(other != 10);
            pool.give_back(other);
        }
        assert_eq!(take(&mut pool)?, 10);
        Ok(())
    }

    /// Takes all numbers that a user gets.
    fn take_all(shares: &mut NumberShares, user: u64, bound: bool) -> u32 {
        let mut numbers = 0;
        while take_share(shares, Holder::user(user), bound).is_ok() {
            numbers += 1;
        }
        numbers
    }

    #[test]
    fn no_user_leaves_nothing_for_others() -> Result {
        let mut shares = NumberShares::for_users(NumberPool::new(0, 1023)?);
        let mut left = 1023;
        for user in 0..4 {
            let taken = take_all(&mut shares, user, true);
            assert_eq!(taken, left - left / 4);
            assert!(taken < left);
            left -= taken;
        }
        // The administrator gets the rest.
        assert_eq!(take_all(&mut shares, 0, false), left);
        assert_eq!(take_share(&mut shares, Holder::user(7), false), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn users_together_leave_some_for_the_kernel() -> Result {
        let mut shares = NumberShares::for_all(NumberPool::with_reserve(16, 16 + 1024, 64)?);
        let taken: u32 = (0..20).map(|user| take_all(&mut shares, user, true)).sum();
        assert_eq!((taken, shares.occupancy()), (900, (900, 960)));
        for _ in 0..60 {
            take_share(&mut shares, Holder::KERNEL, false)?;
        }
        assert_eq!(take_share(&mut shares, Holder::KERNEL, false), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn beyond_the_share_it_is_the_quota_that_is_said_to_be_exceeded() -> Result {
        let mut shares = NumberShares::for_users(NumberPool::new(0, 8)?);
        assert_eq!(take_all(&mut shares, 5, true), 6);
        assert_eq!(
            take_share(&mut shares, Holder::user(5), true),
            Err(errno::edquot())
        );
        take_share(&mut shares, Holder::user(6), true)?;
        Ok(())
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() -> Result {
        let mut shares = NumberShares::for_users(NumberPool::new(0, 8)?);
        let user = Holder::user(5);
        for _ in 0..100 {
            let number = take_share(&mut shares, user, true)?;
            shares.give_back(user, number);
        }
        let mut numbers = KVec::new();
        while let Ok(number) = take_share(&mut shares, user, true) {
            numbers.push(number, GFP_KERNEL)?;
        }
        assert_eq!(numbers.len(), 6);
        assert_eq!(shares.occupancy(), (6, 8));
        for number in numbers {
            shares.give_back(user, number);
        }
        assert_eq!(take_all(&mut shares, 6, true), 6);
        Ok(())
    }

    #[test]
    fn a_single_number_is_for_anybody() -> Result {
        for (user, other) in [(5, 6), (6, 5)] {
            let mut shares = NumberShares::for_all(NumberPool::new(1, 2)?);
            assert_eq!(take_all(&mut shares, user, true), 1);
            assert_eq!(
                take_share(&mut shares, Holder::user(other), true),
                Err(ENOSPC)
            );
        }
        Ok(())
    }

    #[test]
    fn a_number_is_given_back_to_whom_it_was_taken_for() -> Result {
        let numbers = Numbers::new(0..32)?;
        let kernels = numbers.take(Holder::KERNEL)?;
        let own = numbers.take(Holder::user(5))?;
        assert_eq!(numbers.occupancy(), (2, 32));
        drop(kernels);
        drop(own);
        assert_eq!(numbers.occupancy(), (0, 32));
        let take =
            || Spare::provide(|spare| numbers.shares.lock().take(Holder::user(5), true, spare));
        assert_eq!((0..32).filter(|_| take().is_ok()).count(), 23);
        Ok(())
    }
}
