// SPDX-License-Identifier: GPL-2.0

//! Interrupts: which event queue is served on which vector and processor, and the completion
//! handlers that completion queues are spread over.

use crate::{
    abi,
    abi::CommandOpcode,
    eq::EventQueue,
    hardware::{
        DeviceObject,
        Hardware, //
    },
    kernel_ext::{
        cpu,
        irq::{
            Handler,
            IrqHandler,
            Vectors, //
        },
    },
};
use kernel::{
    device::Bound,
    irq::IrqReturn,
    pci,
    prelude::*,
    sync::Arc, //
};

/// Base-2 logarithm of the entries of the asynchronous event queue.
const ASYNC_LOG_ENTRIES: u8 = 8;
/// Base-2 logarithm of the entries of a completion handler's event queue.
const HANDLER_LOG_ENTRIES: u8 = 12;

/// The vector of event queue `eqn` when there are `vectors`.
///
/// With enough of them each queue has its own; else handlers share, and last of all everything
/// shares one.
pub(crate) fn vector_of(eqn: u16, vectors: u16) -> u16 {
    let first = abi::EQ_FIRST_HANDLER;
    if eqn >= first && vectors > first {
        first + (eqn - first) % (vectors - first)
    } else {
        eqn % vectors
    }
}

/// What runs on one vector: the service of its event queues.
struct Service {
    hw: Arc<Hardware>,
    queues: KVec<Arc<EventQueue>>,
}

impl Handler for Service {
    fn handle(&self) -> IrqReturn {
        for queue in &self.queues {
            queue.service(&self.hw.doorbells, |event| self.hw.dispatch(event));
        }
        // Message-signalled interrupts are ours alone. One that finds nothing was overtaken by
        // the service of a queue that shares the vector.
        IrqReturn::Handled
    }
}

/// The interrupts of a device: its event queues' memory, vectors and installed handlers.
///
/// Handlers are removed before vectors are given back and rings are freed: fields are dropped in
/// order.
pub(crate) struct Interrupts {
    _services: KVec<Pin<KBox<IrqHandler<Service>>>>,
    vectors: Arc<Vectors>,
    queues: KVec<Arc<EventQueue>>,
}

impl Interrupts {
    /// Makes the event queues and installs their handlers: two fixed queues, and one for each
    /// online processor. The device knows none of them yet.
    pub(crate) fn new(
        pdev: &pci::Device<Bound>,
        hw: &Arc<Hardware>,
        device_vectors: u32,
    ) -> Result<Self> {
        let fixed = u32::from(abi::EQ_FIRST_HANDLER);
        let most = (abi::MAX_VECTORS as u32).min(u32::from(u16::MAX)) - fixed;
        let wanted = fixed + cpu::online().min(most);
        let vectors = Vectors::new(pdev, 1, wanted.min(device_vectors.max(1)))?;
        let granted = vectors.len() as u16;
        if u32::from(granted) < wanted {
            dev_info!(pdev, "{} event queues share {} vectors\n", wanted, granted);
        }
        let vectors = Arc::new(vectors, GFP_KERNEL)?;

        let mut queues = KVec::with_capacity(wanted as usize, GFP_KERNEL)?;
        queues.push(hw.cqp.events().clone(), GFP_KERNEL)?;
        for eqn in abi::EQ_ASYNC..wanted as u16 {
            let log_entries = if eqn < abi::EQ_FIRST_HANDLER {
                ASYNC_LOG_ENTRIES
            } else {
                HANDLER_LOG_ENTRIES
            };
            let queue = EventQueue::new(pdev.as_ref(), eqn, vector_of(eqn, granted), log_entries);
            queues.push(Arc::pin_init(queue, GFP_KERNEL)?, GFP_KERNEL)?;
        }

        let mut services = KVec::with_capacity(granted as usize, GFP_KERNEL)?;
        for vector in 0..granted {
            let mut served = KVec::new();
            for queue in queues.iter().filter(|queue| queue.vector() == vector) {
                served.push(queue.clone(), GFP_KERNEL)?;
            }
            let name = match vector {
                _ if granted <= abi::EQ_FIRST_HANDLER => c"ferrite",
                abi::EQ_CONTROL => c"ferrite-control",
                abi::EQ_ASYNC => c"ferrite-async",
                _ => c"ferrite-completion",
            };
            let service = Service {
                hw: hw.clone(),
                queues: served,
            };
            let handler = IrqHandler::new(vectors.clone(), vector.into(), name, Ok(service));
            let handler = KBox::pin_init(handler, GFP_KERNEL)?;
            if vector >= abi::EQ_FIRST_HANDLER {
                let cpu = cpu::nth_online(u32::from(vector - abi::EQ_FIRST_HANDLER));
                // Where the interrupt arrives is a matter of speed only.
                let _ = handler.set_affinity(cpu);
            }
            services.push(handler, GFP_KERNEL)?;
        }
        Ok(Self {
            _services: services,
            vectors,
            queues,
        })
    }

    /// The Linux interrupt number of a vector.
    pub(crate) fn irq(&self, vector: u16) -> Result<u32> {
        self.vectors.irq(vector.into())
    }

    /// All event queues, by number.
    pub(crate) fn queues(&self) -> &[Arc<EventQueue>] {
        &self.queues
    }
}

/// An event queue that the device knows and that is armed.
struct ActiveQueue {
    queue: Arc<EventQueue>,
    _object: DeviceObject,
}

/// The event queues made by command: the asynchronous one and the completion handlers'.
pub(crate) struct Handlers {
    queues: KVec<ActiveQueue>,
}

impl Handlers {
    /// Makes the queues known to the device, `max_eq` of them at the most, and arms them.
    pub(crate) fn start(
        hw: &Arc<Hardware>,
        queues: &[Arc<EventQueue>],
        max_eq: u16,
    ) -> Result<Self> {
        let mut active = KVec::with_capacity(queues.len(), GFP_KERNEL)?;
        let made = queues.iter().take(max_eq.into()).skip(abi::EQ_ASYNC.into());
        for queue in made {
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
        let handlers = Self { queues: active };
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
}

#[kunit_tests(ferrite_handler)]
mod tests {
    use super::*;

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
    fn one_vector_serves_everything() {
        for eqn in 0..10 {
            assert_eq!(vector_of(eqn, 1), 0);
        }
        assert!((0..10).all(|eqn| vector_of(eqn, 2) < 2));
    }
}
