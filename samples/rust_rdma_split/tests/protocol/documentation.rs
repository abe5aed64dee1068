// SPDX-License-Identifier: GPL-2.0

//! The tables of `Documentation/split.md` say what the code says.
//!
//! They are written anew by `FERRITE_UPDATE=1 cargo test -p ferrite-split documentation`.

use ferrite_split::*;
use std::fmt::Write;

const SOURCE: &str = include_str!("../../src/protocol/wire.rs");
const BEGIN: &str =
    "<!-- Generated from samples/rust_rdma_split/src/protocol; see its tests. -->\n";
const END: &str = "<!-- End of what is generated. -->\n";

/// The words of comments, in one line.
fn line(words: &str) -> String {
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn layout<T: Layout>(out: &mut String) {
    let _ = write!(
        out,
        "\n### {}, {} bytes\n\n{}\n\n| offset | field | type | |\n|---|---|---|---|\n",
        T::NAME,
        T::SIZE,
        line(T::WORDS)
    );
    for field in T::FIELDS {
        let words = line(field.words);
        let _ = writeln!(
            out,
            "| {} | `{}` | `{}` | {words} |",
            field.offset, field.name, field.ty
        );
    }
}

macro_rules! numbers {
    ($out:ident, $($name:ident),*) => {$(
        let _ = write!(
            $out,
            "\n### {}\n\n{}\n\n| number | name | |\n|---|---|---|\n",
            stringify!($name),
            line($name::WORDS)
        );
        for (value, name, words) in $name::ALL {
            let _ = writeln!($out, "| {} | `{name}` | {} |", value.number(), line(words));
        }
    )*};
}

macro_rules! layouts {
    ($out:ident, $($name:ident),*) => {$( layout::<$name>(&mut $out); )*};
}

/// The constants of the source, with their values and words.
fn constants(out: &mut String) {
    out.push_str("\n### Constants\n\n| constant | value | |\n|---|---|---|\n");
    let mut words = String::new();
    for source in SOURCE.lines() {
        if let Some(more) = source.strip_prefix("/// ") {
            words = format!("{words} {more}");
            continue;
        }
        if let Some((name, rest)) = source
            .strip_prefix("pub const ")
            .and_then(|it| it.split_once(": "))
        {
            let value = rest.split_once(" = ").unwrap().1.trim_end_matches(';');
            let words = line(&words).replace(['[', ']'], "");
            let _ = writeln!(out, "| `{name}` | `{value}` | {words} |");
        }
        words.clear();
    }
}

fn render() -> String {
    let mut out = String::from(BEGIN);
    constants(&mut out);
    numbers!(out, Function, PoolKind, Role, Channel, Service, Variant, Operation, Status);
    layouts!(
        out,
        Join,
        Header,
        EntryCount,
        PoolEntry,
        Get,
        UpdateEntry,
        PoolReference,
        Data,
        IndicateEntry,
        Request,
        Reply,
        MacAddress,
        Mtu,
        Vlan,
        FilterFlags,
        Link,
        Statistics
    );
    out.push_str("\n### What a peer may do wrong\n\n| counter | |\n|---|---|\n");
    for (_, name, words) in Violation::ALL {
        let _ = writeln!(out, "| `{name}` | {} |", line(words));
    }
    out.push('\n');
    out.push_str(END);
    out
}

#[test]
fn documentation_has_the_tables_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Documentation/split.md");
    let written = std::fs::read_to_string(path).expect("split.md is there");
    let (before, rest) = written.split_once(BEGIN).expect("where tables begin");
    let (_, after) = rest.split_once(END).expect("where tables end");
    let rendered = format!("{before}{}{after}", render());
    if std::env::var_os("FERRITE_UPDATE").is_some() {
        std::fs::write(path, rendered).expect("split.md can be written");
        return;
    }
    assert!(
        rendered == written,
        "Documentation/split.md is out of date: run \
         FERRITE_UPDATE=1 cargo test -p ferrite-split documentation"
    );
}

#[test]
fn documentation_has_all_that_the_source_defines() {
    let rendered = render();
    let defined = |line: &str, what: &str| {
        let name = line.trim().strip_prefix(what)?.split_once(": ")?.0;
        Some(name.to_owned())
    };
    let mut count = 0;
    for line in SOURCE.lines() {
        let name = defined(line, "pub struct ").map(|name| format!("\n### {name}, "));
        let name = name.or(defined(line, "pub enum ").map(|name| format!("\n### {name}\n")));
        if let Some(heading) = name {
            assert!(rendered.contains(&heading), "{heading}");
            count += 1;
        }
    }
    assert_eq!(count, 25);
    // What the source says and what was compiled are the same thing.
    assert!(rendered.contains("\n### PoolEntry, 40 bytes\n"));
    assert!(rendered.contains("| 32 | `context` | `u64` | The pool context"));
}
