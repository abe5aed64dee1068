// SPDX-License-Identifier: GPL-2.0

//! Memory that the device was told of, and whether the device may still touch it.
//!
//! While a device works, memory is freed when the device has said that it let go: the command that
//! takes an object down is answered. A device that failed says nothing any more. It is stopped
//! then, by the gentlest means that works; where none does, what it was told of is never freed.

use crate::kernel_ext::memory;
use crate::net::{
    ReceivePages,
    SentFrames, //
};
use core::{
    mem::{
        self,
        ManuallyDrop, //
    },
    ops::{
        Deref,
        DerefMut, //
    },
};
use kernel::{
    dma::Coherent,
    io::poll::read_poll_timeout,
    new_mutex,
    prelude::*,
    ptr::KnownSize,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        Arc,
        Mutex,
        MutexGuard, //
    },
    time::Delta,
};

/// What a device may do to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It is at work, or was never started: it touches what it was told of and has not let go of.
    Working,
    /// It was seen to be reset, or is gone: it touches nothing.
    Stopped,
    /// Nothing stops it, as far as can be seen: it may touch anything that it was ever told of.
    Unstoppable,
}

/// The [`Reach`] of one device, shared by everything that holds memory for it. It leaves `Working`
/// once.
pub(crate) struct DeviceReach(Atomic<u32>);

impl DeviceReach {
    const WORKING: u32 = 0;
    const STOPPED: u32 = 1;
    const UNSTOPPABLE: u32 = 2;

    /// Of a device that was told of nothing yet.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self(Atomic::new(Self::WORKING)), GFP_KERNEL)?)
    }

    /// What the device may do now.
    pub(crate) fn get(&self) -> Reach {
        match self.0.load(Acquire) {
            Self::WORKING => Reach::Working,
            Self::STOPPED => Reach::Stopped,
            _ => Reach::Unstoppable,
        }
    }

    /// Notes what became of the device. Only the first time counts.
    pub(crate) fn set(&self, reach: Reach) {
        let number = match reach {
            Reach::Working => return,
            Reach::Stopped => Self::STOPPED,
            Reach::Unstoppable => Self::UNSTOPPABLE,
        };
        let _ = self.0.cmpxchg(Self::WORKING, number, Release);
    }
}

/// The means to stop a device, which is got hold of as long as this lives.
///
/// Dropping it may take any lock of the kernel and allocate, after [`Stop::reset_function`].
pub(crate) trait Stop {
    /// Resets the device by its own register, and waits for that: `ENODEV` where there is no
    /// device any more. Sleeps.
    fn reset(&self) -> Result;
    /// `ENODEV` where there is no device any more.
    fn presence(&self) -> Result;
    /// Takes the right to start transfers on the bus from it.
    fn clear_bus_master(&self);
    /// Resets it by means of the bus, and waits for that. Sleeps.
    fn reset_function(&self) -> Result;
}

/// Whether a device touches no memory any more, by how [`Stop::reset`] ended.
fn touches_nothing(reset: Result) -> bool {
    match reset {
        Ok(()) => true,
        // Nothing is left to touch memory.
        Err(error) => error == ENODEV,
    }
}

/// By what a device may be stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Means {
    /// By its own register.
    Register,
    /// By its own register, else by those of the bus. Not where memory is being taken back.
    Any,
}

/// Stops a device: by a reset, else by taking the bus from it and a reset of the function, of
/// which it has to say itself that it worked. Gives nothing where more is needed than `means`. Sleeps.
///
/// One that `resists` its register, as was seen before, is not waited for once more: its function is reset first.
fn stop(device: &impl Stop, means: Means, resists: bool) -> Option<Reach> {
    let reset = if resists {
        device.presence().and(Err(ETIMEDOUT))
    } else {
        device.reset()
    };
    if reset.is_err() {
        // One that seems gone may only be out of reach of its registers.
        device.clear_bus_master();
    }
    if touches_nothing(reset) {
        return Some(Reach::Stopped);
    }
    if means != Means::Any {
        return None;
    }
    let function_reset = device.reset_function();
    // Where there is no such reset, one that resisted may have taken its time only. Registers that cannot be reached
    // now may be so because of this reset. A device that hung and is pulled out just now counts as one that nothing
    // stopped: rather is its memory lost than that of others written to.
    if (function_reset.is_ok() || resists) && device.reset().is_ok() {
        Some(Reach::Stopped)
    } else {
        Some(Reach::Unstoppable)
    }
}

/// Stops a device once, whoever wants it stopped.
#[pin_data]
pub(crate) struct Stopper {
    reach: Arc<DeviceReach>,
    /// Held while the device is being stopped, and by who gives that up.
    #[pin]
    turn: Mutex<()>,
    /// That its own register did not stop the device, once this is not zero.
    resists: Atomic<u32>,
}

impl Stopper {
    /// Of the device whose reach this is.
    pub(crate) fn new(reach: &Arc<DeviceReach>) -> impl PinInit<Self> + '_ {
        pin_init!(Self {
            reach: reach.clone(),
            turn <- new_mutex!((), "ferrite_stopping"),
            resists: Atomic::new(0),
        })
    }

    fn is_stopped(&self) -> bool {
        self.reach.get() != Reach::Working
    }

    /// Stops the device. `claim` gets hold of it, unless somebody else has it: then it is tried again
    /// every `poll`, for up to `timeout`. Sleeps. Not where memory is being taken back.
    ///
    /// Where this is what makes the device [`Reach::Unstoppable`], it says why: `ETIMEDOUT` where nobody
    /// got hold of it, `EIO` where nothing stopped it.
    pub(crate) fn stop<S: Stop>(
        &self,
        claim: impl FnMut() -> Option<S>,
        poll: Delta,
        timeout: Delta,
    ) -> Result {
        self.stop_by(Means::Any, claim, poll, timeout)
    }

    /// The same for everybody else: where its register does not stop the device, waits until
    /// [`Self::stop`] does, which somebody has begun or is about to begin. Sleeps, but allocates nothing,
    /// and takes no lock under which others allocate.
    pub(crate) fn stop_or_wait<S: Stop>(
        &self,
        claim: impl FnMut() -> Option<S>,
        poll: Delta,
        timeout: Delta,
    ) -> Result {
        self.stop_by(Means::Register, claim, poll, timeout)
    }

    fn stop_by<S: Stop>(
        &self,
        means: Means,
        mut claim: impl FnMut() -> Option<S>,
        poll: Delta,
        timeout: Delta,
    ) -> Result {
        let tried = read_poll_timeout(
            || Ok(self.try_stop(means, &mut claim)),
            |tried| tried.is_some(),
            poll,
            timeout,
        );
        match tried {
            Ok(Some(result)) => result,
            _ => self.stop_or_give_up(means, claim),
        }
    }

    /// Stops the device, if it can be got hold of now and `means` are enough.
    fn try_stop<S: Stop>(&self, means: Means, claim: impl FnOnce() -> Option<S>) -> Option<Result> {
        if self.is_stopped() {
            return Some(Ok(()));
        }
        // Dropped after the turn: nobody waits for that any more.
        let mut device = None;
        let _turn = self.take_turn(means)?;
        self.stop_in_turn(means, claim, &mut device)
    }

    /// Takes the turn, unless it is another's and is not to be waited for: a reset of the function may wait
    /// for those who wait for memory.
    fn take_turn(&self, means: Means) -> Option<MutexGuard<'_, ()>> {
        match means {
            Means::Register => self.turn.try_lock(),
            Means::Any => Some(self.turn.lock()),
        }
    }

    /// The same, but gives the device up if it cannot.
    fn stop_or_give_up<S: Stop>(&self, means: Means, claim: impl FnOnce() -> Option<S>) -> Result {
        // Dropped after the turn, as above.
        let mut device = None;
        let turn = self.take_turn(means);
        turn.as_ref()
            .and_then(|_| self.stop_in_turn(means, claim, &mut device))
            .unwrap_or_else(|| {
                // Who is to stop the device gets hold of it in his turn only: either this is ours, and
                // somebody has it for another reason or nobody came to stop it, or whose it is takes too
                // long.
                self.reach.set(Reach::Unstoppable);
                Err(ETIMEDOUT)
            })
    }

    /// [`Stopper::try_stop`] with the turn taken. What was got hold of is left in `device`.
    fn stop_in_turn<S: Stop>(
        &self,
        means: Means,
        claim: impl FnOnce() -> Option<S>,
        device: &mut Option<S>,
    ) -> Option<Result> {
        if self.is_stopped() {
            return Some(Ok(()));
        }
        let resists = self.resists.load(Relaxed) != 0;
        if means == Means::Register && resists {
            return None;
        }
        // Held until it is known what became of the device.
        let device = device.insert(claim()?);
        // Memory management may wait for its turn to stop the device, and a reset may allocate.
        let Some(reach) = memory::without_reclaim(|| stop(device, means, resists)) else {
            self.resists.store(1, Relaxed);
            return None;
        };
        self.reach.set(reach);
        Some(match reach {
            Reach::Unstoppable => Err(EIO),
            _ => Ok(()),
        })
    }

    /// Stops the device by `reset` alone, by somebody who has hold of it already. Where that fails, it is
    /// left to [`Stopper::stop`]. Sleeps.
    pub(crate) fn stop_gently(&self, reset: impl FnOnce() -> Result) {
        let _turn = self.turn.lock();
        if !self.is_stopped() && memory::without_reclaim(reset).is_ok() {
            self.reach.set(Reach::Stopped);
        }
    }
}

/// What can be left to a device for ever.
pub(crate) trait Leak {
    /// Leaves it: no memory of it is ever freed, and nobody waits for that.
    fn leak(self);
}

impl Leak for SentFrames {
    fn leak(self) {
        // Of a frame there is more than its memory.
        self.abandon();
    }
}

impl Leak for ReceivePages {
    fn leak(self) {
        mem::forget(self);
    }
}

impl<T: KnownSize + ?Sized> Leak for Coherent<T> {
    fn leak(self) {
        mem::forget(self);
    }
}

/// Memory that the device is told of: dropping it frees it, unless the device is
/// [`Reach::Unstoppable`].
///
/// Whoever drops it has made sure before that the device let go or was stopped. Whoever makes it
/// finds out afterwards whether the device failed, and does not tell it then, as the control queue
/// does.
pub(crate) struct Lent<T: Leak> {
    memory: ManuallyDrop<T>,
    /// None where the device had failed before: it is never told of the memory.
    reach: Option<Arc<DeviceReach>>,
}

impl<T: Leak> Lent<T> {
    /// Lends `memory` to a device.
    pub(crate) fn new(reach: &Arc<DeviceReach>, memory: T) -> Self {
        Self {
            memory: ManuallyDrop::new(memory),
            reach: (reach.get() == Reach::Working).then(|| reach.clone()),
        }
    }
}

impl<T: Leak> Deref for Lent<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.memory
    }
}

impl<T: Leak> DerefMut for Lent<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.memory
    }
}

impl<T: Leak> Drop for Lent<T> {
    fn drop(&mut self) {
        // SAFETY: The memory is taken here and nowhere else.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        match self.reach.as_ref().map(|reach| reach.get()) {
            Some(Reach::Unstoppable) => memory.leak(),
            _ => drop(memory),
        }
    }
}

#[kunit_tests(ferrite_lent)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};

    /// A device whose resets may fail, and what was done to it.
    struct Stubborn {
        resets: RefCell<KVec<Result>>,
        function_reset: Result,
        master: Cell<bool>,
        function_resets: Cell<u32>,
    }

    impl Stubborn {
        /// Resets by register answer one after the other what is in `resets`, the last one first.
        fn new(resets: &[Result], function_reset: Result) -> Result<Self> {
            let mut answers = KVec::new();
            answers.extend_from_slice(resets, GFP_KERNEL)?;
            Ok(Self {
                resets: RefCell::new(answers),
                function_reset,
                master: Cell::new(true),
                function_resets: Cell::new(0),
            })
        }
    }

    impl Stop for Stubborn {
        fn reset(&self) -> Result {
            self.resets.borrow_mut().pop().unwrap_or(Err(EIO))
        }

        fn presence(&self) -> Result {
            match self.resets.borrow().last() {
                Some(Err(error)) if *error == ENODEV => Err(ENODEV),
                _ => Ok(()),
            }
        }

        fn clear_bus_master(&self) {
            self.master.set(false);
        }

        fn reset_function(&self) -> Result {
            assert!(!self.master.get());
            self.function_resets.set(self.function_resets.get() + 1);
            self.function_reset
        }
    }

    #[test]
    fn a_reset_that_works_is_enough() -> Result {
        for answer in [Ok(()), Err(ENODEV)] {
            let device = Stubborn::new(&[answer], Err(EIO))?;
            assert_eq!(stop(&device, Means::Any, false), Some(Reach::Stopped));
            // Who says so itself needs nothing taken.
            assert_eq!(device.master.get(), answer.is_ok());
            assert_eq!(device.function_resets.get(), 0);
        }
        Ok(())
    }

    #[test]
    fn a_reset_that_times_out_is_not_taken_for_a_stop() -> Result {
        // Neither by the register nor by the bus.
        let device = Stubborn::new(&[Err(ETIMEDOUT)], Err(ENOTTY))?;
        assert_eq!(stop(&device, Means::Any, false), Some(Reach::Unstoppable));
        assert!(!device.master.get());
        // The bus says that it was reset, the device does not.
        let device = Stubborn::new(&[Err(ETIMEDOUT), Err(ETIMEDOUT)], Ok(()))?;
        assert_eq!(stop(&device, Means::Any, false), Some(Reach::Unstoppable));
        // Its registers cannot be reached any more.
        let device = Stubborn::new(&[Err(ENODEV), Err(ETIMEDOUT)], Ok(()))?;
        assert_eq!(stop(&device, Means::Any, false), Some(Reach::Unstoppable));
        // Both do.
        let device = Stubborn::new(&[Ok(()), Err(ETIMEDOUT)], Ok(()))?;
        assert_eq!(stop(&device, Means::Any, false), Some(Reach::Stopped));
        assert!(!device.master.get());
        assert_eq!(device.function_resets.get(), 1);
        Ok(())
    }

    /// A device that is looked at when it was stopped.
    impl Stop for &Stubborn {
        fn reset(&self) -> Result {
            Stubborn::reset(self)
        }

        fn presence(&self) -> Result {
            Stubborn::presence(self)
        }

        fn clear_bus_master(&self) {
            Stubborn::clear_bus_master(self);
        }

        fn reset_function(&self) -> Result {
            Stubborn::reset_function(self)
        }
    }

    /// A device of a given reach, and who stops it.
    fn stopper(reach: Reach) -> Result<(Arc<DeviceReach>, Pin<KBox<Stopper>>)> {
        let device = DeviceReach::new()?;
        device.set(reach);
        let stopper = KBox::pin_init(Stopper::new(&device), GFP_KERNEL)?;
        Ok((device, stopper))
    }

    #[test]
    fn who_gives_up_tries_once_more_in_turn() -> Result {
        let (reach, stopper) = stopper(Reach::Working)?;
        let claim = || Stubborn::new(&[Ok(())], Err(EIO)).ok();
        assert_eq!(stopper.stop_or_give_up(Means::Any, claim), Ok(()));
        assert_eq!(reach.get(), Reach::Stopped);
        Ok(())
    }

    #[test]
    fn nobody_gets_hold_of_a_device_out_of_turn() -> Result {
        // Else somebody could give up in between.
        let (reach, stopper) = stopper(Reach::Working)?;
        let mut claims = 0;
        let claim = || {
            assert!(stopper.turn.try_lock().is_none());
            claims += 1;
            match claims {
                1 => None,
                _ => Stubborn::new(&[Ok(())], Err(EIO)).ok(),
            }
        };
        assert_eq!(
            stopper.stop(claim, Delta::ZERO, Delta::from_secs(60)),
            Ok(())
        );
        assert_eq!(claims, 2);
        assert_eq!(reach.get(), Reach::Stopped);
        Ok(())
    }

    #[test]
    fn a_device_is_given_up_when_it_resists_or_nobody_gets_hold_of_it() -> Result {
        let (reach, resists) = stopper(Reach::Working)?;
        let claim = || Stubborn::new(&[], Err(ENOTTY)).ok();
        assert_eq!(resists.stop(claim, Delta::ZERO, Delta::ZERO), Err(EIO));
        assert_eq!(reach.get(), Reach::Unstoppable);
        let (reach, busy) = stopper(Reach::Working)?;
        let claim = || None::<Stubborn>;
        assert_eq!(busy.stop(claim, Delta::ZERO, Delta::ZERO), Err(ETIMEDOUT));
        assert_eq!(reach.get(), Reach::Unstoppable);
        // Once.
        assert_eq!(busy.stop(claim, Delta::ZERO, Delta::ZERO), Ok(()));
        Ok(())
    }

    #[test]
    fn a_device_that_resists_its_register_is_left_to_those_with_other_means() -> Result {
        let (reach, stopper) = stopper(Reach::Working)?;
        let claims = Cell::new(0);
        // Who may not reset the function tries the register once, and takes the bus away.
        let gentle = || {
            claims.set(claims.get() + 1);
            Stubborn::new(&[Err(ETIMEDOUT)], Ok(())).ok()
        };
        for _ in 0..2 {
            assert_eq!(stopper.try_stop(Means::Register, gentle), None);
        }
        assert_eq!(claims.get(), 1);
        assert_eq!(reach.get(), Reach::Working);
        let device = Stubborn::new(&[Err(ETIMEDOUT)], Ok(()))?;
        assert_eq!(stop(&device, Means::Register, false), None);
        assert!(!device.master.get());
        assert_eq!(device.function_resets.get(), 0);
        // Who may does, without the register that did not help before, and those who waited find it stopped.
        let device = Stubborn::new(&[Ok(())], Ok(()))?;
        let any = || Some(&device);
        assert_eq!(stopper.stop(any, Delta::ZERO, Delta::ZERO), Ok(()));
        assert_eq!(reach.get(), Reach::Stopped);
        assert_eq!(device.function_resets.get(), 1);
        assert_eq!(stopper.try_stop(Means::Register, gentle), Some(Ok(())));
        assert_eq!(claims.get(), 1);
        Ok(())
    }

    #[test]
    fn a_device_that_resisted_its_register_is_reset_by_it_after_all_where_the_bus_does_not(
    ) -> Result {
        for (answer, expected) in [
            (Ok(()), Reach::Stopped),
            (Err(ETIMEDOUT), Reach::Unstoppable),
        ] {
            let device = Stubborn::new(&[answer], Err(ENOTTY))?;
            assert_eq!(stop(&device, Means::Any, true), Some(expected));
            assert!(!device.master.get());
            assert_eq!(device.function_resets.get(), 1);
            assert!(device.resets.borrow().is_empty());
        }
        // Unless it is gone.
        let device = Stubborn::new(&[Err(ENODEV)], Err(ENODEV))?;
        assert_eq!(stop(&device, Means::Any, true), Some(Reach::Stopped));
        assert!(!device.master.get());
        assert_eq!(device.function_resets.get(), 0);
        Ok(())
    }

    #[test]
    fn who_waits_in_vain_for_those_with_other_means_gives_the_device_up() -> Result {
        let (reach, stopper) = stopper(Reach::Working)?;
        let gentle = || Stubborn::new(&[Err(ETIMEDOUT)], Ok(())).ok();
        assert_eq!(
            stopper.stop_or_wait(gentle, Delta::ZERO, Delta::ZERO),
            Err(ETIMEDOUT)
        );
        assert_eq!(reach.get(), Reach::Unstoppable);
        Ok(())
    }

    #[test]
    fn who_may_be_waited_for_does_not_wait_for_the_turn() -> Result {
        let (reach, stopper) = stopper(Reach::Working)?;
        let gentle = || Stubborn::new(&[Ok(())], Ok(())).ok();
        let turn = stopper.turn.lock();
        assert_eq!(stopper.try_stop(Means::Register, gentle), None);
        assert_eq!(reach.get(), Reach::Working);
        assert_eq!(
            stopper.stop_or_wait(gentle, Delta::ZERO, Delta::ZERO),
            Err(ETIMEDOUT)
        );
        assert_eq!(reach.get(), Reach::Unstoppable);
        drop(turn);
        Ok(())
    }

    /// A device that is let go of out of turn only.
    struct Watched<'a>(Stubborn, &'a Stopper, &'a Cell<u32>);

    impl Stop for Watched<'_> {
        fn reset(&self) -> Result {
            self.0.reset()
        }

        fn presence(&self) -> Result {
            self.0.presence()
        }

        fn clear_bus_master(&self) {
            self.0.clear_bus_master();
        }

        fn reset_function(&self) -> Result {
            self.0.reset_function()
        }
    }

    impl Drop for Watched<'_> {
        fn drop(&mut self) {
            assert!(self.1.turn.try_lock().is_some());
            assert_eq!(self.1.reach.get(), Reach::Stopped);
            self.2.set(self.2.get() + 1);
        }
    }

    #[test]
    fn a_device_is_let_go_of_when_nobody_waits_any_more() -> Result {
        let dropped = Cell::new(0);
        for gives_up in [false, true] {
            let (_reach, stopper) = stopper(Reach::Working)?;
            let claim = || {
                let device = Stubborn::new(&[Ok(()), Err(ETIMEDOUT)], Ok(())).ok()?;
                Some(Watched(device, &stopper, &dropped))
            };
            if gives_up {
                assert_eq!(stopper.stop_or_give_up(Means::Any, claim), Ok(()));
            } else {
                assert_eq!(stopper.stop(claim, Delta::ZERO, Delta::ZERO), Ok(()));
            }
        }
        assert_eq!(dropped.get(), 2);
        Ok(())
    }

    #[test]
    fn what_is_stopped_is_left_alone() -> Result {
        for reach in [Reach::Stopped, Reach::Unstoppable] {
            let (device, stopper) = stopper(reach)?;
            let claims = Cell::new(0);
            let claim = || {
                claims.set(claims.get() + 1);
                Stubborn::new(&[Ok(())], Err(EIO)).ok()
            };
            assert_eq!(stopper.stop(claim, Delta::ZERO, Delta::ZERO), Ok(()));
            assert_eq!(stopper.stop_or_give_up(Means::Any, claim), Ok(()));
            stopper.stop_gently(|| {
                claims.set(claims.get() + 1);
                Ok(())
            });
            assert_eq!(claims.get(), 0);
            assert_eq!(device.get(), reach);
        }
        Ok(())
    }

    #[test]
    fn a_gentle_reset_that_fails_leaves_the_device_to_others() -> Result {
        let (reach, stopper) = stopper(Reach::Working)?;
        stopper.stop_gently(|| Err(ENODEV));
        assert_eq!(reach.get(), Reach::Working);
        stopper.stop_gently(|| Ok(()));
        assert_eq!(reach.get(), Reach::Stopped);
        Ok(())
    }

    /// Memory that tells when it is freed.
    struct Noted<'a>(&'a Cell<bool>);

    impl Drop for Noted<'_> {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }

    impl Leak for Noted<'_> {
        fn leak(self) {
            mem::forget(self);
        }
    }

    #[test]
    fn what_an_unstoppable_device_is_not_told_of_is_freed() -> Result {
        let device = DeviceReach::new()?;
        device.set(Reach::Unstoppable);
        let freed = Cell::new(false);
        drop(Lent::new(&device, Noted(&freed)));
        assert!(freed.get());
        Ok(())
    }

    #[test]
    fn what_an_unstoppable_device_knows_is_never_freed() -> Result {
        for (reach, is_freed) in [
            (Reach::Working, true),
            (Reach::Stopped, true),
            (Reach::Unstoppable, false),
        ] {
            let device = DeviceReach::new()?;
            let freed = Cell::new(false);
            let lent = Lent::new(&device, Noted(&freed));
            assert!(!lent.0.get());
            device.set(reach);
            // What was said first holds.
            if reach != Reach::Working {
                device.set(Reach::Stopped);
            }
            assert_eq!(device.get(), reach);
            drop(lent);
            assert_eq!(freed.get(), is_freed);
        }
        Ok(())
    }
}
