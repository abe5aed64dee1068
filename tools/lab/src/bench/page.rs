// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The page: plots, tables and what has to be known to read them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use super::goals::{self, Bar, Verdict};
use super::limits::Figure;
use super::machines::Driver;
use super::moderation::Moderation;
use super::plot::{Plot, Point, Series};
use super::results::{human, short, Record, Results};
use super::{adapter, interface, split};

/// Everything that is written down.
pub struct Report<'a> {
    /// Machine, versions, settings.
    pub header: &'a Value,
    /// What was measured.
    pub results: &'a Results,
    /// What of the goals is reached.
    pub bars: &'a [Bar],
    /// What the time of the device goes into, if it was looked at.
    pub profile: Option<&'a str>,
}

fn colour(driver: Driver) -> &'static str {
    match driver {
        Driver::Ferrite => "#b3410e",
        Driver::Rxe => "#2166ac",
        Driver::Siw => "#3a7d34",
        Driver::Tcp => "#7a4fb0",
        Driver::Local => "#555",
        Driver::SplitPush => "#b3410e",
        Driver::SplitPull => "#c99a2e",
        Driver::Virtio => "#2166ac",
        Driver::VirtioPlain => "#6d9fcf",
        Driver::Memcpy => "#555",
    }
}

fn size_name(x: f64) -> String {
    human(x as u64)
}

fn plain_name(x: f64) -> String {
    match x as u64 {
        n if n >= 1_000_000 && n % 1_000_000 == 0 => format!("{} M", n / 1_000_000),
        n if n >= 10_000 && n % 1000 == 0 => format!("{} k", n / 1000),
        n => n.to_string(),
    }
}

/// The line of a driver's records of a test; none where there are none.
fn line(
    results: &Results,
    (driver, test): (Driver, &str),
    (name, colour): (&str, &'static str),
    x: fn(&Record) -> u64,
) -> Option<Series> {
    let mut points: Vec<Point> = results
        .series(driver, test)
        .map(|record| Point {
            x: x(record) as f64,
            y: record.median,
            min: record.min,
            max: record.max,
        })
        .collect();
    points.sort_by(|a, b| a.x.total_cmp(&b.x));
    (!points.is_empty()).then(|| Series {
        name: name.to_owned(),
        colour,
        points,
    })
}

/// A line for each driver that has records of a test.
fn series(results: &Results, test: &str, x: fn(&Record) -> u64) -> Vec<Series> {
    Driver::ALL
        .into_iter()
        .filter_map(|driver| {
            let look = (driver.name(), colour(driver));
            line(results, (driver, test), look, x)
        })
        .collect()
}

/// Lines of Ferrite's tests over the number of objects.
fn lines(results: &Results, tests: &[(&str, &str)]) -> Vec<Series> {
    const COLOURS: [&str; 6] = [
        "#b3400e", "#1f6fb2", "#2c8a3d", "#7a4fb0", "#8a6d00", "#555",
    ];
    tests
        .iter()
        .zip(COLOURS)
        .filter_map(|((test, name), colour)| {
            line(results, (Driver::Ferrite, test), (name, colour), |record| {
                record.qps
            })
        })
        .collect()
}

fn by_size(record: &Record) -> u64 {
    record.size
}

fn by_qps(record: &Record) -> u64 {
    record.qps
}

/// The goals of a plot, by its name: those of the tests that are in it.
fn goals_of(results: &Results, plot: &str) -> Vec<Series> {
    let tests = match plot {
        "scale_qps" | "scale_regions" => vec![format!("{plot}_device")],
        "scale_qps_counts" | "scale_regions_counts" => {
            vec![plot.replace("_counts", "_instructions")]
        }
        test => vec![test.to_owned()],
    };
    let tests: Vec<&str> = tests.iter().map(String::as_str).collect();
    let x = match plot {
        _ if plot.ends_with("_bw") || plot.ends_with("_lat") => by_size,
        _ => by_qps,
    };
    goals::lines(results, &tests, x)
}

/// All plots by the name of their file.
fn plots(results: &Results) -> Vec<(String, Plot)> {
    let mut all = Vec::new();
    for (measure, words, unit) in [
        ("bw", "bandwidth", "MiB/s (more is better)"),
        ("lat", "latency", "microseconds (less is better)"),
    ] {
        for kind in ["send", "write", "read"] {
            let test = format!("{kind}_{measure}");
            all.push((
                test.clone(),
                Plot {
                    title: format!("{kind} {words} between two VMs"),
                    x_label: "bytes of a message".into(),
                    y_label: unit.into(),
                    x_name: size_name,
                    series: series(results, &test, by_size),
                },
            ));
        }
    }
    for kind in ["send", "write"] {
        let test = format!("{kind}_rate");
        all.push((
            test.clone(),
            Plot {
                title: format!("64 B {kind}s a second"),
                x_label: "queue pairs".into(),
                y_label: "messages/s (more is better)".into(),
                x_name: plain_name,
                series: series(results, &test, by_qps),
            },
        ));
    }
    for (what, objects, x_label) in [
        ("qps", "queue pairs in use", "queue pairs"),
        ("regions", "regions in use", "regions at each end"),
    ] {
        let test = format!("scale_{what}");
        all.push((
            test.clone(),
            Plot {
                title: format!("Cost of a 64 B write with many {objects}"),
                x_label: x_label.into(),
                y_label: "microseconds/message".into(),
                x_name: plain_name,
                series: lines(
                    results,
                    &[(&test, "all told"), (&format!("{test}_device"), "devices")],
                ),
            },
        ));
        let counts = [
            "instructions",
            "user",
            "dma_reads",
            "dma_writes",
            "doorbells",
        ];
        let tests = counts.map(|count| format!("{test}_{count}"));
        all.push((
            format!("{test}_counts"),
            Plot {
                title: format!("Counts of a 64 B write with many {objects}"),
                x_label: x_label.into(),
                y_label: "per message".into(),
                x_name: plain_name,
                series: lines(
                    results,
                    &[
                        (&tests[0], "instructions"),
                        (&tests[1], "of user space"),
                        (&tests[2], "DMA reads"),
                        (&tests[3], "DMA writes"),
                        (&tests[4], "doorbells"),
                    ],
                ),
            },
        ));
    }
    all.push((
        "stream_qps".into(),
        Plot {
            title: format!(
                "Writes of {} over many queue pairs at once",
                human(goals::STREAM)
            ),
            x_label: "queue pairs".into(),
            y_label: "MiB/s of all together (more is better)".into(),
            x_name: plain_name,
            series: lines(results, &[("stream_qps", "together")]),
        },
    ));
    all.push((
        "stream_qps_fairness".into(),
        Plot {
            title: format!(
                "Fairness of {} writes over many queue pairs at once",
                human(goals::STREAM)
            ),
            x_label: "queue pairs".into(),
            y_label: "bytes of a queue pair beside the mean of all".into(),
            x_name: plain_name,
            series: lines(
                results,
                &[
                    ("stream_qps_fairness", "fastest/slowest"),
                    ("stream_qps_slowest", "slowest"),
                    ("stream_qps_median", "median"),
                    ("stream_qps_fastest", "fastest"),
                ],
            ),
        },
    ));
    let handlers = |test: &str| format!("scale_handlers{test}");
    all.push((
        handlers("_instructions"),
        Plot {
            title: "Instructions of a 64 B write whose completion comes by an event".into(),
            x_label: "handlers (one: all on one vector)".into(),
            y_label: "per completion".into(),
            x_name: plain_name,
            series: lines(
                results,
                &[
                    (&handlers("_instructions"), "all"),
                    (&handlers("_one_instructions"), "all, one"),
                    (&handlers("_modules"), "of modules"),
                    (&handlers("_one_modules"), "of modules, one"),
                ],
            ),
        },
    ));
    all.push((
        handlers("_counts"),
        Plot {
            title: "Counts of a 64 B write whose completion comes by an event".into(),
            x_label: "handlers (one: all on one vector)".into(),
            y_label: "per completion".into(),
            x_name: plain_name,
            series: lines(
                results,
                &[
                    (&handlers("_interrupts"), "interrupts"),
                    (&handlers("_one_interrupts"), "interrupts, one"),
                    (&handlers("_busiest"), "busiest processor"),
                    (&handlers("_one_busiest"), "busiest, one"),
                ],
            ),
        },
    ));
    for (measure, what, y_label) in [
        ("interrupts", "Interrupts", "per completion"),
        (
            "latency",
            "Latency",
            "microseconds from post to completion, median",
        ),
        (
            "late",
            "Late messages",
            "microseconds from post to completion, 99 of 100",
        ),
    ] {
        let tests = Moderation::ALL.map(|kind| (kind.test(measure), kind.words()));
        let tests = tests.each_ref().map(|(test, words)| (&**test, &**words));
        all.push((
            format!("moderation_{measure}"),
            Plot {
                title: format!("{what} against load, 64 B writes waited for by events"),
                x_label: "messages under way".into(),
                y_label: y_label.into(),
                x_name: plain_name,
                series: lines(results, &tests),
            },
        ));
    }
    for (measure, what, y_label) in [
        ("interrupts", "Interrupts", "per completion"),
        (
            "latency",
            "Time of a read",
            "microseconds until all of it is there, mean",
        ),
    ] {
        let tests = Moderation::OF_A_DISK.map(|kind| (kind.disk_test(measure), kind.words()));
        let tests = tests.each_ref().map(|(test, words)| (&**test, &**words));
        all.push((
            format!("disk_{measure}"),
            Plot {
                title: format!("{what} against load, a disk over NVMe-oF in requests of 4 KiB"),
                x_label: "requests under way".into(),
                y_label: y_label.into(),
                x_name: plain_name,
                series: lines(results, &tests),
            },
        ));
    }
    all.push((
        "memory".into(),
        Plot {
            title: "Memory that an object takes".into(),
            x_label: "objects there are".into(),
            y_label: "bytes".into(),
            x_name: plain_name,
            series: lines(
                results,
                &[
                    ("memory_qp_guest", "QP, guest"),
                    ("memory_qp_device", "QP, device"),
                    ("memory_cq_guest", "CQ, guest"),
                    ("memory_cq_device", "CQ, device"),
                    ("memory_mr_guest", "MR, guest"),
                    ("memory_mr_device", "MR, device"),
                ],
            ),
        },
    ));
    all
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// By how much a value has changed.
fn change(now: f64, before: f64) -> String {
    match (now / before - 1.0) * 100.0 {
        percent if !percent.is_finite() => "-".into(),
        percent if percent.abs() < 0.5 => "0 %".into(),
        percent => format!("{percent:+.0} %"),
    }
}

/// The goals, under a row for each figure that says what limits it.
fn bars_table(bars: &[Bar]) -> String {
    let mut out = String::from(
        "<table><tr><th>compared with the best of rxe, siw and, for disks and files, TCP, where nothing else is said</th>\
         <th>Ferrite</th><th>beside</th><th>unit</th><th>reached</th><th>goal</th><th></th>\
         <th>Ferrite before</th><th>change</th><th>reached before</th></tr>\n",
    );
    let mut figure: Option<Figure> = None;
    for bar in bars {
        if figure != Some(bar.figure) {
            figure = Some(bar.figure);
            let _ = writeln!(
                out,
                "<tr class=figure><td colspan=10><b>{}</b>: {}</td></tr>",
                escape(bar.figure.name()),
                escape(bar.figure.limit())
            );
        }
        let number = |value: Option<f64>| value.map_or("-".into(), short);
        let reached =
            |value: Option<f64>| value.map_or("-".into(), |value| bar.measure.text(value));
        let beside = match (bar.other, &bar.other_name) {
            (Some(other), Some(name)) => format!("{} ({})", short(other), escape(name)),
            _ => "-".into(),
        };
        let changed = match (bar.ferrite, bar.ferrite_before) {
            (Some(now), Some(before)) => change(now, before),
            _ => "-".into(),
        };
        let (words, class) = bar.verdict.words();
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=n>{}</td><td class=n>{beside}</td><td>{}</td>\
             <td class=n>{}</td><td class=n>{} {}</td><td class={class}>{words}</td>\
             <td class=n>{}</td><td class=n>{changed}</td><td class=n>{}</td></tr>",
            escape(&bar.what),
            number(bar.ferrite),
            escape(&bar.unit),
            reached(bar.reached),
            if bar.more_is_better { "&ge;" } else { "&le;" },
            bar.measure.text(bar.wanted),
            number(bar.ferrite_before),
            reached(bar.reached_before),
        );
    }
    out.push_str("</table>\n");
    out
}

/// All figures of Ferrite's that the run before had as well.
fn changes_table(results: &Results) -> String {
    let mut rows = String::new();
    let mut count = 0;
    for record in &results.records {
        let (Some(before), true) = (record.before, record.driver == Driver::Ferrite.name()) else {
            continue;
        };
        count += 1;
        let gain = record.gain();
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td class=n>{}</td><td class=n>{}</td><td class=n>{}</td><td class=n>{}</td>\
             <td>{}</td><td class=n>{}</td></tr>",
            escape(&record.test.replace('_', " ")),
            if record.size == 0 {
                String::new()
            } else {
                human(record.size)
            },
            record.qps,
            short(before),
            short(record.median),
            escape(&record.unit),
            gain.map_or("-".into(), |gain| format!("{gain:.2}")),
        );
    }
    if count == 0 {
        return "<p>There is no run before this one that has measured the same.</p>\n".into();
    }
    format!(
        "<details><summary>{count} figures of Ferrite beside those of the run before, whose machine may have done \
         other work</summary>\n<table><tr><th>test</th><th>size</th><th>QPs</th><th>before</th><th>now</th>\
         <th>unit</th><th>times as good</th></tr>\n{rows}</table></details>\n"
    )
}

/// Unit and records of a row, by driver.
type Row<'a> = (&'a str, BTreeMap<&'a str, &'a Record>);

/// Tests that are not plotted, a row for each test and size, a column for each of these drivers.
fn other_table(results: &Results, plotted: &[String], drivers: &[Driver]) -> String {
    let mut rows: BTreeMap<(String, u64, u64), Row<'_>> = BTreeMap::new();
    for record in &results.records {
        let is_theirs = drivers.iter().any(|driver| driver.name() == record.driver);
        if is_theirs && !plotted.contains(&record.test) {
            let key = (record.test.clone(), record.size, record.qps);
            let row = rows
                .entry(key)
                .or_insert_with(|| (&record.unit, BTreeMap::new()));
            row.1.insert(&record.driver, record);
        }
    }
    let mut out = String::from("<table><tr><th>test</th><th>size</th><th>QPs</th>");
    for driver in drivers {
        let _ = write!(out, "<th>{}</th>", driver.name());
    }
    out.push_str("<th>unit</th></tr>\n");
    for ((test, size, qps), (unit, columns)) in rows {
        let _ = write!(
            out,
            "<tr><td>{}</td><td class=n>{}</td><td class=n>{qps}</td>",
            escape(&test.replace('_', " ")),
            if size == 0 {
                String::new()
            } else {
                human(size)
            }
        );
        for driver in drivers {
            match columns.get(driver.name()) {
                Some(record) if record.min != record.max => {
                    let _ = write!(
                        out,
                        "<td class=n>{} <small>({} to {})</small></td>",
                        short(record.median),
                        short(record.min),
                        short(record.max)
                    );
                }
                Some(record) => {
                    let _ = write!(out, "<td class=n>{}</td>", short(record.median));
                }
                None => out.push_str("<td class=n>-</td>"),
            }
        }
        let _ = writeln!(out, "<td>{unit}</td></tr>");
    }
    out.push_str("</table>\n");
    out
}

fn header_table(header: &Value) -> String {
    let mut out = String::from("<table>\n");
    if let Some(fields) = header.as_object() {
        for (name, value) in fields {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Array(lines) => lines
                    .iter()
                    .map(|line| line.as_str().map_or(line.to_string(), str::to_owned))
                    .collect::<Vec<_>>()
                    .join("; "),
                other => other.to_string(),
            };
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td>{}</td></tr>",
                escape(&name.replace('_', " ")),
                escape(&text)
            );
        }
    }
    out.push_str("</table>\n");
    out
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
h1{font-size:1.6em}h2{font-size:1.2em;margin-top:2em}table{border-collapse:collapse;font-size:.9em}\
th,td{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:left;vertical-align:top}.n{text-align:right;white-space:nowrap}\
.figure td{background:#f6f6f6}figure{margin:0}figcaption{font-size:.85em;color:#444}\
.unknown{color:#777;font-weight:600}.met{color:#1b6e1b;font-weight:600}.missed{color:#a01c1c;font-weight:600}small{color:#777}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:1em}svg{border:1px solid #eee;width:100%;height:auto}pre{background:#f6f6f6;padding:1em;overflow:auto}";

/// Writes the page and each plot into a folder.
pub fn write(report: &Report<'_>, folder: &Path) -> Result<()> {
    let mut figures = String::new();
    let mut plotted = Vec::new();
    for (name, plot) in plots(report.results) {
        let goals = goals_of(report.results, &name);
        let Some(svg) = plot.svg_with(&goals) else {
            continue;
        };
        fs::write(folder.join(format!("{}.svg", name.replace('_', "-"))), &svg)?;
        let _ = write!(figures, "<figure>{svg}");
        if let Some(figure) = Figure::of(&name) {
            let limit = escape(figure.limit());
            let _ = write!(figures, "<figcaption>What limits it: {limit}.</figcaption>");
        }
        figures.push_str("</figure>\n");
        plotted.push(name);
    }
    let count = |verdict| {
        let these = report.bars.iter().filter(|bar| bar.verdict == verdict);
        these.count()
    };
    let mut page = String::new();
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n<html lang=en><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width\"><title>Ferrite beside rxe and siw</title><style>{STYLE}</style>\n\
         <h1>Ferrite beside rxe and siw</h1>\n\
         <p>Two VMs on one machine, one processor each, all three drivers loaded in both; every round measures one driver \
         after the other, so that a change of the machine's load meets all of them. Points are medians, bars from the smallest \
         to the largest sample, broken lines goals. The machine emulates its guests and may do other work at the same time: figures of one run can \
         be compared with each other, not with those of another run. Made by <code>make bench</code>.</p>\n\
         <h2>Goals: {} met, {} missed, {} not measured</h2>\n\
         <p>Under the name of each figure is what limits it; <code>Documentation/benchmark.md</code> has the reasons. \
         Figures before are of the run before, of the same or another machine: what was reached then is compared with \
         others of that run.</p>\n{}{}",
        count(Verdict::Met),
        count(Verdict::Missed),
        count(Verdict::NotMeasured),
        bars_table(report.bars),
        changes_table(report.results),
    );
    // Each has a table of its own.
    let all = || report.results.records.iter().map(|r| r.test.clone());
    let but = |prefix| all().filter(move |test: &String| !test.starts_with(prefix));
    for prefix in ["interface_", "adapter_"] {
        plotted.extend(all().filter(|test| test.starts_with(prefix)));
    }
    let (others, others_of_adapter): (Vec<_>, Vec<_>) =
        (but("interface_").collect(), but("adapter_").collect());
    let _ = write!(
        page,
        "<h2>Plots</h2>\n<div class=plots>\n{figures}</div>\n<h2>Everything else</h2>\n\
         <p>Counts are per message and do not depend on the clock. The sender's VM posts batches of messages, each with a \
         completion, and sleeps while they are under way; \"there\" is the other VM. DMA operations and doorbells are counted \
         by Ferrite's device, register writes and instructions by QEMU, for all drivers alike.</p>\n{}",
        other_table(report.results, &plotted, &Driver::OF_STORAGE)
    );
    let _ = write!(
        page,
        "<h2>The split driver</h2>\n\
         <p>A host reaches a machine on a LAN through an I/O unit, beside an interface of its own on it. Counts are of a \
         frame in either direction; \"unit\" is the I/O unit's VM, requests are those of RDMA of both ends.</p>\n{}",
        other_table(report.results, &plotted, &split::DRIVERS)
    );
    let _ = write!(
        page,
        "<h2>The interface of the device</h2>\n\
         <p>The device as the network card of both machines, beside virtio-net with a wire of its own. Counts are of a MiB \
         of a TCP stream, and of an echo.</p>\n{}",
        other_table(report.results, &others, &interface::DRIVERS)
    );
    let _ = write!(
        page,
        "<h2>Between functions of one adapter</h2>\n\
         <p>Writes of 1 MiB from one machine into the other, both functions of one device process, through {} and \
         through {} MiB of each, beside memcpy of as much on the machine itself.</p>\n{}",
        adapter::WORKS[0].2,
        adapter::WORKS[1].1,
        other_table(
            report.results,
            &others_of_adapter,
            &[Driver::Ferrite, Driver::Memcpy]
        )
    );
    if let Some(profile) = report.profile {
        let _ = write!(
            page,
            "<h2>Where the time goes</h2>\n<pre>{}</pre>\n",
            escape(profile)
        );
    }
    let _ = write!(
        page,
        "<h2>Machine and settings</h2>\n{}</html>\n",
        header_table(report.header)
    );
    fs::write(folder.join("report.html"), page)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_which_goals_are_missed() {
        let mut results = Results::default();
        for (driver, value) in [
            (Driver::Ferrite, 10.0),
            (Driver::Rxe, 20.0),
            (Driver::Siw, 40.0),
        ] {
            for size in [64, 4096] {
                results.add(driver, "send_lat", (size, 1), ("us", false), value);
            }
            results.add(driver, "connections", (0, 1), ("/s", true), value);
        }
        results.add(
            Driver::Ferrite,
            "send_bw",
            (65_536, 1),
            ("MiB/s", true),
            9000.0,
        );
        results.add(Driver::Siw, "send_bw", (65_536, 1), ("MiB/s", true), 90.0);
        let earlier = results.records.clone();
        results.compare(&earlier);
        results.records[0].before = Some(20.0);
        let bars = goals::bars(&results);
        let folder = std::env::temp_dir().join(format!("ferrite-page-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let header = serde_json::json!({"machine": "a <b>"});
        write(
            &Report {
                header: &header,
                results: &results,
                bars: &bars,
                profile: None,
            },
            &folder,
        )
        .expect("a page");
        let page = fs::read_to_string(folder.join("report.html")).expect("the page");
        let title = format!("Goals: 1 met, 2 missed, {} not measured", bars.len() - 3);
        assert!(page.contains(&title));
        assert!(page.contains("class=missed>missed") && page.contains("class=met>met"));
        assert!(page.contains("class=unknown>not measured"));
        assert!(page.contains("a &lt;b&gt;") && page.contains("<td>connections</td>"));
        // What limits a figure is beside its goals and below its plots.
        assert_eq!(page.matches(&escape(Figure::Bandwidth.limit())).count(), 2);
        // The latency was twice as long before.
        assert!(page.contains("-50 %") && page.contains("<td class=n>2.00</td>"));
        let latency = fs::read_to_string(folder.join("send-lat.svg")).expect("a plot");
        assert!(latency.contains("goal 1/20") && !folder.join("write-bw.svg").exists());
        fs::remove_dir_all(folder).expect("removed");
    }
}
