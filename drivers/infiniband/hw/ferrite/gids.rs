// SPDX-License-Identifier: GPL-2.0

//! The device's GID table, which follows the core's.
//!
//! The core adds and removes GIDs with RTNL held, so that whoever waits for the device there stops
//! all network configuration. What an entry is to be is noted, and a work item tells the device.
//! Adding an entry waits a little for it, as an honest device answers at once and may refuse; where
//! it is late the entry counts as added, and whoever makes a path that starts there waits for the
//! device instead, without RTNL. A device that never answers is given up by the work item.

use crate::{
    abi,
    abi::{
        Plain,
        SetGid, //
    },
    hardware::Hardware,
    kernel_ext::spinlock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
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
        Msecs, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// How long all who add GIDs wait together for a device that does not answer.
const PATIENCE: Msecs = 1_000;

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
}

impl Entry {
    /// Whether the device has answered `change`, or a later one.
    fn has_seen(&self, change: u32) -> bool {
        self.told.wrapping_sub(change) as i32 >= 0
    }
}

struct State {
    entries: KVec<Entry>,
    /// Somebody has waited in vain, and no answer has come since.
    late: bool,
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
        for _ in 0..entries {
            let entry = Entry {
                wanted: SetGid::zeroed(),
                changes: 0,
                told: 0,
                outcome: Ok(()),
            };
            table.push(entry, GFP_KERNEL)?;
        }
        Ok(pin_init!(Self {
            state <- new_irq_spinlock!(State { entries: table, late: false }, "ferrite_gids"),
            answered <- new_condvar!("ferrite_gids_answered"),
        }))
    }

    /// Notes what an entry is to be; returns the number of this change.
    fn want(&self, wanted: SetGid) -> Result<u32> {
        let mut state = self.state.lock();
        let entry = state.entries.get_mut(usize::from(wanted.index));
        let entry = entry.ok_or(EINVAL)?;
        entry.wanted = wanted;
        entry.changes = entry.changes.wrapping_add(1);
        Ok(entry.changes)
    }

    /// Waits for the answer to a change of an entry, and returns it; `Ok` where the device is late,
    /// or a signal came. Sleeps, for `patience` at the most.
    fn wait(&self, index: u16, change: u32, patience: Msecs) -> Result {
        let mut left = msecs_to_jiffies(patience);
        let mut state = self.state.lock();
        loop {
            let entry = state.entries.get(usize::from(index)).ok_or(EINVAL)?;
            if entry.has_seen(change) {
                return entry.outcome;
            }
            if state.late {
                return Ok(());
            }
            left = match self.answered.wait_interruptible_timeout(&mut state, left) {
                CondVarTimeoutResult::Woken { jiffies } => jiffies,
                CondVarTimeoutResult::Signal { .. } => return Ok(()),
                CondVarTimeoutResult::Timeout => {
                    state.late = true;
                    0
                }
            };
        }
    }

    /// Whether the device knows what an entry is.
    fn is_settled(&self, index: u16) -> bool {
        let state = self.state.lock();
        let entry = state.entries.get(usize::from(index));
        entry.is_none_or(|entry| entry.has_seen(entry.changes))
    }

    /// Waits until the device knows what an entry is, or has refused to. Sleeps.
    fn settle(&self, index: u16) {
        let mut state = self.state.lock();
        while state
            .entries
            .get(usize::from(index))
            .is_some_and(|entry| !entry.has_seen(entry.changes))
        {
            self.answered.wait(&mut state);
        }
    }

    /// An entry that the device has to be told of, and the number of its change.
    fn next(&self) -> Option<(SetGid, u32)> {
        let state = self.state.lock();
        let entry = state
            .entries
            .iter()
            .find(|entry| !entry.has_seen(entry.changes))?;
        Some((entry.wanted, entry.changes))
    }

    /// Tells all that is to be told by `tell`, which sleeps.
    fn tell_all(&self, tell: impl Fn(&SetGid) -> Result) {
        while let Some((wanted, change)) = self.next() {
            let outcome = tell(&wanted);
            let mut state = self.state.lock();
            state.late = false;
            if let Some(entry) = state.entries.get_mut(usize::from(wanted.index)) {
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
        drop(self.hw.work.enqueue(self.clone()));
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
        self.table.wait(index, change, PATIENCE)
    }

    /// Clears an entry. Does not wait for the device: who uses the entry for something else waits.
    pub(crate) fn clear(self: &Arc<Self>, index: u16) -> Result {
        // A device that failed has no table any more.
        if self.hw.is_dead() {
            return Ok(());
        }
        self.change(SetGid {
            index,
            vlan: abi::VLAN_NONE,
            ..SetGid::zeroed()
        })?;
        Ok(())
    }

    /// Makes sure that the device knows what an entry is, before it is told to use it. `EAGAIN`
    /// where it does not know yet and the caller may not be made to sleep.
    pub(crate) fn settle(&self, index: u16, sleepable: bool) -> Result {
        if sleepable {
            self.table.settle(index);
        } else if !self.table.is_settled(index) {
            return Err(EAGAIN);
        }
        Ok(())
    }
}

impl WorkItem for GidFollower {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.table.tell_all(|wanted| {
            // There is nothing to be told, and no need to wait until it is stopped.
            if this.hw.is_dead() {
                return Err(EIO);
            }
            let told = this.hw.execute(wanted);
            if told.is_err() && !this.hw.is_dead() {
                pr_warn!("ferrite: the device does not take GID {}\n", wanted.index);
            }
            told
        });
    }
}

#[kunit_tests(ferrite_gids)]
mod tests {
    use super::*;
    use kernel::time::{Delta, Instant, Monotonic};

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

    #[test]
    fn who_adds_gids_waits_once_for_a_device_that_is_late() -> Result {
        let table = table()?;
        let start = Instant::<Monotonic>::now();
        let change = table.want(gid(0, 1))?;
        assert_eq!(table.wait(0, change, 20), Ok(()));
        assert!(start.elapsed() >= Delta::from_millis(10));
        // Nobody else does: this would be a minute each.
        let start = Instant::<Monotonic>::now();
        for index in 1..4 {
            let change = table.want(gid(index, 1))?;
            assert_eq!(table.wait(index, change, 60_000), Ok(()));
            assert!(!table.is_settled(index));
        }
        assert!(start.elapsed() < Delta::from_millis(30_000));
        // When it answers all are told, and the next answer is waited for again.
        let told = core::cell::Cell::new(0);
        table.tell_all(|_| {
            told.set(told.get() + 1);
            Ok(())
        });
        assert_eq!(told.get(), 4);
        assert!((0..4).all(|index| table.is_settled(index)));
        assert!(!table.state.lock().late);
        Ok(())
    }

    #[test]
    fn an_answer_that_came_in_time_is_what_adding_returns() -> Result {
        let table = table()?;
        let good = table.want(gid(1, 1))?;
        let bad = table.want(gid(2, 1))?;
        table.tell_all(|wanted| {
            if wanted.index == 2 {
                Err(ENOMEM)
            } else {
                Ok(())
            }
        });
        assert_eq!(table.wait(1, good, 0), Ok(()));
        assert_eq!(table.wait(2, bad, 0), Err(ENOMEM));
        // Who uses them does not wait.
        table.settle(1);
        table.settle(2);
        Ok(())
    }

    #[test]
    fn the_device_ends_up_with_what_was_wanted_last() -> Result {
        let table = table()?;
        table.want(gid(3, 1))?;
        table.want(gid(3, 0))?;
        let told = core::cell::Cell::new(0);
        table.tell_all(|wanted| {
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
        assert!(table.is_settled(3));
        Ok(())
    }

    #[test]
    fn there_are_as_many_entries_as_the_device_has() -> Result {
        let table = table()?;
        assert_eq!(table.want(gid(4, 1)), Err(EINVAL));
        assert!(table.is_settled(4));
        table.settle(4);
        Ok(())
    }
}
