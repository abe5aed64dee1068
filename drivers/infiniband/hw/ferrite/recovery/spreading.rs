// SPDX-License-Identifier: GPL-2.0

//! The parameter: how event queues and vectors are spread in the next life.

use crate::{
    kernel_ext::{
        devlink::Refusal,
        errno, //
    },
    vector_map,
    vector_map::Layout, //
};
use kernel::prelude::*;

/// The parameter.
pub(super) struct Spreading {
    /// What was set last.
    pub(super) layout: Layout,
    /// What it is again where no life begins with that: what it was when the last one did. `None` where that is
    /// the same.
    pub(super) before: Option<Layout>,
    /// Whether the device of the last life has a vector map.
    pub(super) has_table: bool,
}

impl Spreading {
    pub(super) const fn new() -> Self {
        Self {
            layout: vector_map::DEFAULT,
            before: None,
            has_table: false,
        }
    }

    /// What a life has that begins.
    pub(super) fn of_life(&self) -> Layout {
        if self.has_table {
            self.layout
        } else {
            vector_map::DEFAULT
        }
    }

    /// Sets it.
    pub(super) fn set(&mut self, name: &[u8]) -> Result<(), Refusal> {
        let layout = Layout::parse(name).ok_or(NO_LAYOUT)?;
        if layout != vector_map::DEFAULT && !self.has_table {
            let why = c"the device has no vector map";
            return Err(Refusal::new(errno::eopnotsupp(), why));
        }
        let before = self.before.unwrap_or_else(|| self.of_life());
        self.layout = layout;
        self.before = (before != layout).then_some(before);
        Ok(())
    }

    /// A life has begun, with that layout.
    pub(super) fn begins(&mut self, layout: Layout) {
        // Somebody may have set another one meanwhile, which is tried next.
        self.before = (layout != self.of_life()).then_some(layout);
    }

    /// No life has begun with `layout`: gives whether it is as before now. What somebody has set meanwhile stays,
    /// and is tried next.
    pub(super) fn take_back(&mut self, layout: Layout) -> bool {
        if self.layout != layout {
            return false;
        }
        let before = self.before.take();
        self.layout = before.unwrap_or(layout);
        before.is_some()
    }
}

const NO_LAYOUT: Refusal = Refusal::new(
    EINVAL,
    c"no such layout: event queues/vectors, as one/cpu, cpu/cpu, function-cpu/function",
);
