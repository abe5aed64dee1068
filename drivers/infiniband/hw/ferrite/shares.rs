// SPDX-License-Identifier: GPL-2.0

//! Shares in what there is only so much of, by user: none may have so much that nothing is left for
//! others, nor may all of them together leave nothing for the kernel.

use crate::kernel_ext::{
    errno,
    user, //
};
use core::{
    marker::PhantomData,
    mem::size_of,
    ops::Range, //
};
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::Mutex, //
};

/// Which part of what the kernel needs too is not for users, even if it does not use that now.
const KERNELS_PART: u64 = 16;

/// Who has something: a user, or the kernel, for its own consumers, whom no share binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder(u64);

impl Holder {
    /// The kernel.
    pub(crate) const KERNEL: Self = Self(user::KERNEL);

    /// The user with a number ([`user::accountable`]).
    pub(crate) const fn user(number: u64) -> Self {
        Self(number)
    }

    /// Who answers for the current process.
    pub(crate) fn current() -> Self {
        Self::user(user::accountable())
    }

    /// Whose an object is that is made for a process, which is the current one, or else for the kernel: whoever
    /// the current process is, as that happens in system calls too.
    pub(crate) fn of(is_user: bool) -> Self {
        if is_user {
            Self::current()
        } else {
            Self::KERNEL
        }
    }

    /// Calls `take` for what this one is to have, with whether a share binds. Who may exceed limits is bound by none;
    /// it is found out only where it matters, as being asked for a capability leaves traces.
    pub(crate) fn take<T>(self, mut take: impl FnMut(bool) -> Result<T>) -> Result<T> {
        if self == Self::KERNEL {
            return take(false);
        }
        match take(true) {
            Err(error) if error == errno::edquot() && user::may_exceed_limits() => take(false),
            taken => taken,
        }
    }

    /// Calls `take` as [`Holder::take`] does, for something of `pool`, in which no memory is allocated while it
    /// is locked. Sleeps.
    pub(crate) fn take_from<P: Unpin, T>(
        self,
        pool: &Mutex<P>,
        mut take: impl FnMut(&mut P, bool, &mut Spare) -> Result<T>,
    ) -> Result<T> {
        Spare::provide(|spare| {
            let mut pool = pool.lock();
            self.take(|bound| take(&mut pool, bound, spare))
        })
    }
}

/// Memory for what all users take from under one lock. It is allocated without the lock: whoever is out of
/// memory, in a control group of his own too, is the only one to wait until some was reclaimed; and what
/// reclaim waits for, as a disk that is connected anew, may give something back meanwhile.
#[derive(Default)]
pub(crate) struct Spare {
    node: Option<RBTreeNodeReservation<u64, u64>>,
    chunk: Option<Chunk>,
    lacking: Option<Lacking>,
}

/// What was not there: memory for another user, or for more of a [`Table`].
enum Lacking {
    Node,
    Chunk,
}

impl Spare {
    /// Calls `attempt` until it lacks no memory. What it did not need is freed afterwards. Who takes pays for
    /// all of it: many of his threads may find the same table full at once.
    pub(crate) fn provide<T>(mut attempt: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        let mut spare = Self::default();
        loop {
            let result = attempt(&mut spare);
            match spare.lacking.take() {
                None => return result,
                Some(Lacking::Node) => {
                    spare.node = Some(RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?);
                }
                Some(Lacking::Chunk) => {
                    spare.chunk = Some(KBox::init(pin_init::init_zeroed(), GFP_KERNEL_ACCOUNT)?);
                }
            }
        }
    }

    fn node(&mut self) -> Result<RBTreeNodeReservation<u64, u64>> {
        self.node.take().ok_or_else(|| self.lack(Lacking::Node))
    }

    fn chunk(&mut self) -> Result<Chunk> {
        self.chunk.take().ok_or_else(|| self.lack(Lacking::Chunk))
    }

    fn lack(&mut self, what: Lacking) -> Error {
        self.lacking = Some(what);
        ENOMEM
    }
}

/// How many bytes a [`Table`] grows by.
const CHUNK: usize = 4096;

type Chunk = KBox<[u8; CHUNK]>;

/// What a [`Table`] is of.
pub(crate) trait Element: Copy {
    /// What is in these bytes, of which there are as many as it has.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;

    /// Puts it there.
    fn to_bytes(self, bytes: &mut [u8]);
}

impl Element for u8 {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.first().copied()
    }

    fn to_bytes(self, bytes: &mut [u8]) {
        bytes.fill(self);
    }
}

impl Element for u32 {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.first_chunk().copied().map(Self::from_ne_bytes)
    }

    fn to_bytes(self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.to_ne_bytes());
    }
}

/// A table that all users share and that has as many elements as were in use at once. It is the device's, and stays
/// until that goes; so it grows by a little at a time ([`CHUNK`]), which is what is charged at most to who needs one
/// element more than there was room for, whatever others have. Nothing is moved for that, while others wait.
pub(crate) struct Table<T> {
    /// With room for all that there can be.
    chunks: KVVec<Chunk>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Table<T> {
    const PER_CHUNK: usize = CHUNK / size_of::<T>();

    /// One that is empty, and never has more than `limit` elements.
    pub(crate) fn new(limit: usize) -> Result<Self> {
        Ok(Self {
            chunks: KVVec::with_capacity(limit.div_ceil(Self::PER_CHUNK), GFP_KERNEL)?,
            len: 0,
            elements: PhantomData,
        })
    }

    /// How many elements it has.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends an element; fails where there is no room, until the next attempt.
    pub(crate) fn push(&mut self, value: T, spare: &mut Spare) -> Result {
        if self.len == self.chunks.len() * Self::PER_CHUNK {
            if self.chunks.len() == self.chunks.capacity() {
                return Err(ENOSPC);
            }
            let full = self.chunks.push_within_capacity(spare.chunk()?);
            full.map_err(|_| ENOSPC)?;
        }
        self.len += 1;
        self.set(self.len - 1, value);
        Ok(())
    }

    /// The element at `index`, if there is one.
    pub(crate) fn get(&self, index: usize) -> Option<T> {
        let chunk = self.chunks.get(index / Self::PER_CHUNK)?;
        T::from_bytes(chunk.get(self.place(index)?)?)
    }

    /// Changes the element at `index`; gives whether there is one.
    pub(crate) fn set(&mut self, index: usize, value: T) -> bool {
        let place = self.place(index);
        let chunk = self.chunks.get_mut(index / Self::PER_CHUNK);
        let bytes = chunk
            .zip(place)
            .and_then(|(chunk, place)| chunk.get_mut(place));
        bytes.map(|bytes| value.to_bytes(bytes)).is_some()
    }

    /// Where the element at `index` is in its chunk, if there is one.
    fn place(&self, index: usize) -> Option<Range<usize>> {
        let start = index % Self::PER_CHUNK * size_of::<T>();
        (index < self.len).then_some(start..start + size_of::<T>())
    }
}

/// Whether a user with `own` of something may have `more` of it, where others have `others` of
/// `total`: up to three quarters of what others have not taken.
fn within_share(own: u64, more: u64, others: u64, total: u64) -> bool {
    let left = total.saturating_sub(others);
    own.saturating_add(more) <= left - left / 4
}

/// How much of something each user has.
pub(crate) struct Shares {
    total: u64,
    /// How much the kernel has if it has less.
    reserve: u64,
    used: u64,
    holders: RBTree<u64, u64>,
}

impl Shares {
    /// Of what is for users alone.
    pub(crate) fn new(total: u64) -> Self {
        Self {
            total,
            reserve: 0,
            used: 0,
            holders: RBTree::new(),
        }
    }

    /// Of what the kernel has some of as well.
    pub(crate) fn with_kernel(total: u64) -> Self {
        Self {
            reserve: total / KERNELS_PART,
            ..Self::new(total)
        }
    }

    fn of(&self, holder: Holder) -> u64 {
        self.holders.get(&holder.0).copied().unwrap_or(0)
    }

    /// Takes some: `ENOSPC` where there is not so much left, `EDQUOT` beyond a user's share, where he is `bound`
    /// by it.
    pub(crate) fn take(
        &mut self,
        holder: Holder,
        more: u64,
        bound: bool,
        spare: &mut Spare,
    ) -> Result {
        if more > self.total - self.used {
            return Err(ENOSPC);
        }
        let own = self.of(holder);
        let kept = self.reserve.saturating_sub(self.of(Holder::KERNEL));
        if bound && !within_share(own, more, self.used - own + kept, self.total) {
            return Err(errno::edquot());
        }
        match self.holders.get_mut(&holder.0) {
            Some(own) => *own += more,
            None => {
                self.holders.insert(spare.node()?.into_node(holder.0, more));
            }
        }
        self.used += more;
        Ok(())
    }

    /// Gives back what was taken.
    pub(crate) fn give_back(&mut self, holder: Holder, less: u64) {
        self.used -= less;
        if let Some(own) = self.holders.get_mut(&holder.0) {
            *own -= less;
            if *own == 0 {
                self.holders.remove(&holder.0);
            }
        }
    }
}

#[kunit_tests(ferrite_shares)]
mod tests {
    use super::*;

    fn take(shares: &mut Shares, holder: Holder, more: u64, bound: bool) -> Result {
        Spare::provide(|spare| shares.take(holder, more, bound, spare))
    }

    #[test]
    fn memory_is_allocated_between_attempts_alone() -> Result {
        let mut shares = Shares::new(256);
        let mut attempts = 0;
        for expected in [2, 3] {
            Spare::provide(|spare| {
                attempts += 1;
                shares.take(Holder::user(1), 1, true, spare)
            })?;
            assert_eq!(attempts, expected);
        }
        Ok(())
    }

    /// Fills a table; looks at what that takes and moves.
    fn fill<T: Element + PartialEq + core::fmt::Debug>(of: impl Fn(usize) -> T) -> Result {
        const COUNT: usize = 20_000;
        let mut table = Table::new(COUNT)?;
        let capacity = table.chunks.capacity();
        let (mut attempts, mut chunks) = (0, 0);
        let mut first = None;
        for index in 0..COUNT {
            let before = attempts;
            Spare::provide(|spare| {
                attempts += 1;
                let had = spare.chunk.is_some();
                let result = table.push(of(index), spare);
                chunks += usize::from(had && spare.chunk.is_none());
                result
            })?;
            // One more at most, whatever there is already.
            assert!(attempts - before <= 2);
            let start = table.chunks.first().map(|chunk| chunk.as_ptr());
            assert_eq!(start, *first.get_or_insert(start));
        }
        assert_eq!(chunks, COUNT.div_ceil(Table::<T>::PER_CHUNK));
        assert_eq!(attempts, COUNT + chunks);
        assert_eq!((table.len(), table.chunks.capacity()), (COUNT, capacity));
        assert!((0..COUNT).all(|index| table.get(index) == Some(of(index))));
        // There is nothing behind the last, nor is anything changed there.
        assert_eq!(table.get(COUNT), None);
        assert!(!table.set(COUNT, of(0)));
        assert!(table.set(COUNT / 2, of(7)));
        let changed = [-1, 0, 1].map(|at| table.get((COUNT / 2).wrapping_add_signed(at)));
        assert_eq!(
            changed,
            [COUNT / 2 - 1, 7, COUNT / 2 + 1].map(|at| Some(of(at)))
        );
        Ok(())
    }

    #[test]
    fn a_table_grows_by_one_chunk_at_a_time_and_nothing_in_it_moves() -> Result {
        fill(|index| index as u32 ^ 0x1234_5678)?;
        fill(|index| index as u8)
    }

    #[test]
    fn a_table_has_no_more_than_there_can_be() -> Result {
        const COUNT: usize = 2 * CHUNK;
        let mut table = Table::new(COUNT)?;
        let room = table.chunks.capacity() * CHUNK;
        for _ in 0..room {
            Spare::provide(|spare| table.push(1u8, spare))?;
        }
        let refused = Spare::provide(|spare| table.push(1u8, spare));
        assert_eq!((refused, table.len()), (Err(ENOSPC), room));
        Ok(())
    }

    /// Takes all that a user gets.
    fn take_all(shares: &mut Shares, user: u64, step: u64) -> u64 {
        let mut taken = 0;
        while take(shares, Holder::user(user), step, true).is_ok() {
            taken += step;
        }
        taken
    }

    #[test]
    fn no_user_takes_all() {
        let mut shares = Shares::new(1 << 20);
        let mut left = 1 << 20;
        for user in 0..4 {
            let taken = take_all(&mut shares, user, 64);
            assert_eq!(taken, (left - left / 4) / 64 * 64);
            left -= taken;
        }
        assert_eq!(shares.used, (1 << 20) - left);
    }

    #[test]
    fn nor_all_at_once() {
        let mut shares = Shares::new(256);
        for much in [193, 256] {
            assert_eq!(
                take(&mut shares, Holder::user(1), much, true),
                Err(errno::edquot())
            );
        }
        assert_eq!(take(&mut shares, Holder::user(1), 192, true), Ok(()));
    }

    #[test]
    fn what_is_too_much_at_once_takes_nothing() {
        let mut shares = Shares::new(1 << 20);
        for bound in [false, true] {
            for much in [(1 << 20) + 1, u64::MAX] {
                assert_eq!(take(&mut shares, Holder::user(1), much, bound), Err(ENOSPC));
            }
        }
        assert_eq!(shares.used, 0);
        assert!(shares.holders.is_empty());
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let mut shares = Shares::new(1 << 20);
        for _ in 0..3 {
            let taken = take_all(&mut shares, 1, 64);
            assert!(taken > 0);
            for _ in 0..taken / 64 {
                shares.give_back(Holder::user(1), 64);
            }
            assert_eq!(shares.used, 0);
            assert!(shares.holders.is_empty());
        }
        assert_eq!(take_all(&mut shares, 2, 64), 3 << 18);
    }

    #[test]
    fn users_together_leave_some_for_the_kernel() -> Result {
        const TOTAL: u64 = 1600;
        let mut shares = Shares::with_kernel(TOTAL);
        let taken: u64 = (1..100).map(|user| take_all(&mut shares, user, 1)).sum();
        assert_eq!(taken, TOTAL - TOTAL / KERNELS_PART);
        // Who may exceed limits gets more, and the kernel what is there.
        take(&mut shares, Holder::user(7), 1, false)?;
        take(&mut shares, Holder::KERNEL, TOTAL / KERNELS_PART - 1, false)?;
        assert_eq!(take(&mut shares, Holder::KERNEL, 1, false), Err(ENOSPC));
        assert_eq!(take(&mut shares, Holder::user(7), 1, false), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn what_the_kernel_has_is_of_its_own_part_first() -> Result {
        let mut shares = Shares::with_kernel(1600);
        take(&mut shares, Holder::KERNEL, 100, false)?;
        assert_eq!(take_all(&mut shares, 1, 1), 1125);
        shares.give_back(Holder::user(1), 1125);
        // Beyond that it has what users do not.
        take(&mut shares, Holder::KERNEL, 700, false)?;
        assert_eq!(take_all(&mut shares, 1, 1), 600);
        Ok(())
    }

    #[test]
    fn the_kernel_is_bound_by_no_share() {
        let asked = Holder::KERNEL.take(|bound| Ok(bound));
        assert_eq!(asked, Ok(false));
        let asked = Holder::user(5).take(|bound| Ok(bound));
        assert_eq!(asked, Ok(true));
    }
}
