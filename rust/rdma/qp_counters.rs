// SPDX-License-Identifier: GPL-2.0

//! Counters that a device keeps per queue pair, and what administrators bind them to.
//!
//! The core calls a counter what is a set of them: it has the names of the port's, queue pairs are bound to
//! it by hand (`rdma statistic qp bind`) or by a rule (`rdma statistic qp set ... auto`), and it counts what
//! they do from then on. What the core shows for a port is what [`CounterOps::read_counters`] says, *and* all
//! that is, or was, counted by sets of that port: the driver leaves that out of what it says.

use super::counters::value_places;
use super::{kind, CounterOps, Device, New, Object, Ops, Qp, QpOps};
use crate::bindings;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// A set of counters that queue pairs are bound to.
pub type QpCounter<D> = Object<kind::Counter, D>;

/// Counters of queue pairs.
///
/// Operations on one set are called one at a time. The driver's data of a set is dropped when the last
/// queue pair has left it: by then the core has read it for the last time.
pub trait QpCounterOps: CounterOps + QpOps {
    /// Driver's data of a set of counters.
    type Counter: Send + Sync;

    /// Whether queue pairs have the counter at this place among the names of the port's; the others are
    /// not shown.
    fn counts(dev: &Device<Self>, place: usize) -> bool;

    /// Makes a set, and tells its number ([`New::set_number`]). May sleep.
    fn create_counter<'a>(new: New<'a, kind::Counter, Self>) -> Result<&'a QpCounter<Self>>;

    /// From now on the set counts what a queue pair does, too. May sleep.
    ///
    /// `EBUSY` where it is bound to this one or another: the core looks whether it is, but without a lock, so that
    /// several who bind it at once come here one after the other.
    fn bind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>) -> Result;

    /// The set counts no more what a queue pair does, but keeps what it has counted. May sleep.
    ///
    /// A queue pair leaves before it is destroyed, whatever the device says to it: there is no way to fail.
    fn unbind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>);

    /// Reads a set, in the order of the names of the port's counters. May sleep.
    fn read_counter(counter: &QpCounter<Self>, values: &mut [u64]) -> Result;
}

impl<D: QpCounterOps> Ops<D> {
    /// Offers counters of queue pairs.
    pub const fn with_qp_counters(mut self) -> Self {
        self.raw.counter_init = Some(counter_init);
        self.raw.counter_alloc_stats = Some(counter_alloc_stats::<D>);
        self.raw.counter_bind_qp = Some(counter_bind_qp::<D>);
        self.raw.counter_unbind_qp = Some(counter_unbind_qp::<D>);
        self.raw.counter_update_stats = Some(counter_update_stats::<D>);
        self.raw.counter_dealloc = Some(counter_dealloc::<D>);
        self.raw.size_rdma_counter = QpCounter::<D>::SIZE;
        self
    }
}

impl<D: QpCounterOps> New<'_, kind::Counter, D> {
    /// Tells the core the number of the set: not zero, and that of no other set of the device.
    pub fn set_number(&mut self, number: u32) {
        // SAFETY: The core is making the set and shows it to nobody before the operation returns, and only
        // `New` leads to it.
        unsafe { (*self.as_raw()).id = number }
    }
}

/// What the core calls for each set it allocates: the driver's data is made with the first queue pair, as the
/// core frees a set that it can bind none to without another word.
///
/// # Safety
///
/// None: it is `unsafe` for the type that the core's table has.
unsafe extern "C" fn counter_init(_counter: *mut bindings::rdma_counter) {}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a set that it has just allocated.
unsafe extern "C" fn counter_alloc_stats<D: QpCounterOps>(
    counter: *mut bindings::rdma_counter,
) -> *mut bindings::rdma_hw_stats {
    // SAFETY: `alloc_and_bind` has set the device, which is a `Device<D>`, as it has this table, and which
    // those who ask for a set, or the caller of `ib_modify_qp`, keep.
    let dev = unsafe { Device::<D>::from_raw((*counter).device) };
    let descriptions = dev.counters();
    let stats = descriptions.alloc_stats();
    if stats.is_null() {
        return stats;
    }
    // The core adds up the sets of a port and its own counters place by place, so that there have to be as
    // many. Those that are disabled it shows for none of the sets.
    for place in (0..descriptions.len()).filter(|&place| !D::counts(dev, place)) {
        let (word, bit) = (
            place / c_ulong::BITS as usize,
            place % c_ulong::BITS as usize,
        );
        // SAFETY: `rdma_alloc_hw_stats_struct` has made a bitmap, zeroed, with a bit for each counter; nobody
        // else has it yet.
        unsafe { *(*stats).is_disabled.add(word) |= 1 << bit };
    }
    stats
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`, with the lock of `counter` held.
unsafe extern "C" fn counter_bind_qp<D: QpCounterOps>(
    counter: *mut bindings::rdma_counter,
    qp: *mut bindings::ib_qp,
    _port: u32,
) -> c_int {
    from_result(|| {
        // SAFETY: The core has the set, with its lock held; the number is that of `create_counter`, or still
        // the zero that it was allocated with.
        let is_new = unsafe { (*counter).id } == 0;
        if is_new {
            // SAFETY: `alloc_and_bind` got it from `rdma_zalloc_drv_obj`: zeroed, `size_rdma_counter` bytes,
            // and shows it to nobody before this returns.
            unsafe { QpCounter::create(counter, D::create_counter) }?;
            // SAFETY: The core has it, and nobody else is shown it before this returns. One without a number would be
            // made again with the next queue pair.
            if unsafe { (*counter).id } == 0 {
                // SAFETY: It was created just now; the core frees it without looking at it again.
                unsafe { QpCounter::<D>::finish(counter) };
                return Err(EINVAL);
            }
        }
        // SAFETY: `create_counter` made the set, now or when it had no number.
        let set = unsafe { QpCounter::<D>::from_raw(counter) };
        // SAFETY: `create_qp` made the queue pair. Nobody destroys it meanwhile: who calls has a count of the
        // resource, for which `rdma_restrack_begin_del` waits first thing, or is in `ib_modify_qp`, whose
        // caller has the queue pair (a process's is locked, a kernel user does not destroy it under a call of
        // its own).
        let bound = D::bind_counter(set, unsafe { Object::from_raw(qp) });
        if let Err(error) = bound {
            if is_new {
                // SAFETY: It was created above; the core frees it without looking at it again.
                unsafe { QpCounter::<D>::finish(counter) };
            }
            return Err(error);
        }
        // SAFETY: The core looks at the field to see which set it is bound to, without a lock of ours; this is
        // where drivers set it.
        unsafe { ptr::addr_of_mut!((*qp).counter).write_volatile(counter) };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue pair that was bound, with the
/// lock of its set held.
unsafe extern "C" fn counter_unbind_qp<D: QpCounterOps>(
    qp: *mut bindings::ib_qp,
    _port: u32,
) -> c_int {
    // SAFETY: `create_qp` made the queue pair. What is here is written with the lock of the set held alone.
    let counter = unsafe { (*qp).counter };
    if counter.is_null() {
        // Somebody else has unbound it since the core looked, before it had that lock.
        return EINVAL.to_errno();
    }
    // SAFETY: `counter_bind_qp` put the set there, and the core keeps a count of it for the queue pair until this has
    // returned.
    let set = unsafe { QpCounter::<D>::from_raw(counter) };
    // SAFETY: `create_qp` made the queue pair. `ib_destroy_qp_user` calls this before it destroys it; others
    // have a count of the resource, for which that waits.
    D::unbind_counter(set, unsafe { Object::from_raw(qp) });
    // SAFETY: The core looks at the field to see which set it is bound to, without a lock of ours; this is
    // where drivers clear it.
    unsafe { ptr::addr_of_mut!((*qp).counter).write_volatile(ptr::null_mut()) };
    0
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a set that a queue pair was bound to, with
/// its lock held.
unsafe extern "C" fn counter_update_stats<D: QpCounterOps>(
    counter: *mut bindings::rdma_counter,
) -> c_int {
    from_result(|| {
        // SAFETY: The core lists sets, and asks for their values, from the first bind on until
        // `rdma_restrack_del`, which is before `counter_dealloc`.
        let set = unsafe { QpCounter::<D>::from_raw(counter) };
        // SAFETY: The set keeps its `stats`, those of `counter_alloc_stats`, until it is freed.
        let (count, first) = unsafe { value_places((*counter).stats) };
        let mut values = KVec::from_elem(0u64, count, GFP_KERNEL)?;
        D::read_counter(set, &mut values)?;
        for (place, value) in values.iter().enumerate() {
            // SAFETY: There are `count` values. The lock of the set is held, so that nobody else writes; the
            // core reads them without it, hence no reference and the volatile write.
            unsafe { first.add(place).write_volatile(*value) };
        }
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a set that it frees next.
unsafe extern "C" fn counter_dealloc<D: QpCounterOps>(
    counter: *mut bindings::rdma_counter,
) -> c_int {
    // SAFETY: `counter_release` calls this for a set that was bound, and so prepared; it has taken it from its
    // list and waited for those who had it from there, and no queue pair is bound to it.
    unsafe { QpCounter::<D>::finish(counter) };
    0
}
