// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Whether what the documents of the kernel side name is there: files, types, and paths to what is in them.

use anyhow::{ensure, Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// Documents that tell engineers where things are.
pub(crate) const DOCUMENTS: &[&str] = &[
    "Documentation/driver.md",
    "Documentation/how-a-verb-travels.md",
    "Documentation/rust-rdma-driver.md",
    "tools/patches/tree/Documentation/infiniband/ferrite.rst",
    "tools/patches/tree/Documentation/infiniband/rdma_split.rst",
    "tools/patches/tree/Documentation/infiniband/rust.rst",
];

/// Fails with the names in `documents` that are nowhere in `sources`.
pub(crate) fn check(documents: &[PathBuf], sources: &[PathBuf]) -> Result<()> {
    let mut words = BTreeSet::new();
    for source in sources {
        // What is no text has no names.
        if let Ok(text) = fs::read_to_string(source) {
            words.extend(identifiers(&text).map(str::to_owned));
        }
    }
    let files: Vec<String> = sources
        .iter()
        .map(|source| source.to_string_lossy().into_owned())
        .collect();
    let mut wrong = Vec::new();
    for document in documents {
        let text = fs::read_to_string(document)
            .with_context(|| format!("reading {}", document.display()))?;
        for name in unknown(&text, &words, &files) {
            wrong.push(format!("{} names {name}", document.display()));
        }
    }
    ensure!(
        wrong.is_empty(),
        "{}\nwhich is nowhere in the sources",
        wrong.join("\n")
    );
    Ok(())
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// What a document has between backquotes, one or two, outside of its examples.
fn literals(text: &str) -> Vec<&str> {
    // In one kind of document they have two quotes, in the other one.
    let pieces = |line: &'_ str| if line.contains("``") { (2, 4) } else { (1, 2) };
    let examples = text.split("\n```").step_by(2);
    examples
        .flat_map(str::lines)
        .flat_map(|line| {
            let (first, each) = pieces(line);
            line.split('`').skip(first).step_by(each).map(str::trim)
        })
        .filter(|literal| !literal.is_empty())
        .collect()
}

/// Names in a document that are neither words of the sources nor files of theirs.
fn unknown<'a>(text: &'a str, words: &BTreeSet<String>, files: &[String]) -> Vec<&'a str> {
    let is_file = |name: &str| {
        [".rs", ".c", ".h"].iter().any(|end| name.ends_with(end)) && !name.contains([' ', '<'])
    };
    // As types are written; what is all in capitals may be the kernel's.
    let is_type = |name: &str| {
        let mut letters = name.chars();
        letters
            .next()
            .is_some_and(|first| first.is_ascii_uppercase())
            && name.contains(|c: char| c.is_ascii_lowercase())
    };
    let mut unknown = Vec::new();
    for literal in literals(text) {
        if is_file(literal) {
            let known = files.iter().any(|file| {
                file.strip_suffix(literal)
                    .is_some_and(|before| before.is_empty() || before.ends_with('/'))
            });
            if !known {
                unknown.push(literal);
            }
            continue;
        }
        let path = literal.contains("::");
        for name in identifiers(literal) {
            if (path || is_type(name)) && !words.contains(name) {
                unknown.push(name);
            }
        }
    }
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_nowhere_is_found() {
        let words: BTreeSet<String> = identifiers("struct Lent; mod lent { fn stop() {} }")
            .map(str::to_owned)
            .collect();
        let files = ["/p/rust/rdma/qp.rs".to_owned()];
        let unknown = |text| unknown(text, &words, &files);
        assert_eq!(
            unknown("`Lent` and `lent::stop` are in `rdma/qp.rs`."),
            [""; 0]
        );
        assert_eq!(unknown("`Borrowed` is not."), ["Borrowed"]);
        assert_eq!(unknown("`lent::go` is not."), ["go"]);
        assert_eq!(unknown("``lent::go`` is not."), ["go"]);
        assert_eq!(unknown("`qp.rs`, `p.rs`"), ["p.rs"]);
        // The kernel's, commands, and examples.
        assert_eq!(
            unknown("`IB_QPS_RTS`, `ip link`\n```\n`Gone`\n```\n`pci_intx`"),
            [""; 0]
        );
    }
}
