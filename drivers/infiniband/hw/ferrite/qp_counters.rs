// SPDX-License-Identifier: GPL-2.0

//! Counters of queue pairs, and sets of them that administrators bind queue pairs to.
//!
//! The device counts for each queue pair from when it was made, and knows no sets: a set is what its members
//! have counted since they were bound, and what former ones had counted when they left. So whatever a queue
//! pair does counts in one place only, in its own, and binding costs nothing while packets go.

mod registry;
mod set;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;

use self::{
    registry::Registry,
    set::Reader, //
};
use crate::{
    abi,
    abi::QueryQueuePairCounters,
    device::Ferrite,
    dma_types::QpCounters,
    hardware::Hardware,
    kernel_ext::errno,
    numbers::{
        Number,
        Numbers, //
    },
    rdma,
    rdma::{
        kind,
        Device,
        New,
        Qp,
        QpCounter, //
    },
    shares::Holder, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Counters in the order of [`abi::COUNTER_NAMES`].
pub(crate) type Values = [u64; abi::COUNTER_NAMES.len()];

/// No counters.
const NOTHING: Values = [0; abi::COUNTER_NAMES.len()];

/// Sets that a device can have.
const MOST_SETS: u32 = 1 << 16;

fn add(to: &mut Values, values: &Values) {
    for (to, value) in to.iter_mut().zip(values) {
        *to = to.wrapping_add(*value);
    }
}

fn subtract(from: &mut Values, values: &Values) {
    for (from, value) in from.iter_mut().zip(values) {
        *from = from.wrapping_sub(*value);
    }
}

/// The sets of a device, and how their queue pairs are asked for what they have counted.
pub(crate) struct Sets {
    hw: Arc<Hardware>,
    numbers: Arc<Numbers>,
    registry: Arc<Registry>,
}

impl Sets {
    /// None, of this device.
    pub(crate) fn new(hw: &Arc<Hardware>) -> Result<Arc<Self>> {
        let sets = Self {
            hw: hw.clone(),
            numbers: Numbers::new(1..MOST_SETS)?,
            registry: Registry::new()?,
        };
        Ok(Arc::new(sets, GFP_KERNEL)?)
    }

    /// What queue pairs have counted together. Sleeps.
    fn counted(&self, qpns: &[u32]) -> Result<Values> {
        self.hw.query(&query(qpns)).map(|QpCounters(values)| values)
    }

    /// The same of one that leaves its set, perhaps since its process was killed. Sleeps.
    fn counted_last(&self, qpns: &[u32]) -> Result<Values> {
        let counters = self.hw.query_for_others(&query(qpns));
        counters.map(|QpCounters(values)| values)
    }

    /// What all sets have counted, those that are no more too: the core adds it to what it is told of the
    /// port. Sleeps.
    pub(crate) fn read_all(&self) -> Values {
        self.registry.read_all(&mut |qpns| self.counted(qpns))
    }
}

/// Takes what sets have counted from what all have. A packet to a group counts once for the port, and for each
/// member that gets it.
pub(crate) fn take_away(all: &mut Values, of_sets: &Values) {
    for (all, of_sets) in all.iter_mut().zip(of_sets) {
        *all = all.saturating_sub(*of_sets);
    }
}

/// Asks for counters of at most [`abi::COUNTED_QUEUE_PAIRS`] queue pairs.
fn query(qpns: &[u32]) -> QueryQueuePairCounters {
    let mut query = QueryQueuePairCounters {
        count: qpns.len() as u32,
        reserved: 0,
        qpns: [0; abi::COUNTED_QUEUE_PAIRS],
    };
    for (to, qpn) in query.qpns.iter_mut().zip(qpns) {
        *to = *qpn;
    }
    query
}

/// Whether queue pairs have the counter at this place.
fn counts(caps: &abi::DeviceCaps, place: usize) -> bool {
    let place = place as u32;
    place < caps.counters && caps.qp_counters.checked_shr(place).unwrap_or(0) & 1 != 0
}

/// The driver's data of a set.
pub(crate) struct FerriteCounter {
    number: Number,
    sets: Arc<Sets>,
}

impl Drop for FerriteCounter {
    fn drop(&mut self) {
        self.sets.registry.end(self.number.get());
    }
}

impl rdma::QpCounterOps for Ferrite {
    type Counter = FerriteCounter;

    fn counts(dev: &Device<Self>, place: usize) -> bool {
        counts(&dev.caps, place)
    }

    fn create_counter<'a>(mut new: New<'a, kind::Counter, Self>) -> Result<&'a QpCounter<Self>> {
        let dev = new.device();
        if !dev.has(abi::FEATURE_QP_COUNTERS) {
            return Err(errno::eopnotsupp());
        }
        let counter = FerriteCounter {
            // The administrator has them made, also where that is for each process: who gets none has a queue pair
            // all the same.
            number: dev.qp_counters.numbers.take(Holder::KERNEL)?,
            sets: dev.qp_counters.clone(),
        };
        let number = counter.number.get();
        counter.sets.registry.create(number)?;
        new.set_number(number);
        new.init(Ok::<_, Error>(counter))
    }

    fn bind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>) -> Result {
        let sets = &counter.sets;
        let ask = |qpns: &[u32]| sets.counted(qpns);
        sets.registry.bind(counter.number.get(), qp.number(), ask)
    }

    fn unbind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>) {
        let sets = &counter.sets;
        let ask = |qpns: &[u32]| sets.counted_last(qpns);
        sets.registry.unbind(counter.number.get(), qp.number(), ask);
    }

    fn read_counter(counter: &QpCounter<Self>, values: &mut [u64]) -> Result {
        let sets = &counter.sets;
        let number = counter.number.get();
        let mut ask = |qpns: &[u32]| sets.counted(qpns);
        let counted = sets.registry.read(number, Reader::OfSet, &mut ask)?;
        for (value, counted) in values.iter_mut().zip(counted) {
            *value = counted;
        }
        Ok(())
    }
}
