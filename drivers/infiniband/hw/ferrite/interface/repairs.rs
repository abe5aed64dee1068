// SPDX-License-Identifier: GPL-2.0

//! What has to be done to an interface later, by a task: a channel that is stuck is made anew, and one that had no memory
//! for buffers looks for some.
//!
//! Who is to be looked after is held until it was: the interface does not go meanwhile.

use super::Interface;
use crate::{
    kernel_ext::spinlock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    net::{
        Device,
        Hold,
        Rtnl, //
    },
};
use kernel::{
    impl_has_delayed_work, new_delayed_work,
    prelude::*,
    sync::Arc,
    time::msecs_to_jiffies,
    workqueue::{
        impl_has_work,
        new_work,
        DelayedWork,
        Work,
        WorkItem, //
    },
};

/// Milliseconds after which memory is looked for again.
const REFILL: u32 = 20;

/// The kind of work that looks for memory.
const REFILLS: u64 = 1;

#[pin_data]
pub(super) struct Repairs {
    /// The interface whose channels are to be made anew.
    #[pin]
    stuck: IrqSpinLock<Option<Hold<Interface>>>,
    /// The interface that has too few buffers.
    #[pin]
    hungry: IrqSpinLock<Option<Hold<Interface>>>,
    #[pin]
    restart: Work<Repairs>,
    #[pin]
    refill: DelayedWork<Repairs, REFILLS>,
}

impl_has_work! {
    impl HasWork<Self> for Repairs { self.restart }
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self, REFILLS> for Repairs { self.refill }
}

impl Repairs {
    pub(super) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            stuck <- new_irq_spinlock!(None, "ferrite_net_stuck"),
            hungry <- new_irq_spinlock!(None, "ferrite_net_hungry"),
            restart <- new_work!("ferrite_net_restart"),
            refill <- new_delayed_work!("ferrite_net_refill"),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Has the channels of an interface made anew. May be called from any context, while the interface is up.
    pub(super) fn restart_soon(dev: &Device<Interface>) {
        let before = dev.repairs.stuck.lock().replace(dev.hold());
        drop(before);
        // Where it is queued already it has yet to look.
        drop(dev.work.enqueue::<_, 0>(dev.repairs.clone()));
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
        let stuck = this.stuck.lock().take();
        let Some(dev) = stuck else {
            return;
        };
        // Without RTNL: a device that does not answer takes its time, and is given up.
        if let Some(hw) = dev.hardware() {
            hw.check_health();
        }
        // Also where that has failed before: who finds that nothing is sent asks for it every few seconds.
        let restarted = Rtnl::with(|rtnl| dev.restart(rtnl, || ()).and_then(|()| dev.reopen(rtnl)));
        if let Err(error) = restarted {
            pr_warn!("{}: channels are not made anew: {:?}\n", dev.name(), error);
        }
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
