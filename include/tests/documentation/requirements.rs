// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The chapters of the specification agree with themselves and with the sources of the interface:
//! requirements are numbered without gaps, numbers and bits are in the registry, features in
//! their table.

use crate::sources::{parse, Item, Row, SOURCES};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../Documentation/device")
}

/// The chapters: number, name of the file, text.
pub fn chapters() -> Vec<(u32, String, String)> {
    let mut chapters: Vec<_> = std::fs::read_dir(folder())
        .expect("the specification is there")
        .map(|entry| entry.expect("its folder can be read"))
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let number = name.split_once('-')?.0.parse().ok()?;
            let text = std::fs::read_to_string(entry.path()).expect("a chapter can be read");
            Some((number, name, text))
        })
        .collect();
    chapters.sort();
    assert!(chapters.len() > 15);
    chapters
}

fn chapter(number: u32) -> String {
    let mut chapters = chapters();
    let at = chapters.iter().position(|chapter| chapter.0 == number);
    chapters.swap_remove(at.expect("there is such a chapter")).2
}

/// A number of a requirement, as it stands in a line.
pub struct Mention {
    pub side: String,
    pub chapter: u32,
    pub number: u32,
    /// It is given here, not only spoken of: it is bold.
    pub is_given: bool,
    /// What stands before it in the line.
    before: String,
}

pub fn mentions(line: &str) -> Vec<Mention> {
    let mut found = Vec::new();
    for side in ["DEV-", "DRV-"] {
        for (at, _) in line.match_indices(side) {
            let rest = &line[at + side.len()..];
            let mut parts = rest.splitn(2, '-');
            let digits =
                |text: &str| -> String { text.chars().take_while(char::is_ascii_digit).collect() };
            let chapter = parts.next().map(digits).unwrap_or_default();
            let number = parts.next().map(digits).unwrap_or_default();
            let (Ok(chapter_number), Ok(requirement)) = (chapter.parse(), number.parse()) else {
                panic!("not the number of a requirement: {line}");
            };
            let end = at + side.len() + chapter.len() + 1 + number.len();
            let before = &line[..at];
            found.push(Mention {
                side: side.trim_end_matches('-').into(),
                chapter: chapter_number,
                number: requirement,
                is_given: before.ends_with("**") && line[end..].starts_with("**"),
                before: before.trim_end_matches("**").into(),
            });
        }
    }
    found
}

#[test]
fn requirements_are_numbered_once_and_without_gaps() {
    let mut given: BTreeMap<(String, u32), BTreeSet<u32>> = BTreeMap::new();
    for (chapter, name, text) in chapters() {
        for line in text.lines() {
            for mention in mentions(line)
                .into_iter()
                .filter(|mention| mention.is_given)
            {
                let key = (mention.side.clone(), mention.chapter);
                assert_eq!(
                    mention.chapter, chapter,
                    "of another chapter, in {name}: {line}"
                );
                assert!(
                    given.entry(key).or_default().insert(mention.number),
                    "given twice: {line}"
                );
                let start = mention.before.as_str();
                assert!(
                    start.is_empty() || start.ends_with("| "),
                    "not at the start of a sentence or a cell: {line}"
                );
            }
        }
    }
    for ((side, chapter), numbers) in &given {
        let all: BTreeSet<u32> = (1..=numbers.len() as u32).collect();
        let missing: Vec<_> = all.difference(numbers).collect();
        assert!(
            missing.is_empty(),
            "missing of {side}-{chapter}: {missing:?}"
        );
    }
    let count = |side: &str| -> usize {
        let of_side = given.iter().filter(|((other, _), _)| other == side);
        of_side.map(|(_, numbers)| numbers.len()).sum()
    };
    println!(
        "{} of the device, {} of the driver",
        count("DEV"),
        count("DRV")
    );
    assert!(count("DEV") > 400 && count("DRV") > 50);
}

#[test]
fn requirements_that_are_spoken_of_exist() {
    let chapters = chapters();
    let mut given = BTreeSet::new();
    let mut spoken_of = Vec::new();
    for (_, name, text) in &chapters {
        for line in text.lines() {
            for mention in mentions(line) {
                let number = (mention.side, mention.chapter, mention.number);
                if mention.is_given {
                    given.insert(number);
                } else {
                    spoken_of.push((number, name.clone(), line.to_string()));
                }
            }
        }
    }
    for (number, name, line) in spoken_of {
        assert!(given.contains(&number), "{number:?} in {name}: {line}");
    }
}

#[test]
fn a_requirement_in_prose_says_must_or_should() {
    for (_, name, text) in chapters() {
        for paragraph in text.split("\n\n") {
            if !paragraph.starts_with("**DEV-") && !paragraph.starts_with("**DRV-") {
                continue;
            }
            // What introduces a table has its words there.
            let words = ["MUST", "SHOULD"];
            assert!(
                words.iter().any(|word| paragraph.contains(word))
                    || paragraph.ends_with(':')
                    || paragraph.contains("the same, without"),
                "{name}: {paragraph}"
            );
        }
    }
}

#[test]
fn what_is_demanded_has_a_number() {
    for (_, name, text) in chapters() {
        let mut is_picture = false;
        for paragraph in text.split("\n\n") {
            let was_picture = is_picture;
            is_picture ^= paragraph.matches("```").count() % 2 == 1;
            // A table has its words in its heading, and numbers in its rows.
            if was_picture || paragraph.starts_with(['|', '#', '`', '<']) {
                continue;
            }
            let demands = paragraph
                .split(|letter: char| !letter.is_ascii_alphabetic())
                .any(|word| ["MUST", "SHOULD"].contains(&word));
            let is_given = |line: &str| mentions(line).iter().any(|mention| mention.is_given);
            assert!(
                !demands || paragraph.lines().next().is_some_and(is_given),
                "{name}: {paragraph}"
            );
        }
    }
}

/// The cells of a row of a table.
pub fn cells(line: &str) -> Vec<&str> {
    let row = line.strip_prefix('|').and_then(|row| row.strip_suffix('|'));
    row.map(|row| row.split('|').map(str::trim).collect())
        .unwrap_or_default()
}

/// Rows of the table in section `heading` of the registry: first, last, name, status.
fn registry(text: &str, heading: &str) -> Vec<(u64, u64, String, String)> {
    let section = text
        .split_once(&format!("\n### {heading}\n"))
        .unwrap_or_else(|| panic!("no section {heading} in the registry"))
        .1;
    let section = section.split("\n#").next().unwrap_or_default();
    let number = |text: &str| -> u64 {
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        parsed.unwrap_or_else(|_| panic!("{heading}: {text} is no number"))
    };
    let rows: Vec<_> = section
        .lines()
        .filter(|line| line.starts_with("| ") && line.as_bytes()[2].is_ascii_digit())
        .map(|line| {
            let cells = cells(line);
            let [range, name, status] = cells[..] else {
                panic!("{heading}: {line}");
            };
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            (number(first), number(last), name.into(), status.into())
        })
        .collect();
    assert!(!rows.is_empty(), "{heading}");
    rows
}

/// Checks that the rows follow each other with neither gap nor overlap, up to `last`.
fn check_cover(heading: &str, rows: &[(u64, u64, String, String)], last: u64) {
    let mut next = 0;
    for (first, end, name, status) in rows {
        assert_eq!(
            *first, next,
            "{heading}: {name} does not follow what is before"
        );
        assert!(end >= first, "{heading}: {name}");
        let known = [
            "assigned",
            "reserved",
            "free",
            "experiment",
            "never",
            "retired",
        ];
        assert!(known.contains(&status.as_str()), "{heading}: {status}");
        assert_eq!(
            status == "assigned",
            name.starts_with('`'),
            "{heading}: {name}"
        );
        next = end + 1;
    }
    assert_eq!(next, last + 1, "{heading} ends early or late");
}

/// What a row of the sources has as number or value.
fn value(text: &str) -> u64 {
    if let Some(bit) = text.strip_prefix("1 << ") {
        return bit.parse().expect("a bit");
    }
    let text = text.replace('_', "");
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

#[test]
fn every_number_of_the_sources_is_in_the_registry() {
    let text = chapter(15);
    let mut enums = 0;
    for (_, _, source) in SOURCES {
        // How far the numbers of an enum go, by the type it stands for.
        let last = |name: &str| -> u64 {
            let start = format!("pub enum {name}: ");
            let at = source.find(&start).expect("the enum is there") + start.len();
            match &source[at..at + 3] {
                "u8 " => 0xff,
                "u16" => 0xffff,
                _ => 0xffff_ffff,
            }
        };
        for item in parse(source).1 {
            let Item::Numbers { name, rows, .. } = item else {
                continue;
            };
            enums += 1;
            let registered = registry(&text, &name);
            // There is a bit for each transport.
            let last = if name == "Transport" { 7 } else { last(&name) };
            check_cover(&name, &registered, last);
            compare(&name, &rows.iter().collect::<Vec<_>>(), &registered);
        }
    }
    assert_eq!(enums, 18);
}

/// Checks that what the sources assign is what the registry has as assigned.
fn compare(heading: &str, rows: &[&Row], registered: &[(u64, u64, String, String)]) {
    let ours: BTreeSet<_> = rows
        .iter()
        .map(|row| (value(&row.number), format!("`{}`", row.name)))
        .collect();
    let theirs: BTreeSet<_> = registered
        .iter()
        .filter(|(_, _, _, status)| status == "assigned")
        .map(|(first, last, name, _)| {
            assert_eq!(first, last, "{heading}: {name}");
            (*first, name.clone())
        })
        .collect();
    assert_eq!(ours, theirs, "{heading}");
}

/// The constants of the sources whose name starts so and whose value is one bit, or an offset.
fn constants(prefix: &str) -> Vec<Row> {
    SOURCES
        .iter()
        .flat_map(|(_, _, source)| parse(source).0)
        .filter(|row| row.name.starts_with(prefix))
        .collect()
}

#[test]
fn every_bit_of_the_sources_is_in_the_registry() {
    let text = chapter(15);
    for (heading, last) in [
        ("FEATURE", 63),
        ("FUNCTION", 7),
        ("CONTROL", 31),
        ("COMMAND", 15),
        ("QP_FLAG", 15),
        ("SRQ_FLAG", 15),
        ("REGION", 31),
        ("FAULT", 31),
        ("MODIFY", 31),
        ("ACCESS", 31),
        ("SEND", 15),
        ("FLUSH", 31),
        ("COMPLETION", 15),
        ("TRANSMIT", 15),
        ("RECEIVED", 15),
        ("INTERFACE", 15),
        ("HASH", 15),
        ("FLOW_TO", 15),
        ("FLOW_LAYER", 7),
        ("FRAGMENT", 7),
        ("BAD_BUFFERS", 63),
    ] {
        let constants = constants(&format!("{heading}_"));
        // Sizes and sets have other forms.
        let bits: Vec<_> = constants
            .iter()
            .filter(|row| row.number.starts_with("1 << "))
            .collect();
        assert!(!bits.is_empty(), "{heading}");
        let registered = registry(&text, heading);
        check_cover(heading, &registered, last);
        compare(heading, &bits, &registered);
    }
    // No constant that is one bit is left out.
    let known = [
        "FEATURE_",
        "FUNCTION_",
        "CONTROL_",
        "COMMAND_",
        "QP_FLAG_",
        "SRQ_FLAG_",
        "REGION_",
        "FAULT_",
        "MODIFY_",
        "ACCESS_",
        "SEND_",
        "FLUSH_",
        "COMPLETION_",
        "TRANSMIT_",
        "RECEIVED_",
        "INTERFACE_",
        "HASH_",
        "FLOW_TO_",
        "FLOW_LAYER_",
        "FRAGMENT_",
        "BAD_BUFFERS_",
        // Entries of tables, in chapter 4, and sizes.
        "ON_DEMAND_",
        "ATT_MAX_",
        "MAX_MESSAGE",
        // Between kernel and provider, not of the device.
        "UVERBS_QP_",
    ];
    for row in constants("") {
        if row.number.starts_with("1 << ") {
            let is_known = known.iter().any(|prefix| row.name.starts_with(prefix));
            assert!(is_known, "{} is in no table", row.name);
        }
    }
}

#[test]
fn every_offset_of_the_sources_is_in_the_registry() {
    let text = chapter(15);
    for (heading, but) in [("REG", ""), ("DOORBELL", "DOORBELL_PUSH")] {
        let constants = constants(&format!("{heading}_"));
        let offsets: Vec<_> = constants
            .iter()
            .filter(|row| row.number.starts_with("0x") && row.name != "DOORBELL_PAGE_SIZE")
            .filter(|row| but.is_empty() || !row.name.starts_with(but))
            .collect();
        let registered = registry(&text, heading);
        compare(heading, &offsets, &registered);
        let mut end = 0;
        for (first, last, name, _) in &registered {
            assert!(*first >= end && last >= first, "{heading}: {name}");
            end = last + 1;
        }
        assert_eq!(end, 0x1000, "{heading}");
    }
    let push = (
        ferrite_abi::DOORBELL_PUSH,
        ferrite_abi::DOORBELL_PUSH_END - 1,
    );
    assert!(text.contains(&format!(
        "| {:#05x}-{:#05x} | `DOORBELL_PUSH`",
        push.0, push.1
    )));
}

#[test]
fn every_feature_is_in_the_table_of_features() {
    let text = chapter(2);
    let features = constants("FEATURE_");
    let bits: BTreeMap<u64, &str> = features
        .iter()
        .map(|row| (value(&row.number), row.name.as_str()))
        .collect();
    let mut listed = BTreeSet::new();
    for line in text.lines() {
        let cells = cells(line);
        let (Some(Ok(bit)), Some(name)) = (
            cells.first().map(|cell| cell.parse::<u64>()),
            cells.get(1).and_then(|cell| cell.strip_prefix("`FEATURE_")),
        ) else {
            continue;
        };
        let name = format!("FEATURE_{}", name.trim_end_matches('`'));
        assert_eq!(bits.get(&bit), Some(&name.as_str()), "{line}");
        assert!(listed.insert(bit), "{name} twice");
        // What it needs is named with its bit, and the effect of its absence is said.
        let [_, _, allows, needs, without] = cells[..] else {
            panic!("{line}");
        };
        assert!(!allows.is_empty() && !without.is_empty(), "{line}");
        if !needs.is_empty() {
            let (bit, name) = needs.split_once(" `").expect("a bit and a name");
            let bit = bit.parse().expect("a bit");
            assert_eq!(bits.get(&bit), Some(&name.trim_end_matches('`')), "{line}");
        }
    }
    let all: BTreeSet<u64> = bits.into_keys().collect();
    assert_eq!(listed, all);
}

#[test]
fn the_table_of_contents_has_every_chapter() {
    let readme = std::fs::read_to_string(folder().join("README.md")).expect("it is there");
    for (number, name, text) in chapters() {
        assert!(
            readme.contains(&format!("| [{number}]({name}) |")),
            "{name}"
        );
        assert!(text.contains(&format!("\n# {number}. ")), "{name}");
    }
}
