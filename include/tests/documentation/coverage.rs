// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The table of what checks the driver's requirements has each of them, and names tests that exist.

use crate::requirements::{cells, chapters, folder, mentions};
use std::collections::BTreeSet;
use std::path::Path;

/// A row: the requirement, and the tests that check it.
struct Row {
    number: (u32, u32),
    /// Functions that are tests.
    functions: Vec<String>,
    /// Tests and checks in virtual machines.
    in_machines: Vec<String>,
    left: String,
}

/// What stands between two marks.
fn between(text: &str, mark: char) -> Vec<String> {
    let parts: Vec<_> = text.split(mark).collect();
    assert_eq!(parts.len() % 2, 1, "{mark} without end: {text}");
    parts
        .into_iter()
        .skip(1)
        .step_by(2)
        .map(Into::into)
        .collect()
}

fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(folder().join("driver-coverage.md")).expect("it is there");
    text.lines()
        .filter(|line| line.starts_with("| DRV-"))
        .map(|line| {
            let cells = cells(line);
            let [number, what, checked, left] = cells[..] else {
                panic!("{line}");
            };
            let [mention] = &mentions(number)[..] else {
                panic!("{line}");
            };
            assert!(!what.is_empty(), "{line}");
            let row = Row {
                number: (mention.chapter, mention.number),
                functions: between(checked, '`'),
                in_machines: between(checked, '"'),
                left: left.into(),
            };
            // Nothing but names stands there.
            let names = row.functions.len() + row.in_machines.len();
            let listed: Vec<_> = row
                .functions
                .iter()
                .map(|name| format!("`{name}`"))
                .collect();
            let in_machines = row.in_machines.iter().map(|name| format!("\"{name}\""));
            let listed: Vec<_> = listed.into_iter().chain(in_machines).collect();
            assert_eq!(checked, listed.join(", "), "{line}");
            assert!(
                names > 0 || !left.is_empty(),
                "no test and no reason: {line}"
            );
            row
        })
        .collect()
}

#[test]
fn every_requirement_of_the_driver_is_in_the_table_once() {
    let mut given = BTreeSet::new();
    for (_, _, text) in chapters() {
        for mention in text.lines().flat_map(mentions) {
            if mention.is_given && mention.side == "DRV" {
                given.insert((mention.chapter, mention.number));
            }
        }
    }
    let rows = rows();
    let numbers: Vec<_> = rows.iter().map(|row| row.number).collect();
    let listed: BTreeSet<_> = numbers.iter().copied().collect();
    assert_eq!(listed.len(), numbers.len(), "one is there twice");
    assert_eq!(listed, given);
    assert!(numbers.is_sorted(), "not in order");
}

/// The text of all sources below a folder of the repository.
fn sources(folder: &Path, into: &mut Vec<String>) {
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    for entry in entries.map(|entry| entry.expect("a folder can be read")) {
        let path = entry.path();
        if entry.file_type().expect("its type is known").is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(std::fs::read_to_string(&path).expect("a source can be read"));
        }
    }
}

fn sources_below(folders: &[&str]) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut texts = Vec::new();
    for folder in folders {
        sources(&root.join(folder), &mut texts);
    }
    texts
}

/// The names of all functions that are tests.
fn test_functions(texts: &[String]) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    for text in texts {
        for after in text.split("#[test]").skip(1) {
            let name = after.split_once("fn ").map_or("", |(_, rest)| rest);
            names.insert(name.split('(').next().unwrap_or_default());
        }
    }
    names
}

#[test]
fn every_test_that_the_table_names_exists() {
    let texts = sources_below(&["drivers", "rust", "tools/provider/src"]);
    let functions = test_functions(&texts);
    assert!(functions.len() > 150, "only {}", functions.len());
    let machines = sources_below(&["tools/lab/src/tests", "tools/verbs-check/src/checks"]);
    let (mut by_test, mut by_lie, mut none) = (0, 0, Vec::new());
    let misbehaviours = sources_below(&["tools/lab/src/tests"])
        .into_iter()
        .find(|text| text.contains("A device that does not keep to its specification"))
        .expect("the lab has misbehaving devices");
    let rows = rows();
    for row in &rows {
        for name in &row.functions {
            assert!(
                functions.contains(name.as_str()),
                "{:?}: {name}",
                row.number
            );
        }
        let literal = |name: &str| format!("\"{name}\"");
        for name in &row.in_machines {
            let is_there = machines.iter().any(|text| text.contains(&literal(name)));
            assert!(is_there, "{:?}: {name}", row.number);
        }
        let lies = |name: &String| misbehaviours.contains(&literal(name));
        by_lie += usize::from(row.in_machines.iter().any(lies));
        if row.functions.is_empty() && row.in_machines.is_empty() {
            none.push(row);
        } else {
            by_test += 1;
        }
    }
    println!(
        "of {} requirements of the driver {by_test} are checked by a test, {by_lie} of them with a \
         device that misbehaves; {} by none:",
        rows.len(),
        none.len()
    );
    for row in none {
        println!("  DRV-{}-{}: {}", row.number.0, row.number.1, row.left);
    }
}
