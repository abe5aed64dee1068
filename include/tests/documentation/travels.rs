// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The page that follows a verb names files that there are, and functions that are in them.

use std::fs;
use std::path::{Path, PathBuf};

const PAGE: &str = include_str!("../../../Documentation/how-a-verb-travels.md");

/// Where a file may be that is named without its place.
const ROOMS: [&str; 3] = ["", "drivers/infiniband/hw/ferrite", "tools/provider/src"];

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files of that name.
fn found(name: &str) -> Vec<PathBuf> {
    let places = ROOMS.map(|room| tree().join(room).join(name));
    places.into_iter().filter(|place| place.is_file()).collect()
}

/// All words that are names of files in Rust.
fn files() -> impl Iterator<Item = &'static str> {
    PAGE.split(|c: char| c.is_whitespace() || "`(),;:".contains(c))
        .map(|word| word.trim_end_matches('.'))
        .filter(|word| word.ends_with(".rs"))
}

#[test]
fn the_files_that_a_verb_passes_are_there() {
    assert!(files().count() > 20);
    for name in files() {
        assert!(!found(name).is_empty(), "there is no {name}");
    }
}

#[test]
fn the_hops_of_a_verb_are_where_the_page_says() {
    // "**Hop N**, `function` in (the driver's) `file`"
    let mut hops = 0;
    for hop in PAGE.split("**Hop ").skip(1) {
        let mut names = hop.split('`').skip(1).step_by(2);
        let (Some(function), Some(file)) = (names.next(), names.next()) else {
            panic!("a hop without names");
        };
        let function = function.rsplit("::").next().unwrap_or(function);
        let is_there = found(file).iter().any(|place| {
            fs::read_to_string(place).is_ok_and(|text| text.contains(&format!("fn {function}")))
        });
        assert!(is_there, "{file} has no {function}");
        hops += 1;
    }
    assert_eq!(hops, 3);
}
