// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Shared receive queues.

use crate::att::{Att, AttError};
use crate::core::Core;
use crate::memory::Host;
use crate::numbers::{NumberTable, Numbers};
use crate::queue::{are_apart, Placement, QueueError, ReceiveQueue, ReceiveRequest, SharedId};
use crate::tpt::Domain;
use ferrite_abi::{
    CommandStatus, CreateSrq, EventCode, ModifySrq, Plain, ResizeSrq, SrqState, FEATURE_CONTEXTS,
    FEATURE_XRC, RQ_MAX_LOG_ENTRIES, RQ_MAX_LOG_STRIDE, RQ_MIN_LOG_STRIDE, SRQ_FLAG_XRC,
};

/// Shared receive queues.
pub const MAX_SRQ: u32 = 1 << 13;
/// XRC domains: numbers from 1 to one less than this.
pub const MAX_XRCD: u32 = 1 << 16;

/// What makes a shared receive queue one of extended connections.
#[derive(Clone, Copy, Debug)]
struct Extended {
    xrcd: u32,
    /// Completion queue of what it receives.
    cqn: u32,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    serial: u64,
    pd: u32,
    doorbell_page: u32,
    ring: ReceiveQueue,
    /// Raise an event when fewer entries are left; 0 for none.
    limit: u32,
    /// Queue pairs that use it.
    pub(crate) users: u32,
    extended: Option<Extended>,
    /// Ring or record failed, and the driver was told.
    dead: bool,
}

impl SharedReceiveQueue {
    /// Entries posted and not taken.
    fn available(&self) -> u32 {
        self.ring.producer().wrapping_sub(self.ring.next())
    }

    /// The completion queue of its own that it has for extended connections.
    pub(crate) fn cqn(&self) -> Option<u32> {
        Some(self.extended?.cqn)
    }
}

/// A resize that is under way.
#[derive(Debug)]
pub(crate) struct Resize {
    srqn: u32,
    ring: ReceiveQueue,
    /// The next entry to move.
    next: u32,
    /// The index after the last one, as both records said at the beginning.
    producer: u32,
}

/// All shared receive queues.
#[derive(Debug)]
pub struct SharedReceiveQueues {
    queues: NumberTable<SharedReceiveQueue>,
    /// Made so far.
    made: u64,
}

impl SharedReceiveQueues {
    pub(crate) fn new(numbers: Numbers) -> Self {
        Self {
            queues: NumberTable::new(numbers),
            made: 0,
        }
    }

    pub(crate) fn get(&self, srqn: u32) -> Option<&SharedReceiveQueue> {
        self.queues.get(srqn)
    }

    pub(crate) fn get_mut(&mut self, srqn: u32) -> Option<&mut SharedReceiveQueue> {
        self.queues.get_mut(srqn)
    }

    /// The very queue that an entry was taken from, if it is still there.
    pub(crate) fn current(&self, shared: SharedId) -> Option<&SharedReceiveQueue> {
        self.get(shared.srqn)
            .filter(|queue| queue.serial == shared.serial)
    }

    /// The protection domain of a shared receive queue that serves extended connections of the
    /// XRC domain `xrcd`.
    pub(crate) fn domain(&self, srqn: u32, xrcd: u32) -> Option<u32> {
        let queue = self.get(srqn)?;
        (queue.extended?.xrcd == xrcd).then_some(queue.pd)
    }

    /// Refuses the number of a queue that an ordinary queue pair cannot use.
    pub(crate) fn check_ordinary(&self, srqn: u32) -> Result<(), CommandStatus> {
        match self.queues.find(srqn)?.extended {
            None => Ok(()),
            Some(_) => Err(CommandStatus::NotFound),
        }
    }

    /// Whether it exists and answers to the page.
    pub(crate) fn answers_to(&self, srqn: u32, page: u32) -> bool {
        self.get(srqn)
            .is_some_and(|queue| queue.doorbell_page == page)
    }
}

fn placement_status(error: AttError) -> CommandStatus {
    match error {
        AttError::Memory(_) => CommandStatus::HostMemory,
        _ => CommandStatus::BadParameter,
    }
}

fn move_status(error: QueueError) -> CommandStatus {
    match error {
        QueueError::Memory(error) => placement_status(error),
        _ => CommandStatus::BadParameter,
    }
}

/// The ring of a shared receive queue, where it and its record are apart.
fn place(host: &dyn Host, att: &Att, placement: Placement) -> Result<ReceiveQueue, CommandStatus> {
    if !are_apart(&[placement.ring_range(), placement.record_range()]) {
        return Err(CommandStatus::BadParameter);
    }
    ReceiveQueue::shared(host, att, placement).map_err(placement_status)
}

impl Core {
    /// Carries out `CreateSrq`.
    pub(crate) fn create_srq(
        &mut self,
        command: &CreateSrq,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        let srqn = command.srqn;
        self.srqs.queues.check(srqn)?;
        if command.flags & !SRQ_FLAG_XRC != 0
            || command.log_entries > RQ_MAX_LOG_ENTRIES
            || !(RQ_MIN_LOG_STRIDE..=RQ_MAX_LOG_STRIDE).contains(&command.log_stride)
            || command.doorbell_page >= self.config.doorbell_pages
        {
            return Err(CommandStatus::BadParameter);
        }
        if self.srqs.get(srqn).is_some() {
            return Err(CommandStatus::Exists);
        }
        let extended = if command.flags & SRQ_FLAG_XRC != 0 {
            if self.features & FEATURE_XRC == 0 {
                return Err(CommandStatus::Unsupported);
            }
            if command.xrcd == 0 || command.xrcd >= MAX_XRCD {
                return Err(CommandStatus::BadNumber);
            }
            self.cqs.check(command.cqn)?;
            Some(Extended {
                xrcd: command.xrcd,
                cqn: command.cqn,
            })
        } else if command.xrcd != 0 || command.cqn != 0 {
            return Err(CommandStatus::BadParameter);
        } else {
            None
        };
        let att = Att::new(&command.buffer).map_err(placement_status)?;
        let placement = Placement {
            ring_offset: command.ring_offset,
            log_entries: command.log_entries,
            log_stride: command.log_stride,
            record_offset: command.record_offset,
        };
        let mut ring = place(host, &att, placement)?;
        ring.reset(host).map_err(|_| CommandStatus::HostMemory)?;
        if let Some(cq) = extended.and_then(|extended| self.cqs.get_mut(extended.cqn)) {
            cq.users = cq.users.saturating_add(1);
        }
        self.srqs.made += 1;
        let serial = self.srqs.made;
        *self.srqs.queues.slot(srqn)? = Some(Box::new(SharedReceiveQueue {
            serial,
            pd: command.pd,
            doorbell_page: command.doorbell_page,
            ring,
            limit: 0,
            users: 0,
            extended,
            dead: false,
        }));
        Ok(())
    }

    /// Carries out `ModifySrq`.
    pub(crate) fn modify_srq(
        &mut self,
        command: &ModifySrq,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        let queue = self.srqs.queues.find_mut(command.srqn)?;
        if command.limit > queue.ring.entries() {
            return Err(CommandStatus::BadParameter);
        }
        queue.limit = command.limit;
        self.check_limit(command.srqn, host);
        Ok(())
    }

    /// Begins to carry out `ResizeSrq`.
    pub(crate) fn begin_srq_resize(
        &mut self,
        command: &ResizeSrq,
        host: &dyn Host,
    ) -> Result<Resize, CommandStatus> {
        let queue = self.srqs.queues.find_mut(command.srqn)?;
        if command.log_entries > RQ_MAX_LOG_ENTRIES {
            return Err(CommandStatus::BadParameter);
        }
        if queue.dead {
            return Err(CommandStatus::BadState);
        }
        let att = Att::new(&command.buffer).map_err(placement_status)?;
        let placement = Placement {
            ring_offset: command.ring_offset,
            log_entries: command.log_entries,
            log_stride: queue.ring.log_stride(),
            record_offset: command.record_offset,
        };
        let ring = place(host, &att, placement)?;
        queue.ring.begin_move(host, &ring).map_err(move_status)?;
        Ok(Resize {
            srqn: command.srqn,
            ring,
            next: queue.ring.next(),
            producer: queue.ring.producer(),
        })
    }

    /// Goes on with a resize: moves `limit` entries at most. `None` when there are more. Messages
    /// that come in meanwhile take entries of the old ring.
    pub(crate) fn resize_srq_some(
        &mut self,
        resize: &mut Resize,
        limit: u32,
        host: &dyn Host,
    ) -> Option<Result<(), CommandStatus>> {
        let Some(queue) = self.srqs.get_mut(resize.srqn).filter(|queue| !queue.dead) else {
            return Some(Err(CommandStatus::BadState));
        };
        // What was taken since need not be moved.
        let taken = queue.ring.next().wrapping_sub(resize.next);
        if taken <= resize.producer.wrapping_sub(resize.next) {
            resize.next = queue.ring.next();
        }
        for _ in 0..limit {
            if resize.next == resize.producer {
                break;
            }
            self.work += 1;
            if let Err(error) = queue.ring.copy_entry(host, &resize.ring, resize.next) {
                return Some(Err(move_status(error)));
            }
            resize.next = resize.next.wrapping_add(1);
        }
        if resize.next != resize.producer {
            return None;
        }
        let moved = queue.ring.end_move(host, &resize.ring, resize.producer);
        Some(moved.map_err(move_status))
    }

    /// Carries out `QuerySrq`.
    pub(crate) fn query_srq(
        &mut self,
        srqn: u32,
        host: &dyn Host,
    ) -> Result<SrqState, CommandStatus> {
        let queue = self.srqs.queues.find_mut(srqn)?;
        // Where the record makes no sense, what is known is what counts.
        let _ = queue.ring.refresh(host);
        let state = SrqState {
            limit: queue.limit,
            available: queue.available(),
            ..SrqState::zeroed()
        };
        if self.features & FEATURE_CONTEXTS == 0 {
            return Ok(state);
        }
        let extended = queue.extended;
        Ok(SrqState {
            srqn,
            pd: queue.pd,
            doorbell_page: queue.doorbell_page,
            users: queue.users,
            producer: queue.ring.producer(),
            next: queue.ring.next(),
            xrcd: extended.map_or(0, |extended| extended.xrcd),
            cqn: extended.map_or(0, |extended| extended.cqn),
            flags: extended.map_or(0, |_| SRQ_FLAG_XRC),
            log_entries: queue.ring.log_entries(),
            log_stride: queue.ring.log_stride(),
            failed: u8::from(queue.dead),
            ..state
        })
    }

    /// Carries out `DestroySrq`.
    pub(crate) fn destroy_srq(&mut self, srqn: u32) -> Result<(), CommandStatus> {
        let queue = self.srqs.queues.find(srqn)?;
        if queue.users > 0 {
            return Err(CommandStatus::Busy);
        }
        if let Some(cq) = queue
            .extended
            .and_then(|extended| self.cqs.get_mut(extended.cqn))
        {
            cq.users = cq.users.saturating_sub(1);
        }
        self.srqs.queues.take(srqn);
        self.forget_shared_receive_events(srqn);
        Ok(())
    }

    /// Raises the limit event when it is due.
    fn check_limit(&mut self, srqn: u32, host: &mut dyn Host) {
        let Some(queue) = self.srqs.get_mut(srqn) else {
            return;
        };
        if queue.limit == 0 {
            return;
        }
        let _ = queue.ring.refresh(&*host);
        if queue.available() < queue.limit {
            queue.limit = 0;
            self.async_event(EventCode::SrqLimit, srqn, host);
        }
    }

    /// Takes the next entry of a shared receive queue. `request.domain` is that of the queue pair
    /// and becomes that of the entry.
    pub(crate) fn take_shared(
        &mut self,
        srqn: u32,
        request: &mut ReceiveRequest,
        host: &mut dyn Host,
    ) -> Result<bool, QueueError> {
        let Some(queue) = self.srqs.get_mut(srqn) else {
            return Ok(false);
        };
        request.shared = Some(SharedId {
            srqn,
            serial: queue.serial,
        });
        request.domain = Domain {
            pd: queue.pd,
            // A peer may name the queue: one of a process gives no more than a process may.
            privileged: request.domain.privileged && queue.doorbell_page == 0,
        };
        let taken = queue.ring.take(&*host, request);
        let next = queue.ring.next();
        // The entry was copied: its slot is free again.
        queue.ring.retire(next);
        if matches!(taken, Err(QueueError::Producer | QueueError::Memory(_))) {
            if !queue.dead {
                queue.dead = true;
                self.async_event(EventCode::SrqError, srqn, host);
            }
            // No entry is to blame.
            return Err(QueueError::Producer);
        }
        self.check_limit(srqn, host);
        taken
    }
}
