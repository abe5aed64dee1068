// SPDX-License-Identifier: GPL-2.0

//! Coming back after a failure: what a PCI function has for as long as the driver is bound to it, the lives
//! of its device, and when another one is tried.
//!
//! A device that failed leaves its consumers with errors. They are given a moment to notice and to let go by
//! themselves; then the RDMA device is unregistered, and after a reset that the device has confirmed it is
//! registered again, as a new one of the same name. devlink is told, and asked whether that is wanted; it can
//! ask for it, too. A device that fails again and again is left alone in the end.

use crate::{
    bars::{
        Doorbells,
        Registers, //
    },
    hardware::{
        Cause,
        Hardware, //
    },
    kernel_ext::{
        devlink::{
            Devlink,
            Diagnosis,
            HealthReporter, //
        },
        pci::Binding,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        workqueue::{
            flush_delayed,
            OwnedQueue, //
        },
    },
    pci::Life,
    rdma::DeviceName,
};
use kernel::{
    device::Bound,
    impl_has_delayed_work, new_delayed_work, new_mutex, pci,
    prelude::*,
    sync::{
        aref::ARef,
        Arc,
        ArcBorrow,
        Mutex, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Monotonic, //
    },
    workqueue::{
        DelayedWork,
        WorkItem, //
    },
};

/// Milliseconds from a failure to each attempt to come back, one after the other. The first lets consumers
/// notice, and let go of what they have: those whose device is taken from them instead may not come back to
/// it.
const WAITS: [u32; 5] = [1_000, 2_000, 4_000, 8_000, 16_000];

/// A life of so many milliseconds shows that the device works: a failure after it is a new one.
const LONG_LIFE: u64 = 10_000;

/// What is to be done about a device that does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Its failure is news.
    Report,
    /// To wait, for so many milliseconds.
    Wait(u32),
    /// To try.
    Attempt,
    /// Nothing: it stays as it is.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The device works, as far as is known.
    Working,
    /// It failed, and is tried again at that time.
    Waiting { due: u64 },
    /// It failed, and is left alone.
    Stays,
}

/// When a device that failed is tried again. Times are in milliseconds since some moment.
struct Plan {
    phase: Phase,
    /// Attempts since it worked for long, or somebody asked for one.
    attempts: usize,
    /// When its life began.
    began: u64,
}

impl Plan {
    const fn new() -> Self {
        Self {
            phase: Phase::Working,
            attempts: 0,
            began: 0,
        }
    }

    /// What is to be done at `now`, when the device is seen not to work.
    fn step(&self, now: u64) -> Step {
        match self.phase {
            Phase::Working => Step::Report,
            Phase::Waiting { due } if now < due => Step::Wait((due - now) as u32),
            Phase::Waiting { .. } => Step::Attempt,
            Phase::Stays => Step::Nothing,
        }
    }

    /// A life begins.
    fn begins(&mut self, now: u64) {
        self.phase = Phase::Working;
        self.began = now;
    }

    /// The device failed. Gives how long to wait before it is tried again, if it is to be.
    fn failed(&mut self, wanted: bool, now: u64) -> Option<u32> {
        if now.saturating_sub(self.began) >= LONG_LIFE {
            self.attempts = 0;
        }
        if wanted {
            self.again(now)
        } else {
            self.stays();
            None
        }
    }

    /// An attempt failed, or is about to be planned. Gives how long to wait before the next, if there is one.
    fn again(&mut self, now: u64) -> Option<u32> {
        let Some(wait) = WAITS.get(self.attempts).copied() else {
            self.stays();
            return None;
        };
        self.attempts += 1;
        self.phase = Phase::Waiting {
            due: now + u64::from(wait),
        };
        Some(wait)
    }

    /// Somebody asks for an attempt now: whatever was before is forgotten.
    fn asked(&mut self) {
        self.attempts = 0;
    }

    /// The device is left as it is.
    fn stays(&mut self) {
        self.phase = Phase::Stays;
    }
}

/// What is kept from one life to the next.
pub(crate) struct Kept {
    doorbells: Option<Arc<Doorbells>>,
    name: Option<DeviceName>,
}

impl Kept {
    /// The doorbells of a device that was reset, which are mapped once.
    pub(crate) fn doorbells(
        &mut self,
        pdev: &pci::Device<Bound>,
        registers: &Registers,
    ) -> Result<Arc<Doorbells>> {
        if let Some(doorbells) = &self.doorbells {
            doorbells.check(pdev, registers)?;
            return Ok(doorbells.clone());
        }
        let doorbells = Arc::new(Doorbells::map(pdev, registers)?, GFP_KERNEL)?;
        self.doorbells = Some(doorbells.clone());
        Ok(doorbells)
    }

    /// What the device was called last.
    pub(crate) fn name(&self) -> Option<&CStr> {
        self.name.as_deref()
    }
}

/// The lives of a device: the present one, if there is one.
struct Lives {
    life: Option<Life>,
    kept: Kept,
}

/// Who is to be told of resets by others.
struct Current {
    hw: Option<Arc<Hardware>>,
    /// Somebody else is about to reset the function, or does.
    held: bool,
}

/// What devlink shows, beyond what it counts itself.
struct Counts {
    lives: u32,
    attempts: u32,
    cause: Option<Cause>,
}

/// What a PCI function has for as long as the driver is bound to it.
///
/// Locks are taken in this order: `devlink`, that of the devlink instance, `lives`, the others. `lives` is held
/// while a device is taken down and started, for as long as consumers and the device take: nobody waits for
/// it whom those may wait for. In particular not who resets the function, as its config space is locked then
/// and stopping a device waits for that.
#[pin_data]
pub(crate) struct Recovery {
    pdev: ARef<pci::Device>,
    binding: Arc<Binding>,
    registers: Arc<Registers>,
    /// When this was made: what [`Plan`] counts from.
    epoch: Instant<Monotonic>,
    /// Where `work` runs: not where a [`Hardware`] has its own, which are flushed in the course of it.
    queue: OwnedQueue,
    #[pin]
    work: DelayedWork<Recovery>,
    /// Whether `work` may be queued. It can be when the device fails, in an interrupt.
    #[pin]
    open: IrqSpinLock<bool>,
    #[pin]
    lives: Mutex<Lives>,
    #[pin]
    current: Mutex<Current>,
    #[pin]
    plan: Mutex<Plan>,
    #[pin]
    counts: Mutex<Counts>,
    /// Taken out when the driver lets go.
    #[pin]
    devlink: Mutex<Option<Devlink<Recovery>>>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Recovery { self.work }
}

impl Recovery {
    /// Of a function with these registers; there is no life yet.
    pub(crate) fn new(pdev: &pci::Device<Bound>, registers: Registers) -> Result<Arc<Self>> {
        let init = try_pin_init!(Self {
            binding: Binding::new(pdev)?,
            registers: Arc::new(registers, GFP_KERNEL)?,
            epoch: Instant::now(),
            queue: OwnedQueue::for_long_work(c"ferrite_recovery")?,
            work <- new_delayed_work!("ferrite_recovery"),
            open <- new_irq_spinlock!(false, "ferrite_recovery_open"),
            lives <- new_mutex!(
                Lives {
                    life: None,
                    kept: Kept {
                        doorbells: None,
                        name: None,
                    },
                },
                "ferrite_lives"
            ),
            current <- new_mutex!(
                Current {
                    hw: None,
                    held: false,
                },
                "ferrite_current"
            ),
            plan <- new_mutex!(Plan::new(), "ferrite_plan"),
            counts <- new_mutex!(
                Counts {
                    lives: 0,
                    attempts: 0,
                    cause: None,
                },
                "ferrite_counts"
            ),
            devlink <- new_mutex!(None, "ferrite_devlink"),
            pdev: ARef::from(&**pdev),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Begins the first life, on which everything depends, and watches over it. Sleeps.
    pub(crate) fn open(self: &Arc<Self>, pdev: &pci::Device<Bound>) -> Result {
        {
            let mut lives = self.lives.lock();
            let life = Life::begin(pdev, self, &mut lives.kept);
            self.note(&life);
            lives.life = Some(life?);
        }
        let devlink = Devlink::register(pdev.as_ref(), self.clone())?;
        *self.devlink.lock() = Some(devlink);
        *self.open.lock() = true;
        // It may have failed before anybody was there to see it.
        self.wake();
        Ok(())
    }

    /// Ends the present life, and sees to it that there is no other. Sleeps.
    pub(crate) fn close(self: &Arc<Self>) {
        *self.open.lock() = false;
        // Nobody queues it from now on, as that is done with the lock held. Where it waits for its time it
        // runs now, and does nothing.
        flush_delayed(self);
        let devlink = self.devlink.lock().take();
        // Nobody asks for an attempt by devlink after this.
        drop(devlink);
        let life = self.lives.lock().life.take();
        if let Some(life) = &life {
            // A device that was pulled out answers no command; there is no need to wait for it.
            life.hw().check_presence();
        }
        drop(life);
        self.forget_current();
    }

    /// The registers.
    pub(crate) fn registers(&self) -> &Arc<Registers> {
        &self.registers
    }

    /// Has it looked whether the device works. May be called from any context.
    pub(crate) fn wake(self: &Arc<Self>) {
        self.look_after(0);
    }

    /// The same after so many milliseconds.
    fn look_after(self: &Arc<Self>, wait: u32) {
        let open = self.open.lock();
        if *open {
            // Where it is queued already it may come sooner than it has to, and sees that.
            drop(
                self.queue
                    .enqueue_delayed(self.clone(), msecs_to_jiffies(wait)),
            );
        }
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Notes the device of a life that begins, to be told of resets by others: `EBUSY` where one is under
    /// way.
    pub(crate) fn set_current(&self, hw: &Arc<Hardware>) -> Result {
        let mut current = self.current.lock();
        if current.held {
            return Err(EBUSY);
        }
        let old = current.hw.replace(hw.clone());
        drop(current);
        // Not with the lock held: it may be the last reference.
        drop(old);
        Ok(())
    }

    /// Starts the device of a life that begins by `start`, unless others reset the function since it was
    /// noted. Those wait, as they would take a device for stopped that is about to start. Sleeps.
    pub(crate) fn start(&self, hw: &Hardware, start: impl FnOnce() -> Result) -> Result {
        let current = self.current.lock();
        if current.held || hw.is_dead() {
            return Err(EBUSY);
        }
        start()
    }

    /// Forgets the device of a life that is over.
    fn forget_current(&self) {
        let old = self.current.lock().hw.take();
        drop(old);
    }

    /// Somebody else is about to reset the function, with its config space locked. Sleeps.
    pub(crate) fn hold(&self) {
        let hw = {
            let mut current = self.current.lock();
            current.held = true;
            current.hw.clone()
        };
        if let Some(hw) = hw {
            hw.reset_by_others();
        }
    }

    /// That is over.
    pub(crate) fn release(self: &Arc<Self>) {
        self.current.lock().held = false;
        self.wake();
    }

    /// Notes how an attempt to begin a life ended.
    fn note(&self, life: &Result<Life>) {
        let mut counts = self.counts.lock();
        counts.attempts = counts.attempts.saturating_add(1);
        if life.is_ok() {
            counts.lives = counts.lives.saturating_add(1);
            self.plan.lock().begins(self.now());
        }
    }

    /// Ends the life of a device that failed, and begins another. Sleeps.
    fn attempt(self: &Arc<Self>) -> Result {
        let mut lives = self.lives.lock();
        let lives = &mut *lives;
        match &lives.life {
            // Somebody else was faster.
            Some(life) if !life.hw().is_dead() => return Ok(()),
            Some(life) => lives.kept.name = Some(life.name()),
            None => {}
        }
        // Also where no other can begin: consumers are rid of it.
        lives.life = None;
        self.forget_current();
        let life = self
            .binding
            .with(|pdev| Life::begin(pdev, self, &mut lives.kept))
            .unwrap_or(Err(ENODEV));
        self.note(&life);
        match life {
            Ok(life) => {
                lives.life = Some(life);
                Ok(())
            }
            Err(error) => {
                self.forget_current();
                Err(error)
            }
        }
    }

    /// Whether there is a device at work. Waits for attempts.
    fn works(&self) -> bool {
        let lives = self.lives.lock();
        lives.life.as_ref().is_some_and(|life| !life.hw().is_dead())
    }

    /// Tells devlink of a failure. Gives whether the device is to be tried again.
    fn report(&self) -> bool {
        let cause = {
            let current = self.current.lock();
            current.hw.as_ref().and_then(|hw| hw.cause())
        };
        self.counts.lock().cause = cause;
        let why = cause.map_or(c"the device failed", Cause::text);
        let devlink = self.devlink.lock();
        devlink.as_ref().is_some_and(|devlink| devlink.report(why))
    }

    fn tell_wait(&self, wait: u32) {
        dev_info!(self.pdev, "device is tried again in {} ms\n", wait);
    }

    fn tell_stays(&self, why: &str) {
        dev_err!(
            self.pdev,
            "device stays failed ({}): 'devlink health recover' tries again\n",
            why
        );
    }

    /// Deals with a device that does not work. Sleeps.
    fn deal_with(self: &Arc<Self>, step: Step) {
        let wait = match step {
            Step::Nothing => None,
            Step::Wait(wait) => Some(wait),
            Step::Report => {
                let wanted = self.report();
                let wait = self.plan.lock().failed(wanted, self.now());
                match wait {
                    Some(wait) => self.tell_wait(wait),
                    None if wanted => self.tell_stays("it does not work for long"),
                    None => self.tell_stays("devlink does not want it recovered"),
                }
                wait
            }
            // Whoever holds it has it looked after when that is over.
            Step::Attempt if self.current.lock().held => None,
            Step::Attempt => match self.attempt() {
                Ok(()) => {
                    dev_info!(self.pdev, "device works again\n");
                    if let Some(devlink) = &*self.devlink.lock() {
                        devlink.recovered();
                    }
                    None
                }
                Err(error) => {
                    dev_err!(self.pdev, "device does not come back: {:?}\n", error);
                    let wait = self.plan.lock().again(self.now());
                    match wait {
                        Some(wait) => self.tell_wait(wait),
                        None => self.tell_stays("it was tried often enough"),
                    }
                    wait
                }
            },
        };
        if let Some(wait) = wait {
            self.look_after(wait);
        }
    }
}

impl WorkItem for Recovery {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // Not held while it is looked whether the device works, which sleeps.
        let open = *this.open.lock();
        if !open || this.works() {
            return;
        }
        let step = this.plan.lock().step(this.now());
        this.deal_with(step);
    }
}

impl HealthReporter for Recovery {
    const NAME: &'static CStr = c"fatal";

    fn recover(this: ArcBorrow<'_, Self>) -> Result {
        if this.current.lock().held {
            return Err(EBUSY);
        }
        this.plan.lock().asked();
        let this: Arc<Self> = this.into();
        this.attempt().inspect_err(|error| {
            dev_err!(this.pdev, "device does not come back: {:?}\n", error);
            // Who asked is told, and may ask again.
            this.plan.lock().stays();
        })
    }

    fn diagnose(&self, diagnosis: &mut Diagnosis<'_>) {
        let (phase, attempts) = {
            let plan = self.plan.lock();
            (plan.phase, plan.attempts)
        };
        diagnosis.text(
            c"state",
            match phase {
                Phase::Working => c"working",
                Phase::Waiting { .. } => c"coming back",
                Phase::Stays => c"failed",
            },
        );
        diagnosis.number(c"attempts in a row", attempts as u32);
        let counts = self.counts.lock();
        diagnosis.number(c"attempts", counts.attempts);
        diagnosis.number(c"lives", counts.lives);
        if let Some(cause) = counts.cause {
            diagnosis.text(c"last failure", cause.text());
            if let Cause::Stopped(Some(code)) = cause {
                diagnosis.number(c"fatal code", code as u32);
            }
        }
    }
}

#[kunit_tests(ferrite_recovery)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_once_and_tried_again_when_its_time_has_come() {
        let mut plan = Plan::new();
        plan.begins(5);
        assert_eq!(plan.step(7), Step::Report);
        assert_eq!(plan.failed(true, 100), Some(WAITS[0]));
        assert_eq!(plan.step(100), Step::Wait(WAITS[0]));
        // Whoever looks sooner waits for the rest.
        assert_eq!(plan.step(99 + u64::from(WAITS[0])), Step::Wait(1));
        assert_eq!(plan.step(100 + u64::from(WAITS[0])), Step::Attempt);
        plan.begins(2_000);
        assert_eq!(plan.step(2_000), Step::Report);
    }

    #[test]
    fn attempts_come_to_an_end_with_growing_waits() {
        let mut plan = Plan::new();
        let mut now = 0;
        let mut last = 0;
        let mut wait = plan.failed(true, now);
        let mut attempts = 0;
        while let Some(waits) = wait {
            assert!(waits > last);
            last = waits;
            now += u64::from(waits);
            assert_eq!(plan.step(now), Step::Attempt);
            attempts += 1;
            wait = plan.again(now);
        }
        assert_eq!(attempts, WAITS.len());
        assert_eq!(plan.step(now), Step::Nothing);
        assert_eq!(plan.step(u64::MAX), Step::Nothing);
    }

    #[test]
    fn lives_that_are_short_count_as_attempts_and_a_long_one_does_not() {
        let mut plan = Plan::new();
        let mut now = LONG_LIFE;
        for wait in WAITS {
            assert_eq!(plan.failed(true, now), Some(wait));
            now += u64::from(wait);
            plan.begins(now);
            now += LONG_LIFE - 1;
        }
        assert_eq!(plan.failed(true, now), None);
        assert_eq!(plan.step(now), Step::Nothing);

        plan.begins(now);
        assert_eq!(plan.failed(true, now + LONG_LIFE), Some(WAITS[0]));
    }

    #[test]
    fn a_failure_that_is_not_to_be_recovered_stays() {
        let mut plan = Plan::new();
        plan.begins(0);
        assert_eq!(plan.failed(false, LONG_LIFE), None);
        assert_eq!(plan.step(LONG_LIFE), Step::Nothing);
    }

    #[test]
    fn who_asks_begins_anew() {
        let mut plan = Plan::new();
        let mut now = 0;
        while let Some(wait) = plan.again(now) {
            now += u64::from(wait);
        }
        assert_eq!(plan.step(now), Step::Nothing);
        plan.asked();
        plan.begins(now);
        assert_eq!(plan.failed(true, now), Some(WAITS[0]));
        // An attempt by hand that fails is not followed by others.
        plan.asked();
        plan.stays();
        assert_eq!(plan.step(u64::MAX), Step::Nothing);
    }
}
