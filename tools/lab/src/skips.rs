// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists of what may be skipped, and why. A skip that is in no list is a failure, and so is one
//! that is listed and passes: the list would hide that it fails later.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{bail, Context, Result};

use crate::PROJECT;

/// The checks of verbs-check that may be skipped, below the project.
pub const VERBS_CHECK: &str = "tests/verbs-check-skips.txt";

/// What may be skipped, with the reasons.
#[derive(Debug, Default)]
pub struct Skips(pub BTreeMap<String, String>);

impl Skips {
    /// Reads a list of the project: a name, the separator and the reason on each line; `#` begins
    /// a comment.
    pub fn read(file: &str, separator: &str) -> Result<Self> {
        let path = Path::new(PROJECT).join(file);
        let text =
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Self::parse(&text, separator).with_context(|| file.to_owned())
    }

    /// Reads the text of a list.
    pub fn parse(text: &str, separator: &str) -> Result<Self> {
        let mut skips = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            match line.split_once(separator) {
                Some((name, reason)) if !name.is_empty() && !reason.trim().is_empty() => {
                    skips.insert(name.trim().to_owned(), reason.trim().to_owned());
                }
                _ => bail!("line {}: {line} without a reason", number + 1),
            }
        }
        Ok(Self(skips))
    }
}

/// What verbs-check said of its checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// How many passed.
    pub passed: usize,
    /// Those skipped that may be.
    pub skipped: usize,
    /// What is wrong, a line each.
    pub wrong: Vec<String>,
}

impl Checks {
    /// Reads the output of verbs-check: `ok NAME`, `not ok NAME: why`, `skip NAME: why`.
    pub fn read(output: &str, skips: &Skips) -> Self {
        let mut checks = Self::default();
        for line in output.lines() {
            if let Some(name) = line.strip_prefix("ok ") {
                checks.passed += 1;
                if skips.0.contains_key(name) {
                    checks.wrong.push(format!(
                        "{name} passes, but is listed in {VERBS_CHECK}: remove it there"
                    ));
                }
            } else if let Some(skipped) = line.strip_prefix("skip ") {
                // Names have colons of their own.
                let listed = skips
                    .0
                    .keys()
                    .any(|name| matches!(skipped.strip_prefix(name.as_str()), Some(rest) if rest.starts_with(": ")));
                if listed {
                    checks.skipped += 1;
                } else {
                    checks.wrong.push(format!(
                        "skipped, and {VERBS_CHECK} does not say why it may be: {skipped}"
                    ));
                }
            } else if line.starts_with("not ok ") {
                checks.wrong.push(line.to_owned());
            }
        }
        if checks.passed == 0 {
            checks.wrong.push("no check passed".to_owned());
        }
        checks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_a_reason() {
        let skips = Skips::parse(
            "# why\na: b -- no GPU  # here\n\n c: d --  the same\n",
            " -- ",
        );
        let skips = skips.unwrap();
        assert_eq!(skips.0["a: b"], "no GPU");
        assert_eq!(skips.0["c: d"], "the same");
        for bad in ["a: b\n", "a: b -- # later\n", " -- why\n"] {
            assert!(Skips::parse(bad, " -- ").is_err(), "{bad}");
        }
    }

    #[test]
    fn only_listed_skips_of_checks_are_forgiven() {
        let skips = Skips::parse("a: b -- why\na: old -- why\n", " -- ").unwrap();
        let said = "ok a: c\nskip a: b: none here: 22\n2 passed, 0 failed\n";
        let checks = Checks::read(said, &skips);
        assert_eq!((checks.passed, checks.skipped), (1, 1));
        assert_eq!(checks.wrong, [""; 0]);
        for (said, wrong) in [
            ("ok a: c\nskip a: bb: none here\n", "a: bb: none here"),
            ("ok a: c\nskip a: d: none here\n", "a: d: none here"),
            ("ok a: c\nok a: old\n", "a: old passes"),
            ("ok a: c\nnot ok a: e: 1 for 2\n", "not ok a: e: 1 for 2"),
            ("skip a: b: none here\n", "no check passed"),
            ("", "no check passed"),
        ] {
            let checks = Checks::read(said, &skips);
            assert_eq!(checks.wrong.len(), 1, "{said}");
            assert!(checks.wrong[0].contains(wrong), "{checks:?}");
        }
    }
}
