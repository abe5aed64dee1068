// SPDX-License-Identifier: GPL-2.0

//! What `/sys/kernel/debug/<device>/` shows: how the device interrupts, one line for each event
//! queue, completion queue, queue pair and shared receive queue, and how full the tables of numbers
//! are. `ferritectl` reads these files by the names in their first line: columns may be added, not
//! renamed. Writing to `cq_move` moves a completion queue to another handler, to `handler_priority` sets
//! the priority of one, to `balance` spreads handlers over processors.

use crate::{
    abi,
    binding::Who,
    cq::FerriteCq,
    device::Ferrite,
    eq::EventQueue,
    event_class::EventClass,
    handler::{
        Choice,
        Handlers,
        Interrupts, //
    },
    hardware::Hardware,
    kernel_ext::irq::Kind,
    occupancy::Tables,
    priority,
    rdma::QpType,
    steering::Steering,
    vector_map::{
        VectorTable,
        PARTS, //
    },
};
use kernel::{
    debugfs::{
        Dir,
        File,
        Reader,
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
    },
    uaccess::UserSliceReader, //
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
            "eqn message irq entries read_index events interrupts cqs overflows \
             moderation_us moderation_count priority"
        )?;
        for (queue, irq) in &self.queues {
            let mut cqs = 0;
            let settings = queue.settings();
            self.hw.cqs.for_each(|_, cq| {
                let handlers = &cq.device().handlers;
                let handler = cq.handler();
                let uses = handler.is_some_and(|handler| handlers.uses(handler, queue.number()));
                cqs += u32::from(uses);
            });
            writeln!(
                f,
                "{} {} {} {} {} {} {} {} {} {} {} {}",
                queue.number(),
                queue.message(),
                irq,
                1u32 << queue.log_entries(),
                queue.read_index(),
                queue.events(),
                queue.interrupts(),
                cqs,
                queue.overflows(),
                settings.moderation_microseconds,
                settings.moderation_count,
                priority::name(settings.priority)
            )?;
        }
        Ok(())
    }
}

/// How many events there were that are about no queue, by class.
struct Events(Arc<Hardware>);

impl Writer for Events {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "class events")?;
        for (class, name) in EventClass::ALL {
            let name = name.to_str().unwrap_or("-");
            writeln!(f, "{} {}", name, self.0.event_counts.get(class))?;
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

/// Where events of completion queues go, by what completes and by completion vector.
struct VectorTableFile {
    table: Arc<VectorTable>,
    /// The Linux interrupt number of each vector.
    irqs: KVec<u32>,
}

impl Writer for VectorTableFile {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "part handler eqn message irq mapped")?;
        for (part, row) in PARTS.iter().enumerate() {
            for handler in 0..self.table.columns() {
                let (eqn, message) = self.table.at(part, handler);
                let irq = self.irqs.get(usize::from(message)).copied().unwrap_or(0);
                let mapped = self.table.destination(handler).eqn == abi::EQ_MAPPED;
                let mapped = if mapped { "yes" } else { "no" };
                writeln!(
                    f,
                    "{:?} {} {} {} {} {}",
                    row, handler, eqn, message, irq, mapped
                )?;
            }
        }
        Ok(())
    }
}

/// Completion queues by number.
struct CompletionQueues(Arc<Hardware>);

impl Writer for CompletionQueues {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cqn owner shared handler eqn entries consumed follows")?;
        let mut result = Ok(());
        self.0.cqs.for_each(|cqn, cq| {
            let shared = if cq.is_shared() { "yes" } else { "no" };
            let line = write!(f, "{} {} {} ", cqn, owner(cq.is_user()), shared)
                .and_then(|()| match cq.handler() {
                    Some(handler) => {
                        let eqn = cq.device().handlers.main_queue(handler);
                        write!(f, "{} {} ", handler, eqn)
                    }
                    None => write!(f, "none - "),
                })
                .and_then(|()| write!(f, "{} ", cq.entries()))
                .and_then(|()| match cq.consumed() {
                    Some(consumed) => write!(f, "{} ", consumed),
                    None => write!(f, "- "),
                })
                .and_then(|()| match cq.follows() {
                    Some(cpu) => writeln!(f, "{}", cpu),
                    None => writeln!(f, "-"),
                });
            result = result.and(line);
        });
        result
    }
}

/// Moves completion queues, of processes and of the kernel: `cqn vector` is written to it, or `none`
/// or `local` in place of the vector.
struct MoveCompletionQueue(Arc<Hardware>);

impl Reader for MoveCompletionQueue {
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        let mut text = [0; 32];
        let text = text.get_mut(..reader.len()).ok_or(EINVAL)?;
        reader.read_slice(text)?;
        let (cqn, choice) = parse_move(text)?;
        // The queue is not destroyed before the reference is gone; who destroys it waits.
        let cq = self.0.cqs.get(cqn as usize).ok_or(ENOENT)?;
        // The file is root's.
        FerriteCq::move_to(&cq, choice, Who::Kernel)
    }
}

/// The number of a completion queue and where it is to be moved.
fn parse_move(text: &[u8]) -> Result<(u32, Choice)> {
    let text = core::str::from_utf8(text).map_err(|_| EINVAL)?;
    let mut words = text.split_ascii_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some(cqn), Some(choice), None) => {
            Ok((cqn.parse().map_err(|_| EINVAL)?, Choice::parse(choice)?))
        }
        _ => Err(EINVAL),
    }
}

/// Spreads handlers over processors anew when `1` is written to it.
struct Balance(Arc<Steering>);

impl Reader for Balance {
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        let mut text = [0; 8];
        let text = text.get_mut(..reader.len()).ok_or(EINVAL)?;
        reader.read_slice(text)?;
        if text.trim_ascii() != b"1" {
            return Err(EINVAL);
        }
        self.0.balance();
        Ok(())
    }
}

/// Queue pairs by number.
struct QueuePairs(Arc<Hardware>);

impl Writer for QueuePairs {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "qpn owner type state send_cqn recv_cqn sq_blocks rq_entries refused"
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
                Some(QpType::RawPacket) => "RAW",
                _ => "-",
            };
            let line = writeln!(
                f,
                "{} {} {} {:?} {} {} {} {} {}",
                qpn,
                owner(qp.is_user()),
                kind,
                qp.state(),
                qp.send_cq().map_or(0, |cq| cq.number()),
                qp.recv_cq().map_or(0, |cq| cq.number()),
                1u32 << sq,
                1u32 << rq,
                qp.refused()
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
struct DebugTables(Tables);

impl Writer for DebugTables {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table used entries")?;
        let mut result = Ok(());
        self.0.for_each(|name, used, entries| {
            let name = name.to_str().unwrap_or("-");
            let line = writeln!(f, "{} {} {}", name, used, entries);
            result = result.and(line);
        });
        result
    }
}

/// Sets the priority of handlers: a line `handler low-latency` or `handler bulk`, by completion vector.
struct HandlerPriority(Arc<Handlers>);

impl Reader for HandlerPriority {
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        let mut line = [0; 32];
        let line = line.get_mut(..reader.len()).ok_or(EINVAL)?;
        reader.read_slice(line)?;
        let line = core::str::from_utf8(line).map_err(|_| EINVAL)?;
        let (handler, priority) = priority::parse(line)?;
        // `EINVAL` is for a line that cannot be read.
        if handler >= self.0.count() {
            return Err(ENOENT);
        }
        self.0.set_priority(handler, priority)
    }
}

fn owner(user: bool) -> &'static str {
    if user {
        "user"
    } else {
        "kernel"
    }
}

/// What is to be done when nobody can move completion queues by file any more: whoever takes leave of
/// the device waits for completions, so that queues of the kernel need a handler for that.
struct EndOfMoves(Arc<Hardware>);

impl Drop for EndOfMoves {
    fn drop(&mut self) {
        FerriteCq::restore_handlers(&self.0);
    }
}

/// The files of one device, removed when dropped, in order.
pub(crate) struct DebugFiles {
    _event_queues: Pin<KBox<File<EventQueues>>>,
    _events: Pin<KBox<File<Events>>>,
    _interrupts: Pin<KBox<File<InterruptMode>>>,
    _vector_map: Pin<KBox<File<VectorTableFile>>>,
    _completion_queues: Pin<KBox<File<CompletionQueues>>>,
    _move: Pin<KBox<File<MoveCompletionQueue>>>,
    _balance: Pin<KBox<File<Balance>>>,
    _end_of_moves: EndOfMoves,
    _queue_pairs: Pin<KBox<File<QueuePairs>>>,
    _srqs: Pin<KBox<File<Srqs>>>,
    _tables: Pin<KBox<File<DebugTables>>>,
    _handler_priority: Pin<KBox<File<HandlerPriority>>>,
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
        let handler_priority = HandlerPriority(ferrite.handlers.clone());
        let (kind, vectors) = interrupts.kind();
        let mut irqs = KVec::with_capacity(vectors as usize, GFP_KERNEL)?;
        for vector in 0..vectors {
            irqs.push(interrupts.irq(vector as u16)?, GFP_KERNEL)?;
        }
        let vector_map = VectorTableFile {
            table: interrupts.table()?.clone(),
            irqs,
        };
        let mode = InterruptMode {
            kind,
            vectors,
            unhandled: interrupts.unhandled(),
        };
        let tables = DebugTables(Tables::of(ferrite));
        Ok(Self {
            // Made first: where something cannot be made, what was made last goes first.
            _end_of_moves: EndOfMoves(hw.clone()),
            _event_queues: KBox::pin_init(
                dir.read_only_file(c"eqs", Ok::<_, Error>(event_queues)),
                GFP_KERNEL,
            )?,
            _events: KBox::pin_init(
                dir.read_only_file(c"events", Ok::<_, Error>(Events(hw.clone()))),
                GFP_KERNEL,
            )?,
            _interrupts: KBox::pin_init(
                dir.read_only_file(c"interrupts", Ok::<_, Error>(mode)),
                GFP_KERNEL,
            )?,
            _vector_map: KBox::pin_init(
                dir.read_only_file(c"vector_map", Ok::<_, Error>(vector_map)),
                GFP_KERNEL,
            )?,
            _completion_queues: KBox::pin_init(
                dir.read_only_file(c"cqs", Ok::<_, Error>(CompletionQueues(hw.clone()))),
                GFP_KERNEL,
            )?,
            _move: KBox::pin_init(
                dir.write_only_file(c"cq_move", Ok::<_, Error>(MoveCompletionQueue(hw.clone()))),
                GFP_KERNEL,
            )?,
            _balance: KBox::pin_init(
                dir.write_only_file(
                    c"balance",
                    Ok::<_, Error>(Balance(interrupts.steering()?.clone())),
                ),
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
            _handler_priority: KBox::pin_init(
                dir.write_only_file(c"handler_priority", Ok::<_, Error>(handler_priority)),
                GFP_KERNEL,
            )?,
            _dir: dir,
        })
    }
}

#[kunit_tests(ferrite_debugfs)]
mod tests {
    use super::*;

    #[test]
    fn a_move_is_a_number_and_a_handler_and_nothing_else() {
        assert_eq!(parse_move(b"7 3\n"), Ok((7, Choice::Vector(3))));
        assert_eq!(parse_move(b" 0  none"), Ok((0, Choice::None)));
        let local = parse_move(b"4294967295 local\n");
        assert!(local
            .is_ok_and(|(cqn, choice)| cqn == u32::MAX && matches!(choice, Choice::Processor(_))));
        for bad in [
            &b""[..],
            b"7",
            b"7 3 1",
            b"7,3",
            b"-7 3",
            b"4294967296 0",
            b"7 nowhere",
            b"7 \xff",
            b"\0\0\0",
        ] {
            assert_eq!(parse_move(bad), Err(EINVAL));
        }
    }
}
