// SPDX-License-Identifier: GPL-2.0

//! Queues that are polled.
//!
//! They are part of their device: added when it is made, enabled while it is up, and deleted before it is freed.

use super::{Device, Driver, DropReason, Ops, Skb};
use crate::bindings;
use core::marker::PhantomData;
use kernel::container_of;
use kernel::prelude::*;
use kernel::types::Opaque;

/// A driver with queues that are polled.
pub trait NapiOps: Driver {
    /// A queue was [scheduled](Napi::schedule). Handles up to `budget` frames that have arrived, and returns how
    /// many; all there is to do that is not about frames that have arrived. In softirqs.
    ///
    /// Where these are fewer the queue is not polled again before it is scheduled.
    fn poll(context: &PollContext<'_, Self>, budget: u32) -> u32;

    /// A queue is not polled any more, until it is scheduled: interrupts may be let in. What has happened since
    /// [`Self::poll`] is to be noticed, by scheduling it again if need be.
    fn polled(_napi: &Napi<Self>) {}
}

pub(super) type PollFunction = unsafe extern "C" fn(
    napi: *mut bindings::napi_struct,
    budget: kernel::ffi::c_int,
) -> kernel::ffi::c_int;

/// A queue that is polled, with the driver's data of it.
pub struct Napi<D: Driver> {
    raw: Opaque<bindings::napi_struct>,
    queue: D::Queue,
}

// SAFETY: The core's part is used from any task, and the queue is `Send` and `Sync`.
unsafe impl<D: Driver> Send for Napi<D> {}
// SAFETY: The core's part has a state of its own that is changed atomically, and the queue is `Sync`.
unsafe impl<D: Driver> Sync for Napi<D> {}

impl<D: Driver> Napi<D> {
    /// One that is to be added to its device, before it is used otherwise.
    pub(super) fn new(queue: D::Queue) -> Self {
        Self {
            raw: Opaque::zeroed(),
            queue,
        }
    }

    pub(super) fn as_raw(&self) -> *mut bindings::napi_struct {
        self.raw.get()
    }

    /// The driver's data.
    pub fn queue(&self) -> &D::Queue {
        &self.queue
    }

    /// Its device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: A reference to a queue is given by that to its device only, and it was added to that when it was
        // made.
        unsafe { Device::from_raw(bindings::napi_dev(self.as_raw())) }
    }

    /// Has it polled soon, if its device is up. From interrupts and softirqs.
    pub fn schedule(&self) {
        // SAFETY: It was added to its device, which the reference keeps.
        unsafe { bindings::napi_schedule(self.as_raw()) };
    }

    /// The same from anywhere but interrupts.
    pub fn schedule_from_task(&self) {
        // SAFETY: It was added to its device, which the reference keeps. Bottom halves are enabled as often as
        // disabled; that is what has it polled.
        unsafe {
            bindings::local_bh_disable();
            bindings::napi_schedule(self.as_raw());
            bindings::local_bh_enable();
        }
    }
}

/// Runs `f` while no softirq does on this processor: for locks that those take, too. By tasks.
pub fn without_bottom_halves<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: They may be disabled by any task, and are enabled again below.
    unsafe { bindings::local_bh_disable() };
    let result = f();
    // SAFETY: They were disabled above.
    unsafe { bindings::local_bh_enable() };
    result
}

/// A queue that is being polled.
pub struct PollContext<'a, D: Driver> {
    napi: &'a Napi<D>,
    /// How many frames that have arrived may be handled; none where this may not be a softirq, but somebody who wants
    /// room to send (netpoll).
    budget: u32,
    /// Of one processor.
    _not_send: PhantomData<*mut ()>,
}

impl<'a, D: Driver> PollContext<'a, D> {
    /// # Safety
    ///
    /// The queue must be polled now, by this processor, with that budget, or not be polled by anybody.
    pub(super) unsafe fn new(napi: &'a Napi<D>, budget: u32) -> Self {
        Self {
            napi,
            budget,
            _not_send: PhantomData,
        }
    }

    /// The queue.
    pub fn napi(&self) -> &Napi<D> {
        self.napi
    }

    /// Its device.
    pub fn device(&self) -> &Device<D> {
        self.napi.device()
    }

    /// A socket buffer for a frame that has arrived, empty, with room for `len` bytes. `ENOMEM` where there is none, and
    /// `EPERM` where the budget is 0.
    pub fn buffer(&self, len: usize) -> Result<Skb> {
        if self.budget == 0 {
            return Err(EPERM);
        }
        let len = u32::try_from(len).map_err(|_| EINVAL)?;
        // SAFETY: The queue is being polled, by this processor, as this says, in a softirq, as there is a budget.
        let raw = unsafe { bindings::napi_alloc_skb(self.napi.as_raw(), len) };
        // SAFETY: It was made just now, and is ours.
        unsafe { Skb::from_raw(raw) }.ok_or(ENOMEM)
    }

    /// Frees the buffer of a frame that was sent.
    pub fn sent(&self, skb: Skb) {
        // SAFETY: The count passes to the function. The budget says whether this is in a softirq.
        unsafe { bindings::napi_consume_skb(skb.into_raw(), self.budget as kernel::ffi::c_int) };
    }

    /// A frame has arrived, which begins with its Ethernet header. It may be merged with others of its stream (GRO).
    /// Where the budget is 0 it is dropped.
    pub fn receive(&self, skb: Skb) {
        if self.budget == 0 {
            skb.discard(DropReason::NotReady);
            return;
        }
        if let Some(skb) = self.device().prepare_received(skb) {
            // SAFETY: The queue is being polled, by this processor, as this says, in a softirq, as there is a budget;
            // the frame is of its device, and the count passes to the function.
            unsafe { bindings::napi_gro_receive(self.napi.as_raw(), skb.into_raw()) };
        }
    }
}

impl<D: NapiOps> Ops<D> {
    /// Has the driver's queues polled.
    pub const fn with_napi(mut self) -> Self {
        self.poll = Some(poll::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core with a queue of a device of `D`, to poll it.
unsafe extern "C" fn poll<D: NapiOps>(
    raw: *mut bindings::napi_struct,
    budget: kernel::ffi::c_int,
) -> kernel::ffi::c_int {
    let raw = raw.cast::<Opaque<bindings::napi_struct>>();
    // SAFETY: The caller vouches for the queue, which stays until it is disabled: that waits for this.
    let napi = unsafe { &*container_of!(raw, Napi<D>, raw) };
    let budget = budget as u32;
    // SAFETY: It is what the core calls this for.
    let context = unsafe { PollContext::new(napi, budget) };
    let work = D::poll(&context, budget).min(budget) as kernel::ffi::c_int;
    if work == budget as kernel::ffi::c_int {
        // Also where it is none: netpoll wants to be rid of frames that were sent, and the queue stays scheduled.
        return work;
    }
    // SAFETY: It is being polled here, and less was done than could be; what is returned says the same.
    let is_complete = unsafe { bindings::napi_complete_done(napi.as_raw(), work) };
    if is_complete {
        D::polled(napi);
    }
    work
}
