// SPDX-License-Identifier: GPL-2.0

//! Interrupts: which event queue is served on which vector and processor, and the completion
//! handlers that completion queues are spread over.

mod choice;
mod interrupt;
mod vectors;

use self::choice::choose;
pub(crate) use self::{
    choice::Choice,
    vectors::{
        Arrangement,
        Interrupts, //
    }, //
};
use crate::{
    abi,
    abi::{
        CommandOpcode,
        EventPriority, //
    },
    commands::DeviceObject,
    eq::EventQueue,
    hardware::Hardware,
    kernel_ext::errno,
    steering::Steering,
    vector_map::{
        Destination,
        VectorTable,
        VectorTableInDevice,
        PARTS, //
    }, //
};
use kernel::{
    cpu::CpuId,
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

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

#[kunit_tests(ferrite_handler)]
mod tests {
    use super::*;

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
}
