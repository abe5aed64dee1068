// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Every input of the corpora, and for some seconds inputs made of them: by known seeds for half of the time, which
//! every run repeats, and by fresh ones, which are printed, for the other.
//!
//! `FERRITE_SEED=n` repeats the one that was printed and no other, `FERRITE_FUZZ_SECONDS=n` is longer or shorter
//! for each target.

use ferrite_fuzz::driver::{input, shrink, try_seeds};
use ferrite_fuzz::{steps, target, TARGETS};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// For each target: a minute for all.
const SECONDS: f64 = 60.0 / TARGETS.len() as f64;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name)
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder(name))
        .expect("a corpus")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    let read = |path: PathBuf| std::fs::read(path).expect("an input");
    files.into_iter().map(read).collect()
}

fn number<N: std::str::FromStr>(name: &str) -> Option<N> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().ok().expect("a number"))
}

/// Tries a target on its corpus, and then on inputs made of that.
fn try_target(name: &str) {
    let target = target(name).expect("a target");
    let corpus = corpus(name);
    assert!(corpus.len() >= 3, "a corpus has some inputs");
    for input in &corpus {
        target(input);
    }
    let tried = |first: u64, seconds: f64| {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        try_seeds(target, &corpus, first, end).unwrap_or_else(|found| {
            let (seed, bytes) = (found.seed, input(found.seed, &corpus));
            let short = shrink(target, &bytes);
            let test = std::thread::current().name().unwrap_or("").to_owned();
            panic!(
                "{name}: {}\nof {bytes:x?}\nmade short: {short:x?}\n\
                 again: FERRITE_SEED={seed} cargo test -p ferrite-fuzz --test corpus {test}",
                found.failure
            );
        })
    };
    if let Some(seed) = number("FERRITE_SEED") {
        tried(seed, 0.0);
        return;
    }
    let seconds = number("FERRITE_FUZZ_SECONDS").unwrap_or(SECONDS) / 2.0;
    let known = tried(0, seconds);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let first = now.map_or(0, |since| since.as_micros() as u64);
    println!("{name}: fresh seeds from FERRITE_SEED={first}");
    let fresh = tried(first, seconds);
    println!(
        "{name}: {} of the corpus, {known} by known seeds, {fresh} by fresh ones; {} engine steps, with those of other targets",
        corpus.len(),
        steps()
    );
}

#[test]
fn registers_and_doorbells_of_any_kind_leave_the_device_standing() {
    try_target("registers");
}

#[test]
fn commands_of_any_kind_leave_the_device_standing() {
    try_target("commands");
}

#[test]
fn work_requests_reach_nothing_that_is_not_their_owners() {
    try_target("requests");
}

#[test]
fn page_lists_reach_nothing_that_they_do_not_name() {
    try_target("lists");
}

#[test]
fn frames_reach_nothing_that_peers_have_no_right_to() {
    try_target("frames");
}

#[test]
fn channels_of_any_kind_leave_the_device_standing() {
    try_target("channels");
}

#[test]
fn raw_packets_and_rules_of_any_kind_reach_what_they_are_for() {
    try_target("raw");
}

#[test]
fn vfio_user_messages_reach_nothing_that_is_not_mapped() {
    try_target("vfio");
}

#[test]
fn functions_of_an_adapter_reach_nothing_of_each_other_that_was_let_go_of() {
    try_target("functions");
}

#[test]
fn neighbours_and_switches_of_any_kind_leave_shortcuts_standing() {
    try_target("shortcuts");
}

#[test]
fn lines_of_any_kind_leave_what_they_control_standing() {
    try_target("control");
}

#[test]
fn every_target_is_tried_and_has_a_program() {
    let own = include_str!("corpus.rs");
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("libfuzzer/fuzz_targets");
    for (name, _) in TARGETS {
        assert!(own.contains(&format!("try_target(\"{name}\")")), "{name}");
        assert!(programs.join(format!("{name}.rs")).exists(), "{name}");
    }
}
