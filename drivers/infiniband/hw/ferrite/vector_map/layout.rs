// SPDX-License-Identifier: GPL-2.0

//! How event queues and vectors are spread, by name.

use super::{
    MOST_COLUMNS,
    MOST_QUEUES,
    PARTS,
    SEVERAL, //
};
use crate::abi;
use kernel::prelude::*;

/// What there is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
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
    pub(super) name: &'static CStr,
    pub(super) queues: Spread,
    /// `None`: the interrupt pin.
    pub(super) vectors: Option<Spread>,
}

pub(super) const fn layout(name: &'static CStr, queues: Spread, vectors: Option<Spread>) -> Layout {
    Layout {
        name,
        queues,
        vectors,
    }
}

/// An event queue and a vector for each processor.
pub(crate) const DEFAULT: Layout = layout(c"cpu/cpu", Spread::Cpu, Some(Spread::Cpu));

/// All layouts: event queues, then vectors.
pub(super) const LAYOUTS: [Layout; 18] = [
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
    pub(super) fn columns(&self, processors: u32) -> u32 {
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

#[kunit_tests(ferrite_vector_map_layout)]
mod tests {
    use super::*;

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
}
