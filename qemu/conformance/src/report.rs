// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What came of each requirement.

use crate::requirements::{Id, Requirement};
use std::fmt;
use std::io::{self, Write};

/// What came of a requirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is kept.
    Kept,
    /// It is not.
    Broken(String),
    /// It is about something that is not here: an optional feature, a connection.
    NotHere(String),
    /// No check can be made of it from here, for this reason.
    Unchecked(&'static str),
    /// Nobody has thought of it.
    Forgotten,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("ok"),
            Self::Broken(why) => write!(f, "FAILED: {why}"),
            Self::NotHere(why) => write!(f, "not checked: {why}"),
            Self::Unchecked(why) => write!(f, "not checked: {why}"),
            Self::Forgotten => {
                f.write_str("FAILED: there is neither a check nor a reason for none")
            }
        }
    }
}

/// What came of all.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Each requirement that was asked for, in order.
    pub verdicts: Vec<(Requirement, Verdict)>,
    /// What is wrong with the checks themselves.
    pub mistakes: Vec<String>,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_good(&self) -> bool {
        self.mistakes.is_empty() && self.broken().next().is_none()
    }

    /// The requirements that are not kept, or that nobody has thought of.
    pub fn broken(&self) -> impl Iterator<Item = Id> + '_ {
        self.verdicts
            .iter()
            .filter(|(_, verdict)| matches!(verdict, Verdict::Broken(_) | Verdict::Forgotten))
            .map(|(requirement, _)| requirement.id)
    }

    fn count(&self, is: impl Fn(&Verdict) -> bool) -> usize {
        self.verdicts
            .iter()
            .filter(|(_, verdict)| is(verdict))
            .count()
    }

    /// Prints how many requirements came to what, and those that could not be checked.
    pub fn print_coverage(&self, out: &mut dyn Write) -> io::Result<()> {
        let kept = self.count(|v| *v == Verdict::Kept);
        let broken = self.count(|v| matches!(v, Verdict::Broken(_)));
        let not_here = self.count(|v| matches!(v, Verdict::NotHere(_)));
        let unchecked = self.count(|v| matches!(v, Verdict::Unchecked(_)));
        let forgotten = self.count(|v| *v == Verdict::Forgotten);
        writeln!(
            out,
            "\n{} requirements: {} checked ({kept} ok, {broken} failed), {} uncovered \
             ({unchecked} with a reason, {not_here} not of this device, {forgotten} without)",
            self.verdicts.len(),
            kept + broken,
            unchecked + not_here + forgotten,
        )?;
        for (requirement, verdict) in &self.verdicts {
            if !matches!(verdict, Verdict::Kept) {
                writeln!(out, "{}: {verdict}", requirement.id)?;
            }
        }
        for mistake in &self.mistakes {
            writeln!(out, "{mistake}")?;
        }
        Ok(())
    }
}
