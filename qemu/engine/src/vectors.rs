// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The vector map: which event queue an event goes to, and by which message that then interrupts,
//! by the part of the function's work and by processor.

use crate::core::Core;
use crate::eq::{EventQueueState, MAX_EQ};
use ferrite_abi::{
    CommandStatus, EventCode, QueryVectorMap, SetVectorMap, SubFunction, VectorMapEntry, EQ_ASYNC,
    EQ_CONTROL, EQ_NONE, MESSAGE_OF_QUEUE, VECTOR_MAP_ENTRIES, VECTOR_MAP_PROCESSORS,
};

/// Rows of the map.
const ROWS: usize = SubFunction::Iscsi.number() as usize + 1;
const PROCESSORS: usize = VECTOR_MAP_PROCESSORS as usize;

/// An entry that is not there.
const ABSENT: VectorMapEntry = VectorMapEntry {
    eqn: EQ_NONE,
    message: MESSAGE_OF_QUEUE,
};

/// Where an event goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) eqn: u16,
    /// What the queue interrupts by, or [`MESSAGE_OF_QUEUE`].
    pub(crate) message: u16,
}

impl Route {
    /// To a queue, which interrupts as it always does.
    pub(crate) fn to(eqn: u16) -> Self {
        Self {
            eqn,
            message: MESSAGE_OF_QUEUE,
        }
    }
}

/// The map.
#[derive(Debug, Default)]
pub(crate) struct VectorMap {
    /// Row after row; nothing as long as the driver has set nothing.
    entries: Vec<VectorMapEntry>,
}

impl VectorMap {
    fn at(&self, row: SubFunction, processor: u16) -> VectorMapEntry {
        let index = usize::from(row.number()) * PROCESSORS + usize::from(processor);
        self.entries.get(index).copied().unwrap_or(ABSENT)
    }

    /// Where an event of a row goes on behalf of a processor, if the map says so.
    #[inline]
    fn find(&self, row: SubFunction, processor: u16) -> Option<Route> {
        if self.entries.is_empty() {
            return None;
        }
        // Whoever gives commands is answered where it looks, whatever it says of all the rest.
        let rows = if row == SubFunction::Commands {
            [row; 2]
        } else {
            [row, SubFunction::Any]
        };
        let mut entries = rows.into_iter().map(|row| self.at(row, processor));
        let VectorMapEntry { eqn, message } = entries.find(|entry| entry.eqn != EQ_NONE)?;
        Some(Route { eqn, message })
    }

    /// Whether the driver has set nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether an entry names a queue.
    pub(crate) fn names(&self, eqn: u16) -> bool {
        self.entries.iter().any(|entry| entry.eqn == eqn)
    }
}

/// The row of an event that is about no processor, and the queue where the map does not say.
///
/// `DeviceFatal` has none: see [`Core::last_event`].
fn row_of(code: EventCode) -> (SubFunction, u16) {
    match code {
        EventCode::CommandDone | EventCode::DeviceFatal => (SubFunction::Commands, EQ_CONTROL),
        EventCode::LinkChange
        | EventCode::EventQueueOverflow
        | EventCode::MemoryErrorInternal
        | EventCode::MemoryErrorExternal => (SubFunction::Global, EQ_CONTROL),
        EventCode::ManagementAction => (SubFunction::Management, EQ_CONTROL),
        EventCode::ChannelDescriptors => (SubFunction::Transmit, EQ_CONTROL),
        EventCode::ChannelPackets | EventCode::ChannelPoolLow | EventCode::ChannelBadBuffers => {
            (SubFunction::Receive, EQ_CONTROL)
        }
        // A completion event is routed by its completion queue.
        EventCode::Completion
        | EventCode::CompletionQueueError
        | EventCode::QueuePairFatal
        | EventCode::QueuePairRequestError
        | EventCode::QueuePairAccessError
        | EventCode::CommunicationEstablished
        | EventCode::SendQueueDrained
        | EventCode::LastWqeReached
        | EventCode::SrqLimit
        | EventCode::SrqError
        | EventCode::PageFaults => (SubFunction::Async, EQ_ASYNC),
    }
}

/// The row of the completion events of a queue.
pub(crate) fn completions(receive: bool) -> SubFunction {
    if receive {
        SubFunction::ReceiveCompletions
    } else {
        SubFunction::SendCompletions
    }
}

/// The row and the columns that a command is about.
fn range(sub_function: u8, first: u16, count: u16) -> Result<(SubFunction, usize), CommandStatus> {
    let row = SubFunction::from_number(sub_function).ok_or(CommandStatus::BadParameter)?;
    if !(1..=VECTOR_MAP_ENTRIES).contains(&usize::from(count))
        || usize::from(first) + usize::from(count) > PROCESSORS
    {
        return Err(CommandStatus::BadParameter);
    }
    Ok((
        row,
        usize::from(row.number()) * PROCESSORS + usize::from(first),
    ))
}

impl Core {
    /// Where an event that is about no processor goes.
    pub(crate) fn route(&self, code: EventCode) -> Route {
        let (row, queue) = row_of(code);
        self.vectors.find(row, 0).unwrap_or(Route::to(queue))
    }

    /// Where the event of a completion queue that is bound to the map goes.
    pub(crate) fn route_completion(&self, row: SubFunction, processor: u16) -> Route {
        let found = self.vectors.find(row, processor);
        found.unwrap_or(Route::to(EQ_ASYNC))
    }

    /// Where the event of a channel goes on behalf of a processor, if the map says so.
    pub(crate) fn route_channel(&self, row: SubFunction, processor: u16) -> Option<Route> {
        self.vectors.find(row, processor)
    }

    /// Carries out `SetVectorMap`.
    pub(crate) fn set_vector_map(&mut self, command: &SetVectorMap) -> Result<(), CommandStatus> {
        let (row, start) = range(command.sub_function, command.first, command.count)?;
        let (entries, rest) = command.entries.split_at(command.count.into());
        let unused = VectorMapEntry { eqn: 0, message: 0 };
        if rest.iter().any(|entry| *entry != unused) {
            return Err(CommandStatus::BadParameter);
        }
        for entry in entries {
            if entry.message != MESSAGE_OF_QUEUE && entry.message >= self.config.messages {
                return Err(CommandStatus::BadParameter);
            }
            match entry.eqn {
                EQ_NONE => {}
                MAX_EQ.. => return Err(CommandStatus::BadNumber),
                eqn if row == SubFunction::Commands && eqn != EQ_CONTROL => {
                    return Err(CommandStatus::BadParameter);
                }
                eqn if self.eqs.state(eqn) == EventQueueState::Undefined => {
                    return Err(CommandStatus::NotFound);
                }
                _ => {}
            }
        }
        let map = &mut self.vectors.entries;
        if map.is_empty() {
            map.resize(ROWS * PROCESSORS, ABSENT);
        }
        map[start..start + entries.len()].copy_from_slice(entries);
        Ok(())
    }

    /// Carries out `QueryVectorMap`: the entries.
    pub(crate) fn query_vector_map(
        &self,
        command: &QueryVectorMap,
    ) -> Result<Vec<VectorMapEntry>, CommandStatus> {
        let (row, _) = range(command.sub_function, command.first, command.count)?;
        let columns = command.first..command.first + command.count;
        let entries = columns.map(|processor| match self.vectors.at(row, processor) {
            entry if entry.eqn == EQ_NONE => ABSENT,
            entry => entry,
        });
        Ok(entries.collect())
    }
}
