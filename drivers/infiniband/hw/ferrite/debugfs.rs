// SPDX-License-Identifier: GPL-2.0

//! What `/sys/kernel/debug/<device>/` shows: how the device interrupts, one line for each event
//! queue, completion queue, queue pair and shared receive queue, and how full the tables of numbers
//! are. `ferritectl` reads these
//! files by the names in their first line: columns may be added, not renamed.

use crate::{
    device::Ferrite,
    dm::DeviceMemory,
    doorbell_pages::DoorbellPages,
    eq::EventQueue,
    handler::Interrupts,
    hardware::Hardware,
    kernel_ext::irq::Kind,
    numbers::Numbers,
    rdma::QpType,
    tpt::Tags, //
};
use kernel::{
    debugfs::{
        Dir,
        File,
        Writer, //
    },
    fmt,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    }, //
};

/// Event queues by number, each with its Linux interrupt number.
struct EventQueues {
    queues: KVec<(Arc<EventQueue>, u32)>,
    hw: Arc<Hardware>,
}

impl Writer for EventQueues {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "eqn message irq entries read_index events interrupts cqs"
        )?;
        for (queue, irq) in &self.queues {
            let mut cqs = 0;
            self.hw
                .cqs
                .for_each(|_, cq| cqs += u32::from(cq.eqn() == queue.number()));
            writeln!(
                f,
                "{} {} {} {} {} {} {} {}",
                queue.number(),
                queue.message(),
                irq,
                1u32 << queue.log_entries(),
                queue.read_index(),
                queue.events(),
                queue.interrupts(),
                cqs
            )?;
        }
        Ok(())
    }
}

/// How the device interrupts.
struct InterruptMode {
    kind: Kind,
    vectors: u32,
    unhandled: Arc<Atomic<u64>>,
}

impl Writer for InterruptMode {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "mode vectors unhandled")?;
        let unhandled = self.unhandled.load(Relaxed);
        writeln!(f, "{} {} {}", self.kind.name(), self.vectors, unhandled)
    }
}

/// Completion queues by number.
struct CompletionQueues(Arc<Hardware>);

impl Writer for CompletionQueues {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cqn owner eqn entries consumed")?;
        let mut result = Ok(());
        self.0.cqs.for_each(|cqn, cq| {
            let line = write!(
                f,
                "{} {} {} {} ",
                cqn,
                owner(cq.is_user()),
                cq.eqn(),
                cq.entries()
            )
            .and_then(|()| match cq.consumed() {
                Some(consumed) => writeln!(f, "{}", consumed),
                None => writeln!(f, "-"),
            });
            result = result.and(line);
        });
        result
    }
}

/// Queue pairs by number.
struct QueuePairs(Arc<Hardware>);

impl Writer for QueuePairs {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "qpn owner type state send_cqn recv_cqn sq_blocks rq_entries"
        )?;
        let mut result = Ok(());
        self.0.qps.for_each(|qpn, qp| {
            let (sq, rq) = qp.ring_sizes();
            let kind = match qp.qp_type() {
                Some(QpType::Smi) => "SMI",
                Some(QpType::Gsi) => "GSI",
                Some(QpType::Rc) => "RC",
                Some(QpType::Uc) => "UC",
                Some(QpType::Ud) => "UD",
                Some(QpType::XrcInitiator) => "XRC_INI",
                Some(QpType::XrcTarget) => "XRC_TGT",
                _ => "-",
            };
            let line = writeln!(
                f,
                "{} {} {} {:?} {} {} {} {}",
                qpn,
                owner(qp.is_user()),
                kind,
                qp.state(),
                qp.send_cq().map_or(0, |cq| cq.number()),
                qp.recv_cq().map_or(0, |cq| cq.number()),
                1u32 << sq,
                1u32 << rq
            );
            result = result.and(line);
        });
        result
    }
}

/// Shared receive queues by number.
struct Srqs(Arc<Hardware>);

impl Writer for Srqs {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "srqn owner")?;
        let mut result = Ok(());
        self.0.srqs.for_each(|srqn, srq| {
            let line = writeln!(f, "{} {}", srqn, owner(srq.is_user()));
            result = result.and(line);
        });
        result
    }
}

/// How many numbers of each kind are taken.
struct Tables {
    tags: Arc<Tags>,
    memory: Arc<DeviceMemory>,
    doorbell_pages: Arc<DoorbellPages>,
    numbers: [(&'static str, Arc<Numbers>); 5],
}

impl Writer for Tables {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table used entries")?;
        for (name, (used, entries)) in [
            ("tpt", self.tags.occupancy()),
            ("device_memory_pages", self.memory.occupancy()),
            ("doorbell_pages", self.doorbell_pages.occupancy()),
        ] {
            writeln!(f, "{} {} {}", name, used, entries)?;
        }
        for (name, numbers) in &self.numbers {
            let (used, entries) = numbers.occupancy();
            writeln!(f, "{} {} {}", name, used, entries)?;
        }
        Ok(())
    }
}

fn owner(user: bool) -> &'static str {
    if user {
        "user"
    } else {
        "kernel"
    }
}

/// The files of one device, removed when dropped.
pub(crate) struct DebugFiles {
    _event_queues: Pin<KBox<File<EventQueues>>>,
    _interrupts: Pin<KBox<File<InterruptMode>>>,
    _completion_queues: Pin<KBox<File<CompletionQueues>>>,
    _queue_pairs: Pin<KBox<File<QueuePairs>>>,
    _srqs: Pin<KBox<File<Srqs>>>,
    _tables: Pin<KBox<File<Tables>>>,
    _dir: Dir,
}

impl DebugFiles {
    /// Makes the files in a folder `name`.
    pub(crate) fn new(name: &CStr, ferrite: &Ferrite, interrupts: &Interrupts) -> Result<Self> {
        let dir = Dir::new(name);
        let hw = &ferrite.hw;
        let mut listed = KVec::with_capacity(interrupts.queues().len(), GFP_KERNEL)?;
        for queue in interrupts.queues() {
            let irq = interrupts.irq(queue.message())?;
            listed.push((queue.clone(), irq), GFP_KERNEL)?;
        }
        let event_queues = EventQueues {
            queues: listed,
            hw: hw.clone(),
        };
        let (kind, vectors) = interrupts.kind();
        let mode = InterruptMode {
            kind,
            vectors,
            unhandled: interrupts.unhandled(),
        };
        let tables = Tables {
            tags: ferrite.tags.clone(),
            memory: ferrite.memory.clone(),
            doorbell_pages: ferrite.doorbell_pages.clone(),
            numbers: [
                ("protection_domains", ferrite.pds.clone()),
                ("completion_queues", ferrite.cqns.clone()),
                ("queue_pairs", ferrite.qpns.clone()),
                ("shared_receive_queues", ferrite.srqns.clone()),
                ("xrc_domains", ferrite.xrcds.clone()),
            ],
        };
        Ok(Self {
            _event_queues: KBox::pin_init(
                dir.read_only_file(c"eqs", Ok::<_, Error>(event_queues)),
                GFP_KERNEL,
            )?,
            _interrupts: KBox::pin_init(
                dir.read_only_file(c"interrupts", Ok::<_, Error>(mode)),
                GFP_KERNEL,
            )?,
            _completion_queues: KBox::pin_init(
                dir.read_only_file(c"cqs", Ok::<_, Error>(CompletionQueues(hw.clone()))),
                GFP_KERNEL,
            )?,
            _queue_pairs: KBox::pin_init(
                dir.read_only_file(c"qps", Ok::<_, Error>(QueuePairs(hw.clone()))),
                GFP_KERNEL,
            )?,
            _srqs: KBox::pin_init(
                dir.read_only_file(c"srqs", Ok::<_, Error>(Srqs(hw.clone()))),
                GFP_KERNEL,
            )?,
            _tables: KBox::pin_init(
                dir.read_only_file(c"tables", Ok::<_, Error>(tables)),
                GFP_KERNEL,
            )?,
            _dir: dir,
        })
    }
}
