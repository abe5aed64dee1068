// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of the engine as its device and its peers see it, in one program: what they share is
//! compiled once.

mod accesses;
#[allow(dead_code)] // The hostile tests, another program, use the rest of it.
mod attack;
mod commands;
mod contexts;
mod control_record;
mod details;
mod device_memory;
mod errors;
mod ethernet;
mod events;
mod faults;
mod features;
mod isolation;
mod lists;
mod loans;
mod long;
mod numbers;
mod one_touch;
mod ordering;
mod paging;
mod pending;
mod placement;
mod qp_counters;
mod raw;
mod rc;
mod registration;
mod registrations_model;
mod repetition;
mod room;
mod scale;
mod services;
mod turns;
mod waiting_peers;
mod windows;
mod wire;

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
