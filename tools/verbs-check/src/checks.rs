// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases, each a group of checks.

mod access;
pub mod allocations;
mod atomics;
pub mod by_hand;
mod data;
pub mod dereg;
mod drains;
mod errors;
mod events;
mod extended;
pub mod flood;
pub mod killed;
mod lists;
mod many;
pub mod moving;
pub mod objects;
mod one_touch;
mod paging;
mod pending;
pub mod pieces;
pub mod priority;
pub mod private;
pub mod raw;
mod refusal;
mod region;
mod shared;
mod stress;
pub mod threads;
pub mod uverbs;

pub use stress::stress;

use crate::bench::Bench;
use crate::report::Report;

/// A case.
pub struct Case {
    /// What it is called on the command line.
    pub name: &'static str,
    /// Runs its checks.
    pub run: fn(&mut Bench, &mut Report),
}

/// All cases that end by themselves.
pub const CASES: &[Case] = &[
    Case {
        name: "data",
        run: data::run,
    },
    Case {
        name: "atomics",
        run: atomics::run,
    },
    Case {
        name: "extended",
        run: extended::run,
    },
    Case {
        name: "events",
        run: events::run,
    },
    Case {
        name: "errors",
        run: errors::run,
    },
    Case {
        name: "access",
        run: access::run,
    },
    Case {
        name: "lists",
        run: lists::run,
    },
    Case {
        name: "drains",
        run: drains::run,
    },
    Case {
        name: "one-touch",
        run: one_touch::run,
    },
    Case {
        name: "touches",
        run: one_touch::touches,
    },
    Case {
        name: "shared",
        run: shared::run,
    },
    Case {
        name: "region",
        run: region::run,
    },
    Case {
        name: "paging",
        run: paging::run,
    },
    Case {
        name: "pending",
        run: pending::run,
    },
    Case {
        name: "at-once",
        run: pending::run_at_once,
    },
    Case {
        name: "many",
        run: many::run,
    },
];
