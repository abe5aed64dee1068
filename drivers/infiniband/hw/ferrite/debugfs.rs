// SPDX-License-Identifier: GPL-2.0

//! What `/sys/kernel/debug/<device>/` shows: one line for each event queue, completion queue and
//! queue pair.

use crate::{
    eq::EventQueue,
    hardware::Hardware, //
};
use kernel::{
    debugfs::{
        Dir,
        File,
        Writer, //
    },
    fmt,
    prelude::*,
    sync::Arc, //
};

/// Event queues by number.
struct EventQueues {
    queues: KVec<Arc<EventQueue>>,
    hw: Arc<Hardware>,
}

impl Writer for EventQueues {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "eqn vector entries read_index events interrupts cqs")?;
        for queue in &self.queues {
            let mut cqs = 0;
            self.hw
                .cqs
                .for_each(|_, cq| cqs += u32::from(cq.eqn() == queue.number()));
            writeln!(
                f,
                "{} {} {} {} {} {} {}",
                queue.number(),
                queue.vector(),
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
            let line = writeln!(
                f,
                "{} {} {:?} {:?} {} {} {} {}",
                qpn,
                owner(qp.is_user()),
                qp.qp_type(),
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
    _completion_queues: Pin<KBox<File<CompletionQueues>>>,
    _queue_pairs: Pin<KBox<File<QueuePairs>>>,
    _dir: Dir,
}

impl DebugFiles {
    /// Makes the files in a folder `name`.
    pub(crate) fn new(name: &CStr, hw: &Arc<Hardware>, queues: &[Arc<EventQueue>]) -> Result<Self> {
        let dir = Dir::new(name);
        let mut listed = KVec::with_capacity(queues.len(), GFP_KERNEL)?;
        for queue in queues {
            listed.push(queue.clone(), GFP_KERNEL)?;
        }
        let event_queues = EventQueues {
            queues: listed,
            hw: hw.clone(),
        };
        Ok(Self {
            _event_queues: KBox::pin_init(
                dir.read_only_file(c"eqs", Ok::<_, Error>(event_queues)),
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
            _dir: dir,
        })
    }
}
