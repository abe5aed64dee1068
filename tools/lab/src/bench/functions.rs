// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which functions a guest's instructions are in.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use anyhow::{Context, Result};

/// What is not of the kernel.
const USER: &str = "user space";

/// Lines of a table.
const LINES: usize = 100;

/// Instructions by function, most first. That of a module has the module's name behind it.
pub struct Functions(Vec<(String, u64)>);

impl Functions {
    /// Of blocks of instructions as the plugin writes them, and symbols as `/proc/kallsyms` has them.
    pub fn new(blocks: &str, symbols: &str) -> Result<Self> {
        let mut starts = BTreeMap::new();
        for line in symbols.lines() {
            let mut words = line.split_whitespace();
            let (Some(address), Some(_), Some(name)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let address = u64::from_str_radix(address, 16).context("address of a symbol")?;
            starts.insert(address, (name, words.next().unwrap_or_default()));
        }
        let mut sums: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for line in blocks.lines() {
            let (address, count) = line.split_once(' ').context("a block without a count")?;
            let address = u64::from_str_radix(address, 16).context("address of a block")?;
            let name = match starts.range(..=address).next_back() {
                Some((_, name)) if address >> 63 == 1 => *name,
                _ => (USER, ""),
            };
            *sums.entry(name).or_default() += count.parse::<u64>().context("count of a block")?;
        }
        let mut all: Vec<(String, u64)> = sums
            .into_iter()
            .map(|((name, module), count)| (format!("{name} {module}").trim_end().into(), count))
            .collect();
        all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Ok(Self(all))
    }

    /// Writes a table, by what was done so often.
    pub fn write(&self, count: u64, text: &mut String) {
        let mut modules: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, instructions) in &self.0 {
            let of = match name.split_once(' ') {
                Some((_, module)) if module.starts_with('[') => module,
                None => "kernel",
                Some(_) => USER,
            };
            *modules.entry(of).or_default() += instructions;
        }
        let each = |instructions: u64| instructions as f64 / count.max(1) as f64;
        for (module, instructions) in modules {
            let _ = writeln!(text, "  {:>9.1}  all of {module}", each(instructions));
        }
        for (name, instructions) in self.0.iter().take(LINES) {
            let name = demangled(name);
            let _ = writeln!(text, "  {:>9.1}  {name}", each(*instructions));
        }
        text.push('\n');
    }
}

/// A name as it is in the source.
fn demangled(name: &str) -> String {
    let (symbol, module) = name.split_once(' ').unwrap_or((name, ""));
    if !symbol.starts_with("_R") {
        return name.to_owned();
    }
    let out = Command::new("c++filt").arg(symbol).output();
    let out = out.map(|out| out.stdout).unwrap_or_default();
    match String::from_utf8_lossy(&out).trim() {
        "" => name.to_owned(),
        plain => format!("{plain} {module}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str = "ffffffff81000000 T _text
ffffffff81000100 T memset
ffffffffc0001000 t ib_umem_get [ib_uverbs]
";

    #[test]
    fn instructions_are_in_the_function_that_began_last() {
        let blocks = "ffffffff81000100 7\nffffffff8100017f 3\n401000 5\nffffffffc0001010 30\n\
                      ffffffff810000ff 2\n7fff00000000 6\n";
        let Functions(found) = Functions::new(blocks, SYMBOLS).expect("functions");
        let wanted = [
            ("ib_umem_get [ib_uverbs]", 30),
            (USER, 11),
            ("memset", 10),
            ("_text", 2),
        ];
        assert_eq!(found, wanted.map(|(name, count)| (name.to_owned(), count)));
    }

    #[test]
    fn a_table_is_of_one_of_what_was_done() {
        let blocks = "ffffffff81000100 70\n401000 5\nffffffffc0001010 30\n";
        let functions = Functions::new(blocks, SYMBOLS).expect("functions");
        let mut text = String::new();
        functions.write(10, &mut text);
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        for wanted in [
            vec!["7.0", "all", "of", "kernel"],
            vec!["3.0", "all", "of", "[ib_uverbs]"],
            vec!["0.5", "all", "of", "user", "space"],
            vec!["7.0", "memset"],
        ] {
            assert!(lines.contains(&wanted), "{wanted:?} in\n{text}");
        }
    }

    #[test]
    fn what_is_no_block_is_an_error() {
        assert!(Functions::new("ffffffff81000100", SYMBOLS).is_err());
        assert!(Functions::new("x 1", SYMBOLS).is_err());
        assert!(Functions::new("", "x T y").is_err());
    }
}
