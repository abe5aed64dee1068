// SPDX-License-Identifier: GPL-2.0

//! A running device as the rest of the driver sees it: what its events are about, and what happens when it fails. Its
//! commands are in [`commands`](crate::commands).

use crate::{
    abi,
    abi::{
        CommandOpcode,
        EventCode,
        EventEntry,
        EventPriority,
        FatalCode,
        Tag, //
    },
    bars::{
        Doorbells,
        Registers,
        MOST_RESET_TIMEOUT, //
    },
    commands::{
        is_disagreement,
        Failure, //
    },
    cq::FerriteCq,
    cqp::{
        Answers,
        Cqp,
        Manner,
        Patience,
        TakesEvents, //
    },
    device::{
        Ferrite,
        GSI_QPN, //
    },
    dma_types::Nothing,
    eq::EventQueue,
    event_class::{
        Description,
        EventClass,
        EventCounts, //
    },
    event_log::{
        Change,
        EventLog, //
    },
    growth,
    handler::Arrangement,
    interface::{
        ChannelListener,
        Interface, //
    },
    kernel_ext::{
        bound_work::{
            BoundWork,
            BoundWorkItem, //
        },
        pci::{
            Config,
            ConfigLock, //
        },
        ratelimit::RateLimit,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        table::{
            new_irq_xarray,
            IrqXArray, //
        },
        user,
        workqueue::OwnedQueue, //
    },
    lent::{
        DeviceReach,
        Reach,
        Stop,
        Stopper, //
    },
    net::Hold,
    occupancy::Tables,
    port,
    qp::FerriteQp,
    rdma::{
        CqRef,
        EventSink,
        FlowRef,
        MrRef,
        QpEvent,
        QpRef,
        QpType,
        SrqRef,
        WqRef, //
    },
    recovery::{
        Consumers,
        Recovery, //
    },
    requests::{
        Class,
        PostedFor, //
    },
};
use kernel::{
    device::{
        Bound,
        Device, //
    },
    new_delayed_work, pci,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        SetOnce, //
    },
    time::Delta,
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// How often the end of somebody else's reset of the function is looked for.
const OTHERS_RESET_POLL: Delta = Delta::from_millis(1);
/// How long that is waited for: longer than any reset takes that ends at all. Who waits may have had the device
/// resist a reset by its register; that of others begins with another one ([`Hardware::stop_for_reset`]), and for that
/// of the function the PCI core waits a minute; ours, by another who stops the device, takes as long, and one by its
/// register follows.
const OTHERS_RESET_TIMEOUT: Delta =
    Delta::from_nanos(3 * MOST_RESET_TIMEOUT.as_nanos() + 120_000_000_000);

/// Something about the device as a whole that its consumers are told of, as bits of a word.
pub(crate) mod device_event {
    /// It failed.
    pub(crate) const FATAL: u32 = 1 << 0;
    /// Its link came up or went down.
    pub(crate) const LINK: u32 = 1 << 1;
    /// There are page faults to take.
    pub(crate) const PAGE_FAULTS: u32 = 1 << 2;
}

/// Why a device was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It said that it stopped, and perhaps why.
    Stopped(Option<FatalCode>),
    /// It did not answer a command.
    Silent,
    /// It is not there.
    Gone,
    /// Somebody else reset the function.
    ResetByOthers,
    /// It refused what it has no reason to refuse: it and the driver disagree about what exists.
    Disagreement,
    /// It worked, and was to begin anew.
    Renewal,
    /// The machine goes to sleep, which no queue pair outlives.
    Sleep,
    /// The machine ends, or starts another kernel: there is no life after that.
    Shutdown,
    /// The bus lost something on the way.
    BusError,
}

impl Cause {
    const STOPPED: u32 = 1 << 8;

    /// In a word: none is zero.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Stopped(code) => Self::STOPPED | code.map_or(0, |code| code as u32),
            Self::Silent => 1,
            Self::Gone => 2,
            Self::ResetByOthers => 3,
            Self::Disagreement => 4,
            Self::Renewal => 5,
            Self::Sleep => 6,
            Self::Shutdown => 7,
            Self::BusError => 8,
        }
    }

    /// The one of that number.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::Silent,
            2 => Self::Gone,
            3 => Self::ResetByOthers,
            4 => Self::Disagreement,
            5 => Self::Renewal,
            6 => Self::Sleep,
            7 => Self::Shutdown,
            8 => Self::BusError,
            _ => Self::Stopped(FatalCode::from_number(number as u8)),
        })
    }

    /// Whether it is what somebody wanted, and so nothing to look into.
    pub(crate) const fn is_wanted(self) -> bool {
        matches!(self, Self::Sleep | Self::Shutdown)
    }

    /// For people.
    pub(crate) fn text(self) -> &'static CStr {
        match self {
            Self::Stopped(_) => c"the device stopped itself",
            Self::Silent => c"the device did not answer a command",
            Self::Gone => c"the device is gone",
            Self::ResetByOthers => c"the function was reset by others",
            Self::Disagreement => c"the device and the driver disagree",
            Self::Renewal => c"the device was to begin anew, and did not",
            Self::Sleep => c"the machine slept",
            Self::Shutdown => c"the machine shuts down",
            Self::BusError => c"there was an error of the bus",
        }
    }
}

/// A device, from one reset to the next.
#[pin_data]
pub(crate) struct Hardware {
    pub(crate) pdev: ARef<pci::Device>,
    pub(crate) registers: Arc<Registers>,
    pub(crate) doorbells: Arc<Doorbells>,
    #[pin]
    pub(crate) cqp: Cqp,
    /// Completion queues by number, for events.
    #[pin]
    pub(crate) cqs: IrqXArray<CqRef<Ferrite>>,
    /// Queue pairs by number, for events.
    #[pin]
    pub(crate) qps: IrqXArray<QpRef<Ferrite>>,
    /// Work queues, which have numbers of queue pairs that no queue pair has.
    #[pin]
    pub(crate) wqs: IrqXArray<WqRef<Ferrite>>,
    /// Rules of flows by number, for when they end with the interface.
    #[pin]
    pub(crate) flows: IrqXArray<FlowRef<Ferrite>>,
    /// Shared receive queues by number, for events.
    #[pin]
    pub(crate) srqs: IrqXArray<SrqRef<Ferrite>>,
    /// On-demand regions by the index of their tag, for faults.
    #[pin]
    pub(crate) regions: IrqXArray<MrRef<Ferrite>>,
    /// Channels by number, for events.
    #[pin]
    pub(crate) channels: IrqXArray<Arc<ChannelListener>>,
    /// The network interface that this is the device of, if there is one.
    #[pin]
    pub(crate) interface: IrqSpinLock<Option<Hold<Interface>>>,
    /// Event queues by number, for those that are out of room.
    #[pin]
    pub(crate) event_queues: IrqXArray<Arc<EventQueue>>,
    /// Where events of the device as a whole go.
    #[pin]
    pub(crate) sink: EventSink<Ferrite>,
    /// Where events of queue pairs are passed on, in order.
    pub(crate) events: OwnedQueue,
    /// Where everything else is done that may wait for the device.
    pub(crate) work: OwnedQueue,
    /// Where a device that failed is stopped, and nothing else is done: what is queued elsewhere may wait
    /// for that, in the one worker that there is when memory is short.
    failure_work: OwnedQueue,
    /// Gives event queues more room, which takes memory: what reclaim waits for is not behind it.
    pub(crate) growth: Arc<BoundWork<Hardware>>,
    /// Where the device is told of GIDs, of which there are many: nobody waits for all of them.
    pub(crate) gid_work: OwnedQueue,
    link_up: Atomic<u32>,
    /// How many event queues are of low latency.
    low_latency: Atomic<u32>,
    /// The [`Cause::number`] for which it was given up, zero before.
    cause: Atomic<u32>,
    /// Whether management packets are refused from now on, see [`Self::refuse_management`].
    management_over: Atomic<u32>,
    /// Who has to make it work again.
    recovery: Arc<Recovery>,
    /// Of what is printed in interrupts, as often as the device likes: changes of the link.
    #[pin]
    link_prints: RateLimit,
    /// And events that it should not raise, which are not to hide those.
    #[pin]
    stray_prints: RateLimit,
    /// And those about memory and management.
    #[pin]
    class_prints: RateLimit,
    /// And registrations that were posted and failed, which processes may have as often as they like.
    #[pin]
    registration_prints: RateLimit,
    /// Events that are about no queue.
    pub(crate) event_counts: EventCounts,
    /// How full its tables are, once there are such, and how it interrupts: for who looks after a failure.
    pub(crate) tables: SetOnce<Tables>,
    pub(crate) arrangement: SetOnce<Arrangement>,
    /// What the device may still do to host memory.
    pub(crate) reach: Arc<DeviceReach>,
    /// Whether it was noted what became of it.
    is_reach_noted: Atomic<u32>,
    /// Changes that when the device failed.
    #[pin]
    stopper: Stopper,
    /// What is left to do when the device failed.
    #[pin]
    failure: Work<Hardware>,
}

impl_has_work! {
    impl HasWork<Self> for Hardware { self.failure }
}

impl Hardware {
    /// A device that was reset; it is not started yet.
    pub(crate) fn new<'a>(
        pdev: &'a pci::Device<Bound>,
        reach: &'a Arc<DeviceReach>,
        registers: Arc<Registers>,
        doorbells: Arc<Doorbells>,
        recovery: &'a Arc<Recovery>,
    ) -> impl PinInit<Self, Error> + 'a {
        try_pin_init!(Self {
            cqp <- Cqp::new(pdev.as_ref(), reach, registers.clone(), doorbells.clone()),
            registers,
            doorbells,
            cqs <- new_irq_xarray!("ferrite_cqs"),
            qps <- new_irq_xarray!("ferrite_qps"),
            wqs <- new_irq_xarray!("ferrite_wqs"),
            flows <- new_irq_xarray!("ferrite_flows"),
            srqs <- new_irq_xarray!("ferrite_srqs"),
            regions <- new_irq_xarray!("ferrite_regions"),
            channels <- new_irq_xarray!("ferrite_channels"),
            interface <- new_irq_spinlock!(None, "ferrite_interface"),
            event_queues <- new_irq_xarray!("ferrite_event_queues"),
            sink <- EventSink::new(),
            events: OwnedQueue::ordered(c"ferrite")?,
            work: OwnedQueue::unbound(c"ferrite_work")?,
            failure_work: OwnedQueue::ordered(c"ferrite_failure")?,
            growth: BoundWork::new(
                pdev.as_ref(),
                OwnedQueue::for_long_work(c"ferrite_growth")?,
                new_delayed_work!("ferrite_growth"),
            )?,
            gid_work: OwnedQueue::ordered(c"ferrite_gids")?,
            link_up: Atomic::new(0),
            low_latency: Atomic::new(0),
            cause: Atomic::new(0),
            management_over: Atomic::new(0),
            recovery: recovery.clone(),
            link_prints <- RateLimit::new(),
            stray_prints <- RateLimit::new(),
            class_prints <- RateLimit::new(),
            registration_prints <- RateLimit::new(),
            event_counts: EventCounts::new(),
            tables: SetOnce::new(),
            arrangement: SetOnce::new(),
            reach: reach.clone(),
            is_reach_noted: Atomic::new(0),
            stopper <- Stopper::new(reach),
            failure <- new_work!("ferrite_failure"),
            pdev: ARef::from(&**pdev),
        })
    }

    /// Whether the link of the device is up.
    pub(crate) fn link_up(&self) -> bool {
        self.link_up.load(Relaxed) != 0
    }

    /// Notes whether the link is up, and tells the interface.
    pub(crate) fn set_link(&self, up: bool) {
        self.link_up.store(u32::from(up), Relaxed);
        self.tell_carrier();
    }

    /// Tells the interface whether it has a carrier.
    pub(crate) fn tell_carrier(&self) {
        // Looked at with the lock held, so that who is last tells of what is so last.
        if let Some(interface) = &*self.interface.lock() {
            let up = self.link_up() && !self.is_dead();
            interface.set_carrier(up && interface.may_have_carrier());
        }
    }

    /// Whether there is an event queue of low latency.
    #[inline]
    pub(crate) fn has_low_latency(&self) -> bool {
        self.low_latency.load(Relaxed) != 0
    }

    /// Sets the priority of an event queue. Sleeps.
    pub(crate) fn set_priority(
        self: &Arc<Self>,
        queue: &EventQueue,
        priority: EventPriority,
    ) -> Result {
        queue.set_priority(priority, &self.low_latency, |command| self.execute(command))
    }

    /// Whether the device has failed; nothing is expected of it any more. It may still touch
    /// memory.
    pub(crate) fn is_dead(&self) -> bool {
        self.cqp.is_dead()
    }

    /// Why the device was given up, if it was.
    pub(crate) fn cause(&self) -> Option<Cause> {
        Cause::from_number(self.cause.load(Relaxed))
    }

    /// Whether the device has failed, and all was done to make it leave memory alone: its consumers
    /// can be given back what they had posted.
    pub(crate) fn is_stopped(&self) -> bool {
        self.reach.get() != Reach::Working
    }

    /// Gives up a device that refuses what it has no reason to refuse, as [`Self::fail_for`].
    pub(crate) fn fail(self: &Arc<Self>) {
        self.fail_for(Cause::Disagreement);
    }

    /// Gives the device up: commands fail from now on, consumers are told. May be called from any
    /// context.
    ///
    /// The device is stopped from a work item, and consumers of the kernel get their work requests
    /// back after that; whoever frees memory that the device knows makes sure before that it is
    /// stopped, with [`Hardware::ensure_stopped`].
    fn fail_for(self: &Arc<Self>, cause: Cause) {
        // First, as whoever sees that it is dead asks why. The first cause is the one that counts.
        let _ = self.cause.cmpxchg(0, cause.number(), Relaxed);
        if !self.cqp.kill() {
            return;
        }
        self.log().change(Change::Failed(cause));
        match cause {
            Cause::Renewal => dev_info!(
                self.pdev,
                "device begins anew, its users are told to let go\n"
            ),
            Cause::Sleep => dev_info!(
                self.pdev,
                "device is put to sleep, its users are told to let go\n"
            ),
            Cause::Shutdown => dev_info!(
                self.pdev,
                "device is stopped for good, its users are told to let go\n"
            ),
            _ => dev_err!(self.pdev, "device failed, its users are told to let go\n"),
        }
        self.recovery.reach(|| self.registers.request_reset());
        self.tell_carrier();
        self.sink.raise(device_event::FATAL);
        // It was never queued before: this is the first failure.
        drop(self.failure_work.enqueue::<_, 0>(self.clone()));
        self.recovery.wake();
    }

    /// What happens to it.
    fn log(&self) -> &EventLog {
        self.recovery.log()
    }

    /// Lets kernel consumers look: they find their work requests flushed when they poll.
    fn notify_all(&self) {
        let mut next = self.cqs.next_index(0);
        while let Some(index) = next {
            if let Some(cq) = self.cqs.get(index).filter(|cq| !cq.is_user()) {
                FerriteCq::notify(&cq);
            }
            next = self.cqs.next_index(index + 1);
        }
        // Those who drain a queue pair with a shared receive queue wait for its last receive.
        let mut next = self.qps.next_index(0);
        while let Some(index) = next {
            if let Some(qp) = self.qps.get(index) {
                FerriteQp::stopped(&qp);
            }
            next = self.qps.next_index(index + 1);
        }
    }

    /// What consumers in the kernel do with the queue pairs that they have.
    pub(crate) fn consumers(&self) -> Consumers {
        let mut consumers = Consumers::default();
        let mut next = self.qps.next_index(0);
        while let Some(index) = next {
            let of_the_core = |qp: &QpRef<Ferrite>| qp.qp_type() == Some(QpType::Gsi);
            let qp = self.qps.get(index);
            if let Some(qp) = qp.filter(|qp| !qp.is_user() && !of_the_core(qp)) {
                consumers.add(qp.state());
            }
            next = self.qps.next_index(index + 1);
        }
        consumers
    }

    /// Has management packets refused that are posted to a device that failed. Until then they are taken and
    /// flushed, which the core takes for sent: it tries again when the answer does not come, for more than a
    /// minute, and who disconnects waits for as long. One that is refused when it is tried again ends that.
    ///
    /// Not while somebody may post the first one of a connection: where that is refused the core does not tell
    /// its user that the connection has ended, and there are users that wait for it.
    pub(crate) fn refuse_management(&self) {
        self.management_over.store(1, Relaxed);
    }

    /// Whether they are.
    pub(crate) fn refuses_management(&self) -> bool {
        self.management_over.load(Relaxed) != 0
    }

    /// Makes sure that a device that failed leaves host memory alone, if there is a way; else what it was
    /// told of is never freed ([`crate::lent::Lent`]). Sleeps, but allocates nothing: memory management
    /// may wait for this, and what takes more than the device's own register is left to the work
    /// item that [`Self::fail_for`] queues, and to [`Self::stop`].
    fn ensure_stopped(&self) {
        let stopped =
            self.stopper
                .stop_or_wait(|| self.claim(), OTHERS_RESET_POLL, OTHERS_RESET_TIMEOUT);
        self.explain(stopped);
    }

    /// The same by all means that there are. Sleeps, and is not for who takes memory back.
    fn stop_by_all_means(&self) {
        let stopped = self
            .stopper
            .stop(|| self.claim(), OTHERS_RESET_POLL, OTHERS_RESET_TIMEOUT);
        self.explain(stopped);
    }

    /// Gets hold of the device to stop it, unless somebody else resets it, or the bus is frozen.
    ///
    /// Somebody else's reset makes registers read as if the device were gone, and gives it the bus back
    /// that was taken from it: it is over before ours begins, or begins afterwards. It is not waited for
    /// where it stops the device at its beginning, and not for ever: who takes memory back here may be
    /// waited for by it.
    fn claim(&self) -> Option<Stopping<'_>> {
        self.recovery.reach(|| {
            let config = ConfigLock::try_new(&self.pdev)?;
            // The interrupt cannot, as long as config space is locked: a device that hangs may hold its line.
            config.enable_pin(false);
            Some(Stopping { hw: self, config })
        })?
    }

    /// Says why the device cannot be stopped, if that is what was found.
    fn explain(&self, stopped: Result) {
        if let Err(error) = stopped {
            let why = if error == ETIMEDOUT {
                "timed out as others have it"
            } else {
                "no reset works"
            };
            dev_err!(
                self.pdev,
                "device cannot be stopped ({}): memory that it was told of is not freed\n",
                why
            );
        }
    }

    /// Has the device answer a command that does nothing, and gives it up where it does not: it may have stopped
    /// with no way to say so, as where the queue of its last event is what failed, or be gone. Registers are not
    /// read unless it does not answer, and nothing waits for this. Sleeps.
    pub(crate) fn check_health(self: &Arc<Self>) {
        let manner = Manner {
            class: Class::Short,
            patience: Patience::None,
            user: user::KERNEL,
        };
        // Where there is no room for it (`EAGAIN`) others wait for their answers, and find out.
        let _ = self.run(manner, CommandOpcode::Nop, &Nothing);
        // The device says once that a queue is out of room, and there may have been no memory then.
        if growth::is_due(self) {
            self.queue_growth();
        }
    }

    /// Has event queues grow that should.
    fn queue_growth(self: &Arc<Self>) {
        self.growth.queue(self);
    }

    /// Gives the device up if it is not there any more. Sleeps.
    pub(crate) fn check_presence(self: &Arc<Self>) {
        if !self.registers.is_present() {
            dev_err!(self.pdev, "device is gone\n");
            self.fail_for(Cause::Gone);
        }
    }

    /// Gives the device up, as somebody else is about to reset the function.
    pub(crate) fn fail_for_reset(self: &Arc<Self>) {
        if !self.is_dead() {
            dev_err!(self.pdev, "function is being reset by others\n");
        }
        self.fail_for(Cause::ResetByOthers);
    }

    /// Gives the device up, as the machine goes to sleep.
    pub(crate) fn fail_for_sleep(self: &Arc<Self>) {
        self.fail_for(Cause::Sleep);
    }

    /// Gives the device up for good, as the machine shuts down.
    pub(crate) fn fail_for_shutdown(self: &Arc<Self>) {
        self.fail_for(Cause::Shutdown);
    }

    /// Gives the device up, as an error of the bus was found.
    pub(crate) fn fail_for_bus_error(self: &Arc<Self>) {
        if !self.is_dead() {
            dev_err!(self.pdev, "there was an error of the bus\n");
        }
        self.fail_for(Cause::BusError);
    }

    /// Whether anybody has a queue pair, but for that of management, which the core has for as long as there is the
    /// device, or a work queue.
    pub(crate) fn is_in_use(&self) -> bool {
        self.qps.next_index(GSI_QPN as usize + 1).is_some() || !self.wqs.is_empty()
    }

    /// Gives up a device that works, as it is to begin anew: to its users that is a failure.
    pub(crate) fn fail_for_renewal(self: &Arc<Self>) {
        self.fail_for(Cause::Renewal);
    }

    /// Stops it then, by somebody who has config space locked. Sleeps.
    pub(crate) fn stop_for_reset(&self, config: &Config<'_>) {
        // As in `claim`.
        config.enable_pin(false);
        // Now, while the device can be asked: who takes memory back in the course of that reset
        // cannot wait for its end. Where this fails, `ensure_stopped` does. A device that seems gone
        // may be behind a bridge that was closed, and have the bus back when that is opened.
        self.stopper.stop_gently(|| self.reset());
    }

    /// Resets the device by its own register, and waits for that. Sleeps.
    fn reset(&self) -> Result {
        self.registers
            .reset()
            .inspect_err(|error| dev_err!(self.pdev, "reset failed: {:?}\n", error))
    }

    /// Stops the device for good. Sleeps.
    pub(crate) fn stop(&self) {
        if self.cqp.kill() {
            self.log().change(Change::Ended);
        }
        self.stop_by_all_means();
        self.note_reach();
    }

    /// Notes what became of it, once.
    fn note_reach(&self) {
        if self.is_reach_noted.xchg(1, Relaxed) != 0 {
            return;
        }
        self.log().change(match self.reach.get() {
            Reach::Unstoppable => Change::Unstoppable,
            Reach::Working | Reach::Stopped => Change::Stopped,
        });
    }

    /// Sees to it that nothing of this runs any more. To be called when nobody gives it commands, raises its
    /// interrupts, or tells it of a reset. Sleeps.
    pub(crate) fn retire(&self) {
        // Who finds it dead queues nothing.
        self.cqp.kill();
        self.flush();
    }

    /// Waits for what was queued. To be called when nothing is queued any more, as the last
    /// reference to this is not to be dropped by its own workers. Sleeps.
    pub(crate) fn flush(&self) {
        // In the order in which one queues another: a command that was not answered has the failure
        // queued.
        self.gid_work.flush();
        self.growth.flush();
        self.work.flush();
        self.failure_work.flush();
        self.events.flush();
    }

    /// Begins to take answers, for [`Self::dispatch`].
    #[inline]
    pub(crate) fn answers(&self) -> Answers<'_> {
        self.cqp.answers()
    }

    /// Acts on an event that came by event queue `eqn`; `answers` is what it may be among. Returns how many completions
    /// it stands for. Runs in the interrupt, or with interrupts off.
    #[inline]
    pub(crate) fn dispatch(
        self: &Arc<Self>,
        event: &EventEntry,
        answers: &Answers<'_>,
        eqn: u16,
    ) -> u32 {
        match EventCode::from_number(event.code) {
            Some(EventCode::Completion) => {
                let cq = self.cqs.get(event.id as usize);
                return cq.map_or(0, |cq| FerriteCq::notify(&cq));
            }
            Some(EventCode::CommandDone) => {
                if !Cqp::is_success(event) {
                    self.note_refusal(event, eqn);
                }
                match self.cqp.finished(event, answers) {
                    Some((PostedFor::Making, _, error)) => {
                        self.registration_failed(error);
                    }
                    Some((PostedFor::Release, number, error)) => {
                        self.release_failed(number, error);
                    }
                    None => {}
                }
            }
            Some(EventCode::ChannelPackets | EventCode::ChannelDescriptors) => {
                let told = self
                    .channels
                    .with(event.id as usize, |channel| channel.schedule());
                if told.is_some() {
                    return 1;
                }
                self.class_event(EventClass::Channel, event);
            }
            Some(code) => self.dispatch_rare(code, event, eqn),
            None => {
                self.note_event(event, eqn);
                kernel::do_once_lite! {
                    dev_warn!(self.pdev, "event {:#x} is not known\n", event.code)
                }
            }
        }
        0
    }

    /// Notes an event that is none of the data path. What a device says that failed drives out nothing of what it said
    /// before.
    #[cold]
    fn note_event(&self, event: &EventEntry, eqn: u16) {
        if !self.is_dead() {
            self.log().event(event, eqn);
        }
    }

    /// Notes the answer to a command that is no success.
    #[cold]
    fn note_refusal(&self, event: &EventEntry, eqn: u16) {
        match self.cqp.opcode_of(event) {
            Some(opcode) => self.log().refused(opcode, Cqp::status(event)),
            None => self.note_event(event, eqn),
        }
    }

    #[cold]
    fn dispatch_rare(self: &Arc<Self>, code: EventCode, event: &EventEntry, eqn: u16) {
        // There may be many, and they are a matter of one region.
        if code != EventCode::PageFaults {
            self.note_event(event, eqn);
        }
        match code {
            EventCode::CompletionQueueError => {
                if let Some(cq) = self.cqs.get(event.id as usize) {
                    cq.report_error();
                }
            }
            EventCode::QueuePairFatal => match self.wqs.get(event.id as usize) {
                Some(wq) => wq.report_fatal(),
                None => self.queue_pair_event(event.id, QpEvent::Fatal),
            },
            EventCode::QueuePairRequestError => {
                self.queue_pair_event(event.id, QpEvent::RequestError);
            }
            EventCode::QueuePairAccessError => {
                if let Some(qp) = self.qps.get(event.id as usize) {
                    FerriteQp::refused_access(&qp, event.param0);
                }
            }
            EventCode::CommunicationEstablished => {
                self.queue_pair_event(event.id, QpEvent::CommunicationEstablished);
            }
            EventCode::SendQueueDrained => {
                self.queue_pair_event(event.id, QpEvent::SendQueueDrained);
            }
            EventCode::LastWqeReached => {
                self.queue_pair_event(event.id, QpEvent::LastWqeReached);
            }
            EventCode::SrqLimit => {
                if let Some(srq) = self.srqs.get(event.id as usize) {
                    srq.report_limit();
                }
            }
            EventCode::SrqError => {
                if let Some(srq) = self.srqs.get(event.id as usize) {
                    srq.report_error();
                }
            }
            EventCode::PageFaults => self.sink.raise(device_event::PAGE_FAULTS),
            // There is one port, as far as the driver is concerned.
            EventCode::LinkChange if event.id != port::DEVICE_PORT.into() => {}
            EventCode::LinkChange => {
                let up = event.param0 != 0;
                if self.link_prints.allows(c"ferrite link") {
                    dev_info!(self.pdev, "link is {}\n", if up { "up" } else { "down" });
                }
                self.set_link(up);
                self.sink.raise(device_event::LINK);
            }
            EventCode::DeviceFatal => {
                let code = FatalCode::from_number(event.param0 as u8);
                // It may say so as often as it likes.
                if !self.is_dead() {
                    dev_err!(self.pdev, "device stopped: {:?}\n", code);
                }
                self.fail_for(Cause::Stopped(code));
            }
            EventCode::EventQueueOverflow => {
                // The device keeps the events back until there is room.
                let noted = self
                    .event_queues
                    .with(event.id as usize, |queue| queue.note_overflow());
                if noted.is_some() {
                    self.queue_growth();
                }
            }
            EventCode::ChannelBadBuffers => {
                let told = self.channels.with(event.id as usize, |channel| {
                    channel.refused(event.param0, event.param1);
                });
                if told.is_none() {
                    self.class_event(EventClass::Channel, event);
                }
            }
            _ => match EventClass::of(code) {
                Some(class) => self.class_event(class, event),
                None if self.stray_prints.allows(c"ferrite events") => {
                    dev_warn!(self.pdev, "event {:?} was not asked for\n", code);
                }
                None => {}
            },
        }
    }

    /// Tells of a registration that failed after its key was given out, if not too often: who has the key learns it
    /// when he uses it. It is not said which: the key is nobody's but its owner's, and the log may be everybody's.
    #[cold]
    fn registration_failed(self: &Arc<Self>, error: Error) {
        if self.registration_prints.allows(c"ferrite registrations") {
            dev_warn!(
                self.pdev,
                "a registration failed after its key was given out: {:?}\n",
                error
            );
        }
        if is_disagreement(error) {
            // To release the tag would end what the device has under that number.
            self.fail();
        }
    }

    /// A device does not let go of a tag whose memory it was seen not to use: it is given up.
    #[cold]
    fn release_failed(self: &Arc<Self>, number: u32, error: Error) {
        // That there is no such tag is no answer either: one whose registration failed is there until it is released.
        // Its index may be said: all keys end with the life of the device, and no other life has them.
        let index = Tag(number).index();
        dev_err!(
            self.pdev,
            "release of tag index {:#x} failed: {:?}\n",
            index,
            error
        );
        self.fail();
    }

    /// Counts an event that is about no queue, and prints what it says, if not too often.
    fn class_event(&self, class: EventClass, event: &EventEntry) {
        let description = Description(class, event);
        self.event_counts.count(class, description.number());
        if !description.is_printed() || !self.class_prints.allows(c"ferrite classes") {
            return;
        }
        if description.is_error() {
            dev_err!(self.pdev, "{}\n", description);
        } else {
            dev_info!(self.pdev, "{}\n", description);
        }
    }

    /// Passes an event on to a queue pair's consumer.
    fn queue_pair_event(&self, number: u32, event: QpEvent) {
        if let Some(qp) = self.qps.get(number as usize) {
            FerriteQp::raise(&qp, event);
        }
    }
}

impl Failure for Arc<Hardware> {
    fn is_dead(&self) -> bool {
        Hardware::is_dead(self)
    }

    fn give_up(&self, cause: Cause) {
        self.fail_for(cause);
    }

    fn ensure_stopped(&self) {
        Hardware::ensure_stopped(self);
    }
}

impl TakesEvents for Arc<Hardware> {
    fn take(&self, event: &EventEntry, answers: &Answers<'_>) {
        self.dispatch(event, answers, abi::EQ_CONTROL);
    }
}

impl WorkItem for Hardware {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.stop_by_all_means();
        this.note_reach();
        this.notify_all();
    }
}

/// Event queues are out of room.
impl BoundWorkItem for Hardware {
    fn run(this: Arc<Self>, dev: &Device<Bound>) {
        growth::grow(&this, dev);
    }
}

/// A device that is being stopped, and is reset by nobody else meanwhile.
struct Stopping<'a> {
    hw: &'a Hardware,
    config: ConfigLock<'a>,
}

impl Stop for Stopping<'_> {
    fn reset(&self) -> Result {
        self.hw.reset()
    }

    fn presence(&self) -> Result {
        self.hw.registers.presence()
    }

    fn clear_bus_master(&self) {
        self.config.clear_master();
    }

    fn reset_function(&self) -> Result {
        self.config
            .reset_function()
            .inspect_err(|error| dev_err!(self.hw.pdev, "function reset failed: {:?}\n", error))
    }
}

#[kunit_tests(ferrite_hardware)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_what_it_was_noted_as() {
        for cause in [
            Cause::Stopped(None),
            Cause::Stopped(Some(FatalCode::BadBootBlock)),
            Cause::Stopped(Some(FatalCode::Injected)),
            Cause::Silent,
            Cause::Gone,
            Cause::ResetByOthers,
            Cause::Disagreement,
            Cause::Renewal,
            Cause::Sleep,
            Cause::Shutdown,
            Cause::BusError,
        ] {
            assert_eq!(Cause::from_number(cause.number()), Some(cause));
        }
        assert_eq!(Cause::from_number(0), None);
    }
}
