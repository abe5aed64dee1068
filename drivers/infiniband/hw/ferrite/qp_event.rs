// SPDX-License-Identifier: GPL-2.0

//! Events of queue pairs, on their way from the interrupt to the consumer.
//!
//! Kernel consumers may sleep in their handler, so that events are passed on by a work item. There
//! is one for each queue pair, made with it: passing an event on needs no memory, and no event is
//! lost. An event that happens again before the consumer was told is told once.

use crate::{
    device::Ferrite,
    kernel_ext::{
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        workqueue::OwnedQueue, //
    },
    rdma::{
        Qp,
        QpEvent,
        QpRef, //
    },
};
use kernel::{
    prelude::*,
    sync::Arc,
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// Each kind of event, in the order in which those that wait are told: what ends a queue pair
/// comes after what happened in its life, and that no more receives are used comes last, as
/// consumers give the queue pair up then.
const ORDER: [QpEvent; 7] = [
    QpEvent::CommunicationEstablished,
    QpEvent::PathMigrated,
    QpEvent::SendQueueDrained,
    QpEvent::RequestError,
    QpEvent::AccessError,
    QpEvent::Fatal,
    QpEvent::LastWqeReached,
];

/// What waits to be told, and to whom. There is a target whenever there is an event.
struct Waiting<T> {
    target: Option<T>,
    /// A bit for each kind, by its place in [`ORDER`].
    events: u32,
}

impl<T> Waiting<T> {
    const fn new() -> Self {
        Self {
            target: None,
            events: 0,
        }
    }

    fn add(&mut self, event: QpEvent, target: impl FnOnce() -> T) {
        if let Some(place) = ORDER.iter().position(|kind| *kind == event) {
            self.events |= 1 << place;
            self.target.get_or_insert_with(target);
        }
    }

    /// Takes everything, in order.
    fn take(&mut self) -> Option<(T, impl Iterator<Item = QpEvent>)> {
        let events = core::mem::take(&mut self.events);
        let target = self.target.take()?;
        let told = (ORDER.into_iter().enumerate())
            .filter(move |(place, _)| events & 1 << place != 0)
            .map(|(_, event)| event);
        Some((target, told))
    }
}

/// The events of a queue pair that its consumer has yet to be told of.
///
/// They hold a reference to the queue pair while there are any: destroying it waits until they
/// were told.
#[pin_data]
pub(crate) struct QpEvents {
    #[pin]
    waiting: IrqSpinLock<Waiting<QpRef<Ferrite>>>,
    #[pin]
    work: Work<QpEvents>,
}

impl_has_work! {
    impl HasWork<Self> for QpEvents { self.work }
}

impl QpEvents {
    /// No events yet.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                waiting <- new_irq_spinlock!(Waiting::new(), "ferrite_qp_events"),
                work <- new_work!("ferrite_qp_events"),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Has the consumer of `qp`, whose events these are, told on `queue`. May be called from any
    /// context, and cannot fail.
    pub(crate) fn raise(self: &Arc<Self>, queue: &OwnedQueue, qp: &Qp<Ferrite>, event: QpEvent) {
        // One that ends has told what there was to tell.
        let Some(qp) = qp.get_ref() else { return };
        self.waiting.lock().add(event, || qp);
        // Where it is queued already, it has yet to look.
        drop(queue.enqueue(self.clone()));
    }
}

impl WorkItem for QpEvents {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let taken = this.waiting.lock().take();
        if let Some((qp, events)) = taken {
            events.for_each(|event| qp.report(event));
        }
    }
}

#[kunit_tests(ferrite_qp_event)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_event_is_told_once_and_the_last_receive_is_told_last() -> Result {
        let mut waiting = Waiting::new();
        for _ in 0..1000 {
            for event in ORDER.iter().rev() {
                waiting.add(*event, || 7);
            }
        }
        let (target, mut events) = waiting.take().ok_or(EINVAL)?;
        assert_eq!(target, 7);
        for event in ORDER {
            assert_eq!(events.next(), Some(event));
        }
        assert!(events.next().is_none());
        assert_eq!(ORDER.last().copied(), Some(QpEvent::LastWqeReached));
        Ok(())
    }

    #[test]
    fn what_happens_while_the_consumer_is_told_is_told_next() -> Result {
        let mut waiting = Waiting::new();
        waiting.add(QpEvent::Fatal, || 1);
        let (_, mut told) = waiting.take().ok_or(EINVAL)?;
        waiting.add(QpEvent::LastWqeReached, || 2);
        assert_eq!(told.next(), Some(QpEvent::Fatal));
        assert!(told.next().is_none());
        let (target, mut told) = waiting.take().ok_or(EINVAL)?;
        assert_eq!(target, 2);
        assert_eq!(told.next(), Some(QpEvent::LastWqeReached));
        assert!(waiting.take().is_none());
        Ok(())
    }
}
