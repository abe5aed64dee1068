// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Shared receive queues.

use crate::att::{Att, AttError};
use crate::core::Core;
use crate::memory::Host;
use crate::queue::{are_apart, Placement, QueueError, ReceiveQueue, ReceiveRequest, SharedId};
use crate::tpt::Domain;
use ferrite_abi::{
    CommandStatus, CreateSharedReceive, EventCode, ModifySharedReceive, Plain, ResizeSharedReceive,
    SharedReceiveState, DOORBELL_PAGES, FEATURE_EXTENDED_CONNECTED, RQ_MAX_LOG_ENTRIES,
    RQ_MAX_LOG_STRIDE, RQ_MIN_LOG_STRIDE, SRQ_FLAG_EXTENDED,
};

/// Shared receive queues: numbers from 0 to one less than this.
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

/// All shared receive queues.
#[derive(Debug, Default)]
pub struct SharedReceiveQueues {
    queues: Vec<Option<Box<SharedReceiveQueue>>>,
    /// Made so far.
    made: u64,
}

impl SharedReceiveQueues {
    pub(crate) fn get(&self, srqn: u32) -> Option<&SharedReceiveQueue> {
        self.queues.get(srqn as usize)?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, srqn: u32) -> Option<&mut SharedReceiveQueue> {
        self.queues.get_mut(srqn as usize)?.as_deref_mut()
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

    /// Whether an ordinary queue pair may use it.
    pub(crate) fn is_ordinary(&self, srqn: u32) -> bool {
        self.get(srqn).is_some_and(|queue| queue.extended.is_none())
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

/// The ring of a shared receive queue, where it and its record are apart.
fn place(host: &dyn Host, att: &Att, placement: Placement) -> Result<ReceiveQueue, CommandStatus> {
    if !are_apart(&[placement.ring_range(), placement.record_range()]) {
        return Err(CommandStatus::BadParameter);
    }
    ReceiveQueue::shared(host, att, placement).map_err(placement_status)
}

impl Core {
    /// Carries out `CreateSharedReceive`.
    pub(crate) fn create_srq(
        &mut self,
        command: &CreateSharedReceive,
        host: &dyn Host,
    ) -> Result<(), CommandStatus> {
        let srqn = command.srqn;
        if srqn >= MAX_SRQ {
            return Err(CommandStatus::BadNumber);
        }
        if command.flags & !SRQ_FLAG_EXTENDED != 0
            || command.log_entries > RQ_MAX_LOG_ENTRIES
            || !(RQ_MIN_LOG_STRIDE..=RQ_MAX_LOG_STRIDE).contains(&command.log_stride)
            || command.doorbell_page as usize >= DOORBELL_PAGES
        {
            return Err(CommandStatus::BadParameter);
        }
        if self.srqs.get(srqn).is_some() {
            return Err(CommandStatus::Exists);
        }
        let extended = if command.flags & SRQ_FLAG_EXTENDED != 0 {
            if self.features & FEATURE_EXTENDED_CONNECTED == 0 {
                return Err(CommandStatus::Unsupported);
            }
            if command.xrcd == 0 || command.xrcd >= MAX_XRCD {
                return Err(CommandStatus::BadNumber);
            }
            if !self.cqs.exists(command.cqn) {
                return Err(CommandStatus::NotFound);
            }
            Some(Extended {
                xrcd: command.xrcd,
                cqn: command.cqn,
            })
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
        let index = srqn as usize;
        if self.srqs.queues.len() <= index {
            self.srqs.queues.resize_with(index + 1, || None);
        }
        self.srqs.made += 1;
        self.srqs.queues[index] = Some(Box::new(SharedReceiveQueue {
            serial: self.srqs.made,
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

    /// Carries out `ModifySharedReceive`.
    pub(crate) fn modify_srq(
        &mut self,
        command: &ModifySharedReceive,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        let queue = self
            .srqs
            .get_mut(command.srqn)
            .ok_or(CommandStatus::NotFound)?;
        if command.limit > queue.ring.entries() {
            return Err(CommandStatus::BadParameter);
        }
        queue.limit = command.limit;
        self.check_limit(command.srqn, host);
        Ok(())
    }

    /// Carries out `ResizeSharedReceive`.
    pub(crate) fn resize_srq(
        &mut self,
        command: &ResizeSharedReceive,
        host: &mut dyn Host,
    ) -> Result<(), CommandStatus> {
        let queue = self
            .srqs
            .get_mut(command.srqn)
            .ok_or(CommandStatus::NotFound)?;
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
        let other = place(host, &att, placement)?;
        self.work += u64::from(queue.available());
        queue.ring.move_to(&*host, other).map_err(|error| {
            if let QueueError::Memory(error) = error {
                placement_status(error)
            } else {
                CommandStatus::BadParameter
            }
        })
    }

    /// Carries out `QuerySharedReceive`.
    pub(crate) fn query_srq(
        &mut self,
        srqn: u32,
        host: &dyn Host,
    ) -> Result<SharedReceiveState, CommandStatus> {
        let queue = self.srqs.get_mut(srqn).ok_or(CommandStatus::NotFound)?;
        // Where the record makes no sense, what is known is what counts.
        let _ = queue.ring.refresh(host);
        Ok(SharedReceiveState {
            limit: queue.limit,
            available: queue.available(),
            ..SharedReceiveState::zeroed()
        })
    }

    /// Carries out `DestroySharedReceive`.
    pub(crate) fn destroy_srq(&mut self, srqn: u32) -> Result<(), CommandStatus> {
        let queue = self.srqs.get(srqn).ok_or(CommandStatus::NotFound)?;
        if queue.users > 0 {
            return Err(CommandStatus::Busy);
        }
        if let Some(cq) = queue
            .extended
            .and_then(|extended| self.cqs.get_mut(extended.cqn))
        {
            cq.users = cq.users.saturating_sub(1);
        }
        self.srqs.queues[srqn as usize] = None;
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
            self.async_event(EventCode::SharedReceiveLimit, srqn, host);
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
                self.async_event(EventCode::SharedReceiveError, srqn, host);
            }
            // No entry is to blame.
            return Err(QueueError::Producer);
        }
        self.check_limit(srqn, host);
        taken
    }
}
