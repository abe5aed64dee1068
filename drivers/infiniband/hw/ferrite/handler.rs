// SPDX-License-Identifier: GPL-2.0

//! Interrupts: which event queue is served on which vector and processor, and the completion
//! handlers that completion queues are spread over.

use crate::{
    abi,
    abi::{
        CommandOpcode,
        DeviceCaps,
        EventPriority, //
    },
    commands::DeviceObject,
    eq::EventQueue,
    growth,
    hardware::Hardware,
    kernel_ext::{
        cpu,
        cpu_hotplug::Following,
        errno,
        irq::{
            Handler,
            IrqHandler,
            Kind,
            Vectors, //
        },
    },
    service,
    service::Served,
    steering,
    steering::Steering,
    vector_map::{
        Destination,
        Layout,
        VectorTable,
        VectorTableInDevice,
        PARTS, //
    },
};
use core::ops::RangeInclusive;
use kernel::{
    alloc::{
        flags::__GFP_NOWARN,
        Flags, //
    },
    cpu::CpuId,
    cpumask::Cpumask,
    device::{
        Bound,
        Device, //
    },
    devres::Devres,
    fmt,
    irq,
    irq::IrqReturn,
    new_mutex,
    pci,
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    }, //
};

/// Base-2 logarithms of the fewest entries of an event queue, of the most of the asynchronous one
/// (512 KiB), and of the most of a completion handler's (128 KiB).
const LEAST_LOG_ENTRIES: u8 = 8;
const MOST_ASYNC_LOG_ENTRIES: u8 = 14;
const MOST_HANDLER_LOG_ENTRIES: u8 = 12;
const _: () = assert!(
    abi::EQ_MIN_LOG_ENTRIES <= LEAST_LOG_ENTRIES
        && MOST_ASYNC_LOG_ENTRIES <= abi::EQ_MAX_LOG_ENTRIES
);

/// Base-2 logarithm of the entries of event queue `eqn`, by what can be raised there: an event of
/// each queue pair, or a completion of each completion queue.
///
/// Where there is more than fits, the device keeps it back, which loses nothing and costs time.
fn log_entries_of(eqn: u16, caps: &DeviceCaps) -> u8 {
    let (sources, most) = if eqn < abi::EQ_FIRST_HANDLER {
        (caps.qp_count, MOST_ASYNC_LOG_ENTRIES)
    } else {
        (caps.cq_count, MOST_HANDLER_LOG_ENTRIES)
    };
    // The bound comes first: the device may say anything.
    let entries = sources.min(1 << most).next_power_of_two();
    (entries.trailing_zeros() as u8)
        .max(LEAST_LOG_ENTRIES)
        .min(caps.eq_max_log_entries.max(abi::EQ_MIN_LOG_ENTRIES))
}

/// How many messages a device may have to interrupt by.
const MESSAGES: RangeInclusive<u32> = 1..=abi::MAX_MESSAGES as u32;

/// Calls of a handler on a pin in a row that may find nothing, before the pin is taken for held by
/// a queue that should not.
const IDLE_CALLS: u32 = 16;

/// How often in a row a handler on a pin was called and found nothing.
struct Idle(u32);

impl Idle {
    /// A call found something, or not; returns which of `queues` is to be armed anew, if any.
    ///
    /// A queue that is empty and armed has not raised the pin (DRV-1-6), and most calls that find
    /// nothing are for others on the line. But a device may fail with no room for its last event, and
    /// a host that only takes an access for the end of the interrupt may be told of it after the
    /// access: then nothing but a doorbell makes the level fall. One now and then costs little and is
    /// no register read. Queues take turns, so that it costs others on the line no more where there
    /// are many; all had theirs long before the kernel gives a line up, after 100000 calls.
    fn note(&mut self, found: bool, queues: usize) -> Option<usize> {
        self.0 = if found { 0 } else { self.0.wrapping_add(1) };
        if self.0 == 0 || self.0 % IDLE_CALLS != 0 {
            return None;
        }
        Some((self.0 / IDLE_CALLS - 1) as usize % queues.max(1))
    }
}

/// What runs on one vector: the service of its event queues.
struct Service {
    hw: Arc<Hardware>,
    vectors: Arc<Vectors>,
    vector: u16,
    queues: KVec<Served>,
    /// The event queues of all completion handlers.
    handlers: Arc<KVec<Arc<EventQueue>>>,
    /// Who wants to know where it is steered to and arrives, once there is somebody.
    steering: Option<Arc<Steering>>,
    /// Whether one of the queues is of completions: else nobody follows it.
    has_completions: bool,
    /// The processor of its last interrupt.
    processor: Atomic<u32>,
    /// [`Idle`] of the pin. Only the handler uses it, which does not run twice at a time.
    idle: Atomic<u32>,
    unhandled: Arc<Atomic<u64>>,
}

impl Service {
    /// Notes the processor that an interrupt arrives at. Where it is not the one of the last time, completion
    /// queues may have to follow: of an interrupt that is steered to several processors the kernel does not say which
    /// it has chosen, nor when it chooses another one as that goes offline.
    #[inline]
    fn note_processor(&self) {
        let cpu = CpuId::current().as_u32();
        if self.processor.load(Relaxed) != cpu {
            self.processor.store(cpu, Relaxed);
            if let Some(steering) = self.steering.as_ref().filter(|_| self.has_completions) {
                steering.settle_queues();
            }
        }
    }

    /// Serves the queues where some of the device are of low latency: those that another vector has, but
    /// whose interrupts arrive at this processor too, come first as well. Their own interrupt waits until
    /// this one ends.
    #[cold]
    fn serve_by_priority(&self) -> bool {
        let cpu = CpuId::current().as_u32();
        for served in self.queues.iter() {
            served.queue().note_processor(cpu);
        }
        let serves = |queue: &EventQueue| {
            let mut queues = self.queues.iter();
            queues.any(|served| served.queue().number() == queue.number())
        };
        let elsewhere = || {
            self.handlers.iter().filter(move |queue| {
                queue.is_low_latency() && queue.is_served_at(cpu) && !serves(queue)
            })
        };
        if elsewhere().next().is_none() {
            return service::serve(&self.queues, None::<fn(u32) -> u32>);
        }
        service::serve(
            &self.queues,
            Some(|most| {
                service::share(elsewhere(), most, |queue, most| {
                    let answers = self.hw.answers();
                    let handled = queue.turn(most, move |event| {
                        self.hw.dispatch(event, &answers);
                    });
                    queue.end_turns(&self.hw.doorbells, handled);
                    handled
                })
            }),
        )
    }

    /// Calls on a pin: the line may be somebody else's interrupt.
    fn handle_pin(&self, found: bool) -> IrqReturn {
        let mut idle = Idle(self.idle.load(Relaxed));
        let turn = idle.note(found, self.queues.len());
        self.idle.store(idle.0, Relaxed);
        if self.hw.is_dead() {
            // It may ignore doorbells, too, and nothing it has to tell matters. Who stops it or resets it does the
            // same first.
            if found || turn.is_some() {
                self.vectors.disable_pin();
            }
        } else if let Some(served) = turn.and_then(|turn| self.queues.get(turn)) {
            served.queue().arm(&self.hw.doorbells);
        }
        if found {
            IrqReturn::Handled
        } else {
            self.unhandled
                .store(self.unhandled.load(Relaxed) + 1, Relaxed);
            IrqReturn::None
        }
    }
}

impl irq::Handler for Service {
    fn handle(&self, _dev: &Device<Bound>) -> IrqReturn {
        self.note_processor();
        let found = if self.hw.has_low_latency() {
            self.serve_by_priority()
        } else {
            service::serve(&self.queues, None::<fn(u32) -> u32>)
        };
        match self.vectors.kind() {
            Kind::Intx => self.handle_pin(found),
            // Message-signalled interrupts are ours alone. One that finds nothing was overtaken by
            // the service of a queue that shares the vector.
            Kind::Msi | Kind::MsiX => IrqReturn::Handled,
        }
    }
}

impl Handler for Service {
    fn steered(&self, mask: &Cpumask) {
        if let Some(steering) = &self.steering {
            steering.steered(self.vector, mask);
        }
    }
}

/// What a vector is there for, as it is shown to people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// All there is, where there are not enough to tell them apart.
    Everything,
    /// Commands and the device as a whole.
    Control,
    /// Asynchronous events.
    Async,
    /// Completions, of which vector among those.
    Completions(u16),
}

impl Purpose {
    /// Of one of so many vectors.
    fn new(vector: u16, vectors: u16) -> Self {
        match vector {
            _ if vectors <= abi::EQ_FIRST_HANDLER => Self::Everything,
            abi::EQ_CONTROL => Self::Control,
            abi::EQ_ASYNC => Self::Async,
            _ => Self::Completions(vector - abi::EQ_FIRST_HANDLER),
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("ferrite"),
            Self::Control => f.write_str("ferrite-control"),
            Self::Async => f.write_str("ferrite-async"),
            Self::Completions(number) => write!(f, "ferrite-comp{number}"),
        }
    }
}

/// The interrupts of a device: its event queues' memory, vectors and installed handlers.
///
/// Nothing is steered any more when handlers are removed, and those are before vectors are given back and
/// rings are freed: fields are dropped in order. What handlers have queued has run by then.
pub(crate) struct Interrupts {
    following: Option<Devres<Following<Steering>>>,
    steering: Option<Arc<Steering>>,
    services: KVec<Devres<IrqHandler<Service>>>,
    vectors: Arc<Vectors>,
    queues: KVec<Arc<EventQueue>>,
    layout: Layout,
    /// Which queue interrupts by which vector, once there is more than queue 0.
    table: Option<Arc<VectorTable>>,
    /// Calls of the handler on a pin that were not ours.
    unhandled: Arc<Atomic<u64>>,
    hw: Arc<Hardware>,
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.following = None;
        self.services.clear();
        for queue in &self.queues {
            drop(self.hw.event_queues.remove(queue.number().into()));
        }
        // Not earlier: a handler that finds that the device failed, or that a queue is out of room,
        // queues work, and so does who steers.
        self.hw.flush();
    }
}

impl Interrupts {
    /// Allocates vectors, and serves event queue 0: it is all that there is until the device has
    /// said what it can do.
    pub(crate) fn new(
        pdev: &pci::Device<Bound>,
        hw: &Arc<Hardware>,
        messages: u32,
        layout: Layout,
    ) -> Result<Self> {
        if !MESSAGES.contains(&messages) {
            dev_err!(pdev, "device has {} messages to interrupt by\n", messages);
            return Err(EINVAL);
        }
        // A message is raised as the vector of its number, so that there are no more vectors.
        let wanted = layout.vectors(cpu::present()).min(messages);
        let vectors = Vectors::new(pdev, wanted, layout.wants_pin())?;
        if layout.wants_pin() && vectors.kind() != Kind::Intx {
            dev_warn!(pdev, "no interrupt pin, one message serves instead\n");
        }
        let mut queues = KVec::new();
        queues.push(hw.cqp.events().clone(), GFP_KERNEL)?;
        let mut this = Self {
            following: None,
            steering: None,
            services: KVec::new(),
            vectors: Arc::new(vectors, GFP_KERNEL)?,
            queues,
            layout,
            table: None,
            unhandled: Arc::new(Atomic::new(0), GFP_KERNEL)?,
            hw: hw.clone(),
        };
        this.install(pdev, hw)?;
        Ok(this)
    }

    /// Makes the other event queues: the asynchronous one, and those of completion handlers. The
    /// device knows none of them yet, and agreed on `features`.
    pub(crate) fn complete(
        &mut self,
        pdev: &pci::Device<Bound>,
        hw: &Arc<Hardware>,
        features: u64,
        caps: &DeviceCaps,
    ) -> Result {
        let vectors = self.vectors.len() as u16;
        let has_table = features & abi::FEATURE_VECTOR_MAP != 0;
        let processors = cpu::present();
        let room = queue_room(caps, self.layout);
        let table = VectorTable::new(self.layout, has_table, processors, room, vectors)?;
        let wanted = abi::EQ_FIRST_HANDLER + table.queues();
        dev_info!(
            pdev,
            "{} event queues, {} vectors of {}\n",
            wanted,
            vectors,
            self.vectors.kind().name()
        );
        let table = Arc::new(table, GFP_KERNEL)?;
        self.table = Some(table.clone());
        for eqn in abi::EQ_ASYNC..wanted {
            let vector = table.vector_of_queue(eqn);
            let log_entries = growth::first_log_entries(log_entries_of(eqn, caps));
            let queue = make_queue(pdev, hw, eqn, vector, log_entries)?;
            self.queues.push(queue, GFP_KERNEL)?;
        }
        for queue in &self.queues {
            queue.may_grow(growth::most_log_entries(features, caps));
            hw.event_queues
                .insert(queue.number().into(), queue.clone())?;
        }
        let steering = Steering::new(hw, &self.vectors, &table)?;
        self.steering = Some(steering.clone());
        // Queues that share a vector with queue 0 are served by its handler, which is made anew.
        self.services.clear();
        self.install(pdev, hw)?;
        // What came while there was no handler raises an interrupt now.
        hw.cqp.events().arm(&hw.doorbells);
        // Where an interrupt arrives is a matter of speed only.
        match Following::start(pdev.as_ref(), &steering::HOTPLUG, steering.clone()) {
            Ok(following) => self.following = Some(following),
            Err(error) => dev_warn!(pdev, "processors are not followed: {:?}\n", error),
        }
        // After it is followed which come and go.
        steering.balance();
        Ok(())
    }

    /// Installs a handler on each vector, for the queues that there are.
    fn install(&mut self, pdev: &pci::Device<Bound>, hw: &Arc<Hardware>) -> Result {
        let vectors = self.vectors.len() as u16;
        let mut handlers = KVec::with_capacity(self.queues.len(), GFP_KERNEL)?;
        for queue in self.queues.iter().skip(abi::EQ_FIRST_HANDLER.into()) {
            handlers.push(queue.clone(), GFP_KERNEL)?;
        }
        let handlers = Arc::new(handlers, GFP_KERNEL)?;
        let mut first = KVec::with_capacity(self.queues.len(), GFP_KERNEL)?;
        for queue in &self.queues {
            first.push(Served::new(hw, queue)?, GFP_KERNEL)?;
        }
        let by_vector = match &self.table {
            Some(table) => Some(table.served_by_vector()?),
            None => None,
        };
        for vector in 0..vectors {
            let eqns: &[u16] = match &by_vector {
                Some(by_vector) => by_vector.get(usize::from(vector)).ok_or(EINVAL)?,
                // There is queue 0 alone.
                None if vector == hw.cqp.events().message() => &[abi::EQ_CONTROL],
                None => &[],
            };
            if eqns.is_empty() {
                continue;
            }
            let mut served = KVec::with_capacity(eqns.len(), GFP_KERNEL)?;
            for eqn in eqns {
                let first = first.get(usize::from(*eqn)).ok_or(EINVAL)?;
                served.push(first.by_another_vector(), GFP_KERNEL)?;
            }
            let service = Service {
                hw: hw.clone(),
                vectors: self.vectors.clone(),
                vector,
                queues: served,
                handlers: handlers.clone(),
                steering: self.steering.clone(),
                has_completions: eqns.iter().any(|eqn| *eqn >= abi::EQ_FIRST_HANDLER),
                processor: Atomic::new(u32::MAX),
                idle: Atomic::new(0),
                unhandled: self.unhandled.clone(),
            };
            let device: &Device<Bound> = pdev.as_ref();
            let name = CString::try_from_fmt(fmt!(
                "{}@pci:{}",
                Purpose::new(vector, vectors),
                device.name()
            ))?;
            let handler =
                IrqHandler::install(pdev, &self.vectors, vector.into(), name, Ok(service))?;
            self.services.push(handler, GFP_KERNEL)?;
        }
        Ok(())
    }

    /// Where events of completion queues go. `ENXIO` before [`Self::complete`].
    pub(crate) fn table(&self) -> Result<&Arc<VectorTable>> {
        self.table.as_ref().ok_or(ENXIO)
    }

    /// The Linux interrupt number of a vector.
    pub(crate) fn irq(&self, vector: u16) -> Result<u32> {
        self.vectors.irq(vector.into())
    }

    /// Who steers the vectors. `ENXIO` before [`Self::complete`].
    pub(crate) fn steering(&self) -> Result<&Arc<Steering>> {
        self.steering.as_ref().ok_or(ENXIO)
    }

    /// What the device interrupts by, and how many vectors there are of it.
    pub(crate) fn kind(&self) -> (Kind, u32) {
        (self.vectors.kind(), self.vectors.len())
    }

    /// Counts the calls of the handler on a pin that were not for this device.
    pub(crate) fn unhandled(&self) -> Arc<Atomic<u64>> {
        self.unhandled.clone()
    }

    /// All event queues, by number.
    pub(crate) fn queues(&self) -> &[Arc<EventQueue>] {
        &self.queues
    }
}

/// How many event queues a device has for completions: those beyond the two fixed ones, with a message each where
/// they do not share one in any case.
fn queue_room(caps: &DeviceCaps, layout: Layout) -> u32 {
    let others = caps.max_eq.saturating_sub(abi::EQ_FIRST_HANDLER).into();
    if layout.has_one_vector() {
        others
    } else {
        caps.handlers.min(others)
    }
}

/// Makes the largest thing of up to `1 << log_entries` that there is memory for in one piece, by
/// `make`, which is given how large and how to allocate. The kernel complains only where even the
/// smallest is too large.
fn make_largest<T>(log_entries: u8, mut make: impl FnMut(u8, Flags) -> Result<T>) -> Result<T> {
    for larger in (LEAST_LOG_ENTRIES + 1..=log_entries).rev() {
        match make(larger, GFP_KERNEL | __GFP_NOWARN) {
            Err(error) if error == ENOMEM => {}
            made => return made,
        }
    }
    make(log_entries.min(LEAST_LOG_ENTRIES), GFP_KERNEL)
}

/// Makes an event queue of `1 << log_entries`, or of fewer where there is no memory in one piece.
fn make_queue(
    pdev: &pci::Device<Bound>,
    hw: &Arc<Hardware>,
    eqn: u16,
    message: u16,
    log_entries: u8,
) -> Result<Arc<EventQueue>> {
    make_largest(log_entries, |log_entries, flags| {
        let queue = EventQueue::new(pdev.as_ref(), &hw.reach, eqn, message, log_entries, flags);
        Arc::pin_init(queue, GFP_KERNEL)
    })
}

/// An event queue that the device knows and that is armed.
struct ActiveQueue {
    queue: Arc<EventQueue>,
    _object: DeviceObject,
}

/// The event queues made by command: the asynchronous one and the completion handlers'.
///
/// A handler is a column of the table that says where events go, and has the number of a completion vector.
/// Several can share an event queue, and one can have several: [`Self::destination`] is what the device is told.
///
/// The device is told when the last reference goes, and has to be there: only what is gone by then has one.
#[pin_data]
pub(crate) struct Handlers {
    /// Gone before the queues are.
    _told: VectorTableInDevice,
    table: Arc<VectorTable>,
    queues: KVec<ActiveQueue>,
    steering: Arc<Steering>,
    hw: Arc<Hardware>,
    /// Whether the device has priorities.
    has_priorities: bool,
    /// Held while a priority is set: handlers share event queues, and who takes back what he has set of one does not
    /// take back what another has.
    #[pin]
    setting: Mutex<()>,
}

impl Handlers {
    /// Makes the queues known to the device, with which these `features` were agreed on, and arms them.
    pub(crate) fn start(
        hw: &Arc<Hardware>,
        interrupts: &Interrupts,
        features: u64,
    ) -> Result<Arc<Self>> {
        let queues = interrupts.queues();
        let mut active = KVec::with_capacity(queues.len(), GFP_KERNEL)?;
        for queue in queues.iter().skip(abi::EQ_ASYNC.into()) {
            let object = DeviceObject::create(
                hw,
                &queue.create_command(),
                CommandOpcode::DestroyEventQueue,
                queue.number().into(),
            )?;
            queue.arm(&hw.doorbells);
            active.push(
                ActiveQueue {
                    queue: queue.clone(),
                    _object: object,
                },
                GFP_KERNEL,
            )?;
        }
        let table = interrupts.table()?;
        if table.columns() == 0 {
            dev_err!(hw.pdev, "device has no event queue for completions\n");
            return Err(ENOSPC);
        }
        let steering = interrupts.steering()?;
        let init = try_pin_init!(Self {
            _told: VectorTableInDevice::new(hw, table)?,
            table: table.clone(),
            queues: active,
            steering: steering.clone(),
            hw: hw.clone(),
            has_priorities: features & abi::FEATURE_EQ_CONTROL != 0,
            setting <- new_mutex!((), "ferrite_priorities"),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// How many completion handlers there are.
    pub(crate) fn count(&self) -> u32 {
        self.table.columns().into()
    }

    /// What the device is told of a completion queue at a handler, or at none.
    pub(crate) fn destination(&self, handler: Option<u16>) -> Destination {
        match handler {
            Some(handler) => self.table.destination(handler),
            None => Destination::NONE,
        }
    }

    /// The event queue that a handler is known by.
    pub(crate) fn main_queue(&self, handler: u16) -> u16 {
        self.table.main(handler).0
    }

    /// How long interrupts of the event queue that a handler is known by are put off, in microseconds, and how many events
    /// are too many for that.
    pub(crate) fn moderation(&self, handler: u16) -> Result<(u16, u16)> {
        let settings = self.queue(self.main_queue(handler))?.settings();
        Ok((settings.moderation_microseconds, settings.moderation_count))
    }

    /// Sets that. Sleeps.
    pub(crate) fn set_moderation(&self, handler: u16, microseconds: u16, count: u16) -> Result {
        self.queue(self.main_queue(handler))?.modify(
            |settings| {
                settings.moderation_microseconds = microseconds;
                settings.moderation_count = count;
            },
            |command| self.hw.execute(command),
        )
    }

    /// Whether a handler has events in event queue `eqn`.
    pub(crate) fn uses(&self, handler: u16, eqn: u16) -> bool {
        self.table.uses(handler, eqn)
    }

    /// The handler that somebody asks for, for a completion queue that is at the `current` one; `None` for none.
    /// `may` tells whether he may have one of low latency. `EINVAL` where there is no such handler, `EPERM` where he
    /// names one that he may not have. Sleeps.
    pub(crate) fn choose(
        &self,
        choice: Choice,
        current: Option<u16>,
        may: impl Fn() -> bool,
    ) -> Result<Option<u16>> {
        let current = current.map(u32::from);
        let is_bulk = |vector| !self.is_low_latency(vector);
        let vector = self.steering.with(|arrives| {
            let arrives = |vector, cpu| {
                let (_, message) = self.table.main(vector as u16);
                arrives(message, cpu)
            };
            choose(choice, self.count(), current, is_bulk, may, arrives)
        })?;
        Ok(vector.map(|vector| vector as u16))
    }

    /// The handler where a completion queue belongs that is at the `current` one, if it is at one, and that follows
    /// processor `follows`, if it does. `may` tells whether it may be at one of low latency. Sleeps.
    pub(crate) fn settle(
        &self,
        current: Option<u16>,
        follows: Option<CpuId>,
        may: bool,
    ) -> Result<Option<u16>> {
        let choice = Choice::to_settle(current.map(u32::from), follows);
        self.choose(choice, current, || may)
    }

    /// The event queue of that number.
    fn queue(&self, eqn: u16) -> Result<&Arc<EventQueue>> {
        // They are in order, and begin with the asynchronous one.
        let at = eqn.checked_sub(abi::EQ_ASYNC).ok_or(EINVAL)?;
        let active = self.queues.get(usize::from(at)).ok_or(EINVAL)?;
        Ok(&active.queue)
    }

    /// Whether any of the event queues of the handler of completion vector `vector` is of low latency: the queue
    /// pair of a completion queue there comes before others by each of them.
    fn is_low_latency(&self, vector: u32) -> bool {
        let mut eqns = self.table.queues_of(vector as u16).into_iter();
        eqns.any(|eqn| self.queue(eqn).is_ok_and(|queue| queue.is_low_latency()))
    }

    /// The priority of the handler of completion vector `vector`: `EINVAL` where there is none.
    pub(crate) fn priority(&self, vector: u32) -> Result<EventPriority> {
        if vector >= self.count() {
            return Err(EINVAL);
        }
        Ok(if self.is_low_latency(vector) {
            EventPriority::LowLatency
        } else {
            EventPriority::Bulk
        })
    }

    /// Sets it, and has completion queues settle: one that may not be at a handler of low latency leaves.
    /// `EOPNOTSUPP` where the device has no priorities. Sleeps.
    pub(crate) fn set_priority(&self, vector: u32, priority: EventPriority) -> Result {
        if !self.has_priorities {
            return Err(errno::eopnotsupp());
        }
        if vector >= self.count() {
            return Err(EINVAL);
        }
        let eqns = self.table.queues_of(vector as u16);
        let set = {
            let _setting = self.setting.lock();
            set_priorities(
                eqns,
                priority,
                |eqn| Ok(self.queue(eqn)?.settings().priority),
                |eqn, priority| self.hw.set_priority(self.queue(eqn)?, priority),
            )
        };
        // After it is set, and also where it was not: who chooses from now on sees it, and who chose before is looked at.
        self.steering.settle_queues();
        set
    }
}

/// Makes all event queues `eqns` of a handler of that priority by `set`, or none: what was done is undone where
/// one is refused. `get` gives what they are before.
fn set_priorities(
    eqns: [u16; PARTS.len()],
    priority: EventPriority,
    get: impl Fn(u16) -> Result<EventPriority>,
    mut set: impl FnMut(u16, EventPriority) -> Result,
) -> Result {
    let mut before = [priority; PARTS.len()];
    for (before, eqn) in before.iter_mut().zip(eqns) {
        *before = get(eqn)?;
    }
    for (done, eqn) in eqns.into_iter().enumerate() {
        if let Err(error) = set(eqn, priority) {
            for (eqn, before) in eqns.into_iter().zip(before).take(done) {
                // A device that refuses this as well is as it says.
                let _ = set(eqn, before);
            }
            return Err(error);
        }
    }
    Ok(())
}

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
    fn to_settle(current: Option<u32>, follows: Option<CpuId>) -> Self {
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
fn choose(
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

#[kunit_tests(ferrite_handler)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    #[test]
    fn a_vector_is_named_after_what_it_is_for() -> Result {
        for (vector, vectors, name) in [
            (0, 1, c"ferrite"),
            (1, 2, c"ferrite"),
            (0, 3, c"ferrite-control"),
            (1, 3, c"ferrite-async"),
            (2, 3, c"ferrite-comp0"),
            (17, 18, c"ferrite-comp15"),
        ] {
            let purpose = Purpose::new(vector, vectors);
            let text = CString::try_from_fmt(fmt!("{purpose}"))?;
            assert_eq!(text.to_bytes(), name.to_bytes());
        }
        Ok(())
    }

    #[test]
    fn event_queues_hold_what_can_be_raised() {
        let with = |qp_count, cq_count| DeviceCaps {
            qp_count,
            cq_count,
            eq_max_log_entries: abi::EQ_MAX_LOG_ENTRIES,
            ..DeviceCaps::zeroed()
        };
        let caps = with(1 << 14, 1 << 14);
        assert_eq!(log_entries_of(abi::EQ_ASYNC, &caps), 14);
        assert_eq!(log_entries_of(abi::EQ_FIRST_HANDLER, &caps), 12);
        let caps = with(1000, 300);
        assert_eq!(log_entries_of(abi::EQ_ASYNC, &caps), 10);
        assert_eq!(log_entries_of(abi::EQ_FIRST_HANDLER, &caps), 9);
        let small = DeviceCaps {
            eq_max_log_entries: 7,
            ..with(1 << 14, 1 << 14)
        };
        assert_eq!(log_entries_of(abi::EQ_ASYNC, &small), 7);
        // Whatever the device says.
        for number in [0, 1, u32::MAX, 1 << 31, (1 << 31) + 1] {
            let caps = with(number, number);
            for eqn in [abi::EQ_ASYNC, abi::EQ_FIRST_HANDLER] {
                let log_entries = log_entries_of(eqn, &caps);
                assert!((LEAST_LOG_ENTRIES..=MOST_ASYNC_LOG_ENTRIES).contains(&log_entries));
            }
        }
    }

    #[test]
    fn a_queue_is_as_large_as_there_is_memory_for_and_nobody_complains() {
        let tried = core::cell::Cell::new(0);
        let tried = &tried;
        let make = |most: u8| {
            tried.set(0);
            move |log_entries: u8, flags: Flags| {
                tried.set(tried.get() + 1);
                // Only the last attempt is worth a warning.
                let no_warning = flags == GFP_KERNEL | __GFP_NOWARN;
                assert_eq!(no_warning, log_entries > LEAST_LOG_ENTRIES);
                if log_entries <= most {
                    Ok(log_entries)
                } else {
                    Err(ENOMEM)
                }
            }
        };
        for most in LEAST_LOG_ENTRIES..=MOST_ASYNC_LOG_ENTRIES {
            let made = make_largest(MOST_ASYNC_LOG_ENTRIES, &make(most));
            assert_eq!(made, Ok(most));
            assert_eq!(tried.get(), MOST_ASYNC_LOG_ENTRIES - most + 1);
        }
        assert_eq!(make_largest(10, &make(LEAST_LOG_ENTRIES - 1)), Err(ENOMEM));
        // Another error is none that a smaller one helps against.
        let mut tries = 0;
        let made = make_largest::<()>(10, |_, _| {
            tries += 1;
            Err(EIO)
        });
        assert_eq!((made, tries), (Err(EIO), 1));
        // What the device wants smaller is.
        assert_eq!(make_largest(5, &make(5)), Ok(5));
        assert_eq!(tried.get(), 1);
    }

    #[test]
    fn the_device_says_how_many_event_queues_there_is_room_for() -> Result {
        let with = |handlers, max_eq| DeviceCaps {
            handlers,
            max_eq,
            ..DeviceCaps::zeroed()
        };
        // With a message each, and where all share one.
        for (handlers, max_eq, [each, shared]) in [
            (64, 66, [64, 64]),
            (2, 66, [2, 64]),
            (64, 5, [3, 3]),
            (64, 0, [0, 0]),
        ] {
            let caps = with(handlers, max_eq);
            for (name, room) in [
                ("cpu/cpu", each),
                ("function-cpu/function", each),
                ("cpu/one", shared),
                ("function-cpu/intx", shared),
            ] {
                let layout = Layout::parse(name.as_bytes()).ok_or(EINVAL)?;
                assert_eq!(queue_room(&caps, layout), room);
            }
        }
        Ok(())
    }

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
    fn all_event_queues_of_a_handler_have_its_priority_or_none() {
        use EventPriority::{Bulk, LowLatency};
        // Of queues 2 to 4, of which one may be refused; gives what they are then.
        let with = |before: [EventPriority; 3], eqns, priority, refused: Option<u16>| {
            let queues = before.map(core::cell::Cell::new);
            let at = |eqn: u16| queues.get(usize::from(eqn) - 2).ok_or(EINVAL);
            let result = set_priorities(
                eqns,
                priority,
                |eqn| Ok(at(eqn)?.get()),
                |eqn, priority| {
                    if refused == Some(eqn) {
                        return Err(EIO);
                    }
                    at(eqn)?.set(priority);
                    Ok(())
                },
            );
            (result, queues.map(|queue| queue.get()))
        };
        let bulk = [Bulk; 3];
        let both = [LowLatency, Bulk, LowLatency];
        assert_eq!(with(bulk, [2, 4], LowLatency, None), (Ok(()), both));
        assert_eq!(with(both, [2, 4], Bulk, None), (Ok(()), bulk));
        for refused in [2, 4] {
            let found = with(bulk, [2, 4], LowLatency, Some(refused));
            assert_eq!(found, (Err(EIO), bulk));
        }
        // What another handler that shares it has made of it stays.
        let first = [LowLatency, Bulk, Bulk];
        let found = with(first, [2, 4], LowLatency, Some(4));
        assert_eq!(found, (Err(EIO), first));
        // Both parts have one.
        assert_eq!(with(bulk, [2, 2], LowLatency, None), (Ok(()), first));
        assert_eq!(with(bulk, [2, 5], LowLatency, None), (Err(EINVAL), bulk));
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
    fn a_pin_that_nothing_is_found_for_gets_its_doorbells_now_and_then() {
        let mut idle = Idle(0);
        for round in 0..7usize {
            for _ in 1..IDLE_CALLS {
                assert_eq!(idle.note(false, 3), None);
            }
            assert_eq!(idle.note(false, 3), Some(round % 3));
        }
        // Calls that find something are what there is a handler for.
        for _ in 0..100 * IDLE_CALLS {
            assert_eq!(idle.note(true, 3), None);
            assert_eq!(idle.note(false, 3), None);
        }
        // The count has no end, and a handler may have no queue.
        let mut idle = Idle(u32::MAX);
        assert_eq!(idle.note(false, 3), None);
        let mut idle = Idle(IDLE_CALLS - 1);
        assert_eq!(idle.note(false, 0), Some(0));
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
