// SPDX-License-Identifier: GPL-2.0

//! Where events of a completion queue go, and how many at a time: what the device was told last.
//!
//! A binding is locked for as long as the device takes to answer, and whose queue it is can have it locked most of
//! the time. Those who look after all queues do not wait for that: they say that the binding is to be settled, and
//! who has it settles it when he is done, in his own time.

use crate::{
    abi::{
        ModifyCompletionQueue,
        Plain, //
    },
    handler::Choice,
    kernel_ext::user,
    vector_map::Destination,
};
use kernel::{
    cpu::CpuId,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        barrier::smp_mb,
        Mutex, //
    },
};

/// Who puts a queue at a handler.
#[derive(Clone, Copy)]
pub(crate) enum Who {
    /// The kernel, or root by a file of debugfs.
    Kernel,
    /// The current process.
    Process,
}

impl Who {
    /// Whether he may have the handler of low latency that he asks for; see `priority.rs`.
    pub(crate) fn may_have(self, choice: Choice) -> bool {
        self.may(choice, user::may_administer_network)
    }

    /// Whether he may have any that he could ask for.
    pub(crate) fn may_have_any(self, choice: Choice) -> bool {
        self.may(choice, user::may_administer_network_noaudit)
    }

    fn may(self, choice: Choice, may_process: impl FnOnce() -> bool) -> bool {
        choice.names_one()
            && match self {
                Self::Kernel => true,
                Self::Process => may_process(),
            }
    }
}

/// Where events of a queue go, and how many at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    /// Its handler, if it has one.
    pub(crate) handler: Option<u16>,
    /// The processor of its consumer, if it goes to handlers that arrive there.
    pub(crate) follows: Option<CpuId>,
    /// It may be at a handler of low latency: it was put where it is by number, by somebody with the right.
    pub(crate) may_have_any: bool,
    pub(crate) moderation_count: u16,
    pub(crate) moderation_microseconds: u16,
}

impl Binding {
    /// Of a new queue: each completion is an event.
    pub(crate) const fn new(
        handler: Option<u16>,
        follows: Option<CpuId>,
        may_have_any: bool,
    ) -> Self {
        Self {
            handler,
            follows,
            may_have_any,
            moderation_count: 0,
            moderation_microseconds: 0,
        }
    }

    /// The command that tells the device, of queue `cqn`, where its handler is `destination` to the device.
    fn command(&self, cqn: u32, destination: Destination) -> ModifyCompletionQueue {
        ModifyCompletionQueue {
            cqn,
            eqn: destination.eqn,
            processor: destination.processor,
            moderation_count: self.moderation_count,
            moderation_microseconds: self.moderation_microseconds,
            ..ModifyCompletionQueue::zeroed()
        }
    }

    /// Has the device, by `execute`, make the change to queue `cqn`, if it is one for the device, to which a handler is
    /// its `destination`. What the device refused is as if nobody had asked.
    pub(crate) fn change(
        &mut self,
        cqn: u32,
        change: impl FnOnce(&mut Self),
        destination: impl Fn(Option<u16>) -> Destination,
        execute: impl FnOnce(&ModifyCompletionQueue) -> Result,
    ) -> Result {
        let mut next = *self;
        change(&mut next);
        let command = next.command(cqn, destination(next.handler));
        let before = self.command(cqn, destination(self.handler));
        if command.as_bytes() != before.as_bytes() {
            execute(&command)?;
        }
        *self = next;
        Ok(())
    }
}

/// A binding that others want settled who do not wait for it.
#[pin_data]
pub(crate) struct SharedBinding {
    /// Held while the device is told of a change: what it was told last is what stands here.
    #[pin]
    binding: Mutex<Binding>,
    /// It is to be settled, by who has it or by who asked for that.
    unsettled: Atomic<u32>,
}

impl SharedBinding {
    /// One that is `first`.
    pub(crate) fn new(first: Binding) -> impl PinInit<Self> {
        pin_init!(Self {
            binding <- new_mutex!(first, "ferrite_cq_binding"),
            unsettled: Atomic::new(0),
        })
    }

    /// Calls `change` with the binding, and `settle` afterwards if it is to be settled. Several changes are made one
    /// after the other, and each starts from what the one before left. Sleeps.
    pub(crate) fn change<R>(
        &self,
        change: impl FnOnce(&mut Binding) -> R,
        mut settle: impl FnMut(&mut Binding),
    ) -> R {
        let mut binding = self.binding.lock();
        let result = change(&mut binding);
        // Before others get it: many who change it without end do not put this off.
        self.settle_if_due(&mut binding, &mut settle);
        drop(binding);
        self.catch_up(settle);
        result
    }

    /// Has the binding settled: now by `settle`, or by who has it when he is done. Sleeps, but not for that.
    pub(crate) fn settle(&self, settle: impl FnMut(&mut Binding)) {
        // With all that there is to see when it is.
        self.unsettled.store(1, Release);
        self.catch_up(settle);
    }

    /// Settles a binding that is locked, if it is to be settled.
    fn settle_if_due(&self, binding: &mut Binding, settle: &mut impl FnMut(&mut Binding)) {
        if self.unsettled.xchg(0, Acquire) != 0 {
            settle(binding);
        }
    }

    /// Settles the binding as long as it is to be and nobody else has it.
    fn catch_up(&self, mut settle: impl FnMut(&mut Binding)) {
        loop {
            // Between the lock and the flag, in either order: one who asks and finds the lock taken was seen
            // by who had it, or will be.
            smp_mb();
            if self.unsettled.load(Relaxed) == 0 {
                return;
            }
            let Some(mut binding) = self.binding.try_lock() else {
                // Who has it looks before he lets go, and afterwards.
                return;
            };
            self.settle_if_due(&mut binding, &mut settle);
        }
    }
}

#[kunit_tests(ferrite_binding)]
mod tests {
    use super::*;
    use crate::abi;

    /// Handlers 0 and 1 have an event queue each, 2 and 3 share one, and the device looks others up.
    fn destination(handler: Option<u16>) -> Destination {
        let bound = |eqn| Destination { eqn, processor: 0 };
        match handler {
            None => Destination::NONE,
            Some(handler @ 0..=1) => bound(2 + handler),
            Some(2..=3) => bound(4),
            Some(handler) => Destination {
                eqn: abi::EQ_MAPPED,
                processor: handler,
            },
        }
    }

    #[test]
    fn a_queue_keeps_its_moderation_when_moved_and_its_handler_when_moderated() -> Result {
        let mut binding = Binding::new(Some(0), None, false);
        let mut told = KVec::new();
        let mut tell = |command: &ModifyCompletionQueue| {
            let told_now = (
                command.cqn,
                command.eqn,
                command.processor,
                command.moderation_count,
                command.moderation_microseconds,
            );
            told.push(told_now, GFP_KERNEL)?;
            Ok(())
        };
        let mut change =
            |change: &dyn Fn(&mut Binding)| binding.change(7, change, destination, &mut tell);
        change(&|binding| {
            binding.moderation_count = 8;
            binding.moderation_microseconds = 50;
        })?;
        change(&|binding| binding.handler = None)?;
        change(&|binding| binding.moderation_count = 9)?;
        change(&|binding| binding.handler = Some(1))?;
        change(&|binding| binding.handler = Some(5))?;
        assert_eq!(
            &told[..],
            &[
                (7, 2, 0, 8, 50),
                (7, abi::EQ_NONE, 0, 8, 50),
                (7, abi::EQ_NONE, 0, 9, 50),
                (7, 3, 0, 9, 50),
                (7, abi::EQ_MAPPED, 5, 9, 50)
            ]
        );
        Ok(())
    }

    #[test]
    fn a_change_that_the_device_refuses_is_none() {
        let mut binding = Binding::new(Some(0), None, false);
        let change = |binding: &mut Binding| binding.handler = Some(1);
        let refused = binding.change(7, change, destination, |_| Err(EIO));
        assert_eq!(refused, Err(EIO));
        assert_eq!(binding, Binding::new(Some(0), None, false));
    }

    #[test]
    fn the_device_is_not_told_what_it_knows_or_does_not_care_about() -> Result {
        let mut binding = Binding::new(Some(2), None, false);
        let cpu = CpuId::from_u32(0);
        // Both handlers are the same to the device.
        let change = |binding: &mut Binding| *binding = Binding::new(Some(3), cpu, true);
        binding.change(7, change, destination, |_| Err(EIO))?;
        assert_eq!(binding, Binding::new(Some(3), cpu, true));
        let change = |binding: &mut Binding| binding.moderation_count = 0;
        binding.change(7, change, destination, |_| Err(EIO))
    }

    #[test]
    fn only_who_names_a_handler_may_have_any() {
        for choice in [Choice::Vector(0), Choice::Near(1)] {
            assert!(Who::Kernel.may_have(choice) && Who::Kernel.may_have_any(choice));
            assert!(Who::Process.may(choice, || true));
            assert!(!Who::Process.may(choice, || false));
        }
        for choice in [Choice::None, Choice::local(), Choice::of_process(0)] {
            assert!(!Who::Kernel.may_have(choice) && !Who::Kernel.may_have_any(choice));
            // Nobody is asked for a right that nothing depends on.
            assert!(!Who::Process.may(choice, || unreachable!()));
        }
    }

    #[test]
    fn who_finds_a_binding_taken_does_not_wait_and_who_has_it_settles_it() -> Result {
        let first = Binding::new(Some(2), None, false);
        let shared = KBox::pin_init(SharedBinding::new(first), GFP_KERNEL)?;
        let settle_to = |handler| move |binding: &mut Binding| binding.handler = Some(handler);
        // Nobody asks: nothing is settled.
        shared.change(|binding| binding.moderation_count = 1, settle_to(9));
        assert_eq!(
            shared.change(|binding| binding.handler, settle_to(9)),
            Some(2)
        );
        // Nobody has it.
        shared.settle(settle_to(3));
        assert_eq!(
            shared.change(|binding| binding.handler, settle_to(9)),
            Some(3)
        );
        // Somebody has it, whatever he does, and settles it once.
        let mut settled = 0;
        shared.change(
            |binding| {
                shared.settle(|_| unreachable!());
                shared.settle(|_| unreachable!());
                binding.handler = Some(4);
            },
            |binding| {
                assert_eq!(binding.handler, Some(4));
                settled += 1;
            },
        );
        assert_eq!(settled, 1);
        // And again, where somebody asks meanwhile.
        let mut settled = 0;
        shared.settle(|_| {
            settled += 1;
            if settled < 3 {
                shared.settle(|_| unreachable!());
            }
        });
        assert_eq!(settled, 3);
        Ok(())
    }
}
