// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is printed: a line per check, and at the end how many passed.

use std::cell::RefCell;

thread_local! {
    static COMPLAINTS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Notes something wrong that happened where no check is at hand, such as in a destructor; the
/// check that runs fails by it.
pub fn complaint(text: String) {
    COMPLAINTS.with(|complaints| complaints.borrow_mut().push(text));
}

/// Takes what was noted.
pub fn complaints() -> Vec<String> {
    COMPLAINTS.with(|complaints| std::mem::take(&mut *complaints.borrow_mut()))
}

/// How a check ended other than well.
#[derive(Debug)]
pub enum Outcome {
    /// It failed.
    Failed(String),
    /// It makes no sense here.
    Skipped(String),
}

impl From<String> for Outcome {
    fn from(reason: String) -> Self {
        Outcome::Failed(reason)
    }
}

impl From<&str> for Outcome {
    fn from(reason: &str) -> Self {
        Outcome::Failed(reason.into())
    }
}

/// The result of a check or a part of it.
pub type Check<T = ()> = Result<T, Outcome>;

/// Counts and prints.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: usize,
}

impl Report {
    /// Enters the result of a check.
    pub fn enter(&mut self, name: &str, result: Check) {
        let noted = complaints();
        match result {
            Ok(()) if noted.is_empty() => {
                self.passed += 1;
                println!("ok {name}");
            }
            Ok(()) => self.fail(name, &noted.join("; ")),
            Err(Outcome::Failed(reason)) => self.fail(name, &reason),
            Err(Outcome::Skipped(reason)) => println!("skip {name}: {reason}"),
        }
    }

    fn fail(&mut self, name: &str, reason: &str) {
        self.failed += 1;
        println!("not ok {name}: {reason}");
    }

    /// Prints the last line; true if nothing failed and something passed.
    pub fn finish(&self) -> bool {
        println!("{} passed, {} failed", self.passed, self.failed);
        self.failed == 0 && self.passed > 0
    }
}

/// Fails unless both are the same.
#[macro_export]
macro_rules! expect {
    ($left:expr, $right:expr, $($what:tt)+) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            return Err($crate::report::Outcome::Failed(format!(
                "{}: got {:?}, expected {:?}", format_args!($($what)+), left, right
            )));
        }
    }};
}
