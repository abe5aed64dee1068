// SPDX-License-Identifier: GPL-2.0

//! The protocol of the split driver: both ends against each other, and each against a peer that does
//! what it should not.

mod contexts;
mod documentation;
mod exchange;
mod hostile;
mod messages;
mod world;

use proptest::prelude::ProptestConfig;

/// 64 cases, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(64);
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
