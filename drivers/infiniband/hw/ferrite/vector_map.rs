// SPDX-License-Identifier: GPL-2.0

//! The vector map: which event queue the events of completion queues go to, and by which vector that then
//! interrupts, by what completes and by the processor of the consumer.
//!
//! A layout says what there is one of: for all, for each processor, for each part of the work, or for each
//! part on each processor. This file makes a table of it, for as many processors, event queues and vectors as
//! there are; that is what the device is told (`SetVectorMap`, chapters 3 and 5 of the specification).
//!
//! The parts are completions of sends and of receives. Answers to commands and global events have event
//! queue 0 in every layout, and asynchronous events queue 1, which nothing puts off and which has room for a
//! failure of each queue pair.
//!
//! A column of the table is a completion vector of the verbs. Where both its rows name one event queue and
//! that queue's own vector, completion queues are bound to the event queue itself, which says the same; else
//! they are bound to the table.

mod layout;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;

use self::layout::Spread;
pub(crate) use self::layout::{
    Layout,
    DEFAULT, //
};
use crate::{
    abi,
    abi::{
        Plain,
        SetVectorMap,
        SubFunction,
        VectorMapEntry, //
    },
    hardware::Hardware, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The parts of the work that a layout can tell apart: rows of the table.
pub(crate) const PARTS: [SubFunction; 2] = [
    SubFunction::SendCompletions,
    SubFunction::ReceiveCompletions,
];

/// How many event queues a processor has where it has several.
const SEVERAL: u32 = 2;

/// The most columns that the device's table has.
const MOST_COLUMNS: u32 = abi::VECTOR_MAP_PROCESSORS as u32;

/// The most event queues of completions: as many as there are messages beyond those of the two others.
const MOST_QUEUES: u32 = abi::MAX_MESSAGES as u32 - abi::EQ_FIRST_HANDLER as u32;

const _: () = assert!(abi::MAX_MESSAGES <= u16::MAX as usize);

/// The vector of event queue `eqn` when there are `vectors`.
///
/// With enough of them each queue has its own; else handlers share, and last of all everything
/// shares one.
pub(crate) fn vector_of(eqn: u16, vectors: u16) -> u16 {
    let first = abi::EQ_FIRST_HANDLER;
    if eqn >= first && vectors > first {
        first + (eqn - first) % (vectors - first)
    } else {
        eqn % vectors.max(1)
    }
}

/// What a completion queue is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    /// An event queue, `EQ_NONE` or `EQ_MAPPED`.
    pub(crate) eqn: u16,
    /// The column of the table, with `EQ_MAPPED`.
    pub(crate) processor: u16,
}

impl Destination {
    /// Nothing: there are no events.
    pub(crate) const NONE: Self = Self {
        eqn: abi::EQ_NONE,
        processor: 0,
    };
}

/// A layout for so many processors, event queues and vectors.
pub(crate) struct VectorTable {
    layout: Layout,
    processors: u32,
    columns: u16,
    vectors: u16,
    /// The vector that each event queue of completions has itself: that of the first entry which names it.
    own: KVec<u16>,
    /// Whether the device is told: it has a table, and there are columns that are looked up there.
    told: bool,
}

impl VectorTable {
    /// With event queues of completions up to `queues`, and `vectors` of the function in all. Where the device
    /// `has_table` or not: without it only [`DEFAULT`] can be.
    pub(crate) fn new(
        layout: Layout,
        has_table: bool,
        processors: u32,
        queues: u32,
        vectors: u16,
    ) -> Result<Self> {
        let layout = if has_table { layout } else { DEFAULT };
        let columns = layout.columns(processors);
        let parts = PARTS.len() as u32;
        let wanted = match layout.queues {
            Spread::One => 1,
            Spread::Cpu | Spread::Several => columns,
            Spread::Function => parts,
            Spread::FunctionCpu => parts * columns,
        };
        let queues = wanted.min(queues).min(MOST_QUEUES);
        let columns = match layout.queues {
            _ if queues == 0 => 0,
            // A completion vector more that has no event queue of its own is of no use.
            Spread::Cpu | Spread::Several => columns.min(queues),
            Spread::One | Spread::Function | Spread::FunctionCpu => columns,
        };
        let mut own = KVec::with_capacity(queues as usize, GFP_KERNEL)?;
        for _ in 0..queues {
            own.push(abi::MESSAGE_OF_QUEUE, GFP_KERNEL)?;
        }
        let mut this = Self {
            layout,
            processors: processors.clamp(1, MOST_COLUMNS),
            columns: columns as u16,
            vectors,
            own,
            told: false,
        };
        for part in 0..PARTS.len() {
            for column in 0..this.columns {
                let (queue, vector) = (this.queue(part, column), this.vector(part, column));
                if let Some(own) = this.own.get_mut(queue) {
                    if *own == abi::MESSAGE_OF_QUEUE {
                        *own = vector;
                    }
                }
            }
        }
        let mut columns = 0..this.columns;
        let looked_up = columns.any(|column| this.destination(column).eqn == abi::EQ_MAPPED);
        this.told = has_table && looked_up;
        Ok(this)
    }

    /// Which one of those that are spread so is for a part of the work and a column.
    fn slot(&self, spread: Spread, part: usize, column: u16) -> u32 {
        let column = u32::from(column);
        match spread {
            Spread::One => 0,
            // Several columns are one processor's, one after the other for each.
            Spread::Cpu if self.layout.queues == Spread::Several => column % self.processors,
            Spread::Cpu | Spread::Several => column,
            Spread::Function => part as u32,
            Spread::FunctionCpu => part as u32 * u32::from(self.columns) + column,
        }
    }

    /// The event queue of completions, by its place among them. There is at least one.
    fn queue(&self, part: usize, column: u16) -> usize {
        let slot = self.slot(self.layout.queues, part, column) as usize;
        slot % self.own.len().max(1)
    }

    fn vector(&self, part: usize, column: u16) -> u16 {
        let spread = self.layout.vectors.unwrap_or(Spread::One);
        let slot = self.slot(spread, part, column) as u16;
        // Counted around where there are fewer.
        vector_of(abi::EQ_FIRST_HANDLER + slot, self.vectors)
    }

    /// How many columns there are: completion vectors.
    pub(crate) fn columns(&self) -> u16 {
        self.columns
    }

    /// How many event queues of completions there are.
    pub(crate) fn queues(&self) -> u16 {
        self.own.len() as u16
    }

    /// The vector of an event queue: of any, also of those that are not of completions.
    pub(crate) fn vector_of_queue(&self, eqn: u16) -> u16 {
        let own = eqn.checked_sub(abi::EQ_FIRST_HANDLER).map(usize::from);
        match own.and_then(|queue| self.own.get(queue)) {
            Some(own) if *own != abi::MESSAGE_OF_QUEUE => *own,
            _ => vector_of(eqn, self.vectors),
        }
    }

    /// How many vectors there are up to the last one that an event queue interrupts by.
    pub(crate) fn used_vectors(&self) -> u32 {
        let parts = 0..PARTS.len();
        let entries = parts.flat_map(|part| {
            let columns = 0..self.columns;
            columns.map(move |column| self.vector(part, column))
        });
        let others = [abi::EQ_CONTROL, abi::EQ_ASYNC].map(|eqn| self.vector_of_queue(eqn));
        // `Init` of pin-init has a function of this name as well.
        let all = Iterator::chain(entries, others);
        u32::from(all.max().unwrap_or(0)) + 1
    }

    /// Where each vector up to the last one that is used is at home: a number to count processors by, if it is one of
    /// completions.
    ///
    /// Where vectors are for columns it is the first column that has it, so that all parts of a column are at one
    /// processor; else they are dealt out in turn.
    pub(crate) fn homes(&self) -> Result<KVec<Option<u32>>> {
        let used = self.used_vectors();
        let mut homes = KVec::with_capacity(used as usize, GFP_KERNEL)?;
        for vector in 0..used {
            let turn = vector.checked_sub(abi::EQ_FIRST_HANDLER.into());
            homes.push(turn, GFP_KERNEL)?;
        }
        match self.layout.vectors {
            None | Some(Spread::One | Spread::Function) => return Ok(homes),
            Some(Spread::Cpu | Spread::Several | Spread::FunctionCpu) => {}
        }
        // The first is the last to say so.
        for part in (0..PARTS.len()).rev() {
            for column in (0..self.columns).rev() {
                let vector = usize::from(self.vector(part, column));
                if let Some(Some(home)) = homes.get_mut(vector) {
                    *home = column.into();
                }
            }
        }
        Ok(homes)
    }

    /// The entry of a part of the work, by its place in [`PARTS`], and a column.
    pub(crate) fn entry(&self, part: usize, column: u16) -> VectorMapEntry {
        let queue = self.queue(part, column);
        let vector = self.vector(part, column);
        VectorMapEntry {
            eqn: abi::EQ_FIRST_HANDLER + queue as u16,
            message: match self.own.get(queue) {
                Some(own) if *own != vector => vector,
                _ => abi::MESSAGE_OF_QUEUE,
            },
        }
    }

    /// The event queue and the vector of an entry.
    pub(crate) fn at(&self, part: usize, column: u16) -> (u16, u16) {
        (self.entry(part, column).eqn, self.vector(part, column))
    }

    /// The event queue and the vector by which a column is known, where only one of its parts counts: that of
    /// receives, which who waits for an event nearly always waits for.
    pub(crate) fn main(&self, column: u16) -> (u16, u16) {
        self.at(PARTS.len() - 1, column)
    }

    /// The event queues that can interrupt by each vector: all of those that are not of completions, too.
    pub(crate) fn served_by_vector(&self) -> Result<KVec<KVec<u16>>> {
        let mut served: KVec<KVec<u16>> = KVec::with_capacity(self.vectors.into(), GFP_KERNEL)?;
        for _ in 0..self.vectors.max(1) {
            served.push(KVec::new(), GFP_KERNEL)?;
        }
        let mut serve = |(eqn, vector): (u16, u16)| -> Result {
            let served = served.get_mut(usize::from(vector)).ok_or(EINVAL)?;
            if !served.contains(&eqn) {
                served.push(eqn, GFP_KERNEL)?;
            }
            Ok(())
        };
        for eqn in 0..abi::EQ_FIRST_HANDLER + self.queues() {
            serve((eqn, self.vector_of_queue(eqn)))?;
        }
        for part in 0..PARTS.len() {
            for column in 0..self.columns {
                serve(self.at(part, column))?;
            }
        }
        Ok(served)
    }

    /// The event queues that completion queues of a column have events in, one for each part of the work: they
    /// may be the same.
    pub(crate) fn queues_of(&self, column: u16) -> [u16; PARTS.len()] {
        core::array::from_fn(|part| self.entry(part, column).eqn)
    }

    /// Whether completion queues of a column have events in an event queue.
    pub(crate) fn uses(&self, column: u16, eqn: u16) -> bool {
        self.queues_of(column).contains(&eqn)
    }

    /// What completion queues of a column are bound to.
    pub(crate) fn destination(&self, column: u16) -> Destination {
        let first = self.entry(0, column);
        let alike = (1..PARTS.len()).all(|part| self.entry(part, column) == first);
        if alike && first.message == abi::MESSAGE_OF_QUEUE {
            return Destination {
                eqn: first.eqn,
                processor: 0,
            };
        }
        Destination {
            eqn: abi::EQ_MAPPED,
            processor: column,
        }
    }

    /// Calls `give` with each command that tells the device of the table, or with `clear` that it is empty.
    fn commands(&self, clear: bool, mut give: impl FnMut(&SetVectorMap) -> Result) -> Result {
        if !self.told {
            return Ok(());
        }
        for (part, row) in PARTS.iter().enumerate() {
            let mut first = 0;
            while first < self.columns {
                let count = (self.columns - first).min(abi::VECTOR_MAP_ENTRIES as u16);
                let mut command = SetVectorMap {
                    sub_function: row.number(),
                    first,
                    count,
                    ..SetVectorMap::zeroed()
                };
                for (entry, column) in command.entries.iter_mut().zip(first..first + count) {
                    *entry = if clear {
                        VectorMapEntry {
                            eqn: abi::EQ_NONE,
                            message: abi::MESSAGE_OF_QUEUE,
                        }
                    } else {
                        self.entry(part, column)
                    };
                }
                give(&command)?;
                first += count;
            }
        }
        Ok(())
    }
}

/// A table that the device was told of, until this is dropped: event queues that it names can be destroyed only
/// after that (DEV-3-146).
pub(crate) struct VectorTableInDevice {
    hw: Arc<Hardware>,
    table: Arc<VectorTable>,
}

impl VectorTableInDevice {
    /// Tells the device, which knows the event queues. Sleeps.
    pub(crate) fn new(hw: &Arc<Hardware>, table: &Arc<VectorTable>) -> Result<Self> {
        // What was told of a part of it is taken back where the rest fails.
        let this = Self {
            hw: hw.clone(),
            table: table.clone(),
        };
        table.commands(false, |command| hw.execute(command))?;
        Ok(this)
    }
}

impl Drop for VectorTableInDevice {
    fn drop(&mut self) {
        // A device that keeps it will not let go of the event queues, and is given up then.
        let _ = self
            .table
            .commands(true, |command| self.hw.execute(command));
    }
}
