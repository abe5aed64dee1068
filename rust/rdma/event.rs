// SPDX-License-Identifier: GPL-2.0

//! Reaching a device from interrupt handlers that are older than it.

use super::{Device, Driver};
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use core::ptr::NonNull;
use kernel::prelude::*;

/// Where events of a device as a whole go, from before it is registered until after.
///
/// The interrupt handlers of an adapter work before its RDMA device exists, and after. A driver
/// returns one of these from [`Driver::event_sink`]. While the device is registered, what is raised
/// here is passed to [`Driver::device_events`]; what is raised before is kept until then.
#[pin_data]
pub struct EventSink<D: Driver> {
    #[pin]
    mailbox: IrqSpinLock<Mailbox<Registered<D>>>,
}

/// # Invariants
///
/// The pointer is a registered device.
struct Registered<D: Driver>(NonNull<Device<D>>);

// SAFETY: A `Device<D>` is `Sync`, and the pointer is used as a reference only.
unsafe impl<D: Driver> Send for Registered<D> {}

/// Events for somebody who comes later, and goes again. Each kind of event is a bit.
pub(super) enum Mailbox<T> {
    /// Nobody has come; what happened meanwhile.
    Before(u32),
    /// Somebody is there.
    Attached(T),
    /// Whoever was there has gone.
    After,
}

impl<T> Mailbox<T> {
    /// Who is to be told of `events` now, if somebody is there.
    pub(super) fn raise(&mut self, events: u32) -> Option<&T> {
        match self {
            Self::Before(kept) => {
                *kept |= events;
                None
            }
            Self::Attached(target) => Some(target),
            Self::After => None,
        }
    }

    /// Somebody comes; returns what was kept, to be told of now.
    pub(super) fn attach(&mut self, target: T) -> u32 {
        match core::mem::replace(self, Self::Attached(target)) {
            Self::Before(kept) => kept,
            _ => 0,
        }
    }
}

impl<D: Driver> EventSink<D> {
    /// Returns an initialiser for a sink whose device is not registered yet.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            mailbox <- new_irq_spinlock!(Mailbox::Before(0), "rdma::EventSink"),
        })
    }

    /// Something happened: each bit of `events` is for the driver to give a meaning. May be called
    /// in interrupt context; [`Driver::device_events`] runs with interrupts off.
    pub fn raise(&self, events: u32) {
        let mut mailbox = self.mailbox.lock();
        if let Some(Registered(device)) = mailbox.raise(events) {
            // SAFETY: By the invariant of `Registered` the device is valid, and it stays so while
            // the lock is held, because `detach` takes it.
            D::device_events(unsafe { device.as_ref() }, events);
        }
    }

    /// Calls `f` with the device while it is registered, with interrupts off. May be called in interrupt
    /// context, but not by [`Driver::device_events`].
    pub fn with_device<R>(&self, f: impl FnOnce(&Device<D>) -> R) -> Option<R> {
        match &*self.mailbox.lock() {
            // SAFETY: By the invariant of `Registered` the device is valid, and it stays so while the
            // lock is held, because `detach` takes it.
            Mailbox::Attached(Registered(device)) => Some(f(unsafe { device.as_ref() })),
            _ => None,
        }
    }

    /// # Safety
    ///
    /// `device` must be registered, and [`Self::detach`] be called before it goes.
    pub(super) unsafe fn attach(&self, device: &Device<D>) {
        let mut mailbox = self.mailbox.lock();
        // INVARIANT: The caller vouches that the device is registered until `detach`.
        let kept = mailbox.attach(Registered(NonNull::from(device)));
        if kept != 0 {
            // With the lock held: what happens next is told after this.
            D::device_events(device, kept);
        }
    }

    /// Forgets the device. Nobody uses it through the sink once this returns.
    pub(super) fn detach(&self) {
        *self.mailbox.lock() = Mailbox::After;
    }
}
