// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! The ring and its record are host memory: of the process for its own queues, coherent memory for
//! those of the kernel. Only the latter are polled here.

mod reader;
mod user;

pub(crate) use self::user::{
    MoveCq,
    QueryCq, //
};
use self::{
    reader::{
        Entries,
        Reader,
        VALID_WORD, //
    },
    user::Size, //
};
use crate::{
    abi,
    abi::{
        CommandOpcode,
        CompletionDoorbell,
        CompletionEntry,
        CreateCompletionQueue,
        UverbsCqResponse, //
    },
    binding::{
        Binding,
        SharedBinding,
        Who, //
    },
    commands::DeviceObject,
    device::{
        told_to_kernel,
        Ferrite, //
    },
    dma_types::Block,
    handler::Choice,
    hardware::Hardware,
    kernel_ext::{
        barrier::mb,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        }, //
    },
    lent::Lent,
    numbers::Number,
    qp::FerriteQp,
    queue::{
        announce,
        QueueMemory,
        QueuePlace, //
    },
    rdma::{
        kind,
        Completions,
        Cq,
        CqInitAttr,
        CqOps,
        Details,
        Device,
        New,
        Notify,
        Qp,
        QpRef,
        Udata, //
    },
    ring::KernelBlocks,
    shares::Holder, //
};
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        barrier::smp_mb, //
    }, //
};

/// The queue pair number that stands in no entry.
const NO_QUEUE_PAIR: u32 = 0;

const _: () = {
    assert!(core::mem::offset_of!(CompletionEntry, qpn) == 0);
    assert!(core::mem::offset_of!(CompletionEntry, phase) == VALID_WORD * 4 + 3);
    assert!(core::mem::size_of::<CompletionEntry>() == core::mem::size_of::<Block>());
};

/// What polling changes.
struct Polling {
    reader: Reader,
    /// Number of armings, for the sequence.
    armings: u8,
    /// The queue pairs that complete here.
    qps: RBTree<u32, QpRef<Ferrite>>,
}

/// A queue that the kernel polls.
#[pin_data]
struct KernelQueue {
    /// The ring, written by the device, then the record, written by the driver.
    ring: Lent<KernelBlocks>,
    #[pin]
    polling: IrqSpinLock<Polling>,
}

/// In place of the number of a processor or a handler: none.
const NOWHERE: u32 = u32::MAX;

fn number_of(number: Option<impl Into<u32>>) -> u32 {
    number.map_or(NOWHERE, Into::into)
}

/// The driver's data of a completion queue.
///
/// The fields are dropped in order: the device lets go of the queue before its memory goes, and
/// the number is free after that.
#[pin_data]
pub(crate) struct FerriteCq {
    object: DeviceObject,
    memory: QueueMemory<KernelQueue>,
    number: Number,
    #[pin]
    binding: SharedBinding,
    /// That of `binding`, or [`NOWHERE`], for those who may not sleep.
    handler: Atomic<u32>,
    /// The processor of that, or [`NOWHERE`].
    follows: Atomic<u32>,
    log_entries: u8,
    progress: Progress,
}

/// How many completions the kernel has consumed, for those who want to know without the queue's lock.
struct Progress {
    consumed: Atomic<u32>,
    /// What that was at the last event.
    at_event: Atomic<u32>,
}

impl Progress {
    /// No more were consumed between two events, or it does not matter that there were.
    const MOST: i32 = 1 << 16;

    const fn new() -> Self {
        Self {
            consumed: Atomic::new(0),
            at_event: Atomic::new(0),
        }
    }

    /// Notes that so many were consumed, free-running.
    #[inline]
    fn note(&self, consumed: u32) {
        self.consumed.store(consumed, Relaxed);
    }

    /// An event came: how many were consumed since the last one, at least the one that it is about.
    ///
    /// Several may ask at once, as a queue that was moved has events at two handlers: what was consumed
    /// may then seem to go back.
    #[inline]
    fn event(&self) -> u32 {
        let consumed = self.consumed.load(Relaxed);
        let before = self.at_event.load(Relaxed);
        self.at_event.store(consumed, Relaxed);
        (consumed.wrapping_sub(before) as i32).clamp(1, Self::MOST) as u32
    }
}

impl FerriteCq {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }

    /// Its handler, if it has one.
    pub(crate) fn handler(&self) -> Option<u16> {
        u16::try_from(self.handler.load(Relaxed)).ok()
    }

    /// Completions consumed, for a queue that the kernel polls.
    pub(crate) fn consumed(&self) -> Option<u32> {
        let queue = self.memory.kernel()?;
        Some(queue.polling.lock().reader.consumer)
    }

    fn create<'a>(
        dev: &Device<Ferrite>,
        mut new: New<'a, kind::Cq, Ferrite>,
        attr: &CqInitAttr,
        size: Size,
        (memory, place): (QueueMemory<KernelQueue>, QueuePlace),
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<&'a Cq<Ferrite>> {
        let log_entries = size.log_entries;
        let number = dev.cqns.take(Holder::of(udata.is_some()))?;
        let cqn = number.get();
        // The core has seen that there is such a vector, of processes at least.
        let vector = attr.comp_vector % dev.handlers.count();
        let (choice, who) = match udata {
            None => (Choice::Vector(vector), Who::Kernel),
            Some(_) => (Choice::of_process(vector), Who::Process),
        };
        // Most say a vector without a thought: it is no request for what they may not have.
        let may_have_any = who.may_have_any(choice);
        let handler = dev.handlers.choose(choice, None, || may_have_any)?;
        let first = Binding::new(handler, choice.follows(), may_have_any);
        let destination = dev.handlers.destination(handler);
        let object = DeviceObject::create(
            &dev.hw,
            &CreateCompletionQueue {
                cqn,
                eqn: destination.eqn,
                log_entries,
                reserved0: 0,
                doorbell_page: place.doorbell_page,
                record_offset: size.record_offset,
                buffer: place.buffer,
                processor: destination.processor,
                reserved1: [0; 3],
            },
            CommandOpcode::DestroyCompletionQueue,
            cqn,
        )?;
        new.set_entries(1 << log_entries);
        let cq = new.init(pin_init!(Self {
            object,
            memory,
            number,
            binding <- SharedBinding::new(first),
            handler: Atomic::new(number_of(handler)),
            follows: Atomic::new(number_of(first.follows)),
            log_entries,
            progress: Progress::new(),
        }))?;
        let found = cq.get_ref().ok_or(ENODEV)?;
        announce(&dev.hw.cqs, cqn, found, || match udata {
            Some(udata) => udata.respond(&UverbsCqResponse {
                cqn,
                entries: 1 << log_entries,
            }),
            None => Ok(()),
        })?;
        // An interrupt may have been steered elsewhere, or a handler marked, before it was there to be found.
        Self::settle(cq);
        Ok(cq)
    }

    /// Memory of a queue for the kernel.
    fn kernel_memory(
        dev: &Device<Ferrite>,
        attr: &CqInitAttr,
    ) -> Result<(Size, (QueueMemory<KernelQueue>, QueuePlace))> {
        if attr.entries == 0 || attr.entries > 1 << dev.caps.cq_max_log_entries {
            return Err(EINVAL);
        }
        let entries = attr.entries.next_power_of_two() as usize;
        let log_entries = entries.trailing_zeros() as u8;
        // The ring, then the record.
        let size = Size {
            log_entries,
            record_offset: (entries * abi::BLOCK_SIZE) as u32,
        };
        let memory = QueueMemory::<KernelQueue>::of_kernel(dev, entries + 1, |ring| {
            try_pin_init!(KernelQueue {
                ring,
                polling <- new_irq_spinlock!(
                    Polling {
                        reader: Reader::new(log_entries),
                        armings: 0,
                        qps: RBTree::new(),
                    },
                    "ferrite_cq"
                ),
            }? Error)
        })?;
        Ok((size, memory))
    }

    /// Changes where its events go, or how many at a time, by `change`, which is given what they are.
    fn rebind(cq: &Cq<Ferrite>, change: impl FnOnce(&mut Binding) -> Result) -> Result {
        let settle = |binding: &mut Binding| Self::settle_binding(cq, binding);
        cq.binding.change(change, settle)
    }

    /// Tells the device of a change of its binding.
    fn change(
        cq: &Cq<Ferrite>,
        binding: &mut Binding,
        change: impl FnOnce(&mut Binding),
    ) -> Result {
        let dev = cq.device();
        if dev.hw.is_dead() {
            // Whether or not there is anything to tell it.
            return Err(EIO);
        }
        binding.change(
            cq.number(),
            change,
            |handler| dev.handlers.destination(handler),
            |command| dev.hw.execute(command),
        )?;
        cq.handler.store(number_of(binding.handler), Relaxed);
        cq.follows.store(number_of(binding.follows), Relaxed);
        Ok(())
    }

    /// Moves a queue, which may be in use, to another handler or to none. An arming moves along: one
    /// that was fulfilled while there was no handler fires at the new one. `EINVAL` where there is no
    /// such handler, `EPERM` where `who` may not have it.
    ///
    /// An event that the device wrote before is still passed on by the handler it was written for.
    ///
    /// The core's `comp_vector` stays what the queue was made with: its pool of shared queues, which
    /// alone reads it, goes on to give the queue to those who ask for that one.
    ///
    /// One that is moved to where a processor is follows: see [`Self::settle`].
    pub(crate) fn move_to(cq: &Cq<Ferrite>, choice: Choice, who: Who) -> Result {
        Self::rebind(cq, |binding| {
            // Chosen with the lock held: an interrupt that is steered elsewhere meanwhile is followed.
            let handlers = &cq.device().handlers;
            let handler = handlers.choose(choice, binding.handler, || who.may_have(choice))?;
            let may_have_any = who.may_have_any(choice);
            Self::change(cq, binding, |binding| {
                binding.handler = handler;
                binding.follows = choice.follows();
                binding.may_have_any = may_have_any;
            })
        })
    }

    /// Has a queue go where it belongs: one that follows a processor to a handler that arrives there, where its own
    /// does not and there is one, and one that may not be at a handler of low latency to another one.
    fn settle(cq: &Cq<Ferrite>) {
        cq.binding
            .settle(|binding| Self::settle_binding(cq, binding));
    }

    /// The same with the binding locked.
    fn settle_binding(cq: &Cq<Ferrite>, binding: &mut Binding) {
        let handlers = &cq.device().handlers;
        let handler = handlers.settle(binding.handler, binding.follows, binding.may_have_any);
        // What the device refuses stays where it is.
        let _ = handler
            .and_then(|handler| Self::change(cq, binding, |binding| binding.handler = handler));
    }

    /// The same for all queues: interrupts arrive elsewhere, or handlers have another priority.
    ///
    /// The commands are the kernel's, one at a time, and not those of the queues' owners: behind all that one of them
    /// has asked for, everybody else's queues would wait.
    pub(crate) fn settle_all(hw: &Hardware) {
        let mut next = hw.cqs.next_index(0);
        while let Some(index) = next.filter(|_| !hw.is_dead()) {
            if let Some(cq) = hw.cqs.get(index) {
                Self::settle(&cq);
            }
            next = hw.cqs.next_index(index + 1);
        }
    }

    /// The processor that it follows, if it follows one.
    pub(crate) fn follows(&self) -> Option<u32> {
        let cpu = self.follows.load(Relaxed);
        (cpu != NOWHERE).then_some(cpu)
    }

    /// Gives all queues of the kernel that have no handler one again. Those who drain a queue pair, or
    /// wait for the last of their sends, do so without end.
    pub(crate) fn restore_handlers(hw: &Hardware) {
        let mut next = hw.cqs.next_index(0);
        while let Some(index) = next {
            let cq = hw.cqs.get(index);
            if let Some(cq) = cq.filter(|cq| !cq.is_user() && cq.handler().is_none()) {
                // Any will do.
                let vector = cq.number() % cq.device().handlers.count().max(1);
                if Self::move_to(&cq, Choice::Vector(vector), Who::Kernel).is_err() {
                    // The device does not answer: consumers find their work requests flushed.
                    Self::notify(&cq);
                }
            }
            next = hw.cqs.next_index(index + 1);
        }
    }

    /// Passes an event on to the consumer. Returns how many completions there were since the last one,
    /// as far as is known: one where a process consumes them. May be called from any context.
    #[inline]
    pub(crate) fn notify(cq: &Cq<Ferrite>) -> u32 {
        cq.complete();
        cq.progress.event()
    }

    /// Lets completions of `qp` be found, where the kernel polls the queue.
    pub(crate) fn attach(cq: &Cq<Ferrite>, qp: &Qp<Ferrite>) -> Result {
        if let Some(queue) = cq.memory.kernel() {
            let node = RBTreeNode::new(qp.number(), qp.get_ref().ok_or(ENODEV)?, GFP_KERNEL)?;
            let replaced = queue.polling.lock().qps.insert(node);
            // The same queue pair, where both its queues complete here.
            drop(replaced);
        }
        Ok(())
    }

    /// Drops the completions of a queue pair that is going: they are skipped from now on.
    pub(crate) fn detach(cq: &Cq<Ferrite>, qpn: u32) {
        if let Some(queue) = cq.memory.kernel() {
            let removed = queue.polling.lock().qps.remove(&qpn);
            drop(removed);
        }
    }

    /// Makes completions of a queue pair that was reset belong to none, so that they are skipped.
    pub(crate) fn purge(cq: &Cq<Ferrite>, qpn: u32, mut forget: impl FnMut(&CompletionEntry)) {
        let Some(queue) = cq.memory.kernel() else {
            return;
        };
        let polling = queue.polling.lock();
        let mut ahead = Reader {
            consumer: polling.reader.consumer,
            log_entries: polling.reader.log_entries,
        };
        for _ in 0..1usize << cq.log_entries {
            let slot = ahead.slot();
            match ahead.next(&*queue.ring) {
                Some(entry) if entry.qpn == qpn => {
                    forget(&entry);
                    let _ = queue.ring.disown(slot);
                }
                Some(_) => {}
                None => break,
            }
        }
    }
}

#[vtable]
impl CqOps for Ferrite {
    type Cq = FerriteCq;

    fn create_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>> {
        let memory = FerriteCq::kernel_memory(dev, attr);
        let created =
            memory.and_then(|(size, memory)| FerriteCq::create(dev, new, attr, size, memory, None));
        told_to_kernel(dev, created)
    }

    /// Ends a queue: afterwards no event finds it and its memory is left alone.
    fn destroy_cq(cq: &Cq<Self>) -> Result {
        // First: an event that the device wrote meanwhile must not reach a consumer who has given
        // the queue up, nor may a failure of the device.
        drop(cq.device().hw.cqs.remove(cq.number() as usize));
        cq.object.destroy();
        Ok(())
    }

    /// Takes completions off the queue.
    fn poll_cq(cq: &Cq<Self>, completions: &mut Completions<'_>) -> Result {
        let queue = cq.memory.kernel().ok_or(EINVAL)?;
        let mut polling = queue.polling.lock();
        let polling = &mut *polling;
        let before = polling.reader.consumer;
        // More than a ring full there cannot be: a device that writes on without end, of no queue
        // pair that there is, does not hold the processor.
        for _ in 0..1usize << cq.log_entries {
            if completions.is_full() {
                break;
            }
            let Some(entry) = polling.reader.next(&*queue.ring) else {
                break;
            };
            let Some(qp) = polling.qps.get(&entry.qpn) else {
                // Of a queue pair that is gone.
                continue;
            };
            if let Some(wc) = FerriteQp::completion(qp, &entry) {
                completions.push(&wc);
            }
        }
        if polling.reader.consumer != before {
            let record = 1usize << cq.log_entries;
            let consumer = polling.reader.consumer;
            // The device may overwrite the entries from now on: they have been read.
            mb();
            queue.ring.set_word(record, 0, consumer)?;
            cq.progress.note(consumer);
        }
        // Not earlier: a consumer takes what was flushed for its own again.
        if cq.device().hw.is_stopped() {
            for qp in polling.qps.values() {
                while !completions.is_full() {
                    let Some(wc) = FerriteQp::flush_one(qp, cq.number()) else {
                        break;
                    };
                    completions.push(&wc);
                }
            }
        }
        Ok(())
    }

    /// Asks for an event for what comes from now on. Returns true where that is wanted and there
    /// are completions that the caller has not polled: no event comes for those, nor for what a device that
    /// failed leaves to be flushed.
    fn req_notify_cq(cq: &Cq<Self>, notify: Notify) -> Result<bool> {
        let queue = cq.memory.kernel().ok_or(EINVAL)?;
        let mut polling = queue.polling.lock();
        polling.armings = polling.armings.wrapping_add(1);
        // The device makes up for what comes between this look and the doorbell.
        let seen = polling.reader.end(&*queue.ring);
        let doorbell = CompletionDoorbell {
            cqn: cq.number(),
            seen,
            sequence: polling.armings & 3,
            solicited: notify.solicited,
        };
        cq.device().hw.doorbells.completion(doorbell);
        if !notify.report_missed {
            return Ok(false);
        }
        // A consumer that polled before the device was stopped, and was still at it when all were told of that,
        // takes no notice: a poll that is under way is not begun again. It has marked its end before it came here,
        // and who tells looks at that mark after the device is known to be stopped: one of both sees the other.
        smp_mb();
        let flushes = || {
            let mut qps = polling.qps.values();
            cq.device().hw.is_stopped() && qps.any(|qp| FerriteQp::has_to_flush(qp, cq.number()))
        };
        Ok(seen != polling.reader.consumer || flushes())
    }

    /// Sets the moderation: an event after `count` completions, or `period` microseconds.
    fn modify_cq(cq: &Cq<Self>, count: u16, period: u16) -> Result {
        FerriteCq::rebind(cq, |binding| {
            FerriteCq::change(cq, binding, |binding| {
                binding.moderation_count = count;
                binding.moderation_microseconds = period;
            })
        })
    }

    fn describe_cq(cq: &Cq<Self>, details: &mut Details<'_>) -> Result {
        details.number(c"cqn", cq.number())?;
        let handlers = &cq.device().handlers;
        match cq.handler() {
            Some(handler) => {
                details.number(c"eqn", handlers.main_queue(handler).into())?;
                details.number(c"vector", handler.into())?;
            }
            None => details.text(c"vector", c"none")?,
        }
        match cq.consumed() {
            Some(consumed) => details.number(c"consumed", consumed),
            None => Ok(()),
        }
    }
}

#[kunit_tests(ferrite_cq)]
mod tests {
    use super::*;
    use crate::abi::Plain;
    use core::cell::RefCell;

    struct Memory(RefCell<KVec<CompletionEntry>>);

    impl Memory {
        fn new(entries: usize) -> Result<Self> {
            let mut memory = KVec::with_capacity(entries, GFP_KERNEL)?;
            for _ in 0..entries {
                memory.push(CompletionEntry::zeroed(), GFP_KERNEL)?;
            }
            Ok(Self(RefCell::new(memory)))
        }

        /// Writes completion `index` as the device does.
        fn complete(&self, index: u32, log_entries: u8) {
            let slot = (index & ((1 << log_entries) - 1)) as usize;
            self.0.borrow_mut()[slot] = CompletionEntry {
                index,
                phase: abi::phase_of(index, log_entries),
                ..CompletionEntry::zeroed()
            };
        }
    }

    impl Entries for Memory {
        fn valid_word(&self, slot: usize) -> Result<u32> {
            let entries = self.0.borrow();
            Ok(u32::from(entries.get(slot).ok_or(EINVAL)?.phase) << 24)
        }

        fn entry(&self, slot: usize) -> Result<CompletionEntry> {
            self.0.borrow().get(slot).copied().ok_or(EINVAL)
        }

        fn disown(&self, slot: usize) -> Result {
            self.0.borrow_mut().get_mut(slot).ok_or(EINVAL)?.qpn = NO_QUEUE_PAIR;
            Ok(())
        }
    }

    #[test]
    fn an_event_tells_how_many_completions_there_were_since_the_last_one() {
        let progress = Progress::new();
        // Nobody tells how many a process has consumed.
        assert_eq!((progress.event(), progress.event()), (1, 1));
        progress.note(5);
        progress.note(12);
        assert_eq!((progress.event(), progress.event()), (12, 1));
        let progress = Progress::new();
        progress.note(u32::MAX);
        progress.event();
        progress.note(9);
        assert_eq!(progress.event(), 10);
        // Another event was faster.
        progress.at_event.store(20, Relaxed);
        assert_eq!(progress.event(), 1);
        progress.note(u32::MAX / 2 - 10);
        assert_eq!(progress.event(), Progress::MOST as u32);
    }

    #[test]
    fn a_zeroed_ring_has_no_completion() -> Result {
        let memory = Memory::new(8)?;
        assert!(Reader::new(3).next(&memory).is_none());
        Ok(())
    }

    #[test]
    fn completions_of_the_last_round_are_not_seen_again() -> Result {
        let memory = Memory::new(8)?;
        let mut reader = Reader::new(3);
        for index in 0..50 {
            assert!(!reader.ready(&memory));
            memory.complete(index, 3);
            let entry = reader.next(&memory).ok_or(EINVAL)?;
            assert_eq!(entry.index, index);
            assert!(reader.next(&memory).is_none());
        }
        Ok(())
    }

    #[test]
    fn a_full_ring_is_read_to_its_end_and_no_further() -> Result {
        let memory = Memory::new(8)?;
        let mut reader = Reader::new(3);
        for round in 0..3u32 {
            for index in 0..8 {
                assert_eq!(reader.end(&memory), round * 8 + index);
                memory.complete(round * 8 + index, 3);
            }
            assert_eq!(reader.end(&memory), round * 8 + 8);
            for index in 0..8 {
                assert_eq!(reader.next(&memory).ok_or(EINVAL)?.index, round * 8 + index);
            }
            assert!(reader.next(&memory).is_none());
        }
        Ok(())
    }

    #[test]
    fn the_phase_goes_on_where_the_index_wraps() -> Result {
        let memory = Memory::new(8)?;
        let mut reader = Reader::new(3);
        reader.consumer = u32::MAX - 2;
        for step in 0..20 {
            let index = (u32::MAX - 2).wrapping_add(step);
            memory.complete(index, 3);
            assert_eq!(reader.next(&memory).ok_or(EINVAL)?.index, index);
        }
        Ok(())
    }
}
