// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The glossary: each word has one row, and the names in it are those of the sources.

use std::collections::BTreeSet;

use crate::sources::SOURCES;

const GLOSSARY: &str = include_str!("../../../Documentation/device/19-glossary.md");

/// The cells of each row.
fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    GLOSSARY
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| here"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

#[test]
fn a_word_has_one_row_that_says_what_others_call_it() {
    let mut words = BTreeSet::new();
    for row in rows() {
        assert_eq!(row.len(), 4, "{row:?}");
        assert!(row.iter().all(|cell| !cell.is_empty()), "{row:?}");
        assert!(words.insert(row[0]), "{} has two rows", row[0]);
    }
    assert!(words.len() > 60, "{} rows", words.len());
}

/// Of what others call it no source is here to be asked.
#[test]
fn the_names_of_the_glossary_are_those_of_the_sources() {
    for row in rows() {
        for name in row[..2].join(" ").split('`').skip(1).step_by(2) {
            let name = name.rsplit("::").next().unwrap_or(name);
            let is_there = SOURCES.iter().any(|(_, _, text)| {
                text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
                    .any(|word| word == name)
            });
            assert!(is_there, "no source has {name} ({})", row[0]);
        }
    }
}
