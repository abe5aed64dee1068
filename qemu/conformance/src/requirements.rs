// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The numbered requirements, as they stand in the specification.

use std::collections::BTreeSet;
use std::fmt;

/// The chapters, in order.
const CHAPTERS: &[&str] = &[
    include_str!("../../../Documentation/device/01-pci.md"),
    include_str!("../../../Documentation/device/02-reset.md"),
    include_str!("../../../Documentation/device/03-control-queue.md"),
    include_str!("../../../Documentation/device/04-memory.md"),
    include_str!("../../../Documentation/device/05-event-queues.md"),
    include_str!("../../../Documentation/device/06-completion-queues.md"),
    include_str!("../../../Documentation/device/07-queue-pairs.md"),
    include_str!("../../../Documentation/device/08-work-requests.md"),
    include_str!("../../../Documentation/device/09-shared-receive.md"),
    include_str!("../../../Documentation/device/10-doorbells.md"),
    include_str!("../../../Documentation/device/11-errors.md"),
    include_str!("../../../Documentation/device/12-wire.md"),
    include_str!("../../../Documentation/device/13-ordering.md"),
    include_str!("../../../Documentation/device/14-limits.md"),
    include_str!("../../../Documentation/device/15-registry.md"),
    include_str!("../../../Documentation/device/16-versions.md"),
    include_str!("../../../Documentation/device/20-ethernet.md"),
    include_str!("../../../Documentation/device/21-raw-packets.md"),
    include_str!("../../../Documentation/device/22-functions.md"),
];

/// The number of a requirement for devices: `DEV-<chapter>-<number>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    /// The chapter that has it.
    pub chapter: u16,
    /// Its number there.
    pub number: u16,
}

impl Id {
    /// Reads a number as it is written.
    pub fn parse(text: &str) -> Option<Self> {
        let (chapter, number) = text.strip_prefix("DEV-")?.split_once('-')?;
        Some(Self {
            chapter: chapter.parse().ok()?,
            number: number.parse().ok()?,
        })
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DEV-{}-{}", self.chapter, self.number)
    }
}

/// A requirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Its number.
    pub id: Id,
    /// What it asks for: the rest of its row or paragraph, in one line.
    pub text: String,
}

/// All requirements for devices, in order.
pub fn all() -> Vec<Requirement> {
    let mut requirements: Vec<_> = CHAPTERS.iter().flat_map(|chapter| of(chapter)).collect();
    requirements.sort_by_key(|requirement| requirement.id);
    requirements
}

/// Numbers that the text gives to more than one requirement.
pub fn repeated(requirements: &[Requirement]) -> Vec<Id> {
    let mut seen = BTreeSet::new();
    requirements
        .iter()
        .map(|requirement| requirement.id)
        .filter(|id| !seen.insert(*id))
        .collect()
}

/// The requirements of a chapter: where a number stands in bold, the requirement follows it.
fn of(chapter: &str) -> Vec<Requirement> {
    const MARK: &str = "**DEV-";
    let mut found = Vec::new();
    let mut rest = chapter;
    while let Some(at) = rest.find(MARK) {
        rest = &rest[at + 2..];
        let Some((number, after)) = rest.split_once("**") else {
            break;
        };
        if let Some(id) = Id::parse(number) {
            let text = text_of(after);
            found.push(Requirement { id, text });
        }
        rest = after;
    }
    found
}

/// What follows a number: to the end of its row in a table, else of its paragraph.
fn text_of(after: &str) -> String {
    let in_row = after.trim_start_matches(' ').starts_with('|');
    let end = if in_row { "\n" } else { "\n\n" };
    let text = after.split(end).next().unwrap_or(after);
    let cells = text
        .split(" | ")
        .map(|cell| cell.trim_matches(['|', ' ', '\n']));
    let text = if in_row {
        cells
            .filter(|cell| !cell.is_empty())
            .collect::<Vec<_>>()
            .join(": ")
    } else {
        text.to_owned()
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_tables_and_paragraphs() {
        let text = "\n| **DEV-3-1** | a thing | MUST be |\n\n**DEV-3-12** Another\nMUST too (DEV-3-1).\n\nEnd.\n**DRV-3-1** x";
        let found = of(text);
        let expected = [(1, "a thing: MUST be"), (12, "Another MUST too (DEV-3-1).")];
        assert_eq!(found.len(), 2);
        for (found, (number, text)) in found.iter().zip(expected) {
            let id = Id { chapter: 3, number };
            assert_eq!((found.id, found.text.as_str()), (id, text));
        }
    }

    #[test]
    fn no_chapter_is_left_out() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Documentation/device");
        let mut found = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            found += of(&text).len();
        }
        assert_eq!(found, all().len());
    }

    #[test]
    fn the_specification_numbers_each_requirement_once() {
        let all = all();
        assert!(!all.is_empty());
        assert_eq!(repeated(&all), []);
    }
}
