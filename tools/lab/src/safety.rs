// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the project demands of `unsafe` in kernel code beyond what clippy does: clippy sees what is compiled, and does
//! not read reasons.

use anyhow::{bail, Result};
use std::fs;
use std::path::PathBuf;

/// What names no fact.
const VAGUE: &[&str] = &[
    "as above",
    "as in ",
    "contract",
    "here, too",
    "see the",
    "the rest",
    "the same as",
    "the same holds",
    "the same is so",
];

/// How many statements one reason can be for.
const STATEMENTS: usize = 4;

/// How many blocks the driver has at most: what is unsafe is for the abstractions.
const BLOCKS_OF_DRIVER: usize = 6;

/// A sample that is written on safe abstractions only.
const SAFE: &str = "rust_rdma_split";

/// Fails with all that is wrong.
pub(crate) fn check(files: &[PathBuf]) -> Result<()> {
    let mut wrong = Vec::new();
    let mut of_driver = 0;
    for file in files {
        let text = fs::read_to_string(file)?;
        if file.components().any(|part| part.as_os_str() == "drivers") {
            of_driver += blocks(&text);
        }
        if file.components().any(|part| part.as_os_str() == SAFE) && has_unsafe(&text) {
            wrong.push(format!(
                "{}: what is unsafe is for the abstractions",
                file.display()
            ));
        }
        for (line, what) in look_at(&text) {
            wrong.push(format!("{}:{line}: {what}", file.display()));
        }
    }
    if of_driver > BLOCKS_OF_DRIVER {
        wrong.push(format!(
            "the driver has {of_driver} unsafe blocks, of {BLOCKS_OF_DRIVER} at most"
        ));
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

/// Whether anything in a file is unsafe: blocks, implementations, functions, attributes.
fn has_unsafe(text: &str) -> bool {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let code = text.lines().map(str::trim_start);
    code.filter(|line| !line.starts_with("//"))
        .any(|line| line.split(|at| !is_word(at)).any(|word| word == "unsafe"))
}

/// How many unsafe blocks are in a file.
fn blocks(text: &str) -> usize {
    text.lines()
        .map(str::trim_start)
        .filter(|line| !line.starts_with("//") && line.contains("unsafe {"))
        .count()
}

/// What is wrong in a file, by line.
fn look_at(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let mut wrong = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        if let Some(reason) = reason_from(&lines, at) {
            let reason = reason.to_lowercase();
            for vague in VAGUE.iter().filter(|vague| says(&reason, vague)) {
                wrong.push((at + 1, format!("a reason that names no fact: \"{vague}\"")));
            }
        }
        if code.starts_with("//") || !(code.contains("unsafe {") || code.starts_with("unsafe impl"))
        {
            continue;
        }
        if !has_reason(&lines, at) {
            wrong.push((at + 1, "no SAFETY comment".into()));
        }
        let statements = statements(&lines, at);
        if statements > STATEMENTS {
            let what = format!("{statements} statements under one reason, of {STATEMENTS} at most");
            wrong.push((at + 1, what));
        }
    }
    wrong
}

/// Whether it says that, in words of its own.
fn says(reason: &str, vague: &str) -> bool {
    reason.match_indices(vague).any(|(at, _)| {
        let before = reason[..at].chars().next_back();
        let after = reason[at + vague.len()..].chars().next();
        let ends = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
        ends(before) && (vague.ends_with(' ') || ends(after))
    })
}

/// The whole reason that begins in a line.
fn reason_from(lines: &[&str], at: usize) -> Option<String> {
    let (_, first) = lines[at].split_once("// SAFETY:")?;
    let more = lines[at + 1..]
        .iter()
        .map(|line| line.trim_start())
        .take_while(|line| line.starts_with("//") && !line.starts_with("///"))
        .map(|line| line.trim_start_matches('/').trim());
    Some(
        std::iter::once(first.trim())
            .chain(more)
            .collect::<Vec<_>>()
            .join(" "),
    )
}

/// Whether a comment with a reason is before what is unsafe in a line, or before the statement that it is part of.
fn has_reason(lines: &[&str], at: usize) -> bool {
    let mut line = at;
    while line > 0 {
        let before = lines[line - 1].trim();
        if before.starts_with("//") {
            if before.contains("SAFETY:") {
                return true;
            }
        } else if before.is_empty() || before.ends_with([';', '}']) {
            return false;
        }
        line -= 1;
    }
    false
}

/// How many statements are in a block that begins in a line; 0 for one that ends there.
fn statements(lines: &[&str], at: usize) -> usize {
    if !lines[at].ends_with("unsafe {") {
        return 0;
    }
    let indent = |line: &str| line.len() - line.trim_start().len();
    lines[at + 1..]
        .iter()
        .take_while(|line| line.is_empty() || indent(line) > indent(lines[at]))
        .filter(|line| line.ends_with(';') && !line.trim_start().starts_with("//"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_a_fact() {
        let good = "// SAFETY: The caller vouches for `x`, which was\n// initialised in `new`.\nunsafe { f(x) };\n";
        assert!(look_at(good).is_empty());
        for vague in [
            "As above.",
            "`x` is valid; see the\n// module.",
            "The core's contract.",
        ] {
            let text = format!("// SAFETY: {vague}\nunsafe {{ f(x) }};\n");
            assert_eq!(look_at(&text).len(), 1, "{vague}");
        }
        // A part of a word is no word.
        assert!(look_at("// SAFETY: It was in the contraction.\nunsafe { f(x) };\n").is_empty());
    }

    #[test]
    fn what_is_unsafe_has_a_reason() {
        assert_eq!(look_at("let a = 1;\nunsafe { f(x) };\n").len(), 1);
        assert_eq!(look_at("unsafe impl Send for X {}\n").len(), 1);
        // Of the statement, or of what is unsafe in it.
        assert!(look_at("// SAFETY: `x` is ours.\nlet a =\n    unsafe { f(x) };\n").is_empty());
        assert!(look_at("to(\n    // SAFETY: `x` is ours.\n    unsafe { f(x) },\n);\n").is_empty());
        // Not that of another one.
        assert_eq!(
            look_at("// SAFETY: `x` is ours.\nunsafe { f(x) };\nunsafe { f(y) };\n").len(),
            1
        );
    }

    #[test]
    fn what_is_unsafe_is_found_where_nothing_is_to_be() {
        for text in [
            "let a = unsafe { f() };\n",
            "unsafe impl Send for X {}\n",
            "    pub unsafe fn f() {}\n",
            "#[unsafe(no_mangle)]\n",
        ] {
            assert!(has_unsafe(text), "{text}");
        }
        assert!(!has_unsafe("// unsafe { f() }\n#![forbid(unsafe_code)]\n"));
    }

    #[test]
    fn blocks_are_counted() {
        let text =
            "// unsafe { f() }\nunsafe { f() };\nunsafe impl Send for X {}\nlet a = unsafe {\n";
        assert_eq!(blocks(text), 2);
    }

    #[test]
    fn a_reason_is_not_for_a_dozen_statements() {
        let block = |n| {
            format!(
                "// SAFETY: `x` is ours.\nunsafe {{\n{}}}\n",
                "    f(x);\n".repeat(n)
            )
        };
        assert!(look_at(&block(STATEMENTS)).is_empty());
        assert_eq!(look_at(&block(STATEMENTS + 1)).len(), 1);
    }
}
