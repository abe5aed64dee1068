// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines on standard error, which end and stop nothing.
//!
//! Whoever reads them may stop, or be gone, and a disk may be full. Others, who
//! are not trusted, give occasion for them as often as they like.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that come at once before the rest is only counted.
const BURST: u32 = 32;
/// How often there is one more line.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes a line, unless there is no room for it now.
pub fn line(text: fmt::Arguments<'_>) {
    // The room is not taken by another thread in between.
    let stderr = io::stderr().lock();
    // There is nowhere to tell that it failed.
    let _ = write_now(&stderr, format!("{text}\n").as_bytes());
}

/// Writes what there is room for; never waits for anybody to read.
fn write_now(file: impl AsFd, bytes: &[u8]) -> rustix::io::Result<usize> {
    let mut fds = [PollFd::new(&file, PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec::default()))?;
    if !fds[0].revents().contains(PollFlags::OUT) {
        return Err(Errno::AGAIN);
    }
    // A disk makes nobody wait for a reader, and would rather not be asked so.
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if kind != FileType::RegularFile {
        // Another process may write there too, and there may be room for less
        // than this. The offset says that there is none.
        let slices = [IoSlice::new(bytes)];
        match rustix::io::pwritev2(&file, &slices, u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {}
            result => return result,
        }
    }
    rustix::io::write(&file, bytes)
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
    fn a_line_waits_for_nobody_to_read() {
        use rustix::pipe::{fcntl_setpipe_size, pipe};
        let (reader, writer) = pipe().unwrap();
        let size = fcntl_setpipe_size(&writer, 8192).unwrap();
        assert_eq!(size, 8192);
        // One of two pages is taken: there is room, but not for all of this.
        rustix::io::write(&writer, &[0; 4096]).unwrap();
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let first = write_now(&writer, &[1; 6000]);
            let second = write_now(&writer, b"x");
            done.send((first, second, writer)).unwrap();
        });
        let result = finished.recv_timeout(Duration::from_secs(120));
        let (first, second, writer) = result.expect("it waits");
        assert_eq!((first, second), (Ok(4096), Err(Errno::AGAIN)));
        rustix::io::read(&reader, &mut [0; 8192]).unwrap();
        assert_eq!(write_now(&writer, b"line"), Ok(4));
        // A file on a disk takes all.
        let file = std::env::temp_dir().join(format!("ferrite-{}-line", std::process::id()));
        let disk = std::fs::File::create(&file).unwrap();
        assert_eq!(write_now(&disk, b"line"), Ok(4));
        assert_eq!(std::fs::read(&file).unwrap(), b"line");
        std::fs::remove_file(&file).unwrap();
    }

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
