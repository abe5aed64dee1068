// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was measured: records with all samples, and the comparison with the bars.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::machines::Driver;
use super::{adapter, storage};

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
}

/// A bar: a ratio to the better of the software drivers, and of TCP where it can do the same, that has to be
/// reached.
#[derive(Debug, Clone, Serialize)]
pub struct Bar {
    /// What is compared.
    pub what: String,
    /// Ferrite's median.
    pub ferrite: f64,
    /// The better of the others.
    pub other: f64,
    /// Which that is.
    pub other_driver: String,
    /// Of both.
    pub unit: String,
    /// How many times better Ferrite is.
    pub factor: f64,
    /// How many times better it has to be.
    pub wanted: f64,
    /// Whether it is.
    pub met: bool,
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
            });
            self.records.len() - 1
        });
        let record = &mut self.records[index];
        record.samples.push(sample);
        record.median = median(&record.samples);
        record.min = record.min.min(sample);
        record.max = record.max.max(sample);
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

    /// Ferrite against the better of the others, where all have a record.
    fn bar(&self, what: String, test: &str, size: u64, qps: u64, wanted: f64) -> Option<Bar> {
        let ferrite = self.find(Driver::Ferrite, test, size, qps)?;
        let others = [Driver::Rxe, Driver::Siw, Driver::Tcp, Driver::Memcpy];
        let better = |a: &&Record, b: &&Record| {
            let order = a.median.total_cmp(&b.median);
            if ferrite.higher_is_better {
                order
            } else {
                order.reverse()
            }
        };
        let other = others
            .iter()
            .filter_map(|driver| self.find(*driver, test, size, qps))
            .max_by(better)?;
        let factor = if ferrite.higher_is_better {
            ferrite.median / other.median
        } else {
            other.median / ferrite.median
        };
        Some(Bar {
            what,
            ferrite: ferrite.median,
            other: other.median,
            other_driver: other.driver.clone(),
            unit: ferrite.unit.clone(),
            factor,
            wanted,
            met: factor >= wanted,
        })
    }

    /// The bars that were set for this project.
    pub fn bars(&self) -> Vec<Bar> {
        let mut bars = Vec::new();
        for kind in ["send", "write", "read"] {
            let test = format!("{kind}_bw");
            let mut sizes: Vec<u64> = self
                .series(Driver::Ferrite, &test)
                .map(|r| r.size)
                .collect();
            sizes.retain(|size| *size >= 64 << 10);
            sizes.sort_unstable();
            for size in sizes {
                bars.extend(self.bar(
                    format!("{kind} bandwidth, {}", human(size)),
                    &test,
                    size,
                    1,
                    10.0,
                ));
            }
        }
        for kind in ["send", "write"] {
            let test = format!("{kind}_rate");
            let mut qps: Vec<u64> = self.series(Driver::Ferrite, &test).map(|r| r.qps).collect();
            qps.sort_unstable();
            for qps in qps {
                bars.extend(self.bar(
                    format!(
                        "64 B {kind} rate, {qps} QP{}",
                        if qps == 1 { "" } else { "s" }
                    ),
                    &test,
                    64,
                    qps,
                    10.0,
                ));
            }
        }
        for kind in ["send", "write"] {
            bars.extend(self.bar(
                format!("64 B {kind} latency"),
                &format!("{kind}_lat"),
                64,
                1,
                3.0,
            ));
        }
        bars.extend(self.bar(
            "guest instructions of a 64 B send and its completion".into(),
            "send_instructions",
            64,
            1,
            10.0,
        ));
        for record in self.series(Driver::Ferrite, "registrations") {
            bars.extend(self.bar(
                format!(
                    "registrations and deregistrations of {}",
                    human(record.size)
                ),
                "registrations",
                record.size,
                record.qps,
                2.0,
            ));
        }
        bars.extend(self.bar("connections".into(), "connections", 0, 1, 1.5));
        for (test, _, words, wanted) in adapter::WORKS {
            let what = format!("1 MiB writes between functions, {words}");
            bars.extend(self.bar(what, test, adapter::SIZE, 1, wanted));
        }
        for job in storage::JOBS {
            let wanted = if job.is_small() { 2.0 } else { 3.0 };
            let (size, depth) = job.key();
            bars.extend(self.bar(job.words(), job.test, size, depth, wanted));
        }
        bars
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
            (Driver::Siw, [29.0, 28.0, 99.0], 250.0),
        ] {
            for sample in latency {
                results.add(driver, "send_lat", (64, 1), ("us", false), sample);
            }
            results.add(driver, "send_rate", (64, 1), ("/s", true), rate);
        }
        results
    }

    #[test]
    fn the_bar_is_against_the_better_of_the_others() {
        let bars = filled().bars();
        let latency = bars
            .iter()
            .find(|b| b.what.contains("latency"))
            .expect("latency");
        assert_eq!(latency.other_driver, "siw");
        assert!((latency.factor - 2.9).abs() < 1e-9 && !latency.met);
        let rate = bars.iter().find(|b| b.what.contains("rate")).expect("rate");
        assert_eq!((rate.factor, rate.met), (8.0, false));
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
