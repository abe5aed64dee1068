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
    eq::EventQueue,
    growth,
    hardware::{
        DeviceObject,
        Hardware, //
    },
    kernel_ext::{
        cpu,
        irq::{
            Handler,
            IrqHandler,
            Kind,
            Vectors, //
        },
    },
    service,
    service::Served,
};
use core::ops::RangeInclusive;
use kernel::{
    alloc::{
        flags::__GFP_NOWARN,
        Flags, //
    },
    cpu::CpuId,
    device::Bound,
    irq::IrqReturn,
    pci,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
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

/// The vector of event queue `eqn` when there are `vectors`.
///
/// With enough of them each queue has its own; else handlers share, and last of all everything
/// shares one.
pub(crate) fn vector_of(eqn: u16, vectors: u16) -> u16 {
    let first = abi::EQ_FIRST_HANDLER;
    if eqn >= first && vectors > first {
        first + (eqn - first) % (vectors - first)
    } else {
        eqn % vectors.max(1)
    }
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
    /// [`Idle`] of the pin. Only the handler uses it, which does not run twice at a time.
    idle: Atomic<u32>,
    unhandled: Arc<Atomic<u64>>,
}

impl Service {
    /// Serves the queues where some of the device are of low latency: those that another vector has, but
    /// whose interrupts arrive at this processor too, come first as well. Their own interrupt waits until
    /// this one ends.
    #[cold]
    fn serve_by_priority(&self) -> bool {
        let cpu = CpuId::current().as_u32();
        for served in self.queues.iter() {
            served.queue().note_processor(cpu);
        }
        let vector = self.vector;
        let elsewhere = || {
            self.handlers.iter().filter(move |queue| {
                queue.message() != vector && queue.is_low_latency() && queue.is_served_at(cpu)
            })
        };
        if elsewhere().next().is_none() {
            return service::serve(&self.queues, None::<fn()>);
        }
        service::serve(
            &self.queues,
            Some(|| {
                for queue in elsewhere() {
                    let answers = self.hw.answers();
                    queue.service(&self.hw.doorbells, move |event| {
                        self.hw.dispatch(event, &answers);
                    });
                }
            }),
        )
    }

    /// Calls on a pin: the line may be somebody else's interrupt.
    fn handle_pin(&self, found: bool) -> IrqReturn {
        let mut idle = Idle(self.idle.load(Relaxed));
        let turn = idle.note(found, self.queues.len());
        self.idle.store(idle.0, Relaxed);
        if let Some(served) = turn.and_then(|turn| self.queues.get(turn)) {
            served.queue().arm(&self.hw.doorbells);
        }
        if (found || turn.is_some()) && self.hw.is_dead() {
            // It may ignore doorbells, too, and nothing it has to tell matters.
            self.vectors.enable_pin(false);
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

impl Handler for Service {
    fn handle(&self) -> IrqReturn {
        let found = if self.hw.has_low_latency() {
            self.serve_by_priority()
        } else {
            service::serve(&self.queues, None::<fn()>)
        };
        match self.vectors.kind() {
            Kind::Intx => self.handle_pin(found),
            // Message-signalled interrupts are ours alone. One that finds nothing was overtaken by
            // the service of a queue that shares the vector.
            Kind::Msi | Kind::MsiX => IrqReturn::Handled,
        }
    }
}

/// The interrupts of a device: its event queues' memory, vectors and installed handlers.
///
/// Handlers are removed before vectors are given back and rings are freed: fields are dropped in
/// order. What handlers have queued has run by then.
pub(crate) struct Interrupts {
    services: KVec<Pin<KBox<IrqHandler<Service>>>>,
    vectors: Arc<Vectors>,
    queues: KVec<Arc<EventQueue>>,
    /// Calls of the handler on a pin that were not ours.
    unhandled: Arc<Atomic<u64>>,
    hw: Arc<Hardware>,
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.services.clear();
        for queue in &self.queues {
            drop(self.hw.event_queues.remove(queue.number().into()));
        }
        // Not earlier: a handler that finds that the device failed, or that a queue is out of room,
        // queues work.
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
    ) -> Result<Self> {
        if !MESSAGES.contains(&messages) {
            dev_err!(pdev, "device has {} messages to interrupt by\n", messages);
            return Err(EINVAL);
        }
        // A message is raised as the vector of its number, so that there are no more vectors.
        let wanted = u32::from(most_queues(cpu::online()));
        let vectors = Vectors::new(pdev, wanted.min(messages))?;
        let mut queues = KVec::new();
        queues.push(hw.cqp.events().clone(), GFP_KERNEL)?;
        let mut this = Self {
            services: KVec::new(),
            vectors: Arc::new(vectors, GFP_KERNEL)?,
            queues,
            unhandled: Arc::new(Atomic::new(0), GFP_KERNEL)?,
            hw: hw.clone(),
        };
        this.install(hw)?;
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
        let wanted = queues_of(cpu::online(), caps);
        dev_info!(
            pdev,
            "{} event queues, {} vectors of {}\n",
            wanted,
            vectors,
            self.vectors.kind().name()
        );
        for eqn in abi::EQ_ASYNC..wanted {
            let vector = vector_of(eqn, vectors);
            let log_entries = growth::first_log_entries(log_entries_of(eqn, caps));
            let queue = make_queue(pdev, hw, eqn, vector, log_entries)?;
            self.queues.push(queue, GFP_KERNEL)?;
        }
        for queue in &self.queues {
            queue.may_grow(growth::most_log_entries(features, caps));
            hw.event_queues
                .insert(queue.number().into(), queue.clone())?;
        }
        // Queues that share a vector with queue 0 are served by its handler, which is made anew.
        self.services.clear();
        self.install(hw)?;
        // What came while there was no handler raises an interrupt now.
        hw.cqp.events().arm(&hw.doorbells);
        Ok(())
    }

    /// Installs a handler on each vector, for the queues that there are.
    fn install(&mut self, hw: &Arc<Hardware>) -> Result {
        let vectors = self.vectors.len() as u16;
        let mut handlers = KVec::with_capacity(self.queues.len(), GFP_KERNEL)?;
        for queue in self.queues.iter().skip(abi::EQ_FIRST_HANDLER.into()) {
            handlers.push(queue.clone(), GFP_KERNEL)?;
        }
        let handlers = Arc::new(handlers, GFP_KERNEL)?;
        for vector in 0..vectors {
            let mut served = KVec::new();
            for queue in self.queues.iter().filter(|queue| queue.message() == vector) {
                served.push(Served::new(hw, queue)?, GFP_KERNEL)?;
            }
            if served.is_empty() {
                continue;
            }
            let name = match vector {
                _ if vectors <= abi::EQ_FIRST_HANDLER => c"ferrite",
                abi::EQ_CONTROL => c"ferrite-control",
                abi::EQ_ASYNC => c"ferrite-async",
                _ => c"ferrite-completion",
            };
            let service = Service {
                hw: hw.clone(),
                vectors: self.vectors.clone(),
                vector,
                queues: served,
                handlers: handlers.clone(),
                idle: Atomic::new(0),
                unhandled: self.unhandled.clone(),
            };
            let handler = IrqHandler::new(self.vectors.clone(), vector.into(), name, Ok(service));
            let handler = KBox::pin_init(handler, GFP_KERNEL)?;
            if vector >= abi::EQ_FIRST_HANDLER {
                let cpu = cpu::nth_online(u32::from(vector - abi::EQ_FIRST_HANDLER));
                // Where the interrupt arrives is a matter of speed only.
                let _ = handler.set_affinity(cpu);
            }
            self.services.push(handler, GFP_KERNEL)?;
        }
        Ok(())
    }

    /// The Linux interrupt number of a vector.
    pub(crate) fn irq(&self, vector: u16) -> Result<u32> {
        self.vectors.irq(vector.into())
    }

    /// The vectors.
    pub(crate) fn vectors(&self) -> &Arc<Vectors> {
        &self.vectors
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

/// How many event queues there are at the most: two fixed ones, and one for each processor.
fn most_queues(processors: u32) -> u16 {
    const MOST: u32 = abi::MAX_MESSAGES as u32 - abi::EQ_FIRST_HANDLER as u32;
    const _: () = assert!(abi::MAX_MESSAGES <= u16::MAX as usize);
    abi::EQ_FIRST_HANDLER + processors.min(MOST) as u16
}

/// How many there are on a device that says how many handlers it has.
fn queues_of(processors: u32, caps: &DeviceCaps) -> u16 {
    most_queues(processors.min(caps.handlers)).min(caps.max_eq)
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
pub(crate) struct Handlers {
    queues: KVec<ActiveQueue>,
    vectors: Arc<Vectors>,
}

impl Handlers {
    /// Makes the queues known to the device, and arms them.
    pub(crate) fn start(hw: &Arc<Hardware>, interrupts: &Interrupts) -> Result<Self> {
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
        let handlers = Self {
            queues: active,
            vectors: interrupts.vectors().clone(),
        };
        if handlers.count() == 0 {
            pr_err!("ferrite: the device has no event queue for completions\n");
            return Err(ENOSPC);
        }
        Ok(handlers)
    }

    /// How many completion handlers there are.
    pub(crate) fn count(&self) -> u32 {
        (self.queues.len() as u32).saturating_sub(1)
    }

    /// The event queue of the handler for completion vector `vector`.
    pub(crate) fn eqn(&self, vector: u32) -> Result<u16> {
        let index = 1 + (vector % self.count()) as usize;
        Ok(self.queues.get(index).ok_or(EINVAL)?.queue.number())
    }

    /// The same for a queue of a process, which gets the next bulk one, if there is any, where that is of
    /// low latency and it `may` not have those.
    pub(crate) fn eqn_for_process(&self, vector: u32, may: impl FnOnce() -> bool) -> Result<u16> {
        let is_low_latency = |vector: u32| {
            let mut handlers = self.handlers();
            let handler = handlers.nth(vector as usize);
            handler.is_some_and(EventQueue::is_low_latency)
        };
        self.eqn(bulk_vector(self.count(), vector, is_low_latency, may))
    }

    /// The handlers, by completion vector.
    fn handlers(&self) -> impl Iterator<Item = &EventQueue> {
        self.queues.iter().skip(1).map(|active| &*active.queue)
    }

    /// The event queue of a handler that is asked for by its completion vector, which has to be
    /// there, or by where its interrupt arrives; `EQ_NONE` for none.
    pub(crate) fn choose(&self, choice: Choice) -> Result<u16> {
        let vector = match choice {
            Choice::None => return Ok(abi::EQ_NONE),
            Choice::Vector(vector) => vector,
            Choice::Local => {
                let cpu = CpuId::current();
                local_vector(self.count(), cpu.as_u32(), |vector| {
                    self.handlers().nth(vector as usize).is_some_and(|queue| {
                        self.vectors
                            .arrives_at(queue.message().into(), cpu)
                            .unwrap_or(false)
                    })
                })
            }
        };
        if vector >= self.count() {
            return Err(EINVAL);
        }
        self.eqn(vector)
    }

    /// The same for a queue of a process: `EPERM` where it names a handler of low latency and `may` not have
    /// those; by place it gets another one then, as [`Self::eqn_for_process`].
    pub(crate) fn choose_for_process(
        &self,
        choice: Choice,
        may: impl FnOnce() -> bool,
    ) -> Result<u16> {
        let eqn = self.choose(choice)?;
        let Some(vector) = self.vector_of_eqn(eqn) else {
            return Ok(eqn);
        };
        let allowed = self.eqn_for_process(vector, may)?;
        if allowed != eqn && choice != Choice::Local {
            return Err(EPERM);
        }
        Ok(allowed)
    }

    /// The handler of completion vector `vector`: `EINVAL` where there is none.
    fn handler(&self, vector: u32) -> Result<&EventQueue> {
        self.handlers().nth(vector as usize).ok_or(EINVAL)
    }

    /// The priority of the handler of completion vector `vector`.
    pub(crate) fn priority(&self, vector: u32) -> Result<EventPriority> {
        Ok(self.handler(vector)?.settings().priority)
    }

    /// Sets it. Sleeps.
    pub(crate) fn set_priority(
        &self,
        hw: &Arc<Hardware>,
        vector: u32,
        priority: EventPriority,
    ) -> Result {
        hw.set_priority(self.handler(vector)?, priority)
    }

    /// The completion vector of the handler with event queue `eqn`.
    pub(crate) fn vector_of_eqn(&self, eqn: u16) -> Option<u32> {
        let index = self.handlers().position(|queue| queue.number() == eqn)?;
        Some(index as u32)
    }
}

/// Which handler somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// None: no events.
    None,
    /// That whose interrupt arrives at the processor of who asks.
    Local,
    /// That of a completion vector.
    Vector(u32),
}

impl Choice {
    /// As a process tells it.
    pub(crate) fn from_raw(raw: u32) -> Self {
        match raw {
            abi::UVERBS_CQ_VECTOR_NONE => Self::None,
            abi::UVERBS_CQ_VECTOR_LOCAL => Self::Local,
            vector => Self::Vector(vector),
        }
    }

    /// As people write it.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::None),
            "local" => Ok(Self::Local),
            // Not one of the numbers that are other words.
            number => match Self::from_raw(number.parse().map_err(|_| EINVAL)?) {
                Self::Vector(vector) => Ok(Self::Vector(vector)),
                _ => Err(EINVAL),
            },
        }
    }
}

/// The first of `count` vectors from `vector` on that is not of low latency; `vector` itself where all are,
/// so that none comes before another, or where its user `may` have those.
fn bulk_vector(
    count: u32,
    vector: u32,
    is_low_latency: impl Fn(u32) -> bool,
    may: impl FnOnce() -> bool,
) -> u32 {
    if !is_low_latency(vector) || may() {
        return vector;
    }
    let others = (0..count).map(|next| (vector + next) % count);
    let mut bulk = others.filter(|other| !is_low_latency(*other));
    bulk.next().unwrap_or(vector)
}

/// One of `count` vectors that arrives at processor `cpu`: where several do, or none does, as if they
/// were dealt out in turn.
fn local_vector(count: u32, cpu: u32, arrives: impl Fn(u32) -> bool) -> u32 {
    let arriving = (0..count).filter(|vector| arrives(*vector)).count().max(1);
    (0..count)
        .filter(|vector| arrives(*vector))
        .nth(cpu as usize % arriving)
        // Somebody steers interrupts elsewhere meanwhile, or none arrives.
        .unwrap_or(cpu % count.max(1))
}

#[kunit_tests(ferrite_handler)]
mod tests {
    use super::*;
    use crate::abi::Plain;

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
                let quiet = flags == GFP_KERNEL | __GFP_NOWARN;
                assert_eq!(quiet, log_entries > LEAST_LOG_ENTRIES);
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
    fn there_are_as_many_handlers_as_processors_and_the_device_has_room_for() {
        let with = |handlers, max_eq| DeviceCaps {
            handlers,
            max_eq,
            ..DeviceCaps::zeroed()
        };
        assert_eq!(queues_of(4, &with(64, 66)), 6);
        assert_eq!(queues_of(4, &with(2, 66)), 4);
        assert_eq!(queues_of(4, &with(64, 5)), 5);
        assert_eq!(queues_of(u32::MAX, &with(u32::MAX, u16::MAX)), 512);
        assert_eq!(most_queues(u32::MAX), 512);
    }

    #[test]
    fn each_queue_has_its_own_vector_where_there_are_enough() {
        for eqn in 0..6 {
            assert_eq!(vector_of(eqn, 6), eqn);
        }
    }

    #[test]
    fn handlers_share_before_the_fixed_queues_do() {
        assert_eq!(vector_of(0, 3), 0);
        assert_eq!(vector_of(1, 3), 1);
        for eqn in 2..10 {
            assert_eq!(vector_of(eqn, 3), 2);
        }
        assert_eq!(vector_of(4, 4), 2);
        assert_eq!(vector_of(5, 4), 3);
    }

    #[test]
    fn a_handler_is_chosen_by_a_number_or_a_word() {
        assert_eq!(Choice::from_raw(0), Choice::Vector(0));
        assert_eq!(Choice::from_raw(u32::MAX - 2), Choice::Vector(u32::MAX - 2));
        assert_eq!(Choice::from_raw(u32::MAX - 1), Choice::Local);
        assert_eq!(Choice::from_raw(u32::MAX), Choice::None);
        assert_eq!(Choice::parse("none"), Ok(Choice::None));
        assert_eq!(Choice::parse("local"), Ok(Choice::Local));
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
    fn a_process_gets_a_handler_of_low_latency_only_where_it_may() {
        let low = |vectors: &'static [u32]| move |vector: u32| vectors.contains(&vector);
        let (may, may_not) = (|| true, || false);
        assert_eq!(bulk_vector(4, 1, low(&[]), may_not), 1);
        assert_eq!(bulk_vector(4, 1, low(&[0, 2, 3]), may_not), 1);
        assert_eq!(bulk_vector(4, 1, low(&[1]), may_not), 2);
        assert_eq!(bulk_vector(4, 2, low(&[2, 3, 0]), may_not), 1);
        assert_eq!(bulk_vector(4, 1, low(&[1]), may), 1);
        // Nobody comes before others where all are alike.
        assert_eq!(bulk_vector(4, 2, low(&[0, 1, 2, 3]), may_not), 2);
        assert_eq!(bulk_vector(1, 0, low(&[0]), may_not), 0);
        // Who asks for a bulk one is not looked at.
        assert_eq!(bulk_vector(4, 0, low(&[1]), || unreachable!()), 0);
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
        let at = |served: u32| move |vector| vector == served;
        assert_eq!(local_vector(4, 0, at(2)), 2);
        assert_eq!(local_vector(4, 3, at(0)), 0);
        // In turn among several.
        for (cpu, vector) in [(0, 1), (1, 2), (2, 3), (3, 1)] {
            assert_eq!(local_vector(4, cpu, |vector| vector > 0), vector);
        }
        for cpu in 0..8 {
            assert_eq!(local_vector(4, cpu, |_| false), cpu % 4);
        }
        assert_eq!(local_vector(1, 7, |_| false), 0);
        assert_eq!(local_vector(0, 7, |_| true), 0);
    }

    #[test]
    fn one_vector_serves_everything() {
        for eqn in 0..10 {
            assert_eq!(vector_of(eqn, 1), 0);
        }
        assert!((0..10).all(|eqn| vector_of(eqn, 2) < 2));
    }
}
