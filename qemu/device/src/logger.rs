// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Log lines on standard error.
//!
//! A neighbour gives occasion for many of them, as often as it likes, and some
//! are written while others wait for the device. So there are only so many of
//! each kind, that is, from each place in the source.

use ferrite_fabric::console::{self, Notices};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Where a line comes from.
type Place = (Option<&'static str>, Option<u32>);

static NOTICES: Mutex<BTreeMap<Place, Notices>> = Mutex::new(BTreeMap::new());

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let level = record.level().as_str().to_lowercase();
        if record.level() >= Level::Debug {
            // Who asks for these wants them all.
            console::line(format_args!("ferrite-device: {level}: {}", record.args()));
            return;
        }
        let mut notices = NOTICES.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (record.file_static(), record.line());
        notices
            .entry(place)
            .or_default()
            .tell("ferrite-device", format_args!("{level}: {}", record.args()));
    }

    fn flush(&self) {}
}

/// Sends log lines of at least this level to standard error.
pub fn init(level: LevelFilter) {
    // It fails only if a logger is set already, which then stays.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(level);
    }
}
