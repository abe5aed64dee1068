// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs checks, each on a device that has just been reset.

use crate::checks::{self, Check};
use crate::host::Host;
use crate::outcome::{Outcome, Stop};
use crate::process::{end, Subject, Target};
use crate::report::{Report, Verdict};
use crate::requirements::{self, Id, Requirement};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// How long a check may take; a device that does not answer at all makes it take longer.
const LIMIT: Duration = Duration::from_secs(120);

/// Whether a requirement is asked for: by its number, or the beginning of it.
pub fn is_asked_for(id: Id, filter: Option<&str>) -> bool {
    filter.is_none_or(|filter| {
        let id = id.to_string();
        let rest = id.strip_prefix(filter.trim_end_matches('-'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    })
}

/// Checks a device against all requirements that `filter` asks for, and tells of each.
pub fn run(target: &Target, filter: Option<&str>, out: &mut dyn Write) -> io::Result<Report> {
    let all = requirements::all();
    let mut report = Report {
        mistakes: mistakes(&all),
        ..Report::default()
    };
    let table: BTreeMap<Id, &Check> = checks::all().into_iter().map(|c| (c.id(), c)).collect();
    let reasons = checks::unchecked();
    let mut subject = None;
    for requirement in all.into_iter().filter(|r| is_asked_for(r.id, filter)) {
        let verdict = match (table.get(&requirement.id), reasons.get(&requirement.id)) {
            (Some(check), _) => verdict(target, &mut subject, check),
            (None, Some(reason)) => Verdict::Unchecked(reason),
            (None, None) => Verdict::Forgotten,
        };
        writeln!(
            out,
            "{} {verdict}\n    {}",
            requirement.id, requirement.text
        )?;
        report.verdicts.push((requirement, verdict));
    }
    report.print_coverage(out)?;
    Ok(report)
}

/// What is wrong with the tables of checks and reasons.
pub fn mistakes(all: &[Requirement]) -> Vec<String> {
    let known: BTreeSet<Id> = all.iter().map(|requirement| requirement.id).collect();
    let mut checked = BTreeSet::new();
    let mut mistakes = Vec::new();
    for id in requirements::repeated(all) {
        mistakes.push(format!("{id} stands in the specification twice"));
    }
    for check in checks::all() {
        let id = check.id();
        if !known.contains(&id) {
            mistakes.push(format!(
                "a check is of {id}, which is not in the specification"
            ));
        }
        if !checked.insert(id) {
            mistakes.push(format!("there are two checks of {id}"));
        }
    }
    for id in checks::unchecked().keys() {
        if !known.contains(id) {
            mistakes.push(format!(
                "a reason is of {id}, which is not in the specification"
            ));
        }
        if checked.contains(id) {
            mistakes.push(format!(
                "there is a check of {id}, and a reason why there is none"
            ));
        }
    }
    mistakes
}

/// Makes one check; what the device does wrong, be it its end, is of this check alone.
fn verdict(target: &Target, subject: &mut Option<Subject>, check: &Check) -> Verdict {
    let outcome = check_on(target, subject, check);
    match outcome {
        Ok(()) => Verdict::Kept,
        Err(Stop::Failed(why)) => {
            // Whatever state it is in; a device that is not this program's is only reset.
            if matches!(target, Target::Started(_)) {
                *subject = None;
            }
            Verdict::Broken(why)
        }
        Err(Stop::NotHere(why)) => Verdict::NotHere(why),
    }
}

fn check_on(target: &Target, subject: &mut Option<Subject>, check: &Check) -> Outcome {
    let subject = match subject {
        Some(subject) => subject,
        none => none.insert(Subject::new(target)?),
    };
    let _watchdog = Watchdog::new(subject, check);
    let host = Host::new(
        &mut subject.device,
        subject.wire.as_mut(),
        subject.interface.as_mut(),
    );
    let mut host = host?;
    // A check that panics has met what it did not reckon with.
    let result = catch_unwind(AssertUnwindSafe(|| (check.run)(&mut host)));
    let finished = host.finish();
    match result {
        Ok(Ok(())) => finished,
        Ok(stopped) => stopped,
        Err(_) => crate::outcome::failed("the check panicked"),
    }
}

/// Ends a device that keeps a check waiting: the protocol's client waits for ever.
struct Watchdog {
    done: Sender<()>,
}

impl Watchdog {
    fn new(subject: &Subject, check: &Check) -> Self {
        let (done, wait) = channel();
        let (pid, id) = (subject.pid(), check.id());
        thread::spawn(move || {
            if wait.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                match pid {
                    Some(pid) => end(pid),
                    None => {
                        eprintln!("{id} FAILED: the device has not answered for {LIMIT:?}");
                        std::process::exit(1);
                    }
                }
            }
        });
        Self { done }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let _ = self.done.send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_asks_for_a_chapter_or_a_number() {
        let id = |text| Id::parse(text).unwrap();
        assert!(is_asked_for(id("DEV-3-12"), None));
        assert!(is_asked_for(id("DEV-3-12"), Some("DEV-3")));
        assert!(is_asked_for(id("DEV-3-12"), Some("DEV-3-12")));
        assert!(!is_asked_for(id("DEV-3-12"), Some("DEV-3-1")));
        assert!(!is_asked_for(id("DEV-13-1"), Some("DEV-1")));
    }

    #[test]
    fn every_requirement_has_a_check_or_a_reason() {
        let all = requirements::all();
        assert_eq!(mistakes(&all), Vec::<String>::new());
        let checked: BTreeSet<Id> = checks::all().iter().map(|check| check.id()).collect();
        let reasons = checks::unchecked();
        let forgotten: Vec<String> = all
            .iter()
            .map(|requirement| requirement.id)
            .filter(|id| !checked.contains(id) && !reasons.contains_key(id))
            .map(|id| id.to_string())
            .collect();
        assert_eq!(forgotten, Vec::<String>::new());
    }
}
