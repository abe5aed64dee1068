// SPDX-License-Identifier: GPL-2.0

//! Coming back after a failure: what a PCI function has for as long as the driver is bound to it, the lives
//! of its device, and when another one is tried.
//!
//! A device that failed leaves its consumers with errors. They are given a moment to notice and to let go by
//! themselves; then the RDMA device is unregistered, and after a reset that the device has confirmed it is
//! registered again, as a new one of the same name. devlink is told, and asked whether that is wanted; it can
//! ask for it, too. A device that fails again and again is left alone in the end.
//!
//! How event queues and vectors are spread is a parameter of devlink. It is a matter of a whole life: when another
//! one is set, the present life ends in the same way, with the same moment to let go, and one with that begins.
//! Where none does, the parameter is what it was before, and the device is tried again with that.

mod devlink;
mod dump;
mod exchange;
mod farewell;
mod freeze;
mod plan;
mod spreading;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;

pub(crate) use self::farewell::Consumers;
use self::{
    devlink::{
        Counts,
        Versions, //
    },
    exchange::Exchange,
    farewell::{
        Farewell,
        Wait, //
    },
    freeze::{
        Freeze,
        FROZEN, //
    },
    plan::{
        End,
        Outcome,
        Plan,
        Step,
        Verdict,
        WAITS, //
    },
    spreading::Spreading, //
};
use crate::{
    bars::{
        Doorbells,
        Identity,
        Registers, //
    },
    event_log::{
        Change,
        EventLog, //
    },
    hardware::{
        Cause,
        Hardware, //
    },
    interface,
    interface::{
        Behind,
        Interface, //
    },
    kernel_ext::{
        bound_work::{
            BoundWork,
            BoundWorkItem,
            Opened, //
        },
        devlink::{
            Devlink,
            Refusal, //
        },
        memory,
        pci as pci_ext,
        pci::{
            Channel,
            Config,
            ConfigLock,
            SavedState, //
        },
        workqueue::OwnedQueue, //
    },
    lent::Reach,
    net::{
        Hold,
        Registration, //
    },
    parting,
    pci::Life,
    rdma::DeviceName,
    vector_map::Layout, //
};
use core::num::NonZero;
use kernel::{
    device::{
        Bound,
        Device, //
    },
    devres::Devres,
    new_condvar,
    new_delayed_work,
    new_mutex,
    pci,
    prelude::*,
    sync::{
        aref::ARef,
        Arc,
        CondVar,
        CondVarTimeoutResult,
        Mutex, //
    },
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic, //
    }, //
};

/// For how many milliseconds who asks for an attempt waits for its end: devlink, and all of generic netlink
/// that has a lock to write, wait with him, while a user can hold an attempt up for as long as he likes.
const PATIENCE: u32 = 20_000;

const LETTING_GO_POLL: Delta = Delta::from_millis(100);

/// Every so many milliseconds a device that works is asked whether it does ([`Hardware::check_health`]).
const HEALTH: u32 = 10_000;

/// Tells the work of talking to devlink from that of recovery.
const TALK: u64 = 1;

/// Who asked has waited for long enough, or was interrupted.
const LATE: Refusal = Refusal::new(ETIMEDOUT, c"the attempt is still under way");

const GONE: Refusal = Refusal::new(EINTR, c"the attempt goes on");

const LET_GO: Refusal = Refusal::new(ENODEV, c"the driver lets go of the device");

const SHUT_DOWN: Refusal = Refusal::new(EBUSY, c"the machine shuts down");

const NO_BUS: Refusal = Refusal::new(ENODEV, c"the bus did not recover: reset the function first");

/// For how long a function may not answer after a reset of the bus.
const READY: Delta = Delta::from_secs(5);

/// What is kept from one life to the next.
pub(crate) struct Kept {
    doorbells: Option<Arc<Doorbells>>,
    name: Option<DeviceName>,
    /// The network interface, if the function has one: it is there from the first life on.
    interface: Option<Devres<Registration<Interface>>>,
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

    /// The network interface, which is made once, with this device behind it.
    pub(crate) fn interface(
        &mut self,
        pdev: &pci::Device<Bound>,
        behind: &Behind,
    ) -> Result<Hold<Interface>> {
        if self.interface.is_none() {
            self.interface = Some(interface::register(pdev.as_ref(), behind)?);
        }
        let interface = self.interface.as_ref().ok_or(ENODEV)?;
        Ok(interface.access(pdev.as_ref())?.hold())
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

/// Why a function is held. What one begins another one may begin before it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// Somebody else is about to reset it, or does.
    Reset,
    /// The PCI core recovers from an error of the bus.
    Bus,
    /// The machine is about to sleep, or does.
    Sleep,
}

impl Holder {
    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Who is to be told of resets by others, of errors of the bus, of sleep and of shutdown.
struct Current {
    hw: Option<Arc<Hardware>>,
    /// A bit for each [`Holder`] for whom it is held.
    holders: u8,
    /// The PCI core has given the bus up, of which it was held since: until somebody resets the function.
    bus_gone: bool,
    /// When, in milliseconds of [`Recovery::now`], the PCI core has given it up at the latest, also where it does not say so:
    /// not all kernels do.
    bus_until: u64,
    /// The machine shuts down: it is held for good.
    shut_down: bool,
    /// How often it was held or let go.
    changes: u64,
    /// How often it had when the last attempt to begin a life began.
    noted: u64,
    /// The last one could not be stopped.
    unstoppable: bool,
}

impl Current {
    const fn new() -> Self {
        Self {
            hw: None,
            holders: 0,
            bus_gone: false,
            bus_until: 0,
            shut_down: false,
            changes: 0,
            noted: 0,
            unstoppable: false,
        }
    }

    /// An error of the bus was found, of which the function is held from now on.
    fn hold_for_bus(&mut self, now: u64) {
        self.bus_until = now + FROZEN;
        self.hold(Holder::Bus, true);
    }

    /// The function is held for this, or that is over.
    fn hold(&mut self, holder: Holder, held: bool) {
        if held {
            self.holders |= holder.bit();
        } else {
            self.holders &= !holder.bit();
        }
        self.changes = self.changes.wrapping_add(1);
    }

    /// Whether it is held for this.
    fn is_held_for(&self, holder: Holder) -> bool {
        self.holders & holder.bit() != 0
    }

    /// Whether it is held.
    fn is_held(&self) -> bool {
        self.holders != 0 || self.shut_down
    }

    /// Somebody has reset the function: where the bus was given up, with a word or without, it works again, as far as is
    /// known.
    fn was_reset(&mut self, now: u64) {
        self.hold(Holder::Reset, false);
        if core::mem::take(&mut self.bus_gone) || now >= self.bus_until {
            self.hold(Holder::Bus, false);
        }
    }

    /// An attempt begins.
    fn attempts(&mut self) {
        self.noted = self.changes;
    }

    /// Whether the function is held, or was since the attempt began: what was read meanwhile may be neither what
    /// was before nor what is now.
    fn is_interrupted(&self) -> bool {
        self.is_held() || self.changes != self.noted
    }

    /// Why no life can begin now, if that is so.
    fn hindrance(&self) -> Option<(Outcome, Refusal)> {
        if self.shut_down {
            Some((Outcome::Over(End::Shutdown), SHUT_DOWN))
        } else if self.bus_gone {
            Some((Outcome::Interrupted, NO_BUS))
        } else {
            self.is_held().then_some((Outcome::Interrupted, HELD))
        }
    }

    /// What an attempt came to in which no life began.
    fn outcome(&self) -> Outcome {
        if self.shut_down {
            Outcome::Over(End::Shutdown)
        } else if self.unstoppable {
            // First, as it uses up its attempts, whoever resets it meanwhile.
            Outcome::Unstoppable
        } else if self.is_interrupted() {
            Outcome::Interrupted
        } else {
            Outcome::Failed
        }
    }
}

/// What a PCI function has for as long as the driver is bound to it.
///
/// Locks are taken in this order: `devlink`, that of the devlink instance, `lives`, the others. `lives` is held
/// while a device is taken down and started, for as long as consumers and the device take: only the work item
/// takes it, and probe and unbind when that does not run.
#[pin_data]
pub(crate) struct Recovery {
    pdev: ARef<pci::Device>,
    registers: Arc<Registers>,
    /// Config space as it was when the driver was bound.
    saved: SavedState,
    /// Whether the bus is frozen. Who has the device to stop waits for the end of that.
    freeze: Freeze,
    /// When this was made: what [`Plan`] counts from.
    epoch: Instant<Monotonic>,
    /// Does what is to be done. Queued also when the device fails, in an interrupt; not where a [`Hardware`] has its
    /// own work, which is flushed in the course of it.
    work: Arc<BoundWork<Recovery>>,
    /// Tells devlink what is new. Queued by `work` alone, which does not wait for it, nor does who asks for an
    /// attempt, whom it may wait for.
    talk: Arc<BoundWork<Recovery, TALK>>,
    /// Both may be queued until this is taken out, as the driver lets go.
    #[pin]
    opened: Mutex<Option<OpenedWork>>,
    #[pin]
    lives: Mutex<Lives>,
    #[pin]
    current: Mutex<Current>,
    #[pin]
    plan: Mutex<Plan>,
    #[pin]
    exchange: Mutex<Exchange>,
    /// A question was answered, or none will be.
    #[pin]
    answered: CondVar,
    #[pin]
    counts: Mutex<Counts>,
    #[pin]
    spreading: Mutex<Spreading>,
    /// The device's number among all that there are, if it has one.
    serial_number: Option<NonZero<u64>>,
    /// Of the device that was reset last, if one was.
    #[pin]
    versions: Mutex<Option<Versions>>,
    /// What happened, in this life and in others.
    log: EventLog,
    /// The device that is shown to who looks after a failure: of the life that there is, or begins. Held for no longer
    /// than it takes to look which.
    #[pin]
    shown: Mutex<Option<Arc<Hardware>>>,
    /// Taken out when the driver lets go.
    #[pin]
    devlink: Mutex<Option<Devres<Devlink<Recovery>>>>,
}

/// Dropped in order: what the first one queues the second one does.
struct OpenedWork {
    _work: Devres<Opened<Recovery>>,
    _talk: Devres<Opened<Recovery, TALK>>,
}

impl Recovery {
    /// Of a function with these registers; there is no life yet.
    pub(crate) fn new(
        pdev: &pci::Device<Bound>,
        registers: Registers,
        saved: SavedState,
    ) -> Result<Arc<Self>> {
        let init = try_pin_init!(Self {
            registers: Arc::new(registers, GFP_KERNEL)?,
            saved,
            freeze: Freeze::new(),
            epoch: Instant::now(),
            work: BoundWork::new(
                pdev.as_ref(),
                OwnedQueue::for_long_work(c"ferrite_recovery")?,
                new_delayed_work!("ferrite_recovery"),
            )?,
            talk: BoundWork::new(
                pdev.as_ref(),
                OwnedQueue::for_long_work(c"ferrite_devlink")?,
                new_delayed_work!("ferrite_devlink"),
            )?,
            opened <- new_mutex!(None, "ferrite_recovery_opened"),
            lives <- new_mutex!(
                Lives {
                    life: None,
                    kept: Kept {
                        doorbells: None,
                        name: None,
                        interface: None,
                    },
                },
                "ferrite_lives"
            ),
            current <- new_mutex!(Current::new(), "ferrite_current"),
            plan <- new_mutex!(Plan::new(), "ferrite_plan"),
            exchange <- new_mutex!(Exchange::new(), "ferrite_exchange"),
            answered <- new_condvar!("ferrite_answered"),
            counts <- new_mutex!(
                Counts {
                    lives: 0,
                    attempts: 0,
                    cause: None,
                    trying: false,
                    error: None,
                    bus_gone: false,
                },
                "ferrite_counts"
            ),
            spreading <- new_mutex!(Spreading::new(), "ferrite_spreading"),
            serial_number: pci_ext::serial_number(pdev),
            versions <- new_mutex!(None, "ferrite_versions"),
            log: EventLog::new()?,
            shown <- new_mutex!(None, "ferrite_shown"),
            devlink <- new_mutex!(None, "ferrite_devlink"),
            pdev: ARef::from(&**pdev),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Begins the first life, on which everything depends, and watches over it, until [`Self::close`]. Sleeps.
    pub(crate) fn open(self: &Arc<Self>, pdev: &pci::Device<Bound>) -> Result {
        {
            let mut lives = self.lives.lock();
            let life = Life::begin(pdev, self, &mut lives.kept);
            self.note(&life);
            lives.life = Some(life?);
        }
        self.plan.lock().begins(self.now());
        {
            let mut exchange = self.exchange.lock();
            exchange.begins(1);
            // The first life is no recovery.
            exchange.counted = 1;
        }
        let devlink = Devlink::register(pdev.as_ref(), self.clone())?;
        *self.devlink.lock() = Some(devlink);
        let talk = self.talk.open(pdev.as_ref())?;
        let work = self.work.open(pdev.as_ref())?;
        *self.opened.lock() = Some(OpenedWork {
            _work: work,
            _talk: talk,
        });
        // It may have failed before anybody was there to see it.
        self.wake();
        Ok(())
    }

    /// Ends the present life, and sees to it that there is no other; once. Sleeps.
    pub(crate) fn close(self: &Arc<Self>) {
        // Who asked for an attempt has devlink locked: he goes first.
        if core::mem::replace(&mut self.exchange.lock().closed, true) {
            return;
        }
        // Who unbinds has the device lock, for which the PCI core waits before it goes on: he is not to wait for that.
        self.freeze.ends();
        self.answered.notify_all();
        let opened = self.opened.lock().take();
        // What is being done is waited for, and nothing is done after this.
        drop(opened);
        let devlink = self.devlink.lock().take();
        // Nobody asks for anything by devlink after this.
        drop(devlink);
        let (life, interface) = {
            let mut lives = self.lives.lock();
            (lives.life.take(), lives.kept.interface.take())
        };
        if let Some(life) = &life {
            // A device that was pulled out answers no command; there is no need to wait for it.
            life.hw().check_presence();
        }
        parting::end(&self.pdev, life);
        drop(interface);
        // For whoever is bound next.
        self.give_back(&ConfigLock::new(&self.pdev));
    }

    /// Gives the function the config space that it had, where it lost that. One that does not answer is none to complain
    /// of here: it may have been pulled out, or be behind a bridge that was closed.
    fn give_back(&self, config: &Config<'_>) {
        match config.give_back(&self.saved) {
            Err(error) if error != ENODEV => {
                dev_err!(self.pdev, "config space is not what it was: {:?}\n", error);
            }
            _ => {}
        }
    }

    /// What happens to the device.
    pub(crate) fn log(&self) -> &EventLog {
        &self.log
    }

    /// Shows another device, or none, to who looks after a failure. Sleeps.
    fn show(&self, hw: Option<&Arc<Hardware>>) {
        let old = core::mem::replace(&mut *self.shown.lock(), hw.cloned());
        // Not with the lock held: it may be the last reference.
        drop(old);
    }

    /// The registers.
    pub(crate) fn registers(&self) -> &Arc<Registers> {
        &self.registers
    }

    /// How event queues and vectors are spread in a life that begins, of a device that `has_table` or not.
    pub(crate) fn layout_of_life(&self, has_table: bool) -> Layout {
        let mut spreading = self.spreading.lock();
        spreading.has_table = has_table;
        spreading.of_life()
    }

    /// Notes what a device that was reset says that it is.
    pub(crate) fn note_identity(&self, identity: &Identity) {
        *self.versions.lock() = Some(Versions {
            interface: identity.interface,
            firmware: identity.firmware,
        });
    }

    /// Has it looked whether the device works. May be called from any context.
    pub(crate) fn wake(self: &Arc<Self>) {
        // Also where it waits for its time.
        self.work.queue(self);
    }

    /// The same after so many milliseconds, or sooner.
    fn look_after(self: &Arc<Self>, wait: u32) {
        // Where it is queued already that was done by `wake`, while it runs. It is not to come later for this: when it
        // runs it sees how long it has to wait.
        self.work.queue_after(self, msecs_to_jiffies(wait));
    }

    /// Milliseconds since the driver was bound.
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Notes the device of a life that begins, to be told of resets by others: `EBUSY` where one is under
    /// way, or was since the attempt began.
    pub(crate) fn set_current(&self, hw: &Arc<Hardware>) -> Result {
        let mut current = self.current.lock();
        if current.is_interrupted() {
            return Err(EBUSY);
        }
        let old = current.hw.replace(hw.clone());
        drop(current);
        // Before it does anything.
        let begun = self.counts.lock().lives;
        self.log.change(Change::Begins(begun.saturating_add(1)));
        self.show(Some(hw));
        // Not with the lock held: it may be the last reference.
        drop(old);
        Ok(())
    }

    /// Starts the device of a life that begins by `start`, unless others reset the function since it was
    /// noted. Those wait, as they would take a device for stopped that is about to start. Sleeps.
    pub(crate) fn start(&self, hw: &Hardware, start: impl FnOnce() -> Result) -> Result {
        let current = self.current.lock();
        if current.is_interrupted() || hw.is_dead() {
            return Err(EBUSY);
        }
        start()
    }

    /// Parts with the device of a life that is over, or did not come to be: nobody tells it of anything from
    /// now on, nothing of its own runs any more, and it has no right to the bus. Sleeps.
    pub(crate) fn part(&self, hw: &Arc<Hardware>) {
        let old = self.current.lock().hw.take();
        drop(old);
        self.show(None);
        hw.retire();
        ConfigLock::new(&self.pdev).clear_master();
        self.current.lock().unstoppable = hw.reach.get() == Reach::Unstoppable;
    }

    /// Somebody else is about to reset the function, with its config space locked. Sleeps.
    pub(crate) fn hold(&self, config: &Config<'_>) {
        // First, as the PCI core saves what there is next, to restore it.
        self.give_back(config);
        drop(self.hold_for(Holder::Reset, config, Hardware::fail_for_reset));
    }

    /// The machine is about to sleep. Until it is [awake](Self::wake_up) the function may be without power, and when it
    /// is back its config space is what it is now, before anybody here can say anything: the device has stopped by
    /// then, and has no right to the bus. Sleeps.
    pub(crate) fn sleep(&self) {
        self.stop_for(Holder::Sleep, Hardware::fail_for_sleep);
    }

    /// Holds the function, gives its device up by `fail`, stops it, and takes the bus from it. For who has the device
    /// lock. Sleeps.
    fn stop_for(&self, holder: Holder, fail: fn(&Arc<Hardware>)) {
        // As where the driver is unbound.
        self.freeze.ends();
        let hw = {
            let config = ConfigLock::new(&self.pdev);
            let hw = self.hold_for(holder, &config, fail);
            config.clear_master();
            hw
        };
        if let Some(hw) = hw {
            // Where its own register did not do. Without config space, which this takes by itself; and so that nobody
            // is at it when the function cannot be reached, and would be taken for gone.
            hw.stop();
        }
    }

    /// The machine is about to end, or to start another kernel, which has the memory that this one had: what
    /// [`Self::sleep`] does, for good. Sleeps.
    pub(crate) fn shut_down(&self) {
        // Whoever resets the function after this lets nothing begin again by that.
        self.current.lock().shut_down = true;
        self.stop_for(Holder::Sleep, Hardware::fail_for_shutdown);
    }

    /// The machine is awake, or did not sleep.
    pub(crate) fn wake_up(self: &Arc<Self>) {
        // It may be told without having been asked to sleep.
        let held = self.current.lock().is_held_for(Holder::Sleep);
        if held {
            self.release(Holder::Sleep);
        }
    }

    /// An error of the bus was found, of which `channel` is left. The device is given up: what was on the way to it or
    /// from it may be lost. Sleeps.
    pub(crate) fn bus_failed(self: &Arc<Self>, channel: Channel) {
        match channel {
            // The PCI core waits, with the device lock and all of its buses: what takes long is left to the work item of
            // the failure, also the rest where somebody has config space locked by now.
            Channel::Normal => {
                let config = ConfigLock::try_new(&self.pdev);
                let hw = self.fail_and_hold(Holder::Bus, Hardware::fail_for_bus_error);
                if let Some(config) = config {
                    config.enable_pin(false);
                    config.clear_master();
                }
                drop(hw);
            }
            // Neither registers nor config space are touched.
            Channel::Frozen => {
                self.freeze.begins(self.now());
                drop(self.fail_and_hold(Holder::Bus, Hardware::fail_for_bus_error));
            }
            // Something else may have failed behind the same port.
            Channel::PermFailure if self.bus_was_reset().is_ok() => self.bus_works(),
            Channel::PermFailure => {
                self.set_bus_gone(true);
                self.log.change(Change::LeftAlone);
                dev_err!(
                    self.pdev,
                    "the bus does not recover: the device stays failed until it is reset\n"
                );
            }
        }
    }

    /// The bus was reset after such an error, and can be reached, or is about to be. The device is stopped, as it may not
    /// have failed before, and has no right to the bus. Sleeps.
    pub(crate) fn bus_was_reset(&self) -> Result {
        let given = {
            let config = ConfigLock::new(&self.pdev);
            let given = config
                .wait_until_ready(READY)
                .and_then(|()| config.give_back(&self.saved));
            self.freeze.ends();
            // A driver that was bound meanwhile was not told of the error.
            let hw = self.fail_and_hold(Holder::Bus, Hardware::fail_for_bus_error);
            if given.is_ok() {
                // It may have lost nothing, and have the bus.
                config.clear_master();
                self.stop_held(hw.as_deref(), &config);
            }
            given
        };
        given
            .and_then(|()| self.registers.presence())
            .inspect_err(|error| {
                dev_err!(
                    self.pdev,
                    "no device after an error of the bus: {:?}\n",
                    error
                )
            })
    }

    /// Notes whether the bus was given up.
    fn set_bus_gone(&self, gone: bool) {
        self.current.lock().bus_gone = gone;
        self.counts.lock().bus_gone = gone;
    }

    /// Does something to registers or config space of the device, unless the bus is frozen: what comes back then is nothing
    /// that the device said, and the bus is being reset, or held apart from the machine. May be called from any context.
    pub(crate) fn reach<T>(&self, what: impl FnOnce() -> T) -> Option<T> {
        self.freeze.reach(|| self.now(), what)
    }

    /// The function is held; its device, if it has one, is given up by `fail`, and is what this gives.
    fn fail_and_hold(&self, holder: Holder, fail: fn(&Arc<Hardware>)) -> Option<Arc<Hardware>> {
        let mut current = self.current.lock();
        if holder == Holder::Bus {
            current.hold_for_bus(self.now());
        } else {
            current.hold(holder, true);
        }
        if let Some(hw) = &current.hw {
            // With the lock held, so that it queues nothing that who parts with it does not wait for.
            fail(hw);
        }
        current.hw.clone()
    }

    /// The same, and stops it.
    fn hold_for(
        &self,
        holder: Holder,
        config: &Config<'_>,
        fail: fn(&Arc<Hardware>),
    ) -> Option<Arc<Hardware>> {
        let hw = self.fail_and_hold(holder, fail);
        self.stop_held(hw.as_deref(), config);
        hw
    }

    /// Stops a device that was given up so, with config space locked, unless the bus is frozen: who stops it then waits for
    /// the end of that. Sleeps.
    fn stop_held(&self, hw: Option<&Hardware>, config: &Config<'_>) {
        if let Some(hw) = hw {
            self.reach(|| hw.stop_for_reset(config));
        }
    }

    /// Somebody else has reset the function, or tried to. Config space is locked.
    pub(crate) fn was_reset(self: &Arc<Self>, config: &Config<'_>) {
        self.give_back(config);
        self.current.lock().was_reset(self.now());
        self.counts.lock().bus_gone = false;
        self.wake();
    }

    /// The PCI core has recovered from an error of the bus.
    pub(crate) fn bus_works(self: &Arc<Self>) {
        self.set_bus_gone(false);
        self.release(Holder::Bus);
    }

    /// That is over.
    fn release(self: &Arc<Self>, holder: Holder) {
        self.current.lock().hold(holder, false);
        self.wake();
    }

    /// Notes how an attempt to begin a life ended.
    fn note(&self, life: &Result<Life>) {
        let error = life.as_ref().err().copied();
        if let Some(error) = error {
            self.log.change(Change::NotBegun(error));
        }
        let mut counts = self.counts.lock();
        counts.attempts = counts.attempts.saturating_add(1);
        counts.error = error;
        if error.is_none() {
            counts.lives = counts.lives.saturating_add(1);
        }
    }

    /// Waits for consumers in the kernel that are letting go of a device that failed, for a while. Who has done
    /// so when the device is taken away looks for it again; of the others, some delete what they made of it (disks of
    /// NVMe), and some tell their own users that there is no network (mounts of NFS in a container). Sleeps.
    fn see_off(&self, hw: &Hardware) {
        let mut farewell = Farewell::new(self.now());
        loop {
            match farewell.look(self.now(), hw.consumers()) {
                Wait::Over => return,
                Wait::Longer => {}
                Wait::WithoutManagement => hw.refuse_management(),
            }
            // Who takes the driver away takes the device from all of them.
            if self.exchange.lock().closed {
                return;
            }
            fsleep(LETTING_GO_POLL);
        }
    }

    /// Stops a device that nothing stopped when its life ended, or did since: what it knew then is lost, but nothing
    /// else is as long as no life begins before. Not where all was tried just now. Sleeps.
    fn stop_at_last(&self, tried: bool) -> Result<(), (Outcome, Error)> {
        if !self.current.lock().unstoppable {
            return Ok(());
        }
        if tried {
            return Err((Outcome::Unstoppable, EIO));
        }
        let config = ConfigLock::new(&self.pdev);
        // The machine holds the function with that lock taken, and counts on nobody to be at it then.
        let hindrance = self.current.lock().hindrance();
        if let Some((outcome, why)) = hindrance {
            return Err((outcome, why.error()));
        }
        let stopped = self.stop_locked(&config);
        drop(config);
        self.log.change(match stopped {
            Ok(()) => Change::Stopped,
            Err(_) => Change::Unstoppable,
        });
        if let Err(error) = stopped {
            self.counts.lock().error = Some(error);
            return Err((self.current.lock().outcome(), error));
        }
        self.current.lock().unstoppable = false;
        Ok(())
    }

    /// Stops such a device by all means, with config space locked. Sleeps.
    fn stop_locked(&self, config: &ConfigLock<'_>) -> Result {
        // Who has reset the function meanwhile gave it what it had before, the bus perhaps.
        config.clear_master();
        // As its register did not do. Where there is no such reset the device may have taken its time only.
        if let Err(error) = config.reset_function() {
            dev_err!(self.pdev, "function reset failed: {:?}\n", error);
        }
        self.registers
            .reset()
            .inspect_err(|error| dev_err!(self.pdev, "reset failed: {:?}\n", error))
    }

    /// Ends the life of a device that failed or is to have another layout, and begins one, unless nothing stops
    /// it. Sleeps.
    fn attempt(self: &Arc<Self>, pdev: &pci::Device<Bound>, asked: bool) -> (Outcome, Result) {
        // Without the lock: its life does not end meanwhile, that is done here, or after this was waited for.
        if let Some(hw) = self.hardware().filter(|hw| hw.is_dead()) {
            self.see_off(&hw);
        }
        // Others may have come meanwhile who reset the function, or put it to sleep.
        let hindrance = self.current.lock().hindrance();
        if let Some((outcome, why)) = hindrance {
            return (outcome, Err(why.error()));
        }
        let mut lives = self.lives.lock();
        let lives = &mut *lives;
        let ended = lives.life.take();
        let just_ended = ended.is_some();
        if let Some(life) = ended {
            lives.kept.name = life.name();
            // Also where no other can begin: consumers are rid of it.
            parting::end(&self.pdev, life);
        }
        if self.exchange.lock().closed {
            // Who unbinds waits for this, and would end what begins here.
            return (Outcome::Over(End::LetGo), Err(LET_GO.error()));
        }
        {
            let mut current = self.current.lock();
            if let Some((outcome, why)) = current.hindrance() {
                return (outcome, Err(why.error()));
            }
            // Not before users have let go: of a reset that is over by now nothing is left.
            current.attempts();
        }
        if let Err((outcome, error)) = self.stop_at_last(just_ended && !asked) {
            return (outcome, Err(error));
        }
        let life = Life::begin(pdev, self, &mut lives.kept);
        self.note(&life);
        match life {
            Ok(life) => {
                self.spreading.lock().begins(life.layout());
                lives.life = Some(life);
                (Outcome::Began, Ok(()))
            }
            Err(error) => (self.current.lock().outcome(), Err(error)),
        }
    }

    /// Whether there is a device at work, and then whether it is as it is to be; else why there is none, if
    /// that is known.
    fn works(&self) -> Result<bool, Option<Cause>> {
        match &self.lives.lock().life {
            Some(life) if !life.hw().is_dead() => {
                Ok(life.layout() == self.spreading.lock().of_life())
            }
            Some(life) => Err(life.hw().cause()),
            None => Err(None),
        }
    }

    /// The device of the life that there is, if there is one.
    fn hardware(&self) -> Option<Arc<Hardware>> {
        let lives = self.lives.lock();
        lives.life.as_ref().map(|life| life.hw().clone())
    }

    /// Asks a device that works whether it does, and has it asked again after a while. Sleeps.
    fn check_health(self: &Arc<Self>) {
        // Without the lock, for as long as the device takes to answer. Its life does not end meanwhile: that
        // is done here, or after this was waited for.
        if let Some(hw) = self.hardware() {
            hw.check_health();
        }
        // Where it turned out to have failed this is queued already, for now.
        self.look_after(HEALTH);
    }

    fn answer(&self, question: u64, answer: Result<u32, Refusal>) {
        self.exchange.lock().answer(question, answer);
        self.answered.notify_all();
    }

    /// Asks for an attempt, and waits for its end; gives the life that there is then. Sleeps.
    fn ask(self: &Arc<Self>) -> Result<u32, Refusal> {
        let mut exchange = self.exchange.lock();
        let question = exchange.ask()?;
        self.wake();
        let mut left = msecs_to_jiffies(PATIENCE);
        loop {
            if let Some(answer) = exchange.take_answer(question) {
                return answer;
            }
            match self
                .answered
                .wait_interruptible_timeout(&mut exchange, left)
            {
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                CondVarTimeoutResult::Timeout => {
                    // It may have come at the last moment.
                    return exchange.take_answer(question).unwrap_or(Err(LATE));
                }
                CondVarTimeoutResult::Signal { .. } => {
                    return exchange.take_answer(question).unwrap_or(Err(GONE));
                }
            }
        }
    }

    /// Has devlink told what is new.
    fn tell(self: &Arc<Self>) {
        self.talk.queue(self);
    }

    /// Has who uses a device that works let go of it, as where it fails: they come back to the next one, which
    /// those may not do whose device is taken from them ([`WAITS`]). Sleeps, where there is anybody.
    /// Gives whether that is why it works no more: it may have failed just before.
    fn let_go(&self) -> bool {
        let Some(hw) = self.hardware() else {
            return false;
        };
        hw.fail_for_renewal();
        // Asked after that: nobody gets another queue pair now, and who has one has it until he lets go.
        if hw.is_in_use() {
            fsleep(Delta::from_millis(WAITS[0].into()));
        }
        hw.cause() == Some(Cause::Renewal)
    }

    /// Tries, because somebody asked that question or because it is time; `renewal` where the device worked, was
    /// [let go of](Self::let_go) and is to have another layout. Gives what is to be done then.
    fn try_again(
        self: &Arc<Self>,
        pdev: &pci::Device<Bound>,
        question: Option<u64>,
        renewal: bool,
    ) -> Step {
        self.counts.lock().trying = true;
        let layout = self.spreading.lock().layout;
        let hindrance = self.current.lock().hindrance();
        if let Some((_, why)) = hindrance {
            self.counts.lock().trying = false;
            // Whoever holds it has it looked after when that is over.
            if let Some(question) = question {
                self.spreading.lock().take_back(layout);
                self.answer(question, Err(why));
            }
            return Step::Nothing;
        }
        let (outcome, result) = self.attempt(pdev, question.is_some());
        self.counts.lock().trying = false;
        match result {
            Ok(()) if renewal => dev_info!(self.pdev, "device has another vector map\n"),
            Ok(()) => dev_info!(self.pdev, "device works again\n"),
            Err(error) => match outcome {
                Outcome::Interrupted => {
                    dev_info!(self.pdev, "device does not come back yet: {:?}\n", error);
                }
                Outcome::Over(end) => {
                    let why = end.refusal().why();
                    dev_info!(self.pdev, "device does not come back: {}\n", why);
                }
                _ => dev_err!(self.pdev, "device does not come back: {:?}\n", error),
            },
        }
        // Here, as who set it may not wait for this any more.
        let taken_back = result.is_err() && self.spreading.lock().take_back(layout);
        if taken_back {
            dev_err!(self.pdev, "vector map is as before\n");
        }
        let (step, life) = {
            let mut plan = self.plan.lock();
            // With another layout it is another attempt than that which was asked for.
            let asked = question.is_some() && !taken_back;
            (plan.ended(outcome, asked, self.now()), plan.life)
        };
        match result {
            Ok(()) if renewal => self.exchange.lock().renews(life),
            Ok(()) => self.exchange.lock().begins(life),
            Err(_) => {
                if renewal {
                    self.counts.lock().cause = Some(Cause::Renewal);
                }
                // It may have worked before, and devlink is to know that it can be recovered.
                self.exchange.lock().fails();
                self.tell();
            }
        }
        if let Some(question) = question {
            let answer = result.map_err(|error| refusal(outcome, taken_back, error));
            self.answer(question, answer.map(|()| life));
        }
        if result.is_ok() {
            // After the answer: where that is taken devlink counts by itself.
            self.tell();
            self.look_after(HEALTH);
        }
        step
    }

    /// Does what is to be done. Sleeps.
    fn act(
        self: &Arc<Self>,
        pdev: &pci::Device<Bound>,
        step: Step,
        question: Option<u64>,
        renewal: bool,
    ) {
        let step = match step {
            Step::Attempt => self.try_again(pdev, question, renewal),
            step => step,
        };
        match step {
            Step::Nothing | Step::Attempt => {}
            Step::Wait(wait) => self.look_after(wait),
            Step::Planned(wait) => {
                dev_info!(self.pdev, "device is tried again in {} ms\n", wait);
                self.look_after(wait);
            }
            Step::GiveUp(why) => {
                self.log.change(Change::LeftAlone);
                dev_err!(
                    self.pdev,
                    "device stays failed ({}): 'devlink health recover' tries again\n",
                    why
                );
            }
        }
    }
}

const HELD: Refusal = Refusal::new(EBUSY, c"the function is being reset by others, or sleeps");

/// What who asked is told of an attempt that ended so, by `error`, with a layout that is `taken_back` or not.
fn refusal(outcome: Outcome, taken_back: bool, error: Error) -> Refusal {
    match outcome {
        // What was asked for is not done: the device comes back as it was before.
        Outcome::Interrupted if taken_back => HELD,
        Outcome::Interrupted => Refusal::new(
            EBUSY,
            c"the function is being reset by others, the device is tried again after that",
        ),
        Outcome::Over(end) => end.refusal(),
        Outcome::Unstoppable => Refusal::new(error, c"the device cannot be stopped"),
        _ if taken_back => Refusal::new(error, c"the device does not start with it, see the log"),
        _ => Refusal::new(error, c"the device does not start, see the log"),
    }
}

impl BoundWorkItem for Recovery {
    fn run(this: Arc<Self>, dev: &Device<Bound>) {
        // It was opened for that of a PCI function.
        let Ok(pdev) = <&pci::Device<Bound>>::try_from(dev) else {
            return;
        };
        // Disks behind the device wait for it.
        memory::without_io(|| this.look(pdev));
    }
}

impl Recovery {
    /// Looks whether the device works, and does what is to be done. Sleeps.
    fn look(self: &Arc<Self>, pdev: &pci::Device<Bound>) {
        let (question, verdict) = {
            let mut exchange = self.exchange.lock();
            if exchange.closed {
                // Nobody waits for it any more, and whoever unbinds waits for self.
                return;
            }
            exchange.take()
        };
        let cause = match self.works() {
            Ok(false) if question.is_some() => {
                self.counts.lock().trying = true;
                if self.let_go() {
                    let step = self.plan.lock().step(true, None, self.now());
                    self.act(pdev, step, question, true);
                    return;
                }
                // That is a failure like others.
                self.hardware().and_then(|hw| hw.cause())
            }
            Ok(_) => {
                if let Some(question) = question {
                    let life = self.plan.lock().life;
                    self.answer(question, Ok(life));
                }
                self.check_health();
                return;
            }
            Err(cause) => cause,
        };
        let shut_down = self.current.lock().shut_down;
        let (news, step) = {
            let mut plan = self.plan.lock();
            let now = self.now();
            let news = plan.notice(now, cause);
            if shut_down && question.is_none() {
                // Nobody is to wait for an attempt that does not come.
                plan.rest();
            }
            (news, plan.step(question.is_some(), verdict, now))
        };
        if news {
            self.counts.lock().cause = cause;
            self.exchange.lock().fails();
            self.tell();
        }
        self.act(pdev, step, question, false);
    }
}

impl BoundWorkItem<TALK> for Recovery {
    fn run(this: Arc<Self>, dev: &Device<Bound>) {
        // Recovery waits for what devlink says, and disks behind the device for recovery.
        memory::without_io(|| this.talk_to_devlink(dev));
    }
}

impl Recovery {
    /// Tells devlink what is new, and asks it what is to be done about a failure. Sleeps.
    fn talk_to_devlink(self: &Arc<Self>, dev: &Device<Bound>) {
        let devlink = self.devlink.lock();
        let Some(Ok(devlink)) = devlink.as_ref().map(|devlink| devlink.access(dev)) else {
            return;
        };
        let mut report = None;
        devlink.update(|| {
            let (standing, life) = self.exchange.lock().news();
            report = life;
            standing
        });
        let Some(life) = report else {
            return;
        };
        let cause = self.counts.lock().cause;
        let wanted = devlink.report(cause.map_or(c"the device failed", Cause::text));
        self.exchange.lock().verdict = Some(Verdict { life, wanted });
        self.wake();
    }
}
