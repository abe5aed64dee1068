// SPDX-License-Identifier: GPL-2.0

//! The device's GID table, which follows the core's.
//!
//! The core adds and removes GIDs with RTNL held, so that whoever waits for the device there stops
//! all network configuration. What an entry is to be is noted, and a work item tells the device.
//! Adding an entry waits a little for it, as an honest device answers at once and may refuse; where
//! it is late the entry counts as added, and whoever makes a path that starts there waits for the
//! device instead, without RTNL, and gets its refusal. A device that never answers, or that keeps a
//! GID which the host no longer has, is given up by the work item.

use crate::{
    abi,
    abi::{
        Plain,
        SetGid, //
    },
    hardware::Hardware,
    kernel_ext::spinlock::{
        new_irq_spinlock,
        IrqSpinLock,
        IrqSpinLockGuard, //
    },
    port::DEVICE_PORT,
};
use kernel::{
    new_condvar,
    prelude::*,
    sync::{
        Arc,
        CondVar,
        CondVarTimeoutResult, //
    },
    time::{
        msecs_to_jiffies,
        Delta,
        Instant,
        Jiffies,
        Monotonic,
        Msecs, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// How long all who add GIDs wait together, in [`WINDOW`].
const PATIENCE: Delta = Delta::from_millis(1_000);
/// How long it takes until there is new patience.
const WINDOW: Delta = Delta::from_millis(60_000);

/// What makes an entry empty.
fn cleared(index: u16) -> SetGid {
    SetGid {
        index,
        vlan: abi::VLAN_NONE,
        port: DEVICE_PORT,
        ..SetGid::zeroed()
    }
}

/// An entry of the table.
struct Entry {
    /// What it is to be.
    wanted: SetGid,
    /// How often that changed, free-running.
    changes: u32,
    /// The change that the device has answered.
    told: u32,
    /// What it has answered.
    outcome: Result,
    /// How many wait for that.
    waiters: u32,
}

impl Entry {
    /// Whether the device has answered `change`, or a later one.
    fn has_seen(&self, change: u32) -> bool {
        self.told.wrapping_sub(change) as i32 >= 0
    }

    /// Whether there is something that the device has not answered.
    fn is_pending(&self) -> bool {
        !self.has_seen(self.changes)
    }
}

/// How long may still be waited by those who hold up others.
///
/// However the device spreads its answers, and however many there are to wait for, it costs
/// [`PATIENCE`] once in [`WINDOW`].
struct Patience {
    left: Delta,
    /// When the window began.
    since: Instant<Monotonic>,
}

impl Patience {
    fn new(now: Instant<Monotonic>) -> Self {
        Self {
            left: PATIENCE,
            since: now,
        }
    }

    fn renew(&mut self, now: Instant<Monotonic>) {
        if now - self.since >= WINDOW {
            *self = Self::new(now);
        }
    }

    /// As a timeout; `None` if there is none left.
    fn timeout(&self) -> Option<Jiffies> {
        let left = self.left.as_millis();
        (left > 0).then(|| msecs_to_jiffies(left as Msecs))
    }

    fn spend(&mut self, waited: Delta) {
        self.left -= waited;
    }
}

struct State {
    entries: KVec<Entry>,
    patience: Patience,
    /// Where to look first for an entry to tell of in turn: one that changes all the time does not
    /// keep the others back.
    next: usize,
    /// The last one was told out of turn.
    hurried: bool,
}

impl State {
    fn entry(&mut self, index: u16) -> Option<&mut Entry> {
        self.entries.get_mut(usize::from(index))
    }

    /// An entry that the device has to be told of, and the number of its change. Every other time it
    /// is one that is waited for, if there is any: who waits for one entry again and again does not
    /// keep the device from being told of others.
    fn take_next(&mut self) -> Option<(SetGid, u32)> {
        let count = self.entries.len();
        let from_next = || (0..count).map(|step| (self.next + step) % count);
        let is = |index: usize, is: fn(&Entry) -> bool| self.entries.get(index).is_some_and(is);
        let waited_for = from_next()
            .find(|index| is(*index, |entry| entry.is_pending() && entry.waiters > 0))
            .filter(|_| !self.hurried);
        let in_turn = || from_next().find(|index| is(*index, Entry::is_pending));
        let index = waited_for.or_else(in_turn)?;
        self.hurried = waited_for.is_some();
        if !self.hurried {
            self.next = (index + 1) % count;
        }
        let entry = self.entries.get(index)?;
        Some((entry.wanted, entry.changes))
    }
}

/// What the table is to be, and what the device was told of it.
#[pin_data]
struct GidTable {
    // A spinlock: address handles are also made where nobody may sleep.
    #[pin]
    state: IrqSpinLock<State>,
    #[pin]
    answered: CondVar,
}

impl GidTable {
    fn new(entries: u16) -> Result<impl PinInit<Self>> {
        let mut table = KVec::with_capacity(entries.into(), GFP_KERNEL)?;
        for index in 0..entries {
            let entry = Entry {
                wanted: cleared(index),
                changes: 0,
                told: 0,
                outcome: Ok(()),
                waiters: 0,
            };
            table.push(entry, GFP_KERNEL)?;
        }
        let state = State {
            entries: table,
            patience: Patience::new(Instant::now()),
            next: 0,
            hurried: false,
        };
        Ok(pin_init!(Self {
            state <- new_irq_spinlock!(state, "ferrite_gids"),
            answered <- new_condvar!("ferrite_gids_answered"),
        }))
    }

    /// Notes what an entry is to be; returns the number of this change.
    fn want(&self, wanted: SetGid) -> Result<u32> {
        let mut state = self.state.lock();
        let entry = state.entry(wanted.index).ok_or(EINVAL)?;
        entry.wanted = wanted;
        entry.changes = entry.changes.wrapping_add(1);
        Ok(entry.changes)
    }

    /// Waits for the answer to a change of an entry, and returns it. `pause` waits for any answer,
    /// and says whether there is a reason to wait no more: then this returns `None` if there is no
    /// answer yet.
    fn wait_by(
        &self,
        index: u16,
        change: Option<u32>,
        mut pause: impl FnMut(&mut IrqSpinLockGuard<'_, State>) -> bool,
    ) -> Option<Result> {
        let mut state = self.state.lock();
        let Some(entry) = state.entry(index) else {
            return Some(Err(EINVAL));
        };
        // What comes later is not waited for: it may change all the time.
        let change = change.unwrap_or(entry.changes);
        entry.waiters += 1;
        let mut enough = false;
        loop {
            // Before anything else, whatever ended the pause: the answer may be there.
            let answer = match state.entry(index) {
                Some(entry) if entry.has_seen(change) => Some(entry.outcome),
                _ => None,
            };
            if answer.is_some() || enough {
                if let Some(entry) = state.entry(index) {
                    entry.waiters -= 1;
                }
                return answer;
            }
            enough = pause(&mut state);
        }
    }

    /// Waits for the answer to a change of an entry, and returns it; `Ok` where the device is late,
    /// or a signal came. Sleeps, but no longer than there is [`Patience`].
    fn wait(&self, index: u16, change: u32) -> Result {
        self.state.lock().patience.renew(Instant::now());
        let answer = self.wait_by(index, Some(change), |state| {
            let Some(timeout) = state.patience.timeout() else {
                return true;
            };
            let start = Instant::<Monotonic>::now();
            let pause = self.answered.wait_interruptible_timeout(state, timeout);
            state.patience.spend(start.elapsed());
            matches!(pause, CondVarTimeoutResult::Signal { .. })
        });
        answer.unwrap_or(Ok(()))
    }

    /// What the device has answered to what an entry is; `EAGAIN` where it has not yet.
    fn outcome(&self, index: u16) -> Result {
        let mut state = self.state.lock();
        match state.entry(index).ok_or(EINVAL)? {
            entry if entry.is_pending() => Err(EAGAIN),
            entry => entry.outcome,
        }
    }

    /// Waits until the device has answered what an entry is now, and returns that; `ERESTARTSYS`
    /// where a signal came before. Sleeps.
    fn settle(&self, index: u16) -> Result {
        let answer = self.wait_by(index, None, |state| self.answered.wait_interruptible(state));
        answer.unwrap_or(Err(ERESTARTSYS))
    }

    /// Tells all that is to be told by `tell`, which sleeps. `give_up` is called where the device
    /// keeps a GID that it should not have.
    fn tell_all(&self, tell: impl Fn(&SetGid) -> Result, give_up: impl Fn()) {
        loop {
            let Some((wanted, change)) = self.state.lock().take_next() else {
                return;
            };
            let outcome = tell(&wanted);
            // The entry may still be what it was before: that it was cleared in between need not
            // have been told.
            if outcome.is_err() && (wanted.gid == [0; 16] || tell(&cleared(wanted.index)).is_err())
            {
                give_up();
            }
            let mut state = self.state.lock();
            if let Some(entry) = state.entry(wanted.index) {
                entry.told = change;
                entry.outcome = outcome;
            }
            self.answered.notify_all();
        }
    }
}

/// Tells the device what the core's GID table is.
#[pin_data]
pub(crate) struct GidFollower {
    hw: Arc<Hardware>,
    #[pin]
    table: GidTable,
    #[pin]
    work: Work<GidFollower>,
}

impl_has_work! {
    impl HasWork<Self> for GidFollower { self.work }
}

impl GidFollower {
    /// For a device with so many entries.
    pub(crate) fn new(hw: &Arc<Hardware>, entries: u16) -> Result<Arc<Self>> {
        let table = GidTable::new(entries)?;
        Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                table <- table,
                work <- new_work!("ferrite_gids"),
            }),
            GFP_KERNEL,
        )
    }

    fn change(self: &Arc<Self>, wanted: SetGid) -> Result<u32> {
        let change = self.table.want(wanted)?;
        // Where it is queued already, it has yet to look.
        drop(self.hw.gid_work.enqueue(self.clone()));
        Ok(change)
    }

    /// Sets an entry. Sleeps, but does not wait for the device for long.
    pub(crate) fn set(self: &Arc<Self>, wanted: SetGid) -> Result {
        // It is being stopped, which takes time.
        if self.hw.is_dead() {
            return Err(EIO);
        }
        let index = wanted.index;
        let change = self.change(wanted)?;
        self.table.wait(index, change)
    }

    /// Clears an entry. Does not wait for the device: who uses the entry for something else waits.
    pub(crate) fn clear(self: &Arc<Self>, index: u16) -> Result {
        // A device that failed has no table any more.
        if self.hw.is_dead() {
            return Ok(());
        }
        self.change(cleared(index))?;
        Ok(())
    }

    /// Makes sure that the device has an entry, before it is told to use it: returns what it said
    /// to it. `EAGAIN` where it has said nothing yet and the caller may not be made to sleep,
    /// `ERESTARTSYS` where a signal came before.
    pub(crate) fn settle(&self, index: u16, sleepable: bool) -> Result {
        if sleepable {
            self.table.settle(index)
        } else {
            self.table.outcome(index)
        }
    }
}

impl WorkItem for GidFollower {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let tell = |wanted: &SetGid| {
            // There is nothing to be told, and no need to wait until it is stopped.
            if this.hw.is_dead() {
                return Err(EIO);
            }
            let told = this.hw.execute(wanted);
            if told.is_err() && !this.hw.is_dead() {
                dev_warn!(this.hw.pdev, "device does not take GID {}\n", wanted.index);
            }
            told
        };
        this.table.tell_all(tell, || this.hw.fail());
    }
}

#[kunit_tests(ferrite_gids)]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// A GID at `index` with `byte` in it.
    fn gid(index: u16, byte: u8) -> SetGid {
        SetGid {
            gid: [byte; 16],
            index,
            ..SetGid::zeroed()
        }
    }

    fn table() -> Result<Arc<GidTable>> {
        Arc::pin_init(GidTable::new(4)?, GFP_KERNEL)
    }

    /// Tells all to a device that answers `answer`; returns how often it was told something.
    fn tell(table: &GidTable, answer: impl Fn(&SetGid) -> Result) -> usize {
        let told = Cell::new(0);
        let count = |wanted: &SetGid| {
            told.set(told.get() + 1);
            answer(wanted)
        };
        table.tell_all(count, || {});
        told.get()
    }

    #[test]
    fn who_adds_gids_waits_once_for_a_device_that_is_late() -> Result {
        let table = table()?;
        table.state.lock().patience.left = Delta::from_millis(20);
        let start = Instant::<Monotonic>::now();
        let change = table.want(gid(0, 1))?;
        assert_eq!(table.wait(0, change), Ok(()));
        assert!(start.elapsed() >= Delta::from_millis(10));
        // Nobody else does, whether the device answers in between or not.
        for index in 1..4 {
            let change = table.want(gid(index, 1))?;
            assert!(table.state.lock().patience.timeout().is_none());
            assert_eq!(table.wait(index, change), Ok(()));
            assert_eq!(table.outcome(index), Err(EAGAIN));
            if index == 2 {
                assert_eq!(tell(&table, |_| Ok(())), 3);
            }
        }
        assert_eq!(tell(&table, |_| Ok(())), 1);
        assert!((0..4).all(|index| table.outcome(index).is_ok()));
        assert!((0..4).all(|index| table
            .state
            .lock()
            .entry(index)
            .is_some_and(|e| e.waiters == 0)));
        Ok(())
    }

    #[test]
    fn slow_answers_together_cost_no_more_than_one_that_never_comes() -> Result {
        let start = Instant::now();
        let mut patience = Patience::new(start);
        let mut waited = Delta::from_millis(0);
        // Of 0.9 s each, as the table waits: as long as there is a timeout, at the most for that.
        let mut waits = 0;
        while patience.timeout().is_some() {
            let answer = Delta::from_millis(900).min(patience.left);
            patience.spend(answer);
            waited += answer;
            waits += 1;
        }
        assert_eq!((waits, waited), (2, PATIENCE));
        // That lasts for a window.
        patience.renew(start + (WINDOW - Delta::from_nanos(1)));
        assert!(patience.timeout().is_none());
        patience.renew(start + WINDOW);
        assert_eq!(patience.left, PATIENCE);
        // The next one begins then.
        patience.spend(PATIENCE);
        patience.renew(start + (WINDOW + WINDOW - Delta::from_nanos(1)));
        assert!(patience.timeout().is_none());
        Ok(())
    }

    #[test]
    fn an_answer_that_came_in_time_is_what_adding_returns() -> Result {
        let table = table()?;
        let good = table.want(gid(1, 1))?;
        let bad = table.want(gid(2, 1))?;
        tell(&table, |wanted| {
            if wanted.gid == [1; 16] && wanted.index == 2 {
                Err(ENOMEM)
            } else {
                Ok(())
            }
        });
        assert_eq!(table.wait(1, good), Ok(()));
        assert_eq!(table.wait(2, bad), Err(ENOMEM));
        Ok(())
    }

    #[test]
    fn an_answer_that_comes_with_the_end_of_waiting_counts() -> Result {
        let table = table()?;
        let change = table.want(gid(2, 1))?;
        // The answer is noted while a signal or the end of the time wakes the waiter.
        let answer = table.wait_by(2, Some(change), |state| {
            if let Some(entry) = state.entry(2) {
                entry.told = change;
                entry.outcome = Err(ENOMEM);
            }
            true
        });
        assert_eq!(answer, Some(Err(ENOMEM)));
        // Without one it ends as well.
        table.want(gid(2, 3))?;
        assert_eq!(table.wait_by(2, None, |_| true), None);
        Ok(())
    }

    #[test]
    fn who_uses_an_entry_that_was_refused_late_is_told() -> Result {
        let table = table()?;
        table.state.lock().patience.left = Delta::from_millis(0);
        let change = table.want(gid(2, 1))?;
        assert_eq!(table.wait(2, change), Ok(()));
        assert_eq!(table.outcome(2), Err(EAGAIN));
        tell(&table, |wanted| {
            if wanted.gid == [1; 16] {
                Err(ENOMEM)
            } else {
                Ok(())
            }
        });
        assert_eq!(table.settle(2), Err(ENOMEM));
        assert_eq!(table.outcome(2), Err(ENOMEM));
        // Until it is something else.
        table.want(cleared(2))?;
        tell(&table, |_| Ok(()));
        assert_eq!(table.settle(2), Ok(()));
        Ok(())
    }

    #[test]
    fn what_the_device_refuses_leaves_nothing_of_before() -> Result {
        let table = table()?;
        let stored = Cell::new([0; 16]);
        let given_up = Cell::new(false);
        let set = |wanted: &SetGid| {
            if wanted.gid == [2; 16] {
                return Err(ENOMEM);
            }
            stored.set(wanted.gid);
            Ok(())
        };
        table.want(gid(1, 1))?;
        table.tell_all(set, || given_up.set(true));
        assert_eq!(stored.get(), [1; 16]);
        // The device never hears of the clearing.
        table.want(cleared(1))?;
        table.want(gid(1, 2))?;
        table.tell_all(set, || given_up.set(true));
        assert_eq!(stored.get(), [0; 16]);
        assert_eq!(table.outcome(1), Err(ENOMEM));
        assert!(!given_up.get());
        // One that cannot be made to forget is not to be used.
        table.want(cleared(1))?;
        table.tell_all(|_| Err(EINVAL), || given_up.set(true));
        assert!(given_up.get());
        Ok(())
    }

    #[test]
    fn what_is_waited_for_is_told_first_and_nothing_is_kept_back() -> Result {
        let table = table()?;
        for index in 0..4 {
            table.want(gid(index, 1))?;
        }
        if let Some(entry) = table.state.lock().entry(2) {
            entry.waiters = 1;
        }
        let order = core::cell::RefCell::new(KVec::new());
        tell(&table, |wanted| {
            let mut order = order.borrow_mut();
            order.push(wanted.index, GFP_KERNEL)?;
            // One that changes all the time.
            if wanted.index == 3 && order.len() < 6 {
                table.want(gid(3, order.len() as u8))?;
            }
            Ok(())
        });
        assert_eq!(order.borrow()[..], [2, 0, 1, 3, 3, 3]);
        Ok(())
    }

    #[test]
    fn an_entry_that_is_always_waited_for_leaves_others_their_turn() -> Result {
        let table = table()?;
        for index in [0, 2, 3] {
            table.want(gid(index, 1))?;
        }
        if let Some(entry) = table.state.lock().entry(2) {
            entry.waiters = 1;
        }
        let order = core::cell::RefCell::new(KVec::new());
        tell(&table, |wanted| {
            let mut order = order.borrow_mut();
            order.push(wanted.index, GFP_KERNEL)?;
            // The one that is waited for changes all the time, and so does one that is not.
            if wanted.index >= 2 && order.len() < 12 {
                table.want(gid(wanted.index, order.len() as u8))?;
            }
            Ok(())
        });
        let order = order.borrow();
        let turn = |index| order.iter().position(|told| *told == index);
        assert_eq!(turn(2), Some(0));
        assert_eq!(turn(0), Some(1));
        assert!(turn(3).is_some_and(|turn| turn < 8));
        // It is told more often than in its turn all the same.
        assert!(order.iter().filter(|told| **told == 2).count() >= order.len() / 2);
        Ok(())
    }

    #[test]
    fn an_entry_that_changes_all_the_time_is_waited_for_once() -> Result {
        let table = table()?;
        let seen = table.want(gid(3, 1))?;
        // It changes while it is waited for, and the device has answered what it was.
        let answer = table.wait_by(3, None, |state| {
            if let Some(entry) = state.entry(3) {
                entry.told = seen;
                entry.changes = entry.changes.wrapping_add(1);
            }
            false
        });
        assert_eq!(answer, Some(Ok(())));
        Ok(())
    }

    #[test]
    fn the_device_ends_up_with_what_was_wanted_last() -> Result {
        let table = table()?;
        table.want(gid(3, 1))?;
        table.want(gid(3, 0))?;
        let told = Cell::new(0);
        tell(&table, |wanted| {
            // It changes once more while the device is being told.
            if told.get() == 0 {
                assert_eq!(wanted.gid, [0; 16]);
                table.want(gid(3, 7))?;
            } else {
                assert_eq!(wanted.gid, [7; 16]);
            }
            told.set(told.get() + 1);
            Ok(())
        });
        assert_eq!(told.get(), 2);
        assert_eq!(table.outcome(3), Ok(()));
        Ok(())
    }

    #[test]
    fn there_are_as_many_entries_as_the_device_has() -> Result {
        let table = table()?;
        assert_eq!(table.want(gid(4, 1)), Err(EINVAL));
        assert_eq!(table.outcome(4), Err(EINVAL));
        assert_eq!(table.settle(4), Err(EINVAL));
        Ok(())
    }
}
