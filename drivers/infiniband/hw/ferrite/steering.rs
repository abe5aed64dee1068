// SPDX-License-Identifier: GPL-2.0

//! Which processor the interrupt of each completion handler arrives at, and what follows when that
//! changes.
//!
//! Each vector of completion handlers has a home, one of the processors that there are, in turn, and all
//! vectors of one handler have the same where they are no other's ([`VectorTable::homes`]). It is steered there
//! when the driver binds, and whenever that processor comes online. When the processor that it is steered to
//! goes offline it goes to one that has few. Anybody may steer it elsewhere (`/proc/irq`): that
//! counts until its home comes online again, or somebody asks for balance.
//!
//! Completion queues that were put where their consumer is follow: when another handler arrives there, and
//! theirs does not, they go to that one. A work item sees to that, and to it that queues leave handlers of low
//! latency that they may not be at.

use crate::{
    cq::FerriteCq,
    hardware::Hardware,
    kernel_ext::{
        cpu,
        cpu::HotplugLock,
        cpu_hotplug::{
            Follower,
            State, //
        },
        irq::Vectors, //
    },
    vector_map::VectorTable,
};
use kernel::{
    cpu::CpuId,
    cpumask::Cpumask,
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// The place of this driver among those who follow processors.
pub(crate) static HOTPLUG: State<Steering> = State::new();

/// Where a vector is.
#[derive(Clone, Copy)]
struct Place {
    /// The processor that it belongs to, if it is one of completion handlers.
    home: Option<u32>,
    /// The processor that it is steered to, where that is known.
    at: Option<u32>,
}

/// Where vectors are.
struct Places(KVec<Place>);

impl Places {
    /// Of vectors with these homes.
    fn new(homes: impl ExactSizeIterator<Item = Option<u32>>) -> Result<Self> {
        let mut places = KVec::with_capacity(homes.len(), GFP_KERNEL)?;
        for home in homes {
            places.push(Place { home, at: None }, GFP_KERNEL)?;
        }
        Ok(Self(places))
    }

    /// The one of `processors` that the fewest vectors are steered to.
    fn least(&self, processors: impl Iterator<Item = u32>) -> Option<u32> {
        processors.min_by_key(|cpu| self.0.iter().filter(|p| p.at == Some(*cpu)).count())
    }

    /// Steers a vector by `steer`, and notes it. Where that is refused nobody knows where it is.
    fn steer(
        &mut self,
        vector: usize,
        cpu: Option<u32>,
        steer: &mut impl FnMut(u32, u32) -> Result,
    ) {
        let at = cpu.filter(|cpu| steer(vector as u32, *cpu).is_ok());
        if let Some(place) = self.0.get_mut(vector) {
            place.at = at;
        }
    }

    /// Steers all vectors that have a home to it, and those whose home is not one of `online` to where there
    /// are few.
    fn balance<I: Iterator<Item = u32>>(
        &mut self,
        online: impl Fn() -> I,
        mut steer: impl FnMut(u32, u32) -> Result,
    ) {
        for place in self.0.iter_mut().filter(|place| place.home.is_some()) {
            place.at = None;
        }
        for homeless in [false, true] {
            for vector in 0..self.0.len() {
                let Some(home) = self.0.get(vector).and_then(|place| place.home) else {
                    continue;
                };
                let is_homeless = !online().any(|cpu| cpu == home);
                if is_homeless == homeless {
                    let cpu = if homeless {
                        self.least(online())
                    } else {
                        Some(home)
                    };
                    self.steer(vector, cpu, &mut steer);
                }
            }
        }
    }

    /// Processor `cpu` has come online: vectors whose home it is go there.
    fn came(&mut self, cpu: u32, mut steer: impl FnMut(u32, u32) -> Result) {
        for vector in 0..self.0.len() {
            let place = self.0.get(vector);
            if place.is_some_and(|p| p.home == Some(cpu) && p.at != Some(cpu)) {
                self.steer(vector, Some(cpu), &mut steer);
            }
        }
    }

    /// Processor `cpu`, still one of `online`, goes: completion vectors that are steered to it go to others. Where
    /// other vectors go is the kernel's choice.
    fn goes<I: Iterator<Item = u32>>(
        &mut self,
        cpu: u32,
        online: impl Fn() -> I,
        mut steer: impl FnMut(u32, u32) -> Result,
    ) {
        for vector in 0..self.0.len() {
            let place = self.0.get_mut(vector).filter(|p| p.at == Some(cpu));
            let Some(place) = place else {
                continue;
            };
            if place.home.is_some() {
                let other = self.least(online().filter(|other| *other != cpu));
                self.steer(vector, other, &mut steer);
            } else {
                place.at = None;
            }
        }
    }

    /// A vector was steered to processors of which `allows` says whether they are among them, and `only` is the
    /// one where there are not several. Returns whether it may be elsewhere now.
    fn steered(
        &mut self,
        vector: usize,
        only: Option<u32>,
        allows: impl FnOnce(u32) -> bool,
    ) -> bool {
        let Some(place) = self.0.get_mut(vector) else {
            return false;
        };
        if only.is_none() && place.at.is_some_and(allows) {
            // As far as is known.
            return false;
        }
        let before = core::mem::replace(&mut place.at, only);
        // From several to several it may be that it is at another one.
        before != only || only.is_none()
    }

    /// The processor that a vector is steered to, where that is known.
    fn at(&self, vector: u16) -> Option<u32> {
        self.0.get(usize::from(vector)).and_then(|place| place.at)
    }
}

/// Steers the vectors of a device.
#[pin_data]
pub(crate) struct Steering {
    hw: Arc<Hardware>,
    vectors: Arc<Vectors>,
    /// Held while vectors are steered.
    #[pin]
    places: Mutex<Places>,
    /// Has completion queues settle.
    #[pin]
    work: Work<Steering>,
}

impl_has_work! {
    impl HasWork<Self> for Steering { self.work }
}

impl Steering {
    /// Of `vectors`, of which those of `table` have handlers. Nothing is steered yet.
    pub(crate) fn new(
        hw: &Arc<Hardware>,
        vectors: &Arc<Vectors>,
        table: &VectorTable,
    ) -> Result<Arc<Self>> {
        let homes = table.homes()?;
        let homes = homes.iter().take(vectors.len() as usize);
        let places = Places::new(homes.map(|home| home.map(cpu::nth_present)))?;
        let init = pin_init!(Self {
            hw: hw.clone(),
            vectors: vectors.clone(),
            places <- new_mutex!(places, "ferrite_steering"),
            work <- new_work!("ferrite_steering"),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Steers all vectors of completion handlers anew, whatever anybody else did, and has completion queues
    /// settle. Sleeps.
    pub(crate) fn balance(self: &Arc<Self>) {
        let steer = |vector, cpu| self.vectors.steer(vector, cpu);
        {
            // One that is about to go is steered to by nobody, once those who follow it were told.
            let _hotplug = HotplugLock::new();
            self.places.lock().balance(cpu::online, steer);
        }
        self.settle_queues();
    }

    /// Calls `look` with a function that tells whether a vector arrives at a processor. Sleeps.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&dyn Fn(u16, CpuId) -> bool) -> R) -> R {
        let places = self.places.lock();
        look(&|vector: u16, cpu: CpuId| match places.at(vector) {
            Some(at) => at == cpu.as_u32(),
            None => self.vectors.arrives_at(vector.into(), cpu).unwrap_or(false),
        })
    }

    /// Vector `vector` was steered to processors of `mask`, by anybody. Sleeps.
    pub(crate) fn steered(self: &Arc<Self>, vector: u16, mask: &Cpumask) {
        let allows = |cpu| CpuId::from_u32(cpu).is_some_and(|cpu| mask.test(cpu));
        let mut online = cpu::online().filter(|cpu| allows(*cpu));
        let only = online.next().filter(|_| online.next().is_none());
        let changed = self.places.lock().steered(vector.into(), only, allows);
        if changed {
            self.settle_queues();
        }
    }

    /// Has all completion queues go where they belong, soon: interrupts arrive elsewhere, or handlers have another
    /// priority. May be called from any context.
    pub(crate) fn settle_queues(self: &Arc<Self>) {
        // Where it is queued already, it has yet to look.
        drop(self.hw.work.enqueue(self.clone()));
    }
}

impl WorkItem for Steering {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        FerriteCq::settle_all(&this.hw);
    }
}

impl Follower for Steering {
    fn came(this: &Arc<Self>, cpu: u32) {
        let steer = |vector, cpu| this.vectors.steer(vector, cpu);
        this.places.lock().came(cpu, steer);
        this.settle_queues();
    }

    fn goes(this: &Arc<Self>, cpu: u32) {
        let steer = |vector, cpu| this.vectors.steer(vector, cpu);
        this.places.lock().goes(cpu, cpu::online, steer);
        this.settle_queues();
    }
}

#[kunit_tests(ferrite_steering)]
mod tests {
    use super::*;

    /// Where vectors are.
    fn at(places: &Places) -> Result<KVec<Option<u32>>> {
        let mut at = KVec::new();
        for place in &places.0 {
            at.push(place.at, GFP_KERNEL)?;
        }
        Ok(at)
    }

    const fn some(cpu: u32) -> Option<u32> {
        Some(cpu)
    }

    /// Vectors 0 and 1 for commands and asynchronous events, and `handlers` more, for `processors` in turn,
    /// steered with these online.
    fn balanced(handlers: u32, processors: u32, online: &[u32]) -> Result<Places> {
        let homes = (0..2 + handlers).map(|vector| Some(vector.checked_sub(2)? % processors));
        let mut places = Places::new(homes)?;
        places.balance(|| online.iter().copied(), |_, _| Ok(()));
        Ok(places)
    }

    #[test]
    fn vectors_are_spread_over_processors() -> Result {
        for (handlers, processors, online, expected) in [
            // As many, more, fewer, one; and where some are offline.
            (4, 4, &[0, 1, 2, 3][..], &[0, 1, 2, 3][..]),
            (5, 2, &[0, 1][..], &[0, 1, 0, 1, 0][..]),
            (2, 4, &[0, 1, 2, 3][..], &[0, 1][..]),
            (1, 4, &[0, 1, 2, 3][..], &[0][..]),
            (4, 4, &[0, 1, 3][..], &[0, 1, 0, 3][..]),
            (4, 4, &[0, 3][..], &[0, 0, 3, 3][..]),
            (4, 4, &[2][..], &[2, 2, 2, 2][..]),
        ] {
            let places = balanced(handlers, processors, online)?;
            let found = at(&places)?;
            assert!(found[..2].iter().all(Option::is_none));
            let found = found[2..].iter().copied();
            assert!(found.eq(expected.iter().copied().map(Some)));
        }
        Ok(())
    }

    #[test]
    fn a_vector_leaves_with_its_processor_and_comes_back_with_it() -> Result {
        let mut places = balanced(4, 4, &[0, 1, 2, 3])?;
        let mut steered = KVec::new();
        let mut steer = |vector: u32, cpu: u32| -> Result {
            steered.push((vector, cpu), GFP_KERNEL)?;
            Ok(())
        };
        places.goes(2, || 0..4, &mut steer);
        places.goes(3, || [0, 1, 3].into_iter(), &mut steer);
        // Both that were there go on, each to where there are fewest.
        places.goes(0, || [0, 1].into_iter(), &mut steer);
        places.came(2, &mut steer);
        places.came(3, &mut steer);
        places.came(0, &mut steer);
        // It is there already.
        places.came(0, &mut steer);
        assert_eq!(
            steered.as_slice(),
            [(4, 0), (5, 1), (2, 1), (4, 1), (4, 2), (5, 3), (2, 0)].as_slice()
        );
        assert_eq!(
            &at(&places)?[2..],
            [some(0), some(1), some(2), some(3)].as_slice()
        );
        Ok(())
    }

    #[test]
    fn what_somebody_else_steers_counts_until_its_home_comes_online() -> Result {
        let mut places = balanced(2, 2, &[0, 1])?;
        assert!(places.steered(2, Some(1), |cpu| cpu == 1));
        assert!(!places.steered(2, Some(1), |cpu| cpu == 1));
        assert_eq!(places.at(2), Some(1));
        // One of several: it stays where it is, or nobody knows.
        assert!(!places.steered(3, None, |_| true));
        assert_eq!(places.at(3), Some(1));
        assert!(places.steered(3, None, |cpu| cpu != 1));
        assert_eq!(places.at(3), None);
        // To others, of which nobody knows either.
        assert!(places.steered(3, None, |cpu| cpu > 1));
        assert_eq!(places.at(3), None);
        // Another's processor.
        places.came(1, |vector, cpu| {
            assert_eq!((vector, cpu), (3, 1));
            Ok(())
        });
        assert_eq!(places.at(2), Some(1));
        places.came(0, |vector, cpu| {
            assert_eq!((vector, cpu), (2, 0));
            Ok(())
        });
        assert_eq!(places.at(2), Some(0));
        // There is no such vector.
        assert!(!places.steered(4, Some(0), |_| true));
        assert_eq!(places.at(4), None);
        Ok(())
    }

    #[test]
    fn nobody_knows_where_a_vector_is_that_cannot_be_steered() -> Result {
        let mut places = balanced(2, 2, &[0, 1])?;
        places.goes(1, || 0..2, |_, _| Err(EINVAL));
        assert_eq!(places.at(3), None);
        // It is tried again.
        places.came(1, |_, _| Ok(()));
        assert_eq!(places.at(3), Some(1));
        // The last processor does not go; whoever says so gets nothing for it.
        places.goes(1, || 1..2, |_, _| Ok(()));
        assert_eq!(places.at(3), None);
        // Those of commands and asynchronous events are the kernel's to steer, who does not say where to.
        assert!(places.steered(0, Some(1), |_| true));
        assert!(places.steered(1, Some(0), |_| true));
        places.goes(1, || 0..2, |_, _| unreachable!());
        assert_eq!((places.at(0), places.at(1)), (None, Some(0)));
        Ok(())
    }
}
