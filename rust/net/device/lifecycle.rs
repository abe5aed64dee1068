// SPDX-License-Identifier: GPL-2.0

//! Up and down: a device is opened and stopped, restarted, and has hardware behind it or not.

use super::{Device, Driver, CHANGING, STARTED, STOPPED};
use crate::bindings;
use crate::net::Rtnl;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;
use kernel::sync::atomic::Relaxed;

impl<D: Driver> Device<D> {
    /// Whether it is up.
    pub fn is_running(&self) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_running(self.as_raw()) }
    }

    /// Has the driver open it, and queues polled and frames sent. `EBUSY` where the driver asks for that while it is told
    /// to open or to stop it.
    fn start(&self, rtnl: &Rtnl) -> Result {
        let started = &self.private().started;
        match started.load(Relaxed) {
            STARTED => return Ok(()),
            CHANGING => return Err(EBUSY),
            _ => {}
        }
        started.store(CHANGING, Relaxed);
        D::open(self, rtnl).inspect_err(|_| started.store(STOPPED, Relaxed))?;
        started.store(STARTED, Relaxed);
        for napi in self.napis() {
            // SAFETY: It was added when the device was made, and is disabled, as the device was not started.
            unsafe { bindings::napi_enable(napi.as_raw()) };
        }
        // Frames may wait that came while it was stopped: nobody else has them sent.
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_tx_wake_all_queues(self.as_raw()) };
        for napi in self.napis() {
            // What happened before it was enabled has told nobody.
            napi.schedule_from_task();
        }
        Ok(())
    }

    /// Has no frames sent and no queue polled any more, and the driver stop it, unless that is so, or about to be.
    fn halt(&self, rtnl: &Rtnl) {
        let started = &self.private().started;
        if started.load(Relaxed) != STARTED {
            return;
        }
        started.store(CHANGING, Relaxed);
        // SAFETY: The reference keeps the device. When this returns nobody is in `start_xmit`; nor will anybody be, as it
        // has had the lock of each queue since the device was said not to be started.
        unsafe { bindings::netif_tx_disable(self.as_raw()) };
        for napi in self.napis() {
            // SAFETY: It was enabled when the device was started. When this returns it is not polled, nor will be.
            unsafe { bindings::napi_disable(napi.as_raw()) };
        }
        D::stop(self, rtnl);
        started.store(STOPPED, Relaxed);
    }

    /// Whether there is hardware behind it: not where it was [detached](Self::detach) and not attached since.
    pub fn is_present(&self) -> bool {
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_device_present(self.as_raw()) }
    }

    /// Opens it where it is up, has [hardware](Self::detach) and could not be [restarted](Self::restart).
    pub fn reopen(&self, rtnl: &Rtnl) -> Result {
        if self.is_running() && self.is_present() {
            self.start(rtnl)?;
        }
        Ok(())
    }

    /// Makes a change that its queues must not see: where it is up it is stopped before and opened afterwards, which may
    /// fail. It has no queues that are polled then, until it is [opened again](Self::reopen), or brought down and up.
    pub fn restart<R>(&self, rtnl: &Rtnl, change: impl FnOnce() -> R) -> Result<R> {
        let started = self.private().started.load(Relaxed) == STARTED;
        self.halt(rtnl);
        let result = change();
        if started {
            self.start(rtnl)?;
        }
        Ok(result)
    }

    /// There is no hardware behind it any more: where it is up it is stopped, and users are told `ENODEV` until there is
    /// ([`Self::attach`]). What they have set of it stays. When this returns no queue is found to be
    /// [stuck](TimeoutOps::tx_timeout), nor will be.
    pub fn detach(&self, rtnl: &Rtnl) {
        // SAFETY: The reference keeps the device. The watchdog, which looks for queues that are stuck where there is
        // hardware, has the lock that the second function takes: also of a device that is up and could not be opened.
        unsafe {
            bindings::netif_device_detach(self.as_raw());
            bindings::netif_tx_disable(self.as_raw());
        }
        self.halt(rtnl);
    }

    /// There is hardware behind it, again: where it is up it is opened, and told again which frames are wanted. Where it
    /// cannot be opened it stays detached.
    pub fn attach(&self, rtnl: &Rtnl) -> Result {
        let running = self.is_running();
        if running {
            self.start(rtnl)?;
        }
        // SAFETY: The reference keeps the device.
        unsafe { bindings::netif_device_attach(self.as_raw()) };
        if running {
            // What was wanted meanwhile was not told to a device that was not there, and nobody tells it later. Setting
            // the flags has that done, also where they are what they were.
            // SAFETY: The reference keeps the device, which is up, and so registered; RTNL is held.
            unsafe {
                let flags = bindings::netif_get_flags(self.as_raw());
                bindings::dev_change_flags(self.as_raw(), flags, ptr::null_mut());
            }
        }
        Ok(())
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held.
pub(super) unsafe extern "C" fn open<D: Driver>(dev: *mut bindings::net_device) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| device.start(&rtnl).map(|()| 0))
}

/// # Safety
///
/// As for [`open`].
pub(super) unsafe extern "C" fn stop<D: Driver>(dev: *mut bindings::net_device) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    device.halt(&rtnl);
    0
}
