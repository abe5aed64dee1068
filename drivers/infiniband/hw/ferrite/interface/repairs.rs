// SPDX-License-Identifier: GPL-2.0

//! What has to be done to an interface later, by a task: a channel that is stuck is made anew, and one that had no memory
//! for buffers looks for some.
//!
//! Who is to be looked after is held until it was: the interface does not go meanwhile. What has to be done again soon is
//! put off, longer each time, and given up where the device goes from behind the interface.

use super::Interface;
use crate::{
    kernel_ext::{
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        workqueue::hasten,
    },
    net::{
        netdev_warn,
        Device,
        Hold,
        Rtnl, //
    },
};
use kernel::{
    impl_has_delayed_work, new_delayed_work,
    prelude::*,
    sync::Arc,
    time::{
        msecs_to_jiffies,
        Instant,
        Monotonic, //
    },
    workqueue::{
        DelayedWork,
        Queue,
        WorkItem, //
    },
};

/// Milliseconds after which memory is looked for again.
const REFILL: u32 = 20;

/// Milliseconds after which channels are made anew for the second time, and most that this is put off.
const FIRST_WAIT: u32 = 1_000;
const LONGEST_WAIT: u32 = 32_000;
/// Milliseconds after which the next time is the first again.
const CALM: i64 = 60_000;

/// The kind of work that looks for memory.
const REFILLS: u64 = 1;

/// How long it is put off that channels are made anew.
struct Pace {
    /// Milliseconds that the last time was put off, and that the next time is.
    last: u32,
    wait: u32,
}

impl Pace {
    const fn new() -> Self {
        Self { last: 0, wait: 0 }
    }

    /// For how many milliseconds it is put off that is asked for so many after it was last, if it was.
    fn next(&mut self, since: Option<i64>) -> u32 {
        if since.is_none_or(|since| since - i64::from(self.last) > CALM) {
            self.wait = 0;
        }
        self.last = self.wait;
        self.wait = self.wait.saturating_mul(2).clamp(FIRST_WAIT, LONGEST_WAIT);
        self.last
    }
}

/// An interface whose channels are to be made anew, if there is one, and how soon.
struct Stuck {
    dev: Option<Hold<Interface>>,
    pace: Pace,
    /// When that was asked for last.
    asked: Option<Instant<Monotonic>>,
}

#[pin_data]
pub(super) struct Repairs {
    #[pin]
    stuck: IrqSpinLock<Stuck>,
    /// The interface that has too few buffers.
    #[pin]
    hungry: IrqSpinLock<Option<Hold<Interface>>>,
    #[pin]
    restart: DelayedWork<Repairs>,
    #[pin]
    refill: DelayedWork<Repairs, REFILLS>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Repairs { self.restart }
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self, REFILLS> for Repairs { self.refill }
}

impl Repairs {
    pub(super) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            stuck <- new_irq_spinlock!(
                Stuck {
                    dev: None,
                    pace: Pace::new(),
                    asked: None,
                },
                "ferrite_net_stuck"
            ),
            hungry <- new_irq_spinlock!(None, "ferrite_net_hungry"),
            restart <- new_delayed_work!("ferrite_net_restart"),
            refill <- new_delayed_work!("ferrite_net_refill"),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Has the channels of an interface made anew, at once where that was not done lately. May be called from any context,
    /// while there is a device behind the interface.
    pub(super) fn restart_soon(dev: &Device<Interface>) {
        let mut stuck = dev.repairs.stuck.lock();
        if stuck.dev.is_some() {
            // It has yet to look.
            return;
        }
        stuck.dev = Some(dev.hold());
        let since = stuck.asked.map(|asked| asked.elapsed().as_millis());
        stuck.asked = Some(Instant::now());
        let wait = msecs_to_jiffies(stuck.pace.next(since));
        drop(stuck);
        // Where it is queued already it has yet to look.
        drop(dev.work.enqueue_delayed::<_, 0>(dev.repairs.clone(), wait));
    }

    /// Nothing is to be done any more for an interface that has no device behind it: it is not held, and nothing waits for
    /// its time. Not before nobody asks for anything any more: its channels are gone, and [`Device::detach`] has returned.
    pub(super) fn stand_down(dev: &Device<Interface>) {
        Self::settle(&dev.repairs, &dev.work);
    }

    /// Lets go of who is to be looked after, and has nothing wait for its time: a timer that is left would queue its work on
    /// a workqueue that may be gone by then. `queue` is the one.
    fn settle(this: &Arc<Self>, queue: &Queue) {
        let stuck = this.stuck.lock().dev.take();
        let hungry = this.hungry.lock().take();
        drop((stuck, hungry));
        // Also where nobody is to be looked after: a run may have taken him between his being put there and its timer's start.
        hasten::<_, 0>(queue, this.clone());
        hasten::<_, REFILLS>(queue, this.clone());
    }

    /// Has the channels of an interface look for buffers after a while. May be called from any context, while the
    /// interface is up.
    pub(super) fn refill_later(dev: &Device<Interface>) {
        let before = dev.repairs.hungry.lock().replace(dev.hold());
        drop(before);
        let wait = msecs_to_jiffies(REFILL);
        drop(
            dev.work
                .enqueue_delayed::<_, REFILLS>(dev.repairs.clone(), wait),
        );
    }
}

impl WorkItem for Repairs {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let stuck = this.stuck.lock().dev.take();
        let Some(dev) = stuck else {
            return;
        };
        // Without RTNL: a device that does not answer takes its time, and is given up.
        if let Some(hw) = dev.hardware() {
            hw.check_health();
        }
        Rtnl::with(|rtnl| {
            let Err(error) = dev.mend(rtnl) else {
                return;
            };
            netdev_warn!(dev, "channels are not made anew: {:?}\n", error);
            // With RTNL held: who takes the device from behind the interface does that, and has it stand down.
            if dev.is_served(rtnl) {
                Self::restart_soon(&dev);
            }
        });
    }
}

impl WorkItem<REFILLS> for Repairs {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let hungry = this.hungry.lock().take();
        for napi in hungry.iter().flat_map(|dev| dev.napis()) {
            // It looks for buffers when it is polled.
            napi.schedule_from_task();
        }
    }
}

#[kunit_tests(ferrite_net_repairs)]
mod tests {
    use super::*;
    use crate::kernel_ext::workqueue::OwnedQueue;

    #[test]
    fn no_timer_is_left_that_would_queue_work_later() -> Result {
        let queue = OwnedQueue::for_long_work(c"ferrite_net_test")?;
        let repairs = Repairs::new()?;
        let hour = msecs_to_jiffies(3_600_000);
        // As where who was to be looked after was already.
        let restart = queue.enqueue_delayed::<_, 0>(repairs.clone(), hour);
        let refill = queue.enqueue_delayed::<_, REFILLS>(repairs.clone(), hour);
        assert!(restart.is_ok() && refill.is_ok());
        Repairs::settle(&repairs, &queue);
        queue.flush();
        // Who waits has a reference.
        assert!(Arc::into_unique_or_drop(repairs).is_some());
        Ok(())
    }

    #[test]
    fn what_is_asked_for_again_and_again_is_put_off_longer_each_time() {
        let mut pace = Pace::new();
        let mut since = None;
        for expected in [0, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 32_000] {
            assert_eq!(pace.next(since), expected);
            // It fails as soon as it was done.
            since = Some(expected.into());
        }
        // Not so soon, but not much later either.
        let longest = i64::from(LONGEST_WAIT);
        assert_eq!(pace.next(Some(longest + CALM)), LONGEST_WAIT);
        assert_eq!(pace.next(Some(longest + CALM + 1)), 0);
        assert_eq!(pace.next(Some(0)), FIRST_WAIT);
    }
}
