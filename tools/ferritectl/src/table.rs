// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tables in the driver's debugfs files: words separated by spaces, the first line names the
//! columns.

use anyhow::{bail, Context, Result};
use serde_json::{Map, Value};

/// The rows of a table, each a map from column to value.
pub type Rows = Vec<Map<String, Value>>;

/// A number where it is one; nothing for `-`; else the word.
fn value(word: &str) -> Value {
    match word.parse::<u64>() {
        Ok(number) => number.into(),
        Err(_) if word == "-" => Value::Null,
        Err(_) => word.into(),
    }
}

/// Reads a table.
pub fn parse(text: &str) -> Result<Rows> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines
        .next()
        .context("the table is empty")?
        .split_whitespace()
        .collect();
    let mut rows = Rows::new();
    for line in lines.filter(|line| !line.trim().is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.len() != names.len() {
            bail!(
                "{} words under {} columns ({}): {line}",
                words.len(),
                names.len(),
                names.join(" ")
            );
        }
        rows.push(
            names
                .iter()
                .zip(words)
                .map(|(name, word)| ((*name).to_owned(), value(word)))
                .collect(),
        );
    }
    Ok(rows)
}

/// The number in a column, 0 where there is none.
pub fn number(row: &Map<String, Value>, column: &str) -> u64 {
    row.get(column).and_then(Value::as_u64).unwrap_or(0)
}

/// How a value looks in a column of text.
fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Lays rows out in columns: numbers to the right, words to the left.
pub fn render(rows: &[Map<String, Value>], columns: &[&str]) -> String {
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| columns.iter().map(|name| cell(row.get(*name))).collect())
        .collect();
    let mut out = String::new();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, name)| {
            let widest = cells.iter().map(|row| row[at].len()).max();
            name.len().max(widest.unwrap_or(0))
        })
        .collect();
    let words: Vec<bool> = columns
        .iter()
        .map(|name| {
            rows.iter()
                .any(|row| row.get(*name).is_some_and(Value::is_string))
        })
        .collect();
    let header: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
    for row in std::iter::once(&header).chain(&cells) {
        let line: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(at, text)| {
                let width = widths[at];
                if words[at] {
                    format!("{text:<width$}")
                } else {
                    format!("{text:>width$}")
                }
            })
            .collect();
        out += "  ";
        out += line.join("  ").trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_dashes_are_told_apart() {
        let rows = parse("cqn owner consumed\n3 user -\n4 kernel 17\n").unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0]["owner"], "user");
        assert_eq!(rows[0]["consumed"], Value::Null);
        assert_eq!(number(&rows[1], "consumed"), 17);
        assert_eq!(number(&rows[0], "consumed"), 0);
        assert_eq!(number(&rows[0], "no such column"), 0);
    }

    #[test]
    fn a_table_without_rows_is_empty() {
        assert!(parse("qpn owner\n").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_table_is_refused() {
        assert!(parse("").is_err());
        assert!(parse("a b\n1\n").is_err());
        assert!(parse("a b\n1 2 3\n").is_err());
    }

    #[test]
    fn columns_line_up() {
        let rows = parse("eqn name\n1 x\n100 long\n").unwrap();
        assert_eq!(
            render(&rows, &["eqn", "name"]),
            "  eqn  name\n    1  x\n  100  long\n"
        );
        // A column that no row has is shown all the same.
        assert_eq!(render(&rows[..1], &["other"]), "  other\n      -\n");
    }
}
