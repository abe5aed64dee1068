// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was measured: records with all samples, beside those of the run before.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::machines::Driver;

/// One driver, one test, one size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// What was measured.
    pub driver: String,
    /// The test.
    pub test: String,
    /// Bytes of a message, or of a region.
    pub size: u64,
    /// Connections.
    pub qps: u64,
    /// Of the samples.
    pub unit: String,
    /// Higher is better.
    pub higher_is_better: bool,
    /// One from each round.
    pub samples: Vec<f64>,
    /// Their median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The median of the run before, which may have been of another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<f64>,
}

impl Record {
    fn is_of(&self, other: &Self) -> bool {
        (&self.driver, &self.test, self.size, self.qps)
            == (&other.driver, &other.test, other.size, other.qps)
    }

    /// How many times as good as in the run before; nothing where one of both is nothing.
    pub fn gain(&self) -> Option<f64> {
        let gain = match (self.before?, self.higher_is_better) {
            (before, true) => self.median / before,
            (before, false) => before / self.median,
        };
        (gain.is_finite() && gain > 0.0).then_some(gain)
    }
}

/// All records.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Results {
    /// In the order of their first sample.
    pub records: Vec<Record>,
}

/// The middle of samples; of an even number the mean of both in the middle.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

impl Results {
    /// Adds a sample to its record.
    pub fn add(
        &mut self,
        driver: Driver,
        test: &str,
        (size, qps): (u64, u64),
        (unit, higher_is_better): (&'static str, bool),
        sample: f64,
    ) {
        let driver = driver.name();
        let found = self
            .records
            .iter_mut()
            .position(|r| r.driver == driver && r.test == test && r.size == size && r.qps == qps);
        let index = found.unwrap_or_else(|| {
            self.records.push(Record {
                driver: driver.to_owned(),
                test: test.to_owned(),
                size,
                qps,
                unit: unit.to_owned(),
                higher_is_better,
                samples: Vec::new(),
                median: f64::NAN,
                min: f64::INFINITY,
                max: f64::NEG_INFINITY,
                before: None,
            });
            self.records.len() - 1
        });
        let record = &mut self.records[index];
        record.samples.push(sample);
        record.median = median(&record.samples);
        record.min = record.min.min(sample);
        record.max = record.max.max(sample);
    }

    /// Has each record know the median that an earlier run had.
    pub fn compare(&mut self, earlier: &[Record]) {
        for record in &mut self.records {
            let same = earlier.iter().find(|old| old.is_of(record));
            record.before = same.map(|old| old.median);
        }
    }

    /// Puts what an earlier run has measured before it all, except for the tests that were measured
    /// again: of these everything is new, so that no line has points of two runs.
    pub fn keep(&mut self, earlier: Vec<Record>) {
        let again: BTreeSet<&str> = self.records.iter().map(|r| r.test.as_str()).collect();
        let mut kept: Vec<Record> = earlier
            .into_iter()
            .filter(|record| !again.contains(record.test.as_str()))
            .collect();
        kept.append(&mut self.records);
        self.records = kept;
    }

    /// A record.
    pub fn find(&self, driver: Driver, test: &str, size: u64, qps: u64) -> Option<&Record> {
        self.records
            .iter()
            .find(|r| r.driver == driver.name() && r.test == test && r.size == size && r.qps == qps)
    }

    /// All records of a test of a driver.
    pub fn series<'a>(
        &'a self,
        driver: Driver,
        test: &'a str,
    ) -> impl Iterator<Item = &'a Record> + 'a {
        self.records
            .iter()
            .filter(move |r| r.driver == driver.name() && r.test == test)
    }
}

/// A size as people write it.
pub fn human(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// A number with three significant digits.
pub fn short(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        "-".into()
    } else if magnitude >= 1e6 {
        format!("{:.2} M", value / 1e6)
    } else if magnitude >= 1e4 {
        format!("{:.1} k", value / 1e3)
    } else if magnitude >= 100.0 || value == 0.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Results {
        let mut results = Results::default();
        for (driver, latency, rate) in [
            (Driver::Ferrite, [9.0, 10.0, 30.0], 2000.0),
            (Driver::Rxe, [90.0, 80.0, 100.0], 150.0),
        ] {
            for sample in latency {
                results.add(driver, "send_lat", (64, 1), ("us", false), sample);
            }
            results.add(driver, "send_rate", (64, 1), ("/s", true), rate);
        }
        results
    }

    #[test]
    fn a_record_knows_the_run_before() {
        let (mut now, mut earlier) = (filled(), filled());
        for record in &mut earlier.records {
            record.median *= 2.0;
        }
        earlier.records.retain(|record| record.driver == "ferrite");
        now.compare(&earlier.records);
        let lat = |driver| now.find(driver, "send_lat", 64, 1).expect("a record");
        assert_eq!(lat(Driver::Ferrite).before, Some(20.0));
        // Half of the time is twice as good, half of the rate is half as good.
        assert_eq!(lat(Driver::Ferrite).gain(), Some(2.0));
        let rate = now.find(Driver::Ferrite, "send_rate", 64, 1);
        assert_eq!(rate.and_then(Record::gain), Some(0.5));
        assert_eq!(
            (lat(Driver::Rxe).before, lat(Driver::Rxe).gain()),
            (None, None)
        );
        // It is kept in the file, and left out where there is none.
        let text = serde_json::to_string(&now.records).expect("text");
        assert_eq!(text.matches("before").count(), 2);
        let again: Vec<Record> = serde_json::from_str(&text).expect("the same again");
        assert_eq!(again[0].before, Some(20.0));
        // The next run's is the one before it, not that before.
        let mut next = filled();
        next.compare(&again);
        assert_eq!(next.records[0].before, Some(10.0));
    }

    #[test]
    fn a_record_keeps_all_samples_and_their_spread() {
        let results = filled();
        let record = results
            .find(Driver::Ferrite, "send_lat", 64, 1)
            .expect("a record");
        assert_eq!(record.samples.len(), 3);
        assert_eq!((record.median, record.min, record.max), (10.0, 9.0, 30.0));
        assert_eq!(median(&[1.0, 4.0]), 2.5);
    }

    #[test]
    fn what_was_not_measured_again_is_kept() {
        let mut results = Results::default();
        for (test, qps) in [("scale_qps", 1), ("scale_qps", 100)] {
            results.add(Driver::Ferrite, test, (64, qps), ("", false), 5.0);
        }
        let earlier = |test: &str, qps| Record {
            test: test.into(),
            qps,
            median: 7.0,
            ..results.records[0].clone()
        };
        let earlier = [("send_lat", 1), ("scale_qps", 1), ("scale_qps", 10_000)]
            .map(|(test, qps)| earlier(test, qps))
            .to_vec();
        let text = serde_json::to_string(&earlier).expect("text");
        results.keep(serde_json::from_str(&text).expect("the same again"));
        let all: Vec<_> = results
            .records
            .iter()
            .map(|r| (r.test.as_str(), r.qps, r.median))
            .collect();
        assert_eq!(
            all,
            [
                ("send_lat", 1, 7.0),
                ("scale_qps", 1, 5.0),
                ("scale_qps", 100, 5.0)
            ]
        );
    }

    #[test]
    fn numbers_and_sizes_are_short() {
        assert_eq!(human(65536), "64 KiB");
        assert_eq!(human(100), "100 B");
        assert_eq!(short(12345.0), "12.3 k");
        assert_eq!(short(0.0567), "0.06");
    }
}
