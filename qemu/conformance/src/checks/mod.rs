// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The checks, by chapter of the specification.

mod ch01;
mod ch02;
mod ch03;
mod ch04;
mod ch04_lists;
mod ch04_pending;
mod ch05;
mod ch06;
mod ch07;
mod ch08;
mod ch09;
mod ch10;
mod ch11;
mod ch12;
mod ch13;
mod ch14;
mod ch20;
mod ch21;
mod fixture;
mod unchecked;

use crate::host::Host;
use crate::outcome::Outcome;
use crate::requirements::Id;
use std::collections::BTreeMap;

/// A check of one requirement.
#[derive(Debug)]
pub struct Check {
    requirement: &'static str,
    /// Makes it.
    pub run: fn(&mut Host) -> Outcome,
}

impl Check {
    /// The requirement that it is of.
    ///
    /// # Panics
    ///
    /// When the table of checks names something that is no number.
    pub fn id(&self) -> Id {
        id(self.requirement)
    }
}

fn id(number: &str) -> Id {
    Id::parse(number).unwrap_or_else(|| panic!("{number} is no number of a requirement"))
}

/// Names the checks of a chapter.
macro_rules! checks {
    ($($requirement:literal => $run:expr,)*) => {
        /// The checks of this chapter.
        pub const CHECKS: &[crate::checks::Check] = &[
            $( crate::checks::Check { requirement: $requirement, run: $run }, )*
        ];
    };
}
use checks;

/// All checks.
pub fn all() -> Vec<&'static Check> {
    [
        ch01::CHECKS,
        ch02::CHECKS,
        ch03::CHECKS,
        ch04::CHECKS,
        ch04_lists::CHECKS,
        ch04_pending::CHECKS,
        ch05::CHECKS,
        ch06::CHECKS,
        ch07::CHECKS,
        ch08::CHECKS,
        ch09::CHECKS,
        ch10::CHECKS,
        ch11::CHECKS,
        ch12::CHECKS,
        ch13::CHECKS,
        ch14::CHECKS,
        ch20::CHECKS,
        ch21::CHECKS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The requirements that have no check, and why.
pub fn unchecked() -> BTreeMap<Id, &'static str> {
    let reasons = unchecked::REASONS;
    reasons
        .iter()
        .map(|(number, why)| (id(number), *why))
        .collect()
}
