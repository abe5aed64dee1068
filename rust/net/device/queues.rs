// SPDX-License-Identifier: GPL-2.0

//! The queues that a device sends by: when they are stopped and woken, and frames on their way to the driver.

use super::{Device, Driver, Xmit, STARTED};
use crate::bindings;
use crate::net::{Ops, Rtnl, Skb};
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::Relaxed;

/// A driver that wants to know of queues that are stuck.
pub trait TimeoutOps: Driver {
    /// A queue was [stopped](Device::stop_queue) for seconds, while there was a carrier. In softirqs.
    fn tx_timeout(dev: &Device<Self>, queue: u16);
}

impl<D: Driver> Device<D> {
    fn check_queue(&self, queue: u16) -> bool {
        // SAFETY: The reference keeps the device; the number does not change.
        u32::from(queue) < unsafe { bindings::netdev_num_tx_queues(self.as_raw()) }
    }

    /// No more frames are to be sent by a queue.
    ///
    /// What makes room may have happened meanwhile: who stops a queue looks once more, and
    /// [wakes](Self::wake_queue) it if there is room.
    pub fn stop_queue(&self, queue: u16) {
        if self.check_queue(queue) {
            // SAFETY: The reference keeps the device, which has that queue.
            unsafe { bindings::netif_stop_subqueue(self.as_raw(), queue) };
            // What made room looks whether the queue is stopped, after it has; this looks for room next.
            kernel::sync::barrier::smp_mb();
        }
    }

    /// Frames may be sent by a queue again, if it was stopped. May be called from any context.
    pub fn wake_queue(&self, queue: u16) {
        if !self.check_queue(queue) {
            return;
        }
        kernel::sync::barrier::smp_mb();
        // SAFETY: The reference keeps the device, which has that queue.
        unsafe {
            if bindings::netif_subqueue_stopped(self.as_raw(), queue) {
                bindings::netif_wake_subqueue(self.as_raw(), queue);
            }
        }
    }

    /// Whether another frame is to be sent at once after the one that is being sent, so that the device need not be told
    /// of it before. To be called by `start_xmit`.
    pub fn has_more_to_send(&self) -> bool {
        // SAFETY: The function looks at a word of this processor, or of this task.
        unsafe { bindings::netdev_xmit_more() }
    }

    /// By how many of its queues it sends now.
    pub fn tx_queues(&self) -> u16 {
        // SAFETY: The reference keeps the device. The number is that of `Config` at most.
        unsafe { bindings::netdev_real_num_tx_queues(self.as_raw()) as u16 }
    }

    /// From now on it sends and receives by so many queues, of those that it was made with. `ENODEV` if it is about to go.
    pub fn set_queues(&self, rtnl: &Rtnl, queues: u16) -> Result {
        // What of its queues is shown to users is about to go, or gone.
        if !self.is_registered(rtnl) {
            return Err(ENODEV);
        }
        let queues = queues.into();
        // SAFETY: The reference keeps the device, and RTNL is held. The function looks whether it has so many, and sets
        // both numbers or neither.
        to_result(unsafe { bindings::netif_set_real_num_queues(self.as_raw(), queues, queues) })
    }

    /// Whether the driver may be given a frame of a queue; where not the queue is stopped. The caller has the queue's lock.
    #[inline]
    fn may_send(&self, queue: u16) -> bool {
        self.private().started.load(Relaxed) == STARTED || self.stop_woken(queue)
    }

    /// A queue sends of a device that is stopped: it was woken by who could not know. Whether it was started meanwhile.
    #[cold]
    fn stop_woken(&self, queue: u16) -> bool {
        self.stop_queue(queue);
        // Who starts it says so before he wakes all queues, and this looks after it has stopped one.
        let started = self.private().started.load(Relaxed) == STARTED;
        if started {
            self.wake_queue(queue);
        }
        started
    }
}

impl<D: TimeoutOps> Ops<D> {
    /// Has the driver told of queues that are stuck.
    pub const fn with_timeout(mut self) -> Self {
        self.netdev.ndo_tx_timeout = Some(tx_timeout::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with a buffer whose count passes to this.
pub(super) unsafe extern "C" fn start_xmit<D: Driver>(
    skb: *mut bindings::sk_buff,
    dev: *mut bindings::net_device,
) -> bindings::netdev_tx_t {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    // SAFETY: The caller passes its count, and the buffer was taken out of its list. Where there is another count, as
    // pktgen has one of what it sends, whoever has that touches nothing before this one is gone.
    let Some(owned) = (unsafe { Skb::from_raw(skb) }) else {
        return bindings::netdev_tx_NETDEV_TX_OK;
    };
    let given = if device.may_send(owned.queue()) {
        D::start_xmit(device, owned)
    } else {
        Xmit::Busy(owned)
    };
    match given {
        Xmit::Busy(back) if back.as_raw() == skb => {
            // The core has it again.
            let _ = back.into_raw();
            bindings::netdev_tx_NETDEV_TX_BUSY
        }
        // Of another one the core knows nothing; its own is gone.
        Xmit::Taken | Xmit::Busy(_) => bindings::netdev_tx_NETDEV_TX_OK,
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`.
unsafe extern "C" fn tx_timeout<D: TimeoutOps>(dev: *mut bindings::net_device, queue: c_uint) {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    D::tx_timeout(device, queue as u16);
}
