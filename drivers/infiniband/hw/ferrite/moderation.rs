// SPDX-License-Identifier: GPL-2.0

//! Moderation of the event queues of completion handlers: how long an interrupt is put off so that it
//! tells of more than one event.
//!
//! There are two levels, and both adapt to the traffic by the kernel's means (`lib/dim`) where an
//! administrator wants it (`rdma dev set DEV adaptive-moderation on`).
//!
//! - Completion queues that the kernel polls: the RDMA core sees what each of them does, and has the
//!   device put off its event by up to 32 microseconds, or that many completions ([`CqOps::modify_cq`]).
//!   A busy queue does not make another one late. What a process has, it moderates by itself
//!   (`ibv_modify_cq`).
//! - Event queues, here: many completion queues with little to do each, those of processes among them,
//!   share an interrupt; and it is put off for longer where that is no loss. The measure is how many
//!   completions there are: who waits for each single one before it asks for the next has fewer of them
//!   as soon as interrupts are late, and is left alone then. So is a queue of low latency.
//!
//! [`CqOps::modify_cq`]: crate::rdma::CqOps::modify_cq

use crate::{
    abi::EventPriority,
    eq::EventQueue,
    hardware::Hardware,
    kernel_ext::dim::{
        Moderated,
        NetDim,
        PROFILES, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
};

/// Microseconds that an interrupt is put off by each profile: those that network interfaces have by
/// default, but that without load it is not put off at all.
const MICROSECONDS: [u16; PROFILES] = [0, 8, 64, 128, 256];
/// An interrupt is not put off where there are so many events: as many as it handles.
const COUNT: u16 = crate::eq::BUDGET as u16;

/// Interrupts after which it is looked whether moderation is to adapt at all.
const LOOK: u64 = 64;

/// A queue that is moderated.
struct Target {
    hw: Arc<Hardware>,
    queue: Arc<EventQueue>,
}

impl Moderated for Target {
    fn apply(&self, profile: usize) {
        // What a device refuses stays as it is; one that failed has no interrupts.
        let _ = self.queue.modify(
            |settings| {
                // It may have become one of low latency since the profile was chosen.
                let profile = match settings.priority {
                    EventPriority::LowLatency => 0,
                    EventPriority::Bulk => profile,
                };
                let (microseconds, count) = setting(profile);
                settings.moderation_microseconds = microseconds;
                settings.moderation_count = count;
            },
            |command| self.hw.execute(command),
        );
    }
}

/// How long an interrupt is put off, and how many events are too many for that.
fn setting(profile: usize) -> (u16, u16) {
    match MICROSECONDS.get(profile) {
        None | Some(0) => (0, 0),
        Some(&microseconds) => (microseconds, COUNT),
    }
}

/// Moderation of one queue that adapts to its traffic, by all vectors that it interrupts by: it may be served on
/// several processors at once.
#[pin_data]
pub(crate) struct Moderation {
    #[pin]
    dim: NetDim<Target>,
    /// Completions, free-running.
    completions: Atomic<u64>,
    adaptive: Atomic<u32>,
}

impl Moderation {
    /// Of `queue`, which is not moderated yet.
    pub(crate) fn new(hw: &Arc<Hardware>, queue: &Arc<EventQueue>) -> impl PinInit<Self> {
        let target = Target {
            hw: hw.clone(),
            queue: queue.clone(),
        };
        pin_init!(Self {
            dim <- NetDim::new(target),
            completions: Atomic::new(0),
            adaptive: Atomic::new(0),
        })
    }

    /// Events were handled that stand for so many `completions`. Runs in the interrupt.
    #[inline]
    pub(crate) fn note(&self, completions: u64) {
        self.completions.fetch_add(completions, Relaxed);
    }

    /// The queue was served in an interrupt. Runs in it.
    #[inline]
    pub(crate) fn served(&self) {
        let target = self.dim.target();
        let interrupts = target.queue.interrupts();
        if interrupts % LOOK == 0 {
            self.look(target);
        }
        if self.adaptive.load(Relaxed) != 0 {
            let counts = || {
                let interrupts = target.queue.interrupts();
                (interrupts as u16, self.completions.load(Relaxed))
            };
            self.dim.sample(counts);
        }
    }

    /// Finds out whether moderation is to adapt.
    #[cold]
    fn look(&self, target: &Target) {
        let sink = &target.hw.sink;
        let adaptive = sink.with_device(|device| device.adaptive_moderation());
        let adaptive = adaptive.unwrap_or(false) && !target.queue.is_low_latency();
        self.adaptive.store(adaptive.into(), Relaxed);
        if !adaptive {
            self.dim.rest();
        }
    }
}

#[kunit_tests(ferrite_moderation)]
mod tests {
    use super::*;

    #[test]
    fn the_first_profile_puts_nothing_off_and_each_next_one_more() {
        assert_eq!(setting(0), (0, 0));
        for profile in 1..PROFILES {
            let ((before, _), (microseconds, count)) = (setting(profile - 1), setting(profile));
            assert!(microseconds > before && count == COUNT);
        }
        // Whatever is asked for.
        assert_eq!(setting(PROFILES), (0, 0));
    }
}
