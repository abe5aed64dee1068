// SPDX-License-Identifier: GPL-2.0 OR MIT

//! `Documentation/device/layouts.md` says what the sources of the interface say.
//!
//! The file is written anew by `FERRITE_UPDATE=1 cargo test -p ferrite-abi --test documentation`.

use std::fmt::Write;

/// The sources, in the order of the specification's chapters.
const SOURCES: [(&str, &str, &str); 10] = [
    (
        "pci.rs",
        "Chapter 1: PCI identity and BARs",
        include_str!("../src/abi/pci.rs"),
    ),
    (
        "registers.rs",
        "Chapter 2: registers",
        include_str!("../src/abi/registers.rs"),
    ),
    (
        "command.rs",
        "Chapters 3, 7, 9: commands",
        include_str!("../src/abi/command.rs"),
    ),
    (
        "buffer.rs",
        "Chapter 4: buffers",
        include_str!("../src/abi/buffer.rs"),
    ),
    (
        "memory.rs",
        "Chapter 4: tags and rights",
        include_str!("../src/abi/memory.rs"),
    ),
    (
        "event.rs",
        "Chapter 5: events",
        include_str!("../src/abi/event.rs"),
    ),
    (
        "completion.rs",
        "Chapter 6: completions",
        include_str!("../src/abi/completion.rs"),
    ),
    (
        "work.rs",
        "Chapter 8: work requests",
        include_str!("../src/abi/work.rs"),
    ),
    (
        "doorbell.rs",
        "Chapter 10: doorbells and records",
        include_str!("../src/abi/doorbell.rs"),
    ),
    (
        "uverbs.rs",
        "Between kernel driver and provider",
        include_str!("../src/abi/uverbs.rs"),
    ),
];

/// A row of a table: number or offset, name, type (or value), words.
struct Row {
    number: String,
    name: String,
    kind: String,
    words: String,
}

/// What one source defines.
enum Item {
    Structure {
        name: String,
        size: String,
        words: String,
        rows: Vec<Row>,
    },
    Numbers {
        name: String,
        words: String,
        rows: Vec<Row>,
    },
}

/// Makes a doc comment fit for a table cell: links of rustdoc become plain names.
fn cell(words: &str) -> String {
    words
        .trim()
        .replace("[`super::", "`")
        .replace("[`", "`")
        .replace("`]`", "``")
        .replace("`](self)", "`")
        .replace("`]", "`")
        .replace('|', "\\|")
        .replace("````", "")
        .replace("``", "")
}

/// Reads the definitions of a source. The sources are formatted, one definition or field a line.
fn parse(source: &str) -> (Vec<Row>, Vec<Item>) {
    let mut constants = Vec::new();
    let mut items = Vec::new();
    let mut words = String::new();
    let mut open = false;
    let mut pending: Option<String> = None;
    for line in source.lines() {
        let text = line.trim();
        if let Some(start) = pending.take() {
            // A constant whose value stands on the next line.
            constant(&format!("{start} {text}"), &mut words, &mut constants);
            continue;
        }
        if let Some(doc) = text.strip_prefix("///") {
            words.push_str(doc.trim_end());
        } else if let Some(rest) = text.strip_prefix("pub struct ") {
            // Tuple structures of functions (`Tag`, `Status`) and plain ones have no stated size.
            if let Some((name, size)) = rest
                .strip_suffix(" {")
                .and_then(|rest| rest.split_once(": "))
            {
                items.push(Item::Structure {
                    name: name.into(),
                    size: size.into(),
                    words: std::mem::take(&mut words),
                    rows: Vec::new(),
                });
                open = true;
            }
            words.clear();
        } else if let Some(rest) = text.strip_prefix("pub enum ") {
            if let Some((name, _)) = rest.split_once(": ") {
                items.push(Item::Numbers {
                    name: name.into(),
                    words: std::mem::take(&mut words),
                    rows: Vec::new(),
                });
                open = true;
            }
            words.clear();
        } else if text == "}" {
            open = false;
            words.clear();
        } else if open {
            let line = text.trim_end_matches(',');
            let row = |number: &str, name: &str, kind: &str, words: &mut String| Row {
                number: number.trim().into(),
                name: name.trim().into(),
                kind: kind.trim().into(),
                words: cell(&std::mem::take(words)),
            };
            match items.last_mut() {
                Some(Item::Structure { rows, .. }) => {
                    if let Some((offset, (name, kind))) = line
                        .split_once(" => ")
                        .and_then(|(offset, rest)| Some((offset, rest.split_once(": ")?)))
                    {
                        rows.push(row(offset, name, kind, &mut words));
                    }
                }
                Some(Item::Numbers { rows, .. }) => {
                    if let Some((name, value)) = line.split_once(" = ") {
                        rows.push(row(value, name, "", &mut words));
                    }
                }
                None => {}
            }
        } else if text.starts_with("pub const ") && !text.starts_with("pub const fn") {
            if text.ends_with(';') {
                constant(text, &mut words, &mut constants);
            } else if text.ends_with('=') {
                pending = Some(text.into());
            }
            words.clear();
        } else if !text.is_empty() {
            words.clear();
        }
    }
    (constants, items)
}

fn constant(text: &str, words: &mut String, constants: &mut Vec<Row>) {
    let text = text.trim_start_matches("pub const ").trim_end_matches(';');
    let Some((name, rest)) = text.split_once(": ") else {
        return;
    };
    let Some((_, value)) = rest.split_once(" = ") else {
        return;
    };
    constants.push(Row {
        number: value.into(),
        name: name.into(),
        kind: String::new(),
        words: cell(&std::mem::take(words)),
    });
}

fn render() -> String {
    let mut out = String::from(
        "<!-- SPDX-License-Identifier: GPL-2.0 OR MIT -->\n\
         <!-- Generated from include/src/abi; see include/tests/documentation.rs. -->\n\
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
                Item::Numbers { .. } => 0,
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
}

fn is_field(line: &str) -> bool {
    line.trim()
        .split_once(" => ")
        .is_some_and(|(offset, rest)| offset.parse::<usize>().is_ok() && rest.contains(": "))
}
