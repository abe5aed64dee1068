// SPDX-License-Identifier: GPL-2.0

//! Which handler a completion queue gets.

use crate::abi;
use kernel::{
    cpu::CpuId,
    prelude::*, //
};

/// Which handler somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// None: no events.
    None,
    /// That whose interrupt arrives at a processor, now and whenever another one does.
    Processor(CpuId),
    /// That of a completion vector, and no other.
    Vector(u32),
    /// That of a completion vector, or the next one where who asks may not have that.
    Near(u32),
}

impl Choice {
    /// That whose interrupt arrives at the processor of who asks.
    pub(crate) fn local() -> Self {
        Self::Processor(CpuId::current())
    }

    /// Of a new completion queue of a process, which says completion vector `vector`.
    ///
    /// Programs say zero who have no wish, as the verbs have no word for that, so that zero is none here: the
    /// queue goes where the program runs. One that wants the first handler moves it there. What users inside
    /// the kernel say is meant: the core has chosen, and finds shared queues by it.
    pub(crate) fn of_process(vector: u32) -> Self {
        match vector {
            0 => Self::local(),
            vector => Self::Near(vector),
        }
    }

    /// Of a completion queue that is to stay at the handler of vector `current`, or to follow a processor.
    pub(super) fn to_settle(current: Option<u32>, follows: Option<CpuId>) -> Self {
        match (follows, current) {
            (Some(cpu), _) => Self::Processor(cpu),
            (None, Some(vector)) => Self::Near(vector),
            (None, None) => Self::None,
        }
    }

    /// Whether it is for a handler of one's own choice: only who names one gets one of low latency.
    pub(crate) fn names_one(self) -> bool {
        matches!(self, Self::Vector(_) | Self::Near(_))
    }

    /// The processor that is followed, if one is.
    pub(crate) fn follows(self) -> Option<CpuId> {
        match self {
            Self::Processor(cpu) => Some(cpu),
            Self::None | Self::Near(_) | Self::Vector(_) => None,
        }
    }

    /// As a process tells it.
    pub(crate) fn from_raw(raw: u32) -> Self {
        match raw {
            abi::UVERBS_CQ_VECTOR_NONE => Self::None,
            abi::UVERBS_CQ_VECTOR_LOCAL => Self::local(),
            vector => Self::Vector(vector),
        }
    }

    /// As people write it.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::None),
            "local" => Ok(Self::local()),
            // Not one of the numbers that are other words.
            number => match Self::from_raw(number.parse().map_err(|_| EINVAL)?) {
                Self::Vector(vector) => Ok(Self::Vector(vector)),
                _ => Err(EINVAL),
            },
        }
    }
}

/// The first of `count` vectors from `vector` on that is `allowed`, or `vector` where none is.
fn next_allowed(count: u32, vector: u32, allowed: impl Fn(u32) -> bool) -> u32 {
    let mut vectors = (0..count).map(|next| (vector + next) % count);
    vectors.find(|vector| allowed(*vector)).unwrap_or(vector)
}

/// One of `count` vectors that is `allowed` and arrives at processor `cpu`: the `current` one if that does. Where
/// several do, as if they were dealt out in turn, and where none does, the current one, if there is one and it is
/// allowed, or as if all were dealt out in turn.
fn local_vector(
    count: u32,
    cpu: u32,
    current: Option<u32>,
    allowed: impl Fn(u32) -> bool,
    arrives: impl Fn(u32) -> bool,
) -> u32 {
    let current = current.filter(|current| allowed(*current));
    if let Some(current) = current.filter(|current| arrives(*current)) {
        return current;
    }
    let here = |vector: &u32| arrives(*vector) && allowed(*vector);
    let arriving = (0..count).filter(here).count().max(1);
    (0..count)
        .filter(here)
        .nth(cpu as usize % arriving)
        .or(current)
        .unwrap_or_else(|| next_allowed(count, cpu % count.max(1), allowed))
}

/// The vector, of `count`, that somebody gets who asks for a handler; `None` for none. `is_bulk` tells of a
/// vector that it is not of low latency, `may` whether he may have those that are, and `arrives` of a vector and
/// a processor whether it does there.
///
/// `EPERM` where he names one that he may not have; who leaves the choice to the driver gets another one. His queue
/// stays at its `current` vector where that will do.
pub(super) fn choose(
    choice: Choice,
    count: u32,
    current: Option<u32>,
    is_bulk: impl Fn(u32) -> bool,
    may: impl Fn() -> bool,
    arrives: impl Fn(u32, CpuId) -> bool,
) -> Result<Option<u32>> {
    // Nobody comes before others where all are alike.
    let allowed = |vector| is_bulk(vector) || !(0..count).any(&is_bulk) || may();
    match choice {
        Choice::None => Ok(None),
        Choice::Vector(vector) if vector >= count => Err(EINVAL),
        Choice::Vector(vector) if !allowed(vector) => Err(EPERM),
        Choice::Vector(vector) => Ok(Some(vector)),
        Choice::Near(vector) => Ok(Some(next_allowed(count, vector, allowed))),
        Choice::Processor(cpu) => {
            let arrives = |vector| arrives(vector, cpu);
            let vector = local_vector(count, cpu.as_u32(), current, allowed, arrives);
            Ok(Some(vector))
        }
    }
}

#[kunit_tests(ferrite_handler_choice)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_chosen_by_a_number_or_a_word() {
        assert_eq!(Choice::from_raw(0), Choice::Vector(0));
        assert_eq!(Choice::from_raw(u32::MAX - 2), Choice::Vector(u32::MAX - 2));
        assert!(Choice::from_raw(u32::MAX - 1).follows().is_some());
        assert_eq!(Choice::from_raw(u32::MAX), Choice::None);
        assert_eq!(Choice::parse("none"), Ok(Choice::None));
        assert!(Choice::parse("local").is_ok_and(|choice| choice.follows().is_some()));
        assert_eq!(Choice::parse("3"), Ok(Choice::Vector(3)));
        for bad in [
            "",
            "-1",
            "None",
            "0x1",
            "1 2",
            "4294967294",
            "4294967295",
            "4294967296",
        ] {
            assert_eq!(Choice::parse(bad), Err(EINVAL));
        }
    }

    #[test]
    fn a_new_queue_of_a_process_without_a_wish_is_local_and_others_are_where_they_say() {
        assert!(Choice::of_process(0).follows().is_some());
        assert_eq!(Choice::of_process(1), Choice::Near(1));
        for choice in [Choice::Near(1), Choice::Vector(0), Choice::None] {
            assert_eq!(choice.follows(), None);
        }
    }

    #[test]
    fn only_who_says_a_number_names_a_handler() {
        assert!(Choice::Vector(0).names_one());
        assert!(Choice::of_process(1).names_one());
        for choice in [Choice::of_process(0), Choice::local(), Choice::None] {
            assert!(!choice.names_one());
        }
    }

    #[test]
    fn a_queue_leaves_a_handler_of_low_latency_that_it_may_not_be_at() -> Result {
        let bulk = |low: &'static [u32]| move |vector: u32| !low.contains(&vector);
        let cpu = CpuId::from_u32(0).ok_or(EINVAL)?;
        let settle = |current, follows, low, may: fn() -> bool| {
            // Handlers 1 and 2 arrive at the processor that is followed.
            let arrives = |vector, _| (1..=2).contains(&vector);
            let choice = Choice::to_settle(current, follows);
            choose(choice, 4, current, bulk(low), may, arrives)
        };
        let (may, may_not) = (|| true, || false);
        for follows in [None, Some(cpu)] {
            // Nothing is marked, others are, and its own.
            assert_eq!(settle(Some(1), follows, &[], may_not), Ok(Some(1)));
            assert_eq!(settle(Some(1), follows, &[0, 2, 3], may_not), Ok(Some(1)));
            assert_eq!(settle(Some(1), follows, &[1], may_not), Ok(Some(2)));
            assert_eq!(settle(Some(1), follows, &[1], may), Ok(Some(1)));
            // All are alike.
            assert_eq!(
                settle(Some(1), follows, &[0, 1, 2, 3], may_not),
                Ok(Some(1))
            );
        }
        // All that arrive are marked.
        assert_eq!(settle(Some(2), Some(cpu), &[1, 2], may_not), Ok(Some(0)));
        // It comes back when one no longer is, if it follows.
        assert_eq!(settle(Some(0), Some(cpu), &[1], may_not), Ok(Some(2)));
        assert_eq!(settle(Some(0), None, &[1], may_not), Ok(Some(0)));
        // What is at none stays there.
        assert_eq!(settle(None, None, &[1], may_not), Ok(None));
        Ok(())
    }

    #[test]
    fn a_process_gets_a_handler_of_low_latency_only_where_it_may() {
        let bulk = |low: &'static [u32]| move |vector: u32| !low.contains(&vector);
        let nowhere = |_, _| false;
        let (may, may_not) = (|| true, || false);
        let near = |vector, low, may: fn() -> bool| {
            choose(Choice::Near(vector), 4, None, bulk(low), may, nowhere)
        };
        assert_eq!(near(1, &[], may_not), Ok(Some(1)));
        assert_eq!(near(1, &[0, 2, 3], may_not), Ok(Some(1)));
        assert_eq!(near(1, &[1], may_not), Ok(Some(2)));
        assert_eq!(near(2, &[2, 3, 0], may_not), Ok(Some(1)));
        assert_eq!(near(1, &[1], may), Ok(Some(1)));
        // Nobody comes before others where all are alike.
        assert_eq!(near(2, &[0, 1, 2, 3], may_not), Ok(Some(2)));
        // Who asks for a bulk one is not looked at.
        assert_eq!(near(0, &[1], || unreachable!()), Ok(Some(0)));
        let named = |vector, low, may: fn() -> bool| {
            choose(Choice::Vector(vector), 4, None, bulk(low), may, nowhere)
        };
        assert_eq!(named(1, &[2], || unreachable!()), Ok(Some(1)));
        assert_eq!(named(1, &[1], may), Ok(Some(1)));
        assert_eq!(named(1, &[1], may_not), Err(EPERM));
        assert_eq!(named(1, &[0, 1, 2, 3], may_not), Ok(Some(1)));
        for vector in [4, u32::MAX] {
            assert_eq!(named(vector, &[1], may), Err(EINVAL));
        }
        let none = choose(Choice::None, 4, Some(1), bulk(&[1]), may_not, nowhere);
        assert_eq!(none, Ok(None));
    }

    #[test]
    fn who_is_local_gets_a_handler_of_low_latency_only_where_he_may() -> Result {
        let local = Choice::Processor(CpuId::from_u32(0).ok_or(EINVAL)?);
        let (may, may_not) = (|| true, || false);
        // Handlers 1 and 2 arrive, of which 1 is of low latency.
        let with = |current, may: fn() -> bool| {
            let arrives = |vector, cpu: CpuId| cpu.as_u32() == 0 && (1..=2).contains(&vector);
            choose(local, 4, current, |vector| vector != 1, may, arrives)
        };
        assert_eq!(with(None, may), Ok(Some(1)));
        assert_eq!(with(None, may_not), Ok(Some(2)));
        assert_eq!(with(Some(3), may_not), Ok(Some(2)));
        assert_eq!(with(Some(1), may), Ok(Some(1)));
        assert_eq!(with(Some(1), may_not), Ok(Some(2)));
        // Only one of low latency does: who follows stays where he is, and who is new is elsewhere.
        let with = |current, may: fn() -> bool| {
            let arrives = |vector, _| vector == 1;
            choose(local, 4, current, |vector| vector > 1, may, arrives)
        };
        assert_eq!(with(Some(3), may), Ok(Some(1)));
        assert_eq!(with(Some(3), may_not), Ok(Some(3)));
        assert_eq!(with(Some(0), may_not), Ok(Some(2)));
        assert_eq!(with(None, may_not), Ok(Some(2)));
        Ok(())
    }

    #[test]
    fn the_local_handler_is_where_its_interrupt_arrives_and_else_in_turn() {
        let any = |_| true;
        let at = |served: u32| move |vector| vector == served;
        assert_eq!(local_vector(4, 0, None, any, at(2)), 2);
        assert_eq!(local_vector(4, 3, None, any, at(0)), 0);
        // In turn among several.
        for (cpu, vector) in [(0, 1), (1, 2), (2, 3), (3, 1)] {
            assert_eq!(local_vector(4, cpu, None, any, |vector| vector > 0), vector);
        }
        for cpu in 0..8 {
            assert_eq!(local_vector(4, cpu, None, any, |_| false), cpu % 4);
        }
        assert_eq!(local_vector(1, 7, None, any, |_| false), 0);
        assert_eq!(local_vector(0, 7, None, any, |_| true), 0);
    }

    #[test]
    fn who_follows_a_processor_moves_only_where_another_handler_arrives_there() {
        let any = |_| true;
        let at = |served: u32| move |vector| vector == served;
        // Its own does, and so do others.
        assert_eq!(local_vector(4, 0, Some(3), any, |_| true), 3);
        assert_eq!(local_vector(4, 0, Some(3), any, at(3)), 3);
        assert_eq!(local_vector(4, 0, Some(3), any, at(1)), 1);
        // None does, as its processor is offline.
        assert_eq!(local_vector(4, 0, Some(3), any, |_| false), 3);
    }
}
