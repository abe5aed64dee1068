// SPDX-License-Identifier: GPL-2.0

//! The service of event queues in an interrupt: which comes when, if several share a vector.
//!
//! A queue of low latency comes before each other one. Those others are served in small turns while
//! there is one, and it is looked after between the turns: its event waits for no more than a turn of
//! another queue. So is one with a vector of its own whose interrupt arrives at the same processor, and
//! would have to wait for the end of this one.

use crate::{
    abi,
    eq::{
        EventQueue,
        BUDGET, //
    },
    hardware::Hardware,
    moderation::Moderation,
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Events of a bulk queue that are handled while one of low latency may wait.
const TURN: u32 = 16;
const _: () = assert!(BUDGET % TURN == 0);

/// How often queues of low latency are looked after between turns of others: an interrupt is to end. What
/// they get after that raises another one.
const LOOKS: u32 = BUDGET / TURN;

/// Events that are handled in an interrupt, however many queues there are: of all queues of the vector, each in its
/// place; of those of low latency among them beyond that, between turns; and of those of other vectors.
const MOST: u32 = (LOOKS + 1) * BUDGET;

/// How many queues may share a vector and have all of [`BUDGET`] each.
const FEW: usize = (MOST / BUDGET) as usize;

/// How many events of each of so many queues that share a vector are handled in its place: one at least. What is
/// left raises the next interrupt.
#[inline]
fn budget_of_each(queues: usize) -> u32 {
    if queues <= FEW {
        BUDGET
    } else {
        (MOST / queues as u32).max(1)
    }
}

/// What is served.
pub(crate) trait Serve {
    /// Whether it comes before others.
    fn is_low_latency(&self) -> bool;
    /// Serves it: handles up to `budget` events, and arms it; returns whether it had to be.
    fn serve(&self, budget: u32) -> bool;
    /// Handles up to `budget` events; returns how many.
    fn turn(&self, budget: u32) -> u32;
    /// Arms it after turns in which so many events were handled; returns whether it had to be.
    fn end_turns(&self, handled: u32) -> bool;
}

/// Serves queues that share a vector: each at least once, each bulk one for no more than [`BUDGET`] events and
/// all of them for no more than [`MOST`], and those of low latency again between turns, [`LOOKS`] times in all.
/// `elsewhere` serves those of low latency of other vectors that this one is in the way of, if there are such: it is
/// given how many events it may handle, and returns how many it has. Returns whether there was something to do for
/// any of `queues`.
pub(crate) fn serve(queues: &[impl Serve], elsewhere: Option<impl Fn(u32) -> u32>) -> bool {
    let mut found = false;
    let each = budget_of_each(queues.len());
    let low_latency = queues.first().is_some_and(Serve::is_low_latency);
    let alike = queues
        .iter()
        .all(|queue| queue.is_low_latency() == low_latency);
    // Where all are of low latency, those of others do not come before them.
    if alike && (low_latency || elsewhere.is_none()) {
        for queue in queues {
            found |= queue.serve(each);
        }
        return found;
    }
    let (mut left, mut left_elsewhere) = (MOST, MOST);
    let mut serve_low_latency = || {
        let mut found = false;
        if let Some(serve) = &elsewhere {
            left_elsewhere = left_elsewhere.saturating_sub(serve(left_elsewhere));
        }
        for queue in queues.iter().filter(|queue| queue.is_low_latency()) {
            if left == 0 {
                // Each has its place besides.
                break;
            }
            let handled = queue.turn(each.min(left));
            left = left.saturating_sub(handled);
            found |= queue.end_turns(handled);
        }
        found
    };
    found |= serve_low_latency();
    let mut looks = LOOKS;
    for queue in queues {
        if queue.is_low_latency() {
            // It may be so since a moment ago: no queue is passed over, as its interrupt may be this one.
            found |= queue.serve(each);
            continue;
        }
        let mut handled = 0;
        while handled < each {
            let most = TURN.min(each - handled);
            let turn = queue.turn(most);
            handled += turn;
            if looks > 0 {
                looks -= 1;
                found |= serve_low_latency();
            }
            if turn < most {
                break;
            }
        }
        found |= queue.end_turns(handled);
    }
    found
}

/// Gives each of `queues` a turn, `turn` being told how many events it may handle and telling how many it has, as
/// long as there is something left of `most`; returns how many were handled in all. What gets none has an
/// interrupt of its own coming.
pub(crate) fn share<Q>(
    queues: impl Iterator<Item = Q>,
    most: u32,
    turn: impl Fn(Q, u32) -> u32,
) -> u32 {
    let mut left = most;
    for queue in queues {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(turn(queue, left.min(BUDGET)));
    }
    most - left
}

/// An event queue that is served in an interrupt.
pub(crate) struct Served {
    hw: Arc<Hardware>,
    queue: Arc<EventQueue>,
    /// Of completion handlers: answers and asynchronous events are never put off.
    moderation: Option<Arc<Moderation>>,
}

impl Served {
    /// Of a queue of `hw`, in one of its interrupts.
    pub(crate) fn new(hw: &Arc<Hardware>, queue: &Arc<EventQueue>) -> Result<Self> {
        let is_handler = queue.number() >= abi::EQ_FIRST_HANDLER;
        let moderation = if is_handler {
            Some(Arc::pin_init(Moderation::new(hw, queue), GFP_KERNEL)?)
        } else {
            None
        };
        Ok(Self {
            hw: hw.clone(),
            queue: queue.clone(),
            moderation,
        })
    }

    /// The same in another interrupt of the queue. There is one moderation, which adapts to all that the queue
    /// tells of, by whichever vector.
    pub(crate) fn by_another_vector(&self) -> Self {
        Self {
            hw: self.hw.clone(),
            queue: self.queue.clone(),
            moderation: self.moderation.clone(),
        }
    }

    /// The queue.
    pub(crate) fn queue(&self) -> &EventQueue {
        &self.queue
    }
}

impl Serve for Served {
    #[inline]
    fn is_low_latency(&self) -> bool {
        self.queue.is_low_latency()
    }

    #[inline]
    fn serve(&self, budget: u32) -> bool {
        let (mut completions, answers) = (0, self.hw.answers());
        let count = &mut completions;
        // It has the answers, and is dropped before the queue is unlocked.
        let doorbells = &self.hw.doorbells;
        let eqn = self.queue.number();
        let served = self.queue.service(doorbells, budget, move |event| {
            *count += u64::from(self.hw.dispatch(event, &answers, eqn));
        });
        if let (true, Some(moderation)) = (served, &self.moderation) {
            moderation.note(completions);
            moderation.served();
        }
        served
    }

    fn turn(&self, budget: u32) -> u32 {
        let (mut completions, answers) = (0, self.hw.answers());
        let count = &mut completions;
        let eqn = self.queue.number();
        let handled = self.queue.turn(budget, move |event| {
            *count += u64::from(self.hw.dispatch(event, &answers, eqn));
        });
        if let Some(moderation) = &self.moderation {
            moderation.note(completions);
        }
        handled
    }

    fn end_turns(&self, handled: u32) -> bool {
        let served = self.queue.end_turns(&self.hw.doorbells, handled);
        if let (true, Some(moderation)) = (served, &self.moderation) {
            moderation.served();
        }
        served
    }
}

#[kunit_tests(ferrite_service)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};

    /// Something with events to handle, and who was handled when.
    struct Queue<'a> {
        name: u8,
        low_latency: bool,
        events: Cell<u32>,
        armed: Cell<u32>,
        turns: &'a RefCell<KVec<(u8, u32)>>,
    }

    impl Queue<'_> {
        fn take(&self, budget: u32) -> u32 {
            let handled = self.events.get().min(budget);
            self.events.set(self.events.get() - handled);
            let _ = self
                .turns
                .borrow_mut()
                .push((self.name, handled), GFP_KERNEL);
            handled
        }
    }

    impl Serve for Queue<'_> {
        fn is_low_latency(&self) -> bool {
            self.low_latency
        }

        fn serve(&self, budget: u32) -> bool {
            let found = self.take(budget) > 0;
            self.armed.set(self.armed.get() + 1);
            found
        }

        fn turn(&self, budget: u32) -> u32 {
            self.take(budget)
        }

        fn end_turns(&self, handled: u32) -> bool {
            self.armed.set(self.armed.get() + 1);
            handled > 0
        }
    }

    const NOWHERE: Option<fn(u32) -> u32> = None;

    fn queue(
        turns: &RefCell<KVec<(u8, u32)>>,
        name: u8,
        low_latency: bool,
        events: u32,
    ) -> Queue<'_> {
        Queue {
            name,
            low_latency,
            events: Cell::new(events),
            armed: Cell::new(0),
            turns,
        }
    }

    #[test]
    fn queues_of_one_priority_are_served_once_in_turn() {
        let turns = RefCell::new(KVec::new());
        let queues = [
            queue(&turns, b'a', false, 3),
            queue(&turns, b'b', false, 1000),
            queue(&turns, b'c', false, 0),
        ];
        serve(&queues, NOWHERE);
        let expected = [(b'a', 3), (b'b', BUDGET), (b'c', 0)];
        assert_eq!(turns.borrow().as_slice(), expected.as_slice());
        assert!(queues.iter().all(|queue| queue.armed.get() == 1));
        // And so are those that all come before others.
        turns.borrow_mut().clear();
        let queues = [queue(&turns, b'a', true, 1), queue(&turns, b'b', true, 2)];
        serve(&queues, NOWHERE);
        assert_eq!(turns.borrow().as_slice(), [(b'a', 1), (b'b', 2)].as_slice());
    }

    #[test]
    fn a_low_latency_queue_comes_first_and_after_each_turn_of_a_bulk_one() {
        let turns = RefCell::new(KVec::new());
        let queues = [
            queue(&turns, b'b', false, TURN + 3),
            queue(&turns, b'l', true, 2),
            queue(&turns, b'c', false, 1),
        ];
        serve(&queues, NOWHERE);
        let expected = [
            (b'l', 2),
            (b'b', TURN),
            (b'l', 0),
            (b'b', 3),
            (b'l', 0),
            // Its place among all.
            (b'l', 0),
            (b'c', 1),
            (b'l', 0),
        ];
        assert_eq!(turns.borrow().as_slice(), expected.as_slice());
        assert_eq!((queues[0].armed.get(), queues[2].armed.get()), (1, 1));
    }

    #[test]
    fn a_low_latency_queue_of_another_vector_comes_first_too() {
        let turns = RefCell::new(KVec::new());
        let other = queue(&turns, b'o', true, 2);
        let elsewhere = |most| other.take(most);
        let queues = [queue(&turns, b'b', false, TURN + 3)];
        assert!(serve(&queues, Some(elsewhere)));
        let expected = [(b'o', 2), (b'b', TURN), (b'o', 0), (b'b', 3), (b'o', 0)];
        assert_eq!(turns.borrow().as_slice(), expected.as_slice());
        assert_eq!(queues[0].armed.get(), 1);
        // What was found there is not this vector's: on a pin nobody else's interrupt is claimed.
        other.events.set(1);
        assert!(!serve(&queues, Some(elsewhere)));
        // A queue of low latency has the processor to itself, as the other one would.
        turns.borrow_mut().clear();
        other.events.set(7);
        let queues = [queue(&turns, b'l', true, 1)];
        assert!(serve(&queues, Some(elsewhere)));
        assert_eq!(turns.borrow().as_slice(), [(b'l', 1)].as_slice());
    }

    #[test]
    fn those_of_other_vectors_do_not_hold_an_interrupt_for_ever() {
        let turns = RefCell::new(KVec::new());
        let queues = [
            queue(&turns, b'a', false, u32::MAX),
            queue(&turns, b'b', false, u32::MAX),
        ];
        // However many there are: all of them together have as much as one.
        let other = |_| queue(&turns, b'o', true, u32::MAX);
        let others: [Queue<'_>; 20] = core::array::from_fn(other);
        for count in [1, 2, 20] {
            turns.borrow_mut().clear();
            let others = &others[..count];
            serve(
                &queues,
                Some(|most| share(others.iter(), most, |other, most| other.take(most))),
            );
            let turns = turns.borrow();
            let elsewhere = turns.iter().filter(|turn| turn.0 == b'o');
            let (mut handled, mut largest) = (0, 0);
            for turn in elsewhere {
                handled += turn.1;
                largest = turn.1.max(largest);
            }
            assert_eq!((handled, largest), (MOST, BUDGET));
        }
        // One that has little leaves the rest to the next.
        let (few, many) = (
            queue(&turns, b'f', true, 3),
            queue(&turns, b'm', true, u32::MAX),
        );
        let take = |other: &Queue<'_>, most| other.take(most);
        assert_eq!(share([&few, &many].into_iter(), 10, take), 10);
        assert_eq!((few.events.get(), u32::MAX - many.events.get()), (0, 7));
    }

    #[test]
    fn a_bulk_queue_with_no_end_has_its_budget_and_no_more() {
        let turns = RefCell::new(KVec::new());
        let queues = [
            queue(&turns, b'b', false, u32::MAX),
            queue(&turns, b'l', true, 0),
        ];
        serve(&queues, NOWHERE);
        let of = |name| {
            let turns = turns.borrow();
            let turns = turns.iter().filter(|turn| turn.0 == name);
            turns.fold((0, 0), |(count, events), turn| (count + 1, events + turn.1))
        };
        assert_eq!(of(b'b'), (BUDGET / TURN, BUDGET));
        // Once before, once after each turn, and in its place.
        assert_eq!(of(b'l'), (BUDGET / TURN + 2, 0));
        assert_eq!(queues[0].armed.get(), 1);
    }

    #[test]
    fn queues_of_low_latency_do_not_hold_an_interrupt_for_ever() {
        let turns = RefCell::new(KVec::new());
        let queues = [
            queue(&turns, b'a', false, u32::MAX),
            queue(&turns, b'b', false, u32::MAX),
            queue(&turns, b'c', false, u32::MAX),
            queue(&turns, b'l', true, u32::MAX),
        ];
        serve(&queues, NOWHERE);
        let handled = u32::MAX - queues[3].events.get();
        assert_eq!(handled, (LOOKS + 2) * BUDGET);
    }

    #[test]
    fn however_many_queues_share_a_vector_its_interrupt_ends() -> Result {
        let turns = RefCell::new(KVec::new());
        for count in [1, FEW, FEW + 1, 64, 510] {
            // None is of low latency, all are, and each other one.
            for low_latency in [|_| false, |_| true, |at: usize| at % 2 == 0] {
                let mut queues = KVec::with_capacity(count, GFP_KERNEL)?;
                for at in 0..count {
                    let queue = queue(&turns, b'q', low_latency(at), u32::MAX);
                    queues.push(queue, GFP_KERNEL)?;
                }
                turns.borrow_mut().clear();
                assert!(serve(&queues, NOWHERE));
                let (mut all, mut most_of_one) = (0, 0);
                for queue in &queues {
                    let handled = u32::MAX - queue.events.get();
                    // Each has its place, and is armed.
                    assert!(handled >= budget_of_each(count) && queue.armed.get() > 0);
                    if !queue.low_latency {
                        assert_eq!(handled, budget_of_each(count));
                    }
                    all += handled;
                    most_of_one = handled.max(most_of_one);
                }
                let alike = count == 1 || low_latency(0) == low_latency(1);
                let most = if alike { MOST } else { 2 * MOST };
                assert!(all <= most && (most_of_one <= BUDGET || !alike));
            }
        }
        assert_eq!([1, FEW].map(budget_of_each), [BUDGET; 2]);
        assert!(budget_of_each(FEW + 1) < BUDGET);
        assert_eq!(budget_of_each(usize::from(u16::MAX)), 1);
        Ok(())
    }

    #[test]
    fn it_is_said_whether_any_queue_had_something() {
        // A pin that nobody has anything for is another's.
        let turns = RefCell::new(KVec::new());
        for low_latency in [[false; 3], [true; 3], [false, true, false]] {
            for busy in 0..4 {
                let queue = |at: usize| {
                    let events = u32::from(at == busy);
                    queue(&turns, b'q', low_latency[at], events)
                };
                let queues = [queue(0), queue(1), queue(2)];
                assert_eq!(serve(&queues, NOWHERE), busy < queues.len());
            }
        }
        let none: [Queue<'_>; 0] = [];
        assert!(!serve(&none, NOWHERE));
    }

    #[test]
    fn a_queue_that_becomes_one_of_low_latency_meanwhile_is_served() {
        struct Changing<'a>(Queue<'a>, Cell<bool>, Option<&'a Changing<'a>>);
        impl Serve for &Changing<'_> {
            fn is_low_latency(&self) -> bool {
                self.1.get()
            }
            fn serve(&self, budget: u32) -> bool {
                self.0.serve(budget)
            }
            fn turn(&self, budget: u32) -> u32 {
                self.0.turn(budget)
            }
            fn end_turns(&self, handled: u32) -> bool {
                if let Some(other) = self.2 {
                    other.1.set(true);
                }
                self.0.end_turns(handled)
            }
        }
        let turns = RefCell::new(KVec::new());
        let other = Changing(queue(&turns, b'o', false, 1), Cell::new(false), None);
        let low = Changing(queue(&turns, b'l', true, 0), Cell::new(true), None);
        let bulk = Changing(
            queue(&turns, b'b', false, 1),
            Cell::new(false),
            Some(&other),
        );
        let queues = [&low, &bulk, &other];
        serve(&queues, NOWHERE);
        assert_eq!(other.0.armed.get(), 1);
        assert_eq!(other.0.events.get(), 0);
    }
}
