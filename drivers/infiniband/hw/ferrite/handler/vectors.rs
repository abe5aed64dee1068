// SPDX-License-Identifier: GPL-2.0

//! Vectors of the function, and the event queues that interrupt by them.

use super::interrupt::Service;
use crate::{
    abi,
    abi::DeviceCaps,
    eq::EventQueue,
    growth,
    hardware::Hardware,
    kernel_ext::{
        cpu,
        cpu_hotplug::Following,
        irq::{
            IrqHandler,
            Kind,
            Vectors, //
        }, //
    },
    service::Served,
    steering,
    steering::Steering,
    vector_map::{
        Layout,
        VectorTable, //
    }, //
};
use core::ops::RangeInclusive;
use kernel::{
    alloc::{
        flags::__GFP_NOWARN,
        Flags, //
    },
    device::{
        Bound,
        Device, //
    },
    devres::Devres,
    fmt,
    pci,
    prelude::*,
    str::CString,
    sync::{
        atomic::Atomic,
        Arc, //
    }, //
};

/// Base-2 logarithms of the fewest entries of an event queue, of the most of the asynchronous one
/// (512 KiB), and of the most of a completion handler's (128 KiB).
const LEAST_LOG_ENTRIES: u8 = 8;

const MOST_ASYNC_LOG_ENTRIES: u8 = 14;

const MOST_HANDLER_LOG_ENTRIES: u8 = 12;

pub(super) const _: () = assert!(
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

/// How a device interrupts, for who looks after a failure.
pub(crate) struct Arrangement {
    pub(crate) kind: Kind,
    pub(crate) vectors: u32,
    pub(crate) table: Arc<VectorTable>,
    /// Calls of the handler on a pin that were not ours.
    pub(crate) unhandled: Arc<Atomic<u64>>,
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
        hw.arrangement.populate(Arrangement {
            kind: self.vectors.kind(),
            vectors: vectors.into(),
            table: table.clone(),
            unhandled: self.unhandled.clone(),
        });
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

#[kunit_tests(ferrite_handler_vectors)]
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
}
