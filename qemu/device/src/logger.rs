// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Log lines on standard error.

use ferrite_fabric::console;
use log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        console::line(format_args!(
            "ferrite-device: {}: {}",
            record.level().as_str().to_lowercase(),
            record.args()
        ));
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
