// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The count of what passed and failed, and the lines that say so.

use std::time::{Duration, Instant};

use anyhow::Result;

/// Collects the results of a test run.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: Vec<String>,
    /// What each stage took; the last one may still run.
    stages: Vec<(String, Instant, Option<Duration>)>,
}

impl Report {
    /// Says which stage begins.
    pub fn stage(&mut self, name: &str) {
        self.end_stage();
        println!("--- {name}");
        self.stages.push((name.to_owned(), Instant::now(), None));
    }

    /// Adds a stage that has ended, and may have run beside others.
    pub fn stage_took(&mut self, name: &str, took: Duration) {
        self.end_stage();
        self.stages
            .push((name.to_owned(), Instant::now(), Some(took)));
    }

    /// Nothing that comes now belongs to the stage before.
    pub fn end_stage(&mut self) {
        if let Some((_, start, took @ None)) = self.stages.last_mut() {
            *took = Some(start.elapsed());
        }
    }

    /// Runs one test and records how it went.
    pub fn test(&mut self, name: &str, test: impl FnOnce() -> Result<()>) -> bool {
        let start = Instant::now();
        let result = test();
        self.record(name, start.elapsed(), result)
    }

    /// Records one result.
    pub fn record(&mut self, name: &str, took: Duration, result: Result<()>) -> bool {
        self.record_time(name, &format!("{:.1} s", took.as_secs_f32()), result)
    }

    /// The same of a test whose processes had processors for so long: what takes time because it waits is told from
    /// what does because there is much to do.
    pub fn record_with(
        &mut self,
        name: &str,
        took: Duration,
        processors: Duration,
        result: Result<()>,
    ) -> bool {
        let (took, processors) = (took.as_secs_f32(), processors.as_secs_f32());
        self.record_time(
            name,
            &format!("{took:.1} s, {processors:.1} s of processors"),
            result,
        )
    }

    fn record_time(&mut self, name: &str, time: &str, result: Result<()>) -> bool {
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("  ok      {name} ({time})");
                true
            }
            Err(error) => {
                println!("  FAILED  {name} ({time})");
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

    /// Says where the time went, names the failures and prints the closing line.
    pub fn close(&mut self) {
        self.end_stage();
        if self.stages.len() > 1 {
            println!("time:");
            for (name, _, took) in &self.stages {
                println!("{:7.1} s  {name}", took.unwrap_or_default().as_secs_f32());
            }
        }
        if !self.failed.is_empty() {
            println!("failed:");
            for name in &self.failed {
                println!("  {name}");
            }
        }
        println!("{} passed, {} failed", self.passed, self.failed.len());
    }
}
