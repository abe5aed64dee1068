// SPDX-License-Identifier: GPL-2.0 OR MIT

//! `Documentation/device/layouts.md` says what the sources of the interface say.

use crate::sources::{cell, parse, Item, SOURCES};
use std::fmt::Write;
fn render() -> String {
    let mut out = String::from(
        "<!-- SPDX-License-Identifier: GPL-2.0 OR MIT -->\n\
         <!-- Generated from include/src/abi; see include/tests/documentation. -->\n\
         # Layouts and numbers\n\n\
         Every structure, number and constant of `include/src/abi`. Offsets and sizes are in \
         bytes; the compiler has checked them. Reserved fields are zero.\n",
    );
    for (file, title, source) in SOURCES {
        let (constants, items) = parse(source);
        let _ = write!(out, "\n## {title}\n\n`include/src/abi/{file}`\n");
        if !constants.is_empty() {
            out.push_str("\n| constant | value | |\n|---|---|---|\n");
            for row in constants {
                let _ = writeln!(out, "| `{}` | `{}` | {} |", row.name, row.number, row.words);
            }
        }
        for item in items {
            match item {
                Item::Structure {
                    name,
                    size,
                    words,
                    rows,
                } => {
                    let _ = write!(out, "\n### {name}, {size} bytes\n\n{}\n", cell(&words));
                    out.push_str("\n| offset | field | type | |\n|---|---|---|---|\n");
                    for row in rows {
                        let _ = writeln!(
                            out,
                            "| {} | `{}` | `{}` | {} |",
                            row.number, row.name, row.kind, row.words
                        );
                    }
                }
                Item::Numbers { name, words, rows } => {
                    let _ = write!(out, "\n### {name}\n\n{}\n", cell(&words));
                    out.push_str("\n| number | name | |\n|---|---|---|\n");
                    for row in rows {
                        let _ =
                            writeln!(out, "| {} | `{}` | {} |", row.number, row.name, row.words);
                    }
                }
                Item::Names { name, words, names } => {
                    let _ = write!(out, "\n### {name}\n\n{}\n", cell(&words));
                    out.push_str("\n| place | name |\n|---|---|\n");
                    for (place, name) in names.iter().enumerate() {
                        let _ = writeln!(out, "| {place} | `{name}` |");
                    }
                }
            }
        }
    }
    out
}

fn path() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../Documentation/device/layouts.md")
}

#[test]
fn layouts_chapter_is_up_to_date() {
    let rendered = render();
    if std::env::var_os("FERRITE_UPDATE").is_some() {
        std::fs::write(path(), &rendered).expect("layouts.md can be written");
        return;
    }
    let written = std::fs::read_to_string(path()).expect("layouts.md is there");
    assert!(
        rendered == written,
        "Documentation/device/layouts.md is out of date: run \
         FERRITE_UPDATE=1 cargo test -p ferrite-abi --test documentation"
    );
}

#[test]
fn every_definition_of_the_sources_is_in_the_chapter() {
    let rendered = render();
    for (file, _, source) in SOURCES {
        let structures = source
            .lines()
            .filter(|line| line.trim().starts_with("pub struct ") && line.contains(": "))
            .filter(|line| line.trim_end().ends_with(" {"))
            .count();
        let fields = source.lines().filter(|line| is_field(line)).count();
        let (_, items) = parse(source);
        let found = items
            .iter()
            .filter(|item| matches!(item, Item::Structure { .. }))
            .count();
        let found_fields: usize = items
            .iter()
            .map(|item| match item {
                Item::Structure { rows, .. } => rows.len(),
                Item::Numbers { .. } | Item::Names { .. } => 0,
            })
            .sum();
        assert_eq!((structures, fields), (found, found_fields), "{file}");
    }
    // What the sources and what the compiled layouts say are the same thing.
    fn compiled<L: ferrite_abi::Layout>(rendered: &str) {
        let heading = format!("\n### {}, {} bytes\n", L::NAME, size_of::<L>());
        let section = rendered
            .split_once(&heading)
            .unwrap_or_else(|| panic!("{heading}"))
            .1;
        for field in L::FIELDS {
            let row = format!("| {} | `{}` | ", field.offset, field.name);
            assert!(section.contains(&row), "{}: {row}", L::NAME);
        }
    }
    compiled::<ferrite_abi::CommandEntry>(&rendered);
    compiled::<ferrite_abi::ModifyQueuePair>(&rendered);
    compiled::<ferrite_abi::CompletionEntry>(&rendered);
    compiled::<ferrite_abi::UverbsQpRequest>(&rendered);
    // The counters are told by their place.
    let section = rendered.split_once("\n### COUNTER_NAMES\n");
    let section = section.expect("the counters are listed").1;
    for (place, name) in ferrite_abi::COUNTER_NAMES.iter().enumerate() {
        assert!(
            section.contains(&format!("| {place} | `{name}` |")),
            "{name}"
        );
    }
}

fn is_field(line: &str) -> bool {
    line.trim()
        .split_once(" => ")
        .is_some_and(|(offset, rest)| offset.parse::<usize>().is_ok() && rest.contains(": "))
}
