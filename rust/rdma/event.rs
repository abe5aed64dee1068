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
        self.events = Some(attach::<D>);
        self
    }
}

/// Has events passed to the driver of a device that was registered, until the result is dropped.
///
/// # Safety
///
/// The device must be registered, and the result be dropped before it, or its data, goes.
pub(super) type Attach<D> = unsafe fn(&Device<D>) -> Result<Attached>;

/// An event sink that leads to a device, until this is dropped.
///
/// It is the one that the driver named when it was attached: a driver that is asked again may name another.
///
/// # Invariants
///
/// `sink` is an `EventSink` of the type that `detach` is for, and outlives this.
pub(super) struct Attached {
    sink: NonNull<()>,
    detach: unsafe fn(NonNull<()>),
}

// SAFETY: A sink is `Sync`, and detached by a shared reference.
unsafe impl Send for Attached {}
// SAFETY: A reference to this leads to nothing.
unsafe impl Sync for Attached {}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the sink is valid, and of that type.
        unsafe { (self.detach)(self.sink) }
    }
}

/// `EBUSY` where the sink leads to another device.
///
/// # Safety
///
/// As for [`Attach`].
unsafe fn attach<D: EventOps>(dev: &Device<D>) -> Result<Attached> {
    // By the signature of `event_sink` it is there for as long as the device can be borrowed: until its data goes.
    let sink = D::event_sink(dev);
    // SAFETY: The caller vouches that the device is registered until the result is dropped, which detaches it.
    unsafe { sink.attach(dev)? };
    // INVARIANT: The sink is of that type. The caller vouches that the result is dropped before the data goes.
    Ok(Attached {
        sink: NonNull::from(sink).cast(),
        detach: detach::<D>,
    })
}

/// # Safety
///
/// `sink` must be a valid `EventSink<D>`.
unsafe fn detach<D: EventOps>(sink: NonNull<()>) {
    // SAFETY: The caller vouches for the sink.
    unsafe { sink.cast::<EventSink<D>>().as_ref() }.detach();
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

    /// Somebody comes; returns what was kept, to be told of now. `EBUSY` where somebody is there.
    pub(super) fn attach(&mut self, target: T) -> Result<u32> {
        let kept = match self {
            Self::Before(kept) => *kept,
            Self::Attached(_) => return Err(EBUSY),
            Self::After => 0,
        };
        *self = Self::Attached(target);
        Ok(kept)
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
    /// `device` must be registered, and [`Self::detach`] be called before it goes, if this succeeds.
    unsafe fn attach(&self, device: &Device<D>) -> Result {
        let mut mailbox = self.mailbox.lock();
        // INVARIANT: The caller vouches that the device is registered until `detach`.
        let kept = mailbox.attach(Registered(NonNull::from(device)))?;
        if kept != 0 {
            // With the lock held: what happens next is told after this.
            D::device_events(device, kept);
        }
        Ok(())
    }

    /// Forgets the device. Nobody uses it through the sink once this returns.
    fn detach(&self) {
        *self.mailbox.lock() = Mailbox::After;
    }
}
