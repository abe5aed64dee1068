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

use crate::{
    abi,
    abi::{
        Plain,
        SetVectorMap,
        SubFunction,
        VectorMapEntry, //
    },
    hardware::Hardware,
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

/// What there is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// One, for all.
    One,
    /// One for each processor.
    Cpu,
    /// [`SEVERAL`] for each processor, with a completion vector each.
    Several,
    /// One for each part of the work.
    Function,
    /// One for each part of the work on each processor.
    FunctionCpu,
}

/// How event queues and vectors are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    name: &'static CStr,
    queues: Spread,
    /// `None`: the interrupt pin.
    vectors: Option<Spread>,
}

const fn layout(name: &'static CStr, queues: Spread, vectors: Option<Spread>) -> Layout {
    Layout {
        name,
        queues,
        vectors,
    }
}

/// An event queue and a vector for each processor.
pub(crate) const DEFAULT: Layout = layout(c"cpu/cpu", Spread::Cpu, Some(Spread::Cpu));

/// All layouts: event queues, then vectors.
const LAYOUTS: [Layout; 18] = [
    layout(c"one/intx", Spread::One, None),
    layout(c"cpu/intx", Spread::Cpu, None),
    layout(c"function/intx", Spread::Function, None),
    layout(c"function-cpu/intx", Spread::FunctionCpu, None),
    layout(c"one/one", Spread::One, Some(Spread::One)),
    layout(c"one/cpu", Spread::One, Some(Spread::Cpu)),
    layout(c"cpu/one", Spread::Cpu, Some(Spread::One)),
    DEFAULT,
    // One for each part of what the event queue of a processor gets.
    layout(c"cpu/several", Spread::Cpu, Some(Spread::FunctionCpu)),
    layout(c"several/several", Spread::Several, Some(Spread::Several)),
    layout(c"several/cpu", Spread::Several, Some(Spread::Cpu)),
    layout(c"function/one", Spread::Function, Some(Spread::One)),
    layout(c"function/cpu", Spread::Function, Some(Spread::Cpu)),
    layout(
        c"function/function",
        Spread::Function,
        Some(Spread::Function),
    ),
    layout(c"function-cpu/one", Spread::FunctionCpu, Some(Spread::One)),
    layout(c"function-cpu/cpu", Spread::FunctionCpu, Some(Spread::Cpu)),
    layout(
        c"function-cpu/function",
        Spread::FunctionCpu,
        Some(Spread::Function),
    ),
    layout(
        c"function-cpu/function-cpu",
        Spread::FunctionCpu,
        Some(Spread::FunctionCpu),
    ),
];

impl Layout {
    /// The layout of that name, if there is one.
    pub(crate) fn parse(name: &[u8]) -> Option<Self> {
        let mut layouts = LAYOUTS.iter();
        layouts
            .find(|layout| layout.name.to_bytes() == name)
            .copied()
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static CStr {
        self.name
    }

    /// Whether the device is to interrupt by its pin.
    pub(crate) fn wants_pin(&self) -> bool {
        self.vectors.is_none()
    }

    /// Whether all event queues of completions interrupt by one vector.
    pub(crate) fn has_one_vector(&self) -> bool {
        matches!(self.vectors, None | Some(Spread::One))
    }

    /// How many columns the table has, if there are event queues for them.
    fn columns(&self, processors: u32) -> u32 {
        let each = match self.queues {
            Spread::Several => SEVERAL,
            _ => 1,
        };
        processors.clamp(1, MOST_COLUMNS) * each
    }

    /// How many vectors it is good for, those of the two other event queues included.
    pub(crate) fn vectors(&self, processors: u32) -> u32 {
        let columns = self.columns(processors);
        let wanted = match self.vectors {
            None => return 1,
            Some(Spread::One) => 1,
            Some(Spread::Cpu) => processors.clamp(1, MOST_COLUMNS),
            Some(Spread::Several) => columns,
            Some(Spread::Function) => PARTS.len() as u32,
            Some(Spread::FunctionCpu) => PARTS.len() as u32 * columns,
        };
        u32::from(abi::EQ_FIRST_HANDLER) + wanted.min(MOST_QUEUES)
    }
}

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

#[kunit_tests(ferrite_vector_map)]
mod tests {
    use super::*;

    /// Event queues and vectors of sends and receives, by column.
    type Expected = [&'static [(u16, u16)]; 2];

    fn named(name: &str) -> Result<Layout> {
        Layout::parse(name.as_bytes()).ok_or(ENOENT)
    }

    /// A table for a device that has one, with enough of everything.
    fn table(name: &str, processors: u32) -> Result<VectorTable> {
        let layout = named(name)?;
        let vectors = layout.vectors(processors) as u16;
        VectorTable::new(layout, true, processors, u32::MAX, vectors)
    }

    fn check(name: &str, table: &VectorTable, expected: &Expected) {
        for (part, row) in expected.iter().enumerate() {
            if usize::from(table.columns()) != row.len() {
                pr_err!("{}: {} columns\n", name, table.columns());
            }
            assert_eq!(usize::from(table.columns()), row.len());
            for (column, entry) in row.iter().enumerate() {
                let found = table.at(part, column as u16);
                if found != *entry {
                    pr_err!("{}: {} {}: {:?}\n", name, part, column, found);
                }
                assert_eq!(found, *entry);
            }
        }
    }

    #[test]
    fn each_layout_has_what_its_name_says() -> Result {
        let layouts: [(&str, u32, Expected); 18] = [
            ("one/intx", 1, [&[(2, 0), (2, 0)], &[(2, 0), (2, 0)]]),
            ("cpu/intx", 1, [&[(2, 0), (3, 0)], &[(2, 0), (3, 0)]]),
            ("function/intx", 1, [&[(2, 0), (2, 0)], &[(3, 0), (3, 0)]]),
            (
                "function-cpu/intx",
                1,
                [&[(2, 0), (3, 0)], &[(4, 0), (5, 0)]],
            ),
            ("one/one", 3, [&[(2, 2), (2, 2)], &[(2, 2), (2, 2)]]),
            ("one/cpu", 4, [&[(2, 2), (2, 3)], &[(2, 2), (2, 3)]]),
            ("cpu/one", 3, [&[(2, 2), (3, 2)], &[(2, 2), (3, 2)]]),
            ("cpu/cpu", 4, [&[(2, 2), (3, 3)], &[(2, 2), (3, 3)]]),
            ("cpu/several", 6, [&[(2, 2), (3, 3)], &[(2, 4), (3, 5)]]),
            (
                "several/several",
                6,
                [
                    &[(2, 2), (3, 3), (4, 4), (5, 5)],
                    &[(2, 2), (3, 3), (4, 4), (5, 5)],
                ],
            ),
            (
                "several/cpu",
                4,
                [
                    &[(2, 2), (3, 3), (4, 2), (5, 3)],
                    &[(2, 2), (3, 3), (4, 2), (5, 3)],
                ],
            ),
            ("function/one", 3, [&[(2, 2), (2, 2)], &[(3, 2), (3, 2)]]),
            ("function/cpu", 4, [&[(2, 2), (2, 3)], &[(3, 2), (3, 3)]]),
            (
                "function/function",
                4,
                [&[(2, 2), (2, 2)], &[(3, 3), (3, 3)]],
            ),
            (
                "function-cpu/one",
                3,
                [&[(2, 2), (3, 2)], &[(4, 2), (5, 2)]],
            ),
            (
                "function-cpu/cpu",
                4,
                [&[(2, 2), (3, 3)], &[(4, 2), (5, 3)]],
            ),
            (
                "function-cpu/function",
                4,
                [&[(2, 2), (3, 2)], &[(4, 3), (5, 3)]],
            ),
            (
                "function-cpu/function-cpu",
                6,
                [&[(2, 2), (3, 3)], &[(4, 4), (5, 5)]],
            ),
        ];
        for ((name, vectors, expected), layout) in layouts.iter().zip(&LAYOUTS) {
            assert_eq!(layout.name.to_bytes(), name.as_bytes());
            assert_eq!(layout.vectors(2), *vectors);
            assert_eq!(layout.wants_pin(), name.ends_with("/intx"));
            let table = table(name, 2)?;
            check(name, &table, expected);
            assert_eq!(table.used_vectors(), *vectors);
        }
        Ok(())
    }

    #[test]
    fn names_are_told_apart_and_fit_into_a_parameter() {
        for (at, layout) in LAYOUTS.iter().enumerate() {
            assert_eq!(Layout::parse(layout.name().to_bytes()), Some(*layout));
            assert!(layout.name().to_bytes().len() < 32);
            let mut others = LAYOUTS.iter().skip(at + 1);
            let mut same = others.clone();
            assert!(same.all(|other| other.name() != layout.name()));
            assert!(others
                .all(|other| { (other.queues, other.vectors) != (layout.queues, layout.vectors) }));
        }
        for name in [
            "",
            "cpu",
            "cpu/",
            "/cpu",
            "cpu/cpu ",
            "CPU/cpu",
            "one/several",
            "intx/one",
        ] {
            assert_eq!(Layout::parse(name.as_bytes()), None);
        }
        assert_eq!(Layout::parse(b"cpu/cpu"), Some(DEFAULT));
    }

    #[test]
    fn what_an_event_queue_can_say_by_itself_is_not_looked_up() -> Result {
        let direct = |eqn| Destination { eqn, processor: 0 };
        let mapped = |processor| Destination {
            eqn: abi::EQ_MAPPED,
            processor,
        };
        for (name, expected) in [
            ("one/intx", [direct(2), direct(2)]),
            ("cpu/intx", [direct(2), direct(3)]),
            ("function/intx", [mapped(0), mapped(1)]),
            ("one/one", [direct(2), direct(2)]),
            // The first column is by the vector of the queue itself.
            ("one/cpu", [direct(2), mapped(1)]),
            ("cpu/one", [direct(2), direct(3)]),
            ("cpu/cpu", [direct(2), direct(3)]),
            ("cpu/several", [mapped(0), mapped(1)]),
            ("function/cpu", [mapped(0), mapped(1)]),
            ("function-cpu/function-cpu", [mapped(0), mapped(1)]),
        ] {
            let table = table(name, 2)?;
            for (column, expected) in expected.iter().enumerate() {
                assert_eq!(table.destination(column as u16), *expected);
            }
        }
        Ok(())
    }

    #[test]
    fn every_layout_works_with_any_number_of_anything() -> Result {
        for layout in &LAYOUTS {
            for processors in [0, 1, 2, 3, 64, u32::MAX] {
                for queues in [0, 1, 2, 3, 64, u32::MAX] {
                    for vectors in [0, 1, 2, 3, 4, 64, 512] {
                        let table = VectorTable::new(*layout, true, processors, queues, vectors)?;
                        assert!(u32::from(table.queues()) <= queues.min(MOST_QUEUES));
                        assert!(u32::from(table.columns()) <= MOST_COLUMNS);
                        assert_eq!((table.columns() == 0), (queues == 0));
                        // There is no event queue that nothing goes to.
                        assert!(table.own.iter().all(|own| *own != abi::MESSAGE_OF_QUEUE));
                        let served = table.served_by_vector()?;
                        let last = table.columns().saturating_sub(1);
                        for column in [0, last / 2, last] {
                            if column >= table.columns() {
                                continue;
                            }
                            for part in 0..PARTS.len() {
                                let (eqn, vector) = table.at(part, column);
                                assert!((2..2 + table.queues()).contains(&eqn));
                                assert!(vector < vectors.max(1));
                                assert!(u32::from(vector) < table.used_vectors());
                                // Nobody waits for an interrupt that nobody handles.
                                assert!(served[usize::from(vector)].contains(&eqn));
                                let entry = table.entry(part, column);
                                let own = table.vector_of_queue(eqn);
                                let is_own = entry.message == abi::MESSAGE_OF_QUEUE;
                                assert_eq!(is_own, (own == vector));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn there_are_as_many_handlers_as_processors_and_the_device_has_room_for() -> Result {
        let columns = |name, processors, queues| -> Result<(u16, u16)> {
            let table = VectorTable::new(named(name)?, true, processors, queues, 512)?;
            Ok((table.columns(), table.queues()))
        };
        assert_eq!(columns("cpu/cpu", 4, 64)?, (4, 4));
        assert_eq!(columns("cpu/cpu", 4, 2)?, (2, 2));
        assert_eq!(columns("cpu/cpu", 0, 64)?, (1, 1));
        assert_eq!(columns("cpu/cpu", u32::MAX, u32::MAX)?, (510, 510));
        assert_eq!(columns("several/cpu", 4, 64)?, (8, 8));
        assert_eq!(columns("several/cpu", 4, 5)?, (5, 5));
        assert_eq!(columns("one/cpu", 4, 64)?, (4, 1));
        assert_eq!(columns("one/cpu", u32::MAX, 64)?, (512, 1));
        assert_eq!(columns("function/cpu", 4, 1)?, (4, 1));
        assert_eq!(columns("function-cpu/cpu", 4, 64)?, (4, 8));
        assert_eq!(columns("function-cpu/cpu", 4, 3)?, (4, 3));
        Ok(())
    }

    #[test]
    fn fewer_vectors_are_shared_and_more_are_left_alone() -> Result {
        let with = |name, processors, vectors| -> Result<VectorTable> {
            VectorTable::new(named(name)?, true, processors, 64, vectors)
        };
        // Two for completions of four processors.
        check(
            "one/cpu of 4",
            &with("one/cpu", 4, 4)?,
            &[&[(2, 2), (2, 3), (2, 2), (2, 3)]; 2],
        );
        check(
            "cpu/cpu of 4",
            &with("cpu/cpu", 4, 4)?,
            &[&[(2, 2), (3, 3), (4, 2), (5, 3)]; 2],
        );
        // More than processors.
        check(
            "one/cpu of 9",
            &with("one/cpu", 2, 9)?,
            &[&[(2, 2), (2, 3)]; 2],
        );
        check(
            "several/cpu of 9",
            &with("several/cpu", 2, 9)?,
            &[&[(2, 2), (3, 3), (4, 2), (5, 3)]; 2],
        );
        // One for all.
        check(
            "function/function of 1",
            &with("function/function", 1, 1)?,
            &[&[(2, 0)], &[(3, 0)]],
        );
        // All event queues in one.
        let one = VectorTable::new(named("function-cpu/function-cpu")?, true, 2, 1, 6)?;
        check("1 queue", &one, &[&[(2, 2), (2, 3)], &[(2, 4), (2, 5)]]);
        Ok(())
    }

    #[test]
    fn all_vectors_of_a_column_are_at_home_at_one_processor() -> Result {
        let check = |name, processors, queues, vectors, expected: &[u32]| -> Result {
            let table = VectorTable::new(named(name)?, true, processors, queues, vectors)?;
            let homes = table.homes()?;
            // Those of commands and asynchronous events have none.
            assert!(homes.iter().take(2).all(Option::is_none));
            let homes = homes.iter().skip(2).copied();
            assert!(homes.eq(expected.iter().copied().map(Some)));
            Ok(())
        };
        check("cpu/cpu", 3, 64, 5, &[0, 1, 2])?;
        // Fewer vectors, and fewer event queues.
        check("cpu/cpu", 3, 64, 4, &[0, 1])?;
        check("cpu/cpu", 3, 2, 5, &[0, 1])?;
        check("several/cpu", 2, 64, 4, &[0, 1])?;
        check("several/several", 2, 64, 6, &[0, 1, 2, 3])?;
        check("cpu/several", 3, 64, 8, &[0, 1, 2, 0, 1, 2])?;
        check("cpu/several", 6, 2, 14, &[0, 1, 0, 1])?;
        check("function-cpu/function-cpu", 3, 64, 8, &[0, 1, 2, 0, 1, 2])?;
        check("function-cpu/function-cpu", 4, 64, 7, &[0, 1, 2, 3, 0])?;
        // For no column alone.
        check("function/function", 3, 64, 4, &[0, 1])?;
        check("one/one", 3, 64, 3, &[0])?;
        check("one/intx", 3, 64, 1, &[])
    }

    #[test]
    fn all_vectors_that_a_queue_interrupts_by_serve_it() -> Result {
        let by = |name, eqn, expected: [bool; 6]| -> Result {
            let served = table(name, 2)?.served_by_vector()?;
            for (vector, expected) in expected.iter().enumerate() {
                let served = served.get(vector);
                let times = served.map_or(0, |served| {
                    let same = served.iter().filter(|served| **served == eqn);
                    same.count()
                });
                assert_eq!(times, usize::from(*expected));
            }
            Ok(())
        };
        by("cpu/cpu", 0, [true, false, false, false, false, false])?;
        by("cpu/cpu", 1, [false, true, false, false, false, false])?;
        by("cpu/cpu", 3, [false, false, false, true, false, false])?;
        by("one/cpu", 2, [false, false, true, true, false, false])?;
        by("cpu/several", 3, [false, false, false, true, false, true])?;
        by("function/cpu", 3, [false, false, true, true, false, false])?;
        by("one/intx", 1, [true, false, false, false, false, false])?;
        by("one/intx", 2, [true, false, false, false, false, false])
    }

    #[test]
    fn columns_share_event_queues_crosswise_where_there_are_few() -> Result {
        // Six are wanted: sends of three processors, then receives.
        let table = VectorTable::new(named("function-cpu/one")?, true, 3, 4, 3)?;
        let of = [0, 1, 2].map(|column| table.queues_of(column));
        assert_eq!(of, [[2, 5], [3, 2], [4, 3]]);
        let uses = |eqn| [0, 1, 2].map(|column| table.uses(column, eqn));
        assert_eq!(uses(2), [true, true, false]);
        assert_eq!(uses(3), [false, true, true]);
        assert_eq!(uses(5), [true, false, false]);
        assert_eq!(uses(6), [false; 3]);
        Ok(())
    }

    #[test]
    fn a_device_is_told_of_a_table_only_where_it_has_to_look_something_up() -> Result {
        for (name, told) in [
            ("cpu/cpu", false),
            ("one/one", false),
            ("cpu/one", false),
            ("several/cpu", false),
            ("one/intx", false),
            ("one/cpu", true),
            ("cpu/several", true),
            ("function/one", true),
        ] {
            let commands = table(name, 2)?.commands(false, |_| Err(EIO));
            assert_eq!(commands, if told { Err(EIO) } else { Ok(()) });
        }
        Ok(())
    }

    #[test]
    fn a_device_without_a_table_has_a_queue_and_a_vector_for_each_processor() -> Result {
        for layout in &LAYOUTS {
            let table = VectorTable::new(*layout, false, 2, 64, 4)?;
            check("no table", &table, &[&[(2, 2), (3, 3)]; 2]);
            assert_eq!(table.destination(1).eqn, 3);
            table.commands(false, |_| Err(EIO))?;
        }
        Ok(())
    }

    #[test]
    fn the_device_is_told_of_all_entries_and_that_there_are_none() -> Result {
        // More columns than one command has entries for.
        let table = table("one/cpu", 100)?;
        for clear in [false, true] {
            let mut commands = KVec::new();
            table.commands(clear, |command| {
                let rest = command.entries.iter().skip(command.count.into());
                let unused = VectorMapEntry { eqn: 0, message: 0 };
                assert!(rest.clone().all(|entry| *entry == unused));
                let entries = command.entries.iter().take(command.count.into());
                for (entry, column) in entries.zip(command.first..) {
                    let expected = if clear {
                        (abi::EQ_NONE, abi::MESSAGE_OF_QUEUE)
                    } else if column == 0 {
                        (2, abi::MESSAGE_OF_QUEUE)
                    } else {
                        (2, 2 + column)
                    };
                    assert_eq!((entry.eqn, entry.message), expected);
                }
                commands.push(
                    (command.sub_function, command.first, command.count),
                    GFP_KERNEL,
                )?;
                Ok(())
            })?;
            let (send, receive) = (
                SubFunction::SendCompletions.number(),
                SubFunction::ReceiveCompletions.number(),
            );
            let expected = [
                (send, 0, 52),
                (send, 52, 48),
                (receive, 0, 52),
                (receive, 52, 48),
            ];
            assert_eq!(commands.as_slice(), expected.as_slice());
        }
        assert_eq!(table.commands(false, |_| Err(EIO)), Err(EIO));
        Ok(())
    }

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
