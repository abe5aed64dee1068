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
    kernel_ext::{
        errno,
        memory, //
    },
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
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
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

/// How often members that leave while they are asked for have who reads a set ask anew.
const MOST_IN_VAIN: u32 = 8;

/// Some members of a set, whom the device is asked for at once.
struct Asked {
    qpns: [u32; abi::COUNTED_QUEUE_PAIRS],
    count: usize,
    /// What they had counted together when they were bound.
    before: Values,
}

impl Asked {
    fn qpns(&self) -> &[u32] {
        &self.qpns[..self.count]
    }
}

/// What is to be done next by who reads a set.
// It is on the stack of who reads, once, and moved nowhere.
#[expect(clippy::large_enum_variant)]
enum Next {
    /// To ask for these members.
    Ask(Asked),
    /// Nothing: that is what it has counted.
    Done(Values),
}

/// How far somebody has come who reads a set, by asking the device again and again. Members come and go meanwhile:
/// what each of them counted is in the sum once, as of when it was asked for or of when it left before that.
struct Reading {
    /// Members of lesser numbers were asked for. Who comes with such a number comes too late.
    next: u32,
    /// Members of lesser numbers are being asked for.
    ahead: u32,
    /// One of these has left: what is answered is of no use, and the others are asked for again.
    again: bool,
    /// How often that was so.
    in_vain: u32,
    /// A member came or went.
    changed: bool,
    /// What those have counted that were asked for, and former members.
    sum: Values,
}

/// Who reads a set: one of each kind at a time.
#[derive(Clone, Copy)]
enum Reader {
    /// Of the set alone, for whom the core locks it.
    OfSet,
    /// Of all sets of the port, who have a lock of their own.
    OfPort,
}

/// A set of counters.
struct Set {
    /// What each member had counted when it was bound.
    members: RBTree<u32, Values>,
    /// What former members counted while they were members.
    kept: Values,
    /// What the set had counted when it was last read.
    seen: Values,
    /// When that was, unless a member came or went since.
    read: Option<Instant<Monotonic>>,
    /// By [`Reader`].
    readings: [Option<Reading>; 2],
}

impl Set {
    fn new() -> Self {
        Self {
            members: RBTree::new(),
            kept: NOTHING,
            seen: NOTHING,
            read: None,
            readings: [None, None],
        }
    }

    /// A queue pair that is no member, and has counted so much, becomes one.
    fn bind(&mut self, member: RBTreeNode<u32, Values>) {
        self.members.insert(member);
        self.changes();
    }

    /// A member that has counted `so_far` leaves; what it counted stays. Where the device does not say any
    /// more how much that is, only what others have counted does.
    fn unbind(&mut self, qpn: u32, so_far: Option<Values>) {
        let Some(before) = self.members.remove(&qpn) else {
            return;
        };
        let mut counted = so_far.unwrap_or(before);
        subtract(&mut counted, &before);
        add(&mut self.kept, &counted);
        for reading in self.readings.iter_mut().flatten() {
            if qpn >= reading.next {
                add(&mut reading.sum, &counted);
                reading.again |= qpn < reading.ahead;
            }
        }
        self.changes();
    }

    fn changes(&mut self) {
        self.read = None;
        for reading in self.readings.iter_mut().flatten() {
            reading.changed = true;
        }
    }

    /// Begins to read it; else what it has counted, where that was read just now, or is by another.
    fn begin(&mut self, reader: Reader) -> Option<Values> {
        let reading = &mut self.readings[reader as usize];
        if reading.is_some() || self.read.is_some_and(|read| read.elapsed() < FRESH) {
            return Some(self.seen);
        }
        *reading = Some(Reading {
            next: 0,
            ahead: 0,
            again: false,
            in_vain: 0,
            changed: false,
            sum: self.kept,
        });
        None
    }

    /// What is to be done next by who has begun to read it.
    fn next(&mut self, reader: Reader) -> Result<Next> {
        let slot = &mut self.readings[reader as usize];
        let reading = slot.as_mut().ok_or(EINVAL)?;
        let mut asked = Asked {
            qpns: [0; abi::COUNTED_QUEUE_PAIRS],
            count: 0,
            before: NOTHING,
        };
        let mut cursor = self.members.cursor_lower_bound_mut(&reading.next);
        while let Some(member) = cursor.filter(|_| asked.count < asked.qpns.len()) {
            let (qpn, before) = member.current();
            asked.qpns[asked.count] = *qpn;
            asked.count += 1;
            add(&mut asked.before, before);
            reading.ahead = qpn + 1;
            cursor = member.move_next();
        }
        reading.again = false;
        if asked.count != 0 {
            return Ok(Next::Ask(asked));
        }
        let (sum, changed) = (reading.sum, reading.changed);
        *slot = None;
        self.seen = sum;
        self.read = (!changed).then(Instant::now);
        Ok(Next::Done(sum))
    }

    /// These members have counted so much together. What the set has counted as far as is known, where members have left
    /// so often while they were asked for that it is not worth going on: it is read no more then.
    fn answered(&mut self, reader: Reader, asked: &Asked, mut counted: Values) -> Option<Values> {
        let slot = &mut self.readings[reader as usize];
        let reading = slot.as_mut()?;
        if !reading.again {
            subtract(&mut counted, &asked.before);
            add(&mut reading.sum, &counted);
            reading.next = reading.ahead;
            return None;
        }
        reading.in_vain += 1;
        if reading.in_vain < MOST_IN_VAIN {
            return None;
        }
        *slot = None;
        Some(self.seen)
    }

    /// Nobody reads it any more.
    fn leave(&mut self, reader: Reader) {
        self.readings[reader as usize] = None;
    }
}

/// How far somebody has come who reads all sets.
struct Summing {
    /// Sets of lesser numbers were read.
    next: u32,
    /// What they had counted, and those that were no more when they would have been.
    sum: Values,
}

/// The sets of a device.
struct State {
    sets: RBTree<u32, Set>,
    /// The set of each queue pair that is bound to one.
    bound: RBTree<u32, u32>,
    /// What those had counted that are no more: the core keeps that of a port for ever.
    ended: Values,
    summing: Option<Summing>,
}

impl State {
    /// Binds a queue pair to a set: `EBUSY` where it is in one. What is not needed of the nodes is freed by the caller.
    fn bind(
        &mut self,
        number: u32,
        qpn: u32,
        member: &mut Option<RBTreeNode<u32, Values>>,
        bound: &mut Option<RBTreeNode<u32, u32>>,
    ) -> Result {
        if self.bound.get(&qpn).is_some() {
            return Err(EBUSY);
        }
        let set = self.sets.get_mut(&number).ok_or(ENOENT)?;
        if let (Some(member), Some(bound)) = (member.take(), bound.take()) {
            set.bind(member);
            self.bound.insert(bound);
        }
        Ok(())
    }

    /// Has it leave the set, if it is in that.
    fn unbind(&mut self, number: u32, qpn: u32, so_far: Option<Values>) {
        if self.bound.get(&qpn) != Some(&number) {
            return;
        }
        self.bound.remove(&qpn);
        if let Some(set) = self.sets.get_mut(&number) {
            set.unbind(qpn, so_far);
        }
    }

    /// Begins to read all sets.
    fn begin(&mut self) {
        self.summing = Some(Summing {
            next: 0,
            sum: self.ended,
        });
    }

    /// The set that is to be read next, if one is left.
    fn next(&self) -> Option<u32> {
        let next = self.summing.as_ref()?.next;
        let set = self.sets.cursor_lower_bound(&next)?;
        Some(*set.current().0)
    }

    /// All sets were read: what they have counted.
    fn finish(&mut self) -> Values {
        let summing = self.summing.take();
        summing.map_or(self.ended, |summing| summing.sum)
    }

    /// A set was read. What it cannot say now is no reason to say nothing of the port.
    fn was_read(&mut self, number: u32, counted: Result<Values>) {
        let Some(summing) = &mut self.summing else {
            return;
        };
        // Of one that has ended meanwhile all is in the sum.
        if let Some(set) = self.sets.get(&number) {
            add(&mut summing.sum, &counted.unwrap_or(set.seen));
        }
        summing.next = number + 1;
    }

    /// A set ends, which has no members any more.
    fn end(&mut self, number: u32) {
        let Some(set) = self.sets.remove(&number) else {
            return;
        };
        for qpn in set.members.keys() {
            self.bound.remove(qpn);
        }
        add(&mut self.ended, &set.kept);
        if let Some(summing) = &mut self.summing {
            if number >= summing.next {
                add(&mut summing.sum, &set.kept);
            }
        }
    }
}

/// The sets of a device, as all who use them share them. What the device is asked, and memory, are waited for
/// with nothing locked that others need who bind queue pairs or destroy them. (The core has a lock for each set, too.)
///
/// `ask` is called with as many queue pairs at a time as a query has room for, and says what they have counted
/// together.
#[pin_data]
struct Registry {
    #[pin]
    state: Mutex<State>,
    /// Held by who reads all sets, until he has.
    #[pin]
    port: Mutex<()>,
}

impl Registry {
    fn new() -> Result<Arc<Self>> {
        let registry = pin_init!(Self {
            state <- new_mutex!(
                State {
                    sets: RBTree::new(),
                    bound: RBTree::new(),
                    ended: NOTHING,
                    summing: None,
                },
                "ferrite_qp_counters"
            ),
            port <- new_mutex!((), "ferrite_port_counters"),
        });
        let registry = Arc::pin_init(registry, GFP_KERNEL)?;
        // Queue pairs of kernel users that disks hang on end, and leave their sets.
        memory::taken_in_reclaim(|| drop(registry.state.lock()));
        Ok(registry)
    }

    /// Makes a set. Sleeps.
    fn create(&self, number: u32) -> Result {
        let set = RBTreeNode::new(number, Set::new(), GFP_KERNEL_ACCOUNT)?;
        let replaced = self.state.lock().sets.insert(set);
        drop(replaced);
        Ok(())
    }

    /// Ends it. Sleeps.
    fn end(&self, number: u32) {
        self.state.lock().end(number);
    }

    /// Calls `f` with a set; nobody looks at any set meanwhile.
    fn with_set<T>(&self, number: u32, f: impl FnOnce(&mut Set) -> T) -> Result<T> {
        let mut state = self.state.lock();
        state.sets.get_mut(&number).map(f).ok_or(ENOENT)
    }

    /// Binds a queue pair to a set, by what it has counted when this is called: `EBUSY` where it is in one. Sleeps.
    fn bind(&self, number: u32, qpn: u32, ask: impl FnOnce(&[u32]) -> Result<Values>) -> Result {
        let mut member = Some(RBTreeNode::new(qpn, ask(&[qpn])?, GFP_KERNEL_ACCOUNT)?);
        let mut bound = Some(RBTreeNode::new(qpn, number, GFP_KERNEL_ACCOUNT)?);
        self.state.lock().bind(number, qpn, &mut member, &mut bound)
    }

    /// Has it leave the set. Sleeps.
    fn unbind(&self, number: u32, qpn: u32, ask: impl FnOnce(&[u32]) -> Result<Values>) {
        let so_far = ask(&[qpn]).ok();
        self.state.lock().unbind(number, qpn, so_far);
    }

    /// What a set has counted. Sleeps.
    fn read(
        &self,
        number: u32,
        reader: Reader,
        ask: &mut dyn FnMut(&[u32]) -> Result<Values>,
    ) -> Result<Values> {
        if let Some(seen) = self.with_set(number, |set| set.begin(reader))? {
            return Ok(seen);
        }
        // Ends, as there are so many members, and they are asked for again so often at the most.
        loop {
            let asked = match self.with_set(number, |set| set.next(reader))?? {
                Next::Ask(asked) => asked,
                Next::Done(counted) => return Ok(counted),
            };
            match ask(asked.qpns()) {
                Ok(counted) => {
                    let ended =
                        self.with_set(number, |set| set.answered(reader, &asked, counted))?;
                    if let Some(seen) = ended {
                        return Ok(seen);
                    }
                }
                Err(error) => {
                    self.with_set(number, |set| set.leave(reader))?;
                    return Err(error);
                }
            }
        }
    }

    /// What all sets have counted, those that are no more too. Sleeps.
    fn read_all(&self, ask: &mut dyn FnMut(&[u32]) -> Result<Values>) -> Values {
        let _turn = self.port.lock();
        self.state.lock().begin();
        loop {
            let number = {
                let mut state = self.state.lock();
                match state.next() {
                    Some(number) => number,
                    None => return state.finish(),
                }
            };
            let counted = self.read(number, Reader::OfPort, ask);
            self.state.lock().was_read(number, counted);
        }
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

#[kunit_tests(ferrite_qp_counters)]
mod tests {
    use super::*;
    use crate::abi::Plain;
    use core::cell::{
        Cell,
        RefCell, //
    };

    /// So many of each.
    fn each(value: u64) -> Values {
        [value; abi::COUNTER_NAMES.len()]
    }

    /// Sets of a device whose queue pairs have counted ten for each of their numbers, and `more`.
    struct Device {
        registry: Arc<Registry>,
        more: Cell<u64>,
        /// How many queue pairs were asked for each time.
        asked: RefCell<KVec<usize>>,
    }

    impl Device {
        /// With a set of each of these numbers.
        fn new(sets: &[u32]) -> Result<Self> {
            let registry = Registry::new()?;
            for number in sets {
                registry.create(*number)?;
            }
            Ok(Self {
                registry,
                more: Cell::new(0),
                asked: RefCell::new(KVec::new()),
            })
        }

        fn ask(&self, qpns: &[u32]) -> Result<Values> {
            // Whoever waits for the device, nobody else does for him.
            let state = self.registry.state.try_lock();
            assert!(state.is_some(), "others are kept waiting");
            drop(state);
            self.asked.borrow_mut().push(qpns.len(), GFP_KERNEL)?;
            let counted = |qpn: &u32| u64::from(*qpn) * 10 + self.more.get();
            Ok(each(qpns.iter().map(counted).sum()))
        }

        fn bind(&self, set: u32, qpn: u32) -> Result {
            self.registry.bind(set, qpn, |qpns| self.ask(qpns))
        }

        fn unbind(&self, set: u32, qpn: u32) {
            self.registry.unbind(set, qpn, |qpns| self.ask(qpns));
        }

        /// Reads a set anew; `meanwhile` is called each time that the device is asked for some.
        fn read_while(&self, set: u32, mut meanwhile: impl FnMut(&[u32])) -> Result<Values> {
            self.registry.with_set(set, |set| set.read = None)?;
            self.registry.read(set, Reader::OfSet, &mut |qpns| {
                let counted = self.ask(qpns);
                meanwhile(qpns);
                counted
            })
        }

        fn read(&self, set: u32) -> Result<Values> {
            self.read_while(set, |_| ())
        }

        /// Reads all of them anew.
        fn read_all_while(&self, mut meanwhile: impl FnMut(&[u32])) -> Values {
            for set in self.registry.state.lock().sets.values_mut() {
                set.read = None;
            }
            self.registry.read_all(&mut |qpns| {
                let counted = self.ask(qpns);
                meanwhile(qpns);
                counted
            })
        }
    }

    #[test]
    fn a_set_has_what_its_members_count_from_when_they_are_bound() -> Result {
        let device = Device::new(&[1])?;
        assert_eq!(device.read(1)?, NOTHING);
        device.bind(1, 5)?;
        assert_eq!(device.read(1)?, NOTHING);
        device.more.set(8);
        assert_eq!(device.read(1)?, each(8));
        device.bind(1, 7)?;
        device.more.set(10);
        assert_eq!(device.read(1)?, each(10 + 2));
        Ok(())
    }

    #[test]
    fn a_queue_pair_is_a_member_of_one_set() -> Result {
        let device = Device::new(&[1, 2])?;
        device.bind(2, 5)?;
        for set in [1, 2] {
            assert_eq!(device.bind(set, 5), Err(EBUSY));
        }
        device.unbind(2, 5);
        device.bind(1, 5)?;
        assert_eq!(device.bind(3, 6), Err(ENOENT));
        Ok(())
    }

    #[test]
    fn what_a_member_counted_stays_when_it_leaves() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.bind(1, 7)?;
        device.more.set(3);
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(6));
        // One that is no member changes nothing.
        device.more.set(1000);
        device.unbind(1, 5);
        device.more.set(3);
        assert_eq!(device.read(1)?, each(6));
        // Of one that the device says no more of, nothing stays.
        device.registry.unbind(1, 7, |_| Err(EIO));
        assert_eq!(device.read(1)?, each(3));
        // And it may come again.
        device.bind(1, 5)?;
        assert_eq!(device.read(1)?, each(3));
        device.more.set(4);
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(4));
        Ok(())
    }

    #[test]
    fn counters_that_wrap_count_on() -> Result {
        let device = Device::new(&[1])?;
        device.more.set(u64::MAX - 59);
        device.bind(1, 5)?;
        device.more.set(0);
        assert_eq!(device.read(1)?, each(60));
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(60));
        Ok(())
    }

    #[test]
    fn a_query_names_no_more_queue_pairs_than_it_has_room_for() -> Result {
        const MEMBERS: u32 = 2 * abi::COUNTED_QUEUE_PAIRS as u32 + 1;
        let device = Device::new(&[1])?;
        for qpn in 2..2 + MEMBERS {
            device.bind(1, qpn)?;
        }
        device.more.set(7);
        device.asked.borrow_mut().clear();
        let counted = device.read_while(1, |qpns| {
            let command = query(qpns);
            let named = &command.qpns[..command.count as usize];
            assert_eq!(named, qpns);
            assert!(command.qpns[named.len()..].iter().all(|qpn| *qpn == 0));
        })?;
        assert_eq!(&device.asked.borrow()[..], [54, 54, 1]);
        assert_eq!(counted, each(7 * u64::from(MEMBERS)));
        Ok(())
    }

    #[test]
    fn who_comes_or_goes_while_a_set_is_read_is_counted_once() -> Result {
        const MEMBERS: u32 = 3 * abi::COUNTED_QUEUE_PAIRS as u32;
        let device = Device::new(&[1])?;
        for qpn in 2..2 + MEMBERS {
            device.bind(1, qpn * 2)?;
        }
        device.more.set(1);
        // While the second part is asked for: of the first, of this one and of the last.
        let leaving = [10, 150, 300];
        let mut round = 0;
        let counted = device.read_while(1, |qpns| {
            round += 1;
            if round == 2 {
                assert!(qpns.contains(&leaving[1]));
                for qpn in leaving {
                    device.unbind(1, qpn);
                }
                for qpn in [11, 151, 301] {
                    assert_eq!(device.bind(1, qpn), Ok(()));
                }
            }
        })?;
        assert_eq!(counted, each(u64::from(MEMBERS)));
        // What has changed meanwhile is not what is told to the next one, who would not read it again.
        assert!(device.registry.with_set(1, |set| set.read.is_none())?);
        device.more.set(2);
        let left = leaving.len() as u64;
        let stayed = u64::from(MEMBERS) - left;
        // Those that left have one each, those that came have it since.
        assert_eq!(device.read(1)?, each(left + 2 * stayed + left));
        Ok(())
    }

    #[test]
    fn who_reads_does_not_ask_for_ever_while_members_come_and_go() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.more.set(3);
        assert_eq!(device.read(1)?, each(3));
        device.more.set(4);
        let mut rounds = 0;
        // One that is asked for leaves each time, and comes again.
        let seen = device.read_all_while(|qpns| {
            rounds += 1;
            assert!(rounds <= 100);
            assert_eq!(qpns, [5]);
            device.unbind(1, 5);
            assert_eq!(device.bind(1, 5), Ok(()));
        });
        // As it was heard of last.
        assert_eq!((seen, rounds), (each(3), MOST_IN_VAIN));
        assert_eq!(device.read_all_while(|_| ()), each(4));
        Ok(())
    }

    #[test]
    fn a_set_that_ends_while_all_are_read_is_counted_once() -> Result {
        for ends in [1, 2, 3] {
            let device = Device::new(&[1, 2, 3])?;
            for set in [1, 2, 3] {
                device.bind(set, 10 * set)?;
            }
            device.more.set(100);
            let counted = device.read_all_while(|qpns| {
                if qpns == [20] {
                    device.unbind(ends, 10 * ends);
                    device.registry.end(ends);
                }
            });
            assert_eq!(counted, each(300));
            assert_eq!(device.read_all_while(|_| ()), each(300));
        }
        Ok(())
    }

    #[test]
    fn what_one_set_cannot_say_is_no_reason_to_say_nothing_of_the_port() -> Result {
        let device = Device::new(&[1, 2])?;
        device.bind(1, 5)?;
        device.bind(2, 6)?;
        device.more.set(10);
        assert_eq!(device.read_all_while(|_| ()), each(20));
        device.more.set(11);
        for set in device.registry.state.lock().sets.values_mut() {
            set.read = None;
        }
        let counted = device.registry.read_all(&mut |qpns| match qpns {
            [5] => Err(EIO),
            _ => device.ask(qpns),
        });
        assert_eq!(counted, each(21));
        Ok(())
    }

    #[test]
    fn a_set_is_read_once_for_all_that_ask_at_the_same_time() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.more.set(1);
        device.read(1)?;
        device.asked.borrow_mut().clear();
        let ask = &mut |qpns: &[u32]| device.ask(qpns);
        for reader in [Reader::OfSet, Reader::OfPort, Reader::OfSet] {
            device.registry.read(1, reader, ask)?;
        }
        // More than once only where so much time has passed.
        let read = device.registry.with_set(1, |set| set.read)?;
        assert!(device.asked.borrow().len() < 3 || read.is_some_and(|read| read.elapsed() > FRESH));
        // A device that does not answer is no reason to forget; but the error is told, and who comes next asks again.
        for _ in 0..2 {
            device.registry.with_set(1, |set| set.read = None)?;
            let refused = device.registry.read(1, Reader::OfSet, &mut |_| Err(EIO));
            assert_eq!(refused.err(), Some(EIO));
        }
        assert_eq!(device.registry.with_set(1, |set| set.seen)?, each(1));
        // Who comes while another of his kind reads it has what was seen last.
        device.more.set(2);
        let read = device.read_while(1, |_| {
            let meanwhile = device.registry.read(1, Reader::OfSet, &mut |_| Err(EIO));
            assert_eq!(meanwhile, Ok(each(1)));
        })?;
        assert_eq!(read, each(2));
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
