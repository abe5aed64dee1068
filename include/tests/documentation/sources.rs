// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The sources of the interface, taken apart: what they define, and the words that go with it.

/// The sources, in the order of the specification's chapters.
pub const SOURCES: [(&str, &str, &str); 12] = [
    (
        "pci.rs",
        "Chapter 1: PCI identity and BARs",
        include_str!("../../src/abi/pci.rs"),
    ),
    (
        "registers.rs",
        "Chapter 2: registers",
        include_str!("../../src/abi/registers.rs"),
    ),
    (
        "command.rs",
        "Chapters 3, 7, 9: commands",
        include_str!("../../src/abi/command.rs"),
    ),
    (
        "buffer.rs",
        "Chapter 4: buffers",
        include_str!("../../src/abi/buffer.rs"),
    ),
    (
        "memory.rs",
        "Chapter 4: tags and rights",
        include_str!("../../src/abi/memory.rs"),
    ),
    (
        "event.rs",
        "Chapter 5: events",
        include_str!("../../src/abi/event.rs"),
    ),
    (
        "completion.rs",
        "Chapter 6: completions",
        include_str!("../../src/abi/completion.rs"),
    ),
    (
        "work.rs",
        "Chapter 8: work requests",
        include_str!("../../src/abi/work.rs"),
    ),
    (
        "doorbell.rs",
        "Chapter 10: doorbells and records",
        include_str!("../../src/abi/doorbell.rs"),
    ),
    (
        "ethernet.rs",
        "Chapter 20: Ethernet",
        include_str!("../../src/abi/ethernet.rs"),
    ),
    (
        "raw.rs",
        "Chapter 21: raw packets",
        include_str!("../../src/abi/raw.rs"),
    ),
    (
        "uverbs.rs",
        "Between kernel driver and provider",
        include_str!("../../src/abi/uverbs.rs"),
    ),
];

/// A row of a table: number or offset, name, type (or value), words.
pub struct Row {
    pub number: String,
    pub name: String,
    pub kind: String,
    pub words: String,
}

/// What one source defines.
pub enum Item {
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
    Names {
        name: String,
        words: String,
        names: Vec<String>,
    },
}

/// Makes a doc comment fit for a table cell: links of rustdoc become plain names.
pub fn cell(words: &str) -> String {
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
pub fn parse(source: &str) -> (Vec<Row>, Vec<Item>) {
    let mut constants = Vec::new();
    let mut items = Vec::new();
    let mut words = String::new();
    let mut open = false;
    let mut pending: Option<String> = None;
    let mut list = false;
    for line in source.lines() {
        let text = line.trim();
        if let Some(start) = pending.take() {
            // A constant whose value stands on the next line.
            constant(&format!("{start} {text}"), &mut words, &mut constants);
            continue;
        }
        if list {
            // Names in a list, one a line.
            list = text != "];";
            if let (Some(Item::Names { names, .. }), Some(name)) =
                (items.last_mut(), text.strip_prefix('"'))
            {
                names.push(name.trim_end_matches(',').trim_end_matches('"').into());
            }
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
                Some(Item::Names { .. }) | None => {}
            }
        } else if text.starts_with("pub const ") && !text.starts_with("pub const fn") {
            if text.ends_with(';') {
                constant(text, &mut words, &mut constants);
            } else if text.ends_with('=') {
                pending = Some(text.into());
            } else if let Some((name, "[")) = text
                .trim_start_matches("pub const ")
                .split_once(": ")
                .and_then(|(name, rest)| Some((name, rest.split_once(" = ")?.1)))
            {
                items.push(Item::Names {
                    name: name.into(),
                    words: std::mem::take(&mut words),
                    names: Vec::new(),
                });
                list = true;
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
