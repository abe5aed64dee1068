// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device against its specification, and devices that do not keep it.

use ferrite_conformance::process::Target;
use ferrite_conformance::report::{Report, Verdict};
use ferrite_conformance::requirements::Id;
use ferrite_conformance::run::run;
use std::ffi::OsString;
use std::thread;

/// Checks a device of these options; what is said of it is shown where a test fails.
fn check(options: &[&str], filter: Option<&str>) -> Report {
    let mut command = vec![OsString::from(env!("CARGO_BIN_EXE_ferrite-device"))];
    command.extend(["--log", "off"].map(OsString::from));
    command.extend(options.iter().map(OsString::from));
    let mut said = Vec::new();
    let report = run(&Target::Started(command), filter, &mut said).unwrap();
    println!("{options:?}\n{}", String::from_utf8_lossy(&said));
    report
}

fn id(number: &str) -> Id {
    Id::parse(number).unwrap()
}

fn verdict(report: &Report, number: &str) -> Verdict {
    let mut of = report.verdicts.iter().filter(|(r, _)| r.id == id(number));
    of.next().unwrap().1.clone()
}

#[test]
fn the_device_keeps_every_requirement_of_its_specification() {
    let report = check(&[], None);
    assert!(report.is_good(), "see the list above");
}

#[test]
fn it_does_with_other_numbers_and_doorbell_pages_far_apart() {
    let options = [
        "--qp-first",
        "70000",
        "--cq-first",
        "300",
        "--srq-first",
        "5000",
        "--tag-first",
        "9000",
        "--doorbell-pages",
        "8",
        "--doorbell-stride",
        "16",
        "--vectors",
        "3",
    ];
    let report = check(&options, None);
    assert!(report.is_good(), "see the list above");
    assert_eq!(verdict(&report, "DEV-1-22"), Verdict::Kept);
}

#[test]
fn it_interrupts_as_specified_with_whatever_it_offers() {
    for (options, pin) in [
        (
            ["--interrupts", "msi", "--vectors", "4", "--messages", "9"],
            false,
        ),
        (
            ["--interrupts", "intx", "--vectors", "1", "--messages", "9"],
            true,
        ),
        (
            ["--interrupts", "msix", "--vectors", "2", "--messages", "9"],
            false,
        ),
    ] {
        let report = check(&options, Some("DEV-1"));
        assert!(report.is_good(), "see the list above");
        let kept = verdict(&report, "DEV-1-29") == Verdict::Kept;
        assert_eq!(kept, pin, "{options:?}");
        assert_eq!(verdict(&report, "DEV-1-26"), Verdict::Kept);
    }
}

#[test]
fn it_does_with_ethernet_of_its_own() {
    let combined = ["--personality", "combined"];
    for chapter in ["DEV-2", "DEV-3", "DEV-5", "DEV-12", "DEV-20"] {
        let report = check(&combined, Some(chapter));
        assert!(report.is_good(), "see the list above");
    }
    let network = ["--personality", "network"];
    // Checks of other chapters are made with queue pairs.
    let report = check(&network, Some("DEV-20"));
    assert!(report.is_good(), "see the list above");
    for number in ["DEV-20-2", "DEV-20-23", "DEV-20-44"] {
        let report = check(&network, Some(number));
        assert_eq!(verdict(&report, number), Verdict::Kept, "{number}");
    }
    let options = ["--personality", "combined", "--any-source-mac"];
    let report = check(&options, Some("DEV-20-21"));
    assert_eq!(verdict(&report, "DEV-20-21"), Verdict::Kept);
}

#[test]
fn a_reset_that_takes_time_shows_that() {
    let slow = r#"{"reset":"slow","hold":100}"#;
    let report = check(&["--misbehave", slow], Some("DEV-2"));
    for number in ["DEV-2-8", "DEV-2-9", "DEV-2-10"] {
        assert_eq!(verdict(&report, number), Verdict::Kept, "{number}");
    }
}

#[test]
fn tags_whose_commands_take_time_are_waited_for() {
    let slow = r#"{"hold_tags":5}"#;
    let of_tags = (112..=119).map(|number| format!("DEV-4-{number}"));
    let of_commands = [163, 164].map(|number| format!("DEV-3-{number}"));
    for number in of_tags.chain(of_commands) {
        let report = check(&["--misbehave", slow], Some(&number));
        assert_eq!(verdict(&report, &number), Verdict::Kept, "{number}");
    }
}

#[test]
fn control_doorbells_that_come_late_are_overtaken() {
    let late = r#"{"hold_control":20}"#;
    // Not 116: what a release ends is there until its doorbell has come.
    let of_tags = [112, 113, 114, 115, 117, 118, 119].map(|number| format!("DEV-4-{number}"));
    let of_commands = [4, 8, 163, 164, 165, 168].map(|number| format!("DEV-3-{number}"));
    for number in of_tags.into_iter().chain(of_commands) {
        let report = check(&["--misbehave", late], Some(&number));
        assert_eq!(verdict(&report, &number), Verdict::Kept, "{number}");
    }
}

/// Each check can fail: devices that do something wrong, and the requirements that they break.
#[test]
fn a_device_that_does_not_keep_to_its_specification_is_found_out() {
    let devices = [
        (r#"{"answers":{"drop":1}}"#, "DEV-3-8"),
        (r#"{"answers":{"double":1}}"#, "DEV-3-8"),
        (r#"{"answers":{"reorder":0.5}}"#, "DEV-3-1"),
        (r#"{"answers":{"reorder":0.5}}"#, "DEV-13-13"),
        (r#"{"events":{"drop":1}}"#, "DEV-5-1"),
        (r#"{"events":{"drop":1}}"#, "DEV-6-29"),
        (r#"{"hold":5,"events":{"double":1}}"#, "DEV-6-31"),
        (r#"{"hold":5,"events":{"double":1}}"#, "DEV-7-43"),
        (r#"{"lose_flushes":true}"#, "DEV-7-49"),
        (r#"{"lose_flushes":true}"#, "DEV-7-50"),
        (r#"{"reset":"never"}"#, "DEV-2-8"),
        (r#"{"ignore_function_reset":true}"#, "DEV-2-8"),
        (r#"{"nonsense":{"registers":1}}"#, "DEV-2-1"),
        (r#"{"nonsense":{"replies":1}}"#, "DEV-3-44"),
        (r#"{"nonsense":{"completions":1}}"#, "DEV-6-1"),
        (r#"{"nonsense":{"records":1}}"#, "DEV-10-10"),
        (r#"{"nonsense":{"answers":1}}"#, "DEV-3-9"),
        (r#"{"nonsense":{"events":1}}"#, "DEV-5-30"),
    ];
    thread::scope(|scope| {
        for (rules, number) in devices {
            scope.spawn(move || {
                let report = check(&["--misbehave", rules], Some(number));
                let broken: Vec<Id> = report.broken().collect();
                assert_eq!(broken, [id(number)], "{rules}");
            });
        }
    });
}

#[test]
fn a_device_that_ends_fails_its_check_and_no_other() {
    // A command that is no device at all.
    let mut said = Vec::new();
    let target = Target::Started(vec!["false".into()]);
    let report = run(&target, Some("DEV-1-1"), &mut said).unwrap();
    let broken: Vec<Id> = report.broken().collect();
    assert_eq!(broken, [id("DEV-1-1")]);
}
