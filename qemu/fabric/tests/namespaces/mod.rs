// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a program that has namespaces of its own.

use crate::users;
use std::process::Command;

/// Whether a test runs that needs such namespaces, which are options of `unshare`. It
/// fails if there are none, unless the tests are left out that are several users.
pub fn are_needed(namespaces: &[&str]) -> bool {
    if !users::are_needed() {
        return false;
    }
    let can = Command::new("unshare")
        .args(namespaces)
        .arg("true")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&can.stderr);
    assert!(can.status.success(), "this test needs namespaces: {said}");
    true
}
