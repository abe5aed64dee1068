// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The count of what passed and failed, and the lines that say so.

use std::time::{Duration, Instant};

use anyhow::Result;

/// Collects the results of a test run.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: Vec<String>,
}

impl Report {
    /// Says which stage begins.
    pub fn stage(&self, name: &str) {
        println!("--- {name}");
    }

    /// Runs one test and records how it went.
    pub fn test(&mut self, name: &str, test: impl FnOnce() -> Result<()>) -> bool {
        let start = Instant::now();
        let result = test();
        self.record(name, start.elapsed(), result)
    }

    /// Records one result.
    pub fn record(&mut self, name: &str, took: Duration, result: Result<()>) -> bool {
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("  ok      {name} ({:.1} s)", took.as_secs_f32());
                true
            }
            Err(error) => {
                println!("  FAILED  {name} ({:.1} s)", took.as_secs_f32());
                for line in format!("{error:#}").lines() {
                    println!("          {line}");
                }
                self.failed.push(name.to_owned());
                false
            }
        }
    }

    /// Whether nothing has failed so far.
    pub fn good(&self) -> bool {
        self.failed.is_empty()
    }

    /// Names the failures and prints the closing line.
    pub fn close(&self) {
        if !self.failed.is_empty() {
            println!("failed:");
            for name in &self.failed {
                println!("  {name}");
            }
        }
        println!("{} passed, {} failed", self.passed, self.failed.len());
    }
}
