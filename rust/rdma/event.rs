// SPDX-License-Identifier: GPL-2.0

//! Reaching a device from interrupt handlers that are older than it.

use super::{Device, Driver};
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use core::ptr::NonNull;
use kernel::prelude::*;

/// A device for as long as it is registered, else nothing.
///
/// The interrupt handlers of an adapter work before its RDMA device exists, and after. A driver
/// that returns one of these from [`Driver::event_sink`] finds the device in it while there is one.
#[pin_data]
pub struct EventSink<D: Driver> {
    #[pin]
    device: IrqSpinLock<Attached<D>>,
}

/// # Invariants
///
/// The pointer, if any, is a registered device.
struct Attached<D: Driver>(Option<NonNull<Device<D>>>);

// SAFETY: Devices may be used from any task.
unsafe impl<D: Driver> Send for Attached<D> {}

impl<D: Driver> EventSink<D> {
    /// Returns an initialiser for a sink without a device.
    pub fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no pointer.
        pin_init!(Self {
            device <- new_irq_spinlock!(Attached(None), "rdma::EventSink"),
        })
    }

    /// Calls `f` with the device, if it is registered. May be called in interrupt context; `f` runs
    /// with interrupts off.
    pub fn with<R>(&self, f: impl FnOnce(&Device<D>) -> R) -> Option<R> {
        let guard = self.device.lock();
        // SAFETY: By the invariant of `Attached` the device is valid, and it stays so while the
        // lock is held, because `detach` takes it.
        guard.0.map(|device| f(unsafe { device.as_ref() }))
    }

    /// # Safety
    ///
    /// `device` must be initialised, and [`Self::detach`] be called before it goes.
    pub(super) unsafe fn attach(&self, device: &Device<D>) {
        // INVARIANT: By the contract of this function.
        self.device.lock().0 = Some(NonNull::from(device));
    }

    /// Forgets the device. Nobody uses it through the sink once this returns.
    pub(super) fn detach(&self) {
        self.device.lock().0 = None;
    }
}
