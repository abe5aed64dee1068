// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What the device's time is by the wall clock.
//!
//! The device stamps completions by a clock of its own. The two clocks are compared when a queue is
//! made whose consumer wants wall-clock times, and then at most once a second, when it begins to poll:
//! everything else is arithmetic. The kernel is never asked while the queue is locked.
//!
//! A comparison reads the wall clock, asks the device, and reads the wall clock again. It tells the
//! difference of the clocks no better than to the time that took. So the difference that was known
//! stays as long as it is possible, and is changed by no more than it must be: times of successive
//! completions do not jump back and forth with each comparison.
//!
//! The device's clock may have so few bits that it begins again every few seconds. What it says is
//! brought to 64 bits by what it should say about now by a clock of the host that is never set and goes
//! on while the machine sleeps (below: the host's clock). A comparison takes the nearest of the times that
//! look the same; a completion is of the past, and may have lain in its queue for most of a turn.

use core::ffi::c_int;
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::context::{query_clock, ClockQuery};
use crate::sys::ibv_context;

/// How long a comparison is good for, in nanoseconds.
const GOOD_FOR: u64 = 1_000_000_000;
/// Comparisons at the start; the quickest is the best.
const FIRST_COMPARISONS: usize = 4;
/// And so many more where none of those was quick enough to tell anything.
const MORE_COMPARISONS: usize = 60;
/// But none is begun after so long, in nanoseconds: somebody waits for his queue.
const FIRST_FOR: u64 = 5_000_000_000;
/// When a device is asked again that could not be asked at once, in nanoseconds.
const AGAIN_AFTER: u64 = 10_000_000;
/// For how long that is tried, before it is asked however long that takes: others may keep it at work
/// all the time, and the clocks drift apart.
const REFUSED_FOR: u64 = 5_000_000_000;

/// The relation of the two clocks.
pub struct Clock {
    khz: u32,
    /// Bits of the device's clock, 1 to 64.
    bits: u32,
    /// What has to be added to the device's time in nanoseconds.
    difference: AtomicI64,
    /// The device's ticks, in 64 bits, when the host's clock said 0.
    origin: AtomicU64,
    /// When they were compared last, by the host's clock in nanoseconds; 0 for never.
    compared: AtomicU64,
    /// Since when the device could not be asked at once, and when that was tried last, by the host's
    /// clock; 0 where it could.
    refused: AtomicU64,
    tried: AtomicU64,
    /// Held by who compares.
    comparing: Mutex<()>,
}

/// What one comparison tells: the difference is one of these.
#[derive(Clone, Copy)]
struct Bounds {
    low: i64,
    high: i64,
}

impl Bounds {
    fn new(device: u64, before: u64, after: u64) -> Self {
        let low = before.wrapping_sub(device) as i64;
        let high = after.wrapping_sub(device) as i64;
        Self {
            low,
            // The wall clock may have been set back meanwhile.
            high: high.max(low),
        }
    }

    fn width(self) -> u64 {
        self.high.abs_diff(self.low)
    }

    fn middle(self) -> i64 {
        self.low.wrapping_add((self.width() / 2) as i64)
    }

    /// The possible difference that is next to `known`.
    fn nearest(self, known: i64) -> i64 {
        known.clamp(self.low, self.high)
    }
}

/// Ticks of a clock as nanoseconds.
fn nanoseconds(ticks: u64, khz: u32) -> u64 {
    match khz {
        0 => 0,
        1_000_000 => ticks,
        khz => (u128::from(ticks) * 1_000_000 / u128::from(khz)) as u64,
    }
}

/// Nanoseconds as ticks of a clock.
fn ticks_in(nanoseconds: u64, khz: u32) -> u64 {
    (u128::from(nanoseconds) * u128::from(khz) / 1_000_000) as u64
}

fn time_of(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: there is room for the answer. The clocks asked for exist, so that the call does not
    // fail.
    unsafe { libc::clock_gettime(clock, &mut time) };
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

fn wall_clock() -> u64 {
    time_of(libc::CLOCK_REALTIME)
}

/// The host's clock; never 0.
fn now() -> u64 {
    time_of(libc::CLOCK_BOOTTIME).max(1)
}

/// The best of the first comparisons that `look` makes, by the clock `now`; `EAGAIN` where none of many
/// tells anything.
fn first(
    now: impl Fn() -> u64,
    mut look: impl FnMut() -> Result<Option<Bounds>, c_int>,
) -> Result<Bounds, c_int> {
    let begun = now();
    let mut best: Option<Bounds> = None;
    for at in 0..FIRST_COMPARISONS + MORE_COMPARISONS {
        let late = now().saturating_sub(begun) > FIRST_FOR;
        if late || at >= FIRST_COMPARISONS && best.is_some() {
            break;
        }
        best = best.into_iter().chain(look()?).min_by_key(|b| b.width());
    }
    best.ok_or(libc::EAGAIN)
}

impl Clock {
    /// A clock with that many ticks per millisecond in so many bits, not compared yet.
    pub(crate) fn new(khz: u32, bits: u8) -> Self {
        Self {
            khz,
            bits: u32::from(bits).clamp(1, 64),
            difference: AtomicI64::new(0),
            // So far from 0 that no time is before it.
            origin: AtomicU64::new(1u64.checked_shl(bits.into()).unwrap_or(0)),
            compared: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            tried: AtomicU64::new(0),
            comparing: Mutex::new(()),
        }
    }

    /// The bits that the device's clock has.
    pub(crate) fn mask(&self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }

    /// Ticks in 64 bits: those next to `around` that look like `ticks`.
    fn extend(&self, ticks: u64, around: u64) -> u64 {
        let unused = 64 - self.bits;
        let ahead = (ticks.wrapping_sub(around) << unused) as i64 >> unused;
        around.wrapping_add_signed(ahead)
    }

    /// What the device's clock should say in 64 bits when the host's says `now`.
    fn expected(&self, now: u64) -> u64 {
        let origin = self.origin.load(Ordering::Relaxed);
        origin.wrapping_add(ticks_in(now, self.khz))
    }

    /// An eighth of what the device's clock counts before it begins again, in ticks.
    fn eighth(&self) -> u64 {
        self.mask() / 8
    }

    /// Takes note of what the device's clock said at some time between these of the host's clock;
    /// returns it in 64 bits. Nothing, where that took so long that a turn more or less is in doubt.
    fn note(&self, ticks: u64, before: u64, after: u64) -> Option<u64> {
        let took = after.saturating_sub(before);
        if self.bits < 64 && ticks_in(took, self.khz) > self.eighth() {
            return None;
        }
        let middle = before + took / 2;
        let extended = self.extend(ticks, self.expected(middle));
        let origin = extended.wrapping_sub(ticks_in(middle, self.khz));
        self.origin.store(origin, Ordering::Relaxed);
        Some(extended)
    }

    /// Compares the clocks once, the device's by `ask`; returns what that tells, if anything. The caller
    /// holds `comparing`.
    fn look(&self, ask: impl FnOnce() -> Result<u64, c_int>) -> Result<Option<Bounds>, c_int> {
        let (begun, before) = (now(), wall_clock());
        let ticks = ask()?;
        let (after, done) = (wall_clock(), now());
        let ticks = self.note(ticks, begun, done);
        Ok(ticks.map(|ticks| Bounds::new(nanoseconds(ticks, self.khz), before, after)))
    }

    /// Compares the clocks, if that was not done before.
    ///
    /// # Safety
    ///
    /// `context` is open, and this clock is its.
    pub(crate) unsafe fn compare(&self, context: *mut ibv_context) -> Result<(), c_int> {
        let _comparing = self
            .comparing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.compared.load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        // SAFETY: the context is open, by the caller.
        let ask = || unsafe { query_clock(context, ClockQuery::Patient) };
        let best = first(now, || self.look(ask))?;
        self.difference.store(best.middle(), Ordering::Relaxed);
        // Release: who sees that there was a comparison sees its result.
        self.compared.store(now(), Ordering::Release);
        Ok(())
    }

    /// Compares the clocks again, if the last comparison is no longer good.
    ///
    /// # Safety
    ///
    /// `context` is open, and this clock is its.
    pub(crate) unsafe fn keep_up(&self, context: *mut ibv_context) {
        // SAFETY: the context is open, by the caller.
        self.keep_up_at(now(), |way| unsafe { query_clock(context, way) });
    }

    /// As [`Clock::keep_up`], when the host's clock says `at`; `ask` asks the device.
    #[inline]
    fn keep_up_at(&self, at: u64, ask: impl Fn(ClockQuery) -> Result<u64, c_int>) {
        if at.saturating_sub(self.compared.load(Ordering::Acquire)) > GOOD_FOR {
            self.compare_again(at, ask);
        }
    }

    #[cold]
    fn compare_again(&self, at: u64, ask: impl Fn(ClockQuery) -> Result<u64, c_int>) {
        let Ok(_comparing) = self.comparing.try_lock() else {
            return;
        };
        let refused = self.refused.load(Ordering::Relaxed);
        if refused != 0 && at.saturating_sub(self.tried.load(Ordering::Relaxed)) < AGAIN_AFTER {
            return;
        }
        let told = if refused != 0 && at.saturating_sub(refused) > REFUSED_FOR {
            self.look(|| ask(ClockQuery::Patient))
        } else {
            match self.look(|| ask(ClockQuery::Now)) {
                // What was known has to do for the moment: the caller polls.
                Err(libc::EAGAIN) => {
                    if refused == 0 {
                        self.refused.store(at, Ordering::Relaxed);
                    }
                    self.tried.store(at, Ordering::Relaxed);
                    return;
                }
                // A driver that does not know of this way.
                Err(_) => self.look(|| ask(ClockQuery::Patient)),
                told => told,
            }
        };
        if let Ok(Some(bounds)) = told {
            let known = self.difference.load(Ordering::Relaxed);
            self.difference
                .store(bounds.nearest(known), Ordering::Relaxed);
        }
        self.refused.store(0, Ordering::Relaxed);
        // Where that took long, it is good for as long all the same.
        self.compared.store(at.max(now()), Ordering::Release);
    }

    /// The wall-clock time, in nanoseconds, when the device's clock had that many ticks.
    pub(crate) fn wall_time(&self, ticks: u64) -> u64 {
        // Not asked for where it changes nothing.
        self.wall_time_at(ticks, if self.bits == 64 { 0 } else { now() })
    }

    /// As [`Clock::wall_time`], when the host's clock says `now`.
    fn wall_time_at(&self, ticks: u64, now: u64) -> u64 {
        // Up to seven eighths of a turn ago; one is left for how far the clocks may be apart.
        let around = self.expected(now).wrapping_sub(3 * self.eighth());
        let extended = self.extend(ticks, around);
        nanoseconds(extended, self.khz).wrapping_add(self.difference.load(Ordering::Relaxed) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};

    #[test]
    fn a_difference_is_kept_while_it_is_possible_and_changed_as_little_as_can_be() {
        let bounds = Bounds::new(1000, 51_000, 51_200);
        assert_eq!(bounds.middle(), 50_100);
        assert_eq!(bounds.nearest(50_150), 50_150);
        assert_eq!(bounds.nearest(49_000), 50_000);
        assert_eq!(bounds.nearest(60_000), 50_200);
    }

    #[test]
    fn the_quickest_of_the_first_comparisons_counts_and_more_are_made_where_none_tells() {
        let wide = |width: u64| Some(Bounds::new(0, 0, width));
        let run = |told: &dyn Fn(usize) -> Option<Bounds>| {
            let mut looks = 0;
            let best = first(
                || 0,
                || {
                    looks += 1;
                    Ok(told(looks))
                },
            );
            (best.map(Bounds::width), looks)
        };
        assert_eq!(run(&|at| wide([9, 5, 7, 8][at - 1])), (Ok(5), 4));
        assert_eq!(run(&|at| if at < 40 { None } else { wide(3) }), (Ok(3), 40));
        let all = FIRST_COMPARISONS + MORE_COMPARISONS;
        assert_eq!(run(&|_| None), (Err(libc::EAGAIN), all));
        let failed = first(|| 0, || Err(libc::EIO));
        assert_eq!(failed.map(Bounds::width), Err(libc::EIO));
        // A device that takes two seconds for each.
        let looks = Cell::new(0);
        let late = first(
            || looks.get() * 2_000_000_000,
            || {
                looks.set(looks.get() + 1);
                Ok(None)
            },
        );
        assert_eq!(late.map(Bounds::width), Err(libc::EAGAIN));
        assert_eq!(looks.get(), 3);
    }

    #[test]
    fn a_device_that_cannot_be_asked_at_once_is_asked_soon_again_and_at_last_patiently() {
        let clock = Clock::new(1_000_000, 64);
        let start = now();
        clock.compared.store(start, Ordering::Relaxed);
        let asked = RefCell::new(Vec::new());
        let try_at = |at: u64, answer: &dyn Fn(ClockQuery) -> Result<u64, c_int>| {
            asked.borrow_mut().clear();
            clock.keep_up_at(start + at, |way| {
                asked.borrow_mut().push(way as u32);
                answer(way)
            });
            asked.borrow().clone()
        };
        let (patient, at_once) = (ClockQuery::Patient as u32, ClockQuery::Now as u32);
        let busy = |way| match way {
            ClockQuery::Now => Err(libc::EAGAIN),
            ClockQuery::Patient => Ok(5),
        };
        let first = GOOD_FOR + 1;
        assert_eq!(try_at(first, &busy), [at_once]);
        // Not at each poll, nor after a second only.
        assert_eq!(try_at(first + AGAIN_AFTER - 1, &busy), []);
        assert_eq!(try_at(first + AGAIN_AFTER, &busy), [at_once]);
        assert_eq!(try_at(first + REFUSED_FOR, &busy), [at_once]);
        let last = first + REFUSED_FOR + AGAIN_AFTER;
        assert_eq!(try_at(last, &busy), [patient]);
        assert_eq!(try_at(last + GOOD_FOR, &busy), []);
        // From the start.
        assert_eq!(try_at(last + GOOD_FOR + 1, &busy), [at_once]);
        assert_eq!(try_at(last + 2 * GOOD_FOR, &|_| Ok(5)), [at_once]);
        // A driver that does not know how.
        let old = |way| match way {
            ClockQuery::Now => Err(libc::EPROTONOSUPPORT),
            ClockQuery::Patient => Ok(5),
        };
        let later = last + 4 * GOOD_FOR;
        assert_eq!(try_at(later, &old), [at_once, patient]);
        assert_eq!(try_at(later + GOOD_FOR, &old), []);
    }

    #[test]
    fn a_wall_clock_behind_the_device_or_set_back_is_no_trouble() {
        let bounds = Bounds::new(u64::MAX - 5, 100, 200);
        assert_eq!(bounds.low, 106);
        assert_eq!(Bounds::new(5000, 1000, 1010).middle(), -3995);
        let bounds = Bounds::new(0, 1000, 10);
        assert_eq!(bounds.nearest(7), 1000);
    }

    #[test]
    fn ticks_become_nanoseconds() {
        assert_eq!(nanoseconds(u64::MAX, 1_000_000), u64::MAX);
        assert_eq!(nanoseconds(1_000_000_000_000, 250_000), 4_000_000_000_000);
        assert_eq!(nanoseconds(7, 0), 0);
    }

    #[test]
    fn times_between_comparisons_are_arithmetic() {
        let clock = Clock::new(1_000_000, 64);
        let at = now();
        clock.compared.store(at, Ordering::Relaxed);
        clock.difference.store(5_000_000, Ordering::Relaxed);
        // The device is not asked while the last comparison is good.
        clock.keep_up_at(at + GOOD_FOR, |_| unreachable!());
        assert_eq!(clock.wall_time(20_000), 5_020_000);
        assert_eq!(clock.wall_time(2_000), 5_002_000);
    }

    #[test]
    fn a_clock_of_few_bits_begins_again_and_times_go_on() {
        const SECOND: u64 = 1_000_000_000;
        for (khz, bits) in [(1_000_000, 32), (250_000, 33), (2_000_000, 40)] {
            let clock = Clock::new(khz, bits);
            let (start, wall) = (77 * SECOND, 1_700_000_000 * SECOND);
            // Half a second before it begins again.
            let first = clock.mask() - ticks_in(SECOND / 2, khz);
            let said = |after: u64| first.wrapping_add(ticks_in(after, khz)) & clock.mask();
            let compare = |after: u64| {
                let ticks = clock.note(said(after), start + after, start + after);
                let device = nanoseconds(ticks.unwrap(), khz);
                let bounds = Bounds::new(device, wall + after, wall + after);
                clock.difference.store(bounds.middle(), Ordering::Relaxed);
            };
            let check = |of: u64, read: u64| {
                let told = clock.wall_time_at(said(of), start + read);
                let off = told.abs_diff(wall + of);
                assert!(
                    off < 5000,
                    "{bits} bits at {khz} kHz: {of} at {read}: {off}"
                );
            };
            compare(0);
            for of in [0, SECOND / 4, SECOND] {
                check(of, of);
                check(of, of + SECOND);
                // It lay in its queue for most of a turn.
                check(of, of + nanoseconds(clock.mask() / 100 * 87, khz));
            }
            // Stamped before it began again, read after the next comparison; then nothing for long.
            compare(SECOND);
            check(SECOND / 4, SECOND + 1);
            check(100 * SECOND, 100 * SECOND);
            compare(101 * SECOND);
            check(100 * SECOND, 101 * SECOND);
            check(102 * SECOND, 103 * SECOND);
        }
    }

    #[test]
    fn a_comparison_that_takes_most_of_a_turn_tells_nothing() {
        const SECOND: u64 = 1_000_000_000;
        let clock = Clock::new(1_000_000, 32);
        clock.note(5, SECOND, SECOND + 1000).unwrap();
        let origin = clock.origin.load(Ordering::Relaxed);
        // The answer was there at once; the process went on three seconds later.
        assert_eq!(clock.note(1005, SECOND + 1000, 4 * SECOND), None);
        assert_eq!(clock.origin.load(Ordering::Relaxed), origin);
        // With 64 bits there is no doubt.
        let clock = Clock::new(1_000_000, 64);
        assert_eq!(clock.note(1005, SECOND, 4 * SECOND), Some(1005));
    }

    #[test]
    fn a_clock_has_as_many_bits_as_the_driver_says() {
        assert_eq!(Clock::new(1000, 32).mask(), 0xffff_ffff);
        assert_eq!(Clock::new(1000, 64).mask(), u64::MAX);
    }
}
