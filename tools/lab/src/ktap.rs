// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the kernel's test results (KTAP) out of a kernel log.

/// One test case of a suite.
#[derive(Debug, PartialEq, Eq)]
pub struct Case {
    /// `suite/case`.
    pub name: String,
    /// How it ended.
    pub verdict: Verdict,
    /// What was printed since the case before.
    pub notes: String,
}

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As it should.
    Passed,
    /// Not as it should.
    Failed,
    /// It did not apply.
    Skipped,
}

/// A log line without its time stamp.
fn text(line: &str) -> &str {
    match line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "))
    {
        Some((stamp, rest)) if stamp.trim().parse::<f64>().is_ok() => rest,
        _ => line,
    }
}

/// All cases in a log, in order. Cases are the innermost results; the lines that sum up a suite
/// stand further out and are left alone.
pub fn cases(log: &str) -> Vec<Case> {
    let mut found = Vec::new();
    let mut suite: Option<(String, usize)> = None;
    let mut notes = String::new();
    // How many cases of the suite are still to come.
    let mut planned = 0;
    let end = |suite: &mut Option<(String, usize)>, planned: &mut usize, found: &mut Vec<Case>| {
        if let (Some((name, _)), 1..) = (suite.take(), *planned) {
            found.push(Case {
                name: format!("{name}/all that was planned"),
                verdict: Verdict::Failed,
                notes: format!("{planned} cases have no result"),
            });
        }
        *planned = 0;
    };
    for line in log.lines().map(text) {
        let indent = line.len() - line.trim_start().len();
        let body = line.trim();
        if let Some(name) = body.strip_prefix("# Subtest: ") {
            end(&mut suite, &mut planned, &mut found);
            suite = Some((name.to_owned(), indent));
            notes.clear();
            continue;
        }
        if let (Some((_, depth)), Some(count)) = (&suite, body.strip_prefix("1..")) {
            if indent == *depth {
                planned = count.parse().unwrap_or(0);
                continue;
            }
        }
        let (verdict, rest) = if let Some(rest) = body.strip_prefix("not ok ") {
            (Verdict::Failed, rest)
        } else if let Some(rest) = body.strip_prefix("ok ") {
            (Verdict::Passed, rest)
        } else {
            notes.push_str(body);
            notes.push('\n');
            continue;
        };
        let Some((name, depth)) = &suite else {
            continue;
        };
        if indent < *depth {
            end(&mut suite, &mut planned, &mut found);
            continue;
        }
        planned = planned.saturating_sub(1);
        let rest = rest.split_once(' ').map_or("", |(_, rest)| rest);
        let (case, directive) = rest.split_once('#').unwrap_or((rest, ""));
        let case = case.trim().trim_start_matches("- ");
        let verdict = if directive.trim().starts_with("SKIP") {
            Verdict::Skipped
        } else {
            verdict
        };
        found.push(Case {
            name: format!("{name}/{case}"),
            verdict,
            notes: std::mem::take(&mut notes),
        });
    }
    end(&mut suite, &mut planned, &mut found);
    found
}

#[cfg(test)]
mod tests {
    use super::{cases, Verdict};

    #[test]
    fn cases_are_counted_and_sums_are_not() {
        let log = "[    1.0] KTAP version 1\n\
            [    1.0] 1..1\n\
            [    1.0]     KTAP version 1\n\
            [    1.0]     # Subtest: rings\n\
            [    1.0]     1..3\n\
            [    1.1]     ok 1 wraps\n\
            [    1.1]     # drains: EXPECTATION FAILED at eq.rs:7\n\
            [    1.2]     not ok 2 drains\n\
            [    1.2]     ok 3 later # SKIP no device\n\
            [    1.2] # rings: pass:1 fail:1 skip:1 total:3\n\
            [    1.2] not ok 1 rings\n";
        let found = cases(log);
        let seen: Vec<_> = found.iter().map(|c| (c.name.as_str(), c.verdict)).collect();
        assert_eq!(
            seen,
            [
                ("rings/wraps", Verdict::Passed),
                ("rings/drains", Verdict::Failed),
                ("rings/later", Verdict::Skipped),
            ]
        );
        assert!(found[1].notes.contains("eq.rs:7"));
    }

    #[test]
    fn a_suite_that_ends_early_has_failed() {
        for end in [
            "",
            "[    1.2] not ok 1 rings\n",
            "[    1.2]     # Subtest: next\n",
        ] {
            let log = format!(
                "[    1.0]     # Subtest: rings\n[    1.0]     1..3\n[    1.1]     ok 1 wraps\n{end}"
            );
            let found = cases(&log);
            assert_eq!(found.len(), 2, "{end}");
            assert_eq!(found[1].verdict, Verdict::Failed);
            assert!(found[1].notes.contains("2 cases"));
        }
    }
}
