// SPDX-License-Identifier: GPL-2.0

//! Reaching a device from interrupt handlers that are older than it.

use super::{Device, Driver, Ops};
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use core::ptr::NonNull;
use kernel::prelude::*;

/// Events of the device as a whole.
pub trait EventOps: Driver {
    /// Where the driver's interrupt handlers raise them.
    fn event_sink(dev: &Device<Self>) -> &EventSink<Self>;

    /// Something happened that was raised in the event sink: the bits are the driver's own. What
    /// happened before the device was registered comes as soon as it is. Atomic context.
    fn device_events(dev: &Device<Self>, events: u32);
}

impl<D: EventOps> Ops<D> {
    /// Has the driver's event sink used while the device is registered.
    pub const fn with_events(mut self) -> Self {
        self.events = Some(Hooks {
            attach: attach::<D>,
            detach: detach::<D>,
        });
        self
    }
}

/// What is done with a driver's event sink when a device comes and goes.
pub(super) struct Hooks<D: Driver> {
    /// The device is registered. `detach` must be called before it goes.
    pub(super) attach: unsafe fn(&Device<D>),
    /// It is about to go.
    pub(super) detach: fn(&Device<D>),
}

/// # Safety
///
/// As for [`EventSink::attach`].
unsafe fn attach<D: EventOps>(dev: &Device<D>) {
    // SAFETY: The caller vouches that the device is registered until `detach`.
    unsafe { D::event_sink(dev).attach(dev) }
}

fn detach<D: EventOps>(dev: &Device<D>) {
    D::event_sink(dev).detach();
}

/// Where events of a device as a whole go, from before it is registered until after.
///
/// The interrupt handlers of an adapter work before its RDMA device exists, and after. A driver
/// returns one of these from [`EventOps::event_sink`]. While the device is registered, what is raised
/// here is passed to [`EventOps::device_events`]; what is raised before is kept until then.
#[pin_data]
pub struct EventSink<D: EventOps> {
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

impl<D: EventOps> EventSink<D> {
    /// Returns an initialiser for a sink whose device is not registered yet.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            mailbox <- new_irq_spinlock!(Mailbox::Before(0), "rdma::EventSink"),
        })
    }

    /// Something happened: each bit of `events` is for the driver to give a meaning. May be called
    /// in interrupt context; [`EventOps::device_events`] runs with interrupts off.
    pub fn raise(&self, events: u32) {
        let mut mailbox = self.mailbox.lock();
        if let Some(Registered(device)) = mailbox.raise(events) {
            // SAFETY: By the invariant of `Registered` the device is valid, and it stays so while
            // the lock is held, because `detach` takes it.
            D::device_events(unsafe { device.as_ref() }, events);
        }
    }

    /// Calls `f` with the device while it is registered, with interrupts off. May be called in interrupt
    /// context, but not by [`EventOps::device_events`].
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
