// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The page of what is promised when something goes wrong names tests that there are.

use std::fs;
use std::path::{Path, PathBuf};

const PAGE: &str = include_str!("../../../Documentation/reliability.md");

/// All of a tree's sources in Rust, in one text.
fn sources(root: &Path, text: &mut String) {
    for entry in fs::read_dir(root).expect("a folder") {
        let path: PathBuf = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).expect("a source"));
        }
    }
}

#[test]
fn there_is_a_test_of_each_promise() {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut in_vms, mut in_user_space) = (String::new(), String::new());
    sources(&tree.join("tools/lab/src/tests"), &mut in_vms);
    sources(&tree.join("qemu"), &mut in_user_space);
    let mut rows = 0;
    let promises = PAGE.lines().filter(|line| line.starts_with("| "));
    for row in promises.filter(|line| !line.starts_with("| what happens")) {
        let seen_by = row.trim_matches('|').rsplit('|').next().unwrap_or_default();
        let mut tests = 0;
        for name in seen_by.split('"').skip(1).step_by(2) {
            assert!(in_vms.contains(&format!("\"{name}\"")), "no test: {name}");
            tests += 1;
        }
        let words = seen_by.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        for name in words.filter(|word| word.contains('_')) {
            assert!(
                in_user_space.contains(&format!("fn {name}()")),
                "no test: {name}"
            );
            tests += 1;
        }
        assert!(tests > 0, "a promise without a test: {row}");
        rows += 1;
    }
    assert!(rows > 20, "{rows} promises");
}
