// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The goals of this project in numbers, and what of them is reached.
//!
//! The list is fixed: a goal of which nothing was measured is there all the same, and says so. Plots have the same
//! goals as lines.

use std::collections::BTreeMap;

use serde::Serialize;

use super::limits::Figure;
use super::machines::Driver;
use super::plot::{Point, Series};
use super::results::{human, Record, Results};
use super::{adapter, interface, storage};

/// Of these the better counts.
const OTHERS: [Driver; 5] = [
    Driver::Rxe,
    Driver::Siw,
    Driver::Tcp,
    Driver::Memcpy,
    Driver::Virtio,
];

/// Large messages.
const LARGE: [u64; 5] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20];
/// Queue pairs of rates.
pub const RATES: [u64; 5] = [1, 4, 16, 64, 1000];
/// Queue pairs that a message is to cost the same over.
const QPS: [u64; 5] = [1, 10, 100, 1000, 10_000];
/// Regions that a message is to cost the same over.
const REGIONS: [u64; 4] = [10, 1000, 100_000, 1_000_000];
/// Queue pairs of bulk streams.
const STREAMS: [u64; 2] = [256, 1024];
/// Bytes of a message in these.
pub const STREAM: u64 = 64 << 10;

/// How a goal is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// So many times.
    Times,
    /// One of so many parts.
    OneOf,
    /// Of a hundred.
    Percent,
    /// The largest by the smallest.
    Spread,
    /// The figure itself.
    Itself,
}

impl Measure {
    /// A value as people write it.
    pub fn text(self, value: f64) -> String {
        let number = if value.abs() < 10.0 && value.fract() != 0.0 {
            format!("{value:.2}")
        } else {
            format!("{value:.0}")
        };
        match self {
            Self::Times | Self::Spread => format!("{number}x"),
            Self::OneOf => format!("1/{number}"),
            Self::Percent => format!("{number} %"),
            Self::Itself => number,
        }
    }
}

/// Whether a goal is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is.
    Met,
    /// It is not.
    Missed,
    /// There is too little to tell.
    NotMeasured,
}

impl Verdict {
    /// For people, and as a class of the page.
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Met => ("met", "met"),
            Self::Missed => ("missed", "missed"),
            Self::NotMeasured => ("not measured", "unknown"),
        }
    }
}

/// A goal, and what of it is reached.
#[derive(Debug, Clone, Serialize)]
pub struct Bar {
    /// What it is about.
    #[serde(skip)]
    pub figure: Figure,
    /// What is compared.
    pub what: String,
    /// Ferrite's median.
    pub ferrite: Option<f64>,
    /// What it is compared with.
    pub other: Option<f64>,
    /// Which that is.
    pub other_name: Option<String>,
    /// Of both.
    pub unit: String,
    /// How it is told.
    pub measure: Measure,
    /// What is reached.
    pub reached: Option<f64>,
    /// What is to be.
    pub wanted: f64,
    /// Whether more than that would be better.
    pub more_is_better: bool,
    /// Ferrite's median of the run before.
    pub ferrite_before: Option<f64>,
    /// What was reached then.
    pub reached_before: Option<f64>,
    /// The judgement.
    pub verdict: Verdict,
}

/// Test, size, queue pairs.
type Key = (String, u64, u64);

/// What is compared with what.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// With the better of the others.
    Better,
    /// With the record of this test of memcpy's, of the same size.
    Memcpy(&'static str),
    /// The largest of all with the smallest.
    Flat,
    /// The smallest of all with the first.
    NotBelowFirst,
    /// The largest of all, with nothing.
    Most,
    /// All of them together, with nothing.
    Sum,
}

struct Goal {
    figure: Figure,
    what: String,
    keys: Vec<Key>,
    way: Way,
    wanted: f64,
}

/// What the records say of a goal.
#[derive(Default)]
struct Seen {
    ferrite: Option<f64>,
    other: Option<(f64, String)>,
    reached: Option<f64>,
    /// Whether there is all that is needed to call it met.
    is_complete: bool,
}

/// All of them.
fn goals() -> Vec<Goal> {
    let mut all = Vec::new();
    let mut add = |figure, what: String, keys: Vec<Key>, way, wanted| {
        all.push(Goal {
            figure,
            what,
            keys,
            way,
            wanted,
        });
    };
    let one = |test: &str, size, qps| vec![(test.to_owned(), size, qps)];
    let over = |test: &str, size, qps: &[u64]| -> Vec<Key> {
        qps.iter()
            .map(|qps| (test.to_owned(), size, *qps))
            .collect()
    };
    for kind in ["send", "write", "read"] {
        for size in LARGE {
            let what = format!("{kind} bandwidth, {}", human(size));
            let keys = one(&format!("{kind}_bw"), size, 1);
            add(Figure::Bandwidth, what, keys, Way::Better, 100.0);
        }
    }
    let mib = 1 << 20;
    for (what, test, way, wanted) in [
        (
            "of one MiB over and over",
            "write_bw",
            Way::Memcpy("memcpy_same"),
            40.0,
        ),
        (
            "through many MiB",
            "span_write",
            Way::Memcpy("span_write"),
            90.0,
        ),
    ] {
        let what = format!("1 MiB writes, share of memcpy {what}");
        add(Figure::Share, what, one(test, mib, 1), way, wanted);
    }
    for kind in ["send", "write"] {
        let test = format!("{kind}_rate");
        for qps in RATES {
            let many = if qps == 1 { "" } else { "s" };
            let what = format!("64 B {kind} rate, {qps} QP{many}");
            add(Figure::Rate, what, one(&test, 64, qps), Way::Better, 100.0);
        }
        let what = format!("64 B {kind} rate, the slowest number of QPs beside one");
        add(
            Figure::Rate,
            what,
            over(&test, 64, &RATES),
            Way::NotBelowFirst,
            1.0,
        );
    }
    for kind in ["send", "write"] {
        let what = format!("64 B {kind} latency, polled");
        let keys = one(&format!("{kind}_lat"), 64, 1);
        add(Figure::Latency, what, keys, Way::Better, 20.0);
    }
    for kind in ["send", "write"] {
        let what = format!("64 B {kind} latency within one VM, us");
        let keys = one(&format!("loopback_{kind}"), 64, 1);
        add(Figure::Loopback, what, keys, Way::Most, 5.0);
    }
    let what = "64 B send latency, by events".to_owned();
    add(
        Figure::Events,
        what,
        one("send_event", 64, 1),
        Way::Better,
        8.0,
    );
    let keys = || over("scale_qps_instructions", 64, &QPS);
    let what = |most: &str| format!("guest instructions of a message, 1 to 10 000 QPs, {most}");
    add(
        Figure::Instructions,
        what("the most"),
        keys(),
        Way::Most,
        600.0,
    );
    add(Figure::Instructions, what("flat"), keys(), Way::Flat, 1.1);
    let what = "device time of a message, 1 to 10 000 QPs, flat".to_owned();
    let keys = over("scale_qps_device", 64, &QPS);
    add(Figure::DeviceQps, what, keys, Way::Flat, 1.5);
    let what = "device time of a message, 10 to 1 000 000 regions, flat".to_owned();
    let keys = over("scale_regions_device", 64, &REGIONS);
    add(Figure::DeviceRegions, what, keys, Way::Flat, 1.5);
    for qps in STREAMS {
        let what = format!("bulk streams over {qps} QPs, frames dropped by the device");
        let keys = one("stream_qps_drops", STREAM, qps);
        add(Figure::Streams, what, keys, Way::Most, 0.0);
        let what = format!("bulk streams over {qps} QPs, the fastest beside the slowest");
        let keys = one("stream_qps_fairness", STREAM, qps);
        add(Figure::Streams, what, keys, Way::Most, 2.0);
    }
    let what = "idle memory of a QP, device and guest, bytes".to_owned();
    let keys = ["guest", "device"].map(|place| (format!("memory_qp_{place}"), 0, 0));
    add(Figure::Memory, what, keys.into(), Way::Sum, 8192.0);
    for size in [4 << 10, 1 << 20] {
        let what = format!("registrations and deregistrations of {}", human(size));
        let keys = one("registrations", size, 1);
        add(Figure::Registrations, what, keys, Way::Better, 2.0);
    }
    let keys = one("connections", 0, 1);
    add(
        Figure::Connections,
        "connections".into(),
        keys,
        Way::Better,
        1.5,
    );
    for job in storage::JOBS {
        let wanted = if job.is_small() { 2.0 } else { 3.0 };
        let figure = match job.test.starts_with("nfs") {
            true => Figure::Nfs,
            false => Figure::Nvme,
        };
        let (size, depth) = job.key();
        let keys = one(job.test, size, depth);
        add(figure, job.words(), keys, Way::Better, wanted);
    }
    for (test, _, words, wanted) in adapter::WORKS {
        let what = format!("1 MiB writes between functions, share of memcpy, {words}");
        let keys = one(test, adapter::SIZE, 1);
        add(
            Figure::Adapter,
            what,
            keys,
            Way::Memcpy(test),
            100.0 * wanted,
        );
    }
    for (test, size, words) in interface::GOALS {
        let what = format!("{words} beside virtio-net");
        add(
            Figure::Interface,
            what,
            one(test, size, 1),
            Way::Better,
            1.0,
        );
    }
    all
}

impl Goal {
    /// Ferrite's records, those there are.
    fn records<'a>(&'a self, results: &'a Results) -> impl Iterator<Item = &'a Record> + 'a {
        self.keys.iter().filter_map(|(test, size, qps)| {
            // What was looked at of so many objects as there were has any number.
            match (self.way, qps) {
                (Way::Sum, 0) => results.series(Driver::Ferrite, test).next(),
                _ => results.find(Driver::Ferrite, test, *size, *qps),
            }
        })
    }

    fn is_more_better(&self) -> bool {
        matches!(self.way, Way::Better | Way::Memcpy(_) | Way::NotBelowFirst)
    }

    /// Whether less of the figure is better.
    fn measure(&self, results: &Results) -> Measure {
        let less = self.keys[0].0.ends_with("_lat") || self.keys[0].0.ends_with("_event");
        let less = match self.records(results).next() {
            Some(record) => !record.higher_is_better,
            None => less,
        };
        match self.way {
            Way::Better if less => Measure::OneOf,
            Way::Better | Way::NotBelowFirst => Measure::Times,
            Way::Memcpy(_) => Measure::Percent,
            Way::Flat => Measure::Spread,
            Way::Most if self.keys[0].0.ends_with("_fairness") => Measure::Spread,
            Way::Most | Way::Sum => Measure::Itself,
        }
    }

    /// What the records say, by their medians or by those of the run before.
    fn seen(&self, results: &Results, pick: fn(&Record) -> Option<f64>) -> Seen {
        let picked: Vec<(&Record, f64)> = self
            .records(results)
            .filter_map(|record| Some((record, pick(record)?)))
            .collect();
        let Some((first, value)) = picked.first().copied() else {
            return Seen::default();
        };
        let has = |key: Option<&Key>| {
            key.is_some_and(|(test, _, qps)| {
                picked
                    .iter()
                    .any(|(record, _)| record.test == *test && (*qps == 0 || record.qps == *qps))
            })
        };
        let is_complete = has(self.keys.first()) && has(self.keys.last());
        let values = || picked.iter().map(|(_, value)| *value);
        let (most, least) = (
            values().fold(f64::NEG_INFINITY, f64::max),
            values().fold(f64::INFINITY, f64::min),
        );
        let (ferrite, other, reached) = match self.way {
            Way::Better => {
                let other = better(results, first, pick);
                let reached = other
                    .as_ref()
                    .map(|(other, _)| match first.higher_is_better {
                        true => value / other,
                        false => other / value,
                    });
                (value, other, reached)
            }
            Way::Memcpy(test) => {
                let memcpy = results.find(Driver::Memcpy, test, first.size, first.qps);
                let other = memcpy.and_then(pick);
                let reached = other.map(|other| 100.0 * value / other);
                (value, other.map(|other| (other, "memcpy".into())), reached)
            }
            Way::Flat => {
                let reached = (picked.len() > 1).then_some(most / least);
                (most, Some((least, "the least".into())), reached)
            }
            Way::NotBelowFirst => {
                // With nothing to compare there is nothing to tell.
                let first = has(self.keys.first()) && picked.len() > 1;
                let rest = values().skip(1).fold(f64::INFINITY, f64::min);
                let reached = first.then_some(rest / value);
                let ferrite = if first { rest } else { value };
                (ferrite, first.then(|| (value, "one".into())), reached)
            }
            Way::Most => (most, None, Some(most)),
            Way::Sum => {
                let sum: f64 = values().sum();
                (sum, None, Some(sum))
            }
        };
        Seen {
            ferrite: Some(ferrite),
            other,
            reached: reached.filter(|reached| reached.is_finite()),
            is_complete,
        }
    }

    fn judge(&self, seen: &Seen) -> Verdict {
        match seen.reached {
            None => Verdict::NotMeasured,
            Some(reached) if self.is_more_better() && reached < self.wanted => Verdict::Missed,
            Some(reached) if !self.is_more_better() && reached > self.wanted => Verdict::Missed,
            // What is missing might have missed it.
            Some(_) if !seen.is_complete => Verdict::NotMeasured,
            Some(_) => Verdict::Met,
        }
    }

    fn bar(self, results: &Results) -> Bar {
        let now = self.seen(results, |record| Some(record.median));
        let before = self.seen(results, |record| record.before);
        let unit = self
            .records(results)
            .next()
            .map(|record| record.unit.clone());
        let (other, other_name) = now.other.clone().unzip();
        Bar {
            figure: self.figure,
            measure: self.measure(results),
            ferrite: now.ferrite,
            other,
            other_name,
            unit: unit.unwrap_or_default(),
            reached: now.reached,
            wanted: self.wanted,
            more_is_better: self.is_more_better(),
            ferrite_before: before.ferrite,
            reached_before: before.reached.filter(|_| before.is_complete),
            verdict: self.judge(&now),
            what: self.what,
        }
    }
}

/// The better of the others' records of the same.
fn better(
    results: &Results,
    ferrite: &Record,
    pick: fn(&Record) -> Option<f64>,
) -> Option<(f64, String)> {
    let values = OTHERS.iter().filter_map(|driver| {
        let record = results.find(*driver, &ferrite.test, ferrite.size, ferrite.qps)?;
        Some((pick(record)?, record.driver.clone()))
    });
    values.max_by(|a, b| match ferrite.higher_is_better {
        true => a.0.total_cmp(&b.0),
        false => b.0.total_cmp(&a.0),
    })
}

/// All goals, and what of them is reached.
pub fn bars(results: &Results) -> Vec<Bar> {
    goals().into_iter().map(|goal| goal.bar(results)).collect()
}

/// The goals of some tests as lines of a plot whose horizontal axis is what `x` gives.
pub fn lines(results: &Results, tests: &[&str], x: fn(&Record) -> u64) -> Vec<Series> {
    let mut lines: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for goal in goals() {
        let of_these: Vec<&Record> = goal
            .records(results)
            .filter(|record| tests.contains(&record.test.as_str()))
            .collect();
        let medians = || of_these.iter().map(|record| record.median);
        let least = medians().fold(f64::INFINITY, f64::min);
        let wanted = goal.measure(results).text(goal.wanted);
        for record in &of_these {
            let height = match goal.way {
                Way::Better => {
                    better(results, record, |record| Some(record.median)).map(|other| match record
                        .higher_is_better
                    {
                        true => other.0 * goal.wanted,
                        false => other.0 / goal.wanted,
                    })
                }
                Way::Memcpy(test) => results
                    .find(Driver::Memcpy, test, record.size, record.qps)
                    .map(|memcpy| memcpy.median * goal.wanted / 100.0),
                Way::Flat => Some(least * goal.wanted),
                // That it is not below the first is seen without a line.
                Way::NotBelowFirst => None,
                Way::Most | Way::Sum => Some(goal.wanted),
            };
            if let Some(y) = height {
                lines
                    .entry(format!("goal {wanted}"))
                    .or_default()
                    .push(Point {
                        x: x(record) as f64,
                        y,
                        min: y,
                        max: y,
                    });
            }
        }
    }
    lines
        .into_iter()
        .map(|(name, mut points)| {
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series {
                name,
                colour: "#888",
                points,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(results: &mut Results, driver: Driver, test: &str, (size, qps): (u64, u64), value: f64) {
        let more = test.ends_with("_bw") || test.ends_with("_rate") || test == "memcpy_same";
        results.add(driver, test, (size, qps), ("unit", more), value);
    }

    fn bar(results: &Results, what: &str) -> Bar {
        let mut found = bars(results).into_iter().filter(|bar| bar.what == what);
        let bar = found.next().unwrap_or_else(|| panic!("no goal: {what}"));
        assert!(found.next().is_none(), "{what} twice");
        bar
    }

    #[test]
    fn nothing_measured_is_said_of_all_goals() {
        let none = bars(&Results::default());
        assert!(none.len() > 50);
        let mut words: Vec<&str> = none.iter().map(|bar| bar.what.as_str()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), none.len());
        for bar in &none {
            assert_eq!(bar.verdict, Verdict::NotMeasured, "{}", bar.what);
            assert!(bar.reached.is_none() && bar.wanted >= 0.0, "{}", bar.what);
        }
        let limited = |figure: Figure| none.iter().any(|bar| bar.figure == figure);
        assert!(super::super::limits::FIGURES
            .iter()
            .all(|row| limited(row.0)));
    }

    #[test]
    fn the_better_of_the_others_counts() {
        let mut results = Results::default();
        for (driver, latency, rate) in [
            (Driver::Ferrite, 10.0, 2000.0),
            (Driver::Rxe, 400.0, 15.0),
            (Driver::Siw, 190.0, 20.0),
        ] {
            add(&mut results, driver, "send_lat", (64, 1), latency);
            add(&mut results, driver, "send_rate", (64, 4), rate);
        }
        let latency = bar(&results, "64 B send latency, polled");
        assert_eq!((latency.other, latency.reached), (Some(190.0), Some(19.0)));
        assert_eq!(latency.other_name.as_deref(), Some("siw"));
        assert_eq!(latency.verdict, Verdict::Missed);
        assert_eq!(latency.measure.text(19.0), "1/19");
        let rate = bar(&results, "64 B send rate, 4 QPs");
        assert_eq!((rate.reached, rate.verdict), (Some(100.0), Verdict::Met));
        // The others' rates alone are no comparison.
        add(&mut results, Driver::Rxe, "send_rate", (64, 16), 1.0);
        let rate = bar(&results, "64 B send rate, 16 QPs");
        assert_eq!(rate.verdict, Verdict::NotMeasured);
    }

    #[test]
    fn a_share_is_of_the_same_size_of_memcpy() {
        let mut results = Results::default();
        let key = (1 << 20, 1);
        add(&mut results, Driver::Ferrite, "write_bw", key, 410.0);
        let what = "1 MiB writes, share of memcpy of one MiB over and over";
        assert_eq!(bar(&results, what).verdict, Verdict::NotMeasured);
        add(&mut results, Driver::Memcpy, "memcpy_same", key, 1000.0);
        let share = bar(&results, what);
        assert_eq!((share.reached, share.verdict), (Some(41.0), Verdict::Met));
        assert_eq!(share.measure.text(share.wanted), "40 %");
    }

    #[test]
    fn flat_needs_both_ends_to_be_met_and_one_step_to_be_missed() {
        let mut results = Results::default();
        let mut add = |qps, value| {
            let test = "scale_qps_device";
            results.add(Driver::Ferrite, test, (64, qps), ("us", false), value);
            bar(&results, "device time of a message, 1 to 10 000 QPs, flat")
        };
        assert_eq!(add(1, 2.0).reached, None);
        assert_eq!(add(100, 2.5).verdict, Verdict::NotMeasured);
        let all = add(10_000, 2.2);
        assert_eq!((all.reached, all.verdict), (Some(1.25), Verdict::Met));
        assert_eq!((all.ferrite, all.other), (Some(2.5), Some(2.0)));
        assert_eq!(add(10, 3.1).verdict, Verdict::Missed);
    }

    #[test]
    fn no_number_of_queue_pairs_is_slower_than_one() {
        let mut results = Results::default();
        let what = "64 B write rate, the slowest number of QPs beside one";
        add(&mut results, Driver::Ferrite, "write_rate", (64, 16), 90.0);
        assert_eq!(bar(&results, what).verdict, Verdict::NotMeasured);
        add(&mut results, Driver::Ferrite, "write_rate", (64, 1), 100.0);
        let slow = bar(&results, what);
        assert_eq!((slow.reached, slow.verdict), (Some(0.9), Verdict::Missed));
        let mut results = Results::default();
        for (qps, value) in [(1, 100.0), (4, 150.0)] {
            add(
                &mut results,
                Driver::Ferrite,
                "write_rate",
                (64, qps),
                value,
            );
        }
        assert_eq!(bar(&results, what).verdict, Verdict::NotMeasured);
        add(
            &mut results,
            Driver::Ferrite,
            "write_rate",
            (64, 1000),
            120.0,
        );
        let all = bar(&results, what);
        assert_eq!((all.reached, all.verdict), (Some(1.2), Verdict::Met));
    }

    #[test]
    fn of_streams_no_frame_is_lost_and_none_waits_twice_as_long() {
        let mut results = Results::default();
        let key = (STREAM, 1024);
        add(&mut results, Driver::Ferrite, "stream_qps_drops", key, 0.0);
        add(
            &mut results,
            Driver::Ferrite,
            "stream_qps_fairness",
            key,
            2.5,
        );
        let drops = "bulk streams over 1024 QPs, frames dropped by the device";
        let fair = "bulk streams over 1024 QPs, the fastest beside the slowest";
        let verdicts = [drops, fair].map(|what| bar(&results, what).verdict);
        assert_eq!(verdicts, [Verdict::Met, Verdict::Missed]);
        add(&mut results, Driver::Ferrite, "stream_qps_drops", key, 3.0);
        assert_eq!(bar(&results, drops).verdict, Verdict::Missed);
    }

    #[test]
    fn memory_is_that_of_both_ends() {
        let mut results = Results::default();
        let what = "idle memory of a QP, device and guest, bytes";
        add(
            &mut results,
            Driver::Ferrite,
            "memory_qp_guest",
            (0, 500),
            6000.0,
        );
        assert_eq!(bar(&results, what).verdict, Verdict::NotMeasured);
        add(
            &mut results,
            Driver::Ferrite,
            "memory_qp_device",
            (0, 500),
            2193.0,
        );
        let sum = bar(&results, what);
        assert_eq!((sum.reached, sum.verdict), (Some(8193.0), Verdict::Missed));
    }

    #[test]
    fn what_was_reached_before_is_by_figures_of_before() {
        let mut results = Results::default();
        for (driver, now, before) in [
            (Driver::Ferrite, 3000.0, Some(1000.0)),
            (Driver::Rxe, 20.0, Some(25.0)),
            (Driver::Siw, 30.0, None),
        ] {
            add(&mut results, driver, "read_bw", (65_536, 1), now);
            results.records.last_mut().expect("a record").before = before;
        }
        let bar = bar(&results, "read bandwidth, 64 KiB");
        assert_eq!((bar.reached, bar.verdict), (Some(100.0), Verdict::Met));
        assert_eq!(bar.ferrite_before, Some(1000.0));
        assert_eq!(bar.reached_before, Some(40.0));
    }

    #[test]
    fn plots_have_the_goals_of_their_tests() {
        let mut results = Results::default();
        for (size, rxe, siw) in [(64 << 10, 20.0, 25.0), (1 << 20, 30.0, 10.0)] {
            add(&mut results, Driver::Ferrite, "send_bw", (size, 1), 900.0);
            add(&mut results, Driver::Rxe, "send_bw", (size, 1), rxe);
            add(&mut results, Driver::Siw, "send_bw", (size, 1), siw);
        }
        let drawn = lines(&results, &["send_bw"], |record| record.size);
        let [line] = &drawn[..] else {
            panic!("{} lines", drawn.len())
        };
        let points: Vec<_> = line.points.iter().map(|point| (point.x, point.y)).collect();
        assert_eq!(points, [(65_536.0, 2500.0), (1_048_576.0, 3000.0)]);
        assert_eq!(line.name, "goal 100x");
        for (qps, value) in [(1, 700.0), (10_000, 500.0)] {
            let test = "scale_qps_instructions";
            add(&mut results, Driver::Ferrite, test, (64, qps), value);
        }
        let drawn = lines(&results, &["scale_qps_instructions"], |record| record.qps);
        let heights: Vec<f64> = drawn.iter().map(|line| line.points[1].y).collect();
        assert_eq!(drawn[0].name, "goal 1.10x");
        assert!((heights[0] - 550.0).abs() < 1e-9 && heights[1] == 600.0);
        assert!(lines(&results, &["send_lat"], |record| record.size).is_empty());
    }
}
