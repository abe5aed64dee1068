// SPDX-License-Identifier: GPL-2.0

//! The end of a life of a device. It waits until users have let go, for as long as that takes: the log says so
//! meanwhile, as who waits cannot.

use crate::kernel_ext::workqueue::flush_delayed;
use kernel::{
    impl_has_delayed_work, new_delayed_work, new_mutex, pci,
    prelude::*,
    sync::{
        aref::ARef,
        Arc,
        Mutex, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Monotonic, //
    },
    workqueue::{
        self,
        DelayedWork,
        WorkItem, //
    },
};

/// After so many milliseconds it is said that users took their time to let go.
const LONG_PARTING: i64 = 5_000;

/// Every so many milliseconds it is said that they have not done so yet.
const REMINDER: u32 = 10_000;

/// Says that users have not let go, again and again.
#[pin_data]
struct Reminder {
    pdev: ARef<pci::Device>,
    began: Instant<Monotonic>,
    /// Whether they are waited for. The work is queued with this locked only.
    #[pin]
    waiting: Mutex<bool>,
    #[pin]
    work: DelayedWork<Reminder>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Reminder { self.work }
}

impl Reminder {
    fn begin(pdev: &pci::Device, began: Instant<Monotonic>) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            pdev: ARef::from(pdev),
            began,
            waiting <- new_mutex!(true, "ferrite_parting"),
            work <- new_delayed_work!("ferrite_parting"),
        });
        let reminder = Arc::pin_init(init, GFP_KERNEL)?;
        reminder.queue();
        Ok(reminder)
    }

    /// Has it run after a while, on a queue of the system's: none of the driver's is sure to be free then.
    fn queue(self: &Arc<Self>) {
        let queue = workqueue::system_long();
        // It is not queued yet, or runs now.
        drop(queue.enqueue_delayed(self.clone(), msecs_to_jiffies(REMINDER)));
    }

    /// Afterwards it does not run any more. Sleeps.
    fn end(self: Arc<Self>) {
        *self.waiting.lock() = false;
        // Where it waits for its time it runs now, and does nothing.
        flush_delayed(&self);
    }
}

impl WorkItem for Reminder {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let waiting = this.waiting.lock();
        if *waiting {
            dev_warn!(
                this.pdev,
                "users have not let go of the device for {} s; it waits for them\n",
                this.began.elapsed().as_millis() / 1000
            );
            this.queue();
        }
    }
}

/// Ends what users have to let go of first, by dropping it, and says so in the log where that takes long. Sleeps.
pub(crate) fn end<T>(pdev: &pci::Device, life: T) {
    let began = Instant::now();
    // Without memory for it nothing is said.
    let reminder = Reminder::begin(pdev, began).ok();
    drop(life);
    if let Some(reminder) = reminder {
        reminder.end();
    }
    let took = began.elapsed().as_millis();
    if took > LONG_PARTING {
        dev_warn!(pdev, "users took {} ms to let go of the device\n", took);
    }
}
