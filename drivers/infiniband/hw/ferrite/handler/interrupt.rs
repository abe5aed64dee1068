// SPDX-License-Identifier: GPL-2.0

//! What is done in an interrupt of a handler.

use crate::{
    eq::EventQueue,
    hardware::Hardware,
    kernel_ext::irq::{
        Handler,
        Kind,
        Vectors, //
    },
    service,
    service::Served,
    steering::Steering, //
};
use kernel::{
    cpu::CpuId,
    cpumask::Cpumask,
    device::{
        Bound,
        Device, //
    },
    irq,
    irq::IrqReturn,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    }, //
};

/// Calls of a handler on a pin in a row that may find nothing, before the pin is taken for held by
/// a queue that should not.
const IDLE_CALLS: u32 = 16;

/// How often in a row a handler on a pin was called and found nothing.
struct Idle(u32);

impl Idle {
    /// A call found something, or not; returns which of `queues` is to be armed anew, if any.
    ///
    /// A queue that is empty and armed has not raised the pin (DRV-1-6), and most calls that find
    /// nothing are for others on the line. But a device may fail with no room for its last event, and
    /// a host that only takes an access for the end of the interrupt may be told of it after the
    /// access: then nothing but a doorbell makes the level fall. One now and then costs little and is
    /// no register read. Queues take turns, so that it costs others on the line no more where there
    /// are many; all had theirs long before the kernel gives a line up, after 100000 calls.
    fn note(&mut self, found: bool, queues: usize) -> Option<usize> {
        self.0 = if found { 0 } else { self.0.wrapping_add(1) };
        if self.0 == 0 || self.0 % IDLE_CALLS != 0 {
            return None;
        }
        Some((self.0 / IDLE_CALLS - 1) as usize % queues.max(1))
    }
}

/// What runs on one vector: the service of its event queues.
pub(super) struct Service {
    pub(super) hw: Arc<Hardware>,
    pub(super) vectors: Arc<Vectors>,
    pub(super) vector: u16,
    pub(super) queues: KVec<Served>,
    /// The event queues of all completion handlers.
    pub(super) handlers: Arc<KVec<Arc<EventQueue>>>,
    /// Who wants to know where it is steered to and arrives, once there is somebody.
    pub(super) steering: Option<Arc<Steering>>,
    /// Whether one of the queues is of completions: else nobody follows it.
    pub(super) has_completions: bool,
    /// The processor of its last interrupt.
    pub(super) processor: Atomic<u32>,
    /// [`Idle`] of the pin. Only the handler uses it, which does not run twice at a time.
    pub(super) idle: Atomic<u32>,
    pub(super) unhandled: Arc<Atomic<u64>>,
}

impl Service {
    /// Notes the processor that an interrupt arrives at. Where it is not the one of the last time, completion
    /// queues may have to follow: of an interrupt that is steered to several processors the kernel does not say which
    /// it has chosen, nor when it chooses another one as that goes offline.
    #[inline]
    fn note_processor(&self) {
        let cpu = CpuId::current().as_u32();
        if self.processor.load(Relaxed) != cpu {
            self.processor.store(cpu, Relaxed);
            if let Some(steering) = self.steering.as_ref().filter(|_| self.has_completions) {
                steering.settle_queues();
            }
        }
    }

    /// Serves the queues where some of the device are of low latency: those that another vector has, but
    /// whose interrupts arrive at this processor too, come first as well. Their own interrupt waits until
    /// this one ends.
    #[cold]
    fn serve_by_priority(&self) -> bool {
        let cpu = CpuId::current().as_u32();
        for served in self.queues.iter() {
            served.queue().note_processor(cpu);
        }
        let serves = |queue: &EventQueue| {
            let mut queues = self.queues.iter();
            queues.any(|served| served.queue().number() == queue.number())
        };
        let elsewhere = || {
            self.handlers.iter().filter(move |queue| {
                queue.is_low_latency() && queue.is_served_at(cpu) && !serves(queue)
            })
        };
        if elsewhere().next().is_none() {
            return service::serve(&self.queues, None::<fn(u32) -> u32>);
        }
        service::serve(
            &self.queues,
            Some(|most| {
                service::share(elsewhere(), most, |queue, most| {
                    let answers = self.hw.answers();
                    let handled = queue.turn(most, move |event| {
                        self.hw.dispatch(event, &answers, queue.number());
                    });
                    queue.end_turns(&self.hw.doorbells, handled);
                    handled
                })
            }),
        )
    }

    /// Calls on a pin: the line may be somebody else's interrupt.
    fn handle_pin(&self, found: bool) -> IrqReturn {
        let mut idle = Idle(self.idle.load(Relaxed));
        let turn = idle.note(found, self.queues.len());
        self.idle.store(idle.0, Relaxed);
        if self.hw.is_dead() {
            // It may ignore doorbells, too, and nothing it has to tell matters. Who stops it or resets it does the
            // same first.
            if found || turn.is_some() {
                self.vectors.disable_pin();
            }
        } else if let Some(served) = turn.and_then(|turn| self.queues.get(turn)) {
            served.queue().arm(&self.hw.doorbells);
        }
        if found {
            IrqReturn::Handled
        } else {
            self.unhandled
                .store(self.unhandled.load(Relaxed) + 1, Relaxed);
            IrqReturn::None
        }
    }
}

impl irq::Handler for Service {
    fn handle(&self, _dev: &Device<Bound>) -> IrqReturn {
        self.note_processor();
        let found = if self.hw.has_low_latency() {
            self.serve_by_priority()
        } else {
            service::serve(&self.queues, None::<fn(u32) -> u32>)
        };
        match self.vectors.kind() {
            Kind::Intx => self.handle_pin(found),
            // Message-signalled interrupts are ours alone. One that finds nothing was overtaken by
            // the service of a queue that shares the vector.
            Kind::Msi | Kind::MsiX => IrqReturn::Handled,
        }
    }
}

impl Handler for Service {
    fn steered(&self, mask: &Cpumask) {
        if let Some(steering) = &self.steering {
            steering.steered(self.vector, mask);
        }
    }
}

#[kunit_tests(ferrite_handler_interrupt)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_that_nothing_is_found_for_gets_its_doorbells_now_and_then() {
        let mut idle = Idle(0);
        for round in 0..7usize {
            for _ in 1..IDLE_CALLS {
                assert_eq!(idle.note(false, 3), None);
            }
            assert_eq!(idle.note(false, 3), Some(round % 3));
        }
        // Calls that find something are what there is a handler for.
        for _ in 0..100 * IDLE_CALLS {
            assert_eq!(idle.note(true, 3), None);
            assert_eq!(idle.note(false, 3), None);
        }
        // The count has no end, and a handler may have no queue.
        let mut idle = Idle(u32::MAX);
        assert_eq!(idle.note(false, 3), None);
        let mut idle = Idle(IDLE_CALLS - 1);
        assert_eq!(idle.note(false, 0), Some(0));
    }
}
