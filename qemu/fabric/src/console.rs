// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines on standard error, which end and stop nothing.
//!
//! Whoever reads them may stop, or be gone, and a disk may be full. Others, who
//! are not trusted, give occasion for them as often as they like.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that come at once before the rest is only counted.
const BURST: u32 = 32;
/// How often there is one more line.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes a line, unless there is no room for it now.
pub fn line(text: fmt::Arguments<'_>) {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    // A pipe or socket of which this holds takes a line of this kind whole.
    let room = poll(&mut fds, Some(&Timespec::default())).is_ok()
        && fds[0].revents().contains(PollFlags::OUT);
    if room {
        // There is nowhere to tell that it failed.
        let _ = stderr.lock().write_all(format!("{text}\n").as_bytes());
    }
}

/// Lets some lines pass, and counts the others.
#[derive(Debug)]
struct Limit {
    left: u32,
    since: Option<Instant>,
    suppressed: u64,
}

impl Limit {
    const fn new() -> Self {
        Self {
            left: BURST,
            since: None,
            suppressed: 0,
        }
    }

    /// Whether a line may pass now, and how many did not before it.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let periods = now.saturating_duration_since(since).as_millis() / INTERVAL.as_millis();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(periods).min(BURST);
        if let (1.., Some(later)) = (periods, since.checked_add(INTERVAL.saturating_mul(periods))) {
            self.since = Some(later);
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Lines of one kind for which somebody else may give occasion: [`BURST`] at
/// once, and one each [`INTERVAL`].
#[derive(Debug)]
pub struct Notices(Mutex<Limit>);

impl Default for Notices {
    fn default() -> Self {
        Self::new()
    }
}

impl Notices {
    /// None so far.
    pub const fn new() -> Self {
        Self(Mutex::new(Limit::new()))
    }

    /// Tells the operator something, or counts it.
    pub fn tell(&self, program: &str, text: fmt::Arguments<'_>) {
        let mut limit = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(suppressed) = limit.admit(Instant::now()) else {
            return;
        };
        drop(limit);
        if suppressed > 0 {
            line(format_args!("{program}: {suppressed} such lines left out"));
        }
        line(format_args!("{program}: {text}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_counted() {
        let mut limit = Limit::new();
        let start = Instant::now();
        for _ in 0..BURST {
            assert_eq!(limit.admit(start), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(limit.admit(start), None);
        }
        assert_eq!(limit.admit(start + INTERVAL), Some(1000));
        assert_eq!(limit.admit(start + INTERVAL), None);
        let late = start + 1000 * INTERVAL;
        assert_eq!(limit.admit(late), Some(1));
        for _ in 1..BURST {
            assert_eq!(limit.admit(late), Some(0));
        }
        assert_eq!(limit.admit(late), None);
    }
}
