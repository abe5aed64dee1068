// SPDX-License-Identifier: GPL-2.0

//! Requests that are under way, and who waits for them.

use super::memory::{Buffer, Mr};
use super::request::Outcome;
use crate::bindings;
use crate::kernel_ext::completion::Completion;
use core::cell::UnsafeCell;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Release};
use kernel::sync::Arc;
use kernel::time::Jiffies;
use kernel::types::Opaque;

/// Room for one work request that is not complete yet.
#[repr(C)]
#[pin_data]
pub(super) struct Slot {
    // First, because the core hands this part back.
    pub(super) cqe: Opaque<bindings::ib_cqe>,
    pub(super) busy: Atomic<bool>,
    outcome: UnsafeCell<Option<Outcome>>,
    pub(super) held: UnsafeCell<Held>,
    #[pin]
    done: Completion,
}

/// What a work request uses, and has to stay until it is complete.
#[derive(Default)]
pub(super) struct Held {
    pub(super) _buffer: Option<Arc<Buffer>>,
    pub(super) _region: Option<Arc<Mr>>,
    pub(super) _registered: Option<Arc<Mr>>,
}

// SAFETY: `outcome` belongs to whoever took the slot, then to the completion handler, then to whoever
// waits for it; `held` to whoever took the slot, then to whoever waits for it, and in the end to who
// drops the queue pair. `busy` and `done` order these.
unsafe impl Send for Slot {}

// SAFETY: `outcome` and `held` are reached only by whose turn it is, which `busy` and `done` order.
unsafe impl Sync for Slot {}

impl Slot {
    pub(super) fn new() -> impl PinInit<Self> {
        let mut cqe: bindings::ib_cqe = pin_init::zeroed();
        cqe.done = Some(Self::complete);
        pin_init!(Self {
            cqe: Opaque::new(cqe),
            busy: Atomic::new(false),
            outcome: UnsafeCell::new(None),
            held: UnsafeCell::new(Held::default()),
            done <- Completion::new(),
        })
    }

    /// # Safety
    ///
    /// To be called by the core with a completion of a request that was posted with a slot.
    unsafe extern "C" fn complete(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
        // SAFETY: The caller vouches for the completion, which is its own until this returns.
        let wc = unsafe { &*wc };
        // SAFETY: Both views of the union are eight bytes of plain data, and this one was posted.
        let cqe = unsafe { *wc.__bindgen_anon_1.wr_cqe.as_ref() };
        // SAFETY: The caller vouches for a request that was posted with a slot, which begins with what the
        // core hands back; until `done` the slot is there, either since the queue pair is, or in the graveyard of the
        // completion queue, which is there for as long as that is polled.
        let slot = unsafe { &*cqe.cast::<Self>() };
        let outcome = Outcome::of(wc);
        // SAFETY: The request is complete, so that the slot is the handler's until `done`. What it
        // held is left to who waits: to end a region takes its time.
        unsafe { *slot.outcome.get() = Some(outcome) };
        slot.done.complete();
    }
}

/// A work request that was posted.
pub struct Ticket<'q> {
    pub(super) slot: &'q Slot,
}

impl Ticket<'_> {
    /// Whether the request is complete.
    pub fn is_complete(&self) -> bool {
        self.slot.done.is_done()
    }

    /// Waits until the request is complete. `ETIMEDOUT` leaves it to the queue pair.
    pub fn wait(self, timeout: Jiffies) -> Result<Outcome> {
        if !self.slot.done.wait_timeout(timeout) {
            return Err(ETIMEDOUT);
        }
        // SAFETY: `done` was waited for, which the handler signals last.
        let (outcome, held) = unsafe {
            (
                (*self.slot.outcome.get()).take(),
                core::mem::take(&mut *self.slot.held.get()),
            )
        };
        self.slot.busy.store(false, Release);
        drop(held);
        outcome.ok_or(EIO)
    }
}

/// Room for work requests of one queue: no more are posted to it, so that it has room for the one that drains
/// it.
pub(super) struct WrSlots(pub(super) KVec<Pin<KBox<Slot>>>);

impl WrSlots {
    pub(super) fn new(count: u32) -> Result<Arc<Self>> {
        let mut slots = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for _ in 0..count {
            slots.push(KBox::pin_init(Slot::new(), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        Ok(Arc::new(Self(slots), GFP_KERNEL)?)
    }

    /// Whether a request is under way, when nobody posts any more.
    pub(super) fn is_used(&self) -> bool {
        // One that is done may still be busy, where nobody waits for it.
        self.0
            .iter()
            .any(|slot| slot.busy.load(Acquire) && !slot.done.is_done())
    }

    /// Takes a slot for a request that holds what it uses; `EBUSY` where there is none.
    pub(super) fn take(&self, held: Held) -> Result<&Slot> {
        let slot = self
            .0
            .iter()
            .find(|slot| slot.busy.cmpxchg(false, true, Acquire).is_ok())
            .ok_or(EBUSY)?;
        // SAFETY: `busy` was false and was set by us in one step, so that the slot is ours.
        unsafe { *slot.held.get() = held };
        Ok(slot)
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_ulp)]
mod tests {
    use super::*;
    use crate::rdma::consumer::{Grave, Graveyard};
    use crate::rdma::ulp::Qp;
    use crate::rdma::WcStatus;
    use core::ptr;

    /// What the core says of a request.
    fn report(cqe: *mut bindings::ib_cqe) {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        wc.status = WcStatus::Success.as_raw();
        // SAFETY: Both views of the union are eight bytes of plain data.
        unsafe { *wc.__bindgen_anon_1.wr_cqe.as_mut() = cqe };
        // SAFETY: As the core does; the test hands in that of a slot.
        unsafe { Slot::complete(ptr::null_mut(), &mut wc) };
    }

    #[test]
    fn no_more_is_posted_than_a_queue_was_made_for() -> Result {
        let slots = WrSlots::new(2)?;
        let first = slots.take(Held::default())?;
        slots.take(Held::default())?;
        assert_eq!(slots.take(Held::default()).err(), Some(EBUSY));
        Qp::give_back(first);
        slots.take(Held::default())?;
        assert_eq!(slots.take(Held::default()).err(), Some(EBUSY));
        // One that was made for none has none.
        let none = WrSlots::new(0)?;
        assert_eq!(none.take(Held::default()).err(), Some(EBUSY));
        Ok(())
    }

    #[test]
    fn what_was_not_drained_stays_until_nobody_polls() -> Result {
        let graveyard = KBox::pin_init(Graveyard::new(), GFP_KERNEL)?;
        let mut late = ptr::null_mut();
        for is_late in [false, true] {
            let slots = WrSlots::new(2)?;
            late = slots.take(Held::default())?.cqe.get();
            assert!(slots.is_used());
            if !is_late {
                report(late);
            }
            // As the queue pair does when it goes.
            if slots.is_used() {
                graveyard.bury(slots, Grave::new()?);
            }
            assert_eq!(graveyard.len(), usize::from(is_late));
        }
        report(late);
        Ok(())
    }
}
