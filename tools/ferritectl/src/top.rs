// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device as it works: what changed each second.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{json, Value};

use crate::source::Device;
use crate::table::{number, render, Rows};

/// Set by signals that end the program.
static ENDED: AtomicBool = AtomicBool::new(false);

extern "C" fn end(_signal: libc::c_int) {
    ENDED.store(true, Ordering::Relaxed);
}

fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: all-zero is a valid `sigaction` (no flags, empty mask).
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = end as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: `action` is filled in, and its handler does nothing but store to an atomic.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// The keyboard, key by key and unseen; back to what it was when dropped.
struct Keyboard {
    saved: Option<libc::termios>,
}

impl Keyboard {
    fn new() -> Self {
        let input = std::io::stdin();
        if !input.is_terminal() {
            return Self { saved: None };
        }
        let fd = input.as_raw_fd();
        // SAFETY: all-zero is a valid `termios`, and it is filled in before use.
        let mut saved: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and `saved` is a live local.
        if unsafe { libc::tcgetattr(fd, &mut saved) } != 0 {
            return Self { saved: None };
        }
        let mut keys = saved;
        keys.c_lflag &= !(libc::ICANON | libc::ECHO);
        // SAFETY: the descriptor is open and `keys` is a filled-in `termios`.
        unsafe { libc::tcsetattr(fd, libc::TCSANOW, &keys) };
        Self { saved: Some(saved) }
    }

    /// Waits until `until`; true when the user wants to leave before.
    fn wait(&self, until: Instant) -> bool {
        loop {
            if ENDED.load(Ordering::Relaxed) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if self.saved.is_none() {
                // A signal cuts the sleep short of the next look at the flag by this much.
                std::thread::sleep(left.min(Duration::from_millis(100)));
                continue;
            }
            let mut poll = libc::pollfd {
                fd: libc::STDIN_FILENO,
                events: libc::POLLIN,
                revents: 0,
            };
            let milliseconds = libc::c_int::try_from(left.as_millis() + 1).unwrap_or(1000);
            // SAFETY: `poll` is one live `pollfd`.
            if unsafe { libc::poll(&mut poll, 1, milliseconds) } <= 0 {
                continue;
            }
            let mut key = [0u8];
            // SAFETY: the buffer has room for the one byte asked for.
            let read = unsafe { libc::read(libc::STDIN_FILENO, key.as_mut_ptr().cast(), 1) };
            if read <= 0 || matches!(key[0], b'q' | b'Q' | 3 | 4) {
                return true;
            }
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            // SAFETY: standard input is open and the settings came from it.
            unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, saved) };
        }
    }
}

/// What is counted, at one moment.
struct Sample {
    at: Instant,
    counters: BTreeMap<String, u64>,
    queues: Rows,
    tables: Rows,
}

impl Sample {
    fn take(device: &Device<'_>) -> Result<Self> {
        Ok(Self {
            counters: device.counters()?,
            queues: device.table("eqs")?,
            tables: device.table("tables")?,
            at: Instant::now(),
        })
    }
}

/// Per second, to a tenth; counters that were set back count as standing still.
fn rate(before: u64, after: u64, seconds: f64) -> f64 {
    if seconds <= 0.0 {
        return 0.0;
    }
    (after.saturating_sub(before) as f64 / seconds * 10.0).round() / 10.0
}

/// What happened between two moments.
fn change(name: &str, before: &Sample, after: &Sample) -> Value {
    let seconds = after.at.duration_since(before.at).as_secs_f64();
    let counters: BTreeMap<&str, Value> = after
        .counters
        .iter()
        .map(|(name, value)| {
            let earlier = before.counters.get(name).copied().unwrap_or(*value);
            let per_second = rate(earlier, *value, seconds);
            (
                name.as_str(),
                json!({"total": value, "per_second": per_second}),
            )
        })
        .collect();
    let queues: Vec<Value> = after
        .queues
        .iter()
        .map(|queue| {
            let eqn = number(queue, "eqn");
            let earlier = before.queues.iter().find(|q| number(q, "eqn") == eqn);
            let per_second = |column: &str| {
                let now = number(queue, column);
                rate(earlier.map_or(now, |q| number(q, column)), now, seconds)
            };
            json!({
                "eqn": eqn,
                "cqs": number(queue, "cqs"),
                "events_per_second": per_second("events"),
                "interrupts_per_second": per_second("interrupts"),
            })
        })
        .collect();
    json!({
        "device": name,
        "seconds": (seconds * 1000.0).round() / 1000.0,
        "counters": counters,
        "eqs": queues,
        "tables": after.tables,
    })
}

fn list(value: &Value) -> Rows {
    let entries = value.as_array().into_iter().flatten();
    entries
        .filter_map(|entry| entry.as_object().cloned())
        .collect()
}

/// The change as a page of text.
fn page(change: &Value) -> String {
    let mut out = format!(
        "{}  over {} s  (q ends)\n\n",
        change["device"].as_str().unwrap_or_default(),
        change["seconds"]
    );
    let counters: Rows = change["counters"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| {
            let mut row = value.as_object().cloned().unwrap_or_default();
            row.insert("counter".to_owned(), name.as_str().into());
            row
        })
        .collect();
    out += &render(&counters, &["counter", "per_second", "total"]);
    out.push('\n');
    out += &render(
        &list(&change["eqs"]),
        &["eqn", "cqs", "events_per_second", "interrupts_per_second"],
    );
    out.push('\n');
    out += &render(&list(&change["tables"]), &["table", "used", "entries"]);
    out
}

/// Rows of the terminal that a descriptor is, if it says.
fn rows(fd: libc::c_int) -> Option<usize> {
    // SAFETY: all-zero is a valid `winsize`, and it is filled in before use.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: the request fills in the `winsize` it is given, a live local.
    let result = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &mut size) };
    (result == 0 && size.ws_row > 0).then_some(size.ws_row.into())
}

/// A page over the last one on a terminal: from its first row on, each line with the rest of the
/// old one cleared, then all below. No more than fits, or the first rows would scroll away.
fn over_the_last(page: &str, rows: Option<usize>) -> String {
    let lines: Vec<&str> = page.lines().take(rows.unwrap_or(usize::MAX)).collect();
    format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n"))
}

/// Shows what happens every `interval`, `count` times or until the user ends it.
pub fn run(
    device: &Device<'_>,
    interval: Duration,
    count: Option<u64>,
    as_json: bool,
) -> Result<()> {
    catch_signals();
    let keyboard = Keyboard::new();
    let mut out = std::io::stdout();
    let live = out.is_terminal() && !as_json;
    let mut before = Sample::take(device)?;
    let mut shown = 0;
    while count.is_none_or(|count| shown < count) {
        if keyboard.wait(before.at + interval) {
            break;
        }
        let after = Sample::take(device)?;
        let change = change(&device.name, &before, &after);
        let text = if as_json {
            format!("{change}\n")
        } else if live {
            over_the_last(&page(&change), rows(out.as_raw_fd()))
        } else {
            page(&change) + "\n"
        };
        if live && shown == 0 {
            out.write_all(b"\x1b[2J")?;
        }
        // Whoever read the output may have gone: that is the end, not an error.
        if out
            .write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .is_err()
        {
            break;
        }
        shown += 1;
        before = after;
    }
    if live && shown > 0 {
        // The shell's next line below the page.
        let _ = out.write_all(b"\r\n").and_then(|()| out.flush());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::parse;

    fn sample(at: Instant, packets: u64, events: u64) -> Sample {
        Sample {
            at,
            counters: BTreeMap::from([("tx_packets".to_owned(), packets)]),
            queues: parse(&format!("eqn events interrupts cqs\n2 {events} 5 1\n")).unwrap(),
            tables: parse("table used entries\ntpt 2 10\n").unwrap(),
        }
    }

    #[test]
    fn rates_are_per_second() {
        let start = Instant::now();
        let before = sample(start, 100, 10);
        let after = sample(start + Duration::from_secs(2), 300, 20);
        let change = change("ferrite0", &before, &after);
        assert_eq!(change["counters"]["tx_packets"]["per_second"], 100.0);
        assert_eq!(change["counters"]["tx_packets"]["total"], 300);
        assert_eq!(change["eqs"][0]["events_per_second"], 5.0);
        assert_eq!(change["eqs"][0]["interrupts_per_second"], 0.0);
        let page = page(&change);
        assert!(
            page.contains("tx_packets") && page.contains("100.0"),
            "{page}"
        );
        assert!(page.contains("tpt"), "{page}");
    }

    #[test]
    fn a_page_fits_its_terminal() {
        let page = "one\ntwo\n\nfour\n";
        assert_eq!(
            over_the_last(page, Some(3)),
            "\x1b[Hone\x1b[K\r\ntwo\x1b[K\r\n\x1b[K\x1b[J"
        );
        assert!(over_the_last(page, None).ends_with("four\x1b[K\x1b[J"));
    }

    #[test]
    fn counters_set_back_stand_still() {
        assert_eq!(rate(10, 3, 1.0), 0.0);
        assert_eq!(rate(3, 10, 0.0), 0.0);
        assert_eq!(rate(0, 1, 3.0), 0.3);
    }
}
