// SPDX-License-Identifier: GPL-2.0

//! Counters of queue pairs, and sets of them that administrators bind queue pairs to.
//!
//! The device counts for each queue pair from when it was made, and knows no sets: a set is what its members
//! have counted since they were bound, and what former ones had counted when they left. So whatever a queue
//! pair does counts in one place only, in its own, and binding costs nothing while packets go.

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
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::{
        Arc,
        Mutex, //
    },
    time::{
        Delta,
        Instant,
        Monotonic, //
    },
};

/// Counters in the order of [`abi::COUNTER_NAMES`].
pub(crate) type Values = [u64; abi::COUNTER_NAMES.len()];

/// No counters.
const NOTHING: Values = [0; abi::COUNTER_NAMES.len()];
/// Sets that a device can have.
const MOST_SETS: u32 = 1 << 16;
/// How long what was read of a set is not read again: the core asks for all of it once for each counter.
const FRESH: Delta = Delta::from_millis(10);

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

/// A set of counters.
struct Set {
    /// What each member had counted when it was bound.
    members: RBTree<u32, Values>,
    /// The sum of that.
    before: Values,
    /// What former members counted while they were members.
    kept: Values,
    /// What the set had counted when it was last read.
    seen: Values,
    /// When that was, unless a member came or went since.
    read: Option<Instant<Monotonic>>,
}

impl Set {
    fn new() -> Self {
        Self {
            members: RBTree::new(),
            before: NOTHING,
            kept: NOTHING,
            seen: NOTHING,
            read: None,
        }
    }

    /// A queue pair that has counted `so_far` becomes a member.
    fn bind(&mut self, qpn: u32, so_far: Values) -> Result {
        self.members
            .try_create_and_insert(qpn, so_far, GFP_KERNEL_ACCOUNT)?;
        add(&mut self.before, &so_far);
        self.read = None;
        Ok(())
    }

    /// A member that has counted `so_far` leaves; what it counted stays. Where the device does not say any
    /// more how much that is, only what others have counted does.
    fn unbind(&mut self, qpn: u32, so_far: Option<Values>) {
        let Some(before) = self.members.remove(&qpn) else {
            return;
        };
        subtract(&mut self.before, &before);
        if let Some(mut counted) = so_far {
            subtract(&mut counted, &before);
            add(&mut self.kept, &counted);
        }
        self.read = None;
    }

    /// What asks the device for the counters of all members: `ask` is called with as many of them at a time as
    /// a query has room for, and says what they have counted together.
    fn ask(&self, mut ask: impl FnMut(&[u32]) -> Result<Values>) -> Result<Values> {
        let mut sum = NOTHING;
        let mut qpns = [0; abi::COUNTED_QUEUE_PAIRS];
        let mut named = 0;
        for qpn in self.members.keys() {
            qpns[named] = *qpn;
            named += 1;
            if named == qpns.len() {
                add(&mut sum, &ask(&qpns)?);
                named = 0;
            }
        }
        if named != 0 {
            add(&mut sum, &ask(&qpns[..named])?);
        }
        Ok(sum)
    }

    /// What the set has counted, of which `ask` says what it has to be asked for.
    fn read(&mut self, ask: impl FnMut(&[u32]) -> Result<Values>) -> Result<Values> {
        if self.read.is_some_and(|read| read.elapsed() < FRESH) {
            return Ok(self.seen);
        }
        let mut counted = self.ask(ask)?;
        subtract(&mut counted, &self.before);
        add(&mut counted, &self.kept);
        self.seen = counted;
        self.read = Some(Instant::now());
        Ok(counted)
    }
}

/// The sets of a device.
struct State {
    sets: RBTree<u32, Set>,
    /// What those had counted that are no more: the core keeps that of a port for ever.
    ended: Values,
}

impl State {
    /// Whether a queue pair is bound to any set.
    fn has_member(&self, qpn: u32) -> bool {
        let mut sets = self.sets.values();
        sets.any(|set| set.members.get(&qpn).is_some())
    }
}

/// The sets of a device, and how their queue pairs are asked for what they have counted.
#[pin_data]
pub(crate) struct Sets {
    hw: Arc<Hardware>,
    numbers: Arc<Numbers>,
    #[pin]
    state: Mutex<State>,
}

impl Sets {
    /// None, of this device.
    pub(crate) fn new(hw: &Arc<Hardware>) -> Result<Arc<Self>> {
        let numbers = Numbers::new(1..MOST_SETS)?;
        let sets = pin_init!(Self {
            hw: hw.clone(),
            numbers,
            state <- new_mutex!(
                State {
                    sets: RBTree::new(),
                    ended: NOTHING,
                },
                "ferrite_qp_counters"
            ),
        });
        Arc::pin_init(sets, GFP_KERNEL)
    }

    /// What queue pairs have counted together. Sleeps.
    fn counted(&self, qpns: &[u32]) -> Result<Values> {
        self.hw.query(&query(qpns)).map(|QpCounters(values)| values)
    }

    /// The same of one that leaves its set, perhaps since its process was killed. Sleeps.
    fn counted_last(&self, qpn: u32) -> Result<Values> {
        let counters = self.hw.query_for_others(&query(&[qpn]));
        counters.map(|QpCounters(values)| values)
    }

    /// What all sets have counted, those that are no more too: the core adds it to what it is told of the
    /// port. Sleeps.
    pub(crate) fn read_all(&self) -> Result<Values> {
        let mut state = self.state.lock();
        let mut sum = state.ended;
        for set in state.sets.values_mut() {
            // What one cannot say now is no reason to say nothing of the port.
            let counted = set.read(|qpns| self.counted(qpns));
            add(&mut sum, &counted.unwrap_or(set.seen));
        }
        Ok(sum)
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
        let mut state = self.sets.state.lock();
        if let Some(set) = state.sets.remove(&self.number.get()) {
            // All members have left.
            add(&mut state.ended, &set.kept);
        }
    }
}

impl FerriteCounter {
    /// Lets `change` change the set; nobody looks at any set meanwhile.
    fn with_set<T>(&self, change: impl FnOnce(&Sets, &mut Set) -> Result<T>) -> Result<T> {
        let mut state = self.sets.state.lock();
        // There is one as long as there is its data.
        let set = state.sets.get_mut(&self.number.get()).ok_or(ENOENT)?;
        change(&self.sets, set)
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
        let mut state = counter.sets.state.lock();
        let made = state
            .sets
            .try_create_and_insert(number, Set::new(), GFP_KERNEL_ACCOUNT);
        drop(state);
        made?;
        new.set_number(number);
        new.init(Ok::<_, Error>(counter))
    }

    fn bind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>) -> Result {
        let qpn = qp.number();
        let mut state = counter.sets.state.lock();
        if state.has_member(qpn) {
            return Err(EBUSY);
        }
        let so_far = counter.sets.counted(&[qpn])?;
        // There is one as long as there is its data.
        let set = state.sets.get_mut(&counter.number.get()).ok_or(ENOENT)?;
        set.bind(qpn, so_far)
    }

    fn unbind_counter(counter: &QpCounter<Self>, qp: &Qp<Self>) {
        let qpn = qp.number();
        let _ = counter.with_set(|sets, set| {
            set.unbind(qpn, sets.counted_last(qpn).ok());
            Ok(())
        });
    }

    fn read_counter(counter: &QpCounter<Self>, values: &mut [u64]) -> Result {
        let counted = counter.with_set(|sets, set| set.read(|qpns| sets.counted(qpns)))?;
        for (value, counted) in values.iter_mut().zip(counted) {
            *value = counted;
        }
        Ok(())
    }
}

#[kunit_tests(ferrite_qp_counters)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    /// So many of each.
    fn each(value: u64) -> Values {
        [value; abi::COUNTER_NAMES.len()]
    }

    /// Reads a set whose members have counted ten for each of their numbers.
    fn read(set: &mut Set) -> Result<Values> {
        // Not what was read before.
        set.read = None;
        set.read(|qpns| Ok(each(qpns.iter().map(|qpn| u64::from(*qpn) * 10).sum())))
    }

    #[test]
    fn a_set_has_what_its_members_count_from_when_they_are_bound() -> Result {
        let mut set = Set::new();
        assert_eq!(read(&mut set)?, NOTHING);
        set.bind(5, each(42))?;
        assert_eq!(read(&mut set)?, each(8));
        set.bind(7, each(0))?;
        assert_eq!(read(&mut set)?, each(78));
        Ok(())
    }

    #[test]
    fn a_queue_pair_is_a_member_of_one_set() -> Result {
        let mut state = State {
            sets: RBTree::new(),
            ended: NOTHING,
        };
        for number in [1, 2] {
            state
                .sets
                .try_create_and_insert(number, Set::new(), GFP_KERNEL)?;
        }
        assert!(!state.has_member(5));
        state.sets.get_mut(&2).ok_or(ENOENT)?.bind(5, each(0))?;
        assert!(state.has_member(5) && !state.has_member(6));
        state.sets.get_mut(&2).ok_or(ENOENT)?.unbind(5, None);
        assert!(!state.has_member(5));
        Ok(())
    }

    #[test]
    fn what_a_member_counted_stays_when_it_leaves() -> Result {
        let mut set = Set::new();
        set.bind(5, each(42))?;
        set.bind(7, each(10))?;
        set.unbind(5, Some(each(45)));
        assert_eq!(read(&mut set)?, each(63));
        // One that is no member changes nothing.
        set.unbind(5, Some(each(1000)));
        assert_eq!(read(&mut set)?, each(63));
        // Of one that the device says no more of, nothing stays.
        set.unbind(7, None);
        assert_eq!(read(&mut set)?, each(3));
        // And it may come again.
        set.bind(5, each(50))?;
        assert_eq!(read(&mut set)?, each(3));
        set.unbind(5, Some(each(51)));
        assert_eq!(set.kept, each(4));
        Ok(())
    }

    #[test]
    fn counters_that_wrap_count_on() -> Result {
        let mut set = Set::new();
        set.bind(5, each(u64::MAX - 9))?;
        assert_eq!(read(&mut set)?, each(60));
        set.unbind(5, Some(each(50)));
        assert_eq!(set.kept, each(60));
        Ok(())
    }

    #[test]
    fn a_query_names_no_more_queue_pairs_than_it_has_room_for() -> Result {
        const MEMBERS: u32 = 2 * abi::COUNTED_QUEUE_PAIRS as u32 + 1;
        let mut set = Set::new();
        for qpn in 2..2 + MEMBERS {
            set.bind(qpn, NOTHING)?;
        }
        let mut asked = KVec::new();
        let counted = set.ask(|qpns| {
            let command = query(qpns);
            let named = &command.qpns[..command.count as usize];
            assert_eq!(named, qpns);
            assert!(command.qpns[named.len()..].iter().all(|qpn| *qpn == 0));
            asked.push(qpns.len(), GFP_KERNEL)?;
            Ok(each(qpns.iter().map(|qpn| u64::from(*qpn)).sum()))
        })?;
        assert_eq!(&asked[..], [54, 54, 1]);
        assert_eq!(counted, each((2..2 + u64::from(MEMBERS)).sum()));
        Ok(())
    }

    #[test]
    fn a_set_is_read_once_for_all_that_ask_at_the_same_time() -> Result {
        let mut set = Set::new();
        set.bind(5, NOTHING)?;
        let mut asked = 0;
        for _ in 0..3 {
            set.read(|_| {
                asked += 1;
                Ok(each(1))
            })?;
        }
        // More than once only where so much time has passed.
        assert!(asked < 3 || set.read.is_some_and(|read| read.elapsed() > FRESH));
        // A device that does not answer is no reason to forget; but the error is told.
        set.read = None;
        assert_eq!(set.read(|_| Err(EIO)).err(), Some(EIO));
        assert_eq!(set.seen, each(1));
        Ok(())
    }

    #[test]
    fn what_sets_have_counted_is_left_to_the_core_which_adds_it() {
        let mut port = each(100);
        take_away(&mut port, &each(30));
        assert_eq!(port, each(70));
        // Packets to groups.
        take_away(&mut port, &each(71));
        assert_eq!(port, NOTHING);
    }

    #[test]
    fn only_counters_that_the_device_has_for_queue_pairs_are_shown() {
        let caps = abi::DeviceCaps {
            counters: 3,
            qp_counters: 0b1101,
            ..abi::DeviceCaps::zeroed()
        };
        assert!(counts(&caps, 0) && counts(&caps, 2));
        for place in [1, 3, 64, usize::MAX] {
            assert!(!counts(&caps, place));
        }
    }
}
