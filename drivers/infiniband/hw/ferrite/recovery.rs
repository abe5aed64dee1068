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

use crate::{
    bars::{
        Doorbells,
        Identity,
        Registers, //
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
            Diagnosis,
            HealthReporter,
            Info,
            Information,
            Parameter,
            Refusal,
            Standing, //
        },
        errno, pci as pci_ext,
        pci::{
            Config,
            ConfigLock, //
        },
        workqueue::OwnedQueue,
    },
    lent::Reach,
    net::{
        Hold,
        Registration, //
    },
    parting,
    pci::Life,
    rdma::{
        DeviceName,
        QpState, //
    },
    vector_map::{
        self,
        Layout, //
    },
};
use core::num::NonZero;
use kernel::{
    device::{
        Bound,
        Device, //
    },
    devres::Devres,
    new_condvar, new_delayed_work, new_mutex, pci,
    prelude::*,
    str::CString,
    sync::{
        aref::ARef,
        Arc,
        ArcBorrow,
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
    },
};

/// Milliseconds from a failure to each attempt to come back, one after the other. The first lets consumers
/// notice, and let go of what they have: those whose device is taken from them instead may not come back to
/// it.
const WAITS: [u32; 5] = [1_000, 2_000, 4_000, 8_000, 16_000];

/// For so many milliseconds of life one attempt is forgiven: a device that keeps failing in less is left
/// alone in the end.
const FORGIVEN_AFTER: u64 = 60_000;

/// For how many milliseconds who asks for an attempt waits for its end: devlink, and all of generic netlink
/// that has a lock to write, wait with him, while a user can hold an attempt up for as long as he likes.
const PATIENCE: u32 = 20_000;

/// For how many milliseconds at most those are waited for who are letting go of their queue pairs when a life is to
/// end, and how often it is looked whether they have.
const LETTING_GO: u64 = 10_000;
const LETTING_GO_POLL: Delta = Delta::from_millis(100);

/// Who disconnects has said so to the peer so many milliseconds later. With what passes before it is looked for the
/// first time ([`WAITS`]) it is less than the core waits for the answer before it tries again (4.6 s).
const DISCONNECTED: u64 = 3_000;

/// Every so many milliseconds a device that works is asked whether it does ([`Hardware::check_health`]).
const HEALTH: u32 = 10_000;

/// Tells the work of talking to devlink from that of recovery.
const TALK: u64 = 1;

/// What is to be done about a device that does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// To wait, for so many milliseconds: an attempt was planned just now.
    Planned(u32),
    /// To wait for the rest of it.
    Wait(u32),
    /// To try.
    Attempt,
    /// To leave it as it is, from now on, and to say why.
    GiveUp(&'static str),
    /// Nothing.
    Nothing,
}

/// What consumers in the kernel do with the queue pairs of a device that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Consumers {
    /// Somebody has brought one to its end, and not destroyed it yet.
    leaving: bool,
    /// Somebody has one that he uses, as far as he knows.
    using: bool,
}

impl Consumers {
    /// Counts one queue pair in.
    pub(crate) fn add(&mut self, state: QpState) {
        match state {
            QpState::Err => self.leaving = true,
            QpState::Reset => {}
            _ => self.using = true,
        }
    }
}

/// Whether to wait for those who let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// No longer.
    Over,
    Longer,
    /// And nobody has to say anything to peers any more ([`Hardware::refuse_management`]).
    WithoutManagement,
}

/// The time that those who let go of a device are given.
struct Farewell {
    began: u64,
    /// Since when nobody uses a queue pair.
    unused: Option<u64>,
}

impl Farewell {
    const fn new(now: u64) -> Self {
        Self {
            began: now,
            unused: None,
        }
    }

    /// What to do at a time at which consumers do that.
    fn look(&mut self, now: u64, consumers: Consumers) -> Wait {
        // Those that use what they have wait for being told, which happens when the device is taken from them.
        if !consumers.leaving || now - self.began >= LETTING_GO {
            return Wait::Over;
        }
        if consumers.using {
            self.unused = None;
            return Wait::Longer;
        }
        match now - *self.unused.get_or_insert(now) {
            DISCONNECTED.. => Wait::WithoutManagement,
            _ => Wait::Longer,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The device works, as far as is known.
    Working,
    /// It failed, and it is not known yet whether it is to be recovered.
    Reported,
    /// It failed, and is tried again at that time.
    Waiting { due: u64 },
    /// It failed, and is left alone.
    Stays,
}

/// Why no life begins any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The driver lets go of the function.
    LetGo,
    /// The machine shuts down.
    Shutdown,
}

impl End {
    /// What is said of it.
    const fn refusal(self) -> Refusal {
        match self {
            Self::LetGo => LET_GO,
            Self::Shutdown => SHUT_DOWN,
        }
    }
}

/// How an attempt to begin a life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// A life has begun.
    Began,
    /// None has.
    Failed,
    /// None has, as others reset the function, or the machine sleeps: it goes on after that.
    Interrupted,
    /// None has, nor does one any more.
    Over(End),
    /// None has, or none was to: the device did not stop, and may touch what it was told of.
    Unstoppable,
}

/// What devlink says about the failure of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Verdict {
    life: u32,
    /// Whether the device is to be recovered.
    wanted: bool,
}

/// When a device that failed is tried again. Times are in milliseconds since some moment.
///
/// One task changes it, that of the work item: what others want they leave in [`Exchange`].
struct Plan {
    phase: Phase,
    /// Attempts that are not forgiven, since somebody asked for one.
    attempts: usize,
    /// The number of the last life that began.
    life: u32,
    /// When that was.
    began: u64,
}

impl Plan {
    const fn new() -> Self {
        Self {
            phase: Phase::Working,
            attempts: 0,
            life: 0,
            began: 0,
        }
    }

    /// A life begins.
    fn begins(&mut self, now: u64) {
        self.phase = Phase::Working;
        self.life = self.life.saturating_add(1);
        self.began = now;
    }

    /// The device is seen not to work at `now`, and why. Gives whether that is news, which is to be reported.
    fn notice(&mut self, now: u64, cause: Option<Cause>) -> bool {
        if self.phase != Phase::Working {
            return false;
        }
        let forgiven = now.saturating_sub(self.began) / FORGIVEN_AFTER;
        self.attempts = match cause {
            // Its own failures have nothing to do with that, however often the machine sleeps.
            Some(Cause::Sleep) => 0,
            _ => self.attempts.saturating_sub(forgiven as usize),
        };
        self.phase = Phase::Reported;
        true
    }

    /// What is to be done at `now` about a device that does not work, with what others have to say.
    fn step(&mut self, asked: bool, verdict: Option<Verdict>, now: u64) -> Step {
        if asked {
            // Whatever was before is forgotten.
            self.attempts = 0;
            return Step::Attempt;
        }
        match self.phase {
            Phase::Reported => match verdict.filter(|verdict| verdict.life == self.life) {
                Some(verdict) if verdict.wanted => self.again(now, "it does not work for long"),
                Some(_) => self.give_up("devlink does not want it recovered"),
                None => Step::Nothing,
            },
            Phase::Waiting { due } if now < due => Step::Wait((due - now) as u32),
            Phase::Waiting { .. } => Step::Attempt,
            Phase::Working | Phase::Stays => Step::Nothing,
        }
    }

    /// An attempt has ended, which somebody `asked` for or not. Gives what is to be done then.
    fn ended(&mut self, outcome: Outcome, asked: bool, now: u64) -> Step {
        match outcome {
            Outcome::Began => {
                self.begins(now);
                Step::Nothing
            }
            Outcome::Interrupted => {
                // It is not the device's fault, nor that of who asked: what he wants is done when that is over, by
                // itself, and he is told so.
                self.attempts = self.attempts.saturating_sub(1);
                self.phase = Phase::Waiting { due: now };
                Step::Wait(0)
            }
            Outcome::Over(_) => {
                self.rest();
                Step::Nothing
            }
            // Who asked is told, and may ask again.
            _ if asked => self.give_up("an attempt that was asked for failed"),
            Outcome::Failed => self.again(now, "it was tried often enough"),
            // All memory that it knows is lost with each life of such a device.
            Outcome::Unstoppable => self.give_up("it cannot be stopped"),
        }
    }

    /// Plans the next attempt, if there is one; else this is `why`.
    fn again(&mut self, now: u64, why: &'static str) -> Step {
        let Some(wait) = WAITS.get(self.attempts).copied() else {
            return self.give_up(why);
        };
        self.attempts += 1;
        self.phase = Phase::Waiting {
            due: now + u64::from(wait),
        };
        Step::Planned(wait)
    }

    fn give_up(&mut self, why: &'static str) -> Step {
        self.rest();
        Step::GiveUp(why)
    }

    /// The device is left alone, which goes without saying.
    fn rest(&mut self) {
        self.phase = Phase::Stays;
    }
}

/// What passes between the work item, who talks to devlink, and who asks for an attempt.
///
/// None of them waits for the others but who asks, with the devlink instance locked. Who talks to devlink
/// waits for that lock, and so has work of his own.
struct Exchange {
    /// Nobody listens any more.
    closed: bool,
    /// How often was asked for an attempt.
    asked: u64,
    /// How many of these were answered.
    answered: u64,
    /// The last answer: the life that is there.
    answer: Result<u32, Refusal>,
    verdict: Option<Verdict>,
    /// The last life that began.
    life: u32,
    /// The last life that devlink knows of.
    counted: u32,
    /// Whether it has failed.
    failed: bool,
    /// Whether that was reported.
    reported: bool,
}

impl Exchange {
    const fn new() -> Self {
        Self {
            closed: false,
            asked: 0,
            answered: 0,
            answer: Ok(0),
            verdict: None,
            life: 0,
            counted: 0,
            failed: false,
            reported: false,
        }
    }

    /// A life has begun. One whose failure was not reported is [replaced](Self::renews) silently: devlink counts
    /// no recovery without an error.
    fn begins(&mut self, life: u32) {
        if self.failed && !self.reported {
            self.renews(life);
        } else {
            self.starts(life);
        }
    }

    /// A life has begun in place of one that devlink takes for working: there is nothing to count but what it has
    /// not counted before.
    fn renews(&mut self, life: u32) {
        let due = self.life.saturating_sub(self.counted);
        self.starts(life);
        self.counts(life.saturating_sub(due));
    }

    fn starts(&mut self, life: u32) {
        self.life = life;
        self.failed = false;
        self.reported = false;
        self.verdict = None;
    }

    /// devlink has counted the lives up to this one, or is not to.
    fn counts(&mut self, life: u32) {
        self.counted = self.counted.max(life);
    }

    /// It has failed.
    fn fails(&mut self) {
        self.failed = true;
    }

    /// What devlink is to say and to count, and the life whose failure is to be reported after that, if there is one.
    /// To be called with its instance locked: whoever asked has taken his answer by then, and devlink acted on it,
    /// or he never does.
    ///
    /// Both at once, as a life may begin and fail between: devlink has to take the one for healthy whose failure it is
    /// told, and would not want the device recovered.
    fn news(&mut self) -> (Standing, Option<u32>) {
        let standing = self.standing();
        (standing, self.take_report())
    }

    /// What devlink is to say and to count.
    fn standing(&mut self) -> Standing {
        let recovered = self.life.saturating_sub(self.counted);
        self.counts(self.life);
        Standing {
            // What is about to be reported is news, so that devlink has to take the device for healthy
            // before.
            healthy: !(self.failed && self.reported),
            recovered,
        }
    }

    /// The life whose failure is to be reported, if there is one: once.
    fn take_report(&mut self) -> Option<u32> {
        if !self.failed || self.reported {
            return None;
        }
        self.reported = true;
        Some(self.life)
    }

    /// Somebody asks for an attempt. Gives the number of the question.
    fn ask(&mut self) -> Result<u64, Refusal> {
        if self.closed {
            return Err(LET_GO);
        }
        self.asked += 1;
        Ok(self.asked)
    }

    /// The question that is not answered, if there is one.
    fn question(&self) -> Option<u64> {
        (self.asked > self.answered).then_some(self.asked)
    }

    /// What is to be considered now: a question, else what devlink said. That is kept while there is a
    /// question, as it may not come to an attempt.
    fn take(&mut self) -> (Option<u64>, Option<Verdict>) {
        let question = self.question();
        let verdict = match question {
            Some(_) => None,
            None => self.verdict.take(),
        };
        (question, verdict)
    }

    /// Answers all questions up to this one.
    fn answer(&mut self, question: u64, answer: Result<u32, Refusal>) {
        self.answered = question;
        self.answer = answer;
    }

    /// The answer to a question, if there is one.
    fn take_answer(&self, question: u64) -> Option<Result<u32, Refusal>> {
        if self.closed {
            return Some(Err(LET_GO));
        }
        (self.answered >= question).then_some(self.answer)
    }
}

/// Who asked has waited for long enough, or was interrupted.
const LATE: Refusal = Refusal::new(ETIMEDOUT, c"the attempt is still under way");
const GONE: Refusal = Refusal::new(EINTR, c"the attempt goes on");

const LET_GO: Refusal = Refusal::new(ENODEV, c"the driver lets go of the device");
const SHUT_DOWN: Refusal = Refusal::new(EBUSY, c"the machine shuts down");

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

/// Who is to be told of resets by others, of sleep and of shutdown.
struct Current {
    hw: Option<Arc<Hardware>>,
    /// Somebody else is about to reset the function, or does; or the machine is about to sleep, or to shut down.
    held: bool,
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
            held: false,
            shut_down: false,
            changes: 0,
            noted: 0,
            unstoppable: false,
        }
    }

    /// The function is held, or that is over.
    fn hold(&mut self, held: bool) {
        self.held = held || self.shut_down;
        self.changes = self.changes.wrapping_add(1);
    }

    /// An attempt begins.
    fn attempts(&mut self) {
        self.noted = self.changes;
    }

    /// Whether the function is held, or was since the attempt began: what was read meanwhile may be neither what
    /// was before nor what is now.
    fn is_interrupted(&self) -> bool {
        self.held || self.changes != self.noted
    }

    /// Why no life can begin now, if that is so.
    fn hindrance(&self) -> Option<(Outcome, Refusal)> {
        if self.shut_down {
            Some((Outcome::Over(End::Shutdown), SHUT_DOWN))
        } else {
            self.held.then_some((Outcome::Interrupted, HELD))
        }
    }

    /// What an attempt came to in which no life began.
    fn outcome(&self) -> Outcome {
        if self.shut_down {
            Outcome::Over(End::Shutdown)
        } else if self.unstoppable {
            // First, as it is not tried again.
            Outcome::Unstoppable
        } else if self.is_interrupted() {
            Outcome::Interrupted
        } else {
            Outcome::Failed
        }
    }
}

/// The parameter.
struct Spreading {
    /// What was set last.
    layout: Layout,
    /// What it is again where no life begins with that: what it was when the last one did. `None` where that is
    /// the same.
    before: Option<Layout>,
    /// Whether the device of the last life has a vector map.
    has_table: bool,
}

impl Spreading {
    const fn new() -> Self {
        Self {
            layout: vector_map::DEFAULT,
            before: None,
            has_table: false,
        }
    }

    /// What a life has that begins.
    fn of_life(&self) -> Layout {
        if self.has_table {
            self.layout
        } else {
            vector_map::DEFAULT
        }
    }

    /// Sets it.
    fn set(&mut self, name: &[u8]) -> Result<(), Refusal> {
        let layout = Layout::parse(name).ok_or(NO_LAYOUT)?;
        if layout != vector_map::DEFAULT && !self.has_table {
            let why = c"the device has no vector map";
            return Err(Refusal::new(errno::eopnotsupp(), why));
        }
        let before = self.before.unwrap_or_else(|| self.of_life());
        self.layout = layout;
        self.before = (before != layout).then_some(before);
        Ok(())
    }

    /// A life has begun, with that layout.
    fn begins(&mut self, layout: Layout) {
        // Somebody may have set another one meanwhile, which is tried next.
        self.before = (layout != self.of_life()).then_some(layout);
    }

    /// No life has begun with `layout`: gives whether it is as before now. What somebody has set meanwhile stays,
    /// and is tried next.
    fn take_back(&mut self, layout: Layout) -> bool {
        if self.layout != layout {
            return false;
        }
        let before = self.before.take();
        self.layout = before.unwrap_or(layout);
        before.is_some()
    }
}

const NO_LAYOUT: Refusal = Refusal::new(
    EINVAL,
    c"no such layout: event queues/vectors, as one/cpu, cpu/cpu, function-cpu/function",
);

/// What devlink shows, beyond what it counts itself.
struct Counts {
    lives: u32,
    attempts: u32,
    cause: Option<Cause>,
    /// Whether an attempt is under way.
    trying: bool,
    /// Why the last attempt failed, unless it did not.
    error: Option<Error>,
}

/// What devlink shows of what a device is.
#[derive(Clone, Copy)]
struct Versions {
    /// Of the interface: major, minor.
    interface: (u16, u16),
    /// Of the model: major, minor, patch.
    firmware: (u16, u8, u8),
}

/// A serial number of PCI Express as people write it: pairs of digits, the first of them that of who made it.
fn serial_number(number: u64) -> Result<CString> {
    let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
    CString::try_from_fmt(fmt!(
        "{a:02x}-{b:02x}-{c:02x}-{d:02x}-{e:02x}-{f:02x}-{g:02x}-{h:02x}"
    ))
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
    pub(crate) fn new(pdev: &pci::Device<Bound>, registers: Registers) -> Result<Arc<Self>> {
        let init = try_pin_init!(Self {
            registers: Arc::new(registers, GFP_KERNEL)?,
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
                },
                "ferrite_counts"
            ),
            spreading <- new_mutex!(Spreading::new(), "ferrite_spreading"),
            serial_number: pci_ext::serial_number(pdev),
            versions <- new_mutex!(None, "ferrite_versions"),
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

    /// Ends the present life, and sees to it that there is no other. Sleeps.
    pub(crate) fn close(self: &Arc<Self>) {
        // Who asked for an attempt has devlink locked: he goes first.
        self.exchange.lock().closed = true;
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
        hw.retire();
        ConfigLock::new(&self.pdev).clear_master();
        self.current.lock().unstoppable = hw.reach.get() == Reach::Unstoppable;
    }

    /// Somebody else is about to reset the function, with its config space locked. Sleeps.
    pub(crate) fn hold(&self, config: &Config<'_>) {
        drop(self.hold_for(config, Hardware::fail_for_reset));
    }

    /// The machine is about to sleep. Until it is [awake](Self::wake_up) the function may be without power, and when it
    /// is back its config space is what it is now, before anybody here can say anything: the device has stopped by
    /// then, and has no right to the bus. Sleeps.
    pub(crate) fn sleep(&self) {
        self.stop_for(Hardware::fail_for_sleep);
    }

    /// Gives the device up by `fail`, stops it, and takes the bus from it. Sleeps.
    fn stop_for(&self, fail: fn(&Arc<Hardware>)) {
        let hw = {
            let config = ConfigLock::new(&self.pdev);
            let hw = self.hold_for(&config, fail);
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
        self.stop_for(Hardware::fail_for_shutdown);
    }

    /// The machine is awake, or did not sleep.
    pub(crate) fn wake_up(self: &Arc<Self>) {
        // It may be told without having been asked to sleep.
        if self.current.lock().held {
            self.release();
        }
    }

    fn hold_for(&self, config: &Config<'_>, fail: fn(&Arc<Hardware>)) -> Option<Arc<Hardware>> {
        let hw = {
            let mut current = self.current.lock();
            current.hold(true);
            if let Some(hw) = &current.hw {
                // With the lock held, so that it queues nothing that who parts with it does not wait for.
                fail(hw);
            }
            current.hw.clone()
        };
        if let Some(hw) = &hw {
            hw.stop_for_reset(config);
        }
        hw
    }

    /// That is over.
    pub(crate) fn release(self: &Arc<Self>) {
        self.current.lock().hold(false);
        self.wake();
    }

    /// Notes how an attempt to begin a life ended.
    fn note(&self, life: &Result<Life>) {
        let mut counts = self.counts.lock();
        counts.attempts = counts.attempts.saturating_add(1);
        counts.error = life.as_ref().err().copied();
        if life.is_ok() {
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

    /// Ends the life of a device that failed or is to have another layout, and begins one, unless nothing stopped
    /// it and nobody `asked` for that. Sleeps.
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
        if let Some(life) = lives.life.take() {
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
            if current.unstoppable && !asked {
                return (Outcome::Unstoppable, Err(EIO));
            }
            // Not before users have let go: of a reset that is over by now nothing is left.
            current.attempts();
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
            Step::GiveUp(why) => dev_err!(
                self.pdev,
                "device stays failed ({}): 'devlink health recover' tries again\n",
                why
            ),
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
        let (question, verdict) = {
            let mut exchange = this.exchange.lock();
            if exchange.closed {
                // Nobody waits for it any more, and whoever unbinds waits for this.
                return;
            }
            exchange.take()
        };
        let cause = match this.works() {
            Ok(false) if question.is_some() => {
                this.counts.lock().trying = true;
                if this.let_go() {
                    let step = this.plan.lock().step(true, None, this.now());
                    this.act(pdev, step, question, true);
                    return;
                }
                // That is a failure like others.
                this.hardware().and_then(|hw| hw.cause())
            }
            Ok(_) => {
                if let Some(question) = question {
                    let life = this.plan.lock().life;
                    this.answer(question, Ok(life));
                }
                this.check_health();
                return;
            }
            Err(cause) => cause,
        };
        let shut_down = this.current.lock().shut_down;
        let (news, step) = {
            let mut plan = this.plan.lock();
            let now = this.now();
            let news = plan.notice(now, cause);
            if shut_down && question.is_none() {
                // Nobody is to wait for an attempt that does not come.
                plan.rest();
            }
            (news, plan.step(question.is_some(), verdict, now))
        };
        if news {
            this.counts.lock().cause = cause;
            this.exchange.lock().fails();
            this.tell();
        }
        this.act(pdev, step, question, false);
    }
}

impl BoundWorkItem<TALK> for Recovery {
    fn run(this: Arc<Self>, dev: &Device<Bound>) {
        let devlink = this.devlink.lock();
        let Some(Ok(devlink)) = devlink.as_ref().map(|devlink| devlink.access(dev)) else {
            return;
        };
        let mut report = None;
        devlink.update(|| {
            let (standing, life) = this.exchange.lock().news();
            report = life;
            standing
        });
        let Some(life) = report else {
            return;
        };
        let cause = this.counts.lock().cause;
        let wanted = devlink.report(cause.map_or(c"the device failed", Cause::text));
        this.exchange.lock().verdict = Some(Verdict { life, wanted });
        this.wake();
    }
}

impl Parameter for Recovery {
    const NAME_OF_PARAMETER: &'static CStr = c"vector_map";

    fn default_value() -> &'static CStr {
        vector_map::DEFAULT.name()
    }

    fn get(&self) -> &'static CStr {
        self.spreading.lock().of_life().name()
    }

    fn set(this: ArcBorrow<'_, Self>, value: &CStr) -> Result<(), Refusal> {
        let this = Arc::<Self>::from(this);
        this.spreading.lock().set(value.to_bytes())?;
        // Where nobody waits for the answer, it goes on with what was set.
        this.ask().map(|_| ())
    }
}

impl Information for Recovery {
    fn inform(&self, info: &mut Info<'_>) -> Result {
        if let Some(number) = self.serial_number {
            info.serial_number(&serial_number(number.get())?)?;
        }
        let versions = *self.versions.lock();
        let Some(versions) = versions else {
            return Ok(());
        };
        let (major, minor, patch) = versions.firmware;
        let firmware = CString::try_from_fmt(fmt!("{major}.{minor}.{patch}"))?;
        info.running_version(Info::FIRMWARE, &firmware)?;
        let (major, minor) = versions.interface;
        let interface = CString::try_from_fmt(fmt!("{major}.{minor}"))?;
        info.running_version(Info::INTERFACE, &interface)
    }
}

impl HealthReporter for Recovery {
    const NAME: &'static CStr = c"fatal";

    fn recover(this: ArcBorrow<'_, Self>) -> Result<(), Refusal> {
        let this = Arc::<Self>::from(this);
        let life = this.ask()?;
        // devlink does so by itself, when it gets the answer.
        this.exchange.lock().counts(life);
        Ok(())
    }

    fn diagnose(&self, diagnosis: &mut Diagnosis<'_>) {
        let (phase, attempts) = {
            let plan = self.plan.lock();
            (plan.phase, plan.attempts)
        };
        let trying = self.counts.lock().trying;
        diagnosis.text(
            c"state",
            match phase {
                _ if trying => c"being tried",
                Phase::Working => c"working",
                Phase::Reported | Phase::Waiting { .. } => c"coming back",
                Phase::Stays => c"failed",
            },
        );
        diagnosis.number(c"attempts in a row", attempts as u32);
        let counts = self.counts.lock();
        diagnosis.number(c"attempts", counts.attempts);
        diagnosis.number(c"lives", counts.lives);
        if let Some(error) = counts.error {
            diagnosis.number(
                c"error of the last attempt",
                error.to_errno().unsigned_abs(),
            );
        }
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

    const WANTED: bool = true;

    #[test]
    fn a_serial_number_is_written_as_that_of_other_devices() -> Result {
        let text = serial_number(0x5254_00ff_fe12_3456)?;
        assert_eq!(text.to_bytes(), b"52-54-00-ff-fe-12-34-56");
        Ok(())
    }

    #[test]
    fn a_layout_is_one_that_there_is_and_that_the_device_can_have() {
        let mut spreading = Spreading::new();
        let refused = |spreading: &mut Spreading, name: &[u8], error| {
            let refusal = spreading.set(name);
            assert!(refusal.is_err_and(|refusal| refusal.error() == error));
            assert_eq!(spreading.layout, vector_map::DEFAULT);
        };
        refused(&mut spreading, b"one/two", EINVAL);
        // Without a table all is as always.
        refused(&mut spreading, b"one/cpu", errno::eopnotsupp());
        assert_eq!(spreading.set(b"cpu/cpu"), Ok(()));
        spreading.has_table = true;
        refused(&mut spreading, b"one/two", EINVAL);
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        let layout = spreading.layout;
        assert_eq!(layout.name().to_bytes(), b"one/cpu");
        assert_eq!(spreading.of_life(), layout);
        // A device that comes back without it has what it can, and that does not count as what it was before.
        spreading.has_table = false;
        assert_eq!(spreading.of_life(), vector_map::DEFAULT);
        spreading.begins(vector_map::DEFAULT);
        assert!(!spreading.take_back(layout));
        spreading.has_table = true;
        assert_eq!(spreading.of_life(), layout);
        // Nor does it where somebody sets the one that it has by now.
        spreading.has_table = false;
        assert_eq!(spreading.set(b"cpu/cpu"), Ok(()));
        assert!(!spreading.take_back(vector_map::DEFAULT));
        assert_eq!(spreading.layout, vector_map::DEFAULT);
    }

    /// A parameter with which a life has begun, and that layout.
    fn spreading(name: &[u8]) -> Result<(Spreading, Layout)> {
        let layout = Layout::parse(name).ok_or(EINVAL)?;
        let mut spreading = Spreading {
            has_table: true,
            ..Spreading::new()
        };
        assert_eq!(spreading.set(name), Ok(()));
        spreading.begins(layout);
        assert_eq!(spreading.before, None);
        Ok((spreading, layout))
    }

    #[test]
    fn a_layout_with_which_no_life_begins_is_what_the_last_one_had() -> Result {
        let (mut spreading, one) = spreading(b"one/cpu")?;
        // Nothing is new, and nothing to take back.
        assert!(!spreading.take_back(one));
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        assert!(!spreading.take_back(one));
        assert_eq!(spreading.layout, one);
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        let two = spreading.layout;
        assert!(spreading.take_back(two));
        assert_eq!(spreading.layout, one);
        // Once: the next failure is not for that.
        assert!(!spreading.take_back(one));
        // What a life has begun with stays.
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        spreading.begins(two);
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, two);
        Ok(())
    }

    #[test]
    fn who_sets_a_layout_while_another_is_tried_has_it_tried() -> Result {
        let (mut spreading, one) = spreading(b"one/cpu")?;
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        let two = spreading.layout;
        // Nobody waits for that, and another one is set before it fails.
        assert_eq!(spreading.set(b"function/cpu"), Ok(()));
        let three = spreading.layout;
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, three);
        // That fails too: neither is what it was before.
        assert!(spreading.take_back(three));
        assert_eq!(spreading.layout, one);
        // The first one succeeds, and is what it was before the second.
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        assert_eq!(spreading.set(b"function/cpu"), Ok(()));
        spreading.begins(two);
        assert_eq!(spreading.layout, three);
        assert!(spreading.take_back(three));
        assert_eq!(spreading.layout, two);
        // And who sets what it was before has nothing taken back.
        assert_eq!(spreading.set(b"one/cpu"), Ok(()));
        assert_eq!(spreading.set(b"one/one"), Ok(()));
        assert!(!spreading.take_back(two));
        assert_eq!(spreading.layout, two);
        Ok(())
    }

    #[test]
    fn a_device_whose_layout_was_taken_back_is_tried_as_one_that_failed() {
        let mut plan = begun(0);
        assert_eq!(plan.step(true, None, 7), Step::Attempt);
        // Not as an attempt that was asked for.
        assert_eq!(
            plan.ended(Outcome::Failed, false, 7),
            Step::Planned(WAITS[0])
        );
        let due = 7 + u64::from(WAITS[0]);
        // Whatever devlink says of the failure that it was told of.
        assert_eq!(
            plan.step(false, verdict(1, !WANTED), 8),
            Step::Wait(WAITS[0] - 1)
        );
        assert_eq!(plan.step(false, None, due), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Began, false, due), Step::Nothing);
    }

    fn verdict(life: u32, wanted: bool) -> Option<Verdict> {
        Some(Verdict { life, wanted })
    }

    /// A plan whose first life begins at `now`.
    fn begun(now: u64) -> Plan {
        let mut plan = Plan::new();
        plan.begins(now);
        plan
    }

    /// The device fails at `now`, and devlink wants it recovered.
    fn fails(plan: &mut Plan, now: u64) -> Step {
        assert!(plan.notice(now, None));
        assert_eq!(plan.step(false, None, now), Step::Nothing);
        let verdict = verdict(plan.life, WANTED);
        plan.step(false, verdict, now)
    }

    #[test]
    fn a_failure_is_reported_once_and_tried_again_when_its_time_has_come() {
        let mut plan = begun(5);
        assert_eq!(fails(&mut plan, 100), Step::Planned(WAITS[0]));
        assert!(!plan.notice(100, None));
        // Whoever looks sooner waits for the rest.
        assert_eq!(plan.step(false, None, 100), Step::Wait(WAITS[0]));
        let due = 100 + u64::from(WAITS[0]);
        assert_eq!(plan.step(false, None, due - 1), Step::Wait(1));
        assert_eq!(plan.step(false, None, due), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Began, false, due), Step::Nothing);
        assert_eq!(plan.life, 2);
        assert!(plan.notice(due, None));
    }

    #[test]
    fn attempts_come_to_an_end_with_growing_waits() {
        let mut plan = begun(0);
        let mut now = 0;
        let mut last = 0;
        let mut step = fails(&mut plan, now);
        let mut attempts = 0;
        while let Step::Planned(wait) = step {
            assert!(wait > last);
            last = wait;
            now += u64::from(wait);
            assert_eq!(plan.step(false, None, now), Step::Attempt);
            attempts += 1;
            step = plan.ended(Outcome::Failed, false, now);
        }
        assert_eq!(attempts, WAITS.len());
        assert!(matches!(step, Step::GiveUp(_)));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
    }

    /// How many lives of so many milliseconds there are before the device is left alone, up to 100.
    fn lives_of(length: u64) -> usize {
        let mut plan = begun(0);
        let mut now = length;
        let mut lives = 0;
        while let Step::Planned(wait) = fails(&mut plan, now) {
            now += u64::from(wait);
            assert_eq!(plan.step(false, None, now), Step::Attempt);
            plan.ended(Outcome::Began, false, now);
            now += length;
            lives += 1;
            if lives == 100 {
                break;
            }
        }
        lives
    }

    #[test]
    fn a_device_that_keeps_failing_is_left_alone_and_one_that_works_between_is_not() {
        assert_eq!(lives_of(0), WAITS.len());
        assert_eq!(lives_of(10_000), WAITS.len());
        assert_eq!(lives_of(FORGIVEN_AFTER - 1), WAITS.len());
        assert_eq!(lives_of(FORGIVEN_AFTER), 100);
    }

    #[test]
    fn attempts_are_forgiven_one_by_one() {
        let mut plan = begun(0);
        plan.attempts = 4;
        assert_eq!(
            fails(&mut plan, 2 * FORGIVEN_AFTER),
            Step::Planned(WAITS[2])
        );
        plan.begins(0);
        assert_eq!(
            fails(&mut plan, 100 * FORGIVEN_AFTER),
            Step::Planned(WAITS[0])
        );
    }

    #[test]
    fn a_failure_that_is_not_to_be_recovered_stays() {
        let mut plan = begun(0);
        assert!(plan.notice(7, None));
        let step = plan.step(false, verdict(1, !WANTED), 7);
        assert!(matches!(step, Step::GiveUp(_)));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
        // It is said once.
        assert_eq!(plan.step(false, verdict(1, WANTED), 8), Step::Nothing);
    }

    #[test]
    fn what_is_said_of_another_life_does_not_count() {
        let mut plan = begun(0);
        assert!(plan.notice(7, None));
        assert_eq!(plan.step(true, None, 7), Step::Attempt);
        plan.ended(Outcome::Began, true, 8);
        assert!(plan.notice(9, None));
        assert_eq!(plan.step(false, verdict(1, !WANTED), 9), Step::Nothing);
        let step = plan.step(false, verdict(2, WANTED), 9);
        assert_eq!(step, Step::Planned(WAITS[0]));
    }

    #[test]
    fn who_asks_begins_anew_in_each_phase() {
        let due = u64::from(WAITS[0]);
        let phases = [Phase::Reported, Phase::Waiting { due }, Phase::Stays];
        for phase in phases {
            let mut plan = begun(0);
            plan.attempts = WAITS.len();
            plan.phase = phase;
            assert_eq!(plan.step(true, None, 0), Step::Attempt);
            plan.ended(Outcome::Began, true, 1);
            assert_eq!(plan.phase, Phase::Working);
            assert_eq!(fails(&mut plan, 1), Step::Planned(WAITS[0]));

            // An attempt by hand that fails is not followed by others.
            plan.phase = phase;
            assert_eq!(plan.step(true, None, 0), Step::Attempt);
            let step = plan.ended(Outcome::Failed, true, 1);
            assert!(matches!(step, Step::GiveUp(_)));
            assert_eq!(
                plan.step(false, verdict(2, WANTED), u64::MAX),
                Step::Nothing
            );
        }
    }

    #[test]
    fn a_reset_by_others_uses_up_no_attempt() {
        let mut plan = begun(0);
        assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
        let now = u64::from(WAITS[0]);
        assert_eq!(plan.step(false, None, now), Step::Attempt);
        assert_eq!(plan.ended(Outcome::Interrupted, true, now), Step::Wait(0));
        assert_eq!(plan.ended(Outcome::Interrupted, false, now), Step::Wait(0));
        assert_eq!(plan.attempts, 0);
        assert_eq!(plan.step(false, None, now), Step::Attempt);
    }

    #[test]
    fn a_reset_after_shutdown_lets_nothing_begin() {
        let mut current = Current::new();
        current.shut_down = true;
        for held in [true, true, false] {
            current.hold(held);
            current.attempts();
            assert_eq!(current.outcome(), Outcome::Over(End::Shutdown));
            let hindrance = current.hindrance();
            assert_eq!(hindrance, Some((current.outcome(), SHUT_DOWN)));
        }
        // Whatever else there is to say of it.
        current.unstoppable = true;
        assert_eq!(current.outcome(), Outcome::Over(End::Shutdown));
    }

    #[test]
    fn what_is_over_is_not_planned_again_and_its_reason_is_said() {
        for (end, why) in [(End::LetGo, LET_GO), (End::Shutdown, SHUT_DOWN)] {
            for asked in [false, true] {
                let mut plan = begun(0);
                assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
                assert_eq!(plan.ended(Outcome::Over(end), asked, 1), Step::Nothing);
                assert_eq!(
                    plan.step(false, verdict(1, WANTED), u64::MAX),
                    Step::Nothing
                );
            }
            for taken_back in [false, true] {
                assert_eq!(refusal(Outcome::Over(end), taken_back, EIO), why);
            }
        }
    }

    #[test]
    fn a_device_that_is_left_alone_without_a_word_is_reported_all_the_same() {
        let mut plan = begun(0);
        assert!(plan.notice(7, Some(Cause::Shutdown)));
        plan.rest();
        // What devlink says of it comes to nothing.
        assert_eq!(plan.step(false, verdict(1, WANTED), 7), Step::Nothing);
        assert!(!plan.notice(8, Some(Cause::Shutdown)));
    }

    #[test]
    fn an_attempt_that_others_reset_is_not_one_that_failed_however_short_that_was() {
        let mut current = Current::new();
        assert!(!current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Failed);
        current.hold(true);
        assert!(current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // Also where it is over before the attempt is taken down.
        current.hold(false);
        assert!(current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // And where it began before the attempt.
        current.hold(true);
        current.attempts();
        assert!(current.is_interrupted());
        current.hold(false);
        assert_eq!(current.outcome(), Outcome::Interrupted);
        // What was over before is none of the next one's.
        current.attempts();
        assert!(!current.is_interrupted());
        assert_eq!(current.outcome(), Outcome::Failed);
        // A device that cannot be stopped is not tried again, whoever else resets it.
        current.unstoppable = true;
        assert_eq!(current.outcome(), Outcome::Unstoppable);
        current.hold(true);
        assert_eq!(current.outcome(), Outcome::Unstoppable);
    }

    #[test]
    fn who_asked_is_told_whether_it_goes_on_without_him() {
        let of = |outcome, taken_back| refusal(outcome, taken_back, EIO);
        let on = of(Outcome::Interrupted, false);
        assert!(on.error() == EBUSY && on != HELD);
        // The layout that was asked for is not what it goes on with.
        assert_eq!(of(Outcome::Interrupted, true), HELD);
        for outcome in [Outcome::Failed, Outcome::Unstoppable] {
            assert!([true, false].map(|back| of(outcome, back).error()) == [EIO; 2]);
        }
        assert!(of(Outcome::Failed, true) != of(Outcome::Failed, false));
    }

    #[test]
    fn a_device_that_cannot_be_stopped_is_not_tried_again() {
        let mut plan = begun(0);
        assert_eq!(fails(&mut plan, 0), Step::Planned(WAITS[0]));
        let step = plan.ended(Outcome::Unstoppable, false, 1_000);
        assert_eq!(step, Step::GiveUp("it cannot be stopped"));
        assert_eq!(plan.step(false, None, u64::MAX), Step::Nothing);
    }

    #[test]
    fn a_question_that_comes_to_nothing_leaves_what_devlink_said() -> Result {
        let mut exchange = exchange();
        exchange.verdict = verdict(1, WANTED);
        let question = exchange.ask().map_err(|_| EINVAL)?;
        assert_eq!(exchange.take(), (Some(question), None));
        exchange.answer(question, Err(HELD));
        assert_eq!(exchange.take(), (None, verdict(1, WANTED)));
        assert_eq!(exchange.take(), (None, None));
        Ok(())
    }

    /// As [`Recovery::open`] leaves it.
    fn exchange() -> Exchange {
        let mut exchange = Exchange::new();
        exchange.begins(1);
        exchange.counted = 1;
        exchange
    }

    const HEALTHY: Standing = Standing {
        healthy: true,
        recovered: 0,
    };
    const FAILED: Standing = Standing {
        healthy: false,
        recovered: 0,
    };

    #[test]
    fn a_failure_is_reported_of_a_device_that_devlink_takes_for_healthy() {
        let mut exchange = exchange();
        assert_eq!(exchange.take_report(), None);
        exchange.fails();
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(1));
        assert_eq!(exchange.take_report(), None);
        assert_eq!(exchange.standing(), FAILED);
        exchange.begins(2);
        let recovered = Standing {
            recovered: 1,
            ..HEALTHY
        };
        assert_eq!(exchange.standing(), recovered);
        assert_eq!(exchange.standing(), HEALTHY);
        // What there was to report is of the life before.
        assert_eq!(exchange.take_report(), None);
    }

    #[test]
    fn what_fails_before_devlink_was_told_that_it_began_is_reported_of_a_healthy_device() {
        let mut exchange = exchange();
        assert_eq!(exchange.news(), (HEALTHY, None));
        exchange.fails();
        assert_eq!(exchange.news(), (HEALTHY, Some(1)));
        assert_eq!(exchange.news(), (FAILED, None));
        // Nobody has told devlink of this one when it fails as well.
        exchange.begins(2);
        exchange.fails();
        let recovered = Standing {
            recovered: 1,
            ..HEALTHY
        };
        assert_eq!(exchange.news(), (recovered, Some(2)));
        assert_eq!(exchange.news(), (FAILED, None));
    }

    #[test]
    fn who_asks_while_a_failure_is_reported_leaves_a_device_that_can_be_reported_again() {
        let mut exchange = exchange();
        exchange.fails();
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(1));
        // Before devlink has said whether it wants that, somebody asks, and has it.
        let question = exchange.ask().unwrap_or(0);
        assert_eq!(exchange.question(), Some(question));
        assert_eq!(exchange.take_answer(question), None);
        exchange.begins(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.question(), None);
        // That life fails as well, before he has his answer.
        exchange.fails();
        assert_eq!(exchange.take_answer(question), Some(Ok(2)));
        exchange.counts(2);
        // devlink counted that one by itself, and the failure is news.
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), Some(2));
        assert_eq!(exchange.standing(), FAILED);
    }

    #[test]
    fn what_nobody_waited_for_is_counted_all_the_same() {
        let mut exchange = exchange();
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(1));
        let question = exchange.ask().unwrap_or(0);
        exchange.begins(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.standing().recovered, 1);
        // Who asks after him is not given his answer.
        let next = exchange.ask().unwrap_or(0);
        assert_eq!(exchange.take_answer(next), None);
        assert_eq!(exchange.question(), Some(next));
        exchange.answer(next, Err(HELD));
        assert_eq!(exchange.take_answer(next), Some(Err(HELD)));
    }

    #[test]
    fn a_device_that_worked_and_begins_anew_is_not_counted_whoever_waits() {
        let mut exchange = exchange();
        let question = exchange.ask().unwrap_or(0);
        exchange.renews(2);
        exchange.answer(question, Ok(2));
        assert_eq!(exchange.standing(), HEALTHY);
        // One that failed before is, also where somebody set a layout.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(2));
        let question = exchange.ask().unwrap_or(0);
        exchange.begins(3);
        exchange.answer(question, Ok(3));
        assert_eq!(exchange.take_answer(question), Some(Ok(3)));
        assert_eq!(exchange.standing().recovered, 1);
        // And stays so where it begins anew before devlink has counted that.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(3));
        exchange.begins(4);
        exchange.renews(5);
        assert_eq!(exchange.standing().recovered, 1);
        assert_eq!(exchange.standing(), HEALTHY);
    }

    #[test]
    fn what_devlink_was_not_told_of_is_no_recovery() {
        let mut exchange = exchange();
        exchange.fails();
        exchange.begins(2);
        assert_eq!(exchange.standing(), HEALTHY);
        assert_eq!(exchange.take_report(), None);
        // The next failure is one, and what was to be counted before it is not lost.
        exchange.fails();
        assert_eq!(exchange.take_report(), Some(2));
        exchange.begins(3);
        exchange.fails();
        exchange.begins(4);
        assert_eq!(exchange.standing().recovered, 1);
        assert_eq!(exchange.standing(), HEALTHY);
    }

    #[test]
    fn however_often_the_machine_sleeps_the_device_is_tried_again() {
        let mut plan = Plan::new();
        let wanted = |life| Some(Verdict { life, wanted: true });
        for round in 0..2 * WAITS.len() as u32 {
            assert!(plan.notice(0, Some(Cause::Sleep)));
            assert_eq!(plan.step(false, wanted(round), 0), Step::Planned(WAITS[0]));
            plan.begins(0);
        }
        // Other causes count.
        for round in 0.. {
            assert!(plan.notice(0, Some(Cause::Silent)));
            let step = plan.step(false, wanted(2 * WAITS.len() as u32 + round), 0);
            if matches!(step, Step::GiveUp(_)) {
                assert!((1..=WAITS.len() as u32).contains(&round));
                break;
            }
            plan.begins(0);
        }
    }

    fn consumers(states: &[QpState]) -> Consumers {
        let mut consumers = Consumers::default();
        for state in states {
            consumers.add(*state);
        }
        consumers
    }

    #[test]
    fn who_lets_go_is_waited_for_and_nobody_else() {
        let nobody = consumers(&[]);
        let idle = consumers(&[QpState::Rts, QpState::Reset]);
        let leaving = consumers(&[QpState::Reset, QpState::Err]);
        let mut farewell = Farewell::new(500);
        assert_eq!(farewell.look(500, nobody), Wait::Over);
        assert_eq!(farewell.look(500, idle), Wait::Over);
        assert_eq!(farewell.look(500, leaving), Wait::Longer);
        assert_eq!(farewell.look(600, nobody), Wait::Over);
        // Not for ever.
        assert_ne!(farewell.look(500 + LETTING_GO - 1, leaving), Wait::Over);
        assert_eq!(farewell.look(500 + LETTING_GO, leaving), Wait::Over);
    }

    #[test]
    fn peers_are_told_nothing_more_when_all_who_disconnect_have_said_so() {
        let leaving = consumers(&[QpState::Err]);
        let some = consumers(&[QpState::Err, QpState::Rts]);
        let mut farewell = Farewell::new(0);
        assert_eq!(farewell.look(0, some), Wait::Longer);
        // The last one has only now begun.
        assert_eq!(farewell.look(1000, leaving), Wait::Longer);
        assert_eq!(
            farewell.look(1000 + DISCONNECTED - 1, leaving),
            Wait::Longer
        );
        assert_eq!(
            farewell.look(1000 + DISCONNECTED, leaving),
            Wait::WithoutManagement
        );
        // Another one comes by.
        assert_eq!(farewell.look(1001 + DISCONNECTED, some), Wait::Longer);
        assert_eq!(farewell.look(1002 + DISCONNECTED, leaving), Wait::Longer);
    }

    #[test]
    fn nobody_waits_for_a_driver_that_lets_go() {
        let mut exchange = exchange();
        exchange.fails();
        let question = exchange.ask().unwrap_or(0);
        exchange.closed = true;
        assert_eq!(exchange.take_answer(question), Some(Err(LET_GO)));
        assert_eq!(exchange.ask(), Err(LET_GO));
    }
}
